//! Congestion window by CUBIC (RFC 9438), with the slow start of HyStart++ (RFC 9406).

use std::time::{Duration, Instant};

const C: f64 = 0.4;
const BETA: f64 = 0.7;
/// RFC 6928.
const INITIAL_SEGMENTS: u64 = 10;
/// RFC 9406 section 4.3.
const MIN_RTT_THRESHOLD: Duration = Duration::from_millis(4);
const MAX_RTT_THRESHOLD: Duration = Duration::from_millis(16);
const RTT_SAMPLES: u32 = 8;
const GROWTH_DIVISOR: u64 = 4;
const CONSERVATIVE_ROUNDS: u32 = 5;

/// Congestion window of one connection, in bytes.
#[derive(Debug, Clone)]
pub(crate) struct Cubic {
    segment: u64,
    window: u64,
    threshold: u64,
    /// Window before the last reduction, in segments.
    max: f64,
    epoch: Option<Epoch>,
    start: SlowStart,
}

/// Time since the last reduction, and what grows with it. Windows are in segments.
#[derive(Debug, Clone, Copy)]
struct Epoch {
    began: Instant,
    /// Seconds until the window reaches the maximum.
    k: f64,
    /// What Reno would have.
    reno: f64,
    /// Window of the last reduction, after which Reno's estimate grows faster.
    prior: f64,
}

/// Finds out that a queue builds up, before it overflows.
#[derive(Debug, Clone, Default)]
struct SlowStart {
    /// Offset whose acknowledgement ends the round.
    round_end: u64,
    last_min: Option<Duration>,
    this_min: Option<Duration>,
    samples: u32,
    /// In the conservative phase: the round-trip time that began it, and the rounds left.
    conservative: Option<(Duration, u32)>,
}

impl Cubic {
    pub(crate) fn new(segment: usize) -> Self {
        let segment = segment.max(1) as u64;
        Self {
            segment,
            window: INITIAL_SEGMENTS * segment,
            threshold: u64::MAX,
            max: 0.0,
            epoch: None,
            start: SlowStart::default(),
        }
    }

    /// Congestion window in bytes.
    pub(crate) fn window(&self) -> u64 {
        self.window
    }

    pub(crate) fn threshold(&self) -> u64 {
        self.threshold
    }

    /// Used by proportional rate reduction.
    pub(crate) fn set_window(&mut self, window: u64) {
        self.window = window.max(self.segment);
    }

    /// `bytes` were acknowledged while the window was in use.
    pub(crate) fn acknowledged(&mut self, now: Instant, bytes: u64, rtt: Duration) {
        if self.window < self.threshold {
            let divisor = if self.start.conservative.is_some() { GROWTH_DIVISOR } else { 1 };
            self.window += bytes / divisor;
            return;
        }
        let segment = self.segment as f64;
        let (window, acked) = (self.window as f64 / segment, bytes as f64 / segment);
        let max = if self.max < window && self.epoch.is_none() { window } else { self.max };
        self.max = max;
        let epoch = self.epoch.get_or_insert_with(|| Epoch {
            began: now,
            k: ((max - window).max(0.0) / C).cbrt(),
            reno: window,
            prior: max,
        });
        let alpha = if epoch.reno < epoch.prior { 3.0 * (1.0 - BETA) / (1.0 + BETA) } else { 1.0 };
        epoch.reno += alpha * acked / window;
        let t = now.saturating_duration_since(epoch.began).as_secs_f64() + rtt.as_secs_f64();
        let target = (C * (t - epoch.k).powi(3) + max).clamp(window, 1.5 * window);
        let grown = (window + (target - window) * acked / window).min(target.max(window));
        self.window = (grown.max(epoch.reno.min(window + acked)) * segment) as u64;
    }

    /// A round-trip time in slow start: `acked` is acknowledged, and everything before `next` was sent.
    pub(crate) fn sampled(&mut self, rtt: Duration, acked: u64, next: u64) {
        if self.window >= self.threshold {
            return;
        }
        let start = &mut self.start;
        if acked > start.round_end {
            start.round_end = next;
            start.last_min = start.this_min.take();
            start.samples = 0;
            if let Some((_, rounds)) = &mut start.conservative {
                *rounds = rounds.saturating_sub(1);
                if *rounds == 0 {
                    self.threshold = self.window;
                    return;
                }
            }
        }
        start.samples += 1;
        let this = start.this_min.map_or(rtt, |min| min.min(rtt));
        start.this_min = Some(this);
        if start.samples < RTT_SAMPLES {
            return;
        }
        match (start.conservative, start.last_min) {
            (Some((baseline, _)), _) if this < baseline => start.conservative = None,
            (None, Some(last)) => {
                let threshold = (last / 8).clamp(MIN_RTT_THRESHOLD, MAX_RTT_THRESHOLD);
                if this >= last + threshold {
                    start.conservative = Some((this, CONSERVATIVE_ROUNDS));
                }
            }
            _ => {}
        }
    }

    /// Something was lost: once per window of data.
    pub(crate) fn lost(&mut self) {
        let window = self.window as f64 / self.segment as f64;
        // Leaves room for a new flow.
        self.max = if window < self.max { window * (1.0 + BETA) / 2.0 } else { window };
        self.threshold = ((self.window as f64 * BETA) as u64).max(2 * self.segment);
        self.window = self.threshold;
        self.epoch = None;
    }

    /// The retransmission timer expired.
    pub(crate) fn timed_out(&mut self) {
        self.lost();
        self.window = self.segment;
        self.start = SlowStart::default();
    }

    /// Nothing was sent for longer than the retransmission timeout, so the path is unknown again (RFC 9293 section
    /// 3.8.1).
    pub(crate) fn idle(&mut self) {
        self.window = self.window.min(INITIAL_SEGMENTS * self.segment);
        self.epoch = None;
        self.start = SlowStart::default();
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::now;
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn slow_start_doubles_the_window_each_round() {
        let (mut cubic, at) = (Cubic::new(1000), now());
        cubic.acknowledged(at, 10_000, 50 * MS);
        assert_eq!(cubic.window(), 20_000);
    }

    #[test]
    fn a_loss_takes_three_tenths_and_the_window_comes_back_to_where_it_was_in_k_seconds() {
        let (mut cubic, mut at) = (Cubic::new(1000), now());
        cubic.set_window(1_000_000);
        cubic.lost();
        assert_eq!(cubic.window(), 700_000);
        // K = cbrt(1000 * 0.3 / 0.4) = 9.1 s.
        let end = at + Duration::from_millis(9100);
        while at < end {
            cubic.acknowledged(at, cubic.window(), 50 * MS);
            at += 50 * MS;
        }
        assert!((950_000..=1_050_000).contains(&cubic.window()), "{}", cubic.window());
        while at < end + Duration::from_secs(5) {
            cubic.acknowledged(at, cubic.window(), 50 * MS);
            at += 50 * MS;
        }
        assert!(cubic.window() > 1_040_000, "{}", cubic.window());
    }

    #[test]
    fn a_timeout_leaves_one_segment_and_slow_start_up_to_the_threshold() {
        let (mut cubic, at) = (Cubic::new(1000), now());
        cubic.set_window(100_000);
        cubic.timed_out();
        assert_eq!((cubic.window(), cubic.threshold()), (1000, 70_000));
        cubic.acknowledged(at, 1000, MS);
        assert_eq!(cubic.window(), 2000);
    }

    #[test]
    fn a_growing_round_trip_time_ends_slow_start() {
        let mut cubic = Cubic::new(1000);
        let mut offset = 0;
        for round in 0..12 {
            let rtt = if round < 3 { 20 * MS } else { 40 * MS };
            let next = offset + 100;
            for _ in 0..10 {
                offset += 10;
                cubic.sampled(rtt, offset, next);
            }
            offset = next;
        }
        assert!(cubic.threshold() < u64::MAX);
    }
}
