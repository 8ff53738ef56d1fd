//! Tests of records: what they say, in which order they are told, what gives way, and that every byte is in one.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::firewall::{About, Conntrack, Filter, Firewall, FlowCache, Policy, Rule};
use crate::forward::testing::{tunnel, verified};
use crate::index::LocalIndex;
use crate::tunnel::Tunnel;

const PEERS: usize = 3;
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

#[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
fn base() -> Instant {
    Instant::now()
}

/// A node at 10.1.0.1/16 with tunnels to some peers and several lanes.
struct Bench {
    start: Instant,
    now: Duration,
    filter: Filter,
    policy: Policy,
    conntrack: Conntrack,
    lanes: [FlowCache; 2],
    tunnels: Vec<Arc<Tunnel>>,
}

impl Bench {
    fn new(most: usize, max_flows: usize) -> Self {
        Self::with_peers(PEERS, most, max_flows)
    }

    fn with_peers(peers: usize, most: usize, max_flows: usize) -> Self {
        let policy = Policy { inbound: vec![Rule::any()], outbound: vec![Rule::any()], ..Policy::default() };
        let start = base();
        let conntrack = Conntrack::new(start, 7, max_flows);
        conntrack.records().set_first_number(1_000);
        conntrack.records().set_most(most);
        let peer = |n: usize| {
            let network = format!("10.1.{}.{}/16", n / 200, n % 200 + 2);
            let tunnel = tunnel(LocalIndex(n as u32 + 1), verified(&[&network]));
            tunnel.set_endpoint(Some("192.0.2.1:4242".parse().unwrap()));
            tunnel
        };
        Self {
            start,
            now: Duration::ZERO,
            filter: filter(&policy, 1),
            policy,
            conntrack,
            lanes: Default::default(),
            tunnels: (0..peers).map(peer).collect(),
        }
    }

    fn at(&self) -> Instant {
        self.start + self.now
    }

    fn flow(&self, peer: usize, port: u16) -> FlowKey {
        let remote = self.tunnels[peer].peer_addresses[0];
        let local = IpAddr::from([10, 1, 0, 1]);
        FlowKey { local, remote, local_port: port, remote_port: 443, protocol: 17, fragment: false }
    }

    /// Packets of one flow in one lane, as the forwarding plane handles them. Returns whether they pass.
    fn packets(&mut self, lane: usize, direction: Direction, (peer, port): (usize, u16), amount: Amount) -> bool {
        let (at, flow) = (self.at(), self.flow(peer, port));
        let firewall = Firewall { filter: &self.filter, conntrack: &self.conntrack };
        let tunnel = &self.tunnels[peer];
        match firewall.check(&mut self.lanes[lane], at, direction, &flow, tunnel, |_| None) {
            Ok(place) => {
                self.lanes[lane].count(place, amount.packets, amount.bytes);
                true
            }
            Err(reason) => {
                let about = About { direction, flow: &flow, original: None };
                firewall.note_refused(at, about, Some(tunnel), (reason, amount));
                false
            }
        }
    }

    fn reload(&mut self, policy: Policy) {
        Firewall { filter: &self.filter, conntrack: &self.conntrack }.decide_records(&self.policy);
        self.filter = filter(&policy, self.filter.generation() + 1);
        self.policy = policy;
    }

    fn settle(&mut self) {
        let at = self.at();
        let firewall = Firewall { filter: &self.filter, conntrack: &self.conntrack };
        self.lanes.iter_mut().for_each(|lane| firewall.tell_all(lane, at));
    }

    fn read(&self, asked: AskedRecords, most: usize) -> FlowRecords {
        Firewall { filter: &self.filter, conntrack: &self.conntrack }.decide_records(&self.policy);
        let now = self.conntrack.millis(self.at());
        let since_start = |millis| self.conntrack.instant(millis).saturating_duration_since(self.start);
        let by = Completion { unix: &since_start, relay: &|_| None, original: &|_| None };
        self.conntrack.records().read(asked, most, now).complete(&by)
    }

    fn newest(&self) -> Vec<FlowRecord> {
        self.read(AskedRecords::Newest, usize::MAX).records
    }
}

fn filter(policy: &Policy, generation: u32) -> Filter {
    Filter::new(policy, &["10.1.0.1/16".parse().unwrap()], &[], generation)
}

const ONE: Amount = Amount { packets: 1, bytes: 100 };

#[test]
fn a_flow_is_told_when_it_begins_once_a_minute_while_it_goes_on_and_when_it_ends() {
    let mut bench = Bench::new(16, 100);
    let mut next = 0;
    let mut told = |bench: &Bench| -> Vec<(FlowEvent, u64, u64)> {
        let read = bench.read(AskedRecords::After(next), 100);
        next = read.next;
        read.records.into_iter().map(|record| (record.event, record.sent.packets, record.received.packets)).collect()
    };
    let none: Vec<(FlowEvent, u64, u64)> = Vec::new();
    assert!(bench.packets(0, Direction::Outbound, (0, 9), ONE));
    assert_eq!(told(&bench), [(FlowEvent::Created, 0, 0)]);
    assert_eq!(told(&bench), none);
    for _ in 0..130 {
        bench.now += SECOND;
        assert!(bench.packets(0, Direction::Outbound, (0, 9), ONE));
        assert!(bench.packets(1, Direction::Inbound, (0, 9), ONE));
        if bench.now < MINUTE {
            assert_eq!(told(&bench), none, "not within a minute");
        }
    }
    bench.settle();
    assert_eq!(told(&bench), [(FlowEvent::Updated, 131, 130)]);
    bench.now += Duration::from_secs(300);
    bench.conntrack.expire(bench.at(), &bench.filter);
    let ended = FlowEvent::Ended(End::Idle);
    assert_eq!(told(&bench), [(ended, 131, 130)]);
    let record = &bench.newest()[0];
    assert_eq!((record.started, record.last), (Duration::ZERO, Duration::from_secs(130)));
    assert_eq!((record.direction, record.path), (Direction::Outbound, Some(FlowPath::Direct)));
    assert_eq!(record.decision.as_deref(), Some(&Decision { rule: Some(0), policy: None }));
    assert_eq!(record.peer.as_ref().unwrap().networks(), bench.tunnels[0].peer.networks());
    assert_eq!((record.sent.bytes, record.id), (13_100, 1_000));
}

#[test]
fn refused_packets_of_one_kind_are_one_record_whatever_port_they_come_from() {
    let mut bench = Bench::new(16, 100);
    bench.reload(Policy::default());
    for port in 0..500 {
        assert!(!bench.packets(0, Direction::Outbound, (0, port), ONE));
    }
    assert!(!bench.packets(0, Direction::Outbound, (1, 1), ONE));
    assert!(!bench.packets(0, Direction::Inbound, (1, 1), ONE));
    let read = bench.read(AskedRecords::After(0), 100);
    let refused = FlowEvent::Refused(DropReason::NoRule);
    let told: Vec<_> = read.records.iter().map(|it| (it.event, it.sent.packets, it.received.packets)).collect();
    assert_eq!(told, [(refused, 500, 0), (refused, 1, 0), (refused, 0, 1)]);
    assert_eq!(read.records[0].flow, FlowKey { local_port: 0, ..bench.flow(0, 0) });
    assert_eq!(read.records[2].flow, FlowKey { remote_port: 0, ..bench.flow(1, 1) });
    // What comes within the minute is told after it.
    assert!(!bench.packets(0, Direction::Outbound, (0, 1), ONE));
    assert_eq!(bench.read(AskedRecords::After(read.next), 100).records.len(), 0);
    bench.now += MINUTE;
    let later = bench.read(AskedRecords::After(read.next), 100).records;
    assert_eq!((later.len(), later[0].id, later[0].sent.packets), (1, read.records[0].id, 501));
}

#[test]
fn a_flow_that_rules_no_longer_allow_has_ended_and_keeps_the_rule_that_allowed_it_apart() {
    let mut bench = Bench::new(16, 100);
    assert!(bench.packets(0, Direction::Outbound, (0, 9), ONE));
    assert!(bench.packets(0, Direction::Outbound, (1, 9), ONE));
    bench.reload(Policy { outbound: Vec::new(), ..bench.policy.clone() });
    bench.now += SECOND;
    assert!(!bench.packets(0, Direction::Outbound, (0, 9), ONE));
    let records = bench.newest();
    let of = |event: FlowEvent| records.iter().find(|record| record.event == event).expect("a record");
    let ended = of(FlowEvent::Ended(End::Refused(DropReason::NoRule)));
    assert_eq!((ended.sent, ended.decision.as_deref()), (ONE, Some(&Decision::default())));
    assert_eq!(of(FlowEvent::Refused(DropReason::NoRule)).sent, ONE);
    // The other one was not seen since: the rules of before had allowed it.
    assert_eq!(of(FlowEvent::Created).decision.as_deref(), Some(&Decision { rule: Some(0), policy: None }));
    // It expires, which is no second end.
    bench.now += Duration::from_secs(1000);
    bench.conntrack.expire(bench.at(), &bench.filter);
    assert_eq!(bench.newest().iter().filter(|record| record.id == ended.id).count(), 1);
}

#[test]
fn a_flow_that_is_judged_again_names_the_rule_that_allows_it_by_now() {
    let mut bench = Bench::new(16, 100);
    assert!(bench.packets(0, Direction::Outbound, (0, 9), ONE));
    let rule = |bench: &Bench| bench.newest()[0].decision.as_ref().and_then(|decision| decision.rule);
    assert_eq!(rule(&bench), Some(0));
    let other = Rule { host: Some("nobody".to_owned()), ..Rule::default() };
    bench.reload(Policy { outbound: vec![other, Rule::any()], ..bench.policy.clone() });
    assert_eq!(rule(&bench), Some(0), "by the rules of its last packet");
    bench.now += 2 * SECOND;
    assert!(bench.packets(0, Direction::Outbound, (0, 9), ONE));
    bench.settle();
    assert_eq!(rule(&bench), Some(1));
}

#[test]
fn a_peer_with_a_hundred_thousand_flows_pushes_out_its_own_records_only() {
    let mut bench = Bench::new(64, 1 << 18);
    for port in 0..10 {
        assert!(bench.packets(0, Direction::Inbound, (1, port), ONE));
    }
    let quiet = bench.read(AskedRecords::After(0), 100);
    assert_eq!((quiet.records.len(), quiet.lost), (10, 0));
    for n in 0..100_000_u32 {
        let flow = FlowKey { remote_port: (n >> 16) as u16, ..bench.flow(0, n as u16) };
        let firewall = Firewall { filter: &bench.filter, conntrack: &bench.conntrack };
        let tunnel = &bench.tunnels[0];
        firewall.check(&mut bench.lanes[0], bench.start, Direction::Inbound, &flow, tunnel, |_| None).unwrap();
    }
    let read = bench.read(AskedRecords::Newest, usize::MAX);
    let of = |n: usize| read.records.iter().filter(|it| it.flow.remote == bench.flow(n, 0).remote).count();
    assert_eq!((of(1), of(0)), (10, read.records.len() - 10));
    assert_eq!(read.lost, 100_000 - of(0) as u64, "those that were told are not lost");
    // Destinations without a peer count together.
    let nowhere = |n: u32| FlowKey { remote: IpAddr::from(n.to_be_bytes()), ..bench.flow(0, 1) };
    let firewall = Firewall { filter: &bench.filter, conntrack: &bench.conntrack };
    for n in 0x0b00_0000..0x0b00_0400 {
        let flow = nowhere(n);
        let about = About { direction: Direction::Outbound, flow: &flow, original: None };
        firewall.note_refused(bench.start, about, None, (DropReason::NoRoute, ONE));
    }
    let records = bench.newest();
    assert_eq!(records.iter().filter(|it| it.flow.remote == bench.flow(1, 0).remote).count(), 10);
}

#[test]
fn records_are_bounded_in_number_and_memory_and_go_when_they_are_switched_off() {
    let mut bench = Bench::with_peers(300, 64, 1000);
    for peer in 0..300 {
        assert!(bench.packets(0, Direction::Inbound, (peer, 1), ONE));
    }
    let kept = bench.newest();
    assert!((20..=64).contains(&kept.len()), "{}", kept.len());
    let remotes: Vec<_> = kept.iter().map(|record| record.flow.remote).collect();
    assert_eq!(remotes.last(), Some(&bench.flow(299, 0).remote), "the newest stay");
    assert!(!remotes.contains(&bench.flow(0, 0).remote));
    assert_eq!(bench.read(AskedRecords::Newest, 5).records.len(), 5);
    assert!(bench.read(AskedRecords::Newest, 5).is_cut);
    bench.conntrack.records().set_most(4);
    assert!(bench.newest().len() <= 4);
    bench.conntrack.records().set_most(0);
    assert_eq!(bench.newest().len(), 0);
    assert!(bench.packets(0, Direction::Inbound, (0, 2), ONE));
    assert_eq!(bench.newest().len(), 0);
    // A flow from before is recorded from its next packets on.
    bench.conntrack.records().set_most(4);
    bench.now += 2 * SECOND;
    assert!(bench.packets(0, Direction::Outbound, (0, 2), ONE));
    bench.settle();
    let records = bench.newest();
    assert_eq!((records.len(), records[0].direction, records[0].sent), (1, Direction::Inbound, ONE));
}

#[test]
fn who_asks_for_a_few_at_a_time_gets_all_of_them_in_order() {
    let mut bench = Bench::new(64, 1000);
    for port in 0..40 {
        assert!(bench.packets(0, Direction::Inbound, (0, port), ONE));
    }
    let (mut next, mut numbers) = (0, Vec::new());
    loop {
        let read = bench.read(AskedRecords::After(next), 7);
        numbers.extend(read.records.iter().map(|record| record.number));
        next = read.next;
        if !read.is_cut {
            break;
        }
    }
    assert_eq!(numbers, (1_000..1_040).collect::<Vec<_>>());
    // A number from the future is one of another life of the node.
    assert_eq!(bench.read(AskedRecords::After(u64::MAX), 100).records.len(), 40);
}

proptest! {
    /// Flows come, go, are evicted, refused and forgotten with their peer, in two lanes, while somebody reads in turns:
    /// the last version of each record, together, says what passed.
    #[test]
    fn every_byte_that_passes_is_in_one_record(
        steps in prop::collection::vec((0_u8..20, 0..PEERS, 0_u16..40, 0_usize..2, 1_u64..40, 0_u64..3_000), 1..400),
        max_flows in prop::sample::select(vec![16_usize, 64, 1000]),
    ) {
        let mut bench = Bench::new(1 << 16, max_flows);
        let mut passed = BTreeMap::<(usize, bool), (u64, u64)>::new();
        let mut known = BTreeMap::new();
        let mut next = 0;
        let open = bench.policy.clone();
        for (step, peer, port, lane, packets, wait) in steps {
            bench.now += Duration::from_millis(wait);
            match step {
                0 => bench.conntrack.forget(bench.tunnels[peer].peer_addresses[0], bench.at()),
                1 => bench.now += Duration::from_secs(200),
                2 => bench.conntrack.expire(bench.at(), &bench.filter),
                3 => bench.reload(Policy { outbound: Vec::new(), ..open.clone() }),
                4 => bench.reload(open.clone()),
                5 => {
                    let read = bench.read(AskedRecords::After(next), 16);
                    prop_assert!(read.records.is_sorted_by_key(|record| record.number));
                    next = read.next;
                    known.extend(read.records.into_iter().map(|record| (record.id, record)));
                }
                6 => bench.settle(),
                _ => {
                    let direction = if port % 3 == 0 { Direction::Inbound } else { Direction::Outbound };
                    let amount = Amount { packets, bytes: packets * 1_000 };
                    if bench.packets(lane, direction, (peer, port), amount) {
                        let sum = passed.entry((peer, direction == Direction::Inbound)).or_default();
                        *sum = (sum.0 + amount.packets, sum.1 + amount.bytes);
                    }
                }
            }
        }
        bench.settle();
        bench.now += MINUTE;
        loop {
            let read = bench.read(AskedRecords::After(next), 16);
            next = read.next;
            known.extend(read.records.into_iter().map(|record| (record.id, record)));
            prop_assert_eq!(read.lost, 0);
            if !read.is_cut {
                break;
            }
        }
        let mut told = BTreeMap::<(usize, bool), (u64, u64)>::new();
        for record in known.values().filter(|record| !matches!(record.event, FlowEvent::Refused(_))) {
            let peer = (0..PEERS).find(|n| bench.flow(*n, 0).remote == record.flow.remote).unwrap();
            for (amount, inbound) in [(record.sent, false), (record.received, true)] {
                if amount.packets > 0 {
                    let sum = told.entry((peer, inbound)).or_default();
                    *sum = (sum.0 + amount.packets, sum.1 + amount.bytes);
                }
            }
        }
        prop_assert_eq!(told, passed);
    }
}
