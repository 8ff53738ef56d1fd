//! Hosts find out how large a packet each path carries, and tell who sends larger ones.

use std::time::Duration;

use nebula_cert::Version;
use nebula_core::simulator::{HostId, HostSpec, Link, SimNet};
use nebula_core::{DropReason, Part, PostQuantum, Verdict};

use crate::packets::{ICMP, ICMPV6, SYN, TCP, UDP, ip, tcp_segment};

const SECOND: Duration = Duration::from_secs(1);
const UDP_HEADERS: usize = 28;

/// Two hosts with devices of this MTU that know each other, on paths that carry IP packets of `path` bytes and say
/// nothing about larger ones.
fn hosts(seed: u64, device: u16, path: usize) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    net.set_link(Link::carrying(path));
    // The messages of ML-KEM are longer, and nothing on this path tells its host.
    net.set_post_quantum(if path < 1280 { PostQuantum::Off } else { PostQuantum::Prefer });
    let spec = |name| {
        HostSpec::new(name)
            .networks(if name == "a" { &["10.42.0.1/16", "fd42::1/64"] } else { &["10.42.0.2/16", "fd42::2/64"] })
            .config(move |config| config.path_mtu = Some(device))
    };
    let [a, b] = ["a", "b"].map(|name| net.add(spec(name)));
    net.introduce(a, b);
    net.introduce(b, a);
    (net, a, b)
}

fn mtu(net: &SimNet, host: HostId, peer: HostId) -> Option<u16> {
    net.tunnels_to(host, peer).into_iter().find(|tunnel| tunnel.primary)?.path_mtu
}

/// Sends an overlay packet of this size, which must not be fragmented.
fn send(net: &mut SimNet, from: HostId, to: HostId, size: usize) -> Verdict {
    net.send_udp(from, to, (9, 9), &vec![7; size - UDP_HEADERS])
}

/// Small packets, `rate` a second.
fn talk(net: &mut SimNet, from: HostId, to: HostId, time: Duration, rate: u32) {
    for _ in 0..time.as_secs() as u32 * rate {
        let _verdict = send(net, from, to, 100);
        net.run_for(SECOND / rate);
    }
}

#[test]
fn a_black_hole_is_found_in_half_a_second_and_the_largest_packet_that_fits_arrives() {
    for (seed, path, device) in
        [(1, 1200, 1300), (2, 1280, 1300), (3, 1420, 1440), (4, 9000, 9100), (5, 1200, 9000), (6, 1337, 1400)]
    {
        let (mut net, a, b) = hosts(seed, device, path);
        net.ping(a, b).until_delivered();
        net.run_for(SECOND / 2);
        let known = mtu(&net, a, b).expect("a path MTU");
        let best = path as u16 - 60;
        assert!((best - 16..=best).contains(&known), "{known} of {best}");
        let received = net.payloads(b, 9).len();
        assert_eq!(send(&mut net, a, b, known.into()), Verdict::Transmit);
        assert_eq!(send(&mut net, a, b, usize::from(known) + 1), Verdict::Drop(DropReason::TooBig));
        net.run_for(SECOND);
        assert_eq!(net.payloads(b, 9).len(), received + 1, "{}", net.diagram());
        assert_eq!(net.counter(a, "dropped_out_too_big"), 1);
    }
}

#[test]
fn a_path_that_carries_everything_costs_a_question_and_a_probe_and_jumbo_frames_are_used() {
    for (seed, device) in [(1, 1300), (2, 8900)] {
        let (mut net, a, b) = hosts(seed, device, 9000);
        net.ping(a, b).until_delivered();
        net.run_for(60 * SECOND);
        assert_eq!((mtu(&net, a, b), net.counter(a, "path_probes_out")), (Some(device), 2));
        assert_eq!(send(&mut net, a, b, device.into()), Verdict::Transmit);
        net.run_for(SECOND);
        assert_eq!(net.payloads(b, 9).len(), 1);
    }
}

#[test]
fn a_busy_path_to_the_same_program_is_tried_with_jumbo_frames_and_one_to_go_is_not() {
    for (seed, path, found) in [(1, 9000, 8940), (2, 4000, 3940), (3, 1500, 1300)] {
        let (mut net, a, b) = hosts(seed, 1300, path);
        net.ping(a, b).until_delivered();
        talk(&mut net, a, b, 5 * SECOND, 100);
        assert_eq!(mtu(&net, a, b), Some(found));
    }
    let mut net = SimNet::new(4);
    net.set_link(Link::carrying(9000));
    let spec = |name, network: &'static str| {
        HostSpec::new(name).networks(&[network]).config(|config| config.path_mtu = Some(1300))
    };
    let (a, go) = (net.add(spec("a", "10.42.0.1/16")), net.add(spec("go", "10.42.0.2/16").old_go()));
    net.introduce(a, go);
    net.introduce(go, a);
    net.ping(a, go).until_delivered();
    talk(&mut net, a, go, 5 * SECOND, 100);
    assert!(mtu(&net, a, go).is_none_or(|mtu| mtu <= 1300));
}

#[test]
fn the_sender_of_a_packet_that_does_not_fit_is_told_its_size() {
    let (mut net, a, b) = hosts(7, 1300, 1200);
    net.ping(a, b).until_delivered();
    net.run_for(SECOND);
    let _verdict = send(&mut net, a, b, 1200);
    let answer = net.packets(a).last().expect("an answer").clone();
    assert_eq!((answer[9], &answer[20..22], &answer[26..28]), (ICMP, &[3, 4][..], &1140_u16.to_be_bytes()[..]));
    assert_eq!(answer[28..32], [0x45, 0, 0x04, 0xb0], "it quotes the packet");
    // IPv6 knows nothing below 1280 bytes.
    let from = "fd42::1".parse().unwrap();
    let large = ip(from, "fd42::2".parse().unwrap(), UDP, &[0; 1260]);
    assert_eq!(net.send_packet(a, &large), Verdict::Drop(DropReason::TooBig));
    let answer = net.packets(a).last().unwrap();
    assert_eq!((answer[6], &answer[40..42], &answer[44..48]), (ICMPV6, &[2, 0][..], &1280_u32.to_be_bytes()[..]));
    let least = ip(from, "fd42::2".parse().unwrap(), UDP, &[0; 1240]);
    assert_eq!(net.send_packet(a, &least), Verdict::Transmit, "its sender cannot send less");
}

#[test]
fn a_packet_that_may_be_fragmented_is_sent_and_its_sender_told() {
    let (mut net, a, b) = hosts(8, 1300, 1200);
    net.ping(a, b).until_delivered();
    net.run_for(SECOND);
    let packet = ip(net.overlay(a), net.overlay(b), UDP, &[0; 1200]);
    assert_eq!(net.send_packet(a, &packet), Verdict::Transmit);
    assert_eq!((net.counter(a, "too_big_answered"), net.counter(a, "dropped_out_too_big")), (1, 0));
}

#[test]
fn connections_over_a_narrow_path_announce_smaller_segments_in_both_directions() {
    let (mut net, a, b) = hosts(9, 1300, 1200);
    net.edit_config(b, |config| config.path_mtu = None);
    net.restart(b);
    net.ping(a, b).until_delivered();
    net.run_for(SECOND);
    for (from, to) in [(a, b), (b, a)] {
        let packet = opening(&net, from, to, 40_000);
        assert_eq!(net.send_packet(from, &packet), Verdict::Transmit);
        net.run_for(SECOND);
        assert_eq!(announced(&net, to), [1100]);
    }
    assert_eq!(net.counter(a, "segment_size_lowered"), 2);
}

/// A packet that opens a connection and announces segments of 1260 bytes.
fn opening(net: &SimNet, from: HostId, to: HostId, port: u16) -> Vec<u8> {
    let mut syn = tcp_segment((port, 80), SYN, (1, 0), &[]);
    syn[12] = 6 << 4;
    syn.splice(20..20, [2, 4, 0x04, 0xec]);
    ip(net.overlay(from), net.overlay(to), TCP, &syn)
}

/// The segment sizes that connections announced to a host.
fn announced(net: &SimNet, host: HostId) -> Vec<u16> {
    let openings = net.packets(host).iter().filter(|packet| packet.len() == 44 && packet[9] == TCP);
    openings.map(|packet| u16::from_be_bytes([packet[42], packet[43]])).collect()
}

#[test]
fn connections_that_are_opened_before_the_path_is_known_wait_for_it() {
    let round_trip = Duration::from_millis(10);
    for (seed, path, size, within) in [(17, 1500, 1260, 3 * round_trip), (18, 1200, 1100, SECOND / 2)] {
        let (mut net, a, b) = hosts(seed, 1300, path);
        for port in 1..=64 {
            let packet = opening(&net, a, b, port);
            let _verdict = net.send_packet(a, &packet);
            net.run_for(Duration::from_micros(10));
        }
        net.run_for(2 * round_trip);
        let fast = Duration::from_millis(1);
        net.run_for(within + fast);
        assert_eq!(announced(&net, b), [size; 64], "an ordinary burst fits");
        let packet = opening(&net, a, b, 65);
        assert_eq!(net.send_packet(a, &packet), Verdict::Transmit);
        net.run_for(SECOND);
        assert_eq!(announced(&net, b), [size; 65]);
    }
}

#[test]
fn a_connection_to_a_far_peer_does_not_wait_and_what_does_not_fit_is_answered_once_that_is_known() {
    let (mut net, a, b) = hosts(20, 1300, 1200);
    let latency = Duration::from_millis(40);
    net.set_link(Link { latency, ..Link::carrying(1200) });
    net.ping(a, b).until_delivered();
    let packet = opening(&net, a, b, 1);
    assert_eq!(net.send_packet(a, &packet), Verdict::Transmit);
    net.run_for(latency + Duration::from_millis(1));
    assert_eq!(announced(&net, b), [1260]);
    net.run_for(SECOND);
    assert_eq!(mtu(&net, a, b), Some(1140));
    assert_eq!(send(&mut net, a, b, 1300), Verdict::Drop(DropReason::TooBig));
    assert_eq!(net.counter(a, "too_big_answered"), 1);
    let packet = opening(&net, a, b, 2);
    assert_eq!(net.send_packet(a, &packet), Verdict::Transmit);
    net.run_for(SECOND);
    assert_eq!(announced(&net, b), [1260, 1100]);
}

#[test]
fn a_connection_to_a_peer_that_answers_no_probes_is_opened_all_the_same() {
    let (mut net, a, b) = hosts(19, 1300, 300);
    net.set_link(Link::default());
    net.ping(b, a).until_delivered();
    net.set_link(Link::carrying(300));
    let packet = opening(&net, a, b, 1);
    assert_eq!(net.send_packet(a, &packet), Verdict::Punt);
    net.run_for(SECOND);
    assert_eq!((announced(&net, b), mtu(&net, a, b)), (vec![1260], None));
}

#[test]
fn a_host_that_roams_to_a_smaller_path_notices_within_a_second_and_its_peer_too() {
    let (mut net, a, b) = hosts(10, 1300, 1500);
    net.ping(a, b).until_delivered();
    talk(&mut net, a, b, 3 * SECOND, 10);
    assert_eq!(mtu(&net, a, b), Some(1300));
    net.set_link(Link::carrying(1200));
    net.roam_to(b, "198.51.100.99:999");
    talk(&mut net, a, b, SECOND, 10);
    talk(&mut net, b, a, SECOND, 10);
    assert_eq!([mtu(&net, a, b), mtu(&net, b, a)], [Some(1140), Some(1140)]);
}

#[test]
fn a_path_that_shrinks_is_noticed_in_three_seconds_and_one_that_grows_in_a_minute() {
    let (mut net, a, b) = hosts(11, 1300, 1500);
    net.ping(a, b).until_delivered();
    talk(&mut net, a, b, 12 * SECOND, 500);
    net.set_link(Link::carrying(1280));
    talk(&mut net, a, b, 3 * SECOND, 500);
    assert_eq!(mtu(&net, a, b), Some(1220));
    net.set_link(Link::default());
    talk(&mut net, a, b, 60 * SECOND, 2);
    assert_eq!(mtu(&net, a, b), Some(1300));
}

#[test]
fn a_connection_that_stalls_on_a_path_that_shrank_goes_on_within_fifteen_seconds() {
    let (mut net, a, b) = hosts(21, 1300, 1500);
    net.ping(a, b).until_delivered();
    for _ in 0..8 {
        talk(&mut net, a, b, SECOND, 100);
        talk(&mut net, b, a, SECOND, 50);
    }
    net.set_link(Link::carrying(1280));
    // One segment is repeated, less and less often. The pauses of TCP itself grow beyond 3.2 s.
    let mut waited = Duration::ZERO;
    for wait in [200, 400, 800, 1600, 3200, 3200, 3200, 2400].map(Duration::from_millis) {
        net.run_for(wait);
        waited += wait;
        if send(&mut net, a, b, 1300) == Verdict::Drop(DropReason::TooBig) {
            break;
        }
    }
    assert_eq!(mtu(&net, a, b), Some(1220), "after {waited:?}");
}

/// A sender that repeats the large packet with which it began, at the pauses of TCP. Returns when it is told to send
/// less.
fn repeats(net: &mut SimNet, from: HostId, to: HostId, mut meanwhile: impl FnMut(&mut SimNet)) -> Duration {
    let (start, mut pause) = (net.elapsed(), Duration::from_millis(200));
    for _ in 0..10 {
        let _verdict = send(net, from, to, 1300);
    }
    while net.elapsed() < start + 60 * SECOND {
        let next = net.elapsed() + pause;
        while net.elapsed() < next {
            meanwhile(net);
            net.run_for(SECOND / 10);
        }
        pause *= 2;
        if send(net, from, to, 1300) == Verdict::Drop(DropReason::TooBig) {
            return net.elapsed() - start;
        }
    }
    panic!("nobody tells the sender")
}

#[test]
fn a_download_that_begins_on_a_path_that_shrank_goes_on_within_seven_seconds() {
    let nothing = |_: &mut SimNet| {};
    for (seed, idle) in [(31, 0), (32, 3), (33, 60), (34, 3600)] {
        let (mut net, a, b) = hosts(seed, 1300, 1500);
        net.ping(a, b).until_delivered();
        talk(&mut net, b, a, 5 * SECOND, 2);
        net.run_for(idle * SECOND);
        net.set_link(Link::carrying(1280));
        // The request.
        let _verdict = send(&mut net, b, a, 100);
        net.run_for(SECOND / 100);
        let told = repeats(&mut net, a, b, nothing);
        assert!(told <= 7 * SECOND, "after {told:?}, idle for {idle} s");
        assert_eq!(mtu(&net, a, b), Some(1220));
    }
}

#[test]
fn a_download_goes_on_within_seven_seconds_where_other_packets_in_the_tunnel_are_answered() {
    for (seed, idle) in [(35, 0), (36, 3), (37, 3600)] {
        let (mut net, a, b) = hosts(seed, 1300, 1500);
        net.ping(a, b).until_delivered();
        talk(&mut net, a, b, 20 * SECOND, 2);
        net.run_for(idle * SECOND);
        net.set_link(Link::carrying(1280));
        let told = repeats(&mut net, a, b, |net| {
            let _verdict = (send(net, a, b, 100), send(net, b, a, 100));
        });
        assert!(told <= 7 * SECOND, "after {told:?}, idle for {idle} s");
    }
}

#[test]
fn an_idle_tunnel_sends_no_probes_and_a_busy_one_few() {
    let (mut net, a, b) = hosts(12, 1300, 1200);
    net.ping(a, b).until_delivered();
    net.run_for(5 * SECOND);
    let before = net.counter(a, "path_probes_out");
    net.run_for(3600 * SECOND);
    assert_eq!(net.counter(a, "path_probes_out"), before);
    talk(&mut net, a, b, 60 * SECOND, 100);
    let probes = net.counter(a, "path_probes_out") - before;
    assert!((1..=60).contains(&probes), "{probes} for 6000 packets");
}

#[test]
fn a_relayed_path_is_measured_with_its_larger_overhead_and_again_when_it_becomes_direct() {
    let mut net = SimNet::new(13);
    net.set_link(Link::carrying(1280));
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(HostSpec::new("relay").lighthouse(lighthouse).config(|config| config.relay.am_relay = true));
    let at = net.overlay(relay);
    let client = |name| {
        HostSpec::new(name).lighthouse(lighthouse).config(move |config| {
            (config.relay.relays, config.path_mtu) = (vec![at], Some(1300));
        })
    };
    let [a, b] = ["a", "b"].map(|name| net.add(client(name)));
    net.cut(a, b);
    net.run_for(SECOND);
    net.ping(a, b).until_delivered();
    net.run_for(SECOND);
    assert_eq!(mtu(&net, a, b), Some(1280 - 60 - 32));
    net.heal(a, b);
    talk(&mut net, a, b, 30 * SECOND, 10);
    assert!(net.endpoint_of(a, b).is_some(), "{}", net.diagram());
    assert_eq!(mtu(&net, a, b), Some(1280 - 60));
}

#[test]
fn a_new_tunnel_by_the_same_path_begins_with_what_is_known() {
    let (mut net, a, b) = hosts(14, 1300, 1200);
    net.ping(a, b).until_delivered();
    net.run_for(SECOND);
    let old = net.tunnels_to(a, b)[0].local_index;
    let identity = net.renewed_identity(a, &[Version::V2]);
    net.control(a, |node, now| node.reconfigure(now, |config| config.identity = identity));
    for _ in 0..20 {
        net.ping(a, b).until_delivered();
        net.run_for(SECOND);
        let tunnels = net.tunnels_to(a, b);
        let primary = tunnels.iter().find(|tunnel| tunnel.primary).unwrap();
        assert_eq!(primary.path_mtu, Some(1140));
        if primary.local_index != old {
            return;
        }
    }
    panic!("no new tunnel");
}

#[test]
fn of_two_tunnels_between_hosts_that_called_each_other_one_is_used_although_both_were_examined() {
    for seed in 22..25 {
        let (mut net, a, b) = hosts(seed, 1300, 1500);
        let both_ways = |net: &mut SimNet, time: Duration| {
            for _ in 0..time.as_secs() * 600 {
                let _verdict = (send(net, a, b, 100), send(net, b, a, 100));
                net.run_for(SECOND / 600);
            }
        };
        both_ways(&mut net, 11 * SECOND);
        let primary = |net: &SimNet, host, peer| {
            let of = |tunnel: &nebula_core::TunnelStatus| (tunnel.local_index.0, tunnel.remote_index.0);
            net.tunnels_to(host, peer).iter().find(|tunnel| tunnel.primary).map(of).expect("a tunnel")
        };
        for _ in 0..20 {
            let [(ours, theirs), other] = [(a, b), (b, a)].map(|(host, peer)| primary(&net, host, peer));
            assert_eq!((theirs, ours), other, "seed {seed}: each uses the other's\n{}", net.diagram());
            both_ways(&mut net, SECOND);
        }
    }
}

#[test]
fn without_the_setting_no_probe_is_sent_and_a_reload_changes_that_in_both_directions() {
    let (mut net, a, b) = hosts(15, 1300, 1200);
    let set = |net: &mut SimNet, mtu| {
        let parts = net.control(a, |node, now| node.reconfigure(now, |config| config.path_mtu = mtu));
        assert_eq!(parts, [Part::PathMtu]);
    };
    set(&mut net, None);
    talk(&mut net, a, b, 3 * SECOND, 100);
    assert_eq!((mtu(&net, a, b), net.counter(a, "path_probes_out")), (None, 0));
    set(&mut net, Some(1300));
    talk(&mut net, a, b, SECOND, 100);
    assert_eq!(mtu(&net, a, b), Some(1140));
    set(&mut net, None);
    assert_eq!(send(&mut net, a, b, 1300), Verdict::Transmit);
    assert_eq!(mtu(&net, a, b), None);
}

#[test]
fn random_loss_is_not_taken_for_a_small_path() {
    let (mut net, a, b) = hosts(16, 1300, 1500);
    net.set_link(Link { loss: 10, ..Link::default() });
    net.ping(a, b).until_delivered();
    let (mut wrong, seconds) = (0, 600);
    for _ in 0..seconds {
        talk(&mut net, a, b, SECOND, 100);
        wrong += u32::from(mtu(&net, a, b).is_some_and(|mtu| mtu < 1300));
    }
    assert!(wrong < seconds / 10, "{wrong} of {seconds} s with too small a limit");
}
