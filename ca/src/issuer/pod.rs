//! Certificates of pods: what a pod may get, and the certificate that follows from it.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::{Certificate, UnixTime};

use super::{
    Issued, Issuer, Rules,
    signature::{Recorded, is_for_key},
};
use crate::{
    address::Subject,
    authority::Grant,
    pod::{PodAddresses, PodFacts},
    policy::{PodPolicy, Provisional},
    proof,
    refusal::Refusal,
};

/// Why a pod gets a certificate.
#[derive(Clone, Copy)]
pub(super) enum Occasion<'a> {
    First,
    /// Only with the name and networks of the present certificate.
    Renewal(&'a Certificate),
    /// Until the pod shows its own proof.
    Provisional,
}

/// A certificate that the policy gives to a pod, still without its overlay addresses.
pub(super) struct Draft<'a> {
    pub(super) policy: &'a PodPolicy,
    pub(super) pod: &'a PodFacts,
    occasion: Occasion<'a>,
    provisional: Option<&'a Provisional>,
    public_key: Vec<u8>,
    /// Addresses on the primary network that count.
    pub(super) addresses: PodAddresses,
    pub(super) subject: Subject,
    name: String,
    /// The name for which its addresses are kept, and for how many seconds after the certificate.
    pub(super) kept: Option<(String, i64)>,
}

impl Issuer {
    pub(super) fn issue_for_pod(
        &self,
        rules: &Rules,
        pod: &PodFacts,
        occasion: Occasion<'_>,
        public_key: &str,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let draft = self.draft(rules, pod, occasion, public_key)?;
        // Not earlier: a caller that combines its own pod with the UID of another one would use up the other's limit. A
        // repeated answer costs the ledger nothing.
        let may_repeat = self.newest(&pod.uid)?.is_some_and(|(_, record)| is_for_key(&record, &draft.public_key));
        if !may_repeat {
            self.check_quota(pod, now)?;
        }
        let networks = self.networks(rules, &draft, now)?;
        self.check_free(rules, &draft, &networks, now)?;
        let provisional = draft.provisional.is_some();
        let grant = draft.grant(networks)?;
        if may_repeat {
            if let Some((fingerprint, record)) =
                self.issued_for(&pod.uid, &draft.public_key, &grant, provisional, now)?
            {
                return self.answer(record, fingerprint, true, now);
            }
            self.check_quota(pod, now)?;
        }
        let Draft { subject, public_key, kept, .. } = draft;
        let recorded = Recorded { subject: &subject, pod: Some(pod), token: None, provisional, kept };
        self.sign_and_record(rules, &grant, recorded, public_key, now)
    }

    /// Checks the pod against the policy and what the ledger knows about it.
    fn draft<'a>(
        &self,
        rules: &'a Rules,
        pod: &'a PodFacts,
        occasion: Occasion<'a>,
        public_key: &str,
    ) -> Result<Draft<'a>, Refusal> {
        let policy = rules.policy.pods.as_ref().ok_or(Refusal::PodsDisabled)?;
        let public_key = rules.read_public_key(public_key)?;
        let provisional = match occasion {
            Occasion::Provisional => Some(policy.provisional.as_ref().ok_or(Refusal::ProvisionalDisabled)?),
            Occasion::First | Occasion::Renewal(_) => None,
        };
        if !matches!(occasion, Occasion::Renewal(_)) {
            policy.check_namespace(pod)?;
        }
        policy.check_pod(pod)?;
        policy.check_pod_address(pod.address)?;
        let addresses = PodAddresses { first: pod.address, other: policy.other_address(pod)? };
        self.check_known(pod)?;
        let subject = Subject::Pod {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            address: addresses.first,
            other_address: addresses.other,
            node: pod.node.clone(),
            service_account: pod.confirmed.as_ref().map(|confirmed| confirmed.service_account.clone()),
        };
        let name = policy.name(pod)?;
        let kept = policy.stable.and_then(|seconds| Some((pod.kept_name()?, seconds)));
        Ok(Draft { policy, pod, occasion, provisional, public_key, addresses, subject, name, kept })
    }

    /// Refuses a pod that an operator keeps out, and one whose UID is another pod's.
    fn check_known(&self, pod: &PodFacts) -> Result<(), Refusal> {
        // A name stays with its UID for good. The address may change: a recreated sandbox keeps the UID but not the
        // address.
        if let Some(known) = self.store.run(|store| store.pod(&pod.uid))?
            && (known.namespace != pod.namespace || known.name != pod.name)
        {
            let known = format!("{}/{}", known.namespace, known.name);
            return Err(Refusal::PodUidConflict { uid: pod.uid.clone(), known });
        }
        match self.store.run(|store| store.kept_out(&pod.uid))? {
            Some(_) => Err(Refusal::KeptOut { pod: pod.shown(), uid: pod.uid.clone() }),
            None => Ok(()),
        }
    }

    /// Keeps one pod or one node from filling the ledger.
    fn check_quota(&self, pod: &PodFacts, now: UnixTime) -> Result<(), Refusal> {
        let node = pod.confirmed.as_ref().map(|confirmed| confirmed.node.as_str());
        self.quotas().take(&pod.uid, &pod.shown(), node, now)
    }
}

impl Draft<'_> {
    /// The contents of the certificate with these networks.
    fn grant(&self, networks: Vec<IpNet>) -> Result<Grant, Refusal> {
        let Self { policy, pod, .. } = self;
        if let Occasion::Renewal(present) = self.occasion
            && (present.name() != self.name || present.networks() != networks)
        {
            return Err(Refusal::RenewalDiffers);
        }
        let (name, life) = (self.name.clone(), policy.life(pod));
        Ok(match self.provisional {
            None => {
                let (groups, unsafe_networks) = (policy.groups(pod), policy.unsafe_networks(pod));
                Grant { name, networks, unsafe_networks, groups, life }
            }
            Some(provisional) => {
                let (groups, life) = (provisional.groups(pod), life.min(provisional.life));
                Grant { name, networks, unsafe_networks: Vec::new(), groups, life }
            }
        })
    }
}

/// The pod that proves its own identity.
pub(super) fn identified(
    rules: &Rules,
    token: &str,
    address: IpAddr,
    other_address: Option<IpAddr>,
    now: UnixTime,
) -> Result<PodFacts, Refusal> {
    let (cluster, settings) = rules.kubernetes().ok_or(Refusal::PodProofDisabled)?;
    proof::pod::identify(cluster, settings, token, (address, other_address), now)
}
