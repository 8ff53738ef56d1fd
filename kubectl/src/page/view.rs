//! What is known of the cluster, and what browsers get of it. Agents are asked because somebody looks, and no more
//! often for several than for one.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hyper::StatusCode;
use hyper::body::Bytes;
use nebula_cni_contract::agent_api::NodeStatus;
use nebula_cni_contract::flow_records::Filter;
use serde::Serialize;
use serde_json::json;
use tokio::sync::{Notify, watch};

use super::held::{Held, Kept};
use super::listing::{BadQuery, Wanted};
use super::topology;
use crate::agents::{AgentError, remarks};

/// What is known.
#[derive(Debug)]
pub(super) struct View {
    /// The namespace whose flows are looked at; `None`: all.
    pub(super) scope: Option<String>,
    records: Mutex<Held>,
    nodes: Mutex<Nodes>,
    pub(super) records_demand: Demand,
    pub(super) nodes_demand: Demand,
    /// Sums that were asked for, by path and query.
    sums: Mutex<HashMap<String, Summed>>,
}

/// How the nodes stand.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    pub(super) known: BTreeMap<String, Result<NodeStatus, AgentError>>,
    /// When the last one answered.
    pub(super) as_of_ms: u64,
    /// Why the agents cannot be asked.
    pub(super) error: Option<String>,
}

#[derive(Debug)]
struct Summed {
    generation: u64,
    made_ms: u64,
    json: Bytes,
}

/// Whether somebody waits for news, and whether there were any.
#[derive(Debug, Default)]
pub(super) struct Demand {
    wanted: Notify,
    is_known: watch::Sender<bool>,
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unanswered {
    #[error(transparent)]
    Query(#[from] BadQuery),
    #[error("there is no such page")]
    Path,
    #[error("the answer cannot be written: {0}")]
    Form(#[from] serde_json::Error),
}

impl Demand {
    /// Asks for news, and waits for the first ones.
    async fn known(&self) {
        self.wanted.notify_one();
        let mut is_known = self.is_known.subscribe();
        // The sender lives as long as this.
        let _ = is_known.wait_for(|is_known| *is_known).await;
    }

    /// Waits until somebody asks.
    pub(super) async fn wanted(&self) {
        self.wanted.notified().await;
    }

    /// There is something to show.
    pub(super) fn answered(&self) {
        self.is_known.send_replace(true);
    }
}

impl Unanswered {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Query(_) => StatusCode::BAD_REQUEST,
            Self::Path => StatusCode::NOT_FOUND,
            Self::Form(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl View {
    pub(super) fn new(scope: Option<String>) -> Self {
        Self {
            scope,
            records: Mutex::default(),
            nodes: Mutex::default(),
            records_demand: Demand::default(),
            nodes_demand: Demand::default(),
            sums: Mutex::default(),
        }
    }

    pub(super) fn records(&self) -> MutexGuard<'_, Held> {
        lock(&self.records)
    }

    pub(super) fn nodes(&self) -> MutexGuard<'_, Nodes> {
        lock(&self.nodes)
    }

    /// What a path of the API shows.
    pub(super) async fn answer(&self, path: &str, query: &str, now_ms: u64) -> Result<Bytes, Unanswered> {
        match path {
            "/api/nodes" => {
                self.nodes_demand.known().await;
                Ok(self.nodes_json(now_ms)?)
            }
            "/api/flows" => {
                let wanted = Wanted::of(query, now_ms)?;
                self.records_demand.known().await;
                let held = self.records();
                Ok(self.json(&held, now_ms, &wanted.page(&held))?)
            }
            "/api/topology" | "/api/identities" => {
                let since_ms = since_ms(query, now_ms)?;
                self.records_demand.known().await;
                self.sums(path, query, since_ms, now_ms)
            }
            _ => Err(Unanswered::Path),
        }
    }

    fn sums(&self, path: &str, query: &str, since_ms: u64, now_ms: u64) -> Result<Bytes, Unanswered> {
        let held = self.records();
        let (mut sums, key) = (lock(&self.sums), format!("{path}?{query}"));
        let is_fresh =
            |known: &Summed| known.generation == held.generation || now_ms.saturating_sub(known.made_ms) < REUSED_MS;
        if let Some(known) = sums.get(&key).filter(|known| is_fresh(known)) {
            return Ok(known.json.clone());
        }
        let kept = held.before(None).map(|(_, kept)| kept).take_while(|kept: &&Kept| kept.record.last_ms >= since_ms);
        let json = match path {
            "/api/topology" => self.json(&held, now_ms, &topology::pairs(kept))?,
            _ => self.json(&held, now_ms, &topology::identities(kept))?,
        };
        if sums.len() >= MOST_SUMS {
            sums.clear();
        }
        sums.insert(key, Summed { generation: held.generation, made_ms: now_ms, json: json.clone() });
        Ok(json)
    }

    /// What is shown, and what is to be said about it.
    fn json(&self, held: &Held, now_ms: u64, shown: &impl Serialize) -> serde_json::Result<Bytes> {
        #[derive(Serialize)]
        struct Answer<'a, T> {
            scope: &'a Option<String>,
            now_ms: u64,
            held: usize,
            oldest_ms: Option<u64>,
            notes: Vec<String>,
            #[serde(flatten)]
            shown: &'a T,
        }
        let (scope, oldest_ms) = (&self.scope, held.oldest_ms());
        let answer = Answer { scope, now_ms, held: held.len(), oldest_ms, notes: notes(held), shown };
        serde_json::to_vec(&answer).map(Bytes::from)
    }

    fn nodes_json(&self, now_ms: u64) -> serde_json::Result<Bytes> {
        let nodes = self.nodes();
        let rows = nodes.known.iter().map(|(node, answer)| match answer {
            Ok(status) => json!({"node": node, "status": status}),
            Err(error) => json!({"node": node, "error": error.to_string()}),
        });
        let rows: Vec<_> = rows.collect();
        let failed = nodes.known.iter().filter_map(|(node, answer)| Some((node.as_str(), answer.as_ref().err()?)));
        let notes: Vec<_> = nodes.error.iter().cloned().chain(remarks(failed)).collect();
        let answer = json!({"scope": self.scope, "now_ms": now_ms, "as_of_ms": nodes.as_of_ms, "notes": notes,
            "version": env!("CARGO_PKG_VERSION"), "nodes": rows});
        serde_json::to_vec(&answer).map(Bytes::from)
    }
}

/// Why the records are not all that there are.
fn notes(held: &Held) -> Vec<String> {
    let failed = remarks(held.nodes().filter_map(|(node, progress)| Some((node, progress.error.as_ref()?))));
    let mut notes: Vec<_> = held.error.iter().cloned().chain(failed).collect();
    let count = |is: fn(&super::held::Progress) -> bool| held.nodes().filter(|(_, progress)| is(progress)).count();
    let (all, waiting) = (held.nodes().count(), count(|progress| !progress.is_asked));
    if waiting > 0 {
        notes.push(format!("{} of {all} agents have answered so far.", all - waiting));
    }
    let cut = count(|progress| progress.is_cut);
    if cut > 0 || held.left_out > 0 {
        notes.push("There are older records than this page holds: kubectl nebula flows shows them.".to_owned());
    }
    let late = count(|progress| progress.is_late);
    if late > 0 {
        notes.push(format!("{late} agents had not enough time to look at all their records."));
    }
    let lost = held.nodes().fold(0_u64, |sum, (_, progress)| sum.saturating_add(progress.lost));
    if lost > 0 {
        notes
            .push(format!("{lost} records gave way in the pods' instances before agents asked for them (flows.ring)."));
    }
    notes
}

/// The beginning of the time that is looked at.
fn since_ms(query: &str, now_ms: u64) -> Result<u64, BadQuery> {
    let since = form_urlencoded::parse(query.as_bytes()).find(|(key, value)| key == "since" && !value.is_empty());
    match since {
        Some((_, span)) => Ok(now_ms.saturating_sub(Filter::span_ms(&span)?)),
        None => Ok(0),
    }
}

/// What is behind a lock is whole after each change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For this long sums hold although records have come.
const REUSED_MS: u64 = 2000;
const MOST_SUMS: usize = 16;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::agent_api::FlowsState;
    use serde_json::Value;

    use super::super::held::tests::record;
    use super::*;

    async fn shown(view: &View, path: &str, query: &str, now_ms: u64) -> Value {
        serde_json::from_slice(&view.answer(path, query, now_ms).await.unwrap()).unwrap()
    }

    fn view() -> View {
        let view = View::new(None);
        view.records().expect(&["n1", "n2", "n3"]);
        for id in 0..10 {
            view.records().take("n1", record("shop/web", "pay/api", id, id * 1000), u64::MAX);
        }
        view.records_demand.answered();
        view
    }

    #[tokio::test]
    async fn sums_are_made_again_when_records_came_and_not_for_each_tab() {
        let view = view();
        let flows = async |query: &str, now_ms| {
            shown(&view, "/api/topology", query, now_ms).await["rows"][0]["flows"].as_u64().unwrap()
        };
        assert_eq!((flows("", 9000).await, flows("since=5s", 9000).await), (10, 6));
        view.records().take("n1", record("shop/web", "pay/api", 11, 9000), u64::MAX);
        assert_eq!(flows("", 9000 + REUSED_MS - 1).await, 10, "as it was some moments ago");
        assert_eq!(flows("", 9000 + REUSED_MS).await, 11);
        for number in 0..100 {
            flows(&format!("x={number}"), 9000).await;
        }
        assert!(lock(&view.sums).len() <= MOST_SUMS);
    }

    #[tokio::test]
    async fn what_is_missing_is_said() {
        let view = view();
        let state = FlowsState { is_cut: true, lost: 7, is_late: true, ..FlowsState::default() };
        view.records().answered("n1", Ok(state));
        view.records().answered("n2", Err(AgentError::NoApi));
        let answer = shown(&view, "/api/flows", "", 0).await;
        let notes: Vec<_> = answer["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap()).collect();
        assert_eq!(notes.len(), 5, "{notes:?}");
        assert!(notes[0].starts_with("n2: its agent has no API"), "{notes:?}");
        assert_eq!(notes[1], "2 of 3 agents have answered so far.");
        assert!(notes[4].starts_with("7 records gave way"), "{notes:?}");
        view.nodes().known.insert("n2".to_owned(), Err(AgentError::CutOff));
        view.nodes_demand.answered();
        let nodes = shown(&view, "/api/nodes", "", 0).await;
        assert_eq!(nodes["nodes"][0]["error"], "its agent stopped answering in the middle");
    }

    #[tokio::test]
    async fn queries_and_paths_that_cannot_be_are_refused_before_anybody_is_asked() {
        let view = View::new(None);
        for (path, query, status) in [
            ("/api/flows", "port=x", StatusCode::BAD_REQUEST),
            ("/api/topology", "since=x", StatusCode::BAD_REQUEST),
            ("/api/", "", StatusCode::NOT_FOUND),
        ] {
            assert_eq!(view.answer(path, query, 0).await.unwrap_err().status(), status, "{path}?{query}");
        }
    }
}
