//! The ledger as rows: every step is one transaction on tables of JSON records, whatever database holds them.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::{Fingerprint, UnixTime, directory::Member};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    address::{AddressMode, Holder, Kept, Subject},
    policy::MAX_RENEWAL_GRACE,
    proof::token::TokenHash,
    store::{
        AllotError, Allottee, Beginning, Displaced, Issue, IssuedRecord, KeptAddresses, KeptOut, LighthouseRecord,
        MemberChange, PodRecord, Pool, Position, RecordError, Store, StoreError, TokenRecord, TokenUse, member_log,
    },
};

/// A database of rows.
pub(crate) trait Database: Send + Sync {
    /// Whether other processes also write to it.
    const IS_SHARED: bool;

    /// Runs `step` with exclusive access among all processes. Durable once this returns; rolled back on failure.
    fn write<T, E: From<StoreError>>(&self, step: impl FnOnce(&mut dyn Rows) -> Result<T, E>) -> Result<T, E>;

    /// The row with this key.
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError>;

    /// The rows with these keys, in the order of `keys`.
    fn get_many(&self, table: Table, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, StoreError>;

    /// At most `limit` rows with keys after `key`, sorted by key.
    fn after(&self, table: Table, key: &[u8], limit: usize) -> Result<Vec<Row>, StoreError>;

    /// Visits all rows as they are at one moment.
    fn each(&self, visit: &mut dyn FnMut(Table, Row) -> Result<(), StoreError>) -> Result<(), StoreError>;
}

/// A row as it is copied from one ledger into another.
pub(crate) struct StoredRow {
    pub(crate) table: &'static str,
    pub(crate) key: Vec<u8>,
    pub(crate) record: Vec<u8>,
}

impl StoredRow {
    /// `None` if no ledger has such a table.
    pub(crate) fn new(table: &str, key: Vec<u8>, record: Vec<u8>) -> Option<Self> {
        let table = TABLES.into_iter().find(|known| known.0 == table)?.0;
        Some(Self { table, key, record })
    }
}

/// A key and its record.
pub(crate) type Row = (Vec<u8>, Vec<u8>);

/// Visits the rows of a table, sorted by key, a page at a time: a ledger of many certificates does not fit into memory
/// twice. Rows that are written meanwhile may be missing.
pub(super) fn each_row(
    database: &impl Database,
    table: Table,
    mut visit: impl FnMut(Row) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let mut last = Vec::new();
    loop {
        let page = database.after(table, &last, PAGE)?;
        let is_last = page.len() < PAGE;
        if let Some((key, _)) = page.last() {
            last.clone_from(key);
        }
        page.into_iter().try_for_each(&mut visit)?;
        if is_last {
            return Ok(());
        }
    }
}

/// The rows within one transaction.
pub(crate) trait Rows {
    /// The rows with these keys, in the order of `keys`.
    fn get(&mut self, table: Table, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, StoreError>;
    /// Inserts or replaces a row.
    fn put(&mut self, table: Table, key: &[u8], row: &[u8]) -> Result<(), StoreError>;
    /// Removes a row if it exists.
    fn remove(&mut self, table: Table, key: &[u8]) -> Result<(), StoreError>;
    /// Removes all rows for which `is_over` returns `true`.
    fn remove_if(&mut self, table: Table, is_over: &dyn Fn(&[u8]) -> bool) -> Result<(), StoreError>;
}

/// A [`Store`] on a database.
pub(crate) struct Ledger<D>(D);

impl<D: Database> Ledger<D> {
    /// Checks that this release can read the rows.
    pub(crate) fn open(database: D, beginning: Beginning) -> Result<Self, StoreError> {
        database.write(|rows| {
            let found: Option<u64> = get_in(rows, META, b"format")?;
            match found {
                None if beginning == Beginning::Refused => return Err(StoreError::NoLedger),
                None => put(rows, META, b"format", &FORMAT)?,
                Some(FORMAT) => {}
                Some(found) => return Err(StoreError::Format { found, known: FORMAT }),
            }
            member_log::begin(rows)
        })?;
        Ok(Self(database))
    }

    fn get<T: DeserializeOwned>(&self, table: Table, key: &[u8]) -> Result<Option<T>, StoreError> {
        self.0.get(table, key)?.map(|row| parse(table, key, &row)).transpose()
    }

    fn each<T: DeserializeOwned>(&self, table: Table, mut visit: impl FnMut([u8; 32], T)) -> Result<(), StoreError> {
        each_row(&self.0, table, |(key, row)| {
            // This program writes no keys of another length. They are skipped: one bad row must not hide the others.
            if let Ok(id) = <[u8; 32]>::try_from(key.as_slice()) {
                visit(id, parse(table, &key, &row)?);
            }
            Ok(())
        })
    }

    /// All rows of a small table whose keys are text.
    fn named<T: DeserializeOwned>(&self, table: Table) -> Result<Vec<(String, T)>, StoreError> {
        let mut all = Vec::new();
        each_row(&self.0, table, |(key, row)| {
            all.push((String::from_utf8_lossy(&key).into_owned(), parse(table, &key, &row)?));
            Ok(())
        })?;
        Ok(all)
    }
}

impl<D: Database> Store for Ledger<D> {
    fn is_shared(&self) -> bool {
        D::IS_SHARED
    }

    fn check(&self) -> Result<(), StoreError> {
        self.0.write(|rows| put(rows, META, b"format", &FORMAT))
    }

    fn each_row(&self, visit: &mut dyn FnMut(StoredRow) -> Result<(), StoreError>) -> Result<(), StoreError> {
        self.0.each(&mut |table, (key, record)| {
            if member_log::is_part(table, &key) { Ok(()) } else { visit(StoredRow { table: table.0, key, record }) }
        })
    }

    fn add_token(&self, hash: &TokenHash, token: &TokenRecord) -> Result<(), StoreError> {
        self.0.write(|rows| put(rows, TOKENS, hash.as_bytes(), token))
    }

    fn token(&self, hash: &TokenHash) -> Result<Option<TokenRecord>, StoreError> {
        self.get(TOKENS, hash.as_bytes())
    }

    fn remove_token(&self, hash: &TokenHash) -> Result<bool, StoreError> {
        self.0.write(|rows| {
            let token = get_in::<TokenRecord>(rows, TOKENS, hash.as_bytes())?;
            let is_open = token.is_some_and(|token| token.used.is_none());
            if is_open {
                rows.remove(TOKENS, hash.as_bytes())?;
            }
            Ok(is_open)
        })
    }

    fn tokens(&self) -> Result<Vec<(TokenHash, TokenRecord)>, StoreError> {
        let mut tokens = Vec::new();
        self.each(TOKENS, |id, token| tokens.push((TokenHash::from_bytes(id), token)))?;
        Ok(tokens)
    }

    fn pod(&self, uid: &str) -> Result<Option<PodRecord>, StoreError> {
        self.get(PODS, uid.as_bytes())
    }

    fn holder(&self, address: IpAddr) -> Result<Option<Holder>, StoreError> {
        self.get(ADDRESSES, &address_key(address))
    }

    fn allot(
        &self,
        pod: &Allottee<'_>,
        pool: &Pool<'_>,
        until: UnixTime,
        now: UnixTime,
    ) -> Result<Vec<IpNet>, AllotError> {
        self.0.write(|rows| {
            let mut held = Vec::new();
            if let Some(name) = pod.kept_name
                && let Some(kept) = get_in::<KeptAddresses>(rows, KEPT, name.as_bytes())?
            {
                held.extend(kept.networks);
            }
            if let Subject::Pod { uid, .. } = pod.subject
                && let Some(record) = get_in::<PodRecord>(rows, PODS, uid.as_bytes())?
            {
                held.extend(record.networks);
            }
            pool.prefixes.iter().map(|prefix| allot_one(rows, pod, *prefix, pool, &held, until, now)).collect()
        })
    }

    fn record(&self, issue: &Issue<'_>, now: UnixTime) -> Result<Vec<Displaced>, RecordError> {
        let certificate = issue.certificate;
        let fingerprint = certificate.fingerprint();
        self.0.write(|rows| {
            if let Some((hash, key)) = issue.token {
                let token = get_in::<TokenRecord>(rows, TOKENS, hash.as_bytes())?;
                let mut token = token.ok_or(RecordError::TokenGone)?;
                if token.used.as_ref().is_some_and(|used| used.key != key) || !token.is_for(key) {
                    return Err(RecordError::TokenUsed);
                }
                token.used = Some(TokenUse { at: now, key: key.to_owned(), certificate: fingerprint.to_string() });
                put(rows, TOKENS, hash.as_bytes(), &token)?;
            }
            let claim = Claim {
                subject: issue.subject,
                mode: issue.mode,
                gone: issue.gone,
                until: certificate.not_after(),
                new: Some(fingerprint),
                kept: issue.kept,
            };
            let mut displaced = Vec::new();
            for network in certificate.networks() {
                displaced.extend(hold(rows, network.addr(), &claim, now)?);
            }
            let uid = issue.subject.id();
            let (namespace, name) = match issue.subject {
                Subject::Pod { namespace, name, .. } | Subject::Lighthouse { namespace, name, .. } => {
                    (namespace.clone(), name.clone())
                }
                Subject::Host { name } => (String::new(), name.clone()),
            };
            let record = PodRecord {
                namespace,
                name,
                networks: certificate.networks().to_vec(),
                until: certificate.not_after(),
                newest: fingerprint.to_string(),
            };
            put(rows, PODS, uid.as_bytes(), &record)?;
            if let Some(kept) = issue.kept {
                keep(rows, kept, record.networks, &uid)?;
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
                provisional: issue.provisional,
            };
            put(rows, ISSUED, &fingerprint.0, &record)?;
            member_log::append(rows, &uid, record.member(now))?;
            Ok(displaced)
        })
    }

    fn issued(&self, fingerprint: &Fingerprint) -> Result<Option<IssuedRecord>, StoreError> {
        self.get(ISSUED, &fingerprint.0)
    }

    fn each_issued(&self, visit: &mut dyn FnMut(Fingerprint, IssuedRecord)) -> Result<(), StoreError> {
        self.each(ISSUED, |id, issued| visit(Fingerprint(id), issued))
    }

    fn revoke(&self, certificates: &[Fingerprint], now: UnixTime) -> Result<(), StoreError> {
        self.0.write(|rows| {
            certificates.iter().try_for_each(|fingerprint| block(rows, fingerprint, now))?;
            certificates.iter().try_for_each(|fingerprint| shorten_hold(rows, fingerprint, now))
        })
    }

    fn blocklist(&self, now: UnixTime) -> Result<Vec<Fingerprint>, StoreError> {
        let mut blocked = Vec::new();
        self.each(REVOKED, |id, until: UnixTime| blocked.extend((until >= now).then_some(Fingerprint(id))))?;
        Ok(blocked)
    }

    fn keep_out(&self, uid: &str, pod: &KeptOut) -> Result<(), StoreError> {
        self.0.write(|rows| put(rows, KEPT_OUT, uid.as_bytes(), pod))
    }

    fn kept_out(&self, uid: &str) -> Result<Option<KeptOut>, StoreError> {
        self.get(KEPT_OUT, uid.as_bytes())
    }

    fn all_kept_out(&self) -> Result<Vec<(String, KeptOut)>, StoreError> {
        self.named(KEPT_OUT)
    }

    fn readmit(&self, uid: &str) -> Result<(), StoreError> {
        self.0.write(|rows| rows.remove(KEPT_OUT, uid.as_bytes()))
    }

    fn kept_addresses(&self) -> Result<Vec<(String, KeptAddresses)>, StoreError> {
        self.named(KEPT)
    }

    fn release_kept(&self, name: &str) -> Result<Option<KeptAddresses>, StoreError> {
        self.0.write(|rows| {
            let kept = get_in::<KeptAddresses>(rows, KEPT, name.as_bytes())?;
            if let Some(kept) = &kept {
                keep_no_longer(rows, &kept.networks, name)?;
                rows.remove(KEPT, name.as_bytes())?;
            }
            Ok(kept)
        })
    }

    fn lighthouses(&self) -> Result<Vec<LighthouseRecord>, StoreError> {
        let mut all: Vec<LighthouseRecord> = self.named(LIGHTHOUSES)?.into_iter().map(|(_, known)| known).collect();
        all.sort_by_key(|lighthouse| lighthouse.address);
        Ok(all)
    }

    fn put_lighthouse(&self, lighthouse: &LighthouseRecord) -> Result<(), StoreError> {
        self.0.write(|rows| put(rows, LIGHTHOUSES, &address_key(lighthouse.address), lighthouse))
    }

    fn change_lighthouse(&self, known: &LighthouseRecord, next: Option<&LighthouseRecord>) -> Result<bool, StoreError> {
        self.0.write(|rows| {
            let key = address_key(known.address);
            if get_in::<LighthouseRecord>(rows, LIGHTHOUSES, &key)?.as_ref() != Some(known) {
                return Ok(false);
            }
            match next {
                Some(next) => put(rows, LIGHTHOUSES, &key, next)?,
                None => rows.remove(LIGHTHOUSES, &key)?,
            }
            Ok(true)
        })
    }

    fn position(&self) -> Result<Position, StoreError> {
        member_log::position(&self.0)
    }

    fn member_changes(&self, after: u64, limit: usize) -> Result<Vec<MemberChange>, StoreError> {
        member_log::after(&self.0, after, limit)
    }

    fn members(&self, now: UnixTime) -> Result<Vec<Member>, StoreError> {
        member_log::all(&self.0, now)
    }

    fn review_members(&self, uids: &[String], now: UnixTime) -> Result<(), StoreError> {
        self.0.write(|rows| member_log::review(rows, uids, now))
    }

    fn prune(&self, before: UnixTime) -> Result<(), StoreError> {
        self.0.write(|rows| {
            member_log::prune(rows)?;
            prune::<KeptOut>(rows, KEPT_OUT, |pod| pod.until < before)?;
            prune::<TokenRecord>(rows, TOKENS, |token| token.expires < before)?;
            prune::<IssuedRecord>(rows, ISSUED, |issued| {
                // Those of hosts may be renewed for a while.
                let may_renew = matches!(issued.subject, Subject::Host { .. }) && issued.revoked.is_none();
                let grace = if may_renew { MAX_RENEWAL_GRACE } else { 0 };
                issued.not_after.saturating_add(grace) < before
            })?;
            prune::<PodRecord>(rows, PODS, |pod| pod.until < before)?;
            prune::<Holder>(rows, ADDRESSES, |holder| {
                holder.until < before && holder.kept.as_ref().is_none_or(|kept| kept.until < before)
            })?;
            prune::<KeptAddresses>(rows, KEPT, |kept| kept.until < before)?;
            prune::<UnixTime>(rows, REVOKED, |until| *until < before)
        })
    }
}

/// The address that the pod already has in `prefix`, or the next free one.
fn allot_one(
    rows: &mut dyn Rows,
    pod: &Allottee<'_>,
    prefix: IpNet,
    pool: &Pool<'_>,
    held: &[IpNet],
    until: UnixTime,
    now: UnixTime,
) -> Result<IpNet, AllotError> {
    let Allottee { subject: pod, kept_name } = *pod;
    for network in held.iter().filter(|network| network.trunc() == prefix.trunc() && !pool.is_reserved(network)) {
        let holder = get_in::<Holder>(rows, ADDRESSES, &address_key(network.addr()))?;
        // The pod before it loses the address only when the certificate is recorded.
        if holder.is_some_and(|holder| holder.is_kept_for(kept_name) && !holder.is(pod)) {
            return Ok(*network);
        }
        if is_held_now(rows, network, pod, until, now)? {
            return Ok(*network);
        }
    }
    // Continues after the last allotted address, so that a released address is reused as late as possible.
    let cursor = format!("last of pool {prefix}");
    let last: Option<IpAddr> = get_in(rows, META, cursor.as_bytes())?;
    let mut candidates = pool.candidates(prefix, last);
    loop {
        // Looked up in batches, because each look-up may be a round trip to another machine.
        let some: Vec<IpNet> = candidates.by_ref().take(LOOK_AT_ONCE).collect();
        if some.is_empty() {
            return Err(AllotError::Exhausted(prefix));
        }
        let keys: Vec<Vec<u8>> = some.iter().map(|network| address_key(network.addr())).collect();
        for ((network, key), row) in some.iter().zip(&keys).zip(rows.get(ADDRESSES, &keys)?) {
            let holder: Option<Holder> = row.map(|row| parse(ADDRESSES, key, &row)).transpose()?;
            if holder.is_none_or(|holder| holder.yields_to(pod, now)) && is_held_now(rows, network, pod, until, now)? {
                put(rows, META, cursor.as_bytes(), &network.addr())?;
                return Ok(*network);
            }
        }
    }
}

/// Makes the pod the holder of the address; `false` if it cannot have it.
fn is_held_now(
    rows: &mut dyn Rows,
    network: &IpNet,
    pod: &Subject,
    until: UnixTime,
    now: UnixTime,
) -> Result<bool, StoreError> {
    let claim = Claim { subject: pod, mode: AddressMode::Pool, gone: &[], until, new: None, kept: None };
    match hold(rows, network.addr(), &claim, now) {
        Ok(_) => Ok(true),
        Err(RecordError::Store(error)) => Err(error),
        Err(_) => Ok(false),
    }
}

/// A claim to an address, and what may make the current holder yield.
struct Claim<'a> {
    subject: &'a Subject,
    mode: AddressMode,
    /// As [`Issue::gone`].
    gone: &'a [String],
    until: UnixTime,
    /// The certificate with the address, if it is already signed.
    new: Option<Fingerprint>,
    /// The name for which the address is kept from now on.
    kept: Option<&'a Kept>,
}

/// Makes the claimant the holder of `address`, if the current holder yields or has left it. That holder's certificates
/// for the address are blocked: no two holders may use it at once.
fn hold(
    rows: &mut dyn Rows,
    address: IpAddr,
    claim: &Claim<'_>,
    now: UnixTime,
) -> Result<Option<Displaced>, RecordError> {
    let Claim { subject, mode, until, new, kept, .. } = *claim;
    let key = address_key(address);
    let mut certificates: Vec<_> = new.iter().map(|fingerprint| (fingerprint.to_string(), until)).collect();
    let (mut until, mut displaced, mut kept) = (until, None, kept.cloned());
    if let Some(holder) = get_in::<Holder>(rows, ADDRESSES, &key)? {
        let has_left = subject.has_address_of(&holder.subject, mode) && is_one_of(&holder.subject, claim.gone);
        // A name has one pod at a time: the API server has confirmed this one, so the one before it is gone.
        let is_kept = holder.is_kept_for(kept.as_ref().map(|kept| kept.name.as_str()));
        if !holder.yields_to(subject, now) && !has_left && !is_kept {
            let is_silent = is_silent(rows, &holder, now)?;
            return Err(RecordError::AddressHeld { address, holder: Box::new(holder.subject), is_silent });
        }
        // An earlier certificate for the address may be valid for longer.
        until = until.max(holder.until);
        let is_same = holder.is(subject);
        let valid = holder.certificates.into_iter().filter(|(_, until)| *until >= now);
        if is_same {
            certificates.extend(valid);
            kept = kept.or(holder.kept);
        } else {
            let ended: Vec<Fingerprint> = valid.filter_map(|(fingerprint, _)| fingerprint.parse().ok()).collect();
            for fingerprint in &ended {
                block(rows, fingerprint, now)?;
            }
            if ended.is_empty() {
                leave(rows, &holder.subject, address)?;
            }
            displaced = Some(Displaced { subject: holder.subject, certificates: ended });
        }
    }
    put(rows, ADDRESSES, &key, &Holder { subject: subject.clone(), until, certificates, kept })?;
    Ok(displaced)
}

/// Notes that a subject without a valid certificate is no member any more, if it was one at `address`: its
/// certificate may have expired a moment ago, and the next holder of the address is announced now.
fn leave(rows: &mut dyn Rows, subject: &Subject, address: IpAddr) -> Result<(), StoreError> {
    let uid = subject.id();
    let known = get_in::<PodRecord>(rows, PODS, uid.as_bytes())?;
    let was_there = known.is_some_and(|known| known.networks.iter().any(|network| network.addr() == address));
    if was_there { member_log::append(rows, &uid, None) } else { Ok(()) }
}

fn is_one_of(subject: &Subject, uids: &[String]) -> bool {
    matches!(subject, Subject::Pod { uid, .. } if uids.contains(uid))
}

/// Whether the holder had certificates, and all that have not expired are blocked.
fn is_silent(rows: &mut dyn Rows, holder: &Holder, now: UnixTime) -> Result<bool, StoreError> {
    let valid = holder.certificates.iter().filter(|(_, until)| *until >= now);
    let valid = valid.filter_map(|(fingerprint, _)| fingerprint.parse::<Fingerprint>().ok());
    let keys: Vec<Vec<u8>> = valid.map(|fingerprint| fingerprint.0.to_vec()).collect();
    Ok(!holder.certificates.is_empty() && rows.get(REVOKED, &keys)?.iter().all(Option::is_some))
}

fn block(rows: &mut dyn Rows, fingerprint: &Fingerprint, now: UnixTime) -> Result<(), StoreError> {
    let issued = get_in::<IssuedRecord>(rows, ISSUED, &fingerprint.0)?;
    // The end of a certificate that was not issued here is unknown, so it is blocked for good.
    let until = issued.as_ref().map_or(UnixTime::MAX, |issued| issued.not_after);
    put(rows, REVOKED, &fingerprint.0, &until)?;
    if let Some(mut issued) = issued {
        if issued.revoked.replace(issued.revoked.unwrap_or(now)).is_none() {
            member_log::lost(rows, &issued.subject, fingerprint)?;
        }
        put(rows, ISSUED, &fingerprint.0, &issued)?;
    }
    Ok(())
}

/// Frees the addresses of a blocked certificate after the cool-down, if their holder has no other valid certificate.
fn shorten_hold(rows: &mut dyn Rows, fingerprint: &Fingerprint, now: UnixTime) -> Result<(), StoreError> {
    let Some(issued) = get_in::<IssuedRecord>(rows, ISSUED, &fingerprint.0)? else { return Ok(()) };
    for network in &issued.networks {
        let key = address_key(network.addr());
        let Some(mut holder) = get_in::<Holder>(rows, ADDRESSES, &key)? else { continue };
        if holder.is(&issued.subject) && is_silent(rows, &holder, now)? {
            holder.until = holder.until.min(now + COOL_DOWN);
            // A host that was revoked does not renew, so nothing is kept for it. A pod's name has a next pod.
            if matches!(issued.subject, Subject::Host { .. }) {
                holder.kept = None;
                rows.remove(KEPT, issued.subject.id().as_bytes())?;
            }
            put(rows, ADDRESSES, &key, &holder)?;
        }
    }
    Ok(())
}

/// Notes which addresses are kept for a name; those before are no longer.
fn keep(rows: &mut dyn Rows, kept: &Kept, networks: Vec<IpNet>, uid: &str) -> Result<(), StoreError> {
    if let Some(mut before) = get_in::<KeptAddresses>(rows, KEPT, kept.name.as_bytes())? {
        before.networks.retain(|network| !networks.contains(network));
        keep_no_longer(rows, &before.networks, &kept.name)?;
    }
    let addresses = KeptAddresses { networks, uid: uid.to_owned(), until: kept.until };
    put(rows, KEPT, kept.name.as_bytes(), &addresses)
}

/// Ends the reservation of addresses for a name.
fn keep_no_longer(rows: &mut dyn Rows, networks: &[IpNet], name: &str) -> Result<(), StoreError> {
    for network in networks {
        let key = address_key(network.addr());
        let Some(mut holder) = get_in::<Holder>(rows, ADDRESSES, &key)? else { continue };
        if holder.is_kept_for(Some(name)) {
            holder.kept = None;
            put(rows, ADDRESSES, &key, &holder)?;
        }
    }
    Ok(())
}

fn address_key(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

pub(super) fn get_in<T: DeserializeOwned>(
    rows: &mut dyn Rows,
    table: Table,
    key: &[u8],
) -> Result<Option<T>, StoreError> {
    let row = rows.get(table, &[key.to_vec()])?.pop().flatten();
    row.map(|row| parse(table, key, &row)).transpose()
}

pub(super) fn put<T: Serialize>(rows: &mut dyn Rows, table: Table, key: &[u8], record: &T) -> Result<(), StoreError> {
    rows.put(table, key, &serde_json::to_vec(record).map_err(|error| damaged(table, key, error))?)
}

fn prune<T: DeserializeOwned>(
    rows: &mut dyn Rows,
    table: Table,
    is_over: impl Fn(&T) -> bool,
) -> Result<(), StoreError> {
    // An unreadable record is kept for diagnosis.
    rows.remove_if(table, &|row| serde_json::from_slice(row).is_ok_and(|record| is_over(&record)))
}

pub(super) fn parse<T: DeserializeOwned>(table: Table, key: &[u8], row: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(row).map_err(|error| damaged(table, key, error))
}

fn damaged(table: Table, key: &[u8], error: serde_json::Error) -> StoreError {
    StoreError::Record { table: table.0, key: nebula_cert::hex::encode(key), error }
}

/// Name of a table that maps bytes to the JSON of one kind of record.
#[derive(Clone, Copy)]
pub(crate) struct Table(pub(crate) &'static str);

/// All tables.
pub(crate) const TABLES: [Table; 10] =
    [META, TOKENS, ISSUED, PODS, ADDRESSES, REVOKED, KEPT_OUT, KEPT, LIGHTHOUSES, CHANGES];

pub(super) const META: Table = Table("meta");
/// Keyed by token hash.
const TOKENS: Table = Table("tokens");
/// Keyed by fingerprint.
pub(super) const ISSUED: Table = Table("issued");
/// Keyed by pod UID, or `host NAME`.
pub(super) const PODS: Table = Table("pods");
/// Keyed by the bytes of the overlay address.
const ADDRESSES: Table = Table("addresses");
/// Keyed by fingerprint: the last second for which the certificate must stay blocked.
const REVOKED: Table = Table("revoked");
/// By pod UID.
const KEPT_OUT: Table = Table("kept_out");

/// Addresses that are kept, by `namespace/name` of a pod.
const KEPT: Table = Table("kept");
/// Keyed by the bytes of the overlay address.
const LIGHTHOUSES: Table = Table("lighthouses");
/// Keyed by the number of the change, eight bytes, highest first.
pub(super) const CHANGES: Table = Table("changes");

const FORMAT: u64 = 1;
/// Seconds for which the address of a blocked certificate stays unused: peers must have heard of the block before
/// another pod speaks from it. `/v1/trust` announces a block at once; this allows for a peer that has to reconnect
/// first.
const COOL_DOWN: i64 = 60;
const LOOK_AT_ONCE: usize = 256;
/// So few in tests that they need several.
const PAGE: usize = if cfg!(test) { 3 } else { 512 };
