//! Decides whether a pod is enrolled. A decision that cannot be made is an error, never a "no".

pub mod selector;

use std::path::PathBuf;

use nebula_cni_contract::clock::{Clock, Deadline};
use nebula_cni_contract::hash::fnv1a;
use nebula_cni_contract::labels::{Answer, LabelSource, Question};
use nebula_cni_contract::launch::Pod;
use serde_json::Value;

use crate::enrolment::selector::Selector;
use crate::reply::{Error, code};
use crate::request::checked::{refuse_other_keys, refused};
use crate::request::{Args, NetworkConfig};

/// Which pods the operator enrolled. Without lists and selectors, that is every pod the chain is called for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Enrolment {
    namespaces: Namespaces,
    selectors: Option<Selectors>,
    /// Whether a pod may stay out by its annotation.
    allows_opt_out: bool,
    // Namespace of containers whose runtime passes none: `ctr` and podman do not know Kubernetes.
    default_namespace: Option<String>,
}

/// Whether a pod is enrolled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// It is.
    Enrolled(Pod),
    /// The operator leaves it out.
    LeftOut,
    /// Its annotation leaves it out, which the operator allows.
    OptedOut,
}

impl Decision {
    /// The pod, if it is enrolled.
    #[must_use]
    pub fn pod(self) -> Option<Pod> {
        match self {
            Self::Enrolled(pod) => Some(pod),
            Self::LeftOut | Self::OptedOut => None,
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Namespaces {
    #[default]
    All,
    Only(Vec<String>),
    Except(Vec<String>),
}

/// Conditions on labels, which only the API server can answer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Selectors {
    kubeconfig: PathBuf,
    pod: Option<Selector>,
    namespace: Option<Selector>,
}

/// What a decision may consult besides the request.
#[derive(Clone, Copy)]
pub struct Knowledge<'a> {
    /// CNI_CONTAINERID.
    pub container_id: &'a str,
    /// Source of labels.
    pub labels: &'a dyn LabelSource,
    /// Finds the program that asks for labels.
    pub program: &'a dyn Fn() -> Result<PathBuf, Error>,
    /// Clock.
    pub clock: &'a dyn Clock,
    /// When the verb must be done.
    pub deadline: Deadline,
}

impl Enrolment {
    /// Reads the keys `enrol` and `kubeconfig`.
    ///
    /// # Errors
    /// Code 7, naming key and value.
    pub fn read(config: &NetworkConfig) -> Result<Self, Error> {
        const EXPECTED: &str =
            "an object with \"namespaces\" or \"exceptNamespaces\", \"podSelector\", \"namespaceSelector\", \"optOut\"";
        let Some(value) = config.value("enrol")? else { return Ok(Self::default()) };
        let object = value.as_object().ok_or_else(|| refused("enrol", &value, EXPECTED))?;
        const KEYS: [&str; 6] =
            ["namespaces", "exceptNamespaces", "podSelector", "namespaceSelector", "optOut", "defaultNamespace"];
        refuse_other_keys("enrol", object, &KEYS)?;
        let list = |key: &str| {
            let name = format!("enrol.{key}");
            object.get(key).map(|value| namespaces(&name, value)).transpose()
        };
        let namespaces = match (list("namespaces")?, list("exceptNamespaces")?) {
            (None, None) => Namespaces::All,
            (Some(only), None) => Namespaces::Only(only),
            (None, Some(except)) => Namespaces::Except(except),
            (Some(_), Some(_)) => return Err(refused("enrol", &value, "one of the two lists, not both")),
        };
        let selector = |key: &str| {
            let name = format!("enrol.{key}");
            object.get(key).map(|value| Selector::read(&name, value)).transpose()
        };
        let selectors = match (selector("podSelector")?, selector("namespaceSelector")?) {
            (None, None) => None,
            (pod, namespace) => Some(Selectors { kubeconfig: kubeconfig(config)?, pod, namespace }),
        };
        let default_namespace = object.get("defaultNamespace").map(|value| {
            let name = value.as_str().filter(|name| is_label(name)).map(str::to_owned);
            name.ok_or_else(|| refused("enrol.defaultNamespace", value, "the name of a namespace"))
        });
        let opt_out = |value: &Value| value.as_bool().ok_or_else(|| refused("enrol.optOut", value, "true or false"));
        let allows_opt_out = object.get("optOut").map_or(Ok(false), opt_out)?;
        Ok(Self { namespaces, selectors, allows_opt_out, default_namespace: default_namespace.transpose()? })
    }

    /// Decides about the pod of this request.
    ///
    /// The pod's owner writes the annotation, so it may opt a pod out where the operator allows that, but never in if
    /// the operator left it out. The runtime passes it only if the configuration declares the capability for
    /// annotations. Pod labels are set by the owner as well, but API servers can restrict who sets them.
    ///
    /// # Errors
    /// Code 4 if CNI_ARGS does not identify the pod; code 7 for an annotation that is neither "true" nor "false"; codes
    /// 108, 109 and 114 if a selector is configured and the labels cannot be obtained.
    pub fn decide(&self, args: &Args, config: &NetworkConfig, knowledge: Knowledge<'_>) -> Result<Decision, Error> {
        let given = argument(args, "K8S_POD_NAMESPACE", is_label)?;
        let namespace = given
            .or(self.default_namespace.as_deref())
            .ok_or_else(|| missing("K8S_POD_NAMESPACE", DEFAULT_NAMESPACE))?;
        let listed = |list: &[String]| list.iter().any(|n| n == namespace);
        let ours = match &self.namespaces {
            Namespaces::All => true,
            Namespaces::Only(list) => listed(list),
            Namespaces::Except(list) => !listed(list),
        };
        if !ours {
            return Ok(Decision::LeftOut);
        }
        let pod = match given {
            Some(_) => {
                let name = argument(args, "K8S_POD_NAME", is_subdomain)?;
                // Older runtimes do not pass the uid; the CA then looks the pod up by name.
                let uid = argument(args, "K8S_POD_UID", is_uid)?.unwrap_or_default();
                Pod {
                    namespace: namespace.to_owned(),
                    name: name.ok_or_else(|| missing("K8S_POD_NAME", BY_HAND))?.to_owned(),
                    uid: uid.to_owned(),
                }
            }
            None => container(namespace, args, knowledge.container_id)?,
        };
        if self.allows_opt_out && opted_out(config, &pod.namespace, &pod.name)? {
            return Ok(Decision::OptedOut);
        }
        match &self.selectors {
            Some(selectors) if !selectors.select(&pod, knowledge)? => Ok(Decision::LeftOut),
            _ => Ok(Decision::Enrolled(pod)),
        }
    }
}

/// Describes a container that is not a Kubernetes pod as one. Its id is the uid, and also the name if the container's
/// own name is not valid for a pod.
fn container(namespace: &str, args: &Args, id: &str) -> Result<Pod, Error> {
    let name = [args.get("K8S_POD_NAME"), Some(id)].into_iter().flatten().find(|name| is_subdomain(name));
    let name = name.ok_or_else(|| {
        let msg =
            format!("container {:?}: neither its name nor its id is one for a certificate", crate::request::shown(id));
        Error::new(code::ENVIRONMENT, msg).details("names have lower-case letters, digits, '-' and '.'")
    })?;
    let is_fit = id.len() <= MAX_UID_BYTES && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let uid = if is_fit { id.to_owned() } else { format!("{:016x}", fnv1a(&[id])) };
    Ok(Pod { namespace: namespace.to_owned(), name: name.to_owned(), uid })
}

impl Selectors {
    fn select(&self, pod: &Pod, knowledge: Knowledge<'_>) -> Result<bool, Error> {
        let question = Question {
            kubeconfig: self.kubeconfig.clone(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            of_pod: self.pod.is_some(),
            of_namespace: self.namespace.is_some(),
            // The other half is left for the tunnel.
            within_ms: (knowledge.deadline.left(knowledge.clock) / 2).as_millis() as u64,
        };
        let cannot = |code: u32, why: &str, help: &str| {
            let msg = format!("pod {}/{}: cannot decide enrolment: {why}", pod.namespace, pod.name);
            Err(Error::new(code, msg).details(help))
        };
        match knowledge.labels.ask(&(knowledge.program)()?, &question, knowledge.clock) {
            Answer::Labels(labels) => Ok(self.pod.as_ref().is_none_or(|selector| selector.matches(&labels.pod))
                && self.namespace.as_ref().is_none_or(|selector| selector.matches(&labels.namespace))),
            Answer::NoSuchPod => {
                cannot(code::NO_SUCH_POD, "the API server knows no such pod", "it may be deleted already")
            }
            Answer::OtherPod { uid } => cannot(
                code::OTHER_POD,
                &format!("the API server has uid {uid:?} for it"),
                "it was deleted and recreated",
            ),
            Answer::Undecided(why) => cannot(
                code::LABELS_UNAVAILABLE,
                &why,
                "enrol by namespaces or annotations where pods must start without the API server",
            ),
        }
    }
}

fn kubeconfig(config: &NetworkConfig) -> Result<PathBuf, Error> {
    const EXPECTED: &str = "an absolute path: selectors need the API server";
    let value = config.value("kubeconfig")?.unwrap_or_default();
    let path = value.as_str().filter(|path| path.starts_with('/') && !path.contains('\0'));
    path.map(PathBuf::from).ok_or_else(|| refused("kubeconfig", &value, EXPECTED))
}

fn opted_out(config: &NetworkConfig, namespace: &str, name: &str) -> Result<bool, Error> {
    let runtime = config.value("runtimeConfig")?.unwrap_or_default();
    match runtime.get("io.kubernetes.cri.pod-annotations").and_then(|annotations| annotations.get(ANNOTATION)) {
        None => Ok(false),
        Some(Value::String(text)) if text == "true" => Ok(false),
        Some(Value::String(text)) if text == "false" => Ok(true),
        Some(other) => {
            let msg = format!("pod {namespace}/{name}: annotation {ANNOTATION} is {other}: cannot decide enrolment");
            Err(Error::new(code::CONFIG, msg).details("set it to \"true\" or \"false\", or remove it"))
        }
    }
}

fn namespaces(key: &str, value: &Value) -> Result<Vec<String>, Error> {
    const EXPECTED: &str = "a list of namespace names";
    let list = value.as_array().ok_or_else(|| refused(key, value, EXPECTED))?;
    let name = |v: &Value| v.as_str().filter(|n| is_label(n)).map(str::to_owned);
    list.iter().map(|v| name(v).ok_or_else(|| refused(key, v, EXPECTED))).collect()
}

fn argument<'a>(args: &'a Args, key: &str, is_valid: fn(&str) -> bool) -> Result<Option<&'a str>, Error> {
    match args.get(key) {
        Some(value) if !is_valid(value) => {
            let value = crate::request::shown(value);
            Err(Error::new(code::ENVIRONMENT, format!("CNI_ARGS: {key} {value:?} is not a name Kubernetes gives")))
        }
        other => Ok(other),
    }
}

fn missing(key: &str, help: &str) -> Error {
    Error::new(code::ENVIRONMENT, format!("CNI_ARGS holds no {key}: cannot decide enrolment or ask for an identity"))
        .details(help)
}

const BY_HAND: &str = "a runtime for Kubernetes passes it; by hand: CNI_ARGS='K8S_POD_NAMESPACE=NS;K8S_POD_NAME=NAME'";
const DEFAULT_NAMESPACE: &str =
    "a runtime for Kubernetes passes it; for other containers name one with the key \"enrol.defaultNamespace\"";

fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len()) && is_subdomain(text) && !text.contains('.')
}

fn is_subdomain(text: &str) -> bool {
    let alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.len() <= 253
        && text.starts_with(alphanumeric)
        && text.ends_with(alphanumeric)
        && text.chars().all(|c| alphanumeric(c) || c == '-' || c == '.')
}

fn is_uid(text: &str) -> bool {
    text.len() <= 128 && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

// The longest uid that CA services accept; container ids usually have just as many hex digits.
const MAX_UID_BYTES: usize = 64;
/// Annotation of a pod that decides whether it is enrolled.
pub const ANNOTATION: &str = "nebula-cni/enrol";

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::request::{Env, Request, read};
    use nebula_cni_contract::clock::SystemClock;
    use nebula_cni_contract::labels::Labels;

    /// Always gives the same answer.
    struct Fixed(Answer);

    impl LabelSource for Fixed {
        fn ask(&self, _: &Path, _: &Question, _: &dyn Clock) -> Answer {
            self.0.clone()
        }
    }

    fn decide(entry: Value, args: &str) -> Result<Option<Pod>, Error> {
        decide_with(entry, args, Answer::Undecided("nobody was to be asked".to_owned()))
    }

    fn decide_with(entry: Value, args: &str, answer: Answer) -> Result<Option<Pod>, Error> {
        decision(entry, args, answer).map(Decision::pod)
    }

    fn decision(entry: Value, args: &str, answer: Answer) -> Result<Decision, Error> {
        let mut all = json!({"cniVersion": "1.1.0", "name": "n"});
        all.as_object_mut().unwrap().extend(entry.as_object().unwrap().clone());
        let env: Env = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "c"),
            ("CNI_NETNS", "/n"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_ARGS", args),
        ]
        .map(|(k, v)| (k.into(), v.into()))
        .into();
        let Some(Request::Add(add)) = read(&env, all.to_string().as_bytes()).1? else { panic!() };
        let knowledge = Knowledge {
            container_id: "c0ffee",
            labels: &Fixed(answer),
            program: &|| Ok("/bin/true".into()),
            clock: &SystemClock,
            deadline: Deadline::after(&SystemClock, Duration::from_secs(20)),
        };
        Enrolment::read(&add.config)?.decide(&add.args, &add.config, knowledge)
    }

    const WEB: &str = "K8S_POD_UID=u-1;K8S_POD_NAME=web-0;IgnoreUnknown=1;K8S_POD_NAMESPACE=shop";

    #[test]
    fn by_default_every_pod_is_ours() {
        let pod = decide(json!({}), WEB).unwrap().unwrap();
        assert_eq!((pod.namespace.as_str(), pod.name.as_str(), pod.uid.as_str()), ("shop", "web-0", "u-1"));
    }

    #[test]
    fn lists_include_or_exclude_namespaces() {
        assert!(decide(json!({"enrol": {"namespaces": ["shop"]}}), WEB).unwrap().is_some());
        assert!(decide(json!({"enrol": {"namespaces": ["other"]}}), WEB).unwrap().is_none());
        assert!(decide(json!({"enrol": {"namespaces": []}}), WEB).unwrap().is_none());
        assert!(decide(json!({"enrol": {"exceptNamespaces": ["shop"]}}), WEB).unwrap().is_none());
        assert!(decide(json!({"enrol": {"exceptNamespaces": ["other"]}}), WEB).unwrap().is_some());
    }

    #[test]
    fn a_pod_may_stay_out_where_the_operator_allows_it_and_never_come_in() {
        let with = |enrol: Value, annotation: Value| {
            let annotations = json!({"io.kubernetes.cri.pod-annotations": {"nebula-cni/enrol": annotation}});
            let nobody = Answer::Undecided("nobody was to be asked".to_owned());
            decision(json!({"enrol": enrol, "runtimeConfig": annotations}), WEB, nobody)
        };
        let allowed = || json!({"optOut": true});
        assert_eq!(with(allowed(), json!("false")).unwrap(), Decision::OptedOut);
        assert!(matches!(with(allowed(), json!("true")).unwrap(), Decision::Enrolled(_)));
        assert_eq!(with(allowed(), json!("maybe")).unwrap_err().code, 7);
        assert_eq!(with(allowed(), json!(7)).unwrap_err().code, 7);
        for enrol in [json!({}), json!({"optOut": false}), json!({"namespaces": ["shop"]})] {
            for annotation in [json!("false"), json!("true"), json!("maybe"), json!(7)] {
                let decided = with(enrol.clone(), annotation.clone()).unwrap();
                assert!(matches!(decided, Decision::Enrolled(_)), "{enrol} {annotation}");
            }
        }
        for enrol in [json!({"exceptNamespaces": ["shop"]}), json!({"exceptNamespaces": ["shop"], "optOut": true})] {
            assert_eq!(with(enrol, json!("true")).unwrap(), Decision::LeftOut);
        }
        assert_eq!(with(json!({"optOut": "yes"}), json!("false")).unwrap_err().code, 7);
    }

    #[test]
    fn selectors_of_pod_and_namespace_must_both_match() {
        let enrol = json!({"enrol": {"podSelector": {"matchLabels": {"app": "web"}},
            "namespaceSelector": {"matchLabels": {"mesh": "on"}}}, "kubeconfig": "/k"});
        let labels = |app: &str, mesh: &str| {
            let one = |key: &str, value: &str| [(key.to_owned(), value.to_owned())].into();
            Answer::Labels(Labels { pod: one("app", app), namespace: one("mesh", mesh) })
        };
        assert!(decide_with(enrol.clone(), WEB, labels("web", "on")).unwrap().is_some());
        assert!(decide_with(enrol.clone(), WEB, labels("db", "on")).unwrap().is_none());
        assert!(decide_with(enrol.clone(), WEB, labels("web", "off")).unwrap().is_none());
        let mut except = enrol;
        except["enrol"]["exceptNamespaces"] = json!(["shop"]);
        assert!(decide(except, WEB).unwrap().is_none(), "a namespace that is out is not looked up");
    }

    #[test]
    fn without_an_answer_of_the_api_server_there_is_no_decision() {
        let enrol = || json!({"enrol": {"podSelector": {}}, "kubeconfig": "/k"});
        for (answer, code) in [
            (Answer::NoSuchPod, 108),
            (Answer::OtherPod { uid: "u-2".to_owned() }, 109),
            (Answer::Undecided("cannot ask https://api: refused".to_owned()), 114),
        ] {
            let error = decide_with(enrol(), WEB, answer).unwrap_err();
            assert_eq!(error.code, code);
            assert!(error.msg.contains("shop/web-0"), "{error}");
        }
        assert_eq!(decide(json!({"enrol": {"podSelector": {}}}), WEB).unwrap_err().code, 7);
        assert_eq!(decide(json!({"enrol": {"podSelector": {}}, "kubeconfig": "k"}), WEB).unwrap_err().code, 7);
    }

    #[test]
    fn containers_of_runtimes_that_know_no_pods_get_the_default_namespace() {
        let enrol = || json!({"enrol": {"defaultNamespace": "edge"}});
        let named = |args: &str| {
            let pod = decide(enrol(), args).unwrap().unwrap();
            (pod.namespace, pod.name, pod.uid)
        };
        let expected = |namespace: &str, name: &str, uid: &str| (namespace.into(), name.into(), uid.into());
        assert_eq!(named(""), expected("edge", "c0ffee", "c0ffee"));
        assert_eq!(named("IgnoreUnknown=1;K8S_POD_NAME=db"), expected("edge", "db", "c0ffee"));
        assert_eq!(named("K8S_POD_NAME=quirky_hopper"), expected("edge", "c0ffee", "c0ffee"), "no name of a pod");
        assert_eq!(named(WEB), expected("shop", "web-0", "u-1"));
        assert_eq!(decide(enrol(), "K8S_POD_NAMESPACE=shop").unwrap_err().code, 4, "a pod is not known by its id");
        let except = json!({"enrol": {"defaultNamespace": "edge", "exceptNamespaces": ["edge"]}});
        assert!(decide(except, "").unwrap().is_none());
        assert_eq!(decide(json!({"enrol": {"defaultNamespace": "A b"}}), "").unwrap_err().code, 7);
    }

    #[test]
    fn a_container_s_uid_is_one_that_the_ca_takes() {
        let of = |id: &str| container("edge", &Args::default(), id).map(|pod| (pod.name, pod.uid));
        assert_eq!(of(&"ab".repeat(32)).unwrap().1, "ab".repeat(32));
        let (name, uid) = of("default-my.app").unwrap();
        assert_eq!((name.as_str(), uid.len()), ("default-my.app", 16), "a dot is not for a uid");
        assert_ne!(of("default-my.app").unwrap().1, of("default-my.apq").unwrap().1);
        assert_eq!(of("My_App").unwrap_err().code, 4);
    }

    #[test]
    fn what_cannot_be_decided_is_an_error() {
        assert_eq!(decide(json!({"enrol": {"exceptNamespaces": ["x"]}}), "K8S_POD_NAME=web").unwrap_err().code, 4);
        assert_eq!(decide(json!({}), "K8S_POD_NAMESPACE=shop").unwrap_err().code, 4);
        assert_eq!(decide(json!({}), "").unwrap_err().code, 4);
    }

    #[test]
    fn names_kubernetes_never_gives_are_refused() {
        for args in [
            "K8S_POD_NAMESPACE=Shop;K8S_POD_NAME=a",
            "K8S_POD_NAMESPACE=a.b;K8S_POD_NAME=a",
            "K8S_POD_NAMESPACE=a;K8S_POD_NAME=../x",
            "K8S_POD_NAMESPACE=a;K8S_POD_NAME=a;K8S_POD_UID=x y",
        ] {
            assert_eq!(decide(json!({}), args).unwrap_err().code, 4, "{args}");
        }
    }

    #[test]
    fn the_two_lists_exclude_each_other_and_hold_names() {
        for enrol in [
            json!({"namespaces": [], "exceptNamespaces": []}),
            json!({"namespaces": "a"}),
            json!({"namespaces": [7]}),
            json!({"namespaces": ["A"]}),
            json!(true),
        ] {
            assert_eq!(decide(json!({ "enrol": enrol }), WEB).unwrap_err().code, 7, "{enrol}");
        }
    }
}
