//! What runtimes remember of the attachments that they made: libcni's cache. CRI-O removes a pod with the
//! configuration that it cached when it made the pod. It also tells which addresses the primary network gives to
//! pods.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_plugin::request::prev_result::PrevResult;

use crate::config::PLUGIN;
use crate::durable;
use crate::host_root::HostRoot;
use crate::reconcile::entry::IFNAME;

/// The addresses of pods that run on this node, as far as the caches tell; of at most some hundred pods.
#[must_use]
pub(crate) fn pod_addresses(host: &HostRoot) -> Vec<IpAddr> {
    let cached = files(host).take(MAX_PODS).filter_map(|path| durable::read_bounded(&path, MAX_CACHED).ok());
    let mut addresses: Vec<IpAddr> = cached.flat_map(|bytes| addresses_in(&bytes, host)).collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

/// Those of a cached attachment, unless the pod's network namespace is gone: the cache may outlive it.
fn addresses_in(cached: &[u8], host: &HostRoot) -> Vec<IpAddr> {
    let Ok(cached) = serde_json::from_slice::<serde_json::Value>(cached) else { return Vec::new() };
    let interfaces = cached["result"]["interfaces"].as_array().map(Vec::as_slice).unwrap_or_default();
    let sandboxes = interfaces.iter().filter_map(|interface| interface["sandbox"].as_str());
    let runs = sandboxes.filter(|path| path.starts_with('/')).any(|path| host.resolve(Path::new(path)).exists());
    let result = serde_json::value::to_raw_value(&cached["result"]).ok().and_then(|raw| PrevResult::parse(&raw).ok());
    result.filter(|_| runs && cached["ifName"] == IFNAME).map(|result| result.addresses(IFNAME)).unwrap_or_default()
}

/// The files of attachments that name our plugin. Waits some seconds for those whose removal is under way: our plugin
/// is the first that a runtime asks, and the cache is cleared last.
#[must_use]
pub(crate) fn attachments_for_good(host: &HostRoot) -> Vec<PathBuf> {
    for _ in 0..SETTLES {
        if attachments(host).is_empty() {
            return Vec::new();
        }
        SystemClock.sleep(LOOK_EVERY);
    }
    attachments(host)
}

fn attachments(host: &HostRoot) -> Vec<PathBuf> {
    let names_us = |path: &PathBuf| durable::read_bounded(path, MAX_CACHED).is_ok_and(|bytes| mentions_plugin(&bytes));
    files(host).filter(names_us).collect()
}

fn files(host: &HostRoot) -> impl Iterator<Item = PathBuf> {
    let folders = CACHES.iter().map(|dir| fs::read_dir(host.resolve(Path::new(dir))));
    folders.flatten().flat_map(Iterator::flatten).map(|entry| entry.path())
}

fn mentions_plugin(cached: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(cached) else { return false };
    let Some(config) = value["config"].as_str() else { return false };
    // Go encodes bytes in JSON like this.
    let bytes = BASE64_STANDARD.decode(config).unwrap_or_default();
    bytes.windows(PLUGIN.len()).any(|window| window == PLUGIN.as_bytes())
}

const CACHES: [&str; 2] = ["/var/lib/cni/results", "/var/lib/cni/cache/results"];
const MAX_CACHED: u64 = 1 << 20;
/// More than a node runs.
const MAX_PODS: usize = 512;
/// How many times a cache that names our plugin is looked at again.
const SETTLES: usize = 3;
const LOOK_EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_cache_names_nobody() {
        for hostile in ["", "7", "{\"config\": 7}", "{\"config\": \"%\"}", "[]"] {
            assert!(!mentions_plugin(hostile.as_bytes()));
            assert!(addresses_in(hostile.as_bytes(), &HostRoot::default()).is_empty());
        }
    }

    #[test]
    fn the_addresses_are_those_of_pods_whose_network_namespace_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let host = HostRoot::new(Some(dir.path().canonicalize().unwrap()));
        let caches = dir.path().join("var/lib/cni/results");
        fs::create_dir_all(&caches).unwrap();
        fs::create_dir_all(dir.path().join("run/netns")).unwrap();
        fs::write(dir.path().join("run/netns/one"), "").unwrap();
        for (name, interface, last) in [("one", "eth0", 1), ("two", "eth0", 2), ("one", "net1", 3)] {
            let cached = serde_json::json!({"ifName": interface, "result": {"cniVersion": "1.0.0",
                "interfaces": [{"name": "veth7"}, {"name": interface, "sandbox": format!("/run/netns/{name}")}],
                "ips": [{"interface": 1, "address": format!("10.244.1.{last}/24")},
                    {"interface": 1, "address": format!("fd00::{last}/64")}]}});
            fs::write(caches.join(format!("net-{name}-{interface}")), cached.to_string()).unwrap();
        }
        let found: Vec<String> = pod_addresses(&host).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.244.1.1", "fd00::1"]);
    }
}
