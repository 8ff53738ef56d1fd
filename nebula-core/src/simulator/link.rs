//! The path between two hosts: latency, loss, reordering, duplication, MTU (like netem).

use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::RngCore as _;

use crate::counters::Direction;
use crate::firewall::{Conntrack, Filter, Firewall, FlowCache, Policy};
use crate::index::LocalIndex;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;
use crate::{DropReason, Forwarder};

/// Properties of a path. Probabilities are in percent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Minimum delay.
    pub latency: Duration,
    /// Maximum additional random delay, which makes datagrams overtake each other.
    pub jitter: Duration,
    /// Share of datagrams that are lost.
    pub loss: u32,
    /// Share of datagrams that arrive twice.
    pub duplicate: u32,
    /// Longer datagrams are lost, and nobody says so.
    pub mtu: Option<usize>,
}

impl Default for Link {
    fn default() -> Self {
        Self { latency: Duration::from_millis(5), jitter: Duration::ZERO, loss: 0, duplicate: 0, mtu: None }
    }
}

impl Link {
    /// A path that carries IPv4 packets of `mtu` bytes, and loses larger ones without a word.
    #[must_use]
    pub fn carrying(mtu: usize) -> Self {
        Self { mtu: Some(mtu.saturating_sub(IPV4_AND_UDP)), ..Self::default() }
    }

    /// Delay of each copy of a datagram that arrives; empty if it is lost.
    pub(super) fn arrivals(&self, length: usize, rng: &mut ChaCha20Rng) -> Vec<Duration> {
        if self.mtu.is_some_and(|mtu| length > mtu) || chance(rng, self.loss) {
            return Vec::new();
        }
        let copies = if chance(rng, self.duplicate) { 2 } else { 1 };
        let jitter = u64::try_from(self.jitter.as_nanos()).unwrap_or(u64::MAX);
        let mut delay = || if jitter == 0 { 0 } else { rng.next_u64() % jitter };
        (0..copies).map(|_| self.latency + Duration::from_nanos(delay())).collect()
    }
}

const IPV4_AND_UDP: usize = 28;

fn chance(rng: &mut ChaCha20Rng, percent: u32) -> bool {
    percent > 0 && rng.next_u32() % 100 < percent
}

/// A firewall on its own: rules, known flows, and the cache of one lane.
#[derive(Debug)]
pub struct Gate {
    filter: Filter,
    conntrack: Conntrack,
    cache: FlowCache,
    tunnel: Arc<Tunnel>,
}

impl Gate {
    /// A firewall between a host with these networks and the peer of one of its tunnels; `None` if it has no such
    /// tunnel.
    #[must_use]
    pub fn new(
        policy: &Policy,
        own: &[IpNet],
        forwarder: &Forwarder,
        tunnel: LocalIndex,
        now: Instant,
    ) -> Option<Self> {
        Some(Self {
            filter: Filter::new(policy, own, &[], 1),
            conntrack: Conntrack::new(now, 7, policy.max_flows),
            cache: FlowCache::default(),
            tunnel: forwarder.tunnels().by_index(tunnel)?,
        })
    }

    /// Decides about one packet.
    ///
    /// # Errors
    /// Returns the reason why it is dropped.
    pub fn check(&mut self, now: Instant, direction: Direction, flow: &FlowKey) -> Result<(), DropReason> {
        let firewall = Firewall { filter: &self.filter, conntrack: &self.conntrack };
        firewall.check(&mut self.cache, now, direction, flow, &self.tunnel, |_| None).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::rand_core::SeedableRng as _;

    #[test]
    fn a_lossy_link_loses_about_the_given_share() {
        let mut rng = ChaCha20Rng::from_seed([1; 32]);
        let link = Link { loss: 30, ..Link::default() };
        let arrived = (0..10_000).filter(|_| !link.arrivals(100, &mut rng).is_empty()).count();
        assert!((6_700..7_300).contains(&arrived), "{arrived} of 10000");
    }

    #[test]
    fn a_datagram_above_the_mtu_is_lost() {
        let mut rng = ChaCha20Rng::from_seed([1; 32]);
        let link = Link { mtu: Some(1400), ..Link::default() };
        assert_eq!(link.arrivals(1401, &mut rng), []);
        assert_eq!(link.arrivals(1400, &mut rng), [link.latency]);
    }
}
