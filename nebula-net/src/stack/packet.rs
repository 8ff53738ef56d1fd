//! IP packets: what the stack needs to read of them, and the headers that it writes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use nebula_core::forward::checksum::{Sum, finish_ipv4_header};
use nebula_core::protocol;

const V4_HEADER: usize = 20;
const V6_HEADER: usize = 40;
const TTL: u8 = 64;
const DONT_FRAGMENT: u8 = 0x40;

/// An IP packet that is not a fragment and has no IPv6 extension headers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IpPacket<'a> {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) protocol: u8,
    /// Source and destination address as in the header.
    addresses: &'a [u8],
    /// Everything behind the IP header, padding removed, as far as it is in the first slice.
    pub(crate) transport: &'a [u8],
}

impl<'a> IpPacket<'a> {
    /// Reads a packet whose headers are in this slice; it may be longer than that. `None` if it is not one for this
    /// stack.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        match bytes.first()? >> 4 {
            4 => {
                let header = bytes.first_chunk::<V4_HEADER>()?;
                let len = usize::from(header[0] & 15) * 4;
                let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
                let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
                if len < V4_HEADER || total < len || fragment != 0 {
                    return None;
                }
                let addresses = &bytes[12..20];
                let (source, destination) = addresses.split_first_chunk::<4>()?;
                Some(Self {
                    source: Ipv4Addr::from(*source).into(),
                    destination: Ipv4Addr::from(*destination.first_chunk::<4>()?).into(),
                    protocol: header[9],
                    addresses,
                    transport: bytes.get(len..total.min(bytes.len()))?,
                })
            }
            6 => {
                let header = bytes.first_chunk::<V6_HEADER>()?;
                let total = V6_HEADER + usize::from(u16::from_be_bytes([header[4], header[5]]));
                let addresses = &bytes[8..40];
                let (source, destination) = addresses.split_first_chunk::<16>()?;
                Some(Self {
                    source: Ipv6Addr::from(*source).into(),
                    destination: Ipv6Addr::from(*destination.first_chunk::<16>()?).into(),
                    protocol: header[6],
                    addresses,
                    transport: bytes.get(V6_HEADER..total.min(bytes.len()))?,
                })
            }
            _ => None,
        }
    }

    /// Whether the checksum over a transport header and payload that are all in the first slice is right.
    pub(crate) fn checksum_is_right(&self) -> bool {
        let sum = Sum::default().add_pseudo_header(self.addresses, self.protocol, self.transport.len());
        sum.add(self.transport).partial() == 0xffff
    }
}

/// Length of the IP header that [`begin`] writes.
pub(crate) fn header_len(remote: IpAddr) -> usize {
    if remote.is_ipv4() { V4_HEADER } else { V6_HEADER }
}

/// Writes an IP header into the empty `out`. [`finish`] completes it. Both addresses are of one family.
pub(crate) fn begin(local: IpAddr, remote: IpAddr, protocol: u8, out: &mut Vec<u8>) {
    match (local, remote) {
        (IpAddr::V4(local), IpAddr::V4(remote)) => {
            out.extend_from_slice(&[0x45, 0, 0, 0, 0, 0, DONT_FRAGMENT, 0, TTL, protocol, 0, 0]);
            out.extend_from_slice(&local.octets());
            out.extend_from_slice(&remote.octets());
        }
        (local, remote) => {
            out.extend_from_slice(&[0x60, 0, 0, 0, 0, 0, protocol, TTL]);
            for address in [local, remote] {
                match address {
                    IpAddr::V4(v4) => out.extend_from_slice(&v4.to_ipv6_mapped().octets()),
                    IpAddr::V6(v6) => out.extend_from_slice(&v6.octets()),
                }
            }
        }
    }
}

/// Completes the lengths of a packet, and leaves the sum of the pseudo-header in its transport checksum, which is at
/// `checksum` of the transport header. Returns where the transport header begins.
pub(crate) fn finish(packet: &mut [u8], checksum: usize) -> usize {
    let v4 = packet[0] >> 4 == 4;
    let start = if v4 { V4_HEADER } else { V6_HEADER };
    let len = packet.len();
    let (addresses, protocol) = if v4 {
        packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
        finish_ipv4_header(&mut packet[..V4_HEADER]);
        (&packet[12..20], packet[9])
    } else {
        packet[4..6].copy_from_slice(&((len - V6_HEADER) as u16).to_be_bytes());
        (&packet[8..40], packet[6])
    };
    let sum = Sum::default().add_pseudo_header(addresses, protocol, len - start).partial();
    packet[start + checksum..start + checksum + 2].copy_from_slice(&sum.to_be_bytes());
    start
}

/// The ports of a UDP datagram and its payload.
pub(crate) fn parse_udp(transport: &[u8]) -> Option<(u16, u16, &[u8])> {
    let header = transport.first_chunk::<8>()?;
    let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    Some((word(0), word(2), transport.get(8..usize::from(word(4)))?))
}

/// A whole UDP packet but for its checksum, whose place is returned with it.
pub(crate) fn udp_packet(local: SocketAddr, remote: SocketAddr, payload: &[u8]) -> (Vec<u8>, (u16, u16)) {
    const CHECKSUM: usize = 6;
    let mut packet = Vec::with_capacity(header_len(remote.ip()) + 8 + payload.len());
    begin(local.ip(), remote.ip(), protocol::UDP, &mut packet);
    packet.extend_from_slice(&local.port().to_be_bytes());
    packet.extend_from_slice(&remote.port().to_be_bytes());
    packet.extend_from_slice(&((8 + payload.len()) as u16).to_be_bytes());
    packet.extend_from_slice(&[0, 0]);
    packet.extend_from_slice(payload);
    let start = finish(&mut packet, CHECKSUM);
    (packet, (start as u16, CHECKSUM as u16))
}

/// An ICMP error about a packet that this node sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IcmpError {
    pub(crate) kind: IcmpKind,
    /// Of the packet that the error is about.
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) protocol: u8,
    /// TCP sequence number of that packet.
    pub(crate) sequence: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IcmpKind {
    Unreachable,
    /// Longest packet that the path takes.
    TooBig(u32),
}

impl IcmpError {
    /// Reads an ICMP or ICMPv6 message.
    pub(crate) fn parse(packet: &IpPacket<'_>) -> Option<Self> {
        let (header, about) = packet.transport.split_first_chunk::<8>()?;
        let kind = match (packet.protocol, header[0], header[1]) {
            (protocol::ICMP, 3, 4) => IcmpKind::TooBig(u16::from_be_bytes([header[6], header[7]]).into()),
            (protocol::ICMP, 3, _) | (protocol::ICMPV6, 1, _) => IcmpKind::Unreachable,
            (protocol::ICMPV6, 2, _) => {
                IcmpKind::TooBig(u32::from_be_bytes([header[4], header[5], header[6], header[7]]))
            }
            _ => return None,
        };
        let about = IpPacket::parse(about)?;
        let first = about.transport.first_chunk::<8>()?;
        let word = |at: usize| u16::from_be_bytes([first[at], first[at + 1]]);
        Some(Self {
            kind,
            local: SocketAddr::new(about.source, word(0)),
            remote: SocketAddr::new(about.destination, word(2)),
            protocol: about.protocol,
            sequence: u32::from_be_bytes([first[4], first[5], first[6], first[7]]),
        })
    }
}

#[cfg(test)]
mod tests {
    use nebula_core::forward::{Offload, cut_packet};

    use super::*;

    #[test]
    fn a_datagram_reads_as_it_was_written() {
        for (local, remote) in [("10.0.0.1:5", "10.0.0.2:6"), ("[fd00::1]:5", "[fd00::2]:6")] {
            let (local, remote): (SocketAddr, SocketAddr) = (local.parse().unwrap(), remote.parse().unwrap());
            let (packet, checksum) = udp_packet(local, remote, b"hello");
            let mut sent = Vec::new();
            cut_packet(&packet, Offload { segment: None, checksum: Some(checksum) }, |it| sent = it.to_vec());
            sent.push(0); // padding
            let read = IpPacket::parse(&sent).unwrap();
            assert_eq!((read.source, read.destination, read.protocol), (local.ip(), remote.ip(), protocol::UDP));
            assert!(read.checksum_is_right());
            assert_eq!(parse_udp(read.transport), Some((5, 6, &b"hello"[..])));
            let last = sent.len() - 2;
            sent[last] ^= 1;
            assert!(!IpPacket::parse(&sent).unwrap().checksum_is_right());
        }
    }

    #[test]
    fn fragments_and_truncated_packets_are_refused() {
        let (mut packet, _) = udp_packet("10.0.0.1:5".parse().unwrap(), "10.0.0.2:6".parse().unwrap(), b"hello");
        assert!(IpPacket::parse(&packet[..19]).is_none());
        packet[6] = 0x20;
        assert!(IpPacket::parse(&packet).is_none());
        assert!(IpPacket::parse(&[]).is_none());
    }
}
