//! Hands changed settings to the instances of pods that run: the tunnel's configuration (the key `nebula`), which an
//! instance takes over without losing a connection that the new rules allow. What else changed in the entry holds for
//! a pod when it is made again, and is named.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use nebula_cni_contract::clock::Deadline;
use nebula_cni_contract::instance_status::{FollowedSettings, Status};
use nebula_cni_contract::launch::{self, LaunchSpec, contract_hash};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::attachment::files::{Files, write_durably};
use crate::attachment::lock::Lock;
use crate::attachment::record::{self, Found, Record, State};
use crate::host::Host;
use crate::reply::{Error, code};
use crate::settings::Settings;

/// What became of the pods of one network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refreshed {
    /// Pods (`namespace/name`) that go on with the settings of the entry.
    pub refreshed: Vec<String>,
    /// Pods that go on with other settings, until they are made again.
    pub outdated: Vec<Outdated>,
    /// Pods whose instances could not be told, or refused the settings.
    pub failed: Vec<Failure>,
}

/// A pod that runs with other settings than those of the entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outdated {
    /// `namespace/name`.
    pub pod: String,
    /// Keys of the entry.
    pub keys: Vec<String>,
}

/// A pod that goes on as before, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// `namespace/name`.
    pub pod: String,
    /// The cause.
    pub why: String,
}

/// Compares each attachment of `network` with `settings`, and hands over what differs.
///
/// # Errors
/// Code 5 if the records cannot be listed.
pub fn run(settings: &Settings, network: &str, host: &Host<'_>) -> Result<Refreshed, Error> {
    let paths = record::list(&settings.state_dir, network)
        .map_err(|e| Error::new(code::IO, format!("cannot list the records of {network}: {e}")))?;
    let deadline = Deadline::after(host.clock, WORKS_FOR);
    let mut all = Refreshed::default();
    for path in paths {
        let Ok(Found::Record(record)) = Record::load(&path) else { continue };
        // One that is being set up gets the settings of its ADD.
        if record.state != State::Running {
            continue;
        }
        let pod = format!("{}/{}", record.target.pod.namespace, record.target.pod.name);
        let files = Files::new(&settings.state_dir, &record.key());
        let Ok(text) = read_launch(&files.launch()) else { continue };
        let mut keys = differing_keys(&record, &text, settings);
        let differs = nebula_of(&text).as_ref() != Some(&settings.nebula) || record.is_being_told;
        if differs && !deadline.is_over(host.clock) {
            match hand_over(&files, settings, host) {
                Ok(Handed::TakenOver) => all.refreshed.push(pod.clone()),
                Ok(Handed::Busy) => {}
                Ok(Handed::Unable) => keys.push("nebula"),
                Err(why) => all.failed.push(Failure { pod: pod.clone(), why }),
            }
        }
        if !keys.is_empty() {
            all.outdated.push(Outdated { pod, keys: keys.into_iter().map(str::to_owned).collect() });
        }
    }
    Ok(all)
}

enum Handed {
    TakenOver,
    /// A verb works on the attachment.
    Busy,
    /// The instance is of a release that keeps the settings of its start, or its contract is of another one.
    Unable,
}

fn hand_over(files: &Files, settings: &Settings, host: &Host<'_>) -> Result<Handed, String> {
    let Ok(_lock) = Lock::acquire(files, host.clock, Deadline::after(host.clock, Duration::ZERO)) else {
        return Ok(Handed::Busy);
    };
    let Ok(Found::Record(mut record)) = Record::load(&files.record()) else { return Ok(Handed::Busy) };
    let said = |e: io::Error| format!("its instance does not answer: {e}");
    let Some(followed) = Status::ask(&record.status_socket).map_err(said)?.settings else { return Ok(Handed::Unable) };
    let path = files.launch();
    let before = read_launch(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    if LaunchSpec::parse(&before).is_err() {
        // In one of another release the key may mean something else.
        return Ok(Handed::Unable);
    }
    let mut contract: Value = serde_json::from_slice(&before).map_err(|e| format!("{}: {e}", path.display()))?;
    contract["nebula"] = settings.nebula.clone();
    let after = contract.to_string().into_bytes();
    // If this process ends before the instance was told, the next call tells it.
    note(&mut record, true, files)?;
    replace(&path, &after)?;
    let taken = host
        .supervisor(record.supervisor)
        .reload(files, record.process, host.clock)
        .and_then(|()| wait_until_followed(&record, followed.reloads, &contract_hash(&after), host));
    match taken {
        Ok(followed) => {
            if let Some(mtu) = followed.device_mtu {
                set_mtu(&record, mtu, host).map_err(|e| format!("cannot set the MTU of its device to {mtu}: {e}"))?;
            }
            note(&mut record, false, files)?;
            Ok(Handed::TakenOver)
        }
        Err(why) => {
            // An instance that is started again gets the settings that its predecessor went on with.
            replace(&path, &before)?;
            note(&mut record, false, files)?;
            Err(why)
        }
    }
}

fn note(record: &mut Record, is_being_told: bool, files: &Files) -> Result<(), String> {
    record.is_being_told = is_being_told;
    record.save(files).map_err(|e| format!("cannot write its record: {e}"))
}

/// Waits until the instance has read its contract once more than `before`, and says that it follows the one with this
/// hash.
fn wait_until_followed(record: &Record, before: u64, hash: &str, host: &Host<'_>) -> Result<FollowedSettings, String> {
    let deadline = Deadline::after(host.clock, ANSWERS_WITHIN);
    loop {
        let status = Status::ask(&record.status_socket).map_err(|e| format!("its instance does not answer: {e}"))?;
        match status.settings {
            Some(FollowedSettings { refused: Some(why), reloads, .. }) if reloads != before => {
                return Err(format!("its instance refuses them: {why}"));
            }
            Some(followed) if followed.reloads != before && followed.contract == hash => return Ok(followed),
            _ if deadline.is_over(host.clock) => {
                return Err("its instance did not take them over in time".to_owned());
            }
            _ => host.clock.sleep(ASK_AGAIN),
        }
    }
}

fn set_mtu(record: &Record, mtu: u32, host: &Host<'_>) -> io::Result<()> {
    let netns = host.namespaces.open(&record.target.netns)?;
    if netns.id != record.target.netns_id {
        return Err(io::Error::other("the pod's network namespace is gone"));
    }
    host.namespaces.set_mtu(&netns, &record.target.device, mtu)
}

/// Keys whose values in the entry are not those that the attachment was made with. `nebula` is not one of them.
fn differing_keys(record: &Record, launch: &[u8], settings: &Settings) -> Vec<&'static str> {
    // One of another release holds what this one does not know.
    let Ok(made) = LaunchSpec::parse(launch) else { return Vec::new() };
    let capture_differs = match (&settings.capture, &made.capture, &record.capture) {
        (None, None, _) => false,
        (Some(capturing), Some(capture), Some(on_node)) => {
            capturing.of_pod(&capture.sources, &settings.state_dir) != *capture
                || !on_node.guard.is_made_of(&capturing.terms)
        }
        _ => true,
    };
    let isolation_differs = match (&settings.isolate, &made.isolate) {
        (None, None) => false,
        (Some(isolation), Some(isolate)) => !isolation.allows(isolate),
        _ => true,
    };
    let overlay_differs = made.capture.is_none() && made.overlay != settings.overlay;
    // A pod that was attached in place keeps its address.
    let renumbering_ended = made.renumber && !settings.renumber;
    let all = [
        ("device", made.target.device != settings.device),
        ("flow", made.flow != settings.flow),
        ("provisional", made.provisional != settings.provisional),
        ("underlay", made.underlay != settings.underlay),
        ("isolate", isolation_differs),
        ("capture", capture_differs),
        ("renumber", renumbering_ended),
        ("overlay", overlay_differs),
        ("memoryLimitMiB", record.memory_limit != settings.memory_limit),
        ("ca", made.ca != settings.ca),
    ];
    all.into_iter().filter_map(|(key, differs)| differs.then_some(key)).collect()
}

fn nebula_of(launch: &[u8]) -> Option<Value> {
    let mut contract: Value = serde_json::from_slice(launch).ok()?;
    Some(contract["nebula"].take())
}

/// Reads a launch contract, bounded.
pub(super) fn read_launch(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    let mut text = Vec::new();
    launch::open(path)?.take(MAX_LAUNCH_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// Replaces the contents and not the file: the instance holds this one open, with a lock that keeps a second instance
/// out, and could not open another. Meanwhile a copy beside it is whole, from which instances start: this process or
/// the machine may end in between.
fn replace(path: &Path, text: &[u8]) -> Result<(), String> {
    let copy = launch::copy_of(path);
    let failed = |path: &Path, e: io::Error| format!("cannot write {}: {e}", path.display());
    write_durably(&copy, text).map_err(|e| failed(&copy, e))?;
    overwrite(path, text).map_err(|e| failed(path, e))?;
    std::fs::remove_file(&copy).map_err(|e| format!("cannot remove {}: {e}", copy.display()))
}

fn overwrite(path: &Path, text: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    file.write_all_at(text, 0)?;
    file.set_len(text.len() as u64)?;
    file.sync_data()
}

const MAX_LAUNCH_BYTES: u64 = 1 << 20;
// Half of what the agent waits for the whole program. What is left is done by the next call.
const WORKS_FOR: Duration = Duration::from_secs(60);
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);
const ASK_AGAIN: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_starts_while_a_launch_file_is_overwritten_reads_a_whole_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c-eth0.launch");
        // As if this process ended before the file was written: it is not there to be written.
        assert!(replace(&path, b"{\"new\": 1}").unwrap_err().contains("c-eth0.launch"));
        std::fs::write(&path, "{\"new\"  old}").unwrap();
        assert_eq!(read_launch(&path).unwrap(), b"{\"new\": 1}");
        replace(&path, b"{}").unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), read_launch(&path).unwrap()), (b"{}".to_vec(), b"{}".to_vec()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
