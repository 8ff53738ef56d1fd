//! Facts from the Kubernetes API server: who owns a token, what a pod is, and which addresses a node gives to its pods.
//!
//! We define small types with only the fields that are used, so that servers of any age are understood. Only the
//! holders of addresses are cached; every other answer is used for one request.

mod claims;
#[cfg(feature = "kubernetes")]
mod follow;
#[cfg(feature = "kubernetes")]
mod kube;
mod occupancy;
#[cfg(feature = "kubernetes")]
mod request;

use std::{
    collections::{BTreeMap, HashSet},
    net::IpAddr,
};

use ipnet::IpNet;
use serde::Deserialize;

pub(crate) use self::claims::Claims;
#[cfg(feature = "kubernetes")]
pub(crate) use self::kube::ApiServer;
#[cfg(test)]
pub(crate) use self::occupancy::Occupancy;
pub(crate) use self::occupancy::{Asker, Taken};

/// An API server. Methods block for a bounded time and read answers of bounded size.
pub(crate) trait Cluster: Send + Sync {
    /// Asks who owns `token`, which must be for this audience.
    fn review(&self, token: &str, audience: &str) -> Result<Review, ClusterError>;
    /// Whether a user may do that, as the API server decides it.
    fn permits(&self, user: &User, action: &Action<'_>) -> Result<bool, ClusterError>;
    /// The pod with this name.
    fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, ClusterError>;
    /// The ranges from which a node assigns addresses to its pods; empty if unknown.
    fn node_ranges(&self, name: &str) -> Result<Vec<IpNet>, ClusterError>;
    /// Another node, older than `node`, whose ranges share addresses with `range`.
    fn other_owner(&self, range: IpNet, node: &str) -> Result<Option<String>, ClusterError>;
    /// The UID of a node; `None` if there is no such node.
    fn node_uid(&self, name: &str) -> Result<Option<String>, ClusterError>;
    /// Begins to learn who has which address, for [`Cluster::taken`].
    fn follow(&self) {}
    /// Whose address that is, if another one's than the asker's.
    fn taken(&self, address: IpAddr, asker: &Asker<'_>) -> Result<Option<Taken>, ClusterError>;
    /// All existing pods; static pods are listed under both of their UIDs.
    fn all_pods(&self) -> Result<HashSet<PodId>, ClusterError>;
    /// The data of a ConfigMap; `None` if there is no such object.
    fn config_map(&self, namespace: &str, name: &str) -> Result<Option<ConfigData>, ClusterError>;
    /// Sets these keys of a ConfigMap, which is made if it is missing; other keys stay.
    fn apply_config_map(&self, namespace: &str, name: &str, data: &ConfigData) -> Result<(), ClusterError>;
}

/// Texts of a ConfigMap by key.
pub(crate) type ConfigData = BTreeMap<String, String>;

/// Namespace, name and UID of a pod.
pub(crate) type PodId = (String, String, String);

/// Why the API server's facts are unknown. This is never a reason to allow a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClusterError {
    #[error("the API server cannot be asked: {0}")]
    Unreachable(String),
    #[error("the API server did not answer in time")]
    Timeout,
    #[error("the API server answered {status} to {what}: {message}")]
    Status { status: u16, what: &'static str, message: String },
    #[error("the API server's answer to {0} is longer than any valid one")]
    TooLong(&'static str),
    #[error("the API server's answer to {what} is not understood: {error}")]
    Malformed { what: &'static str, error: serde_json::Error },
}

impl ClusterError {
    /// For callers: what failed, without details that only the service's operators should see.
    pub(crate) fn summary(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "the API server cannot be reached",
            Self::Timeout => "the API server does not answer",
            Self::Status { status: 401 | 403, .. } => "the CA is not allowed to ask the API server",
            Self::Status { .. } => "the API server answers with an error",
            Self::TooLong(_) | Self::Malformed { .. } => "the API server's answer is not understood",
        }
    }
}

/// The outcome of a TokenReview.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Review {
    pub(crate) authenticated: bool,
    pub(crate) user: User,
    /// The requested audiences that the token is for; empty if the server does not support audiences.
    pub(crate) audiences: Vec<String>,
    pub(crate) error: String,
}

/// The owner of a token.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct User {
    pub(crate) username: String,
    uid: String,
    /// Null in JSON if there are none.
    groups: Option<Vec<String>>,
    /// Values by name; null in JSON if there are none.
    extra: Option<BTreeMap<String, Vec<String>>>,
}

/// What a user wants to do with a resource.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Action<'a> {
    pub(crate) verb: &'a str,
    pub(crate) group: &'a str,
    pub(crate) resource: &'a str,
    /// `None`: in the whole cluster.
    pub(crate) namespace: Option<&'a str>,
}

impl User {
    /// Namespace and name, if the user is a service account.
    pub(crate) fn service_account(&self) -> Option<(&str, &str)> {
        self.username.strip_prefix("system:serviceaccount:")?.split_once(':')
    }

    /// The pod that the token is bound to: name and UID.
    pub(crate) fn bound_pod(&self) -> Option<(&str, &str)> {
        Some((self.extra("pod-name")?, self.extra("pod-uid")?))
    }

    /// The node of the bound pod; servers before 1.30 do not report it.
    pub(crate) fn node(&self) -> Option<&str> {
        self.extra("node-name")
    }

    /// The UID of that node; servers before 1.30 do not report it.
    pub(crate) fn node_uid(&self) -> Option<&str> {
        self.extra("node-uid")
    }

    /// The user name, for messages.
    pub(crate) fn shown(&self) -> String {
        one_line(&self.username)
    }

    fn extra(&self, name: &str) -> Option<&str> {
        let values = self.extra.as_ref()?.get(&format!("authentication.kubernetes.io/{name}"))?;
        // With several values it would be ambiguous which one is meant.
        if let [value] = &values[..] { Some(value) } else { None }
    }
}

/// The fields of a pod that are used.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pod {
    pub(crate) metadata: Metadata,
    pub(crate) spec: PodSpec,
    pub(crate) status: PodStatus,
}

/// An object's identity and labels.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Metadata {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    /// Set from the deletion request until the object is gone.
    deletion_timestamp: Option<String>,
    pub(crate) labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    owner_references: Vec<Owner>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Owner {
    api_version: String,
    kind: String,
    name: String,
    controller: bool,
}

/// Where a pod runs, and under which service account.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodSpec {
    pub(crate) node_name: String,
    pub(crate) service_account_name: String,
    pub(crate) host_network: bool,
}

/// How far a pod has got.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodStatus {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
    #[serde(rename = "hostIP")]
    host_ip: String,
    conditions: Vec<Condition>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Condition {
    #[serde(rename = "type")]
    name: String,
    status: String,
}

/// What is known of a pod's sandbox, which has its network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sandbox {
    /// It runs, with the addresses that the API server shows.
    Ready,
    /// It is gone or not ready yet: the next one gets another address, and the API server shows the last one until
    /// then.
    Gone,
    /// The node does not report it.
    #[default]
    NotTold,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct PodIp {
    ip: String,
}

impl Pod {
    /// Whether the pod has this UID: its own or, for the mirror of a static pod, the hash by which the runtime knows
    /// it.
    pub(crate) fn is(&self, uid: &str) -> bool {
        self.metadata.uid == uid || self.metadata.static_uid(Some(&self.spec.node_name)) == Some(uid)
    }

    /// Whether all its containers have terminated for good.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }

    /// Whether it was deleted and is being terminated by its node.
    pub(crate) fn is_ending(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// What its node reports of its sandbox. Kubelets before 1.29 report nothing by default.
    pub(crate) fn sandbox(&self) -> Sandbox {
        let is_sandbox = |name: &str| ["PodReadyToStartContainers", "PodHasNetwork"].contains(&name);
        let told = self.status.conditions.iter().filter(|condition| is_sandbox(&condition.name));
        let gone: Vec<bool> = told.map(|condition| condition.status == "False").collect();
        match gone.contains(&true) {
            true => Sandbox::Gone,
            false if gone.is_empty() => Sandbox::NotTold,
            false => Sandbox::Ready,
        }
    }

    /// The addresses that its node has reported; empty before the first report.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let all = self.status.pod_ips.iter().map(|entry| &entry.ip).chain([&self.status.pod_ip]);
        all.filter_map(|ip| ip.parse::<IpAddr>().ok()).map(|ip| ip.to_canonical()).collect()
    }

    /// The addresses of its node, for a pod that uses the node's network: each once, none that other machines cannot
    /// reach. Empty before the node's first report.
    pub(crate) fn node_addresses(&self) -> Vec<IpAddr> {
        let mut addresses = Vec::new();
        let host = self.status.host_ip.parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
        for address in self.addresses().into_iter().chain(host) {
            let is_elsewhere = !address.is_loopback() && !address.is_unspecified() && !address.is_multicast();
            if self.spec.host_network && is_elsewhere && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses
    }
}

impl Metadata {
    /// The ordinal of this pod in the StatefulSet that controls it.
    pub(crate) fn ordinal(&self) -> Option<u32> {
        let is_set =
            |owner: &&Owner| owner.controller && owner.kind == "StatefulSet" && owner.api_version.starts_with("apps/");
        let owner = self.owner_references.iter().find(is_set)?;
        let digits = self.name.strip_prefix(&owner.name)?.strip_prefix('-')?;
        // Only the way in which the controller writes it.
        digits.parse::<u32>().ok().filter(|ordinal| ordinal.to_string() == digits)
    }

    /// The UID of the static pod that this object mirrors. A mirror pod is owned by its node: the annotation alone,
    /// which anybody who may create pods can write, is not enough.
    fn static_uid(&self, node: Option<&str>) -> Option<&str> {
        let is_node = |owner: &Owner| owner.kind == "Node" && node.is_none_or(|node| owner.name == node);
        let hash = self.annotations.get("kubernetes.io/config.mirror")?;
        (!hash.is_empty() && self.owner_references.iter().any(is_node)).then_some(hash)
    }
}

/// Limits foreign text to one line of bounded length, for logs and refusals.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(json: &str) -> Pod {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_mirror_pod_goes_by_the_hash_of_its_static_pod_too() {
        let mirror = r#"{"metadata": {"uid": "api", "annotations": {"kubernetes.io/config.mirror": "hash"},
            "ownerReferences": [{"kind": "Node", "name": "n1"}]}, "spec": {"nodeName": "n1"}}"#;
        assert!(pod(mirror).is("hash") && pod(mirror).is("api"));
        assert!(!pod(mirror).is("other"));
        assert!(!pod(&mirror.replace("\"kind\": \"Node\"", "\"kind\": \"ReplicaSet\"")).is("hash"));
        assert!(!pod(&mirror.replace("\"nodeName\": \"n1\"", "\"nodeName\": \"n2\"")).is("hash"));
        assert!(!pod(&mirror.replace("hash", "")).is(""));
    }

    #[test]
    fn the_ordinal_is_that_of_the_stateful_set_that_controls_the_pod() {
        let pod = |name: &str, owner: &str| {
            let json = format!(r#"{{"metadata": {{"name": "{name}", "ownerReferences": [{owner}]}}}}"#);
            pod(&json).metadata.ordinal()
        };
        let set = r#"{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "controller": true}"#;
        assert_eq!(pod("db-0", set), Some(0));
        assert_eq!(pod("db-12", set), Some(12));
        for name in ["db", "db-", "db-01", "db-+1", "db-1x", "other-1", "db-4294967296", "db-0-1"] {
            assert_eq!(pod(name, set), None, "{name}");
        }
        for (from, to) in [("true", "false"), ("StatefulSet", "ReplicaSet"), ("apps/v1", "v1"), ("apps/", "x.apps/")] {
            assert_eq!(pod("db-0", &set.replace(from, to)), None, "{to}");
        }
        assert_eq!(pod("db-0", ""), None);
    }

    #[test]
    fn only_a_pod_in_its_nodes_network_has_the_addresses_of_the_node() {
        let json = r#"{"spec": {"hostNetwork": true}, "status": {"hostIP": "192.0.2.7", "podIP": "192.0.2.7",
            "podIPs": [{"ip": "192.0.2.7"}, {"ip": "2001:db8::7"}, {"ip": "127.0.0.1"}, {"ip": "x"}]}}"#;
        let shown = |json: &str| pod(json).node_addresses().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown(json), ["192.0.2.7", "2001:db8::7"]);
        assert!(shown(&json.replace("true", "false")).is_empty());
        assert!(shown(r#"{"spec": {"hostNetwork": true}}"#).is_empty());
    }

    #[test]
    fn an_empty_answer_is_no_pod_of_anybody() {
        let empty = pod("{}");
        assert!(!empty.is("u-1"));
        assert!(empty.addresses().is_empty());
        assert!(Review::default().user.service_account().is_none());
    }

    #[test]
    fn an_extra_with_two_values_says_nothing() {
        let user: User = serde_json::from_str(
            r#"{"username": "system:serviceaccount:a:b", "extra": {"authentication.kubernetes.io/node-name": ["x", "y"]}}"#,
        )
        .unwrap();
        assert_eq!((user.node(), user.service_account()), (None, Some(("a", "b"))));
    }
}
