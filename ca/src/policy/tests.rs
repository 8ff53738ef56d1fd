use super::*;
use crate::pod::Confirmed;

fn pods(json: &str) -> Result<PodPolicy, PolicyError> {
    Ok(Policy::parse(&format!("{{\"pods\": {json}}}"))?.pods.unwrap())
}

fn refused(json: &str) -> String {
    pods(json).unwrap_err().to_string()
}

fn pod() -> PodFacts {
    PodFacts {
        namespace: "shop".into(),
        name: "web-0".into(),
        uid: "u-1".into(),
        address: "10.244.0.5".parse().unwrap(),
        other_address: None,
        node: None,
        is_vouched_by_node: false,
        confirmed: None,
    }
}

/// A pod as the API server confirms it.
fn confirmed(labels: &[(&str, &str)]) -> PodFacts {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let service_account = "front".to_owned();
    PodFacts {
        confirmed: Some(Confirmed { service_account, node: "n1".into(), labels, ..Confirmed::default() }),
        ..pod()
    }
}

const KUBERNETES: &str = r#""kubernetes": {"node_account": "nebula-system/agent"}"#;

fn kube_pods(json: &str) -> PodPolicy {
    Policy::parse(&format!("{{{KUBERNETES}, \"pods\": {json}}}")).unwrap().pods.unwrap()
}

#[test]
fn defaults_name_a_pod_by_namespace_and_name() {
    let pods = pods(r#"{"overlay": ["10.42.0.0/16"]}"#).unwrap();
    assert_eq!(pods.name(&pod()).unwrap(), "web-0.shop.pod");
    assert_eq!(pods.groups(&pod()), ["ns:shop"]);
    assert_eq!((pods.life, pods.address), (86_400, AddressMode::Derive));
    assert_eq!(pods.derive(only(pod().address)).unwrap(), ["10.42.0.5/16".parse().unwrap()]);
}

#[test]
fn the_file_made_by_init_is_valid_and_documents_itself() {
    let text = crate::init::policy_text(&["10.42.0.0/16".parse().unwrap(), "fd42::/64".parse().unwrap()]);
    assert_eq!(Policy::parse(&text).unwrap().pods.unwrap().overlay.len(), 2);
    assert!(text.lines().filter(|line| line.trim_start().starts_with("//")).count() > 10);
}

#[test]
fn provisional_certificates_need_kubernetes_and_have_groups_and_a_life_of_their_own() {
    let without = refused(r#"{"overlay": ["10.42.0.0/16"], "provisional": {"life": "x", "groups": ["{nobody}"]}}"#);
    for part in ["pods.provisional: ", "pods.provisional.life: ", "pods.provisional.groups: "] {
        assert!(without.contains(part), "{without}");
    }
    let pods =
        kube_pods(r#"{"overlay": ["10.42.0.0/16"], "provisional": {"groups": ["new:{namespace}"], "life": "5m"}}"#);
    let provisional = pods.provisional.unwrap();
    assert_eq!((provisional.groups(&confirmed(&[])), provisional.life), (vec!["new:shop".to_owned()], 300));
    assert!(kube_pods(r#"{"overlay": ["10.42.0.0/16"]}"#).provisional.is_none());
}

#[test]
fn without_a_pods_section_there_is_no_pod_policy() {
    let policy = Policy::parse("// nothing\n{}").unwrap();
    assert!(policy.pods.is_none());
    assert_eq!((policy.hosts.longest_life, policy.hosts.renewal_grace), (365 * 86_400, 7 * 86_400));
}

#[test]
fn templates_take_name_namespace_and_uid() {
    let pods = pods(r#"{"overlay": ["10.42.0.0/16"], "name": "{uid}", "groups": ["all", "a {namespace}/{name} z"]}"#);
    let pods = pods.unwrap();
    assert_eq!(pods.name(&pod()).unwrap(), "u-1");
    assert_eq!(pods.groups(&pod()), ["all", "a shop/web-0 z"]);
}

#[test]
fn a_template_is_never_applied_to_its_own_output() {
    let pods = pods(r#"{"overlay": ["10.42.0.0/16"], "name": "{name}"}"#).unwrap();
    assert_eq!(pods.name(&PodFacts { name: "{uid}".into(), ..pod() }).unwrap(), "{uid}");
}

#[test]
fn bad_templates_are_refused_at_start() {
    for template in ["", "{node}", "{name", "name}", "{}", "a\\u0000b"] {
        let text = refused(&format!(r#"{{"overlay": ["10.42.0.0/16"], "name": "{template}"}}"#));
        assert!(text.contains("template"), "{template}: {text}");
    }
}

#[test]
fn a_name_too_long_for_nebula_is_refused_not_cut() {
    let pods = pods(r#"{"overlay": ["10.42.0.0/16"]}"#).unwrap();
    let name = "a".repeat(250);
    assert!(matches!(pods.name(&PodFacts { name, ..pod() }), Err(Refusal::NameTooLong(259))));
}

#[test]
fn misspelt_keys_and_bad_values_are_refused_with_their_name() {
    assert!(refused(r#"{"overlay": ["10.42.0.0/16"], "lifetime": "1h"}"#).contains("lifetime"));
    assert!(refused(r#"{"overlay": ["10.42.0.0/16"], "life": "1 day"}"#).contains("pods.life"));
    assert!(refused(r#"{"overlay": []}"#).contains("pods.overlay"));
    assert!(refused("{}").contains("overlay"));
    assert!(refused(r#"{"overlay": ["10.42.0.0/16", "10.42.3.0/24"]}"#).contains("overlaps"));
    assert!(refused(r#"{"overlay": ["fd42::/112"]}"#).contains("/96"));
    assert!(Policy::parse("").is_err());
}

#[test]
fn errors_name_the_line_of_the_file_with_its_comments() {
    let text = Policy::parse("// one\n// two\n{\n\"wrong\": 1\n}").unwrap_err().to_string();
    assert!(text.contains("line 4"), "{text}");
}

#[test]
fn pod_networks_that_would_share_overlay_addresses_are_refused() {
    let with =
        |overlay: &str, networks: &str| pods(&format!(r#"{{"overlay": ["{overlay}"], "pod_networks": {networks}}}"#));
    assert!(with("10.42.0.0/16", r#"["10.244.0.0/16"]"#).is_ok());
    assert!(with("10.42.0.0/16", r#"["10.244.0.0/17", "10.9.128.0/17"]"#).is_ok());
    assert!(with("10.42.0.0/24", r#"["10.244.0.0/16"]"#).is_err());
    assert!(with("10.42.0.0/16", r#"["10.244.0.0/16", "10.245.0.0/16"]"#).is_err());
    assert!(with("fd42::/96", r#"["10.244.0.0/16", "10.245.0.0/16"]"#).is_ok());
    assert!(with("10.42.0.0/16", r#"["fd00::/64"]"#).is_err());
}

#[test]
fn addresses_outside_known_pod_networks_are_refused() {
    let pods = pods(r#"{"overlay": ["10.42.0.0/16"], "pod_networks": ["10.244.0.0/16"]}"#).unwrap();
    pods.check_pod_address("10.244.9.9".parse().unwrap()).unwrap();
    assert!(matches!(pods.check_pod_address("192.0.2.1".parse().unwrap()), Err(Refusal::OutsidePodNetworks(_))));
}

#[test]
fn reserved_overlay_addresses_are_not_given_to_pods() {
    let pods = pods(r#"{"overlay": ["10.42.0.0/16"], "reserved": ["10.42.0.1", "10.42.255.0/24"]}"#).unwrap();
    assert!(matches!(pods.derive(only("10.244.0.1".parse().unwrap())), Err(Refusal::ReservedAddress(_))));
    assert!(matches!(pods.derive(only("10.244.255.9".parse().unwrap())), Err(Refusal::ReservedAddress(_))));
    assert!(pods.derive(only("10.244.0.2".parse().unwrap())).is_ok());
}

#[test]
fn groups_come_from_namespace_account_node_and_the_labels_that_are_named() {
    let pods = kube_pods(
        r#"{"overlay": ["10.42.0.0/16"], "name": "{service_account}.{node}",
            "groups": ["ns:{namespace}", "sa:{namespace}/{service_account}", "app:{label:app}", "team:{label:example.org/team}"]}"#,
    );
    let pod = confirmed(&[("app", "web"), ("secret", "x")]);
    assert_eq!(pods.name(&pod).unwrap(), "front.n1");
    assert_eq!(pods.groups(&pod), ["ns:shop", "sa:shop/front", "app:web"]);
    assert_eq!(pods.groups(&confirmed(&[("example.org/team", "a")])), ["ns:shop", "sa:shop/front", "team:a"]);
}

#[test]
fn all_rules_that_fit_apply_and_the_shortest_life_wins() {
    let pods = kube_pods(
        r#"{"overlay": ["10.42.0.0/16"], "rules": [
            {"namespaces": ["shop"], "groups": ["one", "ns:shop"], "life": "2h"},
            {"service_accounts": ["front"], "labels": {"gateway": "yes"}, "unsafe_networks": ["192.168.0.0/24"], "life": "1h"},
            {"namespaces": ["bank"], "refuse": true}]}"#,
    );
    let gateway = confirmed(&[("gateway", "yes")]);
    assert_eq!(pods.groups(&gateway), ["ns:shop", "one"]);
    assert_eq!((pods.life(&gateway), pods.unsafe_networks(&gateway).len()), (3_600, 1));
    let plain = confirmed(&[("gateway", "no")]);
    assert_eq!((pods.life(&plain), pods.unsafe_networks(&plain).len()), (7_200, 0));
    let other = PodFacts { namespace: "other".into(), ..confirmed(&[]) };
    assert_eq!(pods.life(&other), 86_400);
    pods.check_pod(&gateway).unwrap();
    let bank = PodFacts { namespace: "bank".into(), ..confirmed(&[]) };
    assert!(matches!(pods.check_pod(&bank), Err(Refusal::PodNotWanted(_))));
}

#[test]
fn a_bad_file_is_refused_with_all_that_is_wrong_in_it() {
    let text = Policy::parse(
        r#"{"pods": {"overlay": ["10.42.0.0/99", "x"], "name": "{label:app}", "groups": ["{what}"], "life": "soon",
            "rules": [{"namespaces": ["Bad"], "service_accounts": ["a"]}]},
            "hosts": {"longest_life": "never"}}"#,
    )
    .unwrap_err()
    .to_string();
    for finding in [
        "10.42.0.0/99",
        "\"x\" is no network",
        "a label cannot be part of a name",
        "{what}",
        "pods.life",
        "\"Bad\" cannot be a namespace",
        "pods.rules[0]: service accounts and labels are known only",
        "it changes nothing",
        "hosts.longest_life",
    ] {
        assert!(text.contains(finding), "{finding} is not in: {text}");
    }
}

#[test]
fn facts_of_kubernetes_need_a_kubernetes_section_that_is_valid() {
    for template in ["{service_account}", "{node}"] {
        let text = refused(&format!(r#"{{"overlay": ["10.42.0.0/16"], "name": "{template}"}}"#));
        assert!(text.contains("kubernetes"), "{text}");
    }
    let section = |json: &str| Policy::parse(&format!("{{\"kubernetes\": {json}}}"));
    let good = section(r#"{"node_account": "nebula-system/agent"}"#).unwrap().kubernetes.unwrap();
    assert_eq!((good.node_account(), good.audience.as_str()), (("nebula-system", "agent"), "nebula-ca"));
    for bad in [r#"{"node_account": "agent"}"#, r#"{"node_account": "a/b", "audience": ""}"#, "{}"] {
        assert!(section(bad).is_err(), "{bad}");
    }
}

#[test]
fn mode_same_keeps_the_address_and_wants_it_inside_the_overlay() {
    let pods = pods(r#"{"address": "same", "overlay": ["10.244.0.0/16"], "reserved": ["10.244.0.1"]}"#).unwrap();
    let same = |address: &str| pods.same(PodAddresses { first: address.parse().unwrap(), other: None });
    assert_eq!(same("10.244.0.5").unwrap(), ["10.244.0.5/16".parse().unwrap()]);
    assert!(matches!(same("10.245.0.5"), Err(Refusal::OutsideOverlay(_))));
    assert!(matches!(same("10.244.0.1"), Err(Refusal::ReservedAddress(_))));
    assert!(matches!(same("10.244.255.255"), Err(Refusal::NoOverlayAddress { .. })));
    let outside = r#"{"address": "same", "overlay": ["10.42.0.0/16"], "pod_networks": ["10.244.0.0/16"]}"#;
    assert!(refused(outside).contains("in no overlay prefix"));
}

fn only(first: IpAddr) -> PodAddresses {
    PodAddresses { first, other: None }
}

#[test]
fn mode_derive_takes_the_ipv4_address_where_there_is_an_ipv4_overlay() {
    let derive = |overlay: &str, first: &str, other: Option<&str>| {
        let pods = pods(&format!(r#"{{"overlay": [{overlay}]}}"#)).unwrap();
        let addresses =
            PodAddresses { first: first.parse().unwrap(), other: other.map(|other| other.parse().unwrap()) };
        let networks = pods.derive(addresses).map_err(|refusal| refusal.code())?;
        Ok::<_, &str>(networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
    };
    let both = r#""10.42.0.0/16", "fd42::/64""#;
    assert_eq!(derive(both, "10.244.0.5", Some("fd00:244::7")).unwrap(), "10.42.0.5/16 fd42::af4:5/64");
    assert_eq!(derive(both, "fd00:244::7", Some("10.244.0.5")).unwrap(), "10.42.0.5/16 fd42::af4:5/64");
    // Pods of two nodes, each of which has a /64 of its own.
    assert_eq!(derive(both, "fd00:244:0:2::7", Some("10.244.2.5")).unwrap(), "10.42.2.5/16 fd42::af4:205/64");
    assert_eq!(derive(r#""fd42::/64""#, "fd00:244::7", Some("10.244.0.5")).unwrap(), "fd42::7/64");
    assert_eq!(derive(both, "10.244.0.5", None).unwrap(), "10.42.0.5/16 fd42::af4:5/64");
    assert_eq!(derive(both, "fd00:244::7", None).unwrap(), "fd42::7/64", "a pod with IPv6 alone starts");
    assert_eq!(derive(r#""10.42.0.0/16""#, "fd00:244::7", Some("10.244.0.5")).unwrap(), "10.42.0.5/16");
    assert_eq!(derive(r#""10.42.0.0/16""#, "fd00:244::7", None), Err("no_overlay_address"));
}

#[test]
fn the_other_address_counts_where_the_policy_has_a_place_for_it() {
    let other = |json: &str, first: &str, other: &str| {
        let pod = PodFacts { address: first.parse().unwrap(), other_address: Some(other.parse().unwrap()), ..pod() };
        pods(json)
            .unwrap()
            .other_address(&pod)
            .map_err(|refusal| refusal.code())
            .map(|other| other.map(|it| it.to_string()))
    };
    let both = r#""overlay": ["10.42.0.0/16", "fd42::/64"]"#;
    let (four, six) = ("10.244.0.5", "fd00:244::7");
    assert_eq!(other(&format!("{{{both}}}"), six, four), Ok(Some(four.to_owned())));
    assert_eq!(other(&format!("{{{both}}}"), four, six), Ok(None), "its image is in no certificate");
    assert_eq!(other(r#"{"overlay": ["fd42::/64"]}"#, six, four), Ok(None));
    assert_eq!(other(&format!(r#"{{{both}, "pod_networks": ["10.250.0.0/16"]}}"#), six, four), Ok(None));
    assert_eq!(other(&format!(r#"{{{both}, "address": "pool"}}"#), six, four), Ok(None));
}

#[test]
fn mode_same_keeps_both_addresses_of_a_pod_where_there_is_an_overlay_of_both_families() {
    let policy = |overlay: &str| pods(&format!(r#"{{"address": "same", "overlay": [{overlay}]}}"#)).unwrap();
    let same = |overlay: &str, first: &str, other: &str| {
        let addresses = PodAddresses { first: first.parse().unwrap(), other: Some(other.parse().unwrap()) };
        let networks = policy(overlay).same(addresses).map_err(|refusal| refusal.code())?;
        Ok::<_, &str>(networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
    };
    let both = r#""fd00:244::/56", "10.244.0.0/16""#;
    assert_eq!(same(both, "10.244.0.5", "fd00:244::5").unwrap(), "10.244.0.5/16 fd00:244::5/56");
    assert_eq!(same(both, "fd00:244::5", "10.244.0.5").unwrap(), "10.244.0.5/16 fd00:244::5/56");
    assert_eq!(same(both, "10.244.0.5", "fd00:245::5"), Err("outside_overlay"), "its packets would leave in clear");
    assert_eq!(same(r#""10.244.0.0/16""#, "fd00:244::5", "10.244.0.5").unwrap(), "10.244.0.5/16");
}

#[test]
fn the_section_of_hosts_names_what_is_wrong_with_pool_and_lighthouses() {
    let good = r#"{"hosts": {"pool": ["10.42.200.0/24", "fd42:c8::/64"], "overlay": ["10.42.0.0/16", "fd42::/16"],
        "lighthouses": {"10.42.0.1": ["lighthouse.example:4242", "[2001:db8::1]:4242"]}}}"#;
    let hosts = Policy::parse(good).unwrap().hosts;
    assert_eq!(hosts.longest_life, 365 * 86_400, "the rest has its defaults");
    let in_overlay = |address: &str| hosts.in_overlay(address.parse().unwrap()).to_string();
    assert_eq!(in_overlay("10.42.200.7/24"), "10.42.200.7/16");
    assert_eq!(in_overlay("fd42:c8::7/64"), "fd42:c8::7/16");
    let alone = Policy::parse(r#"{"hosts": {"pool": ["10.42.200.0/24"]}}"#).unwrap().hosts;
    assert_eq!(alone.in_overlay("10.42.200.7/24".parse().unwrap()).to_string(), "10.42.200.7/24");
    let bad = r#"{"hosts": {"pool": ["10.43.0.0/24"], "overlay": ["10.42.0.0/16"],
        "lighthouses": {"lighthouse": ["192.0.2.1:4242"], "10.42.0.1": [], "10.42.0.2": ["192.0.2.1", "a b:1", "x:0"]}}}"#;
    let said = Policy::parse(bad).unwrap_err().to_string();
    for finding in [
        "hosts.pool: 10.43.0.0/24 is in no network of hosts.overlay",
        "hosts.lighthouses.lighthouse: not an overlay address",
        "hosts.lighthouses.10.42.0.1: give it 1 to 8 endpoints",
        "\"192.0.2.1\" is not HOST:PORT",
        "\"a b:1\" is not HOST:PORT",
        "\"x:0\" is not HOST:PORT",
    ] {
        assert!(said.contains(finding), "{finding}: {said}");
    }
}
