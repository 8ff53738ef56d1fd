//! Starts the node and all listeners, and ends them on a signal.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use ipnet::IpNet;
use nebula_core::Event;
use nebula_core::io::interface_addresses;
use nebula_core::lighthouse::LocalAddress;
use nebula_instance::config::Settings;
use nebula_instance::host::daemon::{Error, Loaded, bind_failed, listen_address};
use nebula_instance::linux::notify;
use nebula_instance::names::{self, NameWatch};
use nebula_instance::overlay::events;
use nebula_net::Net;
use nebula_net::tcp::TcpOptions;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::{TcpListener, UdpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, broadcast};
use tokio::task::JoinSet;

use crate::arguments::{Forward, Offers, Transport, is_loopback};
use crate::credentials::Credentials;
use crate::listener::{Connections, accept_local};
use crate::overlay::Overlay;
use crate::sessions::Sessions;
use crate::{forward, http, serve, socks};

/// How long a client may take to say what it wants.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// A peer that is gone takes a place among the connections until it is noticed.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// How often the addresses of this host are looked at.
const ADDRESSES_INTERVAL: Duration = Duration::from_secs(30);
/// How long the node may take to tell its peers that it ends.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Events that wait to be logged; more are dropped.
const WAITING_EVENTS: usize = 256;

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// Returns an error if the configuration is unusable or something cannot be opened.
pub fn run(loaded: &Loaded, offers: &Offers) -> Result<(), Error> {
    let settings = loaded.settings()?;
    let credentials = offers.credentials.as_deref().map(|path| {
        let failed = |error| start(&format!("-credentials {}: {error}", path.display()));
        Credentials::read(path).map(Arc::new).map_err(failed)
    });
    let credentials = credentials.transpose()?;
    allow_many_files();
    // The path may lead elsewhere later, and without a service manager nobody listens.
    let _ = notify::connect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| start(&error.to_string()))?;
    runtime.block_on(async {
        let mut end = signal(SignalKind::terminate()).map_err(|error| start(&error.to_string()))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| start(&error.to_string()))?;
        let mut running = Running::open(&settings, offers, credentials).await?;
        notify::ready();
        let signal = tokio::select! {
            _ = end.recv() => "terminated",
            _ = interrupt.recv() => "interrupt",
            // Listeners end if the node did, which it does not by itself.
            Some(_) = running.tasks.join_next() => return Err(Error::Running("a listener ended".to_owned())),
        };
        tracing::info!(signal, "Caught signal, shutting down");
        running.end().await;
        tracing::info!("Goodbye");
        Ok(())
    })
}

fn start(cause: &str) -> Error {
    Error::Start { message: "Failed to start nebula-proxy", cause: cause.to_owned() }
}

/// Each connection has up to two files.
fn allow_many_files() {
    // Without it, a listener waits for files to become free.
    let _ = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
}

/// What runs. All of it ends when this is dropped.
struct Running {
    net: Net,
    tasks: JoinSet<()>,
    _names: Option<NameWatch>,
}

impl Running {
    async fn open(settings: &Settings, offers: &Offers, credentials: Option<Arc<Credentials>>) -> Result<Self, Error> {
        report_unserved(settings);
        let (net, networks) = open_net(settings)?;
        let overlay = Overlay::new(net.clone(), networks);
        let mut running = Self { net, tasks: JoinSet::new(), _names: None };
        running.log_events()?;
        running.follow_names(settings)?;
        if !settings.am_lighthouse {
            running.tasks.spawn(advertise_addresses(running.net.clone()));
        }
        running.listen(&overlay, offers, credentials).await?;
        running.serve(offers)?;
        Ok(running)
    }

    /// Opens the ports of this host.
    async fn listen(
        &mut self,
        overlay: &Overlay,
        offers: &Offers,
        credentials: Option<Arc<Credentials>>,
    ) -> Result<(), Error> {
        for address in &offers.socks {
            let (listener, connections) = listen("socks", *address, offers).await?;
            let server = Arc::new(socks::Server {
                overlay: overlay.clone(),
                credentials: credentials.clone(),
                head_timeout: HEAD_TIMEOUT,
                associations: Semaphore::new(offers.udp_sessions),
            });
            let serve = move |stream, from| socks::serve(Arc::clone(&server), stream, from);
            self.tasks.spawn(accept_local(listener, connections, serve));
        }
        for address in &offers.http {
            let (listener, connections) = listen("http", *address, offers).await?;
            let server =
                http::Server { overlay: overlay.clone(), credentials: credentials.clone(), head_timeout: HEAD_TIMEOUT };
            let server = Arc::new(server);
            let serve = move |stream, from| http::serve(Arc::clone(&server), stream, from);
            self.tasks.spawn(accept_local(listener, connections, serve));
        }
        for forward in &offers.forwards {
            self.forward(overlay, forward, offers).await?;
        }
        Ok(())
    }

    async fn forward(&mut self, overlay: &Overlay, forward: &Forward, offers: &Offers) -> Result<(), Error> {
        let Forward { transport, local, target } = forward;
        if !is_loopback(local.ip()) {
            tracing::warn!(%local, %target, "Everybody who reaches this address can use this forward, without credentials");
        }
        let overlay = overlay.clone();
        match transport {
            Transport::Tcp => {
                let (listener, connections) = listen("forward", *local, offers).await?;
                let target = Arc::new(target.clone());
                let serve = move |stream, from| forward::tcp(overlay.clone(), Arc::clone(&target), stream, from);
                self.tasks.spawn(accept_local(listener, connections, serve));
            }
            Transport::Udp => {
                let socket = UdpSocket::bind(local).await.map_err(|error| cannot_listen("udp", *local, &error))?;
                let at = socket.local_addr().unwrap_or(*local);
                let name = format!("forward udp:{at}");
                tracing::info!(listener = "forward", addr = %at, transport = "udp", %target, "listening");
                let sessions = Sessions::new(name.clone(), offers.udp_sessions);
                self.tasks.spawn(forward::udp(name, overlay, target.clone(), socket, sessions));
            }
        }
        Ok(())
    }

    /// Opens the ports of the overlay.
    fn serve(&mut self, offers: &Offers) -> Result<(), Error> {
        for offer in &offers.serves {
            let failed = |_| start(&format!("-serve {}={}: another -serve has this port", offer.port, offer.local));
            match offer.transport {
                Transport::Tcp => {
                    let listener = self.net.listen(offer.port).map_err(failed)?;
                    let connections = Connections::new(format!("serve {}", offer.port), offers.connections);
                    self.tasks.spawn(serve::tcp(listener, offer.local, offer.proxy_v2, connections));
                }
                Transport::Udp => {
                    let socket = self.net.bind_udp(offer.port).map_err(failed)?;
                    let sessions = Sessions::new(format!("serve udp:{}", offer.port), offers.udp_sessions);
                    self.tasks.spawn(serve::udp(socket, offer.local, sessions));
                }
            }
            let transport = if offer.transport == Transport::Tcp { "tcp" } else { "udp" };
            tracing::info!(
                listener = "serve",
                port = offer.port,
                transport,
                local = %offer.local,
                proxyV2 = offer.proxy_v2,
                "listening on the overlay"
            );
        }
        Ok(())
    }

    /// Logs what happens to tunnels, as `nebula` does.
    fn log_events(&mut self) -> Result<(), Error> {
        let (sender, receiver) = sync_channel::<Event>(WAITING_EVENTS);
        let work = move || events::log_until_closed(receiver);
        std::thread::Builder::new().name("events".to_owned()).spawn(work).map_err(|error| start(&error.to_string()))?;
        let mut happened = self.net.events();
        self.tasks.spawn(async move {
            loop {
                match happened.recv().await {
                    Ok(event) => drop(sender.try_send(event)),
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
                }
            }
        });
        Ok(())
    }

    /// Looks up the names in `static_host_map`.
    fn follow_names(&mut self, settings: &Settings) -> Result<(), Error> {
        if !settings.static_hosts.has_names() {
            return Ok(());
        }
        let (net, runtime) = (self.net.clone(), tokio::runtime::Handle::current());
        let changed = move |endpoints| {
            let net = net.clone();
            runtime.spawn(async move {
                let change = |config: &mut nebula_core::Config| config.static_hosts = endpoints;
                // An error says that the node has ended.
                let _ = net.reconfigure(change).await;
            });
        };
        let watch = NameWatch::start(settings.static_hosts.clone(), changed);
        self._names = Some(watch.map_err(|error| start(&error.to_string()))?);
        Ok(())
    }

    /// Closes everything, and lets the node tell its peers.
    async fn end(self) {
        let Self { net, mut tasks, _names: names } = self;
        drop(names);
        let mut happened = net.events();
        tasks.shutdown().await;
        net.close();
        let ended = async { while !matches!(happened.recv().await, Err(broadcast::error::RecvError::Closed)) {} };
        // A datagram may be lost anyway.
        let _ = tokio::time::timeout(END_TIMEOUT, ended).await;
    }
}

/// Opens the node. Returns the networks that belong to the overlay as well.
fn open_net(settings: &Settings) -> Result<(Net, Vec<IpNet>), Error> {
    let Some(pki) = &settings.pki else { return Err(start("pki is missing in the configuration")) };
    let listen = listen_address(&settings.listen)?;
    let socket = std::net::UdpSocket::bind(listen).map_err(|error| bind_failed(&error, listen))?;
    let bound = socket.local_addr().map_err(|error| bind_failed(&error, listen))?;
    let advertise = names::resolve_once(&settings.advertise);
    let config = settings.to_config(pki.identity.clone(), pki.trust.clone(), bound.port(), advertise);
    let mut networks = pki.identity.networks().to_vec();
    networks.extend(config.subnets.iter().map(|subnet| subnet.network));
    let mut options = TcpOptions::default();
    options.keepalive = Some(KEEPALIVE);
    let mtu = u16::try_from(settings.tun.mtu).unwrap_or(u16::MAX);
    let net = Net::builder(config).socket(socket).tcp(options).mtu(mtu).start();
    let net = net.map_err(|error| start(&error.to_string()))?;
    let shown = |networks: &[IpNet]| networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let name = pki.identity.primary().name();
    tracing::info!(name, networks = shown(&networks), udpAddr = %bound, build = env!("CARGO_PKG_VERSION"),
        "The overlay is open");
    Ok((net, networks))
}

async fn listen(kind: &str, address: SocketAddr, offers: &Offers) -> Result<(TcpListener, Connections), Error> {
    let listener = TcpListener::bind(address).await.map_err(|error| cannot_listen(kind, address, &error))?;
    let at = listener.local_addr().unwrap_or(address);
    tracing::info!(listener = kind, addr = %at, "listening");
    Ok((listener, Connections::new(format!("{kind} {at}"), offers.connections)))
}

fn cannot_listen(kind: &str, address: SocketAddr, error: &io::Error) -> Error {
    let (port, letter) = (address.port(), if kind == "udp" { 'u' } else { 't' });
    let hint = match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!(": another program has this port, `ss -{letter}lnp sport = :{port}` names it")
        }
        io::ErrorKind::AddrNotAvailable => format!(": {} is no address of this machine", address.ip()),
        io::ErrorKind::PermissionDenied => ": ports below 1024 are for root, take a higher one".to_owned(),
        _ => String::new(),
    };
    start(&format!("cannot listen on {address}: {error}{hint}"))
}

/// Tells lighthouses the addresses of this host, and again when they change.
async fn advertise_addresses(net: Net) {
    let mut known: Vec<LocalAddress> = Vec::new();
    loop {
        match interface_addresses() {
            Ok(addresses) if addresses != known => {
                known.clone_from(&addresses);
                // An error says that the node has ended.
                let _ = net.control(move |node| node.set_local_addresses(addresses)).await;
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "Cannot list the addresses of this host"),
        }
        tokio::time::sleep(ADDRESSES_INTERVAL).await;
    }
}

/// Names the sections of the configuration that only the daemon obeys.
fn report_unserved(settings: &Settings) {
    let sections = [
        ("stats", settings.stats.is_some()),
        ("lighthouse.serve_dns", settings.dns.is_some()),
        ("resolver", settings.resolver.is_some()),
        ("daemon.whois_socket", settings.operation.whois.is_some()),
    ];
    let unserved: Vec<_> = sections.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect();
    if !unserved.is_empty() {
        tracing::warn!(keys = unserved.join(" "), "nebula-proxy does not serve these keys; the nebula daemon does");
    }
    if settings.operation.enrolment.is_some() {
        tracing::warn!(
            "nebula-proxy does not renew its certificate: let nebula-enrol -renew do it from a timer, and restart nebula-proxy then"
        );
    }
}
