//! One directory of network configurations: brings our entry into the chain of its primary, and keeps it there.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::Instant;

use super::choice::{Choice, choose, choose_own};
use super::meta::Meta;
use super::primary::{self, OWN_NETWORK, Primary};
use super::rewrites::{Rewrites, probable_owner};
use crate::config::Strategy;
use crate::durable;
use crate::host_root::HostRoot;
use crate::network;

/// What the agent wrote into one directory, and what it saw there.
#[derive(Debug)]
pub(crate) struct Folder {
    /// As the node names it.
    path: PathBuf,
    written: Option<Written>,
    rewrites: Rewrites,
    /// A change to another network that was seen, and since when.
    change: Option<(String, Instant)>,
    is_swept: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Written {
    /// Relative to the directory.
    name: PathBuf,
    bytes: Vec<u8>,
    network: String,
    /// The primary's file.
    source: String,
}

/// What became of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Our chain is in place.
    InPlace(InPlace),
    /// There is no primary. If we wrote a chain earlier, it stays, so that no pod starts without us meanwhile.
    Waiting {
        /// What was found instead.
        reason: String,
    },
    /// Somebody undoes our work again and again; it is left alone for a while.
    Fight {
        /// Our file.
        file: PathBuf,
        /// Who most likely does.
        owner: &'static str,
        /// The setting that ends it.
        advice: &'static str,
        /// Time until the next attempt.
        left: Duration,
    },
    /// The file system refuses.
    Failed {
        /// What failed.
        reason: String,
    },
}

/// A chain that is in place on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InPlace {
    /// Our file, relative to the directory.
    pub file: PathBuf,
    /// Its text.
    pub bytes: Vec<u8>,
    /// Name of the network.
    pub network: String,
    /// Whether it was written just now.
    pub is_new: bool,
    /// Files that a runtime loads before ours, and which we cannot precede.
    pub before: Vec<String>,
    /// The meta plugin by way of which the runtime calls our chain.
    pub meta: Option<Meta>,
    /// Whether our plugin makes the network, and so is the first one.
    pub is_own: bool,
}

/// How to keep a directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish<'a> {
    /// Our chain entry.
    pub entry: &'a Map<String, Value>,
    /// Name of the primary's network, if only one will do.
    pub network: Option<&'a str>,
    /// Where our entry goes.
    pub strategy: Strategy,
    /// Directories with plugins, as the node names them.
    pub bin: &'a [PathBuf],
    /// The node's root.
    pub host: &'a HostRoot,
}

impl Wish<'_> {
    /// The list of a network that our plugin makes itself.
    fn own(&self) -> Primary {
        let is_installed = |kind: &str| self.bin.iter().any(|dir| self.host.resolve(&dir.join(kind)).is_file());
        Primary::own(self.network.unwrap_or(OWN_NETWORK), is_installed)
    }
}

impl Folder {
    /// Touches nothing yet.
    #[must_use]
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, written: None, rewrites: Rewrites::default(), change: None, is_swept: false }
    }

    /// As the node names it.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The directories to watch, as the agent sees them.
    #[must_use]
    pub(crate) fn watched(&self, host: &HostRoot) -> Vec<PathBuf> {
        let dir = host.resolve(&self.path);
        let drop_in = self.written.as_ref().and_then(|written| written.name.parent().map(|parent| dir.join(parent)));
        [Some(dir.clone()), drop_in.filter(|inner| *inner != dir)].into_iter().flatten().collect()
    }

    /// Looks at the directory and makes it as it must be. Blocks.
    pub(crate) fn keep(&mut self, wish: Wish<'_>, now: Instant) -> Outcome {
        let dir = wish.host.resolve(&self.path);
        let shown = self.path.display().to_string();
        let failed =
            |what: &str, error: &io::Error| Outcome::Failed { reason: format!("cannot {what} {shown}: {error}") };
        if network::is_primary(wish.entry)
            && let Err(error) = fs::create_dir_all(&dir)
        {
            return failed("make", &error);
        }
        let names = match names(&dir) {
            Ok(names) => names,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Outcome::Waiting { reason: format!("{shown} does not exist yet") };
            }
            Err(error) => return failed("list", &error),
        };
        if !self.is_swept {
            durable::remove_stale(&dir, |name| primary::is_own(name) || name == RELOAD);
            self.is_swept = true;
        }
        let files: Vec<(String, Vec<u8>)> = names
            .iter()
            .filter(|name| primary::is_loadable(name) && !primary::is_own(name))
            .filter_map(|name| {
                let path = wish.host.resolve(&self.path.join(name));
                // One that cannot be read counts as one that is not valid.
                path.is_file().then(|| (name.clone(), durable::read_bounded(&path, MAX_FILE).unwrap_or_default()))
            })
            .collect();
        let files = files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()));
        let choice = match network::is_primary(wish.entry) {
            true => choose_own(files, wish.own()),
            false => choose(files, wish.network),
        };
        let primary = match self.settle(&choice, &names, now) {
            Ok(primary) => primary,
            Err(reason) => return Outcome::Waiting { reason },
        };
        match self.write(primary, &choice, wish, &dir, &names, now) {
            Ok(outcome) => outcome,
            Err(error) => failed("write our chain into", &error),
        }
    }

    /// The primary to derive from. Another network than before counts only once it has stayed: many installers remove a
    /// file before they write its successor, and a valid file of somebody else must not become every pod's network for
    /// that moment.
    fn settle<'a>(&mut self, choice: &'a Choice, names: &[String], now: Instant) -> Result<&'a Primary, String> {
        let present = self.written.as_ref().map(|written| written.network.clone()).or_else(|| own_network(names));
        let broken = |(file, why): &(String, String)| format!("{file}: {why}");
        let Some(primary) = &choice.primary else {
            self.change = None;
            let refused: Vec<String> = choice.refused.iter().map(broken).collect();
            let kept = if present.is_some() {
                "; the chain of the last one stays, so that no pod starts without us"
            } else {
                ""
            };
            let found = if refused.is_empty() { String::new() } else { format!(" ({})", refused.join("; ")) };
            return Err(format!("no primary network configuration in {}{found}{kept}", self.path.display()));
        };
        if present.as_ref().is_none_or(|present| *present == primary.network) {
            self.change = None;
            return Ok(primary);
        }
        if let Some(written) = &self.written
            && let Some(refused) = choice.refused.iter().find(|(file, _)| *file == written.source)
        {
            self.change = None;
            return Err(format!("{}; the chain made of its last valid text stays", broken(refused)));
        }
        let since = match &self.change {
            Some((network, since)) if *network == primary.network => *since,
            _ => {
                self.change = Some((primary.network.clone(), now));
                now
            }
        };
        if now < since + SETTLE {
            return Err(format!("the primary changes to {} ({})", primary.network, primary.file));
        }
        self.change = None;
        Ok(primary)
    }

    fn write(
        &mut self,
        primary: &Primary,
        choice: &Choice,
        wish: Wish<'_>,
        dir: &Path,
        names: &[String],
        now: Instant,
    ) -> io::Result<Outcome> {
        let others = names.iter().map(String::as_str).filter(|name| {
            primary::is_loadable(name) && !primary::is_own(name) && !choice.metas.iter().any(|meta| meta == name)
        });
        // Meta plugins take files only.
        let is_own = network::is_primary(wish.entry);
        let strategy = if choice.meta.is_some() || is_own { Strategy::File } else { wish.strategy };
        let (name, bytes) = match strategy {
            Strategy::File => {
                (PathBuf::from(primary::own_name(&primary.network, others.clone())), primary.with_entry(wish.entry))
            }
            Strategy::DropIn => {
                let mut bytes = serde_json::to_vec_pretty(wish.entry)?;
                bytes.push(b'\n');
                (Path::new(&primary.network).join(DROP_IN), bytes)
            }
        };
        if let Some(meta) = choice.meta.as_ref().filter(|meta| name.as_os_str() < OsStr::new(&meta.file)) {
            // The runtime would call our chain, and pods would lose what the meta plugin gives them.
            let reason =
                format!("{} sorts after {}; name it 00-multus.conf or 00-multus.conflist", meta.file, name.display());
            return Ok(Outcome::Waiting { reason });
        }
        let path = dir.join(&name);
        let wanted = Written { name, bytes, network: primary.network.clone(), source: primary.file.clone() };
        let is_there = fs::symlink_metadata(&path).is_ok_and(|found| found.is_file() && found.mode() & 0o7777 == MODE)
            && durable::read_bounded(&path, MAX_FILE).is_ok_and(|bytes| bytes == wanted.bytes);
        if !is_there {
            let may_write = if self.written.as_ref() == Some(&wanted) {
                self.rewrites.lost(now)
            } else {
                !self.rewrites.is_paused(now)
            };
            if !may_write {
                let (owner, advice) = probable_owner(primary.plugins(), names.iter().map(String::as_str));
                return Ok(Outcome::Fight {
                    file: self.path.join(&wanted.name),
                    owner,
                    advice,
                    left: self.rewrites.left(now),
                });
            }
            if let Some(parent) = path.parent().filter(|parent| *parent != dir) {
                fs::create_dir_all(parent)?;
            }
            durable::replace(&path, MODE, &mut wanted.bytes.as_slice(), |_| Ok(()))?;
            self.written = Some(wanted.clone());
        }
        // Afterwards, so that there is no moment without us.
        let mut is_new = !is_there;
        for old in own_files(dir, names).into_iter().filter(|old| *old != wanted.name) {
            remove_own(dir, &old)?;
            is_new = true;
        }
        if is_new && strategy == Strategy::DropIn {
            reload(dir)?;
        }
        let before = match strategy {
            Strategy::File => {
                others.filter(|other| Path::new(other) < wanted.name.as_path()).map(str::to_owned).collect()
            }
            Strategy::DropIn => Vec::new(),
        };
        let placed = InPlace {
            file: wanted.name.clone(),
            bytes: wanted.bytes.clone(),
            network: wanted.network.clone(),
            is_new,
            before,
            meta: choice.meta.clone(),
            is_own,
        };
        self.written = Some(wanted);
        Ok(Outcome::InPlace(placed))
    }
}

/// Removes our chain files and drop-ins from a directory, as the agent sees it. Returns how many there were.
///
/// # Errors
/// Returns the file system's error.
pub(crate) fn clear(dir: &Path) -> io::Result<usize> {
    let names = match names(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        other => other?,
    };
    durable::remove_stale(dir, |name| primary::is_own(name) || name == RELOAD);
    let ours = own_files(dir, &names);
    for file in &ours {
        remove_own(dir, file)?;
    }
    if ours.iter().any(|file| file.components().count() > 1) {
        reload(dir)?;
    }
    Ok(ours.len())
}

/// Removes a file of ours, and with a drop-in its directory if nothing else is in it.
fn remove_own(dir: &Path, file: &Path) -> io::Result<()> {
    durable::remove(&dir.join(file))?;
    if let Some(parent) = file.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        durable::remove_stale(&dir.join(parent), |name| name == DROP_IN);
        // Others may have drop-ins there as well.
        let _ = fs::remove_dir(dir.join(parent));
    }
    Ok(())
}

/// Makes runtimes reload a directory of which they do not watch the subdirectories: they act on renames in it.
///
/// # Errors
/// Returns the file system's error.
pub(crate) fn reload(dir: &Path) -> io::Result<()> {
    let file = dir.join(RELOAD);
    durable::replace(&file, MODE, &mut io::empty(), |_| Ok(()))?;
    durable::remove(&file)
}

fn names(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)?.take(MAX_FILES) {
        names.extend(entry?.file_name().into_string());
    }
    Ok(names)
}

/// All files of ours, relative to the directory: lists, and drop-ins of any network.
fn own_files(dir: &Path, names: &[String]) -> Vec<PathBuf> {
    let lists = names.iter().filter(|name| primary::is_own(name)).map(PathBuf::from);
    let drop_ins = names.iter().map(|name| Path::new(name).join(DROP_IN));
    lists.chain(drop_ins.filter(|file| dir.join(file).symlink_metadata().is_ok())).collect()
}

/// The network whose chain an earlier agent left.
fn own_network(names: &[String]) -> Option<String> {
    names.iter().find_map(|name| primary::own_file_network(name)).map(str::to_owned)
}

const DROP_IN: &str = "99-nebula.conf";
const RELOAD: &str = "nebula-reload";
const MODE: u32 = 0o600;
const MAX_FILE: u64 = 1 << 20;
const MAX_FILES: usize = 4096;
const SETTLE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    struct Fixture {
        dir: tempfile::TempDir,
        folder: Folder,
        entry: Map<String, Value>,
        now: Instant,
    }

    fn fixture() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let entry = json!({"type": "nebula-cni-plugin"}).as_object().unwrap().clone();
        Fixture { folder: Folder::new(dir.path().to_owned()), dir, entry, now: Instant::now() }
    }

    fn list(network: &str, kind: &str) -> String {
        json!({"cniVersion": "0.3.1", "name": network, "plugins": [{"type": kind}]}).to_string()
    }

    impl Fixture {
        fn write(&self, name: &str, text: &str) {
            fs::write(self.dir.path().join(name), text).unwrap();
        }

        fn keep_as(&mut self, strategy: Strategy) -> Outcome {
            let host = HostRoot::default();
            let wish = Wish { entry: &self.entry, network: None, strategy, bin: &[], host: &host };
            self.folder.keep(wish, self.now)
        }

        fn keep(&mut self) -> Outcome {
            self.keep_as(Strategy::File)
        }

        /// Types of the plugins in our file of this network.
        fn chain(&self, network: &str) -> Option<Vec<String>> {
            let text = fs::read(self.dir.path().join(format!("00-nebula-{network}.conflist"))).ok()?;
            let list: Value = serde_json::from_slice(&text).unwrap();
            let kinds = list["plugins"].as_array().unwrap().iter().map(|plugin| plugin["type"].as_str().unwrap());
            Some(kinds.map(str::to_owned).collect())
        }

        fn pass(&mut self, seconds: u64) {
            self.now += Duration::from_secs(seconds);
        }
    }

    #[test]
    fn a_network_of_our_own_needs_no_file_of_anybody_and_comes_before_all() {
        let f = fixture();
        let own = json!({"type": "nebula-cni-plugin", "primary": true, "subnets": ["10.244.1.0/24"]});
        f.write("portmap", "a program");
        let (bin, host) = ([f.dir.path().to_owned()], HostRoot::default());
        let conf = f.dir.path().join("net.d");
        let mut folder = Folder::new(conf.clone());
        let entry = own.as_object().unwrap();
        let mut keep = |now| {
            let wish = Wish { entry, network: None, strategy: Strategy::DropIn, bin: &bin, host: &host };
            match folder.keep(wish, now) {
                Outcome::InPlace(placed) => placed,
                other => panic!("{other:?}"),
            }
        };
        let placed = keep(f.now);
        assert_eq!((placed.file.to_str(), placed.network.as_str()), (Some("00-nebula-nebula.conflist"), "nebula"));
        let made: Value = serde_json::from_slice(&placed.bytes).unwrap();
        let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
        assert_eq!(made, json!({"cniVersion": "1.0.0", "name": "nebula", "plugins": [own, portmap]}));
        // What another plugin writes later does not take its place.
        fs::write(conf.join("10-flannel.conflist"), list("cbr0", "flannel")).unwrap();
        fs::write(conf.join("00-broken.conf"), "{").unwrap();
        let again = keep(f.now + SETTLE * 3);
        assert_eq!((again.bytes, again.before.len()), (placed.bytes, 0));
    }

    #[test]
    fn the_primary_may_come_later_change_and_go() {
        let mut f = fixture();
        assert!(matches!(f.keep(), Outcome::Waiting { .. }));
        f.write("10-a.conflist", &list("a", "bridge"));
        assert!(matches!(f.keep(), Outcome::InPlace(InPlace { is_new: true, .. })));
        assert_eq!(f.chain("a").unwrap(), ["bridge", "nebula-cni-plugin"]);
        assert!(matches!(f.keep(), Outcome::InPlace(InPlace { is_new: false, .. })));
        f.write("10-a.conflist", &list("a", "ptp"));
        assert!(matches!(f.keep(), Outcome::InPlace(InPlace { is_new: true, .. })));
        assert_eq!(f.chain("a").unwrap(), ["ptp", "nebula-cni-plugin"]);
        fs::remove_file(f.dir.path().join("10-a.conflist")).unwrap();
        let Outcome::Waiting { reason } = f.keep() else { panic!("no primary") };
        assert!(reason.contains("stays"), "{reason}");
        assert_eq!(f.chain("a").unwrap(), ["ptp", "nebula-cni-plugin"], "closed, not open");
    }

    #[test]
    fn a_primary_that_breaks_for_a_while_hands_the_pods_to_nobody_else() {
        let mut f = fixture();
        f.write("87-podman.conflist", &list("podman", "bridge"));
        f.write("10-a.conflist", &list("a", "ptp"));
        f.keep();
        for broken in ["", "{\"cniVersion\": \"0.3", "[]"] {
            f.write("10-a.conflist", broken);
            for _ in 0..3 {
                assert!(matches!(f.keep(), Outcome::Waiting { .. }));
                f.pass(60);
            }
        }
        assert_eq!((f.chain("a").is_some(), f.chain("podman")), (true, None));
        // Removed and written again, as installers do.
        fs::remove_file(f.dir.path().join("10-a.conflist")).unwrap();
        assert!(matches!(f.keep(), Outcome::Waiting { .. }));
        f.pass(1);
        assert!(matches!(f.keep(), Outcome::Waiting { .. }));
        f.write("10-a.conflist", &list("a", "ptp"));
        assert!(matches!(f.keep(), Outcome::InPlace(_)));
        // Gone for good: another network takes over, also after a restart of the agent.
        fs::remove_file(f.dir.path().join("10-a.conflist")).unwrap();
        f.folder = Folder::new(f.dir.path().to_owned());
        assert!(matches!(f.keep(), Outcome::Waiting { .. }));
        f.pass(2);
        assert!(matches!(f.keep(), Outcome::InPlace(_)));
        assert_eq!((f.chain("a"), f.chain("podman").is_some()), (None, true));
    }

    #[test]
    fn a_broken_file_of_others_does_not_keep_us_from_the_first_valid_one() {
        let mut f = fixture();
        f.write("05-broken.conf", "{\"name\": ");
        f.write("10-a.conflist", &list("a", "bridge"));
        assert!(matches!(f.keep(), Outcome::InPlace(_)));
    }

    #[test]
    fn our_file_is_put_back_until_it_is_a_fight() {
        let mut f = fixture();
        f.write("05-cilium.conflist", &list("cilium", "cilium-cni"));
        f.keep();
        let ours = f.dir.path().join("00-nebula-cilium.conflist");
        for n in 0..5 {
            if n % 2 == 0 {
                fs::remove_file(&ours).unwrap()
            } else {
                fs::write(&ours, "{}").unwrap()
            }
            f.pass(1);
            assert!(matches!(f.keep(), Outcome::InPlace(InPlace { is_new: true, .. })));
        }
        fs::remove_file(&ours).unwrap();
        let Outcome::Fight { owner, advice, left, .. } = f.keep() else { panic!("no fight") };
        assert!(owner == "cilium" && advice.contains("cni.exclusive") && left > Duration::from_secs(30));
        assert!(!ours.exists());
        f.pass(120);
        assert!(matches!(f.keep(), Outcome::InPlace(_)));
    }

    #[test]
    fn a_primary_that_rewrites_its_own_file_is_no_fight() {
        let mut f = fixture();
        for n in 0..20 {
            f.write("10-a.conflist", &list("a", &format!("kind{n}")));
            assert!(matches!(f.keep(), Outcome::InPlace(_)));
        }
    }

    #[test]
    fn a_drop_in_replaces_the_file_and_the_other_way_round() {
        let mut f = fixture();
        f.write("10-a.conflist", &list("a", "bridge"));
        f.keep();
        let drop_in = f.dir.path().join("a/99-nebula.conf");
        assert!(matches!(f.keep_as(Strategy::DropIn), Outcome::InPlace(InPlace { is_new: true, .. })));
        assert_eq!((f.chain("a"), drop_in.exists()), (None, true));
        assert!(matches!(f.keep(), Outcome::InPlace(_)));
        assert_eq!((f.chain("a").is_some(), drop_in.parent().unwrap().exists()), (true, false));
        f.keep_as(Strategy::DropIn);
        assert_eq!(clear(f.dir.path()).unwrap(), 1);
        assert_eq!(clear(f.dir.path()).unwrap(), 0);
        let left: Vec<_> = fs::read_dir(f.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["10-a.conflist"]);
    }

    #[test]
    fn a_chain_of_a_killed_agent_and_its_leftovers_are_taken_over() {
        let mut f = fixture();
        f.write("10-a.conflist", &list("a", "bridge"));
        f.write(".00-nebula-a.conflist.tmp-99-0", "half");
        f.write("00-nebula-a.conflist", "half");
        assert!(matches!(f.keep(), Outcome::InPlace(_)));
        assert_eq!(f.chain("a").unwrap().len(), 2);
        assert_eq!(fs::read_dir(f.dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_fifo_or_directory_named_like_a_configuration_blocks_nothing() {
        let mut f = fixture();
        nix::unistd::mkfifo(&f.dir.path().join("01-fifo.conf"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::create_dir(f.dir.path().join("02-dir.conf")).unwrap();
        f.write("10-a.conflist", &list("a", "bridge"));
        assert!(matches!(f.keep(), Outcome::InPlace(_)));
    }

    /// What Multus delegates to when it starts: an imitation of its rule for the cluster's network `auto`, the first
    /// configuration in byte order whose name does not begin with 00-multus. Its file is written as its thick variant
    /// does.
    fn multus(f: &Fixture, file: &str) -> String {
        let mut names = names(f.dir.path()).unwrap();
        names.sort_unstable();
        let mut loadable = names.into_iter().filter(|name| primary::is_loadable(name) && !name.ends_with(".json"));
        let delegate = loadable.find(|name| !name.starts_with("00-multus")).unwrap();
        let text = json!({"cniVersion": "0.3.1", "name": "multus-cni-network", "type": "multus-shim",
            "clusterNetwork": format!("/host/etc/cni/net.d/{delegate}")});
        f.write(file, &text.to_string());
        delegate
    }

    /// The file that a runtime takes.
    fn runtime(f: &Fixture) -> String {
        names(f.dir.path()).unwrap().into_iter().filter(|name| primary::is_loadable(name)).min().unwrap()
    }

    #[test]
    fn in_whatever_order_multus_the_network_and_the_agent_come_multus_delegates_to_our_chain() {
        const OWN: &str = "00-nebula-cbr0.conflist";
        for (network, multus_file) in [
            ("10-flannel.conflist", "00-multus.conf"),
            ("10-flannel.conflist", "00-multus.conflist.conf"),
            ("01-flannel.conf", "00-multus.conf"),
        ] {
            for order in ["agent multus", "multus agent", "agent multus restart", "multus agent restart reboot"] {
                let mut f = fixture();
                let flannel = if network.ends_with(".conf") {
                    json!({"cniVersion": "0.3.1", "name": "cbr0", "type": "flannel"}).to_string()
                } else {
                    list("cbr0", "flannel")
                };
                f.write(network, &flannel);
                for step in order.split(' ') {
                    match step {
                        "agent" => drop(f.keep()),
                        "reboot" => f.folder = Folder::new(f.dir.path().to_owned()),
                        _ => drop(multus(&f, multus_file)),
                    }
                    f.pass(60);
                }
                let seen = f.keep();
                let Outcome::InPlace(placed) = &seen else { panic!("{network}, {order}: {seen:?}") };
                assert_eq!(placed.file.to_str(), Some(OWN), "{network}, {order}");
                assert_eq!(
                    (runtime(&f).as_str(), placed.before.as_slice()),
                    (multus_file, &[][..]),
                    "{network}, {order}"
                );
                assert_eq!(f.chain("cbr0").unwrap(), ["flannel", "nebula-cni-plugin"], "{network}, {order}");
                // Where Multus was first, it must start again; after that, everything is as it must be.
                let problem = placed.meta.as_ref().expect("it is seen").problem(&placed.file);
                assert_eq!(problem.is_some(), order == "multus agent", "{network}, {order}: {problem:?}");
                assert_eq!(multus(&f, multus_file), OWN, "{network}, {order}");
                let Outcome::InPlace(placed) = f.keep() else { panic!("{network}, {order}") };
                assert_eq!(placed.meta.unwrap().problem(&placed.file), None, "{network}, {order}");
                assert!(!placed.is_new, "{network}, {order}: nothing is written again");
                // Multus goes: our chain is the first.
                fs::remove_file(f.dir.path().join(multus_file)).unwrap();
                assert!(matches!(f.keep(), Outcome::InPlace(InPlace { meta: None, .. })));
                assert_eq!(runtime(&f), OWN);
            }
        }
    }

    #[test]
    fn a_meta_plugin_alone_is_no_primary_and_one_that_sorts_late_is_named() {
        let mut f = fixture();
        let multus =
            json!({"name": "multus-cni-network", "type": "multus-shim", "clusterNetwork": "/host/x"}).to_string();
        f.write("00-multus.conf", &multus);
        assert!(matches!(f.keep(), Outcome::Waiting { .. }));
        f.write("05-multus.conf", &multus);
        fs::remove_file(f.dir.path().join("00-multus.conf")).unwrap();
        f.write("10-a.conflist", &list("a", "bridge"));
        let Outcome::Waiting { reason } = f.keep() else { panic!("the runtime would pass Multus by") };
        assert!(reason.contains("05-multus.conf"), "{reason}");
        assert_eq!(f.chain("a"), None);
        // One that the runtime does not call is left alone.
        fs::rename(f.dir.path().join("10-a.conflist"), f.dir.path().join("01-a.conflist")).unwrap();
        assert!(matches!(f.keep(), Outcome::InPlace(InPlace { meta: None, .. })));
        assert_eq!(runtime(&f), "00-nebula-a.conflist");
    }

    #[test]
    fn of_several_networks_the_one_that_multus_names_is_the_primary() {
        let mut f = fixture();
        f.write("10-a.conflist", &list("a", "bridge"));
        f.write("20-b.conflist", &list("b", "ptp"));
        let multus = json!({"name": "m", "type": "multus", "clusterNetwork": "/host/etc/cni/net.d/20-b.conflist"});
        f.write("00-multus.conf", &multus.to_string());
        assert!(matches!(f.keep(), Outcome::InPlace(_)));
        assert_eq!((f.chain("a"), f.chain("b").is_some()), (None, true));
        let host = HostRoot::default();
        let wish = Wish { entry: &f.entry, network: Some("m"), strategy: Strategy::File, bin: &[], host: &host };
        // OpenShift: CRI-O takes Multus by name, and its cluster network is in another folder.
        let mut folder = Folder::new(f.dir.path().to_owned());
        fs::remove_file(f.dir.path().join("00-nebula-b.conflist")).unwrap();
        let Outcome::InPlace(placed) = folder.keep(wish, f.now) else { panic!("it is asked for") };
        assert_eq!((placed.network.as_str(), placed.meta), ("m", None));
    }
}
