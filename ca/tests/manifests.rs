//! Checks that the API server understands the manifests in `deploy/kubernetes` and those rendered from the chart: every
//! field in them belongs to its type.
#![cfg(feature = "kubernetes")]

use std::path::{Path, PathBuf};

use k8s_openapi::api::admissionregistration::v1alpha1::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolumeClaim, Pod, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
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
        ("apps/v1", "Deployment") => mistakes::<Deployment>(document),
        ("policy/v1", "PodDisruptionBudget") => mistakes::<PodDisruptionBudget>(document),
        ("networking.k8s.io/v1", "NetworkPolicy") => mistakes::<NetworkPolicy>(document),
        ("rbac.authorization.k8s.io/v1", "ClusterRole") => mistakes::<ClusterRole>(document),
        ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => mistakes::<ClusterRoleBinding>(document),
        // The available types are those of 1.33, whose fields are the same.
        ("admissionregistration.k8s.io/v1beta1", kind) => {
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

#[test]
fn every_field_of_every_manifest_is_known_to_the_api() {
    let mut count = 0;
    let files = ["namespace", "nebula-ca", "nebula-ca-replicas", "injection", "pod"];
    for path in files.map(|name| format!("kubernetes/{name}.yaml")).iter().map(String::as_str).chain([OTHER_VALUES]) {
        for document in documents(path) {
            let wrong = check(&document);
            assert!(wrong.is_empty(), "{path}, {} {}: {wrong:?}", document["kind"], document["metadata"]["name"]);
            count += 1;
        }
    }
    assert!(count >= 28, "{count} documents");
}

/// The manifests that the chart renders from `.ci/chart/values.yaml`.
const OTHER_VALUES: &str = "../.ci/chart/other.yaml";

#[test]
fn values_of_the_chart_reach_its_objects_and_what_is_switched_off_is_not_made() {
    let documents = documents(OTHER_VALUES);
    let of_kind = |kind: &str| documents.iter().find(|document| document["kind"] == kind);
    assert!(of_kind("NetworkPolicy").is_none() && of_kind("PersistentVolumeClaim").is_none());
    let deployment = of_kind("Deployment").expect("a deployment");
    assert_eq!(deployment["metadata"]["namespace"], "other");
    let pod = &deployment["spec"]["template"]["spec"];
    assert_eq!(pod["nodeSelector"], json!({"disktype": "ssd"}));
    assert_eq!(pod["tolerations"], json!([{"key": "dedicated", "operator": "Exists"}]));
    let volumes = pod["volumes"].as_array().expect("volumes");
    assert!(volumes.iter().any(|volume| volume["persistentVolumeClaim"]["claimName"] == "present"));
    let arguments = pod["initContainers"][0]["args"].as_array().expect("arguments");
    for name in ["nebula-ca.other.svc", "ca.example", "192.0.2.1"] {
        assert!(arguments.iter().any(|argument| *argument == format!("--tls-name={name}")), "{name}");
    }
}

#[test]
fn a_misspelt_field_is_noticed() {
    let written = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "a", "imagePullPolice": "Always"}]}});
    assert_eq!(check(&written), [".spec.containers[0].imagePullPolice"]);
}

#[test]
fn the_policy_in_the_manifest_is_one_that_the_service_takes() {
    let policy = documents("kubernetes/nebula-ca.yaml")
        .into_iter()
        .find_map(|document| Some(document["data"]["policy.jsonc"].as_str()?.to_owned()))
        .expect("a policy");
    nebula_ca::Policy::parse(&policy).expect("the policy is valid");
}

#[test]
fn replicas_are_spread_survive_the_end_of_a_node_and_have_their_keys_in_a_secret() {
    let documents = documents("kubernetes/nebula-ca-replicas.yaml");
    let of_kind = |kind: &str| documents.iter().find(|document| document["kind"] == kind);
    let deployment = of_kind("Deployment").expect("a deployment");
    assert_eq!(deployment["spec"]["replicas"], 2);
    assert_eq!(deployment["spec"]["strategy"]["type"], "RollingUpdate");
    let pod = &deployment["spec"]["template"]["spec"];
    assert_eq!(pod["topologySpreadConstraints"][0]["topologyKey"], "kubernetes.io/hostname");
    assert!(of_kind("PersistentVolumeClaim").is_none() && pod["initContainers"].is_null());
    assert_eq!(of_kind("PodDisruptionBudget").expect("a budget")["spec"]["maxUnavailable"], 1);
    let mounts = pod["containers"][0]["volumeMounts"].as_array().expect("mounts");
    let secret: Vec<&str> =
        mounts.iter().filter(|mount| mount["name"] == "secret").filter_map(|mount| mount["subPath"].as_str()).collect();
    assert_eq!(secret, ["ca.crt", "ca.key", "tls.crt", "tls.key", "renewal.key", "database.url"]);
}

#[test]
fn the_service_may_do_what_it_needs_and_nothing_else() {
    let role = documents("kubernetes/nebula-ca.yaml")
        .into_iter()
        .find(|document| document["kind"] == "ClusterRole")
        .expect("a role");
    assert_eq!(
        role["rules"],
        json!([
            {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
        ])
    );
}

#[test]
fn the_init_container_makes_a_ca_and_leaves_one_alone_that_is_there() {
    let deployment = documents("kubernetes/nebula-ca.yaml")
        .into_iter()
        .find(|document| document["kind"] == "Deployment")
        .expect("a deployment");
    let folder = tempfile::tempdir().expect("a temporary directory");
    let directory = folder.path().join("ca");
    let arguments: Vec<String> = deployment["spec"]["template"]["spec"]["initContainers"][0]["args"]
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
