//! The matrix of faults: every code that `nebula ctl doctor` and `why` can name, and what shows it with real programs.
//!
//! A row on loopback starts daemons with the fault between them, asks the side that can know, and holds its whole
//! answer: the cause first, what follows from it, and no other cause. `cargo test --workspace faults` runs all of them
//! with our peers; `-- --ignored faults` those with Go Nebula as the peer.

mod between;
mod own;
mod site;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use site::{Peer, source};

use Shown::{ByTest, Loopback, LoopbackWithGo};

/// Makes a fault between hosts, and holds what they say of it.
type Fault = fn(Peer);

/// How a code is shown.
enum Shown {
    /// By daemons of ours.
    Loopback(Fault),
    /// By daemons of ours, and once more with Go Nebula as the peer.
    LoopbackWithGo(Fault),
    /// By another test, because of this.
    ByTest { file: &'static str, test: &'static str, because: &'static str },
}

const KERNEL: &str = "it needs a device, a packet filter or routes of a kernel";
const CLOCK: &str = "all programs of a machine have one wall clock";
const CA: &str = "it needs a CA that renews and refuses";
const RELAYS: &str =
    "a lighthouse offers only relays of the group, and chooses them for minutes; simulated/group_relays.rs does";
const ONE_WAY: &str = "all hosts of a loopback reach each other directly";
const HANDMADE: &str = "no program of ours or of Go makes such a message or certificate";

const fn on_kernel(because: &'static str) -> Shown {
    let test = "the_cause_of_each_mistake_on_a_real_kernel_is_named";
    ByTest { file: "system-tests/programs/hosts/doctor.rs", test, because }
}

/// By facts that a test writes down.
const fn written(test: &'static str, because: &'static str) -> Shown {
    ByTest { file: "instance/src/bin/nebula-ctl/doctor/tests.rs", test, because }
}

#[rustfmt::skip]
const ROWS: &[(&str, Shown)] = &[
    // Between two hosts.
    ("no_answer", LoopbackWithGo(between::nothing_comes_back)),
    ("caller_repeats", LoopbackWithGo(between::answers_do_not_arrive)),
    ("answers_lost", LoopbackWithGo(between::answers_do_not_arrive)),
    ("port_closed", Loopback(between::nobody_listens)),
    ("port_blocked", LoopbackWithGo(between::port_does_not_pass)),
    ("listen_family", written("family_that_listen_host_lacks", "nobody listens at [::1] either, and `port_closed` is named")),
    ("endpoint_inside_overlay", written("endpoint_inside_the_overlay", "a host drops such an entry of its map, and `no_endpoint` is named")),
    ("other_cipher", LoopbackWithGo(between::another_cipher)),
    ("not_post_quantum", LoopbackWithGo(between::peer_without_ml_kem)),
    ("long_messages_lost", Loopback(between::path_that_loses_long_messages)),
    ("answers_not_taken", LoopbackWithGo(between::another_cipher_of_a_caller)),
    ("refused_by_peer", LoopbackWithGo(between::peer_that_does_not_trust)),
    ("unknown_ca", LoopbackWithGo(between::peer_of_another_ca)),
    ("unknown_ca", LoopbackWithGo(between::lighthouse_of_another_ca)),
    ("peer_blocked", LoopbackWithGo(between::blocked_peer)),
    ("peer_certificate_expired", LoopbackWithGo(between::expired_peer)),
    ("other_curve", LoopbackWithGo(between::another_curve)),
    ("wrong_host", LoopbackWithGo(between::another_host_at_the_endpoint)),
    ("duplicate_address", LoopbackWithGo(between::host_that_came_with_the_address_of_this_one)),
    ("duplicate_address", LoopbackWithGo(between::host_with_the_address_of_this_one_at_the_endpoint)),
    ("duplicate_name", LoopbackWithGo(between::two_hosts_with_one_name)),
    ("address_not_allowed", LoopbackWithGo(between::peer_at_an_address_that_is_excluded)),
    ("peer_is_self", Loopback(between::addresses_that_are_no_peers)),
    ("not_in_overlay", Loopback(between::addresses_that_are_no_peers)),
    ("no_endpoint", Loopback(between::addresses_that_are_no_peers)),
    ("unknown_to_lighthouse", LoopbackWithGo(between::lighthouse_without_the_peer)),
    ("lighthouse_silent", Loopback(between::lighthouse_that_does_not_run)),
    ("all_lighthouses_unreachable", Loopback(between::lighthouse_that_does_not_run)),
    ("relays_not_used", written("relays_switched_off", ONE_WAY)),
    ("relay_no_answer", LoopbackWithGo(between::relay_that_does_not_relay)),
    ("relay_refused", LoopbackWithGo(between::relay_that_does_not_relay)),
    ("relay_unreachable", written("relay_that_is_gone", ONE_WAY)),
    ("behind_gateway", LoopbackWithGo(between::network_behind_a_gateway_that_does_not_have_it)),
    ("unsafe_route_not_covered", LoopbackWithGo(between::network_behind_a_gateway_that_does_not_have_it)),
    // Of one host.
    ("certificate_expires_soon", Loopback(own::certificate_that_ended)),
    ("certificate_expired", Loopback(own::certificate_that_ended)),
    ("ca_expires_soon", Loopback(own::ca_that_ends_soon)),
    ("configuration_refused", Loopback(own::configuration_that_cannot_be_loaded)),
    ("configuration_remark", Loopback(own::configuration_that_cannot_be_loaded)),
    ("reload_refused", Loopback(own::configuration_that_cannot_be_loaded)),
    ("at_next_start", Loopback(own::setting_that_waits_for_a_start)),
    ("not_listening", Loopback(own::listener_without_its_port)),
    ("no_relay_offered", Loopback(own::relay_that_nobody_offers)),
    ("no_lighthouse", Loopback(own::host_without_a_lighthouse)),
    ("lighthouse_with_hosts", Loopback(own::lighthouse_that_has_lighthouses)),
    ("lighthouse_unreachable", LoopbackWithGo(own::one_lighthouse_of_two_that_does_not_run)),
    ("lighthouse_name_unresolved", Loopback(own::lighthouse_at_an_address_that_is_excluded)),
    // On a kernel.
    ("local_firewall", on_kernel(KERNEL)),
    ("mtu_differs", on_kernel(KERNEL)),
    ("route_missing", on_kernel(KERNEL)),
    ("route_elsewhere", on_kernel(KERNEL)),
    ("device_down", on_kernel(KERNEL)),
    ("address_missing", on_kernel(KERNEL)),
    ("firewall_drop", on_kernel(KERNEL)),
    ("no_underlay_route", on_kernel(KERNEL)),
    ("no_route", on_kernel(KERNEL)),
    // Neither.
    ("listen_host", written("listen_host_is_loopback", KERNEL)),
    ("lan_replaced", written("route_that_takes_the_place_of_the_lan", KERNEL)),
    ("datagram_too_large", written("datagram_too_large", KERNEL)),
    ("send_failed", written("system_that_refuses_to_send", KERNEL)),
    ("underlay_through_overlay", written("endpoint_behind_the_own_device", KERNEL)),
    ("device_missing", written("device_gone", "a daemon without its device ends")),
    ("ipv6_off", written("ipv6_switched_off", KERNEL)),
    ("path_mtu", written("path_too_small_for_the_mtu", KERNEL)),
    ("remote_address", written("packet_from_an_address_that_the_peer_does_not_have", "no host sends such packets: its own firewall drops them")),
    ("full_flow_table", written("flow_table_without_room", "it takes as many live flows as the smallest table has")),
    ("network_policy", written("packet_that_policies_of_the_network_refuse", "only pods have network policies")),
    ("names_not_registered", written("names_that_no_resolver_was_told_of", "it needs a resolver of the host; overlay_names.rs has one")),
    ("clock_wrong", written("clock_of_this_host", CLOCK)),
    ("peer_clock_wrong", written("clock_of_a_peer", CLOCK)),
    ("clock_jumped", written("clock_that_jumped", CLOCK)),
    ("certificate_not_yet_valid", written("own_certificate_not_valid_yet", "no daemon starts with it, and the clock cannot be set back")),
    ("ca_not_yet_valid", written("ca_not_valid_yet", "no daemon starts with a certificate of such a CA")),
    ("peer_certificate_not_yet_valid", written("peer_certificate_not_valid_yet", "no daemon starts with it, and the clock cannot be set back")),
    ("ca_expired", written("ca_expired", "a certificate ends with its CA at the latest, and is named")),
    ("peer_ca_expired", written("ca_of_the_peer_expired", "a certificate ends with its CA at the latest, and is named")),
    ("certificate_beyond_ca", written("certificate_beyond_its_ca", HANDMADE)),
    ("bad_signature", written("certificate_altered", HANDMADE)),
    ("malformed_handshake", written("message_that_is_no_handshake", HANDMADE)),
    ("certificate_revoked", written("certificate_that_the_ca_revoked", CA)),
    ("not_renewed", written("renewal_that_the_ca_refuses_for_good", CA)),
    ("lighthouse_is_self", written("lighthouse_is_this_host", "no daemon starts with it")),
    ("lighthouse_not_mapped", written("lighthouse_without_static_entry", "no daemon starts with it")),
    ("relay_without_group", written("a_stranger_is_offered", RELAYS)),
    ("offered_relay_refuses", written("an_offered_relay_refuses", RELAYS)),
    ("no_relay_chosen", written("no_offered_relay_can_be_used", RELAYS)),
    ("local_address", on_kernel(KERNEL)),
    ("gateway_dead", written("gateway_that_does_not_answer", KERNEL)),
];

/// Codes that stand in the source: the first word of each finding, and of each pair of code and advice.
fn codes_of_the_source() -> BTreeSet<String> {
    let mut codes = BTreeSet::new();
    for file in ["callers", "conflicts", "host", "peers", "refusals", "traffic"] {
        let text = source(&format!("instance/src/bin/nebula-ctl/doctor/{file}.rs"));
        for opening in ["Finding::error(", "Finding::warning(", "=> (", "=> {\n            (", "refusal(", "unheard("] {
            codes.extend(text.split(opening).skip(1).filter_map(|rest| {
                let code = rest.trim_start().strip_prefix('"')?.split('"').next()?;
                code.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_').then(|| code.to_owned())
            }));
        }
    }
    codes
}

#[test]
fn every_code_of_doctor_has_a_row_and_every_row_a_code() {
    let (codes, rows) =
        (codes_of_the_source(), ROWS.iter().map(|(code, _)| (*code).to_owned()).collect::<BTreeSet<_>>());
    let documents = source("docs/doctor.md");
    let is_documented = |code: &&String| documents.contains(&format!("`{code}`"));
    assert!(codes.len() > 70, "{codes:?}");
    assert_eq!(
        codes.iter().filter(|code| !is_documented(code)).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "not in the documents"
    );
    assert_eq!(codes.difference(&rows).collect::<Vec<_>>(), Vec::<&String>::new(), "no row shows these");
    assert_eq!(rows.difference(&codes).collect::<Vec<_>>(), Vec::<&String>::new(), "no finding has these codes");
}

#[test]
fn the_tests_that_stand_in_for_rows_are_there_and_name_their_code() {
    for (code, shown) in ROWS {
        let ByTest { file, test, because } = shown else { continue };
        let text = source(file);
        let is_there = text.contains(&format!("fn {test}(")) || text.contains(&format!("    {test}:"));
        assert!(is_there, "{code}: no {test} in {file}, and {because}");
        assert!(text.contains(&format!("\"{code}\"")), "{code} is not in {file}, and {because}");
    }
}

/// Runs each function once, some at a time, and lists the codes of those that fail.
fn run(peer: Peer, functions: impl Iterator<Item = (&'static str, Fault)>) {
    let mut once: BTreeMap<usize, (Vec<&str>, Fault)> = BTreeMap::new();
    for (code, function) in functions {
        once.entry(function as usize).or_insert_with(|| (Vec::new(), function)).0.push(code);
    }
    let (work, failed) = (Mutex::new(once.into_values()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let next = work.lock().unwrap().next();
                    let Some((codes, function)) = next else { break };
                    if catch_unwind(AssertUnwindSafe(|| function(peer))).is_err() {
                        failed.lock().unwrap().push(codes.join(", "));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "with {peer:?} as the peer: {failed:?}");
}

#[test]
fn each_fault_is_named_by_its_code_and_by_no_other_cause() {
    run(
        Peer::Ours,
        ROWS.iter().filter_map(|(code, shown)| match shown {
            Loopback(function) | LoopbackWithGo(function) => Some((*code, *function)),
            ByTest { .. } => None,
        }),
    );
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn each_fault_beside_a_peer_of_go_is_named_by_the_same_code() {
    run(
        Peer::Go,
        ROWS.iter().filter_map(|(code, shown)| match shown {
            LoopbackWithGo(function) => Some((*code, *function)),
            Loopback(_) | ByTest { .. } => None,
        }),
    );
}

// Each starts two or three daemons, and most wait for time-outs.
const AT_ONCE: usize = 6;
