//! What the agents of full nodes need at rest, with fifty policies that select each of their pods.
//!
//! `KUBE_PODS` (60) is the number of pods on both nodes together; 200 fill them.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::capture::town::list;
use super::new_pods::{POLICIES, policy};
use super::site;
use crate::world::chaos::number;
use crate::world::kube::REPLACED_WITHIN;

/// With flow records, which have 8 MiB of it.
const RESIDENT_KIB: u64 = (15 + 8) << 10;
/// Started at once.
const BATCH: usize = 40;
/// What the start left behind is given back within a minute.
const RESTS: Duration = Duration::from_secs(75);

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes; prints figures"]
fn agents_of_full_nodes_with_fifty_policies_need_little() {
    let (town, _grid) = site();
    let policies: Vec<Value> = (0..POLICIES).map(policy).collect();
    town.nodes.apply("policies.json", &list(&policies));
    let pods: Vec<Value> = (0..number("KUBE_PODS", 60)).map(pod).collect();
    for (done, batch) in pods.chunks(BATCH).enumerate() {
        town.nodes.apply("batch.json", &list(batch));
        let expected = pods.len().min((done + 1) * BATCH);
        town.nodes.until("the pods run", REPLACED_WITHIN.max(Duration::from_secs(240)), || {
            let path = "jsonpath={.items[*].status.phase}";
            let phases = town.nodes.kubectl(&["get", "pods", "-n", "x", "-l", "app=new", "-o", path]);
            phases.split_whitespace().filter(|phase| *phase == "Running").count() == expected
        });
    }
    thread::sleep(RESTS);
    println!("{} pods, {POLICIES} policies\n{}", pods.len(), town.costs());
    for resident in town.resident_kib() {
        assert!(resident <= RESIDENT_KIB, "{resident} KiB of {RESIDENT_KIB}");
    }
}

/// A pod that sleeps, on one node or the other.
fn pod(number: u64) -> Value {
    let node = if number.is_multiple_of(2) { "test-node" } else { "node2" };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": "x", "name": format!("new-{number}"), "labels": {"app": "new"}},
        "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
                 "containers": [{"name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
                                 "command": ["sleep", "36000"]}]},
    })
}
