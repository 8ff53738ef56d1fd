//! Faults of one host: its configuration, its certificate, its lighthouses.

use nebula_cert::Curve;

use super::site::{ALWAYS, Peer, Site, Spec, calls, map, now, nowhere};
use crate::loopback::free_tcp_port;

const L: &str = "10.42.0.7";
const R: &str = "10.42.0.8";
const X: &str = "10.42.0.9";

/// Starts a host with this configuration and certificate, and asks it.
fn alone(more: &str, codes: &[&str]) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(more));
    left.doctor(codes);
}

pub(super) fn certificate_that_ended(_: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let spec = Spec { validity: 1..=now() + 8, ..Spec::new("left", L, &ca) };
    let left = site.start(Peer::Ours, &spec.more(map(R, nowhere())));
    left.doctor(&["certificate_expires_soon"]);
    left.doctor(&["certificate_expired"]);
    left.why(R, &["certificate_expired"]);
    left.status("[certificate_expired]");
}

pub(super) fn ca_that_ends_soon(_: Peer) {
    let site = Site::new();
    let ca = site.ca("ca", Curve::Curve25519, 1..=now() + 50 * 86_400);
    let validity = 1..=now() + 49 * 86_400;
    let left = site.start(Peer::Ours, &Spec { validity, ..Spec::new("left", L, &ca) });
    left.doctor(&["ca_expires_soon"]);
}

pub(super) fn configuration_that_cannot_be_loaded(_: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca));
    left.doctor(&[]);
    left.write("logging: {level: nonsense}\n");
    left.doctor(&["configuration_refused"]);
    left.reload();
    left.status("[reload_refused]");
    left.write("");
    left.doctor(&["reload_refused"]);
    left.write("logging: {levle: info}\n");
    left.reload();
    // The other one is that there is no lighthouse.
    left.doctor(&["configuration_remark", "configuration_remark"]);
}

pub(super) fn setting_that_waits_for_a_start(_: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca));
    left.doctor(&[]);
    left.write("routines: 2\n");
    left.reload();
    left.doctor(&["at_next_start"]);
}

pub(super) fn listener_without_its_port(_: Peer) {
    let port = free_tcp_port();
    let _other = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    alone(
        &format!("stats: {{type: prometheus, listen: '127.0.0.1:{port}', path: /m, interval: 1s}}\n"),
        &["not_listening"],
    );
}

pub(super) fn relay_that_nobody_offers(_: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let lighthouse = Spec::new("right", R, &ca).more("lighthouse: {am_lighthouse: true}\n");
    let lighthouse = site.start(Peer::Ours, &lighthouse);
    let more = format!("{}relay: {{groups: [relay]}}\n", calls(R, lighthouse.at));
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(more));
    left.doctor(&["no_relay_offered"]);
}

pub(super) fn host_without_a_lighthouse(_: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca));
    left.says_raw("no_lighthouse");
}

pub(super) fn lighthouse_that_has_lighthouses(_: Peer) {
    let more = format!("{}lighthouse: {{am_lighthouse: true, hosts: [{R}]}}\n", map(R, nowhere()));
    alone(&more, &["lighthouse_with_hosts"]);
}

pub(super) fn one_lighthouse_of_two_that_does_not_run(peer: Peer) {
    let site = Site::new();
    let ca = site.usual_ca();
    let right = site.start(peer, &Spec::new("right", R, &ca).more("lighthouse: {am_lighthouse: true}\n"));
    let more = format!(
        "static_host_map: {{{R}: ['{}'], {X}: ['{}']}}\nlighthouse: {{hosts: [{R}, {X}], interval: 1}}\n",
        right.at,
        nowhere()
    );
    let left = site.start(Peer::Ours, &Spec::new("left", L, &ca).more(more));
    left.why(R, &[]);
    left.doctor(&["no_answer", "lighthouse_unreachable"]);
    left.why(X, &["port_closed"]);
}

pub(super) fn lighthouse_at_an_address_that_is_excluded(_: Peer) {
    let more = format!(
        "{}lighthouse: {{hosts: [{R}], interval: 1, remote_allow_list: {{127.0.0.0/8: false, 0.0.0.0/0: true}}}}\n",
        map(R, nowhere())
    );
    let site = Site::new();
    let ca = site.usual_ca();
    let left = site.start(Peer::Ours, &Spec { validity: ALWAYS, ..Spec::new("left", L, &ca) }.more(more));
    left.why(R, &["lighthouse_silent", "lighthouse_name_unresolved", "all_lighthouses_unreachable"]);
}
