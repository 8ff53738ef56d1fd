//! Asks the agents while somebody looks: for the records that came since, and for how their nodes stand.

use std::convert::Infallible;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use nebula_cni_contract::agent_api::{FLOWS_PATH, NodeStatus, STATUS_PATH, change_texts};
use nebula_cni_contract::clock::{Clock, SystemClock};
use tokio::time::Instant;

use super::held::MOST;
use super::view::View;
use crate::agents::{Agent, AgentError, Agents};
use crate::cli::Place;
use crate::cluster::Cluster;
use crate::flows;
use crate::identity::Role;
use crate::outcome::ToolError;

/// The agents, found again from time to time: nodes come and go.
pub(super) struct Found<'a> {
    cluster: &'a Cluster,
    place: &'a Place,
    role: Role,
    agents: Option<(Agents<'a>, Instant)>,
}

impl<'a> Found<'a> {
    pub(super) fn new(cluster: &'a Cluster, place: &'a Place, role: Role) -> Self {
        Self { cluster, place, role, agents: None }
    }

    pub(super) async fn agents(&mut self) -> Result<&Agents<'a>, ToolError> {
        let now = Instant::now();
        let known = self.agents.take().filter(|(_, found)| now < *found + FOUND_FOR);
        let known = match known {
            Some(known) => known,
            None => (Agents::find(self.cluster, self.place, self.role).await?, now),
        };
        Ok(&self.agents.insert(known).0)
    }
}

/// Keeps the records up to date.
pub(super) async fn records(mut found: Found<'_>, view: &View) -> Infallible {
    loop {
        view.records_demand.wanted().await;
        let agents = match found.agents().await {
            Ok(agents) => agents,
            Err(error) => {
                view.records().failed(error.to_string());
                view.records_demand.answered();
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        view.records().expect(&agents.all.iter().map(|agent| agent.node.as_str()).collect::<Vec<_>>());
        let limit = (MOST / agents.all.len().max(1)).clamp(FEWEST, MOST_OF_ONE);
        let asked = stream::iter(&agents.all).map(|agent| ask_one(agents, agent, limit, view));
        asked.buffer_unordered(AT_A_TIME).collect::<()>().await;
        tokio::time::sleep(pause(agents.all.len())).await;
    }
}

async fn ask_one(agents: &Agents<'_>, agent: &Agent, limit: usize, view: &View) {
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.append_pair("limit", &limit.to_string());
    query.append_pair("after", &view.records().newest(&agent.node).to_string());
    if let Some(namespace) = &view.scope {
        query.append_pair("namespace", namespace);
    }
    let path = format!("{FLOWS_PATH}?{}", query.finish());
    let now_ms = now_ms();
    let mut room = limit;
    let take = |record| {
        // An agent that sends more than it was asked for does not push out what others sent.
        if room > 0 {
            room -= 1;
            view.records().take(&agent.node, record, now_ms);
        }
    };
    let asked = tokio::time::timeout(ANSWERS_WITHIN, flows::all(agents, agent, &path, take)).await;
    view.records().answered(&agent.node, asked.unwrap_or(Err(AgentError::CutOff)));
    view.records_demand.answered();
}

/// Keeps the nodes up to date.
pub(super) async fn nodes(mut found: Found<'_>, view: &View) -> Infallible {
    loop {
        view.nodes_demand.wanted().await;
        let agents = match found.agents().await {
            Ok(agents) => agents,
            Err(error) => {
                view.nodes().error = Some(error.to_string());
                view.nodes_demand.answered();
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let answers = agents.ask::<NodeStatus>(&agents.all, "GET", STATUS_PATH).await;
        {
            let mut nodes = view.nodes();
            nodes.known = answers.into_iter().map(|(node, answer)| (node, answer.and_then(bounded))).collect();
            nodes.as_of_ms = now_ms();
            nodes.error = None;
        }
        view.nodes_demand.answered();
        tokio::time::sleep(pause(agents.all.len())).await;
    }
}

/// A status whose lists and texts have the lengths that an agent of ours gives them.
fn bounded(mut status: NodeStatus) -> Result<NodeStatus, AgentError> {
    status.parts.truncate(MOST_PARTS);
    status.upgrade.under_way.truncate(MOST_PODS);
    status.upgrade.failed.truncate(MOST_PODS);
    let mut clip = |text: &str| text[..text.floor_char_boundary(MOST_TEXT)].to_owned();
    change_texts(&status, &mut clip).map_err(|_| AgentError::Odd)
}

/// Between two looks: agents are asked by at most 20 requests a second.
fn pause(agents: usize) -> Duration {
    PAUSE + Duration::from_millis(50) * u32::try_from(agents).unwrap_or(u32::MAX)
}

pub(super) fn now_ms() -> u64 {
    u64::try_from(SystemClock.unix_seconds()).unwrap_or_default() * 1000
}

const PAUSE: Duration = Duration::from_secs(3);
const FOUND_FOR: Duration = Duration::from_secs(60);
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
const AT_A_TIME: usize = 16;
/// Records of one node at a time.
const FEWEST: usize = 200;
const MOST_OF_ONE: usize = 10_000;
const MOST_PARTS: usize = 64;
const MOST_PODS: usize = 100;
const MOST_TEXT: usize = 1000;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::agent_api::{PartState, UpgradeState};

    use super::*;

    #[test]
    fn a_status_is_bounded() {
        let part = PartState { name: "é".repeat(4000), ..PartState::default() };
        let upgrade = UpgradeState { under_way: vec!["a/b".to_owned(); 5000], ..UpgradeState::default() };
        let status = NodeStatus { parts: vec![part; 1000], upgrade, ..NodeStatus::default() };
        let status = bounded(status).unwrap();
        assert_eq!((status.parts.len(), status.parts[0].name.len()), (MOST_PARTS, MOST_TEXT));
        assert_eq!(status.upgrade.under_way.len(), MOST_PODS);
    }

    #[test]
    fn larger_clusters_are_asked_more_seldom() {
        assert_eq!([1, 1000].map(pause), [Duration::from_millis(3050), Duration::from_secs(53)]);
    }
}
