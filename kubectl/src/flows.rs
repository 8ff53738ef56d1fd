//! `kubectl nebula flows`: the flow records of all nodes, in the order of time.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use http_body_util::BodyStream;
use kube::client::Body;
use nebula_cni_contract::agent_api::{FLOWS_PATH, FlowLine, FlowsState, MAX_LINE};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::flow_records::{self, Filter, FlowRecord};
use serde::Serialize;
use tokio::sync::mpsc;

use crate::agents::{Agent, AgentError, Agents, remarks};
use crate::cli::Flows;
use crate::outcome::{Outcome, ToolError};
use crate::shown::{Printer, shown};

/// A record, and the node that wrote it.
#[derive(Debug, Clone, Serialize)]
struct OfNode {
    node: String,
    #[serde(flatten)]
    record: FlowRecord,
}

pub(crate) async fn run(agents: &Agents<'_>, options: &Flows, printer: &mut Printer<'_>) -> Result<Outcome, ToolError> {
    let mut wanted = Wanted::of(agents, options, SystemClock.unix_seconds());
    let asked = stream::iter(&agents.all).map(|agent| {
        let path = wanted.path(0, false);
        async move {
            let mut found = Vec::new();
            let take = |record| found.extend(Some(record).filter(|_| found.len() < MOST));
            let state = all(agents, agent, &path, take).await;
            (agent, (found, state))
        }
    });
    let mut answers: Vec<_> = asked.buffer_unordered(AT_A_TIME).collect().await;
    answers.sort_by(|(a, _), (b, _)| a.node.cmp(&b.node));
    let (mut records, mut failed, mut going_on) = (Vec::new(), Vec::new(), Vec::new());
    for (agent, (found, state)) in answers {
        // An agent of an earlier release skips conditions that it does not know.
        let found = found.into_iter().filter(|record| wanted.filter.matches(record));
        records.extend(found.map(|record| OfNode { node: agent.node.clone(), record }));
        match state {
            Ok(state) => {
                notes(&agent.node, &state, printer)?;
                going_on.push((agent, state.newest));
            }
            Err(error) => failed.push((agent.node.clone(), error)),
        }
    }
    let most = options.limit as usize;
    let cut = in_order(&mut records, most);
    if cut > 0 {
        printer.note(&format!("{cut} older records are left out (--limit)"))?;
    }
    show(&records, true, printer)?;
    for line in remarks(failed.iter().map(|(node, error)| (node.as_str(), error))) {
        printer.note(&line)?;
    }
    if options.follow && !going_on.is_empty() {
        wanted.filter.since_ms = None;
        return follow(agents, &wanted, going_on, printer).await;
    }
    Ok(if failed.is_empty() { Outcome::Fine } else { Outcome::Failed })
}

/// What is asked for.
struct Wanted {
    filter: Filter,
    limit: u32,
}

impl Wanted {
    fn of(agents: &Agents<'_>, options: &Flows, now: i64) -> Self {
        let now_ms = u64::try_from(now).unwrap_or_default() * 1000;
        let filter = options.wanted.filter(agents.cluster.namespace.as_deref(), now_ms);
        Self { filter, limit: options.limit }
    }

    fn path(&self, after: u64, is_following: bool) -> String {
        let path = path(&self.filter, self.limit);
        if is_following { format!("{path}&after={after}&follow=true") } else { path }
    }
}

/// Where an agent has the newest of the records that meet these conditions.
pub(crate) fn path(filter: &Filter, limit: u32) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.extend_pairs(filter.pairs());
    query.append_pair("limit", &limit.to_string());
    format!("{FLOWS_PATH}?{}", query.finish())
}

/// Sorts records by the time at which they were last seen, and keeps the newest. Returns how many are left out.
fn in_order(records: &mut Vec<OfNode>, most: usize) -> usize {
    records.sort_by(|a, b| {
        (a.record.last_ms, &a.node, a.record.number).cmp(&(b.record.last_ms, &b.node, b.record.number))
    });
    let cut = records.len().saturating_sub(most);
    records.drain(..cut);
    cut
}

fn notes(node: &str, state: &FlowsState, printer: &mut Printer<'_>) -> Result<(), ToolError> {
    if state.is_cut {
        printer.note(&format!("{node}: has older records that are left out (--limit)"))?;
    }
    if state.is_late {
        printer.note(&format!("{node}: not all records were looked at in time: ask for less, such as --since 15m"))?;
    }
    if state.lost > 0 {
        let text = "records gave way in the instances of these pods before the agent asked for them (flows.ring)";
        printer.note(&format!("{node}: {} {text}", state.lost))?;
    }
    Ok(())
}

fn show(records: &[OfNode], has_head: bool, printer: &mut Printer<'_>) -> Result<(), ToolError> {
    if !printer.is_table() {
        return printer.documents(records);
    }
    let visible: Vec<FlowRecord> = records.iter().map(|one| shown(&one.record)).collect::<Result<_, _>>()?;
    let now_ms = u64::try_from(SystemClock.unix_seconds()).unwrap_or_default() * 1000;
    let text = flow_records::table(&visible, now_ms);
    let nodes =
        ["NODE".to_owned()].into_iter().chain(records.iter().map(|one| nebula_cert::visible(&one.node).into_owned()));
    let nodes: Vec<String> = nodes.collect();
    let widest = nodes.iter().map(|node| node.chars().count()).max().unwrap_or_default();
    let is_wide = printer.is_wide();
    let lines = text.lines().zip(&nodes).skip(usize::from(!has_head));
    let text: String = lines
        .map(|(line, node)| if is_wide { format!("{node:widest$}  {line}\n") } else { format!("{line}\n") })
        .collect();
    printer.text(&text)
}

/// The lines of a stream, one after another, each within a bound.
struct Lines {
    body: BodyStream<Body>,
    read: Vec<u8>,
}

impl Lines {
    fn new(body: Body) -> Self {
        Self { body: BodyStream::new(body), read: Vec::new() }
    }

    /// `None`: the stream is at its end.
    async fn next(&mut self) -> Result<Option<FlowLine>, AgentError> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return serde_json::from_slice(&line).map(Some).map_err(|_| AgentError::Odd);
            }
            if self.read.len() > MAX_LINE {
                return Err(AgentError::Odd);
            }
            let frame = tokio::time::timeout(SILENT_FOR, self.body.next()).await.map_err(|_| AgentError::CutOff)?;
            match frame {
                None => return Ok(None),
                Some(frame) => {
                    let frame = frame.map_err(|_| AgentError::CutOff)?;
                    self.read.extend_from_slice(&frame.into_data().unwrap_or_default());
                }
            }
        }
    }
}

/// Takes all records that an agent has, also those that came before it failed.
pub(crate) async fn all(
    agents: &Agents<'_>,
    agent: &Agent,
    path: &str,
    mut take: impl FnMut(FlowRecord),
) -> Result<FlowsState, AgentError> {
    let mut lines = Lines::new(agents.stream(agent, path).await?);
    while let Some(line) = lines.next().await? {
        if let Some(flow) = line.flow {
            take(*flow);
        }
        if let Some(state) = line.state.filter(|state| state.is_last) {
            return Ok(state);
        }
    }
    Err(AgentError::CutOff)
}

/// Something of a node that goes on.
enum News {
    Record(Box<OfNode>),
    Lost { node: String, error: AgentError },
}

/// Shows what comes, until nobody reads any more or no node is left.
async fn follow(
    agents: &Agents<'_>,
    wanted: &Wanted,
    going_on: Vec<(&Agent, u64)>,
    printer: &mut Printer<'_>,
) -> Result<Outcome, ToolError> {
    let (news, mut heard) = mpsc::channel(IN_FLIGHT);
    let streams = going_on.into_iter().map(|(agent, after)| follow_one(agents, wanted, agent, after, news.clone()));
    let streams = futures_util::future::join_all(streams);
    drop(news);
    let shown = async {
        let mut waiting = Vec::new();
        loop {
            // Records of several nodes are put into their order for as long as an agent takes to look again.
            let until = tokio::time::Instant::now() + TOGETHER;
            loop {
                match tokio::time::timeout_at(until, heard.recv()).await {
                    Ok(Some(News::Record(record))) if waiting.len() < IN_FLIGHT => waiting.push(*record),
                    Ok(Some(News::Record(record))) => {
                        waiting.push(*record);
                        break;
                    }
                    Ok(Some(News::Lost { node, error })) => {
                        for line in remarks([(node.as_str(), &error)]) {
                            printer.note(&line)?;
                        }
                    }
                    Ok(None) => return Ok(Outcome::Failed),
                    Err(_) => break,
                }
            }
            in_order(&mut waiting, usize::MAX);
            if !waiting.is_empty() {
                show(&waiting, false, printer)?;
                waiting.clear();
            }
        }
    };
    tokio::pin!(shown, streams);
    tokio::select! {
        outcome = &mut shown => outcome,
        _ = &mut streams => shown.await,
    }
}

/// Follows one node until nobody listens. An agent that is gone is asked again: it may be another one by then.
async fn follow_one(agents: &Agents<'_>, wanted: &Wanted, agent: &Agent, mut after: u64, news: mpsc::Sender<News>) {
    let node = &agent.node;
    let mut said = None;
    loop {
        let ended = async {
            let mut lines = Lines::new(agents.stream(agent, &wanted.path(after, true)).await?);
            while let Some(line) = lines.next().await? {
                if let Some(record) = line.flow.filter(|record| wanted.filter.matches(record)) {
                    let record = News::Record(Box::new(OfNode { node: node.clone(), record: *record }));
                    if news.send(record).await.is_err() {
                        return Ok(());
                    }
                }
                if let Some(state) = line.state {
                    after = state.newest;
                    said = None;
                    if state.is_renewable {
                        return Ok(());
                    }
                    if let (true, Some(why)) = (state.is_last, state.why) {
                        return Err(AgentError::Refused(why, None));
                    }
                }
            }
            Err(AgentError::CutOff)
        };
        let ended = ended.await;
        if news.is_closed() {
            return;
        }
        if let Err(error) = ended {
            // Once, not every few seconds.
            if said.as_ref() != Some(&error) {
                said = Some(error.clone());
                let _ = news.send(News::Lost { node: node.clone(), error }).await;
            }
            tokio::time::sleep(RETRY).await;
        }
    }
}

const AT_A_TIME: usize = 16;
/// Of one node.
const MOST: usize = 10_000;
const IN_FLIGHT: usize = 1024;
const TOGETHER: Duration = Duration::from_millis(1500);
/// An agent says something every quarter of a minute.
const SILENT_FOR: Duration = Duration::from_secs(45);
const RETRY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn record(node: &str, last_ms: u64, number: u64) -> OfNode {
        OfNode { node: node.to_owned(), record: FlowRecord { last_ms, number, ..FlowRecord::default() } }
    }

    #[test]
    fn records_of_several_nodes_are_in_the_order_of_time_and_the_newest_stay() {
        let mut records =
            vec![record("b", 3, 1), record("a", 5, 1), record("a", 3, 2), record("a", 3, 1), record("b", 9, 2)];
        assert_eq!(in_order(&mut records, 4), 1);
        let found: Vec<_> =
            records.iter().map(|one| (one.node.as_str(), one.record.last_ms, one.record.number)).collect();
        assert_eq!(found, [("a", 3, 2), ("b", 3, 1), ("a", 5, 1), ("b", 9, 2)]);
    }

    #[tokio::test]
    async fn lines_are_read_across_frames_and_bounded() {
        let mut lines = Lines::new(Body::from(b"{\"state\":{\"newest\":7}}\n{\"later\":1}\n{\"flow\"".to_vec()));
        assert_eq!(lines.next().await.unwrap().unwrap().state.unwrap().newest, 7);
        assert_eq!(lines.next().await.unwrap(), Some(FlowLine::default()));
        assert_eq!(lines.next().await.unwrap(), None, "a line that was cut off is none");
        let mut lines = Lines::new(Body::from(vec![b'x'; MAX_LINE + 1]));
        assert_eq!(lines.next().await, Err(AgentError::Odd));
    }

    #[test]
    fn a_record_with_its_node_is_read_back() {
        let text = serde_json::to_string(&record("n1", 3, u64::MAX)).unwrap();
        assert!(text.starts_with("{\"node\":\"n1\","), "{text}");
        assert_eq!(serde_json::from_str::<FlowRecord>(&text).unwrap(), record("n1", 3, u64::MAX).record);
    }
}
