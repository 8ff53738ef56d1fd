//! Tells openresolv of the host's resolver, as a private entry: the local resolvers that openresolv configures
//! (dnsmasq, unbound, named, …) then ask it for the domain and for nothing else, and `/etc/resolv.conf` does not name
//! it.
//!
//! A child process adds the entry, waits for the end of this process and removes the entry, so that nothing stays
//! behind after `kill -9`.

use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use nebula_linux::clock;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::command::{self, POLL, run};
use super::registration::Registration;

/// Why openresolv was not told.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Command(#[from] command::Error),
    #[error("resolvconf is {0} and not openresolv, so it cannot forward one domain")]
    Other(String),
    /// Its entry would change only the search domains, or take the last server out of `/etc/resolv.conf`.
    #[error(
        "openresolv has no local resolver that could ask by domain: install dnsmasq or unbound, and see name_servers in \
         resolvconf.conf(5)"
    )]
    NoLocal,
    #[error("openresolv asks servers on port 53 of an address that is not loopback: see resolver.listen")]
    Listen,
    #[error("resolvconf -a failed: {0}")]
    Refused(String),
    #[error("resolvconf -a: {0}")]
    Io(#[from] io::Error),
}

/// An entry of openresolv.
#[derive(Debug)]
pub(super) struct Entry {
    keeper: Child,
    /// Its end removes the entry.
    _alive: ChildStdin,
}

impl Entry {
    pub(super) fn add(registration: &Registration) -> Result<Self, Error> {
        let version = run("resolvconf", &["--version"])?;
        if !version.starts_with("openresolv ") {
            return Err(Error::Other(version.lines().next().unwrap_or_default().to_owned()));
        }
        if !has_local_resolver(&run("resolvconf", &["-v"])?) {
            return Err(Error::NoLocal);
        }
        let server = registration.server;
        if server.port() != 53 || server.ip().is_loopback() {
            return Err(Error::Listen);
        }
        let lines = format!("search {}\nnameserver {}\n", registration.domain, server.ip());
        let mut keeper = Command::new("/bin/sh")
            .args(["-c", KEEPER, &registration.device, &lines])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (Some(alive), Some(output)) = (keeper.stdin.take(), keeper.stdout.take()) else {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        };
        // Without `alive`, the keeper removes what it added.
        let said = wait_until_added(&mut keeper, output)?;
        if said.ends_with(ADDED) {
            Ok(Self { keeper, _alive: alive })
        } else {
            Err(Error::Refused(said.trim().replace('\n', "; ")))
        }
    }

    /// Waits until the entry is gone, so that a next one is not taken away.
    pub(super) fn remove(self) {
        let Self { mut keeper, _alive } = self;
        drop(_alive);
        let until = clock::now() + TIMEOUT;
        while clock::now() < until && matches!(keeper.try_wait(), Ok(None)) {
            thread::sleep(POLL);
        }
    }
}

/// Whether `/etc/resolv.conf` leads to a resolver of this host, by the variables that openresolv tells such resolvers.
fn has_local_resolver(variables: &str) -> bool {
    let servers = variables.lines().find_map(|line| line.strip_prefix("LOCALNAMESERVERS="));
    servers.is_some_and(|servers| !servers.trim_matches(['\'', '"', ' ']).is_empty())
}

/// Returns what the keeper printed: [`ADDED`] is the end of it on success.
fn wait_until_added(keeper: &mut Child, mut output: ChildStdout) -> io::Result<String> {
    let (mut said, mut chunk) = (Vec::new(), [0; 512]);
    let until = clock::now() + TIMEOUT;
    // Do not read to the end of the output: a resolver that openresolv restarts may inherit the pipe and keep it open.
    while !said.ends_with(ADDED.as_bytes()) {
        let has_ended = keeper.try_wait()?.is_some();
        let mut fds = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
        let has_output = poll(&mut fds, PollTimeout::ZERO)? > 0;
        let length = if has_output { output.read(&mut chunk)? } else { 0 };
        said.extend_from_slice(&chunk[..length]);
        // The last part is what matters.
        said.drain(..said.len().saturating_sub(MAX_SAID));
        if clock::now() >= until {
            said.extend_from_slice(b"it did not end in time");
            break;
        }
        if length == 0 {
            if has_ended {
                break;
            }
            thread::sleep(POLL);
        }
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// One process does all three, so that an entry is never added after it was removed. It ignores the signals that end
/// the processes of a service, and the end of whoever reads its output. A subscriber that fails does not count: the
/// entry is there. Its metric is high, so that other search domains are tried first.
const KEEPER: &str = "trap '' HUP INT PIPE TERM
printf %s \"$1\" | resolvconf -p -m 9999 -a \"$0\" 2>&1
resolvconf -l \"$0\" >/dev/null 2>&1 && printf '\\nadded\\n' && read -r end
exec resolvconf -f -d \"$0\" >/dev/null 2>&1";
const ADDED: &str = "\nadded\n";
/// openresolv waits for its lock for up to 10 s.
const TIMEOUT: Duration = Duration::from_secs(12);
/// Part of the keeper's output that is kept.
const MAX_SAID: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_server_on_this_host_is_a_local_resolver() {
        let variables =
            |local: &str| format!("DOMAIN=''\nNAMESERVERS='192.0.2.1'\nLOCALNAMESERVERS='{local}'\nDOMAINS=''");
        for (text, has) in [("127.0.0.1", true), ("::1 127.0.0.53", true), ("", false), (" ", false)] {
            assert_eq!(has_local_resolver(&variables(text)), has, "{text:?}");
        }
        assert!(!has_local_resolver(""));
    }
}
