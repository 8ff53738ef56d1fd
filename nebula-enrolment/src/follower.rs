//! The child process that talks to the CA service for the daemon: `nebula-enrol -follow`. What it says is hostile
//! input.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nebula_linux::clock::now;
use nebula_linux::companion::{self, NotRun};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::enrol::event::{Event, MAX_LINE_BYTES};

/// The running child. It ends when this is dropped, or this process ends for whatever reason.
#[derive(Debug)]
pub(crate) struct Follower {
    child: Child,
    lines: Lines<ChildStdout>,
    /// The child ends when this is closed.
    _alive: Option<ChildStdin>,
}

/// What came from the child.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Event(Event),
    /// A line that this version does not know.
    Unknown(String),
    /// The time is over.
    Nothing,
    /// The child is to be replaced, and why.
    Ended(String),
}

impl Follower {
    /// Starts the child for the enrolment in `folder`. Call it on a thread that lives as long as the process: the
    /// kernel ends the child with that thread.
    ///
    /// # Errors
    /// Returns an error if the program is missing or cannot be executed.
    pub(crate) fn start(folder: &Path) -> Result<Self, NotRun> {
        let program = companion::find(PROGRAM);
        let mut command = Command::new(&program);
        command.arg("-follow").arg("-out-dir").arg(folder).stdin(Stdio::piped()).stdout(Stdio::piped());
        // Readiness is reported by the daemon alone, and a terminal's Ctrl-C is for the daemon.
        command.env_remove("NOTIFY_SOCKET").process_group(0);
        let mut child = command.spawn().map_err(|source| NotRun { program: program.clone(), source })?;
        let alive = child.stdin.take();
        let Some(output) = child.stdout.take() else {
            return Err(NotRun { program, source: io::Error::other("it has no standard output") });
        };
        Ok(Self { child, lines: Lines { source: output, buffer: Vec::new() }, _alive: alive })
    }

    /// Waits for the next line, at most for `wait`. After [`Heard::Ended`] the child is gone.
    pub(crate) fn hear(&mut self, wait: Duration) -> Heard {
        let until = now() + wait;
        match self.lines.next(until) {
            Ok(Some(line)) => match Event::from_line(&line) {
                Ok(event) => Heard::Event(event),
                Err(error) => Heard::Unknown(error.to_string()),
            },
            Ok(None) => Heard::Nothing,
            Err(broken) => Heard::Ended(self.end(broken)),
        }
    }

    /// Ends the child and says how it ended.
    fn end(&mut self, broken: Broken) -> String {
        let _ = self.child.kill();
        match (broken, self.child.wait()) {
            (Broken::Closed, Ok(status)) => status.to_string(),
            (Broken::Closed, Err(error)) => error.to_string(),
            (Broken::TooLong, _) => "it said a line that is too long".to_owned(),
            (Broken::Unreadable(error), _) => error.to_string(),
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Why there are no more lines.
#[derive(Debug)]
enum Broken {
    Closed,
    TooLong,
    Unreadable(io::Error),
}

/// Reads lines of bounded length.
#[derive(Debug)]
struct Lines<R> {
    source: R,
    /// Read, but not yet returned.
    buffer: Vec<u8>,
}

impl<R: Read + AsFd> Lines<R> {
    /// The next line; `None` if there is none before `until`.
    fn next(&mut self, until: Instant) -> Result<Option<Vec<u8>>, Broken> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.buffer.drain(..=end).collect();
                line.pop();
                return Ok(Some(line));
            }
            if self.buffer.len() >= MAX_LINE_BYTES {
                return Err(Broken::TooLong);
            }
            // Rounded up: an early wake-up would only poll again.
            let left = until.saturating_duration_since(now()) + Duration::from_millis(1);
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.source.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(1..) => {}
                _ if now() >= until => return Ok(None),
                _ => continue,
            }
            let mut chunk = [0; 512];
            let room = (MAX_LINE_BYTES - self.buffer.len()).min(chunk.len());
            match self.source.read(&mut chunk[..room]) {
                Ok(0) => return Err(Broken::Closed),
                Ok(read) => self.buffer.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::Unreadable(error)),
            }
        }
    }
}

/// The program that knows HTTPS.
pub(crate) const PROGRAM: &str = "nebula-enrol";

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn pipe() -> (Lines<io::PipeReader>, io::PipeWriter) {
        let (source, writer) = io::pipe().unwrap();
        (Lines { source, buffer: Vec::new() }, writer)
    }

    fn soon() -> Instant {
        now() + Duration::from_millis(50)
    }

    #[test]
    fn lines_arrive_whole_however_they_were_written() {
        let (mut lines, mut writer) = pipe();
        assert!(lines.next(soon()).unwrap().is_none(), "nobody said anything");
        writer.write_all(b"one\n\ntw").unwrap();
        assert_eq!(lines.next(soon()).unwrap().unwrap(), b"one");
        assert_eq!(lines.next(soon()).unwrap().unwrap(), b"");
        assert!(lines.next(soon()).unwrap().is_none());
        writer.write_all(b"o\nrest").unwrap();
        assert_eq!(lines.next(soon()).unwrap().unwrap(), b"two");
        drop(writer);
        assert!(matches!(lines.next(soon()), Err(Broken::Closed)), "the rest is no line");
    }

    #[test]
    fn the_longest_line_is_read_and_a_longer_one_is_the_end() {
        let (mut lines, mut writer) = pipe();
        writer.write_all(&[b'x'; MAX_LINE_BYTES - 1]).unwrap();
        writer.write_all(b"\n").unwrap();
        assert_eq!(lines.next(soon()).unwrap().unwrap().len(), MAX_LINE_BYTES - 1);
        writer.write_all(&[b'x'; MAX_LINE_BYTES + 1]).unwrap();
        assert!(matches!(lines.next(soon()), Err(Broken::TooLong)));
        assert!(lines.buffer.len() <= MAX_LINE_BYTES);
    }
}
