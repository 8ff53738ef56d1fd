//! The tun device of a pod, which ends with its instance.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use nebula_linux::errno;
use nebula_linux::rtnetlink::Kernel;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};

use crate::overlay::link::interface_index;

/// Holds the device until it is removed.
pub(crate) struct PodDevice {
    tun: OwnedFd,
    index: u32,
    /// Connected in the pod's namespace, which this process can no longer enter.
    kernel: Kernel,
    /// Socket of the heir, the process that closes the device after this one; it need not exist.
    heir: PathBuf,
}

impl PodDevice {
    /// Holds the device with this name in the namespace of the calling thread, by one of its queues.
    pub(crate) fn hold(name: &str, tun: OwnedFd, heir: PathBuf) -> io::Result<Self> {
        let index = interface_index(name).map_err(io::Error::other)?;
        Ok(Self { tun, index, kernel: Kernel::connect()?, heir })
    }

    /// Hands the device to the heir, or closes it here if there is none, and waits until it is gone from the namespace.
    /// Nobody else may hold it any more.
    ///
    /// # Errors
    /// Returns an error if somebody else does not close it.
    pub(crate) fn remove(mut self) -> io::Result<()> {
        if let Err(error) = self.hand_over() {
            tracing::debug!(error = errno::text(&error), "Nobody else closes the tun device");
        }
        drop(self.tun);
        for _ in 0..MAX_CHECKS {
            if !self.kernel.has_link(self.index)? {
                return Ok(());
            }
            sleep(CHECK_INTERVAL);
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn hand_over(&self) -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        let (files, heir) = ([self.tun.as_raw_fd()], UnixAddr::new(&self.heir)?);
        let message = [ControlMessage::ScmRights(&files)];
        sendmsg(socket.as_raw_fd(), &[IoSlice::new(&[0])], &message, MsgFlags::MSG_DONTWAIT, Some(&heir))?;
        Ok(())
    }
}

const CHECK_INTERVAL: Duration = Duration::from_millis(1);
// It takes two or three milliseconds; the supervisor kills this process after two seconds.
const MAX_CHECKS: u32 = 1000;
