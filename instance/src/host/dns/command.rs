//! Runs the commands of the host's resolver, with a limit on their time.

use std::io;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nebula_linux::clock;

/// Why a command did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{0} cannot be run: {1}")]
    NotRun(&'static str, #[source] io::Error),
    #[error("{command} failed: {said}")]
    Failed { command: String, said: String },
    #[error("{0} did not end within {t} s", t = TIMEOUT.as_secs())]
    Timeout(String),
}

/// Runs a command to its end. Returns what it printed, which must be less than a pipe holds.
pub(super) fn run(program: &'static str, arguments: &[&str]) -> Result<String, Error> {
    let not_run = |error| Error::NotRun(program, error);
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(not_run)?;
    let command = || format!("{program} {}", arguments.first().unwrap_or(&""));
    let until = clock::now() + TIMEOUT;
    while child.try_wait().map_err(not_run)?.is_none() {
        if clock::now() >= until {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Error::Timeout(command()));
        }
        thread::sleep(POLL);
    }
    let output = child.wait_with_output().map_err(not_run)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(Error::Failed { command: command(), said: text(&output.stderr) })
    }
}

const TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two looks at a command that runs.
pub(super) const POLL: Duration = Duration::from_millis(10);
