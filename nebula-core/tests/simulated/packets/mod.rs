//! Overlay packets for scenarios, built field by field and independently of the library.
#![allow(dead_code, unreachable_pub, reason = "each scenario file uses its part")]

use std::net::IpAddr;

pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMPV6: u8 = 58;

pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;

/// Internet checksum.
pub fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// An IP packet; `fragment` is the IPv4 flags-and-offset field.
pub fn ip_fragment(from: IpAddr, to: IpAddr, protocol: u8, fragment: u16, body: &[u8]) -> Vec<u8> {
    let mut packet = Vec::new();
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            packet.extend([0x45, 0]);
            packet.extend((20 + body.len() as u16).to_be_bytes());
            packet.extend([0, 1]);
            packet.extend(fragment.to_be_bytes());
            packet.extend([64, protocol, 0, 0]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            let sum = checksum(&packet).to_be_bytes();
            packet[10..12].copy_from_slice(&sum);
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            packet.extend([0x60, 0, 0, 0]);
            packet.extend((body.len() as u16).to_be_bytes());
            packet.extend([protocol, 64]);
            packet.extend(from.octets());
            packet.extend(to.octets());
        }
        _ => panic!("addresses of two families in one packet: {from}, {to}"),
    }
    packet.extend(body);
    packet
}

pub fn ip(from: IpAddr, to: IpAddr, protocol: u8, body: &[u8]) -> Vec<u8> {
    ip_fragment(from, to, protocol, 0, body)
}

pub fn tcp_segment(ports: (u16, u16), flags: u8, numbers: (u32, u32), payload: &[u8]) -> Vec<u8> {
    let mut segment = Vec::new();
    segment.extend(ports.0.to_be_bytes());
    segment.extend(ports.1.to_be_bytes());
    segment.extend(numbers.0.to_be_bytes());
    segment.extend(numbers.1.to_be_bytes());
    segment.extend([0x50, flags, 3, 232, 0, 0, 0, 0]);
    segment.extend(payload);
    segment
}

pub fn udp_datagram(ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let mut datagram = Vec::new();
    datagram.extend(ports.0.to_be_bytes());
    datagram.extend(ports.1.to_be_bytes());
    datagram.extend((8 + payload.len() as u16).to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(payload);
    datagram
}

pub fn tcp(from: IpAddr, to: IpAddr, ports: (u16, u16), flags: u8) -> Vec<u8> {
    ip(from, to, TCP, &tcp_segment(ports, flags, (1000, 0), &[]))
}

pub fn udp(from: IpAddr, to: IpAddr, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    ip(from, to, UDP, &udp_datagram(ports, payload))
}

/// An ICMP or ICMPv6 message; `rest` are the four bytes after its checksum.
pub fn icmp(from: IpAddr, to: IpAddr, kind: u8, code: u8, rest: [u8; 4], body: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0];
    message.extend(rest);
    message.extend(body);
    ip(from, to, if from.is_ipv4() { ICMP } else { ICMPV6 }, &message)
}

/// Source, destination, protocol and body.
pub fn read(packet: &[u8]) -> (IpAddr, IpAddr, u8, &[u8]) {
    let v4 = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&packet[at..at + 4]).expect("enough bytes"));
    let v6 = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&packet[at..at + 16]).expect("enough bytes"));
    match packet[0] >> 4 {
        4 => (v4(12), v4(16), packet[9], &packet[20..]),
        _ => (v6(8), v6(24), packet[6], &packet[40..]),
    }
}
