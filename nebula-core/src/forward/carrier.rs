//! How datagrams leave this node: directly, or wrapped in relay frames.

use std::net::{IpAddr, SocketAddr};

use super::Forwarder;
use crate::DropReason;
use crate::index::{Hop, RemoteIndex};
use crate::tunnel::{Lookup, Tunnel};
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};

/// The path that a tunnel's datagrams take out of this node.
#[derive(Debug)]
pub(crate) struct Carrier {
    /// Underlay address of the peer, or of its relay.
    pub(crate) to: SocketAddr,
    relay: Option<(Lookup, RemoteIndex)>,
}

impl Carrier {
    /// The direct path to an endpoint.
    pub(crate) fn direct(to: SocketAddr) -> Self {
        Self { to, relay: None }
    }

    /// How many bytes longer than an overlay packet the IP packet on the underlay is.
    pub(crate) fn overhead(&self) -> u16 {
        let ip = if self.to.is_ipv4() { 20 } else { 40 };
        let framed = (HEADER_LEN + TAG_LEN) as u16;
        ip + UDP_HEADER + framed + if self.relay.is_some() { framed } else { 0 }
    }

    /// Reserves counters for the relay frames of `n` datagrams; `None` if the path is direct and needs no frames.
    pub(crate) fn frames(&self, n: u64) -> Result<Option<Frames<'_>>, DropReason> {
        let Some((lookup, index)) = &self.relay else { return Ok(None) };
        let relay = lookup.tunnel().ok_or(DropReason::NoEndpoint)?;
        let first = relay.session.reserve(n).ok_or(DropReason::CounterExhausted)?;
        relay.mark_sent();
        Ok(Some(Frames { relay, index: *index, first }))
    }

    /// Wraps a datagram in a relay frame if the path is relayed.
    pub(crate) fn wrap(&self, datagram: Vec<u8>) -> Result<Vec<u8>, DropReason> {
        let Some(frames) = self.frames(1)? else { return Ok(datagram) };
        let mut frame = Vec::with_capacity(HEADER_LEN + datagram.len() + TAG_LEN);
        frame.extend([0; HEADER_LEN]);
        frame.extend(datagram);
        frame.extend([0; TAG_LEN]);
        frames.close(0, &mut frame);
        Ok(frame)
    }
}

const UDP_HEADER: u16 = 8;

/// Frames to one relay, numbered with send counters of the tunnel to that relay.
#[derive(Debug)]
pub(crate) struct Frames<'a> {
    relay: &'a Tunnel,
    index: RemoteIndex,
    first: u64,
}

impl Frames<'_> {
    /// Writes the header and tag of the `nth` frame around the datagram, which is already in place between them.
    pub(super) fn close(&self, nth: u64, frame: &mut [u8]) {
        let counter = self.first + nth;
        let header = Header { kind: MessageType::Relay, index: self.index.0, counter };
        let (body, tag) = frame.split_at_mut(frame.len() - TAG_LEN);
        body[..HEADER_LEN].copy_from_slice(&header.to_bytes());
        tag.copy_from_slice(&self.relay.session.send_key.seal(counter, body, &mut []));
    }
}

impl Forwarder {
    /// The path to the peer of a tunnel: direct if its endpoint is known, otherwise through its relay; `None` if there
    /// is neither. See [`Forwarder::carrier_for`] for tunnels whose path is not open.
    pub(crate) fn carrier(&self, tunnel: &Tunnel) -> Option<Carrier> {
        match tunnel.endpoint() {
            Some(to) => Some(Carrier::direct(to)),
            None => self.carrier_by(tunnel.hop()?),
        }
    }

    /// Like [`Forwarder::carrier`], for `bytes` that are about to be sent: if an endpoint is on trial and may get
    /// them, it is the path.
    pub(crate) fn carrier_for(&self, tunnel: &Tunnel, bytes: usize) -> Option<Carrier> {
        let on_trial = tunnel.trial().filter(|trial| trial.may_send(bytes));
        on_trial.map(|trial| Carrier::direct(trial.at)).or_else(|| self.carrier(tunnel))
    }

    /// Whether there is a tunnel to `peer` with a usable path.
    pub(crate) fn is_reachable(&self, peer: IpAddr) -> bool {
        self.tunnels.by_address(peer).is_some_and(|tunnel| self.carrier(&tunnel).is_some() || tunnel.is_on_trial())
    }

    /// The first overlay address of the relay through which the peer of `tunnel` is reached.
    pub(crate) fn relay_of(&self, tunnel: &Tunnel) -> Option<IpAddr> {
        let neighbour = self.tunnels.by_index(tunnel.hop()?.tunnel)?;
        neighbour.peer_addresses.first().copied()
    }

    /// The path through a relay hop. `None` if the neighbour has no direct endpoint: a relay behind a relay is not
    /// used.
    pub(crate) fn carrier_by(&self, hop: Hop) -> Option<Carrier> {
        let relay = self.tunnels.look_up(hop.tunnel);
        let to = relay.tunnel()?.endpoint()?;
        Some(Carrier { to, relay: Some((relay, hop.index)) })
    }
}
