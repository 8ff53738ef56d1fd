//! Who has which overlay address: allotted, held by a certificate, kept for a name, and freed.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::{Fingerprint, UnixTime};

use super::{
    AllotError, Allottee, Displaced, IssuedRecord, KeptAddresses, PodRecord, Pool, RecordError, StoreError, member_log,
    rows::{ADDRESSES, ISSUED, KEPT, META, PODS, REVOKED, Rows, address_key, get_in, parse, put},
};
use crate::address::{AddressMode, Holder, Kept, Subject};

/// The address that the pod already has in `prefix`, or the next free one.
pub(super) fn allot_one(
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
pub(super) struct Claim<'a> {
    pub(super) subject: &'a Subject,
    pub(super) mode: AddressMode,
    /// As [`super::Issue::gone`].
    pub(super) gone: &'a [String],
    pub(super) until: UnixTime,
    /// The certificate with the address, if it is already signed.
    pub(super) new: Option<Fingerprint>,
    /// The name for which the address is kept from now on.
    pub(super) kept: Option<&'a Kept>,
}

/// Makes the claimant the holder of `address`, if the current holder yields or has left it. That holder's certificates
/// for the address are blocked: no two holders may use it at once.
pub(super) fn hold(
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

pub(super) fn block(rows: &mut dyn Rows, fingerprint: &Fingerprint, now: UnixTime) -> Result<(), StoreError> {
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
pub(super) fn shorten_hold(rows: &mut dyn Rows, fingerprint: &Fingerprint, now: UnixTime) -> Result<(), StoreError> {
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
pub(super) fn keep(rows: &mut dyn Rows, kept: &Kept, networks: Vec<IpNet>, uid: &str) -> Result<(), StoreError> {
    if let Some(mut before) = get_in::<KeptAddresses>(rows, KEPT, kept.name.as_bytes())? {
        before.networks.retain(|network| !networks.contains(network));
        keep_no_longer(rows, &before.networks, &kept.name)?;
    }
    let addresses = KeptAddresses { networks, uid: uid.to_owned(), until: kept.until };
    put(rows, KEPT, kept.name.as_bytes(), &addresses)
}

/// Ends the reservation of addresses for a name.
pub(super) fn keep_no_longer(rows: &mut dyn Rows, networks: &[IpNet], name: &str) -> Result<(), StoreError> {
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

/// Seconds for which the address of a blocked certificate stays unused: peers must have heard of the block before
/// another pod speaks from it. `/v1/trust` announces a block at once; this allows for a peer that has to reconnect
/// first.
const COOL_DOWN: i64 = 60;
const LOOK_AT_ONCE: usize = 256;
