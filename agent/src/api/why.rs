//! What this node knows of a flow. Who may see the pods of one namespace learns nothing of others by it.

use nebula_cni_contract::agent_api::WhyFacts;
use nebula_cni_contract::why::{Asked as To, Question};

use super::denied::Denied;
use super::routes::{Permit, Shared};
use super::sight::Sight;
use crate::why::of_node;

/// The permission for the namespace of the source has been looked at. Without that for the destination's, the
/// destination is left out.
pub(super) async fn answer(shared: &Shared, permit: &Permit, question: Question) -> Result<WhyFacts, Denied> {
    let api = &shared.api;
    let (mut facts, is_by_name) = {
        let _place = api.working.acquire().await.map_err(|_| Denied::Working)?;
        let (host, name, client) = (api.node.config.host_root.clone(), api.name.clone(), api.client.clone());
        let is_by_name = matches!(question.target, To::Name { .. });
        let runtime = tokio::runtime::Handle::current();
        let asked = tokio::task::spawn_blocking(move || of_node(&runtime, Ok(client), (&host, &name), &question)).await;
        let asked = asked.map_err(|_| Denied::Failed("the agent failed to look at the flow".to_owned()))?;
        (asked.map_err(|error| Denied::Failed(error.to_string()))?.0, is_by_name)
    };
    let namespaces: Vec<String> = facts.target.namespaces().into_iter().map(str::to_owned).collect();
    let mut sight = Sight::of(shared, permit, namespaces).await?;
    facts.hide(is_by_name, |namespace| sight.has(namespace));
    Ok(WhyFacts { facts, lacking: sight.lacking.pop() })
}
