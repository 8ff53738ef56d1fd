//! Revocation over HTTP: the token in its header, and the request.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Bytes,
    extract::{State, rejection::BytesRejection},
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use nebula_cert::revocation::{Request, Revocation, TOKEN_HEADER};
use zeroize::Zeroizing;

use super::{blocking, readable, refuse};
use crate::{
    connections::{Caller, Connection},
    refusal::Refusal,
    service::Service,
};

/// Answers a request to revoke certificates, which carries a token of a ServiceAccount.
pub(super) async fn revoke(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Caller>,
    Extension(connection): Extension<Arc<Connection>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let _busy = connection.work();
    match answer(&service, caller, &headers, body).await {
        Ok(revocation) => ([(header::CACHE_CONTROL, "no-store")], Json(revocation)).into_response(),
        Err(refusal) => refuse(&refusal),
    }
}

async fn answer(
    service: &Arc<Service>,
    caller: Caller,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Revocation, Refusal> {
    let token = match service.check_revocation().and_then(|()| token_in(headers)) {
        Ok(token) => token,
        Err(refusal) => {
            let service = Arc::clone(service);
            return blocking(move || {
                service.note_revocation_refused(&refusal, caller);
                Err(refusal)
            })
            .await;
        }
    };
    let request: Request = readable(service, body, caller).await?;
    let place = service.place_of_operator(&token, caller).await?;
    let service = Arc::clone(service);
    blocking(move || service.revoke(&token, &request, caller, place)).await
}

fn token_in(headers: &HeaderMap) -> Result<Zeroizing<String>, Refusal> {
    let token = headers.get(TOKEN_HEADER).and_then(|value| value.to_str().ok()).map(str::trim);
    token
        .filter(|token| !token.is_empty())
        .map(|token| Zeroizing::new(token.to_owned()))
        .ok_or(Refusal::NoOperatorToken)
}
