//! What is joined, and what is not.

use proptest::prelude::*;

use super::super::segment::Cut;
use super::super::testing::Spec;
use super::*;

/// Runs packets through a coalescer; returns deliveries as (packet, offload).
fn join(packets: &[Vec<u8>]) -> Vec<(Vec<u8>, Offload)> {
    let mut coalescer = Coalescer::default();
    coalescer.set_enabled(true, true);
    let mut buffer = Vec::new();
    let mut ranges = Vec::new();
    for packet in packets {
        // Filler between the packets, as in a real receive buffer.
        buffer.extend_from_slice(&[0xaa; 16]);
        ranges.push(buffer.len()..buffer.len() + packet.len());
        buffer.extend_from_slice(packet);
    }
    for range in ranges {
        let packet = Packet::inbound(&buffer[range.clone()]).unwrap();
        coalescer.push(&buffer, range, &packet);
    }
    let (mut deliveries, mut headers, mut pieces) = (Vec::new(), Vec::new(), Vec::new());
    coalescer.finish(&buffer, &mut deliveries, &mut headers, &mut pieces);
    let whole = |delivery: Delivery| {
        let mut packet = headers[delivery.header].to_vec();
        pieces[delivery.pieces].iter().for_each(|piece| packet.extend_from_slice(&buffer[piece.clone()]));
        assert!(packet.len() <= MAX_LEN);
        (packet, delivery.offload)
    };
    deliveries.into_iter().map(whole).collect()
}

fn lengths(specs: &[Spec]) -> Vec<usize> {
    let packets: Vec<_> = specs.iter().map(Spec::build).collect();
    join(&packets).into_iter().map(|(packet, _)| packet.len()).collect()
}

/// `count` packets of a TCP stream, 100 bytes each.
fn stream(count: u32) -> Vec<Spec> {
    let one = |n: u32| Spec {
        sequence: 5 + n * 100,
        id: n as u16,
        payload: vec![n as u8; 100],
        ..Spec::new(SegmentKind::Tcp, false)
    };
    (0..count).map(one).collect()
}

/// Lengths of the deliveries of a stream of four in which one packet was changed.
fn changed(at: usize, change: impl FnOnce(&mut Spec)) -> Vec<usize> {
    let mut specs = stream(4);
    change(&mut specs[at]);
    lengths(&specs)
}

#[test]
fn a_stream_becomes_one_packet() {
    assert_eq!(lengths(&stream(4)), [440]);
    let joined = join(&stream(4).iter().map(Spec::build).collect::<Vec<_>>());
    let segment = Some(Segment { kind: SegmentKind::Tcp, size: 100 });
    assert_eq!(joined[0].1, Offload { segment, checksum: Some((20, 16)) });
}

#[test]
fn what_cutting_would_not_restore_is_not_joined() {
    assert_eq!(changed(2, |spec| spec.traffic_class = 3), [240, 140, 140], "congestion mark");
    assert_eq!(changed(2, |spec| spec.id = 77), [240, 140, 140], "identifier");
    assert_eq!(changed(2, |spec| spec.window = 1), [240, 140, 140], "window");
    assert_eq!(changed(2, |spec| spec.sequence += 1), [240, 140, 140], "gap");
    assert_eq!(changed(2, |spec| spec.options = vec![1; 4]), [240, 144, 140], "options");
    assert_eq!(changed(2, |spec| spec.payload.push(0)), [240, 141, 140], "longer");
    assert_eq!(changed(2, |spec| spec.flags |= 0x80), [240, 140, 140], "CWR");
    assert_eq!(changed(2, |spec| spec.flags |= 0x40), [240, 140, 140], "ECE");
    assert_eq!(changed(2, |spec| spec.flags |= 0x01), [240, 140, 140], "FIN");
    assert_eq!(changed(2, |spec| spec.flags |= 0x04), [240, 140, 140], "RST");
}

#[test]
fn a_short_or_pushed_packet_ends_a_chain() {
    assert_eq!(changed(1, |spec| spec.flags |= 0x08), [240, 240]);
    assert_eq!(changed(0, |spec| spec.flags |= 0x08), [140, 340]);
    let mut specs = stream(4);
    specs[1].payload.pop();
    specs[2].sequence -= 1;
    specs[3].sequence -= 1;
    assert_eq!(lengths(&specs), [239, 240]);
}

#[test]
fn a_bare_acknowledgement_keeps_its_place_in_the_flow() {
    let mut specs = stream(4);
    specs.insert(2, Spec { payload: Vec::new(), ..specs[2].clone() });
    assert_eq!(lengths(&specs), [240, 40, 240]);
}

#[test]
fn acknowledgements_of_another_connection_do_not_interrupt_a_stream() {
    let acknowledgement = Spec { source_port: 50_000, ..Spec::new(SegmentKind::Tcp, false) };
    let specs: Vec<_> = stream(4).into_iter().flat_map(|spec| [spec, acknowledgement.clone()]).collect();
    assert_eq!(lengths(&specs), [440, 40, 40, 40, 40]);
}

#[test]
fn interleaved_flows_are_joined_each_by_itself() {
    let specs: Vec<_> = stream(4)
        .into_iter()
        .flat_map(|spec| [0, 1, 2].map(|n| Spec { source_port: 40_000 + n, ..spec.clone() }))
        .collect();
    assert_eq!(lengths(&specs), [440, 440, 440]);
}

#[test]
fn identifiers_do_not_matter_when_fragmenting_is_forbidden() {
    let specs: Vec<_> = stream(4).into_iter().map(|spec| Spec { dont_fragment: true, id: 0, ..spec }).collect();
    assert_eq!(lengths(&specs), [440]);
}

#[test]
fn datagrams_without_checksum_or_payload_are_left_alone() {
    let spec = Spec { payload: vec![1; 10], dont_fragment: true, ..Spec::new(SegmentKind::Udp, false) };
    assert_eq!(lengths(&[spec.clone(), spec.clone()]), [48]);
    let mut bare = spec.build();
    bare[26..28].fill(0);
    assert_eq!(join(&[bare.clone(), bare.clone()]).len(), 2);
    let empty = Spec { payload: Vec::new(), ..spec };
    assert_eq!(lengths(&[empty.clone(), empty]), [28, 28]);
}

#[test]
fn damaged_headers_are_passed_on_as_they_are() {
    let [first, mut second] = [0, 1].map(|n| stream(2)[n].build());
    second[10] ^= 1;
    assert_eq!(join(&[first.clone(), second.clone()]), [(first, Offload::default()), (second, Offload::default())]);
}

#[test]
fn a_chain_stays_within_what_devices_take() {
    let long = |n: u32| Spec {
        sequence: n * 9000,
        id: n as u16,
        payload: vec![0; 9000],
        ..Spec::new(SegmentKind::Tcp, false)
    };
    let specs: Vec<_> = (0..10).map(long).collect();
    assert_eq!(lengths(&specs), [63_040, 27_040]);
    assert_eq!(lengths(&stream(100)), [6_440, 3_640]);
}

#[test]
fn a_lane_that_may_not_join_does_not() {
    let mut coalescer = Coalescer::default();
    let packets: Vec<_> = stream(3).iter().map(Spec::build).collect();
    let buffer = packets.concat();
    for n in 0..3 {
        let range = n * 140..(n + 1) * 140;
        coalescer.push(&buffer, range.clone(), &Packet::inbound(&buffer[range]).unwrap());
    }
    let mut deliveries = Vec::new();
    assert_eq!(coalescer.finish(&buffer, &mut deliveries, &mut Vec::new(), &mut Vec::new()), 0);
    assert_eq!(deliveries.len(), 3);
}

/// Segments deliveries as the kernel would.
fn recut(deliveries: &[(Vec<u8>, Offload)]) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    for (packet, offload) in deliveries {
        let cut = Cut::new(packet, &Packet::outbound(packet).unwrap(), *offload).unwrap();
        for index in 0..cut.count() {
            let mut segment = vec![0; cut.len(index)];
            cut.write(index, &mut segment);
            packets.push(segment);
        }
    }
    packets
}

#[test]
fn no_difference_of_a_single_header_bit_is_lost() {
    for (kind, v6) in [SegmentKind::Tcp, SegmentKind::Udp].into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let spec = |n: u32| Spec {
            sequence: n * 100,
            id: n as u16,
            options: if kind == SegmentKind::Tcp { vec![1; 12] } else { Vec::new() },
            payload: vec![n as u8; 100],
            ..Spec::new(kind, v6)
        };
        let mut tried = 0;
        for bit in 0..spec(0).header() * 8 {
            let mut packets = [0, 1, 2, 3].map(|n| spec(n).build());
            packets[2][bit / 8] ^= 1 << (bit % 8);
            spec(0).finish(&mut packets[2]);
            if Packet::inbound(&packets[2]).is_ok() {
                tried += 1;
                let joined = join(&packets);
                let flow_of = |packet: &Vec<u8>| Packet::inbound(packet).unwrap().flow;
                let changed = flow_of(&packets[2]);
                let mut restored = recut(&joined);
                // If the flipped bit moved the packet to another flow, it may be delivered later than it was
                // received.
                if changed != flow_of(&packets[0]) {
                    let at = restored.iter().position(|packet| flow_of(packet) == changed).unwrap();
                    let moved = restored.remove(at);
                    restored.insert(2, moved);
                }
                let blanked = |packets: Vec<_>| packets.into_iter().map(normal).collect::<Vec<_>>();
                assert_eq!(blanked(restored), blanked(packets.to_vec()), "bit {bit}");
            }
        }
        assert!(tried > 100);
    }
}

/// One step of a random stream: which flow, and what is odd about its next packet.
fn any_step() -> impl Strategy<Value = (usize, u8, usize)> {
    (0_usize..4, prop_oneof![6 => Just(0_u8), 3 => 1_u8..12], prop_oneof![4 => Just(100_usize), 1 => 0_usize..120])
}

/// Zeroes the IPv4 identifier where it has no meaning.
fn normal(mut packet: Vec<u8>) -> Vec<u8> {
    if packet[0] == 0x45 && packet[6] & 0x40 != 0 {
        packet[4..6].fill(0);
        packet[10..12].fill(0);
    }
    packet
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    #[test]
    fn cutting_what_was_joined_restores_every_flow_in_order(
        steps in prop::collection::vec(any_step(), 1..150),
        dont_fragment: bool,
    ) {
        let kinds = [SegmentKind::Tcp, SegmentKind::Udp, SegmentKind::Tcp, SegmentKind::Udp];
        let mut flows: Vec<_> = (0..4)
            .map(|n| Spec { source_port: n as u16, dont_fragment, ..Spec::new(kinds[n], n >= 2) })
            .collect();
        let mut packets = Vec::new();
        for (number, (n, odd, len)) in steps.into_iter().enumerate() {
            let flow = &mut flows[n];
            flow.payload = vec![number as u8; len];
            let mut spec = flow.clone();
            match odd {
                1 => spec.flags |= 0x08,
                2 => spec.flags |= 0x01,
                3 => spec.flags ^= 0x40,
                4 => spec.flags |= 0x80,
                5 => spec.window += 1,
                6 => spec.traffic_class = 3,
                7 => spec.id = spec.id.wrapping_add(100),
                8 => spec.sequence = spec.sequence.wrapping_sub(1),
                9 if spec.kind == SegmentKind::Tcp => spec.options = vec![number as u8; 12],
                10 => flow.window += 1,
                11 => flow.flags ^= 0x40,
                _ => {}
            }
            packets.push(spec.build());
            flow.sequence = flow.sequence.wrapping_add(len as u32);
            flow.id = flow.id.wrapping_add(1);
        }
        let restored = recut(&join(&packets));
        for port in 0..4_u16 {
            let of_flow = |packets: &[Vec<u8>]| -> Vec<_> {
                let start = |packet: &Vec<u8>| if packet[0] >> 4 == 6 { 40 } else { 20 };
                let mine = packets.iter().filter(|packet| read_u16(packet, start(packet)) == port);
                mine.cloned().map(normal).collect()
            };
            prop_assert_eq!(of_flow(&restored), of_flow(&packets));
        }
    }
}
