//! Makes and keeps the tunnels to chosen relays, and measures them. As a lighthouse: offers relays.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use rand_chacha::rand_core::RngCore as _;

use super::{OfferedRelay, RelayChoice, Standing};
use crate::config::Config;
use crate::index::{LocalIndex, RelayIndex};
use crate::node::Node;
use crate::node::path_choice::Load;
use crate::node::timer::Due;
use crate::relay::{HopKey, Kind};
use crate::tunnel::{Tunnel, addresses_of};
use crate::wire::header::MessageType;
use crate::wire::path_probe::PathProbe;
use crate::{Origin, TunnelDownReason};

impl Node {
    /// The node starts, or settings changed.
    pub(in crate::node) fn apply_relay_choice(&mut self, now: Instant) {
        self.offers.clear();
        let members: Vec<_> = self.tunnels.iter().map(|live| Arc::clone(&live.tunnel)).collect();
        members.iter().for_each(|tunnel| self.note_offered(tunnel));
        let own = self.config.identity.primary();
        if self.config.relay.am_relay && self.config.is_group_relay(own.groups()) {
            self.offers.add(&addresses_of(own));
        }
        if !self.config.chooses_relays() {
            self.timer.cancel(Due::RelayChoice);
            self.relay_choice = None;
            return;
        }
        let Some(own) = self.config.identity.networks().first().map(ipnet::IpNet::addr) else { return };
        let seed = self.rng.next_u64();
        let choice = self.relay_choice.get_or_insert_with(|| Box::new(RelayChoice::new(now, own, seed)));
        choice.set_lighthouses(now, &self.config.lighthouse.hosts);
        choice.in_use().for_each(|relay| self.config.relay.note_used(relay));
        self.timer.set(Due::RelayChoice, now);
    }

    /// A lighthouse offers these relays.
    pub(in crate::node) fn relays_offered(&mut self, now: Instant, lighthouse: &Tunnel, relays: &[IpAddr]) {
        let Some(choice) = &mut self.relay_choice else { return };
        let named = lighthouse.peer_addresses.iter().find(|address| self.config.is_lighthouse(**address));
        let Some(&lighthouse) = named else { return };
        let others: Vec<_> = relays.iter().copied().filter(|relay| !self.config.is_own_address(*relay)).collect();
        let is_news = others.iter().any(|relay| !choice.knows(*relay));
        choice.offered(now, lighthouse, &others);
        if is_news {
            self.timer.set_on_grid(Due::RelayChoice, now);
        }
    }

    /// A tunnel came up or ended.
    pub(in crate::node) fn note_relay_standing(&mut self, now: Instant, peer: &[IpAddr]) {
        if self.relay_choice.as_ref().is_some_and(|choice| peer.iter().any(|address| choice.uses(*address))) {
            self.timer.set(Due::RelayChoice, now);
        }
    }

    /// As a lighthouse: remembers a host that may be offered as a relay.
    pub(in crate::node) fn note_offered(&mut self, tunnel: &Tunnel) {
        if self.config.lighthouse.am_lighthouse && self.config.is_group_relay(tunnel.peer.groups()) {
            self.offers.add(&tunnel.peer_addresses);
        }
    }

    /// As a lighthouse: the last tunnel to a host is gone.
    pub(in crate::node) fn forget_offered(&mut self, peer: &[IpAddr]) {
        self.offers.remove(peer);
    }

    /// A round is due.
    pub(in crate::node) fn choose_relays(&mut self, now: Instant) {
        let Some(mut choice) = self.relay_choice.take() else { return };
        let standing = |relay: IpAddr| {
            let tunnel = self.forwarder.tunnels().by_address(relay)?;
            let is_member = self.config.is_group_relay(tunnel.peer.groups());
            Some(Standing { is_direct: tunnel.is_direct(), is_member })
        };
        let round = choice.round(now, standing);
        for relay in round.call {
            self.config.relay.note_used(relay);
            self.start_handshake(now, relay, None);
        }
        for relay in round.request {
            if !self.request_test_hop(now, relay) {
                // The lighthouse itself, which offers itself only if it relays.
                choice.served(relay);
            }
        }
        for (relay, number) in round.probe {
            if let Some(tunnel) = self.forwarder.tunnels().by_address(relay) {
                let probe = PathProbe::of_relay(number);
                let body = if tunnel.answers_long_tests { probe.request() } else { Vec::new() };
                // As a test of the tunnel it also finds out that the relay is gone.
                self.outbox.message(&tunnel, MessageType::TestRequest, &body);
            }
        }
        self.relay_choice = Some(choice);
        for relay in round.release {
            self.release_relay(relay);
        }
        if let Some(at) = round.tell_at.filter(|_| self.config.has_lighthouses()) {
            self.timer.set_sooner(Due::LighthouseUpdate, at);
        }
        if let Some(next) = round.next {
            self.timer.set_on_grid(Due::RelayChoice, next);
        }
    }

    /// Requests a hop to a lighthouse, which shows whether the relay relays. Returns `false` if there is no other
    /// lighthouse to test it with.
    fn request_test_hop(&mut self, now: Instant, relay: IpAddr) -> bool {
        let Some(tunnel) = self.forwarder.tunnels().by_address(relay) else { return true };
        let lighthouses = self.config.lighthouse.hosts.iter().copied();
        let mut others = lighthouses.filter(|lighthouse| !tunnel.peer_addresses.contains(lighthouse));
        // One that this node knows to be up.
        let far = others.clone().find(|lighthouse| self.forwarder.tunnels().by_address(*lighthouse).is_some());
        let Some(far) = far.or_else(|| others.next()) else { return false };
        let key = HopKey { tunnel: tunnel.local_index, kind: Kind::Terminal, far };
        self.relaying(now).request(key, tunnel.peer.version(), far);
        true
    }

    /// A relay answered a request of this node. If that was a test, the hop is not needed.
    pub(in crate::node) fn note_relay_serves(&mut self, tunnel: &Tunnel, hop: RelayIndex) {
        let Some(choice) = &mut self.relay_choice else { return };
        let Some(entry) = self.hops.entries.get(hop).filter(|entry| entry.key.kind == Kind::Terminal) else { return };
        let is_test = self.config.is_lighthouse(entry.key.far);
        for address in &tunnel.peer_addresses {
            choice.served(*address);
        }
        if is_test && let Some(entry) = self.hops.entries.remove(hop) {
            self.hops.retire(&entry, &tunnel.peer_addresses, &self.tunnels);
        }
        self.timer.set_on_grid(Due::RelayChoice, self.now);
    }

    /// A peer shows what became of datagrams in `tunnel` that the relay behind this other tunnel was given.
    pub(in crate::node) fn note_carried(&mut self, now: Instant, tunnel: &Tunnel, load: Option<(LocalIndex, Load)>) {
        let (Some(choice), Some((relay, load))) = (&mut self.relay_choice, load) else { return };
        let Some(relay) = self.forwarder.tunnels().by_index(relay) else { return };
        let Some(&peer) = tunnel.peer_addresses.first() else { return };
        if relay.peer_addresses.iter().any(|address| choice.note_carried(now, *address, peer, load)) {
            self.timer.set_on_grid(Due::RelayChoice, now);
        }
    }

    /// A peer answered the probe of a relay. Returns whether it was awaited from there.
    pub(in crate::node) fn note_relay_answer(
        &mut self,
        now: Instant,
        tunnel: &Tunnel,
        from: Origin,
        number: u32,
    ) -> bool {
        let Some(choice) = self.relay_choice.as_mut().filter(|_| from.endpoint().is_some()) else { return false };
        tunnel.peer_addresses.iter().any(|relay| choice.answered(now, *relay, number))
    }

    /// A peer answered a test request that had no number. If the peer cannot return one, that may be the probe of a
    /// relay; it may also be another test, so the answer counts as one to that, too.
    pub(in crate::node) fn note_relay_alive(&mut self, now: Instant, tunnel: &Tunnel, from: Origin) {
        let Some(choice) = self.relay_choice.as_mut().filter(|_| from.endpoint().is_some()) else { return };
        if !tunnel.answers_long_tests {
            tunnel.peer_addresses.iter().any(|relay| choice.answered_any(now, *relay));
        }
    }

    /// Closes the tunnel to a relay that was only measured, unless it carries something else.
    fn release_relay(&mut self, relay: IpAddr) {
        let Some(tunnel) = self.forwarder.tunnels().by_address(relay) else { return };
        let addresses = &tunnel.peer_addresses;
        let is_wanted = |address: &IpAddr| {
            self.config.relay.relays.contains(address)
                || self.config.is_lighthouse(*address)
                || self.config.keep.peers.contains(address)
        };
        let is_busy = tunnel.session.next_counter().max(tunnel.session.received.replay.highest()) > MAX_SURVEY_MESSAGES
            || self.hops.entries.of_tunnel(tunnel.local_index).any(|hop| !self.config.is_lighthouse(hop.key.far))
            || self.tunnels.of_peer(relay).len() > 1
            || tunnel.peer.groups().iter().any(|group| self.config.keep.groups.contains(group));
        if !is_busy && !addresses.iter().any(is_wanted) {
            self.close_tunnel(tunnel.local_index, TunnelDownReason::ClosedHere);
        }
    }

    /// The relays that lighthouses offered to this node; none without
    /// [`Relay::groups`](crate::config::Relay::groups).
    #[must_use]
    pub fn offered_relays(&self) -> Vec<OfferedRelay> {
        self.relay_choice.iter().flat_map(|choice| choice.status()).collect()
    }
}

impl Config {
    /// Whether this node chooses relays among those that lighthouses offer.
    pub(crate) fn chooses_relays(&self) -> bool {
        !self.relay.groups.is_empty() && !self.relay.am_relay && self.has_lighthouses()
    }

    /// Whether a host with these groups may be a relay.
    fn is_group_relay(&self, groups: &[String]) -> bool {
        groups.iter().any(|group| self.relay.groups.contains(group))
    }
}

/// A tunnel that carried more than a survey sends has another use.
const MAX_SURVEY_MESSAGES: u64 = 24;
