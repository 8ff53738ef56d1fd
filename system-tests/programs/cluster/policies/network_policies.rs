//! What Kubernetes says of NetworkPolicies, a case for each statement, with the flows that are then allowed.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::Case;
use super::grid::{Flow, Pod};
use super::probes::Protocol::{Icmp, Sctp, Tcp, Udp};

fn policy(namespace: char, spec: Value) -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
           "metadata": {"namespace": namespace.to_string()}, "spec": spec})
}

/// A policy for all pods of a namespace.
fn for_all(namespace: char, spec: Value) -> Value {
    let mut policy = policy(namespace, spec);
    policy["spec"]["podSelector"] = json!({});
    policy
}

fn ingress(namespace: char, rule: Value) -> Value {
    for_all(namespace, json!({"policyTypes": ["Ingress"], "ingress": [rule]}))
}

fn egress(namespace: char, rule: Value) -> Value {
    for_all(namespace, json!({"policyTypes": ["Egress"], "egress": [rule]}))
}

fn pods(name: &str) -> Value {
    json!({"matchLabels": {"pod": name}})
}

fn namespaces(name: &str) -> Value {
    json!({"matchLabels": {"ns": name}})
}

fn pods_by(operator: &str, values: &[&str]) -> Value {
    match values {
        [] => json!({"matchExpressions": [{"key": "pod", "operator": operator}]}),
        values => json!({"matchExpressions": [{"key": "pod", "operator": operator, "values": values}]}),
    }
}

/// One policy for all pods of `x`, in different words: one replaces another in one step.
pub(super) fn alternatives() -> Vec<Case> {
    let both = |rules: Value| {
        let mut policy = for_all('x', rules);
        policy["spec"]["policyTypes"] = json!(["Ingress", "Egress"]);
        [policy]
    };
    let y_at_80 = json!({"from": [{"namespaceSelector": namespaces("y")}], "ports": [{"port": 80}]});
    let z_at_81 = |key: &str| {
        let ports = json!([{"port": 81}, {"port": 81, "protocol": "UDP"}, {"port": 81, "protocol": "SCTP"}]);
        json!({key: [{"namespaceSelector": namespaces("z")}], "ports": ports})
    };
    let from_b = json!({"from": [{"namespaceSelector": {}, "podSelector": pods("b")}]});
    let to_outside = json!({"to": [{"namespaceSelector": namespaces("w")}]});
    vec![
        Case::new("nothing", both(json!({})), |flow| !flow.is_to('x') && !flow.is_from('x')),
        Case::new("in from y by TCP 80, out nowhere", both(json!({"ingress": [y_at_80]})), |flow| {
            !flow.is_from('x') && (!flow.is_to('x') || flow.is_from('y') && flow.protocol == Tcp && flow.port == 80)
        }),
        Case::new(
            "in from z and out to z at port 81",
            both(json!({"ingress": [z_at_81("from")], "egress": [z_at_81("to")]})),
            |flow| {
                let comes = !flow.is_to('x') || flow.is_from('z') && flow.port == 81;
                comes && (!flow.is_from('x') || flow.is_to('z') && flow.port == 81)
            },
        ),
        Case::new("in from pods b, out to w", both(json!({"ingress": [from_b], "egress": [to_outside]})), |flow| {
            (!flow.is_to('x') || flow.from.name == 'b') && (!flow.is_from('x') || flow.is_to('w'))
        }),
    ]
}

/// Which pods a policy isolates.
pub(super) fn selection() -> Vec<Case> {
    let isolates = |what, selector: Value, names: &'static [char]| {
        let policy = policy('x', json!({"podSelector": selector, "policyTypes": ["Ingress"]}));
        Case::new(what, [policy], move |flow| !(flow.is_to('x') && names.contains(&flow.to.name)))
    };
    vec![
        isolates("an empty selector means all pods of the namespace", json!({}), &['a', 'b', 'c']),
        isolates("a label selects its pods", pods("a"), &['a']),
        isolates("In", pods_by("In", &["a", "b"]), &['a', 'b']),
        isolates("NotIn", pods_by("NotIn", &["a"]), &['b', 'c']),
        isolates("Exists", pods_by("Exists", &[]), &['a', 'b', 'c']),
        isolates("DoesNotExist", pods_by("DoesNotExist", &[]), &[]),
        isolates("labels that nobody has", json!({"matchLabels": {"pod": "a", "tier": "none"}}), &[]),
    ]
}

/// Which directions a policy is about.
pub(super) fn directions() -> Vec<Case> {
    let to_a = json!({"to": [{"podSelector": pods("a")}]});
    let from_a = json!({"from": [{"podSelector": pods("a")}]});
    vec![
        Case::new("egress only", [for_all('x', json!({"policyTypes": ["Egress"]}))], |flow| !flow.is_from('x')),
        Case::new("both", [for_all('x', json!({"policyTypes": ["Ingress", "Egress"]}))], |flow| {
            !flow.is_from('x') && !flow.is_to('x')
        }),
        Case::new("without types it is about ingress", [for_all('x', json!({}))], |flow| !flow.is_to('x')),
        // The pod that may be asked does not let anybody in.
        Case::new("without types but with egress rules it is about both", [for_all('x', json!({"egress": [to_a]}))], {
            |flow| !flow.is_to('x') && !flow.is_from('x')
        }),
        Case::new(
            "rules of a direction that is not named do not count",
            [for_all('x', json!({"policyTypes": ["Egress"], "ingress": [from_a], "egress": [{}]}))],
            |_| true,
        ),
        Case::new("no rules allow nothing", [for_all('x', json!({"policyTypes": ["Ingress"], "ingress": []}))], {
            |flow| !flow.is_to('x')
        }),
        Case::new("an empty rule allows everything in", [ingress('x', json!({}))], |_| true),
        Case::new("an empty rule allows everything out", [egress('x', json!({}))], |_| true),
        Case::new("a policy of one namespace leaves the others alone", [ingress('z', from_a.clone())], |flow| {
            !flow.is_to('z') || flow.is_from('z') && flow.from.name == 'a'
        }),
        Case::new(
            "both ends must allow",
            [
                egress('x', json!({"to": [{"namespaceSelector": namespaces("y")}]})),
                ingress(
                    'y',
                    json!({"from": [{"podSelector": {}, "namespaceSelector": namespaces("x")}],
                                    "ports": [{"port": 80}]}),
                ),
            ],
            |flow| {
                let goes = !flow.is_from('x') || flow.is_to('y');
                let comes = !flow.is_to('y') || flow.is_from('x') && flow.protocol == Tcp && flow.port == 80;
                goes && comes
            },
        ),
    ]
}

/// Who the other end may be.
pub(super) fn peers() -> Vec<Case> {
    let comes = |what, peers: Value, allows: fn(&Pod) -> bool| {
        Case::new(what, [ingress('x', json!({"from": peers}))], move |flow| !flow.is_to('x') || allows(&flow.from))
    };
    let goes = |what, peers: Value, allows: fn(&Pod) -> bool| {
        Case::new(what, [egress('x', json!({"to": peers}))], move |flow| !flow.is_from('x') || allows(&flow.to))
    };
    let in_y_or_z = json!({"matchExpressions": [{"key": "ns", "operator": "In", "values": ["y", "z"]}]});
    vec![
        comes("no peers mean everybody", json!([]), |_| true),
        comes("pods of its own namespace", json!([{"podSelector": pods("b")}]), |pod| {
            pod.namespace == 'x' && pod.name == 'b'
        }),
        comes("all pods of its own namespace", json!([{"podSelector": {}}]), |pod| pod.namespace == 'x'),
        comes("all pods of a namespace", json!([{"namespaceSelector": namespaces("y")}]), |pod| pod.namespace == 'y'),
        comes("all namespaces", json!([{"namespaceSelector": {}}]), |_| true),
        comes("namespaces by expression", json!([{"namespaceSelector": in_y_or_z}]), |pod| {
            ['y', 'z'].contains(&pod.namespace)
        }),
        comes(
            "one item with both selectors means pods that both match",
            json!([{"namespaceSelector": namespaces("y"), "podSelector": pods("c")}]),
            |pod| pod.namespace == 'y' && pod.name == 'c',
        ),
        comes(
            "two items mean either",
            json!([{"namespaceSelector": namespaces("y")}, {"podSelector": pods("c")}]),
            |pod| pod.namespace == 'y' || pod.namespace == 'x' && pod.name == 'c',
        ),
        comes("a selector that nobody matches", json!([{"podSelector": pods("q")}]), |_| false),
        goes("out to pods of its own namespace", json!([{"podSelector": pods("b")}]), |pod| {
            pod.namespace == 'x' && pod.name == 'b'
        }),
        goes("out to a namespace", json!([{"namespaceSelector": namespaces("z")}]), |pod| pod.namespace == 'z'),
        goes("out to pods of any namespace", json!([{"namespaceSelector": {}, "podSelector": pods("a")}]), |pod| {
            pod.name == 'a'
        }),
        Case::new(
            "policies add up",
            [
                ingress('x', json!({"from": [{"podSelector": pods("b")}]})),
                ingress('x', json!({"from": [{"namespaceSelector": namespaces("y")}], "ports": [{"port": 81}]})),
                policy(
                    'x',
                    json!({"podSelector": pods("a"), "policyTypes": ["Ingress"],
                                   "ingress": [{"from": [{"namespaceSelector": namespaces("z")}]}]}),
                ),
            ],
            |flow| {
                !flow.is_to('x')
                    || flow.is_from('x') && flow.from.name == 'b'
                    || flow.is_from('y') && flow.protocol == Tcp && flow.port == 81
                    || flow.is_from('z') && flow.to.name == 'a'
            },
        ),
    ]
}

/// Protocols and ports.
pub(super) fn ports() -> Vec<Case> {
    let comes = |what, ports: Value, allows: fn(&Flow) -> bool| {
        Case::new(what, [ingress('x', json!({"ports": ports}))], move |flow| !flow.is_to('x') || allows(flow))
    };
    vec![
        comes("no ports mean all, and messages of ICMP", json!([]), |_| true),
        comes("a number is one of TCP", json!([{"port": 80}]), |flow| flow.protocol == Tcp && flow.port == 80),
        comes("of UDP", json!([{"port": 81, "protocol": "UDP"}]), |flow| flow.protocol == Udp && flow.port == 81),
        comes("of SCTP", json!([{"port": 82, "protocol": "SCTP"}]), |flow| flow.protocol == Sctp && flow.port == 82),
        comes("a protocol without a number means all its ports", json!([{"protocol": "UDP"}]), |flow| {
            flow.protocol == Udp
        }),
        comes("several", json!([{"port": 80}, {"port": 81, "protocol": "UDP"}]), |flow| {
            (flow.protocol, flow.port) == (Tcp, 80) || (flow.protocol, flow.port) == (Udp, 81)
        }),
        comes("a name", json!([{"port": "serve-82-u", "protocol": "UDP"}]), |flow| {
            flow.protocol == Udp && flow.port == 82
        }),
        comes("a name is of its protocol", json!([{"port": "serve-82-u", "protocol": "TCP"}]), |_| false),
        comes("a name that no container has", json!([{"port": "nothing"}]), |_| false),
        comes("a name means another number in each pod", json!([{"port": "web"}]), is_web),
        Case::new(
            "out to a name: that of the other end",
            [egress('x', json!({"to": [{"namespaceSelector": namespaces("y")}], "ports": [{"port": "web"}]}))],
            |flow| !flow.is_from('x') || flow.is_to('y') && is_web(flow),
        ),
        Case::new("out to ports of everybody", [egress('x', json!({"ports": [{"port": 82}]}))], |flow| {
            !flow.is_from('x') || flow.protocol == Tcp && flow.port == 82
        }),
        Case::new(
            "ports and peers of a rule must both match",
            [ingress('x', json!({"from": [{"namespaceSelector": namespaces("z")}], "ports": [{"port": 80}]}))],
            |flow| !flow.is_to('x') || flow.is_from('z') && flow.protocol == Tcp && flow.port == 80,
        ),
        Case::new(
            "a rule without ports beside one with ports allows ICMP of its own peers",
            [for_all(
                'x',
                json!({"policyTypes": ["Ingress"], "ingress": [
                {"from": [{"namespaceSelector": namespaces("z")}]}, {"ports": [{"port": 80}]}]}),
            )],
            |flow| !flow.is_to('x') || flow.is_from('z') || flow.protocol == Tcp && flow.port == 80,
        ),
        comes("ICMP is not among ports", json!([{"protocol": "TCP"}, {"protocol": "UDP"}, {"protocol": "SCTP"}]), {
            |flow| flow.protocol != Icmp
        }),
    ]
}

/// Ranges of addresses; `first` is an address of `x/a`, `other` that of the other family.
pub(super) fn ranges(first: IpAddr, other: IpAddr) -> Vec<Case> {
    let host = |address: IpAddr| format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 });
    let [first_only, other_only] = [first, other].map(host);
    let is_first = |pod: &Pod| pod.namespace == 'x' && pod.name == 'a';
    let all = |address: IpAddr| if address.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
    let both = [all(first), all(other)];
    vec![
        Case::new(
            "a range of one pod's addresses",
            [ingress('y', json!({"from": [{"ipBlock": {"cidr": first_only}}, {"ipBlock": {"cidr": other_only}}]}))],
            move |flow| !flow.is_to('y') || is_first(&flow.from),
        ),
        Case::new(
            "all but one pod's addresses",
            [ingress(
                'y',
                json!({"from": [{"ipBlock": {"cidr": both[0], "except": [first_only]}},
                                          {"ipBlock": {"cidr": both[1], "except": [other_only]}}]}),
            )],
            move |flow| !flow.is_to('y') || !is_first(&flow.from),
        ),
        Case::new(
            "out to a range",
            [egress(
                'y',
                json!({"to": [{"ipBlock": {"cidr": first_only}}, {"ipBlock": {"cidr": other_only}}],
                                "ports": [{"port": 80}]}),
            )],
            move |flow| !flow.is_from('y') || is_first(&flow.to) && flow.protocol == Tcp && flow.port == 80,
        ),
    ]
}

/// The TCP port that `grid` calls `web` in each pod.
fn is_web(flow: &Flow) -> bool {
    let port = match flow.to.name {
        'a' => 80,
        'b' => 81,
        _ => 82,
    };
    flow.protocol == Tcp && flow.port == port
}
