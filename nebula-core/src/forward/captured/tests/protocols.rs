//! Fragments, ICMP errors, SCTP, and protocols without ports.

use super::*;

#[test]
fn fragments_follow_the_first_in_both_directions() {
    for v6 in [false, true] {
        let [mut a, mut b] = captured(DIRECTORY);
        let [client, service, server] = ends(v6);
        let whole = Recipe { payload: vec![3; 64], ..Recipe::new(SegmentKind::Udp, v6) };
        let part = |offset: u16, more| Recipe { fragment: Some((77, offset, more)), ..whole.clone() };
        let later = |from, to| part(9, false).build(from, to);
        assert_eq!(
            a.send(&later(client, service), Offload::default()),
            Verdict::Drop(DropReason::FragmentWithoutFirst),
            "it comes too early"
        );
        assert_eq!(a.send(&part(0, true).build(client, service), Offload::default()), Verdict::Transmit);
        assert_eq!(a.send(&later(client, service), Offload::default()), Verdict::Transmit);
        assert_eq!(carry(&mut a, &mut b), [part(0, true).build(client, server), later(client, server)]);
        for packet in [part(0, true).build(server, client), later(server, client)] {
            assert_eq!(b.send(&packet, Offload::default()), Verdict::Transmit);
        }
        assert_eq!(carry(&mut b, &mut a), [part(0, true).build(service, client), later(service, client)]);
        a.now += Duration::from_secs(31);
        assert_eq!(
            a.send(&later(client, service), Offload::default()),
            Verdict::Drop(DropReason::FragmentWithoutFirst),
            "it comes too late"
        );
    }
}

/// An SCTP packet with a heartbeat.
fn sctp(from: SocketAddr, to: SocketAddr, payload: usize, has_sum: bool) -> Vec<u8> {
    let mut body = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    body.extend([1, 2, 3, 4, 0, 0, 0, 0, 4, 0]);
    body.extend(((payload + 4) as u16).to_be_bytes());
    body.resize(body.len() + payload, 5);
    let sum = if has_sum { naive_crc(&body) } else { 0 };
    body[8..12].copy_from_slice(&sum.to_le_bytes());
    with_header(protocol::SCTP, from.ip(), to.ip(), &body)
}

/// An IP packet of any protocol.
fn with_header(protocol: u8, from: IpAddr, to: IpAddr, body: &[u8]) -> Vec<u8> {
    // An ICMP error is a packet with any body: its protocol and, in IPv4, the header's sum are then made right.
    let mut packet = error(from, to, &[]);
    let header = if from.is_ipv4() { 20 } else { 40 };
    packet.truncate(header);
    packet.extend(body);
    if from.is_ipv4() {
        packet[2..4].copy_from_slice(&((header + body.len()) as u16).to_be_bytes());
        packet[9] = protocol;
        finish_ipv4_header(&mut packet[..header]);
    } else {
        packet[4..6].copy_from_slice(&(body.len() as u16).to_be_bytes());
        packet[6] = protocol;
    }
    packet
}

#[test]
fn sctp_reaches_a_service_with_a_right_checksum_and_without_one() {
    for (v6, payload, has_sum) in [(false, 60, true), (false, 1200, true), (true, 61, true), (true, 8, false)] {
        let [mut a, mut b] = captured(DIRECTORY);
        let [client, service, server] = ends(v6);
        for _ in 0..2 {
            assert_eq!(a.send(&sctp(client, service, payload, has_sum), Offload::default()), Verdict::Transmit);
            assert_eq!(carry(&mut a, &mut b), [sctp(client, server, payload, has_sum)]);
            assert_eq!(b.send(&sctp(server, client, payload, has_sum), Offload::default()), Verdict::Transmit);
            assert_eq!(carry(&mut b, &mut a), [sctp(service, client, payload, has_sum)]);
        }
        assert_eq!(a.lane.counters().get(Counter::TranslatedFlows), 1);
        // The server's kernel has no SCTP, and quotes what came.
        let refusal = error(server.ip(), client.ip(), &sctp(client, server, payload, has_sum)[..60]);
        assert_eq!(b.send(&refusal, Offload::default()), Verdict::Transmit);
        let [seen] = &carry(&mut b, &mut a)[..] else { panic!("no error") };
        let header = if v6 { 40 } else { 20 };
        let quoted = seen.len() - 60;
        assert_eq!(seen[quoted + header..][..4], [40_000_u16.to_be_bytes(), 80_u16.to_be_bytes()].concat());
        assert_eq!(naive_sum_of_error(seen, v6), 0xffff);
    }
}

/// 0xffff if the sum of an ICMP error is right.
fn naive_sum_of_error(packet: &[u8], v6: bool) -> u16 {
    if v6 {
        let length = (packet.len() - 40) as u32;
        naive_sum(&[&packet[8..40], &length.to_be_bytes(), &[0, 0, 0, 58], &packet[40..]])
    } else {
        naive_sum(&[&packet[20..]])
    }
}

#[test]
fn an_sctp_packet_in_fragments_reaches_a_pod_but_no_service() {
    let [client, service, server] = ends(false);
    for (to, verdict) in [(service, Verdict::Drop(DropReason::BadPacket)), (server, Verdict::Transmit)] {
        let [mut a, _] = captured(DIRECTORY);
        let mut packet = sctp(client, to, 100, true);
        packet[6] = 0x20;
        finish_ipv4_header(&mut packet[..20]);
        assert_eq!(a.send(&packet, Offload::default()), verdict);
    }
}

#[test]
fn protocols_without_ports_go_to_pods_as_they_are_and_to_no_service() {
    const GRE: u8 = 47;
    const ESP: u8 = 50;
    for (v6, number) in [(false, GRE), (false, ESP), (false, protocol::ICMP), (true, GRE), (true, ESP)] {
        let [mut a, mut b] = captured(DIRECTORY);
        b.forwarder.set_policy(policy(2, Policy { inbound: vec![Rule::any()], ..Policy::default() }));
        let [client, service, server] = ends(v6);
        // An echo request to ICMP.
        let body = [8, 0, 0x80, 0xbe, 0, 9, 0, 1, 0x6e, 0x37, 0, 0];
        let packet = |to: SocketAddr| with_header(number, client.ip(), to.ip(), &body);
        for _ in 0..2 {
            assert_eq!(a.send(&packet(server), Offload::default()), Verdict::Transmit, "{number}");
            assert_eq!(carry(&mut a, &mut b), [packet(server)]);
        }
        let refused = Verdict::Drop(DropReason::Refused);
        assert_eq!(a.send(&packet(service), Offload::default()), refused, "{number}: a Service has ports only");
    }
}

#[test]
fn fragments_that_bypass_bypass_together() {
    let [mut a, _] = captured(DIRECTORY);
    let [client, ..] = ends(false);
    let to: SocketAddr = "10.1.0.9:53".parse().unwrap();
    let recipe = |offset, more| Recipe { fragment: Some((5, offset, more)), ..Recipe::new(SegmentKind::Udp, false) };
    for packet in [recipe(0, true).build(client, to), recipe(2, false).build(client, to)] {
        assert_eq!(a.send(&packet, Offload::default()), Verdict::Bypass);
    }
    // Nothing is known about it any more.
    a.forwarder.set_directory(Some(Arc::new(Small { version: 2, is_clear: false, ..DIRECTORY })));
    assert_eq!(a.send(&recipe(3, false).build(client, to), Offload::default()), Verdict::Punt);
}

#[test]
fn errors_are_about_the_flow_as_each_side_knows_it() {
    for v6 in [false, true] {
        let [mut a, mut b] = captured(DIRECTORY);
        let [client, service, server] = ends(v6);
        let recipe = Recipe::new(SegmentKind::Udp, v6);
        assert_eq!(a.send(&recipe.build(client, service), Offload::default()), Verdict::Transmit);
        carry(&mut a, &mut b);
        // The server's kernel refuses the datagram.
        let refusal = error(server.ip(), client.ip(), &recipe.build(client, server));
        assert_eq!(b.send(&refusal, Offload::default()), Verdict::Transmit);
        let seen = error(service.ip(), client.ip(), &recipe.build(client, service));
        assert_eq!(carry(&mut b, &mut a), [seen]);
        // The client's kernel refuses an answer.
        assert_eq!(b.send(&recipe.build(server, client), Offload::default()), Verdict::Transmit);
        carry(&mut b, &mut a);
        let refusal = error(client.ip(), service.ip(), &recipe.build(service, client));
        assert_eq!(a.send(&refusal, Offload::default()), Verdict::Transmit);
        let seen = error(client.ip(), server.ip(), &recipe.build(server, client));
        assert_eq!(carry(&mut a, &mut b), [seen]);
        // An error about a flow that nobody has.
        let other = SocketAddr::new(client.ip(), 1);
        let forged = error(client.ip(), service.ip(), &recipe.build(service, other));
        assert_eq!(a.send(&forged, Offload::default()), Verdict::Drop(DropReason::Refused));
        assert!(a.lane.deliveries().is_empty(), "errors are never answered");
    }
}
