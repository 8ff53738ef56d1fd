//! What runtimes remember of the attachments that they made: libcni's cache. CRI-O removes a pod with the configuration that
//! it cached when it made the pod.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use nebula_cni_plugin::clock::{Clock, SystemClock};

use crate::config::PLUGIN;
use crate::durable;
use crate::host_root::HostRoot;

/// The files of attachments that name our plugin. Waits some seconds for those whose removal is under way: our plugin is the
/// first that a runtime asks, and the cache is cleared last.
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
    let entries =
        CACHES.iter().flat_map(|dir| fs::read_dir(host.resolve(Path::new(dir))).into_iter().flatten().flatten());
    let names_us = |path: &PathBuf| durable::read_bounded(path, MAX_CACHED).is_ok_and(|bytes| mentions_plugin(&bytes));
    entries.map(|entry| entry.path()).filter(names_us).collect()
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
        }
    }
}
