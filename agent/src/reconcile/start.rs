//! Starts the reconciliation as a part of the agent: finds the chain that the runtime has loaded, and the API server.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Method;
use kube::Client as ApiClient;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use super::entry::Entry;
use super::keeper::Keeper;
use super::program::Plugin;
use crate::cluster::queue::ApiQueue;
use crate::cluster::taint_keeper::{self, GRACE, TaintKeeper};
use crate::cluster::{api, condition, worker};
use crate::config::{Config, PLUGIN};
use crate::metrics::Metrics;
use crate::node::Node;
use crate::places::Places;
use crate::readiness::{Part, Readiness, Standing};
use crate::released::{self, Releaser};
use crate::rollout::keeper::Terms;
use crate::runtime::Client;
use crate::runtime::loaded::Loaded;

/// Keeps the node's pods protected for ever. `published` is the entry that the agent puts into the chain.
pub async fn keep(
    shared: &Node,
    node: Option<String>,
    metrics: Arc<Metrics>,
    published: watch::Receiver<Option<Map<String, Value>>>,
    mut places: watch::Receiver<Option<Places>>,
) {
    let Node { config, readiness, .. } = shared;
    let api_queue = reach_api_server(shared, node.as_deref(), &metrics).await;
    let Ok(path) = places.wait_for(Option::is_some).await.map(|places| plugin_path(places.as_ref())) else { return };
    let runtime = loop {
        match Client::find(config.runtime_endpoint.as_deref(), &config.host_root) {
            Ok(runtime) => break runtime,
            Err(error) => readiness.set(Part::Reconciled, Standing::bad(error.to_string())),
        }
        tokio::time::sleep(RETRY).await;
    };
    let (loaded, entry) = watch::channel(None);
    let plugin = Plugin { path, host: config.host_root.clone() };
    let releaser = Releaser::new(config.host_root.clone(), Arc::clone(&metrics), shared.retirement.clone());
    let keeper = Keeper {
        plugin,
        runtime: runtime.clone(),
        entry: entry.clone(),
        policy: config.unprotected,
        api_queue,
        metrics,
        readiness: readiness.clone(),
        rollout: Some(Terms { policy: config.upgrade, retirement: shared.retirement.clone() }),
        required: config.policies.required.then(|| shared.unenforced.clone()),
    };
    tokio::join!(follow(shared, runtime, published, loaded), released::run(releaser, entry), keeper.run());
}

fn plugin_path(places: Option<&Places>) -> PathBuf {
    places.and_then(|places| places.bin.first()).map(|dir| dir.join(PLUGIN)).unwrap_or_default()
}

/// Follows the chain that the runtime has loaded. An earlier agent may have written it, long before this one is done
/// with its preparations.
async fn follow(
    node: &Node,
    runtime: Client,
    mut published: watch::Receiver<Option<Map<String, Value>>>,
    loaded: watch::Sender<Option<Arc<Entry>>>,
) {
    let mut changes = node.readiness.watch();
    let mut known = Value::Null;
    loop {
        let list = if node.retirement.has_begun() {
            Value::Null
        } else {
            // A runtime that is away for a moment has loaded what it had loaded.
            match runtime.status().await {
                Ok(status) => of_runtime(Loaded::read(&status), published.borrow_and_update().as_ref(), &node.config),
                Err(_) => known.clone(),
            }
        };
        if list != known {
            known = list;
            let entry = match Entry::of_list(&known) {
                Ok(entry) => Some(Arc::new(entry)),
                Err(error) => {
                    tracing::info!(%error, "no reconciliation with this chain");
                    None
                }
            };
            loaded.send_replace(entry);
        }
        tokio::select! {
            _ = changes.changed() => tokio::time::sleep(SETTLE).await,
            Ok(()) = published.changed() => {}
            () = tokio::time::sleep(POLL) => {}
        }
    }
}

/// The list with our entry, as far as the runtime tells; else with the entry that the agent published.
fn of_runtime(loaded: Option<Loaded>, published: Option<&Map<String, Value>>, config: &Config) -> Value {
    let source = loaded.as_ref().and_then(|loaded| serde_json::from_str::<Value>(&loaded.source).ok());
    let has_ours = |list: &Value| {
        list["plugins"].as_array().is_some_and(|plugins| plugins.iter().any(|plugin| plugin["type"] == PLUGIN))
    };
    match (source, published) {
        (Some(list), _) if has_ours(&list) => list,
        // A drop-in is not part of the text, and some runtimes tell no text at all.
        (source, Some(entry)) => {
            let network = loaded.and_then(|loaded| loaded.network).or_else(|| config.network.clone());
            let version = source.map(|list| list["cniVersion"].clone()).filter(Value::is_string);
            match network {
                Some(network) => json!({"name": network, "cniVersion": version.unwrap_or_else(|| "1.0.0".into()),
                    "plugins": [entry]}),
                None => Value::Null,
            }
        }
        (_, None) => Value::Null,
    }
}

/// Starts what works at the API server, if there is one.
async fn reach_api_server(shared: &Node, node: Option<&str>, metrics: &Arc<Metrics>) -> ApiQueue {
    let Node { config, readiness, unenforced, .. } = shared;
    let absent = |why: String| {
        let standing = Standing::bad(why).advice("pods are protected, but nothing is reported, evicted or labelled");
        readiness.set(Part::Kubernetes, standing);
        ApiQueue::none()
    };
    let Some(node) = node else {
        return absent("no Kubernetes API: the name of the node is not known (--node or NODE_NAME)".to_owned());
    };
    let client = match api::open(None).await {
        Ok(client) => client,
        Err(error) => return absent(error.to_string()),
    };
    if config.taint {
        let keeper = TaintKeeper {
            namespace: client.default_namespace().to_owned(),
            client: client.clone(),
            node: node.to_owned(),
            readiness: readiness.clone(),
            grace: GRACE,
        };
        tokio::spawn(keeper.run());
    } else {
        tokio::spawn(taint_keeper::turn_off_for_good(client.clone(), node.to_owned()));
    }
    if config.policies.condition {
        tokio::spawn(condition::keep(client.clone(), node.to_owned(), readiness.watch()));
    }
    tokio::spawn(watch_health(client.clone(), readiness.clone()));
    worker::start(&client, node, metrics, (readiness, unenforced))
}

async fn watch_health(client: ApiClient, readiness: Readiness) {
    loop {
        let standing = match api::ask(&client, Method::GET, "/version", None).await {
            Ok(_) => Standing::good("the API server answers"),
            Err(error) => Standing::bad(error.to_string()),
        };
        readiness.set(Part::Kubernetes, standing);
        tokio::time::sleep(HEALTH_INTERVAL).await;
    }
}

const RETRY: Duration = Duration::from_secs(2);
const SETTLE: Duration = Duration::from_millis(200);
const POLL: Duration = Duration::from_secs(10);
const HEALTH_INTERVAL: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config::parse(r#"{"ca": {"url": "https://ca:1"}}"#).unwrap()
    }

    fn loaded(network: Option<&str>, source: &str) -> Option<Loaded> {
        let network = network.map(str::to_owned);
        Some(Loaded { network, plugins: Vec::new(), source: source.to_owned(), error: None })
    }

    #[test]
    fn what_the_runtime_loaded_counts_and_else_what_the_agent_published() {
        let ours = format!(r#"{{"name":"n","cniVersion":"1.0.0","plugins":[{{"type":"{PLUGIN}","old":1}}]}}"#);
        let entry: Map<String, Value> = serde_json::from_str(&format!(r#"{{"type":"{PLUGIN}"}}"#)).unwrap();
        assert_eq!(of_runtime(loaded(Some("n"), &ours), Some(&entry), &config())["plugins"][0]["old"], 1);
        let bare = r#"{"name":"n","cniVersion":"0.4.0","plugins":[{"type":"bridge"}]}"#;
        let drop_in = of_runtime(loaded(Some("n"), bare), Some(&entry), &config());
        assert_eq!(drop_in, json!({"name": "n", "cniVersion": "0.4.0", "plugins": [entry]}));
        assert_eq!(of_runtime(loaded(Some("n"), bare), None, &config()), Value::Null);
        let named = Config { network: Some("p".to_owned()), ..config() };
        assert_eq!(of_runtime(None, Some(&entry), &named)["name"], "p");
        assert_eq!(of_runtime(None, Some(&entry), &config()), Value::Null);
    }
}
