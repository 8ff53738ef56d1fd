//! What a node remembers of what went wrong, for the operator who asks why.

use std::sync::Arc;
use std::time::Duration;

use nebula_cert::{Curve, Version};
use nebula_core::config::{Cipher, Gateway, SubnetRoute};
use nebula_core::counters::Direction;
use nebula_core::diagnosis::{Attempt, Diagnosis, RefusalReason};
use nebula_core::firewall::{
    Difference, NearMiss, NetworkPolicy, Occasion, OtherEnd, PolicyVerdict, PortRange, Protocol, Rule,
};
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{DropReason, Event, FlowKey, WallClock};

const SECOND: Duration = Duration::from_secs(1);
const UNTIL_GIVEN_UP: Duration = Duration::from_secs(10);

fn diagnosis(net: &mut SimNet, host: HostId) -> Diagnosis {
    net.control(host, |node, now| node.diagnosis(now))
}

/// What `a` remembers about a peer that it calls without success.
fn called(net: &mut SimNet, a: HostId, b: HostId) -> Attempt {
    assert!(!net.ping(a, b).is_answered_within(UNTIL_GIVEN_UP));
    let peer = net.overlay(b);
    let told = diagnosis(net, a).attempts.into_iter().find(|attempt| attempt.peer == peer);
    told.unwrap_or_else(|| panic!("nothing is remembered\n{}", net.diagram()))
}

fn refusal_of(net: &mut SimNet, a: HostId, b: HostId) -> RefusalReason {
    called(net, a, b).refusal.expect("an answer was refused").reason
}

fn caller_at(net: &mut SimNet, b: HostId) -> (RefusalReason, Option<String>) {
    let told = diagnosis(net, b);
    let [caller] = told.callers.as_slice() else { panic!("one caller: {told:?}") };
    (caller.reason, caller.claimed.as_ref().map(|claimed| claimed.name.clone()))
}

#[test]
fn a_working_network_leaves_an_empty_record() {
    let mut net = SimNet::new(1);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    for host in [a, b] {
        let told = diagnosis(&mut net, host);
        assert!(told.attempts.is_empty() && told.callers.is_empty() && told.drops.is_empty(), "{told:?}");
        assert!(told.clocks.iter().all(|clock| clock.ahead_ms.abs() < 1000), "{told:?}");
    }
}

#[test]
fn silence_is_counted_by_endpoint_and_a_tunnel_ends_the_record() {
    let mut net = SimNet::new(2);
    let [a, b] = net.nodes(["a", "b"]);
    net.cut(a, b);
    let told = called(&mut net, a, b);
    assert_eq!(told.tried.iter().map(|tried| tried.endpoint).collect::<Vec<_>>(), [net.underlay(b)]);
    assert!(told.tried[0].sent >= 9 && told.given_up == 1 && told.refusal.is_none(), "{told:?}");
    let event = net.events(a).iter().find_map(|event| match event {
        Event::HandshakeTimedOut { attempt, .. } => Some(attempt.clone()),
        _ => None,
    });
    assert_eq!(event.expect("it was given up").tried, told.tried);
    net.heal(a, b);
    net.ping(a, b).until_delivered();
    assert!(diagnosis(&mut net, a).attempts.is_empty());
}

#[test]
fn both_sides_name_a_certificate_of_a_ca_that_they_do_not_trust() {
    let mut net = SimNet::new(3);
    let b = net.add(HostSpec::new("b"));
    let stranger = SimNet::new(33).authority().trust();
    let a = net.add(HostSpec::new("a").knows(b).config(|config| config.trust = stranger));
    assert_eq!(refusal_of(&mut net, a, b), RefusalReason::UnknownCa);
    net.introduce(b, a);
    assert!(!net.ping(b, a).is_answered_within(UNTIL_GIVEN_UP));
    assert_eq!(caller_at(&mut net, a), (RefusalReason::UnknownCa, Some("b".to_owned())));
}

#[test]
fn a_blocked_peer_is_named_as_such() {
    let mut net = SimNet::new(4);
    let b = net.add(HostSpec::new("b"));
    let mut trust = net.authority().trust();
    trust.block(net.fingerprint(b));
    let a = net.add(HostSpec::new("a").knows(b).config(|config| config.trust = trust));
    assert_eq!(refusal_of(&mut net, a, b), RefusalReason::Blocked);
}

#[test]
fn an_answer_with_another_cipher_cannot_be_opened() {
    let mut net = SimNet::new(5);
    let b = net.add(HostSpec::new("b").config(|config| config.cipher = Cipher::ChaCha20Poly1305));
    let a = net.add(HostSpec::new("a").knows(b));
    let told = called(&mut net, a, b);
    assert!(told.tried[0].unopened > 0 && told.tried[0].endpoint == net.underlay(b), "{told:?}");
}

#[test]
fn an_expired_peer_and_a_wrong_clock_are_told_apart() {
    let mut net = SimNet::new(6);
    let b = net.add(HostSpec::new("b").expires_after(Duration::from_secs(60)));
    let a = net.add(HostSpec::new("a").knows(b));
    net.run_for(Duration::from_secs(70));
    assert_eq!(refusal_of(&mut net, a, b), RefusalReason::Expired);
    // By a clock that is decades behind, no certificate is valid yet.
    net.control(a, |node, now| node.set_wall_clock(WallClock { at: now, unix: Duration::from_secs(1) }));
    let early = called(&mut net, a, b).refusal.expect("refused");
    let by_clock = [RefusalReason::NotYetValid, RefusalReason::CaExpired];
    assert!(by_clock.contains(&early.reason), "{early:?}");
    let theirs = early.claimed.expect("who it was").clock;
    assert!(theirs > Duration::from_secs(1_000_000), "the peer's own clock is told: {theirs:?}");
    let (_, by_ms) = diagnosis(&mut net, a).clock_step.expect("the clock was set");
    assert!(by_ms < -1_000_000_000, "{by_ms}");
}

#[test]
fn clocks_of_peers_are_compared_with_the_own_one() {
    let mut net = SimNet::new(7);
    let [a, b] = net.nodes(["a", "b"]);
    let hour = Duration::from_secs(3600);
    net.control(b, |node, now| {
        let unix = Duration::from_secs(1_800_000_000);
        node.set_wall_clock(WallClock { at: now, unix });
    });
    net.control(a, |node, now| {
        let unix = Duration::from_secs(1_800_000_000) + hour;
        node.set_wall_clock(WallClock { at: now, unix });
    });
    net.ping(a, b).until_delivered();
    let (at_a, at_b) = (diagnosis(&mut net, a).clocks, diagnosis(&mut net, b).clocks);
    assert!((at_a[0].ahead_ms + 3_600_000).abs() < 2000, "{at_a:?}");
    assert!((at_b[0].ahead_ms - 3_600_000).abs() < 2000, "{at_b:?}");
}

#[test]
fn another_host_at_the_endpoint_is_named() {
    let mut net = SimNet::new(8);
    let gone = net.add(HostSpec::new("gone").underlay("198.51.100.200:1"));
    let wrong = net.add(HostSpec::new("wrong").underlay("198.51.100.2:4242"));
    let (peer, endpoint) = (net.overlay(gone), net.underlay(wrong));
    let a = net.add(HostSpec::new("a").config(move |config| {
        config.static_hosts.insert(peer, vec![endpoint]);
    }));
    let told = called(&mut net, a, gone).refusal.expect("refused");
    assert_eq!((told.reason, told.from), (RefusalReason::OtherHost, endpoint));
    assert_eq!(told.claimed.expect("who it is").name, "wrong");
}

#[test]
fn a_second_host_with_the_own_address_is_noticed() {
    let mut net = SimNet::new(9);
    let a = net.add(HostSpec::new("a").networks(&["10.42.0.1/16"]));
    let copy = net.add(HostSpec::new("copy").networks(&["10.42.0.1/16"]));
    let target = net.underlay(a);
    let copy_calls = "10.42.0.200".parse().expect("an address");
    net.control(copy, |node, now| node.connect_at(now, copy_calls, target));
    net.run_for(SECOND);
    assert_eq!(caller_at(&mut net, a), (RefusalReason::OwnAddress, Some("copy".to_owned())));
}

#[test]
fn two_hosts_that_take_turns_with_one_address_are_noticed() {
    let mut net = SimNet::new(10);
    let a = net.add(HostSpec::new("a").am_lighthouse());
    let [b, c] = ["b", "c"].map(|name| net.add(HostSpec::new(name).networks(&["10.42.0.77/16"]).knows(a)));
    for host in [b, c, b] {
        net.control(host, |node, now| {
            node.close(now, "10.42.0.1".parse().expect("an address"), true);
        });
        net.ping(host, a).is_answered_within(SECOND);
        net.run_for(SECOND);
    }
    let told = diagnosis(&mut net, a).doubles;
    assert!(told.iter().any(|double| double.peer == net.overlay(b) && double.turns > 0), "{told:?}\n{}", net.diagram());
}

#[test]
fn a_lighthouse_that_does_not_know_a_host_is_still_heard() {
    let mut net = SimNet::new(11);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse));
    net.run_for(SECOND);
    let (unknown, at_lighthouse) = ("10.42.9.9".parse().expect("an address"), net.overlay(lighthouse));
    net.control(a, |node, now| node.inquire(now, unknown));
    net.run_for(SECOND);
    let told = net.control(a, |node, _| node.whereabouts(unknown));
    assert_eq!((told.connected, told.heard, told.answers.len()), (vec![at_lighthouse], vec![at_lighthouse], 0));
    net.kill(lighthouse);
    net.control(a, |node, now| node.inquire(now, unknown));
    net.run_for(SECOND);
    let told = net.control(a, |node, _| node.whereabouts(unknown));
    assert_eq!((told.connected, told.heard), (vec![at_lighthouse], vec![]), "a dead one is not");
}

#[test]
fn a_host_that_refuses_to_relay_remembers_who_asked() {
    let mut net = SimNet::new(12);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(HostSpec::new("relay").lighthouse(lighthouse));
    let at_relay = net.overlay(relay);
    let [a, b] = ["a", "b"].map(|name| {
        let spec = HostSpec::new(name).lighthouse(lighthouse);
        net.add(spec.config(move |config| config.relay.relays = vec![at_relay]))
    });
    net.cut(a, b);
    net.run_for(SECOND);
    assert!(!net.ping(a, b).is_answered_within(UNTIL_GIVEN_UP));
    let told = diagnosis(&mut net, relay).relays;
    let (at_a, at_b) = (net.overlay(a), net.overlay(b));
    assert!(told.iter().any(|it| (it.from, it.to, it.am_relay) == (at_a, at_b, false)), "{told:?}\n{}", net.diagram());
}

#[test]
fn a_dropped_packet_is_reported_with_the_nearest_rule() {
    let mut net = SimNet::new(13);
    let rule = |port: u16, group: &str| Rule {
        protocol: Protocol::Udp,
        port: PortRange::Range(port, port),
        groups: vec![group.to_owned()],
        ..Rule::default()
    };
    let rules = vec![Rule { protocol: Protocol::Icmp, ..Rule::any() }, rule(53, "ops"), rule(443, "web")];
    let b = net.add(HostSpec::new("b").config(move |config| config.firewall.inbound = rules));
    let a = net.add(HostSpec::new("a").groups(&["db"]).knows(b));
    net.ping(a, b).until_delivered();
    for _ in 0..50 {
        let _verdict = net.send_udp(a, b, (5000, 443), b"x");
    }
    net.run_for(SECOND);
    let told = diagnosis(&mut net, b).drops;
    let [dropped] = told.as_slice() else { panic!("one kind: {told:?}") };
    assert_eq!((dropped.direction, dropped.reason), (Direction::Inbound, DropReason::NoRule));
    assert_eq!((dropped.flow.local_port, dropped.peer), (443, Some(net.overlay(a))));
    assert_eq!(dropped.nearest, Some(NearMiss { rule: 2, differs: vec![Difference::Peer] }));
    assert!(dropped.times <= 2, "a flood is sampled: {}", dropped.times);
}

/// Refuses flows to one port, and in audit those to the next one.
#[derive(Debug)]
struct Ports(u16);

impl NetworkPolicy for Ports {
    fn version(&self) -> u64 {
        1
    }

    fn judge(&self, direction: Direction, flow: &FlowKey, _: &OtherEnd<'_>, _: Occasion) -> PolicyVerdict {
        let port = if direction == Direction::Inbound { flow.local_port } else { flow.remote_port };
        match port {
            port if port == self.0 => PolicyVerdict::Refuse,
            port if port == self.0 + 1 => PolicyVerdict::AllowInAudit,
            _ => PolicyVerdict::Allow,
        }
    }

    fn reason(&self, _: Direction, _: &FlowKey, end: &OtherEnd<'_>) -> Option<String> {
        Some(format!("no port for {}{}", end.name, "\u{20ac}".repeat(1000)))
    }
}

#[test]
fn flows_that_policies_refuse_or_would_refuse_are_reported_with_both_names_and_the_reason() {
    let mut net = SimNet::new(15);
    let b = net.add(HostSpec::new("b").config(|config| {
        config.firewall.inbound = vec![Rule::any()];
        config.network_policy = Some(Arc::new(Ports(80)));
    }));
    let a = net.add(HostSpec::new("a").knows(b).config(|config| config.network_policy = Some(Arc::new(Ports(90)))));
    for n in 0..200 {
        for port in [80, 81, 90, 91] {
            let _verdict = net.send_udp(a, b, (5000 + n, port), b"x");
        }
        net.run_for(Duration::from_millis(10));
    }
    for (host, own, peer, direction, ports) in
        [(a, "a", "b", Direction::Outbound, [90, 91]), (b, "b", "a", Direction::Inbound, [80, 81])]
    {
        let told = diagnosis(&mut net, host);
        let [[dropped], [audited]] = [&told.drops[..], &told.audited[..]] else { panic!("one of each: {told:?}") };
        for (one, port) in [dropped, audited].into_iter().zip(ports) {
            assert_eq!((one.direction, one.reason), (direction, DropReason::NetworkPolicy));
            let to = if direction == Direction::Inbound { one.flow.local_port } else { one.flow.remote_port };
            assert_eq!(to, port);
            let policy = one.policy.as_ref().expect("it says why");
            assert_eq!((&*policy.own, &*policy.peer), (own, peer));
            assert!(policy.reason.starts_with(&format!("no port for {peer}")) && policy.reason.len() <= 512);
            assert!((1..=20).contains(&one.times), "a flood is sampled: {}", one.times);
        }
    }
}

#[test]
fn packets_for_a_network_that_the_gateway_does_not_have_are_reported() {
    let mut net = SimNet::new(14);
    let gateway = net.add(HostSpec::new("gateway"));
    let at_gateway = net.overlay(gateway);
    let a = net.add(HostSpec::new("a").knows(gateway).config(move |config| {
        let gateways = vec![Gateway::new(at_gateway)];
        config.subnets = vec![SubnetRoute::new("192.168.7.0/24".parse().expect("a network"), gateways)];
    }));
    net.ping(a, gateway).until_delivered();
    let own = net.overlay(a).to_string();
    assert!(!net.ping(a, gateway).between(&own, "192.168.7.9").is_answered_within(SECOND));
    let told = diagnosis(&mut net, a).drops;
    assert_eq!(
        told.iter().map(|drop| (drop.direction, drop.reason)).collect::<Vec<_>>(),
        [(Direction::Outbound, DropReason::RemoteAddress)]
    );
}

#[test]
fn a_caller_with_another_curve_is_named_with_its_curve() {
    for (own, other) in [(Curve::Curve25519, Curve::P256), (Curve::P256, Curve::Curve25519)] {
        for version in [Version::V1, Version::V2] {
            let mut net = SimNet::with_curve(15, own);
            let b = net.add(HostSpec::new("b").versions(&[version]));
            let mut others = SimNet::with_curve(16, other);
            let c = others.add(HostSpec::new("c").versions(&[version]));
            let (anybody, at_b) = ("10.42.0.9".parse().unwrap(), net.underlay(b));
            others.control(c, |node, now| node.connect_at(now, anybody, at_b));
            let call = others.flow().next_back().expect("a first message").datagram.clone();
            net.inject("198.51.100.77:4242".parse().unwrap(), at_b, &call);
            net.run_for(SECOND);
            assert_eq!(
                caller_at(&mut net, b),
                (RefusalReason::OtherCurve, Some("c".to_owned())),
                "{own:?} {version:?}"
            );
        }
    }
}

#[test]
fn a_message_that_makes_no_sense_by_either_curve_is_not_called_one_of_another_curve() {
    let mut net = SimNet::new(20);
    let b = net.add(HostSpec::new("b"));
    let header = [0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    let (from, to) = ("198.51.100.77:4242".parse().unwrap(), net.underlay(b));
    net.inject(from, to, &[&header[..], &[7; 300]].concat());
    net.run_for(SECOND);
    let (reason, name) = caller_at(&mut net, b);
    assert!(matches!(reason, RefusalReason::Unreadable | RefusalReason::Malformed) && name.is_none(), "{reason:?}");
}

#[test]
fn answers_of_lighthouses_are_known_and_probed_after_a_handshake_was_given_up() {
    let mut net = SimNet::new(21);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(HostSpec::new("relay").lighthouse(lighthouse).config(|config| config.relay.am_relay = true));
    let at_relay = net.overlay(relay);
    let b =
        net.add(HostSpec::new("b").lighthouse(lighthouse).config(move |config| config.relay.relays = vec![at_relay]));
    let [a, forced] = [false, true].map(|force| {
        let spec = HostSpec::new(if force { "forced" } else { "a" }).lighthouse(lighthouse);
        net.add(spec.config(move |config| config.relay.force = force))
    });
    net.run_for(SECOND);
    let (peer, at_b) = (net.overlay(b), net.underlay(b));
    for (host, endpoints) in [(a, vec![at_b]), (forced, vec![])] {
        net.cut(host, b);
        net.cut(host, relay);
        net.control(host, |node, now| {
            node.inquire(now, peer);
            node.connect(now, peer);
        });
        net.run_for(3 * UNTIL_GIVEN_UP);
        let told = net.control(host, |node, _| node.whereabouts(peer));
        assert!(!told.pending && diagnosis(&mut net, host).attempts[0].given_up > 0, "{told:?}");
        assert_eq!((told.relays, told.endpoints), (vec![at_relay], endpoints), "{}", net.diagram());
        let sent = |net: &SimNet| net.flow().filter(|step| step.to == at_b).count();
        let before = sent(&net);
        net.control(host, |node, now| node.probe(now, peer));
        net.run_for(SECOND / 100);
        assert_eq!(sent(&net) > before, host == a, "its endpoint is probed");
    }
}

#[test]
fn a_datagram_that_the_system_refuses_to_send_is_reported_with_its_endpoint() {
    let mut net = SimNet::new(17);
    let [a, b] = net.nodes(["a", "b"]);
    net.cut(a, b);
    let (at, errno) = (net.underlay(b), 1);
    assert_eq!(called(&mut net, a, b).tried[0].error, None);
    net.control(a, |node, now| node.note_send_failure(now, at, Some(errno)));
    assert_eq!(diagnosis(&mut net, a).attempts[0].tried[0].error, Some(errno));
    assert_eq!(diagnosis(&mut net, a).sends[0].to, at);
}

#[test]
fn two_hosts_of_different_names_with_one_address_are_told_at_once_by_lighthouse_peer_and_victim() {
    let mut net = SimNet::new(18);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let victim = net.add(HostSpec::new("victim").networks(&["10.42.0.77/16"]).lighthouse(lighthouse));
    let peer = net.add(HostSpec::new("peer").knows(victim));
    net.ping(peer, victim).until_delivered();
    net.run_for(SECOND);
    let conflicts = |net: &SimNet, at: HostId| {
        let told = net.events(at).iter().filter_map(|event| match event {
            Event::AddressConflict { names, is_own, .. } => Some((names.clone(), *is_own)),
            _ => None,
        });
        (told.collect::<Vec<_>>(), net.counter(at, "address_conflicts"))
    };
    assert_eq!(conflicts(&net, lighthouse), (vec![], 0));

    let thief = net.add(HostSpec::new("thief").networks(&["10.42.0.77/16"]).lighthouse(lighthouse).knows(peer));
    let (at_peer, at_victim) = (net.overlay(peer), net.underlay(victim));
    net.control(thief, |node, now| node.connect(now, at_peer));
    let anybody = "10.42.0.200".parse().expect("an address");
    net.control(thief, |node, now| node.connect_at(now, anybody, at_victim));
    net.run_for(SECOND);
    for (host, is_own) in [(lighthouse, false), (peer, false), (victim, true)] {
        let (told, count) = conflicts(&net, host);
        assert!(!told.is_empty() && count == told.len() as u64, "{host:?}: {told:?}\n{}", net.diagram());
        assert!(told.iter().all(|it| *it == (["victim".to_owned(), "thief".to_owned()], is_own)), "{host:?}: {told:?}");
    }
    for host in [lighthouse, peer] {
        let told = diagnosis(&mut net, host).doubles;
        assert!(told.iter().any(|double| double.names == ["victim", "thief"]), "{told:?}");
    }
    assert_eq!(caller_at(&mut net, victim), (RefusalReason::OwnAddress, Some("thief".to_owned())));
}

#[test]
fn a_host_that_renews_its_certificate_is_not_two() {
    let mut net = SimNet::new(19);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(b, a).until_delivered();
    let renewed = net.renewed_identity(b, &[Version::V2]);
    net.move_to(b, "198.51.100.99:4242");
    net.edit_config(b, |config| config.identity = renewed);
    let at_a = net.overlay(a);
    net.control(b, |node, now| node.close(now, at_a, true));
    net.ping(b, a).until_delivered();
    assert_eq!((net.counter(a, "address_conflicts"), diagnosis(&mut net, a).doubles), (0, vec![]));
}
