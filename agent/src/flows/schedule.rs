//! When each instance is asked: one whose ring fills quickly often, a quiet one seldom. One that takes long, sends much
//! or does not answer waits longer itself.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::{Duration, Instant};

/// All instances by the name of their attachments.
#[derive(Debug, Default)]
pub(super) struct Schedule(HashMap<String, Turn>);

#[derive(Debug, Clone, Copy)]
struct Turn {
    due: Instant,
    pause: Duration,
    failures: u32,
    /// When it was asked last.
    asked: Option<Instant>,
    is_under_way: bool,
}

/// What an instance answered.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Answered {
    pub(super) records: usize,
    pub(super) bytes: usize,
    pub(super) is_cut: bool,
    pub(super) took: Duration,
}

impl Schedule {
    /// These are all instances.
    pub(super) fn set(&mut self, names: impl Iterator<Item = String>, now: Instant) {
        let mut before = std::mem::take(&mut self.0);
        let turn = |name: String| {
            let turn = before.remove(&name).unwrap_or_else(|| Turn {
                // Not all at once.
                due: now + FIRST_WITHIN.mul_f64(f64::from(spread(&name)) / f64::from(u16::MAX)),
                pause: LONGEST,
                failures: 0,
                asked: None,
                is_under_way: false,
            });
            (name, turn)
        };
        self.0 = names.map(turn).collect();
    }

    /// The instance to ask now: of those that are due and not being asked, the one that has waited longest.
    pub(super) fn take(&mut self, now: Instant) -> Option<String> {
        let waiting = self.0.iter_mut().filter(|(_, turn)| !turn.is_under_way && turn.due <= now);
        let (name, turn) = waiting.min_by_key(|(_, turn)| turn.due)?;
        turn.is_under_way = true;
        Some(name.clone())
    }

    /// When the next one is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().filter(|turn| !turn.is_under_way).map(|turn| turn.due).min()
    }

    /// Takes an answer into account.
    pub(super) fn answered(&mut self, name: &str, answered: Answered, now: Instant) {
        let Some(turn) = self.0.get_mut(name) else { return };
        let since = turn.asked.map_or(turn.pause, |asked| now.saturating_duration_since(asked));
        let wanted = match answered.records {
            _ if answered.is_cut => SHORTEST,
            0 => LONGEST,
            records => since.mul_f64(WANTED as f64 / records as f64),
        };
        // A lull does not make the next burst a loss.
        turn.pause = wanted.min(turn.pause.saturating_mul(2)).clamp(SHORTEST, LONGEST);
        let of_bytes = Duration::from_secs_f64(answered.bytes as f64 / BYTES_PER_SECOND);
        let pause = turn.pause.max(answered.took.saturating_mul(SHARE)).max(of_bytes);
        (turn.failures, turn.asked, turn.is_under_way, turn.due) = (0, Some(now), false, now + pause);
    }

    /// Notes that one did not answer. Returns how often in a row.
    pub(super) fn failed(&mut self, name: &str, now: Instant) -> u32 {
        let Some(turn) = self.0.get_mut(name) else { return 0 };
        let pause = (FIRST_RETRY * 2_u32.pow(turn.failures.min(6))).min(LAST_RETRY);
        turn.failures = turn.failures.saturating_add(1);
        (turn.is_under_way, turn.due) = (false, now + pause);
        turn.failures
    }

    /// Puts one back that was not asked after all.
    pub(super) fn put_back(&mut self, name: &str) {
        if let Some(turn) = self.0.get_mut(name) {
            turn.is_under_way = false;
        }
    }
}

fn spread(name: &str) -> u16 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish() as u16
}

const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);
/// All are asked for the first time within this.
const FIRST_WITHIN: Duration = Duration::from_secs(1);
/// Records that an answer should have: a third of a ring.
const WANTED: usize = 64;
/// The pause after an answer is at least this many times what the answer took, so that a slow instance does not delay
/// others.
const SHARE: u32 = 9;
const BYTES_PER_SECOND: f64 = (2 << 20) as f64;
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "any moment will do as the first")]
    fn of(names: &[&str]) -> (Schedule, Instant) {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        schedule.set(names.iter().map(|name| (*name).to_owned()), now);
        (schedule, now)
    }

    /// Asks for so long; returns how often each instance was.
    fn asked(
        schedule: &mut Schedule,
        mut now: Instant,
        time: Duration,
        answer: impl Fn(&str) -> Option<Answered>,
    ) -> HashMap<String, u32> {
        let (until, mut asked) = (now + time, HashMap::<String, u32>::new());
        while now < until {
            if let Some(name) = schedule.take(now) {
                *asked.entry(name.clone()).or_default() += 1;
                match answer(&name) {
                    Some(answered) => {
                        now += answered.took;
                        schedule.answered(&name, answered, now);
                    }
                    None => {
                        now += Duration::from_secs(2);
                        schedule.failed(&name, now);
                    }
                }
            } else {
                now = schedule.next().unwrap_or(until).max(now + Duration::from_millis(1));
            }
        }
        asked
    }

    #[test]
    fn a_ring_that_fills_quickly_is_asked_often_and_a_quiet_one_seldom() {
        let (mut schedule, now) = of(&["busy", "quiet"]);
        let minute = Duration::from_secs(60);
        let count = asked(&mut schedule, now, minute, |name| {
            let records = if name == "busy" { 96 } else { 0 };
            Some(Answered { records, took: Duration::from_millis(1), ..Answered::default() })
        });
        assert!((100..=600).contains(&count["busy"]), "{count:?}");
        assert!((11..=13).contains(&count["quiet"]), "{count:?}");
    }

    #[test]
    fn slow_silent_and_talkative_instances_take_no_turn_of_others() {
        let (mut schedule, now) = of(&["well", "slow", "silent", "large"]);
        let count = asked(&mut schedule, now, Duration::from_secs(300), |name| match name {
            "slow" => Some(Answered { records: 1024, is_cut: true, took: Duration::from_millis(1900), bytes: 0 }),
            "silent" => None,
            "large" => Some(Answered { records: 1024, is_cut: true, took: Duration::from_millis(1), bytes: 8 << 20 }),
            _ => Some(Answered { took: Duration::from_millis(1), ..Answered::default() }),
        });
        assert!(count["well"] >= 45, "{count:?}");
        assert!(count["slow"] <= 18 && count["silent"] <= 11 && count["large"] <= 76, "{count:?}");
    }

    #[test]
    fn nobody_is_asked_twice_at_a_time_and_who_is_gone_is_forgotten() {
        let (mut schedule, now) = of(&["a"]);
        let later = now + LONGEST;
        assert_eq!(schedule.take(later).as_deref(), Some("a"));
        assert_eq!(schedule.take(later), None);
        schedule.put_back("a");
        assert_eq!(schedule.take(later).as_deref(), Some("a"));
        schedule.set(std::iter::empty(), later);
        schedule.answered("a", Answered::default(), later);
        assert_eq!((schedule.take(later), schedule.next()), (None, None));
    }
}
