//! Addresses: none twice, none lost, and others where another plugin manages them.

use std::collections::BTreeSet;
use std::fs;

use serde_json::json;

use super::node::{NODE, Node, addresses};
use crate::harness::{spawn, wait};

#[test]
#[ignore = "needs root and network namespaces"]
fn a_range_is_given_to_its_last_address_and_then_says_that_it_is_full() {
    let mut node = Node::new(&["10.22.0.0/29", "fd22::/64"]);
    node.conf["reserved"] = json!(["10.22.0.1", "10.22.0.6"]);
    let pods: Vec<String> = (0..4).map(|number| format!("p{number}")).collect();
    let given: Vec<String> = pods.iter().map(|pod| node.add(pod).remove(0)).collect();
    assert_eq!(given, ["10.22.0.2", "10.22.0.3", "10.22.0.4", "10.22.0.5"]);
    node.namespace("late");
    for verb in ["ADD", "STATUS"] {
        let full = node.call(verb, "late").error();
        assert_eq!(full["code"], if verb == "ADD" { 122 } else { 50 });
        assert!(full["msg"].as_str().unwrap().contains("10.22.0.0/29 (6 addresses)"), "{full}");
    }
    assert_eq!(node.leases().len(), 8, "the IPv6 address of the pod that got none is given back");
    node.call("DEL", "p1").expect_ok();
    node.call("STATUS", "late").expect_ok();
    assert_eq!(node.add("late")[0], "10.22.0.3");
    // With two that are free, the one that was given back last rests longer.
    node.call("DEL", "p0").expect_ok();
    node.call("DEL", "late").expect_ok();
    node.forget_result("late");
    assert_eq!(node.add("next")[0], "10.22.0.2");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_pod_keeps_its_address_to_itself_when_the_leases_are_lost() {
    let mut node = Node::new(&["10.22.0.0/29"]);
    let own = node.add("one");
    let state = node.conf["stateDir"].as_str().unwrap().to_owned();
    fs::remove_dir_all(state).unwrap();
    let other = node.add("two");
    assert_ne!(own, other);
    assert!(node.pings("two", &own[0]));
    for pod in ["one", "two"] {
        node.call("DEL", pod).expect_ok();
    }
    assert_eq!(node.left(), Vec::<String>::new());
}

#[test]
#[ignore = "needs root and network namespaces"]
fn pods_of_a_changed_range_go_on_and_new_ones_are_in_the_new_one() {
    let mut node = Node::new(&["10.22.0.0/24"]);
    let old = node.add("old").remove(0);
    node.conf["subnets"] = json!(["10.23.0.0/24"]);
    let new = node.add("new").remove(0);
    assert!(new.starts_with("10.23.0."), "{new}");
    assert!(node.pings("new", &old) && node.pings("old", &new) && node.pings("node", &old));
    for pod in ["old", "new"] {
        assert_eq!(node.source_seen_outside(pod, true), NODE[0], "{pod}");
    }
    for pod in ["old", "new"] {
        node.call("CHECK", pod).expect_ok();
        node.call("DEL", pod).expect_ok();
    }
    assert_eq!(node.left(), Vec::<String>::new());
}

#[test]
#[ignore = "needs root, network namespaces and Debian's host-local"]
fn another_plugin_manages_addresses_with_all_verbs_and_errors() {
    let mut node = Node::new(&[]);
    node.conf.as_object_mut().unwrap().remove("subnets");
    // Debian's plugins support CNI versions up to 1.0.0.
    node.conf["cniVersion"] = "1.0.0".into();
    let data = node.conf["stateDir"].as_str().unwrap().to_owned() + "-host-local";
    node.conf["ipam"] = json!({"type": "host-local", "dataDir": data, "ranges": [[{"subnet": "10.24.0.0/30"}]]});
    let own = node.add("one").remove(0);
    assert!(own.starts_with("10.24.0.") && node.pings("node", &own));
    assert_eq!(node.source_seen_outside("one", true), NODE[0]);
    node.call("CHECK", "one").expect_ok();
    node.namespace("two");
    let full = node.call("ADD", "two").error();
    assert!(full["msg"].as_str().unwrap().contains("no IP addresses available"), "{full}");
    let pods = || {
        fs::read_dir(format!("{data}/net"))
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with("10."))
            .count()
    };
    assert_eq!(pods(), 1);
    node.call("DEL", "one").expect_ok();
    assert_eq!((pods(), node.left()), (0, Vec::new()));
    node.conf["ipam"] = json!({"type": "no-such-plugin"});
    let absent = node.call("ADD", "two").error();
    assert!(absent["code"] == 7 && absent["msg"].as_str().unwrap().contains("/usr/lib/cni"), "{absent}");
}

/// As many as a kubelet allows on a large node, eight calls at a time.
#[test]
#[ignore = "needs root and network namespaces"]
fn two_hundred_and_fifty_pods_have_different_addresses() {
    let mut node = Node::new(&["10.22.0.0/24", "fd22::/64"]);
    let pods: Vec<String> = (0..250).map(|number| format!("p{number}")).collect();
    pods.iter().for_each(|pod| node.namespace(pod));
    let mut seen = BTreeSet::new();
    for result in call_all(&node, "ADD", &pods) {
        for address in addresses(&result) {
            assert!(seen.insert(address.clone()), "{address} twice");
        }
    }
    assert_eq!(seen.len(), 500);
    assert!(node.pings("p0", seen.iter().next_back().unwrap()));
    call_all(&node, "DEL", &pods);
    assert_eq!(node.left(), Vec::<String>::new());
}

/// Calls for each pod, eight at a time; returns what they print.
fn call_all(node: &Node, verb: &str, pods: &[String]) -> Vec<String> {
    let call = |pod: &String| spawn(&mut node.command(verb, pod, &[]), node.stdin(verb, pod).as_bytes());
    let of_group = |group: &[String]| {
        let called: Vec<_> = group.iter().map(call).collect();
        called.into_iter().map(|child| wait(child).expect_ok()).collect::<Vec<_>>()
    };
    pods.chunks(8).flat_map(of_group).collect()
}
