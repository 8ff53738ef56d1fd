//! Hosts that find each other through a lighthouse.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_cert::Version;
use nebula_core::MessageType;
use nebula_core::Punt;
use nebula_core::simulator::{HostId, HostSpec, NatBehaviour, SimNet};

fn with_lighthouse(seed: u64) -> (SimNet, HostId) {
    let mut net = SimNet::new(seed);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    (net, lighthouse)
}

#[test]
fn a_lighthouse_tells_where_a_peer_is() {
    let (mut net, lighthouse) = with_lighthouse(1);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_millis(100), "the reply triggers an attempt at once: {took:?}");
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "directly, not through the lighthouse");
}

#[test]
fn a_query_waits_for_the_tunnel_to_the_lighthouse() {
    let (mut net, lighthouse) = with_lighthouse(2);
    let b = net.add(HostSpec::new("b").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse));
    net.ping(a, b).until_delivered();
}

#[test]
fn version_one_hosts_are_found_too() {
    let (mut net, lighthouse) = {
        let mut net = SimNet::new(3);
        let lighthouse = net.add(HostSpec::new("lighthouse").versions(&[Version::V1]).am_lighthouse());
        (net, lighthouse)
    };
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).versions(&[Version::V1]).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
}

#[test]
fn two_hosts_behind_home_routers_punch_through() {
    let (mut net, lighthouse) = with_lighthouse(4);
    let nats = [net.add_nat(NatBehaviour::home()), net.add_nat(NatBehaviour::home())];
    let a = net.add(HostSpec::new("a").behind(nats[0]).lighthouse(lighthouse));
    let b = net.add(HostSpec::new("b").behind(nats[1]).lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_secs(4), "{took:?}\n{}", net.diagram());
    assert_eq!(net.endpoint_of(a, b).unwrap().ip(), "203.0.113.2".parse::<IpAddr>().unwrap());
}

#[test]
fn a_host_with_a_symmetric_nat_is_reached_when_it_responds() {
    let (mut net, lighthouse) = with_lighthouse(5);
    let nat = net.add_nat(NatBehaviour::symmetric());
    let inside = HostSpec::new("inside").behind(nat).lighthouse(lighthouse);
    let inside = net.add(inside.config(|config| config.punchy.respond = true));
    let outside = net.add(HostSpec::new("outside").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    let took = net.ping(outside, inside).until_delivered();
    assert!(took > Duration::from_secs(4), "only the response after five seconds opens this NAT: {took:?}");
}

#[test]
fn two_hosts_behind_one_router_use_their_private_addresses() {
    let (mut net, lighthouse) = with_lighthouse(6);
    let nat = net.add_nat(NatBehaviour::home());
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).behind(nat).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "hairpinning is not needed");
}

#[test]
fn nobody_is_told_about_a_host_that_left() {
    let (mut net, lighthouse) = with_lighthouse(7);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.control(b, |node, now| node.close_all(now));
    net.run_for(Duration::from_millis(100));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(3)));
    assert!(
        net.flow()
            .all(|step| (step.sender != "a" && step.sender != "b") || step.receiver.as_deref() == Some("lighthouse"))
    );
}

#[test]
fn hosts_find_a_restarted_lighthouse_again_by_themselves() {
    let (mut net, lighthouse) = with_lighthouse(8);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.restart(lighthouse);
    net.run_for(Duration::from_secs(12));
    assert_eq!(net.tunnels(lighthouse).len(), 2, "{}", net.diagram());
    net.ping(a, b).until_delivered();
}

#[test]
fn a_host_that_moved_is_found_at_its_new_endpoint() {
    let (mut net, lighthouse) = with_lighthouse(9);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.move_to(b, "198.51.100.99:999");
    net.run_for(Duration::from_secs(12));
    net.ping(a, b).until_delivered();
    assert_eq!(net.endpoint_of(a, b), Some("198.51.100.99:999".parse().unwrap()));
}

/// A lighthouse message of version 1 about `subject`, as it comes out of a tunnel.
fn message(kind: u8, subject: IpAddr, endpoint: SocketAddr) -> Vec<u8> {
    let (IpAddr::V4(subject), IpAddr::V4(address)) = (subject, endpoint.ip()) else { panic!("IPv4 only") };
    let mut place = vec![0x08];
    push_varint(&mut place, address.to_bits());
    place.push(0x10);
    push_varint(&mut place, endpoint.port().into());
    let mut details = vec![0x08];
    push_varint(&mut details, subject.to_bits());
    details.extend([0x12, place.len() as u8]);
    details.extend(place);
    let mut message = vec![0x08, kind, 0x12, details.len() as u8];
    message.extend(details);
    message
}

fn push_varint(bytes: &mut Vec<u8>, mut number: u32) {
    while number > 0x7f {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

const REPLY: u8 = 2;
const UPDATE: u8 = 3;
const PUNCH: u8 = 5;

/// Makes `host` handle a message as if `sender` had sent it.
fn tell(net: &mut SimNet, host: HostId, sender: HostId, plaintext: Vec<u8>) {
    let (tunnel, from) = (net.tunnels_to(host, sender)[0].local_index, net.underlay(sender).into());
    let kind = MessageType::Lighthouse;
    net.control(host, |node, now| node.handle_punt(now, Punt::Message { tunnel, from, kind, plaintext }));
}

/// A host that waits for a peer its lighthouse does not know, and has a tunnel with an ordinary host.
fn waiting() -> (SimNet, [HostId; 4]) {
    let (mut net, lighthouse) = with_lighthouse(10);
    let peer = net.add(HostSpec::new("peer"));
    let other = net.add(HostSpec::new("other"));
    let host = net.add(HostSpec::new("host").lighthouse(lighthouse).knows(other));
    net.run_for(Duration::from_secs(1));
    net.ping(host, other).until_delivered();
    let address = net.overlay(peer);
    net.control(host, |node, now| node.connect(now, address));
    (net, [lighthouse, peer, other, host])
}

#[test]
fn only_a_lighthouse_is_believed_about_endpoints() {
    let (mut net, [lighthouse, peer, other, host]) = waiting();
    let reply = message(REPLY, net.overlay(peer), net.underlay(peer));
    tell(&mut net, host, other, reply.clone());
    net.run_for(Duration::from_secs(1));
    assert!(net.tunnels(peer).is_empty());
    tell(&mut net, host, lighthouse, reply);
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.tunnels(peer).len(), 1);
}

#[test]
fn only_a_lighthouse_makes_a_host_punch() {
    let (mut net, [lighthouse, peer, other, host]) = waiting();
    let notice = message(PUNCH, net.overlay(peer), net.underlay(peer));
    let punches = |net: &SimNet| net.flow().filter(|step| step.datagram == [0]).count();
    tell(&mut net, host, other, notice.clone());
    net.run_for(Duration::from_secs(2));
    assert_eq!(punches(&net), 0);
    tell(&mut net, host, lighthouse, notice);
    net.run_for(Duration::from_millis(900));
    assert_eq!(punches(&net), 0, "it waits a second");
    net.run_for(Duration::from_millis(200));
    assert_eq!(punches(&net), 1);
}

#[test]
fn nobody_reports_an_endpoint_for_somebody_else() {
    let (mut net, lighthouse) = with_lighthouse(11);
    let [a, b, c] = ["a", "b", "c"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    let poison = message(UPDATE, net.overlay(b), "192.0.2.66:666".parse().unwrap());
    tell(&mut net, lighthouse, c, poison);
    assert_eq!(net.counter(lighthouse, "dropped_in_bad_message"), 1);
    net.ping(a, b).until_delivered();
    assert!(net.flow().all(|step| step.to.port() != 666));
}

#[test]
fn an_endpoint_inside_the_overlay_is_not_tried() {
    let (mut net, [lighthouse, peer, _, host]) = waiting();
    let reply = message(REPLY, net.overlay(peer), "10.42.0.77:4242".parse().unwrap());
    tell(&mut net, host, lighthouse, reply);
    net.run_for(Duration::from_secs(10));
    assert!(net.flow().all(|step| step.to.ip() != "10.42.0.77".parse::<IpAddr>().unwrap()));
}

#[test]
fn memory_for_endpoints_is_freed_when_everybody_is_gone() {
    let mut net = SimNet::new(16);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let hosts = ["a", "b", "c"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    let fresh = net.table_sizes(lighthouse);
    net.run_for(Duration::from_secs(1));
    net.ping(hosts[0], hosts[1]).until_delivered();
    net.ping(hosts[2], hosts[1]).until_delivered();
    assert_eq!(net.table_sizes(lighthouse).tunnels, 3);
    hosts.into_iter().for_each(|host| net.stop(host));
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.table_sizes(lighthouse), fresh);
}

#[test]
fn clients_follow_a_moved_lighthouse_once_its_name_resolves_to_it() {
    let mut net = SimNet::new(12);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.move_to(lighthouse, "198.51.100.200:4242");
    net.restart(lighthouse);
    let hosts = BTreeMap::from([(net.overlay(lighthouse), vec!["198.51.100.200:4242".parse().unwrap()])]);
    for host in [a, b] {
        let hosts = hosts.clone();
        net.control(host, |node, now| node.reconfigure(now, |config| config.static_hosts = hosts));
    }
    net.run_for(Duration::from_secs(30));
    assert_eq!(net.tunnels(lighthouse).len(), 2, "{}", net.diagram());
    net.ping(a, b).until_delivered();
}

#[test]
fn one_dead_lighthouse_of_two_does_not_matter() {
    let mut net = SimNet::new(13);
    let lighthouses = ["l", "m"].map(|name| net.add(HostSpec::new(name).am_lighthouse()));
    let [a, b] =
        ["a", "b"].map(|name| net.add(lighthouses.into_iter().fold(HostSpec::new(name), HostSpec::lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.kill(lighthouses[0]);
    assert!(net.ping(a, b).is_answered_within(Duration::from_millis(100)), "{}", net.diagram());
    net.control(a, |node, now| node.close_all(now));
    net.run_for(Duration::from_secs(60));
    assert!(net.ping(b, a).is_answered_within(Duration::from_millis(100)), "{}", net.diagram());
}

/// A host with many addresses of both families besides its own, of which only that one is reachable.
fn many(name: &str, number: u8, count: usize) -> HostSpec {
    let others = |n: usize| match n % 2 {
        0 => format!("192.0.{n}.{number}:4242"),
        _ => format!("[2001:db8:{n}::{number}]:4242"),
    };
    let others: Vec<_> = (100..100 + count).map(others).collect();
    HostSpec::new(name).also_at(&others.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn more_than_ten_addresses_of_a_family_are_told_and_tried_few_at_a_time() {
    let (mut net, lighthouse) = with_lighthouse(30);
    let b = net.add(many("b", 7, 40).lighthouse(lighthouse));
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    let at_b = net.overlay(b);
    net.control(a, |node, now| node.inquire(now, at_b));
    net.run_for(Duration::from_secs(1));
    let known = net.control(a, |node, _| node.whereabouts(at_b)).answers;
    let told = &known[&net.overlay(lighthouse)].reported;
    net.kill(b);
    let before = net.flow().count();
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(20)));
    assert_eq!(told.len(), 24, "{told:?}");
    assert_eq!(told.iter().filter(|at| at.is_ipv4()).count(), 12);
    assert_eq!(told[0], net.underlay(b), "where its tunnel is");
    // Every endpoint is tried, and no attempt goes to all.
    let calls: Vec<_> = net.flow().skip(before).filter(|step| step.sender == "a" && told.contains(&step.to)).collect();
    let mut sent: BTreeMap<Duration, usize> = BTreeMap::new();
    calls.iter().for_each(|step| *sent.entry(step.at).or_default() += 1);
    assert!(sent.values().all(|count| *count <= 16), "{sent:?}");
    let tried: std::collections::BTreeSet<_> = calls.iter().map(|step| step.to).collect();
    assert_eq!(tried.len(), 24);
    let first: Vec<_> = sent.keys().take(2).collect();
    let within = calls.iter().filter(|step| step.at <= *first[1]).map(|step| step.to);
    assert_eq!(within.collect::<std::collections::BTreeSet<_>>().len(), 24, "in two attempts");
}

#[test]
fn hosts_with_few_and_with_many_addresses_find_each_other() {
    let (mut net, lighthouse) = with_lighthouse(31);
    let [a, b] = [(8, 23), (9, 30)].map(|(number, count)| net.add(many("x", number, count).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
    net.ping(b, a).until_delivered();
}
