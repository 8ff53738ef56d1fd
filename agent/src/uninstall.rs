//! Uninstallation: explicit, in an order in which no pod gets stuck, and repeatable after any interruption.
//!
//! A pod whose attachment names our plugin can be removed only while the plugin answers DEL. So the chain goes first,
//! then the attachments, the instance's program and last the plugin, which stays as long as a runtime's cache names
//! it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, Deadline, SystemClock};
use nebula_cni_contract::labels::Program;
use nebula_cni_contract::netns::SystemNamespaces;
use nebula_cni_plugin::attachment::files::Files;
use nebula_cni_plugin::attachment::foreign;
use nebula_cni_plugin::attachment::lock::Lock;
use nebula_cni_plugin::attachment::record::{self, Found, Record};
use nebula_cni_plugin::host::Host;
use nebula_cni_plugin::link::capture::SystemCaptures;
use nebula_cni_plugin::link::guard::SystemGuards;
use nebula_cni_plugin::link::host_route::SystemRoutes;
use nebula_cni_plugin::link::pod_link::SystemLinks;
use nebula_cni_plugin::programs;
use nebula_cni_plugin::request::is_name;
use nebula_cni_plugin::supervisor::{Direct, Systemd, systemd};
use nebula_cni_plugin::verb::del::detach;
use nebula_cni_plugin::verb::reconcile;

use crate::chain::folder;
use crate::cni_cache;
use crate::config::{AGENT_DIR, INSTANCE, PLUGIN, STATE_DIR};
use crate::durable;
use crate::flows;
use crate::host_root::HostRoot;
use crate::places::Places;
use crate::retirement::{self, Marker};
use crate::self_test;

/// What is done with pods that still have a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attached {
    /// Waits until they are gone.
    Wait,
    /// Removes their tunnels at once; the pods go on without.
    Detach,
}

/// What is still on the node afterwards, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// The plugin, which a runtime's cache names for this many attachments; run the uninstallation again once these
    /// pods are gone.
    Plugin {
        /// How many.
        cached: usize,
    },
}

/// Why the uninstallation stopped. It can be run again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UninstallError {
    /// The file system refuses.
    #[error("cannot {what} {path}: {source}")]
    Files {
        /// What was attempted.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A pod cannot be detached.
    #[error("cannot remove the tunnel of {pod}: {source}")]
    Detach {
        /// Which pod.
        pod: String,
        /// Why.
        source: Box<nebula_cni_plugin::reply::Error>,
    },
    /// It was told to end while it waited for pods. Their tunnels are untouched.
    #[error("ended while pods with a tunnel were left: {0}; an agent on this node installs Nebula again")]
    Ended(String),
}

/// Uninstalls. `tell` is called with lines about the progress. Blocks. Once `is_ended`, it waits for pods no longer
/// and leaves the node to its agent.
///
/// # Errors
/// Returns the first failure.
pub fn run(
    places: &Places,
    host: &HostRoot,
    attached: Attached,
    is_ended: &AtomicBool,
    tell: &mut dyn FnMut(&str),
) -> Result<Left, UninstallError> {
    let path = retirement::path(host);
    let marker = Marker::set(host).map_err(|source| UninstallError::Files { what: "write", path, source })?;
    let mut chains = 0;
    for dir in &places.conf {
        let path = host.resolve(dir);
        chains += folder::clear(&path).map_err(|source| UninstallError::Files {
            what: "remove the chain in",
            path,
            source,
        })?;
    }
    tell(&format!("removed {chains} chain file(s); new pods start without Nebula"));
    // A running agent may have been about to write one.
    SystemClock.sleep(AGENT_NOTICES);
    for dir in &places.conf {
        let path = host.resolve(dir);
        folder::clear(&path).map_err(|source| UninstallError::Files { what: "remove the chain in", path, source })?;
    }
    self_test::clean(host);
    if let Err(error) = empty_node(host, attached, is_ended, &marker, tell) {
        if matches!(error, UninstallError::Ended(_)) {
            marker.cancel();
        }
        return Err(error);
    }
    systemd::stop_empty_slices(&SystemClock);
    remove_flows(host)?;
    for dir in &places.bin {
        let instance = host.resolve(&dir.join(INSTANCE));
        remove(&instance)?;
        programs::remove_all(&instance).map_err(|source| UninstallError::Files {
            what: "remove programs beside",
            path: instance,
            source,
        })?;
    }
    let cached: Vec<_> = cni_cache::attachments_for_good(host).iter().map(|path| path.display().to_string()).collect();
    if !cached.is_empty() {
        let path = retirement::path(host);
        marker.end().map_err(|source| UninstallError::Files { what: "write", path, source })?;
        let (cached, named) = (cached.len(), list(&cached));
        tell(&format!(
            "{cached} pod(s) of the runtime's cache still name {PLUGIN}, which stays to answer their DEL: {named}"
        ));
        return Ok(Left::Plugin { cached });
    }
    for dir in &places.bin {
        let dir = host.resolve(dir);
        remove(&dir.join(PLUGIN))?;
        durable::remove_stale(&dir, |name| [PLUGIN, INSTANCE].contains(&name));
    }
    remove_state(host)?;
    tell("everything is removed");
    Ok(Left::Nothing)
}

/// Removes the flow records, and their folder's if nothing else is in it.
fn remove_flows(host: &HostRoot) -> Result<(), UninstallError> {
    let path = flows::folder(host);
    match fs::remove_dir_all(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(UninstallError::Files { what: "remove the flow records in", path, source });
        }
        _ => {}
    }
    let _ = path.parent().map(fs::remove_dir);
    Ok(())
}

/// Removes the state directory; the marker goes last, because until then a running agent looks for it.
fn remove_state(host: &HostRoot) -> Result<(), UninstallError> {
    let (state, marker) = (host.resolve(Path::new(STATE_DIR)), retirement::path(host));
    let agent = host.resolve(Path::new(AGENT_DIR));
    let failed = |path: &Path, source| UninstallError::Files { what: "remove", path: path.to_owned(), source };
    for (dir, kept) in [(&agent, &marker), (&state, &agent)] {
        for entry in fs::read_dir(dir).map_err(|source| failed(dir, source))?.flatten() {
            let path = entry.path();
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if path != *kept {
                let removed = if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(|source| failed(&path, source))?;
            }
        }
    }
    remove(&marker)?;
    for dir in [agent, state] {
        fs::remove_dir(&dir).map_err(|source| failed(&dir, source))?;
    }
    Ok(())
}

/// Returns once no attachment is left.
fn empty_node(
    host: &HostRoot,
    attached: Attached,
    is_ended: &AtomicBool,
    marker: &Marker,
    tell: &mut dyn FnMut(&str),
) -> Result<(), UninstallError> {
    let state = host.resolve(Path::new(STATE_DIR));
    let direct = Direct::new();
    let this_host = Host {
        clock: &SystemClock,
        namespaces: &SystemNamespaces,
        direct: &direct,
        systemd: &Systemd,
        routes: &SystemRoutes,
        links: &SystemLinks,
        guards: &SystemGuards,
        captures: &SystemCaptures,
        labels: &Program,
        plugin_dir: None,
    };
    let mut told = Vec::new();
    loop {
        marker.refresh();
        // Pods of containerd get no DEL from us any more, because it works with the present list: what is left of them
        // is found by their missing namespaces.
        if let Err(problems) = reconcile::all(&state, &this_host) {
            problems.iter().for_each(|problem| tell(problem));
        }
        let paths = records(&state)?;
        if attached == Attached::Detach {
            for path in &paths {
                detach_one(&state, path, &this_host)?;
            }
        }
        let left: Vec<String> = records(&state)?.iter().map(|path| pod_of(path)).collect();
        if left.is_empty() {
            return Ok(());
        }
        if is_ended.load(Ordering::Relaxed) {
            return Err(UninstallError::Ended(list(&left)));
        }
        if left != told {
            let (count, named) = (left.len(), list(&left));
            tell(&format!(
                "waits for {count} pod(s) with a tunnel to end: {named}; --force removes their tunnels instead"
            ));
            told = left;
        }
        SystemClock.sleep(LOOK_EVERY);
    }
}

/// The first of these pods or files, and how many more there are.
fn list(all: &[String]) -> String {
    let named = all.iter().take(MOST_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(MOST_NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// The pod of a record as NAMESPACE/NAME, or the file's name where it is damaged.
fn pod_of(path: &Path) -> String {
    match Record::load(path) {
        Ok(Found::Record(record)) => format!("{}/{}", record.target.pod.namespace, record.target.pod.name),
        _ => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
    }
}

fn detach_one(state: &Path, path: &Path, host: &Host<'_>) -> Result<(), UninstallError> {
    let record = match Record::load(path) {
        Ok(Found::Record(record)) => record,
        Ok(Found::Foreign(why)) => {
            let source = Box::new(foreign::refusal(path, &why));
            return Err(UninstallError::Detach { pod: pod_of(path), source });
        }
        // A damaged record names no pod, and its instance ends with the pod's namespace.
        _ => return remove(path),
    };
    let pod = pod_of(path);
    let failed = |source| UninstallError::Detach { pod: pod.clone(), source: Box::new(source) };
    let files = Files::new(state, &record.key());
    let lock = Lock::acquire(&files, host.clock, Deadline::after(host.clock, LOCK_TIMEOUT)).map_err(failed)?;
    detach(&files, host).map_err(failed)?;
    lock.remove();
    Ok(())
}

/// The record files of all networks.
fn records(state: &Path) -> Result<Vec<PathBuf>, UninstallError> {
    let failed = |source| UninstallError::Files { what: "list the records in", path: state.to_owned(), source };
    let entries = match fs::read_dir(state) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let networks = names.filter(|name| is_name(name) && Path::new(AGENT_DIR).file_name() != Some(name.as_ref()));
    let mut paths = Vec::new();
    for network in networks {
        paths.extend(record::list(state, &network).map_err(failed)?);
    }
    Ok(paths)
}

fn remove(path: &Path) -> Result<(), UninstallError> {
    durable::remove(path).map_err(|source| UninstallError::Files { what: "remove", path: path.to_owned(), source })
}

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pods or files that a message names.
const MOST_NAMED: usize = 10;
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const AGENT_NOTICES: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retirement::Retirement;

    struct Node {
        dir: tempfile::TempDir,
        host: HostRoot,
        places: Places,
    }

    fn node() -> Node {
        let dir = tempfile::tempdir().unwrap();
        for path in
            ["etc/cni/net.d", "opt/cni/bin", "run/nebula-cni/agent", "var/lib/cni/results", "var/lib/nebula-cni/flows"]
        {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        for (path, text) in [
            ("etc/cni/net.d/00-nebula-a.conflist", "{}"),
            ("etc/cni/net.d/10-a.conflist", "{}"),
            ("opt/cni/bin/nebula-cni-plugin", "x"),
            ("opt/cni/bin/nebula-cni-instance", "x"),
            ("opt/cni/bin/bridge", "x"),
            ("run/nebula-cni/agent/token", "secret"),
            ("var/lib/nebula-cni/flows/flows.db", "who speaks to whom"),
        ] {
            fs::write(dir.path().join(path), text).unwrap();
        }
        let host = HostRoot::new(Some(dir.path().canonicalize().unwrap()));
        let places = Places { conf: vec!["/etc/cni/net.d".into()], bin: vec!["/opt/cni/bin".into()] };
        Node { dir, host, places }
    }

    impl Node {
        fn files(&self) -> Vec<String> {
            let mut found = Vec::new();
            let mut left = vec![self.dir.path().to_owned()];
            while let Some(dir) = left.pop() {
                for entry in fs::read_dir(dir).unwrap().flatten() {
                    let path = entry.path();
                    if path.is_dir() {
                        left.push(path);
                    } else {
                        found.push(path.strip_prefix(self.dir.path()).unwrap().display().to_string());
                    }
                }
            }
            found.sort();
            found
        }

        fn uninstall(&self) -> Left {
            run(&self.places, &self.host, Attached::Wait, &AtomicBool::new(false), &mut |_| {}).unwrap()
        }
    }

    #[test]
    fn nothing_of_ours_is_left_and_all_of_others() {
        let node = node();
        assert_eq!(node.uninstall(), Left::Nothing);
        assert_eq!(node.files(), ["etc/cni/net.d/10-a.conflist", "opt/cni/bin/bridge"]);
        assert!(!node.dir.path().join("run/nebula-cni").exists());
        assert!(!node.dir.path().join("var/lib/nebula-cni").exists());
        assert_eq!(node.uninstall(), Left::Nothing, "it may be repeated");
    }

    #[test]
    fn the_plugin_stays_as_long_as_a_cache_names_it() {
        let node = node();
        let cached = node.dir.path().join("var/lib/cni/results/a-c1-eth0");
        // {"type":"nebula-cni-plugin"}
        fs::write(&cached, r#"{"kind":"cniCacheV1","config":"eyJ0eXBlIjoibmVidWxhLWNuaS1wbHVnaW4ifQ=="}"#).unwrap();
        let retirement = Retirement::new(node.host.clone());
        fs::write(cached.with_file_name("b"), r#"{"kind":"cniCacheV1","config":"eyJ0eXBlIjoiYnJpZGdlIn0="}"#).unwrap();
        let mut said = String::new();
        let tell = &mut |line: &str| said.push_str(line);
        let left = run(&node.places, &node.host, Attached::Wait, &AtomicBool::new(false), tell).unwrap();
        assert_eq!(left, Left::Plugin { cached: 1 });
        assert!(said.contains("1 pod(s)") && said.contains("/var/lib/cni/results/a-c1-eth0"), "{said}");
        let files = node.files();
        assert!(files.contains(&"opt/cni/bin/nebula-cni-plugin".to_owned()), "{files:?}");
        assert!(retirement.has_begun(), "the agent that was uninstalled must not put the rest back");
        assert!(!Retirement::new(node.host.clone()).has_begun(), "a new installation need not wait");
        assert!(!files.iter().any(|file| file.contains("instance") || file.contains("00-nebula")), "{files:?}");
        fs::remove_file(&cached).unwrap();
        assert_eq!(node.uninstall(), Left::Nothing);
        assert!(!node.dir.path().join("opt/cni/bin/nebula-cni-plugin").exists());
    }

    #[test]
    fn a_running_agent_stays_retired_unless_the_operator_cancels() {
        let node = node();
        let retirement = Retirement::new(node.host.clone());
        assert!(!retirement.has_begun());
        drop(Marker::set(&node.host).unwrap());
        assert!(retirement.has_begun());
        fs::remove_file(retirement::path(&node.host)).unwrap();
        assert!(!retirement.has_begun(), "cancelled");
        drop(Marker::set(&node.host).unwrap());
        assert!(retirement.has_begun());
        node.uninstall();
        assert!(retirement.has_begun(), "complete");
        assert!(!Retirement::new(node.host.clone()).has_begun(), "a new installation");
    }

    #[test]
    fn one_that_is_ended_while_it_waits_gives_the_node_back_to_its_agent() {
        let node = node();
        let records = node.dir.path().join("run/nebula-cni/pods");
        fs::create_dir_all(&records).unwrap();
        for number in 0..12 {
            fs::write(records.join(format!("{number:02}.json")), "damaged").unwrap();
        }
        let mut said = Vec::new();
        let tell = &mut |line: &str| said.push(line.to_owned());
        let ended =
            run(&node.places, &node.host, Attached::Wait, &AtomicBool::new(true), tell).unwrap_err().to_string();
        assert!(ended.contains("09.json and 2 more; an agent") && !ended.contains("10.json"), "{ended}");
        assert!(!retirement::path(&node.host).exists());
        assert!(!Retirement::new(node.host.clone()).has_begun());
        assert!(node.files().contains(&"opt/cni/bin/nebula-cni-plugin".to_owned()), "pods need it");
    }

    #[test]
    fn even_by_force_no_tunnel_is_removed_whose_record_a_newer_program_wrote() {
        let node = node();
        let record = node.dir.path().join("run/nebula-cni/pods/c1-eth0.json");
        fs::create_dir_all(record.parent().unwrap()).unwrap();
        fs::write(&record, r#"{"version":2}"#).unwrap();
        let run = || run(&node.places, &node.host, Attached::Detach, &AtomicBool::new(false), &mut |_| {});
        let refused = run().unwrap_err().to_string();
        assert!(refused.contains("c1-eth0.json") && refused.contains("format 2, this one knows 1"), "{refused}");
        assert!(record.exists() && node.files().contains(&"opt/cni/bin/nebula-cni-plugin".to_owned()));
        fs::write(&record, "damaged").unwrap();
        assert_eq!(run().unwrap(), Left::Nothing);
    }
}
