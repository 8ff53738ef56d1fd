//! Runs one part or one job: what it needs, then its steps.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::builds::{Release, TestBinaries, TestBinary, command};
use crate::failures::Failures;
use crate::output::Output;
use crate::parts::{Depth, Part, Parts, Run, Step};
use crate::process::{Lines, Processes};
use crate::results;
use crate::schedule::{Outcome, Place, lock};

pub(crate) struct Worker {
    pub(crate) root: PathBuf,
    pub(crate) parts: Parts,
    pub(crate) depth: Depth,
    /// Names of the parts of this run.
    pub(crate) asked: Vec<String>,
    pub(crate) output: Arc<Output>,
    pub(crate) processes: Arc<Processes>,
    pub(crate) release: Release,
    pub(crate) binaries: TestBinaries,
    /// Failed tests, each line with the name of its part.
    pub(crate) failures: Mutex<Vec<String>>,
}

/// What one part or job has used and shown until now.
struct Doing {
    lines: Lines,
    cpu: Mutex<Duration>,
    place: Place,
}

impl Worker {
    pub(crate) fn run_part(&self, part: &Part, place: Place) -> Outcome {
        let counts = Arc::new((AtomicU32::new(0), AtomicU32::new(0)));
        let failures = Arc::new(Failures::default());
        let (to, output, mark) = (Arc::clone(&counts), Arc::clone(&self.output), mark(&part.name, place));
        let read = Arc::clone(&failures);
        self.output.say(&format!(
            "\n==> {}{}",
            part.name,
            if place == Place::Main { "" } else { " (beside the others)" }
        ));
        let lines: Lines = Arc::new(move |line: &[u8]| {
            if let Some((passed, failed)) = results::counts(line) {
                to.0.fetch_add(passed, Ordering::Relaxed);
                to.1.fetch_add(failed, Ordering::Relaxed);
            }
            read.read(line);
            output.line(&mark, line);
        });
        let run = Doing { lines, cpu: Mutex::default(), place };
        let result = self.steps(part, &run);
        let (passed, failed) = (counts.0.load(Ordering::Relaxed), counts.1.load(Ordering::Relaxed));
        if let Err(problem) = &result
            && !problem.is_empty()
        {
            (run.lines)(format!("test: {problem}").as_bytes());
        } else if result.is_ok() && passed == 0 {
            (run.lines)(format!("test: part {} ran no test", part.name).as_bytes());
        }
        let (is_ok, failed) = results::judge(result.is_ok(), passed, failed);
        lock(&self.failures).extend(failures.lines().iter().map(|line| format!("{}: {line}", part.name)));
        Outcome { is_ok, passed, failed, cpu: *lock(&run.cpu) }
    }

    /// Installs packages. Whoever needs one that cannot be installed says so.
    pub(crate) fn install(&self, packages: &[String]) {
        let output = Arc::clone(&self.output);
        let lines: Lines = Arc::new(move |line: &[u8]| output.line("", line));
        let _ = self.processes.run(need(packages), &lines);
    }

    pub(crate) fn run_job(&self, name: &str, place: Place) -> Outcome {
        let (output, mark) = (Arc::clone(&self.output), mark(name, place));
        self.output.say(&format!("\n=== {name}{}", if place == Place::Main { "" } else { " (beside the tests)" }));
        let run = Doing { lines: Arc::new(move |line: &[u8]| output.line(&mark, line)), cpu: Mutex::default(), place };
        let is_ok = run.must(&self.processes, shell("./.ci/jobs.sh", "run", &[name])).is_ok();
        Outcome { is_ok, passed: 0, failed: 0, cpu: *lock(&run.cpu) }
    }

    /// Runs a part until something fails; an error without a text was seen in the output.
    fn steps(&self, part: &Part, run: &Doing) -> Result<(), String> {
        if part.needs_root && !nix::unistd::geteuid().is_root() {
            return Err("this part needs root (namespaces, tun devices)".to_owned());
        }
        if !part.packages.is_empty() {
            run.must(&self.processes, need(&part.packages))?;
        }
        if part.needs_peers {
            run.must(&self.processes, command([".ci/go-nebula"]))?;
        }
        if let Some(check) = &part.check {
            run.must(&self.processes, function(&[check]))?;
        }
        if part.needs_release {
            let is_built = self.release.finish(&mut |command| run.must(&self.processes, command).is_ok(), &run.lines);
            if !is_built {
                return Err("the release build failed".to_owned());
            }
        }
        for step in part.steps.iter().filter(|step| step.depth.is_none_or(|depth| depth == self.depth)) {
            let words = if let Run::Tests { binary, .. } = &step.run {
                let (found, build) = self.binaries.get(binary, &self.processes, &run.lines)?;
                *lock(&run.cpu) += build.map_or(Duration::ZERO, |build| build.cpu);
                self.words(step, Some(&found))
            } else {
                self.words(step, None)
            };
            let mut command = command(words.iter().map(String::as_str));
            command.envs(self.environment(part, step));
            run.must(&self.processes, command)?;
            if step.starts_release
                && self.asked.iter().filter_map(|name| self.parts.get(name)).any(|part| part.needs_release)
            {
                self.release.start();
            }
        }
        Ok(())
    }

    /// The command of a step.
    fn words(&self, step: &Step, binary: Option<&TestBinary>) -> Vec<String> {
        let mut words: Vec<String> = Vec::new();
        let mut add = |more: &[&str]| words.extend(more.iter().map(|word| (*word).to_owned()));
        match &step.run {
            Run::Tests { binary: name, only, skip, skip_short } => {
                // Without its path, for `--dry-run`.
                match binary {
                    Some(TestBinary { folder, path, .. }) => {
                        add(&["env", "-C", &folder.display().to_string(), &path.display().to_string()]);
                    }
                    None => add(&[name]),
                }
                add(&["-q", "--ignored", "--test-threads=1"]);
                only.iter().for_each(|module| add(&[&format!("{module}::")]));
                let short = skip_short.iter().filter(|_| self.depth == Depth::Short);
                skip.iter().chain(short).for_each(|name| add(&[&format!("--skip={name}")]));
            }
            Run::Ignored(arguments) => {
                add(&["cargo", "test", "-q"]);
                self.parts.cargo.features.iter().chain(arguments).for_each(|word| add(&[word]));
                add(&["--", "--ignored", "--test-threads=1"]);
            }
            Run::Cargo(arguments) => {
                add(&["cargo", "test"]);
                self.parts.cargo.features.iter().chain(arguments).for_each(|word| add(&[word]));
            }
            Run::Shell(name) => return function_words(&[name]),
        }
        match &step.under {
            Some(name) => {
                let all: Vec<_> = std::iter::once(name.as_str()).chain(words.iter().map(String::as_str)).collect();
                function_words(&all)
            }
            None => words,
        }
    }

    fn environment(&self, part: &Part, step: &Step) -> Vec<(String, String)> {
        let of_depth = if self.depth == Depth::Short { &part.env_short } else { &part.env_full };
        let unset = of_depth.iter().filter(|(name, _)| env::var_os(name).is_none());
        let mut environment: Vec<_> = unset.map(|(name, value)| (name.clone(), value.clone())).collect();
        let release = self.root.join("target/x86_64-unknown-linux-gnu/release");
        if matches!(step.run, Run::Tests { .. } | Run::Ignored(_)) {
            environment.push(("NEBULA_BIN_DIR".to_owned(), release.display().to_string()));
        }
        if step.is_shown {
            environment.push(("RUST_TEST_NOCAPTURE".to_owned(), "1".to_owned()));
        }
        if let Some(factor) = step.threads_per_processor {
            let processors = thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(1));
            environment.push(("RUST_TEST_THREADS".to_owned(), (factor * processors).to_string()));
        }
        let root = self.root.display().to_string();
        environment.extend(step.env.iter().map(|(name, value)| (name.clone(), value.replace("{root}", &root))));
        environment
    }

    /// What a part would run, as text.
    pub(crate) fn describe(&self, part: &Part) -> Vec<String> {
        let mut lines = vec![format!("{}: {}", part.name, part.about)];
        let steps = part.steps.iter().filter(|step| step.depth.is_none_or(|depth| depth == self.depth));
        lines.extend(steps.map(|step| {
            let environment = self.environment(part, step).into_iter().map(|(name, value)| format!("{name}={value}"));
            let words = self.words(step, None);
            // A function is shown without the shell around it.
            let around = if words[0] == "bash" { shell_words(PARTS, "test", &[]).len() } else { 0 };
            let words: Vec<_> = environment.chain(words.into_iter().skip(around)).collect();
            format!("  {}", words.join(" "))
        }));
        lines
    }
}

impl Doing {
    fn must(&self, processes: &Processes, command: Command) -> Result<(), String> {
        let command = if self.place == Place::Idle { nice(&command) } else { command };
        let program = Path::new(command.get_program()).display().to_string();
        let ended = processes.run(command, &self.lines).map_err(|error| format!("{program}: {error}"))?;
        *lock(&self.cpu) += ended.cpu;
        if ended.is_ok { Ok(()) } else { Err(String::new()) }
    }
}

fn mark(name: &str, place: Place) -> String {
    if place == Place::Main { String::new() } else { format!("{name} | ") }
}

/// The same at the lowest priority.
fn nice(command: &Command) -> Command {
    let mut nice = Command::new("nice");
    nice.args(["-n", "19"]).arg(command.get_program()).args(command.get_args());
    nice.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    nice
}

fn need(packages: &[String]) -> Command {
    let words: Vec<_> = std::iter::once("need").chain(packages.iter().map(String::as_str)).collect();
    function(&words)
}

/// A function of parts.sh with its arguments.
fn function(words: &[&str]) -> Command {
    shell(PARTS, "test", words)
}

fn function_words(words: &[&str]) -> Vec<String> {
    shell_words(PARTS, "test", words)
}

/// A function of a file for bash, which calls itself `name` in messages.
fn shell(file: &str, name: &str, words: &[&str]) -> Command {
    command(shell_words(file, name, words).iter().map(String::as_str))
}

fn shell_words(file: &str, name: &str, words: &[&str]) -> Vec<String> {
    let script = format!("set -uo pipefail; . {file}; \"$@\"");
    ["bash", "-c", &script, name].iter().chain(words).map(|word| (*word).to_owned()).collect()
}

const PARTS: &str = "./system-tests/parts.sh";

#[cfg(test)]
mod tests;
