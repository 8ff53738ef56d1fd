//! Decides when the data threads sleep, share their work and release memory, based on the traffic they see.
//!
//! [`Duty`] and [`Load`] decide which of two threads serves a tun queue: with little traffic the socket's thread serves
//! both directions, which saves a wake-up per round trip; under load a second thread takes the queue over. [`Doze`] is
//! interrupt moderation: a thread under load sleeps for a moment instead of being woken for each packet. [`Warmth`]
//! decides when the memory that a burst touched is released.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::io::Error;
use crate::io::poll::Wake;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// Work that two threads do in turn: the socket's thread and the tun queue's thread.
#[derive(Debug)]
pub(in crate::io) struct Duty<T> {
    subject: Mutex<T>,
    /// It is the turn of the socket's thread, which has not started yet.
    free: AtomicBool,
    /// Wakes the queue's thread.
    pub(in crate::io) needed: Wake,
    /// Wakes the socket's thread.
    pub(in crate::io) returned: Wake,
}

impl<T> Duty<T> {
    /// The socket's thread has the first turn.
    pub(in crate::io) fn new(subject: T) -> Result<Self, Error> {
        let (needed, returned) = (Wake::new()?, Wake::new()?);
        Ok(Self { subject: Mutex::new(subject), free: AtomicBool::new(true), needed, returned })
    }

    /// Whether [`Duty::take`] will succeed. Cheap enough to ask every turn.
    pub(in crate::io) fn is_free(&self) -> bool {
        self.free.load(Ordering::Acquire)
    }

    /// Starts the turn of the socket's thread; `None` if it is the other thread's turn.
    pub(in crate::io) fn take(&self) -> Option<MutexGuard<'_, T>> {
        if !self.is_free() {
            return None;
        }
        self.free.store(false, Ordering::Relaxed);
        self.returned.lower();
        Some(self.lock())
    }

    /// Ends the turn of the socket's thread.
    pub(in crate::io) fn hand_over(&self, subject: MutexGuard<'_, T>) {
        drop(subject);
        self.needed.raise();
    }

    /// Starts the turn of the queue's thread, once it was woken.
    pub(in crate::io) fn take_over(&self) -> MutexGuard<'_, T> {
        self.needed.lower();
        self.lock()
    }

    /// Ends the turn of the queue's thread.
    pub(in crate::io) fn give_back(&self, subject: MutexGuard<'_, T>) {
        drop(subject);
        // Raise first: the thread that then finds the work free lowers the wake-up after the last raise.
        self.returned.raise();
        self.free.store(true, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.subject.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// More than ten packets, or a joined one.
const HEAVY_TURN_BYTES: usize = 16 << 10;
// A burst of small packets; round trips do not take so many turns without a pause.
const BUSY_TURNS: u32 = 64;
// Longer than the pauses within a transfer.
const CALM_AFTER: Duration = Duration::from_secs(1);

/// Whether there is enough traffic for two threads.
#[derive(Debug, Default)]
pub(in crate::io) struct Load {
    turns: u32,
    heavy_at: Option<Instant>,
    noted: Option<(Instant, usize)>,
    weight: Weight,
}

impl Load {
    /// A load whose last heavy turn has just ended.
    pub(in crate::io) fn heavy(now: Instant) -> Self {
        Self { heavy_at: Some(now), ..Self::default() }
    }

    /// Notes a turn that moved `bytes`, which count as `weight` for dozing.
    pub(in crate::io) fn note(&mut self, now: Instant, bytes: usize, weight: Weight) {
        if bytes == 0 {
            return;
        }
        self.turns = self.turns.saturating_add(1);
        let (since, before) = self.noted.unwrap_or((now, 0));
        self.noted = Some((since, before.saturating_add(bytes)));
        self.weight.add(weight);
        if bytes >= HEAVY_TURN_BYTES || self.turns >= BUSY_TURNS {
            self.heavy_at = Some(now);
        }
    }

    /// Bytes noted since the last call, and when the first were noted; `None` if there were none.
    pub(in crate::io) fn take_noted(&mut self) -> Option<(Instant, usize)> {
        self.noted.take()
    }

    /// Weight noted since the last call.
    pub(in crate::io) fn take_weight(&mut self) -> Weight {
        std::mem::take(&mut self.weight)
    }

    /// Notes that nothing is left to move.
    pub(in crate::io) fn pause(&mut self) {
        self.turns = 0;
    }

    /// Whether there has been a heavy turn.
    pub(in crate::io) fn is_heavy(&self) -> bool {
        self.heavy_at.is_some()
    }

    /// Time until the load counts as over if no more arrives; zero if it is over.
    pub(in crate::io) fn remaining(&self, now: Instant) -> Duration {
        self.heavy_at.map_or(Duration::ZERO, |at| (at + CALM_AFTER).saturating_duration_since(now))
    }
}

// The kernel's timer slack adds up to 50 us.
const DOZE_TIME: Duration = Duration::from_micros(100);
// More than one super-packet, or 18 small packets.
const WORTHWHILE_DOZE_WEIGHT: usize = 72 << 10;
// Bytes that a small packet counts for: a wake-up costs as much as moving them.
const PACKET_WEIGHT: usize = 4 << 10;
// Less than this is not load.
const MIN_DOZE_WEIGHT: usize = 16 << 10;
// Enough dozes to average over.
const DOZES_PER_ROUND: u32 = 8;
// Backoff after a round of dozes that gathered too little; doubled each time.
const MIN_DOZE_BACKOFF: Duration = Duration::from_millis(10);
const MAX_DOZE_BACKOFF: Duration = Duration::from_secs(1);

/// How much a thread moved, for the decision to doze: bytes, but at least [`PACKET_WEIGHT`] for each wake-up saved.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::io) struct Weight(usize);

impl Weight {
    /// Weight of `bytes` that arrived in this many `packets`; a joined packet counts as one.
    pub(in crate::io) fn of(bytes: usize, packets: usize) -> Self {
        Self(bytes.max(packets.saturating_mul(PACKET_WEIGHT)))
    }

    pub(in crate::io) fn add(&mut self, other: Self) {
        self.0 = self.0.saturating_add(other.0);
    }
}

/// Interrupt moderation: decides whether to sleep for a moment, based on how much earlier sleeps gathered.
///
/// A thread that waits for a socket or a device is woken for each packet, which costs it a context switch, and the
/// program at the other end up to a tenth of its time. A sleep delays what arrives meanwhile, so sleeps are tried only
/// after several packets or a joined one, and continue only while each gathers many.
#[derive(Debug)]
pub(in crate::io) struct Doze {
    dozed: bool,
    /// Dozes in this round.
    dozes: u32,
    gathered: usize,
    not_before: Option<Instant>,
    backoff: Duration,
}

impl Default for Doze {
    fn default() -> Self {
        Self { dozed: false, dozes: 0, gathered: 0, not_before: None, backoff: MIN_DOZE_BACKOFF }
    }
}

impl Doze {
    /// Call this when nothing is left to move, with the weight of what was moved since the last call. Sleeps for a
    /// moment if that is expected to gather more. Returns `true` if it slept and the caller should look again.
    pub(in crate::io) fn pause(&mut self, now: Instant, weight: Weight) -> bool {
        let dozes = self.follow(now, weight);
        if dozes {
            std::thread::sleep(DOZE_TIME);
        }
        dozes
    }

    /// Whether to doze.
    fn follow(&mut self, now: Instant, Weight(weight): Weight) -> bool {
        if self.dozed {
            self.judge(now, weight);
        }
        self.dozed = weight >= MIN_DOZE_WEIGHT && self.not_before.is_none_or(|at| now >= at);
        self.dozed
    }

    fn judge(&mut self, now: Instant, gathered: usize) {
        self.dozes += 1;
        self.gathered = self.gathered.saturating_add(gathered);
        if self.dozes < DOZES_PER_ROUND {
            return;
        }
        if self.gathered >= WORTHWHILE_DOZE_WEIGHT * DOZES_PER_ROUND as usize {
            (self.not_before, self.backoff) = (None, MIN_DOZE_BACKOFF);
        } else {
            self.not_before = Some(now + self.backoff);
            self.backoff = (self.backoff * 2).min(MAX_DOZE_BACKOFF);
        }
        (self.dozes, self.gathered) = (0, 0);
    }
}

// A smaller turn touches a handful of pages, which are not worth a wake-up.
const BURST_BYTES: usize = 16 << 10;
// Long enough that a pause within a transfer does not cost the page faults of a new start.
const RELEASE_AFTER: Duration = Duration::from_secs(10);

/// Tracks the last burst, to release its memory later.
#[derive(Debug, Default)]
pub(in crate::io) struct Warmth {
    last_burst: Option<Instant>,
}

impl Warmth {
    /// Notes `bytes` handled in one turn.
    pub(in crate::io) fn note(&mut self, now: Instant, bytes: usize) {
        if bytes >= BURST_BYTES {
            self.last_burst = Some(now);
        }
    }

    /// How long to wait before calling [`Warmth::cooled`]; `None` if there is nothing to release.
    pub(in crate::io) fn timeout(&self, now: Instant) -> Option<Duration> {
        self.last_burst.map(|at| (at + RELEASE_AFTER).saturating_duration_since(now))
    }

    /// Returns `true` once when the last burst is long enough ago.
    pub(in crate::io) fn cooled(&mut self, now: Instant) -> bool {
        self.last_burst.take_if(|at| now >= *at + RELEASE_AFTER).is_some()
    }
}

#[cfg(all(test, loom))]
#[path = "pacing_models.rs"]
mod models;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::io::poll::any_readable;

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
        *START.get_or_init(crate::io::clock::now) + Duration::from_millis(milliseconds)
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

    const SUPER_PACKET: usize = 64 << 10;

    /// Pauses once per `every`, each time after `weight`; returns how often it dozed.
    fn dozes(doze: &mut Doze, from: Instant, pauses: u32, every: Duration, weight: Weight) -> usize {
        (0..pauses).filter(|&at| doze.follow(from + every * at, weight)).count()
    }

    #[test]
    fn dozes_that_gather_super_packets_or_many_packets_go_on() {
        let start = crate::io::clock::now();
        for weight in [Weight::of(2 * SUPER_PACKET, 2), Weight::of(24 * 100, 24)] {
            let mut doze = Doze::default();
            assert_eq!(dozes(&mut doze, start, 1000, Duration::from_micros(300), weight), 1000);
        }
    }

    #[test]
    fn round_trips_of_large_messages_are_hardly_delayed() {
        let (mut doze, start) = (Doze::default(), crate::io::clock::now());
        // For 20 s, each answer follows a request of one super-packet.
        let dozed = dozes(&mut doze, start, 100_000, Duration::from_micros(200), Weight::of(SUPER_PACKET, 1));
        // 8 in a round, 7 rounds until the backoff is longest, then one round a second.
        assert!((8..=30 * 8).contains(&dozed), "{dozed}");
    }

    #[test]
    fn a_few_small_packets_are_not_waited_for() {
        let (mut doze, start) = (Doze::default(), crate::io::clock::now());
        assert_eq!(dozes(&mut doze, start, 1000, Duration::from_micros(50), Weight::of(3 * 1300, 3)), 0);
    }

    #[test]
    fn after_a_rest_it_is_tried_again_and_the_rest_is_short_again_once_it_served() {
        let (mut doze, start) = (Doze::default(), crate::io::clock::now());
        let (round, little, much) = (Duration::from_micros(10), Weight::of(0, 4), Weight::of(0, 40));
        // The first pause has no doze to judge.
        assert_eq!(dozes(&mut doze, start, 100, round, little), 8);
        assert!(!doze.follow(start + MIN_DOZE_BACKOFF, little), "the rest began after the last doze");
        let again = start + MIN_DOZE_BACKOFF * 2;
        assert_eq!(dozes(&mut doze, again, 100, round, much), 100);
        assert_eq!(doze.backoff, MIN_DOZE_BACKOFF);
    }

    #[test]
    fn memory_is_given_back_once_after_a_burst_and_not_for_thin_traffic() {
        let start = crate::io::clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut warmth = Warmth::default();
        warmth.note(at(0), 100);
        assert_eq!(warmth.timeout(at(0)), None);
        warmth.note(at(1), 60_000);
        warmth.note(at(5), 100);
        assert_eq!(warmth.timeout(at(6)), Some(Duration::from_secs(5)));
        assert!(!warmth.cooled(at(10)));
        assert!(warmth.cooled(at(11)));
        assert!(!warmth.cooled(at(30)));
        assert_eq!(warmth.timeout(at(30)), None);
    }
}
