//! The steps whose instructions `benches/instructions` counts: those executed inside [`counted`], and no others.
//!
//! Every run uses the same keys, certificates and packets. Uncounted warm-up rounds fill caches and buffers.

use std::process::ExitCode;

use nebula_benches::{Host, Stream, capture, identity, network, readdress, service, tcp_super_packet, udp};
use nebula_cert::{Curve, Version};
use nebula_core::MessageType;
use nebula_core::counters::Direction;
use nebula_core::firewall::Policy;
use nebula_core::forward::{Offload, Received};
use nebula_core::internals::messages::{Meta, MetaKind};
use nebula_core::simulator::{Authority, Gate};
use nebula_core::{DropReason, Punt, Verdict};
use nebula_core::{FlowKey, protocol};

const WARM_UP: usize = 64;
const ROUNDS: usize = 256;

/// Fewer rounds for a handshake, which costs a thousand times as much as a packet.
const HANDSHAKE_WARM_UP: usize = 2;
const HANDSHAKE_ROUNDS: usize = 64;

/// Payload of a TCP segment at an overlay MTU of 1300, and the number of segments in a super-packet.
const SEGMENT: u16 = 1248;
const SEGMENTS: usize = 48;

/// Number of records of flows that are kept, as in a pod.
const RECORDS: usize = 192;

/// Number of hosts that the lighthouse knows.
const HOSTS: u32 = 64;

/// Runs the counted work. The tracer finds this function by its name.
#[inline(never)]
fn counted(work: &mut dyn FnMut()) {
    work();
    std::hint::black_box(());
}

/// Runs the warm-up rounds and then the counted ones. Returns how many packets `work` handled in the counted rounds, at
/// `each` per round.
fn repeat<T>(each: usize, prepare: impl FnMut() -> T, work: impl FnMut(&mut T)) -> usize {
    each * repeat_rounds(WARM_UP, ROUNDS, prepare, work)
}

fn repeat_rounds<T>(
    warm_up: usize,
    rounds: usize,
    mut prepare: impl FnMut() -> T,
    mut work: impl FnMut(&mut T),
) -> usize {
    for round in 0..warm_up + rounds {
        let mut input = prepare();
        if round < warm_up {
            work(&mut input);
        } else {
            counted(&mut || work(&mut input));
        }
    }
    rounds
}

fn super_packet() -> (Vec<u8>, Offload) {
    tcp_super_packet(Stream { port: 40_000, sequence: 1, acknowledgement: 1 }, SEGMENT, SEGMENTS)
}

fn small() -> (Vec<u8>, Offload) {
    (udp(40_000, 53, 36), Offload::default())
}

fn large() -> (Vec<u8>, Offload) {
    (udp(40_000, 53, 1200), Offload::default())
}

fn outbound(each: usize, records: usize, (mut packet, offload): (Vec<u8>, Offload)) -> usize {
    let (mut a, _) = network(|config| config.flow_records = records);
    let work = |(): &mut ()| {
        assert_eq!(a.send(&mut packet, offload), Verdict::Transmit);
        a.lane.clear();
    };
    repeat(each, || (), work)
}

fn inbound(each: usize, records: usize, (mut packet, offload): (Vec<u8>, Offload)) -> usize {
    let (mut a, mut b) = network(|config| config.flow_records = records);
    b.lane.set_coalesce(true, true);
    let sealed = || {
        assert_eq!(a.send(&mut packet, offload), Verdict::Transmit);
        a.sent()
    };
    let work = |(buffer, slots): &mut (Vec<u8>, Vec<Received>)| {
        b.receive(buffer, slots);
        assert_eq!(b.lane.deliveries().len(), 1);
        b.lane.clear();
    };
    repeat(each, sealed, work)
}

/// Number of Services in the cluster of a captured host.
const SERVICES: u32 = 1000;

/// Like [`outbound`], to a Service.
fn captured_out(each: usize, port: u16, (mut packet, offload): (Vec<u8>, Offload)) -> usize {
    let (mut a, b) = network(|_| {});
    capture(&mut a, &b, SERVICES, port);
    readdress(&mut packet, [10, 0, 0, 1], service(0).octets());
    let work = |packet: &mut Vec<u8>| {
        assert_eq!(a.send(packet, offload), Verdict::Transmit);
        a.lane.clear();
    };
    repeat(each, || packet.clone(), work)
}

/// Like [`inbound`], from a Service.
fn captured_in(each: usize, port: u16, (mut packet, offload): (Vec<u8>, Offload)) -> usize {
    let (mut a, mut b) = network(|_| {});
    b.lane.set_coalesce(true, true);
    capture(&mut b, &a, SERVICES, port);
    // The client's port is the destination of the packets that are counted.
    let mut first = packet.clone();
    let transport = [packet[22..24].to_vec(), port.to_be_bytes().to_vec()].concat();
    first[20..24].copy_from_slice(&transport);
    readdress(&mut first, [10, 0, 0, 2], service(0).octets());
    assert_eq!(b.send(&mut first, offload), Verdict::Transmit);
    b.lane.clear();
    // The server answers from the endpoint's port, which is in the packet by now.
    packet[20..22].copy_from_slice(&first[22..24]);
    readdress(&mut packet, [10, 0, 0, 1], [10, 0, 0, 2]);
    let sealed = || {
        assert_eq!(a.send(&mut packet.clone(), offload), Verdict::Transmit);
        a.sent()
    };
    let work = |(buffer, slots): &mut (Vec<u8>, Vec<Received>)| {
        b.receive(buffer, slots);
        assert_eq!(b.lane.deliveries().len(), 1);
        b.lane.clear();
    };
    let packets = repeat(each, sealed, work);
    assert_eq!(b.forwarder.translated_flows(), 1);
    packets
}

/// The first packet of a flow to a Service.
fn captured_new_flow() -> usize {
    let (mut a, b) = network(|_| {});
    capture(&mut a, &b, SERVICES, 53);
    let mut port = 1_000;
    let next = || {
        port += 1;
        let mut packet = udp(port, 53, 36);
        readdress(&mut packet, [10, 0, 0, 1], service(0).octets());
        packet
    };
    let work = |packet: &mut Vec<u8>| {
        assert_eq!(a.send(packet, Offload::default()), Verdict::Transmit);
        a.lane.clear();
    };
    repeat(1, next, work)
}

/// A packet that no rule allows out.
fn refused(records: usize) -> usize {
    let (mut a, _) = network(|config| config.flow_records = records);
    a.node.reconfigure(a.now, |config| config.firewall = Policy::default());
    let (mut packet, offload) = small();
    let work = |(): &mut ()| assert_eq!(a.send(&mut packet, offload), Verdict::Drop(DropReason::NoRule));
    repeat(1, || (), work)
}

/// The first packet of a flow.
fn new_flow(records: usize) -> usize {
    let (mut a, _) = network(|config| config.flow_records = records);
    let mut port = 1_000;
    let next = || {
        port += 1;
        udp(port, 53, 36)
    };
    let work = |packet: &mut Vec<u8>| {
        assert_eq!(a.send(packet, Offload::default()), Verdict::Transmit);
        a.lane.clear();
    };
    repeat(1, next, work)
}

/// The firewall's decision about a known flow, with one flow (cached by the lane) or with more than a lane caches.
fn conntrack(flows: u16) -> usize {
    let (a, _) = network(|_| {});
    let policy = Policy { outbound: vec![nebula_core::firewall::Rule::any()], ..Policy::default() };
    let own = ["10.0.0.1/8".parse().expect("a network")];
    let mut gate = Gate::new(&policy, &own, &a.forwarder, a.tunnel(), a.now).expect("the tunnel to b");
    let (now, local, remote) = (a.now, a.overlay, [10, 0, 0, 2].into());
    let flow =
        |local_port| FlowKey { local, remote, local_port, remote_port: 53, protocol: protocol::UDP, fragment: false };
    let flows: Vec<_> = (0..flows).map(|n| flow(1_000 + n)).collect();
    for flow in &flows {
        assert_eq!(gate.check(now, Direction::Outbound, flow), Ok(()));
    }
    let mut next = flows.iter().cycle();
    let next = || *next.next().expect("it never ends");
    repeat(1, next, |flow| assert_eq!(gate.check(now, Direction::Outbound, flow), Ok(())))
}

/// A lighthouse handles a message, with [`HOSTS`] connected hosts that have reported.
fn lighthouse(message: impl Fn(u32) -> Meta, answers: usize) -> usize {
    let authority = Authority::new(Curve::Curve25519);
    let trust = authority.trust();
    let mut served = Host::new(&authority, &trust, 1, |config| config.lighthouse.am_lighthouse = true);
    let shared = identity(&authority, 2).primary().clone();
    let shared = trust.verify(shared, 1_800_000_000).expect("a certificate of this authority");
    let overlay = |host: u32| std::net::Ipv4Addr::from_bits((10 << 24) + host).into();
    let underlay = |host: u32| std::net::SocketAddr::from(([198, 18, 0, host as u8], 4242));
    let tunnels: Vec<_> = (0..HOSTS)
        .map(|n| {
            let tunnel = served.node.adopt(served.now, shared.clone(), vec![overlay(2 + n)], underlay(2 + n));
            served.drain();
            tunnel.expect("room in the table")
        })
        .collect();
    let punt = |n: u32, message: Meta| Punt::Message {
        tunnel: tunnels[n as usize],
        from: underlay(2 + n).into(),
        kind: MessageType::Lighthouse,
        plaintext: message.encode().expect("version 2 names everything"),
    };
    for n in 0..HOSTS {
        served.node.handle_punt(served.now, punt(n, update(n)));
        served.drain();
    }
    let mut last = 0;
    let next = || {
        last = (last + 29) % HOSTS;
        Some(punt(last, message(last)))
    };
    let work = |punt: &mut Option<Punt>| {
        // Two hosts are told of each other once a second.
        served.now += 2 * std::time::Duration::from_secs(1) / HOSTS;
        served.node.handle_punt(served.now, punt.take().expect("a message"));
        assert_eq!(std::iter::from_fn(|| served.node.poll_transmit()).count(), answers);
    };
    repeat(1, next, work)
}

fn update(n: u32) -> Meta {
    let mut update = Meta::new(MetaKind::HostUpdateNotification, Version::V2, None);
    update.endpoints = [[198, 18, 0, n as u8], [192, 168, 1, 7]].map(|address| (address, 4242).into()).into();
    update
}

fn query(n: u32) -> Meta {
    let subject = std::net::Ipv4Addr::from_bits((10 << 24) + 2 + (n + HOSTS / 2) % HOSTS);
    Meta::new(MetaKind::HostQuery, Version::V2, Some(subject.into()))
}

/// Two hosts without a tunnel, and the datagram in flight between them.
struct Pair {
    a: Host,
    b: Host,
    datagram: Vec<u8>,
}

/// The initiator creates its first message.
fn start(pair: &mut Pair) {
    pair.datagram = pair.a.call(&pair.b).datagram;
}

/// The responder verifies the initiator's certificate and answers.
fn respond(pair: &mut Pair) {
    let first = std::mem::take(&mut pair.datagram);
    pair.datagram = pair.b.handshake(pair.a.underlay, first).expect("an answer").datagram;
}

/// The initiator verifies the responder's certificate and has a tunnel.
fn finish(pair: &mut Pair) {
    let second = std::mem::take(&mut pair.datagram);
    let _waiting_packets = pair.a.handshake(pair.b.underlay, second);
    assert_eq!(pair.a.node.tunnels().len(), 1);
}

/// The first packet from the initiator proves to the responder that the initiator has the keys.
fn confirm(pair: &mut Pair) {
    let (tunnel, from) = (pair.b.node.half_open()[0], pair.a.underlay.into());
    pair.b.node.handle_punt(pair.b.now, Punt::Confirmed { tunnel, from });
    assert!(pair.b.node.half_open().is_empty());
}

/// Counts the last of these steps of a handshake on Curve25519, with all of the control plane's work in it.
fn handshake(steps: &[fn(&mut Pair)]) -> usize {
    let authority = Authority::new(Curve::Curve25519);
    let trust = authority.trust();
    let [one, two] = [1, 2].map(|number| identity(&authority, number));
    let (last, before) = steps.split_last().expect("a step");
    let prepare = || {
        let mut a = Host::with_identity(one.clone(), &trust, 1, |_| {});
        let b = Host::with_identity(two.clone(), &trust, 2, |_| {});
        a.learn(&b);
        let mut pair = Pair { a, b, datagram: Vec::new() };
        before.iter().for_each(|step| step(&mut pair));
        pair
    };
    repeat_rounds(HANDSHAKE_WARM_UP, HANDSHAKE_ROUNDS, prepare, last)
}

type Step = (&'static str, fn() -> usize);

const STEPS: [Step; 25] = [
    ("super-packet-out", || outbound(SEGMENTS, 0, super_packet())),
    ("super-packet-in", || inbound(SEGMENTS, 0, super_packet())),
    ("64-bytes-out", || outbound(1, 0, small())),
    ("64-bytes-in", || inbound(1, 0, small())),
    ("1228-bytes-out", || outbound(1, 0, large())),
    ("1228-bytes-in", || inbound(1, 0, large())),
    ("captured-super-out", || captured_out(SEGMENTS, 5201, super_packet())),
    ("captured-super-in", || captured_in(SEGMENTS, 5201, super_packet())),
    ("captured-1228-out", || captured_out(1, 53, large())),
    ("captured-1228-in", || captured_in(1, 53, large())),
    ("captured-new-flow", captured_new_flow),
    ("refused", || refused(0)),
    ("new-flow", || new_flow(0)),
    ("recorded-64-out", || outbound(1, RECORDS, small())),
    ("recorded-64-in", || inbound(1, RECORDS, small())),
    ("recorded-refused", || refused(RECORDS)),
    ("recorded-new-flow", || new_flow(RECORDS)),
    ("conntrack-lane", || conntrack(1)),
    ("conntrack-node", || conntrack(4096)),
    ("lighthouse-update", || lighthouse(update, 1)),
    ("lighthouse-query", || lighthouse(query, 2)),
    ("handshake-start", || handshake(&[start])),
    ("handshake-respond", || handshake(&[start, respond])),
    ("handshake-finish", || handshake(&[start, respond, finish])),
    ("handshake-confirm", || handshake(&[start, respond, finish, confirm])),
];

/// Runs the step of this name, and prints how many packets were counted; without a name, prints all names.
#[allow(clippy::print_stdout, reason = "for the script that reads it")]
fn main() -> ExitCode {
    let Some(name) = std::env::args().nth(1) else {
        STEPS.iter().for_each(|(name, _)| println!("{name}"));
        return ExitCode::SUCCESS;
    };
    let Some((_, step)) = STEPS.iter().find(|(known, _)| *known == name) else {
        return ExitCode::FAILURE;
    };
    println!("{}", step());
    ExitCode::SUCCESS
}
