//! NetworkPolicy v1, line by line.

use nebula_cni_policy::model::{Direction, Problem};
use nebula_cni_policy::program::{Identity, Peer, Program, Reason, Who};
use serde_json::json;

use crate::town::{NODE, Town};

#[test]
fn without_policies_everything_is_allowed() {
    Town::new().check(&["web.shop -> db.pay TCP/1", "web.shop -> 192.0.2.1 ICMP", "192.0.2.1 -> web.shop UDP/53"], &[]);
}

#[test]
fn a_policy_selects_pods_of_its_namespace_by_labels() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {"matchLabels": {"app": "web"}}}));
    let allowed = ["web.shop -> db.shop TCP/80", "db.shop -> web.pay TCP/80", "web.pay -> db.shop TCP/80"];
    town.check(&allowed, &["db.shop -> web.shop TCP/80", "web.pay -> web.shop TCP/80", "192.0.2.1 -> web.shop TCP/80"]);
}

#[test]
fn an_empty_pod_selector_selects_all_pods_of_the_namespace() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}}));
    town.check(&["web.shop -> web.pay TCP/80"], &["web.pay -> web.shop TCP/80", "web.pay -> db.shop TCP/80"]);
}

#[test]
fn without_types_a_policy_is_for_ingress_and_for_egress_if_it_has_such_rules() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "egress": []}));
    town.check(&["web.shop -> web.pay TCP/80"], &["web.pay -> web.shop TCP/80"]);
    town.policy(json!({"podSelector": {}, "egress": [{"ports": [{"port": 443}]}]}));
    let denied = ["web.shop -> web.pay TCP/80", "web.pay -> web.shop TCP/443"];
    town.check(&["web.shop -> web.pay TCP/443"], &denied);
}

#[test]
fn types_say_which_directions_are_isolated() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "policyTypes": ["Egress"]}));
    town.check(&["web.pay -> web.shop TCP/80"], &["web.shop -> web.pay TCP/80"]);
    town.policy(json!({"podSelector": {}, "policyTypes": ["Ingress"], "egress": [{"ports": [{"port": 1}]}]}));
    town.check(&["web.shop -> web.pay TCP/80"], &["web.pay -> web.shop TCP/80"]);
    // Of a newer version: nobody knows what it isolates.
    town.policy(json!({"podSelector": {}, "policyTypes": ["Sideways"]}));
    town.check(&[], &["web.pay -> web.shop TCP/80", "web.shop -> web.pay TCP/80"]);
}

#[test]
fn what_any_rule_of_any_policy_allows_is_allowed() {
    let mut town = Town::new();
    let rule =
        |port| json!({"podSelector": {}, "ingress": [{"ports": [{"port": port}]}, {"ports": [{"port": port + 1}]}]});
    town.policy_with(json!({"name": "b", "namespace": "shop"}), rule(10));
    town.policy_with(json!({"name": "a", "namespace": "shop"}), rule(20));
    town.policy_with(json!({"name": "nothing", "namespace": "shop"}), json!({"podSelector": {}, "ingress": []}));
    let allowed = [10, 11, 20, 21].map(|port| format!("web.pay -> web.shop TCP/{port}"));
    town.check(&allowed.each_ref().map(String::as_str), &["web.pay -> web.shop TCP/12", "web.pay -> web.shop UDP/10"]);
}

#[test]
fn no_rule_allows_nothing_and_an_empty_one_everything() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "ingress": []}));
    town.check(&[], &["web.pay -> web.shop TCP/80", "192.0.2.1 -> web.shop ICMP"]);
    for everything in [json!({}), json!({"from": [], "ports": []}), json!({"from": null})] {
        town.policy(json!({"podSelector": {}, "ingress": [everything]}));
        town.check(&["web.pay -> web.shop SCTP/80", "192.0.2.1 -> web.shop ICMP", "192.0.2.1 -> db.shop GRE"], &[]);
    }
}

#[test]
fn peers_and_ports_must_both_match() {
    let mut town = Town::new();
    let from = json!([{"podSelector": {"matchLabels": {"app": "db"}}}, {"ipBlock": {"cidr": "192.0.2.0/24"}}]);
    town.policy(json!({"podSelector": {}, "ingress": [{"from": from, "ports": [{"port": 80}, {"port": 81}]}]}));
    let allowed = ["db.shop -> web.shop TCP/80", "db.shop -> web.shop TCP/81", "192.0.2.9 -> web.shop TCP/81"];
    town.check(&allowed, &["db.shop -> web.shop TCP/82", "web.shop -> db.shop TCP/80", "192.0.3.9 -> web.shop TCP/80"]);
}

#[test]
fn a_pod_selector_alone_means_pods_of_the_own_namespace() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "db"}}}]}]}));
    town.check(&["db.shop -> web.shop TCP/1"], &["db.pay -> web.shop TCP/1", "web.shop -> db.shop TCP/1"]);
    town.policy(json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]}));
    town.check(&["db.shop -> web.shop TCP/1", "web.shop -> db.shop TCP/1"], &["db.pay -> web.shop TCP/1"]);
}

#[test]
fn a_namespace_selector_alone_means_all_pods_of_its_namespaces() {
    let mut town = Town::new();
    let from = json!([{"namespaceSelector": {"matchLabels": {"team": "b"}}}]);
    town.policy(json!({"podSelector": {}, "ingress": [{"from": from}]}));
    let denied = ["web.shop -> db.shop TCP/1", "192.0.2.1 -> web.shop TCP/1"];
    town.check(&["web.pay -> web.shop TCP/1", "db.pay -> web.shop ICMP"], &denied);
    town.policy(json!({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": {}}]}]}));
    town.check(&["web.shop -> db.shop TCP/1", "db.pay -> web.shop TCP/1"], &["192.0.2.1 -> web.shop TCP/1"]);
}

#[test]
fn both_selectors_of_one_item_must_match() {
    let mut town = Town::new();
    let both =
        json!({"namespaceSelector": {"matchLabels": {"team": "b"}}, "podSelector": {"matchLabels": {"app": "db"}}});
    town.policy(json!({"podSelector": {}, "ingress": [{"from": [both]}]}));
    town.check(&["db.pay -> web.shop TCP/1"], &["web.pay -> web.shop TCP/1", "db.shop -> web.shop TCP/1"]);
    let apart =
        json!([{"namespaceSelector": {"matchLabels": {"team": "b"}}}, {"podSelector": {"matchLabels": {"app": "db"}}}]);
    town.policy(json!({"podSelector": {}, "ingress": [{"from": apart}]}));
    town.check(&["web.pay -> web.shop TCP/1", "db.shop -> web.shop TCP/1"], &["web.shop -> db.shop TCP/1"]);
}

#[test]
fn a_block_matches_addresses_without_its_exceptions() {
    let mut town = Town::new();
    let block = json!({"cidr": "192.0.2.0/24", "except": ["192.0.2.64/26", "192.0.2.7/32"]});
    town.policy(
        json!({"podSelector": {}, "egress": [{"to": [{"ipBlock": block}, {"ipBlock": {"cidr": "2001:db8::/32"}}]}]}),
    );
    town.check(
        &[
            "web.shop -> 192.0.2.1 TCP/1",
            "web.shop -> 192.0.2.128 ICMP",
            "web.shop -> ::ffff:192.0.2.1 TCP/1",
            "web.shop -> 2001:db8::1 TCP/1",
        ],
        &[
            "web.shop -> 192.0.2.64 TCP/1",
            "web.shop -> 192.0.2.7 TCP/1",
            "web.shop -> 192.0.3.1 TCP/1",
            "web.shop -> 2001:db9::1 TCP/1",
        ],
    );
}

#[test]
fn a_block_matches_pods_by_their_addresses() {
    let mut town = Town::new();
    let to = json!([{"ipBlock": {"cidr": "10.0.0.0/24"}}, {"ipBlock": {"cidr": "fd00::/64"}}]);
    town.policy(json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": to}]}));
    town.check(&["web.shop -> db.pay TCP/1"], &["web.shop -> 192.0.2.1 TCP/1"]);
}

#[test]
fn each_operator_of_a_selector_works() {
    let cases = [
        (json!({"key": "app", "operator": "In", "values": ["db", "other"]}), true),
        (json!({"key": "app", "operator": "In", "values": ["web"]}), false),
        (json!({"key": "app", "operator": "NotIn", "values": ["web"]}), true),
        (json!({"key": "missing", "operator": "NotIn", "values": ["web"]}), true),
        (json!({"key": "app", "operator": "NotIn", "values": ["db"]}), false),
        (json!({"key": "app", "operator": "Exists"}), true),
        (json!({"key": "missing", "operator": "Exists"}), false),
        (json!({"key": "missing", "operator": "DoesNotExist"}), true),
        (json!({"key": "app", "operator": "DoesNotExist"}), false),
    ];
    for (expression, is_allowed) in cases {
        let mut town = Town::new();
        let from = json!([{"podSelector": {"matchLabels": {"env": "live"}, "matchExpressions": [expression]}}]);
        town.policy(json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"from": from}]}));
        assert_eq!(town.judge("web.shop <- db.shop TCP/1").is_allowed(), is_allowed, "{expression}");
    }
}

#[test]
fn an_invalid_selector_allows_nobody_and_isolates_what_its_valid_part_selects() {
    let invalid = json!({"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "env", "operator": "Like", "values": ["l"]}]});
    let mut town = Town::new();
    let problems = town.policy(json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": invalid}, {"podSelector": {"matchLabels": {"app": "db"}}}]}]}));
    assert_eq!(problems, [Problem::Rule { direction: Direction::Ingress, rule: 0 }]);
    town.check(&["db.shop -> web.shop TCP/1"], &["web.shop -> db.shop TCP/1"]);
    assert_eq!(town.policy(json!({"podSelector": invalid, "ingress": [{}]})), [Problem::Subject]);
    town.check(&["web.shop -> db.shop TCP/1"], &["db.shop -> web.shop TCP/1"]);
}

#[test]
fn ports_have_a_protocol_which_is_tcp_if_it_is_missing() {
    let mut town = Town::new();
    let ports = json!([{"port": 80}, {"port": 53, "protocol": "UDP"}, {"protocol": "SCTP"}]);
    town.policy(json!({"podSelector": {}, "ingress": [{"ports": ports}]}));
    let allowed = ["web.pay -> web.shop TCP/80", "web.pay -> web.shop UDP/53", "web.pay -> web.shop SCTP/7"];
    town.check(&allowed, &["web.pay -> web.shop UDP/80", "web.pay -> web.shop TCP/53", "web.pay -> web.shop TCP/7"]);
    town.policy(json!({"podSelector": {}, "ingress": [{"ports": [{}]}]}));
    town.check(&["web.pay -> web.shop TCP/65535"], &["web.pay -> web.shop UDP/80"]);
}

#[test]
fn an_end_port_makes_a_range_of_both_ends() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "ingress": [{"ports": [{"port": 80, "endPort": 90}]}]}));
    let allowed = ["web.pay -> web.shop TCP/80", "web.pay -> web.shop TCP/85", "web.pay -> web.shop TCP/90"];
    town.check(&allowed, &["web.pay -> web.shop TCP/79", "web.pay -> web.shop TCP/91"]);
}

#[test]
fn ports_that_cannot_be_read_allow_nothing() {
    let invalid = [
        json!({"port": 90, "endPort": 80}),
        json!({"port": "http", "endPort": 80}),
        json!({"endPort": 80}),
        json!({"port": 0}),
        json!({"port": 65536}),
        json!({"port": 8080, "protocol": "QUIC"}),
    ];
    for port in invalid {
        let mut town = Town::new();
        let problems = town.policy(json!({"podSelector": {}, "ingress": [{"ports": [port, {"port": 1}]}]}));
        assert_eq!(problems, [Problem::Rule { direction: Direction::Ingress, rule: 0 }], "{port}");
        town.check(&["web.pay -> web.shop TCP/1"], &["web.pay -> web.shop TCP/8080", "web.pay -> web.shop TCP/85"]);
        town.policy(json!({"podSelector": {}, "ingress": [{"ports": [port]}]}));
        town.check(&[], &["web.pay -> web.shop TCP/8080", "web.pay -> web.shop ICMP"]);
    }
}

#[test]
fn a_name_in_an_ingress_rule_is_a_port_of_the_pod_itself() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "ingress": [{"ports": [{"port": "http"}]}]}));
    let denied = ["web.pay -> web.shop TCP/9090", "web.pay -> db.shop TCP/8080", "web.pay -> web.shop UDP/8080"];
    town.check(&["web.pay -> web.shop TCP/8080"], &denied);
}

#[test]
fn a_name_in_an_egress_rule_means_another_number_for_each_peer() {
    let mut town = Town::new();
    let to = json!([{"namespaceSelector": {}}]);
    town.policy(
        json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": to, "ports": [{"port": "http"}]}]}),
    );
    let denied = [
        "web.shop -> db.pay TCP/8080",
        "web.shop -> web.pay TCP/9090",
        "web.shop -> db.shop TCP/8080",
        "web.shop -> 192.0.2.1 TCP/8080",
        "web.shop -> db.pay UDP/9090",
    ];
    town.check(&["web.shop -> db.pay TCP/9090", "web.shop -> web.pay TCP/8080"], &denied);
}

#[test]
fn both_ends_decide() {
    let mut town = Town::new();
    let allow = |port| json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": port}]}]});
    town.policy(allow(80));
    town.policy_with(
        json!({"name": "in", "namespace": "pay"}),
        json!({"podSelector": {}, "ingress": [{"ports": [{"port": 81}]}]}),
    );
    town.check(&[], &["web.shop -> web.pay TCP/80", "web.shop -> web.pay TCP/81"]);
    town.policy(allow(81));
    town.check(&["web.shop -> web.pay TCP/81"], &["web.shop -> web.pay TCP/80"]);
}

#[test]
fn a_pod_and_its_node_reach_each_other_always() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
    let deny = json!([{"action": "Deny", "to": [{"networks": ["0.0.0.0/0"]}]}]);
    town.cluster_policy(json!({"tier": "Admin", "priority": 0, "subject": {"namespaces": {}}, "egress": deny}));
    assert_eq!(town.judge(&format!("web.shop <- {NODE} TCP/8080")).enforced.reason, Reason::OwnNode);
    assert_eq!(town.judge(&format!("web.shop -> {NODE} ICMP")).enforced.reason, Reason::OwnNode);
    town.check(&[], &["10.1.0.2 -> web.shop TCP/8080", "web.shop -> 10.1.0.2 TCP/8080"]);
    // A pod that has the address of the node is none.
    let web = town.pods["web.pay"].identity;
    let program = town.program("web.shop", Direction::Ingress);
    let peer = Peer::pod(web, Some(NODE.parse().unwrap()));
    assert!(!Program::read(&program).unwrap().judge(&peer, 6, 8080).is_allowed());
}

#[test]
fn a_pod_reaches_itself_always() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
    assert_eq!(town.judge("web.shop -> web.shop TCP/80").enforced.reason, Reason::Itself);
    assert_eq!(town.judge("web.shop <- web.shop ICMP").enforced.reason, Reason::Itself);
    // Another pod with the address, which the pod before it may have had, is not itself.
    let (own, other) = (town.pods["web.shop"].identity, town.pods["web.pay"].identity);
    let program = town.program("web.shop", Direction::Ingress);
    let judge = |peer| Program::read(&program).unwrap().judge(&peer, 6, 80).is_allowed();
    let address = Some("10.0.0.1".parse().unwrap());
    assert!(judge(Peer::pod(own, address)));
    assert!(!judge(Peer::pod(other, address)));
    assert!(!judge(Peer { who: Who::Unnumbered, address }));
    assert!(!judge(Peer::pod(own, Some("10.0.0.77".parse().unwrap()))), "a pod with equal labels is another one");
}

#[test]
fn pods_of_the_hosts_network_are_addresses() {
    let mut town = Town::new();
    let from = json!([{"namespaceSelector": {}}, {"ipBlock": {"cidr": "10.1.0.4/32"}}]);
    town.policy(json!({"podSelector": {}, "ingress": [{"from": from}]}));
    town.check(&["10.1.0.4 -> web.shop TCP/80"], &["10.1.0.5 -> web.shop TCP/80"]);
}

#[test]
fn icmp_needs_a_rule_without_ports() {
    let mut town = Town::new();
    let rules = json!([
        {"from": [{"podSelector": {}}], "ports": [{"port": 80}, {"protocol": "UDP"}]},
        {"from": [{"namespaceSelector": {"matchLabels": {"team": "b"}}}]},
    ]);
    town.policy(json!({"podSelector": {}, "ingress": rules}));
    let denied = ["db.shop -> web.shop ICMP", "db.shop -> web.shop GRE", "192.0.2.1 -> web.shop ICMP"];
    town.check(&["db.pay -> web.shop ICMP", "db.shop -> web.shop TCP/80", "db.pay -> web.shop GRE"], &denied);
}

#[test]
fn a_peer_whose_identity_is_not_known_yet_is_refused_wherever_some_pod_could_be() {
    let mut town = Town::new();
    let judge = |town: &Town| {
        let program = town.program("web.shop", Direction::Ingress);
        let peer = Peer { who: Who::Unnumbered, address: Some("10.0.0.99".parse().unwrap()) };
        Program::read(&program).unwrap().judge(&peer, 6, 80).enforced
    };
    assert_eq!(judge(&town).reason, Reason::NoPolicy);
    town.policy(json!({"podSelector": {}, "ingress": [{}]}));
    assert!(!judge(&town).is_allowed);
    assert_eq!(judge(&town).reason, Reason::Unnumbered);
}

#[test]
fn an_identity_that_no_selector_selects_matches_rules_for_everybody_only() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}, {"ports": [{"port": 80}]}]}));
    let program = town.program("web.shop", Direction::Ingress);
    let judge = |port| {
        let peer = Peer::pod(Identity::new(4_000_000_000).unwrap(), None);
        Program::read(&program).unwrap().judge(&peer, 6, port).is_allowed()
    };
    assert!(judge(80) && !judge(81));
}

#[test]
fn peers_that_cannot_be_read_match_nothing() {
    let peers = [
        json!({}),
        json!({"ipBlock": {"cidr": "192.0.2.0"}}),
        json!({"ipBlock": {"cidr": "192.0.2.0/24", "except": ["x"]}}),
        json!({"ipBlock": {"cidr": "0.0.0.0/0"}, "podSelector": {}}),
    ];
    for peer in peers {
        let mut town = Town::new();
        let problems = town.policy(json!({"podSelector": {}, "ingress": [{"from": [peer]}]}));
        assert_eq!(problems, [Problem::Rule { direction: Direction::Ingress, rule: 0 }], "{peer}");
        town.check(&[], &["192.0.2.1 -> web.shop TCP/80", "db.shop -> web.shop TCP/80"]);
    }
}

#[test]
fn a_verdict_names_tier_policy_and_rule() {
    let mut town = Town::new();
    let rules = json!([{"ports": [{"port": 1}]}, {"ports": [{"port": 80}]}]);
    town.policy(json!({"podSelector": {}, "ingress": rules}));
    town.policy_with(json!({"name": "also", "namespace": "shop"}), json!({"podSelector": {}}));
    let program = town.program("web.shop", Direction::Ingress);
    let program = Program::read(&program).unwrap();
    let name = |reason| match reason {
        Reason::Rule { tier, policy, rule } => format!("{tier:?} {} {rule}", program.policy(policy).unwrap().name),
        Reason::Isolated { policy } => format!("isolated {}", program.policy(policy).unwrap().name),
        other => format!("{other:?}"),
    };
    assert_eq!(name(town.judge("web.shop <- db.pay TCP/80").enforced.reason), "NetworkPolicy shop/policy 1");
    assert_eq!(name(town.judge("web.shop <- db.pay TCP/81").enforced.reason), "isolated shop/also");
    assert_eq!(program.policies().map(|policy| policy.name).collect::<Vec<_>>(), ["shop/also", "shop/policy"]);
    assert!(program.policies().all(|policy| policy.isolates && !policy.is_audited));
}
