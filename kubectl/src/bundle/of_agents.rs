//! What agents say: nodes, pods, findings, upgrades, and flows that were refused.

use std::collections::BTreeSet;
use std::slice;

use futures_util::{StreamExt, stream};
use nebula_cni_contract::agent_api::{
    Finding, Findings, NodeStatus, PODS_PATH, PodState, PodStates, STATUS_PATH, UPGRADE_PATH, UpgradeState,
};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::flow_records::{Filter, FlowRecord};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::contents::Contents;
use crate::agents::{Agent, AgentError, Agents};
use crate::cli::Place;
use crate::doctor::Scope;
use crate::flows;
use crate::outcome::ToolError;
use crate::shown::Printer;

/// What an agent says, and its node.
#[derive(Debug, Serialize)]
struct OfNode<T> {
    node: String,
    #[serde(flatten)]
    said: T,
}

pub(super) async fn collect(
    agents: &Agents<'_>,
    place: &Place,
    contents: &mut Contents,
    printer: &mut Printer<'_>,
) -> Result<(), ToolError> {
    let namespace = place.namespace.as_deref();
    printer.note(&format!("asking {} agents about nodes and upgrades", agents.all.len()))?;
    let nodes = ask::<NodeStatus>(agents, STATUS_PATH, "nodes.jsonl", contents).await;
    contents.documents("nodes.jsonl", &nodes.into_iter().map(|(_, status)| status).collect::<Vec<_>>());
    let upgrades = ask::<UpgradeState>(agents, UPGRADE_PATH, "upgrades.jsonl", contents).await;
    let upgrades: Vec<_> = upgrades.into_iter().map(|(node, said)| OfNode { node, said }).collect();
    contents.documents("upgrades.jsonl", &upgrades);
    printer.note("asking agents about pods, and what is wrong")?;
    let path = namespace.map_or_else(|| PODS_PATH.to_owned(), |namespace| format!("{PODS_PATH}?namespace={namespace}"));
    let states = ask::<PodStates>(agents, &path, "pods.jsonl", contents).await;
    let pods = states.into_iter().flat_map(|(node, states)| {
        states.pods.into_iter().map(move |pod| PodState { node: Some(node.clone()), ..pod })
    });
    contents.documents("pods.jsonl", &pods.collect::<Vec<_>>());
    let path = Scope::of_namespace(namespace).path();
    let found = ask::<Findings>(agents, &path, "doctor.jsonl", contents).await;
    let findings = found.into_iter().flat_map(|(node, found)| {
        found.findings.into_iter().map(move |finding| Finding { node: Some(node.clone()), ..finding })
    });
    contents.documents("doctor.jsonl", &findings.collect::<Vec<_>>());
    printer.note("asking agents for refused flows")?;
    let path = flows::path(&refused(namespace), FLOWS_OF_NODE);
    let each = async |agent: &Agent| {
        let mut records = Vec::new();
        // More than was asked for is not what an agent answers.
        let take = |record| records.extend(Some(record).filter(|_| records.len() < FLOWS_OF_NODE as usize));
        let state = flows::all(agents, agent, &path, take).await;
        (records, state.err())
    };
    let records: Vec<(String, FlowRecord)> = of_each(agents, "flows-refused.jsonl", contents, each).await;
    let records: Vec<_> = records.into_iter().map(|(node, said)| OfNode { node, said }).collect();
    contents.documents("flows-refused.jsonl", &records);
    Ok(())
}

async fn ask<T: DeserializeOwned>(
    agents: &Agents<'_>,
    path: &str,
    file: &str,
    contents: &mut Contents,
) -> Vec<(String, T)> {
    let each = async |agent: &Agent| match agents.ask::<T>(slice::from_ref(agent), "GET", path).await.pop() {
        Some((_, Ok(said))) => (vec![said], None),
        Some((_, Err(error))) => (Vec::new(), Some(error)),
        None => (Vec::new(), None),
    };
    of_each(agents, file, contents, each).await
}

/// Asks some agents at a time, in a part of the time that is left. Answers are sorted by node; nodes without a complete
/// answer are noted.
async fn of_each<T>(
    agents: &Agents<'_>,
    file: &str,
    contents: &mut Contents,
    each: impl AsyncFn(&Agent) -> (Vec<T>, Option<AgentError>),
) -> Vec<(String, T)> {
    let asked = stream::iter(&agents.all).map(async |agent: &Agent| (agent.node.clone(), each(agent).await));
    let over = tokio::time::sleep(contents.left() / PARTS);
    let mut asked = std::pin::pin!(asked.buffer_unordered(AT_A_TIME).take_until(over));
    let (mut answers, mut late) = (Vec::new(), agents.all.iter().map(|agent| &agent.node).collect::<BTreeSet<_>>());
    while let Some((node, (said, error))) = asked.next().await {
        late.remove(&node);
        if let Some(error) = error {
            contents.missing(file, &format!("{node}: {error}"));
        }
        answers.extend(said.into_iter().map(|said| (node.clone(), said)));
    }
    for node in late {
        contents.missing(file, &format!("{node}: no answer in the time that there was (--within)"));
    }
    answers.sort_by(|(a, _), (b, _)| a.cmp(b));
    answers
}

fn refused(namespace: Option<&str>) -> Filter {
    let now_ms = u64::try_from(SystemClock.unix_seconds()).unwrap_or_default() * 1000;
    Filter {
        namespace: namespace.map(str::to_owned),
        verdict: Some("refused".to_owned()),
        since_ms: Some(now_ms.saturating_sub(SINCE_MS)),
        ..Filter::default()
    }
}

/// So a node that hangs takes no more than a third of the time from what follows.
const PARTS: u32 = 3;
const AT_A_TIME: usize = 16;
const FLOWS_OF_NODE: u32 = 200;
const SINCE_MS: u64 = 3600 * 1000;
