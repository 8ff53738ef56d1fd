//! Pauses or ends the data threads of a driver between two turns.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::io::poll::Wake;
use crate::io::{Error, clock};
use crate::sync::atomic::{AtomicU8, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

const OPEN: u8 = 0;
const HELD: u8 = 1;
const ENDED: u8 = 2;

/// A held thread moves no packet: what arrives waits in the queues of device and socket. So a hand-over to another
/// process can take what only the threads know.
#[derive(Debug)]
pub(super) struct Gate {
    /// Written with `running` locked.
    state: AtomicU8,
    /// Readable unless the gate is open: no thread waits for packets then.
    closed: Wake,
    /// Number of threads that are not paused.
    running: Mutex<usize>,
    changed: Condvar,
}

/// Counts one data thread as running until it is dropped, also by a panic.
#[derive(Debug)]
pub(super) struct Pass(Arc<Gate>);

impl Gate {
    pub(super) fn new() -> Result<Self, Error> {
        Ok(Self { state: AtomicU8::new(OPEN), closed: Wake::new()?, running: Mutex::new(0), changed: Condvar::new() })
    }

    /// Whether the threads may begin another turn. Cheap enough to ask before each.
    pub(super) fn is_open(&self) -> bool {
        self.state.load(Ordering::Relaxed) == OPEN
    }

    /// For a thread that is about to start.
    pub(super) fn admit(self: &Arc<Self>) -> Pass {
        *self.running() += 1;
        Pass(Arc::clone(self))
    }

    /// Holds the threads. Returns whether all of them are held, or have ended, within `limit`; otherwise the gate is
    /// open again.
    #[must_use]
    pub(super) fn hold(&self, limit: Duration) -> bool {
        let until = clock::now() + limit;
        let mut running = self.running();
        if self.state.load(Ordering::Relaxed) != OPEN {
            return false;
        }
        self.state.store(HELD, Ordering::Relaxed);
        self.closed.raise();
        while *running > 0 {
            let left = until.saturating_duration_since(clock::now());
            if left.is_zero() {
                drop(running);
                self.open();
                return false;
            }
            running = self.changed.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Lets held threads go on.
    pub(super) fn open(&self) {
        let _running = self.running();
        if self.state.load(Ordering::Relaxed) == HELD {
            self.closed.lower();
            self.state.store(OPEN, Ordering::Relaxed);
            self.changed.notify_all();
        }
    }

    /// Ends the threads, those that are held or wait for packets included.
    pub(super) fn end(&self) {
        let _running = self.running();
        self.state.store(ENDED, Ordering::Relaxed);
        self.closed.raise();
        self.changed.notify_all();
    }

    fn running(&self) -> MutexGuard<'_, usize> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Gate {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.closed.as_fd()
    }
}

impl Pass {
    /// Waits while threads are held. Returns `false` if the thread must end.
    pub(super) fn wait_until_open(&self) -> bool {
        let gate = &*self.0;
        if gate.is_open() {
            return true;
        }
        let mut running = gate.running();
        *running -= 1;
        gate.changed.notify_all();
        while gate.state.load(Ordering::Relaxed) == HELD {
            running = gate.changed.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
        *running += 1;
        gate.state.load(Ordering::Relaxed) == OPEN
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        *self.0.running() -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(all(test, loom))]
#[path = "gate_models.rs"]
mod models;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn until(holds: impl Fn() -> bool) {
        let limit = clock::now() + LONG;
        while !holds() {
            assert!(clock::now() < limit);
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn held_threads_take_no_turn_and_go_on_when_the_gate_opens() {
        let (gate, turns) = (Arc::new(Gate::new().unwrap()), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..3 {
                let pass = gate.admit();
                let turns = &turns;
                scope.spawn(move || {
                    while pass.wait_until_open() {
                        turns.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for _ in 0..50 {
                assert!(gate.hold(LONG));
                let held = turns.load(Ordering::Relaxed);
                thread::yield_now();
                assert_eq!(turns.load(Ordering::Relaxed), held);
                gate.open();
                until(|| turns.load(Ordering::Relaxed) > held);
            }
            assert!(gate.hold(LONG));
            gate.end();
        });
        assert!(!gate.hold(LONG), "there is nothing to hold any more");
    }

    #[test]
    fn a_thread_that_does_not_come_by_is_not_held_and_the_others_go_on() {
        let gate = Arc::new(Gate::new().unwrap());
        let away = gate.admit();
        assert!(!gate.hold(Duration::from_millis(5)));
        assert!(gate.is_open());
        drop(away);
        assert!(gate.hold(LONG), "a thread that has ended needs not be held");
    }

    #[test]
    fn whoever_waits_for_packets_is_woken_while_the_gate_is_closed() {
        let gate = Arc::new(Gate::new().unwrap());
        let is_awake = || crate::io::poll::readable(&*gate, &*gate, Some(Duration::ZERO)).unwrap().first;
        assert!(!is_awake());
        assert!(gate.hold(LONG) && is_awake());
        gate.open();
        assert!(!is_awake());
        gate.end();
        assert!(is_awake());
    }
}
