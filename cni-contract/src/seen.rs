//! What the pods of a namespace were seen to do, from which network policies are suggested: that of one node can be
//! added to the next. Whoever finds it out in another way than by asking instances makes one of these.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

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
    /// What is missing, and why: pods whose instances did not say, nodes whose agents did not.
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
    /// A pod of this namespace, whose labels the one who asks may not see.
    Namespace(String),
}

/// A text that is no such document, or one of another namespace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}: it is not what \"policy suggest --json\" prints for this namespace: {1}")]
pub struct BadSeen(pub String, pub String);

impl Seen {
    /// Reads what was printed on another node: a document with this one under the key `seen`. `name` is where it comes
    /// from.
    ///
    /// # Errors
    /// Refuses what is not such a document, and one of another namespace.
    pub fn read(text: &str, name: &str, namespace: &str) -> Result<Self, BadSeen> {
        let wrong = |why: String| BadSeen(name.to_owned(), why);
        let mut document: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let seen: Self = serde_json::from_value(document["seen"].take()).map_err(|error| wrong(error.to_string()))?;
        if seen.namespace != namespace {
            return Err(wrong(format!("it is of the namespace {:?}", seen.namespace)));
        }
        Ok(seen)
    }

    /// Adds what was seen on another node.
    pub fn add(&mut self, other: Self) {
        self.pods = self.pods.saturating_add(other.pods);
        self.lost = self.lost.saturating_add(other.lost);
        self.flows.extend(other.flows);
        self.silent.extend(other.silent);
        for (namespace, sets) in other.known {
            self.known.entry(namespace).or_default().extend(sets);
        }
        self.dns = self.dns.take().or(other.dns);
    }

    /// The other namespaces of which it has labels of pods.
    #[must_use]
    pub fn other_namespaces(&self) -> BTreeSet<String> {
        let of_peers = self.flows.iter().map(|flow| &flow.peer).chain(&self.dns).filter_map(|peer| match peer {
            Peer::Pod { namespace, .. } => Some(namespace),
            Peer::Address(_) | Peer::Gone(_) | Peer::Namespace(_) => None,
        });
        of_peers.chain(self.known.keys()).filter(|namespace| **namespace != self.namespace).cloned().collect()
    }

    /// Leaves out labels of pods in namespaces that the one who asks may not look at.
    pub fn hide(&mut self, may_look: impl Fn(&str) -> bool) {
        self.known.retain(|namespace, _| may_look(namespace));
        let hidden = |peer: Peer| match peer {
            Peer::Pod { namespace, .. } if !may_look(&namespace) => Peer::Namespace(namespace),
            other => other,
        };
        self.dns = self.dns.take().map(hidden);
        // Kinds that only hidden labels tell apart become one: not even their number is said.
        let mut tally = Tally::default();
        for flow in mem::take(&mut self.flows) {
            tally.add(Flow { peer: hidden(flow.peer), ..flow });
        }
        self.flows = tally.flows();
    }
}

/// Flows, each kind once.
#[derive(Debug)]
pub struct Tally {
    kinds: BTreeMap<Kind, (u64, u64)>,
    /// How many bytes of texts there is still room for.
    room: usize,
}

/// Labels of the pod, whether it began the flows, the peer, protocol and port.
type Kind = (StableLabels, bool, Peer, u8, u16);

impl Default for Tally {
    fn default() -> Self {
        Self::within(usize::MAX)
    }
}

impl Tally {
    /// Takes kinds with this number of bytes of texts at most.
    #[must_use]
    pub fn within(room: usize) -> Self {
        Self { kinds: BTreeMap::new(), room }
    }

    /// Adds flows, and says whether there was room for them.
    pub fn add(&mut self, flow: Flow) -> bool {
        let Flow { labels, is_egress, peer, protocol, port, flows, last } = flow;
        let bytes = ROW + bytes_of(&labels) + peer.bytes();
        let kind = (labels, is_egress, peer, protocol, port);
        if !self.kinds.contains_key(&kind) {
            let Some(left) = self.room.checked_sub(bytes) else { return false };
            self.room = left;
        }
        let (count, newest) = self.kinds.entry(kind).or_default();
        (*count, *newest) = (count.saturating_add(flows), last.max(*newest));
        true
    }

    /// All of them, in order.
    #[must_use]
    pub fn flows(self) -> Vec<Flow> {
        let flow = |((labels, is_egress, peer, protocol, port), (flows, last))| Flow {
            labels,
            is_egress,
            peer,
            protocol,
            port,
            flows,
            last,
        };
        self.kinds.into_iter().map(flow).collect()
    }
}

impl Peer {
    fn bytes(&self) -> usize {
        match self {
            Self::Pod { namespace, labels } => namespace.len() + bytes_of(labels),
            Self::Namespace(namespace) => namespace.len(),
            Self::Address(_) | Self::Gone(_) => 0,
        }
    }
}

/// How many bytes labels take in a document, about.
#[must_use]
pub fn bytes_of(labels: &StableLabels) -> usize {
    labels.iter().map(|(key, value)| key.len() + value.len() + LABEL).sum()
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
/// Names of keys and numbers of a flow.
const ROW: usize = 160;
/// Quotes, colon and comma.
const LABEL: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(all: &[(&str, &str)]) -> StableLabels {
        all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn to(peer: Peer, port: u16) -> Flow {
        Flow {
            labels: labels(&[("app", "web")]),
            is_egress: true,
            peer,
            protocol: 6,
            port,
            flows: 2,
            last: port.into(),
        }
    }

    fn pod(namespace: &str, app: &str) -> Peer {
        Peer::Pod { namespace: namespace.to_owned(), labels: labels(&[("app", app), ("secret", app)]) }
    }

    fn seen() -> Seen {
        let sets = |app: &str| BTreeSet::from([labels(&[("app", app), ("secret", app)])]);
        Seen {
            namespace: "shop".to_owned(),
            pods: 1,
            flows: vec![to(pod("pay", "db"), 80), to(pod("pay", "cache"), 80), to(pod("shop", "db"), 80)],
            known: [("pay", "db"), ("shop", "db")].map(|(name, app)| (name.to_owned(), sets(app))).into(),
            dns: Some(pod("kube-system", "dns")),
            ..Seen::default()
        }
    }

    #[test]
    fn labels_of_other_namespaces_are_left_out_and_not_even_their_number_is_said() {
        let mut hidden = seen();
        assert_eq!(hidden.other_namespaces(), ["kube-system", "pay"].map(str::to_owned).into());
        hidden.hide(|namespace| namespace == "shop");
        let mut one = to(Peer::Namespace("pay".to_owned()), 80);
        one.flows = 4;
        assert_eq!(hidden.flows, [to(pod("shop", "db"), 80), one]);
        assert_eq!(hidden.known.keys().collect::<Vec<_>>(), ["shop"]);
        assert_eq!(hidden.dns, Some(Peer::Namespace("kube-system".to_owned())));
        assert!(hidden.other_namespaces().is_empty());
        let text = serde_json::json!({"seen": hidden}).to_string();
        assert!(!text.contains("cache") && !text.contains(":\"dns\""), "{text}");
        assert_eq!(Seen::read(&text, "a.json", "shop").unwrap(), hidden);
        let mut shown = seen();
        shown.hide(|_| true);
        assert_eq!(shown.known, seen().known);
    }

    #[test]
    fn a_document_of_another_namespace_is_refused_and_those_of_several_nodes_are_added() {
        let text = serde_json::json!({"seen": seen(), "policies": []}).to_string();
        let mut both = Seen::read(&text, "a.json", "shop").unwrap();
        assert_eq!(both, seen());
        both.add(Seen { pods: usize::MAX, lost: 3, silent: vec!["shop/x: no".to_owned()], ..seen() });
        assert_eq!((both.flows.len(), both.pods, both.lost, both.silent.len()), (6, usize::MAX, 3, 1));
        assert!(Seen::read(&text, "a.json", "pay").unwrap_err().to_string().contains("namespace \"shop\""));
        assert!(Seen::read("{}", "a.json", "pay").is_err() && Seen::read("", "a.json", "pay").is_err());
    }

    #[test]
    fn flows_of_one_kind_are_added_and_further_kinds_need_room() {
        let mut tally = Tally::within(2 * ROW);
        let outside = |port| to(Peer::Address([192, 0, 2, 1].into()), port);
        assert!(tally.add(outside(80)) && !tally.add(outside(81)), "labels count, too");
        assert!(tally.add(Flow { last: 7, ..outside(80) }), "that kind is there");
        let flows = tally.flows();
        assert_eq!((flows.len(), flows[0].flows, flows[0].last), (1, 4, 80));
    }
}
