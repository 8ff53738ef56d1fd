//! Makes the state that a node hands over.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nebula_cert::{Fingerprint, VerifiedCertificate};

use crate::handover::{Flow, Hop, Peer, Session, State};
use crate::node::Node;
use crate::node::tunnels::Live;
use crate::relay::Kind;
use crate::tunnel::Tunnel;

impl Node {
    /// What [`Node::hand_over`] would return, but without keys: for another process to see whether it can read it, or
    /// to be kept for the case that this one dies. The node goes on.
    #[must_use]
    pub fn offer(&self, now: Instant) -> State {
        self.state(now, false)
    }

    /// Ends the node and returns what another process needs to go on in its place. Nothing is sealed any more from then
    /// on, by no lane either, and all tunnels are gone from the forwarding plane.
    ///
    /// To be called when no lane receives any more: what one opens later, the other process opens again. What the node
    /// put out so far is to be sent before.
    #[must_use]
    pub fn hand_over(self, now: Instant) -> State {
        self.half_open.iter().filter_map(|it| it.half_open()).for_each(|half_open| half_open.stop_sealing());
        self.tunnels.iter().for_each(|live| live.tunnel.session.stop_sealing());
        let state = self.state(now, true);
        for index in self.tunnels.indexes() {
            self.forwarder.tunnels().retire(index);
        }
        if let Some(inheritance) = &self.inheritance {
            inheritance.indexes().for_each(|index| self.forwarder.tunnels().disinherit(index));
        }
        state
    }

    fn state(&self, now: Instant, with_keys: bool) -> State {
        let mut peers = Peers::default();
        let is_primary = |live: &&Live| self.forwarder.tunnels().is_primary(&live.tunnel);
        // Of several tunnels to a peer, the one in use comes last.
        let (primary, spare): (Vec<_>, Vec<_>) = self.tunnels.iter().partition(is_primary);
        // Reserved at once, because growing would leave copies of keys behind.
        let count = if with_keys {
            self.tunnels.iter().count() + self.inheritance.as_ref().map_or(0, |it| it.len())
        } else {
            0
        };
        let mut sessions = Vec::with_capacity(count);
        let mut hand_over = |tunnel: &Tunnel, peer: u32, age: Duration| {
            if with_keys {
                sessions.push(Session { peer, index: tunnel.local_index, opening: tunnel.session.to_opening(), age });
            }
        };
        if let Some(inheritance) = &self.inheritance {
            for (tunnel, age) in inheritance.sessions(now) {
                let peer = peers.position(&tunnel.peer, || Peer {
                    certificate: (**tunnel.peer).clone(),
                    endpoint: tunnel.endpoint(),
                    relay: inheritance.relay_of(tunnel),
                    idle: age,
                    path: None,
                });
                hand_over(tunnel, peer, age);
            }
        }
        for live in spare.into_iter().chain(primary) {
            let peer = peers.replace(&live.tunnel.peer, self.peer(now, live));
            hand_over(&live.tunnel, peer, Duration::ZERO);
        }
        let hops = if with_keys { self.own_hops() } else { Vec::new() };
        let Peers { all, .. } = peers;
        let certificates: Vec<_> = all.iter().map(|(verified, _)| verified).collect();
        let flows = self.forwarder.flows_with(&certificates, now).into_iter();
        let flows = flows.filter_map(|(peer, known)| Some(Flow { peer: u32::try_from(peer).ok()?, known }));
        let (courses, affinities) = self.forwarder.courses(now);
        let counters = self.forwarder.counters().into_iter().map(|(name, n)| (name.to_owned(), n));
        let state = State {
            made: self.wall.unix_at(now),
            flows: flows.collect(),
            peers: all.into_iter().map(|(_, peer)| peer).collect(),
            sessions,
            hops,
            courses,
            affinities,
            counters: counters.filter(|(_, n)| *n > 0).collect(),
            attached: Vec::new(),
        };
        state.bounded()
    }

    fn peer(&self, now: Instant, live: &Live) -> Peer {
        let tunnel = &live.tunnel;
        let is_in_use = tunnel.was_heard() || tunnel.was_sent_to();
        let endpoint = tunnel.endpoint();
        Peer {
            certificate: (**tunnel.peer).clone(),
            endpoint,
            relay: if endpoint.is_none() { self.forwarder.relay_of(tunnel) } else { None },
            idle: if is_in_use { Duration::ZERO } else { now.saturating_duration_since(live.used) },
            path: endpoint.and_then(|_| live.path_mtu.measured()),
        }
    }

    /// The hops through relays at whose end this node is. Those that it forwards as a relay are set up again by their
    /// ends.
    fn own_hops(&self) -> Vec<Hop> {
        let inherited = self.inheritance.iter().flat_map(|inheritance| inheritance.hops());
        let ends = self.hops.entries.iter().filter(|entry| entry.key.kind == Kind::Terminal);
        ends.map(|entry| Hop { index: entry.index, session: entry.key.tunnel }).chain(inherited).collect()
    }
}

/// Peers by certificate.
#[derive(Default)]
struct Peers {
    all: Vec<(VerifiedCertificate, Peer)>,
    positions: BTreeMap<Fingerprint, u32>,
}

impl Peers {
    /// The position of the holder of a certificate, which is added if it is not there.
    fn position(&mut self, certificate: &VerifiedCertificate, peer: impl FnOnce() -> Peer) -> u32 {
        *self.positions.entry(certificate.fingerprint()).or_insert_with(|| {
            self.all.push((certificate.clone(), peer()));
            (self.all.len() - 1) as u32
        })
    }

    /// Like [`Peers::position`], but what is known by now replaces what was known before.
    fn replace(&mut self, certificate: &VerifiedCertificate, peer: Peer) -> u32 {
        let at = self.position(certificate, || peer.clone());
        if let Some((_, known)) = self.all.get_mut(at as usize) {
            *known = Peer { idle: peer.idle.min(known.idle), ..peer };
        }
        at
    }
}
