//! Reloads the configuration of a running node after SIGHUP; everything is checked before anything is applied.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::{UnixTime, Version};
use nebula_core::Part;
use nebula_core::config::Timers;
use nebula_core::io::{Handle, SocketControl};

use crate::config::{self, Listen, Remark, Settings, TunSettings, Value};
use crate::go::firewall_hash;
use crate::host::account;
use crate::host::dns::{self, Resolving, Served};
use crate::host::file_watch::{self, Stamp};
use crate::host::report::Report;
use crate::host::subnets::Subnets;
use crate::linux::errno;
use crate::log;
use crate::metrics::{Emitter, Metrics};
use crate::names;
use crate::names::NameWatch;
use crate::overlay::link::OverlayLink;

/// Reloads a node, and holds the settings it was started or last reloaded with.
#[derive(Debug)]
pub(crate) struct Reloader {
    path: PathBuf,
    current: Settings,
    handle: Handle,
    link: Link,
    names: Option<NameWatch>,
    dns: Option<dns::Server>,
    resolver: Option<dns::Server>,
    /// Sends metrics, if configured.
    emitter: Option<Emitter>,
    #[cfg(feature = "ssh")]
    console: Option<crate::host::ssh::Console>,
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
}

impl Reloader {
    /// Creates the reloader of a node that runs with `current`, read from `path`.
    #[must_use]
    pub(crate) fn new(path: PathBuf, tree: &Value, current: Settings, handle: Handle, link: Link) -> Self {
        let emitter = current.stats.as_ref().and_then(|stats| Emitter::start(stats, &link.metrics));
        let credentials = config::credential_files(tree);
        let mut reloader = Self {
            path,
            current,
            handle,
            link,
            names: None,
            dns: None,
            resolver: None,
            emitter,
            #[cfg(feature = "ssh")]
            console: None,
            credentials,
            last: None,
            stamps: None,
        };
        reloader.watch_names();
        reloader.serve_dns();
        reloader.serve_resolver();
        reloader
    }

    /// Attaches the SSH console, and opens it if configured.
    #[cfg(feature = "ssh")]
    pub(crate) fn attach(&mut self, mut console: crate::host::ssh::Console) {
        console.configure(self.current.sshd.as_ref());
        self.console = Some(console);
    }

    /// The settings in force.
    #[must_use]
    pub(crate) fn settings(&self) -> &Settings {
        &self.current
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
        let mut files = config::files(&self.path);
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
        let (tree, merged) = match config::load(&self.path) {
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
        let loaded = load(&self.path)?;
        // Even if the configuration is refused: these files are watched, and fixing one of them may fix the
        // configuration.
        self.credentials = config::credential_files(&loaded.0);
        let settings = settings_of(&self.path, loaded, &self.current, now)?;
        // May wait for a name server, so it comes before anything is applied.
        let advertise =
            differs_in_rendezvous(&self.current, &settings).then(|| names::resolve_once(&settings.advertise));
        let (stats, dns) = (self.current.stats.clone(), Served::of(&self.current));
        let resolving = Resolving::of(&self.current);
        self.apply(settings, advertise);
        // Each waits until its predecessor has stopped, which may itself be querying the control plane.
        if self.current.stats != stats {
            self.serve_stats();
        }
        if Served::of(&self.current) != dns {
            self.serve_dns();
        }
        if Resolving::of(&self.current) != resolving {
            self.serve_resolver();
        }
        // Last, because by now the node knows the gateways of the new routes.
        self.update_link();
        Ok(())
    }

    fn apply(&mut self, new: Settings, advertise: Option<Vec<SocketAddr>>) {
        log::apply(new.logging);
        let changed = self.reconfigure(&new, advertise);
        self.link.metrics.update(&new, changed.contains(&Part::Firewall));
        report(&changed, &self.current, &new);
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

    /// Applies the core's part of `new` in one step, and returns the parts that changed. `advertise` are the addresses
    /// to advertise; `None` keeps the present ones.
    fn reconfigure(&self, new: &Settings, advertise: Option<Vec<SocketAddr>>) -> Vec<Part> {
        // Always present: `Settings::read` requires it.
        let Some(pki) = new.pki.clone() else { return Vec::new() };
        let hosts = &new.static_hosts;
        let endpoints = (self.current.static_hosts != *hosts).then(|| {
            let known = self.names.as_ref().map(|watch| watch.endpoints(hosts));
            known.unwrap_or_else(|| hosts.endpoints(&Default::default()))
        });
        let mut wanted = new.to_config(pki.identity, pki.trust, new.listen.port, Vec::new());
        let changed = self.link.subnets.configure(new.tun.routes.subnet_routes(), |subnets| {
            self.handle.reconfigure(move |config| {
                wanted.subnets = subnets;
                let old = std::mem::replace(config, wanted);
                // Names are resolved in the background, and their addresses are already in force.
                config.static_hosts = endpoints.unwrap_or(old.static_hosts);
                config.lighthouse.advertise = advertise.unwrap_or(old.lighthouse.advertise);
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
        let link = OverlayLink::new(&old.device, &self.current.tun, old.addresses.clone());
        if (link.mtu, &link.routes) == (old.mtu, &old.routes) {
            return;
        }
        if let Err(error) = link.update_here(old) {
            tracing::error!(%error, "Failed to update the routes of the tun device");
        }
        self.link.overlay = Some(link);
    }

    fn serve_stats(&mut self) {
        // Stop the old emitter first: the new one may use the same address.
        self.emitter = None;
        self.emitter = self.current.stats.as_ref().and_then(|stats| Emitter::start(stats, &self.link.metrics));
    }

    fn serve_dns(&mut self) {
        // Stop the old server first: the new one may use the same address.
        self.dns = None;
        self.dns = Served::of(&self.current).and_then(|served| served.start(self.handle.clone()));
    }

    fn serve_resolver(&mut self) {
        self.resolver = None;
        let device = self.link.overlay.as_ref().map(|overlay| overlay.device.as_str());
        self.resolver = Resolving::of(&self.current).and_then(|resolving| resolving.start(device));
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

/// Reads the files of a running node again.
pub(super) fn load(path: &Path) -> Result<(Value, Vec<Remark>), String> {
    config::load(path).map_err(|error| {
        tracing::error!(%error, "Error occurred while reloading config");
        error.to_string()
    })
}

/// The settings in these files for a node that runs with `current`.
///
/// # Errors
/// Returns the errors found, which have been logged.
pub(super) fn settings_of(
    path: &Path,
    (tree, remarks): (Value, Vec<Remark>),
    current: &Settings,
    now: UnixTime,
) -> Result<Settings, String> {
    let settings = Settings::read(&tree, now).and_then(|new| Ok(check_identity(current, &new).map(|()| new)?));
    let report = Report::new(path);
    settings
        .inspect(|settings| remarks.iter().chain(&settings.remarks).for_each(|remark| report.remark(remark, false)))
        .map_err(|refusals| {
            // As with `-test`: a remark may hint at the error.
            let remarks: Vec<_> = remarks.iter().chain(&refusals.remarks).collect();
            remarks.iter().for_each(|remark| report.remark(remark, false));
            refusals.refused.iter().for_each(|refused| report.refused(refused, true));
            tracing::error!(error = %refusals, "Error occurred while reloading config, nothing was changed");
            let refused = refusals.refused.iter().map(|refused| report.refused_text(refused));
            let remarks = remarks.iter().map(|remark| format!("warning: {}", report.remark_text(remark)));
            refused.chain(remarks).collect::<Vec<_>>().join("\n")
        })
}

/// Logs what a reload did, and what it could not do.
pub(super) fn report(changed: &[Part], old: &Settings, new: &Settings) {
    for key in needs_restart(old, new) {
        tracing::warn!(key, "The change of this setting takes effect at the next start");
    }
    if let Some(pki) = &new.pki {
        tracing::info!("Trusted CA certificates refreshed");
        tracing::info!(cert = pki.identity.primary().name(), "Client certificate(s) refreshed from disk");
    }
    for part in changed {
        report_reloaded(*part, old, new);
    }
}

/// Checks that a reload keeps what peers and live tunnels rely on: peers know this node by its addresses, tunnels by
/// its curve.
fn check_identity(old: &Settings, new: &Settings) -> Result<(), config::Refused> {
    let (Some(old), Some(new)) = (&old.pki, &new.pki) else { return Ok(()) };
    let refuse = |cause: &str| Err(config::Refused::new("Could not load client cert", cause).at("pki.cert"));
    if old.identity.curve() != new.identity.curve() {
        return refuse("Curve in new cert was different from old");
    }
    for version in [Version::V1, Version::V2] {
        let (before, after) = (old.identity.certificate(version), new.identity.certificate(version));
        match (before, after) {
            (Some(before), Some(after)) if before.networks() != after.networks() => {
                return refuse("Networks in new cert was different from old");
            }
            (Some(before), None) if version == Version::V2 && new.identity.networks() != before.networks() => {
                return refuse(
                    "Removing a V2 cert is not permitted unless it has identical networks to the new V1 cert",
                );
            }
            _ => {}
        }
    }
    if old.identity.networks().first() != new.identity.networks().first() {
        return refuse("Networks in new cert was different from old");
    }
    Ok(())
}

/// Logs that a part of the core's configuration has changed.
fn report_reloaded(part: Part, old: &Settings, new: &Settings) {
    match part {
        Part::Firewall => {
            let (hashes, old_hashes) = (firewall_hash::both(&new.firewall), firewall_hash::both(&old.firewall));
            tracing::info!(firewallHashes = hashes, oldFirewallHashes = old_hashes, "New firewall has been installed");
        }
        Part::Relay => tracing::info!(
            am_relay = new.relay.am_relay, use_relays = new.relay.use_relays, relays = ?new.relay.relays,
            "relay settings have been reloaded"
        ),
        Part::InitiatingVersion => tracing::info!("pki.initiating_version has been reloaded"),
        Part::RecvError => {
            tracing::info!("listen.send_recv_error and listen.accept_recv_error have been reloaded");
        }
        Part::Punchy => tracing::info!("punchy has been reloaded"),
        Part::Timers => tracing::info!("tunnels, counters and timers.requery_wait_duration have been reloaded"),
        Part::PreferredRanges => tracing::info!("preferred_ranges has been reloaded"),
        Part::DisconnectInvalid => tracing::info!("pki.disconnect_invalid has been reloaded"),
        Part::MeasurePaths => tracing::info!("tunnels.measure_paths has been reloaded"),
        Part::Keep => tracing::info!("tunnels.keep and tunnels.keep_groups have been reloaded"),
        Part::PathMtu => tracing::info!("tun.mtu and tun.path_mtu_discovery have been reloaded"),
        Part::Lighthouse => tracing::info!("lighthouse settings have been reloaded"),
        // Logged when the file changes: resolved names and kernel routes change these parts at other times too.
        Part::StaticHosts | Part::Subnets => {}
        // The cluster table has versions of its own, many of them.
        Part::Capture => {}
        // Logged at each reload, as in Go.
        Part::Trust | Part::Identity => {}
        other => tracing::info!(part = ?other, "settings have been reloaded"),
    }
}

/// Whether the lighthouse settings differ, including the addresses and names to advertise.
fn differs_in_rendezvous(old: &Settings, new: &Settings) -> bool {
    old.advertise != new.advertise || old.lighthouse(Vec::new()) != new.lighthouse(Vec::new())
}

/// Whether only the reloadable settings of the device differ: routes, MTU, and discovery of the path MTU.
fn same_device(old: &TunSettings, new: &TunSettings) -> bool {
    let reloadable = TunSettings {
        mtu: old.mtu,
        discovers_path_mtu: old.discovers_path_mtu,
        routes: old.routes.clone(),
        ..new.clone()
    };
    *old == reloadable
}

fn needs_restart(old: &Settings, new: &Settings) -> Vec<&'static str> {
    let changed = [
        ("cipher", old.cipher != new.cipher),
        ("handshakes", old.handshakes != new.handshakes),
        ("listen.host", old.listen.host != new.listen.host),
        ("listen.port", old.listen.port != new.listen.port),
        ("routines", old.routines != new.routines),
        // As in Go, the other timers are not compared.
        ("timers", intervals(&old.timers) != intervals(&new.timers)),
        ("tun", !same_device(&old.tun, &new.tun)),
        ("lighthouse.am_lighthouse", old.am_lighthouse != new.am_lighthouse),
        ("daemon.control_socket", old.operation.control != new.operation.control),
        ("daemon.user", old.operation.user != new.operation.user),
        ("pki.enrolment", old.operation.enrolment != new.operation.enrolment),
    ];
    changed.into_iter().filter_map(|(key, changed)| changed.then_some(key)).collect()
}

/// The intervals of tunnel checks.
fn intervals(timers: &Timers) -> [Duration; 2] {
    [timers.connection_alive_interval, timers.pending_deletion_interval]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Pki;
    use nebula_cert::{CaPool, Curve, Identity, PrivateKey, SigningKey, Template};

    fn settings(text: &str) -> Settings {
        Settings::read_without_pki(&config::parse(text).unwrap()).unwrap()
    }

    fn host(curve: Curve, certificates: &[(Version, &[&str])]) -> Settings {
        let ca_key = SigningKey::generate(curve).unwrap();
        let key = PrivateKey::generate(curve).unwrap();
        let template = |version, public_key, networks: &[&str]| Template {
            version,
            curve,
            networks: networks.iter().map(|network| network.parse().unwrap()).collect(),
            public_key,
            ..Template::new("x", 1..=2)
        };
        let ca = template(Version::V2, ca_key.public_key(), &[]).self_sign(&ca_key).unwrap();
        let sign = |(version, networks): &(Version, &[&str])| {
            template(*version, key.public_key(), networks).sign(&ca, &ca_key).unwrap()
        };
        let certificates = certificates.iter().map(sign).collect();
        let identity = Identity::new(certificates, key.clone()).unwrap();
        Settings { pki: Some(Pki { identity, trust: CaPool::new() }), ..settings("{}") }
    }

    const A: &[&str] = &["10.42.0.7/16"];
    const B: &[&str] = &["10.42.0.8/16"];

    #[test]
    fn a_running_node_keeps_its_addresses_and_its_curve() {
        let (v1, v2, p256) = (Version::V1, Version::V2, Curve::P256);
        let c25519 = Curve::Curve25519;
        let both: &[&str] = &["10.42.0.7/16", "fd77::7/64"];
        for (old, new, refusal) in [
            (host(c25519, &[(v2, A)]), host(c25519, &[(v2, A)]), None),
            (host(c25519, &[(v1, A)]), host(c25519, &[(v1, A), (v2, A)]), None),
            (host(c25519, &[(v1, A), (v2, A)]), host(c25519, &[(v1, A)]), None),
            (host(c25519, &[(v2, A)]), host(c25519, &[(v2, B)]), Some("Networks in new cert was different from old")),
            (host(c25519, &[(v1, A)]), host(c25519, &[(v2, B)]), Some("Networks in new cert was different from old")),
            (host(c25519, &[(v2, A)]), host(p256, &[(v2, A)]), Some("Curve in new cert was different from old")),
            (host(c25519, &[(v1, A), (v2, both)]), host(c25519, &[(v1, A)]), Some("Removing a V2 cert")),
        ] {
            let result = check_identity(&old, &new).map_err(|refused| refused.cause);
            match refusal {
                None => assert_eq!(result, Ok(())),
                Some(text) => assert!(result.as_ref().is_err_and(|cause| cause.starts_with(text)), "{result:?}"),
            }
        }
    }

    #[test]
    fn what_cannot_change_while_running_is_named() {
        let old = settings("tun: {mtu: 1300}\nlisten: {port: 1}\npunchy: {punch: true}");
        let new =
            settings("tun: {mtu: 1400, disabled: true}\nlisten: {port: 2}\nfirewall: {default_local_cidr_any: true}");
        assert_eq!(needs_restart(&old, &new), ["listen.port", "tun"]);
        assert_ne!(old.firewall, new.firewall);
        assert_eq!(old.firewall, old.firewall.clone());
    }
}
