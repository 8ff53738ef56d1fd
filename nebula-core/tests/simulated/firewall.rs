//! The packet filter at both ends of a tunnel.

use std::time::Duration;

use nebula_core::firewall::{Policy, PortRange, Protocol, Rule};
use nebula_core::simulator::{HostSpec, SimNet};

fn udp(port: u16) -> Rule {
    Rule { protocol: Protocol::Udp, port: PortRange::Range(port, port), ..Rule::any() }
}

#[test]
fn only_allowed_ports_are_reached_and_replies_come_back() {
    let mut net = SimNet::new(1);
    let b = net.add(HostSpec::new("b").config(|config| {
        config.firewall.inbound = vec![udp(53)];
        config.firewall.outbound = Vec::new();
    }));
    let a = net.add(HostSpec::new("a").knows(b).config(|config| config.firewall.inbound = Vec::new()));
    let _verdict = net.send_udp(a, b, (5000, 53), b"query");
    let _verdict = net.send_udp(a, b, (5000, 54), b"other port");
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.payloads(b, 53), [b"query"]);
    assert!(net.payloads(b, 54).is_empty());
    assert_eq!(net.counter(b, "dropped_in_no_rule"), 1);

    let _verdict = net.send_udp(b, a, (53, 5000), b"answer");
    let _verdict = net.send_udp(b, a, (53, 5001), b"not asked for");
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.payloads(a, 5000), [b"answer"], "neither side has a rule for it, but both saw the query");
    assert!(net.payloads(a, 5001).is_empty());
}

#[test]
fn rules_by_group_look_at_the_certificate() {
    let mut net = SimNet::new(2);
    let web_only = Rule { groups: vec!["web".to_owned()], ..Rule::default() };
    let b = net.add(HostSpec::new("b").config(move |config| config.firewall.inbound = vec![web_only]));
    let member = net.add(HostSpec::new("member").groups(&["web", "prod"]).knows(b));
    let other = net.add(HostSpec::new("other").groups(&["prod"]).knows(b));
    assert!(net.ping(member, b).is_answered_within(Duration::from_secs(1)));
    assert!(!net.ping(other, b).is_answered_within(Duration::from_secs(1)));
}

#[test]
fn new_rules_end_flows_that_they_do_not_allow() {
    let mut net = SimNet::new(3);
    let [a, b] = net.nodes(["a", "b"]);
    for _ in 0..3 {
        let _verdict = net.send_udp(a, b, (5000, 53), b"before");
        net.run_for(Duration::from_millis(100));
    }
    assert_eq!(net.payloads(b, 53).len(), 3);
    net.control(b, |node, now| node.reconfigure(now, |config| config.firewall = Policy::default()));
    let _verdict = net.send_udp(a, b, (5000, 53), b"after");
    net.run_for(Duration::from_millis(100));
    assert_eq!(net.payloads(b, 53).len(), 3);
}

#[test]
fn a_flow_survives_new_rules_that_still_allow_its_beginning() {
    let mut net = SimNet::new(4);
    let [a, b] = net.nodes(["a", "b"]);
    let outbound = |rules: &[Rule]| Policy { outbound: rules.to_vec(), ..Policy::default() };
    net.control(a, |node, now| node.reconfigure(now, |config| config.firewall = outbound(&[Rule::any()])));
    let _verdict = net.send_udp(a, b, (5000, 53), b"query");
    net.run_for(Duration::from_secs(1));
    for (rules, answers) in [(vec![Rule::any()], 1), (vec![udp(53)], 2), (vec![udp(54)], 2)] {
        net.control(a, |node, now| node.reconfigure(now, |config| config.firewall = outbound(&rules)));
        // No rule lets it in; only the flow does, and it is evaluated again.
        let _verdict = net.send_udp(b, a, (53, 5000), b"answer");
        net.run_for(Duration::from_secs(1));
        assert_eq!(net.payloads(a, 5000).len(), answers, "{rules:?}\n{}", net.diagram());
    }
}
