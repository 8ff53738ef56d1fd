//! Handshakes that this node started: their attempts, and what waits for them. Bounded in number and bytes.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nebula_cert::{Fingerprint, Version};

use super::{Initiator, Offer, Reached};
use crate::Origin;
use crate::index::LocalIndex;
use crate::output::PacketOwned;
use crate::tunnel::ReservedIndex;
use crate::wire::messages::Control;

/// One handshake in progress.
pub(crate) struct Pending {
    /// Index that message 2 carries.
    pub(crate) local_index: ReservedIndex,
    /// Version of the own certificate for message 1.
    pub(crate) version: Version,
    /// `None` until there is an endpoint to send it to: its Noise state is many times as large as everything else here,
    /// and a scan of unknown addresses must not allocate it.
    pub(crate) opened: Option<Box<Opened>>,
    /// Its ML-KEM exchange, once the peer has answered message 1.
    pub(crate) offered: Option<Box<Offered>>,
    pub(crate) started: Instant,
    /// Attempts made.
    pub(crate) attempts: u32,
    /// Where the peer was believed to be at the last attempt, best first.
    pub(crate) known: Vec<SocketAddr>,
    /// Where the last attempt went.
    pub(crate) tried: Vec<SocketAddr>,
    /// Which of the endpoints that are tried in turn is next.
    turn: usize,
    /// A lighthouse has answered where the peer is since the handshake began.
    pub(crate) answered: bool,
    /// It goes to this endpoint and nowhere else: it shows whether the peer is there.
    pub(crate) only: Option<SocketAddr>,
    waiting: Waiting,
}

/// Message 1, and the state needed to process its answer.
pub(crate) struct Opened {
    /// When it was made.
    pub(crate) since: Instant,
    /// The own certificate in the message.
    pub(crate) own_certificate: Fingerprint,
    /// The Noise state between the messages.
    pub(crate) machine: Initiator,
    /// The same bytes are sent at every attempt.
    pub(crate) message: Vec<u8>,
    /// Who can have got them.
    pub(crate) reached: Reached,
}

/// Message 3, and the state needed to process its answer.
#[derive(Debug)]
pub(crate) struct Offered {
    pub(crate) offer: Offer,
    /// The same bytes are sent each time.
    pub(crate) message: Vec<u8>,
    /// Where the peer answered message 1.
    pub(crate) to: Origin,
    /// How often it was sent.
    pub(crate) times: u32,
    /// How long the peer took to answer message 1.
    pub(crate) answered_after: Duration,
}

impl Offered {
    /// Pause after message 3 was sent: at least as long as the peer took to answer message 1, up to a limit, because
    /// lost messages lengthen that time.
    pub(crate) fn pause(&self, try_interval: Duration) -> Duration {
        try_interval.saturating_mul(self.times.max(1)).max(self.answered_after.min(MAX_OFFER_PAUSE))
    }
}

impl Pending {
    pub(crate) fn new(local_index: ReservedIndex, version: Version, started: Instant, waiting: Waiting) -> Self {
        Self {
            local_index,
            version,
            opened: None,
            offered: None,
            started,
            attempts: 0,
            known: Vec::new(),
            tried: Vec::new(),
            turn: 0,
            answered: false,
            only: None,
            waiting,
        }
    }

    /// Chooses where an attempt goes: to the best endpoints each time, and to as many of the others in turn. A report
    /// that names many endpoints must not make a host send that many datagrams at once.
    pub(crate) fn next_targets(&mut self, endpoints: &[SocketAddr]) -> Vec<SocketAddr> {
        if endpoints.len() <= BEST_ENDPOINTS + ENDPOINTS_IN_TURN {
            return endpoints.to_vec();
        }
        let (best, others) = endpoints.split_at(BEST_ENDPOINTS);
        let first = self.turn % others.len();
        self.turn = first + ENDPOINTS_IN_TURN;
        best.iter().chain(others.iter().cycle().skip(first).take(ENDPOINTS_IN_TURN)).copied().collect()
    }

    /// Pause after the attempt that was just made. It grows by one interval per attempt (linear backoff). If packets
    /// wait for a peer that was lost `lost` ago and is expected back, it is a small fraction of that time instead.
    pub(crate) fn pause(&self, try_interval: Duration, lost: Option<Duration>) -> Duration {
        match lost {
            Some(lost) if self.has_packets() => try_interval.max(lost / RETURN_PAUSES),
            _ => try_interval.saturating_mul(self.attempts.max(1)),
        }
    }

    /// Whether message 1 may go through relays, too.
    pub(crate) fn may_be_relayed(&self) -> bool {
        self.only.is_none() && self.offered.is_none()
    }

    /// Whether packets wait for the peer.
    pub(crate) fn has_packets(&self) -> bool {
        !self.waiting.packets.is_empty()
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
    packets: VecDeque<PacketOwned>,
    /// Total size of these packets in bytes.
    bytes: usize,
    /// Peers to ask this lighthouse about.
    pub(crate) queries: Vec<IpAddr>,
    /// Whether to send a test request, so that the peer sees this node.
    pub(crate) test: bool,
    /// Peers to be reached through this relay.
    pub(crate) relayed: Vec<IpAddr>,
    /// Requests for a relay to this peer, and the tunnels they came by.
    pub(crate) requests: Vec<(LocalIndex, Control)>,
}

impl Waiting {
    fn push(&mut self, packet: PacketOwned) {
        self.bytes += packet.bytes.len();
        self.packets.push_back(packet);
    }

    fn pop(&mut self) -> Option<PacketOwned> {
        let oldest = self.packets.pop_front()?;
        self.bytes -= oldest.bytes.len();
        Some(oldest)
    }

    /// How many packets wait.
    pub(crate) fn packets(&self) -> u64 {
        self.packets.len() as u64
    }

    /// Takes the packets, oldest first.
    pub(crate) fn take_packets(&mut self) -> VecDeque<PacketOwned> {
        self.bytes = 0;
        std::mem::take(&mut self.packets)
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
    /// Whether there is room for another peer if `most` are allowed. A scan of the overlay must not exhaust memory.
    pub(crate) fn has_room(&self, most: usize) -> bool {
        self.by_peer.len() < most
    }

    pub(crate) fn len(&self) -> usize {
        self.by_peer.len().max(self.by_index.len())
    }

    /// Total size of the waiting packets of all peers, in bytes.
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    /// The peer whose handshake is displaced when there is no room: the oldest one that had time to learn an endpoint
    /// and learnt none. Handshakes with peers whose endpoints are known are never displaced, whatever a scan does.
    pub(crate) fn displaceable(&self, now: Instant) -> Option<IpAddr> {
        let hopeless =
            self.by_peer.iter().filter(|(_, it)| it.tried.is_empty() && now >= it.started + DISPLACEABLE_AFTER);
        hopeless.min_by_key(|(_, pending)| pending.started).map(|(peer, _)| *peer)
    }

    pub(crate) fn insert(&mut self, peer: IpAddr, pending: Pending) {
        self.waiting_bytes += pending.waiting.bytes;
        self.by_index.insert(*pending.local_index, peer);
        self.by_peer.insert(peer, pending);
    }

    pub(crate) fn get_mut(&mut self, peer: IpAddr) -> Option<&mut Pending> {
        self.by_peer.get_mut(&peer)
    }

    pub(crate) fn contains(&self, peer: IpAddr) -> bool {
        self.by_peer.contains_key(&peer)
    }

    /// All peers with a handshake in progress.
    pub(crate) fn peers(&self) -> Vec<IpAddr> {
        self.by_peer.keys().copied().collect()
    }

    /// The own index of each handshake, by peer.
    pub(crate) fn indexes(&self) -> impl Iterator<Item = (IpAddr, LocalIndex)> {
        self.by_peer.iter().map(|(peer, pending)| (*peer, *pending.local_index))
    }

    /// The peer whose handshake has this index.
    pub(crate) fn peer_of(&self, index: LocalIndex) -> Option<IpAddr> {
        self.by_index.get(&index).copied()
    }

    /// Removes a handshake and returns it with what waited for it.
    pub(crate) fn remove(&mut self, peer: IpAddr) -> Option<(Pending, Waiting)> {
        let mut pending = self.by_peer.remove(&peer)?;
        self.by_index.remove(&pending.local_index);
        let waiting = std::mem::take(&mut pending.waiting);
        self.waiting_bytes -= waiting.bytes;
        Some((pending, waiting))
    }

    /// Whether packets wait for `peer`.
    pub(crate) fn waits_for(&self, peer: IpAddr) -> bool {
        self.by_peer.get(&peer).is_some_and(Pending::has_packets)
    }

    /// Takes everything that waits for `peer`; the handshake goes on.
    pub(crate) fn take_waiting(&mut self, peer: IpAddr) -> Waiting {
        let Some(pending) = self.by_peer.get_mut(&peer) else { return Waiting::default() };
        self.waiting_bytes -= pending.waiting.bytes;
        std::mem::take(&mut pending.waiting)
    }

    /// Takes the packets that wait for `peer`, which can now be reached another way.
    pub(crate) fn take_packets(&mut self, peer: IpAddr) -> VecDeque<PacketOwned> {
        let Some(pending) = self.by_peer.get_mut(&peer) else { return VecDeque::new() };
        self.waiting_bytes -= pending.waiting.bytes;
        pending.waiting.take_packets()
    }

    /// Queues a packet until the tunnel is up. Returns how many packets were dropped: this one if there is no handshake
    /// or the peer's queue is full; if all queues together would exceed `most` bytes, the oldest ones of peers that
    /// hold more than this one, or else this packet.
    pub(crate) fn push_packet(&mut self, peer: IpAddr, packet: PacketOwned, most: usize) -> u64 {
        let length = packet.bytes.len();
        let Some(pending) = self.by_peer.get(&peer) else { return 1 };
        if pending.waiting.packets.len() >= MAX_PACKETS_PER_PEER {
            return 1;
        }
        let own = pending.waiting.bytes + length;
        let mut lost = 0;
        while self.waiting_bytes + length > most {
            let largest = self.by_peer.values_mut().max_by_key(|it| it.waiting.bytes);
            let Some(victim) = largest.filter(|it| it.waiting.bytes > own) else { return lost + 1 };
            let Some(oldest) = victim.waiting.pop() else { return lost + 1 };
            self.waiting_bytes -= oldest.bytes.len();
            lost += 1;
        }
        if let Some(pending) = self.by_peer.get_mut(&peer) {
            self.waiting_bytes += length;
            pending.waiting.push(packet);
        }
        lost
    }

    /// Asks `lighthouse` about `subject` as soon as its tunnel is up.
    pub(crate) fn push_query(&mut self, lighthouse: IpAddr, subject: IpAddr) {
        let Some(pending) = self.by_peer.get_mut(&lighthouse) else { return };
        push_bounded(&mut pending.waiting.queries, subject);
    }

    /// Tries to reach `peer` through `relay` as soon as the tunnel to the relay is up.
    pub(crate) fn push_relayed(&mut self, relay: IpAddr, peer: IpAddr) {
        if let Some(pending) = self.by_peer.get_mut(&relay) {
            push_bounded(&mut pending.waiting.relayed, peer);
        }
    }

    /// Serves a relay request that came through `tunnel` as soon as the tunnel to its target is up.
    pub(crate) fn push_request(&mut self, tunnel: LocalIndex, request: Control) {
        if let Some(pending) = self.by_peer.get_mut(&request.to) {
            push_bounded(&mut pending.waiting.requests, (tunnel, request));
        }
    }

    /// Message 1 is sent through a relay, which may pass it on to anywhere.
    pub(crate) fn note_relayed(&mut self, peer: IpAddr) {
        if let Some(opened) = self.by_peer.get_mut(&peer).and_then(|pending| pending.opened.as_mut()) {
            opened.reached = Reached::Several;
        }
    }

    /// Sends a test request as soon as the tunnel to `peer` is up.
    pub(crate) fn push_test(&mut self, peer: IpAddr) {
        if let Some(pending) = self.by_peer.get_mut(&peer) {
            pending.waiting.test = true;
        }
    }
}

fn push_bounded<T: PartialEq>(list: &mut Vec<T>, item: T) {
    if list.len() < MAX_WAITING_REQUESTS && !list.contains(&item) {
        list.push(item);
    }
}

/// Distant lighthouses answer within this time. A short time is enough because the oldest handshake is displaced
/// first: only a scan so fast that every entry is younger than this can keep others from starting a handshake.
const DISPLACEABLE_AFTER: Duration = Duration::from_millis(300);
/// Endpoints that each attempt goes to; the best first.
const BEST_ENDPOINTS: usize = 8;
/// Further ones that it goes to in turn.
const ENDPOINTS_IN_TURN: usize = 8;
/// Four of them are longer than the round trip to any peer that a handshake reaches.
const MAX_OFFER_PAUSE: Duration = Duration::from_secs(2);
const MAX_PACKETS_PER_PEER: usize = 100;
/// A peer that was away for three seconds is found again within two tenths of a second of its return, and one that does
/// not return costs some sixty attempts.
const RETURN_PAUSES: u32 = 16;
const MAX_WAITING_REQUESTS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::Offload;

    const MAX_WAITING_BYTES: usize = 16 << 20;

    fn peer(number: u32) -> IpAddr {
        IpAddr::from((0x0a2a_0000 + number).to_be_bytes())
    }

    fn packet(len: usize) -> PacketOwned {
        PacketOwned { bytes: vec![0; len], offload: Offload::default() }
    }

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn pending(count: u32) -> (PendingHandshakes, Instant) {
        let start = Instant::now();
        let mut handshakes = PendingHandshakes::default();
        for number in 0..count {
            let index = LocalIndex(number + 1);
            let started = start + Duration::from_millis(number.into());
            let pending = Pending::new(ReservedIndex::lone(index), Version::V2, started, Waiting::default());
            handshakes.insert(peer(number), pending);
        }
        (handshakes, start)
    }

    #[test]
    fn only_a_handshake_that_found_no_endpoint_in_time_gives_way() {
        let (mut handshakes, start) = pending(3);
        handshakes.get_mut(peer(0)).unwrap().tried = vec!["192.0.2.1:1".parse().unwrap()];
        assert_eq!(handshakes.displaceable(start + DISPLACEABLE_AFTER), None);
        assert_eq!(handshakes.displaceable(start + DISPLACEABLE_AFTER * 2), Some(peer(1)), "the oldest one");
        handshakes.remove(peer(1));
        handshakes.remove(peer(2));
        assert_eq!(handshakes.displaceable(start + DISPLACEABLE_AFTER * 2), None);
    }

    #[test]
    fn an_attempt_goes_to_the_best_endpoints_and_to_the_others_in_turn() {
        let all: Vec<SocketAddr> = (0..30).map(|n| SocketAddr::from(([192, 0, 2, n], 1))).collect();
        let (mut handshakes, _) = pending(1);
        let pending = handshakes.get_mut(peer(0)).unwrap();
        let numbers = |targets: Vec<SocketAddr>| -> Vec<u8> {
            let number = |at: &SocketAddr| if let IpAddr::V4(v4) = at.ip() { v4.octets()[3] } else { 255 };
            targets.iter().map(number).collect()
        };
        assert_eq!(numbers(pending.next_targets(&all)), (0..16).collect::<Vec<_>>());
        assert_eq!(numbers(pending.next_targets(&all)), (0..8).chain(16..24).collect::<Vec<_>>());
        assert_eq!(numbers(pending.next_targets(&all)), (0..8).chain(24..30).chain(8..10).collect::<Vec<_>>());
        assert_eq!(numbers(pending.next_targets(&all[..12])), (0..12).collect::<Vec<_>>(), "all that there are");
        for few in [0, 1, 8] {
            assert_eq!(pending.next_targets(&all[..few]), all[..few]);
        }
    }

    #[test]
    fn the_oldest_packets_of_whoever_holds_most_give_way() {
        let (mut handshakes, _) = pending(4);
        const SUPER_PACKET: usize = 60_000;
        let mut kept = 0;
        'full: for greedy in 0..3 {
            for _ in 0..MAX_PACKETS_PER_PEER {
                if handshakes.push_packet(peer(greedy), packet(SUPER_PACKET), MAX_WAITING_BYTES) > 0 {
                    break 'full;
                }
                kept += SUPER_PACKET;
            }
        }
        assert!(kept <= MAX_WAITING_BYTES && kept > MAX_WAITING_BYTES - SUPER_PACKET);
        let lost = handshakes.push_packet(peer(3), packet(SUPER_PACKET), MAX_WAITING_BYTES);
        assert_eq!(lost, 1, "one of somebody else is lost");
        assert_eq!(handshakes.take_packets(peer(3)).len(), 1, "but not this one");
        let waiting = (0..3).map(|greedy| handshakes.take_packets(peer(greedy)).len()).sum::<usize>();
        assert_eq!(waiting, kept / SUPER_PACKET - 1);
        assert_eq!(handshakes.waiting_bytes, 0);
    }
}
