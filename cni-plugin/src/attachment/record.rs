//! Attachment records: one file per attachment that says what was set up, kept until it is undone.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use nebula_cni_contract::format::{self, Unreadable};
use nebula_cni_contract::launch::{Target, is_default};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::attachment::files::{Files, write_durably};
use crate::attachment::foreign;
use crate::attachment::restarts::Restarts;
use crate::link::capture::PodCapture;
use crate::link::guard::Guard;
use crate::link::host_route::HostRoute;
use crate::programs::{self, Digest};
use crate::reply::{Error, code};
use crate::request::{Key, is_name};
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
    /// The installed program of instances. An earlier release names here the one that runs.
    #[serde(default)]
    pub instance: PathBuf,
    /// The program that the instance was started with, if it is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<Digest>,
    /// The program that the instance had before another one took over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<Digest>,
    /// The process of the instance, if its supervisor tracks instances by process; absent until one is started.
    pub process: Option<Process>,
    /// The process from which that one takes over, until it has.
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
    /// Another program is taking over from its instance, or the plugin that watched over that was killed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub is_upgrading: bool,
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
    /// What a later release added. It is written back, for that release may be installed again.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
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
    /// A record of another release, which this one does not understand; why, as a sentence. Whoever
    /// removes it, or the rules that it names, opens a pod.
    Foreign(String),
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

    /// Where the program is that new pods get.
    #[must_use]
    pub fn installed(&self) -> PathBuf {
        programs::installed_of(&self.instance)
    }

    /// The program for an instance that starts again: the one that it had, or else the installed one.
    #[must_use]
    pub fn to_start(&self) -> PathBuf {
        let kept = self.program.as_ref().and_then(|program| programs::kept(&self.installed(), program));
        kept.unwrap_or_else(|| self.instance.clone())
    }

    /// The processes of its instances: two while one takes over from the other, or if the plugin was killed meanwhile.
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

    /// Reads the record of an attachment that must have one.
    ///
    /// # Errors
    /// Code 3 if there is none, code 5 if it cannot be read.
    pub fn of(files: &Files) -> Result<Box<Self>, Error> {
        let path = files.record();
        match Self::load(&path) {
            Ok(Found::Record(record)) => Ok(record),
            Ok(Found::Nothing) => Err(Error::new(code::UNKNOWN_CONTAINER, format!("no record {}", path.display()))),
            Ok(Found::Foreign(why)) => Err(foreign::refusal(&path, &why)),
            Ok(Found::Garbage(why)) => Err(Error::new(code::IO, format!("record {}: {why}", path.display()))),
            Err(error) => Err(Error::new(code::IO, format!("cannot read {}: {error}", path.display()))),
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
        Ok(Self::parse(&bytes))
    }

    /// Reads the contents of a record file.
    pub(super) fn parse(bytes: &[u8]) -> Found {
        match format::read::<Self>(bytes, Self::VERSION) {
            Ok(mut record) => {
                record.settle();
                Found::Record(Box::new(record))
            }
            Err(Unreadable::Damaged(why)) => Found::Garbage(why),
            Err(why) => Found::Foreign(why.to_string()),
        }
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

/// The record files of all networks.
pub(crate) fn paths(state_dir: &Path) -> impl Iterator<Item = PathBuf> {
    let networks = fs::read_dir(state_dir).into_iter().flatten().flatten();
    let names = networks.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| is_name(name));
    let paths: Vec<PathBuf> = names.flat_map(|network| list(state_dir, &network).unwrap_or_default()).collect();
    paths.into_iter()
}

pub(super) const MAX_RECORD: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::launch::Pod;
    use nebula_cni_contract::recorded::hold;
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
            program: None,
            previous: None,
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
            is_upgrading: false,
            is_being_told: false,
            guard: None,
            capture: None,
            status_socket: "/x".into(),
            rest: BTreeMap::new(),
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
    fn the_records_of_each_release_are_read_and_keep_their_keys() {
        let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents");
        for file in ["record-isolated.json", "record-captured.json"] {
            let records = hold::<Record>(&documents, env!("CARGO_PKG_VERSION"), file).unwrap();
            // A key that only came back because it is not known any more.
            assert!(records.iter().all(|record| record.rest.is_empty()), "{file}: {records:?}");
        }
        let words = |kinds: [Kind; 2], states: [State; 2]| serde_json::to_string(&(kinds, states)).unwrap();
        let words = words([Kind::Systemd, Kind::Direct], [State::Intent, State::Running]);
        assert_eq!(words, r#"[["systemd","direct"],["intent","running"]]"#);
    }

    #[test]
    fn a_rule_that_only_a_later_release_knows_makes_a_record_foreign() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c-eth0.json");
        for (file, after) in [("isolated", "\"tunnel\": {"), ("isolated", "\"guard\": {"), ("captured", "\"clear\": {")]
        {
            let of = format!("{}/tests/documents/0.1.0/record-{file}.json", env!("CARGO_MANIFEST_DIR"));
            let text = fs::read_to_string(of).unwrap();
            fs::write(&path, &text).unwrap();
            assert!(matches!(Record::load(&path).unwrap(), Found::Record(_)));
            fs::write(&path, text.replacen(after, &format!("{after}\"later\": [],"), 1)).unwrap();
            let found = Record::load(&path).unwrap();
            assert!(matches!(&found, Found::Foreign(why) if why.contains("`later`")), "{after} {found:?}");
        }
    }

    #[test]
    fn torn_files_are_garbage_and_missing_ones_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        files.create_dir().unwrap();
        assert!(matches!(Record::load(&files.record()).unwrap(), Found::Nothing));
        let whole = serde_json::to_vec(&record()).unwrap();
        for cut in 0..whole.len() {
            fs::write(files.record(), &whole[..cut]).unwrap();
            assert!(matches!(Record::load(&files.record()).unwrap(), Found::Garbage(_)), "cut at {cut}");
        }
    }

    #[test]
    fn a_record_of_another_release_is_no_garbage_and_says_who_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        files.create_dir().unwrap();
        let newer = serde_json::to_string(&Record { version: 2, ..record() }).unwrap();
        let with_a_new_word = serde_json::to_string(&record()).unwrap().replace("\"intent\"", "\"asleep\"");
        for (text, says) in [
            (newer.as_str(), "newer program (format 2, this one knows 1)"),
            (r#"{"pods":{},"version":2}"#, "newer program (format 2, this one knows 1)"),
            (&with_a_new_word, "another release: unknown variant `asleep`"),
        ] {
            fs::write(files.record(), text).unwrap();
            let found = Record::load(&files.record()).unwrap();
            assert!(matches!(&found, Found::Foreign(why) if why.contains(says)), "{text}: {found:?}");
            let refused = Record::of(&files).unwrap_err();
            assert!(refused.msg.contains(says) && refused.msg.contains("-eth0.json"), "{refused:?}");
        }
    }

    #[test]
    fn what_a_later_release_added_to_a_record_is_written_back() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        files.create_dir().unwrap();
        let mut later = serde_json::to_value(record()).unwrap();
        later["shaper"] = serde_json::json!({"rate": 7});
        fs::write(files.record(), later.to_string()).unwrap();
        let Found::Record(read) = Record::load(&files.record()).unwrap() else { panic!("it is a record") };
        read.save(&files).unwrap();
        let written: Value = serde_json::from_slice(&fs::read(files.record()).unwrap()).unwrap();
        assert_eq!(written, later);
    }
}
