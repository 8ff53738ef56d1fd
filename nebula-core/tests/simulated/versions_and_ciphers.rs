//! Every combination of certificate version, curve and cipher.

use std::time::Duration;

use nebula_cert::{Curve, Version};
use nebula_core::config::Cipher;
use nebula_core::internals::header::{Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, SimNet};

#[test]
fn both_curves_work_with_both_ciphers() {
    for curve in [Curve::Curve25519, Curve::P256] {
        for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
            let mut net = SimNet::with_curve(1, curve);
            let with_cipher = |spec: HostSpec| spec.config(move |config| config.cipher = cipher);
            let b = net.add(with_cipher(HostSpec::new("b")));
            let a = net.add(with_cipher(HostSpec::new("a").knows(b)));
            net.ping(a, b).until_delivered();
        }
    }
}

#[test]
fn hosts_with_different_versions_understand_each_other() {
    const HELD: [&[Version]; 3] = [&[Version::V1], &[Version::V2], &[Version::V1, Version::V2]];
    for initiator in HELD {
        for responder in HELD {
            let mut net = SimNet::new(2);
            let b = net.add(HostSpec::new("b").versions(responder));
            let a = net.add(HostSpec::new("a").versions(initiator).knows(b));
            net.ping(a, b).until_delivered();
            assert_eq!(net.ping(a, b).train(30, Duration::from_secs(1)), 30, "{initiator:?} to {responder:?}");
        }
    }
}

#[test]
fn an_ipv6_overlay_address_is_reached_with_version_two() {
    let mut net = SimNet::new(3);
    let both = |spec: HostSpec| spec.versions(&[Version::V1, Version::V2]);
    let b = net.add(both(HostSpec::new("b").networks(&["10.42.0.1/16", "fd42::1/64"])));
    let a = net.add(both(HostSpec::new("a").networks(&["10.42.0.2/16", "fd42::2/64"]).knows(b)));
    net.ping(a, b).between("fd42::2", "fd42::1").until_delivered();
    net.ping(a, b).between("10.42.0.2", "10.42.0.1").until_delivered();
    assert_eq!(net.tunnels(a).len(), 1, "one tunnel serves both addresses");
}

#[test]
fn hosts_with_different_ciphers_do_not_connect() {
    let mut net = SimNet::new(4);
    let b = net.add(HostSpec::new("b").config(|config| config.cipher = Cipher::ChaCha20Poly1305));
    let a = net.add(HostSpec::new("a").knows(b));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(10)));
    assert!(net.tunnels(a).is_empty());
}

#[test]
fn an_ipv6_underlay_carries_tunnels() {
    let mut net = SimNet::new(5);
    let b = net.add(HostSpec::new("b").underlay("[2001:db8::b]:4242"));
    let a = net.add(HostSpec::new("a").underlay("[2001:db8::a]:4242").knows(b));
    net.ping(a, b).until_delivered();
}

/// Version of the certificate in the most recent first message of `host`, whose payload is in clear.
fn version_of_call(net: &SimNet, host: HostId, name: &str) -> Version {
    let is_first = |datagram: &[u8]| {
        let first = Header { kind: MessageType::Handshake, index: 0, counter: 1 };
        Header::parse(datagram) == Ok(first)
    };
    let call = net.flow().rev().find(|step| step.sender == name && is_first(&step.datagram)).expect("a first message");
    let is_in_call = |version: &Version| {
        let certificate = net.identity(host).certificate(*version).map(nebula_cert::Certificate::to_handshake);
        certificate.is_some_and(|wanted| call.datagram.windows(wanted.len()).any(|window| window == wanted))
    };
    [Version::V1, Version::V2].into_iter().find(is_in_call).expect("a certificate of the host")
}

#[test]
fn a_host_with_both_versions_begins_with_the_configured_one_else_the_first() {
    let held = &[Version::V1, Version::V2];
    for (configured, expected) in
        [(None, Version::V1), (Some(Version::V1), Version::V1), (Some(Version::V2), Version::V2)]
    {
        let mut net = SimNet::new(6);
        let b = net.add(HostSpec::new("b").versions(held));
        let configure = move |config: &mut nebula_core::Config| config.initiating_version = configured;
        let a = net.add(HostSpec::new("a").versions(held).knows(b).config(configure));
        net.ping(a, b).until_delivered();
        assert_eq!(version_of_call(&net, a, "a"), expected);
        assert_eq!(net.ping(a, b).train(30, Duration::from_secs(1)), 30);
        assert_eq!(version_of_call(&net, a, "a"), expected, "nothing to improve\n{}", net.diagram());
    }
}

#[test]
fn a_tunnel_moves_to_the_higher_version_of_its_peer_without_a_lost_ping() {
    let mut net = SimNet::new(7);
    let b = net.add(HostSpec::new("b").versions(&[Version::V2]));
    let a = net.add(HostSpec::new("a").versions(&[Version::V1, Version::V2]).knows(b));
    net.ping(a, b).until_delivered();
    assert_eq!(version_of_call(&net, a, "a"), Version::V1);
    assert_eq!(net.ping(a, b).train(40, Duration::from_secs(1)), 40, "{}", net.diagram());
    assert_eq!(version_of_call(&net, a, "a"), Version::V2);
    assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (1, 1), "{}", net.diagram());
}
