//! Why a peer cannot be reached, as far as the node knows.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use nebula_cert::{Certificate, UnixTime};
use nebula_core::counters::Direction;
use nebula_core::diagnosis::{Attempt, RefusalReason};
use nebula_core::{DropReason, FlowKey, FlowTrace, Node, Outcome, protocol};

use super::clock;
use crate::stack::Flow;
use crate::tcp::Error;

/// Why a peer cannot be reached: the source of the [`io::Error`] that [`Net::dial`](crate::Net::dial) and
/// [`Net::up`](crate::Net::up) return.
///
/// ```
/// # fn log(error: &std::io::Error) {
/// use nebula_net::Unreached;
///
/// if let Some(Unreached::NoAnswer { tried, .. }) = error.get_ref().and_then(|cause| cause.downcast_ref()) {
///     eprintln!("is UDP to {tried:?} blocked?");
/// }
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unreached {
    /// This node's own certificate is outside of its validity, so nobody answers its handshakes.
    #[error("the certificate of this node, {name}, is {}", validity(*.from, *.until))]
    OwnCertificate {
        /// Its name.
        name: String,
        /// When it begins to be valid.
        from: UnixTime,
        /// When it ends.
        until: UnixTime,
    },
    /// No network of this node, and no route of its configuration, leads to the address.
    #[error("no route leads to {0}")]
    NoRoute(IpAddr),
    /// No rule of this node's firewall allows the connection.
    #[error("no outbound rule of this node's firewall allows port {} of {}", .0.port(), .0.ip())]
    NoRule(SocketAddr),
    /// Packets are dropped here for another reason.
    #[error("packets to {peer} are dropped here: {}", .reason.name())]
    Dropped {
        /// The peer.
        peer: IpAddr,
        /// Why.
        reason: DropReason,
    },
    /// No lighthouse and no configuration says where the peer is.
    #[error("where {0} is on the underlay is not known: no static_hosts entry, and no lighthouse knows it")]
    NoEndpoint(IpAddr),
    /// Nobody answers where the peer should be.
    #[error("{peer} does not answer a handshake at {}", list(.tried))]
    NoAnswer {
        /// The peer.
        peer: IpAddr,
        /// Endpoints that were tried.
        tried: Vec<SocketAddr>,
    },
    /// The peer's answer to the handshake was refused: another CA, an expired certificate, another host.
    #[error("the handshake with {peer} was refused here: {text}")]
    Handshake {
        /// The peer.
        peer: IpAddr,
        /// The kind of reason.
        reason: RefusalReason,
        /// The reason with every detail.
        text: String,
    },
    /// There is a tunnel to the peer, but nobody answers the SYN: the firewall of the peer may drop it, or the host
    /// behind it is gone.
    #[error("there is a tunnel to {peer}, but nobody answers at port {port}: does the peer's firewall let it in?")]
    Silent {
        /// The peer.
        peer: IpAddr,
        /// The port.
        port: u16,
    },
    /// The transport layer's error: refused, no free port, and so on.
    #[error(transparent)]
    Transport(#[from] Error),
}

impl From<Unreached> for io::Error {
    fn from(cause: Unreached) -> Self {
        use io::ErrorKind;
        let kind = match &cause {
            Unreached::Transport(error) => return (*error).into(),
            Unreached::OwnCertificate { .. } | Unreached::NoRule(_) | Unreached::Handshake { .. } => {
                ErrorKind::PermissionDenied
            }
            Unreached::NoRoute(_) => ErrorKind::NetworkUnreachable,
            Unreached::Dropped { .. } | Unreached::NoEndpoint(_) | Unreached::NoAnswer { .. } => {
                ErrorKind::HostUnreachable
            }
            Unreached::Silent { .. } => ErrorKind::TimedOut,
        };
        Self::new(kind, cause)
    }
}

/// What the node knows about a connection from one of its addresses that could not be opened.
pub(crate) fn why(node: &Node, now: Instant, (local, remote): (IpAddr, SocketAddr), error: Error) -> Unreached {
    if !matches!(error, Error::Unreachable | Error::TimedOut) {
        return error.into();
    }
    let FlowTrace { route, tunnel, outcome, .. } = trace(node, now, local, remote);
    let peer = route.as_ref().map_or_else(|_| remote.ip(), |route| route.peer);
    match outcome {
        Outcome::Dropped(DropReason::NoRoute) => Unreached::NoRoute(remote.ip()),
        Outcome::Dropped(DropReason::NoRule) => Unreached::NoRule(remote),
        Outcome::Dropped(reason) => Unreached::Dropped { peer, reason },
        _ if tunnel.is_some() => Unreached::Silent { peer, port: remote.port() },
        _ => no_tunnel(node, now, peer),
    }
}

/// The peer that packets of a flow are sent to: the remote end, or the gateway in front of it.
pub(crate) fn peer_of(node: &Node, now: Instant, Flow { local, remote }: Flow) -> Option<IpAddr> {
    Some(trace(node, now, local.ip(), remote).route.ok()?.peer)
}

fn trace(node: &Node, now: Instant, local: IpAddr, remote: SocketAddr) -> FlowTrace {
    let (local_port, remote_port, protocol) = (EPHEMERAL, remote.port(), protocol::TCP);
    let flow = FlowKey { local, remote: remote.ip(), local_port, remote_port, protocol, fragment: false };
    node.trace(now, Direction::Outbound, &flow)
}

/// Why there is no tunnel to a peer.
pub(crate) fn no_tunnel(node: &Node, now: Instant, peer: IpAddr) -> Unreached {
    if let Some(cause) = own_certificate(node.own_certificate()) {
        return cause;
    }
    let attempt = node.diagnosis(now).attempts.into_iter().find(|attempt| attempt.peer == peer);
    match attempt {
        Some(Attempt { refusal: Some(refusal), .. }) => {
            Unreached::Handshake { peer, reason: refusal.reason, text: refusal.text }
        }
        Some(Attempt { tried, .. }) if !tried.is_empty() => {
            Unreached::NoAnswer { peer, tried: tried.into_iter().map(|tried| tried.endpoint).collect() }
        }
        _ => Unreached::NoEndpoint(peer),
    }
}

/// Whether the certificate of a node is outside of its validity.
pub(crate) fn own_certificate(certificate: &Certificate) -> Option<Unreached> {
    let at = UnixTime::try_from(clock::wall().unix.as_secs()).unwrap_or(UnixTime::MAX);
    certificate.is_expired(at).then(|| Unreached::OwnCertificate {
        name: certificate.name().to_owned(),
        from: certificate.not_before(),
        until: certificate.not_after(),
    })
}

/// Any port of this side, to ask about a route.
const EPHEMERAL: u16 = 40_000;

fn validity(from: UnixTime, until: UnixTime) -> String {
    let at = UnixTime::try_from(clock::wall().unix.as_secs()).unwrap_or(UnixTime::MAX);
    if at < from {
        format!("not valid yet, for another {} s by the clock of this host", from - at)
    } else {
        format!("expired since {} s", at.saturating_sub(until))
    }
}

fn list(endpoints: &[SocketAddr]) -> String {
    endpoints.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
