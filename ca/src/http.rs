//! The HTTP API: paths, bodies and statuses; every answer to callers except the health line is JSON.

mod directory;
#[cfg(test)]
mod other_releases;
mod revocation;

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State, rejection::BytesRejection},
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use nebula_cert::directory::DIRECTORY_PATH;
use nebula_cert::issuance::{
    self, ASKER_HEADER, Asker, CERTIFICATE_PATH, MAX_BODY, MAX_WAIT_SECONDS, NODE_CREDENTIAL_PATH, Pod, Proof,
    RELEASE_PATH, TRUST_PATH,
};
use nebula_cert::listener::Place;
use nebula_cert::revocation::REVOKE_PATH;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

use crate::{connections::Caller, connections::Connection, page::View, refusal::Refusal, service::Service, time};

/// All paths of the service.
pub(crate) fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route(CERTIFICATE_PATH, post(certificate))
        .route(RELEASE_PATH, post(release))
        .route(NODE_CREDENTIAL_PATH, post(node_credential))
        .route(TRUST_PATH, get(trust))
        .route(DIRECTORY_PATH, get(directory::directory))
        .route(REVOKE_PATH, post(revocation::revoke))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .fallback(async || refuse(&Refusal::NotFound))
        .method_not_allowed_fallback(async || refuse(&Refusal::WrongMethod))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(service)
}

/// Routes served in plain HTTP: nothing secret, and nothing that changes anything.
pub(crate) fn status_router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .fallback(async || (StatusCode::NOT_FOUND, "not found\n"))
        .with_state(service)
}

/// The response for a refusal.
pub(crate) fn refuse(refusal: &Refusal) -> Response {
    let status = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(issuance::Refusal::from(refusal))).into_response();
    if let Some(seconds) = refusal.retry_after() {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

async fn certificate(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Caller>,
    Extension(connection): Extension<Arc<Connection>>,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let _busy = connection.work();
    let answered = async {
        let request: issuance::Request = readable(&service, body, caller).await?;
        let turn = service.turn("certificate", &request.proof, caller).await?;
        blocking(move || service.answer(&request, caller, turn)).await
    };
    match answered.await {
        Ok(issued) => {
            connection.has_proved(&issued.record.subject.identity());
            Json(issued.reply).into_response()
        }
        Err(refusal) => refuse(&refusal),
    }
}

async fn release(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Caller>,
    Extension(connection): Extension<Arc<Connection>>,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let _busy = connection.work();
    let answered = async {
        let release: issuance::Release = readable(&service, body, caller).await?;
        let turn = service.turn("release", &release.proof, caller).await?;
        blocking(move || service.release(&release, caller, turn)).await
    };
    match answered.await {
        Ok(released) => Json(released).into_response(),
        Err(refusal) => refuse(&refusal),
    }
}

/// Answers the agent of a node. What it is asked is in the header, so a body is not read.
async fn node_credential(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Caller>,
    Extension(connection): Extension<Arc<Connection>>,
    headers: HeaderMap,
) -> Response {
    let _busy = connection.work();
    let answered = async {
        let token = bearer(&headers)?;
        let proof = of_agent(&token, caller);
        let turn = service.turn("node_credential", &proof, caller).await?;
        blocking(move || service.node_credential(&proof, &token, caller, turn)).await
    };
    match answered.await {
        Ok(made) => {
            connection.has_proved(&format!("node {}", made.node));
            ([(header::CACHE_CONTROL, "no-store")], Json(made)).into_response()
        }
        Err(refusal) => refuse(&refusal),
    }
}

/// The token in the header.
fn bearer(headers: &HeaderMap) -> Result<Zeroizing<String>, Refusal> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = bearer.and_then(|value| value.split_once(' ')).filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"));
    let (_, token) = token.ok_or(Refusal::NoNodeToken)?;
    Ok(Zeroizing::new(token.trim().to_owned()))
}

/// The proof of an agent that vouches for no pod, only for itself.
fn of_agent(token: &str, caller: Caller) -> Proof {
    let (namespace, name, uid) = Default::default();
    Proof::Node { token: token.to_owned(), pod: Pod { namespace, name, uid, address: caller.0, other_address: None } }
}

/// Parses the body, or records what is wrong with it.
async fn readable<T: DeserializeOwned + Send + 'static>(
    service: &Arc<Service>,
    body: Result<Bytes, BytesRejection>,
    caller: Caller,
) -> Result<T, Refusal> {
    match read(body) {
        Ok(read) => Ok(read),
        Err(refusal) => {
            let service = Arc::clone(service);
            blocking(move || {
                service.note_unreadable(&refusal, caller);
                Err(refusal)
            })
            .await
        }
    }
}

fn read<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, Refusal> {
    let body = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Refusal::BodyTooLarge,
        _ => Refusal::MalformedRequest("the body did not arrive completely".to_owned()),
    })?;
    // Report only the place and kind of the mistake: the parser's message may repeat the input, including secrets.
    serde_json::from_slice(&body).map_err(|error| {
        let kind = match error.classify() {
            serde_json::error::Category::Data => {
                "a field is missing, unknown or of the wrong type (where the caller is newer, upgrade nebula-ca)"
            }
            _ => "syntax error",
        };
        Refusal::MalformedRequest(format!("{kind}, line {} column {}", error.line(), error.column()))
    })
}

/// Answers at once or, with `?wait=SECONDS`, as soon as the trust bundle differs from the one the caller knows.
async fn trust(
    State(service): State<Arc<Service>>,
    Extension(connection): Extension<Arc<Connection>>,
    headers: HeaderMap,
    uri: Uri,
) -> Response {
    let known = headers.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok()).unwrap_or_default();
    let wait = uri.query().and_then(|query| query.strip_prefix("wait=")).and_then(|wait| wait.parse::<u64>().ok());
    let end = wait.map(|wait| tokio::time::Instant::now() + Duration::from_secs(wait.min(MAX_WAIT_SECONDS)));
    if let Some(asker) = headers.get(ASKER_HEADER).filter(|_| connection.may_introduce_itself()) {
        let asker = asker.to_str().ok().and_then(|asker| asker.parse::<Asker>().ok());
        let service = Arc::clone(&service);
        // Whoever is not the one it says is answered as anybody.
        let subject = blocking(move || asker.map_or(Ok(None), |asker| service.asker(&asker))).await;
        if let Ok(Some(subject)) = subject {
            connection.has_proved(&subject.identity());
        }
    }
    if let Some(holder) = connection.identity() {
        service.followers().asks(&holder, end.is_some(), time::now());
    }
    let mut trust = service.trust();
    let mut slot = None;
    loop {
        let Some(now) = trust.borrow_and_update().clone() else { return refuse(&Refusal::Internal) };
        let tag = [(header::ETAG, now.etag.clone())];
        if !now.is_known(known) {
            return (tag, Json(&now.body)).into_response();
        }
        let unchanged = (StatusCode::NOT_MODIFIED, tag);
        let Some(end) = end else { return unchanged.into_response() };
        if slot.is_none() || service.waiting().is_closed() {
            match service.waiting().try_acquire().ok().zip(connection.wait()) {
                Some(free) => slot = Some(free),
                None => return ([(header::RETRY_AFTER, "10")], unchanged).into_response(),
            }
        }
        if tokio::time::timeout_at(end, trust.changed()).await.is_err() {
            return unchanged.into_response();
        }
    }
}

/// Liveness: fails if a restart would help.
async fn alive(State(service): State<Arc<Service>>) -> Response {
    match blocking(move || Ok(service.is_alive())).await {
        Ok(true) => "ok\n".into_response(),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "the store failed; restart nebula-ca, see its log\n").into_response(),
    }
}

/// Readiness: succeeds if certificates can be issued.
async fn ready(State(service): State<Arc<Service>>) -> Response {
    match blocking(move || service.issuer().health(time::now())).await {
        Ok(()) => "ok\n".into_response(),
        Err(refusal) => (StatusCode::SERVICE_UNAVAILABLE, format!("{refusal}\n")).into_response(),
    }
}

async fn page(State(service): State<Arc<Service>>, Extension(place): Extension<Arc<Place>>, address: Uri) -> Response {
    let view = View::of(address.query().unwrap_or_default());
    match holding(place, move || service.page(&view)).await {
        Ok(page) => (
            [
                (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
                (header::CONTENT_SECURITY_POLICY, page.content_security_policy),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
                (header::X_FRAME_OPTIONS, "DENY".to_owned()),
                (header::REFERRER_POLICY, "no-referrer".to_owned()),
                (header::CACHE_CONTROL, "no-store".to_owned()),
            ],
            page.html,
        )
            .into_response(),
        Err(refusal) => refuse(&refusal),
    }
}

async fn metrics(State(service): State<Arc<Service>>, Extension(place): Extension<Arc<Place>>) -> Response {
    match holding(place, move || service.metrics()).await {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(refusal) => refuse(&refusal),
    }
}

/// Runs blocking work on another thread: the store waits for the disk, and connections must not.
async fn blocking<T: Send + 'static>(step: impl FnOnce() -> Result<T, Refusal> + Send + 'static) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(step).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a request failed inside nebula-ca; please report this");
        Err(Refusal::Internal)
    })
}

/// The same for a client of the monitoring listener, whose place is taken until the work is done even if it has gone.
async fn holding<T: Send + 'static>(
    place: Arc<Place>,
    step: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    blocking(move || {
        let done = step();
        drop(place);
        done
    })
    .await
}
