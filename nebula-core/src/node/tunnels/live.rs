//! The control plane's state of one live tunnel, beyond what the data path needs.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::{Fingerprint, UnixTime, VerifiedCertificate, Version};

use crate::config::Timers;
use crate::node::incarnations::Incarnations;
use crate::node::path_choice::Choice;
use crate::node::path_mtu::{Openings, Search};
use crate::node::relayed::Relayed;
use crate::relay::RateLimit;
use crate::tunnel::liveness::{Decision, Facts, Liveness};
use crate::tunnel::{Traffic, Tunnel};
use crate::{Config, Origin};

/// A live tunnel with its control state.
#[derive(Debug)]
pub(in crate::node) struct Live {
    pub(in crate::node) tunnel: Arc<Tunnel>,
    pub(in crate::node) liveness: Liveness,
    /// The own certificate this tunnel was made with.
    pub(in crate::node) own_certificate: Fingerprint,
    /// Time from start to message 2, if this node initiated.
    pub(in crate::node) took: Option<Duration>,
    /// Digest of the message 1 that opened it, if this node responded.
    pub(in crate::node) opened_by: Option<[u8; 32]>,
    /// When its handshake was completed here; if this node responded, before the peer was heard.
    pub(in crate::node) since: Instant,
    /// The endpoint that the tunnel left last, and when.
    pub(in crate::node) left: Option<(SocketAddr, Instant)>,
    /// When a traffic check last found traffic.
    pub(in crate::node) used: Instant,
    /// This node moved or woke up, sent the peer a test request, and has heard nothing in this tunnel since.
    pub(in crate::node) announced: bool,
    /// Send counter when better endpoints were last tried.
    pub(in crate::node) promoted_at: u64,
    /// Send counter when the lighthouses were last asked.
    pub(in crate::node) asked_at: u64,
    /// When they may be asked again.
    pub(in crate::node) ask_after: Instant,
    /// When the relayed peer may be challenged again.
    pub(in crate::node) challenge_after: Instant,
    /// When the peer last challenged this node on the path that the tunnel uses.
    pub(in crate::node) challenged: Option<Instant>,
    /// A new endpoint of the peer gets nothing but challenges before, because one did not answer.
    pub(in crate::node) distrusted_until: Instant,
    /// Rate limit of the handshakes that this node starts as a relay on behalf of this peer.
    pub(in crate::node) introductions: RateLimit,
    /// Which pods have the peer's addresses.
    pub(in crate::node) incarnations: Incarnations,
    /// How large a packet the path to the peer carries.
    pub(in crate::node) path_mtu: Search,
    /// Answers to tests since the last traffic check.
    pub(in crate::node) answers: u64,
    /// A test by every path, since then, was answered: the first answer shows the path to use.
    pub(in crate::node) is_answered: bool,
    /// Highest counter received at the last traffic check.
    pub(in crate::node) heard_to: u64,
    /// Which path is best, if there are several and the tunnel is in use.
    pub(in crate::node) choice: Option<Box<Choice>>,
    /// What was tried while it was relayed and in use.
    pub(in crate::node) relayed: Option<Box<Relayed>>,
    /// Packets that open connections, and wait until that is known.
    pub(in crate::node) openings: Openings,
}

impl Live {
    pub(in crate::node) fn new(now: Instant, established: Established) -> Self {
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
    pub(in crate::node) fn take_traffic(&mut self, now: Instant) -> Traffic {
        let traffic = self.tunnel.take_traffic();
        if traffic.received() || traffic.sent {
            self.used = now;
        }
        self.announced &= !traffic.received();
        traffic
    }

    /// What the traffic check at this time, monotonic and on the wall clock, does about the tunnel.
    pub(in crate::node) fn decide(
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
    pub(in crate::node) fn has_just_left(&self, now: Instant, endpoint: SocketAddr) -> bool {
        self.left.is_some_and(|(place, at)| place == endpoint && now < at + ROAM_BACK_AFTER)
    }

    /// Moves the tunnel to an endpoint, unless it has just left that one. Returns whether it moved.
    pub(in crate::node) fn move_to(&mut self, now: Instant, endpoint: SocketAddr) -> bool {
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
    pub(in crate::node) fn search_due(&mut self, now: Instant, timers: &Timers) -> SearchDue {
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
    pub(in crate::node) fn may_ask(&mut self, now: Instant, wait: Duration) -> bool {
        let may = now >= self.ask_after;
        if may {
            self.ask_after = now + wait;
        }
        may
    }

    /// Whether the relayed peer may be challenged. If so, it may be challenged again after a while.
    pub(in crate::node) fn may_challenge(&mut self, now: Instant) -> bool {
        let may = now >= self.challenge_after;
        if may {
            self.challenge_after = now + CHALLENGE_INTERVAL;
        }
        may
    }

    /// Whether the peer's certificate is no longer acceptable.
    pub(in crate::node) fn is_refused(&self, config: &Config, at: UnixTime) -> bool {
        is_refused(config, &self.tunnel.peer, at)
    }

    /// Whether a new handshake would use a newer certificate, a higher version or fresh counters.
    pub(in crate::node) fn is_outdated(&self, config: &Config) -> bool {
        let tunnel = &self.tunnel;
        let Some(current) = config.identity.certificate(tunnel.own_version) else { return true };
        current.fingerprint() != self.own_certificate
            || self.version_to_upgrade_to(config).is_some()
            || tunnel.own_version < config.default_version()
            || tunnel.session.is_worn()
    }

    /// The higher version that both sides hold but this tunnel does not use.
    pub(in crate::node) fn version_to_upgrade_to(&self, config: &Config) -> Option<Version> {
        let theirs = self.tunnel.peer.version();
        (theirs > self.tunnel.own_version && config.identity.certificate(theirs).is_some()).then_some(theirs)
    }
}

/// Whether the certificate of a peer that has a tunnel is no longer acceptable.
pub(in crate::node) fn is_refused(config: &Config, peer: &VerifiedCertificate, at: UnixTime) -> bool {
    match config.trust.recheck(peer, at) {
        Ok(()) => false,
        Err(nebula_cert::Error::Blocked { .. }) => true,
        Err(_) => config.disconnect_invalid,
    }
}

/// Searches for a better path of a tunnel that are due.
#[derive(Debug, Clone, Copy)]
pub(in crate::node) struct SearchDue {
    /// Try better endpoints.
    pub(in crate::node) promote: bool,
    /// Ask the lighthouses.
    pub(in crate::node) ask: bool,
}

/// A tunnel whose peer has proved that it holds the keys, about to be installed.
#[derive(Debug)]
pub(crate) struct Established {
    pub(crate) tunnel: Arc<Tunnel>,
    /// Where the peer's last datagram came from.
    pub(crate) from: Origin,
    /// An endpoint at which the peer may be, although the handshake does not prove it, and how many bytes came from
    /// there.
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

/// Keeps a tunnel from flapping between two paths of a peer that both carry traffic.
const ROAM_BACK_AFTER: Duration = Duration::from_secs(2);
/// Minimum time between two challenges of the same relayed peer.
const CHALLENGE_INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
#[cfg(not(loom))]
pub(super) mod tests {
    use super::*;
    use crate::forward::testing;
    use crate::index::LocalIndex;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    pub(in super::super) fn base() -> Instant {
        Instant::now()
    }

    pub(in super::super) fn live(index: u32, since: Instant) -> Live {
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
}
