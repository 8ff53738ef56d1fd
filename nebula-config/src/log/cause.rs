//! Why a handshake led nowhere, in one clause for the log. `nebula ctl why` says more.

use std::time::{Duration, Instant};

use nebula_core::diagnosis::{Attempt, Tried};
use nebula_linux::errno;

/// The likeliest cause that the record of a peer shows.
pub fn of(attempt: &Attempt) -> String {
    if let Some(refusal) = &attempt.refusal {
        return format!("the answer from {} was refused: {}", refusal.from, refusal.text);
    }
    let tried = |which: fn(&Tried) -> bool| attempt.tried.iter().filter(move |tried| which(tried));
    if let Some(other) = tried(|tried| tried.unopened > 0).next() {
        return format!(
            "{} answered and the answer cannot be opened: it has another cipher than this host",
            other.endpoint
        );
    }
    let sent: Vec<_> = tried(|tried| tried.error.is_none()).collect();
    if let (true, Some((failed, code))) =
        (sent.is_empty(), attempt.tried.iter().find_map(|tried| Some((tried, tried.error?))))
    {
        return format!("nothing can be sent to {}: {}", failed.endpoint, send_error(code));
    }
    if sent.is_empty() {
        return "nobody says where it is: static_host_map has no entry, and no lighthouse knows it".to_owned();
    }
    let count: u32 = sent.iter().map(|tried| tried.sent).sum();
    let places: Vec<_> = sent.iter().take(3).map(|tried| tried.endpoint.to_string()).collect();
    let is_recent = |heard: Instant| attempt.last.saturating_duration_since(heard) < HEARD_WITHIN;
    if let Some(tried) = sent.iter().find(|tried| tried.heard.is_some_and(is_recent)) {
        return format!(
            "no answer to {count} messages, although a Nebula at {} answers probes: the cause is there, see its log",
            tried.endpoint
        );
    }
    let more =
        if sent.len() > places.len() { format!(" and {} more", sent.len() - places.len()) } else { String::new() };
    format!(
        "no answer to {count} messages from {}{more}; the cause is not known, `nebula ctl why` looks for it: UDP may be blocked, the \
         peer be down or behind a NAT, or it refuses the certificate of this host",
        places.join(", ")
    )
}

/// What the system said instead of sending; 0: the socket has no address of that family.
pub(crate) fn send_error(code: i32) -> String {
    if code == 0 {
        return "listen.host has no address of that family".to_owned();
    }
    format!("{} ({})", errno::text(&std::io::Error::from_raw_os_error(code)), errno::symbol(code))
}

// A probe tells nothing about what happened after it.
const HEARD_WITHIN: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use nebula_core::diagnosis::{Refusal, RefusalReason};

    use super::*;
    use nebula_linux::clock::now;

    #[test]
    fn the_line_of_a_failed_handshake_names_what_is_known_of_its_cause() {
        let endpoint: SocketAddr = "192.0.2.7:4242".parse().unwrap();
        let tried =
            |unopened, error| Tried { endpoint, sent: 4, unopened, last: now(), error, probed: None, heard: None };
        let attempt = |tried: Vec<Tried>| Attempt {
            peer: [10, 42, 0, 7].into(),
            since: now(),
            last: now(),
            pending: false,
            given_up: 1,
            tried,
            refusal: None,
        };
        let refusal = Refusal {
            at: now(),
            from: endpoint,
            reason: RefusalReason::Blocked,
            text: "it is blocked".to_owned(),
            claimed: None,
            times: 1,
        };
        for (attempt, expected) in [
            (attempt(vec![]), "nobody says where it is"),
            (attempt(vec![tried(0, None)]), "no answer to 4 messages from 192.0.2.7:4242; the cause is not known"),
            (attempt(vec![tried(1, None)]), "192.0.2.7:4242 answered and the answer cannot be opened"),
            (attempt(vec![tried(0, Some(1))]), "192.0.2.7:4242: operation not permitted (EPERM)"),
            (attempt(vec![tried(0, Some(101))]), "network is unreachable (ENETUNREACH)"),
            (attempt(vec![tried(0, Some(0))]), "listen.host has no address of that family"),
            (
                Attempt { refusal: Some(refusal), ..attempt(vec![tried(1, None)]) },
                "the answer from 192.0.2.7:4242 was refused: it is blocked",
            ),
        ] {
            let text = of(&attempt);
            assert!(text.contains(expected), "{text}");
        }
        let heard = Tried { heard: Some(now()), ..tried(0, None) };
        assert!(of(&attempt(vec![heard.clone()])).contains("192.0.2.7:4242 answers probes"));
        let later = Attempt { last: now() + HEARD_WITHIN * 2, ..attempt(vec![heard]) };
        assert!(of(&later).contains("the cause is not known"), "{}", of(&later));
    }
}
