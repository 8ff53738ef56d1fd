//! What the API server shows of a pod: its addresses and its node, and what the rules of our chain entry make of it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use ipnet::IpNet;
use kube::core::Object;
use nebula_cni_contract::clock::Clock;
use nebula_cni_contract::labels::{Answer, LabelSource, Labels, Question};
use nebula_cni_plugin::enrolment::ANNOTATION;
use serde::Deserialize;

use super::member::{self, Addresses, PodId, addresses};
use crate::policy::described::{Container, Described, Descriptions};
use crate::reconcile::entry::{Entry, PodFacts};
use crate::reconcile::seen::Enrolment;

/// A pod of the cluster: the few fields that count here, so that a list of thousands stays small.
pub type Pod = Object<Spec, Status>;

/// Of a pod's specification.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    host_network: bool,
    node_name: String,
    containers: Vec<Container>,
    init_containers: Vec<Container>,
}

/// Of a pod's status.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct PodIp {
    ip: String,
}

/// Labels by namespace, as far as the rules ask for them.
pub type Namespaces = HashMap<String, BTreeMap<String, String>>;

/// What counts of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// Its addresses, as its kubelet reports them.
    pub(super) addresses: Addresses,
    pub(super) node: Arc<str>,
    /// The rules leave it out, so it has no tunnel.
    pub(super) is_left_out: bool,
    /// The operator enrols its namespace. Whoever writes its labels and annotations does not matter for this.
    pub(super) counts: bool,
    /// It has its node's network, and no address of its own.
    pub(super) is_host_network: bool,
    /// The static pod that it is the mirror of, by whose UID the runtime knows it.
    pub(super) mirrors: Option<Box<PodId>>,
    /// What policies can ask about it; `None` if nobody does, or it has its node's network.
    pub(super) described: Option<Arc<Described>>,
}

impl Shown {
    pub(super) fn has(&self, address: &IpAddr) -> bool {
        self.addresses.iter().flatten().any(|own| own == address)
    }
}

/// Decides by the rules of one chain entry.
#[derive(Debug)]
pub struct Rules {
    entry: Entry,
    /// The same without rules about labels of pods.
    of_namespaces: Entry,
    /// Whether two pods of a namespace may be decided differently, though neither has the annotation.
    asks_for_pod_labels: bool,
    /// Decisions by namespace and annotation.
    decided: HashMap<(String, Option<String>), bool>,
    /// Whether the operator enrols a namespace.
    enrols: HashMap<String, bool>,
    /// Names of nodes, each once in memory.
    nodes: HashSet<Arc<str>>,
    /// What policies can ask about pods; `None` if policies are not enforced.
    descriptions: Option<Descriptions>,
}

impl Rules {
    /// Those of our chain entry; `of_namespaces` is the same entry without rules about labels of pods.
    #[must_use]
    pub fn new(entry: Entry, of_namespaces: Entry, asks_for_pod_labels: bool) -> Self {
        let (decided, enrols, nodes) = (HashMap::new(), HashMap::new(), HashSet::new());
        Self { entry, of_namespaces, asks_for_pod_labels, decided, enrols, nodes, descriptions: None }
    }

    /// Notes also what policies can ask about pods.
    #[must_use]
    pub fn describing(self) -> Self {
        Self { descriptions: Some(Descriptions::default()), ..self }
    }

    /// Where pods have their addresses.
    #[must_use]
    pub fn pod_ranges(&self) -> &[IpNet] {
        &self.entry.pod_ranges
    }

    /// What stays on the primary network.
    #[must_use]
    pub fn exclude(&self) -> &[IpNet] {
        &self.entry.exclude
    }

    /// Where load balancers have addresses.
    #[must_use]
    pub fn load_balancers(&self) -> &[IpNet] {
        &self.entry.load_balancers
    }

    /// Cluster IPs of Services.
    #[must_use]
    pub fn services(&self) -> &[IpNet] {
        &self.entry.services
    }

    /// First and last of the ports that Services have on all nodes.
    #[must_use]
    pub fn node_ports(&self) -> Option<(u16, u16)> {
        self.entry.node_ports
    }

    /// UDP ports of instances; `None`: they are not at the addresses of their nodes.
    #[must_use]
    pub fn ports(&self) -> Option<(u16, u16)> {
        self.entry.ports
    }

    /// Forgets decisions, because labels of a namespace changed.
    pub fn forget(&mut self) {
        self.decided.clear();
        self.enrols.clear();
    }

    /// What counts of a pod; `None` if nothing does: it has ended, so that another pod may have its address by now,
    /// or it is not bound to a node.
    pub fn shown(&mut self, pod: &Pod, namespaces: &Namespaces) -> Option<Shown> {
        let status = pod.status.as_ref();
        let has_ended = status.is_some_and(|status| ["Succeeded", "Failed"].contains(&status.phase.as_str()));
        if has_ended || pod.spec.node_name.is_empty() {
            return None;
        }
        let listed =
            status.into_iter().flat_map(|status| status.pod_ips.iter().map(|entry| &entry.ip).chain([&status.pod_ip]));
        let is_host_network = pod.spec.host_network;
        let found = addresses(listed.filter_map(|ip| ip.parse::<IpAddr>().ok()).map(|ip| ip.to_canonical()));
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        Some(Shown {
            addresses: if is_host_network { [None; 2] } else { found },
            is_left_out: !is_host_network && self.is_left_out(pod, &namespace, namespaces),
            counts: self.is_enrolled(&namespace, namespaces),
            is_host_network,
            mirrors: mirrored(pod).map(Box::new),
            described: self.described(pod, &namespace),
            node: self.node(&pod.spec.node_name),
        })
    }

    fn described(&mut self, pod: &Pod, namespace: &str) -> Option<Arc<Described>> {
        let all = self.descriptions.as_mut().filter(|_| !pod.spec.host_network)?;
        let labels = pod.metadata.labels.as_ref();
        Some(all.share(Described::new(namespace, labels, &pod.spec.containers, &pod.spec.init_containers)))
    }

    fn is_left_out(&mut self, pod: &Pod, namespace: &str, namespaces: &Namespaces) -> bool {
        let annotation = pod.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION)).cloned();
        let key = (!self.asks_for_pod_labels).then(|| (namespace.to_owned(), annotation.clone()));
        if let Some(known) = key.as_ref().and_then(|key| self.decided.get(key)) {
            return *known;
        }
        let annotations = annotation.map(|value| (ANNOTATION.to_owned(), value)).into_iter().collect();
        let facts = PodFacts {
            container_id: "any",
            namespace,
            name: pod.metadata.name.as_deref().unwrap_or_default(),
            uid: pod.metadata.uid.as_deref().unwrap_or_default(),
            annotations: &annotations,
        };
        let labels = Known { pod: pod.metadata.labels.as_ref(), namespace: namespaces.get(namespace) };
        // What cannot be decided may be enrolled.
        let enrolment = self.entry.enrolment(&facts, &labels);
        let is_left_out = matches!(enrolment, Enrolment::NotEnrolled | Enrolment::OptedOut);
        if let Some(key) = key.filter(|_| self.decided.len() < MAX_DECIDED) {
            self.decided.insert(key, is_left_out);
        }
        is_left_out
    }

    /// Whether the operator enrols pods of the namespace.
    fn is_enrolled(&mut self, namespace: &str, namespaces: &Namespaces) -> bool {
        if let Some(known) = self.enrols.get(namespace) {
            return *known;
        }
        let annotations = HashMap::new();
        let facts = PodFacts { container_id: "any", namespace, name: "any", uid: "", annotations: &annotations };
        let labels = Known { pod: None, namespace: namespaces.get(namespace) };
        let is_enrolled = self.of_namespaces.enrolment(&facts, &labels) != Enrolment::NotEnrolled;
        if self.enrols.len() < MAX_DECIDED {
            self.enrols.insert(namespace.to_owned(), is_enrolled);
        }
        is_enrolled
    }

    fn node(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.nodes.get(name) {
            return Arc::clone(known);
        }
        let name: Arc<str> = name.into();
        if self.nodes.len() < MAX_DECIDED {
            self.nodes.insert(Arc::clone(&name));
        }
        name
    }
}

/// The static pod of which this is the mirror. Anybody who makes pods can write the annotation; a mirror is owned by
/// its node.
fn mirrored(pod: &Pod) -> Option<PodId> {
    let hash = pod.metadata.annotations.as_ref()?.get("kubernetes.io/config.mirror")?;
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().any(|owner| owner.kind == "Node" && owner.name == pod.spec.node_name).then(|| member::id(hash))
}

/// The labels of one pod and its namespace.
struct Known<'a> {
    pod: Option<&'a BTreeMap<String, String>>,
    namespace: Option<&'a BTreeMap<String, String>>,
}

impl LabelSource for Known<'_> {
    fn ask(&self, _: &Path, question: &Question, _: &dyn Clock) -> Answer {
        match self.namespace {
            None if question.of_namespace => Answer::Undecided("the namespace's labels are not known yet".to_owned()),
            namespace => Answer::Labels(Labels {
                pod: self.pod.cloned().unwrap_or_default(),
                namespace: namespace.cloned().unwrap_or_default(),
            }),
        }
    }
}

/// A namespace has a few entries.
const MAX_DECIDED: usize = 16_384;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::PLUGIN;

    fn rules(enrol: Value) -> Rules {
        let asks = enrol.get("podSelector").is_some();
        let entry = |enrol: &Value| {
            let plugin = json!({"type": PLUGIN, "enrol": enrol, "kubeconfig": "/k", "overlay": ["10.244.0.0/16"],
                "capabilities": {"io.kubernetes.cri.pod-annotations": true},
                "ca": {"url": "https://ca:1", "tlsCaFile": "/a", "tokenFile": "/b"}});
            Entry::of_list(&json!({"name": "n", "cniVersion": "1.0.0", "plugins": [plugin]})).unwrap()
        };
        let mut of_namespaces = enrol.clone();
        of_namespaces.as_object_mut().unwrap().remove("podSelector");
        Rules::new(entry(&enrol), entry(&of_namespaces), asks)
    }

    fn pod(namespace: &str, change: impl FnOnce(&mut Value)) -> Pod {
        let mut pod = json!({
            "metadata": {"namespace": namespace, "name": "web", "uid": "u-1"}, "spec": {"nodeName": "n1"},
            "status": {"phase": "Running", "podIP": "10.244.1.7", "podIPs": [{"ip": "10.244.1.7"}, {"ip": "fd00::7"}]},
        });
        change(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    fn shown(rules: &mut Rules, pod: &Pod) -> Option<Shown> {
        rules.shown(pod, &Namespaces::new())
    }

    fn is_left_out(rules: &mut Rules, pod: &Pod) -> bool {
        shown(rules, pod).is_some_and(|shown| shown.is_left_out)
    }

    #[test]
    fn a_pod_has_the_addresses_and_the_node_that_the_api_server_shows() {
        let mut rules = rules(json!({"namespaces": ["shop"]}));
        let found = shown(&mut rules, &pod("other", |_| {})).unwrap();
        assert_eq!(found.addresses, [Some("10.244.1.7".parse().unwrap()), Some("fd00::7".parse().unwrap())]);
        assert_eq!((&*found.node, found.is_left_out, found.counts), ("n1", true, false));
        let found = shown(&mut rules, &pod("shop", |_| {})).unwrap();
        assert_eq!((found.is_left_out, found.counts), (false, true));
        for change in [
            |pod: &mut Value| pod["status"]["phase"] = "Succeeded".into(),
            |pod: &mut Value| pod["status"]["phase"] = "Failed".into(),
            |pod: &mut Value| pod["spec"] = json!({}),
        ] {
            assert_eq!(shown(&mut rules, &pod("other", change)), None);
        }
        let of_node = shown(&mut rules, &pod("other", |pod| pod["spec"]["hostNetwork"] = true.into())).unwrap();
        assert!(of_node.is_host_network && !of_node.is_left_out && of_node.addresses == [None; 2]);
        let pending = shown(&mut rules, &pod("other", |pod| pod["status"] = json!({"phase": "Pending"}))).unwrap();
        assert_eq!(pending.addresses, [None; 2]);
        assert!(is_left_out(&mut rules, &pod("other", |_| {})), "the decision is remembered");
    }

    /// `.ci/kubernetes` holds the object against the API of each release from 1.33 on.
    #[test]
    fn a_pod_with_a_sidecar_and_users_of_its_own_that_is_being_resized_is_one_like_others() {
        let mut rules = rules(json!({"namespaces": ["shop"]})).describing();
        let pod: Pod = serde_json::from_str(include_str!("../../tests/objects/pod.json")).unwrap();
        let found = shown(&mut rules, &pod).unwrap();
        assert_eq!(found.addresses, [Some("10.244.1.7".parse().unwrap()), Some("fd00:244:1::7".parse().unwrap())]);
        assert_eq!((&*found.node, found.is_left_out, found.counts, found.is_host_network), ("n1", false, true, false));
        let described = found.described.unwrap();
        let ports: Vec<(&str, u16)> = described.ports.iter().map(|port| (port.name.as_str(), port.port)).collect();
        assert_eq!(ports, [("admin", 9901), ("dns", 5353), ("http", 8080)], "that of the sidecar, none of what ended");
    }

    #[test]
    fn a_pod_that_opted_out_is_left_out_and_one_that_cannot_be_decided_is_not() {
        let mut all = rules(json!({"optOut": true}));
        let annotated = |value: &str| pod("shop", |pod| pod["metadata"]["annotations"] = json!({ANNOTATION: value}));
        assert!(is_left_out(&mut all, &annotated("false")));
        assert!(shown(&mut all, &annotated("false")).unwrap().counts, "it may have a tunnel from before");
        assert!(!is_left_out(&mut all, &annotated("perhaps")), "the plugin refuses it");
        assert!(!is_left_out(&mut all, &pod("shop", |_| {})));
    }

    #[test]
    fn labels_of_pods_and_namespaces_decide_where_the_rules_ask_for_them() {
        let mut by_pod = rules(json!({"podSelector": {"matchLabels": {"mesh": "yes"}}}));
        let labelled = |value: &str| pod("shop", |pod| pod["metadata"]["labels"] = json!({"mesh": value}));
        assert!(is_left_out(&mut by_pod, &labelled("no")) && !is_left_out(&mut by_pod, &labelled("yes")));
        assert!(shown(&mut by_pod, &labelled("no")).unwrap().counts, "whoever makes a pod writes its labels");
        let mut by_namespace = rules(json!({"namespaceSelector": {"matchLabels": {"mesh": "yes"}}}));
        assert!(!is_left_out(&mut by_namespace, &pod("shop", |_| {})), "its labels are not known yet");
        let known =
            |value: &str| Namespaces::from([("other".to_owned(), [("mesh".to_owned(), value.to_owned())].into())]);
        let found = by_namespace.shown(&pod("other", |_| {}), &known("no")).unwrap();
        assert!(found.is_left_out && !found.counts);
        by_namespace.forget();
        assert!(by_namespace.shown(&pod("other", |_| {}), &known("yes")).unwrap().counts);
    }

    #[test]
    fn only_what_its_node_owns_is_the_mirror_of_a_static_pod() {
        let mut all = rules(json!({}));
        let mirror = |kind: &str, name: &str| {
            pod("shop", |pod| {
                pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "hash"});
                pod["metadata"]["ownerReferences"] =
                    json!([{"apiVersion": "v1", "kind": kind, "name": name, "uid": "x"}]);
            })
        };
        let of = |rules: &mut Rules, pod: &Pod| shown(rules, pod).unwrap().mirrors;
        assert_eq!(of(&mut all, &mirror("Node", "n1")).as_deref(), Some(&member::id("hash")));
        assert_eq!(of(&mut all, &mirror("Node", "n2")), None);
        assert_eq!(of(&mut all, &mirror("ReplicaSet", "n1")), None);
    }
}
