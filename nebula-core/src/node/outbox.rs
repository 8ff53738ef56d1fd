//! What the control plane sends: datagrams, packets for the own device and the primary network, and events, each in
//! order.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::hops::Hops;
use crate::counters::{Counter, Counters, Direction};
use crate::forward::{Carrier, cut_packet};
use crate::tunnel::Tunnel;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::{DropReason, Event, Forwarder, Lane, Origin, PacketOwned, Punt, Transmit, Verdict};

/// Output queues of the control plane, and the lane that seals and counts what goes into them.
#[derive(Debug)]
pub(super) struct Outbox {
    forwarder: Arc<Forwarder>,
    lane: Lane,
    transmits: VecDeque<Transmit>,
    packets: VecDeque<Vec<u8>>,
    bypasses: VecDeque<PacketOwned>,
    events: VecDeque<Event>,
}

impl Outbox {
    pub(super) fn new(forwarder: Arc<Forwarder>) -> Self {
        let lane = forwarder.lane();
        let (transmits, packets, bypasses, events) =
            (VecDeque::new(), VecDeque::new(), VecDeque::new(), VecDeque::new());
        Self { forwarder, lane, transmits, packets, bypasses, events }
    }

    pub(super) fn datagram(&mut self, to: SocketAddr, datagram: Vec<u8>) {
        self.transmits.push_back(Transmit { to, datagram, must_be_whole: false });
    }

    /// Like [`Outbox::datagram_by`], for a probe that must not be fragmented.
    pub(super) fn whole_datagram_by(&mut self, carrier: &Carrier, datagram: Vec<u8>) {
        let Ok(datagram) = carrier.wrap(datagram) else { return };
        self.counters().add(Counter::PathProbesOut, 1);
        self.transmits.push_back(Transmit { to: carrier.to, datagram, must_be_whole: true });
    }

    /// Sends a datagram by `carrier`, in a relay frame if the path is relayed. Returns whether it is on its way.
    pub(super) fn datagram_by(&mut self, carrier: &Carrier, datagram: Vec<u8>) -> bool {
        let Ok(datagram) = carrier.wrap(datagram) else { return false };
        self.datagram(carrier.to, datagram);
        true
    }

    /// Sends a datagram back by the path that another one came by.
    pub(super) fn answer(&mut self, hops: &Hops, from: Origin, datagram: Vec<u8>) {
        if let Some(carrier) = hops.path_back(from) {
            self.datagram_by(&carrier, datagram);
        }
    }

    /// Seals a message into the tunnel and sends it. Does nothing if there is no path to the peer or the counter is
    /// used up.
    pub(super) fn message(&mut self, tunnel: &Tunnel, kind: MessageType, body: &[u8]) {
        if let Some(carrier) = self.forwarder.carrier_for(tunnel, HEADER_LEN + body.len() + TAG_LEN) {
            self.message_by(&carrier, tunnel, kind, body);
        }
    }

    /// Like [`Outbox::message`], by a path other than the tunnel's own.
    pub(super) fn message_by(&mut self, carrier: &Carrier, tunnel: &Tunnel, kind: MessageType, body: &[u8]) {
        let Some(datagram) = seal(tunnel, kind, body) else { return };
        if self.datagram_by(carrier, datagram) {
            tunnel.mark_sent();
        }
    }

    /// Sends an overlay packet through the forwarding plane, as a data lane would. Returns its punt: it cannot be
    /// sent yet, or it was the first by an unexamined path.
    pub(super) fn overlay_packet(&mut self, now: Instant, mut packet: PacketOwned) -> Option<Punt> {
        self.lane.clear();
        match self.forwarder.outbound(&mut self.lane, now, &mut packet.bytes, packet.offload) {
            Verdict::Transmit => {
                self.lane.counters().add(Counter::WaitingOut, 1);
                for run in self.lane.runs() {
                    for datagram in self.lane.arena()[run.range.clone()].chunks(run.segment_size.max(1)) {
                        self.transmits.push_back(Transmit {
                            to: run.to,
                            datagram: datagram.to_vec(),
                            must_be_whole: false,
                        });
                    }
                }
            }
            Verdict::Bypass => self.bypasses.push_back(packet),
            Verdict::Deliver | Verdict::Punt | Verdict::Drop(_) => {}
        }
        self.forwarder.settle_now(&mut self.lane, now);
        for delivery in self.lane.deliveries() {
            let whole = &self.lane.headers()[delivery.header.clone()];
            cut_packet(whole, delivery.offload, |packet| self.packets.push_back(packet.to_vec()));
        }
        let is_packets =
            |punt: &Punt| matches!(punt, Punt::NoTunnel { .. } | Punt::Unknown { .. } | Punt::PathUnexamined { .. });
        let punt = self.lane.take_punts().find(is_packets);
        self.lane.clear();
        punt
    }

    pub(super) fn event(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// Takes the next datagram, and counts it as sent.
    pub(super) fn next_transmit(&mut self) -> Option<Transmit> {
        let transmit = self.transmits.pop_front()?;
        if let Some(counter) = counter_of(&transmit.datagram) {
            self.counters().add(counter, 1);
        }
        Some(transmit)
    }

    pub(super) fn next_packet(&mut self) -> Option<Vec<u8>> {
        self.packets.pop_front()
    }

    pub(super) fn next_bypass(&mut self) -> Option<PacketOwned> {
        self.bypasses.pop_front()
    }

    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The control plane's counters.
    pub(super) fn counters(&self) -> &Counters {
        self.lane.counters()
    }

    /// Counts a received datagram or message that the control plane dropped.
    pub(super) fn count_drop(&self, reason: DropReason) {
        self.counters().drop_one(Direction::Inbound, reason);
    }

    /// Releases memory that a burst took.
    pub(super) fn release_memory(&mut self) {
        self.lane.release_memory();
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
fn counter_of(datagram: &[u8]) -> Option<Counter> {
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
