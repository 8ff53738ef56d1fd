//! Decisions, and the flows that they hold for.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::wire::ip::{FlowKey, protocol};

/// Services by target, each with its endpoints and how many of them are ready.
#[derive(Debug, Clone, Default)]
struct Listed {
    version: u64,
    pods: HashMap<IpAddr, u64>,
    services: Vec<(Target, Vec<Endpoint>, u32)>,
    /// Number of endpoints of each that are not enrolled.
    clear: u32,
    affinity: Option<Duration>,
    /// Pods that are not enrolled.
    clear_pods: Vec<IpAddr>,
}

impl Directory for Listed {
    fn version(&self) -> u64 {
        self.version
    }

    fn find(&self, target: &Target) -> Found {
        if let Some(&incarnation) = self.pods.get(&target.address) {
            return Found::Peer { incarnation };
        }
        if self.clear_pods.contains(&target.address) {
            return Found::Clear;
        }
        match self.services.iter().position(|(known, ..)| known == target) {
            Some(id) if self.services[id].2 > 0 || self.clear > 0 => {
                let (ready, clear, affinity) = (self.services[id].2, self.clear, self.affinity);
                Found::Service(Service { id: id as u32, ready, clear, affinity })
            }
            Some(_) => Found::Refused,
            None => Found::Unknown,
        }
    }

    fn endpoint(&self, service: &Service, n: u32) -> Option<Endpoint> {
        self.services[service.id as usize].1.get(n as usize).copied()
    }

    fn serves(&self, service: &Service, endpoint: &Endpoint) -> bool {
        self.services[service.id as usize].1.contains(endpoint)
    }

    fn incarnation(&self, address: IpAddr) -> Option<u64> {
        self.pods.get(&address).copied()
    }
}

const CLUSTER_IP: [u8; 4] = [10, 96, 0, 7];
const POD: [u8; 4] = [10, 244, 0, 1];

fn pod(n: u8) -> IpAddr {
    [10, 244, 1, n].into()
}

fn target(protocol: u8) -> Target {
    Target { address: CLUSTER_IP.into(), port: 80, protocol }
}

/// A Service on TCP and UDP with `count` endpoints on port 8080.
fn cluster(count: u8) -> Listed {
    let pods = (1..=count).map(|n| (pod(n), u64::from(n))).collect();
    let endpoint = |n: u8| Endpoint { address: pod(n), port: 8080, incarnation: n.into() };
    let endpoints: Vec<_> = (1..=count).map(endpoint).collect();
    let services = [protocol::TCP, protocol::UDP].map(|number| (target(number), endpoints.clone(), count.into()));
    Listed { version: 1, pods, services: services.into(), clear: 0, affinity: None, clear_pods: Vec::new() }
}

impl Listed {
    fn next(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut next = Self { version: self.version + 1, ..self.clone() };
        change(&mut next);
        next
    }

    fn without(&self, gone: IpAddr) -> Self {
        self.next(|next| {
            next.pods.remove(&gone);
            for (_, endpoints, ready) in &mut next.services {
                endpoints.retain(|endpoint| endpoint.address != gone);
                *ready = endpoints.len() as u32;
            }
        })
    }
}

fn to_service(protocol: u8, port: u16) -> FlowKey {
    let (local, remote) = (POD.into(), CLUSTER_IP.into());
    FlowKey { local, remote, local_port: port, remote_port: 80, protocol, fragment: false }
}

fn to_pod(n: u8, port: u16) -> FlowKey {
    FlowKey { remote: pod(n), remote_port: 8080, ..to_service(protocol::TCP, port) }
}

struct Bench {
    translations: Translations,
    current: Current,
    now: Instant,
}

impl Bench {
    fn new(listed: Listed) -> Self {
        Self::with_room(listed, 1000)
    }

    fn with_room(listed: Listed, max_flows: usize) -> Self {
        #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
        let now = Instant::now();
        Self { translations: Translations::new(now, max_flows), current: Current::new(Arc::new(listed)), now }
    }

    fn give(&mut self, listed: Listed) {
        self.current = Current::new(Arc::new(listed));
    }

    fn wait(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
    }

    fn course(&self, flow: &FlowKey) -> Result<Course, NoCourse> {
        self.first(flow, false, |_| false)
    }

    fn opens(&self, flow: &FlowKey) -> Result<Course, NoCourse> {
        self.first(flow, true, |_| false)
    }

    fn first(&self, flow: &FlowKey, opens: bool, taken: impl FnMut(&FlowKey) -> bool) -> Result<Course, NoCourse> {
        let first = First { flow, opens, led_to: None, now: self.now };
        self.translations.course(&self.current, first, taken).map(|(course, _)| course)
    }

    fn back(&self, wire: &FlowKey) -> Option<FlowKey> {
        self.translations.back(&self.current, wire, self.now).map(|translation| translation.original)
    }

    fn endpoint(&self, flow: &FlowKey) -> IpAddr {
        translated(self.course(flow)).wire.remote
    }
}

fn translated(course: Result<Course, NoCourse>) -> Translation {
    match course {
        Ok(Course::Translated(translation)) => translation,
        other => panic!("not translated: {other:?}"),
    }
}

#[test]
fn a_flow_to_a_service_gets_an_endpoint_and_its_answers_the_services_address() {
    let bench = Bench::new(cluster(3));
    let flow = to_service(protocol::TCP, 40_000);
    let wire = translated(bench.opens(&flow)).wire;
    assert_eq!((wire.local, wire.local_port, wire.remote_port), (flow.local, 40_000, 8080));
    assert!((1..=3).any(|n| wire.remote == pod(n)));
    assert_eq!(bench.back(&wire), Some(flow));
    assert_eq!(bench.back(&FlowKey { local_port: 40_001, ..wire }), None);
    assert_eq!(translated(bench.course(&flow)).wire, wire);
}

#[test]
fn what_is_no_service_has_a_course_of_its_own() {
    let mut listed = cluster(1);
    listed.services.push((Target { port: 81, ..target(protocol::TCP) }, Vec::new(), 0));
    let bench = Bench::new(listed);
    assert_eq!(bench.course(&to_pod(1, 40_000)), Ok(Course::Direct));
    let port = |remote_port| FlowKey { remote_port, ..to_service(protocol::TCP, 40_000) };
    assert_eq!(bench.course(&port(81)), Err(NoCourse::Refused));
    assert_eq!(bench.course(&port(82)), Err(NoCourse::Unknown));
    assert_eq!(bench.translations.len(), 0);
}

#[test]
fn flows_spread_evenly_and_the_same_flow_always_gets_the_same_endpoint() {
    let (one, other) = (Bench::with_room(cluster(4), 10_000), Bench::with_room(cluster(4), 10_000));
    let mut chosen = BTreeMap::new();
    for port in 32_768..36_768 {
        let flow = to_service(protocol::TCP, port);
        *chosen.entry(one.endpoint(&flow)).or_insert(0) += 1;
        assert_eq!(one.endpoint(&flow), other.endpoint(&flow), "as after a restart");
    }
    assert!(chosen.len() == 4 && chosen.values().all(|count| (850..1150).contains(count)), "{chosen:?}");
}

/// A cluster as `cluster`, whose Services have `clear` endpoints that are not enrolled, too.
fn mixed(count: u8, clear: u32) -> Listed {
    Listed { clear, ..cluster(count) }
}

#[test]
fn the_endpoints_that_are_not_enrolled_keep_their_part_of_the_flows() {
    for (enrolled, clear) in [(1_u8, 9_u32), (2, 2), (9, 1)] {
        let bench = Bench::with_room(mixed(enrolled, clear), 10_000);
        let courses: Vec<_> =
            (32_768..36_768).map(|port| bench.opens(&to_service(protocol::TCP, port)).unwrap()).collect();
        let bypassed = courses.iter().filter(|course| **course == Course::Bypass).count();
        let expected = 4000 * clear as usize / (usize::from(enrolled) + clear as usize);
        assert!(bypassed.abs_diff(expected) < 150, "{bypassed} of 4000 for {clear} beside {enrolled}");
        let again = Bench::with_room(mixed(enrolled, clear), 10_000);
        for (port, course) in (32_768..36_768).zip(&courses) {
            assert_eq!(again.opens(&to_service(protocol::TCP, port)), Ok(*course), "as after a restart");
        }
        // One of them is enrolled, as in a rollout: only to it flows move, and those that had the one before.
        let next = Bench::with_room(mixed(enrolled + 1, clear - 1), 10_000);
        for (port, course) in (32_768..36_768).zip(courses) {
            let (Course::Translated(before), Ok(Course::Translated(after))) =
                (course, next.opens(&to_service(protocol::TCP, port)))
            else {
                continue;
            };
            assert!(after.wire.remote == before.wire.remote || after.wire.remote == pod(enrolled + 1));
        }
    }
}

#[test]
fn a_service_whose_enrolled_endpoint_is_not_ready_is_reached_as_without_us() {
    let mut listed = mixed(1, 3);
    listed.services.iter_mut().for_each(|(_, endpoints, ready)| (*endpoints, *ready) = (Vec::new(), 0));
    let bench = Bench::new(listed);
    for number in [protocol::TCP, protocol::UDP] {
        assert_eq!(bench.opens(&to_service(number, 40_000)), Ok(Course::Bypass));
    }
    assert_eq!(bench.translations.len(), 0);
}

#[test]
fn a_flow_goes_on_as_it_began_while_the_pods_of_a_service_are_enrolled_one_by_one() {
    let mut listed = mixed(0, 4);
    let mut bench = Bench::with_room(listed.clone(), 1000);
    let flows: Vec<_> = (40_000..40_100).map(|port| to_service(protocol::TCP, port)).collect();
    assert!(flows.iter().all(|flow| bench.opens(flow) == Ok(Course::Bypass)));
    let mut sealed: HashMap<FlowKey, IpAddr> = HashMap::new();
    for enrolled in 1..=3 {
        listed = Listed { version: listed.version + 1, ..mixed(enrolled, 4 - u32::from(enrolled)) };
        bench.give(listed.clone());
        assert!(flows.iter().all(|flow| bench.course(flow) == Ok(Course::Bypass)), "connections in clear stay there");
        assert!(sealed.iter().all(|(flow, endpoint)| bench.endpoint(flow) == *endpoint), "and the others in tunnels");
        let first = 41_000 + 100 * u16::from(enrolled);
        for flow in (first..first + 100).map(|port| to_service(protocol::TCP, port)) {
            if let Ok(Course::Translated(translation)) = bench.opens(&flow) {
                sealed.insert(flow, translation.wire.remote);
            }
        }
    }
    assert!((100..200).contains(&sealed.len()), "{}", sealed.len());
    // The next connection with the same addresses and ports is another one.
    let reopened = flows.iter().filter(|flow| bench.opens(flow) != Ok(Course::Bypass)).count();
    assert!((60..90).contains(&reopened), "{reopened}");
    let ended = flows.iter().filter(|flow| bench.course(flow) == Ok(Course::Bypass)).count();
    assert_eq!(ended, 100 - reopened, "as the last one began");
}

#[test]
fn what_once_went_into_a_tunnel_never_leaves_in_clear() {
    let [tcp, udp] = [protocol::TCP, protocol::UDP].map(|number| to_service(number, 40_000));
    let mut bench = Bench::new(cluster(2));
    let [of_tcp, of_udp] = [bench.endpoint(&tcp), bench.endpoint(&udp)];
    // Both pods make room for pods that are not enrolled, one after the other.
    let one_left = Listed { clear: 1, ..cluster(2).without(of_udp) };
    bench.give(one_left.clone());
    let other = if of_udp == pod(1) { pod(2) } else { pod(1) };
    assert_eq!(bench.endpoint(&udp), other, "to an enrolled endpoint");
    bench.give(Listed { clear: 2, version: 9, ..one_left.without(other) });
    for _ in 0..50 {
        bench.wait(100);
        assert_eq!(bench.course(&udp), Err(NoCourse::Refused), "as long as it is used");
        assert_eq!(bench.course(&tcp), Err(NoCourse::EndpointGone), "it was for {of_tcp}");
    }
    assert_eq!(bench.opens(&tcp), Ok(Course::Bypass), "the next connection");
    assert_eq!(bench.course(&tcp), Ok(Course::Bypass));
    bench.wait(181);
    assert_eq!(bench.course(&udp), Ok(Course::Bypass), "nobody remembers what it was");
    // A connection of which nothing is known is not let out while it may have been in a tunnel.
    bench.give(Listed { version: 10, ..mixed(1, 9) });
    for port in 50_000..50_050 {
        assert!(matches!(bench.course(&to_service(protocol::TCP, port)), Ok(Course::Translated(_))));
    }
}

#[test]
fn affinity_holds_for_endpoints_that_are_not_enrolled_too() {
    let with_affinity = |listed| Listed { affinity: bench_affinity(), ..listed };
    for (enrolled, clear) in [(1_u8, 9_u32), (9, 1)] {
        let mut bench = Bench::new(with_affinity(mixed(enrolled, clear)));
        let first = bench.opens(&to_service(protocol::TCP, 1)).unwrap();
        let is_same = |course: Course| match (first, course) {
            (Course::Translated(one), Course::Translated(other)) => one.wire.remote == other.wire.remote,
            (one, other) => one == other,
        };
        for port in 2..20 {
            bench.wait(60);
            // Others come and go.
            bench.give(with_affinity(Listed {
                version: u64::from(port),
                ..mixed(enrolled + port as u8 % 3, clear + 1)
            }));
            assert!(is_same(bench.opens(&to_service(protocol::TCP, port)).unwrap()));
        }
    }
}

#[test]
fn a_flood_of_flows_past_the_tunnels_takes_bounded_memory() {
    let bench = Bench::new(mixed(0, 1));
    for port in 1..60_000 {
        assert_eq!(bench.opens(&to_service(protocol::TCP, port)), Ok(Course::Bypass));
    }
    assert_eq!(bench.translations.len(), 0);
    assert!(bench.translations.bypassed() <= 2048);
}

#[test]
fn a_restart_under_another_list_moves_only_the_flows_that_have_to_move() {
    let before = Bench::with_room(cluster(5), 10_000);
    let mut shuffled = cluster(5);
    shuffled.services.iter_mut().for_each(|(_, endpoints, _)| endpoints.reverse());
    let after = Bench::with_room(shuffled, 10_000);
    let fewer = Bench::with_room(cluster(5).without(pod(2)), 10_000);
    let more = Bench::with_room(cluster(6), 10_000);
    let mut moved = 0;
    for port in 32_768..36_768 {
        let flow = to_service(protocol::TCP, port);
        let endpoint = before.endpoint(&flow);
        assert_eq!(after.endpoint(&flow), endpoint, "in another order");
        assert!(endpoint == pod(2) || fewer.endpoint(&flow) == endpoint, "another one is gone");
        let of_more = more.endpoint(&flow);
        assert!(of_more == endpoint || of_more == pod(6), "only to the one that was added");
        moved += i32::from(of_more != endpoint);
    }
    assert!((550..790).contains(&moved), "a sixth of 4000: {moved}");
}

#[test]
fn a_flow_from_before_keeps_its_endpoint_and_lives_as_long_as_one_that_was_answered() {
    let mut bench = Bench::new(cluster(3));
    let flow = to_service(protocol::TCP, 40_000);
    bench.translations.resume(&bench.current, &flow.into(), bench.now);
    bench.translations.resume(&bench.current, &to_pod(1, 40_001).into(), bench.now);
    assert_eq!(bench.translations.len(), 1, "what is not translated is not kept");
    bench.wait(80_000);
    let wire = Bench::new(cluster(3)).course(&flow).map(|course| translated(Ok(course)).wire).unwrap();
    assert!(bench.translations.is_resumed(&bench.current, &wire, bench.now));
    assert_eq!(bench.back(&wire), Some(flow));
    assert!(!bench.translations.is_resumed(&bench.current, &wire, bench.now), "only until it is answered");
}

#[test]
fn a_connection_from_before_the_capture_goes_on_with_the_endpoint_that_the_primary_network_chose() {
    let clear: IpAddr = [10, 244, 2, 1].into();
    let with_clear = Listed { clear_pods: vec![clear], ..mixed(3, 1) };
    for number in [protocol::TCP, protocol::UDP] {
        for n in 1..=3 {
            let bench = Bench::new(with_clear.clone());
            let flow = to_service(number, 40_000);
            let before = OpenedBefore { flow, led_to: Some((pod(n), 8080).into()) };
            bench.translations.resume(&bench.current, &before, bench.now);
            assert_eq!(bench.endpoint(&flow), pod(n), "whatever this node would choose");
        }
        let bench = Bench::new(with_clear.clone());
        for port in 40_000..40_020 {
            let flow = to_service(number, port);
            let before = OpenedBefore { flow, led_to: Some((clear, 8080).into()) };
            bench.translations.resume(&bench.current, &before, bench.now);
            assert_eq!(bench.course(&flow), Ok(Course::Bypass), "it was and is in clear");
            let flow = to_service(number, port + 100);
            let before = OpenedBefore { flow, led_to: Some(([10, 244, 9, 9], 8080).into()) };
            bench.translations.resume(&bench.current, &before, bench.now);
            assert_ne!(bench.course(&flow), Ok(Course::Bypass), "nobody knows who that was");
        }
    }
}

#[test]
fn a_connection_from_before_waits_for_its_endpoint_and_gets_no_other_one() {
    let (whole, flow) = (mixed(3, 1), to_service(protocol::TCP, 40_000));
    for n in 1..=3 {
        // The endpoint is captured after the pod that asks.
        let mut bench = Bench::new(whole.without(pod(n)));
        let before = OpenedBefore { flow, led_to: Some((pod(n), 8080).into()) };
        bench.translations.resume(&bench.current, &before, bench.now);
        assert_eq!(bench.course(&flow), Err(NoCourse::Unknown), "another one would reset it");
        bench.give(whole.next(|_| ()));
        bench.translations.resume_waiting(&bench.current, bench.now);
        let wire = FlowKey { remote: pod(n), remote_port: 8080, ..flow };
        assert_eq!(bench.back(&wire), Some(flow), "the endpoint may speak first");
        assert_eq!(bench.endpoint(&flow), pod(n));
    }
    // The pod may speak first as well, may open another connection from the same port, and waits for a minute at most.
    let fewer = || whole.without(pod(1));
    let before = OpenedBefore { flow, led_to: Some((pod(1), 8080).into()) };
    let mut bench = Bench::new(fewer());
    bench.translations.resume(&bench.current, &before, bench.now);
    bench.give(whole.next(|_| ()));
    assert_eq!(bench.endpoint(&flow), pod(1));
    let bench = Bench::new(fewer());
    bench.translations.resume(&bench.current, &before, bench.now);
    assert!(bench.opens(&flow).is_ok());
    let mut bench = Bench::new(fewer());
    bench.translations.resume(&bench.current, &before, bench.now);
    assert_eq!(bench.course(&flow), Err(NoCourse::Unknown));
    bench.wait(60);
    assert_ne!(bench.course(&flow), Err(NoCourse::Unknown));
}

#[test]
fn a_connection_outlives_the_service_but_not_its_pod_and_a_datagram_flow_neither() {
    let [tcp, udp] = [protocol::TCP, protocol::UDP].map(|number| to_service(number, 40_000));
    let mut bench = Bench::new(cluster(3));
    let [of_tcp, of_udp] = [tcp, udp].map(|flow| bench.endpoint(&flow));
    // Neither pod is an endpoint any more, but both exist.
    let before = cluster(3);
    let changed = before.next(|next| {
        for (_, endpoints, ready) in &mut next.services {
            endpoints.retain(|endpoint| endpoint.address != of_tcp && endpoint.address != of_udp);
            *ready = endpoints.len() as u32;
        }
    });
    bench.give(changed.clone());
    assert_eq!(bench.endpoint(&tcp), of_tcp);
    assert_ne!(bench.endpoint(&udp), of_udp);
    let gone = changed.next(|next| _ = next.pods.remove(&of_tcp));
    bench.give(gone);
    assert_eq!(bench.course(&tcp), Err(NoCourse::EndpointGone));
    assert_ne!(translated(bench.opens(&tcp)).wire.remote, of_tcp, "the next connection");
}

#[test]
fn an_endpoint_that_is_terminating_keeps_its_flows_and_gets_no_new_ones() {
    let udp = to_service(protocol::UDP, 40_000);
    let mut bench = Bench::new(cluster(3));
    let endpoint = bench.endpoint(&udp);
    bench.give(cluster(3).next(|next| {
        for (_, endpoints, ready) in &mut next.services {
            endpoints.sort_by_key(|one| one.address == endpoint);
            *ready = 2;
        }
    }));
    assert_eq!(bench.endpoint(&udp), endpoint);
    for port in 50_000..50_100 {
        assert_ne!(bench.endpoint(&to_service(protocol::UDP, port)), endpoint);
    }
}

#[test]
fn another_pod_at_the_same_address_gets_nothing_of_the_formers_flows() {
    let mut bench = Bench::new(cluster(1));
    let flow = to_service(protocol::TCP, 40_000);
    let wire = translated(bench.opens(&flow)).wire;
    assert_eq!(bench.back(&wire), Some(flow));
    let reborn = cluster(1).next(|next| {
        next.pods.insert(pod(1), 99);
        next.services.iter_mut().for_each(|(_, endpoints, _)| endpoints[0].incarnation = 99);
    });
    bench.give(reborn);
    assert_eq!(bench.back(&wire), None, "what the new pod sends is no answer");
    let same = to_service(protocol::TCP, 40_000);
    assert!(bench.opens(&same).is_ok());
}

#[test]
fn a_connection_that_ended_makes_room_for_the_next_from_the_same_port() {
    let bench = Bench::new(cluster(3));
    let flow = to_service(protocol::TCP, 40_000);
    let first = translated(bench.opens(&flow));
    bench.translations.note(&flow, tcp::FIN);
    assert_eq!(translated(bench.course(&flow)), first, "the last packets go the same way");
    // The firewall still knows the former flow, which is no other flow.
    let again = translated(bench.first(&flow, true, |wire| *wire == first.wire));
    assert_eq!(again.wire, first.wire);
    assert_eq!(bench.translations.len(), 1);
}

#[test]
fn two_flows_never_look_the_same_in_the_tunnel() {
    let mut listed = cluster(1);
    let other = Target { port: 81, ..target(protocol::TCP) };
    listed.services.push((other, listed.services[0].1.clone(), 1));
    let bench = Bench::new(listed);
    let [service, direct] = [to_service(protocol::TCP, 40_000), to_pod(1, 40_000)];
    let second = FlowKey { remote_port: 81, ..service };
    let wire = translated(bench.opens(&service)).wire;
    assert_eq!(wire, direct);
    for flow in [direct, second] {
        let shifted = translated(bench.opens(&flow));
        assert_ne!(shifted.wire.local_port, 40_000);
        assert_eq!((shifted.wire.remote, shifted.wire.remote_port), (pod(1), 8080));
        assert_eq!(bench.back(&shifted.wire), Some(flow));
    }
    assert_eq!(bench.back(&wire), Some(service));
}

#[test]
fn a_port_that_the_firewall_knows_a_flow_of_is_taken() {
    let bench = Bench::new(cluster(1));
    let flow = to_service(protocol::TCP, 40_000);
    let asked = Cell::new(0);
    let shifted = translated(bench.first(&flow, true, |wire| {
        asked.set(asked.get() + 1);
        wire.local_port == 40_000
    }));
    assert!(shifted.wire.local_port >= 32_768 && shifted.wire.local_port != 40_000);
    assert_eq!(asked.get(), 2);
    let privileged = to_service(protocol::TCP, 1000);
    let shifted = translated(bench.first(&privileged, true, |wire| wire.local_port == 1000));
    assert!((512..1024).contains(&shifted.wire.local_port));
    assert_eq!(bench.first(&to_service(protocol::TCP, 5), true, |_| true), Err(NoCourse::Full));
}

#[test]
fn a_pod_that_is_its_own_endpoint_gets_its_packets_back_both_ways() {
    let mut listed = cluster(1);
    listed.pods.insert(POD.into(), 7);
    listed.services[0].1 = vec![Endpoint { address: POD.into(), port: 8080, incarnation: 7 }];
    let bench = Bench::new(listed);
    let client = to_service(protocol::TCP, 40_000);
    let Ok(Course::ToSelf(out)) = bench.opens(&client) else { panic!("not to itself") };
    assert_eq!(out.out().source, (CLUSTER_IP.into(), 40_000));
    assert_eq!(out.out().destination, (POD.into(), 8080));
    let server = FlowKey { local_port: 8080, remote_port: 40_000, ..client };
    let Ok(Course::BackToSelf(back)) = bench.course(&server) else { panic!("not back to itself") };
    assert_eq!((back.back().source, back.back().destination), ((CLUSTER_IP.into(), 80), (POD.into(), 40_000)));
    assert_eq!(bench.back(&server), None, "nobody else can answer");
}

#[test]
fn affinity_keeps_new_flows_on_one_endpoint_until_there_was_none_for_long() {
    let mut bench = Bench::new(Listed { affinity: Some(Duration::from_secs(100)), ..cluster(8) });
    let first = bench.endpoint(&to_service(protocol::TCP, 1));
    for port in 2..40 {
        bench.wait(60);
        assert_eq!(bench.endpoint(&to_service(protocol::TCP, port)), first);
    }
    // Chosen anew, and so after a restart: by the client and the Service alone.
    bench.wait(101);
    assert_eq!(bench.endpoint(&to_service(protocol::TCP, 100)), first);
    assert_eq!(
        Bench::new(Listed { affinity: bench_affinity(), ..cluster(8) }).endpoint(&to_service(protocol::TCP, 101)),
        first
    );
    bench.give(Listed { affinity: bench_affinity(), ..cluster(8).without(first) });
    assert_ne!(bench.endpoint(&to_service(protocol::TCP, 500)), first, "it cannot be chosen any more");
}

fn bench_affinity() -> Option<Duration> {
    Some(Duration::from_secs(100))
}

#[test]
fn idle_flows_end_and_established_connections_last_a_day() {
    let mut bench = Bench::new(cluster(3));
    let [quiet, live, datagrams] =
        [to_service(protocol::TCP, 1), to_service(protocol::TCP, 2), to_service(protocol::UDP, 3)]
            .map(|flow| (flow, bench.endpoint(&flow)));
    let wire = translated(bench.course(&live.0)).wire;
    assert_eq!(bench.back(&wire), Some(live.0));
    bench.wait(179);
    assert_eq!(bench.endpoint(&datagrams.0), datagrams.1);
    bench.wait(179);
    assert_eq!(bench.translations.len(), 3);
    bench.translations.expire(bench.now);
    assert_eq!(bench.translations.len(), 2, "{quiet:?} was never answered");
    bench.wait(23 * 3600);
    bench.translations.expire(bench.now);
    bench.translations.expire(bench.now);
    assert_eq!(bench.translations.len(), 1);
    assert_eq!(bench.back(&wire), Some(live.0));
    bench.wait(25 * 3600);
    assert_eq!(bench.back(&wire), None);
}

#[test]
fn a_flood_of_new_flows_is_bounded_and_evicts_no_established_connection() {
    let mut bench = Bench::with_room(cluster(3), 100);
    let live: Vec<_> = (1..=20).map(|port| to_service(protocol::TCP, port)).collect();
    for flow in &live {
        let wire = translated(bench.opens(flow)).wire;
        assert!(bench.back(&wire).is_some());
    }
    for port in 1000..6000 {
        if port % 500 == 0 {
            bench.wait(1);
        }
        assert!(bench.opens(&to_service(protocol::TCP, port)).is_ok());
        assert!(bench.translations.len() <= 100);
    }
    for flow in &live {
        let wire = translated(bench.course(flow)).wire;
        assert_eq!(bench.back(&wire), Some(*flow));
    }
    let known = live.iter().filter(|flow| bench.translations.of_original(flow).is_some()).count();
    assert_eq!(known, 20);
}

proptest! {
    /// Whatever happens, answers of one endpoint find exactly one flow, the right one.
    #[test]
    fn both_forms_of_every_flow_lead_to_each_other(
        steps in prop::collection::vec((0_u8..6, 0_u16..12, 0_u8..4, 0_u64..70), 1..200),
    ) {
        let mut listed = cluster(4);
        listed.services.push((Target { port: 81, ..target(protocol::TCP) }, listed.services[0].1.clone(), 4));
        let mut bench = Bench::with_room(listed.clone(), 16);
        let mut known: HashMap<FlowKey, FlowKey> = HashMap::new();
        for (step, port, which, seconds) in steps {
            bench.wait(seconds);
            let flow = match which {
                0 => FlowKey { remote_port: 81, ..to_service(protocol::TCP, port) },
                1 => to_service(protocol::UDP, port),
                2 => to_pod(1 + (port % 4) as u8, port % 3),
                _ => to_service(protocol::TCP, port),
            };
            match step {
                0 => bench.translations.note(&flow, tcp::FIN),
                1 => bench.translations.expire(bench.now),
                2 => {
                    listed = match listed.pods.contains_key(&pod(1 + which)) && listed.pods.len() > 1 {
                        true => listed.without(pod(1 + which)),
                        false => Listed { version: listed.version + 1, ..cluster(4) },
                    };
                    listed.services.retain(|(target, ..)| target.port != 81);
                    listed.services.push((Target { port: 81, ..target(protocol::TCP) }, listed.services[0].1.clone(), listed.services[0].2));
                    bench.give(listed.clone());
                }
                _ => {}
            }
            if let Ok(Course::Translated(translation)) = bench.first(&flow, step == 3, |_| false) {
                prop_assert_eq!(translation.original, flow);
                known.insert(flow, translation.wire);
                prop_assert_eq!(bench.back(&translation.wire), Some(flow));
            }
            let mut wires = std::collections::HashSet::new();
            for flow in known.keys() {
                if let Some(translation) = bench.translations.of_original(flow) {
                    prop_assert!(wires.insert(translation.wire), "two flows look the same");
                    prop_assert_eq!(bench.translations.of_wire(&translation.wire), Some(translation));
                }
            }
            prop_assert_eq!(bench.translations.len(), wires.len());
            prop_assert!(wires.len() <= 16);
        }
    }
}
