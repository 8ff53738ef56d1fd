use std::cmp::Reverse;

use super::*;
use crate::wire::path_probe::PathProbe;

const SECOND: Duration = Duration::from_secs(1);

#[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
fn base() -> Instant {
    Instant::now()
}

fn at(n: u8) -> IpAddr {
    IpAddr::from([10, 42, 1, n])
}

const LIGHTHOUSE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 42, 0, 1));
const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 42, 0, 9));

/// Relays as they answer, and a choice that is run among them.
struct World {
    choice: RelayChoice,
    now: Instant,
    /// Round trip in milliseconds; `None`: it does not answer.
    answers: BTreeMap<IpAddr, Option<u64>>,
    tunnels: BTreeSet<IpAddr>,
    members: BTreeSet<IpAddr>,
    calls: Vec<IpAddr>,
    changes: usize,
    /// Numbers of the probes.
    numbers: Vec<u32>,
}

impl World {
    fn new(relays: &[(u8, u64)]) -> Self {
        let now = base();
        let mut choice = RelayChoice::new(now, OWN, 7);
        let all: Vec<_> = relays.iter().map(|(n, _)| at(*n)).collect();
        choice.offered(now, LIGHTHOUSE, &all);
        Self {
            choice,
            now,
            answers: relays.iter().map(|(n, round_trip)| (at(*n), Some(*round_trip))).collect(),
            tunnels: BTreeSet::new(),
            members: all.into_iter().collect(),
            calls: Vec::new(),
            changes: 0,
            numbers: Vec::new(),
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let (tunnels, members) = (&self.tunnels, &self.members);
            let standing = |relay: IpAddr| {
                tunnels.contains(&relay).then(|| Standing { is_direct: true, is_member: members.contains(&relay) })
            };
            let round = self.choice.round(self.now, standing);
            self.changes += usize::from(round.tell_at.is_some());
            let mut delayed = Vec::new();
            for relay in round.call {
                self.calls.push(relay);
                if self.answers.get(&relay).is_some_and(Option::is_some) {
                    self.tunnels.insert(relay);
                }
            }
            for relay in round.request {
                if self.answers.get(&relay).is_some_and(Option::is_some) {
                    self.choice.served(relay);
                }
            }
            for (relay, number) in round.probe {
                self.numbers.push(number);
                if let Some(Some(milliseconds)) = self.answers.get(&relay) {
                    delayed.push((relay, number, Duration::from_millis(*milliseconds)));
                }
            }
            for relay in round.release {
                self.tunnels.remove(&relay);
            }
            for (relay, number, round_trip) in delayed {
                assert!(self.choice.answered(self.now + round_trip, relay, number));
            }
            let next = round.next.unwrap_or(end);
            assert!(next > self.now, "a round that is due at once would never end");
            self.now = next.min(end);
        }
    }

    fn chosen(&self) -> Vec<IpAddr> {
        self.choice.advertised()
    }

    fn dies(&mut self, relay: IpAddr) {
        self.answers.insert(relay, None);
        self.tunnels.remove(&relay);
    }
}

#[test]
fn a_relay_cannot_tell_the_number_of_the_next_probe_from_those_before() {
    let mut world = World::new(&[(1, 20), (2, 20), (3, 20), (4, 20)]);
    world.run(600 * SECOND);
    let distances: BTreeSet<_> = world.numbers.windows(2).map(|two| two[1].wrapping_sub(two[0])).collect();
    assert!(world.numbers.len() > 40 && distances.len() == world.numbers.len() - 1, "{:?}", world.numbers);
    assert!(
        world.numbers.iter().all(|number| PathProbe::number(*number) == *number),
        "the mark tells them from those of path choice"
    );
}

#[test]
fn two_are_chosen_at_once_and_by_hash_while_none_is_better() {
    let mut world = World::new(&[(1, 20), (2, 20), (3, 20), (4, 20)]);
    world.run(10 * SECOND);
    let mut by_hash: Vec<_> = (1..=4).map(at).collect();
    by_hash.sort_by_key(|relay| Reverse(lot(OWN, *relay)));
    by_hash.truncate(2);
    by_hash.sort_unstable();
    assert_eq!(world.chosen(), by_hash);
    world.run(3600 * SECOND);
    assert_eq!(world.chosen(), by_hash);
    assert!(world.changes <= 2, "{}", world.changes);
}

#[test]
fn the_two_nearest_are_chosen_once_all_were_surveyed() {
    for nearest in [[1, 2], [3, 5], [2, 6]] {
        let relays: Vec<_> = (1..=6).map(|n| (n, if nearest.contains(&n) { 10 } else { 50 })).collect();
        let mut world = World::new(&relays);
        world.run(400 * SECOND);
        assert_eq!(world.chosen(), nearest.map(at));
    }
}

#[test]
fn a_slightly_nearer_relay_is_no_reason_to_change() {
    let mut world = World::new(&[(1, 50), (2, 50), (3, 50)]);
    world.run(300 * SECOND);
    let (chosen, changes) = (world.chosen(), world.changes);
    let left = (1..=3).map(at).find(|relay| !chosen.contains(relay)).unwrap();
    world.answers.insert(left, Some(45));
    world.run(7200 * SECOND);
    assert_eq!((world.chosen(), world.changes), (chosen, changes));
}

#[test]
fn when_both_end_two_others_take_their_place() {
    let mut world = World::new(&[(1, 20), (2, 20), (3, 20), (4, 20)]);
    world.run(300 * SECOND);
    let before = world.chosen();
    before.iter().for_each(|relay| world.dies(*relay));
    world.run(20 * SECOND);
    let after = world.chosen();
    assert!(after.len() == 2 && after.iter().all(|relay| !before.contains(relay)), "{after:?}");
}

#[test]
fn a_relay_that_never_answers_is_called_less_and_less_often() {
    let mut world = World::new(&[(1, 20)]);
    world.dies(at(1));
    world.run(3600 * SECOND);
    let first = world.calls.len();
    assert!((6..=12).contains(&first), "{first} calls in an hour");
    world.run(3600 * SECOND);
    assert!(world.calls.len() - first <= 6, "{} in the second hour", world.calls.len() - first);
    assert!(world.chosen().is_empty());
}

#[test]
fn offers_that_flap_change_nothing() {
    let mut world = World::new(&[(1, 20), (2, 20), (3, 20)]);
    world.run(200 * SECOND);
    let (chosen, calls, changes) = (world.chosen(), world.calls.len(), world.changes);
    for n in 0..360_u32 {
        let offer: Vec<_> = if n % 2 == 0 { Vec::new() } else { (1..=3).map(at).collect() };
        world.choice.offered(world.now, LIGHTHOUSE, &offer);
        world.run(10 * SECOND);
    }
    assert_eq!((world.chosen(), world.changes), (chosen, changes));
    assert!(world.calls.len() - calls <= 20, "{} calls", world.calls.len() - calls);
}

#[test]
fn a_lighthouse_cannot_fill_memory_or_replace_the_chosen_relays() {
    let mut world = World::new(&[(1, 20), (2, 20)]);
    world.run(20 * SECOND);
    let chosen = world.chosen();
    for n in 0..1000_u16 {
        let [high, low] = n.to_be_bytes();
        let offer: Vec<_> = (0..200).map(|m| IpAddr::from([10, 43 + high, low, m])).chain([OWN]).collect();
        world.choice.offered(world.now, LIGHTHOUSE, &offer);
        assert!(world.choice.relays.len() <= MAX_KNOWN);
    }
    assert!(!world.choice.knows(OWN));
    world.run(250 * SECOND);
    assert_eq!(world.chosen(), chosen);
    assert!(world.calls.len() <= 2 + 10, "{}", world.calls.len());
}

#[test]
fn a_relay_that_is_no_longer_offered_is_left_after_a_while() {
    let mut world = World::new(&[(1, 20), (2, 20), (3, 20)]);
    world.run(60 * SECOND);
    let left = world.chosen()[0];
    let others: Vec<_> = (1..=3).map(at).filter(|relay| *relay != left).collect();
    world.choice.offered(world.now, LIGHTHOUSE, &others);
    world.run(200 * SECOND);
    assert!(world.chosen().contains(&left));
    world.run(200 * SECOND);
    assert_eq!(world.chosen(), others);
    // Without a word from any lighthouse, everything stays.
    world.run(3600 * SECOND);
    assert_eq!(world.chosen(), others);
}

#[test]
fn who_loses_the_group_is_left() {
    let mut world = World::new(&[(1, 20), (2, 20), (3, 20)]);
    world.run(60 * SECOND);
    let left = world.chosen()[1];
    world.members.remove(&left);
    world.run(60 * SECOND);
    assert!(world.chosen().len() == 2 && !world.chosen().contains(&left));
    assert_eq!(world.choice.relays[&left].trouble, Some(RelayTrouble::NotMember));
}
