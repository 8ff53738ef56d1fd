//! Nebula as the only network of a real two-node cluster: no other network plugin is on the nodes. Helm installs the
//! chart with `network.primary.enabled`. Then every line of the Kubernetes network model is tried, with counters on
//! the wire between the nodes, and again after a node has changed its address, rebooted, left and joined.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::capture::town::{before, list};
use super::helm::Helm;
use super::nodes::agent_of;
use crate::world::kube::{DELETED_WITHIN, NAMESPACE, Nodes, text};
use crate::world::pod_traffic::{EchoServer, OPEN, ask_udp, within};

const PORT: u16 = 9000;
/// Address of cluster DNS.
const DNS: &str = "10.96.0.10";
/// Of the second node, later.
const READDRESSED: [&str; 2] = ["192.0.2.21", "fd00:192::21"];
const RANGES: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];
/// From the command that installs everything.
const READY_WITHIN: Duration = Duration::from_secs(60);
const REACHED_WITHIN: Duration = Duration::from_secs(30);
/// Namespace, name and node of each pod. Those of `shop` are enrolled.
const PODS: [(&str, &str, &str); 6] = [
    ("shop", "web", "test-node"),
    ("shop", "db", "node2"),
    ("other", "near", "test-node"),
    ("other", "beside", "test-node"),
    ("other", "far", "node2"),
    ("kube-system", "dns", "test-node"),
];

/// Somebody who sends.
struct Place {
    name: String,
    network: PathBuf,
    /// Of a pod, of both families.
    addresses: Vec<IpAddr>,
}

struct Site {
    nodes: Nodes,
    pods: Vec<Place>,
    _servers: Vec<EchoServer>,
    dns: Option<Child>,
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn are_ready(nodes: &Nodes) -> bool {
    nodes.kubectl(&["get", "nodes", "-o", "jsonpath={.items[*].status.conditions[-1:].status}"]) == "True True"
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(dns) = &mut self.dns {
            let _ = dns.kill();
            let _ = dns.wait();
        }
    }
}

impl Site {
    /// Nodes without a network, and everything that the chart makes.
    fn install() -> Self {
        let nodes = Nodes::without_network(&[]);
        assert!(!are_ready(&nodes), "the nodes are ready without a network");
        let site = Self::prepared(nodes);
        let helm = Helm::new(&site.nodes);
        let start = Instant::now();
        let installing = helm.start_with_file("install", &repository(".ci/chart/primary-values.yaml"));
        site.nodes.until("all nodes are ready", Duration::from_secs(180), || are_ready(&site.nodes));
        let ready = start.elapsed();
        helm.succeeds("install", installing);
        site.wait_for_parts();
        println!(
            "from the command to all nodes ready: {:.1} s; to all parts ready: {:.1} s",
            ready.as_secs_f64(),
            start.elapsed().as_secs_f64()
        );
        assert!(ready < READY_WITHIN, "{ready:?}\n{}", site.nodes.state());
        site
    }

    /// With all that a cluster has beforehand.
    fn prepared(nodes: Nodes) -> Self {
        for namespace in [NAMESPACE, "shop", "other"] {
            nodes.kubectl(&["create", "namespace", namespace]);
        }
        // All but the pod of cluster DNS, for which there may be no network yet.
        let known: Vec<Value> = before().into_iter().filter(|object| object["kind"] != "Pod").collect();
        nodes.apply("before.json", &list(&known));
        nodes.volume();
        Self { nodes, pods: Vec::new(), _servers: Vec::new(), dns: None }
    }

    /// Everything that the chart makes, changed.
    fn apply_chart(&self, change: impl FnOnce(String) -> String) {
        let manifests = std::fs::read_to_string(repository(".ci/chart/primary.yaml")).expect("what the chart makes");
        let manifests = manifests.replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n");
        self.nodes.apply("nebula.yaml", &change(manifests));
    }

    fn wait_for_parts(&self) {
        self.nodes.wait_for_parts(Instant::now() + Duration::from_secs(120));
        self.nodes.wait_for_rollout(NAMESPACE, "daemonset/nebula-gateway", Duration::from_secs(60));
    }

    /// Drains a node, gives it the label or takes it away, and makes its pods again once its network is the other one.
    fn move_node(&mut self, node: u8, is_ours: bool) {
        let name = if node == 1 { "test-node" } else { "node2" };
        let own: Vec<_> = PODS.iter().filter(|(.., on)| *on == name).collect();
        for (namespace, pod, _) in &own {
            self.nodes.kubectl(&["delete", "pod", "-n", namespace, pod, DELETED_WITHIN]);
        }
        let label = if is_ours { "nebula-cni/primary=true" } else { "nebula-cni/primary-" };
        self.nodes.kubectl(&["label", "node", name, label]);
        let file = self.nodes.root_of(node).join("etc/cni/net.d/00-nebula-nebula.conflist");
        self.nodes.until("the node has the other network", Duration::from_secs(30), || file.exists() == is_ours);
        self.nodes.until("the runtime has it", Duration::from_secs(60), || are_ready(&self.nodes));
        self.wait_for_parts();
        let objects: Vec<Value> = own.iter().map(|(namespace, pod_name, _)| pod(namespace, pod_name, name)).collect();
        self.nodes.apply("moved.json", &list(&objects));
        for (namespace, pod, _) in own {
            self.nodes.wait_for_pod(namespace, pod);
        }
        self.attend();
        println!(
            "node {node} moved: {}",
            if is_ours { "its network is ours" } else { "its network is the bridge again" }
        );
    }

    /// Makes those of the pods that are not there, and what answers in them.
    fn populate(&mut self) {
        let mut objects: Vec<Value> = PODS.iter().map(|(namespace, name, node)| pod(namespace, name, node)).collect();
        objects.push(service(
            "shop",
            "db",
            "db",
            &json!([{"name": "echo", "port": 7, "targetPort": PORT, "protocol": "UDP"}]),
        ));
        objects.push(service(
            "other",
            "far",
            "far",
            &json!([{"name": "echo", "port": 7, "targetPort": PORT, "protocol": "UDP"}]),
        ));
        self.nodes.apply("pods.json", &list(&objects));
        for (namespace, name, _) in PODS {
            self.nodes.wait_for_pod(namespace, name);
        }
        self.attend();
    }

    /// Finds the pods, which may have been started again, and has something answer in each.
    fn attend(&mut self) {
        let networks = self.nodes.pod_networks();
        self._servers.clear();
        self.pods = PODS
            .iter()
            .map(|(namespace, name, _)| {
                let shown = self.nodes.status(namespace, name)["podIPs"].clone();
                let addresses =
                    shown.as_array().into_iter().flatten().filter_map(|entry| entry["ip"].as_str()?.parse().ok());
                let network = networks[&format!("{namespace}/{name}")].clone();
                Place { name: (*name).to_owned(), network, addresses: addresses.collect() }
            })
            .collect();
        for pod in &self.pods {
            assert_eq!(pod.addresses.len(), 2, "{}: {:?}\n{}", pod.name, pod.addresses, self.nodes.state());
        }
        self._servers = self.pods.iter().map(|pod| EchoServer::start(&pod.network, &pod.name)).collect();
    }

    fn node(&self, number: u8) -> Place {
        let network = PathBuf::from("/run/netns").join(self.nodes.namespace_of(number));
        Place { name: format!("node {number}"), network, addresses: Vec::new() }
    }

    fn pod(&self, name: &str) -> &Place {
        self.pods.iter().find(|pod| pod.name == name).expect("a pod")
    }

    /// Asks until there is an answer, and returns from which address the question came.
    fn ask(&self, from: &Place, target: SocketAddr, expected: &str) -> String {
        let until = Instant::now() + REACHED_WITHIN;
        loop {
            match within(&from.network, move || ask_udp(target, OPEN)) {
                Ok(answer) => {
                    assert_eq!(answer.pod, expected, "{} asked {target}", from.name);
                    return answer.from;
                }
                Err(error) if Instant::now() > until => {
                    panic!("{} -> {target} ({expected}): {error}\n{}", from.name, self.details())
                }
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Everybody reaches every pod at its own address, and is seen with its own.
    fn all_reach_all(&self) {
        let nodes = [1, 2].map(|number| self.node(number));
        for from in self.pods.iter().chain(&nodes) {
            for to in self.pods.iter().filter(|to| to.name != from.name) {
                for address in &to.addresses {
                    let seen = self.ask(from, (*address, PORT).into(), &to.name);
                    let own = from.addresses.iter().find(|own| own.is_ipv4() == address.is_ipv4());
                    if let Some(own) = own {
                        assert_eq!(seen, own.to_string(), "{} -> {address}", from.name);
                    }
                }
            }
        }
    }

    /// A stream of more than one packet, which the smaller device between the nodes must let pass.
    fn streams(&self, from: &str, to: &str) {
        for address in &self.pod(to).addresses {
            let target = SocketAddr::new(*address, PORT);
            let sent: Vec<u8> = (0..1_u32 << 20).map(|number| (number % 251) as u8).collect();
            let expected = sent.clone();
            let back = within(&self.pod(from).network, move || {
                let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
                stream.set_read_timeout(Some(Duration::from_secs(10)))?;
                let mut writer = stream.try_clone()?;
                let writing = std::thread::spawn(move || writer.write_all(&sent));
                let mut back = vec![0; 1 << 20];
                stream.read_exact(&mut back)?;
                writing.join().expect("it writes")?;
                std::io::Result::Ok(back)
            });
            assert!(back.is_ok_and(|back| back == expected), "{from} -> {target}\n{}", self.details());
        }
    }

    fn cluster_ip(&self, namespace: &str, name: &str) -> IpAddr {
        let path = "jsonpath={.spec.clusterIP}";
        self.nodes.kubectl(&["get", "service", "-n", namespace, name, "-o", path]).parse().expect("an address")
    }

    /// Starts what answers in the pod of cluster DNS.
    fn serve_names(&mut self) {
        if let Some(mut before) = self.dns.take() {
            let _ = before.kill();
            let _ = before.wait();
        }
        let name = format!("--address=/db.shop.svc.cluster.local/{}", self.cluster_ip("shop", "db"));
        let dns = Command::new("nsenter")
            .arg(format!("--net={}", self.pod("dns").network.display()))
            .args(["dnsmasq", "--keep-in-foreground", "--user=root", "--no-resolv", "--no-hosts", "--pid-file=", &name])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.dns = Some(dns.expect("dnsmasq runs"));
    }

    fn resolves(&self, namespace: &str, pod: &str, expected: IpAddr) {
        let words = ["exec", "-n", namespace, pod, "--", "nslookup", "db.shop.svc.cluster.local", DNS];
        self.nodes.until("a name is resolved", REACHED_WITHIN, || {
            text(&self.nodes.try_kubectl(&words)).contains(&expected.to_string())
        });
    }

    /// Counts packets on the wire between the nodes: of pods, and of gateways.
    fn count(&self, number: u8, device: &str) {
        let [v4, v6] = RANGES;
        let rules = format!(
            "table netdev wire {{\n chain c {{\n type filter hook ingress device \"{device}\" priority 0;\n \
             ip saddr {v4} counter\n ip daddr {v4} counter\n ip6 saddr {v6} counter\n ip6 daddr {v6} counter\n \
             udp dport {{ 4242, 4243, 32768-65535 }} counter\n }}\n}}\n"
        );
        let path = self.nodes.folder.path().join("wire.nft");
        std::fs::write(&path, rules).expect("write");
        let made = Command::new("nsenter")
            .arg(format!("--net={}", self.node(number).network.display()))
            .args(["nft", "-f", &path.display().to_string()])
            .output()
            .expect("nft runs");
        assert!(made.status.success(), "{}", text(&made));
    }

    /// What was counted: packets of pods in clear, and datagrams of tunnels.
    fn counted(&self, number: u8) -> (u64, u64) {
        let said = Command::new("nsenter")
            .arg(format!("--net={}", self.node(number).network.display()))
            .args(["nft", "-j", "list", "table", "netdev", "wire"])
            .output()
            .expect("nft runs");
        let found: Value = serde_json::from_slice(&said.stdout).expect("JSON");
        let rules =
            found["nftables"].as_array().expect("a list").iter().filter_map(|item| item["rule"]["expr"].as_array());
        let packets: Vec<u64> =
            rules.filter_map(|rule| rule.iter().find_map(|part| part["counter"]["packets"].as_u64())).collect();
        assert_eq!(packets.len(), 5, "{found}");
        (packets[..4].iter().sum(), packets[4])
    }

    fn gateway_file(&self, node: u8) -> String {
        std::fs::read_to_string(self.nodes.root_of(node).join("run/nebula-cni/gateway/config.yml")).unwrap_or_default()
    }

    fn details(&self) -> String {
        let of_node = |node: u8| {
            let words = "ip -4 route; ip -6 route; ip -br addr; cat /etc/cni/net.d/*; nft list ruleset | head -200";
            text(&self.nodes.on(node, &["sh", "-c", words]))
        };
        let words = ["logs", "-n", NAMESPACE, "-l", "app.kubernetes.io/name=nebula-gateway", "--tail=40", "--prefix"];
        let gateways = text(&self.nodes.try_kubectl(&words));
        format!("{}\n== node 1\n{}\n== node 2\n{}\n{gateways}", self.nodes.state(), of_node(1), of_node(2))
    }
}

fn pod(namespace: &str, name: &str, node: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": namespace, "name": name, "labels": {"app": name}},
        "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
                 "containers": [{"name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
                                 "command": ["sleep", "36000"]}]}})
}

fn service(namespace: &str, name: &str, app: &str, ports: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": namespace, "name": name},
        "spec": {"selector": {"app": app}, "ports": ports}})
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn a_cluster_needs_no_other_network_and_all_between_its_nodes_is_in_tunnels() {
    let mut site = Site::install();
    site.populate();
    site.count(2, "eth0");
    site.count(1, "n11");
    site.all_reach_all();
    site.streams("near", "far");
    site.streams("web", "db");
    site.streams("far", "web");

    // Gateways renew their certificates, and their agents see that they run.
    let words = ["logs", "-n", NAMESPACE, "-l", "app.kubernetes.io/name=nebula-gateway", "--tail=-1"];
    let said = site.nodes.kubectl(&words);
    assert!(!said.contains("is not renewed") && !said.contains("nebula-enrol ended"), "{said}");
    for node in [1, 2] {
        let agent = agent_of(&site.nodes, node);
        let words = ["exec", "-n", NAMESPACE, &agent, "--", "/nebula-cni-agent", "status"];
        site.nodes.until("the agent sees the gateway", Duration::from_secs(30), || {
            let said = text(&site.nodes.try_kubectl(&words));
            said.lines().any(|line| line.starts_with("gateway ") && line.ends_with("and has tunnels"))
        });
    }

    // Services, from pods and from nodes, and names.
    for (namespace, name) in [("shop", "db"), ("other", "far")] {
        let address = SocketAddr::new(site.cluster_ip(namespace, name), 7);
        for from in site.pods.iter().filter(|pod| pod.name != name).chain(&[site.node(1), site.node(2)]) {
            site.ask(from, address, name);
        }
    }
    site.serve_names();
    let expected = site.cluster_ip("shop", "db");
    site.resolves("other", "far", expected);
    site.resolves("shop", "db", expected);

    // The outside sees an address of the node: nothing there has a route to pods.
    let kubelet: SocketAddr = "192.0.2.11:10250".parse().expect("an address");
    let reached =
        within(&site.pod("near").network, move || TcpStream::connect_timeout(&kubelet, Duration::from_secs(5)).is_ok());
    assert!(reached, "{}", site.details());

    for node in [1, 2] {
        let (clear, tunnels) = site.counted(node);
        assert_eq!(clear, 0, "packets of pods on the wire to node {node}\n{}", site.details());
        assert!(tunnels > 100, "the counters of node {node} are deaf: {tunnels}");
        println!("to node {node}: {tunnels} datagrams of tunnels, none of pods in clear");
    }

    // A node that changes its address.
    let readdressed = site.nodes.tool("readdress").args(READDRESSED).output().expect("kube-nodes.sh runs");
    assert!(readdressed.status.success(), "{}\n{}", text(&readdressed), site.nodes.state());
    let addresses = ["get", "node", "node2", "-o", "jsonpath={.status.addresses[?(@.type==\"InternalIP\")].address}"];
    site.nodes.until("the API server knows it", Duration::from_secs(30), || {
        site.nodes.kubectl(&addresses).split(' ').next() == Some(READDRESSED[0])
    });
    let start = Instant::now();
    site.all_reach_all();
    println!(
        "all reached all {:.1} s after the API server knew the node's other address",
        start.elapsed().as_secs_f64()
    );

    // A node that reboots.
    let rebooted = site.nodes.tool("reboot").arg("2").output().expect("kube-nodes.sh runs");
    assert!(rebooted.status.success(), "{}\n{}", text(&rebooted), site.nodes.state());
    site.nodes.until("the pods of the node are back", Duration::from_secs(120), || {
        let networks = site.nodes.pod_networks();
        PODS.iter().all(|(namespace, name, _)| {
            let status = site.nodes.status(namespace, name);
            let is_ready = status["conditions"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
            is_ready && networks.contains_key(&format!("{namespace}/{name}"))
        })
    });
    site.attend();
    site.all_reach_all();

    // A node that leaves takes its ways with it, and gets them again when it joins.
    let has_way = |site: &Site| site.gateway_file(1).contains("10.244.2.0/24");
    assert!(has_way(&site), "{}", site.gateway_file(1));
    site.nodes.kubectl(&["delete", "node", "node2"]);
    let left = site.nodes.until("its way is gone", Duration::from_secs(10), || !has_way(&site));
    let joined = site.nodes.tool("kubelet").arg("2").env("UNREADY", "1").output().expect("kube-nodes.sh runs");
    assert!(joined.status.success(), "{}", text(&joined));
    let ranges = json!({"spec": {"podCIDR": "10.244.2.0/24", "podCIDRs": ["10.244.2.0/24", "fd00:10:244:2::/64"]}});
    site.nodes.kubectl(&["patch", "node", "node2", "-p", &ranges.to_string()]);
    let known = site.nodes.until("its way is known again", Duration::from_secs(10), || has_way(&site));
    println!(
        "a node that left was known to have left after {:.1} s, one that joined after {:.1} s",
        left.as_secs_f64(),
        known.as_secs_f64()
    );
    site.nodes.until("the node is ready", Duration::from_secs(120), || are_ready(&site.nodes));
    site.nodes.wait_for_rollout(NAMESPACE, "daemonset/nebula-gateway", Duration::from_secs(120));
    let missing: Vec<Value> = PODS
        .iter()
        .filter(|(.., node)| *node == "node2")
        .map(|(namespace, name, node)| pod(namespace, name, node))
        .collect();
    site.nodes.until("its pods are made again", Duration::from_secs(60), || {
        site.nodes.apply("again.json", &list(&missing));
        let back = |(namespace, name, _): &(&str, &str, &str)| site.nodes.status(namespace, name)["phase"] == "Running";
        PODS.iter().all(back)
    });
    site.attend();
    site.all_reach_all();
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn a_cluster_moves_over_node_by_node_and_back_and_pods_of_both_kinds_reach_each_other() {
    let mut site = Site::prepared(Nodes::with_proxy(&[]));
    site.apply_chart(|manifests| {
        let labelled = "\"primaryNodes\": {\"nebula-cni/primary\": \"true\"},\n      \"gateway\": {";
        let changed = manifests.replacen("\"gateway\": {", labelled, 1);
        assert_ne!(changed, manifests);
        changed
    });
    site.wait_for_parts();
    site.populate();
    site.all_reach_all();
    for node in [2, 1] {
        site.move_node(node, true);
        site.all_reach_all();
    }
    // The network from before goes: the gateways are the only way then.
    let routes = [(1, "10.244.2.0/24", "fd00:10:244:2::/64"), (2, "10.244.1.0/24", "fd00:10:244:1::/64")];
    let via = |node: u8| if node == 1 { ["192.0.2.11", "fd00:192::11"] } else { ["192.0.2.10", "fd00:192::10"] };
    for (node, v4, v6) in routes {
        for (range, via) in [v4, v6].into_iter().zip(via(node)) {
            let said = site.nodes.on(node, &["ip", "route", "del", range, "via", via]);
            assert!(said.status.success(), "{}", text(&said));
        }
    }
    site.count(2, "eth0");
    site.count(1, "n11");
    site.all_reach_all();
    site.streams("near", "far");
    for node in [1, 2] {
        let (clear, tunnels) = site.counted(node);
        assert!(clear == 0 && tunnels > 50, "{clear} {tunnels}");
    }
    for (node, v4, v6) in routes {
        for (range, via) in [v4, v6].into_iter().zip(via(node)) {
            let said = site.nodes.on(node, &["ip", "route", "add", range, "via", via]);
            assert!(said.status.success(), "{}", text(&said));
        }
    }
    for node in [1, 2] {
        site.move_node(node, false);
        site.all_reach_all();
    }
}
