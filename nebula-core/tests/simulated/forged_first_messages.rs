//! Forged first handshake messages change nothing until their sender proves that it has the keys.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use nebula_core::internals::header::{HEADER_LEN, Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, Link, SimNet, Step};

const SECOND: Duration = Duration::from_secs(1);
/// A round trip takes 60 ms.
const FAR: Link = Link { latency: Duration::from_millis(30), jitter: Duration::ZERO, loss: 0, duplicate: 0, mtu: None };

fn forger() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 66], 666))
}

/// One of very many addresses that the forger writes into its datagrams.
fn spoofed(number: u32) -> SocketAddr {
    SocketAddr::from((std::net::Ipv4Addr::from_bits(0xcb00_0000 | number & 0x00ff_ffff), 666))
}

fn is_first_message(step: &Step) -> bool {
    matches!(Header::parse(&step.datagram), Ok(Header { kind: MessageType::Handshake, counter: 1, index: 0 }))
}

/// The most recent first handshake message of `host`, which holds its certificate in clear.
fn overheard(net: &SimNet, host: &str) -> Vec<u8> {
    let step = net.flow().rev().find(|step| step.sender == host && is_first_message(step));
    step.expect("a first message").datagram.clone()
}

/// A first message with another host's certificate and an ephemeral key to which nobody has the private half.
fn forged(overheard: &[u8], number: u32) -> Vec<u8> {
    let mut message = overheard.to_vec();
    message[HEADER_LEN..HEADER_LEN + 4].copy_from_slice(&number.to_be_bytes());
    message
}

/// Number of bytes in datagrams from and to an address that belongs to no host.
fn bytes(net: &SimNet, stranger: SocketAddr) -> (usize, usize) {
    let sum = |is: &dyn Fn(&&Step) -> bool| net.flow().filter(is).map(|step| step.datagram.len()).sum();
    (sum(&|step| step.from == stranger), sum(&|step| step.to == stranger))
}

/// `alice` and `bob`, who know each other's endpoints, and a first message of `alice`; they no longer have a tunnel.
fn strangers_again(seed: u64) -> (SimNet, HostId, HostId, Vec<u8>) {
    let mut net = SimNet::new(seed);
    let [alice, bob] = net.nodes(["alice", "bob"]);
    net.ping(alice, bob).until_delivered();
    let message = overheard(&net, "alice");
    net.restart(alice);
    net.restart(bob);
    (net, alice, bob, message)
}

/// Sends `rate` forged messages a second for `time`, each from the next source, and lets time pass.
fn flood(
    net: &mut SimNet,
    at: HostId,
    message: &[u8],
    sent: &mut u32,
    (rate, time): (u32, Duration),
    source: fn(u32) -> SocketAddr,
) {
    let pause = SECOND / rate;
    for _ in 0..(time.as_nanos() / pause.as_nanos()) {
        *sent += 1;
        net.inject(source(*sent), net.underlay(at), &forged(message, *sent));
        net.run_for(pause);
    }
}

#[test]
fn one_forged_message_every_three_seconds_takes_no_packet_from_an_idle_peer() {
    let (mut net, alice, bob, message) = strangers_again(1);
    let mut answered = 0;
    for second in 0..45 {
        if second % 3 == 0 {
            net.inject(forger(), net.underlay(bob), &forged(&message, second));
            net.run_for(SECOND / 10);
        }
        answered += u32::from(net.ping(bob, alice).is_answered_within(SECOND / 2));
        // Close the tunnel at both ends, so that the next ping needs a new one.
        net.control(bob, |node, now| node.close(now, "10.42.0.1".parse().unwrap(), true));
        net.control(alice, |node, now| node.close(now, "10.42.0.2".parse().unwrap(), true));
        net.run_for(SECOND / 2);
    }
    assert_eq!(answered, 45, "{}", net.diagram());
}

#[test]
fn packets_for_a_peer_without_a_known_endpoint_never_go_to_a_forger() {
    let mut net = SimNet::new(2);
    let bob = net.add(HostSpec::new("bob"));
    let alice = net.add(HostSpec::new("alice").knows(bob));
    net.ping(alice, bob).until_delivered();
    let message = overheard(&net, "alice");
    net.kill(alice);
    net.restart(bob);
    net.inject(forger(), net.underlay(bob), &forged(&message, 1));
    net.run_for(SECOND / 10);
    let _verdict = net.send_udp(bob, alice, (1, 2), b"for alice");
    net.run_for(SECOND);
    let data = net.flow().filter(|step| step.to == forger() && step.datagram[0] == 0x11).count();
    assert_eq!(data, 0, "{}", net.diagram());
    // She calls and receives the packets that waited for her.
    net.restart(alice);
    let peer = net.overlay(bob);
    net.control(alice, |node, now| node.connect(now, peer));
    net.expect("what waited", SECOND / 5, |net| net.payloads(alice, 2) == [b"for alice"]);
}

/// Counts how many of 50 packets that bob sends to alice in the two seconds after her restart arrive, and measures when
/// the first one does. Only she knows where he is, and she has nothing to send.
fn comes_back(seed: u64, rate: u32, source: fn(u32) -> SocketAddr) -> (usize, Duration) {
    let mut net = SimNet::new(seed);
    let bob = net.add(HostSpec::new("bob"));
    let alice = net.add(HostSpec::new("alice").knows(bob));
    net.set_link(FAR);
    net.ping(alice, bob).until_delivered();
    let (message, mut sent) = (overheard(&net, "alice"), 0);
    net.stop(alice);
    net.run_for(SECOND);
    if rate > 0 {
        flood(&mut net, bob, &message, &mut sent, (rate, SECOND * 2), source);
    }
    net.restart(alice);
    let (restarted, mut first, mut answered) = (net.elapsed(), None, 0);
    let peer = net.overlay(bob);
    net.control(alice, |node, now| node.connect(now, peer));
    for _ in 0..50 {
        let _verdict = net.send_udp(bob, alice, (1, 7), b"to alice");
        match rate {
            0 => net.run_for(SECOND / 25),
            _ => flood(&mut net, bob, &message, &mut sent, (rate, SECOND / 25), source),
        }
        let back = net.payloads(alice, 7).len();
        if back > answered {
            first = first.or_else(|| Some(net.elapsed().saturating_sub(restarted)));
        }
        answered = back;
    }
    (answered, first.unwrap_or(SECOND * 60))
}

#[test]
fn a_hundred_forged_messages_a_second_do_not_keep_a_restarted_peer_out() {
    let (calm, attacked) = (comes_back(3, 0, |_| forger()), comes_back(3, 100, |_| forger()));
    assert!(calm.0 > 40, "{calm:?}");
    assert_eq!(attacked, calm, "(packets that alice got of 50, time to the first)");
}

#[test]
fn four_thousand_forged_messages_a_second_from_spoofed_sources_do_not_keep_a_restarted_peer_out() {
    let (calm, attacked) = (comes_back(4, 0, spoofed), comes_back(4, 4000, spoofed));
    assert_eq!(attacked, calm, "(packets that alice got of 50, time to the first)");
}

#[test]
fn forged_messages_from_the_peers_own_address_do_not_keep_it_out() {
    let own = |number: u32| SocketAddr::from(([198, 51, 100, 2], 1024 + (number % 60_000) as u16));
    let (calm, attacked) = (comes_back(5, 0, own), comes_back(5, 200, own));
    assert_eq!(attacked, calm, "(packets that alice got of 50, time to the first)");
}

/// A lighthouse, `alice` and `bob` that use it, and a first message of alice.
fn around_a_lighthouse(seed: u64) -> (SimNet, [HostId; 3], Vec<u8>) {
    let mut net = SimNet::new(seed);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [alice, bob] = ["alice", "bob"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(SECOND);
    let message = overheard(&net, "alice");
    (net, [lighthouse, alice, bob], message)
}

#[test]
fn a_forged_message_at_a_lighthouse_changes_no_answer_and_makes_nobody_punch_at_the_forger() {
    for gone in [false, true] {
        let (mut net, [lighthouse, alice, bob], message) = around_a_lighthouse(6);
        if gone {
            net.stop(alice);
            net.run_for(SECOND);
        }
        net.inject(forger(), net.underlay(lighthouse), &forged(&message, 1));
        net.run_for(SECOND / 2);
        let subject = net.overlay(alice);
        net.control(bob, |node, now| node.inquire(now, subject));
        net.run_for(SECOND / 2);
        let told = net.control(bob, |node, _| node.whereabouts(subject));
        let named = told.answers.values().flat_map(|answer| &answer.reported).any(|at| *at == forger());
        assert!(!named && !told.endpoints.contains(&forger()), "alice gone: {gone}, {told:?}\n{}", net.diagram());
        let _verdict = net.send_udp(bob, alice, (1, 2), b"hello");
        net.run_for(SECOND * 3);
        let punched = net.flow().filter(|step| step.to == forger() && step.sender == "bob").count();
        assert_eq!(punched, 0, "alice gone: {gone}\n{}", net.diagram());
        assert_eq!(net.payloads(alice, 2).len(), usize::from(!gone));
    }
}

#[test]
fn a_lighthouse_sends_a_forger_at_most_three_times_what_it_got() {
    let (mut net, [lighthouse, alice, bob], message) = around_a_lighthouse(7);
    net.stop(alice);
    net.run_for(SECOND);
    let subject = net.overlay(alice);
    for number in 0..12 {
        net.inject(forger(), net.underlay(lighthouse), &forged(&message, number));
        for _ in 0..20 {
            net.control(bob, |node, now| node.inquire(now, subject));
            net.run_for(SECOND / 20);
        }
    }
    net.run_for(SECOND * 20);
    let (got, sent) = bytes(&net, forger());
    assert!(sent <= 3 * got, "{got} bytes in, {sent} bytes out");
    assert!(sent > 0, "a first message is answered, whoever sent it");
}

#[test]
fn however_large_the_own_certificate_forged_messages_bring_a_stranger_little_more_than_three_times_as_much() {
    let mut net = SimNet::new(8);
    let groups: Vec<_> = (0..80).map(|number| format!("a-group-with-a-long-name-{number}")).collect();
    let groups: Vec<_> = groups.iter().map(String::as_str).collect();
    let bob = net.add(HostSpec::new("bob").groups(&groups));
    let alice = net.add(HostSpec::new("alice").knows(bob));
    net.ping(alice, bob).until_delivered();
    let message = overheard(&net, "alice");
    net.kill(alice);
    net.restart(bob);
    // A thousand messages in ten seconds that seem to come from one stranger, then one from others.
    let mut count = 0;
    flood(&mut net, bob, &message, &mut count, (100, SECOND * 10), |_| forger());
    let (got, sent) = bytes(&net, forger());
    let most = 3 * got + (128 << 10) + 10 * (4 << 10);
    assert!(sent > 128 << 10 && sent <= most, "{got} bytes in, {sent} bytes out, at most {most}");
    net.inject(spoofed(1), net.underlay(bob), &forged(&message, 1));
    net.run_for(SECOND / 10);
    assert!(bytes(&net, spoofed(1)).1 > 3 * message.len(), "others are answered meanwhile");
}

#[test]
fn an_overheard_first_message_replayed_after_a_restart_changes_nothing() {
    let (mut net, alice, bob, message) = strangers_again(9);
    net.inject(forger(), net.underlay(bob), &message);
    net.run_for(SECOND / 10);
    assert_eq!(net.endpoint_of(bob, alice), None, "{}", net.diagram());
    assert_eq!((net.tunnels(bob).len(), net.events(bob)), (0, &[][..]), "nothing to tell anybody");
    assert_eq!(net.ping(bob, alice).train(20, SECOND / 2), 20, "{}", net.diagram());
    assert_eq!(net.endpoint_of(bob, alice), Some(net.underlay(alice)));
    let (got, sent) = bytes(&net, forger());
    assert!(sent <= 3 * got, "{got} bytes in, {sent} bytes out");
}

#[test]
fn what_a_flood_of_forged_messages_took_is_given_back() {
    let mut net = SimNet::new(10);
    let bob =
        net.add(HostSpec::new("bob").config(|config| config.handshakes.max_new_per_second = NonZeroU32::new(1000)));
    let alice = net.add(HostSpec::new("alice").knows(bob));
    net.ping(alice, bob).until_delivered();
    let message = overheard(&net, "alice");
    net.stop(alice);
    net.run_for(SECOND * 200);
    let before = net.table_sizes(bob);
    let mut sent = 0;
    flood(&mut net, bob, &message, &mut sent, (1000, SECOND * 4), spoofed);
    let full = net.table_sizes(bob).reserved + net.table_sizes(bob).tunnels;
    assert!(full <= 1500, "{full} entries");
    net.run_for(SECOND * 200);
    assert_eq!(net.table_sizes(bob), before);
}

#[test]
fn a_caller_that_is_blocked_before_it_is_confirmed_gets_no_tunnel() {
    let mut net = SimNet::new(13);
    net.set_link(FAR);
    let bob = net.add(HostSpec::new("bob"));
    let alice = net.add(HostSpec::new("alice").knows(bob));
    let _verdict = net.send_udp(alice, bob, (1, 2), b"hello");
    net.run_for(FAR.latency * 2);
    assert_eq!(net.table_sizes(bob).half_open, 1);
    let (mut trust, fingerprint) = (net.authority().trust(), net.fingerprint(alice));
    trust.block(fingerprint);
    net.control(bob, |node, now| node.reconfigure(now, |config| config.trust = trust));
    assert_eq!(net.table_sizes(bob).half_open, 0);
    net.run_for(SECOND);
    assert!(net.payloads(bob, 2).is_empty() && net.tunnels(bob).is_empty(), "{}", net.diagram());
}

#[test]
fn a_caller_with_nothing_to_say_is_confirmed_and_reached_without_an_endpoint_of_its_own() {
    let mut net = SimNet::new(11);
    let bob = net.add(HostSpec::new("bob"));
    let alice = net.add(HostSpec::new("alice").knows(bob));
    let peer = net.overlay(bob);
    net.control(alice, |node, now| node.connect(now, peer));
    net.run_for(SECOND);
    assert!(net.ping(bob, alice).is_answered_within(SECOND / 10), "{}", net.diagram());
    assert_eq!((net.tunnels(bob).len(), net.tunnels(alice).len()), (1, 1));
}

#[test]
fn a_packet_for_a_caller_waits_for_one_round_trip_at_most() {
    let mut net = SimNet::new(12);
    net.set_post_quantum(nebula_core::PostQuantum::Off);
    net.set_link(FAR);
    let bob = net.add(HostSpec::new("bob"));
    let alice = net.add(HostSpec::new("alice").knows(bob));
    let peer = net.overlay(bob);
    net.control(alice, |node, now| node.connect(now, peer));
    net.run_for(FAR.latency + Duration::from_millis(1));
    let _verdict = net.send_udp(bob, alice, (1, 2), b"hello");
    // Message 1 to her, message 2 back, and the packet to her.
    net.expect("the packet", FAR.latency * 3 + Duration::from_millis(2), |net| net.payloads(alice, 2).len() == 1);
    net.run_for(SECOND);
    assert_eq!(net.tunnels(bob).len(), 1);
}
