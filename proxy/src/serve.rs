//! Ports of the overlay that lead to a program of this host each.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::listener::Source;
use nebula_config::log;
use nebula_net::proxy_header::{ProxyHeader, ProxyPeer};
use nebula_net::{TcpListener, UdpSocket};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc::Receiver;
use tracing::Level;

use crate::listener::{Connections, prepare};
use crate::pipe::pipe;
use crate::sessions::{IDLE, MAX_DATAGRAM, Sessions};

/// How long the local program may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Accepts connections of peers until the node is closed. `proxy_v2`: the program first receives a header that
/// identifies the peer.
pub(crate) async fn tcp(listener: TcpListener, local: SocketAddr, proxy_v2: bool, mut connections: Connections) {
    while let Ok((stream, from)) = listener.accept().await {
        // A peer that cannot be served is told so.
        stream.set_reset_on_drop(true);
        connections
            .begin((Source::of_address(from.ip()), from), async move {
                let name = stream.peer_certificate().map(|certificate| certificate.name().to_owned());
                if let Err(error) = connection(stream, local, proxy_v2).await {
                    tracing::debug!(peer = %from, name, error, "A served connection ended");
                }
            })
            .await;
    }
}

async fn connection(peer: nebula_net::TcpStream, local: SocketAddr, proxy_v2: bool) -> Result<(), String> {
    let mut early = Vec::new();
    if proxy_v2 {
        let ends = peer.peer_addr().and_then(|source| Ok((source, peer.local_addr()?)));
        let certificate = peer.peer_certificate();
        let header = ProxyHeader {
            addresses: Some(ends.map_err(|error| error.to_string())?),
            peer: certificate.as_ref().map(ProxyPeer::from),
        };
        early = header.encode().map_err(|error| error.to_string())?;
    }
    let mut program = match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(local)).await {
        Ok(Ok(program)) => program,
        Ok(Err(error)) => return Err(log_no_program(local, &error)),
        Err(_) => return Err(log_no_program(local, &io::ErrorKind::TimedOut.into())),
    };
    prepare(&program);
    program.write_all(&early).await.map_err(|error| error.to_string())?;
    pipe(peer, program, &[]).await.map_err(|error| error.to_string())
}

fn log_no_program(local: SocketAddr, error: &io::Error) -> String {
    const NO_PROGRAM: &str = "A peer connects, but no program of this host listens";
    let at = local.to_string();
    if log::admits(Level::WARN, NO_PROGRAM, &at) {
        tracing::warn!(at, %error, "{NO_PROGRAM}");
    }
    error.to_string()
}

/// Carries datagrams of peers to a program of this host, and its answers, until the node is closed.
pub(crate) async fn udp(socket: UdpSocket, local: SocketAddr, mut sessions: Sessions) {
    let socket = Arc::new(socket);
    while let Ok(datagram) = socket.recv().await {
        let from = datagram.from;
        sessions
            .deliver(
                from,
                || Source::of_address(from.ip()),
                datagram.payload,
                |received| {
                    let socket = Arc::clone(&socket);
                    async move {
                        if let Err(error) = session(&socket, local, from, received).await {
                            tracing::debug!(peer = %from, %error, "Served datagrams ended");
                        }
                    }
                },
            )
            .await;
    }
}

async fn session(
    socket: &UdpSocket,
    local: SocketAddr,
    peer: SocketAddr,
    mut received: Receiver<Vec<u8>>,
) -> io::Result<()> {
    let any = if local.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let program = tokio::net::UdpSocket::bind(SocketAddr::new(any, 0)).await?;
    program.connect(local).await?;
    let mut answer = vec![0; MAX_DATAGRAM];
    loop {
        tokio::select! {
            payload = received.recv() => match payload {
                Some(payload) => drop(program.send(&payload).await),
                None => return Ok(()),
            },
            len = program.recv(&mut answer) => match len {
                Ok(len) => drop(socket.try_send_to(&answer[..len], peer)),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    log_no_program(local, &error);
                }
                Err(error) => return Err(error),
            },
            () = tokio::time::sleep(IDLE) => return Ok(()),
        }
    }
}
