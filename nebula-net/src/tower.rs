//! Services of axum on the overlay (feature `tower`): who connects, and who may; and clients of hyper-util and tonic:
//! [`Connector`].
//!
//! ```no_run
//! # async fn run(net: nebula_net::Net) -> std::io::Result<()> {
//! use axum::extract::ConnectInfo;
//! use axum::{Router, routing::get};
//! use nebula_net::tower::{Peer, RequireGroup};
//!
//! let greet = |ConnectInfo(peer): ConnectInfo<Peer>| async move {
//!     format!("hello, {}", peer.name().unwrap_or("stranger"))
//! };
//! let service = Router::new().route("/", get(greet)).layer(RequireGroup::new("ops"));
//! axum::serve(net.listen(80)?, service.into_make_service_with_connect_info::<Peer>()).await
//! # }
//! ```

use std::convert::Infallible;
use std::future::{Ready, pending, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::extract::ConnectInfo;
use axum::extract::connect_info::Connected;
use axum::http::{Request, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::serve::{IncomingStream, Listener};
use futures_util::future::Either;
use hyper_util::client::legacy::connect::{Connected as Connection, Connection as Connects};
use hyper_util::rt::TokioIo;
use nebula_cert::VerifiedCertificate;
use tower::{Layer, Service};

use crate::{Net, TcpListener, TcpStream};

/// Who is at the other end of a connection: what `ConnectInfo<Peer>` extracts.
#[derive(Debug, Clone)]
pub struct Peer {
    address: SocketAddr,
    certificate: Option<VerifiedCertificate>,
}

impl Peer {
    /// Overlay address and port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The verified certificate. `None` if the address is in a network behind another node, whose certificate does
    /// not name the host.
    #[must_use]
    pub fn certificate(&self) -> Option<&VerifiedCertificate> {
        self.certificate.as_ref()
    }

    /// The name in the certificate.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.certificate.as_ref().map(|certificate| certificate.name())
    }

    /// Whether the certificate has one of these groups.
    pub fn is_in_any<'a>(&self, groups: impl IntoIterator<Item = &'a str>) -> bool {
        let own = self.certificate.as_ref().map_or(&[][..], |certificate| certificate.groups());
        groups.into_iter().any(|group| own.iter().any(|own| own == group))
    }
}

impl Connected<IncomingStream<'_, TcpListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TcpListener>) -> Self {
        Self { address: *stream.remote_addr(), certificate: stream.io().peer_certificate() }
    }
}

impl Listener for TcpListener {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        match Self::accept(self).await {
            Ok(accepted) => accepted,
            // The node was closed: nobody will connect.
            Err(_) => pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Self::local_addr(self)
    }
}

/// Lets only requests through whose peer has a certificate with one of some groups. Others are answered with 403
/// Forbidden.
///
/// The service must be made by `into_make_service_with_connect_info::<Peer>()`; without it, nobody is let through.
#[derive(Debug, Clone)]
pub struct RequireGroup {
    groups: Arc<[String]>,
}

impl RequireGroup {
    /// Requires this group.
    pub fn new(group: impl Into<String>) -> Self {
        Self::any_of([group])
    }

    /// Requires one of these groups; without any, nobody is let through.
    pub fn any_of<G: Into<String>>(groups: impl IntoIterator<Item = G>) -> Self {
        Self { groups: groups.into_iter().map(Into::into).collect() }
    }
}

impl<S> Layer<S> for RequireGroup {
    type Service = OfGroup<S>;

    fn layer(&self, inner: S) -> OfGroup<S> {
        OfGroup { inner, groups: Arc::clone(&self.groups) }
    }
}

/// The service that [`RequireGroup`] makes.
#[derive(Debug, Clone)]
pub struct OfGroup<S> {
    inner: S,
    groups: Arc<[String]>,
}

impl<S, B> Service<Request<B>> for OfGroup<S>
where
    S: Service<Request<B>, Response = Response, Error = Infallible>,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Either<S::Future, Ready<Result<Response, Infallible>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let peer = request.extensions().get::<ConnectInfo<Peer>>();
        if peer.is_some_and(|ConnectInfo(peer)| peer.is_in_any(self.groups.iter().map(String::as_str))) {
            return Either::Left(self.inner.call(request));
        }
        match peer {
            Some(ConnectInfo(peer)) => {
                tracing::debug!(peer = %peer.address, name = peer.name(), "a peer without a required group is refused");
            }
            None => tracing::error!(
                "no peer is known: make the service by into_make_service_with_connect_info::<nebula_net::tower::Peer>()"
            ),
        }
        let text = "the certificate of this host has none of the groups that are required here\n";
        Either::Right(ready(Ok((StatusCode::FORBIDDEN, text).into_response())))
    }
}

/// Connects clients of hyper-util, and channels of tonic, over the overlay: the host of a URI is what [`Net::dial`]
/// takes. Port 80 if the URI has none, 443 with the scheme `https` (whose TLS is that of a connector around this one,
/// if any: the overlay is encrypted). The [`Peer`] is in the extensions of each response.
///
/// ```no_run
/// # async fn run(net: nebula_net::Net) -> Result<(), Box<dyn std::error::Error>> {
/// use hyper_util::client::legacy::Client;
/// use hyper_util::rt::TokioExecutor;
/// use nebula_net::tower::{Connector, Peer};
///
/// let client: Client<_, axum::body::Body> = Client::builder(TokioExecutor::new()).build(Connector::new(net));
/// let answer = client.get("http://host-2/".parse()?).await?;
/// println!("answered by {:?}", answer.extensions().get::<Peer>().and_then(Peer::name));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Connector {
    net: Net,
}

impl Connector {
    /// Connects as this node.
    #[must_use]
    pub fn new(net: Net) -> Self {
        Self { net }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<TcpStream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let net = self.net.clone();
        Box::pin(async move {
            let no_host = || io::Error::new(io::ErrorKind::InvalidInput, format!("no host in {uri}"));
            let host = uri.host().ok_or_else(no_host)?;
            let port = uri.port_u16().unwrap_or_else(|| if uri.scheme_str() == Some("https") { 443 } else { 80 });
            net.dial(&format!("{host}:{port}")).await.map(TokioIo::new)
        })
    }
}

impl Connects for TcpStream {
    fn connected(&self) -> Connection {
        let connection = Connection::new();
        let Ok(address) = self.peer_addr() else { return connection };
        connection.extra(Peer { address, certificate: self.peer_certificate() })
    }
}
