//! Flow records for others: lines of JSON in a file of the node, and OTLP logs for a collector.
//!
//! Each exporter is a thread that reads the store as any reader does, from where it stopped, and holds one batch. While
//! a target is away, its records wait in the store, which evicts the oldest and counts them.
//!
//! | file | what |
//! | --- | --- |
//! | `exporter.rs` | the thread: reads, sends, notes how far it is |
//! | `progress.rs` | how far exporters are, between them and the writer of the store |
//! | `pauses.rs` | how long an exporter waits after a failure |
//! | `lines.rs` | a file with lines of JSON |
//! | `collector.rs` | a collector, asked by OTLP over HTTP |
//! | `headers.rs` | the secret headers of its requests |
//! | `otlp.rs` | records as OTLP log records |

mod collector;
#[cfg(test)]
mod cost;
mod exporter;
mod headers;
mod lines;
mod otlp;
mod pauses;
mod progress;
#[cfg(test)]
mod receiver;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nebula_cni_contract::flow_records::FlowRecord;

use self::collector::Collector;
use self::exporter::Exporter;
use self::lines::Lines;
pub(super) use self::progress::Progress;
use crate::host_root::HostRoot;
use crate::metrics::Metrics;
use crate::readiness::{Part, Readiness, Standing};

/// Where records are exported to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Export {
    /// A file of the node.
    pub file: Option<FileExport>,
    /// A collector.
    pub otlp: Option<OtlpExport>,
}

/// A file with lines of JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileExport {
    /// As the node names it.
    pub path: PathBuf,
    /// Of it and of the one before it together.
    pub bytes: u64,
}

/// A collector that takes OTLP over HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtlpExport {
    /// `http://` or `https://`, host, port, and what stands before `/v1/logs`.
    pub endpoint: String,
    /// File with further headers of each request, as the agent sees it. They are secret.
    pub headers: Option<PathBuf>,
    /// The only roots of its certificate, as the agent sees the file; `None`: those of the node.
    pub roots: Option<PathBuf>,
}

/// An exporter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// Lines of JSON.
    File,
    /// OTLP logs.
    Otlp,
}

impl Target {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::File, Self::Otlp];

    /// Its word, in the store and as the label of metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Otlp => "otlp",
        }
    }
}

impl Export {
    /// Those that are configured.
    #[must_use]
    pub fn targets(&self) -> Vec<Target> {
        let all = [(Target::File, self.file.is_some()), (Target::Otlp, self.otlp.is_some())];
        all.into_iter().filter(|(_, is_there)| *is_there).map(|(target, _)| target).collect()
    }
}

/// Takes batches of records.
trait Sink: Send {
    /// Where they go, for people.
    fn place(&self) -> String;

    /// Sends all of them. Blocks, within a time.
    fn send(&mut self, records: &[FlowRecord]) -> Result<Sent, SendError>;
}

/// A batch that was taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sent {
    /// Records that the collector did not want.
    rejected: u64,
}

/// Why a batch was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
enum SendError {
    /// The file cannot be written.
    #[error(transparent)]
    File(std::io::Error),
    /// A file of the configuration cannot be used.
    #[error("cannot use {}: {why}", .path.display())]
    Setting { path: PathBuf, why: String },
    /// Nobody answers.
    #[error("no answer: {0}")]
    NoAnswer(Box<ureq::Error>),
    /// It cannot take it now.
    #[error("it answers with status {status}")]
    Busy { status: u16, after: Option<Duration> },
    /// It will never take this one.
    #[error("it refuses them with status {status}")]
    Refused { status: u16 },
    /// What answers is no collector.
    #[error("what answers with status {status} does not speak OTLP over HTTP")]
    NotOtlp { status: u16 },
}

impl SendError {
    /// Whether the same batch must not be sent again.
    fn is_final(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }

    fn retry_after(&self) -> Option<Duration> {
        if let Self::Busy { after, .. } = self { *after } else { None }
    }
}

/// The running exporters, which end soon after this is dropped.
#[derive(Debug)]
pub(super) struct Exporters {
    _running: Vec<mpsc::Sender<std::convert::Infallible>>,
}

/// What all exporters need.
#[derive(Debug, Clone)]
pub(super) struct Surroundings {
    pub(super) host: HostRoot,
    /// Of the store.
    pub(super) folder: PathBuf,
    /// Name of the node, if it is known.
    pub(super) node: Option<String>,
    pub(super) readiness: Readiness,
    pub(super) metrics: Arc<Metrics>,
}

/// Starts the configured exporters, each on a thread of its own.
pub(super) fn start(export: &Export, progress: &Arc<Progress>, about: &Surroundings) -> Exporters {
    let standing = match export.targets()[..] {
        [] => Standing::good("flow records are not exported (\"flows.export\" in agent.json)"),
        _ => Standing::good("flow records are exported"),
    };
    about.readiness.set(Part::FlowExport, standing);
    let mut running = Vec::new();
    let mut run = |target: Target, sink: Box<dyn Sink>| {
        let (stop, stopped) = mpsc::channel();
        about.metrics.flows(|flows| flows.exports_to(target));
        let exporter = Exporter::new(target, sink, Arc::clone(progress), about.clone(), stopped);
        let name = format!("flows-{}", target.name());
        match std::thread::Builder::new().name(name).stack_size(STACK).spawn(move || exporter.run()) {
            Ok(_) => running.push(stop),
            Err(error) => {
                let text = format!("flow records are not exported: no thread: {error}");
                about.readiness.set(Part::FlowExport, Standing::bad(text));
            }
        }
    };
    if let Some(file) = &export.file {
        run(Target::File, Box::new(Lines::new(about.host.resolve(&file.path), file.bytes)));
    }
    if let Some(otlp) = &export.otlp {
        run(Target::Otlp, Box::new(Collector::new(otlp.clone(), &about.host, about.node.as_deref())));
    }
    Exporters { _running: running }
}

/// TLS in a debug build takes more than the usual 128 KiB of musl; only what is used becomes memory.
const STACK: usize = 1 << 20;
