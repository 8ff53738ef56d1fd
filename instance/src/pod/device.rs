//! The tun device of a pod: its end need not wait for the kernel. Who closes a tun last waits there for some 20 ms after the
//! device is gone from its namespace, so an heir does that where the plugin provides one.

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

/// Keeps the device until it is to go.
pub(crate) struct PodDevice {
    tun: OwnedFd,
    index: u32,
    /// Asks in the pod's namespace, where nobody gets to any more.
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
        for _ in 0..LOOKS {
            if !self.kernel.has_link(self.index)? {
                return Ok(());
            }
            sleep(INTERVAL);
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

const INTERVAL: Duration = Duration::from_millis(1);
// It takes two or three; whoever ends this process loses patience after two seconds.
const LOOKS: u32 = 1000;
