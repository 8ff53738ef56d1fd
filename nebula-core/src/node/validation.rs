//! Path validation (RFC 9000, sections 8.2 and 9.3): a tunnel moves to no endpoint from which its peer has not
//! answered a challenge.
//!
//! Who holds the keys of a tunnel can write any source address into its datagrams, so where they come from proves
//! nothing. A challenge is a test request with a body that nobody knows who did not get it. Until it is answered, the
//! new endpoint gets at most three times what came from it ([`Trial`]). All else goes by the path from before. If
//! there is none, because the tunnel is new and its handshake left open where the peer is, it waits here.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::hmac;

use super::Node;
use super::outbox::seal;
use super::paths::Paths;
use super::timer::Due;
use crate::counters::Direction;
use crate::index::LocalIndex;
use crate::tunnel::{PathState, Trial, Tunnel};
use crate::wire::challenge::Challenge;
use crate::wire::header::{HEADER_LEN, MessageType, TAG_LEN};
use crate::{DropReason, Origin, PacketOwned, Punt};

/// The endpoints under validation, at most one for each tunnel.
#[derive(Debug)]
pub(super) struct Validations {
    /// Makes the challenges, so that none has to be remembered.
    secret: hmac::Key,
    epoch: Instant,
    by_tunnel: BTreeMap<LocalIndex, Validation>,
    /// Total size of the packets that wait, in bytes.
    held_bytes: usize,
    /// Peers that were called where they garbled a challenge, and when they may be called so again.
    called: BTreeMap<IpAddr, Instant>,
}

/// An endpoint at which a peer was heard.
#[derive(Debug)]
struct Validation {
    at: SocketAddr,
    /// Challenges sent, and when the last one was.
    challenges: u32,
    challenged: Instant,
    /// When nothing waits for an answer any more. One that comes later counts all the same.
    given_up: Instant,
    /// Whether the endpoint gets more than challenges.
    is_trusted: bool,
    /// Packets for a peer that has no other path.
    held: VecDeque<PacketOwned>,
}

impl Validations {
    pub(super) fn new(secret: [u8; 32], epoch: Instant) -> Self {
        let secret = hmac::Key::new(hmac::HMAC_SHA256, &secret);
        Self { secret, epoch, by_tunnel: BTreeMap::new(), held_bytes: 0, called: BTreeMap::new() }
    }

    /// The challenge for an endpoint of a tunnel; after a while, it is another one.
    fn challenge(&self, period: u64, tunnel: LocalIndex, at: SocketAddr) -> Challenge {
        let mut context = hmac::Context::with_key(&self.secret);
        context.update(&period.to_be_bytes());
        context.update(&tunnel.0.to_be_bytes());
        match at.ip().to_canonical() {
            IpAddr::V4(v4) => context.update(&v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => context.update(&v6.octets()),
        }
        context.update(&at.port().to_be_bytes());
        let mut code = [0; 32];
        code.copy_from_slice(context.sign().as_ref());
        Challenge::new(&code)
    }

    /// A number that nobody can predict, for the measurements of a tunnel that begin now.
    pub(super) fn seed(&self, now: Instant, tunnel: LocalIndex) -> u64 {
        let mut context = hmac::Context::with_key(&self.secret);
        context.update(b"seed");
        context.update(&now.saturating_duration_since(self.epoch).as_nanos().to_be_bytes());
        context.update(&tunnel.0.to_be_bytes());
        let code = context.sign();
        code.as_ref().first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }

    fn period(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_secs() / PERIOD.as_secs()
    }

    /// Whether this was sent to that endpoint not long ago.
    fn is_answer(&self, now: Instant, returned: Challenge, tunnel: LocalIndex, from: SocketAddr) -> bool {
        let period = self.period(now);
        [period, period.wrapping_sub(1)].into_iter().any(|period| self.challenge(period, tunnel, from) == returned)
    }

    /// Whether a peer that garbled a challenge may be called there. If so, it may be called again after a while.
    fn may_call(&mut self, now: Instant, peer: IpAddr) -> bool {
        self.called.retain(|_, again| now < *again);
        let may = self.called.len() < MAX_CALLED && !self.called.contains_key(&peer);
        if may {
            self.called.insert(peer, now + CALL_INTERVAL);
        }
        may
    }

    /// Keeps a packet until the endpoint of its tunnel is known, if there is room for it among `most` bytes. Returns
    /// it if the tunnel has no endpoint under validation.
    fn hold(&mut self, tunnel: LocalIndex, packet: PacketOwned, most: usize) -> Result<bool, PacketOwned> {
        let Some(validation) = self.by_tunnel.get_mut(&tunnel) else { return Err(packet) };
        let bytes = self.held_bytes + packet.bytes.len();
        let fits = validation.held.len() < MAX_HELD && bytes <= most;
        if fits {
            self.held_bytes = bytes;
            validation.held.push_back(packet);
        }
        Ok(fits)
    }

    fn remove(&mut self, tunnel: LocalIndex) -> Option<Validation> {
        let validation = self.by_tunnel.remove(&tunnel)?;
        self.held_bytes -= validation.held.iter().map(|packet| packet.bytes.len()).sum::<usize>();
        Some(validation)
    }

    /// Number of endpoints under validation.
    pub(super) fn len(&self) -> usize {
        self.by_tunnel.len()
    }

    /// Total size of the packets that wait, in bytes.
    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }
}

impl Node {
    /// Keeps a packet for a peer whose only endpoint is under validation. Returns it if it is not for such a peer.
    pub(super) fn hold_for_validation(&mut self, peer: IpAddr, packet: PacketOwned) -> Option<PacketOwned> {
        let Some(tunnel) = self.forwarder.tunnels().by_address(peer).filter(|tunnel| tunnel.is_on_trial()) else {
            return Some(packet);
        };
        let most = self.config.handshakes.max_waiting_bytes.saturating_sub(self.pending.waiting_bytes());
        match self.validations.hold(tunnel.local_index, packet, most) {
            Ok(true) => None,
            Ok(false) => {
                self.outbox.counters().drop_one(Direction::Outbound, DropReason::PendingFull);
                None
            }
            Err(packet) => Some(packet),
        }
    }

    /// A peer answered a challenge from `at` with something else, so it runs a Go Nebula whose answers prove nothing.
    /// Calls it there: whoever answers that has got it.
    pub(super) fn validate_by_call(&mut self, now: Instant, tunnel: &Tunnel, at: SocketAddr) {
        let Some(&peer) = tunnel.peer_addresses.first() else { return };
        let is_news = tunnel.endpoint() != Some(at) && self.config.may_be_at(&tunnel.peer_addresses, at);
        if is_news && !self.pending.contains(peer) && self.validations.may_call(now, peer) {
            self.start_handshake_at(now, peer, at);
        }
    }

    /// A tunnel ended.
    pub(super) fn forget_validation(&mut self, index: LocalIndex) {
        self.timer.cancel(Due::Validation(index));
        if let Some(Validation { held, .. }) = self.validations.remove(index) {
            self.outbox.counters().drop_many(Direction::Outbound, DropReason::NoEndpoint, held.len() as u64);
        }
    }
}

impl Paths<'_> {
    /// The peer of a tunnel was heard in a datagram of `bytes` from an endpoint other than the tunnel's.
    pub(super) fn heard_elsewhere(&mut self, index: LocalIndex, from: SocketAddr, bytes: usize) {
        let Some(live) = self.tunnels.get(index) else { return };
        let tunnel = Arc::clone(&live.tunnel);
        let has_just_left = live.has_just_left(self.now, from);
        if tunnel.endpoint() == Some(from) || !self.config.may_be_at(&tunnel.peer_addresses, from) {
            return;
        }
        if tunnel.endpoint().is_none() && self.forwarder.carrier(&tunnel).is_some() {
            // A direct datagram does not show that there is a direct path back: use the relay until an answer shows it.
            return self.challenge_relayed(&tunnel, from);
        }
        match self.validations.by_tunnel.get(&index) {
            _ if has_just_left => {}
            Some(known) if self.now < known.challenged + known.pause() => {}
            Some(known) if known.at == from => self.challenge_again(index),
            _ => self.validate(index, from, bytes),
        }
    }

    /// Begins to validate where the peer of a new tunnel may be.
    pub(super) fn validate_first(&mut self, index: LocalIndex, at: SocketAddr, bytes: usize) {
        let Some(live) = self.tunnels.get(index) else { return };
        if live.tunnel.endpoint().is_some() {
            return self.heard_elsewhere(index, at, bytes);
        }
        if !live.path_mtu.is_near() {
            live.tunnel.path_limit.set(PathState::Open);
        }
        self.validate(index, at, bytes);
    }

    /// Begins to validate an endpoint, from which `bytes` came.
    pub(super) fn validate(&mut self, index: LocalIndex, at: SocketAddr, bytes: usize) {
        let Some(live) = self.tunnels.get(index) else { return };
        let (tunnel, is_trusted) = (Arc::clone(&live.tunnel), self.now >= live.distrusted_until);
        let former = self.validations.by_tunnel.remove(&index);
        // A peer that is heard at ever other endpoints gets no more than one that is heard at one.
        let given_up = former.as_ref().filter(|former| former.is_trusted).map(|former| former.given_up);
        let (challenged, given_up) = (self.now, given_up.unwrap_or(self.now + GIVEN_UP_AFTER));
        let held = former.map(|former| former.held).unwrap_or_default();
        let validation = Validation { at, challenges: 1, challenged, given_up, is_trusted, held };
        self.validations.by_tunnel.insert(index, validation);
        let next = if is_trusted { self.now + CHALLENGE_PAUSE } else { given_up };
        self.timer.set(Due::Validation(index), next.min(given_up));
        let trial = Trial::new(at, bytes);
        // It may get that: the challenge is shorter than three times any datagram that is authenticated.
        if trial.may_send(CHALLENGE_LEN) {
            self.try_endpoint(&tunnel, at);
        }
        tunnel.set_trial(is_trusted.then_some(trial));
    }

    /// Challenges again, if the endpoint may get that.
    fn challenge_again(&mut self, index: LocalIndex) {
        let Some(tunnel) = self.tunnels.get(index).map(|live| Arc::clone(&live.tunnel)) else { return };
        let Some(validation) = self.validations.by_tunnel.get_mut(&index) else { return };
        if !tunnel.trial().is_none_or(|trial| trial.may_send(CHALLENGE_LEN)) {
            return;
        }
        (validation.challenges, validation.challenged) = (validation.challenges + 1, self.now);
        let at = validation.at;
        self.try_endpoint(&tunnel, at);
    }

    /// A challenge was not answered in time.
    pub(super) fn validation_due(&mut self, index: LocalIndex) {
        let Some(validation) = self.validations.by_tunnel.get(&index) else { return };
        let (given_up, is_trusted) = (validation.given_up, validation.is_trusted);
        if self.now >= given_up {
            return self.give_up_validation(index);
        }
        if is_trusted {
            self.challenge_again(index);
        }
        let challenges = self.validations.by_tunnel.get(&index).map_or(0, |validation| validation.challenges);
        let next = self.now + CHALLENGE_PAUSE * (1 << challenges.saturating_sub(1).min(8));
        self.timer.set(Due::Validation(index), next.min(given_up));
    }

    /// Nobody answered there. The tunnel stays where it is.
    fn give_up_validation(&mut self, index: LocalIndex) {
        let Some(validation) = self.validations.remove(index) else { return };
        let mut lost = validation.held.len();
        if let Some(live) = self.tunnels.get_mut(index) {
            live.tunnel.set_trial(None);
            live.distrusted_until = self.now + DISTRUSTED_FOR;
            if self.forwarder.carrier(&live.tunnel).is_none() {
                lost += live.openings.take().len();
            }
        }
        self.outbox.counters().drop_many(Direction::Outbound, DropReason::NoEndpoint, lost as u64);
        self.let_go(index);
    }

    /// Handles the reply to a challenge: the peer is where it came from.
    pub(super) fn handle_challenge_reply(&mut self, tunnel: &Tunnel, from: SocketAddr, returned: Challenge) {
        let index = tunnel.local_index;
        if !self.validations.is_answer(self.now, returned, index, from) {
            return;
        }
        let Some(live) = self.tunnels.get_mut(index) else { return };
        // It returned what it got, so it survives long probes.
        live.path_mtu.note_safe();
        tunnel.mark_received();
        let own = self.config.identity.networks().first().map(ipnet::IpNet::addr);
        // Each end uses another path, and the peer is about to follow: if both did, they would only change places.
        let is_followed = live.challenged.is_some_and(|at| self.now < at + FOLLOWS_WITHIN);
        if is_followed && own < tunnel.peer_addresses.first().copied() {
            return self.stay(index);
        }
        self.follow(index, from);
    }

    /// The peer comes where this node is.
    fn stay(&mut self, index: LocalIndex) {
        let Some(live) = self.tunnels.get(index) else { return };
        if live.tunnel.endpoint().is_some() {
            live.tunnel.set_trial(None);
            self.end_validation(index);
        }
    }

    /// The peer challenges this node.
    pub(super) fn note_challenge(&mut self, tunnel: &Tunnel, from: Origin) {
        if let Some(live) = self.tunnels.get_mut(tunnel.local_index)
            && from.endpoint().is_some()
            && tunnel.endpoint() == from.endpoint()
        {
            live.challenged = Some(self.now);
        }
    }

    /// There is a newer tunnel to the same peer, of which it is known where the peer is.
    pub(super) fn end_older_validations(&mut self, newer: &Tunnel) {
        let peer = newer.peer_addresses.first().copied();
        let tunnels = peer.map(|peer| self.tunnels.of_peer(peer).to_vec()).unwrap_or_default();
        for index in tunnels.into_iter().filter(|index| *index != newer.local_index) {
            if let Some(live) = self.tunnels.get(index).filter(|live| live.tunnel.is_on_trial()) {
                live.tunnel.set_trial(None);
            }
            self.send_held(index);
        }
    }

    fn send_held(&mut self, index: LocalIndex) {
        self.timer.cancel(Due::Validation(index));
        let held = self.validations.remove(index).map(|validation| validation.held).unwrap_or_default();
        for packet in held {
            if let Some(Punt::PathUnexamined { tunnel, waits }) = self.outbox.overlay_packet(self.now, packet) {
                self.examine(tunnel, waits);
            }
        }
    }

    /// The endpoint of a tunnel is known: what waited for that is sent.
    pub(super) fn end_validation(&mut self, index: LocalIndex) {
        self.hops.publish_over(index, self.tunnels);
        self.send_held(index);
        if self.tunnels.get(index).is_some_and(|live| !live.openings.is_empty()) {
            self.examine(index, None);
        }
    }

    /// Sends a challenge that does not count as traffic in the traffic check, where it would keep an idle tunnel alive.
    pub(super) fn try_endpoint(&mut self, tunnel: &Tunnel, at: SocketAddr) {
        let period = self.validations.period(self.now);
        let challenge = self.validations.challenge(period, tunnel.local_index, at);
        if let Some(request) = seal(tunnel, MessageType::TestRequest, &challenge.body()) {
            self.outbox.datagram(at, request);
        }
    }

    /// Sends a challenge to an endpoint at which the peer of a relayed tunnel seems to be.
    ///
    /// Rate limited, because the answer is a direct datagram, too: two peers that challenged each other for every
    /// datagram would send more and more of them.
    fn challenge_relayed(&mut self, tunnel: &Tunnel, at: SocketAddr) {
        let Some(live) = self.tunnels.get_mut(tunnel.local_index) else { return };
        if live.may_challenge(self.now) {
            if let Some(relayed) = &mut live.relayed {
                relayed.hope();
            }
            self.try_endpoint(tunnel, at);
        }
    }

    /// Whether to answer what came by `from` with so many bytes: an endpoint on trial gets no more than it may.
    pub(super) fn may_answer(&self, tunnel: &Tunnel, from: Origin, bytes: usize) -> bool {
        let trial = tunnel.trial().filter(|trial| from.endpoint() == Some(trial.at));
        trial.is_none_or(|trial| trial.may_send(bytes + HEADER_LEN + TAG_LEN))
    }
}

impl Validation {
    /// Minimum time between two challenges because datagrams come from there.
    fn pause(&self) -> Duration {
        if self.is_trusted { CHALLENGE_PAUSE } else { DISTRUSTED_PAUSE }
    }
}

/// A challenge is good for this time, and at most for twice as long.
const PERIOD: Duration = Duration::from_secs(16);
/// Length of a challenge on the wire.
const CHALLENGE_LEN: usize = HEADER_LEN + Challenge::LEN + TAG_LEN;
/// Pause before a challenge is sent again. As long as there are no datagrams from the endpoint, it doubles each time.
const CHALLENGE_PAUSE: Duration = Duration::from_millis(100);
/// How long a peer that challenges may take to follow.
const FOLLOWS_WITHIN: Duration = Duration::from_secs(1);
const GIVEN_UP_AFTER: Duration = Duration::from_secs(3);
/// Who has let a validation fail gets nothing but a challenge now and then for so long, except where it answers.
const DISTRUSTED_FOR: Duration = Duration::from_secs(60);
const DISTRUSTED_PAUSE: Duration = Duration::from_secs(1);
/// Packets that wait for one tunnel.
const MAX_HELD: usize = 100;
/// How often a peer is called that garbles challenges: message 1 may have 9000 bytes.
const CALL_INTERVAL: Duration = Duration::from_secs(10);
const MAX_CALLED: usize = 1024;
