//! Limits answers by datagram, whose source may be forged: how many a source gets, and how large they are.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// What a server knows about who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asker {
    /// A program of this host.
    Local,
    /// A host with a tunnel.
    Member,
    Stranger,
}

/// How a query is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    /// With so many bytes at most.
    Bytes(usize),
    /// With the question alone, marked as truncated: whoever is really there asks again by TCP.
    Truncated,
    Nothing,
}

/// Counts answers by source: a member by its address, strangers by network, as many of them may be one.
#[derive(Debug, Default)]
pub(super) struct AnswerLimit {
    sources: HashMap<IpAddr, Bucket>,
    /// All sources for which there is no room.
    others: Bucket,
}

#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    /// `None` if it is full.
    seen: Option<Instant>,
    taken: Duration,
    beyond: u32,
}

impl AnswerLimit {
    /// Decides about a query of `length` bytes.
    pub(super) fn next(&mut self, now: Instant, from: IpAddr, asker: Asker, length: usize) -> Limit {
        let (source, most) = match asker {
            Asker::Local => return Limit::Bytes(usize::MAX),
            Asker::Member => (from, usize::MAX),
            Asker::Stranger => (network_of(from), length.saturating_mul(FACTOR)),
        };
        if self.sources.len() >= MAX_SOURCES && !self.sources.contains_key(&source) {
            self.sources.retain(|_, bucket| !bucket.is_full(now));
        }
        let has_room = self.sources.len() < MAX_SOURCES || self.sources.contains_key(&source);
        let bucket = if has_room { self.sources.entry(source).or_default() } else { &mut self.others };
        bucket.take(now).map_or(Limit::Bytes(most), |beyond| match beyond % 2 {
            1 => Limit::Truncated,
            _ => Limit::Nothing,
        })
    }
}

impl Bucket {
    /// Takes one answer; how many have been asked for beyond the limit, if it is reached.
    fn take(&mut self, now: Instant) -> Option<u32> {
        self.taken = self.taken_at(now);
        self.seen = Some(now);
        if self.taken + EACH > BURST {
            self.beyond = self.beyond.wrapping_add(1);
            return Some(self.beyond);
        }
        self.taken += EACH;
        None
    }

    fn is_full(&self, now: Instant) -> bool {
        self.taken_at(now).is_zero()
    }

    fn taken_at(&self, now: Instant) -> Duration {
        let since = self.seen.map_or(Duration::MAX, |seen| now.saturating_duration_since(seen));
        self.taken.saturating_sub(since)
    }
}

fn network_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => Ipv4Addr::from_bits(v4.to_bits() & !0xff).into(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !(u128::MAX >> 56)).into(),
    }
}

/// An answer to a stranger has at most so many times the bytes of the query.
const FACTOR: usize = 3;
/// 200 answers a second.
const EACH: Duration = Duration::from_millis(5);
/// 1,000 answers at once: what a resolver asks that serves a cluster and has just started.
const BURST: Duration = Duration::from_secs(5);
const MAX_SOURCES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    const STRANGER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));

    fn now() -> Instant {
        nebula_linux::clock::now()
    }

    #[test]
    fn a_burst_is_answered_and_then_as_many_as_a_second_allows() {
        let (mut limit, start) = (AnswerLimit::default(), now());
        let mut ask = |after| limit.next(start + Duration::from_millis(after), STRANGER, Asker::Stranger, 40);
        assert!((0..1000).all(|_| ask(0) == Limit::Bytes(120)));
        assert_eq!([ask(0), ask(0), ask(0)], [Limit::Truncated, Limit::Nothing, Limit::Truncated]);
        assert!((1..=1000).all(|n| ask(n * 5) == Limit::Bytes(120)), "200 a second for as long as one likes");
        assert!(!matches!(ask(5000), Limit::Bytes(_)));
        assert!((0..1000).all(|_| ask(60_000) == Limit::Bytes(120)));
    }

    #[test]
    fn a_flood_from_forged_addresses_of_a_network_leaves_others_their_answers() {
        let (mut limit, now) = (AnswerLimit::default(), now());
        let mut sent = 0;
        for n in 0..100_000_u32 {
            let from = Ipv4Addr::from_bits(STRANGER_NETWORK | (n & 0xff)).into();
            match limit.next(now, from, Asker::Stranger, 40) {
                Limit::Bytes(bytes) => sent += bytes,
                Limit::Truncated => sent += 40,
                Limit::Nothing => {}
            }
        }
        assert!(sent <= 1000 * 120 + 50_000 * 40, "{sent} bytes for 4,000,000");
        assert_eq!(limit.next(now, [192, 0, 3, 7].into(), Asker::Stranger, 40), Limit::Bytes(120));
        assert_eq!(limit.next(now, [10, 42, 0, 7].into(), Asker::Member, 40), Limit::Bytes(usize::MAX));
        assert_eq!(limit.next(now, [127, 0, 0, 1].into(), Asker::Local, 40), Limit::Bytes(usize::MAX));
    }

    const STRANGER_NETWORK: u32 = u32::from_be_bytes([192, 0, 2, 0]);

    #[test]
    fn memory_is_bounded_and_the_overflow_is_one_source() {
        let (mut limit, now) = (AnswerLimit::default(), now());
        let answered = (0..10_000_u32).filter(|n| {
            let from = Ipv4Addr::from_bits(n << 8).into();
            matches!(limit.next(now, from, Asker::Stranger, 40), Limit::Bytes(_))
        });
        assert_eq!(answered.count(), MAX_SOURCES + 1000);
        assert_eq!(limit.sources.len(), MAX_SOURCES);
        let later = now + BURST;
        assert_eq!(limit.next(later, STRANGER, Asker::Stranger, 40), Limit::Bytes(120));
        assert_eq!(limit.sources.len(), 1, "those that have their burst again are forgotten");
    }

    #[test]
    fn strangers_count_by_network_and_members_by_address() {
        let address = |text: &str| network_of(text.parse().unwrap());
        assert_eq!(address("192.0.2.1"), address("192.0.2.255"));
        assert_eq!(address("2001:db8:1:200::1"), address("2001:db8:1:2ff::1"));
        assert_ne!(address("2001:db8:1:200::1"), address("2001:db8:1:300::1"));
    }
}
