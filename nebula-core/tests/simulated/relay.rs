//! Hosts that cannot reach each other talk through a relay.

use std::net::IpAddr;
use std::time::Duration;

use nebula_cert::Version;
use nebula_core::internals::header::{Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, NatBehaviour, SimNet, Step};

const SECOND: Duration = Duration::from_secs(1);

/// A lighthouse, a relay and two hosts that have no path to each other.
pub(crate) struct Relayed {
    pub(crate) net: SimNet,
    lighthouse: HostId,
    pub(crate) relay: HostId,
    pub(crate) a: HostId,
    pub(crate) b: HostId,
}

fn relay_spec(name: &str, lighthouse: HostId) -> HostSpec {
    HostSpec::new(name).lighthouse(lighthouse).config(|config| config.relay.am_relay = true)
}

fn client_spec(name: &str, lighthouse: HostId, relays: &[IpAddr]) -> HostSpec {
    let relays = relays.to_vec();
    HostSpec::new(name).lighthouse(lighthouse).config(move |config| config.relay.relays = relays)
}

fn relayed_with(seed: u64, versions: &[Version]) -> Relayed {
    let mut net = SimNet::new(seed);
    let lighthouse = net.add(HostSpec::new("lighthouse").versions(versions).am_lighthouse());
    let relay = net.add(relay_spec("relay", lighthouse).versions(versions));
    let at = [net.overlay(relay)];
    let [a, b] = ["a", "b"].map(|name| net.add(client_spec(name, lighthouse, &at).versions(versions)));
    net.cut(a, b);
    net.run_for(SECOND);
    Relayed { net, lighthouse, relay, a, b }
}

pub(crate) fn relayed(seed: u64) -> Relayed {
    relayed_with(seed, &[Version::V2])
}

fn hops(net: &mut SimNet, host: HostId) -> usize {
    net.control(host, |node, _| node.table_sizes().relay_hops)
}

fn kind(step: &Step) -> Option<MessageType> {
    Header::parse(&step.datagram).ok().map(|header| header.kind)
}

/// The relay through which `host` reaches `peer`; `None` if it reaches it directly.
fn relay_of(net: &SimNet, host: HostId, peer: HostId) -> Option<IpAddr> {
    let tunnel = net.tunnels_to(host, peer).into_iter().find(|tunnel| tunnel.primary)?;
    if tunnel.endpoint.is_some() { None } else { tunnel.relay }
}

#[test]
fn two_hosts_behind_symmetric_nats_talk_through_a_relay() {
    let mut net = SimNet::new(1);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(relay_spec("relay", lighthouse));
    let at = [net.overlay(relay)];
    let [a, b] = ["a", "b"].map(|name| {
        let nat = net.add_nat(NatBehaviour::symmetric());
        net.add(client_spec(name, lighthouse, &at).behind(nat).config(|config| config.punchy.punch = true))
    });
    net.run_for(SECOND);
    let took = net.ping(a, b).until_delivered();
    assert!(took < SECOND, "the handshake takes no longer than its first attempts: {took:?}\n{}", net.diagram());
    assert_eq!(relay_of(&net, a, b), Some(at[0]));
    assert_eq!(relay_of(&net, b, a), Some(at[0]));
    assert_eq!(net.ping(b, a).train(120, SECOND), 120, "{}", net.diagram());
    assert_eq!(net.counter(relay, "packets_in"), 0, "nothing is opened in the middle");
}

#[test]
fn packets_that_wait_for_a_relay_cause_no_further_requests_or_handshakes() {
    let Relayed { mut net, a, b, relay, .. } = relayed(5);
    let asked = net.counter(relay, "control_in");
    for n in 0..60_u16 {
        let _verdict = net.send_udp(a, b, (1, 7), &n.to_be_bytes());
        net.run_for(Duration::from_millis(1));
    }
    net.run_for(SECOND);
    assert_eq!(net.payloads(b, 7).len(), 60, "{}", net.diagram());
    assert_eq!(net.counter(relay, "control_in") - asked, 2, "a request and its response\n{}", net.diagram());
    assert_eq!(net.counter(b, "handshakes_in"), 6, "two each: lighthouse, relay, other host\n{}", net.diagram());
}

#[test]
fn every_packet_arrives_once() {
    let Relayed { mut net, a, b, relay, .. } = relayed(2);
    net.ping(a, b).until_delivered();
    let passed = net.counter(relay, "relayed_datagrams");
    for n in 0..200_u16 {
        let _verdict = net.send_udp(a, b, (1, 7), &n.to_be_bytes());
        let _verdict = net.send_udp(b, a, (1, 7), &n.to_be_bytes());
        net.run_for(Duration::from_millis(10));
    }
    net.run_for(SECOND);
    let sent: Vec<_> = (0..200_u16).map(|n| n.to_be_bytes().to_vec()).collect();
    assert_eq!(net.payloads(b, 7), sent);
    assert_eq!(net.payloads(a, 7), sent);
    assert_eq!(net.counter(relay, "relayed_datagrams") - passed, 400);
}

#[test]
fn version_one_hosts_use_a_relay_too() {
    let Relayed { mut net, a, b, relay, .. } = relayed_with(3, &[Version::V1]);
    net.ping(a, b).until_delivered();
    assert_eq!(relay_of(&net, a, b), Some(net.overlay(relay)));
}

#[test]
fn hosts_with_ipv6_overlay_addresses_use_a_relay_too() {
    let mut net = SimNet::new(4);
    let lighthouse = net.add(HostSpec::new("lighthouse").networks(&["fd00::1/64"]).am_lighthouse());
    let relay = net.add(relay_spec("relay", lighthouse).networks(&["fd00::2/64"]));
    let at = [net.overlay(relay)];
    let a = net.add(client_spec("a", lighthouse, &at).networks(&["fd00::a/64", "10.42.0.10/16"]));
    let b = net.add(client_spec("b", lighthouse, &at).networks(&["fd00::b/64", "10.42.0.11/16"]));
    net.cut(a, b);
    net.run_for(SECOND);
    net.ping(a, b).between("fd00::a", "fd00::b").until_delivered();
    net.ping(b, a).between("10.42.0.11", "10.42.0.10").until_delivered();
    assert_eq!(net.tunnels_to(a, b).len(), 1, "one tunnel for all addresses");
}

#[test]
fn a_lighthouse_may_be_the_relay() {
    let mut net = SimNet::new(5);
    let both = net.add(HostSpec::new("both").am_lighthouse().config(|config| config.relay.am_relay = true));
    let at = [net.overlay(both)];
    let [a, b] = ["a", "b"].map(|name| net.add(client_spec(name, both, &at)));
    net.cut(a, b);
    net.run_for(SECOND);
    net.ping(a, b).until_delivered();
    assert_eq!(relay_of(&net, b, a), Some(at[0]));
}

#[test]
fn the_relay_reads_nothing() {
    let Relayed { mut net, a, b, relay, .. } = relayed(6);
    net.ping(a, b).until_delivered();
    let secret = b"nobody between may read this";
    let _verdict = net.send_udp(a, b, (1, 9), secret);
    net.run_for(SECOND);
    assert_eq!(net.payloads(b, 9), [secret.to_vec()]);
    assert_eq!(net.payloads(relay, 9), Vec::<Vec<u8>>::new());
    assert!(net.flow().all(|step| step.datagram.windows(secret.len()).all(|window| window != secret)));
    let inner = |name: &str| {
        let steps = net.flow().filter(|step| step.sender == name && kind(step) == Some(MessageType::Relay));
        steps.map(|step| step.datagram[16..step.datagram.len() - 16].to_vec()).collect::<Vec<_>>()
    };
    let (sent, passed) = (inner("a"), inner("relay"));
    assert!(!sent.is_empty() && sent.iter().all(|datagram| passed.contains(datagram)), "passed on unchanged");
}

#[test]
fn a_direct_path_wins_over_the_relay() {
    let Relayed { mut net, a, b, .. } = relayed(7);
    net.heal(a, b);
    net.ping(a, b).until_delivered();
    net.run_for(SECOND);
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "{}", net.diagram());
    assert_eq!(net.endpoint_of(b, a), Some(net.underlay(a)));
}

#[test]
fn a_direct_path_that_appears_takes_over_without_a_lost_packet() {
    let Relayed { mut net, a, b, relay, .. } = relayed(8);
    net.ping(a, b).until_delivered();
    net.heal(a, b);
    assert_eq!(net.ping(a, b).train(20, SECOND), 20);
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "{}", net.diagram());
    assert_eq!(net.endpoint_of(b, a), Some(net.underlay(a)));
    assert_eq!(net.tunnels_to(a, b).len(), 1, "it is the same tunnel");
    let passed = net.counter(relay, "relayed_datagrams");
    assert_eq!(net.ping(a, b).train(20, SECOND), 20);
    assert_eq!(net.counter(relay, "relayed_datagrams"), passed);
}

#[test]
fn the_relay_takes_over_again_when_the_direct_path_dies() {
    let Relayed { mut net, a, b, relay, .. } = relayed(9);
    net.ping(a, b).until_delivered();
    net.heal(a, b);
    net.ping(a, b).train(20, SECOND);
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "{}", net.diagram());
    net.cut(a, b);
    let answered = net.ping(a, b).train(60, SECOND);
    assert!(answered >= 50, "{answered} of 60\n{}", net.diagram());
    assert_eq!(relay_of(&net, a, b), Some(net.overlay(relay)));
    assert_eq!(relay_of(&net, b, a), Some(net.overlay(relay)));
}

#[test]
fn a_relay_that_restarted_is_used_again() {
    let Relayed { mut net, a, b, relay, .. } = relayed(10);
    net.ping(a, b).until_delivered();
    net.restart(relay);
    let answered = net.ping(a, b).train(20, SECOND);
    assert!(answered >= 15, "{answered} of 20\n{}", net.diagram());
}

#[test]
fn a_relay_that_stopped_is_used_again_after_its_start() {
    let Relayed { mut net, a, b, relay, .. } = relayed(11);
    net.ping(a, b).until_delivered();
    net.control(relay, |node, now| node.close_all(now));
    assert_eq!(hops(&mut net, relay), 0);
    net.run_for(SECOND);
    net.restart(relay);
    let answered = net.ping(a, b).train(20, SECOND);
    assert!(answered >= 18, "{answered} of 20\n{}", net.diagram());
}

#[test]
fn an_end_that_restarted_is_reached_again_at_once() {
    for (seed, a_restarts) in [(12, true), (13, false)] {
        let Relayed { mut net, a, b, .. } = relayed(seed);
        net.ping(a, b).until_delivered();
        net.restart(if a_restarts { a } else { b });
        let answered = net.ping(a, b).train(30, SECOND);
        assert!(answered >= 25, "a restarts: {a_restarts}, {answered} of 30\n{}", net.diagram());
    }
}

#[test]
fn another_relay_takes_over_from_one_that_died() {
    let mut net = SimNet::new(14);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relays = ["r1", "r2"].map(|name| net.add(relay_spec(name, lighthouse)));
    let at = relays.map(|relay| net.overlay(relay));
    let [a, b] = ["a", "b"].map(|name| net.add(client_spec(name, lighthouse, &at)));
    net.cut(a, b);
    net.run_for(SECOND);
    net.ping(a, b).until_delivered();
    let used = relay_of(&net, a, b).unwrap();
    let (dead, other) = if used == at[0] { (relays[0], at[1]) } else { (relays[1], at[0]) };
    for host in [lighthouse, a, b] {
        net.cut(dead, host);
    }
    let answered = net.ping(a, b).train(60, SECOND);
    assert!(answered >= 45, "{answered} of 60\n{}", net.diagram());
    assert_eq!(relay_of(&net, a, b), Some(other));
    assert_eq!(relay_of(&net, b, a), Some(other));
}

#[test]
fn both_ends_may_begin_at_once() {
    let Relayed { mut net, a, b, .. } = relayed(15);
    for (from, to) in [(a, b), (b, a)] {
        let to = net.overlay(to);
        net.control(from, |node, now| node.connect(now, to));
    }
    assert_eq!(net.ping(a, b).train(30, SECOND), 30, "{}", net.diagram());
    net.run_for(Duration::from_secs(30));
    assert_eq!((net.tunnels_to(a, b).len(), net.tunnels_to(b, a).len()), (1, 1), "{}", net.diagram());
}

#[test]
fn both_ends_renew_their_tunnel_through_the_relay_without_a_lost_packet() {
    let Relayed { mut net, a, b, .. } = relayed(16);
    net.ping(a, b).until_delivered();
    for host in [a, b] {
        let identity = net.renewed_identity(host, &[Version::V2]);
        net.control(host, |node, now| node.reconfigure(now, |config| config.identity = identity));
    }
    assert_eq!(net.ping(a, b).train(100, Duration::from_millis(500)), 100, "{}", net.diagram());
    assert_eq!((net.tunnels_to(a, b).len(), net.tunnels_to(b, a).len()), (1, 1));
}

#[test]
fn a_new_tunnel_with_the_relay_takes_over_the_hops_of_the_old_one() {
    for (seed, renews) in [(17, "relay"), (18, "a"), (19, "b")] {
        let Relayed { mut net, a, b, relay, .. } = relayed(seed);
        net.ping(a, b).until_delivered();
        let host = match renews {
            "a" => a,
            "b" => b,
            _ => relay,
        };
        let identity = net.renewed_identity(host, &[Version::V2]);
        net.control(host, |node, now| node.reconfigure(now, |config| config.identity = identity));
        assert_eq!(net.ping(a, b).train(120, Duration::from_millis(500)), 120, "{renews} renews\n{}", net.diagram());
        assert_eq!(net.tunnels_to(a, relay).len(), 1, "the old tunnel aged out");
        assert_eq!(hops(&mut net, relay), 2, "and its hops with it");
        assert_eq!((hops(&mut net, a), hops(&mut net, b)), (1, 1));
    }
}

#[test]
fn a_host_that_is_no_relay_passes_nothing_on() {
    let mut net = SimNet::new(20);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let other = net.add(HostSpec::new("other").lighthouse(lighthouse));
    let at = [net.overlay(other)];
    let [a, b] = ["a", "b"].map(|name| net.add(client_spec(name, lighthouse, &at)));
    net.cut(a, b);
    net.run_for(SECOND);
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(10)));
    assert!(net.counter(other, "dropped_in_relay") > 0);
    assert_eq!((hops(&mut net, other), net.counter(other, "relayed_datagrams")), (0, 0));
}

#[test]
fn a_host_told_not_to_use_relays_does_not() {
    let Relayed { mut net, lighthouse, relay, b, .. } = relayed(21);
    let c = net.add(client_spec("c", lighthouse, &[]).config(|config| config.relay.use_relays = false));
    net.cut(b, c);
    assert!(!net.ping(c, b).is_answered_within(Duration::from_secs(10)));
    assert_eq!(hops(&mut net, relay), 0);
}

#[test]
fn a_relay_is_not_reached_through_a_relay() {
    let mut net = SimNet::new(22);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let outer = net.add(relay_spec("outer", lighthouse));
    let at = [net.overlay(outer)];
    let inner = net.add(relay_spec("inner", lighthouse).config(move |config| config.relay.relays = at.to_vec()));
    let through = [net.overlay(inner)];
    let [a, b] = ["a", "b"].map(|name| net.add(client_spec(name, lighthouse, &through)));
    net.cut(a, b);
    net.cut(a, inner);
    net.run_for(SECOND);
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(20)));
    let nested = |step: &Step| {
        kind(step) == Some(MessageType::Relay)
            && Header::parse(&step.datagram[16..]).is_ok_and(|header| header.kind == MessageType::Relay)
    };
    assert!(!net.flow().any(nested));
    assert_eq!(net.counter(outer, "relayed_datagrams"), 0, "{}", net.diagram());
}

#[test]
fn relaying_ends_when_the_relay_is_told_so_and_begins_again() {
    let Relayed { mut net, a, b, relay, .. } = relayed(23);
    net.ping(a, b).until_delivered();
    net.control(relay, |node, now| node.reconfigure(now, |config| config.relay.am_relay = false));
    assert_eq!(net.ping(a, b).train(5, SECOND), 0);
    net.control(relay, |node, now| node.reconfigure(now, |config| config.relay.am_relay = true));
    net.ping(a, b).until_delivered();
}

#[test]
fn a_host_that_names_another_relay_is_reached_through_it() {
    let Relayed { mut net, lighthouse, a, b, relay } = relayed(24);
    let other = net.add(relay_spec("other", lighthouse));
    let relays = vec![net.overlay(other)];
    net.control(b, |node, now| node.reconfigure(now, |config| config.relay.relays = relays));
    net.run_for(SECOND);
    net.ping(a, b).until_delivered();
    assert_eq!(relay_of(&net, a, b), Some(net.overlay(other)));
    assert_eq!(net.counter(relay, "relayed_datagrams"), 0);
}

#[test]
fn tables_are_empty_again_when_everybody_left() {
    let Relayed { mut net, lighthouse, relay, a, b } = relayed(25);
    net.ping(a, b).until_delivered();
    assert_eq!((hops(&mut net, a), hops(&mut net, relay), hops(&mut net, b)), (1, 2, 1));
    for host in [a, b, relay, lighthouse] {
        net.control(host, |node, now| node.close_all(now));
        net.run_for(Duration::from_millis(100));
    }
    for host in [a, b, relay] {
        assert_eq!(hops(&mut net, host), 0);
        assert!(net.tunnels(host).iter().all(|tunnel| tunnel.peer == [net.overlay(lighthouse)]));
    }
}

#[test]
fn an_idle_relayed_tunnel_costs_no_datagram() {
    let Relayed { mut net, a, b, .. } = relayed(26);
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(30));
    let between = |net: &SimNet| net.flow().filter(|step| kind(step) == Some(MessageType::Relay)).count();
    let before = between(&net);
    net.run_for(Duration::from_secs(600));
    assert_eq!(between(&net), before);
    assert!(net.ping(a, b).is_answered_within(Duration::from_millis(100)), "no new handshake");
}

#[test]
fn a_lossy_and_reordering_network_carries_relayed_traffic() {
    let Relayed { mut net, a, b, .. } = relayed(27);
    let link = nebula_core::simulator::Link {
        jitter: Duration::from_millis(20),
        loss: 10,
        duplicate: 10,
        ..Default::default()
    };
    net.set_link(link);
    net.ping(a, b).until_delivered();
    for n in 0..300_u16 {
        let _verdict = net.send_udp(a, b, (1, 7), &n.to_be_bytes());
        net.run_for(Duration::from_millis(20));
    }
    let mut received = net.payloads(b, 7);
    assert!(received.len() > 200, "{}", received.len());
    received.sort();
    let count = received.len();
    received.dedup();
    assert_eq!(received.len(), count, "nothing arrives twice");
}

#[test]
fn two_ends_that_may_not_follow_each_other_yet_do_not_challenge_each_other_for_ever() {
    let Relayed { mut net, a, b, .. } = relayed(30);
    net.ping(a, b).until_delivered();
    net.heal(a, b);
    net.ping(a, b).train(20, SECOND);
    net.cut(a, b);
    let mut both_relayed = false;
    for _ in 0..600 {
        let _verdict = net.send_udp(a, b, (1, 2), b"traffic");
        let _verdict = net.send_udp(b, a, (1, 2), b"traffic");
        net.run_for(SECOND / 10);
        both_relayed = relay_of(&net, a, b).is_some() && relay_of(&net, b, a).is_some();
        if both_relayed {
            break;
        }
    }
    assert!(both_relayed, "{}", net.diagram());
    net.heal(a, b);
    // One of the datagrams that the cut dropped turns out to be merely late.
    let is_data = |step: &&Step| step.sender == "a" && kind(step) == Some(MessageType::Data);
    let late = net.flow().rfind(|step| is_data(step) && step.to == net.underlay(b)).unwrap().clone();
    net.inject(late.from, late.to, &late.datagram);
    let healed = net.elapsed();
    net.run_for(3 * SECOND);
    let direct = net.flow().filter(|step| step.at > healed && step.to == net.underlay(b) && step.sender == "a");
    let direct = direct.filter(|step| matches!(kind(step), Some(MessageType::TestRequest | MessageType::TestReply)));
    let count = direct.count();
    assert!((1..=10).contains(&count), "{count}\n{}", net.diagram());
}
