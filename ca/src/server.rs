//! The service: HTTPS for callers, the control socket for the operator, pruning of the ledger. All IO meets here.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::Router;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use nebula_cert::issuance::{Proof, Request};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;
use zeroize::Zeroizing;

use crate::{
    audit::{AuditLog, Event},
    authority::{Authority, AuthorityError},
    control::{Answer, Command, Operator},
    control_socket::ControlSocket,
    directory::{AUDIT_LOG, CONTROL_SOCKET, Directory, FileError, NODE_TOKEN, POLICY, STORE, TLS_CERTIFICATE, TLS_KEY},
    http,
    issuer::{Issued, Issuer},
    policy::{Policy, PolicyError},
    proof::{node::NodeToken, token::TokenHash},
    rate_limit::RateLimit,
    refusal::Refusal,
    store::{RedbStore, StoreError},
    time,
};

/// What a service is started with.
#[derive(Debug)]
pub struct Settings {
    /// Everything it knows.
    pub directory: Directory,
    /// Where it listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Opens an encrypted CA key.
    pub passphrase: Option<Zeroizing<String>>,
}

/// Why the service did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A file of the directory cannot be read.
    #[error("the directory is not complete; make it with `nebula-ca init`")]
    File(#[from] FileError),
    /// The CA cannot be used.
    #[error("cannot use the CA")]
    Authority(#[from] AuthorityError),
    /// The policy is not valid.
    #[error("cannot use {POLICY}")]
    Policy(#[from] PolicyError),
    /// The node token is too weak.
    #[error("cannot use {NODE_TOKEN}: {0}")]
    NodeToken(String),
    /// The TLS files are not valid.
    #[error("cannot use {TLS_CERTIFICATE} and {TLS_KEY}: {0}")]
    Tls(String),
    /// The store cannot be opened.
    #[error("cannot use {STORE}")]
    Store(#[from] StoreError),
    /// The control socket cannot be made.
    #[error("cannot listen on {CONTROL_SOCKET} in the directory (its path must be shorter than 100 bytes)")]
    Control(#[source] io::Error),
    /// The address cannot be used.
    #[error("cannot listen on {address}; is another service using the port?")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What failed.
        #[source]
        source: io::Error,
    },
}

/// A service that is ready to run.
pub struct Server {
    service: Arc<Service>,
    listener: TcpListener,
    tls: TlsAcceptor,
    control: ControlSocket,
}

/// What all connections share.
pub(crate) struct Service {
    issuer: Issuer,
    audit: AuditLog,
    rate_limit: Mutex<RateLimit>,
}

impl Server {
    /// Reads and checks everything, then opens store and sockets. Needs a tokio runtime and a rustls provider.
    ///
    /// # Errors
    /// The first thing that is missing or wrong.
    pub fn open(settings: &Settings) -> Result<Self, ServeError> {
        let directory = &settings.directory;
        for path in directory.exposed_secrets() {
            tracing::warn!(path = %path.display(), "others than the owner can read this secret; chmod 600 it");
        }
        let passphrase = settings.passphrase.as_ref().map(|passphrase| passphrase.as_str());
        let authority = Authority::read(directory, passphrase)?;
        let policy = Policy::parse(&directory.read(POLICY)?)?;
        policy.check_against(authority.certificate())?;
        let node_token = read_node_token(directory)?;
        let tls = read_tls(directory)?;
        if let Err(refusal) = authority.check_validity(time::now()) {
            tracing::error!(%refusal, "nothing can be signed now");
        }

        let store = RedbStore::open(&directory.file(STORE))?;
        let issuer = Issuer::new(authority, policy, node_token, Box::new(store));
        let audit = AuditLog::new(directory.file(AUDIT_LOG));
        let service = Arc::new(Service { issuer, audit, rate_limit: Mutex::default() });
        let control = ControlSocket::bind(directory).map_err(ServeError::Control)?;
        let listener =
            listen(settings.listen).map_err(|source| ServeError::Listen { address: settings.listen, source })?;
        Ok(Self { service, listener, tls, control })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop`, then lets requests under way end.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let Self { service, listener, tls, control } = self;
        let router = http::router(Arc::clone(&service));
        let (stopping, stopped) = watch::channel(());
        let slots = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        let mut connections = JoinSet::new();
        let obey = {
            let service = Arc::clone(&service);
            move |command| service.obey(&command)
        };
        let mut background = Box::pin(async { tokio::join!(control.serve(obey), prune_for_ever(&service)) });
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => break,
                _ = &mut background => {}
                Some(_) = connections.join_next() => {}
                (slot, accepted) = accept(&listener, &slots) => match accepted {
                    Ok((stream, peer)) => {
                        let connection = Connection { tls: tls.clone(), router: router.clone(), stop: stopped.clone() };
                        connections.spawn(async move {
                            connection.serve(stream, peer).await;
                            drop(slot);
                        });
                    }
                    Err(error) => {
                        // Out of descriptors, most likely: trying again at once would only burn the processor.
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
                    }
                },
            }
        }
        drop(background);
        drop((listener, control));
        tracing::info!(connections = connections.len(), "stopping");
        drop(stopping);
        while connections.join_next().await.is_some() {}
    }
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> (Option<OwnedSemaphorePermit>, io::Result<(TcpStream, SocketAddr)>) {
    // Above the cap, callers wait in the kernel's backlog. The semaphore is never closed.
    let slot = Arc::clone(slots).acquire_owned().await.ok();
    (slot, listener.accept().await)
}

/// One TLS connection: every step has an end, so a silent caller holds its slot for a bounded time.
struct Connection {
    tls: TlsAcceptor,
    router: Router,
    stop: watch::Receiver<()>,
}

impl Connection {
    async fn serve(mut self, stream: TcpStream, peer: SocketAddr) {
        let stream = match tokio::time::timeout(HANDSHAKE_WITHIN, self.tls.accept(stream)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return tracing::debug!(%peer, %error, "TLS handshake failed"),
            Err(_) => return tracing::debug!(%peer, "no TLS handshake in time"),
        };
        let inner = TowerToHyperService::new(self.router.layer(axum::Extension(Caller(peer.ip()))));
        let bounded = hyper::service::service_fn(move |request| {
            let answer = hyper::service::Service::call(&inner, request);
            async move {
                let late = || Ok(http::refuse(&Refusal::Timeout));
                tokio::time::timeout(REQUEST_WITHIN, answer).await.unwrap_or_else(|_| late())
            }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADERS_WITHIN)
            .max_buf_size(LONGEST_HEADERS)
            .serve_connection(TokioIo::new(stream), bounded);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            outcome = connection.as_mut() => return log_end(peer, outcome),
            // The sender is dropped when the service stops; it never sends.
            _ = self.stop.changed() => {}
            () = tokio::time::sleep(CONNECTION_LIFE) => {}
        }
        connection.as_mut().graceful_shutdown();
        if let Ok(outcome) = tokio::time::timeout(REQUEST_WITHIN, connection).await {
            log_end(peer, outcome);
        }
    }
}

fn log_end(peer: SocketAddr, outcome: hyper::Result<()>) {
    if let Err(error) = outcome {
        tracing::debug!(%peer, %error, "connection ended early");
    }
}

/// Address of whoever is at the other end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller(pub(crate) IpAddr);

impl Service {
    pub(crate) fn issuer(&self) -> &Issuer {
        &self.issuer
    }

    /// Decides about a request and writes down the decision. Blocks on the disk.
    pub(crate) fn answer(&self, request: &Request, caller: Caller) -> Result<Issued, Refusal> {
        let now = time::now();
        let outcome = self.issuer.issue(request, now);
        match &outcome {
            Ok(issued) => self.note_issued(request, issued, caller, now),
            Err(refusal) => {
                if refusal.is_failed_proof() && self.rate_limit().is_exceeded_by(caller.0, now) {
                    return Err(Refusal::TooManyFailures);
                }
                self.note_refused(Some(request), refusal, caller, now);
            }
        }
        outcome
    }

    /// Writes down a request that could not even be read, unless its sender makes too many of these.
    pub(crate) fn note_unreadable(&self, refusal: &Refusal, caller: Caller) {
        let now = time::now();
        if !self.rate_limit().is_exceeded_by(caller.0, now) {
            self.note_refused(None, refusal, caller, now);
        }
    }

    fn rate_limit(&self) -> std::sync::MutexGuard<'_, RateLimit> {
        // Counters stay usable whatever panicked beside them.
        self.rate_limit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn obey(&self, command: &Command) -> Answer {
        let authorities = std::slice::from_ref(self.issuer.authority.certificate());
        let (store, policy, audit) = (self.issuer.store.as_ref(), &self.issuer.policy, &self.audit);
        Operator { store, authorities, policy, audit }.obey(command, time::now())
    }

    fn note_issued(&self, request: &Request, issued: &Issued, caller: Caller, now: i64) {
        let record = &issued.record;
        let event = if issued.is_repeat { "repeated" } else { "issued" };
        tracing::info!(
            name = record.name, subject = %record.subject, fingerprint = issued.fingerprint, source = %caller.0,
            "certificate {event}"
        );
        let event = Event {
            event,
            source: caller.0.to_string(),
            proof: Some(describe(&request.proof)),
            subject: Some(record.subject.to_string()),
            name: Some(&record.name),
            networks: &record.networks,
            groups: &record.groups,
            fingerprint: Some(&issued.fingerprint),
            not_after: Some(nebula_cert::rfc3339(record.not_after)),
            ..Event::default()
        };
        self.audit.write(&event, now);
    }

    fn note_refused(&self, request: Option<&Request>, refusal: &Refusal, caller: Caller, now: i64) {
        let code = refusal.code();
        tracing::warn!(code, source = %caller.0, "request refused: {refusal}");
        let subject = match request.map(|request| &request.proof) {
            // Only shape-checked text goes into the log as a name.
            Some(Proof::Node { pod, .. }) if !matches!(refusal, Refusal::InvalidPod { .. } | Refusal::BadNodeToken) => {
                Some(format!("pod {}/{}", pod.namespace, pod.name))
            }
            _ => None,
        };
        let event = Event {
            event: "refused",
            source: caller.0.to_string(),
            proof: request.map(|request| describe(&request.proof)),
            subject,
            code: Some(code),
            message: Some(refusal.to_string()),
            ..Event::default()
        };
        self.audit.write(&event, now);
    }
}

fn describe(proof: &Proof) -> String {
    match proof {
        Proof::Token { token } => format!("token {}", TokenHash::of(token).id()),
        Proof::Node { .. } => "node".to_owned(),
        Proof::Pod { .. } => "pod".to_owned(),
        Proof::Certificate { .. } => "certificate".to_owned(),
    }
}

async fn prune_for_ever(service: &Arc<Service>) {
    let mut hourly = tokio::time::interval(PRUNE_EVERY);
    loop {
        hourly.tick().await;
        let service = Arc::clone(service);
        let pruned = tokio::task::spawn_blocking(move || service.issuer.store.prune(time::now() - KEEP_EXPIRED)).await;
        if let Ok(Err(error)) = pruned {
            tracing::error!(%error, "cannot prune the store");
        }
    }
}

fn read_node_token(directory: &Directory) -> Result<Option<NodeToken>, ServeError> {
    if !directory.has(NODE_TOKEN) {
        tracing::info!("no {NODE_TOKEN}: node proofs are refused");
        return Ok(None);
    }
    NodeToken::new(&directory.read(NODE_TOKEN)?).map(Some).map_err(|error| ServeError::NodeToken(error.to_string()))
}

fn read_tls(directory: &Directory) -> Result<TlsAcceptor, ServeError> {
    let tls = |error: String| ServeError::Tls(error);
    let (chain, key) = (directory.read(TLS_CERTIFICATE)?, directory.read(TLS_KEY)?);
    let chain = CertificateDer::pem_slice_iter(chain.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| tls(format!("bad certificate PEM: {error}")))?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| tls(format!("bad key PEM: {error}")))?;
    let mut config = rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| tls(error.to_string()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    // The standard library's listener sets SO_REUSEADDR, so that a restart does not wait for old connections.
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

const MOST_CONNECTIONS: usize = 256;
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
const HEADERS_WITHIN: Duration = Duration::from_secs(10);
const REQUEST_WITHIN: Duration = Duration::from_secs(10);
const CONNECTION_LIFE: Duration = Duration::from_secs(120);
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(100);
const LONGEST_HEADERS: usize = 16 * 1024;
const PRUNE_EVERY: Duration = Duration::from_secs(3_600);
/// Expired records stay for a while: "why could it not join last night" is asked in the morning.
const KEEP_EXPIRED: i64 = 7 * 86_400;
