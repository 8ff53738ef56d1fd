//! Asks the API server whose a token is, and what they may do. Where it does not say, nothing is allowed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::Method;
use kube::Client;
use nebula_cert::listener::Source;
use nebula_cni_contract::agent_api::{AUDIENCE, GROUP, Lacking};
use nebula_cni_contract::clock::{Clock, SystemClock};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use zeroize::Zeroize;

use super::denied::Denied;
use super::quotas::Quotas;
use super::recent::Recent;
use super::token::{Token, TokenId};
use crate::cluster::api::{JSON, ask};

/// What somebody wants to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Asked {
    pub(super) verb: &'static str,
    pub(super) resource: &'static str,
    /// `None`: in the whole cluster.
    pub(super) namespace: Option<String>,
}

/// Asks the API server, and remembers for a moment what it said.
pub(super) struct Reviewer {
    client: Client,
    state: Mutex<State>,
    /// How many questions are on their way.
    places: Semaphore,
}

struct State {
    users: Recent<TokenId, Seen>,
    strangers: Recent<TokenId, ()>,
    permissions: Recent<(TokenId, Asked), bool>,
    quotas: Quotas<Source>,
}

/// A user whose token was accepted, and until when that is not asked again.
#[derive(Debug, Clone)]
struct Seen {
    user: Arc<User>,
    fresh_until: Instant,
}

/// Whom the API server knows a token for, as it says so.
#[derive(Debug)]
struct User {
    name: String,
    /// Groups, uid and extra, as they came.
    further: Value,
}

/// For whom the API server is asked.
#[derive(Debug, Clone, Copy)]
enum Asking {
    /// Somebody unknown, of this source.
    For(Source),
    /// Somebody whose token it has accepted.
    Again,
}

impl Reviewer {
    pub(super) fn new(client: Client) -> Self {
        let state = State {
            users: Recent::new(MOST_USERS),
            strangers: Recent::new(MOST_STRANGERS),
            permissions: Recent::new(MOST_PERMISSIONS),
            quotas: Quotas::new(),
        };
        Self { client, state: Mutex::new(state), places: Semaphore::new(PLACES) }
    }

    /// Returns the name of the token's user, if that user may do this.
    pub(super) async fn permit(&self, token: &Token, asked: &Asked, source: Source) -> Result<String, Denied> {
        let user = self.user(token, source).await?;
        if self.may(&user, token.id(), asked).await? {
            return Ok(user.name.clone());
        }
        Err(Denied::Forbidden(Lacking {
            user: user.name.clone(),
            verb: asked.verb.to_owned(),
            resource: asked.resource.to_owned(),
            namespace: asked.namespace.clone(),
        }))
    }

    /// Whether the API server accepts the token, whatever its user may do.
    pub(super) async fn accept(&self, token: &Token, source: Source) -> Result<(), Denied> {
        self.user(token, source).await.map(drop)
    }

    async fn user(&self, token: &Token, source: Source) -> Result<Arc<User>, Denied> {
        let (id, now) = (token.id(), SystemClock.now());
        let source = {
            let state = self.state();
            let seen = state.users.get(&id, now);
            if let Some(seen) = seen.as_ref().filter(|seen| now < seen.fresh_until) {
                return Ok(Arc::clone(&seen.user));
            }
            if state.strangers.get(&id, now).is_some() {
                return Err(Denied::Unknown);
            }
            // Others that come from the same source keep nobody out who was let in.
            if seen.is_some() { Asking::Again } else { Asking::For(source) }
        };
        let mut review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": {"token": token.expose(), "audiences": [AUDIENCE]}});
        let answer = self.ask(REVIEWS, &review, source, now).await;
        if let Some(Value::String(text)) = review.pointer_mut("/spec/token") {
            text.zeroize();
        }
        let user = user_in(&answer?).map(Arc::new);
        let (mut state, now) = (self.state(), SystemClock.now());
        match user {
            Some(user) => {
                if let Asking::For(source) = source {
                    state.quotas.is_known(source, now);
                }
                let seen = Seen { user: Arc::clone(&user), fresh_until: now + HOLDS };
                state.users.put(id, seen, now + REMEMBERED, now);
                Ok(user)
            }
            None => {
                state.users.forget(&id);
                state.strangers.put(id, (), now + HOLDS, now);
                Err(Denied::Unknown)
            }
        }
    }

    async fn may(&self, user: &User, id: TokenId, asked: &Asked) -> Result<bool, Denied> {
        let (key, now) = ((id, asked.clone()), SystemClock.now());
        if let Some(is_allowed) = self.state().permissions.get(&key, now) {
            return Ok(is_allowed);
        }
        let mut spec = user.further.clone();
        spec["user"] = user.name.clone().into();
        spec["resourceAttributes"] = json!({"group": GROUP, "version": "v1", "resource": asked.resource,
            "verb": asked.verb, "namespace": asked.namespace.as_deref().unwrap_or_default()});
        let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec});
        let answer = self.ask(ACCESS_REVIEWS, &review, Asking::Again, now).await?;
        let status = &answer["status"];
        let is_allowed = status["allowed"] == true && status["denied"] != true;
        let now = SystemClock.now();
        // A permission that was given a moment ago is looked for again soon.
        let holds = if is_allowed { HOLDS } else { REFUSAL_HOLDS };
        self.state().permissions.put(key, is_allowed, now + holds, now);
        Ok(is_allowed)
    }

    async fn ask(&self, path: &str, review: &Value, asking: Asking, now: Instant) -> Result<Value, Denied> {
        let is_admitted = match asking {
            Asking::For(source) => self.state().quotas.take(source, now),
            Asking::Again => self.state().quotas.take_again(now),
        };
        if !is_admitted {
            return Err(Denied::Busy);
        }
        let place = tokio::time::timeout(PLACE_WITHIN, self.places.acquire()).await;
        let _place = place.map_err(|_| Denied::Busy)?.map_err(|_| Denied::Busy)?;
        ask(&self.client, Method::POST, path, Some((JSON, review))).await.map_err(|error| {
            tracing::warn!(%error, "cannot ask the API server about a token of kubectl");
            Denied::NoReview
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No step leaves it in between.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The user that a TokenReview names, if it accepts the token for our audience. A server that knows no audiences says
/// nothing of them, and accepts tokens that others could show, too.
fn user_in(review: &Value) -> Option<User> {
    let status = &review["status"];
    let has_audience = status["audiences"].as_array().is_some_and(|all| all.iter().any(|one| one == AUDIENCE));
    let name = status["user"]["username"].as_str().filter(|name| !name.is_empty())?;
    let keys = ["uid", "groups", "extra"].into_iter().filter(|key| !status["user"][key].is_null());
    let further = keys.map(|key| (key.to_owned(), status["user"][key].clone())).collect();
    let is_known = status["authenticated"] == true && has_audience;
    is_known.then(|| User { name: name.to_owned(), further: Value::Object(further) })
}

const REVIEWS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
const ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
/// So long after it was taken away, a token or a permission is still good.
const HOLDS: Duration = Duration::from_secs(30);
/// The life of a token of kubectl.
const REMEMBERED: Duration = Duration::from_secs(600);
const REFUSAL_HOLDS: Duration = Duration::from_secs(5);
const MOST_USERS: usize = 256;
const MOST_STRANGERS: usize = 1024;
const MOST_PERMISSIONS: usize = 1024;
const PLACES: usize = 8;
const PLACE_WITHIN: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_review_that_names_user_and_our_audience_counts() {
        let good = json!({"status": {"authenticated": true, "audiences": [AUDIENCE],
            "user": {"username": "system:serviceaccount:shop:v", "uid": "u", "groups": ["g"], "extra": {"k": ["v"]}}}});
        let user = user_in(&good).unwrap();
        assert_eq!(user.name, "system:serviceaccount:shop:v");
        assert_eq!(user.further, json!({"uid": "u", "groups": ["g"], "extra": {"k": ["v"]}}));
        for (place, value) in [
            ("/status/authenticated", json!(false)),
            ("/status/authenticated", json!("true")),
            ("/status/audiences", json!(null)),
            ("/status/audiences", json!([])),
            ("/status/audiences", json!(["https://kubernetes.default.svc"])),
            ("/status/user/username", json!("")),
            ("/status/user", json!(null)),
        ] {
            let mut bad = good.clone();
            *bad.pointer_mut(place).unwrap() = value;
            assert!(user_in(&bad).is_none(), "{bad}");
        }
    }
}
