//! Looks at the node: asks the runtime for its sandboxes, reads the plugin's records, and asks instances how they are.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::instance_status::Status;
use nebula_cni_contract::labels::LabelSource;
use nebula_cni_contract::launch::Pod;
use nebula_cni_contract::netns::{Namespaces, Netns, SystemNamespaces};
use nebula_cni_plugin::attachment::record::{self, Found, Record, State};
use nebula_cni_plugin::request::{Key, is_ifname, is_name};
use nebula_cni_plugin::supervisor::{LAUNCH_OPTION, process};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;

use super::entry::{Entry, PodFacts};
use super::seen::{Attachment, CrashLoop, Enrolment, Instance, Sandbox, Seen};
use crate::host_root::HostRoot;
use crate::runtime::{self, Client, RuntimeError};

/// How thorough a look is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// The last look still holds if runtime, records, namespaces and the processes of instances are as they were.
    Glance,
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
    last: Option<Arc<Look>>,
}

/// A look, and what it was based on.
#[derive(Debug)]
struct Look {
    entry: Arc<Entry>,
    listed: Vec<runtime::Sandbox>,
    /// When the records had last changed.
    records: Option<SystemTime>,
    /// The process of each instance. A descriptor costs less than a look into `/proc`, and means no later process.
    processes: Vec<OwnedFd>,
    seen: Arc<Seen>,
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
        Self { runtime, host, networks: HashMap::new(), answers: HashMap::new(), silent: HashMap::new(), last: None }
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

    /// Asks the instance of this container again at the next look.
    pub fn forget(&mut self, container: &str) {
        self.answers.remove(container);
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
    ) -> Result<Arc<Seen>, RuntimeError> {
        let records = records_changed(&self.host, entry);
        let began = UNIX_EPOCH + Duration::from_secs(SystemClock.unix_seconds().try_into().unwrap_or_default());
        let mut listed = self.runtime.sandboxes().await?;
        // Some runtimes list them in random order.
        listed.sort_by(|a, b| a.id.cmp(&b.id));
        if depth == Depth::Glance
            && let Some(last) = self.last.clone()
            && Arc::ptr_eq(&last.entry, entry)
            && last.records == records
            && last.listed == listed
            && listed.iter().all(|sandbox| !sandbox.is_ready || self.networks.contains_key(&sandbox.id))
        {
            let (host, look) = (self.host.clone(), Arc::clone(&last));
            if matches!(tokio::task::spawn_blocking(move || look.holds(&host)).await, Ok(true)) {
                return Ok(Arc::clone(&last.seen));
            }
        }
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
        let (host, of_entry, networks) = (self.host.clone(), Arc::clone(entry), self.networks.clone());
        let answers = std::mem::take(&mut self.answers);
        // Files, sockets and namespaces block.
        let looked = tokio::task::spawn_blocking(move || {
            let labels: &dyn LabelSource = &*labels;
            let seen = look_at(&host, &of_entry, &listed, &networks, &answers, labels, depth);
            (listed, seen)
        });
        let (listed, mut seen) = looked.await.map_err(|error| RuntimeError::Call {
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
        let seen = Arc::new(seen);
        // A record that changed a moment ago can change again without another time stamp.
        let is_settled = records.is_none_or(|at| began.duration_since(at).is_ok_and(|age| age >= MIN_AGE));
        self.last = is_settled
            .then(|| seen.records.iter().map(process).collect::<Option<_>>())
            .flatten()
            .map(|processes| Look { entry: Arc::clone(entry), listed, records, processes, seen: Arc::clone(&seen) })
            .map(Arc::new);
        Ok(seen)
    }
}

impl Look {
    /// Whether nothing changed of what the runtime's list and the records do not show: every instance runs, and every
    /// namespace is the one that it was.
    fn holds(&self, host: &HostRoot) -> bool {
        // Readable once the process has ended.
        let mut ended: Vec<_> =
            self.processes.iter().map(|process| PollFd::new(process.as_fd(), PollFlags::POLLIN)).collect();
        if poll(&mut ended, PollTimeout::ZERO) != Ok(0) {
            return false;
        }
        let sandbox = |sandbox: &Sandbox| {
            let netns_id = sandbox.netns.as_ref().and_then(|path| open(host, path)).map(|netns| netns.id);
            netns_id == sandbox.netns_id && !matches!(sandbox.enrolment, Enrolment::Undecided(_))
        };
        self.seen.records.iter().all(|record| record.has_netns) && self.seen.sandboxes.iter().all(sandbox)
    }
}

/// The process of an instance that answered; `None` if it did not, or has ended.
fn process(record: &Attachment) -> Option<OwnedFd> {
    let Instance::Answers(status) = &record.instance else { return None };
    pidfd_open(Pid::from_raw(status.pid?)?, PidfdFlags::empty()).ok()
}

fn look_at(
    host: &HostRoot,
    entry: &Entry,
    listed: &[runtime::Sandbox],
    networks: &HashMap<String, Arc<Network>>,
    answers: &HashMap<String, Arc<Status>>,
    labels: &dyn LabelSource,
    depth: Depth,
) -> Seen {
    let state_dir = host.resolve(&entry.state_dir);
    // Before the records: an ADD or DEL in between must not make an orphan of its instance.
    let orphans = if depth == Depth::Thorough { running(&state_dir, entry) } else { Vec::new() };
    let paths = record::list(&state_dir, &entry.network).unwrap_or_default();
    let (mut records, mut silent, mut foreign) = (Vec::new(), Vec::new(), HashSet::new());
    for path in &paths {
        let record = match Record::load(path) {
            Ok(Found::Record(record)) => record,
            // Of a pod with a tunnel, which only that release may touch.
            Ok(Found::Foreign(why)) => {
                if depth == Depth::Thorough {
                    let record = path.display();
                    tracing::warn!(%record, why, "a pod's tunnel is left as it is: install that release again");
                }
                foreign.extend(container_of(path));
                continue;
            }
            // A damaged record names no pod: its sandbox counts as one without a record.
            _ => continue,
        };
        let known =
            answers.get(&record.target.container_id).filter(|status| depth != Depth::Thorough && is_there(status));
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
    let known = records.iter().map(|record: &Attachment| record.key.container_id.as_str());
    let recorded: HashSet<&str> = known.chain(foreign.iter().map(String::as_str)).collect();
    let sandbox = |listed| sandbox(host, entry, listed, networks, labels, &recorded);
    let sandboxes = listed.iter().filter_map(sandbox).collect();
    let orphans = orphans.into_iter().filter(|key| records.iter().all(|record| record.key != *key));
    let orphans = orphans.filter(|key| !foreign.contains(&key.container_id));
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

/// The container that a record is of, by the name of its file.
fn container_of(path: &Path) -> Option<String> {
    Some(path.file_stem()?.to_str()?.rsplit_once('-')?.0.to_owned())
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
        has_rules: record.guard.is_some() || record.capture.is_some(),
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
/// Longer than the time between two time stamps of a file system, and than the error of a clock that is read in
/// seconds.
const MIN_AGE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use nebula_cni_contract::labels::{Answer, Question};
    use serde_json::json;

    use super::*;

    struct NoLabels;

    impl LabelSource for NoLabels {
        fn ask(&self, _: &Path, _: &Question, _: &dyn Clock) -> Answer {
            Answer::Undecided("no API server".to_owned())
        }
    }

    #[test]
    fn a_pod_whose_record_a_newer_plugin_wrote_is_no_pod_without_a_tunnel() {
        let dir = tempfile::tempdir().unwrap();
        let ours = json!({"type": crate::config::PLUGIN, "stateDir": dir.path(), "ca": {"url": "https://ca:8443", "tlsCaFile": "/t",
            "tokenFile": "/k"}});
        let entry = Entry::of_list(&json!({"name": "net", "cniVersion": "1.0.0", "plugins": [ours]})).unwrap();
        let listed = runtime::Sandbox {
            id: "c1".to_owned(),
            name: "web-0".to_owned(),
            namespace: "shop".to_owned(),
            uid: "u-1".to_owned(),
            attempt: 0,
            is_ready: true,
            labels: HashMap::new(),
            annotations: HashMap::new(),
        };
        let network = Network { is_of_host: false, netns: None, cni_result: Value::Null, annotations: HashMap::new() };
        let networks = [("c1".to_owned(), Arc::new(network))].into();
        let enrolment = || {
            let host = HostRoot::default();
            let seen = look_at(
                &host,
                &entry,
                std::slice::from_ref(&listed),
                &networks,
                &HashMap::new(),
                &NoLabels,
                Depth::Thorough,
            );
            assert!(seen.records.is_empty());
            seen.sandboxes[0].enrolment.clone()
        };
        std::fs::create_dir(dir.path().join("net")).unwrap();
        let record = dir.path().join("net/c1-eth0.json");
        for damaged in ["", "{"] {
            std::fs::write(&record, damaged).unwrap();
            assert_eq!(enrolment(), Enrolment::Enrolled, "it would be attached in place");
        }
        for newer in [r#"{"version":2}"#, r#"{"version":1,"state":"asleep"}"#] {
            std::fs::write(&record, newer).unwrap();
            assert_eq!(enrolment(), Enrolment::NotEnrolled, "{newer}: that release looks after it");
        }
    }
}
