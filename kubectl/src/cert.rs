//! `kubectl nebula cert`: the certificates of pods, what expires first above.

use nebula_cni_contract::agent_api::{PODS_PATH, PodState, PodStates};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::columns::{columns, or_dash, span};
use nebula_cni_contract::instance_status::{InstanceState, Status};
use serde::{Deserialize, Serialize};

use crate::agents::{Agents, remarks};
use crate::cluster::{Cluster, ClusterError};
use crate::outcome::{Outcome, ToolError};
use crate::shown::{Printer, shown};

/// The certificate of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct PodCertificate {
    node: String,
    pod: String,
    /// Name in the certificate.
    name: String,
    groups: Vec<String>,
    networks: Vec<String>,
    fingerprint: String,
    issuer: Option<String>,
    /// In seconds since 1970, as is `not_after`. `None`: there is no certificate.
    not_before: Option<i64>,
    not_after: Option<i64>,
    /// How it is renewed, in a word.
    renewal: String,
    /// Since when it is due, or when it will be, in seconds since 1970.
    renews_at: Option<i64>,
    /// Why the last request for one failed, or why nothing is known.
    problem: Option<String>,
    /// Whether somebody should look at it.
    is_bad: bool,
}

/// Which certificates are wanted.
pub(crate) struct Wanted {
    namespace: Option<String>,
    pod: Option<String>,
}

impl Wanted {
    pub(crate) fn of(cluster: &mut Cluster, pod: Option<&str>) -> Result<Self, ClusterError> {
        let name = pod.map(|pod| cluster.narrow(pod)).transpose()?;
        let namespace = cluster.namespace.clone();
        let pod = name.map(|name| format!("{}/{name}", namespace.as_deref().unwrap_or_default()));
        Ok(Self { namespace, pod })
    }

    fn path(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{PODS_PATH}?namespace={namespace}"),
            None => PODS_PATH.to_owned(),
        }
    }
}

pub(crate) async fn run(agents: &Agents<'_>, wanted: &Wanted, printer: &mut Printer<'_>) -> Result<Outcome, ToolError> {
    let answers = agents.ask::<PodStates>(&agents.all, "GET", &wanted.path()).await;
    let (now, mut certificates, mut failed) = (SystemClock.unix_seconds(), Vec::new(), Vec::new());
    for (node, answer) in &answers {
        match answer {
            Ok(states) => {
                let meant = states.pods.iter().filter(|pod| wanted.pod.as_ref().is_none_or(|name| *name == pod.pod));
                certificates.extend(meant.map(|pod| PodCertificate::of(node, pod, now)));
            }
            Err(error) => failed.push((node.as_str(), error)),
        }
    }
    let when = |one: &PodCertificate| (one.not_after.is_some(), one.not_after, one.pod.clone(), one.node.clone());
    certificates.sort_by_key(when);
    let mut is_whole = failed.is_empty();
    if !printer.is_table() {
        printer.documents(&certificates)?;
    } else if !certificates.is_empty() {
        let visible: Vec<PodCertificate> = certificates.iter().map(shown).collect::<Result<_, _>>()?;
        printer.text(&table(&visible, printer.is_wide(), now))?;
    }
    if certificates.is_empty() {
        let place = wanted.pod.as_ref().or(wanted.namespace.as_ref());
        let place = place.map_or_else(String::new, |place| format!("{place}: "));
        printer.note(&format!("{place}no such pod has a tunnel, or should have one, as far as the agents answer"))?;
        is_whole &= wanted.pod.is_none();
    }
    for line in remarks(failed.iter().copied()) {
        printer.note(&line)?;
    }
    let has_findings = certificates.iter().any(|one| one.is_bad);
    Ok(Outcome::findings(has_findings).and(if is_whole { Outcome::Fine } else { Outcome::Failed }))
}

impl PodCertificate {
    fn of(node: &str, pod: &PodState, now: i64) -> Self {
        let own = Self { node: node.to_owned(), pod: pod.pod.clone(), ..Self::default() };
        let Ok(status) = serde_json::from_value::<Status>(pod.status.clone()) else {
            let problem = pod.problem.clone().or_else(|| Some("what its instance says is no status".to_owned()));
            return Self { renewal: UNKNOWN.to_owned(), problem, is_bad: true, ..own };
        };
        let Some(certificate) = status.certificate else {
            let problem = status.last_error.or(status.closed);
            return Self { renewal: WAITING.to_owned(), problem, is_bad: true, ..own };
        };
        let (begin, end) = (certificate.not_before, certificate.not_after);
        let left = end.saturating_sub(now);
        let renewal = match (left, &status.last_error) {
            (..=0, _) => EXPIRED,
            (_, Some(_)) => FAILING,
            _ if status.state == InstanceState::Closed => CLOSED,
            _ if status.state == InstanceState::Provisional => PROVISIONAL,
            _ if left < certificate.warning_time() => LATE,
            _ => SCHEDULED,
        };
        // Instances spread renewals over the time before.
        let renews_at = end.saturating_sub(end.saturating_sub(begin) / 3);
        Self {
            name: certificate.name.clone(),
            groups: status.groups,
            networks: status.overlay,
            fingerprint: certificate.fingerprint.clone(),
            issuer: certificate.issuer.clone(),
            not_before: Some(begin),
            not_after: Some(end),
            renewal: renewal.to_owned(),
            renews_at: (renewal == SCHEDULED).then_some(renews_at),
            problem: status.last_error.or(status.closed),
            is_bad: renewal != SCHEDULED && renewal != PROVISIONAL,
            ..own
        }
    }
}

/// All texts are printed as they are.
fn table(certificates: &[PodCertificate], is_wide: bool, now: i64) -> String {
    let rows: Vec<[String; 10]> = certificates.iter().map(|one| one.row(is_wide, now)).collect();
    let [node, pod, expires, renewal, name, networks, groups, fingerprint, issuer, since] =
        ["NODE", "POD", "EXPIRES", "RENEWAL", "NAME", "NETWORKS", "GROUPS", "FINGERPRINT", "ISSUER", "VALID SINCE"];
    let mut text = if is_wide {
        columns([node, pod, expires, renewal, name, networks, groups, fingerprint, issuer, since], rows)
    } else {
        let short = rows.into_iter().map(|[node, pod, expires, renewal, name, networks, groups, fingerprint, ..]| {
            [node, pod, expires, renewal, name, networks, groups, fingerprint]
        });
        columns([node, pod, expires, renewal, name, networks, groups, fingerprint], short)
    };
    for one in certificates {
        if let Some(problem) = &one.problem {
            text += &format!("\n{}: {problem}", one.pod);
        }
    }
    if certificates.iter().any(|one| one.problem.is_some()) {
        text.push('\n');
    }
    text
}

impl PodCertificate {
    fn row(&self, is_wide: bool, now: i64) -> [String; 10] {
        let expires = match self.not_after {
            None => "-".to_owned(),
            Some(end) if end <= now => "EXPIRED".to_owned(),
            Some(end) => format!("in {}", span(end.saturating_sub(now))),
        };
        let renewal = match self.renews_at {
            Some(at) if at > now => format!("{} in {}", self.renewal, span(at.saturating_sub(now))),
            Some(_) => format!("{} now", self.renewal),
            None => self.renewal.clone(),
        };
        let digits =
            |text: &str| if is_wide { or_dash(text) } else { or_dash(&text.chars().take(SHORT).collect::<String>()) };
        let since = self
            .not_before
            .map_or_else(|| "-".to_owned(), |begin| format!("{} ago", span(now.saturating_sub(begin).max(0))));
        [
            self.node.clone(),
            self.pod.clone(),
            expires,
            renewal,
            or_dash(&self.name),
            or_dash(&self.networks.join(" ")),
            or_dash(&self.groups.join(" ")),
            digits(&self.fingerprint),
            digits(self.issuer.as_deref().unwrap_or_default()),
            since,
        ]
    }
}

/// The instance renews it by itself when a third of its life is left.
const SCHEDULED: &str = "due";
/// It should have been renewed by now.
const LATE: &str = "LATE";
/// The last request failed.
const FAILING: &str = "FAILING";
/// There is none yet.
const WAITING: &str = "WAITING";
const EXPIRED: &str = "EXPIRED";
/// The tunnel was closed, for example since the certificate was revoked.
const CLOSED: &str = "CLOSED";
/// One without groups, until the pod's init container shows its token.
const PROVISIONAL: &str = "provisional";
/// The instance does not answer.
const UNKNOWN: &str = "UNKNOWN";
/// Digits that tell fingerprints apart.
const SHORT: usize = 16;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NOW: i64 = 100_000;

    fn of(status: Value) -> PodCertificate {
        PodCertificate::of("n1", &PodState { pod: "shop/web".into(), status, ..PodState::default() }, NOW)
    }

    #[test]
    fn a_certificate_is_bad_if_it_expires_within_the_usual_time_or_is_not_renewed() {
        let with = |before: i64, left: i64, state: &str, error: Value| {
            let certificate = json!({"name": "web.shop.pod", "not_before": NOW - before, "not_after": NOW + left});
            let one = of(json!({"state": state, "certificate": certificate, "last_error": error}));
            (one.renewal, one.is_bad)
        };
        for (before, left, state, error, expected) in [
            (3600, 82_800, "running", Value::Null, (SCHEDULED, false)),
            (82_000, 4400, "running", Value::Null, (SCHEDULED, false)),
            (82_801, 3599, "running", Value::Null, (LATE, true)),
            (3600, 82_800, "running", json!("the CA is away"), (FAILING, true)),
            (86_400, 0, "closed", Value::Null, (EXPIRED, true)),
            (3600, 82_800, "closed", Value::Null, (CLOSED, true)),
            (3600, 60, "provisional", Value::Null, (PROVISIONAL, false)),
        ] {
            assert_eq!(
                with(before, left, state, error),
                (expected.0.to_owned(), expected.1),
                "{before} {left} {state}"
            );
        }
        assert_eq!(
            (of(json!({"state": "waiting"})).renewal.as_str(), of(Value::Null).renewal.as_str()),
            (WAITING, UNKNOWN)
        );
        let due = of(json!({"certificate": {"not_before": NOW - 3000, "not_after": NOW + 6000}}));
        assert_eq!(due.renews_at, Some(NOW + 3000));
    }

    #[test]
    fn the_table_has_all_of_a_certificate_and_the_problems_below() {
        let certificate = json!({"name": "web.shop.pod", "fingerprint": "ab".repeat(32), "not_before": NOW - 3600,
            "not_after": NOW + 7200, "issuer": "cd".repeat(32)});
        let one = of(json!({"certificate": certificate, "groups": ["ns:shop", "web"], "overlay": ["10.1.0.7/16"]}));
        let silent = of(Value::Null);
        let text = table(&[silent, one], true, NOW);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("n1    shop/web  -") && lines[1].contains(UNKNOWN), "{text}");
        for part in ["in 2h 0m", "due in 1h 0m", "web.shop.pod", "10.1.0.7/16", "ns:shop web", "1h 0m ago"] {
            assert!(lines[2].contains(part), "{part}: {text}");
        }
        assert!(lines[2].contains(&"ab".repeat(32)) && lines[2].contains(&"cd".repeat(32)), "{text}");
        assert_eq!(lines[4], "shop/web: what its instance says is no status");
    }
}
