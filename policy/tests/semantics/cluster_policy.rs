//! ClusterNetworkPolicy v1alpha2, line by line.

use nebula_cni_policy::kubernetes::{self, Unreadable};
use nebula_cni_policy::model::{ClusterNetworkPolicy, Direction, Problem};
use nebula_cni_policy::program::{Program, Reason, Tier};
use serde_json::{Value, json};

use crate::town::{Town, labels};

/// A policy for all pods.
fn policy(tier: &str, priority: u16, direction: &str, rules: Value) -> Value {
    json!({"tier": tier, "priority": priority, "subject": {"namespaces": {}}, direction: rules})
}

fn from_all(action: &str) -> Value {
    json!([{"action": action, "from": [{"namespaces": {}}]}])
}

#[test]
fn tier_admin_is_before_network_policies() {
    let mut town = Town::new();
    town.policy(json!({"podSelector": {}, "ingress": [{}]}));
    town.cluster_policy(policy("Admin", 5, "ingress", from_all("Deny")));
    town.check(&["192.0.2.1 -> web.shop TCP/80"], &["web.pay -> web.shop TCP/80", "web.shop -> web.pay TCP/80"]);
    town.policy(json!({"podSelector": {}}));
    town.cluster_policy(policy("Admin", 5, "ingress", from_all("Accept")));
    town.check(&["web.pay -> web.shop TCP/80"], &["192.0.2.1 -> web.shop TCP/80"]);
}

#[test]
fn tier_baseline_is_for_pods_that_no_network_policy_selects_in_that_direction() {
    let mut town = Town::new();
    town.cluster_policy(policy("Baseline", 5, "ingress", from_all("Deny")));
    town.policy(json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{}]}));
    town.check(&["web.pay -> web.shop TCP/80", "192.0.2.1 -> db.shop TCP/80"], &["web.pay -> db.shop TCP/80"]);
    town.policy(json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]}));
    town.check(&[], &["web.pay -> web.shop TCP/80"]);
    town.cluster_policy(policy("Baseline", 5, "ingress", from_all("Accept")));
    town.policy(json!({"podSelector": {}}));
    town.check(&[], &["web.pay -> web.shop TCP/80"]);
}

#[test]
fn a_lower_priority_is_first_and_equal_ones_are_in_the_order_of_names() {
    let mut town = Town::new();
    let name = |name: &str| json!({"name": name});
    town.cluster_policy_with(name("a"), policy("Admin", 1000, "ingress", from_all("Deny")));
    town.cluster_policy_with(name("b"), policy("Admin", 0, "ingress", from_all("Accept")));
    town.check(&["web.pay -> web.shop TCP/80"], &[]);
    town.cluster_policy_with(name("a"), policy("Admin", 0, "ingress", from_all("Deny")));
    town.check(&[], &["web.pay -> web.shop TCP/80"]);
    town.cluster_policy_with(name("c"), policy("Admin", 1, "ingress", from_all("Accept")));
    town.check(&[], &["web.pay -> web.shop TCP/80"]);
}

#[test]
fn the_first_matching_rule_wins() {
    let mut town = Town::new();
    let rule = |action: &str, port: u16| json!({"action": action, "from": [{"namespaces": {}}], "protocols": [{"tcp": {"destinationPort": {"number": port}}}]});
    let rules = json!([rule("Accept", 80), {"action": "Deny", "from": [{"namespaces": {}}]}, rule("Accept", 81)]);
    town.cluster_policy(policy("Admin", 0, "ingress", rules));
    town.check(&["web.pay -> web.shop TCP/80"], &["web.pay -> web.shop TCP/81"]);
}

#[test]
fn pass_goes_to_the_next_tier() {
    let mut town = Town::new();
    let pass =
        json!([{"action": "Pass", "from": [{"namespaces": {}}]}, {"action": "Deny", "from": [{"namespaces": {}}]}]);
    town.cluster_policy(policy("Admin", 0, "ingress", pass));
    town.cluster_policy_with(json!({"name": "later"}), policy("Admin", 1, "ingress", from_all("Deny")));
    town.check(&["web.pay -> web.shop TCP/80"], &[]);
    town.policy(json!({"podSelector": {}, "ingress": [{"ports": [{"port": 80}]}]}));
    town.check(&["web.pay -> web.shop TCP/80"], &["web.pay -> web.shop TCP/81"]);
    town.cluster_policy_with(json!({"name": "base"}), policy("Baseline", 1, "ingress", from_all("Deny")));
    town.check(&["web.pay -> web.shop TCP/80"], &["web.shop -> web.pay TCP/80"]);
    // After the last tier comes what holds without policies.
    town.cluster_policy_with(json!({"name": "alpha"}), policy("Baseline", 0, "ingress", from_all("Pass")));
    town.check(&["web.shop -> web.pay TCP/80"], &[]);
}

#[test]
fn what_no_rule_matches_is_allowed_and_nothing_is_isolated() {
    let mut town = Town::new();
    let only = json!([{"action": "Accept", "from": [{"pods": {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "db"}}}}]}]);
    town.cluster_policy(policy("Admin", 0, "ingress", only.clone()));
    town.cluster_policy_with(json!({"name": "base"}), policy("Baseline", 0, "ingress", only));
    town.check(&["web.pay -> web.shop TCP/80", "192.0.2.1 -> web.shop ICMP"], &[]);
}

#[test]
fn subjects_are_namespaces_or_pods() {
    let mut town = Town::new();
    let deny = from_all("Deny");
    town.cluster_policy(json!({"tier": "Admin", "priority": 0, "subject": {"namespaces": {"matchLabels": {"team": "a"}}}, "ingress": deny}));
    town.check(&["web.shop -> db.pay TCP/1"], &["web.pay -> web.shop TCP/1", "web.pay -> db.shop TCP/1"]);
    let pods =
        json!({"namespaceSelector": {"matchLabels": {"team": "a"}}, "podSelector": {"matchLabels": {"app": "db"}}});
    town.cluster_policy(json!({"tier": "Admin", "priority": 0, "subject": {"pods": pods}, "ingress": deny}));
    town.check(&["web.pay -> web.shop TCP/1", "web.shop -> db.pay TCP/1"], &["web.pay -> db.shop TCP/1"]);
}

#[test]
fn peers_are_namespaces_or_pods_of_them_and_no_addresses() {
    let mut town = Town::new();
    let from = json!([{"namespaces": {"matchLabels": {"team": "b"}}}]);
    town.cluster_policy(policy("Admin", 0, "ingress", json!([{"action": "Deny", "from": from}])));
    let allowed = ["web.shop -> db.shop TCP/1", "10.0.0.77 -> web.shop TCP/1"];
    town.check(&allowed, &["db.pay -> web.shop TCP/1", "web.pay -> web.shop ICMP"]);
    let pods = json!([{"pods": {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}}]);
    town.cluster_policy(policy("Admin", 0, "ingress", json!([{"action": "Deny", "from": pods}])));
    town.check(&["db.pay -> web.shop TCP/1"], &["web.shop -> db.shop TCP/1", "web.pay -> db.shop TCP/1"]);
}

#[test]
fn networks_match_outside_and_inside_the_cluster() {
    let mut town = Town::new();
    let to = json!([{"networks": ["192.0.2.0/24", "10.0.0.0/24", "fd00::/64"]}]);
    town.cluster_policy(policy("Admin", 0, "egress", json!([{"action": "Deny", "to": to}])));
    let allowed = ["web.shop -> 192.0.3.1 TCP/1", "192.0.2.1 -> web.shop TCP/1"];
    town.check(&allowed, &["web.shop -> 192.0.2.1 TCP/1", "web.shop -> 192.0.2.1 ICMP", "web.shop -> web.pay TCP/1"]);
}

#[test]
fn nodes_are_the_addresses_of_nodes_with_these_labels() {
    let mut town = Town::new();
    let to = json!([{"nodes": {"matchLabels": {"role": "control"}}}]);
    town.cluster_policy(policy("Admin", 0, "egress", json!([{"action": "Deny", "to": to}])));
    town.check(&["web.shop -> 10.1.0.7 TCP/6443"], &[]);
    let node = |role| Some((labels(&[("role", role)]), vec!["10.1.0.7".parse().unwrap(), "fd01::7".parse().unwrap()]));
    assert!(town.cluster.take_changed().len() > 1);
    town.cluster.set_node("seven", node("control"));
    assert_eq!(town.cluster.take_changed().len(), 4, "the egress programs of the four pods");
    let denied = ["web.shop -> 10.1.0.7 TCP/6443", "web.shop -> fd01::7 ICMP"];
    town.check(&["web.shop -> 10.1.0.8 TCP/6443"], &denied);
    town.cluster.set_node("seven", node("worker"));
    town.check(&["web.shop -> 10.1.0.7 TCP/6443"], &[]);
    let _ = town.cluster.take_changed();
    town.cluster.set_node("seven", None);
    assert_eq!(town.cluster.take_changed().len(), 0, "no policy selected it");
}

#[test]
fn domain_names_match_nothing_and_are_reported() {
    let mut town = Town::new();
    let accept = json!({"action": "Accept", "to": [{"domainNames": ["*.example.com"]}]});
    let deny = json!({"action": "Deny", "to": [{"networks": ["0.0.0.0/0"]}]});
    let problems = town.cluster_policy(policy("Admin", 0, "egress", json!([accept, deny])));
    assert_eq!(problems, [Problem::DomainNames { direction: Direction::Egress, rule: 0 }]);
    town.check(&["web.shop -> 2001:db8::1 TCP/443"], &["web.shop -> 192.0.2.1 TCP/443"]);
    // They are for Accept only.
    let deny = json!({"action": "Deny", "to": [{"domainNames": ["example.com"]}]});
    let problems = town.cluster_policy(policy("Admin", 0, "egress", json!([deny])));
    assert!(problems.contains(&Problem::DeniesAll { direction: Direction::Egress, rule: 0 }));
    town.check(&[], &["web.shop -> 2001:db8::1 TCP/443"]);
}

#[test]
fn protocols_are_ports_ranges_or_names_and_none_are_everything() {
    let mut town = Town::new();
    let protocols = json!([
        {"tcp": {"destinationPort": {"number": 80}}},
        {"udp": {"destinationPort": {"range": {"start": 50, "end": 60}}}},
        {"sctp": {"destinationPort": {"number": 7}}},
        {"destinationNamedPort": "sql"},
    ]);
    let rule = json!([{"action": "Deny", "from": [{"namespaces": {}}], "protocols": protocols}]);
    town.cluster_policy(policy("Admin", 0, "ingress", rule));
    town.check(
        &[
            "web.pay -> web.shop TCP/81",
            "web.pay -> web.shop UDP/61",
            "web.pay -> web.shop SCTP/80",
            "web.pay -> web.shop ICMP",
            "web.pay -> web.shop TCP/5432",
        ],
        &[
            "web.pay -> web.shop TCP/80",
            "web.pay -> web.shop UDP/50",
            "web.pay -> web.shop UDP/60",
            "web.pay -> web.shop SCTP/7",
            "web.pay -> db.shop TCP/5432",
        ],
    );
    town.cluster_policy(policy("Admin", 0, "ingress", from_all("Deny")));
    town.check(&[], &["web.pay -> web.shop ICMP", "web.pay -> web.shop GRE", "web.pay -> web.shop UDP/1"]);
}

#[test]
fn a_named_port_of_egress_is_one_of_each_destination() {
    let mut town = Town::new();
    let rule = json!([{"action": "Deny", "to": [{"namespaces": {}}], "protocols": [{"destinationNamedPort": "http"}]}]);
    town.cluster_policy(policy("Admin", 0, "egress", rule));
    let allowed = ["web.shop -> db.pay TCP/8080", "web.shop -> web.pay TCP/9090"];
    town.check(&allowed, &["web.shop -> db.pay TCP/9090", "web.shop -> web.pay TCP/8080"]);
}

#[test]
fn what_is_of_a_newer_version_is_closed() {
    let rules = |action: &str| {
        let rule = |peer: Value, protocols: Value| json!({"action": action, "from": [peer, {"namespaces": {}}], "protocols": protocols});
        let tcp = json!([{"tcp": {"destinationPort": {"number": 1}}}]);
        [
            rule(json!({"tenants": {}}), tcp.clone()),
            rule(json!({"networks": ["10.0.0.0/8"]}), tcp.clone()),
            rule(json!({"namespaces": {"matchExpressions": [{"key": "a", "operator": "Like"}]}}), tcp),
            rule(json!({"namespaces": {}}), json!([{"quic": {}}])),
            rule(json!({"namespaces": {}}), json!([{"tcp": {"sourcePort": {}}}])),
            rule(json!({"namespaces": {}}), json!([{"tcp": {"destinationPort": {}}}])),
            rule(json!({"namespaces": {}}), json!([])),
            json!({"action": action, "from": []}),
            json!({"action": action}),
        ]
    };
    for action in ["Accept", "Deny", "Pass"] {
        for rule in rules(action) {
            let mut town = Town::new();
            let later = json!({"action": "Deny", "from": [{"namespaces": {"matchLabels": {"team": "a"}}}]});
            let problems = town.cluster_policy(policy("Admin", 0, "ingress", json!([rule, later])));
            let (direction, place) = (Direction::Ingress, 0);
            if action == "Accept" {
                assert_eq!(problems, [Problem::Rule { direction, rule: place }], "{rule}");
                town.check(&["web.pay -> web.shop TCP/1"], &["web.shop -> db.shop TCP/1"]);
            } else {
                assert_eq!(problems, [Problem::DeniesAll { direction, rule: place }], "{rule}");
                town.check(
                    &["web.shop -> 192.0.2.1 TCP/1"],
                    &["web.pay -> web.shop TCP/1", "192.0.2.1 -> web.shop ICMP"],
                );
            }
        }
    }
    let mut town = Town::new();
    let rule = json!([{"action": "Log", "from": [{"namespaces": {"matchLabels": {"team": "b"}}}]}]);
    assert_eq!(town.cluster_policy(policy("Admin", 0, "ingress", rule)).len(), 1);
    town.check(&["web.shop -> db.shop TCP/1"], &["web.pay -> web.shop TCP/1"]);
}

#[test]
fn an_invalid_subject_only_denies() {
    let mut town = Town::new();
    let invalid = json!({"matchLabels": {"team": "a"}, "matchExpressions": [{"key": "x", "operator": "Like"}]});
    let rule = |action: &str, app: &str| json!({"action": action, "from": [{"pods": {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": app}}}}]});
    let rules = json!([rule("Accept", "web"), rule("Deny", "web"), rule("Pass", "db")]);
    let problems = town
        .cluster_policy(json!({"tier": "Admin", "priority": 0, "subject": {"namespaces": invalid}, "ingress": rules}));
    assert_eq!(problems, [Problem::Subject]);
    let allowed = ["web.shop -> web.pay TCP/1", "192.0.2.1 -> web.shop TCP/1"];
    town.check(&allowed, &["web.pay -> web.shop TCP/1", "db.pay -> web.shop TCP/1"]);
}

#[test]
fn a_policy_that_cannot_be_placed_is_refused() {
    let read = |spec: Value| {
        let object: kubernetes::ClusterNetworkPolicy =
            serde_json::from_value(json!({"metadata": {"name": "policy"}, "spec": spec})).unwrap();
        ClusterNetworkPolicy::try_from(&object).map(|_| ())
    };
    let all = json!({"namespaces": {}});
    assert_eq!(read(json!({"tier": "Admin", "priority": 1000, "subject": all})), Ok(()));
    assert_eq!(read(json!({"tier": "Middle", "priority": 1, "subject": all})), Err(Unreadable("tier")));
    assert_eq!(read(json!({"tier": "Admin", "priority": 1001, "subject": all})), Err(Unreadable("priority")));
    assert_eq!(read(json!({"tier": "Admin", "priority": -1, "subject": all})), Err(Unreadable("priority")));
    assert_eq!(read(json!({"tier": "Admin", "priority": 1, "subject": {"accounts": {}}})), Err(Unreadable("subject")));
}

#[test]
fn a_verdict_names_the_rule() {
    let mut town = Town::new();
    let deny = json!([{"action": "Pass", "from": [{"namespaces": {"matchLabels": {"team": "x"}}}]}, {"name": "no pay", "action": "Deny", "from": [{"namespaces": {}}]}]);
    town.cluster_policy(policy("Baseline", 7, "ingress", deny));
    let Reason::Rule { tier: Tier::Baseline, policy, rule: 1 } = town.judge("web.shop <- db.pay TCP/1").enforced.reason
    else {
        panic!("another reason");
    };
    let program = town.program("web.shop", Direction::Ingress);
    let program = Program::read(&program).unwrap();
    let name = program.policy(policy).unwrap();
    assert_eq!((name.name, name.priority, name.isolates, name.tier), ("policy", 7, false, Tier::Baseline));
    assert_eq!((program.rule(policy, 1), program.rule(policy, 0)), (Some("no pay"), None));
}

#[test]
fn the_api_object_is_written_as_it_is_read() {
    let object = json!({
        "metadata": {"name": "policy"},
        "spec": {"tier": "Admin", "priority": 3, "subject": {"pods": {"namespaceSelector": {}, "podSelector": {}}},
            "egress": [{"name": "x", "action": "Pass", "to": [{"domainNames": ["a.example"]}, {"nodes": {}}],
                "protocols": [{"tcp": {"destinationPort": {"range": {"start": 1, "end": 2}}}}]}]},
    });
    let read: kubernetes::ClusterNetworkPolicy = serde_json::from_value(object.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), object);
}
