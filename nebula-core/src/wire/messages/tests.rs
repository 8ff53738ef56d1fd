use proptest::prelude::*;

use super::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

mod handshake_payload {
    use super::*;

    #[test]
    fn zeros_are_left_out_and_details_are_always_there() {
        assert_eq!(HandshakePayload::default().encode(), hex("0a00"));
        let payload = HandshakePayload {
            certificate: &[1, 2],
            initiator_index: 3,
            responder_index: 4,
            time: 5,
            certificate_version: 2,
            kem_offer: 0,
        };
        assert_eq!(payload.encode(), hex("0a0c0a020102100318042805 4002"));
        assert_eq!(HandshakePayload::parse(&payload.encode()), Ok(payload));
        let payload = HandshakePayload { kem_offer: 1, ..payload };
        assert_eq!(payload.encode(), hex("0a0f0a020102100318042805 4002 a00601"));
        assert_eq!(HandshakePayload::parse(&payload.encode()), Ok(payload));
    }

    #[test]
    fn unknown_fields_are_skipped() {
        // Outer: field 2 (Hmac) and a fixed64. Inner: Cookie, reserved 6 and 7, an unknown string.
        let message = hex("1201ff 190000000000000000 0a0d 1003 2007 3001 3801 7a01ff 4001");
        let payload = HandshakePayload::parse(&message).unwrap();
        assert_eq!((payload.initiator_index, payload.certificate_version), (3, 1));
    }

    #[test]
    fn a_peer_that_offers_several_ports_is_understood() {
        // Fields 6 and 7 of Go's branch `multiport`: messages of both flags, the base port and the number of ports.
        let message = hex("0a15 1003 3209 0801 1001 189221 2064 3a04 0801 1000 4002");
        let payload = HandshakePayload::parse(&message).unwrap();
        assert_eq!((payload.initiator_index, payload.certificate_version), (3, 2));
    }

    #[test]
    fn a_known_field_with_another_wire_type_is_refused() {
        for inner in ["0801", "1200", "1a00", "2a00", "4200", "0d00000000", "110000000000000000"] {
            let inner = hex(inner);
            let mut message = vec![0x0a, u8::try_from(inner.len()).unwrap()];
            message.extend_from_slice(&inner);
            assert!(HandshakePayload::parse(&message).is_err(), "{inner:02x?}");
        }
        // The details field itself with another wire type, which Go Nebula treats as an unknown field.
        assert_eq!(HandshakePayload::parse(&hex("0801")), Ok(HandshakePayload::default()));
    }

    #[test]
    fn thirty_two_bit_fields_refuse_larger_values() {
        for field in ["10", "18", "40"] {
            assert!(HandshakePayload::parse(&hex(&format!("0a06{field}8080808010"))).is_err());
            assert!(HandshakePayload::parse(&hex(&format!("0a06{field}ffffffff0f"))).is_ok());
        }
    }

    #[test]
    fn the_last_of_repeated_fields_wins() {
        let message = hex("0a041001 1002 0a021003");
        let payload = HandshakePayload::parse(&message).unwrap();
        assert_eq!(payload.initiator_index, 3);
    }
}

mod meta {
    use super::*;

    fn parse(text: &str) -> Result<Meta, Malformed> {
        Meta::parse(&hex(text))
    }

    #[test]
    fn queries_have_the_bytes_of_go_nebula() {
        let v1 = Meta::new(MetaKind::HostQuery, Version::V1, Some(ip("10.77.0.2")));
        assert_eq!(v1.encode().unwrap(), hex("080112050882 80b452"));
        assert_eq!(Meta::parse(&v1.encode().unwrap()), Ok(v1));
        let v2 = Meta::new(MetaKind::HostQuery, Version::V2, Some(ip("10.77.9.9")));
        assert_eq!(v2.encode().unwrap(), hex("0801120a3208108992b4d2f0ff3f"));
        assert_eq!(Meta::parse(&v2.encode().unwrap()), Ok(v2));
    }

    #[test]
    fn a_version_2_acknowledgement_has_empty_details() {
        let ack = Meta::new(MetaKind::HostUpdateNotificationAck, Version::V2, None);
        assert_eq!(ack.encode().unwrap(), hex("080a1200"));
        assert_eq!(parse("080a1200"), Ok(ack));
    }

    #[test]
    fn version_1_cannot_name_an_ipv6_subject_and_skips_ipv6_relays() {
        let mut meta = Meta::new(MetaKind::HostQuery, Version::V1, Some(ip("fd00::1")));
        assert_eq!(meta.encode(), Err(SubjectNeedsV2(ip("fd00::1"))));
        meta.subject = Some(ip("10.0.0.1"));
        meta.relays = vec![ip("fd00::1"), ip("10.0.0.2")];
        let read = Meta::parse(&meta.encode().unwrap()).unwrap();
        assert_eq!(read.relays, [ip("10.0.0.2")]);
    }

    #[test]
    fn relays_are_read_packed_and_unpacked_and_from_both_fields() {
        let meta = parse("0802 1210 2a020102 2803 3a08108992b4d2f0ff3f").unwrap();
        assert_eq!(meta.relays, [ip("0.0.0.1"), ip("0.0.0.2"), ip("0.0.0.3"), ip("10.77.9.9")]);
    }

    #[test]
    fn lists_are_cut_and_no_family_starves_the_other() {
        for (ipv4, ipv6, left) in [
            (30, 30, (12, 12)),
            (30, 3, (21, 3)),
            (3, 30, (3, 21)),
            (30, 0, (24, 0)),
            (0, 30, (0, 24)),
            (11, 11, (11, 11)),
        ] {
            let mut meta = Meta::new(MetaKind::HostQueryReply, Version::V2, Some(ip("10.0.0.1")));
            meta.endpoints.extend((0..ipv6).map(|n| SocketAddr::new(ip(&format!("2001:db8::{n}")), 4242)));
            meta.endpoints.extend((0..ipv4).map(|n| SocketAddr::from(([192, 0, 2, n], 4242))));
            meta.relays.extend((0..30).map(|n| IpAddr::from([10, 0, 1, n])));
            let read = Meta::parse(&meta.encode().unwrap()).unwrap();
            let (v4, v6): (Vec<SocketAddr>, Vec<SocketAddr>) =
                read.endpoints.iter().partition(|endpoint| endpoint.is_ipv4());
            assert_eq!((v4.len(), v6.len()), left, "of {ipv4} and {ipv6}");
            assert!(
                v4.iter().enumerate().all(|(n, at)| at.ip() == IpAddr::from([192, 0, 2, n as u8])),
                "the first ones"
            );
            assert_eq!(read.relays, meta.relays[..MAX_RELAYS]);
        }
    }

    #[test]
    fn the_largest_reply_fits_into_a_datagram_of_the_smallest_ipv6_path() {
        let mut meta =
            Meta::new(MetaKind::HostQueryReply, Version::V2, Some(ip("fd00:ffff:ffff:ffff:ffff:ffff:ffff:ffff")));
        let longest = ip("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff");
        meta.endpoints = vec![SocketAddr::new(longest, 65535); MAX_ENDPOINTS + 1];
        meta.relays = vec![longest; MAX_RELAYS];
        // A header and a tag, again for the relay, UDP and IPv6.
        let datagram = meta.encode().unwrap().len() + 2 * (16 + 16) + 8 + 40;
        assert_eq!(datagram, 1081);
        assert!(datagram <= 1280);
    }

    #[test]
    fn mapped_addresses_are_unmapped() {
        let mapped: SocketAddr = "[::ffff:192.0.2.1]:4242".parse().unwrap();
        let mut meta = Meta::new(MetaKind::HostUpdateNotification, Version::V2, None);
        meta.endpoints = vec![mapped];
        let read = Meta::parse(&meta.encode().unwrap()).unwrap();
        assert_eq!(read.endpoints, ["192.0.2.1:4242".parse().unwrap()]);
        // As a V6AddrPort: lo = 0xffff_c000_0201, port 4242.
        let read = parse("0803120d220b1081 84 80 80 fcff3f 189221").unwrap();
        assert_eq!(read.endpoints, ["192.0.2.1:4242".parse().unwrap()]);
    }

    #[test]
    fn details_are_needed_and_wrong_wire_types_refused() {
        assert!(parse("0801").is_err());
        assert!(parse("08011001").is_err());
        assert!(parse("0a001200").is_err());
        for details in ["0a00", "1001", "1a00", "2001", "3001", "3801", "2d00000000"] {
            assert!(parse(&format!("080112{:02x}{details}", details.len() / 2)).is_err(), "{details}");
        }
    }

    #[test]
    fn unused_and_unknown_kinds_are_kept_apart() {
        for kind in [0, 4, 6, 7, 8, 9, 11, 99] {
            assert_eq!(parse(&format!("08{kind:02x}1200")).unwrap().kind, MetaKind::Other(kind));
        }
    }

    #[test]
    fn ports_beyond_sixteen_bits_are_refused() {
        assert!(parse("080312081206080110808004").is_err());
        assert!(parse("08031208120608011 0ffff03").is_ok());
    }

    fn address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<Ipv4Addr>().prop_map(IpAddr::V4),
            any::<Ipv6Addr>().prop_map(|address| IpAddr::V6(address).to_canonical()),
        ]
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            kind in (0_u32..12).prop_map(MetaKind::from_number),
            subject in proptest::option::of(address()),
            v4 in proptest::collection::vec(any::<(Ipv4Addr, u16)>(), 0..10),
            v6 in proptest::collection::vec(any::<(Ipv6Addr, u16)>(), 0..10),
            relays in proptest::collection::vec(address(), 0..10),
        ) {
            let mut meta = Meta::new(kind, Version::V2, subject);
            meta.endpoints = v4.into_iter().map(SocketAddr::from).collect();
            meta.endpoints.extend(v6.into_iter().filter(|(ip, _)| ip.to_ipv4_mapped().is_none()).map(SocketAddr::from));
            meta.relays = relays;
            let written = meta.encode().unwrap();
            prop_assert_eq!(Meta::parse(&written), Ok(meta.clone()));
            meta.version = Version::V1;
            if let (Some(IpAddr::V4(subject)), Ok(written)) = (meta.subject, meta.encode())
                && !subject.is_unspecified()
            {
                meta.relays.retain(IpAddr::is_ipv4);
                prop_assert_eq!(Meta::parse(&written), Ok(meta));
            }
        }
    }
}

mod control {
    use super::*;

    #[test]
    fn messages_have_the_bytes_of_go_nebula() {
        let request = Control {
            kind: ControlKind::CreateRelayRequest,
            version: Version::V2,
            initiator_index: 0x0bad_cafe,
            responder_index: 0,
            from: ip("10.77.0.3"),
            to: ip("10.77.9.9"),
        };
        let bytes = hex("080110fe95b75d3208108992b4d2f0ff3f3a08108380b4d2f0ff3f");
        assert_eq!(request.encode().unwrap(), bytes);
        assert_eq!(Control::parse(&bytes), Ok(request));
    }

    #[test]
    fn old_fields_win_over_new_ones() {
        let old = Control {
            kind: ControlKind::CreateRelayResponse,
            version: Version::V1,
            initiator_index: 1,
            responder_index: 2,
            from: ip("10.0.0.1"),
            to: ip("10.0.0.2"),
        };
        let mut bytes = old.encode().unwrap();
        bytes.extend_from_slice(&hex("3208108992b4d2f0ff3f3a08108380b4d2f0ff3f"));
        assert_eq!(Control::parse(&bytes), Ok(old));
    }

    #[test]
    fn both_addresses_are_needed() {
        assert!(Control::parse(&hex("080110 01 2001")).is_err());
        assert!(Control::parse(&hex("08011001")).is_err());
        assert!(Control::parse(&hex("080110013208108992b4d2f0ff3f")).is_err());
    }

    #[test]
    fn version_1_cannot_name_ipv6() {
        let control = Control {
            kind: ControlKind::CreateRelayRequest,
            version: Version::V1,
            initiator_index: 1,
            responder_index: 0,
            from: ip("10.0.0.1"),
            to: ip("fd00::1"),
        };
        assert_eq!(control.encode(), Err(SubjectNeedsV2(ip("fd00::1"))));
    }
}

/// Bytes that resemble protobuf often enough to get past the first field.
fn nearly_protobuf() -> impl Strategy<Value = Vec<u8>> {
    let field = (0_u8..9, prop_oneof![Just(0_u8), Just(2), any::<u8>()], proptest::collection::vec(any::<u8>(), 0..12))
        .prop_map(|(number, wire_type, mut value)| {
            if wire_type & 7 == 2 {
                value.insert(0, value.len() as u8);
            }
            value.insert(0, number << 3 | wire_type & 7);
            value
        });
    let fields = proptest::collection::vec(field, 0..8).prop_map(|fields| fields.concat());
    (fields, any::<bool>()).prop_map(|(fields, nested)| {
        if nested && fields.len() < 128 {
            let mut message = vec![0x08, 0x01, 0x12, fields.len() as u8];
            message.extend_from_slice(&fields);
            message
        } else {
            fields
        }
    })
}

proptest! {
    #[test]
    fn any_bytes_parse_or_are_refused(bytes in prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        nearly_protobuf(),
    ]) {
        let _ = HandshakePayload::parse(&bytes);
        let _ = Control::parse(&bytes);
        if let Ok(meta) = Meta::parse(&bytes) {
            prop_assert!(meta.endpoints.len() <= MAX_ENDPOINTS && meta.relays.len() <= MAX_RELAYS);
        }
    }
}
