//! The ranges of cluster IPs, where the operator did not name them: the chain entry needs them for the key `capture`.

use axum::http::Method;
use ipnet::IpNet;
use kube::Client;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use super::{RETRY, is_wanted};
use crate::cluster::api::{self, ApiError};
use crate::config::Config;

/// Nobody says what the ranges are.
#[derive(Debug, thiserror::Error)]
#[error(
    "the cluster does not say from which ranges its Services get addresses: no ServiceCIDR ({cidrs}), and no \
     ClusterConfiguration of kubeadm ({kubeadm})"
)]
pub struct RangesUnknown {
    cidrs: String,
    kubeadm: String,
}

/// The part of kubeadm's ClusterConfiguration that counts.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClusterConfiguration {
    networking: Networking,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Networking {
    service_subnet: String,
}

/// The ranges, or why they are not known.
pub type Ranges = Result<Vec<IpNet>, String>;

/// Finds the ranges, if the chain entry captures and does not name them, and tries until it does. An empty list: the
/// entry needs nothing.
pub async fn follow(config: &Config, found: watch::Sender<Option<Ranges>>) {
    if !are_needed(&config.entry) {
        found.send_replace(Some(Ok(Vec::new())));
        return;
    }
    loop {
        let problem = match api::open(None).await {
            Ok(client) => match services(&client).await {
                Ok(ranges) => {
                    tracing::info!(?ranges, "found the ranges of Services");
                    found.send_replace(Some(Ok(ranges)));
                    return;
                }
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        };
        found.send_replace(Some(Err(problem)));
        tokio::time::sleep(RETRY * 5).await;
    }
}

/// The chain entry with the ranges that were found.
#[must_use]
pub fn complete(mut entry: Map<String, Value>, services: &[IpNet]) -> Map<String, Value> {
    if are_needed(&entry) && !services.is_empty() {
        let capture = entry.entry("capture").or_insert(Value::Null);
        if !capture.is_object() {
            *capture = json!({});
        }
        capture["services"] = json!(services);
    }
    entry
}

/// Whether the entry captures without naming the ranges of Services. Those of pods are its overlay.
fn are_needed(entry: &Map<String, Value>) -> bool {
    is_wanted(entry) && entry.get("capture").is_some_and(|capture| capture.get("services").is_none())
}

/// From the API for them (1.33), or from what kubeadm noted when it made the cluster.
async fn services(client: &Client) -> Result<Vec<IpNet>, RangesUnknown> {
    let cidrs = match api::ask(client, Method::GET, "/apis/networking.k8s.io/v1/servicecidrs", None).await {
        Ok(list) => match of_service_cidrs(&list) {
            ranges if ranges.is_empty() => "none exists".to_owned(),
            ranges => return Ok(ranges),
        },
        Err(error) => short(&error),
    };
    let path = "/api/v1/namespaces/kube-system/configmaps/kubeadm-config";
    let kubeadm = match api::ask(client, Method::GET, path, None).await {
        Ok(map) => match of_kubeadm(&map) {
            Some(ranges) => return Ok(ranges),
            None => "its networking.serviceSubnet is not understood".to_owned(),
        },
        Err(error) => short(&error),
    };
    Err(RangesUnknown { cidrs, kubeadm })
}

fn short(error: &ApiError) -> String {
    error.status().map_or_else(|| error.to_string(), |status| format!("the API server answers {status}"))
}

fn of_service_cidrs(list: &Value) -> Vec<IpNet> {
    let items = list["items"].as_array().into_iter().flatten();
    let cidrs = items.flat_map(|item| item["spec"]["cidrs"].as_array().into_iter().flatten());
    let mut ranges: Vec<IpNet> = cidrs.filter_map(|cidr| cidr.as_str()?.parse().ok()).collect();
    ranges.sort();
    ranges.dedup();
    ranges
}

fn of_kubeadm(map: &Value) -> Option<Vec<IpNet>> {
    let text = map["data"]["ClusterConfiguration"].as_str().filter(|text| text.len() <= MAX_CONFIGURATION)?;
    let configuration: ClusterConfiguration = serde_saphyr::from_str(text).ok()?;
    configuration.networking.service_subnet.split(',').map(|range| range.trim().parse().ok()).collect()
}

/// What the operator can do about it.
pub const ADVICE: &str =
    "name the ranges: capture.services in the chart's values, or entry.capture.services in agent.json";
const MAX_CONFIGURATION: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::fake_api_server::FakeApiServer;

    fn shown(ranges: &[IpNet]) -> String {
        ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    }

    #[tokio::test]
    async fn the_ranges_come_from_the_api_or_from_kubeadm_or_the_operator_is_asked() {
        let server = FakeApiServer::default();
        let client = server.clone().start().await;
        let unknown = services(&client).await.unwrap_err().to_string();
        assert!(unknown.contains("ServiceCIDR (the API server answers 404)"), "{unknown}");
        let configuration = "apiVersion: kubeadm.k8s.io/v1beta3\nkind: ClusterConfiguration\nnetworking:\n  \
                             dnsDomain: cluster.local\n  podSubnet: 10.244.0.0/16\n  serviceSubnet: 10.96.0.0/12, fd00:96::/108\n";
        let path = "/api/v1/namespaces/kube-system/configmaps/kubeadm-config";
        server.put(path, json!({"data": {"ClusterConfiguration": configuration}}));
        assert_eq!(shown(&services(&client).await.unwrap()), "10.96.0.0/12 fd00:96::/108");
        let cidrs = |cidrs: Value| json!({"items": [{"spec": {"cidrs": cidrs}}]});
        server.put("/apis/networking.k8s.io/v1/servicecidrs", cidrs(json!(["10.43.0.0/16", "10.43.0.0/16", "x"])));
        assert_eq!(shown(&services(&client).await.unwrap()), "10.43.0.0/16");
        // `.ci/kubernetes` holds it against the API of each release from 1.33 on.
        let list = serde_json::from_str(include_str!("../../tests/objects/servicecidrs.json")).unwrap();
        server.put("/apis/networking.k8s.io/v1/servicecidrs", list);
        assert_eq!(shown(&services(&client).await.unwrap()), "10.96.0.0/12 10.112.0.0/16 fd00:96::/108");
        for bad in ["", "networking: {serviceSubnet: 10.96.0.0}", "networking: {}", "a: [", &"x".repeat(300_000)] {
            assert_eq!(of_kubeadm(&json!({"data": {"ClusterConfiguration": bad}})), None);
        }
    }

    #[test]
    fn only_an_entry_that_captures_and_names_no_services_is_completed() {
        let found = ["10.96.0.0/12".parse().unwrap()];
        let completed = |capture: Value| {
            let entry: Map<String, Value> = [("capture".to_owned(), capture)].into_iter().collect();
            complete(entry, &found)["capture"].clone()
        };
        assert_eq!(completed(json!(true)), json!({"services": ["10.96.0.0/12"]}));
        assert_eq!(completed(json!({"clear": "deny"})), json!({"clear": "deny", "services": ["10.96.0.0/12"]}));
        for same in [json!(false), json!({"services": []}), json!({"services": ["10.43.0.0/16"]})] {
            assert_eq!(completed(same.clone()), same);
        }
        assert!(complete(Map::new(), &found).is_empty());
    }
}
