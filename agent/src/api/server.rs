//! Connections of the API: TLS with a key of this start, their number, and how long they may take.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use nebula_cert::listener::Source;
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::{Api, routes};
use crate::cluster::api::ApiError;
use crate::listener;

/// Why there is no API.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Nobody can be asked about tokens.
    #[error(transparent)]
    Client(ApiError),
    /// The address is taken, or not one of this node.
    #[error("cannot listen on {address}: {source}; \"api\" in agent.json changes it (agent.api.port in the chart)")]
    Listen {
        /// Which address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// No key can be made.
    #[error("cannot make a TLS key: {0}")]
    Key(#[from] rcgen::Error),
    /// TLS refuses the key.
    #[error("cannot use the TLS key: {0}")]
    Tls(#[from] rustls::Error),
}

/// Serves until the task is cancelled.
///
/// # Errors
/// Returns an error if no TLS key can be made.
pub async fn serve(api: Arc<Api>, listener: TcpListener) -> Result<(), ServeError> {
    let acceptor = acceptor()?;
    listener::accept(listener, MAX_CLIENTS, |stream, source| {
        converse(stream, source, acceptor.clone(), Arc::clone(&api))
    })
    .await;
    Ok(())
}

/// The API server verifies no certificate of a pod, so nothing would be gained by one of somebody's: the key is made
/// here, and is gone with this process.
fn acceptor() -> Result<TlsAcceptor, ServeError> {
    let made = rcgen::generate_simple_self_signed(vec!["nebula-cni-agent".to_owned()])?;
    let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // A session that goes on saves a client that comes back a moment, and costs memory for each that does not.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn converse(stream: TcpStream, source: Source, acceptor: TlsAcceptor, api: Arc<Api>) {
    // A client that went away, or is too slow, is not an error of the node.
    let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_WITHIN, acceptor.accept(stream)).await else { return };
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_WITHIN)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADERS)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes::router(api, source)));
    let _ = tokio::time::timeout(CONNECTION_WITHIN, connection).await;
}

const MAX_CLIENTS: usize = 64;
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
const HEADERS_WITHIN: Duration = Duration::from_secs(5);
/// Streams that go on end themselves before.
const CONNECTION_WITHIN: Duration = Duration::from_secs(15 * 60);
const MAX_HEADER_BYTES: usize = 32 << 10;
const MAX_HEADERS: usize = 64;
