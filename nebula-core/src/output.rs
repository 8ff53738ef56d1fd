//! Everything that the two planes put out: what became of a packet, what to send, what happened.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_cert::{Fingerprint, VerifiedCertificate, Version};

use crate::GatewayState;
use crate::counters::{Direction, DropReason};
use crate::diagnosis::{Attempt, DeniedFlow};
use crate::index::{LocalIndex, RelayIndex, RemoteIndex};
use crate::wire::header::MessageType;
use crate::wire::ip::FlowKey;
use crate::wire::offload::Offload;

/// What became of an overlay packet handed to [`crate::Forwarder::outbound`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Verdict {
    /// Sealed into the lane's arena; send the lane's runs.
    Transmit,
    /// The control plane has to act first; a punt is in the lane.
    Punt,
    /// Not for the overlay: the caller sends the packet, cut if it is a super-packet, on the primary network. Only
    /// under [`crate::Config::capture`].
    Bypass,
    /// From this node to itself under another address; a delivery is in the lane. Only under
    /// [`crate::Config::capture`].
    Deliver,
    /// Dropped and counted.
    Drop(DropReason),
}

/// A datagram that the control plane wants to be sent on the underlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transmit {
    /// Destination.
    pub to: SocketAddr,
    /// Complete UDP payload.
    pub datagram: Vec<u8>,
    /// Whether it must not be fragmented, not even by this host: it tests which length the path carries (in IPv4, with
    /// the DF bit set whatever the kernel knows about the path; Linux: `IP_PMTUDISC_PROBE`). To be dropped if it is
    /// longer than the device allows, and if the caller cannot send it so.
    pub must_be_whole: bool,
}

/// A copy of an overlay packet that has to wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketOwned {
    /// IP packet, possibly a super-packet.
    pub bytes: Vec<u8>,
    /// How to segment it and complete its checksum.
    pub offload: Offload,
}

/// The path on which a datagram arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// From this underlay source.
    Direct(SocketAddr),
    /// Inside a datagram from a relay, which authenticated it.
    Relayed {
        /// Underlay source of the outer datagram.
        from: SocketAddr,
        /// Own index of the hop.
        hop: RelayIndex,
    },
}

impl Origin {
    /// The endpoint of the peer itself; `None` if it is behind a relay.
    #[must_use]
    pub fn endpoint(self) -> Option<SocketAddr> {
        match self {
            Self::Direct(from) => Some(from),
            Self::Relayed { .. } => None,
        }
    }

    /// Underlay source: the peer's, or that of its relay.
    #[must_use]
    pub fn underlay(self) -> SocketAddr {
        match self {
            Self::Direct(from) | Self::Relayed { from, .. } => from,
        }
    }
}

impl From<SocketAddr> for Origin {
    fn from(from: SocketAddr) -> Self {
        Self::Direct(from)
    }
}

/// Work that the forwarding plane hands to the control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Punt {
    /// No tunnel to `peer` yet; keep `packet` and start a handshake.
    NoTunnel {
        /// Overlay address of the peer (the gateway for a subnet route).
        peer: IpAddr,
        /// The packet that has to wait.
        packet: PacketOwned,
    },
    /// The directory knows nothing about the destination; keep `packet` until there is a newer directory.
    Unknown {
        /// The packet that has to wait.
        packet: PacketOwned,
    },
    /// Start a handshake with `peer`, a gateway: its packets take another gateway meanwhile, or it may take those of
    /// another gateway.
    Connect {
        /// Overlay address of a gateway.
        peer: IpAddr,
    },
    /// A handshake datagram (type 0), header included.
    Handshake {
        /// The path on which it arrived.
        from: Origin,
        /// Complete datagram.
        datagram: Vec<u8>,
    },
    /// A recv_error datagram (type 2).
    RecvError {
        /// The path on which it arrived.
        from: Origin,
        /// The index the peer does not know; of a tunnel or, if it came directly, of a relay.
        index: RemoteIndex,
    },
    /// A datagram for an index that is not in use: answer with a recv_error, if the policy permits.
    UnknownIndex {
        /// The path on which it arrived.
        from: Origin,
        /// Index found in the datagram.
        index: u32,
    },
    /// An authenticated message for the control plane: lighthouse, test, close, relay control.
    Message {
        /// Tunnel it came through.
        tunnel: LocalIndex,
        /// The path on which it arrived.
        from: Origin,
        /// Kind of message.
        kind: MessageType,
        /// Decrypted body.
        plaintext: Vec<u8>,
    },
    /// An authenticated datagram came from an endpoint other than the tunnel's.
    Roamed {
        /// Tunnel.
        tunnel: LocalIndex,
        /// New underlay source.
        from: SocketAddr,
        /// Length of the datagram, or of several.
        bytes: usize,
    },
    /// The first packet in a tunnel by a path of which it is not known how large a packet it carries, or one that opens
    /// a TCP connection before that is known.
    PathUnexamined {
        /// Tunnel.
        tunnel: LocalIndex,
        /// The packet, if it has to wait: it says how large the packets are that its sender wants to get.
        waits: Option<PacketOwned>,
    },
    /// An overlay packet was dropped. Only a sample, for who asks why.
    Dropped {
        /// Which way it went.
        direction: Direction,
        /// Its addresses, ports and protocol.
        flow: FlowKey,
        /// Why.
        reason: DropReason,
        /// Tunnel it came through, or would have.
        tunnel: Option<LocalIndex>,
    },
    /// A flow passed that policies of the network in audit would refuse. Only a sample.
    Audited {
        /// Which way its packet went.
        direction: Direction,
        /// Its addresses, ports and protocol in the tunnel.
        flow: FlowKey,
        /// The tunnel.
        tunnel: LocalIndex,
    },
    /// An authenticated datagram came through a tunnel whose peer had not yet proved that it has the keys.
    Confirmed {
        /// Tunnel.
        tunnel: LocalIndex,
        /// The path on which it arrived.
        from: Origin,
    },
}

/// An event in the control plane, for logs and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A handshake completed and the peer proved that it has the keys: with its second message, or, if this node
    /// answered, with the first datagram in the tunnel. The tunnel carries packets at once.
    TunnelUp {
        /// Peer's overlay addresses.
        peer: Vec<IpAddr>,
        /// Peer's certificate name.
        name: String,
        /// Underlay endpoint of the peer, or of its relay.
        endpoint: SocketAddr,
        /// Overlay address of the relay in between, if any.
        relay: Option<IpAddr>,
        /// Own index.
        local_index: LocalIndex,
        /// Peer's index.
        remote_index: RemoteIndex,
        /// Version and fingerprints of the peer's certificate.
        certificate: PeerCertificate,
        /// Whether this node initiated.
        initiator: bool,
        /// Time from the first attempt to completion; zero if this node answered.
        took: Duration,
    },
    /// A tunnel is gone.
    TunnelDown {
        /// Peer's overlay addresses.
        peer: Vec<IpAddr>,
        /// Peer's certificate name.
        name: String,
        /// The peer's endpoint, if it was not behind a relay.
        endpoint: Option<SocketAddr>,
        /// Own index.
        local_index: LocalIndex,
        /// Peer's index.
        remote_index: RemoteIndex,
        /// Reason.
        reason: TunnelDownReason,
    },
    /// All attempts were used up, or this handshake found no endpoint and was evicted for another.
    HandshakeTimedOut {
        /// Intended peer.
        peer: IpAddr,
        /// Own index, reserved until now.
        local_index: LocalIndex,
        /// Endpoints that the last attempt was sent to.
        endpoints: Vec<SocketAddr>,
        /// Time since the first attempt.
        after: Duration,
        /// What is known about the cause, from this handshake and those before it.
        attempt: Box<Attempt>,
    },
    /// An attempt of a handshake: its first message was sent. Repeats are reported only while debug logging is on.
    HandshakeSent {
        /// Intended peer.
        peer: IpAddr,
        /// Own index.
        local_index: LocalIndex,
        /// Where to; empty while no endpoint of the peer is known.
        endpoints: Vec<SocketAddr>,
        /// Which attempt of this handshake, from 1.
        attempt: u32,
        /// Whether the attempt before it went to the same endpoints.
        is_repeat: bool,
    },
    /// A handshake message was ignored, because anybody could have sent it. Reported only while debug logging is on.
    HandshakeIgnored {
        /// Underlay source.
        from: SocketAddr,
        /// The peer whose answer it seems to be.
        peer: IpAddr,
        /// Human-readable reason.
        reason: String,
    },
    /// A handshake message was refused.
    HandshakeRefused {
        /// Underlay source.
        from: SocketAddr,
        /// Human-readable reason.
        reason: String,
    },
    /// A peer's endpoint changed: it answered there.
    Roamed {
        /// Peer's overlay addresses.
        peer: Vec<IpAddr>,
        /// New endpoint.
        endpoint: SocketAddr,
    },
    /// Two certificates with different names have one overlay address: two hosts, or one that was given another name.
    AddressConflict {
        /// The overlay address.
        address: IpAddr,
        /// The names, that of the host which was there before first.
        names: [String; 2],
        /// Where the other host is, or its relay.
        at: SocketAddr,
        /// Whether it is an address of this node, and the other host was refused.
        is_own: bool,
    },
    /// A lighthouse says that another host has an address of this node. At most once a minute.
    AddressElsewhere {
        /// The overlay address.
        address: IpAddr,
        /// Certificate name of the lighthouse.
        lighthouse: String,
        /// Where the other host is.
        at: Option<SocketAddr>,
    },
    /// A lighthouse, or a host of which this node is the lighthouse, named endpoints to which nobody should be sent:
    /// loopback or link-local ones, or such as no host has. At most once a minute.
    EndpointsRefused {
        /// Certificate name of who named them.
        by: String,
        /// Overlay addresses of the host that would be there.
        host: Vec<IpAddr>,
        /// One of them.
        example: SocketAddr,
        /// How many since the last such event.
        refused: usize,
    },
    /// A flow is denied. Only a sample, and reported only while debug logging is on: each kind of flow once a second.
    FlowDenied(Box<DeniedFlow>),
    /// Something changed about a gateway of a subnet route with several gateways.
    Gateway {
        /// Its overlay address.
        address: IpAddr,
        /// What it was.
        before: GatewayState,
        /// What it is.
        state: GatewayState,
        /// How long it was that.
        after: Duration,
    },
}

/// Identifies a peer's certificate in a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCertificate {
    /// Its version.
    pub version: Version,
    /// Its fingerprint.
    pub fingerprint: Fingerprint,
    /// Fingerprint of the CA that signed it.
    pub issuer: Fingerprint,
}

impl From<&VerifiedCertificate> for PeerCertificate {
    fn from(certificate: &VerifiedCertificate) -> Self {
        Self {
            version: certificate.version(),
            fingerprint: certificate.fingerprint(),
            issuer: certificate.issuer_fingerprint(),
        }
    }
}

/// Why a tunnel ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TunnelDownReason {
    /// The peer sent a CloseTunnel.
    ClosedByPeer,
    /// This node closed it (stop, or on request).
    ClosedHere,
    /// The peer stopped answering.
    Dead,
    /// The peer lost its state (recv_error).
    RecvError,
    /// The peer's certificate is no longer valid, or blocked.
    CertificateInvalid,
    /// The send counter is used up.
    CounterExhausted,
    /// A newer tunnel took its place.
    Superseded,
    /// It carried nothing for too long.
    Inactive,
    /// Another pod has the peer's address by now.
    PeerReplaced,
    /// Its keys do not come from ML-KEM, which is required from now on.
    NotPostQuantum,
}

impl TunnelDownReason {
    /// The reason in words, for logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ClosedByPeer => "the peer closed it",
            Self::ClosedHere => "closed here",
            Self::Dead => "the peer does not answer",
            Self::RecvError => "the peer does not know it any more",
            Self::CertificateInvalid => "the peer's certificate is not valid any more",
            Self::CounterExhausted => "its packet counter is used up",
            Self::Superseded => "a newer tunnel took its place",
            Self::Inactive => "inactive",
            Self::PeerReplaced => "another pod has the peer's address",
            Self::NotPostQuantum => "pki.post_quantum: require was set",
        }
    }
}
