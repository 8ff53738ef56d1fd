//! Invalid environment and stdin give the right error code, create nothing and cause no panic.

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::harness::{Node, spawn, wait};

fn refused(node: &Node, code: u64, what: &str) {
    let answer = node.call("ADD");
    assert_eq!(answer.code(), code, "{what}: {}", answer.stdout);
    assert!(answer.error()["msg"].as_str().unwrap().contains(what), "{what}: {}", answer.stdout);
    assert!(!node.root().join("state").exists(), "{what}");
}

#[test]
fn add_refuses_bad_variables_and_creates_nothing() {
    for (name, value, code) in [
        ("CNI_CONTAINERID", "", 4),
        ("CNI_CONTAINERID", "../../etc", 4),
        ("CNI_CONTAINERID", &"x".repeat(201), 4),
        ("CNI_IFNAME", "", 4),
        ("CNI_IFNAME", "eth0/..", 4),
        ("CNI_NETNS", "", 4),
        ("CNI_NETNS", "/nonexistent/netns", 8),
        ("CNI_NETNS", "/etc/passwd", 8),
        ("CNI_NETNS", "/proc/self/ns/net", 8),
        ("CNI_ARGS", "nonsense", 4),
        ("CNI_ARGS", "", 4),
    ] {
        let mut node = Node::new();
        node.set(name, value);
        refused(&node, code, name);
    }
}

#[test]
fn the_own_namespace_is_accepted_only_on_demand() {
    let mut node = Node::new();
    node.set("CNI_NETNS", "/proc/self/ns/net");
    node.set("CNI_NETNS_OVERRIDE", "1");
    node.call("ADD").expect_ok();
    node.call("DEL").expect_ok();
}

#[test]
fn add_refuses_bad_configuration_by_key_and_creates_nothing() {
    for (key, value, code) in [
        ("name", Value::Null, 7),
        ("name", json!("a/b"), 7),
        ("mode", json!("eager"), 7),
        ("portRange", json!([9, 1]), 7),
        ("ca", Value::Null, 7),
        ("instance", json!("/nonexistent/instance"), 7),
        ("device", json!("eth0"), 7),
        ("timeoutSeconds", json!(600), 7),
        ("enrol", json!({"namespaces": "shop"}), 7),
        ("nebula", json!({"pki": {"key": "x"}}), 7),
    ] {
        let mut node = Node::new();
        node.entry[key] = value;
        refused(&node, code, key);
    }
}

#[test]
fn add_refuses_a_missing_or_useless_prev_result() {
    for (prev, code) in [
        (None, 7),
        (Some("null"), 7),
        (Some("[]"), 6),
        (Some(r#"{"cniVersion":"1.0.0"}"#), 7),
        (Some(r#"{"cniVersion":"1.0.0","ips":[{"address":"x","interface":0}]}"#), 6),
        (Some(r#"{"ips":[{"address":"10.0.0.1/24","interface":0}],"interfaces":[{"name":"veth1"}]}"#), 7),
    ] {
        let mut node = Node::new();
        node.prev_result = prev.map(str::to_owned);
        refused(&node, code, "prevResult");
    }
}

#[test]
fn unreadable_stdin_is_refused_for_every_verb() {
    let node = Node::new();
    let huge = vec![b' '; (1 << 20) + 1];
    let deep =
        format!("{{\"cniVersion\":\"1.1.0\",\"name\":\"n\",\"mode\":{}1{}}}", "[".repeat(9999), "]".repeat(9999));
    for verb in ["ADD", "DEL", "CHECK", "GC", "STATUS"] {
        for stdin in [&b""[..], b"{", b"null", b"\xff\xfe", b"[1]", &huge] {
            let answer = wait(spawn(&mut node.command(verb), stdin));
            assert_eq!(answer.code(), 6, "{verb} {:?}", &stdin[..stdin.len().min(9)]);
        }
        assert!(!wait(spawn(&mut node.command(verb), deep.as_bytes())).stderr.contains("panicked"));
    }
    assert!(!node.root().join("state").exists());
}

#[test]
fn an_unknown_verb_is_refused() {
    for verb in ["add", "UPDATE", " ADD", "ADD\n"] {
        assert_eq!(Node::new().call(verb).code(), 4);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn random_input_ends_in_an_error_object_or_a_result(
        verb in "ADD|DEL|CHECK|GC|STATUS|VERSION", stdin in proptest::collection::vec(any::<u8>(), 0..300),
        id in "[ -~]{0,12}", args in "[ -~]{0,20}",
    ) {
        let mut node = Node::new();
        node.set("CNI_CONTAINERID", &id);
        node.set("CNI_ARGS", &args);
        let answer = wait(spawn(&mut node.command(&verb), &stdin));
        prop_assert!(!answer.stderr.contains("panicked"), "{}", answer.stderr);
        if !answer.ok {
            answer.code();
        }
    }

    #[test]
    fn a_damaged_configuration_ends_in_an_error_object_or_a_result(at in 0usize..600, byte in any::<u8>()) {
        // Only verbs that start nothing, because the damage may hit the name of the state directory.
        let node = Node::new();
        let mut stdin = node.stdin().into_bytes();
        let at = at % stdin.len();
        stdin[at] = byte;
        for verb in ["VERSION", "CHECK", "STATUS", "GC"] {
            let answer = wait(spawn(&mut node.command(verb), &stdin));
            prop_assert!(!answer.stderr.contains("panicked"), "{}", answer.stderr);
        }
    }
}
