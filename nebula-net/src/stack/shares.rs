//! A queue whose places belong to peers: when it is full, the peer that has most of them pays for the next one.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Id;

/// Things in the order of their arrival, each of a peer.
#[derive(Debug)]
pub(crate) struct Shares<T> {
    items: BTreeMap<Place, (Id, T)>,
    by_peer: HashMap<Id, BTreeSet<Place>>,
    /// Peers by the number of their things.
    by_count: BTreeSet<(usize, Id)>,
    next: u64,
}

/// The place of one thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(u64);

impl<T> Default for Shares<T> {
    fn default() -> Self {
        Self { items: BTreeMap::new(), by_peer: HashMap::new(), by_count: BTreeSet::new(), next: 0 }
    }
}

impl<T> Shares<T> {
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    pub(crate) fn push(&mut self, peer: Id, item: T) -> Place {
        let place = Place(self.next);
        self.next += 1;
        self.items.insert(place, (peer, item));
        let places = self.by_peer.entry(peer).or_default();
        self.by_count.remove(&(places.len(), peer));
        places.insert(place);
        self.by_count.insert((places.len(), peer));
        place
    }

    pub(crate) fn remove(&mut self, place: Place) -> Option<T> {
        let (peer, item) = self.items.remove(&place)?;
        if let Some(places) = self.by_peer.get_mut(&peer) {
            self.by_count.remove(&(places.len(), peer));
            places.remove(&place);
            if places.is_empty() {
                self.by_peer.remove(&peer);
            } else {
                self.by_count.insert((places.len(), peer));
            }
        }
        Some(item)
    }

    /// Takes the oldest of all.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let first = *self.items.first_key_value()?.0;
        self.remove(first)
    }

    /// Whether no other peer has more than this one.
    pub(crate) fn is_heaviest(&self, peer: Id) -> bool {
        let most = self.by_count.last().map_or(0, |(count, _)| *count);
        self.by_peer.get(&peer).map_or(0, BTreeSet::len) >= most
    }

    /// Takes the oldest of the peer that has most.
    pub(crate) fn take_oldest_of_heaviest(&mut self) -> Option<T> {
        let (_, peer) = self.by_count.last()?;
        let place = *self.by_peer.get(peer)?.first()?;
        self.remove(place)
    }

    /// Takes the newest of the peer that has most.
    pub(crate) fn take_newest_of_heaviest(&mut self) -> Option<T> {
        let (_, peer) = self.by_count.last()?;
        let place = *self.by_peer.get(peer)?.last()?;
        self.remove(place)
    }

    /// All of them in their order.
    pub(crate) fn into_items(self) -> impl Iterator<Item = T> {
        self.items.into_values().map(|(_, item)| item)
    }
}

#[cfg(test)]
mod tests {
    use super::super::slots::Slots;
    use super::*;

    #[test]
    fn the_peer_that_has_most_pays() {
        let mut peers = Slots::default();
        let [a, b, c] = [(); 3].map(|()| peers.insert(()));
        let mut shares = Shares::default();
        for (peer, item) in [(a, 1), (b, 2), (a, 3), (c, 4), (a, 5)] {
            shares.push(peer, item);
        }
        assert!(shares.is_heaviest(a) && !shares.is_heaviest(b));
        assert_eq!(shares.take_oldest_of_heaviest(), Some(1));
        assert_eq!(shares.take_newest_of_heaviest(), Some(5));
        let place = shares.push(b, 6);
        assert_eq!(shares.take_oldest_of_heaviest(), Some(2));
        assert_eq!((shares.remove(place), shares.remove(place)), (Some(6), None));
        assert_eq!((shares.len(), shares.pop(), shares.pop(), shares.pop()), (2, Some(3), Some(4), None));
        assert!(shares.by_peer.is_empty() && shares.by_count.is_empty());
        assert!(shares.is_heaviest(a), "all have nothing");
    }
}
