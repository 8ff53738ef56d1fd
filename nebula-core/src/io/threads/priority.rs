//! Raises the priority of data threads (niceness) where [`Options::raise_priority`](crate::io::Options::raise_priority)
//! allows it and it helps: while super-packets arrive, because queues grow while bulk traffic waits for a processor;
//! and while there is little traffic, because a lone packet would wait for the time slice of a busy program. The
//! kernel's own urgent threads run at the same niceness.
//!
//! Many small packets are better left to gather, so the priority is not raised for them, nor for a thread that cannot
//! keep up.
#![allow(unsafe_code)]

use std::io;
use std::time::{Duration, Instant};

use crate::io::threads::pacing::Load;

const RAISED_NICENESS: libc::c_int = -20;
// Enough pauses to average over.
const PAUSES_PER_ROUND: u32 = 32;
// With fewer pauses than these in this time, nothing would gather.
const SPARSE_FOR: Duration = Duration::from_millis(10);
// More than a dozen packets per wake-up means that they come joined.
const JOINED_BYTES: usize = 16 << 10;
// A thread that works this long without waiting is not keeping up.
const OVERLOAD_AFTER: Duration = Duration::from_millis(20);
// Backoff after a raised priority did not help.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The priority of one thread, based on what it moves between its pauses.
#[derive(Debug)]
pub(in crate::io) struct Priority {
    may_change: bool,
    raised: bool,
    /// Number of pauses since `counted_since`.
    pauses: u32,
    bytes: usize,
    counted_since: Option<Instant>,
    waited: Duration,
    /// `None` while it works.
    waits_since: Option<Instant>,
    /// When this stretch of work began; `None` while it waits.
    busy_since: Option<Instant>,
    not_before: Option<Instant>,
}

impl Priority {
    /// Call this on the thread that will use it. `may_raise` is the operator's choice; a niceness set from outside is
    /// kept.
    pub(in crate::io) fn new(may_raise: bool) -> Self {
        Self {
            may_change: may_raise,
            raised: false,
            pauses: 0,
            bytes: 0,
            counted_since: None,
            waited: Duration::ZERO,
            waits_since: None,
            busy_since: None,
            not_before: None,
        }
    }

    /// Notes what was moved since the last call.
    pub(in crate::io) fn follow(&mut self, load: &mut Load) {
        if let Some((now, bytes)) = load.take_noted() {
            self.note(now, bytes);
        }
    }

    /// Notes a turn that moved `bytes`.
    fn note(&mut self, now: Instant, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
        if let Some(since) = self.waits_since.take() {
            self.waited += now.saturating_duration_since(since);
        }
        let since = *self.busy_since.get_or_insert(now);
        if self.raised && now.saturating_duration_since(since) >= OVERLOAD_AFTER {
            self.give_up(now);
        }
    }

    /// Notes that nothing is left to move.
    pub(in crate::io) fn pause(&mut self, now: Instant) {
        self.busy_since = None;
        self.waits_since.get_or_insert(now);
        self.pauses += 1;
        let sparse = self.is_sparse(now);
        if self.pauses < PAUSES_PER_ROUND && !sparse {
            return;
        }
        let serves = sparse || self.bytes / PAUSES_PER_ROUND as usize >= JOINED_BYTES;
        (self.pauses, self.bytes, self.counted_since, self.waited) = (0, 0, Some(now), Duration::ZERO);
        if self.raised && !serves {
            self.give_up(now);
        } else if !self.raised && serves && self.not_before.is_none_or(|at| now >= at) {
            self.set(true);
        }
    }

    /// Whether the thread spent most of a period waiting, for few packets.
    fn is_sparse(&self, now: Instant) -> bool {
        self.counted_since.is_none_or(|since| {
            let elapsed = now.saturating_duration_since(since);
            elapsed >= SPARSE_FOR && self.waited * 8 >= elapsed * 7
        })
    }

    fn give_up(&mut self, now: Instant) {
        self.not_before = Some(now + RETRY_AFTER);
        self.set(false);
    }

    fn set(&mut self, raised: bool) {
        if self.may_change && (raised == self.raised || apply(raised).is_ok()) {
            self.raised = raised;
        } else {
            // Without CAP_SYS_NICE, or if niced from outside, leave it as it is for good.
            self.may_change = false;
        }
    }
}

/// Sets the niceness of the calling thread.
fn apply(raised: bool) -> io::Result<()> {
    let (from, to) = if raised { (0, RAISED_NICENESS) } else { (RAISED_NICENESS, 0) };
    // SAFETY: both calls take and return numbers only; zero names the calling thread.
    let done = unsafe {
        libc::getpriority(libc::PRIO_PROCESS, 0) == from && libc::setpriority(libc::PRIO_PROCESS, 0, to) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// A thread that moves `bytes` between its pauses, which come once per `every`.
    fn traffic(priority: &mut Priority, from: Instant, turns: u32, every: Duration, bytes: usize) -> Instant {
        for at in 0..turns {
            let now = from + every * at;
            priority.note(now, bytes);
            priority.pause(now);
        }
        from + every * turns
    }

    /// A lone packet now and then.
    fn sparse(priority: &mut Priority, from: Instant) -> Instant {
        traffic(priority, from, 100, Duration::from_millis(1), 1_300)
    }

    /// One small packet after the other, for 50 ms.
    fn flood(priority: &mut Priority, from: Instant) -> Instant {
        traffic(priority, from, 1_000, Duration::from_micros(50), 1_300)
    }

    /// Super-packets.
    fn bulk(priority: &mut Priority, from: Instant) -> Instant {
        traffic(priority, from, 1_000, Duration::from_micros(100), 64_000)
    }

    fn niceness() -> libc::c_int {
        // SAFETY: takes and returns numbers.
        unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
    }

    /// Runs in a thread of its own, whose niceness ends with it.
    fn alone(test: impl FnOnce() + Send + 'static) {
        std::thread::spawn(test).join().unwrap();
    }

    /// The niceness of a raised thread, if the system allows it and this program was not niced itself.
    fn best() -> libc::c_int {
        std::thread::spawn(|| if apply(true).is_ok() { RAISED_NICENESS } else { niceness() }).join().unwrap()
    }

    #[test]
    fn little_and_joined_packets_raise_it_and_many_small_ones_lower_it_for_a_while() {
        let (usual, best) = (niceness(), best());
        alone(move || {
            let mut priority = Priority::new(true);
            let start = crate::io::clock::now();
            priority.pause(start);
            assert_eq!((priority.raised, niceness()), (best == RAISED_NICENESS, best), "idle from the start");
            let at = sparse(&mut priority, start);
            assert_eq!((priority.raised, niceness()), (best == RAISED_NICENESS, best), "lone packets");
            let at = flood(&mut priority, at);
            assert!(!priority.raised && niceness() == usual, "many small packets");
            let at = bulk(&mut priority, at);
            assert!(!priority.raised, "it did not serve just now");
            let at = bulk(&mut priority, at + RETRY_AFTER);
            assert_eq!((priority.raised, niceness()), (best == RAISED_NICENESS, best), "super-packets");
            let at = flood(&mut priority, at);
            assert!(!priority.raised && niceness() == usual, "many small packets again");
            sparse(&mut priority, at + RETRY_AFTER);
            assert_eq!(niceness(), best, "lone packets again");
        });
    }

    #[test]
    fn a_thread_that_never_waits_shares_with_other_programs() {
        let (usual, best) = (niceness(), best());
        alone(move || {
            let mut priority = Priority::new(true);
            let at = bulk(&mut priority, crate::io::clock::now());
            assert_eq!(niceness(), best);
            for ms in 0..25 {
                priority.note(at + Duration::from_millis(ms), 64_000);
            }
            assert!(!priority.raised && niceness() == usual);
        });
    }

    #[test]
    fn few_pauses_of_a_busy_thread_are_no_sign_of_few_packets() {
        let usual = niceness();
        alone(move || {
            let mut priority = Priority::new(true);
            let at = flood(&mut priority, crate::io::clock::now());
            // Until long after the backoff that the flood caused.
            for turn in 0..100 {
                let begin = at + SPARSE_FOR * 2 * turn;
                for step in 0..15 {
                    priority.note(begin + Duration::from_millis(1) * step, 100);
                }
                // It waits for a quarter of the time.
                priority.pause(begin + Duration::from_millis(15));
            }
            assert!(!priority.raised && niceness() == usual);
        });
    }

    #[test]
    fn what_an_operator_chose_stays() {
        let usual = niceness();
        alone(move || {
            let mut priority = Priority::new(false);
            bulk(&mut priority, crate::io::clock::now());
            assert!(!priority.raised && niceness() == usual, "switched off");
        });
        alone(|| {
            // SAFETY: takes and returns numbers.
            assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) }, 0);
            let mut priority = Priority::new(true);
            bulk(&mut priority, crate::io::clock::now());
            assert!(!priority.raised && niceness() == 19, "niced from outside");
        });
    }
}
