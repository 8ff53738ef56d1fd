//! Decides when to ask the CA service for changes to the trust (trust bundle, blocklist). No clock, no I/O.

use std::time::Duration;

use crate::ca_client::backoff::Jitter;

/// Schedules the requests. Times count from an arbitrary fixed moment and never go back.
#[derive(Debug)]
pub struct TrustWatch {
    state: State,
    failures: u32,
    jitter: Jitter,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// There is no certificate yet.
    Idle,
    AskAt(Duration),
    InFlight,
}

impl TrustWatch {
    /// Creates an idle watch; [`TrustWatch::begin`] starts it. `seed` spreads the requests of many pods.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: State::Idle, failures: 0, jitter: Jitter(seed) }
    }

    /// Starts the watch once there is a certificate; later calls have no effect. The trust that came with the
    /// certificate is from `now`.
    pub fn begin(&mut self, now: Duration) {
        if self.state == State::Idle {
            self.state = State::AskAt(now + self.jitter.around(DELAY_AFTER_CHANGE));
        }
    }

    /// Whether to ask at `now`. After `true`, report the outcome with [`TrustWatch::answered`] or
    /// [`TrustWatch::failed`].
    #[must_use]
    pub fn is_due(&mut self, now: Duration) -> bool {
        let is_due = matches!(self.state, State::AskAt(at) if now >= at);
        if is_due {
            self.state = State::InFlight;
        }
        is_due
    }

    /// When to call [`TrustWatch::is_due`] again, if a request is scheduled.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        if let State::AskAt(at) = self.state { Some(at) } else { None }
    }

    /// Records the CA's answer, with or without news, to a request sent at `asked`. `retry_after` is the delay that the
    /// CA asked for.
    pub fn answered(&mut self, asked: Duration, now: Duration, news: bool, retry_after: Option<Duration>) {
        self.failures = 0;
        // A long poll is followed by the next one at once. After news there is a short delay, because changes often
        // come in groups.
        let next =
            if news { now + self.jitter.around(DELAY_AFTER_CHANGE) } else { asked + self.jitter.around(POLL_INTERVAL) };
        let left_alone = now + self.jitter.around(retry_after.unwrap_or_default().min(MAX_BACKOFF));
        self.state = State::AskAt(next.max(left_alone));
    }

    /// Records that the CA did not answer. The trust in use is kept. Returns whether that is news for a human:
    /// services, and what is between, end a connection that has lasted for a while, so only the second failure in a
    /// row is one.
    pub fn failed(&mut self, now: Duration) -> bool {
        let is_news = self.failures > 0;
        let wait = FIRST_BACKOFF.saturating_mul(1 << self.failures.min(8)).min(MAX_BACKOFF);
        self.failures = self.failures.saturating_add(1);
        self.state = State::AskAt(now + self.jitter.around(wait));
        is_news
    }
}

// Blocked peers must lose their tunnels within seconds, even if the service does not support long polling.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
// Between a change and the next long poll.
const DELAY_AFTER_CHANGE: Duration = Duration::from_millis(500);
// When the service restarts, all pods lose their connections to it at the same time.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn nothing_is_asked_before_there_is_a_certificate_and_then_every_few_seconds() {
        let mut watch = TrustWatch::new(1);
        assert!(!watch.is_due(seconds(100)));
        watch.begin(seconds(100));
        assert!(watch.is_due(seconds(101)));
        let mut now = seconds(101);
        watch.answered(now, now, false, None);
        for _ in 0..100 {
            let next = watch.deadline().unwrap();
            assert!((seconds(3)..=seconds(7)).contains(&(next - now)), "{:?}", next - now);
            now = next;
            assert!(watch.is_due(now));
            assert!(!watch.is_due(now), "one question at a time");
            watch.begin(now);
            watch.answered(now, now, false, None);
        }
    }

    /// A certificate may be renewed during a long poll; a second poll started then would never end.
    #[test]
    fn a_renewal_starts_no_second_request_beside_one_in_flight() {
        let mut watch = TrustWatch::new(3);
        watch.begin(Duration::ZERO);
        assert!(watch.is_due(seconds(1)));
        watch.begin(seconds(2));
        assert_eq!(watch.deadline(), None);
        assert!(!watch.is_due(seconds(30)));
        watch.answered(seconds(1), seconds(51), false, None);
        assert!(watch.deadline().is_some());
    }

    #[test]
    fn a_ca_that_is_away_for_hours_is_asked_about_once_a_minute_and_is_followed_again_when_it_is_back() {
        let mut watch = TrustWatch::new(2);
        watch.begin(Duration::ZERO);
        let (mut now, mut asked) = (Duration::ZERO, 0);
        while now < seconds(4 * 3600) {
            now = watch.deadline().unwrap();
            assert!(watch.is_due(now));
            asked += 1;
            assert_eq!(watch.failed(now), asked > 1);
        }
        assert!((220..350).contains(&asked), "{asked} questions in four hours");
        assert!(watch.is_due(watch.deadline().unwrap()));
        watch.answered(now, now, false, None);
        assert!(watch.deadline().unwrap() <= now + seconds(7));
    }

    #[test]
    fn a_connection_that_ends_in_mid_wait_is_no_news_as_long_as_the_next_one_is_answered() {
        let mut watch = TrustWatch::new(5);
        watch.begin(Duration::ZERO);
        for hour in 0..24 {
            assert!(!watch.failed(seconds(hour * 3600 + 251)));
            watch.answered(seconds(hour * 3600 + 252), seconds(hour * 3600 + 302), false, None);
        }
        assert!(!watch.failed(seconds(86_400)));
        assert!(watch.failed(seconds(86_401)));
    }

    #[test]
    fn a_question_that_the_service_kept_is_asked_again_at_once_unless_the_service_wants_to_be_left_alone() {
        let mut watch = TrustWatch::new(3);
        watch.begin(Duration::ZERO);
        watch.answered(seconds(10), seconds(60), false, None);
        assert!(watch.is_due(seconds(60)));
        watch.answered(seconds(60), seconds(61), false, Some(seconds(20)));
        assert!(!watch.is_due(seconds(75)) && watch.is_due(seconds(91)));
        watch.answered(seconds(91), seconds(91), false, Some(seconds(1_000_000)));
        assert!(watch.is_due(seconds(91 + 75)), "bounded");
    }

    #[test]
    fn the_next_change_is_waited_for_soon_after_the_last_one_and_after_the_service_was_started_again() {
        let mut watch = TrustWatch::new(4);
        watch.begin(Duration::ZERO);
        watch.answered(seconds(10), seconds(12), true, None);
        assert!(!watch.is_due(seconds(12)) && watch.is_due(seconds(13)));
        let _ = watch.failed(seconds(13));
        assert!(watch.is_due(seconds(13) + FIRST_BACKOFF * 5 / 4));
    }

    #[test]
    fn pods_that_start_together_do_not_ask_together() {
        let first = |seed| {
            let mut watch = TrustWatch::new(seed);
            watch.begin(Duration::ZERO);
            watch.deadline().unwrap()
        };
        let moments: std::collections::BTreeSet<_> = (0..50).map(first).collect();
        assert!(moments.len() > 40);
    }
}
