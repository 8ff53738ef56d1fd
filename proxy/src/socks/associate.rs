//! A UDP association of SOCKS5 (RFC 1928 section 7): datagrams of one client to any host of the overlay.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_cert::listener::Source;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::Instant;

use super::message::{MAX_DATAGRAM_HEADER, datagram_header, parse_datagram};
use super::owner::{Judgement, Owner};
use crate::overlay::{Overlay, Unreached, log_unreached};
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
    owner: Owner,
    names: HashMap<String, (Instant, Option<IpAddr>)>,
}

impl Association {
    /// Opens a port beside the one that the client is connected to. `port` is the one that the client will send from,
    /// if it says so.
    pub(super) async fn open(
        overlay: &Overlay,
        stream: &TcpStream,
        port: u16,
        has_credentials: bool,
    ) -> io::Result<Self> {
        let local = UdpSocket::bind((stream.local_addr()?.ip(), 0)).await?;
        let remote = overlay.net.bind_udp(0)?;
        let owner = Owner::of(stream, port, has_credentials)?;
        if let Some(named) = owner.named() {
            local.connect(named).await?;
        }
        Ok(Self { overlay: overlay.clone(), local, remote, owner, names: HashMap::new() })
    }

    /// Where the client sends its datagrams.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.local.local_addr()
    }

    /// Whether datagrams from and to this address are the client's.
    async fn belongs(&mut self, address: SocketAddr) -> bool {
        let Ok(local) = self.local.local_addr() else { return false };
        match self.owner.judge(Instant::now().into(), address, || Source::of_udp(local, address)) {
            Judgement::Known => true,
            // From now on the kernel drops what others send, so that it takes no place in the queue.
            Judgement::First => self.local.connect(address).await.is_ok(),
            Judgement::Stranger => {
                self.owner.log_stranger(address);
                false
            }
        }
    }

    async fn send(&mut self, datagram: &[u8], from: SocketAddr) {
        if !self.belongs(from).await {
            return;
        }
        let Ok((target, header)) = parse_datagram(datagram) else { return };
        match self.resolve(&target).await {
            // As with any UDP, nobody is told of a loss.
            Ok(address) => drop(self.remote.try_send_to(&datagram[header..], address)),
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
                match received {
                    Ok((len, from)) => association.send(&datagram[..len], from).await,
                    // The client did not listen when the last answer came.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                    Err(error) => return Err(error),
                }
            }
            received = association.remote.recv() => {
                let received = received?;
                if let Some(source) = association.owner.source()
                    && association.belongs(source).await
                {
                    let answer = [datagram_header(received.from), received.payload].concat();
                    // The client may not listen at this moment.
                    let _ = association.local.send(&answer).await;
                }
            }
            () = tokio::time::sleep(IDLE) => return Ok(()),
        }
    }
}
