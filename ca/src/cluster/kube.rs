//! The API server, asked through the `kube` client, which handles credentials and TLS; limits and data types are ours.

use std::{collections::HashSet, net::IpAddr, path::Path, sync::OnceLock, time::Duration};

use ipnet::IpNet;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use nebula_cert::with_causes;
use serde::{Deserialize, de::DeserializeOwned};
use tokio::runtime::Handle;

use super::{
    Action, Asker, Cluster, ClusterError, ConfigData, Metadata, Pod, PodId, Review, Taken, User,
    follow::Followed,
    occupancy::Node,
    request::{ANSWER_WITHIN, Ask, answer, url_encoded},
};

/// A client of one API server. Its methods block, so call them only on threads that may.
pub(crate) struct ApiServer {
    client: Client,
    runtime: Handle,
    /// Set once somebody wants to know who has an address.
    followed: OnceLock<Followed>,
}

impl ApiServer {
    /// Reads the credentials from `kubeconfig`, or those that every pod gets. Sends no request yet. Must be called
    /// within a runtime.
    ///
    /// # Errors
    /// Returns an error text for people if there are no usable credentials.
    pub(crate) async fn open(kubeconfig: Option<&Path>) -> Result<Self, String> {
        let mut config = match kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(|error| with_causes(&error))?;
                let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
                config.map_err(|error| with_causes(&error))?
            }
            None => Config::incluster().map_err(|error| {
                format!("{}; outside a pod, name a kubeconfig in kubernetes.kubeconfig", with_causes(&error))
            })?,
        };
        config.connect_timeout = Some(CONNECT_WITHIN);
        // Each request has our own timeout. This one would also close idle connections, sometimes just as the next
        // request is sent.
        config.read_timeout = None;
        config.write_timeout = Some(ANSWER_WITHIN);
        let client = Client::try_from(config).map_err(|error| with_causes(&error))?;
        Ok(Self { client, runtime: Handle::current(), followed: OnceLock::new() })
    }

    /// Sends one request; a 404 is `None`.
    fn ask<T: DeserializeOwned>(&self, what: &'static str, request: Ask) -> Result<Option<T>, ClusterError> {
        self.runtime.block_on(answer(&self.client, what, request))
    }

    fn followed(&self) -> &Followed {
        self.followed.get_or_init(|| {
            let _within = self.runtime.enter();
            Followed::start(&self.client)
        })
    }
}

impl Cluster for ApiServer {
    fn review(&self, token: &str, audience: &str) -> Result<Review, ClusterError> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(default)]
            status: Review,
        }
        let body = serde_json::json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        });
        let what = "a TokenReview";
        let request = Ask::post("/apis/authentication.k8s.io/v1/tokenreviews", body.to_string());
        let answer: Option<Answer> = self.ask(what, request)?;
        let missing = || ClusterError::Status { status: 404, what, message: "no such path".to_owned() };
        answer.map(|answer| answer.status).ok_or_else(missing)
    }

    fn permits(&self, user: &User, action: &Action<'_>) -> Result<bool, ClusterError> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(default)]
            status: Verdict,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Verdict {
            allowed: bool,
            denied: bool,
        }
        let attributes = serde_json::json!({"group": action.group, "version": "v1", "resource": action.resource,
            "verb": action.verb, "namespace": action.namespace.unwrap_or_default()});
        let body = serde_json::json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user.username, "uid": user.uid, "groups": user.groups, "extra": user.extra,
                "resourceAttributes": attributes},
        });
        let what = "a SubjectAccessReview";
        let request = Ask::post("/apis/authorization.k8s.io/v1/subjectaccessreviews", body.to_string());
        let answer: Option<Answer> = self.ask(what, request)?;
        let missing = || ClusterError::Status { status: 404, what, message: "no such path".to_owned() };
        answer.map(|Answer { status }| status.allowed && !status.denied).ok_or_else(missing)
    }

    fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, ClusterError> {
        // Both were checked to be valid names, so no character in them has a special meaning in a path.
        self.ask("GET pod", Ask::get(format!("/api/v1/namespaces/{namespace}/pods/{name}")))
    }

    fn node_ranges(&self, name: &str) -> Result<Vec<IpNet>, ClusterError> {
        let node: Option<Node> = self.ask("GET node", Ask::get(format!("/api/v1/nodes/{name}")))?;
        let spec = node.unwrap_or_default().spec;
        Ok(spec.all.into_iter().chain(spec.one).collect())
    }

    fn other_owner(&self, range: IpNet, node: &str) -> Result<Option<String>, ClusterError> {
        Ok(self.runtime.block_on(self.followed().occupancy())?.other_owner(range, node).map(str::to_owned))
    }

    fn node_uid(&self, name: &str) -> Result<Option<String>, ClusterError> {
        #[derive(Deserialize)]
        struct Item {
            #[serde(default)]
            metadata: Metadata,
        }
        let node: Option<Item> = self.ask("GET node", Ask::get(format!("/api/v1/nodes/{name}")))?;
        Ok(node.map(|node| node.metadata.uid))
    }

    fn follow(&self) {
        self.followed();
    }

    fn taken(&self, address: IpAddr, asker: &Asker<'_>) -> Result<Option<Taken>, ClusterError> {
        Ok(self.runtime.block_on(self.followed().occupancy())?.taken(address, asker))
    }

    fn all_pods(&self) -> Result<HashSet<PodId>, ClusterError> {
        #[derive(Deserialize)]
        struct List {
            #[serde(default)]
            metadata: ListMetadata,
            #[serde(default)]
            items: Vec<Item>,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct ListMetadata {
            r#continue: String,
        }
        #[derive(Deserialize)]
        struct Item {
            metadata: Metadata,
        }
        let what = "LIST pods";
        let (mut pods, mut next) = (HashSet::new(), String::new());
        for _ in 0..MAX_PAGES {
            let page = format!("/api/v1/pods?limit=500&continue={}", url_encoded(&next));
            let list: Option<List> = self.ask(what, Ask::metadata(page))?;
            let missing = || ClusterError::Status { status: 404, what, message: "no such path".to_owned() };
            let list = list.ok_or_else(missing)?;
            for Item { metadata } in list.items {
                let id = |uid: &str| (metadata.namespace.clone(), metadata.name.clone(), uid.to_owned());
                pods.extend(metadata.static_uid(None).map(id));
                pods.insert(id(&metadata.uid));
            }
            next = list.metadata.r#continue;
            if next.is_empty() {
                return Ok(pods);
            }
        }
        Err(ClusterError::TooLong(what))
    }

    fn config_map(&self, namespace: &str, name: &str) -> Result<Option<ConfigData>, ClusterError> {
        #[derive(Deserialize)]
        struct ConfigMap {
            #[serde(default)]
            data: ConfigData,
        }
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/{name}");
        let found: Option<ConfigMap> = self.ask("GET configmap", Ask::get(path))?;
        Ok(found.map(|found| found.data))
    }

    fn apply_config_map(&self, namespace: &str, name: &str, data: &ConfigData) -> Result<(), ClusterError> {
        let body = serde_json::json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": namespace},
            "data": data,
        });
        let what = "PATCH configmap";
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/{name}?fieldManager=nebula-ca&force=true");
        let applied: Option<serde_json::Value> = self.ask(what, Ask::apply(path, body.to_string()))?;
        let missing = || ClusterError::Status { status: 404, what, message: "no such namespace".to_owned() };
        applied.map(drop).ok_or_else(missing)
    }
}

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// With 500 pods per page, this is above what Kubernetes supports.
const MAX_PAGES: usize = 600;
