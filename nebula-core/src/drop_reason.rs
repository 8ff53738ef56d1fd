//! Why packets are dropped.

/// Why a packet was dropped. Each has its own counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DropReason {
    /// Underlay: shorter than a header, or than header and tag.
    Truncated,
    /// Underlay: version, type or subtype that does not exist.
    UnknownType,
    /// Underlay: came from inside the own overlay networks (tunnel in tunnel).
    FromOverlay,
    /// Underlay: no tunnel has this index.
    UnknownIndex,
    /// Underlay: counter already seen or too old.
    Replayed,
    /// Underlay: authentication failed.
    BadTag,
    /// Overlay: not an IP packet that can be parsed.
    BadPacket,
    /// Overlay: destination is this node itself.
    ToSelf,
    /// Overlay: broadcast or multicast, dropped by configuration.
    Broadcast,
    /// Overlay: no route to the destination.
    NoRoute,
    /// Overlay: the remote address does not belong to the peer's certificate.
    RemoteAddress,
    /// Overlay: the local address does not belong to this node's certificate.
    LocalAddress,
    /// Firewall: no rule allows it.
    NoRule,
    /// Conntrack is full of live flows.
    ConntrackFull,
    /// The send counter of the tunnel is used up.
    CounterExhausted,
    /// There is no way to the peer: no endpoint and no relay, or nobody there answered a handshake.
    NoEndpoint,
    /// Too many packets wait for this peer's handshake.
    PendingFull,
    /// The queue to the control plane is full.
    PuntQueueFull,
    /// Handshake message that is not valid or not expected.
    BadHandshake,
    /// Relayed frame, or request for a relay, that may not or cannot be served.
    Relay,
    /// Control message that cannot be parsed or may not be sent by this peer.
    BadMessage,
    /// A super-packet whose offload description contradicts its bytes.
    BadOffload,
    /// Handshake with an underlay address that the allow lists exclude.
    AddressNotAllowed,
    /// More new handshakes per second than are answered, or than this source may have of them.
    HandshakeLimit,
    /// Endpoint in a lighthouse message that nobody should be sent to: loopback, link-local, multicast, broadcast,
    /// inside the overlay, without a port, or excluded by the allow lists.
    EndpointRefused,
}
