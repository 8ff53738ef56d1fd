//! Rate limit on answering new handshakes of peers, shared fairly between sources.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

/// A token bucket for all sources together. While more than half of it is left, every handshake is admitted. Below
/// that, each source has a share, which shrinks with the tokens left: flooding sources are refused first, and a source
/// that has had no answer in this second is refused last.
#[derive(Debug)]
pub(crate) struct Admission {
    /// `None`: every handshake is admitted.
    rate: Option<NonZeroU32>,
    /// Tokens left, in thousandths of a handshake.
    tokens: u64,
    filled: Instant,
    /// Answers per source in this second. Sources share a slot by a hash that changes every second. Allocated only
    /// under pressure.
    shares: Vec<u16>,
    second: u64,
    epoch: Instant,
    key: u64,
}

impl Admission {
    /// Admits `rate` new handshakes per second. `key` is random, so that nobody can choose which source to share a slot
    /// with.
    pub(crate) fn new(rate: Option<NonZeroU32>, now: Instant, key: u64) -> Self {
        let mut admission = Self { rate, tokens: 0, filled: now, shares: Vec::new(), second: 0, epoch: now, key };
        admission.tokens = admission.capacity();
        admission
    }

    /// Decides whether to answer a new handshake from this underlay address; an accepted one counts towards the limit.
    pub(crate) fn admit(&mut self, now: Instant, from: IpAddr) -> bool {
        if self.rate.is_none() {
            return true;
        }
        self.refill(now);
        if self.tokens < TOKENS_PER_HANDSHAKE {
            return false;
        }
        let half = self.capacity() / 2;
        if self.tokens <= half && !self.has_share(now, from, half) {
            return false;
        }
        self.tokens -= TOKENS_PER_HANDSHAKE;
        true
    }

    /// Half a second's worth, so that the burst of an ordinary fleet passes, but at least two handshakes.
    fn capacity(&self) -> u64 {
        let rate = self.rate.map_or(0, NonZeroU32::get);
        (u64::from(rate) * TOKENS_PER_HANDSHAKE / 2).max(2 * TOKENS_PER_HANDSHAKE)
    }

    fn refill(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.filled).min(MAX_REFILL_TIME);
        let rate = u64::from(self.rate.map_or(0, NonZeroU32::get));
        // Microseconds times handshakes per second are millionths; tokens are thousandths.
        let new = u64::try_from(since.as_micros()).unwrap_or(u64::MAX).saturating_mul(rate) / 1000;
        if new > 0 {
            self.tokens = self.tokens.saturating_add(new).min(self.capacity());
            // Advance only by the time that became tokens, so that no fraction is lost however often this is called.
            let paid = Duration::from_micros((new * 1000).div_ceil(rate.max(1)));
            self.filled = if since < MAX_REFILL_TIME { self.filled + paid } else { now };
        }
    }

    fn has_share(&mut self, now: Instant, from: IpAddr, half: u64) -> bool {
        let second = now.saturating_duration_since(self.epoch).as_secs();
        if self.shares.is_empty() || self.second != second {
            self.shares.clear();
            self.shares.resize(SOURCE_SLOTS, 0);
            self.second = second;
        }
        let largest = u64::from(self.rate.map_or(0, NonZeroU32::get)) / SHARE_DIVISOR;
        let share = (largest.saturating_mul(self.tokens) / half).max(1);
        let slot = self.slot(second, from);
        let answered = &mut self.shares[slot];
        if u64::from(*answered) >= share {
            return false;
        }
        *answered = answered.saturating_add(1);
        true
    }

    fn slot(&self, second: u64, from: IpAddr) -> usize {
        let source = match from.to_canonical() {
            IpAddr::V4(address) => u64::from(address.to_bits()),
            // The owner of one address of a /64 has all of them.
            IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
        };
        let mut hash = source ^ self.key;
        for word in [second, self.key.rotate_left(32)] {
            hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) ^ word;
            hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        }
        (hash >> 32) as usize % SOURCE_SLOTS
    }
}

/// Tokens are thousandths, so that low rates refill evenly.
const TOKENS_PER_HANDSHAKE: u64 = 1000;
/// Long enough to fill any bucket.
const MAX_REFILL_TIME: Duration = Duration::from_secs(4);
const SOURCE_SLOTS: usize = 4096;
/// Under pressure, one source gets at most this fraction of the rate.
const SHARE_DIVISOR: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    fn admission(rate: u32, now: Instant) -> Admission {
        Admission::new(NonZeroU32::new(rate), now, 0x0123_4567_89ab_cdef)
    }

    /// `flooders` sources send `per_second` handshakes each, and 20 others send one per second. Returns how many of
    /// each kind were admitted in ten seconds.
    fn flood(admission: &mut Admission, start: Instant, flooders: u32, per_second: u32) -> (u32, u32) {
        let (mut flooded, mut honest) = (0, 0);
        for millisecond in 0..10_000_u32 {
            let now = start + Duration::from_millis(millisecond.into());
            for flooder in 0..flooders {
                let so_far = |at: u32| u64::from(at) * u64::from(per_second) / 1000;
                for _ in so_far(millisecond)..so_far(millisecond + 1) {
                    flooded += u32::from(admission.admit(now, IpAddr::from([192, 0, 2, flooder as u8])));
                }
            }
            if millisecond % 50 == 17 {
                let other = IpAddr::from([198, 51, 100, (millisecond / 50 % 20) as u8]);
                honest += u32::from(admission.admit(now, other));
            }
        }
        (flooded, honest)
    }

    #[test]
    fn a_source_that_floods_takes_what_is_left_and_starves_nobody() {
        let start = base();
        let (flooded, honest) = flood(&mut admission(100, start), start, 1, 20_000);
        assert_eq!(honest, 200, "every handshake of those who call once a second is answered");
        assert!((300..=1050).contains(&flooded), "{flooded}");
    }

    #[test]
    fn many_sources_that_flood_cannot_starve_those_that_call_now_and_then() {
        let start = base();
        let (flooded, honest) = flood(&mut admission(400, start), start, 100, 1000);
        assert!(flooded + honest <= 400 * 10 + 200, "{flooded}");
        // At 250 times the cap; refused sources try again within a fifth of a second.
        assert!(honest >= 140, "{honest} of 200");
    }

    #[test]
    fn the_cap_holds_for_any_mixture_of_sources() {
        let start = base();
        let mut admission = admission(50, start);
        let mut admitted = 0;
        for n in 0..200_000_u32 {
            let now = start + Duration::from_micros(u64::from(n) * 100);
            admitted += u32::from(admission.admit(now, IpAddr::from(n.to_be_bytes())));
        }
        // Twenty seconds' worth, plus the bucket that was full at the start.
        assert!((990..=1025).contains(&admitted), "{admitted}");
    }

    #[test]
    fn a_burst_of_half_a_seconds_worth_from_one_address_passes_by_half_without_question() {
        let start = base();
        let mut admission = admission(4000, start);
        let nat = IpAddr::from([192, 0, 2, 1]);
        assert!((0..1000).all(|_| admission.admit(start, nat)));
    }

    #[test]
    fn the_highest_rate_is_counted_without_overflow() {
        let start = base();
        let mut admission = admission(u32::MAX, start);
        admission.tokens = admission.capacity() / 2;
        assert!(admission.admit(start, IpAddr::from([192, 0, 2, 1])));
        assert!(admission.admit(start + MAX_REFILL_TIME * 2, IpAddr::from([192, 0, 2, 1])));
    }

    #[test]
    fn without_a_cap_everybody_is_admitted() {
        let start = base();
        let mut admission = Admission::new(None, start, 1);
        assert!((0..100_000).all(|_| admission.admit(start, IpAddr::from([192, 0, 2, 1]))));
    }

    #[test]
    fn the_addresses_of_one_ipv6_network_are_one_source() {
        let start = base();
        let mut admission = admission(100, start);
        let address = |n: u32| IpAddr::from((0x2001_0db8_u128 << 96 | u128::from(n)).to_be_bytes());
        let admitted = (0..1000).filter(|n| admission.admit(start, address(*n))).count();
        assert!(admission.admit(start, "2001:db8:0:1::1".parse().unwrap()), "another network, after {admitted}");
        assert!(!admission.admit(start, address(1000)));
    }
}
