//! A pod that is not enrolled gets the address of an enrolled one: nothing meant for the former leaves in clear.

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::capture::OpenedBefore;
use nebula_core::firewall::{PortRange, Rule};
use nebula_core::simulator::{Cluster, HostId, SimNet};
use nebula_core::{DropReason, FlowKey, Verdict};

use crate::capture::{PORT, SECOND, at, cluster, pod, pods, service, spec, target, udp};
use crate::packets;

const GONE: Verdict = Verdict::Drop(DropReason::EndpointGone);

/// Data of a connection of the first pod.
fn data(to: IpAddr, port: u16) -> Vec<u8> {
    let segment = packets::tcp_segment((port, 80), packets::ACK, (1001, 1), b"secret");
    packets::ip(pod(1, to.is_ipv6()), to, packets::TCP, &segment)
}

fn syn(to: IpAddr, port: u16) -> Vec<u8> {
    packets::tcp(pod(1, to.is_ipv6()), to, (port, 80), packets::SYN)
}

fn datagram(to: IpAddr, port: u16) -> Vec<u8> {
    udp(pod(1, to.is_ipv6()), to, (port, 9), b"secret")
}

/// The pod that has the address of `n` is not enrolled, or nobody has it.
fn leave(net: &mut SimNet, host: HostId, known: &mut Cluster, n: u8, next: bool) {
    for v6 in [false, true] {
        if next { known.clear(pod(n, v6)) } else { known.remove(pod(n, v6)) }
    }
    net.set_directory(host, known);
}

fn enrol(net: &mut SimNet, host: HostId, known: &mut Cluster, n: u8) {
    [false, true].iter().for_each(|v6| known.pod(pod(n, *v6), n.into()));
    net.set_directory(host, known);
}

#[test]
fn nothing_of_a_flow_from_a_tunnel_follows_an_address_that_is_reused_a_thousand_times() {
    let mut known = cluster(&[1, 2], &[]);
    let (mut net, [a, b]) = pods::<2>(1, &known);
    let mut bypassed = 0;
    for round in 0..1000_u16 {
        let v6 = round % 2 > 0;
        let (to, port) = (pod(2, v6), 2000 + round);
        let [first, connection, flow] = [syn(to, port), data(to, port), datagram(to, port)];
        for packet in [&first, &connection, &flow] {
            let _verdict = net.send_packet(a, packet);
        }
        net.run_for(SECOND);
        // In one step, or with a moment in which nobody has the address.
        if round % 3 == 0 {
            leave(&mut net, a, &mut known, 2, false);
            assert_ne!(net.send_packet(a, &flow), Verdict::Bypass);
        }
        leave(&mut net, a, &mut known, 2, true);
        for packet in [&connection, &flow, &connection, &flow] {
            assert_eq!(net.send_packet(a, packet), GONE, "round {round}");
        }
        // The pod is told at once.
        let [.., reset, unreachable] = net.packets(a) else { panic!("they are answered") };
        let (from, _, protocol, body) = packets::read(reset);
        assert_eq!((from, protocol, body[13] & packets::RST), (to, packets::TCP, packets::RST));
        assert_eq!(packets::read(unreachable).2, if v6 { packets::ICMPV6 } else { packets::ICMP });
        // Others may speak to the pod that is there now, and so may the same ports after another beginning.
        for packet in [syn(to, port + 20_000), datagram(to, port + 20_000), first, connection] {
            assert_eq!(net.send_packet(a, &packet), Verdict::Bypass, "round {round}");
            bypassed += 1;
        }
        assert_eq!(net.bypassed(a).len(), bypassed);
        enrol(&mut net, a, &mut known, 2);
    }
    assert_eq!(net.counter(a, "dropped_out_endpoint_gone"), 4000);
    assert!(net.packets(b).len() >= 3000, "{}", net.packets(b).len());
}

#[test]
fn a_flow_is_refused_for_as_long_as_it_is_used_and_a_connection_however_long_it_was_idle() {
    let mut known = cluster(&[1, 2], &[]);
    let (mut net, [a, _]) = pods::<2>(2, &known);
    for v6 in [false, true] {
        let to = pod(2, v6);
        for packet in [syn(to, PORT), data(to, PORT), datagram(to, PORT)] {
            let _verdict = net.send_packet(a, &packet);
        }
    }
    net.run_for(SECOND);
    leave(&mut net, a, &mut known, 2, true);
    for _ in 0..40 {
        net.run_for(100 * SECOND);
        assert!([false, true].iter().all(|v6| net.send_packet(a, &datagram(pod(2, *v6), PORT)) == GONE));
    }
    // More than an hour later.
    assert!([false, true].iter().all(|v6| net.send_packet(a, &data(pod(2, *v6), PORT)) == GONE));
    assert!(net.bypassed(a).is_empty());
    net.run_for(Duration::from_secs(361));
    assert_eq!(net.send_packet(a, &datagram(pod(2, false), PORT)), Verdict::Bypass, "another program's");
}

#[test]
fn an_answer_that_comes_too_late_does_not_leave_in_clear() {
    let mut known = cluster(&[1, 2], &[]);
    let (mut net, [a, b]) = pods::<2>(3, &known);
    for v6 in [false, true] {
        let _verdict = net.send_packet(b, &udp(pod(2, v6), pod(1, v6), (PORT, 53), b"question"));
        net.run_for(SECOND);
        assert_eq!(net.take_udp(a).len(), 1);
    }
    leave(&mut net, a, &mut known, 2, false);
    leave(&mut net, a, &mut known, 2, true);
    for v6 in [false, true] {
        let answer = udp(pod(1, v6), pod(2, v6), (53, PORT), b"answer");
        assert_eq!(net.send_packet(a, &answer), GONE);
    }
    assert!(net.bypassed(a).is_empty());
}

#[test]
fn no_fragment_of_a_refused_flow_leaves_in_clear() {
    let mut known = cluster(&[1, 2], &[]);
    let (mut net, [a, _]) = pods::<2>(4, &known);
    let [from, to] = [1, 2].map(|n| pod(n, false));
    let datagram = packets::udp_datagram((PORT, 9), &[7; 100]);
    let parts = [(0x2000, &datagram[..64]), (8, &datagram[64..])];
    let parts = parts.map(|(field, body)| packets::ip_fragment(from, to, packets::UDP, field, body));
    for part in &parts {
        let _verdict = net.send_packet(a, part);
    }
    net.run_for(SECOND);
    leave(&mut net, a, &mut known, 2, true);
    assert_eq!(net.send_packet(a, &parts[0]), GONE);
    assert_eq!(net.send_packet(a, &parts[1]), Verdict::Drop(DropReason::FragmentWithoutFirst));
    // The last one first.
    net.run_for(60 * SECOND);
    assert_eq!(net.send_packet(a, &parts[1]), Verdict::Drop(DropReason::FragmentWithoutFirst));
    assert!(net.bypassed(a).is_empty());
}

#[test]
fn connections_from_before_a_restart_are_refused_if_their_pod_is_gone_meanwhile() {
    let mut known = cluster(&[1, 2, 3], &[]);
    let mut net = SimNet::new(5);
    let a = net.add(spec("pod-1", 1));
    known.remove(pod(2, false));
    known.clear(at("10.42.0.4"));
    net.set_directory(a, &known);
    let before = |remote: IpAddr, protocol: u8, remote_port: u16| FlowKey {
        local: pod(1, false),
        remote,
        local_port: PORT,
        remote_port,
        protocol,
        fragment: false,
    };
    // The table that the next instance finds does not have the second pod any more; the third is there, the fourth is
    // not enrolled.
    let flows: Vec<OpenedBefore> = [2, 3, 4]
        .map(|n| pod(n, false))
        .iter()
        .flat_map(|to| [before(*to, packets::TCP, 80).into(), before(*to, packets::UDP, 9).into()])
        .collect();
    net.control(a, |node, now| node.resume_flows(now, &flows));
    [2, 3].iter().for_each(|n| known.clear(pod(*n, false)));
    net.set_directory(a, &known);
    for n in [2, 3] {
        assert_eq!(net.send_packet(a, &data(pod(n, false), PORT)), GONE);
        assert_eq!(net.send_packet(a, &datagram(pod(n, false), PORT)), GONE);
    }
    assert_eq!(net.send_packet(a, &data(pod(4, false), PORT)), Verdict::Bypass, "it was in clear");
    assert_eq!(net.bypassed(a).len(), 1);
}

#[test]
fn a_service_whose_last_enrolled_endpoint_left_while_nobody_looked_takes_over_no_connection() {
    let mut known = cluster(&[1, 2], &[2]);
    let mut net = SimNet::new(6);
    let a = net.add(spec("pod-1", 1));
    // Of its endpoint nothing is known when the next instance starts.
    let mut unknown = cluster(&[1], &[]);
    [packets::TCP, packets::UDP].iter().for_each(|protocol| unknown.unknown_service(target(false, *protocol)));
    net.set_directory(a, &unknown);
    let flow = |protocol| FlowKey {
        local: pod(1, false),
        remote: service(false),
        local_port: PORT,
        remote_port: 80,
        protocol,
        fragment: false,
    };
    net.control(a, |node, now| node.resume_flows(now, &[flow(packets::TCP).into(), flow(packets::UDP).into()]));
    known.clear(pod(2, false));
    [packets::TCP, packets::UDP].iter().for_each(|protocol| known.clear_service(target(false, *protocol)));
    net.set_directory(a, &known);
    assert_eq!(net.send_packet(a, &data(service(false), PORT)), GONE);
    assert_eq!(net.send_packet(a, &udp(pod(1, false), service(false), (PORT, 80), b"secret")), GONE);
    assert!(net.bypassed(a).is_empty());
    assert_eq!(net.send_packet(a, &syn(service(false), PORT)), Verdict::Bypass, "the next connection");
}

#[test]
fn beyond_what_is_remembered_a_flow_that_may_have_been_in_a_tunnel_is_refused() {
    let mut known = cluster(&[1, 2, 3], &[]);
    known.clear(at("10.42.0.4"));
    let mut net = SimNet::new(7);
    let any = Rule { port: PortRange::Any, ..Rule::default() };
    let a = net.add(spec("pod-1", 1).config(move |config| {
        config.firewall.max_flows = 64;
        config.firewall.outbound = vec![any];
    }));
    net.set_directory(a, &known);
    assert_eq!(net.send_packet(a, &syn(at("10.42.0.4"), PORT)), Verdict::Bypass);
    for port in 1..500 {
        let _verdict = net.send_packet(a, &data(pod(2, false), port));
        let _verdict = net.send_packet(a, &datagram(pod(3, false), port));
    }
    [2, 3].iter().for_each(|n| known.clear(pod(*n, false)));
    net.set_directory(a, &known);
    for port in 1..500 {
        assert_eq!(net.send_packet(a, &data(pod(2, false), port)), GONE);
        assert_eq!(net.send_packet(a, &datagram(pod(3, false), port)), GONE);
    }
    assert!(net.bypassed(a).len() == 1);
    assert_eq!(net.send_packet(a, &data(at("10.42.0.4"), PORT)), Verdict::Bypass, "it began in clear");
    assert_eq!(net.send_packet(a, &syn(pod(2, false), 7)), Verdict::Bypass, "another connection");
    net.run_for(361 * SECOND);
    assert_eq!(net.send_packet(a, &datagram(pod(3, false), 501)), Verdict::Bypass);
}
