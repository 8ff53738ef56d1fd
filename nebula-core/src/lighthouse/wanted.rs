//! Queries that this lighthouse could not answer, kept for a while: the asker is told as soon as the host registers.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use nebula_cert::Version;

use crate::index::LocalIndex;

/// Unanswered queries by subject and asker. Bounded: the oldest query is evicted first.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// By subject and the tunnel of the asker: when it last asked, and the version to answer in.
    asked: BTreeMap<(IpAddr, LocalIndex), (Instant, Version)>,
    /// Keys in the order in which they were first asked. Holds every key of `asked`, and some that were answered.
    order: VecDeque<(IpAddr, LocalIndex)>,
}

impl Wanted {
    /// Remembers that the peer of tunnel `asker` asked about `subject`.
    pub(crate) fn ask(&mut self, now: Instant, subject: IpAddr, asker: LocalIndex, version: Version) {
        let key = (subject, asker);
        if self.asked.insert(key, (now, version)).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > MAX_WANTED {
            self.forget_oldest();
        }
    }

    /// Takes those who recently asked about `subject`, with the version to answer in. They are not told twice.
    pub(crate) fn take(&mut self, now: Instant, subject: IpAddr) -> Vec<(LocalIndex, Version)> {
        if self.asked.is_empty() {
            return Vec::new();
        }
        let range = (subject, LocalIndex(0))..=(subject, LocalIndex(u32::MAX));
        let keys: Vec<_> = self.asked.range(range).map(|(key, _)| *key).collect();
        let taken = keys.into_iter().filter_map(|key| Some((key.1, self.asked.remove(&key)?)));
        taken.filter(|(_, (at, _))| now < *at + REMEMBERED_FOR).map(|(asker, (_, version))| (asker, version)).collect()
    }

    /// Removes expired queries.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.asked.retain(|_, (at, _)| now < *at + REMEMBERED_FOR);
        self.order.retain(|key| self.asked.contains_key(key));
        self.order.shrink_to(2 * self.order.len());
    }

    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.order.pop_front() {
            self.asked.remove(&oldest);
        }
    }
}

/// A handshake in progress asks again within this time.
const REMEMBERED_FOR: Duration = Duration::from_secs(10);
/// Bounds the memory to about half a megabyte.
const MAX_WANTED: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    const ASKER: LocalIndex = LocalIndex(7);

    fn host(number: u32) -> IpAddr {
        IpAddr::from((0x0a2a_0000 + number).to_be_bytes())
    }

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn wanted() -> (Wanted, Instant) {
        (Wanted::default(), Instant::now())
    }

    #[test]
    fn who_asked_lately_is_told_once() {
        let (mut wanted, start) = wanted();
        wanted.ask(start, host(1), ASKER, Version::V1);
        wanted.ask(start, host(1), LocalIndex(8), Version::V2);
        wanted.ask(start + REMEMBERED_FOR, host(1), LocalIndex(8), Version::V2);
        assert!(wanted.take(start, host(2)).is_empty());
        let told = wanted.take(start + REMEMBERED_FOR, host(1));
        assert_eq!(told, [(LocalIndex(8), Version::V2)], "the other one asked too long ago");
        assert!(wanted.take(start + REMEMBERED_FOR, host(1)).is_empty());
    }

    #[test]
    fn questions_are_bounded_and_expire() {
        let (mut wanted, start) = wanted();
        let most = u32::try_from(MAX_WANTED).unwrap();
        for _ in 0..2 {
            (0..2 * most).for_each(|number| wanted.ask(start, host(number), ASKER, Version::V2));
        }
        assert_eq!((wanted.order.len(), wanted.asked.len()), (MAX_WANTED, MAX_WANTED));
        assert!(wanted.take(start, host(0)).is_empty(), "the oldest made room");
        assert_eq!(wanted.take(start, host(2 * most - 1)), [(ASKER, Version::V2)]);
        wanted.expire(start + REMEMBERED_FOR);
        assert_eq!((wanted.order.len(), wanted.asked.len()), (0, 0));
    }
}
