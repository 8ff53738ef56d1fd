//! Rewritten packets against packets that are built with the other addresses from the beginning.

use std::net::SocketAddr;

use proptest::prelude::*;

use super::super::recipe::{ChecksumKind, Recipe, any_end, any_recipe, error};
use super::super::segment::{Cut, Plan};
use super::super::{Offload, SegmentKind};
use super::*;
use crate::capture::Translation;
use crate::wire::ip::FlowKey;

/// Both forms of a flow of the pod at `local`.
fn translation(local: [SocketAddr; 2], remote: [SocketAddr; 2], protocol: u8) -> Translation {
    let flow = |local: SocketAddr, remote: SocketAddr| FlowKey {
        local: local.ip(),
        remote: remote.ip(),
        local_port: local.port(),
        remote_port: remote.port(),
        protocol,
        fragment: false,
    };
    Translation::new(flow(local[0], remote[0]), flow(local[1], remote[1]), false)
}

fn number(recipe: &Recipe) -> u8 {
    if recipe.kind == SegmentKind::Tcp { 6 } else { 17 }
}

/// 0 and 0xffff are the same sum, except in UDP.
fn normal(mut packet: Vec<u8>, recipe: &Recipe) -> Vec<u8> {
    let mut fields = if recipe.v6 { Vec::new() } else { vec![10] };
    if recipe.kind == SegmentKind::Tcp && !recipe.is_later_fragment() {
        fields.push(recipe.transport() + recipe.checksum_offset());
    }
    for field in fields {
        if packet[field..field + 2] == [0xff, 0xff] {
            packet[field..field + 2].fill(0);
        }
    }
    packet
}

/// The ends of a flow in both forms: the pod's address is the same, its port may not be.
fn any_ends(v6: bool) -> impl Strategy<Value = ([SocketAddr; 2], [SocketAddr; 2])> {
    (any_end(v6), any::<u16>(), any_end(v6), any_end(v6))
        .prop_map(|(local, port, service, endpoint)| ([local, SocketAddr::new(local.ip(), port)], [service, endpoint]))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn a_rewritten_packet_is_the_packet_of_the_other_addresses(
        (recipe, (local, remote)) in any::<bool>().prop_flat_map(|v6| (any_recipe(v6), any_ends(v6))),
    ) {
        let translation = translation(local, remote, number(&recipe));
        let expected = normal(recipe.build(local[1], remote[1]), &recipe);
        let mut out = recipe.build(local[0], remote[0]);
        let parsed = Packet::outbound(&out).unwrap();
        rewrite(&mut out, &parsed, recipe.offload(), &translation.out()).unwrap();
        prop_assert_eq!(normal(out, &recipe), expected);

        let expected = normal(recipe.build(remote[0], local[0]), &recipe);
        let mut back = recipe.build(remote[1], local[1]);
        let parsed = Packet::inbound(&back).unwrap();
        rewrite(&mut back, &parsed, recipe.offload(), &translation.back()).unwrap();
        prop_assert_eq!(normal(back, &recipe), expected);
    }

    #[test]
    fn the_packets_of_a_rewritten_super_packet_are_those_of_the_other_addresses(
        (recipe, (local, remote)) in any::<bool>().prop_flat_map(|v6| (any_recipe(v6), any_ends(v6))),
        size in 1_u16..60,
    ) {
        let recipe = Recipe { fragment: None, sum: ChecksumKind::Partial, flags: recipe.flags & !0x07, ..recipe };
        prop_assume!(!recipe.payload.is_empty());
        let offload = recipe.offload_of(size);
        let mut whole = recipe.build(local[0], remote[0]);
        let parsed = Packet::outbound(&whole).unwrap();
        let plan = Plan::new(&whole, &parsed, offload).unwrap();
        rewrite(&mut whole, &parsed, offload, &translation(local, remote, number(&recipe)).out()).unwrap();
        let expected = recipe.build(local[1], remote[1]);
        let reference = Cut::new(&expected, &Packet::outbound(&expected).unwrap(), offload).unwrap();
        let cut = plan.of(&whole);
        prop_assert_eq!(cut.count(), reference.count());
        for index in 0..cut.count() {
            let [mut one, mut other] = [vec![0; cut.len(index)], vec![0; reference.len(index)]];
            cut.write(index, &mut one);
            reference.write(index, &mut other);
            prop_assert_eq!(normal(one, &recipe), normal(other, &recipe));
        }
    }

    #[test]
    fn a_rewritten_error_quotes_the_packet_of_the_other_addresses(
        (recipe, (local, remote)) in any::<bool>().prop_flat_map(|v6| (any_recipe(v6), any_ends(v6))),
        more in (4_usize..200).prop_map(|words| 2 * words),
    ) {
        let recipe = Recipe { fragment: None, sum: match recipe.sum {
            ChecksumKind::Partial => ChecksumKind::Complete,
            sum => sum,
        }, ..recipe };
        let translation = translation(local, remote, number(&recipe));
        let quote = |packet: Vec<u8>| normal(packet, &recipe)[..].iter().copied().take(recipe.transport() + more).collect::<Vec<u8>>();
        let same = |a: &[u8], b: &[u8]| {
            // The quoted sums may be either form of zero, and then that of the error differs, too.
            let normal = |bytes: &[u8]| {
                let start = if recipe.v6 { 48 } else { 28 };
                let mut bytes = bytes.to_vec();
                let quoted = normal({ let mut quoted = bytes[start..].to_vec(); quoted.resize(2000, 0); quoted }, &recipe);
                for field in if recipe.v6 { vec![start - 6] } else { vec![10, start - 6] } {
                    if bytes[field..field + 2] == [0xff, 0xff] {
                        bytes[field..field + 2].fill(0);
                    }
                }
                let len = bytes.len();
                bytes[start..].copy_from_slice(&quoted[..len - start]);
                bytes
            };
            normal(a) == normal(b)
        };

        // The pod says that it could not take a packet.
        let quoted = quote(recipe.build(remote[0], local[0]));
        let mut out = error(local[0].ip(), remote[0].ip(), &quoted);
        let expected = error(local[1].ip(), remote[1].ip(), &quote(recipe.build(remote[1], local[1])));
        let parsed = Packet::outbound(&out).unwrap();
        rewrite_quoted(&mut out, &parsed, &translation, true).unwrap();
        prop_assert!(same(&out, &expected), "{:02x?}\n{:02x?}", out, expected);

        // The endpoint, or a host on the way to it, could not take one of the pod.
        for from in [remote[1].ip(), local[1].ip()] {
            let quoted = quote(recipe.build(local[1], remote[1]));
            let mut back = error(from, local[1].ip(), &quoted);
            let as_seen = if from == remote[1].ip() { remote[0].ip() } else { from };
            let expected = error(as_seen, local[0].ip(), &quote(recipe.build(local[0], remote[0])));
            let parsed = Packet::inbound(&back).unwrap();
            rewrite_quoted(&mut back, &parsed, &translation, false).unwrap();
            prop_assert!(same(&back, &expected), "{:02x?}\n{:02x?}", back, expected);
        }
    }

    #[test]
    fn any_bytes_are_rewritten_or_refused(
        mut bytes in prop::collection::vec(any::<u8>(), 20..200),
        first in prop_oneof![Just(0x45_u8), Just(0x4f), Just(0x60)],
        protocol in prop_oneof![Just(1_u8), Just(6), Just(17), Just(43), Just(44), Just(51), Just(58), Just(60)],
        offload in prop::option::of((any::<u16>(), any::<u16>())),
        out: bool,
    ) {
        bytes[0] = first;
        bytes[if first == 0x60 { 6 } else { 9 }] = protocol;
        let ends = |v6: bool| match v6 {
            true => ["[fd00::1]:1", "[fd00::2]:2", "[fd00::3]:3"],
            false => ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3"],
        };
        let [local, service, endpoint] = ends(first == 0x60).map(|end| end.parse().unwrap());
        let translation = translation([local; 2], [service, endpoint], protocol);
        if let Ok(parsed) = Packet::outbound(&bytes) {
            let before = bytes.clone();
            let offload = Offload { segment: None, checksum: offload };
            if rewrite(&mut bytes, &parsed, offload, &translation.out()).is_err() {
                prop_assert_eq!(&bytes, &before);
            }
            let _ = rewrite_quoted(&mut bytes, &parsed, &translation, out);
        }
    }
}

#[test]
fn what_depends_on_its_addresses_is_left_alone() {
    let [local, service, endpoint] = ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3"].map(|end| end.parse().unwrap());
    for (kind, allowed) in [(131_u8, false), (137, false), (7, true), (68, true)] {
        let options = vec![(0, vec![1, kind, 3, 4])];
        let recipe = Recipe { options, ..Recipe::new(SegmentKind::Udp, false) };
        let mut packet = recipe.build(local, service);
        let parsed = Packet::outbound(&packet).unwrap();
        let change = translation([local; 2], [service, endpoint], 17).out();
        assert_eq!(rewrite(&mut packet, &parsed, Offload::default(), &change).is_ok(), allowed, "{kind}");
    }
    let [local, service, endpoint] = ["[fd00::1]:1", "[fd00::2]:2", "[fd00::3]:3"].map(|end| end.parse().unwrap());
    for (header, allowed) in [
        ((43, vec![0, 0, 4, 1, 0, 0, 0, 0]), false),
        ((43, vec![0, 0, 4, 0, 0, 0, 0, 0]), true),
        ((51, vec![0, 0, 0, 0, 0, 0, 0, 0]), false),
        ((60, vec![0, 0, 1, 4, 0, 0, 0, 0]), true),
    ] {
        let recipe = Recipe { options: vec![header.clone()], ..Recipe::new(SegmentKind::Tcp, true) };
        let mut packet = recipe.build(local, service);
        let parsed = Packet::outbound(&packet).unwrap();
        let change = translation([local; 2], [service, endpoint], 6).out();
        assert_eq!(rewrite(&mut packet, &parsed, Offload::default(), &change).is_ok(), allowed, "{header:?}");
    }
}

#[test]
fn a_checksum_in_another_fragment_cannot_be_corrected() {
    let [local, service, endpoint] = ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3"].map(|end| end.parse().unwrap());
    let recipe = Recipe { fragment: Some((9, 0, true)), ..Recipe::new(SegmentKind::Tcp, false) };
    let mut packet = recipe.build(local, service);
    packet.truncate(20 + 16);
    let parsed = Packet::outbound(&packet).unwrap();
    let before = packet.clone();
    let change = translation([local; 2], [service, endpoint], 6).out();
    assert_eq!(rewrite(&mut packet, &parsed, Offload::default(), &change), Err(DropReason::BadPacket));
    assert_eq!(packet, before);
}
