//! Notices that something happens to the links of a network namespace (rtnetlink notifications).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nebula_cni_plugin::netlink;
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv};

/// Hears of links that come, go or change in the namespace it was made in.
#[derive(Debug)]
pub(crate) struct LinkWatch(OwnedFd);

impl LinkWatch {
    /// For the namespace of the calling thread; usable from any.
    pub(crate) fn new() -> io::Result<Self> {
        netlink::subscribe(libc::RTMGRP_LINK, 0).map(Self)
    }

    /// Whether something happened since the last call. What it was does not matter: the caller checks for itself.
    pub(crate) fn changed(&self) -> io::Result<bool> {
        // Longer messages are cut, which costs nothing here.
        let mut message = [0; 64];
        for taken in 0..MAX_EVENTS_PER_READ {
            match recv(self.0.as_raw_fd(), &mut message, MsgFlags::MSG_DONTWAIT) {
                // So many events that some were lost: one of them counts as well.
                Ok(_) | Err(Errno::ENOBUFS | Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(taken > 0),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }
}

impl AsFd for LinkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

// Processes in the namespace can cause events faster than they are read.
const MAX_EVENTS_PER_READ: usize = 64;
