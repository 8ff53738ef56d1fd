//! Finds out how large an overlay packet the path to a peer carries (packetization layer path MTU discovery, RFC
//! 8899).
//!
//! The probes are test requests that are padded to the size under test, because Go Nebula 1.11 answers them with the
//! same payload, too. Earlier releases panic at them, so a peer is first asked with a short probe, which harms no
//! release, whether it returns what it gets (see [`size_probe`](crate::wire::size_probe)). A path counts as open
//! until a probe was lost several times and smaller ones were answered: nearly all are.
//!
//! If the peer runs this program, the search goes on beyond the MTU of the device, with jumbo frames: they may hold
//! several TCP segments, which the peer takes apart.

mod ladder;
mod openings;
mod probing;
mod raises;
mod series;
mod stall;
mod watch;

use std::time::{Duration, Instant};

use self::ladder::Ladder;
pub(super) use self::openings::Openings;
use self::raises::{RAISE_INTERVAL, Raises};
use self::series::Series;
use self::stall::StallDetector;
use self::watch::Watch;
use super::path_choice::Carried;
use crate::handover::MeasuredPath;
use crate::tunnel::PathState;
use crate::wire::size_probe::{SHORT, SizeProbe};

/// Where a search stands. Sends nothing: each step returns the probes to send.
#[derive(Debug, Clone)]
pub(super) struct Search {
    ladder: Ladder,
    series: Series,
    run: Option<Run>,
    /// The largest packet that was answered by this path; 0 if none was.
    confirmed: u16,
    /// The largest packet to send; `None`: any.
    limit: Option<u16>,
    /// The peer showed in this tunnel that long probes do not harm it.
    is_safe: bool,
    /// Whether the peer runs this program, and takes packets with several TCP segments; `None`: it was not asked.
    takes_segments: Option<bool>,
    /// When to try again whether the path carries more than the device.
    jumbo_at: Instant,
    /// Send counter of the tunnel, and time, when the path was last examined.
    examined: (u64, Instant),
    /// The first run on the present path.
    is_first_run: bool,
    /// Whether connections wait to be opened until that run has ended.
    holds: bool,
    raises: Raises,
    stall: StallDetector,
    watch: Watch,
}

/// What the probes under way find out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    /// Whether the peer survives probes that are longer than this one, which is sent so often.
    Ask { tries: u32 },
    /// Whether `target` still passes; if it does not, what does. `best` is the largest packet answered in this run.
    Check { target: u16, best: u16 },
    /// Whether something larger than the limit passes; if not, and `is_near`, what lies between is worth a search.
    Raise { target: u16, is_near: bool },
    /// Between what passes and what does not.
    Narrow { fails: u16, target: u16 },
    /// Whether something passes that is larger than any packet of the device.
    Jumbo { target: u16 },
}

/// What the answer to a probe shows about the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    None,
    /// Long probes do not harm it.
    Intact,
    /// It runs this program.
    SameProgram,
}

/// What to do after a step.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Step {
    /// Probes to send, in this order.
    pub(super) probes: Vec<SizeProbe>,
    /// When to call [`Search::due`]; `None`: not before there is traffic.
    pub(super) next: Option<Instant>,
}

impl Search {
    /// A search on a path that nobody has examined. `round_trip` is what the handshake took.
    pub(super) fn new(now: Instant, round_trip: Duration) -> Self {
        Self {
            ladder: Ladder::default(),
            series: Series::new(now, round_trip),
            run: None,
            confirmed: 0,
            limit: None,
            is_safe: false,
            takes_segments: None,
            jumbo_at: now,
            examined: (0, now),
            is_first_run: false,
            holds: false,
            raises: Raises::new(now),
            stall: StallDetector::default(),
            watch: Watch::new(now),
        }
    }

    /// What lanes have to know.
    pub(super) fn state(&self) -> PathState {
        match self.limit {
            Some(limit) => PathState::Limited(limit),
            None if self.is_first_run && self.holds => PathState::UnderExamination,
            None if self.takes_segments == Some(true) && self.ladder.is_jumbo(self.confirmed) => {
                PathState::Joined(self.confirmed)
            }
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

    /// Begins to examine another path, which adds `overhead` bytes to each packet, for a device with this MTU. `sent`
    /// is the next send counter of the tunnel.
    pub(super) fn begin(&mut self, now: Instant, sent: u64, mtu: u16, overhead: u16) -> Step {
        self.forget();
        self.ladder = Ladder::new(mtu, overhead);
        if self.ladder.top() == 0 {
            return Step::default();
        }
        self.is_first_run = true;
        self.holds = self.is_near();
        self.jumbo_at = self.jumbo_at.min(now + SETTLED);
        let is_known = self.is_safe && self.takes_segments.is_some();
        if is_known { self.check(now, sent, self.ladder.top()) } else { self.ask(now, sent, CHECK_ROUNDS) }
    }

    fn forget(&mut self) {
        self.series.forget();
        (self.confirmed, self.limit, self.run, self.is_first_run) = (0, None, None, false);
    }

    /// Takes over what is known about the path from the search of an older tunnel that uses the same one. `sent` is
    /// the next send counter of the new tunnel.
    pub(super) fn inherit(&mut self, now: Instant, sent: u64, older: &Self) {
        self.ladder = older.ladder;
        // Whether this peer takes larger packets than the device's has to be asked in each tunnel.
        (self.confirmed, self.limit) = (older.confirmed_of_device(), older.limit);
        self.series.inherit(&older.series);
        self.raises.inherit(&older.raises);
        self.examined = (sent, now);
    }

    /// The largest packet of the device that was answered.
    fn confirmed_of_device(&self) -> u16 {
        self.confirmed.min(self.ladder.top())
    }

    /// What is known about the path, for another process of this node: as far as that matters for packets of the
    /// device. The other process asks the peer again whether it takes larger ones.
    pub(super) fn measured(&self) -> Option<MeasuredPath> {
        let (confirmed, limit) = (self.confirmed_of_device(), self.limit);
        let measured =
            || MeasuredPath { mtu: self.ladder.mtu(), confirmed, limit, round_trip: self.series.round_trip() };
        (confirmed > 0).then(measured)
    }

    /// Takes over what an earlier process of this node knew about the path, which adds `overhead` bytes to each packet,
    /// if it is plausible. `sent` is the next send counter of the tunnel. Returns whether it is.
    pub(super) fn take_over(&mut self, now: Instant, sent: u64, path: &MeasuredPath, overhead: u16) -> bool {
        let ladder = Ladder::new(path.mtu, overhead);
        let is_plausible = ladder.is_step(path.confirmed) && path.limit.is_none_or(|limit| limit == path.confirmed);
        if is_plausible {
            (self.confirmed, self.limit, self.ladder) = (path.confirmed, path.limit, ladder);
            self.series.take_over(path.round_trip);
            self.raises.begin(now, false);
            self.examined = (sent, now);
        }
        is_plausible
    }

    /// The peer returned a test request intact: it survives long probes.
    pub(super) fn note_safe(&mut self) {
        self.is_safe = true;
    }

    /// Whether a connection to the peer waits until the path was examined.
    pub(super) fn is_near(&self) -> bool {
        self.series.is_near()
    }

    /// Stops, and forgets what is known.
    pub(super) fn stop(&mut self) {
        self.forget();
        self.watch.turn(false);
    }

    /// A test of the path, or an answer to one, was received.
    pub(super) fn note_test(&mut self) {
        self.watch.note_test();
    }

    /// The traffic check: compares the traffic since the last call with earlier traffic. Returns whether to call
    /// [`Search::due`].
    pub(super) fn look(&mut self, now: Instant, carried: Carried) -> bool {
        self.stall.look(carried.sent);
        self.watch.note_used(now);
        if self.run.is_none() && self.confirmed > 0 && !self.watch.is_on() {
            self.watch.restart(carried);
            return true;
        }
        self.is_worth_a_run(now, carried.sent)
    }

    fn is_worth_a_run(&self, now: Instant, sent: u64) -> bool {
        self.run.is_none() && (self.may_check(now, sent) || self.may_raise(now, sent) || self.may_try_jumbo(now, sent))
    }

    /// The time of [`Step::next`] has come. `has_sent`: packets were sent since the last traffic check, and not only
    /// tests.
    pub(super) fn due(&mut self, now: Instant, carried: Carried, has_sent: bool) -> Step {
        let sent = carried.sent;
        let Some(run) = self.run.take() else {
            return self.idle(now, carried, has_sent || self.watch.was_used(now));
        };
        let lost = self.series.lose();
        match run {
            Run::Ask { tries } if lost < tries => {
                self.note_examined(now, sent);
                self.send_again(now, &[SHORT], run)
            }
            Run::Ask { .. } => {
                self.jumbo_at = now + JUMBO_INTERVAL;
                self.rest(now, sent)
            }
            Run::Check { target, best } if lost < CHECK_ROUNDS => {
                // The largest first: if a smaller one that was sent later is answered, it is lost rather than late.
                let smaller = self.ladder.between(best, target).rev();
                let sizes: Vec<_> = [target].into_iter().chain(smaller).collect();
                self.send_again(now, &sizes, run)
            }
            // Nothing is answered: that is no question of size.
            Run::Check { best: 0, .. } => self.rest(now, sent),
            Run::Check { target, best } => {
                if target > self.ladder.top() {
                    self.jumbo_at = now + JUMBO_INTERVAL;
                }
                let was_first_run = std::mem::take(&mut self.is_first_run);
                (self.confirmed, self.limit) = (best, self.limit_at(best));
                if self.limit.is_none() {
                    // Only jumbo frames are lost.
                    return self.rest(now, sent);
                }
                self.raises.begin(now, !was_first_run);
                let fails = self.ladder.between(best, target).next().unwrap_or(target);
                self.narrow(now, sent, fails)
            }
            Run::Raise { target, .. } if lost < RAISE_TRIES && self.raises.is_lossy(now) => {
                self.send_again(now, &[target], run)
            }
            Run::Raise { target, is_near: true } => self.narrow(now, sent, target),
            Run::Raise { .. } => self.rest(now, sent),
            Run::Narrow { target, .. } if lost < NARROW_TRIES => self.send_again(now, &[target], run),
            Run::Narrow { target, .. } => self.narrow(now, sent, target),
            Run::Jumbo { target } if lost < JUMBO_TRIES => self.send_again(now, &[target], run),
            Run::Jumbo { target } => match self.ladder.jumbo_below(target) {
                Some(smaller) => self.send(now, smaller, Run::Jumbo { target: smaller }),
                None => self.pause(now),
            },
        }
    }

    /// No run is under way: begins one if there is a reason to, or looks at the traffic again a little later if there
    /// is any.
    fn idle(&mut self, now: Instant, carried: Carried, is_used: bool) -> Step {
        let sent = carried.sent;
        let is_unanswered = self.watch.look(now, carried, is_used) && self.confirmed > 0;
        if !self.is_safe && self.is_worth_a_run(now, sent) {
            // Not as often as at first: a Go Nebula that does not survive long probes gives the same answer each
            // time.
            return self.ask(now, sent, 1);
        }
        if self.may_raise(now, sent) {
            return self.raise(now, sent);
        }
        if self.ladder.top() > 0 && is_unanswered || self.may_check(now, sent) {
            return self.check(now, sent, self.limit.unwrap_or_else(|| self.confirmed.max(self.ladder.top())));
        }
        if self.may_try_jumbo(now, sent) {
            return if self.takes_segments.is_none() { self.ask(now, sent, 1) } else { self.try_jumbo(now) };
        }
        self.watch.turn(self.confirmed > 0 && is_used && self.watch.goes_on());
        Step { probes: Vec::new(), next: self.watch.is_on().then(|| now + LOOK) }
    }

    /// The peer answered the question of [`Run::Ask`], in a way that shows that it must not be sent longer probes.
    pub(super) fn refused(&mut self, now: Instant, sent: u64) -> Option<Step> {
        let is_asked = matches!(self.run, Some(Run::Ask { .. }));
        is_asked.then(|| {
            self.takes_segments = Some(false);
            self.rest(now, sent)
        })
    }

    /// A probe was answered. `proof`: what it shows by who answered it, or how.
    pub(super) fn answered(&mut self, now: Instant, sent: u64, probe: SizeProbe, proof: Proof) -> Option<Step> {
        let top = self.ladder.top();
        if !self.series.is_own(probe) || probe.size > top.max(self.ladder.jumbo()) {
            return None;
        }
        if probe.is_short() {
            // It says nothing about sizes.
            let is_asked = matches!(self.run, Some(Run::Ask { .. }));
            self.is_safe |= proof != Proof::None;
            self.takes_segments = Some(proof == Proof::SameProgram);
            return is_asked.then(|| match self.is_safe {
                true => self.check(now, sent, self.limit.unwrap_or(top)),
                false => self.rest(now, sent),
            });
        }
        self.series.measure(now, probe);
        self.confirmed = self.confirmed.max(probe.size);
        if self.confirmed >= top || self.limit.is_some_and(|limit| probe.size > limit) {
            self.limit = self.limit_at(self.confirmed);
        }
        match self.run? {
            Run::Check { target, best } if probe.size < target => {
                self.run = Some(Run::Check { target, best: best.max(probe.size) });
                None
            }
            // A smaller one of an earlier run.
            Run::Raise { target, .. } | Run::Narrow { target, .. } | Run::Jumbo { target } if probe.size < target => {
                None
            }
            Run::Ask { .. } => None,
            Run::Jumbo { .. } => Some(self.pause(now)),
            Run::Check { .. } | Run::Raise { .. } | Run::Narrow { .. } if self.confirmed >= top => {
                Some(self.rest(now, sent))
            }
            Run::Check { .. } => {
                if self.series.has_lost() {
                    self.raises.note_loss(now);
                }
                Some(self.rest(now, sent))
            }
            Run::Raise { .. } => Some(self.raise_further(now)),
            Run::Narrow { fails, .. } => Some(self.narrow(now, sent, fails)),
        }
    }

    fn may_check(&self, now: Instant, sent: u64) -> bool {
        let (counter, at) = self.examined;
        // A peer that answered nothing is asked less often.
        let interval = if self.confirmed > 0 { CHECK_INTERVAL } else { RAISE_INTERVAL };
        let since = now.saturating_duration_since(at);
        let enough = match () {
            () if self.stall.has_stalled() => 1,
            // Other traffic in the tunnel may hide that a connection has stalled.
            () if self.confirmed > 0 && since >= USED_INTERVAL => MIN_DATAGRAMS,
            () if self.confirmed > 0 && since >= BUSY_INTERVAL => BUSY_RATE * since.as_secs(),
            () => DATAGRAMS_PER_CHECK,
        };
        self.ladder.top() > 0 && sent.saturating_sub(counter) >= enough && since >= interval
    }

    fn may_raise(&self, now: Instant, sent: u64) -> bool {
        self.limit.is_some()
            && self.confirmed < self.ladder.top()
            && self.raises.is_due(now)
            && sent.saturating_sub(self.examined.0) >= MIN_DATAGRAMS
    }

    /// Whether to find out if the path carries more than the device, or whether the peer has a use for that.
    fn may_try_jumbo(&self, now: Instant, sent: u64) -> bool {
        self.takes_segments != Some(false)
            && self.limit.is_none()
            && (self.ladder.top()..self.ladder.jumbo()).contains(&self.confirmed)
            && now >= self.jumbo_at
            && sent.saturating_sub(self.examined.0) >= DATAGRAMS_PER_JUMBO
    }

    /// The limit on a path that carries this much.
    fn limit_at(&self, size: u16) -> Option<u16> {
        Some(size).filter(|size| !self.ladder.is_enough(*size))
    }

    fn note_examined(&mut self, now: Instant, sent: u64) {
        self.examined = (sent, now);
        self.stall.note_examined();
    }

    fn ask(&mut self, now: Instant, sent: u64, tries: u32) -> Step {
        self.note_examined(now, sent);
        self.send(now, SHORT, Run::Ask { tries })
    }

    fn check(&mut self, now: Instant, sent: u64, target: u16) -> Step {
        self.note_examined(now, sent);
        self.send(now, target, Run::Check { target, best: 0 })
    }

    /// Tries one larger packet.
    fn raise(&mut self, now: Instant, sent: u64) -> Step {
        self.examined = (sent, now);
        let is_turn_of_top = self.raises.take(now);
        let next = self.ladder.above(self.confirmed);
        let gap = next - self.confirmed;
        // Between two rungs, too: what passes there may have been lost before.
        let target = match is_turn_of_top {
            true => self.ladder.top(),
            false if gap < 2 * PRECISION => next,
            false => self.confirmed + gap / 2,
        };
        let is_near = !is_turn_of_top && gap > self.confirmed / 5;
        self.send(now, target, Run::Raise { target, is_near })
    }

    /// A larger packet passed, so an even larger one may.
    fn raise_further(&mut self, now: Instant) -> Step {
        let target = self.ladder.above(self.confirmed);
        self.send(now, target, Run::Raise { target, is_near: true })
    }

    /// Tries what lies between the limit and a packet that does not pass.
    fn narrow(&mut self, now: Instant, sent: u64, fails: u16) -> Step {
        let gap = fails.saturating_sub(self.confirmed);
        if gap < PRECISION {
            return self.rest(now, sent);
        }
        let target = self.confirmed + gap / 2;
        self.send(now, target, Run::Narrow { fails, target })
    }

    /// Tries the largest packet that could hold several TCP segments.
    fn try_jumbo(&mut self, now: Instant) -> Step {
        self.jumbo_at = now + JUMBO_INTERVAL;
        let target = self.ladder.jumbo();
        self.send(now, target, Run::Jumbo { target })
    }

    /// Ends the run.
    fn rest(&mut self, now: Instant, sent: u64) -> Step {
        (self.examined, self.is_first_run) = ((sent, now), false);
        self.pause(now)
    }

    /// Ends a run that says nothing about the packets of the device.
    fn pause(&mut self, now: Instant) -> Step {
        self.run = None;
        self.watch.turn(true);
        Step { probes: Vec::new(), next: Some(now + LOOK) }
    }

    /// Begins a run with a probe of this size.
    fn send(&mut self, now: Instant, size: u16, run: Run) -> Step {
        self.run = Some(run);
        let probes = self.series.first_try(now, &[size]);
        Step { probes, next: Some(now + self.series.patience()) }
    }

    /// Goes on with a run whose last probes were lost.
    fn send_again(&mut self, now: Instant, sizes: &[u16], run: Run) -> Step {
        self.run = Some(run);
        let probes = self.series.next_try(now, sizes);
        Step { probes, next: Some(now + self.series.patience()) }
    }
}

/// Probes of one size that have to be lost before it counts as too large: the network loses packets for other
/// reasons.
const CHECK_ROUNDS: u32 = 3;
/// A wrong guess costs no more than [`PRECISION`] bytes here.
const NARROW_TRIES: u32 = 2;
/// Resolution of the search, in bytes.
const PRECISION: u16 = 16;
/// After this time with traffic, the path is examined again: its MTU may have changed.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The same for a tunnel that carries too little for that, but [`BUSY_RATE`]: a connection that stalled, which
/// repeats its packet at pauses that double, is helped with its fifth attempt.
const BUSY_INTERVAL: Duration = Duration::from_secs(4);
/// Datagrams a second.
const BUSY_RATE: u64 = 4;
/// The same for a tunnel that carries even less.
const USED_INTERVAL: Duration = Duration::from_secs(15);
/// Time between two looks at the traffic of a tunnel that is in use.
const LOOK: Duration = Duration::from_secs(1);
/// Datagrams in that time, so that a check is at most a thousandth of them, and its answer another one.
const DATAGRAMS_PER_CHECK: u64 = 1000;
/// Jumbo frames that have to be lost before their size counts as too large.
const JUMBO_TRIES: u32 = 2;
/// Time after which a path that did not carry jumbo frames is tried again.
const JUMBO_INTERVAL: Duration = Duration::from_secs(300);
/// After a change of path, the time that the new one has to stay in use before it is tried with jumbo frames.
const SETTLED: Duration = Duration::from_secs(10);
/// Datagrams since the last examination without which larger ones are not worth a try.
const DATAGRAMS_PER_JUMBO: u64 = 64;
/// Larger packets that are tried on a path that loses some of every size, before they count as too large.
const RAISE_TRIES: u32 = 2;
/// Datagrams between two checks or attempts, without which the peer is not in use.
const MIN_DATAGRAMS: u64 = 8;
#[cfg(test)]
mod tests;
