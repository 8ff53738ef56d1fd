//! How datagrams leave this node: directly, or in frames of a relay.

use std::net::{IpAddr, SocketAddr};

use super::Forwarder;
use crate::DropReason;
use crate::index::{Hop, RemoteIndex};
use crate::tunnel::{Lookup, Tunnel};
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};

/// How the datagrams of a tunnel leave this node.
#[derive(Debug)]
pub(crate) struct Carrier {
    /// Underlay destination: of the peer, or of its relay.
    pub(crate) to: SocketAddr,
    relay: Option<(Lookup, RemoteIndex)>,
}

impl Carrier {
    /// Reserves counters for the frames of `n` datagrams; `None`: they need no frame.
    pub(crate) fn frames(&self, n: u64) -> Result<Option<Frames<'_>>, DropReason> {
        let Some((lookup, index)) = &self.relay else { return Ok(None) };
        let relay = lookup.tunnel().ok_or(DropReason::NoEndpoint)?;
        let first = relay.session.reserve(n).ok_or(DropReason::CounterExhausted)?;
        relay.mark_sent();
        Ok(Some(Frames { relay, index: *index, first }))
    }

    /// Puts a datagram into a frame if it needs one.
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

/// Frames of one relay, with counters of their own.
#[derive(Debug)]
pub(crate) struct Frames<'a> {
    relay: &'a Tunnel,
    index: RemoteIndex,
    first: u64,
}

impl Frames<'_> {
    /// Writes header and tag of the `nth` frame around the datagram that lies between their places.
    pub(super) fn close(&self, nth: u64, frame: &mut [u8]) {
        let counter = self.first + nth;
        let header = Header { kind: MessageType::Relay, index: self.index.0, counter };
        let (body, tag) = frame.split_at_mut(frame.len() - TAG_LEN);
        body[..HEADER_LEN].copy_from_slice(&header.to_bytes());
        tag.copy_from_slice(&self.relay.session.send_key.seal(counter, body, &mut []));
    }
}

impl Forwarder {
    /// How to reach the peer of a tunnel: directly, else by its hop. `None`: not at all.
    pub(crate) fn carrier(&self, tunnel: &Tunnel) -> Option<Carrier> {
        match tunnel.endpoint() {
            Some(to) => Some(Carrier { to, relay: None }),
            None => self.carrier_by(tunnel.hop()?),
        }
    }

    /// The relay by which the peer of `tunnel` can be reached, by its first overlay address.
    pub(crate) fn relay_of(&self, tunnel: &Tunnel) -> Option<IpAddr> {
        let neighbour = self.tunnels.by_index(tunnel.hop()?.tunnel)?;
        neighbour.peer_addresses.first().copied()
    }

    /// How to send by a hop. A neighbour that is itself behind a relay is none.
    pub(crate) fn carrier_by(&self, hop: Hop) -> Option<Carrier> {
        let relay = self.tunnels.look_up(hop.tunnel);
        let to = relay.tunnel()?.endpoint()?;
        Some(Carrier { to, relay: Some((relay, hop.index)) })
    }
}
