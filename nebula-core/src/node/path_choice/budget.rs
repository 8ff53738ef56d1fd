//! How many probes the traffic of a tunnel pays for.

/// Counts in hundredths of a datagram: each datagram that the tunnel carries pays for one.
#[derive(Debug)]
pub(super) struct Budget {
    saved: u64,
    /// Datagrams that the tunnel had carried when this was last asked.
    seen: u64,
    /// Probes and answers since, which are no traffic.
    own: u64,
}

impl Budget {
    /// `datagrams`: what the tunnel has carried so far.
    pub(super) fn new(datagrams: u64) -> Self {
        Self { saved: RESERVE, seen: datagrams, own: 0 }
    }

    /// Pays for the first probes by a new way.
    pub(super) fn advance(&mut self) {
        self.saved = (self.saved + FIRST_PROBES * PROBE).min(RESERVE + MAX_ADVANCE * PROBE);
    }

    /// The tunnel carried `datagrams` so far, and has so many ways. Returns how many of them are new traffic.
    pub(super) fn earn(&mut self, datagrams: u64, ways: usize) -> u64 {
        let passed = datagrams.saturating_sub(self.seen);
        let fresh = passed.saturating_sub(self.own);
        self.own = self.own.saturating_sub(passed);
        self.seen = datagrams;
        let most = RESERVE + MAX_ROUNDS * PROBE * ways.min(4) as u64;
        if self.saved < most {
            self.saved = most.min(self.saved.saturating_add(fresh));
        }
        fresh
    }

    /// Another tunnel takes over, which carried `datagrams` so far.
    pub(super) fn move_over(&mut self, datagrams: u64) {
        (self.seen, self.own) = (datagrams, 0);
    }

    /// Datagrams that measure are no traffic.
    pub(super) fn note_own(&mut self, datagrams: u64) {
        self.own += datagrams;
    }

    /// How many probes are paid for. The reserve is for when the path in use seems to be dead.
    pub(super) fn probes(&self, is_urgent: bool) -> usize {
        let free = self.saved.saturating_sub(if is_urgent { 0 } else { RESERVE });
        usize::try_from(free / PROBE).unwrap_or(usize::MAX)
    }

    pub(super) fn spend(&mut self, probes: usize) {
        self.saved = self.saved.saturating_sub(probes as u64 * PROBE);
        self.own += probes as u64;
    }
}

/// A probe and its answer.
const PROBE: u64 = 2 * 100;
/// What is kept for when the path in use seems to be dead.
const RESERVE: u64 = 8 * PROBE;
/// Probes by each new way, in advance: enough to choose, and for no more than some ways.
const FIRST_PROBES: u64 = 6;
const MAX_ADVANCE: u64 = 40;
/// Rounds that may be saved up.
const MAX_ROUNDS: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_and_its_answer_cost_200_datagrams() {
        let mut budget = Budget::new(1000);
        assert_eq!((budget.probes(false), budget.probes(true)), (0, 8));
        assert_eq!(budget.earn(1199, 2), 199);
        assert_eq!(budget.probes(false), 0);
        assert_eq!(budget.earn(1200, 2), 1);
        assert_eq!(budget.probes(false), 1);
        budget.spend(1);
        assert_eq!(budget.probes(false), 0);
    }

    #[test]
    fn probes_and_answers_pay_for_nothing_and_savings_are_limited() {
        let mut budget = Budget::new(0);
        budget.advance();
        assert_eq!(budget.probes(false), 6);
        budget.spend(2);
        budget.note_own(2);
        assert_eq!(budget.earn(4, 2), 0);
        assert_eq!(budget.earn(1_000_000, 2), 999_996);
        assert_eq!(budget.probes(false), 16);
    }
}
