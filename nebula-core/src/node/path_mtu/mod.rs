//! Finds out how large an overlay packet the path to a peer carries (packetization layer path MTU discovery, RFC 8899).
//!
//! The probes are test requests that are padded to the size under test, because Go Nebula 1.11 answers them with the same
//! payload, too. Earlier releases panic at them, so a peer is first asked with a short probe, which harms no release, whether
//! it returns what it gets (see [`probe`]). A path counts as open until a probe was lost several times and smaller ones were
//! answered: nearly all are.

mod openings;
mod probe;
mod probing;
mod watch;

use std::time::{Duration, Instant};

use super::path_choice::Carried;
use crate::tunnel::PathState;

pub(super) use self::openings::Openings;
pub(super) use self::probe::Probe;
use self::probe::SHORT;
use self::watch::Watch;

/// Where a search stands. Sends nothing: each step returns the probes to send.
#[derive(Debug, Clone)]
pub(super) struct Search {
    /// When it began; stamps of probes are relative to this.
    epoch: Instant,
    /// The numbers of probes by the present path are at least this.
    first: u32,
    next: u32,
    /// MTU of the overlay device.
    mtu: u16,
    /// What the search tries to reach: that MTU, as far as a probe can be so long.
    top: u16,
    /// How much longer a datagram is on the underlay than the packet in it.
    overhead: u16,
    /// The largest packet that was answered by this path; 0 if none was.
    confirmed: u16,
    /// The largest packet to send; `None`: any.
    limit: Option<u16>,
    run: Option<Run>,
    /// The peer showed in this tunnel that long probes do not harm it.
    is_safe: bool,
    round_trip: Duration,
    /// Send counter of the tunnel, and time, when the path was last examined.
    examined: (u64, Instant),
    /// When to look for a larger packet next, while there is a limit.
    raise_at: Instant,
    /// The pause after that: short at first where losses may have been taken for a smaller path.
    raise_pause: Duration,
    /// When a probe was lost that passed when it was sent again.
    lost_at: Option<Instant>,
    /// Whether to try the largest of all then, and not the next larger one.
    is_turn_of_top: bool,
    /// The first run on the present path.
    is_first_run: bool,
    /// Whether connections wait to be opened until that run has ended.
    holds: bool,
    /// Send counter at the last look.
    looked: u64,
    /// Datagrams sent between earlier looks, newest first.
    passed: [u64; 2],
    /// Much less is sent than before, so connections may have stalled because the path shrank.
    has_stalled: bool,
    /// Looks at the traffic while there is any.
    watch: Watch,
    /// A look is due.
    is_watching: bool,
    /// When the traffic check last found that something was sent.
    used_at: Instant,
}

/// Probes under way.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Run {
    /// Whether the peer survives probes that are longer than this one.
    Ask { round: u32 },
    /// Whether `target` still passes; if it does not, what does. `best` is the largest packet answered in this run.
    Check { target: u16, round: u32, best: u16 },
    /// Whether something larger than the limit passes; if not, and `is_near`, what lies between is worth a search.
    Raise { target: u16, is_near: bool, tries: u32 },
    /// Between what passes and what does not.
    Narrow { fails: u16, target: u16, tries: u32 },
}

/// What to do after a step.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Step {
    /// Probes to send, in this order.
    pub(super) probes: Vec<Probe>,
    /// When to call [`Search::due`]; `None`: not before there is traffic.
    pub(super) next: Option<Instant>,
}

impl Search {
    /// A search on a path that nobody has examined. `round_trip` is what the handshake took.
    pub(super) fn new(now: Instant, round_trip: Duration) -> Self {
        Self {
            epoch: now,
            first: 0,
            next: 0,
            mtu: 0,
            top: 0,
            overhead: 0,
            confirmed: 0,
            limit: None,
            run: None,
            is_safe: false,
            round_trip: round_trip.min(MAX_HANDSHAKE),
            examined: (0, now),
            raise_at: now,
            raise_pause: FIRST_RAISE,
            lost_at: None,
            is_turn_of_top: true,
            is_first_run: false,
            holds: false,
            looked: 0,
            passed: [0; 2],
            has_stalled: false,
            watch: Watch::new(now),
            is_watching: false,
            used_at: now,
        }
    }

    /// What lanes have to know.
    pub(super) fn state(&self) -> PathState {
        match self.limit {
            Some(limit) => PathState::Limited(limit),
            None if self.is_first_run && self.holds => PathState::UnderExamination,
            None => PathState::Open,
        }
    }

    /// Whether this is the first run on the present path.
    pub(super) fn is_examining(&self) -> bool {
        self.is_first_run
    }

    /// The largest packet that is known to pass.
    pub(super) fn known(&self) -> Option<u16> {
        self.limit.or_else(|| Some(self.confirmed).filter(|confirmed| *confirmed > 0))
    }

    /// Begins to examine another path, which adds `overhead` bytes to each packet, for a device with this MTU. `sent` is
    /// the next send counter of the tunnel.
    pub(super) fn begin(&mut self, now: Instant, sent: u64, mtu: u16, overhead: u16) -> Step {
        (self.first, self.confirmed, self.limit, self.run) = (self.next, 0, None, None);
        self.is_first_run = false;
        (self.mtu, self.top, self.overhead) = (mtu, mtu.min(MAX_PROBE - overhead), overhead);
        if self.smallest().is_none_or(|smallest| smallest >= self.top) {
            self.top = 0;
            return Step::default();
        }
        self.is_first_run = true;
        self.holds = self.is_near();
        if self.is_safe { self.check(now, sent, self.top) } else { self.ask(now, sent, 1) }
    }

    /// Takes over what is known about the path from the search of an older tunnel that uses the same one. `sent` is the next
    /// send counter of the new tunnel.
    pub(super) fn inherit(&mut self, now: Instant, sent: u64, older: &Self) {
        (self.mtu, self.top, self.overhead) = (older.mtu, older.top, older.overhead);
        (self.confirmed, self.limit) = (older.confirmed, older.limit);
        (self.round_trip, self.raise_at, self.raise_pause) = (older.round_trip, older.raise_at, older.raise_pause);
        self.examined = (sent, now);
    }

    /// The peer returned a test request intact: it survives long probes.
    pub(super) fn note_safe(&mut self) {
        self.is_safe = true;
    }

    /// Whether a connection to the peer waits until the path was examined.
    pub(super) fn is_near(&self) -> bool {
        self.round_trip <= NEAR
    }

    /// Stops, and forgets what is known.
    pub(super) fn stop(&mut self) {
        (self.first, self.confirmed, self.limit, self.run) = (self.next, 0, None, None);
        (self.is_first_run, self.is_watching) = (false, false);
    }

    /// A test of the path, or an answer to one, was received.
    pub(super) fn note_test(&mut self) {
        self.watch.note_test();
    }

    /// The traffic check: compares the traffic since the last call with earlier traffic. Returns whether to call
    /// [`Search::due`].
    pub(super) fn look(&mut self, now: Instant, carried: Carried) -> bool {
        let sent = carried.sent;
        let passed = sent.saturating_sub(self.looked);
        let [newest, oldest] = self.passed;
        self.has_stalled = passed >= STALLED && newest.max(oldest) >= PASSED_BEFORE.max(passed.saturating_mul(8));
        self.used_at = now;
        (self.looked, self.passed) = (sent, [passed, if self.has_stalled { 0 } else { newest }]);
        if self.run.is_none() && self.confirmed > 0 && !self.is_watching {
            self.watch.restart(carried);
            return true;
        }
        self.is_worth_a_run(now, sent)
    }

    fn is_worth_a_run(&self, now: Instant, sent: u64) -> bool {
        self.run.is_none() && (self.may_check(now, sent) || self.may_raise(now, sent))
    }

    /// The time of [`Step::next`] has come. `has_sent`: packets were sent since the last traffic check, and not only tests.
    pub(super) fn due(&mut self, now: Instant, carried: Carried, has_sent: bool) -> Step {
        let sent = carried.sent;
        match self.run.take() {
            None => self.idle(now, carried, has_sent || now < self.used_at + USED_FOR),
            Some(Run::Ask { round }) if round < CHECK_ROUNDS => self.ask(now, sent, round + 1),
            Some(Run::Ask { .. }) => self.rest(now, sent),
            Some(Run::Check { target, round, best }) if round < CHECK_ROUNDS => {
                // The largest first: if a smaller one that was sent later is answered, it is lost rather than late.
                let smaller = self.rungs(best, target).rev();
                let sizes: Vec<_> = [target].into_iter().chain(smaller).collect();
                self.send(now, &sizes, Run::Check { target, round: round + 1, best })
            }
            // Nothing is answered: that is no question of size.
            Some(Run::Check { best: 0, .. }) => self.rest(now, sent),
            Some(Run::Check { target, best, .. }) => {
                // On a path that was examined before, the losses may be by chance.
                let pause = if self.is_first_run { RAISE_INTERVAL } else { FIRST_RAISE };
                (self.confirmed, self.limit, self.is_first_run) = (best, Some(best), false);
                (self.raise_at, self.raise_pause) = (now + pause, (2 * pause).min(RAISE_INTERVAL));
                self.is_turn_of_top = true;
                let fails = self.rungs(best, target).next().unwrap_or(target);
                self.narrow(now, sent, fails)
            }
            Some(Run::Raise { target, is_near, tries }) if tries < RAISE_TRIES && self.is_lossy(now) => {
                self.send(now, &[target], Run::Raise { target, is_near, tries: tries + 1 })
            }
            Some(Run::Raise { target, is_near: true, .. }) => self.narrow(now, sent, target),
            Some(Run::Raise { .. }) => self.rest(now, sent),
            Some(Run::Narrow { fails, target, tries }) if tries < NARROW_TRIES => {
                self.send(now, &[target], Run::Narrow { fails, target, tries: tries + 1 })
            }
            Some(Run::Narrow { target, .. }) => self.narrow(now, sent, target),
        }
    }

    /// No run is under way: begins one if there is a reason to, or looks at the traffic again a little later if there is any.
    fn idle(&mut self, now: Instant, carried: Carried, is_used: bool) -> Step {
        let sent = carried.sent;
        let is_unanswered = self.watch.look(now, carried, is_used) && self.confirmed > 0;
        if !self.is_safe && self.is_worth_a_run(now, sent) {
            // Not as often as at first: a Go Nebula that does not survive long probes gives the same answer each time.
            return self.ask(now, sent, CHECK_ROUNDS);
        }
        if self.may_raise(now, sent) {
            return self.raise(now, sent);
        }
        if self.top > 0 && is_unanswered || self.may_check(now, sent) {
            return self.check(now, sent, self.limit.unwrap_or(self.top));
        }
        self.is_watching = self.confirmed > 0 && is_used && self.watch.goes_on();
        Step { probes: Vec::new(), next: self.is_watching.then(|| now + LOOK) }
    }

    /// The peer answered the question of [`Run::Ask`], in a way that shows that it must not be sent longer probes.
    pub(super) fn refused(&mut self, now: Instant, sent: u64) -> Option<Step> {
        let is_asked = matches!(self.run, Some(Run::Ask { .. }));
        is_asked.then(|| self.rest(now, sent))
    }

    /// A probe was answered. `is_proof`: by who answered it, or how, the peer survives longer ones.
    pub(super) fn answered(&mut self, now: Instant, sent: u64, probe: Probe, is_proof: bool) -> Option<Step> {
        let is_own = probe.number >= self.first && probe.number < self.next && probe.size <= self.top;
        if !is_own {
            return None;
        }
        if probe.is_short() {
            // It says nothing about sizes.
            let is_asked = matches!(self.run, Some(Run::Ask { .. }));
            self.is_safe |= is_proof;
            return is_asked.then(|| match is_proof {
                true => self.check(now, sent, self.limit.unwrap_or(self.top)),
                false => self.rest(now, sent),
            });
        }
        self.measure(now, probe);
        self.confirmed = self.confirmed.max(probe.size);
        if self.confirmed == self.top || self.limit.is_some_and(|limit| probe.size > limit) {
            self.limit = Some(self.confirmed).filter(|size| *size < self.mtu);
        }
        let run = self.run.take();
        match run {
            Some(Run::Check { target, round, best }) if probe.size < target => {
                self.run = Some(Run::Check { target, round, best: best.max(probe.size) });
                None
            }
            // A smaller one of an earlier run.
            Some(Run::Raise { target, .. } | Run::Narrow { target, .. }) if probe.size < target => {
                self.run = run;
                None
            }
            None => None,
            Some(Run::Ask { .. }) => {
                self.run = run;
                None
            }
            Some(_) if self.confirmed == self.top => Some(self.rest(now, sent)),
            Some(Run::Check { round, .. }) => {
                if round > 1 {
                    self.lost_at = Some(now);
                }
                Some(self.rest(now, sent))
            }
            Some(Run::Raise { .. }) => Some(self.raise_further(now)),
            Some(Run::Narrow { fails, .. }) => Some(self.narrow(now, sent, fails)),
        }
    }

    fn may_check(&self, now: Instant, sent: u64) -> bool {
        let (counter, at) = self.examined;
        // A peer that answered nothing is asked less often.
        let interval = if self.confirmed > 0 { CHECK_INTERVAL } else { RAISE_INTERVAL };
        let since = now.saturating_duration_since(at);
        let enough = match () {
            () if self.has_stalled => 1,
            // Other traffic in the tunnel may hide that a connection has stalled.
            () if self.confirmed > 0 && since >= USED_INTERVAL => MIN_DATAGRAMS,
            () if self.confirmed > 0 && since >= BUSY_INTERVAL => BUSY_RATE * since.as_secs(),
            () => DATAGRAMS_PER_CHECK,
        };
        self.top > 0 && sent.saturating_sub(counter) >= enough && since >= interval
    }

    /// Whether the path loses packets whatever their size.
    fn is_lossy(&self, now: Instant) -> bool {
        self.lost_at.is_some_and(|at| now < at + LOSSY_FOR)
    }

    fn may_raise(&self, now: Instant, sent: u64) -> bool {
        self.limit.is_some()
            && self.confirmed < self.top
            && now >= self.raise_at
            && sent.saturating_sub(self.examined.0) >= MIN_DATAGRAMS
    }

    fn ask(&mut self, now: Instant, sent: u64, round: u32) -> Step {
        (self.examined, self.has_stalled) = ((sent, now), false);
        self.send(now, &[SHORT], Run::Ask { round })
    }

    fn check(&mut self, now: Instant, sent: u64, target: u16) -> Step {
        (self.examined, self.has_stalled) = ((sent, now), false);
        self.send(now, &[target], Run::Check { target, round: 1, best: 0 })
    }

    /// Tries one larger packet.
    fn raise(&mut self, now: Instant, sent: u64) -> Step {
        (self.examined, self.raise_at) = ((sent, now), now + self.raise_pause);
        self.raise_pause = (2 * self.raise_pause).min(RAISE_INTERVAL);
        let next = self.next_rung();
        let gap = next - self.confirmed;
        // Between two rungs, too: what passes there may have been lost before.
        let target = match self.is_turn_of_top {
            true => self.top,
            false if gap < 2 * PRECISION => next,
            false => self.confirmed + gap / 2,
        };
        let is_near = !self.is_turn_of_top && gap > self.confirmed / 5;
        self.is_turn_of_top = !self.is_turn_of_top;
        self.send(now, &[target], Run::Raise { target, is_near, tries: 1 })
    }

    /// A larger packet passed, so an even larger one may.
    fn raise_further(&mut self, now: Instant) -> Step {
        let target = self.next_rung();
        self.send(now, &[target], Run::Raise { target, is_near: true, tries: 1 })
    }

    fn next_rung(&self) -> u16 {
        self.rungs(self.confirmed, self.top).next().unwrap_or(self.top)
    }

    /// Tries what lies between the limit and a packet that does not pass.
    fn narrow(&mut self, now: Instant, sent: u64, fails: u16) -> Step {
        let gap = fails.saturating_sub(self.confirmed);
        if gap < PRECISION {
            return self.rest(now, sent);
        }
        let target = self.confirmed + gap / 2;
        self.send(now, &[target], Run::Narrow { fails, target, tries: 1 })
    }

    /// Ends the run.
    fn rest(&mut self, now: Instant, sent: u64) -> Step {
        (self.run, self.examined, self.is_first_run) = (None, (sent, now), false);
        self.is_watching = true;
        Step { probes: Vec::new(), next: Some(now + LOOK) }
    }

    fn send(&mut self, now: Instant, sizes: &[u16], run: Run) -> Step {
        let number = self.next;
        let stamp = now.saturating_duration_since(self.epoch);
        self.next = self.next.wrapping_add(1);
        self.run = Some(run);
        let probes = sizes.iter().map(|&size| Probe { number, stamp, size }).collect();
        Step { probes, next: Some(now + self.patience()) }
    }

    /// How long an answer may take.
    fn patience(&self) -> Duration {
        (self.round_trip * 2 + MIN_PATIENCE / 2).clamp(MIN_PATIENCE, MAX_PATIENCE)
    }

    fn measure(&mut self, now: Instant, probe: Probe) {
        let Some(sample) = now.saturating_duration_since(self.epoch).checked_sub(probe.stamp) else { return };
        self.round_trip = (self.round_trip * 3 + sample.min(MAX_PATIENCE)) / 4;
    }

    /// The sizes of the ladder between these two, which are not among them.
    fn rungs(&self, above: u16, below: u16) -> impl DoubleEndedIterator<Item = u16> + use<> {
        let overhead = self.overhead;
        let sizes = LADDER.iter().map(move |size| size - overhead);
        sizes.filter(move |size| (above + 1..below).contains(size))
    }

    fn smallest(&self) -> Option<u16> {
        LADDER.first().map(|size| size - self.overhead)
    }
}

/// Sizes of IP packets that links and tunnels carry: IPv6's minimum, common encapsulations, PPPoE, Ethernet, jumbo frames;
/// and 1000 in case that nothing usual passes.
const LADDER: [u16; 11] = [1000, 1200, 1280, 1340, 1400, 1420, 1460, 1492, 1500, 4000, 9000];
/// The whole IP packet. Go Nebula reads datagrams into buffers of 9001 bytes.
const MAX_PROBE: u16 = 9000;
/// Probes of one size that have to be lost before it counts as too large: the network loses packets for other reasons.
const CHECK_ROUNDS: u32 = 3;
/// A wrong guess costs no more than [`PRECISION`] bytes here.
const NARROW_TRIES: u32 = 2;
/// How exactly a limit is worth being known, in bytes.
const PRECISION: u16 = 16;
/// After this time with traffic, the path is examined again: its MTU may have changed.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The same for a tunnel that carries too little for that, but [`BUSY_RATE`]: a connection that stalled, which repeats its packet at pauses
/// that double, is helped with its fifth attempt.
const BUSY_INTERVAL: Duration = Duration::from_secs(4);
/// Datagrams a second.
const BUSY_RATE: u64 = 4;
/// The same for a tunnel that carries even less.
const USED_INTERVAL: Duration = Duration::from_secs(15);
/// How long what a traffic check found holds: until the next one, which may come a little late.
const USED_FOR: Duration = Duration::from_secs(6);
/// Time between two looks at the traffic of a tunnel that is in use.
const LOOK: Duration = Duration::from_secs(1);
/// Datagrams in that time, so that a check is at most a thousandth of them, and its answer another one.
const DATAGRAMS_PER_CHECK: u64 = 1000;
/// Connections may have stalled if a tunnel that sent at least this many datagrams between two looks now sends an eighth of them or
/// less ...
const PASSED_BEFORE: u64 = 200;
/// ... but at least this many, which may be retransmissions.
const STALLED: u64 = 2;
/// A limit that is found on a path in use is doubted after this time, then after twice as long, and so on.
const FIRST_RAISE: Duration = Duration::from_secs(5);
/// A path with a limit is tried with a larger packet after this time in the end: two probes a minute.
const RAISE_INTERVAL: Duration = Duration::from_secs(30);
/// Larger packets that are tried on a path that loses some of every size, before they count as too large.
const RAISE_TRIES: u32 = 2;
/// How long a path counts as one after a loss.
const LOSSY_FOR: Duration = Duration::from_secs(60);
/// Datagrams between two checks or attempts, without which the peer is not in use.
const MIN_DATAGRAMS: u64 = 8;
/// The answer may be computed by a busy host.
const MIN_PATIENCE: Duration = Duration::from_millis(50);
const MAX_PATIENCE: Duration = Duration::from_secs(1);
/// Connections to peers with a longer round trip do not wait, because users would notice the delay of two round trips. If the path
/// turns out to be too small, senders on this host are told. A distant Go Nebula peer does not examine paths, so its first packets
/// on such a connection may be lost.
const NEAR: Duration = Duration::from_millis(25);
/// A handshake that took longer was repeated.
const MAX_HANDSHAKE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
