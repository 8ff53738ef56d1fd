//! Acts on every part of the configuration that changes while the node runs.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::Node;
use super::timer::Due;
use crate::{Config, Part};

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
        if parts.iter().any(|part| matches!(part, Part::Identity | Part::Firewall | Part::NetworkPolicy)) {
            self.forwarder.decide_records(&old.firewall);
        }
        for part in &parts {
            match part {
                Part::Trust | Part::DisconnectInvalid => self.close_refused(now),
                Part::Identity | Part::Firewall => self.forwarder.set_policy((&self.config).into()),
                Part::Subnets => {
                    self.forwarder.set_subnets(self.config.identity.primary().networks(), &self.config.subnets);
                    self.apply_gateways(now);
                }
                Part::StaticHosts => self.retry_where_endpoints_changed(&old.static_hosts),
                Part::Relay => self.apply_relay_settings(now),
                Part::Lighthouse => self.apply_lighthouse_settings(now),
                Part::PathMtu => self.examine_all_paths(),
                Part::PostQuantum => self.close_classical(now),
                Part::MeasurePaths => self.forget_measurements(),
                Part::Keep => self.apply_kept(now),
                Part::FlowRecords => self.forwarder.set_flow_records(self.config.flow_records),
                Part::Capture => {
                    self.end_former_pods(now, old.capture.as_deref());
                    self.forwarder.set_directory(self.config.capture.clone());
                    self.forwarder.resume_waiting(now);
                    self.release_held(now);
                }
                Part::NetworkPolicy => self.forwarder.set_network_policy(self.config.network_policy.clone()),
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
        self.apply_relay_choice(now);
        self.close_direct(now);
        if self.config.has_lighthouses() {
            self.timer.set(Due::LighthouseUpdate, now);
        }
    }

    fn apply_lighthouse_settings(&mut self, now: Instant) {
        self.apply_relay_choice(now);
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
