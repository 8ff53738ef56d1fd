//! A lighthouse with many connected hosts: an update, a query, a traffic check, and the memory per host.
//!
//! The hosts' tunnels are created without handshakes and share one certificate, so that creating a million takes only
//! seconds. Messages are fed in already decrypted, and come out sealed.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nebula_benches::{Go, Host, NO_GO, Step, cpu_time, heap, identity, is_smoke_test, note};
use nebula_cert::{Curve, Version};
use nebula_core::LocalIndex;
use nebula_core::MessageType;
use nebula_core::Punt;
use nebula_core::internals::Server;
use nebula_core::internals::messages::{Meta, MetaKind};
use nebula_core::lighthouse::KnownEndpoints;
use nebula_core::simulator::Authority;

struct Served {
    lighthouse: Host,
    tunnels: Vec<LocalIndex>,
}

impl Served {
    fn new(count: u32) -> Self {
        let authority = Authority::new(Curve::Curve25519);
        let trust = authority.trust();
        let lighthouse = Host::new(&authority, &trust, 1, |config| config.lighthouse.am_lighthouse = true);
        let shared = identity(&authority, 2).primary().clone();
        let shared = trust.verify(shared, 1_800_000_000).expect("a certificate of this authority");
        let mut served = Self { lighthouse, tunnels: Vec::with_capacity(count as usize) };
        let before = heap::live();
        for at in 0..count as usize {
            let (node, now) = (&mut served.lighthouse.node, served.lighthouse.now);
            let tunnel = node.adopt(now, shared.clone(), vec![overlay(at)], underlay(at));
            served.tunnels.push(tunnel.expect("room in the table"));
            served.lighthouse.drain();
        }
        let connected = heap::live();
        for at in 0..served.tunnels.len() {
            served.take(punt(served.tunnels[at], at, update(at)));
        }
        let known = heap::live();
        let per_host = |bytes: usize| Some(bytes as f64 / f64::from(count));
        note(
            &format!("lighthouse, memory of a tunnel without certificate, {count} hosts"),
            None,
            per_host(connected - before),
            NO_GO,
        );
        let title = format!("lighthouse, memory of a report in a node, {count} hosts");
        note(&title, None, per_host(known - connected), Go { ns: None, bytes: Some(750.0) });
        served
    }

    /// Handles a message; returns how many messages the lighthouse sends in response.
    fn take(&mut self, punt: Punt) -> usize {
        self.lighthouse.node.handle_punt(self.lighthouse.now, punt);
        std::iter::from_fn(|| self.lighthouse.node.poll_transmit()).count()
    }

    /// Runs the traffic check of every tunnel once. No host has sent anything yet, so each is sent a test.
    fn check_all(&mut self) {
        let begun = cpu_time();
        let (node, mut tests) = (&mut self.lighthouse.node, 0);
        node.handle_timeout(self.lighthouse.now + Duration::from_secs(6));
        let spent = cpu_time().saturating_sub(begun);
        while node.poll_transmit().is_some() {
            tests += 1;
        }
        assert_eq!(tests, self.tunnels.len());
        let ns = spent.as_nanos() as f64 / self.tunnels.len() as f64;
        note(&format!("lighthouse, traffic check and test, {tests} hosts"), Some(ns), None, NO_GO);
    }
}

/// A decrypted message from a tunnel.
fn punt(tunnel: LocalIndex, at: usize, plaintext: Vec<u8>) -> Punt {
    Punt::Message { tunnel, from: underlay(at).into(), kind: MessageType::Lighthouse, plaintext }
}

/// The hosts' reports and the messages about them, without tunnels, allow lists and sealing.
struct Reports(Server);

impl Reports {
    fn new(hosts: usize) -> Self {
        let before = heap::live();
        let mut reports = Self(Server::default());
        for at in 0..hosts {
            reports.update(at, &update(at));
        }
        let bytes = Some((heap::live() - before) as f64 / hosts as f64);
        // Go's figure includes the endpoints learned from tunnels; here they are stored in the tunnel.
        let go = Go { ns: None, bytes: Some(750.0) };
        note(&format!("lighthouse, memory of what a host reported, {hosts} hosts"), None, bytes, go);
        reports
    }

    fn update(&mut self, at: usize, message: &[u8]) -> Vec<u8> {
        let update = Meta::parse(message).expect("an update");
        let report = KnownEndpoints { reported: update.endpoints, relays: update.relays, ..KnownEndpoints::default() };
        self.0.store(&[overlay(at)], &report);
        encoded(&Meta::new(MetaKind::HostUpdateNotificationAck, Version::V2, None))
    }

    /// The reply to the querier, and the notification to the subject.
    fn query(&self, at: usize, message: &[u8]) -> [Vec<u8>; 2] {
        let subject = Meta::parse(message).expect("a query").subject.expect("whom it is about");
        let known = [subject, overlay(at)].map(|about| (about, self.0.report(about).expect("every host reported")));
        let mut kinds = [MetaKind::HostQueryReply, MetaKind::HostPunchNotification].into_iter();
        known.map(|(about, known)| {
            let kind = kinds.next().expect("two of them");
            let mut answer = Meta::new(kind, Version::V2, Some(about));
            (answer.endpoints, answer.relays) = (known.reported, known.relays);
            encoded(&answer)
        })
    }
}

fn update(at: usize) -> Vec<u8> {
    let mut update = Meta::new(MetaKind::HostUpdateNotification, Version::V2, None);
    update.endpoints = vec![underlay(at), SocketAddr::from(([192, 168, 1, 7], 4242))];
    encoded(&update)
}

fn query(subject: usize) -> Vec<u8> {
    encoded(&Meta::new(MetaKind::HostQuery, Version::V2, Some(overlay(subject))))
}

fn encoded(message: &Meta) -> Vec<u8> {
    message.encode().expect("version 2 names everything")
}

/// The numbers of hosts to measure with; LIGHTHOUSE_HOSTS overrides the default.
fn sizes() -> Vec<u32> {
    let named = std::env::var("LIGHTHOUSE_HOSTS").unwrap_or_else(|_| "100000".to_owned());
    let sizes = named.split_whitespace().map(|text| text.parse().expect("LIGHTHOUSE_HOSTS must be numbers")).collect();
    if is_smoke_test() { vec![50] } else { sizes }
}

fn overlay(at: usize) -> IpAddr {
    Ipv4Addr::from_bits((10 << 24) + 2 + at as u32).into()
}

fn underlay(at: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::from_bits(198 << 24 | 18 << 16 | at as u32), 4242))
}

fn lighthouse(c: &mut Criterion) {
    for count in sizes() {
        // Go Nebula's figures, which like this benchmark exclude tunnels and sealing.
        let [go_update, go_query] = match count {
            100_000 => [1600.0, 1800.0].map(|ns| Go { ns: Some(ns), bytes: None }),
            1_000_000 => [2600.0, 2800.0].map(|ns| Go { ns: Some(ns), bytes: None }),
            _ => [NO_GO; 2],
        };
        let mut group = c.benchmark_group(format!("lighthouse_{count}_hosts"));
        group.throughput(Throughput::Elements(1));
        let hosts = count as usize;
        // Visits the hosts in a scattered order, so that the next host's entries are not in the CPU caches, but its
        // message is.
        let mut last = 0;
        let mut next = || {
            last = (last + 982_451_653) % hosts;
            (last, (last + hosts / 2) % hosts)
        };
        let mut reports = Reports::new(hosts);
        let title = format!("lighthouse update, message alone, {count} hosts");
        let told = || {
            let (at, _) = next();
            (at, update(at))
        };
        Step::new(title, go_update).with(&mut group, "store", told, |(at, message)| reports.update(at, &message));
        let title = format!("lighthouse query, messages alone, {count} hosts");
        let asked = || {
            let (at, subject) = next();
            (at, query(subject))
        };
        Step::new(title, go_query).with(&mut group, "answer", asked, |(at, message)| reports.query(at, &message));
        drop(reports);

        let mut served = Served::new(count);
        let tunnels = served.tunnels.clone();
        let told = || {
            let (at, _) = next();
            punt(tunnels[at], at, update(at))
        };
        let step = Step::new(format!("lighthouse update in a tunnel, {count} hosts"), NO_GO);
        step.with(&mut group, "update", told, |update| assert_eq!(served.take(update), 1, "the acknowledgement"));
        let asked = || {
            let (at, subject) = next();
            punt(tunnels[at], at, query(subject))
        };
        let step = Step::new(format!("lighthouse query in a tunnel, {count} hosts"), NO_GO);
        step.with(&mut group, "query", asked, |query| {
            assert_eq!(served.take(query), 2, "the reply and the notice to the subject");
        });
        group.finish();
        served.check_all();
    }
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = lighthouse);
criterion_main!(benches);
