//! The UDP socket on the underlay, with several datagrams per system call where the kernel can (UDP GSO and GRO).

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::AsRawFd;

use nebula_core::forward::Received;
use nebula_core::io::{ignore_path_errors, interface_addresses};
use nebula_core::lighthouse::LocalAddress;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, SockaddrIn6, SockaddrLike, SockaddrStorage, getsockopt,
    recvmsg, sendmsg, setsockopt, sockopt,
};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Longest result of one receive call.
pub(crate) const RECEIVE_BUFFER: usize = 65_535;
/// Longest message of one send call, and the most datagrams in it.
const MAX_RUN_BYTES: usize = 65_000;
const MAX_RUN: usize = 64;
/// Wanted size of the kernel's buffers: what arrives while other work is done.
const KERNEL_BUFFER: usize = 4 << 20;

/// A socket that is read and written without waiting.
#[derive(Debug)]
pub(crate) struct Socket {
    socket: UdpSocket,
    v6: bool,
    runs: bool,
}

impl Socket {
    pub(crate) fn new(socket: std::net::UdpSocket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let v6 = socket.local_addr()?.is_ipv6();
        // As far as the system allows; what is lost is sent again.
        if setsockopt(&socket, sockopt::RcvBufForce, &KERNEL_BUFFER).is_err() {
            let _ = setsockopt(&socket, sockopt::RcvBuf, &KERNEL_BUFFER);
        }
        let _ = setsockopt(&socket, sockopt::UdpGroSegment, &true);
        // Without it, the kernel obeys ICMP errors about the size of paths, as before.
        let _ = ignore_path_errors(&socket, v6, true);
        let runs = getsockopt(&socket, sockopt::UdpGsoSegment).is_ok();
        Ok(Self { socket: UdpSocket::from_std(socket)?, v6, runs })
    }

    pub(crate) fn port(&self) -> io::Result<u16> {
        Ok(self.socket.local_addr()?.port())
    }

    /// Addresses of the system's interfaces at which this socket receives: none if it is bound to one address.
    pub(crate) fn interface_addresses(&self) -> Vec<LocalAddress> {
        if !self.socket.local_addr().is_ok_and(|bound| bound.ip().is_unspecified()) {
            return Vec::new();
        }
        let mut addresses = interface_addresses().unwrap_or_default();
        addresses.retain(|local| self.v6 || local.address.is_ipv4());
        addresses
    }

    pub(crate) async fn readable(&self) -> io::Result<()> {
        self.socket.readable().await
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        self.socket.writable().await
    }

    /// Receives datagrams of one source; `None` if there are none now.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<Received>> {
        let received = self.socket.try_io(Interest::READABLE, || {
            let mut space = nix::cmsg_space!(i32);
            let mut slices = [IoSliceMut::new(buffer)];
            let fd = self.socket.as_raw_fd();
            let message = recvmsg::<SockaddrStorage>(fd, &mut slices, Some(&mut space), MsgFlags::MSG_DONTWAIT)?;
            let size = message.cmsgs()?.find_map(|control| match control {
                ControlMessageOwned::UdpGroSegments(size) => usize::try_from(size).ok(),
                _ => None,
            });
            let len = message.bytes;
            Ok((message.address.and_then(to_address), len, size))
        });
        match received {
            Ok((Some(from), len, size)) => {
                let segment_size = size.filter(|size| *size > 0).unwrap_or(len).max(1);
                Ok(Some(Received { from, range: 0..len, segment_size }))
            }
            Ok((None, ..)) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends datagrams of `size` bytes (the last one may be shorter). Returns the number of bytes that were sent,
    /// less if the kernel's buffer is full. What cannot be sent at all counts as sent, for it is lost.
    pub(crate) fn send(&mut self, to: SocketAddr, bytes: &[u8], size: usize) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            let per_call = if self.runs { (MAX_RUN_BYTES / size).clamp(1, MAX_RUN) } else { 1 };
            let part = &bytes[done..bytes.len().min(done + per_call * size)];
            match self.send_run(to, part, size) {
                Ok(()) => done += part.len(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return done,
                // The device cannot, or the path takes no datagrams of that size in a run: one by one the kernel may
                // cut them.
                Err(error) if part.len() > size && matches!(error.raw_os_error(), Some(EIO | EMSGSIZE | EINVAL)) => {
                    self.runs = false;
                }
                Err(_) => done += part.len(),
            }
        }
        done
    }

    fn send_run(&self, to: SocketAddr, bytes: &[u8], size: usize) -> io::Result<()> {
        let segment = u16::try_from(size).unwrap_or(u16::MAX);
        let control = [ControlMessage::UdpGsoSegments(&segment)];
        let control = if bytes.len() > size { &control[..] } else { &[] };
        let slices = [IoSlice::new(bytes)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let fd = self.socket.as_raw_fd();
        self.socket.try_io(Interest::WRITABLE, || {
            match to {
                SocketAddr::V4(v4) if !self.v6 => send(fd, &slices, control, flags, &SockaddrIn::from(v4))?,
                SocketAddr::V4(v4) => {
                    let mapped = SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0);
                    send(fd, &slices, control, flags, &SockaddrIn6::from(mapped))?;
                }
                SocketAddr::V6(v6) => send(fd, &slices, control, flags, &SockaddrIn6::from(v6))?,
            }
            Ok(())
        })
    }
}

const EIO: i32 = nix::errno::Errno::EIO as i32;
const EMSGSIZE: i32 = nix::errno::Errno::EMSGSIZE as i32;
const EINVAL: i32 = nix::errno::Errno::EINVAL as i32;

fn send<A: SockaddrLike>(
    fd: i32,
    slices: &[IoSlice<'_>],
    control: &[ControlMessage<'_>],
    flags: MsgFlags,
    to: &A,
) -> nix::Result<()> {
    sendmsg(fd, slices, control, flags, Some(to)).map(drop)
}

fn to_address(address: SockaddrStorage) -> Option<SocketAddr> {
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(SocketAddr::new(IpAddr::V4(v4.ip()), v4.port()));
    }
    let v6 = address.as_sockaddr_in6()?;
    Some(SocketAddr::new(IpAddr::V6(v6.ip()).to_canonical(), v6.port()))
}
