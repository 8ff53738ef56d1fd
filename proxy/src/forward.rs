//! Ports of this host that lead to one peer each.

use std::net::SocketAddr;
use std::sync::Arc;

use nebula_cert::listener::Source;
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::mpsc::Receiver;

use crate::listener::pause;
use crate::overlay::{Overlay, Unreached, log_unreached};
use crate::pipe::pipe;
use crate::sessions::{IDLE, MAX_DATAGRAM, Sessions};
use crate::target::Target;

/// Connects one client to the peer.
pub(crate) async fn tcp(overlay: Overlay, target: Arc<Target>, stream: TcpStream, client: SocketAddr) {
    let served = match overlay.connect(&target).await {
        Ok(peer) => pipe(stream, peer, &[]).await,
        Err(error) => return log_unreached("forward", client, &target, &error),
    };
    if let Err(error) = served {
        tracing::debug!(%client, %target, %error, "A forwarded connection ended");
    }
}

/// Carries datagrams of all programs that send to a port. Ends when it is dropped.
pub(crate) async fn udp(name: String, overlay: Overlay, target: Target, socket: UdpSocket, mut sessions: Sessions) {
    let (socket, target) = (Arc::new(socket), Arc::new(target));
    let mut datagram = vec![0; MAX_DATAGRAM];
    loop {
        match socket.recv_from(&mut datagram).await {
            Ok((len, from)) => {
                let source = || match socket.local_addr() {
                    Ok(local) => Source::of_udp(local, from),
                    Err(_) => Source::of_address(from.ip()),
                };
                let begin = |sent| {
                    let (overlay, target, socket) = (overlay.clone(), Arc::clone(&target), Arc::clone(&socket));
                    async move {
                        if let Err(error) = session(&overlay, &target, &socket, from, sent).await {
                            log_unreached("forward (UDP)", from, &target, &error);
                        }
                    }
                };
                sessions.deliver(from, source, datagram[..len].to_vec(), begin).await;
            }
            // Of the system: an earlier datagram did not arrive.
            Err(error) => pause(&name, &error).await,
        }
    }
}

async fn session(
    overlay: &Overlay,
    target: &Target,
    socket: &UdpSocket,
    client: SocketAddr,
    mut sent: Receiver<Vec<u8>>,
) -> Result<(), Unreached> {
    let address = overlay.resolve(target).await?;
    let peer = overlay.net.bind_udp(0)?;
    loop {
        tokio::select! {
            payload = sent.recv() => match payload {
                Some(payload) => drop(peer.try_send_to(&payload, address)),
                None => return Ok(()),
            },
            received = peer.recv() => {
                let received = received?;
                if received.from == address {
                    // The client may not listen at this moment.
                    let _ = socket.send_to(&received.payload, client).await;
                }
            }
            () = tokio::time::sleep(IDLE) => return Ok(()),
        }
    }
}
