//! Asks all instances of this node for their records, in turns, a few at a time.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use nebula_cni_contract::clock::{Clock, SystemClock};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use super::Attached;
use super::ask::{AskError, ask};
use super::attached::Attachments;
use super::schedule::{Answered, Schedule};
use super::writer::{Job, Kept, NotKept};
use crate::host_root::HostRoot;
use crate::metrics::Metrics;
use crate::retirement::Retirement;

/// Who is asked when, and what becomes of the answers.
#[derive(Debug)]
pub(super) struct Drain {
    host: HostRoot,
    retirement: Retirement,
    metrics: Arc<Metrics>,
    jobs: mpsc::Sender<Job>,
    attachments: Attachments,
    schedule: Schedule,
}

/// What became of asking one.
#[derive(Debug)]
enum Outcome {
    Kept(Kept, usize, Duration),
    Failed(AskError),
    NoStore,
    /// There is nobody to write any more.
    Over,
}

impl Drain {
    pub(super) fn new(host: HostRoot, retirement: Retirement, metrics: Arc<Metrics>, jobs: mpsc::Sender<Job>) -> Self {
        let (attachments, schedule) = (Attachments::default(), Schedule::default());
        Self { host, retirement, metrics, jobs, attachments, schedule }
    }

    #[cfg(test)]
    pub(super) fn of(mut self, all: Vec<Attached>) -> Self {
        self.schedule.set(all.iter().map(|attached| attached.attachment.clone()), SystemClock.now());
        Self { attachments: Attachments::of(all), ..self }
    }

    /// Works until the task is cancelled.
    pub(super) async fn run(mut self) {
        let large = Arc::new(Semaphore::new(1));
        let mut under_way = FuturesUnordered::new();
        let mut housekeeping = tokio::time::interval(HOUSEKEEPING);
        housekeeping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut not_before = Instant::now();
        loop {
            while under_way.len() < PARALLEL && Instant::now() >= not_before {
                let Some(name) = self.schedule.take(SystemClock.now()) else { break };
                let attached = self.attachments.all().iter().find(|attached| attached.attachment == name);
                if let Some(attached) = attached {
                    under_way.push(one(attached.clone(), self.jobs.clone(), Arc::clone(&large)));
                }
            }
            let next = self.schedule.next().map_or_else(|| Instant::now() + HOUSEKEEPING, Instant::from_std);
            let is_full = under_way.len() >= PARALLEL;
            tokio::select! {
                Some((attached, outcome)) = under_way.next() => match self.note(&attached, &outcome) {
                    Next::Go => {}
                    Next::Wait => not_before = Instant::now() + WITHOUT_STORE,
                    Next::End => return,
                },
                () = tokio::time::sleep_until(next.max(not_before)), if !is_full => {}
                _ = housekeeping.tick() => if !self.look_after().await { return },
            }
        }
    }

    fn note(&mut self, attached: &Attached, outcome: &Outcome) -> Next {
        let (name, now) = (&*attached.attachment, SystemClock.now());
        match outcome {
            Outcome::Kept(kept, bytes, took) => {
                let answered = Answered { records: kept.records, bytes: *bytes, is_cut: kept.is_cut, took: *took };
                self.schedule.answered(name, answered, now);
            }
            Outcome::Failed(error) => {
                self.metrics.flows(|flows| flows.failed(*error));
                let failures = self.schedule.failed(name, now);
                if failures.is_power_of_two() && failures > 1 {
                    let pod = format!("{}/{}", attached.pod.namespace, attached.pod.name);
                    tracing::debug!(pod, failures, %error, "no flow records of a pod");
                }
            }
            Outcome::NoStore => {
                self.schedule.put_back(name);
                return Next::Wait;
            }
            Outcome::Over => return Next::End,
        }
        Next::Go
    }

    /// Looks who is there, and lets the writer tidy up. Returns whether there still is one.
    async fn look_after(&mut self) -> bool {
        if self.retirement.has_begun() {
            // Its files are being removed.
            self.attachments = Attachments::default();
            self.schedule = Schedule::default();
            return self.jobs.send(Job::Close).await.is_ok();
        }
        let (mut attachments, host) = (std::mem::take(&mut self.attachments), self.host.clone());
        let looked = tokio::task::spawn_blocking(move || {
            let is_news = attachments.look(&host);
            (attachments, is_news)
        });
        let Ok((attachments, is_news)) = looked.await else { return false };
        self.attachments = attachments;
        if is_news {
            let names = self.attachments.all().iter().map(|attached| attached.attachment.clone());
            self.schedule.set(names, SystemClock.now());
        }
        self.jobs.send(Job::Tidy { attached: self.attachments.names() }).await.is_ok()
    }
}

enum Next {
    Go,
    Wait,
    End,
}

/// Asks one instance, and has the answer kept.
async fn one(attached: Attached, jobs: mpsc::Sender<Job>, large: Arc<Semaphore>) -> (Attached, Outcome) {
    let outcome = asked(&attached, &jobs, &large).await.unwrap_or(Outcome::Over);
    (attached, outcome)
}

async fn asked(attached: &Attached, jobs: &mpsc::Sender<Job>, large: &Semaphore) -> Option<Outcome> {
    let (reply, cursor) = oneshot::channel();
    jobs.send(Job::Cursor { attachment: attached.attachment.clone(), reply }).await.ok()?;
    let Some(after) = cursor.await.ok()? else { return Some(Outcome::NoStore) };
    let began = SystemClock.now();
    let answer = match ask(&attached.socket, after, large).await {
        Ok(answer) => answer,
        Err(error) => return Some(Outcome::Failed(error)),
    };
    let (took, bytes) = (SystemClock.now().saturating_duration_since(began), answer.len());
    let (reply, kept) = oneshot::channel();
    jobs.send(Job::Keep { attached: attached.clone(), answer, reply }).await.ok()?;
    Some(match kept.await.ok()? {
        Ok(kept) => Outcome::Kept(kept, bytes, took),
        Err(NotKept::Unreadable(error)) => Outcome::Failed(error),
        Err(NotKept::NoStore) => Outcome::NoStore,
    })
}

/// Instances that are asked at a time.
pub(super) const PARALLEL: usize = 8;
const HOUSEKEEPING: Duration = Duration::from_secs(2);
const WITHOUT_STORE: Duration = Duration::from_secs(1);
