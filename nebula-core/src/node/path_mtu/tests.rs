//! The search on paths that carry a given size, and lose some of everything else, too.

use proptest::prelude::*;

use super::ladder::MAX_PROBE;
use super::*;

#[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
fn base() -> Instant {
    Instant::now()
}

/// A path, and the search on it.
struct Path {
    search: Search,
    now: Instant,
    due: Option<Instant>,
    /// Answers on their way, in order of arrival.
    answers: Vec<(Instant, SizeProbe)>,
    mtu: u16,
    /// What the peer's answers show.
    proof: Proof,
    round_trip: Duration,
    /// Every n-th probe is lost; 0: none.
    loses: usize,
    sent: u64,
    /// Packets of the peer.
    received: u64,
    /// Whether it answers each packet.
    is_answered: bool,
    /// What was sent by the last traffic check.
    looked: u64,
    probes: usize,
    /// Those that are larger than any packet of the device.
    jumbos: usize,
}

const TUN: u16 = 1300;
const OVERHEAD: u16 = 60;

impl Path {
    /// A path that carries IP packets of `mtu` bytes.
    fn new(mtu: u16, round_trip: Duration) -> Self {
        let now = base();
        Self {
            search: Search::new(now, round_trip),
            now,
            due: None,
            answers: Vec::new(),
            mtu: mtu - OVERHEAD,
            proof: Proof::Intact,
            round_trip,
            loses: 0,
            sent: 3,
            received: 3,
            is_answered: true,
            looked: 3,
            probes: 0,
            jumbos: 0,
        }
    }

    fn begin(mut self, tun: u16) -> Self {
        let step = self.search.begin(self.now, self.sent, tun, OVERHEAD);
        self.take(step);
        self
    }

    fn take(&mut self, step: Step) {
        self.due = step.next;
        for probe in step.probes {
            self.probes += 1;
            self.jumbos += usize::from(probe.size > TUN);
            let is_lost = self.loses > 0 && self.probes.is_multiple_of(self.loses);
            if probe.size <= self.mtu && !is_lost {
                self.answers.push((self.now + self.round_trip, probe));
            }
        }
    }

    /// Lets time pass, with `rate` datagrams a second.
    fn run(&mut self, time: Duration, rate: u64) {
        let (start, end, before) = (self.now, self.now + time, self.sent);
        loop {
            let answer = self.answers.first().map(|(at, _)| *at);
            let Some(next) = [answer, self.due].into_iter().flatten().min().filter(|next| *next <= end) else { break };
            self.now = self.now.max(next);
            self.pass(before + rate * self.now.duration_since(start).as_secs());
            if answer == Some(next) {
                let (_, probe) = self.answers.remove(0);
                if let Some(step) = self.search.answered(self.now, self.sent, probe, self.proof) {
                    self.take(step);
                }
            } else {
                self.advance();
            }
        }
        self.now = end;
        self.pass(before + rate * time.as_secs());
    }

    /// The tunnel sent so many packets so far.
    fn pass(&mut self, sent: u64) {
        let passed = sent - self.sent;
        self.received += if self.is_answered { passed } else { 0 };
        self.sent = sent;
    }

    fn carried(&self) -> Carried {
        Carried { sent: self.sent, received: self.received }
    }

    fn advance(&mut self) {
        let step = self.search.due(self.now, self.carried(), self.sent > self.looked);
        self.take(step);
    }

    /// Like the traffic check of a tunnel.
    fn look(&mut self) {
        self.looked = self.sent;
        if self.search.look(self.now, self.carried()) {
            self.advance();
        }
    }

    /// The whole IP packet on the underlay that the limit stands for.
    fn limit(&self) -> Option<u16> {
        self.search.limit.map(|limit| limit + OVERHEAD)
    }
}

const FAST: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

#[test]
fn one_probe_after_the_question_is_enough_on_a_path_that_carries_everything_and_an_idle_tunnel_sends_no_more() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    path.run(3600 * SECOND, 0);
    assert_eq!((path.limit(), path.search.known(), path.probes, path.due), (None, Some(TUN), 2, None));
}

#[test]
fn a_black_hole_is_found_within_half_a_second_whatever_it_carries() {
    for (mtu, tun) in [(1200, TUN), (1280, TUN), (1200, 1440), (1280, 1440), (1420, 1440), (1500, 8900), (9000, 9100)] {
        for round_trip in [FAST, 30 * FAST] {
            let mut path = Path::new(mtu, round_trip).begin(tun);
            path.run(SECOND / 2, 1000);
            let limit = path.limit().expect("a limit");
            assert!(limit <= mtu && limit >= mtu.min(9000) - PRECISION, "{limit} of {mtu}");
        }
    }
}

#[test]
fn a_limit_between_the_rungs_becomes_exact_soon() {
    for mtu in [1111, 1337, 1415, 2900, 7000] {
        let mut path = Path::new(mtu, FAST).begin(8900);
        path.run(3 * SECOND, 1000);
        let limit = path.limit().expect("a limit");
        assert!((mtu - PRECISION..=mtu).contains(&limit), "{limit} of {mtu}");
    }
}

#[test]
fn a_peer_that_answers_nothing_sets_no_limit() {
    let mut path = Path::new(500, FAST).begin(TUN);
    path.run(60 * SECOND, 1000);
    assert_eq!((path.limit(), path.search.known()), (None, None));
    assert!(path.probes < 20, "{}", path.probes);
}

#[test]
fn a_path_that_shrinks_is_noticed_within_three_seconds_of_traffic_and_one_that_grows_within_a_minute() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    path.run(20 * SECOND, 1000);
    path.mtu = 1200 - OVERHEAD;
    path.run(3 * SECOND, 1000);
    assert_eq!(path.limit(), Some(1200));
    path.mtu = 1500 - OVERHEAD;
    for _ in 0..12 {
        path.run(5 * SECOND, 2);
        path.look();
    }
    path.run(SECOND, 2);
    assert_eq!(path.limit(), None);
}

#[test]
fn a_limit_costs_an_idle_tunnel_nothing_and_a_quiet_one_four_probes_a_minute() {
    let mut path = Path::new(1200, FAST).begin(TUN);
    path.run(5 * SECOND, 0);
    let before = path.probes;
    for _ in 0..60 {
        path.run(5 * SECOND, 0);
        path.look();
    }
    assert_eq!(path.probes, before, "idle for five minutes");
    for _ in 0..60 {
        path.run(5 * SECOND, 2);
        path.look();
    }
    assert!((16..=20).contains(&(path.probes - before)), "{} in five minutes", path.probes - before);
}

#[test]
fn a_connection_that_stalls_has_the_path_checked_once() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    path.run(5 * SECOND, 100);
    path.look();
    path.mtu = 1200 - OVERHEAD;
    path.run(5 * SECOND, 1);
    path.look();
    path.run(SECOND, 0);
    assert_eq!(path.limit(), Some(1200));
    let before = path.probes;
    for _ in 0..4 {
        path.run(5 * SECOND, 1);
        path.look();
    }
    assert!(path.probes <= before + 2, "the new limit is doubted twice; after that it is any other quiet tunnel");
}

#[test]
fn packets_without_an_answer_have_the_path_checked_within_three_seconds_however_few_they_are() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    for _ in 0..4 {
        path.run(5 * SECOND, 2);
        path.look();
    }
    (path.mtu, path.is_answered) = (1200 - OVERHEAD, false);
    path.run(3 * SECOND + SECOND / 2, 1);
    assert_eq!(path.limit(), Some(1200));
}

#[test]
fn a_stalled_connection_is_found_in_fifteen_seconds_where_other_packets_are_answered() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    for _ in 0..4 {
        path.run(5 * SECOND, 2);
        path.look();
    }
    path.mtu = 1200 - OVERHEAD;
    for _ in 0..3 {
        path.run(5 * SECOND, 2);
        path.look();
    }
    path.run(SECOND, 2);
    assert_eq!(path.limit(), Some(1200));
}

#[test]
fn a_stalled_connection_is_found_in_six_seconds_beside_five_packets_a_second_that_are_answered() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    for _ in 0..4 {
        path.run(5 * SECOND, 5);
        path.look();
    }
    path.mtu = 1200 - OVERHEAD;
    path.run(5 * SECOND, 5);
    path.look();
    path.run(SECOND, 5);
    assert_eq!(path.limit(), Some(1200));
}

#[test]
fn traffic_that_is_never_answered_has_few_probes() {
    let mut path = Path { is_answered: false, ..Path::new(1500, FAST) }.begin(TUN);
    let before = path.probes;
    for _ in 0..720 {
        path.run(5 * SECOND, 1);
        path.look();
    }
    let probes = path.probes - before;
    assert!(probes <= 3600 / 15 + 10, "{probes} for 3600 packets in an hour");
    assert_eq!(path.limit(), None);
}

#[test]
fn traffic_in_bursts_has_few_probes() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    let (probes, sent) = (path.probes, path.sent);
    for _ in 0..60 {
        for rate in [200, 1] {
            path.run(5 * SECOND, rate);
            path.look();
        }
    }
    let (probes, sent) = (path.probes - probes, path.sent - sent);
    assert!(probes as u64 <= sent / 300 + 2, "{probes} of {sent}");
}

#[test]
fn probes_are_less_than_a_hundredth_of_the_traffic() {
    for (mtu, rate) in [(1500, 100), (1200, 100), (1200, 10_000)] {
        let mut path = Path::new(mtu, FAST).begin(TUN);
        path.run(2 * SECOND, rate);
        let (probes, sent) = (path.probes, path.sent);
        for _ in 0..60 {
            path.run(5 * SECOND, rate);
            path.look();
        }
        let (probes, sent) = (path.probes - probes, path.sent - sent);
        // The rest are the attempts to send more where there is a limit.
        assert!(probes as u64 * 400 <= sent + 10_000, "{probes} of {sent}");
        assert!(probes > 5, "the path is still looked after");
    }
}

#[test]
fn an_answer_that_comes_late_lifts_the_limit_at_once() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    path.run(FAST, 0);
    let (_, late) = path.answers.remove(0);
    path.mtu = 1200 - OVERHEAD;
    path.run(SECOND, 0);
    assert_eq!(path.limit(), Some(1200));
    path.search.answered(path.now, path.sent, late, Proof::Intact);
    assert_eq!(path.limit(), None);
}

#[test]
fn answers_by_an_earlier_path_and_invented_ones_say_nothing() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    path.run(FAST, 0);
    let (_, old) = path.answers.remove(0);
    let mut path = Path { mtu: 1200 - OVERHEAD, ..path }.begin(TUN);
    for probe in [old, SizeProbe { number: 99, ..old }, SizeProbe { number: 1, size: 9000, ..old }] {
        assert_eq!(path.search.answered(path.now, path.sent, probe, Proof::Intact), None);
    }
    path.run(SECOND, 0);
    assert_eq!(path.limit(), Some(1200));
}

/// Go Nebula before 1.11 panics at longer ones.
#[test]
fn a_peer_that_does_not_return_the_question_is_sent_no_longer_probe() {
    let mut path = Path::new(1500, FAST).begin(TUN);
    for seconds in 0..600 {
        for (_, probe) in std::mem::take(&mut path.answers) {
            assert_eq!(probe.size, SHORT);
            // It answers something else, or a relay returns what may come from any release.
            let step = match seconds % 2 {
                0 => path.search.refused(path.now, path.sent),
                _ => path.search.answered(path.now, path.sent, probe, Proof::None),
            };
            path.take(step.expect("the question is answered"));
            assert_eq!(path.search.state(), PathState::Open, "nothing waits for it any longer");
        }
        path.run(SECOND, 10);
        path.look();
    }
    assert!((2..=21).contains(&path.probes), "{}", path.probes);
    assert_eq!(path.search.known(), None);
}

/// A busy path to a peer that runs this program.
fn busy(mtu: u16, tun: u16) -> Path {
    let mut path = Path { proof: Proof::SameProgram, ..Path::new(mtu, FAST) }.begin(tun);
    for _ in 0..10 {
        path.run(SECOND, 5000);
        path.look();
    }
    path
}

#[test]
fn a_busy_path_to_the_same_program_is_tried_with_jumbo_frames() {
    for (mtu, joined) in [(9000, 8940), (65_535, 8940), (8000, 3940), (4000, 3940)] {
        assert_eq!(busy(mtu, TUN).search.state(), PathState::Joined(joined), "{mtu}");
    }
    for (mtu, tun) in [(1500, TUN), (3900, TUN), (9000, 8900), (65_535, 60_000)] {
        let path = busy(mtu, tun);
        assert!(!matches!(path.search.state(), PathState::Joined(_)), "{mtu} {tun}");
    }
}

#[test]
fn no_jumbo_frame_is_tried_without_traffic_or_with_other_programs() {
    let mut idle = Path { proof: Proof::SameProgram, ..Path::new(9000, FAST) }.begin(TUN);
    let mut other = Path::new(9000, FAST).begin(TUN);
    for _ in 0..600 {
        idle.run(SECOND, 1);
        idle.look();
        other.run(SECOND, 5000);
        other.look();
    }
    for path in [&idle, &other] {
        assert_eq!((path.search.state(), path.search.known()), (PathState::Open, Some(TUN)));
    }
}

#[test]
fn a_new_tunnel_by_a_path_with_jumbo_frames_asks_its_peer_and_uses_them_again_within_three_seconds() {
    for (proof, state) in [
        (Proof::SameProgram, PathState::Joined(8940)),
        (Proof::Intact, PathState::Open),
        (Proof::None, PathState::Open),
    ] {
        let older = busy(9000, TUN);
        let mut path = Path { proof, ..Path::new(9000, FAST) };
        path.search.inherit(path.now, path.sent, &older.search);
        assert_eq!((path.search.state(), path.search.known()), (PathState::Open, Some(TUN)));
        for _ in 0..3 {
            path.run(SECOND, 5000);
            path.look();
        }
        path.run(FAST * 10, 100);
        assert_eq!(path.search.state(), state, "{proof:?}");
    }
}

#[test]
fn a_path_without_jumbo_frames_costs_four_probes_in_five_minutes() {
    let mut path = busy(1500, TUN);
    assert_eq!(path.jumbos, 4, "two sizes, twice each");
    for (seconds, expected) in [(280, 4), (30, 8), (280, 8)] {
        for _ in 0..seconds {
            path.run(SECOND, 5000);
            path.look();
        }
        assert_eq!(path.jumbos, expected);
    }
    assert!(path.search.state() == PathState::Open && path.search.known() == Some(TUN));
}

#[test]
fn a_path_that_loses_its_jumbo_frames_is_open_again_within_four_seconds_and_sets_no_limit() {
    let mut path = busy(9000, TUN);
    assert_eq!(path.search.state(), PathState::Joined(8940));
    path.mtu = 1500 - OVERHEAD;
    for _ in 0..4 {
        path.run(SECOND, 5000);
        path.look();
    }
    assert_eq!((path.search.state(), path.search.limit), (PathState::Open, None));
    path.mtu = 1200 - OVERHEAD;
    for _ in 0..4 {
        path.run(SECOND, 5000);
        path.look();
    }
    assert_eq!(path.search.state(), PathState::Limited(1140));
    path.mtu = 9000 - OVERHEAD;
    for _ in 0..700 {
        path.run(SECOND, 5000);
        path.look();
    }
    assert_eq!(path.search.state(), PathState::Joined(8940));
}

#[test]
fn a_device_with_a_small_mtu_needs_no_probes() {
    let path = Path::new(1500, FAST).begin(900);
    assert_eq!((path.probes, path.due, path.limit()), (0, None, None));
}

proptest! {
    #[test]
    fn a_lossy_path_ends_up_right_and_never_too_large(
        mtu in 1000_u16..9200, tun in 1000_u16..9100, loses in 3_usize..10, millis in 1_u32..300,
    ) {
        let mut path = Path { loses, ..Path::new(mtu, FAST * millis) }.begin(tun);
        for _ in 0..60 {
            path.run(5 * SECOND, 500);
            path.look();
        }
        let top = tun.min(MAX_PROBE - OVERHEAD);
        let best = top.min(mtu - OVERHEAD);
        let known = path.search.known();
        prop_assert!(known.is_none_or(|known| known <= best), "{known:?} of {best}");
        let enough = |known: u16| u32::from(known) * 6 / 5 >= u32::from(best);
        prop_assert!(path.search.limit.is_none_or(enough), "{known:?} of {best}");
        prop_assert!(path.search.limit.is_some() || best == top, "{best}");
    }
}
