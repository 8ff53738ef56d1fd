//! The data path's view of relay hops: looked up by own index, without a lock.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Hop, RelayIndex};
use crate::index::LocalIndex;

/// What to do with an authenticated datagram of a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Unwrap it: this node is the end of the path.
    Terminal,
    /// Pass it on; `None` while there is no next hop.
    Forward(Option<Hop>),
}

/// Readers never wait; only the control plane writes. Holds no keys: tunnels are found by their index.
#[derive(Debug, Default)]
pub(crate) struct RelayTable {
    /// Allocated with the first hop: even an empty map takes 16 KiB, more with many processors, and few nodes have
    /// relays.
    hops: OnceLock<papaya::HashMap<RelayIndex, Published>>,
}

#[derive(Debug)]
struct Published {
    neighbour: LocalIndex,
    role: Role,
    used: AtomicBool,
}

impl RelayTable {
    /// Publishes a hop, or changes the role of one that is published.
    pub(crate) fn publish(&self, index: RelayIndex, neighbour: LocalIndex, role: Role) {
        let hops = self.hops.get_or_init(papaya::HashMap::new).pin();
        let used = hops.get(&index).is_some_and(|old| old.used.load(Ordering::Relaxed));
        hops.insert(index, Published { neighbour, role, used: AtomicBool::new(used) });
    }

    /// Removes a hop: datagrams for this index are refused from now on.
    pub(crate) fn retire(&self, index: RelayIndex) {
        if let Some(hops) = self.hops.get() {
            hops.pin().remove(&index);
        }
    }

    /// Tunnel to the neighbour, and what to do with datagrams that arrive through it.
    pub(crate) fn get(&self, index: RelayIndex) -> Option<(LocalIndex, Role)> {
        self.look(index, |hop| (hop.neighbour, hop.role))
    }

    /// Records authenticated traffic.
    pub(crate) fn mark_used(&self, index: RelayIndex) {
        self.look(index, |hop| {
            if !hop.used.load(Ordering::Relaxed) {
                hop.used.store(true, Ordering::Relaxed);
            }
        });
    }

    /// Whether there was traffic since the last call.
    pub(crate) fn take_used(&self, index: RelayIndex) -> bool {
        self.look(index, |hop| hop.used.swap(false, Ordering::Relaxed)).unwrap_or(false)
    }

    /// Number of known hops.
    pub(crate) fn len(&self) -> usize {
        self.hops.get().map_or(0, papaya::HashMap::len)
    }

    fn look<T>(&self, index: RelayIndex, at: impl FnOnce(&Published) -> T) -> Option<T> {
        self.hops.get()?.pin().get(&index).map(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::RemoteIndex;

    #[test]
    fn a_hop_is_found_until_it_is_retired_and_remembers_traffic_over_a_change() {
        let table = RelayTable::default();
        let (index, neighbour) = (RelayIndex(7), LocalIndex(1));
        table.publish(index, neighbour, Role::Forward(None));
        table.mark_used(index);
        let hop = Hop { tunnel: LocalIndex(2), index: RemoteIndex(9) };
        table.publish(index, neighbour, Role::Forward(Some(hop)));
        assert_eq!(table.get(index), Some((neighbour, Role::Forward(Some(hop)))));
        assert_eq!((table.take_used(index), table.take_used(index)), (true, false));
        table.retire(index);
        assert_eq!((table.get(index), table.len()), (None, 0));
    }
}
