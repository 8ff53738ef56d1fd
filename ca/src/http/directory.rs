//! The directory over HTTP: who asks, the parameters, the long poll, and a body that counts as open until it was read.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, Uri, header},
    response::{IntoResponse, Response},
};
use hyper::body::{Frame, SizeHint};
use nebula_cert::{directory::MAX_WAIT_SECONDS, hex};
use tokio::time::Instant;

use super::{bearer, blocking, of_agent, refuse};
use crate::{
    agents::OpenAnswer,
    connections::{Caller, Connection},
    members::Question,
    refusal::Refusal,
    service::Service,
};

/// Answers at once or, with `wait`, as soon as somebody joined or left.
pub(super) async fn directory(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Caller>,
    Extension(connection): Extension<Arc<Connection>>,
    headers: HeaderMap,
    uri: Uri,
) -> Response {
    let authorized = {
        let _busy = connection.work();
        agent(&service, caller, &headers).await
    };
    let node = match authorized {
        Ok(node) => node,
        Err(refusal) => return refuse(&refusal),
    };
    connection.has_proved(&format!("node {node}"));
    let Some(open) = service.agents().open(&node) else { return refuse(&Refusal::TooManyAnswers(node)) };
    match answer(&service, &connection, &uri).await {
        Ok((text, retry_after)) => {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
            if let Some(seconds) = retry_after {
                headers.insert(header::RETRY_AFTER, seconds.into());
            }
            let body = Whole { bytes: Some(text.into()), _open: open };
            (headers, Body::new(body)).into_response()
        }
        Err(refusal) => refuse(&refusal),
    }
}

/// The node whose agent asks.
async fn agent(service: &Arc<Service>, caller: Caller, headers: &HeaderMap) -> Result<String, Refusal> {
    let token = bearer(headers)?;
    if let Some(node) = service.known_agent(&token) {
        return Ok(node);
    }
    let proof = of_agent(&token, caller);
    let turn = service.turn("directory", &proof, caller).await?;
    let service = Arc::clone(service);
    blocking(move || service.agent(&proof, &token, caller, turn)).await
}

/// The text, and the seconds to wait before the next question.
async fn answer(service: &Service, connection: &Arc<Connection>, uri: &Uri) -> Result<(String, Option<u16>), Refusal> {
    let Parameters { question, wait } = Parameters::read(uri.query().unwrap_or_default())?;
    let end = wait.map(|wait| Instant::now() + Duration::from_secs(wait.min(MAX_WAIT_SECONDS)));
    let (members, mut slot) = (service.members(), None);
    let mut news = members.news();
    loop {
        news.mark_unchanged();
        if let Some(text) = members.answer(&question, end.is_none()).map_err(|_| Refusal::Internal)? {
            return Ok((text, None));
        }
        let unchanged = || {
            let text = members.answer(&question, true).map_err(|_| Refusal::Internal)?;
            text.ok_or(Refusal::Internal)
        };
        // Without an end there is always an answer.
        let Some(end) = end else { return Err(Refusal::Internal) };
        if slot.is_none() || service.waiting().is_closed() {
            match service.waiting().try_acquire().ok().zip(connection.wait()) {
                Some(free) => slot = Some(free),
                None => return unchanged().map(|text| (text, Some(RETRY_SECONDS))),
            }
        }
        match tokio::time::timeout_at(end, news.changed()).await {
            Err(_) => return unchanged().map(|text| (text, None)),
            // Pods come and go in groups.
            Ok(_) => tokio::time::sleep(GATHER).await,
        }
    }
}

/// What the query says.
#[derive(Debug, Default)]
struct Parameters {
    question: Question,
    wait: Option<u64>,
}

impl Parameters {
    fn read(query: &str) -> Result<Self, Refusal> {
        let malformed = |name: &str| Refusal::MalformedRequest(format!("{name} in the query is not understood"));
        let mut read = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("since", version)) => read.question.since = Some(version.to_owned()),
                Some(("wait", seconds)) => read.wait = Some(seconds.parse().map_err(|_| malformed("wait"))?),
                Some(("from", cursor)) => {
                    let uid = hex::decode(cursor).and_then(|bytes| String::from_utf8(bytes).ok());
                    read.question.from = Some(uid.ok_or_else(|| malformed("from"))?);
                }
                // Those of later releases.
                _ => {}
            }
        }
        Ok(read)
    }
}

/// A body of one piece. It is dropped, and the answer no longer open, once the connection has taken all but the last
/// few kilobytes of it.
struct Whole {
    bytes: Option<Bytes>,
    _open: OpenAnswer,
}

impl hyper::body::Body for Whole {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.bytes.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

const RETRY_SECONDS: u16 = 10;
const GATHER: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read_in_any_order_and_mistakes_are_named() {
        let read = Parameters::read("since=e-7&wait=50&later=1&from=686f73742061").unwrap();
        assert_eq!((read.question.since.as_deref(), read.wait), (Some("e-7"), Some(50)));
        assert_eq!(read.question.from.as_deref(), Some("host a"));
        for bad in ["wait=", "wait=-1", "wait=x", "from=0", "from=ff", "from=host"] {
            assert!(matches!(Parameters::read(bad), Err(Refusal::MalformedRequest(_))), "{bad}");
        }
        assert_eq!(Parameters::read("").unwrap().wait, None);
    }
}
