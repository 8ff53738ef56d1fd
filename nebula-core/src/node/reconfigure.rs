//! Reconfigures a running node: compares the new configuration with the old one and acts on the differences.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use nebula_cert::{Certificate, Fingerprint, Identity, Version};

use super::Node;
use super::timer::Due;
use crate::Config;
use crate::config::{Lighthouse, Timers};

/// A part of [`Config`] that can change while a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// [`Config::trust`]: live tunnels are checked again.
    Trust,
    /// [`Config::identity`]: used for new handshakes at once; live tunnels re-handshake.
    Identity,
    /// [`Config::initiating_version`], for the next handshakes.
    InitiatingVersion,
    /// [`Config::firewall`]: known flows are checked again.
    Firewall,
    /// [`Config::send_recv_error`] and [`Config::accept_recv_error`].
    RecvError,
    /// [`Config::punchy`], for punches that are not scheduled yet.
    Punchy,
    /// [`Config::timers`], each from its next use.
    Timers,
    /// [`Config::relay`]: reported to the lighthouses at once.
    Relay,
    /// [`Config::preferred_ranges`], for the next choice of an endpoint.
    PreferredRanges,
    /// [`Config::disconnect_invalid`]: live tunnels are checked.
    DisconnectInvalid,
    /// [`Config::subnets`], for the next packets.
    Subnets,
    /// [`Config::static_hosts`]: handshakes that wait for an endpoint are retried.
    StaticHosts,
    /// [`Config::lighthouse`]: this node reports to the lighthouses at once.
    Lighthouse,
}

impl Config {
    /// `wanted`, but with this configuration's value for every setting that only a restart can change.
    #[must_use]
    pub fn reloaded(&self, wanted: Self) -> Self {
        Self {
            cipher: self.cipher,
            handshakes: self.handshakes.clone(),
            lighthouse: Lighthouse { am_lighthouse: self.lighthouse.am_lighthouse, ..wanted.lighthouse },
            timers: Timers {
                connection_alive_interval: self.timers.connection_alive_interval,
                pending_deletion_interval: self.timers.pending_deletion_interval,
                ..wanted.timers
            },
            listen_port: self.listen_port,
            drop_local_broadcast: self.drop_local_broadcast,
            drop_multicast: self.drop_multicast,
            ..wanted
        }
    }

    /// The parts in which `other` differs from this configuration.
    fn differing_parts(&self, other: &Self) -> Vec<Part> {
        // Every field is named, so that a new one is not forgotten here.
        let Self {
            identity,
            trust,
            cipher: _,
            initiating_version,
            disconnect_invalid,
            static_hosts,
            lighthouse,
            subnets,
            relay,
            firewall,
            punchy,
            handshakes: _,
            timers,
            preferred_ranges,
            send_recv_error,
            accept_recv_error,
            listen_port: _,
            drop_local_broadcast: _,
            drop_multicast: _,
        } = other;
        let parts = [
            (Part::Trust, self.trust != *trust),
            (Part::Identity, fingerprints(&self.identity) != fingerprints(identity)),
            (Part::InitiatingVersion, self.initiating_version != *initiating_version),
            (Part::Firewall, self.firewall != *firewall),
            (Part::RecvError, (self.send_recv_error, self.accept_recv_error) != (*send_recv_error, *accept_recv_error)),
            (Part::Punchy, self.punchy != *punchy),
            (Part::Timers, self.timers != *timers),
            (Part::Relay, self.relay != *relay),
            (Part::PreferredRanges, self.preferred_ranges != *preferred_ranges),
            (Part::DisconnectInvalid, self.disconnect_invalid != *disconnect_invalid),
            (Part::Subnets, self.subnets != *subnets),
            (Part::StaticHosts, self.static_hosts != *static_hosts),
            (Part::Lighthouse, self.lighthouse != *lighthouse),
        ];
        parts.into_iter().filter_map(|(part, differs)| differs.then_some(part)).collect()
    }
}

impl Node {
    /// Lets `change` edit the configuration, acts on every part that differs afterwards, and returns these parts.
    /// Settings that only a restart can change stay as they were, see [`Config::reloaded`].
    pub fn reconfigure(&mut self, now: Instant, change: impl FnOnce(&mut Config)) -> Vec<Part> {
        self.now = now;
        let mut wanted = self.config.clone();
        change(&mut wanted);
        let new = self.config.reloaded(wanted);
        let parts = self.config.differing_parts(&new);
        let old = std::mem::replace(&mut self.config, new);
        for part in &parts {
            match part {
                Part::Trust | Part::DisconnectInvalid => self.close_refused(now),
                Part::Identity | Part::Firewall => self.forwarder.set_policy((&self.config).into()),
                Part::Subnets => {
                    self.forwarder.set_subnets(self.config.identity.primary().networks(), &self.config.subnets);
                }
                Part::StaticHosts => self.retry_where_endpoints_changed(&old.static_hosts),
                Part::Relay => self.apply_relay_settings(now),
                Part::Lighthouse => self.apply_lighthouse_settings(now),
                // Read from the configuration whenever they are needed.
                Part::InitiatingVersion | Part::RecvError | Part::Punchy | Part::Timers | Part::PreferredRanges => {}
            }
        }
        parts
    }

    fn retry_where_endpoints_changed(&mut self, old: &BTreeMap<IpAddr, Vec<SocketAddr>>) {
        let changed = self.config.static_hosts.iter().filter(|(peer, endpoints)| old.get(peer) != Some(endpoints));
        for peer in changed.map(|(peer, _)| *peer).collect::<Vec<_>>() {
            self.retry_if_endpoints_changed(peer);
        }
    }

    fn apply_relay_settings(&mut self, now: Instant) {
        self.hops.set_am_relay(self.config.relay.am_relay, &self.tunnels);
        if self.config.has_lighthouses() {
            self.timer.set(Due::LighthouseUpdate, now);
        }
    }

    fn apply_lighthouse_settings(&mut self, now: Instant) {
        if self.config.has_lighthouses() {
            self.timer.set(Due::LighthouseUpdate, now);
        } else {
            self.timer.cancel(Due::LighthouseUpdate);
        }
        for peer in self.pending.peers() {
            self.retry_if_endpoints_changed(peer);
        }
    }
}

/// The key belongs to its certificates, so their fingerprints tell identities apart.
fn fingerprints(identity: &Identity) -> [Option<Fingerprint>; 2] {
    [Version::V1, Version::V2].map(|version| identity.certificate(version).map(Certificate::fingerprint))
}
