//! `nebula ctl`: queries and controls a running daemon through its control socket.
//!
//! A separate program, so that the daemon contains no command line parser and no table output.

mod answer;
mod arguments;
mod daemon;
mod doctor;
mod kept;
mod print;
mod width;

use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory as _, Parser as _};
use nebula_cert::visible;
use serde_json::Value;

use answer::Answer;
use arguments::{Arguments, Command};
use daemon::Failure;

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    if let Command::Completion { shell } = arguments.command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Arguments::command(), "nebula-ctl", &mut script);
        let script = String::from_utf8_lossy(&script).into_owned();
        return say(&(script + arguments::for_nebula(shell)), ExitCode::SUCCESS);
    }
    if let Command::KeepFlows { folder, max_mib, hours } = &arguments.command {
        let bound = kept::Bound { bytes: max_mib << 20, age: Duration::from_secs(hours * 3600) };
        return match kept::run(arguments.socket.as_deref(), folder, bound) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => complain(&failure),
        };
    }
    match answer_to(&arguments) {
        Ok((answer, document)) => {
            let findings = answer.findings();
            let code = if answer.is_bad_news(&findings) { FAILED } else { 0 };
            let is_diagnosis = matches!(answer, Answer::Doctor(_) | Answer::Why(_));
            let text = match (arguments.json, print::readable(&answer, &findings), width::of_output()) {
                (true, ..) if is_diagnosis => print::json(&doctor::document(&findings, &document)),
                (true, ..) if matches!(answer, Answer::Flows(_)) => print::json_lines(&document),
                (true, ..) => print::json(&document),
                // The tables of other commands are not sentences.
                (false, text, Some(width)) if is_diagnosis => width::wrap(&text, width),
                (false, text, _) => text,
            };
            say(&text, ExitCode::from(code))
        }
        Err(failure) => complain(&failure),
    }
}

/// Asks the daemon, or reads what was kept.
fn answer_to(arguments: &Arguments) -> Result<(Answer, Value), Failure> {
    if let Command::Flows { kept: Some(folder), .. } = &arguments.command {
        let read = kept::read(folder, &arguments.command.filter()).map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::NotFound => " (`nebula ctl keep-flows` or nebula-flows.service keeps records there)",
                ErrorKind::PermissionDenied => " (root may)",
                _ => "",
            };
            Failure::Refused(format!("cannot read {}: {error}{hint}", folder.display()))
        })?;
        let document = serde_json::to_value(read).unwrap_or_default();
        let answer = Answer::read(&arguments.command, print::visible_values(&document));
        let unreadable = |error| Failure::Refused(format!("cannot read {}: {error}", folder.display()));
        return Ok((answer.map_err(unreadable)?, document));
    }
    let path = daemon::find(arguments.socket.as_deref())?;
    let document = daemon::ask(&path, &arguments.command.request())?;
    // Names and texts of others become part of sentences and tables.
    let answer = Answer::read(&arguments.command, print::visible_values(&document));
    Ok((answer.map_err(|error| daemon::not_understood(&path, &error))?, document))
}

fn complain(failure: &Failure) -> ExitCode {
    // What a reload refuses is one line for each finding.
    let lines: Vec<_> = failure.to_string().lines().map(|line| visible(line).into_owned()).collect();
    let _ = writeln!(std::io::stderr(), "nebula-ctl: {}", lines.join("\n"));
    ExitCode::from(match failure {
        Failure::Refused(_) => FAILED,
        Failure::Unreachable(_) => UNREACHABLE,
    })
}

fn say(text: &str, code: ExitCode) -> ExitCode {
    // A closed standard output is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    code
}

const FAILED: u8 = 1;
const USAGE: u8 = 2;
const UNREACHABLE: u8 = 3;
