//! The node: opened with the settings, kept up to date while it runs, and reloaded.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use ipnet::IpNet;
use nebula_config::Settings;
use nebula_config::loaded::{Error, Loaded, bind_failed, listen_address};
use nebula_config::log::events;
use nebula_config::names::{self, NameWatch};
use nebula_config::reloaded::Reloaded;
use nebula_core::io::interface_addresses;
use nebula_core::lighthouse::LocalAddress;
use nebula_core::{Config, Event};
use nebula_enrolment::renewal::Renewal;
use nebula_linux::memory;
use nebula_net::Net;
use nebula_net::tcp::{Keepalive, TcpOptions};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::JoinSet;

use crate::kept::Kept;
use crate::overlay::Overlay;

/// A peer that is gone takes a place among the connections until it is noticed.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// How often the addresses of this host are looked at.
const ADDRESSES_INTERVAL: Duration = Duration::from_secs(30);
/// How long the node may take to tell its peers that it ends.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Events that wait to be logged; more are dropped.
const WAITING_EVENTS: usize = 256;

/// A node that runs with the settings that were read last.
pub(crate) struct Node {
    pub(crate) overlay: Overlay,
    path: PathBuf,
    settings: Settings,
    names: Option<NameWatch>,
    /// End with the node.
    tasks: JoinSet<()>,
}

impl Node {
    pub(crate) fn open(loaded: &Loaded, kept: &mut Kept) -> Result<Self, Error> {
        let settings = loaded.settings()?;
        report_unserved(&settings);
        let Some(pki) = &settings.pki else { return Err(start("pki is missing in the configuration")) };
        let listen = listen_address(&settings.listen)?;
        let socket = kept.underlay(listen).map_err(|error| bind_failed(&error, listen))?;
        let bound = socket.local_addr().map_err(|error| bind_failed(&error, listen))?;
        let advertise = names::resolve_once(&settings.advertise);
        let mut config = settings.to_config(pki.identity.clone(), pki.trust.clone(), bound.port(), advertise);
        config.flow_records = NO_RECORDS;
        let networks = networks(&settings);
        let mut options = TcpOptions::default();
        options.keepalive = Some(Keepalive::after(KEEPALIVE));
        let mtu = u16::try_from(settings.tun.mtu).unwrap_or(u16::MAX);
        let net = Net::builder(config).socket(socket).tcp(options).mtu(mtu).on_idle(memory::release_free_heap).start();
        let net = net.map_err(|error| start(&error.to_string()))?;
        let shown = networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let name = pki.identity.primary().name();
        tracing::info!(name, networks = shown, udpAddr = %bound, build = env!("CARGO_PKG_VERSION"), "The overlay is open");
        let mut node = Self {
            overlay: Overlay::new(net, networks),
            path: loaded.path().to_owned(),
            settings,
            names: None,
            tasks: JoinSet::new(),
        };
        node.log_events()?;
        node.follow_names()?;
        if !node.settings.am_lighthouse {
            node.tasks.spawn(advertise_addresses(node.overlay.net.clone()));
        }
        Ok(node)
    }

    /// Keeps this host enrolled, if the configuration names its enrolment (`pki.enrolment`). New files are read again
    /// by whoever receives from the other end of `reloads`, and answers whether they are in use.
    pub(crate) fn follow_enrolment(&self, reloads: mpsc::Sender<oneshot::Sender<bool>>) -> Result<(), Error> {
        let (Some(folder), Some(pki)) = (&self.settings.operation.enrolment, &self.settings.pki) else { return Ok(()) };
        let reload = move || {
            let (done, outcome) = oneshot::channel();
            reloads.blocking_send(done).is_ok() && outcome.blocking_recv().unwrap_or(false)
        };
        Renewal::start(folder, &pki.identity, Arc::default(), reload).map_err(|error| start(&error.to_string()))
    }

    /// Reads the files again, and applies what can change while the node runs. If there is any error, nothing changes.
    /// Returns whether there was none.
    pub(crate) async fn reload(&mut self) -> bool {
        let (path, current) = (self.path.clone(), self.settings.clone());
        // Reads files, and may wait for a name server.
        let read = tokio::task::spawn_blocking(move || Reloaded::read(&path, &current));
        // The reasons are in the log.
        let Ok(Ok(reloaded)) = read.await else { return false };
        let edit = reloaded.edit(&self.settings, self.names.as_ref());
        let edit = move |config: &mut Config| {
            edit(config);
            config.flow_records = NO_RECORDS;
        };
        let changed = match self.overlay.net.reconfigure(edit).await {
            Ok(changed) => changed,
            Err(error) => {
                tracing::error!(%error, "Nothing of the configuration is changed");
                return false;
            }
        };
        reloaded.report(&changed, &self.settings);
        let old = std::mem::replace(&mut self.settings, reloaded.settings);
        report_unserved(&self.settings);
        if old.tun.mtu != self.settings.tun.mtu {
            tracing::warn!(key = "tun.mtu", "The change of this setting takes effect at the next start");
        }
        self.overlay.set_networks(networks(&self.settings));
        if old.static_hosts != self.settings.static_hosts
            && let Err(error) = self.follow_names()
        {
            tracing::error!(%error, "Names in static_host_map cannot be looked up");
        }
        true
    }

    /// Logs what happens to tunnels, as `nebula` does.
    fn log_events(&mut self) -> Result<(), Error> {
        let (sender, receiver) = sync_channel::<Event>(WAITING_EVENTS);
        let work = move || events::log_until_closed(receiver);
        std::thread::Builder::new().name("events".to_owned()).spawn(work).map_err(|error| start(&error.to_string()))?;
        let mut happened = self.overlay.net.events();
        self.tasks.spawn(async move {
            loop {
                match happened.recv().await {
                    Ok(event) => drop(sender.try_send(event)),
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
                }
            }
        });
        Ok(())
    }

    /// Looks up the names in `static_host_map`.
    fn follow_names(&mut self) -> Result<(), Error> {
        let hosts = self.settings.static_hosts.clone();
        if let Some(watch) = &self.names {
            watch.replace(hosts);
        } else if hosts.has_names() {
            let (net, runtime) = (self.overlay.net.clone(), tokio::runtime::Handle::current());
            let changed = move |endpoints| {
                let net = net.clone();
                runtime.spawn(async move {
                    let change = |config: &mut Config| config.static_hosts = endpoints;
                    // An error says that the node has ended.
                    let _ = net.reconfigure(change).await;
                });
            };
            self.names = Some(NameWatch::start(hosts, changed).map_err(|error| start(&error.to_string()))?);
        }
        Ok(())
    }

    /// Closes all connections, and lets the node tell its peers.
    pub(crate) async fn end(self) {
        let Self { overlay, names, mut tasks, .. } = self;
        drop(names);
        tasks.shutdown().await;
        overlay.net.close();
        // A datagram may be lost anyway.
        let _ = tokio::time::timeout(END_TIMEOUT, overlay.net.closed()).await;
    }
}

/// What kept the program from starting.
pub(crate) fn start(cause: &str) -> Error {
    Error::Start { message: "Failed to start nebula-proxy", cause: cause.to_owned() }
}

/// The networks that belong to the overlay.
fn networks(settings: &Settings) -> Vec<IpNet> {
    let own = settings.pki.iter().flat_map(|pki| pki.identity.networks().iter().copied());
    own.chain(settings.tun.routes.subnet_routes().iter().map(|subnet| subnet.network)).collect()
}

/// Tells lighthouses the addresses of this host, and again when they change.
async fn advertise_addresses(net: Net) {
    let mut known: Vec<LocalAddress> = Vec::new();
    loop {
        match interface_addresses() {
            Ok(addresses) if addresses != known => {
                known.clone_from(&addresses);
                // An error says that the node has ended.
                let _ = net.control(move |node| node.set_local_addresses(addresses)).await;
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "Cannot list the addresses of this host"),
        }
        tokio::time::sleep(ADDRESSES_INTERVAL).await;
    }
}

/// Names the sections of the configuration that only the daemon obeys.
/// Nobody could ask this program for records of flows.
const NO_RECORDS: usize = 0;

fn report_unserved(settings: &Settings) {
    let sections = [
        ("stats", settings.stats.is_some()),
        ("lighthouse.serve_dns", settings.dns.is_some()),
        ("resolver", settings.resolver.is_some()),
        ("daemon.whois_socket", settings.operation.whois.is_some()),
    ];
    let unserved: Vec<_> = sections.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect();
    if !unserved.is_empty() {
        tracing::warn!(keys = unserved.join(" "), "nebula-proxy does not serve these keys; the nebula daemon does");
    }
}
