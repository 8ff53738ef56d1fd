//! The SSH listener and its clients, each of which must log in within a time limit or is disconnected.

use std::borrow::Cow;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use nebula_cert::listener::{Place, Places, Source};
use nebula_config::{Sshd, log, names};
use nebula_linux::clock::unix_now;
use russh::keys::ssh_key::public::KeyData;
use russh::keys::{Certificate, HashAlg};
use russh::server::{
    Auth, ChannelOpenHandle, Config, Handler, Msg, PublicKeyOffer, Session, VerifiedPublicKey, run_stream,
};
use russh::{Channel, ChannelId, Disconnect, MethodKind, MethodSet, Pty, SshId};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{sleep, timeout};
use tracing::Level;

use super::access;
use super::session::{self, Context, IDLE_TIMEOUT};
use crate::Daemon;

/// State shared by all connections.
#[derive(Debug)]
struct Server {
    context: Arc<Context>,
    /// For the clients that have not logged in yet.
    logins: Arc<Places>,
    /// Limits the clients that have logged in.
    sessions: Arc<Semaphore>,
}

/// Serves until `stopped`, or until the listener fails.
pub(super) fn serve(listener: TcpListener, sshd: Sshd, daemon: Weak<dyn Daemon>, stopped: oneshot::Receiver<()>) {
    let listen = sshd.listen.clone();
    let failed = |error: io::Error| tracing::warn!(%error, "Failed to run the SSH server");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(MAX_ANSWER_THREADS)
        .thread_name("sshd-answer")
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return failed(error),
    };
    tracing::info!(sshListener = listen, "SSH server is listening");
    let server = Server {
        context: Arc::new(Context { sshd, daemon }),
        logins: Places::new(MAX_LOGINS),
        sessions: Arc::new(Semaphore::new(MAX_SESSIONS)),
    };
    runtime.block_on(async {
        tokio::select! {
            // The sender was dropped.
            _ = stopped => {}
            error = accept(listener, Arc::new(server)) => tracing::warn!(%error, "Error in listener, shutting down"),
        }
    });
    // Does not wait for the threads that answer: one of them may run the reload that ends this server.
    runtime.shutdown_background();
    tracing::info!("SSH server stopped listening");
}

/// Binds the listener. Retries while a previous console is still closing, which may have this address.
pub(super) fn bind(listen: &str, has_predecessor: bool) -> io::Result<TcpListener> {
    let mut retries = if has_predecessor { MAX_BIND_RETRIES } else { 0 };
    loop {
        match names::bind(listen) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && retries > 0 => {
                retries -= 1;
                std::thread::sleep(RETRY_INTERVAL);
            }
            outcome => {
                let listener = outcome?;
                listener.set_nonblocking(true)?;
                return Ok(listener);
            }
        }
    }
}

/// Accepts clients; returns the error that ends the listener.
async fn accept(listener: TcpListener, server: Arc<Server>) -> io::Error {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return error,
    };
    let config = Arc::new(config(&server.context.sshd));
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            // The client is gone already, or there are no file descriptors left for now.
            Err(error) => {
                tracing::debug!(%error, "A client of the console was not accepted");
                sleep(RETRY_INTERVAL).await;
                continue;
            }
        };
        let admitted = with_shutdown(stream).and_then(|(stream, connection)| {
            let source = Source::of_tcp(connection.local_addr()?, from);
            let (connection, ended) = (Arc::new(connection), Arc::new(Notify::new()));
            let (stream_of, end) = (Arc::clone(&connection), Arc::clone(&ended));
            let login = server.logins.admit(source, move || {
                // The session's stream then fails, which ends a session that has begun.
                let _ = stream_of.shutdown(Shutdown::Both);
                end.notify_one();
            });
            Ok((login, stream, connection, ended))
        });
        // Whoever has to end does so before the next one comes.
        tokio::task::yield_now().await;
        let Ok((Some(login), stream, connection, ended)) = admitted else {
            if log::admits(Level::DEBUG, "Too many clients log in to the console at once", &stranger(from)) {
                tracing::debug!(remoteAddress = %from, "Too many clients log in to the console at once");
            }
            continue;
        };
        let (config, server) = (Arc::clone(&config), Arc::clone(&server));
        tokio::spawn(async move {
            let logged_in = Arc::new(AtomicBool::new(false));
            let client = Client::new(server, from, login, Arc::clone(&logged_in));
            let outcome = tokio::select! {
                outcome = converse(config, stream, &connection, client, &logged_in) => outcome,
                () = ended.notified() => Err(russh::Error::Disconnect),
            };
            if !logged_in.load(Ordering::Relaxed) && log::admits(Level::WARN, "failed to handshake", &stranger(from)) {
                let error = outcome.err().map_or_else(|| "no authentication".to_owned(), |error| error.to_string());
                tracing::warn!(error, remoteAddress = %from, "failed to handshake");
            }
        });
    }
}

/// The source by which log lines about refused clients are rate limited.
fn stranger(from: SocketAddr) -> String {
    log::network_of(from.ip()).to_string()
}

fn config(sshd: &Sshd) -> Config {
    Config {
        server_id: SshId::Standard(Cow::Borrowed("SSH-2.0-Nebula")),
        methods: MethodSet::from(&[MethodKind::PublicKey][..]),
        auth_rejection_time: Duration::from_millis(500),
        // OpenSSH tries the method `none` first.
        auth_rejection_time_initial: Some(Duration::ZERO),
        keys: vec![sshd.host_key.clone()],
        window_size: WINDOW_BYTES,
        maximum_packet_size: MAX_PACKET_BYTES,
        channel_buffer_size: 8,
        max_auth_attempts: 6,
        inactivity_timeout: Some(IDLE_TIMEOUT),
        nodelay: true,
        ..Config::default()
    }
}

async fn converse(
    config: Arc<Config>,
    stream: tokio::net::TcpStream,
    connection: &TcpStream,
    client: Client,
    logged_in: &AtomicBool,
) -> Result<(), russh::Error> {
    let begun = timeout(LOGIN_TIMEOUT, run_stream(config, stream, client)).await;
    let mut session = begun.map_err(|_| russh::Error::ConnectionTimeout)??;
    tokio::select! {
        outcome = &mut session => return outcome,
        () = sleep(LOGIN_TIMEOUT) => {}
    }
    if !logged_in.load(Ordering::Relaxed) {
        let _ = connection.shutdown(Shutdown::Both);
    }
    session.await
}

/// Returns the stream, and a second descriptor to shut it down with.
fn with_shutdown(stream: tokio::net::TcpStream) -> io::Result<(tokio::net::TcpStream, TcpStream)> {
    let stream = stream.into_std()?;
    let connection = stream.try_clone()?;
    Ok((tokio::net::TcpStream::from_std(stream)?, connection))
}

/// One client.
struct Client {
    server: Arc<Server>,
    from: SocketAddr,
    logged_in: Arc<AtomicBool>,
    /// Held until the client has logged in; till then it may have to end for others.
    login: Option<Place>,
    /// Held while the client is logged in.
    session_permit: Option<OwnedSemaphorePermit>,
    user: String,
    fingerprint: String,
    channels: Arc<Semaphore>,
}

impl Client {
    fn new(server: Arc<Server>, from: SocketAddr, login: Place, logged_in: Arc<AtomicBool>) -> Self {
        Self {
            server,
            from,
            logged_in,
            login: Some(login),
            session_permit: None,
            user: String::new(),
            fingerprint: String::new(),
            channels: Arc::new(Semaphore::new(MAX_CHANNELS_PER_CLIENT)),
        }
    }

    fn admit(&mut self, user: &str, key: &KeyData) -> Auth {
        user.clone_into(&mut self.user);
        self.fingerprint = key.fingerprint(HashAlg::Sha256).to_string();
        Auth::Accept
    }
}

impl Handler for Client {
    type Error = russh::Error;

    async fn auth_publickey_offered(&mut self, user: &str, offer: PublicKeyOffer<'_>) -> Result<Auth, Self::Error> {
        let sshd = &self.server.context.sshd;
        // The key may belong to a certificate, which is only shown with the proof.
        let may = access::key_may(sshd, user, offer.public_key.key_data()) || !sshd.authorities.is_empty();
        Ok(if may { Auth::Accept } else { Auth::reject() })
    }

    async fn auth_publickey(&mut self, user: &str, key: VerifiedPublicKey<'_>) -> Result<Auth, Self::Error> {
        let key = key.public_key.key_data();
        Ok(if access::key_may(&self.server.context.sshd, user, key) { self.admit(user, key) } else { Auth::reject() })
    }

    async fn auth_openssh_certificate(&mut self, user: &str, certificate: &Certificate) -> Result<Auth, Self::Error> {
        match access::certificate_may(&self.server.context.sshd, user, certificate, self.from.ip(), unix_now()) {
            Ok(()) => Ok(self.admit(user, certificate.public_key())),
            Err(reason) => {
                if log::admits(Level::DEBUG, "A certificate was refused", &stranger(self.from)) {
                    tracing::debug!(reason, sshUser = user, remoteAddress = %self.from, "A certificate was refused");
                }
                Ok(Auth::reject())
            }
        }
    }

    async fn auth_succeeded(&mut self, session: &mut Session) -> Result<(), Self::Error> {
        self.session_permit = Arc::clone(&self.server.sessions).try_acquire_owned().ok();
        self.logged_in.store(true, Ordering::Relaxed);
        self.login = None;
        if self.session_permit.is_none() {
            return session.disconnect(Disconnect::TooManyConnections, "too many sessions", "");
        }
        tracing::info!(sshUser = self.user, remoteAddress = %self.from, sshFingerprint = self.fingerprint,
            "ssh user logged in");
        Ok(())
    }

    async fn channel_open_session(
        &mut self,
        channel: Channel<Msg>,
        reply: ChannelOpenHandle,
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        // Without a permit the reply is dropped, which refuses the channel.
        let Ok(place) = Arc::clone(&self.channels).try_acquire_owned() else { return Ok(()) };
        reply.accept().await;
        let (context, user, handle) = (Arc::clone(&self.server.context), self.user.clone(), session.handle());
        tokio::spawn(async move {
            session::attend(channel, &context, &user, &handle).await;
            drop(place);
        });
        Ok(())
    }

    async fn pty_request(
        &mut self,
        channel: ChannelId,
        _: &str,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: &[(Pty, u32)],
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        session.channel_success(channel)
    }

    async fn window_change_request(
        &mut self,
        channel: ChannelId,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        session.channel_success(channel)
    }

    async fn shell_request(&mut self, channel: ChannelId, session: &mut Session) -> Result<(), Self::Error> {
        session.channel_success(channel)
    }

    async fn exec_request(&mut self, channel: ChannelId, _: &[u8], session: &mut Session) -> Result<(), Self::Error> {
        session.channel_success(channel)
    }

    async fn env_request(
        &mut self,
        channel: ChannelId,
        _: &str,
        _: &str,
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        session.channel_failure(channel)
    }

    async fn subsystem_request(
        &mut self,
        channel: ChannelId,
        _: &str,
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        session.channel_failure(channel)
    }
}

/// Beyond this limit, clients of the source that has the most are disconnected.
const MAX_LOGINS: usize = 32;
const MAX_SESSIONS: usize = 8;
const MAX_CHANNELS_PER_CLIENT: usize = 4;
const MAX_ANSWER_THREADS: usize = 4;
const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
const WINDOW_BYTES: u32 = 64 << 10;
const MAX_PACKET_BYTES: u32 = 16 << 10;
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
const MAX_BIND_RETRIES: usize = 40;
