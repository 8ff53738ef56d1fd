//! The ledger in one file: redb tables of JSON records, one durable transaction per step.

use std::{
    fs::{File, OpenOptions},
    net::IpAddr,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use ::redb::{
    Database, DatabaseError, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};
use ipnet::IpNet;
use nebula_cert::{Fingerprint, UnixTime};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    address::{self, AddressMode, Holder, Subject},
    proof::token::TokenHash,
    store::{AllotError, Issue, IssuedRecord, PodRecord, Pool, RecordError, Store, StoreError, TokenRecord, TokenUse},
};

/// [`Store`] in one file that one process has open.
pub(crate) struct RedbStore {
    database: Database,
}

impl RedbStore {
    /// Opens the file, or makes it, readable by its owner only.
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        let file: File =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let database = Database::builder().create_file(file).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => StoreError::InUse,
            other => failed(other),
        })?;
        let store = Self { database };
        store.write(|transaction| {
            // Every table exists from here on, so that reading needs no special case.
            for table in [TOKENS, ISSUED, PODS, ADDRESSES, REVOKED] {
                transaction.open_table(table.definition()).map_err(failed)?;
            }
            let found: Option<u64> = get_in(transaction, META, b"format")?;
            match found {
                None => put(transaction, META, b"format", &FORMAT),
                Some(FORMAT) => Ok(()),
                Some(found) => Err(StoreError::Format { found, known: FORMAT }),
            }
        })?;
        Ok(store)
    }

    fn write<T, E: From<StoreError>>(&self, step: impl FnOnce(&WriteTransaction) -> Result<T, E>) -> Result<T, E> {
        let transaction = self.database.begin_write().map_err(failed)?;
        // Dropping the transaction on an error undoes it.
        let value = step(&transaction)?;
        transaction.commit().map_err(failed)?;
        Ok(value)
    }

    fn read(&self) -> Result<ReadTransaction, StoreError> {
        self.database.begin_read().map_err(failed)
    }

    fn get<T: DeserializeOwned>(&self, table: Table, key: &[u8]) -> Result<Option<T>, StoreError> {
        let rows = self.read()?.open_table(table.definition()).map_err(failed)?;
        rows.get(key).map_err(failed)?.map(|row| parse(table, key, row.value())).transpose()
    }

    fn all<T: DeserializeOwned>(&self, table: Table) -> Result<Vec<([u8; 32], T)>, StoreError> {
        let rows = self.read()?.open_table(table.definition()).map_err(failed)?;
        let mut all = Vec::new();
        for row in rows.iter().map_err(failed)? {
            let (key, value) = row.map_err(failed)?;
            // Keys of another length cannot have been written here; a record is not worth less for its neighbour.
            if let Ok(id) = <[u8; 32]>::try_from(key.value()) {
                all.push((id, parse(table, key.value(), value.value())?));
            }
        }
        Ok(all)
    }
}

impl Store for RedbStore {
    fn add_token(&self, hash: &TokenHash, token: &TokenRecord) -> Result<(), StoreError> {
        self.write(|transaction| put(transaction, TOKENS, hash.as_bytes(), token))
    }

    fn token(&self, hash: &TokenHash) -> Result<Option<TokenRecord>, StoreError> {
        self.get(TOKENS, hash.as_bytes())
    }

    fn remove_token(&self, hash: &TokenHash) -> Result<bool, StoreError> {
        self.write(|transaction| {
            let token = get_in::<TokenRecord>(transaction, TOKENS, hash.as_bytes())?;
            let is_open = token.is_some_and(|token| token.used.is_none());
            if is_open {
                let mut rows = transaction.open_table(TOKENS.definition()).map_err(failed)?;
                rows.remove(hash.as_bytes().as_slice()).map_err(failed)?;
            }
            Ok(is_open)
        })
    }

    fn tokens(&self) -> Result<Vec<(TokenHash, TokenRecord)>, StoreError> {
        Ok(self.all(TOKENS)?.into_iter().map(|(id, token)| (TokenHash::from_bytes(id), token)).collect())
    }

    fn pod(&self, uid: &str) -> Result<Option<PodRecord>, StoreError> {
        self.get(PODS, uid.as_bytes())
    }

    fn holder(&self, address: IpAddr) -> Result<Option<Holder>, StoreError> {
        self.get(ADDRESSES, &address_key(address))
    }

    fn allot(&self, pod: &Subject, pool: &Pool<'_>, until: UnixTime, now: UnixTime) -> Result<Vec<IpNet>, AllotError> {
        self.write(|transaction| {
            let held = match pod {
                Subject::Pod { uid, .. } => get_in::<PodRecord>(transaction, PODS, uid.as_bytes())?,
                Subject::Host { .. } => None,
            };
            let held = held.map(|record| record.networks).unwrap_or_default();
            pool.prefixes.iter().map(|prefix| allot_one(transaction, pod, *prefix, pool, &held, until, now)).collect()
        })
    }

    fn record(&self, issue: &Issue<'_>, now: UnixTime) -> Result<(), RecordError> {
        let certificate = issue.certificate;
        let fingerprint = certificate.fingerprint();
        self.write(|transaction| {
            if let Some((hash, key)) = issue.token {
                let token = get_in::<TokenRecord>(transaction, TOKENS, hash.as_bytes())?;
                let mut token = token.ok_or(RecordError::TokenGone)?;
                if token.used.as_ref().is_some_and(|used| used.key != key) {
                    return Err(RecordError::TokenUsed);
                }
                token.used = Some(TokenUse { at: now, key: key.to_owned(), certificate: fingerprint.to_string() });
                put(transaction, TOKENS, hash.as_bytes(), &token)?;
            }
            for network in certificate.networks() {
                hold(transaction, network.addr(), issue.subject, issue.mode, certificate.not_after(), now)?;
            }
            if let Subject::Pod { namespace, name, uid, .. } = issue.subject {
                let record = PodRecord {
                    namespace: namespace.clone(),
                    name: name.clone(),
                    networks: certificate.networks().to_vec(),
                    until: certificate.not_after(),
                };
                put(transaction, PODS, uid.as_bytes(), &record)?;
            }
            let record = IssuedRecord {
                name: certificate.name().to_owned(),
                networks: certificate.networks().to_vec(),
                groups: certificate.groups().to_vec(),
                subject: issue.subject.clone(),
                issued: now,
                not_after: certificate.not_after(),
                pem: certificate.to_pem(),
                revoked: None,
            };
            Ok(put(transaction, ISSUED, &fingerprint.0, &record)?)
        })
    }

    fn issued(&self, fingerprint: &Fingerprint) -> Result<Option<IssuedRecord>, StoreError> {
        self.get(ISSUED, &fingerprint.0)
    }

    fn all_issued(&self) -> Result<Vec<(Fingerprint, IssuedRecord)>, StoreError> {
        Ok(self.all(ISSUED)?.into_iter().map(|(id, issued)| (Fingerprint(id), issued)).collect())
    }

    fn revoke(&self, certificates: &[Fingerprint], now: UnixTime) -> Result<(), StoreError> {
        self.write(|transaction| {
            for fingerprint in certificates {
                let issued = get_in::<IssuedRecord>(transaction, ISSUED, &fingerprint.0)?;
                // One that was signed elsewhere says nothing here about its end: block it for good.
                let until = issued.as_ref().map_or(UnixTime::MAX, |issued| issued.not_after);
                put(transaction, REVOKED, &fingerprint.0, &until)?;
                if let Some(mut issued) = issued {
                    issued.revoked.get_or_insert(now);
                    put(transaction, ISSUED, &fingerprint.0, &issued)?;
                }
            }
            Ok(())
        })
    }

    fn blocklist(&self, now: UnixTime) -> Result<Vec<Fingerprint>, StoreError> {
        let revoked = self.all::<UnixTime>(REVOKED)?;
        Ok(revoked.into_iter().filter(|(_, until)| *until >= now).map(|(id, _)| Fingerprint(id)).collect())
    }

    fn prune(&self, before: UnixTime) -> Result<(), StoreError> {
        self.write(|transaction| {
            prune::<TokenRecord>(transaction, TOKENS, |token| token.expires < before)?;
            prune::<IssuedRecord>(transaction, ISSUED, |issued| issued.not_after < before)?;
            prune::<PodRecord>(transaction, PODS, |pod| pod.until < before)?;
            prune::<Holder>(transaction, ADDRESSES, |holder| holder.until < before)?;
            prune::<UnixTime>(transaction, REVOKED, |until| *until < before)
        })
    }
}

/// What the pod already has in `prefix`, or the next address nobody holds.
fn allot_one(
    transaction: &WriteTransaction,
    pod: &Subject,
    prefix: IpNet,
    pool: &Pool<'_>,
    held: &[IpNet],
    until: UnixTime,
    now: UnixTime,
) -> Result<IpNet, AllotError> {
    let is_reserved = |network: &IpNet| pool.reserved.iter().any(|reserved| reserved.contains(&network.addr()));
    let is_held = |network: &IpNet| match hold(transaction, network.addr(), pod, AddressMode::Pool, until, now) {
        Ok(()) => Ok(true),
        Err(RecordError::Store(error)) => Err(error),
        Err(_) => Ok(false),
    };
    for network in held.iter().filter(|network| network.trunc() == prefix.trunc() && !is_reserved(network)) {
        if is_held(network)? {
            return Ok(*network);
        }
    }
    // Going round leaves an address alone for as long as possible after its last holder.
    let cursor = format!("last of pool {prefix}");
    let last: Option<IpAddr> = get_in(transaction, META, cursor.as_bytes())?;
    for network in address::candidates(prefix, last).filter(|network| !is_reserved(network)) {
        if is_held(&network)? {
            put(transaction, META, cursor.as_bytes(), &network.addr())?;
            return Ok(network);
        }
    }
    Err(AllotError::Exhausted(prefix))
}

/// Makes `subject` the holder of `address` until `until` at least, if the present holder yields.
fn hold(
    transaction: &WriteTransaction,
    address: IpAddr,
    subject: &Subject,
    mode: AddressMode,
    until: UnixTime,
    now: UnixTime,
) -> Result<(), RecordError> {
    let key = address_key(address);
    let mut until = until;
    if let Some(holder) = get_in::<Holder>(transaction, ADDRESSES, &key)? {
        if !holder.yields_to(subject, mode, now) {
            return Err(RecordError::AddressHeld { address, holder: holder.subject });
        }
        // A longer-lived certificate for the address is still out there.
        until = until.max(holder.until);
    }
    Ok(put(transaction, ADDRESSES, &key, &Holder { subject: subject.clone(), until })?)
}

fn address_key(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn get_in<T: DeserializeOwned>(
    transaction: &WriteTransaction,
    table: Table,
    key: &[u8],
) -> Result<Option<T>, StoreError> {
    let rows = transaction.open_table(table.definition()).map_err(failed)?;
    let row = rows.get(key).map_err(failed)?;
    row.map(|row| parse(table, key, row.value())).transpose()
}

fn put<T: Serialize>(transaction: &WriteTransaction, table: Table, key: &[u8], record: &T) -> Result<(), StoreError> {
    let json = serde_json::to_vec(record).map_err(|error| damaged(table, key, error))?;
    let mut rows = transaction.open_table(table.definition()).map_err(failed)?;
    rows.insert(key, json.as_slice()).map_err(failed)?;
    Ok(())
}

fn prune<T: DeserializeOwned>(
    transaction: &WriteTransaction,
    table: Table,
    is_over: impl Fn(&T) -> bool,
) -> Result<(), StoreError> {
    let mut rows = transaction.open_table(table.definition()).map_err(failed)?;
    // A record that cannot be read is kept for whoever looks into it.
    rows.retain(|_, row| !serde_json::from_slice(row).is_ok_and(|record| is_over(&record))).map_err(failed)
}

fn parse<T: DeserializeOwned>(table: Table, key: &[u8], row: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(row).map_err(|error| damaged(table, key, error))
}

fn damaged(table: Table, key: &[u8], error: serde_json::Error) -> StoreError {
    let key = key.iter().map(|byte| format!("{byte:02x}")).collect();
    StoreError::Record { table: table.0, key, error }
}

fn failed(error: impl Into<::redb::Error>) -> StoreError {
    StoreError::Database(Box::new(error.into()))
}

/// Name of a table from bytes to the JSON of one kind of record.
#[derive(Clone, Copy)]
struct Table(&'static str);

impl Table {
    fn definition(self) -> TableDefinition<'static, &'static [u8], &'static [u8]> {
        TableDefinition::new(self.0)
    }
}

const META: Table = Table("meta");
/// By token hash.
const TOKENS: Table = Table("tokens");
/// By fingerprint.
const ISSUED: Table = Table("issued");
/// By pod UID.
const PODS: Table = Table("pods");
/// By the bytes of the overlay address.
const ADDRESSES: Table = Table("addresses");
/// By fingerprint: the last second for which it must stay blocked.
const REVOKED: Table = Table("revoked");

const FORMAT: u64 = 1;
