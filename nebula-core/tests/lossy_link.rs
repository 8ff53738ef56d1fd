//! Links that lose, delay, reorder and repeat.

use std::time::Duration;

use nebula_core::simulator::{Link, SimNet};

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
