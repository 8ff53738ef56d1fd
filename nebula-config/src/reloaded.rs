//! What the files of a running node say now, and what that changes.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use nebula_cert::{UnixTime, Version};
use nebula_core::config::Timers;
use nebula_core::{Config, Part};
use nebula_linux::clock::unix_now;

use crate::go::firewall_hash;
use crate::log;
use crate::names::{self, NameWatch};
use crate::report::Report;
use crate::{Remark, Settings, TunSettings, Value};

/// The settings that a running node goes on with.
#[derive(Debug)]
pub struct Reloaded {
    /// All of them, also those that take effect at the next start.
    pub settings: Settings,
    /// The addresses to advertise, where they may have changed.
    advertise: Option<Vec<SocketAddr>>,
}

impl Reloaded {
    /// Reads the files at `path` again, for a node that runs with `current`, and applies their logging settings. May
    /// wait for a name server.
    ///
    /// # Errors
    /// Returns the errors found, which have been logged. The node goes on as it is.
    pub fn read(path: &Path, current: &Settings) -> Result<Self, String> {
        Self::of(path, load(path)?, current, unix_now())
    }

    /// As [`Reloaded::read`], of what [`load`] returned.
    pub fn of(
        path: &Path,
        (tree, remarks): (Value, Vec<Remark>),
        current: &Settings,
        now: UnixTime,
    ) -> Result<Self, String> {
        let settings = Settings::read(&tree, now).and_then(|new| Ok(check_identity(current, &new).map(|()| new)?));
        let report = Report::new(path);
        match settings {
            Ok(settings) => {
                remarks.iter().chain(&settings.remarks).for_each(|remark| report.remark(remark, false));
                let advertise =
                    differs_in_rendezvous(current, &settings).then(|| names::resolve_once(&settings.advertise));
                log::apply(settings.logging);
                Ok(Self { settings, advertise })
            }
            Err(refusals) => {
                // As with `-test`: a remark may hint at the error.
                let remarks: Vec<_> = remarks.iter().chain(&refusals.remarks).collect();
                remarks.iter().for_each(|remark| report.remark(remark, false));
                refusals.refused.iter().for_each(|refused| report.refused(refused, true));
                tracing::error!(error = %refusals, "Error occurred while reloading config, nothing was changed");
                let refused = refusals.refused.iter().map(|refused| report.refused_text(refused));
                let remarks = remarks.iter().map(|remark| format!("warning: {}", report.remark_text(remark)));
                Err(refused.chain(remarks).collect::<Vec<_>>().join("\n"))
            }
        }
    }

    /// The edit that makes the core's configuration under `current` what these settings say. `names` are those that
    /// are being looked up.
    pub fn edit(
        &self,
        current: &Settings,
        names: Option<&NameWatch>,
    ) -> impl FnOnce(&mut Config) + Send + use<> + 'static {
        let new = &self.settings;
        let hosts = &new.static_hosts;
        let endpoints = (current.static_hosts != *hosts).then(|| {
            let known = names.map(|watch| watch.endpoints(hosts));
            known.unwrap_or_else(|| hosts.endpoints(&Default::default()))
        });
        let advertise = self.advertise.clone();
        let new = new.clone();
        move |config| {
            // Always present: `Settings::read` requires it.
            let Some(pki) = &new.pki else { return };
            (config.identity, config.trust) = (pki.identity.clone(), pki.trust.clone());
            new.apply(config);
            config.subnets = new.tun.routes.subnet_routes();
            // Names are resolved in the background, and their addresses are already in force.
            if let Some(endpoints) = endpoints {
                config.static_hosts = endpoints;
            }
            if let Some(advertise) = advertise {
                config.lighthouse.advertise = advertise;
            }
        }
    }

    /// Logs what the reload changed since `old`, and which settings take effect at the next start.
    pub fn report(&self, changed: &[Part], old: &Settings) {
        let new = &self.settings;
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
}

/// Reads the files of a running node again.
pub fn load(path: &Path) -> Result<(Value, Vec<Remark>), String> {
    crate::load(path).map_err(|error| {
        tracing::error!(%error, "Error occurred while reloading config");
        error.to_string()
    })
}

/// Checks that a reload keeps what peers and live tunnels rely on: peers know this node by its addresses, tunnels by
/// its curve.
pub fn check_identity(old: &Settings, new: &Settings) -> Result<(), crate::Refused> {
    let (Some(old), Some(new)) = (&old.pki, &new.pki) else { return Ok(()) };
    let refuse = |cause: &str| Err(crate::Refused::new("Could not load client cert", cause).at("pki.cert"));
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
            groups = ?new.relay.groups,
            "relay settings have been reloaded"
        ),
        Part::InitiatingVersion => tracing::info!("pki.initiating_version has been reloaded"),
        Part::PostQuantum => tracing::info!("pki.post_quantum has been reloaded"),
        Part::RecvError => {
            tracing::info!("listen.send_recv_error and listen.accept_recv_error have been reloaded");
        }
        Part::Punchy => tracing::info!("punchy has been reloaded"),
        Part::Timers => tracing::info!("tunnels, counters and timers.requery_wait_duration have been reloaded"),
        Part::PreferredRanges => tracing::info!("preferred_ranges has been reloaded"),
        Part::DisconnectInvalid => tracing::info!("pki.disconnect_invalid has been reloaded"),
        Part::MeasurePaths => tracing::info!("tunnels.measure_paths has been reloaded"),
        Part::FlowRecords => tracing::info!("flows has been reloaded"),
        Part::Keep => tracing::info!("tunnels.keep and tunnels.keep_groups have been reloaded"),
        Part::PathMtu => tracing::info!("tun.mtu and tun.path_mtu_discovery have been reloaded"),
        Part::Lighthouse => tracing::info!("lighthouse settings have been reloaded"),
        // Logged when the file changes: resolved names and kernel routes change these parts at other times too.
        Part::StaticHosts | Part::Subnets => {}
        // The cluster table has versions of its own, many of them.
        Part::Capture => {}
        // Logged at each reload, as in Go.
        Part::Trust | Part::Identity => {}
        // Each part of today has a line above.
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

/// The keys of settings that differ and take effect at the next start.
pub fn needs_restart(old: &Settings, new: &Settings) -> Vec<&'static str> {
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
    use std::net::IpAddr;
    use std::sync::Arc;

    use super::*;
    use crate::Pki;
    use nebula_cert::{CaPool, Curve, Identity, PrivateKey, SigningKey, Template};
    use nebula_core::FlowKey;
    use nebula_core::counters::Direction;
    use nebula_core::firewall::{NetworkPolicy, Occasion, OtherEnd, PolicyVerdict};

    fn settings(text: &str) -> Settings {
        Settings::read_without_pki(&crate::parse(text).unwrap()).unwrap()
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
    fn a_reload_leaves_alone_what_settings_do_not_decide() {
        #[derive(Debug)]
        struct Nobody;
        impl NetworkPolicy for Nobody {
            fn version(&self) -> u64 {
                1
            }
            fn judge(&self, _: Direction, _: &FlowKey, _: &OtherEnd<'_>, _: Occasion) -> PolicyVerdict {
                PolicyVerdict::Refuse
            }
            fn reason(&self, _: Direction, _: &FlowKey, _: &OtherEnd<'_>) -> Option<String> {
                None
            }
        }
        let (old, other) = (host(Curve::Curve25519, &[(Version::V2, A)]), "192.0.2.9:4242".parse().unwrap());
        let pki = old.pki.clone().unwrap();
        let mut config = old.to_config(pki.identity, pki.trust, 4242, vec![other]);
        config.static_hosts = [(IpAddr::from([10, 42, 0, 1]), vec![other])].into();
        config.network_policy = Some(Arc::new(Nobody));
        let text = "{punchy: {punch: true}, tun: {mtu: 1200}, static_host_map: {10.42.0.2: ['192.0.2.2:4242']}}";
        settings(text).apply(&mut config);
        assert!(config.punchy.punch && config.path_mtu == Some(1200), "these settings decide");
        assert!(config.network_policy.is_some(), "policies of the network");
        assert_eq!((config.listen_port, &config.lighthouse.advertise), (4242, &vec![other]));
        assert_eq!(config.static_hosts.len(), 1);
        assert_eq!(config.identity.primary().name(), "x");
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
