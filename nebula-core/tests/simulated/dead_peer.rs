//! A peer that vanishes, and one that is only quiet.

use std::time::Duration;

use nebula_core::simulator::{HostSpec, NatBehaviour, SimNet};
use nebula_core::{Event, TunnelDownReason};

#[test]
fn a_peer_that_vanished_is_given_up_after_one_probe() {
    let mut net = SimNet::new(1);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(6));
    net.cut(a, b);
    let probes_before = net.flow().filter(|step| step.datagram[0] == 0x14).count();
    let _verdict = net.send_udp(a, b, (1, 2), b"anybody there?");
    net.run_for(Duration::from_secs(17));
    assert!(net.tunnels(a).is_empty());
    let probes = net.flow().filter(|step| step.sender == "a" && step.datagram[0] == 0x14).count();
    assert_eq!(probes - probes_before, 1);
    let dead = |event: &Event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::Dead, .. });
    assert!(net.events(a).iter().any(dead));
}

#[test]
fn a_quiet_tunnel_is_kept_and_costs_no_datagram() {
    let mut net = SimNet::new(2);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(20));
    let before = net.flow().count();
    net.run_for(Duration::from_secs(3600));
    assert_eq!(net.flow().count(), before);
    assert!(net.ping(a, b).is_answered_within(Duration::from_millis(100)), "no new handshake");
}

#[test]
fn an_answered_probe_keeps_a_tunnel_with_one_way_traffic() {
    let mut net = SimNet::new(3);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    for _ in 0..120 {
        let _verdict = net.send_udp(a, b, (1, 2), b"one way");
        net.run_for(Duration::from_secs(1));
    }
    assert_eq!(net.payloads(b, 2).len(), 120);
    assert_eq!(net.tunnels(a).len(), 1);
}

#[test]
fn keepalive_punches_keep_a_nat_open_for_the_quiet_peer() {
    for (punch, reachable) in [(true, true), (false, false)] {
        let mut net = SimNet::new(4);
        let nat = net.add_nat(NatBehaviour::home());
        let server = net.add(HostSpec::new("server"));
        let inside =
            HostSpec::new("inside").behind(nat).knows(server).config(move |config| config.punchy.punch = punch);
        let inside = net.add(inside);
        net.ping(inside, server).until_delivered();
        net.run_for(Duration::from_secs(300));
        let answered = net.ping(server, inside).is_answered_within(Duration::from_millis(500));
        assert_eq!(answered, reachable, "punch: {punch}\n{}", net.diagram());
    }
}

#[test]
fn an_idle_connected_node_wakes_less_than_twice_a_second() {
    let mut net = SimNet::new(5);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let nodes = ["a", "b", "c"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(10));
    net.ping(nodes[0], nodes[1]).until_delivered();
    net.ping(nodes[0], nodes[2]).until_delivered();
    net.run_for(Duration::from_secs(60));
    let mut wakes = 0;
    let end = net.elapsed() + Duration::from_secs(600);
    while net.elapsed() < end && net.step() {
        wakes += 1;
    }
    assert!(wakes < 4 * 2 * 600 / 2, "{wakes} events for four nodes in ten minutes");
}

#[test]
fn keepalive_punches_go_to_every_known_endpoint_of_the_peer_if_configured() {
    for everywhere in [false, true] {
        let mut net = SimNet::new(7);
        let b = net.add(HostSpec::new("b"));
        let known = (net.overlay(b), vec![net.underlay(b), "192.0.2.7:7".parse().unwrap()]);
        let a = net.add(HostSpec::new("a").config(move |config| {
            config.punchy.punch = true;
            config.punchy.target_all_remotes = everywhere;
            config.static_hosts.extend([known]);
        }));
        net.ping(a, b).until_delivered();
        net.run_for(Duration::from_secs(30));
        let punches = net.flow().filter(|step| step.sender == "a" && step.datagram == [1]);
        let to: std::collections::BTreeSet<_> = punches.map(|step| step.to).collect();
        assert_eq!(to.len(), 1 + usize::from(everywhere), "{to:?}");
    }
}

#[test]
fn a_dead_peer_is_probed_within_five_seconds_and_given_up_ten_later() {
    let mut net = SimNet::new(1);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_millis(20_250));
    net.kill(b);
    let silent = net.elapsed();
    let _verdict = net.send_udp(a, b, (1, 2), b"anybody there?");
    net.run_for(Duration::from_secs(20));
    let probe = net.flow().find(|step| step.datagram[0] == 0x14 && step.at > silent).unwrap().at - silent;
    assert!(probe <= Duration::from_millis(5_500), "at the next check, which is on a grid of half a second: {probe:?}");
    assert!(net.tunnels(a).is_empty());
    let mut again = SimNet::new(1);
    let [a, b] = again.nodes(["a", "b"]);
    again.ping(a, b).until_delivered();
    again.run_for(Duration::from_millis(20_250));
    again.kill(b);
    let _verdict = again.send_udp(a, b, (1, 2), b"anybody there?");
    again.run_for(probe + Duration::from_millis(9_900));
    assert_eq!(again.tunnels(a).len(), 1, "it has ten seconds to answer");
    again.run_for(Duration::from_millis(700));
    assert!(again.tunnels(a).is_empty());
}

#[test]
fn dead_peer_detection_uses_the_configured_times() {
    let mut net = SimNet::new(2);
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").knows(b).config(|config| {
        config.timers.connection_alive_interval = Duration::from_secs(1);
        config.timers.pending_deletion_interval = Duration::from_secs(2);
    }));
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(10));
    net.kill(b);
    let _verdict = net.send_udp(a, b, (1, 2), b"anybody there?");
    net.run_for(Duration::from_secs(5));
    assert!(net.tunnels(a).is_empty(), "{}", net.diagram());
}
