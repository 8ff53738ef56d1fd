//! What messages of every netlink protocol have in common: header, attributes, the kernel's answers (netlink(7)).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc;
use nix::sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, socket};

/// A socket that speaks with the kernel and hears nobody else.
pub(crate) fn connect(protocol: SockProtocol) -> io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    nix::sys::socket::connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    Ok(socket)
}

/// struct nlmsghdr, then `body`. That it is a request need not be among the flags.
pub(crate) fn push_message(out: &mut Vec<u8>, kind: u16, flags: i32, sequence: u32, body: &[u8]) {
    out.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(&((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    out.extend_from_slice(&sequence.to_ne_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(body);
}

/// struct nlattr; what follows it begins at a multiple of four.
pub(crate) fn push_attribute(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    out.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// An address as attributes hold it.
pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// What became of requests, by their sequence numbers. Whatever else the kernel says is passed over.
pub(crate) fn answers(mut bytes: &[u8]) -> impl Iterator<Item = (u32, io::Result<()>)> {
    std::iter::from_fn(move || {
        while let Some((head, rest)) = bytes.split_first_chunk::<HEADER>() {
            let [a, b, c, d, kind, more, _, _, e, f, g, h, ..] = *head;
            let len = u32::from_ne_bytes([a, b, c, d]) as usize;
            bytes = bytes.get(len.max(HEADER).next_multiple_of(4)..).unwrap_or_default();
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

// struct nlmsghdr.
const HEADER: usize = 16;

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
    fn attributes_begin_at_multiples_of_four() {
        let mut out = Vec::new();
        push_attribute(&mut out, 3, b"eth0\0");
        assert_eq!(out, [9, 0, 3, 0, b'e', b't', b'h', b'0', 0, 0, 0, 0]);
    }
}
