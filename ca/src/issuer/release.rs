//! Certificates that end before their time: given back by their holders, or blocked because their pod is gone.

use std::net::IpAddr;

use nebula_cert::{
    Fingerprint, UnixTime,
    issuance::{Proof, Release},
};

use super::{Issuer, pod::identified};
use crate::{address::Subject, pod::PodFacts, proof::certificate::Presented, refusal::Refusal};

/// Certificates that were released.
pub(crate) struct GivenBack {
    pub(crate) subject: String,
    pub(crate) fingerprints: Vec<Fingerprint>,
}

impl Issuer {
    /// Releases certificates: they are blocked until they expire.
    pub(crate) fn release(&self, release: &Release, source: IpAddr, now: UnixTime) -> Result<GivenBack, Refusal> {
        let rules = self.rules();
        let (subject, fingerprints) = match &release.proof {
            Proof::Token { .. } => return Err(Refusal::NotReleasable),
            Proof::Certificate { certificate, time, tag } => {
                let presented = Presented { certificate, time: *time, tag, public_key: None };
                let trusted = rules.trusted()?;
                let held = self.renewal_key.check(&presented, &trusted, 0, now)?;
                let known = self.issued(&held.fingerprint())?.ok_or(Refusal::UnknownCertificate)?;
                // Releasing a certificate twice succeeds.
                let fingerprint = known.revoked.is_none().then(|| held.fingerprint());
                (known.subject.to_string(), fingerprint.into_iter().collect())
            }
            Proof::Node { token, pod } | Proof::Provisional { token, pod } => {
                let node = self.check_gone_or_vouched(&rules, token, pod, source, now)?;
                let facts = PodFacts::described(pod);
                (format!("pod {}", facts.shown()), self.valid_of_pod(&facts, node.as_deref(), now)?)
            }
            Proof::Pod { token, address, other_address } => {
                let facts = identified(&rules, token, *address, *other_address, now)?;
                (format!("pod {}", facts.shown()), self.valid_of_pod(&facts, None, now)?)
            }
            // Its certificate is proof enough.
            Proof::Lighthouse { .. } | Proof::Gateway { .. } => return Err(Refusal::NotReleasable),
        };
        self.store.run(|store| store.revoke(&fingerprints, now))?;
        Ok(GivenBack { subject, fingerprints })
    }

    /// Blocks the certificates of pods that no longer exist, and returns what was blocked.
    pub(crate) fn block_deleted(&self, now: UnixTime) -> Result<Vec<GivenBack>, Refusal> {
        let rules = self.rules();
        let Some(cluster) = &rules.cluster else { return Ok(Vec::new()) };
        // Read the ledger first: a pod created in the meantime is then missing from it, rather than from the pod list.
        let mut valid = Vec::new();
        self.each_valid(now, |fingerprint, record| match record.subject {
            Subject::Host { .. } => {}
            _ => valid.push((fingerprint, record.subject)),
        })?;
        let existing = cluster.all_pods()?;
        let mut gone = Vec::new();
        for (fingerprint, subject) in valid {
            let (Subject::Pod { namespace, name, uid, .. }
            | Subject::Lighthouse { namespace, name, uid }
            | Subject::Gateway { namespace, name, uid, .. }) = &subject
            else {
                continue;
            };
            if existing.contains(&(namespace.clone(), name.clone(), uid.clone())) {
                continue;
            }
            // Lists may be stale; the object itself is not.
            if cluster.pod(namespace, name)?.is_none_or(|pod| !pod.is(uid)) {
                self.store.run(|store| store.revoke(&[fingerprint], now))?;
                gone.push(GivenBack { subject: subject.to_string(), fingerprints: vec![fingerprint] });
            }
        }
        Ok(gone)
    }
}
