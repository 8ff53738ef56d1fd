//! What happens on a node of a real cluster, in random orders: its kubelet and its agent end, it reboots, the primary
//! rewrites its file, the CA is away, pods come and go. Every enrolled pod reaches its peer in the end, and none ever
//! sends a packet in clear: pods talk from their first instruction on, and every link of the node is captured.
//! `./test kube` runs it where a build of Kubernetes is available; `agent_orders` has many more orders beside
//! containerd alone.
//!
//! `KUBE_ORDERS` (3) is the number of orders; `KUBE_SEED` repeats a run.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::thread;
use std::time::{Duration, Instant};

use crate::cluster::nodes::install;
use crate::world::chaos::{Random, number};
use crate::world::clear::Listener;
use crate::world::kube::{DELETED_WITHIN, NAMESPACE, Nodes, text};

const QUIET_WITHIN: Duration = Duration::from_secs(120);
const PRIMARY: &str = "/etc/cni/net.d/10-bridge.conflist";

const STEPS: [Step; 10] = [
    Step::PodStarts,
    Step::KubeletRestarts,
    Step::AgentEnds,
    Step::PodStarts,
    Step::PrimaryRewrites,
    Step::CaGoes,
    Step::PodStarts,
    Step::CaReturns,
    Step::PodEnds,
    Step::NodeReboots,
];

#[derive(Debug, Clone, Copy)]
enum Step {
    PrimaryRewrites,
    KubeletRestarts,
    NodeReboots,
    AgentEnds,
    CaGoes,
    CaReturns,
    PodStarts,
    PodEnds,
}

/// The second node, which all happens on, and a peer on the first.
struct Site {
    nodes: Nodes,
    peer: String,
    random: Random,
    pods: Vec<String>,
    last_number: u32,
}

#[test]
#[ignore = "needs root, containerd, etcd, a release build and a build of Kubernetes"]
fn in_whatever_order_a_node_of_a_cluster_lives_no_enrolled_pod_sends_in_clear() {
    let (orders, seed) = (number("KUBE_ORDERS", 3), number("KUBE_SEED", u64::from(std::process::id())));
    println!("KUBE_ORDERS={orders} KUBE_SEED={seed}");
    let mut site = Site::new(Random::new(seed));
    let listener = Listener::start(&site.nodes.namespace_of(2));
    // The capture hears what is not in a tunnel.
    site.nodes.on(2, &["ip", "route", "add", "10.42.255.254", "via", "192.0.2.10"]);
    site.nodes.on(2, &["ping", "-c", "1", "-W", "1", "10.42.255.254"]);
    assert!(!listener.clear().sources.is_empty(), "the capture hears nothing");
    thread::sleep(Duration::from_secs(2));
    listener.forget();
    for order in 1..=orders {
        let mut steps = STEPS;
        for last in (1..steps.len()).rev() {
            steps.swap(last, site.random.below(last + 1));
        }
        println!("order {order}: {steps:?}");
        let began = Instant::now();
        for step in steps {
            site.happen(step);
            thread::sleep(Duration::from_millis(site.random.below(3000) as u64));
        }
        // It may have gone after it returned.
        site.happen(Step::CaReturns);
        let quiet = site.come_to_rest();
        let clear = listener.clear();
        assert!(clear.sources.is_empty(), "{clear:?}\n{}", site.nodes.state());
        println!(
            "  {:.0} s; {} pods reach their peer {:.0} s after the last step",
            began.elapsed().as_secs_f64(),
            site.pods.len(),
            quiet.as_secs_f64()
        );
        while !site.pods.is_empty() {
            site.happen(Step::PodEnds);
        }
    }
}

impl Site {
    fn new(random: Random) -> Self {
        let nodes = Nodes::with_proxy(&[]);
        nodes.kubectl(&["create", "namespace", "shop"]);
        install(&nodes);
        nodes.pod("shop", "peer", "test-node");
        nodes.wait_for_pod("shop", "peer");
        let peer = nodes.overlay("shop", "peer").unwrap_or_else(|| panic!("no tunnel\n{}", nodes.state()));
        Self { nodes, peer, random, pods: Vec::new(), last_number: 0 }
    }

    fn happen(&mut self, step: Step) {
        let nodes = &self.nodes;
        match step {
            Step::PrimaryRewrites => {
                let mtu = 1300 + self.random.below(200);
                // Whole, as network plugins do.
                let script = format!(
                    "sed 's/\"bridge\": \"cni0\",\\( \"mtu\": [0-9]*,\\)\\?/\"bridge\": \"cni0\", \"mtu\": {mtu},/' {PRIMARY} \
                     >/etc/cni/net.d/new && mv /etc/cni/net.d/new {PRIMARY} && grep -q {mtu} {PRIMARY}"
                );
                let rewritten = nodes.on(2, &["sh", "-c", &script]);
                assert!(rewritten.status.success(), "{}", text(&rewritten));
            }
            Step::KubeletRestarts | Step::NodeReboots => {
                let verb = if matches!(step, Step::NodeReboots) { "reboot" } else { "kubelet" };
                let done = nodes.tool(verb).arg("2").output().expect("kube-nodes.sh runs");
                assert!(done.status.success(), "{verb}: {}\n{}", text(&done), nodes.state());
            }
            Step::AgentEnds => {
                let of_node = ["--field-selector=spec.nodeName=node2", "-l", "app.kubernetes.io/name=nebula-cni-agent"];
                let delete = ["delete", "pod", "-n", NAMESPACE, "--grace-period=0", "--force"];
                nodes.kubectl(&[&delete[..], &of_node[..]].concat());
            }
            Step::CaGoes | Step::CaReturns => {
                let replicas = if matches!(step, Step::CaGoes) { "--replicas=0" } else { "--replicas=1" };
                nodes.kubectl(&["scale", "-n", NAMESPACE, "deployment/nebula-ca", replicas]);
            }
            Step::PodStarts => {
                self.last_number += 1;
                let name = format!("talker-{}", self.last_number);
                let talk = format!("while :; do ping -q -i 0.2 -w 60 {}; done", self.peer);
                nodes.pod_that_runs("shop", &name, "node2", &["sh", "-c", &talk]);
                self.pods.push(name);
            }
            Step::PodEnds => {
                if !self.pods.is_empty() {
                    let name = self.pods.swap_remove(self.random.below(self.pods.len()));
                    nodes.kubectl(&["delete", "pod", "-n", "shop", &name, DELETED_WITHIN]);
                }
            }
        }
    }

    /// Until the agents are ready and all pods reach their peer. Returns how long that took.
    fn come_to_rest(&self) -> Duration {
        let nodes = &self.nodes;
        let start = Instant::now();
        nodes.until("the pods reach their peer", QUIET_WITHIN, || {
            self.pods.iter().all(|name| nodes.ping("shop", name, &self.peer))
        });
        nodes.wait_for_parts(start + QUIET_WITHIN);
        start.elapsed()
    }
}
