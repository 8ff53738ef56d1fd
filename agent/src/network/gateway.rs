//! The file that this node's gateway is configured by: the keys that the operator gave, and the pods of other nodes as
//! networks behind the gateways of those.

use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::ranges::NodeRanges;
use crate::config::Config;
use crate::durable;

/// Writes the file for the node `name`, if there is a gateway.
pub(super) async fn write(config: &Config, nodes: &NodeRanges, name: &str) {
    let Some(template) = &config.gateway else { return };
    let text = configuration(template, nodes, name);
    let path = config.host_root.resolve(Path::new(FILE));
    let written = tokio::task::spawn_blocking(move || replace(&path, text.as_bytes())).await;
    if let Ok(Err(error)) = written {
        tracing::warn!(%error, file = FILE, "cannot write the configuration of this node's gateway");
    }
}

/// Replaces a file unless it says the same already: the daemon looks at its time.
fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    if durable::read_bounded(path, MAX_BYTES).is_ok_and(|before| before == text) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    durable::replace(path, 0o644, &mut &*text, |_| Ok(()))
}

/// The text of the daemon's `config.yml`. JSON is YAML.
fn configuration(template: &Map<String, Value>, nodes: &NodeRanges, name: &str) -> String {
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

/// Where the daemon reads its configuration.
const FILE: &str = "/run/nebula-cni/gateway/config.yml";
/// Much more than 5,000 nodes need.
const MAX_BYTES: u64 = 4 << 20;

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
