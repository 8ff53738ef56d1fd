//! Every reason for a refusal: a stable code, an HTTP status and one line of text.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::{Curve, issuance, revocation};

use crate::{address::DeriveError, cluster::ClusterError};

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
    #[error(
        "the enrolment token is bound to the key of another host; make one for this host's key, and find out who has it"
    )]
    TokenForOtherKey,
    #[error("the certificate this token was used for has been revoked; make a new token if the host may come back")]
    CertificateRevoked,

    #[error("the directory is for node agents: send the node's token as \"Authorization: Bearer TOKEN\"")]
    NoNodeToken,
    #[error("{0} has too many answers open; read those first")]
    TooManyAnswers(String),
    #[error("the node token is not the one of this CA; copy node.token from the CA's directory to the node again")]
    BadNodeToken,
    #[error("this CA accepts no node proof: its directory has no node.token, or it was started before that was there")]
    NodeProofDisabled,
    #[error("this CA gives no certificates to pods: policy.jsonc has no \"pods\" section")]
    PodsDisabled,
    #[error("this CA accepts no pod proof: policy.jsonc has no \"kubernetes\" section")]
    PodProofDisabled,
    #[error("this CA gives no provisional certificates: \"pods\" in policy.jsonc has no \"provisional\" section")]
    ProvisionalDisabled,
    #[error("a provisional certificate is no proof for another one; the pod's own token is")]
    ProvisionalCertificate,
    #[error("the service-account token was refused: {0}")]
    TokenRejected(String),
    #[error("the service-account token is not for the audience {0:?}; request or mount one with it")]
    WrongAudience(String),
    #[error("the service-account token has expired; read it again from its file, which kubelet renews")]
    ServiceTokenExpired,
    #[error("{0:?} is no service account")]
    NotAServiceAccount(String),
    #[error("only the service account {expected} may vouch for pods, not {account}")]
    WrongAccount { account: String, expected: String },
    #[error("only the service account {expected} may be a {role}, not {account}")]
    NotAccountOfRole { role: &'static str, account: String, expected: String },
    #[error("this CA enrols no lighthouses by their pods: policy.jsonc has no \"lighthouses\" section")]
    LighthousesDisabled,
    #[error("pod {0} does not use the network of its node, so that others could not reach it; set hostNetwork")]
    NotHostNetwork(String),
    #[error("pod {0} belongs to no StatefulSet, from which a lighthouse has its number and so its address")]
    NotInStatefulSet(String),
    #[error("there is no address for lighthouse number {0}; enlarge lighthouses.network in the policy, or run fewer")]
    NoLighthouseAddress(u32),
    #[error("this CA enrols no gateways of nodes: policy.jsonc has no \"gateways\" section")]
    GatewaysDisabled,
    #[error(
        "node {0} has no range of addresses for its pods (spec.podCIDRs) that the overlay has: the controller manager needs \
         --allocate-node-cidrs and --cluster-cidr (kubeadm init --pod-network-cidr)"
    )]
    NodeWithoutRange(String),
    #[error("{range} is of the range of node {node} as well, which was there before")]
    RangeOfOtherNode { range: IpNet, node: String },
    #[error("the range {0} of the node's pods is no part of an overlay prefix (pods.overlay)")]
    RangeOutsideOverlay(IpNet),
    #[error("the service-account token is bound to no pod; use a projected one")]
    TokenNotBound,
    #[error("the pod {0} that the node agent's token is bound to does not exist any more")]
    AgentGone(String),
    #[error("the node credential is not one of this CA; the node's agent obtains another one")]
    NodeCredentialRejected,
    #[error("the node credential has expired; the node's agent renews it, and is away for too long")]
    NodeCredentialExpired,
    #[error("this CA gives no node credentials: that needs the \"kubernetes\" section in policy.jsonc")]
    NodeCredentialsDisabled,
    #[error("node {0} does not exist any more, or was made anew")]
    NodeGone(String),
    #[error("pod {0} does not exist")]
    PodNotFound(String),
    #[error("pod {pod} does not have the uid {uid}; was it recreated?")]
    PodUidMismatch { pod: String, uid: String },
    #[error("pod {0} is not bound to a node yet")]
    PodNotScheduled(String),
    #[error("pod {pod} does not run on node {node}")]
    PodOnOtherNode { pod: String, node: String },
    #[error("pod {0} has ended")]
    PodOver(String),
    #[error("pod {0} is gone; its certificate is not renewed")]
    PodGone(String),
    #[error("pod {0} uses the network of its node, which is no identity of its own")]
    HostNetwork(String),
    #[error("pod {pod} does not run as service account {account}")]
    ServiceAccountMismatch { pod: String, account: String },
    #[error("address {address} is in none of the pod ranges of node {node}")]
    OutsideNodeRanges { address: IpAddr, node: String },
    #[error(
        "address {address} is not one that the API server shows for pod {pod}; after a restart of its sandbox this passes \
         once the kubelet has reported that the old one is gone"
    )]
    AddressMismatch { address: IpAddr, pod: String },
    #[error("the node of pod {0} has not reported the pod's address yet; ask again")]
    AddressUnknown(String),
    #[error("an operator keeps pod {pod} out; delete it, or give `nebula-ca certificate readmit {uid}`")]
    KeptOut { pod: String, uid: String },
    #[error("the policy refuses pod {0}")]
    PodNotWanted(String),
    #[error("the policy enrols no pods of the namespace of {0}: see pods.namespaces and pods.except_namespaces")]
    NamespaceNotEnrolled(String),
    #[error("address {address} is that of node {node}")]
    NodeAddress { address: IpAddr, node: String },
    #[error("address {address} is that of pod {holder}, as the API server shows it; ask again when that one has ended")]
    AddressInUse { address: IpAddr, holder: String },
    #[error("pod address {0} is in no overlay prefix, as address mode \"same\" needs")]
    OutsideOverlay(IpAddr),
    #[error("Kubernetes did not confirm the request; ask again later ({0})")]
    ClusterUnavailable(String),

    #[error("the certificate of the proof is not the PEM of a Nebula certificate: {0}")]
    MalformedCertificate(nebula_cert::Error),
    #[error("the certificate of the proof is not valid here: {0}")]
    CertificateNotValid(nebula_cert::Error),
    #[error(
        "the tag does not show that the caller holds the certificate's key; take the current renewal_key from the trust"
    )]
    NotTheHolder,
    #[error("the clocks differ: the proof was made at {theirs}, it is {ours} here")]
    ClockDiffers { theirs: String, ours: String },
    #[error("the certificate of the proof expired at {0}; it renews itself no more")]
    CertificateExpired(String),
    #[error(
        "the certificate expired at {0}, longer ago than hosts.renewal_grace of the policy allows; enrol the host again: \
         `nebula-ca token create` for its name, then `nebula up` with the token"
    )]
    RenewalTooLate(String),
    #[error("the certificate of the proof is not in this CA's ledger")]
    UnknownCertificate,
    #[error("under the present policy the next certificate would differ in name or networks; enrol again")]
    RenewalDiffers,
    #[error(
        "certificates are not revoked through Kubernetes here (kubernetes.revocation in policy.jsonc, \
         ca.revocation.enabled of the chart): use `nebula-ca certificate revoke` where the CA runs"
    )]
    RevocationDisabled,
    #[error(
        "revoking needs a token for the audience {:?} in the header {}",
        revocation::AUDIENCE,
        revocation::TOKEN_HEADER
    )]
    NoOperatorToken,
    #[error("{user} may not {} {}.{} in {place}", revocation::VERB, revocation::RESOURCE, revocation::GROUP)]
    NotPermitted { user: String, place: String },
    #[error("{0}")]
    BadRevocation(revocation::BadRequest),
    #[error("no valid certificate is that of {0}")]
    NoSuchCertificate(String),
    #[error("the blocklist is full ({}); replace the CA certificate instead", crate::revocation::MAX_BLOCKLIST_ENTRIES)]
    BlocklistFull,
    #[error("too many requests to revoke certificates; ask again in a minute, or use `nebula-ca certificate revoke`")]
    TooManyReviews,
    #[error("an enrolment token gives nothing back; prove it by certificate, or use `nebula-ca certificate revoke`")]
    NotReleasable,
    #[error("too many certificates for {of}; the next one in {wait} seconds. Find out what asks so often")]
    TooManyCertificates { of: String, wait: i64 },

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
    #[error(
        "no address is free in the pool {prefix} of {size} addresses; enlarge pods.overlay in the policy, or delete \
         pods: an address is free again a minute after its pod is gone{note}"
    )]
    PoolExhausted { prefix: IpNet, size: usize, note: String },

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

    /// After how many seconds asking again may help, where that is known.
    #[must_use]
    pub fn retry_after(&self) -> Option<i64> {
        match self {
            Self::TooManyCertificates { wait, .. } => Some(*wait),
            Self::TooManyAnswers(_) | Self::AddressInUse { .. } => Some(1),
            Self::TooManyReviews => Some(60),
            _ => None,
        }
    }

    /// Whether the proof itself failed, as it would for somebody who guesses.
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
            Self::TokenForOtherKey => ("token_for_other_key", 403),
            Self::CertificateRevoked => ("certificate_revoked", 403),
            Self::NoNodeToken => ("no_node_token", 401),
            Self::TooManyAnswers(_) => ("too_many_answers", 429),
            Self::BadNodeToken => ("bad_node_token", 401),
            Self::NodeProofDisabled => ("node_proof_disabled", 403),
            Self::PodsDisabled => ("pods_disabled", 403),
            Self::PodProofDisabled => ("pod_proof_disabled", 403),
            Self::ProvisionalDisabled => ("provisional_disabled", 403),
            Self::ProvisionalCertificate => ("provisional_certificate", 403),
            Self::TokenRejected(_) => ("token_rejected", 401),
            Self::WrongAudience(_) => ("wrong_audience", 401),
            Self::ServiceTokenExpired => ("service_token_expired", 401),
            Self::NotAServiceAccount(_) => ("not_a_service_account", 403),
            Self::WrongAccount { .. } => ("wrong_account", 403),
            Self::NotAccountOfRole { .. } => ("wrong_account", 403),
            Self::LighthousesDisabled => ("lighthouses_disabled", 403),
            Self::NotHostNetwork(_) => ("not_host_network", 403),
            Self::NotInStatefulSet(_) => ("not_in_stateful_set", 403),
            Self::NoLighthouseAddress(_) => ("no_lighthouse_address", 403),
            Self::GatewaysDisabled => ("gateways_disabled", 403),
            // The controller manager gives one to a new node soon.
            Self::NodeWithoutRange(_) => ("node_without_range", 503),
            Self::RangeOfOtherNode { .. } => ("range_of_other_node", 403),
            Self::RangeOutsideOverlay(_) => ("range_outside_overlay", 403),
            Self::TokenNotBound => ("token_not_bound", 403),
            Self::AgentGone(_) => ("agent_gone", 403),
            Self::NodeCredentialRejected => ("node_credential_rejected", 401),
            Self::NodeCredentialExpired => ("node_credential_expired", 401),
            Self::NodeCredentialsDisabled => ("node_credentials_disabled", 403),
            Self::NodeGone(_) => ("node_gone", 403),
            Self::PodNotFound(_) => ("pod_not_found", 403),
            Self::PodUidMismatch { .. } => ("pod_uid_mismatch", 403),
            Self::PodNotScheduled(_) => ("pod_not_scheduled", 403),
            Self::PodOnOtherNode { .. } => ("pod_on_other_node", 403),
            Self::PodOver(_) => ("pod_over", 403),
            Self::PodGone(_) => ("pod_gone", 403),
            Self::HostNetwork(_) => ("host_network", 403),
            Self::ServiceAccountMismatch { .. } => ("service_account_mismatch", 403),
            Self::OutsideNodeRanges { .. } => ("outside_node_ranges", 403),
            Self::AddressMismatch { .. } => ("address_mismatch", 403),
            Self::AddressUnknown(_) => ("address_unknown", 503),
            Self::KeptOut { .. } => ("kept_out", 403),
            Self::PodNotWanted(_) => ("pod_not_wanted", 403),
            Self::NamespaceNotEnrolled(_) => ("namespace_not_enrolled", 403),
            Self::NodeAddress { .. } => ("node_address", 403),
            // Its node may have given the address to the next pod before the API server knows that the last one has
            // ended.
            Self::AddressInUse { .. } => ("address_in_use", 503),
            Self::OutsideOverlay(_) => ("outside_overlay", 403),
            Self::ClusterUnavailable(_) => ("kubernetes_unavailable", 503),
            Self::MalformedCertificate(_) => ("malformed_certificate", 400),
            Self::CertificateNotValid(_) => ("certificate_not_valid", 401),
            Self::NotTheHolder => ("not_the_holder", 401),
            Self::ClockDiffers { .. } => ("clock_differs", 401),
            Self::CertificateExpired(_) => ("certificate_not_valid", 401),
            Self::RenewalTooLate(_) => ("renewal_too_late", 403),
            Self::UnknownCertificate => ("unknown_certificate", 403),
            Self::RenewalDiffers => ("renewal_differs", 403),
            Self::RevocationDisabled => ("revocation_disabled", 403),
            Self::NoOperatorToken => ("no_operator_token", 401),
            Self::NotPermitted { .. } => (revocation::FORBIDDEN, 403),
            Self::BadRevocation(_) => ("bad_revocation", 400),
            Self::NoSuchCertificate(_) => ("no_certificate", 404),
            Self::BlocklistFull => ("blocklist_full", 409),
            Self::TooManyReviews => ("too_many_reviews", 429),
            Self::NotReleasable => ("not_releasable", 403),
            Self::TooManyCertificates { .. } => ("too_many_certificates", 429),
            Self::InvalidPod { .. } => ("invalid_pod", 400),
            Self::PodUidConflict { .. } => ("pod_uid_conflict", 409),
            Self::NameTooLong(_) => ("name_too_long", 403),
            Self::OutsidePodNetworks(_) => ("outside_pod_networks", 403),
            Self::NoOverlayAddress { .. } => ("no_overlay_address", 403),
            Self::ReservedAddress(_) => ("reserved_address", 403),
            Self::AddressConflict { .. } => ("address_conflict", 409),
            Self::PoolExhausted { .. } => ("pool_exhausted", 503),
            Self::CaConstraint(_) => ("ca_constraint", 403),
            Self::CaExpired(_) => ("ca_expired", 503),
            Self::TooManyFailures => ("too_many_failures", 429),
            Self::Internal => ("internal", 500),
        }
    }
}

/// What to do about addresses that are kept for names, for [`Refusal::PoolExhausted`].
pub(crate) fn kept_note(kept: usize) -> String {
    match kept {
        0 => String::new(),
        kept => format!(
            ". {kept} are kept for the names of StatefulSet pods: `nebula-ca address list` shows them, and `nebula-ca \
             address release NAMESPACE/NAME` frees those of a name"
        ),
    }
}

impl From<ClusterError> for Refusal {
    fn from(error: ClusterError) -> Self {
        tracing::error!(%error, "Kubernetes confirms nothing now");
        Self::ClusterUnavailable(error.summary().to_owned())
    }
}

impl From<&Refusal> for issuance::Refusal {
    fn from(refusal: &Refusal) -> Self {
        Self { code: refusal.code().to_owned(), message: refusal.to_string() }
    }
}
