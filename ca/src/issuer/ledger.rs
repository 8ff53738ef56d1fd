//! What the ledger has, for the one who decides: lookups, and what a ledger that fails means.

use std::sync::atomic::Ordering;

use nebula_cert::{Fingerprint, UnixTime};

use super::Issuer;
use crate::{
    address::Subject,
    pod::PodFacts,
    refusal::Refusal,
    store::{IssuedRecord, StoreError},
};

impl Issuer {
    /// Whether the ledger failed and has not recovered.
    pub(crate) fn has_lost_store(&self) -> bool {
        self.store_failed.load(Ordering::Relaxed)
    }

    /// Checks whether the ledger can be written again.
    pub(crate) fn recovers_store(&self) -> bool {
        let outcome = self.store.check();
        match &outcome {
            Ok(()) => self.store_failed.store(false, Ordering::Relaxed),
            Err(error) => tracing::warn!(%error, "the store does not work yet"),
        }
        outcome.is_ok()
    }

    /// The newest certificate of the pod with this UID, and its record.
    pub(super) fn newest(&self, uid: &str) -> Result<Option<(Fingerprint, IssuedRecord)>, Refusal> {
        let pod = self.store.pod(uid).map_err(|error| self.failed(&error))?;
        let Some(fingerprint) = pod.and_then(|pod| pod.newest?.parse::<Fingerprint>().ok()) else { return Ok(None) };
        Ok(self.issued(&fingerprint)?.map(|record| (fingerprint, record)))
    }

    pub(super) fn issued(&self, fingerprint: &Fingerprint) -> Result<Option<IssuedRecord>, Refusal> {
        self.store.issued(fingerprint).map_err(|error| self.failed(&error))
    }

    /// Valid certificates with the UID of a pod, provided that the ledger has all of them for that pod and, if `node`
    /// is given, for that node. The caller was authorized by the pod's name, but certificates are found by the UID:
    /// both must mean the same pod.
    pub(super) fn valid_of_pod(
        &self,
        pod: &PodFacts,
        node: Option<&str>,
        now: UnixTime,
    ) -> Result<Vec<Fingerprint>, Refusal> {
        let mut theirs = Vec::new();
        self.each_valid(now, |fingerprint, record| {
            if matches!(&record.subject, Subject::Pod { uid, .. } if *uid == pod.uid) {
                theirs.push((fingerprint, record.subject));
            }
        })?;
        let mut valid = Vec::new();
        for (fingerprint, subject) in theirs {
            let Subject::Pod { namespace, name, uid, node: theirs, .. } = &subject else { continue };
            if (namespace, name) != (&pod.namespace, &pod.name) {
                return Err(Refusal::PodUidConflict { uid: uid.clone(), known: format!("{namespace}/{name}") });
            }
            if let Some(node) = node
                && theirs.as_deref() != Some(node)
            {
                return Err(Refusal::PodOnOtherNode { pod: pod.shown(), node: node.to_owned() });
            }
            valid.push(fingerprint);
        }
        Ok(valid)
    }

    /// Visits the certificates that are neither blocked nor expired.
    pub(crate) fn each_valid(
        &self,
        now: UnixTime,
        mut visit: impl FnMut(Fingerprint, IssuedRecord),
    ) -> Result<(), Refusal> {
        let visit = &mut |fingerprint, record: IssuedRecord| {
            if record.revoked.is_none() && record.not_after >= now {
                visit(fingerprint, record);
            }
        };
        self.store.each_issued(visit).map_err(|error| self.failed(&error))
    }

    /// How many certificates are neither blocked nor expired.
    pub(crate) fn count_valid(&self, now: UnixTime) -> Result<usize, Refusal> {
        let mut count = 0;
        self.each_valid(now, |_, _| count += 1)?;
        Ok(count)
    }

    pub(super) fn failed(&self, error: &StoreError) -> Refusal {
        // A remote database comes back by itself.
        if !self.store.is_shared() {
            self.store_failed.store(true, Ordering::Relaxed);
        }
        tracing::error!(%error, "the store failed; nothing was handed out. It is tried again every second");
        Refusal::Internal
    }
}
