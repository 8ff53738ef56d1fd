//! Whose a connection is: the user of a local process, as the kernel knows it, or else the address it comes from.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};

use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, getsockopt, recv, send, socket,
    sockopt,
};
use nix::unistd::geteuid;

/// Whose a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// A process of this user, in the network namespace of the listener.
    User(u32),
    /// This address: one for all of loopback, and one for each IPv6 /64, since a host may have any address there.
    Network(IpAddr),
}

impl Source {
    /// The source of a TCP connection between `local`, where it was accepted, and `peer`.
    #[must_use]
    pub fn of_tcp(local: SocketAddr, peer: SocketAddr) -> Self {
        let (own, other) = (canonical(peer), canonical(local));
        let found = ask(libc::IPPROTO_TCP, own, other).map(|reply| read(&reply, own, other));
        Self::found(found, peer)
    }

    /// The source of UDP datagrams that come from `peer` to `local`: whose the socket is that an answer would reach.
    #[must_use]
    pub fn of_udp(local: SocketAddr, peer: SocketAddr) -> Self {
        // For UDP, the kernel wants the ends of the answer.
        let reply = ask(libc::IPPROTO_UDP, canonical(local), canonical(peer));
        Self::found(reply.map(|reply| user(&reply)), peer)
    }

    fn found(user: io::Result<Option<u32>>, peer: SocketAddr) -> Self {
        // Netlink may be forbidden to this process. Then addresses are what there is.
        user.ok().flatten().map_or_else(|| Self::of_address(peer.ip()), Self::User)
    }

    /// The source of a connection on a Unix socket.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn of_unix(stream: &impl AsFd) -> io::Result<Self> {
        Ok(Self::User(getsockopt(stream, sockopt::PeerCredentials)?.uid()))
    }

    /// The source of whatever comes from `address`.
    #[must_use]
    pub fn of_address(address: IpAddr) -> Self {
        Self::Network(match address.to_canonical() {
            IpAddr::V4(v4) if v4.is_loopback() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
            v4 => v4,
        })
    }

    /// Whether it is a process of root or of this program's own user.
    #[must_use]
    pub fn is_trusted(self) -> bool {
        matches!(self, Self::User(user) if user == 0 || user == geteuid().as_raw())
    }
}

/// What the kernel knows about the socket with these ends (sock_diag(7)).
fn ask(protocol: i32, own: SocketAddr, other: SocketAddr) -> io::Result<Vec<u8>> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkSockDiag)?;
    connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    send(socket.as_raw_fd(), &request(protocol, own, other), MsgFlags::empty())?;
    // The kernel has answered when `send` returns.
    let mut reply = vec![0; 1024];
    let length = recv(socket.as_raw_fd(), &mut reply, MsgFlags::empty())?;
    reply.truncate(length);
    Ok(reply)
}

/// A struct nlmsghdr and a struct inet_diag_req_v2 (linux/inet_diag.h) for exactly this socket.
fn request(protocol: i32, own: SocketAddr, other: SocketAddr) -> Vec<u8> {
    let family = if own.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut bytes = Vec::with_capacity(HEADER_BYTES + REQUEST_BYTES);
    bytes.extend(((HEADER_BYTES + REQUEST_BYTES) as u32).to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family as u8, protocol as u8, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(ends(own, other));
    bytes.extend([0; 4]);
    bytes.extend([0xff; 8]);
    bytes
}

/// The beginning of a struct inet_diag_sockid: ports and addresses.
fn ends(own: SocketAddr, other: SocketAddr) -> Vec<u8> {
    let mut bytes = [own.port().to_be_bytes(), other.port().to_be_bytes()].concat();
    for end in [own, other] {
        let mut octets = [0; 16];
        match end.ip() {
            IpAddr::V4(v4) => octets[..4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => octets = v6.octets(),
        }
        bytes.extend(octets);
    }
    bytes
}

/// Reads the user of a struct inet_diag_msg that tells of this socket; `None` if no process has it.
fn read(reply: &[u8], own: SocketAddr, other: SocketAddr) -> Option<u32> {
    let message = reply.get(HEADER_BYTES..)?;
    // Without an exact match, the kernel answers with a listener on that port.
    let is_it = message.get(4..4 + ENDS_BYTES)? == ends(own, other);
    user(reply).filter(|_| is_it)
}

/// Reads the user of a struct inet_diag_msg.
fn user(reply: &[u8]) -> Option<u32> {
    let number = |at: usize| Some(u32::from_ne_bytes(*reply.get(at..)?.first_chunk()?));
    let kind = u16::from_ne_bytes(*reply.get(4..)?.first_chunk()?);
    // A socket that its process has closed is no process's, and would count as root's.
    let is_owned = kind == SOCK_DIAG_BY_FAMILY && number(HEADER_BYTES + INODE_AT)? != 0;
    is_owned.then(|| number(HEADER_BYTES + USER_AT)).flatten()
}

/// An IPv4 connection may have been accepted at an IPv6 socket.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const HEADER_BYTES: usize = 16;
const REQUEST_BYTES: usize = 56;
const ENDS_BYTES: usize = 36;
const USER_AT: usize = 64;
const INODE_AT: usize = 68;

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn own_user() -> Source {
        Source::User(geteuid().as_raw())
    }

    fn source(stream: &TcpStream) -> Source {
        Source::of_tcp(stream.local_addr().unwrap(), stream.peer_addr().unwrap())
    }

    #[test]
    fn a_local_connection_is_of_the_user_of_its_process_until_that_closes_it() {
        for (listen, from) in [("127.0.0.1:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("[::]:0", "[::1]")] {
            // A machine may have no IPv6.
            let Ok(listener) = TcpListener::bind(listen) else { continue };
            let port = listener.local_addr().unwrap().port();
            let client = TcpStream::connect(format!("{from}:{port}")).unwrap();
            let (accepted, _) = listener.accept().unwrap();
            assert_eq!(source(&accepted), own_user(), "{listen} {from}");
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(source(&accepted), own_user(), "{listen} {from} half closed");
            drop(client);
            // With root's own test, an orphan would pass for root's.
            assert!(matches!(source(&accepted), Source::Network(_)), "{listen} {from} closed");
        }
    }

    #[test]
    fn a_listener_on_the_port_of_a_connection_is_not_its_owner() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (there, nobody) = (listener.local_addr().unwrap(), "127.0.0.1:9".parse().unwrap());
        assert_eq!(ask(libc::IPPROTO_TCP, there, nobody).ok().and_then(|reply| read(&reply, there, nobody)), None);
    }

    #[test]
    fn datagrams_are_of_the_user_of_the_socket_that_an_answer_would_reach() {
        for (bind, from) in [("127.0.0.1:0", "127.0.0.1:0"), ("127.0.0.1:0", "[::]:0"), ("[::1]:0", "[::1]:0")] {
            // A machine may have no IPv6.
            let (Ok(here), Ok(there)) = (UdpSocket::bind(bind), UdpSocket::bind(from)) else { continue };
            let local = here.local_addr().unwrap();
            there.send_to(b"x", local).unwrap();
            let (_, peer) = here.recv_from(&mut [0]).unwrap();
            assert_eq!(Source::of_udp(local, peer), own_user(), "{bind} {from}");
            drop(there);
            assert!(matches!(Source::of_udp(local, peer), Source::Network(_)), "{bind} {from} closed");
            // Connected to somebody else, it gets no answer from here.
            let elsewhere = UdpSocket::bind(peer).unwrap();
            elsewhere.connect((peer.ip(), 9)).unwrap();
            assert!(matches!(Source::of_udp(local, peer), Source::Network(_)), "{bind} {from} elsewhere");
        }
    }

    #[test]
    fn a_unix_connection_is_of_the_user_of_its_process() {
        let (_client, served) = UnixStream::pair().unwrap();
        assert_eq!(Source::of_unix(&served).unwrap(), own_user());
        assert!(own_user().is_trusted() && !Source::User(geteuid().as_raw() + 70_000).is_trusted());
    }

    #[test]
    fn addresses_of_loopback_and_of_one_ipv6_network_are_one_source() {
        let of = |text: &str| Source::of_address(text.parse().unwrap());
        assert_eq!(of("127.0.0.1"), of("127.3.4.5"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    #[test]
    fn a_reply_that_is_cut_short_names_nobody() {
        let (own, other) = ("127.0.0.1:1".parse().unwrap(), "127.0.0.1:2".parse().unwrap());
        let mut reply = request(libc::IPPROTO_TCP, own, other)[..8].to_vec();
        reply.extend([0; 8]);
        reply.extend([libc::AF_INET as u8, 1, 0, 0]);
        reply.extend(ends(own, other));
        reply.extend([0; 24]);
        reply.extend(7_u32.to_ne_bytes());
        reply.extend(99_u32.to_ne_bytes());
        assert_eq!(read(&reply, own, other), Some(7));
        assert_eq!(read(&reply, other, own), None);
        for length in 0..reply.len() {
            assert_eq!(read(&reply[..length], own, other), None);
        }
    }
}
