//! UDP sockets: options, offload probing, address forms, and settings that may change while they are in use.

mod adopted;
mod discover_mtu;
pub(super) mod receive;
pub(super) mod send;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, getsockopt, setsockopt, socket, sockopt,
};

use self::discover_mtu::DiscoverMtu;

/// Settings of the underlay sockets.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SocketOptions {
    /// Receive buffer in bytes (forced); 0: system default.
    pub read_buffer: usize,
    /// Send buffer in bytes (forced); 0: system default.
    pub write_buffer: usize,
    /// UDP GSO and GRO.
    pub offloads: bool,
}

impl Default for SocketOptions {
    fn default() -> Self {
        Self { read_buffer: 8 << 20, write_buffer: 8 << 20, offloads: true }
    }
}

impl SocketOptions {
    /// Without the privilege to exceed the system's limit, gets as near to it as allowed. A smaller buffer only loses
    /// more of a burst.
    fn size_buffers(&self, socket: &impl AsFd) {
        if self.read_buffer > 0
            && setsockopt(socket, sockopt::RcvBufForce, &self.read_buffer).is_err()
            && let Err(errno) = setsockopt(socket, sockopt::RcvBuf, &self.read_buffer)
        {
            tracing::warn!(%errno, "the receive buffer of the UDP socket (SO_RCVBUF) stays as it is");
        }
        if self.write_buffer > 0
            && setsockopt(socket, sockopt::SndBufForce, &self.write_buffer).is_err()
            && let Err(errno) = setsockopt(socket, sockopt::SndBuf, &self.write_buffer)
        {
            tracing::warn!(%errno, "the send buffer of the UDP socket (SO_SNDBUF) stays as it is");
        }
    }
}

/// One underlay socket in the network namespace of the thread that bound it.
#[derive(Debug)]
pub struct UdpSocket {
    inner: std::net::UdpSocket,
    family: Family,
    // Cleared for good when the egress device turns out not to support it.
    gso: AtomicBool,
    gro: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

impl UdpSocket {
    /// Binds one socket (or `count` sharing the port). `::` serves both address families, or IPv4 where the kernel has
    /// no IPv6.
    ///
    /// # Errors
    /// Returns an error if the address is in use or permission is missing.
    pub fn bind(address: SocketAddr, count: usize, options: &SocketOptions) -> io::Result<Vec<Self>> {
        let mut sockets = Vec::new();
        let mut address = without_missing_v6(address);
        for _ in 0..count.max(1) {
            let socket = Self::bind_one(address, count > 1, options)
                .map_err(|source| io::Error::new(source.kind(), format!("cannot listen on UDP {address}: {source}")))?;
            // The kernel may have chosen the port; all sockets share it.
            address.set_port(socket.local_addr()?.port());
            sockets.push(socket);
        }
        Ok(sockets)
    }

    fn bind_one(address: SocketAddr, share_port: bool, options: &SocketOptions) -> io::Result<Self> {
        let family = if address.is_ipv4() { Family::V4 } else { Family::V6 };
        let domain = if family == Family::V4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let fd = socket(domain, SockType::Datagram, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
        if family == Family::V6 {
            setsockopt(&fd, sockopt::Ipv6V6Only, &false)?;
        }
        if share_port {
            setsockopt(&fd, sockopt::ReusePort, &true)?;
        }
        options.size_buffers(&fd);
        // Kernels before 4.18 (GSO) and 5.0 (GRO) do not know these.
        let gso = options.offloads && getsockopt(&fd, sockopt::UdpGsoSegment).is_ok();
        let gro = options.offloads && setsockopt(&fd, sockopt::UdpGroSegment, &true).is_ok();
        bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
        Ok(Self { inner: fd.into(), family, gso: AtomicBool::new(gso), gro })
    }

    /// Makes the socket ignore what ICMP errors say about paths, see [`ignore_path_errors`].
    ///
    /// # Errors
    /// Returns the system's error, as a rule because the kernel does not know the option.
    pub fn ignore_path_errors(&self, measures: bool) -> io::Result<()> {
        DiscoverMtu::ignore_errors(&self.inner, self.family == Family::V6, measures)
    }

    /// Bound address.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    /// Whether runs of datagrams are sent as one super-datagram, as far as is known.
    #[must_use]
    pub fn sends_runs(&self) -> bool {
        self.gso.load(Ordering::Relaxed)
    }

    /// Whether the kernel joins datagrams before they are received.
    #[must_use]
    pub fn receives_runs(&self) -> bool {
        self.gro
    }

    pub(super) fn stop_sending_runs(&self) {
        self.gso.store(false, Ordering::Relaxed);
    }

    /// Sends one datagram; if the system refuses it, it is lost, as on a wire.
    pub(super) fn send_one(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        let to = self.wire_address(to).ok_or_else(|| io::Error::from(io::ErrorKind::AddrNotAvailable))?;
        self.inner.send_to(datagram, to).map(|_| ())
    }

    /// Like [`UdpSocket::send_one`], but fails rather than let the datagram be fragmented, here or on its way.
    ///
    /// For the moment of the call this holds for what other threads send, too: a datagram of theirs that is longer
    /// than the path is known to carry is then lost on the way instead of being fragmented here.
    pub(super) fn send_whole(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        let before = DiscoverMtu::of(self, to)?;
        before.set(self, DiscoverMtu::PROBE)?;
        let sent = self.send_one(datagram, to);
        before.set(self, before.mode)?;
        sent
    }

    /// `address` in the form that this socket needs; `None` if it cannot reach that family.
    pub(super) fn wire_address(&self, address: SocketAddr) -> Option<SocketAddr> {
        match (self.family, address) {
            (Family::V4, SocketAddr::V4(_)) | (Family::V6, SocketAddr::V6(_)) => Some(address),
            (Family::V6, SocketAddr::V4(v4)) => {
                Some(SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0).into())
            }
            (Family::V4, SocketAddr::V6(v6)) => {
                v6.ip().to_ipv4_mapped().map(|v4| SocketAddr::new(v4.into(), v6.port()))
            }
        }
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

/// The address to bind to: IPv4's where `::` is wanted and there is no IPv6.
#[must_use]
pub fn without_missing_v6(mut address: SocketAddr) -> SocketAddr {
    if address.ip() == Ipv6Addr::UNSPECIFIED && lacks_v6() {
        tracing::warn!(%address, "the system gives no IPv6 socket, so this one has IPv4 only");
        address.set_ip(Ipv4Addr::UNSPECIFIED.into());
    }
    address
}

/// Whether the kernel has no IPv6, or a filter of system calls refuses its sockets.
fn lacks_v6() -> bool {
    let opened = socket(AddressFamily::Inet6, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None);
    matches!(opened, Err(Errno::EAFNOSUPPORT | Errno::EPERM | Errno::EACCES | Errno::ENOSYS))
}

/// Makes a UDP socket of this family ignore what ICMP errors say about the size of paths (`IP_PMTUDISC_OMIT`).
/// Anybody can forge one, and it makes the kernel cut every datagram into small pieces for ten minutes. Datagrams
/// that are too long for an IPv4 path are then fragmented by routers. In IPv6 they do not: the errors are ignored
/// there only if the program `measures` paths itself, see [`Config::path_mtu`](crate::Config::path_mtu).
///
/// # Errors
/// Returns the system's error, as a rule because the kernel does not know the option.
pub fn ignore_path_errors(socket: &impl AsFd, is_v6: bool, measures: bool) -> io::Result<()> {
    DiscoverMtu::ignore_errors(socket, is_v6, measures)
}

/// The address in the form that the rest of the program uses: IPv4-mapped addresses become IPv4.
pub(super) fn unmapped(ip: Ipv6Addr, port: u16, scope_id: u32) -> SocketAddr {
    match ip.to_ipv4_mapped() {
        Some(v4) => SocketAddr::new(v4.into(), port),
        None => SocketAddrV6::new(ip, port, 0, scope_id).into(),
    }
}

/// A second descriptor of an underlay socket, for its options. Using it does not disturb the packet path.
#[derive(Debug)]
pub struct SocketControl {
    fd: OwnedFd,
}

/// Memory of a socket in bytes, and datagrams dropped for lack of it, as the kernel counts them (`SO_MEMINFO`).
pub type SocketMemory = [(&'static str, u32); MEMORY_FIELDS.len()];

// In the order of `sk_meminfo` in the kernel's headers.
const MEMORY_FIELDS: [&str; 9] =
    ["rmem_alloc", "rcvbuf", "wmem_alloc", "sndbuf", "fwd_alloc", "wmem_queued", "optmem", "backlog", "drops"];

impl SocketControl {
    /// Duplicates the descriptor of a bound socket.
    ///
    /// # Errors
    /// Returns an error if no file descriptor is left.
    pub fn of(socket: &UdpSocket) -> io::Result<Self> {
        Ok(Self { fd: socket.as_fd().try_clone_to_owned()? })
    }

    /// Duplicates the descriptor again.
    ///
    /// # Errors
    /// Returns an error if no file descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()? })
    }

    /// Sets the receive buffer in bytes, past the system's limit where that is allowed.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn set_read_buffer(&self, bytes: usize) -> io::Result<()> {
        setsockopt(&self.fd, sockopt::RcvBufForce, &bytes)
            .or_else(|_| setsockopt(&self.fd, sockopt::RcvBuf, &bytes))?;
        Ok(())
    }

    /// Sets the send buffer in bytes, past the system's limit where that is allowed.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn set_write_buffer(&self, bytes: usize) -> io::Result<()> {
        setsockopt(&self.fd, sockopt::SndBufForce, &bytes)
            .or_else(|_| setsockopt(&self.fd, sockopt::SndBuf, &bytes))?;
        Ok(())
    }

    /// Sets the mark of everything sent, which routing rules may match; 0: none.
    ///
    /// # Errors
    /// Returns an error without CAP_NET_ADMIN.
    pub fn set_mark(&self, mark: u32) -> io::Result<()> {
        Ok(setsockopt(&self.fd, sockopt::Mark, &mark)?)
    }

    /// Memory use and drops; `None` on a kernel before 4.12.
    #[allow(unsafe_code, reason = "nix does not know this option")]
    #[must_use]
    pub fn memory(&self) -> Option<SocketMemory> {
        let mut values = [0_u32; MEMORY_FIELDS.len()];
        let mut len = libc::socklen_t::try_from(size_of_val(&values)).ok()?;
        // SAFETY: the kernel writes at most `len` bytes to an array of that size, and any bytes are valid numbers.
        let result = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_MEMINFO,
                values.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        (result == 0).then(|| std::array::from_fn(|at| (MEMORY_FIELDS[at], values[at])))
    }
}

// Missing in libc for this target.
const SO_MEMINFO: libc::c_int = 55;

#[cfg(test)]
mod tests;
