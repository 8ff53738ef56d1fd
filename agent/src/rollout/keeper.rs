//! Connects the roll-out with the reconciliation: takes what a look at the node found, starts upgrades, and tells what
//! became of them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::instance_status::{InstanceState, Status};
use nebula_cni_plugin::request::Key;
use tokio::task::JoinSet;

use super::files::Files;
use super::gate::{self, Before, Sample};
use super::plan::{Instance, Outcome, Policy, Rollout, Start, Told};
use super::program::{KnownPrograms, ProgramId};
use super::state::State;
use super::upgrade::{Unseen, Upgrade, installed};
use crate::cluster::notice::Notice;
use crate::cluster::queue::ApiQueue;
use crate::metrics::Metrics;
use crate::readiness::{Part, Readiness};
use crate::reconcile::entry::Entry;
use crate::reconcile::plan::{Plan, Repair};
use crate::reconcile::program::Plugin;
use crate::reconcile::seen::{self, Attachment, Seen};
use crate::retirement::Retirement;

/// What a roll-out needs of the agent that it is a part of.
#[derive(Debug, Clone)]
pub struct Terms {
    /// What the operator chose.
    pub policy: Policy,
    /// Whether the agent may still change the node.
    pub retirement: Retirement,
}

/// What the reconciliation works with.
#[derive(Debug)]
pub(crate) struct Site<'a> {
    pub(crate) plugin: &'a Plugin,
    pub(crate) entry: &'a Arc<Entry>,
    pub(crate) api_queue: &'a ApiQueue,
    pub(crate) metrics: &'a Metrics,
    pub(crate) readiness: &'a Readiness,
}

/// Rolls the installed program out on this node.
#[derive(Debug)]
pub(crate) struct Roller {
    rollout: Rollout,
    retirement: Retirement,
    files: Files,
    /// What is in the file.
    saved: State,
    programs: Arc<KnownPrograms>,
    /// What each process runs, by container: a process keeps its program.
    running: HashMap<String, (i32, ProgramId)>,
    /// Where the drops of each process were first counted, by container.
    drops: HashMap<String, Drops>,
    keys: HashMap<String, Key>,
    steps: JoinSet<Step>,
}

#[derive(Debug, Clone, Copy)]
struct Drops {
    pid: i32,
    at: Instant,
    count: u64,
}

/// A part of an upgrade that is done.
#[derive(Debug)]
pub(crate) struct Step {
    container: String,
    done: Done,
}

#[derive(Debug)]
enum Done {
    /// What the instance was before, to be noted before anything is changed.
    Looked(Box<Start>, Result<Box<Sample>, Unseen>),
    Ended(Outcome),
}

impl Roller {
    /// Goes on from what an earlier agent left on this node.
    pub(crate) fn new(terms: &Terms, plugin: &Plugin) -> Self {
        Self::with_files(terms, Files::new(&plugin.host))
    }

    fn with_files(terms: &Terms, files: Files) -> Self {
        let state = files.state(SystemClock.unix_seconds());
        if let Some(pause) = &state.paused {
            tracing::warn!(why = pause.why, "the roll-out of the instances' program is paused");
        }
        Self {
            rollout: Rollout::new(terms.policy, state.clone()),
            retirement: terms.retirement.clone(),
            files,
            saved: state,
            programs: Arc::default(),
            running: HashMap::new(),
            drops: HashMap::new(),
            keys: HashMap::new(),
            steps: JoinSet::new(),
        }
    }

    /// Takes what a look at the node found, and starts what is due. `busy` are the containers that something works on;
    /// those of upgrades are added.
    pub(crate) async fn look(&mut self, site: &Site<'_>, seen: &Seen, plan: &Plan, busy: &mut HashSet<String>) {
        if let Some(request) = self.files.requested() {
            let told = self.rollout.request(request, SystemClock.unix_seconds());
            self.tell(site, &told);
            if self.save() {
                self.files.has_done();
            }
        }
        self.keys = seen.records.iter().map(|record| (record.key.container_id.clone(), record.key.clone())).collect();
        let Some(wanted) = self.identify(site, seen).await else { return };
        self.count_drops(seen);
        self.rollout.looked(&wanted, self.instances(seen, &plan.repairs));
        let told = self.rollout.finish();
        self.tell(site, told.as_slice());
        self.advance(site, busy);
    }

    /// Waits for a part of an upgrade; `None` if there is none under way.
    pub(crate) async fn step(roller: &mut Option<Self>) -> Option<Step> {
        // An upgrade that panicked is noted as under way, and judged by the next agent.
        roller.as_mut()?.steps.join_next().await?.ok()
    }

    /// Goes on after a part of an upgrade, and starts what is due. Returns the container whose upgrade has ended.
    pub(crate) fn handle(&mut self, site: &Site<'_>, step: Step, busy: &mut HashSet<String>) -> Option<String> {
        let Step { container, done } = step;
        let outcome = match done {
            Done::Looked(start, looked) => self.begin(site, *start, looked).err(),
            Done::Ended(outcome) => Some(outcome),
        };
        let outcome = outcome?;
        busy.remove(&container);
        self.running.remove(&container);
        log(&container, &outcome);
        match &outcome {
            Outcome::Upgraded(_) => site.metrics.upgraded("upgraded"),
            Outcome::RolledBack(_) => site.metrics.upgraded("rolled_back"),
            Outcome::Refused(_) | Outcome::NotRolledBack(..) => site.metrics.upgraded("failed"),
            Outcome::Unchanged | Outcome::Postponed(_) | Outcome::Gone => {}
        }
        let told = self.rollout.ended(&container, outcome, SystemClock.now(), SystemClock.unix_seconds());
        self.tell(site, &told);
        self.advance(site, busy);
        Some(container)
    }

    /// Whether the program of this container's instance is being replaced, or was and is watched.
    pub(crate) fn is_upgrading(&self, container: &str) -> bool {
        self.rollout.is_running(container)
    }

    /// One line for the status of the node, if somebody should look after the roll-out.
    pub(crate) fn remark(&self) -> Option<String> {
        let pause = self.rollout.state().paused.as_ref()?;
        Some(format!("the roll-out of the instances' program is paused ({})", pause.why))
    }

    /// Starts what is due, and writes what changed.
    fn advance(&mut self, site: &Site<'_>, busy: &mut HashSet<String>) {
        let hold = self.hold(site);
        let starts = self.rollout.next(SystemClock.now(), hold.as_deref(), |container| busy.contains(container));
        for start in starts {
            let container = start.container.clone();
            busy.insert(container.clone());
            let upgrade = self.upgrade(site, &container);
            self.steps.spawn(async move {
                let looked = match upgrade {
                    Some(upgrade) => upgrade.look().await.map(Box::new),
                    None => Err(Unseen::Gone),
                };
                Step { container, done: Done::Looked(Box::new(start), looked) }
            });
        }
        let state = self.rollout.state();
        site.metrics.outdated(state.outdated, state.paused.is_some());
        self.save();
    }

    /// Notes what the instance was, and has its program replaced.
    ///
    /// # Errors
    /// Returns what became of the upgrade if nothing is to be replaced.
    fn begin(&mut self, site: &Site<'_>, start: Start, looked: Result<Box<Sample>, Unseen>) -> Result<(), Outcome> {
        let (before, has_begun) = match (looked, start.before) {
            (Err(Unseen::Gone), _) => return Err(Outcome::Gone),
            (Ok(sample), Some(before)) if sample.program == start.wanted => (before, true),
            // It may be the new program that does not answer.
            (Err(Unseen::Silent(_)), Some(before)) => (before, true),
            (Ok(sample), _) if sample.program == start.wanted => return Err(Outcome::Unchanged),
            (Ok(sample), _) if !carries(&sample.status) => {
                return Err(Outcome::Postponed("its tunnel is closed".to_owned()));
            }
            (Ok(sample), _) => (Before::of(&sample, self.drops_per_minute(&start.container, &sample)), false),
            (Err(Unseen::Silent(why)), None) => return Err(Outcome::Postponed(why)),
        };
        if let Some(why) = self.hold(site).filter(|_| !has_begun) {
            return Err(Outcome::Postponed(why));
        }
        self.rollout.began(&start.container, before.clone());
        // What is not noted would not be judged if this agent were killed now.
        if !self.save() {
            return Err(Outcome::Postponed("the state of the roll-out cannot be written".to_owned()));
        }
        let Some(upgrade) = self.upgrade(site, &start.container) else { return Err(Outcome::Gone) };
        tracing::info!(pod = %format!("{}/{}", start.pod.namespace, start.pod.name), program = start.wanted.short(), "upgrade");
        self.steps.spawn(async move {
            let outcome = upgrade.carry_out(&before, &start.wanted, start.watch, has_begun).await;
            Step { container: start.container, done: Done::Ended(outcome) }
        });
        Ok(())
    }

    /// What has to be awaited before any instance is upgraded.
    fn hold(&self, site: &Site<'_>) -> Option<String> {
        if self.retirement.has_begun() {
            return Some("an uninstallation is under way".to_owned());
        }
        // The self-test shows that both programs run on this node, and fit together.
        for part in [Part::Programs, Part::SelfTest] {
            if !site.readiness.is_good(part) {
                return Some(format!("the condition {}", part.name()));
            }
        }
        let other =
            site.entry.instance.as_ref().filter(|path| site.plugin.host.resolve(path) != installed(site.plugin));
        other.map(|path| format!("the chain entry names another program of instances: {}", path.display()))
    }

    fn upgrade(&self, site: &Site<'_>, container: &str) -> Option<Upgrade> {
        Some(Upgrade {
            plugin: site.plugin.clone(),
            state_dir: site.entry.state_dir.clone(),
            key: self.keys.get(container)?.clone(),
            programs: Arc::clone(&self.programs),
        })
    }

    /// Finds out which program is installed, and what the instances run; `None` if the first cannot be read.
    async fn identify(&mut self, site: &Site<'_>, seen: &Seen) -> Option<ProgramId> {
        let pids: HashMap<&str, i32> =
            seen.records.iter().filter_map(|one| Some((one.key.container_id.as_str(), pid(one)?))).collect();
        self.running.retain(|container, (pid, _)| pids.get(container.as_str()) == Some(pid));
        let new: Vec<(String, i32, Upgrade)> = pids
            .into_iter()
            .filter(|(container, _)| !self.running.contains_key(*container))
            .filter_map(|(container, pid)| Some((container.to_owned(), pid, self.upgrade(site, container)?)))
            .collect();
        let (programs, path) = (Arc::clone(&self.programs), installed(site.plugin));
        let identified = tokio::task::spawn_blocking(move || {
            let wanted = programs.identify(&path).ok();
            let found = new.into_iter().filter_map(|(container, pid, upgrade)| {
                let program = upgrade.program_now(pid).ok()?;
                Some((container, (pid, program)))
            });
            (wanted, found.collect::<Vec<_>>())
        });
        let (wanted, found) = identified.await.ok()?;
        self.running.extend(found);
        wanted
    }

    fn instances(&self, seen: &Seen, repairs: &[Repair]) -> Vec<Instance> {
        let to_repair: HashSet<&str> = repairs.iter().map(|repair| repair.action.container()).collect();
        let instance = |record: &Attachment| {
            let container = &record.key.container_id;
            let status = status(record);
            Instance {
                container: container.clone(),
                pod: record.pod.clone(),
                program: self.running.get(container).map(|(_, program)| program.clone()),
                is_well: record.is_complete
                    && record.has_netns
                    && record.crash_loop.is_none()
                    && status.is_some_and(carries)
                    && !to_repair.contains(container.as_str()),
                tunnels: status.map(|status| status.tunnels.len()).unwrap_or_default(),
            }
        };
        seen.records.iter().map(instance).collect()
    }

    fn count_drops(&mut self, seen: &Seen) {
        let (now, before) = (SystemClock.now(), std::mem::take(&mut self.drops));
        for record in &seen.records {
            let (Some(pid), Some(status)) = (pid(record), status(record)) else { continue };
            let container = &record.key.container_id;
            let first = before.get(container).copied().filter(|drops| drops.pid == pid);
            let first = first.unwrap_or_else(|| Drops { pid, at: now, count: gate::drops(status) });
            self.drops.insert(container.clone(), first);
        }
    }

    /// How many packets an instance dropped in a minute; 0 if it was not seen for long enough.
    fn drops_per_minute(&self, container: &str, sample: &Sample) -> u64 {
        let Some(first) = self.drops.get(container).filter(|drops| drops.pid == sample.pid) else { return 0 };
        let seconds = SystemClock.now().saturating_duration_since(first.at).as_secs();
        if seconds < RATE_NEEDS.as_secs() {
            return 0;
        }
        gate::drops(&sample.status).saturating_sub(first.count).saturating_mul(60) / seconds
    }

    /// Whether the file holds the state.
    fn save(&mut self) -> bool {
        let state = self.rollout.state();
        if *state == self.saved {
            return true;
        }
        match self.files.save(state) {
            Ok(()) => self.saved = state.clone(),
            Err(error) => tracing::warn!(%error, "cannot write the state of the roll-out"),
        }
        *self.rollout.state() == self.saved
    }

    fn tell(&self, site: &Site<'_>, told: &[Told]) {
        let version = &self.rollout.state().version;
        for told in told {
            if let Told::Paused(why) = told {
                tracing::warn!(why, "the roll-out of the instances' program is paused");
            }
            site.api_queue.report(Notice::of_rollout(told, version));
        }
    }
}

/// Whether the instance carries the packets of its pod with a certificate.
fn carries(status: &Status) -> bool {
    matches!(status.state, InstanceState::Running | InstanceState::Provisional) && status.certificate.is_some()
}

fn status(record: &Attachment) -> Option<&Status> {
    match &record.instance {
        seen::Instance::Answers(status) => Some(status),
        seen::Instance::Silent(_) => None,
    }
}

fn pid(record: &Attachment) -> Option<i32> {
    status(record)?.pid.filter(|pid| *pid > 0)
}

fn log(container: &str, outcome: &Outcome) {
    match outcome {
        Outcome::Upgraded(version) => tracing::info!(container, version, "upgraded"),
        Outcome::RolledBack(fault) => tracing::warn!(container, %fault, "rolled back"),
        Outcome::NotRolledBack(fault, why) => tracing::error!(container, %fault, why, "cannot roll back"),
        Outcome::Refused(why) => tracing::warn!(container, why, "not upgraded"),
        Outcome::Postponed(why) => tracing::info!(container, why, "upgrade postponed"),
        Outcome::Unchanged | Outcome::Gone => {}
    }
}

/// Less is no rate: an agent that has just started has seen each instance once.
const RATE_NEEDS: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
