//! The CNI result that the runtime keeps for a running pod: from libcni's cache, which has it as the plugins gave it,
//! or from containerd's status of the sandbox, which has a summary.

use std::path::Path;

use nebula_cni_plugin::request::is_name;
use serde_json::{Map, Value, json};

use super::entry::IFNAME;
use crate::durable;
use crate::host_root::HostRoot;

/// Finds the result of a sandbox. `summary` is what containerd's status of it tells.
#[must_use]
pub fn find(host: &HostRoot, network: &str, container_id: &str, summary: &Value) -> Option<Value> {
    cached(host, network, container_id).or_else(|| of_containerd(summary))
}

fn cached(host: &HostRoot, network: &str, container_id: &str) -> Option<Value> {
    if !is_name(network) || !is_name(container_id) {
        return None;
    }
    let path = host.resolve(&Path::new(CACHE).join(format!("{network}-{container_id}-{IFNAME}")));
    let cached: Value = serde_json::from_slice(&durable::read_bounded(&path, MAX_BYTES).ok()?).ok()?;
    // Container ids may contain '-', so another attachment could have the same file name.
    let is_ours = cached["containerId"] == container_id && cached["networkName"] == network;
    (is_ours && cached["result"].is_object()).then(|| cached["result"].clone())
}

/// Makes a CNI result of containerd's summary: interfaces by name, each with addresses without prefix lengths.
fn of_containerd(summary: &Value) -> Option<Value> {
    let found = summary["Interfaces"].as_object()?;
    let (mut interfaces, mut ips) = (Vec::new(), Vec::new());
    for (name, interface) in found.iter().filter(|(name, _)| name.as_str() != "lo") {
        let mut made = Map::from_iter([("name".to_owned(), name.clone().into())]);
        for (key, theirs) in [("mac", "Mac"), ("sandbox", "Sandbox")] {
            if let Some(text) = interface[theirs].as_str().filter(|text| !text.is_empty()) {
                made.insert(key.to_owned(), text.into());
            }
        }
        let configs = interface["IPConfigs"].as_array().map(Vec::as_slice).unwrap_or_default();
        for config in configs {
            let Some(address) = config["IP"].as_str() else { continue };
            let prefix = if address.contains(':') { 128 } else { 32 };
            let mut ip = json!({"address": format!("{address}/{prefix}"), "interface": interfaces.len()});
            if let Some(gateway) = config["Gateway"].as_str().filter(|text| !text.is_empty()) {
                ip["gateway"] = gateway.into();
            }
            ips.push(ip);
        }
        interfaces.push(Value::Object(made));
    }
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut result =
        json!({"cniVersion": "1.0.0", "interfaces": interfaces, "ips": ips, "routes": list(&summary["Routes"])});
    if let Some(dns) = list(&summary["DNS"]).into_iter().find(|dns| dns["nameservers"].is_array()) {
        result["dns"] = dns;
    }
    (!ips.is_empty()).then_some(result)
}

const CACHE: &str = "/var/lib/cni/results";
const MAX_BYTES: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use nebula_cni_plugin::request::prev_result::PrevResult;

    use super::*;

    fn summary() -> Value {
        json!({"Interfaces": {
            "cni0": {"IPConfigs": null, "Mac": "02:00:00:00:00:01", "Sandbox": ""},
            "eth0": {"IPConfigs": [{"IP": "10.244.1.2", "Gateway": "10.244.1.1"}, {"IP": "fd00::2", "Gateway": ""}],
                "Mac": "02:00:00:00:00:02", "Sandbox": "/var/run/netns/cni-1"},
            "lo": {"IPConfigs": [{"IP": "127.0.0.1", "Gateway": ""}], "Mac": "", "Sandbox": "/var/run/netns/cni-1"}},
            "DNS": [{}, {"nameservers": ["10.0.0.53"]}], "Routes": [{"dst": "0.0.0.0/0", "gw": "10.244.1.1"}]})
    }

    #[test]
    fn the_summary_of_containerd_is_a_result_that_the_plugin_reads() {
        let found = find(&HostRoot::default(), "no-such-net", "no-such-container", &summary()).unwrap();
        let result = PrevResult::parse(&serde_json::value::to_raw_value(&found).unwrap()).unwrap();
        assert_eq!(result.addresses("eth0"), ["10.244.1.2", "fd00::2"].map(|a| a.parse::<std::net::IpAddr>().unwrap()));
        assert!(result.has_container_interface("eth0") && !result.has_container_interface("cni0"));
        assert!(result.gateways().contains(&"10.244.1.1".parse().unwrap()), "{found}");
        assert_eq!(result.name_servers(), ["10.0.0.53".parse::<std::net::IpAddr>().unwrap()]);
    }

    #[test]
    fn the_cache_comes_first_but_only_with_the_entry_of_this_container() {
        let dir = tempfile::tempdir().unwrap();
        let host = HostRoot::new(Some(dir.path().canonicalize().unwrap()));
        std::fs::create_dir_all(dir.path().join("var/lib/cni/results")).unwrap();
        let write = |container: &str| {
            let entry = json!({"containerId": container, "networkName": "net", "result": {"cached": true}});
            std::fs::write(dir.path().join("var/lib/cni/results/net-c-eth0"), entry.to_string()).unwrap();
        };
        write("c");
        assert_eq!(find(&host, "net", "c", &summary()).unwrap()["cached"], true);
        write("other");
        assert_eq!(find(&host, "net", "c", &summary()).unwrap()["cached"], Value::Null);
        assert_eq!(find(&host, "net", "../c", &Value::Null), None);
    }

    #[test]
    fn hostile_summaries_are_no_result_and_no_panic() {
        for summary in [
            json!(null),
            json!(7),
            json!({"Interfaces": {"eth0": 7}}),
            json!({"Interfaces": {"eth0": {"IPConfigs": [{"IP": 7}]}}}),
        ] {
            assert_eq!(find(&HostRoot::default(), "n", "c", &summary), None, "{summary}");
        }
    }
}
