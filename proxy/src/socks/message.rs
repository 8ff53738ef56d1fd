//! The messages of SOCKS5, without IO.
//!
//! Parsers return `None` if more bytes are needed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::target::{Host, Target};

/// Longest message of a client, in bytes: user and password of 255 bytes each.
pub const MAX_MESSAGE: usize = 513;
/// Longest header of a datagram, in bytes: one with a name.
pub const MAX_DATAGRAM_HEADER: usize = 262;

const VERSION: u8 = 5;
const LOGIN_VERSION: u8 = 1;
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// How a client may show who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Method {
    /// Not at all.
    None = 0,
    /// By name and password.
    Password = 2,
    /// None of those that it offers.
    Unacceptable = 0xff,
}

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// A TCP connection.
    Connect,
    /// A port for UDP.
    Associate,
    /// Something else: BIND, or what the RFC does not have.
    Other,
}

/// The request of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What it wants.
    pub command: Command,
    /// Where to; `None`: an address of a type that the RFC does not have.
    pub target: Option<Target>,
}

/// The answer to a request (RFC 1928 section 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Reply {
    /// It worked.
    Succeeded = 0,
    /// Anything else.
    Failure = 1,
    /// The target is outside of the overlay.
    NotAllowed = 2,
    /// The peer or its name cannot be found.
    HostUnreachable = 4,
    /// The peer refused the connection.
    Refused = 5,
    /// BIND, or an unknown command.
    CommandNotSupported = 7,
    /// An unknown type of address.
    AddressNotSupported = 8,
}

/// Bytes that are not SOCKS5.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not SOCKS version 5")]
pub struct Malformed;

/// The methods that a client offers.
///
/// # Errors
/// Returns an error if it speaks something else.
pub fn parse_greeting(bytes: &[u8]) -> Result<Option<(Vec<u8>, usize)>, Malformed> {
    if bytes.first().is_some_and(|version| *version != VERSION) {
        return Err(Malformed);
    }
    let methods = bytes.get(1).and_then(|count| bytes.get(2..2 + usize::from(*count)));
    Ok(methods.map(|methods| (methods.to_vec(), 2 + methods.len())))
}

/// Reads a name and a password, which are not kept.
///
/// # Errors
/// Returns an error if it is something else.
pub fn parse_login<T>(bytes: &[u8], check: impl Fn(&[u8], &[u8]) -> T) -> Result<Option<(T, usize)>, Malformed> {
    if bytes.first().is_some_and(|version| *version != LOGIN_VERSION) {
        return Err(Malformed);
    }
    let Some((name, rest)) = bytes.get(1..).and_then(counted) else { return Ok(None) };
    let Some((password, _)) = counted(rest) else { return Ok(None) };
    Ok(Some((check(name, password), 3 + name.len() + password.len())))
}

/// Splits off bytes with their number in front.
fn counted(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (count, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(*count))
}

/// Reads a request.
///
/// # Errors
/// Returns an error if it is something else, or names a host that cannot exist.
pub fn parse_request(bytes: &[u8]) -> Result<Option<(Request, usize)>, Malformed> {
    if bytes.first().is_some_and(|version| *version != VERSION) || bytes.get(2).is_some_and(|reserved| *reserved != 0) {
        return Err(Malformed);
    }
    let Some(([_, command, _, kind], rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let command = match command {
        1 => Command::Connect,
        3 => Command::Associate,
        _ => Command::Other,
    };
    if !matches!(*kind, IPV4 | NAME | IPV6) {
        // Its length is unknown, so the rest is, too.
        return Ok(Some((Request { command, target: None }, bytes.len())));
    }
    let target = parse_target(*kind, rest)?;
    Ok(target.map(|(target, len)| (Request { command, target: Some(target) }, 4 + len)))
}

/// Reads the header of a datagram. Returns its target and its length. Fragments are refused, which the RFC allows.
///
/// # Errors
/// Returns an error if it is no such header, or cut off.
pub fn parse_datagram(bytes: &[u8]) -> Result<(Target, usize), Malformed> {
    let Some(([0, 0, 0, kind], rest)) = bytes.split_first_chunk::<4>() else { return Err(Malformed) };
    let (target, len) = parse_target(*kind, rest)?.ok_or(Malformed)?;
    Ok((target, 4 + len))
}

fn parse_target(kind: u8, bytes: &[u8]) -> Result<Option<(Target, usize)>, Malformed> {
    let host = match kind {
        IPV4 => bytes.first_chunk::<4>().map(|ip| (Host::Address(Ipv4Addr::from(*ip).into()), 4)),
        IPV6 => {
            bytes.first_chunk::<16>().map(|ip| (Host::Address(IpAddr::from(Ipv6Addr::from(*ip)).to_canonical()), 16))
        }
        NAME => match counted(bytes) {
            Some((name, _)) => {
                let host = std::str::from_utf8(name).ok().and_then(Host::parse).ok_or(Malformed)?;
                Some((host, 1 + name.len()))
            }
            None => None,
        },
        _ => return Err(Malformed),
    };
    let Some((host, len)) = host else { return Ok(None) };
    let Some([high, low]) = bytes.get(len..).and_then(<[u8]>::first_chunk::<2>) else { return Ok(None) };
    Ok(Some((Target { host, port: u16::from_be_bytes([*high, *low]) }, len + 2)))
}

/// Tells the client which method to use.
#[must_use]
pub fn choice(method: Method) -> [u8; 2] {
    [VERSION, method as u8]
}

/// Tells the client whether name and password are right.
#[must_use]
pub fn login_answer(allowed: bool) -> [u8; 2] {
    [LOGIN_VERSION, u8::from(!allowed)]
}

/// The answer to a request. `bound` is the address of the proxy's end.
#[must_use]
pub fn answer(reply: Reply, bound: SocketAddr) -> Vec<u8> {
    let mut out = vec![VERSION, reply as u8, 0];
    write_address(&mut out, bound);
    out
}

/// The header of a datagram from `source`.
#[must_use]
pub fn datagram_header(source: SocketAddr) -> Vec<u8> {
    let mut out = vec![0, 0, 0];
    write_address(&mut out, source);
    out
}

fn write_address(out: &mut Vec<u8>, address: SocketAddr) {
    match address.ip() {
        IpAddr::V4(v4) => {
            out.push(IPV4);
            out.extend(v4.octets());
        }
        IpAddr::V6(v6) => {
            out.push(IPV6);
            out.extend(v6.octets());
        }
    }
    out.extend(address.port().to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parser needs all of these bytes, and no more.
    fn whole<T: PartialEq + std::fmt::Debug>(
        bytes: &[u8],
        parse: impl Fn(&[u8]) -> Result<Option<(T, usize)>, Malformed>,
    ) -> T {
        for len in 0..bytes.len() {
            assert_eq!(parse(&bytes[..len]), Ok(None), "{len} of {} bytes", bytes.len());
        }
        let (parsed, len) = parse(&[bytes, b"rest"].concat()).unwrap().unwrap();
        assert_eq!(len, bytes.len());
        parsed
    }

    #[test]
    fn requests_of_each_type_of_address_are_read() {
        let v4 = [&[5, 1, 0, 1, 10, 42, 0, 1], &80u16.to_be_bytes()[..]].concat();
        let v6 = [&[5, 3, 0, 4][..], &"fd42::1".parse::<Ipv6Addr>().unwrap().octets(), &[0, 80]].concat();
        let name = [&[5, 1, 0, 3, 2][..], b"db", &[0, 80]].concat();
        // Clients may send an address as a name.
        let address_as_name = [&[5, 2, 0, 3, 9][..], b"10.42.0.1", &[0, 80]].concat();
        for (bytes, command, target) in [
            (v4, Command::Connect, "10.42.0.1:80"),
            (v6, Command::Associate, "[fd42::1]:80"),
            (name, Command::Connect, "db:80"),
            (address_as_name, Command::Other, "10.42.0.1:80"),
        ] {
            let expected = Request { command, target: Some(target.parse().unwrap()) };
            assert_eq!(whole(&bytes, parse_request), expected);
        }
        let unknown = parse_request(&[5, 1, 0, 2, 1, 2, 3]).unwrap().unwrap();
        assert_eq!(unknown, (Request { command: Command::Connect, target: None }, 7));
    }

    #[test]
    fn greetings_and_logins_are_read() {
        assert_eq!(whole(&[5, 2, 0, 2], parse_greeting), [0, 2]);
        assert!(whole(&[5, 0], parse_greeting).is_empty());
        let login = |bytes: &[u8]| parse_login(bytes, |name, password| (name.to_vec(), password.to_vec()));
        assert_eq!(whole(&[&[1, 3][..], b"ann", &[3], b"one"].concat(), login), (b"ann".to_vec(), b"one".to_vec()));
    }

    #[test]
    fn what_is_not_socks_is_refused_with_the_first_byte() {
        assert_eq!(parse_greeting(b"G"), Err(Malformed));
        assert_eq!(parse_greeting(&[4]), Err(Malformed));
        assert_eq!(parse_login(&[5], |_, _| ()), Err(Malformed));
        assert_eq!(parse_request(&[5, 1, 1]), Err(Malformed));
        assert_eq!(parse_request(&[5, 1, 0, 3, 0, 0, 80]), Err(Malformed), "an empty name");
        assert_eq!(parse_request(&[5, 1, 0, 3, 2, b'\n', b'a', 0, 80]), Err(Malformed), "a name with a line feed");
    }

    #[test]
    fn the_header_of_a_datagram_is_read_as_it_was_written() {
        for source in ["10.42.0.1:53", "[fd42::1]:53"] {
            let source: SocketAddr = source.parse().unwrap();
            let header = datagram_header(source);
            assert_eq!(parse_datagram(&header), Ok((source.into(), header.len())));
            assert_eq!(parse_datagram(&header[..header.len() - 1]), Err(Malformed));
            let mut fragment = header;
            fragment[2] = 1;
            assert_eq!(parse_datagram(&fragment), Err(Malformed));
        }
    }

    #[test]
    fn answers_have_the_form_of_the_rfc() {
        let bound = "127.0.0.1:258".parse().unwrap();
        assert_eq!(answer(Reply::NotAllowed, bound), [5, 2, 0, 1, 127, 0, 0, 1, 1, 2]);
        assert_eq!((choice(Method::Unacceptable), login_answer(false)), ([5, 0xff], [1, 1]));
    }
}
