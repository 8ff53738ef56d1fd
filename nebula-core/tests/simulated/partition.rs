//! Hosts that cannot hear each other for a while.

use std::time::Duration;

use nebula_cert::Version;
use nebula_core::Event;
use nebula_core::simulator::SimNet;

#[test]
fn a_partition_shorter_than_dead_peer_detection_costs_no_handshake() {
    let mut net = SimNet::new(3);
    net.set_post_quantum(nebula_core::PostQuantum::Off);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(10));
    net.cut(a, b);
    for _ in 0..8 {
        assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(1)));
    }
    net.heal(a, b);
    assert!(net.ping(a, b).is_answered_within(Duration::from_secs(1)));
    net.run_for(Duration::from_secs(30));
    assert_eq!(net.flow().filter(|step| step.datagram[0] == 0x10).count(), 2, "{}", net.diagram());
}

#[test]
fn a_partition_in_the_middle_of_a_new_handshake_does_not_end_the_old_tunnel() {
    let mut net = SimNet::new(4);
    net.set_post_quantum(nebula_core::PostQuantum::Off);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let old = net.tunnels(a)[0].local_index;
    let identity = net.renewed_identity(a, &[Version::V2]);
    net.control(a, |node, now| node.reconfigure(now, |config| config.identity = identity));
    // Cut while the first message for the new tunnel is in flight.
    while net.flow().filter(|step| step.datagram[0] == 0x10).count() < 3 {
        let _verdict = net.send_udp(a, b, (1, 2), b"traffic");
        let _verdict = net.send_udp(b, a, (1, 2), b"traffic");
        net.run_for(Duration::from_millis(2));
    }
    net.cut(a, b);
    net.run_for(Duration::from_secs(7));
    assert!(net.events(a).iter().any(|event| matches!(event, Event::HandshakeTimedOut { .. })), "{}", net.diagram());
    net.heal(a, b);
    // The peer first replies through the new tunnel, which this side does not know; a recv_error makes it return to the
    // old one.
    assert!(net.ping(a, b).until_delivered() < Duration::from_secs(2));
    assert_eq!(net.tunnels(a)[0].local_index, old);
    assert_eq!(net.ping(a, b).train(40, Duration::from_millis(500)), 40);
    net.run_for(Duration::from_secs(30));
    let tunnels = net.tunnels(a);
    assert_eq!(tunnels.len(), 1);
    assert_ne!(tunnels[0].local_index, old, "the successor came later");
}
