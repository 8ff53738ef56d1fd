//! The forwarding plane: shared tables that lanes read without waiting, and one lane of scratch per thread.

mod checksum;
mod coalesce;
mod early;
mod echo;
mod explain;
mod inbound;
mod lane;
mod layout;
mod moves;
mod outbound;
mod reject;
mod relayed;
mod route;
mod segment;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod wanted;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use ipnet::IpNet;

pub use echo::echo_reply;
pub use explain::Route;
pub use lane::Lane;
pub(crate) use relayed::Carrier;
#[cfg(feature = "io")]
pub(crate) use segment::cut_delivery;

use crate::Verdict;
use crate::config::SubnetRoute;
use crate::counters::Counters;
use crate::firewall::{self, Conntrack, Filter};
use crate::relay::RelayTable;
use crate::tunnel::TunnelTable;
pub use crate::wire::offload::{Offload, Segment, SegmentKind};
use route::Routes;

/// Sealed datagrams in the lane's arena that go to one endpoint: all `segment_size` long but the last, so one UDP GSO
/// send carries them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Destination.
    pub to: SocketAddr,
    /// Bytes in [`Lane::arena`].
    pub range: Range<usize>,
    /// Length of every datagram but the last.
    pub segment_size: usize,
}

/// One receive slot: one datagram, or several of equal size from one source (UDP GRO).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// Underlay source, IPv4-mapped addresses already unmapped.
    pub from: SocketAddr,
    /// Bytes in the receive buffer.
    pub range: Range<usize>,
    /// Length of every datagram but the last.
    pub segment_size: usize,
}

/// One packet for the overlay device: `header` (if any) followed by `payload` pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// Rebuilt IP and transport header in [`Lane::headers`]; empty for a packet delivered as received.
    pub header: Range<usize>,
    /// First and last piece in [`Lane::pieces`]; each piece is a range of the receive buffer.
    pub pieces: Range<usize>,
    /// What the device must be told.
    pub offload: Offload,
    /// Length of IP and transport header together, for the virtio-net header.
    pub header_len: u16,
}

/// What this node is and allows, as the control plane publishes it.
#[derive(Debug, Clone)]
pub(crate) struct LocalPolicy {
    /// Own overlay addresses, each with the prefix of its network.
    pub(crate) networks: Vec<IpNet>,
    /// Networks behind this node, by its certificate.
    pub(crate) unsafe_networks: Vec<IpNet>,
    /// Networks behind other nodes.
    pub(crate) subnets: Vec<SubnetRoute>,
    /// Drop packets to the IPv4 broadcast address of an own network.
    pub(crate) drop_local_broadcast: bool,
    /// Drop multicast packets.
    pub(crate) drop_multicast: bool,
    /// Rules and timeouts.
    pub(crate) firewall: firewall::Policy,
}

/// A [`LocalPolicy`] compiled for lanes; replaced as a whole.
#[derive(Debug)]
struct Snapshot {
    routes: Routes,
    filter: Arc<Filter>,
    drop_local_broadcast: bool,
    drop_multicast: bool,
}

/// Shared tables. `&self` everywhere; only [`crate::Node`] publishes.
#[derive(Debug)]
pub struct Forwarder {
    tunnels: TunnelTable,
    relays: RelayTable,
    snapshot: ArcSwap<Snapshot>,
    conntrack: Conntrack,
    counters: Mutex<Vec<Arc<Counters>>>,
}

impl Forwarder {
    /// Empty tables. `now` is the earliest time that will ever be passed in; `key` is random and makes indexes and hashes
    /// unpredictable.
    #[must_use]
    pub(crate) fn new(local: LocalPolicy, now: Instant, key: [u64; 2]) -> Self {
        let conntrack = Conntrack::new(now, key[1], local.firewall.max_flows);
        Self {
            tunnels: TunnelTable::new(key[0]),
            relays: RelayTable::default(),
            snapshot: ArcSwap::from_pointee(Snapshot::new(local, 1)),
            conntrack,
            counters: Mutex::default(),
        }
    }
    /// Live tunnels. The control plane publishes and retires here.
    #[must_use]
    pub(crate) fn tunnels(&self) -> &TunnelTable {
        &self.tunnels
    }
    /// Hops this node is part of. The control plane publishes and retires here.
    #[must_use]
    pub(crate) fn relays(&self) -> &RelayTable {
        &self.relays
    }
    /// Replaces addresses, rules and flags. Flows that are already allowed are checked again with their next packet.
    pub(crate) fn set_policy(&self, local: LocalPolicy) {
        self.conntrack.set_max_flows(local.firewall.max_flows);
        let generation = self.snapshot.load().filter.generation().wrapping_add(1);
        self.snapshot.store(Arc::new(Snapshot::new(local, generation)));
    }
    /// Replaces the networks behind other nodes. Rules and known flows stay as they are, so it may happen often.
    pub(crate) fn set_subnets(&self, networks: &[IpNet], subnets: &[SubnetRoute]) {
        let old = self.snapshot.load();
        self.snapshot.store(Arc::new(Snapshot {
            routes: Routes::new(networks, subnets),
            filter: Arc::clone(&old.filter),
            drop_local_broadcast: old.drop_local_broadcast,
            drop_multicast: old.drop_multicast,
        }));
    }
    /// A lane for one thread.
    #[must_use]
    pub fn lane(&self) -> Lane {
        let counters = Arc::new(Counters::default());
        self.counters.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&counters));
        Lane::new(counters)
    }
    /// Sum of the counters of all lanes, by name.
    #[must_use]
    pub fn counters(&self) -> BTreeMap<&'static str, u64> {
        let mut sum = BTreeMap::new();
        for counters in self.counters.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            counters.add_to(&mut sum);
        }
        sum
    }
    /// Forgets flows that were idle for too long. New flows clear away old ones; this is for times without new flows.
    /// Cheap if called often.
    pub(crate) fn expire_flows(&self, now: Instant) {
        self.conntrack.expire(now, &self.snapshot.load().filter);
    }
    /// Flows the firewall remembers.
    #[must_use]
    pub fn flows(&self) -> usize {
        self.conntrack.len()
    }
    /// Overlay (super-)packet to sealed datagrams in `lane`.
    ///
    /// `packet` is only read. After [`Verdict::Transmit`] the lane's runs hold the datagrams (appended to those of earlier
    /// calls); after [`Verdict::Punt`] the lane's punts hold a copy of the packet; a drop is already counted. Deliveries are
    /// answers to refused packets: they go back to the device.
    pub fn outbound(&self, lane: &mut Lane, now: Instant, packet: &mut [u8], offload: Offload) -> Verdict {
        outbound::outbound(self, lane, now, packet, offload)
    }
    /// Underlay datagrams to overlay (super-)packets in `lane`. Opens in place in `buffer`; what it cannot finish is punted.
    ///
    /// All slots of one call must lie in one `buffer`; deliveries point into it, so write them out before it is reused.
    pub fn inbound(&self, lane: &mut Lane, now: Instant, buffer: &mut [u8], received: &[Received]) {
        inbound::inbound(self, lane, now, buffer, received);
    }
    /// As [`Forwarder::inbound`], for datagrams that came before their tunnel and were kept. Deliveries point into the returned
    /// memory; `None`: there is nothing to do. Call it until then before each [`Forwarder::inbound`], and at [`Lane::early_due`].
    #[must_use]
    pub fn inbound_early(&self, lane: &mut Lane, now: Instant) -> Option<Vec<u8>> {
        inbound::inbound_early(self, lane, now)
    }
}

impl Snapshot {
    fn new(local: LocalPolicy, generation: u32) -> Self {
        Self {
            drop_local_broadcast: local.drop_local_broadcast,
            drop_multicast: local.drop_multicast,
            routes: Routes::new(&local.networks, &local.subnets),
            filter: Arc::new(Filter::new(&local.firewall, &local.networks, &local.unsafe_networks, generation)),
        }
    }
}
