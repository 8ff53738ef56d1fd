//! The flows from which policies are suggested, as a document: that of one node can be given to the next. Whoever finds
//! them out in another way than by asking instances makes one of these.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Labels of a pod that do not change when its controller makes it again.
pub type StableLabels = BTreeMap<String, String>;

/// What was seen of the pods of one namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Seen {
    /// The namespace.
    pub namespace: String,
    /// Number of pods whose instances were asked.
    pub pods: usize,
    /// Flows by kind.
    pub flows: Vec<Flow>,
    /// Flows that the instances have forgotten.
    pub lost: u64,
    /// Pods whose instances did not say, and why.
    pub silent: Vec<String>,
    /// All sets of labels of pods in the namespaces that are named here: what tells pods apart.
    pub known: BTreeMap<String, BTreeSet<StableLabels>>,
    /// The pods of the cluster's DNS, or its address.
    pub dns: Option<Peer>,
}

/// Flows of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Flow {
    /// Labels of the pod.
    pub labels: StableLabels,
    /// Whether the pod began them.
    pub is_egress: bool,
    /// The other end.
    pub peer: Peer,
    /// Number of the protocol.
    pub protocol: u8,
    /// Destination port.
    pub port: u16,
    /// How many there were.
    pub flows: u64,
    /// When the last one began, in seconds since 1970.
    pub last: u64,
}

/// The other end of a flow.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Peer {
    /// A pod.
    Pod {
        /// Its namespace.
        namespace: String,
        /// Its labels.
        labels: StableLabels,
    },
    /// No pod.
    Address(IpAddr),
    /// A pod that is gone; nobody knows its labels any more.
    Gone(IpAddr),
}

impl Seen {
    /// Adds what was seen on another node.
    pub fn add(&mut self, other: Self) {
        self.pods += other.pods;
        self.lost = self.lost.saturating_add(other.lost);
        self.flows.extend(other.flows);
        self.silent.extend(other.silent);
        for (namespace, sets) in other.known {
            self.known.entry(namespace).or_default().extend(sets);
        }
        self.dns = self.dns.take().or(other.dns);
    }
}

/// Those labels that do not change when a controller makes the pod again.
#[must_use]
pub fn stable(labels: &BTreeMap<String, String>) -> StableLabels {
    let stable = labels.iter().filter(|(key, _)| !OF_CONTROLLERS.contains(&key.as_str()));
    stable.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Labels by which controllers tell the pods or revisions of one workload apart.
const OF_CONTROLLERS: [&str; 10] = [
    "pod-template-hash",
    "controller-revision-hash",
    "pod-template-generation",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/job-completion-index",
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-name",
    "controller-uid",
    "job-name",
];
