//! A fake of that part of the API server that reviews tokens and permissions, and lists agents. It knows the tokens
//! that it made, each for one audience, and who may do what; everything else it refuses.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use kube::{Client, Config};
use serde_json::{Value, json};

#[derive(Debug, Clone, Default)]
pub(crate) struct FakeReviews(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    /// User and audience by token.
    tokens: HashMap<String, (String, String)>,
    /// User, verb, resource and namespace.
    permissions: HashSet<[String; 4]>,
    is_away: bool,
    token_reviews: usize,
    access_reviews: usize,
    /// Pods by namespace.
    pods: Vec<(String, Value)>,
    lists: usize,
    /// How often those of all namespaces were.
    wide_lists: usize,
}

impl FakeReviews {
    /// Makes a token.
    pub(crate) fn token(&self, user: &str, audience: &str) -> String {
        let mut kept = self.0.lock().unwrap();
        let token = format!("secret-{}.of-a-test", kept.tokens.len());
        kept.tokens.insert(token.clone(), (user.to_owned(), audience.to_owned()));
        token
    }

    /// The time of a token is over.
    pub(crate) fn expire(&self, token: &str) {
        self.0.lock().unwrap().tokens.remove(token);
    }

    /// As a RoleBinding does; a namespace `*` is that of a ClusterRoleBinding.
    pub(crate) fn allow(&self, user: &str, verb: &str, resource: &str, namespace: &str) {
        let permission = [user, verb, resource, namespace].map(str::to_owned);
        self.0.lock().unwrap().permissions.insert(permission);
    }

    /// Takes a permission away.
    pub(crate) fn forbid(&self, user: &str, verb: &str, resource: &str, namespace: &str) {
        let permission = [user, verb, resource, namespace].map(str::to_owned);
        assert!(self.0.lock().unwrap().permissions.remove(&permission));
    }

    pub(crate) fn is_away(&self, is_away: bool) {
        self.0.lock().unwrap().is_away = is_away;
    }

    /// How many tokens and permissions it was asked about.
    pub(crate) fn asked(&self) -> (usize, usize) {
        let kept = self.0.lock().unwrap();
        (kept.token_reviews, kept.access_reviews)
    }

    /// The pod of a node's agent, in the namespace of agents. It replaces the one that was there.
    pub(crate) fn agent(&self, node: &str, address: SocketAddr) {
        let pod = agent_pod(node, address);
        let mut kept = self.0.lock().unwrap();
        kept.pods.retain(|(_, pod)| pod["spec"]["nodeName"] != node);
        kept.pods.push(("default".to_owned(), pod));
    }

    /// Any pod.
    pub(crate) fn pod(&self, namespace: &str, pod: Value) {
        self.0.lock().unwrap().pods.push((namespace.to_owned(), pod));
    }

    /// How often pods were listed.
    pub(crate) fn lists(&self) -> usize {
        self.0.lock().unwrap().lists
    }

    /// How often all pods were listed.
    pub(crate) fn wide_lists(&self) -> usize {
        self.0.lock().unwrap().wide_lists
    }

    pub(crate) fn router(&self) -> Router {
        Router::new()
            .route("/apis/authentication.k8s.io/v1/tokenreviews", post(review_token))
            .route("/apis/authorization.k8s.io/v1/subjectaccessreviews", post(review_access))
            .with_state(self.clone())
    }

    pub(crate) async fn client(&self) -> Client {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let pods = Router::new()
            .route("/api/v1/namespaces/{namespace}/pods", get(list_pods))
            .route("/api/v1/namespaces/{namespace}/services", get(list_services))
            .route("/api/v1/services", get(async || Json(json!({"items": []}))))
            .route("/api/v1/pods", get(list_all_pods));
        let router = self.router().merge(pods.with_state(self.clone()));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        Client::try_from(Config::new(url.parse().unwrap())).unwrap()
    }
}

/// The pod of an agent that runs.
pub(crate) fn agent_pod(node: &str, address: SocketAddr) -> Value {
    json!({"metadata": {"name": format!("agent-{node}"), "labels": {"app.kubernetes.io/name": "nebula-cni-agent"}},
        "spec": {"nodeName": node, "containers": [{"ports": [{"name": "api", "containerPort": address.port()}]}]},
        "status": {"phase": "Running", "podIP": address.ip().to_string()}})
}

/// The pods that both selectors select, of which each is one condition.
async fn list_pods(
    State(server): State<FakeReviews>,
    Path(namespace): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    let mut kept = server.0.lock().unwrap();
    kept.lists += 1;
    let query = query.unwrap_or_default();
    let selector = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(name)).map(str::to_owned);
    let (label, node) =
        (selector("labelSelector=app.kubernetes.io%2Fname%3D"), selector("fieldSelector=spec.nodeName%3D"));
    // One that is asked for by its name.
    let name = selector("fieldSelector=metadata.name%3D");
    let is_selected = |pod: &Value| {
        if let Some(name) = &name {
            return pod["metadata"]["name"] == **name;
        }
        label.as_ref().is_some_and(|label| pod["metadata"]["labels"]["app.kubernetes.io/name"] == **label)
            && node.as_ref().is_none_or(|node| pod["spec"]["nodeName"] == **node)
    };
    let items: Vec<_> = kept.pods.iter().filter(|(of, pod)| *of == namespace && is_selected(pod)).collect();
    Json(json!({"kind": "PodList", "items": items.iter().map(|(_, pod)| pod).collect::<Vec<_>>()})).into_response()
}

/// All pods, or the one that has an address.
async fn list_all_pods(State(server): State<FakeReviews>, RawQuery(query): RawQuery) -> Response {
    let mut kept = server.0.lock().unwrap();
    let query = query.unwrap_or_default();
    let address = query.strip_prefix("fieldSelector=status.podIP%3D");
    kept.wide_lists += usize::from(address.is_none());
    let is_wanted = |pod: &Value| address.is_none_or(|address| pod["status"]["podIP"] == address);
    let items: Vec<&Value> = kept.pods.iter().map(|(_, pod)| pod).filter(|pod| is_wanted(pod)).collect();
    Json(json!({"kind": "PodList", "items": items})).into_response()
}

/// The cluster's DNS is the only one.
async fn list_services(Path(namespace): Path<String>, RawQuery(query): RawQuery) -> Response {
    let is_dns = namespace == "kube-system" && query.is_some_and(|query| query.ends_with("kube-dns"));
    let dns = json!({"metadata": {"namespace": "kube-system", "name": "kube-dns"}, "spec": {"selector": {"k8s-app": "of-dns"}}});
    Json(json!({"items": if is_dns { vec![dns] } else { Vec::new() }})).into_response()
}

async fn review_token(State(server): State<FakeReviews>, Json(review): Json<Value>) -> Response {
    let mut kept = server.0.lock().unwrap();
    kept.token_reviews += 1;
    if kept.is_away {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let known = kept.tokens.get(review["spec"]["token"].as_str().unwrap());
    let asked_for = review["spec"]["audiences"].as_array().unwrap();
    let status = match known {
        Some((user, audience)) if asked_for.iter().any(|one| one == audience) => {
            let groups = json!(["system:serviceaccounts", "system:authenticated"]);
            let extra = json!({"authentication.kubernetes.io/credential-id": ["JTI=1"]});
            json!({"authenticated": true, "audiences": [audience],
                "user": {"username": user, "uid": "u1", "groups": groups, "extra": extra}})
        }
        _ => json!({"authenticated": false, "error": "invalid bearer token"}),
    };
    Json(json!({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "status": status})).into_response()
}

async fn review_access(State(server): State<FakeReviews>, Json(review): Json<Value>) -> Response {
    let mut kept = server.0.lock().unwrap();
    kept.access_reviews += 1;
    if kept.is_away {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let (spec, wanted) = (&review["spec"], &review["spec"]["resourceAttributes"]);
    // What the review of the token said of the user comes with it.
    assert_eq!((&spec["uid"], spec["groups"].as_array().map(Vec::len)), (&json!("u1"), Some(2)), "{review}");
    assert!(spec["extra"].is_object() && wanted["group"] == "nebula-cni", "{review}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut permission =
        [text(&spec["user"]), text(&wanted["verb"]), text(&wanted["resource"]), text(&wanted["namespace"])];
    let is_of_namespace = !permission[3].is_empty() && kept.permissions.contains(&permission);
    permission[3] = "*".to_owned();
    let is_allowed = is_of_namespace || kept.permissions.contains(&permission);
    let status = json!({"allowed": is_allowed});
    Json(json!({"kind": "SubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "status": status}))
        .into_response()
}
