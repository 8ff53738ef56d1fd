//! One handshake: Noise IX, certificate, indexes. No clock, no socket: what it needs comes in as arguments.

use nebula_cert::{CaPool, Identity, UnixTime, VerifiedCertificate, Version};

use crate::tunnel::cipher::Cipher;
use crate::tunnel::{LocalIndex, RemoteIndex, SessionKeys};

/// What this node brings into a handshake.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Own<'a> {
    pub(crate) identity: &'a Identity,
    /// Version used when the peer's choice does not decide.
    pub(crate) default_version: Version,
    pub(crate) cipher: Cipher,
    /// Own wall clock, nanoseconds since the epoch (the Time field).
    pub(crate) time: u64,
}

/// A finished handshake.
#[derive(Debug)]
pub struct Completed {
    /// Own index.
    pub local_index: LocalIndex,
    /// Peer's index.
    pub remote_index: RemoteIndex,
    /// Who the peer proved to be.
    pub peer: VerifiedCertificate,
    /// Traffic keys.
    pub keys: SessionKeys,
    /// Whether this node initiated.
    pub initiator: bool,
    /// Version of the own certificate sent.
    pub own_version: Version,
    /// Time field of the peer's message.
    pub peer_time: u64,
}

/// Why a handshake message was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Noise refused it. An initiator survives this: the next datagram may be the real one.
    #[error("noise refused the message: {0}")]
    Noise(String),
    /// Authenticated, but unacceptable: the handshake is over.
    #[error("payload is invalid: {0}")]
    Payload(&'static str),
    /// The certificate does not verify: the handshake is over.
    #[error("verify certificate")]
    Certificate(#[source] nebula_cert::Error),
    /// This node cannot take part (no certificate of a usable version).
    #[error("no own certificate of a usable version")]
    NoCertificate,
}

/// The initiating side, between message 1 and message 2.
pub(crate) struct Initiator {}

impl Initiator {
    /// Builds message 1 (complete datagram, header included; counter 1, index 0).
    pub(crate) fn start(
        _own: Own<'_>,
        _version: Version,
        _local_index: LocalIndex,
        _ephemeral_seed: [u8; 32],
    ) -> Result<(Self, Vec<u8>), Error> {
        unimplemented!()
    }
    /// Reads message 2. After [`Error::Noise`] the machine can be used again; after any other error it is spent.
    /// Does not check which peer answered: compare `Completed::peer` with the intended address.
    pub(crate) fn finish(&mut self, _datagram: &[u8], _trust: &CaPool, _at: UnixTime) -> Result<Completed, Error> {
        unimplemented!()
    }
}

/// The responding side in one step: reads message 1, returns the result and message 2 (complete datagram).
pub(crate) fn respond(
    _own: Own<'_>,
    _local_index: LocalIndex,
    _ephemeral_seed: [u8; 32],
    _datagram: &[u8],
    _trust: &CaPool,
    _at: UnixTime,
) -> Result<(Completed, Vec<u8>), Error> {
    unimplemented!()
}
