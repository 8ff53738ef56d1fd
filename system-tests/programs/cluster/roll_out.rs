//! `helm upgrade` brings another program to pods that run, and `helm rollback` brings the one of before back: the same
//! containers, with the same connections. `./test kube` runs it where a build of Kubernetes is available.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::capture::town::Town;
use super::helm::{Helm, values};
use super::nodes::agent_of;
use crate::world::cluster::binary;
use crate::world::kube::{DELETED_WITHIN, NAMESPACE, Nodes, text};
use crate::world::pod_traffic::{Asker, EchoServer};

const INSTANCE: &str = "nebula-cni-instance";
/// From Helm's end to the last instance. The canary of each node takes ten seconds of it.
const ROLLED_WITHIN: Duration = Duration::from_secs(90);
/// Longer than any gap of a hand-over, also on a machine that makes everything else again meanwhile.
const SHORT: Duration = Duration::from_millis(500);

/// The pods, and their nodes.
const PODS: [(&str, &str); 4] = [("web", "test-node"), ("db", "node2"), ("more", "test-node"), ("other", "node2")];

struct Site<'a> {
    nodes: &'a Nodes,
    askers: Vec<Asker>,
    _servers: Vec<EchoServer>,
}

impl<'a> Site<'a> {
    /// The pods, each of which speaks on one connection with another one, through their tunnels.
    fn new(nodes: &'a Nodes) -> Self {
        for (name, node) in PODS {
            nodes.pod("shop", name, node);
            nodes.wait_for_pod("shop", name);
        }
        let networks = nodes.pod_networks();
        let network = |name: &str| networks[&format!("shop/{name}")].clone();
        let servers = PODS.map(|(name, _)| EchoServer::start(&network(name), name)).into();
        let ask = |from: &str, to: &str| {
            let at: IpAddr = nodes.overlay("shop", to).expect("a tunnel").parse().expect("an address");
            assert!(nodes.ping("shop", from, &at.to_string()), "{from} does not reach {to}\n{}", nodes.state());
            Asker::of_one_connection(&network(from), SocketAddr::new(at, 9000))
        };
        let askers = vec![ask("web", "db"), ask("db", "more"), ask("more", "other"), ask("other", "web")];
        Self { nodes, askers, _servers: servers }
    }

    /// SHA-256 of the programs that the instances of both nodes run. Nobody reaps those that ended: the first process
    /// of a node is containerd.
    fn programs(&self) -> Vec<String> {
        let script = "for pid in $(pgrep nebula-cni-ins); do sha256sum /proc/$pid/exe 2>/dev/null; done";
        let all = [1, 2].map(|node| text(&self.nodes.on(node, &["sh", "-c", script])));
        let digests = all.iter().flat_map(|said| said.lines()).filter_map(|line| line.split_whitespace().next());
        digests.map(str::to_owned).collect()
    }

    /// The containers of the pods, and how often each was started again.
    fn containers(&self) -> Vec<(Value, Value)> {
        let all = PODS.map(|(name, _)| self.nodes.status("shop", name)["containerStatuses"][0].clone());
        all.map(|mut status| (status["containerID"].take(), status["restartCount"].take())).into()
    }

    /// Helm changes the release, and all instances get the program with this digest. No connection ends.
    fn rolls(&self, what: &str, digest: &str, helm: impl FnOnce()) {
        let (began, containers) = (Instant::now(), self.containers());
        helm();
        let waiting = Instant::now();
        let took = loop {
            let programs = self.programs();
            if programs == vec![digest; PODS.len()] {
                break waiting.elapsed();
            }
            assert!(
                waiting.elapsed() < ROLLED_WITHIN,
                "{what}: {programs:?} are not all {digest}\n{}",
                self.nodes.state()
            );
            std::thread::sleep(Duration::from_millis(200));
        };
        // What belongs to a gap is over.
        std::thread::sleep(Duration::from_secs(1));
        let end = Instant::now();
        let courses: Vec<_> = self.askers.iter().map(Asker::course).collect();
        let longest = courses.iter().map(|course| course.longest_gap(began, end)).max().unwrap_or_default();
        println!("{what}: all instances {took:?} after Helm; the longest silence of a connection: {longest:?}");
        for course in courses {
            assert_eq!(course.failures_since(began), Vec::<String>::new(), "{what}\n{}", self.nodes.state());
        }
        assert!(longest < SHORT, "{longest:?}\n{}", self.nodes.state());
        assert_eq!(self.containers(), containers, "pods go on as they are");
        for node in 1..=2 {
            let agent = agent_of(self.nodes, node);
            let words = ["exec", "-n", NAMESPACE, &agent, "--", "nebula-cni-agent", "upgrade", "status", "--json"];
            // The last instances are watched for a moment.
            self.nodes.until("the roll-out ends", ROLLED_WITHIN, || {
                let said = self.nodes.kubectl(&words);
                let status: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
                assert_eq!((&status["paused"], &status["failed"]), (&Value::Null, &json!([])), "{status:#}");
                status["stage"] == "current"
            });
        }
    }
}

fn digest(program: &Path) -> String {
    let said = std::process::Command::new("sha256sum").arg(program).output().expect("sha256sum runs");
    text(&said).split_whitespace().next().expect("a digest").to_owned()
}

#[test]
#[ignore = "needs root, containerd, etcd, dnsmasq, a release build, Helm's packages and a build of Kubernetes"]
fn helm_upgrade_brings_another_program_to_running_pods_and_helm_rollback_the_one_before() {
    let town = Town::bare();
    let nodes = &town.nodes;
    let helm = Helm::new(nodes);
    helm.install(&values(&["shop"]), &town);
    let site = Site::new(nodes);
    let first = digest(&binary(INSTANCE));
    assert_eq!(site.programs(), vec![first.clone(); PODS.len()]);

    // Another release, as far as an instance is concerned: a program that does the same.
    let another = nodes.folder.path().join(INSTANCE);
    fs::copy(binary(INSTANCE), &another).expect("a copy");
    let mut file = fs::File::options().append(true).open(&another).expect("the copy");
    file.write_all(b"another release").expect("it is written");
    drop(file);
    let of_release = |name: &str| if name == INSTANCE { another.clone() } else { binary(name) };
    nodes.import("next", |name| of_release(name).display().to_string());
    let mut next = values(&["shop"]);
    next["image"] = json!({"tag": "next"});
    site.rolls("helm upgrade", &digest(&another), || {
        helm.succeeds("upgrade", helm.start_with("upgrade", &next));
    });
    site.rolls("helm rollback", &first, || {
        helm.succeeds("rollback", helm.start(&["rollback", "1"]));
    });
    drop(site);
    for (name, _) in PODS {
        nodes.kubectl(&["delete", "pod", "-n", "shop", name, DELETED_WITHIN]);
    }
}
