//! The control plane of one node: it owns every control table and connects the parts.

mod confirmation;
mod handshakes;
mod hops;
mod inspect;
mod life_cycle;
mod outbox;
mod paths;
mod reconfigure;
mod relaying;
mod rendezvous;
mod timer;
mod tunnels;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::UnixTime;
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

pub use self::inspect::{
    FlowTrace, Outcome, PendingStatus, RelayState, RelayStatus, TableSizes, TunnelStatus, Whereabouts,
};
pub use self::reconfigure::Part;

use self::hops::Hops;
use self::outbox::Outbox;
#[cfg(feature = "simulator")]
pub(crate) use self::tunnels::Established;

use self::timer::{Due, Timer};
use self::tunnels::Tunnels;
use crate::counters::Direction;
use crate::diagnosis::Journal;
use crate::forward::LocalPolicy;
use crate::handshake::{Admission, HalfOpenTable, PendingHandshakes};
use crate::hole_punch::HolePunch;
use crate::index::LocalIndex;
use crate::lighthouse::{self, LocalAddress};
use crate::tunnel::ReservedIndex;
use crate::wire::header::MessageType;
use crate::{Config, DropReason, Event, Forwarder, Origin, PacketOwned, Punt, Transmit, TunnelDownReason};

/// Maps the monotonic clock to the wall clock, for certificates and the handshake's Time field.
#[derive(Debug, Clone, Copy)]
pub struct WallClock {
    /// Monotonic time of the reading.
    pub at: Instant,
    /// Wall-clock time at that moment, since the Unix epoch.
    pub unix: Duration,
}

impl WallClock {
    /// Returns the wall-clock time at `now`, since the Unix epoch.
    #[must_use]
    pub fn unix_at(&self, now: Instant) -> Duration {
        match now.checked_duration_since(self.at) {
            Some(since) => self.unix.saturating_add(since),
            None => self.unix.saturating_sub(self.at.saturating_duration_since(now)),
        }
    }

    /// Like [`WallClock::unix_at`], in whole seconds.
    pub(crate) fn unix_seconds(&self, now: Instant) -> UnixTime {
        UnixTime::try_from(self.unix_at(now).as_secs()).unwrap_or(UnixTime::MAX)
    }
}

/// The control plane of one node. It has no locks, reads no clock and owns no sockets; callers pass the time in.
///
/// After any `handle_*` call, setter or [`Node::reconfigure`], drain [`Node::poll_transmit`], [`Node::poll_packet`] and
/// [`Node::poll_event`], then read [`Node::poll_timeout`]. The times passed in must never go backwards.
#[derive(Debug)]
pub struct Node {
    config: Config,
    wall: WallClock,
    rng: ChaCha20Rng,
    /// The latest time that was passed to any method.
    now: Instant,
    timer: Timer,
    pending: PendingHandshakes,
    admission: Admission,
    half_open: HalfOpenTable,
    tunnels: Tunnels,
    lighthouse: lighthouse::Client,
    server: lighthouse::Server,
    punches: HolePunch,
    hops: Hops,
    journal: Journal,
    outbox: Outbox,
    forwarder: Arc<Forwarder>,
}

impl Node {
    /// Creates a node and its forwarding plane. `seed` seeds its only random generator.
    #[must_use]
    pub fn new(config: Config, now: Instant, wall: WallClock, seed: [u8; 32]) -> (Self, Arc<Forwarder>) {
        let mut rng = ChaCha20Rng::from_seed(seed);
        let key = [rng.next_u64(), rng.next_u64()];
        let admission = Admission::new(config.handshakes.max_new_per_second, now, rng.next_u64());
        let half_open = HalfOpenTable::new(config.handshakes.max_new_per_second);
        let forwarder = Arc::new(Forwarder::new(LocalPolicy::from(&config), now, key));
        let mut timer = Timer::new(now);
        if !config.lighthouse.am_lighthouse && !config.lighthouse.hosts.is_empty() {
            timer.set(Due::LighthouseUpdate, now);
        }
        let am_relay = config.relay.am_relay;
        let mut node = Self {
            config,
            wall,
            rng,
            now,
            timer,
            pending: PendingHandshakes::default(),
            admission,
            half_open,
            tunnels: Tunnels::default(),
            lighthouse: lighthouse::Client::default(),
            server: lighthouse::Server::default(),
            punches: HolePunch::default(),
            hops: Hops::new(Arc::clone(&forwarder), am_relay),
            journal: Journal::default(),
            outbox: Outbox::new(Arc::clone(&forwarder)),
            forwarder: Arc::clone(&forwarder),
        };
        node.housekeeping(now);
        (node, forwarder)
    }

    /// Handles what the forwarding plane could not finish on its own.
    pub fn handle_punt(&mut self, now: Instant, punt: Punt) {
        self.now = now;
        match punt {
            Punt::NoTunnel { peer, packet } => self.handle_no_tunnel(now, peer, packet),
            Punt::Connect { peer } => self.connect(now, peer),
            Punt::Handshake { from, datagram } => self.handle_handshake(now, from, &datagram),
            Punt::RecvError { from, index } => self.handle_recv_error(now, from, index),
            Punt::UnknownIndex { from, index } => self.answer_unknown_index(from, index),
            Punt::Message { tunnel, from, kind, plaintext } => {
                self.handle_message(now, tunnel, from, kind, &plaintext);
            }
            Punt::Roamed { tunnel, from } => self.paths(now).handle_roamed(tunnel, from),
            Punt::Confirmed { tunnel, from } => self.handle_confirmed(now, tunnel, from),
            Punt::Dropped { direction, flow, reason, tunnel } => {
                let peer = tunnel.and_then(|index| self.tunnels.get(index)?.tunnel.peer_addresses.first().copied());
                self.journal.dropped(now, (direction, reason), flow, peer);
            }
        }
    }

    /// Handles every deadline that has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.now = now;
        if self.timer.next().is_some_and(|due| now.saturating_duration_since(due) > MISSED_BY) {
            self.paths(now).announce();
        }
        while let Some(due) = self.timer.pop(now) {
            self.handle_due(now, due);
        }
    }

    /// Next datagram to send.
    #[must_use]
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.outbox.next_transmit()
    }

    /// Next packet for the own overlay device: the reply to a packet that waited for a tunnel and was then rejected.
    #[must_use]
    pub fn poll_packet(&mut self) -> Option<Vec<u8>> {
        self.outbox.next_packet()
    }

    /// Next event.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<Event> {
        self.outbox.next_event()
    }

    /// When to call [`Node::handle_timeout`]; `None` if nothing is scheduled.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timer.next()
    }

    /// Re-anchors the wall clock, at the start and after a clock step.
    pub fn set_wall_clock(&mut self, wall: WallClock) {
        self.journal.clock_set(wall.at, self.wall.unix_at(wall.at), wall.unix);
        self.wall = wall;
    }

    /// Records that the system refused to send a datagram of [`Node::poll_transmit`], with the errno if it gave one.
    pub fn note_send_failure(&mut self, now: Instant, to: SocketAddr, errno: Option<i32>) {
        self.now = now;
        self.journal.send_failed(now, to, errno);
    }

    /// Sets the addresses of local interfaces to advertise to lighthouses. After a change, peers and lighthouses are
    /// told at once where this node is.
    pub fn set_local_addresses(&mut self, addresses: Vec<LocalAddress>) {
        if self.lighthouse.set_local_addresses(addresses) {
            self.paths(self.now).announce();
        }
    }

    /// Tells the node that the host woke up, or that this process runs again after a stop: peers may have given this
    /// node up, and its address may have changed.
    pub fn wake(&mut self, now: Instant) {
        self.now = now;
        self.paths(now).announce();
    }

    /// Starts a handshake unless the peer is reachable through a tunnel.
    pub fn connect(&mut self, now: Instant, peer: IpAddr) {
        self.now = now;
        if !self.forwarder.is_reachable(peer) {
            self.start_handshake(now, peer, None);
            self.try_relays(now, peer);
        }
    }

    /// Like [`Node::connect`], but also tries `endpoint`.
    pub fn connect_at(&mut self, now: Instant, peer: IpAddr, endpoint: SocketAddr) {
        self.now = now;
        self.lighthouse.candidates(peer).learn(endpoint);
        self.connect(now, peer);
        self.retry_if_endpoints_changed(peer);
    }

    /// Sends packets for `peer` to `endpoint` from now on, until the peer is heard from somewhere else. Returns `false`
    /// if there is no tunnel or the remote allow list forbids `endpoint`.
    pub fn redirect(&mut self, now: Instant, peer: IpAddr, endpoint: SocketAddr) -> bool {
        self.now = now;
        let Some(tunnel) = self.forwarder.tunnels().by_address(peer) else { return false };
        if !self.config.may_be_at(&tunnel.peer_addresses, endpoint) {
            return false;
        }
        tunnel.set_endpoint(Some(endpoint));
        for &address in &tunnel.peer_addresses {
            self.lighthouse.candidates(address).learn(endpoint);
        }
        true
    }

    /// Asks every lighthouse where `peer` is. [`Node::whereabouts`] shows the answers as they arrive.
    pub fn inquire(&mut self, now: Instant, peer: IpAddr) {
        self.now = now;
        let heard = self.lighthouses_heard();
        self.lighthouse.questions().ask(now, peer, heard);
        self.ask_lighthouses(now, peer);
        // A lighthouse that does not know the peer does not answer the query; its reply to this test shows that it is
        // up.
        for lighthouse in self.config.lighthouse.hosts.clone() {
            if let Some(tunnel) = self.forwarder.tunnels().by_address(lighthouse) {
                self.outbox.message(&tunnel, MessageType::TestRequest, &[]);
            }
        }
    }

    /// Closes every tunnel to `peer`, and tells the peer unless `quietly`. Returns how many tunnels there were.
    pub fn close(&mut self, now: Instant, peer: IpAddr, quietly: bool) -> usize {
        self.now = now;
        let indexes = self.tunnels.of_peer(peer).to_vec();
        for index in &indexes {
            if quietly {
                self.remove_tunnel(*index, TunnelDownReason::ClosedHere);
            } else {
                self.close_tunnel(*index, TunnelDownReason::ClosedHere);
            }
        }
        indexes.len()
    }

    /// Closes every tunnel with a CloseTunnel message; drain the transmits afterwards.
    pub fn close_all(&mut self, now: Instant) {
        self.now = now;
        let mut indexes = self.tunnels.indexes();
        // Direct tunnels last: those to relays carry the CloseTunnel messages of relayed tunnels.
        indexes.sort_by_key(|index| self.tunnels.get(*index).is_some_and(|live| live.tunnel.endpoint().is_some()));
        for index in indexes {
            self.close_tunnel(index, TunnelDownReason::ClosedHere);
        }
    }

    fn handle_no_tunnel(&mut self, now: Instant, peer: IpAddr, packet: PacketOwned) {
        if self.forwarder.is_reachable(peer) {
            // The tunnel came up while the punt was on its way.
            self.outbox.overlay_packet(now, packet);
            return;
        }
        self.start_handshake(now, peer, None);
        self.try_relays(now, peer);
        let lost = self.pending.push_packet(peer, packet, self.config.handshakes.max_waiting_bytes);
        self.outbox.counters().drop_many(Direction::Outbound, DropReason::PendingFull, lost);
    }

    fn handle_message(&mut self, now: Instant, index: LocalIndex, from: Origin, kind: MessageType, body: &[u8]) {
        let Some(tunnel) = self.forwarder.tunnels().by_index(index) else { return };
        match kind {
            MessageType::Lighthouse => self.handle_lighthouse_message(now, &tunnel, body),
            MessageType::TestRequest => self.paths(now).answer_test(&tunnel, from, body),
            MessageType::TestReply => self.paths(now).handle_test_reply(&tunnel, from),
            MessageType::CloseTunnel => self.remove_tunnel(index, TunnelDownReason::ClosedByPeer),
            MessageType::Control => self.handle_control(now, &tunnel, body),
            MessageType::Handshake | MessageType::Data | MessageType::Relay | MessageType::RecvError => {
                self.outbox.count_drop(DropReason::BadMessage)
            }
        }
    }

    fn handle_due(&mut self, now: Instant, due: Due) {
        match due {
            Due::Handshake(peer) => self.handshake_due(now, peer),
            Due::Tunnel(index) => self.check_tunnel(now, index),
            Due::HalfOpen(index) => self.callers(now).due(index),
            Due::LighthouseUpdate => self.update_lighthouses(now),
            Due::HolePunch => self.punch_due(now),
            Due::Housekeeping => self.housekeeping(now),
        }
    }

    /// Expires flows and stale entries, and releases memory.
    fn housekeeping(&mut self, now: Instant) {
        self.forwarder.expire_flows(now);
        self.outbox.release_memory();
        self.server.wanted().expire(now);
        // The endpoints of a peer that is expected back outlive its tunnel, but not forever.
        self.lighthouse.retain(now, |peer| !self.tunnels.of_peer(peer).is_empty() || self.pending.contains(peer));
        self.timer.set_on_grid(Due::Housekeeping, now + HOUSEKEEPING_INTERVAL);
    }

    /// The configuration in use: the initial one with every later change applied.
    #[cfg(feature = "simulator")]
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn reserve_index(&mut self) -> Option<ReservedIndex> {
        self.forwarder.tunnels().reserve(self.rng.next_u32())
    }

    pub(crate) fn random_bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.rng.fill_bytes(&mut bytes);
        bytes
    }
}

/// A deadline missed by more than this shows that the process did not run for a while.
const MISSED_BY: Duration = Duration::from_secs(2);
/// By default, no flow times out faster than this.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(180);
