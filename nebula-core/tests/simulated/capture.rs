//! Pods speak to Services and to each other by the addresses of their cluster.

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::FlowKey;
use nebula_core::capture::Target;
use nebula_core::counters::Direction;
use nebula_core::firewall::Rule;
use nebula_core::forward::Capture;
use nebula_core::simulator::{Cluster, HostId, HostSpec, Link, SimNet};
use nebula_core::{DropReason, Event, Outcome, TunnelDownReason, Verdict};

use crate::packets;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const PORT: u16 = 5000;

pub(crate) fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// Address of the `n`th pod.
pub(crate) fn pod(n: u8, v6: bool) -> IpAddr {
    if v6 { at(&format!("fd42::{n}")) } else { at(&format!("10.42.0.{n}")) }
}

/// A pod with an address of each family.
pub(crate) fn spec(name: &str, n: u8) -> HostSpec {
    HostSpec::new(name).networks(&[&format!("10.42.0.{n}/16"), &format!("fd42::{n}/64")])
}

/// The ClusterIP of the Service.
pub(crate) fn service(v6: bool) -> IpAddr {
    if v6 { at("fd96::7") } else { at("10.96.0.7") }
}

pub(crate) fn target(v6: bool, protocol: u8) -> Target {
    Target { address: service(v6), port: 80, protocol }
}

/// A cluster with these pods, whose Service has the ones in `endpoints`, on port 8080.
pub(crate) fn cluster(pods: &[u8], endpoints: &[u8]) -> Cluster {
    let mut cluster = Cluster::default();
    for v6 in [false, true] {
        pods.iter().for_each(|n| cluster.pod(pod(*n, v6), u64::from(*n)));
        serve(&mut cluster, v6, endpoints);
    }
    cluster
}

pub(crate) fn serve(cluster: &mut Cluster, v6: bool, endpoints: &[u8]) {
    let endpoints: Vec<_> = endpoints.iter().map(|n| (pod(*n, v6), 8080)).collect();
    for protocol in [packets::TCP, packets::UDP] {
        cluster.service(target(v6, protocol), &endpoints, endpoints.len() as u32, None);
    }
}

/// Pods that know each other, the first one under capture.
pub(crate) fn pods<const N: usize>(seed: u64, cluster: &Cluster) -> (SimNet, [HostId; N]) {
    let mut net = SimNet::new(seed);
    let mut number = 0;
    let hosts = [(); N].map(|()| {
        number += 1;
        net.add(spec(&format!("pod-{number}"), number))
    });
    for (a, b) in hosts.iter().flat_map(|a| hosts.iter().map(move |b| (*a, *b))).filter(|(a, b)| a != b) {
        net.introduce(a, b);
    }
    net.set_directory(hosts[0], cluster);
    (net, hosts)
}

pub(crate) fn udp(from: IpAddr, to: IpAddr, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    packets::ip(from, to, packets::UDP, &packets::udp_datagram(ports, payload))
}

/// Sends a datagram to the Service, lets the pod that gets it answer, and returns its number if the answer arrives.
fn ask(net: &mut SimNet, hosts: &[HostId], v6: bool, port: u16) -> Option<u8> {
    let (client, service) = (pod(1, v6), service(v6));
    for host in hosts {
        net.take_udp(*host);
    }
    let _verdict = net.send_packet(hosts[0], &udp(client, service, (port, 80), b"question"));
    net.run_for(SECOND);
    for (n, host) in (2..).zip(&hosts[1..]) {
        let Some(question) = net.take_udp(*host).pop() else { continue };
        assert_eq!((question.from, question.to, question.port), (client, pod(n, v6), 8080));
        let _verdict = net.send_packet(*host, &udp(pod(n, v6), client, (8080, port), b"answer"));
        net.run_for(SECOND);
        let answer = net.take_udp(hosts[0]).pop()?;
        assert_eq!((answer.from, answer.to, answer.port), (service, client, port));
        return Some(n);
    }
    None
}

#[test]
fn a_service_is_reached_by_its_address_and_answers_from_it() {
    let (mut net, hosts) = pods::<3>(1, &cluster(&[1, 2, 3], &[2, 3]));
    for v6 in [false, true] {
        let asked: Vec<_> = (0..20).filter_map(|n| ask(&mut net, &hosts, v6, PORT + n)).collect();
        assert_eq!(asked.len(), 20, "{}", net.diagram());
        assert!(asked.contains(&2) && asked.contains(&3), "{asked:?}");
        let again: Vec<_> = (0..20).filter_map(|n| ask(&mut net, &hosts, v6, PORT + n)).collect();
        assert_eq!(again, asked, "each flow keeps its endpoint");
    }
    assert_eq!(net.counter(hosts[0], "translated_flows"), 40);
    assert!(net.bypassed(hosts[0]).is_empty());
}

#[test]
fn a_service_is_reached_through_a_relay() {
    let mut net = SimNet::new(2);
    let lighthouse = net.add(HostSpec::new("lighthouse").networks(&["10.42.0.9/16"]).am_lighthouse());
    let relay = net.add(
        HostSpec::new("relay").networks(&["10.42.0.8/16"]).lighthouse(lighthouse).config(|it| it.relay.am_relay = true),
    );
    let at_relay = net.overlay(relay);
    let client =
        |name: &str, n| spec(name, n).lighthouse(lighthouse).config(move |config| config.relay.relays = vec![at_relay]);
    let hosts = [net.add(client("pod-1", 1)), net.add(client("pod-2", 2))];
    net.cut(hosts[0], hosts[1]);
    net.set_directory(hosts[0], &cluster(&[1, 2], &[2]));
    net.run_for(SECOND);
    assert_eq!(ask(&mut net, &hosts, false, PORT), Some(2), "{}", net.diagram());
    assert!(net.counter(relay, "relayed_datagrams") > 0);
}

#[test]
fn both_pods_may_be_captured_and_reach_each_other_directly() {
    let cluster = cluster(&[1, 2], &[2]);
    let (mut net, hosts) = pods::<2>(3, &cluster);
    net.set_directory(hosts[1], &cluster);
    for v6 in [false, true] {
        assert!(
            net.ping(hosts[0], hosts[1]).between(&pod(1, v6).to_string(), &pod(2, v6).to_string()).until_delivered()
                < SECOND
        );
        assert_eq!(ask(&mut net, &hosts, v6, PORT), Some(2));
    }
}

#[test]
fn when_an_endpoint_is_gone_its_connections_are_reset_and_others_go_elsewhere() {
    let mut known = cluster(&[1, 2, 3], &[2, 3]);
    let (mut net, hosts) = pods::<3>(4, &known);
    let syn = |port| packets::tcp(pod(1, false), service(false), (port, 80), packets::SYN);
    let data = |port| packets::tcp(pod(1, false), service(false), (port, 80), packets::ACK);
    for port in 0..10 {
        let _verdict = net.send_packet(hosts[0], &syn(PORT + port));
    }
    net.run_for(SECOND);
    let on_third = net.packets(hosts[2]).len();
    assert!((1..10).contains(&on_third) && net.packets(hosts[1]).len() + on_third == 10);
    known.remove(pod(3, false));
    serve(&mut known, false, &[2]);
    net.set_directory(hosts[0], &known);
    let mut resets = 0;
    for port in 0..10 {
        if net.send_packet(hosts[0], &data(PORT + port)) == Verdict::Drop(DropReason::EndpointGone) {
            let answer = net.packets(hosts[0]).last().expect("an answer");
            assert_eq!((&answer[12..20], answer[33]), (&[10, 96, 0, 7, 10, 42, 0, 1][..], packets::RST));
            resets += 1;
            assert_eq!(net.send_packet(hosts[0], &syn(PORT + port)), Verdict::Transmit, "the next connection");
        }
    }
    net.run_for(SECOND);
    assert_eq!(resets, on_third);
    assert_eq!(net.packets(hosts[2]).len(), on_third, "nothing is sent to the pod that is gone");
    assert_eq!(net.counter(hosts[0], "dropped_out_endpoint_gone"), resets as u64);
}

#[test]
fn a_pod_that_takes_over_an_address_gets_a_tunnel_of_its_own() {
    let mut known = cluster(&[1, 2], &[2]);
    let (mut net, [a, former]) = pods::<2>(5, &known);
    let _verdict = net.send_udp(a, former, (PORT, 9), b"for the former");
    net.run_for(SECOND);
    assert_eq!(net.payloads(former, 9).len(), 1);
    // The former pod still runs, and its tunnel is fine.
    let reborn = net.add(spec("pod-2-again", 2));
    net.introduce(a, reborn);
    net.introduce(reborn, a);
    known.pod(pod(2, false), 99);
    net.set_directory(a, &known);
    assert!(net.tunnels_to(a, reborn).is_empty(), "it closed at once");
    let replaced = |event: &&Event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::PeerReplaced, .. });
    assert_eq!(net.events(a).iter().filter(replaced).count(), 1);
    let _verdict = net.send_udp(a, reborn, (PORT, 9), b"for the new one");
    net.run_for(SECOND);
    assert_eq!(net.payloads(reborn, 9), [b"for the new one"], "{}", net.diagram());
    assert_eq!(net.payloads(former, 9).len(), 1);
}

#[test]
fn a_handshake_with_a_former_pod_does_not_lead_to_it_any_more() {
    let mut known = cluster(&[1, 2], &[2]);
    let (mut net, [a, former]) = pods::<2>(18, &known);
    // The answer of the former pod takes a while.
    net.set_link_between(a, former, Link { latency: SECOND, ..Link::default() });
    let _verdict = net.send_udp(a, former, (PORT, 9), b"waits");
    net.run_for(SECOND + SECOND / 2);
    let reborn = net.add(spec("pod-2-again", 2));
    net.introduce(a, reborn);
    known.pod(pod(2, false), 99);
    net.set_directory(a, &known);
    net.run_for(10 * SECOND);
    assert_eq!(net.payloads(reborn, 9), [b"waits"], "{}", net.diagram());
    assert!(net.payloads(former, 9).is_empty());
}

#[test]
fn a_new_pod_of_the_same_name_does_not_inherit_the_flows_of_the_former() {
    let mut net = SimNet::new(6);
    let a = net.add(spec("pod-1", 1).config(|config| config.firewall.inbound = Vec::new()));
    let former = net.add(spec("web-0", 2));
    net.introduce(a, former);
    net.introduce(former, a);
    let mut known = cluster(&[1, 2], &[2]);
    net.set_directory(a, &known);
    let _verdict = net.send_udp(a, former, (PORT, 53), b"question");
    net.run_for(SECOND);
    let _verdict = net.send_udp(former, a, (53, PORT), b"answer");
    net.run_for(SECOND);
    assert_eq!(net.payloads(a, PORT).len(), 1, "the firewall knows the flow");
    net.kill(former);
    let reborn = net.add(spec("web-0", 2));
    net.introduce(reborn, a);
    known.pod(pod(2, false), 99);
    net.set_directory(a, &known);
    let _verdict = net.send_udp(reborn, a, (53, PORT), b"not asked for");
    net.run_for(2 * SECOND);
    assert_eq!(net.payloads(a, PORT).len(), 1, "{}", net.diagram());
    assert!(net.counter(a, "dropped_in_no_rule") > 0);
}

#[test]
fn a_new_version_of_the_directory_disturbs_no_tunnel_of_a_pod_that_is_still_there() {
    let mut known = cluster(&[1, 2, 3], &[2]);
    let (mut net, hosts) = pods::<3>(7, &known);
    assert_eq!(ask(&mut net, &hosts, false, PORT), Some(2));
    let before: Vec<_> = net.tunnels(hosts[0]).iter().map(|tunnel| tunnel.local_index).collect();
    for n in 0..50 {
        known.pod(pod(3, false), 1000 + n);
        // A pod may be missing for a moment.
        if n == 20 {
            known.remove(pod(2, false));
        } else if n == 21 {
            known.pod(pod(2, false), 2);
        }
        serve(&mut known, false, &[2]);
        net.set_directory(hosts[0], &known);
    }
    let after: Vec<_> = net.tunnels(hosts[0]).iter().map(|tunnel| tunnel.local_index).collect();
    assert_eq!(before, after);
    assert_eq!(ask(&mut net, &hosts, false, PORT), Some(2));
    assert_eq!(net.counter(hosts[0], "translated_flows"), 1);
}

#[test]
fn packets_to_an_unknown_pod_wait_until_it_is_known_and_for_its_tunnel() {
    let mut known = cluster(&[1], &[]);
    let (mut net, [a, b]) = pods::<2>(8, &known);
    assert_eq!(net.send_udp(a, b, (PORT, 9), b"early"), Verdict::Punt);
    net.run_for(SECOND);
    assert!(net.payloads(b, 9).is_empty() && net.tunnels(a).is_empty());
    known.pod(pod(2, false), 2);
    net.set_directory(a, &known);
    net.run_for(SECOND);
    assert_eq!(net.payloads(b, 9), [b"early"]);
    assert_eq!((net.counter(a, "held_for_directory"), net.counter(a, "dropped_out_unknown_destination")), (1, 0));
}

#[test]
fn what_stays_unknown_is_dropped_after_a_moment_and_never_leaves_in_clear() {
    let mut known = cluster(&[1], &[]);
    let (mut net, [a, b]) = pods::<2>(9, &known);
    for n in 0..200_u8 {
        let _verdict = net.send_udp(a, b, (PORT, 9), &[n]);
    }
    assert_eq!(net.counter(a, "held_for_directory"), 64);
    assert_eq!(net.counter(a, "dropped_out_hold_full"), 136);
    // Another version that says nothing about it either.
    known.pod(pod(7, false), 7);
    net.set_directory(a, &known);
    net.run_for(Duration::from_millis(1900));
    assert_eq!(net.counter(a, "dropped_out_unknown_destination"), 0);
    net.run_for(SECOND);
    assert_eq!(net.counter(a, "dropped_out_unknown_destination"), 64);
    known.pod(pod(2, false), 2);
    net.set_directory(a, &known);
    net.run_for(SECOND);
    assert!(net.payloads(b, 9).is_empty() && net.bypassed(a).is_empty());
    assert_eq!(net.send_udp(a, b, (PORT, 9), b"now"), Verdict::Punt, "there is room again");
    net.run_for(SECOND);
    assert_eq!(net.payloads(b, 9), [b"now"]);
}

#[test]
fn packets_that_waited_leave_on_the_primary_network_once_that_is_known_to_be_right() {
    let mut known = cluster(&[1], &[]);
    let (mut net, [a, b]) = pods::<2>(10, &known);
    let packet = udp(pod(1, false), pod(2, false), (PORT, 9), b"x");
    assert_eq!(net.send_packet(a, &packet), Verdict::Punt);
    known.clear(pod(2, false));
    net.set_directory(a, &known);
    assert_eq!(net.bypassed(a), std::slice::from_ref(&packet));
    assert_eq!(net.send_packet(a, &packet), Verdict::Bypass);
    net.run_for(SECOND);
    assert_eq!((net.bypassed(a).len(), net.packets(b).len(), net.tunnels(a).len()), (2, 0, 0));
    assert_eq!(net.counter(a, "bypassed"), 2);
    // A pod that was enrolled meanwhile is not spoken to in clear any more.
    known.pod(pod(2, false), 2);
    net.set_directory(a, &known);
    assert_eq!(net.send_packet(a, &packet), Verdict::Punt);
    net.run_for(SECOND);
    assert_eq!((net.bypassed(a).len(), net.payloads(b, 9).len()), (2, 1));
}

#[test]
fn an_enrolled_pod_that_cannot_be_reached_is_not_spoken_to_in_clear() {
    let (mut net, [a, b]) = pods::<2>(11, &cluster(&[1, 2], &[2]));
    net.kill(b);
    for to in [pod(2, false), service(false)] {
        let _verdict = net.send_packet(a, &udp(pod(1, false), to, (PORT, 80), b"secret"));
    }
    net.run_for(60 * SECOND);
    assert!(net.bypassed(a).is_empty());
    assert!(net.flow().all(|step| !step.datagram.windows(6).any(|bytes| bytes == b"secret")));
    assert!(net.counter(a, "dropped_out_no_endpoint") > 0);
}

#[test]
fn packets_to_groups_are_neither_held_nor_let_out() {
    let (mut net, [a]) = pods::<1>(19, &cluster(&[1], &[]));
    for to in ["224.0.0.1", "255.255.255.255"] {
        let packet = udp(pod(1, false), at(to), (PORT, 5353), b"x");
        assert_eq!(net.send_packet(a, &packet), Verdict::Drop(DropReason::NoRoute));
    }
    let packet = udp(pod(1, true), at("ff02::2"), (PORT, 5353), b"x");
    assert_eq!(net.send_packet(a, &packet), Verdict::Drop(DropReason::NoRoute));
    assert_eq!(net.counter(a, "held_for_directory"), 0);
}

#[test]
fn everything_goes_on_with_the_last_directory_while_its_writer_is_away() {
    let (mut net, hosts) = pods::<3>(12, &cluster(&[1, 2, 3], &[2, 3]));
    let first = ask(&mut net, &hosts, false, PORT).expect("an answer");
    // More than the time after which an idle flow of datagrams is forgotten.
    for _ in 0..40 {
        net.run_for(30 * SECOND);
        assert_eq!(ask(&mut net, &hosts, false, PORT), Some(first));
    }
    assert!(ask(&mut net, &hosts, false, PORT + 1).is_some(), "a new flow");
}

#[test]
fn a_pod_reaches_itself_by_its_service() {
    for v6 in [false, true] {
        let (mut net, [a]) = pods::<1>(13, &cluster(&[1], &[1]));
        let (own, service) = (pod(1, v6), service(v6));
        assert_eq!(net.send_packet(a, &udp(own, service, (PORT, 80), b"question")), Verdict::Deliver);
        let question = net.take_udp(a).pop().expect("the question");
        assert_eq!((question.from, question.to, question.port), (service, own, 8080));
        assert_eq!(net.send_packet(a, &udp(own, service, (8080, PORT), b"answer")), Verdict::Deliver);
        let answer = net.take_udp(a).pop().expect("the answer");
        assert_eq!((answer.from, answer.to, answer.port, answer.payload), (service, own, PORT, b"answer".to_vec()));
        net.run_for(SECOND);
        assert_eq!(net.flow().count(), 0, "nothing left the pod");
    }
}

#[test]
fn flows_by_the_service_and_to_its_endpoint_from_one_port_stay_apart() {
    let (mut net, hosts) = pods::<2>(14, &cluster(&[1, 2], &[2]));
    let (client, server) = (pod(1, false), pod(2, false));
    assert_eq!(ask(&mut net, &hosts, false, PORT), Some(2));
    net.take_udp(hosts[0]);
    let _verdict = net.send_packet(hosts[0], &udp(client, server, (PORT, 8080), b"direct"));
    net.run_for(SECOND);
    let sent = net.packets(hosts[1]).last().expect("a packet").clone();
    let port = u16::from_be_bytes([sent[20], sent[21]]);
    assert_ne!(port, PORT, "the port is taken by the flow of the Service");
    for (to, from) in [(port, server), (PORT, service(false))] {
        let _verdict = net.send_packet(hosts[1], &udp(server, client, (8080, to), b"answer"));
        net.run_for(SECOND);
        let answer = net.take_udp(hosts[0]).pop().expect("an answer");
        assert_eq!((answer.from, answer.port), (from, PORT));
    }
}

#[test]
fn a_service_without_endpoints_refuses_and_one_outside_the_overlay_is_left_alone() {
    let mut known = cluster(&[1], &[]);
    known.clear_service(Target { address: at("10.96.0.10"), port: 53, protocol: packets::UDP });
    let (mut net, [a]) = pods::<1>(15, &known);
    let to_service = packets::tcp(pod(1, false), service(false), (PORT, 80), packets::SYN);
    assert_eq!(net.send_packet(a, &to_service), Verdict::Drop(DropReason::Refused));
    let answer = net.packets(a).last().expect("an answer");
    assert_eq!(answer[33], packets::RST | packets::ACK);
    let to_dns = udp(pod(1, false), at("10.96.0.10"), (PORT, 53), b"query");
    assert_eq!(net.send_packet(a, &to_dns), Verdict::Bypass);
    assert_eq!(net.bypassed(a), [to_dns]);
}

#[test]
fn a_pod_that_the_directory_does_not_show_yet_is_answered_in_its_tunnel() {
    let (mut net, [server, young]) = pods::<2>(20, &cluster(&[1], &[]));
    for v6 in [false, true] {
        let _verdict = net.send_packet(young, &udp(pod(2, v6), pod(1, v6), (PORT, 80), b"question"));
        net.run_for(SECOND);
        assert_eq!(net.take_udp(server).len(), 1);
        let answer = udp(pod(1, v6), pod(2, v6), (80, PORT), b"answer");
        assert_eq!(net.send_packet(server, &answer), Verdict::Transmit);
        net.run_for(SECOND);
        assert_eq!(net.take_udp(young).len(), 1, "{}", net.diagram());
        // What the server begins itself waits for the directory.
        let other = udp(pod(1, v6), pod(2, v6), (PORT, 9), b"x");
        assert_eq!(net.send_packet(server, &other), Verdict::Punt);
    }
    net.run_for(3 * SECOND);
    assert_eq!(net.counter(server, "dropped_out_unknown_destination"), 2);
    assert!(net.bypassed(server).is_empty());
}

#[test]
fn one_enrolled_endpoint_among_many_gets_its_part_of_a_service_and_no_more() {
    let mut known = cluster(&[1, 2], &[2]);
    for protocol in [packets::TCP, packets::UDP] {
        known.clear_endpoints(target(false, protocol), 9);
    }
    let (mut net, [a, b]) = pods::<2>(21, &known);
    let send = |net: &mut SimNet, ports: std::ops::Range<u16>| {
        for port in ports {
            let query = udp(pod(1, false), service(false), (port, 80), b"query");
            let _verdict = net.send_packet(a, &query);
        }
        net.run_for(SECOND);
        (net.bypassed(a).len(), net.take_udp(b).len())
    };
    let (bypassed, in_tunnel) = send(&mut net, 1..1001);
    assert_eq!(bypassed + in_tunnel, 1000);
    assert!((70..130).contains(&in_tunnel), "{in_tunnel} of 1000");
    // Each goes on as it began, also when half of the endpoints are enrolled.
    for protocol in [packets::TCP, packets::UDP] {
        known.clear_endpoints(target(false, protocol), 1);
    }
    net.set_directory(a, &known);
    assert_eq!(send(&mut net, 1..1001), (2 * bypassed, in_tunnel));
    assert!(net.bypassed(a).iter().all(|packet| packet.ends_with(b"query")), "as they were");
}

#[test]
fn the_servers_firewall_decides_about_the_client_and_the_endpoints_port() {
    let mut net = SimNet::new(16);
    let rule = |port| Rule {
        port: nebula_core::firewall::PortRange::Range(port, port),
        groups: vec!["clients".to_owned()],
        ..Rule::default()
    };
    let server = net.add(spec("server", 2).config(move |config| config.firewall.inbound = vec![rule(8080)]));
    let friend = net.add(spec("friend", 1).groups(&["clients"]).knows(server));
    let stranger = net.add(spec("stranger", 3).knows(server));
    let known = cluster(&[1, 2, 3], &[2]);
    for (client, number, passes) in [(friend, 1, 1), (stranger, 3, 0)] {
        net.set_directory(client, &known);
        net.take_udp(server);
        let _verdict = net.send_packet(client, &udp(pod(number, false), service(false), (PORT, 80), b"x"));
        net.run_for(SECOND);
        assert_eq!(net.take_udp(server).len(), passes);
    }
}

#[test]
fn a_trace_tells_what_capture_does_with_a_flow() {
    let mut known = cluster(&[1, 2, 3], &[2, 3]);
    known.clear(at("10.42.0.4"));
    let (mut net, hosts) = pods::<3>(17, &known);
    let flow = |remote, remote_port| FlowKey {
        local: pod(1, false),
        remote,
        local_port: PORT,
        remote_port,
        protocol: packets::UDP,
        fragment: false,
    };
    let trace = |net: &mut SimNet, direction, flow: FlowKey| {
        net.control(hosts[0], |node, now| node.trace(now, direction, &flow))
    };
    let outbound = Direction::Outbound;
    let before = trace(&mut net, outbound, flow(service(false), 80));
    let Some(Capture::Translated(wire)) = before.capture else { panic!("{before:?}") };
    assert_eq!(before.outcome, Outcome::WaitsForTunnel);
    assert_eq!(net.counter(hosts[0], "translated_flows"), 0, "a trace is no packet");
    let n = ask(&mut net, &hosts, false, PORT).expect("an answer");
    assert_eq!((wire.remote, wire.remote_port), (pod(n, false), 8080), "as it said");
    let after = trace(&mut net, outbound, flow(service(false), 80));
    assert_eq!((after.capture, after.outcome), (Some(Capture::Translated(wire)), Outcome::Passes));
    assert_eq!(trace(&mut net, Direction::Inbound, wire).back, Some(flow(service(false), 80)));
    for (remote, port, capture, outcome) in [
        (pod(2, false), 1, Capture::Peer, None),
        (at("10.42.0.4"), 1, Capture::Clear, Some(Outcome::Bypasses)),
        (at("10.42.0.5"), 1, Capture::Unknown, Some(Outcome::WaitsForDirectory)),
        (service(false), 81, Capture::Refused, Some(Outcome::Dropped(DropReason::Refused))),
    ] {
        let told = trace(&mut net, outbound, flow(remote, port));
        assert_eq!(told.capture, Some(capture), "{remote}:{port}");
        assert!(outcome.is_none_or(|outcome| outcome == told.outcome), "{told:?}");
    }
    assert_eq!(trace(&mut net, Direction::Inbound, flow(pod(2, false), 1)).capture, None);
}

#[test]
fn every_protocol_goes_to_pods_in_the_tunnel_and_sctp_to_services_too() {
    const GRE: u8 = 47;
    const ESP: u8 = 50;
    const SCTP: u8 = 132;
    let mut cluster = cluster(&[1, 2], &[2]);
    for v6 in [false, true] {
        cluster.service(target(v6, SCTP), &[(pod(2, v6), 8080)], 1, None);
    }
    let (mut net, hosts) = pods::<2>(1, &cluster);
    let echo = [8, 0, 0, 0, 0, 1, 0, 1];
    let sctp =
        |ports: (u16, u16)| [ports.0.to_be_bytes(), ports.1.to_be_bytes(), [0; 2], [7; 2], [0; 2], [0; 2]].concat();
    for v6 in [false, true] {
        let (from, to, address) = (pod(1, v6), pod(2, v6), service(v6));
        let icmp = if v6 { packets::ICMPV6 } else { packets::ICMP };
        for protocol in [GRE, ESP, icmp] {
            let packet = packets::ip(from, to, protocol, &echo);
            let _verdict = net.send_packet(hosts[0], &packet);
            net.run_for(SECOND);
            assert_eq!(net.packets(hosts[1]).last(), Some(&packet), "protocol {protocol}\n{}", net.diagram());
            let refused = net.send_packet(hosts[0], &packets::ip(from, address, protocol, &echo));
            assert_eq!(refused, Verdict::Drop(DropReason::Refused), "protocol {protocol}");
        }
        let _verdict = net.send_packet(hosts[0], &packets::ip(from, address, SCTP, &sctp((9, 80))));
        net.run_for(SECOND);
        assert_eq!(net.packets(hosts[1]).last(), Some(&packets::ip(from, to, SCTP, &sctp((9, 8080)))));
        let _verdict = net.send_packet(hosts[1], &packets::ip(to, from, SCTP, &sctp((8080, 9))));
        net.run_for(SECOND);
        assert_eq!(net.packets(hosts[0]).last(), Some(&packets::ip(address, from, SCTP, &sctp((80, 9)))));
    }
    assert!(net.bypassed(hosts[0]).is_empty());
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Ports are used again while flows of before are still known, and rules change meanwhile. Whoever may only ask gets
/// answers, and who may only be asked gives them: an answer whose question is not known would be lost.
#[test]
fn answers_come_back_whichever_ports_are_used_again() {
    for v6 in [false, true] {
        let known = cluster(&[1, 2, 3], &[1, 2, 3]);
        let (mut net, hosts) = pods::<3>(31, &known);
        hosts[1..].iter().for_each(|host| net.set_directory(*host, &known));
        let mut random = 7_u32;
        let mut next = |below: usize| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as usize % below
        };
        let (mut answered, mut may_ask, mut may_be_asked) = (0, true, true);
        for round in 0..6000 {
            if next(40) == 0 {
                (may_ask, may_be_asked) = [(true, true), (true, false), (false, true)][next(3)];
                let rules = |is_open: bool| if is_open { vec![Rule::any()] } else { Vec::new() };
                net.control(hosts[0], |node, now| {
                    node.reconfigure(now, |config| {
                        (config.firewall.outbound, config.firewall.inbound) = (rules(may_ask), rules(may_be_asked));
                    })
                });
            }
            net.run_for(Duration::from_millis(next(2000) as u64));
            let before: Vec<_> = hosts.iter().map(|host| net.packets(*host).len()).collect();
            let client = next(3);
            let (to, to_port) = match next(2) {
                0 => (service(v6), 80),
                _ => (pod(((client + 1 + next(2)) % 3 + 1) as u8, v6), 8080),
            };
            let port = PORT + next(20) as u16;
            let own = pod(client as u8 + 1, v6);
            let _verdict = net.send_packet(hosts[client], &udp(own, to, (port, to_port), b"question"));
            net.run_for(Duration::from_millis(30));
            let (at, what) = (if v6 { 40 } else { 20 }, format!("round {round}: {own}:{port} to {to}:{to_port}"));
            let ends = |packet: &[u8]| [0, 2].map(|n| u16::from_be_bytes([packet[at + n], packet[at + n + 1]]));
            let got: Vec<_> = (0..3).filter(|n| net.packets(hosts[*n]).len() > before[*n]).collect();
            let [server] = got[..] else {
                // Nobody got it: the first pod asked, or was asked, and may not.
                assert!(got.is_empty(), "{what}: {got:?}");
                assert!(!may_ask && client == 0 || !may_be_asked && client != 0, "{what}");
                continue;
            };
            if server == client {
                continue;
            }
            assert!(if client == 0 { may_ask } else { server != 0 || may_be_asked }, "{what}");
            let [wire_port, asked_port] = ends(net.packets(hosts[server]).last().expect("the question"));
            assert_eq!(asked_port, 8080, "{what}");
            let answer = udp(pod(server as u8 + 1, v6), own, (8080, wire_port), b"answer");
            let _verdict = net.send_packet(hosts[server], &answer);
            net.run_for(Duration::from_millis(20));
            let answers = net.packets(hosts[client])[before[client]..].to_vec();
            let [answer] = &answers[..] else { panic!("{what}: {} answers, {answered} before", answers.len()) };
            assert!(answer.ends_with(b"answer") && ends(answer) == [to_port, port], "{what}");
            let source = if v6 { &answer[8..24] } else { &answer[12..16] };
            assert_eq!(source, octets(to), "{what}");
            answered += 1;
        }
        assert!(answered > 2000, "{answered}");
    }
}
