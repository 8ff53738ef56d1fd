//! What network policies say of a flow, and what pods were seen to do: for `policy test` and `policy suggest` of
//! kubectl's plugin.

use std::path::Path;
use std::time::Duration;

use nebula_cni_contract::agent_api::{PolicySeen, PolicyTested};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::why::{Asked as To, Question};

use super::denied::Denied;
use super::routes::{Permit, Shared};
use super::sight::Sight;
use crate::config::STATE_DIR;
use crate::policy::asked;
use crate::policy::suggest::Said;
use crate::why::resolve;

/// The permission for the namespace of the source has been looked at, or that for all. Without that for the
/// destination's, the destination is left out.
pub(super) async fn test(shared: &Shared, permit: &Permit, question: Question) -> Result<PolicyTested, Denied> {
    let api = &shared.api;
    let is_by_name = matches!(question.target, To::Name { .. });
    let mut tested = {
        let _place = api.working.acquire().await.map_err(|_| Denied::Working)?;
        let ends = resolve(&api.client, &question).await.map_err(|error| Denied::Failed(error.to_string()))?;
        let (host, name) = (api.node.config.host_root.clone(), api.name.clone());
        let asked = tokio::task::spawn_blocking(move || asked::tested((&host, &name), ends, &question)).await;
        asked.map_err(|_| Denied::Failed("the agent failed to look at the flow".to_owned()))?
    };
    let namespaces: Vec<String> = tested.target.namespaces().into_iter().map(str::to_owned).collect();
    let mut sight = Sight::of(shared, permit, namespaces).await?;
    tested.hide(is_by_name, |namespace| sight.has(namespace));
    Ok(PolicyTested { tested, lacking: sight.lacking.pop() })
}

/// What the pods of a namespace were seen to do. The permissions for its flows and its pods have been looked at;
/// `permit` is that for the pods. Labels of pods in namespaces without that permission are left out.
pub(super) async fn seen(shared: &Shared, permit: &Permit, namespace: String) -> Result<PolicySeen, Denied> {
    let api = &shared.api;
    let said = {
        let _place = api.working.acquire().await.map_err(|_| Denied::Working)?;
        let host = api.node.config.host_root.clone();
        let asked = tokio::task::spawn_blocking(move || Said::ask(&host, Path::new(STATE_DIR), &namespace)).await;
        let asked = asked.map_err(|_| Denied::Failed("the agent failed to ask the instances".to_owned()))?;
        asked.map_err(|error| Denied::Failed(error.to_string()))?
    };
    // Most nodes have no flow of the namespace: the API server need not list all pods for them.
    let mut seen = if said.has_flows() {
        // One at a time, apart from other work: a list of all pods takes long.
        let place = tokio::time::timeout(PLACE_WITHIN, api.listing.acquire()).await;
        let _place = place.map_err(|_| Denied::Working)?.map_err(|_| Denied::Working)?;
        if !api.take_list(SystemClock.now()) {
            return Err(Denied::Working);
        }
        let named = tokio::time::timeout(NAMED_WITHIN, said.named(&api.client, &api.node.config.policies.dns, ROOM));
        let named =
            named.await.map_err(|_| Denied::Failed("the API server is too slow to list all pods".to_owned()))?;
        named.map_err(|error| Denied::Failed(error.to_string()))?
    } else {
        said.without_names()
    };
    let sight = Sight::of(shared, permit, seen.other_namespaces()).await?;
    seen.hide(|namespace| sight.has(namespace));
    Ok(PolicySeen { seen, lacking: sight.lacking, not_asked: sight.not_asked })
}

/// kubectl waits for 30 s, for this and for the permissions.
const PLACE_WITHIN: Duration = Duration::from_secs(8);
const NAMED_WITHIN: Duration = Duration::from_secs(15);
/// Bytes of labels, and as many of flows.
const ROOM: usize = 8 << 20;
