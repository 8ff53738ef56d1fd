//! Punches towards addresses that members name: no stranger gets many of them, and every honest host is reached.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_cert::Version;
use nebula_core::internals::messages::{Meta, MetaKind};
use nebula_core::simulator::{HostId, HostSpec, NatBehaviour, SimNet};
use nebula_core::{MessageType, Punt};

const SECOND: Duration = Duration::from_secs(1);
/// Has nothing to do with it.
const STRANGER: &str = "192.0.2.66";

fn stranger() -> IpAddr {
    STRANGER.parse().expect("an address")
}

/// Makes the lighthouse handle a message as if `sender` had sent it.
fn tell(net: &mut SimNet, lighthouse: HostId, sender: HostId, message: &Meta) {
    let plaintext = message.encode().expect("a message");
    let (tunnel, from) = (net.tunnels_to(lighthouse, sender)[0].local_index, net.underlay(sender).into());
    let kind = MessageType::Lighthouse;
    net.control(lighthouse, |node, now| node.handle_punt(now, Punt::Message { tunnel, from, kind, plaintext }));
}

fn update(endpoints: Vec<SocketAddr>) -> Meta {
    let mut message = Meta::new(MetaKind::HostUpdateNotification, Version::V2, None);
    message.endpoints = endpoints;
    message
}

fn query(subject: IpAddr) -> Meta {
    Meta::new(MetaKind::HostQuery, Version::V2, Some(subject))
}

#[test]
fn a_member_cannot_have_a_stranger_flooded_with_punches() {
    let mut net = SimNet::new(1);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let member = net.add(HostSpec::new("member").lighthouse(lighthouse));
    let hosts: Vec<_> =
        (0..20).map(|number| net.add(HostSpec::new(&format!("h{number}")).lighthouse(lighthouse))).collect();
    net.run_for(SECOND);
    let named = (1..=24).map(|port| SocketAddr::new(stranger(), port)).collect::<Vec<_>>();
    let (mut asked, mut length) = (0, 0);
    for _ in 0..100 {
        tell(&mut net, lighthouse, member, &update(named.clone()));
        for host in &hosts {
            let query = query(net.overlay(*host));
            length += 28 + 32 + query.encode().expect("a message").len();
            asked += 1;
            tell(&mut net, lighthouse, member, &query);
        }
        net.run_for(SECOND / 10);
    }
    net.run_for(2 * SECOND);
    let punches: Vec<_> = net.flow().filter(|step| step.to.ip() == stranger()).collect();
    // Two ports, once a second, from each host.
    assert!((20..=20 * 11 * 2).contains(&punches.len()), "{} for {asked} queries", punches.len());
    let bytes: usize = punches.iter().map(|step| 28 + step.datagram.len()).sum();
    assert!(bytes * 4 <= length, "{bytes} bytes for {length} bytes of queries");
}

#[test]
fn a_lighthouse_believes_two_ports_of_an_address_and_more_of_the_one_where_it_hears_the_host() {
    let mut net = SimNet::new(2);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let member = net.add(HostSpec::new("member").lighthouse(lighthouse));
    let host = net.add(HostSpec::new("host").lighthouse(lighthouse));
    net.run_for(SECOND);
    let own = net.underlay(member);
    let of =
        |address: IpAddr, ports: std::ops::RangeInclusive<u16>| ports.map(move |port| SocketAddr::new(address, port));
    let named: Vec<_> =
        of(stranger(), 1..=8).chain(of(own.ip(), 1..=6)).chain(of("192.0.2.9".parse().unwrap(), 1..=2)).collect();
    tell(&mut net, lighthouse, member, &update(named));
    let subject = net.overlay(member);
    net.control(host, |node, now| node.inquire(now, subject));
    net.run_for(SECOND / 2);
    let answers = net.control(host, |node, _| node.whereabouts(subject)).answers;
    let told: Vec<_> = answers.values().flat_map(|answer| answer.reported.clone()).collect();
    let count = |address: IpAddr| told.iter().filter(|at| at.ip() == address).count();
    assert_eq!((count(stranger()), count(own.ip()), count("192.0.2.9".parse().unwrap())), (2, 7, 2), "{told:?}");
    assert_eq!(net.counter(lighthouse, "dropped_in_endpoint_refused"), 6);
}

#[test]
fn many_peers_behind_one_router_reach_a_host_behind_another_one_at_the_same_time() {
    let mut net = SimNet::new(3);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [office, home] = [NatBehaviour::home(), NatBehaviour::home()].map(|kind| net.add_nat(kind));
    let server = net.add(HostSpec::new("server").behind(home).lighthouse(lighthouse));
    let callers: Vec<_> = (0..150)
        .map(|number| net.add(HostSpec::new(&format!("c{number}")).behind(office).lighthouse(lighthouse)))
        .collect();
    net.run_for(2 * SECOND);
    for caller in &callers {
        let _verdict = net.send_udp(*caller, server, (1, 2), b"hello");
    }
    net.run_for(3 * SECOND);
    assert_eq!(net.payloads(server, 2).len(), callers.len());
}

#[test]
fn a_host_with_as_many_addresses_as_it_may_name_is_punched_at_all_of_them() {
    let mut net = SimNet::new(4);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let also: Vec<_> = (1..24).map(|number| format!("203.0.113.{}:4242", 100 + number)).collect();
    let also: Vec<_> = also.iter().map(String::as_str).collect();
    let many = net.add(HostSpec::new("many").lighthouse(lighthouse).also_at(&also));
    let host = net.add(HostSpec::new("host").lighthouse(lighthouse));
    net.run_for(SECOND);
    net.ping(many, host).until_delivered();
    net.run_for(2 * SECOND);
    let punched = net.flow().filter(|step| step.sender == "host" && step.datagram == [0]).count();
    assert_eq!(punched, 24, "{}", net.diagram());
}
