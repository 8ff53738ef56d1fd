//! The HTTP API: paths, bodies and statuses; every answer but the health line is JSON.

use std::sync::Arc;

use axum::{
    Extension, Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State, rejection::BytesRejection},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use nebula_cert::issuance::{self, CERTIFICATE_PATH, MAX_BODY, TRUST_PATH};

use crate::{
    refusal::Refusal,
    server::{Caller, Service},
    time,
};

/// All paths of the service.
pub(crate) fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route(CERTIFICATE_PATH, post(certificate))
        .route(TRUST_PATH, get(trust))
        .route("/healthz", get(health))
        .fallback(async || refuse(&Refusal::NotFound))
        .method_not_allowed_fallback(async || refuse(&Refusal::WrongMethod))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(service)
}

/// The answer to whoever is refused.
pub(crate) fn refuse(refusal: &Refusal) -> Response {
    let status = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, Json(issuance::Refusal::from(refusal))).into_response()
}

async fn certificate(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Caller>,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let answered = blocking(move || {
        let request = match read_request(body) {
            Ok(request) => request,
            Err(refusal) => {
                service.note_unreadable(&refusal, caller);
                return Err(refusal);
            }
        };
        service.answer(&request, caller)
    });
    match answered.await {
        Ok(issued) => Json(issued.reply).into_response(),
        Err(refusal) => refuse(&refusal),
    }
}

fn read_request(body: Result<Bytes, BytesRejection>) -> Result<issuance::Request, Refusal> {
    let body = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Refusal::BodyTooLarge,
        _ => Refusal::MalformedRequest("the body did not arrive completely".to_owned()),
    })?;
    // Only where and of what kind the mistake is: the text of the parser's error may repeat what was sent, secrets too.
    serde_json::from_slice(&body).map_err(|error| {
        let kind = match error.classify() {
            serde_json::error::Category::Data => "a field is missing, unknown or of the wrong type",
            _ => "syntax error",
        };
        Refusal::MalformedRequest(format!("{kind}, line {} column {}", error.line(), error.column()))
    })
}

async fn trust(State(service): State<Arc<Service>>, headers: HeaderMap) -> Response {
    let trust = match blocking(move || service.issuer().trust(time::now())).await {
        Ok(trust) => trust,
        Err(refusal) => return refuse(&refusal),
    };
    let known = headers.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
    let tag = [(header::ETAG, trust.etag.clone())];
    if known.is_some_and(|tags| trust.is_known(tags)) {
        (StatusCode::NOT_MODIFIED, tag).into_response()
    } else {
        (tag, Json(trust.body)).into_response()
    }
}

async fn health(State(service): State<Arc<Service>>) -> Response {
    match blocking(move || service.issuer().health(time::now())).await {
        Ok(()) => "ok\n".into_response(),
        Err(Refusal::Internal) => {
            (StatusCode::SERVICE_UNAVAILABLE, "the store failed; restart nebula-ca, see its log\n").into_response()
        }
        Err(refusal) => (StatusCode::SERVICE_UNAVAILABLE, format!("{refusal}\n")).into_response(),
    }
}

/// The store waits for the disk; connections must not wait with it.
async fn blocking<T: Send + 'static>(step: impl FnOnce() -> Result<T, Refusal> + Send + 'static) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(step).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a request failed inside nebula-ca; please report this");
        Err(Refusal::Internal)
    })
}
