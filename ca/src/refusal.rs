//! Every reason the service refuses for: a stable code, an HTTP status and one line for people.

use std::net::IpAddr;

use nebula_cert::{Curve, issuance};

use crate::address::DeriveError;

/// Why nothing was signed. Never carries a secret: its text goes to the caller and to the logs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    #[error("the request is not valid JSON of a certificate request: {0}")]
    MalformedRequest(String),
    #[error("the request body is longer than {} bytes", issuance::MAX_BODY)]
    BodyTooLarge,
    #[error("the request did not arrive completely in time; send it again")]
    Timeout,
    #[error("no such path; certificates are asked for with POST {}", issuance::CERTIFICATE_PATH)]
    NotFound,
    #[error("wrong method for this path; certificates are asked for with POST {}", issuance::CERTIFICATE_PATH)]
    WrongMethod,
    #[error("public_key is not the PEM of a Nebula public key: {0}")]
    BadPublicKey(nebula_cert::Error),
    #[error("public_key is a {asked:?} key but the CA signs for {ca:?}; make the key with that curve")]
    WrongCurve { asked: Curve, ca: Curve },

    #[error("the enrolment token is unknown here; make one with `nebula-ca token create` for this CA")]
    UnknownToken,
    #[error("the enrolment token expired at {0}; make a new one with `nebula-ca token create`")]
    TokenExpired(String),
    #[error("the enrolment token was already used with another key; make a new one, and find out who used it")]
    TokenUsed,
    #[error("the certificate this token was used for has been revoked; make a new token if the host may come back")]
    CertificateRevoked,

    #[error("the node token is not the one of this CA; copy node.token from the CA's directory to the node again")]
    BadNodeToken,
    #[error("this CA accepts no node proof: policy.jsonc has no \"pods\" section")]
    NodeProofDisabled,
    #[error("this CA accepts no pod proof: policy.jsonc has no \"kubernetes\" section")]
    PodProofDisabled,
    #[error("this CA does not renew by certificate; ask with the proof the certificate was first given for")]
    RenewalDisabled,
    #[error("the pod's {field} is not valid: {problem}")]
    InvalidPod { field: &'static str, problem: &'static str },
    #[error("pod uid {uid} was {known} so far; one uid cannot be two pods")]
    PodUidConflict { uid: String, known: String },
    #[error("the name for the pod would be {0} characters long, Nebula allows 253; shorten the policy's name template")]
    NameTooLong(usize),
    #[error("pod address {0} is in none of the policy's pod_networks; add its network there if it is one of yours")]
    OutsidePodNetworks(IpAddr),
    #[error("pod address {address} has no overlay address: {reason}")]
    NoOverlayAddress { address: IpAddr, reason: DeriveError },
    #[error("overlay address {0} is in the policy's reserved list")]
    ReservedAddress(IpAddr),
    #[error("overlay address {address} belongs to {holder}; free it, or check that the overlay prefix is large enough")]
    AddressConflict { address: IpAddr, holder: String },
    #[error("no address is free in {0}; enlarge the pool or wait until certificates of deleted pods have expired")]
    PoolExhausted(String),

    #[error("the CA's own constraints forbid this certificate: {0}")]
    CaConstraint(nebula_cert::Error),
    #[error("the CA certificate is not valid at this time ({0}); check the clock of the CA host or make a new CA")]
    CaExpired(String),
    #[error("too many failed proofs from this address; wait a minute, then try again with a valid proof")]
    TooManyFailures,
    #[error("the CA could not record the certificate, so it was not handed out; the CA's log has the reason")]
    Internal,
}

impl Refusal {
    /// Stable machine-readable reason.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.code_and_status().0
    }

    /// HTTP status.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.code_and_status().1
    }

    /// Whether the proof itself failed: what a guesser would cause.
    #[must_use]
    pub fn is_failed_proof(&self) -> bool {
        self.status() == 401
    }

    fn code_and_status(&self) -> (&'static str, u16) {
        match self {
            Self::MalformedRequest(_) => ("malformed_request", 400),
            Self::BodyTooLarge => ("body_too_large", 413),
            Self::Timeout => ("timeout", 408),
            Self::NotFound => ("not_found", 404),
            Self::WrongMethod => ("wrong_method", 405),
            Self::BadPublicKey(_) => ("bad_public_key", 400),
            Self::WrongCurve { .. } => ("wrong_curve", 400),
            Self::UnknownToken => ("unknown_token", 401),
            Self::TokenExpired(_) => ("token_expired", 401),
            Self::TokenUsed => ("token_used", 409),
            Self::CertificateRevoked => ("certificate_revoked", 403),
            Self::BadNodeToken => ("bad_node_token", 401),
            Self::NodeProofDisabled => ("node_proof_disabled", 403),
            Self::PodProofDisabled => ("pod_proof_disabled", 403),
            Self::RenewalDisabled => ("renewal_disabled", 403),
            Self::InvalidPod { .. } => ("invalid_pod", 400),
            Self::PodUidConflict { .. } => ("pod_uid_conflict", 409),
            Self::NameTooLong(_) => ("name_too_long", 403),
            Self::OutsidePodNetworks(_) => ("outside_pod_networks", 403),
            Self::NoOverlayAddress { .. } => ("no_overlay_address", 403),
            Self::ReservedAddress(_) => ("reserved_address", 403),
            Self::AddressConflict { .. } => ("address_conflict", 409),
            Self::PoolExhausted(_) => ("pool_exhausted", 503),
            Self::CaConstraint(_) => ("ca_constraint", 403),
            Self::CaExpired(_) => ("ca_expired", 503),
            Self::TooManyFailures => ("too_many_failures", 429),
            Self::Internal => ("internal", 500),
        }
    }
}

impl From<&Refusal> for issuance::Refusal {
    fn from(refusal: &Refusal) -> Self {
        Self { code: refusal.code().to_owned(), message: refusal.to_string() }
    }
}
