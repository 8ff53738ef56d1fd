//! What was sent, dropped and refused, and by which ways it goes.

use std::collections::BTreeMap;

use nebula_core::TunnelStatus;
use nebula_core::counters::Direction;
use nebula_core::diagnosis::{Double, Dropped, Elsewhere, PeerClock, RelayRefused, SendFailure};
use nebula_linux::errno;

use super::{Clocks, MAX_PEERS, MAX_ROUTES, Sources, kernel_route, system_text, tunnel_with};
use crate::host::control::answer::{direction, nearest, texts};
use crate::host::documents::{self, GatewayFacts, RoutedSubnet, UnderlayPath};

impl Sources<'_> {
    pub(super) fn dropped(&self, dropped: &Dropped, clocks: Clocks, tunnels: &[TunnelStatus]) -> documents::Drop {
        let flow = &dropped.flow;
        let trace = self.handle.trace(dropped.direction, *flow);
        let tunnel = trace.as_ref().and_then(|trace| trace.tunnel.as_ref());
        let tunnel = tunnel.or_else(|| tunnel_with(tunnels, dropped.peer?));
        let certificate = tunnel.and_then(|tunnel| self.handle.certificate(tunnel.local_index));
        let nearest =
            dropped.nearest.as_ref().and_then(|near| nearest(&self.settings.firewall, dropped.direction, near));
        documents::Drop {
            direction: direction(dropped.direction).to_owned(),
            reason: dropped.reason.name().to_owned(),
            protocol: flow.protocol,
            local: flow.local.to_string(),
            remote: flow.remote.to_string(),
            port: match dropped.direction {
                Direction::Inbound => flow.local_port,
                Direction::Outbound => flow.remote_port,
            },
            peer: tunnel.and_then(first_address),
            peer_name: tunnel
                .map(|tunnel| tunnel.name.clone())
                .or_else(|| dropped.policy.as_ref().map(|policy| policy.peer.to_string())),
            peer_groups: certificate.as_ref().map(|certificate| certificate.groups().to_vec()),
            times: dropped.times,
            seconds_ago: clocks.ago(dropped.last),
            nearest,
            policy: dropped.policy.as_ref().map(|policy| policy.reason.to_string()),
        }
    }

    /// For each unsafe route, whether the certificates of its gateways cover the network.
    pub(super) fn unsafe_routes(&self, tunnels: &[TunnelStatus]) -> Vec<RoutedSubnet> {
        let states = self.gateway_states();
        let told = self.settings.tun.routes.subnets.iter().take(MAX_ROUTES).map(|subnet| {
            let network = subnet.route.network;
            let is_shared = subnet.route.gateways.len() > 1;
            let gateways = subnet.route.gateways.iter().map(|gateway| {
                let tunnel = tunnel_with(tunnels, gateway.address);
                let certificate = tunnel.and_then(|tunnel| self.handle.certificate(tunnel.local_index));
                let address = gateway.address.to_string();
                GatewayFacts {
                    name: tunnel.map(|tunnel| tunnel.name.clone()),
                    connected: tunnel.is_some(),
                    state: states.get(&address).filter(|_| is_shared).cloned(),
                    covered: certificate.map(|it| it.unsafe_networks().iter().any(|net| net.contains(&network))),
                    address,
                }
            });
            RoutedSubnet { network: network.to_string(), gateways: gateways.collect() }
        });
        told.collect()
    }

    /// State of each gateway by its address.
    pub(super) fn gateway_states(&self) -> BTreeMap<String, String> {
        let all = self.handle.gateways(MAX_ROUTES);
        all.iter().map(|status| (status.gateway.address.to_string(), status.state.name().to_owned())).collect()
    }

    /// The underlay route of each live tunnel, with its MTU and the tunnel's overhead.
    pub(super) fn paths(&self, tunnels: &[TunnelStatus]) -> Vec<UnderlayPath> {
        let carried =
            tunnels.iter().filter(|tunnel| tunnel.primary).filter_map(|tunnel| Some((tunnel, tunnel.endpoint?)));
        let told = carried.take(MAX_PEERS).map(|(tunnel, endpoint)| UnderlayPath {
            route: kernel_route(endpoint.ip(), self.device, self.settings.listen.so_mark),
            endpoint: endpoint.to_string(),
            peer: first_address(tunnel),
            overhead: if endpoint.is_ipv4() { OVERHEAD_V4 } else { OVERHEAD_V6 },
        });
        told.collect()
    }

    /// Peers whose names stand for another host.
    pub(super) fn same_names(&self, tunnels: &[TunnelStatus]) -> Vec<documents::SameName> {
        let own = self.settings.pki.as_ref().map_or("", |pki| pki.identity.primary().name());
        let primary = || tunnels.iter().filter(|tunnel| tunnel.primary);
        let told = primary().filter(|tunnel| !tunnel.holds_name).take(MAX_PEERS).map(|tunnel| {
            let is_same = |other: &&TunnelStatus| other.name.eq_ignore_ascii_case(&tunnel.name);
            let holder = primary().filter(is_same).find(|other| other.holds_name);
            documents::SameName {
                name: tunnel.name.clone(),
                peer: first_address(tunnel),
                own_name: own.eq_ignore_ascii_case(&tunnel.name),
                holder: holder.and_then(first_address),
            }
        });
        told.collect()
    }

    pub(super) fn clock(&self, clock: &PeerClock) -> documents::Clock {
        documents::Clock {
            peer: clock.peer.to_string(),
            ahead_ms: clock.ahead_ms,
            lighthouse: self.settings.lighthouses.contains(&clock.peer),
        }
    }
}

fn first_address(tunnel: &TunnelStatus) -> Option<String> {
    tunnel.peer.first().map(ToString::to_string)
}

pub(super) fn send_failure(failure: &SendFailure, clocks: Clocks) -> documents::SendFailure {
    documents::SendFailure {
        to: failure.to.to_string(),
        errno: failure.errno.map(errno::symbol),
        text: failure.errno.map(system_text),
        times: failure.times,
        seconds_ago: clocks.ago(failure.last),
    }
}

pub(super) fn double(double: &Double, clocks: Clocks) -> documents::Double {
    documents::Double {
        peer: double.peer.to_string(),
        turns: double.turns,
        names: double.names.clone(),
        seconds_ago: clocks.ago(double.last),
        endpoints: texts(double.seen.iter().map(|(_, at)| *at)),
    }
}

pub(super) fn elsewhere(told: &Elsewhere, clocks: Clocks) -> documents::Elsewhere {
    documents::Elsewhere {
        address: told.address.to_string(),
        lighthouse: told.lighthouse.to_string(),
        endpoints: texts(&told.endpoints),
        seconds_ago: clocks.ago(told.last),
    }
}

pub(super) fn refused_relaying(refused: &RelayRefused, clocks: Clocks) -> documents::RefusedRelaying {
    documents::RefusedRelaying {
        from: refused.from.to_string(),
        to: refused.to.to_string(),
        am_relay: refused.am_relay,
        seconds_ago: clocks.ago(refused.last),
    }
}

// IP and UDP headers, the Nebula header, and the AEAD tag.
const OVERHEAD_V4: u32 = 20 + 8 + 16 + 16;
const OVERHEAD_V6: u32 = 40 + 8 + 16 + 16;
