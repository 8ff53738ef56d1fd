//! What a test message says, by its body: the one parser of all that test requests and their replies are used for.
//!
//! Bodies are told apart by a mark at their beginning. Go Nebula before 1.11 garbles what it returns and leaves
//! nothing but the length, so 15 bytes without a mark answer a challenge, and 16 bytes a short `SizeProbe`.

use super::challenge::{Challenge, ChallengeReply};
use super::header::MessageType;
use super::path_probe::{Answerer, PathProbe, PathReply, RELAY_MARK};
use super::size_probe::{SizeProbe, SizeReply};

/// What a test request asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TestRequest {
    /// Whether this node is there; or something that this version does not know, and returns.
    Plain,
    /// Whether this node is where it seems to be.
    Challenge,
    /// How good a path is.
    Path(PathProbe),
    /// How large a packet the path carries.
    Size,
}

/// What a test reply answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TestReply {
    /// The peer is there; or something that this version does not know.
    Plain,
    /// Where the peer is.
    Challenge(ChallengeReply),
    /// How good a path of the tunnel is.
    Path(PathReply),
    /// How good a relay is, which is the peer; the number is without its mark.
    Relay(PathReply),
    /// How large a packet the path carries.
    Size(SizeReply),
}

impl TestRequest {
    pub(crate) fn read(body: &[u8]) -> Self {
        if Challenge::is_in(body) {
            return Self::Challenge;
        }
        let size = || SizeProbe::read(body).map(|_| Self::Size);
        PathProbe::read(body).map(Self::Path).or_else(size).unwrap_or(Self::Plain)
    }
}

impl TestReply {
    pub(crate) fn read(body: &[u8]) -> Self {
        if let Some(reply) = ChallengeReply::read(body) {
            return Self::Challenge(reply);
        }
        match PathReply::read(body) {
            Some(reply) if reply.number & RELAY_MARK == 0 => Self::Path(reply),
            Some(reply) => Self::Relay(PathReply { number: reply.number & !RELAY_MARK, ..reply }),
            None => SizeReply::read(body).map_or(Self::Plain, Self::Size),
        }
    }
}

/// Whether this message only measures a path, and does not say that its sender is at its source now.
#[must_use]
pub fn only_measures(kind: MessageType, body: &[u8]) -> bool {
    match kind {
        MessageType::TestRequest => match TestRequest::read(body) {
            TestRequest::Challenge => true,
            TestRequest::Path(probe) => !probe.in_use,
            TestRequest::Plain | TestRequest::Size => false,
        },
        MessageType::TestReply => match TestReply::read(body) {
            TestReply::Challenge(_) => true,
            TestReply::Path(reply) | TestReply::Relay(reply) => reply.by != Answerer::Echoes,
            TestReply::Plain | TestReply::Size(_) => false,
        },
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NUMBER: u32 = 7;

    #[test]
    fn each_meaning_of_a_test_is_read_from_what_its_writer_wrote() {
        let challenge = Challenge::new(&[7; 32]);
        let path = PathProbe { number: NUMBER, in_use: true, span: 0 };
        let relay = PathProbe::of_relay(NUMBER);
        let size = SizeProbe { number: NUMBER, stamp: Duration::from_micros(9), size: 1240 };
        let reply = |by| PathReply { number: NUMBER, by, missing: None };
        for (body, request, answer) in [
            (Vec::new(), TestRequest::Plain, TestReply::Plain),
            (b"what is this".to_vec(), TestRequest::Plain, TestReply::Plain),
            (
                challenge.body().to_vec(),
                TestRequest::Challenge,
                TestReply::Challenge(ChallengeReply::Returned(challenge)),
            ),
            (path.request(), TestRequest::Path(path), TestReply::Path(reply(Answerer::Echoes))),
            (relay.request(), TestRequest::Path(relay), TestReply::Relay(reply(Answerer::Echoes))),
            (size.body(), TestRequest::Size, TestReply::Size(SizeReply::Returned(size))),
        ] {
            assert_eq!((TestRequest::read(&body), TestReply::read(&body)), (request, answer), "{body:?}");
        }
        assert_eq!(TestReply::read(&path.reply(true, 0)), TestReply::Path(reply(Answerer::Leads)));
        assert_eq!(TestReply::read(&relay.reply(false, 0)), TestReply::Relay(reply(Answerer::Follows)));
    }

    #[test]
    fn what_an_old_go_nebula_garbles_is_known_by_its_length_alone() {
        assert_eq!(TestReply::read(&[0x14; 15]), TestReply::Challenge(ChallengeReply::Garbled));
        assert_eq!(TestReply::read(&[0x14; 16]), TestReply::Size(SizeReply::Garbled));
        for length in [0, 1, 14, 17, 1240] {
            assert_eq!(TestReply::read(&vec![0x14; length]), TestReply::Plain, "{length}");
        }
        let path = PathProbe { number: 1, in_use: false, span: 0 };
        let longer = [path.reply(false, 0), vec![0; 7]].concat();
        assert_eq!(longer.len(), 16, "a later version may append something");
        assert!(matches!(TestReply::read(&longer), TestReply::Path(_)));
    }

    #[test]
    fn other_tests_are_no_measurements() {
        for body in [&b""[..], b"path", b"PATH\0\0\0\0", b"pmtu\0\0\0\0\0\0\0\0\0\0\0\0"] {
            assert!(!only_measures(MessageType::TestRequest, body) && !only_measures(MessageType::TestReply, body));
        }
    }

    #[test]
    fn a_tunnel_stays_where_it_is_only_for_what_measures() {
        let probe = PathProbe { number: 1, in_use: false, span: 0 };
        let used = PathProbe { in_use: true, ..probe };
        assert!(only_measures(MessageType::TestRequest, &probe.request()));
        assert!(only_measures(MessageType::TestReply, &used.reply(false, 0)));
        assert!(!only_measures(MessageType::TestRequest, &used.request()));
        assert!(!only_measures(MessageType::TestReply, &probe.request()), "Go Nebula moves the tunnel by its echo");
        assert!(!only_measures(MessageType::Data, &probe.request()));
        let challenge = Challenge::new(&[1; 32]).body();
        assert!(
            only_measures(MessageType::TestRequest, &challenge) && only_measures(MessageType::TestReply, &challenge)
        );
    }
}
