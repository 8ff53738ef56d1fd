//! Reloads the configuration of a running node after SIGHUP; everything is checked before anything is applied.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nebula_cert::UnixTime;
use nebula_config::names::NameWatch;
use nebula_config::reloaded::{self, Reloaded, check_identity, needs_restart};
use nebula_config::report::Report;
use nebula_config::{Listen, Settings, Value};
use nebula_core::Part;
use nebula_core::io::{Handle, SocketControl};
use nebula_linux::{clock, errno};

use crate::host::account;
use crate::host::dns::{self, HostResolver, Registered, Resolving, Served};
use crate::host::file_watch::{self, Stamp};
use crate::host::listener_slot::{ListenerSlot, Missing};
use crate::host::subnets::Subnets;
use crate::host::unmet::Unmet;
use crate::metrics::{Emitter, Metrics};
use crate::overlay::lan;
use crate::overlay::link::OverlayLink;

/// Reloads a node, and holds the settings it was started or last reloaded with.
#[derive(Debug)]
pub(crate) struct Reloader {
    path: PathBuf,
    current: Settings,
    /// Some of them stay in force until the next start.
    started_with: Box<Settings>,
    handle: Handle,
    link: Link,
    names: Option<NameWatch>,
    dns: ListenerSlot<dns::Server>,
    resolver: ListenerSlot<HostResolver>,
    /// Sends metrics, if configured.
    emitter: ListenerSlot<Emitter>,
    #[cfg(feature = "ssh")]
    console: Option<crate::host::console::Console>,
    /// Certificate and key files.
    credentials: Vec<PathBuf>,
    last: Option<LastReload>,
    /// State of the files before the last reload, for who watches them.
    stamps: Option<Vec<Stamp>>,
}

/// Result of the last reload.
#[derive(Debug)]
pub(crate) struct LastReload {
    pub(crate) at: UnixTime,
    /// `None` if the reload succeeded.
    pub(crate) error: Option<String>,
}

/// The parts of a node, besides its driver, that a reload may change.
#[derive(Debug)]
pub(crate) struct Link {
    /// `None` without a device.
    pub(crate) overlay: Option<OverlayLink>,
    /// Underlay sockets.
    pub(crate) sockets: Vec<SocketControl>,
    /// Routes to networks behind other nodes.
    pub(crate) subnets: Arc<Subnets>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) unmet: Arc<Unmet>,
}

impl Reloader {
    /// Creates the reloader of a node that runs with `current`, read from `path`.
    #[must_use]
    pub(crate) fn new(path: PathBuf, tree: &Value, current: Settings, handle: Handle, link: Link) -> Self {
        let credentials = nebula_config::credential_files(tree);
        let mut reloader = Self {
            path,
            started_with: Box::new(current.clone()),
            current,
            handle,
            link,
            names: None,
            dns: ListenerSlot::new("Failed to start DNS server"),
            resolver: ListenerSlot::new("Failed to start the resolver of overlay names"),
            emitter: ListenerSlot::new("Failed to start stats emitter"),
            #[cfg(feature = "ssh")]
            console: None,
            credentials,
            last: None,
            stamps: None,
        };
        reloader.serve_stats();
        reloader.watch_names();
        reloader.serve_dns();
        reloader.serve_resolver();
        reloader.note_listeners();
        reloader
    }

    /// Attaches the SSH console, and opens it if configured.
    #[cfg(feature = "ssh")]
    pub(crate) fn attach(&mut self, mut console: crate::host::console::Console) {
        console.configure(self.current.sshd.as_ref());
        self.console = Some(console);
        self.note_listeners();
    }

    /// The settings in force.
    #[must_use]
    pub(crate) fn settings(&self) -> &Settings {
        &self.current
    }

    /// What the host's own resolver is told; `None` if it is not.
    #[must_use]
    pub(crate) fn registered_names(&self) -> Option<Arc<Registered>> {
        self.resolver.running().and_then(HostResolver::registered)
    }

    /// The wanted state of the tun device; `None` without one.
    #[must_use]
    pub(crate) fn overlay(&self) -> Option<&OverlayLink> {
        self.link.overlay.as_ref()
    }

    /// The configuration file or folder.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Every file that the settings were read from.
    #[must_use]
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let mut files = nebula_config::files(&self.path);
        files.extend_from_slice(&self.credentials);
        files
    }

    /// The state of the files before they were read last, if that is news since the last call.
    pub(crate) fn take_stamps(&mut self) -> Option<Vec<Stamp>> {
        self.stamps.take()
    }

    #[must_use]
    pub(crate) fn last(&self) -> Option<&LastReload> {
        self.last.as_ref()
    }

    /// Reloads the configuration. If it has any error, nothing changes.
    ///
    /// # Errors
    /// Returns the errors found, which have already been logged.
    pub(crate) fn reload(&mut self, now: UnixTime) -> Result<(), String> {
        self.stamps = Some(file_watch::stamps(&self.files()));
        let outcome = self.read_again(now);
        self.last = Some(LastReload { at: now, error: outcome.as_ref().err().cloned() });
        if outcome.is_err() {
            self.report_unreadable();
        }
        outcome
    }

    /// Warns about files that a reload needs but that `daemon.user`, the user this process runs as, cannot read.
    pub(crate) fn report_unreadable(&self) {
        let Some(user) = &self.current.operation.user else { return };
        for file in account::unreadable(self.files()) {
            tracing::warn!(user, file = %file.display(), "A reload needs this file, and daemon.user cannot read it");
        }
    }

    /// What a reload would say about the files as they are now: errors, then remarks.
    #[must_use]
    pub(crate) fn on_disk(&self, now: UnixTime) -> (Vec<String>, Vec<String>) {
        let (tree, merged) = match nebula_config::load(&self.path) {
            Ok(loaded) => loaded,
            Err(error) => return (vec![error.to_string()], Vec::new()),
        };
        let report = Report::new(&self.path);
        let (refused, remarks) = match Settings::read(&tree, now) {
            Ok(settings) => (check_identity(&self.current, &settings).err().into_iter().collect(), settings.remarks),
            Err(refusals) => (refusals.refused, refusals.remarks),
        };
        let refused = refused.iter().map(|refused| report.refused_text(refused)).collect();
        (refused, merged.iter().chain(&remarks).map(|remark| report.remark_text(remark)).collect())
    }

    fn read_again(&mut self, now: UnixTime) -> Result<(), String> {
        let loaded = reloaded::load(&self.path)?;
        // Even if the configuration is refused: these files are watched, and fixing one of them may fix the
        // configuration.
        self.credentials = nebula_config::credential_files(&loaded.0);
        let reloaded = Reloaded::of(&self.path, loaded, &self.current, now)?;
        let (stats, dns) = (self.current.stats.clone(), Served::of(&self.current));
        let resolving = Resolving::of(&self.current);
        self.apply(reloaded);
        // Each waits until its predecessor has stopped, which may itself be querying the control plane.
        if self.current.stats != stats || self.emitter.missing().is_some() {
            self.serve_stats();
        }
        if Served::of(&self.current) != dns || self.dns.missing().is_some() {
            self.serve_dns();
        }
        if Resolving::of(&self.current) != resolving || self.resolver.missing().is_some() {
            self.serve_resolver();
        }
        self.note_listeners();
        self.link.unmet.note_at_next_start(needs_restart(&self.started_with, &self.current));
        // Last, because by now the node knows the gateways of the new routes.
        self.update_link();
        Ok(())
    }

    fn apply(&mut self, reloaded: Reloaded) {
        let changed = self.reconfigure(&reloaded);
        reloaded.report(&changed, &self.current);
        let new = reloaded.settings;
        self.link.metrics.update(&new, changed.contains(&Part::Firewall));
        #[cfg(feature = "ssh")]
        if let Some(console) = &mut self.console {
            console.configure(new.sshd.as_ref());
        }
        self.apply_socket_options(&self.current.listen, &new.listen);
        if self.current.tun.routes.subnets != new.tun.routes.subnets {
            tracing::info!("tun.unsafe_routes has been reloaded");
        }
        let hosts_changed = self.current.static_hosts != new.static_hosts;
        self.current = new;
        if hosts_changed {
            self.watch_names();
            tracing::info!("static_host_map has been reloaded");
        }
    }

    /// Applies the core's part in one step, and returns the parts that changed.
    fn reconfigure(&self, reloaded: &Reloaded) -> Vec<Part> {
        let edit = reloaded.edit(&self.current, self.names.as_ref());
        let routes = reloaded.settings.tun.routes.subnet_routes();
        let changed = self.link.subnets.configure(routes, |subnets| {
            self.handle.reconfigure(move |config| {
                edit(config);
                config.subnets = subnets;
            })
        });
        // `None`: the driver has ended, and the program is about to exit.
        changed.unwrap_or_default()
    }

    fn apply_socket_options(&self, old: &Listen, new: &Listen) {
        let report = |key: &str, result: std::io::Result<()>| match result {
            Ok(()) => tracing::info!(key, "Option of the underlay sockets has been reloaded"),
            Err(error) => tracing::error!(key, error = errno::text(&error), "Failed to set an option of a socket"),
        };
        for socket in &self.link.sockets {
            // As in Go, a missing size leaves the buffer unchanged.
            if let Some(bytes) = new.read_buffer.filter(|bytes| *bytes > 0 && new.read_buffer != old.read_buffer) {
                report("listen.read_buffer", socket.set_read_buffer(bytes));
            }
            if let Some(bytes) = new.write_buffer.filter(|bytes| *bytes > 0 && new.write_buffer != old.write_buffer) {
                report("listen.write_buffer", socket.set_write_buffer(bytes));
            }
            if new.so_mark != old.so_mark {
                report("listen.so_mark", socket.set_mark(new.so_mark));
            }
        }
    }

    fn update_link(&mut self) {
        let Some(old) = &self.link.overlay else { return };
        // Addresses do not change while running, and neither does the queue length.
        let new = OverlayLink::new(&old.device, &self.current.tun, old.addresses.clone());
        let link = OverlayLink { forwards: old.forwards, ..new };
        if (link.mtu, &link.routes) == (old.mtu, &old.routes) {
            return;
        }
        lan::report(&self.current.tun, &old.device);
        if let Err(error) = link.update_here(old) {
            tracing::error!(%error, "Failed to update the routes of the tun device");
        }
        self.link.overlay = Some(link);
    }

    /// Tries again to open the listeners that could not be opened and are due at `now`.
    pub(crate) fn retry_listeners(&mut self, now: Instant) {
        if self.emitter.is_due(now) {
            self.serve_stats();
        }
        if self.dns.is_due(now) {
            self.serve_dns();
        }
        if self.resolver.is_due(now) {
            self.serve_resolver();
        }
        #[cfg(feature = "ssh")]
        if let Some(console) = &mut self.console {
            console.retry(now);
        }
        self.note_listeners();
    }

    /// When to call [`Reloader::retry_listeners`]; `None` while everything that is configured is open.
    pub(crate) fn listeners_due(&self) -> Option<Instant> {
        self.listeners().into_iter().filter_map(|(_, missing)| Some(missing?.next)).min()
    }

    fn note_listeners(&self) {
        self.listeners().into_iter().for_each(|(section, missing)| self.link.unmet.note_listener(section, missing));
    }

    /// Why those listeners are not open that should be, by the section of the configuration.
    fn listeners(&self) -> [(&'static str, Option<&Missing>); 4] {
        #[cfg(feature = "ssh")]
        let console = self.console.as_ref().and_then(crate::host::console::Console::missing);
        #[cfg(not(feature = "ssh"))]
        let console = None;
        [
            ("stats", self.emitter.missing()),
            ("lighthouse.dns", self.dns.missing()),
            ("resolver", self.resolver.missing()),
            ("sshd", console),
        ]
    }

    fn serve_stats(&mut self) {
        let (stats, metrics) = (self.current.stats.as_ref(), &self.link.metrics);
        self.emitter.open(clock::now(), stats.map(|stats| || Emitter::start(stats, metrics)));
    }

    fn serve_dns(&mut self) {
        let handle = self.handle.clone();
        self.dns.open(clock::now(), Served::of(&self.current).map(|served| || served.start(handle)));
    }

    fn serve_resolver(&mut self) {
        let device = self.link.overlay.as_ref().map(|overlay| overlay.device.as_str());
        let resolving = Resolving::of(&self.current);
        self.resolver.open(clock::now(), resolving.map(|resolving| || resolving.start(device)));
    }

    fn watch_names(&mut self) {
        let hosts = self.current.static_hosts.clone();
        match &self.names {
            Some(watch) => watch.replace(hosts),
            None if hosts.has_names() => {
                let handle = self.handle.clone();
                let changed = move |endpoints| {
                    handle.reconfigure(move |config| config.static_hosts = endpoints);
                };
                match NameWatch::start(hosts, changed) {
                    Ok(watch) => self.names = Some(watch),
                    Err(error) => tracing::error!(%error, "Names in static_host_map cannot be looked up"),
                }
            }
            None => {}
        }
    }
}
