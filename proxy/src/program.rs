//! Starts the node and all listeners, reloads the node on a signal, and ends all on another.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::listener::Places;
use nebula_config::loaded::{Error, Loaded};
use nebula_linux::descriptors::Passed;
use nebula_linux::notify;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::arguments::{Forward, Offers, Transport, is_loopback};
use crate::credentials::Credentials;
use crate::kept::Kept;
use crate::listener::{Connections, accept_local};
use crate::node::{Node, start};
use crate::overlay::Overlay;
use crate::sessions::Sessions;
use crate::{forward, http, serve, socks};

/// How long a client may take to say what it wants.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs until SIGTERM or SIGINT, and reads the configuration again at SIGHUP. `passed` is what the service manager has
/// held since the last run.
///
/// # Errors
/// Returns an error if the configuration is unusable or something cannot be opened.
pub fn run(loaded: &Loaded, offers: &Offers, passed: io::Result<Vec<Passed>>) -> Result<(), Error> {
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
        let signal = |kind| signal(kind).map_err(|error| start(&error.to_string()));
        let (mut end, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut hangup = signal(SignalKind::hangup())?;
        let mut running = Running::open(loaded, offers, credentials, Kept::new(passed, offers))?;
        let (reload, mut reloads) = mpsc::channel(1);
        running.node.follow_enrolment(reload)?;
        notify::ready();
        let signal = loop {
            tokio::select! {
                _ = end.recv() => break "terminated",
                _ = interrupt.recv() => break "interrupt",
                _ = hangup.recv() => {
                    tracing::info!("Caught HUP, reloading config");
                    running.node.reload().await;
                }
                // Nobody asks without an enrolment.
                Some(done) = reloads.recv() => drop(done.send(running.node.reload().await)),
                // Listeners end if the node did, which it does not by itself.
                Some(_) = running.tasks.join_next() => return Err(Error::Running("a listener ended".to_owned())),
            }
        };
        tracing::info!(signal, "Caught signal, shutting down");
        running.end().await;
        tracing::info!("Goodbye");
        Ok(())
    })
}

/// Each connection has up to two files.
fn allow_many_files() {
    // Without it, a listener waits for files to become free.
    let _ = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
}

/// What runs. All of it ends when this is dropped.
struct Running {
    node: Node,
    tasks: JoinSet<()>,
}

impl Running {
    fn open(
        loaded: &Loaded,
        offers: &Offers,
        credentials: Option<Arc<Credentials>>,
        mut kept: Kept,
    ) -> Result<Self, Error> {
        let mut running = Self { node: Node::open(loaded, &mut kept)?, tasks: JoinSet::new() };
        let overlay = running.node.overlay.clone();
        running.listen(&overlay, offers, credentials, &mut kept)?;
        running.serve(&overlay, offers)?;
        kept.keep();
        Ok(running)
    }

    /// Opens the ports of this host.
    fn listen(
        &mut self,
        overlay: &Overlay,
        offers: &Offers,
        credentials: Option<Arc<Credentials>>,
        kept: &mut Kept,
    ) -> Result<(), Error> {
        for address in &offers.socks {
            let (listener, connections) = listen("socks", *address, offers, kept)?;
            let server = Arc::new(socks::Server {
                overlay: overlay.clone(),
                credentials: credentials.clone(),
                head_timeout: HEAD_TIMEOUT,
                associations: Places::new(offers.udp_sessions),
            });
            let serve = move |stream, from| socks::serve(Arc::clone(&server), stream, from);
            self.tasks.spawn(accept_local(listener, connections, serve));
        }
        for address in &offers.http {
            let (listener, connections) = listen("http", *address, offers, kept)?;
            let server =
                http::Server { overlay: overlay.clone(), credentials: credentials.clone(), head_timeout: HEAD_TIMEOUT };
            let server = Arc::new(server);
            let serve = move |stream, from| http::serve(Arc::clone(&server), stream, from);
            self.tasks.spawn(accept_local(listener, connections, serve));
        }
        for forward in &offers.forwards {
            self.forward(overlay, forward, offers, kept)?;
        }
        Ok(())
    }

    fn forward(&mut self, overlay: &Overlay, forward: &Forward, offers: &Offers, kept: &mut Kept) -> Result<(), Error> {
        let Forward { transport, local, target } = forward;
        if !is_loopback(local.ip()) {
            tracing::warn!(%local, %target, "Everybody who reaches this address can use this forward, without credentials");
        }
        let overlay = overlay.clone();
        match transport {
            Transport::Tcp => {
                let (listener, connections) = listen("forward", *local, offers, kept)?;
                let target = Arc::new(target.clone());
                let serve = move |stream, from| forward::tcp(overlay.clone(), Arc::clone(&target), stream, from);
                self.tasks.spawn(accept_local(listener, connections, serve));
            }
            Transport::Udp => {
                let socket = kept.forward(*local).map_err(|error| cannot_listen("udp", *local, &error))?;
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
    fn serve(&mut self, overlay: &Overlay, offers: &Offers) -> Result<(), Error> {
        for offer in &offers.serves {
            let failed = |_| start(&format!("-serve {}={}: another -serve has this port", offer.port, offer.local));
            match offer.transport {
                Transport::Tcp => {
                    let listener = overlay.net.listen(offer.port).map_err(failed)?;
                    let connections = Connections::new(format!("serve {}", offer.port), offers.connections);
                    self.tasks.spawn(serve::tcp(listener, offer.local, offer.proxy_v2, connections));
                }
                Transport::Udp => {
                    let socket = overlay.net.bind_udp(offer.port).map_err(failed)?;
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

    /// Closes everything, and lets the node tell its peers.
    async fn end(self) {
        let Self { node, mut tasks } = self;
        tasks.shutdown().await;
        node.end().await;
    }
}

fn listen(
    kind: &str,
    address: SocketAddr,
    offers: &Offers,
    kept: &mut Kept,
) -> Result<(TcpListener, Connections), Error> {
    let listener = kept.listener(address).map_err(|error| cannot_listen(kind, address, &error))?;
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
