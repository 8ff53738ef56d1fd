//! Why a handshake led nowhere, in one clause for the log. `nebula ctl why` says more.

use std::time::{Duration, Instant};

use nebula_core::diagnosis::{Attempt, Tried};
use nebula_linux::errno;

/// The kinds of causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The answer was refused.
    Refused,
    /// The answer cannot be opened.
    OtherCipher,
    /// The answer was fine, and the ML-KEM exchange that follows got none.
    LongMessagesLost,
    /// The system sends nothing there.
    CannotSend,
    /// Nobody says where the peer is.
    NobodyKnows,
    /// There is no answer.
    NoAnswer,
}

/// The kind of the likeliest cause.
pub fn kind(attempt: &Attempt) -> Kind {
    let has_failed = |tried: &Tried| tried.error.is_some();
    if attempt.refusal.is_some() {
        Kind::Refused
    } else if attempt.tried.iter().any(|tried| tried.unopened > 0) {
        Kind::OtherCipher
    } else if attempt.tried.iter().any(|tried| tried.offers > 0) {
        Kind::LongMessagesLost
    } else if attempt.tried.is_empty() {
        Kind::NobodyKnows
    } else if attempt.tried.iter().all(has_failed) {
        Kind::CannotSend
    } else {
        Kind::NoAnswer
    }
}

/// The likeliest cause that the record of a peer shows.
pub fn of(attempt: &Attempt) -> String {
    let first = |which: fn(&Tried) -> bool| attempt.tried.iter().find(|tried| which(tried));
    let text = match kind(attempt) {
        Kind::Refused => attempt
            .refusal
            .as_ref()
            .map(|refusal| format!("the answer from {} was refused: {}", refusal.from, refusal.text)),
        Kind::OtherCipher => first(|tried| tried.unopened > 0).map(|other| {
            format!("{} answered and the answer cannot be opened: it has another cipher than this host", other.endpoint)
        }),
        Kind::LongMessagesLost => first(|tried| tried.offers > 0).map(|at| {
            format!(
                "{} answered, but not the datagram of 1,216 bytes with the ML-KEM key: the path may not carry it",
                at.endpoint
            )
        }),
        Kind::CannotSend => first(|tried| tried.error.is_some()).map(|failed| {
            let error = send_error(failed.error.unwrap_or_default());
            format!("nothing can be sent to {}: {error}", failed.endpoint)
        }),
        Kind::NobodyKnows => {
            Some("nobody says where it is: static_host_map has no entry, and no lighthouse knows it".to_owned())
        }
        Kind::NoAnswer => None,
    };
    text.unwrap_or_else(|| no_answer(attempt))
}

fn no_answer(attempt: &Attempt) -> String {
    let sent: Vec<_> = attempt.tried.iter().filter(|tried| tried.error.is_none()).collect();
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
        let tried = |unopened, error| Tried {
            endpoint,
            sent: 4,
            unopened,
            offers: 0,
            last: now(),
            error,
            probed: None,
            heard: None,
        };
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
        let unanswered = "no answer to 4 messages from 192.0.2.7:4242; the cause is not known";
        for (attempt, expected, of_kind) in [
            (attempt(vec![]), "nobody says where it is", Kind::NobodyKnows),
            (attempt(vec![tried(0, None)]), unanswered, Kind::NoAnswer),
            (attempt(vec![tried(0, Some(1)), tried(0, None)]), unanswered, Kind::NoAnswer),
            (
                attempt(vec![tried(1, None)]),
                "192.0.2.7:4242 answered and the answer cannot be opened",
                Kind::OtherCipher,
            ),
            (
                attempt(vec![Tried { offers: 2, ..tried(0, None) }]),
                "answered, but not the datagram of 1,216 bytes",
                Kind::LongMessagesLost,
            ),
            (attempt(vec![tried(0, Some(1))]), "192.0.2.7:4242: operation not permitted (EPERM)", Kind::CannotSend),
            (attempt(vec![tried(0, Some(101))]), "network is unreachable (ENETUNREACH)", Kind::CannotSend),
            (attempt(vec![tried(0, Some(0))]), "listen.host has no address of that family", Kind::CannotSend),
            (
                Attempt { refusal: Some(refusal), ..attempt(vec![tried(1, None)]) },
                "the answer from 192.0.2.7:4242 was refused: it is blocked",
                Kind::Refused,
            ),
        ] {
            let text = of(&attempt);
            assert!(text.contains(expected), "{text}");
            assert_eq!(kind(&attempt), of_kind, "{text}");
        }
        let heard = Tried { heard: Some(now()), ..tried(0, None) };
        assert!(of(&attempt(vec![heard.clone()])).contains("192.0.2.7:4242 answers probes"));
        let later = Attempt { last: now() + HEARD_WITHIN * 2, ..attempt(vec![heard]) };
        assert!(of(&later).contains("the cause is not known"), "{}", of(&later));
    }
}
