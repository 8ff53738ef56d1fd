//! Hosts join, leave, move, reload, are cut off and lied to at random; the invariants must hold.
//!
//! `RANDOM_OPERATIONS_SEEDS=100000` runs that many seeds, `RANDOM_OPERATIONS_SEED=42` one of them. A failure prints the
//! seed, the operations that are needed for it, and the packet flow.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nebula_core::simulator::{Exercise, Operation, Step};
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

const SEEDS: u64 = 2_000;
const OPERATIONS: usize = 64;

/// The operations of a seed.
fn operations(seed: u64) -> Vec<Operation> {
    let mut rng = ChaCha20Rng::seed_from_u64(seed);
    // Not the stream from which the network draws with the same seed.
    rng.set_stream(2);
    let exercise = Exercise::new(seed);
    let mut bytes = || [rng.next_u32() as u8, rng.next_u32() as u8];
    (0..OPERATIONS).map(|_| exercise.decode(bytes())).collect()
}

/// Time until the slowest pair could talk again, or what went wrong, with the diagram.
fn run(seed: u64, operations: &[Operation]) -> Result<Duration, String> {
    let mut exercise = Exercise::new(seed);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        operations.iter().try_for_each(|operation| exercise.apply(*operation))?;
        exercise.finish()
    }));
    let outcome = outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.unwrap_or_else(|| panic.downcast_ref::<&str>().copied().unwrap_or("a panic").to_owned()))
    });
    outcome.map_err(|error| format!("{error}\n{}", exercise.net().diagram()))
}

/// Shrinks a failing list of operations: drops ever smaller pieces as long as it still fails.
fn shrink(seed: u64, mut operations: Vec<Operation>) -> Vec<Operation> {
    let mut piece = operations.len() / 2;
    while piece > 0 {
        let mut at = 0;
        while at < operations.len() {
            let mut fewer = operations.clone();
            fewer.drain(at..(at + piece).min(fewer.len()));
            if run(seed, &fewer).is_err() {
                operations = fewer;
            } else {
                at += piece;
            }
        }
        piece /= 2;
    }
    operations
}

fn number_from(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text}")))
}

#[test]
fn the_invariants_hold_whatever_operations_are_applied() {
    let seeds = match number_from("RANDOM_OPERATIONS_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number_from("RANDOM_OPERATIONS_SEEDS").unwrap_or(SEEDS),
    };
    let (next, end) = (AtomicU64::new(seeds.start), seeds.end);
    let failed = Mutex::new(None);
    let longest = Mutex::new(Duration::ZERO);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while failed.lock().unwrap().is_none() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    match run(seed, &operations(seed)) {
                        Ok(took) => {
                            let mut longest = longest.lock().unwrap();
                            *longest = took.max(*longest);
                        }
                        Err(_) => *failed.lock().unwrap() = Some(seed),
                    }
                }
            });
        }
    });
    if let Some(seed) = failed.into_inner().unwrap() {
        let needed = shrink(seed, operations(seed));
        let error = run(seed, &needed).expect_err("it failed before");
        panic!("seed {seed}: {error}\nRANDOM_OPERATIONS_SEED={seed}, operations needed: {needed:#?}");
    }
    println!(
        "{} seeds; the slowest conversation came back after {:?}",
        end - seeds.start,
        longest.into_inner().unwrap()
    );
}

#[test]
fn a_seed_gives_the_same_datagrams_byte_for_byte() {
    let run = |seed| -> Vec<Step> {
        let mut exercise = Exercise::new(seed);
        operations(seed).into_iter().for_each(|operation| exercise.apply(operation).unwrap());
        exercise.finish().unwrap();
        exercise.net().flow().cloned().collect()
    };
    let first = run(4);
    assert!(first.len() > 500);
    assert!(first == run(4), "two runs of one seed differ");
    assert!(first != run(6));
    // With ML-KEM, whose randomness is the system's, all but the bytes.
    let shape = |seed| -> Vec<_> {
        let shape = |step: Step| (step.at, step.from, step.to, step.describe(), step.datagram.len());
        run(seed).into_iter().map(shape).collect()
    };
    assert!(shape(3) == shape(3), "two runs of one seed differ");
}
