//! Spreads what the window allows over the round trip (pacing): a token bucket that fills a little faster than the
//! window is used up. A burst of a whole window overflows the queue of a slow link on the way, and is lost there.

use std::time::{Duration, Instant};

/// Shorter round trips are not paced: the timers of a program are no finer, and there is no slow link in them.
const MIN_RTT: Duration = Duration::from_millis(1);
/// What may be sent at once after a pause: of this time, for a timer may be that late.
const BURST: Duration = Duration::from_millis(2);
/// What is waited for: so much that super-packets stay large.
const WORTH_A_WAIT: Duration = Duration::from_millis(1);
/// Segments of the first window, which is sent at once.
const FIRST: u64 = 10;

/// What a path allows at the moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// Congestion window in bytes.
    pub(crate) window: u64,
    pub(crate) rtt: Duration,
    /// Payload bytes of a segment.
    pub(crate) segment: u64,
    /// Whether the window doubles with each round trip.
    pub(crate) slow_start: bool,
}

/// Tokens are bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pacer {
    tokens: f64,
    /// `None` while the path is not paced: then the bucket is full when that begins.
    filled: Option<Instant>,
}

impl Pacer {
    /// Bytes that may be sent now, or when to ask again.
    pub(crate) fn allowance(&mut self, now: Instant, pace: Pace) -> Result<u64, Instant> {
        if pace.rtt < MIN_RTT {
            self.filled = None;
            return Ok(u64::MAX);
        }
        // As in Linux: twice the window in a round trip while it doubles, and later a fifth more than it.
        let gain = if pace.slow_start { 2.0 } else { 1.2 };
        let rate = gain * pace.window as f64 / pace.rtt.as_secs_f64();
        let most = (rate * BURST.as_secs_f64()).max((FIRST * pace.segment) as f64);
        let elapsed = self.filled.map(|filled| now.saturating_duration_since(filled).as_secs_f64());
        self.tokens = elapsed.map_or(most, |elapsed| (self.tokens + rate * elapsed).min(most));
        self.filled = Some(now);
        let wanted = (rate * WORTH_A_WAIT.as_secs_f64()).max(pace.segment as f64);
        if self.tokens >= wanted {
            return Ok(self.tokens as u64);
        }
        Err(now + Duration::from_secs_f64((wanted - self.tokens) / rate.max(1.0)).max(Duration::from_micros(1)))
    }

    /// Bytes were sent, also those that were not asked for. Of these a super-packet may be owed.
    pub(crate) fn sent(&mut self, bytes: u64) {
        self.tokens = (self.tokens - bytes as f64).max(-f64::from(u16::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::now;
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_window_takes_a_round_trip_however_late_the_timer_is() {
        for late in [Duration::ZERO, MS] {
            let pace = Pace { window: 1_000_000, rtt: 100 * MS, segment: 1000, slow_start: false };
            let (mut pacer, start, mut sent) = (Pacer::default(), now(), 0);
            let mut at = start;
            while at < start + 100 * MS {
                match pacer.allowance(at, pace) {
                    Ok(bytes) => {
                        assert!(bytes <= 24_000, "a burst of {bytes} bytes");
                        pacer.sent(bytes);
                        sent += bytes;
                    }
                    Err(due) => {
                        assert!(due > at);
                        at = due + late;
                    }
                }
            }
            assert!((1_150_000..=1_250_000).contains(&sent), "{sent}");
        }
    }

    #[test]
    fn short_round_trips_are_not_paced_and_the_first_window_goes_at_once() {
        let pace = Pace { window: 10_000, rtt: MS / 2, segment: 1000, slow_start: true };
        assert_eq!(Pacer::default().allowance(now(), pace), Ok(u64::MAX));
        assert_eq!(Pacer::default().allowance(now(), Pace { rtt: 100 * MS, ..pace }), Ok(10_000));
    }

    #[test]
    fn what_was_sent_while_the_path_was_short_is_not_owed_when_it_is_long() {
        let pace = Pace { window: 1_000_000, rtt: MS / 2, segment: 1000, slow_start: false };
        let (mut pacer, at) = (Pacer::default(), now());
        for second in 0..100 {
            assert_eq!(pacer.allowance(at + 1000 * MS * second, pace), Ok(u64::MAX));
            pacer.sent(1_000_000_000);
        }
        let later = at + 100_000 * MS;
        assert!(pacer.allowance(later, Pace { rtt: 100 * MS, ..pace }).is_ok_and(|bytes| bytes >= 10_000));
        pacer.sent(1_000_000_000);
        let due = pacer.allowance(later, Pace { rtt: 100 * MS, ..pace }).unwrap_err();
        assert!(due < later + 10 * MS, "{:?}", due - later);
    }
}
