//! The settings that a reload replaces as a whole.

use std::sync::Arc;

use nebula_cert::{CaPool, public_key_from_pem};

use crate::{
    address::Subject,
    authority::Authority,
    cluster::Cluster,
    pod::KubernetesPolicy,
    policy::{GatewayPolicy, LighthousePolicy, Policy},
    refusal::Refusal,
};

/// What is decided by, and what signs.
pub(crate) struct Rules {
    pub(crate) authority: Authority,
    pub(crate) policy: Policy,
    /// Present if the policy asks for it.
    pub(crate) cluster: Option<Arc<dyn Cluster>>,
}

impl Rules {
    /// The API server and the policy for it, if pods are confirmed at all.
    pub(super) fn kubernetes(&self) -> Option<(&dyn Cluster, &KubernetesPolicy)> {
        self.cluster.as_deref().zip(self.policy.kubernetes.as_ref())
    }

    /// Namespace and name of the ConfigMap for the trust, if the policy names one.
    pub(crate) fn trust_config_map(&self) -> Option<(&str, &str)> {
        let (namespace, name) = self.policy.kubernetes.as_ref()?.trust_config_map.as_ref()?;
        Some((namespace, name))
    }

    /// The addresses of a host are kept for its name as long as it may renew its certificate.
    pub(super) fn kept_for_host(&self, host: &Subject) -> Option<(String, i64)> {
        let grace = self.policy.hosts.renewal_grace;
        (grace > 0).then(|| (host.id().into_owned(), grace))
    }

    pub(super) fn lighthouses(&self) -> Result<&LighthousePolicy, Refusal> {
        self.policy.lighthouses.as_ref().ok_or(Refusal::LighthousesDisabled)
    }

    pub(super) fn gateways(&self) -> Result<&GatewayPolicy, Refusal> {
        self.policy.gateways.as_ref().ok_or(Refusal::GatewaysDisabled)
    }

    pub(super) fn read_public_key(&self, pem: &str) -> Result<Vec<u8>, Refusal> {
        let (asked, public_key) = public_key_from_pem(pem.as_bytes()).map_err(Refusal::BadPublicKey)?;
        let ca = self.authority.certificate().curve();
        if asked == ca { Ok(public_key) } else { Err(Refusal::WrongCurve { asked, ca }) }
    }

    /// The CAs whose certificates are accepted as a proof.
    pub(super) fn trusted(&self) -> Result<CaPool, Refusal> {
        // It was parsed once already, when the CA was opened.
        CaPool::from_pem(self.authority.bundle().as_bytes()).map_err(|_| Refusal::Internal)
    }
}
