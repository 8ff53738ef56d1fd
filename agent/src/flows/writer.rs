//! The thread that writes to the store. It goes on without a store if that cannot be used, and tries again.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::flow_records::{FlowRecords, read_answer};
use tokio::sync::{mpsc, oneshot};

use super::Attached;
use super::ask::AskError;
use super::budget::Budget;
use super::export::Progress;
use super::now_ms;
use super::pairs::Pairs;
use super::store::{Bound, Counts, Store, StoreError};
use crate::metrics::Metrics;
use crate::readiness::{Part, Readiness, Standing};

/// What the writer is given to do.
#[derive(Debug)]
pub(super) enum Job {
    /// From where is an instance to be asked? `None`: there is no store now.
    Cursor { attachment: String, reply: oneshot::Sender<Option<u64>> },
    /// Keep an answer.
    Keep { attached: Attached, answer: Vec<u8>, reply: oneshot::Sender<Result<Kept, NotKept>> },
    /// Housekeeping; these are attached.
    Tidy { attached: HashSet<String> },
    /// Leave the files alone, for they are being removed.
    Close,
}

/// An answer that is kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub(super) records: usize,
    pub(super) is_cut: bool,
}

/// Why an answer is not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotKept {
    /// It is none.
    Unreadable(AskError),
    /// There is no store.
    NoStore,
}

/// Owns the store.
#[derive(Debug)]
pub(super) struct Writer {
    folder: PathBuf,
    bound: Bound,
    readiness: Readiness,
    metrics: Arc<Metrics>,
    progress: Arc<Progress>,
    store: Option<Store>,
    /// Of stores that were opened before this one.
    before: Counts,
    /// While no store is open.
    pairs: Pairs,
    failures: u32,
    retry: Option<Instant>,
    budget: Budget,
    /// When it was last committed.
    committed: Instant,
}

type Reply = oneshot::Sender<Result<Kept, NotKept>>;

impl Writer {
    pub(super) fn new(
        folder: PathBuf,
        bound: Bound,
        readiness: Readiness,
        metrics: Arc<Metrics>,
        progress: Arc<Progress>,
    ) -> Self {
        Self {
            folder,
            bound,
            readiness,
            metrics,
            progress,
            store: None,
            before: Counts::default(),
            pairs: Pairs::default(),
            failures: 0,
            retry: None,
            budget: Budget::default(),
            committed: SystemClock.now(),
        }
    }

    /// Works until nobody gives it work any more. Blocks.
    pub(super) fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        while let Some(first) = jobs.blocking_recv() {
            let mut answers = Vec::new();
            let mut next = Some(first);
            // What has come together is one transaction.
            while let Some(job) = next {
                match job {
                    Job::Keep { attached, answer, reply } => match read_answer(&answer) {
                        Ok(records) => answers.push((attached, records, reply)),
                        Err(_) => {
                            let _ = reply.send(Err(NotKept::Unreadable(AskError::Unreadable)));
                        }
                    },
                    Job::Cursor { attachment, reply } => {
                        let store = self.opened();
                        let _ = reply.send(store.map(|store| store.cursor(&attachment).next));
                    }
                    Job::Tidy { attached } => self.tidy(&attached),
                    Job::Close => self.close(),
                }
                next = if answers.len() < TOGETHER { jobs.try_recv().ok() } else { None };
            }
            self.keep(answers);
            self.budget.wait();
        }
        self.commit();
    }

    fn keep(&mut self, answers: Vec<(Attached, FlowRecords, Reply)>) {
        if answers.is_empty() {
            return;
        }
        let (mut kept, mut replies) = (Vec::new(), Vec::new());
        for (attached, answer, reply) in answers {
            replies.push((Kept { records: answer.records.len(), is_cut: answer.is_cut }, reply));
            kept.push((attached, answer));
        }
        let now = now_ms();
        let is_due = SystemClock.now().saturating_duration_since(self.committed) >= COMMIT_EVERY;
        let answers = kept.iter_mut().map(|(attached, answer)| (&*attached, std::mem::take(answer))).collect();
        // After a failure each answer shows whether it is over.
        let is_due = is_due || self.failures > 0;
        self.note_exported();
        let keep = |store: &mut Store| {
            let is_written = store.keep(answers, now)?;
            if is_due { store.commit().map(|()| is_written) } else { Ok(false) }
        };
        let done = match self.opened().map(keep) {
            None => Err(NotKept::NoStore),
            Some(Ok(is_written)) => {
                if is_due {
                    self.committed = SystemClock.now();
                }
                if is_written {
                    self.is_good();
                }
                Ok(())
            }
            Some(Err(error)) => {
                self.failed(&error);
                Err(NotKept::NoStore)
            }
        };
        for (kept, reply) in replies {
            let _ = reply.send(done.map(|()| kept));
        }
        if is_due {
            self.tell();
        }
    }

    /// Commits what was kept. What cannot be committed is asked for again, from the number that the file has.
    fn commit(&mut self) {
        self.committed = SystemClock.now();
        if let Some(Err(error)) = self.store.as_mut().map(Store::commit) {
            self.failed(&error);
        }
    }

    /// What is gone before it was exported is lost.
    fn note_exported(&mut self) {
        if let Some(store) = &mut self.store {
            self.progress.all().into_iter().for_each(|(target, number)| store.exported(target, number));
        }
    }

    fn tidy(&mut self, attached: &HashSet<String>) {
        self.note_exported();
        for _ in 0..MOST_STEPS {
            let Some(store) = self.opened() else { break };
            match store.tidy(attached, now_ms()) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => self.failed(&error),
            }
        }
        self.tell();
    }

    fn close(&mut self) {
        if let Some(store) = self.store.take() {
            self.before = sum(self.before, store.counts());
            self.pairs = store.into_pairs();
        }
        self.progress.closed(false);
        self.retry = Some(SystemClock.now() + LAST_RETRY);
    }

    /// The store, which is opened if it is time to try.
    fn opened(&mut self) -> Option<&mut Store> {
        if self.store.is_none() && self.retry.is_none_or(|at| SystemClock.now() >= at) {
            let opened = Store::open(&self.folder, self.bound).and_then(|mut store| {
                let positions = store.follow(self.progress.targets())?;
                self.progress.opened(&positions, store.newest());
                Ok(store)
            });
            match opened {
                Ok(store) => {
                    let pairs = std::mem::take(&mut self.pairs);
                    (self.store, self.retry) = (Some(store.with_pairs(pairs)), None);
                    // After a failure, nothing is good until something was written.
                    if self.failures == 0 {
                        self.is_good();
                    }
                }
                Err(error) => self.failed(&error),
            }
        }
        self.store.as_mut()
    }

    fn is_good(&mut self) {
        self.failures = 0;
        let kept = format!("flow records are kept in {}", self.folder.display());
        self.readiness.set(Part::Flows, Standing::good(kept));
    }

    /// Goes on without a store for a while. A damaged one is put aside, and another one begun at once.
    fn failed(&mut self, error: &StoreError) {
        self.close();
        self.metrics.flows(|flows| flows.errors += 1);
        let folder = self.folder.display();
        let mut pause = FIRST_RETRY * 2_u32.pow(self.failures.min(6));
        if let StoreError::Damaged(why) = error {
            match Store::set_aside(&self.folder) {
                Ok(aside) => {
                    tracing::warn!(%folder, why, aside = %aside.display(), "the store of flow records is damaged: it is put aside, and a new one is begun");
                    self.progress.closed(true);
                    pause = Duration::ZERO;
                }
                Err(error) => {
                    tracing::warn!(%folder, why, %error, "the store of flow records is damaged, and cannot be put aside")
                }
            }
        }
        // Putting aside what cannot be read for another reason must not repeat without a pause.
        if self.failures > 2 {
            pause = pause.max(FIRST_RETRY * 8);
        }
        self.failures = self.failures.saturating_add(1);
        self.retry = Some(SystemClock.now() + pause.min(LAST_RETRY));
        let advice = match error {
            StoreError::Taken => "end one of the two; it is tried again every minute",
            _ => "free space on the node's disk; it is tried again every minute",
        };
        let text = format!("flow records cannot be kept in {folder}: {error}");
        self.readiness.set(Part::Flows, Standing::bad(text).advice(advice));
    }

    fn tell(&self) {
        let counts = self.store.as_ref().map_or(self.before, |store| sum(self.before, store.counts()));
        let fill = self.store.as_ref().and_then(|store| store.fill().ok());
        let pairs = self.store.as_ref().map_or(&self.pairs, Store::pairs).clone();
        self.metrics.flows(|flows| {
            (flows.counts, flows.is_open, flows.pairs) = (counts, self.store.is_some(), pairs);
            flows.fill = fill.unwrap_or_default();
        });
    }
}

fn sum(a: Counts, b: Counts) -> Counts {
    Counts {
        written: a.written + b.written,
        evicted: a.evicted + b.evicted,
        expired: a.expired + b.expired,
        lost: a.lost + b.lost,
        unexported: std::array::from_fn(|target| a.unexported[target] + b.unexported[target]),
    }
}

/// Each page that changed is written once in this time; and at least with each housekeeping.
const COMMIT_EVERY: Duration = Duration::from_secs(1);
const TOGETHER: usize = 8;
/// Of housekeeping, at once.
const MOST_STEPS: usize = 16;
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);
