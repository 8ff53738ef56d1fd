//! Recognises ICMP errors and parses the packets they quote.

use super::ip::{FlowKey, Packet, protocol};

/// Whether a packet is an ICMP or ICMPv6 error: it must never be answered, and it belongs to the flow of the packet
/// that it quotes.
#[must_use]
pub(crate) fn is_error(packet: &[u8], parsed: &Packet) -> bool {
    let flow = &parsed.flow;
    let Some(&kind) = packet.get(parsed.transport_offset) else { return false };
    match flow.protocol {
        _ if flow.fragment => false,
        protocol::ICMP => matches!(kind, UNREACHABLE | SOURCE_QUENCH | REDIRECT | TIME_EXCEEDED | PARAMETER_PROBLEM),
        protocol::ICMPV6 => (1..=4).contains(&kind),
        _ => false,
    }
}

/// The flow that an error from a peer is about: this node sent the quoted packet.
#[must_use]
pub(crate) fn quoted_outbound(packet: &[u8], error: &Packet) -> Option<FlowKey> {
    let quoted = Packet::outbound(quoted(packet, error)?).ok()?;
    (quoted.flow.local == error.flow.local).then_some(quoted.flow)
}

/// The flow that an error to a peer is about: the peer sent the quoted packet.
#[must_use]
pub(crate) fn quoted_inbound(packet: &[u8], error: &Packet) -> Option<FlowKey> {
    let quoted = Packet::inbound(quoted(packet, error)?).ok()?;
    (quoted.flow.remote == error.flow.remote).then_some(quoted.flow)
}

/// The part of the original packet that an error quotes. A redirect changes routes, so it never counts as related to a
/// flow.
fn quoted<'a>(packet: &'a [u8], error: &Packet) -> Option<&'a [u8]> {
    let body = packet.get(error.transport_offset..)?;
    let is_redirect = error.flow.protocol == protocol::ICMP && *body.first()? == REDIRECT;
    let quoted = body.get(8..)?;
    let same_family = quoted.first()? >> 4 == packet.first()? >> 4;
    (same_family && !is_redirect && !error.fragmented).then_some(quoted)
}

const UNREACHABLE: u8 = 3;
const SOURCE_QUENCH: u8 = 4;
const REDIRECT: u8 = 5;
const TIME_EXCEEDED: u8 = 11;
const PARAMETER_PROBLEM: u8 = 12;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn v4(protocol: u8, body: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1];
        packet.extend_from_slice(body);
        packet
    }

    #[test]
    fn errors_are_told_from_other_messages_by_their_type() {
        let has_type = |protocol, kind| {
            let packet = v4(protocol, &[kind, 0, 0, 0, 0, 0, 0, 0]);
            is_error(&packet, &Packet::inbound(&packet).unwrap())
        };
        let of = |protocol| (0..=255).filter(|kind| has_type(protocol, *kind)).collect::<Vec<u8>>();
        assert_eq!(of(protocol::ICMP), [3, 4, 5, 11, 12]);
        assert_eq!(of(protocol::ICMPV6), [1, 2, 3, 4]);
        assert!(of(protocol::TCP).is_empty());
        let mut fragment = v4(protocol::ICMP, &[3; 16]);
        fragment[7] = 1;
        assert!(!is_error(&fragment, &Packet::inbound(&fragment).unwrap()), "its first byte is data");
    }

    #[test]
    fn the_flow_is_that_of_the_quoted_packet_seen_from_its_sender() {
        let mut quoted = v4(protocol::UDP, &[0x13, 0x88, 0, 53, 0, 8, 0, 0]);
        quoted[12..20].rotate_left(4);
        let error = v4(protocol::ICMP, &[&[3, 4, 0, 0, 0, 0, 4, 0], quoted.as_slice()].concat());
        let parsed = Packet::inbound(&error).unwrap();
        let flow = quoted_outbound(&error, &parsed).unwrap();
        assert_eq!((flow.local_port, flow.remote_port, flow.protocol), (5000, 53, 17));
        assert_eq!((flow.local, flow.remote), (parsed.flow.local, parsed.flow.remote));
        assert_eq!(quoted_inbound(&error, &Packet::outbound(&error).unwrap()).map(|flow| flow.local_port), Some(53));
    }

    proptest! {
        #[test]
        fn any_bytes_quote_something_or_nothing(
            first in prop_oneof![Just(0x45_u8), Just(0x60)],
            kind in 0_u8..14,
            mut bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0x45), Just(0x60)], 48..200),
        ) {
            let (at, number, start) = if first == 0x60 { (6, 58, 40) } else { (9, 1, 20) };
            bytes[0] = first;
            bytes[at] = number;
            bytes[start] = kind;
            if let Ok(parsed) = Packet::inbound(&bytes) && is_error(&bytes, &parsed) {
                let flow = quoted_outbound(&bytes, &parsed);
                prop_assert!(flow.is_none_or(|flow| flow.local == parsed.flow.local));
                let flow = quoted_inbound(&bytes, &parsed);
                prop_assert!(flow.is_none_or(|flow| flow.remote == parsed.flow.remote));
            }
        }
    }
}
