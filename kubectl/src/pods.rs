//! `kubectl nebula pods`: the pods that have a tunnel, or should have one.

use nebula_cni_contract::agent_api::{PODS_PATH, PodState, PodStates};
use nebula_cni_contract::clock::{Clock, SystemClock};

use crate::agents::{Agents, remarks};
use crate::outcome::{Outcome, ToolError};
use crate::shown::{Printer, shown};

pub(crate) async fn run(agents: &Agents<'_>, printer: &mut Printer<'_>) -> Result<Outcome, ToolError> {
    let path = match &agents.cluster.namespace {
        Some(namespace) => format!("{PODS_PATH}?namespace={namespace}"),
        None => PODS_PATH.to_owned(),
    };
    let answers = agents.ask::<PodStates>(&agents.all, "GET", &path).await;
    let mut pods: Vec<PodState> = Vec::new();
    let mut failed = Vec::new();
    for (node, answer) in &answers {
        match answer {
            Ok(states) => {
                pods.extend(states.pods.iter().map(|pod| PodState { node: Some(node.clone()), ..pod.clone() }))
            }
            Err(error) => failed.push((node.as_str(), error)),
        }
    }
    pods.sort_by(|a, b| (&a.pod, &a.node, &a.network).cmp(&(&b.pod, &b.node, &b.network)));
    if !printer.is_table() {
        printer.documents(&pods)?;
    } else if pods.is_empty() {
        let place = agents.cluster.namespace.as_ref().map_or_else(String::new, |namespace| format!(" in {namespace}"));
        printer.note(&format!("No pod{place} has a tunnel, or should have one, as far as the agents answer."))?;
    } else {
        let visible: Vec<PodState> = pods.iter().map(shown).collect::<Result<_, _>>()?;
        printer.text(&PodState::table(&visible, SystemClock.unix_seconds()))?;
    }
    for line in remarks(failed.iter().copied()) {
        printer.note(&line)?;
    }
    let has_findings = pods.iter().any(|pod| pod.is_unprotected || !pod.is_well());
    Ok(Outcome::findings(has_findings).and(if failed.is_empty() { Outcome::Fine } else { Outcome::Failed }))
}
