//! Tests the firewall against a reference that scans all rules, and its behaviour over time.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nebula_cert::Fingerprint;
use proptest::prelude::*;

use super::*;
use crate::DropReason;
use crate::counters::Direction;
use crate::index::LocalIndex;
use crate::tunnel::PeerIdentity;
use crate::wire::ip::FlowKey;

const MINUTE: Duration = Duration::from_secs(60);

#[allow(clippy::disallowed_methods, reason = "any moment will do as the beginning")]
fn start() -> Instant {
    Instant::now()
}

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn flow(local: &str, local_port: u16, remote: &str, remote_port: u16, protocol: u8) -> FlowKey {
    let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
    FlowKey { local, remote, local_port, remote_port, protocol, fragment: false }
}

/// The contents of a peer's certificate, owned.
#[derive(Debug, Clone)]
struct Certificate {
    name: String,
    groups: Vec<String>,
    networks: Vec<IpNet>,
    unsafe_networks: Vec<IpNet>,
    issuer: Fingerprint,
    issuer_name: String,
}

impl Certificate {
    fn new(network: &str, groups: &[&str]) -> Self {
        Self {
            name: "peer".to_owned(),
            groups: groups.iter().map(|group| (*group).to_owned()).collect(),
            networks: nets(&[network]),
            unsafe_networks: Vec::new(),
            issuer: Fingerprint([1; 32]),
            issuer_name: "ca".to_owned(),
        }
    }

    fn peer(&self) -> Peer<'_> {
        Peer {
            name: &self.name,
            groups: &self.groups,
            networks: &self.networks,
            unsafe_networks: &self.unsafe_networks,
            issuer: self.issuer,
            issuer_name: &self.issuer_name,
            identity: PeerIdentity::new(
                &self.name,
                &self.groups,
                [&self.networks, &self.unsafe_networks],
                (self.issuer, &self.issuer_name),
            ),
            route: None,
            certificate: None,
            tunnel: None,
        }
    }
}

/// A node at 10.1.0.1/16, with rules and a clock.
struct Bench {
    start: Instant,
    filter: Filter,
    conntrack: Conntrack,
    certificate: Certificate,
}

impl Bench {
    fn new(policy: &Policy) -> Self {
        let start = start();
        Self {
            start,
            filter: Filter::new(policy, &nets(&["10.1.0.1/16"]), &[], 1),
            conntrack: Conntrack::new(start, 7, policy.max_flows),
            certificate: Certificate::new("10.1.0.2/16", &["web"]),
        }
    }

    fn reload(&mut self, policy: &Policy) {
        self.filter = Filter::new(policy, &nets(&["10.1.0.1/16"]), &[], self.filter.generation() + 1);
    }

    fn packet(&self, after: Duration, direction: Direction, flow: &FlowKey) -> Result<(), DropReason> {
        let firewall = Firewall { filter: &self.filter, conntrack: &self.conntrack };
        let now = self.conntrack.millis(self.start + after);
        let about = About { direction, flow, original: None };
        firewall.decide(self.conntrack.hash(flow), now, about, self.certificate.peer()).map(|_| ())
    }
}

fn outbound_only() -> Policy {
    Policy { outbound: vec![Rule::any()], ..Policy::default() }
}

#[test]
fn an_empty_policy_denies_everything() {
    let bench = Bench::new(&Policy::default());
    let flow = flow("10.1.0.1", 40000, "10.1.0.2", 443, 6);
    for direction in [Direction::Inbound, Direction::Outbound] {
        assert_eq!(bench.packet(Duration::ZERO, direction, &flow), Err(DropReason::NoRule));
    }
}

#[test]
fn answers_pass_and_other_packets_from_the_same_peer_do_not() {
    let bench = Bench::new(&outbound_only());
    let flow_out = flow("10.1.0.1", 40000, "10.1.0.2", 443, 6);
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &flow_out), Err(DropReason::NoRule));
    assert_eq!(bench.packet(Duration::ZERO, Direction::Outbound, &flow_out), Ok(()));
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &flow_out), Ok(()));
    let other = FlowKey { local_port: 40001, ..flow_out };
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &other), Err(DropReason::NoRule));
    let fragment = FlowKey { fragment: true, ..flow_out };
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &fragment), Err(DropReason::NoRule));
}

#[test]
fn a_flow_lives_as_long_as_its_protocol_allows_and_every_packet_renews_it() {
    let bench = Bench::new(&outbound_only());
    for (protocol, timeout) in [(6, 12 * MINUTE), (17, 3 * MINUTE), (1, 10 * MINUTE)] {
        let flow = flow("10.1.0.1", 40000, "10.1.0.2", 443, protocol);
        let almost = timeout - Duration::from_millis(1);
        assert_eq!(bench.packet(Duration::ZERO, Direction::Outbound, &flow), Ok(()));
        assert_eq!(bench.packet(almost, Direction::Inbound, &flow), Ok(()));
        assert_eq!(bench.packet(almost * 2, Direction::Inbound, &flow), Ok(()));
        assert_eq!(bench.packet(almost * 2 + timeout, Direction::Inbound, &flow), Err(DropReason::NoRule));
    }
}

#[test]
fn new_rules_are_asked_about_old_flows_in_the_direction_in_which_they_began() {
    let mut bench = Bench::new(&outbound_only());
    let flow = flow("10.1.0.1", 40000, "10.1.0.2", 443, 6);
    assert_eq!(bench.packet(Duration::ZERO, Direction::Outbound, &flow), Ok(()));
    let https = Rule { port: PortRange::Range(443, 443), ..Rule::any() };
    bench.reload(&Policy { outbound: vec![https], ..Policy::default() });
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &flow), Ok(()));
    bench.reload(&Policy { inbound: vec![], ..Policy::default() });
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &flow), Err(DropReason::NoRule));
    bench.reload(&outbound_only());
    // The refused flow has ended: an answer alone does not bring it back.
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &flow), Err(DropReason::NoRule));
    assert_eq!(bench.packet(Duration::ZERO, Direction::Outbound, &flow), Ok(()));
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &flow), Ok(()));
}

#[test]
fn a_flow_that_is_refused_does_not_begin_again_from_its_other_end() {
    let all = || Policy { inbound: vec![Rule::any()], ..outbound_only() };
    let in_only = || Policy { inbound: vec![Rule::any()], ..Policy::default() };
    let second = Duration::from_secs(1);
    for (protocol, timeout) in [(6, 12 * MINUTE), (17, 3 * MINUTE), (132, 10 * MINUTE)] {
        let mut bench = Bench::new(&all());
        let flow = flow("10.1.0.1", 40000, "10.1.0.2", 443, protocol);
        assert_eq!(bench.packet(Duration::ZERO, Direction::Outbound, &flow), Ok(()));
        assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &flow), Ok(()));
        bench.reload(&in_only());
        // An answer that was on its way, then both ends, who go on.
        for direction in [Direction::Inbound, Direction::Outbound, Direction::Inbound] {
            assert_eq!(bench.packet(second, direction, &flow), Err(DropReason::NoRule), "{direction:?}");
        }
        let firewall = Firewall { filter: &bench.filter, conntrack: &bench.conntrack };
        let peer = bench.certificate.peer();
        let told = firewall.explain(bench.start + second, Direction::Inbound, &flow, peer, &in_only());
        assert_eq!((told.ended, told.rule), (Some(DropReason::NoRule), Some(0)));
        assert_eq!(told.verdict(), Err(DropReason::NoRule));
        assert_eq!(bench.packet(second, Direction::Inbound, &FlowKey { local_port: 40001, ..flow }), Ok(()));
        // Nothing passed since the start: later it may be a flow of the other end's own, but a connection that goes on
        // is none.
        let later = bench.packet(timeout, Direction::Inbound, &flow);
        assert_eq!(later, if protocol == 6 { Err(DropReason::NoRule) } else { Ok(()) });
        assert_eq!(bench.packet(timeout * 2, Direction::Inbound, &flow), Ok(()));
    }
}

#[test]
fn other_rights_have_a_flow_judged_again_and_another_name_does_not_know_it() {
    let own_ca = Rule { ca_sha: Some(Fingerprint([1; 32])), groups: vec!["web".to_owned()], ..Rule::default() };
    let policy = Policy { outbound: vec![own_ca], ..Policy::default() };
    let flow = flow("10.1.0.1", 40000, "10.1.0.2", 443, 6);
    let web = Certificate::new("10.1.0.2/16", &["web"]);
    for (other, passes) in [
        (web.clone(), true),
        (Certificate { groups: vec!["web".to_owned(), "db".to_owned()], ..web.clone() }, true),
        (Certificate { networks: nets(&["10.1.0.2/24"]), ..web.clone() }, true),
        (Certificate { groups: vec!["db".to_owned()], ..web.clone() }, false),
        (Certificate { issuer: Fingerprint([2; 32]), ..web.clone() }, false),
        (Certificate { networks: nets(&["10.1.0.3/16"]), ..web.clone() }, false),
        (Certificate { name: "another".to_owned(), ..web.clone() }, false),
    ] {
        let mut bench = Bench::new(&policy);
        assert_eq!(bench.packet(Duration::ZERO, Direction::Outbound, &flow), Ok(()));
        bench.certificate = other.clone();
        assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &flow).is_ok(), passes, "{other:?}");
        // The peer that had the flow still has it, unless it was evaluated again and refused.
        bench.certificate = web.clone();
        let stands = passes || other.name != web.name || other.networks != web.networks;
        assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &flow).is_ok(), stands, "{other:?}");
    }
}

#[test]
fn addresses_must_belong_to_the_certificates_of_both_ends() {
    let mut bench = Bench::new(&Policy { inbound: vec![Rule::any()], ..outbound_only() });
    bench.certificate.networks = nets(&["10.1.0.2/16", "10.9.0.2/16"]);
    bench.certificate.unsafe_networks = nets(&["192.168.0.0/24", "10.9.0.0/16"]);
    let check = |local, remote| bench.packet(Duration::ZERO, Direction::Inbound, &flow(local, 80, remote, 4000, 6));
    assert_eq!(check("10.1.0.1", "10.1.0.2"), Ok(()));
    assert_eq!(check("10.1.0.1", "192.168.0.9"), Ok(()));
    assert_eq!(check("10.1.0.1", "10.9.0.3"), Ok(()));
    assert_eq!(check("10.1.0.1", "10.1.0.3"), Err(DropReason::RemoteAddress), "a neighbour's address");
    assert_eq!(check("10.1.0.1", "10.9.0.2"), Err(DropReason::RemoteAddress), "its address in a foreign network");
    assert_eq!(check("10.1.0.7", "10.1.0.2"), Err(DropReason::LocalAddress));
}

#[test]
fn a_full_table_forgets_unanswered_flows_first_and_answered_ones_only_when_idle() {
    let bench = Bench::new(&Policy { max_flows: 1, inbound: vec![Rule::any()], ..outbound_only() });
    let flows: Vec<_> = (0..2000).map(|port| flow("10.1.0.1", 1, "10.1.0.2", port, 17)).collect();
    for flow in &flows {
        assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, flow), Ok(()));
    }
    assert_eq!(bench.conntrack.len(), 16, "one per shard");
    let answered = flow("10.1.0.1", 2, "10.1.0.2", 5, 17);
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &answered), Ok(()));
    assert_eq!(bench.packet(Duration::ZERO, Direction::Outbound, &answered), Ok(()));
    let later = Duration::from_secs(10);
    let refused = flows.iter().filter(|flow| bench.packet(later, Direction::Inbound, flow).is_err()).count();
    assert!(refused > 0, "flows of the shard where a live flow is");
    assert_eq!(bench.packet(later, Direction::Outbound, &answered), Ok(()));
    let idle = later + Duration::from_secs(40);
    assert!(flows.iter().all(|flow| bench.packet(idle, Direction::Inbound, flow).is_ok()));
}

#[test]
fn expired_flows_leave_the_table() {
    let bench = Bench::new(&outbound_only());
    for port in 0..1000 {
        let flow = flow("10.1.0.1", 1, "10.1.0.2", port, 17);
        assert_eq!(bench.packet(Duration::ZERO, Direction::Outbound, &flow), Ok(()));
    }
    assert_eq!(bench.conntrack.len(), 1000);
    bench.conntrack.expire(bench.start + MINUTE, &bench.filter);
    assert_eq!(bench.conntrack.len(), 1000);
    bench.conntrack.expire(bench.start + 3 * MINUTE, &bench.filter);
    assert_eq!(bench.conntrack.len(), 0);
}

#[test]
fn behind_a_gateway_rules_mean_the_own_networks_unless_they_say_more() {
    let own = nets(&["10.1.0.1/16"]);
    let behind = nets(&["192.168.0.0/24"]);
    let certificate = Certificate::new("10.1.0.2/16", &[]);
    let to_gateway = flow("10.1.0.1", 80, "10.1.0.2", 4000, 6);
    let through = flow("192.168.0.5", 80, "10.1.0.2", 4000, 6);
    let allowed = |policy: &Policy, flow| {
        let filter = Filter::new(policy, &own, &behind, 1);
        filter.allows(Direction::Inbound, flow, certificate.peer())
    };
    let plain = Policy { inbound: vec![Rule::any()], ..Policy::default() };
    assert!(allowed(&plain, &to_gateway) && !allowed(&plain, &through));
    let open = Policy { default_local_cidr_any: true, ..plain.clone() };
    assert!(allowed(&open, &to_gateway) && allowed(&open, &through));
    let explicit = Rule { local_cidr: Some(Cidr::Prefix("192.168.0.0/25".parse().unwrap())), ..Rule::any() };
    let explicit = Policy { inbound: vec![explicit], ..plain };
    assert!(!allowed(&explicit, &to_gateway) && allowed(&explicit, &through));
}

#[test]
fn a_range_of_all_ports_is_a_few_entries() {
    let rule = Rule { port: PortRange::Range(1, 65535), protocol: Protocol::Tcp, ..Rule::any() };
    let index = index::RuleIndex::new(&[rule], None);
    let certificate = Certificate::new("10.1.0.2/16", &[]);
    assert!(index.blocks() <= 30);
    let at = |port| index.allows(&flow("10.1.0.1", port, "10.1.0.2", 9, 6), port, certificate.peer());
    assert_eq!([0, 1, 2, 32768, 65535].map(at), [false, true, true, true, true]);
}

/// `count` rules of every kind, none of which matches a peer `peer` of the group `web` at port 53.
fn many_rules(count: u32) -> Vec<Rule> {
    let rule = |n: u32| {
        let base = Rule { protocol: Protocol::Udp, ..Rule::default() };
        let port = 1_000 + (n % 50_000) as u16;
        let prefix = IpNet::new(IpAddr::from((172 << 24 | n << 8).to_be_bytes()), 24).unwrap();
        match n % 5 {
            0 => Rule { host: Some(format!("other-{n}")), ..base },
            1 => Rule { groups: vec![format!("group-{n}"), "web".to_owned()], ..base },
            2 => Rule { cidr: Some(Cidr::Prefix(prefix)), ..base },
            3 => Rule { port: PortRange::Range(port, port + 10), ..Rule { host: Some("any".to_owned()), ..base } },
            _ => Rule { local_cidr: Some(Cidr::Prefix(prefix)), ..base },
        }
    };
    (0..count).map(rule).collect()
}

#[test]
fn ten_thousand_rules_are_searched_in_about_as_many_steps_as_ten() {
    let certificate = Certificate::new("10.1.0.2/16", &["web", "prod"]);
    let flow = flow("10.1.0.1", 53, "10.1.0.2", 9, 17);
    let steps = |count| {
        let index = index::RuleIndex::new(&many_rules(count), None);
        index::STEPS.set(0);
        assert!(!index.allows(&flow, flow.local_port, certificate.peer()));
        index::STEPS.get()
    };
    let (few, many) = (steps(10), steps(10_000));
    // The only growth comes from port blocks, which have at most 17 lengths.
    assert!(few >= 5 && many <= few + 17, "{few} steps for 10 rules, {many} for 10,000");
}

/// Section 8.2 of the behaviour reference, implemented literally.
fn reference(rules: &[Rule], default_local: Option<&[IpNet]>, flow: &FlowKey, port: u16, peer: Peer<'_>) -> bool {
    rules.iter().any(|rule| {
        let icmp = matches!(flow.protocol, 1 | 58);
        let protocol = match rule.protocol {
            Protocol::Any => true,
            Protocol::Tcp => flow.protocol == 6,
            Protocol::Udp => flow.protocol == 17,
            Protocol::Icmp => icmp,
        };
        let port = match rule.port {
            _ if rule.protocol == Protocol::Icmp => true,
            PortRange::Any => true,
            PortRange::Fragment => flow.fragment && !icmp,
            PortRange::Range(first, last) => !flow.fragment && !icmp && (first..=last).contains(&port),
        };
        let ca = match (&rule.ca_name, rule.ca_sha) {
            (None, None) => true,
            (name, sha) => name.as_deref() == Some(peer.issuer_name) || sha == Some(peer.issuer),
        };
        let local = match (rule.local_cidr, default_local) {
            (Some(Cidr::Any), _) | (None, None) => true,
            (Some(Cidr::Prefix(prefix)), _) => prefix.contains(&flow.local),
            (None, Some(networks)) => networks.iter().any(|network| network.contains(&flow.local)),
        };
        let host = rule.host.as_ref().is_some_and(|host| host == "any" || host == peer.name);
        let groups = !rule.groups.is_empty()
            && (rule.groups.iter().any(|group| group == "any")
                || rule.groups.iter().all(|group| peer.groups.contains(group)));
        let cidr = match rule.cidr {
            None => false,
            Some(Cidr::Any) => true,
            Some(Cidr::Prefix(prefix)) => prefix.contains(&flow.remote),
        };
        let nobody_named = rule.host.is_none() && rule.groups.is_empty() && rule.cidr.is_none();
        protocol && port && ca && local && (host || groups || cidr || nobody_named)
    })
}

/// Number of test cases: 20,000, unless PROPTEST_CASES says otherwise.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000)
}

fn any_address() -> impl Strategy<Value = IpAddr> {
    prop::sample::select(vec!["10.1.0.1", "10.1.0.2", "10.1.2.3", "10.2.0.1", "192.168.0.1", "fd00::1", "fd00::2"])
        .prop_map(|text| text.parse().unwrap())
}

fn any_cidr() -> impl Strategy<Value = Option<Cidr>> {
    let prefixes = ["10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/24", "10.1.2.3/32", "0.0.0.0/0", "fd00::/8", "::/0"];
    let prefix = prop::sample::select(nets(&prefixes)).prop_map(|prefix| Some(Cidr::Prefix(prefix)));
    prop_oneof![4 => Just(None), 1 => Just(Some(Cidr::Any)), 3 => prefix]
}

fn any_name(names: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop::sample::select(names).prop_map(str::to_owned)
}

fn any_port() -> impl Strategy<Value = u16> {
    prop_oneof![0_u16..12, 65530_u16..=65535, any::<u16>()]
}

prop_compose! {
    fn any_rule()(
        protocol in prop::sample::select(vec![Protocol::Any, Protocol::Tcp, Protocol::Udp, Protocol::Icmp]),
        port in prop_oneof![
            Just(PortRange::Any),
            Just(PortRange::Fragment),
            (any_port(), any_port()).prop_map(|(a, b)| PortRange::Range(a.min(b), a.max(b))),
        ],
        host in prop::option::of(any_name(&["any", "alpha", "beta"])),
        groups in prop::collection::vec(any_name(&["any", "a", "b", "c", "d", "e"]), 0..3),
        cidr in any_cidr(),
        local_cidr in any_cidr(),
        ca_name in prop::option::of(any_name(&["ca", "other"])),
        ca_sha in prop::option::of((1_u8..3).prop_map(|byte| Fingerprint([byte; 32]))),
    ) -> Rule {
        Rule { protocol, port, host, groups, cidr, local_cidr, ca_name, ca_sha }
    }
}

prop_compose! {
    fn any_flow()(
        local in any_address(),
        remote in any_address(),
        local_port in any_port(),
        remote_port in any_port(),
        protocol in prop::sample::select(vec![1_u8, 6, 17, 58, 47]),
        fragment in prop::bool::weighted(0.2),
    ) -> FlowKey {
        FlowKey { local, remote, local_port, remote_port, protocol, fragment }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]
    #[test]
    fn the_index_says_what_a_scan_of_all_rules_says(
        rules in prop::collection::vec(any_rule(), 0..12),
        flows in prop::collection::vec(any_flow(), 1..8),
        name in any_name(&["alpha", "beta", "any"]),
        groups in prop::collection::vec(any_name(&["a", "b", "c", "d", "any"]), 0..4),
        issuer in 1_u8..3,
        issuer_name in any_name(&["ca", "other", "third"]),
        own_only: bool,
    ) {
        let own = nets(&["10.1.0.1/16", "fd00::1/64"]);
        let default_local = own_only.then_some(own.as_slice());
        let index = index::RuleIndex::new(&rules, default_local);
        let issuer = Fingerprint([issuer; 32]);
        let certificate = Certificate { name, groups, issuer, issuer_name, ..Certificate::new("10.1.0.2/16", &[]) };
        let peer = certificate.peer();
        for flow in &flows {
            prop_assert_eq!(
                index.allows(flow, flow.local_port, peer),
                reference(&rules, default_local, flow, flow.local_port, peer)
            );
        }
    }
}

/// Allows flows of this direction whose other end is this.
#[derive(Debug)]
struct Only {
    version: u64,
    direction: Direction,
    name: &'static str,
    address: &'static str,
    is_peer: bool,
}

impl NetworkPolicy for Only {
    fn version(&self) -> u64 {
        self.version
    }

    fn judge(&self, direction: Direction, flow: &FlowKey, end: &OtherEnd<'_>, _: Occasion) -> PolicyVerdict {
        assert_eq!(flow.remote, end.address);
        let is_it = (direction, end.name, end.is_peer) == (self.direction, self.name, self.is_peer)
            && end.address == self.address.parse::<IpAddr>().unwrap();
        if is_it { PolicyVerdict::Allow } else { PolicyVerdict::Refuse }
    }

    fn reason(&self, _: Direction, _: &FlowKey, _: &OtherEnd<'_>) -> Option<String> {
        None
    }
}

#[test]
fn policies_of_the_network_have_a_say_beside_the_rules_and_only_where_flows_begin() {
    let mut bench =
        Bench::new(&Policy { inbound: vec![Rule::any()], outbound: vec![Rule::any()], ..Policy::default() });
    bench.certificate.unsafe_networks = nets(&["192.168.0.0/24"]);
    let out = Only { version: 1, direction: Direction::Outbound, name: "peer", address: "10.1.0.2", is_peer: true };
    bench.filter = bench.filter.with(Some(Arc::new(out)), 2);
    let [first, second] = [1, 2].map(|port| flow("10.1.0.1", port, "10.1.0.2", 443, 6));
    let (later, refused) = (Duration::from_secs(1), Err(DropReason::NetworkPolicy));
    assert_eq!(bench.packet(Duration::ZERO, Direction::Inbound, &first), refused);
    assert_eq!(bench.packet(Duration::ZERO, Direction::Outbound, &first), Ok(()));
    assert_eq!(bench.packet(later, Direction::Inbound, &first), Ok(()), "answers pass");
    assert_eq!(bench.packet(later, Direction::Inbound, &second), refused, "another flow");
    let behind = flow("10.1.0.1", 1, "192.168.0.1", 443, 6);
    assert_eq!(bench.packet(later, Direction::Outbound, &behind), refused, "it is not the peer's own address");
    // An error about an allowed flow passes; one about another does not.
    let firewall = Firewall { filter: &bench.filter, conntrack: &bench.conntrack };
    let error = flow("10.1.0.1", 0, "10.1.0.2", 0, 1);
    let millis = bench.conntrack.millis(bench.start + later);
    let about =
        |quoted| firewall.decide_error(millis, Direction::Inbound, &error, Some(quoted), bench.certificate.peer());
    assert_eq!((about(&first), about(&second)), (Ok(()), refused));

    // Another version is applied to flows that exist, with their next packet.
    let other = Only { version: 2, direction: Direction::Outbound, name: "other", address: "10.1.0.2", is_peer: true };
    bench.filter = bench.filter.with(Some(Arc::new(other)), 3);
    assert_eq!(bench.packet(later, Direction::Inbound, &first), refused);
    assert_eq!(bench.packet(later, Direction::Outbound, &first), refused);
    bench.filter = bench.filter.with(None, 4);
    assert_eq!(bench.packet(later, Direction::Inbound, &first), Ok(()));

    // What the rules refuse stays refused.
    bench.reload(&Policy::default());
    let out = Only { version: 1, direction: Direction::Outbound, name: "peer", address: "10.1.0.2", is_peer: true };
    bench.filter = bench.filter.with(Some(Arc::new(out)), 6);
    assert_eq!(bench.packet(later, Direction::Outbound, &first), Err(DropReason::NoRule));
}

/// Refuses one port, and another one in audit. Remembers what it was asked about.
#[derive(Debug, Default)]
struct Asked {
    refused: u16,
    audited: u16,
    occasions: std::sync::Mutex<Vec<(Occasion, u16)>>,
}

impl Asked {
    fn take(&self) -> Vec<(Occasion, u16)> {
        std::mem::take(&mut *self.occasions.lock().unwrap())
    }
}

impl NetworkPolicy for Asked {
    fn version(&self) -> u64 {
        1
    }

    fn judge(&self, _: Direction, flow: &FlowKey, _: &OtherEnd<'_>, occasion: Occasion) -> PolicyVerdict {
        self.occasions.lock().unwrap().push((occasion, flow.remote_port));
        match flow.remote_port {
            port if port == self.refused => PolicyVerdict::Refuse,
            port if port == self.audited => PolicyVerdict::AllowInAudit,
            _ => PolicyVerdict::Allow,
        }
    }

    fn reason(&self, _: Direction, _: &FlowKey, _: &OtherEnd<'_>) -> Option<String> {
        None
    }
}

#[test]
fn policies_are_asked_once_about_a_flow_and_again_when_they_change() {
    let mut bench = Bench::new(&outbound_only());
    let to = |port| flow("10.1.0.1", 1, "10.1.0.2", port, 6);
    let is_audited = |bench: &Bench, after: Duration, port: u16| {
        let firewall = Firewall { filter: &bench.filter, conntrack: &bench.conntrack };
        let (now, hash) = (bench.conntrack.millis(bench.start + after), bench.conntrack.hash(&to(port)));
        let admitted = firewall.decide(
            hash,
            now,
            About { direction: Direction::Outbound, flow: &to(port), original: None },
            bench.certificate.peer(),
        );
        admitted.map(|admitted| admitted.is_in_audit).ok()
    };
    let policy = Arc::new(Asked { refused: 80, audited: 443, ..Asked::default() });
    bench.filter = bench.filter.with(Some(Arc::clone(&policy) as Arc<dyn NetworkPolicy>), 2);
    let verdicts = [80, 80, 443, 443, 22].map(|port| is_audited(&bench, Duration::ZERO, port));
    assert_eq!(verdicts, [None, None, Some(true), Some(false), Some(false)]);
    let (new, known) = (Occasion::NewFlow, Occasion::KnownFlow);
    assert_eq!(policy.take(), [(new, 80), (new, 80), (new, 443), (new, 22)]);

    // Flows that exist are judged again: one is refused now, another would be.
    let policy = Arc::new(Asked { refused: 443, audited: 22, ..Asked::default() });
    bench.filter = bench.filter.with(Some(Arc::clone(&policy) as Arc<dyn NetworkPolicy>), 3);
    let verdicts = [443, 22, 22].map(|port| is_audited(&bench, Duration::from_secs(1), port));
    assert_eq!(verdicts, [None, Some(true), Some(false)]);
    assert_eq!(policy.take(), [(known, 443), (known, 22)]);

    // An explanation is no traffic.
    let firewall = Firewall { filter: &bench.filter, conntrack: &bench.conntrack };
    let at = bench.start + Duration::from_secs(2);
    let told = firewall.explain(at, Direction::Outbound, &to(443), bench.certificate.peer(), &outbound_only());
    assert!(told.is_refused_by_network && told.verdict() == Err(DropReason::NetworkPolicy), "{told:?}");
    assert!(told.ended.is_some(), "{told:?}");
    assert_eq!(policy.take(), [(Occasion::Question, 443); 2]);
}

#[test]
fn audited_flows_are_reported_a_few_times_a_second() {
    let mut cache = FlowCache::default();
    let flow = flow("10.1.0.1", 1, "10.1.0.2", 443, 6);
    let passed = Passed { flow, direction: Direction::Outbound, tunnel: LocalIndex(1), generation: 1 };
    let reported = (0..1000).filter(|now| {
        cache.note_audited(&passed, *now);
        cache.take_audited().is_some()
    });
    assert_eq!(reported.count(), 8);
}
