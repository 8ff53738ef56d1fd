//! Reports readiness and status to the service manager (sd_notify).

use std::env;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::OnceLock;
use std::time::Duration;

use nebula_cni_contract::launch::StartError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use sd_notify::NotifyState;

use crate::descriptors;

/// Whether systemd runs this process. Others that have the same protocol might never take descriptors out of the
/// socket, where they would stay open, and may not follow when another process becomes the main one.
#[must_use]
pub fn is_systemd() -> bool {
    env::var_os("NOTIFY_SOCKET").is_some() && env::var_os("INVOCATION_ID").is_some()
}

/// Connects to the service manager's socket now, because its path may be unreachable later.
///
/// # Errors
/// Returns an error if the service manager does not listen there.
pub fn connect() -> io::Result<()> {
    let Some(name) = env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let address = match name.as_encoded_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(&name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    // If it is set already, it is connected to the same socket.
    let _ = CONNECTED.set(socket);
    Ok(())
}

/// Reports that the service is ready. Does nothing without a service manager; a failure is only logged.
pub fn ready() {
    if let Err(error) = send(NotifyState::Ready) {
        tracing::error!(%error, "Failed to notify systemd");
    }
}

/// Hands files to the service manager, which holds them while the unit lives and passes them to the next process, see
/// [`take_passed`](crate::descriptors::take_passed). It adds them to those that it has under this name.
///
/// # Errors
/// Returns an error if there is no service manager, or it cannot be reached.
pub fn store(files: &[BorrowedFd<'_>], name: &str) -> io::Result<()> {
    let socket = CONNECTED.get().ok_or(io::ErrorKind::NotConnected)?;
    // Without FDPOLL=0 it would drop a socket as soon as an error waits in it.
    let text = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
    files.chunks(descriptors::MAX_FILES).try_for_each(|some| descriptors::send(socket, text.as_bytes(), some))
}

/// Asks the service manager to close the files that it holds under this name. It does so some time later.
///
/// # Errors
/// Returns an error if there is no service manager, it cannot be reached, or it never has such a name.
pub fn unstore(name: &str) -> io::Result<()> {
    // A line break would start another assignment of the protocol.
    if name.contains(char::is_control) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let socket = CONNECTED.get().ok_or(io::ErrorKind::NotConnected)?;
    socket.send(format!("FDSTOREREMOVE=1\nFDNAME={name}").as_bytes()).map(drop)
}

/// Waits until the service manager has handled what was sent to it before (sd_notify_barrier(3)).
///
/// # Errors
/// Returns an error if there is no service manager, it cannot be reached, or it is not so far in time.
pub fn barrier(within: Duration) -> io::Result<()> {
    let socket = CONNECTED.get().ok_or(io::ErrorKind::NotConnected)?;
    let (ours, theirs) = io::pipe()?;
    descriptors::send(socket, b"BARRIER=1", &[theirs.as_fd()])?;
    drop(theirs);
    // That the other end is closed is always reported.
    let mut ends = [PollFd::new(ours.as_fd(), PollFlags::empty())];
    let timeout = PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX);
    if poll(&mut ends, timeout)? == 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
}

/// Reports that another process is the main one of the service from now on. Does nothing without a service manager; a
/// failure is only logged.
pub fn main_process(pid: u32) {
    if let Err(error) = send(NotifyState::MainPid(pid)) {
        tracing::error!(%error, "Failed to tell systemd which process is the main one");
    }
}

/// Reports the current status in one line.
pub fn status(text: &str) {
    // A line break would start another assignment of the protocol.
    let line: String = nebula_cert::visible(text).chars().take(MAX_STATUS_CHARS).collect();
    status_line(&line);
}

/// Reports why the service failed to start, for the program that waits for it.
pub fn start_error(error: &StartError) {
    status_line(&error.to_line());
}

fn status_line(line: &str) {
    if let Err(error) = send(NotifyState::Status(line)) {
        // A program that only waited for readiness is gone by now.
        tracing::debug!(%error, "Nobody takes the status");
    }
}

fn send(state: NotifyState<'_>) -> io::Result<()> {
    match CONNECTED.get() {
        Some(socket) => socket.send(state.to_string().as_bytes()).map(drop),
        None => sd_notify::notify(&[state]),
    }
}

static CONNECTED: OnceLock<UnixDatagram> = OnceLock::new();
const MAX_STATUS_CHARS: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_stored_by_name_in_messages_that_the_kernel_takes_and_removed_by_it_which_can_be_waited_for() {
        let (here, there) = UnixDatagram::pair().unwrap();
        // No other test of this crate has a service manager.
        CONNECTED.set(here).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        store(&vec![file.as_fd(); 300], "tun").unwrap();
        unstore("tun").unwrap();
        assert!(unstore("tun\nMAINPID=1").is_err());
        let mut received = Vec::new();
        for _ in 0..3 {
            let mut text = [0; 100];
            let (length, files) = descriptors::receive(&there, &mut text).unwrap();
            received.push((String::from_utf8_lossy(&text[..length]).into_owned(), files.len()));
        }
        let stored = "FDSTORE=1\nFDPOLL=0\nFDNAME=tun";
        let expected = [(stored, 253), (stored, 47), ("FDSTOREREMOVE=1\nFDNAME=tun", 0)];
        assert_eq!(received, expected.map(|(text, files)| (text.to_owned(), files)));

        let hangs = barrier(Duration::from_millis(10)).unwrap_err();
        assert_eq!(hangs.kind(), io::ErrorKind::TimedOut);
        let mut text = [0; 100];
        let (length, files) = descriptors::receive(&there, &mut text).unwrap();
        assert_eq!((&text[..length], files.len()), (&b"BARRIER=1"[..], 1), "nothing else may be in this message");
        let manager = std::thread::spawn(move || {
            there.set_nonblocking(false).unwrap();
            loop {
                match descriptors::receive(&there, &mut [0; 100]) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                    received => return received.map(drop).unwrap(),
                }
            }
        });
        barrier(Duration::from_secs(20)).unwrap();
        manager.join().unwrap();
    }
}
