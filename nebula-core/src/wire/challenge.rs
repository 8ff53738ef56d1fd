//! The body of a test request that finds out whether the peer is where it seems to be, and of its reply, which is the
//! same.
//!
//! Go Nebula before 1.11 writes the header of its reply over the body. What it returns has the same length, which no
//! other test request has, and proves nothing.

/// What only somebody who got the request knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Challenge([u8; TOKEN_LEN]);

/// A reply to a challenge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChallengeReply {
    /// The peer returned this.
    Returned(Challenge),
    /// The peer returned something else.
    Garbled,
}

impl Challenge {
    /// The first bytes of `code`.
    pub(crate) fn new(code: &[u8; 32]) -> Self {
        let mut token = [0; TOKEN_LEN];
        token.copy_from_slice(&code[..TOKEN_LEN]);
        Self(token)
    }

    /// Length of the body.
    pub(crate) const LEN: usize = LEN;

    /// Whether this is the body of a request, or of its intact reply.
    pub(crate) fn is_in(body: &[u8]) -> bool {
        body.len() == LEN && body.starts_with(MARK)
    }

    /// The body of the request.
    pub(crate) fn body(self) -> [u8; LEN] {
        let mut body = [0; LEN];
        let (mark, token) = body.split_at_mut(MARK.len());
        mark.copy_from_slice(MARK);
        token.copy_from_slice(&self.0);
        body
    }
}

impl ChallengeReply {
    /// Reads the body of a reply; `None` if it answers something else.
    pub(crate) fn read(body: &[u8]) -> Option<Self> {
        let body: &[u8; LEN] = body.try_into().ok()?;
        let token = body.strip_prefix(MARK).and_then(|token| token.try_into().ok());
        Some(token.map_or(Self::Garbled, |token| Self::Returned(Challenge(token))))
    }
}

const MARK: &[u8; 4] = b"here";
/// Enough that nobody guesses it.
const TOKEN_LEN: usize = 11;
/// No release of Go Nebula is harmed by a body of up to 16 bytes.
const LEN: usize = MARK.len() + TOKEN_LEN;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::path_probe::{PathProbe, PathReply};

    #[test]
    fn a_reply_is_the_same_bytes_and_anything_else_of_that_length_is_garbled() {
        let challenge = Challenge::new(&[7; 32]);
        let body = challenge.body();
        assert!(body.len() <= 16 && Challenge::is_in(&body));
        assert_eq!(ChallengeReply::read(&body), Some(ChallengeReply::Returned(challenge)));
        let garbled = [0x14, 1, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(ChallengeReply::read(&garbled), Some(ChallengeReply::Garbled));
        for other in [&b""[..], b"here", &[0; 16], &PathProbe { number: 1, in_use: true, span: 0 }.request()[..]] {
            assert_eq!((ChallengeReply::read(other), Challenge::is_in(other)), (None, false));
        }
        assert_eq!((PathProbe::read(&body), PathReply::read(&body)), (None, None));
    }
}
