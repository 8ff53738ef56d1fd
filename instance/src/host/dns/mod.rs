//! The lighthouse's DNS server over UDP: overlay addresses by certificate name, and certificates by address.

mod message;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use nebula_core::io::Handle;

use crate::config::{Dns, Settings};
use crate::linux::clock;
use crate::listener::until_stopped::{self, Running, Stopped};
use crate::names;
use hickory_resolver::proto::rr::RecordType;
use message::{Answer, Query};

/// What a server is started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Served {
    listen: Dns,
    /// This host's own name and addresses.
    own: (String, Vec<IpAddr>),
}

/// Answers queries until it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    _running: Running,
}

impl Served {
    /// `None` if there is nothing to serve.
    pub(crate) fn of(settings: &Settings) -> Option<Self> {
        let listen = settings.dns.clone()?;
        let identity = &settings.pki.as_ref()?.identity;
        let addresses = identity.networks().iter().map(ipnet::IpNet::addr).collect();
        Some(Self { listen, own: (identity.primary().name().to_owned(), addresses) })
    }

    /// Starts the server, which queries `peers`. As in Go Nebula, a failure is logged and stops nothing else.
    pub(crate) fn start(self, peers: impl Peers) -> Option<Server> {
        let Dns { host, port } = &self.listen;
        let socket = match bind(host, *port) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(%error, host, port, "Failed to start DNS server");
                return None;
            }
        };
        let started = socket.local_addr().and_then(|address| {
            // If a readable socket turns out to be empty, the thread must not block, as it then could not be stopped.
            socket.set_nonblocking(true)?;
            let running = until_stopped::spawn("dns", move |stopped| self.serve(&socket, &stopped, &peers))?;
            tracing::info!(dnsListener = %address, "Starting DNS responder");
            Ok(Server { _running: running })
        });
        started.inspect_err(|error| tracing::warn!(%error, "Failed to start DNS server")).ok()
    }
}

impl Served {
    fn serve(&self, socket: &UdpSocket, stopped: &Stopped, peers: &impl Peers) {
        let mut recent: Option<(Instant, Records)> = None;
        let mut datagram = [0; 1500];
        while stopped.wait_for(socket) {
            let Ok((length, from)) = socket.recv_from(&mut datagram) else { continue };
            let Some(query) = Query::parse(&datagram[..length]) else { continue };
            let now = clock::now();
            if query.kind == RecordType::TXT {
                let answer = self.certificate(&query, from.ip().to_canonical(), peers);
                let _ = query.reply(&answer).map(|reply| socket.send_to(&reply, from));
                continue;
            }
            // Rate limit: a flood of queries must not reach the control plane.
            if recent.as_ref().is_none_or(|(read, _)| now >= *read + MAX_RECORDS_AGE) {
                recent = Some((now, Records::new(std::iter::once(self.own.clone()).chain(peers.hosts()))));
            }
            let answer = recent.as_ref().map_or(Answer::NoSuchName, |(_, records)| records.answer(&query));
            // The client may be gone.
            let _ = query.reply(&answer).map(|reply| socket.send_to(&reply, from));
        }
    }

    /// The certificate of the peer with the requested address. It reveals more than a name, so only programs on this
    /// host get it.
    fn certificate(&self, query: &Query, from: IpAddr, peers: &impl Peers) -> Answer {
        if !from.is_loopback() && !self.own.1.contains(&from) {
            return Answer::Nothing;
        }
        let certificate = query.name.parse().ok().and_then(|address| peers.certificate(address));
        certificate.map_or(Answer::NoSuchName, Answer::Text)
    }
}

/// The peers that the server knows.
pub(crate) trait Peers: Send + 'static {
    /// Names and addresses of the hosts with a tunnel.
    fn hosts(&self) -> Vec<(String, Vec<IpAddr>)>;
    /// The certificate of the peer with this address, as JSON.
    fn certificate(&self, address: IpAddr) -> Option<String>;
}

impl Peers for Handle {
    fn hosts(&self) -> Vec<(String, Vec<IpAddr>)> {
        self.tunnels().into_iter().map(|tunnel| (tunnel.name, tunnel.peer)).collect()
    }

    fn certificate(&self, address: IpAddr) -> Option<String> {
        let tunnels = self.tunnels();
        let tunnel = tunnels.iter().find(|tunnel| tunnel.primary && tunnel.peer.contains(&address))?;
        Some(Self::certificate(self, tunnel.local_index)?.to_json().to_string())
    }
}

/// Age up to which the list of peers is reused.
const MAX_RECORDS_AGE: Duration = Duration::from_secs(1);

/// No host, or `0.0.0.0` as in Go, means every address of both families, or of IPv4 if the system has no IPv6.
fn bind(host: &str, port: u16) -> io::Result<UdpSocket> {
    if host.is_empty() || host == "0.0.0.0" {
        return UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)));
    }
    UdpSocket::bind(names::listen_addresses(host, port)?.as_slice())
}

/// The first address of each family, by lower-case name.
#[derive(Debug)]
struct Records {
    hosts: HashMap<String, [Option<IpAddr>; 2]>,
}

impl Records {
    /// If two hosts have the same name, the later one counts.
    fn new(hosts: impl Iterator<Item = (String, Vec<IpAddr>)>) -> Self {
        let record = |(name, addresses): (String, Vec<IpAddr>)| {
            let first = |v4: bool| addresses.iter().copied().find(|address| address.is_ipv4() == v4);
            (name.to_ascii_lowercase(), [first(true), first(false)])
        };
        Self { hosts: hosts.map(record).collect() }
    }

    fn answer(&self, query: &Query) -> Answer {
        match (self.hosts.get(&query.name), query.kind) {
            (Some([v4, _]), RecordType::A) => v4.map_or(Answer::Nothing, Answer::Address),
            (Some([_, v6]), RecordType::AAAA) => v6.map_or(Answer::Nothing, Answer::Address),
            // As in Go Nebula, which knows no other types.
            _ => Answer::NoSuchName,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_is_of_both_families() {
        for host in ["", "0.0.0.0"] {
            let server = bind(host, 0).unwrap();
            server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let port = server.local_addr().unwrap().port();
            for loopback in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
                let client = UdpSocket::bind((loopback, 0)).unwrap();
                client.send_to(b"query", (loopback, port)).unwrap();
                assert_eq!(server.recv_from(&mut [0; 16]).unwrap().0, 5, "{host:?} from {loopback}");
            }
        }
    }

    #[test]
    fn names_have_the_first_address_of_each_family_and_no_other_types() {
        let host = |name: &str, addresses: &[&str]| {
            (name.to_owned(), addresses.iter().map(|address| address.parse().unwrap()).collect())
        };
        let records =
            Records::new([host("One", &["10.0.0.1", "fd00::1", "10.0.0.9"]), host("two.x", &["10.0.0.2"])].into_iter());
        let answer = |name: &str, kind| records.answer(&Query::parse(&message::tests::question(name, kind)).unwrap());
        let (a, aaaa) = (RecordType::A, RecordType::AAAA);
        assert_eq!(answer("oNe", a), Answer::Address("10.0.0.1".parse().unwrap()));
        assert_eq!(answer("one", aaaa), Answer::Address("fd00::1".parse().unwrap()));
        assert_eq!(answer("two.x", aaaa), Answer::Nothing);
        assert_eq!(answer("two.x", RecordType::MX), Answer::NoSuchName);
        assert_eq!(answer("two", a), Answer::NoSuchName);
        assert_eq!(answer("", a), Answer::NoSuchName);
    }
}
