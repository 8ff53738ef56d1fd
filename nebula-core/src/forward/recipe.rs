//! Packets of all kinds between any two ends, for tests: built from nothing each time, with all sums computed in full.

use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;

use super::testing::naive_sum;
use super::{Offload, Segment, SegmentKind};

/// Everything about a packet but its ends.
#[derive(Debug, Clone)]
pub(super) struct Recipe {
    pub(super) v6: bool,
    pub(super) kind: SegmentKind,
    /// IPv4 options, or IPv6 extension headers with the type of each.
    pub(super) options: Vec<(u8, Vec<u8>)>,
    /// A fragment: its number, its offset in units of 8 bytes, and whether more follow.
    pub(super) fragment: Option<(u16, u16, bool)>,
    pub(super) sum: ChecksumKind,
    pub(super) flags: u8,
    pub(super) payload: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChecksumKind {
    Complete,
    /// The pseudo-header's only: the rest is left to the device.
    Partial,
    /// UDP without a checksum.
    None,
}

impl Recipe {
    pub(super) fn new(kind: SegmentKind, v6: bool) -> Self {
        let (options, payload) = (Vec::new(), b"some bytes".to_vec());
        Self { v6, kind, options, fragment: None, sum: ChecksumKind::Complete, flags: 0x10, payload }
    }

    fn protocol(&self) -> u8 {
        if self.kind == SegmentKind::Tcp { 6 } else { 17 }
    }

    pub(super) fn checksum_offset(&self) -> usize {
        if self.kind == SegmentKind::Tcp { 16 } else { 6 }
    }

    /// Where the transport header begins.
    pub(super) fn transport(&self) -> usize {
        let options: usize = self.options.iter().map(|(_, bytes)| bytes.len()).sum();
        match self.v6 {
            true => 40 + options + if self.fragment.is_some() { 8 } else { 0 },
            false => 20 + options,
        }
    }

    pub(super) fn is_later_fragment(&self) -> bool {
        self.fragment.is_some_and(|(_, offset, _)| offset > 0)
    }

    /// What the device says about the packet.
    pub(super) fn offload(&self) -> Offload {
        let place = (self.transport() as u16, self.checksum_offset() as u16);
        Offload { segment: None, checksum: (self.sum == ChecksumKind::Partial).then_some(place) }
    }

    /// The same for a super-packet.
    pub(super) fn offload_of(&self, size: u16) -> Offload {
        Offload { segment: Some(Segment { kind: self.kind, size }), ..self.offload() }
    }

    pub(super) fn build(&self, source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
        let body = if self.is_later_fragment() { self.payload.clone() } else { self.transport_of(source, destination) };
        match (source.ip(), destination.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let options: Vec<u8> = self.options.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
                let header = 20 + options.len();
                let mut packet = vec![0x40 | (header / 4) as u8, 0];
                packet.extend(((header + body.len()) as u16).to_be_bytes());
                let (number, place) = match self.fragment {
                    Some((number, offset, more)) => (number, offset | if more { 0x2000 } else { 0 }),
                    None => (7, 0x4000),
                };
                packet.extend(number.to_be_bytes());
                packet.extend(place.to_be_bytes());
                packet.extend([64, self.protocol(), 0, 0]);
                packet.extend(from.octets());
                packet.extend(to.octets());
                packet.extend(options);
                let sum = !naive_sum(&[&packet]);
                packet[10..12].copy_from_slice(&sum.to_be_bytes());
                packet.extend(body);
                packet
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let mut headers = self.options.clone();
                if let Some((number, offset, more)) = self.fragment {
                    let place = (offset << 3 | u16::from(more)).to_be_bytes();
                    headers.push((44, [&[0, 0][..], &place, &u32::from(number).to_be_bytes()].concat()));
                }
                let mut kinds: Vec<u8> = headers.iter().map(|(kind, _)| *kind).collect();
                kinds.push(self.protocol());
                let mut rest = Vec::new();
                for ((_, bytes), next) in headers.iter().zip(&kinds[1..]) {
                    let start = rest.len();
                    rest.extend(bytes);
                    rest[start] = *next;
                }
                rest.extend(body);
                let mut packet = vec![0x60, 0, 0, 0];
                packet.extend((rest.len() as u16).to_be_bytes());
                packet.extend([kinds[0], 64]);
                packet.extend(from.octets());
                packet.extend(to.octets());
                packet.extend(rest);
                packet
            }
            _ => panic!("one family"),
        }
    }

    fn transport_of(&self, source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
        let mut body = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
        match self.kind {
            SegmentKind::Tcp => {
                body.extend([0, 0, 0, 9, 0, 0, 0, 8, 0x50, self.flags, 1, 0, 0, 0, 0, 0]);
            }
            SegmentKind::Udp => {
                body.extend(((8 + self.payload.len()) as u16).to_be_bytes());
                body.extend([0, 0]);
            }
        }
        body.extend(&self.payload);
        let pseudo = pseudo_header(source.ip(), destination.ip(), self.protocol(), body.len());
        let sum = match self.sum {
            ChecksumKind::None => 0,
            ChecksumKind::Partial => naive_sum(&[&pseudo]),
            ChecksumKind::Complete => match !naive_sum(&[&pseudo, &body]) {
                0 => 0xffff,
                sum => sum,
            },
        };
        let field = self.checksum_offset();
        body[field..field + 2].copy_from_slice(&sum.to_be_bytes());
        body
    }
}

/// An ICMP error (destination unreachable) that quotes the first bytes of a packet.
pub(super) fn error(from: IpAddr, to: IpAddr, quoted: &[u8]) -> Vec<u8> {
    let (number, kind) = if from.is_ipv4() { (1, 3) } else { (58, 1) };
    let mut body = vec![kind, 3, 0, 0, 0, 0, 0, 0];
    body.extend(quoted);
    let pseudo = if from.is_ipv4() { Vec::new() } else { pseudo_header(from, to, number, body.len()) };
    let sum = !naive_sum(&[&pseudo, &body]);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut packet = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut packet = vec![0x45, 0];
            packet.extend(((20 + body.len()) as u16).to_be_bytes());
            packet.extend([0, 0, 0, 0, 64, number, 0, 0]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            let sum = !naive_sum(&[&packet]);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
            packet
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut packet = vec![0x60, 0, 0, 0];
            packet.extend((body.len() as u16).to_be_bytes());
            packet.extend([number, 64]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            packet
        }
        _ => panic!("one family"),
    };
    packet.extend(body);
    packet
}

fn pseudo_header(from: IpAddr, to: IpAddr, number: u8, len: usize) -> Vec<u8> {
    let mut pseudo = Vec::new();
    for address in [from, to] {
        match address {
            IpAddr::V4(v4) => pseudo.extend(v4.octets()),
            IpAddr::V6(v6) => pseudo.extend(v6.octets()),
        }
    }
    pseudo.extend((len as u32).to_be_bytes());
    pseudo.extend([0, 0, 0, number]);
    pseudo
}

pub(super) fn any_end(v6: bool) -> impl Strategy<Value = SocketAddr> {
    (any::<u128>(), any::<u16>()).prop_map(move |(bits, port)| {
        let address = if v6 { IpAddr::from(bits.to_be_bytes()) } else { IpAddr::from((bits as u32).to_be_bytes()) };
        SocketAddr::new(address, port)
    })
}

pub(super) fn any_recipe(v6: bool) -> impl Strategy<Value = Recipe> {
    // Record route, timestamp and padding; hop-by-hop and destination options.
    let option = match v6 {
        false => prop_oneof![Just((0, vec![1, 1, 1, 1])), Just((0, vec![7, 7, 4, 0, 0, 0, 0, 1]))].boxed(),
        true => prop_oneof![Just((0, vec![0, 0, 1, 4, 0, 0, 0, 0])), Just((60, vec![0, 0, 1, 4, 0, 0, 0, 0]))].boxed(),
    };
    let kind = prop_oneof![Just(SegmentKind::Tcp), Just(SegmentKind::Udp)];
    let sum = prop_oneof![
        3 => Just(ChecksumKind::Complete),
        2 => Just(ChecksumKind::Partial),
        1 => Just(ChecksumKind::None),
    ];
    let fragment = prop_oneof![
        4 => Just(None),
        1 => any::<u16>().prop_map(|number| Some((number, 0, true))),
        1 => (any::<u16>(), 1_u16..100, any::<bool>()).prop_map(Some),
    ];
    let payload = prop::collection::vec(any::<u8>(), 0..200);
    (kind, prop::collection::vec(option, 0..3), sum, fragment, any::<u8>(), payload).prop_map(
        move |(kind, options, sum, fragment, flags, payload)| {
            let sum = match (kind, sum, fragment) {
                (SegmentKind::Tcp, ChecksumKind::None, _) | (_, ChecksumKind::Partial, Some(_)) => {
                    ChecksumKind::Complete
                }
                _ => sum,
            };
            Recipe { v6, kind, options, fragment, sum, flags, payload }
        },
    )
}
