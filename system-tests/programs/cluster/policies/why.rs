//! `nebula-cni-agent why` in a real two-node cluster: something is broken, and it names this cause and no other.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::capture::town::{Town, list};
use super::super::nodes::agent_of;
use super::grid::{Grid, Pod, Way};
use super::site;
use crate::world::kube::{NAMESPACE, text};
use crate::world::pod_traffic::within;

/// The pod that sends, on node 2.
const FROM: Pod = Pod { namespace: 'x', name: 'a' };
/// The pod that receives, on node 1.
const TO: Pod = Pod { namespace: 'y', name: 'a' };
/// No server of the grid listens there.
const PORT: u16 = 90;
const WITHIN: Duration = Duration::from_secs(40);

struct Site {
    town: Town,
    grid: Grid,
}

impl Site {
    fn ask_on(&self, node: u8, from: &str, to: &str, with: Option<&str>) -> String {
        let agent = agent_of(&self.town.nodes, node);
        let mut words =
            vec!["exec", "-i", "-n", NAMESPACE, &agent, "--", "nebula-cni-agent", "why", "--json", from, to];
        if with.is_some() {
            words.extend(["--with", "-"]);
        }
        let mut asked = self.town.nodes.tool("run");
        asked.arg("kubectl").args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = asked.spawn().expect("kubectl runs");
        let mut input = child.stdin.take().expect("its input");
        input.write_all(with.unwrap_or_default().as_bytes()).expect("it reads");
        drop(input);
        let said = child.wait_with_output().expect("it ends");
        // 3 and 4 say that something is broken, or not all is known; kubectl says so on its own output.
        assert!(said.stdout.starts_with(b"{"), "{}", text(&said));
        String::from_utf8_lossy(&said.stdout).into_owned()
    }
}

impl Site {
    /// Opens a connection, whatever comes of it.
    fn knock(&self) {
        let address = SocketAddr::new(self.grid.address(TO, Way::V4), 80);
        let _ =
            within(self.grid.network(FROM), move || TcpStream::connect_timeout(&address, Duration::from_millis(500)));
    }

    /// Sends, so that there is something to be seen, and asks until this is the cause; `None`: nothing is broken.
    fn expect(&self, what: &str, (from, to): (&str, &str), cause: Option<&str>) {
        let began = Instant::now();
        loop {
            self.knock();
            let there = self.ask_on(1, from, to, None);
            let said = self.ask_on(2, from, to, Some(&there));
            let report = serde_json::from_str::<Value>(&said).expect("JSON")["report"].take();
            let mut steps = report["steps"].as_array().expect("steps").iter();
            let is_whole = steps.all(|step| step["standing"] == "fine");
            if report["word"].as_str() == cause && (cause.is_some() || is_whole) {
                break;
            }
            assert!(began.elapsed() < WITHIN, "{what}: {report:#}\n{}", self.town.details());
        }
        println!("{what}: {}", cause.unwrap_or("nothing is broken"));
    }

    /// With these objects in the cluster, until they are gone again.
    fn with(&self, what: &str, objects: &[Value], flow: (&str, &str), cause: &str) {
        self.town.nodes.apply("broken.json", &list(objects));
        self.expect(what, flow, Some(cause));
        let path = self.town.nodes.folder.path().join("broken.json").display().to_string();
        self.town.nodes.kubectl(&["delete", "-f", &path, "--wait=false"]);
    }
}

fn service(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "y", "name": name}, "spec": spec})
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn why_names_what_is_broken_and_nothing_else() {
    let (town, grid) = site();
    let site = Site { town, grid };
    let usual = ("x/a", "y/a:80");
    site.expect("all is well", usual, None);
    site.expect("by its pod", ("x/a", "pod/y/a:80"), None);

    // Names, Services and endpoints.
    for (what, flow, cause) in [
        ("no such pod sends", ("x/nobody", "y/a:80"), "source-unknown"),
        ("nothing has that name", ("x/a", "y/nobody:80"), "target-unknown"),
        ("the Service has another port", ("x/a", "service/y/a:8080"), "service-without-port"),
        ("nobody listens", ("x/a", "pod/y/a:90"), "nobody-listens"),
    ] {
        site.expect(what, flow, Some(cause));
    }
    let port = json!([{"port": 80}]);
    let of = |selector: Value| service("broken", json!({"selector": selector, "ports": port}));
    site.with("no pod is selected", &[of(json!({"pod": "nobody"}))], ("x/a", "y/broken:80"), "no-pod-selected");
    let nobody = service("empty", json!({"ports": port}));
    site.with("the Service selects nothing", &[nobody], ("x/a", "y/empty:80"), "service-without-selector");
    let named = service("named", json!({"type": "ExternalName", "externalName": "db.example.org"}));
    site.with("it stands for another name", &[named], ("x/a", "y/named:80"), "external-name");
    let sick = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "y", "name": "sick", "labels": {"pod": "sick"}},
        "spec": {"nodeName": "node2", "terminationGracePeriodSeconds": 0, "containers": [{
            "name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent", "command": ["sleep", "36000"],
            "readinessProbe": {"exec": {"command": ["false"]}}}]}});
    let of_sick = of(json!({"pod": "sick"}));
    site.with("no endpoint is ready", &[sick, of_sick], ("x/a", "y/broken:80"), "no-endpoint-ready");
    let pending = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "y", "name": "pending"},
        "spec": {"nodeSelector": {"nobody": "has-this"}, "containers": [{"name": "c", "image": "localhost/busybox:1"}]}});
    site.with("the pod has no node", &[pending], ("x/a", "y/pending:80"), "target-not-running");

    // Policies at either end.
    let closed = |namespace: &str, kind: &str| {
        json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
               "metadata": {"namespace": namespace, "name": "closed"},
               "spec": {"podSelector": {}, "policyTypes": [kind]}})
    };
    site.with("the destination is isolated", &[closed("y", "Ingress")], usual, "ingress-policy");
    site.with("the source is isolated", &[closed("x", "Egress")], usual, "egress-policy");

    // A server that listens on loopback only.
    let network = site.grid.network(TO).to_owned();
    let listener = within(&network, || TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)).expect("a port"));
    site.expect("it listens on loopback", ("x/a", "pod/y/a:90"), Some("listens-on-loopback"));
    drop(listener);

    // An instance that stands still, and a network between the nodes that takes no UDP.
    let pid = site.town.instance_pid(1, "y/a");
    site.town.nodes.shell(1, &format!("kill -STOP {pid}"));
    site.expect("the instance stands still", usual, Some("destination-instance-silent"));
    site.town.nodes.shell(1, &format!("kill -CONT {pid}"));
    site.expect("it goes on", usual, None);
    for (node, chain, cause) in [(1, "INPUT", "peer-silent"), (2, "OUTPUT", "cannot-send")] {
        let rule = |verb: &str| format!("iptables -w -{verb} {chain} -p udp --dport 1024: -j DROP");
        site.town.nodes.shell(node, &rule("A"));
        // Its next instance has no tunnel.
        site.town.nodes.shell(2, &format!("kill -KILL {}", site.town.instance_pid(2, "x/a")));
        site.expect("UDP does not pass between the nodes", usual, Some(cause));
        site.town.nodes.shell(node, &rule("D"));
        site.expect("all is well again", usual, None);
    }
}
