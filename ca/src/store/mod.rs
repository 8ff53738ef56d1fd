//! The service's persistent state: tokens, certificates, pods, address holders and revocations (issuance ledger).
//!
//! Each method is one atomic and durable step, so a service that dies between two of them leaves a correct ledger.
//! Decisions are made outside and *checked again* inside [`Store::record`], which keeps them safe when several services
//! share one store.

mod holders;
mod ledger;
mod member_log;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "postgres")]
mod postgres_tls;
mod redb;
mod rows;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::{Certificate, Fingerprint, UnixTime, directory::Member};
use serde::{Deserialize, Serialize};

pub(crate) use self::member_log::{KEPT_CHANGES, MemberChange, Position};
#[cfg(feature = "postgres")]
pub(crate) use self::postgres::PostgresStore;
pub(crate) use self::{redb::RedbStore, rows::StoredRow};
use crate::{
    address::{self, AddressMode, Holder, Kept, Subject},
    directory::{DATABASE, Directory, STORE},
    proof::token::TokenHash,
};

/// Opens the store of a service: the database that its directory names, or else the file in the directory.
///
/// # Errors
/// Returns an error if the store cannot be opened, was written by another release, or has to begin and may not.
pub(crate) fn open(directory: &Directory, beginning: Beginning) -> Result<Box<dyn Store>, StoreError> {
    if !directory.has(DATABASE) {
        return Ok(Box::new(RedbStore::open_file(&directory.file(STORE), beginning)?));
    }
    let database = directory.read(DATABASE).map_err(|error| StoreError::File(std::io::Error::other(error)))?;
    open_database(&database, beginning)
}

/// Whether a new ledger may be created if there is none. Once a CA has signed, its ledger records revocations and
/// addresses in use: an empty one would let revoked hosts in and give their addresses away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beginning {
    Allowed,
    Refused,
}

impl Beginning {
    /// Allowed to a CA that was made a short while ago. `cas` are all that are trusted: a rollover makes no CA new.
    pub(crate) fn of(cas: &[Certificate], now: UnixTime) -> Self {
        let is_new = cas.iter().all(|ca| ca.not_before() > now.saturating_sub(NEW_FOR));
        if is_new { Self::Allowed } else { Self::Refused }
    }
}

/// Seconds within which a CA that was made gets its ledger; `nebula-ca init` makes it at once.
const NEW_FOR: i64 = 3600;

#[cfg(feature = "postgres")]
fn open_database(database: &str, beginning: Beginning) -> Result<Box<dyn Store>, StoreError> {
    Ok(Box::new(PostgresStore::connect(database, beginning)?))
}

#[cfg(not(feature = "postgres"))]
fn open_database(_database: &str, _beginning: Beginning) -> Result<Box<dyn Store>, StoreError> {
    Err(StoreError::Postgres("this build was made without the feature postgres".to_owned()))
}

/// The ledger. Its methods block on I/O, so call them where blocking is allowed.
pub(crate) trait Store: Send + Sync {
    /// Whether other services also write to it.
    fn is_shared(&self) -> bool;
    /// Writes something to see whether writing works.
    fn check(&self) -> Result<(), StoreError>;
    /// Visits all rows at one moment, but for the log of members: a copy begins another one.
    fn each_row(&self, visit: &mut dyn FnMut(StoredRow) -> Result<(), StoreError>) -> Result<(), StoreError>;
    /// Adds a token; its hash is new by construction.
    fn add_token(&self, hash: &TokenHash, token: &TokenRecord) -> Result<(), StoreError>;
    /// The token with this hash.
    fn token(&self, hash: &TokenHash) -> Result<Option<TokenRecord>, StoreError>;
    /// Removes an unused token; returns whether there was one.
    fn remove_token(&self, hash: &TokenHash) -> Result<bool, StoreError>;
    /// All tokens, including used and expired ones until they are pruned.
    fn tokens(&self) -> Result<Vec<(TokenHash, TokenRecord)>, StoreError>;
    /// The record of a pod.
    fn pod(&self, uid: &str) -> Result<Option<PodRecord>, StoreError>;
    /// The current or last holder of an overlay address.
    fn holder(&self, address: IpAddr) -> Result<Option<Holder>, StoreError>;
    /// Allots the pod one address from each pool until `until`, or extends the addresses that it has. Addresses that
    /// are kept for its name come first.
    fn allot(
        &self,
        pod: &Allottee<'_>,
        pool: &Pool<'_>,
        until: UnixTime,
        now: UnixTime,
    ) -> Result<Vec<IpNet>, AllotError>;
    /// Records an issued certificate, which may be handed out only after this returned `Ok`. Returns the holders that
    /// lost an address to it.
    fn record(&self, issue: &Issue<'_>, now: UnixTime) -> Result<Vec<Displaced>, RecordError>;
    /// The certificate with this fingerprint.
    fn issued(&self, fingerprint: &Fingerprint) -> Result<Option<IssuedRecord>, StoreError>;
    /// Visits all certificates, until they are pruned. One that is recorded meanwhile may be missing.
    fn each_issued(&self, visit: &mut dyn FnMut(Fingerprint, IssuedRecord)) -> Result<(), StoreError>;
    /// All certificates, for a list of them; everything else visits them one by one.
    fn all_issued(&self) -> Result<Vec<(Fingerprint, IssuedRecord)>, StoreError> {
        let mut all = Vec::new();
        self.each_issued(&mut |fingerprint, issued| all.push((fingerprint, issued)))?;
        Ok(all)
    }
    /// Blocks certificates until they expire.
    fn revoke(&self, certificates: &[Fingerprint], now: UnixTime) -> Result<(), StoreError>;
    /// Blocked certificates that have not expired, sorted.
    fn blocklist(&self, now: UnixTime) -> Result<Vec<Fingerprint>, StoreError>;
    /// Keeps a pod out from now on.
    fn keep_out(&self, uid: &str, pod: &KeptOut) -> Result<(), StoreError>;
    /// Why a pod is refused, by its UID.
    fn kept_out(&self, uid: &str) -> Result<Option<KeptOut>, StoreError>;
    /// All pods that are refused, by UID.
    fn all_kept_out(&self) -> Result<Vec<(String, KeptOut)>, StoreError>;
    /// Ends [`Store::keep_out`].
    fn readmit(&self, uid: &str) -> Result<(), StoreError>;
    /// Addresses that are kept for names of pods, by `namespace/name`.
    fn kept_addresses(&self) -> Result<Vec<(String, KeptAddresses)>, StoreError>;
    /// Keeps them no longer. A pod that has them now has them until its last certificate expires or is blocked.
    fn release_kept(&self, name: &str) -> Result<Option<KeptAddresses>, StoreError>;
    /// The lighthouses of the StatefulSet, in the order of their overlay addresses.
    fn lighthouses(&self) -> Result<Vec<LighthouseRecord>, StoreError>;
    /// Inserts a lighthouse, or replaces the one with its overlay address.
    fn put_lighthouse(&self, lighthouse: &LighthouseRecord) -> Result<(), StoreError>;
    /// Replaces a lighthouse, or removes it (`None`), unless it is another one by now; returns whether it did.
    fn change_lighthouse(&self, known: &LighthouseRecord, next: Option<&LighthouseRecord>) -> Result<bool, StoreError>;
    /// The end of the log of members.
    fn position(&self) -> Result<Position, StoreError>;
    /// At most `limit` changes of members after number `after`, oldest first.
    fn member_changes(&self, after: u64, limit: usize) -> Result<Vec<MemberChange>, StoreError>;
    /// All holders of certificates that are valid at `now`, each with its newest one.
    fn members(&self, now: UnixTime) -> Result<Vec<Member>, StoreError>;
    /// Logs what is known of these members now: they are over, or the log lacks something that the records have.
    fn review_members(&self, uids: &[String], now: UnixTime) -> Result<(), StoreError>;
    /// Removes records that expired before `before`.
    fn prune(&self, before: UnixTime) -> Result<(), StoreError>;
}

/// A one-time token: the identity it is good for, and how it was used.
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
    /// Lifetime of the certificate in seconds.
    pub life: i64,
    /// When the token was created.
    pub created: UnixTime,
    /// Last second at which it is accepted.
    pub expires: UnixTime,
    /// SHA-256 of the only public key it is good for, lower-case hex; `None`: the first one it is used with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// How it was used, if it was: a token is good for one key only.
    pub used: Option<TokenUse>,
}

impl TokenRecord {
    /// Whether it may be used with the key of this SHA-256 (lower-case hex), as far as it is bound to one.
    pub(crate) fn is_for(&self, key: &str) -> bool {
        self.key.as_ref().is_none_or(|bound| bound == key)
    }
}

/// The only key that a token vouched for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenUse {
    /// When it was used.
    pub at: UnixTime,
    /// SHA-256 of the public key, lower-case hex.
    pub key: String,
    /// Fingerprint of the certificate, lower-case hex.
    pub certificate: String,
}

/// The record of a pod, a lighthouse or, with an empty namespace, a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PodRecord {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) networks: Vec<IpNet>,
    /// Last second of the pod's newest certificate.
    pub(crate) until: UnixTime,
    /// Fingerprint of that certificate.
    pub(crate) newest: String,
}

/// The addresses that are kept for the name of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptAddresses {
    /// Overlay addresses.
    pub networks: Vec<IpNet>,
    /// UID of the last pod that had them.
    pub uid: String,
    /// Until when they are kept, unless a pod of the name asks again before.
    pub until: UnixTime,
}

/// A lighthouse of the StatefulSet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LighthouseRecord {
    /// Overlay address.
    pub(crate) address: IpAddr,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) node: String,
    /// UDP port of its Nebula.
    pub(crate) port: u16,
    /// Where it is reached: addresses of its node, with the port.
    pub(crate) endpoints: Vec<String>,
    /// Since when its pod is gone, if it is.
    pub(crate) gone: Option<UnixTime>,
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
    /// Who it was issued to.
    pub subject: Subject,
    /// When it was signed.
    pub issued: UnixTime,
    /// Last second of its validity.
    pub not_after: UnixTime,
    /// The certificate itself.
    pub pem: String,
    /// When it was revoked.
    pub revoked: Option<UnixTime>,
    /// Whether it cannot serve as proof for another certificate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub provisional: bool,
}

/// Who gets addresses from a pool.
pub(crate) struct Allottee<'a> {
    pub(crate) subject: &'a Subject,
    /// The `namespace/name` for which addresses may be kept.
    pub(crate) kept_name: Option<&'a str>,
}

/// Overlay prefixes to allot from.
pub(crate) struct Pool<'a> {
    pub(crate) prefixes: &'a [IpNet],
    /// Networks from which no address is allotted.
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

/// A signed certificate that is about to be handed out.
pub(crate) struct Issue<'a> {
    pub(crate) certificate: &'a Certificate,
    pub(crate) subject: &'a Subject,
    /// The token that was used for it, and the hex SHA-256 of the key that the token is bound to from now on.
    pub(crate) token: Option<(&'a TokenHash, &'a str)>,
    pub(crate) mode: AddressMode,
    /// UIDs of pods that are known to have left an address of the certificate.
    pub(crate) gone: &'a [String],
    /// As [`IssuedRecord::provisional`].
    pub(crate) provisional: bool,
    /// The name for which the addresses are kept, and until when.
    pub(crate) kept: Option<&'a Kept>,
}

/// A holder that lost its address to another one, and its certificates for that address, which are now blocked.
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
        /// Whether all certificates of the holder for this address are blocked, so that nobody can use it now.
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

/// Why the ledger cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has opened it.
    #[error("the store is in use by another nebula-ca")]
    InUse,
    /// There is none, and the CA is old.
    #[error(
        "the CA is older than an hour, but its ledger is empty: without it every revoked certificate would be good again, and \
         addresses in use would be given away. Restore a backup (nebula-ca restore), or begin anew with `nebula-ca serve \
         --new-ledger`"
    )]
    NoLedger,
    /// It was written by a later release.
    #[error(
        "the ledger was written by a newer nebula-ca (format {found}, this one knows {known}): install that release again"
    )]
    Format {
        /// Format in the file.
        found: u64,
        /// Format of this release.
        known: u64,
    },
    /// A record that this program cannot have written.
    #[error("record {key} in table {table} of the store is damaged: {error}")]
    Record {
        /// Name of the table.
        table: &'static str,
        /// Key of the record in hex.
        key: String,
        /// Parse error.
        error: serde_json::Error,
    },
    /// Disk or database failure.
    #[error("the store failed: {0}")]
    Database(#[from] Box<::redb::Error>),
    /// PostgreSQL failed or cannot be reached.
    #[error("PostgreSQL: {0}")]
    Postgres(String),
    /// The file cannot be opened or created.
    #[error("cannot open the store file: {0}")]
    File(#[from] std::io::Error),
}
