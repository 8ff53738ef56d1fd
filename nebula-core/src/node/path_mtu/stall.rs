//! A sign in the traffic of a tunnel that connections have stalled: much less is sent than before.

/// Compares what was sent between the last looks.
#[derive(Debug, Clone, Default)]
pub(super) struct StallDetector {
    /// Send counter at the last look.
    looked: u64,
    /// Datagrams sent between earlier looks, newest first.
    passed: [u64; 2],
    has_stalled: bool,
}

impl StallDetector {
    /// `sent` is the next send counter of the tunnel.
    pub(super) fn look(&mut self, sent: u64) {
        let passed = sent.saturating_sub(self.looked);
        let [newest, oldest] = self.passed;
        self.has_stalled = passed >= STALLED && newest.max(oldest) >= PASSED_BEFORE.max(passed.saturating_mul(8));
        (self.looked, self.passed) = (sent, [passed, if self.has_stalled { 0 } else { newest }]);
    }

    /// Whether the path may have shrunk: large packets are lost, and so the connections send almost nothing.
    pub(super) fn has_stalled(&self) -> bool {
        self.has_stalled
    }

    /// The path is examined for that reason or another.
    pub(super) fn note_examined(&mut self) {
        self.has_stalled = false;
    }
}

/// Connections may have stalled if a tunnel that sent at least this many datagrams between two looks now sends an
/// eighth of them or less ...
const PASSED_BEFORE: u64 = 200;
/// ... but at least this many, which may be retransmissions.
const STALLED: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn stalls(sent: &[u64]) -> Vec<bool> {
        let (mut detector, mut counter) = (StallDetector::default(), 0);
        let looks = sent.iter().map(|sent| {
            counter += sent;
            detector.look(counter);
            detector.has_stalled()
        });
        looks.collect()
    }

    #[test]
    fn an_eighth_of_the_traffic_before_is_a_stall_once_and_silence_is_none() {
        assert_eq!(stalls(&[500, 500, 62, 62]), [false, false, true, false]);
        assert_eq!(stalls(&[500, 63]), [false, false]);
        assert_eq!(stalls(&[500, 1, 0, 0]), [false; 4], "nobody sends");
        assert_eq!(stalls(&[199, 2]), [false, false], "too little to tell");
    }
}
