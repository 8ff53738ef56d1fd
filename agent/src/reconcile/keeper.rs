//! The loop: looks, plans, repairs and tells, every two seconds quickly and every half minute thoroughly.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::launch::Pod;
use nebula_cni_contract::netlink::nftables;
use nebula_cni_plugin::attachment::files::Files;
use nebula_cni_plugin::verb::refresh::Refreshed;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::backoff::Backoff;
use super::entry::Entry;
use super::observe::{Depth, Observer, records_changed};
use super::old_settings::{self, OldSettings};
use super::plan::{Action, Plan, Protection, Reason, Repair, Stand, plan};
use super::program::Plugin;
use super::repair::{Outcome, RepairError, Tools};
use super::seen::Seen;
use crate::cluster::notice::Notice;
use crate::cluster::queue::ApiQueue;
use crate::config::Unprotected;
use crate::host_root::HostRoot;
use crate::metrics::Metrics;
use crate::node::Unenforced;
use crate::policy::asking;
use crate::readiness::{Part, Readiness, Standing};
use crate::rollout::keeper::{Roller, Site, Terms};
use crate::runtime::Client;
use crate::table::member::incarnation;

/// Keeps the pods of one node protected.
#[derive(Debug)]
pub struct Keeper {
    /// The installed plugin.
    pub plugin: Plugin,
    /// The runtime.
    pub runtime: Client,
    /// Our entry in the chain that the runtime has loaded; `None` while there is none.
    pub entry: watch::Receiver<Option<Arc<Entry>>>,
    /// What to do with enrolled pods that run without a tunnel.
    pub policy: Unprotected,
    /// The way to the API server.
    pub api_queue: ApiQueue,
    /// The node's metrics.
    pub metrics: Arc<Metrics>,
    /// The board on which the first reconciliation is noted.
    pub readiness: Readiness,
    /// How running instances get the installed program; `None`: they do not.
    pub rollout: Option<Terms>,
    /// Pods whose network policies must be enforced and are not; `None`: none must.
    pub required: Option<Unenforced>,
}

/// What the loop remembers from one look to the next.
#[derive(Debug)]
struct Memory {
    observer: Observer,
    backoff: Backoff,
    /// Containers that a repair or an upgrade is working on.
    busy: HashSet<String>,
    repairs: JoinSet<(Vec<Repair>, Result<Outcome, RepairError>)>,
    /// Containers that were found to stay without a tunnel, whatever is tried.
    labelled: HashSet<String>,
    thorough_at: Instant,
    rules: Rules,
    /// How thorough the next look is, unless a thorough one is due.
    depth: Depth,
    records: Option<SystemTime>,
    settings: Handing,
    roller: Option<Roller>,
}

/// How running pods get the settings of the entry.
#[derive(Debug)]
struct Handing {
    /// The call of the plugin that is under way.
    call: JoinSet<Result<Refreshed, RepairError>>,
    /// The entry that was handed over last.
    entry: Option<Arc<Entry>>,
    /// When pods are compared with it again.
    due: Instant,
    found: OldSettings,
}

/// When the rules of nf_tables on this node were last compared with the records: whoever loads another rule set, as
/// services for firewalls do when they start, takes ours away.
#[derive(Debug)]
struct Rules {
    /// Changes with each change of any rule.
    generation: u32,
    /// When they may be compared again.
    due: Instant,
}

impl Keeper {
    /// Works until the task is cancelled.
    pub async fn run(mut self) {
        let mut memory = Memory {
            observer: Observer::new(self.runtime.clone(), self.plugin.host.clone()),
            backoff: Backoff::default(),
            busy: HashSet::new(),
            repairs: JoinSet::new(),
            labelled: HashSet::new(),
            thorough_at: SystemClock.now(),
            rules: Rules { generation: 0, due: SystemClock.now() },
            depth: Depth::Thorough,
            records: None,
            settings: Handing {
                call: JoinSet::new(),
                entry: None,
                due: SystemClock.now(),
                found: OldSettings::default(),
            },
            roller: self.rollout.as_ref().map(|terms| Roller::new(terms, &self.plugin)),
        };
        let mut tick = tokio::time::interval(QUICK_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let entry = self.entry.borrow_and_update().clone();
            let Some(entry) = entry else {
                self.readiness.set(Part::Reconciled, Standing::bad("no chain of ours is loaded yet"));
                if self.entry.changed().await.is_err() {
                    return;
                }
                continue;
            };
            self.look(&entry, &mut memory).await;
            memory.depth = self.wait(&entry, &mut memory, &mut tick).await;
        }
    }

    /// Looks once, and begins the repairs.
    async fn look(&self, entry: &Arc<Entry>, memory: &mut Memory) {
        let began = SystemClock.now();
        let depth = if began >= memory.thorough_at { Depth::Thorough } else { memory.depth };
        memory.records = records_changed(&self.plugin.host, entry);
        let seen = match memory.observer.look(entry, self.api_queue.labels(), depth).await {
            Ok(seen) => seen,
            Err(error) => {
                self.metrics.look_failed();
                self.readiness.set(Part::Reconciled, Standing::bad(error.to_string()));
                return;
            }
        };
        let mut plan = plan(&seen);
        if let Some(required) = &self.required {
            plan.repairs.extend(without_policies(required, &self.plugin.host, entry, (&seen, &plan)));
        }
        if depth == Depth::Thorough {
            memory.thorough_at = began + THOROUGH_INTERVAL;
        }
        let there: HashSet<&str> = seen.sandboxes.iter().map(|sandbox| sandbox.id.as_str()).collect();
        memory.backoff.retain(|container| there.contains(container));
        memory.labelled.retain(|container| there.contains(container.as_str()));
        self.metrics.looked(&plan.pods, memory.observer.answers(), SystemClock.now().saturating_duration_since(began));
        let old = memory.settings.found.of_pods(&plan.pods, memory.observer.answers());
        self.metrics.old_settings(old.count());
        self.tell(&plan, &old, memory);
        self.begin(entry, &plan, memory);
        self.hand_over_settings(entry, memory);
        if let Some(roller) = &mut memory.roller {
            roller.look(&self.site(entry), &seen, &plan, &mut memory.busy).await;
        }
        if seen.records.iter().any(|record| record.has_rules) {
            self.look_after_rules(entry, memory);
        }
        self.readiness.set(Part::Reconciled, standing(&plan, &old, memory.roller.as_ref().and_then(Roller::remark)));
    }

    fn site<'a>(&'a self, entry: &'a Arc<Entry>) -> Site<'a> {
        Site {
            plugin: &self.plugin,
            entry,
            api_queue: &self.api_queue,
            metrics: &self.metrics,
            readiness: &self.readiness,
        }
    }

    /// Has the plugin compare running pods with the entry, at once when it has changed, and from time to time because
    /// a runtime goes on with its chain for a moment.
    fn hand_over_settings(&self, entry: &Arc<Entry>, memory: &mut Memory) {
        let now = SystemClock.now();
        let Handing { call, entry: last, due, .. } = &mut memory.settings;
        let is_new = last.as_ref().is_none_or(|last| !Arc::ptr_eq(last, entry));
        if !call.is_empty() || (!is_new && now < *due) {
            return;
        }
        (*last, *due) = (Some(Arc::clone(entry)), now + THOROUGH_INTERVAL);
        let tools = Tools { plugin: self.plugin.clone(), entry: Arc::clone(entry), runtime: self.runtime.clone() };
        call.spawn(async move { tools.refresh().await });
    }

    fn handed_over(&self, outcome: Result<Refreshed, RepairError>, memory: &mut Memory) {
        let refreshed = match outcome {
            Ok(refreshed) => refreshed,
            Err(error) => {
                self.metrics.repaired(REFRESH, false);
                tracing::warn!(%error, "cannot hand changed settings to running pods");
                return;
            }
        };
        if !refreshed.refreshed.is_empty() {
            tracing::info!(pods = ?refreshed.refreshed, "running pods have the changed settings");
        }
        for failure in &refreshed.failed {
            tracing::warn!(pod = failure.pod, error = failure.why, "a running pod keeps its settings");
        }
        refreshed.refreshed.iter().for_each(|_| self.metrics.repaired(REFRESH, true));
        refreshed.failed.iter().for_each(|_| self.metrics.repaired(REFRESH, false));
        memory.settings.found = OldSettings::found(refreshed);
    }

    /// Waits for the next look: a tick, the end of a repair, a changed record or pod, another chain. Returns how
    /// thorough it has to be.
    async fn wait(&mut self, entry: &Arc<Entry>, memory: &mut Memory, tick: &mut tokio::time::Interval) -> Depth {
        let mut records = tokio::time::interval(RECORDS_INTERVAL);
        records.tick().await;
        loop {
            tokio::select! {
                _ = tick.tick() => return Depth::Glance,
                _ = self.entry.changed() => return Depth::Quick,
                () = self.api_queue.pods_changed() => {
                    // A change often comes with several others.
                    tokio::time::sleep(SETTLE).await;
                    return Depth::Quick;
                }
                _ = records.tick() => {
                    if records_changed(&self.plugin.host, entry) != memory.records {
                        return Depth::Quick;
                    }
                }
                Some(ended) = memory.settings.call.join_next() => {
                    if let Ok(outcome) = ended {
                        self.handed_over(outcome, memory);
                        return Depth::Glance;
                    }
                }
                Some(step) = Roller::step(&mut memory.roller) => {
                    // What follows is started here: the next look may be two seconds away.
                    let ended = memory.roller.as_mut().and_then(|roller| roller.handle(&self.site(entry), step, &mut memory.busy));
                    if let Some(container) = ended {
                        memory.observer.forget(&container);
                    }
                }
                Some(ended) = memory.repairs.join_next() => {
                    if let Ok((repairs, outcome)) = ended {
                        self.ended(&repairs, &outcome, memory);
                    }
                    // There may be more to repair than fits at once.
                    if memory.repairs.len() <= PARALLEL / 2 {
                        return Depth::Quick;
                    }
                }
            }
        }
    }

    /// Begins the repairs that are due and not in progress.
    fn begin(&self, entry: &Arc<Entry>, plan: &Plan, memory: &mut Memory) {
        let now = SystemClock.now();
        let tools = Tools { plugin: self.plugin.clone(), entry: Arc::clone(entry), runtime: self.runtime.clone() };
        let mut dead = Vec::new();
        for repair in &plan.repairs {
            let container = repair.action.container();
            if memory.busy.contains(container) || !memory.backoff.is_due(container, now) {
                continue;
            }
            match repair.action {
                // One call of the plugin restarts all that are dead.
                Action::Mend { .. } => {
                    dead.push(repair.clone());
                    continue;
                }
                Action::Attach { .. } if self.policy != Unprotected::Attach => {
                    self.leave_to_operator(repair, memory, now);
                    continue;
                }
                _ => {}
            }
            if memory.repairs.len() >= PARALLEL {
                // The end of a repair is followed by another look.
                break;
            }
            tracing::info!(pod = %name(&repair.pod), action = repair.action.name(), reason = %repair.reason, "repair");
            memory.busy.insert(container.to_owned());
            let (tools, repair, network) = (tools.clone(), repair.clone(), memory.observer.network(container));
            memory.repairs.spawn(async move {
                let outcome = tools.carry_out(&repair, network).await;
                (vec![repair], outcome)
            });
        }
        if !dead.is_empty() {
            memory.busy.extend(dead.iter().map(|repair| repair.action.container().to_owned()));
            memory.repairs.spawn(async move {
                let outcome = tools.mend().await.map(|()| Outcome::Done);
                (dead, outcome)
            });
        }
    }

    /// Has the plugin put back the rules that hold pods' traffic, if any rule of the node changed.
    fn look_after_rules(&self, entry: &Arc<Entry>, memory: &mut Memory) {
        let now = SystemClock.now();
        // Without nf_tables there are no such rules.
        let Ok(generation) = nftables::generation() else { return };
        if generation == memory.rules.generation || now < memory.rules.due {
            return;
        }
        memory.rules = Rules { generation, due: now + RULES_INTERVAL };
        let tools = Tools { plugin: self.plugin.clone(), entry: Arc::clone(entry), runtime: self.runtime.clone() };
        memory.repairs.spawn(async move { (Vec::new(), tools.mend().await.map(|()| Outcome::Done)) });
    }

    /// Does with an unprotected pod what the operator chose instead of an attachment.
    fn leave_to_operator(&self, repair: &Repair, memory: &mut Memory, now: Instant) {
        match self.policy {
            Unprotected::Evict => {
                self.api_queue.evict(&repair.pod);
                // An eviction takes time, and may be refused for a while by a disruption budget.
                memory.backoff.failed(repair.action.container(), now);
            }
            Unprotected::Label => self.label(repair, memory),
            Unprotected::Attach | Unprotected::Report => {}
        }
    }

    fn label(&self, repair: &Repair, memory: &mut Memory) {
        if memory.labelled.insert(repair.action.container().to_owned()) {
            self.api_queue.label(&repair.pod, true);
        }
    }

    fn ended(&self, repairs: &[Repair], outcome: &Result<Outcome, RepairError>, memory: &mut Memory) {
        if let ([], Err(error)) = (repairs, outcome) {
            tracing::warn!(%error, "cannot compare the rules of the node with the records");
        }
        for repair in repairs {
            let container = repair.action.container();
            memory.busy.remove(container);
            self.metrics.repaired(repair.action.name(), outcome.is_ok());
            match outcome {
                Ok(outcome) => {
                    memory.backoff.succeeded(container);
                    memory.observer.forget(container);
                    if *outcome == Outcome::Done
                        && matches!(repair.action, Action::Attach { .. } | Action::Reattach { .. })
                    {
                        tracing::info!(pod = %name(&repair.pod), "attached in place");
                        self.api_queue.report(Notice::attached(&repair.pod));
                        if memory.labelled.remove(container) {
                            self.api_queue.label(&repair.pod, false);
                        }
                    }
                }
                Err(error) => {
                    let count = memory.backoff.failed(container, SystemClock.now());
                    tracing::warn!(pod = %name(&repair.pod), action = repair.action.name(), %error, count, "repair failed");
                    if !repair.pod.name.is_empty() {
                        self.api_queue.report(Notice::repair_failed(&repair.pod, error));
                    }
                }
            }
        }
    }

    /// Reports how the pods stand. Repetitions are left out on the way.
    fn tell(&self, plan: &Plan, old: &OldSettings, memory: &Memory) {
        let reasons: BTreeMap<&str, Reason> =
            plan.repairs.iter().map(|repair| (repair.action.container(), repair.reason)).collect();
        let now = SystemClock.unix_seconds();
        for Stand { sandbox, pod, protection } in &plan.pods {
            let notice = match protection {
                Protection::NotEnrolled => None,
                Protection::OptedOut => Some(Notice::opted_out(pod)),
                Protection::Undecided(why) => Some(Notice::undecided(pod, why)),
                Protection::Protected => memory.observer.answers().get(sandbox).and_then(|status| {
                    let expiring = Notice::certificate_expiring(pod, status, now);
                    expiring.or_else(|| Notice::not_post_quantum(pod, status))
                }),
                Protection::Waiting(why) if why.is_empty() => None,
                Protection::Waiting(why) => Some(Notice::no_certificate(pod, why)),
                Protection::Closed(why) => Some(Notice::closed(pod, why)),
                Protection::Stranded(why) => Some(Notice::stranded(pod, *why)),
                // Whether it answers again is watched, and told if it does not.
                Protection::Unprotected(Reason::NoInstance)
                    if memory.roller.as_ref().is_some_and(|roller| roller.is_upgrading(sandbox)) =>
                {
                    None
                }
                Protection::Unprotected(reason) => {
                    let reason = reasons.get(sandbox.as_str()).copied().unwrap_or(*reason);
                    Some(Notice::unprotected(pod, &reason.to_string(), self.policy))
                }
                Protection::CrashLooping { restarts, delay } => Some(Notice::crash_looping(pod, *restarts, *delay)),
            };
            let old = old.of(&pod.namespace, &pod.name).map(|what| Notice::old_settings(pod, &what));
            notice.into_iter().chain(old).for_each(|notice| self.api_queue.report(notice));
        }
    }
}

/// Attachments to make again, because a network policy selects their pods and nothing enforces it. The contract counts,
/// and not the report alone, which may be older than the last repair.
fn without_policies(
    required: &Unenforced,
    host: &HostRoot,
    entry: &Entry,
    (seen, plan): (&Seen, &Plan),
) -> Vec<Repair> {
    // With a chain from before they would come out as they are.
    if !entry.enforces_policies {
        return Vec::new();
    }
    let (pods, state_dir) = (required.now(), host.resolve(&entry.state_dir));
    plan.without_policies(&seen.records, |record| {
        pods.contains(&incarnation(&record.pod.uid))
            && asking::is_unasked(&Files::new(&state_dir, &record.key).record(), true)
    })
}

/// The node is ready all the same: these pods do no harm, and others are not like them.
fn standing(plan: &Plan, old: &OldSettings, remark: Option<String>) -> Standing {
    let mut text = "sandboxes and records are compared".to_owned();
    let opted_out = |stand: &Stand| (stand.protection == Protection::OptedOut).then(|| name(&stand.pod));
    if let Some(pods) = named(plan.pods.iter().filter_map(opted_out).collect()) {
        text += &format!("; {pods} opted out by annotation");
    }
    let stranded = |stand: &Stand| match stand.protection {
        Protection::Stranded(why) => Some(format!("{} ({why})", name(&stand.pod))),
        _ => None,
    };
    let old = old.line();
    for line in old.iter().chain(&remark) {
        text += &format!("; {line}");
    }
    match named(plan.pods.iter().filter_map(stranded).collect()) {
        None if old.is_some() => Standing::good(text).advice(old_settings::ADVICE),
        None if remark.is_some() => Standing::good(text).advice("nebula-cni-agent upgrade status says more"),
        None => Standing::good(text),
        Some(pods) => Standing::good(format!("{text}; {pods} waiting for a token"))
            .advice("delete the pods that stay so: no init container will show their tokens again"),
    }
}

/// How many pods there are, and the first of them; `None` if there are none.
fn named(mut pods: Vec<String>) -> Option<String> {
    let count = pods.len();
    pods.truncate(SHOWN);
    let more = if count > SHOWN { ", and others" } else { "" };
    (count > 0).then(|| format!("{count} pod(s) ({}{more})", pods.join(", ")))
}

fn name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

/// How the metric of repairs names it.
const REFRESH: &str = "refresh";
const QUICK_INTERVAL: Duration = Duration::from_secs(2);
const THOROUGH_INTERVAL: Duration = Duration::from_secs(30);
/// What others do to the rules of a node all the time, such as kube-proxy, must not cost more than a part of this.
const RULES_INTERVAL: Duration = Duration::from_secs(30);
const RECORDS_INTERVAL: Duration = Duration::from_millis(500);
const SETTLE: Duration = Duration::from_millis(100);
/// Repairs at a time. Each starts a process and asks the CA.
const PARALLEL: usize = 8;
/// Pods that are named where all are counted.
const SHOWN: usize = 10;

#[cfg(test)]
mod tests {
    use nebula_cni_plugin::request::Key;
    use serde_json::{Value, json};

    use super::super::plan::Stranded;
    use super::super::seen::{Attachment, Instance};
    use super::*;

    fn stand(name: &str, protection: Protection) -> Stand {
        Stand {
            sandbox: name.into(),
            pod: Pod { namespace: "shop".into(), name: name.into(), uid: name.into() },
            protection,
        }
    }

    #[test]
    fn a_pod_without_its_policies_is_attached_again_once_the_chain_enforces_them() {
        let dir = tempfile::tempdir().unwrap();
        let entry = |policy: Value| {
            let entry = json!({"type": "nebula-cni-plugin", "stateDir": dir.path(), "overlay": ["10.244.0.0/16"],
                "capture": {"policy": policy}, "ca": {"url": "https://ca", "tlsCaFile": "/x", "tokenFile": "/y"}});
            Entry::of_list(&json!({"name": "net", "cniVersion": "1.0.0", "plugins": [entry]})).unwrap()
        };
        let pod = |name: &str| stand(name, Protection::Protected).pod;
        let record = |name: &str, contract: &str| {
            let key = Key { network: "net".into(), container_id: name.into(), ifname: "eth0".into() };
            let files = Files::new(dir.path(), &key);
            std::fs::create_dir_all(files.dir()).unwrap();
            std::fs::write(files.record(), "{}").unwrap();
            std::fs::write(files.launch(), contract).unwrap();
            Attachment {
                key,
                pod: pod(name),
                is_complete: true,
                has_rules: true,
                netns_id: (4, 1),
                has_netns: true,
                instance: Instance::Silent(String::new()),
                silent_for: Duration::ZERO,
                has_device: None,
                restarts: 0,
                crash_loop: None,
            }
        };
        let records = vec![record("web", r#"{"version": 1}"#), record("other", r#"{"version": 1}"#)];
        let seen = Seen { records, ..Seen::default() };
        let stands = ["web", "other"].map(|name| stand(name, Protection::Protected));
        let plan = Plan { pods: stands.to_vec(), repairs: Vec::new() };
        let (required, host) = (Unenforced::default(), HostRoot::default());
        let found = |required: &Unenforced, policy| {
            let repairs = without_policies(required, &host, &entry(policy), (&seen, &plan));
            repairs.into_iter().map(|repair| repair.pod.name).collect::<Vec<_>>()
        };
        let enforcing = || json!({"clear": "enforce"});
        assert!(found(&required, enforcing()).is_empty(), "no policy selects any of them");
        required.set([incarnation("web")].into());
        assert_eq!(found(&required, enforcing()), ["web"]);
        assert!(found(&required, json!(true)).is_empty(), "the runtime still has the chain from before");
    }

    #[test]
    fn the_status_names_stranded_pods_and_stays_good() {
        let well = Plan { pods: vec![stand("web", Protection::Protected)], repairs: Vec::new() };
        assert_eq!(
            standing(&well, &OldSettings::default(), None),
            Standing::good("sandboxes and records are compared")
        );
        let mut plan = well;
        plan.pods.push(stand("old", Protection::OptedOut));
        let told = standing(&plan, &OldSettings::default(), None);
        assert!(told.ok && told.reason.ends_with("1 pod(s) (shop/old) opted out by annotation"), "{told:?}");
        plan.pods.extend((0..12).map(|n| stand(&format!("db-{n}"), Protection::Stranded(Stranded::CertificateLost))));
        let told = standing(&plan, &OldSettings::default(), None);
        assert!(
            told.ok && told.reason.contains("12 pod(s)") && told.reason.contains("shop/db-9 (its instance"),
            "{told:?}"
        );
        assert!(!told.reason.contains("db-10") && told.advice.contains("delete"), "{told:?}");
        let paused = standing(&Plan::default(), &OldSettings::default(), Some("the roll-out is paused".into()));
        assert!(paused.ok && paused.reason.ends_with("; the roll-out is paused"), "{paused:?}");
        assert!(paused.advice.contains("upgrade status"), "{paused:?}");
    }
}
