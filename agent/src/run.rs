//! The agent at work: programs, then credentials and the CA's address, then the self-test, then the chain.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nebula_linux::memory;
use serde_json::{Map, Value};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::api;
use crate::ca::{self, Target};
use crate::chain::Keeper;
use crate::credentials::{self, Volumes};
use crate::flows;
use crate::listener::{self, MoreMetrics};
use crate::metrics::Metrics;
use crate::network;
use crate::node::Node;
use crate::node_credential;
use crate::places::{self, Places};
use crate::programs::{self, Programs};
use crate::readiness::{Part, Standing};
use crate::reconcile;
use crate::self_test;
use crate::table;
use crate::table::ranges::{self, Ranges};
use crate::underlay;
use crate::watch::DirectoryWatch;

/// What the agent needs besides its configuration.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where its volumes are mounted.
    pub volumes: Volumes,
    /// Directory with the programs to install.
    pub programs: PathBuf,
    /// Name of the node in Kubernetes; `None` without Kubernetes.
    pub node: Option<String>,
}

/// What to do if the listener cannot be opened.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "does another agent run on this node? \"listen\" in agent.json changes it",
        io::ErrorKind::AddrNotAvailable => "\"listen\" in agent.json changes it",
        _ => "socket, bind, listen, setsockopt and ioctl must be allowed",
    }
}

/// Why the agent cannot work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// There is no listener; mostly because its address is taken.
    #[error("cannot listen on {address}: {source}; {}", advice(source))]
    Listen {
        /// Which address.
        address: std::net::SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The system refuses something basic.
    #[error("cannot watch signals: {0}")]
    System(#[from] io::Error),
}

/// Works until SIGTERM, and then leaves everything as it is: pods keep their tunnels, and the chain stays closed for
/// those that start meanwhile.
///
/// # Errors
/// Returns an error if it cannot start.
pub async fn run(node: Node, options: Options) -> Result<(), RunError> {
    let address = node.config.listen;
    let listener = listener::bind(address).map_err(|source| RunError::Listen { address, source })?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (places_tx, places) = watch::channel(None);
    let (target_tx, target) = watch::channel(None);
    let (entry_tx, entry) = watch::channel(None);
    let (services_tx, services) = watch::channel(None);
    let (subnets_tx, subnets) = watch::channel(None);
    let (ports_tx, ports) = watch::channel(underlay::nodes::Ports::new());
    let metrics = Arc::new(Metrics::new(node.config.pod_metrics));
    let shown = Arc::clone(&metrics);
    let more: MoreMetrics = Arc::new(move || shown.text());
    let looked = Arc::clone(&metrics);
    let pods: api::Pods = Arc::new(move || looked.pods());
    let work = async {
        tokio::join!(
            listener::serve(listener, node.readiness.clone(), more),
            places::follow(&node.config, places_tx),
            ca::follow(&node, target_tx),
            ca::watch_health(&node, target.clone()),
            node_credential::keep(&node, target.clone()),
            underlay::lighthouses::watch(&node, target.clone()),
            underlay::nodes::watch(&node.readiness, ports),
            keep_programs(&node, options.programs, places.clone(), DirectoryWatch::new()),
            keep_credentials(&node, options.volumes, DirectoryWatch::new()),
            ranges::follow(&node.config, services_tx),
            network::follow(&node, options.node.clone(), subnets_tx),
            network::watch_gateway(&node),
            test_then_publish(&node, places.clone(), target.clone(), (services, subnets), entry_tx),
            Keeper::new(&node).run(entry.clone(), places.clone(), DirectoryWatch::new()),
            release_memory(),
            flows::keep(&node, options.node.clone(), Arc::clone(&metrics)),
            table::keep(&node, options.node.clone(), (target.clone(), ports_tx), Arc::clone(&metrics)),
            api::keep(&node, options.node.clone(), pods),
            reconcile::start::keep(&node, options.node, metrics, entry, places),
        );
    };
    tokio::select! {
        () = work => Ok(()),
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

/// Gives back what the start and short peaks left behind: free blocks of the heap, and pages of the program that are
/// mapped and seldom used.
async fn release_memory() {
    loop {
        tokio::time::sleep(RELEASE).await;
        memory::release_free_heap();
        memory::release_program_pages();
    }
}

/// Keeps the programs installed, from the moment at which the directories are known.
async fn keep_programs(
    node: &Node,
    source: PathBuf,
    mut places: watch::Receiver<Option<Places>>,
    mut watch: DirectoryWatch,
) {
    let Node { config, readiness, retirement, .. } = node;
    let mut programs = Programs::new(source);
    loop {
        let known = places.borrow_and_update().clone();
        let Some(known) = known else {
            readiness.set(Part::Programs, Standing::bad("asks the runtime for its directories"));
            if places.changed().await.is_err() {
                return;
            }
            continue;
        };
        let directories: Vec<PathBuf> = known.bin.iter().map(|dir| config.host_root.resolve(dir)).collect();
        if !retirement.has_begun() {
            let (mut taken, wanted) = (programs, directories.clone());
            let installed = tokio::task::spawn_blocking(move || {
                let outcome = taken.install(&wanted);
                (taken, outcome)
            });
            let Ok((back, outcome)) = installed.await else { return };
            programs = back;
            if let Ok(count @ 1..) = outcome {
                tracing::info!(count, "installed programs");
            }
            let mut standing = programs::standing(&outcome, &directories, &config.host_root);
            if let (true, Some(remark)) = (standing.ok, watch.remark()) {
                standing.reason = format!("{}; {remark}", standing.reason);
            }
            readiness.set(Part::Programs, standing);
        }
        tokio::select! {
            () = watch.changed(&directories, POLL) => {}
            changed = places.changed() => if changed.is_err() { watch.changed(&directories, POLL).await },
        }
    }
}

async fn keep_credentials(node: &Node, volumes: Volumes, mut watch: DirectoryWatch) {
    let Node { config, readiness, retirement, .. } = node;
    let mut watched = volumes.directories();
    watched.push(config.host_root.resolve(Path::new(crate::config::AGENT_DIR)));
    loop {
        if !retirement.has_begun() {
            let (volumes, host) = (volumes.clone(), config.host_root.clone());
            let refreshed = tokio::task::spawn_blocking(move || {
                let outcome = credentials::refresh(&volumes, &host);
                credentials::standing(&outcome, &volumes)
            });
            if let Ok(standing) = refreshed.await {
                readiness.set(Part::Credentials, standing);
            }
        }
        let pause = if readiness.is_good(Part::Credentials) { POLL } else { RETRY };
        watch.changed(&watched, pause).await;
    }
}

/// Publishes our chain entry once programs and credentials are in place and the self-test has passed with it. A chain
/// that an earlier agent wrote stays meanwhile.
async fn test_then_publish(
    node: &Node,
    mut places: watch::Receiver<Option<Places>>,
    mut target: watch::Receiver<Option<Target>>,
    (mut services, mut subnets): (watch::Receiver<Option<Ranges>>, watch::Receiver<Option<network::Found>>),
    entry: watch::Sender<Option<Map<String, Value>>>,
) {
    let Node { config, readiness, retirement, .. } = node;
    let mut changes = readiness.watch();
    let mut tested: Option<(Map<String, Value>, PathBuf)> = None;
    let mut failed_at: Option<Instant> = None;
    loop {
        if retirement.has_begun() {
            entry.send_replace(None);
            tested = None;
            let gone = retirement.standing();
            for part in [Part::Chain, Part::Runtime, Part::SelfTest] {
                readiness.set(part, gone.clone());
            }
            tokio::time::sleep(RETRY).await;
            continue;
        }
        let bin_dir = places.borrow_and_update().as_ref().and_then(|places| places.bin.first().cloned());
        let known = target.borrow_and_update().clone();
        let ranges = services.borrow_and_update().clone();
        let own = subnets.borrow_and_update().clone();
        changes.mark_unchanged();
        let is_prepared = readiness.is_good(Part::Programs) && readiness.is_good(Part::Credentials);
        if let (Some(bin_dir), Some(known), Some(Ok(ranges)), Some(Ok(own)), true) =
            (bin_dir, known, &ranges, &own, is_prepared)
        {
            let now = ranges::complete(config.chain_entry(&known.url, known.server_name.as_deref()), ranges);
            let now = network::complete(now, own);
            let is_due = tested.as_ref() != Some(&(now.clone(), bin_dir.clone()))
                && failed_at.is_none_or(|at| at.elapsed() > TEST_AGAIN);
            if is_due {
                let (dir, with, host) = (bin_dir.clone(), now.clone(), config.host_root.clone());
                let outcome = tokio::task::spawn_blocking(move || self_test::run(&dir, &with, &host)).await;
                match outcome {
                    Ok(Ok(())) => {
                        failed_at = None;
                        tested = Some((now.clone(), bin_dir));
                        let passed = "the installed plugin made, checked and removed a tunnel";
                        readiness.set(Part::SelfTest, Standing::good(passed));
                        entry.send_replace(Some(now));
                    }
                    Ok(Err(error)) => {
                        failed_at = Some(Instant::now());
                        readiness.set(Part::SelfTest, Standing::bad(error.to_string()).advice(error.advice()));
                    }
                    Err(_) => return,
                }
            }
        } else if !readiness.is_good(Part::SelfTest) {
            let waits =
                "waits for the programs, the credentials, the address of the CA and the ranges of Services and pods";
            let standing = match (ranges, own) {
                (Some(Err(problem)), _) => Standing::bad(problem).advice(ranges::ADVICE),
                (_, Some(Err(problem))) => Standing::bad(problem).advice(network::ADVICE),
                _ => Standing::bad(waits),
            };
            readiness.set(Part::SelfTest, standing);
        }
        tokio::select! {
            _ = changes.changed() => {}
            Ok(()) = places.changed() => {}
            Ok(()) = target.changed() => {}
            Ok(()) = services.changed() => {}
            Ok(()) = subnets.changed() => {}
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

const RELEASE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(2);
const TEST_AGAIN: Duration = Duration::from_secs(15);
