//! One measured step: criterion's statistics, and a table row with Go Nebula's figure for comparison.

use std::fs::{self, OpenOptions};
use std::hint::black_box;
use std::io::Write as _;
use std::time::Duration;

use criterion::BenchmarkGroup;
use criterion::measurement::WallTime;
use nix::time::{ClockId, clock_gettime};

use crate::heap;

/// Measurements of Go Nebula 1.11.0, made on another machine; see the README.
#[derive(Debug, Clone, Copy, Default)]
pub struct Go {
    /// Nanoseconds per operation.
    pub ns: Option<f64>,
    /// Bytes per operation.
    pub bytes: Option<f64>,
}

/// No measurement to compare with.
pub const NO_GO: Go = Go { ns: None, bytes: None };

/// One measured step. It reports the thread's CPU time to criterion, so that other load on the machine has little
/// influence.
#[derive(Debug)]
pub struct Step {
    title: String,
    go: Go,
    ns: Vec<f64>,
    bytes: f64,
}

impl Step {
    #[must_use]
    pub fn new(title: impl Into<String>, go: Go) -> Self {
        Self { title: title.into(), go, ns: Vec::new(), bytes: 0.0 }
    }

    /// Measures repeated calls of `operate`.
    pub fn repeat<T>(mut self, group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mut operate: impl FnMut() -> T) {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let (begun, asked) = (cpu_time(), heap::asked());
                for _ in 0..iterations {
                    black_box(operate());
                }
                self.sample(iterations, cpu_time().saturating_sub(begun), heap::asked() - asked)
            });
        });
        self.finish();
    }

    /// Measures repeated calls of `operate`, each with a new input from `prepare`. Preparing the input and dropping the
    /// result are not measured.
    pub fn with<I, T>(
        mut self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        name: &str,
        mut prepare: impl FnMut() -> I,
        mut operate: impl FnMut(I) -> T,
    ) {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let (mut spent, mut asked) = (Duration::ZERO, 0);
                let mut left = iterations;
                while left > 0 {
                    let batch = left.min(16);
                    let inputs: Vec<_> = (0..batch).map(|_| prepare()).collect();
                    let mut results = Vec::with_capacity(inputs.len());
                    let (begun, before) = (cpu_time(), heap::asked());
                    for input in inputs {
                        results.push(black_box(operate(input)));
                    }
                    spent += cpu_time().saturating_sub(begun);
                    asked += heap::asked() - before;
                    left -= batch;
                }
                self.sample(iterations, spent, asked)
            });
        });
        self.finish();
    }

    fn sample(&mut self, iterations: u64, spent: Duration, asked: usize) -> Duration {
        self.ns.push(spent.as_nanos() as f64 / iterations as f64);
        self.bytes = asked as f64 / iterations as f64;
        // Criterion treats a measurement of zero as a mistake.
        spent.max(Duration::from_nanos(1))
    }

    fn finish(mut self) {
        if crate::is_smoke_test() || self.ns.is_empty() {
            return;
        }
        self.ns.sort_by(f64::total_cmp);
        let ns = self.ns[self.ns.len() / 2];
        note(&self.title, Some(ns), Some(self.bytes), self.go);
    }
}

/// Prints a table row and appends it to the file that `benches/table` reads.
pub fn note(title: &str, ns: Option<f64>, bytes: Option<f64>, go: Go) {
    let number = |value: Option<f64>| match value {
        None => "-".to_owned(),
        Some(value) if value < 100.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.0}"),
    };
    let ratio = match (ns.zip(go.ns), bytes.zip(go.bytes)) {
        (Some((ours, go)), _) | (None, Some((ours, go))) => format!("{:.2}", go / ours),
        _ => "-".to_owned(),
    };
    let row = format!(
        "{title:<66} {:>9} {:>9} {:>9} {:>9} {ratio:>6}",
        number(ns),
        number(bytes),
        number(go.ns),
        number(go.bytes)
    );
    eprintln!("{row}");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/criterion");
    let kept = fs::create_dir_all(folder)
        .and_then(|()| OpenOptions::new().create(true).append(true).open(format!("{folder}/table")))
        .and_then(|mut file| writeln!(file, "{row}"));
    if let Err(error) = kept {
        eprintln!("the row is not kept: {error}");
    }
}

/// CPU time of this thread so far.
#[must_use]
pub fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}
