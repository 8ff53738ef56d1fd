//! Rate limit for log lines that others can cause; counts the suppressed lines.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tracing::Level;

/// A token bucket for each source of each kind of line, and one for all sources of a kind. A source is limited by its
/// own bucket, so that others of the same kind are still seen; made-up sources are limited by the common one.
#[derive(Debug)]
pub(crate) struct LogThrottle {
    /// As many as there are kinds of lines in the code.
    kinds: Vec<Kind>,
}

/// How many lines of one kind may be written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    of_source: Rate,
    of_kind: Rate,
}

/// Lines of one kind that were left out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) kind: &'static str,
    pub(crate) level: Level,
    pub(crate) left_out: u64,
    pub(crate) within: Duration,
    /// The source with the most left-out lines, and their number, if any source has a bucket of its own.
    pub(crate) most: Option<(String, u64)>,
}

/// A burst of `burst` lines, then one per `interval`.
#[derive(Debug, Clone, Copy)]
struct Rate {
    burst: u32,
    interval: Duration,
}

#[derive(Debug)]
struct Kind {
    name: &'static str,
    level: Level,
    /// Bucket for all sources together.
    all: Bucket,
    /// At most [`MAX_SOURCES`]; sources beyond that have no bucket of their own.
    sources: HashMap<String, Source>,
    left_out: u64,
    /// Time of the first left-out line that has not been summarized yet.
    since: Option<Instant>,
}

#[derive(Debug)]
struct Source {
    bucket: Bucket,
    left_out: u64,
}

/// A token bucket, stored as the moment at which its whole burst is available again.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    full_at: Instant,
}

impl LogThrottle {
    pub(crate) const fn new() -> Self {
        Self { kinds: Vec::new() }
    }

    /// Whether to write a line of this kind that `source` caused. If not, it is counted as left out.
    pub(crate) fn admit(
        &mut self,
        now: Instant,
        limits: &Limits,
        (name, level): (&'static str, Level),
        source: &str,
    ) -> bool {
        let at = self.kinds.iter().position(|kind| kind.name == name).unwrap_or_else(|| {
            self.kinds.push(Kind::new(name, level, now));
            self.kinds.len() - 1
        });
        self.kinds[at].admit(now, limits, source)
    }

    /// When the next summary is due.
    pub(crate) fn next_summary(&self) -> Option<Instant> {
        self.kinds.iter().filter_map(|kind| kind.since).min().map(|since| since + SUMMARY_INTERVAL)
    }

    /// One summary for each kind whose lines have been left out for long enough. Evicts sources that have been quiet.
    pub(crate) fn summaries(&mut self, now: Instant) -> Vec<Summary> {
        let summaries = self.kinds.iter_mut().filter_map(|kind| kind.summary(now)).collect();
        self.kinds.retain(|kind| kind.since.is_some() || !kind.sources.is_empty() || !kind.all.is_full(now));
        summaries
    }
}

impl Kind {
    fn new(name: &'static str, level: Level, now: Instant) -> Self {
        Self { name, level, all: Bucket { full_at: now }, sources: HashMap::new(), left_out: 0, since: None }
    }

    fn admit(&mut self, now: Instant, limits: &Limits, source: &str) -> bool {
        let has_room = self.all.has_room(now, limits.of_kind);
        if let Some(source) = self.sources.get_mut(source) {
            // Both must have room before either is charged: lines that a source's own bucket refuses cost other sources
            // nothing.
            if source.bucket.has_room(now, limits.of_source) && has_room {
                source.bucket.take(now, limits.of_source);
                self.all.take(now, limits.of_kind);
                return true;
            }
            source.left_out += 1;
        } else if has_room {
            self.all.take(now, limits.of_kind);
            self.remember(now, limits, source);
            return true;
        }
        self.left_out += 1;
        self.since.get_or_insert(now);
        false
    }

    fn remember(&mut self, now: Instant, limits: &Limits, source: &str) {
        if self.sources.len() >= MAX_SOURCES {
            self.forget_quiet_sources(now);
        }
        if self.sources.len() < MAX_SOURCES {
            let mut bucket = Bucket { full_at: now };
            bucket.take(now, limits.of_source);
            self.sources.insert(source.to_owned(), Source { bucket, left_out: 0 });
        }
    }

    fn forget_quiet_sources(&mut self, now: Instant) {
        self.sources.retain(|_, source| source.left_out > 0 || !source.bucket.is_full(now));
    }

    fn summary(&mut self, now: Instant) -> Option<Summary> {
        let since = self.since.filter(|since| now >= *since + SUMMARY_INTERVAL)?;
        let most = self.sources.iter().filter(|(_, source)| source.left_out > 0);
        let most = most.max_by_key(|(_, source)| source.left_out).map(|(name, source)| (name.clone(), source.left_out));
        let summary = Summary {
            kind: self.name,
            level: self.level,
            left_out: self.left_out,
            within: now.saturating_duration_since(since),
            most,
        };
        (self.left_out, self.since) = (0, None);
        self.sources.values_mut().for_each(|source| source.left_out = 0);
        self.forget_quiet_sources(now);
        self.sources.shrink_to_fit();
        Some(summary)
    }
}

impl Bucket {
    fn has_room(&self, now: Instant, rate: Rate) -> bool {
        self.full_at <= now + rate.interval * rate.burst.saturating_sub(1)
    }

    fn take(&mut self, now: Instant, rate: Rate) {
        self.full_at = self.full_at.max(now) + rate.interval;
    }

    fn is_full(&self, now: Instant) -> bool {
        self.full_at <= now
    }
}

impl Limits {
    /// A fleet of 200 hosts that reconnects at once is logged in full; a flood of one kind writes less than 3 KB/s.
    pub(crate) const NORMAL: Self = Self {
        of_source: Rate { burst: 5, interval: Duration::from_secs(10) },
        of_kind: Rate { burst: 200, interval: Duration::from_millis(200) },
    };
    /// For the levels debug and trace.
    pub(crate) const VERBOSE: Self = Self {
        of_source: Rate { burst: 50, interval: Duration::from_secs(1) },
        of_kind: Rate { burst: 1000, interval: Duration::from_millis(20) },
    };
}

const MAX_SOURCES: usize = 256;
const SUMMARY_INTERVAL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: (&str, Level) = ("x", Level::INFO);

    fn start() -> (LogThrottle, Instant) {
        #[allow(clippy::disallowed_methods, reason = "any moment will do")]
        let now = Instant::now();
        (LogThrottle::new(), now)
    }

    #[test]
    fn one_source_has_a_burst_and_then_a_trickle_and_others_are_still_seen() {
        let (mut throttle, start) = start();
        let mut written = 0;
        for n in 0..200_000 {
            let now = start + Duration::from_micros(50) * n;
            written += u32::from(throttle.admit(now, &Limits::NORMAL, KIND, "192.0.2.66"));
        }
        assert_eq!(written, 5);
        let now = start + Duration::from_secs(10);
        assert!(throttle.admit(now, &Limits::NORMAL, KIND, "192.0.2.7"));
        assert!(throttle.admit(now, &Limits::NORMAL, KIND, "192.0.2.66"), "one per 10 s");
        assert!(!throttle.admit(now, &Limits::NORMAL, KIND, "192.0.2.66"));
        assert!(throttle.admit(now, &Limits::NORMAL, ("y", Level::INFO), "192.0.2.66"), "another kind");
    }

    #[test]
    fn invented_sources_share_what_the_kind_has_and_take_bounded_memory() {
        let (mut throttle, start) = start();
        let mut written = 0;
        for n in 0..200_000 {
            let now = start + Duration::from_micros(50) * n;
            written += u32::from(throttle.admit(now, &Limits::NORMAL, KIND, &n.to_string()));
        }
        assert!((245..=251).contains(&written), "{written} lines in 10 s");
        assert!(throttle.kinds[0].sources.len() <= MAX_SOURCES);
        // A quiet source is evicted for a new one.
        let later = start + Duration::from_secs(100);
        for n in 0..100 {
            assert!(throttle.admit(later, &Limits::NORMAL, KIND, &format!("later {n}")));
        }
    }

    #[test]
    fn what_is_left_out_is_counted_once_per_kind_with_the_worst_source() {
        let (mut throttle, start) = start();
        for (source, lines) in [("a", 6), ("b", 15), ("c", 1)] {
            for _ in 0..lines {
                let _ = throttle.admit(start, &Limits::NORMAL, KIND, source);
            }
        }
        let due = throttle.next_summary().unwrap();
        assert_eq!(due, start + SUMMARY_INTERVAL);
        assert_eq!(throttle.summaries(start), []);
        let summary = throttle.summaries(due);
        let most = Some(("b".to_owned(), 10));
        assert_eq!(summary, [Summary { kind: "x", level: Level::INFO, left_out: 11, within: SUMMARY_INTERVAL, most }]);
        assert_eq!((throttle.next_summary(), throttle.summaries(due + SUMMARY_INTERVAL)), (None, Vec::new()));
    }

    #[test]
    fn nothing_is_kept_after_a_flood() {
        let (mut throttle, start) = start();
        for n in 0..1000 {
            let _ = throttle.admit(start, &Limits::NORMAL, KIND, &n.to_string());
            let _ = throttle.admit(start, &Limits::NORMAL, ("y", Level::INFO), "a");
        }
        let later = start + Duration::from_secs(200);
        assert_eq!(throttle.summaries(later).len(), 2);
        assert!(throttle.kinds.is_empty());
    }
}
