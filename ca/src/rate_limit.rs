//! Rate limits: how often something may happen, such as failures of one address or certificates for one pod or node.

use std::{
    collections::HashMap,
    hash::Hash,
    net::{IpAddr, Ipv6Addr},
};

use nebula_cert::UnixTime;

/// Counts per key in fixed windows. Bounded, so that a flood of many keys does not exhaust memory.
///
/// Failed proofs are counted by source, which never blocks a valid proof: pods of one node, or hosts behind one NAT,
/// share an address, and one of them must not be able to lock out the others. Guessing 256 bits needs no limit, but
/// filling the audit log does.
#[derive(Debug)]
pub(crate) struct RateLimit<K> {
    most: u32,
    seconds: i64,
    counts: HashMap<K, Window>,
    /// All keys that did not fit into the table.
    others: Window,
}

#[derive(Debug, Default)]
struct Window {
    start: UnixTime,
    count: u32,
}

impl<K: Hash + Eq> RateLimit<K> {
    /// Allows at most `most` in `seconds`.
    pub(crate) fn new(most: u32, seconds: i64) -> Self {
        Self { most, seconds, counts: HashMap::new(), others: Window::default() }
    }

    /// Counts one more event; returns whether `key` is above the limit.
    pub(crate) fn is_exceeded_by(&mut self, key: K, now: UnixTime) -> bool {
        if self.counts.len() >= MAX_KEYS && !self.counts.contains_key(&key) {
            self.counts.retain(|_, window| window.is_open(self.seconds, now));
        }
        let has_room = self.counts.len() < MAX_KEYS || self.counts.contains_key(&key);
        let window = if has_room { self.counts.entry(key).or_default() } else { &mut self.others };
        if !window.is_open(self.seconds, now) {
            *window = Window { start: now, count: 0 };
        }
        window.count = window.count.saturating_add(1);
        window.count > self.most
    }

    /// Whether `key` has reached the limit already.
    pub(crate) fn is_reached_by(&self, key: &K, now: UnixTime) -> bool {
        let window = self.counts.get(key);
        window.is_some_and(|window| window.is_open(self.seconds, now) && window.count >= self.most)
    }
}

impl Window {
    /// Also false if the clock was set back to before the start.
    fn is_open(&self, seconds: i64, now: UnixTime) -> bool {
        (self.start..self.start.saturating_add(seconds)).contains(&now)
    }
}

/// The source that an address counts for: one host can have any address of its IPv6 /64.
pub(crate) fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}

const MAX_KEYS: usize = 4_096;

#[cfg(test)]
mod tests {
    use super::*;

    fn limit() -> RateLimit<u32> {
        RateLimit::new(20, 60)
    }

    #[test]
    fn the_limit_is_per_key_and_ends_with_its_window() {
        let mut limit = limit();
        assert!((0..20).all(|_| !limit.is_reached_by(&1, 100) && !limit.is_exceeded_by(1, 100)));
        assert!(limit.is_reached_by(&1, 100));
        assert!(limit.is_exceeded_by(1, 159));
        assert!(!limit.is_exceeded_by(2, 159));
        assert!(!limit.is_reached_by(&1, 160));
        assert!(!limit.is_exceeded_by(1, 160));
    }

    #[test]
    fn a_clock_set_back_does_not_lock_a_key_out() {
        let mut limit = limit();
        assert_eq!((0..100).filter(|_| limit.is_exceeded_by(1, 1_000)).count(), 80);
        assert!(!limit.is_exceeded_by(1, 10));
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_source() {
        let address = |text: &str| source(text.parse().unwrap());
        assert_eq!(address("2001:db8::1"), address("2001:db8::ffff:1"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_eq!(address("::ffff:10.0.0.1"), address("10.0.0.1"));
        assert_ne!(address("10.0.0.1"), address("10.0.0.2"));
    }

    #[test]
    fn the_table_stays_bounded_and_the_overflow_is_limited_as_one() {
        let mut limit = limit();
        let exceeded = (0..20_000).filter(|key| limit.is_exceeded_by(*key, 100)).count();
        assert!(limit.counts.len() <= MAX_KEYS);
        assert!(exceeded > 15_000);
        assert!(!limit.is_exceeded_by(30_000, 300));
    }
}
