//! The ledger: every step is one transaction on the rows of a database.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::{Fingerprint, UnixTime, directory::Member};
use serde::de::DeserializeOwned;

use super::{
    AllotError, Allottee, Beginning, Displaced, Issue, IssuedRecord, KeptAddresses, KeptOut, LighthouseRecord,
    MemberChange, PodRecord, Pool, Position, RecordError, Store, StoreError, TokenRecord, TokenUse,
    holders::{Claim, allot_one, block, hold, keep, keep_no_longer, shorten_hold},
    member_log,
    rows::{
        ADDRESSES, Database, ISSUED, KEPT, KEPT_OUT, LIGHTHOUSES, META, PODS, REVOKED, StoredRow, TOKENS, Table,
        address_key, each_row, get_in, parse, prune, put,
    },
};
use crate::{
    address::{Holder, Subject},
    policy::MAX_RENEWAL_GRACE,
    proof::token::TokenHash,
};

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

    #[cfg(test)]
    pub(super) fn database(&self) -> &D {
        &self.0
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
        self.0.write(|rows| match get_in(rows, META, b"format")? {
            // A newer service that shares the database has changed it meanwhile.
            Some(found) if found != FORMAT => Err(StoreError::Format { found, known: FORMAT }),
            _ => put(rows, META, b"format", &FORMAT),
        })
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
                Subject::Pod { namespace, name, .. }
                | Subject::Lighthouse { namespace, name, .. }
                | Subject::Gateway { namespace, name, .. } => (namespace.clone(), name.clone()),
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

const FORMAT: u64 = 1;
