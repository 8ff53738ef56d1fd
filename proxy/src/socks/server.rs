//! Serves one client of SOCKS5.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::listener::{Places, Source};
use nebula_config::log;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tracing::Level;

use super::associate::{Association, associate};
use super::message::{
    Command, MAX_MESSAGE, Malformed, Method, Reply, Request, answer, choice, login_answer, parse_greeting, parse_login,
    parse_request,
};
use crate::credentials::Credentials;
use crate::head::{Failed, Head};
use crate::listener::prepare;
use crate::overlay::{Overlay, Unreached, log_unreached};
use crate::pipe::{Connection, pipe};

/// What all clients share.
pub(crate) struct Server {
    pub(crate) overlay: Overlay,
    pub(crate) credentials: Option<Arc<Credentials>>,
    /// How long a client may take until its request is complete.
    pub(crate) head_timeout: Duration,
    /// The UDP associations.
    pub(crate) associations: Arc<Places>,
}

/// After wrong credentials, before the answer: guessing takes time.
pub(crate) const LOGIN_DELAY: Duration = Duration::from_secs(1);
const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Serves one client.
pub(crate) async fn serve(server: Arc<Server>, mut stream: TcpStream, client: SocketAddr) {
    // An answer has to arrive.
    stream.set_reset_on_drop(false);
    let mut head = Head::default();
    let read = read_request(server.credentials.as_deref(), LOGIN_DELAY, &mut stream, client, &mut head);
    let request = match tokio::time::timeout(server.head_timeout, read).await {
        Ok(Ok(Some(request))) => request,
        Ok(Ok(None)) => return,
        Ok(Err(Failed::Io(error))) => return tracing::debug!(%client, %error, "No SOCKS request"),
        Ok(Err(Failed::Refused(error))) => return tracing::debug!(%client, %error, "No SOCKS request"),
        Err(_) => return tracing::debug!(%client, "No SOCKS request in time"),
    };
    let served = match (request.command, request.target) {
        (Command::Other, _) => refuse(&mut stream, Reply::CommandNotSupported).await,
        (_, None) => refuse(&mut stream, Reply::AddressNotSupported).await,
        (Command::Connect, Some(target)) => match server.overlay.connect(&target).await {
            Ok(peer) => {
                tracing::debug!(%client, %target, "Connected by SOCKS");
                async {
                    stream.write_all(&answer(Reply::Succeeded, peer.local_addr()?)).await?;
                    pipe(stream, peer, &head.into_rest()).await
                }
                .await
            }
            Err(error) => {
                log_unreached("SOCKS", client, &target, &error);
                refuse(&mut stream, reply_to(&error)).await
            }
        },
        // The client's own address, which it rarely knows, and the port that it will send from, or 0.
        (Command::Associate, Some(target)) => server.associate(stream, client, target.port).await,
    };
    if let Err(error) = served {
        tracing::debug!(%client, %error, "A connection by SOCKS ended");
    }
}

impl Server {
    async fn associate(&self, mut stream: TcpStream, client: SocketAddr, port: u16) -> io::Result<()> {
        let tell = move || {
            const FULL: &str = "Too many UDP associations at a time, one ends; -udp-sessions allows more";
            if log::admits(Level::WARN, FULL, "") {
                tracing::warn!(%client, "{FULL}");
            }
        };
        let ended = Arc::new(Notify::new());
        let end = Arc::clone(&ended);
        let place = self.associations.admit(Source::of_tcp(stream.local_addr()?, client), move || {
            tell();
            end.notify_one();
        });
        let Some(_place) = place else {
            tell();
            return refuse(&mut stream, Reply::Failure).await;
        };
        let has_credentials = self.credentials.is_some();
        let association = match Association::open(&self.overlay, &stream, port, has_credentials).await {
            Ok(association) => association,
            Err(error) => {
                tracing::warn!(%client, %error, "Cannot open a port for a UDP association");
                return refuse(&mut stream, Reply::Failure).await;
            }
        };
        stream.write_all(&answer(Reply::Succeeded, association.address()?)).await?;
        tracing::debug!(%client, "UDP by SOCKS");
        tokio::select! {
            served = associate(association, stream) => served,
            () = ended.notified() => Ok(()),
        }
    }
}

/// Reads all that comes before the request, and the request. `None`: the client was told that it may not.
pub(crate) async fn read_request<S: AsyncRead + AsyncWrite + Unpin>(
    credentials: Option<&Credentials>,
    login_delay: Duration,
    stream: &mut S,
    client: SocketAddr,
    head: &mut Head,
) -> Result<Option<Request>, Failed<Malformed>> {
    let offered = head.read(stream, MAX_MESSAGE, parse_greeting).await?;
    let method = if credentials.is_some() { Method::Password } else { Method::None };
    let method = if offered.contains(&(method as u8)) { method } else { Method::Unacceptable };
    stream.write_all(&choice(method)).await.map_err(Failed::Io)?;
    match (method, credentials) {
        (Method::None, None) => {}
        (Method::Password, Some(credentials)) => {
            let check = |name: &[u8], password: &[u8]| credentials.allow(name, password);
            let allowed = head.read(stream, MAX_MESSAGE, |bytes| parse_login(bytes, check)).await?;
            if !allowed {
                tokio::time::sleep(login_delay).await;
            }
            stream.write_all(&login_answer(allowed)).await.map_err(Failed::Io)?;
            if !allowed {
                log_denied("SOCKS", client);
                return Ok(None);
            }
        }
        _ => {
            log_denied("SOCKS", client);
            return Ok(None);
        }
    }
    head.read(stream, MAX_MESSAGE, parse_request).await.map(Some)
}

async fn refuse(stream: &mut TcpStream, reply: Reply) -> io::Result<()> {
    prepare(stream);
    stream.write_all(&answer(reply, NOWHERE)).await
}

fn reply_to(error: &Unreached) -> Reply {
    match error {
        Unreached::Outside(_) => Reply::NotAllowed,
        Unreached::UnknownName(_) => Reply::HostUnreachable,
        Unreached::Failed(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused => Reply::Refused,
            io::ErrorKind::PermissionDenied => Reply::NotAllowed,
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable | io::ErrorKind::TimedOut => {
                Reply::HostUnreachable
            }
            _ => Reply::Failure,
        },
    }
}

/// Logs that a client showed no credentials, or wrong ones.
pub(crate) fn log_denied(way: &str, client: SocketAddr) {
    const DENIED: &str = "Refused a client without the name and password of a user";
    if log::admits(Level::WARN, DENIED, way) {
        tracing::warn!(by = way, %client, "{DENIED}");
    }
}
