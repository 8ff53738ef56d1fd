//! Fragments and unusual headers: what the firewall cannot read does not pass by port.

use crate::packets;

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::firewall::{PortRange, Protocol, Rule};
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use packets::{TCP, UDP};

const NETWORKS: [[&str; 2]; 2] = [["10.42.0.1/16", "fd42::1/64"], ["10.42.0.2/16", "fd42::2/64"]];

fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn pair(seed: u64, inbound: Vec<Rule>) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    let b = net.add(HostSpec::new("b").networks(&NETWORKS[1]).config(move |config| config.firewall.inbound = inbound));
    let a = net.add(HostSpec::new("a").networks(&NETWORKS[0]).knows(b));
    net.control(a, |node, now| node.connect(now, at("10.42.0.2")));
    net.run_for(Duration::from_secs(1));
    (net, a, b)
}

fn arrives(net: &mut SimNet, from: HostId, to: HostId, packet: &[u8]) -> bool {
    let before = net.packets(to).len();
    let _verdict = net.send_packet(from, packet);
    net.run_for(Duration::from_millis(50));
    net.packets(to)[before..].iter().any(|received| received == packet)
}

fn dns() -> Rule {
    Rule { protocol: Protocol::Udp, port: PortRange::Range(53, 53), ..Rule::any() }
}

fn v6_fragment(more: u8, offset_units: u16, body: &[u8]) -> Vec<u8> {
    let offset = offset_units << 3 | u16::from(more);
    let header = [&[UDP, 0][..], &offset.to_be_bytes(), &[0, 0, 0, 9], body].concat();
    packets::ip(at("fd42::1"), at("fd42::2"), 44, &header)
}

#[test]
fn a_first_fragment_passes_by_its_port_and_later_ones_only_by_a_rule_for_fragments() {
    let fragments = Rule { port: PortRange::Fragment, ..Rule::any() };
    for (rules, later_pass) in [(vec![dns()], false), (vec![dns(), fragments], true)] {
        let (mut net, a, b) = pair(1, rules);
        let (from, to) = (at("10.42.0.1"), at("10.42.0.2"));
        let datagram = packets::udp_datagram((5000, 53), &[1; 120]);
        let more = 0x2000;
        assert!(arrives(&mut net, a, b, &packets::ip_fragment(from, to, UDP, more, &datagram[..64])));
        let second = packets::ip_fragment(from, to, UDP, more | 8, &datagram[64..96]);
        assert_eq!(arrives(&mut net, a, b, &second), later_pass);
        let last = packets::ip_fragment(from, to, UDP, 12, &datagram[96..]);
        assert_eq!(arrives(&mut net, a, b, &last), later_pass);
        assert!(arrives(&mut net, a, b, &v6_fragment(1, 0, &datagram[..64])));
        assert_eq!(arrives(&mut net, a, b, &v6_fragment(0, 8, &datagram[64..])), later_pass);
        let closed_port = packets::udp_datagram((5000, 54), &[1; 56]);
        assert!(!arrives(&mut net, a, b, &packets::ip_fragment(from, to, UDP, more, &closed_port)));
        assert!(!arrives(&mut net, a, b, &v6_fragment(1, 0, &closed_port)));
    }
}

#[test]
fn a_later_fragment_that_looks_like_an_open_port_does_not_pass_by_it() {
    let (mut net, a, b) = pair(2, vec![dns()]);
    let disguised = packets::udp_datagram((5000, 53), &[1; 56]);
    let (from, to) = (at("10.42.0.1"), at("10.42.0.2"));
    assert!(!arrives(&mut net, a, b, &packets::ip_fragment(from, to, UDP, 1, &disguised)));
    assert!(!arrives(&mut net, a, b, &v6_fragment(1, 1, &disguised)));
    assert_eq!(net.counter(b, "dropped_in_no_rule"), 2);
}

#[test]
fn an_unfragmented_flow_opens_nothing_for_fragments() {
    let (mut net, a, b) = pair(3, vec![dns()]);
    let (from, to) = (at("10.42.0.1"), at("10.42.0.2"));
    assert!(arrives(&mut net, a, b, &packets::udp(from, to, (5000, 53), b"whole")));
    assert!(!arrives(&mut net, a, b, &packets::ip_fragment(from, to, UDP, 8, &[1; 32])));
}

#[test]
fn ports_behind_known_extension_headers_are_found_and_others_are_a_protocol_of_their_own() {
    let (mut net, a, b) = pair(4, vec![dns()]);
    let (from, to) = (at("fd42::1"), at("fd42::2"));
    let datagram = packets::udp_datagram((5000, 53), b"query");
    for known in [0, 43, 60] {
        let header = [UDP, 0, 1, 4, 0, 0, 0, 0];
        let packet = packets::ip(from, to, known, &[&header[..], &datagram].concat());
        assert!(arrives(&mut net, a, b, &packet), "extension header {known}");
    }
    for unknown in [135, 139, 140, 253, 254, 50, 59, 132] {
        let header = [UDP, 0, 1, 4, 0, 0, 0, 0];
        let packet = packets::ip(from, to, unknown, &[&header[..], &datagram].concat());
        assert!(!arrives(&mut net, a, b, &packet), "next header {unknown}");
    }
    let mut endless = datagram;
    for _ in 0..9 {
        endless = [&[60, 0, 1, 4, 0, 0, 0, 0][..], &endless].concat();
    }
    assert!(!arrives(&mut net, a, b, &packets::ip(from, to, 60, &endless)));
    let cut_short = packets::ip(from, to, 60, &[UDP, 200, 0, 0, 0, 0, 0, 0]);
    assert!(!arrives(&mut net, a, b, &cut_short));
    assert_eq!(net.counter(a, "dropped_out_bad_packet"), 2);
}

#[test]
fn a_protocol_without_ports_passes_only_by_a_rule_for_any_protocol() {
    for (rules, passes) in
        [(vec![dns(), Rule { protocol: Protocol::Tcp, ..Rule::any() }], false), (vec![Rule::any()], true)]
    {
        let (mut net, a, b) = pair(5, rules);
        for (from, to) in [("10.42.0.1", "10.42.0.2"), ("fd42::1", "fd42::2")] {
            assert_eq!(arrives(&mut net, a, b, &packets::ip(at(from), at(to), 47, &[0; 16])), passes);
        }
    }
}

#[test]
fn a_tiny_fragment_that_hides_the_ports_is_refused() {
    let (mut net, a, b) = pair(6, vec![dns()]);
    let (from, to) = (at("10.42.0.1"), at("10.42.0.2"));
    let tiny = packets::ip_fragment(from, to, TCP, 0x2000, &[0, 53, 0]);
    assert!(!arrives(&mut net, a, b, &tiny));
    assert_eq!(net.counter(a, "dropped_out_bad_packet"), 1);
}
