//! Output queues of the control plane: datagrams, packets for the own device, and events, each in order.

use std::collections::VecDeque;
use std::net::SocketAddr;

use crate::counters::Counter;
use crate::tunnel::Tunnel;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::{Event, Transmit};

#[derive(Debug, Default)]
pub(super) struct Outbox {
    transmits: VecDeque<Transmit>,
    packets: VecDeque<Vec<u8>>,
    events: VecDeque<Event>,
}

impl Outbox {
    pub(super) fn datagram(&mut self, to: SocketAddr, datagram: Vec<u8>) {
        self.transmits.push_back(Transmit { to, datagram });
    }

    /// Seals a message into the tunnel and sends it to an endpoint where the peer may be. Does nothing if the counter
    /// is used up.
    pub(super) fn message_to(&mut self, to: SocketAddr, tunnel: &Tunnel, kind: MessageType, body: &[u8]) {
        if let Some(datagram) = seal(tunnel, kind, body) {
            tunnel.mark_sent();
            self.datagram(to, datagram);
        }
    }

    pub(super) fn packet(&mut self, packet: Vec<u8>) {
        self.packets.push_back(packet);
    }

    pub(super) fn event(&mut self, event: Event) {
        self.events.push_back(event);
    }

    pub(super) fn next_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    pub(super) fn next_packet(&mut self) -> Option<Vec<u8>> {
        self.packets.pop_front()
    }

    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}

/// Seals a complete datagram with the next counter of `tunnel`; `None` if the counter is used up.
pub(super) fn seal(tunnel: &Tunnel, kind: MessageType, body: &[u8]) -> Option<Vec<u8>> {
    let counter = tunnel.session.reserve(1)?;
    let header = Header { kind, index: tunnel.remote_index.0, counter }.to_bytes();
    let mut datagram = Vec::with_capacity(HEADER_LEN + body.len() + TAG_LEN);
    datagram.extend(header);
    datagram.extend(body);
    let tag = tunnel.session.send_key.seal(counter, &header, &mut datagram[HEADER_LEN..]);
    datagram.extend(tag);
    Some(datagram)
}

/// The counter for an outgoing datagram. `None` for an overlay packet, which is counted where it is sealed.
pub(super) fn counter_of(datagram: &[u8]) -> Option<Counter> {
    match datagram {
        [1] => return Some(Counter::KeepalivesOut),
        [_] => return Some(Counter::HolePunchesOut),
        _ => {}
    }
    Some(match Header::parse(datagram).ok()?.kind {
        MessageType::Handshake => Counter::HandshakesOut,
        MessageType::Lighthouse => Counter::LighthouseOut,
        MessageType::TestRequest => Counter::TestRequestsOut,
        MessageType::TestReply => Counter::TestRepliesOut,
        MessageType::CloseTunnel => Counter::CloseTunnelOut,
        MessageType::Control => Counter::ControlOut,
        MessageType::RecvError => Counter::RecvErrorsOut,
        MessageType::Relay => Counter::FramesOut,
        MessageType::Data => return None,
    })
}
