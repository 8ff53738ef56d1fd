//! The control plane's state of each live tunnel, beyond what the data path needs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::{Fingerprint, UnixTime, Version};

use super::incarnations::Incarnations;
use super::path_choice::Choice;
use super::path_mtu::{Openings, Search};
use super::relayed::Relayed;
use crate::config::Timers;
use crate::index::{LocalIndex, RemoteIndex};
use crate::relay::RateLimit;
use crate::tunnel::liveness::{Decision, Facts, Liveness};
use crate::tunnel::{Traffic, Tunnel, TunnelTable};
use crate::{Config, Origin};

/// A live tunnel with its control state.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) tunnel: Arc<Tunnel>,
    pub(super) liveness: Liveness,
    /// The own certificate this tunnel was made with.
    pub(super) own_certificate: Fingerprint,
    /// Time from start to message 2, if this node initiated.
    pub(super) took: Option<Duration>,
    /// Digest of the message 1 that opened it, if this node responded.
    pub(super) opened_by: Option<[u8; 32]>,
    /// When its handshake was completed here; if this node responded, before the peer was heard.
    pub(super) since: Instant,
    /// The endpoint that the tunnel left last, and when.
    pub(super) left: Option<(SocketAddr, Instant)>,
    /// When a traffic check last found traffic.
    pub(super) used: Instant,
    /// This node moved or woke up, sent the peer a test request, and has heard nothing in this tunnel since.
    pub(super) announced: bool,
    /// Send counter when better endpoints were last tried.
    pub(super) promoted_at: u64,
    /// Send counter when the lighthouses were last asked.
    pub(super) asked_at: u64,
    /// When they may be asked again.
    pub(super) ask_after: Instant,
    /// When the relayed peer may be challenged again.
    pub(super) challenge_after: Instant,
    /// When the peer last challenged this node on the path that the tunnel uses.
    pub(super) challenged: Option<Instant>,
    /// A new endpoint of the peer gets nothing but challenges before, because one did not answer.
    pub(super) distrusted_until: Instant,
    /// Rate limit of the handshakes that this node starts as a relay on behalf of this peer.
    pub(super) introductions: RateLimit,
    /// Which pods have the peer's addresses.
    pub(super) incarnations: Incarnations,
    /// How large a packet the path to the peer carries.
    pub(super) path_mtu: Search,
    /// Answers to tests since the last traffic check.
    pub(super) answers: u64,
    /// A test by every path, since then, was answered: the first answer shows the path to use.
    pub(super) is_answered: bool,
    /// Highest counter received at the last traffic check.
    pub(super) heard_to: u64,
    /// Which path is best, if there are several and the tunnel is in use.
    pub(super) choice: Option<Box<Choice>>,
    /// What was tried while it was relayed and in use.
    pub(super) relayed: Option<Box<Relayed>>,
    /// Packets that open connections, and wait until that is known.
    pub(super) openings: Openings,
}

impl Live {
    pub(super) fn new(now: Instant, established: Established) -> Self {
        let Established { tunnel, from: _, unproven: _, since, own_certificate, opened_by, took } = established;
        Self {
            tunnel,
            liveness: Liveness::default(),
            own_certificate,
            took,
            opened_by,
            since,
            left: None,
            used: now,
            announced: false,
            promoted_at: 0,
            asked_at: 0,
            ask_after: now,
            challenge_after: now,
            challenged: None,
            distrusted_until: now,
            introductions: RateLimit::default(),
            incarnations: Incarnations::default(),
            // What this node waited for after it answered.
            path_mtu: Search::new(now, took.unwrap_or_else(|| now.saturating_duration_since(since))),
            answers: 0,
            is_answered: false,
            heard_to: 0,
            choice: None,
            relayed: None,
            openings: Openings::default(),
        }
    }

    /// Takes the traffic since the last check.
    pub(super) fn take_traffic(&mut self, now: Instant) -> Traffic {
        let traffic = self.tunnel.take_traffic();
        if traffic.received() || traffic.sent {
            self.used = now;
        }
        self.announced &= !traffic.received();
        traffic
    }

    /// What the traffic check at this time, monotonic and on the wall clock, does about the tunnel.
    pub(super) fn decide(
        &mut self,
        config: &Config,
        (now, at): (Instant, UnixTime),
        traffic: Traffic,
        primary: bool,
    ) -> Decision {
        let tunnel = &self.tunnel;
        // An answer to a test shows that the peer is alive, but not that it sends packets by this tunnel.
        let highest = tunnel.session.received.replay.highest();
        let peer_uses_it = highest.saturating_sub(self.heard_to) > self.answers;
        (self.heard_to, self.answers, self.is_answered) = (highest, 0, false);
        let own = config.identity.networks().first().map(ipnet::IpNet::addr);
        let certificate = config.identity.certificate(tunnel.own_version);
        let certificate_in_use = certificate.is_none_or(|current| current.fingerprint() == self.own_certificate);
        let facts = Facts {
            received: traffic.received(),
            sent: traffic.sent,
            primary,
            certificate_refused: self.is_refused(config, at),
            inactive: config.timers.inactivity_timeout.is_some_and(|limit| now >= self.used + limit),
            exhausted: tunnel.session.is_exhausted(),
            outdated: self.is_outdated(config),
            may_become_primary: peer_uses_it
                && own <= tunnel.peer_addresses.first().copied()
                && !tunnel.session.is_worn()
                && certificate_in_use,
        };
        self.liveness.decide(facts)
    }

    /// Whether the tunnel left this endpoint so recently that it does not return there.
    pub(super) fn has_just_left(&self, now: Instant, endpoint: SocketAddr) -> bool {
        self.left.is_some_and(|(place, at)| place == endpoint && now < at + ROAM_BACK_AFTER)
    }

    /// Moves the tunnel to an endpoint, unless it has just left that one. Returns whether it moved.
    pub(super) fn move_to(&mut self, now: Instant, endpoint: SocketAddr) -> bool {
        let old = self.tunnel.endpoint();
        if old == Some(endpoint) || self.has_just_left(now, endpoint) {
            return false;
        }
        self.left = old.map(|place| (place, now));
        self.relayed = None;
        self.tunnel.set_endpoint(Some(endpoint));
        true
    }

    /// Which searches for a better path are due after the datagrams sent so far. Those count as done.
    pub(super) fn search_due(&mut self, now: Instant, timers: &Timers) -> SearchDue {
        let counter = self.tunnel.session.next_counter();
        let due = |since: u64, every: Option<NonZeroU64>| every.is_some_and(|every| counter - since >= every.get());
        let promote = due(self.promoted_at, timers.try_promote);
        if promote {
            self.promoted_at = counter;
        }
        let ask = due(self.asked_at, timers.requery_every) && self.may_ask(now, timers.requery_wait);
        if ask {
            self.asked_at = counter;
        }
        SearchDue { promote, ask }
    }

    /// Whether the lighthouses may be asked about the peer. If so, they may be asked again after `wait`.
    pub(super) fn may_ask(&mut self, now: Instant, wait: Duration) -> bool {
        let may = now >= self.ask_after;
        if may {
            self.ask_after = now + wait;
        }
        may
    }

    /// Whether the relayed peer may be challenged. If so, it may be challenged again after a while.
    pub(super) fn may_challenge(&mut self, now: Instant) -> bool {
        let may = now >= self.challenge_after;
        if may {
            self.challenge_after = now + CHALLENGE_INTERVAL;
        }
        may
    }

    /// Whether the peer's certificate is no longer acceptable.
    pub(super) fn is_refused(&self, config: &Config, at: UnixTime) -> bool {
        match config.trust.recheck(&self.tunnel.peer, at) {
            Ok(()) => false,
            Err(nebula_cert::Error::Blocked { .. }) => true,
            Err(_) => config.disconnect_invalid,
        }
    }

    /// Whether a new handshake would use a newer certificate, a higher version or fresh counters.
    pub(super) fn is_outdated(&self, config: &Config) -> bool {
        let tunnel = &self.tunnel;
        let Some(current) = config.identity.certificate(tunnel.own_version) else { return true };
        current.fingerprint() != self.own_certificate
            || self.version_to_upgrade_to(config).is_some()
            || tunnel.own_version < config.default_version()
            || tunnel.session.is_worn()
    }

    /// The higher version that both sides hold but this tunnel does not use.
    pub(super) fn version_to_upgrade_to(&self, config: &Config) -> Option<Version> {
        let theirs = self.tunnel.peer.version();
        (theirs > self.tunnel.own_version && config.identity.certificate(theirs).is_some()).then_some(theirs)
    }
}

/// Searches for a better path of a tunnel that are due.
#[derive(Debug, Clone, Copy)]
pub(super) struct SearchDue {
    /// Try better endpoints.
    pub(super) promote: bool,
    /// Ask the lighthouses.
    pub(super) ask: bool,
}

/// A tunnel whose peer has proved that it holds the keys, about to be installed.
#[derive(Debug)]
pub(crate) struct Established {
    pub(crate) tunnel: Arc<Tunnel>,
    /// Where the peer's last datagram came from.
    pub(crate) from: Origin,
    /// An endpoint at which the peer may be, although the handshake does not prove it, and how many bytes came from there.
    pub(crate) unproven: Option<(SocketAddr, usize)>,
    /// When the handshake was completed here.
    pub(crate) since: Instant,
    /// The own certificate this tunnel was made with.
    pub(crate) own_certificate: Fingerprint,
    /// Digest of message 1, if this node responded.
    pub(crate) opened_by: Option<[u8; 32]>,
    /// Time from start to message 2, if this node initiated.
    pub(crate) took: Option<Duration>,
}

/// All live tunnels.
#[derive(Debug, Default)]
pub(super) struct Tunnels {
    live: BTreeMap<LocalIndex, Live>,
    /// Oldest first.
    by_peer: BTreeMap<IpAddr, Vec<LocalIndex>>,
    by_remote: BTreeSet<(RemoteIndex, LocalIndex)>,
    by_opening: BTreeMap<[u8; 32], LocalIndex>,
}

impl Tunnels {
    pub(super) fn insert(&mut self, live: Live) {
        let index = live.tunnel.local_index;
        for &address in &live.tunnel.peer_addresses {
            let indexes = self.by_peer.entry(address).or_default();
            let is_older = |other: &&LocalIndex| self.live.get(*other).is_some_and(|other| other.since <= live.since);
            let at = indexes.len() - indexes.iter().rev().take_while(|other| !is_older(other)).count();
            indexes.insert(at, index);
        }
        self.by_remote.insert((live.tunnel.remote_index, index));
        if let Some(digest) = live.opened_by {
            self.by_opening.insert(digest, index);
        }
        self.live.insert(index, live);
    }

    pub(super) fn remove(&mut self, index: LocalIndex) -> Option<Live> {
        let live = self.live.remove(&index)?;
        for address in &live.tunnel.peer_addresses {
            if let Some(indexes) = self.by_peer.get_mut(address) {
                indexes.retain(|other| *other != index);
                if indexes.is_empty() {
                    self.by_peer.remove(address);
                }
            }
        }
        self.by_remote.remove(&(live.tunnel.remote_index, index));
        if let Some(digest) = live.opened_by
            && self.by_opening.get(&digest) == Some(&index)
        {
            self.by_opening.remove(&digest);
        }
        Some(live)
    }

    pub(super) fn get(&self, index: LocalIndex) -> Option<&Live> {
        self.live.get(&index)
    }

    pub(super) fn get_mut(&mut self, index: LocalIndex) -> Option<&mut Live> {
        self.live.get_mut(&index)
    }

    /// The peer answered a test in this tunnel.
    pub(super) fn note_answer(&mut self, index: LocalIndex) {
        if let Some(live) = self.live.get_mut(&index) {
            live.answers += 1;
            live.path_mtu.note_test();
        }
    }

    /// The peer sent a test in this tunnel.
    pub(super) fn note_test(&mut self, index: LocalIndex) {
        if let Some(live) = self.live.get_mut(&index) {
            live.path_mtu.note_test();
        }
    }

    /// Number of entries in the lookup tables: by peer, by remote index and by message 1.
    pub(super) fn lookups(&self) -> usize {
        let by_peer: usize = self.by_peer.values().map(Vec::len).sum();
        by_peer + self.by_remote.len() + self.by_opening.len()
    }

    /// Iterates in order of the local indexes.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Live> {
        self.live.values()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Live> {
        self.live.values_mut()
    }

    pub(super) fn indexes(&self) -> Vec<LocalIndex> {
        self.live.keys().copied().collect()
    }

    /// Tunnels to the peer with this address, oldest first.
    pub(super) fn of_peer(&self, address: IpAddr) -> &[LocalIndex] {
        self.by_peer.get(&address).map_or(&[], Vec::as_slice)
    }

    /// The tunnel that takes over when the primary one to this peer is gone: the newest.
    pub(super) fn heir(&self, address: IpAddr) -> Option<&Arc<Tunnel>> {
        self.of_peer(address).last().and_then(|index| Some(&self.get(*index)?.tunnel))
    }

    /// Tunnels whose peer chose this index; several peers may choose the same.
    pub(super) fn of_remote(&self, index: RemoteIndex) -> impl Iterator<Item = &Live> {
        let range = (index, LocalIndex(0))..=(index, LocalIndex(u32::MAX));
        self.by_remote.range(range).filter_map(|(_, local)| self.live.get(local))
    }

    /// The tunnel that the message 1 with this digest opened.
    pub(super) fn opened_by(&self, digest: &[u8; 32]) -> Option<&Live> {
        self.by_opening.get(digest).and_then(|index| self.live.get(index))
    }

    /// Whether `tunnel` is newer than the primary one: the peer uses the tunnel that was made last.
    pub(super) fn is_newest(&self, tunnel: &Tunnel, table: &TunnelTable) -> bool {
        let Some(&peer) = tunnel.peer_addresses.first() else { return false };
        let Some(primary) = table.primary(peer) else { return true };
        let age = |index| self.of_peer(peer).iter().position(|other| *other == index);
        age(primary) < age(tunnel.local_index)
    }

    /// The tunnel to remove if there are too many to this peer: the oldest one that is not the primary one.
    pub(super) fn surplus(&self, peer: IpAddr, table: &TunnelTable) -> Option<LocalIndex> {
        let (_newest, older) = self.of_peer(peer).split_last()?;
        if older.len() < MAX_TUNNELS_PER_PEER {
            return None;
        }
        let is_spare = |index: &&LocalIndex| self.get(**index).is_some_and(|live| !table.is_primary(&live.tunnel));
        older.iter().find(is_spare).copied()
    }
}

/// Maximum number of tunnels to one peer: two nodes that call each other make two, and each new certificate one more.
const MAX_TUNNELS_PER_PEER: usize = 5;
/// Keeps a tunnel from flapping between two paths of a peer that both carry traffic.
const ROAM_BACK_AFTER: Duration = Duration::from_secs(2);
/// Minimum time between two challenges of the same relayed peer.
const CHALLENGE_INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::forward::testing;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    fn live(index: u32, since: Instant) -> Live {
        let tunnel = testing::tunnel(LocalIndex(index), testing::verified(&["10.1.0.2/16"]));
        let from = Origin::Direct(endpoint(1));
        let own_certificate = tunnel.peer.fingerprint();
        Live::new(
            since,
            Established { tunnel, from, unproven: None, since, own_certificate, opened_by: None, took: None },
        )
    }

    fn endpoint(host: u8) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, host], 4242))
    }

    #[test]
    fn a_tunnel_follows_its_peer_but_not_back_to_the_endpoint_it_has_just_left() {
        let now = base();
        let mut live = live(1, now);
        assert!(live.move_to(now, endpoint(1)) && live.move_to(now, endpoint(2)));
        assert!(!live.move_to(now, endpoint(2)), "it is there already");
        assert!(!live.move_to(now + ROAM_BACK_AFTER / 2, endpoint(1)));
        assert!(live.move_to(now + ROAM_BACK_AFTER / 2, endpoint(3)), "a third endpoint is no flapping");
        assert!(live.move_to(now + ROAM_BACK_AFTER, endpoint(1)));
        assert_eq!(live.tunnel.endpoint(), Some(endpoint(1)));
    }

    #[test]
    fn better_endpoints_are_sought_by_the_number_of_datagrams_and_lighthouses_asked_now_and_then() {
        let now = base();
        let mut live = live(1, now);
        let timers =
            Timers { try_promote: NonZeroU64::new(10), requery_every: NonZeroU64::new(20), ..Timers::default() };
        let mut search = |datagrams: u64, at| {
            live.tunnel.session.reserve(datagrams).unwrap();
            let due = live.search_due(at, &timers);
            (due.promote, due.ask)
        };
        assert_eq!(search(3, now), (false, false));
        assert_eq!(search(10, now), (true, false));
        assert_eq!(search(2, now), (false, false));
        assert_eq!(search(10, now), (true, true));
        assert_eq!(search(20, now), (true, false), "it is too early to ask again");
        assert_eq!(search(0, now + timers.requery_wait), (false, true));
    }

    #[test]
    fn a_relayed_peer_is_challenged_once_per_interval() {
        let now = base();
        let mut live = live(1, now);
        let times = (0..30).map(|n| now + CHALLENGE_INTERVAL * n / 10);
        assert_eq!(times.filter(|at| live.may_challenge(*at)).count(), 3);
    }

    #[test]
    fn the_newest_tunnel_is_the_heir_and_the_oldest_spare_one_is_surplus() {
        let now = base();
        let (mut tunnels, table) = (Tunnels::default(), TunnelTable::new(1));
        let peer: IpAddr = "10.1.0.2".parse().unwrap();
        // Installed out of order: what counts is when the handshake was completed.
        for (index, second) in [(1, 3), (2, 1), (3, 2), (4, 5), (5, 4), (6, 6)] {
            assert_eq!(tunnels.surplus(peer, &table), None);
            tunnels.insert(live(index, now + Duration::from_secs(second)));
        }
        assert_eq!(tunnels.of_peer(peer), [2, 3, 1, 5, 4, 6].map(LocalIndex));
        assert_eq!(tunnels.heir(peer).unwrap().local_index, LocalIndex(6));
        assert_eq!(tunnels.surplus(peer, &table), Some(LocalIndex(2)));
        let oldest = Arc::clone(&tunnels.get(LocalIndex(2)).unwrap().tunnel);
        table.publish(Arc::clone(&oldest));
        table.set_primary(&oldest);
        assert_eq!(tunnels.surplus(peer, &table), Some(LocalIndex(3)), "the primary one stays");
    }
}
