//! Checks that the API server understands the manifests in `deploy/kubernetes` and those rendered from the chart: every
//! field in them belongs to its type.
#![cfg(feature = "kubernetes")]

mod admission;
mod rights;

use std::path::{Path, PathBuf};

use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::admissionregistration::v1alpha1::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{
    ConfigMap, Namespace, PersistentVolumeClaim, Pod, ResourceQuota, Service, ServiceAccount,
};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(path)
}

fn documents(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(deploy(path)).expect("a manifest");
    let read: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    read.into_iter().filter(|document| !document.is_null()).collect()
}

/// Fields that do not belong to the type, or have a value of another type.
fn mistakes<T: DeserializeOwned + Serialize>(document: &Value) -> Vec<String> {
    match serde_json::from_value::<T>(document.clone()) {
        Err(error) => vec![error.to_string()],
        Ok(read) => {
            let mut lost = Vec::new();
            missing(document, &serde_json::to_value(read).expect("JSON"), "", &mut lost);
            lost
        }
    }
}

fn missing(written: &Value, read: &Value, at: &str, lost: &mut Vec<String>) {
    match (written, read) {
        (Value::Object(written), Value::Object(read)) => {
            for (key, value) in written {
                missing(value, read.get(key).unwrap_or(&Value::Null), &format!("{at}.{key}"), lost);
            }
        }
        (Value::Array(written), Value::Array(read)) if written.len() == read.len() => {
            for (index, (written, read)) in written.iter().zip(read).enumerate() {
                missing(written, read, &format!("{at}[{index}]"), lost);
            }
        }
        // An empty list or map may be dropped.
        (Value::Array(list), Value::Null) if list.is_empty() => {}
        _ if written == read => {}
        _ => lost.push(at.to_owned()),
    }
}

fn check(document: &Value) -> Vec<String> {
    let text = |key: &str| document[key].as_str().expect("every manifest has a kind").to_owned();
    match (text("apiVersion").as_str(), text("kind").as_str()) {
        ("v1", "Namespace") => mistakes::<Namespace>(document),
        ("v1", "Pod") => mistakes::<Pod>(document),
        ("v1", "Service") => mistakes::<Service>(document),
        ("v1", "ServiceAccount") => mistakes::<ServiceAccount>(document),
        ("v1", "ConfigMap") => mistakes::<ConfigMap>(document),
        ("v1", "PersistentVolumeClaim") => mistakes::<PersistentVolumeClaim>(document),
        ("v1", "ResourceQuota") => mistakes::<ResourceQuota>(document),
        ("apps/v1", "Deployment") => mistakes::<Deployment>(document),
        ("apps/v1", "DaemonSet") => mistakes::<DaemonSet>(document),
        ("apps/v1", "StatefulSet") => mistakes::<StatefulSet>(document),
        ("batch/v1", "Job") => mistakes::<Job>(document),
        ("policy/v1", "PodDisruptionBudget") => mistakes::<PodDisruptionBudget>(document),
        ("networking.k8s.io/v1", "NetworkPolicy") => mistakes::<NetworkPolicy>(document),
        ("rbac.authorization.k8s.io/v1", "ClusterRole") => mistakes::<ClusterRole>(document),
        ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => mistakes::<ClusterRoleBinding>(document),
        ("rbac.authorization.k8s.io/v1", "Role") => mistakes::<Role>(document),
        ("rbac.authorization.k8s.io/v1", "RoleBinding") => mistakes::<RoleBinding>(document),
        ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy") => {
            mistakes::<ValidatingAdmissionPolicy>(document)
        }
        ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding") => {
            mistakes::<ValidatingAdmissionPolicyBinding>(document)
        }
        // The available types are those of 1.33, whose fields are the same as those of 1.36.
        ("admissionregistration.k8s.io/v1", kind) => {
            let mut older = document.clone();
            older["apiVersion"] = json!("admissionregistration.k8s.io/v1alpha1");
            match kind {
                "MutatingAdmissionPolicy" => mistakes::<MutatingAdmissionPolicy>(&older),
                "MutatingAdmissionPolicyBinding" => mistakes::<MutatingAdmissionPolicyBinding>(&older),
                _ => vec![format!("no type for {kind}")],
            }
        }
        (version, kind) => vec![format!("no type for {version} {kind}")],
    }
}

/// Everything that the chart made, and what was written by hand.
const ALL: [&str; 12] = [
    NEBULA,
    NEBULA_CAPTURE,
    REPLICAS,
    UNINSTALL,
    EVERY_OPTION,
    OUTSIDE,
    CAPTURE,
    PRIMARY,
    NAMESPACE,
    INJECTION,
    POD,
    PROXY,
];
const NEBULA: &str = "kubernetes/nebula.yaml";
/// The same with capture.
const NEBULA_CAPTURE: &str = "kubernetes/nebula-capture.yaml";
const REPLICAS: &str = "kubernetes/nebula-replicas.yaml";
const UNINSTALL: &str = "kubernetes/uninstall.yaml";
const NAMESPACE: &str = "kubernetes/namespace.yaml";
const INJECTION: &str = "kubernetes/injection.yaml";
const POD: &str = "kubernetes/pod.yaml";
const PROXY: &str = "kubernetes/proxy.yaml";
/// Rendered from `.ci/chart/values.yaml`.
const EVERY_OPTION: &str = "../.ci/chart/other.yaml";
/// Rendered from `.ci/chart/outside-values.yaml`: CA and lighthouses are not part of the installation.
const OUTSIDE: &str = "../.ci/chart/outside.yaml";
/// Rendered from `.ci/chart/capture-values.yaml`.
const CAPTURE: &str = "../.ci/chart/capture.yaml";
/// Rendered from `.ci/chart/primary-values.yaml`.
const PRIMARY: &str = "../.ci/chart/primary.yaml";

/// The object of this kind and name.
fn object(path: &str, kind: &str, name: &str) -> Option<Value> {
    documents(path).into_iter().find(|document| document["kind"] == kind && document["metadata"]["name"] == name)
}

/// The specification of the pods that an object makes.
fn pod_of(path: &str, kind: &str, name: &str) -> Value {
    object(path, kind, name).expect("the manifest has it")["spec"]["template"]["spec"].clone()
}

/// A JSON text in a ConfigMap.
fn text_of(path: &str, name: &str, key: &str) -> String {
    let map = object(path, "ConfigMap", name).expect("the manifest has it");
    map["data"][key].as_str().expect("the key is there").to_owned()
}

fn containers(pod: &Value) -> Vec<Value> {
    let of = |key: &str| pod[key].as_array().cloned().unwrap_or_default();
    of("initContainers").into_iter().chain(of("containers")).collect()
}

/// The rules of every role in the manifests, with the role's name.
fn rules() -> Vec<(String, Value)> {
    let mut rules = Vec::new();
    for document in ALL.iter().flat_map(|path| documents(path)) {
        if document["kind"] == "ClusterRole" || document["kind"] == "Role" {
            let name = document["metadata"]["name"].as_str().expect("a name");
            rules.extend(
                document["rules"].as_array().expect("rules").iter().map(|rule| (name.to_owned(), rule.clone())),
            );
        }
    }
    rules
}

fn has(list: &Value, text: &str) -> bool {
    list.as_array().is_some_and(|list| list.iter().any(|item| item == text))
}

#[test]
fn every_field_of_every_manifest_is_known_to_the_api() {
    let mut count = 0;
    for path in ALL {
        for document in documents(path) {
            let wrong = check(&document);
            assert!(wrong.is_empty(), "{path}, {} {}: {wrong:?}", document["kind"], document["metadata"]["name"]);
            count += 1;
        }
    }
    assert!(count >= 90, "{count} documents");
}

#[test]
fn with_capture_certificates_are_for_the_addresses_of_pods() {
    let policy: Value = serde_json::from_str(&text_of(CAPTURE, "nebula-ca", "policy.jsonc")).expect("JSON");
    assert_eq!(policy["pods"]["address"], "same");
    assert_eq!(policy["pods"]["overlay"], json!(["10.244.0.0/16", "fd00:10:244::/48"]));
    let agent: Value = serde_json::from_str(&text_of(CAPTURE, "nebula-cni-agent", "agent.json")).expect("JSON");
    assert_eq!(agent["entry"]["overlay"], policy["pods"]["overlay"]);
    assert!(agent["entry"]["capture"].is_object());
}

#[test]
fn values_of_the_chart_reach_its_objects_and_what_is_switched_off_is_not_made() {
    assert!(object(EVERY_OPTION, "PersistentVolumeClaim", "nebula-ca").is_none());
    let deployment = object(EVERY_OPTION, "Deployment", "nebula-ca").expect("a deployment");
    assert_eq!(deployment["metadata"]["namespace"], "other");
    let pod = &deployment["spec"]["template"]["spec"];
    assert_eq!(pod["nodeSelector"], json!({"disktype": "ssd"}));
    assert_eq!(pod["tolerations"], json!([{"key": "dedicated", "operator": "Exists"}]));
    let volumes = pod["volumes"].as_array().expect("volumes");
    assert!(volumes.iter().any(|volume| volume["persistentVolumeClaim"]["claimName"] == "present"));
    for container in containers(pod) {
        for name in ["nebula-ca.other.svc", "ca.example", "192.0.2.1"] {
            assert!(has(&container["args"], &format!("--tls-name={name}")), "{name} in {}", container["name"]);
        }
    }
    for kind in ["Deployment", "StatefulSet", "DaemonSet", "Role", "NetworkPolicy"] {
        let made = documents(OUTSIDE).into_iter().filter(|document| document["kind"] == kind);
        let names: Vec<_> = made.map(|document| document["metadata"]["name"].clone()).collect();
        assert!(
            !names.contains(&json!("nebula-ca")) && !names.contains(&json!("nebula-lighthouse")),
            "{kind}: {names:?}"
        );
    }
}

#[test]
fn images_come_from_the_mirror_that_the_values_name() {
    let mut count = 0;
    for document in documents(EVERY_OPTION) {
        for container in containers(&document["spec"]["template"]["spec"]) {
            let image = container["image"].as_str().expect("an image");
            let (tag, digest) = image.split_once('@').unwrap_or((image, ""));
            let is_ours = tag.starts_with("registry.example/nebula/nebula") && tag.ends_with(":7");
            // One of the images has a digest in these values.
            assert_eq!(digest.starts_with("sha256:"), tag.ends_with("/nebula-ca:7"), "{image}");
            assert!(is_ours || image.starts_with("registry.k8s.io/"), "{image}");
            count += usize::from(is_ours);
        }
    }
    assert_eq!(count, 8, "init and service of the CA, two of a lighthouse, agent, uninstallation, two of the check");
}

#[test]
fn a_misspelt_field_is_noticed() {
    let written = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "a", "imagePullPolice": "Always"}]}});
    assert_eq!(check(&written), [".spec.containers[0].imagePullPolice"]);
}

#[test]
fn every_policy_that_the_chart_makes_is_one_that_the_service_takes() {
    for path in [NEBULA, REPLICAS, EVERY_OPTION, PRIMARY] {
        let policy = text_of(path, "nebula-ca", "policy.jsonc");
        nebula_ca::Policy::parse(&policy).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

#[test]
fn before_anything_is_replaced_the_new_programs_read_what_they_will_be_given() {
    let job = object(EVERY_OPTION, "Job", "nebula-check").expect("a hook");
    assert_eq!(job["spec"]["backoffLimit"], 0, "the same mistake again and again");
    let checks: Vec<_> = containers(&job["spec"]["template"]["spec"]).iter().map(|one| one["args"].clone()).collect();
    let file = |name| format!("/etc/nebula-check/{name}");
    assert_eq!(
        checks,
        [
            json!(["policy", "check", file("policy.jsonc")]),
            json!(["check", format!("--config={}", file("agent.json"))])
        ]
    );
    assert_eq!(
        text_of(EVERY_OPTION, "nebula-check", "policy.jsonc"),
        text_of(EVERY_OPTION, "nebula-ca", "policy.jsonc")
    );
    assert_eq!(
        text_of(EVERY_OPTION, "nebula-check", "agent.json"),
        text_of(EVERY_OPTION, "nebula-cni-agent", "agent.json")
    );

    let folder = tempfile::tempdir().expect("a folder");
    let said = |policy: &str| {
        let file = folder.path().join("policy.jsonc");
        std::fs::write(&file, policy).expect("write the policy");
        let mut check = std::process::Command::new(env!("CARGO_BIN_EXE_nebula-ca"));
        let output = check.args(["policy", "check"]).arg(&file).output().expect("nebula-ca runs");
        (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let policy = text_of(EVERY_OPTION, "nebula-ca", "policy.jsonc");
    assert!(said(&policy).0, "{:?}", said(&policy));
    let (is_taken, text) = said(&policy.replace("\"groups\"", "\"group\""));
    assert!(!is_taken && text.contains("`group`") && text.contains("policy.jsonc"), "{text}");
}

#[test]
fn the_accounts_of_the_policy_are_those_that_agents_lighthouses_and_gateways_run_as() {
    for (path, namespace) in [(NEBULA, "nebula-system"), (EVERY_OPTION, "other"), (PRIMARY, "nebula-system")] {
        let policy: Value = serde_json::from_str(&text_of(path, "nebula-ca", "policy.jsonc")).expect("JSON");
        let gateways = (&policy["gateways"]["account"], "DaemonSet", "nebula-gateway");
        assert_eq!(object(path, "DaemonSet", "nebula-gateway").is_some(), path == PRIMARY);
        let accounts = [
            (&policy["kubernetes"]["node_account"], "DaemonSet", "nebula-cni-agent"),
            (&policy["lighthouses"]["account"], "StatefulSet", "nebula-lighthouse"),
        ];
        for (account, kind, name) in accounts.into_iter().chain((path == PRIMARY).then_some(gateways)) {
            let pod = pod_of(path, kind, name);
            let runs_as = pod["serviceAccountName"].as_str().expect("an account");
            assert_eq!(account, &json!(format!("{namespace}/{runs_as}")), "{path}");
            assert!(object(path, "ServiceAccount", runs_as).is_some(), "{path}: {runs_as}");
            let volumes = pod["volumes"].as_array().expect("volumes").clone();
            let token =
                volumes.iter().find_map(|volume| volume["projected"]["sources"][0]["serviceAccountToken"].as_object());
            assert_eq!(token.expect("a token of its own")["audience"], policy["kubernetes"]["audience"], "{path}");
        }
        assert_eq!(policy["kubernetes"]["trust_config_map"], format!("{namespace}/nebula-trust"));
    }
}

#[test]
fn an_upgrade_leaves_alone_what_the_ca_wrote_into_the_trust() {
    for path in [NEBULA, REPLICAS, EVERY_OPTION] {
        let trust = object(path, "ConfigMap", "nebula-trust").expect("the ConfigMap");
        assert!(trust["data"].is_null(), "{path}: {trust}");
    }
    assert!(text_of(OUTSIDE, "nebula-trust", "tls.crt").starts_with("-----BEGIN"), "a CA outside cannot write it");
    assert!(text_of(OUTSIDE, "nebula-trust", "ca.crt").starts_with("-----BEGIN"));
}

#[test]
fn the_agent_is_told_where_the_ca_is_and_whom_to_enrol_and_never_the_namespace_of_the_ca() {
    let agent =
        |path| -> Value { serde_json::from_str(&text_of(path, "nebula-cni-agent", "agent.json")).expect("JSON") };
    let [nebula, every, outside] = [NEBULA, EVERY_OPTION, OUTSIDE].map(agent);
    assert_eq!(nebula["ca"], json!({"service": "nebula-system/nebula-ca", "port": 8443}));
    assert_eq!(outside["ca"], json!({"url": "https://203.0.113.9:8443", "serverName": "ca.example"}));
    assert_eq!(nebula["entry"]["enrol"], json!({"namespaces": []}), "nothing is enrolled before somebody says so");
    assert_eq!(every["entry"]["enrol"], json!({"namespaces": ["shop", "pay"], "optOut": true}));
    assert_eq!(outside["entry"]["enrol"], json!({"exceptNamespaces": ["kube-system", "other", "monitoring"]}));
    assert_eq!(every["entry"]["nebula"]["relay"]["relays"], json!(["10.8.255.7", "10.8.255.8", "10.8.255.9"]));
    assert_eq!(nebula["entry"]["nebula"]["relay"]["relays"], json!(["10.77.255.1", "10.77.255.2"]));
    assert_eq!(outside["entry"]["nebula"]["lighthouse"]["hosts"], json!(["10.77.254.1"]));
    for agent in [nebula, every, outside] {
        for key in ["type", "ca", "stateDir", "name", "cniVersion"] {
            assert!(agent["entry"][key].is_null(), "{key} is the agent's to set");
        }
    }
}

#[test]
fn the_agent_runs_on_every_node_and_its_chain_is_never_called_for_it() {
    for (path, name) in [(NEBULA, "nebula-cni-agent"), (UNINSTALL, "nebula-cni-uninstall")] {
        let pod = pod_of(path, "DaemonSet", name);
        assert_eq!(pod["hostNetwork"], true);
        assert_eq!(pod["tolerations"], json!([{"operator": "Exists"}]));
        assert_eq!(pod["priorityClassName"], "system-node-critical");
    }
    let text = pod_of(UNINSTALL, "DaemonSet", "nebula-cni-uninstall").to_string();
    assert!(!text.contains("nebula-trust") && !text.contains("serviceAccountToken"), "it works without a CA");
}

#[test]
fn only_agent_and_gateway_are_privileged_and_all_others_have_no_capability_and_no_root() {
    for path in ALL {
        for document in documents(path) {
            let name = document["metadata"]["name"].as_str().expect("a name");
            let pod = &document["spec"]["template"]["spec"];
            let may = ["nebula-cni-agent", "nebula-cni-uninstall", "nebula-gateway"].contains(&name);
            for container in containers(pod) {
                let context = &container["securityContext"];
                assert_eq!(context["readOnlyRootFilesystem"], true, "{path}, {name}: {container}");
                // The gateway's init container, which speaks to the CA, is not. It is root, as the daemon that goes
                // on with its files.
                if may && context["privileged"] == true && container["name"] != "enrol" {
                    continue;
                }
                assert!(
                    context["privileged"].is_null() && context["allowPrivilegeEscalation"] == false,
                    "{path}, {name}"
                );
                assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}), "{path}, {name}");
                let is_root = name == "nebula-gateway" && context["runAsUser"] == 0;
                assert!(
                    is_root || pod["securityContext"]["runAsNonRoot"] == true || context["runAsNonRoot"] == true,
                    "{path}, {name}"
                );
            }
        }
    }
}

#[test]
fn no_role_mints_tokens_reads_secrets_or_has_a_wildcard() {
    let rules = rules();
    assert!(rules.len() >= 20, "{}", rules.len());
    for (role, rule) in rules {
        for key in ["apiGroups", "resources", "verbs"] {
            assert!(!has(&rule[key], "*"), "{role}: {rule}");
        }
        for resource in ["secrets", "serviceaccounts/token", "pods/exec", "nodes/proxy", "roles", "clusterroles"] {
            assert!(!has(&rule["resources"], resource), "{role}: {rule}");
        }
        for verb in ["escalate", "bind", "impersonate", "deletecollection"] {
            assert!(!has(&rule["verbs"], verb), "{role}: {rule}");
        }
    }
}

#[test]
fn the_agent_may_evict_label_and_taint_only_where_the_values_ask_for_it() {
    let may = |path: &str, resource: &str, verb: &str| {
        let role = object(path, "ClusterRole", "nebula-cni-agent").expect("a role");
        let rules = role["rules"].as_array().expect("rules").clone();
        rules.iter().any(|rule| has(&rule["resources"], resource) && has(&rule["verbs"], verb))
    };
    for (path, label, evict, taint) in
        [(NEBULA, false, false, false), (EVERY_OPTION, true, false, true), (OUTSIDE, false, true, false)]
    {
        assert_eq!(may(path, "pods", "patch"), label, "{path}");
        assert_eq!(may(path, "pods/eviction", "create"), evict, "{path}");
        assert_eq!(may(path, "nodes", "patch"), taint, "{path}");
        assert!(!may(path, "nodes", "delete") && !may(path, "nodes", "update"), "{path}");
        assert!(may(path, "pods", "list") && !may(path, "pods", "delete"), "{path}");
    }
}

#[test]
fn lighthouses_and_gateways_have_no_right_at_the_api_server_and_a_node_each() {
    let gateway = pod_of(PRIMARY, "DaemonSet", "nebula-gateway");
    assert_eq!(gateway["automountServiceAccountToken"], false);
    assert!(!documents(PRIMARY).into_iter().any(|document| has_subject(&document, "nebula-gateway")));
    let pod = pod_of(NEBULA, "StatefulSet", "nebula-lighthouse");
    assert_eq!(pod["automountServiceAccountToken"], false);
    let bound = documents(NEBULA).into_iter().any(|document| has_subject(&document, "nebula-lighthouse"));
    assert!(!bound, "no binding names the account");
    let apart = &pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0];
    assert_eq!(apart["topologyKey"], "kubernetes.io/hostname");
    assert_eq!(pod["hostNetwork"], true);
}

fn has_subject(document: &Value, account: &str) -> bool {
    document["subjects"].as_array().is_some_and(|list| list.iter().any(|subject| subject["name"] == account))
}

#[test]
fn replicas_are_spread_survive_the_end_of_a_node_and_have_their_keys_in_a_secret() {
    let deployment = object(REPLICAS, "Deployment", "nebula-ca").expect("a deployment");
    assert_eq!(deployment["spec"]["replicas"], 2);
    assert_eq!(deployment["spec"]["strategy"]["type"], "RollingUpdate");
    let pod = &deployment["spec"]["template"]["spec"];
    assert_eq!(pod["topologySpreadConstraints"][0]["topologyKey"], "kubernetes.io/hostname");
    assert!(object(REPLICAS, "PersistentVolumeClaim", "nebula-ca").is_none() && pod["initContainers"].is_null());
    let budget = object(REPLICAS, "PodDisruptionBudget", "nebula-ca").expect("a budget");
    assert_eq!(budget["spec"]["maxUnavailable"], 1);
    let mounts = pod["containers"][0]["volumeMounts"].as_array().expect("mounts");
    let secret: Vec<&str> =
        mounts.iter().filter(|mount| mount["name"] == "secret").filter_map(|mount| mount["subPath"].as_str()).collect();
    assert_eq!(secret, ["ca.crt", "ca.key", "tls.crt", "tls.key", "renewal.key", "database.url"]);
}

#[test]
fn the_service_may_do_what_it_needs_and_nothing_else() {
    let role = object(NEBULA, "ClusterRole", "nebula-ca").expect("a role");
    assert_eq!(
        role["rules"],
        json!([
            {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
        ])
    );
    let role = object(NEBULA, "Role", "nebula-ca").expect("a role");
    assert_eq!(
        role["rules"],
        json!([{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["nebula-trust"],
            "verbs": ["get", "patch", "create"]}])
    );
}

#[test]
fn the_init_container_makes_a_ca_and_leaves_one_alone_that_is_there() {
    let pod = pod_of(NEBULA, "Deployment", "nebula-ca");
    let folder = tempfile::tempdir().expect("a temporary directory");
    let directory = folder.path().join("ca");
    let arguments: Vec<String> = pod["initContainers"][0]["args"]
        .as_array()
        .expect("arguments")
        .iter()
        .map(|argument| argument.as_str().expect("text"))
        .map(|text| if text.starts_with("--dir=") { format!("--dir={}", directory.display()) } else { text.to_owned() })
        .collect();
    let run = || {
        let status = std::process::Command::new(env!("CARGO_BIN_EXE_nebula-ca")).args(&arguments).status();
        assert!(status.expect("nebula-ca runs").success());
        std::fs::read(directory.join("ca.crt")).expect("a certificate of the CA")
    };
    let made = run();
    assert!(run() == made, "another CA took the place of the first");
}
