//! Notices that something happens to the links of a network namespace (rtnetlink notifications).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket};

/// Hears of links that come, go or change in the namespace it was made in.
#[derive(Debug)]
pub(crate) struct LinkWatch(OwnedFd);

impl LinkWatch {
    /// For the namespace of the calling thread; usable from any.
    pub(crate) fn new() -> io::Result<Self> {
        let route = SockProtocol::NetlinkRoute;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, route)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, libc::RTMGRP_LINK as u32))?;
        Ok(Self(socket))
    }

    /// Waits for the next event. What it says does not matter: whoever waits looks for itself.
    pub(crate) fn wait(&self) -> io::Result<()> {
        // Longer messages are cut, which costs nothing here.
        let mut message = [0; 64];
        loop {
            match recv(self.0.as_raw_fd(), &mut message, MsgFlags::empty()) {
                // So many events that some were lost: one of them counts as well.
                Ok(_) | Err(Errno::ENOBUFS) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
