//! The parts that all netlink protocols share: header, attributes and the kernel's acknowledgements (netlink(7)).

pub mod nftables;
pub mod policy;
pub mod route;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket,
    sockopt,
};

/// Opens a socket that sends to the kernel and receives from nobody else.
///
/// # Errors
/// Returns the kernel's error.
pub fn connect(protocol: SockProtocol) -> io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    nix::sys::socket::connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    Ok(socket)
}

/// Opens a socket that receives the notifications of rtnetlink groups. `buffer` is the size of its receive buffer in
/// bytes, 0 for the system's default.
///
/// # Errors
/// Returns the kernel's error.
pub fn subscribe(groups: i32, buffer: usize) -> io::Result<OwnedFd> {
    let route = SockProtocol::NetlinkRoute;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, route)?;
    if buffer > 0 && setsockopt(&socket, sockopt::RcvBufForce, &buffer).is_err() {
        setsockopt(&socket, sockopt::RcvBuf, &buffer)?;
    }
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups.cast_unsigned()))?;
    Ok(socket)
}

/// Appends a struct nlmsghdr and `body`. NLM_F_REQUEST is added to `flags`.
pub fn push_message(out: &mut Vec<u8>, kind: u16, flags: i32, sequence: u32, body: &[u8]) {
    out.extend_from_slice(&((HEADER_LENGTH + body.len()) as u32).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(&((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    out.extend_from_slice(&sequence.to_ne_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(body);
}

/// Appends a struct nlattr and its value, padded to a multiple of four bytes.
pub fn push_attribute(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    out.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Encodes an address as attributes hold it.
#[must_use]
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Decodes an address of either family, as attributes hold it.
#[must_use]
pub fn address(octets: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(octets).ok().map(IpAddr::from);
    v4.or_else(|| <[u8; 16]>::try_from(octets).ok().map(IpAddr::from))
}

/// The outcomes of requests, by sequence number. Other messages of the kernel are skipped.
pub fn answers(mut bytes: &[u8]) -> impl Iterator<Item = (u32, io::Result<()>)> {
    std::iter::from_fn(move || {
        while let Some((head, rest)) = bytes.split_first_chunk::<HEADER_LENGTH>() {
            let [a, b, c, d, kind, more, _, _, e, f, g, h, ..] = *head;
            let len = u32::from_ne_bytes([a, b, c, d]) as usize;
            bytes = bytes.get(len.max(HEADER_LENGTH).next_multiple_of(4)..).unwrap_or_default();
            if i32::from(u16::from_ne_bytes([kind, more])) == libc::NLMSG_ERROR
                && let Some((code, _)) = rest.split_first_chunk()
            {
                let outcome = match i32::from_ne_bytes(*code) {
                    0 => Ok(()),
                    code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
                };
                return Some((u32::from_ne_bytes([e, f, g, h]), outcome));
            }
        }
        None
    })
}

/// Sends a request to rtnetlink on a new socket and returns the bodies of the replies; see [`dump`].
///
/// # Errors
/// The same as [`dump`].
pub fn ask_route(kind: u16, flags: i32, body: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut request = Vec::new();
    push_message(&mut request, kind, flags | libc::NLM_F_ACK, 1, body);
    dump(&connect(SockProtocol::NetlinkRoute)?, &request)
}

/// Sends one request and collects the bodies of the replies until the kernel reports the end.
///
/// # Errors
/// Returns the kernel's error, or an error if there are more than 100000 replies.
pub fn dump(socket: &OwnedFd, request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    send(socket.as_raw_fd(), request, MsgFlags::empty())?;
    let mut bodies = Vec::new();
    let mut answer = vec![0; 64 << 10];
    loop {
        let len = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        for Message { kind, body, .. } in messages(&answer[..len]) {
            match i32::from(kind) {
                libc::NLMSG_DONE => return Ok(bodies),
                libc::NLMSG_ERROR => {
                    let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                    return if code == 0 {
                        Ok(bodies)
                    } else {
                        Err(io::Error::from_raw_os_error(code.saturating_neg()))
                    };
                }
                _ if bodies.len() < MAX_MESSAGES => bodies.push(body.to_vec()),
                _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "too many answers")),
            }
        }
    }
}

/// One message from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// nlmsg_type.
    pub kind: u16,
    /// nlmsg_flags.
    pub flags: u16,
    /// nlmsg_pid: the socket that asked for what this tells of, most often by the id of its process. 0: the kernel.
    pub port: u32,
    /// The bytes after the header.
    pub body: &'a [u8],
}

/// Iterates over the complete messages.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let (head, _) = bytes.split_first_chunk::<HEADER_LENGTH>()?;
        let [a, b, c, d, kind, more, flags, more_flags, _, _, _, _, e, f, g, h] = *head;
        let len = u32::from_ne_bytes([a, b, c, d]) as usize;
        let body = bytes.get(HEADER_LENGTH..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        let (kind, flags) = (u16::from_ne_bytes([kind, more]), u16::from_ne_bytes([flags, more_flags]));
        Some(Message { kind, flags, port: u32::from_ne_bytes([e, f, g, h]), body })
    })
}

/// Iterates over the complete attributes; yields the type without its flag bits, and the value.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (head, _) = bytes.split_first_chunk::<4>()?;
        let [a, b, kind, more] = *head;
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([kind, more]) & ATTRIBUTE_KIND_MASK, value))
    })
}

/// The first attribute of this type.
#[must_use]
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find_map(|(found, value)| (found == kind).then_some(value))
}

/// The first attribute of this type as text, without the terminating zero byte.
#[must_use]
pub fn text(bytes: &[u8], kind: u16) -> Option<String> {
    let value = attribute(bytes, kind)?;
    String::from_utf8(value.strip_suffix(&[0]).unwrap_or(value).to_vec()).ok()
}

// NLA_TYPE_MASK.
const ATTRIBUTE_KIND_MASK: u16 = 0x3fff;
// More links or tables than any node has.
const MAX_MESSAGES: usize = 100_000;
// struct nlmsghdr.
const HEADER_LENGTH: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: i32, sequence: u32, code: i32) -> Vec<u8> {
        let mut bytes = Vec::new();
        push_message(&mut bytes, kind as u16, 0, sequence, &[&code.to_ne_bytes()[..], &[0; 16]].concat());
        bytes
    }

    fn codes(bytes: &[u8]) -> Vec<(u32, Option<i32>)> {
        answers(bytes).map(|(sequence, outcome)| (sequence, outcome.err().and_then(|e| e.raw_os_error()))).collect()
    }

    #[test]
    fn answers_are_read_to_the_last_whole_one_and_other_news_are_passed_over() {
        let bytes = [answer(2, 7, 0), answer(16, 8, -1), answer(2, 9, -17)].concat();
        assert_eq!(codes(&bytes), [(7, None), (9, Some(17))]);
        assert_eq!(codes(&bytes[..91]), [(7, None)], "cut short");
        assert_eq!(codes(&[0; 16]), [], "a length of nothing ends");
        assert_eq!(codes(&answer(2, 1, i32::MIN)), [(1, Some(i32::MAX))]);
    }

    #[test]
    fn messages_and_attributes_that_are_cut_short_end_the_reading() {
        let bytes = [answer(2, 7, 0), answer(16, 8, -1)].concat();
        assert_eq!(
            messages(&bytes).map(|message| (message.kind, message.body.len())).collect::<Vec<_>>(),
            [(2, 20), (16, 20)]
        );
        assert_eq!(messages(&bytes[..50]).count(), 1);
        assert_eq!(messages(&[0; 16]).count(), 0);
        let mut out = Vec::new();
        push_attribute(&mut out, 3, b"eth0\0");
        push_attribute(&mut out, 5 | 0x8000, &[1, 2]);
        assert_eq!(attribute(&out, 5), Some(&[1, 2][..]));
        assert_eq!(text(&out, 3).as_deref(), Some("eth0"));
        assert_eq!(attribute(&out[..13], 5), None);
        assert_eq!(attributes(&[0; 8]).count(), 0);
    }

    #[test]
    fn attributes_begin_at_multiples_of_four() {
        let mut out = Vec::new();
        push_attribute(&mut out, 3, b"eth0\0");
        assert_eq!(out, [9, 0, 3, 0, b'e', b't', b'h', b'0', 0, 0, 0, 0]);
    }
}
