//! The lighthouse's DNS server: addresses by certificate name and by group, and certificates by address or name.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hickory_resolver::proto::rr::RecordType;
use ipnet::IpNet;
use nebula_config::names;
use nebula_config::{Dns, Settings};
use nebula_core::io::Handle;
use nebula_linux::clock;

use super::answer_limit::Asker;
use super::message::{Answer, Query};
use super::records::{Host, Records};
use super::server::{Responder, Server, Sockets};

/// What a server is started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Served {
    listen: Dns,
    own: Host,
    /// The networks of this host's certificate.
    networks: Vec<IpNet>,
}

impl Served {
    /// `None` if there is nothing to serve.
    pub(crate) fn of(settings: &Settings) -> Option<Self> {
        let listen = settings.dns.clone()?;
        let identity = &settings.pki.as_ref()?.identity;
        let certificate = identity.primary();
        let addresses = identity.networks().iter().map(IpNet::addr).collect();
        let (name, groups) = (certificate.name().to_owned(), certificate.groups().to_vec());
        let own = Host { name, addresses, groups, holds_name: true };
        Some(Self { listen, own, networks: identity.networks().to_vec() })
    }

    /// Starts the server, which queries `peers`.
    ///
    /// # Errors
    /// Returns an error if it cannot listen, or no thread can be started.
    pub(crate) fn start(self, peers: impl Peers) -> io::Result<Server> {
        let Dns { host, port, .. } = &self.listen;
        let place = |error: io::Error| io::Error::new(error.kind(), format!("{host} port {port}: {error}"));
        let sockets = bind(host, *port).map_err(place)?;
        let address = sockets.address()?;
        let lighthouse = Lighthouse { served: self, peers, recent: Mutex::default() };
        let server = Server::start(sockets, lighthouse, || (), || ())?;
        tracing::info!(dnsListener = %address, "Starting DNS responder");
        Ok(server)
    }
}

/// No host, or `0.0.0.0` as in Go, or `::` means every address of both families, or of IPv4 if the system has no IPv6.
fn bind(host: &str, port: u16) -> io::Result<Sockets> {
    if ["", "0.0.0.0", "::", "[::]"].contains(&host) {
        let every = |address: IpAddr| Sockets::bind(&[SocketAddr::new(address, port)]);
        return every(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| every(Ipv4Addr::UNSPECIFIED.into()));
    }
    Sockets::bind(&names::listen_addresses(host, port)?)
}

/// The peers that the server knows.
pub(crate) trait Peers: Send + Sync + 'static {
    /// The hosts with a tunnel.
    fn hosts(&self) -> Vec<Host>;
    /// The certificate of the peer with this address, as JSON.
    fn certificate(&self, address: IpAddr) -> Option<String>;
}

impl Peers for Handle {
    fn hosts(&self) -> Vec<Host> {
        let host = |tunnel: nebula_core::TunnelStatus| {
            let certificate = Self::certificate(self, tunnel.local_index);
            let groups = certificate.map(|certificate| certificate.groups().to_vec()).unwrap_or_default();
            Host { name: tunnel.name, addresses: tunnel.peer, groups, holds_name: tunnel.holds_name }
        };
        // A tunnel that another one has replaced would count its host twice in its groups.
        self.tunnels().into_iter().filter(|tunnel| tunnel.primary).map(host).collect()
    }

    fn certificate(&self, address: IpAddr) -> Option<String> {
        let tunnels = self.tunnels();
        let tunnel = tunnels.iter().find(|tunnel| tunnel.primary && tunnel.peer.contains(&address))?;
        Some(Self::certificate(self, tunnel.local_index)?.to_json().to_string())
    }
}

#[derive(Debug)]
struct Lighthouse<P> {
    served: Served,
    peers: P,
    recent: Mutex<Option<(Instant, Arc<Records>)>>,
}

impl<P: Peers> Responder for Lighthouse<P> {
    fn asker(&self, from: IpAddr) -> Asker {
        match from {
            local if local.is_loopback() || self.served.own.addresses.contains(&local) => Asker::Local,
            host if self.records().is_host(host) => Asker::Member,
            _ => Asker::Stranger,
        }
    }

    async fn answer(&self, query: &Query, from: IpAddr) -> Answer {
        if query.kind == RecordType::TXT { self.certificate(query, from) } else { self.records().answer(query) }
    }
}

impl<P: Peers> Lighthouse<P> {
    /// Rate limit: a flood of queries must not reach the control plane.
    fn records(&self) -> Arc<Records> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let now = clock::now();
        if let Some((read, records)) = &*recent
            && now < *read + MAX_RECORDS_AGE
        {
            return Arc::clone(records);
        }
        let hosts = std::iter::once(self.served.own.clone()).chain(self.peers.hosts());
        let records = Arc::new(Records::new(self.served.listen.domain.clone(), hosts));
        *recent = Some((now, Arc::clone(&records)));
        records
    }

    /// The certificate of the peer whose address or name is asked for. It says more than a name, so only hosts of the
    /// overlay get it: whoever forges such an address does not see the answer.
    fn certificate(&self, query: &Query, from: IpAddr) -> Answer {
        if !from.is_loopback() && !self.served.networks.iter().any(|network| network.contains(&from)) {
            return Answer::NOTHING;
        }
        let address = query.name.parse().ok().or_else(|| self.records().address(&query.name));
        let certificate = address.and_then(|address| self.peers.certificate(address));
        certificate.map_or(Answer::NO_SUCH_NAME, |json| Answer::text(&json, CERTIFICATE_TTL))
    }
}

/// Age up to which the list of peers is reused.
const MAX_RECORDS_AGE: Duration = Duration::from_secs(1);
/// In seconds, as Go Nebula.
const CERTIFICATE_TTL: u32 = 3600;

#[cfg(test)]
mod tests {
    use super::super::message::tests::query;
    use super::*;

    #[test]
    fn every_address_is_of_both_families() {
        for host in ["", "0.0.0.0"] {
            let free = || {
                let port = bind(host, 0).unwrap().address().unwrap().port();
                assert_ne!(port, 0);
                let sockets = bind(host, port).ok()?;
                // A port that is free for UDP may be taken for TCP, by whatever runs beside this test.
                sockets.has_tcp().then_some((port, sockets))
            };
            let (port, sockets) = (0..100).find_map(|_| free()).expect("a port that is free for both");
            for loopback in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
                let connected = std::net::TcpStream::connect((loopback, port));
                assert!(connected.is_ok(), "{host:?} from {loopback}: {connected:?}");
            }
            drop(sockets);
        }
    }

    /// One peer; counts how often it is asked for.
    struct OnePeer(std::sync::atomic::AtomicUsize);

    impl Peers for OnePeer {
        fn hosts(&self) -> Vec<Host> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let addresses = vec!["10.42.0.7".parse().unwrap()];
            vec![Host { name: "peer".to_owned(), addresses, groups: Vec::new(), holds_name: true }]
        }

        fn certificate(&self, address: IpAddr) -> Option<String> {
            (address == IpAddr::from([10, 42, 0, 7])).then(|| "{}".to_owned())
        }
    }

    fn lighthouse() -> Lighthouse<OnePeer> {
        let addresses = vec!["10.42.0.1".parse().unwrap()];
        let own = Host { name: "l".to_owned(), addresses, groups: Vec::new(), holds_name: true };
        let listen = Dns { host: String::new(), port: 53, domain: Some("n".to_owned()) };
        let served = Served { listen, own, networks: vec!["10.42.0.1/16".parse().unwrap()] };
        Lighthouse { served, peers: OnePeer(0.into()), recent: Mutex::default() }
    }

    #[test]
    fn only_hosts_of_the_overlay_get_certificates() {
        let lighthouse = lighthouse();
        let ask = |name: &str, from: &str| lighthouse.certificate(&query(name, RecordType::TXT), from.parse().unwrap());
        let certificate = Answer::text("{}", 3600);
        for from in ["127.0.0.1", "10.42.0.1", "10.42.3.4"] {
            assert_eq!(ask("10.42.0.7", from), certificate, "{from}");
            assert_eq!(ask("peer.n", from), certificate, "{from}");
        }
        assert_eq!(ask("10.42.0.7", "10.43.0.1"), Answer::NOTHING);
        assert_eq!(ask("10.42.0.8", "127.0.0.1"), Answer::NO_SUCH_NAME);
        assert_eq!(ask("peer", "127.0.0.1"), Answer::NO_SUCH_NAME, "a name without domain, as in Go Nebula");
    }

    #[test]
    fn who_has_no_tunnel_is_a_stranger_also_with_an_address_of_the_overlay() {
        let lighthouse = lighthouse();
        for (from, asker) in [
            ("127.0.0.1", Asker::Local),
            ("10.42.0.1", Asker::Local),
            ("10.42.0.7", Asker::Member),
            ("10.42.0.8", Asker::Stranger),
            ("203.0.113.7", Asker::Stranger),
        ] {
            assert_eq!(lighthouse.asker(from.parse().unwrap()), asker, "{from}");
        }
    }

    #[test]
    fn a_flood_of_queries_reads_the_tunnels_once() {
        let lighthouse = lighthouse();
        for _ in 0..100 {
            assert_eq!(lighthouse.records().answer(&query("peer", RecordType::A)).data.len(), 1);
        }
        let asked = lighthouse.peers.0.load(std::sync::atomic::Ordering::Relaxed);
        assert!(asked < 100, "{asked}");
    }
}
