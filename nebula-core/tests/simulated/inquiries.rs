//! Answers that a running node gives to its operator, compared with what it then does.

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::FlowKey;
use nebula_core::config::{Gateway, SubnetRoute};
use nebula_core::counters::Direction;
use nebula_core::firewall::{Cidr, PortRange, Protocol, Rule};
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{DropReason, FlowTrace, Outcome};

const SECOND: Duration = Duration::from_secs(1);

fn udp(port: u16) -> Rule {
    Rule { protocol: Protocol::Udp, port: PortRange::Range(port, port), ..Rule::any() }
}

fn flow(local: IpAddr, remote: IpAddr, ports: (u16, u16)) -> FlowKey {
    FlowKey { local, remote, local_port: ports.0, remote_port: ports.1, protocol: 17, fragment: false }
}

fn trace(net: &mut SimNet, host: HostId, direction: Direction, flow: FlowKey) -> FlowTrace {
    net.control(host, |node, now| node.trace(now, direction, &flow))
}

#[test]
fn a_trace_predicts_what_happens_to_a_packet_and_by_which_rule() {
    let mut net = SimNet::new(1);
    let b = net.add(HostSpec::new("b").config(|config| {
        config.firewall.inbound = vec![udp(53), udp(54), udp(53)];
        config.firewall.outbound = Vec::new();
    }));
    let a = net.add(HostSpec::new("a").knows(b));
    let (at_a, at_b) = (net.overlay(a), net.overlay(b));
    let before = trace(&mut net, a, Direction::Outbound, flow(at_a, at_b, (5000, 53)));
    assert_eq!((before.outcome, before.tunnel.is_none()), (Outcome::WaitsForTunnel, true));
    net.ping(a, b).is_answered_within(SECOND);

    for (port, rule, outcome) in [
        (54, Some(1), Outcome::Passes),
        (53, Some(0), Outcome::Passes),
        (55, None, Outcome::Dropped(DropReason::NoRule)),
    ] {
        let inbound = flow(at_b, at_a, (port, 5000));
        let told = trace(&mut net, b, Direction::Inbound, inbound);
        let explained = told.firewall.expect("there is a tunnel");
        assert_eq!((explained.rule, told.outcome), (rule, outcome), "port {port}");
        assert_eq!(told.rule, rule.map(|index| [udp(53), udp(54), udp(53)][index].clone()));
        assert_eq!(explained.known, None, "a trace is no packet");
        let _verdict = net.send_udp(a, b, (5000, port), b"x");
        net.run_for(SECOND);
        assert_eq!(net.payloads(b, port).len(), usize::from(outcome == Outcome::Passes), "port {port}");
    }
    // No rule allows the answer, only the flow.
    let answer = trace(&mut net, b, Direction::Outbound, flow(at_b, at_a, (53, 5000)));
    let known = answer.firewall.as_ref().and_then(|firewall| firewall.known).expect("the query is remembered");
    assert_eq!((answer.outcome, known.direction, known.answered), (Outcome::Passes, Direction::Inbound, false));
    assert_eq!(answer.firewall.and_then(|firewall| firewall.rule), None);
    net.run_for(Duration::from_secs(200));
    let late = trace(&mut net, b, Direction::Outbound, flow(at_b, at_a, (53, 5000)));
    assert_eq!(late.outcome, Outcome::Dropped(DropReason::NoRule), "the flow is forgotten");
}

#[test]
fn a_trace_follows_subnet_routes_and_names_what_has_no_route() {
    let mut net = SimNet::new(2);
    let behind = "192.168.7.0/24";
    let open = Rule { local_cidr: Some(Cidr::Any), ..Rule::any() };
    let gateway = net.add(HostSpec::new("gateway").unsafe_networks(&[behind]).config(move |config| {
        config.firewall.inbound = vec![open.clone()];
        config.firewall.outbound = vec![open];
    }));
    let at_gateway = net.overlay(gateway);
    let client = net.add(HostSpec::new("client").knows(gateway).config(move |config| {
        let gateways = vec![Gateway::new(at_gateway)];
        config.subnets = vec![SubnetRoute::new(behind.parse().expect("a network"), gateways)];
    }));
    net.ping(client, gateway).until_delivered();
    let (own, far) = (net.overlay(client), IpAddr::from([192, 168, 7, 9]));
    let there = trace(&mut net, client, Direction::Outbound, flow(own, far, (1, 2)));
    let route = there.route.expect("a route");
    assert_eq!((route.peer, route.subnet), (at_gateway, Some(behind.parse().expect("a network"))));
    assert_eq!(there.outcome, Outcome::Passes);
    // The same flow as the gateway sees it.
    let arriving = trace(&mut net, gateway, Direction::Inbound, flow(far, own, (2, 1)));
    assert_eq!(arriving.outcome, Outcome::Passes);

    for (remote, reason) in [(IpAddr::from([8, 8, 8, 8]), DropReason::NoRoute), (own, DropReason::ToSelf)] {
        let nowhere = trace(&mut net, client, Direction::Outbound, flow(own, remote, (1, 2)));
        assert_eq!(nowhere.outcome, Outcome::Dropped(reason));
    }
    // The address of a host with which the gateway has no tunnel.
    let forged = trace(&mut net, gateway, Direction::Inbound, flow(far, IpAddr::from([10, 42, 9, 9]), (2, 1)));
    assert_eq!(forged.outcome, Outcome::WaitsForTunnel);
}

#[test]
fn closing_a_tunnel_notifies_the_peer_unless_done_quietly() {
    let mut net = SimNet::new(3);
    let [a, b] = net.nodes(["a", "b"]);
    let at_b = net.overlay(b);
    for (quietly, left_there) in [(false, 0), (true, 1)] {
        net.ping(a, b).until_delivered();
        assert_eq!(net.control(a, |node, now| node.close(now, at_b, quietly)), 1);
        net.run_for(SECOND);
        assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (0, left_there));
    }
    assert_eq!(net.control(a, |node, now| node.close(now, at_b, false)), 0);
    net.ping(a, b).until_delivered();
}

#[test]
fn lighthouses_are_asked_without_a_tunnel_or_a_memory_of_it() {
    let mut net = SimNet::new(4);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(SECOND);
    let (at_b, at_lighthouse) = (net.overlay(b), net.overlay(lighthouse));
    net.control(a, |node, now| node.inquire(now, at_b));
    net.run_for(SECOND);
    let known = net.control(a, |node, _| node.whereabouts(at_b));
    assert_eq!(known.lighthouses, [at_lighthouse]);
    assert!(known.answers[&at_lighthouse].reported.contains(&net.underlay(b)), "{known:?}");
    // They are told, and nothing is tried because of it.
    assert!(known.endpoints == [net.underlay(b)] && !known.pending, "{known:?}");
    let at = net.underlay(b);
    assert!(!net.flow().any(|step| step.sender == "a" && step.to == at), "{}", net.diagram());
    assert!(net.tunnels_to(a, b).is_empty());
    let reported = net.control(lighthouse, |node, _| node.whereabouts(at_b)).reported;
    assert!(reported.is_some_and(|report| report.reported.contains(&net.underlay(b))));
}
