//! Faults between two hosts: `left`, which is asked, and `right`, which is ours or Go Nebula.

use nebula_cert::Curve;

use super::site::{ALWAYS, Peer, Site, Spec, Way, calls, map, now, nowhere, way};

const L: &str = "10.42.0.7";
const R: &str = "10.42.0.8";
const X: &str = "10.42.0.9";

pub(super) fn nothing_comes_back(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let right = site.start(peer, &Spec::new("right", R, &ca));
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(map(R, way(right.at, Way::Swallows))));
    left.why(R, &["no_answer"]);
}

pub(super) fn answers_do_not_arrive(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca));
    let _right = site.start(peer, &Spec::new("right", R, &ca).more(calls(L, way(left.at, Way::Forth))));
    left.doctor(&["caller_repeats"]);
    left.why(R, &["answers_lost"]);
    left.why("right", &["answers_lost"]);
}

pub(super) fn nobody_listens(_: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(map(R, nowhere())));
    left.why(R, &["port_closed"]);
}

pub(super) fn port_does_not_pass(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let right = site.start(peer, &Spec::new("right", R, &ca));
    let spec = Spec::new("left", L, &ca);
    let blocked = way(right.at, Way::Except(spec.port));
    let left = site.start(Peer::Ours, &spec.more(map(R, blocked)));
    left.why(R, &["port_blocked"]);
}

pub(super) fn another_cipher(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let right = site.start(peer, &Spec::new("right", R, &ca).more("cipher: chachapoly\n"));
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(map(R, right.at)));
    left.why(R, &["other_cipher"]);
}

pub(super) fn peer_without_ml_kem(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    // Go Nebula takes the key for one that it does not know.
    let right = Spec { pki: ", post_quantum: 'off'".to_owned(), ..Spec::new("right", R, &ca) };
    let right = site.start(peer, &right);
    let pki = ", post_quantum: require".to_owned();
    let left = site.start(Peer::Ours, &Spec { pki, ..Spec::new("left", L, &ca) }.more(map(R, right.at)));
    left.why(R, &["not_post_quantum"]);
}

pub(super) fn path_that_loses_long_messages(_: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let right = site.start(Peer::Ours, &Spec::new("right", R, &ca));
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(map(R, way(right.at, Way::UpTo(1100)))));
    left.why(R, &["long_messages_lost"]);
}

/// The asked host does not know where the other one is.
pub(super) fn another_cipher_of_a_caller(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca));
    let more = format!("cipher: chachapoly\n{}", calls(L, left.at));
    let _right = site.start(peer, &Spec::new("right", R, &ca).more(more));
    left.why(R, &["answers_not_taken"]);
}

pub(super) fn peer_that_does_not_trust(peer: Peer) {
    let site = Site::new();
    let (ca, other) = (site.usual_ca(), site.ca("other", Curve::Curve25519, ALWAYS));
    let right = site.start(peer, &Spec { trusts: &[&other], ..Spec::new("right", R, &ca) });
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(map(R, right.at)));
    left.why(R, &["refused_by_peer"]);
}

/// It is known where it is refused.
pub(super) fn peer_of_another_ca(peer: Peer) {
    let site = Site::new();
    let (ca, other) = (site.usual_ca(), site.ca("other", Curve::Curve25519, ALWAYS));
    let right = site.start(peer, &Spec { trusts: &[&ca, &other], ..Spec::new("right", R, &other) });
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(map(R, right.at)));
    left.why(R, &["unknown_ca"]);
    left.doctor(&["unknown_ca"]);
}

/// Its own lighthouse refuses this host, and it refuses the lighthouse: `status` names that.
pub(super) fn lighthouse_of_another_ca(peer: Peer) {
    let site = Site::new();
    let (ca, other) = (site.usual_ca(), site.ca("other", Curve::Curve25519, ALWAYS));
    let right = Spec { trusts: &[&ca, &other], ..Spec::new("right", R, &other) };
    let right = site.start(peer, &right.more("lighthouse: {am_lighthouse: true}\n"));
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(calls(R, right.at)));
    left.why(R, &["unknown_ca", "all_lighthouses_unreachable"]);
    left.status("[unknown_ca]");
}

pub(super) fn blocked_peer(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let right = site.start(peer, &Spec::new("right", R, &ca));
    let pki = format!(", blocklist: [{}]", right.fingerprint);
    let left = site.start(Peer::Ours, &Spec { pki, ..Spec::new("left", L, &ca) }.more(map(R, right.at)));
    left.why(R, &["peer_blocked"]);
}

pub(super) fn expired_peer(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let end = now() + 8;
    let right = site.start(peer, &Spec { validity: 1..=end, ..Spec::new("right", R, &ca) });
    while now() <= end {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(map(R, right.at)));
    left.why(R, &["peer_certificate_expired"]);
    if peer == Peer::Ours {
        right.why(L, &["certificate_expired"]);
    }
}

pub(super) fn another_curve(peer: Peer) {
    let site = Site::new();
    let (ca, other) = (site.usual_ca(), site.ca("other", Curve::P256, ALWAYS));
    let left = Spec::new("left", L, &ca);
    let right = site.start(peer, &Spec::new("right", R, &other).more(calls(L, left.at())));
    let left = site.start(Peer::Ours, &left.more(map(R, right.at)));
    left.why(R, &["other_curve"]);
    if peer == Peer::Ours {
        right.why(L, &["other_curve", "all_lighthouses_unreachable"]);
    }
}

/// Nobody calls the left host. Its lighthouse knows both.
pub(super) fn host_that_came_with_the_address_of_this_one(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let lighthouse = Spec::new("lighthouse", X, &ca).more("lighthouse: {am_lighthouse: true}\n");
    let lighthouse = site.start(Peer::Ours, &lighthouse);
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(calls(X, lighthouse.at)));
    left.why(X, &[]);
    let _right = site.start(peer, &Spec::new("right", L, &ca).more(calls(X, lighthouse.at)));
    left.doctor(&["duplicate_address"]);
    left.why(L, &["duplicate_address", "peer_is_self"]);
    lighthouse.doctor(&["duplicate_address"]);
}

/// It refuses this host first, and calls it.
pub(super) fn host_with_the_address_of_this_one_at_the_endpoint(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = Spec::new("left", L, &ca);
    let right = site.start(peer, &Spec::new("right", L, &ca).more(calls(R, left.at())));
    let left = site.start(Peer::Ours, &left.more(map(X, right.at)));
    left.why(X, &["duplicate_address"]);
    left.why(L, &["duplicate_address", "peer_is_self"]);
}

/// A relay is the only way to the peer, and does not relay.
pub(super) fn relay_that_does_not_relay(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let lighthouse = Spec::new("lighthouse", X, &ca).more("lighthouse: {am_lighthouse: true}\n");
    let lighthouse = site.start(Peer::Ours, &lighthouse);
    let through = calls(X, lighthouse.at);
    let _right = site.start(peer, &Spec::new("right", R, &ca).more(format!("{through}relay: {{relays: [{X}]}}\n")));
    let nowhere = format!("remote_allow_ranges: {{{R}/32: {{0.0.0.0/0: false, '::/0': false}}}}");
    let through = through.replace("interval: 1", &format!("interval: 1, {nowhere}"));
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(through));
    left.why(R, &["relay_no_answer"]);
    lighthouse.doctor(&["relay_refused"]);
}

pub(super) fn another_host_at_the_endpoint(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let right = site.start(peer, &Spec::new("right", R, &ca));
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(map(X, right.at)));
    left.why(X, &["wrong_host"]);
}

pub(super) fn two_hosts_with_one_name(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca));
    let first = Spec { certified: "db", ..Spec::new("first", R, &ca) };
    let _first = site.start(peer, &first.more(calls(L, left.at)));
    left.why(R, &[]);
    let second = Spec { certified: "db", ..Spec::new("second", X, &ca) };
    let _second = site.start(peer, &second.more(calls(L, left.at)));
    left.doctor(&["duplicate_name"]);
}

pub(super) fn addresses_that_are_no_peers(_: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca));
    left.why(L, &["peer_is_self"]);
    left.why("192.0.2.7", &["not_in_overlay"]);
    left.why(R, &["no_endpoint"]);
}

pub(super) fn lighthouse_without_the_peer(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let right = site.start(peer, &Spec::new("right", R, &ca).more("lighthouse: {am_lighthouse: true}\n"));
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(calls(R, right.at)));
    left.why(R, &[]);
    left.why(X, &["unknown_to_lighthouse"]);
}

pub(super) fn lighthouse_that_does_not_run(_: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(calls(R, nowhere())));
    // Only `why` sends probes.
    left.doctor(&["all_lighthouses_unreachable", "no_answer"]);
    left.status("[no_answer]");
    left.why(X, &["lighthouse_silent", "all_lighthouses_unreachable"]);
    left.why(R, &["port_closed", "all_lighthouses_unreachable"]);
}

/// This host says that the peer may not be where it calls from.
pub(super) fn peer_at_an_address_that_is_excluded(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let excluded = "lighthouse: {remote_allow_ranges: {10.42.0.0/16: {127.0.0.0/8: false}}}\n";
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(excluded));
    let _right = site.start(peer, &Spec::new("right", R, &ca).more(calls(L, left.at)));
    left.why(R, &["address_not_allowed"]);
}

pub(super) fn network_behind_a_gateway_that_does_not_have_it(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let right = site.start(peer, &Spec::new("right", R, &ca));
    let routes = "tun: {disabled: true, unsafe_routes: [{route: 192.168.7.0/24, via: 10.42.0.8}]}\n";
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(format!("{routes}{}", map(R, right.at))));
    left.why("192.168.7.9", &["behind_gateway"]);
    left.why(R, &[]);
    left.doctor(&["unsafe_route_not_covered"]);
}
