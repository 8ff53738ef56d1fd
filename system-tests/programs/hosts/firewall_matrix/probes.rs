//! Probes between two hosts, and the servers that answer them.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use super::world::enter;

/// Whether an answer arrived.
pub(crate) type Verdict = bool;

const TCP: [u16; 3] = [80, 443, 8080];
const UDP: [u16; 3] = [53, 80, 8085];
/// Time between two datagrams of one probe.
const AGAIN: Duration = Duration::from_millis(120);

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Tcp(u16),
    Udp(u16),
    Icmp,
}

/// One packet or connection to try.
#[derive(Clone)]
pub(crate) struct Probe {
    pub(crate) from: String,
    pub(crate) to: String,
    at: IpAddr,
    /// What kind of address of the host this is.
    place: &'static str,
    kind: Kind,
}

impl Probe {
    /// All probes between two hosts.
    pub(crate) fn between(from: &str, to: &str, at: IpAddr, place: &'static str) -> Vec<Self> {
        let kinds = TCP.map(Kind::Tcp).into_iter().chain(UDP.map(Kind::Udp)).chain([Kind::Icmp]);
        kinds.map(|kind| Self { from: from.to_owned(), to: to.to_owned(), at, place, kind }).collect()
    }

    pub(crate) fn is_udp(&self) -> bool {
        matches!(self.kind, Kind::Udp(_))
    }

    /// Describes the probe in the same words whichever programs run on the two hosts.
    pub(crate) fn meaning(&self) -> String {
        let what = match self.kind {
            Kind::Tcp(port) => format!("tcp {port}"),
            Kind::Udp(port) => format!("udp {port}"),
            Kind::Icmp => "icmp".to_owned(),
        };
        format!("{} to {} {} {what}", &self.from[..1], &self.to[..1], self.place)
    }

    fn ask(&self, within: Duration) -> Verdict {
        match self.kind {
            Kind::Tcp(port) => TcpStream::connect_timeout(&SocketAddr::new(self.at, port), within).is_ok(),
            Kind::Udp(port) => {
                let any: IpAddr = if self.at.is_ipv4() { [0; 4].into() } else { Ipv6Addr::UNSPECIFIED.into() };
                let socket = UdpSocket::bind((any, 0)).expect("a port");
                socket.connect((self.at, port)).expect("a route");
                answered(&socket, b"anybody there?", within)
            }
            Kind::Icmp => {
                // The kernel fills in identifier and checksum, and passes only the replies to this socket.
                let (family, protocol, request) = match self.at {
                    IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp, 8),
                    IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6, 128),
                };
                let socket = socket(family, SockType::Datagram, SockFlag::empty(), protocol).expect("an echo socket");
                let socket = UdpSocket::from(socket);
                socket.connect((self.at, 0)).expect("a route");
                answered(&socket, &[request, 0, 0, 0, 0, 0, 0, 1], within)
            }
        }
    }
}

fn answered(socket: &UdpSocket, question: &[u8], within: Duration) -> Verdict {
    socket.set_read_timeout(Some(AGAIN)).expect("a timeout");
    let end = Instant::now() + within;
    while Instant::now() < end {
        // The sender's own rules may refuse it with an error.
        let _ = socket.send(question);
        match socket.recv(&mut [0; 64]) {
            Ok(_) => return true,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => thread::sleep(AGAIN),
        }
    }
    false
}

/// Runs all probes at once; `namespace` returns the namespace of a host.
pub(crate) fn ask(probes: &[Probe], within: Duration, namespace: impl Fn(&str) -> String) -> Vec<Verdict> {
    let threads: Vec<_> = probes
        .iter()
        .map(|probe| {
            let (probe, namespace) = (probe.clone(), namespace(&probe.from));
            thread::spawn(move || {
                enter(&namespace);
                probe.ask(within)
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("a verdict")).collect()
}

/// The servers on a host; they stop on drop.
pub(crate) struct Servers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Servers {
    /// Answers on every probed port, at every address of the namespace.
    pub(crate) fn start(namespace: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for port in TCP {
            threads.push(Self::run(namespace, &stop, move |stop| {
                let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).expect("a free port");
                listener.set_nonblocking(true).expect("a listener that can be left");
                while !stop.load(Ordering::Relaxed) {
                    // The kernel has already answered.
                    while listener.accept().is_ok() {}
                    thread::sleep(Duration::from_millis(20));
                }
            }));
        }
        for port in UDP {
            threads.push(Self::run(namespace, &stop, move |stop| {
                let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).expect("a free port");
                socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
                let mut buffer = [0; 64];
                while !stop.load(Ordering::Relaxed) {
                    if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                        let _ = socket.send_to(&buffer[..length], from);
                    }
                }
            }));
        }
        Self { stop, threads }
    }

    fn run(namespace: &str, stop: &Arc<AtomicBool>, body: impl FnOnce(&AtomicBool) + Send + 'static) -> JoinHandle<()> {
        let (namespace, stop) = (namespace.to_owned(), Arc::clone(stop));
        thread::spawn(move || {
            enter(&namespace);
            body(&stop);
        })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
