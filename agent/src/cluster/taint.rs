//! The taint that keeps pods off a node until its agent is ready. Changes are JSON patches that test the old list, so
//! that a change of somebody else in between is never lost.

use serde_json::{Value, json};

/// Key of the taint.
pub const KEY: &str = "nebula-cni/agent-not-ready";

/// The patch that removes our taint from a node; `None` if it has none.
#[must_use]
pub fn removal(node: &Value) -> Option<Value> {
    let old = taints(node);
    let new: Vec<&Value> = old.iter().filter(|taint| taint["key"] != KEY).collect();
    if new.len() == old.len() {
        return None;
    }
    let test = json!({"op": "test", "path": PATH, "value": old});
    Some(match new.is_empty() {
        true => json!([test, {"op": "remove", "path": PATH}]),
        false => json!([test, {"op": "replace", "path": PATH, "value": new}]),
    })
}

/// The patch that adds our taint to a node; `None` if it has it.
#[must_use]
pub fn addition(node: &Value) -> Option<Value> {
    let old = taints(node);
    if old.iter().any(|taint| taint["key"] == KEY) {
        return None;
    }
    let ours = json!({"key": KEY, "effect": "NoSchedule"});
    Some(match old.is_empty() {
        // There is no list to test, and API servers differ in how they test for nothing.
        true => {
            let version = &node["metadata"]["resourceVersion"];
            json!([{"op": "test", "path": "/metadata/resourceVersion", "value": version},
                {"op": "add", "path": PATH, "value": [ours]}])
        }
        false => {
            let new: Vec<&Value> = old.iter().chain([&ours]).collect();
            json!([{"op": "test", "path": PATH, "value": old}, {"op": "replace", "path": PATH, "value": new}])
        }
    })
}

fn taints(node: &Value) -> &[Value] {
    node["spec"]["taints"].as_array().map(Vec::as_slice).unwrap_or_default()
}

const PATH: &str = "/spec/taints";

#[cfg(test)]
mod tests {
    use super::*;

    fn node(taints: Value) -> Value {
        json!({"metadata": {"name": "n1"}, "spec": {"taints": taints}})
    }

    #[test]
    fn only_our_taint_goes_and_the_old_list_is_tested() {
        let (ours, other) = (json!({"key": KEY, "effect": "NoSchedule"}), json!({"key": "x", "effect": "NoExecute"}));
        assert_eq!(removal(&node(json!([other]))), None);
        assert_eq!(removal(&json!({})), None);
        let both = json!([ours, other]);
        assert_eq!(
            removal(&node(both.clone())).unwrap(),
            json!([{"op": "test", "path": PATH, "value": both}, {"op": "replace", "path": PATH, "value": [other]}])
        );
        let alone = removal(&node(json!([ours]))).unwrap();
        assert_eq!(alone[1], json!({"op": "remove", "path": PATH}));
        let twice = removal(&node(json!([ours, other, ours]))).unwrap();
        assert_eq!(twice[1]["value"], json!([other]), "one with each effect");
    }

    #[test]
    fn ours_is_added_once_and_next_to_others() {
        let (ours, other) = (json!({"key": KEY, "effect": "NoSchedule"}), json!({"key": "x", "effect": "NoExecute"}));
        assert_eq!(addition(&node(json!([ours]))), None);
        assert_eq!(addition(&node(json!([other]))).unwrap()[1]["value"], json!([other, ours]));
        assert_eq!(addition(&json!({"spec": {}})).unwrap()[1], json!({"op": "add", "path": PATH, "value": [ours]}));
    }
}
