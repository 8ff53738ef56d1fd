//! Writes the table whenever the facts change, and says how it stands.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::launch::CLUSTER_TABLE;
use tokio::time::Instant;

use super::Shared;
use super::facts::Input;
use super::outputs::Outputs;
use super::writer::WriteError;
use crate::metrics::Metrics;
use crate::node::Unenforced;
use crate::readiness::{Part, Readiness, Standing};

/// Writes the table whenever the facts change.
pub(super) struct Keeper {
    pub(super) shared: Arc<Shared>,
    pub(super) outputs: Outputs,
    pub(super) metrics: Arc<Metrics>,
    pub(super) readiness: Readiness,
    pub(super) unenforced: Unenforced,
    /// Why the table could not be written last.
    pub(super) failure: Option<WriteError>,
}

impl Keeper {
    /// Works until the task is cancelled.
    pub(super) async fn run(mut self) {
        loop {
            let has_changed = tokio::select! {
                () = self.shared.changed.notified() => true,
                () = tokio::time::sleep(LOOK_EVERY) => false,
            };
            let is_over = self.outputs.departed.is_due(Instant::now());
            if is_over {
                self.shared.facts().changes += 1;
            }
            let missing = self.shared.facts().missing();
            // A failure of its own is tried again no more often than this.
            let is_due = has_changed || is_over || self.policies_wait();
            if missing.is_empty() && self.shared.policies_missing().is_some() {
                self.outputs.enforced.look(SystemClock.now());
            }
            if missing.is_empty() && (is_due || !self.outputs.writer.is_there()) {
                // The first change is written at once; what comes close behind it is gathered.
                let Some(took) = self.write().await else { return };
                self.report(&missing);
                tokio::time::sleep((took * SHARE).clamp(WRITE_EVERY, MAX_GATHER)).await;
            } else {
                self.outputs.look(&self.shared.facts(), missing.is_empty());
                self.report(&missing);
            }
        }
    }

    /// Whether policies are known, and some pod has none of them for what it exchanges in clear.
    fn policies_wait(&mut self) -> bool {
        let are_known = self.shared.policies_missing().is_some_and(|missing| missing.is_empty());
        are_known && self.outputs.clear_policies.are_outdated()
    }

    /// `None` if the process ends.
    async fn write(&mut self) -> Option<Duration> {
        let (shared, mut outputs) = (Arc::clone(&self.shared), std::mem::take(&mut self.outputs));
        let now = Instant::now();
        let write = tokio::task::spawn_blocking(move || {
            let outcome = outputs.write(&mut shared.facts(), now);
            (outputs, outcome)
        });
        let (outputs, outcome) = write.await.ok()?;
        self.outputs = outputs;
        match outcome {
            Ok(written) => {
                self.metrics.table_written(&written, &self.outputs.counts);
                self.failure = None;
                Some(written.took)
            }
            Err(error) => {
                self.failure = Some(error);
                self.shared.changed.notify_one();
                // Again soon, at the longest distance.
                Some(MAX_GATHER)
            }
        }
    }

    /// Says how the policies stand.
    fn report_policies(&self, missing: &[Input], problems: &BTreeMap<&'static str, (String, Duration)>) {
        let Some(unlisted) = self.shared.policies_missing() else { return };
        let report = self.outputs.enforced.report();
        self.metrics.policies(report);
        self.unenforced.set(report.unasked.iter().map(|pod| pod.incarnation).collect());
        self.metrics.policy_inputs(Input::OF_POLICIES.map(|input| {
            let is_followed = !unlisted.contains(&input.name()) && !problems.contains_key(input.name());
            (input.name(), is_followed)
        }));
        let of_policies = |input: &Input| problems.get(input.name()).map(|(why, _)| (input.name(), why));
        let problem = Input::OF_POLICIES.iter().find_map(of_policies);
        let mut standing = match missing.is_empty() {
            true => report.standing(),
            false => Standing::bad("waits for the table"),
        };
        if let Some((input, why)) = problem {
            standing.reason = format!("{}; cannot follow {input}: {why}", standing.reason);
        }
        self.readiness.set(Part::Policies, standing);
    }

    /// Says how the table stands, also when nothing was to be written.
    fn report(&self, missing: &[Input]) {
        let problems = self.shared.problems();
        self.report_policies(missing, &problems);
        self.metrics.table_inputs(
            Input::ALL.map(|input| (input.name(), !missing.contains(&input) && !problems.contains_key(input.name()))),
        );
        if let Some(failure) = &self.failure {
            let advice = "the agent must run as root, with the node's /run mounted writable";
            return self.readiness.set(Part::Table, Standing::bad(failure.to_string()).advice(advice));
        }
        let why = |input: &Input| match problems.get(input.name()) {
            Some((why, _)) => format!("{} ({why})", input.name()),
            None => input.name().to_owned(),
        };
        if !missing.is_empty() {
            let missing: Vec<String> = missing.iter().map(why).collect();
            let waits = format!("waits for {}", missing.join(", "));
            // Instances work on with the table of an earlier agent.
            let standing = match self.outputs.writer.version() {
                0 => Standing::bad(waits).advice("captured pods reach nothing until then; see docs/cluster.md"),
                version => Standing::good(format!("version {version} of an earlier agent; {waits}")),
            };
            return self.readiness.set(Part::Table, standing);
        }
        let directory = problems.get(Input::Directory.name()).filter(|(_, since)| *since > STILL_GOOD);
        if let Some((why, _)) = directory {
            let standing = Standing::bad(format!("learns no more who is enrolled: {why}"));
            return self.readiness.set(Part::Table, standing.advice("new pods are not reached from here until then"));
        }
        if let Some((input, (why, _))) = problems.iter().next() {
            self.readiness.set(Part::Table, Standing::good(format!("works on with what it has: {input}: {why}")));
        } else if self.outputs.writer.is_there() {
            let facts = self.shared.facts();
            let crowded: Vec<&str> = facts.crowded().into_iter().take(NAMED).collect();
            let standing = Standing::good(format!("is current in {CLUSTER_TABLE}"));
            let standing = match &crowded[..] {
                [] => standing,
                names => Standing::good(format!(
                    "is current in {CLUSTER_TABLE}, without some Services of namespaces with too many of them: {}",
                    names.join(", ")
                )),
            };
            drop(facts);
            self.readiness.set(Part::Table, standing);
        }
    }
}

/// How often the table's file and the kernel's sets are looked at: so long the first captured pod of a node may wait
/// until it reaches pods that are not enrolled.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// So many namespaces are named.
const NAMED: usize = 8;
const WRITE_EVERY: Duration = Duration::from_millis(200);
/// So many times as long as a write takes nothing is written after it: a busy cluster costs a sixth of a processor.
const SHARE: u32 = 5;
pub(super) const MAX_GATHER: Duration = Duration::from_millis(600);
/// As for the CA itself.
const STILL_GOOD: Duration = Duration::from_secs(5 * 60);
