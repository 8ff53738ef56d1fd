//! Handshakes this node started: attempts, and what waits for them. Bounded in number and bytes.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nebula_cert::Fingerprint;

use super::Initiator;
use crate::output::PacketOwned;
use crate::tunnel::LocalIndex;

/// One handshake under way.
pub(crate) struct Pending {
    /// Reserved own index; message 2 names it.
    pub(crate) local_index: LocalIndex,
    /// The own certificate in message 1.
    pub(crate) own_certificate: Fingerprint,
    /// The Noise state between the messages.
    pub(crate) machine: Initiator,
    /// Message 1, the same bytes at every attempt.
    pub(crate) message: Vec<u8>,
    pub(crate) started: Instant,
    /// Attempts made.
    pub(crate) attempts: u32,
    /// Where the last attempt went.
    pub(crate) tried: Vec<SocketAddr>,
    waiting: Waiting,
}

impl Pending {
    pub(crate) fn new(
        local_index: LocalIndex,
        own_certificate: Fingerprint,
        machine: Initiator,
        message: Vec<u8>,
        started: Instant,
        waiting: Waiting,
    ) -> Self {
        Self { local_index, own_certificate, machine, message, started, attempts: 0, tried: Vec::new(), waiting }
    }

    /// How long to wait after the attempt that was just made: each pause is one interval longer.
    pub(crate) fn pause(&self, try_interval: Duration) -> Duration {
        try_interval.saturating_mul(self.attempts.max(1))
    }
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending")
            .field("local_index", &self.local_index)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}

/// What is sent as soon as the tunnel is up.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// Overlay packets, oldest first.
    pub(crate) packets: VecDeque<PacketOwned>,
    /// Peers this lighthouse shall be asked about.
    pub(crate) queries: Vec<IpAddr>,
    /// A test request, so that the peer sees this node.
    pub(crate) test: bool,
}

impl Waiting {
    fn bytes(&self) -> usize {
        self.packets.iter().map(|packet| packet.bytes.len()).sum()
    }
}

/// All handshakes this node started: at most one per peer.
#[derive(Debug, Default)]
pub(crate) struct PendingHandshakes {
    by_peer: BTreeMap<IpAddr, Pending>,
    by_index: BTreeMap<LocalIndex, IpAddr>,
    waiting_bytes: usize,
}

impl PendingHandshakes {
    /// Room for another peer. A scan of the overlay must not exhaust memory.
    pub(crate) fn has_room(&self) -> bool {
        self.by_peer.len() < MAX_HANDSHAKES
    }

    pub(crate) fn len(&self) -> usize {
        self.by_peer.len().max(self.by_index.len())
    }

    /// Bytes of the packets that wait, over all peers.
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    pub(crate) fn insert(&mut self, peer: IpAddr, pending: Pending) {
        self.waiting_bytes += pending.waiting.bytes();
        self.by_index.insert(pending.local_index, peer);
        self.by_peer.insert(peer, pending);
    }

    pub(crate) fn get_mut(&mut self, peer: IpAddr) -> Option<&mut Pending> {
        self.by_peer.get_mut(&peer)
    }

    pub(crate) fn contains(&self, peer: IpAddr) -> bool {
        self.by_peer.contains_key(&peer)
    }

    /// Whose handshake has this index.
    pub(crate) fn peer_of(&self, index: LocalIndex) -> Option<IpAddr> {
        self.by_index.get(&index).copied()
    }

    /// Ends a handshake; what waited comes out with it.
    pub(crate) fn remove(&mut self, peer: IpAddr) -> Option<(Pending, Waiting)> {
        let mut pending = self.by_peer.remove(&peer)?;
        self.by_index.remove(&pending.local_index);
        let waiting = std::mem::take(&mut pending.waiting);
        self.waiting_bytes -= waiting.bytes();
        Some((pending, waiting))
    }

    /// Takes the packets that wait for `peer`: it can be reached by another way.
    pub(crate) fn take_packets(&mut self, peer: IpAddr) -> VecDeque<PacketOwned> {
        let Some(pending) = self.by_peer.get_mut(&peer) else { return VecDeque::new() };
        let packets = std::mem::take(&mut pending.waiting.packets);
        self.waiting_bytes -= packets.iter().map(|packet| packet.bytes.len()).sum::<usize>();
        packets
    }

    /// Keeps a packet until the tunnel is up; false if there is no room or no handshake.
    pub(crate) fn push_packet(&mut self, peer: IpAddr, packet: PacketOwned) -> bool {
        let Some(pending) = self.by_peer.get_mut(&peer) else { return false };
        let length = packet.bytes.len();
        if pending.waiting.packets.len() >= MAX_PACKETS_PER_PEER || self.waiting_bytes + length > MAX_WAITING_BYTES {
            return false;
        }
        self.waiting_bytes += length;
        pending.waiting.packets.push_back(packet);
        true
    }

    /// Asks `lighthouse` about `subject` as soon as its tunnel is up.
    pub(crate) fn push_query(&mut self, lighthouse: IpAddr, subject: IpAddr) {
        let Some(pending) = self.by_peer.get_mut(&lighthouse) else { return };
        let queries = &mut pending.waiting.queries;
        if queries.len() < MAX_QUERIES && !queries.contains(&subject) {
            queries.push(subject);
        }
    }

    /// Sends a test request as soon as the tunnel to `peer` is up.
    pub(crate) fn push_test(&mut self, peer: IpAddr) {
        if let Some(pending) = self.by_peer.get_mut(&peer) {
            pending.waiting.test = true;
        }
    }
}

const MAX_HANDSHAKES: usize = 8192;
const MAX_PACKETS_PER_PEER: usize = 100;
const MAX_QUERIES: usize = 64;
// Packets may be 64 KiB super-packets: a hundred per peer would not bound anything.
const MAX_WAITING_BYTES: usize = 16 << 20;
