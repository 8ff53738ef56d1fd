//! How the node and its pods stand, and how far upgrades are.

use std::path::Path;

use nebula_cni_contract::agent_api::{ExpiringCertificate, NodeStatus, PodCounts, PodState, PodStates, UpgradeState};
use nebula_cni_contract::clock::{Clock, SystemClock};
use serde_json::Value;

use super::Api;
use super::denied::Denied;
use crate::config::STATE_DIR;
use crate::pod_status::{self, HANGS};
use crate::readiness::verdict;
use crate::reconcile::plan::{Protection, Reason, Stand};
use crate::rollout::command;
use crate::rollout::plan::Request;
use crate::status::parts;

pub(super) fn status(api: &Api) -> NodeStatus {
    let (standings, pods) = (api.node.readiness.now(), (api.pods)());
    let certificates = pods.iter().filter_map(|(stand, status)| {
        let certificate = status.as_ref()?.certificate.as_ref()?;
        let (not_before, not_after) = (certificate.not_before, certificate.not_after);
        Some(ExpiringCertificate { pod: name(stand), not_before, not_after })
    });
    NodeStatus {
        node: api.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        is_ready: verdict(&standings).is_ok(),
        parts: parts(&standings),
        first_to_expire: certificates.min_by_key(|certificate| certificate.not_after),
        cas: api.node.cas.borrow().clone(),
        pods: counts(pods.iter().map(|(stand, _)| stand)),
        upgrade: upgrade(api),
    }
}

fn counts<'a>(pods: impl Iterator<Item = &'a Stand>) -> PodCounts {
    let mut counts = PodCounts::default();
    for stand in pods {
        let count = match &stand.protection {
            Protection::NotEnrolled | Protection::OptedOut => continue,
            Protection::Protected => &mut counts.protected,
            Protection::Unprotected(_) | Protection::CrashLooping { .. } => &mut counts.unprotected,
            Protection::Waiting(_) | Protection::Closed(_) | Protection::Stranded(_) => &mut counts.closed,
            Protection::Undecided(_) => &mut counts.undecided,
        };
        *count += 1;
    }
    counts
}

pub(super) fn name(stand: &Stand) -> String {
    format!("{}/{}", stand.pod.namespace, stand.pod.name)
}

/// What the instances of pods say now; of all pods, or those of one namespace.
pub(super) async fn instances(api: &Api, namespace: Option<&str>) -> Result<Vec<PodState>, Denied> {
    let _place = api.working.acquire().await.map_err(|_| Denied::Working)?;
    let (host, of) = (api.node.config.host_root.clone(), namespace.map(str::to_owned));
    let asked =
        tokio::task::spawn_blocking(move || pod_status::of_namespace(&host, Path::new(STATE_DIR), of.as_deref()));
    let asked = asked.await.map_err(|_| Denied::Failed("the agent failed to ask the instances".to_owned()))?;
    asked.map_err(|error| Denied::Failed(error.to_string()))
}

pub(super) async fn pods(api: &Api, namespace: Option<String>) -> Result<PodStates, Denied> {
    let mut pods = instances(api, namespace.as_deref()).await?;
    let is_wanted = |stand: &Stand| namespace.as_ref().is_none_or(|namespace| stand.pod.namespace == *namespace);
    for (stand, _) in (api.pods)().iter().filter(|(stand, _)| stand.protection.is_unprotected() && is_wanted(stand)) {
        let problem = Some(match &stand.protection {
            Protection::CrashLooping { restarts, .. } => format!("its instance keeps dying ({restarts} times)"),
            Protection::Unprotected(reason) => reason.to_string(),
            _ => continue,
        });
        let unprotected = PodState { pod: name(stand), problem, is_unprotected: true, ..PodState::default() };
        match pods.iter_mut().find(|pod| pod.pod == unprotected.pod) {
            Some(known) if is_hanging(known, &stand.protection) => {}
            Some(known) => known.is_unprotected = true,
            None => pods.push(unprotected),
        }
    }
    pods.sort_by(|a, b| (&a.pod, &a.network).cmp(&(&b.pod, &b.network)));
    shorten(&mut pods);
    Ok(PodStates { pods })
}

/// Whether all that is wrong with a pod is that its instance hangs. Its device and its rules are there still, so what
/// it sends into the tunnel leaves nowhere in clear.
fn is_hanging(pod: &PodState, protection: &Protection) -> bool {
    matches!(protection, Protection::Unprotected(Reason::NoInstance)) && pod.problem.as_deref() == Some(HANGS)
}

/// What instances say is bounded together, too.
fn shorten(pods: &mut [PodState]) {
    let mut left = MAX_STATUSES;
    for pod in pods {
        let length = pod.status.to_string().len();
        if length <= left {
            left -= length;
            continue;
        }
        pod.status = Value::Null;
        pod.problem = Some("left out: the instances of this node say too much to be sent at once".to_owned());
    }
}

pub(super) fn upgrade(api: &Api) -> UpgradeState {
    let (config, now) = (&api.node.config, SystemClock.unix_seconds());
    command::document(&command::status(&config.host_root, now), config.upgrade, now)
}

pub(super) async fn change_upgrade(api: &Api, change: Request) -> Result<UpgradeState, Denied> {
    let _place = api.working.acquire().await.map_err(|_| Denied::Working)?;
    let host = api.node.config.host_root.clone();
    let done = tokio::task::spawn_blocking(move || command::ask(&host, change, &SystemClock)).await;
    match done {
        Ok(Ok(_)) => Ok(upgrade(api)),
        Ok(Err(error)) => Err(Denied::Failed(format!("the agent cannot note it: {error}"))),
        Err(_) => Err(Denied::Failed("the agent failed to note it".to_owned())),
    }
}

const MAX_STATUSES: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_whose_instance_hangs_does_not_answer_and_one_whose_instance_is_gone_is_unprotected() {
        let pod = |problem: &str| PodState { problem: Some(problem.to_owned()), ..PodState::default() };
        let no_instance = Protection::Unprotected(Reason::NoInstance);
        assert!(is_hanging(&pod(HANGS), &no_instance));
        assert!(!is_hanging(&pod("Connection refused"), &no_instance));
        assert!(!is_hanging(&PodState::default(), &no_instance), "it answers now");
        for other in [Protection::Unprotected(Reason::NoDevice), Protection::CrashLooping { restarts: 3, delay: 1 }] {
            assert!(!is_hanging(&pod(HANGS), &other), "{other:?}");
        }
    }

    #[test]
    fn statuses_are_bounded_together_and_small_ones_stay() {
        let pod = |length: usize| PodState { status: "x".repeat(length).into(), ..PodState::default() };
        let mut pods = [pod(10), pod(MAX_STATUSES), pod(10)];
        shorten(&mut pods);
        assert_eq!(pods.each_ref().map(|pod| pod.problem.is_some()), [false, true, false]);
        assert_eq!((pods[1].status.is_null(), pods[2].status.is_string()), (true, true));
    }
}
