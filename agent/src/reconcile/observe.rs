//! Looks at the node: asks the runtime for its sandboxes, reads the plugin's records, and asks instances how they are.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nebula_cni_plugin::attachment::record::{self, Found, Record, State};
use nebula_cni_plugin::clock::{Clock, SystemClock};
use nebula_cni_plugin::enrolment::labels::LabelSource;
use nebula_cni_plugin::instance_status::Status;
use nebula_cni_plugin::launch::Pod;
use nebula_cni_plugin::netns::{Namespaces, Netns, SystemNamespaces};
use nebula_cni_plugin::request::{Key, is_ifname, is_name};
use nebula_cni_plugin::supervisor::{LAUNCH_OPTION, process};
use serde_json::Value;

use super::entry::{Entry, PodFacts};
use super::seen::{Attachment, CrashLoop, Enrolment, Instance, Sandbox, Seen};
use crate::host_root::HostRoot;
use crate::runtime::{self, Client, RuntimeError};

/// How thorough a look is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// Instances that answered before and whose process is still there are not asked again.
    Quick,
    /// Every instance is asked, and every device looked for.
    Thorough,
}

/// Looks again and again, and remembers what does not change.
#[derive(Debug)]
pub struct Observer {
    runtime: Client,
    host: HostRoot,
    /// What the runtime told about each sandbox.
    networks: HashMap<String, Arc<Network>>,
    /// The last answer of each instance, by container.
    answers: HashMap<String, Arc<Status>>,
    /// Since when an instance has not answered, by container.
    silent: HashMap<String, Instant>,
}

/// The network of a sandbox, as the runtime tells it. It never changes.
#[derive(Debug)]
pub struct Network {
    /// Whether the pod uses the node's own network.
    pub is_of_host: bool,
    /// Path of its network namespace, as the node names it.
    pub netns: Option<PathBuf>,
    /// The runtime's summary of what the plugins set up.
    pub cni_result: Value,
    /// The pod's annotations.
    pub annotations: HashMap<String, String>,
}

impl Observer {
    /// An observer that has not looked yet.
    #[must_use]
    pub fn new(runtime: Client, host: HostRoot) -> Self {
        Self { runtime, host, networks: HashMap::new(), answers: HashMap::new(), silent: HashMap::new() }
    }

    /// What the runtime told about the network of a sandbox.
    #[must_use]
    pub fn network(&self, sandbox: &str) -> Option<Arc<Network>> {
        self.networks.get(sandbox).cloned()
    }

    /// The last answers of the instances, by container.
    #[must_use]
    pub fn answers(&self) -> &HashMap<String, Arc<Status>> {
        &self.answers
    }

    /// Looks at everything.
    ///
    /// # Errors
    /// Returns an error if the runtime does not answer; without its list nothing may be concluded.
    pub async fn look(
        &mut self,
        entry: &Arc<Entry>,
        labels: Arc<dyn LabelSource + Send + Sync>,
        depth: Depth,
    ) -> Result<Seen, RuntimeError> {
        let listed = self.runtime.sandboxes().await?;
        self.networks.retain(|id, _| listed.iter().any(|sandbox| sandbox.id == *id));
        for sandbox in listed.iter().filter(|sandbox| sandbox.is_ready) {
            if !self.networks.contains_key(&sandbox.id)
                // One that was removed meanwhile is not there at the next look.
                && let Ok(status) = self.runtime.sandbox(&sandbox.id).await
            {
                let network = Network {
                    is_of_host: status.has_host_network,
                    netns: status.netns,
                    cni_result: status.cni_result,
                    annotations: status.sandbox.annotations,
                };
                self.networks.insert(sandbox.id.clone(), Arc::new(network));
            }
        }
        let (host, entry, networks) = (self.host.clone(), Arc::clone(entry), self.networks.clone());
        let answers = std::mem::take(&mut self.answers);
        // Files, sockets and namespaces block.
        let looked = tokio::task::spawn_blocking(move || {
            let labels: &dyn LabelSource = &*labels;
            look_at(&host, &entry, listed, &networks, &answers, labels, depth)
        });
        let mut seen = looked.await.map_err(|error| RuntimeError::Call {
            socket: self.runtime.socket().to_owned(),
            call: "ListPodSandbox",
            cause: format!("the look at the node failed: {error}"),
        })?;
        let now = SystemClock.now();
        self.silent
            .retain(|id, _| seen.records.iter().any(|record| record.key.container_id == *id && record.is_silent()));
        for record in seen.records.iter_mut().filter(|record| record.is_silent()) {
            let since = *self.silent.entry(record.key.container_id.clone()).or_insert(now);
            record.silent_for = now.saturating_duration_since(since);
        }
        let answer = |record: &Attachment| match &record.instance {
            Instance::Answers(status) => Some((record.key.container_id.clone(), Arc::clone(status))),
            Instance::Silent(_) => None,
        };
        self.answers = seen.records.iter().filter_map(answer).collect();
        Ok(seen)
    }
}

fn look_at(
    host: &HostRoot,
    entry: &Entry,
    listed: Vec<runtime::Sandbox>,
    networks: &HashMap<String, Arc<Network>>,
    answers: &HashMap<String, Arc<Status>>,
    labels: &dyn LabelSource,
    depth: Depth,
) -> Seen {
    let state_dir = host.resolve(&entry.state_dir);
    // Before the records: an ADD or DEL in between must not make an orphan of its instance.
    let orphans = if depth == Depth::Thorough { running(&state_dir, entry) } else { Vec::new() };
    let paths = record::list(&state_dir, &entry.network).unwrap_or_default();
    let (mut records, mut silent) = (Vec::new(), Vec::new());
    for record in paths.iter().filter_map(|path| load(path)) {
        let known = answers.get(&record.target.container_id).filter(|status| depth == Depth::Quick && is_there(status));
        match known {
            Some(status) => records.push(attachment(host, *record, Ok(Arc::clone(status)), depth)),
            None => silent.push(record),
        }
    }
    std::thread::scope(|scope| {
        // A few at a time: an instance that hangs takes two seconds.
        while !silent.is_empty() {
            let ask = |record: Box<Record>| {
                scope.spawn(move || {
                    let answer = ask(&host.resolve(&record.status_socket));
                    attachment(host, *record, answer, depth)
                })
            };
            let asked: Vec<_> = silent.drain(..PARALLEL.min(silent.len())).map(ask).collect();
            records.extend(asked.into_iter().filter_map(|asked| asked.join().ok()));
        }
    });
    let recorded: HashSet<&str> = records.iter().map(|record| record.key.container_id.as_str()).collect();
    let sandbox = |listed| sandbox(host, entry, listed, networks, labels, &recorded);
    let sandboxes = listed.iter().filter_map(sandbox).collect();
    let orphans = orphans.into_iter().filter(|key| records.iter().all(|record: &Attachment| record.key != *key));
    Seen { orphans: orphans.collect(), sandboxes, records }
}

/// The instances that run, by the launch contracts they were started with.
fn running(state_dir: &Path, entry: &Entry) -> Vec<Key> {
    // The node's own name of the directory; the agent may see it under another.
    let folders = [entry.state_dir.join(&entry.network), state_dir.join(&entry.network)];
    let key = |path: &Path| {
        let (container_id, ifname) = path.file_stem()?.to_str()?.rsplit_once('-')?;
        let is_ours = folders.iter().any(|folder| path.parent() == Some(folder))
            && path.extension().is_some_and(|extension| extension == "launch")
            && is_name(container_id)
            && is_ifname(ifname);
        let key =
            Key { network: entry.network.clone(), container_id: container_id.to_owned(), ifname: ifname.to_owned() };
        is_ours.then_some(key)
    };
    process::arguments_behind(LAUNCH_OPTION).iter().filter_map(|path| key(path)).collect()
}

fn sandbox(
    host: &HostRoot,
    entry: &Entry,
    listed: &runtime::Sandbox,
    networks: &HashMap<String, Arc<Network>>,
    labels: &dyn LabelSource,
    recorded: &HashSet<&str>,
) -> Option<Sandbox> {
    let network = networks.get(&listed.id);
    // Without details nothing is known about it yet.
    if network.is_none_or(|network| network.is_of_host) && listed.is_ready {
        return None;
    }
    let netns = network.and_then(|network| network.netns.clone());
    let enrolment = if listed.is_ready && !recorded.contains(listed.id.as_str()) {
        let facts = PodFacts {
            container_id: &listed.id,
            namespace: &listed.namespace,
            name: &listed.name,
            uid: &listed.uid,
            annotations: &listed.annotations,
        };
        entry.enrolment(&facts, labels)
    } else {
        Enrolment::NotEnrolled
    };
    Some(Sandbox {
        id: listed.id.clone(),
        pod: Pod { namespace: listed.namespace.clone(), name: listed.name.clone(), uid: listed.uid.clone() },
        attempt: listed.attempt,
        is_ready: listed.is_ready,
        netns_id: netns.as_ref().and_then(|path| open(host, path)).map(|netns| netns.id),
        netns,
        enrolment,
    })
}

/// A damaged record names no pod: its sandbox counts as one without a record.
fn load(path: &Path) -> Option<Box<Record>> {
    match Record::load(path) {
        Ok(Found::Record(record)) => Some(record),
        _ => None,
    }
}

fn attachment(host: &HostRoot, record: Record, instance: io::Result<Arc<Status>>, depth: Depth) -> Attachment {
    let netns = open(host, &record.target.netns).filter(|netns| netns.id == record.target.netns_id);
    let look_for_device = depth == Depth::Thorough && record.state == State::Running && instance.is_ok();
    let has_device = netns
        .as_ref()
        .filter(|_| look_for_device)
        .and_then(|netns| SystemNamespaces.link(netns, &record.target.device).ok())
        .map(|link| link.is_some());
    let restarts = record.restarts.unwrap_or_default();
    Attachment {
        key: record.key(),
        is_complete: record.state == State::Running,
        netns_id: record.target.netns_id,
        has_netns: netns.is_some(),
        instance: match instance {
            Ok(status) => Instance::Answers(status),
            Err(error) => Instance::Silent(error.to_string()),
        },
        silent_for: Duration::ZERO,
        has_device,
        restarts: restarts.count,
        crash_loop: restarts
            .is_crash_loop()
            .then(|| CrashLoop { restarts: restarts.count, delay: restarts.delay().as_secs() }),
        pod: record.target.pod,
    }
}

fn ask(socket: &Path) -> io::Result<Arc<Status>> {
    let mut status = Status::ask(socket)?;
    // Most never count anything, and answers are kept.
    status.counters.retain(|_, count| *count > 0);
    Ok(Arc::new(status))
}

/// Whether the process that gave this answer is still there.
fn is_there(status: &Status) -> bool {
    status.pid.and_then(process::Process::with_pid).is_some_and(process::Process::is_alive)
}

fn open(host: &HostRoot, path: &Path) -> Option<Netns> {
    SystemNamespaces.open(&host.resolve(path)).ok()
}

/// When the records of a network last changed: each change of one replaces, adds or removes a file.
#[must_use]
pub fn records_changed(host: &HostRoot, entry: &Entry) -> Option<SystemTime> {
    let folder = host.resolve(&entry.state_dir.join(&entry.network));
    folder.metadata().and_then(|folder| folder.modified()).ok()
}

const PARALLEL: usize = 16;
