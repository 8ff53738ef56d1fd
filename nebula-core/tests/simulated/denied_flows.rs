//! Denied flows, one by one for who debugs, and what each peer's tunnel carried.

use std::time::Duration;

use nebula_core::counters::Direction;
use nebula_core::diagnosis::DeniedFlow;
use nebula_core::firewall::{Difference, PortRange, Protocol, Rule};
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{DropReason, Event, TunnelStatus};

/// Debug logging that writes nothing.
struct Debugging;

impl tracing::Subscriber for Debugging {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

fn tcp(port: u16, group: &str) -> Rule {
    Rule {
        protocol: Protocol::Tcp,
        port: PortRange::Range(port, port),
        groups: vec![group.to_owned()],
        ..Rule::default()
    }
}

fn denied(net: &SimNet, host: HostId) -> Vec<DeniedFlow> {
    let events = net.events(host).iter();
    events
        .filter_map(|event| if let Event::FlowDenied(denied) = event { Some((**denied).clone()) } else { None })
        .collect()
}

/// `a` of the group web asks two closed UDP ports of `b`, one of them three times.
fn knock() -> (SimNet, [HostId; 2]) {
    let mut net = SimNet::new(61);
    let b = net.add(HostSpec::new("b").groups(&["db"]).config(|config| {
        config.firewall.inbound = vec![tcp(22, "admin"), tcp(5432, "web")];
    }));
    let a = net.add(HostSpec::new("a").groups(&["web"]).knows(b).config(|config| {
        config.firewall.outbound = vec![Rule { protocol: Protocol::Udp, ..Rule::any() }];
    }));
    for port in [5432, 5432, 5432, 5433] {
        let _verdict = net.send_udp(a, b, (5000, port), b"x");
        net.run_for(Duration::from_millis(200));
    }
    assert!(!net.ping(a, b).is_answered_within(Duration::from_millis(200)));
    (net, [a, b])
}

#[test]
fn who_debugs_sees_each_denied_flow_once_a_second_with_both_identities_and_the_nearest_rule() {
    // While there is one subscriber alone, `tracing` asks only the thread that comes to a line first, and keeps the
    // answer: that of another test. So the line is known before, and there are two.
    knock();
    let _second = tracing::Dispatch::new(Debugging);
    let (net, [a, b]) = tracing::subscriber::with_default(Debugging, knock);
    let at_b = denied(&net, b);
    let ports: Vec<_> = at_b.iter().map(|denied| denied.flow.local_port).collect();
    assert_eq!(ports, [5432, 5433], "{}", net.diagram());
    let DeniedFlow { direction, reason, own, peer, nearest, .. } = &at_b[0];
    let (peer, nearest) = (peer.as_ref().unwrap(), nearest.as_ref().unwrap());
    assert_eq!((*direction, *reason), (Direction::Inbound, DropReason::NoRule));
    assert_eq!((&*own.name, &*own.groups), ("b", &["db".to_owned()][..]));
    assert_eq!((&*peer.name, &*peer.groups, &*peer.addresses), ("a", &["web".to_owned()][..], &[net.overlay(a)][..]));
    assert_eq!((nearest.rule, &*nearest.differs), (1, &[Difference::Protocol][..]));
    // What a host itself may not send, too.
    let [at_a] = &denied(&net, a)[..] else { panic!("{:?}", denied(&net, a)) };
    assert_eq!((at_a.direction, &*at_a.peer.as_ref().unwrap().name), (Direction::Outbound, "b"));
    assert_eq!(at_a.nearest.as_ref().unwrap().rule, 0);
}

#[test]
fn without_debug_logging_a_denied_flow_is_only_counted() {
    let (net, [a, b]) = knock();
    assert_eq!((net.counter(b, "dropped_in_no_rule"), denied(&net, b)), (4, Vec::new()));
    assert_eq!((net.counter(a, "dropped_out_no_rule"), denied(&net, a)), (1, Vec::new()));
}

fn tunnel(net: &mut SimNet, at: HostId, of: HostId) -> TunnelStatus {
    let peer = net.overlay(of);
    let all = net.control(at, |node, _| node.tunnels());
    all.into_iter().find(|tunnel| tunnel.peer.contains(&peer)).expect("a tunnel to the peer")
}

#[test]
fn the_bytes_of_all_peers_are_those_of_the_node_and_what_is_denied_is_not_among_the_received() {
    let mut net = SimNet::new(62);
    let b = net.add(HostSpec::new("b").config(|config| {
        config.firewall.inbound = vec![Rule { protocol: Protocol::Udp, ..Rule::any() }];
    }));
    let c = net.add(HostSpec::new("c"));
    let a = net.add(HostSpec::new("a").knows(c).knows(b));
    for _ in 0..3 {
        let _verdict = net.send_udp(a, b, (5000, 53), &[7; 900]);
        let _verdict = net.send_udp(a, c, (5000, 53), &[7; 200]);
        net.run_for(Duration::from_millis(100));
    }
    // b has no rule for it.
    assert!(!net.ping(a, b).is_answered_within(Duration::from_millis(100)));
    let (to_b, to_c) = (tunnel(&mut net, a, b), tunnel(&mut net, a, c));
    assert_eq!(to_c.bytes_sent, 3 * 228);
    assert!(to_b.bytes_sent > 3 * 928, "{to_b:?}");
    assert_eq!(to_b.bytes_sent + to_c.bytes_sent, net.counter(a, "bytes_out"));
    let from_a = tunnel(&mut net, b, a);
    assert_eq!((from_a.bytes_received, net.counter(b, "bytes_in")), (3 * 928, 3 * 928));
}
