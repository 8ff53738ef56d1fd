//! A directory that says where peers probably are, for when no lighthouse does.

use std::net::SocketAddr;
use std::time::Duration;

use nebula_core::simulator::{Cluster, HostId, HostSpec, SimNet, Step};

use crate::capture::{SECOND, pod, spec};
use crate::packets;

/// A lighthouse and two pods that use it; the directory has both.
fn net() -> (SimNet, HostId, [HostId; 2], Cluster) {
    let mut net = SimNet::new(1);
    let lighthouse = net.add(HostSpec::new("lighthouse").networks(&["10.42.0.9/16"]).am_lighthouse());
    let pods = [1, 2].map(|n| net.add(spec(&format!("pod-{n}"), n).lighthouse(lighthouse)));
    let mut cluster = Cluster::default();
    [1, 2].iter().for_each(|n| cluster.pod(pod(*n, false), u64::from(*n)));
    (net, lighthouse, pods, cluster)
}

/// How long a datagram from the first pod to the second is on its way, at most `patience`.
fn reaches(net: &mut SimNet, [a, b]: [HostId; 2], patience: Duration) -> Option<Duration> {
    let began = net.now();
    let datagram = packets::ip(pod(1, false), pod(2, false), packets::UDP, &packets::udp_datagram((9, 9), b"question"));
    let _verdict = net.send_packet(a, &datagram);
    while net.now() < began + patience {
        net.run_for(SECOND / 100);
        if net.take_udp(b).pop().is_some() {
            return Some(net.now() - began);
        }
    }
    None
}

#[test]
fn without_a_lighthouse_a_peer_is_found_where_the_directory_expects_it() {
    let (mut net, lighthouse, pods, mut cluster) = net();
    net.kill(lighthouse);
    net.set_directory(pods[0], &cluster);
    assert_eq!(reaches(&mut net, pods, 20 * SECOND), None, "nobody says where it is");
    cluster.likely(pod(2, false), &[net.underlay(pods[1])]);
    net.set_directory(pods[0], &cluster);
    let took = reaches(&mut net, pods, 20 * SECOND).expect("the peer is found");
    assert!(took < SECOND, "{took:?}");
}

#[test]
fn another_host_at_the_expected_endpoint_gets_nothing_and_is_not_asked_again() {
    let (mut net, lighthouse, pods, mut cluster) = net();
    let stranger = net.add(spec("pod-3", 3).lighthouse(lighthouse));
    net.run_for(SECOND);
    net.kill(lighthouse);
    let wrong = net.underlay(stranger);
    cluster.likely(pod(2, false), &[wrong]);
    net.set_directory(pods[0], &cluster);
    assert_eq!(reaches(&mut net, pods, 20 * SECOND), None);
    assert!(net.packets(stranger).is_empty());
    let handshakes = sent_to(&net, wrong).filter(|step| step.sender == "pod-1" && step.datagram[0] & 0xf == 0);
    assert_eq!(handshakes.count(), 1, "{}", net.diagram());
    // It has the port that the pod looked for first, so the pod has the next one.
    cluster.likely(pod(2, false), &[wrong, net.underlay(pods[1])]);
    net.set_directory(pods[0], &cluster);
    assert!(reaches(&mut net, pods, 20 * SECOND).is_some(), "{}", net.diagram());
    assert!(net.packets(stranger).is_empty());
}

#[test]
fn where_a_lighthouse_answers_the_directory_is_not_asked() {
    let (mut net, _, pods, mut cluster) = net();
    let elsewhere = "192.0.2.200:61000".parse().expect("an endpoint");
    cluster.likely(pod(2, false), &[elsewhere]);
    net.set_directory(pods[0], &cluster);
    net.run_for(SECOND);
    assert!(reaches(&mut net, pods, SECOND).is_some());
    assert_eq!(sent_to(&net, elsewhere).count(), 0);
}

#[test]
fn endpoints_of_the_directory_keep_to_the_rules_for_reported_ones() {
    for (forced, endpoint) in
        [(true, "192.0.2.200:61000"), (false, "127.0.0.1:61000"), (false, "10.42.0.2:61000"), (false, "192.0.2.200:0")]
    {
        let (mut net, lighthouse, pods, mut cluster) = net();
        net.kill(lighthouse);
        cluster.likely(pod(2, false), &[endpoint.parse().expect("an endpoint")]);
        net.set_directory(pods[0], &cluster);
        net.control(pods[0], |node, now| node.reconfigure(now, |config| config.relay.force = forced));
        assert_eq!(reaches(&mut net, pods, 5 * SECOND), None);
        assert_eq!(sent_to(&net, endpoint.parse().expect("an endpoint")).count(), 0, "{endpoint}");
    }
}

fn sent_to(net: &SimNet, to: SocketAddr) -> impl Iterator<Item = &Step> {
    net.flow().filter(move |step| step.to == to)
}
