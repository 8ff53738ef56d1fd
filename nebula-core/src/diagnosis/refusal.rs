//! Why a handshake message was refused, as programs and people need it.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nebula_cert::{Certificate, Error};

/// A handshake message that was understood and refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// When.
    pub at: Instant,
    /// Underlay source: of the peer, or of its relay.
    pub from: SocketAddr,
    /// Why.
    pub reason: RefusalReason,
    /// The same with every detail, for people.
    pub text: String,
    /// Who it says it is. In a first message nothing proves that.
    pub claimed: Option<Claimed>,
    /// How often it happened in a row.
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
    /// Only the first few addresses: this is kept for strangers.
    pub(crate) fn new(certificate: &Certificate, nanos: u64) -> Self {
        let addresses = certificate.networks().iter().take(MAX_ADDRESSES).map(ipnet::IpNet::addr).collect();
        Self { name: certificate.name().to_owned(), addresses, clock: Duration::from_nanos(nanos) }
    }
}

const MAX_ADDRESSES: usize = 4;

/// Why a handshake message was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalReason {
    /// The certificate ended.
    Expired,
    /// The certificate begins later: one of the clocks is wrong, or it was just signed.
    NotYetValid,
    /// The certificate is in `pki.blocklist`.
    Blocked,
    /// Signed by a CA that is not in `pki.ca`.
    UnknownCa,
    /// Its CA is outside its validity.
    CaExpired,
    /// It has networks, groups or a validity that its CA may not give.
    BeyondCa,
    /// Altered, or signed with another key than that of its CA.
    BadSignature,
    /// Of the other curve.
    OtherCurve,
    /// It has an overlay address of this node.
    OwnAddress,
    /// A valid host, but not the one that was called.
    OtherHost,
    /// `lighthouse.remote_allow_list` excludes where it is.
    AddressNotAllowed,
    /// Not a message that this node can read: another curve or cipher suite, or no Nebula at all.
    Unreadable,
    /// Anything else; see the text.
    Malformed,
}

impl RefusalReason {
    /// Name in answers for programs; stable.
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
