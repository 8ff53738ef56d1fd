//! Overlay packets that simulated hosts exchange: ICMP echo and UDP.

use std::net::IpAddr;

/// Contents of a packet that a host received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Contents {
    EchoRequest { from: IpAddr, to: IpAddr, identifier: u16, sequence: u16 },
    EchoReply { identifier: u16, sequence: u16 },
    Udp { from: IpAddr, port: u16, payload: Vec<u8> },
    Other,
}

/// A UDP packet that came out of the overlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdpPacket {
    /// Overlay source.
    pub from: IpAddr,
    /// Overlay destination.
    pub to: IpAddr,
    /// Destination port.
    pub port: u16,
    /// Payload.
    pub payload: Vec<u8>,
}

pub(super) fn read_udp(packet: &[u8]) -> Option<UdpPacket> {
    let (_, to, _, _) = split(packet)?;
    match read(packet) {
        Contents::Udp { from, port, payload } => Some(UdpPacket { from, to, port, payload }),
        _ => None,
    }
}

pub(super) fn echo(from: IpAddr, to: IpAddr, reply: bool, identifier: u16, sequence: u16) -> Vec<u8> {
    let (kind, protocol) = match (from, reply) {
        (IpAddr::V4(_), false) => (8, ICMP),
        (IpAddr::V4(_), true) => (0, ICMP),
        (IpAddr::V6(_), false) => (128, ICMPV6),
        (IpAddr::V6(_), true) => (129, ICMPV6),
    };
    let mut body = vec![kind, 0, 0, 0];
    body.extend(identifier.to_be_bytes());
    body.extend(sequence.to_be_bytes());
    body.extend(b"simulated ping..");
    let pseudo = if protocol == ICMPV6 { pseudo_header(from, to, protocol, body.len()) } else { Vec::new() };
    let sum = checksum(&[&pseudo, &body]);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    ip(from, to, protocol, &body)
}

pub(super) fn udp(from: IpAddr, to: IpAddr, from_port: u16, to_port: u16, payload: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(8 + payload.len());
    body.extend(from_port.to_be_bytes());
    body.extend(to_port.to_be_bytes());
    body.extend(length(8 + payload.len()).to_be_bytes());
    body.extend([0, 0]);
    body.extend(payload);
    let sum = checksum(&[&pseudo_header(from, to, UDP, body.len()), &body]);
    body[6..8].copy_from_slice(&sum.to_be_bytes());
    ip(from, to, UDP, &body)
}

pub(super) fn read(packet: &[u8]) -> Contents {
    let Some((from, to, protocol, body)) = split(packet) else { return Contents::Other };
    let number = |at: usize| body.get(at..at + 2).map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    match (protocol, body.first()) {
        (ICMP, Some(8)) | (ICMPV6, Some(128)) => {
            Contents::EchoRequest { from, to, identifier: number(4), sequence: number(6) }
        }
        (ICMP, Some(0)) | (ICMPV6, Some(129)) => Contents::EchoReply { identifier: number(4), sequence: number(6) },
        (UDP, _) if body.len() >= 8 => Contents::Udp { from, port: number(2), payload: body[8..].to_vec() },
        _ => Contents::Other,
    }
}

fn split(packet: &[u8]) -> Option<(IpAddr, IpAddr, u8, &[u8])> {
    match packet.first()? >> 4 {
        4 => {
            let v4 = |at: usize| packet.get(at..at + 4)?.try_into().ok().map(|octets: [u8; 4]| IpAddr::from(octets));
            Some((v4(12)?, v4(16)?, *packet.get(9)?, packet.get(20..)?))
        }
        6 => {
            let v6 = |at: usize| packet.get(at..at + 16)?.try_into().ok().map(|octets: [u8; 16]| IpAddr::from(octets));
            Some((v6(8)?, v6(24)?, *packet.get(6)?, packet.get(40..)?))
        }
        _ => None,
    }
}

fn ip(from: IpAddr, to: IpAddr, protocol: u8, body: &[u8]) -> Vec<u8> {
    let mut packet = Vec::new();
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            packet.extend([0x45, 0]);
            packet.extend(length(20 + body.len()).to_be_bytes());
            packet.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            let sum = checksum(&[&packet]);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            packet.extend([0x60, 0, 0, 0]);
            packet.extend(length(body.len()).to_be_bytes());
            packet.extend([protocol, 64]);
            packet.extend(from.octets());
            packet.extend(to.octets());
        }
        _ => panic!("addresses of two families in one packet: {from}, {to}"),
    }
    packet.extend(body);
    packet
}

fn pseudo_header(from: IpAddr, to: IpAddr, protocol: u8, body: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for address in [from, to] {
        match address {
            IpAddr::V4(v4) => bytes.extend(v4.octets()),
            IpAddr::V6(v6) => bytes.extend(v6.octets()),
        }
    }
    bytes.extend([0, 0]);
    bytes.extend(length(body).to_be_bytes());
    bytes.extend([0, 0, 0, protocol]);
    bytes
}

/// Internet checksum; every part but the last has an even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 = words.map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn length(bytes: usize) -> u16 {
    u16::try_from(bytes).expect("simulated packets are short")
}

const ICMP: u8 = 1;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_read_as_they_were_built() {
        for (from, to) in [("10.42.0.1", "10.42.0.2"), ("fd00::1", "fd00::2")] {
            let (from, to): (IpAddr, IpAddr) = (from.parse().unwrap(), to.parse().unwrap());
            let request = Contents::EchoRequest { from, to, identifier: 7, sequence: 9 };
            assert_eq!(read(&echo(from, to, false, 7, 9)), request);
            assert_eq!(read(&echo(from, to, true, 7, 9)), Contents::EchoReply { identifier: 7, sequence: 9 });
            let udp = udp(from, to, 1, 53, b"hello");
            assert_eq!(read(&udp), Contents::Udp { from, port: 53, payload: b"hello".to_vec() });
        }
    }
}
