//! Both sides start at once.

use std::time::Duration;

use nebula_core::simulator::{HostId, SimNet};

fn race(seed: u64) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    let [a, b] = net.nodes(["a", "b"]);
    let _verdict = net.send_udp(a, b, (1, 2), b"from a");
    let _verdict = net.send_udp(b, a, (1, 2), b"from b");
    (net, a, b)
}

#[test]
fn both_handshakes_complete_and_nothing_is_lost() {
    let (mut net, a, b) = race(1);
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.payloads(a, 2), [b"from b"]);
    assert_eq!(net.payloads(b, 2), [b"from a"]);
    assert_eq!(net.tunnels(a).len(), 2);
    assert_eq!(net.tunnels(b).len(), 2);
}

#[test]
fn both_sides_settle_on_one_tunnel_and_the_other_dies() {
    let (mut net, a, b) = race(2);
    for _ in 0..60 {
        assert!(net.ping(a, b).is_answered_within(Duration::from_millis(500)), "{}", net.diagram());
        net.run_for(Duration::from_millis(500));
    }
    let (at_a, at_b) = (net.tunnels(a), net.tunnels(b));
    assert_eq!((at_a.len(), at_b.len()), (1, 1), "{}", net.diagram());
    assert_eq!(at_a[0].local_index.0, at_b[0].remote_index.0, "the same tunnel at both ends");
}
