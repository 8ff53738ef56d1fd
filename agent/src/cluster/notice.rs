//! What people are told, as an Event on the pod or the node it concerns: what is wrong, and what to do about it.

use nebula_cni_contract::instance_status::{RefusedCaller, Status};
use nebula_cni_contract::launch::Pod;
use nebula_cni_plugin::enrolment::ANNOTATION;

use crate::config::Unprotected;
use crate::readiness::{Part, Standing};
use crate::reconcile::old_settings::ADVICE;
use crate::reconcile::plan::Stranded;
use crate::reconcile::repair::RepairError;
use crate::rollout::plan::Told;
use crate::rollout::state::Failure;

/// Age in seconds up to which a refusal is reported. The same Event is not repeated for as long.
const LATELY: u64 = 600;

/// One thing to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The pod; `None` for the node.
    pub pod: Option<Pod>,
    /// Whether somebody should do something.
    pub is_warning: bool,
    /// A short word in PascalCase, for filters.
    pub reason: &'static str,
    /// What the agent does or did.
    pub action: &'static str,
    /// The text for people.
    pub note: String,
}

impl Notice {
    /// A pod runs without a tunnel.
    #[must_use]
    pub fn unprotected(pod: &Pod, why: &str, policy: Unprotected) -> Self {
        let next = next_step(policy);
        warning(
            pod,
            "NebulaUnprotected",
            "Reconcile",
            format!("The pod is enrolled and runs without a tunnel: {why}. {next}"),
        )
    }

    /// A pod got a tunnel in place.
    #[must_use]
    pub fn attached(pod: &Pod) -> Self {
        let note = "The running pod got its tunnel in place, without a restart.".to_owned();
        Self { is_warning: false, ..warning(pod, "NebulaAttached", "Attach", note) }
    }

    /// A repair failed.
    #[must_use]
    pub fn repair_failed(pod: &Pod, error: &RepairError) -> Self {
        let (reason, advice) = if error.is_refused_identity() {
            ("NebulaIdentityRefused", "See the policy of the CA and its audit log.")
        } else {
            (
                "NebulaRepairFailed",
                "The agent tries again, with growing pauses; if you delete the pod, its controller recreates it with a tunnel.",
            )
        };
        warning(pod, reason, "Repair", format!("The pod's tunnel cannot be repaired: {error}. {advice}"))
    }

    /// The rules do not decide whether a pod is enrolled, or its instance says nothing that can be understood.
    #[must_use]
    pub fn undecided(pod: &Pod, why: &str) -> Self {
        warning(
            pod,
            "NebulaUndecided",
            "Reconcile",
            format!("It is not known whether the pod is as it should be: {why}"),
        )
    }

    /// A pod has no tunnel because of its annotation.
    #[must_use]
    pub fn opted_out(pod: &Pod) -> Self {
        let note = format!(
            "The pod has no tunnel, because its annotation {ANNOTATION} says so: what it sends is in clear, and pods with a \
             tunnel may refuse it."
        );
        Self { pod: Some(pod.clone()), is_warning: false, reason: "NebulaOptedOut", action: "Enrol", note }
    }

    /// A pod waits for its certificate.
    #[must_use]
    pub fn no_certificate(pod: &Pod, why: &str) -> Self {
        let note = format!("The pod waits for its certificate, and its tunnel is closed meanwhile: {why}");
        warning(pod, "NebulaNoCertificate", "Enrol", note)
    }

    /// The tunnel of a pod was closed.
    #[must_use]
    pub fn closed(pod: &Pod, why: &str) -> Self {
        warning(pod, "NebulaTunnelClosed", "Enrol", format!("The pod's tunnel is closed: {why}. {CLOSED_ADVICE}"))
    }

    /// A pod cannot get its certificate again.
    #[must_use]
    pub fn stranded(pod: &Pod, why: Stranded) -> Self {
        let advice = stranded_advice(why);
        warning(
            pod,
            "NebulaCertificateLost",
            "Enrol",
            format!("The pod has lost its certificate, or never got it: {why}. {advice}"),
        )
    }

    /// A pod goes on with settings that have changed since.
    #[must_use]
    pub fn old_settings(pod: &Pod, what: &str) -> Self {
        let note = format!("The pod's tunnel runs with old settings, {what}. To give it those of the chart, {ADVICE}.");
        warning(pod, "NebulaOldSettings", "Refresh", note)
    }

    /// The instance of a pod keeps dying.
    #[must_use]
    pub fn crash_looping(pod: &Pod, restarts: u32, delay: u64) -> Self {
        let note = format!(
            "The instance of the pod's tunnel keeps dying ({restarts} restarts in a row). It is started again every {delay} s \
             until it lives. See its log on the node (with systemd the journal of its unit nebula-pod-*, else the .log \
             beside its record in /run/nebula-cni)."
        );
        warning(pod, "NebulaInstanceCrashLooping", "Restart", note)
    }

    /// The certificate of a pod is not renewed although it expires soon; `None` if all is well.
    #[must_use]
    pub fn certificate_expiring(pod: &Pod, status: &Status, now: i64) -> Option<Self> {
        let certificate = status.certificate.as_ref()?;
        let left = certificate.not_after.saturating_sub(now);
        // A renewal is due long before; only one that failed is worth telling.
        let why = status.last_error.as_ref().filter(|_| left < certificate.warning_time())?;
        let note = format!(
            "The pod's certificate expires in {} minutes and is not renewed: {why}. Without it the tunnel closes. See \
             whether the CA answers and admits the pod.",
            (left / 60).max(0)
        );
        Some(warning(pod, "NebulaCertificateExpiring", "Renew", note))
    }

    /// Peers were refused lately because they offer no post-quantum keys, which the pod's tunnel requires.
    #[must_use]
    pub fn not_post_quantum(pod: &Pod, status: &Status) -> Option<Self> {
        let trouble = status.trouble.as_ref()?;
        let is_meant = |word: &str, ago: u64| word == RefusedCaller::NOT_POST_QUANTUM && ago < LATELY;
        let callers =
            trouble.refused_callers.iter().filter(|it| is_meant(&it.reason, it.seconds_ago)).map(|it| &it.text);
        let called = trouble.lost_peers.iter().filter(|it| is_meant(&it.refusal, it.seconds_ago)).map(|it| &it.cause);
        let all: Vec<&String> = callers.chain(called).collect();
        let note = format!(
            "Peers that offer no post-quantum keys were refused, because pki.post_quantum is \"require\" for the pod ({} lately): \
             {}. Give them this program, or set \"prefer\" in the chain entry.",
            all.len(),
            all.first()?
        );
        Some(warning(pod, "NebulaPeerNotPostQuantum", "Connect", note))
    }

    /// A network policy selects a pod, and nothing enforces it in the pod's tunnel.
    #[must_use]
    pub fn policy_not_enforced(pod: &Pod) -> Self {
        let note = "A network policy selects the pod, and nothing enforces it in the pod's tunnel: the pod was started without \
                    capture or before policies were enabled. Delete the pod, so that its controller recreates it, unless \
                    \"policy.required\" is set: then the agent makes its tunnel again now. \"capture.policy\" must be set in the \
                    chain entry.";
        warning(pod, "NebulaPolicyNotEnforced", "Enforce", note.to_owned())
    }

    /// A pod is evicted, or cannot be.
    #[must_use]
    pub fn evicted(pod: &Pod, outcome: &Result<(), String>) -> Self {
        match outcome {
            Ok(()) => {
                let note = "The pod is enrolled and runs without a tunnel: it was evicted, so that its controller recreates it.";
                warning(pod, "NebulaEvicted", "Evict", note.to_owned())
            }
            Err(why) => {
                let note = format!("The pod is enrolled and runs without a tunnel, and is not evicted: {why}");
                warning(pod, "NebulaNotEvicted", "Evict", note)
            }
        }
    }

    /// Something about the roll-out of the instances' program, which is of this version as far as it is known.
    #[must_use]
    pub fn of_rollout(told: &Told, version: &str) -> Self {
        let version = if version.is_empty() { String::new() } else { format!(" (version {version})") };
        let (pod, is_warning, reason, note) = match told {
            Told::Upgraded(pod) => {
                let note = format!(
                    "The instance of the pod's tunnel runs the installed program{version} now, and took over from the one before."
                );
                (Some(pod), false, "NebulaUpgraded", note)
            }
            Told::Failed(pod, Failure::NotUpgraded, why) => {
                let note = format!("The instance of the pod's tunnel keeps the program that it had: {why}");
                (Some(pod), true, "NebulaNotUpgraded", note)
            }
            Told::Failed(pod, Failure::RolledBack, why) => {
                let note = format!("The instance of the pod's tunnel has the program from before again: {why}");
                (Some(pod), true, "NebulaRolledBack", note)
            }
            Told::Failed(pod, Failure::NotRolledBack, why) => {
                let note = format!(
                    "The instance of the pod's tunnel does not work well with the installed program: {why}. If the pod has \
                     no connections, delete it: its controller recreates it."
                );
                (Some(pod), true, "NebulaNotRolledBack", note)
            }
            Told::CanaryPassed(left) => {
                let note = format!("The first pods keep the installed program{version}; {left} more follow.");
                (None, false, "NebulaCanaryPassed", note)
            }
            Told::Paused(why) => {
                let note = format!(
                    "No further pod of this node gets the installed program: {why}. \"nebula-cni-agent upgrade resume\" in the \
                     agent's pod goes on."
                );
                (None, true, "NebulaUpgradePaused", note)
            }
            Told::Resumed => (None, false, "NebulaUpgradeResumed", "Pods get the installed program again.".to_owned()),
            Told::Finished(upgraded, outdated) => {
                let note = format!(
                    "{upgraded} running pods have the installed program{version}; {outdated} go on with another one."
                );
                (None, false, "NebulaUpgradeFinished", note)
            }
        };
        Self { pod: pod.cloned(), is_warning, reason, action: "Upgrade", note }
    }

    /// A part of the agent's work on the node went wrong.
    #[must_use]
    pub fn of_part(part: Part, standing: &Standing) -> Self {
        let reason = match part {
            Part::Programs => "NebulaProgramsMissing",
            Part::Credentials => "NebulaCredentialsMissing",
            Part::SelfTest => "NebulaSelfTestFailed",
            Part::Chain => "NebulaChainOverwritten",
            Part::Runtime => "NebulaChainNotLoaded",
            Part::Ca => "NebulaCaUnreachable",
            Part::Reconciled => "NebulaNotReconciled",
            Part::Table => "NebulaTableStale",
            Part::Policies => "NebulaPoliciesNotEnforced",
            Part::Flows => "NebulaFlowsNotKept",
            Part::FlowExport => "NebulaFlowsNotExported",
            Part::Kubernetes => "NebulaApiServerUnreachable",
            Part::Underlay => "NebulaLighthousesUnreachable",
            Part::Nodes => "NebulaNodesUnreachable",
            Part::Gateway => "NebulaGatewayNotRunning",
        };
        let advice = if standing.advice.is_empty() { String::new() } else { format!(". {}", standing.advice) };
        let what = match part {
            Part::Underlay | Part::Nodes => "Pods of this node may be ready and not reach peers",
            Part::Gateway => "Pods of this node without a tunnel of their own may not reach those of other nodes",
            Part::Policies => "Network policies of pods of this node are not all enforced as they are written",
            Part::Flows => "It is not kept who speaks to whom; pods go on",
            Part::FlowExport => "It is not exported who speaks to whom; pods go on",
            _ => "New pods of this node may not start, or not be protected",
        };
        let note = format!("{what}: {}{advice}", standing.reason);
        Self { pod: None, is_warning: true, reason, action: "Prepare", note }
    }
}

/// What the agent does about a pod that runs without a tunnel, and what remains to be done.
#[must_use]
pub fn next_step(policy: Unprotected) -> &'static str {
    match policy {
        Unprotected::Attach => "The agent attaches it now, without a restart.",
        Unprotected::Evict => "The agent evicts it, so that its controller recreates it.",
        Unprotected::Label => "The agent labels it nebula-cni/unprotected=true; delete the pod to protect it.",
        Unprotected::Report => "Delete the pod, or set \"unprotected\" to \"attach\" in the agent's configuration.",
    }
}

/// What is to be done about a pod that cannot get its certificate again.
#[must_use]
pub fn stranded_advice(why: Stranded) -> &'static str {
    match why {
        Stranded::NoInit => {
            "The pod's tunnel stays closed. See whether the pod has nebula-cni-init as its first init container and how \
             that ended, and delete the pod: its controller recreates it."
        }
        Stranded::CertificateLost => {
            "The pod's tunnel is closed. The agent shows the instance the token of the pod, if it can; if this stays, \
             delete the pod: its controller recreates it, with an init container."
        }
        Stranded::GroupsLost => {
            "Peers whose rules ask for the groups refuse it. The agent shows the instance the token of the pod, if it \
             can; if this stays, delete the pod: its controller recreates it, with an init container."
        }
    }
}

fn warning(pod: &Pod, reason: &'static str, action: &'static str, note: String) -> Notice {
    Notice { pod: Some(pod.clone()), is_warning: true, reason, action, note }
}

/// What is to be done about a pod whose tunnel was closed.
pub const CLOSED_ADVICE: &str = "If the pod is to go on, delete it: its successor gets a certificate of its own.";

#[cfg(test)]
mod tests {
    use nebula_cni_plugin::reply::code;

    use super::*;
    use crate::reconcile::program::ProgramError;

    fn pod() -> Pod {
        Pod { namespace: "shop".into(), name: "web-0".into(), uid: "u1".into() }
    }

    #[test]
    fn only_a_certificate_that_cannot_be_renewed_is_told_of() {
        let status = |text: &str| serde_json::from_str::<Status>(text).unwrap();
        let failing =
            status(r#"{"certificate":{"not_before":-76400,"not_after":10000},"last_error":"connection refused"}"#);
        assert_eq!(Notice::certificate_expiring(&pod(), &failing, 10_000 - 3600), None);
        let told = Notice::certificate_expiring(&pod(), &failing, 10_000 - 1800).unwrap();
        assert!(told.note.contains("30 minutes") && told.note.contains("connection refused"), "{told:?}");
        // A quarter of the life of one that lives for an hour.
        let short = status(r#"{"certificate":{"not_before":6400,"not_after":10000},"last_error":"x"}"#);
        let told = |at| Notice::certificate_expiring(&pod(), &short, at).is_some();
        assert_eq!([told(9_100), told(9_101)], [false, true]);
        let well = status(r#"{"certificate":{"not_after":10000},"last_error":null}"#);
        assert_eq!(Notice::certificate_expiring(&pod(), &well, 9_000), None);
        assert_eq!(Notice::certificate_expiring(&pod(), &status("{}"), 9_000), None);
    }

    #[test]
    fn peers_without_post_quantum_keys_are_told_of_in_both_directions() {
        let told = |trouble: &str| {
            let status = serde_json::from_str::<Status>(&format!(r#"{{"trouble":{trouble}}}"#)).unwrap();
            Notice::not_post_quantum(&pod(), &status)
        };
        let caller = r#"{"from":"192.0.2.1:4242","reason":"not_post_quantum","text":"db does not offer ML-KEM","seconds_ago":5}"#;
        let called = r#"{"peer":"10.42.0.2","cause":"the answer was refused","reason":"refused","refusal":"not_post_quantum","seconds_ago":5}"#;
        let one = told(&format!(r#"{{"refused_callers":[{caller}]}}"#)).unwrap();
        assert!(one.is_warning && one.note.contains("1 lately") && one.note.contains("db does not offer"), "{one:?}");
        let both = told(&format!(r#"{{"refused_callers":[{caller}],"lost_peers":[{called}]}}"#)).unwrap();
        assert!(both.note.contains("2 lately"), "{both:?}");
        assert!(told(&format!(r#"{{"lost_peers":[{called}]}}"#)).is_some());
        let long_ago = caller.replace("\"seconds_ago\":5", "\"seconds_ago\":600");
        let other = caller.replace("not_post_quantum", "expired");
        for nothing in [long_ago, other] {
            assert_eq!(told(&format!(r#"{{"refused_callers":[{nothing}]}}"#)), None);
        }
    }

    #[test]
    fn a_stranded_pod_is_told_of_with_what_ends_it() {
        for (why, word) in [
            (Stranded::NoInit, "first init container"),
            (Stranded::CertificateLost, "was restarted"),
            (Stranded::GroupsLost, "groups"),
        ] {
            let told = Notice::stranded(&pod(), why);
            assert!(told.is_warning && told.reason == "NebulaCertificateLost", "{told:?}");
            assert!(told.note.contains(word) && told.note.to_lowercase().contains("delete the pod"), "{told:?}");
        }
    }

    #[test]
    fn what_is_told_of_a_roll_out_names_the_cause_and_how_to_go_on() {
        let told = |told: &Told| Notice::of_rollout(told, "0.2.0");
        let upgraded = told(&Told::Upgraded(pod()));
        assert!(!upgraded.is_warning && upgraded.note.contains("(version 0.2.0)"), "{upgraded:?}");
        for (failure, reason) in [
            (Failure::NotUpgraded, "NebulaNotUpgraded"),
            (Failure::RolledBack, "NebulaRolledBack"),
            (Failure::NotRolledBack, "NebulaNotRolledBack"),
        ] {
            let failed = told(&Told::Failed(pod(), failure, "it crashed".into()));
            assert!(failed.is_warning && failed.pod.is_some() && failed.note.contains("it crashed"), "{failed:?}");
            assert_eq!(failed.reason, reason);
        }
        let paused = told(&Told::Paused("shop/web-0 was rolled back".into()));
        assert!(paused.pod.is_none() && paused.is_warning && paused.note.contains("upgrade resume"), "{paused:?}");
        let finished = Notice::of_rollout(&Told::Finished(3, 1), "");
        assert_eq!(finished.note, "3 running pods have the installed program; 1 go on with another one.");
    }

    #[test]
    fn a_refused_identity_is_told_apart_from_other_failures() {
        let failed = |code| {
            let message = "pod shop/web-0: whatever the plugin said".to_owned();
            Notice::repair_failed(&pod(), &ProgramError::Refused { code, message }.into())
        };
        let refused = failed(code::IDENTITY_DENIED);
        assert_eq!(refused.reason, "NebulaIdentityRefused");
        assert!(refused.note.contains("whatever the plugin said"), "{}", refused.note);
        assert_eq!(failed(code::IO).reason, "NebulaRepairFailed");
        assert_eq!(Notice::repair_failed(&pod(), &RepairError::NoResult).reason, "NebulaRepairFailed");
    }
}
