//! Runs a plan: lanes as threads, results in the order in which things end.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use crate::plan::{Lane, Task, Turn};

/// How a part or a job ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) is_ok: bool,
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) cpu: Duration,
}

#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) wall: Duration,
    pub(crate) place: Place,
    /// Of a group.
    pub(crate) inner: Vec<Self>,
}

/// Where something runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Main,
    Beside,
    /// Beside, at the lowest priority.
    Idle,
}

/// Runs a part or a job.
pub(crate) type Runner<'a> = dyn Fn(&Task, Place) -> Outcome + Sync + 'a;

/// Runs all turns. Nothing new starts once `is_over`.
pub(crate) fn execute(turns: &[Turn], run: &Runner<'_>, is_over: &(dyn Fn() -> bool + Sync)) -> Vec<Finished> {
    let finished = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let mut beside = Vec::new();
        for turn in turns {
            if is_over() {
                break;
            }
            match turn {
                Turn::Run(task) => finish(&finished, run_one(task, Place::Main, run)),
                Turn::Start(lanes) => {
                    beside.extend(lanes.iter().map(|lane| start(scope, lane, run, is_over, &finished)));
                }
                Turn::Wait => wait(&mut beside),
                Turn::Group(name, turns) => finish(&finished, run_group(name, turns, run, is_over)),
            }
        }
        wait(&mut beside);
    });
    finished.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    lane: &'scope Lane,
    run: &'scope Runner<'_>,
    is_over: &'scope (dyn Fn() -> bool + Sync),
    finished: &'scope Mutex<Vec<Finished>>,
) -> ScopedJoinHandle<'scope, ()> {
    let place = if lane.is_idle { Place::Idle } else { Place::Beside };
    scope.spawn(move || {
        for task in &lane.tasks {
            if !is_over() {
                finish(finished, run_one(task, place, run));
            }
        }
    })
}

fn wait(beside: &mut Vec<ScopedJoinHandle<'_, ()>>) {
    for lane in beside.drain(..) {
        if let Err(panic) = lane.join() {
            std::panic::resume_unwind(panic);
        }
    }
}

fn run_one(task: &Task, place: Place, run: &Runner<'_>) -> Finished {
    let begun = Instant::now();
    let outcome = run(task, place);
    Finished { name: task.name().to_owned(), outcome, wall: begun.elapsed(), place, inner: Vec::new() }
}

fn run_group(name: &str, turns: &[Turn], run: &Runner<'_>, is_over: &(dyn Fn() -> bool + Sync)) -> Finished {
    let begun = Instant::now();
    let inner = execute(turns, run, is_over);
    let mut outcome = Outcome { is_ok: true, ..Outcome::default() };
    for part in inner.iter().filter(|part| part.place != Place::Idle) {
        outcome.is_ok &= part.outcome.is_ok;
        outcome.passed += part.outcome.passed;
        outcome.failed += part.outcome.failed;
        outcome.cpu += part.outcome.cpu;
    }
    Finished { name: name.to_owned(), outcome, wall: begun.elapsed(), place: Place::Main, inner }
}

fn finish(finished: &Mutex<Vec<Finished>>, one: Finished) {
    lock(finished).push(one);
}

/// A lock whose owner panicked holds what it held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    const OK: Outcome = Outcome { is_ok: true, passed: 1, failed: 0, cpu: Duration::from_secs(2) };

    fn run(name: &str) -> Turn {
        Turn::Run(Task::Part(name.to_owned()))
    }

    fn lane(names: &[&str], is_idle: bool) -> Lane {
        Lane { tasks: names.iter().map(|name| Task::Part((*name).to_owned())).collect(), is_idle }
    }

    fn names(finished: &[Finished]) -> Vec<&str> {
        finished.iter().map(|one| one.name.as_str()).collect()
    }

    #[test]
    fn a_lane_runs_beside_the_rest_and_what_waits_starts_after_it() {
        let turns = [
            run("first"),
            Turn::Start(vec![lane(&["lane", "lane's next"], false)]),
            run("main"),
            Turn::Wait,
            run("load"),
        ];
        // The lane's first one goes on until the main one is over, and that until the lane has begun: only beside
        // each other they end.
        let (begin, begun) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let (begun, ended) = (Mutex::new(begun), Mutex::new(ended));
        let log = Mutex::new(Vec::new());
        let finished = execute(
            &turns,
            &|task, place| {
                let name = task.name();
                match name {
                    "lane" => {
                        begin.send(()).unwrap();
                        lock(&ended).recv().unwrap();
                        assert_eq!(place, Place::Beside);
                    }
                    "main" => {
                        lock(&begun).recv().unwrap();
                        end.send(()).unwrap();
                    }
                    "load" => assert_eq!(lock(&log).len(), 4, "what runs beside is over"),
                    _ => {}
                }
                lock(&log).push(name.to_owned());
                OK
            },
            &|| false,
        );
        assert_eq!(names(&finished)[0], "first");
        assert_eq!(names(&finished)[4], "load");
        let log = lock(&log);
        let place = |name: &str| log.iter().position(|one| one == name);
        assert!(place("lane") < place("lane's next"));
    }

    #[test]
    fn one_that_fails_stops_no_other() {
        let turns = [run("a"), run("b"), Turn::Start(vec![lane(&["c", "d"], false)]), Turn::Wait, run("e")];
        let finished =
            execute(&turns, &|task, _| Outcome { is_ok: !["a", "c"].contains(&task.name()), ..OK }, &|| false);
        let results: Vec<_> = finished.iter().map(|one| (one.name.as_str(), one.outcome.is_ok)).collect();
        assert_eq!(results, [("a", false), ("b", true), ("c", false), ("d", true), ("e", true)]);
    }

    #[test]
    fn a_group_has_the_sum_of_its_parts_without_those_at_the_lowest_priority() {
        let inner =
            vec![run("unit"), Turn::Start(vec![lane(&["cni"], false), lane(&["fuzz"], true)]), run("soak"), Turn::Wait];
        let turns = [Turn::Group("test".to_owned(), inner)];
        let outcome = |failing: &'static str| {
            let finished = execute(
                &turns,
                &|task, _| {
                    if task.name() == failing { Outcome { is_ok: false, passed: 0, failed: 3, ..OK } } else { OK }
                },
                &|| false,
            );
            assert_eq!((names(&finished).as_slice(), finished[0].inner.len()), (&["test"][..], 4));
            finished[0].outcome
        };
        assert_eq!(outcome("none"), Outcome { passed: 3, cpu: Duration::from_secs(6), ..OK });
        assert_eq!(outcome("fuzz"), outcome("none"));
        assert_eq!(outcome("cni"), Outcome { is_ok: false, passed: 2, failed: 3, cpu: Duration::from_secs(6) });
    }

    #[test]
    fn nothing_starts_after_an_interruption() {
        let turns = [Turn::Start(vec![lane(&["a", "b"], false)]), Turn::Wait, run("c")];
        let is_over = AtomicBool::new(false);
        let finished = execute(
            &turns,
            &|_, _| {
                is_over.store(true, Ordering::SeqCst);
                OK
            },
            &|| is_over.load(Ordering::SeqCst),
        );
        assert_eq!(names(&finished), ["a"]);
    }
}
