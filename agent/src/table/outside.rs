//! Pods that are known not to be enrolled, because the rules of our chain entry leave them out.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use kube::core::Object;
use nebula_cni_plugin::clock::Clock;
use nebula_cni_plugin::enrolment::ANNOTATION;
use nebula_cni_plugin::enrolment::labels::{Answer, LabelSource, Labels, Question};
use serde::Deserialize;

use super::facts::{Addresses, addresses};
use crate::reconcile::entry::{Entry, PodFacts};
use crate::reconcile::seen::Enrolment;

/// A pod of the cluster: the few fields that count here, so that a list of thousands stays small.
pub type Pod = Object<Spec, Status>;

/// Of a pod's specification.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    host_network: bool,
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

/// Decides by the rules of one chain entry.
#[derive(Debug)]
pub struct Rules {
    entry: Entry,
    /// Whether two pods of a namespace may be decided differently, though neither has the annotation.
    asks_for_pod_labels: bool,
    /// Decisions by namespace and annotation.
    decided: HashMap<(String, Option<String>), bool>,
}

impl Rules {
    /// Those of our chain entry.
    #[must_use]
    pub fn new(entry: Entry, asks_for_pod_labels: bool) -> Self {
        Self { entry, asks_for_pod_labels, decided: HashMap::new() }
    }

    /// Where pods have their addresses.
    #[must_use]
    pub fn pod_ranges(&self) -> &[IpNet] {
        &self.entry.pod_ranges
    }

    /// Forgets decisions, because labels of a namespace changed.
    pub fn forget(&mut self) {
        self.decided.clear();
    }

    /// The addresses of a pod that is known not to be enrolled; `None` for every other pod. A pod that has ended has none:
    /// another pod may have its address by now.
    pub fn outside(&mut self, pod: &Pod, namespaces: &Namespaces) -> Option<Addresses> {
        let status = pod.status.as_ref()?;
        if pod.spec.host_network || ["Succeeded", "Failed"].contains(&status.phase.as_str()) {
            return None;
        }
        let listed = status.pod_ips.iter().map(|entry| &entry.ip).chain([&status.pod_ip]);
        let found = addresses(listed.filter_map(|ip| ip.parse::<IpAddr>().ok()).map(|ip| ip.to_canonical()));
        (found != [None; 2] && self.is_left_out(pod, namespaces)).then_some(found)
    }

    fn is_left_out(&mut self, pod: &Pod, namespaces: &Namespaces) -> bool {
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let annotation = pod.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION)).cloned();
        let key = (!self.asks_for_pod_labels).then(|| (namespace.clone(), annotation.clone()));
        if let Some(known) = key.as_ref().and_then(|key| self.decided.get(key)) {
            return *known;
        }
        let annotations = annotation.map(|value| (ANNOTATION.to_owned(), value)).into_iter().collect();
        let facts = PodFacts {
            container_id: "any",
            namespace: &namespace,
            name: pod.metadata.name.as_deref().unwrap_or_default(),
            uid: pod.metadata.uid.as_deref().unwrap_or_default(),
            annotations: &annotations,
        };
        let labels = Known { pod: pod.metadata.labels.as_ref(), namespace: namespaces.get(&namespace) };
        // What cannot be decided may be enrolled.
        let is_left_out = self.entry.enrolment(&facts, &labels) == Enrolment::NotEnrolled;
        if let Some(key) = key.filter(|_| self.decided.len() < MAX_DECIDED) {
            self.decided.insert(key, is_left_out);
        }
        is_left_out
    }
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

/// The plugin's annotation, by which a pod opts out.
/// A namespace has a few entries.
const MAX_DECIDED: usize = 16_384;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::PLUGIN;

    fn rules(enrol: Value) -> Rules {
        let asks = enrol.get("podSelector").is_some();
        let plugin = json!({"type": PLUGIN, "enrol": enrol, "kubeconfig": "/k", "overlay": ["10.244.0.0/16"],
            "capabilities": {"io.kubernetes.cri.pod-annotations": true},
            "ca": {"url": "https://ca:1", "tlsCaFile": "/a", "tokenFile": "/b"}});
        let list = json!({"name": "n", "cniVersion": "1.0.0", "plugins": [plugin]});
        Rules::new(Entry::of_list(&list).unwrap(), asks)
    }

    fn pod(namespace: &str, change: impl FnOnce(&mut Value)) -> Pod {
        let mut pod = json!({
            "metadata": {"namespace": namespace, "name": "web", "uid": "u-1"}, "spec": {},
            "status": {"phase": "Running", "podIP": "10.244.1.7", "podIPs": [{"ip": "10.244.1.7"}, {"ip": "fd00::7"}]},
        });
        change(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    fn is_outside(rules: &mut Rules, pod: &Pod) -> bool {
        rules.outside(pod, &Namespaces::new()).is_some()
    }

    #[test]
    fn only_a_running_pod_that_the_rules_leave_out_is_known_not_to_be_enrolled() {
        let mut rules = rules(json!({"namespaces": ["shop"]}));
        let both = rules.outside(&pod("other", |_| {}), &Namespaces::new()).unwrap();
        assert_eq!(both, [Some("10.244.1.7".parse().unwrap()), Some("fd00::7".parse().unwrap())]);
        assert!(!is_outside(&mut rules, &pod("shop", |_| {})));
        for change in [
            |pod: &mut Value| pod["spec"]["hostNetwork"] = true.into(),
            |pod: &mut Value| pod["status"]["phase"] = "Succeeded".into(),
            |pod: &mut Value| pod["status"]["phase"] = "Failed".into(),
            |pod: &mut Value| pod["status"] = json!({"phase": "Pending"}),
        ] {
            assert!(!is_outside(&mut rules, &pod("other", change)));
        }
        assert!(is_outside(&mut rules, &pod("other", |_| {})), "the decision is remembered");
    }

    #[test]
    fn a_pod_that_opted_out_is_known_and_one_that_cannot_be_decided_is_not() {
        let mut all = rules(json!({}));
        let annotated = |value: &str| pod("shop", |pod| pod["metadata"]["annotations"] = json!({ANNOTATION: value}));
        assert!(is_outside(&mut all, &annotated("false")));
        assert!(!is_outside(&mut all, &annotated("perhaps")), "the plugin refuses it");
        assert!(!is_outside(&mut all, &pod("shop", |_| {})));
    }

    #[test]
    fn labels_of_pods_and_namespaces_decide_where_the_rules_ask_for_them() {
        let mut by_pod = rules(json!({"podSelector": {"matchLabels": {"mesh": "yes"}}}));
        let labelled = |value: &str| pod("shop", |pod| pod["metadata"]["labels"] = json!({"mesh": value}));
        assert!(is_outside(&mut by_pod, &labelled("no")) && !is_outside(&mut by_pod, &labelled("yes")));
        let mut by_namespace = rules(json!({"namespaceSelector": {"matchLabels": {"mesh": "yes"}}}));
        assert!(!is_outside(&mut by_namespace, &pod("shop", |_| {})), "its labels are not known yet");
        let known =
            |value: &str| Namespaces::from([("other".to_owned(), [("mesh".to_owned(), value.to_owned())].into())]);
        assert!(by_namespace.outside(&pod("other", |_| {}), &known("no")).is_some());
    }
}
