//! Our entry in the chain that the runtime has loaded: what the plugin gets on stdin, and which pods it enrols.

use std::collections::HashMap;
use std::path::PathBuf;

use ipnet::IpNet;
use nebula_cni_contract::clock::{Deadline, SystemClock};
use nebula_cni_contract::labels::LabelSource;
use nebula_cni_contract::launch::{CaAccess, Underlay};
use nebula_cni_plugin::enrolment::{Decision, Knowledge};
use nebula_cni_plugin::reply::{Error, code};
use nebula_cni_plugin::request::{self, Attach, Env, Key, Request};
use nebula_cni_plugin::settings::Settings;
use serde_json::{Map, Value};

use super::seen::Enrolment;
use crate::config::PLUGIN;
use crate::network;

/// Our entry with the name and version of its list.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Name of the network.
    pub network: String,
    /// The plugin's directory of records, as the node names it.
    pub state_dir: PathBuf,
    /// Where certificates come from; its paths are the node's.
    pub ca: CaAccess,
    /// Where pods have their addresses, if they are captured.
    pub pod_ranges: Vec<IpNet>,
    /// What captured pods reach on the primary network.
    pub exclude: Vec<IpNet>,
    /// Where load balancers have addresses that captured pods reach through their tunnels.
    pub load_balancers: Vec<IpNet>,
    /// Cluster IPs of Services.
    pub services: Vec<IpNet>,
    /// First and last of the ports that Services have on all nodes.
    pub node_ports: Option<(u16, u16)>,
    /// The program of instances, if the entry names one; else it lies beside the plugin.
    pub instance: Option<PathBuf>,
    /// UDP ports of instances; `None`: they are not at the addresses of their nodes.
    pub ports: Option<(u16, u16)>,
    /// Whether network policies of its pods are enforced, in tunnels and in clear.
    pub enforces_policies: bool,
    stdin: Map<String, Value>,
}

/// A chain that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    /// The list has no entry of ours.
    #[error("the network configuration list has no plugin of type {PLUGIN}")]
    Missing,
    /// The plugin refuses the entry.
    #[error("the plugin refuses its entry in the network configuration list: {0}")]
    Refused(#[from] Error),
}

/// What the runtime says of a pod.
#[derive(Debug, Clone, Copy)]
pub struct PodFacts<'a> {
    /// Id of the sandbox.
    pub container_id: &'a str,
    /// Namespace.
    pub namespace: &'a str,
    /// Name.
    pub name: &'a str,
    /// UID.
    pub uid: &'a str,
    /// Annotations.
    pub annotations: &'a HashMap<String, String>,
}

/// A call of the plugin's program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// CNI_* variables.
    pub env: Vec<(&'static str, String)>,
    /// The network configuration.
    pub stdin: String,
}

impl Entry {
    /// Takes our entry out of a network configuration list.
    ///
    /// # Errors
    /// Returns an error if there is none, or if the plugin would refuse it.
    pub fn of_list(list: &Value) -> Result<Self, EntryError> {
        let ours = |plugin: &&Value| plugin["type"] == PLUGIN;
        let plugins = list["plugins"].as_array().map(Vec::as_slice).unwrap_or_default();
        let entry = plugins.iter().find(ours).and_then(Value::as_object).ok_or(EntryError::Missing)?;
        // What is asked of the plugin here is about pods that have their interface.
        let mut stdin = network::chained(entry.clone());
        for key in ["name", "cniVersion"] {
            stdin.insert(key.to_owned(), list[key].clone());
        }
        // Any pod will do to let the plugin's own code check the settings.
        let any =
            PodFacts { container_id: "any", namespace: "any", name: "any", uid: "", annotations: &HashMap::new() };
        let request = request(&stdin, &any)?;
        let settings = Settings::read(&request.config)?;
        let enforces_policies =
            settings.capture.as_ref().is_some_and(|capture| capture.policy && capture.terms.clear_policy);
        let terms = settings.capture.map(|capture| capture.terms).unwrap_or_default();
        Ok(Self {
            network: request.config.name,
            state_dir: settings.state_dir,
            ca: settings.ca,
            instance: settings.instance,
            pod_ranges: terms.ranges,
            exclude: terms.exclude,
            load_balancers: terms.load_balancers,
            services: terms.services,
            node_ports: terms.node_ports,
            ports: (settings.underlay == Underlay::Host).then_some(settings.port_range),
            enforces_policies,
            stdin,
        })
    }

    /// Decides whether a pod is enrolled, as the plugin would.
    #[must_use]
    pub fn enrolment(&self, pod: &PodFacts<'_>, labels: &dyn LabelSource) -> Enrolment {
        let decided = request(&self.with_annotations(pod), pod).and_then(|request| {
            let settings = Settings::read(&request.config)?;
            let knowledge = Knowledge {
                container_id: pod.container_id,
                labels,
                // The labels come from elsewhere, so no program is needed to get them.
                program: &|| Ok(PathBuf::new()),
                clock: &SystemClock,
                deadline: Deadline::after(&SystemClock, settings.timeout),
            };
            settings.enrolment.decide(&request.args, &request.config, knowledge)
        });
        match decided {
            Ok(Decision::Enrolled(_)) => Enrolment::Enrolled,
            Ok(Decision::LeftOut) => Enrolment::NotEnrolled,
            Ok(Decision::OptedOut) => Enrolment::OptedOut,
            Err(error) => Enrolment::Undecided(error.to_string()),
        }
    }

    /// The call that attaches a running pod.
    #[must_use]
    pub fn attach(&self, pod: &PodFacts<'_>, netns: &str, prev_result: &Value) -> Call {
        let mut stdin = self.with_annotations(pod);
        stdin.insert("prevResult".to_owned(), prev_result.clone());
        Call { env: environment("ADD", pod, IFNAME, netns), stdin: Value::Object(stdin).to_string() }
    }

    /// The call that hands the settings to all pods that run. It names none of them.
    #[must_use]
    pub fn refresh(&self) -> Call {
        let none = HashMap::new();
        let any = PodFacts { container_id: "any", namespace: "any", name: "any", uid: "", annotations: &none };
        let env = environment("ADD", &any, IFNAME, "/proc/self/ns/net");
        Call { env, stdin: Value::Object(self.stdin.clone()).to_string() }
    }

    /// The call that removes an attachment.
    #[must_use]
    pub fn detach(&self, key: &Key) -> Call {
        let none = HashMap::new();
        let pod = PodFacts { container_id: &key.container_id, namespace: "", name: "", uid: "", annotations: &none };
        Call { env: environment("DEL", &pod, &key.ifname, ""), stdin: Value::Object(self.stdin.clone()).to_string() }
    }

    /// The entry with what the runtime adds to it for a pod.
    fn with_annotations(&self, pod: &PodFacts<'_>) -> Map<String, Value> {
        let mut stdin = self.stdin.clone();
        if stdin.get("capabilities").is_some_and(|capabilities| capabilities[ANNOTATIONS] == true) {
            let runtime = serde_json::json!({ANNOTATIONS: pod.annotations});
            stdin.insert("runtimeConfig".to_owned(), runtime);
        }
        stdin
    }
}

/// An ADD as the plugin reads it.
fn request(stdin: &Map<String, Value>, pod: &PodFacts<'_>) -> Result<Attach, Error> {
    let env = environment("ADD", pod, IFNAME, "/proc/self/ns/net");
    let env: Env = env.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
    let stdin = Value::Object(stdin.clone()).to_string();
    match request::read(&env, stdin.as_bytes()).1? {
        Some(Request::Add(attach)) => Ok(attach),
        _ => Err(Error::new(code::ENVIRONMENT, "not an ADD")),
    }
}

fn environment(verb: &str, pod: &PodFacts<'_>, ifname: &str, netns: &str) -> Vec<(&'static str, String)> {
    let PodFacts { container_id, namespace, name, uid, .. } = pod;
    let args = match namespace.is_empty() {
        true => String::new(),
        false => format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID={uid}"),
    };
    vec![
        ("CNI_COMMAND", verb.to_owned()),
        ("CNI_CONTAINERID", (*container_id).to_owned()),
        ("CNI_NETNS", netns.to_owned()),
        ("CNI_IFNAME", ifname.to_owned()),
        ("CNI_ARGS", args),
        ("CNI_PATH", "/opt/cni/bin".to_owned()),
    ]
}

/// The interface that runtimes of Kubernetes make for a pod.
pub(crate) const IFNAME: &str = "eth0";
const ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";

#[cfg(test)]
mod tests {
    use nebula_cni_contract::clock::Clock;
    use nebula_cni_contract::labels::{Answer, Question};
    use serde_json::json;

    use super::*;

    struct NoLabels;

    impl LabelSource for NoLabels {
        fn ask(&self, _: &std::path::Path, _: &Question, _: &dyn Clock) -> Answer {
            Answer::Undecided("no API server".to_owned())
        }
    }

    fn list(entry: Value) -> Value {
        let mut ours = json!({"type": PLUGIN, "stateDir": "/run/x", "capabilities": {ANNOTATIONS: true},
            "ca": {"url": "https://ca:8443", "tlsCaFile": "/t", "tokenFile": "/k"}});
        ours.as_object_mut().unwrap().extend(entry.as_object().unwrap().clone());
        json!({"name": "net", "cniVersion": "1.0.0", "plugins": [{"type": "bridge"}, ours]})
    }

    fn facts(annotations: &HashMap<String, String>) -> PodFacts<'_> {
        PodFacts { container_id: "c1", namespace: "shop", name: "web-0", uid: "u1", annotations }
    }

    fn enrolment(entry: Value, annotations: &[(&str, &str)]) -> Enrolment {
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Entry::of_list(&list(entry)).unwrap().enrolment(&facts(&annotations), &NoLabels)
    }

    #[test]
    fn the_plugins_own_rules_decide() {
        assert_eq!(enrolment(json!({}), &[]), Enrolment::Enrolled);
        assert_eq!(enrolment(json!({"enrol": {"namespaces": ["pay"]}}), &[]), Enrolment::NotEnrolled);
        let out = [("nebula-cni/enrol", "false")];
        assert_eq!(enrolment(json!({}), &out), Enrolment::Enrolled, "the operator does not allow it");
        let allowed = || json!({"enrol": {"optOut": true}});
        assert_eq!(enrolment(allowed(), &out), Enrolment::OptedOut);
        let undecided = enrolment(allowed(), &[("nebula-cni/enrol", "perhaps")]);
        assert!(matches!(undecided, Enrolment::Undecided(why) if why.contains("perhaps")));
        let selector = json!({"enrol": {"podSelector": {"matchLabels": {"a": "b"}}}, "kubeconfig": "/k"});
        assert!(matches!(enrolment(selector, &[]), Enrolment::Undecided(why) if why.contains("no API server")));
    }

    #[test]
    fn a_call_is_one_that_the_plugin_reads() {
        let entry = Entry::of_list(&list(json!({}))).unwrap();
        assert_eq!((entry.network.as_str(), entry.state_dir.to_str()), ("net", Some("/run/x")));
        let annotations = [("a".to_owned(), "b".to_owned())].into();
        let call = entry.attach(&facts(&annotations), "/run/netns/x", &json!({"ips": []}));
        let env: Env = call.env.iter().map(|(key, value)| ((*key).into(), value.into())).collect();
        let Ok(Some(Request::Add(attach))) = request::read(&env, call.stdin.as_bytes()).1 else { panic!("{call:?}") };
        assert_eq!((attach.key.container_id.as_str(), attach.args.get("K8S_POD_UID")), ("c1", Some("u1")));
        assert!(attach.config.prev_result().unwrap().is_some());
        assert_eq!(attach.config.value("runtimeConfig").unwrap().unwrap()[ANNOTATIONS]["a"], "b");
        let call = entry.detach(&attach.key);
        let env: Env = call.env.iter().map(|(key, value)| ((*key).into(), value.into())).collect();
        let read = request::read(&env, call.stdin.as_bytes()).1;
        assert!(matches!(read, Ok(Some(Request::Del(del))) if del.key == attach.key));
    }

    #[test]
    fn a_chain_without_us_or_with_a_wrong_entry_is_refused() {
        let bare = json!({"name": "net", "cniVersion": "1.0.0", "plugins": [{"type": "bridge"}]});
        assert!(matches!(Entry::of_list(&bare), Err(EntryError::Missing)));
        assert!(matches!(Entry::of_list(&json!(7)), Err(EntryError::Missing)));
        assert!(matches!(Entry::of_list(&list(json!({"mode": "x"}))), Err(EntryError::Refused(_))));
    }

    #[test]
    fn names_of_a_hostile_runtime_are_refused_and_not_passed_on() {
        let annotations = HashMap::new();
        let entry = Entry::of_list(&list(json!({}))).unwrap();
        let pod = PodFacts { name: "a;K8S_POD_UID=other", ..facts(&annotations) };
        assert!(matches!(entry.enrolment(&pod, &NoLabels), Enrolment::Undecided(_)));
    }
}
