//! The virtio-net header before each packet of a tun queue, to and from [`Offload`].

use crate::forward::{Offload, Segment, SegmentKind};

/// Length of the header in its oldest form, which every kernel supports.
pub(in crate::io) const LEN: usize = 10;

const FLAG_NEEDS_CHECKSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCP4: u8 = 1;
const GSO_TCP6: u8 = 4;
const GSO_UDP: u8 = 5;
const GSO_ECN: u8 = 0x80;

const TCP_CHECKSUM_OFFSET: u16 = 16;
const UDP_CHECKSUM_OFFSET: u16 = 6;
const TCP_FLAG_CWR: u8 = 0x80;

/// Parses the header that the kernel put before `packet`. `None`: it contradicts the packet or uses something that was
/// not negotiated. The header length in it is ignored: it cannot be trusted on forwarded packets.
pub(in crate::io) fn parse(header: &[u8; LEN], packet: &[u8]) -> Option<Offload> {
    let [flags, gso, _, _, size_0, size_1, start_0, start_1, offset_0, offset_1] = *header;
    let size = u16::from_ne_bytes([size_0, size_1]);
    let start = u16::from_ne_bytes([start_0, start_1]);
    let offset = u16::from_ne_bytes([offset_0, offset_1]);

    let checksum = (flags & FLAG_NEEDS_CHECKSUM != 0).then_some((start, offset));
    if checksum.is_some() && usize::from(start) + usize::from(offset) + 2 > packet.len() {
        return None;
    }
    let kind = match (gso & !GSO_ECN, packet.first()? >> 4) {
        (GSO_NONE, _) => return Some(Offload { segment: None, checksum }),
        (GSO_TCP4, 4) | (GSO_TCP6, 6) => SegmentKind::Tcp,
        (GSO_UDP, 4 | 6) => SegmentKind::Udp,
        _ => return None,
    };
    let transport = packet.get(usize::from(checksum?.0)..)?;
    let header_len = match kind {
        SegmentKind::Tcp if offset == TCP_CHECKSUM_OFFSET => usize::from(transport.get(12)? >> 4) * 4,
        SegmentKind::Udp if offset == UDP_CHECKSUM_OFFSET => 8,
        _ => return None,
    };
    let least = if kind == SegmentKind::Tcp { 20 } else { 8 };
    (size > 0 && header_len >= least && transport.len() > header_len)
        .then_some(Offload { segment: Some(Segment { kind, size }), checksum })
}

/// Builds the header for a packet that begins with `head` (IP and transport header). `None`: the offload contradicts
/// it.
pub(in crate::io) fn build(offload: &Offload, header_len: u16, head: &[u8]) -> Option<[u8; LEN]> {
    let mut header = [0; LEN];
    if let Some((start, offset)) = offload.checksum {
        header[0] = FLAG_NEEDS_CHECKSUM;
        header[6..8].copy_from_slice(&start.to_ne_bytes());
        header[8..10].copy_from_slice(&offset.to_ne_bytes());
    }
    if let Some(segment) = &offload.segment {
        let (start, _) = offload.checksum?;
        header[1] = match (segment.kind, head.first()? >> 4) {
            (SegmentKind::Udp, _) => GSO_UDP,
            (SegmentKind::Tcp, version) => {
                let ecn = head.get(usize::from(start) + 13)? & TCP_FLAG_CWR != 0;
                let gso = if version == 4 { GSO_TCP4 } else { GSO_TCP6 };
                if ecn { gso | GSO_ECN } else { gso }
            }
        };
        header[2..4].copy_from_slice(&header_len.to_ne_bytes());
        header[4..6].copy_from_slice(&segment.size.to_ne_bytes());
    }
    Some(header)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tcp4_packet(payload: usize) -> Vec<u8> {
        let mut packet = vec![0; 40 + payload];
        packet[0] = 0x45;
        packet[32] = 5 << 4;
        packet
    }

    const SUPER: Offload =
        Offload { segment: Some(Segment { kind: SegmentKind::Tcp, size: 1260 }), checksum: Some((20, 16)) };

    #[test]
    fn a_built_header_is_read_back_as_the_same_offload() {
        let packet = tcp4_packet(3000);
        for offload in [SUPER, Offload::default(), Offload { segment: None, checksum: Some((20, 16)) }] {
            let header = build(&offload, 40, &packet[..40]).unwrap();
            assert_eq!(parse(&header, &packet), Some(offload));
        }
        let udp = Offload { segment: Some(Segment { kind: SegmentKind::Udp, size: 1200 }), checksum: Some((20, 6)) };
        assert_eq!(parse(&build(&udp, 28, &packet[..28]).unwrap(), &packet), Some(udp));
    }

    #[test]
    fn a_lying_header_length_is_ignored() {
        let packet = tcp4_packet(3000);
        let mut header = build(&SUPER, 40, &packet).unwrap();
        header[2..4].copy_from_slice(&u16::MAX.to_ne_bytes());
        assert_eq!(parse(&header, &packet), Some(SUPER));
    }

    #[test]
    fn a_header_that_contradicts_its_packet_is_refused() {
        let packet = tcp4_packet(3000);
        let good = build(&SUPER, 40, &packet).unwrap();
        let with = |index: usize, value: u8| {
            let mut header = good;
            header[index] = value;
            header
        };
        assert_eq!(parse(&with(0, 0), &packet), None, "segments without a checksum to finish");
        assert_eq!(parse(&with(1, GSO_TCP6), &packet), None, "IPv6 segments of an IPv4 packet");
        assert_eq!(parse(&with(1, 3), &packet), None, "UDP fragmentation was not negotiated");
        assert_eq!(parse(&with(8, 6), &packet), None, "checksum is not where TCP has it");
        let mut no_size = good;
        no_size[4..6].fill(0);
        assert_eq!(parse(&no_size, &packet), None, "segments of no size");
        assert_eq!(parse(&good, &packet[..40]), None, "nothing to cut");
        assert_eq!(parse(&good, &[]), None, "empty packet");
        let mut short_tcp = packet.clone();
        short_tcp[32] = 4 << 4;
        assert_eq!(parse(&good, &short_tcp), None, "TCP header shorter than it can be");
    }

    #[test]
    fn a_congestion_window_reduced_flag_is_announced() {
        let mut packet = tcp4_packet(3000);
        packet[33] = TCP_FLAG_CWR;
        let header = build(&SUPER, 40, &packet).unwrap();
        assert_eq!(header[1], GSO_TCP4 | GSO_ECN);
        assert_eq!(parse(&header, &packet), Some(SUPER));
    }

    proptest! {
        #[test]
        fn no_header_makes_the_parser_point_outside_the_packet(header: [u8; LEN], packet: Vec<u8>) {
            if let Some(offload) = parse(&header, &packet)
                && let Some((start, offset)) = offload.checksum
            {
                prop_assert!(usize::from(start) + usize::from(offset) + 2 <= packet.len());
            }
        }
    }
}
