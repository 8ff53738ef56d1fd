//! Many handshakes at once, some of them with bad intent.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use nebula_core::Event;
use nebula_core::internals::header::{HEADER_LEN, Header, MessageType};
use nebula_core::simulator::{HostSpec, SimNet};

/// A host that answers a few new handshakes per second, one host that has a tunnel with it and one that has none; and
/// the first message of the one with a tunnel, which anybody on the path could see.
fn network(seed: u64, cap: Option<u32>) -> (SimNet, [nebula_core::simulator::HostId; 3], Vec<u8>) {
    let mut net = SimNet::new(seed);
    let cap = cap.and_then(NonZeroU32::new);
    let server = net.add(HostSpec::new("server").config(move |config| config.handshakes.max_new_per_second = cap));
    let [seen, other] = ["seen", "other"].map(|name| net.add(HostSpec::new(name).knows(server)));
    net.ping(seen, server).until_delivered();
    let first = net.flow().find(|step| {
        let header = Header::parse(&step.datagram);
        header.is_ok_and(|header| header.kind == MessageType::Handshake && header.counter == 1)
    });
    let first = first.expect("the message that made the tunnel").datagram.clone();
    (net, [server, seen, other], first)
}

/// The `n`th forgery: a first message proves nothing yet, so any ephemeral key yields another one.
fn forge(first: &[u8], n: u32) -> Vec<u8> {
    let mut forged = first.to_vec();
    // The header is followed by Noise's ephemeral public key, then by the static key and the payload.
    forged[HEADER_LEN..HEADER_LEN + 4].copy_from_slice(&n.to_be_bytes());
    forged
}

#[test]
fn a_flood_from_one_address_is_capped_while_others_connect_at_once() {
    let (mut net, [server, _, other], first) = network(1, Some(40));
    let (attacker, to): (SocketAddr, _) = ("192.0.2.66:666".parse().unwrap(), net.underlay(server));
    for second in 0..10 {
        for n in 0..400 {
            net.inject(attacker, to, &forge(&first, second * 1000 + n));
            net.run_for(Duration::from_micros(2500));
        }
        if second == 5 {
            let took = net.ping(other, server).until_delivered();
            assert!(took < Duration::from_millis(90), "the first attempt is answered: {took:?}\n{}", net.diagram());
        }
    }
    let refused = net.counter(server, "dropped_in_handshake_limit");
    assert!((3500..4000).contains(&refused), "{refused} of 4000");
    assert!(net.tunnels(server).len() <= 6, "however many tunnels one certificate asks for");
}

#[test]
fn without_a_cap_every_first_message_is_looked_at() {
    let (mut net, [server, ..], first) = network(2, None);
    let to = net.underlay(server);
    for n in 0..500 {
        net.inject("192.0.2.66:666".parse().unwrap(), to, &forge(&first, n));
    }
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.counter(server, "dropped_in_handshake_limit"), 0);
}

#[test]
fn a_repeated_first_message_costs_none_of_the_cap() {
    let (mut net, [server, ..], first) = network(3, Some(2));
    let (from, to) = ("192.0.2.66:666".parse().unwrap(), net.underlay(server));
    let answers = |net: &SimNet| net.flow().filter(|step| step.to == from && step.datagram[0] == 0x10).count();
    let first = forge(&first, 1);
    net.control(server, |node, now| node.close_all(now));
    for _ in 0..100 {
        net.inject(from, to, &first);
    }
    net.run_for(Duration::from_secs(1));
    assert_eq!(answers(&net), 100, "each gets the stored answer");
    assert_eq!(net.counter(server, "dropped_in_handshake_limit"), 0);
}

#[test]
fn a_fleet_that_returns_all_at_once_connects_by_its_retries() {
    let mut net = SimNet::new(4);
    let server =
        net.add(HostSpec::new("server").config(|config| config.handshakes.max_new_per_second = NonZeroU32::new(20)));
    let fleet: Vec<_> = (0..60).map(|n| net.add(HostSpec::new(&format!("host{n}")).knows(server))).collect();
    for &host in &fleet {
        let _verdict = net.send_udp(host, server, (1, 2), b"hello");
    }
    net.run_for(Duration::from_secs(6));
    assert!(net.counter(server, "dropped_in_handshake_limit") > 0);
    assert_eq!(net.tunnels(server).len(), fleet.len());
    assert_eq!(net.payloads(server, 2).len(), fleet.len(), "and what waited arrived");
}

#[test]
fn a_scan_of_the_overlay_leaves_room_for_peers_that_exist() {
    let mut net = SimNet::new(5);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    // More addresses than there is room for, none of which exists, for longer than a handshake is kept.
    for n in 0..12_000_u32 {
        let nobody = std::net::Ipv4Addr::from(0x0a2a_8000 + n);
        net.control(a, |node, now| node.connect(now, nobody.into()));
        if n % 10 == 0 {
            net.run_for(Duration::from_millis(2));
        }
    }
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_millis(100), "{took:?}");
    let given_up = |event: &&Event| matches!(event, Event::HandshakeTimedOut { after, .. } if after.as_secs() < 5);
    assert!(net.events(a).iter().filter(given_up).count() > 1000, "those without an endpoint gave way");
}

#[test]
fn a_scan_holds_no_more_handshakes_than_the_limit_and_everything_is_given_back() {
    let mut net = SimNet::new(6);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [a, b] = ["a", "b"].map(|name| {
        let small = |config: &mut nebula_core::Config| config.handshakes.max_pending = 100;
        net.add(HostSpec::new(name).lighthouse(lighthouse).config(small))
    });
    net.run_for(Duration::from_secs(1));
    let before = net.table_sizes(a);
    for n in 0..2_000_u32 {
        let nobody = std::net::Ipv4Addr::from(0x0a2a_8000 + n);
        net.control(a, |node, now| node.connect(now, nobody.into()));
        assert!(net.table_sizes(a).pending <= 100);
        net.run_for(Duration::from_millis(2));
    }
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_millis(500), "{took:?}");
    assert!(net.counter(a, "dropped_out_pending_full") > 0, "most found no place");
    net.run_for(Duration::from_secs(10));
    let after = net.table_sizes(a);
    assert_eq!((after.pending, after.reserved, after.candidates), (0, 0, before.candidates + 1), "{after:?}");
}
