//! Why a handshake message was refused, for programs and operators.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nebula_cert::{Certificate, Error};

/// A handshake message that was understood and refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// When it was refused.
    pub at: Instant,
    /// Underlay source: of the peer, or of its relay.
    pub from: SocketAddr,
    /// Why.
    pub reason: RefusalReason,
    /// The reason with every detail, for people.
    pub text: String,
    /// Who the sender says it is. In a first message nothing proves that.
    pub claimed: Option<Claimed>,
    /// How often this happened in a row.
    pub times: u32,
}

/// Who the sender of a refused message says it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    /// Name in its certificate.
    pub name: String,
    /// Overlay addresses in its certificate.
    pub addresses: Vec<IpAddr>,
    /// Its wall clock when it wrote the message, since the Unix epoch.
    pub clock: Duration,
}

impl Claimed {
    /// Keeps only the first few addresses, since anybody can cause this to be stored.
    pub(crate) fn new(certificate: &Certificate, nanos: u64) -> Self {
        let addresses = certificate.networks().iter().take(MAX_ADDRESSES).map(ipnet::IpNet::addr).collect();
        Self { name: certificate.name().to_owned(), addresses, clock: Duration::from_nanos(nanos) }
    }
}

const MAX_ADDRESSES: usize = 4;

/// Why a handshake message was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalReason {
    /// The certificate has expired.
    Expired,
    /// The certificate is not valid yet: one of the clocks is wrong, or it was just signed.
    NotYetValid,
    /// The certificate is in `pki.blocklist`.
    Blocked,
    /// Signed by a CA that is not in `pki.ca`.
    UnknownCa,
    /// Its CA is outside its validity.
    CaExpired,
    /// The certificate has networks, groups or a validity that its CA may not grant.
    BeyondCa,
    /// The certificate was altered, or signed with a key other than its CA's.
    BadSignature,
    /// The certificate is for the other curve.
    OtherCurve,
    /// The certificate has an overlay address of this node.
    OwnAddress,
    /// The certificate is valid, but not that of the host that was called.
    OtherHost,
    /// `lighthouse.remote_allow_list` excludes the peer's underlay address.
    AddressNotAllowed,
    /// The peer does not offer ML-KEM, and `pki.post_quantum: require` is set here.
    NotPostQuantum,
    /// This node cannot read the message: it uses another curve or cipher suite, or is not Nebula at all.
    Unreadable,
    /// Anything else; see the text.
    Malformed,
}

impl RefusalReason {
    /// Stable name for machine-readable output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::Blocked => "blocked",
            Self::UnknownCa => "unknown_ca",
            Self::CaExpired => "ca_expired",
            Self::BeyondCa => "beyond_ca",
            Self::BadSignature => "bad_signature",
            Self::OtherCurve => "other_curve",
            Self::OwnAddress => "own_address",
            Self::OtherHost => "other_host",
            Self::AddressNotAllowed => "address_not_allowed",
            Self::NotPostQuantum => "not_post_quantum",
            Self::Unreadable => "unreadable",
            Self::Malformed => "malformed",
        }
    }
}

impl From<&Error> for RefusalReason {
    fn from(error: &Error) -> Self {
        match error {
            Error::Expired { not_before, at, .. } if at < not_before => Self::NotYetValid,
            Error::Expired { .. } => Self::Expired,
            Error::CaExpired { .. } => Self::CaExpired,
            Error::Blocked { .. } => Self::Blocked,
            Error::UnknownCa { .. } | Error::NoIssuer { .. } => Self::UnknownCa,
            Error::ExpiresAfterCa { .. }
            | Error::ValidBeforeCa { .. }
            | Error::GroupNotInCa { .. }
            | Error::NetworkNotInCa { .. }
            | Error::UnsafeNetworkNotInCa { .. } => Self::BeyondCa,
            Error::Signature { .. } => Self::BadSignature,
            Error::Curve { .. } | Error::CaCurve { .. } => Self::OtherCurve,
            _ => Self::Malformed,
        }
    }
}
