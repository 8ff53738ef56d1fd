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
    /// Ignores what ICMP errors say about the path, which anybody can forge; routers may fragment in IPv4, and the
    /// kernel fragments what is longer than the device allows.
    pub(super) const OMIT: libc::c_int = libc::IP_PMTUDISC_OMIT;
    /// The kernel's default: believes ICMP errors, and fragments what is longer than they say.
    pub(super) const WANT: libc::c_int = libc::IP_PMTUDISC_WANT;

    /// The options of a socket: of its own family, and of IPv4 if it serves both. They have the same values.
    fn all(socket: &impl AsFd, is_v6: bool) -> impl Iterator<Item = io::Result<Self>> {
        let v4 = (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER);
        let v6 = is_v6.then_some((libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER));
        let options = [v4].into_iter().chain(v6);
        options.map(|(level, option)| Self::read(socket, level, option)).collect::<Vec<_>>().into_iter()
    }

    /// Makes the socket ignore what ICMP errors say about paths, which one forged error would make ten times slower
    /// for ten minutes. In IPv6 nobody but this host fragments, so there it must know the size of each path itself;
    /// it `measures` them, or else believes the errors.
    pub(super) fn ignore_errors(socket: &impl AsFd, is_v6: bool, measures: bool) -> io::Result<()> {
        for option in Self::all(socket, is_v6) {
            let option = option?;
            let is_safe = measures || option.level == libc::IPPROTO_IP;
            option.set(socket, if is_safe { Self::OMIT } else { Self::WANT })?;
        }
        Ok(())
    }

    /// The option for datagrams to `to`, and its present value.
    pub(super) fn of(socket: &UdpSocket, to: SocketAddr) -> io::Result<Self> {
        // A socket for both families has the options of both, with the same values.
        let (level, option) = match to.ip().to_canonical().is_ipv4() {
            true => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
            false => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
        };
        Self::read(socket, level, option)
    }

    fn read(socket: &impl AsFd, level: libc::c_int, option: libc::c_int) -> io::Result<Self> {
        let mut mode: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to an integer of that size.
        let result = unsafe {
            libc::getsockopt(socket.as_fd().as_raw_fd(), level, option, (&raw mut mode).cast(), &raw mut len)
        };
        if result == 0 { Ok(Self { level, option, mode }) } else { Err(io::Error::last_os_error()) }
    }

    /// Gives the option another value.
    pub(super) fn set(self, socket: &impl AsFd, mode: libc::c_int) -> io::Result<()> {
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the kernel reads an integer of `len` bytes.
        let result = unsafe {
            libc::setsockopt(socket.as_fd().as_raw_fd(), self.level, self.option, (&raw const mode).cast(), len)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
