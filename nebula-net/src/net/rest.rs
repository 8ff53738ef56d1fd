//! When memory that a load needed is given back.

use std::time::{Duration, Instant};

/// Notices that most of many connections have ended. Holds two numbers and frees nothing: it only decides.
#[derive(Debug, Default)]
pub(crate) struct Rest {
    /// Most open connections since memory was given back.
    peak: usize,
    /// When it is given back, if no more of them are open by then.
    due: Option<Instant>,
}

/// Fewer connections need too little memory for the work of giving it back.
const MANY: usize = 64;
/// What ends together is waited for, and a server that is called again and again keeps what it needs.
const PAUSE: Duration = Duration::from_secs(1);

impl Rest {
    /// Whether to give memory back now, with so many open connections.
    #[must_use]
    pub(crate) fn look(&mut self, now: Instant, open: usize) -> bool {
        self.peak = self.peak.max(open);
        if self.peak < MANY || open > self.peak / 2 {
            self.due = None;
            return false;
        }
        if now < *self.due.get_or_insert(now + PAUSE) {
            return false;
        }
        *self = Self { peak: open, due: None };
        true
    }

    /// When to look again at the latest.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }
}

#[cfg(test)]
mod tests {
    use super::super::clock;
    use super::*;

    #[test]
    fn memory_is_given_back_once_a_second_after_most_of_many_connections_have_ended() {
        let start = clock::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut rest = Rest::default();
        for (time, open) in [(0, 10), (1, 0), (5_000, 0), (5_001, 100), (5_002, 51)] {
            assert!(!rest.look(at(time), open) && rest.due().is_none(), "{open} open");
        }
        assert!(!rest.look(at(6_000), 50) && rest.due() == Some(at(7_000)));
        // They come back in time.
        assert!(!rest.look(at(6_500), 80) && rest.due().is_none());
        assert!(!rest.look(at(8_000), 3) && !rest.look(at(8_999), 0));
        assert!(rest.look(at(9_000), 0) && rest.due().is_none());
        assert!(!rest.look(at(20_000), 0));
    }
}
