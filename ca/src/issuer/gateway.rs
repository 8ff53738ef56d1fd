//! Gateways of nodes: certificates with the node's address in its own range, and with the ranges of its pods behind
//! it.

use nebula_cert::{Certificate, UnixTime, issuance::Request};

use super::{
    Issued, Issuer, Rules,
    signature::{Recorded, check_renewal},
};
use crate::{
    address::Subject,
    authority::Grant,
    policy::GatewayPolicy,
    proof::gateway::{self, GatewayPod},
    refusal::Refusal,
    store::IssuedRecord,
};

impl Issuer {
    /// The certificate of a gateway that proves its identity with its token.
    pub(super) fn issue_for_gateway(
        &self,
        rules: &Rules,
        token: &str,
        request: &Request,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let (cluster, settings) = rules.kubernetes().ok_or(Refusal::PodProofDisabled)?;
        let policy = rules.gateways()?;
        let pod = gateway::identify(cluster, settings, policy, token, now)?;
        let grant = grant(policy, &pod)?;
        self.sign_for_gateway(rules, pod, &grant, &request.public_key, now)
    }

    /// The next certificate of the gateway that holds `present`, with the same name and addresses.
    pub(super) fn renew_gateway(
        &self,
        rules: &Rules,
        present: &Certificate,
        record: &IssuedRecord,
        public_key: &str,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let (cluster, _) = rules.kubernetes().ok_or(Refusal::PodProofDisabled)?;
        let policy = rules.gateways()?;
        let Subject::Gateway { namespace, name, uid, .. } = &record.subject else {
            return Err(Refusal::RenewalDiffers);
        };
        let pod = gateway::confirm(cluster, policy, namespace, name, uid)?;
        let grant = grant(policy, &pod)?;
        check_renewal(present, &grant)?;
        self.sign_for_gateway(rules, pod, &grant, public_key, now)
    }

    fn sign_for_gateway(
        &self,
        rules: &Rules,
        pod: GatewayPod,
        grant: &Grant,
        public_key: &str,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let public_key = rules.read_public_key(public_key)?;
        if let Some((fingerprint, record)) = self.issued_for(&pod.uid, &public_key, grant, false, now)? {
            return self.answer(record, fingerprint, true, now);
        }
        let shown = format!("{}/{}", pod.namespace, pod.name);
        self.quotas().take(&pod.uid, &shown, Some(&pod.node), now)?;
        let subject = Subject::Gateway { namespace: pod.namespace, name: pod.name, uid: pod.uid, node: pod.node };
        let recorded = Recorded { subject: &subject, pod: None, token: None, provisional: false, kept: None };
        self.sign_and_record(rules, grant, recorded, public_key, now)
    }
}

fn grant(policy: &GatewayPolicy, pod: &GatewayPod) -> Result<Grant, Refusal> {
    let (networks, unsafe_networks) = policy.networks(pod)?;
    Ok(Grant {
        name: policy.name(&pod.node)?,
        networks,
        unsafe_networks,
        groups: policy.groups.clone(),
        life: policy.life,
    })
}
