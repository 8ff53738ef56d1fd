//! The pod proof: a pod proves its identity with its own service-account token, and the API server confirms it.

use std::net::IpAddr;

use nebula_cert::{UnixTime, issuance::Pod};

use crate::{
    cluster::Cluster,
    pod::KubernetesPolicy,
    pod::PodFacts,
    proof::{node::check_pod, review},
    refusal::Refusal,
};

/// Checks a pod's proof: its token is bound to it and for this service, and the pod exists with that UID, service
/// account and address.
pub(crate) fn identify(
    cluster: &dyn Cluster,
    settings: &KubernetesPolicy,
    token: &str,
    (address, other_address): (IpAddr, Option<IpAddr>),
    now: UnixTime,
) -> Result<PodFacts, Refusal> {
    let user = review(cluster, &settings.audience, token, now)?;
    let (namespace, account) = user.service_account().ok_or_else(|| Refusal::NotAServiceAccount(user.shown()))?;
    let (name, uid) = user.bound_pod().ok_or(Refusal::TokenNotBound)?;
    let pod =
        Pod { namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.to_owned(), address, other_address };
    check_pod(&pod)?;
    let shown = || format!("{namespace}/{name}");
    let found = cluster.pod(namespace, name)?.ok_or_else(|| Refusal::PodNotFound(shown()))?;
    if found.metadata.uid != uid {
        return Err(Refusal::PodUidMismatch { pod: shown(), uid: pod.uid });
    }
    if found.spec.service_account_name != account {
        return Err(Refusal::ServiceAccountMismatch { pod: shown(), account: account.to_owned() });
    }
    // Here only the pod itself claims the address, so its node must have reported it first.
    if found.addresses().is_empty() {
        return Err(Refusal::AddressUnknown(shown()));
    }
    PodFacts::checked(&pod, found, cluster, settings)
}
