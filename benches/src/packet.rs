//! Overlay packets from the first host to the second.

use nebula_core::forward::{Offload, Segment, SegmentKind};

const A: [u8; 4] = [10, 0, 0, 1];
const B: [u8; 4] = [10, 0, 0, 2];
/// Length of the IPv4 and TCP headers with the timestamp option, which every current TCP stack sends.
const TCP_HEADER: usize = 52;
const ACK: u8 = 0x10;

/// The fields of a TCP stream that matter for joining segments.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    pub port: u16,
    pub sequence: u32,
    pub acknowledgement: u32,
}

/// A super-packet of `count` segments of `size` bytes, and how it must be split.
#[must_use]
pub fn tcp_super_packet(stream: Stream, size: u16, count: usize) -> (Vec<u8>, Offload) {
    let packet = tcp(stream, usize::from(size) * count);
    let segment = (count > 1).then_some(Segment { kind: SegmentKind::Tcp, size });
    (packet, Offload { segment, checksum: Some((20, 16)) })
}

/// A segment without payload.
#[must_use]
pub fn tcp_acknowledgement(stream: Stream) -> Vec<u8> {
    tcp(stream, 0)
}

fn tcp(stream: Stream, payload: usize) -> Vec<u8> {
    let mut packet = ipv4(6, TCP_HEADER + payload);
    let tcp = &mut packet[20..];
    tcp[..2].copy_from_slice(&stream.port.to_be_bytes());
    tcp[2..4].copy_from_slice(&5201_u16.to_be_bytes());
    tcp[4..8].copy_from_slice(&stream.sequence.to_be_bytes());
    tcp[8..12].copy_from_slice(&stream.acknowledgement.to_be_bytes());
    (tcp[12], tcp[13]) = (8 << 4, ACK);
    tcp[20..24].copy_from_slice(&[1, 1, 8, 10]);
    packet
}

/// A UDP datagram with `payload` bytes.
#[must_use]
pub fn udp(from: u16, to: u16, payload: usize) -> Vec<u8> {
    let mut packet = ipv4(17, 28 + payload);
    packet[20..22].copy_from_slice(&from.to_be_bytes());
    packet[22..24].copy_from_slice(&to.to_be_bytes());
    packet[24..26].copy_from_slice(&length(8 + payload).to_be_bytes());
    packet
}

/// Gives a packet another source and destination. A datagram without a checksum gets one, though not the right one.
pub fn readdress(packet: &mut [u8], source: [u8; 4], destination: [u8; 4]) {
    packet[12..16].copy_from_slice(&source);
    packet[16..20].copy_from_slice(&destination);
    packet[10..12].fill(0);
    let mut sum: u32 = packet[..20].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    sum = (sum & 0xffff) + (sum >> 16);
    packet[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    if packet[9] == 17 {
        packet[26..28].copy_from_slice(&[0x12, 0x34]);
    }
}

fn ipv4(protocol: u8, len: usize) -> Vec<u8> {
    const DONT_FRAGMENT: u8 = 0x40;
    let mut packet = vec![0; len];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&length(len).to_be_bytes());
    (packet[6], packet[8], packet[9]) = (DONT_FRAGMENT, 64, protocol);
    packet[12..16].copy_from_slice(&A);
    packet[16..20].copy_from_slice(&B);
    let mut sum: u32 = packet[..20].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    sum = (sum & 0xffff) + (sum >> 16);
    packet[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    packet
}

fn length(bytes: usize) -> u16 {
    u16::try_from(bytes).expect("a packet has at most 64 KiB")
}
