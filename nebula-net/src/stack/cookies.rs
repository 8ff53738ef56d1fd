//! SYN cookies (RFC 4987 section 3.6): what an answered SYN offered, inside the sequence number of the answer, so
//! that the handshake can be finished after its connection was forgotten.
//!
//! ```text
//!  31                              8 7     5 4     2  1   0
//! +---------------------------------+-------+-------+---+---+
//! |  24 bits of a keyed hash (MAC)  |  MSS  | shift | S | P |   the last 8 bits are XORed with the first 8
//! +---------------------------------+-------+-------+---+---+
//! ```
//!
//! `S`: selective acknowledgements are permitted. `P`: the last bit of the period in which the cookie was made. Each
//! period has a key of its own, and a cookie is good for the rest of its period and the next one. Timestamps need no
//! room: the segment that brings a cookie back has the option if the SYN had it.
//!
//! The initial sequence number of every connection that a peer opens is a cookie. So it costs nothing to forget one
//! that is half open, but for the repetition of an answer that was lost.

use std::time::Duration;

use super::Flow;
use super::random::Secret;
use crate::tcp::segment::Options;

/// How long a key is used.
pub(crate) const PERIOD: Duration = Duration::from_secs(32);
/// What a SYN may have said, rounded down to one of these. The last MSS stands for the largest that this side takes.
const MSS: [u16; 8] = [88, 536, 1024, 1200, 1220, 1240, 1460, u16::MAX];
const SHIFTS: [Option<u8>; 8] = [None, Some(0), Some(2), Some(4), Some(6), Some(7), Some(8), Some(10)];
/// What a SYN without the option means, over either family (RFC 9293 section 3.7.1).
const DEFAULT_MSS: u16 = 536;

/// A SYN, and when its cookie is made or checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchange {
    pub(crate) flow: Flow,
    /// Sequence number of the SYN.
    pub(crate) peer_initial: u32,
    /// Number of the present period.
    pub(crate) period: u64,
    /// Largest MSS that this side takes.
    pub(crate) mss: u16,
}

impl Exchange {
    /// The sequence number with which a SYN with these options is answered.
    pub(crate) fn make(&self, secret: &Secret, offered: &Options) -> u32 {
        let mss = offered.mss.unwrap_or(DEFAULT_MSS);
        let index = if mss >= self.mss { MSS.len() - 1 } else { MSS.iter().rposition(|it| *it <= mss).unwrap_or(0) };
        let shift = SHIFTS.iter().rposition(|it| *it <= offered.window_scale).unwrap_or(0);
        let bits = (index << 5 | shift << 2 | usize::from(offered.sack_permitted) << 1) as u8;
        self.seal(secret, bits | (self.period & 1) as u8)
    }

    /// What the SYN offered that was answered with this sequence number, but for its timestamps; `None` if none was.
    pub(crate) fn open(&self, secret: &Secret, cookie: u32) -> Option<Options> {
        let bits = cookie as u8 ^ (cookie >> 24) as u8;
        let age = (self.period ^ u64::from(bits)) & 1;
        let then = Self { period: self.period.checked_sub(age)?, ..*self };
        if then.seal(secret, bits) != cookie {
            return None;
        }
        let mss = MSS[usize::from(bits >> 5)].min(self.mss);
        let window_scale = SHIFTS[usize::from(bits >> 2 & 7)];
        Some(Options { mss: Some(mss), window_scale, sack_permitted: bits & 2 != 0, ..Options::default() })
    }

    fn seal(&self, secret: &Secret, bits: u8) -> u32 {
        let hash = secret.cookie(self.flow, self.peer_initial, self.period, bits);
        hash & !0xff | u32::from(bits ^ (hash >> 24) as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange() -> Exchange {
        let flow = Flow { local: "10.0.0.1:80".parse().unwrap(), remote: "10.0.0.2:1000".parse().unwrap() };
        Exchange { flow, peer_initial: 77, period: 5, mss: 1260 }
    }

    #[test]
    fn a_cookie_says_what_the_syn_offered() {
        let secret = Secret::new([7; 32]);
        for (mss, read) in [(Some(40), 88), (None, 536), (Some(1239), 1220), (Some(1260), 1260), (Some(8960), 1260)] {
            for (shift, read_shift) in [(None, None), (Some(0), Some(0)), (Some(7), Some(7)), (Some(14), Some(10))] {
                for sack_permitted in [false, true] {
                    let offered = Options { mss, window_scale: shift, sack_permitted, ..Options::default() };
                    let cookie = exchange().make(&secret, &offered);
                    let expected = Options { mss: Some(read), window_scale: read_shift, ..offered };
                    assert_eq!(exchange().open(&secret, cookie), Some(expected));
                    assert_eq!(
                        Exchange { period: 6, ..exchange() }.open(&secret, cookie),
                        Some(expected),
                        "the next period"
                    );
                }
            }
        }
    }

    #[test]
    fn a_cookie_is_good_for_one_syn_of_two_periods() {
        let secret = Secret::new([7; 32]);
        let cookie = exchange().make(&secret, &Options::default());
        let mut other = exchange();
        other.flow.remote.set_port(1001);
        let wrong = [
            Exchange { period: 4, ..exchange() },
            Exchange { period: 7, ..exchange() },
            Exchange { peer_initial: 78, ..exchange() },
            other,
        ];
        assert!(wrong.iter().all(|it| it.open(&secret, cookie).is_none()));
        assert!(exchange().open(&Secret::new([8; 32]), cookie).is_none());
        assert!((0..32).all(|bit| exchange().open(&secret, cookie ^ 1 << bit).is_none()));
    }
}
