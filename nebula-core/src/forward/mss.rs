//! Lowers the maximum segment size that the ends of a new TCP connection announce (MSS clamping).

use super::Offload;
use super::rewrite::{add, correct_word};
use crate::wire::ip::{Packet, protocol};

/// Lowers the segment size in a SYN to what fits into overlay packets of `limit` bytes. Returns whether it changed the
/// packet; a packet that is no SYN, or announces no segment size, stays as it is.
pub(super) fn clamp(packet: &mut [u8], parsed: &Packet, offload: Offload, limit: u16) -> bool {
    let at = parsed.transport_offset;
    let is_v6 = packet.first().is_some_and(|first| first >> 4 == 6);
    // Ends subtract their own options from the size that is announced, so only the fixed headers count (RFC 6691).
    let most = limit.saturating_sub(if is_v6 { 60 } else { 40 }).max(MIN_SEGMENT_SIZE);
    let Some((place, announced)) = announced(packet, parsed).filter(|(_, announced)| *announced > most) else {
        return false;
    };
    let transport = &mut packet[at..];
    transport[place..place + 2].copy_from_slice(&most.to_be_bytes());
    // The rest of a partial checksum is computed over what the packet then contains.
    let is_partial = offload.checksum.is_some_and(|(start, of)| usize::from(start) == at && of == 16);
    if !is_partial {
        // A word at an odd place counts with its bytes swapped.
        let [old, new] = [announced, most].map(|word| if place % 2 == 0 { word } else { word.swap_bytes() });
        let [high, low] = [transport[16], transport[17]];
        let sum = correct_word(u16::from_be_bytes([high, low]), add(!old, new));
        transport[16..18].copy_from_slice(&sum.to_be_bytes());
    }
    true
}

/// Where in the TCP header the segment size is that a SYN announces, and the size; `None` for other packets.
pub(super) fn announced(packet: &[u8], parsed: &Packet) -> Option<(usize, u16)> {
    if parsed.flow.protocol != protocol::TCP || parsed.fragmented {
        return None;
    }
    let transport = packet.get(parsed.transport_offset..)?;
    let fixed = transport.first_chunk::<20>()?;
    if fixed[13] & SYN == 0 {
        return None;
    }
    let end = usize::from(fixed[12] >> 4) * 4;
    let place = 20 + find(transport.get(20..end)?)?;
    Some((place, u16::from_be_bytes([transport[place], transport[place + 1]])))
}

/// Where in the options of a TCP header the value of the maximum segment size is.
fn find(options: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        match options.get(at..)? {
            [END, ..] | [] => return None,
            [PADDING, ..] => at += 1,
            [SEGMENT_SIZE, 4, _, _, ..] => return Some(at + 2),
            [_, length, ..] if *length >= 2 => at += usize::from(*length),
            _ => return None,
        }
    }
}

const SYN: u8 = 2;
const END: u8 = 0;
const PADDING: u8 = 1;
const SEGMENT_SIZE: u8 = 2;
/// What every host accepts (RFC 9293, 3.7.1).
const MIN_SEGMENT_SIZE: u16 = 536;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::SegmentKind;
    use super::super::testing::Spec;
    use super::*;

    fn syn(v6: bool, options: &[u8]) -> Spec {
        Spec { flags: SYN, options: options.to_vec(), ..Spec::new(SegmentKind::Tcp, v6) }
    }

    fn clamped(spec: &Spec, limit: u16) -> Option<Vec<u8>> {
        let mut packet = spec.build();
        let parsed = Packet::outbound(&packet).unwrap();
        clamp(&mut packet, &parsed, Offload::default(), limit).then_some(packet)
    }

    #[test]
    fn a_syn_announces_no_more_than_fits_and_its_checksum_stays_right() {
        for (v6, most) in [(false, 1100), (true, 1080)] {
            // Second place: after padding, at an odd offset.
            for (before, after) in [(vec![], vec![]), (vec![1], vec![4, 2, 1]), (vec![4, 2], vec![1, 0])] {
                let options = |size: u16| [&before[..], &[2, 4], &size.to_be_bytes(), &after[..]].concat();
                let expected = syn(v6, &options(most)).build();
                assert_eq!(clamped(&syn(v6, &options(1260)), 1140).as_ref(), Some(&expected));
                assert_eq!(clamped(&syn(v6, &options(most)), 1140), None, "it is small enough");
            }
        }
    }

    #[test]
    fn a_packet_without_a_segment_size_stays_as_it_is() {
        let good = [2, 4, 5, 0xb4];
        let ack = Spec { flags: 0x10, ..syn(false, &good) };
        assert_eq!(clamped(&ack, 1140), None);
        for options in
            [vec![], vec![1, 1, 1, 1], vec![0, 0, 2, 4], vec![2, 3, 5, 0], vec![3, 1, 0, 0], vec![3, 0, 0, 0]]
        {
            assert_eq!(clamped(&syn(false, &options), 1140), None, "{options:?}");
        }
        assert!(clamped(&syn(false, &good), 1140).is_some());
        assert_eq!(clamped(&syn(false, &[2, 4, 2, 0x18]), 300), None, "536 is always allowed");
    }

    #[test]
    fn a_partial_checksum_is_left_to_who_completes_it() {
        let spec = syn(false, &[2, 4, 5, 0xb4]);
        let (mut packet, offload) = spec.build_super(100);
        let offload = Offload { segment: None, ..offload };
        let before = packet[36..38].to_vec();
        let parsed = Packet::outbound(&packet).unwrap();
        assert!(clamp(&mut packet, &parsed, offload, 1140));
        assert_eq!((&packet[36..38], &packet[42..44]), (&before[..], &1100_u16.to_be_bytes()[..]));
    }

    proptest! {
        #[test]
        fn any_options_are_read_without_a_panic(options in prop::collection::vec(any::<u8>(), 0..40), limit: u16, v6: bool) {
            let options = &options[..options.len() / 4 * 4];
            let spec = syn(v6, options);
            if let Some(packet) = clamped(&spec, limit) {
                let mut whole = packet.clone();
                spec.finish(&mut whole);
                prop_assert_eq!(packet, whole);
            }
        }
    }
}
