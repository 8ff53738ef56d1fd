//! Housekeeping outside the CNI verbs: restarts instances that died, with backoff, and removes attachments whose pod is
//! gone. It runs after verbs other than DEL and VERSION, from a timer, and for the node agent.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nebula_cni_contract::clock::Deadline;

use crate::attachment::files::{self, Files};
use crate::attachment::lock::Lock;
use crate::attachment::record::{self, Found, Record, State};
use crate::attachment::released;
use crate::host::Host;
use crate::link::capture::PodCapture;
use crate::link::guard::Guard;
use crate::programs;
use crate::request::is_name;
use crate::settings::capturing::CLUSTER_FOLDER;
use crate::supervisor::Launch;
use crate::verb::del::detach;
use crate::verb::upgrade;

/// How thorough the reconciliation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Only cheap checks.
    Quick,
    /// Also asks the service manager about instances that it should have restarted by itself, and removes stale files
    /// and rules.
    Thorough,
}

/// Reconciles all networks of a state directory.
///
/// # Errors
/// Lists what could not be repaired, after everything was tried.
pub fn all(state_dir: &Path, host: &Host<'_>) -> Result<(), Vec<String>> {
    let entries = match fs::read_dir(state_dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(vec![format!("cannot list {}: {e}", state_dir.display())]),
        Ok(entries) => entries,
    };
    let names = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| is_name(name) && name != AGENT && name != CLUSTER_FOLDER);
    let done = joined(names.map(|name| network(state_dir, &name, Depth::Thorough, host)));
    programs::sweep(state_dir, host.plugin_dir.as_deref(), now(host));
    done
}

fn now(host: &Host<'_>) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(host.clock.unix_seconds().try_into().unwrap_or_default())
}

/// Reconciles one network.
///
/// # Errors
/// The same as [`all`].
pub fn network(state_dir: &Path, network: &str, depth: Depth, host: &Host<'_>) -> Result<(), Vec<String>> {
    let paths = record::list(state_dir, network).map_err(|e| vec![format!("cannot list records: {e}")])?;
    let done =
        joined(paths.iter().map(|path| attachment(state_dir, path, depth, host).map_err(|problem| vec![problem])));
    if depth == Depth::Thorough {
        released::sweep(state_dir, network, now(host));
        files::sweep(state_dir, network);
        // What could not be removed is retried by the next run.
        let _ = host.guards.sweep();
        let _ = host.captures.sweep();
    }
    done
}

fn attachment(state_dir: &Path, path: &Path, depth: Depth, host: &Host<'_>) -> Result<(), String> {
    // A damaged record names no pod; its instance ends with the pod's namespace, or DEL removes it.
    let Ok(Found::Record(record)) = Record::load(path) else { return Ok(()) };
    let files = Files::new(state_dir, &record.key());
    if !is_well(&record, &files, depth, host) {
        repair(path, &files, depth, host)?;
    }
    if depth == Depth::Thorough {
        let pod = &record.target.pod;
        all_is_seen(&record, host).map_err(|why| format!("pod {}/{}: {why}", pod.namespace, pod.name))?;
    }
    Ok(())
}

/// Whether the rules on a pod's link see all of its frames, also after what came to the link later. Nobody but the
/// operator can do anything about it.
fn all_is_seen(record: &Record, host: &Host<'_>) -> Result<(), String> {
    let isolated = record.guard.iter().map(|guard| (&guard.link, guard.index));
    let captured = record.capture.iter().map(|capture| (&capture.guard.link, capture.guard.index));
    isolated.chain(captured).try_for_each(|(link, index)| host.links.is_there(link, index).map(drop))
}

fn repair(path: &Path, files: &Files, depth: Depth, host: &Host<'_>) -> Result<(), String> {
    // Whoever holds the lock is working on the attachment.
    let Ok(lock) = Lock::acquire(files, host.clock, Deadline::after(host.clock, Duration::ZERO)) else {
        return Ok(());
    };
    let Ok(Found::Record(mut record)) = Record::load(path) else { return Ok(()) };
    let pod = record.target.pod.clone();
    let named = |problem: String| format!("pod {}/{}: {problem}", pod.namespace, pod.name);
    if !has_namespace(&record, host) {
        detach(files, host).map_err(|e| named(e.to_string()))?;
        lock.remove();
        return Ok(());
    }
    for network in &record.refused {
        let refused = host.routes.refuse(*network);
        refused.map_err(|e| named(format!("the node can send to {network} in clear: {e}")))?;
    }
    if let Some(guard) = &record.guard
        && !is_guarded(guard, host)
    {
        host.guards.install(guard).map_err(|e| named(format!("cannot isolate it: {e}")))?;
    }
    if let Some(capture) = &record.capture
        && !is_captured(capture, &record, depth, host)
    {
        let installed =
            host.namespaces.open(&record.target.netns).and_then(|netns| host.captures.install(&netns, capture));
        installed.map_err(|e| named(format!("cannot capture its traffic: {e}")))?;
    }
    if record.is_upgrading {
        upgrade::tidy_up(&mut record, files, host).map_err(named)?;
    }
    if record.state == State::Intent || is_well(&record, files, depth, host) {
        return Ok(());
    }
    let supervisor = host.supervisor(record.supervisor);
    let (restarts, now) = (record.restarts.unwrap_or_default(), host.clock.unix_seconds());
    if !supervisor.restarts_by_itself() && !restarts.is_due(now) {
        return Ok(());
    }
    // The threads of a killed instance keep its device open for some milliseconds.
    for dead in record.processes().into_iter().flatten() {
        dead.stop(host.clock).map_err(named)?;
    }
    let (instance, netns) = (record.to_start(), record.target.netns.clone());
    let description = format!("Nebula tunnel of pod {}/{}", record.target.pod.namespace, record.target.pod.name);
    let launch = Launch {
        instance: &instance,
        files,
        netns: &netns,
        description: &description,
        budget: RESTART_TIMEOUT,
        memory_limit: record.memory_limit,
        replaces: None,
    };
    let mut started = |process| {
        (record.process, record.predecessor) = (process, None);
        record.restarts = Some(restarts.and_one(now));
        record.save(files)
    };
    supervisor.restart(&launch, host.clock, &mut started).map_err(|failure| format!("{description}: {failure}"))
}

fn is_well(record: &Record, files: &Files, depth: Depth, host: &Host<'_>) -> bool {
    let supervisor = host.supervisor(record.supervisor);
    // An upgrade is under way, and its plugin holds the lock; or that plugin was killed.
    if record.is_upgrading {
        return false;
    }
    if record.guard.as_ref().is_some_and(|guard| !is_guarded(guard, host)) {
        return false;
    }
    if record.capture.as_ref().is_some_and(|capture| !is_captured(capture, record, depth, host)) {
        return false;
    }
    if record.state == State::Intent {
        // Partly set up: either its ADD is still running, or a DEL will follow as long as the pod exists. A running pod
        // that could not be attached stays closed.
        return has_namespace(record, host);
    }
    if supervisor.restarts_by_itself() && depth == Depth::Quick {
        return true;
    }
    supervisor.is_alive(files, record.process, host.clock)
}

/// A link that is gone needs no rules: without it the pod is cut off.
fn is_guarded(guard: &Guard, host: &Host<'_>) -> bool {
    host.links.is_there(&guard.link, guard.index) == Ok(false) || host.guards.is_in_force(guard).unwrap_or(false)
}

/// A quick look is at the rules on the node only: they are what nothing passes by. A link that is gone needs none.
fn is_captured(capture: &PodCapture, record: &Record, depth: Depth, host: &Host<'_>) -> bool {
    let missing = match depth {
        Depth::Quick => host.captures.unguarded(capture),
        Depth::Thorough => {
            host.namespaces.open(&record.target.netns).and_then(|netns| host.captures.missing(&netns, capture))
        }
    };
    missing.is_ok_and(|missing| missing.is_empty())
        || host.links.is_there(&capture.guard.link, capture.guard.index) == Ok(false)
}

fn has_namespace(record: &Record, host: &Host<'_>) -> bool {
    host.namespaces.open(&record.target.netns).is_ok_and(|netns| netns.id == record.target.netns_id)
}

fn joined(results: impl Iterator<Item = Result<(), Vec<String>>>) -> Result<(), Vec<String>> {
    let problems: Vec<String> = results.filter_map(Result::err).flatten().collect();
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// The node agent's directory, beside those of the networks.
const AGENT: &str = "agent";
// The longest time limit that ADD allows, because nobody waits for a restart.
const RESTART_TIMEOUT: Duration = Duration::from_secs(60);
