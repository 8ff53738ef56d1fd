//! Closes the pod's tun without blocking: the last close of a tun takes about 20 ms in rcu_barrier, after the device
//! has left its namespace. Where the plugin provides a helper process (the heir), it closes the last descriptor.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use nebula_core::io::Tun;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};

use crate::linux::rtnetlink::Kernel;
use crate::overlay::link::interface_index;

/// Holds the device until it is removed.
pub(crate) struct PodDevice {
    tun: OwnedFd,
    index: u32,
    /// Connected in the pod's namespace, which this process can no longer enter.
    kernel: Kernel,
    /// Where the heir listens, once there is one.
    heir: PathBuf,
}

impl PodDevice {
    /// Of `tun`, which is in the namespace of the calling thread.
    pub(crate) fn hold(tun: &Tun, heir: PathBuf) -> io::Result<Self> {
        let index = interface_index(tun.name()).map_err(io::Error::other)?;
        Ok(Self { tun: tun.hold()?, index, kernel: Kernel::connect()?, heir })
    }

    /// Takes it away, and waits until it is gone from the namespace. Nobody else may hold it any more.
    ///
    /// # Errors
    /// There is no heir, so it was closed here; or the heir does not close it.
    pub(crate) fn remove(mut self) -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        let (files, heir) = ([self.tun.as_raw_fd()], UnixAddr::new(&self.heir)?);
        let message = [ControlMessage::ScmRights(&files)];
        sendmsg(socket.as_raw_fd(), &[IoSlice::new(&[0])], &message, MsgFlags::MSG_DONTWAIT, Some(&heir))?;
        drop(self.tun);
        for _ in 0..MAX_CHECKS {
            if !self.kernel.has_link(self.index)? {
                return Ok(());
            }
            sleep(CHECK_INTERVAL);
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

const CHECK_INTERVAL: Duration = Duration::from_millis(1);
// It takes two or three milliseconds; the supervisor kills this process after two seconds.
const MAX_CHECKS: u32 = 1000;
