//! ICMP errors belong to the flow of the packet that they quote.

use crate::packets;

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::firewall::{PortRange, Protocol, Rule};
use nebula_core::simulator::{HostId, HostSpec, SimNet};

const NETWORKS: [[&str; 2]; 3] =
    [["10.42.0.1/16", "fd42::1/64"], ["10.42.0.2/16", "fd42::2/64"], ["10.42.0.3/16", "fd42::3/64"]];

fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// `a` and `b` allow nothing but UDP to port 53, inbound and outbound; `c` is another peer of `a`.
fn pair(seed: u64) -> (SimNet, [HostId; 3]) {
    let mut net = SimNet::new(seed);
    let dns = || Rule { protocol: Protocol::Udp, port: PortRange::Range(53, 53), ..Rule::any() };
    let spec = |name: &str, n: usize| {
        HostSpec::new(name).networks(&NETWORKS[n]).config(move |config| {
            config.firewall.inbound = vec![dns()];
            config.firewall.outbound = vec![dns()];
        })
    };
    let b = net.add(spec("b", 1));
    let c = net.add(spec("c", 2).config(|config| config.firewall.outbound = vec![Rule::any()]));
    let a = net.add(spec("a", 0).knows(b).knows(c));
    for peer in ["10.42.0.2", "10.42.0.3"] {
        net.control(a, |node, now| node.connect(now, at(peer)));
    }
    net.run_for(Duration::from_secs(1));
    (net, [a, b, c])
}

fn addresses(v6: bool) -> (IpAddr, IpAddr) {
    let texts = if v6 { ["fd42::1", "fd42::2"] } else { ["10.42.0.1", "10.42.0.2"] };
    (at(texts[0]), at(texts[1]))
}

/// "Fragmentation needed" of IPv4, "packet too big" of IPv6.
fn too_big(from: IpAddr, to: IpAddr, quoted: &[u8]) -> Vec<u8> {
    let (kind, code) = if from.is_ipv4() { (3, 4) } else { (2, 0) };
    packets::icmp(from, to, kind, code, [0, 0, 4, 0], quoted)
}

fn arrives(net: &mut SimNet, from: HostId, to: HostId, packet: &[u8]) -> bool {
    let before = net.packets(to).len();
    let _verdict = net.send_packet(from, packet);
    net.run_for(Duration::from_millis(100));
    net.packets(to)[before..].iter().any(|received| received == packet)
}

#[test]
fn an_error_about_a_known_flow_passes_both_ends_without_a_rule() {
    let (mut net, [a, b, _]) = pair(1);
    for v6 in [false, true] {
        let (from, to) = addresses(v6);
        let query = packets::udp(from, to, (5000, 53), b"query");
        assert!(arrives(&mut net, a, b, &query));
        assert!(arrives(&mut net, b, a, &too_big(to, from, &query)), "{}", net.diagram());
        // An error about the answer passes in the other direction, too.
        let answer = packets::udp(to, from, (53, 5000), b"answer");
        assert!(arrives(&mut net, b, a, &answer));
        assert!(arrives(&mut net, a, b, &too_big(from, to, &answer)), "{}", net.diagram());
    }
}

#[test]
fn an_error_about_an_unknown_flow_is_dropped_where_it_is_sent_and_where_it_arrives() {
    let (mut net, [a, b, c]) = pair(2);
    for v6 in [false, true] {
        let (from, to) = addresses(v6);
        let never_sent = packets::udp(from, to, (5001, 53), b"query");
        assert!(!arrives(&mut net, b, a, &too_big(to, from, &never_sent)));
        // c lets everything out, so a has to refuse it.
        let third = if v6 { at("fd42::3") } else { at("10.42.0.3") };
        let never_sent = packets::udp(from, third, (5001, 53), b"query");
        assert!(!arrives(&mut net, c, a, &too_big(third, from, &never_sent)));
    }
    assert_eq!(net.counter(b, "dropped_out_no_rule"), 2);
    assert_eq!(net.counter(a, "dropped_in_no_rule"), 2);
}

#[test]
fn a_peer_cannot_send_errors_about_the_flows_of_another() {
    let (mut net, [a, b, c]) = pair(3);
    let (from, to) = addresses(false);
    let query = packets::udp(from, to, (5000, 53), b"query");
    assert!(arrives(&mut net, a, b, &query));
    assert!(!arrives(&mut net, c, a, &too_big(at("10.42.0.3"), from, &query)));
    assert!(arrives(&mut net, b, a, &too_big(to, from, &query)));
}

#[test]
fn an_error_neither_keeps_a_flow_alive_nor_opens_one() {
    let (mut net, [a, b, c]) = pair(4);
    let (from, to) = addresses(false);
    let query = packets::udp(from, to, (5000, 53), b"query");
    assert!(arrives(&mut net, a, b, &query));
    for _ in 0..3 {
        net.run_for(Duration::from_secs(55));
        assert!(arrives(&mut net, b, a, &too_big(to, from, &query)));
    }
    net.run_for(Duration::from_secs(20));
    assert!(!arrives(&mut net, b, a, &too_big(to, from, &query)), "three minutes after the last packet of the flow");
    // An error that a rule let out does not let other errors in.
    let third = at("10.42.0.3");
    let quoted = packets::udp(from, third, (5000, 53), b"query");
    let _out = arrives(&mut net, c, a, &too_big(third, from, &quoted));
    let back = packets::udp(third, from, (53, 5000), b"answer");
    assert!(!arrives(&mut net, a, c, &too_big(from, third, &back)));
}

#[test]
fn a_rule_for_icmp_lets_every_error_in() {
    let (mut net, [a, b, _]) = pair(5);
    let icmp = || Rule { protocol: Protocol::Icmp, ..Rule::any() };
    for host in [a, b] {
        let policy =
            nebula_core::firewall::Policy { inbound: vec![icmp()], outbound: vec![icmp()], ..Default::default() };
        net.control(host, |node, now| node.reconfigure(now, |config| config.firewall = policy));
    }
    let (from, to) = addresses(true);
    let never_sent = packets::udp(from, to, (5001, 53), b"query");
    assert!(arrives(&mut net, b, a, &too_big(to, from, &never_sent)));
}

#[test]
fn errors_that_quote_nothing_useful_are_unrelated() {
    let (mut net, [a, b, _]) = pair(6);
    let (from, to) = addresses(false);
    let query = packets::udp(from, to, (5000, 53), b"query");
    assert!(arrives(&mut net, a, b, &query));
    for length in 0..24 {
        assert!(!arrives(&mut net, b, a, &too_big(to, from, &query[..length])), "{length} bytes of the packet");
    }
    assert!(arrives(&mut net, b, a, &too_big(to, from, &query[..28])), "what an old router sends");
    let redirect = packets::icmp(to, from, 5, 1, [10, 42, 0, 9], &query);
    assert!(!arrives(&mut net, b, a, &redirect), "a redirect would change routes");
    let turned = packets::udp(to, from, (5000, 53), b"query");
    assert!(!arrives(&mut net, b, a, &too_big(to, from, &turned)), "not a packet that a sent");
}

#[test]
fn new_rules_that_refuse_the_flow_refuse_errors_about_it() {
    let (mut net, [a, b, _]) = pair(7);
    let (from, to) = addresses(false);
    let query = packets::udp(from, to, (5000, 53), b"query");
    assert!(arrives(&mut net, a, b, &query));
    net.control(a, |node, now| {
        node.reconfigure(now, |config| config.firewall = nebula_core::firewall::Policy::default())
    });
    assert!(!arrives(&mut net, b, a, &too_big(to, from, &query)));
}
