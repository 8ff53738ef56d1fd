//! Commands and their outcomes, as they travel over the control socket.

use ipnet::IpNet;
use nebula_cert::UnixTime;
use serde::{Deserialize, Serialize};

use crate::{
    followers::Unaware,
    store::{IssuedRecord, KeptAddresses, TokenRecord},
};

/// A command of an operator.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// Copy the rows of the ledger into the directory, for a backup.
    CopyLedger,
    /// Create a one-time token; its secret never leaves the asking process.
    CreateToken(NewToken),
    /// List tokens.
    ListTokens,
    /// Invalidate an unused token.
    RevokeToken {
        /// Its short name.
        id: String,
    },
    /// List certificates.
    ListIssued,
    /// Reload policy, CA and TLS files.
    Reload,
    /// Block certificates by fingerprint, or all valid ones of a name.
    Revoke {
        /// Fingerprint or certificate name.
        which: String,
        /// Whether to refuse further certificates to the pods that hold these.
        #[serde(default)]
        keep_out: bool,
    },
    /// Readmit a pod that was kept out.
    Readmit {
        /// UID, `namespace/name`, or name of the pod.
        pod: String,
    },
    /// List the addresses that are kept for names of pods.
    ListAddresses,
    /// Keep the addresses of a name no longer.
    ReleaseAddress {
        /// `namespace/name` of the pod.
        name: String,
    },
}

/// A token to create.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewToken {
    /// SHA-256 of the secret, lower-case hex.
    pub hash: String,
    /// Certificate name.
    pub name: String,
    /// Overlay addresses; empty: one of each prefix of the pool.
    pub networks: Vec<IpNet>,
    /// Networks behind the host.
    pub unsafe_networks: Vec<IpNet>,
    /// Groups.
    pub groups: Vec<String>,
    /// Seconds for which the token is accepted.
    pub ttl: i64,
    /// Seconds for which the certificate is valid.
    pub life: i64,
    /// The only key that the token is good for; `None`: the first one it is used with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// The result of a [`Command`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum CommandOutcome {
    /// The copy is there.
    LedgerCopied {
        /// Of how many records; `None`: the ledger is in a database, which copies it.
        records: Option<u64>,
    },
    /// The token exists.
    TokenCreated(ListedToken),
    /// All tokens.
    Tokens {
        /// Newest last.
        tokens: Vec<ListedToken>,
    },
    /// The token is invalid from now on.
    TokenRevoked(ListedToken),
    /// The files were reloaded.
    Reloaded,
    /// All certificates.
    Issued {
        /// Newest last.
        certificates: Vec<ListedCertificate>,
    },
    /// These certificates are blocked.
    Revoked {
        /// Fingerprints, lower-case hex.
        fingerprints: Vec<String>,
        /// Whether the certificate was blocked although this service did not issue it.
        is_foreign: bool,
        /// Pods that get no further certificates.
        #[serde(default)]
        kept_out: Vec<ListedPod>,
        /// The last second of these certificates; `None` if it is not known.
        #[serde(default)]
        ends: Option<UnixTime>,
        /// Who does not hear of it at once; `None`: nobody hears of it before a service runs.
        #[serde(default)]
        unaware: Option<Unaware>,
    },
    /// These pods get certificates again.
    Readmitted {
        /// All pods that matched.
        pods: Vec<ListedPod>,
    },
    /// Addresses that are kept.
    Addresses {
        /// By name.
        addresses: Vec<ListedAddress>,
    },
    /// These addresses are kept no longer.
    AddressReleased(ListedAddress),
    /// The command was refused.
    Failed {
        /// Why, and what to do.
        message: String,
    },
}

/// A token as listed.
#[derive(Debug, Serialize, Deserialize)]
pub struct ListedToken {
    /// Short name; tells nothing about the secret.
    pub id: String,
    /// What it grants, and when it was used.
    #[serde(flatten)]
    pub token: TokenRecord,
}

/// A certificate as listed.
#[derive(Debug, Serialize, Deserialize)]
pub struct ListedCertificate {
    /// Fingerprint, lower-case hex.
    pub fingerprint: String,
    /// The certificate.
    #[serde(flatten)]
    pub issued: IssuedRecord,
}

/// A pod as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedPod {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Pod UID.
    pub uid: String,
}

/// The addresses that are kept for the name of a pod, as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedAddress {
    /// The pod's `namespace/name`.
    pub name: String,
    /// The addresses.
    #[serde(flatten)]
    pub kept: KeptAddresses,
    /// Whether a pod has them now: its last certificate is valid and not blocked.
    pub in_use: bool,
}
