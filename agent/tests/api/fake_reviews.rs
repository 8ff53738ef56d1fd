//! A fake of that part of the API server that reviews tokens and permissions. It knows the tokens that it made, each
//! for one audience, and who may do what; everything else it refuses.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
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

    pub(crate) fn router(&self) -> Router {
        Router::new()
            .route("/apis/authentication.k8s.io/v1/tokenreviews", post(review_token))
            .route("/apis/authorization.k8s.io/v1/subjectaccessreviews", post(review_access))
            .with_state(self.clone())
    }

    pub(crate) async fn client(&self) -> Client {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = self.router();
        tokio::spawn(async move { axum::serve(listener, router).await });
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        Client::try_from(Config::new(url.parse().unwrap())).unwrap()
    }
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
