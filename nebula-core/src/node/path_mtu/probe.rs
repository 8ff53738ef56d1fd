//! The body of a test request that tests how large a packet passes, and of its reply.

use std::time::Duration;

/// One probe. Its length is the size that it tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) struct Probe {
    /// Tells probes by the present path from those by earlier ones.
    pub(super) number: u32,
    /// When it was sent, since the search began. The peer returns it.
    pub(super) stamp: Duration,
    /// Length of the body in bytes, which is that of an overlay packet.
    pub(super) size: u16,
}

impl Probe {
    /// The body of the message: a mark, the number and the time, padded with zeros.
    pub(super) fn body(&self) -> Vec<u8> {
        let micros = u64::try_from(self.stamp.as_micros()).unwrap_or(u64::MAX);
        let mut body = [&MARK[..], &self.number.to_be_bytes(), &micros.to_be_bytes()].concat();
        body.resize(body.len().max(self.size.into()), 0);
        body
    }

    /// Reads the body of a reply; `None` if it answers something else.
    pub(in crate::node) fn read(body: &[u8]) -> Option<Self> {
        let size = u16::try_from(body.len()).ok()?;
        let rest = body.strip_prefix(MARK)?;
        let (number, rest) = rest.split_first_chunk()?;
        let micros = rest.first_chunk()?;
        let stamp = Duration::from_micros(u64::from_be_bytes(*micros));
        Some(Self { number: u32::from_be_bytes(*number), stamp, size })
    }
}

/// Other test requests have an empty body.
const MARK: &[u8; 4] = b"pmtu";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_is_as_long_as_it_says_and_is_read_back_from_its_answer() {
        let probe = Probe { number: 0xdead_beef, stamp: Duration::from_micros(1_234_567), size: 1240 };
        let body = probe.body();
        assert_eq!(body.len(), 1240);
        assert_eq!(Probe::read(&body), Some(probe));
    }

    #[test]
    fn other_replies_are_no_answers() {
        let long = vec![0; 1240];
        for body in [&b""[..], b"pmtu", b"pmtu0123", &long] {
            assert_eq!(Probe::read(body), None);
        }
    }
}
