//! `kubectl nebula status`: how the nodes stand.

use std::fmt::Write as _;
use std::time::Duration;

use nebula_cni_contract::agent_api::{NodeStatus, PartState, STATUS_PATH, parts_table};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::columns::{columns, or_dash, span};

use crate::agents::{AgentError, Agents, remarks};
use crate::cli::Status;
use crate::outcome::{Outcome, ToolError};
use crate::shown::{Printer, shown};

type Answers = Vec<(String, Result<NodeStatus, AgentError>)>;

pub(crate) async fn run(
    agents: &Agents<'_>,
    options: &Status,
    printer: &mut Printer<'_>,
) -> Result<Outcome, ToolError> {
    loop {
        let answers: Answers = agents.ask(&agents.all, "GET", STATUS_PATH).await;
        if options.watch && printer.is_watched() {
            // Begins at the top of an empty screen.
            printer.text("\u{1b}[H\u{1b}[2J")?;
        }
        let outcome = show(&answers, printer)?;
        if !options.watch {
            return Ok(outcome);
        }
        tokio::time::sleep(Duration::from_secs(options.interval.into())).await;
    }
}

fn show(answers: &Answers, printer: &mut Printer<'_>) -> Result<Outcome, ToolError> {
    let mut known = Vec::new();
    for (_, answer) in answers {
        known.extend(answer.as_ref().ok());
    }
    let failed: Vec<_> =
        answers.iter().filter_map(|(node, answer)| Some((node.as_str(), answer.as_ref().err()?))).collect();
    let now = SystemClock.unix_seconds();
    if printer.is_table() {
        let visible: Vec<NodeStatus> = known.iter().map(|status| shown(*status)).collect::<Result<_, _>>()?;
        printer.text(&table(&visible, &failed, printer.is_wide(), now))?;
    } else {
        printer.documents(&known)?;
    }
    for line in remarks(failed.iter().copied()) {
        printer.note(&line)?;
    }
    let has_findings = known.iter().any(|status| has_findings(status, now));
    Ok(Outcome::findings(has_findings).and(if failed.is_empty() { Outcome::Fine } else { Outcome::Failed }))
}

/// Whether something is not as it should be.
pub(crate) fn has_findings(status: &NodeStatus, now: i64) -> bool {
    let is_expired = status.first_to_expire.as_ref().is_some_and(|first| first.not_after <= now);
    let has_failed = status.upgrade.paused.as_ref().is_some_and(|pause| !pause.by_operator);
    !status.is_ready || status.pods.unprotected > 0 || is_expired || has_failed || !status.upgrade.failed.is_empty()
}

fn table(known: &[NodeStatus], failed: &[(&str, &AgentError)], is_wide: bool, now: i64) -> String {
    let mut rows: Vec<[String; 8]> = known
        .iter()
        .map(|status| {
            let first = status.first_to_expire.as_ref();
            let pods = &status.pods;
            [
                status.node.clone(),
                or_dash(&status.version),
                if status.is_ready { "yes" } else { "NO" }.to_owned(),
                pods.protected.to_string(),
                pods.unprotected.to_string(),
                pods.closed.to_string(),
                first
                    .map_or_else(|| "-".to_owned(), |first| format!("{} {}", expires(first.not_after, now), first.pod)),
                or_dash(&status.upgrade.stage),
            ]
        })
        .collect();
    rows.extend(failed.iter().map(|(node, _)| {
        let [unknown, nothing] = ["no answer", "-"].map(str::to_owned);
        let node = nebula_cert::visible(node).into_owned();
        [node, unknown, nothing.clone(), nothing.clone(), nothing.clone(), nothing.clone(), nothing.clone(), nothing]
    }));
    rows.sort();
    let head =
        ["NODE", "AGENT", "READY", "PROTECTED", "UNPROTECTED", "CLOSED", "FIRST CERTIFICATE TO EXPIRE", "UPGRADE"];
    let mut text = columns(head, rows);
    for status in known {
        let parts: Vec<PartState> = status.parts.iter().filter(|part| is_wide || !part.ok).cloned().collect();
        if !parts.is_empty() {
            let _ = write!(text, "\n{}:\n{}", status.node, parts_table(&parts));
        }
    }
    let sum = |count: fn(&NodeStatus) -> usize| known.iter().map(count).sum::<usize>();
    let (protected, unprotected) = (sum(|status| status.pods.protected), sum(|status| status.pods.unprotected));
    let all = known.len() + failed.len();
    let _ = writeln!(
        text,
        "\n{} of {all} agents answer; {protected} pods are protected, {unprotected} run without protection.",
        known.len()
    );
    text
}

fn expires(not_after: i64, now: i64) -> String {
    if not_after <= now { "EXPIRED".to_owned() } else { format!("in {}", span(not_after - now)) }
}

#[cfg(test)]
mod tests {
    use nebula_cni_contract::agent_api::{ExpiringCertificate, PodCounts, UpgradePause, UpgradeState};

    use super::*;

    fn status() -> NodeStatus {
        NodeStatus {
            node: "n1".to_owned(),
            version: "0.1.0".to_owned(),
            is_ready: true,
            parts: vec![PartState { name: "ca".to_owned(), ok: true, ..PartState::default() }],
            pods: PodCounts { protected: 3, ..PodCounts::default() },
            first_to_expire: Some(ExpiringCertificate { pod: "shop/web".to_owned(), not_before: 0, not_after: 8000 }),
            cas: Vec::new(),
            upgrade: UpgradeState { stage: "current".to_owned(), ..UpgradeState::default() },
        }
    }

    #[test]
    fn a_node_that_does_not_answer_has_its_row_and_counts() {
        let bad =
            PartState { name: "ca".into(), reason: "is away".into(), advice: "look".into(), ..PartState::default() };
        let second = NodeStatus { node: "n3".into(), is_ready: false, parts: vec![bad], ..status() };
        let text = table(&[status(), second], &[("n2", &AgentError::NoApi)], false, 0);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[1].split_whitespace().collect::<Vec<_>>().join(" "),
            "n1 0.1.0 yes 3 0 0 in 2h 13m shop/web current"
        );
        assert!(lines[2].starts_with("n2    no answer"), "{text}");
        assert_eq!(&lines[4..7], ["", "n3:", "ca           missing  is away"]);
        assert!(text.ends_with("2 of 3 agents answer; 6 pods are protected, 0 run without protection.\n"), "{text}");
    }

    #[test]
    fn what_is_not_as_it_should_be_is_a_finding() {
        assert!(!has_findings(&status(), 0));
        assert!(has_findings(&status(), 8000), "a certificate has expired");
        let pause = |by_operator| {
            let paused = Some(UpgradePause { by_operator, ..UpgradePause::default() });
            NodeStatus { upgrade: UpgradeState { paused, ..UpgradeState::default() }, ..status() }
        };
        assert_eq!([pause(true), pause(false)].map(|status| has_findings(&status, 0)), [false, true]);
        let pods = PodCounts { unprotected: 1, ..PodCounts::default() };
        assert!(has_findings(&NodeStatus { pods, ..status() }, 0));
        assert!(has_findings(&NodeStatus { is_ready: false, ..status() }, 0));
    }
}
