//! Counts handshakes and how long they took, for metrics.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nebula_core::Event;

/// Written by the thread that logs events, read by the one that sends metrics.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default, Clone)]
struct Inner {
    completed: u64,
    timed_out: u64,
    /// Durations of the most recent ones, in nanoseconds.
    took: VecDeque<f64>,
}

/// The numbers at one moment. Durations are in nanoseconds.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Summary {
    /// All that ended, completed or timed out.
    pub(crate) initiated: u64,
    pub(crate) timed_out: u64,
    pub(crate) completed: u64,
    sorted: Vec<f64>,
}

// The size of Go Nebula's sample.
const MAX_SAMPLES: usize = 1028;

impl Handshakes {
    /// Counts what ended.
    pub(crate) fn note(&self, event: &Event) {
        match event {
            Event::TunnelUp { initiator: true, took, .. } => self.completed(*took),
            Event::HandshakeTimedOut { .. } => self.timed_out(),
            _ => {}
        }
    }

    pub(crate) fn completed(&self, took: Duration) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.completed += 1;
        if inner.took.len() == MAX_SAMPLES {
            inner.took.pop_front();
        }
        inner.took.push_back(took.as_nanos() as f64);
    }

    pub(crate) fn timed_out(&self) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).timed_out += 1;
    }

    pub(crate) fn summary(&self) -> Summary {
        let Inner { completed, timed_out, took } = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut sorted = Vec::from(took);
        sorted.sort_by(f64::total_cmp);
        Summary { initiated: completed + timed_out, timed_out, completed, sorted }
    }
}

impl Summary {
    pub(crate) fn min(&self) -> f64 {
        self.sorted.first().copied().unwrap_or(0.0)
    }
    pub(crate) fn max(&self) -> f64 {
        self.sorted.last().copied().unwrap_or(0.0)
    }
    pub(crate) fn sum(&self) -> f64 {
        self.sorted.iter().sum()
    }
    pub(crate) fn mean(&self) -> f64 {
        if self.sorted.is_empty() { 0.0 } else { self.sum() / self.sorted.len() as f64 }
    }
    pub(crate) fn variance(&self) -> f64 {
        let mean = self.mean();
        let squares: f64 = self.sorted.iter().map(|value| (value - mean).powi(2)).sum();
        if self.sorted.is_empty() { 0.0 } else { squares / self.sorted.len() as f64 }
    }
    /// Interpolates linearly between the two nearest samples.
    pub(crate) fn percentile(&self, part: f64) -> f64 {
        let position = part * (self.sorted.len() + 1) as f64;
        let below = position.floor();
        match below as usize {
            0 => self.min(),
            at if at >= self.sorted.len() => self.max(),
            at => self.sorted[at - 1] + (position - below) * (self.sorted[at] - self.sorted[at - 1]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_tells_of_the_last_handshakes_only() {
        let handshakes = Handshakes::default();
        assert_eq!((handshakes.summary().percentile(0.5), handshakes.summary().mean()), (0.0, 0.0));
        for nanos in 0..=MAX_SAMPLES as u64 {
            handshakes.completed(Duration::from_nanos(nanos));
        }
        handshakes.timed_out();
        let summary = handshakes.summary();
        assert_eq!((summary.initiated, summary.timed_out, summary.completed), (1030, 1, 1029));
        assert_eq!((summary.min(), summary.max(), summary.mean()), (1.0, 1028.0, 514.5));
        assert_eq!((summary.percentile(0.5), summary.percentile(0.999)), (514.5, 1027.971));
    }
}
