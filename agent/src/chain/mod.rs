//! The chain: our entry in the network configuration of the node, and the proof that the runtime uses it.

mod choice;
pub(crate) mod folder;
pub(crate) mod meta;
#[cfg(test)]
mod primaries;
pub(crate) mod primary;
pub(crate) mod rewrites;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::{PLUGIN, Strategy};
use crate::node::Node;
use crate::places::Places;
use crate::readiness::{Part, Standing};
use crate::runtime::loaded::Loaded;
use crate::runtime::{Client, RuntimeError, Status};
use crate::watch::DirectoryWatch;
use folder::{Folder, InPlace, Outcome, Wish};

/// Keeps the chain files of a node.
pub(crate) struct Keeper {
    node: Node,
    strategy: Strategy,
    folders: Vec<Folder>,
    /// Since when the runtime has not loaded what is on disk.
    unloaded: Option<Instant>,
    nudged: Option<Instant>,
}

impl Keeper {
    /// Touches nothing yet.
    #[must_use]
    pub(crate) fn new(node: &Node) -> Self {
        let (node, strategy) = (node.clone(), node.config.strategy);
        Self { node, strategy, folders: Vec::new(), unloaded: None, nudged: None }
    }

    /// Keeps the chain for ever. `entry` is our entry; `places` are the node's directories.
    pub(crate) async fn run(
        mut self,
        mut entry: watch::Receiver<Option<Map<String, Value>>>,
        mut places: watch::Receiver<Option<Places>>,
        mut watch: DirectoryWatch,
    ) {
        loop {
            let (now_entry, now_places) = (entry.borrow_and_update().clone(), places.borrow_and_update().clone());
            let mut pause = POLL;
            if self.node.retirement.has_begun() {
                // The uninstallation removes the chain files and reports on them.
                self.folders.clear();
            } else if let (Some(entry), Some(places)) = (now_entry, now_places) {
                pause = self.pass(&entry, &places).await;
            } else if !self.node.readiness.is_good(Part::Chain) {
                let waits = "waits for the programs, the credentials, the self-test and the address of the CA";
                self.node.readiness.set(Part::Chain, Standing::bad(waits));
            }
            let watched: Vec<PathBuf> =
                self.folders.iter().flat_map(|folder| folder.watched(&self.node.config.host_root)).collect();
            tokio::select! {
                () = watch.changed(&watched, pause) => {}
                Ok(()) = entry.changed() => {}
                Ok(()) = places.changed() => {}
            }
        }
    }

    /// One look at everything; returns when the next one is due.
    async fn pass(&mut self, entry: &Map<String, Value>, places: &Places) -> Duration {
        let directories = &places.conf;
        self.folders.retain(|folder| directories.iter().any(|dir| dir == folder.path()));
        for dir in directories {
            if !self.folders.iter().any(|folder| folder.path() == dir) {
                self.folders.push(Folder::new(dir.clone()));
            }
        }
        let outcomes = self.keep_folders(entry, places.bin.clone()).await;
        self.node.readiness.set(Part::Chain, chain_standing(&outcomes));
        let placed: Vec<&(PathBuf, InPlace)> = outcomes.in_place.iter().collect();
        let Some((dir, placed)) = placed.first() else {
            self.node.readiness.set(Part::Runtime, Standing::bad("waits for the chain"));
            return SOON;
        };
        let asked = self.ask_runtime().await;
        let loaded = loaded(&asked, placed);
        let is_good = loaded.ok;
        let now = Instant::now();
        let since = *self.unloaded.get_or_insert(now);
        if is_good {
            self.unloaded = None;
            self.node.readiness.set(Part::Runtime, loaded);
            return POLL;
        }
        // A runtime needs a moment to load, which is not worth a warning.
        if now >= since + GRACE || placed.is_new {
            self.node.readiness.set(Part::Runtime, loaded);
        }
        if now >= since + LOADED_WITHIN && asked.is_ok() {
            if self.strategy == Strategy::DropIn {
                tracing::warn!("the runtime does not load drop-ins; a file of its own takes their place");
                self.strategy = Strategy::File;
                self.unloaded = None;
            } else if self.nudged.is_none_or(|nudged| now >= nudged + NUDGE_EVERY) {
                // It may have missed the event.
                let path = self.node.config.host_root.resolve(dir);
                if let Err(error) = blocking(move || folder::reload(&path)).await {
                    tracing::warn!(%error, "cannot make the runtime reload its configuration");
                }
                self.nudged = Some(now);
            }
        }
        if now < since + LOADED_WITHIN { QUICK } else { SOON }
    }

    async fn keep_folders(&mut self, entry: &Map<String, Value>, bin: Vec<PathBuf>) -> Outcomes {
        let mut folders = std::mem::take(&mut self.folders);
        let (entry, config, strategy) = (entry.clone(), Arc::clone(&self.node.config), self.strategy);
        let kept = blocking(move || {
            let network = config.network.as_deref();
            let wish = Wish { entry: &entry, network, strategy, bin: &bin, host: &config.host_root };
            let mut outcomes = Outcomes::default();
            for folder in &mut folders {
                match folder.keep(wish, Instant::now()) {
                    Outcome::InPlace(placed) => outcomes.in_place.push((folder.path().to_owned(), placed)),
                    other => outcomes.others.push(other),
                }
            }
            Ok((folders, outcomes))
        });
        match kept.await {
            Ok((folders, outcomes)) => {
                self.folders = folders;
                outcomes
            }
            Err(error) => {
                Outcomes { others: vec![Outcome::Failed { reason: error.to_string() }], ..Outcomes::default() }
            }
        }
    }

    async fn ask_runtime(&self) -> Result<Status, RuntimeError> {
        Client::find(self.node.config.runtime_endpoint.as_deref(), &self.node.config.host_root)?.status().await
    }
}

#[derive(Debug, Default)]
struct Outcomes {
    in_place: Vec<(PathBuf, InPlace)>,
    others: Vec<Outcome>,
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> std::io::Result<T> + Send + 'static) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(std::io::Error::other(error)))
}

fn chain_standing(outcomes: &Outcomes) -> Standing {
    for other in &outcomes.others {
        match other {
            Outcome::Fight { file, owner, advice, left } => {
                let reason = format!(
                    "{} is removed or rewritten again and again, probably by {owner}; left alone for {} s",
                    file.display(),
                    left.as_secs()
                );
                return Standing::bad(reason).advice(*advice);
            }
            Outcome::Failed { reason } => {
                return Standing::bad(reason.clone())
                    .advice("the agent must run as root, with the node's directories mounted writable");
            }
            Outcome::Waiting { .. } | Outcome::InPlace(_) => {}
        }
    }
    let Some((dir, placed)) = outcomes.in_place.first() else {
        let waiting = outcomes.others.iter().find_map(|other| match other {
            Outcome::Waiting { reason } => Some(reason.clone()),
            _ => None,
        });
        return Standing::bad(waiting.unwrap_or_else(|| "no directory for network configurations is known".to_owned()))
            .advice("install the cluster's network plugin, or name the directory that it writes to in \"confDirs\"");
    };
    let file = dir.join(&placed.file);
    if placed.before.is_empty() {
        return match &placed.meta {
            None => Standing::good(format!("{} is in place", file.display())),
            Some(meta) => match meta.problem(&placed.file) {
                None => Standing::good(format!("{} is in place, and {} delegates to it", file.display(), meta.file)),
                Some(problem) => Standing::bad(problem).advice(meta::ADVICE),
            },
        };
    }
    Standing::bad(format!("{} sorts before {} in {}", placed.before.join(", "), placed.file.display(), dir.display()))
        .advice("remove or rename that file: runtimes load the first one only")
}

/// Whether the runtime works with the chain that is in place.
fn loaded(asked: &Result<Status, RuntimeError>, placed: &InPlace) -> Standing {
    let status = match asked {
        Ok(status) => status,
        Err(error) => {
            return Standing::bad(error.to_string()).advice("is the runtime running, and its socket mounted?");
        }
    };
    let not_ready = |problem: &String| {
        Standing::bad(format!("the runtime's network is not ready: {problem}"))
            .advice("look at the log of the runtime and of the cluster's network plugin")
    };
    let Some(loaded) = Loaded::read(status) else {
        return match &status.network_problem {
            Some(problem) => not_ready(problem),
            None => Standing::good(format!(
                "the runtime's network is ready, and {} sorts first; this runtime does not tell what it loaded",
                placed.file.display()
            )),
        };
    };
    if let Some(error) = loaded.error {
        return Standing::bad(format!("the runtime cannot load its network configuration: {error}"))
            .advice("correct or remove the file that it names");
    }
    let network = placed.meta.as_ref().map_or(&placed.network, |meta| &meta.network);
    if loaded.network.as_ref() != Some(network) {
        let found = loaded.network.as_deref().unwrap_or("none");
        return Standing::bad(format!("the runtime has loaded network {found}, not {network}"))
            .advice("does the runtime read another directory? then name it in \"confDirs\"");
    }
    if let Some(meta) = &placed.meta {
        return match &status.network_problem {
            Some(problem) => not_ready(problem),
            None => Standing::good(format!("the runtime has loaded {}, which calls our chain", meta.file)),
        };
    }
    let (ours, place) = match placed.is_own {
        true => (loaded.plugins.first(), "first"),
        false => (loaded.plugins.last(), "last"),
    };
    if ours.is_none_or(|ours| ours != PLUGIN) {
        let list = loaded.plugins.join(", ");
        return Standing::bad(format!("the runtime has loaded the plugins {list} for network {}", placed.network))
            .advice(format!("{PLUGIN} must be the {place} one: remove other drop-ins of this network"));
    }
    let json = |text: &[u8]| serde_json::from_slice::<Value>(text).ok();
    let is_file = placed.file.extension().is_some_and(|extension| extension == "conflist");
    if is_file && !loaded.source.is_empty() && json(loaded.source.as_bytes()) != json(&placed.bytes) {
        return Standing::bad(format!("the runtime has not loaded the current {} yet", placed.file.display()));
    }
    if let Some(problem) = &status.network_problem {
        return not_ready(problem);
    }
    Standing::good(format!("the runtime has loaded {} with {PLUGIN} {place}", placed.network))
}

/// Time between two looks when all is well, when something is missing, and while the runtime loads.
const POLL: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_secs(2);
const QUICK: Duration = Duration::from_millis(200);
const GRACE: Duration = Duration::from_secs(2);
const LOADED_WITHIN: Duration = Duration::from_secs(10);
const NUDGE_EVERY: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn placed() -> InPlace {
        let bytes = json!({"name": "a", "plugins": [{"type": "bridge"}, {"type": PLUGIN}]}).to_string().into_bytes();
        let file = "00-nebula-a.conflist".into();
        InPlace { file, bytes, network: "a".into(), is_new: false, before: Vec::new(), meta: None, is_own: false }
    }

    fn status(name: &str, plugins: &[&str], source: &str) -> Result<Status, RuntimeError> {
        let plugins: Vec<Value> = plugins.iter().map(|kind| json!({"Network": {"type": kind}})).collect();
        let config = json!({"Networks": [{"Config": {"Name": name, "Plugins": plugins, "Source": source}}]});
        let info = [("cniconfig", config.to_string()), ("lastCNILoadStatus", "OK".to_owned())];
        let info = info.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        Ok(Status { network_problem: None, info })
    }

    #[test]
    fn only_what_the_runtime_loaded_counts() {
        let source = String::from_utf8(placed().bytes).unwrap();
        assert!(loaded(&status("a", &["bridge", PLUGIN], &source), &placed()).ok);
        for (case, word) in [
            (status("b", &["bridge", PLUGIN], &source), "network b"),
            (status("a", &["bridge"], &source), "bridge"),
            (status("a", &[PLUGIN, "tuning"], &source), "tuning"),
            (status("a", &["bridge", PLUGIN], "{}"), "current"),
            (
                Ok(Status {
                    network_problem: Some("NetworkPluginNotReady: x".into()),
                    ..status("a", &["bridge", PLUGIN], &source).unwrap()
                }),
                "NetworkPluginNotReady",
            ),
            (Err(RuntimeError::NotFound("/run/x.sock".into())), "/run/x.sock"),
            (Ok(Status { network_problem: Some("NetworkPluginNotReady: x".into()), ..Status::default() }), "not ready"),
        ] {
            let standing = loaded(&case, &placed());
            assert!(!standing.ok && standing.reason.contains(word), "{word}: {standing:?}");
        }
        assert!(loaded(&Ok(Status::default()), &placed()).reason.contains("does not tell"));
    }

    #[test]
    fn a_fight_names_the_owner_and_the_setting() {
        let fight = Outcome::Fight { file: "/etc/x".into(), owner: "cilium", advice: "set it", left: POLL };
        let standing = chain_standing(&Outcomes { in_place: Vec::new(), others: vec![fight] });
        assert!(!standing.ok && standing.reason.contains("cilium") && standing.advice == "set it");
        let shadowed = InPlace { before: vec![".x.conf".into()], ..placed() };
        let outcomes = Outcomes { in_place: vec![("/etc/cni/net.d".into(), shadowed)], others: Vec::new() };
        assert!(chain_standing(&outcomes).reason.contains(".x.conf"));
    }
}
