//! The answer to a packet that is not sent: a TCP reset or an ICMP error, as its destination or a router would send it.

use std::net::IpAddr;

use super::checksum::{self, Sum};
use crate::wire::icmp;
use crate::wire::ip::{Packet, protocol};

/// What an ICMP error says. A reset says the same for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meaning {
    /// An administrator forbids it.
    Prohibited,
    /// Nobody listens there.
    PortClosed,
}

/// Builds the answer to `packet`. Returns `None` if it is truncated or must never be answered (ICMP errors, TCP resets,
/// later fragments, packets from or to more than one host).
pub(super) fn answer(packet: &[u8], parsed: &Packet, meaning: Meaning) -> Option<Vec<u8>> {
    if !has_answer(packet, parsed) {
        return None;
    }
    let v6 = packet.first()? >> 4 == 6;
    let codes = match meaning {
        Meaning::Prohibited => [[3, 13], [1, 1]],
        Meaning::PortClosed => [[3, 3], [1, 4]],
    };
    match (parsed.flow.protocol, v6) {
        (protocol::TCP, _) => Some(ip(packet, protocol::TCP, &reset(packet, parsed)?)),
        (_, false) => {
            let quoted = packet.get(..packet.len().min(parsed.transport_offset + 8))?;
            Some(ip(packet, protocol::ICMP, &error(codes[0], quoted)))
        }
        (_, true) => {
            let quoted = packet.get(..packet.len().min(MAX_QUOTED_V6))?;
            Some(ip(packet, protocol::ICMPV6, &error(codes[1], quoted)))
        }
    }
}

/// Builds the answer to a packet that is larger than the `mtu` of the path (RFC 1191, RFC 8201). Returns `None` if it
/// must never be answered, or if its sender could not send less.
pub(super) fn too_big(packet: &[u8], parsed: &Packet, mtu: u16) -> Option<Vec<u8>> {
    if !has_answer(packet, parsed) {
        return None;
    }
    if packet.first()? >> 4 == 6 {
        // A sender ignores less.
        let mtu = mtu.max(MIN_MTU_V6);
        let quoted = packet.get(..packet.len().min(MAX_QUOTED_V6)).filter(|_| packet.len() > mtu.into())?;
        let mut body = error([2, 0], quoted);
        body[6..8].copy_from_slice(&mtu.to_be_bytes());
        Some(ip(packet, protocol::ICMPV6, &body))
    } else {
        let mut body = error([3, 4], packet.get(..packet.len().min(parsed.transport_offset + 8))?);
        body[6..8].copy_from_slice(&mtu.to_be_bytes());
        Some(ip(packet, protocol::ICMP, &body))
    }
}

/// Whether a packet may be answered at all.
fn has_answer(packet: &[u8], parsed: &Packet) -> bool {
    let flow = &parsed.flow;
    !(flow.fragment || is_for_many(flow.local) || is_for_many(flow.remote) || icmp::is_error(packet, parsed))
}

/// Whether an address is not that of one host.
pub(super) fn is_for_many(address: IpAddr) -> bool {
    let is_limited_broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    address.is_multicast() || address.is_unspecified() || is_limited_broadcast
}

/// A TCP header that ends the connection (RFC 9293, 3.10.7.1).
fn reset(packet: &[u8], parsed: &Packet) -> Option<Vec<u8>> {
    const FIN: u8 = 1;
    const SYN: u8 = 2;
    const RST: u8 = 4;
    const ACK: u8 = 16;
    let transport = packet.get(parsed.transport_offset..)?;
    let [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, offset, flags, ..] = *transport.first_chunk::<20>()?;
    if flags & RST != 0 {
        return None;
    }
    let (sequence, acknowledged, flags) = if flags & ACK == 0 {
        let payload = transport.len().saturating_sub(usize::from(offset >> 4) * 4);
        let taken = payload as u32 + u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        ([0; 4], u32::from_be_bytes([q0, q1, q2, q3]).wrapping_add(taken).to_be_bytes(), RST | ACK)
    } else {
        ([a0, a1, a2, a3], [0; 4], RST)
    };
    let mut header = vec![d0, d1, s0, s1];
    header.extend(sequence);
    header.extend(acknowledged);
    header.extend([5 << 4, flags, 0, 0, 0, 0, 0, 0]);
    Some(header)
}

/// An ICMP error with a zero checksum: type and code, then the quoted packet.
fn error([kind, code]: [u8; 2], quoted: &[u8]) -> Vec<u8> {
    let mut body = vec![kind, code, 0, 0, 0, 0, 0, 0];
    body.extend_from_slice(quoted);
    body
}

/// Wraps `body`, with its checksum filled in, in a packet back to the source of `packet`.
fn ip(packet: &[u8], protocol: u8, body: &[u8]) -> Vec<u8> {
    let v6 = packet[0] >> 4 == 6;
    let mut answer = Vec::with_capacity(40 + body.len());
    let addresses = if v6 {
        answer.extend([0x60, 0, 0, 0]);
        answer.extend((body.len() as u16).to_be_bytes());
        answer.extend([protocol, TTL]);
        answer.extend_from_slice(&packet[24..40]);
        answer.extend_from_slice(&packet[8..24]);
        8..40
    } else {
        answer.extend([0x45, 0]);
        answer.extend((20 + body.len() as u16).to_be_bytes());
        answer.extend([0, 0, 0, 0, TTL, protocol, 0, 0]);
        answer.extend_from_slice(&packet[16..20]);
        answer.extend_from_slice(&packet[12..16]);
        checksum::finish_ipv4_header(&mut answer);
        12..20
    };
    let start = answer.len();
    answer.extend_from_slice(body);
    let sum = if protocol == protocol::ICMP {
        Sum::default()
    } else {
        Sum::default().add_pseudo_header(&answer[addresses], protocol, body.len())
    };
    let at = start + if protocol == protocol::TCP { 16 } else { 2 };
    let sum = sum.add(body).complement();
    answer[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    answer
}

const TTL: u8 = 64;
/// What every link that carries IPv6 carries.
pub(super) const MIN_MTU_V6: u16 = 1280;
/// Keeps the answer below the IPv6 minimum MTU of 1280 bytes.
const MAX_QUOTED_V6: usize = 1000;
/// Maximum number of answers in one turn of a lane, so that a flood of refused packets does not cause a flood of
/// answers.
pub(super) const MAX_ANSWERS: usize = 128;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    /// An IPv4 packet from 10.99.0.1 to 10.99.0.2.
    fn v4(protocol: u8, body: &str) -> Vec<u8> {
        let body = bytes(body);
        let mut packet = bytes("4500000000010000400000000a6300010a630002");
        packet[2..4].copy_from_slice(&(20 + body.len() as u16).to_be_bytes());
        packet[9] = protocol;
        checksum::finish_ipv4_header(&mut packet);
        packet.extend(body);
        packet
    }

    fn v6(protocol: u8, body: &str) -> Vec<u8> {
        let body = bytes(body);
        let mut packet = bytes("6000000000000040fd990000000000000000000000000001fd990000000000000000000000000002");
        packet[4..6].copy_from_slice(&(body.len() as u16).to_be_bytes());
        packet[6] = protocol;
        packet.extend(body);
        packet
    }

    fn answered(packet: &[u8]) -> Option<Vec<u8>> {
        answer(packet, &Packet::inbound(packet).unwrap(), Meaning::Prohibited)
    }

    #[test]
    fn answers_are_those_of_go_1_11_byte_for_byte() {
        let tcp =
            |flags: &str, ack: &str, payload: &str| format!("0fa00050000003e8{ack}50{flags}03e800000000{payload}");
        let payload = "78".repeat(100);
        for (packet, expected) in [
            (
                v4(6, &tcp("02", "00000000", "")),
                "4500002800000000400666080a6300020a63000100500fa000000000000003e950140000872f0000",
            ),
            (
                v4(6, &tcp("02", "00000000", "68656c6c6f")),
                "4500002800000000400666080a6300020a63000100500fa000000000000003ee50140000872a0000",
            ),
            (
                v4(6, &tcp("18", "00001e61", "616263")),
                "4500002800000000400666080a6300020a63000100500fa000001e6100000000500400006cc70000",
            ),
            (
                v4(6, &tcp("01", "00000000", "")),
                "4500002800000000400666080a6300020a63000100500fa000000000000003e950140000872f0000",
            ),
            (
                v4(17, &format!("13880035006c0000{payload}")),
                "4500003800000000400165fd0a6300020a630001030de8c9000000004500008000010000401165a40a6300010a63000213880035006c0000",
            ),
            (
                v4(47, "00000000000000000000000000000000"),
                "4500003800000000400165fd0a6300020a630001030dfcf2000000004500002400010000402f65e20a6300010a6300020000000000000000",
            ),
            (
                v6(6, &tcp("02", "00000000", "")),
                "6000000000140640fd990000000000000000000000000002fd99000000000000000000000000000100500fa000000000000003e950140000a0c10000",
            ),
            (
                v6(60, &format!("0600010400000000{}", tcp("02", "00000000", ""))),
                "6000000000140640fd990000000000000000000000000002fd99000000000000000000000000000100500fa000000000000003e950140000a0c10000",
            ),
        ] {
            let expected = bytes(expected);
            assert_eq!(answered(&packet).unwrap(), expected, "{packet:02x?}");
        }
        let long = v6(17, &format!("1388003504860000{}", "78".repeat(1150)));
        let expected =
            bytes("6000000003f03a40fd990000000000000000000000000002fd9900000000000000000000000000010101765d00000000");
        let answer = answered(&long).unwrap();
        assert_eq!(answer[..48], expected);
        assert_eq!(answer[48..], long[..1000]);
    }

    #[test]
    fn a_cut_tcp_header_has_no_answer() {
        let packet = v4(6, "0fa00050000003e8000000005002");
        assert_eq!(answered(&packet), None);
    }

    #[test]
    fn packets_from_or_to_more_than_one_host_have_no_answer() {
        let mut packet = v4(17, "1388003500080000");
        assert!(answered(&packet).is_some());
        for address in [[224, 0, 0, 1], [255, 255, 255, 255], [0, 0, 0, 0]] {
            for at in [12, 16] {
                let mut packet = packet.clone();
                packet[at..at + 4].copy_from_slice(&address);
                assert_eq!(answered(&packet), None, "{address:?} at {at}");
            }
        }
        packet = v6(17, "1388003500080000");
        packet[24] = 0xff;
        assert_eq!(answered(&packet), None);
    }

    proptest! {
        #[test]
        fn any_packet_has_a_short_answer_that_is_never_answered(
            first in prop_oneof![Just(0x45_u8), Just(0x4f), Just(0x60)],
            protocol in prop_oneof![Just(1_u8), Just(6), Just(17), Just(44), Just(58), Just(60), any::<u8>()],
            mut bytes in proptest::collection::vec(any::<u8>(), 20..1500),
            meaning in prop_oneof![Just(Meaning::Prohibited), Just(Meaning::PortClosed)],
        ) {
            bytes[0] = first;
            bytes[if first == 0x60 { 6 } else { 9 }] = protocol;
            let parsed = Packet::inbound(&bytes);
            if let Some(reply) = parsed.ok().and_then(|parsed| answer(&bytes, &parsed, meaning)) {
                prop_assert!(reply.len() <= 48 + MAX_QUOTED_V6);
                let parsed = Packet::inbound(&reply).unwrap();
                prop_assert_eq!(answer(&reply, &parsed, meaning), None);
                let swapped = if first == 0x60 { (8..24, 24..40) } else { (12..16, 16..20) };
                prop_assert_eq!(&reply[swapped.0.clone()], &bytes[swapped.1.clone()]);
                prop_assert_eq!(&reply[swapped.1], &bytes[swapped.0]);
            }
        }
    }
}
