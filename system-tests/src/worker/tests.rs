use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;

use super::*;

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A worker for a table of parts whose steps are functions of the real parts.sh or programs of the machine.
fn worker(steps: &str, depth: Depth) -> (Worker, Shared) {
    let table = format!(
        "[cargo]\nfeatures = [\"--workspace\"]\nbinaries = [\"programs\"]\n[schedule]\nlanes_after = \"a\"\n[part.a]\nabout = \"x\"\n{steps}\n"
    );
    let parts = Parts::read(&table).unwrap();
    let printed = Shared::default();
    let processes = Arc::new(Processes::default());
    let worker = Worker {
        root: "/r".into(),
        depth,
        asked: vec!["a".to_owned()],
        output: Arc::new(Output::new(printed.clone())),
        release: Release::new(vec![], Arc::clone(&processes)),
        binaries: TestBinaries::with(vec![]),
        failures: Mutex::default(),
        processes,
        parts,
    };
    (worker, printed)
}

fn text(printed: &Shared) -> String {
    String::from_utf8(lock(&printed.0).clone()).unwrap()
}

/// A program in the place of a test binary, which prints this.
fn with_binary(worker: Worker, script: &str) -> (Worker, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("programs-1");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let binary = TestBinary { name: "programs".to_owned(), folder: folder.path().to_owned(), path };
    (Worker { binaries: TestBinaries::with(vec![binary]), ..worker }, folder)
}

fn run(worker: &Worker, place: Place) -> Outcome {
    worker.run_part(worker.parts.get("a").unwrap(), place)
}

const TWO: &str = "steps = [{ tests = \"programs\", only = [\"x\"] }, { tests = \"programs\", only = [\"y::z\"] }]";
const PASSED: &str = "echo \"$PWD $*\"; echo 'test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured'";

#[test]
fn a_part_runs_its_steps_in_the_folder_of_the_tests_and_counts_them() {
    let (worker, printed) = worker(TWO, Depth::Full);
    let (worker, folder) = with_binary(worker, PASSED);
    let outcome = run(&worker, Place::Main);
    assert_eq!((outcome.is_ok, outcome.passed, outcome.failed), (true, 6, 0));
    let folder = folder.path().display().to_string();
    for filter in ["x::", "y::z::"] {
        let line = format!("\n{folder} -q --ignored --test-threads=1 {filter}\n");
        assert!(text(&printed).contains(&line), "{}", text(&printed));
    }
}

#[test]
fn a_step_that_fails_ends_its_part() {
    let (worker, printed) = worker(TWO, Depth::Full);
    let script = "echo 'x::y --- FAILED'; echo 'test result: FAILED. 2 passed; 1 failed; 0 ignored'; exit 101";
    let (worker, _folder) = with_binary(worker, script);
    let outcome = run(&worker, Place::Main);
    assert_eq!((outcome.is_ok, outcome.passed, outcome.failed), (false, 2, 1));
    assert_eq!(text(&printed).matches("test result").count(), 1);
    assert_eq!(*lock(&worker.failures), ["a: x::y"]);
}

#[test]
fn a_part_that_runs_no_test_fails_and_says_so() {
    let (worker, printed) = worker(TWO, Depth::Full);
    let (worker, _folder) = with_binary(worker, "echo 'test result: ok. 0 passed; 0 failed; 0 ignored'");
    let outcome = run(&worker, Place::Main);
    assert_eq!((outcome.is_ok, outcome.failed), (false, 1));
    assert!(text(&printed).contains("test: part a ran no test"), "{}", text(&printed));
}

#[test]
fn a_part_whose_binary_is_not_there_fails_with_the_reason() {
    let (worker, printed) = worker(TWO, Depth::Full);
    let (worker, _folder) = with_binary(worker, PASSED);
    let other = TestBinary { name: "other".to_owned(), folder: "/".into(), path: "/".into() };
    let worker = Worker { binaries: TestBinaries::with(vec![other]), ..worker };
    assert!(!run(&worker, Place::Main).is_ok);
    assert!(text(&printed).contains("test: there is no binary of tests named programs"), "{}", text(&printed));
}

#[test]
fn lines_of_a_part_beside_others_are_marked() {
    let (worker, printed) = worker(TWO, Depth::Full);
    let (worker, _folder) = with_binary(worker, PASSED);
    assert!(run(&worker, Place::Beside).is_ok);
    let text = text(&printed);
    assert!(
        text.starts_with("\n==> a (beside the others)\na | ") && text.matches("\na | test result").count() == 2,
        "{text}"
    );
}

#[test]
fn cpu_time_is_the_sum_of_the_steps() {
    let (worker, _printed) = worker(TWO, Depth::Full);
    let busy = format!("i=0; while [ $i -lt 1000000 ]; do i=$((i+1)); done; {PASSED}");
    let (worker, _folder) = with_binary(worker, &busy);
    let one = run(&worker, Place::Idle).cpu;
    assert!(one >= Duration::from_millis(100), "{one:?}");
}

#[test]
fn depth_decides_steps_skipped_names_and_environment() {
    let steps = "env_short = { ORDERS_OF_A_TEST = \"2\" }\nenv_full = { ORDERS_OF_A_TEST = \"9\" }\nsteps = [\n\
        { tests = \"programs\", only = [\"x\"], skip = [\"always\"], skip_short = [\"slow\"], nocapture = true },\n\
        { ignored = [\"--lib\"], depth = \"full\", env = { AT = \"{root}/target\" } },\n\
        { tests = \"programs\", only = [\"y\"], under = \"own_run\" },\n]";
    let release = "NEBULA_BIN_DIR=/r/target/x86_64-unknown-linux-gnu/release";
    let described = |depth| {
        let (worker, _) = worker(steps, depth);
        worker.describe(worker.parts.get("a").unwrap())
    };
    let own_run = "own_run programs -q --ignored --test-threads=1 y::";
    assert_eq!(
        described(Depth::Short)[1..],
        [
            format!(
                "  ORDERS_OF_A_TEST=2 {release} RUST_TEST_NOCAPTURE=1 programs -q --ignored --test-threads=1 x:: --skip=always --skip=slow"
            ),
            format!("  ORDERS_OF_A_TEST=2 {release} {own_run}"),
        ]
    );
    assert_eq!(
        described(Depth::Full)[1..],
        [
            format!(
                "  ORDERS_OF_A_TEST=9 {release} RUST_TEST_NOCAPTURE=1 programs -q --ignored --test-threads=1 x:: --skip=always"
            ),
            format!(
                "  ORDERS_OF_A_TEST=9 {release} AT=/r/target cargo test -q --workspace --lib -- --ignored --test-threads=1"
            ),
            format!("  ORDERS_OF_A_TEST=9 {release} {own_run}"),
        ]
    );
}

#[test]
fn a_package_that_cannot_be_installed_is_an_error_whose_reason_is_shown() {
    let (worker, printed) = worker(TWO, Depth::Full);
    let output = Arc::clone(&worker.output);
    let lines: Lines = Arc::new(move |line: &[u8]| output.line("", line));
    let doing = Doing { lines, cpu: Mutex::default(), place: Place::Main };
    // Where there is no apt-get.
    let mut need = function(&["eval", "PATH=/nonexistent; need no-such-program=no-such-package"]);
    need.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    assert_eq!(doing.must(&worker.processes, need), Err(String::new()));
    assert!(text(&printed).contains("no-such-package"), "{}", text(&printed));
}
