//! Notices a fight over our chain file: somebody else who changes or removes it as often as we write it. Two programs
//! that keep undoing each other make the runtime reload without end, and pods start with or without us by chance.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Counts how often our file had to be written again although nothing that it is derived from changed.
#[derive(Debug, Default)]
pub(crate) struct Rewrites {
    recent: VecDeque<Instant>,
    pause: Option<Pause>,
}

#[derive(Debug, Clone, Copy)]
struct Pause {
    until: Instant,
    length: Duration,
}

impl Rewrites {
    /// Our file was found changed or gone. Returns whether it may be written again now.
    pub(crate) fn lost(&mut self, now: Instant) -> bool {
        if self.is_paused(now) {
            return false;
        }
        if self.pause.is_some_and(|pause| now >= pause.until + FORGET_AFTER) {
            self.pause = None;
        }
        self.recent.push_back(now);
        while self.recent.front().is_some_and(|first| now > *first + WINDOW) {
            self.recent.pop_front();
        }
        if self.recent.len() <= MOST {
            return true;
        }
        self.recent.clear();
        let length = self.pause.map_or(FIRST_PAUSE, |pause| (pause.length * 2).min(LONGEST_PAUSE));
        self.pause = Some(Pause { until: now + length, length });
        false
    }

    /// Whether we leave the file alone for now.
    #[must_use]
    pub(crate) fn is_paused(&self, now: Instant) -> bool {
        self.pause.is_some_and(|pause| now < pause.until)
    }

    /// Time until the next attempt.
    #[must_use]
    pub(crate) fn left(&self, now: Instant) -> Duration {
        self.pause.map_or(Duration::ZERO, |pause| pause.until.saturating_duration_since(now))
    }
}

/// Who most likely removes or rewrites other programs' files, and the setting that ends it. `plugins` are the types
/// in the primary's list, `files` the names in its directory.
#[must_use]
pub(crate) fn probable_owner<'a>(
    plugins: impl Iterator<Item = &'a str>,
    files: impl Iterator<Item = &'a str>,
) -> (&'static str, &'static str) {
    if files.into_iter().any(|file| file.ends_with(".cilium_bak")) {
        return CILIUM;
    }
    let known = |plugin: &str| match plugin {
        "cilium-cni" => Some(CILIUM),
        "istio-cni" => Some(("istio-cni", EDITOR)),
        "linkerd-cni" => Some(("linkerd-cni", EDITOR)),
        "multus" | "multus-shim" => Some(("multus", EDITOR)),
        _ => None,
    };
    let unknown = ("another program", "find the writer with `fatrace` or `auditctl -w` on the directory, and stop it");
    plugins.into_iter().find_map(known).unwrap_or(unknown)
}

const CILIUM: (&str, &str) = ("cilium", "set cni.exclusive to false in cilium's Helm values");
const EDITOR: &str = "let its installer leave the files of other programs alone; see its CNI settings";
const WINDOW: Duration = Duration::from_secs(30);
const MOST: usize = 5;
const FIRST_PAUSE: Duration = Duration::from_secs(60);
const LONGEST_PAUSE: Duration = Duration::from_secs(15 * 60);
const FORGET_AFTER: Duration = Duration::from_secs(10 * 60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_five_losses_within_30_s_are_a_fight() {
        let began = Instant::now();
        let at = |seconds: u64| began + Duration::from_secs(seconds);
        let mut rewrites = Rewrites::default();
        assert!((0..5).all(|second| rewrites.lost(at(second))));
        assert!(!rewrites.lost(at(5)));
        assert!(rewrites.is_paused(at(6)) && !rewrites.lost(at(60)));
        assert_eq!(rewrites.left(at(6)), Duration::from_secs(59));
        assert!(!rewrites.is_paused(at(65)));
        // It goes on: the next pause is longer.
        assert!((65..70).all(|second| rewrites.lost(at(second))));
        assert!(!rewrites.lost(at(70)) && rewrites.is_paused(at(70 + 119)) && !rewrites.is_paused(at(70 + 120)));
    }

    #[test]
    fn a_loss_now_and_then_is_none_and_old_fights_are_forgotten() {
        let began = Instant::now();
        let at = |seconds: u64| began + Duration::from_secs(seconds);
        let mut rewrites = Rewrites::default();
        assert!((0..50).all(|n| rewrites.lost(at(n * 7))));
        let fight = |rewrites: &mut Rewrites, from: u64| {
            assert!(!(0..6).all(|n| rewrites.lost(at(from + n))));
            rewrites.left(at(from + 5))
        };
        let mut rewrites = Rewrites::default();
        assert_eq!(fight(&mut rewrites, 1000), FIRST_PAUSE);
        assert_eq!(fight(&mut rewrites, 3000), FIRST_PAUSE);
        for round in 0..20 {
            let from = 4000 + round * 1000;
            assert!(fight(&mut rewrites, from) <= LONGEST_PAUSE);
        }
    }

    #[test]
    fn the_owner_is_named_with_the_setting() {
        let owner = |plugins: &[&str], files: &[&str]| probable_owner(plugins.iter().copied(), files.iter().copied());
        assert!(owner(&["cilium-cni"], &[]).1.contains("cni.exclusive"));
        assert_eq!(owner(&["bridge"], &["00-nebula-x.conflist.cilium_bak"]).0, "cilium");
        assert_eq!(owner(&["bridge", "portmap"], &["10-x.conflist"]).0, "another program");
    }
}
