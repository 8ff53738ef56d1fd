//! What the attachments of a node share, of all networks: routes, networks and addresses that several may need, and the
//! folder of the cluster table.

use std::fs::{self, File};
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ipnet::IpNet;
use serde_json::Value;

use super::foreign;
use super::record::{self, Found, MAX_RECORD, Record};
use crate::request::Key;
use crate::settings::capturing::CLUSTER_FOLDER;

/// The other attachments of a node, each record as it was read once.
#[derive(Debug)]
pub struct Others {
    records: Vec<Record>,
    /// Of another release: whatever they name, for whatever purpose, may be something that their pods need.
    foreign: Vec<Value>,
}

impl Others {
    /// Reads the records of all networks except that of the attachment `key`. Those that cannot be read name nothing.
    #[must_use]
    pub fn than(state_dir: &Path, key: &Key) -> Self {
        let mut others = Self { records: Vec::new(), foreign: Vec::new() };
        for path in record::paths(state_dir) {
            let mut bytes = Vec::new();
            let read = File::open(&path).and_then(|file| file.take(MAX_RECORD).read_to_end(&mut bytes));
            match read.map(|_| Record::parse(&bytes)) {
                Ok(Found::Record(record)) if record.key() != *key => others.records.push(*record),
                Ok(Found::Foreign(_)) => others.foreign.extend(serde_json::from_slice::<Value>(&bytes)),
                _ => {}
            }
        }
        others
    }

    /// The destinations of the routes that their pods need.
    #[must_use]
    pub fn routes(&self) -> Vec<IpAddr> {
        let routes = self.records.iter().filter_map(|record| Some(record.host_route?.destination));
        routes.chain(foreign::named(&self.foreign)).collect()
    }

    /// The networks that they refuse.
    #[must_use]
    pub fn refused(&self) -> Vec<IpNet> {
        let refused = self.records.iter().flat_map(|record| record.refused.iter().copied());
        refused.chain(foreign::named(&self.foreign)).collect()
    }

    /// The addresses of those that are captured.
    #[must_use]
    pub fn captured(&self) -> Vec<IpAddr> {
        let captures = self.records.iter().filter_map(|record| record.capture.as_ref());
        let addresses = captures.flat_map(|capture| capture.guard.addresses().to_vec());
        addresses.chain(foreign::named(&self.foreign)).collect()
    }
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
    let needs_it = |path: &Path| match Record::load(path) {
        Ok(Found::Record(record)) => record.capture.is_some(),
        Ok(Found::Foreign(_)) => true,
        _ => false,
    };
    if record::paths(state_dir).any(|path| needs_it(&path)) {
        return Ok(());
    }
    match fs::remove_dir(state_dir.join(CLUSTER_FOLDER)) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_other_records_name_is_kept_for_their_pods_also_if_a_newer_program_wrote_them() {
        let state = tempfile::tempdir().unwrap();
        fs::create_dir(state.path().join("net")).unwrap();
        let place = |name: &str, text: &str| fs::write(state.path().join("net").join(name), text).unwrap();
        let newer = r#"{"version":2,"refused":[{"network":"10.42.0.0/16"}],"guards":{"pod":["10.0.0.1"]},"n":7}"#;
        place("c-eth0.json", newer);
        place("d-eth0.json", "{");
        let of_ours = |id: &str| {
            format!(
                r#"{{"version":1,"state":"running","network":"net","container_id":"{id}","ifname":"eth0",
                "netns":"/run/netns/x","netns_id":[4,9],"pod":{{"namespace":"a","name":"b","uid":"c"}},
                "pod_address":"10.0.0.7","device":"nebula0","process":null,"status_socket":"/x",
                "host_route":{{"destination":"10.43.0.1","next_hop":"10.0.0.1","interface":3}},"refused":["10.43.0.0/16"]}}"#
            )
        };
        place("e-eth0.json", &of_ours("e"));
        let key = |id: &str| Key { network: "net".into(), container_id: id.into(), ifname: "eth0".into() };
        let networks = |texts: &[&str]| -> Vec<IpNet> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let addresses = |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let others = Others::than(state.path(), &key("other"));
        assert_eq!(others.refused(), networks(&["10.43.0.0/16", "10.42.0.0/16"]));
        assert_eq!(others.routes(), addresses(&["10.43.0.1", "10.0.0.1"]));
        assert_eq!(others.captured(), addresses(&["10.0.0.1"]));
        let others = Others::than(state.path(), &key("e"));
        assert_eq!((others.refused(), others.routes()), (networks(&["10.42.0.0/16"]), addresses(&["10.0.0.1"])));
    }
}
