//! Who is told that a tunnel does not exist, and who is believed.

use std::net::SocketAddr;
use std::time::Duration;

use nebula_core::config::RecvErrorPolicy;
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{Origin, Punt};

const SECOND: Duration = Duration::from_secs(1);

fn frame(kind: u8, subtype: u8, index: u32, counter: u64) -> Vec<u8> {
    let mut frame = vec![0x10 | kind, subtype, 0, 0];
    frame.extend(index.to_be_bytes());
    frame.extend(counter.to_be_bytes());
    frame.extend([7; 32]);
    frame
}

fn stranger() -> SocketAddr {
    "192.0.2.66:666".parse().expect("an address")
}

/// The datagrams that `host` sends in answer to a stranger.
fn answers(net: &mut SimNet, host: HostId, from: SocketAddr, datagram: &[u8]) -> Vec<Vec<u8>> {
    let before = net.elapsed();
    let at = net.underlay(host);
    net.inject(from, at, datagram);
    net.run_for(SECOND / 2);
    net.flow().filter(|step| step.at > before && step.to == from).map(|step| step.datagram.clone()).collect()
}

#[test]
fn every_authenticated_type_with_an_unknown_index_is_answered_with_that_index() {
    let mut net = SimNet::new(1);
    let host = net.add(HostSpec::new("host"));
    for (kind, subtype) in [(1, 0), (3, 0), (4, 0), (4, 1), (5, 0), (6, 0)] {
        let answers = answers(&mut net, host, stranger(), &frame(kind, subtype, 0x0102_0304, 9));
        assert_eq!(answers, [[0x12, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0]], "type {kind}/{subtype}");
    }
}

#[test]
fn handshakes_recv_errors_and_unknown_types_are_not_answered() {
    let mut net = SimNet::new(2);
    let host = net.add(HostSpec::new("host"));
    for (kind, subtype) in [(0, 0), (0, 1), (2, 0), (1, 2), (3, 1), (4, 2), (5, 1), (6, 1), (7, 0), (15, 15)] {
        let answers = answers(&mut net, host, stranger(), &frame(kind, subtype, 0x0102_0304, 2));
        assert_eq!(answers, Vec::<Vec<u8>>::new(), "type {kind}/{subtype}");
    }
    let mut other_version = frame(1, 0, 7, 9);
    other_version[0] = 0x21;
    assert_eq!(answers(&mut net, host, stranger(), &other_version), Vec::<Vec<u8>>::new());
}

#[test]
fn recv_errors_go_only_to_configured_addresses() {
    let private: SocketAddr = "10.9.8.7:666".parse().unwrap();
    let policies =
        [(RecvErrorPolicy::Always, [1, 1]), (RecvErrorPolicy::Private, [0, 1]), (RecvErrorPolicy::Never, [0, 0])];
    for (policy, expected) in policies {
        let mut net = SimNet::new(3);
        let host = net.add(HostSpec::new("host").config(move |config| config.send_recv_error = policy));
        let counts = [stranger(), private].map(|from| answers(&mut net, host, from, &frame(1, 0, 7, 9)).len());
        assert_eq!(counts, expected, "{policy:?}: to a public and to a private address");
    }
}

#[test]
fn a_repeated_or_forged_frame_of_a_live_tunnel_provokes_no_recv_error() {
    let mut net = SimNet::new(4);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let seen = net.flow().rfind(|step| step.sender == "a").unwrap().clone();
    assert!(answers(&mut net, b, stranger(), &seen.datagram).is_empty(), "repeated");
    let index = net.tunnels(b)[0].local_index.0;
    assert!(answers(&mut net, b, stranger(), &frame(1, 0, index, 99)).is_empty(), "forged");
    assert!(net.ping(a, b).is_answered_within(SECOND));
}

#[test]
fn a_recv_error_takes_down_only_the_tunnel_it_names() {
    let mut net = SimNet::new(5);
    let [a, b] = net.nodes(["a", "b"]);
    // Both start a handshake at once, so that there are two tunnels.
    let _verdict = net.send_udp(a, b, (1, 2), b"from a");
    let _verdict = net.send_udp(b, a, (1, 2), b"from b");
    net.run_for(SECOND);
    let tunnels = net.tunnels(a);
    assert_eq!(tunnels.len(), 2);
    let named = tunnels.iter().find(|tunnel| tunnel.primary).unwrap();
    let error = &frame(2, 0, named.remote_index.0, 0)[..16];
    net.inject(net.underlay(b), net.underlay(a), error);
    net.run_for(SECOND / 10);
    let left = net.tunnels(a);
    assert_eq!(left.len(), 1);
    assert_ne!(left[0].local_index, named.local_index);
    assert!(left[0].primary, "the other one takes over");
    assert!(net.ping(a, b).is_answered_within(SECOND), "without a handshake: {}", net.diagram());
}

#[test]
fn data_that_waited_while_its_tunnel_was_made_does_not_end_the_tunnel() {
    let mut net = SimNet::new(14);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let (from, index) = (Origin::Direct(net.underlay(b)), net.tunnels_to(a, b)[0].local_index.0);
    net.control(a, |node, now| node.handle_punt(now, Punt::UnknownIndex { from, index }));
    net.run_for(SECOND);
    assert_eq!(net.counter(b, "recv_errors_in"), 0);
    assert_eq!(net.tunnels_to(b, a).len(), 1);
}
