//! Tunnels that are kept although nobody uses them.

use std::time::Duration;

use nebula_core::config::MAX_KEPT;
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{Part, Verdict};

const SECOND: Duration = Duration::from_secs(1);

fn keep(net: &mut SimNet, host: HostId, peers: &[HostId], groups: &[&str]) {
    let peers: Vec<_> = peers.iter().map(|peer| net.overlay(*peer)).collect();
    let groups: Vec<_> = groups.iter().map(|&group| group.to_owned()).collect();
    let change = |config: &mut nebula_core::Config| (config.keep.peers, config.keep.groups) = (peers, groups);
    let parts = net.control(host, |node, now| node.reconfigure(now, change));
    assert_eq!(parts, [Part::Keep]);
}

#[test]
fn the_first_packet_to_a_peer_whose_tunnel_is_kept_waits_for_no_handshake() {
    let mut net = SimNet::new(1);
    let [a, b, c] = net.nodes(["a", "b", "c"]);
    keep(&mut net, a, &[b], &[]);
    net.run_for(SECOND);
    assert_eq!((net.tunnels_to(a, b).len(), net.tunnels_to(a, c).len()), (1, 0));
    net.run_for(600 * SECOND);
    assert_eq!(net.send_udp(a, b, (1, 1), b"at once"), Verdict::Transmit);
    assert_eq!(net.send_udp(a, c, (1, 1), b"later"), Verdict::Punt);
}

#[test]
fn a_peer_that_was_away_is_called_again() {
    let mut net = SimNet::new(2);
    let [a, b] = net.nodes(["a", "b"]);
    keep(&mut net, a, &[b], &[]);
    net.run_for(SECOND);
    net.stop(b);
    net.run_for(120 * SECOND);
    assert!(net.tunnels_to(a, b).is_empty());
    net.restart(b);
    net.run_for(31 * SECOND);
    assert_eq!(net.tunnels_to(a, b).len(), 1);
    // Without a word: a test of the idle tunnel finds out.
    net.kill(b);
    net.restart(b);
    net.run_for(60 * SECOND);
    assert_eq!(net.send_udp(a, b, (1, 1), b"at once"), Verdict::Transmit);
    net.run_for(SECOND);
    assert_eq!(net.payloads(b, 1).len(), 1);
}

#[test]
fn an_idle_kept_tunnel_costs_two_datagrams_a_minute() {
    let mut net = SimNet::new(3);
    let [a, b] = net.nodes(["a", "b"]);
    keep(&mut net, a, &[b], &[]);
    net.run_for(60 * SECOND);
    let before = net.flow().filter(|step| step.sender == "a").count();
    net.run_for(600 * SECOND);
    let sent = net.flow().filter(|step| step.sender == "a").count() - before;
    assert!((1..=20).contains(&sent), "{sent} in ten minutes");
}

#[test]
fn members_of_a_group_are_kept_once_there_was_a_tunnel() {
    let mut net = SimNet::new(4);
    let a = net.add(HostSpec::new("a"));
    let b = net.add(HostSpec::new("b").groups(&["database"]).knows(a));
    let c = net.add(HostSpec::new("c").groups(&["web"]).knows(a));
    net.introduce(a, b);
    net.introduce(a, c);
    keep(&mut net, a, &[], &["database"]);
    net.run_for(60 * SECOND);
    assert!(net.tunnels(a).is_empty(), "nobody knows who has the group");
    net.ping(b, a).until_delivered();
    net.ping(c, a).until_delivered();
    for host in [b, c] {
        net.stop(host);
        net.run_for(SECOND);
        net.restart(host);
    }
    net.run_for(60 * SECOND);
    assert_eq!((net.tunnels_to(a, b).len(), net.tunnels_to(a, c).len()), (1, 0));
    keep(&mut net, a, &[], &[]);
    net.stop(b);
    net.restart(b);
    net.run_for(120 * SECOND);
    assert!(net.tunnels_to(a, b).is_empty(), "it is no longer kept");
}

#[test]
fn the_number_of_kept_tunnels_is_bounded_and_oneself_is_not_called() {
    let mut net = SimNet::new(5);
    let a = net.add(HostSpec::new("a"));
    let peers: Vec<_> = (0..MAX_KEPT + 10).map(|n| net.add(HostSpec::new(&format!("p{n}")).knows(a))).collect();
    for peer in &peers {
        net.introduce(a, *peer);
    }
    let all: Vec<_> = [a].into_iter().chain(peers).collect();
    keep(&mut net, a, &all, &[]);
    net.run_for(60 * SECOND);
    assert_eq!(net.tunnels(a).len(), MAX_KEPT);
}
