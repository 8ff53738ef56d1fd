//! Packets for this host: which connection or port they belong to, and what is answered if there is none.

use std::net::SocketAddr;
use std::time::Instant;

use nebula_core::forward::{Offload, echo_reply};
use nebula_core::{LocalIndex, protocol};

use super::packet::{self, IcmpError, IcmpKind, IpPacket};
use super::{Flow, RESERVE, Stack, TCP_CHECKSUM};
use crate::tcp::segment::{Flags, Header, MIN_HEADER};
use crate::tcp::{Error, PIECE_COST, Reaction};

impl Stack {
    /// Takes a packet for this host: a whole one, or the header of a super-packet followed by its payload.
    pub fn receive(&mut self, now: Instant, slices: &[&[u8]], offload: Offload) {
        self.receive_by(now, None, slices, offload);
    }

    /// Like [`Stack::receive`], for a packet that came by this tunnel: [`Received::tunnel`](super::Received::tunnel) of
    /// a datagram says so.
    pub fn receive_by(&mut self, now: Instant, tunnel: Option<LocalIndex>, slices: &[&[u8]], offload: Offload) {
        let Some((first, rest)) = slices.split_first() else { return };
        let Some(packet) = IpPacket::parse(first) else { return };
        if !self.addresses.contains(&packet.destination) {
            return;
        }
        // The checksum of a super-packet is left to us; it was checked piece by piece.
        let whole = offload == Offload::default();
        match packet.protocol {
            protocol::TCP if !whole || packet.checksum_is_right() => self.receive_tcp(now, &packet, rest),
            protocol::UDP if rest.is_empty() => self.receive_udp(tunnel, &packet),
            protocol::ICMP | protocol::ICMPV6 if rest.is_empty() => {
                if let Some(reply) = echo_reply(first) {
                    self.outgoing.push(reply, Offload::default());
                } else if let Some(error) = IcmpError::parse(&packet) {
                    self.receive_error(now, error);
                }
            }
            _ => {}
        }
    }

    fn receive_tcp(&mut self, now: Instant, packet: &IpPacket<'_>, rest: &[&[u8]]) {
        let Some((header, len)) = Header::parse(packet.transport) else { return };
        let flow = Flow {
            local: SocketAddr::new(packet.destination, header.destination),
            remote: SocketAddr::new(packet.source, header.source),
        };
        let mut payload = Vec::with_capacity(1 + rest.len());
        payload.push(&packet.transport[len..]);
        payload.extend_from_slice(rest);
        let bytes: usize = payload.iter().map(|slice| slice.len()).sum();
        let mut found = self.flows.get(&flow).copied();
        if let Some(id) = found
            && header.flags.has(Flags::SYN)
            && !header.flags.has(Flags::ACK)
            && self.connections.get(id).is_some_and(|entry| entry.connection.takes_new_syn(&header))
        {
            self.remove(id);
            found = None;
        }
        let Some(id) = found else { return self.receive_unknown(now, flow, &header, bytes) };
        let Some(entry) = self.connections.get_mut(id) else { return };
        let before = entry.connection.buffered();
        let cost = bytes + PIECE_COST;
        if bytes > 0 && before + cost > RESERVE && !self.peers.may_keep(entry.peer, cost, self.limits.receive_memory) {
            entry.connection.make_room(&header, cost);
            let after = entry.connection.buffered();
            if after + cost > before.max(RESERVE) {
                self.peers.buffer(entry.peer, before, after);
                self.counters.out_of_memory += 1;
                return;
            }
        }
        let reaction = entry.connection.receive(now, &header, &payload);
        self.peers.buffer(entry.peer, before, entry.connection.buffered());
        if reaction == Reaction::Reset {
            self.reset(flow, &header, bytes);
        }
        self.settle(now, id);
    }

    /// A segment without a connection: one that asks for it, or one to refuse.
    fn receive_unknown(&mut self, now: Instant, flow: Flow, header: &Header, bytes: usize) {
        if !header.flags.has(Flags::RST) && !self.ask(now, flow, header) {
            self.reset(flow, header, bytes);
        }
    }

    /// Answers a segment with a reset (RFC 9293 section 3.10.7.1).
    pub(super) fn reset(&mut self, flow: Flow, header: &Header, bytes: usize) {
        let len = bytes as u32 + u32::from(header.flags.has(Flags::SYN)) + u32::from(header.flags.has(Flags::FIN));
        let mut answer = Header {
            source: flow.local.port(),
            destination: flow.remote.port(),
            flags: Flags::RST,
            ..Header::default()
        };
        if header.flags.has(Flags::ACK) {
            answer.sequence = header.acknowledgement;
        } else {
            answer.flags = Flags::RST.with(Flags::ACK);
            answer.acknowledgement = header.sequence.wrapping_add(len);
        }
        let mut packet = Vec::with_capacity(packet::header_len(flow.remote.ip()) + MIN_HEADER);
        packet::begin(flow.local.ip(), flow.remote.ip(), protocol::TCP, &mut packet);
        answer.emit(&mut packet);
        let start = packet::finish(&mut packet, TCP_CHECKSUM);
        self.outgoing.push(packet, Offload { segment: None, checksum: Some((start as u16, TCP_CHECKSUM as u16)) });
    }

    fn receive_udp(&mut self, tunnel: Option<LocalIndex>, packet: &IpPacket<'_>) {
        let Some((source, destination, payload)) = packet::parse_udp(packet.transport) else { return };
        // Zero means that there is none.
        if packet.transport[6..8] != [0, 0] && !packet.checksum_is_right() {
            return;
        }
        if let Some(port) = self.bindings.udp(SocketAddr::new(packet.destination, destination)) {
            port.push(SocketAddr::new(packet.source, source), tunnel, payload, self.limits.udp_buffer);
        }
    }

    fn receive_error(&mut self, now: Instant, error: IcmpError) {
        let flow = Flow { local: error.local, remote: error.remote };
        if error.protocol != protocol::TCP {
            return;
        }
        let Some(id) = self.flows.get(&flow).copied() else { return };
        let Some(entry) = self.connections.get_mut(id) else { return };
        // Whoever does not know what we sent invented the error (RFC 5927).
        if !entry.connection.has_sent(error.sequence) {
            return;
        }
        match error.kind {
            IcmpKind::Unreachable => entry.connection.unreachable(Error::Unreachable),
            IcmpKind::TooBig(mtu) => {
                let headers = packet::header_len(flow.remote.ip()) + MIN_HEADER;
                entry.connection.limit_mss(now, mtu.saturating_sub(headers as u32).min(u16::MAX.into()) as u16);
            }
        }
        self.settle(now, id);
    }
}
