//! What this node knows of a flow. Who may see the pods of one namespace learns nothing of others by it.

use std::collections::BTreeSet;

use nebula_cni_contract::agent_api::WhyFacts;
use nebula_cni_contract::why::{Asked as To, Question, Target};

use super::denied::Denied;
use super::routes::{Permit, Shared};
use crate::why::of_node;

/// The permission for the namespace of the source has been looked at. Without that for the destination's, the
/// destination is left out.
pub(super) async fn answer(shared: &Shared, permit: &Permit, question: Question) -> Result<WhyFacts, Denied> {
    let api = &shared.api;
    let (facts, is_by_name) = {
        let _place = api.working.acquire().await.map_err(|_| Denied::Working)?;
        let (host, name, client) = (api.node.config.host_root.clone(), api.name.clone(), api.client.clone());
        let is_by_name = matches!(question.target, To::Name { .. });
        let runtime = tokio::runtime::Handle::current();
        let asked = tokio::task::spawn_blocking(move || of_node(&runtime, Ok(client), (&host, &name), &question)).await;
        let asked = asked.map_err(|_| Denied::Failed("the agent failed to look at the flow".to_owned()))?;
        (asked.map_err(|error| Denied::Failed(error.to_string()))?.0, is_by_name)
    };
    let (mut facts, mut shown) =
        (facts, BTreeSet::from([String::new(), permit.asked.namespace.clone().unwrap_or_default()]));
    let namespaces = match &facts.target {
        Target::Pod(pod) => vec![pod.namespace.clone()],
        Target::Nothing { namespace, .. } => vec![namespace.clone()],
        Target::Service(service) => [&service.namespace]
            .into_iter()
            .chain(service.endpoint.as_ref().map(|pod| &pod.namespace))
            .cloned()
            .collect(),
        Target::Unknown | Target::Address(_) | Target::Hidden => Vec::new(),
    };
    let mut lacking = None;
    for namespace in namespaces {
        if shown.contains(&namespace) {
            continue;
        }
        match shared.may_also(permit, namespace.clone()).await {
            Ok(()) => drop(shown.insert(namespace)),
            Err(Denied::Forbidden(permission)) => lacking = Some(permission),
            Err(other) => return Err(other),
        }
    }
    facts.hide(is_by_name, |namespace| shown.contains(namespace));
    Ok(WhyFacts { facts, lacking })
}
