//! Packets and pairs of forwarders for the tests of this module.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use nebula_cert::{CaPool, Curve, Identity, PrivateKey, SigningKey, Template, VerifiedCertificate, Version};

use super::{Forwarder, Lane, LocalPolicy, Offload, Received, Run, Segment, SegmentKind};
use crate::firewall::{Policy, Rule};
use crate::index::{LocalIndex, RemoteIndex};
use crate::tunnel::Negotiated;
use crate::tunnel::cipher::Cipher;
use crate::tunnel::{SessionKeys, Tunnel};
use crate::{Config, Verdict};

pub(super) const TCP_ACK: u8 = 0x10;

/// A packet to build, from 10.1.0.1 or fd00::1 to 10.1.0.2 or fd00::2.
#[derive(Debug, Clone)]
pub(super) struct Spec {
    pub(super) kind: SegmentKind,
    pub(super) v6: bool,
    pub(super) source_port: u16,
    pub(super) sequence: u32,
    pub(super) flags: u8,
    pub(super) window: u16,
    pub(super) options: Vec<u8>,
    pub(super) id: u16,
    pub(super) dont_fragment: bool,
    pub(super) traffic_class: u8,
    pub(super) payload: Vec<u8>,
}

impl Spec {
    pub(super) fn new(kind: SegmentKind, v6: bool) -> Self {
        Self {
            kind,
            v6,
            source_port: 40_000,
            sequence: 1_000,
            flags: TCP_ACK,
            window: 500,
            options: Vec::new(),
            id: 7,
            dont_fragment: false,
            traffic_class: 0,
            payload: Vec::new(),
        }
    }

    pub(super) fn transport(&self) -> usize {
        if self.v6 { 40 } else { 20 }
    }

    pub(super) fn header(&self) -> usize {
        let transport = match self.kind {
            SegmentKind::Tcp => 20 + self.options.len(),
            SegmentKind::Udp => 8,
        };
        self.transport() + transport
    }

    fn checksum_offset(&self) -> usize {
        match self.kind {
            SegmentKind::Tcp => 16,
            SegmentKind::Udp => 6,
        }
    }

    /// The packet with all checksums.
    pub(super) fn build(&self) -> Vec<u8> {
        let mut packet = self.headers();
        packet.extend_from_slice(&self.payload);
        let sum = match !naive_sum(&[&pseudo_header(&packet, self), &packet[self.transport()..]]) {
            0 => 0xffff,
            sum => sum,
        };
        self.set_checksum(&mut packet, sum);
        packet
    }

    /// The super-packet as the kernel hands it over to be cut into segments of `size` bytes.
    pub(super) fn build_super(&self, size: u16) -> (Vec<u8>, Offload) {
        let mut packet = self.headers();
        packet.extend_from_slice(&self.payload);
        let sum = naive_sum(&[&pseudo_header(&packet, self)]);
        self.set_checksum(&mut packet, sum);
        let checksum = Some((self.transport() as u16, self.checksum_offset() as u16));
        (packet, Offload { segment: Some(Segment { kind: self.kind, size }), checksum })
    }

    /// The packets that cutting into segments of `size` bytes must yield.
    pub(super) fn cut(&self, size: usize) -> Vec<Vec<u8>> {
        let count = self.payload.len().div_ceil(size);
        let chunks = self.payload.chunks(size).enumerate();
        let segment = |(nth, payload): (usize, &[u8])| {
            let mut flags = self.flags;
            if nth > 0 {
                flags &= !0x80;
            }
            if nth + 1 < count {
                flags &= !0x09;
            }
            let sequence = self.sequence.wrapping_add((nth * size) as u32);
            let id = self.id.wrapping_add(nth as u16);
            Self { payload: payload.to_vec(), flags, sequence, id, ..self.clone() }.build()
        };
        chunks.map(segment).collect()
    }

    fn headers(&self) -> Vec<u8> {
        let len = self.header() + self.payload.len();
        let protocol = if self.kind == SegmentKind::Tcp { 6 } else { 17 };
        let mut packet = vec![0; self.header()];
        if self.v6 {
            packet[0] = 0x60 | self.traffic_class >> 4;
            packet[1] = self.traffic_class << 4;
            packet[4..6].copy_from_slice(&((len - 40) as u16).to_be_bytes());
            (packet[6], packet[7]) = (protocol, 64);
            (packet[8], packet[23], packet[24], packet[39]) = (0xfd, 1, 0xfd, 2);
        } else {
            (packet[0], packet[1]) = (0x45, self.traffic_class);
            packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
            packet[4..6].copy_from_slice(&self.id.to_be_bytes());
            packet[6] = if self.dont_fragment { 0x40 } else { 0 };
            (packet[8], packet[9]) = (64, protocol);
            packet[12..20].copy_from_slice(&[10, 1, 0, 1, 10, 1, 0, 2]);
            let sum = !naive_sum(&[&packet[..20]]);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        let transport = &mut packet[self.transport()..];
        transport[..2].copy_from_slice(&self.source_port.to_be_bytes());
        transport[2..4].copy_from_slice(&443_u16.to_be_bytes());
        match self.kind {
            SegmentKind::Tcp => {
                transport[4..8].copy_from_slice(&self.sequence.to_be_bytes());
                transport[8..12].copy_from_slice(&77_u32.to_be_bytes());
                transport[12] = (((20 + self.options.len()) / 4) << 4) as u8;
                transport[13] = self.flags;
                transport[14..16].copy_from_slice(&self.window.to_be_bytes());
                transport[20..].copy_from_slice(&self.options);
            }
            SegmentKind::Udp => {
                transport[4..6].copy_from_slice(&((8 + self.payload.len()) as u16).to_be_bytes());
            }
        }
        packet
    }

    /// Recomputes the checksums of a modified packet.
    pub(super) fn finish(&self, packet: &mut [u8]) {
        if !self.v6 {
            packet[10..12].fill(0);
            let sum = !naive_sum(&[&packet[..20]]);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        self.set_checksum(packet, 0);
        let sum = match !naive_sum(&[&pseudo_header(packet, self), &packet[self.transport()..]]) {
            0 => 0xffff,
            sum => sum,
        };
        self.set_checksum(packet, sum);
    }

    fn set_checksum(&self, packet: &mut [u8], sum: u16) {
        let field = self.transport() + self.checksum_offset();
        packet[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    }
}

fn pseudo_header(packet: &[u8], spec: &Spec) -> Vec<u8> {
    let mut pseudo = if spec.v6 { packet[8..40].to_vec() } else { packet[12..20].to_vec() };
    pseudo.extend_from_slice(&((packet.len() - spec.transport()) as u32).to_be_bytes());
    pseudo.extend_from_slice(&[0, 0, 0, if spec.kind == SegmentKind::Tcp { 6 } else { 17 }]);
    pseudo
}

pub(super) fn naive_sum(parts: &[&[u8]]) -> u16 {
    let bytes = parts.concat();
    let mut sum = 0_u64;
    for word in bytes.chunks(2) {
        sum += u64::from(u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

pub(super) fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

pub(super) fn local_policy(networks: &[&str]) -> LocalPolicy {
    let firewall = Policy { inbound: vec![Rule::any()], outbound: vec![Rule::any()], ..Policy::default() };
    LocalPolicy {
        networks: nets(networks),
        unsafe_networks: Vec::new(),
        subnets: Vec::new(),
        drop_local_broadcast: false,
        drop_multicast: false,
        firewall,
        network_policy: None,
    }
}

/// A certificate that was signed and verified with a new CA.
pub(crate) fn verified(networks: &[&str]) -> VerifiedCertificate {
    let key = SigningKey::generate(Curve::Curve25519).unwrap();
    let template = |name: &str, networks: &[&str], public_key| Template {
        networks: nets(networks),
        public_key,
        ..Template::new(name, 0..=10_000)
    };
    let ca = template("ca", &[], Vec::new()).self_sign(&key).unwrap();
    let public_key = PrivateKey::generate(Curve::Curve25519).unwrap().public_key();
    let host = template("host", networks, public_key).sign(&ca, &key).unwrap();
    let mut trust = CaPool::new();
    trust.add(ca).unwrap();
    trust.verify(host, 100).unwrap()
}

/// A node's forwarding plane and one lane of it.
pub(super) struct Side {
    pub(super) forwarder: Forwarder,
    pub(super) lane: Lane,
    pub(super) tunnel: Arc<Tunnel>,
    pub(super) endpoint: SocketAddr,
    pub(super) now: Instant,
}

/// Two nodes, 10.1.0.1 and 10.1.0.2, with a tunnel between them that both have confirmed.
pub(super) fn pair(cipher: Cipher) -> [Side; 2] {
    let sides = unconfirmed_pair(cipher);
    for side in &sides {
        side.tunnel.confirm();
    }
    sides
}

/// Like [`pair`], but before the second node has received anything through the tunnel.
pub(super) fn unconfirmed_pair(cipher: Cipher) -> [Side; 2] {
    let sides = reserved_pair(cipher);
    sides.iter().for_each(Side::publish);
    sides
}

/// Like [`unconfirmed_pair`], but before either node has published the tunnel in its table.
pub(super) fn reserved_pair(cipher: Cipher) -> [Side; 2] {
    #[allow(clippy::disallowed_methods, reason = "any moment will do as the beginning")]
    let now = Instant::now();
    let networks = [["10.1.0.1/16", "fd00::1/64"], ["10.1.0.2/16", "fd00::2/64"]];
    let endpoints: [SocketAddr; 2] = ["192.0.2.1:4242".parse().unwrap(), "192.0.2.2:4242".parse().unwrap()];
    let forwarders = [0, 1].map(|n| Forwarder::new(local_policy(&networks[n]), now, [n as u64, 5]));
    let indexes = [0, 1].map(|n| forwarders[n].tunnels().reserve(1).unwrap().keep());
    let mut own = 0;
    forwarders.map(|forwarder| {
        let peer = 1 - own;
        let (send, receive) = ([own as u8; 32], [peer as u8; 32]);
        let done = Negotiated {
            local_index: indexes[own],
            remote_index: RemoteIndex(indexes[peer].0),
            peer: verified(&networks[peer]),
            keys: SessionKeys { cipher, send, receive },
            initiator: own == 0,
            own_version: Version::V2,
            peer_time: 0,
            answers_long_tests: true,
            post_quantum: false,
        };
        let tunnel = Arc::new(Tunnel::new(done, Some(endpoints[peer])));
        let lane = forwarder.lane();
        own += 1;
        Side { lane, forwarder, tunnel, endpoint: endpoints[1 - peer], now }
    })
}

impl Side {
    /// Publishes the tunnel in the table.
    pub(super) fn publish(&self) {
        self.forwarder.tunnels().publish(Arc::clone(&self.tunnel));
        self.forwarder.tunnels().set_primary(&self.tunnel);
    }

    pub(super) fn send(&mut self, packet: &[u8], offload: Offload) -> Verdict {
        self.forwarder.outbound(&mut self.lane, self.now, &mut packet.to_vec(), offload)
    }

    /// All sealed datagrams since the last call, one by one.
    pub(super) fn sent(&mut self) -> Vec<Vec<u8>> {
        let arena = self.lane.arena();
        let runs = self.lane.runs();
        let datagrams = runs.iter().flat_map(|run| arena[run.range.clone()].chunks(run.segment_size));
        let datagrams = datagrams.map(<[u8]>::to_vec).collect();
        self.lane.clear();
        datagrams
    }

    /// All sealed runs since the last call, as a socket with GRO would receive them.
    pub(super) fn sent_runs(&mut self) -> (Vec<u8>, Vec<Received>) {
        let arena = self.lane.arena().to_vec();
        let received =
            |run: &Run| Received { from: self.endpoint, range: run.range.clone(), segment_size: run.segment_size };
        let received = self.lane.runs().iter().map(received).collect();
        self.lane.clear();
        (arena, received)
    }

    /// Receives datagrams, one per slot.
    pub(super) fn receive(&mut self, from: SocketAddr, datagrams: &[Vec<u8>]) -> Vec<(Vec<u8>, Offload)> {
        let mut buffer = Vec::new();
        let slots = datagrams.iter().map(|datagram| {
            let range = buffer.len()..buffer.len() + datagram.len();
            buffer.extend_from_slice(datagram);
            Received { from, segment_size: datagram.len(), range }
        });
        let slots: Vec<_> = slots.collect();
        self.receive_slots(&mut buffer, &slots)
    }

    /// Receives, and returns the packets for the device.
    pub(super) fn receive_slots(&mut self, buffer: &mut [u8], slots: &[Received]) -> Vec<(Vec<u8>, Offload)> {
        self.lane.clear();
        self.forwarder.inbound(&mut self.lane, self.now, buffer, slots);
        self.delivered(buffer)
    }

    /// The packets for the device from datagrams that had waited for their tunnel.
    pub(super) fn receive_early(&mut self) -> Vec<(Vec<u8>, Offload)> {
        let mut packets = Vec::new();
        self.lane.clear();
        while let Some(memory) = self.forwarder.inbound_early(&mut self.lane, self.now) {
            packets.extend(self.delivered(&memory));
            self.lane.clear();
        }
        packets
    }

    fn delivered(&self, buffer: &[u8]) -> Vec<(Vec<u8>, Offload)> {
        let lane = &self.lane;
        let packet = |header: Range<usize>, pieces: Range<usize>| {
            let mut packet = lane.headers()[header].to_vec();
            lane.pieces()[pieces].iter().for_each(|piece| packet.extend_from_slice(&buffer[piece.clone()]));
            packet
        };
        let deliveries = lane.deliveries().iter();
        deliveries
            .map(|delivery| (packet(delivery.header.clone(), delivery.pieces.clone()), delivery.offload))
            .collect()
    }

    pub(super) fn index(&self) -> LocalIndex {
        self.tunnel.local_index
    }

    pub(super) fn peer_address(&self) -> IpAddr {
        self.tunnel.peer_addresses[0]
    }
}

/// The outcome of a handshake with `peer`, with keys of no value.
pub(crate) fn negotiated(local_index: LocalIndex, peer: VerifiedCertificate, initiator: bool) -> Negotiated {
    Negotiated {
        local_index,
        remote_index: RemoteIndex(9),
        peer,
        keys: SessionKeys { cipher: Cipher::Aes256Gcm, send: [1; 32], receive: [2; 32] },
        initiator,
        own_version: Version::V2,
        peer_time: 0,
        answers_long_tests: true,
        post_quantum: false,
    }
}

/// An established tunnel to `peer`.
pub(crate) fn tunnel(local_index: LocalIndex, peer: VerifiedCertificate) -> Arc<Tunnel> {
    Arc::new(Tunnel::new(negotiated(local_index, peer, true), None))
}

/// A configuration for a node with these networks.
pub(crate) fn config(networks: &[&str]) -> Config {
    let (key, own) =
        (SigningKey::generate(Curve::Curve25519).unwrap(), PrivateKey::generate(Curve::Curve25519).unwrap());
    let ca = Template { public_key: key.public_key(), ..Template::new("ca", 0..=10_000) }.self_sign(&key).unwrap();
    let host = Template { networks: nets(networks), public_key: own.public_key(), ..Template::new("own", 0..=10_000) };
    Config::new(Identity::new(vec![host.sign(&ca, &key).unwrap()], own).unwrap(), CaPool::new())
}
