//! Attachment records: one file per attachment that says what was set up, kept until it is undone and replaced by
//! rename.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use nebula_cni_contract::hash::fnv1a;
use nebula_cni_contract::launch::{self, Target, is_default};
use serde::{Deserialize, Serialize};

use crate::attachment::restarts::Restarts;
use crate::link::capture::PodCapture;
use crate::link::guard::{self, Guard};
use crate::link::host_route::HostRoute;
use crate::request::{Key, is_name};
use crate::settings::capturing::CLUSTER_FOLDER;
use crate::supervisor::kind::Kind;
use crate::supervisor::process::Process;

/// One attachment, as it was set up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of the format, [`Record::VERSION`].
    pub version: u32,
    /// How far the attachment got.
    pub state: State,
    /// The pod, and where its tunnel goes.
    #[serde(flatten)]
    pub target: Target,
    /// The supervisor of the instance.
    #[serde(default)]
    pub supervisor: Kind,
    /// The instance's program.
    #[serde(default)]
    pub instance: PathBuf,
    /// The process of the instance, if its supervisor tracks instances by process; absent until one is started.
    pub process: Option<Process>,
    /// The process from which that one takes over, until it has, if it did not end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predecessor: Option<Process>,
    /// The node's route to the overlay address that ADD reported as the pod's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_route: Option<HostRoute>,
    /// Overlay networks that the node must not send to in clear, because its programs know the pod's overlay address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<IpNet>,
    /// User and group that the instance runs as; absent if the plugin is not root and cannot choose one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// Memory limit of the instance, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
    /// Restarts of the instance in a row; absent if it never had to be restarted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<Restarts>,
    /// Its instance is being told of changed settings, or the process that did so has ended.
    #[serde(default, skip_serializing_if = "is_default")]
    pub is_being_told: bool,
    /// Rules on the node's end of the pod's link, if the pod is isolated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<Guard>,
    /// What captures the pod's traffic, if it is captured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture: Option<PodCapture>,
    /// Socket on which the instance reports its status.
    pub status_socket: PathBuf,
}

/// How far an attachment got. An attachment that is gone has no file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// About to be set up, or partly set up.
    Intent,
    /// The instance has reported that it is ready.
    Running,
}

/// What a record file holds.
#[derive(Debug)]
pub enum Found {
    /// No such file.
    Nothing,
    /// A record.
    Record(Box<Record>),
    /// Anything else: a torn file, or one that is not ours.
    Garbage(String),
}

impl Record {
    /// Current version of the format.
    pub const VERSION: u32 = 1;

    /// The attachment that this record describes.
    #[must_use]
    pub fn key(&self) -> Key {
        let Target { network, container_id, ifname, .. } = &self.target;
        Key { network: network.clone(), container_id: container_id.clone(), ifname: ifname.clone() }
    }

    /// Replaces the record file; it is durable once this returns.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn save(&self, files: &Files) -> io::Result<()> {
        write_durably(&files.record(), &serde_json::to_vec(self)?)
    }

    /// The processes of its instances: two while one takes over from the other, or if whoever had it do so has ended.
    #[must_use]
    pub fn processes(&self) -> [Option<Process>; 2] {
        [self.process, self.predecessor]
    }

    /// Forgets whichever of two processes has ended.
    fn settle(&mut self) {
        let Some(predecessor) = self.predecessor else { return };
        if !predecessor.is_alive() {
            self.predecessor = None;
        } else if self.process.is_none_or(|process| !process.is_alive()) {
            (self.process, self.predecessor) = (Some(predecessor), None);
        }
    }

    /// Reads the record file of an attachment.
    ///
    /// # Errors
    /// Returns the file system's error; a missing file is not an error.
    pub fn load(path: &Path) -> io::Result<Found> {
        let file = match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            other => other?,
        };
        let mut bytes = Vec::new();
        file.take(MAX_RECORD).read_to_end(&mut bytes)?;
        Ok(match serde_json::from_slice::<Self>(&bytes) {
            Ok(mut record) if record.version == Self::VERSION => {
                record.settle();
                Found::Record(Box::new(record))
            }
            Ok(record) => Found::Garbage(format!("has version {}", record.version)),
            Err(e) => Found::Garbage(e.to_string()),
        })
    }
}

/// The files of one attachment. They are all removed with it.
#[derive(Debug, Clone)]
pub struct Files {
    state_dir: PathBuf,
    key: Key,
}

impl Files {
    /// Derives the paths; creates nothing.
    #[must_use]
    pub fn new(state_dir: &Path, key: &Key) -> Self {
        Self { state_dir: state_dir.to_owned(), key: key.clone() }
    }

    /// The attachment these files belong to.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Directory of the network's records.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.state_dir.join(&self.key.network)
    }

    /// The record file.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.named("json")
    }

    /// The launch contract file.
    #[must_use]
    pub fn launch(&self) -> PathBuf {
        self.named("launch")
    }

    /// Where a changed launch contract is whole while the launch file is overwritten.
    #[must_use]
    pub fn launch_copy(&self) -> PathBuf {
        launch::copy_of(&self.launch())
    }

    /// Directory that holds the records of all networks.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.state_dir.clone()
    }

    /// Names of the attachment's systemd units. It has the first, unless another instance took over from that: then the
    /// other one, and so on.
    #[must_use]
    pub fn units(&self) -> [String; 2] {
        ["", "-b"].map(|end| format!("nebula-pod-{:016x}{end}.service", self.hash()))
    }

    /// Prefix of the names of the tables that hold the rules for the attachment's link.
    #[must_use]
    pub fn guard_tables(&self) -> String {
        guard::table_prefix(self.hash())
    }

    /// Part of the names of what captures the attachment's traffic.
    #[must_use]
    pub fn capture(&self) -> String {
        format!("{:016x}", self.hash())
    }

    /// Log file with what the instance writes to stderr.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.named("log")
    }

    /// Lock file, held while a verb works on the attachment.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.named("lock")
    }

    /// The instance's room: a directory that only the instance's user may enter.
    #[must_use]
    pub fn room(&self) -> PathBuf {
        self.state_dir.join(format!(".{:016x}", self.hash()))
    }

    /// Socket on which the instance reports its status.
    #[must_use]
    pub fn status_socket(&self) -> PathBuf {
        self.room().join("pod.status")
    }

    /// Socket on which the instance reports that it is ready.
    #[must_use]
    pub fn notify_socket(&self) -> PathBuf {
        self.state_dir.join(format!(".{:016x}.notify", self.hash()))
    }

    /// Socket to which the instance hands its device when it ends; the same path as
    /// [`nebula_cni_contract::launch::LaunchSpec::device_socket`].
    #[must_use]
    pub fn device_socket(&self) -> PathBuf {
        self.room().join("pod.device")
    }

    /// Whether there is no trace of an earlier ADD of this attachment. Its lock does not count: every call makes one.
    #[must_use]
    pub fn have_left_nothing(&self) -> bool {
        let left = [self.record(), self.launch(), self.launch_copy(), self.room(), self.log(), self.notify_socket()];
        left.iter().all(|path| path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound))
    }

    /// Creates the directory of the network's records.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn create_dir(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(self.dir())
    }

    /// Removes everything but the lock. The record goes last, so that a retry still knows what to undo.
    ///
    /// # Errors
    /// Returns one line per file that could not be removed.
    pub fn remove(&self) -> Result<(), Vec<String>> {
        let (record, launch) = (self.record(), self.launch());
        let mut problems = Vec::new();
        let sockets = [self.notify_socket(), self.status_socket(), self.device_socket()];
        let first = sockets.into_iter().chain([
            temporary(&launch),
            temporary(&self.launch_copy()),
            self.launch_copy(),
            launch,
            self.log(),
            temporary(&record),
        ]);
        let mut note = |path: &Path, removed: io::Result<()>| match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                problems.push(format!("cannot remove {}: {e}", path.display()));
            }
            _ => {}
        };
        for path in first {
            note(&path, fs::remove_file(&path));
        }
        // The instance may have left other files in its room.
        note(&self.room(), fs::remove_dir_all(self.room()));
        if problems.is_empty()
            && let Err(e) = fs::remove_file(&record)
            && e.kind() != io::ErrorKind::NotFound
        {
            problems.push(format!("cannot remove {}: {e}", record.display()));
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    fn named(&self, suffix: &str) -> PathBuf {
        self.dir().join(format!("{}-{}.{suffix}", self.key.container_id, self.key.ifname))
    }

    // A socket address holds 107 bytes and a container id alone takes 64, so sockets are named by a hash. They live
    // next to the networks' directories, whose names never begin with a dot.
    fn hash(&self) -> u64 {
        let Key { network, container_id, ifname } = &self.key;
        fnv1a(&[network, "\0", container_id, "\0", ifname])
    }
}

/// Lists the record files of a network, sorted by name.
///
/// # Errors
/// Returns the file system's error; a missing directory is not an error.
pub fn list(state_dir: &Path, network: &str) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(state_dir.join(network)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut paths = entries.map(|entry| entry.map(|e| e.path())).collect::<io::Result<Vec<_>>>()?;
    paths.retain(|path| path.extension().is_some_and(|e| e == "json"));
    paths.sort();
    Ok(paths)
}

/// Collects the routes named in the records of all networks.
#[must_use]
pub fn host_routes(state_dir: &Path) -> Vec<HostRoute> {
    all(state_dir).filter_map(|record| record.host_route).collect()
}

/// Collects the networks that the records of all networks but this one refuse.
#[must_use]
pub fn refused_by_others(state_dir: &Path, key: &Key) -> Vec<IpNet> {
    all(state_dir).filter(|record| record.key() != *key).flat_map(|record| record.refused).collect()
}

/// Keeps others from changing what records of the state directory share, until it is dropped.
///
/// # Errors
/// Returns the file system's error.
pub fn lock_shared(state_dir: &Path) -> io::Result<File> {
    let lock = File::open(state_dir)?;
    lock.lock()?;
    Ok(lock)
}

/// Makes the folder of the cluster table: an instance can watch and read only a folder that is there when it starts.
///
/// # Errors
/// Returns the file system's error.
pub fn make_cluster_folder(state_dir: &Path) -> io::Result<()> {
    let _lock = lock_shared(state_dir)?;
    let folder = state_dir.join(CLUSTER_FOLDER);
    fs::DirBuilder::new().recursive(true).create(&folder)?;
    // Whatever the umask of the runtime is: an instance looks into it as a user of its own.
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))
}

/// Removes that folder if no captured pod needs it and no agent has written a table.
///
/// # Errors
/// Returns the file system's error.
pub fn remove_cluster_folder(state_dir: &Path) -> io::Result<()> {
    let _lock = lock_shared(state_dir)?;
    if all(state_dir).any(|record| record.capture.is_some()) {
        return Ok(());
    }
    match fs::remove_dir(state_dir.join(CLUSTER_FOLDER)) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => Err(error),
        _ => Ok(()),
    }
}

/// Collects the addresses of the captured pods of all networks, except those of the attachment `key`.
#[must_use]
pub fn captured_by_others(state_dir: &Path, key: &Key) -> Vec<IpAddr> {
    let captures = all(state_dir).filter(|record| record.key() != *key).filter_map(|record| record.capture);
    captures.flat_map(|capture| capture.guard.addresses().to_vec()).collect()
}

/// The records of all networks that can be read.
fn all(state_dir: &Path) -> impl Iterator<Item = Record> {
    let networks = fs::read_dir(state_dir).into_iter().flatten().flatten();
    let names = networks.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| is_name(name));
    let paths: Vec<PathBuf> = names.flat_map(|network| list(state_dir, &network).unwrap_or_default()).collect();
    paths.into_iter().filter_map(|path| match Record::load(&path) {
        Ok(Found::Record(record)) => Some(*record),
        _ => None,
    })
}

/// Removes stale files that a killed verb left behind: those next to a lock that nobody holds and that has no record.
/// Without a record nothing was started. Files that cannot be removed now are left for the next sweep.
pub fn sweep(state_dir: &Path, network: &str) {
    let dir = state_dir.join(network);
    let Ok(entries) = fs::read_dir(&dir) else { return };
    let locks =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|p| p.extension().is_some_and(|e| e == "lock"));
    for path in locks {
        let Ok(lock) = OpenOptions::new().write(true).open(&path) else { continue };
        if lock.try_lock().is_err() || with_suffix(&path, "json").exists() {
            continue;
        }
        for left in ["json.tmp", "launch.tmp", "launch.copy.tmp", "launch.copy", "launch", "log", "lock"] {
            let _ = fs::remove_file(with_suffix(&path, left));
        }
    }
    let _ = fs::remove_dir(&dir);
}

fn with_suffix(lock: &Path, suffix: &str) -> PathBuf {
    let mut name = lock.as_os_str().to_owned().into_vec();
    name.truncate(name.len() - "lock".len());
    name.extend(suffix.bytes());
    PathBuf::from(OsString::from_vec(name))
}

/// Replaces a file atomically: after a crash it holds either the old or the new bytes. Only its owner can read it.
///
/// # Errors
/// Returns the file system's error.
pub fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_durably(path, bytes, 0o600)
}

/// Like [`write_durably`], for a file with these permissions, whatever the umask is.
///
/// # Errors
/// Returns the file system's error.
pub fn replace_durably(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = temporary(path);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    PathBuf::from(name)
}

const MAX_RECORD: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::launch::Pod;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn files(dir: &Path) -> Files {
        let key = Key { network: "net".into(), container_id: "c".repeat(64), ifname: "eth0".into() };
        Files::new(dir, &key)
    }

    fn record() -> Record {
        Record {
            version: Record::VERSION,
            state: State::Intent,
            target: Target {
                network: "net".into(),
                container_id: "c".repeat(64),
                ifname: "eth0".into(),
                netns: "/run/netns/x".into(),
                netns_id: (4, 9),
                pod: Pod { namespace: "a".into(), name: "b".into(), uid: "c".into() },
                pod_address: "10.0.0.1".parse().unwrap(),
                other_address: None,
                device: "nebula0".into(),
            },
            supervisor: Kind::Systemd,
            instance: "/opt/cni/bin/nebula-cni-instance".into(),
            process: Some(Process { pid: 7, start_time: 9 }),
            host_route: Some(HostRoute {
                destination: "10.42.0.1".parse().unwrap(),
                next_hop: "10.0.0.1".parse().unwrap(),
                interface: 3,
            }),
            refused: vec!["10.42.0.0/16".parse().unwrap()],
            user: Some(2_130_706_433),
            memory_limit: Some(32 << 20),
            restarts: None,
            predecessor: None,
            is_being_told: false,
            guard: None,
            capture: None,
            status_socket: "/x".into(),
        }
    }

    #[test]
    fn a_saved_record_is_read_back_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        files.create_dir().unwrap();
        record().save(&files).unwrap();
        assert!(matches!(Record::load(&files.record()).unwrap(), Found::Record(r) if *r == record()));
        assert_eq!(files.record().metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(files.dir().metadata().unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(list(dir.path(), "net").unwrap(), [files.record()]);
        assert_eq!(host_routes(dir.path()), Vec::from_iter(record().host_route));
    }

    #[test]
    fn a_record_of_the_release_before_is_read_and_written_with_the_same_keys_in_the_same_order() {
        let text = r#"{"version":1,"state":"running","network":"net","container_id":"c","ifname":"eth0",
            "netns":"/run/netns/x","netns_id":[4,9],"pod":{"namespace":"a","name":"b","uid":"c"},
            "pod_address":"10.0.0.1","device":"nebula0","supervisor":"systemd","instance":"/i","process":null,
            "user":2130706433,"status_socket":"/x"}"#;
        let record: Record = serde_json::from_str(text).unwrap();
        assert_eq!((record.target.pod.uid.as_str(), record.user), ("c", Some(2_130_706_433)));
        assert_eq!(serde_json::to_string(&record).unwrap(), text.split_whitespace().collect::<String>());
    }

    #[test]
    fn torn_and_foreign_files_are_garbage_and_missing_ones_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        files.create_dir().unwrap();
        assert!(matches!(Record::load(&files.record()).unwrap(), Found::Nothing));
        let whole = serde_json::to_vec(&record()).unwrap();
        for cut in 0..whole.len() {
            fs::write(files.record(), &whole[..cut]).unwrap();
            assert!(matches!(Record::load(&files.record()).unwrap(), Found::Garbage(_)), "cut at {cut}");
        }
        fs::write(files.record(), serde_json::to_vec(&Record { version: 2, ..record() }).unwrap()).unwrap();
        assert!(matches!(Record::load(&files.record()).unwrap(), Found::Garbage(_)));
    }

    #[test]
    fn socket_names_fit_a_socket_address() {
        let state_dir = PathBuf::from(format!("/{}", "x".repeat(69)));
        assert!(files(&state_dir).status_socket().as_os_str().len() < 108);
        assert!(files(&state_dir).notify_socket().as_os_str().len() < 108);
        assert!(files(&state_dir).device_socket().as_os_str().len() < 108);
    }

    #[test]
    fn the_instance_finds_the_socket_for_its_device_beside_the_one_of_its_status() {
        let files = files(Path::new("/run/nebula-cni"));
        assert_eq!(files.status_socket().with_extension("device"), files.device_socket());
    }

    #[test]
    fn remove_takes_all_files_and_may_be_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        files.create_dir().unwrap();
        record().save(&files).unwrap();
        fs::create_dir(files.room()).unwrap();
        let sockets = [files.status_socket(), files.notify_socket(), files.device_socket()];
        for path in [files.launch(), files.log(), temporary(&files.record())].into_iter().chain(sockets) {
            fs::write(path, b"x").unwrap();
        }
        files.remove().unwrap();
        files.remove().unwrap();
        assert_eq!(fs::read_dir(files.dir()).unwrap().count(), 0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
