//! What each peer makes this node keep, counted by the certificate of the tunnel: a peer is one, however many
//! addresses are behind it.
//!
//! A peer may have as much as is left free. So one alone gets half of a limit, and whatever some have taken, the next
//! one finds room.

use std::collections::HashMap;

use nebula_cert::Fingerprint;

use super::Id;
use super::slots::Slots;

/// Peers with connections.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// `None` stands for all peers whose certificate is not known.
    by_certificate: HashMap<Option<Fingerprint>, Id>,
    uses: Slots<Use>,
    /// Of all together.
    total: Total,
}

/// What one peer uses.
#[derive(Debug, Default)]
struct Use {
    certificate: Option<Fingerprint>,
    connections: usize,
    buffered: usize,
}

/// What all peers use.
#[derive(Debug, Clone, Copy, Default)]
struct Total {
    connections: usize,
    buffered: usize,
}

impl Peers {
    /// Whether a peer may have another connection, of so many for all.
    pub(crate) fn may_open(&self, certificate: Option<Fingerprint>, limit: usize) -> bool {
        let known = self.find(certificate).and_then(|id| self.uses.get(id));
        known.map_or(0, |known| known.connections) < limit.saturating_sub(self.total.connections)
    }

    /// A peer that has connections.
    pub(crate) fn find(&self, certificate: Option<Fingerprint>) -> Option<Id> {
        self.by_certificate.get(&certificate).copied()
    }

    /// Whether so many more bytes may be kept for a peer, of so many for all.
    pub(crate) fn may_keep(&self, peer: Id, bytes: usize, limit: usize) -> bool {
        let known = self.uses.get(peer).map_or(0, |known| known.buffered);
        known + bytes <= limit.saturating_sub(self.total.buffered)
    }

    /// Counts a connection.
    pub(crate) fn open(&mut self, certificate: Option<Fingerprint>) -> Id {
        let new = || Use { certificate, ..Use::default() };
        let id = *self.by_certificate.entry(certificate).or_insert_with(|| self.uses.insert(new()));
        if let Some(peer) = self.uses.get_mut(id) {
            peer.connections += 1;
        }
        self.total.connections += 1;
        id
    }

    /// A connection is gone, with the bytes that it had.
    pub(crate) fn close(&mut self, peer: Id, buffered: usize) {
        self.buffer(peer, buffered, 0);
        let Some(known) = self.uses.get_mut(peer) else { return };
        known.connections -= 1;
        self.total.connections -= 1;
        if known.connections == 0
            && let Some(known) = self.uses.remove(peer)
        {
            self.by_certificate.remove(&known.certificate);
        }
    }

    /// A connection keeps `after` bytes instead of `before`.
    pub(crate) fn buffer(&mut self, peer: Id, before: usize, after: usize) {
        if let Some(known) = self.uses.get_mut(peer) {
            known.buffered = known.buffered + after - before;
            self.total.buffered = self.total.buffered + after - before;
        }
    }

    /// Connections of all peers, and the bytes that they have, counted again.
    pub(crate) fn totals(&self) -> (usize, usize) {
        let sum = |of: fn(&Use) -> usize| self.uses.ids().filter_map(|id| self.uses.get(id)).map(of).sum::<usize>();
        let totals = (sum(|known| known.connections), sum(|known| known.buffered));
        assert_eq!(totals, (self.total.connections, self.total.buffered));
        totals
    }

    /// Bytes that are kept for all peers.
    pub(crate) fn buffered(&self) -> usize {
        self.total.buffered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_some_have_taken_the_next_one_finds_room() {
        let mut peers = Peers::default();
        let certificate = |number| Some(Fingerprint([number; 32]));
        let mut opened = Vec::new();
        for number in 0..4 {
            let before = opened.len();
            while peers.may_open(certificate(number), 100) {
                opened.push(peers.open(certificate(number)));
            }
            assert!(opened.len() > before, "{number}");
        }
        assert_eq!(opened.len(), 50 + 25 + 13 + 6);
        let first = opened[0];
        assert!(peers.may_keep(first, 50, 100) && peers.may_keep(first, 100, 100) && !peers.may_keep(first, 101, 100));
        peers.buffer(first, 0, 50);
        assert!(!peers.may_keep(first, 1, 100) && peers.may_keep(opened[60], 50, 100));
        opened.into_iter().enumerate().for_each(|(at, id)| peers.close(id, if at == 0 { 50 } else { 0 }));
        assert_eq!((peers.buffered(), peers.uses.len(), peers.by_certificate.len()), (0, 0, 0));
    }
}
