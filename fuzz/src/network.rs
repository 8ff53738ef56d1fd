//! A list of operations played on a simulated network.

use std::time::Duration;

use nebula_core::firewall::{Policy, Rule};
use nebula_core::simulator::{HostSpec, Link, SimNet};

/// Three hosts, one of them a lighthouse; each byte pair is an operation. Nothing may panic, and once the network is healed
/// everybody reaches everybody.
pub fn node(data: &[u8]) {
    let mut net = SimNet::new(7);
    let lighthouse = net.add(HostSpec::new("l").am_lighthouse());
    let hosts = [
        lighthouse,
        net.add(HostSpec::new("a").lighthouse(lighthouse)),
        net.add(HostSpec::new("b").lighthouse(lighthouse)),
    ];
    let policy = Policy { inbound: vec![Rule::any()], outbound: vec![Rule::any()], ..Policy::default() };
    let mut moves = 0_u8;
    for operation in data.chunks_exact(2).take(64) {
        let (x, y) = (hosts[usize::from(operation[1] & 3) % 3], hosts[usize::from(operation[1] >> 2 & 3) % 3]);
        let amount = operation[1] >> 4;
        match operation[0] % 12 {
            0 | 1 if x != y => drop(net.send_udp(x, y, (1000, 2000), &[amount; 64])),
            2 => net.run_for(Duration::from_millis(u64::from(operation[1]) * 40)),
            3 if x != y => net.cut(x, y),
            4 if x != y => net.heal(x, y),
            5 if x != lighthouse => {
                moves += 1;
                net.move_to(x, &format!("203.0.113.{moves}:4242"));
            }
            6 => net.restart(x),
            7 => {
                let identity = net.renewed_identity(x, &[nebula_cert::Version::V2]);
                net.control(x, |node, now| node.set_identity(now, identity));
            }
            8 => net.control(x, |node, now| node.close_all(now)),
            9 => net.set_link(Link { loss: u32::from(amount) * 4, ..Link::default() }),
            10 => {
                let (from, to) = (net.underlay(x), net.underlay(y));
                net.inject(from, to, &operation.repeat(usize::from(amount) * 8));
            }
            11 => net.control(x, |node, _| node.set_firewall(policy.clone())),
            _ => {}
        }
    }
    net.set_link(Link::default());
    for x in hosts {
        for y in hosts {
            net.heal(x, y);
        }
    }
    // Longer than a lighthouse is left without an update; and pings go on for longer than a dead tunnel lives.
    net.run_for(Duration::from_secs(30));
    for (x, y) in [(hosts[1], hosts[2]), (hosts[2], hosts[1])] {
        let answered = (0..60).any(|_| net.ping(x, y).is_answered_within(Duration::from_secs(1)));
        assert!(answered, "a healed network does not carry packets: {}", net.diagram());
    }
}
