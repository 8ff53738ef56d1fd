//! Findings about pods: how each stands by the last look at the node, and what its instance says now.

use nebula_cni_contract::agent_api::{Finding, PodState};
use nebula_cni_contract::columns::span;
use nebula_cni_contract::instance_status::{Certificate, InstanceState, Status, TableState};

use super::peers::of_trouble;
use super::with_reason;
use crate::cluster::notice::{CLOSED_ADVICE, next_step, stranded_advice};
use crate::config::Unprotected;
use crate::reconcile::old_settings::ADVICE;
use crate::reconcile::plan::{Protection, Reason, Stand};

/// Findings about pods that run, in `stands`, and about those with a record, in `pods`, as their instances answer.
pub(crate) fn of_pods<'a>(
    stands: impl Iterator<Item = &'a Stand>,
    pods: &[PodState],
    policy: Unprotected,
    now: i64,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut is_said: Vec<String> = Vec::new();
    for stand in stands {
        let about = format!("{}/{}", stand.pod.namespace, stand.pod.name);
        let answers = pods.iter().any(|pod| pod.pod == about && pod.status.is_object());
        if let Some(finding) =
            of_stand(&about, &stand.protection, policy).filter(|_| !is_over(&stand.protection, answers))
        {
            findings.push(finding);
            is_said.push(about);
        }
    }
    for pod in pods {
        findings.extend(of_instance(pod, is_said.contains(&pod.pod), now));
    }
    findings
}

/// Whether the instance did not answer when the agent looked, and does now.
fn is_over(protection: &Protection, answers: bool) -> bool {
    answers && matches!(protection, Protection::Unprotected(Reason::NoInstance))
}

fn of_stand(about: &str, protection: &Protection, policy: Unprotected) -> Option<Finding> {
    Some(match protection {
        Protection::Unprotected(reason) => {
            let cause = format!("it is enrolled and runs without a tunnel: {reason}");
            Finding::error(about, "unprotected", cause, next_step(policy))
        }
        Protection::CrashLooping { restarts, delay } => {
            let cause = format!("the instance of its tunnel keeps dying ({restarts} restarts in a row)");
            let remedy = format!(
                "It is started again every {delay} s. See its log on the node (with systemd the journal of its unit \
                 nebula-pod-*, else the .log beside its record in /run/nebula-cni)."
            );
            Finding::error(about, "crash_looping", cause, remedy)
        }
        Protection::Stranded(why) => {
            let cause = format!("it has lost its certificate, or never got it: {why}");
            Finding::error(about, "stranded", cause, stranded_advice(*why))
        }
        Protection::Undecided(why) => {
            let cause = format!("it is not known whether it is as it should be: {why}");
            Finding::warning(about, "undecided", cause, UNDECIDED_ADVICE)
        }
        // Its instance says more.
        Protection::Waiting(_) | Protection::Closed(_) | Protection::Protected => return None,
        Protection::NotEnrolled | Protection::OptedOut => return None,
    })
}

/// What the document of an instance shows. `is_said`: that its pod has no open tunnel is a finding already.
fn of_instance(pod: &PodState, is_said: bool, now: i64) -> Vec<Finding> {
    let about = &pod.pod;
    let Ok(status) = serde_json::from_value::<Status>(pod.status.clone()) else {
        let why = pod.problem.as_deref().unwrap_or("what it says is no status");
        let silent =
            Finding::error(about, "no_answer", with_reason("its instance does not answer", why), SILENT_ADVICE);
        return if is_said { Vec::new() } else { vec![silent] };
    };
    let why = status.last_error.as_deref().unwrap_or_default();
    let advice = if status.denied { DENIED_ADVICE } else { CA_ADVICE };
    let mut findings = Vec::new();
    match status.state {
        InstanceState::Waiting if !is_said => {
            let code = if status.denied { "certificate_denied" } else { "no_certificate" };
            let cause = with_reason("it waits for its certificate, and its tunnel is closed meanwhile", why);
            findings.push(Finding::error(about, code, cause, advice));
        }
        InstanceState::Closed if !is_said => {
            let why = status.closed.as_deref().unwrap_or(why);
            findings.push(Finding::error(
                about,
                "tunnel_closed",
                with_reason("its tunnel is closed", why),
                CLOSED_ADVICE,
            ));
        }
        _ => {}
    }
    if let Some(certificate) = &status.certificate {
        let is_provisional = status.state == InstanceState::Provisional;
        findings.extend(of_certificate(about, certificate, (why, advice), is_provisional, now));
    }
    findings.extend(of_table(about, &status));
    if let Some(settings) = &status.settings {
        if let Some(why) = &settings.refused {
            let cause = format!("it goes on with settings from before, for it refuses those that came last: {why}");
            findings.push(Finding::warning(
                about,
                "settings_refused",
                cause,
                "Correct the chain entry (agent.entry in the chart).",
            ));
        }
        if !settings.at_the_next_start.is_empty() {
            let keys: Vec<_> = settings.at_the_next_start.iter().take(MOST_KEYS).map(String::as_str).collect();
            let cause = format!("it runs with old settings, changed since: {}", keys.join(", "));
            findings.push(Finding::warning(about, "old_settings", cause, with_capital(ADVICE)));
        }
    }
    findings.extend(status.trouble.iter().flat_map(|trouble| of_trouble(about, trouble)));
    findings
}

/// `failed`: why the last request failed, if it did, and what to do then.
fn of_certificate(
    about: &str,
    certificate: &Certificate,
    (why, advice): (&str, &str),
    is_provisional: bool,
    now: i64,
) -> Option<Finding> {
    let left = certificate.not_after.saturating_sub(now);
    if certificate.not_before > now.saturating_add(MOST_AHEAD) {
        let ahead = span(certificate.not_before - now);
        let cause = format!("its certificate is valid only in {ahead}: the clock of the node is behind");
        return Some(Finding::error(about, "not_yet_valid", cause, "Set the clock of the node (timedatectl)."));
    }
    if left <= 0 {
        return Some(Finding::error(
            about,
            "certificate_expired",
            with_reason("its certificate has expired", why),
            advice,
        ));
    }
    // A provisional one is replaced, not renewed.
    if is_provisional {
        let cause = with_reason("it has a provisional certificate, without groups", why);
        return (!why.is_empty()).then(|| Finding::warning(about, "provisional", cause, advice));
    }
    let not_renewed = format!("its certificate expires in {} and is not renewed", span(left));
    if left < certificate.warning_time() {
        return Some(Finding::error(about, "certificate_expiring", with_reason(&not_renewed, why), advice));
    }
    (!why.is_empty()).then(|| Finding::warning(about, "renewal_failing", with_reason(&not_renewed, why), advice))
}

fn of_table(about: &str, status: &Status) -> Option<Finding> {
    let table = status.table.as_ref()?;
    let why = table.problem.as_deref().unwrap_or_default();
    match table.state {
        TableState::Missing => {
            let cause = with_reason("it has no cluster table, so what it sends to pods and Services is dropped", why);
            Some(Finding::error(about, "table_missing", cause, TABLE_ADVICE))
        }
        TableState::Kept => {
            let cause = with_reason("it goes on with a cluster table from before, for the new one cannot be used", why);
            Some(Finding::warning(about, "table_kept", cause, TABLE_ADVICE))
        }
        TableState::Used | TableState::Unknown => {
            let why = table.closed.as_ref()?;
            let cause = format!("nothing passes, since its network policies cannot be judged: {why}");
            Some(Finding::error(about, "policies_closed", cause, POLICY_ADVICE))
        }
    }
}

fn with_capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect::<String>() + ".").unwrap_or_default()
}

const UNDECIDED_ADVICE: &str =
    "See whether the API server answers the agent, and whether the agent is as new as the pod's instance.";
const SILENT_ADVICE: &str = "The agent restarts an instance that has died, and replaces one that is silent for 90 s. If this stays, see \
                             its log on the node (journal of its unit nebula-pod-*, or the .log beside its record).";
const DENIED_ADVICE: &str = "The CA refuses it: its policy (nebula-ca policy check) and its audit log say why.";
const CA_ADVICE: &str = "See whether the CA runs and answers this node (kubectl nebula check), and what its log says.";
const TABLE_ADVICE: &str =
    "See the condition table of the node (kubectl nebula status -o wide), and the log of its agent.";
const POLICY_ADVICE: &str = "See the condition policies of the node (kubectl nebula status -o wide).";
/// In seconds. Certificates are backdated, so clocks may differ a little.
const MOST_AHEAD: i64 = 30;
const MOST_KEYS: usize = 10;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::agent_api::Severity;
    use nebula_cni_contract::launch::Pod;
    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::plan::Stranded;

    const NOW: i64 = 100_000;

    fn pod(status: Value) -> PodState {
        PodState { pod: "shop/web".into(), status, ..PodState::default() }
    }

    fn stand(protection: Protection) -> Stand {
        let pod = Pod { namespace: "shop".into(), name: "web".into(), uid: "u".into() };
        Stand { sandbox: "s".into(), pod, protection }
    }

    fn codes(protection: Protection, status: Value) -> Vec<(String, Severity)> {
        let found = of_pods([stand(protection)].iter(), &[pod(status)], Unprotected::Attach, NOW);
        assert!(found.iter().all(|found| found.about == "shop/web" && !found.remedy.is_empty()), "{found:?}");
        found.into_iter().map(|found| (found.code, found.severity)).collect()
    }

    #[test]
    fn each_trouble_of_an_instance_has_its_code_and_one_that_is_well_has_none() {
        let certificate = |before: i64, after: i64| json!({"not_before": NOW + before, "not_after": NOW + after});
        let day = || certificate(-3600, 82_800);
        let (error, warning) = (Severity::Error, Severity::Warning);
        for (status, expected) in [
            (json!({"state": "running", "certificate": day()}), None),
            (json!({"state": "waiting"}), Some(("no_certificate", error))),
            (json!({"state": "waiting", "denied": true, "last_error": "no"}), Some(("certificate_denied", error))),
            (json!({"state": "closed", "closed": "it was revoked"}), Some(("tunnel_closed", error))),
            (json!({"state": "running", "certificate": certificate(-86_400, 0)}), Some(("certificate_expired", error))),
            (
                json!({"state": "running", "certificate": certificate(-82_801, 3599)}),
                Some(("certificate_expiring", error)),
            ),
            (json!({"state": "running", "certificate": certificate(-3000, 1200)}), None),
            (
                json!({"state": "running", "certificate": day(), "last_error": "away"}),
                Some(("renewal_failing", warning)),
            ),
            (json!({"state": "running", "certificate": certificate(600, 86_400)}), Some(("not_yet_valid", error))),
            (json!({"state": "provisional", "certificate": day()}), None),
            (json!({"state": "provisional", "certificate": day(), "last_error": "no"}), Some(("provisional", warning))),
            (json!({"state": "running", "table": {"state": "missing"}}), Some(("table_missing", error))),
            (
                json!({"state": "running", "table": {"state": "kept", "problem": "is torn"}}),
                Some(("table_kept", warning)),
            ),
            (json!({"state": "running", "table": {"state": "used"}}), None),
            (json!({"state": "running", "table": {"state": "used", "closed": "x"}}), Some(("policies_closed", error))),
            (json!({"state": "running", "settings": {"refused": "mtu"}}), Some(("settings_refused", warning))),
            (json!({"state": "running", "settings": {"at_the_next_start": ["a"]}}), Some(("old_settings", warning))),
            (json!({"state": "resting"}), None),
            (Value::Null, Some(("no_answer", error))),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(code, severity)| (code.to_owned(), severity)).collect();
            assert_eq!(codes(Protection::Protected, status.clone()), expected, "{status}");
        }
    }

    #[test]
    fn what_the_agent_saw_is_said_once_and_not_if_it_is_over() {
        let running = || json!({"state": "running"});
        let alone =
            |protection, status| codes(protection, status).into_iter().map(|(code, _)| code).collect::<Vec<_>>();
        let no_instance = Protection::Unprotected(Reason::NoInstance);
        assert_eq!(alone(no_instance.clone(), Value::Null), ["unprotected"]);
        assert!(alone(no_instance, running()).is_empty(), "it answers by now");
        assert_eq!(alone(Protection::Stranded(Stranded::NoInit), json!({"state": "waiting"})), ["stranded"]);
        assert_eq!(alone(Protection::CrashLooping { restarts: 7, delay: 16 }, Value::Null), ["crash_looping"]);
        assert_eq!(alone(Protection::Undecided("no API".into()), running()), ["undecided"]);
        for outside in [Protection::NotEnrolled, Protection::OptedOut, Protection::Waiting("x".into())] {
            assert!(alone(outside, running()).is_empty());
        }
    }
}
