//! The heir of an instance: a process that closes the instance's device after it, so that nobody waits for the kernel.
//!
//! The last close of a tun device removes it from the pod at once, with its addresses and routes, but then blocks the
//! closing process for some 20 ms until all pending RCU callbacks have run (`rcu_barrier`). An instance cannot leave
//! that to a child process, which would be in the instance's control group, and that is removed as well.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::notify::NotifySocket;

/// First argument that makes this program an heir. Runtimes call plugins without arguments.
pub const VERB: &str = "close-device";

/// Waits for a device to inherit, until the timeout. A plain read leaves no room for the descriptors in the message, so
/// the kernel closes them.
pub fn run() {
    // There is nobody to report an error to.
    let _ = io::stdin().read(&mut [0]);
}

/// The plugin's handle of an heir.
#[derive(Debug)]
pub(super) struct Heir {
    _socket: NotifySocket,
    process: Child,
}

impl Heir {
    /// Starts `program`, which must be this binary, as an heir that listens on `socket`.
    pub(super) fn start(program: &Path, socket: &Path) -> io::Result<Self> {
        let socket = NotifySocket::bind_for_owner(socket)?;
        let process = Command::new(program)
            .arg(VERB)
            .env_clear()
            .current_dir("/")
            .stdin(socket.as_input(LISTEN_TIMEOUT)?)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { _socket: socket, process })
    }
}

impl Drop for Heir {
    fn drop(&mut self) {
        // An heir that has taken over a device exits as soon as the kernel lets it, with or without this signal.
        let _ = self.process.kill();
    }
}

// Longer than a plugin waits for an instance. The timeout is for heirs whose plugin was killed.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);
