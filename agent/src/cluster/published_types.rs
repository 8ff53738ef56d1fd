//! Holds the objects of the fake API server against the published API of Kubernetes: the types of k8s-openapi, which
//! are made from its OpenAPI documents.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Endpoints, Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::networking::v1::{NetworkPolicy, ServiceCIDR};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Panics if the object, or a part of one, at a path is not of the type that the API has there.
pub(super) fn hold(path: &str, object: &Value) {
    let mut segments = path.trim_end_matches("/status").rsplit('/').skip(1);
    let mistake = match segments.next() {
        Some("endpoints") => mistake_as::<Endpoints>(object),
        Some("endpointslices") => mistake_as::<EndpointSlice>(object),
        Some("events") => mistake_as::<Event>(object),
        Some("leases") => mistake_as::<Lease>(object),
        Some("namespaces") => mistake_as::<Namespace>(object),
        Some("networkpolicies") => mistake_as::<NetworkPolicy>(object),
        Some("nodes") => mistake_as::<Node>(object),
        Some("pods") => mistake_as::<Pod>(object),
        Some("servicecidrs") => mistake_as::<ServiceCIDR>(object),
        Some("services") => mistake_as::<Service>(object),
        _ => None,
    };
    assert_eq!(mistake, None, "{path}: {object}");
}

fn mistake_as<T: DeserializeOwned + Serialize>(object: &Value) -> Option<String> {
    let mut object = object.clone();
    remove_nulls(&mut object);
    match T::deserialize(&object) {
        Ok(typed) => mistake_at("", &object, &serde_json::to_value(typed).unwrap()),
        Err(error) => Some(error.to_string()),
    }
}

/// In a merge patch, fields that are to be removed.
fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

/// What the type did not keep of a value: a field that it does not have, or a value that it reads as another one.
fn mistake_at(at: &str, value: &Value, kept: &Value) -> Option<String> {
    match (value, kept) {
        (Value::Object(fields), Value::Object(_)) => {
            fields.iter().find_map(|(key, field)| mistake_at(&format!("{at}.{key}"), field, &kept[key]))
        }
        (Value::Array(items), Value::Array(others)) if items.len() == others.len() => {
            items.iter().zip(others).find_map(|(item, other)| mistake_at(&format!("{at}[]"), item, other))
        }
        // The crate leaves these out.
        (Value::Array(items), Value::Null) if items.is_empty() => None,
        _ => (value != kept).then(|| format!("{at} is {value}, and the type keeps {kept}")),
    }
}

#[test]
fn fields_that_the_api_does_not_have_and_values_of_another_kind_are_mistakes() {
    let pod = |spec: Value| mistake_as::<Pod>(&serde_json::json!({"metadata": {"name": "a"}, "spec": spec}));
    let containers = |more: Value| serde_json::json!({"containers": [{"name": "a", "ports": [more]}]});
    assert_eq!(pod(containers(serde_json::json!({"containerPort": 53}))), None);
    let mistake = pod(containers(serde_json::json!({"containerPort": 53, "protocoll": "UDP"}))).unwrap();
    assert_eq!(mistake, r#".spec.containers[].ports[].protocoll is "UDP", and the type keeps null"#);
    assert!(pod(containers(serde_json::json!({"containerPort": "53"}))).unwrap().contains("invalid type"));
    assert!(pod(serde_json::json!({"hostUsers": "no"})).unwrap().contains("invalid type"));
}
