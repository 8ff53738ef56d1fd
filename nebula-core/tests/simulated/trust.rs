//! Certificates that stop being acceptable while tunnels live.

use std::time::Duration;

use nebula_cert::Version;
use nebula_core::simulator::{HostSpec, SimNet};
use nebula_core::{Event, TunnelDownReason, WallClock};

#[test]
fn blocking_a_certificate_cuts_its_live_tunnel_and_keeps_it_out() {
    let mut net = SimNet::new(1);
    let [a, b, c] = net.nodes(["a", "b", "c"]);
    net.ping(a, b).until_delivered();
    net.ping(a, c).until_delivered();
    let mut trust = net.authority().trust();
    trust.block(net.fingerprint(b));
    net.control(a, |node, now| node.reconfigure(now, |config| config.trust = trust));
    assert!(net.tunnels_to(a, b).is_empty());
    net.run_for(Duration::from_secs(1));
    assert!(net.tunnels(b).is_empty(), "b was told");
    assert!(!net.ping(b, a).is_answered_within(Duration::from_secs(10)));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(10)));
    assert!(net.ping(a, c).is_answered_within(Duration::from_millis(100)), "others are not affected");
    assert!(net.events(a).iter().any(|event| matches!(event, Event::HandshakeRefused { .. })));
}

#[test]
fn a_peer_whose_certificate_expires_is_disconnected() {
    let mut net = SimNet::new(2);
    let b = net.add(HostSpec::new("b").expires_after(Duration::from_secs(60)));
    let a = net.add(HostSpec::new("a").knows(b));
    assert_eq!(net.ping(a, b).train(50, Duration::from_secs(1)), 50);
    net.run_for(Duration::from_secs(20));
    assert!(net.tunnels(a).is_empty());
    let expired =
        |event: &Event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::CertificateInvalid, .. });
    assert!(net.events(a).iter().any(expired));
}

#[test]
fn an_expired_peer_stays_connected_if_configured_so() {
    let mut net = SimNet::new(3);
    let b = net.add(HostSpec::new("b").expires_after(Duration::from_secs(60)));
    let a = net.add(HostSpec::new("a").knows(b).config(|config| config.disconnect_invalid = false));
    assert_eq!(net.ping(a, b).train(120, Duration::from_secs(1)), 120);
}

#[test]
fn a_blocked_peer_is_disconnected_whatever_is_configured_about_expired_ones() {
    let mut net = SimNet::new(6);
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").knows(b).config(|config| config.disconnect_invalid = false));
    net.ping(a, b).until_delivered();
    let mut trust = net.authority().trust();
    trust.block(net.fingerprint(b));
    net.control(a, |node, now| node.reconfigure(now, |config| config.trust = trust));
    assert!(net.tunnels(a).is_empty());
}

#[test]
fn hosts_of_two_authorities_never_connect() {
    let mut net = SimNet::new(4);
    let b = net.add(HostSpec::new("b"));
    let stranger = SimNet::new(5).authority().trust();
    let a = net.add(HostSpec::new("a").knows(b).config(|config| config.trust = stranger));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(10)));
    assert!(net.tunnels(a).is_empty());
}

#[test]
fn a_blocked_peer_comes_back_with_a_new_certificate_or_when_the_list_is_emptied() {
    for emptied in [false, true] {
        let mut net = SimNet::new(11);
        let [a, b] = net.nodes(["a", "b"]);
        net.ping(a, b).until_delivered();
        let mut trust = net.authority().trust();
        trust.block(net.fingerprint(b));
        net.control(a, |node, now| node.reconfigure(now, |config| config.trust = trust));
        assert!(!net.ping(b, a).is_answered_within(Duration::from_secs(7)));
        if emptied {
            let trust = net.authority().trust();
            net.control(a, |node, now| node.reconfigure(now, |config| config.trust = trust));
        } else {
            let identity = net.renewed_identity(b, &[Version::V2]);
            net.control(b, |node, now| node.reconfigure(now, |config| config.identity = identity));
        }
        net.ping(b, a).until_delivered();
    }
}

#[test]
fn a_clock_that_jumps_past_the_end_of_a_certificate_ends_the_tunnel() {
    let mut net = SimNet::new(10);
    let b = net.add(HostSpec::new("b").expires_after(Duration::from_secs(3600)));
    let a = net.add(HostSpec::new("a").knows(b));
    net.ping(a, b).until_delivered();
    net.control(a, |node, now| {
        node.set_wall_clock(WallClock { at: now, unix: Duration::from_secs(1_800_000_000 + 7200) });
    });
    net.run_for(Duration::from_secs(6));
    let closed =
        |event: &Event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::CertificateInvalid, .. });
    assert!(net.events(a).iter().any(closed));
    assert!(!net.ping(b, a).is_answered_within(Duration::from_secs(1)));
}
