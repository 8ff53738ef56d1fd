use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::compile::{Cluster, Subject};
use crate::model::{Direction, Labels, NetworkPolicy, Profile};
use crate::program::{self, Identity, Program};

fn labels(all: &[(&str, &str)]) -> StableLabels {
    all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn pod(namespace: &str, all: &[(&str, &str)]) -> Peer {
    Peer::Pod { namespace: namespace.to_owned(), labels: labels(all) }
}

fn flow(of: &[(&str, &str)], is_egress: bool, peer: Peer, port: u16) -> Flow {
    Flow { labels: labels(of), is_egress, peer, protocol: 6, port, flows: 2, last: 1_700_000_000 }
}

/// The objects in a text, as a server reads them.
fn read(text: &str) -> Vec<Value> {
    let documents = text.split("---\n").skip(1);
    documents.map(|document| serde_saphyr::from_str(document).unwrap()).collect()
}

fn as_policy(object: &Value) -> NetworkPolicy {
    let api: k8s_openapi::api::networking::v1::NetworkPolicy = serde_json::from_value(object.clone()).unwrap();
    // What the types do not know is lost.
    assert_eq!(serde_json::to_value(&api).unwrap()["spec"], object["spec"]);
    NetworkPolicy::try_from(&api).unwrap()
}

#[test]
fn each_set_of_pods_has_a_policy_with_counts_and_what_no_policy_can_say() {
    let web = [("app", "web")];
    let icmp = Flow { protocol: 1, port: 0, ..flow(&web, true, pod("pay", &[("app", "db")]), 0) };
    let outside = Peer::Address("192.0.2.7".parse().unwrap());
    let flows = vec![
        flow(&web, true, pod("pay", &[("app", "db")]), 5432),
        flow(&web, false, outside, 80),
        Flow { last: 5, ..flow(&[("app", "old")], false, pod("shop", &web), 80) },
        flow(&web, false, Peer::Gone("10.0.0.9".parse().unwrap()), 80),
        icmp,
    ];
    let known =
        BTreeMap::from([("pay".to_owned(), [labels(&[("app", "db")]), labels(&[("app", "db"), ("x", "y")])].into())]);
    let dns = Some(pod("kube-system", &[("k8s-app", "kube-dns")]));
    let silent = vec!["shop/mute: \u{202e}no\nanswer".to_owned()];
    let seen = Seen { namespace: "shop".to_owned(), pods: 3, flows, lost: 7, silent, known, dns };
    let suggestion = Suggestion::of(&seen, 10);
    let (text, policies) = (suggestion.text(&seen), &suggestion.policies);
    assert!(text.chars().all(|c| c == '\n' || nebula_cert::is_visible(c)), "{text}");
    for part in [
        "# INCOMPLETE: instances have forgotten 7 flow(s)",
        "# INCOMPLETE: shop/mute: \\u{202e}no\\nanswer\n",
        "# not allowed by this policy: 2 flow(s) from pods that are gone by now\n",
        "# not allowed by this policy: 2 flow(s) protocol 1 to pods of pay with app=db\n",
        "{protocol: TCP, port: 5432}  # 2 flow(s), the last one at 2023-11-14T22:13:20Z\n",
        "ipBlock: {cidr: \"192.0.2.7/32\"}",
        "{key: \"x\", operator: DoesNotExist}",
        "{protocol: UDP, port: 53}  # DNS\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(policies.len(), 1, "the other pod was not seen since then");
    assert_eq!(read(&text), [policies[0].object()]);
    assert_eq!(as_policy(&policies[0].object()).rules(Direction::Egress).len(), 2);
}

#[test]
fn a_namespace_whose_labels_are_hidden_is_allowed_as_a_whole_with_a_comment() {
    let web = [("app", "web")];
    let hidden = |namespace: &str| Peer::Namespace(namespace.to_owned());
    let seen = Seen {
        namespace: "shop".to_owned(),
        flows: vec![flow(&web, true, hidden("pay"), 80), flow(&web, false, hidden("a\nb"), 443)],
        dns: Some(hidden("kube-system")),
        ..Seen::default()
    };
    let suggestion = Suggestion::of(&seen, 0);
    let text = suggestion.text(&seen);
    for namespace in ["pay", "a\\nb", "kube-system"] {
        assert!(text.contains(&format!("# wider than what was seen: all pods of {namespace}, ")), "{text}");
    }
    let objects = read(&text);
    assert_eq!(objects, [suggestion.policies[0].object()]);
    let by_name = |namespace: &str| json!({"matchLabels": {NAME_OF_NAMESPACE: namespace}});
    assert_eq!(objects[0]["spec"]["ingress"][0]["from"][0]["namespaceSelector"], by_name("a\nb"));
    let egress = objects[0]["spec"]["egress"].as_array().unwrap();
    for (rule, namespace) in egress.iter().zip(["kube-system", "pay"]) {
        assert_eq!(rule["to"], json!([{"podSelector": {}, "namespaceSelector": by_name(namespace)}]));
    }
    assert_eq!((egress.len(), egress[0]["ports"][0]["port"].as_u64()), (2, Some(53)));
    // A pod without labels is one that was seen.
    let shown = Seen { flows: vec![flow(&web, true, pod("pay", &[]), 80)], dns: None, ..seen };
    let text = Suggestion::of(&shown, 0).text(&shown);
    assert!(text.contains("namespaceSelector") && !text.contains("wider"), "{text}");
}

#[test]
fn hostile_labels_stay_strings_and_names_are_valid_and_different() {
    let evil = [("app\"\n- {}", "*x: &y # \\ \u{202e}\u{0}true"), ("app", "../x\n---\nkind: Secret")];
    let seen = Seen {
        namespace: "shop".to_owned(),
        flows: vec![
            flow(&evil, true, pod("a\"\nb", &evil), 1),
            flow(&[("a", "bc")], true, pod("shop", &[]), 1),
            flow(&[("ab", "c")], true, pod("shop", &[]), 1),
        ],
        ..Seen::default()
    };
    let suggestion = Suggestion::of(&seen, 0);
    let (text, policies) = (suggestion.text(&seen), &suggestion.policies);
    assert!(text.is_ascii(), "{text}");
    let objects = read(&text.replace("\\n---\\n", ""));
    assert_eq!(objects.len(), 3, "{text}");
    let names: BTreeSet<&str> = objects.iter().map(|object| object["metadata"]["name"].as_str().unwrap()).collect();
    assert!(names.len() == 3 && names.iter().all(|name| is_name(name)), "{names:?}");
    for (policy, object) in policies.iter().zip(&objects) {
        assert_eq!(policy.object(), *object);
    }
    let many: Vec<(String, String)> = (0..=MAX_REQUIREMENTS).map(|n| (n.to_string(), String::new())).collect();
    let many: StableLabels = many.into_iter().collect();
    let crowded = Flow { labels: many, ..flow(&[], true, pod("shop", &[]), 1) };
    let crowded = Seen { flows: vec![crowded], ..Seen::default() };
    assert_eq!(Suggestion::of(&crowded, 0), Suggestion { policies: Vec::new(), without: 1 });
}

/// Sets of labels some of which contain others.
fn any_labels() -> impl Strategy<Value = StableLabels> {
    proptest::collection::btree_map(prop_oneof!["app", "tier", "x"].prop_map(|key| key), "[ab]", 0..3)
}

fn any_peer() -> impl Strategy<Value = Peer> {
    prop_oneof![
        4 => ("shop|pay", any_labels()).prop_map(|(namespace, labels)| Peer::Pod { namespace, labels }),
        1 => (0..4_u8).prop_map(|last| Peer::Address([192, 0, 2, last].into())),
    ]
}

fn any_flow() -> impl Strategy<Value = Flow> {
    let protocol = prop_oneof![Just(6_u8), Just(17), Just(132)];
    (any_labels(), any::<bool>(), any_peer(), protocol, 1..4_u16).prop_map(
        |(labels, is_egress, peer, protocol, port)| Flow { labels, is_egress, peer, protocol, port, flows: 1, last: 1 },
    )
}

proptest! {
    #[test]
    fn what_was_seen_is_allowed_and_nothing_else(
        flows in proptest::collection::vec(any_flow(), 1..12),
        others in proptest::collection::vec(("shop|pay", any_labels()), 0..6),
    ) {
        let mut known: BTreeMap<String, BTreeSet<StableLabels>> = BTreeMap::new();
        let mut is_known = |namespace: &str, labels: &StableLabels| {
            known.entry(namespace.to_owned()).or_default().insert(labels.clone());
        };
        for flow in &flows {
            is_known("shop", &flow.labels);
            if let Peer::Pod { namespace, labels } = &flow.peer {
                is_known(namespace, labels);
            }
        }
        others.iter().for_each(|(namespace, labels)| is_known(namespace, labels));
        let seen = Seen { namespace: "shop".to_owned(), flows: flows.clone(), known: known.clone(), ..Seen::default() };
        let suggestion = Suggestion::of(&seen, 0);

        let mut cluster = Cluster::new();
        let mut pods: Vec<(Peer, Identity)> = Vec::new();
        for (namespace, sets) in &known {
            let of_namespace = Labels::from([(NAME_OF_NAMESPACE.to_owned(), namespace.clone())]);
            for labels in sets {
                let profile = Profile::new(namespace, of_namespace.clone(), labels.clone(), Vec::new()).unwrap();
                let identity = cluster.identify(profile).unwrap();
                pods.push((Peer::Pod { namespace: namespace.clone(), labels: labels.clone() }, identity));
            }
        }
        for object in read(&suggestion.text(&seen)) {
            prop_assert_eq!(cluster.set_policy(&as_policy(&object)), []);
        }
        let outside = (0..4_u8).map(|last| Peer::Address([192, 0, 2, last].into()));
        let peers: Vec<Peer> = pods.iter().map(|(pod, _)| pod.clone()).chain(outside).collect();
        for (subject, identity) in &pods {
            let Peer::Pod { namespace, labels } = subject else { continue };
            // Pods without flows have no policy.
            if namespace != "shop" || !flows.iter().any(|flow| flow.labels == *labels) {
                continue;
            }
            let own = Subject { identity: *identity, addresses: vec![[10, 0, 0, 1].into()], node: Vec::new() };
            for direction in Direction::ALL {
                let compiled = cluster.compile(&own, direction);
                let program = Program::read(&compiled.bytes).unwrap();
                for peer in &peers {
                    let found = pods.iter().find(|(pod, _)| pod == peer).map(|(_, identity)| *identity);
                    let end = match (found, peer) {
                        (Some(identity), _) => program::Peer::pod(identity, Some([10, 0, 0, 2].into())),
                        (None, Peer::Address(address)) => program::Peer::outside(*address),
                        _ => continue,
                    };
                    for (protocol, port) in [6, 17, 132].into_iter().flat_map(|protocol| (1..5).map(move |port| (protocol, port))) {
                        let was_seen = flows.iter().any(|flow| {
                            flow.labels == *labels
                                && flow.is_egress == (direction == Direction::Egress)
                                && flow.peer == *peer
                                && (flow.protocol, flow.port) == (protocol, port)
                        });
                        let verdict = program.judge(&end, protocol, port).is_allowed();
                        prop_assert_eq!(verdict, was_seen, "{:?} {:?} {:?} {}/{}", labels, direction, peer, protocol, port);
                    }
                    prop_assert!(!program.judge(&end, 1, 0).is_allowed());
                }
            }
        }
    }
}
