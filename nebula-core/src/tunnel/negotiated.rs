//! What a handshake agreed on.

use nebula_cert::{VerifiedCertificate, Version};

use super::{LocalIndex, RemoteIndex, SessionKeys};

/// The outcome of a finished handshake: everything that a tunnel is made of.
#[derive(Debug)]
pub(crate) struct Negotiated {
    /// Own index.
    pub(crate) local_index: LocalIndex,
    /// Peer's index.
    pub(crate) remote_index: RemoteIndex,
    /// The peer's verified certificate.
    pub(crate) peer: VerifiedCertificate,
    /// Traffic keys.
    pub(crate) keys: SessionKeys,
    /// Whether this node initiated.
    pub(crate) initiator: bool,
    /// Version of the own certificate sent.
    pub(crate) own_version: Version,
    /// Time field of the peer's message.
    pub(crate) peer_time: u64,
}
