//! Hosts choose their relays among the members of a group, by measurement.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use nebula_core::internals::header::{Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, Link, NatBehaviour, SimNet};
use nebula_core::{Event, OfferedRelay, RelayReason, RelayState, RelayTrouble};

const SECOND: Duration = Duration::from_secs(1);

fn groups(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn lighthouse_spec() -> HostSpec {
    HostSpec::new("lighthouse").am_lighthouse().config(|config| config.relay.groups = groups(&["relay"]))
}

fn relay_spec(name: &str, lighthouse: HostId) -> HostSpec {
    let relay = HostSpec::new(name).lighthouse(lighthouse).groups(&["relay"]);
    relay.config(|config| config.relay.am_relay = true)
}

fn host_spec(name: &str, lighthouse: HostId) -> HostSpec {
    HostSpec::new(name).lighthouse(lighthouse).config(|config| config.relay.groups = groups(&["relay"]))
}

/// A lighthouse, relays, and hosts that cannot reach each other directly.
pub(crate) struct Grouped {
    pub(crate) net: SimNet,
    lighthouse: HostId,
    pub(crate) relays: Vec<HostId>,
    pub(crate) hosts: Vec<HostId>,
}

impl Grouped {
    pub(crate) fn new(seed: u64, relays: usize, hosts: usize) -> Self {
        let mut net = SimNet::new(seed);
        let lighthouse = net.add(lighthouse_spec());
        let relays: Vec<_> = (0..relays).map(|n| net.add(relay_spec(&format!("r{n}"), lighthouse))).collect();
        net.run_for(2 * SECOND);
        let hosts: Vec<_> = (0..hosts).map(|n| net.add(host_spec(&format!("h{n}"), lighthouse))).collect();
        for (n, a) in hosts.iter().enumerate() {
            hosts[..n].iter().for_each(|b| net.cut(*a, *b));
        }
        Self { net, lighthouse, relays, hosts }
    }

    pub(crate) fn offered(&mut self, host: HostId) -> Vec<OfferedRelay> {
        self.net.control(host, |node, _| node.offered_relays())
    }

    /// The relays that a host chose.
    fn chosen(&mut self, host: HostId) -> Vec<HostId> {
        let chosen: Vec<_> = self.offered(host).into_iter().filter(|it| it.is_chosen).map(|it| it.relay).collect();
        let all: Vec<_> = self.relays.clone();
        all.into_iter().filter(|relay| chosen.contains(&self.net.overlay(*relay))).collect()
    }

    pub(crate) fn of(&mut self, host: HostId, relay: HostId) -> OfferedRelay {
        let address = self.net.overlay(relay);
        self.offered(host).into_iter().find(|it| it.relay == address).expect("it was offered")
    }

    /// The relays that the lighthouse knows of a host.
    pub(crate) fn reported(&mut self, host: HostId) -> Vec<IpAddr> {
        let address = self.net.overlay(host);
        let report = self.net.control(self.lighthouse, |node, _| node.whereabouts(address).reported);
        report.map(|report| report.relays).unwrap_or_default()
    }

    fn calls(&self, host: HostId) -> usize {
        self.net.events(host).iter().filter(|event| matches!(event, Event::HandshakeSent { .. })).count()
    }
}

fn link(milliseconds: u64, loss: u32) -> Link {
    Link { latency: Duration::from_millis(milliseconds), loss, ..Link::default() }
}

/// The relay through which `host` reaches `peer`; `None` if it reaches it directly.
pub(crate) fn relay_of(net: &SimNet, host: HostId, peer: HostId) -> Option<IpAddr> {
    let tunnel = net.tunnels_to(host, peer).into_iter().find(|tunnel| tunnel.primary)?;
    if tunnel.endpoint.is_some() { None } else { tunnel.relay }
}

/// Datagrams that a host sent.
fn sent_by(net: &SimNet, name: &str) -> usize {
    net.flow().filter(|step| step.sender == name).count()
}

#[test]
fn hosts_reach_each_other_through_relays_that_nobody_configured() {
    let mut it = Grouped::new(1, 3, 2);
    it.net.run_for(15 * SECOND);
    let [a, b] = [it.hosts[0], it.hosts[1]];
    assert_eq!((it.chosen(a).len(), it.chosen(b).len()), (2, 2), "{}", it.net.diagram());
    let (reported, chosen) = (it.reported(b), it.chosen(b));
    assert_eq!(reported, chosen.iter().map(|relay| it.net.overlay(*relay)).collect::<Vec<_>>());
    let took = it.net.ping(a, b).until_delivered();
    assert!(took < SECOND, "{took:?}");
    assert!(relay_of(&it.net, a, b).is_some());
}

#[test]
fn a_relay_is_usable_within_seconds_of_the_start() {
    let mut it = Grouped::new(2, 3, 2);
    let [a, b] = [it.hosts[0], it.hosts[1]];
    it.net.run_for(4 * SECOND);
    assert!(it.net.ping(a, b).is_answered_within(SECOND), "{}", it.net.diagram());
}

#[test]
fn an_old_host_without_these_settings_reaches_one_that_chose_its_relays() {
    let mut it = Grouped::new(3, 3, 1);
    let b = it.hosts[0];
    // It reads no offers, as Go Nebula.
    let old = it.net.add(HostSpec::new("old").lighthouse(it.lighthouse));
    it.net.cut(old, b);
    it.net.run_for(15 * SECOND);
    it.net.ping(old, b).until_delivered();
    assert!(relay_of(&it.net, old, b).is_some());
    assert!(it.offered(old).is_empty());
    assert!(it.net.tunnels(old).iter().all(|tunnel| tunnel.relay.is_none() || tunnel.peer == [it.net.overlay(b)]));
}

#[test]
fn the_nearest_relays_are_chosen_by_measurement() {
    let mut it = Grouped::new(4, 6, 2);
    let a = it.hosts[0];
    it.net.run_for(20 * SECOND);
    // Two that the hash did not choose.
    let first = it.chosen(a);
    let near: Vec<_> = it.relays.iter().copied().filter(|relay| !first.contains(relay)).take(2).collect();
    for relay in it.relays.clone() {
        let milliseconds = if near.contains(&relay) { 5 } else { 40 };
        it.net.set_link_between(a, relay, link(milliseconds, 0));
    }
    it.net.run_for(400 * SECOND);
    let offered = it.offered(a);
    assert_eq!(it.chosen(a), near, "{offered:?}");
    for relay in near {
        let seen = it.of(a, relay);
        assert_eq!((seen.round_trip, seen.loss), (Some(Duration::from_millis(10)), Some(0)));
        assert_eq!(seen.reason, Some(RelayReason::Faster), "{offered:?}");
    }
    // The others were measured, and their tunnels closed.
    let tunnels = it.net.tunnels(a).len();
    assert!((3..=4).contains(&tunnels), "{tunnels}");
}

#[test]
fn equally_good_relays_are_not_exchanged_once_the_hash_has_decided() {
    let mut it = Grouped::new(5, 5, 3);
    it.net.run_for(300 * SECOND);
    let before: Vec<_> = it.hosts.clone().into_iter().map(|host| it.chosen(host)).collect();
    for _ in 0..20 {
        it.net.run_for(60 * SECOND);
        let after: Vec<_> = it.hosts.clone().into_iter().map(|host| it.chosen(host)).collect();
        assert_eq!(before, after);
    }
}

#[test]
fn a_relay_that_loses_datagrams_is_left() {
    let mut it = Grouped::new(6, 4, 2);
    it.net.run_for(20 * SECOND);
    let a = it.hosts[0];
    let bad = it.chosen(a)[0];
    it.net.set_link_between(a, bad, link(10, 35));
    it.net.run_for(180 * SECOND);
    let chosen = it.chosen(a);
    assert!(chosen.len() == 2 && !chosen.contains(&bad), "{:?}", it.offered(a));
}

#[test]
fn a_dead_relay_is_replaced_and_the_other_one_carries_on_meanwhile() {
    for (leaves, measures) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut it = Grouped::new(7, 4, 2);
        let [a, b] = [it.hosts[0], it.hosts[1]];
        for host in [a, b] {
            it.net.control(host, |node, now| node.reconfigure(now, |config| config.measure_paths = measures));
        }
        it.net.run_for(60 * SECOND);
        it.net.ping(a, b).until_delivered();
        it.net.ping(a, b).train(10, SECOND);
        let used = relay_of(&it.net, a, b).expect("a relay");
        let dead = it.relays.iter().copied().find(|relay| it.net.overlay(*relay) == used).unwrap();
        if leaves {
            it.net.stop(dead);
        } else {
            it.net.kill(dead);
        }
        let answered = it.net.ping(a, b).train(60, SECOND);
        let lost = 60 - answered;
        assert!(
            lost <= if leaves { 1 } else { 8 },
            "leaves: {leaves}, measures: {measures}, {lost} lost\n{}",
            it.net.diagram()
        );
        for host in [a, b] {
            let chosen = it.chosen(host);
            assert!(chosen.len() == 2 && !chosen.contains(&dead), "{:?}", it.offered(host));
            let reported = it.reported(host);
            assert!(reported.len() == 2 && !reported.contains(&used), "{reported:?}");
        }
        assert!(relay_of(&it.net, a, b).is_some_and(|relay| relay != used));
    }
}

#[test]
fn a_relay_that_is_back_gets_its_hosts_back() {
    let mut it = Grouped::new(8, 3, 6);
    it.net.run_for(60 * SECOND);
    let hosts = it.hosts.clone();
    let before: Vec<_> = hosts.iter().map(|host| it.chosen(*host)).collect();
    let dead = it.relays[0];
    it.net.kill(dead);
    it.net.run_for(120 * SECOND);
    assert!(hosts.iter().all(|host| !it.chosen(*host).contains(&dead)));
    it.net.restart(dead);
    it.net.run_for(900 * SECOND);
    assert_eq!(before, hosts.iter().map(|host| it.chosen(*host)).collect::<Vec<_>>());
}

#[test]
fn an_idle_host_sends_each_chosen_relay_two_test_requests_a_minute() {
    let mut it = Grouped::new(9, 2, 1);
    it.net.run_for(60 * SECOND);
    let a = it.hosts[0];
    let requests = |net: &SimNet| net.counter(a, "test_requests_out");
    let before = requests(&it.net);
    let lighthouse = it.net.underlay(it.lighthouse);
    let others = |net: &SimNet| net.flow().filter(|step| step.sender == "h0" && step.to != lighthouse).count();
    let sent = others(&it.net);
    it.net.run_for(600 * SECOND);
    let (requests, sent) = (requests(&it.net) - before, others(&it.net) - sent);
    assert!((36..=40).contains(&requests), "{requests} in ten minutes to two relays");
    assert!(sent <= 44, "{sent}: also a request for a hop in ten minutes");
}

#[test]
fn the_survey_of_relays_that_are_not_chosen_becomes_slower() {
    let mut it = Grouped::new(10, 10, 1);
    let a = it.hosts[0];
    it.net.run_for(3600 * SECOND);
    let (calls, sent) = (it.calls(a), sent_by(&it.net, "h0"));
    it.net.run_for(3600 * SECOND);
    let (calls, sent) = (it.calls(a) - calls, sent_by(&it.net, "h0") - sent);
    assert!(calls <= 8, "{calls} surveys in the second hour");
    assert!(sent <= 360 + 2 * 120 + 100, "{sent} datagrams in an hour: reports, two relays, surveys");
}

#[test]
fn a_host_without_the_setting_does_nothing_else_than_before() {
    let counts = [false, true].map(|offers| {
        let mut net = SimNet::new(11);
        let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
        if offers {
            net.control(lighthouse, |node, now| {
                node.reconfigure(now, |config| config.relay.groups = groups(&["relay"]))
            });
        }
        for n in 0..3 {
            net.add(relay_spec(&format!("r{n}"), lighthouse));
        }
        let a = net.add(HostSpec::new("a").lighthouse(lighthouse));
        net.run_for(600 * SECOND);
        (sent_by(&net, "a"), net.table_sizes(a).deadlines, net.tunnels(a).len())
    });
    assert_eq!(counts[0], counts[1]);
}

#[test]
fn a_reload_begins_and_ends_the_choice() {
    let mut it = Grouped::new(12, 3, 1);
    let a = it.hosts[0];
    it.net.control(a, |node, now| node.reconfigure(now, |config| config.relay.groups = Vec::new()));
    it.net.run_for(30 * SECOND);
    assert!(it.offered(a).is_empty() && it.reported(a).is_empty());
    let set = |it: &mut Grouped, names: &[&str]| {
        let groups = groups(names);
        it.net.control(a, |node, now| node.reconfigure(now, |config| config.relay.groups = groups));
    };
    set(&mut it, &["relay"]);
    it.net.run_for(15 * SECOND);
    assert_eq!((it.chosen(a).len(), it.reported(a).len()), (2, 2));
    set(&mut it, &["other"]);
    it.net.run_for(45 * SECOND);
    assert_eq!((it.chosen(a).len(), it.reported(a).len()), (0, 0));
    assert!(it.offered(a).iter().all(|relay| relay.trouble == Some(RelayTrouble::NotMember)), "{:?}", it.offered(a));
    set(&mut it, &[]);
    it.net.run_for(5 * SECOND);
    assert!(it.offered(a).is_empty());
}

#[test]
fn configured_relays_are_reported_besides_the_chosen_ones() {
    let mut it = Grouped::new(13, 3, 1);
    let (a, own) = (it.hosts[0], it.net.add(HostSpec::new("own").config(|config| config.relay.am_relay = true)));
    it.net.introduce(a, own);
    let address = it.net.overlay(own);
    it.net.control(a, |node, now| node.reconfigure(now, |config| config.relay.relays = vec![address]));
    it.net.run_for(15 * SECOND);
    let reported = it.reported(a);
    assert!(reported.len() == 3 && reported[0] == address, "{reported:?}");
}

#[test]
fn a_lighthouse_that_relays_and_has_the_group_offers_itself() {
    let mut net = SimNet::new(14);
    let both = net.add(lighthouse_spec().groups(&["relay"]).config(|config| config.relay.am_relay = true));
    let [a, b] = ["a", "b"].map(|name| net.add(host_spec(name, both)));
    net.cut(a, b);
    net.run_for(15 * SECOND);
    net.ping(a, b).until_delivered();
    assert_eq!(relay_of(&net, a, b), Some(net.overlay(both)));
}

#[test]
fn a_member_that_refuses_to_relay_is_not_used() {
    let mut net = SimNet::new(15);
    let lighthouse = net.add(lighthouse_spec());
    let refuses: Vec<_> =
        (0..3).map(|n| net.add(HostSpec::new(&format!("x{n}")).lighthouse(lighthouse).groups(&["relay"]))).collect();
    let relays: Vec<_> = (0..2).map(|n| net.add(relay_spec(&format!("r{n}"), lighthouse))).collect();
    net.run_for(2 * SECOND);
    let a = net.add(host_spec("a", lighthouse));
    let mut it = Grouped { net, lighthouse, relays, hosts: vec![a] };
    it.net.run_for(60 * SECOND);
    let (chosen, offered) = (it.chosen(a), it.offered(a));
    assert_eq!(chosen, it.relays, "{offered:?}");
    assert_eq!(it.reported(a).len(), 2);
    it.net.run_for(600 * SECOND);
    for refuses in &refuses {
        let seen = it.of(a, *refuses);
        assert!(!seen.is_chosen && seen.trouble == Some(RelayTrouble::Refuses), "{seen:?}");
        let asked = it.net.counter(*refuses, "dropped_in_relay");
        assert!((1..=18).contains(&asked), "{asked} requests in vain in eleven minutes");
    }
    // A chosen one that stops relaying is found out by the next test.
    let first = it.relays[0];
    it.net.control(first, |node, now| node.reconfigure(now, |config| config.relay.am_relay = false));
    it.net.run_for(700 * SECOND);
    assert_eq!(it.reported(a), [it.net.overlay(it.relays[1])], "{:?}", it.offered(a));
}

#[test]
fn a_stranger_that_a_lighthouse_offers_is_not_used() {
    let mut net = SimNet::new(16);
    // It takes everybody for a relay.
    let lighthouse = net.add(HostSpec::new("liar").am_lighthouse().config(|config| {
        config.relay.groups = groups(&["relay", "stranger"]);
    }));
    let strangers: Vec<_> = (0..4)
        .map(|n| {
            let spec = HostSpec::new(&format!("s{n}")).lighthouse(lighthouse).groups(&["stranger"]);
            net.add(spec.config(|config| config.relay.am_relay = true))
        })
        .collect();
    net.run_for(2 * SECOND);
    let a = net.add(host_spec("a", lighthouse));
    let mut it = Grouped { net, lighthouse, relays: strangers, hosts: vec![a] };
    it.net.run_for(300 * SECOND);
    assert!(it.chosen(a).is_empty() && it.reported(a).is_empty());
    assert!(it.offered(a).iter().all(|relay| relay.trouble == Some(RelayTrouble::NotMember)), "{:?}", it.offered(a));
    // Each of them was called, and less and less often.
    let calls = it.calls(a);
    assert!((4..=24).contains(&calls), "{calls}");
    assert_eq!(it.net.tunnels(a).len(), 1, "the tunnels to strangers are closed");
}

/// Relays by which `host` has a usable hop to `peer`.
fn hops(it: &mut Grouped, host: HostId, peer: HostId) -> Vec<IpAddr> {
    let far = it.net.overlay(peer);
    let relays = it.net.control(host, |node, _| node.relays());
    let usable =
        relays.into_iter().filter(|hop| hop.far == far && !hop.forwarding && hop.state == RelayState::Established);
    let mut usable: Vec<_> = usable.map(|hop| hop.neighbour).collect();
    usable.sort_unstable();
    usable.dedup();
    usable
}

#[test]
fn a_tunnel_in_use_gets_a_second_relay_again_before_it_needs_it() {
    let mut it = Grouped::new(18, 4, 2);
    it.net.run_for(60 * SECOND);
    let [a, b] = [it.hosts[0], it.hosts[1]];
    it.net.ping(a, b).until_delivered();
    it.net.ping(a, b).train(10, SECOND);
    assert!(hops(&mut it, a, b).len() >= 2);
    let used = relay_of(&it.net, a, b).expect("a relay");
    // All others end that are in use, so that those that are left have to be asked for.
    let spare: Vec<_> = hops(&mut it, a, b).into_iter().filter(|relay| *relay != used).collect();
    for relay in it.relays.clone() {
        if spare.contains(&it.net.overlay(relay)) {
            it.net.stop(relay);
        }
    }
    assert_eq!(it.net.ping(a, b).train(120, SECOND), 120, "the first one carries on");
    let after = hops(&mut it, a, b);
    assert!(after.len() >= 2 && after.iter().all(|relay| !spare.contains(relay)), "{after:?}");
    assert_eq!(relay_of(&it.net, a, b), Some(used));
}

#[test]
fn a_direct_path_is_tried_with_exponential_backoff() {
    let mut it = Grouped::new(19, 2, 2);
    let [a, b] = [it.hosts[0], it.hosts[1]];
    it.net.run_for(20 * SECOND);
    it.net.ping(a, b).until_delivered();
    let (from, to) = ("h0", it.net.underlay(b));
    let is_test = |datagram: &[u8]| Header::parse(datagram).is_ok_and(|header| header.kind == MessageType::TestRequest);
    let tries = |net: &SimNet| {
        net.flow().filter(|step| step.sender == from && step.to == to && is_test(&step.datagram)).count()
    };
    it.net.ping(a, b).train(300, SECOND);
    let first = tries(&it.net);
    it.net.ping(a, b).train(3600, SECOND);
    let more = tries(&it.net) - first;
    assert!((12..=30).contains(&more), "{more} in an hour, {first} before");
    // The path is found when one of the two moves to where it may be reached.
    it.net.heal(a, b);
    it.net.roam_to(b, "198.51.100.77:4242");
    it.net.ping(a, b).train(20, SECOND);
    assert_eq!(relay_of(&it.net, a, b), None, "{}", it.net.diagram());
}

#[test]
fn a_host_that_is_told_to_use_relays_only_talks_to_no_peer_directly() {
    let mut it = Grouped::new(20, 2, 2);
    let [a, b] = [it.hosts[0], it.hosts[1]];
    it.net.heal(a, b);
    let force = |it: &mut Grouped, force: bool| {
        it.net.control(a, |node, now| node.reconfigure(now, |config| config.relay.force = force));
    };
    it.net.run_for(20 * SECOND);
    it.net.ping(a, b).until_delivered();
    assert_eq!(relay_of(&it.net, a, b), None);
    let since = it.net.elapsed();
    force(&mut it, true);
    it.net.run_for(SECOND);
    let begun = it.net.elapsed();
    it.net.ping(a, b).until_delivered();
    assert_eq!(it.net.ping(b, a).train(120, SECOND), 120);
    assert!(relay_of(&it.net, a, b).is_some() && relay_of(&it.net, b, a).is_some(), "{}", it.net.diagram());
    let to = it.net.underlay(b);
    let direct = it.net.flow().filter(|step| step.at > begun && step.sender == "h0" && step.to == to).count();
    assert_eq!(direct, 0, "since {since:?}\n{}", it.net.diagram());
    assert_eq!(it.chosen(a).len(), 2, "relays are reached directly");
    force(&mut it, false);
    it.net.ping(b, a).train(30, SECOND);
    assert_eq!(relay_of(&it.net, b, a), None);
}

/// The load of each relay: how many hosts report it.
fn load(it: &mut Grouped, alive: &[HostId]) -> Vec<usize> {
    let mut load: BTreeMap<IpAddr, usize> = alive.iter().map(|relay| (it.net.overlay(*relay), 0)).collect();
    for host in it.hosts.clone() {
        for relay in it.reported(host) {
            *load.get_mut(&relay).unwrap_or_else(|| panic!("{relay} is reported, which is gone")) += 1;
        }
    }
    load.into_values().collect()
}

fn assert_even(load: &[usize], expected: usize) {
    let mean = expected as f64 / load.len() as f64;
    assert_eq!(load.iter().sum::<usize>(), expected, "{load:?}");
    let (least, most) =
        (load.iter().min().copied().unwrap_or(0) as f64, load.iter().max().copied().unwrap_or(0) as f64);
    eprintln!(
        "load {load:?}, mean {mean:.1}, {:+.1} % to {:+.1} %",
        (least / mean - 1.0) * 100.0,
        (most / mean - 1.0) * 100.0
    );
    assert!(least >= 0.8 * mean && most <= 1.2 * mean, "{load:?} differs from {mean} by more than 20 %");
}

/// The largest number of first handshake messages that one host got within a second since `since`.
fn busiest_second(net: &SimNet, hosts: &[HostId], since: Duration) -> usize {
    let mut calls: BTreeMap<(usize, u64), usize> = BTreeMap::new();
    let endpoints: Vec<_> = hosts.iter().map(|host| net.underlay(*host)).collect();
    for step in net.flow().filter(|step| step.at >= since) {
        let first = matches!(Header::parse(&step.datagram), Ok(header)
            if header.kind == MessageType::Handshake && header.index == 0);
        if let Some(host) = endpoints.iter().position(|endpoint| *endpoint == step.to).filter(|_| first) {
            *calls.entry((host, step.at.as_secs())).or_default() += 1;
        }
    }
    calls.into_values().max().unwrap_or(0)
}

/// `GROUP_RELAY_HOSTS` sets another number of hosts than 1,000.
#[test]
fn when_one_relay_of_a_thousand_hosts_ends_they_spread_evenly_over_the_others() {
    const RELAYS: usize = 8;
    const NATS: usize = 200;
    let count: usize = std::env::var("GROUP_RELAY_HOSTS").ok().and_then(|text| text.parse().ok()).unwrap_or(1000);
    let mut net = SimNet::new(17);
    net.keep_steps(2_000_000);
    let lighthouse = net.add(lighthouse_spec());
    let relays: Vec<_> = (0..RELAYS).map(|n| net.add(relay_spec(&format!("r{n}"), lighthouse))).collect();
    net.run_for(2 * SECOND);
    let nats: Vec<_> = (0..NATS).map(|_| net.add_nat(NatBehaviour::symmetric())).collect();
    let hosts: Vec<_> =
        (0..count).map(|n| net.add(host_spec(&format!("h{n}"), lighthouse).behind(nats[n % NATS]))).collect();
    let mut it = Grouped { net, lighthouse, relays, hosts };
    it.net.run_for(60 * SECOND);
    let relays = it.relays.clone();
    assert_even(&load(&mut it, &relays), 2 * count);
    // Every host is reached by another one, and some keep talking.
    let pairs: Vec<_> = (0..count).map(|n| (it.hosts[n], it.hosts[(n + 37) % count])).collect();
    let say = |it: &mut Grouped, pairs: &[(HostId, HostId)], port: u16| {
        for (from, to) in pairs {
            let _verdict = it.net.send_udp(*from, *to, (port, port), b"hello");
        }
    };
    for some in pairs.chunks(100) {
        say(&mut it, some, 1);
        it.net.run_for(SECOND);
    }
    it.net.run_for(5 * SECOND);
    let reached = pairs.iter().filter(|(_, to)| it.net.payloads(*to, 1).len() == 1).count();
    assert_eq!(reached, count, "all are reachable");
    let talking: Vec<_> = pairs.iter().copied().step_by(20).collect();
    for (end, leaves) in [(0, false), (1, true)] {
        let port = 10 + end as u16;
        let ended = it.relays[end];
        for _ in 0..10 {
            say(&mut it, &talking, port);
            it.net.run_for(SECOND);
        }
        let since = it.net.elapsed();
        if leaves {
            it.net.stop(ended);
        } else {
            it.net.kill(ended);
        }
        for _ in 0..60 {
            say(&mut it, &talking, port);
            it.net.run_for(SECOND);
        }
        let worst = talking.iter().map(|(_, to)| 70 - it.net.payloads(*to, port).len()).max().unwrap_or(0);
        println!("leaves: {leaves}, at most {worst} of 70 packets lost, one a second");
        // No answers come to these packets, so a tunnel is tested after a check without any, five seconds after the
        // one before.
        assert!(worst <= if leaves { 2 } else { 10 }, "{worst} packets lost");
        let alive = &relays[end + 1..];
        assert_even(&load(&mut it, alive), 2 * count);
        // The fair share: those of the relay that ended, over the others, within the ten seconds of the jitter.
        let share = 2.0 * count as f64 / (alive.len() + 1) as f64 / alive.len() as f64 / 10.0;
        let busiest = busiest_second(&it.net, alive, since);
        println!(
            "leaves: {leaves}, {busiest} first messages in the busiest second of a relay, {share:.1} is the fair share"
        );
        assert!(busiest as f64 <= (5.0 * share).max(5.0), "{busiest} calls in one second, {share} is the fair share");
    }
}
