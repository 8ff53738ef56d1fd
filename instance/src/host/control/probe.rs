//! Probes whether a Nebula node listens at an endpoint: sends a data packet for an unknown tunnel from a separate
//! socket.
//!
//! Every Nebula answers such a packet with a recv_error unless configured not to. An answer therefore proves that UDP
//! passes in both directions and that a Nebula listens there. A closed port causes an ICMP error, which the kernel
//! reports only on connected sockets.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use nebula_core::internals::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use nebula_linux::clock::now;
use nix::sys::socket::{setsockopt, sockopt};

/// The outcome of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// A Nebula answered.
    Nebula,
    /// Nothing came back in time: UDP is blocked, or the host does not answer strangers.
    Silence,
    /// This machine or a router on the way refused the datagram (errno).
    Refused(i32),
}

/// How to set up the probe sockets, to match the node's underlay sockets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Underlay {
    pub(super) address: IpAddr,
    pub(super) mark: u32,
}

/// Probes all endpoints in parallel and waits until each has answered or the timeout has passed.
pub(super) fn probe(underlay: Underlay, endpoints: &[SocketAddr]) -> Vec<(SocketAddr, Found)> {
    let opened: Vec<_> = endpoints.iter().take(MAX_PROBES).map(|to| (*to, open(underlay, *to))).collect();
    let until = now() + TIMEOUT;
    let found = opened.into_iter().map(|(to, socket)| {
        let found = match socket.and_then(|socket| answer(&socket, until)) {
            Ok(found) => found,
            Err(error) => error.raw_os_error().map_or(Found::Silence, Found::Refused),
        };
        (to, found)
    });
    found.collect()
}

fn open(underlay: Underlay, to: SocketAddr) -> io::Result<UdpSocket> {
    let same_family = underlay.address.is_ipv4() == to.is_ipv4();
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind(SocketAddr::new(if same_family { underlay.address } else { any }, 0))?;
    if underlay.mark != 0 {
        setsockopt(&socket, sockopt::Mark, &underlay.mark)?;
    }
    socket.connect(to)?;
    let header = Header { kind: MessageType::Data, index: 0, counter: 1 };
    let mut datagram = header.to_bytes().to_vec();
    datagram.resize(HEADER_LEN + TAG_LEN, 0);
    socket.send(&datagram)?;
    Ok(socket)
}

fn answer(socket: &UdpSocket, until: Instant) -> io::Result<Found> {
    let mut datagram = [0; 64];
    loop {
        let left = until.saturating_duration_since(now()).max(Duration::from_millis(1));
        socket.set_read_timeout(Some(left))?;
        match socket.recv(&mut datagram) {
            Ok(len) => {
                let header = Header::parse(&datagram[..len]);
                if header.is_ok_and(|header| header.kind == MessageType::RecvError) {
                    return Ok(Found::Nebula);
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if now() >= until {
            return Ok(Found::Silence);
        }
    }
}

const MAX_PROBES: usize = 8;
// Longer than the round trip of any path on which a handshake succeeds.
const TIMEOUT: Duration = Duration::from_millis(1500);

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Underlay = Underlay { address: IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), mark: 0 };

    #[test]
    fn a_nebula_a_closed_port_and_silence_are_told_apart() {
        let [nebula, silent, closed] = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let at = |socket: &UdpSocket| socket.local_addr().unwrap();
        let endpoints = [at(&nebula), at(&silent), at(&closed)];
        drop(closed);
        let answering = std::thread::spawn(move || {
            let mut datagram = [0; 64];
            let (len, from) = nebula.recv_from(&mut datagram).unwrap();
            let header = Header::parse(&datagram[..len]).unwrap();
            assert_eq!((header.kind, len), (MessageType::Data, HEADER_LEN + TAG_LEN));
            nebula.send_to(b"noise", from).unwrap();
            let answer = Header { kind: MessageType::RecvError, counter: 0, ..header };
            nebula.send_to(&answer.to_bytes(), from).unwrap();
        });
        let found: Vec<_> = probe(HERE, &endpoints).into_iter().map(|(_, found)| found).collect();
        assert_eq!(found, [Found::Nebula, Found::Silence, Found::Refused(libc::ECONNREFUSED)]);
        answering.join().unwrap();
    }

    #[test]
    fn what_the_system_refuses_to_send_is_its_error() {
        let broadcast = SocketAddr::from(([255, 255, 255, 255], 9));
        let any = Underlay { address: [0; 4].into(), mark: 0 };
        assert_eq!(probe(any, &[broadcast]), [(broadcast, Found::Refused(libc::EACCES))]);
    }
}
