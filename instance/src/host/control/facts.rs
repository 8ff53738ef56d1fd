//! The facts behind `doctor` and `why`, as JSON: about the node, the kernel and the configuration on disk. The program
//! that shows them draws the conclusions.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nebula_cert::{Certificate, UnixTime};
use nebula_core::counters::Direction;
use nebula_core::diagnosis::{Attempt, Diagnosis, Dropped, Refusal, Tried, Unheard};
use nebula_core::io::Handle;
use nebula_core::{RelayState, TunnelStatus};
use serde_json::{Value, json};

use super::answer::{self, direction, nearest, texts};
use super::probe::{Found, Underlay, probe};
use crate::config::Settings;
use crate::host::dns::Registered;
use crate::linux::{errno, kernel_view};
use crate::overlay::lan;
use crate::overlay::link::kernel_has_v6;

/// Where the facts come from.
pub(super) struct Sources<'a> {
    pub(super) handle: &'a Handle,
    pub(super) settings: &'a Settings,
    /// Name of the device.
    pub(super) device: &'a str,
    pub(super) udp: SocketAddr,
    /// How the overlay's names are registered with the host's resolver.
    pub(super) names: Option<Arc<Registered>>,
    pub(super) now: UnixTime,
}

/// This node's wall clock and monotonic clock, read at the same moment.
#[derive(Clone, Copy)]
struct Clocks {
    now: Instant,
    unix: UnixTime,
}

impl Clocks {
    fn ago(self, at: Instant) -> u64 {
        self.now.saturating_duration_since(at).as_secs()
    }
}

impl Sources<'_> {
    /// Everything known about this host, and about every peer whose handshake is in progress or has failed.
    pub(super) fn everything(&self) -> Value {
        let Some((now, diagnosis)) = self.handle.diagnosis() else { return Value::Null };
        let clocks = Clocks { now, unix: self.now };
        let peers: BTreeSet<_> = diagnosis.attempts.iter().map(|attempt| attempt.peer).collect();
        let peers: Vec<_> =
            peers.into_iter().take(MAX_PEERS).map(|peer| self.peer(peer, &diagnosis, clocks, &[])).collect();
        self.document(&diagnosis, clocks, peers)
    }

    /// What is known already about why there is no tunnel with these hosts. Nothing is sent.
    pub(super) fn known_about(&self, peers: impl Iterator<Item = IpAddr>) -> Value {
        let Some((now, diagnosis)) = self.handle.diagnosis() else { return Value::Null };
        let clocks = Clocks { now, unix: self.now };
        let told = peers.take(MAX_PEERS).map(|peer| self.peer(peer, &diagnosis, clocks, &[])).collect();
        self.document(&diagnosis, clocks, told)
    }

    /// Everything known about one peer. If there is no tunnel, starts a handshake and sends a probe datagram to each
    /// known endpoint.
    pub(super) fn about(&self, peer: IpAddr) -> Value {
        let reachable = || self.handle.tunnels().iter().any(|tunnel| tunnel.peer.contains(&peer));
        let networks = self.settings.pki.iter().flat_map(|pki| pki.identity.networks());
        let in_overlay = networks.clone().any(|own| own.contains(&peer) && own.addr() != peer);
        if in_overlay {
            self.handle.inquire(peer);
        }
        if in_overlay && !reachable() {
            self.handle.connect(peer);
        }
        let mut known = self.handle.whereabouts(peer);
        for _ in 0..MAX_POLLS {
            let asked = known.lighthouses.iter().all(|it| known.answers.contains_key(it) || known.heard.contains(it));
            if !in_overlay || asked && (reachable() || !known.pending) {
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
            known = self.handle.whereabouts(peer);
        }
        let probes = if reachable() { Vec::new() } else { self.probe(peer, &known.endpoints) };
        let Some((now, diagnosis)) = self.handle.diagnosis() else { return Value::Null };
        let clocks = Clocks { now, unix: self.now };
        let told = self.peer(peer, &diagnosis, clocks, &probes);
        self.document(&diagnosis, clocks, vec![told])
    }

    /// Probes the endpoints of a peer: by the node's own port, which shows whether UDP passes where handshakes have to,
    /// and by another one, to which the kernel reports what the way refuses.
    fn probe(&self, peer: IpAddr, endpoints: &[SocketAddr]) -> Vec<(SocketAddr, Found)> {
        self.handle.probe(peer);
        let probes = probe(self.underlay(), endpoints);
        // The second one is for those that were lost.
        self.handle.probe(peer);
        std::thread::sleep(PROBE_ANSWER_WITHIN);
        probes
    }

    fn underlay(&self) -> Underlay {
        Underlay { address: self.udp.ip(), mark: self.settings.listen.so_mark }
    }

    fn document(&self, diagnosis: &Diagnosis, clocks: Clocks, peers: Vec<Value>) -> Value {
        let tunnels = self.handle.tunnels();
        json!({
            "host": self.host(diagnosis, clocks, &tunnels),
            "peers": peers,
            "callers": diagnosis.callers.iter().map(|caller| refusal(caller, clocks)).collect::<Value>(),
            "unheard": diagnosis.unheard.iter().filter_map(|caller| unheard(caller, clocks)).collect::<Value>(),
            "sends": diagnosis.sends.iter().map(|failure| json!({
                "to": failure.to.to_string(),
                "errno": failure.errno.map(errno::symbol),
                "text": failure.errno.map(system_text),
                "times": failure.times,
                "seconds_ago": clocks.ago(failure.last),
            })).collect::<Value>(),
            "drops": diagnosis.drops.iter().map(|it| self.dropped(it, clocks, &tunnels)).collect::<Value>(),
            "doubles": diagnosis.doubles.iter().map(|double| json!({
                "peer": double.peer.to_string(),
                "turns": double.turns,
                "names": double.names,
                "seconds_ago": clocks.ago(double.last),
                "endpoints": texts(double.seen.iter().map(|(_, at)| *at)),
            })).collect::<Value>(),
            "same_names": same_names(self.settings, &tunnels),
            "relays_refused": diagnosis.relays.iter().map(|refused| json!({
                "from": refused.from.to_string(),
                "to": refused.to.to_string(),
                "am_relay": refused.am_relay,
                "seconds_ago": clocks.ago(refused.last),
            })).collect::<Value>(),
            "clocks": diagnosis.clocks.iter().map(|clock| json!({
                "peer": clock.peer.to_string(),
                "ahead_ms": clock.ahead_ms,
                "lighthouse": self.settings.lighthouses.contains(&clock.peer),
            })).collect::<Value>(),
            "unsafe_routes": self.unsafe_routes(&tunnels),
            "paths": self.paths(&tunnels),
        })
    }

    fn host(&self, diagnosis: &Diagnosis, clocks: Clocks, tunnels: &[TunnelStatus]) -> Value {
        let settings = self.settings;
        let identity = settings.pki.as_ref().map(|pki| &pki.identity);
        let own = identity.map(|identity| identity.primary());
        let networks: Vec<IpNet> = identity.map(|identity| identity.networks().to_vec()).unwrap_or_default();
        let issuer = own.and_then(Certificate::issuer);
        let cas = settings.pki.iter().flat_map(|pki| pki.trust.certificates());
        let cas = cas.map(|ca| {
            let mut told = validity(ca, clocks.unix);
            told["own"] = (Some(ca.fingerprint()) == issuer).into();
            told
        });
        let lighthouses = settings.lighthouses.iter().map(|lighthouse| {
            let known = self.handle.whereabouts(*lighthouse);
            json!({
                "address": lighthouse.to_string(),
                "connected": tunnels.iter().any(|tunnel| tunnel.peer.contains(lighthouse)),
                "own_address": networks.iter().any(|own| own.addr() == *lighthouse),
                "configured": settings.static_hosts.entries.contains_key(lighthouse),
                "endpoints": texts(&known.endpoints),
            })
        });
        let link = (!settings.tun.disabled).then(|| link(self.device));
        json!({
            "name": own.map(|own| own.name()),
            "networks": texts(&networks),
            "groups": own.map(|own| own.groups()),
            "device": self.device,
            "udp": self.udp.to_string(),
            "certificate": own.map(|own| validity(own, clocks.unix)),
            "cas": cas.collect::<Value>(),
            "am_lighthouse": settings.am_lighthouse,
            "am_relay": settings.relay.am_relay,
            "use_relays": settings.relay.use_relays,
            "relay_force": settings.relay.force,
            "relay_groups": settings.relay.groups,
            "relays": answer::offered_relays(&self.handle.offered_relays()),
            "lighthouses": lighthouses.collect::<Value>(),
            "link": link,
            "mtu": {
                "tun": settings.tun.mtu,
                "device": settings.tun.device_mtu(),
                "discovery": settings.tun.discovers_path_mtu,
            },
            "routes": if settings.tun.disabled { json!([]) } else { self.routes(&networks) },
            "routes_replaced": if settings.tun.disabled { json!([]) } else { self.routes_replaced() },
            "names": self.names.as_deref().map(names),
            "clock_step": diagnosis.clock_step.map(|(at, by_ms)| json!({
                "seconds_ago": clocks.ago(at), "by_ms": by_ms,
            })),
        })
    }

    /// For each overlay network and unsafe route, reports whether the kernel routes it to the device.
    fn routes(&self, networks: &[IpNet]) -> Value {
        let own = networks.iter().filter(|net| net.prefix_len() < net.max_prefix_len()).map(|net| net.trunc());
        let subnets = &self.settings.tun.routes.subnets;
        let subnets = subnets.iter().filter(|subnet| subnet.install).map(|subnet| subnet.route.network);
        let wanted: Vec<_> = own.map(|net| (net, false)).chain(subnets.map(|net| (net, true))).collect();
        let told = wanted.iter().take(MAX_ROUTES).map(|(network, unsafe_route)| {
            let own: Vec<_> = networks.iter().map(IpNet::addr).collect();
            let mut told = kernel_route(inside(*network, &own), self.device, 0);
            told["network"] = network.to_string().into();
            told["unsafe_route"] = (*unsafe_route).into();
            told
        });
        told.collect()
    }

    fn routes_replaced(&self) -> Value {
        let replaced = lan::replaced(&self.settings.tun, self.device).unwrap_or_default();
        let told = replaced.iter().take(MAX_ROUTES).map(
            |it| json!({"route": it.route.to_string(), "network": it.network.to_string(), "interface": it.interface}),
        );
        told.collect()
    }

    fn peer(&self, peer: IpAddr, diagnosis: &Diagnosis, clocks: Clocks, probes: &[(SocketAddr, Found)]) -> Value {
        let settings = self.settings;
        let networks: Vec<IpNet> = settings.pki.iter().flat_map(|pki| pki.identity.networks()).copied().collect();
        let tunnels = self.handle.tunnels();
        let (tunnels, others): (Vec<_>, Vec<_>) = tunnels.into_iter().partition(|it| it.peer.contains(&peer));
        let known = self.handle.whereabouts(peer);
        let gateways = settings.tun.routes.subnets.iter().filter(|subnet| subnet.route.network.contains(&peer));
        let gateways: Vec<_> = gateways.flat_map(|subnet| &subnet.route.gateways).map(|it| it.address).collect();
        let attempt = diagnosis.attempts.iter().find(|attempt| attempt.peer == peer);
        let is_heard = |tried: &&Tried| tried.heard.is_some_and(|heard| clocks.ago(heard) <= PROBE_SECONDS);
        let heard: Vec<_> = attempt.iter().flat_map(|it| &it.tried).filter(is_heard).map(|it| it.endpoint).collect();
        let endpoints = known.endpoints.iter().map(|endpoint| {
            let mut told = self.endpoint(*endpoint, &networks, probes);
            if heard.contains(endpoint) {
                told["probe"] = json!({"found": "nebula"});
            }
            told
        });
        let hops = self.handle.relays().into_iter().filter(|hop| !hop.forwarding && hop.far == peer);
        let unheard = diagnosis.unheard.iter().find(|caller| caller.peer == peer);
        let relays = known.relays.iter().map(|relay| {
            let is_there = others.iter().any(|tunnel| tunnel.peer.contains(relay));
            json!({"relay": relay.to_string(), "connected": is_there})
        });
        let told_tunnels = tunnels.iter().map(|tunnel| {
            let mut told = answer::tunnel(tunnel);
            let certificate = self.handle.certificate(tunnel.local_index);
            told["certificate"] = certificate.map_or(Value::Null, |it| validity(&it, clocks.unix));
            told["groups"] = self.handle.certificate(tunnel.local_index).map_or(Value::Null, |it| json!(it.groups()));
            told
        });
        json!({
            "peer": peer.to_string(),
            "in_overlay": networks.iter().any(|network| network.contains(&peer)),
            "own_address": networks.iter().any(|network| network.addr() == peer),
            "gateways": texts(&gateways),
            "gateway_states": self.gateway_states(),
            "configured": settings.static_hosts.entries.contains_key(&peer),
            "connected": !tunnels.is_empty(),
            "tunnels": told_tunnels.collect::<Value>(),
            "endpoints": endpoints.collect::<Value>(),
            "known": answer::whereabouts(peer, &known),
            "unheard": unheard.and_then(|caller| {
                let mut told = self::unheard(caller, clocks)?;
                told["udp_passes"] = heard.contains(&caller.from).into();
                Some(told)
            }),
            "relay_states": relays.collect::<Value>(),
            "attempt": attempt.map(|attempt| told_attempt(attempt, clocks)),
            "relay_hops": hops.map(|hop| json!({
                "relay": hop.neighbour.to_string(),
                "established": hop.state == RelayState::Established,
            })).collect::<Value>(),
            "kernel_route": if settings.tun.disabled { Value::Null } else { kernel_route(peer, self.device, 0) },
        })
    }

    fn endpoint(&self, endpoint: SocketAddr, networks: &[IpNet], probes: &[(SocketAddr, Found)]) -> Value {
        let mut told = kernel_route(endpoint.ip(), self.device, self.settings.listen.so_mark);
        told["endpoint"] = endpoint.to_string().into();
        told["inside_overlay"] = networks.iter().any(|network| network.contains(&endpoint.ip())).into();
        let found = probes.iter().find(|(to, _)| *to == endpoint).map(|(_, found)| match found {
            Found::Nebula => json!({"found": "nebula_to_other_port"}),
            Found::Silence => json!({"found": "silence"}),
            Found::Refused(code) => {
                json!({"found": "refused", "errno": errno::symbol(*code), "text": system_text(*code)})
            }
        });
        told["probe"] = found.unwrap_or_default();
        told
    }

    fn dropped(&self, dropped: &Dropped, clocks: Clocks, tunnels: &[TunnelStatus]) -> Value {
        let flow = &dropped.flow;
        let trace = self.handle.trace(dropped.direction, *flow);
        let tunnel = trace.as_ref().and_then(|trace| trace.tunnel.as_ref());
        let by_peer = || tunnels.iter().find(|tunnel| dropped.peer.is_some_and(|peer| tunnel.peer.contains(&peer)));
        let tunnel = tunnel.or_else(by_peer);
        let certificate = tunnel.and_then(|tunnel| self.handle.certificate(tunnel.local_index));
        let nearest =
            dropped.nearest.as_ref().and_then(|near| nearest(&self.settings.firewall, dropped.direction, near));
        json!({
            "direction": direction(dropped.direction),
            "reason": dropped.reason.name(),
            "protocol": flow.protocol,
            "local": flow.local.to_string(),
            "remote": flow.remote.to_string(),
            "port": match dropped.direction {
                Direction::Inbound => flow.local_port,
                Direction::Outbound => flow.remote_port,
            },
            "peer": tunnel.and_then(|tunnel| tunnel.peer.first()).map(ToString::to_string),
            "peer_name": tunnel.map(|tunnel| &tunnel.name),
            "peer_groups": certificate.as_ref().map(|certificate| certificate.groups()),
            "times": dropped.times,
            "seconds_ago": clocks.ago(dropped.last),
            "nearest": nearest,
        })
    }

    /// For each unsafe route, reports whether the certificates of its gateways cover the network.
    fn unsafe_routes(&self, tunnels: &[TunnelStatus]) -> Value {
        let states = self.gateway_states();
        let told = self.settings.tun.routes.subnets.iter().take(MAX_ROUTES).map(|subnet| {
            let network = subnet.route.network;
            let is_shared = subnet.route.gateways.len() > 1;
            let gateways = subnet.route.gateways.iter().map(|gateway| {
                let tunnel = tunnels.iter().find(|tunnel| tunnel.peer.contains(&gateway.address));
                let certificate = tunnel.and_then(|tunnel| self.handle.certificate(tunnel.local_index));
                json!({
                    "address": gateway.address.to_string(),
                    "name": tunnel.map(|tunnel| &tunnel.name),
                    "connected": tunnel.is_some(),
                    "state": if is_shared { states[gateway.address.to_string()].clone() } else { Value::Null },
                    "covered": certificate.map(|it| it.unsafe_networks().iter().any(|net| net.contains(&network))),
                })
            });
            json!({"network": network.to_string(), "gateways": gateways.collect::<Value>()})
        });
        told.collect()
    }

    /// State of each gateway by its address.
    fn gateway_states(&self) -> Value {
        let all = self.handle.gateways(MAX_ROUTES);
        let told = all.iter().map(|status| (status.gateway.address.to_string(), status.state.name().into()));
        Value::Object(told.collect())
    }

    /// The underlay route of each live tunnel, with its MTU and the tunnel's overhead.
    fn paths(&self, tunnels: &[TunnelStatus]) -> Value {
        let carried =
            tunnels.iter().filter(|tunnel| tunnel.primary).filter_map(|tunnel| Some((tunnel, tunnel.endpoint?)));
        let told = carried.take(MAX_PEERS).map(|(tunnel, endpoint)| {
            let mut told = kernel_route(endpoint.ip(), self.device, self.settings.listen.so_mark);
            told["endpoint"] = endpoint.to_string().into();
            told["peer"] = tunnel.peer.first().map(ToString::to_string).into();
            told["overhead"] = if endpoint.is_ipv4() { OVERHEAD_V4 } else { OVERHEAD_V6 }.into();
            told
        });
        told.collect()
    }
}

fn refusal(refusal: &Refusal, clocks: Clocks) -> Value {
    let ahead = refusal.claimed.as_ref().filter(|claimed| !claimed.clock.is_zero()).map(|claimed| {
        let then = clocks.unix - i64::try_from(clocks.ago(refusal.at)).unwrap_or_default();
        i64::try_from(claimed.clock.as_secs()).unwrap_or(i64::MAX) - then
    });
    json!({
        "from": refusal.from.to_string(),
        "reason": refusal.reason.name(),
        "text": refusal.text,
        "name": refusal.claimed.as_ref().map(|claimed| &claimed.name),
        "addresses": texts(refusal.claimed.iter().flat_map(|claimed| &claimed.addresses)),
        "clock_ahead_seconds": ahead,
        "times": refusal.times,
        "seconds_ago": clocks.ago(refusal.at),
    })
}

/// A caller that goes on calling although this host answers; one message may get lost anywhere.
fn unheard(caller: &Unheard, clocks: Clocks) -> Option<Value> {
    let ago = clocks.ago(caller.last);
    (caller.repeats >= MIN_REPEATS && ago < RECENT_SECONDS).then(|| {
        json!({
            "peer": caller.peer.to_string(),
            "name": caller.name,
            "from": caller.from.to_string(),
            "repeats": caller.repeats,
            "seconds_ago": ago,
        })
    })
}

fn told_attempt(attempt: &Attempt, clocks: Clocks) -> Value {
    let tried = attempt.tried.iter().map(|tried| {
        json!({
            "endpoint": tried.endpoint.to_string(),
            "sent": tried.sent,
            "unopened": tried.unopened,
            "errno": tried.error.map(|code| if code == 0 { "EAFNOSUPPORT".to_owned() } else { errno::symbol(code) }),
        })
    });
    json!({
        "since_seconds": clocks.ago(attempt.since),
        "seconds_ago": clocks.ago(attempt.last),
        "pending": attempt.pending,
        "given_up": attempt.given_up,
        "tried": tried.collect::<Value>(),
        "refusal": attempt.refusal.as_ref().map(|last| refusal(last, clocks)),
    })
}

fn validity(certificate: &Certificate, now: UnixTime) -> Value {
    json!({
        "name": certificate.name(),
        "version": certificate.version().number(),
        "fingerprint": certificate.fingerprint().to_string(),
        "seconds_left": certificate.not_after() - now,
        "begins_in_seconds": (certificate.not_before() - now).max(0),
        "lifetime_seconds": certificate.not_after() - certificate.not_before(),
    })
}

fn names(registered: &Registered) -> Value {
    let told = registered.told();
    json!({
        "domain": registered.registration().domain(),
        "server": registered.registration().server().to_string(),
        "told": told.as_ref().and_then(|told| told.as_ref().ok()),
        "error": told.as_ref().and_then(|told| told.as_ref().err()),
    })
}

/// Peers whose names stand for another host.
fn same_names(settings: &Settings, tunnels: &[TunnelStatus]) -> Value {
    let own = settings.pki.as_ref().map_or("", |pki| pki.identity.primary().name());
    let primary = || tunnels.iter().filter(|tunnel| tunnel.primary);
    let told = primary().filter(|tunnel| !tunnel.holds_name).take(MAX_PEERS).map(|tunnel| {
        let is_same = |other: &&TunnelStatus| other.name.eq_ignore_ascii_case(&tunnel.name);
        let holder = primary().filter(is_same).find(|other| other.holds_name);
        json!({
            "name": tunnel.name,
            "peer": tunnel.peer.first().map(ToString::to_string),
            "own_name": own.eq_ignore_ascii_case(&tunnel.name),
            "holder": holder.and_then(|holder| holder.peer.first()).map(ToString::to_string),
        })
    });
    told.collect()
}

fn link(device: &str) -> Value {
    match kernel_view::link(device) {
        Ok(link) => json!({
            "present": true,
            "up": link.up,
            "mtu": link.mtu,
            "addresses": texts(&link.addresses),
            "ipv6_off": !kernel_has_v6(device),
        }),
        Err(_) => json!({"present": false}),
    }
}

/// The kernel's route for a packet to `destination`; `device` is the overlay device.
pub(super) fn kernel_route(destination: IpAddr, device: &str, mark: u32) -> Value {
    match kernel_view::route_to(destination, mark) {
        Ok(taken) => json!({
            "to_overlay": taken.device.as_deref() == Some(device),
            "local": taken.local,
            "device": taken.device,
            "mtu": taken.mtu,
        }),
        Err(error) => json!({
            "to_overlay": false,
            "errno": error.raw_os_error().map(errno::symbol),
            "text": errno::text(&error),
        }),
    }
}

fn system_text(code: i32) -> String {
    errno::text(&std::io::Error::from_raw_os_error(code))
}

/// Picks an address of the network that does not belong to this host.
fn inside(network: IpNet, own: &[IpAddr]) -> IpAddr {
    network.hosts().take(4).find(|address| !own.contains(address)).unwrap_or_else(|| network.addr())
}

// Each item costs several requests to the kernel and to the control thread.
const MAX_PEERS: usize = 32;
const MAX_ROUTES: usize = 64;
// IP and UDP headers, the Nebula header, and the AEAD tag.
const OVERHEAD_V4: u32 = 20 + 8 + 16 + 16;
const OVERHEAD_V6: u32 = 40 + 8 + 16 + 16;
// Longer than the round trip of most paths.
const PROBE_ANSWER_WITHIN: Duration = Duration::from_millis(300);
const PROBE_SECONDS: u64 = 5;
const MIN_REPEATS: u32 = 3;
const RECENT_SECONDS: u64 = 600;
const POLL_INTERVAL: Duration = Duration::from_millis(50);
// Three seconds: most handshakes succeed or fail within that time.
const MAX_POLLS: u32 = 60;
