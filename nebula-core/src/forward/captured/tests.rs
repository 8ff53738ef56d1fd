//! Two pods under capture, from the device of one to the device of the other and back.

mod protocols;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::super::checksum::finish_ipv4_header;
use super::super::crc32c::tests::naive_crc;
use super::super::recipe::{ChecksumKind, Recipe, error};
use super::super::testing::{Side, local_policy, naive_sum, pair};
use super::super::{LocalPolicy, Offload, SegmentKind, cut_packet};
use crate::capture::{Directory, Endpoint, Found, Service, Target};
use crate::counters::{Counter, Direction};
use crate::firewall::{Cidr, Policy, PortRange, Protocol, Rule};
use crate::tunnel::cipher::Cipher;
use crate::wire::ip::{Packet, protocol};
use crate::{DropReason, Punt, Verdict};

/// The Service 10.96.0.7:80 or [fd96::7]:80 with one endpoint, port 8080 of the second pod or of the first; the
/// second pod itself; 10.96.0.8 and 10.1.0.9, which are not enrolled.
#[derive(Debug, Clone, Copy)]
struct Small {
    version: u64,
    incarnation: u64,
    is_own: bool,
    is_clear: bool,
}

impl Small {
    fn endpoint(self, v6: bool) -> Endpoint {
        let host = if self.is_own { 1 } else { 2 };
        Endpoint { address: pod(host, v6), port: 8080, incarnation: self.incarnation }
    }
}

impl Directory for Small {
    fn version(&self) -> u64 {
        self.version
    }

    fn find(&self, target: &Target) -> Found {
        let v6 = target.address.is_ipv6();
        if target.address == service(v6).ip() {
            let service = Service { id: u32::from(v6), ready: 1, clear: 0, affinity: None };
            return if target.port == 80 { Found::Service(service) } else { Found::Refused };
        }
        if target.address == pod(2, v6) {
            return Found::Peer { incarnation: self.incarnation };
        }
        let clear = ["10.96.0.8", "10.1.0.9"].map(|text| text.parse::<IpAddr>().unwrap());
        if self.is_clear && clear.contains(&target.address) { Found::Clear } else { Found::Unknown }
    }

    fn endpoint(&self, service: &Service, n: u32) -> Option<Endpoint> {
        (n == 0).then(|| Self::endpoint(*self, service.id == 1))
    }

    fn serves(&self, service: &Service, endpoint: &Endpoint) -> bool {
        Self::endpoint(*self, service.id == 1) == *endpoint
    }

    fn incarnation(&self, address: IpAddr) -> Option<u64> {
        let host = if self.is_own { 1 } else { 2 };
        [false, true].map(|v6| pod(host, v6)).contains(&address).then_some(self.incarnation)
    }
}

fn pod(host: u8, v6: bool) -> IpAddr {
    if v6 { [0xfd00, 0, 0, 0, 0, 0, 0, u16::from(host)].into() } else { [10, 1, 0, host].into() }
}

fn service(v6: bool) -> SocketAddr {
    if v6 { "[fd96::7]:80".parse().unwrap() } else { "10.96.0.7:80".parse().unwrap() }
}

const DIRECTORY: Small = Small { version: 1, incarnation: 1, is_own: false, is_clear: true };

fn captured(directory: Small) -> [Side; 2] {
    let sides = pair(Cipher::Aes256Gcm);
    sides[0].forwarder.set_directory(Some(Arc::new(directory)));
    sides
}

/// The client's end, the Service and the server's end.
fn ends(v6: bool) -> [SocketAddr; 3] {
    [SocketAddr::new(pod(1, v6), 40_000), service(v6), SocketAddr::new(pod(2, v6), 8080)]
}

/// Carries what one side sent to the other.
fn carry(from: &mut Side, to: &mut Side) -> Vec<Vec<u8>> {
    let datagrams = from.sent();
    let mut packets = Vec::new();
    for (packet, offload) in to.receive(from.endpoint, &datagrams) {
        cut_packet(&packet, offload, |packet| packets.push(packet.to_vec()));
    }
    packets
}

fn dropped(side: &Side, direction: Direction, reason: DropReason) -> u64 {
    side.lane.counters().dropped(direction, reason)
}

#[test]
fn a_service_is_reached_and_answers_in_both_families_with_every_offload() {
    for (v6, kind) in [false, true].into_iter().flat_map(|v6| [(v6, SegmentKind::Tcp), (v6, SegmentKind::Udp)]) {
        let [mut a, mut b] = captured(DIRECTORY);
        b.lane.set_coalesce(true, true);
        a.lane.set_coalesce(true, true);
        let [client, service, server] = ends(v6);
        let recipe = Recipe { payload: vec![7; 4000], sum: ChecksumKind::Partial, ..Recipe::new(kind, v6) };
        let expected = |source, destination| {
            let mut packets = Vec::new();
            let whole = recipe.build(source, destination);
            cut_packet(&whole, recipe.offload_of(1000), |packet| packets.push(packet.to_vec()));
            packets
        };
        for _ in 0..3 {
            assert_eq!(a.send(&recipe.build(client, service), recipe.offload_of(1000)), Verdict::Transmit);
            assert_eq!(carry(&mut a, &mut b), expected(client, server));
            assert_eq!(b.send(&recipe.build(server, client), recipe.offload_of(1000)), Verdict::Transmit);
            assert_eq!(carry(&mut b, &mut a), expected(service, client));
        }
        assert_eq!(a.lane.counters().get(Counter::TranslatedFlows), 1);
    }
}

#[test]
fn the_other_end_sees_the_pod_and_its_firewall_the_endpoints_port() {
    let [mut a, mut b] = captured(DIRECTORY);
    let rule = Rule { port: PortRange::Range(8080, 8080), protocol: Protocol::Tcp, ..Rule::any() };
    let mut policy = local_policy(&["10.1.0.2/16", "fd00::2/64"]);
    policy.firewall = Policy { inbound: vec![rule], ..Policy::default() };
    b.forwarder.set_policy(policy);
    // The client may speak to the endpoint, and needs no rule for the Service.
    let mut policy = local_policy(&["10.1.0.1/16", "fd00::1/64"]);
    let cidr = Cidr::Prefix("10.1.0.0/16".parse().unwrap());
    policy.firewall = Policy { outbound: vec![Rule { cidr: Some(cidr), ..Rule::any() }], ..Policy::default() };
    a.forwarder.set_policy(policy);
    let [client, service, server] = ends(false);
    let recipe = Recipe::new(SegmentKind::Tcp, false);
    assert_eq!(a.send(&recipe.build(client, service), Offload::default()), Verdict::Transmit);
    assert_eq!(carry(&mut a, &mut b), [recipe.build(client, server)]);
    assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
    assert_eq!(carry(&mut b, &mut a), [recipe.build(service, client)]);
}

/// The policy of a side of [`pair`], with these rules.
fn policy(host: u8, firewall: Policy) -> LocalPolicy {
    LocalPolicy { firewall, ..local_policy(&[&format!("10.1.0.{host}/16"), &format!("fd00::{host}/64")]) }
}

#[test]
fn what_a_lane_remembers_of_a_captured_flow_ends_with_the_rules_that_let_it_pass() {
    for (v6, by_service) in [(false, false), (false, true), (true, false), (true, true)] {
        let [mut a, mut b] = captured(DIRECTORY);
        let [client, service, server] = ends(v6);
        let to = if by_service { service } else { server };
        let recipe = Recipe::new(SegmentKind::Tcp, v6);
        for _ in 0..3 {
            assert_eq!(a.send(&recipe.build(client, to), Offload::default()), Verdict::Transmit);
            assert_eq!(carry(&mut a, &mut b), [recipe.build(client, server)]);
            assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
            assert_eq!(carry(&mut b, &mut a), [recipe.build(to, client)]);
        }
        a.forwarder.set_policy(policy(1, Policy::default()));
        assert_eq!(a.send(&recipe.build(client, to), Offload::default()), Verdict::Drop(DropReason::NoRule));
        assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
        assert!(carry(&mut b, &mut a).is_empty());
        assert_eq!(dropped(&a, Direction::Inbound, DropReason::NoRule), 1);
    }
}

#[test]
fn a_captured_flow_needs_its_tunnel_with_every_packet() {
    for by_service in [false, true] {
        let [mut a, mut b] = captured(DIRECTORY);
        let [client, service, server] = ends(false);
        let to = if by_service { service } else { server };
        let packet = Recipe::new(SegmentKind::Udp, false).build(client, to);
        for _ in 0..3 {
            assert_eq!(a.send(&packet, Offload::default()), Verdict::Transmit);
            assert_eq!(carry(&mut a, &mut b).len(), 1);
        }
        a.forwarder.tunnels().retire(a.index());
        assert_eq!(a.send(&packet, Offload::default()), Verdict::Punt);
    }
}

#[test]
fn a_busy_captured_flow_stays_known_to_the_firewall() {
    let [mut a, mut b] = captured(DIRECTORY);
    let [client, service, server] = ends(false);
    let recipe = Recipe::new(SegmentKind::Udp, false);
    let udp_timeout = Duration::from_secs(10);
    a.forwarder.set_policy(policy(1, Policy { outbound: vec![Rule::any()], udp_timeout, ..Policy::default() }));
    let start = a.now;
    while a.now < start + Duration::from_secs(60) {
        assert_eq!(a.send(&recipe.build(client, service), Offload::default()), Verdict::Transmit);
        assert_eq!(carry(&mut a, &mut b), [recipe.build(client, server)]);
        a.now += Duration::from_millis(150);
        b.now = a.now;
    }
    // No rule lets it in: only the flow that the client's packets kept alive.
    assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
    assert_eq!(carry(&mut b, &mut a), [recipe.build(service, client)]);
    a.now += Duration::from_secs(11);
    b.now = a.now;
    assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
    assert!(carry(&mut b, &mut a).is_empty());
}

#[test]
fn a_packet_that_waits_for_a_tunnel_keeps_its_bytes() {
    let [mut a, b] = captured(DIRECTORY);
    a.forwarder.tunnels().retire(a.index());
    let [client, service, server] = ends(false);
    let packet = Recipe::new(SegmentKind::Tcp, false).build(client, service);
    assert_eq!(a.send(&packet, Offload::default()), Verdict::Punt);
    let Some(Punt::NoTunnel { peer, packet: waiting }) = a.lane.take_punts().next() else { panic!("no punt") };
    assert_eq!((peer, waiting.bytes), (server.ip(), packet));
    drop(b);
}

#[test]
fn a_connection_from_before_a_restart_goes_on_also_if_the_server_speaks_first() {
    for (kind, is_resumed) in [(SegmentKind::Tcp, true), (SegmentKind::Udp, true), (SegmentKind::Tcp, false)] {
        let [mut a, mut b] = captured(DIRECTORY);
        // Nobody may begin a flow to the client.
        a.forwarder.set_policy(policy(1, Policy { outbound: vec![Rule::any()], ..Policy::default() }));
        let [client, service, server] = ends(false);
        let recipe = Recipe::new(kind, false);
        if is_resumed {
            let flow = Packet::outbound(&recipe.build(client, service)).unwrap().flow;
            a.forwarder.resume(&[flow.into()], a.now);
            assert_eq!(a.forwarder.translated_flows(), 1);
        }
        for _ in 0..2 {
            assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
            let expected = if is_resumed { vec![recipe.build(service, client)] } else { Vec::new() };
            assert_eq!(carry(&mut b, &mut a), expected);
        }
        let other = SocketAddr::new(server.ip(), 8081);
        assert_eq!(b.send(&recipe.build(other, client), Offload::default()), Verdict::Transmit);
        assert!(carry(&mut b, &mut a).is_empty(), "of another port");
        assert_eq!(a.send(&recipe.build(client, service), Offload::default()), Verdict::Transmit);
        assert_eq!(carry(&mut a, &mut b), [recipe.build(client, server)]);
    }
}

#[test]
fn a_connection_from_before_is_held_to_the_rules_for_connections_of_the_pod() {
    let [mut a, mut b] = captured(DIRECTORY);
    a.forwarder.set_policy(policy(1, Policy::default()));
    let [client, service, server] = ends(false);
    let recipe = Recipe::new(SegmentKind::Tcp, false);
    a.forwarder.resume(&[Packet::outbound(&recipe.build(client, service)).unwrap().flow.into()], a.now);
    assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
    assert!(carry(&mut b, &mut a).is_empty());
    assert_eq!(dropped(&a, Direction::Inbound, DropReason::NoRule), 1);
}

#[test]
fn what_is_not_for_the_overlay_is_left_to_the_caller_unchanged() {
    let [mut a, _] = captured(DIRECTORY);
    let [client, ..] = ends(false);
    let recipe = Recipe { payload: vec![1; 3000], sum: ChecksumKind::Partial, ..Recipe::new(SegmentKind::Tcp, false) };
    let mut packet = recipe.build(client, "10.96.0.8:443".parse().unwrap());
    let before = packet.clone();
    for _ in 0..2 {
        let verdict = a.forwarder.outbound(&mut a.lane, a.now, &mut packet, recipe.offload_of(1000));
        assert_eq!((verdict, &packet), (Verdict::Bypass, &before));
    }
    assert!(a.lane.runs().is_empty());
    assert_eq!(a.lane.counters().get(Counter::Bypassed), 6, "of 1000 bytes each");
}

#[test]
fn a_closed_port_of_a_service_answers_like_one_and_a_ping_gets_no_answer_of_another() {
    let [mut a, _] = captured(DIRECTORY);
    let [client, service, _] = ends(false);
    let closed = SocketAddr::new(service.ip(), 81);
    for (kind, answer) in [(SegmentKind::Tcp, 20 + 13), (SegmentKind::Udp, 20)] {
        a.lane.clear();
        let recipe = Recipe { flags: 2, ..Recipe::new(kind, false) };
        let verdict = a.send(&recipe.build(client, closed), Offload::default());
        assert_eq!(verdict, Verdict::Drop(DropReason::Refused));
        let header = &a.lane.headers()[a.lane.deliveries()[0].header.clone()];
        assert_eq!(header[12..20], [10, 96, 0, 7, 10, 1, 0, 1]);
        // A reset with acknowledgement; port unreachable.
        assert_eq!(header[answer], if kind == SegmentKind::Tcp { 0x14 } else { 3 });
        if kind == SegmentKind::Udp {
            assert_eq!(header[21], 3);
        }
    }
    assert_eq!(dropped(&a, Direction::Outbound, DropReason::Refused), 2);
}

#[test]
fn an_unknown_destination_is_held_as_it_is_unless_the_hold_is_full() {
    let [mut a, _] = captured(DIRECTORY);
    let [client, ..] = ends(false);
    let packet = Recipe::new(SegmentKind::Udp, false).build(client, "10.1.7.7:1".parse().unwrap());
    assert_eq!(a.send(&packet, Offload::default()), Verdict::Punt);
    let punts: Vec<_> = a.lane.take_punts().collect();
    assert!(matches!(&punts[..], [Punt::Unknown { packet: held }] if held.bytes == packet));
    a.forwarder.set_hold_full(true);
    assert_eq!(a.send(&packet, Offload::default()), Verdict::Drop(DropReason::HoldFull));
}

#[test]
fn a_pod_that_is_its_own_endpoint_gets_its_super_packets_back() {
    for v6 in [false, true] {
        let [mut a, _] = captured(Small { is_own: true, ..DIRECTORY });
        let [client, service, _] = ends(v6);
        let server = SocketAddr::new(client.ip(), 8080);
        let recipe = Recipe { payload: vec![1; 3000], sum: ChecksumKind::Partial, ..Recipe::new(SegmentKind::Tcp, v6) };
        let as_client = SocketAddr::new(service.ip(), client.port());
        for (from, to, seen_from, seen_to) in [
            (client, service, as_client, server),
            (server, as_client, service, client),
            (client, service, as_client, server),
        ] {
            a.lane.clear();
            assert_eq!(a.send(&recipe.build(from, to), recipe.offload_of(1000)), Verdict::Deliver);
            let delivery = a.lane.deliveries()[0].clone();
            assert_eq!(a.lane.headers()[delivery.header], recipe.build(seen_from, seen_to));
            assert_eq!(delivery.offload, recipe.offload_of(1000));
            assert_eq!(usize::from(delivery.header_len), recipe.transport() + 20);
        }
        assert!(a.lane.runs().is_empty());
    }
}

#[test]
fn when_the_endpoint_is_another_pod_a_connection_is_reset_and_late_answers_are_not_taken_for_its() {
    let [mut a, mut b] = captured(DIRECTORY);
    let [client, service, server] = ends(false);
    let recipe = Recipe::new(SegmentKind::Tcp, false);
    assert_eq!(a.send(&recipe.build(client, service), Offload::default()), Verdict::Transmit);
    carry(&mut a, &mut b);
    assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
    assert_eq!(carry(&mut b, &mut a), [recipe.build(service, client)]);
    a.forwarder.set_directory(Some(Arc::new(Small { version: 2, incarnation: 2, ..DIRECTORY })));
    a.lane.clear();
    let verdict = a.send(&recipe.build(client, service), Offload::default());
    assert_eq!(verdict, Verdict::Drop(DropReason::EndpointGone));
    let header = &a.lane.headers()[a.lane.deliveries()[0].header.clone()];
    assert_eq!((&header[12..20], header[33]), (&[10, 96, 0, 7, 10, 1, 0, 1][..], 4), "a reset from the Service");
    assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
    assert_eq!(carry(&mut b, &mut a), [recipe.build(server, client)], "not as an answer of the Service");
}

#[test]
fn a_direct_flow_and_one_by_the_service_do_not_mix() {
    let [mut a, mut b] = captured(DIRECTORY);
    let [client, service, server] = ends(false);
    let recipe = Recipe::new(SegmentKind::Udp, false);
    // The direct flow was there first, so the firewall knows it.
    assert_eq!(a.send(&recipe.build(client, server), Offload::default()), Verdict::Transmit);
    assert_eq!(carry(&mut a, &mut b), [recipe.build(client, server)]);
    assert_eq!(a.send(&recipe.build(client, service), Offload::default()), Verdict::Transmit);
    let seen = carry(&mut a, &mut b).remove(0);
    let port = u16::from_be_bytes([seen[20], seen[21]]);
    assert_ne!(port, client.port());
    let shifted = SocketAddr::new(client.ip(), port);
    assert_eq!(seen, recipe.build(shifted, server));
    for (to, from) in [(client, server), (shifted, service)] {
        assert_eq!(b.send(&recipe.build(server, to), Offload::default()), Verdict::Transmit);
        assert_eq!(carry(&mut b, &mut a), [recipe.build(from, client)]);
    }
}

#[test]
fn without_a_directory_nothing_is_translated() {
    let [mut a, _] = captured(DIRECTORY);
    a.forwarder.set_directory(None);
    let [client, service, _] = ends(false);
    let packet = Recipe::new(SegmentKind::Udp, false).build(client, service);
    assert_eq!(a.send(&packet, Offload::default()), Verdict::Drop(DropReason::NoRoute));
}
