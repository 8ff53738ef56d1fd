//! Starts a node with the state of an earlier process.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::VerifiedCertificate;

use super::Inheritance;
use super::inherited::LASTS;
use super::reconnects::Reconnects;
use crate::handover::{Flow, Hop, Peer, Session, State};
use crate::index::RelayIndex;
use crate::node::{Node, WallClock};
use crate::relay::Role;
use crate::tunnel::{PeerIdentity, Tunnel, addresses_of};
use crate::{Config, Forwarder, Seed};

/// A peer whose certificate this configuration accepts.
struct Accepted {
    certificate: VerifiedCertificate,
    identity: PeerIdentity,
    addresses: Vec<IpAddr>,
    peer: Peer,
}

impl Node {
    /// Like [`Node::new`], for a node that goes on where another process stopped. The configuration may be another one:
    /// peers that it does not trust are left out, and so are flows that its rules do not allow.
    ///
    /// A handshake with each peer begins at once, with the latest active ones first; call [`Node::handle_timeout`].
    /// Until they answer, packets to them wait as with any handshake, and what they still send in the old sessions is
    /// opened.
    #[must_use]
    pub fn take_over(
        config: Config,
        now: Instant,
        wall: WallClock,
        seed: Seed,
        state: State,
    ) -> (Self, Arc<Forwarder>) {
        let (mut node, forwarder) = Self::new(config, now, wall, seed);
        node.import(now, state);
        (node, forwarder)
    }

    /// Takes over from an earlier process, before the first packet.
    pub(crate) fn import(&mut self, now: Instant, state: State) {
        let passed = self.wall.unix_at(now).saturating_sub(state.made);
        let State { peers, sessions, hops, flows, mut courses, affinities, counters, .. } = state;
        let peers: Vec<_> = peers.into_iter().map(|peer| self.accept(now, peer)).collect();
        let mut inheritance = Inheritance::default();
        for peer in peers.iter().flatten() {
            self.learn_way(now, peer, &mut inheritance);
        }
        for session in sessions {
            let peer = usize::try_from(session.peer).ok().and_then(|at| peers.get(at)?.as_ref());
            if let Some(peer) = peer {
                self.inherit(now, peer, session, passed, &mut inheritance);
            }
        }
        for hop in hops {
            self.inherit_hop(hop, &mut inheritance);
        }
        self.forwarder.take_over_counters(&counters);
        self.take_over_flows(now, &peers, flows, passed);
        for course in &mut courses {
            course.idle = course.idle.saturating_add(passed);
        }
        self.forwarder.take_over_courses(now, courses, &affinities);
        inheritance.reconnects = Reconnects::new(now, in_order_of_activity(&peers));
        self.inheritance = Some(Box::new(inheritance));
        self.end_inherited_of_former_pods();
        self.arm_inheritance(now);
    }

    /// Verifies a peer as if it had just shown its certificate.
    fn accept(&self, now: Instant, peer: Peer) -> Option<Accepted> {
        let certificate = self.config.trust.verify(peer.certificate.clone(), self.wall.unix_seconds(now)).ok()?;
        let addresses = addresses_of(&certificate);
        let is_own = addresses.iter().any(|address| self.config.is_own_address(*address));
        (!is_own).then(|| Accepted { identity: (&certificate).into(), certificate, addresses, peer })
    }

    /// Remembers where a peer is.
    fn learn_way(&mut self, now: Instant, accepted: &Accepted, inheritance: &mut Inheritance) {
        let Accepted { addresses, peer, .. } = accepted;
        let endpoint = peer.endpoint.filter(|at| self.config.may_be_at(addresses, *at));
        for &address in addresses {
            let known = self.lighthouse.candidates(address);
            if let Some(endpoint) = endpoint {
                known.learn(endpoint);
            }
            if let Some(relay) = peer.relay {
                known.report_relays(relay, vec![relay]);
            }
        }
        if let (Some(&first), Some(endpoint), Some(path)) = (addresses.first(), endpoint, peer.path) {
            inheritance.insert_path(now, first, endpoint, path);
        }
    }

    /// Goes on to open what a peer sends in a session. `passed`: since the state was made.
    fn inherit(
        &mut self,
        now: Instant,
        accepted: &Accepted,
        session: Session,
        passed: Duration,
        inheritance: &mut Inheritance,
    ) {
        let Session { index, opening, age, .. } = session;
        let age = age.saturating_add(passed);
        let Some(since) = now.checked_sub(age).filter(|_| age < LASTS) else { return };
        let endpoint = accepted.peer.endpoint;
        // The node needs some bytes that nobody knows; nothing is ever sealed with them.
        let placeholder = self.random_bytes();
        let tunnel = Tunnel::opening(index, accepted.certificate.clone(), endpoint, &opening, placeholder);
        let tunnel = Arc::new(tunnel);
        if self.forwarder.tunnels().inherit(Arc::clone(&tunnel)) {
            inheritance.insert(tunnel, since, accepted.peer.relay);
        }
    }

    /// Goes on to open what comes through a relay.
    fn inherit_hop(&mut self, hop: Hop, inheritance: &mut Inheritance) {
        let relays = self.forwarder.relays();
        if hop.index != RelayIndex(0) && relays.get(hop.index).is_none() && inheritance.insert_hop(hop) {
            relays.publish(hop.index, hop.session, Role::Terminal);
        }
    }

    fn take_over_flows(&mut self, now: Instant, peers: &[Option<Accepted>], flows: Vec<Flow>, passed: Duration) {
        let with_peer = |flow: Flow| {
            let peer = peers.get(usize::try_from(flow.peer).ok()?)?.as_ref()?;
            let mut known = flow.known;
            known.idle = known.idle.saturating_add(passed);
            Some((&peer.certificate, peer.identity, known))
        };
        self.forwarder.take_over_flows(now, flows.into_iter().filter_map(with_peer).collect());
    }
}

/// The first address of each peer, that with the latest traffic first. Those that are relays for others come before
/// them, because the way to the others leads over them.
fn in_order_of_activity(peers: &[Option<Accepted>]) -> Vec<IpAddr> {
    let relays: BTreeSet<_> = peers.iter().flatten().filter_map(|accepted| accepted.peer.relay).collect();
    let mut ranked: Vec<_> = peers.iter().flatten().collect();
    ranked.sort_by_key(|it| (!it.addresses.iter().any(|address| relays.contains(address)), it.peer.idle));
    let mut called = BTreeSet::new();
    let firsts = ranked.into_iter().filter_map(|accepted| accepted.addresses.first().copied());
    firsts.filter(|peer| called.insert(*peer)).collect()
}
