//! The configuration of this node's gateway: the keys that the operator gave, and the pods of other nodes as networks
//! behind the gateways of those.

use serde_json::{Map, Value, json};

use super::ranges::NodeRanges;

/// The text of the daemon's `config.yml`, for the node `name`. JSON is YAML.
pub(super) fn configuration(template: &Map<String, Value>, nodes: &NodeRanges, name: &str) -> String {
    let routes = nodes.elsewhere(name).map(|(range, via)| json!({"route": range, "via": via, "inside": true}));
    let routes: Vec<Value> = routes.collect();
    let mut all = template.clone();
    let tun = all.entry("tun").or_insert_with(|| json!({}));
    if let Some(tun) = tun.as_object_mut() {
        let further = tun.get("unsafe_routes").and_then(Value::as_array).cloned().unwrap_or_default();
        tun.insert("unsafe_routes".to_owned(), routes.into_iter().chain(further).collect());
    }
    let mut text = serde_json::to_string_pretty(&Value::Object(all)).unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::ranges::tests::put;

    #[test]
    fn the_pods_of_other_nodes_are_behind_their_gateways_and_what_the_operator_gave_stays() {
        let mut nodes = NodeRanges::default();
        put(&mut nodes, "n1", 1, &["10.244.1.0/24"]);
        put(&mut nodes, "n2", 2, &["10.244.2.0/24"]);
        let template = json!({"listen": {"port": 4243}, "tun": {"mtu": 1300,
            "unsafe_routes": [{"route": "192.168.0.0/16", "via": "10.244.250.1"}]}});
        let text = configuration(template.as_object().unwrap(), &nodes, "n1");
        let made: Value = serde_json::from_str(&text).unwrap();
        let expected = json!([{"route": "10.244.2.0/24", "via": "10.244.2.1", "inside": true},
            {"route": "192.168.0.0/16", "via": "10.244.250.1"}]);
        assert_eq!(made["tun"]["unsafe_routes"], expected);
        assert_eq!((&made["listen"]["port"], &made["tun"]["mtu"]), (&json!(4243), &json!(1300)));
        let bare = configuration(&Map::new(), &nodes, "n2");
        assert!(bare.contains("10.244.1.1"), "{bare}");
    }
}
