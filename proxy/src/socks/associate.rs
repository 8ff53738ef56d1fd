//! A UDP association of SOCKS5 (RFC 1928 section 7): datagrams of one client to any host of the overlay.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::Instant;

use super::message::{MAX_DATAGRAM_HEADER, datagram_header, parse_datagram};
use super::server::log_unreached;
use crate::overlay::{Overlay, Unreached};
use crate::sessions::{IDLE, MAX_DATAGRAM};
use crate::target::{Host, Target};

/// Names that are remembered, and for how long: a name is looked up for each datagram otherwise.
const MAX_NAMES: usize = 32;
const NAME_LIFETIME: Duration = Duration::from_secs(60);

/// An association, and its two ports.
pub(super) struct Association {
    overlay: Overlay,
    local: UdpSocket,
    remote: nebula_net::UdpSocket,
    /// The address that the connection comes from; datagrams of others are dropped.
    client: IpAddr,
    /// The port that the first datagram came from; later ones must come from there as well.
    source: Option<SocketAddr>,
    names: HashMap<String, (Instant, Option<IpAddr>)>,
}

impl Association {
    /// Opens a port beside the one that the client is connected to.
    pub(super) async fn open(overlay: &Overlay, stream: &TcpStream) -> io::Result<Self> {
        let local = UdpSocket::bind((stream.local_addr()?.ip(), 0)).await?;
        let (remote, client) = (overlay.net.bind_udp(0)?, stream.peer_addr()?.ip());
        Ok(Self { overlay: overlay.clone(), local, remote, client, source: None, names: HashMap::new() })
    }

    /// Where the client sends its datagrams.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.local.local_addr()
    }

    async fn send(&mut self, datagram: &[u8], from: SocketAddr) {
        if from.ip() != self.client || *self.source.get_or_insert(from) != from {
            return;
        }
        let Ok((target, header)) = parse_datagram(datagram) else { return };
        match self.resolve(&target).await {
            // As with any UDP, nobody is told of a loss.
            Ok(address) => drop(self.remote.send_to(&datagram[header..], address)),
            Err(error) => log_unreached("SOCKS (UDP)", from, &target, &error),
        }
    }

    async fn resolve(&mut self, target: &Target) -> Result<SocketAddr, Unreached> {
        let Host::Name(name) = &target.host else { return self.overlay.resolve(target).await };
        let now = Instant::now();
        if let Some((at, known)) = self.names.get(name)
            && now < *at + NAME_LIFETIME
        {
            let known = known.ok_or_else(|| Unreached::UnknownName(name.clone()))?;
            return Ok(SocketAddr::new(known, target.port));
        }
        if self.names.len() >= MAX_NAMES {
            self.names.clear();
        }
        let found = self.overlay.resolve(target).await;
        self.names.insert(name.clone(), (now, found.as_ref().ok().map(SocketAddr::ip)));
        found
    }
}

/// Carries datagrams until the client closes its connection, or nothing comes for a while.
pub(super) async fn associate(mut association: Association, mut stream: TcpStream) -> io::Result<()> {
    let mut datagram = vec![0; MAX_DATAGRAM + MAX_DATAGRAM_HEADER];
    let mut word = [0; 64];
    loop {
        tokio::select! {
            read = stream.read(&mut word) => if read? == 0 { return Ok(()) },
            received = association.local.recv_from(&mut datagram) => {
                let (len, from) = received?;
                association.send(&datagram[..len], from).await;
            }
            received = association.remote.recv_from() => {
                let (payload, peer) = received?;
                if let Some(source) = association.source {
                    let answer = [datagram_header(peer), payload].concat();
                    // The client may not listen at this moment.
                    let _ = association.local.send_to(&answer, source).await;
                }
            }
            () = tokio::time::sleep(IDLE) => return Ok(()),
        }
    }
}
