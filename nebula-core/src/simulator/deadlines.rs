//! What is due when, for any number of hosts or programs.

use std::collections::BTreeSet;
use std::time::Instant;

/// At most one deadline for each number; the next one is found without asking the others.
#[derive(Debug, Default)]
pub struct Deadlines {
    by_time: BTreeSet<(Instant, usize)>,
    by_number: Vec<Option<Instant>>,
}

impl Deadlines {
    /// Sets the deadline of `number`, or takes it away.
    pub fn set(&mut self, number: usize, at: Option<Instant>) {
        if self.by_number.len() <= number {
            self.by_number.resize(number + 1, None);
        }
        let before = std::mem::replace(&mut self.by_number[number], at);
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.by_time.remove(&(before, number));
        }
        if let Some(at) = at {
            self.by_time.insert((at, number));
        }
    }

    /// The earliest deadline.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// The numbers whose deadline has come, in ascending order.
    #[must_use]
    pub fn due(&self, now: Instant) -> Vec<usize> {
        let mut due: Vec<usize> = self.by_time.range(..=(now, usize::MAX)).map(|(_, number)| *number).collect();
        due.sort_unstable();
        due
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "some moment to begin with")]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_earliest_is_next_and_those_that_are_due_come_by_number() {
        let start = Instant::now();
        let at = |seconds| Some(start + Duration::from_secs(seconds));
        let mut deadlines = Deadlines::default();
        assert_eq!(deadlines.next(), None);
        for (number, seconds) in [(2, 1), (0, 2), (7, 3), (1, 2)] {
            deadlines.set(number, at(seconds));
        }
        assert_eq!(deadlines.next(), at(1));
        assert_eq!(deadlines.due(start), [0; 0]);
        assert_eq!(deadlines.due(start + Duration::from_secs(2)), [0, 1, 2]);
        deadlines.set(2, at(9));
        deadlines.set(1, None);
        assert_eq!(deadlines.next(), at(2));
        assert_eq!(deadlines.due(start + Duration::from_secs(3)), [0, 7]);
    }
}
