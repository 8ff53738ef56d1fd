//! Signs a certificate and records it in the ledger, or repeats one that is recorded already.

use std::net::IpAddr;

use nebula_cert::{Certificate, Fingerprint, UnixTime, issuance::Reply};

use super::{Issued, Issuer, Rules};
use crate::{
    address::{AddressMode, Kept, Subject},
    authority::Grant,
    pod::PodFacts,
    proof::token::TokenHash,
    refusal::Refusal,
    store::{Displaced, Issue, IssuedRecord, RecordError},
};

/// What the ledger records about a certificate besides its contents.
pub(super) struct Recorded<'a> {
    pub(super) subject: &'a Subject,
    /// The pod that the subject is, if it is one.
    pub(super) pod: Option<&'a PodFacts>,
    pub(super) token: Option<(&'a TokenHash, &'a str)>,
    pub(super) provisional: bool,
    /// The name for which its address is kept, and for how many seconds after the certificate.
    pub(super) kept: Option<(String, i64)>,
}

impl Issuer {
    /// The newest certificate of the pod, if it is what would be issued for the same key now and has half of its life
    /// left: a caller that lost the answer gets it again.
    pub(super) fn issued_for(
        &self,
        uid: &str,
        public_key: &[u8],
        grant: &Grant,
        provisional: bool,
        now: UnixTime,
    ) -> Result<Option<(Fingerprint, IssuedRecord)>, Refusal> {
        let is_same = |record: &IssuedRecord| {
            let left = record.not_after - now;
            let is_fresh = left > 0 && left <= grant.life && 2 * left >= record.not_after - record.issued;
            is_fresh
                && record.revoked.is_none()
                && record.provisional == provisional
                && record.name == grant.name
                && record.networks == grant.networks
                && record.groups == grant.groups
                && is_for_key(record, public_key)
                && Certificate::from_pem(record.pem.as_bytes())
                    .is_ok_and(|certificate| certificate.unsafe_networks() == grant.unsafe_networks)
        };
        Ok(self.newest(uid)?.filter(|(_, record)| is_same(record)))
    }

    pub(super) fn sign_and_record(
        &self,
        rules: &Rules,
        grant: &Grant,
        recorded: Recorded<'_>,
        public_key: Vec<u8>,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let (record, fingerprint, displaced) = self.record(rules, grant, recorded, public_key, now)?;
        let issued = self.answer(record, fingerprint, false, now)?;
        Ok(Issued { displaced, ..issued })
    }

    /// Signs a certificate, which is handed out only after the ledger has it, bound to its token: if the process dies
    /// in between, the signature is lost, and the token is unchanged.
    pub(super) fn record(
        &self,
        rules: &Rules,
        grant: &Grant,
        recorded: Recorded<'_>,
        public_key: Vec<u8>,
        now: UnixTime,
    ) -> Result<(IssuedRecord, Fingerprint, Vec<Displaced>), Refusal> {
        let certificate = rules.authority.sign(grant, public_key, now)?;
        let mode = rules.policy.pods.as_ref().map_or(AddressMode::Derive, |pods| pods.address);
        let Recorded { subject, pod, token, provisional, kept } = recorded;
        let kept = kept.map(|(name, seconds)| Kept { name, until: certificate.not_after().saturating_add(seconds) });
        let mut gone = Vec::new();
        let displaced = loop {
            let kept = kept.as_ref();
            let issue = Issue { certificate: &certificate, subject, token, mode, gone: &gone, provisional, kept };
            match self.store.record(&issue, now) {
                Ok(displaced) => break displaced,
                Err(RecordError::TokenUsed) => return Err(Refusal::TokenUsed),
                Err(RecordError::TokenGone) => return Err(Refusal::UnknownToken),
                Err(RecordError::Store(error)) => return Err(self.store.failed(&error)),
                Err(RecordError::AddressHeld { address, holder, is_silent }) => {
                    let conflict = Refusal::AddressConflict { address, holder: holder.to_string() };
                    let (Some(pod), Subject::Pod { uid, .. }) = (pod, &*holder) else { return Err(conflict) };
                    // The holder may be another one each time: bound the number of look-ups.
                    let may_look = gone.len() < MAX_LOOKUPS && !gone.contains(uid);
                    if !(may_look
                        && subject.has_address_of(&holder, mode)
                        && has_left(rules, &holder, address, is_silent, pod)?)
                    {
                        return Err(conflict);
                    }
                    gone.push(uid.clone());
                }
            }
        };
        let fingerprint = certificate.fingerprint();
        let record = self.issued(&fingerprint)?.ok_or(Refusal::Internal)?;
        Ok((record, fingerprint, displaced))
    }

    /// The answer given before, if it is still valid.
    pub(super) fn repeat(&self, fingerprint: &str, now: UnixTime) -> Result<Option<Issued>, Refusal> {
        let Ok(fingerprint) = fingerprint.parse::<Fingerprint>() else { return Ok(None) };
        match self.issued(&fingerprint)? {
            Some(record) if record.revoked.is_some() => Err(Refusal::CertificateRevoked),
            Some(record) if record.not_after >= now => self.answer(record, fingerprint, true, now).map(Some),
            _ => Ok(None),
        }
    }

    pub(super) fn answer(
        &self,
        record: IssuedRecord,
        fingerprint: Fingerprint,
        is_repeat: bool,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let trust = self.trust(now)?.body;
        let reply = Reply {
            certificate: record.pem.clone(),
            ca: trust.ca,
            blocklist: trust.blocklist,
            renewal_key: trust.renewal_key,
            lighthouses: trust.lighthouses,
        };
        Ok(Issued { reply, record, fingerprint: fingerprint.to_string(), displaced: Vec::new(), is_repeat })
    }
}

/// Refuses a renewal that would be for another name, or for other addresses.
pub(super) fn check_renewal(present: &Certificate, next: &Grant) -> Result<(), Refusal> {
    let is_same = present.name() == next.name && present.networks() == next.networks;
    if is_same { Ok(()) } else { Err(Refusal::RenewalDiffers) }
}

pub(super) fn is_for_key(record: &IssuedRecord, public_key: &[u8]) -> bool {
    Certificate::from_pem(record.pem.as_bytes()).is_ok_and(|certificate| certificate.public_key() == public_key)
}

/// Maximum number of address holders looked up for one certificate.
const MAX_LOOKUPS: usize = 4;

/// Whether the pod `holder` is shown to be gone, or no longer to have the address that `pod` wants.
///
/// With Kubernetes, the API server decides. What it leaves open, the holder's own node may settle by vouching for the
/// next pod at the address, since it reassigned that address. Without Kubernetes, only that node can, unless the
/// holder's certificates are blocked anyway.
fn has_left(rules: &Rules, holder: &Subject, wanted: IpAddr, is_silent: bool, pod: &PodFacts) -> Result<bool, Refusal> {
    let Subject::Pod { namespace, name, uid, address, other_address, node, .. } = holder else { return Ok(false) };
    let Some((cluster, _)) = rules.kubernetes() else {
        return Ok(is_silent || (pod.is_vouched_by_node && pod.node.is_some() && pod.node == *node));
    };
    let found = match cluster.pod(namespace, name)? {
        Some(found) if found.is(uid) && !found.is_over() => found,
        _ => return Ok(true),
    };
    let reported = found.addresses();
    // A pod that still has its address of the other family may have lost this one.
    let theirs = if *other_address == Some(wanted) { &wanted } else { address };
    let has_moved = !reported.is_empty() && !reported.contains(theirs) && !reported.contains(&wanted);
    let is_open = reported.is_empty() || found.is_ending();
    let is_own = pod.is_vouched_by_node && pod.node.as_ref() == Some(&found.spec.node_name);
    Ok(has_moved || (is_open && is_own))
}
