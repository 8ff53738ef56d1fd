//! Read-only views of a running node, for operators, metrics and tests.

mod status;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::Certificate;

pub use self::status::{FlowTrace, Outcome, PendingStatus, RelayState, RelayStatus, TableSizes, TunnelStatus};
use super::Node;
use super::tunnels::Live;
use crate::DropReason;
use crate::counters::Direction;
use crate::diagnosis::{Diagnosis, PeerClock};
use crate::forward::{Capture, Route};
use crate::index::LocalIndex;
use crate::lighthouse::{KnownEndpoints, Place};
use crate::tunnel::{PathState, Tunnel};
use crate::wire::ip::FlowKey;

/// What is known about where a peer is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Whereabouts {
    /// Endpoints that would be tried, best first; those that only an answer to the last query names come last.
    pub endpoints: Vec<SocketAddr>,
    /// Relays through which the peer can be reached.
    pub relays: Vec<IpAddr>,
    /// Answers to the last query, by lighthouse.
    pub answers: BTreeMap<IpAddr, KnownEndpoints>,
    /// Lighthouses that are asked.
    pub lighthouses: Vec<IpAddr>,
    /// Lighthouses that this node has a tunnel to.
    pub connected: Vec<IpAddr>,
    /// Lighthouses heard since the last query. One that does not know the peer does not answer the query.
    pub heard: Vec<IpAddr>,
    /// What the peer reported to this node, if this is a lighthouse.
    pub reported: Option<KnownEndpoints>,
    /// A handshake with the peer is in progress.
    pub pending: bool,
}

impl Node {
    fn tunnel_status(&self, live: &Live) -> TunnelStatus {
        let tunnel = &live.tunnel;
        let name = tunnel.peer.name();
        let is_own = self.own_name().eq_ignore_ascii_case(name);
        let holds = |address: &IpAddr| self.names.holds(self.now, name, *address);
        TunnelStatus {
            peer: tunnel.peer_addresses.clone(),
            name: name.to_owned(),
            holds_name: !is_own && tunnel.peer_addresses.first().is_some_and(holds),
            endpoint: tunnel.endpoint(),
            relay: self.forwarder.relay_of(tunnel),
            path_mtu: live.path_mtu.known().filter(|_| tunnel.path_limit.state() != PathState::Unexamined),
            local_index: tunnel.local_index,
            remote_index: tunnel.remote_index,
            message_counter: tunnel.session.next_counter(),
            received_counter: tunnel.session.received.replay.highest(),
            bytes_sent: tunnel.session.bytes_sent(),
            bytes_received: tunnel.session.bytes_received(),
            version: tunnel.peer.version(),
            paths: self.path_statuses(live),
            path_reason: live.choice.as_ref().map(|choice| choice.reason()),
            post_quantum: tunnel.post_quantum,
            initiator: tunnel.initiator,
            primary: self.forwarder.tunnels().is_primary(tunnel),
            handshake: live.took,
        }
    }

    /// The name in this node's own certificate.
    #[must_use]
    pub fn own_name(&self) -> &str {
        self.config.identity.primary().name()
    }

    /// This node's own certificate; of several, the primary one.
    #[must_use]
    pub fn own_certificate(&self) -> &Certificate {
        self.config.identity.primary()
    }

    /// Live tunnels, ordered by peer address.
    #[must_use]
    pub fn tunnels(&self) -> Vec<TunnelStatus> {
        let mut live: Vec<_> = self.tunnels.iter().collect();
        live.sort_unstable_by(|a, b| {
            let (a, b) = (&a.tunnel, &b.tunnel);
            (&a.peer_addresses, a.local_index).cmp(&(&b.peer_addresses, b.local_index))
        });
        live.into_iter().map(|live| self.tunnel_status(live)).collect()
    }

    /// Handshakes that this node answered and whose callers have not proved yet that they hold the keys.
    #[must_use]
    pub fn half_open(&self) -> Vec<LocalIndex> {
        self.half_open.iter().map(|answered| *answered.local_index).collect()
    }

    /// Handshakes this node started, by peer.
    #[must_use]
    pub fn pending_handshakes(&self) -> Vec<PendingStatus> {
        let status = |(peer, local_index)| PendingStatus {
            peer,
            local_index,
            endpoints: self.config.endpoints_of(peer, &self.lighthouse),
        };
        self.pending.indexes().map(status).collect()
    }

    /// Peers about whose location something is known: the first `limit` in order of address.
    #[must_use]
    pub fn known_peers(&self, limit: usize) -> Vec<IpAddr> {
        let tunnels = self.tunnels.iter().flat_map(|live| live.tunnel.peer_addresses.iter().copied());
        let configured = self.config.static_hosts.keys().copied();
        let known: BTreeSet<_> =
            tunnels.chain(configured).chain(self.lighthouse.peers()).chain(self.server.subjects()).collect();
        known.into_iter().take(limit).collect()
    }

    /// Where `peer` is, as reported by each source: a lighthouse, the peer itself, or this node's configuration.
    #[must_use]
    pub fn sources(&self, peer: IpAddr) -> BTreeMap<IpAddr, KnownEndpoints> {
        let mut sources = self.lighthouse.sources(peer, &self.config.endpoint_rules(&[peer]));
        for (lighthouse, answer) in self.lighthouse.answers(peer) {
            sources.entry(lighthouse).or_insert(answer);
        }
        let fixed = self.config.fixed_endpoints_of(peer);
        if let Some(own) = self.config.identity.networks().first().filter(|_| !fixed.is_empty()) {
            sources.entry(own.addr()).or_default().reported.extend_from_slice(&fixed);
        }
        let tunnel = self.forwarder.tunnels().by_address(peer);
        let first = tunnel.as_ref().and_then(|tunnel| tunnel.peer_addresses.first().copied()).unwrap_or(peer);
        if let Some(report) = self.server.report(peer) {
            let own = sources.entry(first).or_default();
            own.reported.extend(report.reported);
            own.relays.extend(report.relays);
        }
        if let Some(endpoint) = tunnel.and_then(|tunnel| tunnel.endpoint()) {
            sources.entry(first).or_default().learnt = vec![endpoint];
        }
        sources
    }

    /// Every hop this node is part of, by own index.
    #[must_use]
    pub fn relays(&self) -> Vec<RelayStatus> {
        self.hops.entries.iter().filter_map(|entry| RelayStatus::new(entry, &self.forwarder)).collect()
    }

    /// What is known about where `peer` is.
    #[must_use]
    pub fn whereabouts(&self, peer: IpAddr) -> Whereabouts {
        let heard = self.lighthouses_heard();
        let answers = self.lighthouse.answers(peer);
        let mut relays = self.lighthouse.relays(peer);
        relays.extend(answers.values().flat_map(|answer| &answer.relays));
        Whereabouts {
            heard: self.lighthouse.heard_since(peer, &heard),
            connected: heard.into_keys().collect(),
            endpoints: self.candidate_endpoints(peer, &answers),
            relays: relays.into_iter().collect(),
            answers,
            lighthouses: if self.config.has_lighthouses() { self.config.lighthouse.hosts.clone() } else { Vec::new() },
            reported: self.server.report(peer),
            pending: self.pending.contains(peer),
        }
    }

    /// Where `peer` may be, best first. A handshake that is given up forgets the candidates; the answers to a query of
    /// the operator are kept longer, and come last.
    pub(super) fn candidate_endpoints(
        &self,
        peer: IpAddr,
        answers: &BTreeMap<IpAddr, KnownEndpoints>,
    ) -> Vec<SocketAddr> {
        let mut endpoints = self.config.endpoints_of(peer, &self.lighthouse);
        if self.config.keeps_to_relays(&[peer]) {
            return endpoints;
        }
        for (lighthouse, answer) in answers {
            let tunnel = self.forwarder.tunnels().by_address(*lighthouse);
            let from = Place::of(tunnel.and_then(|tunnel| tunnel.endpoint()));
            let screened = self.config.endpoint_rules(&[peer]).screen(answer.reported.clone(), from);
            for endpoint in screened.believed {
                if !endpoints.contains(&endpoint) && !self.lighthouse.is_refused(peer, endpoint) {
                    endpoints.push(endpoint);
                }
            }
        }
        endpoints
    }

    /// The lighthouses that this node has a tunnel to, with the highest counter received from each.
    pub(super) fn lighthouses_heard(&self) -> BTreeMap<IpAddr, u64> {
        let mut heard = BTreeMap::new();
        for lighthouse in &self.config.lighthouse.hosts {
            if let Some(tunnel) = self.forwarder.tunnels().by_address(*lighthouse) {
                heard.insert(*lighthouse, tunnel.session.received.replay.highest());
            }
        }
        heard
    }

    /// The overlay address of the host with this name in its certificate, also if it is gone or was refused. Of a
    /// refused one the name is only what it claims.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<IpAddr> {
        let live = self.tunnels.iter().find(|live| live.tunnel.peer.name().eq_ignore_ascii_case(name));
        let live = live.and_then(|live| live.tunnel.peer_addresses.first().copied());
        live.or_else(|| self.names.gone(name)).or_else(|| self.journal.claimed(name))
    }

    /// What went wrong recently.
    #[must_use]
    pub fn diagnosis(&self, now: Instant) -> Diagnosis {
        let mut diagnosis = self.journal.diagnosis();
        for dropped in diagnosis.drops.iter_mut().filter(|dropped| dropped.reason == DropReason::NoRule) {
            dropped.nearest =
                self.trace(now, dropped.direction, &dropped.flow).firewall.and_then(|firewall| firewall.nearest);
        }
        // The monotonic clock stops while the host sleeps, so readings from before a clock step cannot be compared.
        let step = diagnosis.clock_step.map(|(at, _)| at);
        let comparable = |live: &&Live| live.tunnel.peer_time > 0 && step.is_none_or(|step| live.since >= step);
        let clocks = self.tunnels.iter().filter(comparable).filter_map(|live| {
            let peer = *live.tunnel.peer_addresses.first()?;
            // The time that this clock, as it is set now, would have shown then.
            let ours = self.wall.unix_at(live.since);
            Some(PeerClock::new(peer, Duration::from_nanos(live.tunnel.peer_time), ours))
        });
        diagnosis.clocks = clocks.take(MAX_CLOCKS).collect();
        diagnosis
    }

    /// Peers with which a handshake that this node started is in progress.
    #[must_use]
    pub fn handshaking(&self) -> Vec<IpAddr> {
        self.pending.peers()
    }

    /// The present sizes of the tables.
    #[must_use]
    pub fn table_sizes(&self) -> TableSizes {
        TableSizes {
            tunnels: self.tunnels.iter().count(),
            inherited: self.inheritance.as_ref().map_or(0, |inheritance| inheritance.len()),
            primaries: self.forwarder.tunnels().primaries(),
            lookups: self.tunnels.lookups(),
            half_open: self.half_open.len(),
            pending: self.pending.len(),
            validations: self.validations.len(),
            waiting_bytes: self.pending.waiting_bytes() + self.validations.held_bytes(),
            reserved: self.forwarder.tunnels().reserved(),
            candidates: self.lighthouse.len(),
            reports: self.server.len(),
            punches: self.punches.len(),
            relay_hops: self.forwarder.relays().len(),
            deadlines: self.timer.len(),
            flows: self.forwarder.flows(),
            translated: self.forwarder.translated_flows(),
        }
    }

    /// What would happen to a packet of `flow` in `direction`. Nothing is sent, and no state changes.
    #[must_use]
    pub fn trace(&self, now: Instant, direction: Direction, flow: &FlowKey) -> FlowTrace {
        let is_outbound = direction == Direction::Outbound;
        let capture = if is_outbound { self.forwarder.explain_capture(now, flow) } else { None };
        let back = if is_outbound { None } else { self.forwarder.explain_back(flow) };
        let flow = match &capture {
            Some(Capture::Translated(wire)) => wire,
            _ => flow,
        };
        let route = self.forwarder.explain_route(flow);
        let tunnel = self.carrier_of(direction, flow, route.as_ref().ok());
        let firewall = tunnel
            .as_ref()
            .map(|tunnel| self.forwarder.explain_firewall(now, direction, flow, tunnel, &self.config.firewall));
        let outcome = match (&capture, &route, &firewall) {
            (Some(Capture::ToSelf), ..) => Outcome::ComesBack,
            (Some(Capture::Clear), ..) => Outcome::Bypasses,
            (Some(Capture::Unknown), ..) => Outcome::WaitsForDirectory,
            (Some(Capture::Refused), ..) => Outcome::Dropped(DropReason::Refused),
            (_, Err(reason), _) if is_outbound => Outcome::Dropped(*reason),
            (_, _, Some(firewall)) => firewall.verdict().map_or_else(Outcome::Dropped, |()| Outcome::Passes),
            (_, _, None) => Outcome::WaitsForTunnel,
        };
        let rules = match direction {
            Direction::Inbound => &self.config.firewall.inbound,
            Direction::Outbound => &self.config.firewall.outbound,
        };
        let rule = firewall.as_ref().and_then(|firewall| rules.get(firewall.rule?)).cloned();
        let live = tunnel.and_then(|tunnel| self.tunnels.get(tunnel.local_index));
        FlowTrace {
            direction,
            capture,
            back,
            route,
            tunnel: live.map(|live| self.tunnel_status(live)),
            firewall,
            rule,
            outcome,
        }
    }

    /// The tunnel to the route's peer or to another of its gateways. An inbound packet without such a tunnel gets
    /// that of a peer whose certificate covers its source.
    pub(in crate::node) fn carrier_of(
        &self,
        direction: Direction,
        flow: &FlowKey,
        route: Option<&Route>,
    ) -> Option<Arc<Tunnel>> {
        let by_route = route.and_then(|route| {
            let mut gateways = std::iter::once(&route.peer).chain(&route.others);
            gateways.find_map(|peer| self.forwarder.tunnels().by_address(*peer))
        });
        by_route.or_else(|| {
            let senders = self.tunnels.iter().map(|live| &live.tunnel).filter(|tunnel| may_send(tunnel, flow.remote));
            senders.filter(|_| direction == Direction::Inbound).min_by_key(|tunnel| tunnel.local_index).map(Arc::clone)
        })
    }
}

// Enough to tell whose clock is wrong.
const MAX_CLOCKS: usize = 64;

fn may_send(tunnel: &Tunnel, source: IpAddr) -> bool {
    let unsafe_networks = tunnel.peer.unsafe_networks();
    tunnel.peer_addresses.contains(&source) || unsafe_networks.iter().any(|network| network.contains(&source))
}
