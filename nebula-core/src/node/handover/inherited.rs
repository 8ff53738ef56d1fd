//! What is left of an earlier process while peers still send in its sessions: these are opened, and nothing is sealed.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reconnects::Reconnects;
use crate::MessageType;
use crate::handover::{Hop, MeasuredPath};
use crate::index::{LocalIndex, RelayIndex};
use crate::lighthouse::Place;
use crate::node::Node;
use crate::node::incarnations::Incarnations;
use crate::node::timer::Due;
use crate::node::tunnels::is_refused;
use crate::tunnel::{Traffic, Tunnel};

/// Sessions of an earlier process, and what it knew of the paths to its peers. Empty when it is over.
#[derive(Debug, Default)]
pub(in crate::node) struct Inheritance {
    sessions: BTreeMap<LocalIndex, Session>,
    by_peer: BTreeMap<IpAddr, Vec<LocalIndex>>,
    /// Paths by first overlay address of the peer.
    paths: BTreeMap<IpAddr, (SocketAddr, MeasuredPath)>,
    /// Until when paths are of use.
    until: Option<Instant>,
    pub(super) reconnects: Reconnects,
}

/// A session in which this node only opens.
#[derive(Debug)]
struct Session {
    tunnel: Arc<Tunnel>,
    /// When the process that sealed in it stopped, by the clock of this one.
    since: Instant,
    ends: Instant,
    /// Hops over it, if the peer is a relay.
    hops: Vec<RelayIndex>,
    /// The relay through which the peer is reached, if it is.
    relay: Option<IpAddr>,
    incarnations: Incarnations,
}

impl Inheritance {
    /// Adds a session that no process seals in since `since`.
    pub(super) fn insert(&mut self, tunnel: Arc<Tunnel>, since: Instant, relay: Option<IpAddr>) {
        let index = tunnel.local_index;
        for &address in &tunnel.peer_addresses {
            self.by_peer.entry(address).or_default().push(index);
        }
        let (ends, hops, incarnations) = (since + LASTS, Vec::new(), Incarnations::default());
        self.sessions.insert(index, Session { tunnel, since, ends, hops, relay, incarnations });
    }

    /// Adds a hop over a session; `false` if there is no such session.
    pub(super) fn insert_hop(&mut self, hop: Hop) -> bool {
        let session = self.sessions.get_mut(&hop.session);
        session.map(|session| session.hops.push(hop.index)).is_some()
    }

    /// Remembers what is known about the path to a peer at this endpoint.
    pub(super) fn insert_path(&mut self, now: Instant, peer: IpAddr, at: SocketAddr, path: MeasuredPath) {
        self.paths.insert(peer, (at, path));
        self.until = Some(now + LASTS);
    }

    fn remove(&mut self, index: LocalIndex) -> Option<Session> {
        let session = self.sessions.remove(&index)?;
        for address in &session.tunnel.peer_addresses {
            if let Some(indexes) = self.by_peer.get_mut(address) {
                indexes.retain(|other| *other != index);
                if indexes.is_empty() {
                    self.by_peer.remove(address);
                }
            }
        }
        Some(session)
    }

    fn of_peer(&self, peer: &[IpAddr]) -> Vec<LocalIndex> {
        let mut indexes: Vec<_> =
            peer.iter().filter_map(|address| self.by_peer.get(address)).flatten().copied().collect();
        indexes.sort_unstable();
        indexes.dedup();
        indexes
    }

    /// Every session, with the time since nothing is sealed in it.
    pub(super) fn sessions(&self, now: Instant) -> impl Iterator<Item = (&Tunnel, Duration)> {
        self.sessions.values().map(move |it| (&*it.tunnel, now.saturating_duration_since(it.since)))
    }

    pub(super) fn indexes(&self) -> impl Iterator<Item = LocalIndex> {
        self.sessions.keys().copied()
    }

    pub(super) fn hops(&self) -> impl Iterator<Item = Hop> {
        let of = |(session, it): (&LocalIndex, &Session)| -> Vec<Hop> {
            it.hops.iter().map(|index| Hop { index: *index, session: *session }).collect()
        };
        self.sessions.iter().flat_map(of)
    }

    pub(super) fn relay_of(&self, tunnel: &Tunnel) -> Option<IpAddr> {
        self.sessions.get(&tunnel.local_index)?.relay
    }

    /// Number of sessions.
    pub(in crate::node) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// When there is something to do.
    fn due(&self, now: Instant) -> Option<Instant> {
        let look = self.sessions.values().map(|session| session.ends).min().map(|ends| ends.min(now + LOOK_EVERY));
        [look, self.reconnects.due(), self.until].into_iter().flatten().min()
    }
}

impl Node {
    /// Looks after the sessions of an earlier process and the handshakes that replace them.
    pub(in crate::node) fn look_after_inheritance(&mut self, now: Instant) {
        let Some(inheritance) = &mut self.inheritance else { return };
        if inheritance.until.is_some_and(|until| now >= until) {
            (inheritance.until, inheritance.paths) = (None, BTreeMap::new());
        }
        let room = self.config.handshakes.max_pending.saturating_sub(self.pending.len());
        let due = inheritance.reconnects.take(now, room);
        let ended = inheritance.sessions.values().filter(|session| now >= session.ends);
        let ended: Vec<_> = ended.map(|session| session.tunnel.local_index).collect();
        ended.into_iter().for_each(|index| self.end_inherited(index));
        self.end_refused_inherited(now);
        for peer in due {
            self.connect(now, peer);
        }
        self.retry_heard_peers(now);
        self.arm_inheritance(now);
    }

    /// Reconnects the peers that are heard in an old session, and gave no answer so far.
    fn retry_heard_peers(&mut self, now: Instant) {
        let Some(inheritance) = &self.inheritance else { return };
        let is_alone = |tunnel: &Tunnel| tunnel.peer_addresses.iter().all(|at| self.tunnels.of_peer(*at).is_empty());
        let is_pending =
            |tunnel: &Tunnel| tunnel.peer_addresses.first().is_none_or(|peer| self.pending.contains(*peer));
        let waiting = inheritance.sessions.values().map(|session| &*session.tunnel);
        let waiting = waiting.filter(|tunnel| is_alone(tunnel) && !is_pending(tunnel));
        // Life signs of peers beyond the limit count at the next look.
        let heard = waiting.filter(|tunnel| tunnel.take_traffic().received()).take(AGAIN_AT_ONCE);
        let peers: Vec<_> = heard.filter_map(|tunnel| tunnel.peer_addresses.first().copied()).collect();
        for peer in peers {
            self.connect(now, peer);
        }
    }

    /// Sets the deadline of the next look, and forgets the inheritance when nothing is left of it.
    pub(super) fn arm_inheritance(&mut self, now: Instant) {
        match self.inheritance.as_ref().and_then(|inheritance| inheritance.due(now)) {
            Some(due) => self.timer.set(Due::Inheritance, due),
            None => {
                self.inheritance = None;
                self.timer.cancel(Due::Inheritance);
            }
        }
    }

    /// There is a tunnel to this peer now: sessions of an earlier process last a little longer, for what is on the way
    /// and for as long as the peer goes on to send in them.
    pub(in crate::node) fn note_successor(&mut self, now: Instant, peer: &[IpAddr]) {
        let Some(inheritance) = &mut self.inheritance else { return };
        let ends = now + LINGERS;
        for index in inheritance.of_peer(peer) {
            if let Some(session) = inheritance.sessions.get_mut(&index) {
                session.ends = session.ends.min(ends);
            }
        }
    }

    /// Life signs of this peer in sessions of an earlier process, since the last call.
    pub(in crate::node) fn inherited_traffic(&self, peer: &[IpAddr]) -> Traffic {
        let mut sum = Traffic { direct: false, relayed: false, sent: false };
        let Some(inheritance) = &self.inheritance else { return sum };
        for index in inheritance.of_peer(peer) {
            let traffic = inheritance.sessions.get(&index).map(|session| session.tunnel.take_traffic());
            sum.direct |= traffic.is_some_and(|traffic| traffic.direct);
            sum.relayed |= traffic.is_some_and(|traffic| traffic.relayed);
        }
        sum
    }

    /// What an earlier process knew about the size of the path to a peer at this endpoint.
    pub(in crate::node) fn inherited_path(&self, peer: IpAddr, at: SocketAddr) -> Option<&MeasuredPath> {
        let (place, path) = self.inheritance.as_ref()?.paths.get(&peer)?;
        (*place == at).then_some(path)
    }

    /// Handles a message in a session of an earlier process. Whatever wants an answer is asked again in the tunnel that
    /// is about to replace it.
    pub(in crate::node) fn handle_inherited_message(&mut self, index: LocalIndex, kind: MessageType) {
        if kind == MessageType::CloseTunnel {
            self.end_inherited(index);
        }
    }

    /// A peer was heard in a session of an earlier process from elsewhere than there: it may have moved, so it is tried
    /// at both places. Returns whether there is such a session.
    pub(in crate::node) fn heard_inherited(&mut self, index: LocalIndex, from: SocketAddr) -> bool {
        let inheritance = self.inheritance.as_ref();
        let Some(session) = inheritance.and_then(|inheritance| inheritance.sessions.get(&index)) else { return false };
        let peer = session.tunnel.peer_addresses.clone();
        if self.config.may_be_at(&peer, from) {
            for &address in &peer {
                self.lighthouse.candidates(address).report(address, Place::of(Some(from)), vec![from]);
                self.retry_if_endpoints_changed(address);
            }
        }
        true
    }

    /// Ends the sessions of an earlier process with this peer.
    pub(in crate::node) fn end_inherited_of(&mut self, peer: IpAddr) {
        let indexes = self.inheritance.as_ref().map(|inheritance| inheritance.of_peer(&[peer]));
        indexes.unwrap_or_default().into_iter().for_each(|index| self.end_inherited(index));
    }

    /// Ends the sessions of an earlier process whose peer is no longer trusted.
    pub(in crate::node) fn end_refused_inherited(&mut self, now: Instant) {
        let Some(inheritance) = &self.inheritance else { return };
        let at = self.wall.unix_seconds(now);
        let refused = inheritance.sessions.values().filter(|it| is_refused(&self.config, &it.tunnel.peer, at));
        let refused: Vec<_> = refused.map(|session| session.tunnel.local_index).collect();
        refused.into_iter().for_each(|index| self.end_inherited(index));
    }

    /// Ends the sessions of an earlier process with pods whose address another pod has by now.
    pub(in crate::node) fn end_inherited_of_former_pods(&mut self) {
        let (Some(directory), Some(inheritance)) = (&self.config.capture, &mut self.inheritance) else { return };
        let is_former =
            |session: &mut Session| session.incarnations.update(&session.tunnel.peer_addresses, &**directory);
        let sessions = inheritance.sessions.iter_mut();
        let former: Vec<_> = sessions.filter_map(|(index, session)| is_former(session).then_some(*index)).collect();
        former.into_iter().for_each(|index| self.end_inherited(index));
    }

    fn end_inherited(&mut self, index: LocalIndex) {
        let Some(session) = self.inheritance.as_mut().and_then(|inheritance| inheritance.remove(index)) else { return };
        self.forwarder.tunnels().disinherit(index);
        session.hops.iter().for_each(|hop| self.forwarder.relays().retire(*hop));
    }
}

/// How long sessions of an earlier process are opened at most. A peer that has not answered a handshake meanwhile is
/// told that its index is unknown, and begins one itself.
pub(super) const LASTS: Duration = Duration::from_secs(60);
/// How long beside the tunnel that replaces it: longer than the interval of traffic checks, at which a peer may be that
/// goes on to use the old one.
const LINGERS: Duration = Duration::from_secs(15);
/// Sessions are looked at this often, apart from deadlines.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of such handshakes at each look.
const AGAIN_AT_ONCE: usize = 64;
