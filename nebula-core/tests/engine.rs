//! An [`Engine`] without a network: two of them, and datagrams carried by hand.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nebula_cert::{CaPool, Curve, Version};
use nebula_core::config::ConfigProblem;
use nebula_core::firewall::Rule;
use nebula_core::forward::{Offload, Received, Segment, SegmentKind};
use nebula_core::simulator::{Authority, Subject};
use nebula_core::{Config, DropReason, Engine, Output, Seed, WallClock};

fn endpoint(host: usize) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, host as u8 + 1], 4242))
}

fn overlay(host: usize) -> IpAddr {
    IpAddr::from([10, 42, 0, host as u8 + 1])
}

fn config(host: usize) -> Config {
    let authority = Authority::new(Curve::Curve25519);
    let subject = |host: usize| Subject {
        name: format!("host-{host}"),
        networks: vec![IpNet::new(overlay(host), 16).expect("a prefix length")],
        unsafe_networks: Vec::new(),
        groups: Vec::new(),
        versions: vec![Version::V2],
        not_after: 1_900_000_000,
    };
    // Each authority draws the same keys, one after the other.
    let identities = [0, 1].map(|host| authority.identity(&subject(host)));
    let mut config = Config::new(identities[host].clone(), authority.trust());
    config.static_hosts.insert(overlay(1 - host), vec![endpoint(1 - host)]);
    config.firewall.outbound.push(Rule::any());
    config.firewall.inbound.push(Rule::any());
    config
}

fn start() -> WallClock {
    #[allow(clippy::disallowed_methods, reason = "where virtual time begins")]
    let at = Instant::now();
    WallClock { at, unix: Duration::from_secs(1_800_000_000) }
}

/// Two engines that know each other, and the overlay addresses of both.
fn pair(clock: WallClock) -> ([Engine; 2], [IpAddr; 2]) {
    let engines = [0, 1].map(|host| {
        Engine::new(config(host), clock, Seed::predictable([host as u8; 32])).expect("a valid configuration")
    });
    (engines, [0, 1].map(overlay))
}

/// Carries datagrams, those of one batch as one, until there are none. Returns what the second host received.
fn carry(engines: &mut [Engine; 2], now: Instant, mut wire: Vec<(usize, Vec<u8>, usize)>) -> Vec<(Vec<u8>, Offload)> {
    let mut received = Vec::new();
    while !wire.is_empty() {
        let (from, mut bytes, segment_size) = wire.remove(0);
        let slots = [Received { from: endpoint(from), range: 0..bytes.len(), segment_size }];
        let output = engines[1 - from].receive_all(now, &mut bytes, &slots);
        if from == 0 {
            received.extend(output.packets().map(|packet| (packet.to_vec(), packet.offload())));
        }
        wire.extend(sent(1 - from, output));
    }
    received
}

fn sent(from: usize, output: Output<'_>) -> Vec<(usize, Vec<u8>, usize)> {
    assert!(output.batches().all(|batch| batch.to == endpoint(1 - from)));
    output.batches().map(|batch| (from, batch.bytes.to_vec(), batch.segment_size)).collect()
}

/// A UDP super-packet, as a TCP/IP stack in this process would make it.
fn super_packet([from, to]: [IpAddr; 2], payload: usize, size: u16) -> (Vec<u8>, Offload) {
    let (IpAddr::V4(from), IpAddr::V4(to)) = (from, to) else { panic!("both have IPv4 addresses") };
    let mut packet = vec![0x45, 0];
    packet.extend((28 + payload as u16).to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    for field in [1000, 2000, 8 + payload as u16, 0] {
        packet.extend(field.to_be_bytes());
    }
    packet.resize(28 + payload, 7);
    (packet, Offload { segment: Some(Segment { kind: SegmentKind::Udp, size }), checksum: Some((20, 6)) })
}

#[test]
fn a_super_packet_crosses_as_one_and_comes_out_joined() {
    let clock = start();
    let (mut engines, addresses) = pair(clock);
    engines[1].set_coalesce(true, true);
    assert!(engines[0].certificate(addresses[1]).is_none());
    let (packet, offload) = super_packet(addresses, 10_000, 1000);
    let wire = sent(0, engines[0].send(clock.at, &mut packet.clone(), offload));
    carry(&mut engines, clock.at, wire);
    let (_, output) = engines[0].control(clock.at, |_| ());
    assert_eq!(output.dropped(), None);
    assert_eq!(engines[0].certificate(addresses[1]).unwrap().name(), "host-1");

    let wire = sent(0, engines[0].send(clock.at, &mut packet.clone(), offload));
    assert_eq!(wire.len(), 1, "one batch for the socket");
    let received = carry(&mut engines, clock.at, wire);
    let [(joined, told)] = &received[..] else { panic!("{} packets", received.len()) };
    assert_eq!((told.segment, told.checksum), (offload.segment, offload.checksum));
    assert_eq!((joined.len(), &joined[28..]), (packet.len(), &packet[28..]));
}

#[test]
fn many_packets_go_out_in_as_many_outputs_as_it_takes() {
    let clock = start();
    let (mut engines, addresses) = pair(clock);
    let (packet, offload) = super_packet(addresses, 100, 1000);
    let wire = sent(0, engines[0].send(clock.at, &mut packet.clone(), offload));
    carry(&mut engines, clock.at, wire);
    let (packet, offload) = super_packet(addresses, 60_000, 1000);
    let mut packets = vec![packet; 20];
    let mut left = packets.iter_mut().map(|packet| (packet.as_mut_slice(), offload));
    let (mut outputs, mut datagrams) = (0, 0);
    while left.len() > 0 {
        let output = engines[0].send_all(clock.at, &mut left);
        (outputs, datagrams) = (outputs + 1, datagrams + output.datagrams().count());
    }
    assert_eq!(datagrams, 20 * 60);
    assert!((2..20).contains(&outputs), "{outputs} outputs");
}

#[test]
fn a_busy_socket_does_not_hold_up_timeouts() {
    let clock = start();
    let (mut engines, addresses) = pair(clock);
    let first = sent(0, engines[0].connect(clock.at, addresses[1]));
    assert_eq!(first.len(), 1);
    let due = engines[0].poll_timeout().unwrap();
    let mut noise = [0; 100];
    let output = engines[0].receive(due, endpoint(1), &mut noise);
    assert_eq!(sent(0, output), first, "the first message is sent again");
    assert!(output.next_timeout().unwrap() > due);
}

#[test]
fn a_packet_without_a_route_is_dropped_and_that_is_said() {
    let clock = start();
    let (mut engines, [own, _]) = pair(clock);
    let (mut packet, _) = super_packet([own, "203.0.113.9".parse().unwrap()], 10, 10);
    let output = engines[0].send(clock.at, &mut packet, Offload::default());
    assert_eq!(output.dropped(), Some(DropReason::NoRoute));
    assert_eq!(output.datagrams().count(), 0);
}

#[test]
fn a_configuration_that_contradicts_itself_is_refused() {
    let mut config = config(0);
    config.trust = CaPool::new();
    let refused = Engine::new(config, start(), Seed::predictable([1; 32])).unwrap_err();
    assert_eq!(refused.problems(), [ConfigProblem::NoCa]);
}

#[test]
fn an_engine_may_move_to_another_thread() {
    fn movable<T: Send>() {}
    movable::<Engine>();
}
