//! An exporter at work.

use std::collections::hash_map::RandomState;
use std::convert::Infallible;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nebula_cni_contract::clock::{Clock, SystemClock};

use super::pauses::Pauses;
use super::progress::Position;
use super::{Progress, SendError, Sent, Sink, Surroundings, Target};
use crate::flows::budget::Budget;
use crate::flows::store::{BatchReader, StoreError};
use crate::readiness::Part;

/// Reads the store from where it stopped, and sends what it reads to one sink, in order and one batch at a time.
pub(super) struct Exporter {
    target: Target,
    sink: Box<dyn Sink>,
    progress: Arc<Progress>,
    about: Surroundings,
    stopped: Receiver<Infallible>,
    /// Of which opening of the store.
    reader: Option<(u64, BatchReader)>,
    pauses: Pauses,
    failing: Option<Failing>,
}

/// Failures in a row.
struct Failing {
    since: Instant,
    is_told: bool,
}

impl Exporter {
    pub(super) fn new(
        target: Target,
        sink: Box<dyn Sink>,
        progress: Arc<Progress>,
        about: Surroundings,
        stopped: Receiver<Infallible>,
    ) -> Self {
        let (reader, pauses, failing) = (None, Pauses::default(), None);
        Self { target, sink, progress, about, stopped, reader, pauses, failing }
    }

    /// Works until nobody wants it any more.
    pub(super) fn run(mut self) {
        let mut budget = Budget::default();
        loop {
            let pause = self.step();
            match self.stopped.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => budget.wait(),
                _ => return,
            }
        }
    }

    /// Sends one batch, and returns how long to wait then.
    pub(super) fn step(&mut self) -> Duration {
        let Some(position) = self.progress.position(self.target) else {
            // Its files may be being removed.
            self.reader = None;
            return POLL;
        };
        let batch = match self.read(position) {
            Ok(batch) => batch,
            Err(error) => {
                tracing::debug!(%error, "an exporter cannot read the store of flow records");
                self.reader = None;
                return POLL;
            }
        };
        let Some(last) = batch.records.last().map(|record| record.number) else {
            self.note_behind(0);
            return POLL;
        };
        self.note_behind(batch.newest.saturating_sub(position.after));
        let (count, target) = (batch.records.len() as u64, self.target);
        match self.sink.send(&batch.records) {
            Ok(Sent { rejected }) => {
                self.progress.exported(target, position, last);
                self.note_behind(batch.newest.saturating_sub(last));
                let rejected = rejected.min(count);
                self.about.metrics.flows(|flows| flows.exported(target, count - rejected, rejected));
                self.succeeded();
                if last < batch.newest { Duration::ZERO } else { POLL }
            }
            Err(error) => {
                if error.is_final() {
                    self.progress.exported(target, position, last);
                }
                let refused = if error.is_final() { count } else { 0 };
                self.failed(&error, refused);
                self.pauses.failed(error.retry_after(), RandomState::new().build_hasher().finish())
            }
        }
    }

    fn read(&mut self, position: Position) -> Result<crate::flows::store::Batch, StoreError> {
        let reader = match self.reader.take() {
            Some((opening, reader)) if opening == position.opening => reader,
            _ => BatchReader::open(&self.about.folder)?,
        };
        let (_, reader) = self.reader.insert((position.opening, reader));
        reader.after(position.after, MOST_RECORDS)
    }

    fn note_behind(&self, records: u64) {
        self.about.metrics.flows(|flows| flows.export_behind(self.target, records));
    }

    fn succeeded(&mut self) {
        self.pauses.succeeded();
        if self.failing.take().is_some_and(|failing| failing.is_told) {
            let standing = self.progress.failing(self.target, None);
            self.about.readiness.set(Part::FlowExport, standing);
        }
        self.about.metrics.flows(|flows| flows.export_failing(self.target, None, 0));
    }

    /// Counts a failure. Failures in a row are reported once, with the reason of that moment.
    fn failed(&mut self, error: &SendError, refused: u64) {
        let now = SystemClock.now();
        let failing = self.failing.get_or_insert(Failing { since: now, is_told: false });
        self.about.metrics.flows(|flows| flows.export_failing(self.target, Some(failing.since), refused));
        let is_time = now.saturating_duration_since(failing.since) >= TELL_AFTER || error.is_final();
        if !failing.is_told && is_time {
            failing.is_told = true;
            let why = format!("flow records cannot be exported to {}: {error}", self.sink.place());
            let advice = match self.target {
                Target::File => "free space on the node's disk; what is in the store is exported then",
                Target::Otlp => "is the collector there? what is in the store is exported once it answers",
            };
            let standing = self.progress.failing(self.target, Some(nebula_cert::visible(&why).into_owned()));
            self.about.readiness.set(Part::FlowExport, standing.advice(advice));
        }
    }
}

/// Also how long a record may wait for others.
const POLL: Duration = Duration::from_secs(1);
/// Of a batch.
const MOST_RECORDS: usize = 256;
/// A collector that restarts is no news.
const TELL_AFTER: Duration = Duration::from_secs(30);
