//! The lighthouse's DNS server: overlay addresses by the names in certificates, over UDP.

mod message;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use crate::config_file::{Dns, Settings};
use crate::names;
use crate::until_stopped::{self, Running};
use message::{A, AAAA, Answer, Query};

/// What a server was started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Served {
    listen: Dns,
    /// This host's own name and addresses.
    own: (String, Vec<IpAddr>),
}

/// Answers until it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    _running: Running,
}

impl Served {
    /// `None` if nothing is to be served.
    pub(crate) fn of(settings: &Settings) -> Option<Self> {
        let listen = settings.dns.clone()?;
        let identity = &settings.pki.as_ref()?.identity;
        let addresses = identity.networks().iter().map(ipnet::IpNet::addr).collect();
        Some(Self { listen, own: (identity.primary().name().to_owned(), addresses) })
    }

    /// Starts the server. `peers` gives names and addresses of the hosts with a tunnel. As in Go Nebula, a failure is
    /// reported and nothing else stops because of it.
    pub(crate) fn start(self, peers: impl Fn() -> Vec<(String, Vec<IpAddr>)> + Send + 'static) -> Option<Server> {
        let Dns { host, port } = &self.listen;
        let socket = match bind(host, *port) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(%error, host, port, "Failed to start DNS server");
                return None;
            }
        };
        let started = until_stopped::pair().and_then(|(running, stopped)| {
            let address = socket.local_addr()?;
            let records = move || Records::new(std::iter::once(self.own.clone()).chain(peers()));
            let body = move || {
                let mut recent: Option<(Instant, Records)> = None;
                let mut datagram = [0; 1500];
                while stopped.not_before(&socket) {
                    let Ok((length, from)) = socket.recv_from(&mut datagram) else { continue };
                    let Some(query) = Query::parse(&datagram[..length]) else { continue };
                    #[allow(clippy::disallowed_methods, reason = "the rim reads the clock")]
                    let now = Instant::now();
                    // A flood of questions must not become one for the control plane.
                    if recent.as_ref().is_none_or(|(read, _)| now >= *read + FRESH) {
                        recent = Some((now, records()));
                    }
                    let answer = recent.as_ref().map_or(Answer::NoSuchName, |(_, records)| records.answer(&query));
                    // Who asked may be gone.
                    let _ = socket.send_to(&query.reply(&answer), from);
                }
            };
            std::thread::Builder::new().name("dns".to_owned()).spawn(body)?;
            tracing::info!(dnsListener = %address, "Starting DNS responder");
            Ok(Server { _running: running })
        });
        started.inspect_err(|error| tracing::warn!(%error, "Failed to start DNS server")).ok()
    }
}

/// How old an answer about peers may be.
const FRESH: Duration = Duration::from_secs(1);

/// No host is every address of both families, or of IPv4 where the system has no other.
fn bind(host: &str, port: u16) -> io::Result<UdpSocket> {
    if host.is_empty() {
        return UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)));
    }
    UdpSocket::bind(names::listen_addresses(host, port)?.as_slice())
}

/// First addresses of both families by lower-case name.
#[derive(Debug)]
struct Records {
    hosts: HashMap<String, [Option<IpAddr>; 2]>,
}

impl Records {
    /// Of two hosts with one name the later one counts.
    fn new(hosts: impl Iterator<Item = (String, Vec<IpAddr>)>) -> Self {
        let record = |(name, addresses): (String, Vec<IpAddr>)| {
            let first = |v4: bool| addresses.iter().copied().find(|address| address.is_ipv4() == v4);
            (name.to_ascii_lowercase(), [first(true), first(false)])
        };
        Self { hosts: hosts.map(record).collect() }
    }

    fn answer(&self, query: &Query<'_>) -> Answer {
        match (self.hosts.get(&query.name), query.kind) {
            (Some([v4, _]), A) => v4.map_or(Answer::Nothing, Answer::Address),
            (Some([_, v6]), AAAA) => v6.map_or(Answer::Nothing, Answer::Address),
            // As Go Nebula, which knows no other types.
            _ => Answer::NoSuchName,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_first_address_of_each_family_and_no_other_types() {
        let host = |name: &str, addresses: &[&str]| {
            (name.to_owned(), addresses.iter().map(|address| address.parse().unwrap()).collect())
        };
        let records =
            Records::new([host("One", &["10.0.0.1", "fd00::1", "10.0.0.9"]), host("two.x", &["10.0.0.2"])].into_iter());
        let answer = |name: &str, kind| records.answer(&Query::parse(&message::tests::question(name, kind)).unwrap());
        assert_eq!(answer("oNe", A), Answer::Address("10.0.0.1".parse().unwrap()));
        assert_eq!(answer("one", AAAA), Answer::Address("fd00::1".parse().unwrap()));
        assert_eq!(answer("two.x", AAAA), Answer::Nothing);
        assert_eq!(answer("two.x", 15), Answer::NoSuchName);
        assert_eq!(answer("two", A), Answer::NoSuchName);
        assert_eq!(answer("", A), Answer::NoSuchName);
    }
}
