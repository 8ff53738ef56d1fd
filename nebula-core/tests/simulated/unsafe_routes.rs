//! Networks behind other nodes: gateways, their choice and their loss.

use crate::packets;

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use nebula_core::config::{Gateway, SubnetRoute};
use nebula_core::firewall::{Cidr, Rule};
use nebula_core::simulator::{HostId, HostSpec, SimNet};

const BEHIND: &str = "192.168.7.0/24";
const SECOND: Duration = Duration::from_secs(1);

fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// A gateway whose rules let everything through to the network behind it.
fn gateway(name: &str) -> HostSpec {
    let open = Rule { local_cidr: Some(Cidr::Any), ..Rule::any() };
    HostSpec::new(name).unsafe_networks(&[BEHIND]).config(move |config| {
        config.firewall.inbound = vec![open.clone()];
        config.firewall.outbound = vec![open];
    })
}

fn route(network: &str, gateways: &[(&str, u32)]) -> SubnetRoute {
    let gateway = |(address, weight): &(&str, u32)| {
        Gateway::new(at(address)).weighing(NonZeroU32::new(*weight).expect("a weight"))
    };
    SubnetRoute::new(network.parse().expect("a network"), gateways.iter().map(gateway).collect())
}

fn client(gateways: &'static [(&'static str, u32)], knows: &[HostId]) -> HostSpec {
    let spec = HostSpec::new("client").config(move |config| config.subnets = vec![route(BEHIND, gateways)]);
    knows.iter().fold(spec, |spec, host| spec.knows(*host))
}

fn send(net: &mut SimNet, client: HostId, port: u16, payload: &[u8]) {
    let packet = packets::udp(net.overlay(client), at("192.168.7.9"), (port, 53), payload);
    let _verdict = net.send_packet(client, &packet);
}

#[test]
fn a_network_behind_a_node_is_reached_through_it_and_answers_come_back() {
    let mut net = SimNet::new(1);
    let g = net.add(gateway("g"));
    let c = net.add(client(&[("10.42.0.1", 1)], &[g]));
    send(&mut net, c, 5000, b"query");
    net.run_for(SECOND);
    assert_eq!(net.payloads(g, 53), [b"query"], "{}", net.diagram());
    let answer = packets::udp(at("192.168.7.9"), net.overlay(c), (53, 5000), b"answer");
    let _verdict = net.send_packet(g, &answer);
    net.run_for(SECOND);
    assert_eq!(net.payloads(c, 5000), [b"answer"]);
}

#[test]
fn a_node_whose_certificate_does_not_hold_the_network_is_sent_nothing_for_it() {
    let mut net = SimNet::new(2);
    let g = net.add(HostSpec::new("g"));
    let c = net.add(client(&[("10.42.0.1", 1)], &[g]));
    net.ping(c, g).until_delivered();
    send(&mut net, c, 5000, b"query");
    net.run_for(SECOND);
    assert!(net.payloads(g, 53).is_empty());
    assert_eq!(net.counter(c, "dropped_out_remote_address"), 1);
}

#[test]
fn a_node_may_not_speak_for_a_network_that_its_certificate_does_not_hold() {
    let mut net = SimNet::new(3);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let forged = packets::udp(at("192.168.7.9"), net.overlay(b), (53, 5000), b"forged");
    let _verdict = net.send_packet(a, &forged);
    net.run_for(SECOND);
    assert!(net.payloads(b, 5000).is_empty());
    assert_eq!(net.counter(a, "dropped_out_local_address"), 1, "already its own node refuses to send it");
}

#[test]
fn behind_a_gateway_a_rule_must_name_the_network_or_the_default_must_be_any() {
    for (default_any, arrives) in [(false, false), (true, true)] {
        let mut net = SimNet::new(4);
        let g = net.add(HostSpec::new("g").unsafe_networks(&[BEHIND]).config(move |config| {
            config.firewall.default_local_cidr_any = default_any;
        }));
        let c = net.add(client(&[("10.42.0.1", 1)], &[g]));
        net.ping(c, g).until_delivered();
        send(&mut net, c, 5000, b"query");
        net.run_for(SECOND);
        assert_eq!(net.payloads(g, 53).len(), usize::from(arrives));
        assert_eq!(net.counter(g, "dropped_in_no_rule"), u64::from(!arrives));
    }
}

#[test]
fn flows_are_spread_over_gateways_by_weight_and_each_stays_on_its_own() {
    let mut net = SimNet::new(5);
    let g = [net.add(gateway("g1")), net.add(gateway("g2"))];
    let c = net.add(client(&[("10.42.0.1", 1), ("10.42.0.2", 3)], &g));
    for gateway in g {
        net.ping(c, gateway).until_delivered();
    }
    for _ in 0..2 {
        for port in 2000..2400 {
            send(&mut net, c, port, &port.to_be_bytes());
        }
        net.run_for(SECOND);
    }
    let [mut first, second] = g.map(|gateway| net.payloads(gateway, 53));
    assert_eq!(first.len() + second.len(), 800);
    assert!((140..260).contains(&first.len()), "{} of 800 on the gateway with a quarter", first.len());
    first.retain(|payload| second.contains(payload));
    assert!(first.is_empty(), "flows on both gateways: {first:?}");
}

/// A source port whose flow takes the first of two gateways of equal weight.
fn port_of_first(net: &mut SimNet, c: HostId, first: HostId) -> u16 {
    for port in 3000..3100 {
        send(net, c, port, b"which");
        net.run_for(Duration::from_millis(100));
        if !net.payloads(first, 53).is_empty() {
            return port;
        }
    }
    panic!("no flow takes the first gateway\n{}", net.diagram());
}

#[test]
fn a_flow_takes_another_gateway_while_its_own_is_away_and_stays_there() {
    let mut net = SimNet::new(6);
    let g = [net.add(gateway("g1")), net.add(gateway("g2"))];
    let c = net.add(client(&[("10.42.0.1", 1), ("10.42.0.2", 1)], &g));
    let port = port_of_first(&mut net, c, g[0]);
    net.cut(c, g[0]);
    let mut sent = 0_u8;
    let mut on_second = |net: &mut SimNet, seconds: u32| {
        for _ in 0..seconds {
            sent += 1;
            send(net, c, port, &[sent]);
            net.run_for(SECOND);
        }
        net.payloads(g[1], 53).last() == Some(&vec![sent])
    };
    assert!(on_second(&mut net, 40), "{}", net.diagram());
    assert!(net.tunnels_to(c, g[0]).is_empty());
    net.heal(c, g[0]);
    assert!(on_second(&mut net, 60), "back on its own gateway\n{}", net.diagram());
}

#[test]
fn a_flow_does_not_wait_for_a_gateway_that_never_answers() {
    let mut net = SimNet::new(7);
    let g = [net.add(gateway("g1")), net.add(gateway("g2"))];
    let c = net.add(client(&[("10.42.0.1", 1), ("10.42.0.2", 1)], &g));
    net.cut(c, g[0]);
    // Without any tunnel, each packet waits for its own gateway, and the other gateway is contacted at the same time.
    for port in 3000..3020 {
        send(&mut net, c, port, b"first");
    }
    net.run_for(SECOND);
    let served = net.payloads(g[1], 53).len();
    assert!((1..20).contains(&served));
    for port in 3000..3020 {
        send(&mut net, c, port, b"second");
    }
    net.run_for(SECOND);
    // Those that waited are not lost: they take the other gateway once the handshake was tried for long enough.
    assert_eq!(net.payloads(g[1], 53).len(), 40, "{}", net.diagram());
}

#[test]
fn a_dead_gateway_is_asked_for_once_a_second_and_not_with_every_packet() {
    let mut net = SimNet::new(8);
    let g = [net.add(gateway("g1")), net.add(gateway("g2"))];
    let c = net.add(client(&[("10.42.0.1", 1), ("10.42.0.2", 1)], &g));
    net.cut(c, g[0]);
    net.ping(c, g[1]).until_delivered();
    let before = net.flow().filter(|step| step.receiver.as_deref() == Some("g1")).count();
    for n in 0..10_000_u32 {
        send(&mut net, c, 3000 + (n % 100) as u16, b"flood");
        net.run_for(Duration::from_millis(1));
    }
    let asked = net.flow().filter(|step| step.receiver.as_deref() == Some("g1")).count().saturating_sub(before);
    assert!(asked <= 40, "{asked} datagrams to a gateway that is away");
    assert!(net.payloads(g[1], 53).len() >= 9_900);
}

#[test]
fn new_routes_apply_to_the_next_packet_and_old_ones_no_longer() {
    let mut net = SimNet::new(9);
    let g = [net.add(gateway("g1")), net.add(gateway("g2"))];
    let c = net.add(client(&[("10.42.0.1", 1)], &g));
    for gateway in g {
        net.ping(c, gateway).until_delivered();
    }
    let after = |net: &mut SimNet, routes: Vec<SubnetRoute>| {
        net.control(c, |node, now| node.reconfigure(now, |config| config.subnets = routes));
        send(net, c, 5000, b"query");
        net.run_for(SECOND);
        g.map(|gateway| net.payloads(gateway, 53).len())
    };
    assert_eq!(after(&mut net, vec![route(BEHIND, &[("10.42.0.1", 1)])]), [1, 0]);
    assert_eq!(after(&mut net, vec![route(BEHIND, &[("10.42.0.2", 1)])]), [1, 1]);
    let nested = vec![route("192.168.0.0/16", &[("10.42.0.2", 1)]), route("192.168.7.0/28", &[("10.42.0.1", 1)])];
    assert_eq!(after(&mut net, nested), [2, 1]);
    assert_eq!(after(&mut net, Vec::new()), [2, 1]);
    assert_eq!(net.counter(c, "dropped_out_no_route"), 1);
}

#[test]
fn a_flow_of_a_network_behind_survives_a_change_of_routes() {
    let mut net = SimNet::new(10);
    let g = net.add(gateway("g"));
    let c = net.add(client(&[("10.42.0.1", 1)], &[g]).config(|config| config.firewall.inbound = Vec::new()));
    send(&mut net, c, 5000, b"query");
    net.run_for(SECOND);
    net.control(c, |node, now| {
        node.reconfigure(now, |config| {
            config.subnets = vec![route(BEHIND, &[("10.42.0.1", 1)]), route("172.16.0.0/12", &[])]
        })
    });
    let answer = packets::udp(at("192.168.7.9"), net.overlay(c), (53, 5000), b"answer");
    let _verdict = net.send_packet(g, &answer);
    net.run_for(SECOND);
    assert_eq!(net.payloads(c, 5000), [b"answer"], "no rule allows it, but the query was seen");
}

#[test]
fn a_route_without_gateways_leads_nowhere() {
    let mut net = SimNet::new(11);
    let c = net.add(client(&[], &[]));
    send(&mut net, c, 5000, b"query");
    assert_eq!(net.counter(c, "dropped_out_no_route"), 1);
}

#[test]
fn new_routes_leave_known_flows_and_rules_alone() {
    let mut net = SimNet::new(12);
    let g = net.add(gateway("g"));
    let dns = Rule { port: nebula_core::firewall::PortRange::Range(53, 53), ..Rule::any() };
    let c = net.add(client(&[("10.42.0.1", 1)], &[g]).config(|config| config.firewall.outbound = vec![dns]));
    send(&mut net, c, 5000, b"query");
    net.run_for(SECOND);
    net.control(c, |node, now| {
        node.reconfigure(now, |config| config.subnets = vec![route("192.168.0.0/16", &[("10.42.0.1", 1)])])
    });
    send(&mut net, c, 5000, b"query");
    let other_port = packets::udp(net.overlay(c), at("192.168.7.9"), (5000, 54), b"no rule for it");
    let _verdict = net.send_packet(c, &other_port);
    net.run_for(SECOND);
    assert_eq!((net.payloads(g, 53).len(), net.payloads(g, 54).len()), (2, 0));
    assert_eq!(net.counter(c, "dropped_out_no_rule"), 1);
}
