//! Questions: on a connection that only reads, within a time and a number of records.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::{Duration, Instant};

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::flow_records::{Filter, FlowEnd, FlowRecord};
use rusqlite::{Connection, ErrorCode, params};

use super::decoder::Decoder;
use super::rows::{self, Before, Kind, Row};
use super::{FILE, StoreError, schema, tick};

/// How much one answer may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Records in it.
    pub records: usize,
    /// Time for it.
    pub time: Duration,
}

/// Records that met the conditions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// In the order in which they were told. Their numbers are those of the store.
    pub records: Vec<FlowRecord>,
    /// Whether there are more, which are older.
    pub is_cut: bool,
    /// Whether the time was over before all were looked at.
    pub is_late: bool,
    /// The newest number of the store.
    pub newest: u64,
    /// Records that instances dropped before they were asked, of the pods that the conditions let through.
    pub lost: u64,
}

/// Reads the store while somebody else writes.
#[derive(Debug)]
pub struct Reader {
    connection: Connection,
}

/// The words that conditions let through; `None`: all.
#[derive(Debug, Default)]
struct Wanted {
    kinds: Option<HashSet<i64>>,
    sources: Option<HashSet<i64>>,
    destinations: Option<HashSet<i64>>,
    /// One of both ends, or of the Service before translation.
    peers: Option<(HashSet<i64>, HashSet<i64>)>,
    /// Services of which the port is.
    ports: HashSet<i64>,
}

impl Reader {
    /// Opens the store in a folder.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn open(folder: &Path) -> Result<Self, StoreError> {
        Ok(Self { connection: schema::open_to_read(&folder.join(FILE))? })
    }

    /// The newest records that meet all conditions and have higher numbers than `after`.
    ///
    /// # Errors
    /// See [`StoreError`]. A question that takes too long is no error.
    pub fn ask(&mut self, filter: &Filter, after: u64, limits: Limits) -> Result<Answer, StoreError> {
        let until = SystemClock.now() + limits.time;
        self.connection.progress_handler(OPERATIONS, Some(move || is_over(until)))?;
        let mut answer = Answer::default();
        // All parts of the answer are of one moment.
        let asked = self.connection.execute_batch("BEGIN").map_err(StoreError::from);
        let asked = asked.and_then(|()| self.read(filter, after, limits.records, &mut answer));
        self.connection.progress_handler(0, None::<fn() -> bool>)?;
        if !self.connection.is_autocommit() {
            self.connection.execute_batch("ROLLBACK")?;
        }
        answer.records.reverse();
        match asked {
            Err(StoreError::Sqlite(error)) if error.sqlite_error_code() == Some(ErrorCode::OperationInterrupted) => {
                answer.is_late = true;
            }
            other => other?,
        }
        Ok(answer)
    }

    fn read(&self, filter: &Filter, after: u64, most: usize, answer: &mut Answer) -> Result<(), StoreError> {
        let connection = &self.connection;
        let newest: i64 = connection.query_row("SELECT coalesce(max(seq), 0) FROM flows", [], |row| row.get(0))?;
        answer.newest = newest.cast_unsigned();
        let pods = Pods::read(connection, filter)?;
        answer.lost = pods.lost;
        let wanted = Wanted::read(connection, filter, &pods)?;
        let sql = self.statement(filter, &pods, &wanted)?;
        let first = match filter.since_ms {
            Some(since) => {
                let sql = "SELECT coalesce(min(seq), ?) FROM ticks WHERE told >= ?";
                connection.query_row(sql, params![i64::MAX, tick(since)], |row| row.get(0))?
            }
            None => 0,
        };
        let first = first.max(after.saturating_add(1).min(i64::MAX as u64).cast_signed());
        let mut statement = connection.prepare(&sql)?;
        let since = filter.since_ms.unwrap_or_default().min(i64::MAX as u64).cast_signed();
        let mut rows = statement.query(params![first, since])?;
        let mut decoder = Decoder::new(connection);
        while let Some(row) = rows.next()? {
            let pod: i64 = row.get(1)?;
            let first_flow = pods.by_id.get(&pod).map_or(0, |pod| *pod);
            let record = decoder.record(row, first_flow)?;
            // Whatever the file says, nobody sees what they did not ask for.
            if !filter.matches(&record) {
                continue;
            }
            if answer.records.len() == most {
                answer.is_cut = true;
                break;
            }
            answer.records.push(record);
        }
        Ok(())
    }

    /// Lets SQLite pass over what cannot be meant.
    fn statement(&self, filter: &Filter, pods: &Pods, wanted: &Wanted) -> Result<String, StoreError> {
        let connection = &self.connection;
        let mut conditions = vec!["seq >= ?1".to_owned(), "last_ms >= ?2".to_owned()];
        let set = |name: &'static str, ids: &HashSet<i64>| -> Result<String, StoreError> {
            let sql = format!("CREATE TEMP TABLE IF NOT EXISTS {name}(id INTEGER PRIMARY KEY); DELETE FROM {name};");
            connection.execute_batch(&sql)?;
            let mut insert = connection.prepare(&format!("INSERT INTO {name} VALUES(?)"))?;
            for id in ids {
                insert.execute(params![id])?;
            }
            Ok(format!("IN (SELECT id FROM {name})"))
        };
        let mut order = "seq";
        if pods.is_some {
            let total: i64 =
                connection.query_row("SELECT coalesce(max(seq), 0) - coalesce(min(seq), 0) FROM flows", [], |row| {
                    row.get(0)
                })?;
            let ids: HashSet<i64> = pods.by_id.keys().copied().collect();
            let of_pods = set("wanted_pods", &ids)?;
            let sql = format!(
                "SELECT count(*) FROM (SELECT 1 FROM flows INDEXED BY flows_of_pod WHERE pod {of_pods} LIMIT ?)"
            );
            let count: i64 = connection.query_row(&sql, params![total / FEW + 1], |row| row.get(0))?;
            // Few records are found by their pod, and many in passing.
            if count <= total / FEW {
                order = "+seq";
                conditions[0] = "+seq >= ?1".to_owned();
                conditions.push(format!("pod {of_pods}"));
            } else {
                conditions.push(format!("+pod {of_pods}"));
            }
        }
        if let Some(port) = filter.port {
            let of_port = set("wanted_ports", &wanted.ports)?;
            conditions.push(format!("(destination_port = {port} OR original {of_port})"));
        }
        if let Some(kinds) = &wanted.kinds {
            conditions.push(format!("kind {}", set("wanted_kinds", kinds)?));
        }
        if let Some(sources) = &wanted.sources {
            conditions.push(format!("source {}", set("wanted_sources", sources)?));
        }
        if let Some(destinations) = &wanted.destinations {
            conditions.push(format!("destination {}", set("wanted_destinations", destinations)?));
        }
        if let Some((ends, services)) = &wanted.peers {
            let (ends, services) = (set("wanted_ends", ends)?, set("wanted_services", services)?);
            conditions.push(format!("(source {ends} OR destination {ends} OR original {services})"));
        }
        Ok(format!("SELECT * FROM flows WHERE {} ORDER BY {order} DESC", conditions.join(" AND ")))
    }
}

/// The pods that may have written what is asked for.
#[derive(Debug, Default)]
struct Pods {
    /// The number from which the flows of each are numbered.
    by_id: HashMap<i64, i64>,
    /// Whether they are not all that there are.
    is_some: bool,
    lost: u64,
}

impl Pods {
    fn read(connection: &Connection, filter: &Filter) -> Result<Self, StoreError> {
        let mut pods = Self::default();
        let mut statement = connection.prepare("SELECT id, namespace, name, first_flow, lost FROM pods")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let (namespace, name): (String, String) = (row.get(1)?, row.get(2)?);
            let is_pod = |wanted: &String| {
                *wanted == name || wanted.split_once('/') == Some((namespace.as_str(), name.as_str()))
            };
            let is_wanted = filter.namespace.as_ref().is_none_or(|wanted| *wanted == namespace)
                && filter.pod.as_ref().is_none_or(is_pod);
            if is_wanted {
                pods.by_id.insert(row.get(0)?, row.get(3)?);
                pods.lost = pods.lost.saturating_add(i64::cast_unsigned(row.get(4)?));
            } else {
                pods.is_some = true;
            }
        }
        Ok(pods)
    }
}

impl Wanted {
    fn read(connection: &Connection, filter: &Filter, pods: &Pods) -> Result<Self, StoreError> {
        let asks = |is_asked: bool| is_asked.then(HashSet::new);
        let mut wanted = Self {
            kinds: asks(filter.verdict.is_some() || filter.protocol.is_some()),
            sources: asks(filter.from_pod.is_some()),
            destinations: asks(filter.to_pod.is_some()),
            peers: filter.peer.is_some().then(Default::default),
            ports: HashSet::new(),
        };
        let is_any = wanted.kinds.is_some() || wanted.sources.is_some() || wanted.destinations.is_some();
        if !is_any && wanted.peers.is_none() && filter.port.is_none() {
            return Ok(wanted);
        }
        let mut statement = connection.prepare("SELECT id, pod, body FROM words")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            if pods.by_id.contains_key(&row.get(1)?) {
                wanted.add(filter, row.get(0)?, row.get_ref(2)?.as_str().unwrap_or_default());
            }
        }
        Ok(wanted)
    }

    /// Adds a word to those that it meets the conditions for. Each is of one of three forms.
    fn add(&mut self, filter: &Filter, id: i64, body: &str) {
        if body.starts_with(KIND) {
            if let (Some(kinds), Ok(kind)) = (&mut self.kinds, serde_json::from_str::<Kind>(body)) {
                let is_wanted = filter.verdict.as_ref().is_none_or(|wanted| *wanted == kind.verdict)
                    && filter.protocol.is_none_or(|wanted| wanted == kind.protocol);
                is_wanted.then(|| kinds.insert(id));
            }
            return;
        }
        // The conditions themselves say who is meant.
        let only = |filter: Filter, record: FlowRecord| filter.matches(&record);
        let peer = Filter { peer: filter.peer.clone(), ..Filter::default() };
        if body.starts_with(SERVICE) {
            let Ok(before) = serde_json::from_str::<Before>(body) else { return };
            if filter.port == Some(before.service.port()) {
                self.ports.insert(id);
            }
            if let Some((_, services)) = &mut self.peers {
                let row = Row { original_port: Some(0), ..none() };
                let record = rows::together(Kind::default(), Default::default(), Some(before), &row);
                only(peer, record).then(|| services.insert(id));
            }
            return;
        }
        if self.sources.is_none() && self.destinations.is_none() && self.peers.is_none() {
            return;
        }
        let Ok(end) = serde_json::from_str::<FlowEnd>(body) else { return };
        for (set, text) in [(&mut self.sources, &filter.from_pod), (&mut self.destinations, &filter.to_pod)] {
            if let (Some(set), Some(text)) = (set, text) {
                end.is_pod(text).then(|| set.insert(id));
            }
        }
        if let Some((ends, _)) = &mut self.peers {
            only(peer, FlowRecord { source: end, ..FlowRecord::default() }).then(|| ends.insert(id));
        }
    }
}

fn none() -> Row {
    let amounts = [0; 4];
    Row {
        seq: 0,
        flow: 0,
        destination_port: None,
        source_port: None,
        original_port: None,
        last_ms: 0,
        lasted_ms: 0,
        amounts,
    }
}

fn is_over(until: Instant) -> bool {
    SystemClock.now() >= until
}

/// How words of these forms begin.
const KIND: &str = "{\"event\"";
const SERVICE: &str = "{\"service\"";
/// Between two looks at the clock.
const OPERATIONS: i32 = 10_000;
/// A condition is selective if at most one of this number of records meets it.
const FEW: i64 = 16;
