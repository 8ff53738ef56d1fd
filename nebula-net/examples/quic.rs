//! QUIC over the overlay: quinn on a UDP socket of nebula-net.
//!
//! ```sh
//! cargo run --example quic
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

mod common;

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use common::hosts;
use nebula_net::{Net, UdpSocket};
use quinn::rustls::RootCertStore;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, ClientConfig, Endpoint, EndpointConfig, ServerConfig, TokioRuntime, UdpPoller};

/// More than one congestion window, so that the sockets have to wait for each other.
const DOCUMENT: usize = 2_000_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [(near_socket, near), (far_socket, far)] = hosts()?;
    let near = Net::builder(near).socket(near_socket).start()?;
    let far = Net::builder(far).socket(far_socket).start()?;

    let key = rcgen::generate_simple_self_signed(vec!["host-2".to_owned()])?;
    let mut roots = RootCertStore::empty();
    roots.add(key.cert.der().clone())?;
    let serves = ServerConfig::with_single_cert(vec![key.cert.der().clone()], key.signing_key.into())?;
    tokio::spawn(serve(endpoint(far.bind_udp(443)?, Some(serves))?, far));

    let client = endpoint(near.bind_udp(0)?, None)?;
    let trusts = ClientConfig::with_root_certificates(Arc::new(roots))?;
    let connection = client.connect_with(trusts, "10.42.0.2:443".parse()?, "host-2")?.await?;
    let greeting = connection.accept_uni().await?.read_to_end(100).await?;
    let document = connection.accept_uni().await?.read_to_end(DOCUMENT).await?;
    println!("{}, and {} bytes", String::from_utf8_lossy(&greeting), document.len());
    let path = connection.stats().path;
    println!("packets of {} bytes; {} probes for longer ones were lost", path.current_mtu, path.lost_plpmtud_probes);
    Ok(())
}

/// Greets each client by the name in its certificate of the overlay, and sends a document.
async fn serve(endpoint: Endpoint, net: Net) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    while let Some(incoming) = endpoint.accept().await {
        let connection = incoming.await?;
        let peer = net.up(connection.remote_address().ip()).await?;
        let mut greeting = connection.open_uni().await?;
        greeting.write_all(format!("hello, {}", peer.name()).as_bytes()).await?;
        greeting.finish()?;
        let mut document = connection.open_uni().await?;
        document.write_all(&vec![0; DOCUMENT]).await?;
        document.finish()?;
        connection.closed().await;
    }
    Ok(())
}

fn endpoint(socket: UdpSocket, serves: Option<ServerConfig>) -> io::Result<Endpoint> {
    let socket = Arc::new(Overlay(Arc::new(socket)));
    Endpoint::new_with_abstract_socket(EndpointConfig::default(), serves, socket, Arc::new(TokioRuntime))
}

/// What quinn takes for a socket.
#[derive(Debug)]
struct Overlay(Arc<UdpSocket>);

impl AsyncUdpSocket for Overlay {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable { socket: Arc::clone(&self.0), waiting: None })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        // A probe for a longer packet than the overlay carries. An error would end the connection; a probe that is lost
        // does not.
        if transmit.contents.len() > self.0.max_datagram(transmit.destination.ip()) {
            return Ok(());
        }
        self.0.try_send_to(transmit.contents, transmit.destination).map(drop)
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut next = Some(ready!(self.0.poll_recv(context))?);
        let mut count = 0;
        for (buffer, meta) in buffers.iter_mut().zip(meta) {
            let Some(datagram) = next.take().or_else(|| self.0.try_recv().ok()) else { break };
            let len = datagram.payload.len().min(buffer.len());
            buffer[..len].copy_from_slice(&datagram.payload[..len]);
            *meta = RecvMeta { addr: datagram.from, len, stride: len, ..RecvMeta::default() };
            count += 1;
        }
        Poll::Ready(Ok(count))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// So that quinn looks for the longest packet that the path carries.
    fn may_fragment(&self) -> bool {
        false
    }
}

/// Waits until the socket takes a datagram, for one of several connections.
struct Writable {
    socket: Arc<UdpSocket>,
    waiting: Option<Pin<Box<dyn Future<Output = io::Result<()>> + Send + Sync>>>,
}

impl std::fmt::Debug for Writable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writable").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl UdpPoller for Writable {
    fn poll_writable(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let socket = Arc::clone(&self.socket);
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(async move { socket.writable().await }));
        let result = ready!(waiting.as_mut().poll(context));
        self.waiting = None;
        Poll::Ready(result)
    }
}
