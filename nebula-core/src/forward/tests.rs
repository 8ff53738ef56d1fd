//! Tests from the device of one node to the device of another, through both halves of the data path.

use proptest::prelude::*;

#[cfg(feature = "io")]
use super::cut_delivery;
use super::reject::MAX_ANSWERS;
use super::testing::{Side, Spec, TCP_ACK, local_policy, pair, unconfirmed_pair};
use super::{Offload, Received, Segment, SegmentKind};
use crate::counters::{Counter, Direction};
use crate::firewall::{Action, Policy};
use crate::tunnel::PathState;
use crate::tunnel::cipher::Cipher;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::{DropReason, Punt, Verdict};

fn dropped(side: &Side, direction: Direction, reason: DropReason) -> u64 {
    side.lane.counters().dropped(direction, reason)
}

fn all_drops(side: &Side) -> u64 {
    let both = [Direction::Inbound, Direction::Outbound];
    both.into_iter().flat_map(|way| DropReason::ALL.map(|reason| dropped(side, way, reason))).sum()
}

/// A sealed message of any kind from `side`.
fn sealed(side: &Side, kind: MessageType, plaintext: &[u8]) -> Vec<u8> {
    let counter = side.tunnel.session.reserve(1).unwrap();
    let header = Header { kind, index: side.tunnel.remote_index.0, counter }.to_bytes();
    let mut body = plaintext.to_vec();
    let tag = side.tunnel.session.send_key.seal(counter, &header, &mut body);
    [header.as_slice(), &body, &tag].concat()
}

fn ping() -> Vec<u8> {
    Spec { payload: b"hello".to_vec(), ..Spec::new(SegmentKind::Udp, false) }.build()
}

#[test]
fn a_packet_arrives_as_it_was_sent_with_either_cipher() {
    for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
        let [mut a, mut b] = pair(cipher);
        assert_eq!(a.send(&ping(), Offload::default()), Verdict::Transmit);
        assert_eq!(a.lane.runs()[0].to, b.endpoint);
        let datagrams = a.sent();
        assert_eq!(Header::parse(&datagrams[0]).unwrap().counter, 3);
        assert_eq!(b.receive(a.endpoint, &datagrams), [(ping(), Offload::default())]);
        let traffic = b.tunnel.take_traffic();
        assert!(traffic.direct && traffic.sent && !traffic.relayed);
        assert_eq!(b.lane.take_punts().count(), 0);
    }
}

#[test]
fn an_unfinished_checksum_is_finished_before_sealing() {
    for (kind, v6) in [(SegmentKind::Tcp, false), (SegmentKind::Udp, true)] {
        let [mut a, mut b] = pair(Cipher::Aes256Gcm);
        let spec = Spec { payload: vec![9; 333], ..Spec::new(kind, v6) };
        let (packet, offload) = spec.build_super(1);
        let _ = a.send(&packet, Offload { segment: None, ..offload });
        let datagrams = a.sent();
        assert_eq!(b.receive(a.endpoint, &datagrams), [(spec.build(), Offload::default())]);
    }
}

#[test]
fn a_datagram_that_comes_twice_is_delivered_once() {
    let [mut a, mut b] = pair(Cipher::Aes256Gcm);
    let _ = a.send(&ping(), Offload::default());
    let datagram = a.sent().remove(0);
    let twice = [datagram.clone(), datagram.clone()];
    assert_eq!(b.receive(a.endpoint, &twice).len(), 1, "twice in one run");
    assert_eq!(b.receive(a.endpoint, &twice).len(), 0, "again later");
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::Replayed), 3);
}

#[test]
fn a_forged_datagram_is_dropped_and_does_not_use_up_its_counter() {
    let [mut a, mut b] = pair(Cipher::Aes256Gcm);
    let _ = a.send(&ping(), Offload::default());
    let datagram = a.sent().remove(0);
    for at in 8..datagram.len() {
        let mut forged = datagram.clone();
        forged[at] ^= 1;
        assert!(b.receive("203.0.113.9:1".parse().unwrap(), &[forged]).is_empty());
    }
    // Counter 3 with its last bit flipped is 2, which belongs to the handshake.
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::Replayed), 1);
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::BadTag), datagram.len() as u64 - 9);
    assert!(!b.tunnel.take_traffic().received());
    assert_eq!(b.lane.take_punts().count(), 0, "no roaming before authentication");
    assert_eq!(b.receive(a.endpoint, &[datagram]).len(), 1);
}

#[test]
fn short_and_unknown_datagrams_are_counted_by_reason() {
    let [a, mut b] = pair(Cipher::Aes256Gcm);
    let good = sealed(&a, MessageType::Data, &ping());
    let mut unknown_type = good.clone();
    unknown_type[1] = 9;
    let mut relay = good.clone();
    relay[1] = 1;
    let datagrams = [good[..15].to_vec(), good[..31].to_vec(), vec![0], vec![], unknown_type, relay];
    assert!(b.receive(a.endpoint, &datagrams).is_empty());
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::Truncated), 2);
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::UnknownType), 1);
    // The index of a tunnel is not the index of a relay hop.
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::UnknownIndex), 1);
    assert_eq!(b.lane.counters().get(Counter::HolePunchesIn), 2);
    let empty = sealed(&a, MessageType::Data, &[]);
    assert!(b.receive(a.endpoint, &[empty]).is_empty());
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::BadPacket), 1);
}

#[test]
fn a_tunnel_in_a_tunnel_is_refused() {
    let [a, mut b] = pair(Cipher::Aes256Gcm);
    let datagram = sealed(&a, MessageType::Data, &ping());
    assert!(b.receive("10.1.7.7:4242".parse().unwrap(), &[datagram]).is_empty());
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::FromOverlay), 1);
}

#[test]
fn a_flood_of_unknown_indexes_reaches_the_control_plane_only_in_drops() {
    let [a, mut b] = pair(Cipher::Aes256Gcm);
    let datagrams: Vec<_> = (0..1000_u32)
        .map(|n| {
            let index = b.index().0.wrapping_add(1 + n);
            [Header { kind: MessageType::Data, index, counter: 5 }.to_bytes(), [0; 16]].concat()
        })
        .collect();
    assert!(b.receive(a.endpoint, &datagrams).is_empty());
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::UnknownIndex), 1000);
    let punts: Vec<_> = b.lane.take_punts().collect();
    assert!(
        matches!(punts[0], Punt::UnknownIndex { from, index } if from == a.endpoint.into() && index == b.index().0 + 1)
    );
    assert_eq!(punts.len(), 16);
}

#[test]
fn handshakes_and_messages_reach_the_control_plane() {
    let [a, mut b] = pair(Cipher::Aes256Gcm);
    let header = Header { kind: MessageType::Handshake, index: 0, counter: 1 }.to_bytes();
    let datagrams = [
        [header.as_slice(), b"noise"].concat(),
        Header { kind: MessageType::RecvError, index: 77, counter: 0 }.to_bytes().to_vec(),
        sealed(&a, MessageType::Lighthouse, b"query"),
        sealed(&a, MessageType::TestRequest, b""),
        sealed(&a, MessageType::CloseTunnel, b""),
    ];
    assert!(b.receive(a.endpoint, &datagrams).is_empty());
    let (from, tunnel) = (a.endpoint.into(), b.index());
    let message = |kind, text: &[u8]| Punt::Message { tunnel, from, kind, plaintext: text.to_vec() };
    let expected = [
        Punt::Handshake { from, datagram: datagrams[0].clone() },
        Punt::RecvError { from, index: crate::tunnel::RemoteIndex(77) },
        message(MessageType::Lighthouse, b"query"),
        message(MessageType::TestRequest, b""),
        message(MessageType::CloseTunnel, b""),
    ];
    assert_eq!(b.lane.take_punts().collect::<Vec<_>>(), expected);
    assert_eq!(all_drops(&b), 0);
}

#[test]
fn a_peer_that_moved_is_reported_once_per_batch() {
    let [a, mut b] = pair(Cipher::Aes256Gcm);
    let datagrams: Vec<_> = (0..5).map(|_| sealed(&a, MessageType::Data, &ping())).collect();
    let from = "198.51.100.7:9".parse().unwrap();
    let bytes = datagrams.iter().map(Vec::len).sum();
    assert_eq!(b.receive(from, &datagrams).len(), 5);
    assert_eq!(b.lane.take_punts().collect::<Vec<_>>(), [Punt::Roamed { tunnel: b.index(), from, bytes }]);
}

#[test]
fn the_first_authentic_datagrams_of_a_peer_are_reported_until_the_control_plane_knows() {
    let [a, mut b] = unconfirmed_pair(Cipher::Aes256Gcm);
    let mut forged = sealed(&a, MessageType::Data, &ping());
    *forged.last_mut().unwrap() ^= 1;
    assert!(b.receive(a.endpoint, &[forged]).is_empty());
    assert_eq!(b.lane.take_punts().count(), 0, "with a wrong tag");
    let batch = || (0..5).map(|_| sealed(&a, MessageType::Data, &ping())).collect::<Vec<_>>();
    for _ in 0..2 {
        assert_eq!(b.receive(a.endpoint, &batch()).len(), 5);
        assert_eq!(
            b.lane.take_punts().collect::<Vec<_>>(),
            [Punt::Confirmed { tunnel: b.index(), from: a.endpoint.into() }]
        );
    }
    assert!(b.tunnel.confirm() && !b.tunnel.confirm());
    assert_eq!(b.receive(a.endpoint, &batch()).len(), 5);
    assert_eq!(b.lane.take_punts().count(), 0);
}

#[test]
fn a_move_is_not_reported_again_with_each_receive_while_the_control_plane_is_busy() {
    let [a, mut b] = pair(Cipher::Aes256Gcm);
    let [first, second] = ["198.51.100.7:9", "198.51.100.7:10"].map(|text| text.parse().unwrap());
    let mut receive = |from| {
        assert_eq!(b.receive(from, &[sealed(&a, MessageType::Data, &ping())]).len(), 1);
        b.lane.take_punts().count()
    };
    assert_eq!([receive(first), receive(first), receive(first)], [1, 0, 0]);
    assert_eq!([receive(second), receive(second)], [1, 0], "another place is news");
}

#[test]
fn a_move_that_is_not_obeyed_is_reported_again_after_a_while() {
    let [a, mut b] = pair(Cipher::Aes256Gcm);
    let from = "198.51.100.7:9".parse().unwrap();
    let mut reports = 0;
    for _ in 0..30 {
        b.now += std::time::Duration::from_millis(10);
        b.receive(from, &[sealed(&a, MessageType::Data, &ping())]);
        reports += b.lane.take_punts().count();
    }
    assert_eq!(reports, 3);
}

#[test]
fn without_a_tunnel_the_packet_is_handed_over_whole() {
    let [mut a, _] = pair(Cipher::Aes256Gcm);
    let peer = a.peer_address();
    let (packet, offload) = Spec { payload: vec![3; 5000], ..Spec::new(SegmentKind::Tcp, false) }.build_super(1000);
    assert_eq!(a.send(&packet, offload), Verdict::Transmit);
    a.forwarder.tunnels().retire(a.index());
    assert_eq!(a.send(&packet, offload), Verdict::Punt);
    let packet = crate::PacketOwned { bytes: packet, offload };
    assert_eq!(a.lane.take_punts().collect::<Vec<_>>(), [Punt::NoTunnel { peer, packet }]);
}

#[test]
fn packets_that_have_nowhere_to_go_are_counted_by_reason() {
    let [mut a, _] = pair(Cipher::Aes256Gcm);
    let to = |address: [u8; 4]| {
        let mut packet = ping();
        packet[16..20].copy_from_slice(&address);
        packet
    };
    let mut policy = local_policy(&["10.1.0.1/16"]);
    policy.drop_multicast = true;
    policy.drop_local_broadcast = true;
    a.forwarder.set_policy(policy.clone());
    assert_eq!(a.send(&to([10, 1, 0, 1]), Offload::default()), Verdict::Drop(DropReason::ToSelf));
    assert_eq!(a.send(&to([10, 2, 0, 1]), Offload::default()), Verdict::Drop(DropReason::NoRoute));
    assert_eq!(a.send(&to([10, 1, 255, 255]), Offload::default()), Verdict::Drop(DropReason::Broadcast));
    assert_eq!(a.send(&to([224, 0, 0, 1]), Offload::default()), Verdict::Drop(DropReason::Broadcast));
    assert_eq!(a.send(&[], Offload::default()), Verdict::Drop(DropReason::BadPacket));
    policy.drop_local_broadcast = false;
    policy.firewall.outbound.clear();
    a.forwarder.set_policy(policy);
    assert_eq!(a.send(&to([10, 1, 255, 255]), Offload::default()), Verdict::Punt);
    assert_eq!(a.send(&ping(), Offload::default()), Verdict::Drop(DropReason::NoRule));
    assert_eq!(all_drops(&a), 6);
    let names = a.forwarder.counters();
    assert_eq!((names["dropped_out_broadcast"], names["dropped_out_no_rule"], names["no_tunnel"]), (2, 1, 1));
}

#[test]
fn a_tunnel_without_a_way_is_punted_and_one_without_counters_drops() {
    let [mut a, _] = pair(Cipher::Aes256Gcm);
    a.tunnel.set_endpoint(None);
    assert_eq!(a.send(&ping(), Offload::default()), Verdict::Punt);
    a.tunnel.set_endpoint(Some("192.0.2.2:1".parse().unwrap()));
    assert!(a.tunnel.session.reserve(crate::tunnel::Session::REJECT_AFTER - 10).is_some());
    let (packet, offload) = Spec { payload: vec![3; 9000], ..Spec::new(SegmentKind::Tcp, false) }.build_super(1000);
    assert_eq!(a.send(&packet, offload), Verdict::Drop(DropReason::CounterExhausted));
}

#[test]
fn packets_from_a_peer_that_the_rules_refuse_stay_outside() {
    let [a, mut b] = pair(Cipher::Aes256Gcm);
    let mut policy = local_policy(&["10.1.0.2/16"]);
    policy.firewall.inbound.clear();
    b.forwarder.set_policy(policy);
    let mut spoofed = ping();
    spoofed[12..16].copy_from_slice(&[10, 1, 0, 9]);
    let datagrams = [ping(), spoofed].map(|packet| sealed(&a, MessageType::Data, &packet));
    assert!(b.receive(a.endpoint, &datagrams).is_empty());
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::NoRule), 1);
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::RemoteAddress), 1);
    assert!(b.tunnel.take_traffic().direct, "the peer is alive all the same");
}

#[test]
fn equal_packets_to_one_endpoint_make_one_run_up_to_the_limits() {
    let [mut a, _] = pair(Cipher::Aes256Gcm);
    a.lane.set_max_segments(4);
    let packet = |len| Spec { payload: vec![1; len], ..Spec::new(SegmentKind::Udp, false) }.build();
    for len in [100, 100, 100, 100, 100, 60, 60, 100, 200] {
        assert_eq!(a.send(&packet(len), Offload::default()), Verdict::Transmit);
    }
    let overhead = 28 + 32;
    let runs: Vec<_> = a.lane.runs().iter().map(|run| (run.segment_size - overhead, run.range.len())).collect();
    let expected = [(100, 4 * 160), (100, 160 + 120), (60, 120), (100, 160), (200, 260)];
    assert_eq!(runs, expected);
}

#[test]
fn a_lane_gives_its_memory_back_and_goes_on() {
    let [mut a, mut b] = pair(Cipher::Aes256Gcm);
    let (packet, offload) = Spec { payload: vec![3; 60_000], ..Spec::new(SegmentKind::Tcp, false) }.build_super(1200);
    for _ in 0..2 {
        assert!(a.lane.has_room());
        assert_eq!(a.send(&packet, offload), Verdict::Transmit);
        let (mut buffer, slots) = a.sent_runs();
        assert_eq!(b.receive_slots(&mut buffer, &slots).len(), 50);
        a.lane.release_memory();
        b.lane.release_memory();
        assert_eq!((a.lane.arena().len(), b.lane.deliveries().len()), (0, 0));
    }
    while a.lane.has_room() {
        assert_eq!(a.send(&packet, offload), Verdict::Transmit);
    }
    assert!(a.lane.arena().len() < 400_000);
}

prop_compose! {
    fn any_super()(
        tcp: bool,
        v6: bool,
        size in prop_oneof![1_usize..40, 500_usize..2000],
        count in 1_usize..60,
        short in 0_usize..2000,
        flags in prop::sample::select(vec![0_u8, 0x08, 0x01, 0x80, 0x40, 0xc9]),
        options in prop::sample::select(vec![0_usize, 12, 40]),
        sequence: u32,
        id: u16,
        seed: u8,
    ) -> (Spec, usize) {
        let kind = if tcp { SegmentKind::Tcp } else { SegmentKind::Udp };
        let len = (size * count - short % size).min(65_000);
        let payload = (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        let options = if tcp { vec![1; options] } else { Vec::new() };
        let spec = Spec { payload, flags: TCP_ACK | flags, options, sequence, id, ..Spec::new(kind, v6) };
        (spec, size)
    }
}

/// Cuts deliveries again, as the kernel would.
fn recut(mut side: Side, delivered: Vec<(Vec<u8>, Offload)>, through: &mut Side) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    for (packet, offload) in delivered {
        assert_eq!(side.send(&packet, offload), Verdict::Transmit);
        let (mut buffer, slots) = side.sent_runs();
        packets.extend(through.receive_slots(&mut buffer, &slots).into_iter().map(|(packet, _)| packet));
    }
    packets
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_super_packet_arrives_as_the_packets_it_stands_for(
        (spec, size) in any_super(),
        join: bool,
        jumbo in prop::sample::select(vec![0_u16, 2600, 3940, 8940, 60_000]),
    ) {
        let [mut a, mut b] = pair(Cipher::Aes256Gcm);
        b.lane.set_coalesce(join, join);
        a.tunnel.path_limit.set(if jumbo > 0 { PathState::Joined(jumbo) } else { PathState::Open });
        let (packet, offload) = spec.build_super(size as u16);
        prop_assert_eq!(a.send(&packet, offload), Verdict::Transmit);
        prop_assert!(a.lane.runs().iter().all(|run| run.range.len() <= 65_000));
        let expected = spec.cut(size);
        let (mut buffer, slots) = a.sent_runs();
        let longest = expected.iter().map(Vec::len).max().unwrap_or_default();
        let limit = longest.max(jumbo.into()) + HEADER_LEN + TAG_LEN;
        prop_assert!(slots.iter().all(|slot| slot.segment_size <= limit));
        let delivered = b.receive_slots(&mut buffer, &slots);
        if !join {
            let packets: Vec<_> = delivered.into_iter().map(|(packet, _)| packet).collect();
            prop_assert_eq!(packets, expected);
        } else {
            prop_assert!(delivered.len() <= expected.len());
            let [c, mut d] = pair(Cipher::Aes256Gcm);
            prop_assert_eq!(recut(c, delivered, &mut d), expected);
        }
        prop_assert_eq!(all_drops(&a) + all_drops(&b), 0);
    }

    #[test]
    fn any_claim_of_segments_is_good_for_tcp_only_and_changes_no_byte(
        (spec, _) in any_super(),
        claimed in prop_oneof![any::<u16>(), 490_u16..1500],
        join: bool,
    ) {
        let [a, mut b] = pair(Cipher::Aes256Gcm);
        b.lane.set_coalesce(join, join);
        let packet = Spec { payload: spec.payload[..spec.payload.len().min(8900)].to_vec(), ..spec.clone() };
        let segments = spec.kind == SegmentKind::Tcp && (500..packet.payload.len()).contains(&usize::from(claimed));
        let whole = packet.build();
        let counter = a.tunnel.session.reserve(1).unwrap();
        let header = Header { kind: MessageType::Data, index: a.tunnel.remote_index.0, counter };
        let header = header.to_bytes_of_segments(claimed);
        let mut body = whole.clone();
        if segments {
            // Nobody reads it: such a packet has none of its own.
            body[packet.transport() + 16..packet.transport() + 18].fill(0xa5);
        }
        let tag = a.tunnel.session.send_key.seal(counter, &header, &mut body);
        let delivered = b.receive(a.endpoint, &[[header.as_slice(), &body, &tag].concat()]);
        prop_assert_eq!(all_drops(&b), 0);
        if !segments {
            prop_assert_eq!(delivered, vec![(whole, Offload::default())]);
        } else if join {
            prop_assert_eq!(delivered.len(), 1);
            let segment = Some(Segment { kind: SegmentKind::Tcp, size: claimed });
            prop_assert_eq!(delivered[0].1.segment, segment);
            let [c, mut d] = pair(Cipher::Aes256Gcm);
            prop_assert_eq!(recut(c, delivered, &mut d), packet.cut(claimed.into()));
        } else {
            let packets: Vec<_> = delivered.into_iter().map(|(packet, _)| packet).collect();
            prop_assert_eq!(packets, packet.cut(claimed.into()));
        }
    }

    #[test]
    #[cfg(feature = "io")]
    fn a_joined_packet_can_be_taken_apart_again((spec, size) in any_super()) {
        let [mut a, mut b] = pair(Cipher::Aes256Gcm);
        b.lane.set_coalesce(true, true);
        let (packet, offload) = spec.build_super(size as u16);
        prop_assert_eq!(a.send(&packet, offload), Verdict::Transmit);
        let (mut buffer, slots) = a.sent_runs();
        b.receive_slots(&mut buffer, &slots);
        let mut packets = Vec::new();
        for delivery in b.lane.deliveries() {
            cut_delivery(&b.lane, &buffer, delivery, |packet| packets.push(packet.to_vec()));
        }
        prop_assert_eq!(packets, spec.cut(size));
    }

    #[test]
    fn random_datagrams_are_counted_and_nothing_else(
        datagrams in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 1..20),
        valid_header: bool,
        segment_size in 0_usize..40,
    ) {
        let [a, mut b] = pair(Cipher::Aes256Gcm);
        let mut buffer = datagrams.concat();
        if valid_header && buffer.len() >= 16 {
            let header = Header { kind: MessageType::Data, index: b.index().0, counter: 9 };
            buffer[..16].copy_from_slice(&header.to_bytes());
        }
        let whole = Received { from: a.endpoint, range: 0..buffer.len(), segment_size };
        let outside = Received { from: a.endpoint, range: 5..buffer.len() + 9, segment_size };
        prop_assert!(b.receive_slots(&mut buffer, &[whole, outside]).is_empty());
        let counters = b.lane.counters();
        let punted = [Counter::HandshakesIn, Counter::RecvErrorsIn, Counter::HolePunchesIn];
        let other: u64 = punted.map(|counter| counters.get(counter)).into_iter().sum();
        prop_assert_eq!(counters.get(Counter::DatagramsIn), other + all_drops(&b));
    }

    #[test]
    fn no_offload_description_makes_a_lane_panic(
        packet in prop::collection::vec(any::<u8>(), 0..300),
        v6: bool,
        tcp: bool,
        honest_header: bool,
        size: u16,
        kind: bool,
        checksum in prop::option::of((0_u16..400, any::<u16>())),
    ) {
        let [mut a, _] = pair(Cipher::Aes256Gcm);
        let mut packet = packet;
        if honest_header {
            let own = if tcp { SegmentKind::Tcp } else { SegmentKind::Udp };
            let header = Spec::new(own, v6).build();
            let len = header.len().min(packet.len());
            packet[..len].copy_from_slice(&header[..len]);
        }
        let kind = if kind { SegmentKind::Tcp } else { SegmentKind::Udp };
        for segment in [None, Some(Segment { kind, size })] {
            let _ = a.send(&packet, Offload { segment, checksum });
            let _ = a.send(&packet, Offload { segment, checksum: checksum.map(|(start, offset)| (start, offset % 64)) });
        }
    }
}

#[test]
fn a_super_packet_of_one_byte_segments_is_refused() {
    let [mut a, _] = pair(Cipher::Aes256Gcm);
    let (packet, offload) = Spec { payload: vec![3; 60_000], ..Spec::new(SegmentKind::Tcp, false) }.build_super(1);
    assert_eq!(a.send(&packet, offload), Verdict::Drop(DropReason::BadOffload));
    assert_eq!(a.tunnel.session.next_counter(), 3);
}

#[test]
fn a_flood_of_refused_packets_has_a_bounded_number_of_answers() {
    let [mut a, mut b] = pair(Cipher::Aes256Gcm);
    let mut refusing = local_policy(&["10.1.0.2/16", "fd00::2/64"]);
    refusing.firewall = Policy { inbound_action: Action::Reject, ..Policy::default() };
    b.forwarder.set_policy(refusing);
    let datagrams: Vec<_> = (0..1000).map(|_| sealed(&a, MessageType::Data, &ping())).collect();
    assert!(b.receive(a.endpoint, &datagrams).is_empty());
    let answers = b.sent();
    assert_eq!(answers.len(), MAX_ANSWERS);
    assert_eq!(dropped(&b, Direction::Inbound, DropReason::NoRule), 1000);
    // Answers to the device, in one turn of the other direction.
    let mut refusing = local_policy(&["10.1.0.1/16", "fd00::1/64"]);
    refusing.firewall = Policy { outbound_action: Action::Reject, ..Policy::default() };
    a.forwarder.set_policy(refusing);
    for _ in 0..1000 {
        assert_eq!(a.send(&ping(), Offload::default()), Verdict::Drop(DropReason::NoRule));
    }
    assert_eq!(a.lane.deliveries().len(), MAX_ANSWERS);
}

#[test]
fn a_refused_super_packet_has_one_answer() {
    let [mut a, _] = pair(Cipher::Aes256Gcm);
    let mut refusing = local_policy(&["10.1.0.1/16", "fd00::1/64"]);
    refusing.firewall = Policy { outbound_action: Action::Reject, ..Policy::default() };
    a.forwarder.set_policy(refusing);
    let (packet, offload) = Spec { payload: vec![3; 5000], ..Spec::new(SegmentKind::Tcp, false) }.build_super(1000);
    assert_eq!(a.send(&packet, offload), Verdict::Drop(DropReason::NoRule));
    assert_eq!(a.lane.deliveries().len(), 1);
}
