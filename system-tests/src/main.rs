//! Runs the tests of the repository by parts (`./test`), and the jobs of continuous integration (`.ci/run`).
#![allow(clippy::disallowed_methods, reason = "it measures how long real programs take")]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test ends at the first surprise"))]

mod builds;
mod failures;
mod help;
mod interrupt;
mod jobs;
mod output;
mod parts;
mod plan;
mod process;
mod results;
mod schedule;
mod worker;

use std::env;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use builds::{Release, TestBinaries};
use jobs::Jobs;
use output::Output;
use parts::{Depth, Parts};
use plan::{Task, Turn};
use process::Processes;
use schedule::{Finished, Outcome, Place, lock};
use worker::Worker;

fn main() -> ExitCode {
    let mut arguments: Vec<_> = env::args().skip(1).collect();
    let kind = if arguments.is_empty() { String::new() } else { arguments.remove(0) };
    let output = Arc::new(Output::new(std::io::stdout()));
    let answer = match kind.as_str() {
        "parts" => parts_command(&arguments, &output),
        "jobs" => jobs_command(&arguments, &output),
        _ => Err("run-tests is started by ./test and .ci/run".to_owned()),
    };
    match (answer, interrupt::signal()) {
        (_, Some(signal)) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX)),
        (Ok(is_ok), None) => {
            if is_ok {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        (Err(problem), None) => {
            let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{problem}\n").as_bytes());
            ExitCode::from(2)
        }
    }
}

/// `./test [--help | --list | --dry-run] [PART...]`: whether all parts passed.
fn parts_command(arguments: &[String], output: &Arc<Output>) -> Result<bool, String> {
    let of = |problem: String| format!("test: {problem}");
    let (options, mut asked) = split(arguments);
    let parts = Parts::read(&read("system-tests/parts.toml").map_err(of)?)
        .map_err(|problem| of(format!("parts.toml: {problem}")))?;
    let option = one_option(&options, &["-h", "--help", "--list", "--dry-run"]).map_err(of)?;
    match option {
        Some("-h" | "--help") => {
            help::of_parts(&parts).iter().for_each(|line| output.say(line));
            return Ok(true);
        }
        Some("--list") => {
            parts.parts.iter().for_each(|part| output.say(&part.name));
            return Ok(true);
        }
        _ => {}
    }
    plan::check_names("part", &asked, parts.parts.iter().map(|part| part.name.as_str())).map_err(of)?;
    let usual_depth = if asked.is_empty() { Depth::Short } else { Depth::Full };
    if asked.is_empty() {
        asked = parts.usual();
    }
    let worker = worker(parts, asked, usual_depth, output).map_err(of)?;
    if option == Some("--dry-run") {
        let asked = worker.asked.iter().filter_map(|name| worker.parts.get(name));
        asked.flat_map(|part| worker.describe(part)).for_each(|line| output.say(&line));
        return Ok(true);
    }
    let turns = plan::of_parts(&worker.parts, &worker.asked, &[]);
    let finished = run(&worker, &turns);
    let lines = part_lines(&worker, &finished.iter().collect::<Vec<_>>());
    output.say("");
    lines.iter().for_each(|line| output.say(line));
    let sum = |of: fn(&Finished) -> u32| finished.iter().map(of).sum::<u32>();
    let (passed, failed) = (sum(|part| part.outcome.passed), sum(|part| part.outcome.failed));
    output.say(&format!("\n{passed} passed, {failed} failed"));
    say_failures(&worker);
    Ok(finished.iter().all(|part| part.outcome.is_ok))
}

/// `.ci/run [--help | --list] [JOB...]`: whether all jobs ended well.
fn jobs_command(arguments: &[String], output: &Arc<Output>) -> Result<bool, String> {
    let of = |problem: String| format!("run: {problem}");
    let begun = Instant::now();
    let (options, mut asked) = split(arguments);
    let jobs =
        Jobs::read(&read(".ci/jobs.toml").map_err(of)?).map_err(|problem| of(format!("jobs.toml: {problem}")))?;
    let parts = Parts::read(&read("system-tests/parts.toml").map_err(of)?)
        .map_err(|problem| of(format!("parts.toml: {problem}")))?;
    match one_option(&options, &["-h", "--help", "--list"]).map_err(of)? {
        Some("--list") => {
            jobs.jobs.iter().for_each(|job| output.say(&job.name));
            return Ok(true);
        }
        Some(_) => {
            help::of_jobs(&jobs).iter().for_each(|line| output.say(line));
            return Ok(true);
        }
        None => {}
    }
    plan::check_names("job", &asked, jobs.jobs.iter().map(|job| job.name.as_str())).map_err(of)?;
    if asked.is_empty() {
        asked = jobs.usual();
    }
    let turns = plan::of_jobs(&jobs, &asked, &parts);
    let usual = parts.usual();
    let worker = worker(parts, usual, Depth::Short, output).map_err(of)?;
    for job in plan::beside(&jobs, &asked).iter().filter(|job| !job.packages.is_empty()) {
        worker.install(&job.packages);
    }
    let finished = run(&worker, &turns);
    output.say("");
    for job in &finished {
        output.say(&results::job_line(job));
        if !job.inner.is_empty() {
            let parts: Vec<_> = job.inner.iter().filter(|part| part.place != Place::Idle).collect();
            part_lines(&worker, &parts).iter().for_each(|line| output.say(&format!("    {line}")));
        }
    }
    let idle = || finished.iter().flat_map(|job| &job.inner).filter(|job| job.place == Place::Idle);
    idle().for_each(|job| output.say(&results::job_line(job)));
    output.say(&results::sum_line("all of these", begun.elapsed(), process::children_cpu()));
    let ran = |name: &str| finished.iter().chain(idle()).any(|job| job.name == name);
    for job in jobs.jobs.iter().filter(|job| !ran(&job.name)) {
        let why = why_not(asked.contains(&job.name), job.is_optional.then_some("optional job"));
        output.say(&format!("{:<12} not run ({why})", job.name));
    }
    say_failures(&worker);
    Ok(finished.iter().chain(idle()).all(|job| job.outcome.is_ok))
}

fn worker(parts: Parts, asked: Vec<String>, usual_depth: Depth, output: &Arc<Output>) -> Result<Worker, String> {
    let processes = Arc::new(Processes::default());
    interrupt::end_on_signals(Arc::clone(&processes)).map_err(|error| format!("signals: {error}"))?;
    Ok(Worker {
        root: env::current_dir().map_err(|error| error.to_string())?,
        depth: env::var("DEPTH").map_or(Ok(usual_depth), |text| Depth::parse(&text))?,
        asked,
        output: Arc::clone(output),
        release: Release::new(parts.cargo.release.clone(), Arc::clone(&processes)),
        binaries: TestBinaries::new(&parts.cargo.features, &parts.cargo.binaries),
        failures: Mutex::default(),
        processes,
        parts,
    })
}

fn run(worker: &Worker, turns: &[Turn]) -> Vec<Finished> {
    let run = |task: &Task, place: Place| match task {
        Task::Part(name) => worker.parts.get(name).map_or_else(Outcome::default, |part| worker.run_part(part, place)),
        Task::Job(name) => worker.run_job(name, place),
    };
    schedule::execute(turns, &run, &|| worker.processes.are_over())
}

/// Lines of the parts that ran, and of those that did not.
fn part_lines(worker: &Worker, finished: &[&Finished]) -> Vec<String> {
    let mut lines: Vec<_> = finished.iter().map(|part| results::part_line(part)).collect();
    let ran = |name: &str| finished.iter().any(|part| part.name == name);
    for part in worker.parts.parts.iter().filter(|part| !ran(&part.name)) {
        let why = why_not(worker.asked.contains(&part.name), part.is_optional.then_some("optional"));
        lines.push(format!("{:<8} not run ({why})", part.name));
    }
    lines
}

/// The last lines of all, which a log that was cut still has.
fn say_failures(worker: &Worker) {
    lock(&worker.failures).iter().for_each(|line| worker.output.say(&format!("failed: {line}")));
}

fn why_not(is_asked: bool, optional: Option<&str>) -> String {
    match optional {
        _ if is_asked => "interrupted".to_owned(),
        Some(optional) => format!("{optional}: ask for it by name"),
        None => "not asked for".to_owned(),
    }
}

fn split(arguments: &[String]) -> (Vec<String>, Vec<String>) {
    arguments.iter().cloned().partition(|argument| argument.starts_with('-'))
}

/// The option among those that are known.
fn one_option<'a>(given: &'a [String], known: &[&str]) -> Result<Option<&'a str>, String> {
    match given {
        [] => Ok(None),
        [option] if known.contains(&option.as_str()) => Ok(Some(option)),
        _ => Err(format!("unknown option {}; there are: {}", given.join(" "), known.join(" "))),
    }
}

fn read(path: &str) -> Result<String, String> {
    fs::read_to_string(Path::new(path)).map_err(|error| format!("{path}: {error}"))
}
