//! One handshake: Noise IX, certificate, indexes. It has no clock and no socket; everything it needs is passed in.

use nebula_cert::{CaPool, Certificate, Curve, Identity, UnixTime, VerifiedCertificate, Version};
use snow::HandshakeState;
use zeroize::Zeroizing;

use super::kem::{Agreed, ML_KEM_768_OFFER};
use super::noise::{self, Ephemeral};
use crate::diagnosis::{Claimed, RefusalReason};
use crate::index::{LocalIndex, RemoteIndex};
use crate::tunnel::cipher::Cipher;
use crate::tunnel::{Negotiated, SessionKeys};
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::wire::messages::{HandshakePayload, Malformed};

/// This node's input to a handshake.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Own<'a> {
    pub(crate) identity: &'a Identity,
    /// Certificate version used where the peer's choice does not decide.
    pub(crate) default_version: Version,
    pub(crate) cipher: Cipher,
    /// Own wall clock, nanoseconds since the epoch (the Time field).
    pub(crate) time: u64,
    /// Whether to offer the ML-KEM exchange.
    pub(crate) offers_kem: bool,
}

impl Own<'_> {
    fn kem_offer(&self) -> u32 {
        if self.offers_kem { ML_KEM_768_OFFER } else { 0 }
    }
}

/// Why a handshake message was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The message is not authentic. An initiator goes on waiting: the next datagram may be the real one.
    #[error("not a usable handshake message: {0}")]
    Noise(String),
    /// The message is authentic but unacceptable: the handshake is over.
    #[error("payload is invalid: {0}")]
    Payload(&'static str),
    /// The certificate does not verify: the handshake is over.
    #[error("verify certificate")]
    Certificate(#[source] nebula_cert::Error, Option<Box<Claimed>>),
    /// The peer's certificate claims an address of this node: the handshake is over.
    #[error("payload is invalid: the certificate has an address of this node")]
    OwnAddress(Box<Claimed>),
    /// The message is one of the other curve.
    #[error("the certificate is for another curve")]
    OtherCurve(Box<Claimed>),
    /// This node cannot take part (no certificate of a usable version).
    #[error("no own certificate of a usable version")]
    NoCertificate,
}

impl Error {
    /// The certificate of this handshake is not accepted any more.
    pub(crate) fn refused(error: nebula_cert::Error, done: &Negotiated) -> Self {
        Self::Certificate(error, Some(Box::new(Claimed::new(&done.peer, done.peer_time))))
    }

    /// What a refusal of the message says: the reason, the text with all causes, and who the sender says it is.
    pub(crate) fn into_refusal(self) -> (RefusalReason, String, Option<Claimed>) {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(&self);
        while let Some(inner) = cause {
            text = format!("{text}: {inner}");
            cause = inner.source();
        }
        let (reason, claimed) = match self {
            Self::Certificate(source, claimed) => (RefusalReason::from(&source), claimed),
            Self::OwnAddress(claimed) => (RefusalReason::OwnAddress, Some(claimed)),
            Self::OtherCurve(claimed) => (RefusalReason::OtherCurve, Some(claimed)),
            Self::Noise(_) => (RefusalReason::Unreadable, None),
            Self::Payload(_) | Self::NoCertificate => (RefusalReason::Malformed, None),
        };
        (reason, text, claimed.map(|claimed| *claimed))
    }
}

impl From<snow::Error> for Error {
    fn from(error: snow::Error) -> Self {
        Self::Noise(match error {
            snow::Error::Input => "wrong length".into(),
            snow::Error::Dh => "public key is not valid".into(),
            snow::Error::Decrypt => "authentication failed (other cipher, or not for this handshake)".into(),
            other => other.to_string(),
        })
    }
}

impl From<Malformed> for Error {
    fn from(malformed: Malformed) -> Self {
        Self::Payload(malformed.reason())
    }
}

/// The initiating side, between message 1 and message 2.
pub(crate) struct Initiator {
    /// `None` once an authentic message 2 was read, whether or not it was accepted.
    noise: Option<Box<HandshakeState>>,
    /// The identity at the start: a reload in the meantime does not affect this handshake.
    identity: Identity,
    cipher: Cipher,
    local_index: LocalIndex,
    own_version: Version,
    kem_offer: u32,
}

impl Initiator {
    /// Builds message 1 (complete datagram, header included; counter 1, index 0).
    pub(crate) fn start(
        own: Own<'_>,
        version: Version,
        local_index: LocalIndex,
        ephemeral_seed: [u8; 32],
    ) -> Result<(Self, Vec<u8>), Error> {
        Self::start_with(own, version, local_index, Ephemeral::Seed(Zeroizing::new(ephemeral_seed)))
    }

    pub(super) fn start_with(
        own: Own<'_>,
        version: Version,
        local_index: LocalIndex,
        ephemeral: Ephemeral,
    ) -> Result<(Self, Vec<u8>), Error> {
        let mut noise = Box::new(noise::handshake(own.identity, own.cipher, ephemeral, true)?);
        let kem_offer = own.kem_offer();
        let payload = HandshakePayload { initiator_index: local_index.0, kem_offer, ..HandshakePayload::default() };
        let header = Header { kind: MessageType::Handshake, index: 0, counter: 1 };
        let datagram = write_message(&mut noise, own, version, header, payload)?;
        let machine = Self {
            noise: Some(noise),
            identity: own.identity.clone(),
            cipher: own.cipher,
            local_index,
            own_version: version,
            kem_offer,
        };
        Ok((machine, datagram))
    }

    /// Reads message 2. After [`Error::Noise`] the machine can be used again; after any other error it is spent.
    /// Does not check which peer answered: compare `Negotiated::peer` with the intended address.
    pub(crate) fn finish(&mut self, datagram: &[u8], trust: &CaPool, at: UnixTime) -> Result<Agreed, Error> {
        let noise = self.noise.as_mut().ok_or(Error::Payload("the handshake is over"))?;
        let body = message_body(datagram, self.local_index.0, 2)?;
        let payload = read_message(noise, body)?;
        let Some(mut noise) = self.noise.take() else { return Err(Error::Payload("the handshake is over")) };
        let payload = HandshakePayload::parse(&payload)?;
        let remote_index = nonzero(payload.responder_index)?;
        let answers_long_tests = names_version(&payload);
        let peer = verify_peer(&noise, &self.identity, payload, trust, at)?;
        let split = RawSplit::of(&mut noise);
        let done = Negotiated {
            local_index: self.local_index,
            remote_index,
            peer,
            keys: SessionKeys { cipher: self.cipher, send: *split.to_responder, receive: *split.to_initiator },
            initiator: true,
            own_version: self.own_version,
            peer_time: payload.time,
            answers_long_tests,
            // What was not offered cannot be chosen.
            post_quantum: payload.kem_offer & self.kem_offer & ML_KEM_768_OFFER != 0,
        };
        Ok(Agreed::new(done, noise.get_handshake_hash()))
    }
}

impl std::fmt::Debug for Initiator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Initiator")
            .field("local_index", &self.local_index)
            .field("own_version", &self.own_version)
            .finish_non_exhaustive()
    }
}

/// Decides which certificates are accepted.
pub(crate) trait Verifier {
    fn verify(&self, certificate: Certificate, at: UnixTime) -> Result<VerifiedCertificate, nebula_cert::Error>;
}

impl Verifier for CaPool {
    fn verify(&self, certificate: Certificate, at: UnixTime) -> Result<VerifiedCertificate, nebula_cert::Error> {
        Self::verify(self, certificate, at)
    }
}

/// The responder in one step: reads message 1 and returns the result and message 2 (a complete datagram).
pub(crate) fn respond(
    own: Own<'_>,
    local_index: LocalIndex,
    ephemeral_seed: [u8; 32],
    datagram: &[u8],
    trust: &impl Verifier,
    at: UnixTime,
) -> Result<(Agreed, Vec<u8>), Error> {
    respond_with(own, local_index, Ephemeral::Seed(Zeroizing::new(ephemeral_seed)), datagram, trust, at)
}

pub(super) fn respond_with(
    own: Own<'_>,
    local_index: LocalIndex,
    ephemeral: Ephemeral,
    datagram: &[u8],
    trust: &impl Verifier,
    at: UnixTime,
) -> Result<(Agreed, Vec<u8>), Error> {
    let body = message_body(datagram, 0, 1)?;
    let mut noise = noise::handshake(own.identity, own.cipher, ephemeral, false)?;
    // Read by another curve, keys and payload begin elsewhere, and nothing in them makes sense.
    let unread = |error: Error| caller_of_other_curve(own.identity.curve(), body).map_or(error, Error::OtherCurve);
    let payload = read_message(&mut noise, body).map_err(unread)?;
    let payload = HandshakePayload::parse(&payload).map_err(|error| unread(error.into()))?;
    let remote_index = nonzero(payload.initiator_index).map_err(unread)?;
    let answers_long_tests = names_version(&payload);
    let peer = verify_peer(&noise, own.identity, payload, trust, at).map_err(|error| match error {
        Error::Payload(_) | Error::Certificate(_, None) => unread(error),
        other => other,
    })?;
    let own_version = match own.identity.certificate(peer.version()) {
        Some(same) => same.version(),
        None => own.default_version,
    };
    let header = Header { kind: MessageType::Handshake, index: remote_index.0, counter: 2 };
    let answer_offer = payload.kem_offer & own.kem_offer();
    let answer = HandshakePayload {
        initiator_index: remote_index.0,
        responder_index: local_index.0,
        kem_offer: answer_offer,
        ..HandshakePayload::default()
    };
    let answer = write_message(&mut noise, own, own_version, header, answer)?;
    let split = RawSplit::of(&mut noise);
    let done = Negotiated {
        local_index,
        remote_index,
        peer,
        keys: SessionKeys { cipher: own.cipher, send: *split.to_initiator, receive: *split.to_responder },
        initiator: false,
        own_version,
        peer_time: payload.time,
        answers_long_tests,
        post_quantum: answer_offer & ML_KEM_768_OFFER != 0,
    };
    Ok((Agreed::new(done, noise.get_handshake_hash()), answer))
}

/// Who says that it sent this message 1, if it is one of the curve that is not `own`. Nothing in message 1 is
/// encrypted.
fn caller_of_other_curve(own: Curve, body: &[u8]) -> Option<Box<Claimed>> {
    let other = match own {
        Curve::Curve25519 => Curve::P256,
        Curve::P256 => Curve::Curve25519,
    };
    let key_len = noise::public_key_len(other);
    let (key, payload) = (body.get(key_len..2 * key_len)?, body.get(2 * key_len..)?);
    let payload = HandshakePayload::parse(payload).ok()?;
    let certificate = Certificate::from_handshake(version_of(&payload).ok()?, other, key, payload.certificate).ok()?;
    (certificate.curve() == other).then(|| Box::new(Claimed::new(&certificate, payload.time)))
}

/// Whether the peer names the version of its certificate, as Go Nebula does since 1.10.
fn names_version(payload: &HandshakePayload<'_>) -> bool {
    payload.certificate_version > 0
}

/// The part of a datagram that Noise reads: all but the header, which must be exactly that of the expected message.
pub(super) fn message_body(datagram: &[u8], index: u32, counter: u64) -> Result<&[u8], Error> {
    let expected = Header { kind: MessageType::Handshake, index, counter };
    match Header::parse(datagram) {
        Ok(header) if header == expected => Ok(&datagram[HEADER_LEN..]),
        _ => Err(Error::Noise(format!("its header is not that of handshake message {counter} for index {index}"))),
    }
}

fn read_message(noise: &mut HandshakeState, body: &[u8]) -> Result<Vec<u8>, Error> {
    let mut payload = vec![0; body.len()];
    let len = noise.read_message(body, &mut payload)?;
    payload.truncate(len);
    Ok(payload)
}

/// Writes a complete datagram whose payload holds the own certificate of `version` and the own time.
fn write_message(
    noise: &mut HandshakeState,
    own: Own<'_>,
    version: Version,
    header: Header,
    payload: HandshakePayload<'_>,
) -> Result<Vec<u8>, Error> {
    let certificate = own.identity.certificate(version).ok_or(Error::NoCertificate)?.to_handshake();
    let payload = HandshakePayload {
        certificate: &certificate,
        time: own.time,
        certificate_version: version.number(),
        ..payload
    }
    .encode();
    // Two public keys and the payload, the last two with a tag each. Message 1 has no tags, but snow needs the room.
    let longest = HEADER_LEN + 2 * (noise::public_key_len(own.identity.curve()) + TAG_LEN) + payload.len();
    let mut datagram = vec![0; longest];
    datagram[..HEADER_LEN].copy_from_slice(&header.to_bytes());
    let len = noise.write_message(&payload, &mut datagram[HEADER_LEN..])?;
    datagram.truncate(HEADER_LEN + len);
    Ok(datagram)
}

fn nonzero(index: u32) -> Result<RemoteIndex, Error> {
    if index == 0 { Err(Error::Payload("the peer's index is missing")) } else { Ok(RemoteIndex(index)) }
}

fn version_of(payload: &HandshakePayload<'_>) -> Result<Version, Error> {
    match payload.certificate_version {
        0 | 1 => Ok(Version::V1),
        2 => Ok(Version::V2),
        _ => Err(Error::Payload("unknown certificate version")),
    }
}

/// Rebuilds the peer's certificate around the key it proved to hold, and checks both.
fn verify_peer(
    noise: &HandshakeState,
    identity: &Identity,
    payload: HandshakePayload<'_>,
    trust: &impl Verifier,
    at: UnixTime,
) -> Result<VerifiedCertificate, Error> {
    let version = version_of(&payload)?;
    if payload.certificate.is_empty() {
        return Err(Error::Payload("the certificate is missing"));
    }
    let key = noise.get_remote_static().ok_or(Error::Payload("the peer's key is missing"))?;
    let curve = identity.curve();
    let read = || Certificate::from_handshake(version, curve, key, payload.certificate);
    let certificate = read().map_err(|error| Error::Certificate(error, None))?;
    if certificate.curve() != curve {
        return Err(Error::Payload("the certificate is for another curve"));
    }
    if certificate.public_key() != key {
        return Err(Error::Payload("the certificate is for another key"));
    }
    // Parsed again only on failure, so that a valid certificate costs nothing extra.
    let claimed = || read().ok().map(|certificate| Box::new(Claimed::new(&certificate, payload.time)));
    let peer = trust.verify(certificate, at).map_err(|error| Error::Certificate(error, claimed()))?;
    if peer.networks().is_empty() {
        return Err(Error::Payload("the certificate has no network"));
    }
    let is_own = |address| identity.networks().iter().any(|network| network.addr() == address);
    if peer.networks().iter().any(|network| is_own(network.addr())) {
        return Err(Error::OwnAddress(Box::new(Claimed::new(&peer, payload.time))));
    }
    Ok(peer)
}

/// Traffic keys by direction.
struct RawSplit {
    to_responder: Zeroizing<[u8; 32]>,
    to_initiator: Zeroizing<[u8; 32]>,
}

impl RawSplit {
    fn of(noise: &mut HandshakeState) -> Self {
        let (to_responder, to_initiator) = noise.dangerously_get_raw_split();
        Self { to_responder: Zeroizing::new(to_responder), to_initiator: Zeroizing::new(to_initiator) }
    }
}

#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests;
