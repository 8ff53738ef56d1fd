//! Live tunnels that look for a better path, and idle ones that go.

use std::time::Duration;

use nebula_core::internals::header::{Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{Config, Event, TunnelDownReason};

fn send_many(net: &mut SimNet, from: HostId, to: HostId, count: usize) {
    for _ in 0..count {
        let _verdict = net.send_udp(from, to, (1, 2), b"x");
    }
}

fn count(net: &SimNet, sender: &str, kind: MessageType) -> usize {
    let is_kind = |datagram: &[u8]| Header::parse(datagram).is_ok_and(|header| header.kind == kind);
    net.flow().filter(|step| step.sender == sender && is_kind(&step.datagram)).count()
}

/// `a` knows two endpoints of `b` and prefers the one that `b` does not have.
fn with_preferred(seed: u64, change: impl FnOnce(&mut Config) + 'static) -> (SimNet, [HostId; 2]) {
    let mut net = SimNet::new(seed);
    let b = net.add(HostSpec::new("b"));
    let prefer = |config: &mut Config| {
        config.preferred_ranges = vec!["192.0.2.0/24".parse().expect("a prefix")];
        for endpoints in config.static_hosts.values_mut() {
            endpoints.push("192.0.2.1:4242".parse().expect("an endpoint"));
        }
    };
    let a = net.add(HostSpec::new("a").knows(b).config(prefer).config(change));
    net.ping(a, b).until_delivered();
    (net, [a, b])
}

#[test]
fn a_busy_tunnel_moves_to_a_preferred_endpoint_without_a_new_handshake() {
    let (mut net, [a, b]) = with_preferred(1, |_| {});
    let tunnel = net.tunnels_to(a, b)[0].local_index;
    net.move_to(b, "192.0.2.1:4242");
    send_many(&mut net, a, b, 1000);
    net.run_for(Duration::from_secs(6));
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "{}", net.diagram());
    assert_eq!(net.tunnels_to(a, b)[0].local_index, tunnel);
}

#[test]
fn a_tunnel_that_carries_little_stays_where_it_is() {
    let (mut net, [a, b]) = with_preferred(2, |_| {});
    net.move_to(b, "192.0.2.1:4242");
    send_many(&mut net, a, b, 900);
    net.run_for(Duration::from_secs(6));
    assert_ne!(net.endpoint_of(a, b), Some(net.underlay(b)));
}

#[test]
fn preferred_ranges_of_a_reload_apply_to_live_tunnels() {
    let (mut net, [a, b]) = with_preferred(5, |config| config.preferred_ranges.clear());
    net.move_to(b, "192.0.2.1:4242");
    send_many(&mut net, a, b, 1000);
    net.run_for(Duration::from_secs(6));
    assert_ne!(net.endpoint_of(a, b), Some(net.underlay(b)), "{}", net.diagram());
    net.control(a, |node, now| {
        node.reconfigure(now, |config| config.preferred_ranges = vec!["192.0.2.0/24".parse().expect("a prefix")])
    });
    send_many(&mut net, a, b, 1000);
    net.run_for(Duration::from_secs(6));
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "{}", net.diagram());
}

#[test]
fn a_tunnel_at_a_preferred_endpoint_tries_no_other() {
    let (mut net, [a, b]) = with_preferred(3, |config| {
        config.preferred_ranges.push("198.51.100.0/24".parse().expect("a prefix"));
    });
    send_many(&mut net, a, b, 5000);
    net.run_for(Duration::from_secs(6));
    let elsewhere = net.flow().filter(|step| step.sender == "a" && step.to.ip().to_string() == "192.0.2.1");
    let tests = elsewhere.filter(|step| step.datagram[0] == 0x14).count();
    assert_eq!(tests, 0, "{}", net.diagram());
}

#[test]
fn lighthouses_are_asked_again_after_many_packets_but_not_too_often() {
    let mut net = SimNet::new(4);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let rarely = |config: &mut Config| config.lighthouse.interval = None;
    let b = net.add(HostSpec::new("b").lighthouse(lighthouse));
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse).config(rarely));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
    let mut asked = Vec::new();
    for (packets, wait) in [(4000, 6), (1100, 6), (6000, 6), (1, 60)] {
        let before = count(&net, "a", MessageType::Lighthouse);
        send_many(&mut net, a, b, packets);
        net.run_for(Duration::from_secs(wait));
        asked.push(count(&net, "a", MessageType::Lighthouse) - before);
    }
    assert_eq!(asked[..3], [0, 1, 0], "{asked:?}");
    send_many(&mut net, a, b, 1);
    let before = count(&net, "a", MessageType::Lighthouse);
    net.run_for(Duration::from_secs(6));
    assert_eq!(asked[3] + count(&net, "a", MessageType::Lighthouse) - before, 1, "the wait is over");
}

#[test]
fn an_inactive_tunnel_is_closed_on_both_sides_if_configured() {
    let mut net = SimNet::new(5);
    let drops = |config: &mut Config| config.timers.inactivity_timeout = Some(Duration::from_secs(60));
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").knows(b).config(drops));
    net.ping(a, b).until_delivered();
    for _ in 0..4 {
        net.run_for(Duration::from_secs(30));
        net.ping(a, b).until_delivered();
    }
    assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (1, 1), "used every half minute");
    net.run_for(Duration::from_secs(80));
    assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (0, 0), "{}", net.diagram());
    let inactive = |event: &Event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::Inactive, .. });
    assert!(net.events(a).iter().any(inactive));
    net.ping(a, b).until_delivered();
}
