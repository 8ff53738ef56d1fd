//! The verbs of the CNI specification in each of its versions, called as runtimes do at their worst.

use serde_json::{Value, json};

use super::node::{Node, ip};
use crate::harness::{spawn, wait};

#[test]
#[ignore = "needs root and network namespaces"]
fn every_version_has_its_verbs_and_nothing_is_left() {
    let mut node = Node::new(&["10.22.0.0/24", "fd22::/64"]);
    for version in ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        node.conf["cniVersion"] = version.into();
        node.namespace("pod");
        let result: Value = serde_json::from_str(&node.call("ADD", "pod").expect_ok()).unwrap();
        assert_eq!(result["cniVersion"], version);
        let (one_form, both) = (json!(result["ip4"]["ip"]), json!(result["ips"].as_array().map(Vec::len)));
        assert!(one_form.is_string() || both == 2, "{result}");
        if ["0.4.0", "1.0.0", "1.1.0"].contains(&version) {
            let without = node.call("CHECK", "pod");
            assert!(without.error()["msg"].as_str().unwrap().contains("prevResult"), "as the specification says");
        }
        if version == "1.1.0" {
            wait(spawn(&mut node.command("STATUS", "pod", &[]), node.conf.to_string().as_bytes())).expect_ok();
        }
        // The same pod again, as some runtimes ask: it keeps what it has.
        let again: Value = serde_json::from_str(&node.call("ADD", "pod").expect_ok()).unwrap();
        assert_eq!(again, result, "{version}");
        for _ in 0..2 {
            node.call("DEL", "pod").expect_ok();
        }
        node.end_namespace("pod");
        node.call("DEL", "pod").expect_ok();
        assert_eq!(node.left(), Vec::<String>::new(), "{version}");
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn del_and_gc_find_what_belongs_to_namespaces_that_are_gone() {
    let mut node = Node::new(&["10.22.0.0/24", "fd22::/64"]);
    for pod in ["one", "two", "three", "four"] {
        node.add(pod);
    }
    node.end_namespace("one");
    node.call("DEL", "one").expect_ok();
    node.end_namespace("two");
    let without = node.conf.clone();
    // Another runtime has "four" in the same network: its namespace is there.
    node.conf["cni.dev/valid-attachments"] = json!([{"containerID": "three", "ifname": "eth0"}]);
    node.call("GC", "three").expect_ok();
    node.conf = without;
    assert_eq!(node.leases().len(), 4, "{:?}", node.leases());
    for pod in ["three", "four"] {
        node.call("CHECK", pod).expect_ok();
        node.call("DEL", pod).expect_ok();
    }
    assert_eq!(node.left(), Vec::<String>::new());
}

#[test]
#[ignore = "needs root and network namespaces"]
fn check_says_what_is_gone_and_add_makes_it_again() {
    let mut node = Node::new(&["10.22.0.0/24"]);
    let (own, pod) = (node.add("pod").remove(0), node.name("pod"));
    let end = node.result("pod")["interfaces"][0]["name"].as_str().unwrap().to_owned();
    let (here, table) = (node.name("node"), format!("nebula-pod-{end}"));
    let breaks: [(&[&str], &str); 4] = [
        (&["ip", "-n", &here, "route", "del", &own], "route"),
        (&["ip", "-n", &pod, "addr", "flush", "dev", "eth0"], "address"),
        (&["ip", "netns", "exec", &here, "nft", "delete", "table", "netdev", &table], "rules"),
        (&["ip", "-n", &here, "link", "del", &end], "eth0"),
    ];
    for (command, expected) in breaks {
        node.call("CHECK", "pod").expect_ok();
        ip(&command[1..]);
        let error = node.call("CHECK", "pod").error();
        assert!(error["msg"].as_str().unwrap().contains(expected), "{command:?}: {error}");
        assert_eq!(node.add("pod").len(), 1);
        assert!(node.pings("node", node.result("pod")["ips"][0]["address"].as_str().unwrap().trim_end_matches("/32")));
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn what_is_wrong_is_refused_before_anything_is_made() {
    let mut node = Node::new(&["10.22.0.0/24"]);
    node.namespace("pod");
    let mut chained = node.conf.clone();
    chained["prevResult"] = json!({"cniVersion": "1.1.0", "ips": [{"address": "10.0.0.9/24"}]});
    let refused = wait(spawn(&mut node.command("ADD", "pod", &[]), chained.to_string().as_bytes())).error();
    assert!(refused["code"] == 7 && refused["msg"].as_str().unwrap().contains("prevResult"), "{refused}");
    ip(&["-n", &node.name("pod"), "link", "add", "eth0", "type", "bridge"]);
    let taken = node.call("ADD", "pod").error();
    assert!(taken["msg"].as_str().unwrap().contains("\"eth0\" already"), "{taken}");
    node.end_namespace("pod");
    let gone = node.call("ADD", "pod").error();
    assert_eq!(gone["code"], 8, "{gone}");
    assert_eq!(node.left(), Vec::<String>::new());
}

#[test]
#[ignore = "needs root and network namespaces"]
fn names_may_be_as_long_as_runtimes_make_them() {
    let mut node = Node::new(&["10.22.0.0/24"]);
    node.conf["name"] = "n".repeat(63).into();
    let pod = "c".repeat(64);
    node.namespace(&pod);
    node.call("ADD", &pod).expect_ok();
    node.call("DEL", &pod).expect_ok();
    assert_eq!(node.left(), Vec::<String>::new());
}
