//! Receives datagrams, several per system call, joined by the kernel where it can (GRO).
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::mem::{size_of, zeroed};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};

use crate::forward::Received;
use crate::io::region::Region;
use crate::io::udp::send::is_forbidden;
use crate::io::udp::{UdpSocket, unmapped};

// The largest UDP payload, joined or not, fits.
const SLOT_BYTES: usize = 64 << 10;
const MAX_SLOTS: usize = 4;
// Datagrams joined to more than this on average fill a turn: the next receive takes only one, and the others wait in
// the socket.
const JOINED_BYTES: usize = 16 << 10;

/// One thread's receive slots. Uses one slot while traffic is light, so that its memory stays cached, and more under
/// load.
#[derive(Debug)]
pub(in crate::io) struct Receiver {
    memory: Region,
    received: Vec<Received>,
    slots: usize,
}

/// Room for the ancillary data of one slot: the segment size of a joined datagram.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; 64]);

impl Receiver {
    pub(in crate::io) fn new() -> io::Result<Self> {
        let received = Vec::with_capacity(MAX_SLOTS);
        Ok(Self { memory: Region::new(SLOT_BYTES * MAX_SLOTS)?, received, slots: 1 })
    }

    /// The receive buffer and the datagrams that the last [`Receiver::receive`] put there.
    pub(in crate::io) fn parts(&mut self) -> (&mut [u8], &[Received]) {
        (&mut self.memory, &self.received)
    }

    /// The receive buffer.
    pub(in crate::io) fn memory(&self) -> &[u8] {
        &self.memory
    }

    /// Releases memory that a burst touched.
    pub(in crate::io) fn release(&mut self) {
        self.memory.release();
    }

    /// Receives what waits in the socket. Returns `false` if nothing does.
    pub(in crate::io) fn receive(&mut self, socket: &UdpSocket) -> io::Result<bool> {
        self.received.clear();
        // SAFETY: all of these are plain data for which all zeroes is a value.
        let (mut names, mut slices, mut messages): (
            [libc::sockaddr_in6; MAX_SLOTS],
            [libc::iovec; MAX_SLOTS],
            [libc::mmsghdr; MAX_SLOTS],
        ) = unsafe { (zeroed(), zeroed(), zeroed()) };
        let mut controls = [Control([0; 64]); MAX_SLOTS];
        for (index, slot) in self.memory.chunks_exact_mut(SLOT_BYTES).enumerate() {
            slices[index] = libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: SLOT_BYTES };
            let header = &mut messages[index].msg_hdr;
            // sockaddr_in6 is the longer of the two address types that a UDP socket returns.
            header.msg_name = (&raw mut names[index]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_in6>() as libc::socklen_t;
            header.msg_iov = &raw mut slices[index];
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut controls[index]).cast();
            header.msg_controllen = size_of::<Control>() as _;
        }
        // SAFETY: the first `slots` headers point to names, slices, controls and slots that outlive the call, each with
        // its true length; the slots are disjoint parts of a region borrowed mutably.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_fd().as_raw_fd(),
                messages.as_mut_ptr(),
                self.slots as _,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let count = usize::try_from(count).or_else(|_| match io::Error::last_os_error() {
            error if is_forbidden(&error) => receive_one(socket, &mut messages[0]),
            error => Err(error),
        });
        let count = match count {
            Ok(count) => count,
            Err(error) => {
                self.slots = 1;
                return if is_passing(&error) { Ok(false) } else { Err(error) };
            }
        };
        for (index, message) in messages[..count].iter().enumerate() {
            let len = (message.msg_len as usize).min(SLOT_BYTES);
            let flags = message.msg_hdr.msg_flags;
            if len == 0 || flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
                continue;
            }
            let Some(from) = source(&names[index]) else { continue };
            let start = index * SLOT_BYTES;
            let segment_size = segment_size(&message.msg_hdr).filter(|&size| size > 0).unwrap_or(len).min(len);
            self.received.push(Received { from, range: start..start + len, segment_size });
        }
        let bytes: usize = self.received.iter().map(|slot| slot.range.len()).sum();
        self.slots = match count {
            _ if bytes >= count * JOINED_BYTES => 1,
            _ if count == self.slots => (count * 2).min(MAX_SLOTS),
            _ => count.max(1),
        };
        Ok(true)
    }
}

/// Receives one message, where the call for several is forbidden. Returns that it is one.
fn receive_one(socket: &UdpSocket, message: &mut libc::mmsghdr) -> io::Result<usize> {
    // SAFETY: the header points to a name, a slice, control data and a slot that outlive the call, each with its true
    // length.
    let len = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message.msg_hdr, libc::MSG_DONTWAIT) };
    message.msg_len = u32::try_from(len).map_err(|_| io::Error::last_os_error())?;
    Ok(1)
}

/// Errors that concern one peer or one moment, not the socket.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::EAGAIN
                | libc::EINTR
                | libc::ECONNREFUSED
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::ENETDOWN
                | libc::EMSGSIZE
                | libc::EPROTO
                | libc::ENOBUFS
                | libc::ENOMEM
        )
    )
}

fn source(name: &libc::sockaddr_in6) -> Option<SocketAddr> {
    match c_int::from(name.sin6_family) {
        libc::AF_INET6 => {
            Some(unmapped(Ipv6Addr::from(name.sin6_addr.s6_addr), u16::from_be(name.sin6_port), name.sin6_scope_id))
        }
        libc::AF_INET => {
            // SAFETY: the family says that the kernel wrote a sockaddr_in, which is shorter and needs no stricter
            // alignment.
            let name = unsafe { &*std::ptr::from_ref(name).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
            Some(SocketAddr::new(ip.into(), u16::from_be(name.sin_port)))
        }
        _ => None,
    }
}

/// Length of each datagram that was joined into this one.
fn segment_size(header: &libc::msghdr) -> Option<usize> {
    // SAFETY: the kernel left the control buffer and its length consistent; the macros stay inside it.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !message.is_null() {
        // SAFETY: not null, so it points to a control message inside the buffer, which is aligned for it.
        let this = unsafe { &*message };
        if this.cmsg_level == libc::SOL_UDP && this.cmsg_type == libc::UDP_GRO {
            // SAFETY: the data of this message is one int, without a promise of alignment.
            let size = unsafe { libc::CMSG_DATA(message).cast::<c_int>().read_unaligned() };
            return usize::try_from(size).ok();
        }
        // SAFETY: as for the first one.
        message = unsafe { libc::CMSG_NXTHDR(header, message) };
    }
    None
}
