//! `kubectl nebula upgrade`: how far the installed program has reached the instances of each node.

use nebula_cni_contract::agent_api::{PAUSE_PATH, RESUME_PATH, UPGRADE_PATH, UpgradeState};
use nebula_cni_contract::columns::columns;
use serde::Serialize;

use crate::agents::{Agent, AgentError, Agents, remarks};
use crate::cli::{Upgrade, UpgradeVerb};
use crate::outcome::{Outcome, ToolError};
use crate::shown::{Printer, shown};

/// The document of one node.
#[derive(Debug, Serialize)]
struct OfNode<'a> {
    node: &'a str,
    #[serde(flatten)]
    state: &'a UpgradeState,
}

pub(crate) async fn run(
    agents: &Agents<'_>,
    options: &Upgrade,
    printer: &mut Printer<'_>,
) -> Result<Outcome, ToolError> {
    let (method, path, nodes) = match &options.verb {
        UpgradeVerb::Status { nodes } => ("GET", UPGRADE_PATH, nodes),
        UpgradeVerb::Pause { nodes } => ("POST", PAUSE_PATH, nodes),
        UpgradeVerb::Resume { nodes } => ("POST", RESUME_PATH, nodes),
    };
    let is_wanted = |agent: &&Agent| nodes.is_empty() || nodes.contains(&agent.node);
    let wanted: Vec<Agent> = agents.all.iter().filter(is_wanted).cloned().collect();
    let answers = agents.ask::<UpgradeState>(&wanted, method, path).await;
    let known: Vec<_> = answers.iter().filter_map(|(node, answer)| Some((node, answer.as_ref().ok()?))).collect();
    if printer.is_table() {
        let known: Vec<_> = known
            .iter()
            .map(|(node, state)| Ok((nebula_cert::visible(node).into_owned(), shown(*state)?)))
            .collect::<Result<_, ToolError>>()?;
        printer.text(&table(&known))?;
    } else {
        printer.documents(&known.iter().map(|(node, state)| OfNode { node, state }).collect::<Vec<_>>())?;
    }
    let failed: Vec<(&str, &AgentError)> =
        answers.iter().filter_map(|(node, answer)| Some((node.as_str(), answer.as_ref().err()?))).collect();
    for line in remarks(failed.iter().copied()) {
        printer.note(&line)?;
    }
    let unknown: Vec<_> = nodes.iter().filter(|node| !agents.all.iter().any(|agent| agent.node == **node)).collect();
    for node in &unknown {
        printer.note(&format!("{node}: no agent of Nebula is on such a node"))?;
    }
    let is_whole = failed.is_empty() && unknown.is_empty();
    let has_failures = known.iter().any(|(_, state)| !state.failed.is_empty());
    Ok(Outcome::findings(has_failures).and(if is_whole { Outcome::Fine } else { Outcome::Failed }))
}

fn table(known: &[(String, UpgradeState)]) -> String {
    let rows = known.iter().map(|(node, state)| {
        [
            node.clone(),
            state.stage.clone(),
            state.instances.to_string(),
            state.outdated.to_string(),
            state.upgraded.to_string(),
            state.rolled_back.to_string(),
            state.program_words(),
            state.why.clone(),
        ]
    });
    let head = ["NODE", "STAGE", "INSTANCES", "OUTDATED", "UPGRADED", "ROLLED BACK", "PROGRAM", "WHY"];
    let mut text = columns(head, rows);
    let failed = known.iter().flat_map(|(node, state)| {
        state
            .failed
            .iter()
            .map(move |one| [node.clone(), one.pod.clone(), one.outcome.replace('_', " "), one.why.clone()])
    });
    let failed: Vec<_> = failed.collect();
    if !failed.is_empty() {
        text = text + "\n" + &columns(["NODE", "POD", "UPGRADE", "REASON"], failed);
    }
    text
}

#[cfg(test)]
mod tests {
    use nebula_cni_contract::agent_api::FailedUpgrade;

    use super::*;

    #[test]
    fn each_node_has_a_row_and_each_failure_its_reason() {
        let failed = FailedUpgrade { pod: "shop/web".into(), outcome: "rolled_back".into(), why: "it crashed".into() };
        let state = UpgradeState {
            stage: "paused".into(),
            why: "paused for 3 min".into(),
            program: Some("ab".repeat(32)),
            instances: 4,
            outdated: 2,
            failed: vec![failed],
            ..UpgradeState::default()
        };
        let text = table(&[("n1".to_owned(), state)]);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["n1", "paused", "4", "2", "0", "0", "abababababab", "paused", "for", "3", "min"]);
        assert_eq!(lines[4], ["n1", "shop/web", "rolled", "back", "it", "crashed"]);
    }
}
