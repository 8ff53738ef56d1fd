//! Two hosts have one overlay address, and the one that had it first learns it although nobody calls it.

use std::net::SocketAddr;
use std::time::Duration;

use nebula_cert::Version;
use nebula_core::Event;
use nebula_core::diagnosis::Elsewhere;
use nebula_core::internals::messages::{Meta, MetaKind};
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{MessageType, Punt};

const SECOND: Duration = Duration::from_secs(1);
const SHARED: &str = "10.42.0.77/16";

/// A lighthouse and one host that reports to it.
fn with_first_host(seed: u64) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let first = net.add(HostSpec::new("first").networks(&[SHARED]).lighthouse(lighthouse));
    net.run_for(SECOND);
    (net, lighthouse, first)
}

fn second_host(net: &mut SimNet, lighthouse: HostId) -> HostId {
    net.add(HostSpec::new("second").networks(&[SHARED]).lighthouse(lighthouse))
}

fn elsewhere(net: &mut SimNet, host: HostId) -> Vec<Elsewhere> {
    net.control(host, |node, now| node.diagnosis(now)).elsewhere
}

/// Where the other host is, by what this one knows.
fn other_at(net: &mut SimNet, host: HostId) -> Vec<SocketAddr> {
    elsewhere(net, host).into_iter().flat_map(|told| told.endpoints).collect()
}

fn events(net: &SimNet, host: HostId) -> usize {
    net.events(host).iter().filter(|event| matches!(event, Event::AddressElsewhere { .. })).count()
}

/// Makes `host` handle a message as if `sender` had sent it.
fn tell(net: &mut SimNet, host: HostId, sender: HostId, kind: MetaKind, subject: &str, endpoint: &str) {
    let mut message = Meta::new(kind, Version::V2, Some(subject.parse().expect("an address")));
    message.endpoints = vec![endpoint.parse().expect("an endpoint")];
    let plaintext = message.encode().expect("a message");
    let (tunnel, from) = (net.tunnels_to(host, sender)[0].local_index, net.underlay(sender).into());
    let kind = MessageType::Lighthouse;
    net.control(host, |node, now| node.handle_punt(now, Punt::Message { tunnel, from, kind, plaintext }));
}

#[test]
fn a_host_that_nobody_calls_learns_from_its_lighthouse_that_another_one_came_with_its_address() {
    let (mut net, lighthouse, first) = with_first_host(1);
    net.run_for(30 * SECOND);
    assert_eq!((elsewhere(&mut net, first), net.counter(first, "address_conflicts")), (vec![], 0));
    let second = second_host(&mut net, lighthouse);
    net.run_for(30 * SECOND);
    let told = elsewhere(&mut net, first);
    let [told] = told.as_slice() else { panic!("one lighthouse: {told:?}\n{}", net.diagram()) };
    assert_eq!((told.address, told.lighthouse), (net.overlay(first), net.overlay(lighthouse)));
    assert_eq!(told.endpoints, [net.underlay(second)]);
    assert_eq!((events(&net, first), net.counter(first, "address_conflicts")), (1, 1), "once a minute");
}

#[test]
fn a_host_that_takes_the_place_of_another_one_is_no_second_host() {
    let (mut net, lighthouse, first) = with_first_host(2);
    net.kill(first);
    let second = second_host(&mut net, lighthouse);
    net.run_for(60 * SECOND);
    assert_eq!((elsewhere(&mut net, second), net.counter(second, "address_conflicts")), (vec![], 0));
}

#[test]
fn a_renewed_certificate_is_no_second_host() {
    let (mut net, lighthouse, first) = with_first_host(3);
    let renewed = net.renewed_identity(first, &[Version::V2]);
    net.move_to(first, "198.51.100.99:4242");
    net.edit_config(first, |config| config.identity = renewed);
    let at_lighthouse = net.overlay(lighthouse);
    net.control(first, |node, now| node.close(now, at_lighthouse, true));
    net.run_for(60 * SECOND);
    assert_eq!(elsewhere(&mut net, first), []);
}

#[test]
fn a_punch_order_for_the_own_address_reports_the_other_host_and_sends_nothing() {
    let (mut net, lighthouse, first) = with_first_host(4);
    let (at, endpoint) = ("10.42.0.77", "203.0.113.9:4242");
    let count = |net: &SimNet| net.flow().filter(|step| step.to == endpoint.parse().unwrap()).count();
    tell(&mut net, first, lighthouse, MetaKind::HostPunchNotification, at, endpoint);
    net.run_for(3 * SECOND);
    assert_eq!(other_at(&mut net, first), [endpoint.parse().unwrap()]);
    assert_eq!(count(&net), 0, "{}", net.diagram());
}

#[test]
fn a_host_that_asks_about_its_own_address_informs_the_other_host_only() {
    let (mut net, lighthouse, first) = with_first_host(5);
    let own = net.overlay(first);
    // The lighthouse tells it to punch to itself.
    net.control(first, |node, now| node.inquire(now, own));
    net.run_for(SECOND);
    assert_eq!(elsewhere(&mut net, first), []);
    let second = second_host(&mut net, lighthouse);
    net.run_for(2 * SECOND);
    assert_eq!(elsewhere(&mut net, second), []);
    net.control(first, |node, now| node.inquire(now, own));
    net.run_for(SECOND);
    assert!(!elsewhere(&mut net, second).is_empty(), "{}", net.diagram());
}

#[test]
fn nobody_but_a_lighthouse_can_say_that_an_address_is_elsewhere() {
    let (mut net, lighthouse, first) = with_first_host(6);
    let member = net.add(HostSpec::new("member").lighthouse(lighthouse));
    net.ping(member, first).until_delivered();
    for kind in [MetaKind::HostPunchNotification, MetaKind::HostUpdateNotificationAck, MetaKind::HostQueryReply] {
        tell(&mut net, first, member, kind, "10.42.0.77", "203.0.113.9:4242");
    }
    assert_eq!(elsewhere(&mut net, first), []);
    tell(&mut net, first, lighthouse, MetaKind::HostUpdateNotificationAck, "10.42.0.77", "203.0.113.9:4242");
    assert_eq!(other_at(&mut net, first), ["203.0.113.9:4242".parse().unwrap()]);
}
