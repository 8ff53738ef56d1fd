//! Commands about certificates: list, revoke, keep out and readmit.

use nebula_cert::{Fingerprint, UnixTime};

use super::{CommandError, CommandOutcome, ListedCertificate, ListedPod, Operator};
use crate::{
    address::Subject,
    audit::Event,
    revocation,
    store::{IssuedRecord, KeptOut, StoreError},
};

impl Operator<'_> {
    pub(super) fn list_issued(&self) -> Result<CommandOutcome, CommandError> {
        let mut issued = self.store.all_issued()?;
        issued.sort_by(|(_, a), (_, b)| (a.issued, &a.name).cmp(&(b.issued, &b.name)));
        let listed = |(fingerprint, issued): (Fingerprint, _)| ListedCertificate {
            fingerprint: fingerprint.to_string(),
            issued,
        };
        Ok(CommandOutcome::Issued { certificates: issued.into_iter().map(listed).collect() })
    }

    pub(super) fn revoke(&self, which: &str, keep_out: bool, now: UnixTime) -> Result<CommandOutcome, CommandError> {
        let (fingerprints, is_foreign) = match which.parse::<Fingerprint>() {
            Ok(fingerprint) => (vec![fingerprint], self.store.issued(&fingerprint)?.is_none()),
            Err(_) => {
                let meant = revocation::find(self.store, |issued| is_called(issued, which), now)?;
                (meant.into_iter().map(|(fingerprint, _)| fingerprint).collect(), false)
            }
        };
        if fingerprints.is_empty() {
            return Err(CommandError::NoCertificate(which.to_owned()));
        }
        if !revocation::has_room(self.store, fingerprints.len(), now)? {
            return Err(CommandError::BlocklistFull);
        }
        let kept_out = if keep_out { self.keep_out(&fingerprints, now)? } else { Vec::new() };
        self.store.revoke(&fingerprints, now)?;
        let ends = self.last_second(&fingerprints)?;
        let fingerprints: Vec<String> = fingerprints.iter().map(ToString::to_string).collect();
        for fingerprint in &fingerprints {
            self.write_audit(Event { event: "revoked", fingerprint: Some(fingerprint), ..Event::default() }, now);
        }
        Ok(CommandOutcome::Revoked { fingerprints, is_foreign, kept_out, ends, unaware: None })
    }

    /// When the last of these certificates ends; `None` if one is unknown.
    pub(super) fn last_second(&self, fingerprints: &[Fingerprint]) -> Result<Option<UnixTime>, StoreError> {
        let mut last = None;
        for fingerprint in fingerprints {
            let Some(issued) = self.store.issued(fingerprint)? else { return Ok(None) };
            last = last.max(Some(issued.not_after));
        }
        Ok(last)
    }

    /// Keeps out the pods that these certificates belong to.
    pub(super) fn keep_out(&self, fingerprints: &[Fingerprint], now: UnixTime) -> Result<Vec<ListedPod>, CommandError> {
        let mut subjects = Vec::new();
        for fingerprint in fingerprints {
            subjects.push(self.store.issued(fingerprint)?.ok_or(CommandError::NotAPod)?.subject);
        }
        let pods = revocation::pods_of(&subjects).ok_or(CommandError::NotAPod)?;
        revocation::keep_out(self.store, &pods, now)?;
        for ListedPod { namespace, name, .. } in &pods {
            self.write_audit(
                Event { event: "kept_out", name: Some(&format!("{namespace}/{name}")), ..Event::default() },
                now,
            );
        }
        Ok(pods)
    }

    pub(super) fn readmit(&self, which: &str, now: UnixTime) -> Result<CommandOutcome, CommandError> {
        let listed = |(uid, pod): (String, KeptOut)| ListedPod { namespace: pod.namespace, name: pod.name, uid };
        let mut pods: Vec<_> = self.store.all_kept_out()?.into_iter().map(listed).collect();
        let mut of_certificates = Vec::new();
        let mut note = |issued: &IssuedRecord| {
            if let Subject::Pod { uid, .. } = &issued.subject {
                of_certificates.push(uid.clone());
            }
        };
        match which.parse::<Fingerprint>() {
            Ok(fingerprint) => self.store.issued(&fingerprint)?.iter().for_each(&mut note),
            Err(_) => {
                let visit = &mut |_, issued: IssuedRecord| {
                    if issued.name == which {
                        note(&issued)
                    }
                };
                self.store.each_issued(visit)?;
            }
        }
        pods.retain(|pod| which == pod.name || is_pod(which, pod) || of_certificates.contains(&pod.uid));
        if pods.is_empty() {
            return Err(CommandError::NotKeptOut(which.to_owned()));
        }
        for ListedPod { namespace, name, uid } in &pods {
            self.store.readmit(uid)?;
            self.write_audit(
                Event { event: "readmitted", name: Some(&format!("{namespace}/{name}")), ..Event::default() },
                now,
            );
        }
        Ok(CommandOutcome::Readmitted { pods })
    }
}

/// Whether an administrator means this pod: by its UID, or as NAMESPACE/NAME.
fn is_pod(which: &str, pod: &ListedPod) -> bool {
    which == pod.uid || which.split_once('/') == Some((pod.namespace.as_str(), pod.name.as_str()))
}

/// Whether an administrator means this certificate: by its name, or by its pod.
fn is_called(issued: &IssuedRecord, which: &str) -> bool {
    let is_of_pod = match &issued.subject {
        Subject::Pod { namespace, name, uid, .. } => {
            is_pod(which, &ListedPod { namespace: namespace.clone(), name: name.clone(), uid: uid.clone() })
        }
        Subject::Host { .. } | Subject::Lighthouse { .. } | Subject::Gateway { .. } => false,
    };
    is_of_pod || issued.name == which
}
