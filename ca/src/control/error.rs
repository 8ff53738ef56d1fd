//! Why a command was refused, and what to do.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::{Curve, HostKeyError, with_causes};

use crate::{
    address::Subject, authority::GrantError, ledger_copy::CopyError, revocation::MAX_BLOCKLIST_ENTRIES,
    store::StoreError,
};

/// Why a command was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error("no service runs on this directory; it reads its files when it starts")]
    NoService,
    #[error("cannot copy the ledger: {}", with_causes(.0))]
    Copy(CopyError),
    #[error("the token's hash is not 64 hex digits")]
    BadTokenHash,
    #[error(
        "say which address the host gets (--network 10.42.0.1/16), or write a pool of addresses into policy.jsonc \
         (hosts.pool) and reload"
    )]
    NoAddress,
    #[error(transparent)]
    Grant(#[from] GrantError),
    #[error(
        "{network} is not in the overlay of hosts, {overlay} (hosts.overlay in policy.jsonc; without it, what hosts.pool \
         and pods.overlay say)"
    )]
    OutsideOverlay { network: IpNet, overlay: String },
    #[error(transparent)]
    Key(#[from] HostKeyError),
    /// The curve of the CA.
    #[error(
        "the key is of another curve than the CA's: run `nebula up -prepare -curve {}` in an empty folder", .0.flag()
    )]
    KeyCurve(Curve),
    #[error("{address} belongs to {holder} until {until}; choose another")]
    AddressHeld { address: IpAddr, holder: Box<Subject>, until: String },
    #[error(
        "token {id} for {name} is open with {shared} until {until}; use that one, or first make it worthless: nebula-ca \
         token revoke {id}"
    )]
    TokenOpen { id: String, name: String, shared: String, until: String },
    #[error("the life is longer than the policy's hosts.longest_life of {0}")]
    LifeTooLong(String),
    #[error("a token must live between 1s and 30d")]
    TokenTime,
    #[error("this token exists already")]
    TokenExists,
    #[error(
        "no address is free in {0} (hosts.pool in policy.jsonc): make it larger, or wait until a certificate or a token \
         for one of them has expired (nebula-ca certificate list, nebula-ca token list)"
    )]
    PoolExhausted(IpNet),
    #[error("no token is called {0:?}; see `nebula-ca token list`")]
    NoToken(String),
    #[error("the token was used; block its certificate: nebula-ca certificate revoke {certificate}")]
    TokenUsed { certificate: String },
    #[error("the token was used meanwhile; block its certificate instead")]
    TokenUsedMeanwhile,
    #[error(
        "no valid certificate has the name or fingerprint {0:?}, or is of such a pod; see `nebula-ca certificate list`"
    )]
    NoCertificate(String),
    #[error("the blocklist is full ({MAX_BLOCKLIST_ENTRIES}); replace the CA certificate instead")]
    BlocklistFull,
    #[error("only pods of this CA can be kept out: a host needs a new token to come back")]
    NotAPod,
    #[error("no pod that is kept out has the uid, name, or certificate {0:?}")]
    NotKeptOut(String),
    #[error("no address is kept for {0:?}; write it as NAMESPACE/NAME, see `nebula-ca address list`")]
    NoKeptAddress(String),
    #[error(transparent)]
    Store(#[from] StoreError),
}
