//! Pods whose certificates are to be released: DEL writes a file for each, and the node agent tells the CA and
//! deletes it. The plugin itself never waits for the CA. The directory is the agent's: where there is none, no files
//! are written, as nobody would read them, and the CA learns from the API server that a pod is gone.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::files::write_durably;
use super::record::{self, Found, Record, State};

/// Contents of a file: the pod as the CA's proof of a node describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Released {
    /// Name of the pod.
    pub name: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// UID of the pod.
    pub uid: String,
    /// Primary address of the pod.
    pub address: IpAddr,
}

/// Directory of the files of a network.
#[must_use]
pub fn dir(state_dir: &Path, network: &str) -> PathBuf {
    state_dir.join(network).join("released")
}

/// Asks for notes, for the next hour: the agent calls this as long as it runs.
///
/// # Errors
/// Returns the file system's error.
pub fn expect(state_dir: &Path, network: &str, now: SystemTime) -> io::Result<()> {
    let dir = dir(state_dir, network);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    fs::File::open(&dir)?.set_modified(now)
}

/// Notes that the pod of `record`, which was removed, needs its certificates no more. Does nothing if nobody expects
/// notes, if the pod never had a certificate, if another sandbox of it is still attached, or if there are too many
/// files already.
///
/// # Errors
/// Returns the file system's error.
pub fn note(state_dir: &Path, record: &Record) -> io::Result<()> {
    let (network, pod) = (&record.target.network, &record.target.pod);
    let Some(path) = file(state_dir, network, &pod.uid) else { return Ok(()) };
    if record.state != State::Running || is_attached(state_dir, network, &pod.uid) {
        return Ok(());
    }
    let count = match fs::read_dir(dir(state_dir, network)) {
        Ok(files) => files.count(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if count >= MAX_FILES {
        return Ok(());
    }
    let released = Released {
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        uid: pod.uid.clone(),
        address: record.target.pod_address,
    };
    write_durably(&path, &serde_json::to_vec(&released)?)
}

/// Takes a note back, because the pod is attached again.
pub fn forget(state_dir: &Path, network: &str, uid: &str) {
    if let Some(path) = file(state_dir, network, uid) {
        let _ = fs::remove_file(path);
    }
}

/// Removes files that nobody has read for longer than a certificate is valid, and the directory of an agent that is
/// gone.
pub fn sweep(state_dir: &Path, network: &str, now: SystemTime) {
    let dir = dir(state_dir, network);
    let is_older = |file: io::Result<fs::Metadata>, than: Duration| {
        let changed = file.and_then(|file| file.modified());
        changed.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > than))
    };
    let is_unread = is_older(fs::metadata(&dir), EXPECTED_FOR);
    for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
        if is_older(entry.metadata(), KEPT_FOR) {
            let _ = fs::remove_file(entry.path());
        }
    }
    if is_unread {
        let _ = fs::remove_dir(dir);
    }
}

/// `None` for a UID that the CA would refuse, and that may be no file name.
fn file(state_dir: &Path, network: &str, uid: &str) -> Option<PathBuf> {
    let is_uid = (1..=64).contains(&uid.len()) && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    is_uid.then(|| dir(state_dir, network).join(format!("{uid}.json")))
}

fn is_attached(state_dir: &Path, network: &str, uid: &str) -> bool {
    let records = record::list(state_dir, network).unwrap_or_default();
    records.iter().any(|path| match Record::load(path) {
        Ok(Found::Record(other)) => other.target.pod.uid == uid,
        // Perhaps: then its certificate ends by itself.
        Ok(Found::Foreign(_)) => true,
        _ => false,
    })
}

/// Several times the pods of a node.
const MAX_FILES: usize = 1024;
/// A day is how long the CA's certificates are valid by default.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// Longer than an agent is away for an upgrade.
const EXPECTED_FOR: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attachment::files::Files;

    fn record(id: &str, uid: &str) -> Record {
        let text = format!(
            r#"{{"version": 1, "state": "running", "network": "net", "container_id": "{id}", "ifname": "eth0",
            "netns": "/run/netns/x", "netns_id": [4, 9], "pod": {{"namespace": "a", "name": "b", "uid": "{uid}"}},
            "pod_address": "10.0.0.1", "device": "nebula0", "supervisor": "direct", "instance": "/i", "process": null,
            "status_socket": "/x"}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    /// A state directory whose agent lives.
    fn attended() -> tempfile::TempDir {
        let state = tempfile::tempdir().unwrap();
        expect(state.path(), "net", SystemTime::UNIX_EPOCH).unwrap();
        state
    }

    #[test]
    fn without_an_agent_nothing_is_noted() {
        let state = tempfile::tempdir().unwrap();
        note(state.path(), &record("c", "u")).unwrap();
        assert!(!dir(state.path(), "net").exists());
        for at in [1_000_000, 2_000_000] {
            expect(state.path(), "net", SystemTime::UNIX_EPOCH + Duration::from_secs(at)).unwrap();
        }
        // The agent lives, and so does its directory, with and without notes.
        let soon = SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_060);
        sweep(state.path(), "net", soon);
        assert!(dir(state.path(), "net").exists());
        // It was removed from this node without an uninstallation.
        sweep(state.path(), "net", soon + EXPECTED_FOR);
        note(state.path(), &record("c", "u")).unwrap();
        assert!(!dir(state.path(), "net").exists());
    }

    #[test]
    fn a_pod_that_had_a_certificate_is_noted_as_the_ca_asks_for_it() {
        let state = attended();
        note(state.path(), &record("c", "u-1")).unwrap();
        let text = fs::read_to_string(dir(state.path(), "net").join("u-1.json")).unwrap();
        assert_eq!(text, r#"{"name":"b","namespace":"a","uid":"u-1","address":"10.0.0.1"}"#);
        assert!(record::list(state.path(), "net").unwrap().is_empty(), "it is no record");
        forget(state.path(), "net", "u-1");
        assert!(names(&dir(state.path(), "net")).is_empty());
    }

    #[test]
    fn nothing_is_noted_without_a_certificate_or_a_uid_or_while_another_sandbox_of_the_pod_is_attached() {
        let state = attended();
        note(state.path(), &Record { state: State::Intent, ..record("c", "u") }).unwrap();
        for uid in ["", "../u", "a/b", &"u".repeat(65)] {
            note(state.path(), &record("c", uid)).unwrap();
        }
        let other = record("d", "u");
        let files = Files::new(state.path(), &other.key());
        files.create_dir().unwrap();
        other.save(&files).unwrap();
        note(state.path(), &record("c", "u")).unwrap();
        assert_eq!(names(&dir(state.path(), "net")), Vec::<String>::new());
    }

    #[test]
    fn files_that_nobody_reads_stay_few_and_go_after_a_day() {
        let state = attended();
        for n in 0..MAX_FILES + 5 {
            note(state.path(), &record("c", &format!("u{n}"))).unwrap();
        }
        let dir = dir(state.path(), "net");
        assert_eq!(names(&dir).len(), MAX_FILES);
        let written = fs::metadata(dir.join("u0.json")).unwrap().modified().unwrap();
        sweep(state.path(), "net", written);
        assert_eq!(names(&dir).len(), MAX_FILES);
        let later = written + KEPT_FOR + Duration::from_secs(3600);
        sweep(state.path(), "net", later);
        assert!(names(&dir).is_empty());
    }
}
