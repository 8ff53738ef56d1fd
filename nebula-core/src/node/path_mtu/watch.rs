//! Signs in the traffic of a tunnel that its path carries less than before.

use std::time::{Duration, Instant};

use crate::node::path_choice::Carried;

/// Compares the traffic of a tunnel at each look with that before. Reads counters that are there anyway, so it costs
/// no packet anything.
///
/// A connection whose large packets are lost sends less and less: one packet, at pauses that double. Its peer has
/// nothing to answer. So the sign is that something was sent and nothing came.
#[derive(Debug, Clone)]
pub(super) struct Watch {
    /// At the last look.
    last: Carried,
    /// Tests and answers received since, which say nothing about the traffic.
    tests: u64,
    /// Looks in a row at which nothing had come since something was sent.
    unheard: u32,
    /// Looks in a row at which nothing had been sent.
    quiet: u32,
    /// Silence is no reason for a check before, and how long it is none after the next check.
    check_after: Instant,
    pause: Duration,
    /// When the traffic check last found that something was sent.
    used_at: Instant,
    /// Another look is due.
    is_on: bool,
}

impl Watch {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            last: Carried::default(),
            tests: 0,
            unheard: 0,
            quiet: 0,
            check_after: now,
            pause: FIRST_PAUSE,
            used_at: now,
            is_on: false,
        }
    }

    /// A test of the path, or an answer to one, was received.
    pub(super) fn note_test(&mut self) {
        self.tests += 1;
    }

    /// The traffic check found that something was sent.
    pub(super) fn note_used(&mut self, now: Instant) {
        self.used_at = now;
    }

    /// Whether that was lately.
    pub(super) fn was_used(&self, now: Instant) -> bool {
        now < self.used_at + USED_FOR
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    pub(super) fn turn(&mut self, on: bool) {
        self.is_on = on;
    }

    /// Begins with the traffic from now on.
    pub(super) fn restart(&mut self, carried: Carried) {
        (self.last, self.tests, self.unheard, self.quiet) = (carried, 0, 0, 0);
    }

    /// Looks at the traffic since the last look. Returns whether it stays unanswered. `is_used`: packets were sent,
    /// and not only tests.
    pub(super) fn look(&mut self, now: Instant, carried: Carried, is_used: bool) -> bool {
        let sent = carried.sent.saturating_sub(self.last.sent);
        let heard = carried.received.saturating_sub(self.last.received).saturating_sub(self.tests);
        (self.last, self.tests) = (carried, 0);
        self.quiet = if sent > 0 { 0 } else { self.quiet + 1 };
        if heard > 0 {
            (self.unheard, self.pause) = (0, FIRST_PAUSE);
        } else if is_used && (sent > 0 || self.unheard > 0) {
            self.unheard += 1;
        }
        if self.unheard < UNHEARD || now < self.check_after {
            return false;
        }
        self.check_after = now + self.pause;
        (self.unheard, self.pause) = (0, (self.pause * 2).min(LAST_PAUSE));
        true
    }

    /// Whether the tunnel is in use, so that there is something to look at.
    pub(super) fn goes_on(&self) -> bool {
        self.quiet < QUIET
    }
}

/// How long what a traffic check found holds: until the next one, which may come a little late.
const USED_FOR: Duration = Duration::from_secs(6);
/// Looks in a row that make silence: an answer may take one or two.
const UNHEARD: u32 = 2;
/// Looks without anything sent after which the tunnel counts as idle. The pauses between the attempts of a connection
/// are longer in the end, but the path was checked by then.
const QUIET: u32 = 5;
/// Traffic that is never answered, such as logs, has the path checked after this time ...
const FIRST_PAUSE: Duration = Duration::from_secs(10);
/// ... which doubles up to this.
const LAST_PAUSE: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    /// The seconds at which traffic of `sent` and `received` packets a second counts as unanswered.
    fn signs(seconds: u32, at: impl Fn(u32) -> (u64, u64)) -> Vec<u32> {
        let (start, mut carried) = (base(), Carried::default());
        let mut watch = Watch::new(start);
        (0..seconds)
            .filter(|second| {
                let (sent, received) = at(*second);
                (carried.sent, carried.received) = (carried.sent + sent, carried.received + received);
                watch.look(start + *second * SECOND, carried, true)
            })
            .collect()
    }

    #[test]
    fn silence_after_packets_is_noticed_in_two_looks() {
        assert_eq!(signs(20, |second| if second < 10 { (50, 20) } else { (1, 0) }), [11]);
    }

    #[test]
    fn traffic_that_is_answered_is_no_sign_however_little_it_is_and_however_late_the_answer() {
        assert_eq!(signs(600, |second| (u64::from(second % 3 == 0), u64::from(second % 3 == 1))), [0; 0]);
        assert_eq!(signs(600, |_| (0, 0)), [0; 0]);
    }

    #[test]
    fn traffic_that_is_never_answered_is_a_sign_less_and_less_often() {
        let signs = signs(3600, |_| (10, 0));
        assert!(signs.len() <= 17, "{signs:?}");
        assert!(signs.windows(2).all(|two| two[1] - two[0] >= 10), "{signs:?}");
    }

    #[test]
    fn tests_are_no_answer_to_packets() {
        let start = base();
        let mut watch = Watch::new(start);
        let mut carried = Carried { sent: 10, received: 10 };
        watch.restart(carried);
        let noticed = (1..10).any(|second| {
            (carried.sent, carried.received) = (carried.sent + 2, carried.received + 1);
            watch.note_test();
            watch.look(start + second * SECOND, carried, true)
        });
        assert!(noticed);
    }

    #[test]
    fn tests_that_are_sent_are_no_packets() {
        let start = base();
        let mut watch = Watch::new(start);
        let seconds = 1..600_u32;
        let looks = seconds
            .map(|second| watch.look(start + second * SECOND, Carried { sent: second.into(), received: 0 }, false));
        assert_eq!(looks.filter(|is_sign| *is_sign).count(), 0);
    }
}
