//! Answers requests by querying or changing the running node.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nebula_cert::{UnixTime, Version};
use nebula_config::Settings;
use nebula_config::log;
use nebula_core::TunnelStatus;
use nebula_core::counters::Direction;
use nebula_core::io::Handle;
use nebula_enrolment::renewal_health::RenewalHealth;
use nebula_linux::clock::{now, unix_now};
use nebula_linux::{kernel_view, notify};
use serde::Serialize;
use serde_json::{Value, json};

use super::answer::{self, texts};
use super::facts::{self, Sources};
use super::flow::Flow;
use super::refusal::Refusal;
use super::request::{self, Request};
use crate::flow_records;
use crate::host::dns::Registered;
use crate::host::documents::{
    self, Certificates, Closed, Configuration, Gateways, Identity, Known, LastReload, Level, Lighthouse, Peers, Status,
    Trace, TunnelOfPeer, Tunnels, Upgraded,
};
use crate::host::reload::Reloader;
use crate::host::unmet::Unmet;
use crate::host::upgrade::attempt::{Failure, Upgrade};
use crate::host::upgrade::program::Program;

/// Answers the requests of the control socket and the console.
#[derive(Debug)]
pub(crate) struct ControlService {
    pub(crate) handle: Handle,
    pub(crate) reloader: Arc<Mutex<Reloader>>,
    pub(crate) facts: Facts,
    pub(crate) upgrade: Arc<Upgrade>,
}

/// What is known from the start of the daemon.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) device: String,
    pub(crate) udp: SocketAddr,
    pub(crate) started: UnixTime,
    /// Whether its certificate is renewed.
    pub(crate) renewals: Arc<RenewalHealth>,
    pub(crate) unmet: Arc<Unmet>,
}

type Answered = Result<Value, Refusal>;

impl ControlService {
    /// # Errors
    /// See [`Refusal`].
    pub(crate) fn answer(&self, request: Request) -> Answered {
        match request {
            Request::Status => document(self.status()),
            Request::Peers => document(self.peers()),
            Request::Gateways => document(self.gateways()),
            Request::Tunnel { peer } => document(self.tunnel(&peer)?),
            Request::Close { peer, quietly } => document(self.close(&peer, quietly)?),
            Request::Query { peer } => document(self.query(&peer)?),
            Request::Reload => self.reload(),
            Request::Cert => document(self.certificates()?),
            Request::LogLevel(level) => {
                if let Some(level) = level {
                    log::set_level(level);
                    tracing::warn!(level = level.name(), "The log level was changed on request");
                }
                document(Level { level: log::level().name().to_owned() })
            }
            Request::Trace(flow) => document(self.trace(&flow)?),
            Request::Flows(asked) => document(flow_records::answer(&self.handle, asked, None)),
            Request::Doctor => document(self.facts(|sources| sources.everything())),
            Request::Why { peer } => document(self.why(&peer)?),
            Request::Whois { address } => document(self.whois(address)?),
            Request::Upgrade(asked) => document(self.upgrade(&asked)?),
        }
    }

    pub(crate) fn reloader(&self) -> MutexGuard<'_, Reloader> {
        self.reloader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> Status {
        // Queried before taking the lock, which a reload may hold for a long time.
        let (tunnels, sizes) = (self.handle.tunnels(), self.handle.table_sizes());
        let has_tunnel = |address: &IpAddr| tunnels.iter().any(|tunnel| tunnel.peer.contains(address));
        let reloader = self.reloader();
        let settings = reloader.settings();
        let identity = settings.pki.as_ref().map(|pki| &pki.identity);
        let own = identity.map(|identity| identity.primary());
        let lighthouses = settings.lighthouses.iter();
        let lighthouses = lighthouses.map(|it| Lighthouse { address: it.to_string(), connected: has_tunnel(it) });
        let now = unix_now();
        let needs_them = !settings.am_lighthouse && !settings.lighthouses.is_empty();
        let has_none = needs_them && !settings.lighthouses.iter().any(has_tunnel);
        let lighthouse_facts =
            has_none.then(|| self.sources(settings, None, now).known_about(|_| settings.lighthouses.clone()));
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: now - self.facts.started,
            config: reloader.path().display().to_string(),
            device: self.facts.device.clone(),
            udp: self.facts.udp.to_string(),
            name: own.map(|own| own.name().to_owned()),
            networks: texts(own.map(|own| own.networks()).unwrap_or_default()),
            groups: own.map(|own| own.groups().to_vec()),
            certificate_seconds_left: own.map(|own| own.not_after() - now),
            certificate_begins_in_seconds: own.map(|own| (own.not_before() - now).max(0)),
            am_lighthouse: settings.am_lighthouse,
            am_relay: settings.relay.am_relay,
            relay_groups: settings.relay.groups.clone(),
            relays: answer::offered_relays(&self.handle.offered_relays()),
            lighthouses: lighthouses.collect(),
            peers: sizes.primaries,
            tunnels: sizes.tunnels,
            handshaking: sizes.pending,
            flows: sizes.flows,
            log_level: log::level().name().to_owned(),
            last_reload: last_reload(&reloader),
            device_up: (!settings.tun.disabled)
                .then(|| kernel_view::link(&self.facts.device).is_ok_and(|link| link.up)),
            unmet: self.unmet(),
            lighthouse_facts,
        }
    }

    fn peers(&self) -> Peers {
        let tunnels = self.handle.tunnels();
        let primaries = tunnels.iter().filter(|tunnel| tunnel.primary);
        Peers {
            more: primaries.clone().count().saturating_sub(MAX_PEERS),
            peers: primaries.take(MAX_PEERS).map(answer::tunnel).collect(),
            handshaking: texts(self.handle.handshaking()),
        }
    }

    /// The gateways of subnet routes, those learnt from the kernel included.
    fn gateways(&self) -> Gateways {
        let flows = self.handle.flows_by_gateway();
        let gateways = self.handle.gateways(MAX_GATEWAYS);
        Gateways {
            gateways: gateways.iter().map(|status| answer::gateway(status, &flows)).collect(),
            moved_flows: self.handle.moved_flows(),
        }
    }

    fn tunnel(&self, peer: &str) -> Result<Tunnels, Refusal> {
        let (address, tunnels) = self.find(peer)?;
        if tunnels.is_empty() {
            return Err(Refusal::NoTunnel(peer.to_owned()));
        }
        let now = unix_now();
        let tunnels = tunnels.iter().map(|tunnel| TunnelOfPeer {
            tunnel: answer::tunnel(tunnel),
            certificate: self.handle.certificate(tunnel.local_index).map(|it| answer::certificate(&it, now)),
        });
        Ok(Tunnels { tunnels: tunnels.collect(), known: answer::known(address, &self.handle.whereabouts(address)) })
    }

    fn close(&self, peer: &str, quietly: bool) -> Result<Closed, Refusal> {
        let (address, _) = self.find(peer)?;
        match self.handle.close(address, quietly) {
            0 => Err(Refusal::NoTunnel(peer.to_owned())),
            closed => Ok(Closed { closed }),
        }
    }

    /// Queries the lighthouses and waits for their answers.
    fn query(&self, peer: &str) -> Result<Known, Refusal> {
        let (address, _) = self.find(peer)?;
        self.handle.inquire(address);
        for _ in 0..MAX_QUERY_POLLS {
            let known = self.handle.whereabouts(address);
            let is_heard = |it: &IpAddr| known.answers.contains_key(it) || known.heard.contains(it);
            if known.lighthouses.iter().all(is_heard) {
                break;
            }
            std::thread::sleep(QUERY_POLL_INTERVAL);
        }
        Ok(answer::known(address, &self.handle.whereabouts(address)))
    }

    fn reload(&self) -> Answered {
        tracing::info!("Asked to reload config");
        self.reloader().reload(unix_now()).map(|()| json!({ "reloaded": true })).map_err(Refusal::Reload)
    }

    fn upgrade(&self, asked: &request::Upgrade) -> Result<Upgraded, Refusal> {
        if !asked.unsupervised && !notify::is_systemd() {
            return Err(Refusal::Unsupervised);
        }
        if self.reloader().settings().operation.user.is_some() {
            return Err(Refusal::Unprivileged);
        }
        let path = asked.program.clone().map_or_else(Program::usual, Ok).map_err(Failure::from)?;
        let program = Program::open(&path, asked.sha256.as_deref()).map_err(Failure::from)?;
        Ok(self.upgrade.run(&program)?)
    }

    fn certificates(&self) -> Result<Certificates, Refusal> {
        let reloader = self.reloader();
        let pki = reloader.settings().pki.as_ref().ok_or(Refusal::NoCertificate)?;
        let now = unix_now();
        let own = [Version::V1, Version::V2].map(|version| pki.identity.certificate(version));
        let own = own.into_iter().flatten().map(|certificate| answer::certificate(certificate, now));
        let cas = pki.trust.certificates().map(|ca| answer::certificate(ca, now));
        Ok(Certificates { certificates: own.collect(), cas: cas.collect() })
    }

    fn trace(&self, flow: &Flow) -> Result<Trace, Refusal> {
        let settings = self.reloader().settings().clone();
        let pki = settings.pki.as_ref().ok_or(Refusal::NoCertificate)?;
        let own = pki.identity.primary();
        let (direction, key) = flow.seen_by(own.networks(), own.unsafe_networks())?;
        let trace = self.handle.trace(direction, key).ok_or(Refusal::Ending)?;
        let mut told = answer::trace(&trace, &settings.firewall);
        let is_own = own.networks().iter().any(|network| network.addr() == key.local);
        if direction == Direction::Outbound && is_own && !settings.tun.disabled {
            // A packet that the kernel does not send to the device never reaches the steps traced above.
            let route = facts::kernel_route(key.remote, &self.facts.device, 0);
            if !route.to_overlay && trace.route.is_ok() {
                (told.outcome, told.reason) = ("not sent".to_owned(), Some("kernel_route".to_owned()));
            }
            told.kernel_route = Some(route);
        }
        Ok(told)
    }

    /// Collects facts about why a peer cannot be reached.
    fn why(&self, peer: &str) -> Result<documents::Facts, Refusal> {
        let (address, _) = self.find(peer)?;
        Ok(self.facts(|sources| sources.about(address)))
    }

    /// The verified identity of the host with this address: packets from it come through its tunnel only.
    fn whois(&self, address: IpAddr) -> Result<Identity, Refusal> {
        let tunnels = self.handle.tunnels();
        let peer = tunnels.iter().find(|tunnel| tunnel.primary && tunnel.peer.contains(&address));
        if let Some(certificate) = peer.and_then(|peer| self.handle.certificate(peer.local_index)) {
            return Ok(answer::identity(&certificate, false));
        }
        let reloader = self.reloader();
        let own = reloader.settings().pki.as_ref().map(|pki| pki.identity.primary());
        let own = own.filter(|own| own.networks().iter().any(|network| network.addr() == address));
        own.map(|own| answer::identity(own, true)).ok_or(Refusal::Nobody(address))
    }

    fn sources<'a>(&'a self, settings: &'a Settings, names: Option<Arc<Registered>>, now: UnixTime) -> Sources<'a> {
        Sources { handle: &self.handle, settings, device: &self.facts.device, udp: self.facts.udp, names, now }
    }

    /// Collecting takes seconds, so the lock is not held meanwhile.
    fn facts(&self, collect: impl FnOnce(&Sources<'_>) -> documents::Facts) -> documents::Facts {
        let (settings, last_reload, (refused, remarks), names) = {
            let reloader = self.reloader();
            let last_reload = last_reload(&reloader);
            (reloader.settings().clone(), last_reload, reloader.on_disk(unix_now()), reloader.registered_names())
        };
        let facts = collect(&self.sources(&settings, names, unix_now()));
        documents::Facts {
            unmet: self.unmet(),
            configuration: Configuration { last_reload, refused, remarks },
            ..facts
        }
    }

    fn unmet(&self) -> documents::Unmet {
        let (unmet, now) = (&self.facts.unmet, now());
        unmet.look_at_flows(&self.handle.counters(), now);
        documents::Unmet { enrolment: self.facts.renewals.document(now), ..unmet.document(now) }
    }

    /// Finds a peer by address, or by name if it has or had a tunnel, or was refused. Returns its address and its
    /// tunnels.
    fn find(&self, peer: &str) -> Result<(IpAddr, Vec<TunnelStatus>), Refusal> {
        let mut tunnels = self.handle.tunnels();
        if let Ok(address) = peer.parse::<IpAddr>() {
            tunnels.retain(|tunnel| tunnel.peer.contains(&address));
            return Ok((address, tunnels));
        }
        tunnels.retain(|tunnel| tunnel.name == peer);
        let first = tunnels.first().and_then(|tunnel| tunnel.peer.first()).copied();
        let gone = || self.handle.named(peer.to_owned());
        let address = first.or_else(gone).ok_or_else(|| Refusal::UnknownPeer(peer.to_owned()))?;
        tunnels.retain(|tunnel| tunnel.peer.contains(&address));
        Ok((address, tunnels))
    }
}

fn last_reload(reloader: &Reloader) -> Option<LastReload> {
    reloader.last().map(|last| LastReload { at: last.at, error: last.error.clone() })
}

fn document(answer: impl Serialize) -> Answered {
    serde_json::to_value(answer).map_err(|error| Refusal::Unwritable(error.to_string()))
}

// Keeps an answer below a few MiB.
const MAX_PEERS: usize = 10_000;
const MAX_GATEWAYS: usize = 10_000;
const QUERY_POLL_INTERVAL: Duration = Duration::from_millis(50);
const MAX_QUERY_POLLS: u32 = 40;
