//! Flow records of all pods of this node: taken from their instances in turns, and kept on disk for hours.
//!
//! | file | what |
//! | --- | --- |
//! | `attached.rs` | whose instances there are |
//! | `schedule.rs` | when each of them is asked |
//! | `ask.rs` | asks one, within a time and a size |
//! | `drain.rs` | asks all of them in turns |
//! | `writer.rs` | the thread that writes to the store |
//! | `budget.rs` | how much of a core a thread may take |
//! | `store/` | the store |
//! | `pairs.rs` | counters of traffic by pairs of namespaces |
//! | `export/` | records for others: a file, a collector |
//! | `command.rs` | `nebula-cni-agent flows` |

mod ask;
mod attached;
mod budget;
pub mod command;
mod drain;
pub mod export;
pub(crate) mod pairs;
mod schedule;
pub mod store;
#[cfg(test)]
mod tests;
mod writer;

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::mpsc;

pub(crate) use self::ask::AskError;
pub use self::attached::Attached;
use self::drain::Drain;
use self::export::{Progress, Surroundings};
use self::writer::Writer;
use crate::config::Config;
use crate::host_root::HostRoot;
use crate::metrics::Metrics;
use crate::node::Node;
use crate::readiness::{Part, Standing};

/// Folder of the store as the node names it: on disk, for `/run` is memory.
pub const FLOWS_DIR: &str = "/var/lib/nebula-cni/flows";

/// Folder of the store as the agent sees it.
#[must_use]
pub fn folder(host: &HostRoot) -> PathBuf {
    host.resolve(FLOWS_DIR.as_ref())
}

/// Keeps the records of this node, as it is configured, and exports them, until the task is cancelled. `name` is that
/// of the node.
pub(crate) async fn keep(node: &Node, name: Option<String>, metrics: Arc<Metrics>) {
    let Config { host_root, flows, flow_export, .. } = &*node.config;
    let Some(bound) = *flows else {
        let folder = folder(host_root);
        // Nobody wants to know any more.
        let _ = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(folder)).await;
        node.readiness
            .set(Part::Flows, Standing::good("flow records are not kept on this node (\"flows\" in agent.json)"));
        node.readiness.set(Part::FlowExport, Standing::good("there are no flow records to export"));
        return;
    };
    let (jobs, taken) = mpsc::channel(drain::PARALLEL);
    let progress = Arc::new(Progress::new(flow_export.targets()));
    let (readiness, folder) = (node.readiness.clone(), folder(host_root));
    let writer = Writer::new(folder.clone(), bound, readiness.clone(), Arc::clone(&metrics), Arc::clone(&progress));
    let retirement = node.retirement.clone();
    // It ends when the drain does.
    let written = tokio::task::spawn_blocking(move || writer.run(taken));
    let about = Surroundings { host: host_root.clone(), folder, node: name, readiness, metrics: Arc::clone(&metrics) };
    let _exporters = export::start(flow_export, &progress, &about);
    Drain::new(host_root.clone(), retirement, metrics, jobs).run().await;
    let _ = written.await;
}

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    u64::try_from(nebula_linux::clock::since_epoch().as_millis()).unwrap_or(u64::MAX)
}
