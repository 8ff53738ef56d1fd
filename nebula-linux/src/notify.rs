//! Reports readiness and status to the service manager (sd_notify).

use std::env;
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::OnceLock;

use nebula_cni_contract::launch::StartError;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use sd_notify::NotifyState;

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

/// Hands a file to the service manager, which holds it while the unit lives and gives it to the next process.
///
/// # Errors
/// Returns an error if there is no service manager, or it cannot be reached.
pub fn store(file: &impl AsRawFd, name: &str) -> io::Result<()> {
    let socket = CONNECTED.get().ok_or(io::ErrorKind::NotConnected)?;
    let (text, files) = (format!("FDSTORE=1\nFDNAME={name}"), [file.as_raw_fd()]);
    let (parts, message) = ([IoSlice::new(text.as_bytes())], [ControlMessage::ScmRights(&files)]);
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &parts, &message, MsgFlags::empty(), None)?;
    Ok(())
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
