//! Of the evidence that a fault leaves behind, one kind is the cause; where there is none, nothing is claimed.

use serde_json::{Value, json};

use super::super::{is_bad, readable};
use super::{drop, examine, explain, facts, host, lost, peer, refusal, unheard, with};

/// Each kind of evidence beside those that mostly follow from it, as the faults of a network leave them behind.
#[test]
fn the_strongest_evidence_is_the_one_cause_that_is_named() {
    let nebula = json!({"found": "nebula"});
    let caller = refusal("unknown_ca", None);
    let relay = |facts: Value, connected: bool| {
        let facts = with(facts, "/peers/0/known/relays", json!(["10.42.0.3"]));
        with(facts, "/peers/0/relay_states", json!([{"relay": "10.42.0.3", "connected": connected}]))
    };
    let probed = |facts: Value, found: &Value| with(facts, "/peers/0/endpoints/0/probe", found.clone());
    let refused = |reason: &str| lost("/attempt/refusal", refusal(reason, None));
    let unopened = lost("/attempt/tried/0/unopened", json!(3));
    let calls = lost("/unheard", unheard());
    let silent = with(facts(), "/peers", json!([peer()]));
    let two_places = json!([
        {"endpoint": "192.0.2.9:4242", "inside_overlay": false, "to_overlay": false, "probe": {"found": "silence"}},
        {"endpoint": "[2001:db8::9]:4242", "inside_overlay": false, "to_overlay": false, "errno": "ENETUNREACH"}
    ]);
    for (what, facts, code) in [
        ("a static map with another host's endpoint", probed(refused("other_host"), &nebula), "wrong_host"),
        ("a peer that this host blocks", probed(refused("blocked"), &nebula), "peer_blocked"),
        ("another cipher", probed(unopened.clone(), &nebula), "other_cipher"),
        (
            "another cipher, and the peer calls too",
            probed(with(unopened, "/peers/0/unheard", unheard()), &nebula),
            "other_cipher",
        ),
        ("another cipher, and only the peer calls", probed(calls.clone(), &nebula), "answers_not_taken"),
        (
            "another cipher, and nobody says where the peer is",
            with(
                with(calls.clone(), "/peers/0/endpoints", json!([])),
                "/peers/0/unheard",
                json!({"peer": "10.42.0.9", "name": "db", "from": "192.0.2.9:4242", "repeats": 5, "seconds_ago": 1, "udp_passes": true}),
            ),
            "answers_not_taken",
        ),
        (
            "a silent peer that is behind a relay alone",
            with(relay(silent.clone(), true), "/peers/0/endpoints", json!([])),
            "no_answer",
        ),
        (
            "a peer of another CA that calls",
            probed(with(silent.clone(), "/callers", json!([caller])), &nebula),
            "unknown_ca",
        ),
        ("a peer that refuses this host", probed(silent.clone(), &nebula), "refused_by_peer"),
        (
            "a peer that refuses this host, with a relay",
            relay(probed(silent.clone(), &nebula), true),
            "refused_by_peer",
        ),
        ("answers blocked on the way back", calls, "answers_lost"),
        ("the port blocked", probed(silent.clone(), &json!({"found": "nebula_to_other_port"})), "port_blocked"),
        ("a dead relay", relay(silent.clone(), false), "relay_unreachable"),
        ("a relay that is there", relay(silent.clone(), true), "no_answer"),
        ("nothing known", silent, "no_answer"),
        ("one of two endpoints without a route", lost("/endpoints", two_places), "no_answer"),
    ] {
        let codes: Vec<_> = explain(&facts).into_iter().map(|finding| finding.code).collect();
        assert_eq!(codes, [code], "{what}");
    }
}

#[test]
fn a_cause_that_no_evidence_shows_is_called_not_known() {
    let silent = with(facts(), "/peers", json!([peer()]));
    let text = readable(&explain(&silent));
    for word in [
        "the cause is not known here",
        "These are possible: UDP is blocked",
        "NAT",
        "host or its nebula is down",
        "refuses",
    ] {
        assert!(text.contains(word), "{word} not in\n{text}");
    }
    let places = json!([
        {"endpoint": "192.0.2.9:4242", "inside_overlay": false, "to_overlay": false, "probe": {"found": "silence"}},
        {"endpoint": "[2001:db8::9]:4242", "inside_overlay": false, "to_overlay": false, "errno": "ENETUNREACH"}
    ]);
    let text = readable(&explain(&lost("/endpoints", places)));
    assert!(
        text.contains("nothing comes back from 192.0.2.9:4242 (") && text.contains("[2001:db8::9]:4242: ENETUNREACH"),
        "{text}"
    );
}

#[test]
fn a_host_that_every_peer_refuses_hears_that_and_not_what_follows_from_it() {
    let seven: Vec<_> = (1..=7).map(|n| with(peer(), "/peer", json!(format!("10.42.0.{}", 20 + n)))).collect();
    let revoked = json!({"failing_seconds": 60, "error": "it is revoked", "code": "certificate_revoked"});
    for facts in [with(facts(), "/enrolment", revoked), host("/certificate/seconds_left", json!(-60))] {
        let facts = with(facts, "/peers", json!(seven));
        for findings in [examine(&facts), explain(&facts)] {
            let codes: Vec<_> = findings.iter().map(|finding| finding.code).collect();
            assert!(matches!(codes[..], ["certificate_revoked" | "certificate_expired"]), "{codes:?}");
        }
    }
}

#[test]
fn what_follows_from_the_cause_comes_after_it() {
    let lost =
        with(lost("/attempt/refusal", refusal("unknown_ca", None)), "/host/lighthouses/0/connected", json!(false));
    let codes: Vec<_> = explain(&lost).into_iter().map(|finding| finding.code).collect();
    assert_eq!(codes, ["unknown_ca", "all_lighthouses_unreachable"]);
}

#[test]
fn a_peer_that_knocks_at_closed_ports_is_no_error_of_this_host() {
    let knocks = |reason| with(facts(), "/drops", json!([drop("inbound", reason, json!(null))]));
    for reason in ["no_rule", "local_address", "remote_address"] {
        let findings = examine(&knocks(reason));
        assert!(findings.len() == 1 && !is_bad(&findings), "{findings:?}");
    }
    assert!(readable(&examine(&knocks("no_rule"))).contains("If they should pass"));
    assert!(is_bad(&examine(&with(facts(), "/drops", json!([drop("outbound", "no_rule", json!(null))])))));
}
