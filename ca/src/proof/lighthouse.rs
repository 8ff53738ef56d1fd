//! The lighthouse proof: a pod of the lighthouses' StatefulSet proves its identity with its own service-account
//! token. The API server confirms it, and says where the pod is.

use std::net::IpAddr;

use nebula_cert::UnixTime;

use crate::{
    cluster::Cluster,
    pod::KubernetesPolicy,
    policy::LighthousePolicy,
    proof::{bound_pod_of, host_network_pod, review},
    refusal::Refusal,
};

/// A lighthouse as the API server shows it.
#[derive(Debug, Clone)]
pub(crate) struct LighthousePod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) ordinal: u32,
    pub(crate) node: String,
    /// Underlay addresses: those of its node. At least one.
    pub(crate) addresses: Vec<IpAddr>,
}

/// Checks a lighthouse's proof: its token is bound to it, for this service, and of the lighthouses' account.
pub(crate) fn identify(
    cluster: &dyn Cluster,
    settings: &KubernetesPolicy,
    policy: &LighthousePolicy,
    token: &str,
    now: UnixTime,
) -> Result<LighthousePod, Refusal> {
    let user = review(cluster, &settings.audience, token, now)?;
    let (namespace, name, uid) = bound_pod_of(&user, "lighthouse", &policy.account)?;
    confirm(cluster, policy, namespace, name, uid)
}

/// What the API server shows for the lighthouse with this name and UID, if it still is one.
pub(crate) fn confirm(
    cluster: &dyn Cluster,
    policy: &LighthousePolicy,
    namespace: &str,
    name: &str,
    uid: &str,
) -> Result<LighthousePod, Refusal> {
    let shown = format!("{namespace}/{name}");
    let found = host_network_pod(cluster, &policy.account, namespace, name, uid)?;
    let ordinal = found.metadata.ordinal().ok_or_else(|| Refusal::NotInStatefulSet(shown.clone()))?;
    let addresses = found.node_addresses();
    if addresses.is_empty() {
        return Err(Refusal::AddressUnknown(shown));
    }
    let (namespace, name, uid) = (namespace.to_owned(), name.to_owned(), uid.to_owned());
    Ok(LighthousePod { namespace, name, uid, ordinal, node: found.spec.node_name, addresses })
}
