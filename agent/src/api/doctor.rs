//! What is wrong: findings about the node and its pods.

use nebula_cni_contract::agent_api::{Finding, Findings};
use nebula_cni_contract::clock::{Clock, SystemClock};

use super::answers::{instances, name, upgrade};
use super::denied::Denied;
use super::review::Asked;
use super::routes::{Pairs, Permit, Shared, checked};
use crate::doctor::{of_node, of_pods};
use crate::reconcile::plan::Stand;
use crate::status::parts;

/// What is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scope {
    /// Only pods of this namespace. `None`: all pods, and the node.
    pub(super) namespace: Option<String>,
    /// Only this pod of the namespace.
    pod: Option<String>,
}

impl Scope {
    pub(super) fn of(pairs: &Pairs<'_>) -> Result<Self, Denied> {
        let name = |name: &'static str| {
            let value = pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone().into_owned());
            value.map(|value| checked(name, value)).transpose()
        };
        let scope = Self { namespace: name("namespace")?, pod: name("pod")? };
        if scope.pod.is_some() && scope.namespace.is_none() { Err(Denied::Parameter("pod")) } else { Ok(scope) }
    }

    fn has(&self, pod: &str) -> bool {
        let Some(namespace) = &self.namespace else { return true };
        let Some((of, name)) = pod.split_once('/') else { return false };
        of == namespace && self.pod.as_ref().is_none_or(|pod| name == pod)
    }
}

/// `permit` is for the pods. What is wrong with the node itself, and with upgrades, needs that for nodes as well.
pub(super) async fn findings(shared: &Shared, permit: &Permit, scope: &Scope) -> Result<Findings, Denied> {
    let api = &shared.api;
    if scope.namespace.is_none() {
        let asked = Asked { verb: "get", resource: "nodes", namespace: None };
        api.reviewer.permit(&permit.token, &asked, shared.source).await?;
    }
    let mut pods = instances(api, scope.namespace.as_deref()).await?;
    pods.retain(|pod| scope.has(&pod.pod));
    let seen = (api.pods)();
    let stands: Vec<&Stand> = seen.iter().map(|(stand, _)| stand).filter(|stand| scope.has(&name(stand))).collect();
    let mut found: Vec<Finding> =
        of_pods(stands.iter().copied(), &pods, api.node.config.unprotected, SystemClock.unix_seconds());
    if scope.namespace.is_none() {
        found.extend(of_node(&parts(&api.node.readiness.now()), &upgrade(api)));
    }
    // Pods that are not enrolled have nothing that could be wrong.
    let enrolled = stands.iter().filter(|stand| !stand.protection.is_outside()).map(|stand| name(stand));
    let looked_at: std::collections::BTreeSet<String> = enrolled.chain(pods.into_iter().map(|pod| pod.pod)).collect();
    Ok(Findings::sorted(found, looked_at.len()))
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;

    #[test]
    fn a_scope_is_a_namespace_or_one_pod_of_it_or_everything() {
        let scope = |pairs: &[(&'static str, &'static str)]| {
            Scope::of(&pairs.iter().map(|(key, value)| (Cow::Borrowed(*key), Cow::Borrowed(*value))).collect())
        };
        assert!(scope(&[]).unwrap().has("shop/web") && scope(&[]).unwrap().has("d-eth0"));
        let of_shop = scope(&[("namespace", "shop")]).unwrap();
        assert_eq!(
            ["shop/web", "pay/web", "shop", "shop-2/x"].map(|pod| of_shop.has(pod)),
            [true, false, false, false]
        );
        let one = scope(&[("namespace", "shop"), ("pod", "web")]).unwrap();
        assert_eq!(["shop/web", "shop/web-0", "pay/web"].map(|pod| one.has(pod)), [true, false, false]);
        for bad in [&[("pod", "web")][..], &[("namespace", "")], &[("namespace", "shop"), ("pod", "../x")]] {
            assert!(matches!(scope(bad), Err(Denied::Parameter(_))), "{bad:?}");
        }
    }
}
