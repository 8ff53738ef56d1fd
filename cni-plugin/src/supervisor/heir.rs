//! The heir of an instance: a process that closes its device after it, so that nobody waits for the kernel.
//!
//! The last close of a tun takes the device out of the pod at once, with addresses and routes, and then keeps whoever
//! closes for some 20 ms, until no processor can still look at what nobody finds any more (`rcu_barrier`). An instance
//! cannot leave that to a process of its own: that would be in the pod's control group, which is to go as well.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::notify::NotifySocket;

/// First argument of an heir. Runtimes call plugins without arguments.
pub const VERB: &str = "close-device";

/// Waits until there is something to inherit, or for long enough. Read without room for descriptors, they are closed.
pub fn run() {
    // Nobody is left to tell.
    let _ = io::stdin().read(&mut [0]);
}

/// The plugin's end.
#[derive(Debug)]
pub(super) struct Heir {
    _socket: NotifySocket,
    process: Child,
}

impl Heir {
    /// Starts `program`, this one, as an heir that listens at `socket`.
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
        // A process that took over a device ends as soon as the kernel lets it; signals do not change that.
        let _ = self.process.kill();
    }
}

// More than a plugin waits for an instance; one that was killed cannot end its heir.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);
