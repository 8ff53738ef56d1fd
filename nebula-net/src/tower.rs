//! Services of axum on the overlay (feature `tower`): who connects, and who may.
//!
//! ```no_run
//! # async fn run(net: nebula_net::Net) -> std::io::Result<()> {
//! use axum::extract::ConnectInfo;
//! use axum::{Router, routing::get};
//! use nebula_net::tower::{Peer, RequireGroup};
//!
//! let greet = |ConnectInfo(peer): ConnectInfo<Peer>| async move { format!("hello, {}", peer.name().unwrap_or("stranger")) };
//! let service = Router::new().route("/", get(greet)).layer(RequireGroup::new("ops"));
//! axum::serve(net.listen(80)?, service.into_make_service_with_connect_info::<Peer>()).await
//! # }
//! ```

use std::convert::Infallible;
use std::future::{Ready, pending, ready};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::extract::ConnectInfo;
use axum::extract::connect_info::Connected;
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::serve::{IncomingStream, Listener};
use futures_util::future::Either;
use nebula_cert::VerifiedCertificate;
use tower::{Layer, Service};

use crate::{TcpListener, TcpStream};

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

    /// The verified certificate. `None` if the address is in a network behind another node, whose certificate does not name the host.
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
        loop {
            match Self::accept(self).await {
                // A connection that has ended already has no address.
                Ok(stream) => {
                    if let Ok(address) = stream.peer_addr() {
                        return (stream, address);
                    }
                }
                // The node was closed: nobody will connect.
                Err(_) => pending().await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), self.port()))
    }
}

/// Lets only requests through whose peer has a certificate with one of some groups. Others are answered with 403 Forbidden.
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
