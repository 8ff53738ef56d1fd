//! What peers may not do with relay control messages.

use std::net::IpAddr;
use std::time::Duration;

use nebula_cert::Version;
use nebula_core::Punt;
use nebula_core::internals::header::{Header, MessageType};
use nebula_core::internals::messages::{Control, ControlKind};
use nebula_core::simulator::{HostId, HostSpec, SimNet};

/// A relay, an untrustworthy peer, and a victim; both have tunnels with the relay.
fn relay_with_peers(seed: u64) -> (SimNet, [HostId; 3]) {
    let mut net = SimNet::new(seed);
    let relay = net.add(HostSpec::new("relay").config(|config| config.relay.am_relay = true));
    let peers = ["peer", "victim"].map(|name| net.add(HostSpec::new(name).knows(relay)));
    for peer in peers {
        net.ping(peer, relay).until_delivered();
    }
    (net, [relay, peers[0], peers[1]])
}

fn request(index: u32, from: IpAddr, to: IpAddr) -> Control {
    let kind = ControlKind::CreateRelayRequest;
    Control { kind, version: Version::V2, initiator_index: index, responder_index: 0, from, to }
}

/// Makes `host` handle a message as if `sender` had sent it.
fn tell(net: &mut SimNet, host: HostId, sender: HostId, message: Control) {
    let (tunnel, from) = (net.tunnels_to(host, sender)[0].local_index, net.underlay(sender).into());
    let (kind, plaintext) = (MessageType::Control, message.encode().expect("version 2 names everything"));
    net.control(host, |node, now| node.handle_punt(now, Punt::Message { tunnel, from, kind, plaintext }));
}

fn hops(net: &SimNet, host: HostId) -> usize {
    net.table_sizes(host).relay_hops
}

#[test]
fn a_relay_request_must_name_the_peer_itself_and_another_host() {
    let (mut net, [relay, peer, victim]) = relay_with_peers(1);
    let [r, p, v] = [relay, peer, victim].map(|host| net.overlay(host));
    let stranger = "10.42.9.9".parse().unwrap();
    for (from, to) in [(v, p), (stranger, v), (r, v), (p, p), (p, r), (r, r)] {
        tell(&mut net, relay, peer, request(7, from, to));
        assert_eq!(hops(&net, relay), 0, "{from} to {to}");
    }
    tell(&mut net, relay, peer, request(0, p, v));
    assert_eq!(hops(&net, relay), 0, "0 is no index");
    assert_eq!(net.counter(relay, "dropped_in_relay"), 7);
    tell(&mut net, relay, peer, request(7, p, v));
    net.run_for(Duration::from_secs(1));
    assert_eq!(hops(&net, relay), 2);
}

#[test]
fn an_unrequested_relay_response_changes_nothing() {
    let (mut net, [relay, peer, victim]) = relay_with_peers(2);
    let [p, v] = [peer, victim].map(|host| net.overlay(host));
    let answer = |index| Control {
        kind: ControlKind::CreateRelayResponse,
        initiator_index: index,
        responder_index: 9,
        ..request(0, p, v)
    };
    tell(&mut net, relay, peer, answer(1));
    assert_eq!((hops(&net, relay), net.counter(relay, "dropped_in_relay")), (0, 1));
    // The peer answers for the victim's hop.
    net.cut(relay, victim);
    tell(&mut net, relay, peer, request(7, p, v));
    net.run_for(Duration::from_millis(100));
    let before = net.flow().count();
    for index in 0..1000 {
        tell(&mut net, relay, peer, answer(index));
    }
    assert_eq!(net.flow().count(), before, "nobody is told that the relay is ready");
}

#[test]
fn a_peer_causes_few_handshakes_with_strangers() {
    let (mut net, [relay, peer, _]) = relay_with_peers(3);
    let p = net.overlay(peer);
    for n in 0..10_000_u32 {
        tell(&mut net, relay, peer, request(7, p, IpAddr::V4((0x0a2b_0000 + n).into())));
    }
    assert!(net.table_sizes(relay).pending <= 32, "{}", net.table_sizes(relay).pending);
    assert_eq!(hops(&net, relay), 0);
}

#[test]
fn a_relay_that_claims_to_reach_everybody_takes_bounded_memory() {
    let (mut net, [relay, peer, _]) = relay_with_peers(4);
    let p = net.overlay(peer);
    for n in 0..10_000_u32 {
        tell(&mut net, peer, relay, request(7, IpAddr::V4((0x0a2b_0000 + n).into()), p));
    }
    assert_eq!(hops(&net, peer), 1024);
    net.control(peer, |node, now| node.close_all(now));
    assert_eq!(hops(&net, peer), 0);
}

#[test]
fn a_frame_for_the_hop_of_another_peer_is_refused() {
    let (mut net, [relay, peer, victim]) = relay_with_peers(5);
    let [p, v] = [peer, victim].map(|host| net.overlay(host));
    net.cut(peer, victim);
    tell(&mut net, relay, peer, request(7, p, v));
    net.run_for(Duration::from_secs(1));
    let response = net.flow().filter(|step| step.sender == "relay" && step.receiver.as_deref() == Some("peer"));
    assert!(response.count() > 0);
    let passed = net.counter(relay, "relayed_datagrams");
    let (from, to) = (net.underlay(peer), net.underlay(relay));
    // Without the key of the tunnel, knowing an index is of no use.
    for index in 0..2000 {
        let header = Header { kind: MessageType::Relay, index, counter: 1 << 40 };
        net.inject(from, to, &[header.to_bytes().as_slice(), &[0; 64]].concat());
    }
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.counter(relay, "relayed_datagrams"), passed);
}

#[test]
fn a_false_recv_error_does_not_end_a_relayed_tunnel() {
    let mut net = SimNet::new(6);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse().config(|config| config.relay.am_relay = true));
    let at = net.overlay(lighthouse);
    let [a, b] = ["a", "b"]
        .map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse).config(move |it| it.relay.relays = vec![at])));
    net.cut(a, b);
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
    let index = net.tunnels_to(a, b)[0].remote_index.0;
    let forged = Header { kind: MessageType::RecvError, index, counter: 0 }.to_bytes();
    for from in ["203.0.113.66:666".parse().unwrap(), net.underlay(b), net.underlay(lighthouse)] {
        net.inject(from, net.underlay(a), &forged);
    }
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.tunnels_to(a, b).len(), 1);
    assert!(net.ping(a, b).is_answered_within(Duration::from_millis(100)));
}
