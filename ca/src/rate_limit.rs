//! How often one source may fail before it is answered more curtly and no longer written down (rate limiting).

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
};

use nebula_cert::UnixTime;

/// Counts failed proofs per source in windows of a minute. Bounded, so that a flood from many sources costs no memory.
///
/// It never stands in the way of a valid proof: pods of one node, or hosts behind one NAT, share an address, and one of
/// them must not be able to lock out the others. Guessing 256 bits needs no limit; filling the audit log does.
#[derive(Debug, Default)]
pub(crate) struct RateLimit {
    failures: HashMap<IpAddr, Window>,
    /// All sources that found the table full.
    others: Window,
}

#[derive(Debug, Default)]
struct Window {
    start: UnixTime,
    count: u32,
}

impl RateLimit {
    /// Notes a failed proof; says whether `source` is above the limit.
    pub(crate) fn is_exceeded_by(&mut self, source: IpAddr, now: UnixTime) -> bool {
        let source = group(source);
        if self.failures.len() >= MOST_SOURCES && !self.failures.contains_key(&source) {
            self.failures.retain(|_, window| window.is_open(now));
        }
        let has_room = self.failures.len() < MOST_SOURCES || self.failures.contains_key(&source);
        let window = if has_room { self.failures.entry(source).or_default() } else { &mut self.others };
        if !window.is_open(now) {
            *window = Window { start: now, count: 0 };
        }
        window.count = window.count.saturating_add(1);
        window.count > MOST_FAILURES
    }
}

impl Window {
    /// Also false when the clock was set back behind the start.
    fn is_open(&self, now: UnixTime) -> bool {
        (self.start..self.start.saturating_add(SECONDS)).contains(&now)
    }
}

/// One host can have any address of its IPv6 /64.
fn group(source: IpAddr) -> IpAddr {
    match source.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}

const SECONDS: i64 = 60;
const MOST_FAILURES: u32 = 20;
const MOST_SOURCES: usize = 4_096;

#[cfg(test)]
mod tests {
    use super::*;

    fn source(number: u32) -> IpAddr {
        IpAddr::V4(number.into())
    }

    #[test]
    fn the_limit_is_per_source_and_ends_with_its_minute() {
        let mut limit = RateLimit::default();
        assert!((0..MOST_FAILURES).all(|_| !limit.is_exceeded_by(source(1), 100)));
        assert!(limit.is_exceeded_by(source(1), 159));
        assert!(!limit.is_exceeded_by(source(2), 159));
        assert!(!limit.is_exceeded_by(source(1), 160));
    }

    #[test]
    fn a_clock_set_back_does_not_lock_a_source_out() {
        let mut limit = RateLimit::default();
        assert_eq!((0..100).filter(|_| limit.is_exceeded_by(source(1), 1_000)).count(), 80);
        assert!(!limit.is_exceeded_by(source(1), 10));
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_source() {
        let mut limit = RateLimit::default();
        let exceeded = (0..=MOST_FAILURES)
            .filter(|host| limit.is_exceeded_by(format!("2001:db8::{host:x}").parse().unwrap(), 100));
        assert_eq!(exceeded.count(), 1);
    }

    #[test]
    fn the_table_stays_bounded_and_the_overflow_is_limited_as_one() {
        let mut limit = RateLimit::default();
        let exceeded = (0..20_000).filter(|number| limit.is_exceeded_by(source(*number), 100)).count();
        assert!(limit.failures.len() <= MOST_SOURCES);
        assert!(exceeded > 15_000);
        assert!(!limit.is_exceeded_by(source(30_000), 300));
    }
}
