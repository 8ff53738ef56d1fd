//! ICMP errors and the packets they are about.

use super::ip::{FlowKey, Packet, protocol};

/// Whether a packet is an ICMP or ICMPv6 error: nothing may be sent in answer to it, and it belongs to the flow of the
/// packet that it quotes.
#[must_use]
pub fn is_error(packet: &[u8], parsed: &Packet) -> bool {
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
pub fn quoted_outbound(packet: &[u8], error: &Packet) -> Option<FlowKey> {
    let quoted = Packet::outbound(quoted(packet, error)?).ok()?;
    (quoted.flow.local == error.flow.local).then_some(quoted.flow)
}

/// The flow that an error to a peer is about: the peer sent the quoted packet.
#[must_use]
pub fn quoted_inbound(packet: &[u8], error: &Packet) -> Option<FlowKey> {
    let quoted = Packet::inbound(quoted(packet, error)?).ok()?;
    (quoted.flow.remote == error.flow.remote).then_some(quoted.flow)
}

/// What an error carries of the packet that it is about. A redirect changes routes, so it is related to nothing.
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
