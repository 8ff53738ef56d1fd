//! GC removes attachments that are not in the list and have no namespace; STATUS reports on this node only.

use std::path::Path;

use serde_json::{Value, json};

use crate::harness::Node;

fn attached() -> Node {
    let mut node = Node::new();
    node.entry["cniVersion"] = "1.1.0".into();
    node.call("ADD").expect_ok();
    node
}

// Makes the record name a namespace that does not exist, as if the pod were gone.
fn without_netns(node: &Node) {
    let mut record = node.record().unwrap();
    record.target.netns = "/nonexistent/netns".into();
    record.save(&node.files()).unwrap();
}

fn gc(node: &mut Node, key: &str, list: Value) {
    let mut entry = node.entry.clone();
    entry[key] = list;
    std::mem::swap(&mut node.entry, &mut entry);
    assert_eq!(node.call("GC").expect_ok(), "");
    node.entry = entry;
}

#[test]
fn gc_without_a_list_does_nothing() {
    let node = attached();
    without_netns(&node);
    assert_eq!(node.call("GC").expect_ok(), "");
    assert!(node.process().is_alive());
    node.call("DEL").expect_ok();
}

#[test]
fn gc_keeps_what_is_listed_under_either_key() {
    let mut node = attached();
    without_netns(&node);
    for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
        let list = json!([{"containerID": node.id(), "ifname": "eth0"}]);
        gc(&mut node, key, list);
        assert!(node.process().is_alive());
    }
    node.call("DEL").expect_ok();
}

#[test]
fn gc_keeps_what_still_has_its_namespace() {
    let mut node = attached();
    gc(&mut node, "cni.dev/valid-attachments", json!([]));
    assert!(node.process().is_alive());
    node.call("DEL").expect_ok();
}

#[test]
fn gc_takes_the_rest() {
    let mut node = attached();
    let process = node.process();
    without_netns(&node);
    gc(&mut node, "cni.dev/valid-attachments", json!([{"containerID": "other", "ifname": "eth0"}]));
    assert!(!process.is_alive());
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
fn gc_does_not_touch_other_networks() {
    let mut node = attached();
    without_netns(&node);
    node.entry["name"] = "other".into();
    gc(&mut node, "cni.dev/valid-attachments", json!([]));
    node.entry["name"] = "net".into();
    assert!(node.process().is_alive());
    node.call("DEL").expect_ok();
}

#[test]
fn status_refuses_only_what_would_fail_every_add() {
    let mut node = Node::new();
    node.entry["cniVersion"] = "1.1.0".into();
    node.prev_result = None;
    let answer = node.call("STATUS");
    if Path::new("/dev/net/tun").exists() {
        assert_eq!(answer.expect_ok(), "");
    } else {
        assert_eq!(answer.code(), 50);
    }
    node.entry["instance"] = json!("/nonexistent/instance");
    assert_eq!(node.call("STATUS").code(), 50);
    node.entry["instance"] = Value::Null;
    node.entry["mode"] = json!("eager");
    assert_eq!(node.call("STATUS").code(), 50);
    assert!(!node.root().join("state").exists());
}
