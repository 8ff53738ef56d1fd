//! Lighthouses of a StatefulSet: certificates by ordinal, and where each one is reached.

use std::net::SocketAddr;

use nebula_cert::{
    Certificate, UnixTime,
    issuance::{Lighthouses, Request},
};

use super::{
    Issued, Issuer, Rules,
    signature::{Recorded, check_renewal},
};
use crate::{
    address::Subject,
    authority::Grant,
    policy::LighthousePolicy,
    proof::lighthouse::{self, LighthousePod},
    refusal::Refusal,
    store::{IssuedRecord, LighthouseRecord},
};

impl Issuer {
    /// The certificate of a lighthouse that proves its identity with its token.
    pub(super) fn issue_for_lighthouse(
        &self,
        rules: &Rules,
        token: &str,
        port: Option<u16>,
        request: &Request,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let (cluster, settings) = rules.kubernetes().ok_or(Refusal::PodProofDisabled)?;
        let policy = rules.lighthouses()?;
        let pod = lighthouse::identify(cluster, settings, policy, token, now)?;
        let grant = grant(policy, &pod)?;
        self.enlist(rules, pod, grant, port, &request.public_key, now)
    }

    /// The next certificate of the lighthouse that holds `present`, with the same name and address.
    pub(super) fn renew_lighthouse(
        &self,
        rules: &Rules,
        present: &Certificate,
        record: &IssuedRecord,
        public_key: &str,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let (cluster, _) = rules.kubernetes().ok_or(Refusal::PodProofDisabled)?;
        let policy = rules.lighthouses()?;
        let Subject::Lighthouse { namespace, name, uid } = &record.subject else { return Err(Refusal::RenewalDiffers) };
        let pod = lighthouse::confirm(cluster, policy, namespace, name, uid)?;
        let grant = grant(policy, &pod)?;
        check_renewal(present, &grant)?;
        let known = self.store.run(|store| store.lighthouses())?;
        let port = known.iter().find(|known| known.uid == pod.uid).map(|known| known.port);
        self.enlist(rules, pod, grant, port, public_key, now)
    }

    /// Signs, and notes where the lighthouse is.
    fn enlist(
        &self,
        rules: &Rules,
        pod: LighthousePod,
        grant: Grant,
        port: Option<u16>,
        public_key: &str,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let public_key = rules.read_public_key(public_key)?;
        let Some(network) = grant.networks.first() else { return Err(Refusal::Internal) };
        let port = port.unwrap_or(rules.lighthouses()?.port.get());
        let lighthouse = LighthouseRecord {
            address: network.addr(),
            endpoints: endpoints(&pod, port),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            node: pod.node,
            port,
            gone: None,
        };
        let repeat = self.issued_for(&pod.uid, &public_key, &grant, false, now)?;
        let subject = Subject::Lighthouse { namespace: pod.namespace, name: pod.name, uid: pod.uid };
        let (record, fingerprint, displaced) = match repeat {
            Some((fingerprint, record)) => (record, fingerprint, None),
            None => {
                let shown = format!("{}/{}", lighthouse.namespace, lighthouse.name);
                self.quotas().take(&lighthouse.uid, &shown, Some(&lighthouse.node), now)?;
                let recorded = Recorded { subject: &subject, pod: None, token: None, provisional: false, kept: None };
                let (record, fingerprint, displaced) = self.record(rules, &grant, recorded, public_key, now)?;
                (record, fingerprint, Some(displaced))
            }
        };
        // After the certificate, which is refused if somebody else has the address. The answer names the lighthouse.
        self.store.run(|store| store.put_lighthouse(&lighthouse))?;
        let issued = self.answer(record, fingerprint, displaced.is_none(), now)?;
        Ok(Issued { displaced: displaced.unwrap_or_default(), ..issued })
    }

    /// Looks where the lighthouses are, and forgets those that are gone for long. Returns whether anything changed.
    pub(crate) fn follow_lighthouses(&self, now: UnixTime) -> Result<bool, Refusal> {
        let rules = self.rules();
        let (Some((cluster, _)), Some(policy)) = (rules.kubernetes(), &rules.policy.lighthouses) else {
            return Ok(false);
        };
        let mut has_changed = false;
        for known in self.store.run(|store| store.lighthouses())? {
            let next = match lighthouse::confirm(cluster, policy, &known.namespace, &known.name, &known.uid) {
                Ok(pod) => Some(LighthouseRecord {
                    endpoints: endpoints(&pod, known.port),
                    node: pod.node,
                    gone: None,
                    ..known.clone()
                }),
                Err(unknown @ Refusal::ClusterUnavailable(_)) => return Err(unknown),
                // Its node has not reported yet, or not again.
                Err(Refusal::AddressUnknown(_)) => Some(known.clone()),
                Err(_) => {
                    let since = known.gone.unwrap_or(now);
                    let is_over = now.saturating_sub(since) > GONE_FOR;
                    (!is_over).then(|| LighthouseRecord { gone: Some(since), ..known.clone() })
                }
            };
            if next.as_ref() != Some(&known) {
                // It may have enrolled again at this moment, which counts more.
                has_changed |= self.store.run(|store| store.change_lighthouse(&known, next.as_ref()))?;
            }
        }
        Ok(has_changed)
    }

    /// All lighthouses that hosts and pods are told of: those of the policy, and those of the StatefulSet.
    pub(super) fn lighthouses(&self, rules: &Rules) -> Result<Lighthouses, Refusal> {
        let mut all = rules.policy.hosts.lighthouses.clone();
        if let Some(policy) = &rules.policy.lighthouses {
            let known = self.store.run(|store| store.lighthouses())?;
            for lighthouse in known.into_iter().filter(|lighthouse| policy.has(lighthouse.address)) {
                all.entry(lighthouse.address).or_insert(lighthouse.endpoints);
            }
        }
        Ok(all)
    }
}

fn grant(policy: &LighthousePolicy, pod: &LighthousePod) -> Result<Grant, Refusal> {
    let network = policy.network(pod.ordinal).ok_or(Refusal::NoLighthouseAddress(pod.ordinal))?;
    Ok(Grant {
        name: policy.name(pod.ordinal),
        networks: vec![network],
        unsafe_networks: Vec::new(),
        groups: policy.groups.clone(),
        life: policy.life,
    })
}

fn endpoints(pod: &LighthousePod, port: u16) -> Vec<String> {
    pod.addresses.iter().take(MAX_ENDPOINTS).map(|address| SocketAddr::new(*address, port).to_string()).collect()
}

/// A node has one address of each family.
const MAX_ENDPOINTS: usize = 8;
/// Seconds. A pod that is recreated, on another node if need be, is there again within minutes; until then peers try
/// where it was.
const GONE_FOR: i64 = 600;
