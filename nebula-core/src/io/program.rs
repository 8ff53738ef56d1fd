//! Pages of the program itself: the kernel maps sixteen around every one that is touched, so a start leaves nearly all of
//! the file mapped, of which little is needed again.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

// A handshake is work for several turns.
const PATIENCE: Duration = Duration::from_secs(1);
// Mapping the pages of a handshake again costs less than a tenth of the handshake.
const INTERVAL: Duration = Duration::from_secs(10);

// About a hundred kilobytes of flows.
const WORTH_IT: usize = 1000;

/// Decides when the control thread gives back what rare work has mapped.
#[derive(Debug, Default)]
pub(super) struct RareWork {
    happened: Option<Instant>,
    released: Option<Instant>,
}

impl RareWork {
    /// Notes a handshake or the like.
    pub(super) fn note(&mut self, now: Instant) {
        self.happened.get_or_insert(now);
    }

    /// When [`RareWork::is_over`] should be asked; `None`: there was none.
    pub(super) fn due(&self) -> Option<Instant> {
        let quiet = self.happened? + PATIENCE;
        Some(self.released.map_or(quiet, |at| quiet.max(at + INTERVAL)))
    }

    /// `true` once, a moment after rare work, if the last time is not just past.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        let due = self.due().is_some_and(|due| now >= due);
        if due {
            *self = Self { happened: None, released: Some(now) };
        }
        due
    }
}

/// Notices when a table that had grown is small again: what it held is worth giving back.
#[derive(Debug, Default)]
pub(super) struct Ebb {
    most: usize,
}

impl Ebb {
    /// Whether `entries` are less than half of what there was since the last time.
    pub(super) fn is_low(&mut self, entries: usize) -> bool {
        self.most = self.most.max(entries);
        let low = self.most >= WORTH_IT && entries < self.most / 2;
        if low {
            self.most = entries;
        }
        low
    }
}

/// Unmaps code and constants of this program. What is needed again is mapped with its next use, from the file in memory.
/// Call it after work that does not come back soon, like reading a configuration.
pub fn release_program_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            // Made by the linker: the first byte of the program, and the first one after its code.
            static __executable_start: u8;
            static etext: u8;
        }
        let (start, end) = ((&raw const __executable_start).addr(), (&raw const etext).addr());
        // SAFETY: asks for a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(0);
        if page == 0 || !start.is_multiple_of(page) {
            return;
        }
        let len = end.saturating_sub(start) / page * page;
        let start = (&raw const __executable_start).cast_mut();
        // SAFETY: from its header to the end of its code a program consists of private read-only mappings of its file, which
        // cannot be written while it runs; nothing relocates them. Their pages come back from the file as they were. A
        // refusal (locked memory) changes nothing.
        let _ = unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) };
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn mapped_kilobytes() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssFile:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn released_pages_are_no_longer_mapped_and_come_back_as_they_were() {
        let table: &[&str] = &["constants", "with", "relocations"];
        let before = (mapped_kilobytes(), table.join(" "));
        release_program_pages();
        let after = (mapped_kilobytes(), table.join(" "));
        assert!(after.0 < before.0, "{} kB mapped, {} kB before", after.0, before.0);
        assert_eq!(after.1, before.1);
    }

    #[test]
    fn pages_are_released_after_rare_work_and_not_after_every_piece_of_it() {
        let start = super::super::clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut work = RareWork::default();
        assert!(!work.is_over(at(0)));
        work.note(at(0));
        assert!(!work.is_over(at(0)), "the rest of it comes at once");
        assert!(work.is_over(at(1)));
        work.note(at(2));
        assert!(!work.is_over(at(3)));
        assert!(work.is_over(at(11)));
        assert!(!work.is_over(at(30)));
    }

    #[test]
    fn a_table_is_worth_a_look_once_after_it_shrank_much() {
        let mut ebb = Ebb::default();
        let low = [10, 900, 2, 5_000, 4_000, 2_400, 2_300, 1_300, 1_000].map(|entries| ebb.is_low(entries));
        assert_eq!(low, [false, false, false, false, false, true, false, false, true]);
    }
}
