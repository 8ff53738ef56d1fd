//! The gateway proof: a pod of the gateways' DaemonSet proves its identity with its own service-account token. The
//! API server confirms it, names its node, and says which addresses that node gives to its pods.

use ipnet::IpNet;
use nebula_cert::UnixTime;

use crate::{
    cluster::Cluster,
    pod::KubernetesPolicy,
    policy::GatewayPolicy,
    proof::{bound_pod_of, host_network_pod, review},
    refusal::Refusal,
};

/// A gateway as the API server shows it.
#[derive(Debug, Clone)]
pub(crate) struct GatewayPod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) node: String,
    /// From which its node gives addresses to pods. Never empty; none is another node's.
    pub(crate) ranges: Vec<IpNet>,
}

/// Checks a gateway's proof: its token is bound to it, for this service, and of the gateways' account.
pub(crate) fn identify(
    cluster: &dyn Cluster,
    settings: &KubernetesPolicy,
    policy: &GatewayPolicy,
    token: &str,
    now: UnixTime,
) -> Result<GatewayPod, Refusal> {
    let user = review(cluster, &settings.audience, token, now)?;
    let (namespace, name, uid) = bound_pod_of(&user, "gateway", &policy.account)?;
    confirm(cluster, policy, namespace, name, uid)
}

/// What the API server shows for the gateway with this name and UID, if it still is one.
pub(crate) fn confirm(
    cluster: &dyn Cluster,
    policy: &GatewayPolicy,
    namespace: &str,
    name: &str,
    uid: &str,
) -> Result<GatewayPod, Refusal> {
    let found = host_network_pod(cluster, &policy.account, namespace, name, uid)?;
    let node = found.spec.node_name;
    let mut ranges: Vec<IpNet> = cluster.node_ranges(&node)?.iter().map(IpNet::trunc).collect();
    ranges.sort();
    ranges.dedup();
    if ranges.is_empty() {
        return Err(Refusal::NodeWithoutRange(node));
    }
    // A kubelet may choose the range of a node that has none yet.
    for range in &ranges {
        if let Some(owner) = cluster.other_owner(*range, &node)? {
            return Err(Refusal::RangeOfOtherNode { range: *range, node: owner });
        }
    }
    let (namespace, name, uid) = (namespace.to_owned(), name.to_owned(), uid.to_owned());
    Ok(GatewayPod { namespace, name, uid, node, ranges })
}
