//! Addresses that enrolled pods had a moment ago. Another pod gets an address at once, but the news that it has
//! another owner reaches nodes, instances and their pods one after the other. So for a while nobody speaks in clear
//! with an address that an enrolled pod has left: the table knows nothing about it, and the guards of captured pods
//! let nothing through.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use nebula_cni_contract::cluster_table::contents::Contents;
use nebula_cni_contract::cluster_table::{Layout, MAX_BYTES};
use tokio::time::Instant;

use super::judgement::Judgement;
use super::seeded::Map;
use crate::durable;

/// The addresses, with the time when their pods were gone.
#[derive(Debug)]
pub struct Departed {
    pause: Duration,
    /// Addresses of enrolled pods, and of those that may be, when this was looked at last.
    taken: Box<[IpAddr]>,
    since: Map<IpAddr, Instant>,
    /// When the first of those addresses that other pods have may be spoken to.
    due: Option<Instant>,
}

impl Default for Departed {
    fn default() -> Self {
        Self { pause: PAUSE, taken: Box::default(), since: Map::default(), due: None }
    }
}

impl Departed {
    #[cfg(test)]
    pub(super) fn pausing(pause: Duration) -> Self {
        Self { pause, ..Self::default() }
    }

    /// Goes on with the table that an earlier agent wrote: who is in there and not enrolled any more has left
    /// meanwhile.
    #[must_use]
    pub fn since_table(path: &Path) -> Self {
        let bytes = durable::read_bounded(path, MAX_BYTES).unwrap_or_default();
        let Ok(layout) = Layout::read(&bytes) else { return Self::default() };
        let enrolled = Contents::of(&layout.table(&bytes)).enrolled;
        Self { taken: enrolled.iter().map(|pod| pod.address).collect(), ..Self::default() }
    }

    /// Takes the addresses out of those that are known not to be enrolled.
    pub fn withhold(&mut self, judgement: &mut Judgement, now: Instant) {
        // Almost all of them are in both.
        let mut taken = std::mem::take(&mut judgement.claimed);
        taken.extend(judgement.enrolled.iter().map(|(address, _)| *address));
        self.since.retain(|address, since| now < *since + self.pause && !taken.contains(address));
        self.since.extend(self.taken.iter().filter(|address| !taken.contains(*address)).map(|address| (*address, now)));
        self.taken = taken.into_iter().collect();
        self.due = None;
        for (address, since) in &self.since {
            if judgement.clear.remove(address) {
                let until = *since + self.pause;
                self.due = Some(self.due.map_or(until, |due| due.min(until)));
                judgement.withheld += 1;
            }
        }
    }

    /// Whether an address that was taken out may be among them again.
    #[must_use]
    pub fn is_due(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| now >= due)
    }
}

/// Longer than an instance takes to restart, and than the news of a change takes to reach all nodes of a cluster.
const PAUSE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use nebula_cni_contract::cluster_table::Builder;

    use super::*;

    fn at(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn judgement(enrolled: &[u8], claimed: &[u8], clear: &[u8]) -> Judgement {
        Judgement {
            enrolled: enrolled.iter().map(|last| (at(*last), 1)).collect(),
            claimed: claimed.iter().map(|last| at(*last)).collect(),
            clear: clear.iter().map(|last| at(*last)).collect(),
            ..Judgement::default()
        }
    }

    /// The addresses that are known not to be enrolled, after that.
    fn clear(departed: &mut Departed, mut judgement: Judgement, now: Instant) -> Vec<IpAddr> {
        departed.withhold(&mut judgement, now);
        judgement.clear.into_iter().collect()
    }

    #[test]
    fn an_address_is_nobodys_for_a_while_after_its_pod_has_left() {
        let (mut departed, start) = (Departed::default(), Instant::now());
        assert_eq!(clear(&mut departed, judgement(&[1, 2], &[], &[3]), start), [at(3)]);
        assert!(!departed.is_due(start + 9 * PAUSE), "nothing is withheld");
        // Another pod is there at once.
        for wait in [Duration::ZERO, PAUSE - Duration::from_millis(1)] {
            assert_eq!(clear(&mut departed, judgement(&[2], &[], &[1, 3]), start + wait), [at(3)]);
            assert!(!departed.is_due(start + wait) && departed.is_due(start + PAUSE));
        }
        assert_eq!(clear(&mut departed, judgement(&[2], &[], &[1, 3]), start + PAUSE), [at(1), at(3)]);
        assert!(departed.since.is_empty() && departed.due.is_none());
    }

    #[test]
    fn the_pause_begins_when_nobody_lays_claim_to_the_address_any_more() {
        let (mut departed, start) = (Departed::default(), Instant::now());
        clear(&mut departed, judgement(&[1], &[], &[]), start);
        // Its pod is gone, and the CA's directory still has it.
        clear(&mut departed, judgement(&[], &[1], &[]), start + PAUSE);
        assert!(clear(&mut departed, judgement(&[], &[], &[1]), start + 2 * PAUSE).is_empty());
        assert_eq!(clear(&mut departed, judgement(&[], &[], &[1]), start + 3 * PAUSE), [at(1)]);
        // An enrolled pod has it again and leaves again.
        clear(&mut departed, judgement(&[1], &[], &[]), start + 3 * PAUSE);
        assert!(clear(&mut departed, judgement(&[], &[], &[1]), start + 4 * PAUSE).is_empty());
    }

    #[test]
    fn who_left_while_no_agent_ran_has_left_when_the_next_one_looks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let mut builder = Builder::new();
        builder.pod(at(1), 7);
        std::fs::write(&path, builder.finish(1)).unwrap();
        let (mut departed, start) = (Departed::since_table(&path), Instant::now());
        assert_eq!(clear(&mut departed, judgement(&[], &[], &[1, 2]), start), [at(2)]);
        assert_eq!(clear(&mut departed, judgement(&[], &[], &[1, 2]), start + PAUSE), [at(1), at(2)]);
        std::fs::write(&path, "nonsense").unwrap();
        assert!(Departed::since_table(&path).taken.is_empty());
    }
}
