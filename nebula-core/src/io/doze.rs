//! Short sleeps of a thread under load, as network cards moderate their interrupts: who waits for a socket or a device is
//! woken for each packet, which costs it a change of context, and the program at the other end as much as a tenth of its
//! time.
//!
//! A sleep delays what comes meanwhile. So they are tried only behind several packets or a joined one, and go on only
//! while each gathers many.

use std::time::{Duration, Instant};

// With the kernel's timer slack up to 50 us more.
const DOZE: Duration = Duration::from_micros(100);
// More than one super-packet, or 18 small packets.
const SERVES: usize = 72 << 10;
// What a small packet counts for: it costs as much to be woken for it.
const PACKET: usize = 4 << 10;
// Less than so much is no load.
const WORTH_A_TRY: usize = 16 << 10;
// Enough for an average.
const DOZES: u32 = 8;
// Until the next try when they did not serve; doubled each time.
const FIRST_REST: Duration = Duration::from_millis(10);
const LAST_REST: Duration = Duration::from_secs(1);

/// What a thread moved, for its dozes: bytes, but at least something for each packet it could be woken for.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Weight(usize);

impl Weight {
    /// Of so many bytes that came in so many `packets`, a joined one counting as one.
    pub(super) fn of(bytes: usize, packets: usize) -> Self {
        Self(bytes.max(packets.saturating_mul(PACKET)))
    }

    pub(super) fn add(&mut self, other: Self) {
        self.0 = self.0.saturating_add(other.0);
    }
}

/// Says when to sleep, by what was moved since.
#[derive(Debug)]
pub(super) struct Doze {
    dozed: bool,
    /// Of this round.
    dozes: u32,
    gathered: usize,
    not_before: Option<Instant>,
    rest: Duration,
}

impl Default for Doze {
    fn default() -> Self {
        Self { dozed: false, dozes: 0, gathered: 0, not_before: None, rest: FIRST_REST }
    }
}

impl Doze {
    /// Nothing is left to move, after so much since the last pause. Sleeps for a moment if that gathers more; `true`: it
    /// did, so look again.
    pub(super) fn pause(&mut self, now: Instant, weight: Weight) -> bool {
        let dozes = self.follow(now, weight);
        if dozes {
            std::thread::sleep(DOZE);
        }
        dozes
    }

    /// Whether to doze.
    fn follow(&mut self, now: Instant, Weight(weight): Weight) -> bool {
        if self.dozed {
            self.judge(now, weight);
        }
        self.dozed = weight >= WORTH_A_TRY && self.not_before.is_none_or(|at| now >= at);
        self.dozed
    }

    fn judge(&mut self, now: Instant, gathered: usize) {
        self.dozes += 1;
        self.gathered = self.gathered.saturating_add(gathered);
        if self.dozes < DOZES {
            return;
        }
        if self.gathered >= SERVES * DOZES as usize {
            (self.not_before, self.rest) = (None, FIRST_REST);
        } else {
            self.not_before = Some(now + self.rest);
            self.rest = (self.rest * 2).min(LAST_REST);
        }
        (self.dozes, self.gathered) = (0, 0);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const SUPER_PACKET: usize = 64 << 10;

    /// Pauses once every `every`, each time behind `weight`; how often it dozed.
    fn dozes(doze: &mut Doze, from: Instant, pauses: u32, every: Duration, weight: Weight) -> usize {
        (0..pauses).filter(|&at| doze.follow(from + every * at, weight)).count()
    }

    #[test]
    fn dozes_that_gather_super_packets_or_many_packets_go_on() {
        let start = super::super::clock::now();
        for weight in [Weight::of(2 * SUPER_PACKET, 2), Weight::of(24 * 100, 24)] {
            let mut doze = Doze::default();
            assert_eq!(dozes(&mut doze, start, 1000, Duration::from_micros(300), weight), 1000);
        }
    }

    #[test]
    fn round_trips_of_large_messages_are_hardly_delayed() {
        let (mut doze, start) = (Doze::default(), super::super::clock::now());
        // For 20 s, each answer behind a request of one super-packet.
        let dozed = dozes(&mut doze, start, 100_000, Duration::from_micros(200), Weight::of(SUPER_PACKET, 1));
        // 8 of a round, 7 rounds until the rest is longest, then one a second.
        assert!((8..=30 * 8).contains(&dozed), "{dozed}");
    }

    #[test]
    fn a_few_small_packets_are_not_waited_for() {
        let (mut doze, start) = (Doze::default(), super::super::clock::now());
        assert_eq!(dozes(&mut doze, start, 1000, Duration::from_micros(50), Weight::of(3 * 1300, 3)), 0);
    }

    #[test]
    fn after_a_rest_it_is_tried_again_and_the_rest_is_short_again_once_it_served() {
        let (mut doze, start) = (Doze::default(), super::super::clock::now());
        let (round, little, much) = (Duration::from_micros(10), Weight::of(0, 4), Weight::of(0, 40));
        // The first pause has no doze to judge.
        assert_eq!(dozes(&mut doze, start, 100, round, little), 8);
        assert!(!doze.follow(start + FIRST_REST, little), "the rest began after the last doze");
        let again = start + FIRST_REST * 2;
        assert_eq!(dozes(&mut doze, again, 100, round, much), 100);
        assert_eq!(doze.rest, FIRST_REST);
    }
}
