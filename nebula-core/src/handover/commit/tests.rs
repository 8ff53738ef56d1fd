//! Walks all interleavings of two processes, of which any may die at any point, and whose messages are lost, repeated
//! and overtaken.

use std::collections::{BTreeSet, HashSet, VecDeque};

use super::*;

/// Both processes, and everything that is on its way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    old: Process<Old>,
    new: Process<New>,
    to_new: BTreeSet<ToNew>,
    to_old: BTreeSet<ToOld>,
    /// The old process has stopped sealing.
    has_committed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Process<T> {
    machine: T,
    is_alive: bool,
    /// The other process knows that this one is dead.
    death_is_known: bool,
}

impl<T: Default> Default for Process<T> {
    fn default() -> Self {
        Self { machine: T::default(), is_alive: true, death_is_known: false }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    Offer,
    OldGets(ToOld),
    NewGets(ToNew),
    OldWaits,
    NewWaits,
    NewPrepares(bool),
    OldSeesDeath,
    NewSeesDeath,
    OldDies,
    NewDies,
    LosesToOld(ToOld),
    LosesToNew(ToNew),
}

impl World {
    fn new() -> Self {
        Self {
            old: Process::default(),
            new: Process::default(),
            to_new: BTreeSet::new(),
            to_old: BTreeSet::new(),
            has_committed: false,
        }
    }

    fn old_serves(&self) -> bool {
        self.old.is_alive && self.old.machine.serves()
    }

    fn new_serves(&self) -> bool {
        self.new.is_alive && self.new.machine.serves()
    }

    /// What can happen. Messages stay where they are when they arrive, so each may arrive again.
    fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        if self.old.is_alive {
            moves.extend(self.to_old.iter().map(|message| Move::OldGets(*message)));
            moves.push(Move::OldDies);
            if self.old.machine.number < OFFERS && self.old.machine.phase == OldPhase::Serving {
                moves.push(Move::Offer);
            }
            if self.old.machine.wait().is_some() {
                moves.push(Move::OldWaits);
            }
            if !self.new.is_alive && !self.new.death_is_known {
                moves.push(Move::OldSeesDeath);
            }
        }
        if self.new.is_alive {
            moves.extend(self.to_new.iter().map(|message| Move::NewGets(*message)));
            moves.push(Move::NewDies);
            if self.new.machine.wait().is_some() {
                moves.push(Move::NewWaits);
            }
            if matches!(self.new.machine.phase, NewPhase::Preparing(_)) {
                moves.extend([Move::NewPrepares(true), Move::NewPrepares(false)]);
            }
            if !self.old.is_alive && !self.old.death_is_known {
                moves.push(Move::NewSeesDeath);
            }
        }
        moves.extend(self.to_old.iter().map(|message| Move::LosesToOld(*message)));
        moves.extend(self.to_new.iter().map(|message| Move::LosesToNew(*message)));
        moves
    }

    fn after(mut self, what: Move) -> Self {
        let (old, new) = (&mut self.old, &mut self.new);
        match what {
            Move::Offer => {
                let step = old.machine.offer();
                self.follow_old(step);
            }
            Move::OldGets(message) => {
                let step = old.machine.handle(message);
                self.follow_old(step);
            }
            Move::OldWaits => {
                let step = old.machine.elapsed();
                self.follow_old(step);
            }
            Move::OldSeesDeath => {
                new.death_is_known = true;
                let step = old.machine.new_died();
                self.follow_old(step);
            }
            Move::NewGets(message) => {
                let step = new.machine.handle(message);
                self.follow_new(step);
            }
            Move::NewWaits => {
                let step = new.machine.elapsed();
                self.follow_new(step);
            }
            Move::NewPrepares(is_ready) => {
                let step = new.machine.prepared(is_ready);
                self.follow_new(step);
            }
            Move::NewSeesDeath => {
                old.death_is_known = true;
                let step = new.machine.old_died();
                self.follow_new(step);
            }
            Move::OldDies => old.is_alive = false,
            Move::NewDies => new.is_alive = false,
            Move::LosesToOld(message) => drop(self.to_old.remove(&message)),
            Move::LosesToNew(message) => drop(self.to_new.remove(&message)),
        }
        self
    }

    fn follow_old(&mut self, step: OldStep) {
        match step {
            OldStep::Nothing => {}
            OldStep::Send(message) => drop(self.to_new.insert(message)),
            OldStep::HandOver(message) => {
                assert!(!self.has_committed, "it commits once");
                self.has_committed = true;
                self.to_new.insert(message);
            }
            OldStep::End => self.old.is_alive = false,
        }
    }

    fn follow_new(&mut self, step: NewStep) {
        match step {
            NewStep::Nothing | NewStep::Prepare | NewStep::Succeed => {}
            NewStep::Send(message) => drop(self.to_old.insert(message)),
            NewStep::TakeOver(message) => {
                assert!(self.has_committed, "there is a state to take over");
                self.to_old.insert(message);
            }
            NewStep::End => self.new.is_alive = false,
        }
        if self.new.machine.phase == NewPhase::Ended {
            self.new.is_alive = false;
        }
    }

    /// The processes alone, if from now on nobody dies, nothing gets lost, and every message arrives once.
    fn settled(mut self) -> Self {
        for _ in 0..100 {
            let before = self.clone();
            for what in [Move::OldSeesDeath, Move::NewSeesDeath, Move::NewPrepares(true)] {
                if self.moves().contains(&what) {
                    self = self.after(what);
                }
            }
            for message in std::mem::take(&mut self.to_old) {
                if self.old.is_alive {
                    self = self.after(Move::OldGets(message));
                }
            }
            for message in std::mem::take(&mut self.to_new) {
                if self.new.is_alive {
                    self = self.after(Move::NewGets(message));
                }
            }
            // Time passes only when nothing else happens.
            if self == before {
                for what in [Move::OldWaits, Move::NewWaits] {
                    if self.moves().contains(&what) {
                        self = self.after(what);
                    }
                }
            }
            if self == before {
                break;
            }
        }
        self
    }
}

/// Every world that can come about.
fn all_worlds() -> Vec<(World, Option<usize>, Option<Move>)> {
    let mut known = HashSet::from([World::new()]);
    let mut worlds = vec![(World::new(), None, None)];
    let mut queue = VecDeque::from([0]);
    while let Some(at) = queue.pop_front() {
        let world: World = worlds[at].0.clone();
        for what in world.moves() {
            let next = world.clone().after(what);
            if known.insert(next.clone()) {
                queue.push_back(worlds.len());
                worlds.push((next, Some(at), Some(what)));
            }
        }
    }
    worlds
}

/// How a world came about.
fn story(worlds: &[(World, Option<usize>, Option<Move>)], mut at: usize) -> Vec<Move> {
    let mut moves = Vec::new();
    while let (_, Some(before), Some(what)) = &worlds[at] {
        moves.push(*what);
        at = *before;
    }
    moves.reverse();
    moves
}

#[test]
fn never_do_both_seal_and_the_one_that_committed_seals_no_more() {
    let worlds = all_worlds();
    assert!(worlds.len() > 1000, "{} worlds", worlds.len());
    for (at, (world, ..)) in worlds.iter().enumerate() {
        assert!(!(world.old_serves() && world.new_serves()), "{:?}\n{world:?}", story(&worlds, at));
        assert!(!(world.old_serves() && world.has_committed), "{:?}\n{world:?}", story(&worlds, at));
    }
    // None of these worlds is missing.
    assert!(worlds.iter().any(|(world, ..)| world.new_serves() && world.has_committed && !world.old.is_alive));
    assert!(worlds.iter().any(|(world, ..)| world.new_serves() && !world.has_committed));
    assert!(worlds.iter().any(|(world, ..)| world.old_serves() && !world.new.is_alive));
}

#[test]
fn whatever_happened_one_of_the_two_serves_in_the_end_unless_its_process_died() {
    let worlds = all_worlds();
    for (at, (world, ..)) in worlds.iter().enumerate() {
        let end = world.clone().settled();
        // Before the commit the old process is the one that has to serve, and after it the new one. Where the old
        // one died, a new one that is left takes its place.
        let may_be_dead = if end.has_committed { !end.new.is_alive } else { !end.old.is_alive && !end.new.is_alive };
        assert!(
            end.old_serves() || end.new_serves() || may_be_dead,
            "{:?}\n{world:?}\nends as {end:?}",
            story(&worlds, at)
        );
        // A new process dies only by `NewDies`, or because it refused or was told that the old one goes on.
        let was_killed = story(&worlds, at).contains(&Move::NewDies);
        assert!(!end.has_committed || end.new_serves() || was_killed, "{:?}\n{end:?}", story(&worlds, at));
    }
}

#[test]
fn if_nothing_goes_wrong_the_new_process_serves_and_the_old_one_has_ended() {
    let end = World::new().after(Move::Offer).settled();
    assert!(end.new_serves() && end.has_committed && !end.old.is_alive);
}

#[test]
fn a_refusal_a_hang_and_a_crash_before_the_commit_leave_the_old_process_as_it_was() {
    let asked = World::new().after(Move::Offer).after(Move::NewGets(ToNew::Offer(1)));
    let refused = asked.clone().after(Move::NewPrepares(false)).after(Move::OldGets(ToOld::Refuse(1)));
    let hung = asked.clone().after(Move::OldWaits);
    let crashed = asked.after(Move::NewDies).after(Move::OldSeesDeath);
    for world in [refused, hung, crashed] {
        assert!(world.old_serves() && !world.has_committed);
        assert_eq!(world.old.machine.phase, OldPhase::Serving);
        assert_eq!(world.old.machine.wait(), None);
        assert_eq!(world.clone().old.machine.offer(), OldStep::Send(ToNew::Offer(2)), "it may offer again");
    }
}

/// A first offer that fails, and one more.
const OFFERS: u64 = 2;
