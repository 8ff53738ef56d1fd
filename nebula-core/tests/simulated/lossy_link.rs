//! Links that lose, delay, reorder and repeat.

use std::time::Duration;

use nebula_cert::Version;
use nebula_core::simulator::{Link, SimNet};
use nebula_core::{Event, TunnelDownReason};

#[test]
fn a_tunnel_comes_up_over_a_link_that_loses_a_third() {
    for seed in 0..20 {
        let mut net = SimNet::new(seed);
        net.set_link(Link { loss: 33, ..Link::default() });
        let [a, b] = net.nodes(["a", "b"]);
        net.ping(a, b).until_delivered();
    }
}

#[test]
fn reordered_and_repeated_datagrams_are_each_delivered_once() {
    for seed in 0..5 {
        let mut net = SimNet::new(seed);
        net.set_link(Link { jitter: Duration::from_millis(200), duplicate: 50, ..Link::default() });
        let [a, b] = net.nodes(["a", "b"]);
        net.ping(a, b).until_delivered();
        for number in 0..200_u8 {
            let _verdict = net.send_udp(a, b, (1, 2), &[number]);
            net.run_for(Duration::from_millis(1));
        }
        net.run_for(Duration::from_secs(2));
        let mut payloads = net.payloads(b, 2);
        assert!(!payloads.is_sorted(), "the link was to reorder");
        payloads.sort();
        assert_eq!(payloads, (0..200_u8).map(|number| vec![number]).collect::<Vec<_>>(), "seed {seed}");
        assert!(net.counter(b, "dropped_in_replayed") > 0, "the link was to repeat");
    }
}

#[test]
fn datagrams_above_the_mtu_are_lost_and_do_no_harm() {
    let mut net = SimNet::new(1);
    let [a, b] = net.nodes(["a", "b"]);
    net.set_link(Link { mtu: Some(1400), ..Link::default() });
    net.ping(a, b).until_delivered();
    let _verdict = net.send_udp(a, b, (1, 2), &[0; 1372]);
    let _verdict = net.send_udp(a, b, (1, 2), &[0; 1300]);
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.payloads(b, 2), [vec![0; 1300]]);
}

#[test]
fn a_black_hole_for_big_datagrams_does_not_end_a_tunnel() {
    let mut net = SimNet::new(5);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let before = net.tunnels(a)[0].local_index;
    net.set_link_between(a, b, Link { mtu: Some(1200), ..Link::default() });
    for _ in 0..60 {
        let _verdict = net.send_udp(a, b, (1, 2), &[0; 1250]);
        net.run_for(Duration::from_secs(1));
    }
    assert_eq!(net.payloads(b, 2).len(), 0);
    assert_eq!(net.tunnels(a)[0].local_index, before, "the probe is small and is answered");
    assert!(net.ping(a, b).is_answered_within(Duration::from_secs(1)));
}

#[test]
fn a_handshake_whose_datagrams_arrive_twice_makes_one_tunnel() {
    for seed in 0..10 {
        let mut net = SimNet::new(seed);
        let [a, b] = net.nodes(["a", "b"]);
        net.set_link(Link { duplicate: 100, jitter: Duration::from_millis(50), ..Link::default() });
        net.ping(a, b).until_delivered();
        net.run_for(Duration::from_secs(1));
        assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (1, 1), "seed {seed}\n{}", net.diagram());
    }
}

#[test]
fn datagrams_that_overtake_each_other_across_a_renewal_each_arrive_once() {
    for seed in 0..5 {
        let mut net = SimNet::new(seed);
        let [a, b] = net.nodes(["a", "b"]);
        net.ping(a, b).until_delivered();
        net.set_link(Link { jitter: Duration::from_millis(300), duplicate: 30, ..Link::default() });
        for number in 0..1200_u16 {
            if number % 400 == 100 {
                let identity = net.renewed_identity(a, &[Version::V2]);
                net.control(a, |node, now| node.reconfigure(now, |config| config.identity = identity));
            }
            let _verdict = net.send_udp(a, b, (1, 2), &number.to_be_bytes());
            let _verdict = net.send_udp(b, a, (1, 2), b"so that the tunnel counts as alive");
            net.run_for(Duration::from_millis(20));
        }
        net.run_for(Duration::from_secs(1));
        let mut arrived = net.payloads(b, 2);
        arrived.sort();
        assert!(
            arrived == (0..1200_u16).map(|number| number.to_be_bytes().to_vec()).collect::<Vec<_>>(),
            "seed {seed}"
        );
        let lost = |event: &&Event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::RecvError, .. });
        assert_eq!(net.events(b).iter().filter(lost).count(), 0, "data that overtook message 2 ended the tunnel");
        let renewed = net.events(b).iter().filter(|event| matches!(event, Event::TunnelUp { .. })).count();
        assert!(renewed >= 4, "{renewed} tunnels");
    }
}

#[test]
fn a_handshake_completes_over_a_path_of_four_seconds() {
    let mut net = SimNet::new(7);
    let [a, b] = net.nodes(["a", "b"]);
    net.set_link(Link { latency: Duration::from_secs(2), ..Link::default() });
    assert!(net.ping(a, b).is_answered_within(Duration::from_secs(13)), "{}", net.diagram());
    net.run_for(Duration::from_secs(20));
    assert_eq!(
        (net.tunnels(a).len(), net.tunnels(b).len()),
        (1, 1),
        "ten copies of the first message are one handshake"
    );
}

#[test]
fn an_answer_after_the_handshake_was_given_up_makes_no_tunnel() {
    let mut net = SimNet::new(8);
    let [a, b] = net.nodes(["a", "b"]);
    net.set_link(Link { latency: Duration::from_secs(3), ..Link::default() });
    let _verdict = net.send_udp(a, b, (1, 2), b"too far");
    net.run_for(Duration::from_secs(60));
    assert!(net.tunnels(a).is_empty());
    assert!(net.tunnels(b).is_empty(), "what the responder made of it is given up, too");
    assert!(net.counter(a, "dropped_in_bad_handshake") > 0);
}
