//! Draws conclusions from the daemon's facts: what is wrong, and how to fix it.

mod callers;
mod conflicts;
mod host;
mod peers;
mod refusals;
#[cfg(test)]
mod tests;
mod traffic;

use nebula_instance::host::documents::{Facts, Status};
use serde_json::{Value, json};

/// A problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Stable name for programs.
    pub(crate) code: &'static str,
    pub(crate) severity: Severity,
    /// The host, peer, network or file affected.
    pub(crate) about: String,
    /// What is wrong.
    pub(crate) cause: String,
    /// How to fix it.
    pub(crate) advice: String,
}

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Severity {
    /// Something does not work.
    Error,
    /// Something will stop working, or works badly.
    Warning,
}

impl Severity {
    fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

impl Finding {
    fn error(code: &'static str, about: impl Into<String>, cause: impl Into<String>, advice: &str) -> Self {
        let (about, cause, advice) = (about.into(), cause.into(), advice.to_owned());
        Self { code, severity: Severity::Error, about, cause, advice }
    }

    fn warning(code: &'static str, about: impl Into<String>, cause: impl Into<String>, advice: &str) -> Self {
        Self { severity: Severity::Warning, ..Self::error(code, about, cause, advice) }
    }

    fn to_json(&self) -> Value {
        json!({
            "code": self.code,
            "severity": self.severity.name(),
            "about": self.about,
            "cause": self.cause,
            "advice": self.advice,
        })
    }
}

/// All problems of a host, from the daemon's answer to `doctor`; errors first.
pub(crate) fn examine(facts: &Facts) -> Vec<Finding> {
    let mut findings = host::findings(facts);
    let is_barred = findings.iter().any(host::bars);
    findings.extend(host::unmet(&facts.unmet));
    findings.extend(host::configuration(&facts.configuration));
    for peer in &facts.peers {
        findings.extend(peers::findings(facts, peer, is_barred));
    }
    findings.extend(callers::all_unheard(facts));
    findings.extend(refusals::callers(facts, None));
    findings.extend(conflicts::doubles(facts, None));
    findings.extend(conflicts::own_addresses(facts));
    findings.extend(conflicts::same_names(facts, None));
    findings.extend(peers::unsafe_routes(facts));
    findings.extend(peers::relays_refused(facts));
    findings.extend(traffic::findings(facts, None));
    sorted(findings)
}

/// What keeps one peer from being reached, from the daemon's answer to `why`: the cause, and then what follows from
/// it.
pub(crate) fn explain(facts: &Facts) -> Vec<Finding> {
    let (mut findings, of_host): (Vec<_>, Vec<_>) = host::findings(facts).into_iter().partition(host::bars);
    let is_barred = !findings.is_empty();
    for peer in &facts.peers {
        findings.extend(peers::findings(facts, peer, is_barred));
        // Of another peer, and of names and relays, nobody asked.
        let of_host = of_host.iter().filter(|it| it.severity == Severity::Error || peer.peer == it.about);
        findings.extend(of_host.cloned());
        if peer.connected {
            findings.extend(refusals::callers(facts, Some(peer)));
        }
        findings.extend(conflicts::doubles(facts, Some(&peer.peer)));
        findings.extend(conflicts::same_names(facts, Some(&peer.peer)));
        findings.extend(traffic::findings(facts, Some(&peer.peer)));
    }
    sorted(findings)
}

/// The problems that are visible in the answer to `status`.
pub(crate) fn of_status(status: &Status) -> Vec<Finding> {
    let of_host = host::of_status(status);
    let is_barred = of_host.iter().any(host::bars);
    // What keeps it from its lighthouses comes before what follows from that.
    let lighthouses = status.lighthouse_facts.iter();
    let mut findings: Vec<_> = lighthouses.flat_map(|facts| peers::first_causes(facts, is_barred)).collect();
    let (bars, follows): (Vec<_>, Vec<_>) = of_host.into_iter().partition(host::bars);
    findings.splice(0..0, bars);
    findings.extend(follows);
    sorted(findings)
}

/// Whether anything does not work.
pub(crate) fn is_bad(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.severity == Severity::Error)
}

/// For programs: the findings, and the facts behind them.
pub(crate) fn document(findings: &[Finding], facts: &Value) -> Value {
    json!({"findings": findings.iter().map(Finding::to_json).collect::<Value>(), "facts": facts})
}

/// For people.
pub(crate) fn readable(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { severity, about, cause, advice, code } in findings {
        let mark = if *severity == Severity::Error { "ERROR" } else { "warning" };
        text += &format!("{mark}: {about}: {cause} [{code}]\n");
        if !advice.is_empty() {
            text += &format!("    {advice}\n");
        }
    }
    text
}

/// The state of the peer in an answer to `why`.
pub(crate) fn state(facts: &Facts) -> String {
    let Some(peer) = facts.peers.first() else { return String::new() };
    let address = &peer.peer;
    match peer.tunnels.first() {
        Some(with) => {
            let way = match (&with.tunnel.endpoint, &with.tunnel.relay) {
                (Some(endpoint), _) => format!("at {endpoint}"),
                (None, Some(relay)) => format!("through the relay {relay}"),
                (None, None) => "with no way to it".to_owned(),
            };
            format!("there is a tunnel with {} ({address}) {way}\n", with.tunnel.name)
        }
        None => format!("there is no tunnel with {address}\n"),
    }
}

/// Whether it happened in the last minutes: what is older may have been solved.
fn is_recent(seconds_ago: u64) -> bool {
    seconds_ago < RECENT_SECONDS
}

const RECENT_SECONDS: u64 = 600;

fn sorted(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.sort_by_key(|finding| finding.severity);
    let mut once: Vec<Finding> = Vec::new();
    for finding in findings {
        if !once.contains(&finding) {
            once.push(finding);
        }
    }
    once
}

/// A dash stands for what is not known.
fn known(text: &Option<String>) -> &str {
    text.as_deref().unwrap_or("-")
}

/// A time span in its largest unit.
fn span(seconds: i64) -> String {
    match seconds.unsigned_abs() {
        n @ 0..=119 => format!("{n} s"),
        n @ 120..=7_199 => format!("{} min", n / 60),
        n @ 7_200..=172_799 => format!("{} h", n / 3600),
        n => format!("{} days", n / 86_400),
    }
}
