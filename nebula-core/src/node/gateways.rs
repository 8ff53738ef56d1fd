//! The gateways of subnet routes with several gateways: which of them take flows.
//!
//! What lanes send and receive is seen by the counters of the tunnels, which costs the packet path nothing.

mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;

pub use self::watch::GatewayState;
use self::watch::{Seen, Step, TICK, Watch};
use super::Node;
use super::timer::Due;
use crate::config::Gateway;
use crate::forward::Health;
use crate::tunnel::Tunnel;
use crate::wire::header::MessageType;
use crate::{Event, Origin, Punt, TunnelDownReason};

/// The gateways that can stand in for each other.
#[derive(Debug, Default)]
pub(super) struct Gateways {
    watched: BTreeMap<IpAddr, Watched>,
    /// The gateways of each route with several, without repeats.
    groups: Vec<Vec<IpAddr>>,
    /// When moved flows that are over are forgotten next.
    expire_at: Option<Instant>,
}

#[derive(Debug)]
struct Watched {
    watch: Watch,
    health: Arc<Health>,
    /// Those of `groups` that it is in.
    groups: Vec<usize>,
}

impl Gateways {
    /// The gateways of routes with several gateways are these now. What is known of those that stay is kept.
    fn set(&mut self, now: Instant, groups: BTreeSet<Vec<IpAddr>>, health: BTreeMap<IpAddr, Arc<Health>>) {
        let mut old = std::mem::take(&mut self.watched);
        self.groups = groups.into_iter().collect();
        for (address, health) in health {
            let watch = old.remove(&address).map_or_else(|| Watch::new(now), |known| known.watch);
            health.set_alive(watch.state().takes_flows());
            self.watched.insert(address, Watched { watch, health, groups: Vec::new() });
        }
        for (number, group) in self.groups.iter().enumerate() {
            for address in group {
                if let Some(watched) = self.watched.get_mut(address) {
                    watched.groups.push(number);
                }
            }
        }
    }

    fn state(&self, address: IpAddr) -> Option<GatewayState> {
        Some(self.watched.get(&address)?.watch.state())
    }

    /// Whether every route of this gateway has another one that answers.
    fn is_spare(&self, address: IpAddr) -> bool {
        let Some(watched) = self.watched.get(&address) else { return false };
        let answers = |other: &IpAddr| *other != address && self.state(*other) == Some(GatewayState::Healthy);
        watched.groups.iter().all(|group| self.groups[*group].iter().any(answers))
    }

    /// Gateways that may take the flows of this one.
    fn heirs(&self, address: IpAddr) -> BTreeSet<IpAddr> {
        let groups = self.watched.get(&address).map_or(&[][..], |watched| &watched.groups);
        let others = groups.iter().flat_map(|group| &self.groups[*group]).copied();
        others.filter(|other| *other != address && self.state(*other) == Some(GatewayState::Untried)).collect()
    }
}

/// A gateway of a subnet route, as reported to operators and programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GatewayStatus {
    /// The network behind it.
    pub network: IpNet,
    /// Its overlay address, weight and priority.
    pub gateway: Gateway,
    /// Whether it takes flows. The only gateway of a route always does, and is untried or healthy.
    pub state: GatewayState,
    /// How long it has been in that state; `None` for the only gateway of a route.
    pub lasts: Option<Duration>,
}

impl Node {
    /// The routes changed, or the node starts.
    pub(super) fn apply_gateways(&mut self, now: Instant) {
        let shared = self.config.subnets.iter().filter(|route| route.gateways.len() > 1);
        let mut groups = BTreeSet::new();
        groups.extend(shared.map(|route| route.gateways.iter().map(|gateway| gateway.address).collect()));
        self.gateways.set(now, groups, self.forwarder.shared_gateways());
        if self.gateways.watched.is_empty() {
            self.timer.cancel(Due::Gateways);
        } else {
            self.timer.set(Due::Gateways, now + TICK);
        }
    }

    /// Looks at every gateway, and probes those that are silent.
    pub(super) fn look_at_gateways(&mut self, now: Instant) {
        let addresses: Vec<_> = self.gateways.watched.keys().copied().collect();
        for address in addresses {
            self.look_at_gateway(now, address);
        }
        if self.gateways.expire_at.is_none_or(|at| now >= at) {
            self.forwarder.expire_moved_flows();
            self.gateways.expire_at = Some(now + EXPIRE_INTERVAL);
        }
        match self.gateways.watched.values().any(|watched| watched.watch.is_busy()) {
            true => self.timer.set(Due::Gateways, now + TICK),
            false => self.timer.set_on_grid(Due::Gateways, now + IDLE_INTERVAL),
        }
    }

    fn look_at_gateway(&mut self, now: Instant, address: IpAddr) {
        let tunnel = self.forwarder.tunnels().by_address(address);
        let counters = |tunnel: &Arc<Tunnel>| {
            let session = &tunnel.session;
            (tunnel.local_index, session.next_counter(), session.received.replay.highest())
        };
        let seen = Seen {
            tunnel: tunnel.as_ref().map(counters),
            handshaking: self.pending.contains(address),
            is_spare: self.gateways.is_spare(address),
        };
        let Some(watched) = self.gateways.watched.get_mut(&address) else { return };
        let before = (watched.watch.state(), watched.watch.since());
        let step = watched.watch.look(now, seen);
        self.publish_gateway(now, address, before);
        match (step, tunnel) {
            (Step::Probe, Some(tunnel)) => {
                self.outbox.message(&tunnel, MessageType::TestRequest, &[]);
                if let Some(watched) = self.gateways.watched.get_mut(&address) {
                    watched.watch.note_sent(tunnel.session.next_counter());
                }
                // Its flows should not have to wait for a handshake as well.
                for heir in self.gateways.heirs(address) {
                    self.connect(now, heir);
                }
            }
            (Step::Connect, _) => self.connect(now, address),
            _ => {}
        }
    }

    /// A probe or its answer came. By another path than the one in use it does not show that a gateway can be
    /// reached: flows need not wait until the tunnel moves to that path.
    pub(super) fn note_gateway_by(&mut self, tunnel: &Tunnel, from: Origin) {
        if self.gateways.watched.is_empty() || self.hops.is_path_to(tunnel, from) {
            return;
        }
        for address in &tunnel.peer_addresses {
            if let Some(watched) = self.gateways.watched.get_mut(address) {
                watched.watch.note_received(tunnel.local_index, tunnel.session.received.replay.highest());
            }
        }
    }

    /// The last tunnel to a peer ended.
    pub(super) fn note_gateway_down(&mut self, now: Instant, peer: &[IpAddr], reason: TunnelDownReason) {
        for &address in peer {
            if let Some(watched) = self.gateways.watched.get_mut(&address) {
                let before = (watched.watch.state(), watched.watch.since());
                watched.watch.note_down(now, reason);
                self.publish_gateway(now, address, before);
            }
        }
    }

    /// Tells lanes and operators what changed about a gateway.
    fn publish_gateway(&mut self, now: Instant, address: IpAddr, (before, since): (GatewayState, Instant)) {
        let Some(watched) = self.gateways.watched.get(&address) else { return };
        let state = watched.watch.state();
        watched.health.set_alive(state.takes_flows());
        if state == before {
            return;
        }
        self.outbox.event(Event::Gateway { address, before, state, after: now.saturating_duration_since(since) });
        if state == GatewayState::Dead {
            self.send_elsewhere(now, address);
        }
    }

    /// Sends what waits for a handshake with a dead gateway by the other ones.
    fn send_elsewhere(&mut self, now: Instant, gateway: IpAddr) {
        for packet in self.pending.take_packets(gateway) {
            match self.outbox.overlay_packet(now, packet) {
                Some(Punt::NoTunnel { peer, packet }) => self.handle_no_tunnel(now, peer, packet),
                Some(Punt::PathUnexamined { tunnel, waits }) => self.paths(now).examine(tunnel, waits),
                _ => {}
            }
        }
    }

    /// The gateways of subnet routes, in the order of the configuration: no more than about `limit`, so that only whole
    /// routes are reported.
    #[must_use]
    pub fn gateways(&self, limit: usize) -> Vec<GatewayStatus> {
        let mut found = Vec::new();
        for route in &self.config.subnets {
            if found.len() >= limit {
                break;
            }
            found.extend(route.gateways.iter().map(|gateway| self.gateway_status(route.network, *gateway)));
        }
        found
    }

    fn gateway_status(&self, network: IpNet, gateway: Gateway) -> GatewayStatus {
        let watch = self.gateways.watched.get(&gateway.address).map(|watched| &watched.watch);
        let has_tunnel = || self.forwarder.tunnels().by_address(gateway.address).is_some();
        let unwatched = || if has_tunnel() { GatewayState::Healthy } else { GatewayState::Untried };
        GatewayStatus {
            network,
            gateway,
            state: watch.map_or_else(unwatched, Watch::state),
            lasts: watch.map(|watch| self.now.saturating_duration_since(watch.since())),
        }
    }
}

/// Time between two looks while nothing is sent to any gateway.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);
/// A moved flow may occupy its entry for so long after its end.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(30);
