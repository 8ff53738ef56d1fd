//! The log of members in the ledger: who got a certificate and who lost it, numbered in the order of the transactions.
//! All services on one ledger, and each after a restart, so give the directory the same versions.

use nebula_cert::{Fingerprint, UnixTime, directory::Member, hex};
use serde::{Deserialize, Serialize};

use super::{
    IssuedRecord, PodRecord, StoreError,
    rows::{CHANGES, Database, ISSUED, META, PODS, Rows, Table, each_row, get_in, parse, put},
};
use crate::address::Subject;

/// The end of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Made with the ledger: numbers of another epoch mean something else.
    pub(crate) epoch: String,
    /// Number of the last change; the first one is 1.
    pub(crate) at: u64,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberChange {
    pub(crate) at: u64,
    pub(crate) uid: String,
    /// `None`: it left.
    pub(crate) member: Option<Member>,
}

/// Begins the log of a ledger that has none.
pub(super) fn begin(rows: &mut dyn Rows) -> Result<(), StoreError> {
    if get_in::<Position>(rows, META, POSITION)?.is_some() {
        return Ok(());
    }
    let mut epoch = [0; 8];
    getrandom::fill(&mut epoch).map_err(|error| StoreError::File(std::io::Error::other(error.to_string())))?;
    put(rows, META, POSITION, &Position { epoch: hex::encode(&epoch), at: 0 })
}

/// Whether a row is of the log.
pub(super) fn is_part(table: Table, key: &[u8]) -> bool {
    table.0 == CHANGES.0 || (table.0 == META.0 && key == POSITION)
}

/// Appends a change.
pub(super) fn append(rows: &mut dyn Rows, uid: &str, member: Option<Member>) -> Result<(), StoreError> {
    let Some(mut position) = get_in::<Position>(rows, META, POSITION)? else {
        // The ledger was emptied while it was in use; the next service that opens it begins a log.
        return Ok(());
    };
    position.at += 1;
    put(rows, META, POSITION, &position)?;
    let change = MemberChange { at: position.at, uid: uid.to_owned(), member };
    put(rows, CHANGES, &position.at.to_be_bytes(), &change)
}

/// Appends that the holder of a certificate left, if that certificate is the one by which it is a member.
pub(super) fn lost(rows: &mut dyn Rows, subject: &Subject, certificate: &Fingerprint) -> Result<(), StoreError> {
    let uid = subject.id();
    let known = get_in::<PodRecord>(rows, PODS, uid.as_bytes())?;
    let is_newest = known.is_none_or(|known| known.newest == certificate.to_string());
    if is_newest { append(rows, &uid, None) } else { Ok(()) }
}

/// Appends what the ledger says of these members now.
pub(super) fn review(rows: &mut dyn Rows, uids: &[String], now: UnixTime) -> Result<(), StoreError> {
    for uid in uids {
        let known = get_in::<PodRecord>(rows, PODS, uid.as_bytes())?;
        let newest = known.and_then(|known| known.newest.parse::<Fingerprint>().ok());
        let issued = match newest {
            Some(newest) => get_in::<IssuedRecord>(rows, ISSUED, &newest.0)?,
            None => None,
        };
        append(rows, uid, issued.and_then(|issued| issued.member(now)))?;
    }
    Ok(())
}

/// Removes the changes that are older than the last [`KEPT_CHANGES`].
pub(super) fn prune(rows: &mut dyn Rows) -> Result<(), StoreError> {
    let Some(position) = get_in::<Position>(rows, META, POSITION)? else { return Ok(()) };
    let is_old = |change: MemberChange| change.at.saturating_add(KEPT_CHANGES) <= position.at;
    rows.remove_if(CHANGES, &|row| serde_json::from_slice(row).is_ok_and(is_old))
}

/// The end of the log.
pub(super) fn position(database: &impl Database) -> Result<Position, StoreError> {
    let row = database.get(META, POSITION)?;
    let none = || StoreError::File(std::io::Error::other("the log of members is missing; restart nebula-ca"));
    parse(META, POSITION, &row.ok_or_else(none)?)
}

/// At most `limit` changes after number `after`, oldest first.
pub(super) fn after(database: &impl Database, after: u64, limit: usize) -> Result<Vec<MemberChange>, StoreError> {
    let rows = database.after(CHANGES, &after.to_be_bytes(), limit)?;
    rows.into_iter().map(|(key, row)| parse(CHANGES, &key, &row)).collect()
}

/// All members.
pub(super) fn all(database: &impl Database, now: UnixTime) -> Result<Vec<Member>, StoreError> {
    let mut keys: Vec<Vec<u8>> = Vec::new();
    each_row(database, PODS, |(key, row)| {
        let known: PodRecord = parse(PODS, &key, &row)?;
        let certificate = known.newest.parse::<Fingerprint>().ok().filter(|_| known.until >= now);
        keys.extend(certificate.map(|fingerprint| fingerprint.0.to_vec()));
        Ok(())
    })?;
    let mut members = Vec::with_capacity(keys.len());
    for keys in keys.chunks(READ_AT_ONCE) {
        for (key, row) in keys.iter().zip(database.get_many(ISSUED, keys)?) {
            let issued: Option<IssuedRecord> = row.map(|row| parse(ISSUED, key, &row)).transpose()?;
            members.extend(issued.and_then(|issued| issued.member(now)));
        }
    }
    Ok(members)
}

impl IssuedRecord {
    /// Its holder, if it is valid and not blocked, and others may reach it through a tunnel.
    pub(super) fn member(&self, now: UnixTime) -> Option<Member> {
        if self.revoked.is_some() || self.not_after < now {
            return None;
        }
        let (namespace, name, service_account, node) = match &self.subject {
            Subject::Host { name } => ("", name, None, None),
            Subject::Pod { namespace, name, service_account, node, .. } => {
                (namespace.as_str(), name, service_account.clone(), node.clone())
            }
            Subject::Lighthouse { namespace, name, .. } => (namespace.as_str(), name, None, None),
            // Its address is one of its node, which agents know, and nobody sends to it through a tunnel of a pod.
            Subject::Gateway { .. } => return None,
        };
        Some(Member {
            addresses: self.networks.iter().map(ipnet::IpNet::addr).collect(),
            namespace: namespace.to_owned(),
            name: name.clone(),
            service_account: service_account.unwrap_or_default(),
            node: node.unwrap_or_default(),
            uid: self.subject.id().into_owned(),
            until: self.not_after,
        })
    }
}

/// How many changes are kept for callers that were away. 50,000 pods renew their certificates in 12 hours.
pub(crate) const KEPT_CHANGES: u64 = 16_384;
const POSITION: &[u8] = b"members";
const READ_AT_ONCE: usize = 1_000;
