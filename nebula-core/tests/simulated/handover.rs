//! A process that is replaced by another one, which goes on with its flows.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use nebula_core::config::Cipher;
use nebula_core::forward::Offload;
use nebula_core::handover::{DecodeError, State};
use nebula_core::internals::AeadKey;
use nebula_core::internals::header::{HEADER_LEN, Header, TAG_LEN};
use nebula_core::simulator::{HostId, HostSpec, Link, SimNet, Step};
use nebula_core::{DropReason, Lane, MessageType, TunnelStatus, Verdict};

use crate::capture::{cluster, pod, pods, serve, service};
use crate::packets;

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// Numbered packets in both directions, one each in every few milliseconds.
struct Stream {
    ends: [HostId; 2],
    sent: u32,
}

impl Stream {
    const PORTS: [u16; 2] = [7000, 7001];

    fn between(a: HostId, b: HostId) -> Self {
        Self { ends: [a, b], sent: 0 }
    }

    fn run(&mut self, net: &mut SimNet, time: Duration) {
        let end = net.elapsed() + time;
        while net.elapsed() < end {
            let [a, b] = self.ends;
            let number = self.sent.to_be_bytes();
            self.sent += 1;
            let _verdict = net.send_udp(a, b, (Self::PORTS[0], Self::PORTS[1]), &number);
            let _verdict = net.send_udp(b, a, (Self::PORTS[1], Self::PORTS[0]), &number);
            net.run_for(2 * MS);
        }
    }

    /// Panics unless every packet arrived once, at both ends.
    fn expect_all(&self, net: &SimNet) {
        for (host, port) in self.ends.into_iter().zip(Self::PORTS) {
            let mut got: Vec<_> = net.payloads(host, port);
            got.sort();
            let all: Vec<_> = (0..self.sent).map(|number| number.to_be_bytes().to_vec()).collect();
            assert_eq!(got.len(), all.len(), "{host:?}");
            assert_eq!(got, all, "{host:?}");
        }
    }
}

/// A network of two in which packets went both ways.
fn pair(seed: u64) -> (SimNet, [HostId; 2]) {
    let mut net = SimNet::new(seed);
    let hosts = net.nodes(["a", "b"]);
    net.ping(hosts[0], hosts[1]).until_delivered();
    (net, hosts)
}

fn primary(net: &SimNet, host: HostId, peer: HostId) -> TunnelStatus {
    net.tunnels_to(host, peer).into_iter().find(|tunnel| tunnel.primary).expect("a tunnel")
}

/// The last datagram with data from one host to another.
fn last_data(net: &SimNet, from: &str) -> Step {
    let is_data = |step: &&Step| {
        step.sender == from && Header::parse(&step.datagram).is_ok_and(|header| header.kind == MessageType::Data)
    };
    net.flow().rev().find(is_data).expect("a datagram").clone()
}

fn got(net: &SimNet, host: HostId, port: u16) -> usize {
    net.payloads(host, port).len()
}

#[test]
fn a_stream_in_both_directions_loses_and_repeats_nothing() {
    let (mut net, [a, b]) = pair(1);
    let mut stream = Stream::between(a, b);
    stream.run(&mut net, SECOND);
    let before = primary(&net, b, a);
    net.upgrade(a);
    stream.run(&mut net, SECOND);
    net.run_for(SECOND);
    stream.expect_all(&net);
    let after = primary(&net, b, a);
    assert_ne!(before.local_index, after.local_index, "the new process has keys of its own");
    assert_eq!(net.counter(a, "dropped_in_unknown_index") + net.counter(a, "recv_errors_out"), 0);
}

#[test]
fn fifty_processes_in_a_row_lose_and_repeat_nothing() {
    let (mut net, [a, b]) = pair(2);
    let mut stream = Stream::between(a, b);
    for round in 0..50 {
        stream.run(&mut net, SECOND / 5);
        net.upgrade(if round % 5 == 4 { b } else { a });
    }
    stream.run(&mut net, SECOND);
    net.run_for(SECOND);
    stream.expect_all(&net);
}

#[test]
fn a_process_that_is_replaced_before_its_peers_have_answered_hands_over_what_it_inherited() {
    let (mut net, [a, b]) = pair(3);
    let mut stream = Stream::between(a, b);
    stream.run(&mut net, SECOND);
    for _ in 0..3 {
        net.upgrade(a);
        stream.run(&mut net, 4 * MS);
    }
    stream.run(&mut net, SECOND);
    net.run_for(SECOND);
    // What waits in a process for a handshake is lost with it: two packets of each of the first two.
    let got = net.payloads(b, Stream::PORTS[1]).len();
    assert!((stream.sent as usize - 4..=stream.sent as usize).contains(&got), "{got} of {}", stream.sent);
    assert_eq!(net.payloads(a, Stream::PORTS[0]).len(), stream.sent as usize, "b noticed nothing");
}

#[test]
fn a_peer_that_was_quiet_is_called_too_and_its_next_packet_arrives() {
    let mut net = SimNet::new(4);
    let [a, busy, quiet] = net.nodes(["a", "busy", "quiet"]);
    net.ping(a, quiet).until_delivered();
    net.run_for(20 * SECOND);
    net.ping(a, busy).until_delivered();
    let calls_before = net.flow().count();
    net.upgrade(a);
    // At once, in the old session.
    assert!(net.ping(quiet, a).is_answered_within(100 * MS), "{}", net.diagram());
    let called: Vec<_> = net.flow().skip(calls_before).filter(|step| step.sender == "a").collect();
    assert_eq!(called.first().and_then(|step| step.receiver.as_deref()), Some("busy"), "the active one first");
    net.run_for(SECOND);
    assert_eq!((net.tunnels_to(a, busy).len(), net.tunnels_to(a, quiet).len()), (1, 1));
}

#[test]
fn what_peers_send_in_old_sessions_is_opened_until_the_new_tunnel_has_replaced_them() {
    let (mut net, [a, b]) = pair(5);
    net.upgrade(a);
    assert_eq!(net.table_sizes(a).inherited, 1);
    net.run_for(10 * SECOND);
    assert_eq!(net.table_sizes(a).inherited, 1, "something may still be on its way");
    net.run_for(10 * SECOND);
    assert_eq!(net.table_sizes(a).inherited, 0);
    assert!(net.ping(b, a).is_answered_within(100 * MS));
}

#[test]
fn a_peer_that_answers_no_handshake_is_heard_for_a_minute_and_called_as_long() {
    let (mut net, [a, b]) = pair(6);
    let handshakes = |net: &SimNet| net.counter(a, "handshakes_out");
    net.upgrade(a);
    net.cut_one_way(a, b);
    // b does not learn for a while that nobody answers, because it hears nothing and asks for nothing.
    let mut heard = 0;
    for second in 0..70 {
        let before = got(&net, a, 9);
        let _verdict = net.send_udp(b, a, (9, 9), b"hello");
        net.run_for(SECOND);
        if got(&net, a, 9) > before {
            heard = second;
        }
        if second == 5 {
            assert!(handshakes(&net) > 0);
        }
    }
    assert!(heard >= 4, "b gives the tunnel up in the end, but not at once: {heard}");
    assert_eq!(net.table_sizes(a).inherited, 0);
}

#[test]
fn a_tunnel_through_a_relay_goes_on() {
    let mut net = SimNet::new(7);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(HostSpec::new("relay").lighthouse(lighthouse).config(|config| config.relay.am_relay = true));
    let at = net.overlay(relay);
    let [a, b] = ["a", "b"].map(|name| {
        net.add(HostSpec::new(name).lighthouse(lighthouse).config(move |config| config.relay.relays = vec![at]))
    });
    net.cut(a, b);
    net.run_for(SECOND);
    net.ping(a, b).until_delivered();
    let mut stream = Stream::between(a, b);
    stream.run(&mut net, SECOND);
    for host in [a, b] {
        net.upgrade(host);
        stream.run(&mut net, SECOND);
    }
    net.run_for(SECOND);
    stream.expect_all(&net);
    assert_eq!(primary(&net, a, b).relay, Some(at));
    net.run_for(30 * SECOND);
    assert_eq!((net.table_sizes(a).inherited, net.table_sizes(b).inherited), (0, 0));
    assert_eq!(net.table_sizes(a).relay_hops, 1, "hops of the old process are gone");
}

#[test]
fn flows_are_judged_by_the_new_rules_before_their_first_packet() {
    let (mut net, [a, b]) = pair(8);
    // b opened one flow, and a another one.
    let _verdict = net.send_udp(b, a, (1000, 53), b"question");
    net.run_for(SECOND);
    let _verdict = net.send_udp(a, b, (2000, 80), b"question");
    net.run_for(SECOND);
    net.edit_config(a, |config| config.firewall.inbound.clear());
    let before = net.table_sizes(a).flows;
    net.upgrade(a);
    assert_eq!(net.table_sizes(a).flows, before, "the refused one has ended and stays known");
    let _verdict = net.send_udp(b, a, (1000, 53), b"again");
    let _verdict = net.send_udp(b, a, (80, 2000), b"answer");
    net.run_for(SECOND);
    assert_eq!(got(&net, a, 53), 1, "the new rules do not allow it");
    assert_eq!(got(&net, a, 2000), 1, "a opened it, and its rules allow that");
    assert_eq!(net.counter(a, "dropped_in_no_rule"), 1);
    // Otherwise a could begin it the other way round, and b answer.
    let _verdict = net.send_udp(a, b, (53, 1000), b"turned round");
    net.run_for(SECOND);
    assert_eq!((got(&net, b, 1000), net.counter(a, "dropped_out_no_rule")), (0, 1));
}

#[test]
fn a_flow_that_the_old_process_ended_is_not_begun_from_its_other_end_under_the_new_one() {
    let (mut net, [a, b]) = pair(24);
    let _verdict = net.send_udp(b, a, (1000, 53), b"question");
    net.run_for(SECOND);
    net.control(a, |node, now| node.reconfigure(now, |config| config.firewall.inbound.clear()));
    let _verdict = net.send_udp(b, a, (1000, 53), b"again");
    net.run_for(SECOND);
    // The rules of the next start are those of this one.
    net.edit_config(a, |config| config.firewall.inbound.clear());
    for _ in 0..2 {
        net.upgrade(a);
        let _verdict = net.send_udp(a, b, (53, 1000), b"turned round");
        net.run_for(SECOND);
    }
    assert_eq!((got(&net, a, 53), got(&net, b, 1000), net.counter(a, "dropped_out_no_rule")), (1, 0, 2));
}

#[test]
fn without_a_hand_over_the_answer_to_a_flow_of_the_old_process_would_not_pass() {
    let (mut net, [a, b]) = pair(9);
    net.edit_config(a, |config| config.firewall.inbound.clear());
    let _verdict = net.send_udp(a, b, (2000, 80), b"question");
    net.run_for(SECOND);
    net.restart(a);
    net.ping(b, a).train(3, SECOND);
    let _verdict = net.send_udp(b, a, (80, 2000), b"answer");
    net.run_for(SECOND);
    assert_eq!(got(&net, a, 2000), 0);
}

#[test]
fn a_peer_that_the_new_configuration_does_not_trust_is_left_out_with_its_flows() {
    let (mut net, [a, b]) = pair(10);
    let _verdict = net.send_udp(a, b, (2000, 80), b"question");
    net.run_for(SECOND);
    let blocked = net.fingerprint(b);
    net.edit_config(a, |config| config.trust.block(blocked));
    net.upgrade(a);
    let sizes = net.table_sizes(a);
    assert_eq!((sizes.inherited, sizes.flows, sizes.pending, sizes.candidates), (0, 0, 0, 0));
    let _verdict = net.send_udp(b, a, (80, 2000), b"answer");
    net.run_for(SECOND);
    assert_eq!((got(&net, a, 2000), net.tunnels(a).len()), (0, 0));
}

#[test]
fn a_peer_of_another_authority_and_one_that_has_expired_are_left_out() {
    let (mut net, [a, _]) = pair(11);
    let document = net.hand_over(a);
    let others = SimNet::new(99).authority().trust();
    net.edit_config(a, |config| config.trust = others);
    net.take_over(a, &document).unwrap();
    assert_eq!((net.table_sizes(a).inherited, net.table_sizes(a).flows), (0, 0));

    let mut net = SimNet::new(12);
    let b = net.add(HostSpec::new("b").expires_after(10 * SECOND));
    let a = net.add(HostSpec::new("a").knows(b));
    net.ping(a, b).until_delivered();
    let document = net.hand_over(a);
    net.run_for(11 * SECOND);
    net.take_over(a, &document).unwrap();
    assert_eq!((net.table_sizes(a).inherited, net.table_sizes(a).flows), (0, 0));
}

#[test]
fn a_peer_that_is_blocked_afterwards_loses_its_old_session_at_once() {
    let (mut net, [a, b]) = pair(13);
    net.upgrade(a);
    net.cut_one_way(a, b);
    let blocked = net.fingerprint(b);
    assert_eq!(net.table_sizes(a).inherited, 1);
    net.control(a, |node, now| node.reconfigure(now, |config| config.trust.block(blocked)));
    assert_eq!(net.table_sizes(a).inherited, 0);
    let _verdict = net.send_udp(b, a, (9, 9), b"hello");
    net.run_for(SECOND);
    assert_eq!(got(&net, a, 9), 0);
}

#[test]
fn another_host_with_the_address_of_a_peer_gets_nothing_of_its_flows() {
    for is_same_name in [true, false] {
        let mut net = SimNet::new(14);
        let a = net.add(HostSpec::new("a").config(|config| config.firewall.inbound.clear()));
        let b = net.add(HostSpec::new("b").networks(&["10.42.0.9/16"]).knows(a));
        net.introduce(a, b);
        net.ping(a, b).until_delivered();
        let _verdict = net.send_udp(a, b, (2000, 80), b"question");
        net.run_for(SECOND);
        net.kill(b);
        net.upgrade(a);
        assert!(net.table_sizes(a).flows > 0);
        let name = if is_same_name { "b" } else { "c" };
        let other = net.add(HostSpec::new(name).networks(&["10.42.0.9/16"]).knows(a));
        net.control(other, |node, now| node.connect(now, "10.42.0.1".parse().unwrap()));
        net.run_for(SECOND);
        let _verdict = net.send_udp(other, a, (80, 2000), b"answer");
        net.run_for(SECOND);
        assert_eq!(got(&net, a, 2000), usize::from(is_same_name), "{name}");
    }
}

#[test]
fn a_datagram_that_the_old_process_opened_is_refused_by_the_new_one() {
    let (mut net, [a, b]) = pair(15);
    let _verdict = net.send_udp(b, a, (9, 9), b"once");
    net.run_for(SECOND);
    let opened = last_data(&net, "b");
    // Another one is late.
    net.suspend(a);
    let _verdict = net.send_udp(b, a, (9, 9), b"late");
    net.run_for(SECOND);
    let late = last_data(&net, "b");
    net.resume(a);
    net.upgrade(a);
    for step in [&opened, &late, &late, &opened] {
        net.inject(step.from, step.to, &step.datagram);
        net.run_for(100 * MS);
    }
    assert_eq!(net.payloads(a, 9), [b"once", b"late"]);
    assert_eq!(net.counter(a, "dropped_in_replayed"), 3);
    // Nor does a forged one change anything.
    let mut forged = late.datagram.clone();
    forged[HEADER_LEN] ^= 1;
    forged[15] = forged[15].wrapping_add(100);
    net.inject("192.0.2.66:666".parse().unwrap(), late.to, &forged);
    net.run_for(100 * MS);
    assert_eq!(net.counter(a, "dropped_in_bad_tag"), 1);
    assert_eq!(net.payloads(a, 9).len(), 2);
}

/// Panics unless `sender` sealed every datagram with another pair of key and counter. `keys` are those of all its
/// peers. Returns the number of datagrams.
fn expect_unique_nonces(net: &SimNet, sender: &str, keys: &BTreeSet<(bool, [u8; 32])>) -> usize {
    let keys: Vec<_> = keys
        .iter()
        .map(|(is_aes, key)| {
            let cipher = if *is_aes { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 };
            AeadKey::new(cipher, key)
        })
        .collect();
    let mut seen = HashMap::new();
    let mut look = |datagram: &[u8]| -> Option<Vec<u8>> {
        let header = Header::parse(datagram).ok()?;
        if matches!(header.kind, MessageType::Handshake | MessageType::RecvError) {
            return None;
        }
        let is_relay = header.kind == MessageType::Relay;
        let plain = if is_relay { datagram.len() - TAG_LEN } else { HEADER_LEN };
        let with = keys.iter().position(|key| {
            let (head, body) = datagram.split_at(plain);
            key.open(header.counter, head, &mut body.to_vec())
        });
        let with = with.unwrap_or_else(|| panic!("nobody opens {header:?}"));
        if let Some(other) = seen.insert((with, header.counter), datagram.to_vec()) {
            panic!("twice: {header:?} and {:?}", Header::parse(&other));
        }
        is_relay.then(|| datagram[HEADER_LEN..plain].to_vec())
    };
    for step in net.flow().filter(|step| step.sender == sender) {
        if let Some(inner) = look(&step.datagram) {
            look(&inner);
        }
    }
    seen.len()
}

#[test]
fn no_two_datagrams_of_both_processes_have_the_same_key_and_counter() {
    let mut net = SimNet::new(16);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(HostSpec::new("relay").lighthouse(lighthouse).config(|config| config.relay.am_relay = true));
    let at = net.overlay(relay);
    let [a, b, c] = ["a", "b", "c"].map(|name| {
        net.add(HostSpec::new(name).lighthouse(lighthouse).config(move |config| config.relay.relays = vec![at]))
    });
    net.cut(a, c);
    net.run_for(SECOND);
    let mut keys = BTreeSet::new();
    for round in 0..12 {
        for peer in [b, c] {
            let mut stream = Stream::between(a, peer);
            for _ in 0..10 {
                stream.run(&mut net, 20 * MS);
                for host in [lighthouse, relay, b, c] {
                    keys.extend(net.opening_keys(host).into_iter().map(|(it, key)| (it == Cipher::Aes256Gcm, key)));
                }
            }
        }
        match round % 4 {
            3 => net.restart(a),
            _ => net.upgrade(a),
        }
    }
    net.run_for(SECOND);
    for host in [lighthouse, relay, b, c] {
        keys.extend(net.opening_keys(host).into_iter().map(|(it, key)| (it == Cipher::Aes256Gcm, key)));
    }
    let sealed = expect_unique_nonces(&net, "a", &keys);
    assert!(sealed > 2000, "{sealed}");
}

#[test]
fn what_a_process_left_that_crashed_restores_flows_and_opens_nothing() {
    let (mut net, [a, b]) = pair(17);
    net.edit_config(a, |config| config.firewall.inbound.clear());
    let _verdict = net.send_udp(a, b, (2000, 80), b"question");
    net.run_for(SECOND);
    let kept = net.offer(a);
    assert!(!State::decode(&kept).unwrap().has_keys());
    // The process went on for a while.
    let _verdict = net.send_udp(b, a, (80, 2000), b"first answer");
    net.run_for(SECOND);
    let opened = last_data(&net, "b");
    net.kill(a);
    net.take_over(a, &kept).unwrap();
    assert_eq!(net.table_sizes(a).inherited, 0);
    net.inject(opened.from, opened.to, &opened.datagram);
    net.run_for(SECOND);
    assert_eq!(got(&net, a, 2000), 1, "it was opened before");
    let _verdict = net.send_udp(b, a, (80, 2000), b"second answer");
    net.run_for(SECOND);
    assert_eq!(got(&net, a, 2000), 2, "the flow goes on in the new tunnel: {}", net.diagram());
}

#[test]
fn keys_that_somebody_forgot_to_take_out_are_not_used_after_a_minute() {
    let (mut net, [a, _]) = pair(18);
    let document = net.hand_over(a);
    let mut state = State::decode(&document).unwrap();
    assert!(state.has_keys() && state.peers() == 1 && state.flows() > 0);
    state.forget_keys();
    assert!(!state.has_keys() && state.flows() > 0);
    net.run_for(61 * SECOND);
    net.take_over(a, &document).unwrap();
    assert_eq!(net.table_sizes(a).inherited, 0);
}

#[test]
fn a_peer_that_moves_meanwhile_is_found_by_what_it_sends_in_the_old_session() {
    let (mut net, [a, b]) = pair(19);
    let document = net.hand_over(a);
    net.move_to(b, "198.51.100.77:4242");
    net.take_over(a, &document).unwrap();
    net.run_for(50 * MS);
    assert_eq!(net.tunnels(a).len(), 0, "it is not where it was");
    let _verdict = net.send_udp(b, a, (9, 9), b"hello");
    net.run_for(SECOND);
    assert_eq!(got(&net, a, 9), 1);
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "{}", net.diagram());
}

#[test]
fn a_replayed_datagram_from_elsewhere_makes_nobody_call_there() {
    let (mut net, [a, b]) = pair(20);
    let _verdict = net.send_udp(b, a, (9, 9), b"hello");
    net.run_for(SECOND);
    let opened = last_data(&net, "b");
    net.upgrade(a);
    let before = net.flow().count();
    net.inject("192.0.2.66:666".parse().unwrap(), opened.to, &opened.datagram);
    net.run_for(SECOND);
    assert!(net.flow().skip(before).all(|step| step.to.ip().to_string() != "192.0.2.66"), "{}", net.diagram());
}

#[test]
fn a_peer_that_closes_its_tunnel_ends_the_old_session() {
    let (mut net, [a, b]) = pair(21);
    let document = net.hand_over(a);
    net.take_over(a, &document).unwrap();
    assert_eq!(net.table_sizes(a).inherited, 1);
    net.stop(b);
    net.run_for(SECOND);
    assert_eq!(net.table_sizes(a).inherited, 0);
}

#[test]
fn counters_go_on_where_the_old_process_stopped() {
    let (mut net, [a, b]) = pair(22);
    net.ping(a, b).train(10, SECOND / 10);
    let before = (net.counter(a, "packets_in"), net.counter(a, "packets_out"));
    assert!(before.0 >= 10);
    net.upgrade(a);
    assert_eq!((net.counter(a, "packets_in"), net.counter(a, "packets_out")), before);
    net.ping(a, b).train(1, SECOND / 10);
    assert_eq!(net.counter(a, "packets_in"), before.0 + 1);
}

#[test]
fn a_lighthouse_that_is_replaced_goes_on_to_hear_its_hosts() {
    let mut net = SimNet::new(23);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let hosts: Vec<_> = (0..100).map(|n| net.add(HostSpec::new(&format!("host {n}")).lighthouse(lighthouse))).collect();
    net.run_for(SECOND);
    net.upgrade(lighthouse);
    assert_eq!(net.table_sizes(lighthouse).inherited, 100);
    net.run_for(SECOND);
    assert_eq!(net.tunnels(lighthouse).iter().filter(|tunnel| tunnel.primary).count(), 100);
    // They report at their own times; those that are asked for meanwhile are found where the old process had them.
    net.run_for(60 * SECOND);
    assert!(net.ping(hosts[3], hosts[77]).is_answered_within(SECOND), "{}", net.diagram());
}

#[test]
fn what_is_no_document_starts_nothing() {
    let (mut net, [a, b]) = pair(24);
    let document = net.offer(a);
    assert_eq!(net.take_over(a, b"nonsense"), Err(DecodeError::Foreign));
    assert!(net.take_over(a, &document[..document.len() - 1]).is_err());
    assert!(net.ping(b, a).is_answered_within(100 * MS), "the old one serves");
}

#[test]
fn after_it_handed_over_a_process_seals_nothing_and_has_no_tunnels() {
    let (mut net, [a, b]) = pair(25);
    let forwarder = net.forwarder(a);
    let mut lane = forwarder.lane();
    let question = packets::udp_datagram((9, 9), b"question");
    let packet = packets::ip(net.overlay(a), net.overlay(b), packets::UDP, &question);
    let send = |lane: &mut Lane, now| forwarder.outbound(lane, now, &mut packet.clone(), Offload::default());
    assert_eq!(send(&mut lane, net.now()), Verdict::Transmit);
    assert_eq!(lane.runs().len(), 1);
    lane.clear();
    let _document = net.offer(a);
    assert_eq!(send(&mut lane, net.now()), Verdict::Transmit, "an offer changes nothing");
    lane.clear();
    let _document = net.hand_over(a);
    assert_eq!(send(&mut lane, net.now()), Verdict::Punt);
    assert_eq!(lane.runs().len(), 0);
}

#[test]
fn a_connection_to_a_service_keeps_its_endpoint_and_a_new_one_gets_what_there_is_now() {
    for is_same_pod in [true, false] {
        let mut known = cluster(&[1, 2, 3], &[3]);
        let (mut net, hosts) = pods::<3>(26, &known);
        let tcp = |port, flags| packets::tcp(pod(1, false), service(false), (port, 80), flags);
        let _verdict = net.send_packet(hosts[0], &tcp(5000, packets::SYN));
        net.run_for(SECOND);
        assert_eq!(net.take_packets(hosts[2]).len(), 1);
        // Pod 3 is about to go: nothing new gets there.
        serve(&mut known, false, &[2]);
        if !is_same_pod {
            known.pod(pod(3, false), 99);
        }
        net.edit_config(hosts[0], |config| config.capture = Some(Arc::new(known.clone())));
        net.upgrade(hosts[0]);
        let verdict = net.send_packet(hosts[0], &tcp(5000, packets::ACK));
        let _verdict = net.send_packet(hosts[0], &tcp(5001, packets::SYN));
        net.run_for(SECOND);
        assert_eq!(net.take_packets(hosts[2]).len(), usize::from(is_same_pod), "{verdict:?}");
        assert_eq!(verdict == Verdict::Drop(DropReason::EndpointGone), !is_same_pod, "{verdict:?}");
        assert_eq!(net.take_packets(hosts[1]).len(), 1, "the new connection");
        assert!(net.bypassed(hosts[0]).is_empty());
    }
}

#[test]
fn the_size_of_a_path_need_not_be_found_out_again() {
    let mut net = SimNet::new(27);
    net.set_post_quantum(nebula_core::PostQuantum::Off);
    net.set_link(Link::carrying(1200));
    let b = net.add(HostSpec::new("b").config(|config| config.path_mtu = Some(1300)));
    let a = net.add(HostSpec::new("a").knows(b).config(|config| config.path_mtu = Some(1300)));
    net.ping(a, b).until_delivered();
    net.run_for(SECOND);
    let known = primary(&net, a, b).path_mtu.expect("a limit");
    net.upgrade(a);
    net.run_for(SECOND / 10);
    assert_eq!(primary(&net, a, b).path_mtu, Some(known));
    let send = |net: &mut SimNet, size: u16| net.send_udp(a, b, (9, 9), &vec![7; usize::from(size) - 28]);
    assert_eq!(send(&mut net, known + 1), Verdict::Drop(DropReason::TooBig));
    assert_eq!(send(&mut net, known), Verdict::Transmit);
    net.run_for(SECOND);
    assert_eq!(got(&net, b, 9), 1);
}
