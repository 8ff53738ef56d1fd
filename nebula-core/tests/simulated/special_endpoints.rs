//! Endpoints that nobody should be sent to, whoever names them.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_cert::Version;
use nebula_core::MessageType;
use nebula_core::config::{AllowList, RemoteAllowList};
use nebula_core::internals::messages::{Meta, MetaKind};
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{Config, Event, Punt};

const SECOND: Duration = Duration::from_secs(1);
/// Endpoints of services on the host itself, in its cloud or for everybody in the network, and invalid ones.
const SPECIAL: [&str; 18] = [
    "127.0.0.1:4242",
    "127.9.9.9:53",
    "169.254.169.254:80",
    "169.254.1.1:4242",
    "0.0.0.0:4242",
    "0.1.2.3:4242",
    "255.255.255.255:4242",
    "224.0.0.251:5353",
    "10.42.0.77:4242",
    "203.0.113.7:0",
    "[::1]:4242",
    "[::]:4242",
    "[::127.0.0.1]:4242",
    "[fe80::1]:4242",
    "[ff02::1]:5353",
    "[::ffff:127.0.0.1]:4242",
    "[::ffff:169.254.169.254]:80",
    "[::ffff:224.0.0.251]:5353",
];
const GOOD: &str = "192.0.2.7:4242";

fn endpoints(texts: &[&str]) -> Vec<SocketAddr> {
    texts.iter().map(|text| text.parse().expect("an endpoint")).collect()
}

/// A few at a time, because only ten per address family are accepted.
fn batches() -> Vec<Vec<SocketAddr>> {
    SPECIAL.chunks(6).map(|chunk| endpoints(&[chunk, &[GOOD]].concat())).collect()
}

/// Makes `host` handle a message as if `sender` had sent it.
fn tell(net: &mut SimNet, host: HostId, sender: HostId, kind: MetaKind, subject: IpAddr, endpoints: Vec<SocketAddr>) {
    let mut message = Meta::new(kind, Version::V2, Some(subject));
    message.endpoints = endpoints;
    let plaintext = message.encode().expect("a message");
    let (tunnel, from) = (net.tunnels_to(host, sender)[0].local_index, net.underlay(sender).into());
    let kind = MessageType::Lighthouse;
    net.control(host, |node, now| node.handle_punt(now, Punt::Message { tunnel, from, kind, plaintext }));
}

/// Asserts that datagrams went only to hosts of the network and to the good endpoint, and that some went to the latter.
fn only_good_ones_were_sent_to(net: &SimNet, hosts: &[HostId]) {
    let good: SocketAddr = GOOD.parse().expect("an endpoint");
    let known: Vec<_> = hosts.iter().map(|host| net.underlay(*host)).chain([good]).collect();
    let strange: Vec<_> = net.flow().map(|step| step.to).filter(|to| !known.contains(to)).collect();
    assert!(strange.is_empty(), "{strange:?}");
    assert!(net.flow().any(|step| step.to == good), "{}", net.diagram());
}

/// A lighthouse, a host that queries it, and a member to query it about.
fn network(seed: u64) -> (SimNet, [HostId; 3]) {
    network_with(seed, |_| {}, |_| {})
}

fn network_with(
    seed: u64,
    at_lighthouse: impl FnOnce(&mut Config) + 'static,
    at_host: impl FnOnce(&mut Config) + 'static,
) -> (SimNet, [HostId; 3]) {
    let mut net = SimNet::new(seed);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse().config(at_lighthouse));
    let host = net.add(HostSpec::new("host").lighthouse(lighthouse).config(at_host));
    let member = net.add(HostSpec::new("member").lighthouse(lighthouse));
    net.run_for(SECOND);
    (net, [lighthouse, host, member])
}

#[test]
fn a_lighthouse_does_not_pass_special_endpoints_on() {
    let (mut net, [lighthouse, host, member]) = network(1);
    let subject = net.overlay(member);
    for batch in batches() {
        tell(&mut net, lighthouse, member, MetaKind::HostUpdateNotification, subject, batch);
        net.control(host, |node, now| node.inquire(now, subject));
        net.run_for(SECOND / 2);
        let answers = net.control(host, |node, _| node.whereabouts(subject)).answers;
        let told: Vec<_> = answers.values().flat_map(|answer| answer.reported.clone()).collect();
        assert_eq!(told, [net.underlay(member), GOOD.parse().unwrap()]);
    }
    assert_eq!(net.counter(lighthouse, "dropped_in_endpoint_refused"), SPECIAL.len() as u64);
}

#[test]
fn special_endpoints_are_not_tried_even_if_a_lighthouse_reports_them() {
    for (seed, batch) in (10..).zip(batches()) {
        let (mut net, [lighthouse, host, member]) = network(seed);
        let subject = net.overlay(member);
        net.kill(member);
        let before = net.flow().count();
        assert!(before > 0);
        net.control(host, |node, now| node.connect(now, subject));
        let special = batch.len() as u64 - 1;
        tell(&mut net, host, lighthouse, MetaKind::HostQueryReply, subject, batch);
        net.run_for(10 * SECOND);
        only_good_ones_were_sent_to(&net, &[lighthouse, host, member]);
        assert_eq!(net.counter(host, "dropped_in_endpoint_refused"), special);
        let refused = net.events(host).iter().find_map(|event| match event {
            Event::EndpointsRefused { by, host, refused, .. } => Some((by.as_str(), host.clone(), *refused as u64)),
            _ => None,
        });
        assert_eq!(refused, Some(("lighthouse", vec![subject], special)));
    }
}

#[test]
fn nobody_punches_towards_special_endpoints() {
    for (seed, batch) in (20..).zip(batches()) {
        let (mut net, [lighthouse, host, member]) = network(seed);
        let asker = net.overlay(member);
        tell(&mut net, host, lighthouse, MetaKind::HostPunchNotification, asker, batch);
        net.run_for(10 * SECOND);
        only_good_ones_were_sent_to(&net, &[lighthouse, host, member]);
    }
}

fn allows(prefixes: &'static [&'static str]) -> impl FnOnce(&mut Config) {
    move |config| {
        let rules = prefixes.iter().map(|prefix| (prefix.parse().expect("a prefix"), true));
        config.lighthouse.remote_allow = RemoteAllowList::new(AllowList::new(rules).expect("a default"), []);
    }
}

#[test]
fn an_allow_list_can_permit_special_endpoints_by_naming_them() {
    for (seed, list, expected) in
        [(30, &["0.0.0.0/0"][..], false), (31, &["0.0.0.0/0", "127.0.0.0/8", "169.254.0.0/16"], true)]
    {
        let (mut net, [lighthouse, host, member]) = network_with(seed, allows(list), allows(list));
        let subject = net.overlay(member);
        let special = endpoints(&["127.0.0.1:4242", "169.254.7.7:4242"]);
        tell(&mut net, lighthouse, member, MetaKind::HostUpdateNotification, subject, special.clone());
        net.kill(member);
        net.control(host, |node, now| node.connect(now, subject));
        net.run_for(3 * SECOND);
        let tried = special.iter().filter(|at| net.flow().any(|step| step.to == **at)).count();
        assert_eq!(tried, if expected { 2 } else { 0 }, "{list:?}\n{}", net.diagram());
    }
}

#[test]
fn a_lighthouse_that_hears_a_host_on_loopback_does_not_send_others_there() {
    let mut net = SimNet::new(40);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let member = net.add(HostSpec::new("member").underlay("127.0.0.1:4300").lighthouse(lighthouse));
    let host = net.add(HostSpec::new("host").lighthouse(lighthouse));
    net.run_for(SECOND);
    let subject = net.overlay(member);
    net.control(host, |node, now| node.inquire(now, subject));
    net.run_for(SECOND / 2);
    let answers = net.control(host, |node, _| node.whereabouts(subject)).answers;
    assert!(answers.values().all(|answer| answer.reported.is_empty()), "{answers:?}");
    // Endpoints that the operator configured are used regardless.
    let direct = net.add(HostSpec::new("direct").knows(member));
    net.ping(direct, member).until_delivered();
}

/// A lighthouse and two hosts on one machine.
fn machine(seed: u64) -> (SimNet, [HostId; 3]) {
    let mut net = SimNet::new(seed);
    let lighthouse = net.add(HostSpec::new("lighthouse").underlay("127.0.0.1:4242").am_lighthouse());
    let host = net.add(HostSpec::new("host").underlay("127.0.0.1:4300").lighthouse(lighthouse));
    let member = net.add(HostSpec::new("member").underlay("127.0.0.1:4301").lighthouse(lighthouse));
    net.run_for(SECOND);
    (net, [lighthouse, host, member])
}

#[test]
fn hosts_of_one_machine_find_each_other_by_a_lighthouse_on_loopback() {
    let (mut net, [lighthouse, host, member]) = machine(50);
    net.ping(host, member).until_delivered();
    // A host elsewhere is told nothing of loopback.
    let stranger = net.add(HostSpec::new("stranger").lighthouse(lighthouse));
    net.run_for(SECOND);
    let subject = net.overlay(member);
    net.control(stranger, |node, now| node.inquire(now, subject));
    net.run_for(SECOND / 2);
    let answers = net.control(stranger, |node, _| node.whereabouts(subject)).answers;
    assert!(answers.values().all(|answer| answer.reported.is_empty()), "{answers:?}");
}

#[test]
fn a_lighthouse_on_loopback_is_believed_about_loopback_only_and_believes_no_host_about_it() {
    let (mut net, [lighthouse, host, member]) = machine(51);
    let subject = net.overlay(member);
    let loopback = endpoints(&["127.0.0.1:53", "[::1]:53"]);
    tell(&mut net, lighthouse, member, MetaKind::HostUpdateNotification, subject, loopback.clone());
    net.control(host, |node, now| node.inquire(now, subject));
    net.run_for(SECOND / 2);
    let answers = net.control(host, |node, _| node.whereabouts(subject)).answers;
    let told: Vec<_> = answers.values().flat_map(|answer| answer.reported.clone()).collect();
    assert_eq!(told, [net.underlay(member)]);
    assert_eq!(net.counter(lighthouse, "dropped_in_endpoint_refused"), 2);

    net.kill(member);
    net.control(host, |node, now| node.connect(now, subject));
    let elsewhere = endpoints(&["169.254.169.254:80", "[fe80::1]:4242", "224.0.0.251:5353"]);
    let named = [&elsewhere[..], &loopback[..1]].concat();
    tell(&mut net, host, lighthouse, MetaKind::HostQueryReply, subject, named);
    net.run_for(3 * SECOND);
    assert!(net.flow().any(|step| step.to == loopback[0]), "{}", net.diagram());
    assert!(!net.flow().any(|step| elsewhere.contains(&step.to)), "{}", net.diagram());
    assert_eq!(net.counter(host, "dropped_in_endpoint_refused"), 3);
}
