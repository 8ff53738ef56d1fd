//! The ports from which this side connects: each destination has all of them, and each is found at once, however many
//! are taken.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::Id;
use super::random::{EPHEMERAL, ephemeral};

/// Where connections of one local address lead to.
pub(crate) type Destination = (IpAddr, SocketAddr);

/// Taken ports by destination.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    destinations: HashMap<Destination, Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    /// Where the ports began (RFC 6056), and how many were used for the first time since.
    first: u16,
    fresh: u16,
    /// Those that are free again, longest first.
    freed: VecDeque<u16>,
    live: usize,
    /// Connections in TIME-WAIT, oldest first; some may be gone.
    resting: VecDeque<Id>,
}

impl Taken {
    /// Forgets the oldest connections in TIME-WAIT as long as they are over.
    fn forget_those_who(&mut self, is_over: impl Fn(Id) -> bool) {
        while self.resting.front().is_some_and(|first| is_over(*first)) {
            self.resting.pop_front();
        }
    }
}

/// Free ports that are passed over because the program listens there.
const TRIES: usize = 64;

impl Ports {
    /// Takes a port for a connection. `first` is where to begin if the destination is new, `is_usable` whether a port
    /// is nobody else's.
    pub(crate) fn take(
        &mut self,
        destination: Destination,
        first: impl FnOnce() -> u16,
        is_usable: impl Fn(u16) -> bool,
    ) -> Option<u16> {
        let new = || Taken { first: first(), ..Taken::default() };
        let taken = self.destinations.entry(destination).or_insert_with(new);
        let found = (0..TRIES).find_map(|_| {
            let port = if taken.fresh < EPHEMERAL {
                taken.fresh += 1;
                ephemeral(taken.first, taken.fresh - 1)
            } else {
                taken.freed.pop_front()?
            };
            if is_usable(port) {
                return Some(Some(port));
            }
            taken.freed.push_back(port);
            None
        });
        match found.flatten() {
            Some(port) => {
                taken.live += 1;
                Some(port)
            }
            None => None,
        }
    }

    /// A connection is gone, so its port is free.
    pub(crate) fn release(&mut self, destination: Destination, port: u16) {
        let Some(taken) = self.destinations.get_mut(&destination) else { return };
        taken.live -= 1;
        taken.freed.push_back(port);
        if taken.live == 0 {
            self.destinations.remove(&destination);
        }
    }

    /// A connection is in TIME-WAIT. `is_over` tells those of which that is no longer true.
    pub(crate) fn rest(&mut self, destination: Destination, id: Id, is_over: impl Fn(Id) -> bool) {
        let Some(taken) = self.destinations.get_mut(&destination) else { return };
        taken.forget_those_who(is_over);
        taken.resting.push_back(id);
    }

    /// The connection that has been in TIME-WAIT longest, if `may_follow` lets another one take its place.
    pub(crate) fn take_resting(
        &mut self,
        destination: Destination,
        is_over: impl Fn(Id) -> bool,
        may_follow: impl Fn(Id) -> bool,
    ) -> Option<Id> {
        let taken = self.destinations.get_mut(&destination)?;
        taken.forget_those_who(is_over);
        if may_follow(*taken.resting.front()?) { taken.resting.pop_front() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::FIRST_EPHEMERAL;
    use super::*;

    #[test]
    fn each_port_is_taken_once_and_then_the_one_that_was_free_longest() {
        let destination = (IpAddr::from([10, 0, 0, 1]), SocketAddr::from(([10, 0, 0, 2], 80)));
        let mut ports = Ports::default();
        let mut seen = vec![false; 1 << 16];
        for _ in 0..EPHEMERAL - 1 {
            let port = ports.take(destination, || 60_000, |port| port != FIRST_EPHEMERAL + 5).unwrap();
            assert!(!std::mem::replace(&mut seen[usize::from(port)], true));
        }
        assert_eq!(ports.take(destination, || 0, |port| port != FIRST_EPHEMERAL + 5), None);
        for port in [40_000, 50_000] {
            ports.release(destination, port);
        }
        assert_eq!(ports.take(destination, || 0, |_| true), Some(FIRST_EPHEMERAL + 5));
        assert_eq!(ports.take(destination, || 0, |_| true), Some(40_000));
        let other = (IpAddr::from([10, 0, 0, 1]), SocketAddr::from(([10, 0, 0, 2], 81)));
        assert_eq!(ports.take(other, || 7, |_| true), Some(FIRST_EPHEMERAL + 7));
        ports.release(other, FIRST_EPHEMERAL + 7);
        assert_eq!(ports.destinations.len(), 1);
    }
}
