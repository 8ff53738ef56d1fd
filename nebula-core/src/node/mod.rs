//! The control plane of one node: it owns every control table and connects the parts.
//!
//! - Tables with their rules, which know nothing of each other's owner: `timer`, `tunnels`, `hops`, `outbox`, and
//!   `name_holders`, under capture `held`, `incarnations`.
//! - What needs several tables borrows them from [`Node`] for one call: `confirmation` (`Callers`), `paths`,
//!   `validation`, `path_mtu` and `path_choice` (`Paths`), `relaying` (`Relaying`), `rendezvous` (`Rendezvous`).
//!   These send messages, but start no handshake and end no tunnel.
//! - What starts handshakes or ends tunnels is a method of [`Node`]: `handshakes`, `life_cycle`, and the first block
//!   of the files above. These call each other in circles, as the protocol does: a handshake asks the lighthouses for
//!   an endpoint, and asking them may take a handshake. `warm` is another of them: it keeps tunnels that nobody uses;
//!   and `gateways`, which decides which gateways take flows.
//! - `prober` is what all parts that measure share; `test_messages` hands their requests and replies out.
//! - `handover` gives everything to another process, and starts with what an earlier one gave.
//! - `inspect` has the read-only views.

mod confirmation;
mod denied;
mod flow_records;
mod gateways;
mod handover;
mod handshakes;
mod held;
mod hops;
mod incarnations;
mod inspect;
mod life_cycle;
mod name_holders;
mod outbox;
mod path_choice;
mod path_mtu;
mod paths;
mod prober;
mod relay_choice;
mod relayed;
mod relaying;
mod rendezvous;
mod settings;
mod test_messages;
mod timer;
mod tunnels;
mod validation;
mod wall_clock;
mod warm;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

use self::gateways::Gateways;
pub use self::gateways::{GatewayState, GatewayStatus};
use self::handover::Inheritance;
use self::held::Held;
use self::hops::Hops;
pub use self::inspect::{
    FlowTrace, Outcome, PendingStatus, RelayState, RelayStatus, TableSizes, TunnelStatus, Whereabouts,
};
use self::name_holders::NameHolders;
use self::outbox::Outbox;
pub use self::path_choice::{PathReason, PathStatus, PathVerdict};
pub use self::relay_choice::{OfferedRelay, RelayReason, RelayTrouble};
use self::relay_choice::{Offers, RelayChoice};
use self::timer::{Due, Timer};
#[cfg(feature = "simulator")]
pub(crate) use self::tunnels::Established;
use self::tunnels::Tunnels;
use self::validation::Validations;
pub use self::wall_clock::WallClock;
use self::warm::Warm;
use crate::capture::OpenedBefore;
use crate::counters::Direction;
use crate::diagnosis::Journal;
use crate::forward::LocalPolicy;
use crate::handshake::{Admission, HalfOpenTable, PendingHandshakes};
use crate::hole_punch::HolePunch;
use crate::index::LocalIndex;
use crate::lighthouse::{self, LocalAddress};
use crate::tunnel::ReservedIndex;
use crate::wire::header::MessageType;
use crate::{Config, DropReason, Event, Forwarder, Origin, PacketOwned, Punt, Seed, Transmit, TunnelDownReason};

/// The control plane of one node. It has no locks, reads no clock and owns no sockets; callers pass the time in.
///
/// After any `handle_*` call, setter or [`Node::reconfigure`], drain [`Node::poll_transmit`], [`Node::poll_packet`],
/// [`Node::poll_bypass`] and [`Node::poll_event`], then read [`Node::poll_timeout`]. The times passed in must never
/// go backwards.
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
    names: NameHolders,
    validations: Validations,
    lighthouse: lighthouse::Client,
    server: lighthouse::Server,
    punches: HolePunch,
    hops: Hops,
    journal: Journal,
    outbox: Outbox,
    held: Held,
    warm: Warm,
    gateways: Gateways,
    /// `None` if this node chooses no relays.
    relay_choice: Option<Box<RelayChoice>>,
    /// What this node offers as a lighthouse.
    offers: Offers,
    /// What is left of an earlier process of this node; `None` most of the time.
    inheritance: Option<Box<Inheritance>>,
    forwarder: Arc<Forwarder>,
}

impl Node {
    /// Creates a node and its forwarding plane. All its randomness derives from `seed`, the ephemeral keys of
    /// handshakes included.
    #[must_use]
    pub fn new(config: Config, now: Instant, wall: WallClock, seed: Seed) -> (Self, Arc<Forwarder>) {
        let mut rng = ChaCha20Rng::from_seed(*seed.bytes());
        let key = [rng.next_u64(), rng.next_u64()];
        let admission = Admission::new(config.handshakes.max_new_per_second, now, rng.next_u64());
        let half_open = HalfOpenTable::new(config.handshakes.max_new_per_second, now, rng.next_u64());
        let forwarder = Arc::new(Forwarder::new(LocalPolicy::from(&config), now, key));
        let mut secret = [0; 32];
        rng.fill_bytes(&mut secret);
        let validations = Validations::new(secret, now);
        let punches = HolePunch::new(now, rng.next_u64());
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
            names: NameHolders::default(),
            validations,
            lighthouse: lighthouse::Client::default(),
            server: lighthouse::Server::default(),
            punches,
            hops: Hops::new(Arc::clone(&forwarder), am_relay),
            journal: Journal::default(),
            outbox: Outbox::new(Arc::clone(&forwarder)),
            held: Held::default(),
            warm: Warm::default(),
            gateways: Gateways::default(),
            relay_choice: None,
            offers: Offers::default(),
            inheritance: None,
            forwarder: Arc::clone(&forwarder),
        };
        node.forwarder.number_records_from(wall);
        node.forwarder.set_flow_records(node.config.flow_records);
        node.forwarder.set_directory(node.config.capture.clone());
        node.housekeeping(now);
        if !node.config.keep.is_empty() {
            node.apply_kept(now);
        }
        node.apply_gateways(now);
        if !node.config.relay.groups.is_empty() {
            node.apply_relay_choice(now);
        }
        (node, forwarder)
    }

    /// Handles what the forwarding plane could not finish on its own.
    pub fn handle_punt(&mut self, now: Instant, punt: Punt) {
        self.now = now;
        match punt {
            Punt::NoTunnel { peer, packet } => self.handle_no_tunnel(now, peer, packet),
            Punt::Unknown { packet } => self.handle_unknown(now, packet),
            Punt::Connect { peer } => self.connect(now, peer),
            Punt::Handshake { from, datagram } => self.handle_handshake(now, from, &datagram),
            Punt::RecvError { from, index } => self.handle_recv_error(now, from, index),
            Punt::UnknownIndex { from, index } => self.answer_unknown_index(from, index),
            Punt::Message { tunnel, from, kind, plaintext } => {
                self.handle_message(now, tunnel, from, kind, &plaintext);
            }
            Punt::Roamed { tunnel, from, .. } if self.heard_inherited(tunnel, from) => {}
            Punt::Roamed { tunnel, from, bytes } => self.paths(now).heard_elsewhere(tunnel, from, bytes),
            Punt::PathUnexamined { tunnel, waits } => self.paths(now).examine(tunnel, waits),
            Punt::Confirmed { tunnel, from } => self.handle_confirmed(now, tunnel, from),
            Punt::Dropped { direction, flow, reason, tunnel } => {
                self.handle_dropped(now, (direction, reason), flow, tunnel);
            }
            Punt::Audited { direction, flow, tunnel } => self.handle_audited(now, direction, flow, tunnel),
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

    /// Next packet to send on the primary network: one that waited before it was known to belong there. See
    /// [`Verdict::Bypass`](crate::Verdict::Bypass).
    #[must_use]
    pub fn poll_bypass(&mut self) -> Option<PacketOwned> {
        self.outbox.next_bypass()
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

    /// Under capture: takes over flows that programs opened before this node started, as an earlier one gave them
    /// their endpoints, so that the other end may speak first.
    pub fn resume_flows(&mut self, now: Instant, flows: &[OpenedBefore]) {
        self.now = now;
        self.forwarder.resume(flows, now);
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
            self.call(now, peer);
        }
    }

    /// Like [`Node::connect`], but also tries `endpoint`.
    pub fn connect_at(&mut self, now: Instant, peer: IpAddr, endpoint: SocketAddr) {
        self.now = now;
        self.lighthouse.candidates(peer).learn(endpoint);
        self.connect(now, peer);
        self.retry_if_endpoints_changed(peer);
    }

    fn handle_no_tunnel(&mut self, now: Instant, peer: IpAddr, packet: PacketOwned) {
        let Some(packet) = self.hold_for_validation(peer, packet) else { return };
        if self.forwarder.is_reachable(peer) {
            // The tunnel came up while the punt was on its way.
            self.send_waiting(now, packet);
            return;
        }
        self.call(now, peer);
        let most = self.config.handshakes.max_waiting_bytes.saturating_sub(self.validations.held_bytes());
        let lost = self.pending.push_packet(peer, packet, most);
        self.outbox.counters().drop_many(Direction::Outbound, DropReason::PendingFull, lost);
    }

    /// Sends a packet that waited for a tunnel. If it cannot be sent now, nor wait for the validation of an endpoint,
    /// it is lost: keeping it again would loop.
    fn send_waiting(&mut self, now: Instant, packet: PacketOwned) {
        match self.outbox.overlay_packet(now, packet) {
            Some(Punt::PathUnexamined { tunnel, waits }) => self.paths(now).examine(tunnel, waits),
            Some(Punt::NoTunnel { peer, packet }) => {
                let lost = self.hold_for_validation(peer, packet).map_or(0, |_| 1);
                self.outbox.counters().drop_many(Direction::Outbound, DropReason::NoEndpoint, lost);
            }
            _ => {}
        }
    }

    fn handle_message(&mut self, now: Instant, index: LocalIndex, from: Origin, kind: MessageType, body: &[u8]) {
        let Some(tunnel) = self.forwarder.tunnels().by_index(index) else {
            return self.handle_inherited_message(index, kind);
        };
        match kind {
            MessageType::Lighthouse => self.handle_lighthouse_message(now, &tunnel, body),
            MessageType::TestRequest => self.handle_test_request(now, &tunnel, from, body),
            MessageType::TestReply => self.handle_test_reply(now, &tunnel, from, body),
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
            Due::Validation(index) => self.paths(now).validation_due(index),
            Due::PathMtu(index) => self.paths(now).path_mtu_due(index),
            Due::PathChoice(index) => self.paths(now).path_choice_due(index),
            Due::Elsewhere(index) => self.paths(now).elsewhere_due(index),
            Due::HalfOpen(index) => self.callers(now).due(index),
            Due::LighthouseUpdate => self.update_lighthouses(now),
            Due::HolePunch => self.punch_due(now),
            Due::Warm => self.keep_warm(now),
            Due::RelayChoice => self.choose_relays(now),
            Due::Gateways => self.look_at_gateways(now),
            Due::Held => self.held_due(now),
            Due::Inheritance => self.look_after_inheritance(now),
            Due::Housekeeping => self.housekeeping(now),
        }
    }

    /// Expires flows and stale entries, and releases memory.
    fn housekeeping(&mut self, now: Instant) {
        self.forwarder.expire_flows(now);
        self.forwarder.expire_translations(now);
        self.outbox.release_memory();
        self.server.wanted().expire(now);
        // The endpoints of a peer that is expected back outlive its tunnel, but not forever.
        self.lighthouse.retain(now, |peer| !self.tunnels.of_peer(peer).is_empty() || self.pending.contains(peer));
        self.timer.set_on_grid(Due::Housekeeping, now + HOUSEKEEPING_INTERVAL);
    }

    /// The forwarding plane of this node.
    #[cfg(feature = "simulator")]
    pub(crate) fn forwarder(&self) -> &Forwarder {
        &self.forwarder
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
