//! Hosts whose certificates are much longer than the messages of those who call them.

use std::time::Duration;

use nebula_core::simulator::{HostId, HostSpec, NatBehaviour, SimNet};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A host with so many groups in its certificate.
fn host_with(net: &mut SimNet, groups: usize) -> HostId {
    let names: Vec<_> = (0..groups).map(|number| format!("group-{number:04}")).collect();
    net.add(HostSpec::new("large").groups(&names.iter().map(String::as_str).collect::<Vec<_>>()))
}

#[test]
fn a_host_answers_at_once_however_large_its_certificate() {
    for groups in [20, 60, 100, 400, 700] {
        let mut net = SimNet::new(1);
        net.set_post_quantum(nebula_core::PostQuantum::Off);
        let large = host_with(&mut net, groups);
        let caller = net.add(HostSpec::new("caller").knows(large));
        assert!(net.ping(caller, large).is_answered_within(21 * MS), "{groups} groups\n{}", net.diagram());
        let longest = net.flow().map(|step| step.datagram.len()).max().unwrap_or_default();
        assert!(groups < 700 || longest > 8_000, "{longest}");
    }
}

#[test]
fn a_whole_office_that_calls_a_host_with_a_large_certificate_is_answered_within_a_second() {
    for (groups, limit) in [(100, 50 * MS), (700, SECOND)] {
        let mut net = SimNet::new(2);
        let large = host_with(&mut net, groups);
        let office = net.add_nat(NatBehaviour::home());
        let callers: Vec<_> =
            (0..64).map(|number| net.add(HostSpec::new(&format!("c{number}")).behind(office).knows(large))).collect();
        for caller in &callers {
            let _verdict = net.send_udp(*caller, large, (1, 2), b"hello");
        }
        net.run_for(limit);
        let connected = callers.iter().filter(|caller| net.endpoint_of(**caller, large).is_some()).count();
        assert_eq!((connected, net.payloads(large, 2).len()), (64, 64), "{groups} groups");
    }
}

#[test]
fn callers_behind_a_relay_are_answered_at_once_too() {
    let mut net = SimNet::new(3);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(HostSpec::new("relay").lighthouse(lighthouse).config(|config| config.relay.am_relay = true));
    let at = net.overlay(relay);
    let through = move |config: &mut nebula_core::Config| config.relay.relays = vec![at];
    let names: Vec<_> = (0..600).map(|number| format!("group-{number:04}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let large = net.add(HostSpec::new("large").groups(&names).lighthouse(lighthouse).config(through));
    let callers = ["a", "b", "c"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse).config(through)));
    for caller in callers {
        net.cut(caller, large);
    }
    net.run_for(SECOND);
    for caller in callers {
        assert!(net.ping(caller, large).until_delivered() < SECOND / 2, "{}", net.diagram());
    }
}
