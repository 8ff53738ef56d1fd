//! Sends sealed runs: many per system call, each as one super-datagram where the path allows it (GSO).
//!
//! Fallbacks, in order: super-datagrams; single datagrams for this run (path MTU); single datagrams for the socket
//! (device without checksum offload).
#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, zeroed};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use crate::forward::Run;
use crate::io::poll::writable_within;
use crate::io::udp::UdpSocket;

// Below the 65,507 bytes that an IPv4 datagram can carry, with room for IP options.
const MAX_MESSAGE_BYTES: usize = 65_000;
const MESSAGES_PER_CALL: usize = 32;

// A full send buffer drains in microseconds; one that does not is a stuck device.
const MAX_BUFFER_WAIT: Duration = Duration::from_millis(5);

/// How many datagrams were lost on sending, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::io) struct Lost {
    /// The send buffer or the device's queue stayed full.
    pub(in crate::io) full: u64,
    /// The system refused this destination.
    pub(in crate::io) refused: u64,
}

/// One thread's scratch space for sending.
#[derive(Debug)]
pub(in crate::io) struct Sender {
    messages: Vec<Message>,
    max_segments: usize,
}

/// Part of a run that is sent as one message.
#[derive(Debug, Clone)]
struct Message {
    to: SocketAddr,
    range: Range<usize>,
    segment_size: usize,
}

impl Message {
    fn datagrams(&self) -> u64 {
        self.range.len().div_ceil(self.segment_size.max(1)) as u64
    }

    fn is_run(&self) -> bool {
        self.range.len() > self.segment_size
    }
}

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL_LEN]);

// SAFETY: computes a length from a length.
const CONTROL_LEN: usize = unsafe { libc::CMSG_SPACE(size_of::<u16>() as u32) } as usize;

impl Sender {
    pub(in crate::io) fn new() -> Self {
        Self::with_max_segments(max_segments())
    }

    pub(in crate::io) fn with_max_segments(max_segments: usize) -> Self {
        Self { messages: Vec::new(), max_segments }
    }

    /// Maximum number of datagrams of a run that this socket sends as one message.
    pub(in crate::io) fn segments(&self, socket: &UdpSocket) -> usize {
        if socket.sends_runs() { self.max_segments } else { 1 }
    }

    /// Sends all `runs`, whose bytes are in `arena`. Datagrams that cannot be sent are lost, as on a wire, and counted.
    pub(in crate::io) fn send(&mut self, socket: &UdpSocket, arena: &[u8], runs: &[Run]) -> Lost {
        self.send_by(socket, arena, runs, |messages| send_batch(socket, arena, messages))
    }

    /// `send` sends messages from the first on and returns how many were sent, or why the first was not.
    fn send_by(
        &mut self,
        socket: &UdpSocket,
        arena: &[u8],
        runs: &[Run],
        send: impl FnMut(&[Message]) -> io::Result<usize>,
    ) -> Lost {
        self.messages.clear();
        let mut lost = Lost::default();
        for run in runs {
            if run.segment_size == 0 || arena.get(run.range.clone()).is_none() {
                continue;
            }
            let Some(to) = socket.wire_address(run.to) else {
                lost.refused += run.range.len().div_ceil(run.segment_size) as u64;
                continue;
            };
            let per_message = (MAX_MESSAGE_BYTES / run.segment_size).clamp(1, self.segments(socket));
            cut(&mut self.messages, to, run.range.clone(), run.segment_size, per_message);
        }
        self.flush(socket, &mut lost, send);
        lost
    }

    fn flush(&mut self, socket: &UdpSocket, lost: &mut Lost, mut send: impl FnMut(&[Message]) -> io::Result<usize>) {
        let mut at = 0;
        while at < self.messages.len() {
            let end = (at + MESSAGES_PER_CALL).min(self.messages.len());
            let error = match send(&self.messages[at..end]) {
                Ok(sent) => {
                    at += sent;
                    continue;
                }
                Err(error) => error,
            };
            let failed = self.messages[at].clone();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // The device cannot compute checksums for super-datagrams, so none of this socket's can be sent.
                Some(libc::EIO) if failed.is_run() => {
                    socket.stop_sending_runs();
                    let rest = self.messages.split_off(at);
                    for message in rest {
                        cut(&mut self.messages, message.to, message.range, message.segment_size, 1);
                    }
                }
                // Larger than the path MTU. If they are sent singly, the kernel can fragment them.
                Some(libc::EMSGSIZE | libc::EINVAL) if failed.is_run() => {
                    let rest = self.messages.split_off(at + 1);
                    self.messages.truncate(at);
                    cut(&mut self.messages, failed.to, failed.range, failed.segment_size, 1);
                    self.messages.extend(rest);
                }
                Some(libc::EAGAIN) if writable_within(socket, MAX_BUFFER_WAIT) => {}
                Some(libc::EAGAIN) => {
                    lost.full += self.messages[at..].iter().map(Message::datagrams).sum::<u64>();
                    return;
                }
                Some(libc::ENOBUFS | libc::ENOMEM) => {
                    lost.full += failed.datagrams();
                    at += 1;
                }
                // No route, a filter's verdict, an ICMP error for an earlier datagram: this concerns only this
                // destination.
                _ => {
                    lost.refused += failed.datagrams();
                    at += 1;
                }
            }
        }
    }
}

/// Cuts a run into messages of at most `per_message` datagrams.
fn cut(messages: &mut Vec<Message>, to: SocketAddr, range: Range<usize>, segment_size: usize, per_message: usize) {
    let step = segment_size * per_message;
    let mut start = range.start;
    while start < range.end {
        let end = (start + step).min(range.end);
        messages.push(Message { to, range: start..end, segment_size });
        start = end;
    }
}

/// One sendmmsg. Returns how many messages were sent (at least one), or why the first was not.
fn send_batch(socket: &UdpSocket, arena: &[u8], messages: &[Message]) -> io::Result<usize> {
    // SAFETY: all of these are plain data for which all zeroes is a value.
    let (mut names, mut slices, mut headers): (
        [libc::sockaddr_in6; MESSAGES_PER_CALL],
        [libc::iovec; MESSAGES_PER_CALL],
        [libc::mmsghdr; MESSAGES_PER_CALL],
    ) = unsafe { (zeroed(), zeroed(), zeroed()) };
    let mut controls = [Control([0; CONTROL_LEN]); MESSAGES_PER_CALL];
    let messages = &messages[..messages.len().min(MESSAGES_PER_CALL)];
    for (index, message) in messages.iter().enumerate() {
        let bytes = &arena[message.range.clone()];
        slices[index] = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let header = &mut headers[index].msg_hdr;
        header.msg_name = (&raw mut names[index]).cast();
        header.msg_namelen = write_name(&mut names[index], message.to);
        header.msg_iov = &raw mut slices[index];
        header.msg_iovlen = 1;
        if message.is_run() {
            header.msg_control = (&raw mut controls[index]).cast();
            header.msg_controllen = CONTROL_LEN as _;
            write_segment_size(header, message.segment_size as u16);
        }
    }
    // SAFETY: the first `messages.len()` headers point to names, slices, controls and arena bytes that outlive the
    // call, each with its true length; the kernel only reads them.
    let sent = unsafe {
        libc::sendmmsg(
            socket.as_fd().as_raw_fd(),
            headers.as_mut_ptr(),
            messages.len() as _,
            (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
        )
    };
    usize::try_from(sent).or_else(|_| match io::Error::last_os_error() {
        error if is_forbidden(&error) => {
            // SAFETY: the first header, as above.
            let sent = unsafe {
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const headers[0].msg_hdr, flags)
            };
            if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(1) }
        }
        error => Err(error),
    })
}

/// Whether a filter of system calls may have refused the call for several messages, as those of old container runtimes
/// do. The call for one message then says what the matter is.
pub(super) fn is_forbidden(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM))
}

fn write_segment_size(header: &libc::msghdr, size: u16) {
    // SAFETY: the header has a control buffer of CONTROL_LEN aligned bytes, which holds exactly one message with a u16.
    unsafe {
        let message = libc::CMSG_FIRSTHDR(header);
        (*message).cmsg_level = libc::SOL_UDP;
        (*message).cmsg_type = libc::UDP_SEGMENT;
        (*message).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as _;
        libc::CMSG_DATA(message).cast::<u16>().write_unaligned(size);
    }
}

fn write_name(name: &mut libc::sockaddr_in6, to: SocketAddr) -> libc::socklen_t {
    match to {
        SocketAddr::V6(v6) => {
            name.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            name.sin6_port = v6.port().to_be();
            name.sin6_addr.s6_addr = v6.ip().octets();
            name.sin6_scope_id = v6.scope_id();
            size_of::<libc::sockaddr_in6>() as libc::socklen_t
        }
        SocketAddr::V4(v4) => {
            // SAFETY: sockaddr_in is shorter than sockaddr_in6 and needs no stricter alignment; any bytes are a value
            // of it.
            let name = unsafe { &mut *std::ptr::from_mut(name).cast::<libc::sockaddr_in>() };
            name.sin_family = libc::AF_INET as libc::sa_family_t;
            name.sin_port = v4.port().to_be();
            name.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            size_of::<libc::sockaddr_in>() as libc::socklen_t
        }
    }
}

/// Maximum number of datagrams in a super-datagram: the kernel's limit was doubled in 6.9, and cannot be queried. One
/// less than the limit, because a run's last datagram may be followed by a shorter one.
fn max_segments() -> usize {
    // SAFETY: utsname is plain byte arrays; the kernel fills them with terminated strings.
    let release = unsafe {
        let mut name: libc::utsname = zeroed();
        if libc::uname(&raw mut name) != 0 {
            return 63;
        }
        name.release
    };
    let release: Vec<u8> = release.iter().map(|&byte| byte.to_ne_bytes()[0]).take_while(|&byte| byte != 0).collect();
    if kernel_version(&release) >= (6, 9) { 127 } else { 63 }
}

fn kernel_version(release: &[u8]) -> (u32, u32) {
    let mut numbers = release
        .split(|byte| !byte.is_ascii_digit())
        .map(|digits| std::str::from_utf8(digits).ok().and_then(|digits| digits.parse::<u32>().ok()).unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
#[path = "send_tests.rs"]
mod tests;
