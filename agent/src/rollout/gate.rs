//! Judges an instance whose program was replaced, by comparing it with itself before. Pure: what is seen and how much
//! time has passed are arguments.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use nebula_cni_contract::instance_status::{InstanceState, Status};
use serde::{Deserialize, Serialize};

use super::program::ProgramId;

/// What one look at an instance shows.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Its process.
    pub pid: i32,
    /// The program of that process.
    pub program: ProgramId,
    /// Its status document.
    pub status: Status,
    /// Resident memory of the process in KiB; `None` if it cannot be read.
    pub resident_kib: Option<u64>,
}

/// What is remembered of an instance while its program is replaced. It survives a restart of the agent, so it is small
/// whatever the instance says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Before {
    /// Its process.
    pub pid: i32,
    /// What it did for its pod.
    pub state: InstanceState,
    /// `not_before` and `not_after` of its certificate.
    pub certificate: Option<(i64, i64)>,
    /// Number of open tunnels.
    pub open: usize,
    /// Overlay addresses of the peers of these tunnels; of many only some.
    pub peers: BTreeSet<String>,
    /// Packets that were dropped since its start, for whatever reason.
    pub drops: u64,
    /// Packets that were dropped in a minute.
    pub drops_per_minute: u64,
    /// Resident memory in KiB.
    pub resident_kib: Option<u64>,
}

impl Before {
    /// `drops_per_minute` is what earlier looks at the instance showed.
    #[must_use]
    pub fn of(sample: &Sample, drops_per_minute: u64) -> Self {
        Self {
            pid: sample.pid,
            state: sample.status.state,
            certificate: validity(&sample.status),
            open: sample.status.tunnels.len(),
            peers: peers(&sample.status).filter(|peer| peer.len() <= MAX_ADDRESS).take(MAX_PEERS).collect(),
            drops: drops(&sample.status),
            drops_per_minute,
            resident_kib: sample.resident_kib,
        }
    }

    /// Whether it can have come from [`Before::of`].
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.peers.len() <= MAX_PEERS && self.peers.iter().all(|peer| peer.len() <= MAX_ADDRESS)
    }
}

/// All packets that an instance has dropped.
#[must_use]
pub fn drops(status: &Status) -> u64 {
    let drops = status.counters.iter().filter(|(name, _)| name.starts_with("dropped_"));
    drops.fold(0, |sum, (_, count)| sum.saturating_add(*count))
}

/// The conditions under which an instance keeps its new program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gate {
    /// The program that it must run.
    pub wanted: ProgramId,
    /// Its process, as the plugin named it; `None` if the agent was restarted meanwhile.
    pub pid: Option<i32>,
    /// For how long it is watched.
    pub watch: Duration,
}

/// What a look at an upgraded instance means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It has to be watched further.
    Watch,
    /// It keeps its program.
    Keep,
    /// It gets the old program back.
    RollBack(Fault),
}

/// Why an instance does not keep its new program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// It does not answer.
    Silent(String),
    /// It is another process than right after the upgrade.
    Crashed,
    /// It does not run the program that was to be installed.
    OtherProgram,
    /// It does not carry the pod's packets.
    State(InstanceState, String),
    /// It has no certificate.
    NoCertificate,
    /// Its certificate is older than the one it had.
    OlderCertificate,
    /// Tunnels are missing.
    Tunnels {
        /// How many there were.
        before: usize,
        /// How many are open.
        open: usize,
    },
    /// It drops more packets than before.
    Drops {
        /// How many.
        count: u64,
        /// In what time.
        seconds: u64,
        /// How many there were in a minute.
        before: u64,
    },
    /// It takes much more memory than before.
    Memory {
        /// In KiB.
        before: u64,
        /// In KiB.
        resident: u64,
    },
    /// The plugin did not finish, or the instance ended in the middle.
    Interrupted(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent(why) => write!(f, "its instance does not answer: {why}"),
            Self::Crashed => f.write_str("its instance crashed and was started again"),
            Self::OtherProgram => f.write_str("its instance does not run the installed program"),
            Self::State(state, why) if why.is_empty() => write!(f, "its instance is in state {}", state.word()),
            Self::State(state, why) => write!(f, "its instance is in state {}: {why}", state.word()),
            Self::NoCertificate => f.write_str("its instance lost the certificate"),
            Self::OlderCertificate => f.write_str("its instance has an older certificate than before"),
            Self::Tunnels { before, open } => {
                write!(f, "{open} tunnels are open, and there were {before} before")
            }
            Self::Drops { count, seconds, before } => {
                write!(f, "{count} packets were dropped in {seconds} s, and before {before} in a minute")
            }
            Self::Memory { before, resident } => {
                write!(f, "its instance takes {resident} KiB of memory, and took {before} KiB before")
            }
            Self::Interrupted(why) => write!(f, "the upgrade was interrupted: {why}"),
        }
    }
}

impl Gate {
    /// Judges what is seen, or why nothing is seen, so long after the upgrade.
    #[must_use]
    pub fn judge(&self, before: &Before, seen: Result<&Sample, &str>, since: Duration) -> Verdict {
        let is_settled = since >= SETTLE.min(self.watch);
        let is_over = since >= self.watch;
        let wait_or = |fault, is_due| if is_due { Verdict::RollBack(fault) } else { Verdict::Watch };
        let sample = match seen {
            Ok(sample) => sample,
            Err(why) => return wait_or(Fault::Silent(shortened(why)), is_settled),
        };
        if self.pid.is_some_and(|pid| pid != sample.pid) {
            return Verdict::RollBack(Fault::Crashed);
        }
        if sample.program != self.wanted {
            return Verdict::RollBack(Fault::OtherProgram);
        }
        if let Some(fault) = Self::crowded(before, sample).or_else(|| Self::lossy(before, sample, since)) {
            return Verdict::RollBack(fault);
        }
        if let Some(fault) = Self::unable(before, &sample.status) {
            return wait_or(fault, is_settled);
        }
        match Self::deserted(before, &sample.status) {
            Some(fault) => wait_or(fault, since >= TUNNELS_WITHIN.min(self.watch)),
            None if is_over => Verdict::Keep,
            None => Verdict::Watch,
        }
    }

    fn crowded(before: &Before, sample: &Sample) -> Option<Fault> {
        let (before, resident) = (before.resident_kib?, sample.resident_kib?);
        let most = before.saturating_mul(MEMORY_FACTOR).saturating_add(MEMORY_MARGIN_KIB);
        (resident > most).then_some(Fault::Memory { before, resident })
    }

    fn lossy(before: &Before, sample: &Sample, since: Duration) -> Option<Fault> {
        let now = drops(&sample.status);
        // Counters are handed over. Those of an instance that was restarted begin at 0.
        let count = now.checked_sub(before.drops).unwrap_or(now);
        let seconds = since.as_secs();
        let as_before = before.drops_per_minute.saturating_mul(seconds + 1) / 60;
        let most = as_before.saturating_mul(DROPS_FACTOR).saturating_add(DROPS_MARGIN + DROPS_IN_A_SECOND * seconds);
        (count > most).then_some(Fault::Drops { count, seconds, before: before.drops_per_minute })
    }

    fn unable(before: &Before, status: &Status) -> Option<Fault> {
        let carries = match status.state {
            InstanceState::Running => true,
            // Without groups it carries less than with them.
            InstanceState::Provisional => before.state == InstanceState::Provisional,
            InstanceState::Waiting | InstanceState::Closed | InstanceState::Unknown => false,
        };
        if !carries {
            let why = status.closed.as_ref().or(status.last_error.as_ref());
            return Some(Fault::State(status.state, why.map(|why| shortened(why)).unwrap_or_default()));
        }
        let Some((not_before, not_after)) = validity(status) else { return Some(Fault::NoCertificate) };
        let is_older = before.certificate.is_some_and(|before| not_before < before.0 || not_after < before.1);
        is_older.then_some(Fault::OlderCertificate)
    }

    /// Tunnels may end for good reasons while an instance is watched: a peer is idle for long enough, or its pod ends.
    /// So a part may be missing, and of those that are missing the ones do not count that the instance called in vain,
    /// unless no tunnel is open at all: one that cannot send calls everybody in vain. Where there are as many as
    /// before, it does not matter with whom.
    fn deserted(before: &Before, status: &Status) -> Option<Fault> {
        let open = status.tunnels.len();
        if open >= before.open {
            return None;
        }
        let now: BTreeSet<String> = peers(status).collect();
        let lost = status.trouble.iter().filter(|_| open > 0).flat_map(|trouble| &trouble.lost_peers);
        let called: BTreeSet<&str> = lost.map(|lost| lost.peer.as_str()).collect();
        let missing =
            before.peers.iter().filter(|peer| !now.contains(*peer) && !called.contains(peer.as_str())).count();
        // A single tunnel is mostly that with a lighthouse, which an instance keeps open.
        let may_miss = if before.open < 2 { 0 } else { (before.peers.len() / TUNNELS_PART).max(1) };
        (missing > may_miss).then_some(Fault::Tunnels { before: before.open, open })
    }
}

fn validity(status: &Status) -> Option<(i64, i64)> {
    status.certificate.as_ref().map(|certificate| (certificate.not_before, certificate.not_after))
}

fn peers(status: &Status) -> impl Iterator<Item = String> {
    status.tunnels.iter().filter_map(|tunnel| tunnel.peer.first().cloned())
}

/// What an instance or a program says, short enough for an Event and for the file of the state.
pub(super) fn shortened(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}

/// A successor that takes over has what it needs from the start. This is for a busy node, where a look may come
/// between.
const SETTLE: Duration = Duration::from_secs(3);
/// An instance calls a peer again at once, and several times in this time. What is decided later would not be rolled
/// back within 10 s, because an instance that cannot hand over is waited for before it is replaced.
const TUNNELS_WITHIN: Duration = Duration::from_secs(5);
/// The share of the tunnels that may end: one of this many.
const TUNNELS_PART: usize = 4;
/// A leak grows without end, so a generous bound finds it as well; a new program may well need somewhat more.
const MEMORY_FACTOR: u64 = 4;
const MEMORY_MARGIN_KIB: u64 = 16 << 10;
/// Drops are normal: whoever scans the pod's ports causes them. The first ones after an upgrade are those of packets
/// that waited.
const DROPS_FACTOR: u64 = 4;
const DROPS_MARGIN: u64 = 100;
const DROPS_IN_A_SECOND: u64 = 20;
/// Together with as many upgrades at a time as are allowed, these bound the file of the state.
const MAX_PEERS: usize = 64;
const MAX_ADDRESS: usize = 64;
/// In characters.
pub(super) const MAX_TEXT: usize = 300;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::instance_status::{Certificate, LostPeer, Trouble, Tunnel};

    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    fn sample(open: usize) -> Sample {
        let tunnel = |n| Tunnel { peer: vec![format!("10.77.0.{n}")], ..Tunnel::default() };
        let status = Status {
            state: InstanceState::Running,
            certificate: Some(Certificate { not_before: 100, not_after: 200, ..Certificate::default() }),
            tunnels: (0..open).map(tunnel).collect(),
            counters: [("dropped_in_no_rule".to_owned(), 40), ("packets_in".to_owned(), 9_000)].into(),
            ..Status::default()
        };
        Sample { pid: 8, program: ProgramId::test(2), status, resident_kib: Some(3_000) }
    }

    fn before(open: usize) -> Before {
        Before::of(&Sample { pid: 7, program: ProgramId::test(1), ..sample(open) }, 0)
    }

    fn gate() -> Gate {
        Gate { wanted: ProgramId::test(2), pid: Some(8), watch: LONG }
    }

    fn at(seconds: u64, before: &Before, seen: &Sample) -> Verdict {
        gate().judge(before, Ok(seen), Duration::from_secs(seconds))
    }

    fn with(change: impl Fn(&mut Sample)) -> Sample {
        let mut seen = sample(4);
        change(&mut seen);
        seen
    }

    #[test]
    fn an_instance_that_goes_on_as_before_keeps_its_program_at_the_end_of_the_watch() {
        assert_eq!(at(0, &before(4), &sample(4)), Verdict::Watch);
        assert_eq!(at(9, &before(4), &sample(4)), Verdict::Watch);
        assert_eq!(at(10, &before(4), &sample(4)), Verdict::Keep);
        assert_eq!(at(10, &before(0), &sample(0)), Verdict::Keep, "a pod without peers");
        let short = Gate { watch: Duration::from_secs(2), ..gate() };
        assert_eq!(short.judge(&before(4), Ok(&sample(4)), Duration::from_secs(2)), Verdict::Keep);
    }

    #[test]
    fn what_cannot_get_better_is_decided_at_once() {
        for (change, fault) in [
            (&(|seen: &mut Sample| seen.pid = 9) as &dyn Fn(&mut Sample), Fault::Crashed),
            (&|seen| seen.program = ProgramId::test(1), Fault::OtherProgram),
            (&|seen| seen.resident_kib = Some(30_000), Fault::Memory { before: 3_000, resident: 30_000 }),
            (
                &|seen| seen.status.counters = [("dropped_out_no_route".into(), 540)].into(),
                Fault::Drops { count: 500, seconds: 1, before: 0 },
            ),
        ] {
            assert_eq!(at(1, &before(4), &with(change)), Verdict::RollBack(fault));
        }
        let unknown = Gate { pid: None, ..gate() };
        assert_eq!(unknown.judge(&before(4), Ok(&sample(4)), LONG), Verdict::Keep, "the agent was restarted");
    }

    #[test]
    fn silence_and_a_closed_path_are_given_a_moment_and_decided_well_within_ten_seconds() {
        let silent = |seconds| gate().judge(&before(4), Err("no answer"), Duration::from_secs(seconds));
        assert_eq!(silent(2), Verdict::Watch);
        assert_eq!(silent(3), Verdict::RollBack(Fault::Silent("no answer".into())));
        let older = Certificate { not_before: 99, not_after: 300, ..Certificate::default() };
        for (change, fault) in [
            (
                &(|seen: &mut Sample| seen.status.state = InstanceState::Waiting) as &dyn Fn(&mut Sample),
                Fault::State(InstanceState::Waiting, String::new()),
            ),
            (
                &|seen| (seen.status.state, seen.status.closed) = (InstanceState::Closed, Some("revoked".into())),
                Fault::State(InstanceState::Closed, "revoked".into()),
            ),
            (
                &|seen| seen.status.state = InstanceState::Provisional,
                Fault::State(InstanceState::Provisional, String::new()),
            ),
            (&|seen| seen.status.certificate = None, Fault::NoCertificate),
            (&|seen| seen.status.certificate = Some(older.clone()), Fault::OlderCertificate),
        ] {
            assert_eq!(at(2, &before(4), &with(change)), Verdict::Watch, "{fault}");
            assert_eq!(at(3, &before(4), &with(change)), Verdict::RollBack(fault));
        }
        let was = Before { state: InstanceState::Provisional, ..before(4) };
        let is = with(|seen| seen.status.state = InstanceState::Provisional);
        assert_eq!(at(10, &was, &is), Verdict::Keep);
    }

    #[test]
    fn a_short_watch_ends_with_a_decision() {
        let short = Gate { watch: Duration::from_secs(2), ..gate() };
        let judge = |seen: Result<&Sample, &str>| short.judge(&before(4), seen, Duration::from_secs(2));
        assert!(matches!(judge(Err("none")), Verdict::RollBack(Fault::Silent(_))));
        assert!(matches!(judge(Ok(&sample(1))), Verdict::RollBack(Fault::Tunnels { .. })));
        assert!(matches!(judge(Ok(&with(|seen| seen.status.certificate = None))), Verdict::RollBack(_)));
    }

    #[test]
    fn tunnels_must_come_back_but_for_some_and_for_those_whose_peers_are_gone() {
        let fault = |before, open| Verdict::RollBack(Fault::Tunnels { before, open });
        assert_eq!(at(4, &before(8), &sample(0)), Verdict::Watch, "they may still come");
        assert_eq!(at(5, &before(8), &sample(0)), fault(8, 0));
        assert_eq!(at(5, &before(8), &sample(5)), fault(8, 5));
        assert_eq!(at(10, &before(8), &sample(6)), Verdict::Keep, "two in eight may have ended");
        assert_eq!(at(10, &before(2), &sample(1)), Verdict::Keep);
        assert_eq!(at(10, &before(1), &sample(0)), fault(1, 0), "mostly that with the lighthouse");
        let called = |n| LostPeer { peer: format!("10.77.0.{n}"), ..LostPeer::default() };
        let mut seen = sample(4);
        seen.status.trouble = Some(Trouble { lost_peers: vec![called(5), called(6)], ..Trouble::default() });
        assert_eq!(at(10, &before(8), &seen), Verdict::Keep, "these peers are gone");
        let mut mute = sample(0);
        mute.status.trouble = Some(Trouble { lost_peers: (1..=8).map(called).collect(), ..Trouble::default() });
        assert_eq!(at(10, &before(8), &mute), fault(8, 0), "one that cannot send calls everybody in vain");
        let mut others = sample(8);
        others.status.tunnels.iter_mut().for_each(|tunnel| tunnel.peer = vec!["10.77.1.1".into()]);
        assert_eq!(at(10, &before(8), &others), Verdict::Keep, "as many as before, with others");
    }

    #[test]
    fn drops_are_compared_with_the_rate_before_and_with_counters_that_begin_at_zero() {
        let drops = |count| with(move |seen| seen.status.counters = [("dropped_in_no_rule".into(), count)].into());
        let busy = Before { drops: 10_000, drops_per_minute: 6_000, ..before(4) };
        assert_eq!(at(9, &busy, &drops(10_000 + 900)), Verdict::Watch, "as before");
        assert_eq!(at(9, &busy, &drops(10_000 + 3_900)), Verdict::Watch, "somewhat more");
        assert!(matches!(at(9, &busy, &drops(10_000 + 5_000)), Verdict::RollBack(Fault::Drops { count: 5_000, .. })));
        assert_eq!(at(9, &busy, &drops(900)), Verdict::Watch, "the counters began at 0");
        assert!(matches!(at(9, &busy, &drops(5_000)), Verdict::RollBack(Fault::Drops { .. })));
        assert_eq!(at(9, &before(4), &drops(40 + 250)), Verdict::Watch, "some are normal on any pod");
        let absurd = Before { drops_per_minute: u64::MAX, ..busy };
        assert_ne!(at(9, &absurd, &drops(u64::MAX)), Verdict::Keep, "no overflow");
    }

    #[test]
    fn what_is_remembered_is_bounded_whatever_an_instance_says() {
        let mut hostile = sample(1_000);
        hostile.status.tunnels.iter_mut().enumerate().for_each(|(n, tunnel)| tunnel.peer = vec![format!("{n:0>3}")]);
        hostile.status.tunnels[0].peer = vec!["x".repeat(1 << 20)];
        hostile.status.tunnels[1].peer.clear();
        hostile.status.counters = [("dropped_a".into(), u64::MAX), ("dropped_b".into(), 7)].into();
        let before = Before::of(&hostile, 0);
        assert!(before.is_valid() && before.peers.len() == MAX_PEERS && before.open == 1_000);
        assert_eq!(before.drops, u64::MAX);
        let long = Fault::State(InstanceState::Closed, shortened(&"é".repeat(10_000))).to_string();
        assert!(long.chars().count() < 400);
    }
}
