//! Runs a program with bounded input, output and time.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, Deadline, SystemClock};

/// What a program printed, and how it ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// Standard output, cut at 256 KiB.
    pub stdout: String,
    /// Standard error, cut at 256 KiB.
    pub stderr: String,
}

/// Runs `command` with `stdin`, and kills it after `within`. Blocks.
///
/// # Errors
/// Returns an error if it cannot be started, or has not ended in time.
pub fn run(command: &mut Command, stdin: &[u8], within: Duration) -> io::Result<Ended> {
    let clock = SystemClock;
    let deadline = Deadline::after(&clock, within);
    let mut child = start(command, &clock)?;
    let (stdout, stderr) = (collect(child.stdout.take()), collect(child.stderr.take()));
    if let Some(mut pipe) = child.stdin.take() {
        // Inputs are smaller than a pipe's buffer, so this does not block; a program that reads nothing is no error.
        let _ = pipe.write_all(stdin);
    }
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if deadline.is_over(&clock) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("has not ended within {} s", within.as_secs()),
            ));
        }
        clock.sleep(POLL);
    };
    // A descendant may hold the pipes open; what the program itself printed has arrived.
    let text = |from: Receiver<Vec<u8>>| {
        let bytes = from.recv_timeout(deadline.left(&clock).min(AFTER_END)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    };
    Ok(Ended { status, stdout: text(stdout), stderr: text(stderr) })
}

/// A program that was written a moment ago may still be open for writing in a process that was forked meanwhile.
fn start(command: &mut Command, clock: &SystemClock) -> io::Result<std::process::Child> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for _ in 0..TRIES {
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => clock.sleep(POLL),
            other => return other,
        }
    }
    command.spawn()
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            let _ = pipe.take(MAX_OUTPUT).read_to_end(&mut bytes);
        }
        // Nobody waits any more if the program did not end in time.
        let _ = sender.send(bytes);
    });
    receiver
}

/// A command for a program of the node, which sees the node's files under the names that the node gives them.
///
/// # Errors
/// Returns an error if the agent's own program cannot be found.
pub fn of_node(root: Option<&Path>, program: &Path) -> io::Result<Command> {
    let Some(root) = root else { return Ok(Command::new(program)) };
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(IN_ROOT).arg(root).arg(program);
    Ok(command)
}

/// Makes the node's root directory that of this process.
///
/// # Errors
/// Returns the system's error, or an error if process ids here are not those of the node: then the plugin would look
/// for an instance under one number and signal another process.
pub fn enter_root(root: &Path) -> io::Result<()> {
    nix::unistd::chroot(root)?;
    nix::unistd::chdir("/")?;
    let own = std::fs::read_link("/proc/self")?;
    if own.as_os_str() == std::process::id().to_string().as_str() {
        return Ok(());
    }
    Err(io::Error::other("the agent has process ids of its own: its pod needs hostPID: true"))
}

/// Hidden verb of the agent's program: changes its root directory and becomes another program.
pub const IN_ROOT: &str = "in-root";
const POLL: Duration = Duration::from_millis(5);
const TRIES: u32 = 100;
const AFTER_END: Duration = Duration::from_secs(1);
const MAX_OUTPUT: u64 = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, within: Duration) -> io::Result<Ended> {
        run(Command::new("/bin/sh").args(["-c", script]), b"hello", within)
    }

    #[test]
    fn output_and_exit_are_returned() {
        let ended = sh("cat; echo oops >&2; exit 3", Duration::from_secs(10)).unwrap();
        assert_eq!((ended.status.code(), ended.stdout.as_str(), ended.stderr.as_str()), (Some(3), "hello", "oops"));
    }

    #[test]
    fn a_program_that_does_not_end_is_killed_and_a_child_that_keeps_the_pipe_blocks_nobody() {
        assert_eq!(sh("sleep 60", Duration::from_millis(100)).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let began = SystemClock.now();
        assert!(sh("sleep 5 & exit 0", Duration::from_secs(10)).unwrap().status.success());
        assert!(SystemClock.now() < began + Duration::from_secs(4));
    }

    #[test]
    fn endless_output_is_cut() {
        let ended = sh("head -c 1000000 /dev/zero | tr '\\0' x", Duration::from_secs(20)).unwrap();
        assert!(ended.stdout.len() as u64 <= MAX_OUTPUT);
    }
}
