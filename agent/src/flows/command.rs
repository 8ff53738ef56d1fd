//! `nebula-cni-agent flows`: the flow records that are kept on this node. It reads the store itself, and needs no agent
//! that runs.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use nebula_cert::{json_line, visible};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::flow_records::{self, ConditionsOfPods, Filter, FlowRecord};

use super::now_ms;
use super::store::{Answer, Limits, Reader, StoreError};
use crate::config::{CONFIG_FILE, Config, ConfigError};

/// Shows the flow records that are kept on this node: who spoke to whom, and who was refused, the newest last
#[derive(Debug, Args)]
pub struct Options {
    /// Configuration of the agent
    #[arg(long, default_value = CONFIG_FILE)]
    config: PathBuf,
    /// Only what instances of pods in this namespace recorded
    #[arg(short, long)]
    namespace: Option<String>,
    #[command(flatten)]
    wanted: ConditionsOfPods,
    /// Print at most this number of records, the newest
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    limit: u32,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
    /// Go on with what is recorded from now on
    #[arg(short, long)]
    follow: bool,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlowsError {
    /// The configuration says where the node's files are.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is nothing to ask.
    #[error(
        "no flow records are kept on this node: \"flows\" in agent.json turns that on (agent.flows in the chart), and the agent \
         must have started since"
    )]
    None,
    /// The store cannot be read.
    #[error("cannot read the flow records in {}: {source}", .folder.display())]
    Store {
        /// Its folder.
        folder: PathBuf,
        /// Why.
        source: StoreError,
    },
    /// The answer cannot be printed.
    #[error("cannot print the answer: {0}")]
    Print(#[source] io::Error),
    /// It took too long.
    #[error("not all records were looked at within {} s: ask for less, such as --since 15m", TIME.as_secs())]
    Late,
}

impl Options {
    /// Asks and prints. Blocks, with `follow` until the output is closed.
    ///
    /// # Errors
    /// See [`FlowsError`].
    pub fn run(&self, out: &mut impl Write) -> Result<(), FlowsError> {
        let config = Config::read(&self.config)?;
        self.print(&super::folder(&config.host_root), out)
    }

    fn print(&self, folder: &Path, out: &mut impl Write) -> Result<(), FlowsError> {
        let first = self.ask(folder, &self.filter(now_ms()), 0)?;
        let has_reader = self.say(&first, true, out)?;
        if self.follow && has_reader {
            return self.go_on(folder, first.newest, out);
        }
        if first.is_late { Err(FlowsError::Late) } else { Ok(()) }
    }

    /// Prints what comes after `newest`, until nobody reads any more.
    fn go_on(&self, folder: &Path, mut newest: u64, out: &mut impl Write) -> Result<(), FlowsError> {
        let filter = Filter { since_ms: None, ..self.filter(0) };
        loop {
            SystemClock.sleep(EVERY);
            let answer = match self.read(folder, &filter, newest) {
                // The agent is making a new one.
                Err(StoreError::None | StoreError::Damaged(_)) => continue,
                other => other.map_err(|source| failed(folder, source))?,
            };
            // A new store counts from the start.
            newest = if answer.newest < newest { 0 } else { answer.newest };
            if !self.say(&answer, false, out)? {
                return Ok(());
            }
        }
    }

    fn filter(&self, now_ms: u64) -> Filter {
        self.wanted.filter(self.namespace.as_deref(), now_ms)
    }

    fn ask(&self, folder: &Path, filter: &Filter, after: u64) -> Result<Answer, FlowsError> {
        self.read(folder, filter, after).map_err(|source| failed(folder, source))
    }

    fn read(&self, folder: &Path, filter: &Filter, after: u64) -> Result<Answer, StoreError> {
        let limits = Limits { records: self.limit as usize, time: TIME };
        Reader::open(folder)?.ask(filter, after, limits)
    }

    /// Prints an answer; the notes about it are not for a program. Returns whether somebody still reads.
    fn say(&self, answer: &Answer, is_first: bool, out: &mut impl Write) -> Result<bool, FlowsError> {
        let text = match self.json {
            true => json_lines(&answer.records),
            false => table(&answer.records, is_first, now_ms()),
        };
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(false),
            other => other.map_err(FlowsError::Print)?,
        }
        if is_first {
            for note in notes(answer) {
                eprintln!("{note}");
            }
        }
        Ok(true)
    }
}

fn failed(folder: &Path, source: StoreError) -> FlowsError {
    match source {
        StoreError::None => FlowsError::None,
        source => FlowsError::Store { folder: folder.to_owned(), source },
    }
}

fn notes(answer: &Answer) -> Vec<String> {
    let mut notes = Vec::new();
    if answer.is_cut {
        notes.push(format!("older ones than these {} are left out (--limit)", answer.records.len()));
    }
    if answer.lost > 0 {
        let text = "more gave way in the instances of these pods before the agent asked for them (flows.ring)";
        notes.push(format!("{} {text}", answer.lost));
    }
    notes
}

fn json_lines(records: &[FlowRecord]) -> String {
    records.iter().map(line).collect()
}

/// A record as a line of JSON.
pub(super) fn line(record: &FlowRecord) -> String {
    // Numbers and texts are all that there is in it.
    json_line(serde_json::to_string(record).unwrap_or_default())
}

/// For people. Names of others cannot leave their cells.
fn table(records: &[FlowRecord], has_head: bool, now_ms: u64) -> String {
    let mut records = records.to_vec();
    for text in records.iter_mut().flat_map(FlowRecord::texts_mut) {
        *text = visible(text).into_owned();
    }
    let text = flow_records::table(&records, now_ms);
    match text.split_once('\n') {
        Some((_, rows)) if !has_head => rows.to_owned(),
        _ => text,
    }
}

const TIME: Duration = Duration::from_secs(10);
const EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use clap::Parser;
    use nebula_cni_contract::flow_records::{FlowEnd, FlowRecords};
    use nebula_cni_contract::launch::Pod;

    use super::*;
    use crate::flows::Attached;
    use crate::flows::store::{Bound, Store};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn printed(folder: &Path, arguments: &[&str]) -> String {
        let mut out = Vec::new();
        let line = Line::try_parse_from([&["flows"], arguments].concat()).unwrap();
        line.options.print(folder, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn keep(folder: &Path, namespace: &str, record: FlowRecord) {
        let bound = Bound { bytes: 64 << 20, age: Duration::from_secs(3600) };
        let pod = Pod { namespace: namespace.to_owned(), name: "web".to_owned(), uid: namespace.to_owned() };
        let attached = Attached { attachment: namespace.to_owned(), pod, socket: PathBuf::new() };
        let answer = FlowRecords { records: vec![record], next: 1, is_on: true, ..FlowRecords::default() };
        let mut store = Store::open(folder, bound).unwrap();
        store.keep(vec![(&attached, answer)], now_ms()).unwrap();
        store.commit().unwrap();
    }

    fn record(name: &str) -> FlowRecord {
        let (source, destination) = (FlowEnd::default(), FlowEnd { name: Some(name.to_owned()), ..FlowEnd::default() });
        let event = "created".to_owned();
        FlowRecord {
            id: 1,
            event,
            direction: "outbound".to_owned(),
            protocol: 6,
            source,
            destination,
            last_ms: u64::MAX,
            ..FlowRecord::default()
        }
    }

    #[test]
    fn hostile_names_stay_in_their_cells_and_json_is_read_back_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let name = "db\n\u{1b}[2J\u{202e}<b>,\"";
        keep(folder.path(), "shop", record(name));
        let text = printed(folder.path(), &[]);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("shop/web") && text.contains("db\\n\\u{1b}[2J\\u{202e}<b>,\""), "{text}");
        let json = printed(folder.path(), &["--json"]);
        assert!(json.lines().count() == 1 && json.trim_end().chars().all(nebula_cert::is_visible), "{json}");
        let read: FlowRecord = serde_json::from_str(&json).unwrap();
        assert_eq!((read.destination.name.as_deref(), read.source.pod.as_deref()), (Some(name), Some("shop/web")));
    }

    #[test]
    fn conditions_of_the_command_line_reach_the_store() {
        let folder = tempfile::tempdir().unwrap();
        keep(folder.path(), "shop", record("db.pay.pod"));
        keep(folder.path(), "pay", record("x"));
        let lines = |arguments: &[&str]| printed(folder.path(), &[&["--json"], arguments].concat()).lines().count();
        assert_eq!((lines(&[]), lines(&["-n", "shop"]), lines(&["-n", "sh"])), (2, 1, 0));
        assert_eq!((lines(&["--to-pod", "pay/db"]), lines(&["--from-pod", "pay/db"])), (1, 0));
        assert_eq!((lines(&["--protocol", "tcp"]), lines(&["--protocol", "udp"]), lines(&["--limit", "1"])), (2, 0, 1));
        assert_eq!((lines(&["--since", "1h"]), lines(&["--pod", "shop/web"]), lines(&["--peer", "x"])), (2, 1, 1));
        assert!(Line::try_parse_from(["flows", "--limit", "0"]).is_err());
        assert!(Line::try_parse_from(["flows", "--since", "soon"]).is_err());
    }

    #[test]
    fn a_node_without_a_store_says_what_turns_it_on() {
        let folder = tempfile::tempdir().unwrap();
        let line = Line::try_parse_from(["flows"]).unwrap();
        let error = line.options.print(&folder.path().join("none"), &mut Vec::new()).unwrap_err();
        assert!(matches!(error, FlowsError::None) && error.to_string().contains("agent.flows"), "{error}");
    }
}
