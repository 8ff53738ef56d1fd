//! Flows that went into a tunnel as they are. While such a flow lasts, nothing of it leaves in clear, whatever pod
//! has the address of its other end meanwhile.
//!
//! A connection lasts until the pod ends it or opens another one with the same addresses and ports, or was idle for
//! half a day; any other flow until it was idle for three minutes, as with connection tracking. Flows are remembered
//! by their hash. If there are too many of them, the idle ones are forgotten, and for as long as one of those could
//! last, a flow of which nothing is known counts as one of them.

use std::collections::HashSet;

use super::hash::{Hashed, Key};

/// Milliseconds, like everything here. Longer than kernels wait between two retransmissions.
const SHORT: u64 = 180_000;
const LONG: u64 = 43_200_000;

/// All flows in tunnels that are not translated.
#[derive(Debug)]
pub(super) struct Sealed {
    connections: Generations,
    /// Connections that the pod has ended, which may be retransmitted still, and flows of other protocols.
    others: Generations,
}

impl Default for Sealed {
    fn default() -> Self {
        Self { connections: Generations::new(LONG), others: Generations::new(SHORT) }
    }
}

impl Sealed {
    /// Notes that a flow goes on in a tunnel. `most` bounds the flows that are remembered.
    pub(super) fn note(&mut self, flow: &Key, now: u64, most: usize) {
        let number = flow.number();
        if !flow.is_tcp() || self.others.renew(number, now) {
            self.others.note(number, now, most);
        } else {
            self.connections.note(number, now, most);
        }
    }

    /// The pod closes or resets its connection.
    pub(super) fn end(&mut self, flow: &Key, now: u64, most: usize) {
        if self.connections.remove(flow.number()) {
            self.others.note(flow.number(), now, most);
        }
    }

    /// The pod opens another connection with these addresses and ports.
    pub(super) fn forget(&mut self, flow: &Key) {
        self.connections.remove(flow.number());
        self.others.remove(flow.number());
    }

    /// Whether the flow was in a tunnel. Then this counts as a packet of it.
    pub(super) fn holds(&mut self, flow: &Key, now: u64) -> bool {
        let number = flow.number();
        let is_other = self.others.renew(number, now);
        is_other || flow.is_tcp() && self.connections.renew(number, now)
    }

    /// Like [`Sealed::holds`], without counting as a packet.
    pub(super) fn has(&self, flow: &Key, now: u64) -> bool {
        let number = flow.number();
        self.others.has(number, now) || flow.is_tcp() && self.connections.has(number, now)
    }

    /// Whether a flow of which nothing is known may be one that was forgotten too early.
    pub(super) fn may_have_lost(&self, flow: &Key, now: u64) -> bool {
        now < self.others.lost_until || flow.is_tcp() && now < self.connections.lost_until
    }

    /// Frees the memory of flows whose time is over.
    pub(super) fn expire(&mut self, now: u64) {
        self.connections.turn(now);
        self.others.turn(now);
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn len(&self) -> usize {
        [&self.connections, &self.others].iter().map(|all| all.recent.len() + all.older.len()).sum()
    }
}

/// Flows by the time of their last use: within the last `lasts`, and within the same time before. What is idle for
/// longer is forgotten.
#[derive(Debug)]
struct Generations {
    recent: HashSet<u64, Hashed>,
    older: HashSet<u64, Hashed>,
    /// Since when the recent ones are noted.
    since: u64,
    lasts: u64,
    /// Flows that were forgotten too early could have lasted until then.
    lost_until: u64,
}

impl Generations {
    fn new(lasts: u64) -> Self {
        Self { recent: HashSet::default(), older: HashSet::default(), since: 0, lasts, lost_until: 0 }
    }

    fn note(&mut self, number: u64, now: u64, most: usize) {
        self.turn(now);
        if self.recent.len() >= most && !self.recent.contains(&number) {
            if !self.older.is_empty() {
                self.lost_until = now.saturating_add(2 * self.lasts);
            }
            self.begin(now);
        }
        self.recent.insert(number);
    }

    fn has(&self, number: u64, now: u64) -> bool {
        let age = now.saturating_sub(self.since);
        age < 2 * self.lasts && self.recent.contains(&number) || age < self.lasts && self.older.contains(&number)
    }

    /// Whether the flow is there, which then counts as used.
    fn renew(&mut self, number: u64, now: u64) -> bool {
        self.turn(now);
        if self.recent.contains(&number) {
            return true;
        }
        let is_there = self.older.remove(&number);
        if is_there {
            self.recent.insert(number);
        }
        is_there
    }

    fn remove(&mut self, number: u64) -> bool {
        self.recent.remove(&number) | self.older.remove(&number)
    }

    fn turn(&mut self, now: u64) {
        if now.saturating_sub(self.since) >= 2 * self.lasts {
            self.recent = HashSet::default();
        }
        if now.saturating_sub(self.since) >= self.lasts {
            self.begin(now);
        }
    }

    fn begin(&mut self, now: u64) {
        self.older = std::mem::take(&mut self.recent);
        self.since = now;
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::hash::Keyed;
    use super::*;
    use crate::wire::ip::{FlowKey, protocol};

    const MOST: usize = 100;

    struct Bench {
        sealed: Sealed,
        keyed: Keyed,
    }

    impl Bench {
        fn new() -> Self {
            Self { sealed: Sealed::default(), keyed: Keyed::default() }
        }

        fn key(&self, protocol: u8, local_port: u16) -> Key {
            let (local, remote) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
            self.keyed.key(&FlowKey { local, remote, local_port, remote_port: 80, protocol, fragment: false })
        }

        fn note(&mut self, protocol: u8, port: u16, now: u64) {
            let key = self.key(protocol, port);
            self.sealed.note(&key, now, MOST);
        }
    }

    #[test]
    fn a_flow_lasts_while_it_is_used_and_a_while_longer() {
        for (protocol, lasts) in [(protocol::UDP, SHORT), (protocol::TCP, LONG)] {
            let mut bench = Bench::new();
            bench.note(protocol, 1, 0);
            let key = bench.key(protocol, 1);
            for n in 1..50 {
                assert!(bench.sealed.has(&key, n * (lasts - 1)) && bench.sealed.holds(&key, n * (lasts - 1)));
            }
            let last = 49 * (lasts - 1);
            assert!(bench.sealed.has(&key, last + lasts - 1));
            assert!(!bench.sealed.has(&key, last + 2 * lasts) && !bench.sealed.holds(&key, last + 2 * lasts));
            assert_eq!(bench.sealed.len(), 0);
        }
    }

    #[test]
    fn a_connection_that_the_pod_has_ended_is_forgotten_soon_but_not_between_retransmissions() {
        let mut bench = Bench::new();
        bench.note(protocol::TCP, 1, 0);
        let key = bench.key(protocol::TCP, 1);
        bench.sealed.end(&key, 10, MOST);
        for n in 1..5 {
            bench.sealed.note(&key, n * (SHORT - 1), MOST);
        }
        assert!(bench.sealed.has(&key, 5 * (SHORT - 1)));
        assert!(!bench.sealed.has(&key, 7 * SHORT));
        bench.note(protocol::TCP, 2, 0);
        let key = bench.key(protocol::TCP, 2);
        bench.sealed.forget(&key);
        assert!(!bench.sealed.holds(&key, 1));
    }

    #[test]
    fn of_too_many_flows_those_in_use_are_kept_and_unknown_ones_are_doubtful_for_a_while() {
        for (protocol, lasts) in [(protocol::UDP, SHORT), (protocol::TCP, LONG)] {
            let mut bench = Bench::new();
            let (used, other) = (bench.key(protocol, 1), bench.key(protocol, 60_000));
            for port in 1..10_000 {
                bench.note(protocol, port, 7);
                bench.note(protocol, 1, 7);
                assert!(bench.sealed.len() <= 2 * MOST);
                let (port, has_lost) = (usize::from(port), bench.sealed.may_have_lost(&other, 7));
                assert!(if has_lost { port > MOST } else { port < 2 * MOST }, "after {port}");
            }
            assert!(bench.sealed.holds(&used, 8) && !bench.sealed.holds(&other, 8));
            assert!(!bench.sealed.may_have_lost(&other, 7 + 2 * lasts));
        }
    }
}
