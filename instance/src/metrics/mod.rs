//! Metrics of a running node: under Go Nebula's names where the meaning is the same, otherwise under our own.
//!
//! Reading them takes no lock of the packet path: counters are read where the packet threads write them, and the
//! control plane is asked for tunnels once per reading.

mod graphite;
mod handshakes;
pub(crate) mod help;
mod prometheus;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use handshakes::Summary;
use nebula_cert::{Identity, UnixTime, Version};
use nebula_config::go::firewall_hash;
use nebula_config::{Settings, Sink, Stats};
use nebula_core::io::{Handle, SocketControl};
use nebula_core::{GatewayStatus, TunnelStatus};
use nebula_enrolment::renewal_health::RenewalHealth;
use nebula_linux::clock;

use crate::host::unmet::Unmet;

pub(crate) use handshakes::Handshakes;
pub(crate) use prometheus::escaped;

/// Where the numbers come from.
#[derive(Debug)]
pub(crate) struct Metrics {
    handle: Handle,
    handshakes: Arc<Handshakes>,
    repairs: Arc<Repairs>,
    renewals: Arc<RenewalHealth>,
    unmet: Arc<Unmet>,
    sockets: Vec<SocketControl>,
    facts: Mutex<Facts>,
}

/// How often something was put back that somebody else had taken from the tun device.
#[derive(Debug, Default)]
pub(crate) struct Repairs([AtomicU64; REPAIR_KINDS.len()]);

impl Repairs {
    /// Counts one of these: `address`, `mtu`, `route`, `state`.
    pub(crate) fn count(&self, kind: &str) {
        let counter = REPAIR_KINDS.iter().zip(&self.0).find_map(|(name, counter)| (*name == kind).then_some(counter));
        if let Some(counter) = counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn read(&self) -> [(&'static str, u64); REPAIR_KINDS.len()] {
        std::array::from_fn(|at| (REPAIR_KINDS[at], self.0[at].load(Ordering::Relaxed)))
    }

    /// Of all kinds.
    pub(crate) fn total(&self) -> u64 {
        self.read().iter().map(|(_, count)| count).sum()
    }
}

/// Values that a reload may change.
#[derive(Debug, Default)]
struct Facts {
    not_before: UnixTime,
    not_after: UnixTime,
    initiating_version: u32,
    max_version: u32,
    rules_hash: u32,
    rules_version: u16,
    routines: usize,
}

/// One number under Go's dotted name.
#[derive(Debug, PartialEq)]
struct Metric {
    name: String,
    value: f64,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
}

/// All numbers at one moment.
struct Reading {
    /// Those of Go Nebula.
    metrics: Vec<Metric>,
    handshakes: Summary,
    /// Our own counters: name, value.
    own: Vec<(&'static str, u64)>,
    /// Our own gauge: handshakes that this node answered and whose initiator is not confirmed yet.
    half_open: usize,
    /// Our own gauge: tunnels with keys by ML-KEM, and those without.
    tunnels: [(bool, usize); 2],
    /// Our own counter: direction, reason, packets.
    dropped: Vec<(&'static str, &'static str, u64)>,
    /// Own: what was put back on the tun device, how often.
    repairs: [(&'static str, u64); REPAIR_KINDS.len()],
    /// Our own: the peers with a tunnel, the first by address.
    peers: Vec<TunnelStatus>,
    /// How many more peers there are.
    more_peers: usize,
    /// Our own: the gateways of the first subnet routes.
    gateways: Vec<GatewayStatus>,
    /// Our own gauge: flows that stay where they moved while their own gateway was dead.
    moved_flows: usize,
}

impl Metrics {
    pub(crate) fn new(
        settings: &Settings,
        handle: Handle,
        (handshakes, repairs, renewals, unmet): (Arc<Handshakes>, Arc<Repairs>, Arc<RenewalHealth>, Arc<Unmet>),
        sockets: Vec<SocketControl>,
    ) -> Self {
        let metrics = Self { handle, handshakes, repairs, renewals, unmet, sockets, facts: Mutex::default() };
        metrics.update(settings, false);
        metrics
    }

    /// Applies the values that a reload changed.
    pub(crate) fn update(&self, settings: &Settings, new_rules: bool) {
        let mut facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pki) = &settings.pki {
            let has = |version| pki.identity.certificate(version).is_some();
            (facts.not_before, facts.not_after) = validity(&pki.identity);
            facts.max_version = if has(Version::V2) { 2 } else { 1 };
            let initiating =
                settings.initiating_version.unwrap_or_else(|| if has(Version::V1) { Version::V1 } else { Version::V2 });
            facts.initiating_version = initiating.number();
        }
        facts.rules_hash = firewall_hash::fnv(&settings.firewall);
        facts.rules_version = facts.rules_version.wrapping_add(u16::from(new_rules));
        facts.routines = settings.routines;
    }

    /// Validity of this host's certificate that expires first.
    pub(crate) fn validity(&self) -> (UnixTime, UnixTime) {
        let facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        (facts.not_before, facts.not_after)
    }

    /// `max_peers`: of how many peers.
    fn read(&self, now: UnixTime, max_peers: usize) -> Reading {
        let counters = self.handle.counters();
        let count = |name: &str| counters.get(name).copied().unwrap_or(0) as f64;
        let handshakes = self.handshakes.summary();
        let mut metrics = Vec::new();
        let mut add = |kind, name: &str, value| metrics.push(Metric { name: name.to_owned(), value, kind });
        let facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        add(Kind::Gauge, "certificate.ttl_seconds", (facts.not_after - now) as f64);
        let failing = self.renewals.failing_seconds(clock::now());
        add(Kind::Gauge, "certificate.renewal_failing_seconds", failing as f64);
        let (listeners, at_next_start) = self.unmet.counts();
        add(Kind::Gauge, "config.missing_listeners", listeners as f64);
        add(Kind::Gauge, "config.at_next_start", at_next_start as f64);
        add(Kind::Gauge, "certificate.initiating_version", f64::from(facts.initiating_version));
        add(Kind::Gauge, "certificate.max_version", f64::from(facts.max_version));
        add(Kind::Gauge, "firewall.rules.hash", f64::from(facts.rules_hash));
        add(Kind::Gauge, "firewall.rules.version", f64::from(facts.rules_version));
        add(Kind::Gauge, "routines", facts.routines as f64);
        drop(facts);
        for (name, own) in GO_COUNTERS {
            add(Kind::Counter, name, count(own));
        }
        add(Kind::Counter, "handshake_manager.initiated", handshakes.initiated as f64);
        add(Kind::Counter, "handshake_manager.timed_out", handshakes.timed_out as f64);
        let sizes = self.handle.table_sizes();
        for (name, size) in [
            // Go also counts a host once per address.
            ("hostmap.main.hosts", sizes.primaries),
            ("hostmap.main.indexes", sizes.tunnels),
            ("hostmap.main.remoteIndexes", sizes.tunnels),
            ("hostmap.main.relayIndexes", sizes.relay_hops),
            ("hostmap.pending.hosts", sizes.pending),
            ("hostmap.pending.indexes", sizes.pending),
            ("firewall.conntrack.count", sizes.flows),
        ] {
            add(Kind::Gauge, name, size as f64);
        }
        for (index, socket) in self.sockets.iter().enumerate() {
            for (name, value) in socket.memory().into_iter().flatten() {
                add(Kind::Gauge, &format!("udp.{index}.{name}"), f64::from(value));
            }
        }
        let split = |(name, value): (&'static str, &u64)| {
            let (direction, reason) = name.strip_prefix("dropped_")?.split_once('_')?;
            Some((direction, reason, *value))
        };
        let dropped = counters.iter().filter_map(|(name, value)| split((name, value))).collect();
        let own = counters.into_iter().filter(|(name, _)| !name.starts_with("dropped_")).collect();
        let mut peers = self.handle.tunnels();
        let tunnels = [true, false].map(|kind| (kind, peers.iter().filter(|it| it.post_quantum == kind).count()));
        peers.retain(|tunnel| tunnel.primary);
        let more_peers = peers.len().saturating_sub(max_peers);
        peers.truncate(max_peers);
        let (half_open, repairs) = (sizes.half_open, self.repairs.read());
        let gateways = self.handle.gateways(MAX_GATEWAYS);
        let moved_flows = self.handle.moved_flows();
        Reading {
            metrics,
            handshakes,
            own,
            half_open,
            tunnels,
            dropped,
            repairs,
            peers,
            more_peers,
            gateways,
            moved_flows,
        }
    }
}

/// Sends or serves metrics until it is dropped.
#[derive(Debug)]
pub(crate) struct Emitter {
    _running: Running,
}

#[derive(Debug)]
enum Running {
    Prometheus { _server: prometheus::Server },
    Graphite { _sender: graphite::Sender },
}

impl Emitter {
    /// Starts the emitter that `stats` configures.
    ///
    /// # Errors
    /// Returns an error if it cannot listen, or no thread can be started.
    pub(crate) fn start(stats: &Stats, metrics: &Arc<Metrics>) -> std::io::Result<Self> {
        let metrics = Arc::clone(metrics);
        let started = match &stats.sink {
            Sink::Prometheus { listen, path, namespace, subsystem, max_peers } => {
                let names = prometheus::Names::new(namespace, subsystem);
                prometheus::Server::start(listen, path.clone(), names, metrics, *max_peers)
                    .map(|server| Running::Prometheus { _server: server })
            }
            Sink::Graphite { host, prefix } => {
                graphite::Sender::start(host.clone(), prefix.clone(), stats.interval, metrics)
                    .map(|sender| Running::Graphite { _sender: sender })
            }
        };
        started.map(|running| Self { _running: running })
    }
}

/// Validity of the certificate that expires first.
fn validity(identity: &Identity) -> (UnixTime, UnixTime) {
    let certificates = [Version::V1, Version::V2].map(|version| identity.certificate(version));
    let ends = certificates.into_iter().flatten().map(|one| (one.not_after(), one.not_before()));
    ends.min().map_or((0, 0), |(not_after, not_before)| (not_before, not_after))
}

/// What can be put back, by its name in metrics.
const REPAIR_KINDS: [&str; 4] = ["address", "mtu", "route", "state"];
const REPAIRS: &str = "link_repairs";
const HALF_OPEN: &str = "half_open_handshakes";
const TUNNELS: &str = "tunnels";
const MAX_GATEWAYS: usize = 256;

/// Go's names of the counters that exist here.
const GO_COUNTERS: &[(&str, &str)] = &[
    ("firewall.incoming.dropped.local_addr", "dropped_in_local_address"),
    ("firewall.incoming.dropped.remote_addr", "dropped_in_remote_address"),
    ("firewall.incoming.dropped.no_rule", "dropped_in_no_rule"),
    ("firewall.outgoing.dropped.local_addr", "dropped_out_local_address"),
    ("firewall.outgoing.dropped.remote_addr", "dropped_out_remote_address"),
    ("firewall.outgoing.dropped.no_rule", "dropped_out_no_rule"),
    ("hostinfo.cached_packets.dropped", "dropped_out_pending_full"),
    ("messages.rx.recv_error", "recv_errors_in"),
    ("messages.rx.handshake_ixpsk0", "handshakes_in"),
    ("messages.rx.lighthouse", "lighthouse_in"),
    ("messages.rx.test_request", "test_requests_in"),
    ("messages.rx.test_response", "test_replies_in"),
    ("messages.rx.close_tunnel", "close_tunnel_in"),
    ("messages.rx.invalid", "dropped_in_truncated"),
    ("messages.rx.other", "control_in"),
    ("messages.tx.recv_error", "recv_errors_out"),
    ("messages.tx.punchy", "keepalives_out"),
    ("messages.tx.holepunch", "hole_punches_out"),
    ("messages.tx.handshake_ixpsk0", "handshakes_out"),
    ("messages.tx.lighthouse", "lighthouse_out"),
    ("messages.tx.test_request", "test_requests_out"),
    ("messages.tx.test_response", "test_replies_out"),
    ("messages.tx.close_tunnel", "close_tunnel_out"),
    ("messages.tx.other", "control_out"),
    ("hostinfo.cached_packets.sent", "waiting_out"),
    ("network.packets.lost", "datagrams_lost"),
    ("network.packets.duplicate", "dropped_in_replayed"),
    ("network.packets.out_of_window", "dropped_in_too_old"),
    ("lighthouse.rx.HostQuery", "lighthouse_query_in"),
    ("lighthouse.tx.HostQuery", "lighthouse_query_out"),
    ("lighthouse.rx.HostQueryReply", "lighthouse_reply_in"),
    ("lighthouse.tx.HostQueryReply", "lighthouse_reply_out"),
    ("lighthouse.rx.HostUpdateNotification", "lighthouse_update_in"),
    ("lighthouse.tx.HostUpdateNotification", "lighthouse_update_out"),
    ("lighthouse.rx.HostPunchNotification", "lighthouse_punch_in"),
    ("lighthouse.tx.HostPunchNotification", "lighthouse_punch_out"),
    ("lighthouse.rx.HostUpdateNotificationAck", "lighthouse_ack_in"),
    ("lighthouse.tx.HostUpdateNotificationAck", "lighthouse_ack_out"),
    ("lighthouse.rx.other", "lighthouse_other_in"),
    ("lighthouse.tx.other", "lighthouse_other_out"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_behind_a_name_of_go_exists() {
        let mut counters = std::collections::BTreeMap::new();
        nebula_core::internals::Counters::default().add_to(&mut counters);
        for (name, own) in GO_COUNTERS {
            assert!(counters.contains_key(own), "{name} is read from {own}");
        }
    }
}
