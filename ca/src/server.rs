//! The service: HTTPS for callers, plain HTTP for monitoring, the control socket for the operator, and periodic tasks.
//! All I/O happens here; [`crate::service`] decides.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use nebula_cert::{
    directory::DIRECTORY_PATH,
    issuance::{MAX_WAIT_SECONDS, TRUST_PATH},
    listener::{Places, Source},
    with_causes,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{Notify, mpsc, watch},
    task::JoinSet,
    time::Instant,
};
use tokio_rustls::TlsAcceptor;

use crate::{
    authority::read_bundle,
    connections::Caller,
    connections::{self, Connections},
    control_socket::ControlSocket,
    http,
    issuer::Issuer,
    proof::certificate::RenewalKey,
    refusal::Refusal,
    service::Service,
    settings::{ServeError, ServerSettings, read_node_token, read_rules, read_tls},
    store::{self, Beginning, StoreError},
    time,
    tls::TlsIdentity,
};

/// A service that is ready to run.
pub struct Server {
    service: Arc<Service>,
    listener: TcpListener,
    status: Option<TcpListener>,
    control: ControlSocket,
    connections: Arc<Connections>,
}

impl Server {
    /// Reads and checks everything, then opens the store and the sockets. Needs a tokio runtime and a rustls provider.
    ///
    /// # Errors
    /// Returns an error for the first thing that is missing or wrong.
    pub async fn open(settings: ServerSettings) -> Result<Self, ServeError> {
        let directory = &settings.directory;
        for path in directory.protect_secrets() {
            tracing::warn!(path = %path.display(), "others than the owner can read this secret; chmod 600 it");
        }
        let rules = read_rules(&settings, None).await?;
        add_names(&settings);
        let tls = read_tls(directory)?;
        warn_about_names(&settings);
        let node_token = read_node_token(directory, &rules.policy)?;
        if let Err(refusal) = rules.authority.check_validity(time::now()) {
            tracing::error!(%refusal, "nothing can be signed now");
        }
        let renewal_key = RenewalKey::open(directory, rules.authority.certificate().curve())?;
        let beginning = match settings.new_ledger {
            true => Beginning::Allowed,
            false => Beginning::of(&read_bundle(directory)?.1, time::now()),
        };
        let store = {
            let directory = directory.clone();
            let opened = tokio::task::spawn_blocking(move || store::open(&directory, beginning)).await;
            opened.map_err(|error| StoreError::File(io::Error::other(error)))??
        };
        let issuer = Issuer::new(rules, node_token, renewal_key, store);
        let (listen_at, status_at) = (settings.listen, settings.status_listen);
        let control = ControlSocket::bind(directory).map_err(ServeError::Control)?;
        let listen = |address| bind(address).map_err(|source| ServeError::Listen { address, source });
        let (listener, status) = (listen(listen_at)?, status_at.map(listen).transpose()?);
        let service = Arc::new(Service::new(issuer, settings, tls));
        {
            let service = Arc::clone(&service);
            let refreshed = tokio::task::spawn_blocking(move || {
                service.refresh_trust();
                service.follow_members();
            })
            .await;
            refreshed.map_err(|error| StoreError::File(io::Error::other(error)))?;
        }
        let connections = Arc::new(Connections::new(connections::raise_descriptor_limit()));
        Ok(Self { service, listener, status, control, connections })
    }

    /// Address on which it listens.
    ///
    /// # Errors
    /// Returns an error if the system does not report it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Address on which it shows its state.
    #[must_use]
    pub fn status_address(&self) -> Option<SocketAddr> {
        self.status.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// Serves until `stop`, then lets requests in flight finish. Each `reload` rereads policy, CA and TLS files.
    pub async fn run(self, stop: impl Future<Output = ()>, mut reload: mpsc::Receiver<()>) {
        let Self { service, listener, status, control, connections: room } = self;
        let router = http::router(Arc::clone(&service));
        let (stopping, stopped) = watch::channel(());
        let mut connections = JoinSet::new();
        let obey = {
            let service = Arc::clone(&service);
            move |command| service.obey(&command)
        };
        let reload = async {
            while reload.recv().await.is_some() {
                let service = Arc::clone(&service);
                // Its result is in the log.
                let _ = tokio::task::spawn_blocking(move || service.reload()).await;
            }
            std::future::pending::<()>().await;
        };
        let status = serve_status(status, http::status_router(Arc::clone(&service)), stopped.clone());
        let regular = async {
            tokio::join!(
                prune_for_ever(&service),
                refresh_for_ever(&service),
                block_for_ever(&service),
                for_ever(&service, FOLLOW_MEMBERS_EVERY, Service::follow_members),
                for_ever(&service, FOLLOW_LIGHTHOUSES_EVERY, Service::follow_lighthouses),
                for_ever(&service, PUBLISH_TRUST_EVERY, Service::publish_trust),
                for_ever(&service, RECOVER_EVERY, Service::recover),
                for_ever(&service, COUNT_REFUSALS_EVERY, Service::note_left_out),
                feed_watchdog(&service),
            )
        };
        let control = tokio::spawn(control.serve(obey, stopped.clone()));
        let mut background = Box::pin(async { tokio::join!(reload, status, regular) });
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => break,
                _ = &mut background => {}
                Some(_) = connections.join_next() => {}
                accepted = accept(&listener) => match accepted {
                    Ok((stream, peer)) => {
                        let connection = Connection { router: router.clone(), stop: stopped.clone() };
                        let (tls, place) = (service.tls(), Arc::new(room.admit(peer.ip(), Instant::now())));
                        connections.spawn(async move {
                            tokio::select! {
                                () = connection.serve_tls(&tls.acceptor, stream, peer, &place) => {}
                                () = place.ended() => tracing::debug!(%peer, "connection ended to make room"),
                            }
                        });
                    }
                    Err(error) => {
                        // Most likely out of descriptors: retrying at once would only burn CPU.
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
                    }
                },
            }
        }
        drop(background);
        drop(listener);
        tracing::info!(connections = connections.len(), "stopping");
        service.stop_waiting();
        drop(stopping);
        if let Err(error) = control.await {
            tracing::error!(%error, "the control socket failed inside nebula-ca; please report this");
        }
        while connections.join_next().await.is_some() {}
        service.note_left_out();
    }
}

async fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    let accepted = listener.accept().await;
    if let Ok((stream, _)) = &accepted {
        // With Nagle's algorithm, a TLS record would wait up to 40 ms for the acknowledgement of the previous one,
        // which is most of a pod's start.
        let _ = stream.set_nodelay(true);
    }
    accepted
}

/// Serves the state of the service on the monitoring listener.
async fn serve_status(listener: Option<TcpListener>, router: Router, stop: watch::Receiver<()>) {
    let Some(listener) = listener else { return std::future::pending().await };
    let places = Places::new(MAX_WATCHERS);
    loop {
        match accept(&listener).await.and_then(|(stream, peer)| Ok((stream.local_addr()?, peer, stream))) {
            Ok((local, peer, stream)) => {
                let ended = Arc::new(Notify::new());
                let end = Arc::clone(&ended);
                if let Some(place) = places.admit(Source::of_tcp(local, peer), move || end.notify_one()) {
                    // A page that is being made outlives its connection, and counts until it is done.
                    let router = router.clone().layer(axum::Extension(Arc::new(place)));
                    let connection = Connection { router, stop: stop.clone() };
                    tokio::spawn(async move {
                        tokio::select! {
                            () = connection.serve(stream, peer, None) => {}
                            () = ended.notified() => {}
                        }
                    });
                }
                // Whoever has to end does so before the next one comes.
                tokio::task::yield_now().await;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection for the state");
                tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
            }
        }
    }
}

/// One connection. Every step has a timeout, so a silent caller holds its slot only for a bounded time.
struct Connection {
    router: Router,
    stop: watch::Receiver<()>,
}

impl Connection {
    async fn serve_tls(
        self,
        tls: &TlsAcceptor,
        stream: TcpStream,
        peer: SocketAddr,
        place: &Arc<connections::Connection>,
    ) {
        match tokio::time::timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await {
            Ok(Ok(stream)) => {
                place.is_open();
                self.serve(stream, peer, Some(place)).await;
            }
            Ok(Err(error)) => tracing::debug!(%peer, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(%peer, "no TLS handshake in time"),
        }
    }

    async fn serve(
        mut self,
        stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
        peer: SocketAddr,
        place: Option<&Arc<connections::Connection>>,
    ) {
        let mut router = self.router.layer(axum::Extension(Caller(peer.ip())));
        if let Some(place) = place {
            router = router.layer(axum::Extension(Arc::clone(place)));
        }
        let inner = TowerToHyperService::new(router);
        let bounded = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
            // Clients that follow the trust bundle or the directory may be waiting for a change.
            let waits = [TRUST_PATH, DIRECTORY_PATH].contains(&request.uri().path()) && request.uri().query().is_some();
            let within = REQUEST_WITHIN + if waits { Duration::from_secs(MAX_WAIT_SECONDS) } else { Duration::ZERO };
            let answer = hyper::service::Service::call(&inner, request);
            async move {
                let late = || Ok(http::refuse(&Refusal::Timeout));
                tokio::time::timeout(within, answer).await.unwrap_or_else(|_| late())
            }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADERS_WITHIN)
            .max_buf_size(MAX_HEADER_BYTES)
            .serve_connection(TokioIo::new(stream), bounded);
        let mut connection = std::pin::pin!(connection);
        let is_stopping = tokio::select! {
            outcome = connection.as_mut() => return log_end(peer, outcome),
            // The sender is dropped when the service stops; it never sends.
            _ = self.stop.changed() => true,
            () = end_of_life(place) => false,
        };
        connection.as_mut().graceful_shutdown();
        if !is_stopping {
            // Somebody who waits for a change gets an answer, or would take this for a failure.
            tokio::select! {
                outcome = connection.as_mut() => return log_end(peer, outcome),
                _ = self.stop.changed() => {}
                () = tokio::time::sleep(LAST_ANSWER_WITHIN) => return,
            }
        }
        if let Ok(outcome) = tokio::time::timeout(REQUEST_WITHIN, connection).await {
            log_end(peer, outcome);
        }
    }
}

/// A client with a valid proof keeps its connection and its place in the limits, since it follows the trust bundle on
/// it.
async fn end_of_life(place: Option<&Arc<connections::Connection>>) {
    tokio::time::sleep(CONNECTION_LIFE).await;
    if place.is_some_and(|place| place.is_proven()) {
        tokio::time::sleep(PROVEN_CONNECTION_LIFE).await;
    }
}

fn log_end(peer: SocketAddr, outcome: hyper::Result<()>) {
    if let Err(error) = outcome {
        tracing::debug!(%peer, %error, "connection ended early");
    }
}

async fn prune_for_ever(service: &Arc<Service>) {
    for_ever(service, PRUNE_EVERY, |service| {
        if let Err(error) = service.issuer().store.prune(time::now() - KEEP_EXPIRED) {
            tracing::error!(%error, "cannot prune the store");
        }
    })
    .await;
}

/// Blocklist entries expire over time, and other services on the same store add new ones.
async fn refresh_for_ever(service: &Arc<Service>) {
    let every = if service.issuer().store.is_shared() { REFRESH_SHARED_EVERY } else { REFRESH_EVERY };
    for_ever(service, every, Service::refresh_trust).await;
}

/// Feeds the watchdog of the systemd unit, if there is one, while threads make progress and a restart would not help.
async fn feed_watchdog(service: &Arc<Service>) {
    let Some(within) = sd_notify::watchdog_enabled() else { return };
    let mut ticks = tokio::time::interval(within / 3);
    loop {
        ticks.tick().await;
        let service = Arc::clone(service);
        let is_alive = tokio::task::spawn_blocking(move || service.is_alive());
        if let Ok(Ok(true)) = tokio::time::timeout(within, is_alive).await
            && let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Watchdog])
        {
            tracing::warn!(%error, "cannot tell systemd that the service is well");
        }
    }
}

/// Blocks certificates of pods that were deleted while their node could not report it.
async fn block_for_ever(service: &Arc<Service>) {
    for_ever(service, LOOK_FOR_DELETED_EVERY, Service::block_deleted).await;
}

async fn for_ever(service: &Arc<Service>, every: Duration, step: impl Fn(&Service) + Copy + Send + 'static) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let service = Arc::clone(service);
        if let Err(error) = tokio::task::spawn_blocking(move || step(&service)).await {
            tracing::error!(%error, "a regular task failed inside nebula-ca; please report this");
        }
    }
}

/// Adds the names that the TLS certificate must have. Serves without them if it cannot: callers that use other names
/// go on.
fn add_names(settings: &ServerSettings) {
    let added = TlsIdentity::read(&settings.directory)
        .and_then(|mut identity| identity.add_names(&settings.tls_names, &settings.directory, time::now()));
    match added {
        Ok(true) => tracing::info!(names = settings.tls_names.join(", "), "the TLS certificate has more names now"),
        Ok(false) => {}
        Err(error) => {
            let error = with_causes(&error);
            tracing::warn!(
                error,
                names = settings.tls_names.join(", "),
                "the TLS certificate lacks names of --tls-name, and callers that use them refuse this service"
            );
        }
    }
}

/// Warns if clients would reject the TLS certificate at the listening address: hosts would fail to enrol, and only they
/// would notice.
fn warn_about_names(settings: &ServerSettings) {
    match TlsIdentity::read(&settings.directory) {
        Ok(identity) => {
            if let Some(problem) = identity.problem_at(settings.listen) {
                tracing::warn!(listen = %settings.listen, "{problem}");
            }
        }
        // Serve anyway: whoever issued the certificate knows better.
        Err(error) => tracing::warn!(%error, "cannot tell for which names the TLS certificate is"),
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    // The standard library's listener sets SO_REUSEADDR, so that a restart does not wait for old connections.
    let listener = nebula_cert::listener::listen(address)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Beyond this limit, monitoring clients of the source that has the most are disconnected.
const MAX_WATCHERS: usize = 32;
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
const HEADERS_WITHIN: Duration = Duration::from_secs(10);
const REQUEST_WITHIN: Duration = Duration::from_secs(10);
/// After the life of a connection: for a request that waits for a change.
const LAST_ANSWER_WITHIN: Duration = REQUEST_WITHIN.saturating_add(Duration::from_secs(MAX_WAIT_SECONDS));
const CONNECTION_LIFE: Duration = Duration::from_secs(240);
/// Longer than a pod uses its certificate before it renews it, over the same connection or a new one.
const PROVEN_CONNECTION_LIFE: Duration = Duration::from_secs(86_400);
const RECOVER_EVERY: Duration = Duration::from_secs(1);
const COUNT_REFUSALS_EVERY: Duration = Duration::from_secs(60);
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(100);
const MAX_HEADER_BYTES: usize = 16 * 1024;
const PRUNE_EVERY: Duration = Duration::from_secs(3_600);
const REFRESH_EVERY: Duration = Duration::from_secs(10);
const REFRESH_SHARED_EVERY: Duration = Duration::from_secs(1);
/// Half of what a change at another replica may take to be told.
const FOLLOW_MEMBERS_EVERY: Duration = Duration::from_millis(500);
const FOLLOW_LIGHTHOUSES_EVERY: Duration = Duration::from_secs(10);
const PUBLISH_TRUST_EVERY: Duration = Duration::from_secs(30);
const LOOK_FOR_DELETED_EVERY: Duration = Duration::from_secs(30);
/// Expired records are kept for a while: "why could it not join last night" is asked in the morning.
const KEEP_EXPIRED: i64 = 7 * 86_400;
