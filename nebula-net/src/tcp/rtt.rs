//! Round-trip time and retransmission timeout (RFC 6298).

use std::time::Duration;

/// As Linux has it; RFC 6298 asks for a second, which is long for a path of milliseconds.
const MIN_RTO: Duration = Duration::from_millis(200);
const MAX_RTO: Duration = Duration::from_secs(60);
/// Before the first sample.
const INITIAL_RTO: Duration = Duration::from_secs(1);

/// Smoothed round-trip time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rtt {
    /// Mean and mean deviation.
    smoothed: Option<(Duration, Duration)>,
    min: Option<Duration>,
    backoff: u32,
}

impl Rtt {
    pub(crate) fn sample(&mut self, rtt: Duration) {
        self.smoothed = Some(match self.smoothed {
            None => (rtt, rtt / 2),
            Some((mean, deviation)) => ((mean * 7 + rtt) / 8, (deviation * 3 + mean.abs_diff(rtt)) / 4),
        });
        self.min = Some(self.min.map_or(rtt, |min| min.min(rtt)));
        self.backoff = 0;
    }

    /// Smoothed round-trip time, once there is one.
    pub(crate) fn smoothed(&self) -> Option<Duration> {
        self.smoothed.map(|(mean, _)| mean)
    }

    /// Shortest round-trip time that was seen.
    pub(crate) fn min(&self) -> Option<Duration> {
        self.min
    }

    /// Retransmission timeout, backoff included.
    pub(crate) fn timeout(&self) -> Duration {
        let base = self.smoothed.map_or(INITIAL_RTO, |(mean, deviation)| (mean + deviation * 4).max(MIN_RTO));
        base.saturating_mul(1 << self.backoff.min(10)).min(MAX_RTO)
    }

    /// Doubles the timeout until the next sample.
    pub(crate) fn back_off(&mut self) {
        self.backoff += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_timeout_follows_the_samples_and_doubles_without_them() {
        let mut rtt = Rtt::default();
        assert_eq!(rtt.timeout(), INITIAL_RTO);
        rtt.sample(100 * MS);
        assert_eq!(rtt.timeout(), 300 * MS);
        (0..50).for_each(|_| rtt.sample(100 * MS));
        assert_eq!(rtt.timeout(), MIN_RTO);
        rtt.back_off();
        rtt.back_off();
        assert_eq!(rtt.timeout(), 4 * MIN_RTO);
        (0..100).for_each(|_| rtt.back_off());
        assert_eq!(rtt.timeout(), MAX_RTO);
        rtt.sample(MS);
        assert_eq!((rtt.min(), rtt.timeout() < MAX_RTO), (Some(MS), true));
    }
}
