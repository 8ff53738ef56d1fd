//! What the service must not forget: tokens, certificates, pods, address holders, revocations (issuance ledger).
//!
//! Each method is one atomic and durable step, so that a service that dies between two of them leaves a ledger that is
//! true. Decisions are made outside and *checked again* inside [`Store::record`], which makes them safe with several
//! services on one store.

mod ledger;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "postgres")]
mod postgres_tls;
mod redb;

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::{Certificate, Fingerprint, UnixTime};
use serde::{Deserialize, Serialize};

#[cfg(feature = "postgres")]
pub(crate) use self::postgres::PostgresStore;
pub(crate) use self::redb::RedbStore;
use crate::{
    address::{self, AddressMode, Holder, Subject},
    directory::{DATABASE, Directory, STORE},
    proof::token::TokenHash,
};

/// Opens the store of a service: the database that its directory names, or else the file in it.
///
/// # Errors
/// It cannot be opened, or is of another release.
pub(crate) fn open(directory: &Directory) -> Result<Box<dyn Store>, StoreError> {
    if !directory.has(DATABASE) {
        return Ok(Box::new(RedbStore::open_file(&directory.file(STORE))?));
    }
    let database = directory.read(DATABASE).map_err(|error| StoreError::File(std::io::Error::other(error)))?;
    open_database(&database)
}

#[cfg(feature = "postgres")]
fn open_database(database: &str) -> Result<Box<dyn Store>, StoreError> {
    Ok(Box::new(PostgresStore::connect(database)?))
}

#[cfg(not(feature = "postgres"))]
fn open_database(_database: &str) -> Result<Box<dyn Store>, StoreError> {
    Err(StoreError::Postgres("this build was made without the feature postgres".to_owned()))
}

/// The ledger. Methods block on the disk: call them where that is allowed.
pub(crate) trait Store: Send + Sync {
    /// Whether other services write to it too.
    fn is_shared(&self) -> bool;
    /// Writes something, to see whether that works.
    fn check(&self) -> Result<(), StoreError>;
    /// Adds a token; its hash is new by construction.
    fn add_token(&self, hash: &TokenHash, token: &TokenRecord) -> Result<(), StoreError>;
    /// The token of that hash.
    fn token(&self, hash: &TokenHash) -> Result<Option<TokenRecord>, StoreError>;
    /// Forgets a token that was not used; says whether there was one.
    fn remove_token(&self, hash: &TokenHash) -> Result<bool, StoreError>;
    /// All tokens, used and expired ones included, until they are pruned.
    fn tokens(&self) -> Result<Vec<(TokenHash, TokenRecord)>, StoreError>;
    /// What is known of a pod.
    fn pod(&self, uid: &str) -> Result<Option<PodRecord>, StoreError>;
    /// The present or last holder of an overlay address.
    fn holder(&self, address: IpAddr) -> Result<Option<Holder>, StoreError>;
    /// Allots one address of each pool to a pod until `until`, or extends what it has.
    fn allot(&self, pod: &Subject, pool: &Pool<'_>, until: UnixTime, now: UnixTime) -> Result<Vec<IpNet>, AllotError>;
    /// Records an issued certificate; a certificate may be handed out only after this returned `Ok`.
    /// Answers with the holders that lost an address by it.
    fn record(&self, issue: &Issue<'_>, now: UnixTime) -> Result<Vec<Displaced>, RecordError>;
    /// The certificate of that fingerprint.
    fn issued(&self, fingerprint: &Fingerprint) -> Result<Option<IssuedRecord>, StoreError>;
    /// All certificates until they are pruned.
    fn all_issued(&self) -> Result<Vec<(Fingerprint, IssuedRecord)>, StoreError>;
    /// Blocks certificates until they expire.
    fn revoke(&self, certificates: &[Fingerprint], now: UnixTime) -> Result<(), StoreError>;
    /// Blocked certificates that have not expired, in order.
    fn blocklist(&self, now: UnixTime) -> Result<Vec<Fingerprint>, StoreError>;
    /// Keeps a pod out from now on.
    fn keep_out(&self, uid: &str, pod: &KeptOut) -> Result<(), StoreError>;
    /// Why a pod is refused, by its UID.
    fn kept_out(&self, uid: &str) -> Result<Option<KeptOut>, StoreError>;
    /// All pods that are refused, by UID.
    fn all_kept_out(&self) -> Result<Vec<(String, KeptOut)>, StoreError>;
    /// Ends [`Store::keep_out`].
    fn readmit(&self, uid: &str) -> Result<(), StoreError>;
    /// Forgets what expired before `before`.
    fn prune(&self, before: UnixTime) -> Result<(), StoreError>;
}

/// A one-time token: the identity it is good for, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// Certificate name.
    pub name: String,
    /// Overlay addresses.
    pub networks: Vec<IpNet>,
    /// Networks behind the host.
    pub unsafe_networks: Vec<IpNet>,
    /// Groups.
    pub groups: Vec<String>,
    /// Life of the certificate in seconds.
    pub life: i64,
    /// When it was made.
    pub created: UnixTime,
    /// Last second at which it is accepted.
    pub expires: UnixTime,
    /// The one key it was used for.
    pub used: Option<TokenUse>,
}

/// The first and only key a token vouched for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenUse {
    /// When.
    pub at: UnixTime,
    /// SHA-256 of the public key, lower-case hex.
    pub key: String,
    /// Fingerprint of the certificate, lower-case hex.
    pub certificate: String,
}

/// What is remembered of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PodRecord {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) networks: Vec<IpNet>,
    /// Last second of its newest certificate.
    pub(crate) until: UnixTime,
}

/// A pod that an operator keeps out of the network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptOut {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) since: UnixTime,
    /// When this is forgotten.
    pub(crate) until: UnixTime,
}

/// A certificate that was handed out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuedRecord {
    /// Certificate name.
    pub name: String,
    /// Overlay addresses.
    pub networks: Vec<IpNet>,
    /// Groups.
    pub groups: Vec<String>,
    /// Whose it is.
    pub subject: Subject,
    /// When it was signed.
    pub issued: UnixTime,
    /// Last second of its validity.
    pub not_after: UnixTime,
    /// The certificate itself.
    pub pem: String,
    /// When it was revoked.
    pub revoked: Option<UnixTime>,
    /// Whether it is no proof for another one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub provisional: bool,
}

/// Overlay prefixes to allot from.
pub(crate) struct Pool<'a> {
    pub(crate) prefixes: &'a [IpNet],
    /// Networks nobody gets.
    pub(crate) reserved: &'a [IpNet],
}

impl Pool<'_> {
    /// The addresses of `prefix` that can be allotted, in the order they are handed out after `last`.
    pub(crate) fn candidates(&self, prefix: IpNet, last: Option<IpAddr>) -> impl Iterator<Item = IpNet> {
        address::candidates(prefix, last).filter(|network| !self.is_reserved(network))
    }

    pub(crate) fn is_reserved(&self, network: &IpNet) -> bool {
        self.reserved.iter().any(|reserved| reserved.contains(&network.addr()))
    }
}

/// A signed certificate about to be handed out.
pub(crate) struct Issue<'a> {
    pub(crate) certificate: &'a Certificate,
    pub(crate) subject: &'a Subject,
    /// The token that paid for it, and the hex SHA-256 of the key it is bound to from here on.
    pub(crate) token: Option<(&'a TokenHash, &'a str)>,
    pub(crate) mode: AddressMode,
    /// UIDs of pods that were shown to have left an address of the certificate.
    pub(crate) gone: &'a [String],
    /// As [`IssuedRecord::provisional`].
    pub(crate) provisional: bool,
}

/// A holder that another one follows at its address, and what it had for the address: blocked now.
#[derive(Debug)]
pub(crate) struct Displaced {
    pub(crate) subject: Subject,
    pub(crate) certificates: Vec<Fingerprint>,
}

/// Why a certificate was not recorded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("the token was used for another key meanwhile")]
    TokenUsed,
    #[error("the token is gone")]
    TokenGone,
    #[error("{address} belongs to {holder}")]
    AddressHeld {
        address: IpAddr,
        holder: Box<Subject>,
        /// Whether all that the holder has for it was blocked: nobody speaks from it now.
        is_silent: bool,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why no address was allotted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AllotError {
    #[error("no address is free in {0}")]
    Exhausted(IpNet),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The ledger cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it.
    #[error("the store is in use by another nebula-ca")]
    InUse,
    /// Written by a later release.
    #[error("the store has format {found}, this release knows {known}; use the newer nebula-ca")]
    Format {
        /// Format in the file.
        found: u64,
        /// Format of this release.
        known: u64,
    },
    /// A record that this program cannot have written.
    #[error("record {key} in table {table} of the store is damaged: {error}")]
    Record {
        /// Table.
        table: &'static str,
        /// Key.
        key: String,
        /// Parse error.
        error: serde_json::Error,
    },
    /// Disk or database failure.
    #[error("the store failed: {0}")]
    Database(#[from] Box<::redb::Error>),
    /// PostgreSQL, or the way there.
    #[error("PostgreSQL: {0}")]
    Postgres(String),
    /// The file cannot be made.
    #[error("cannot open the store file: {0}")]
    File(#[from] std::io::Error),
}
