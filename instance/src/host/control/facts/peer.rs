//! What is known about one peer, and about who calls.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use ipnet::IpNet;
use nebula_core::RelayState;
use nebula_core::TunnelStatus;
use nebula_core::diagnosis::{Attempt, Diagnosis, Refusal, Unheard};
use nebula_linux::errno;

use super::{Clocks, Found, Sources, kernel_route, system_text, tunnel_with, validity};
use crate::host::control::answer::{self, texts};
use crate::host::documents::{self, Endpoint, PeerFacts, PeerTunnel, Probe, RelayHop, RelayTunnel};

impl Sources<'_> {
    pub(super) fn peer(
        &self,
        peer: IpAddr,
        diagnosis: &Diagnosis,
        clocks: Clocks,
        probes: &[(SocketAddr, Found)],
    ) -> PeerFacts {
        let settings = self.settings;
        let networks: Vec<IpNet> = settings.pki.iter().flat_map(|pki| pki.identity.networks()).copied().collect();
        let (tunnels, others): (Vec<_>, Vec<_>) =
            self.handle.tunnels().into_iter().partition(|it| it.peer.contains(&peer));
        let known = self.handle.whereabouts(peer);
        let gateways = settings.tun.routes.subnets.iter().filter(|subnet| subnet.route.network.contains(&peer));
        let gateways = gateways.flat_map(|subnet| &subnet.route.gateways).map(|it| it.address);
        let attempt = diagnosis.attempts.iter().find(|attempt| attempt.peer == peer);
        let is_recent = |at: Option<Instant>| at.is_some_and(|at| clocks.ago(at) <= PROBE_SECONDS);
        let tried = || attempt.iter().flat_map(|it| &it.tried);
        let heard: Vec<_> = tried().filter(|it| is_recent(it.heard)).map(|it| it.endpoint).collect();
        let is_probed = |at: SocketAddr| tried().any(|it| it.endpoint == at && is_recent(it.probed));
        let endpoints = known.endpoints.iter().map(|endpoint| {
            let found = probes.iter().find(|(to, _)| to == endpoint).map(|(_, found)| probe(found));
            let nebula = Probe { found: documents::Found::Nebula, ..Probe::default() };
            let probe = if heard.contains(endpoint) { Some(nebula) } else { found };
            self.endpoint(*endpoint, &networks, probe)
        });
        let hops = self.handle.relays().into_iter().filter(|hop| !hop.forwarding && hop.far == peer);
        let caller = diagnosis.unheard.iter().find(|caller| caller.peer == peer);
        let relays = known
            .relays
            .iter()
            .map(|relay| RelayTunnel { relay: relay.to_string(), connected: tunnel_with(&others, *relay).is_some() });
        PeerFacts {
            peer: peer.to_string(),
            in_overlay: networks.iter().any(|network| network.contains(&peer)),
            own_address: networks.iter().any(|network| network.addr() == peer),
            gateways: texts(gateways),
            gateway_states: self.gateway_states(),
            configured: settings.static_hosts.entries.contains_key(&peer),
            connected: !tunnels.is_empty(),
            tunnels: tunnels.iter().map(|tunnel| self.peer_tunnel(tunnel, clocks)).collect(),
            endpoints: endpoints.collect(),
            known: answer::known(peer, &known),
            unheard: caller.and_then(|caller| {
                let udp_passes = is_probed(caller.from).then(|| heard.contains(&caller.from));
                Some(documents::Unheard { udp_passes, ..unheard(caller, clocks)? })
            }),
            relay_states: relays.collect(),
            attempt: attempt.map(|attempt| told_attempt(attempt, clocks)),
            relay_hops: hops
                .map(|hop| RelayHop {
                    relay: hop.neighbour.to_string(),
                    established: hop.state == RelayState::Established,
                })
                .collect(),
            kernel_route: (!settings.tun.disabled).then(|| kernel_route(peer, self.device, 0)),
        }
    }

    fn peer_tunnel(&self, tunnel: &TunnelStatus, clocks: Clocks) -> PeerTunnel {
        let certificate = self.handle.certificate(tunnel.local_index);
        PeerTunnel {
            tunnel: answer::tunnel(tunnel),
            certificate: certificate.as_ref().map(|it| validity(it, clocks.unix)),
            groups: certificate.map(|it| it.groups().to_vec()),
        }
    }

    fn endpoint(&self, endpoint: SocketAddr, networks: &[IpNet], probe: Option<Probe>) -> Endpoint {
        Endpoint {
            endpoint: endpoint.to_string(),
            route: kernel_route(endpoint.ip(), self.device, self.settings.listen.so_mark),
            inside_overlay: networks.iter().any(|network| network.contains(&endpoint.ip())),
            probe,
        }
    }
}

fn probe(found: &Found) -> Probe {
    match found {
        Found::Nebula => Probe { found: documents::Found::NebulaToOtherPort, ..Probe::default() },
        Found::Silence => Probe { found: documents::Found::Silence, ..Probe::default() },
        Found::Refused(code) => Probe {
            found: documents::Found::Refused,
            errno: Some(errno::symbol(*code)),
            text: Some(system_text(*code)),
        },
    }
}

pub(super) fn refusal(refusal: &Refusal, clocks: Clocks) -> documents::Refusal {
    let ahead = refusal.claimed.as_ref().filter(|claimed| !claimed.clock.is_zero()).map(|claimed| {
        let then = clocks.unix - i64::try_from(clocks.ago(refusal.at)).unwrap_or_default();
        i64::try_from(claimed.clock.as_secs()).unwrap_or(i64::MAX) - then
    });
    documents::Refusal {
        from: refusal.from.to_string(),
        reason: refusal.reason.name().to_owned(),
        text: refusal.text.clone(),
        name: refusal.claimed.as_ref().map(|claimed| claimed.name.clone()),
        addresses: texts(refusal.claimed.iter().flat_map(|claimed| &claimed.addresses)),
        clock_ahead_seconds: ahead,
        times: refusal.times,
        seconds_ago: clocks.ago(refusal.at),
    }
}

/// A caller that goes on calling although this host answers; one message may get lost anywhere.
pub(super) fn unheard(caller: &Unheard, clocks: Clocks) -> Option<documents::Unheard> {
    let ago = clocks.ago(caller.last);
    (caller.repeats >= MIN_REPEATS && ago < RECENT_SECONDS).then(|| documents::Unheard {
        peer: caller.peer.to_string(),
        name: caller.name.clone(),
        from: caller.from.to_string(),
        repeats: caller.repeats,
        seconds_ago: ago,
        udp_passes: None,
    })
}

fn told_attempt(attempt: &Attempt, clocks: Clocks) -> documents::Attempt {
    let tried = attempt.tried.iter().map(|tried| documents::Tried {
        endpoint: tried.endpoint.to_string(),
        sent: tried.sent,
        unopened: tried.unopened,
        offers: tried.offers,
        errno: tried.error.map(|code| if code == 0 { "EAFNOSUPPORT".to_owned() } else { errno::symbol(code) }),
    });
    documents::Attempt {
        since_seconds: clocks.ago(attempt.since),
        seconds_ago: clocks.ago(attempt.last),
        pending: attempt.pending,
        given_up: attempt.given_up,
        tried: tried.collect(),
        refusal: attempt.refusal.as_ref().map(|last| refusal(last, clocks)),
    }
}

const PROBE_SECONDS: u64 = 5;
const MIN_REPEATS: u32 = 3;
const RECENT_SECONDS: u64 = 600;
