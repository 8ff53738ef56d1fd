//! What the API says of ClusterNetworkPolicies, a case for each statement, with the flows that are then allowed.

use serde_json::{Value, json};

use super::Case;
use super::grid::Flow;
use super::probes::Protocol::{Sctp, Tcp, Udp};

fn policy(tier: &str, priority: u16, subject: Value, rules: Value) -> Value {
    let mut policy = json!({
        "apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy", "metadata": {},
        "spec": {"tier": tier, "priority": priority, "subject": subject},
    });
    for (key, value) in rules.as_object().expect("directions") {
        policy["spec"][key] = value.clone();
    }
    policy
}

fn namespaces(name: &str) -> Value {
    json!({"namespaces": {"matchLabels": {"ns": name}}})
}

fn pods(namespace: &str, name: &str) -> Value {
    json!({"pods": {"namespaceSelector": {"matchLabels": {"ns": namespace}},
                    "podSelector": {"matchLabels": {"pod": name}}}})
}

/// All addresses of pods.
fn networks() -> Value {
    json!({"networks": ["10.244.0.0/16", "fd00:10:244::/48"]})
}

fn everybody() -> Value {
    json!({"namespaces": {}})
}

/// A rule of ingress, or of egress with `to`.
fn rule(action: &str, key: &str, peers: &[Value]) -> Value {
    let mut rule = json!({"action": action});
    rule[key] = json!(peers);
    rule
}

fn with_protocols(mut rule: Value, protocols: Value) -> Value {
    rule["protocols"] = protocols;
    rule
}

/// Isolates all pods of a namespace from what comes.
fn isolated(namespace: char) -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
           "metadata": {"namespace": namespace.to_string()},
           "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}})
}

/// Order of tiers, policies and rules.
pub(super) fn order() -> Vec<Case> {
    let from_y = |action| json!({"ingress": [rule(action, "from", &[namespaces("y")])]});
    let admin = |priority, rules| policy("Admin", priority, namespaces("x"), rules);
    let baseline = |priority, rules| policy("Baseline", priority, namespaces("x"), rules);
    let refused = |flow: &Flow| !(flow.is_to('x') && flow.is_from('y'));
    vec![
        Case::new("Admin denies what nobody else refuses", [admin(10, from_y("Deny"))], refused),
        Case::new("Admin accepts before a NetworkPolicy refuses", [admin(10, from_y("Accept")), isolated('x')], {
            |flow| !flow.is_to('x') || flow.is_from('y')
        }),
        Case::new("Pass leaves it to NetworkPolicies", [admin(10, from_y("Pass")), isolated('x')], |flow| {
            !flow.is_to('x')
        }),
        Case::new("Pass skips the rest of the tier", [admin(10, from_y("Pass")), admin(20, from_y("Deny"))], |_| true),
        Case::new("Pass leads to Baseline", [admin(10, from_y("Pass")), baseline(0, from_y("Deny"))], refused),
        Case::new("the lower priority comes first", [admin(20, from_y("Deny")), admin(10, from_y("Accept"))], |_| true),
        Case::new("and so it does the other way round", [admin(20, from_y("Accept")), admin(10, from_y("Deny"))], {
            refused
        }),
        Case::new(
            "the first rule that matches decides",
            [admin(
                10,
                json!({"ingress": [rule("Accept", "from", &[pods("y", "a")]),
                                          rule("Deny", "from", &[namespaces("y")]),
                                          rule("Accept", "from", &[everybody()])]}),
            )],
            |flow| !(flow.is_to('x') && flow.is_from('y') && flow.from.name != 'a'),
        ),
        Case::new("Baseline refuses where no NetworkPolicy is", [baseline(10, from_y("Deny"))], refused),
        Case::new(
            "Baseline says nothing of pods that a NetworkPolicy selects",
            [baseline(10, json!({"ingress": [rule("Accept", "from", &[everybody()])]})), isolated('x')],
            |flow| !flow.is_to('x'),
        ),
        Case::new(
            "but it does of their other direction",
            [
                baseline(
                    10,
                    json!({"egress": [rule("Deny", "to", &[namespaces("z")])],
                                    "ingress": [rule("Accept", "from", &[everybody()])]}),
                ),
                isolated('x'),
            ],
            |flow| !(flow.is_to('x') || flow.is_from('x') && flow.is_to('z')),
        ),
        Case::new("Admin decides before Baseline", [admin(10, from_y("Accept")), baseline(0, from_y("Deny"))], |_| {
            true
        }),
        Case::new(
            "in Baseline, too, the lower priority comes first",
            [baseline(2, from_y("Accept")), baseline(1, from_y("Deny"))],
            refused,
        ),
        Case::new("without a match everything is allowed", [admin(10, json!({"ingress": []}))], |_| true),
        Case::new(
            "an audited policy refuses nothing",
            [{
                let mut policy = admin(10, from_y("Deny"));
                policy["metadata"]["annotations"] = json!({"nebula-cni/audit": "true"});
                policy
            }],
            |_| true,
        ),
    ]
}

/// Subjects and peers.
pub(super) fn ends() -> Vec<Case> {
    let admin = |subject, rules| [policy("Admin", 10, subject, rules)];
    vec![
        Case::new(
            "a subject of all namespaces",
            admin(everybody(), json!({"ingress": [rule("Deny", "from", &[pods("z", "c")])]})),
            |flow| !(flow.is_from('z') && flow.from.name == 'c') || flow.to.is_outside(),
        ),
        Case::new(
            "a subject of pods",
            admin(pods("x", "b"), json!({"ingress": [rule("Deny", "from", &[everybody()])]})),
            |flow| !(flow.is_to('x') && flow.to.name == 'b'),
        ),
        Case::new(
            "several peers mean any of them",
            admin(namespaces("x"), json!({"ingress": [rule("Deny", "from", &[namespaces("y"), pods("z", "a")])]})),
            |flow| !(flow.is_to('x') && (flow.is_from('y') || flow.is_from('z') && flow.from.name == 'a')),
        ),
        Case::new(
            "out to namespaces",
            admin(namespaces("x"), json!({"egress": [rule("Deny", "to", &[namespaces("z")])]})),
            |flow| !(flow.is_from('x') && flow.is_to('z')),
        ),
        Case::new(
            "out to some pods and to nobody else",
            admin(
                namespaces("x"),
                json!({"egress": [rule("Accept", "to", &[pods("y", "b")]),
                                                     rule("Deny", "to", &[everybody()])]}),
            ),
            |flow| !flow.is_from('x') || flow.is_to('y') && flow.to.name == 'b',
        ),
        Case::new(
            "networks match pods by their addresses",
            admin(
                namespaces("x"),
                json!({"egress": [rule("Accept", "to", &[namespaces("x")]),
                                                     rule("Deny", "to", &[networks()])]}),
            ),
            |flow| !flow.is_from('x') || flow.is_to('x'),
        ),
        Case::new(
            "both directions of one policy",
            admin(
                namespaces("x"),
                json!({"ingress": [rule("Deny", "from", &[namespaces("y")])],
                                          "egress": [rule("Deny", "to", &[namespaces("z")])]}),
            ),
            |flow| !(flow.is_to('x') && flow.is_from('y') || flow.is_from('x') && flow.is_to('z')),
        ),
        Case::new(
            "Accept for an unknown kind of peer matches nobody",
            admin(
                namespaces("x"),
                json!({"ingress": [rule("Accept", "from", &[json!({"planets": {}})]),
                                                      rule("Deny", "from", &[namespaces("y")])]}),
            ),
            |flow| !(flow.is_to('x') && flow.is_from('y')),
        ),
        Case::new(
            "Deny for an unknown kind of peer matches everybody",
            admin(namespaces("x"), json!({"ingress": [rule("Deny", "from", &[json!({"planets": {}})])]})),
            |flow| !flow.is_to('x'),
        ),
    ]
}

/// Protocols and ports.
pub(super) fn protocols() -> Vec<Case> {
    let denies = |what, protocols: Value, refuses: fn(&Flow) -> bool| {
        let rule = with_protocols(rule("Deny", "from", &[everybody()]), protocols);
        let policy = policy("Admin", 10, namespaces("x"), json!({"ingress": [rule]}));
        Case::new(what, [policy], move |flow| !(flow.is_to('x') && refuses(flow)))
    };
    vec![
        denies("a port of TCP", json!([{"tcp": {"destinationPort": {"number": 80}}}]), |flow| {
            flow.protocol == Tcp && flow.port == 80
        }),
        denies("a range of TCP", json!([{"tcp": {"destinationPort": {"range": {"start": 80, "end": 81}}}}]), |flow| {
            flow.protocol == Tcp && flow.port < 82
        }),
        denies(
            "a range of UDP",
            json!([{"udp": {"destinationPort": {"range": {"start": 81, "end": 65535}}}}]),
            |flow| flow.protocol == Udp && flow.port > 80,
        ),
        denies("a port of SCTP", json!([{"sctp": {"destinationPort": {"number": 82}}}]), |flow| {
            flow.protocol == Sctp && flow.port == 82
        }),
        denies("a named port of the destination", json!([{"destinationNamedPort": "serve-81-s"}]), |flow| {
            flow.protocol == Sctp && flow.port == 81
        }),
        denies(
            "several",
            json!([{"tcp": {"destinationPort": {"number": 80}}}, {"udp": {"destinationPort": {"number": 80}}}]),
            |flow| flow.port == 80 && flow.protocol != Sctp,
        ),
        Case::new(
            "no protocols mean everything",
            [policy("Admin", 10, namespaces("x"), json!({"ingress": [rule("Deny", "from", &[everybody()])]}))],
            |flow| !flow.is_to('x'),
        ),
    ]
}
