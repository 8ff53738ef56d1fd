//! Revocation of certificates in the ledger: which ones somebody means, and what blocks them.

use nebula_cert::{Fingerprint, UnixTime, revocation::Which};

use crate::{
    address::Subject,
    control::ListedPod,
    policy::MAX_RENEWAL_GRACE,
    store::{IssuedRecord, KeptOut, Store, StoreError},
};

/// The certificates for which `is_meant` holds and that may still be of use to somebody, revoked ones among them.
pub(crate) fn find(
    store: &dyn Store,
    is_meant: impl Fn(&IssuedRecord) -> bool,
    now: UnixTime,
) -> Result<Vec<(Fingerprint, IssuedRecord)>, StoreError> {
    let mut found = Vec::new();
    let visit = &mut |fingerprint, issued: IssuedRecord| {
        if is_meant(&issued) && is_of_use(&issued, now) {
            found.push((fingerprint, issued));
        }
    };
    store.each_issued(visit)?;
    Ok(found)
}

/// The certificates of what a request names.
pub(crate) fn find_named(
    store: &dyn Store,
    which: &Which,
    now: UnixTime,
) -> Result<Vec<(Fingerprint, IssuedRecord)>, StoreError> {
    match which {
        Which::Pod { namespace, name } => {
            let place = Some((namespace.as_str(), name.as_str()));
            find(store, |issued| issued.subject.pod() == place, now)
        }
        Which::Host { name: host } => {
            find(store, |issued| matches!(&issued.subject, Subject::Host { name } if name == host), now)
        }
        Which::Fingerprint { fingerprint, namespace } => {
            // It was checked before.
            let Ok(fingerprint) = fingerprint.parse::<Fingerprint>() else { return Ok(Vec::new()) };
            let is_there = |issued: &IssuedRecord| {
                let of = issued.subject.pod().map(|(namespace, _)| namespace);
                is_of_use(issued, now) && (namespace.is_none() || of == namespace.as_deref())
            };
            let found = store.issued(&fingerprint)?.filter(is_there);
            Ok(found.map(|issued| (fingerprint, issued)).into_iter().collect())
        }
    }
}

/// The pods that these certificates belong to, each once; `None` if one belongs to something else.
pub(crate) fn pods_of<'a>(subjects: impl IntoIterator<Item = &'a Subject>) -> Option<Vec<ListedPod>> {
    let mut pods: Vec<ListedPod> = Vec::new();
    for subject in subjects {
        let Subject::Pod { namespace, name, uid, .. } = subject else { return None };
        let pod = ListedPod { namespace: namespace.clone(), name: name.clone(), uid: uid.clone() };
        if !pods.contains(&pod) {
            pods.push(pod);
        }
    }
    Some(pods)
}

/// Refuses every further certificate to these pods. Comes before their certificates are blocked: a pod that learns of
/// its revocation asks for another one at once.
pub(crate) fn keep_out(store: &dyn Store, pods: &[ListedPod], now: UnixTime) -> Result<(), StoreError> {
    for ListedPod { namespace, name, uid } in pods {
        let until = now.saturating_add(KEEP_OUT_SECONDS);
        let record = KeptOut { namespace: namespace.clone(), name: name.clone(), since: now, until };
        store.keep_out(uid, &record)?;
    }
    Ok(())
}

/// Whether the blocklist has room for this number of further certificates.
pub(crate) fn has_room(store: &dyn Store, further: usize, now: UnixTime) -> Result<bool, StoreError> {
    Ok(store.blocklist(now)?.len() + further <= MAX_BLOCKLIST_ENTRIES)
}

fn is_of_use(issued: &IssuedRecord, now: UnixTime) -> bool {
    let is_valid = issued.not_after >= now;
    // An expired one of a host may be good for a renewal.
    let may_renew = matches!(issued.subject, Subject::Host { .. })
        && issued.revoked.is_none()
        && issued.not_after.saturating_add(MAX_RENEWAL_GRACE) >= now;
    is_valid || may_renew
}

/// UIDs are not reused, and no pod gets that old.
const KEEP_OUT_SECONDS: i64 = 366 * 86_400;
/// A blocklist of this size fits into [`nebula_cert::issuance::MAX_REPLY`] with room for the rest.
pub(crate) const MAX_BLOCKLIST_ENTRIES: usize = 50_000;
