//! The ledger as the issuer uses it: lookups, and a note of whether it failed.

use std::{
    ops::Deref,
    sync::atomic::{AtomicBool, Ordering},
};

use nebula_cert::{Fingerprint, UnixTime};

use super::Issuer;
use crate::{
    address::Subject,
    pod::PodFacts,
    refusal::Refusal,
    store::{IssuedRecord, Store, StoreError},
};

impl Issuer {
    /// Whether the ledger failed and has not recovered.
    pub(crate) fn has_lost_store(&self) -> bool {
        self.store.is_lost()
    }

    /// Checks whether the ledger can be written again.
    pub(crate) fn recovers_store(&self) -> bool {
        self.store.recovers()
    }

    /// The newest certificate of the pod with this UID, and its record.
    pub(super) fn newest(&self, uid: &str) -> Result<Option<(Fingerprint, IssuedRecord)>, Refusal> {
        let pod = self.store.run(|store| store.pod(uid))?;
        let Some(fingerprint) = pod.and_then(|pod| pod.newest.parse::<Fingerprint>().ok()) else { return Ok(None) };
        Ok(self.issued(&fingerprint)?.map(|record| (fingerprint, record)))
    }

    pub(super) fn issued(&self, fingerprint: &Fingerprint) -> Result<Option<IssuedRecord>, Refusal> {
        self.store.run(|store| store.issued(fingerprint))
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
        self.store.run(|store| store.each_issued(visit))
    }

    /// How many certificates are neither blocked nor expired.
    pub(crate) fn count_valid(&self, now: UnixTime) -> Result<usize, Refusal> {
        let mut count = 0;
        self.each_valid(now, |_, _| count += 1)?;
        Ok(count)
    }
}

/// The store of an issuer. Dereferences to it, for calls whose failure refuses nothing.
pub(crate) struct WatchedStore {
    store: Box<dyn Store>,
    has_failed: AtomicBool,
}

impl WatchedStore {
    pub(super) fn new(store: Box<dyn Store>) -> Self {
        Self { store, has_failed: AtomicBool::new(false) }
    }

    /// Takes one step on the store; its failure is a refusal, and is noted.
    pub(crate) fn run<T>(&self, step: impl FnOnce(&dyn Store) -> Result<T, StoreError>) -> Result<T, Refusal> {
        step(&*self.store).map_err(|error| self.failed(&error))
    }

    /// Notes a failure.
    pub(super) fn failed(&self, error: &StoreError) -> Refusal {
        // A remote database comes back by itself.
        if !self.store.is_shared() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        tracing::error!(%error, "the store failed; nothing was handed out. It is tried again every second");
        Refusal::Internal
    }

    /// Whether a step failed since the store last worked.
    pub(super) fn is_lost(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Checks whether the store can be written again.
    pub(super) fn recovers(&self) -> bool {
        let outcome = self.store.check();
        match &outcome {
            Ok(()) => self.has_failed.store(false, Ordering::Relaxed),
            Err(error) => tracing::warn!(%error, "the store does not work yet"),
        }
        outcome.is_ok()
    }
}

impl Deref for WatchedStore {
    type Target = dyn Store;

    fn deref(&self) -> &Self::Target {
        &*self.store
    }
}
