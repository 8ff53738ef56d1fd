//! Gives a packet other addresses and ports, and corrects its checksums by the difference (RFC 1624).

use std::net::IpAddr;
use std::ops::Range;

use super::checksum::Sum;
use super::{Offload, crc32c};
use crate::DropReason;
use crate::capture::{Change, Rewrite, Translation};
use crate::wire::ip::{self, Packet, protocol};

/// Rewrites a packet in place. Its lengths, and so everything that depends on them, stay as they are.
///
/// # Errors
/// Returns [`DropReason::BadPacket`], without a change to the packet, if its checksum is in another fragment, or if its
/// headers depend on its addresses in ways that cannot be corrected (source routes, authentication).
#[inline(always)]
pub(super) fn rewrite(
    packet: &mut [u8],
    parsed: &Packet,
    offload: Offload,
    rewrite: &Rewrite,
) -> Result<(), DropReason> {
    let at = parsed.transport_offset;
    let has_options = at != if rewrite.source.0.is_ipv4() { 20 } else { 40 };
    if has_options && ip::depends_on_addresses(packet) {
        return Err(DropReason::BadPacket);
    }
    // A later fragment has neither ports nor a checksum.
    if !parsed.flow.fragment {
        let is_partial = |offset| offload.checksum.is_some_and(|(start, of)| usize::from(start) == at && of == offset);
        let transport = packet.get_mut(at..).ok_or(DropReason::BadPacket)?;
        match parsed.flow.protocol {
            protocol::TCP => {
                let [ports @ .., high, low] = transport.first_chunk_mut::<18>().ok_or(DropReason::BadPacket)?;
                write_ports(ports, rewrite);
                correct([high, low], is_partial(16), false, rewrite.change);
            }
            protocol::UDP => {
                let [ports @ .., high, low] = transport.first_chunk_mut::<8>().ok_or(DropReason::BadPacket)?;
                write_ports(ports, rewrite);
                correct([high, low], is_partial(6), true, rewrite.change);
            }
            protocol::SCTP => rewrite_sctp(packet, parsed, rewrite)?,
            _ => return Err(DropReason::BadPacket),
        }
    }
    write_addresses(packet, rewrite)
}

/// Rewrites the ports of an SCTP packet. Its checksum does not cover the addresses.
#[cold]
fn rewrite_sctp(packet: &mut [u8], parsed: &Packet, rewrite: &Rewrite) -> Result<(), DropReason> {
    // The change of the checksum depends on the length of the whole packet, which a fragment does not tell.
    let end = ip::length(packet).filter(|_| !parsed.fragmented).ok_or(DropReason::BadPacket)?;
    let transport = packet.get_mut(parsed.transport_offset..end).ok_or(DropReason::BadPacket)?;
    let len = transport.len();
    let [ports @ .., a, b, c, d] = transport.first_chunk_mut::<12>().ok_or(DropReason::BadPacket)?;
    let first_four = |ports: &[u8; 8]| u32::from_le_bytes([ports[0], ports[1], ports[2], ports[3]]);
    let before = first_four(ports);
    write_ports(ports, rewrite);
    let sum = u32::from_le_bytes([*a, *b, *c, *d]);
    // 0 may stand for no checksum, where both ends protect packets otherwise (RFC 9653).
    if sum != 0 {
        [*a, *b, *c, *d] = (sum ^ crc32c::change(before ^ first_four(ports), len)).to_le_bytes();
    }
    Ok(())
}

/// Rewrites the packet that an ICMP error quotes, and the end of the error that is the same as in the quoted packet.
///
/// # Errors
/// Returns [`DropReason::BadPacket`] if the error is not one that quotes a whole header.
pub(super) fn rewrite_quoted(
    packet: &mut [u8],
    error: &Packet,
    translation: &Translation,
    out: bool,
) -> Result<(), DropReason> {
    let body = error.transport_offset;
    let quoted = packet.get(body + 8..).ok_or(DropReason::BadPacket)?;
    let parsed = if out { Packet::inbound(quoted)? } else { Packet::outbound(quoted)? };
    // The quoted packet went the other way.
    let inner = if out { turned(&translation.out()) } else { turned(&translation.back()) };
    let (source, destination) = (inner.destination, inner.source);
    let field = match parsed.flow.protocol {
        // Nobody checks the quoted checksum, and little of the packet is there.
        protocol::SCTP => None,
        _ => Some(checksum_field(&parsed).ok_or(DropReason::BadPacket)?),
    };
    let before = Sum::default().add(&packet[body..]).partial();
    let quoted = &mut packet[body + 8..];
    write_addresses(quoted, &inner)?;
    if !parsed.flow.fragment {
        write_ports(&mut quoted[parsed.transport_offset..], &inner);
        // Most errors quote no more than the ports.
        if let Some([high, low]) = field.and_then(|field| quoted.get_mut(field)) {
            correct([high, low], false, parsed.flow.protocol == protocol::UDP, inner.change);
        }
    }
    let after = Sum::default().add(&packet[body..]).partial();
    let mut change = add(after, !before);
    // Another host on the path may have sent the error: then its address stays.
    let (flow, wire) = (&error.flow, &translation.wire);
    let is_from_peer = out || flow.remote == wire.remote;
    if is_from_peer {
        let outer = Rewrite { source, destination, change: inner.change };
        write_addresses(packet, &outer)?;
        if flow.protocol == protocol::ICMPV6 {
            change = add(change, outer.change.addresses);
        }
    }
    let field = body + 2..body + 4;
    let sum = correct_word(read(packet, &field), change);
    write(packet, &field, sum);
    Ok(())
}

fn turned(rewrite: &Rewrite) -> Rewrite {
    Rewrite { source: rewrite.destination, destination: rewrite.source, change: rewrite.change }
}

#[inline]
fn checksum_field(parsed: &Packet) -> Option<Range<usize>> {
    let offset = match parsed.flow.protocol {
        protocol::TCP => 16,
        protocol::UDP => 6,
        _ => return None,
    };
    let at = parsed.transport_offset + offset;
    Some(at..at + 2)
}

#[inline]
fn write_addresses(packet: &mut [u8], rewrite: &Rewrite) -> Result<(), DropReason> {
    match (rewrite.source.0, rewrite.destination.0) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let header = packet.first_chunk_mut::<20>().ok_or(DropReason::BadPacket)?;
            header[12..16].copy_from_slice(&source.octets());
            header[16..20].copy_from_slice(&destination.octets());
            let sum = correct_word(u16::from_be_bytes([header[10], header[11]]), rewrite.change.addresses);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let header = packet.first_chunk_mut::<40>().ok_or(DropReason::BadPacket)?;
            header[8..24].copy_from_slice(&source.octets());
            header[24..40].copy_from_slice(&destination.octets());
        }
        _ => return Err(DropReason::BadPacket),
    }
    Ok(())
}

/// The ports lie inside the packet, since it was parsed with them.
#[inline]
fn write_ports(transport: &mut [u8], rewrite: &Rewrite) {
    transport[..2].copy_from_slice(&rewrite.source.1.to_be_bytes());
    transport[2..4].copy_from_slice(&rewrite.destination.1.to_be_bytes());
}

/// Corrects a transport checksum.
#[inline]
fn correct([high, low]: [&mut u8; 2], is_partial: bool, is_udp: bool, change: Change) {
    let old = u16::from_be_bytes([*high, *low]);
    let new = if is_partial {
        // It holds the sum of the pseudo-header, which has no ports in it, and is not a complement.
        add(old, change.addresses)
    } else if is_udp && old == 0 {
        // A datagram without a checksum keeps none.
        return;
    } else {
        match correct_word(old, change.all) {
            0 if is_udp => 0xffff,
            sum => sum,
        }
    };
    [*high, *low] = new.to_be_bytes();
}

#[inline]
fn read(packet: &[u8], field: &Range<usize>) -> u16 {
    u16::from_be_bytes([packet[field.start], packet[field.start + 1]])
}

#[inline]
fn write(packet: &mut [u8], field: &Range<usize>, value: u16) {
    packet[field.clone()].copy_from_slice(&value.to_be_bytes());
}

/// A complete checksum after what it covers has changed by this much.
#[inline]
pub(super) fn correct_word(checksum: u16, change: u16) -> u16 {
    !add(!checksum, change)
}

/// Addition in ones' complement.
#[inline]
pub(super) fn add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u16::from(carry)
}

#[cfg(test)]
#[path = "rewrite_tests.rs"]
mod tests;
