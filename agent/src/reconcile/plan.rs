//! Decides what to repair, and how each pod stands. Pure: nothing is read or changed here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use nebula_cni_contract::instance_status::InstanceState;
use nebula_cni_contract::launch::Pod;
use nebula_cni_contract::netns::NetnsId;
use nebula_cni_plugin::request::Key;

use super::seen::{Attachment, Enrolment, Instance, Sandbox, Seen};

/// What is to be done, and how the pods stand.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The pods that run, each once.
    pub pods: Vec<Stand>,
    /// Differences to repair, each attachment at most once.
    pub repairs: Vec<Repair>,
}

/// How one pod stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stand {
    /// Its sandbox.
    pub sandbox: String,
    /// The pod.
    pub pod: Pod,
    /// Whether it is protected.
    pub protection: Protection,
}

/// Whether a pod is protected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Protection {
    /// It is not enrolled.
    NotEnrolled,
    /// It is not enrolled because of its annotation.
    OptedOut,
    /// Nobody can tell whether it is enrolled.
    Undecided(String),
    /// It has a tunnel.
    Protected,
    /// It waits for its certificate. Nothing leaves in clear, nothing arrives.
    Waiting(String),
    /// Its tunnel was closed, for example since its certificate was revoked. Nothing leaves in clear.
    Closed(String),
    /// Its tunnel is closed, or without its groups, until somebody shows the pod's token: no init container will. If
    /// this node cannot, the pod must be recreated. Nothing leaves in clear.
    Stranded(Stranded),
    /// It is enrolled and runs without a tunnel.
    Unprotected(Reason),
    /// Like [`Protection::Unprotected`], since its instance keeps dying.
    CrashLooping {
        /// Restarts in a row.
        restarts: u32,
        /// Seconds between the last start and the next.
        delay: u64,
    },
}

/// How a pod of flow `init` came to be without its certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stranded {
    /// No init container has shown the pod's token in time.
    NoInit,
    /// The instance was restarted, and its certificate ended with it.
    CertificateLost,
    /// The instance was restarted, and what it has now is a provisional certificate, which has no groups.
    GroupsLost,
}

impl fmt::Display for Stranded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoInit => "no init container has shown the pod's token",
            Self::CertificateLost => {
                "its instance was restarted, and the certificate that the init container got ended with it"
            }
            Self::GroupsLost => {
                "its instance was restarted and has a provisional certificate, without the groups of the one before"
            }
        })
    }
}

impl Protection {
    /// All names of states, for metrics.
    pub const NAMES: [&str; 9] = [
        "not_enrolled",
        "undecided",
        "protected",
        "waiting",
        "closed",
        "unprotected",
        "crash_looping",
        "stranded",
        "opted_out",
    ];

    /// The state's name in metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        Self::NAMES[match self {
            Self::NotEnrolled => 0,
            Self::Undecided(_) => 1,
            Self::Protected => 2,
            Self::Waiting(_) => 3,
            Self::Closed(_) => 4,
            Self::Unprotected(_) => 5,
            Self::CrashLooping { .. } => 6,
            Self::Stranded(_) => 7,
            Self::OptedOut => 8,
        }]
    }

    /// Whether the pod must have no tunnel.
    #[must_use]
    pub fn is_outside(&self) -> bool {
        matches!(self, Self::NotEnrolled | Self::OptedOut)
    }

    /// Whether the pod should have a tunnel and has none.
    #[must_use]
    pub fn is_unprotected(&self) -> bool {
        matches!(self, Self::Unprotected(_) | Self::CrashLooping { .. })
    }
}

/// One difference and what removes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair {
    /// What to do.
    pub action: Action,
    /// Why.
    pub reason: Reason,
    /// The pod; its fields are empty for an orphan.
    pub pod: Pod,
}

/// What to do about an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Give the pod in this sandbox a tunnel; what the operator wants done with such pods comes first.
    Attach {
        /// The sandbox.
        sandbox: String,
    },
    /// Remove what is left of the attachment and make it again.
    Reattach {
        /// The attachment.
        key: Key,
    },
    /// Restart the instance.
    Mend {
        /// The attachment.
        key: Key,
    },
    /// Show the instance the pod's token, as the pod's init container would.
    Present {
        /// The attachment.
        key: Key,
    },
    /// Remove the attachment.
    Detach {
        /// The attachment.
        key: Key,
    },
}

impl Action {
    /// The container that the action is about.
    #[must_use]
    pub fn container(&self) -> &str {
        match self {
            Self::Attach { sandbox } => sandbox,
            Self::Reattach { key } | Self::Mend { key } | Self::Present { key } | Self::Detach { key } => {
                &key.container_id
            }
        }
    }

    /// The action's name in metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Attach { .. } => "attach",
            Self::Reattach { .. } => "reattach",
            Self::Mend { .. } => "restart",
            Self::Present { .. } => "present",
            Self::Detach { .. } => "detach",
        }
    }
}

/// Why something is to be repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The pod runs and was never attached, or its record was lost.
    NoRecord,
    /// An attachment was begun and never completed.
    Unfinished,
    /// The pod has another network namespace than the one the tunnel was made in.
    OtherNamespace,
    /// The instance does not answer.
    NoInstance,
    /// The instance of another pod answers.
    OtherInstance,
    /// The pod's device is gone.
    NoDevice,
    /// A network policy selects the pod, must be enforced and is not.
    NoPolicy,
    /// The instance waits for the pod's token, and no init container will show it.
    NoToken,
    /// The pod's sandbox is gone.
    NoSandbox,
    /// An instance runs without a record.
    Orphan,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoRecord => "it was started without a tunnel, or the record of its tunnel is lost",
            Self::Unfinished => "its tunnel was never completed",
            Self::OtherNamespace => "it has another network namespace than its tunnel",
            Self::NoInstance => "its instance does not answer",
            Self::OtherInstance => "the instance of another pod answers in place of its own",
            Self::NoDevice => "its tunnel device is gone",
            Self::NoPolicy => "a network policy selects it, and nothing enforces that",
            Self::NoToken => "its instance waits for the pod's token, and no init container will show it",
            Self::NoSandbox => "its sandbox is gone",
            Self::Orphan => "an instance runs without a record",
        })
    }
}

/// Compares and decides.
#[must_use]
pub fn plan(seen: &Seen) -> Plan {
    let mut plan = Plan::default();
    let by_container: BTreeMap<&str, &Attachment> =
        seen.records.iter().map(|record| (record.key.container_id.as_str(), record)).collect();
    for sandbox in newest(&seen.sandboxes) {
        let (protection, repair) = judge(sandbox, by_container.get(sandbox.id.as_str()).copied());
        plan.repairs.extend(repair);
        plan.pods.push(Stand { sandbox: sandbox.id.clone(), pod: sandbox.pod.clone(), protection });
    }
    let running: BTreeSet<&str> =
        seen.sandboxes.iter().filter(|sandbox| sandbox.is_ready).map(|sandbox| sandbox.id.as_str()).collect();
    for record in &seen.records {
        // While its namespace is there, the pod may belong to an ADD in progress or to another runtime.
        if !running.contains(record.key.container_id.as_str()) && !record.has_netns {
            let action = Action::Detach { key: record.key.clone() };
            plan.repairs.push(Repair { action, reason: Reason::NoSandbox, pod: record.pod.clone() });
        }
    }
    for key in seen.orphans.iter().filter(|key| !by_container.contains_key(key.container_id.as_str())) {
        // An enrolled sandbox is attached again, which ends the orphan too.
        if plan.repairs.iter().any(|repair| repair.action.container() == key.container_id) {
            continue;
        }
        let pod = Pod { namespace: String::new(), name: String::new(), uid: String::new() };
        plan.repairs.push(Repair { action: Action::Detach { key: key.clone() }, reason: Reason::Orphan, pod });
    }
    plan
}

impl Plan {
    /// Attachments that are as they should be but for network policies: `is_unasked` says of which pods a policy is not
    /// enforced.
    pub(crate) fn without_policies(
        &self,
        records: &[Attachment],
        is_unasked: impl Fn(&Attachment) -> bool,
    ) -> Vec<Repair> {
        let is_there = |container: &str| self.pods.iter().any(|stand| stand.sandbox == container);
        let is_repaired = |container: &str| self.repairs.iter().any(|repair| repair.action.container() == container);
        let concerned = records.iter().filter(|record| {
            let container = &*record.key.container_id;
            record.is_complete && is_there(container) && !is_repaired(container) && is_unasked(record)
        });
        let reattach = |record: &Attachment| Repair {
            action: Action::Reattach { key: record.key.clone() },
            reason: Reason::NoPolicy,
            pod: record.pod.clone(),
        };
        concerned.map(reattach).collect()
    }
}

/// The running sandboxes, of each pod only the newest. To attach an older one would end the tunnel of the newer.
fn newest(sandboxes: &[Sandbox]) -> Vec<&Sandbox> {
    let mut newest: Vec<&Sandbox> = Vec::new();
    for sandbox in sandboxes.iter().filter(|sandbox| sandbox.is_ready) {
        let is_same = |other: &&mut &Sandbox| !sandbox.pod.uid.is_empty() && other.pod.uid == sandbox.pod.uid;
        match newest.iter_mut().find(is_same) {
            Some(other) if other.attempt < sandbox.attempt => *other = sandbox,
            Some(_) => {}
            None => newest.push(sandbox),
        }
    }
    newest
}

fn judge(sandbox: &Sandbox, record: Option<&Attachment>) -> (Protection, Option<Repair>) {
    let repair = |action, reason| Some(Repair { action, reason, pod: sandbox.pod.clone() });
    let attach = || Action::Attach { sandbox: sandbox.id.clone() };
    let Some(record) = record else {
        return match &sandbox.enrolment {
            Enrolment::NotEnrolled => (Protection::NotEnrolled, None),
            Enrolment::OptedOut => (Protection::OptedOut, None),
            Enrolment::Undecided(why) => (Protection::Undecided(why.clone()), None),
            // Without a namespace it is just being stopped.
            Enrolment::Enrolled if sandbox.netns_id.is_none() => (Protection::Unprotected(Reason::NoRecord), None),
            Enrolment::Enrolled => (Protection::Unprotected(Reason::NoRecord), repair(attach(), Reason::NoRecord)),
        };
    };
    let reattach = |reason| {
        let action = Action::Reattach { key: record.key.clone() };
        (Protection::Unprotected(reason), repair(action, reason))
    };
    if is_other(sandbox.netns_id, record.netns_id) {
        return reattach(Reason::OtherNamespace);
    }
    if !record.is_complete {
        return (Protection::Unprotected(Reason::Unfinished), repair(attach(), Reason::Unfinished));
    }
    let Instance::Answers(status) = &record.instance else {
        let protection = match record.crash_loop {
            Some(looping) => Protection::CrashLooping { restarts: looping.restarts, delay: looping.delay },
            // It does not die, so a restart does not come: it hangs.
            None if record.silent_for >= HANGS_AFTER => return reattach(Reason::NoInstance),
            None => Protection::Unprotected(Reason::NoInstance),
        };
        return (protection, repair(Action::Mend { key: record.key.clone() }, Reason::NoInstance));
    };
    if status.uid.as_ref().is_some_and(|uid| *uid != record.pod.uid) {
        return reattach(Reason::OtherInstance);
    }
    if record.has_device == Some(false) {
        return reattach(Reason::NoDevice);
    }
    let why = || status.last_error.clone().unwrap_or_default();
    let has_restarted = record.restarts > 0;
    let protection = match status.state {
        InstanceState::Waiting if status.init_overdue && has_restarted => {
            Protection::Stranded(Stranded::CertificateLost)
        }
        InstanceState::Waiting if status.init_overdue => Protection::Stranded(Stranded::NoInit),
        InstanceState::Waiting => Protection::Waiting(why()),
        InstanceState::Provisional if has_restarted => Protection::Stranded(Stranded::GroupsLost),
        InstanceState::Closed => Protection::Closed(status.closed.clone().unwrap_or_else(why)),
        InstanceState::Running | InstanceState::Provisional => Protection::Protected,
        InstanceState::Unknown => Protection::Undecided(UNKNOWN_STATE.to_owned()),
    };
    // A restarted instance need not wait until that is certain: the token is the pod's own.
    let may_lack_it =
        matches!(protection, Protection::Stranded(_)) || has_restarted && matches!(protection, Protection::Waiting(_));
    // Others wait for the CA, and no token of the pod helps them.
    let lacks_token = may_lack_it && status.own_token != Some(false);
    let present = lacks_token.then(|| Action::Present { key: record.key.clone() });
    (protection, present.and_then(|action| repair(action, Reason::NoToken)))
}

const UNKNOWN_STATE: &str =
    "its instance names a state that this agent does not know, as one of another release may: update the agent";

/// Longer than the start of an instance, and than most outages of an overloaded node.
const HANGS_AFTER: Duration = Duration::from_secs(90);

fn is_other(present: Option<NetnsId>, recorded: NetnsId) -> bool {
    present.is_some_and(|present| present != recorded)
}

#[cfg(test)]
mod tests {
    use nebula_cni_contract::instance_status::Status;
    use proptest::prelude::*;

    use super::*;
    use crate::reconcile::seen::CrashLoop;

    fn pod(name: &str) -> Pod {
        Pod { namespace: "shop".into(), name: name.into(), uid: format!("uid-{name}") }
    }

    fn sandbox(id: &str) -> Sandbox {
        Sandbox {
            id: id.into(),
            pod: pod(id),
            attempt: 0,
            is_ready: true,
            netns: Some(format!("/run/netns/{id}").into()),
            netns_id: Some((4, 1)),
            enrolment: Enrolment::Enrolled,
        }
    }

    fn status(text: &str) -> Instance {
        Instance::Answers(std::sync::Arc::new(serde_json::from_str::<Status>(text).unwrap()))
    }

    fn record(id: &str) -> Attachment {
        Attachment {
            key: Key { network: "net".into(), container_id: id.into(), ifname: "eth0".into() },
            pod: pod(id),
            is_complete: true,
            has_rules: false,
            netns_id: (4, 1),
            has_netns: true,
            instance: status(&format!(r#"{{"uid":"uid-{id}","state":"running"}}"#)),
            silent_for: Duration::ZERO,
            has_device: Some(true),
            restarts: 0,
            crash_loop: None,
        }
    }

    fn plan_of(sandboxes: Vec<Sandbox>, records: Vec<Attachment>) -> Plan {
        plan(&Seen { sandboxes, records, orphans: Vec::new() })
    }

    /// State, action and reason of the only pod.
    fn judged(sandbox: Sandbox, record: Option<Attachment>) -> (&'static str, Option<(&'static str, Reason)>) {
        let plan = plan_of(vec![sandbox], record.into_iter().collect());
        assert!(plan.pods.len() == 1 && plan.repairs.len() < 2, "{plan:?}");
        (plan.pods[0].protection.name(), plan.repairs.first().map(|repair| (repair.action.name(), repair.reason)))
    }

    #[test]
    fn every_difference_has_its_repair() {
        let silent = || Instance::Silent("connection refused".into());
        let looping = Some(CrashLoop { restarts: 7, delay: 16 });
        let enrolment = |enrolment| Sandbox { enrolment, ..sandbox("a") };
        assert_eq!(judged(enrolment(Enrolment::NotEnrolled), None), ("not_enrolled", None));
        assert_eq!(judged(enrolment(Enrolment::OptedOut), None), ("opted_out", None));
        assert_eq!(judged(enrolment(Enrolment::Undecided("no API".into())), None), ("undecided", None));
        assert_eq!(judged(sandbox("a"), None), ("unprotected", Some(("attach", Reason::NoRecord))));
        assert_eq!(judged(Sandbox { netns_id: None, ..sandbox("a") }, None), ("unprotected", None));
        for (record, state, repair) in [
            (record("a"), "protected", None),
            (Attachment { is_complete: false, ..record("a") }, "unprotected", Some(("attach", Reason::Unfinished))),
            (Attachment { netns_id: (4, 2), ..record("a") }, "unprotected", Some(("reattach", Reason::OtherNamespace))),
            (Attachment { instance: silent(), ..record("a") }, "unprotected", Some(("restart", Reason::NoInstance))),
            (
                Attachment { instance: silent(), silent_for: HANGS_AFTER, ..record("a") },
                "unprotected",
                Some(("reattach", Reason::NoInstance)),
            ),
            (
                Attachment { instance: silent(), silent_for: HANGS_AFTER, crash_loop: looping, ..record("a") },
                "crash_looping",
                Some(("restart", Reason::NoInstance)),
            ),
            (Attachment { crash_loop: looping, ..record("a") }, "protected", None),
            (
                Attachment { instance: status(r#"{"uid":"uid-b","state":"running"}"#), ..record("a") },
                "unprotected",
                Some(("reattach", Reason::OtherInstance)),
            ),
            (
                Attachment { has_device: Some(false), ..record("a") },
                "unprotected",
                Some(("reattach", Reason::NoDevice)),
            ),
            (Attachment { has_device: None, ..record("a") }, "protected", None),
            (Attachment { instance: status(r#"{"uid":"uid-a","state":"waiting"}"#), ..record("a") }, "waiting", None),
            (Attachment { instance: status(r#"{"uid":"uid-a","state":"closed"}"#), ..record("a") }, "closed", None),
            (
                Attachment { instance: status(r#"{"uid":"uid-a","state":"provisional"}"#), ..record("a") },
                "protected",
                None,
            ),
            // Of a newer release, and of none that there was.
            (
                Attachment { instance: status(r#"{"uid":"uid-a","state":"draining"}"#), ..record("a") },
                "undecided",
                None,
            ),
            (Attachment { instance: status(r#"{"uid":"uid-a"}"#), ..record("a") }, "undecided", None),
        ] {
            assert_eq!(judged(sandbox("a"), Some(record.clone())), (state, repair), "{record:?}");
        }
    }

    #[test]
    fn a_pod_that_no_init_container_will_help_is_stranded_and_shown_its_token() {
        let judged = |state: &str, is_overdue: bool, restarts: u32| {
            let text = format!(r#"{{"uid":"uid-a","state":"{state}","init_overdue":{is_overdue}}}"#);
            let record = Attachment { instance: status(&text), restarts, ..record("a") };
            let plan = plan_of(vec![sandbox("a")], vec![record]);
            let presented = plan.repairs.iter().any(|repair| matches!(repair.action, Action::Present { .. }));
            let is_running = state == "running";
            let waits_for_init = state == "waiting" && !is_overdue && restarts == 0;
            assert_eq!(presented, !is_running && !waits_for_init, "{state} {is_overdue} {restarts}");
            plan.pods[0].protection.clone()
        };
        assert_eq!(judged("waiting", false, 1), Protection::Waiting(String::new()), "its init container may still run");
        let of_node = r#"{"uid":"uid-a","state":"waiting","own_token":false}"#;
        let record = Attachment { instance: status(of_node), restarts: 1, ..record("a") };
        assert_eq!(plan_of(vec![sandbox("a")], vec![record]).repairs, [], "its instance asks with the node's token");
        assert_eq!(judged("waiting", false, 0), Protection::Waiting(String::new()));
        assert_eq!(judged("waiting", true, 1), Protection::Stranded(Stranded::CertificateLost));
        assert_eq!(judged("waiting", true, 0), Protection::Stranded(Stranded::NoInit));
        assert_eq!(judged("provisional", false, 1), Protection::Stranded(Stranded::GroupsLost));
        assert_eq!(judged("running", false, 1), Protection::Protected);
        assert!(!Protection::Stranded(Stranded::NoInit).is_unprotected(), "nothing leaves in clear");
    }

    #[test]
    fn a_sound_attachment_without_its_policies_is_made_again() {
        let silent = Attachment { instance: Instance::Silent("refused".into()), ..record("silent") };
        let unfinished = Attachment { is_complete: false, ..record("unfinished") };
        let records = vec![record("old"), record("new"), silent, unfinished, record("ended")];
        let sandboxes = ["old", "new", "silent", "unfinished"].map(sandbox).to_vec();
        let plan = plan_of(sandboxes, records.clone());
        let repairs = plan.without_policies(&records, |record| record.key.container_id != "new");
        let [repair] = &repairs[..] else { panic!("others have a repair, or no pod: {repairs:?}") };
        assert_eq!(
            (repair.action.name(), repair.action.container(), repair.reason),
            ("reattach", "old", Reason::NoPolicy)
        );
    }

    #[test]
    fn a_pod_that_left_the_rules_keeps_its_tunnel() {
        let left = Sandbox { enrolment: Enrolment::NotEnrolled, ..sandbox("a") };
        assert_eq!(judged(left, Some(record("a"))), ("protected", None));
    }

    #[test]
    fn what_is_left_of_a_pod_goes_with_its_namespace_and_never_before() {
        let gone = Attachment { has_netns: false, ..record("a") };
        let expected = Action::Detach { key: gone.key.clone() };
        let stopped = Sandbox { is_ready: false, ..sandbox("a") };
        for sandboxes in [vec![], vec![stopped]] {
            let plan = plan_of(sandboxes.clone(), vec![gone.clone()]);
            assert_eq!(plan.repairs.iter().map(|repair| &repair.action).collect::<Vec<_>>(), [&expected]);
            assert!(plan_of(sandboxes, vec![record("a")]).repairs.is_empty(), "an ADD in progress, or another runtime");
        }
    }

    #[test]
    fn only_the_newest_sandbox_of_a_pod_is_attached() {
        let old = Sandbox { id: "old".into(), ..sandbox("a") };
        let new = Sandbox { id: "new".into(), attempt: 1, ..sandbox("a") };
        for sandboxes in [vec![old.clone(), new.clone()], vec![new, old]] {
            let plan = plan_of(sandboxes, vec![]);
            let containers: Vec<_> = plan.repairs.iter().map(|repair| repair.action.container().to_owned()).collect();
            assert_eq!(containers, ["new"]);
            assert_eq!(plan.pods.len(), 1);
        }
    }

    #[test]
    fn orphans_are_ended_unless_their_pod_is_attached_again_anyway() {
        let key = record("a").key;
        let orphan = |sandboxes| plan(&Seen { sandboxes, records: vec![], orphans: vec![key.clone()] });
        assert_eq!(orphan(vec![]).repairs[0].reason, Reason::Orphan);
        assert_eq!(orphan(vec![sandbox("a")]).repairs.len(), 1);
        assert_eq!(orphan(vec![sandbox("a")]).repairs[0].action.name(), "attach");
        let recorded = plan(&Seen { sandboxes: vec![], records: vec![record("a")], orphans: vec![key.clone()] });
        assert!(recorded.repairs.is_empty());
    }

    fn sandboxes() -> impl Strategy<Value = Vec<Sandbox>> {
        let one = ("[ab]", 0u32..2, any::<bool>(), proptest::option::of(0u64..2), 0..3, 0..3);
        let made = one.prop_map(|(uid, attempt, is_ready, netns, enrolment, id)| Sandbox {
            id: format!("{uid}{attempt}{id}"),
            pod: pod(&uid),
            attempt,
            is_ready,
            netns: None,
            netns_id: netns.map(|inode| (4, inode)),
            enrolment: match enrolment {
                0 => Enrolment::Enrolled,
                1 => Enrolment::NotEnrolled,
                _ => Enrolment::Undecided(String::new()),
            },
        });
        proptest::collection::vec(made, 0..6).prop_map(|mut all| {
            all.sort_by(|a, b| a.id.cmp(&b.id));
            all.dedup_by(|a, b| a.id == b.id);
            all
        })
    }

    fn records() -> impl Strategy<Value = Vec<Attachment>> {
        let one = ("[ab]", 0u32..2, 0..3, any::<[bool; 4]>(), 0u64..2);
        let made = one.prop_map(|(uid, attempt, id, [is_complete, has_netns, answers, device], inode)| {
            let name = format!("{uid}{attempt}{id}");
            Attachment {
                pod: pod(&uid),
                is_complete,
                netns_id: (4, inode),
                has_netns,
                has_device: Some(device),
                instance: if answers {
                    status(&format!(r#"{{"uid":"uid-{uid}","state":"running"}}"#))
                } else {
                    Instance::Silent(String::new())
                },
                ..record(&name)
            }
        });
        proptest::collection::vec(made, 0..6)
    }

    proptest! {
        #[test]
        fn no_container_gets_two_repairs_and_every_pod_one_state(sandboxes in sandboxes(), mut records in records()) {
            records.sort_by(|a, b| a.key.container_id.cmp(&b.key.container_id));
            records.dedup_by(|a, b| a.key == b.key);
            let orphans = vec![record("a00").key, record("z").key];
            let seen = Seen { sandboxes, records, orphans };
            let plan = plan(&seen);
            let unique = |texts: Vec<&str>| texts.iter().collect::<BTreeSet<_>>().len() == texts.len();
            prop_assert!(unique(plan.repairs.iter().map(|repair| repair.action.container()).collect()), "{plan:?}");
            prop_assert!(unique(plan.pods.iter().map(|stand| stand.pod.uid.as_str()).collect()), "{plan:?}");
            for repair in &plan.repairs {
                let of_ready = seen.sandboxes.iter().any(|s| s.is_ready && s.id == repair.action.container());
                match &repair.action {
                    // Nothing is given to a pod that does not run, and nothing is taken from one that does.
                    Action::Attach { .. } | Action::Reattach { .. } | Action::Mend { .. } | Action::Present { .. } => {
                        prop_assert!(of_ready);
                    }
                    Action::Detach { .. } => prop_assert!(!of_ready || repair.reason == Reason::Orphan),
                }
            }
            for stand in plan.pods.iter().filter(|stand| stand.protection == Protection::Protected) {
                prop_assert!(plan.repairs.iter().all(|repair| repair.action.container() != stand.sandbox));
            }
        }
    }
}
