//! A runtime with Multus calls the chain once for each interface of a pod, with the same container id. The pod has one
//! tunnel, that of the interface that came first.

use nebula_cni_plugin::supervisor::process::with_arguments;
use serde_json::{Value, json};

use crate::harness::{Answer, NETNS, Node, PREV};

/// What the plugin answers to `verb` for the interface `ifname`.
fn call(node: &mut Node, verb: &str, ifname: &str) -> Answer {
    node.set("CNI_IFNAME", ifname);
    node.prev_result = Some(prev(ifname));
    node.call(verb)
}

fn prev(ifname: &str) -> String {
    let last = if ifname == "eth0" { 7 } else { 9 };
    PREV.replace("eth0", ifname).replace("10.4.0.7", &format!("10.4.0.{last}"))
}

/// Whether the interface has a tunnel, with its instance.
fn has_tunnel(node: &mut Node, ifname: &str) -> bool {
    node.set("CNI_IFNAME", ifname);
    let runs = !with_arguments("--launch", &node.files().launch()).is_empty();
    assert_eq!(node.record().is_some(), runs, "{ifname}");
    runs
}

#[test]
fn the_second_interface_passes_and_the_pod_keeps_the_tunnel_of_the_first() {
    let mut node = Node::new();
    // A link on which there could be no rules: it gets none.
    for isolate in [Value::Null, json!({})] {
        call(&mut node, "ADD", "eth0").expect_ok();
        if isolate.is_object() {
            node.entry["isolate"] = isolate;
        }
        for _ in 0..2 {
            assert_eq!(call(&mut node, "ADD", "net1").expect_ok(), prev("net1"));
            assert_eq!(call(&mut node, "CHECK", "net1").expect_ok(), "");
            assert!(has_tunnel(&mut node, "eth0") && !has_tunnel(&mut node, "net1"));
        }
        node.entry.as_object_mut().unwrap().remove("isolate");
        // As Multus does: from the last to the first, and again.
        for _ in 0..2 {
            call(&mut node, "DEL", "net1").expect_ok();
            assert!(has_tunnel(&mut node, "eth0"));
        }
        for _ in 0..2 {
            call(&mut node, "DEL", "eth0").expect_ok();
            call(&mut node, "DEL", "net1").expect_ok();
            assert_eq!(node.residue(), Vec::<String>::new());
        }
        assert_eq!(call(&mut node, "CHECK", "net1").code(), 3, "its tunnel is gone");
    }
}

#[test]
fn an_interface_that_comes_alone_has_the_tunnel_whatever_its_name_is() {
    let mut node = Node::new();
    call(&mut node, "ADD", "net1").expect_ok();
    assert!(has_tunnel(&mut node, "net1"));
    assert_eq!(call(&mut node, "ADD", "eth0").expect_ok(), prev("eth0"));
    call(&mut node, "DEL", "eth0").expect_ok();
    assert!(has_tunnel(&mut node, "net1") && !has_tunnel(&mut node, "eth0"));
    call(&mut node, "DEL", "net1").expect_ok();
    // After the first one is gone, the next has it.
    call(&mut node, "ADD", "eth0").expect_ok();
    assert!(has_tunnel(&mut node, "eth0"));
    call(&mut node, "DEL", "eth0").expect_ok();
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
fn a_record_of_a_namespace_that_is_gone_does_not_count() {
    for netns in ["/nonexistent/netns", "/proc/self/ns/ipc"] {
        let mut node = Node::new();
        call(&mut node, "ADD", "eth0").expect_ok();
        let mut record = node.record().unwrap();
        record.target.netns = netns.into();
        record.save(&node.files()).unwrap();
        call(&mut node, "ADD", "net1").expect_ok();
        assert!(has_tunnel(&mut node, "net1"), "{netns}");
        for ifname in ["net1", "eth0"] {
            call(&mut node, "DEL", ifname).expect_ok();
        }
        assert_eq!(node.residue(), Vec::<String>::new());
    }
}

#[test]
fn gc_keeps_the_tunnel_while_either_interface_is_listed_and_ends_it_once() {
    let mut node = Node::new();
    node.entry["cniVersion"] = "1.1.0".into();
    call(&mut node, "ADD", "eth0").expect_ok();
    call(&mut node, "ADD", "net1").expect_ok();
    node.set("CNI_IFNAME", "eth0");
    let mut record = node.record().unwrap();
    record.target.netns = "/nonexistent/netns".into();
    record.save(&node.files()).unwrap();
    let of = |names: &[&str], id: &str| {
        json!(names.iter().map(|name| json!({"containerID": id, "ifname": name})).collect::<Vec<_>>())
    };
    for (listed, stays) in [(&["eth0", "net1"][..], true), (&["eth0"], true), (&[], false), (&[], false)] {
        node.entry["cni.dev/valid-attachments"] = of(listed, node.id());
        call(&mut node, "GC", "eth0").expect_ok();
        assert_eq!(has_tunnel(&mut node, "eth0"), stays, "{listed:?}");
    }
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
fn two_overlay_networks_need_two_devices() {
    let mut node = Node::new();
    call(&mut node, "ADD", "eth0").expect_ok();
    node.entry["name"] = "other".into();
    let refused = call(&mut node, "ADD", "net1");
    let (error, code) = (refused.error(), refused.code());
    assert_eq!(code, 7);
    let text = error.to_string();
    assert!(text.contains(r#"network \"net\""#) && text.contains("eth0") && text.contains("device"), "{text}");
    node.entry["device"] = "nebula1".into();
    call(&mut node, "ADD", "net1").expect_ok();
    assert!(node.env["CNI_NETNS"] == NETNS && has_tunnel_in(&node, "other", "net1"));
    call(&mut node, "DEL", "net1").expect_ok();
    assert!(!has_tunnel_in(&node, "other", "net1"));
    node.entry["name"] = "net".into();
    assert!(has_tunnel(&mut node, "eth0"));
    call(&mut node, "DEL", "eth0").expect_ok();
    assert_eq!(node.residue(), Vec::<String>::new());
}

fn has_tunnel_in(node: &Node, network: &str, ifname: &str) -> bool {
    let folder = node.root().join("state").join(network);
    !with_arguments("--launch", &folder.join(format!("{}-{ifname}.launch", node.id()))).is_empty()
}
