//! Flows that are really opened: what each pod asks all others at once, and the servers that answer.
//!
//! The kernel under test may have no SCTP: associations are packets of raw sockets, good enough for the connection
//! tracking of nodes.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, connect, recvfrom, sendto, socket,
};

use crate::world::pod_traffic::{unspecified, within};

/// Destination ports of all protocols that have ports.
pub(super) const PORTS: [u16; 3] = [80, 81, 82];
/// No more answers come after a silence of this length: one takes a few milliseconds, and a SYN that a full queue
/// dropped is sent again after a second.
const SILENCE: Duration = Duration::from_millis(1300);
const WHO: &[u8] = b"who";
/// Of raw packets: a probe's number counts from here.
const FIRST_SOURCE_PORT: u16 = 20000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Protocol {
    Tcp,
    Udp,
    Sctp,
    /// An echo request; its port is 0.
    Icmp,
}

/// A flow to try.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probe {
    pub(super) target: IpAddr,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
}

/// Tries all of them at once from a network; whose name came back, in the same order.
pub(super) fn answers(network: &Path, probes: Vec<Probe>) -> Vec<Option<String>> {
    within(network, move || {
        let raw = Raw::new();
        let begin = |(index, probe)| {
            // No faster than queues of a few hundred packets take it.
            if index % 8 == 7 {
                thread::sleep(Duration::from_millis(4));
            }
            Asked::new(&raw, index, probe)
        };
        let mut asked: Vec<Asked> = probes.iter().enumerate().map(begin).collect();
        let (mut until, mut answered) = (Instant::now() + SILENCE, 0);
        let mut repeat_at = Some(Instant::now() + SILENCE / 3);
        loop {
            if repeat_at.is_some_and(|at| Instant::now() >= at) {
                repeat_at = None;
                let unanswered = asked.iter().enumerate().filter(|(_, asked)| asked.answer.is_none());
                unanswered.for_each(|(index, asked)| asked.repeat(&raw, index, &probes[index]));
            }
            let now = asked.iter().filter(|asked| asked.answer.is_some()).count();
            if now > answered {
                (until, answered) = (Instant::now() + SILENCE, now);
            }
            let left = until.saturating_duration_since(Instant::now());
            let waits = asked.iter().any(|asked| asked.answer.is_none() && !asked.is_over);
            if left.is_zero() || !waits {
                return asked.into_iter().map(|asked| asked.answer).collect();
            }
            let until_repeat = repeat_at.map(|at| at.saturating_duration_since(Instant::now()));
            wait(&raw, &asked, until_repeat.map_or(left, |repeat| left.min(repeat + Duration::from_millis(1))));
            raw.read(&mut asked);
            for asked in &mut asked {
                asked.read();
            }
        }
    })
}

fn wait(raw: &Raw, asked: &[Asked], left: Duration) {
    let mut events: Vec<PollFd<'_>> =
        raw.all().into_iter().map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)).collect();
    for asked in asked.iter().filter(|asked| asked.answer.is_none() && !asked.is_over) {
        match &asked.socket {
            Socket::Stream(stream) => events.push(PollFd::new(stream.as_fd(), PollFlags::POLLIN)),
            Socket::Datagram(socket) => events.push(PollFd::new(socket.as_fd(), PollFlags::POLLIN)),
            Socket::Raw | Socket::Refused => {}
        }
    }
    let _ = poll(&mut events, PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO));
}

struct Asked {
    socket: Socket,
    protocol: Protocol,
    answer: Option<String>,
    is_over: bool,
}

enum Socket {
    Stream(TcpStream),
    Datagram(UdpSocket),
    Raw,
    /// The kernel knows no way there.
    Refused,
}

impl Asked {
    fn new(raw: &Raw, index: usize, probe: &Probe) -> Self {
        let target = SocketAddr::new(probe.target, probe.port);
        let socket = match probe.protocol {
            Protocol::Tcp => begin(target).map_or(Socket::Refused, Socket::Stream),
            Protocol::Udp => ask_udp(target).map_or(Socket::Refused, Socket::Datagram),
            Protocol::Sctp | Protocol::Icmp => {
                raw.ask(index, probe);
                Socket::Raw
            }
        };
        let is_over = matches!(socket, Socket::Refused);
        Self { socket, protocol: probe.protocol, answer: None, is_over }
    }

    /// Sends again what no stack repeats.
    fn repeat(&self, raw: &Raw, index: usize, probe: &Probe) {
        match &self.socket {
            Socket::Datagram(socket) => {
                let _ = socket.send(WHO);
            }
            Socket::Raw => raw.ask(index, probe),
            Socket::Stream(_) | Socket::Refused => {}
        }
    }

    fn read(&mut self) {
        let mut said = [0; 64];
        let read = match &mut self.socket {
            Socket::Stream(stream) => stream.read(&mut said),
            Socket::Datagram(socket) => socket.recv(&mut said),
            Socket::Raw | Socket::Refused => return,
        };
        match read {
            Ok(0) => self.is_over = true,
            Ok(length) => self.answer = Some(String::from_utf8_lossy(&said[..length]).into_owned()),
            // Also what a connection says that is not there yet.
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::NotConnected].contains(&error.kind()) => {}
            Err(_) => self.is_over = true,
        }
    }
}

fn begin(target: SocketAddr) -> nix::Result<TcpStream> {
    let family = if target.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let stream = socket(family, SockType::Stream, flags, None)?;
    match connect(stream.as_raw_fd(), &SockaddrStorage::from(target)) {
        Ok(()) | Err(nix::errno::Errno::EINPROGRESS) => Ok(stream.into()),
        Err(error) => Err(error),
    }
}

fn ask_udp(target: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = UdpSocket::bind((unspecified(target.ip()), 0))?;
    socket.set_nonblocking(true)?;
    socket.connect(target)?;
    socket.send(WHO)?;
    Ok(socket)
}

/// Sockets for SCTP and echo requests of both families.
struct Raw {
    sctp: [OwnedFd; 2],
    icmp: [OwnedFd; 2],
}

impl Raw {
    fn new() -> Self {
        let open = |family, protocol| {
            let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
            socket(family, SockType::Raw, flags, protocol).expect("a raw socket")
        };
        let [v4, v6] = [AddressFamily::Inet, AddressFamily::Inet6];
        Self {
            sctp: [open(v4, SockProtocol::Sctp), open(v6, SockProtocol::Sctp)],
            icmp: [open(v4, SockProtocol::Icmp), open(v6, SockProtocol::IcmpV6)],
        }
    }

    fn all(&self) -> [&OwnedFd; 4] {
        let [[first, second], [third, fourth]] = [&self.sctp, &self.icmp];
        [first, second, third, fourth]
    }

    fn ask(&self, index: usize, probe: &Probe) {
        let number = FIRST_SOURCE_PORT + u16::try_from(index).expect("few probes");
        match probe.protocol {
            Protocol::Icmp => self.ping(number, probe.target),
            _ => self.send_sctp(number, SocketAddr::new(probe.target, probe.port)),
        }
    }

    fn send_sctp(&self, source_port: u16, target: SocketAddr) {
        send(
            &self.sctp[usize::from(target.is_ipv6())],
            &sctp([source_port, target.port()], Chunk::Init, WHO),
            target.ip(),
        );
    }

    fn ping(&self, number: u16, target: IpAddr) {
        let mut packet = vec![if target.is_ipv4() { 8 } else { 128 }, 0, 0, 0];
        packet.extend(number.to_be_bytes());
        packet.extend([0, 1]);
        if target.is_ipv4() {
            let sum = internet_checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        send(&self.icmp[usize::from(target.is_ipv6())], &packet, target);
    }

    fn read(&self, asked: &mut [Asked]) {
        for socket in &self.sctp {
            while let Some((packet, _)) = receive(socket) {
                let Some((_, to, words)) = read_sctp(&packet) else { continue };
                note(asked, Protocol::Sctp, to, || String::from_utf8_lossy(words).into_owned());
            }
        }
        for (socket, answer) in self.icmp.iter().zip([0, 129]) {
            while let Some((packet, from)) = receive(socket) {
                if let [kind, _, _, _, high, low, ..] = packet[..]
                    && kind == answer
                {
                    // Nobody can say more of themselves than their address.
                    note(asked, Protocol::Icmp, u16::from_be_bytes([high, low]), || from.to_string());
                }
            }
        }
    }
}

fn note(asked: &mut [Asked], protocol: Protocol, number: u16, answer: impl Fn() -> String) {
    let index = number.checked_sub(FIRST_SOURCE_PORT).map(usize::from);
    if let Some(asked) = index.and_then(|index| asked.get_mut(index))
        && asked.protocol == protocol
    {
        asked.answer = Some(answer());
    }
}

fn send(socket: &OwnedFd, packet: &[u8], target: IpAddr) {
    let to = SockaddrStorage::from(SocketAddr::new(target, 0));
    let _ = sendto(socket.as_raw_fd(), packet, &to, MsgFlags::empty());
}

/// The next packet without its IP header, and its sender.
fn receive(socket: &OwnedFd) -> Option<(Vec<u8>, IpAddr)> {
    let mut packet = vec![0; 2048];
    let (length, from) = recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut packet).ok()?;
    packet.truncate(length);
    let from = from?;
    if let Some(v4) = from.as_sockaddr_in() {
        let header = usize::from(packet.first()? & 0xf) * 4;
        return Some((packet.split_off(header.min(length)), v4.ip().into()));
    }
    Some((packet, from.as_sockaddr_in6()?.ip().into()))
}

/// An INIT chunk with words behind it, or the INIT ACK that answers it (RFC 9260, sections 3.3.2 and 3.3.3).
fn sctp(ports: [u16; 2], kind: Chunk, words: &[u8]) -> Vec<u8> {
    // An INIT has no verification tag; its answer has the one that the INIT asks for.
    let verification = u32::from(kind == Chunk::InitAck);
    let length = u16::try_from(INIT_HEADER + words.len()).expect("short");
    let mut packet = [ports[0].to_be_bytes(), ports[1].to_be_bytes()].concat();
    packet.extend([&verification.to_be_bytes()[..], &[0; 4], &[kind as u8, 0], &length.to_be_bytes()].concat());
    // Tag, window, streams out and in, sequence number.
    packet.extend([0, 0, 0, 1, 0, 0, 255, 255, 0, 1, 0, 1, 0, 0, 0, 1]);
    packet.extend(words);
    packet.resize(packet.len().next_multiple_of(4), 0);
    let sum = crc32c(&packet);
    packet[8..12].copy_from_slice(&sum.to_le_bytes());
    packet
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Chunk {
    Init = 1,
    InitAck = 2,
}

/// Of the chunk that begins an association.
const INIT_HEADER: usize = 20;

/// Source port, destination port and words.
fn read_sctp(packet: &[u8]) -> Option<(u16, u16, &[u8])> {
    let (head, chunk) = packet.split_at_checked(12)?;
    let length = usize::from(u16::from_be_bytes([*chunk.get(2)?, *chunk.get(3)?]));
    let words = chunk.get(INIT_HEADER..length)?;
    Some((u16::from_be_bytes([head[0], head[1]]), u16::from_be_bytes([head[2], head[3]]), words))
}

/// RFC 9260, appendix A.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}

/// RFC 1071.
fn internet_checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("few bytes")
}

/// Says its name to whoever asks on any of [`PORTS`], until it is dropped.
pub(super) struct Servers(Arc<AtomicBool>);

impl Servers {
    pub(super) fn start(network: &Path, name: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (raw, tcp, udp) = within(network, || {
            let any = |port| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
            let tcp = PORTS.map(|port| TcpListener::bind(any(port)).expect("a listener"));
            let udp = PORTS.map(|port| UdpSocket::bind(any(port)).expect("a socket"));
            (Raw::new(), tcp, udp)
        });
        tcp.iter().for_each(|listener| listener.set_nonblocking(true).expect("it does not block"));
        udp.iter().for_each(|socket| socket.set_nonblocking(true).expect("it does not block"));
        let (stopped, name) = (Arc::clone(&stop), name.to_owned());
        thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let all = raw.sctp.iter().map(AsFd::as_fd);
                let all = all.chain(tcp.iter().map(AsFd::as_fd)).chain(udp.iter().map(AsFd::as_fd));
                let mut events: Vec<PollFd<'_>> = all.map(|socket| PollFd::new(socket, PollFlags::POLLIN)).collect();
                let _ = poll(&mut events, PollTimeout::from(100u8));
                serve(&raw, &tcp, &udp, &name);
            }
        });
        Self(stop)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn serve(raw: &Raw, tcp: &[TcpListener], udp: &[UdpSocket], name: &str) {
    for socket in &raw.sctp {
        while let Some((packet, from)) = receive(socket) {
            if let Some((source, port, WHO)) = read_sctp(&packet)
                && PORTS.contains(&port)
            {
                send(socket, &sctp([port, source], Chunk::InitAck, name.as_bytes()), from);
            }
        }
    }
    for listener in tcp {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(name.as_bytes());
        }
    }
    for socket in udp {
        let mut said = [0; 64];
        while let Ok((_, from)) = socket.recv_from(&mut said) {
            let _ = socket.send_to(name.as_bytes(), from);
        }
    }
}
