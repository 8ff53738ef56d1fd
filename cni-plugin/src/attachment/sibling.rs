//! Other attachments of the same container: runtimes such as Multus call the chain once for each interface of a pod.

use std::fs;
use std::path::Path;

use nebula_cni_contract::netns::NetnsId;

use crate::attachment::record::{self, Found, Record};
use crate::host::Host;
use crate::reply::{Error, code};
use crate::request::{Key, is_name};

/// Whether another interface of the container has a tunnel in the same network, which serves the whole pod.
///
/// # Errors
/// Code 7 if another network has given the pod a device called `device`.
pub fn has_tunnel(
    state_dir: &Path,
    key: &Key,
    device: &str,
    netns: impl FnOnce() -> Result<NetnsId, Error>,
    host: &Host<'_>,
) -> Result<bool, Error> {
    let mut siblings = siblings(state_dir, key);
    if siblings.is_empty() {
        return Ok(false);
    }
    let netns = netns()?;
    // A record of a namespace that is gone says nothing about this one, which may have got its number.
    let is_there = |record: &Record| {
        record.target.netns_id == netns
            && host.namespaces.open(&record.target.netns).is_ok_and(|found| found.id == netns)
    };
    siblings.retain(is_there);
    if siblings.iter().any(|record| record.target.network == key.network) {
        return Ok(true);
    }
    let rival = siblings.iter().find(|record| record.target.device == device && record.target.ifname != key.ifname);
    let Some(Record { target, .. }) = rival else { return Ok(false) };
    let msg = format!(
        "network {:?} has made the pod's device {device:?} already, for its interface {}",
        target.network, target.ifname
    );
    Err(Error::new(code::CONFIG, msg).details(
        "a pod in two overlay networks needs two devices: choose another name with the key \"device\" of one network, or \
         leave this plugin out of it",
    ))
}

/// The records of the container's other attachments, in all networks.
fn siblings(state_dir: &Path, key: &Key) -> Vec<Record> {
    let prefix = format!("{}-", key.container_id);
    let entries = fs::read_dir(state_dir).into_iter().flatten().flatten();
    let networks = entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| is_name(name));
    let paths = networks.flat_map(|network| record::list(state_dir, &network).unwrap_or_default());
    // Read the few that may be the container's, out of all records of the node.
    let named = paths
        .filter(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes())));
    let records = named.filter_map(|path| match Record::load(&path) {
        Ok(Found::Record(record)) => Some(*record),
        _ => None,
    });
    records.filter(|record| record.target.container_id == key.container_id && record.key() != *key).collect()
}
