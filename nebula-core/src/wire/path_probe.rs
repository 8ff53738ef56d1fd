//! The body of a test request that measures a path, and of its reply.
//!
//! Go Nebula answers a test request with the same body, so a node that measures paths answers with another one: that is how
//! two of them know each other. Go Nebula also follows whoever sends it anything from another endpoint, so it is never sent a
//! probe by a direct path other than the present one.

use super::challenge::{Challenge, ChallengeReply};
use super::header::MessageType;

/// A test request that measures a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathProbe {
    /// Tells probes of one tunnel apart.
    pub number: u32,
    /// The sender uses this path, so the receiver follows it there. All others leave the tunnel where it is.
    pub in_use: bool,
}

/// The reply to a [`PathProbe`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathReply {
    /// Number of the probe.
    pub number: u32,
    /// Who answered.
    pub by: Answerer,
}

/// A peer, by how it answers a [`PathProbe`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answerer {
    /// It lets the other side measure the direct paths between the two, and choose.
    Follows,
    /// It does that itself.
    Leads,
    /// It knows nothing of measurements, and returned the request.
    Echoes,
}

impl PathProbe {
    /// The body of the request.
    #[must_use]
    pub fn request(self) -> [u8; LEN] {
        body(REQUEST, u8::from(self.in_use), self.number)
    }

    /// The body of the reply. `leads`: see [`Answerer::Leads`].
    #[must_use]
    pub fn reply(self, leads: bool) -> [u8; LEN] {
        body(REPLY, u8::from(leads), self.number)
    }

    /// Reads the body of a request; `None` if it is something else.
    #[must_use]
    pub fn read(body: &[u8]) -> Option<Self> {
        let (flag, number) = parts(body.strip_prefix(REQUEST)?)?;
        Some(Self { number, in_use: flag })
    }
}

impl PathReply {
    /// Reads the body of a reply; `None` if it answers something else.
    #[must_use]
    pub fn read(body: &[u8]) -> Option<Self> {
        if let Some(PathProbe { number, .. }) = PathProbe::read(body) {
            return Some(Self { number, by: Answerer::Echoes });
        }
        let (leads, number) = parts(body.strip_prefix(REPLY)?)?;
        Some(Self { number, by: if leads { Answerer::Leads } else { Answerer::Follows } })
    }
}

/// Whether this message only measures a path, and does not say that its sender is at its source now.
#[must_use]
pub fn only_measures(kind: MessageType, body: &[u8]) -> bool {
    match kind {
        MessageType::TestRequest if Challenge::is_in(body) => true,
        MessageType::TestReply if ChallengeReply::read(body).is_some() => true,
        MessageType::TestRequest => PathProbe::read(body).is_some_and(|probe| !probe.in_use),
        MessageType::TestReply => PathReply::read(body).is_some_and(|reply| reply.by != Answerer::Echoes),
        _ => false,
    }
}

fn body(mark: &[u8; 4], flag: u8, number: u32) -> [u8; LEN] {
    let [a, b, c, d] = *mark;
    let [e, f, g, h] = number.to_be_bytes();
    [a, b, c, d, flag, e, f, g, h]
}

/// The flag and the number. Later versions may append something.
fn parts(rest: &[u8]) -> Option<(bool, u32)> {
    let (&flag, rest) = rest.split_first()?;
    Some((flag & 1 == 1, u32::from_be_bytes(*rest.first_chunk()?)))
}

const LEN: usize = 9;
const REQUEST: &[u8; 4] = b"path";
const REPLY: &[u8; 4] = b"PATH";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_tells_who_answered() {
        let probe = PathProbe { number: 0xdead_beef, in_use: false };
        assert_eq!(PathProbe::read(&probe.request()), Some(probe));
        for (body, by) in [
            (probe.reply(false), Answerer::Follows),
            (probe.reply(true), Answerer::Leads),
            (probe.request(), Answerer::Echoes),
        ] {
            assert_eq!(PathReply::read(&body), Some(PathReply { number: probe.number, by }));
        }
    }

    #[test]
    fn other_tests_are_no_measurements() {
        for body in [&b""[..], b"path", b"PATH\0\0\0\0", b"pmtu\0\0\0\0\0\0\0\0\0\0\0\0"] {
            assert_eq!((PathProbe::read(body), PathReply::read(body)), (None, None));
            assert!(!only_measures(MessageType::TestRequest, body) && !only_measures(MessageType::TestReply, body));
        }
    }

    #[test]
    fn a_tunnel_stays_where_it_is_only_for_what_measures() {
        let probe = PathProbe { number: 1, in_use: false };
        let used = PathProbe { in_use: true, ..probe };
        assert!(only_measures(MessageType::TestRequest, &probe.request()));
        assert!(only_measures(MessageType::TestReply, &used.reply(false)));
        assert!(!only_measures(MessageType::TestRequest, &used.request()));
        assert!(!only_measures(MessageType::TestReply, &probe.request()), "Go Nebula moves the tunnel by its echo");
        assert!(!only_measures(MessageType::Data, &probe.request()));
        let challenge = Challenge::new(&[1; 32]).body();
        assert!(
            only_measures(MessageType::TestRequest, &challenge) && only_measures(MessageType::TestReply, &challenge)
        );
    }
}
