//! Models of connection tracking: a flow is tracked once however many lanes see it first, and rules that were replaced
//! let nothing pass.

use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use loom::thread;

use super::check;
use crate::DropReason;
use crate::counters::Direction;
use crate::firewall::{Conntrack, Filter, Firewall, FlowCache, Policy, Rule};
use crate::forward::testing::{self, tunnel};
use crate::index::LocalIndex;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

#[allow(clippy::disallowed_methods, reason = "any moment will do as the beginning")]
fn start() -> Instant {
    Instant::now()
}

fn flow(port: u16) -> FlowKey {
    let (local, remote) = ([10, 1, 0, 1].into(), [10, 1, 0, 2].into());
    FlowKey { local, remote, local_port: port, remote_port: 9, protocol: 17, fragment: false }
}

fn filter(policy: &Policy, generation: u32) -> Filter {
    let network: IpNet = "10.1.0.1/16".parse().unwrap();
    Filter::new(policy, &[network], &[], generation)
}

#[test]
fn lanes_that_see_a_flow_first_remember_it_once() {
    let (now, peer) = (start(), testing::verified(&["10.1.0.2/16"]));
    check(3, move || {
        let policy = Policy { inbound: vec![Rule::any()], ..Policy::default() };
        let filter = Arc::new(filter(&policy, 1));
        let conntrack = Arc::new(Conntrack::new(now, 1, 10));
        let tunnel = tunnel(LocalIndex(1), peer.clone());
        let pass = move |direction, filter: &Filter, conntrack: &Conntrack, tunnel: &Tunnel| {
            let firewall = Firewall { filter, conntrack };
            firewall.check(&mut FlowCache::default(), now, direction, &flow(7), tunnel, |_| None).map(|_| ())
        };
        let lanes = [(); 2].map(|()| {
            let (filter, conntrack, tunnel) = (Arc::clone(&filter), Arc::clone(&conntrack), Arc::clone(&tunnel));
            thread::spawn(move || pass(Direction::Inbound, &filter, &conntrack, &tunnel))
        });
        // The answer passes if and only if the packet it answers came before.
        let answer = pass(Direction::Outbound, &filter, &conntrack, &tunnel);
        assert!(matches!(answer, Ok(()) | Err(DropReason::NoRule)));
        assert!(lanes.into_iter().all(|lane| lane.join().unwrap() == Ok(())));
        assert_eq!(pass(Direction::Outbound, &filter, &conntrack, &tunnel), Ok(()));
        assert_eq!(conntrack.len(), 1);
    });
}

#[test]
fn a_packet_under_new_rules_is_judged_by_them_while_another_lane_still_uses_the_old_ones() {
    let (now, peer) = (start(), testing::verified(&["10.1.0.2/16"]));
    check(3, move || {
        let open = Policy { inbound: vec![Rule::any()], ..Policy::default() };
        let filters = Arc::new([filter(&open, 1), filter(&Policy::default(), 2)]);
        let conntrack = Arc::new(Conntrack::new(now, 1, 10));
        let tunnel = tunnel(LocalIndex(1), peer.clone());
        let late = {
            let (filters, conntrack, tunnel) = (Arc::clone(&filters), Arc::clone(&conntrack), Arc::clone(&tunnel));
            thread::spawn(move || {
                let firewall = Firewall { filter: &filters[0], conntrack: &conntrack };
                let mut cache = FlowCache::default();
                [(); 2].map(|()| {
                    firewall.check(&mut cache, now, Direction::Inbound, &flow(7), &tunnel, |_| None).map(|_| ())
                })
            })
        };
        let firewall = Firewall { filter: &filters[1], conntrack: &conntrack };
        let mut cache = FlowCache::default();
        for direction in [Direction::Inbound, Direction::Outbound] {
            let verdict = firewall.check(&mut cache, now, direction, &flow(7), &tunnel, |_| None).map(|_| ());
            assert_eq!(verdict, Err(DropReason::NoRule));
        }
        assert_eq!(late.join().unwrap(), [Ok(()); 2]);
    });
}

#[test]
fn lanes_together_never_remember_more_than_the_cap() {
    let (now, peer) = (start(), testing::verified(&["10.1.0.2/16"]));
    check(3, move || {
        let policy = Policy { inbound: vec![Rule::any()], ..Policy::default() };
        let filter = Arc::new(filter(&policy, 1));
        let conntrack = Arc::new(Conntrack::new(now, 1, 1));
        let tunnel = tunnel(LocalIndex(1), peer.clone());
        let lanes = [1, 2, 3].map(|port| {
            let (filter, conntrack, tunnel) = (Arc::clone(&filter), Arc::clone(&conntrack), Arc::clone(&tunnel));
            thread::spawn(move || {
                let firewall = Firewall { filter: &filter, conntrack: &conntrack };
                let mut cache = FlowCache::default();
                let verdict =
                    firewall.check(&mut cache, now, Direction::Inbound, &flow(port), &tunnel, |_| None).map(|_| ());
                assert!(conntrack.len() <= 1);
                verdict
            })
        });
        assert!(lanes.into_iter().all(|lane| lane.join().unwrap() == Ok(())), "without an answer a flow makes room");
        assert_eq!(conntrack.len(), 1);
    });
}
