//! Forwards a request to the agent of another node. So kubectl needs the right to the proxy of one Service only,
//! behind which are the agents' APIs and nothing else.
//!
//! Whoever asks cannot choose an address: a request names a node, and the API server says where the agent of that node
//! is. That agent judges the token as if it had been asked directly.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use kube::Client;
use nebula_cni_contract::agent_api::{FORWARDED_HEADER, TOKEN_HEADER};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use super::agents::{Agents, Away};
use super::denied::Denied;
use super::token::Token;
use super::unverified;

/// The way from this agent to the others.
pub(super) struct Gateway {
    agents: Agents,
    places: Arc<Semaphore>,
}

/// Ends the connection to the other agent when nobody needs it any more.
struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer on its way. It is read as fast as the client takes it.
struct Answer {
    body: BodyDataStream,
    _connection: Connection,
    _place: OwnedSemaphorePermit,
}

impl Gateway {
    pub(super) fn new(client: Client) -> Self {
        let places = Arc::new(Semaphore::new(PLACES));
        Self { agents: Agents::new(client), places }
    }

    /// Forwards a request of somebody whose token the API server accepts.
    pub(super) async fn forward(&self, node: &str, token: &Token, request: Request) -> Result<Response, Denied> {
        if request.headers().contains_key(FORWARDED_HEADER) {
            return Err(Denied::Away(Away::Astray { node: node.to_owned() }));
        }
        if ![Method::GET, Method::POST].contains(request.method()) {
            return Err(Denied::Path);
        }
        let place = tokio::time::timeout(PLACE_WITHIN, Arc::clone(&self.places).acquire_owned()).await;
        let place = place.map_err(|_| Denied::Working)?.map_err(|_| Denied::Working)?;
        let request = tokio::time::timeout(BODY_WITHIN, passed_on(request, token)).await;
        let request = request.map_err(|_| Denied::Body)??;
        let address = self.agents.find(node).await?;
        let asked = tokio::time::timeout(HEAD_WITHIN, ask(address, request)).await;
        let late = |_| format!("no answer within {} s", HEAD_WITHIN.as_secs());
        let asked = asked.map_err(late).and_then(|asked| asked);
        let (answer, connection) = asked.map_err(|why| self.agents.is_silent(node, address, why))?;
        let (head, body) = answer.into_parts();
        let answer = Answer { body: Body::new(body).into_data_stream(), _connection: connection, _place: place };
        let body = stream::unfold(Some(answer), |answer| async move {
            let mut answer = answer?;
            match tokio::time::timeout(SILENT_FOR, answer.body.next()).await {
                Ok(Some(Ok(bytes))) => Some((Ok(bytes), Some(answer))),
                Ok(Some(Err(error))) => Some((Err(error), None)),
                Ok(None) => None,
                Err(late) => Some((Err::<Bytes, _>(axum::Error::new(late)), None)),
            }
        });
        let mut headers = HeaderMap::new();
        for name in [header::CONTENT_TYPE, header::CONTENT_LENGTH, header::CACHE_CONTROL] {
            if let Some(value) = head.headers.get(&name) {
                headers.insert(name, value.clone());
            }
        }
        Ok((head.status, headers, Body::from_stream(body)).into_response())
    }
}

/// Sends a request to an agent, and waits for the head of its answer.
async fn ask(address: SocketAddr, request: Request) -> Result<(hyper::Response<Incoming>, Connection), String> {
    let connected = async {
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::IpAddress(address.ip().into());
        unverified::connector().map_err(io::Error::other)?.connect(name, stream).await
    };
    let late = |_| format!("no connection within {} s", CONNECT_WITHIN.as_secs());
    let connected = tokio::time::timeout(CONNECT_WITHIN, connected).await.map_err(late)?;
    let stream = connected.map_err(|error: io::Error| error.to_string())?;
    let connection =
        http1::Builder::new().max_buf_size(MAX_HEADER_BYTES).max_headers(MAX_HEADERS).handshake(TokioIo::new(stream));
    let (mut sender, connection) = connection.await.map_err(|error| error.to_string())?;
    let connection = Connection(tokio::spawn(connection).abort_handle());
    let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
    Ok((answer, connection))
}

/// The request as the other agent gets it: the same path, the token, and nothing else of what came.
async fn passed_on(request: Request, token: &Token) -> Result<Request, Denied> {
    let (head, body) = request.into_parts();
    let body = to_bytes(body, MAX_BODY).await.map_err(|_| Denied::Body)?;
    let mut token = HeaderValue::from_str(token.expose()).map_err(|_| Denied::NoToken)?;
    token.set_sensitive(true);
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut passed_on = Request::builder()
        .method(head.method)
        .uri(path)
        .header(header::HOST, "nebula-cni-agent")
        .header(TOKEN_HEADER, token)
        .header(FORWARDED_HEADER, "1");
    if let Some(kind) = head.headers.get(header::CONTENT_TYPE) {
        passed_on = passed_on.header(header::CONTENT_TYPE, kind);
    }
    passed_on.body(Body::from(body)).map_err(|_| Denied::Path)
}

const PLACES: usize = 32;
const PLACE_WITHIN: Duration = Duration::from_secs(5);
const BODY_WITHIN: Duration = Duration::from_secs(5);
pub(super) const MAX_BODY: usize = 256 << 10;
const CONNECT_WITHIN: Duration = Duration::from_secs(3);
/// kubectl waits as long.
const HEAD_WITHIN: Duration = Duration::from_secs(30);
/// A stream of flows says something every quarter of a minute.
const SILENT_FOR: Duration = Duration::from_secs(60);
const MAX_HEADER_BYTES: usize = 32 << 10;
const MAX_HEADERS: usize = 64;
