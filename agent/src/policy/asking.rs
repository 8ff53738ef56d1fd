//! Which pods' instances judge by programs. A pod keeps the launch contract that it was started with: one that is not
//! captured, or was started before policies were enabled, meets none of them in its tunnel.

use std::collections::HashSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use nebula_cni_plugin::attachment::record::{self, Found, Record, State};
use serde::Deserialize;

use crate::durable;

/// What counts of a launch contract.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Launch {
    capture: Captured,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Captured {
    policy: bool,
    sources: Vec<IpAddr>,
}

/// The addresses of those pods, by the launch contracts in the state directory; with `in_clear` only of those for which
/// rules on the node enforce policies on packets in clear, too. And of pods that are just being attached: they are
/// closed until that is done. Blocks.
pub(crate) fn addresses(state_dir: &Path, in_clear: bool) -> HashSet<IpAddr> {
    let networks = fs::read_dir(state_dir).into_iter().flatten().flatten();
    let networks = networks.filter_map(|network| network.file_name().into_string().ok());
    // The folders of the agent and of the cluster table have no record.
    let records = networks.flat_map(|network| record::list(state_dir, &network).unwrap_or_default());
    records.flat_map(|record| sources(&record, in_clear).unwrap_or_else(|| being_attached(&record))).collect()
}

/// Whether the instance of the pod with this record asks no policy, or with `in_clear` nothing enforces any on packets
/// in clear. A record that cannot be read says nothing. Blocks.
pub(crate) fn is_unasked(record: &Path, in_clear: bool) -> bool {
    record.is_file() && sources(record, in_clear).is_none()
}

fn sources(record: &Path, in_clear: bool) -> Option<Vec<IpAddr>> {
    // It lies beside its record.
    let bytes = durable::read_bounded(&record.with_extension("launch"), MAX_LAUNCH).ok()?;
    let Launch { capture } = serde_json::from_slice(&bytes).ok()?;
    (capture.policy && (!in_clear || enforces_in_clear(record))).then_some(capture.sources)
}

fn being_attached(record: &Path) -> Vec<IpAddr> {
    match Record::load(record) {
        Ok(Found::Record(record)) if record.state == State::Intent => vec![record.target.pod_address],
        _ => Vec::new(),
    }
}

fn enforces_in_clear(record: &Path) -> bool {
    match Record::load(record) {
        Ok(Found::Record(record)) => record.capture.is_some_and(|capture| capture.guard.judges_by_policy()),
        _ => false,
    }
}

const MAX_LAUNCH: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use nebula_cni_plugin::attachment::files::Files;
    use nebula_cni_plugin::request::Key;
    use serde_json::json;

    use super::*;

    #[test]
    fn captured_pods_whose_contract_says_so_judge_by_programs_and_those_being_attached_are_closed() {
        let dir = tempfile::tempdir().unwrap();
        let files = |container: &str| {
            let (network, ifname) = ("net".to_owned(), "eth0".to_owned());
            Files::new(dir.path(), &Key { network, container_id: container.to_owned(), ifname })
        };
        let with = |container: &str, last: u8, state: &str, contract: &str| {
            let record = json!({"version": 1, "state": state, "network": "net", "container_id": container, "ifname": "eth0",
                "netns": "/run/netns/x", "netns_id": [4, 9], "pod": {"namespace": "a", "name": "b", "uid": "c"},
                "pod_address": format!("10.0.0.{last}"), "device": "nebula0", "supervisor": "direct", "instance": "/i",
                "process": null, "status_socket": "/x"});
            fs::create_dir_all(files(container).dir()).unwrap();
            fs::write(files(container).record(), record.to_string()).unwrap();
            fs::write(files(container).launch(), contract).unwrap();
        };
        let captured = |policy: bool, last: u8| {
            json!({"version": 1, "capture": {"policy": policy, "sources": [format!("10.0.0.{last}"), "fd00::1"]}})
                .to_string()
        };
        with("judges", 1, "running", &captured(true, 1));
        with("does-not", 2, "running", &captured(false, 2));
        with("not-captured", 3, "running", "{\"version\": 1}");
        with("damaged", 4, "running", "{");
        with("just-being-attached", 5, "intent", "");
        let named = |in_clear| {
            let mut all: Vec<String> = addresses(dir.path(), in_clear).iter().map(ToString::to_string).collect();
            all.sort();
            all
        };
        assert_eq!(named(false), ["10.0.0.1", "10.0.0.5", "fd00::1"]);
        assert_eq!(named(true), ["10.0.0.5"], "no record says so of the first one");
        assert!(addresses(&dir.path().join("none"), false).is_empty());
        let record = |container: &str| files(container).record();
        assert!(is_unasked(&record("does-not"), false) && is_unasked(&record("not-captured"), false));
        assert!(!is_unasked(&record("judges"), false) && is_unasked(&record("judges"), true));
        assert!(!is_unasked(&record("gone"), true));
    }
}
