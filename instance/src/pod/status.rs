//! What one pod's instance reports: a JSON document, its health, and metrics in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nebula_cert::Identity;
use nebula_cni_contract::instance_status::{
    self, Certificate, ClusterTable, DroppedPacket, FollowedSettings, InstanceState, LostPeer, PolicyRefusal,
    PolicyVerdicts, RefusedCaller, TableState, Trouble, Tunnel,
};
use nebula_cni_contract::launch::{Flow, LaunchSpec};
use nebula_config::log::cause;
use nebula_core::TunnelStatus;
use nebula_core::counters::Direction;
use nebula_core::diagnosis::{Diagnosis, Dropped};
use nebula_core::io::Handle;

use crate::metrics::{escaped, help};
use crate::pod::capture::{TableReport, VerdictCounters};

/// The state to report; the owner of the tunnel keeps it up to date.
#[derive(Debug)]
pub struct Status {
    /// `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Tun device in the pod.
    pub device: String,
    /// UDP port of the tunnel.
    pub port: u16,
    /// Certificate in use.
    pub identity: Option<Identity>,
    /// Whether that certificate is provisional.
    pub provisional: bool,
    /// Why the path is closed although there was a certificate.
    pub closed: Option<&'static str>,
    /// Whether another instance is taking over.
    pub is_handing_over: bool,
    /// The running node.
    pub handle: Option<Handle>,
    /// Why there is no certificate, or no newer one.
    pub last_error: Option<String>,
    /// Whether that is what the CA says, and not that it was not reached.
    pub is_denied: bool,
    /// Whether the pod's own token obtains the certificate.
    pub shows_own_token: bool,
    /// Whether the pod's init container should have shown its token long ago.
    pub init_is_overdue: bool,
    /// Certificates received.
    pub issued: u64,
    /// Failed requests for a certificate.
    pub failed: u64,
    /// When the CA last sent the trust or confirmed it (since the Unix epoch).
    pub trust_confirmed: Option<Duration>,
    /// The cluster table of a captured pod.
    pub table: Option<TableReport>,
    /// What network policies said about the flows of a captured pod.
    pub verdicts: Option<Arc<VerdictCounters>>,
    /// The settings of the tunnel that are in force.
    pub settings: FollowedSettings,
}

/// Status shared with the threads that answer clients.
pub type Shared = Arc<Mutex<Status>>;

impl Status {
    /// The status of a pod without a certificate.
    #[must_use]
    pub fn new(spec: &LaunchSpec, port: u16) -> Self {
        Self {
            pod: format!("{}/{}", spec.target.pod.namespace, spec.target.pod.name),
            uid: spec.target.pod.uid.clone(),
            device: spec.target.device.clone(),
            port,
            identity: None,
            provisional: false,
            closed: None,
            is_handing_over: false,
            handle: None,
            last_error: None,
            is_denied: false,
            shows_own_token: spec.flow == Flow::Init,
            init_is_overdue: false,
            issued: 0,
            failed: 0,
            trust_confirmed: None,
            table: None,
            verdicts: None,
            settings: FollowedSettings::default(),
        }
    }

    /// Whether the data path is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.identity.is_some() && self.closed.is_none()
    }

    pub(crate) fn certificate_installed(&mut self, identity: Identity, provisional: bool, handle: Option<Handle>) {
        self.issued += 1;
        self.provisional = provisional;
        self.init_is_overdue = false;
        self.failed_in_a_row_is_over();
        self.identity = Some(identity);
        self.handle = handle;
    }

    pub(crate) fn certificate_failed(&mut self, cause: &str, denied: bool) {
        self.failed += 1;
        // Repeating the same line for hours would say nothing new.
        if self.last_error.as_deref() != Some(cause) || self.failed.is_power_of_two() {
            tracing::warn!(error = cause, denied, failures = self.failed, "No certificate from the CA");
        }
        self.last_error = Some(cause.to_owned());
        self.is_denied = denied;
    }

    fn failed_in_a_row_is_over(&mut self) {
        self.closed = None;
        self.last_error = None;
        self.is_denied = false;
    }

    /// Seconds until the certificate expires; negative afterwards.
    fn seconds_left(&self, now: Duration) -> Option<i64> {
        let not_after = self.identity.as_ref()?.primary().not_after();
        Some(not_after.saturating_sub(i64::try_from(now.as_secs()).unwrap_or(i64::MAX)))
    }
}

/// The state at one moment, taken without holding up the owner.
#[derive(Debug)]
pub(crate) struct Snapshot {
    fixed: instance_status::Status,
    open: bool,
    reason: String,
    seconds_left: Option<i64>,
    issued: u64,
    failed: u64,
    trust_age: Option<u64>,
    table: Option<TableReport>,
    table_age: Option<u64>,
    verdicts: Vec<PolicyVerdicts>,
    tunnels: Vec<TunnelStatus>,
    /// What went wrong lately, and the moment of it.
    diagnosis: Option<(Instant, Diagnosis)>,
    counters: BTreeMap<&'static str, u64>,
}

impl Snapshot {
    pub(crate) fn take(status: &Shared, now: Duration) -> Self {
        let status = status.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = status.handle.clone();
        let reason = match (status.closed, &status.last_error) {
            (Some(closed), Some(error)) => format!("{closed}: {error}"),
            (Some(closed), None) => closed.to_owned(),
            (None, Some(error)) => format!("no certificate yet: {error}"),
            (None, None) => "no certificate yet".to_owned(),
        };
        let age = |at: Duration| now.saturating_sub(at).as_secs();
        let mut snapshot = Self {
            fixed: fixed_part(&status),
            open: status.is_open(),
            reason,
            seconds_left: status.seconds_left(now),
            issued: status.issued,
            failed: status.failed,
            trust_age: status.trust_confirmed.map(age),
            table: status.table.clone(),
            table_age: status.table.as_ref().and_then(|table| table.written).map(age),
            verdicts: status.verdicts.as_ref().map(|verdicts| verdicts.report()).unwrap_or_default(),
            tunnels: Vec::new(),
            diagnosis: None,
            counters: BTreeMap::new(),
        };
        drop(status);
        // Queried without the lock: a busy node must not hold up the owner of the status.
        if let Some(handle) = handle {
            snapshot.tunnels = handle.tunnels();
            snapshot.diagnosis = handle.diagnosis();
            snapshot.counters = handle.counters();
        }
        snapshot
    }

    /// The status document.
    pub(crate) fn document(self) -> instance_status::Status {
        let tunnel = |tunnel: &TunnelStatus| Tunnel {
            peer: tunnel.peer.iter().map(ToString::to_string).collect(),
            name: tunnel.name.clone(),
            endpoint: tunnel.endpoint.map(|endpoint| endpoint.to_string()),
            handshake_ms: tunnel.handshake.map(|took| took.as_secs_f64() * 1000.0),
            primary: tunnel.primary,
        };
        instance_status::Status {
            pid: i32::try_from(std::process::id()).ok(),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            tunnels: self.tunnels.iter().take(MAX_TUNNELS).map(tunnel).collect(),
            trouble: self.diagnosis.as_ref().map(|(now, diagnosis)| trouble(*now, diagnosis)),
            table: self.table.as_ref().map(|table| cluster_table(table, self.table_age)),
            counters: self.counters.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
            policy_verdicts: self.verdicts,
            ..self.fixed
        }
    }

    /// Whether the pod is connected to its overlay, and if not, why.
    pub(crate) fn health(&self) -> Result<(), &str> {
        if self.open { Ok(()) } else { Err(&self.reason) }
    }

    /// Metrics in Prometheus' text format. The scraper adds labels that name the pod: one socket is one pod.
    pub(crate) fn metrics(&self) -> String {
        let mut out = String::new();
        let mut add = |name: &str, kind: &str, help: &str, value: Option<i64>| {
            if let Some(value) = value {
                let _ =
                    write!(out, "# HELP {PREFIX}{name} {help}\n# TYPE {PREFIX}{name} {kind}\n{PREFIX}{name} {value}\n");
            }
        };
        let number = |value: u64| Some(i64::try_from(value).unwrap_or(i64::MAX));
        add("open", "gauge", "Whether packets pass.", Some(self.open.into()));
        add("certificate_ttl_seconds", "gauge", "Time until the certificate expires.", self.seconds_left);
        add("certificates_issued_total", "counter", "Certificates that arrived.", number(self.issued));
        add("certificate_failures_total", "counter", "Requests for one that failed.", number(self.failed));
        add("trust_age_seconds", "gauge", "Since the CA last said whom to trust.", self.trust_age.and_then(number));
        if let Some(table) = &self.table {
            let is_there = Some(table.version.is_some().into());
            add(
                "cluster_table",
                "gauge",
                "Whether there is a cluster table; without one captured traffic is dropped.",
                is_there,
            );
            add(
                "cluster_table_problem",
                "gauge",
                "Whether the newest table cannot be used.",
                Some(table.problem.is_some().into()),
            );
            add(
                "cluster_table_version",
                "gauge",
                "Version of the cluster table in use.",
                table.version.and_then(number),
            );
            add(
                "cluster_table_age_seconds",
                "gauge",
                "Since the table in use was written.",
                self.table_age.and_then(number),
            );
        }
        add("tunnels", "gauge", "Live tunnels.", number(self.tunnels.len() as u64));
        for (name, value) in self.counters.iter().filter(|(name, _)| !name.starts_with("dropped_")) {
            let help = help::of(&format!("{name}_total"));
            let _ = write!(out, "# HELP {PREFIX}{name}_total {help}\n# TYPE {PREFIX}{name}_total counter\n");
            let _ = writeln!(out, "{PREFIX}{name}_total {value}");
        }
        let name = "dropped_packets_total";
        let _ = write!(out, "# HELP {PREFIX}{name} {}\n# TYPE {PREFIX}{name} counter\n", help::of(name));
        for (name, value) in &self.counters {
            if let Some((direction, reason)) = name.strip_prefix("dropped_").and_then(|name| name.split_once('_')) {
                let labels = format!("{{direction=\"{direction}\",reason=\"{reason}\"}}");
                let _ = writeln!(out, "{PREFIX}dropped_packets_total{labels} {value}");
            }
        }
        policy_verdicts(&mut out, &self.verdicts);
        out
    }
}

fn trouble(now: Instant, diagnosis: &Diagnosis) -> Trouble {
    let ago = |at: Instant| now.saturating_duration_since(at).as_secs();
    let lost = diagnosis.attempts.iter().map(|attempt| LostPeer {
        peer: attempt.peer.to_string(),
        cause: cause::of(attempt),
        reason: reason(cause::kind(attempt)).to_owned(),
        refusal: attempt.refusal.as_ref().map(|refusal| refusal.reason.name().to_owned()).unwrap_or_default(),
        seconds_ago: ago(attempt.last),
    });
    let refused = diagnosis.callers.iter().map(|caller| RefusedCaller {
        from: caller.from.to_string(),
        reason: caller.reason.name().to_owned(),
        text: caller.text.clone(),
        seconds_ago: ago(caller.at),
    });
    let sample = |sample: &[Dropped]| -> Vec<DroppedPacket> {
        let packet = |dropped: &Dropped| DroppedPacket { seconds_ago: ago(dropped.last), ..dropped_packet(dropped) };
        sample.iter().map(packet).collect()
    };
    Trouble {
        lost_peers: lost.collect(),
        refused_callers: refused.collect(),
        dropped: sample(&diagnosis.drops),
        audited: sample(&diagnosis.audited),
    }
}

fn reason(kind: cause::Kind) -> &'static str {
    match kind {
        cause::Kind::Refused => LostPeer::REFUSED,
        cause::Kind::OtherCipher => LostPeer::OTHER_CIPHER,
        cause::Kind::CannotSend => LostPeer::CANNOT_SEND,
        cause::Kind::NobodyKnows => LostPeer::NOBODY_KNOWS,
        cause::Kind::NoAnswer | cause::Kind::LongMessagesLost => LostPeer::NO_ANSWER,
    }
}

fn dropped_packet(dropped: &Dropped) -> DroppedPacket {
    DroppedPacket {
        direction: if dropped.direction == Direction::Inbound { "inbound" } else { "outbound" }.to_owned(),
        reason: dropped.reason.name().to_owned(),
        protocol: dropped.flow.protocol,
        local: SocketAddr::new(dropped.flow.local, dropped.flow.local_port).to_string(),
        remote: SocketAddr::new(dropped.flow.remote, dropped.flow.remote_port).to_string(),
        nearest_rule: dropped.nearest.as_ref().map(|near| near.rule),
        policy: dropped.policy.as_ref().map(|policy| PolicyRefusal {
            own: policy.own.to_string(),
            peer: policy.peer.to_string(),
            reason: policy.reason.to_string(),
        }),
        seconds_ago: 0,
    }
}

fn policy_verdicts(out: &mut String, verdicts: &[PolicyVerdicts]) {
    if verdicts.is_empty() {
        return;
    }
    let name = format!("{PREFIX}policy_verdicts_total");
    let _ = write!(out, "# HELP {name} Verdicts of network policies on new flows.\n# TYPE {name} counter\n");
    for of in verdicts {
        for (verdict, count) in [("allowed", of.allowed), ("denied", of.denied), ("would_deny", of.would_deny)] {
            let PolicyVerdicts { direction, tier, policy, .. } = of;
            let policy = escaped(policy);
            let labels = format!("direction=\"{direction}\",tier=\"{tier}\",policy=\"{policy}\",verdict=\"{verdict}\"");
            // Most policies only allow, or only deny.
            if count > 0 {
                let _ = writeln!(out, "{name}{{{labels}}} {count}");
            }
        }
    }
}

fn cluster_table(table: &TableReport, age_seconds: Option<u64>) -> ClusterTable {
    let [pods, clear, services, endpoints] = table.counts;
    let state = match (table.version, &table.problem) {
        (Some(_), None) => TableState::Used,
        (Some(_), Some(_)) => TableState::Kept,
        (None, _) => TableState::Missing,
    };
    let (version, problem, closed) = (table.version, table.problem.clone(), table.closed.map(str::to_owned));
    ClusterTable { state, version, age_seconds, pods, clear, services, endpoints, problem, closed }
}

/// What the owner of the tunnel knows.
fn fixed_part(status: &Status) -> instance_status::Status {
    let certificate = status.identity.as_ref().map(Identity::primary);
    let state = match (status.is_open(), status.closed) {
        (true, _) if status.provisional => InstanceState::Provisional,
        (true, _) => InstanceState::Running,
        (false, Some(_)) => InstanceState::Closed,
        (false, None) => InstanceState::Waiting,
    };
    instance_status::Status {
        pod: status.pod.clone(),
        uid: Some(status.uid.clone()),
        device: status.device.clone(),
        overlay: certificate.map(|c| c.networks().iter().map(ToString::to_string).collect()).unwrap_or_default(),
        groups: certificate.map(|c| c.groups().to_vec()).unwrap_or_default(),
        certificate: certificate.map(|c| Certificate {
            name: c.name().to_owned(),
            fingerprint: c.fingerprint().to_string(),
            not_before: c.not_before(),
            not_after: c.not_after(),
            issuer: c.issuer().map(|issuer| issuer.to_string()),
        }),
        state,
        closed: status.closed.map(str::to_owned),
        is_handing_over: status.is_handing_over,
        last_error: status.last_error.clone(),
        denied: status.is_denied,
        own_token: Some(status.shows_own_token),
        init_overdue: status.init_is_overdue,
        port: Some(status.port),
        settings: Some(status.settings.clone()),
        ..instance_status::Status::default()
    }
}

const PREFIX: &str = "nebula_pod_";
// Keeps one answer within a few hundred KiB.
const MAX_TUNNELS: usize = 2000;

#[cfg(test)]
pub(crate) mod tests {
    use nebula_core::diagnosis::Attempt;

    use super::*;

    pub(crate) fn waiting() -> Shared {
        let mut status = Status::new(&crate::pod::launch_file::tests::launch(|_| ()).unwrap(), 20_001);
        status.last_error = Some("connection refused".to_owned());
        Arc::new(Mutex::new(status))
    }

    #[test]
    fn a_pod_without_a_certificate_is_not_healthy_and_says_why() {
        let status = waiting();
        let snapshot = Snapshot::take(&status, Duration::from_secs(100));
        assert_eq!(snapshot.health(), Err("no certificate yet: connection refused"));
        assert!(snapshot.metrics().contains("nebula_pod_open 0\n"));
        assert!(!snapshot.metrics().contains("ttl"), "nothing is said of what is not there");
        status.lock().unwrap().closed = Some("the certificate was revoked");
        let snapshot = Snapshot::take(&status, Duration::from_secs(100));
        assert_eq!(snapshot.health(), Err("the certificate was revoked: connection refused"));
        assert_eq!(snapshot.document().state, InstanceState::Closed);
    }

    #[test]
    fn verdicts_of_policies_are_metrics_and_part_of_the_document() {
        let mut snapshot = Snapshot::take(&waiting(), Duration::from_secs(100));
        assert!(!snapshot.metrics().contains("policy_verdicts"));
        let (direction, tier, policy) = ("egress".to_owned(), "Admin".to_owned(), "a\"b".to_owned());
        snapshot.verdicts = vec![PolicyVerdicts { direction, tier, policy, allowed: 3, denied: 0, would_deny: 1 }];
        let labels = r#"direction="egress",tier="Admin",policy="a\"b""#;
        let metrics = snapshot.metrics();
        for line in ["allowed\"} 3", "would_deny\"} 1"] {
            let line = format!("nebula_pod_policy_verdicts_total{{{labels},verdict=\"{line}\n");
            assert!(metrics.contains(&line), "{line} in {metrics}");
        }
        assert!(!metrics.contains("denied"));
        assert_eq!(snapshot.document().policy_verdicts.len(), 1);
    }

    #[test]
    fn a_pod_tells_what_went_wrong_lately() {
        let now = nebula_linux::clock::now();
        let attempt = Attempt {
            peer: [10, 42, 0, 9].into(),
            since: now,
            last: now,
            pending: false,
            given_up: 1,
            tried: Vec::new(),
            refusal: None,
        };
        let told =
            trouble(now + Duration::from_secs(7), &Diagnosis { attempts: vec![attempt], ..Diagnosis::default() });
        let [lost] = &told.lost_peers[..] else { panic!("{told:?}") };
        assert_eq!((lost.peer.as_str(), lost.seconds_ago), ("10.42.0.9", 7));
        assert!(lost.cause.contains("no lighthouse knows it"), "{told:?}");
    }

    #[test]
    fn a_captured_pod_tells_which_table_it_uses_and_that_there_is_none() {
        let status = waiting();
        let at = Duration::from_secs(100);
        assert_eq!(Snapshot::take(&status, at).document().table, None);
        let table = |version: Option<u64>, problem: Option<&str>| {
            let problem = problem.map(str::to_owned);
            let written = version.map(|_| Duration::from_secs(60));
            status.lock().unwrap().table =
                Some(TableReport { version, written, counts: [1, 2, 3, 4], problem, closed: None });
            let snapshot = Snapshot::take(&status, at);
            (snapshot.metrics(), snapshot.document().table.unwrap())
        };
        let (metrics, told) = table(Some(7), None);
        assert!(metrics.contains("nebula_pod_cluster_table_age_seconds 40\n"), "{metrics}");
        assert_eq!((told.state, told.version, told.services), (TableState::Used, Some(7), 3));
        assert_eq!(table(Some(7), Some("it is truncated")).1.state, TableState::Kept);
        let (metrics, told) = table(None, Some("no such file"));
        assert!(metrics.contains("nebula_pod_cluster_table 0\n") && !metrics.contains("table_age"), "{metrics}");
        assert_eq!((told.state, told.problem.as_deref()), (TableState::Missing, Some("no such file")));
    }

    #[test]
    fn failures_and_the_age_of_the_trust_are_counted() {
        let status = waiting();
        status.lock().unwrap().certificate_failed("no", true);
        status.lock().unwrap().trust_confirmed = Some(Duration::from_secs(60));
        let text = Snapshot::take(&status, Duration::from_secs(100)).metrics();
        for line in
            ["nebula_pod_certificate_failures_total 1", "nebula_pod_trust_age_seconds 40", "nebula_pod_tunnels 0"]
        {
            assert!(text.lines().any(|found| found == line), "{line} not in\n{text}");
        }
    }
}
