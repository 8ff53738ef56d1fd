//! The flow records that the page holds: each flow as it stands, the newest ones, within bounds.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use nebula_cni_contract::agent_api::FlowsState;
use nebula_cni_contract::flow_records::FlowRecord;

use crate::agents::AgentError;

/// Flow records of all nodes.
#[derive(Debug, Default)]
pub(super) struct Held {
    flows: BTreeMap<Position, Kept>,
    positions: HashMap<Flow, Position>,
    nodes: BTreeMap<Arc<str>, Progress>,
    texts: usize,
    turns: u64,
    /// Rises with each change.
    pub(super) generation: u64,
    /// Records that gave way to newer ones, here.
    pub(super) left_out: u64,
    /// Why the agents cannot be found.
    pub(super) error: Option<String>,
}

/// Where a record stands in the order of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    last_ms: u64,
    turn: u64,
}

/// A record, and the node that wrote it.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) node: Arc<str>,
    pub(super) record: FlowRecord,
    /// Bytes of its texts.
    pub(super) texts: usize,
}

/// Tells a flow from all others. Instances number their flows, each its own.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Flow {
    node: Arc<str>,
    pod: Option<String>,
    id: u64,
}

/// How far a node is.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// What to ask from.
    newest: u64,
    /// Why its agent gives no answer.
    pub(super) error: Option<AgentError>,
    /// Whether it has been asked.
    pub(super) is_asked: bool,
    /// Whether it has older records than were asked for.
    pub(super) is_cut: bool,
    /// Whether its agent had not enough time to look at all records.
    pub(super) is_late: bool,
    /// Records that gave way before the agent asked for them.
    pub(super) lost: u64,
}

impl Held {
    /// Takes a record. An earlier one of the same flow gives way, and the oldest one where there are too many.
    /// `now_ms`: a clock that is ahead does not keep records at the top.
    pub(super) fn take(&mut self, node: &str, mut record: FlowRecord, now_ms: u64) {
        let node = self.nodes.get_key_value(node).map_or_else(|| node.into(), |(node, _)| Arc::clone(node));
        let flow = Flow { node: Arc::clone(&node), pod: record.own_end().pod.clone(), id: record.id };
        let position = Position { last_ms: record.last_ms.min(now_ms), turn: self.turns };
        self.turns += 1;
        self.generation += 1;
        let texts = record.texts_mut().map(|text| text.len()).sum();
        self.texts += texts;
        if let Some(earlier) = self.positions.insert(flow, position) {
            self.remove(earlier);
        }
        self.flows.insert(position, Kept { node, record, texts });
        while self.flows.len() > MOST || self.texts > MOST_TEXTS {
            let Some(oldest) = self.flows.first_key_value().map(|(position, _)| *position) else { break };
            if let Some(Kept { node, record, .. }) = self.remove(oldest) {
                self.positions.remove(&Flow { node, pod: record.own_end().pod.clone(), id: record.id });
                self.left_out += 1;
            }
        }
    }

    fn remove(&mut self, position: Position) -> Option<Kept> {
        let kept = self.flows.remove(&position)?;
        self.texts -= kept.texts;
        Some(kept)
    }

    /// Records before a position, the newest first.
    pub(super) fn before(&self, position: Option<Position>) -> impl Iterator<Item = (Position, &Kept)> {
        let end = position.unwrap_or(Position { last_ms: u64::MAX, turn: u64::MAX });
        self.flows.range(..end).rev().map(|(position, kept)| (*position, kept))
    }

    pub(super) fn len(&self) -> usize {
        self.flows.len()
    }

    /// When the oldest record was seen last.
    pub(super) fn oldest_ms(&self) -> Option<u64> {
        self.flows.first_key_value().map(|(position, _)| position.last_ms)
    }

    /// The nodes that there are now. What others recorded stays until it gives way.
    pub(super) fn expect(&mut self, nodes: &[&str]) {
        let wanted: HashSet<&str> = nodes.iter().copied().collect();
        self.nodes.retain(|node, _| wanted.contains(&**node));
        for node in nodes {
            if !self.nodes.contains_key(*node) {
                self.nodes.insert((*node).into(), Progress::default());
            }
        }
        self.error = None;
        self.generation += 1;
    }

    /// What to ask a node from.
    pub(super) fn newest(&self, node: &str) -> u64 {
        self.nodes.get(node).map_or(0, |progress| progress.newest)
    }

    /// Notes what a node answered.
    pub(super) fn answered(&mut self, node: &str, answer: Result<FlowsState, AgentError>) {
        let Some(progress) = self.nodes.get_mut(node) else { return };
        progress.is_asked = true;
        match answer {
            Ok(state) => {
                // A new store counts from the start.
                progress.newest = if state.newest < progress.newest { 0 } else { state.newest };
                progress.is_cut |= state.is_cut;
                progress.is_late = state.is_late;
                progress.lost = state.lost;
                progress.error = None;
            }
            Err(error) => progress.error = Some(error),
        }
        self.generation += 1;
    }

    /// Notes that agents cannot be found.
    pub(super) fn failed(&mut self, error: String) {
        self.error = Some(error);
        self.generation += 1;
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = (&str, &Progress)> {
        self.nodes.iter().map(|(node, progress)| (&**node, progress))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.last_ms, self.turn)
    }
}

impl FromStr for Position {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (last_ms, turn) = text.split_once('.').ok_or(())?;
        Ok(Self { last_ms: last_ms.parse().map_err(|_| ())?, turn: turn.parse().map_err(|_| ())? })
    }
}

/// Records held: some hundred bytes each.
pub(super) const MOST: usize = 50_000;
/// Bytes of their texts together.
const MOST_TEXTS: usize = 96 << 20;

#[cfg(test)]
pub(super) mod tests {
    use nebula_cni_contract::flow_records::{Amount, FlowEnd};

    use super::*;

    /// A flow between two pods, as the first one recorded it.
    pub(in crate::page) fn record(from: &str, to: &str, id: u64, last_ms: u64) -> FlowRecord {
        let end = |pod: &str| FlowEnd { pod: Some(pod.to_owned()), ..FlowEnd::default() };
        FlowRecord {
            number: id,
            id,
            event: "updated".to_owned(),
            verdict: "allowed".to_owned(),
            direction: "outbound".to_owned(),
            protocol: 6,
            source: end(from),
            destination: FlowEnd { port: Some(443), ..end(to) },
            forward: Amount { packets: 1, bytes: 100 },
            reply: Amount { packets: 1, bytes: 900 },
            last_ms,
            ..FlowRecord::default()
        }
    }

    fn times(held: &Held) -> Vec<u64> {
        held.before(None).map(|(_, kept)| kept.record.last_ms).collect()
    }

    #[test]
    fn the_newest_state_of_a_flow_stays_and_flows_of_other_pods_and_nodes_are_others() {
        let mut held = Held::default();
        for (node, from, last_ms) in [("n1", "a/x", 5), ("n1", "a/y", 6), ("n2", "a/x", 7), ("n1", "a/x", 8)] {
            held.take(node, record(from, "b/z", 1, last_ms), 100);
        }
        assert_eq!(times(&held), [8, 7, 6]);
        assert_eq!((held.len(), held.positions.len(), held.left_out), (3, 3, 0));
        held.take("n3", record("a/x", "b/z", 1, 9_000), 100);
        held.take("n3", record("a/x", "b/z", 2, 100), 100);
        assert_eq!(times(&held)[..2], [100, 9_000], "a clock that is ahead keeps nothing at the top");
    }

    #[test]
    fn the_oldest_records_give_way_when_there_are_too_many_or_their_texts_are_too_long() {
        let mut held = Held::default();
        for id in 0..MOST as u64 + 10 {
            held.take("n1", record("a/x", "b/z", id, id), u64::MAX);
        }
        assert_eq!((held.len(), held.positions.len(), held.left_out, held.oldest_ms()), (MOST, MOST, 10, Some(10)));
        let mut held = Held::default();
        for id in 0..200 {
            held.take("n1", record(&"x".repeat(1 << 20), "b/z", id, id), u64::MAX);
        }
        assert!(held.texts <= MOST_TEXTS && held.len() == 95, "{} records", held.len());
        assert_eq!(held.len(), held.positions.len());
    }

    #[test]
    fn a_page_begins_behind_the_one_before() {
        let mut held = Held::default();
        for id in 0..10 {
            held.take("n1", record("a/x", "b/z", id, 7), 100);
        }
        let (third, _) = held.before(None).nth(2).unwrap();
        let again = third.to_string().parse().unwrap();
        let ids: Vec<u64> = held.before(Some(again)).map(|(_, kept)| kept.record.id).collect();
        assert_eq!(ids, [6, 5, 4, 3, 2, 1, 0]);
        for bad in ["", "7", "7.", ".7", "7.x", "-1.0"] {
            assert_eq!(bad.parse::<Position>(), Err(()), "{bad}");
        }
    }

    #[test]
    fn a_node_is_asked_for_what_came_since_and_from_the_start_where_its_store_is_new() {
        let mut held = Held::default();
        held.expect(&["n1", "n2"]);
        let state = |newest| Ok(FlowsState { newest, ..FlowsState::default() });
        held.answered("n1", state(70));
        held.answered("n9", state(1));
        assert_eq!([held.newest("n1"), held.newest("n2"), held.newest("n9")], [70, 0, 0]);
        held.answered("n1", Err(AgentError::CutOff));
        assert_eq!(held.newest("n1"), 70);
        held.answered("n1", state(3));
        assert_eq!(held.newest("n1"), 0);
        held.expect(&["n2"]);
        assert_eq!(held.nodes().map(|(node, _)| node).collect::<Vec<_>>(), ["n2"]);
    }
}
