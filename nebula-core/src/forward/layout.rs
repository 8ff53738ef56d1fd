//! Header offsets of a TCP or UDP packet, and the fields that segmentation and coalescing rewrite.

use super::SegmentKind;
use super::checksum::{self, Sum};
use crate::wire::ip::{Packet, protocol};

pub(super) const TCP_FIN: u8 = 0x01;
pub(super) const TCP_PSH: u8 = 0x08;
pub(super) const TCP_CWR: u8 = 0x80;

/// Offsets within one packet; all lie inside the packet they were derived from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) kind: SegmentKind,
    pub(super) v6: bool,
    /// Start of the transport header.
    pub(super) transport: usize,
    /// Length of IP and transport header together.
    pub(super) header: usize,
}

impl Layout {
    /// Returns `None` for a fragment, a truncated header, or a protocol other than TCP and UDP.
    pub(super) fn of(packet: &[u8], parsed: &Packet) -> Option<Self> {
        if parsed.fragmented {
            return None;
        }
        let transport = parsed.transport_offset;
        let (kind, len) = match parsed.flow.protocol {
            protocol::TCP => (SegmentKind::Tcp, usize::from(packet.get(transport + 12)? >> 4) * 4),
            protocol::UDP => (SegmentKind::Udp, 8),
            _ => return None,
        };
        let least = if kind == SegmentKind::Tcp { 20 } else { 8 };
        let header = transport + len;
        let v6 = packet.first()? >> 4 == 6;
        (len >= least && header <= packet.len()).then_some(Self { kind, v6, transport, header })
    }

    /// Neither IPv4 options nor IPv6 extension headers.
    pub(super) fn is_plain(&self) -> bool {
        self.transport == if self.v6 { 40 } else { 20 }
    }

    /// Offset of the checksum field from the start of the transport header.
    pub(super) fn checksum_offset(&self) -> usize {
        match self.kind {
            SegmentKind::Tcp => 16,
            SegmentKind::Udp => 6,
        }
    }

    /// Writes the length fields for a packet of `len` bytes in total, and the IPv4 header checksum.
    pub(super) fn set_lengths(&self, header: &mut [u8], len: usize) {
        if self.v6 {
            header[4..6].copy_from_slice(&((len - 40) as u16).to_be_bytes());
        } else {
            header[2..4].copy_from_slice(&(len as u16).to_be_bytes());
            checksum::finish_ipv4_header(&mut header[..self.transport]);
        }
        if self.kind == SegmentKind::Udp {
            let udp_len = (len - self.transport) as u16;
            header[self.transport + 4..self.transport + 6].copy_from_slice(&udp_len.to_be_bytes());
        }
    }

    /// Sum of the pseudo-header of a packet of `len` bytes in total.
    pub(super) fn pseudo_header(&self, header: &[u8], len: usize) -> Sum {
        let addresses = if self.v6 { &header[8..40] } else { &header[12..20] };
        let number = match self.kind {
            SegmentKind::Tcp => protocol::TCP,
            SegmentKind::Udp => protocol::UDP,
        };
        Sum::default().add_pseudo_header(addresses, number, len - self.transport)
    }

    /// Writes the transport checksum field.
    pub(super) fn set_checksum(&self, header: &mut [u8], value: u16) {
        let field = self.transport + self.checksum_offset();
        header[field..field + 2].copy_from_slice(&value.to_be_bytes());
    }

    /// The TCP flags.
    pub(super) fn tcp_flags<'a>(&self, header: &'a mut [u8]) -> &'a mut u8 {
        &mut header[self.transport + 13]
    }

    /// The TCP sequence number.
    pub(super) fn sequence(&self, header: &[u8]) -> u32 {
        read_u32(header, self.transport + 4)
    }
}

pub(super) fn read_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
