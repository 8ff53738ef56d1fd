//! Claims of the directory, held against what the API server shows.

use std::collections::BTreeSet;

use super::super::facts::Settings;
use super::super::kept::Keep as _;
use super::*;

/// Two nodes with ranges of both families.
struct Case {
    facts: Facts,
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn both(list: &[&str]) -> [Option<IpAddr>; 2] {
    let of = |is_v4: bool| list.iter().map(|text| ip(text)).find(|address| address.is_ipv4() == is_v4);
    [of(true), of(false)]
}

fn node(reported: &[&str], ranges: &[&str], created: i64) -> NodeFacts {
    let ranges = ranges.iter().map(|text| text.parse().unwrap()).collect();
    let reported: BTreeSet<IpAddr> = reported.iter().map(|text| ip(text)).collect();
    NodeFacts { internal: reported.first().copied(), reported, ranges, created, labels: None }
}

fn shown(node: &str, addresses: &[&str]) -> Shown {
    let addresses = both(addresses);
    Shown {
        addresses,
        node: node.into(),
        is_left_out: false,
        counts: true,
        is_host_network: false,
        mirrors: None,
        described: None,
    }
}

fn left_out(node: &str, addresses: &[&str]) -> Shown {
    Shown { is_left_out: true, counts: false, ..shown(node, addresses) }
}

impl Case {
    fn new() -> Self {
        let settings = Settings {
            pod_ranges: vec!["10.244.0.0/16".parse().unwrap(), "fd00:244::/48".parse().unwrap()],
            exclude: Vec::new(),
            load_balancers: Vec::new(),
            node_ranges: true,
            ports: Some((61_000, 61_099)),
            policies: None,
        };
        let mut facts = Facts::default();
        facts.settings = settings;
        facts.nodes.insert("n1".into(), node(&["192.0.2.1"], &["10.244.1.0/24", "fd00:244:0:1::/64"], 1));
        facts.nodes.insert("n2".into(), node(&["192.0.2.2"], &["10.244.2.0/24", "fd00:244:0:2::/64"], 2));
        Self { facts }
    }

    fn without_ranges() -> Self {
        let mut case = Self::new();
        case.facts.nodes.values_mut().for_each(|node| node.ranges.clear());
        case
    }

    fn pod(mut self, id: u128, pod: Shown) -> Self {
        self.facts.pods.put(id, Some(pod));
        self
    }

    fn member(mut self, id: u128, addresses: &[&str]) -> Self {
        let member =
            Member { addresses: both(addresses), incarnation: id as u64, port_number: id as u32, is_host: id >= 1_000 };
        self.facts.members.insert(id, member);
        self
    }

    /// The enrolled addresses and those that are clear.
    fn judged(&self) -> (Vec<String>, BTreeSet<String>) {
        let judgement = self.facts.judge("n1");
        let enrolled = judgement.enrolled.iter().map(|(address, _)| address.to_string()).collect();
        (enrolled, judgement.clear.iter().map(ToString::to_string).collect())
    }

    fn is(&self, enrolled: &[&str], clear: &[&str]) {
        let (found, in_clear) = self.judged();
        assert_eq!(found, enrolled);
        let nodes = in_clear.into_iter().filter(|text| !OF_NODES.contains(&text.as_str()));
        assert_eq!(nodes.collect::<Vec<_>>(), clear);
    }
}

/// What is clear because the two nodes have it.
const OF_NODES: [&str; 10] = [
    "192.0.2.1",
    "10.244.1.0",
    "10.244.1.1",
    "fd00:244:0:1::",
    "fd00:244:0:1::1",
    "192.0.2.2",
    "10.244.2.0",
    "10.244.2.1",
    "fd00:244:0:2::",
    "fd00:244:0:2::1",
];

#[test]
fn an_address_that_two_pods_show_is_not_clear_while_one_of_them_may_be_enrolled() {
    // Maps have random orders.
    for _ in 0..20 {
        let both = Case::new().pod(1, shown("n1", &["10.244.1.7"])).pod(2, left_out("n1", &["10.244.1.7"]));
        both.is(&[], &[]);
        both.member(1, &["10.244.1.7"]).is(&["10.244.1.7"], &[]);
    }
    let two_left_out = Case::new().pod(1, left_out("n1", &["10.244.1.7"])).pod(2, left_out("n1", &["10.244.1.7"]));
    two_left_out.is(&[], &["10.244.1.7"]);
}

#[test]
fn a_member_counts_with_its_pod_at_its_address_in_a_namespace_that_the_operator_enrols() {
    let two = ["10.244.1.7", "fd00:244:0:1::7"];
    let case = Case::new().member(1, &two);
    case.is(&[], &[]);
    case.pod(1, shown("n1", &[])).is(&[], &[]);
    let case = Case::new().member(1, &two).pod(1, shown("n1", &two));
    case.is(&two, &[]);
    assert_eq!(case.facts.judge("n1").of_this_node, two.map(ip));
    assert!(case.facts.judge("n2").of_this_node.is_empty());
    case.pod(1, shown("n1", &two[..1])).is(&two[..1], &[]);
    // Another pod has the address.
    Case::new().member(1, &two).pod(2, shown("n1", &two)).is(&[], &[]);
    // The operator does not enrol its namespace: what it is cannot be told, so nobody speaks to it in clear.
    Case::new().member(1, &two).pod(1, left_out("n1", &two)).is(&[], &[]);
    // It opted out after it was enrolled: its tunnel is still there.
    let opted_out = Shown { is_left_out: true, ..shown("n1", &two) };
    Case::new().member(1, &two).pod(1, opted_out).is(&two, &[]);
}

#[test]
fn whoever_stole_the_token_of_an_agent_takes_no_traffic_of_addresses_that_are_not_its_pods() {
    for case in [Case::new(), Case::without_ranges()] {
        let [own, dns] = [["10.244.1.7", "fd00:244:0:1::7"], ["10.244.2.3", "fd00:244:0:2::3"]];
        let victim = case.pod(2, left_out("n2", &dns)).pod(1, shown("n1", &own));
        // An address of a pod of another node that has no certificate, its bridge's, and one of nobody; each family
        // alone, too.
        for claim in [
            &dns[..],
            &dns[..1],
            &dns[1..],
            &["10.244.1.7", "fd00:244:0:2::3"],
            &["10.244.2.1"],
            &["192.0.2.2"],
            &["10.244.2.77", "fd00:244:0:2::77"],
            &["10.244.9.9"],
        ] {
            let case = victim.copy().member(1, claim);
            let (enrolled, clear) = case.judged();
            assert!(enrolled.iter().all(|address| own.contains(&address.as_str())), "{claim:?}: {enrolled:?}");
            assert!(dns.iter().all(|address| clear.contains(*address)), "{claim:?}: as without us");
            assert!(clear.contains("192.0.2.2"), "{claim:?}");
        }
    }
}

impl Case {
    /// Without members.
    fn copy(&self) -> Self {
        let mut facts = Facts::default();
        facts.settings = self.facts.settings.clone();
        (facts.nodes, facts.pods) = (self.facts.nodes.clone(), self.facts.pods.clone());
        Self { facts }
    }
}

#[test]
fn nobody_speaks_in_clear_to_a_pod_whose_certificate_is_newer_than_what_the_api_server_shows() {
    // The pod before it is shown still, or it has no address yet.
    let former = || Case::new().pod(2, left_out("n1", &["10.244.1.7"]));
    former().is(&[], &["10.244.1.7"]);
    former().member(1, &["10.244.1.7"]).is(&[], &[]);
    former().member(1, &["10.244.1.7"]).pod(1, shown("n1", &[])).is(&[], &[]);
    former().member(1, &["10.244.1.7"]).pod(1, shown("n1", &["10.244.1.7"])).is(&["10.244.1.7"], &[]);
    assert_eq!(former().member(1, &["10.244.1.7"]).facts.judge("n1").unconfirmed, 1);
}

#[test]
fn a_kubelet_is_believed_about_its_own_range_only() {
    let mut case = Case::new();
    let lies = ["192.0.2.2", "198.51.100.2", "10.244.2.64", "10.244.1.50", "10.244.7.7", "fd00:244:0:1::50"];
    case.facts.nodes.insert("n2".into(), node(&lies, &["10.244.2.0/24", "fd00:244:0:2::/64"], 2));
    // As a pod's address, too, whether it is left out or enrolled.
    let case = case
        .pod(1, left_out("n2", &["10.244.1.51", "fd00:244:0:1::51"]))
        .pod(2, left_out("n2", &["10.244.2.52", "fd00:244:0:2::52"]))
        .pod(3, shown("n2", &["10.244.1.53"]))
        .member(3, &["10.244.1.53"])
        .pod(4, left_out("unknown", &["10.244.1.54"]));
    case.is(&[], &["10.244.2.52", "10.244.2.64", "198.51.100.2", "fd00:244:0:2::52"]);
}

#[test]
fn where_nodes_have_no_ranges_a_pod_has_more_right_to_an_address_than_a_node() {
    let with = |mut case: Case| {
        case.facts.nodes.insert("n2".into(), node(&["10.244.7.64", "10.244.1.7", "10.244.1.8"], &[], 2));
        case.pod(1, shown("n1", &["10.244.1.7"])).pod(2, left_out("n1", &["10.244.1.8"]))
    };
    with(Case::without_ranges()).is(&[], &["10.244.1.8", "10.244.7.64"]);
    with(Case::without_ranges()).member(1, &["10.244.1.7"]).is(&["10.244.1.7"], &["10.244.1.8", "10.244.7.64"]);
    // One node has no range, and the other does.
    with(Case::new()).is(&[], &["10.244.1.8", "10.244.7.64"]);
    // Ranges that the primary network does not use.
    let mut unused = Case::new();
    unused.facts.settings.node_ranges = false;
    unused.pod(1, left_out("n1", &["10.244.99.7"])).is(&[], &["10.244.99.7"]);
}

#[test]
fn of_two_ranges_that_overlap_that_of_the_older_node_counts() {
    let mut case = Case::new();
    case.facts.nodes.insert("new".into(), node(&["10.244.1.77"], &["10.244.0.0/16"], 9));
    let case = case.pod(1, left_out("new", &["10.244.1.78"])).pod(2, left_out("new", &["10.244.40.1"]));
    // Where nobody has a range it is as any node without one.
    case.is(&[], &["10.244.40.1"]);
    let mut case = Case::new();
    case.facts.nodes.insert("old".into(), node(&[], &["10.244.0.0/16"], 0));
    let case = case.pod(1, left_out("old", &["10.244.1.78"])).pod(2, left_out("n1", &["10.244.1.79"]));
    assert!(case.judged().1.contains("10.244.1.78") && !case.judged().1.contains("10.244.1.79"));
}

#[test]
fn hosts_and_lighthouses_have_addresses_that_nobody_of_the_cluster_has() {
    let lighthouse = Shown { is_host_network: true, ..shown("n1", &[]) };
    let case = || Case::new().pod(1, lighthouse.clone()).pod(2, left_out("n2", &["10.244.2.3"]));
    case().member(1, &["10.244.255.1"]).is(&["10.244.255.1"], &["10.244.2.3"]);
    case().member(1_000, &["10.244.254.9"]).is(&["10.244.254.9"], &["10.244.2.3"]);
    for taken in ["10.244.2.3", "10.244.2.9", "10.244.2.1", "192.0.2.2"] {
        for who in [1, 1_000] {
            assert!(case().member(who, &[taken]).judged().0.is_empty(), "{who} has {taken}");
        }
    }
    // No pod of the network of its node, and gone.
    Case::new().member(1, &["10.244.255.1"]).is(&[], &[]);
}

#[test]
fn a_static_pod_is_known_by_the_uid_that_its_runtime_has_for_it() {
    let mirror = Shown { mirrors: Some(Box::new(7)), ..shown("n1", &["10.244.1.7"]) };
    let case = Case::new().pod(1, mirror.clone()).member(7, &["10.244.1.7"]);
    case.is(&["10.244.1.7"], &[]);
    // Nobody takes the place of another pod by such an annotation.
    let other =
        Case::new().pod(1, Shown { addresses: both(&["10.244.1.9"]), ..mirror }).pod(7, shown("n1", &["10.244.1.7"]));
    other.member(7, &["10.244.1.7"]).is(&["10.244.1.7"], &[]);
}

#[test]
fn a_tunnel_is_expected_at_the_address_of_the_node_that_has_the_pod() {
    let both_families = ["10.244.2.7", "fd00:244:0:2::7"];
    let mut case = Case::new()
        .pod(7, shown("n2", &both_families))
        .member(7, &both_families)
        // Those that are not confirmed, hosts, and pods that are the node itself are not at a port of a node.
        .member(8, &["10.244.2.8"])
        .member(1_009, &["10.250.0.9"])
        .pod(10, Shown { is_host_network: true, ..shown("n2", &["192.0.2.2"]) })
        .member(10, &["10.250.0.10"]);
    let ends = |case: &Case| case.facts.judge("n1").ends;
    let end = End { node: ip("192.0.2.2"), port: 61_007, other: Some(61_008) };
    assert_eq!(ends(&case), both_families.map(|address| (ip(address), end)));

    assert_eq!(case.facts.judge("n1").ports_elsewhere(), [(ip("192.0.2.2"), BTreeSet::from([61_007]))].into());
    assert_eq!(case.facts.judge("n2").ports_elsewhere(), [].into());
    let (bytes, _) = case.facts.table(&case.facts.judge("n1"), "n1", 7);
    let layout = nebula_cni_contract::cluster_table::Layout::read(&bytes).unwrap();
    let table = layout.table(&bytes);
    assert_eq!(both_families.map(|address| table.end(ip(address))), [Some(end); 2]);
    assert_eq!(table.end(ip("10.250.0.9")), None);

    // A kubelet that claims the address of another node's pod for its own node leads nobody there.
    case.facts.nodes.get_mut("n2").unwrap().internal = Some(ip("10.244.1.5"));
    assert_eq!(ends(&case), []);
    case.facts.nodes.get_mut("n2").unwrap().internal = None;
    assert_eq!(ends(&case), []);
    case.facts.settings.ports = None;
    case.facts.nodes.get_mut("n2").unwrap().internal = Some(ip("192.0.2.2"));
    assert_eq!(ends(&case), [], "the sockets are in the pods' own namespaces");
}
