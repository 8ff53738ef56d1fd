//! Renewals: who holds a certificate gets the next one, with the same name and addresses.

use std::net::IpAddr;

use nebula_cert::{Certificate, UnixTime, issuance::Pod};

use super::{Issued, Issuer, Rules, node::node_at, pod::Occasion, signature::Recorded};
use crate::{
    address::Subject, authority::Grant, pod::PodFacts, policy::MAX_RENEWAL_GRACE, proof::certificate::Presented,
    refusal::Refusal, store::IssuedRecord,
};

impl Issuer {
    /// The certificate that a caller proved to hold, with its record in the ledger.
    pub(super) fn held(
        &self,
        rules: &Rules,
        presented: &Presented<'_>,
        now: UnixTime,
    ) -> Result<(Certificate, IssuedRecord), Refusal> {
        // Whoever has the key of an expired certificate learns why it is too late.
        let certificate = self.renewal_key.check(presented, &rules.trusted()?, MAX_RENEWAL_GRACE, now)?;
        let late = now.saturating_sub(certificate.not_after());
        match self.issued(&certificate.fingerprint())? {
            None => Err(Refusal::UnknownCertificate),
            Some(record) if record.revoked.is_some() => Err(Refusal::CertificateRevoked),
            Some(record) if late <= 0 => Ok((certificate, record)),
            Some(record) => match record.subject {
                Subject::Host { .. } if late <= rules.policy.hosts.renewal_grace => Ok((certificate, record)),
                Subject::Host { .. } => Err(Refusal::RenewalTooLate(nebula_cert::rfc3339(certificate.not_after()))),
                // They have another proof.
                Subject::Pod { .. } | Subject::Lighthouse { .. } | Subject::Gateway { .. } => {
                    Err(Refusal::CertificateExpired(nebula_cert::rfc3339(certificate.not_after())))
                }
            },
        }
    }

    /// The next certificate for the holder of the present one, with the same name and addresses.
    pub(super) fn renew(
        &self,
        rules: &Rules,
        present: &Certificate,
        record: IssuedRecord,
        public_key: &str,
        source: IpAddr,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        // Otherwise the node's word alone would count as much as the pod's own proof.
        if record.provisional {
            return Err(Refusal::ProvisionalCertificate);
        }
        match record.subject {
            Subject::Lighthouse { .. } => self.renew_lighthouse(rules, present, &record, public_key, now),
            Subject::Gateway { .. } => self.renew_gateway(rules, present, &record, public_key, now),
            Subject::Host { .. } => {
                let public_key = rules.read_public_key(public_key)?;
                let grant = Grant {
                    name: record.name,
                    networks: record.networks,
                    unsafe_networks: present.unsafe_networks().to_vec(),
                    groups: record.groups,
                    life: (record.not_after - record.issued).clamp(1, rules.policy.hosts.longest_life),
                };
                let kept = rules.kept_for_host(&record.subject);
                let recorded = Recorded { subject: &record.subject, pod: None, token: None, provisional: false, kept };
                self.sign_and_record(rules, &grant, recorded, public_key, now)
            }
            Subject::Pod { namespace, name, uid, address, other_address, .. } => {
                let pod = Pod { namespace, name, uid, address, other_address };
                let facts = match rules.kubernetes() {
                    None => PodFacts { node: Some(node_at(source)), ..PodFacts::described(&pod) },
                    Some((cluster, settings)) => match cluster.pod(&pod.namespace, &pod.name)? {
                        Some(found) if found.is(&pod.uid) => PodFacts::checked(&pod, found, cluster, settings)?,
                        _ => return Err(Refusal::PodGone(format!("{}/{}", pod.namespace, pod.name))),
                    },
                };
                self.issue_for_pod(rules, &facts, Occasion::Renewal(present), public_key, now)
            }
        }
    }
}
