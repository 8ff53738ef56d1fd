//! A tunnel follows its peer only to where it has answered a challenge: anybody can write any source address.

use std::net::SocketAddr;
use std::time::Duration;

use nebula_core::Event;
use nebula_core::simulator::{HostId, HostSpec, Link, NatBehaviour, SimNet, Step};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Has nothing to do with it.
const STRANGER: &str = "192.0.2.66:4242";
/// A round trip takes 60 ms.
const FAR: Link = Link { latency: Duration::from_millis(30), jitter: Duration::ZERO, loss: 0, duplicate: 0, mtu: None };

fn stranger() -> SocketAddr {
    STRANGER.parse().expect("an endpoint")
}

/// Bytes that claim to come from the stranger, and those that were sent there.
fn bytes(net: &SimNet) -> (usize, usize) {
    let sum = |is: &dyn Fn(&&Step) -> bool| net.flow().filter(is).map(|step| step.datagram.len()).sum();
    (sum(&|step| step.from == stranger()), sum(&|step| step.to == stranger()))
}

/// A packet every millisecond from `host` to `member`, and one back for every ten, for this long.
fn download(net: &mut SimNet, (host, member): (HostId, HostId), time: Duration) {
    for number in 0..time.as_millis() {
        let _verdict = net.send_udp(host, member, (1, 2), &[b'x'; 1200]);
        if number % 10 == 0 {
            let _verdict = net.send_udp(member, host, (2, 1), b"go on");
        }
        net.run_for(MS);
    }
}

#[test]
fn a_member_cannot_direct_a_stream_at_a_stranger() {
    let mut net = SimNet::new(1);
    let [host, member] = net.nodes(["host", "member"]);
    net.set_link(FAR);
    net.keep_steps(1_000_000);
    net.ping(member, host).until_delivered();
    download(&mut net, (host, member), SECOND);
    let before = net.payloads(member, 2).len();
    net.forge(member, Some(STRANGER));
    download(&mut net, (host, member), 3 * SECOND);
    let (forged, sent) = bytes(&net);
    assert!(forged > 0 && sent <= 3 * forged, "{forged} bytes in, {sent} bytes out");
    assert_eq!(net.endpoint_of(host, member), Some(net.underlay(member)));
    let got = net.payloads(member, 2).len() - before;
    assert!(got > 2_900, "the rest goes where the member is: {got} of 3000");
    // It goes on like that, from ever other ports.
    for port in 1..40 {
        net.forge(member, Some(&format!("192.0.2.66:{port}")));
        download(&mut net, (host, member), SECOND);
    }
    let at_stranger = |at: SocketAddr| at.ip() == stranger().ip();
    let sum = |is: &dyn Fn(&&Step) -> bool| net.flow().filter(is).map(|step| step.datagram.len()).sum::<usize>();
    let (forged, sent) = (sum(&|step| at_stranger(step.from)), sum(&|step| at_stranger(step.to)));
    assert!(sent <= forged, "in the long run not even as much: {forged} bytes in, {sent} bytes out");
}

#[test]
fn a_member_that_answers_a_call_with_a_forged_source_gets_nothing_sent_there() {
    let mut net = SimNet::new(2);
    let [member, host] = ["member", "host"].map(|name| net.add(HostSpec::new(name)));
    net.set_link(FAR);
    let (peer, at) = (net.overlay(member), net.underlay(member));
    net.forge(member, Some(STRANGER));
    // As a lighthouse may name them.
    net.control(host, |node, now| {
        node.connect_at(now, peer, stranger());
        node.connect_at(now, peer, at);
    });
    download(&mut net, (host, member), 2 * SECOND);
    let (forged, sent) = bytes(&net);
    let calls = net.flow().filter(|step| step.to == stranger() && step.datagram[0] == 0x10);
    let calls: usize = calls.map(|step| step.datagram.len()).sum();
    assert!(calls > 0 && forged > 0, "{}", net.diagram());
    assert!(sent - calls <= 3 * forged, "{forged} bytes in, {sent} bytes out, of these {calls} in calls");
    assert_ne!(net.endpoint_of(host, member), Some(stranger()));
}

#[test]
fn a_caller_that_sends_its_first_datagram_with_a_forged_source_gets_nothing_sent_there() {
    let mut net = SimNet::new(3);
    let host = net.add(HostSpec::new("host"));
    let member = net.add(HostSpec::new("member").knows(host));
    let peer = net.overlay(host);
    net.control(member, |node, now| node.connect(now, peer));
    net.run_for(5 * MS);
    net.forge(member, Some(STRANGER));
    download(&mut net, (host, member), 2 * SECOND);
    let (forged, sent) = bytes(&net);
    assert!(forged > 0 && sent <= 3 * forged, "{forged} bytes in, {sent} bytes out");
    assert_eq!(net.endpoint_of(host, member), Some(net.underlay(member)), "where it got the answer to its call");
}

#[test]
fn a_relayed_member_cannot_begin_a_direct_path_at_a_stranger() {
    let mut net = SimNet::new(4);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(HostSpec::new("relay").lighthouse(lighthouse).config(|config| config.relay.am_relay = true));
    let at = net.overlay(relay);
    let [host, member] = ["host", "member"].map(|name| {
        let through = move |config: &mut nebula_core::Config| config.relay.relays = vec![at];
        net.add(HostSpec::new(name).lighthouse(lighthouse).config(through))
    });
    net.cut(host, member);
    net.run_for(SECOND);
    net.ping(member, host).until_delivered();
    net.heal(host, member);
    net.forge(member, Some(STRANGER));
    let (peer, to) = (net.overlay(host), net.underlay(host));
    // It sends directly from now on, and can tell the tests that its host may send from all others by guessing only.
    assert!(net.control(member, |node, now| node.redirect(now, peer, to)));
    download(&mut net, (host, member), 3 * SECOND);
    let (forged, sent) = bytes(&net);
    assert!(forged > 0 && sent <= forged / 10, "{forged} bytes in, {sent} bytes out\n{}", net.diagram());
    assert_eq!(net.endpoint_of(host, member), None);
}

#[test]
fn the_first_answer_after_a_move_arrives_and_all_others_after_a_round_trip() {
    let mut net = SimNet::new(5);
    let [a, b] = net.nodes(["a", "b"]);
    net.set_link(FAR);
    net.ping(a, b).until_delivered();
    net.move_to(b, "198.51.100.99:999");
    assert!(net.ping(b, a).is_answered_within(65 * MS), "an answer is no longer than three questions");
    assert_ne!(net.endpoint_of(a, b), Some(net.underlay(b)), "not yet");
    net.run_for(61 * MS);
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "{}", net.diagram());
    assert!(net.events(a).iter().any(|event| matches!(event, Event::Roamed { .. })));
    let _verdict = net.send_udp(a, b, (1, 9), &[b'x'; 1200]);
    net.run_for(31 * MS);
    assert_eq!(net.payloads(b, 9).len(), 1);
}

#[test]
fn a_lost_challenge_is_sent_again_although_nothing_else_comes() {
    let mut net = SimNet::new(8);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    net.move_to(b, "198.51.100.99:999");
    let _verdict = net.send_udp(b, a, (1, 2), b"here");
    net.set_link(Link { loss: 100, ..Link::default() });
    net.run_for(50 * MS);
    net.set_link(Link::default());
    net.run_for(70 * MS);
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "{}", net.diagram());
}

#[test]
fn a_peer_that_moved_is_followed_over_a_link_that_loses_a_third() {
    for seed in 0..20 {
        let mut net = SimNet::new(seed);
        let [a, b] = net.nodes(["a", "b"]);
        net.ping(a, b).until_delivered();
        net.set_link(Link { loss: 33, ..Link::default() });
        net.move_to(b, "198.51.100.99:999");
        let moved = net.elapsed();
        while net.endpoint_of(a, b) != Some(net.underlay(b)) {
            assert!(net.elapsed() < moved + 3 * SECOND, "seed {seed}\n{}", net.diagram());
            let _verdict = net.send_udp(b, a, (1, 2), b"here");
            net.run_for(100 * MS);
        }
    }
}

#[test]
fn a_stream_goes_on_a_round_trip_after_its_receiver_moved() {
    let mut net = SimNet::new(6);
    let nat = net.add_nat(NatBehaviour::home());
    let server = net.add(HostSpec::new("server"));
    let client = net.add(HostSpec::new("client").behind(nat).knows(server));
    net.set_link(FAR);
    net.ping(client, server).until_delivered();
    download(&mut net, (server, client), SECOND);
    net.rebind(nat);
    let before = net.payloads(client, 2).len();
    download(&mut net, (server, client), SECOND);
    net.run_for(100 * MS);
    let got = net.payloads(client, 2).len() - before;
    // Until the first acknowledgement from the new port came, and for a round trip after it.
    assert!(got >= 1000 - 30 - 10 - 60 - 5, "{got} of 1000");
}

#[test]
fn a_new_tunnel_to_one_of_several_endpoints_loses_nothing_until_it_is_known_which() {
    let mut net = SimNet::new(7);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [a, b] = ["a", "b"].map(|name| {
        let also = if name == "a" { "203.0.113.201:4242" } else { "203.0.113.202:4242" };
        net.add(HostSpec::new(name).lighthouse(lighthouse).also_at(&[also]))
    });
    net.set_link(FAR);
    net.run_for(SECOND);
    for number in 0..60_u8 {
        let _verdict = net.send_udp(a, b, (1, 2), &[number; 1200]);
        net.run_for(5 * MS);
    }
    net.run_for(SECOND);
    let got: Vec<_> = net.payloads(b, 2).iter().map(|payload| payload[0]).collect();
    assert_eq!(got.len(), 60, "{got:?}\n{}", net.diagram());
}

/// A host of this project and one with Go Nebula before 1.11, whose answers to tests prove nothing.
fn beside_old_go(seed: u64) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    let old = net.add(HostSpec::new("old").old_go());
    let host = net.add(HostSpec::new("host").knows(old));
    net.ping(host, old).until_delivered();
    (net, host, old)
}

#[test]
fn a_peer_whose_answers_prove_nothing_is_called_where_it_is_and_followed() {
    let (mut net, host, old) = beside_old_go(9);
    net.set_link(FAR);
    net.move_to(old, "198.51.100.99:999");
    assert!(net.ping(old, host).is_answered_within(65 * MS), "an answer is no longer than three questions");
    net.run_for(121 * MS);
    assert_eq!(net.endpoint_of(host, old), Some(net.underlay(old)), "{}", net.diagram());
    assert_eq!(net.ping(host, old).train(20, SECOND), 20);
}

#[test]
fn a_member_cannot_direct_a_stream_at_a_stranger_by_answering_like_an_old_release() {
    let (mut net, host, old) = beside_old_go(10);
    net.keep_steps(1_000_000);
    net.forge(old, Some(STRANGER));
    download(&mut net, (host, old), 60 * SECOND);
    let (forged, sent) = bytes(&net);
    assert!(forged > 0 && sent <= forged, "{forged} bytes in, {sent} bytes out");
    assert_eq!(net.endpoint_of(host, old), Some(net.underlay(old)));
}

#[test]
fn an_old_release_at_one_of_several_endpoints_gets_everything_after_a_second_call() {
    let mut net = SimNet::new(11);
    net.set_post_quantum(nebula_core::PostQuantum::Off);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let old = net.add(HostSpec::new("old").lighthouse(lighthouse).also_at(&["203.0.113.201:4242"]).old_go());
    let host = net.add(HostSpec::new("host").lighthouse(lighthouse).also_at(&["203.0.113.202:4242"]));
    net.set_link(FAR);
    net.run_for(SECOND);
    for number in 0..60_u8 {
        let _verdict = net.send_udp(host, old, (1, 2), &[number; 1200]);
        net.run_for(5 * MS);
    }
    net.run_for(SECOND);
    assert_eq!(net.payloads(old, 2).len(), 60, "{}", net.diagram());
    assert!(net.endpoint_of(host, old).is_some());
    let calls = net.flow().filter(|step| step.sender == "host" && step.datagram[0] == 0x10 && step.datagram[15] == 1);
    let calls = calls.filter(|step| step.to != net.underlay(lighthouse)).count();
    assert_eq!(calls, 2 + 2 + 1, "to both, once more, then to the one that answered: {}", net.diagram());
    let tests = net.flow().filter(|step| step.sender == "host" && step.datagram[0] == 0x14 && step.datagram[1] == 0);
    assert!(tests.count() <= 3, "{}", net.diagram());
}
