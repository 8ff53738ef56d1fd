//! The body of a test request that tests how large a packet passes, and of its reply.
//!
//! Go Nebula before 1.11 writes the header of its reply over the first 16 bytes of the body that it is about to
//! return, and panics if the body is longer. A body of just 16 bytes does it no harm, and shows by what comes back
//! whether longer ones would. Through a relay, it has room for the header and returns even the short body unchanged,
//! so there only the reply of this program, which has a mark of its own, shows anything.

use std::borrow::Cow;
use std::time::Duration;

/// One probe. Its length is the size that it tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SizeProbe {
    /// Tells probes by the present path from those by earlier ones.
    pub(crate) number: u32,
    /// When it was sent, since the search began. The peer returns it.
    pub(crate) stamp: Duration,
    /// Length of the body in bytes, which is that of an overlay packet.
    pub(crate) size: u16,
}

/// The reply to a [`SizeProbe`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SizeReply {
    /// The peer runs this program: it put a mark of its own on a short probe.
    Marked(SizeProbe),
    /// The peer, or a relay, returned what it got.
    Returned(SizeProbe),
    /// The peer returned something else in place of a short probe.
    Garbled,
}

impl SizeProbe {
    /// Whether it tests nothing but what the peer does with it.
    pub(crate) fn is_short(&self) -> bool {
        self.size <= SHORT
    }

    /// What to answer a request with this body: the same, except that a short one gets the mark of this program.
    pub(crate) fn reply(body: &[u8]) -> Cow<'_, [u8]> {
        match Self::read(body) {
            Some(probe) if probe.is_short() => [REPLY, &body[MARK.len()..]].concat().into(),
            _ => body.into(),
        }
    }

    /// The body of the message: a mark, the number and the time, padded with zeros.
    pub(crate) fn body(&self) -> Vec<u8> {
        let micros = u64::try_from(self.stamp.as_micros()).unwrap_or(u64::MAX);
        let mut body = [&MARK[..], &self.number.to_be_bytes(), &micros.to_be_bytes()].concat();
        body.resize(body.len().max(self.size.into()), 0);
        body
    }

    /// Reads the body of a request; `None` if it asks something else.
    pub(crate) fn read(body: &[u8]) -> Option<Self> {
        Self::read_marked(body, MARK)
    }

    fn read_marked(body: &[u8], mark: &[u8; 4]) -> Option<Self> {
        let size = u16::try_from(body.len()).ok()?;
        let rest = body.strip_prefix(mark)?;
        let (number, rest) = rest.split_first_chunk()?;
        let micros = rest.first_chunk()?;
        let stamp = Duration::from_micros(u64::from_be_bytes(*micros));
        Some(Self { number: u32::from_be_bytes(*number), stamp, size })
    }
}

impl SizeReply {
    /// Reads the body of a reply; `None` if it answers something else. A body that is garbled has nothing but its
    /// length, so everything else of that length has to be ruled out before.
    pub(crate) fn read(body: &[u8]) -> Option<Self> {
        let own = SizeProbe::read_marked(body, REPLY).map(Self::Marked);
        let returned = || SizeProbe::read(body).map(Self::Returned);
        let garbled = || (body.len() == usize::from(SHORT)).then_some(Self::Garbled);
        own.or_else(returned).or_else(garbled)
    }
}

const MARK: &[u8; 4] = b"pmtu";
const REPLY: &[u8; 4] = b"PMTU";
/// Length of mark, number and time: the shortest body of all, and the longest that every release of Go Nebula
/// survives.
pub(crate) const SHORT: u16 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_is_as_long_as_it_says_and_is_read_back_from_its_answer() {
        let probe = SizeProbe { number: 0xdead_beef, stamp: Duration::from_micros(1_234_567), size: 1240 };
        let body = probe.body();
        assert_eq!(body.len(), 1240);
        assert_eq!(SizeProbe::read(&body), Some(probe));
    }

    #[test]
    fn a_short_probe_is_no_longer_than_every_release_of_go_survives_and_its_answer_tells_who_wrote_it() {
        let probe = SizeProbe { number: 7, stamp: Duration::from_micros(9), size: SHORT };
        let body = probe.body();
        assert_eq!(body.len(), 16);
        assert_eq!(SizeReply::read(&body), Some(SizeReply::Returned(probe)), "Go Nebula 1.11 returns what it gets");
        assert_eq!(SizeReply::read(&SizeProbe::reply(&body)), Some(SizeReply::Marked(probe)));
        assert_eq!(SizeProbe::read(&SizeProbe::reply(&body)), None, "a reply is no request");
        let long = SizeProbe { size: 17, ..probe }.body();
        assert_eq!(*SizeProbe::reply(&long), long);
    }

    #[test]
    fn other_replies_are_no_answers() {
        let long = vec![0; 1240];
        for body in [&b""[..], b"pmtu", b"pmtu0123", &long] {
            assert_eq!((SizeProbe::read(body), SizeReply::read(body)), (None, None));
        }
    }
}
