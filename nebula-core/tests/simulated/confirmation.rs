//! First messages prove nothing: a tunnel that this node answered is half-open until the peer is heard in it.

use std::net::SocketAddr;
use std::time::Duration;

use nebula_core::LocalIndex;
use nebula_core::config::RecvErrorPolicy;
use nebula_core::internals::header::{Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, Link, SimNet, Step};
use nebula_core::{Punt, WallClock};

const SECOND: Duration = Duration::from_secs(1);
const BLINK: Duration = Duration::from_millis(100);

fn stranger() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 66], 666))
}

fn is_first_message(step: &Step) -> bool {
    matches!(Header::parse(&step.datagram), Ok(Header { kind: MessageType::Handshake, counter: 1, index: 0 }))
}

/// The most recent first handshake message that `host` sent to anybody.
fn first_message(net: &SimNet, host: &str) -> Vec<u8> {
    let step = net.flow().rev().find(|step| step.sender == host && is_first_message(step));
    step.expect("a first message").datagram.clone()
}

/// Like [`first_message`], but with another ephemeral key, to which nobody has the private half.
fn forged(net: &SimNet, host: &str, number: u8) -> Vec<u8> {
    let mut message = first_message(net, host);
    message[16] ^= number;
    message
}

fn half_open(net: &mut SimNet, host: HostId) -> Vec<LocalIndex> {
    net.control(host, |node, _| node.half_open())
}

fn primary(net: &SimNet, host: HostId, peer: HostId) -> LocalIndex {
    let primary = net.tunnels_to(host, peer).into_iter().find(|tunnel| tunnel.primary);
    primary.expect("a primary tunnel").local_index
}

/// `a` and `b` talk; afterwards `a` calls `c`, so that there is a first message of `a` that is newer than its tunnel to
/// `b`.
fn with_a_newer_first_message(seed: u64) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    let [a, b, c] = net.nodes(["a", "b", "c"]);
    net.ping(a, b).until_delivered();
    net.run_for(SECOND);
    net.ping(a, c).until_delivered();
    (net, a, b)
}

#[test]
fn a_copied_first_message_takes_no_traffic_from_a_live_peer() {
    let (mut net, a, b) = with_a_newer_first_message(1);
    let (before, endpoint) = (primary(&net, b, a), net.endpoint_of(b, a));
    let copy = first_message(&net, "a");
    net.inject(stranger(), net.underlay(b), &copy);
    net.run_for(BLINK);
    assert_eq!(half_open(&mut net, b).len(), 1, "it may have been a itself\n{}", net.diagram());
    assert_eq!(net.ping(b, a).train(40, SECOND / 2), 40, "{}", net.diagram());
    assert_eq!((primary(&net, b, a), net.endpoint_of(b, a)), (before, endpoint));
    assert_eq!(net.tunnels_to(b, a).len(), 1, "nobody was heard in the other one\n{}", net.diagram());
    assert_eq!(half_open(&mut net, b), []);
}

#[test]
fn forged_first_messages_do_not_evict_a_live_tunnel() {
    let (mut net, a, b) = with_a_newer_first_message(2);
    let before = primary(&net, b, a);
    for number in 1..100 {
        net.inject(stranger(), net.underlay(b), &forged(&net, "a", number));
        net.run_for(BLINK / 10);
        assert!(net.tunnels_to(b, a).len() <= 5);
    }
    assert_eq!(net.ping(b, a).train(40, SECOND / 2), 40, "{}", net.diagram());
    assert_eq!(primary(&net, b, a), before);
}

#[test]
fn a_copied_first_message_sends_a_few_small_datagrams_to_its_sender() {
    let (mut net, _, b) = with_a_newer_first_message(3);
    let copy = first_message(&net, "a");
    net.inject(stranger(), net.underlay(b), &copy);
    net.run_for(SECOND * 60);
    let sent: Vec<_> = net.flow().filter(|step| step.to == stranger()).map(|step| step.datagram.len()).collect();
    let reply = sent[0];
    assert!(sent[1..].iter().all(|length| *length <= 32), "{sent:?}");
    assert!(sent.iter().sum::<usize>() <= copy.len() + reply, "{sent:?}");
}

#[test]
fn a_forged_time_does_not_keep_the_peer_itself_out() {
    let mut net = SimNet::new(4);
    let [a, b] = net.nodes(["a", "b"]);
    // Somebody sends a first message in the name of `a` with a time a year ahead, while nobody has a tunnel.
    net.control(a, |node, now| {
        node.set_wall_clock(WallClock { at: now, unix: Duration::from_secs(1_800_000_000 + 31_536_000) });
    });
    net.cut(a, b);
    let _verdict = net.send_udp(a, b, (1, 2), b"never");
    let ahead = first_message(&net, "a");
    net.restart(a);
    net.heal(a, b);
    net.inject(stranger(), net.underlay(b), &ahead);
    net.run_for(SECOND);
    assert_eq!(net.endpoint_of(b, a), None, "there was nobody else");
    assert!(net.ping(a, b).is_answered_within(BLINK), "{}", net.diagram());
    assert!(net.ping(b, a).is_answered_within(BLINK), "{}", net.diagram());
    assert_eq!(net.endpoint_of(b, a), Some(net.underlay(a)));
}

#[test]
fn a_peer_that_started_again_gets_the_traffic_after_one_round_trip() {
    for silent in [false, true] {
        let mut net = SimNet::new(5);
        let [a, b] = ["a", "b"].map(|name| {
            net.add(HostSpec::new(name).config(move |config| {
                if silent {
                    config.send_recv_error = RecvErrorPolicy::Never;
                }
            }))
        });
        net.introduce(a, b);
        net.ping(a, b).until_delivered();
        let old = primary(&net, b, a);
        net.restart(a);
        // `a` calls, but has no packets to send.
        let peer = net.overlay(b);
        net.control(a, |node, now| node.connect(now, peer));
        net.run_for(BLINK);
        assert_ne!(primary(&net, b, a), old, "{}", net.diagram());
        assert!(net.ping(b, a).is_answered_within(BLINK), "{}", net.diagram());
    }
}

#[test]
fn lost_tests_are_sent_again() {
    let mut late = 0;
    for seed in 0..60 {
        let mut net = SimNet::new(seed);
        let silent = |config: &mut nebula_core::Config| config.send_recv_error = RecvErrorPolicy::Never;
        let b = net.add(HostSpec::new("b").config(silent));
        let a = net.add(HostSpec::new("a").knows(b).config(silent));
        net.ping(a, b).until_delivered();
        let old = primary(&net, b, a);
        net.restart(a);
        net.set_link(Link { loss: 15, ..Link::default() });
        let peer = net.overlay(b);
        net.control(a, |node, now| node.connect(now, peer));
        let done = |net: &SimNet| primary(net, b, a) != old;
        late += u32::from(!net.run_until(SECOND, done));
        net.expect("the new tunnel is used", SECOND * 12, done);
    }
    assert!(late <= 6, "{late} of 60 took longer than a second");
}

#[test]
fn data_in_the_new_tunnel_confirms_it_without_a_test() {
    let mut net = SimNet::new(7);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let old = primary(&net, b, a);
    net.restart(a);
    // The packet that waited at the caller is sent together with its answer to the second message.
    let _verdict = net.send_udp(a, b, (1, 2), b"first");
    net.expect("the packet", SECOND, |net| !net.payloads(b, 2).is_empty());
    assert_ne!(primary(&net, b, a), old, "{}", net.diagram());
}

#[test]
fn both_tunnels_carry_packets_until_the_new_one_is_confirmed() {
    let mut net = SimNet::new(8);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let identity = net.renewed_identity(a, &[nebula_cert::Version::V2]);
    net.control(a, |node, now| node.reconfigure(now, |config| config.identity = identity));
    net.set_link(Link { latency: SECOND / 4, ..Link::default() });
    for number in 0..200_u8 {
        let _verdict = net.send_udp(b, a, (1, 7), &[number]);
        let _verdict = net.send_udp(a, b, (1, 7), &[number]);
        net.run_for(BLINK);
    }
    net.run_for(SECOND);
    assert!(net.tunnels_to(b, a).iter().any(|tunnel| !tunnel.primary), "it was renewed");
    let all: Vec<_> = (0..200_u8).map(|number| vec![number]).collect();
    assert_eq!((net.payloads(a, 7), net.payloads(b, 7)), (all.clone(), all), "{}", net.diagram());
}

#[test]
fn a_late_confirmation_does_not_undo_a_newer_tunnel() {
    let (mut net, a, b) = with_a_newer_first_message(9);
    let copy = first_message(&net, "a");
    net.inject(stranger(), net.underlay(b), &copy);
    net.run_for(BLINK);
    let waiting = half_open(&mut net, b)[0];
    // `b` itself opens a tunnel that is newer.
    let identity = net.renewed_identity(b, &[nebula_cert::Version::V2]);
    net.control(b, |node, now| node.reconfigure(now, |config| config.identity = identity));
    let before = primary(&net, b, a);
    for _ in 0..12 {
        net.ping(a, b).until_delivered();
        net.run_for(SECOND / 2);
    }
    let newer = primary(&net, b, a);
    assert_ne!(newer, before);
    net.control(b, |node, now| node.handle_punt(now, Punt::Confirmed { tunnel: waiting, from: stranger().into() }));
    assert_eq!(primary(&net, b, a), newer);
}

#[test]
fn a_relayed_peer_that_started_again_is_confirmed_through_the_relay() {
    let mut net = SimNet::new(10);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse().config(|config| config.relay.am_relay = true));
    let at = net.overlay(lighthouse);
    let [a, b] = ["a", "b"].map(|name| {
        net.add(HostSpec::new(name).lighthouse(lighthouse).config(move |config| config.relay.relays = vec![at]))
    });
    net.cut(a, b);
    net.run_for(SECOND);
    net.ping(a, b).until_delivered();
    let old = primary(&net, b, a);
    net.restart(a);
    let peer = net.overlay(b);
    net.run_for(SECOND);
    net.control(a, |node, now| node.connect(now, peer));
    net.run_for(SECOND);
    assert_ne!(primary(&net, b, a), old, "{}", net.diagram());
    assert!(net.ping(b, a).is_answered_within(SECOND), "{}", net.diagram());
    assert_eq!(net.endpoint_of(b, a), None);
}
