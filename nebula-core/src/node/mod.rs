//! The control plane of one node: it owns every control table and connects the parts.

mod confirmation;
mod deadlines;
mod handshakes;
mod hops;
mod inspect;
mod outbox;
mod paths;
mod reconfigure;
mod refusals;
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
use crate::config::RecvErrorPolicy;
use crate::counters::Direction;
use crate::diagnosis::Journal;
use crate::forward::LocalPolicy;
use crate::handshake::{Admission, HalfOpenTable, PendingHandshakes};
use crate::hole_punch::HolePunch;
use crate::index::{LocalIndex, RemoteIndex};
use crate::lighthouse::{self, LocalAddress};
use crate::tunnel::ReservedIndex;
use crate::wire::header::{Header, MessageType};
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
        let forwarder = Arc::new(Forwarder::new(local_policy(&config), now, key));
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

    /// Handles a recv_error: the peer no longer knows the tunnel or relay. It is unauthenticated, so it is believed
    /// only if it comes from where the peer is.
    fn handle_recv_error(&mut self, now: Instant, from: Origin, index: RemoteIndex) {
        if !applies(self.config.accept_recv_error, from.underlay()) {
            return;
        }
        let lost = self.tunnels.of_remote(index).filter(|live| self.hops.is_path_to(&live.tunnel, from));
        let lost =
            lost.map(|live| (live.tunnel.local_index, live.announced, live.tunnel.peer_addresses.first().copied()));
        let lost: Vec<_> = lost.collect();
        for (index, announced, peer) in lost {
            self.remove_tunnel(index, TunnelDownReason::RecvError);
            if let Some(peer) = peer.filter(|_| announced) {
                // The peer dropped the tunnel while this node was away, and may have packets for it.
                self.connect(now, peer);
            }
        }
        if let Origin::Direct(from) = from {
            self.relaying(now).renew(from, index);
        }
    }

    fn answer_unknown_index(&mut self, from: Origin, index: u32) {
        let index_of = LocalIndex(index);
        let in_use = self.tunnels.get(index_of).is_some() || self.half_open.contains(index_of);
        if in_use || self.pending.peer_of(index_of).is_some() {
            // The peer's data overtook its message 2, or was queued behind it. A recv_error would tear down the tunnel
            // that is being set up or has just been made.
            return;
        }
        if applies(self.config.send_recv_error, from.underlay()) {
            let header = Header { kind: MessageType::RecvError, index, counter: 0 };
            self.outbox.answer(&self.hops, from, header.to_bytes().to_vec());
        }
    }

    /// Sends CloseTunnel to the peer and removes the tunnel.
    fn close_tunnel(&mut self, index: LocalIndex, reason: TunnelDownReason) {
        if let Some(live) = self.tunnels.get(index) {
            let tunnel = Arc::clone(&live.tunnel);
            self.outbox.message(&tunnel, MessageType::CloseTunnel, &[]);
        }
        self.remove_tunnel(index, reason);
    }

    /// Removes a tunnel without telling the peer; another tunnel to the same peer takes over.
    fn remove_tunnel(&mut self, index: LocalIndex, reason: TunnelDownReason) {
        let Some(live) = self.tunnels.remove(index) else { return };
        self.timer.cancel(Due::Tunnel(index));
        self.forwarder.tunnels().retire(index);
        let peer = live.tunnel.peer_addresses.clone();
        for &address in &peer {
            if self.forwarder.tunnels().by_address(address).is_none() {
                if let Some(heir) = self.tunnels.heir(address) {
                    self.forwarder.tunnels().set_primary(heir);
                } else if self.expects_back(reason) {
                    self.lighthouse.expect_back(self.now, address);
                } else if !self.pending.contains(address) {
                    self.lighthouse.forget(address);
                }
            }
        }
        self.hops.forget_neighbour(&live.tunnel, &self.tunnels);
        let gone = peer.iter().all(|address| self.tunnels.of_peer(*address).is_empty());
        if gone {
            peer.iter().for_each(|address| self.hops.disestablish(*address, &self.tunnels));
            self.server.forget(&peer);
        }
        if gone && peer.iter().any(|address| self.config.is_lighthouse(*address)) {
            match reason {
                TunnelDownReason::RecvError => self.timer.set(Due::LighthouseUpdate, self.now),
                // A lighthouse that shuts down says goodbye to all its hosts at once, so they spread their new
                // handshakes.
                TunnelDownReason::ClosedByPeer => {
                    let spread = self.rng.next_u32() % GOODBYE_SPREAD_MS;
                    self.timer.set(Due::LighthouseUpdate, self.now + Duration::from_millis(spread.into()));
                }
                _ => {}
            }
        }
        self.outbox.event(Event::TunnelDown {
            peer,
            name: live.tunnel.peer.name().to_owned(),
            endpoint: live.tunnel.endpoint(),
            local_index: index,
            remote_index: live.tunnel.remote_index,
            reason,
        });
    }

    /// Whether a peer whose last tunnel ended for this reason is probably still where it was, or will be back soon.
    fn expects_back(&self, reason: TunnelDownReason) -> bool {
        match reason {
            TunnelDownReason::RecvError => true,
            // The peer may only be restarting. A lighthouse expects nobody back: hosts call it by themselves, and a
            // whole fleet of them may leave.
            TunnelDownReason::ClosedByPeer => !self.config.lighthouse.am_lighthouse,
            _ => false,
        }
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

/// The part of the configuration that the forwarding plane needs.
fn local_policy(config: &Config) -> LocalPolicy {
    let certificate = config.identity.primary();
    LocalPolicy {
        networks: certificate.networks().to_vec(),
        unsafe_networks: certificate.unsafe_networks().to_vec(),
        subnets: config.subnets.clone(),
        drop_local_broadcast: config.drop_local_broadcast,
        drop_multicast: config.drop_multicast,
        firewall: config.firewall.clone(),
    }
}

/// Whether the policy covers this underlay address.
fn applies(policy: RecvErrorPolicy, address: SocketAddr) -> bool {
    match policy {
        RecvErrorPolicy::Always => true,
        RecvErrorPolicy::Never => false,
        RecvErrorPolicy::Private => match address.ip() {
            IpAddr::V4(v4) => v4.is_private(),
            IpAddr::V6(v6) => v6.is_unique_local(),
        },
    }
}

/// The hosts of a lighthouse that shuts down spread their new handshakes over this time.
const GOODBYE_SPREAD_MS: u32 = 1000;
/// A deadline missed by more than this shows that the process did not run for a while.
const MISSED_BY: Duration = Duration::from_secs(2);
