//! Who reaches whom, and from which address.

use serde_json::json;

use super::node::{NODE, Node, OUTSIDE, ip};

const SUBNETS: [&str; 2] = ["10.22.0.0/24", "fd22::/64"];

#[test]
#[ignore = "needs root and network namespaces"]
fn pods_reach_each_other_their_node_and_the_outside_in_each_family() {
    for (subnets, families) in [(&SUBNETS[..1], &[true][..]), (&SUBNETS[1..], &[false]), (&SUBNETS, &[true, false])] {
        let mut node = Node::new(subnets);
        let (one, two) = (node.add("one"), node.add("two"));
        assert_eq!(one.len(), families.len());
        for (place, is_v4) in families.iter().enumerate() {
            let family = usize::from(!is_v4);
            for target in [&two[place], NODE[family], OUTSIDE[family]] {
                assert!(node.pings("one", target), "{subnets:?}: one does not reach {target}");
            }
            for pod in [&one[place], &two[place]] {
                assert!(node.pings("node", pod), "{subnets:?}: the node does not reach {pod}");
            }
            assert_eq!(node.source_seen_outside("one", *is_v4), NODE[family]);
        }
        for pod in ["one", "two"] {
            node.call("CHECK", pod).expect_ok();
            node.call("DEL", pod).expect_ok();
        }
        assert_eq!(node.left(), Vec::<String>::new(), "{subnets:?}");
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn the_outside_sees_a_pods_own_address_where_the_operator_wants_it() {
    for change in [json!({"ipMasq": false}), json!({"noMasquerade": ["192.0.2.0/24", "2001:db8::/64"]})] {
        let mut node = Node::new(&SUBNETS);
        node.conf.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let addresses = node.add("one");
        let outside = node.name("outside");
        for (range, gateway) in SUBNETS.iter().zip(NODE) {
            ip(&["-n", &outside, "route", "add", range, "via", gateway]);
        }
        for (address, is_v4) in addresses.iter().zip([true, false]) {
            assert_eq!(node.source_seen_outside("one", is_v4), *address, "{change}");
        }
        node.call("DEL", "one").expect_ok();
        assert_eq!(node.left(), Vec::<String>::new());
    }
}

/// A pod with all rights over its own namespace takes the address of another one, sends from it, asks and answers for
/// it, and listens to everything.
#[test]
#[ignore = "needs root and network namespaces"]
fn no_pod_sends_from_the_address_of_another_or_receives_for_it() {
    let mut node = Node::new(&SUBNETS);
    let (victim, _) = (node.add("victim"), node.add("attacker"));
    node.add("third");
    let attacker = node.name("attacker");
    for (address, bits) in victim.iter().zip(["32", "128"]) {
        ip(&["-n", &attacker, "addr", "add", &format!("{address}/{bits}"), "dev", "eth0", "nodad"]);
    }
    for (place, targets) in [[NODE[0], OUTSIDE[0]], [NODE[1], OUTSIDE[1]]].iter().enumerate() {
        for target in targets {
            let spoofed = ["ping", "-c", "2", "-i", "0.2", "-W", "1", "-I", &victim[place], target];
            assert!(!node.run("attacker", &spoofed).0, "{target} answers {} of another pod", victim[place]);
        }
        // What is sent to the victim arrives there alone, also after the attacker claimed its address.
        let claim = ["arping", "-c", "2", "-w", "1", "-U", "-I", "eth0", &victim[place]];
        let _ = node.run("attacker", &claim);
        ip(&["-n", &attacker, "link", "set", "eth0", "address", "02:00:00:00:00:07"]);
        let received = |pod: &str| node.echoes_received(pod, place == 0);
        let before = (received("victim"), received("attacker"));
        assert!(node.pings("node", &victim[place]) && node.pings("third", &victim[place]));
        assert_eq!((received("victim"), received("attacker")), (before.0 + 4, before.1));
    }
    let (_, rules) = node.run("node", &["nft", "list", "ruleset"]);
    let dropped = rules.lines().filter(|line| line.contains("not from an address of the pod"));
    assert!(dropped.clone().any(|line| !line.contains("packets 0 ")), "{rules}");
}
