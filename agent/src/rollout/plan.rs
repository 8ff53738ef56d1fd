//! Decides which instances are upgraded next, and what follows from what became of them. Pure: nothing is read or
//! changed here, and time is an argument.
//!
//! One canary first; when it has kept the program, several at a time. A failure pauses the roll-out.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nebula_cni_contract::launch::Pod;

use super::gate::{Before, Fault, shortened};
use super::program::ProgramId;
use super::state::{Failed, Failure, MAX_UNDER_WAY, Pause, State, UnderWay};
use crate::reconcile::backoff::Backoff;

/// What the operator chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// How many instances are upgraded one by one, and watched for long, before the others.
    pub canary: u32,
    /// How many of the others are upgraded or watched at a time; 0: none is ever upgraded, and pods get the new program
    /// when they are made again.
    pub parallel: u32,
    /// Whether the first instance that does not keep the program pauses the roll-out.
    pub pause_on_failure: bool,
    /// For how many seconds a canary is watched.
    pub watch_seconds: u32,
}

impl Policy {
    /// What holds where the operator chose nothing. 100 instances are upgraded within a minute: the canary takes 1 s
    /// and is watched for 10, the other 99 in 13 rounds of 8 take 1 s each and are watched for 2, which makes 50 s.
    pub const DEFAULT: Self = Self { canary: 1, parallel: 8, pause_on_failure: true, watch_seconds: 10 };
    /// The largest values.
    pub const MOST: Self = Self { canary: 100, parallel: 64, pause_on_failure: true, watch_seconds: 600 };

    fn watch(self, is_canary: bool) -> Duration {
        let watch = Duration::from_secs(self.watch_seconds.into());
        if is_canary { watch } else { watch.min(SHORT_WATCH) }
    }
}

/// An instance of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Its container.
    pub container: String,
    /// Its pod.
    pub pod: Pod,
    /// The program that it runs; `None` if that is not known, as of one that does not answer.
    pub program: Option<ProgramId>,
    /// Whether it carries the packets of its pod with a certificate, and nothing has to be repaired.
    pub is_well: bool,
    /// Number of its tunnels.
    pub tunnels: usize,
}

impl Instance {
    fn is_outdated(&self, wanted: &ProgramId) -> bool {
        self.program.as_ref().is_some_and(|program| program != wanted)
    }
}

/// An instance that is to be upgraded now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// Its container.
    pub container: String,
    /// Its pod.
    pub pod: Pod,
    /// The program that it gets.
    pub wanted: ProgramId,
    /// For how long it is watched.
    pub watch: Duration,
    /// What it was before, if an agent that has ended began with it.
    pub before: Option<Before>,
}

/// What became of an upgrade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The instance keeps the new program, which is of this version.
    Upgraded(String),
    /// It ran that program already.
    Unchanged,
    /// Not now, for this reason. Nothing has changed.
    Postponed(String),
    /// The pod ended.
    Gone,
    /// It was refused for this reason, and the instance went on all the time.
    Refused(String),
    /// It has the old program again.
    RolledBack(Fault),
    /// It does not keep the new program, and could not get the one before back for this reason.
    NotRolledBack(Fault, String),
}

/// Something that people are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// A pod keeps the program.
    Upgraded(Pod),
    /// A pod does not get the program.
    Failed(Pod, Failure, String),
    /// The canaries kept the program; so many instances follow.
    CanaryPassed(usize),
    /// No further instance is upgraded, for this reason.
    Paused(String),
    /// The roll-out goes on.
    Resumed,
    /// Nothing is left to do: so many were upgraded, and so many have another program.
    Finished(u32, usize),
}

/// What an operator asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Upgrade no further instance.
    Pause,
    /// Go on.
    Resume,
}

/// The roll-out of one node.
#[derive(Debug)]
pub struct Rollout {
    policy: Policy,
    state: State,
    instances: Vec<Instance>,
    /// The program that each instance that is being upgraded gets, by container, and its pod.
    running: BTreeMap<String, (ProgramId, Pod)>,
    backoff: Backoff,
}

impl Rollout {
    /// Goes on from what an earlier agent left.
    #[must_use]
    pub fn new(policy: Policy, state: State) -> Self {
        Self { policy, state, instances: Vec::new(), running: BTreeMap::new(), backoff: Backoff::default() }
    }

    /// What has to outlive the agent.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Whether an upgrade of this container's instance is under way.
    #[must_use]
    pub fn is_running(&self, container: &str) -> bool {
        self.running.contains_key(container)
    }

    /// Does what the operator asks for, at `now` in seconds since 1970.
    pub fn request(&mut self, request: Request, now: i64) -> Vec<Told> {
        match (request, self.state.paused.is_some()) {
            (Request::Pause, _) => self.pause(true, PAUSED_BY_OPERATOR.to_owned(), now),
            (Request::Resume, false) if self.state.failed.is_empty() => Vec::new(),
            (Request::Resume, _) => {
                self.state.resume();
                vec![Told::Resumed]
            }
        }
    }

    /// Takes what a look at the node found: the installed program and all instances.
    pub fn looked(&mut self, wanted: &ProgramId, instances: Vec<Instance>) {
        if self.state.program.as_ref() != Some(wanted) {
            self.state.begin(wanted.clone());
            self.backoff = Backoff::default();
        }
        let is_there = |container: &str| instances.iter().any(|one| one.container == container);
        self.state.failed.retain(|container, _| is_there(container));
        let running = &self.running;
        self.state.under_way.retain(|container, _| running.contains_key(container) || is_there(container));
        self.backoff.retain(is_there);
        self.instances = instances;
        self.count();
    }

    /// Which instances are to be upgraded now. `is_blocked` says of a container whether something else works on it;
    /// `hold` is what has to be awaited before any is upgraded.
    pub fn next(&mut self, now: Instant, hold: Option<&str>, is_blocked: impl Fn(&str) -> bool) -> Vec<Start> {
        self.state.waits_for = hold.map(shortened).filter(|_| self.state.outdated > 0);
        let Some(wanted) = self.state.program.clone() else { return Vec::new() };
        if hold.is_some() {
            return Vec::new();
        }
        // What was begun is judged in any case.
        let begins = self.state.paused.is_none() && self.policy.parallel > 0;
        let is_canary = self.state.canaries_passed < self.policy.canary;
        let most = match (begins, is_canary) {
            (true, true) => 1,
            (true, false) => self.policy.parallel.min(Policy::MOST.parallel),
            (false, _) => Policy::MOST.parallel,
        };
        let room = usize::try_from(most).unwrap_or(MAX_UNDER_WAY).saturating_sub(self.running.len());
        if room == 0 {
            return Vec::new();
        }
        let mut due: Vec<(&Instance, Option<&UnderWay>)> = self
            .instances
            .iter()
            .map(|one| (one, self.state.under_way.get(&one.container)))
            // What an agent that was killed began with is judged, whatever it runs.
            .filter(|(one, under_way)| under_way.is_some() || (begins && one.is_outdated(&wanted) && one.is_well))
            .filter(|(one, _)| self.may_try(one))
            .filter(|(one, _)| self.backoff.is_due(&one.container, now) && !is_blocked(&one.container))
            .collect();
        // The best canary has tunnels, by which its new program can be judged.
        due.sort_by_key(|(one, under_way)| (under_way.is_none(), one.tunnels == 0));
        let start = |(one, under_way): (&Instance, Option<&UnderWay>)| Start {
            container: one.container.clone(),
            pod: one.pod.clone(),
            wanted: wanted.clone(),
            watch: self.policy.watch(is_canary),
            before: under_way.map(|under_way| under_way.before.clone()),
        };
        let starts: Vec<Start> = due.into_iter().take(room).map(start).collect();
        for start in &starts {
            self.running.insert(start.container.clone(), (wanted.clone(), start.pod.clone()));
        }
        if !starts.is_empty() {
            self.state.is_finished = false;
        }
        starts
    }

    /// Takes what an instance was, right before its program is replaced.
    pub fn began(&mut self, container: &str, before: Before) {
        if let Some((_, pod)) = self.running.get(container) {
            let under_way = UnderWay { pod: name(pod), before };
            self.state.under_way.insert(container.to_owned(), under_way);
        }
    }

    /// Takes what became of an upgrade. Returns what people are told.
    pub fn ended(&mut self, container: &str, outcome: Outcome, at: Instant, now: i64) -> Vec<Told> {
        let Some((wanted, pod)) = self.running.remove(container) else { return Vec::new() };
        self.state.under_way.remove(container);
        if self.state.program.as_ref() != Some(&wanted) {
            // Another program was installed meanwhile; the next look shows what this instance has.
            return Vec::new();
        }
        let mut told = Vec::new();
        match outcome {
            Outcome::Upgraded(version) => {
                self.backoff.succeeded(container);
                self.has_program(container, &wanted);
                self.state.upgraded = self.state.upgraded.saturating_add(1);
                self.state.failures_in_a_row = 0;
                if !version.is_empty() {
                    self.state.version = shortened(&version);
                }
                told.push(Told::Upgraded(pod));
                if self.state.canaries_passed < self.policy.canary {
                    self.state.canaries_passed += 1;
                    if self.state.canaries_passed == self.policy.canary {
                        told.push(Told::CanaryPassed(self.state.outdated));
                    }
                }
            }
            Outcome::Unchanged => self.has_program(container, &wanted),
            Outcome::Postponed(_) => drop(self.backoff.failed(container, at)),
            Outcome::Gone => {
                self.instances.retain(|one| one.container != container);
                self.count();
            }
            Outcome::Refused(why) => told.extend(self.failed(container, pod, Failure::NotUpgraded, why, now)),
            Outcome::RolledBack(fault) => {
                self.state.rolled_back = self.state.rolled_back.saturating_add(1);
                told.extend(self.failed(container, pod, Failure::RolledBack, fault.to_string(), now));
            }
            Outcome::NotRolledBack(fault, why) => {
                let why = format!("{fault}; the old program does not take over again: {why}");
                told.extend(self.failed(container, pod, Failure::NotRolledBack, why, now));
            }
        }
        told
    }

    /// Whether nothing is left to do, the first time that it is so. To be asked after a look at the node.
    pub fn finish(&mut self) -> Option<Told> {
        let State { is_finished, upgraded, paused, program, .. } = &self.state;
        let wanted = program.as_ref()?;
        let is_left = |one: &Instance| one.is_outdated(wanted) && one.is_well && self.may_try(one);
        let has_ended = !is_finished
            && (*upgraded > 0 || !self.state.failed.is_empty())
            && paused.is_none()
            && self.running.is_empty()
            && self.state.under_way.is_empty()
            && !self.instances.iter().any(is_left);
        if !has_ended {
            return None;
        }
        self.state.is_finished = true;
        Some(Told::Finished(self.state.upgraded, self.state.outdated))
    }

    fn may_try(&self, one: &Instance) -> bool {
        !self.state.failed.contains_key(&one.container) && !self.running.contains_key(&one.container)
    }

    fn failed(&mut self, container: &str, pod: Pod, outcome: Failure, why: String, now: i64) -> Vec<Told> {
        let (why, pod_name) = (shortened(&why), name(&pod));
        self.state.failures_in_a_row = self.state.failures_in_a_row.saturating_add(1);
        let failed = Failed { pod: pod_name.clone(), outcome, why: why.clone() };
        self.state.failed.insert(container.to_owned(), failed);
        let in_a_row = self.state.failures_in_a_row;
        let pauses = match outcome {
            // The pod took no harm, so the next one may be tried.
            Failure::NotUpgraded => false,
            Failure::RolledBack => self.policy.pause_on_failure,
            Failure::NotRolledBack => true,
        };
        let mut told = vec![Told::Failed(pod, outcome, why.clone())];
        if (pauses || in_a_row >= MOST_FAILURES) && self.state.paused.is_none() {
            let why = format!("{pod_name} was {}: {why}", outcome.words());
            told.extend(self.pause(false, why, now));
        }
        told
    }

    fn pause(&mut self, by_operator: bool, why: String, now: i64) -> Vec<Told> {
        let why = shortened(&why);
        let is_new = self.state.paused.is_none();
        match &mut self.state.paused {
            // The reason of a failure stays, and the operator's word holds for other programs as well.
            Some(paused) => paused.by_operator |= by_operator,
            None => self.state.paused = Some(Pause { by_operator, why: why.clone(), since: now }),
        }
        if is_new { vec![Told::Paused(why)] } else { Vec::new() }
    }

    fn has_program(&mut self, container: &str, program: &ProgramId) {
        for one in self.instances.iter_mut().filter(|one| one.container == container) {
            one.program = Some(program.clone());
        }
        self.count();
    }

    fn count(&mut self) {
        let Some(wanted) = &self.state.program else { return };
        self.state.instances = self.instances.iter().filter(|one| one.program.is_some()).count();
        self.state.outdated = self.instances.iter().filter(|one| one.is_outdated(wanted)).count();
    }
}

fn name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

const PAUSED_BY_OPERATOR: &str = "nebula-cni-agent upgrade pause";
/// What the canary has shown is shown; this finds an instance that does not take over at all.
const SHORT_WATCH: Duration = Duration::from_secs(2);
/// Whatever the operator chose: a program that fails with every pod must not be tried with all of them.
const MOST_FAILURES: u32 = 3;

#[cfg(test)]
mod tests;
