//! What peers say about a relay: whether it carries what it is given.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::node::path_choice::Load;

/// The latest word of each peer that is reached through a relay.
///
/// A peer may lie, to have this node leave a relay. So the relay is left only if more peers find that it drops than
/// that it carries. A peer that is alone with its word has the relay to itself.
#[derive(Debug, Default)]
pub(super) struct Reports(BTreeMap<IpAddr, Report>);

#[derive(Debug)]
struct Report {
    /// Loads in a row that were dropped.
    dropped: u32,
    at: Instant,
}

impl Reports {
    pub(super) fn note(&mut self, now: Instant, peer: IpAddr, load: Load) {
        if !load.is_telling() {
            return;
        }
        if self.0.len() >= MAX_PEERS
            && !self.0.contains_key(&peer)
            && let Some(oldest) = self.0.iter().min_by_key(|(_, report)| report.at).map(|(peer, _)| *peer)
        {
            self.0.remove(&oldest);
        }
        let report = self.0.entry(peer).or_insert(Report { dropped: 0, at: now });
        report.dropped = if load.is_dropped() { report.dropped.saturating_add(1) } else { 0 };
        report.at = now;
    }

    /// Whether it drops what it is given, as most peers find.
    pub(super) fn say_dropped(&self, now: Instant) -> bool {
        let recent = || self.0.values().filter(|report| now < report.at + RECENT);
        let dropped = recent().filter(|report| report.dropped >= DROPPED).count();
        dropped > recent().filter(|report| report.dropped == 0).count()
    }

    pub(super) fn forget(&mut self) {
        self.0.clear();
    }
}

/// Peers whose word is kept.
const MAX_PEERS: usize = 32;
/// What was said before does not count.
const RECENT: Duration = Duration::from_secs(120);
/// Loads in a row that a relay has to drop.
const DROPPED: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    const LOST: Load = Load { sent: 10, missing: 10 };
    const CARRIED: Load = Load { sent: 10, missing: 0 };

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    fn peer(n: u8) -> IpAddr {
        IpAddr::from([10, 42, 0, n])
    }

    #[test]
    fn one_peer_that_lies_is_outvoted_by_one_that_does_not() {
        let (mut reports, now) = (Reports::default(), base());
        reports.note(now, peer(1), LOST);
        assert!(!reports.say_dropped(now), "once may be chance");
        reports.note(now, peer(1), LOST);
        assert!(reports.say_dropped(now));
        reports.note(now, peer(2), CARRIED);
        assert!(!reports.say_dropped(now));
        for _ in 0..100 {
            reports.note(now, peer(1), LOST);
        }
        assert!(!reports.say_dropped(now));
        assert!(reports.0.len() == 2 && !reports.say_dropped(now + RECENT));
    }

    #[test]
    fn any_number_of_peers_takes_bounded_memory() {
        let (mut reports, now) = (Reports::default(), base());
        for n in 0..=255 {
            reports.note(now + Duration::from_millis(n.into()), peer(n), LOST);
        }
        assert_eq!((reports.0.len(), reports.0.contains_key(&peer(255))), (MAX_PEERS, true));
    }
}
