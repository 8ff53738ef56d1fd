//! Sends the probes of a tunnel, and moves it to the path that is chosen.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::{Candidate, Carried, Choice, Load, Way};
use crate::capture::scramble_address;
use crate::index::LocalIndex;
use crate::node::Node;
use crate::node::outbox::seal;
use crate::node::paths::Paths;
use crate::node::timer::Due;
use crate::relay::Entry;
use crate::tunnel::Tunnel;
use crate::wire::header::MessageType;
use crate::wire::path_probe::{PathProbe, PathReply};
use crate::{Config, Origin};

impl Node {
    /// The setting changed: forgets what was measured if it is off. If it is on, each tunnel begins with its next
    /// traffic.
    pub(in crate::node) fn forget_measurements(&mut self) {
        for index in self.tunnels.indexes() {
            if let Some(live) = self.tunnels.get_mut(index) {
                live.choice = None;
            }
            self.timer.cancel(Due::PathChoice(index));
        }
    }

    /// A tunnel that this node made takes over what is known about the paths from an older one to the same peer.
    pub(in crate::node) fn inherit_measurements(&mut self, index: LocalIndex) {
        let Some(live) = self.tunnels.get(index) else { return };
        let (carried, tunnel) = (Carried::of(&live.tunnel), Arc::clone(&live.tunnel));
        let peer = tunnel.peer_addresses.first();
        let older =
            peer.and_then(|peer| self.tunnels.of_peer(*peer).iter().rev().copied().find(|older| *older != index));
        let Some(older) = older else { return };
        let choice = self.tunnels.get_mut(older).and_then(|older| older.choice.take());
        self.timer.cancel(Due::PathChoice(older));
        if let (Some(mut choice), Some(live)) = (choice, self.tunnels.get_mut(index)) {
            choice.move_over(carried);
            live.choice = Some(choice);
        }
    }
}

impl Paths<'_> {
    /// Begins to measure the paths of a tunnel that is in use, if there are several.
    pub(in crate::node) fn measure(&mut self, index: LocalIndex) {
        let Some(tunnel) = self.tunnels.get(index).map(|live| Arc::clone(&live.tunnel)) else { return };
        let Some(current) = way_of(&tunnel).filter(|_| self.measures(&tunnel)) else { return };
        let candidates = self.candidates(&tunnel, current);
        let seed = self.validations.seed(self.now, index);
        let Some(live) = self.tunnels.get_mut(index) else { return };
        if candidates.len() < 2 {
            live.choice = None;
            return self.timer.cancel(Due::PathChoice(index));
        }
        let choice =
            live.choice.get_or_insert_with(|| Box::new(Choice::new(self.now, current, Carried::of(&tunnel), seed)));
        choice.set_candidates(&candidates);
        if choice.begins(self.now, current) {
            self.timer.set(Due::PathChoice(index), self.now);
        }
    }

    /// A round of measurements is due.
    pub(in crate::node) fn path_choice_due(&mut self, index: LocalIndex) {
        let Some(live) = self.tunnels.get_mut(index) else { return };
        let tunnel = Arc::clone(&live.tunnel);
        let (Some(current), Some(choice)) = (way_of(&tunnel), &mut live.choice) else { return };
        if choice.current().is_direct() != current.is_direct() {
            // Other paths count now; the next traffic check names them.
            live.choice = None;
            return;
        }
        let round = choice.round(self.now, Carried::of(&tunnel), current);
        if let Some(next) = round.next {
            self.timer.set(Due::PathChoice(index), next);
        }
        match round.move_to {
            Some(Way::Direct(endpoint)) => self.follow(index, endpoint),
            Some(Way::Relayed(hop)) => tunnel.set_hop(Some(hop)),
            None => {}
        }
        for (way, probe) in round.probes {
            let carrier = match way {
                Way::Direct(endpoint) => Some(crate::forward::Carrier::direct(endpoint)),
                Way::Relayed(hop) => self.forwarder.carrier_by(hop),
            };
            // Not marked as sent: a probe must not keep an idle tunnel alive.
            if let Some(carrier) = carrier
                && let Some(request) = seal(&tunnel, MessageType::TestRequest, &probe.request())
            {
                self.outbox.datagram_by(&carrier, request);
            }
        }
    }

    /// Answers a probe by the path that it came by.
    pub(in crate::node) fn answer_probe(&mut self, tunnel: &Tunnel, from: Origin, probe: PathProbe) {
        if from.endpoint().is_some_and(|at| !self.config.may_be_at(&tunnel.peer_addresses, at)) {
            return;
        }
        let goes_first =
            self.config.identity.networks().first().map(ipnet::IpNet::addr) < tunnel.peer_addresses.first().copied();
        let choice = self.tunnels.get_mut(tunnel.local_index).and_then(|live| live.choice.as_mut());
        let leads = choice.is_some_and(|choice| {
            choice.note_foreign();
            goes_first && choice.leads(self.now)
        });
        let missing = tunnel.session.received.replay.missing(u64::from(probe.span).min(super::MAX_SPAN));
        let body = probe.reply(leads, u16::try_from(missing).unwrap_or(u16::MAX));
        if self.may_answer(tunnel, from, body.len())
            && let Some(reply) = seal(tunnel, MessageType::TestReply, &body)
        {
            self.outbox.answer(self.hops, from, reply);
        }
    }

    /// A probe came back. Returns what became of the datagrams that the relay in use was given, if the peer tells.
    pub(in crate::node) fn handle_measured(
        &mut self,
        tunnel: &Tunnel,
        from: Origin,
        reply: PathReply,
    ) -> Option<(LocalIndex, Load)> {
        let came_by = match from {
            Origin::Direct(at) => Some(Way::Direct(at)),
            Origin::Relayed { hop, .. } => self.hops.entries.get(hop).and_then(Entry::hop).map(Way::Relayed),
        };
        let choice = self.tunnels.get_mut(tunnel.local_index)?.choice.as_mut()?;
        let load = match came_by {
            Some(Way::Relayed(hop)) if came_by == Some(choice.current()) => {
                choice.load_of(reply).map(|load| (hop.tunnel, load))
            }
            _ => None,
        };
        if choice.answered(self.now, reply, came_by) {
            self.timer.set(Due::PathChoice(tunnel.local_index), self.now);
        }
        load
    }

    /// What became of the datagrams before a probe of the peer that a relay was given, as far as this node knows.
    pub(in crate::node) fn load_before(
        &self,
        tunnel: &Tunnel,
        from: Origin,
        probe: PathProbe,
    ) -> Option<(LocalIndex, Load)> {
        let Origin::Relayed { hop, .. } = from else { return None };
        let relay = self.hops.entries.get(hop).and_then(Entry::hop)?.tunnel;
        let sent = u64::from(probe.span).min(super::MAX_SPAN);
        // A few of them may be probes that the peer sent by other relays.
        (sent >= MIN_FOREIGN_LOAD)
            .then(|| (relay, Load { sent, missing: tunnel.session.received.replay.missing(sent) }))
    }

    /// A peer owes an answer: has it tried elsewhere a little later, if it may be elsewhere.
    pub(in crate::node) fn expect_answer(&mut self, tunnel: &Tunnel) {
        if self.elsewhere(tunnel).next().is_some() {
            self.timer.set_on_grid(Due::Elsewhere(tunnel.local_index), self.now + ANSWER_WITHIN);
        }
    }

    /// Tests other endpoints of a peer that has not answered yet: the best one, or all if none was measured. A peer
    /// that gets the request answers from there, which moves the tunnel; this includes Go Nebula. Does nothing if the
    /// peer chooses the path.
    pub(in crate::node) fn elsewhere_due(&mut self, index: LocalIndex) {
        let Some(live) = self.tunnels.get(index) else { return };
        let tunnel = Arc::clone(&live.tunnel);
        if !live.liveness.is_awaiting() || tunnel.was_heard() {
            return;
        }
        let choice = live.choice.as_ref();
        if choice.is_some_and(|choice| choice.is_led(self.now)) {
            return;
        }
        let endpoints: Vec<_> = match choice.and_then(|choice| choice.best_other()) {
            Some(Way::Direct(endpoint)) => vec![endpoint],
            _ => self.elsewhere(&tunnel).collect(),
        };
        for endpoint in endpoints {
            self.try_endpoint(&tunnel, endpoint);
        }
    }

    /// Where the peer of a direct tunnel may be, apart from where it is.
    fn elsewhere(&self, tunnel: &Tunnel) -> impl Iterator<Item = SocketAddr> + use<> {
        let current = tunnel.endpoint();
        let known = if current.is_some() { self.endpoints(tunnel) } else { Vec::new() };
        known.into_iter().filter(move |at| Some(*at) != current)
    }

    /// Whether the paths of a tunnel are measured. Go Nebula before 1.10 is not probed: it does not return a body
    /// intact.
    fn measures(&self, tunnel: &Tunnel) -> bool {
        self.config.measure_paths && !self.config.lighthouse.am_lighthouse && tunnel.answers_long_tests
    }

    /// The paths that a tunnel may use: direct ones as long as there is one, and relays otherwise.
    fn candidates(&self, tunnel: &Tunnel, current: Way) -> Vec<Candidate> {
        let Way::Direct(present) = current else { return self.relay_candidates(tunnel) };
        let mut candidates = Vec::new();
        for endpoint in std::iter::once(present).chain(self.endpoints(tunnel)) {
            let way = Way::Direct(endpoint);
            if candidates.iter().all(|known: &Candidate| known.way != way) {
                candidates.push(Candidate { way, is_preferred: self.config.is_preferred(endpoint), lot: 0 });
            }
        }
        candidates
    }

    fn relay_candidates(&self, tunnel: &Tunnel) -> Vec<Candidate> {
        let (mut candidates, mut relays) = (Vec::new(), Vec::new());
        for hop in self.hops.usable_to(tunnel) {
            let Some(relay) = self.forwarder.tunnels().by_index(hop.tunnel) else { continue };
            let Some(&relay) = relay.peer_addresses.first() else { continue };
            // Another hop of the same relay is one of an older tunnel.
            if !relays.contains(&relay) {
                relays.push(relay);
                let lot = lot(self.config, &tunnel.peer_addresses, relay);
                candidates.push(Candidate { way: Way::Relayed(hop), is_preferred: false, lot });
            }
        }
        candidates
    }

    /// Where the peer may be, by all its addresses.
    fn endpoints(&self, tunnel: &Tunnel) -> Vec<SocketAddr> {
        let addresses = tunnel.peer_addresses.iter();
        let known = addresses.flat_map(|address| self.config.endpoints_of(*address, self.lighthouse));
        known.filter(|at| self.config.may_be_at(&tunnel.peer_addresses, *at)).collect()
    }
}

/// A number that both ends of a tunnel compute alike, and that is different for each relay: the largest wins.
pub(in crate::node) fn lot(config: &Config, peer: &[IpAddr], relay: IpAddr) -> u64 {
    let own = config.identity.networks().first().map(ipnet::IpNet::addr);
    let mut ends: Vec<_> = own.into_iter().chain(peer.first().copied()).collect();
    ends.sort_unstable();
    ends.into_iter().chain([relay]).fold(0, scramble_address)
}

fn way_of(tunnel: &Tunnel) -> Option<Way> {
    tunnel.endpoint().map(Way::Direct).or_else(|| tunnel.hop().map(Way::Relayed))
}

/// Datagrams of a peer that say something about the relay that they came by.
const MIN_FOREIGN_LOAD: u64 = 16;
/// How long the answer to a test request may take before it is tried elsewhere.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
