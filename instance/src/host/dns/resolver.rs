//! The host's resolver: asks the lighthouses for the names of the overlay's domain, and remembers what they said.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, NameServerConfig, ProtocolConfig, ResolveHosts, ResolverConfig, ServerOrderingStrategy,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::rr::{Name, RecordType};
use ipnet::IpNet;
use nebula_config::{Resolver, Settings};
use nebula_linux::clock;

use super::answer_limit::Asker;
use super::message::{Answer, Query};
use super::registration::{Registered, Registration};
use super::reverse;
use super::server::{Responder, Server, Sockets};

/// What a resolver is started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resolving {
    settings: Resolver,
    /// The networks of this host's certificate.
    networks: Vec<IpNet>,
}

impl Resolving {
    /// `None` if this host has no resolver.
    pub(crate) fn of(settings: &Settings) -> Option<Self> {
        let networks = settings.pki.as_ref()?.identity.networks().to_vec();
        Some(Self { settings: settings.resolver.clone()?, networks })
    }

    /// Starts the resolver, and registers it for the overlay device `device` with the resolver that the host's
    /// programs use.
    ///
    /// # Errors
    /// Returns an error if it cannot listen, or no thread can be started.
    pub(crate) fn start(self, device: Option<&str>) -> io::Result<HostResolver> {
        let listen = self.settings.listen;
        let registered = device.filter(|_| self.settings.register).map(|device| {
            Arc::new(Registered::new(Registration {
                device: device.to_owned(),
                server: listen,
                domain: self.settings.domain.clone(),
                zones: reverse::zones(&self.networks),
            }))
        });
        let place = |error: io::Error| io::Error::new(error.kind(), format!("resolver.listen {listen}: {error}"));
        let sockets = Sockets::bind(&[listen]).map_err(place)?;
        let lighthouses = Lighthouses::new(self)?;
        let (before, after) = (registered.clone(), registered.clone());
        let register = move || before.iter().for_each(|registered| registered.register());
        let revert = move || after.iter().for_each(|registered| registered.revert());
        let server = Server::start(sockets, lighthouses, register, revert)?;
        tracing::info!(resolver = %listen, "Starting the resolver of overlay names");
        Ok(HostResolver { _server: server, registered })
    }
}

/// Resolves names until it is dropped.
#[derive(Debug)]
pub(crate) struct HostResolver {
    _server: Server,
    /// `None` without a device, or if `resolver.register` is false.
    registered: Option<Arc<Registered>>,
}

impl HostResolver {
    pub(crate) fn registered(&self) -> Option<Arc<Registered>> {
        self.registered.clone()
    }
}

#[derive(Debug)]
struct Lighthouses {
    resolving: Resolving,
    zones: Vec<String>,
    resolver: TokioResolver,
    known: Mutex<Known>,
}

impl Lighthouses {
    fn new(resolving: Resolving) -> io::Result<Self> {
        let servers = resolving.settings.servers.iter().map(|server| name_server(*server)).collect();
        let config = ResolverConfig::from_parts(None, Vec::new(), servers);
        let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        let options = builder.options_mut();
        options.timeout = TIMEOUT;
        options.attempts = 1;
        options.use_hosts_file = ResolveHosts::Never;
        options.server_ordering_strategy = ServerOrderingStrategy::UserProvidedOrder;
        options.cache_size = MAX_KNOWN as u64;
        options.positive_max_ttl = Some(MAX_AGE);
        let resolver = builder.build().map_err(io::Error::other)?;
        let zones = reverse::zones(&resolving.networks);
        Ok(Self { resolving, zones, resolver, known: Mutex::default() })
    }

    /// Whether the name is the domain's, or that of an address of the overlay.
    fn is_ours(&self, name: &str) -> bool {
        let within = |zone: &str| name.strip_suffix(zone).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        within(&self.resolving.settings.domain) || self.zones.iter().any(|zone| within(zone))
    }

    /// Whether a program of this host asks. Others can ask the lighthouses.
    fn serves(&self, from: IpAddr) -> bool {
        let own = self.resolving.networks.iter().any(|network| network.addr() == from);
        own || from.is_loopback() || from == self.resolving.settings.listen.ip()
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name_server(server: SocketAddr) -> NameServerConfig {
    let connections = [ProtocolConfig::Udp, ProtocolConfig::Tcp].map(|protocol| {
        let mut connection = ConnectionConfig::new(protocol);
        connection.port = server.port();
        connection
    });
    // A name that one lighthouse does not know is asked of the next: each knows the hosts that have a tunnel with it.
    NameServerConfig::new(server.ip(), false, connections.into())
}

impl Responder for Lighthouses {
    fn asker(&self, from: IpAddr) -> Asker {
        if self.serves(from) { Asker::Local } else { Asker::Stranger }
    }

    async fn answer(&self, query: &Query, from: IpAddr) -> Answer {
        if !self.is_ours(&query.name) || !self.serves(from) {
            return Answer::REFUSED;
        }
        let key = (query.name.clone(), query.kind);
        let now = clock::now();
        if let Some(answer) = self.known().while_away(now, &key) {
            return answer;
        }
        let Ok(mut name) = Name::from_utf8(&query.name) else { return Answer::NO_SUCH_NAME };
        name.set_fqdn(true);
        match self.resolver.lookup(name, query.kind).await {
            Ok(found) => {
                let records = found.answers().iter().filter(|record| record.record_type() == query.kind);
                let ttl = records.clone().map(|record| record.ttl).min().unwrap_or_default();
                let answer = Answer::records(records.map(|record| record.data.clone()).collect(), ttl);
                self.known().learn(now, key, answer.clone());
                answer
            }
            Err(NetError::Dns(DnsError::NoRecordsFound(none))) => {
                let answer = Answer { code: none.response_code, ..Answer::NOTHING };
                self.known().forget(&key);
                answer
            }
            Err(error) => {
                let answer = self.known().failed(clock::now(), &key);
                tracing::debug!(name = query.name, %error, isKnown = answer.is_some(), "No lighthouse answered");
                answer.unwrap_or(Answer::FAILED)
            }
        }
    }
}

/// The last answers, for while no lighthouse answers (RFC 8767).
#[derive(Debug, Default)]
struct Known {
    answers: HashMap<(String, RecordType), (Instant, Answer)>,
    /// Until when known answers are given without asking.
    away_until: Option<Instant>,
}

impl Known {
    fn learn(&mut self, now: Instant, key: (String, RecordType), answer: Answer) {
        self.away_until = None;
        if self.answers.len() >= MAX_KNOWN && !self.answers.contains_key(&key) {
            // Rare enough to look at all of them.
            let oldest = self.answers.iter().min_by_key(|(_, (learnt, _))| *learnt).map(|(key, _)| key.clone());
            oldest.and_then(|oldest| self.answers.remove(&oldest));
        }
        self.answers.insert(key, (now, answer));
    }

    fn forget(&mut self, key: &(String, RecordType)) {
        self.away_until = None;
        self.answers.remove(key);
    }

    /// Notes that no lighthouse answered. Returns the last answer.
    fn failed(&mut self, now: Instant, key: &(String, RecordType)) -> Option<Answer> {
        self.away_until = Some(now + BACKOFF);
        self.last(key)
    }

    fn while_away(&self, now: Instant, key: &(String, RecordType)) -> Option<Answer> {
        self.away_until.filter(|until| now < *until).and_then(|_| self.last(key))
    }

    fn last(&self, key: &(String, RecordType)) -> Option<Answer> {
        self.answers.get(key).map(|(_, answer)| Answer { ttl: STALE_TTL, ..answer.clone() })
    }
}

/// Longest wait for one lighthouse; the path to it is a tunnel, which may have to be made first.
const TIMEOUT: Duration = Duration::from_millis(1500);
/// Time in which no lighthouse is asked for a name that is known, after none answered.
const BACKOFF: Duration = Duration::from_secs(5);
/// Names that are remembered.
const MAX_KNOWN: usize = 1000;
/// Longest time for which an answer is used without asking again.
const MAX_AGE: Duration = Duration::from_secs(60);
/// In seconds (RFC 8767 section 5 recommends 30).
const STALE_TTL: u32 = 30;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::message::tests::query;
    use super::*;

    /// A lighthouse that knows one name, and counts queries. Its answers must not be kept.
    struct Knows(&'static str, Arc<AtomicUsize>);

    impl Responder for Knows {
        fn asker(&self, _from: IpAddr) -> Asker {
            Asker::Local
        }

        async fn answer(&self, query: &Query, _from: IpAddr) -> Answer {
            self.1.fetch_add(1, Ordering::Relaxed);
            let address = [10, 42, 0, 7].into();
            if query.name == self.0 { Answer::addresses([address], 0) } else { Answer::NO_SUCH_NAME }
        }
    }

    fn lighthouse(name: &'static str) -> (Server, SocketAddr, Arc<AtomicUsize>) {
        let sockets = Sockets::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
        let (address, asked) = (sockets.address().unwrap(), Arc::default());
        (Server::start(sockets, Knows(name, Arc::clone(&asked)), || (), || ()).unwrap(), address, asked)
    }

    struct Host(Lighthouses, tokio::runtime::Runtime);

    impl Host {
        fn new(servers: &[SocketAddr]) -> Self {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let listen = "127.0.0.9:53".parse().unwrap();
            let settings = Resolver { domain: "n".to_owned(), listen, servers: servers.to_vec(), register: false };
            let networks = vec!["10.42.0.9/16".parse().unwrap()];
            let lighthouses = {
                let _entered = runtime.enter();
                Lighthouses::new(Resolving { settings, networks }).unwrap()
            };
            Self(lighthouses, runtime)
        }

        fn ask(&self, name: &str) -> Answer {
            self.1.block_on(self.0.answer(&query(name, RecordType::A), [127, 0, 0, 1].into()))
        }
    }

    fn found(ttl: u32) -> Answer {
        Answer::addresses([[10, 42, 0, 7].into()], ttl)
    }

    #[test]
    fn a_name_that_one_lighthouse_does_not_know_is_asked_of_the_next() {
        let ((_one, one, asked), (_two, two, _)) = (lighthouse("a.n"), lighthouse("b.n"));
        let host = Host::new(&[one, two]);
        assert_eq!(host.ask("a.n"), found(0));
        assert_eq!(host.ask("B.n"), found(0));
        assert_eq!(host.ask("c.n"), Answer::NO_SUCH_NAME);
        assert!(asked.load(Ordering::Relaxed) >= 3);
    }

    #[test]
    fn the_last_answer_is_given_while_no_lighthouse_answers() {
        let (running, address, _) = lighthouse("a.n");
        let host = Host::new(&[address]);
        assert_eq!(host.ask("a.n"), found(0));
        drop(running);
        assert_eq!(host.ask("a.n"), found(STALE_TTL));
        assert!(host.0.known().away_until.is_some());
        assert_eq!(host.ask("b.n"), Answer::FAILED, "not the same as: there is no such name");
        // Without asking.
        let began = clock::now();
        for _ in 0..100 {
            assert_eq!(host.ask("a.n"), found(STALE_TTL));
        }
        assert!(began.elapsed() < TIMEOUT);
    }

    #[test]
    fn a_name_that_is_gone_is_forgotten() {
        let mut known = Known::default();
        let (key, now) = (("a.n".to_owned(), RecordType::A), clock::now());
        known.learn(now, key.clone(), found(60));
        known.forget(&key);
        assert_eq!(known.failed(now, &key), None);
    }

    #[test]
    fn of_too_many_names_the_oldest_is_forgotten() {
        let mut known = Known::default();
        let (key, now) = (|n: usize| (format!("h{n}.n"), RecordType::A), clock::now());
        for n in 0..=MAX_KNOWN {
            known.learn(now + Duration::from_millis(n as u64), key(n), found(60));
        }
        assert_eq!((known.answers.len(), known.last(&key(0))), (MAX_KNOWN, None));
        assert!(known.last(&key(1)).is_some());
    }

    #[test]
    fn other_names_and_other_hosts_are_refused() {
        let host = Host::new(&["127.0.0.1:1".parse().unwrap()]);
        for (name, is_ours) in [
            ("n", true),
            ("a.n", true),
            ("an", false),
            ("a.example", false),
            ("7.0.42.10.in-addr.arpa", true),
            ("7.0.43.10.in-addr.arpa", false),
            ("", false),
        ] {
            assert_eq!(host.0.is_ours(name), is_ours, "{name}");
        }
        for (from, serves) in
            [("127.0.0.1", true), ("::1", true), ("10.42.0.9", true), ("10.42.0.8", false), ("192.0.2.1", false)]
        {
            assert_eq!(host.0.serves(from.parse().unwrap()), serves, "{from}");
        }
        assert_eq!(host.ask("a.example"), Answer::REFUSED);
    }
}
