//! Limits how many refusals are logged, and counts the rest: anybody who reaches the service can be refused any number
//! of times without a proof, and must not be able to fill the disk that way.

use std::net::IpAddr;

use nebula_cert::UnixTime;

use crate::rate_limit::{self, RateLimit};

/// One limit per source, and one for all sources together, since sources can be made up (IPv6).
#[derive(Debug)]
pub(crate) struct RefusalThrottle {
    of_source: RateLimit<IpAddr>,
    of_all: RateLimit<()>,
    left_out: u64,
}

impl RefusalThrottle {
    pub(crate) fn new() -> Self {
        Self {
            of_source: RateLimit::new(MAX_LINES_OF_A_SOURCE, WINDOW_SECONDS),
            of_all: RateLimit::new(MAX_LINES, WINDOW_SECONDS),
            left_out: 0,
        }
    }

    /// Whether to log one more refusal of this source; otherwise it is counted as left out.
    pub(crate) fn admits(&mut self, source: IpAddr, now: UnixTime) -> bool {
        // A source above its own limit uses up nothing of the common limit.
        let is_over =
            self.of_source.is_exceeded_by(rate_limit::source(source), now) || self.of_all.is_exceeded_by((), now);
        self.left_out += u64::from(is_over);
        !is_over
    }

    /// Number of refusals left out since the last call.
    pub(crate) fn take_left_out(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }
}

const WINDOW_SECONDS: i64 = 60;
/// More than enough for all pods of a node that start together and are all refused.
const MAX_LINES_OF_A_SOURCE: u32 = 60;
/// About 300 bytes each: 100 MB a day.
const MAX_LINES: u32 = 240;

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    const NOW: UnixTime = 1_800_000_000;

    fn admitted(throttle: &mut RefusalThrottle, sources: impl Iterator<Item = IpAddr>, now: UnixTime) -> u32 {
        sources.map(|source| u32::from(throttle.admits(source, now))).sum()
    }

    #[test]
    fn a_source_that_is_refused_all_the_time_is_counted_instead_of_written_down() {
        let (mut throttle, noisy, other) = (RefusalThrottle::new(), [192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        assert_eq!(admitted(&mut throttle, std::iter::repeat_n(noisy, 1_000), NOW), MAX_LINES_OF_A_SOURCE);
        assert!(throttle.admits(other, NOW), "others are still seen");
        assert_eq!(throttle.take_left_out(), 1_000 - u64::from(MAX_LINES_OF_A_SOURCE));
        assert_eq!(throttle.take_left_out(), 0);
        assert!(throttle.admits(noisy, NOW + WINDOW_SECONDS));
    }

    #[test]
    fn invented_sources_are_limited_together() {
        let mut throttle = RefusalThrottle::new();
        let network = |number: u32| IpAddr::V6(Ipv6Addr::from_bits(u128::from(number) << 64));
        assert_eq!(admitted(&mut throttle, (0..100_000).map(network), NOW), MAX_LINES);
        assert_eq!(throttle.take_left_out(), 100_000 - u64::from(MAX_LINES));
    }
}
