//! Keys by ML-KEM: who gets them, and that nobody on the way can have two hosts do without.

use std::time::Duration;

use nebula_core::diagnosis::RefusalReason;
use nebula_core::internals::header::{Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, Link, SimNet, Step};
use nebula_core::{Event, PostQuantum, TunnelDownReason};

use crate::relay::{Relayed, relayed};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Two hosts that know each other, with these settings.
fn hosts(seed: u64, settings: [PostQuantum; 2]) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    let [a, b] = [("a", settings[0]), ("b", settings[1])]
        .map(|(name, setting)| net.add(HostSpec::new(name).config(move |config| config.post_quantum = setting)));
    net.introduce(a, b);
    net.introduce(b, a);
    (net, a, b)
}

/// Whether the tunnels of both hosts with each other have such keys; `None` if a host has none.
fn keys(net: &SimNet, a: HostId, b: HostId) -> Option<bool> {
    let of = |host, peer| net.tunnels_to(host, peer).iter().map(|tunnel| tunnel.post_quantum).collect::<Vec<_>>();
    let all = [of(a, b), of(b, a)];
    if all.iter().any(Vec::is_empty) {
        return None;
    }
    let first = all[0][0];
    assert!(all.iter().flatten().all(|it| *it == first), "both ends agree: {all:?}\n{}", net.diagram());
    Some(first)
}

/// Type and counter of a datagram.
fn kind(step: &Step) -> Option<(MessageType, u64)> {
    Header::parse(&step.datagram).ok().map(|header| (header.kind, header.counter))
}

fn handshake_messages(net: &SimNet, counter: u64) -> usize {
    net.flow().filter(|step| kind(step) == Some((MessageType::Handshake, counter))).count()
}

#[test]
fn two_round_trips_and_no_packet_before_they_are_over() {
    let (mut net, a, b) = hosts(1, [PostQuantum::Prefer; 2]);
    assert!(net.ping(a, b).is_answered_within(31 * MS), "{}", net.diagram());
    assert_eq!(keys(&net, a, b), Some(true));
    let kinds: Vec<_> = net.flow().take(5).filter_map(kind).collect();
    let handshake = |counter| (MessageType::Handshake, counter);
    let expected = [handshake(1), handshake(2), handshake(3), handshake(4), (MessageType::Data, 3)];
    assert_eq!(kinds, expected, "{}", net.diagram());
    // The smallest IPv6 path carries 1232 bytes of UDP, and the answer is the shorter one.
    let lengths: Vec<_> = net.flow().skip(2).take(2).map(|step| step.datagram.len()).collect();
    assert_eq!(lengths, [1216, 1120]);
}

#[test]
fn a_peer_that_does_not_offer_it_is_reached_unless_it_is_required() {
    for (settings, expected) in [
        ([PostQuantum::Prefer, PostQuantum::Off], Some(false)),
        ([PostQuantum::Off, PostQuantum::Prefer], Some(false)),
        ([PostQuantum::Off, PostQuantum::Off], Some(false)),
        ([PostQuantum::Require, PostQuantum::Prefer], Some(true)),
        ([PostQuantum::Prefer, PostQuantum::Require], Some(true)),
        ([PostQuantum::Require, PostQuantum::Off], None),
        ([PostQuantum::Off, PostQuantum::Require], None),
    ] {
        let (mut net, a, b) = hosts(2, settings);
        assert_eq!(
            net.ping(a, b).is_answered_within(3 * SECOND),
            expected.is_some(),
            "{settings:?}\n{}",
            net.diagram()
        );
        assert_eq!(keys(&net, a, b), expected, "{settings:?}\n{}", net.diagram());
        assert_eq!(handshake_messages(&net, 3) > 0, expected == Some(true), "{settings:?}\n{}", net.diagram());
    }
}

#[test]
fn who_requires_it_says_whom_it_refused_and_why() {
    let (mut net, a, b) = hosts(3, [PostQuantum::Off, PostQuantum::Require]);
    assert!(!net.ping(a, b).is_answered_within(3 * SECOND));
    let diagnosis = net.control(b, |node, now| node.diagnosis(now));
    assert_eq!(diagnosis.callers[0].reason, RefusalReason::NotPostQuantum);
    assert_eq!(diagnosis.callers[0].claimed.as_ref().map(|claimed| claimed.name.as_str()), Some("a"));
    assert!(!net.ping(b, a).is_answered_within(3 * SECOND));
    let peer = net.overlay(a);
    let diagnosis = net.control(b, |node, now| node.diagnosis(now));
    let attempt = diagnosis.attempts.iter().find(|attempt| attempt.peer == peer).unwrap();
    assert_eq!(attempt.refusal.as_ref().map(|refusal| refusal.reason), Some(RefusalReason::NotPostQuantum));
    let refused = |event: &&Event| matches!(event, Event::HandshakeRefused { reason, .. } if reason.contains("ML-KEM"));
    assert!(net.events(b).iter().any(|event| refused(&event)), "{:?}", net.events(b));
}

/// An attacker who loses any of the first messages in any combination: what comes of it always has the keys.
#[test]
fn whichever_messages_are_lost_no_tunnel_is_without() {
    for lost in 0..16_u32 {
        let (mut net, a, b) = hosts(4, [PostQuantum::Prefer; 2]);
        let peer = net.overlay(b);
        for message in 0..4 {
            if lost & 1 << message == 0 {
                net.heal(a, b)
            } else {
                net.cut(a, b)
            }
            if message == 0 {
                net.control(a, |node, now| node.connect(now, peer));
            }
            net.run_for(5 * MS);
            assert_ne!(keys(&net, a, b), Some(false));
        }
        net.heal(a, b);
        assert!(net.ping(a, b).is_answered_within(3 * SECOND), "{lost:04b}\n{}", net.diagram());
        assert_eq!(keys(&net, a, b), Some(true), "{lost:04b}\n{}", net.diagram());
        net.run_for(30 * SECOND);
        assert_eq!(keys(&net, a, b), Some(true), "{lost:04b}\n{}", net.diagram());
    }
}

/// What somebody who holds the network does with a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Pass,
    Lose,
    Twice,
    Damage,
    /// It comes after the next one.
    Late,
    /// In its place comes the one of an earlier handshake between the same hosts, when they announced nothing.
    Replace,
}

const ACTS: [Act; 6] = [Act::Pass, Act::Lose, Act::Twice, Act::Damage, Act::Late, Act::Replace];
const DATAGRAMS: u32 = 6;

/// All sequences of acts on the first six datagrams with at most three that are not [`Act::Pass`].
fn sequences() -> impl Iterator<Item = Vec<Act>> {
    let all = (0..6_usize.pow(DATAGRAMS)).map(|n| (0..DATAGRAMS).map(|at| ACTS[n / 6_usize.pow(at) % 6]).collect());
    all.filter(|acts: &Vec<Act>| acts.iter().filter(|act| **act != Act::Pass).count() <= 3)
}

/// The datagrams that hosts sent themselves.
fn sent(net: &SimNet) -> Vec<Step> {
    net.flow().filter(|step| step.sender != "stranger").cloned().collect()
}

/// An attacker who controls each datagram between two hosts can block them. Their tunnels still never lack the keys.
#[test]
fn whatever_is_done_to_the_first_six_datagrams_no_tunnel_is_without() {
    let mut tried = 0;
    for acts in sequences() {
        let (mut net, a, b) = hosts(11, [PostQuantum::Off; 2]);
        net.ping(a, b).until_delivered();
        assert_eq!(keys(&net, a, b), Some(false));
        let recorded = sent(&net);
        let [peer, own] = [net.overlay(b), net.overlay(a)];
        for (host, other) in [(a, peer), (b, own)] {
            net.control(host, |node, now| node.reconfigure(now, |config| config.post_quantum = PostQuantum::Prefer));
            net.control(host, |node, now| node.close(now, other, true));
        }
        net.run_for(50 * MS);
        let before = sent(&net).len();
        net.cut(a, b);
        net.control(a, |node, now| node.connect(now, peer));
        let mut late = None;
        for (at, act) in acts.iter().enumerate() {
            let waited = (0..400).find_map(|_| {
                net.run_for(5 * MS);
                sent(&net).into_iter().nth(before + at)
            });
            let step = waited.expect("hosts go on trying");
            let mut pass = |datagram: &[u8]| net.inject(step.from, step.to, datagram);
            match act {
                Act::Pass => pass(&step.datagram),
                Act::Lose | Act::Late => {}
                Act::Twice => (0..2).for_each(|_| pass(&step.datagram)),
                Act::Damage => {
                    let mut damaged = step.datagram.clone();
                    let middle = damaged.len() / 2;
                    damaged[middle] ^= 1;
                    pass(&damaged);
                }
                Act::Replace => pass(&recorded[at % recorded.len()].datagram),
            }
            if let Some(Step { from, to, datagram, .. }) = late.take() {
                net.inject(from, to, &datagram);
            }
            late = (*act == Act::Late).then_some(step);
            net.run_for(12 * MS);
            assert_ne!(keys(&net, a, b), Some(false), "{acts:?}\n{}", net.diagram());
        }
        net.heal(a, b);
        assert!(net.ping(a, b).is_answered_within(5 * SECOND), "{acts:?}\n{}", net.diagram());
        assert_eq!(keys(&net, a, b), Some(true), "{acts:?}\n{}", net.diagram());
        tried += 1;
    }
    assert_eq!(tried, 1 + 6 * 5 + 15 * 25 + 20 * 125);
}

/// An attacker, or a path, that loses exactly the long messages: that is an outage, which the host can explain, and
/// never a tunnel without the keys.
#[test]
fn a_path_that_loses_the_long_messages_carries_nothing_and_it_is_known_why() {
    let (mut net, a, b) = hosts(5, [PostQuantum::Prefer; 2]);
    net.set_link(Link::carrying(1200));
    for _ in 0..3 {
        assert!(!net.ping(a, b).is_answered_within(10 * SECOND));
    }
    assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (0, 0), "{}", net.diagram());
    assert!(net.flow().all(|step| kind(step).is_some_and(|(kind, _)| kind == MessageType::Handshake)));
    let diagnosis = net.control(a, |node, now| node.diagnosis(now));
    let tried = &diagnosis.attempts[0].tried[0];
    assert!(tried.offers > 0, "{diagnosis:?}");
    net.set_link(Link::default());
    assert!(net.ping(a, b).until_delivered() < 3 * SECOND, "{}", net.diagram());
    assert_eq!(keys(&net, a, b), Some(true));
}

#[test]
fn messages_that_come_twice_late_or_from_elsewhere_change_nothing() {
    let (mut net, a, b) = hosts(6, [PostQuantum::Prefer; 2]);
    net.ping(a, b).until_delivered();
    let before = (net.tunnels(a), net.tunnels(b));
    let indexes = |tunnels: &[nebula_core::TunnelStatus]| tunnels.iter().map(|it| it.local_index).collect::<Vec<_>>();
    let messages: Vec<_> = net.flow().take(4).cloned().collect();
    for (from, step) in messages.iter().flat_map(|step| [("192.0.2.66:666".parse().unwrap(), step), (step.from, step)])
    {
        net.inject(from, step.to, &step.datagram);
        net.run_for(20 * MS);
    }
    net.run_for(2 * SECOND);
    assert!(net.ping(a, b).is_answered_within(11 * MS), "{}", net.diagram());
    assert_eq!(indexes(&net.tunnels(a)), indexes(&before.0), "{}", net.diagram());
    assert_eq!(indexes(&net.tunnels(b)), indexes(&before.1), "{}", net.diagram());
}

/// A host works for nobody who only repeats or forges: no message 4, and no state beyond that of a first message.
#[test]
fn whoever_has_not_finished_the_noise_part_gets_no_answer() {
    let (mut net, a, b) = hosts(7, [PostQuantum::Prefer; 2]);
    let peer = net.overlay(b);
    net.control(a, |node, now| node.connect(now, peer));
    let first = net.flow().next().unwrap().clone();
    // The caller is gone; an attacker repeats its first message, and reads the index in the answer.
    net.kill(a);
    net.run_for(20 * MS);
    let second = net.flow().find(|step| kind(step) == Some((MessageType::Handshake, 2))).unwrap().clone();
    let Ok(header) = Header::parse(&first.datagram) else { panic!("it is a handshake") };
    assert_eq!(header.index, 0);
    // Message 2 carries the responder's index encrypted, so all that are near are tried as well as garbage of any
    // length.
    for len in [0, 1, 16, 1199, 1200, 1201, 1400] {
        for index in [1, u32::MAX, u32::from_be_bytes(second.datagram[4..8].try_into().unwrap())] {
            let header = Header { kind: MessageType::Handshake, index, counter: 3 }.to_bytes();
            net.inject(first.from, first.to, &[&header[..], &vec![0xa5; len]].concat());
        }
    }
    net.run_for(SECOND);
    assert_eq!(handshake_messages(&net, 4), 0, "{}", net.diagram());
    net.run_for(15 * SECOND);
    assert_eq!(net.table_sizes(b).half_open, 0);
}

#[test]
fn a_handshake_through_a_relay_has_the_keys() {
    let Relayed { mut net, a, b, relay, .. } = relayed(8);
    net.ping(a, b).until_delivered();
    assert_eq!(keys(&net, a, b), Some(true), "{}", net.diagram());
    assert_eq!(keys(&net, a, relay), Some(true));
    net.heal(a, b);
    net.run_for(30 * SECOND);
    assert_eq!(keys(&net, a, b), Some(true));
    assert!(net.ping(b, a).is_answered_within(SECOND));
}

#[test]
fn hosts_that_call_each_other_at_the_same_time_agree() {
    let (mut net, a, b) = hosts(9, [PostQuantum::Prefer; 2]);
    let [to_a, to_b] = [net.overlay(a), net.overlay(b)];
    net.control(a, |node, now| node.connect(now, to_b));
    net.control(b, |node, now| node.connect(now, to_a));
    net.run_for(SECOND);
    assert!(net.ping(a, b).is_answered_within(11 * MS) && net.ping(b, a).is_answered_within(11 * MS));
    assert_eq!(keys(&net, a, b), Some(true), "{}", net.diagram());
}

#[test]
fn a_reload_that_requires_it_closes_what_is_without_and_one_that_turns_it_off_leaves_tunnels() {
    let (mut net, a, b) = hosts(10, [PostQuantum::Prefer, PostQuantum::Off]);
    net.ping(a, b).until_delivered();
    assert_eq!(keys(&net, a, b), Some(false));
    let set = |net: &mut SimNet, host, setting| {
        net.control(host, move |node, now| node.reconfigure(now, |config| config.post_quantum = setting));
    };
    set(&mut net, a, PostQuantum::Require);
    let closed = |event: &Event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::NotPostQuantum, .. });
    assert!(net.events(a).iter().any(closed));
    assert!(!net.ping(a, b).is_answered_within(3 * SECOND));
    set(&mut net, b, PostQuantum::Prefer);
    // A place that was refused is left alone until the handshake is given up.
    assert!(net.ping(a, b).until_delivered() < 10 * SECOND, "{}", net.diagram());
    assert_eq!(keys(&net, a, b), Some(true));
    set(&mut net, a, PostQuantum::Off);
    set(&mut net, b, PostQuantum::Off);
    net.run_for(SECOND);
    assert!(net.ping(a, b).is_answered_within(11 * MS));
    assert_eq!(keys(&net, a, b), Some(true), "tunnels stay until they end");
}

#[test]
fn a_caller_without_it_that_is_not_confirmed_yet_is_given_up_as_well() {
    let (mut net, a, b) = hosts(12, [PostQuantum::Off, PostQuantum::Prefer]);
    let peer = net.overlay(b);
    net.control(a, |node, now| node.connect(now, peer));
    net.run_for(7 * MS);
    assert_eq!((net.table_sizes(b).half_open, net.tunnels(b).len()), (1, 0), "{}", net.diagram());
    net.control(b, |node, now| node.reconfigure(now, |config| config.post_quantum = PostQuantum::Require));
    assert!(!net.ping(a, b).is_answered_within(3 * SECOND));
    assert_eq!(net.tunnels(b).len(), 0, "{}", net.diagram());
}

#[test]
fn a_responder_that_was_restarted_in_the_middle_is_called_again() {
    let (mut net, a, b) = hosts(11, [PostQuantum::Prefer; 2]);
    let peer = net.overlay(b);
    net.control(a, |node, now| node.connect(now, peer));
    net.run_for(7 * MS);
    net.restart(b);
    assert!(net.ping(a, b).is_answered_within(3 * SECOND), "{}", net.diagram());
    assert_eq!(keys(&net, a, b), Some(true));
}
