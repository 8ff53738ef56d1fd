use super::*;
use crate::diagnosis::RefusalReason;

fn host(number: u32) -> IpAddr {
    IpAddr::from((0x0a2a_0000 + number).to_be_bytes())
}

fn endpoint(number: u32) -> SocketAddr {
    SocketAddr::new(IpAddr::from((0xc633_0000 + number).to_be_bytes()), 4242)
}

#[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
fn start() -> (Journal, Instant) {
    (Journal::default(), Instant::now())
}

fn refusal(at: Instant, from: SocketAddr, reason: RefusalReason) -> Refusal {
    Refusal { at, from, reason, text: String::new(), claimed: None, times: 0 }
}

#[test]
fn a_flood_of_any_kind_takes_bounded_memory_and_the_last_entries_stay() {
    let (mut journal, start) = start();
    for n in 0..10_000 {
        let now = start + Duration::from_millis(n.into());
        journal.sent(now, host(n), &(0..100).map(|more| endpoint(n + more)).collect::<Vec<_>>());
        journal.gave_up(now, host(100_000 + n));
        journal.caller_refused(now, refusal(now, endpoint(n), RefusalReason::Expired));
        journal.send_failed(now, endpoint(n), Some(1));
        journal.probed(now, host(n), endpoint(n), n);
        journal.repeated(now, host(n), "n", endpoint(n));
        let flow =
            FlowKey { local: host(1), remote: host(n), local_port: 1, remote_port: 2, protocol: 17, fragment: false };
        journal.dropped(now, (Direction::Inbound, DropReason::NoRule), flow, None, None);
        journal.relay_refused(RelayRefused { from: host(n), to: host(1), am_relay: false, last: now });
    }
    let told = journal.diagnosis();
    assert_eq!(told.attempts.len(), MAX_PEERS + MAX_NOWHERE);
    assert!(told.attempts.iter().all(|attempt| attempt.tried.len() <= MAX_ENDPOINTS));
    assert!(told.attempts.iter().any(|attempt| attempt.peer == host(9_999)));
    assert_eq!((told.callers.len(), told.sends.len()), (MAX_CALLERS, MAX_SENDS));
    assert_eq!((told.unheard.len(), journal.probes.values().count()), (MAX_UNHEARD, MAX_PROBES));
    assert_eq!((told.drops.len(), told.relays.len()), (MAX_DROPS, MAX_RELAYS));
}

#[test]
fn a_scan_of_the_overlay_does_not_evict_a_peer_that_was_called() {
    let (mut journal, start) = start();
    journal.sent(start, host(1), &[endpoint(1)]);
    for n in 2..1000 {
        journal.gave_up(start + Duration::from_secs(n.into()), host(n));
    }
    assert!(journal.diagnosis().attempts.iter().any(|attempt| attempt.peer == host(1)));
}

#[test]
fn a_tunnel_ends_what_was_wrong_with_its_peer_and_frees_the_memory() {
    let (mut journal, start) = start();
    journal.sent(start, host(1), &[endpoint(1)]);
    journal.send_failed(start, endpoint(1), Some(101));
    assert_eq!(journal.diagnosis().attempts[0].tried[0].error, Some(101));
    journal.sent(start + Duration::from_secs(1), host(1), &[endpoint(1)]);
    assert_eq!(journal.diagnosis().attempts[0].tried[0].error, None, "the last message was sent");
    journal.connected(&[host(1)], endpoint(1));
    let told = journal.diagnosis();
    assert!(told.attempts.is_empty() && told.sends.is_empty());
    assert_eq!(journal.attempts.capacity(), 0);
}

#[test]
fn a_refusal_stays_until_the_endpoint_that_it_came_from_is_silent() {
    let (mut journal, start) = start();
    journal.refused(start, host(1), refusal(start, endpoint(1), RefusalReason::Blocked));
    let late = start + STALE_AFTER * 2;
    journal.sent(late, host(1), &[endpoint(2)]);
    assert!(journal.diagnosis().attempts[0].refusal.is_some(), "nobody asked there again");
    journal.sent(late, host(1), &[endpoint(1)]);
    assert!(journal.diagnosis().attempts[0].refusal.is_none(), "it is silent by now");
}

#[test]
fn only_the_endpoint_that_was_probed_answers_a_probe_and_once() {
    let (mut journal, start) = start();
    journal.probed(start, host(1), endpoint(1), 77);
    assert!(!journal.probe_answered(start, endpoint(2), 77) && !journal.probe_answered(start, endpoint(1), 78));
    assert_eq!(journal.diagnosis().attempts[0].tried[0].heard, None);
    assert!(journal.probe_answered(start, endpoint(1), 77));
    assert_eq!(journal.diagnosis().attempts[0].tried[0].heard, Some(start));
    assert!(!journal.probe_answered(start, endpoint(1), 77));
}

#[test]
fn only_certificates_that_take_turns_are_two_hosts() {
    let (mut journal, start) = start();
    let [a, b] = [1u8, 2]
        .map(|n| (format!("{n:02}").repeat(32).parse::<Fingerprint>().expect("a fingerprint"), endpoint(n.into())));
    journal.replaced(start, host(1), a, b);
    assert!(journal.diagnosis().doubles.is_empty(), "a renewal");
    journal.replaced(start, host(1), b, a);
    let told = journal.diagnosis().doubles;
    assert_eq!((told[0].turns, told[0].seen.len()), (1, 2));
    journal.replaced(start, host(2), a, b);
    journal.named_differently(start, host(2), ["db", "DB"]);
    assert_eq!(journal.diagnosis().doubles.len(), 1, "a renewal");
    journal.named_differently(start, host(2), ["db", "web"]);
    assert_eq!(journal.diagnosis().doubles[1].names, ["db", "web"], "at once");
}

#[test]
fn refusals_in_a_row_are_counted() {
    let (mut journal, start) = start();
    for reason in [RefusalReason::Blocked, RefusalReason::Expired, RefusalReason::Expired] {
        journal.refused(start, host(1), refusal(start, endpoint(1), reason));
    }
    let told = journal.diagnosis();
    let last = told.attempts[0].refusal.as_ref().expect("a refusal");
    assert_eq!((last.reason, last.times), (RefusalReason::Expired, 2));
}
