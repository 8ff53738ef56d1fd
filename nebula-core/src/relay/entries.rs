//! The control plane's record of every hop this node is part of. Bounded, so that a peer cannot make it grow without
//! limit.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use nebula_cert::Version;

use super::{Hop, HopKey, Kind, RelayIndex};
use crate::index::{LocalIndex, RemoteIndex};

/// Progress in setting up a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// This node sent the neighbour a request.
    Requested,
    /// The neighbour sent a request, but the hop on the other side is not ready. Only on the relay.
    PeerRequested,
    /// In use.
    Established,
    /// An end is gone. The indexes are kept: neighbours do not expect them to change while the tunnel lives.
    Disestablished,
}

/// One hop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) index: RelayIndex,
    pub(crate) key: HopKey,
    pub(crate) state: State,
    /// The neighbour's index, once it is known.
    pub(crate) remote: Option<RemoteIndex>,
    /// Version of the address fields in messages to the neighbour.
    pub(crate) form: Version,
    /// The neighbour waits for a response.
    pub(crate) owes_response: bool,
    /// Time of the last request to the neighbour.
    pub(crate) asked: Option<Instant>,
    /// Time of the last change, or of the last traffic that the control plane saw.
    pub(crate) touched: Instant,
}

impl Entry {
    /// The hop for sending, if both sides are ready.
    pub(crate) fn hop(&self) -> Option<Hop> {
        self.reply_hop().filter(|_| self.state == State::Established)
    }

    /// The hop for replies to what came through it. Its sender has it ready, even if this node does not.
    pub(crate) fn reply_hop(&self) -> Option<Hop> {
        self.remote.map(|index| Hop { tunnel: self.key.tunnel, index })
    }
}

/// All hops, with indexes for every kind of lookup.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    by_index: BTreeMap<RelayIndex, Entry>,
    by_key: BTreeMap<HopKey, RelayIndex>,
    by_far: BTreeSet<(IpAddr, RelayIndex)>,
    by_remote: BTreeSet<(RemoteIndex, RelayIndex)>,
}

impl Entries {
    /// Adds an entry; `None` if there are too many for the neighbour or in total, or if the index or the key is taken.
    /// An entry that was not used for long may be evicted for it; it is returned and must be retired.
    pub(crate) fn insert(
        &mut self,
        now: Instant,
        index: RelayIndex,
        key: HopKey,
        state: State,
        form: Version,
    ) -> Option<Inserted> {
        if index == RelayIndex(0) || self.by_index.contains_key(&index) || self.by_key.contains_key(&key) {
            return None;
        }
        let of_tunnel = || self.of_tunnel(key.tunnel);
        let evicted = if of_tunnel().count() >= MAX_HOPS_PER_TUNNEL {
            Some(of_tunnel().min_by_key(|entry| entry.touched).filter(|entry| entry.is_idle(now))?.index)
        } else if self.by_index.len() >= MAX_ENTRIES {
            Some(self.by_index.values().find(|entry| entry.is_idle(now))?.index)
        } else {
            None
        };
        let evicted = evicted.and_then(|index| self.remove(index));
        let entry = Entry { index, key, state, remote: None, form, owes_response: false, asked: None, touched: now };
        self.by_index.insert(index, entry);
        self.by_key.insert(key, index);
        self.by_far.insert((key.far, index));
        Some(Inserted { entry, evicted })
    }

    pub(crate) fn remove(&mut self, index: RelayIndex) -> Option<Entry> {
        let entry = self.by_index.remove(&index)?;
        self.by_key.remove(&entry.key);
        self.by_far.remove(&(entry.key.far, index));
        if let Some(remote) = entry.remote {
            self.by_remote.remove(&(remote, index));
        }
        Some(entry)
    }

    /// Records the index that the neighbour sent.
    pub(crate) fn set_remote(&mut self, index: RelayIndex, remote: RemoteIndex) {
        let Some(entry) = self.by_index.get_mut(&index) else { return };
        if let Some(old) = entry.remote.replace(remote) {
            self.by_remote.remove(&(old, index));
        }
        self.by_remote.insert((remote, index));
    }

    /// Hops whose neighbour chose this index; several neighbours may choose the same.
    pub(crate) fn of_remote(&self, remote: RemoteIndex) -> impl Iterator<Item = &Entry> {
        let range = (remote, RelayIndex(0))..=(remote, RelayIndex(u32::MAX));
        self.by_remote.range(range).filter_map(|(_, index)| self.by_index.get(index))
    }

    pub(crate) fn get(&self, index: RelayIndex) -> Option<&Entry> {
        self.by_index.get(&index)
    }

    pub(crate) fn get_mut(&mut self, index: RelayIndex) -> Option<&mut Entry> {
        self.by_index.get_mut(&index)
    }

    pub(crate) fn at(&self, key: HopKey) -> Option<&Entry> {
        self.by_key.get(&key).and_then(|index| self.by_index.get(index))
    }

    /// Hops through the neighbour of this tunnel.
    pub(crate) fn of_tunnel(&self, tunnel: LocalIndex) -> impl Iterator<Item = &Entry> {
        let first = HopKey { tunnel, kind: Kind::Terminal, far: IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED) };
        let keys = self.by_key.range(first..).take_while(move |(key, _)| key.tunnel == tunnel);
        keys.filter_map(|(_, index)| self.by_index.get(index))
    }

    /// Hops to the far end with this address.
    pub(crate) fn to_far(&self, far: IpAddr) -> impl Iterator<Item = &Entry> {
        let range = (far, RelayIndex(0))..=(far, RelayIndex(u32::MAX));
        self.by_far.range(range).filter_map(|(_, index)| self.by_index.get(index))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.by_index.values()
    }
}

impl Entry {
    fn is_idle(&self, now: Instant) -> bool {
        let limit = if self.state == State::Established { IDLE_AFTER } else { UNANSWERED_AFTER };
        now >= self.touched + limit
    }
}

/// Result of an insertion.
#[derive(Debug)]
pub(crate) struct Inserted {
    pub(crate) entry: Entry,
    /// The entry that was evicted for it.
    pub(crate) evicted: Option<Entry>,
}

/// Maximum number of hops through one neighbour. A gateway behind a relay has one for each of its clients.
const MAX_HOPS_PER_TUNNEL: usize = 1024;
/// Maximum number of entries, about 200 bytes each.
const MAX_ENTRIES: usize = 1 << 16;
/// An entry that was unused for this long may be evicted, but only when room is needed: peers rely on it.
const IDLE_AFTER: Duration = Duration::from_secs(600);
const UNANSWERED_AFTER: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    fn key(tunnel: u32, far: u32) -> HopKey {
        HopKey { tunnel: LocalIndex(tunnel), kind: Kind::Forwarding, far: IpAddr::V4(far.into()) }
    }

    fn fill(entries: &mut Entries, now: Instant, tunnel: u32) {
        for n in 0..MAX_HOPS_PER_TUNNEL as u32 {
            let index = RelayIndex(tunnel << 16 | n | 1 << 30);
            assert!(entries.insert(now, index, key(tunnel, n), State::Requested, Version::V2).is_some());
        }
    }

    #[test]
    fn an_entry_is_found_by_its_index_its_way_its_tunnel_and_its_far_end() {
        let (mut entries, now) = (Entries::default(), base());
        for (index, tunnel, far) in [(1, 1, 5), (2, 1, 6), (3, 2, 5)] {
            entries.insert(now, RelayIndex(index), key(tunnel, far), State::Requested, Version::V2).unwrap();
        }
        let indexes = |found: Vec<&Entry>| found.iter().map(|entry| entry.index.0).collect::<Vec<_>>();
        assert_eq!(indexes(entries.of_tunnel(LocalIndex(1)).collect()), [1, 2]);
        assert_eq!(indexes(entries.to_far(key(1, 5).far).collect()), [1, 3]);
        assert_eq!(entries.at(key(2, 5)).unwrap().index, RelayIndex(3));
        entries.remove(RelayIndex(1)).unwrap();
        assert_eq!(indexes(entries.of_tunnel(LocalIndex(1)).collect()), [2]);
        assert_eq!(indexes(entries.to_far(key(1, 5).far).collect()), [3]);
        assert!(entries.at(key(1, 5)).is_none());
    }

    #[test]
    fn a_peer_has_a_limited_number_and_an_old_unanswered_one_makes_room() {
        let (mut entries, now) = (Entries::default(), base());
        fill(&mut entries, now, 1);
        let more = |entries: &mut Entries, at| {
            entries.insert(at, RelayIndex(9), key(1, 1 << 20), State::Requested, Version::V2)
        };
        assert!(more(&mut entries, now).is_none());
        assert!(entries.insert(now, RelayIndex(8), key(2, 1), State::Requested, Version::V2).is_some());
        let inserted = more(&mut entries, now + UNANSWERED_AFTER).unwrap();
        assert!(inserted.evicted.is_some());
        assert_eq!(entries.of_tunnel(LocalIndex(1)).count(), MAX_HOPS_PER_TUNNEL);
    }

    #[test]
    fn all_peers_together_have_a_limited_number() {
        let (mut entries, now) = (Entries::default(), base());
        for tunnel in 0..(MAX_ENTRIES / MAX_HOPS_PER_TUNNEL) as u32 {
            fill(&mut entries, now, tunnel);
        }
        let new = (RelayIndex(9), key(1 << 20, 1));
        assert!(entries.insert(now, new.0, new.1, State::Requested, Version::V2).is_none());
        assert_eq!(entries.iter().count(), MAX_ENTRIES);
    }

    #[test]
    fn an_index_that_is_taken_or_zero_is_refused() {
        let (mut entries, now) = (Entries::default(), base());
        assert!(entries.insert(now, RelayIndex(0), key(1, 1), State::Requested, Version::V2).is_none());
        assert!(entries.insert(now, RelayIndex(7), key(1, 1), State::Requested, Version::V2).is_some());
        assert!(entries.insert(now, RelayIndex(7), key(1, 2), State::Requested, Version::V2).is_none());
    }
}
