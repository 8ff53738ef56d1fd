//! Whether the kernel fragments datagrams, and lets routers do it (`IP_MTU_DISCOVER`).
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};

use crate::io::udp::UdpSocket;

/// The option of a socket that concerns one address family.
#[derive(Debug, Clone, Copy)]
pub(super) struct DiscoverMtu {
    level: libc::c_int,
    option: libc::c_int,
    pub(super) mode: libc::c_int,
}

impl DiscoverMtu {
    /// Sends every datagram as it is, with the DF bit, and refuses what is longer than the device allows.
    pub(super) const PROBE: libc::c_int = libc::IP_PMTUDISC_PROBE;

    /// The option for datagrams to `to`, and its present value.
    pub(super) fn of(socket: &UdpSocket, to: SocketAddr) -> io::Result<Self> {
        // A socket for both families has the options of both, with the same values.
        let (level, option) = match to.ip().to_canonical().is_ipv4() {
            true => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
            false => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
        };
        let mut mode: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to an integer of that size.
        let result = unsafe {
            libc::getsockopt(socket.as_fd().as_raw_fd(), level, option, (&raw mut mode).cast(), &raw mut len)
        };
        if result == 0 { Ok(Self { level, option, mode }) } else { Err(io::Error::last_os_error()) }
    }

    /// Gives the option another value.
    pub(super) fn set(self, socket: &UdpSocket, mode: libc::c_int) -> io::Result<()> {
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the kernel reads an integer of `len` bytes.
        let result = unsafe {
            libc::setsockopt(socket.as_fd().as_raw_fd(), self.level, self.option, (&raw const mode).cast(), len)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
