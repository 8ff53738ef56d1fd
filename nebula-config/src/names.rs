//! Resolves the names in `static_host_map` in the background, and repeats that periodically.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::LookupIpStrategy;
use hickory_resolver::net::NetError;
use hickory_resolver::proto::rr::Name;

use crate::{HostTarget, NameFamily, StaticHosts};

/// Endpoints by overlay address.
pub type Endpoints = BTreeMap<IpAddr, Vec<SocketAddr>>;

/// Why a name has no address.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The resolver cannot run.
    #[error("{0}")]
    Runtime(#[source] std::io::Error),
    /// The system's configuration of the resolver is unusable.
    #[error("system resolver: {0}")]
    System(#[source] NetError),
    /// The resolver took too long.
    #[error("no answer within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The resolver found nothing.
    #[error("{0}")]
    LookUp(#[source] NetError),
}

/// Addresses by name.
type Answers = BTreeMap<String, Vec<IpAddr>>;

/// The hosts to switch to. They replace others that were not taken yet, so that nobody waits for a slow lookup.
type Next = Mutex<Option<StaticHosts>>;

/// A thread that resolves names. It ends when this is dropped.
#[derive(Debug)]
pub struct NameWatch {
    next: Arc<Next>,
    /// Wakes the thread to take [`NameWatch::next`].
    wake: SyncSender<()>,
    latest: Arc<Mutex<(NameFamily, Answers)>>,
}

impl NameWatch {
    /// Starts resolving the names of `hosts`. `changed` gets all endpoints whenever an answer changes them.
    ///
    /// # Errors
    /// Returns an error if no thread can be started.
    pub fn start(hosts: StaticHosts, changed: impl FnMut(Endpoints) + Send + 'static) -> std::io::Result<Self> {
        let (wake, woken) = sync_channel(1);
        let next = Arc::<Next>::default();
        let latest = Arc::<Mutex<(NameFamily, Answers)>>::default();
        let (awaited, shared) = (Arc::clone(&next), Arc::clone(&latest));
        let run = move || watch(hosts, (&woken, &awaited), &shared, look_up, changed);
        std::thread::Builder::new().name("names".to_owned()).spawn(run)?;
        Ok(Self { next, wake, latest })
    }

    /// Endpoints of `hosts`, as far as names have been resolved already.
    #[must_use]
    pub fn endpoints(&self, hosts: &StaticHosts) -> Endpoints {
        known_endpoints(hosts, &self.latest)
    }

    /// Switches to other hosts at once. Their endpoints are passed to `changed` again, because an answer for the
    /// previous hosts may have been in flight.
    pub fn replace(&self, hosts: StaticHosts) {
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = Some(hosts);
        // If it is full, the thread is going to look anyway.
        let _ = self.wake.try_send(());
    }
}

fn watch(
    mut hosts: StaticHosts,
    (woken, next): (&Receiver<()>, &Next),
    latest: &Mutex<(NameFamily, Answers)>,
    mut look_up: impl FnMut(&str, NameFamily, Duration) -> Result<Vec<IpAddr>, Error>,
    mut changed: impl FnMut(Endpoints),
) {
    let mut known = hosts.endpoints(&BTreeMap::new());
    loop {
        let mut answers = Answers::new();
        for name in hosts.names() {
            match look_up(&name, hosts.family, hosts.lookup_timeout) {
                Ok(addresses) => {
                    answers.insert(name, addresses);
                }
                Err(error) => {
                    tracing::error!(hostname = name, %error, network = hosts.family.name(), "DNS resolution failed for static_map host");
                }
            }
        }
        let endpoints = hosts.endpoints(&answers);
        *latest.lock().unwrap_or_else(PoisonError::into_inner) = (hosts.family, answers);
        if endpoints != known {
            tracing::info!(staticHosts = ?endpoints, "DNS results changed for host list");
            known.clone_from(&endpoints);
            changed(endpoints);
        }
        let wait = if hosts.has_names() { hosts.cadence } else { FOREVER };
        if let Err(RecvTimeoutError::Disconnected) = woken.recv_timeout(wait) {
            return;
        }
        let replaced = next.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(new) = replaced {
            known = known_endpoints(&new, latest);
            changed(known.clone());
            hosts = new;
        }
    }
}

fn known_endpoints(hosts: &StaticHosts, latest: &Mutex<(NameFamily, Answers)>) -> Endpoints {
    let latest = latest.lock().unwrap_or_else(PoisonError::into_inner);
    let (family, answers) = &*latest;
    if *family == hosts.family { hosts.endpoints(answers) } else { hosts.endpoints(&Answers::new()) }
}

/// The names among these targets that cannot be resolved, each with its error.
#[must_use]
pub(crate) fn unresolved(targets: &[HostTarget]) -> Vec<(&str, Error)> {
    let mut failed = Vec::new();
    for target in targets {
        if let HostTarget::Name { host, .. } = target
            && let Err(error) = look_up(host, NameFamily::Both, RESOLVE_TIMEOUT)
        {
            failed.push((host.as_str(), error));
        }
    }
    failed
}

/// The first address of every target, with names resolved; targets that cannot be resolved are logged and skipped.
#[must_use]
pub fn resolve_once(targets: &[HostTarget]) -> Vec<SocketAddr> {
    let resolve = |target: &HostTarget| match target {
        HostTarget::Address(address) => Some(*address),
        HostTarget::Name { host, port } => match look_up(host, NameFamily::Both, RESOLVE_TIMEOUT) {
            Ok(addresses) => addresses.first().map(|ip| SocketAddr::new(*ip, *port)),
            Err(error) => {
                tracing::error!(hostname = host, %error, "Failed to resolve");
                None
            }
        },
    };
    targets.iter().filter_map(resolve).collect()
}

/// Resolves a host name or address to listen on.
///
/// # Errors
/// Returns an error if the name has no address.
pub fn listen_addresses(host: &str, port: u16) -> std::io::Result<Vec<SocketAddr>> {
    let addresses = match host.parse() {
        Ok(address) => vec![address],
        Err(_) => look_up(host, NameFamily::Both, RESOLVE_TIMEOUT).map_err(std::io::Error::other)?,
    };
    Ok(addresses.into_iter().map(|address| SocketAddr::new(address, port)).collect())
}

/// Listens on `host:port`; an empty host means all addresses.
///
/// # Errors
/// Returns an error if the text is invalid, the host has no address, or the port is in use.
pub fn bind(listen: &str) -> std::io::Result<TcpListener> {
    let everywhere = |port: u16| nebula_cert::listener::listen((Ipv6Addr::UNSPECIFIED, port).into());
    if let Some(port) = listen.strip_prefix(':') {
        return everywhere(port.parse::<u16>().map_err(std::io::Error::other)?);
    }
    match listen.parse::<HostTarget>().map_err(std::io::Error::other)? {
        // As in Go, the unspecified address of either family covers both.
        HostTarget::Address(address) if address.ip().is_unspecified() => everywhere(address.port()),
        HostTarget::Address(address) => TcpListener::bind(address),
        HostTarget::Name { host, port } => TcpListener::bind(listen_addresses(&host, port)?.as_slice()),
    }
}

/// Resolves one name with the hosts file and DNS.
///
/// # Errors
/// Returns the resolver's error, or a timeout.
pub fn look_up(name: &str, family: NameFamily, timeout: Duration) -> Result<Vec<IpAddr>, Error> {
    // Lookups are rare: a runtime that lives for one lookup uses no memory in between, and reads /etc/resolv.conf and
    // /etc/hosts afresh. Underscores inside a label, common in container names, are not valid in host names, but
    // resolvers accept them.
    let query = Name::from_utf8(name)
        .or_else(|_| Name::from_str_relaxed(name))
        .map_err(NetError::from)
        .map_err(Error::LookUp)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Runtime)?;
    runtime.block_on(async {
        let mut builder = TokioResolver::builder_tokio().map_err(Error::System)?;
        builder.options_mut().ip_strategy = match family {
            NameFamily::Ip4 => LookupIpStrategy::Ipv4Only,
            NameFamily::Ip6 => LookupIpStrategy::Ipv6Only,
            NameFamily::Both => LookupIpStrategy::Ipv4AndIpv6,
        };
        let resolver = builder.build().map_err(Error::System)?;
        match tokio::time::timeout(timeout, resolver.lookup_ip(query)).await {
            Err(_) => Err(Error::Timeout(timeout)),
            Ok(Err(error)) => Err(Error::LookUp(error)),
            Ok(Ok(answer)) => Ok(answer.iter().take(MAX_ADDRESSES_PER_NAME).collect()),
        }
    })
}

const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);
const FOREVER: Duration = Duration::from_secs(365 * 86_400);
// More endpoints for one name help nobody, and handshakes would go to all of them at once.
const MAX_ADDRESSES_PER_NAME: usize = 32;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn hosts(text: &str) -> StaticHosts {
        let tree = crate::parse(text).unwrap();
        crate::Settings::read_without_pki(&tree).unwrap().static_hosts
    }

    fn endpoints(at: &[&str]) -> Endpoints {
        BTreeMap::from([("10.42.0.1".parse().unwrap(), at.iter().map(|text| text.parse().unwrap()).collect())])
    }

    #[test]
    fn every_address_to_listen_on_is_of_both_families() {
        let listener = bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for loopback in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
            assert!(std::net::TcpStream::connect((loopback, port)).is_ok(), "{loopback}");
        }
    }

    #[test]
    fn an_answer_about_old_hosts_never_outlives_their_replacement() {
        let old = hosts("static_host_map: {10.42.0.1: ['old.example:1']}");
        let new = hosts("static_host_map: {10.42.0.1: ['192.0.2.2:2']}");
        let (wake, woken) = sync_channel(1);
        let (mut wake, next) = (Some(wake), Next::default());
        let look_up = |_: &str, _, _| {
            // The reload happens while the answer is in flight; then the sender is dropped, and the watch ends.
            *next.lock().unwrap() = Some(new.clone());
            wake.take().expect("only the old hosts have a name").send(()).unwrap();
            Ok(vec!["192.0.2.1".parse().unwrap()])
        };
        let mut seen = Vec::new();
        watch(old, (&woken, &next), &Mutex::default(), look_up, |endpoints| seen.push(endpoints));
        assert_eq!(seen, [endpoints(&["192.0.2.1:1"]), endpoints(&["192.0.2.2:2"])]);
    }

    #[test]
    fn a_replacement_keeps_the_answers_for_names_that_stay() {
        let old = hosts("static_host_map: {10.42.0.1: ['lighthouse.example:1']}");
        let new = hosts("static_host_map: {10.42.0.1: ['lighthouse.example:2', '192.0.2.2:2']}");
        let (wake, woken) = sync_channel(1);
        let (mut wake, next) = (Some(wake), Next::default());
        let look_up = |_: &str, _, _| {
            if let Some(wake) = wake.take() {
                *next.lock().unwrap() = Some(new.clone());
                wake.send(()).unwrap();
            }
            Ok(vec!["192.0.2.1".parse().unwrap()])
        };
        let mut seen = Vec::new();
        watch(old, (&woken, &next), &Mutex::default(), look_up, |endpoints| seen.push(endpoints));
        assert_eq!(seen, [endpoints(&["192.0.2.1:1"]), endpoints(&["192.0.2.1:2", "192.0.2.2:2"])]);
    }

    #[test]
    fn many_reloads_during_a_slow_lookup_wait_for_nothing_and_the_last_one_counts() {
        let of = |port: u32| hosts(&format!("static_host_map: {{10.42.0.1: ['192.0.2.2:{port}']}}"));
        let (wake, woken) = sync_channel(1);
        let watched = NameWatch { next: Arc::default(), wake, latest: Arc::default() };
        let next = Arc::clone(&watched.next);
        let mut watched = Some(watched);
        let look_up = |_: &str, _, _| {
            let watched = watched.take().expect("only the first hosts have a name");
            (1..=20).for_each(|port| watched.replace(of(port)));
            Ok(vec!["192.0.2.1".parse().unwrap()])
        };
        let mut seen = Vec::new();
        let first = hosts("static_host_map: {10.42.0.1: ['slow.example:1']}");
        watch(first, (&woken, &next), &Mutex::default(), look_up, |endpoints| seen.push(endpoints));
        assert_eq!(seen, [endpoints(&["192.0.2.1:1"]), endpoints(&["192.0.2.2:20"])]);
    }
}
