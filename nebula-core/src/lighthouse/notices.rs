//! Which hosts this lighthouse told lately that another one is about to call them.

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::index::LocalIndex;

/// Lets one notice through per second for each pair of asker and subject: each makes the subject send datagrams to
/// addresses that the asker chose. Bounded: beyond [`MAX_PAIRS`] a second there are none.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    /// By the tunnel of the asker.
    pairs: BTreeSet<(LocalIndex, IpAddr)>,
    /// The same in order of time.
    order: VecDeque<(Instant, (LocalIndex, IpAddr))>,
}

impl Notices {
    /// Whether to tell `subject` about the peer of tunnel `asker`. If so, not again for a while.
    #[must_use]
    pub(crate) fn may_tell(&mut self, now: Instant, asker: LocalIndex, subject: IpAddr) -> bool {
        while let Some((_, old)) = self.order.front().copied().filter(|(told, _)| now >= *told + PAUSE) {
            self.order.pop_front();
            self.pairs.remove(&old);
        }
        let may = self.order.len() < MAX_PAIRS && self.pairs.insert((asker, subject));
        if may {
            self.order.push_back((now, (asker, subject)));
        }
        may
    }
}

const PAUSE: Duration = Duration::from_secs(1);
/// About eight megabytes, in a network in which so many hosts call each other every second.
const MAX_PAIRS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn a_pair_is_told_once_a_second_and_others_are_told_meanwhile() {
        let (mut notices, start) = (Notices::default(), Instant::now());
        let subjects = [1, 2].map(|host| IpAddr::from([10, 42, 0, host]));
        let asked = (0..100).map(|n| start + Duration::from_millis(n * 100));
        let told = asked.filter(|now| notices.may_tell(*now, LocalIndex(1), subjects[0])).count();
        assert_eq!(told, 10);
        let end = start + Duration::from_secs(10);
        assert!(notices.may_tell(end, LocalIndex(1), subjects[1]) && notices.may_tell(end, LocalIndex(2), subjects[1]));
        assert!(notices.order.len() <= 3 && notices.pairs.len() == notices.order.len());
    }
}
