//! Which of two threads serves a tun queue. With little traffic the thread of the socket serves both directions, which
//! saves a wake-up per round trip; under load a second thread takes the queue over, so that directions run side by side.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::Error;
use super::doze::Weight;
use super::wake::Wake;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// Something that two threads serve in turn.
#[derive(Debug)]
pub(super) struct Duty<T> {
    subject: Mutex<T>,
    /// The thread of the socket is to serve it, and has not begun.
    free: AtomicBool,
    /// Wakes the thread for load.
    pub(super) needed: Wake,
    /// Wakes the thread of the socket.
    pub(super) returned: Wake,
}

impl<T> Duty<T> {
    /// Begins with the thread of the socket.
    pub(super) fn new(subject: T) -> Result<Self, Error> {
        let (needed, returned) = (Wake::new()?, Wake::new()?);
        Ok(Self { subject: Mutex::new(subject), free: AtomicBool::new(true), needed, returned })
    }

    /// Whether [`Duty::take`] will succeed. Cheap enough to ask every turn.
    pub(super) fn is_free(&self) -> bool {
        self.free.load(Ordering::Acquire)
    }

    /// For the thread of the socket; `None`: the other one still serves.
    pub(super) fn take(&self) -> Option<MutexGuard<'_, T>> {
        if !self.is_free() {
            return None;
        }
        self.free.store(false, Ordering::Relaxed);
        self.returned.lower();
        Some(self.lock())
    }

    /// The thread of the socket leaves it to the thread for load.
    pub(super) fn hand_over(&self, subject: MutexGuard<'_, T>) {
        drop(subject);
        self.needed.raise();
    }

    /// For the thread for load, once it was woken.
    pub(super) fn take_over(&self) -> MutexGuard<'_, T> {
        self.needed.lower();
        self.lock()
    }

    /// The thread for load leaves it to the thread of the socket.
    pub(super) fn give_back(&self, subject: MutexGuard<'_, T>) {
        drop(subject);
        // Raised first, so that who finds it free lowers for good.
        self.returned.raise();
        self.free.store(true, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.subject.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// More than ten packets, or a joined one.
const HEAVY: usize = 16 << 10;
// A burst of small packets; round trips do not make so many turns without a pause.
const BUSY_TURNS: u32 = 64;
// Longer than the pauses within a transfer.
const CALM: Duration = Duration::from_secs(1);

/// Whether there is enough traffic for two threads.
#[derive(Debug, Default)]
pub(super) struct Load {
    turns: u32,
    heavy_at: Option<Instant>,
    noted: Option<(Instant, usize)>,
    weight: Weight,
}

impl Load {
    /// As if a heavy turn had just ended.
    pub(super) fn heavy(now: Instant) -> Self {
        Self { heavy_at: Some(now), ..Self::default() }
    }

    /// Notes a turn that moved `bytes`, whose dozes go by `weight`.
    pub(super) fn note(&mut self, now: Instant, bytes: usize, weight: Weight) {
        if bytes == 0 {
            return;
        }
        self.turns = self.turns.saturating_add(1);
        let (since, before) = self.noted.unwrap_or((now, 0));
        self.noted = Some((since, before.saturating_add(bytes)));
        self.weight.add(weight);
        if bytes >= HEAVY || self.turns >= BUSY_TURNS {
            self.heavy_at = Some(now);
        }
    }

    /// Bytes that were noted since the last call, and when the first were; `None`: there was nothing.
    pub(super) fn take_noted(&mut self) -> Option<(Instant, usize)> {
        self.noted.take()
    }

    /// What was noted since the last call.
    pub(super) fn take_weight(&mut self) -> Weight {
        std::mem::take(&mut self.weight)
    }

    /// Notes that nothing is left to move.
    pub(super) fn pause(&mut self) {
        self.turns = 0;
    }

    /// Whether there was enough since this began.
    pub(super) fn is_heavy(&self) -> bool {
        self.heavy_at.is_some()
    }

    /// How long until it counts as over, if no more comes; zero: now.
    pub(super) fn remaining(&self, now: Instant) -> Duration {
        self.heavy_at.map_or(Duration::ZERO, |at| (at + CALM).saturating_duration_since(now))
    }
}

#[cfg(all(test, loom))]
#[path = "duty_models.rs"]
mod models;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::os::fd::AsFd;

    use super::super::poll::any_readable;
    use super::*;

    fn is_awake(wake: &Wake) -> bool {
        any_readable([wake.as_fd()], Some(Duration::ZERO)).unwrap()[0]
    }

    #[test]
    fn each_thread_is_woken_when_its_time_comes_and_only_then() {
        let duty = Duty::new(()).unwrap();
        let mut subject = duty.take().expect("the thread of the socket begins");
        for _ in 0..2 {
            assert!(duty.take().is_none() && !is_awake(&duty.needed));
            duty.hand_over(subject);
            assert!(is_awake(&duty.needed) && !is_awake(&duty.returned) && duty.take().is_none());
            let other = duty.take_over();
            assert!(!is_awake(&duty.needed) && duty.take().is_none());
            duty.give_back(other);
            assert!(is_awake(&duty.returned) && duty.is_free());
            subject = duty.take().expect("it was given back");
            assert!(!is_awake(&duty.returned));
        }
    }

    fn after(milliseconds: u64) -> Instant {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        *START.get_or_init(super::super::clock::now) + Duration::from_millis(milliseconds)
    }

    #[test]
    fn round_trips_are_no_load_but_one_joined_packet_is() {
        let mut load = Load::default();
        for at in 0..1000 {
            load.note(after(at), 116, Weight::default());
            load.note(after(at), 0, Weight::default());
            load.pause();
        }
        assert!(!load.is_heavy());
        load.note(after(1000), 60_000, Weight::default());
        assert!(load.is_heavy());
    }

    #[test]
    fn small_packets_without_a_pause_are_load() {
        let mut load = Load::default();
        let turns = (0..).take_while(|&turn| {
            load.note(after(turn), 116, Weight::default());
            !load.is_heavy()
        });
        assert_eq!(turns.count() as u32, BUSY_TURNS - 1);
    }

    #[test]
    fn load_is_over_a_while_after_its_last_heavy_turn() {
        let mut load = Load::heavy(after(0));
        load.note(after(800), 50_000, Weight::default());
        load.note(after(900), 100, Weight::default());
        assert_eq!(load.remaining(after(900)), Duration::from_millis(900));
        assert_eq!(load.remaining(after(1800)), Duration::ZERO);
    }
}
