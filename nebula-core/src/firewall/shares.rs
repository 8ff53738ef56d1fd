//! The flows of a shard by peer, so that one peer cannot evict the flows of all others (fair share).

use std::collections::HashMap;
use std::net::IpAddr;

use super::flow_entry::List;

/// Peers that hold flows.
#[derive(Debug, Default)]
pub(super) struct Shares {
    holders: Vec<Holder>,
    by_peer: HashMap<IpAddr, u32>,
    vacant: Vec<u32>,
    /// The peer that held the most when last counted; see [`Shares::heaviest`].
    heaviest: u32,
}

/// One peer's flows in two lists, oldest first: unanswered and answered ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holder {
    peer: IpAddr,
    pub(super) flows: usize,
    pub(super) lists: [List; 2],
}

impl Shares {
    /// Records a further flow of `peer`.
    pub(super) fn join(&mut self, peer: IpAddr) -> u32 {
        let at = match self.by_peer.get(&peer) {
            Some(&at) => at,
            None => {
                let holder = Holder { peer, flows: 0, lists: [List::EMPTY; 2] };
                let at = self.vacant.pop().unwrap_or(self.holders.len() as u32);
                match self.holders.get_mut(at as usize) {
                    Some(vacant) => *vacant = holder,
                    None => self.holders.push(holder),
                }
                self.by_peer.insert(peer, at);
                at
            }
        };
        let flows = &mut self.holders[at as usize].flows;
        *flows += 1;
        if *flows > self.holders[self.heaviest as usize].flows {
            self.heaviest = at;
        }
        at
    }

    /// Records that a flow of the holder `at` is gone.
    pub(super) fn leave(&mut self, at: u32) {
        let holder = &mut self.holders[at as usize];
        holder.flows -= 1;
        if holder.flows == 0 {
            self.by_peer.remove(&holder.peer);
            self.vacant.push(at);
        }
    }

    /// The peer at this position.
    pub(super) fn peer(&self, at: u32) -> IpAddr {
        self.holders[at as usize].peer
    }

    /// Number of peers that hold flows.
    pub(super) fn len(&self) -> usize {
        self.by_peer.len()
    }

    pub(super) fn of(&self, peer: IpAddr) -> Option<&Holder> {
        self.by_peer.get(&peer).map(|at| &self.holders[*at as usize])
    }

    /// Whether the holder `at` holds more of `total` than if all held equally many.
    pub(super) fn holds_more_than_its_share(&self, at: u32, total: usize) -> bool {
        self.holders[at as usize].flows * self.by_peer.len() > total
    }

    pub(super) fn lists(&mut self, at: u32) -> &mut [List; 2] {
        &mut self.holders[at as usize].lists
    }

    /// A peer that holds at least the average of `total` flows. Searches all peers only if the one found last fell
    /// below it, so a flood costs one search for many evictions.
    pub(super) fn heaviest(&mut self, total: usize) -> Option<&Holder> {
        let is_heavy = |holder: &&Holder| holder.flows * self.by_peer.len() >= total.max(1);
        if self.holders.get(self.heaviest as usize).filter(is_heavy).is_none() {
            self.heaviest = (0_u32..).zip(&self.holders).max_by_key(|(_, holder)| holder.flows)?.0;
        }
        self.holders.get(self.heaviest as usize)
    }
}
