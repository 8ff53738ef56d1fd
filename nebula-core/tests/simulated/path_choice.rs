//! Hosts with several paths to each other measure them, and use the best.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nebula_core::config::{AllowList, RemoteAllowList};
use nebula_core::internals::header::{Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, Link, SimNet, Step};
use nebula_core::{Config, Event, PathReason, PathVerdict, TunnelStatus};
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

const SECOND: Duration = Duration::from_secs(1);

/// The n-th endpoint of each host, in the n-th network.
fn endpoint(host: u8, n: u8) -> String {
    match n {
        0 => format!("198.51.100.{host}:4242"),
        // Every other network is IPv6.
        n if n % 2 == 1 => format!("[2001:db8:{n}::{host}]:4242"),
        n => format!("192.0.{n}.{host}:4242"),
    }
}

/// Two hosts with an endpoint in each of several networks.
struct Homed {
    net: SimNet,
    a: HostId,
    b: HostId,
    /// What [`Homed::busy`] sent.
    carried: u64,
}

fn link(milliseconds: u64) -> Link {
    Link { latency: Duration::from_millis(milliseconds), ..Link::default() }
}

fn lossy(milliseconds: u64, loss: u32) -> Link {
    Link { loss, ..link(milliseconds) }
}

impl Homed {
    /// The latency of each path, in milliseconds, in the order of the networks.
    fn new(seed: u64, latencies: &[u64]) -> Self {
        Self::with(seed, latencies, |_| {}, |_| {})
    }

    fn with(
        seed: u64,
        latencies: &[u64],
        change_a: impl FnOnce(&mut Config) + 'static,
        change_b: impl FnOnce(&mut Config) + 'static,
    ) -> Self {
        let mut net = SimNet::new(seed);
        let spec = |name, host: u8| {
            let others: Vec<_> = (1..latencies.len() as u8).map(|n| endpoint(host, n)).collect();
            let others: Vec<_> = others.iter().map(String::as_str).collect();
            HostSpec::new(name).also_at(&others).config(|config| config.measure_paths = true)
        };
        let b = net.add(spec("b", 1).config(change_b));
        let a = net.add(spec("a", 2).config(change_a));
        let mut homed = Self { net, a, b, carried: 0 };
        for (n, latency) in latencies.iter().enumerate() {
            homed.set(n, link(*latency));
        }
        homed.net.introduce(homed.a, homed.b);
        homed.net.introduce(homed.b, homed.a);
        homed
    }

    fn set(&mut self, n: usize, link: Link) {
        let [b, a] = [1, 2].map(|host| endpoint(host, n as u8).parse().expect("an endpoint"));
        self.net.set_path(a, b, link);
    }

    /// `rate` packets a second, each way.
    fn talk(&mut self, time: Duration, rate: u32) {
        for _ in 0..time.as_millis() as u32 * rate / 1000 {
            let _verdict = self.net.send_udp(self.a, self.b, (7, 7), b"to b");
            let _verdict = self.net.send_udp(self.b, self.a, (7, 7), b"to a");
            self.net.run_for(SECOND / rate);
        }
    }

    /// As if there were 200 packets a second, each way; most of them only count.
    fn busy(&mut self, seconds: u64) {
        for _ in 0..seconds {
            for _ in 0..5 {
                for (from, to) in [(self.a, self.b), (self.b, self.a)] {
                    let _verdict = self.net.send_udp(from, to, (7, 7), b"x");
                    if self.net.tunnels_to(from, to).iter().any(|tunnel| tunnel.primary) {
                        self.net.spend_counters(from, to, 39);
                    }
                    self.carried += 40;
                }
                self.net.run_for(SECOND / 5);
            }
        }
    }

    /// The network by which each host sends to the other.
    fn used(&self) -> [Option<usize>; 2] {
        let of = |from, to, number: u8| {
            let endpoint_used = self.net.endpoint_of(from, to)?;
            (0..32).find(|n| endpoint(number, *n as u8).parse() == Ok(endpoint_used))
        };
        [of(self.a, self.b, 1), of(self.b, self.a, 2)]
    }

    fn moves(&self, host: HostId) -> usize {
        self.net.events(host).iter().filter(|event| matches!(event, Event::Roamed { .. })).count()
    }

    fn received(&self) -> [usize; 2] {
        [self.a, self.b].map(|host| self.net.payloads(host, 7).len())
    }
}

/// Test requests and replies so far, which measure paths; and a few that ask whether the peer lives.
fn probes(homed: &Homed) -> u64 {
    let of = |host| homed.net.counter(host, "test_requests_out") + homed.net.counter(host, "test_replies_out");
    of(homed.a) + of(homed.b) - 2 * mtu_probes(homed)
}

/// Test requests that examine how much a path carries; each is answered.
fn mtu_probes(homed: &Homed) -> u64 {
    [homed.a, homed.b].map(|host| homed.net.counter(host, "path_probes_out")).iter().sum()
}

fn is_probe(step: &Step) -> bool {
    let kind = Header::parse(&step.datagram).map(|header| header.kind);
    step.datagram.len() == 16 + 9 + 16 && matches!(kind, Ok(MessageType::TestRequest | MessageType::TestReply))
}

#[test]
fn the_fastest_path_is_found_and_no_packet_is_lost_on_the_way_there() {
    for (seed, latencies, best) in
        [(1, [10, 60, 40], 0), (2, [60, 10, 40], 1), (3, [60, 40, 10], 2), (4, [50, 40, 10], 2)]
    {
        let mut homed = Homed::new(seed, &latencies);
        homed.net.ping(homed.a, homed.b).until_delivered();
        homed.talk(10 * SECOND, 100);
        homed.net.run_for(SECOND);
        assert_eq!(homed.used(), [Some(best); 2], "seed {seed}\n{}", homed.net.diagram());
        assert_eq!(homed.received(), [1000; 2], "seed {seed}");
        assert_eq!(homed.net.tunnels_to(homed.a, homed.b).len(), 1, "it is the same tunnel");
    }
}

#[test]
fn a_path_that_becomes_slower_is_left_and_the_tunnel_does_not_go_to_and_fro() {
    let mut homed = Homed::new(5, &[10, 15]);
    homed.talk(10 * SECOND, 200);
    assert_eq!(homed.used(), [Some(0); 2]);
    homed.set(0, link(40));
    homed.talk(10 * SECOND, 200);
    assert_eq!(homed.used(), [Some(1); 2], "{}", homed.net.diagram());
    // The difference is small.
    homed.set(0, link(14));
    let before = [homed.a, homed.b].map(|host| homed.moves(host));
    homed.talk(60 * SECOND, 100);
    assert_eq!([homed.a, homed.b].map(|host| homed.moves(host)), before);
}

#[test]
fn jitter_is_no_reason_to_move() {
    let mut homed = Homed::new(6, &[20, 20]);
    let jitter = Link { jitter: Duration::from_millis(15), ..link(20) };
    homed.set(0, jitter);
    homed.set(1, jitter);
    homed.talk(120 * SECOND, 100);
    assert!(homed.moves(homed.a) <= 2, "{} moves", homed.moves(homed.a));
}

#[test]
fn a_path_that_dies_is_left_within_six_seconds_without_a_handshake() {
    let mut homed = Homed::new(7, &[10, 50]);
    homed.talk(10 * SECOND, 100);
    let tunnel = homed.net.tunnels_to(homed.a, homed.b)[0].local_index;
    homed.set(0, lossy(10, 100));
    homed.talk(6 * SECOND, 100);
    assert_eq!(homed.used(), [Some(1); 2], "{}", homed.net.diagram());
    assert_eq!(homed.net.tunnels_to(homed.a, homed.b)[0].local_index, tunnel);
    homed.set(0, link(10));
    homed.talk(10 * SECOND, 100);
    assert_eq!(homed.used(), [Some(0); 2], "it is used again when it is back");
}

#[test]
fn a_path_that_dies_under_little_traffic_is_left_as_soon_as_without_measurement() {
    for measures in [true, false] {
        let set = move |config: &mut Config| config.measure_paths = measures;
        let mut homed = Homed::with(19, &[10, 50, 60], set, set);
        homed.talk(60 * SECOND, 1);
        homed.set(0, lossy(10, 100));
        let before = homed.received();
        homed.talk(40 * SECOND, 1);
        homed.net.run_for(SECOND);
        let lost = [0, 1].map(|n| 40 - (homed.received()[n] - before[n]));
        assert!(lost.iter().all(|lost| *lost <= 8), "{lost:?} lost\n{}", homed.net.diagram());
    }
}

#[test]
fn a_path_that_loses_many_packets_is_left_for_a_slower_one() {
    let mut homed = Homed::new(8, &[10, 50]);
    homed.talk(10 * SECOND, 200);
    homed.set(0, lossy(10, 50));
    homed.talk(20 * SECOND, 200);
    assert_eq!(homed.used(), [Some(1); 2], "{}", homed.net.diagram());
    let status = homed.net.tunnels_to(homed.b, homed.a).remove(0);
    let status = if status.paths.is_empty() { homed.net.tunnels_to(homed.a, homed.b).remove(0) } else { status };
    assert!(status.paths.iter().any(|path| path.loss.is_some_and(|loss| loss > 0)), "{:?}", status.paths);
}

#[test]
fn measurements_are_at_most_a_hundredth_of_the_traffic_and_none_in_an_idle_tunnel() {
    let mut homed = Homed::new(9, &[10, 20, 30, 40]);
    homed.talk(20 * SECOND, 100);
    let before = probes(&homed);
    let packets = 2 * 60 * 100;
    homed.talk(60 * SECOND, 100);
    let measured = probes(&homed) - before;
    assert!(measured > 20 && measured <= packets / 100 + 16, "{measured} of {packets}");
    homed.net.run_for(10 * SECOND);
    let before = probes(&homed);
    homed.net.run_for(600 * SECOND);
    assert_eq!(probes(&homed), before);
}

#[test]
fn a_tunnel_that_carries_little_is_measured_little() {
    let mut homed = Homed::new(10, &[10, 20]);
    homed.talk(60 * SECOND, 1);
    let before = probes(&homed);
    homed.talk(600 * SECOND, 1);
    let measured = probes(&homed) - before;
    assert!(measured <= 2 * 600 / 100 + 16, "{measured}");
}

#[test]
fn a_peer_that_does_not_measure_is_never_probed_by_another_path() {
    for (seed, off) in [(11, true), (12, false)] {
        let switch = move |config: &mut Config, is_off: bool| config.measure_paths = !is_off;
        let mut homed = Homed::with(seed, &[60, 10], move |it| switch(it, off), move |it| switch(it, !off));
        homed.set(1, lossy(10, 100));
        homed.net.ping(homed.a, homed.b).until_delivered();
        homed.set(1, link(10));
        homed.talk(60 * SECOND, 100);
        assert_eq!(homed.used(), [Some(0); 2]);
        let at = endpoint(if off { 2 } else { 1 }, 1).parse().unwrap();
        assert!(homed.net.flow().all(|step| !is_probe(step) || step.to != at));
        // Not counting tests without a body, by which a caller is confirmed.
        let probes = homed.net.flow().filter(|step| is_probe(step)).count();
        assert!(probes <= 2, "{probes}");
    }
}

#[test]
fn a_silent_path_is_left_for_any_other_even_with_a_peer_that_does_not_measure() {
    let mut homed = Homed::with(13, &[10, 50], |_| {}, |config| config.measure_paths = false);
    homed.talk(10 * SECOND, 100);
    let tunnel = homed.net.tunnels_to(homed.a, homed.b)[0].local_index;
    homed.set(0, lossy(10, 100));
    homed.talk(10 * SECOND, 100);
    assert_eq!(homed.used(), [Some(1); 2], "{}", homed.net.diagram());
    assert_eq!(homed.net.tunnels_to(homed.a, homed.b)[0].local_index, tunnel, "it needs no new handshake");
}

#[test]
fn preferred_ranges_come_before_what_is_measured() {
    let prefer = |config: &mut Config| config.preferred_ranges = vec!["192.0.2.0/24".parse().unwrap()];
    let mut homed = Homed::with(14, &[10, 20, 60], prefer, prefer);
    homed.talk(20 * SECOND, 100);
    assert_eq!(homed.used(), [Some(2); 2], "{}", homed.net.diagram());
}

#[test]
fn the_operator_sees_every_path_and_the_reason_for_the_choice() {
    let mut homed = Homed::new(15, &[60, 10]);
    homed.set(1, lossy(10, 100));
    homed.net.ping(homed.a, homed.b).until_delivered();
    homed.set(1, link(10));
    homed.talk(15 * SECOND, 100);
    let status = [(homed.a, homed.b), (homed.b, homed.a)].map(|(from, to)| homed.net.tunnels_to(from, to).remove(0));
    let leader = status.into_iter().find(|status| status.path_reason == Some(PathReason::Faster)).expect("a leader");
    let [slow, fast] = &leader.paths[..] else { panic!("{:?}", leader.paths) };
    let (slow, fast) = if slow.in_use { (fast, slow) } else { (slow, fast) };
    assert!(fast.in_use && !slow.in_use && fast.endpoint == leader.endpoint);
    assert_eq!((fast.round_trip, slow.round_trip), (Some(Duration::from_millis(20)), Some(Duration::from_millis(120))));
    assert_eq!((fast.loss, slow.loss), (Some(0), Some(0)));
}

/// Two hosts that find each other through a lighthouse. `b` has 24 addresses in networks of both families, of which
/// only some work.
fn many_addresses(seed: u64, working: &[(usize, u64)]) -> Homed {
    let latencies: Vec<_> = (0..24).map(|n| working.iter().find(|(at, _)| *at == n).map_or(1, |(_, it)| *it)).collect();
    let mut homed = Homed::new(seed, &latencies);
    for n in (0..24).filter(|n| working.iter().all(|(at, _)| at != n)) {
        homed.set(n, lossy(1, 100));
    }
    homed
}

#[test]
fn of_24_addresses_the_best_that_works_is_used_and_changed_without_loss() {
    let mut homed = many_addresses(16, &[(5, 60), (12, 20), (19, 40), (22, 90)]);
    homed.net.ping(homed.a, homed.b).until_delivered();
    homed.talk(30 * SECOND, 200);
    assert_eq!(homed.used(), [Some(12); 2], "{}", homed.net.diagram());
    homed.set(19, link(5));
    homed.talk(90 * SECOND, 200);
    homed.net.run_for(SECOND);
    assert_eq!(homed.used(), [Some(19); 2], "{}", homed.net.diagram());
    assert_eq!(homed.received(), [24_000; 2]);
    assert_eq!(homed.net.tunnels_to(homed.a, homed.b).len(), 1);
    assert!(homed.moves(homed.a).max(homed.moves(homed.b)) <= 3);
    homed.set(19, lossy(1, 100));
    homed.talk(7 * SECOND, 200);
    assert_eq!(homed.used(), [Some(12); 2], "{}", homed.net.diagram());
}

#[test]
fn each_path_that_is_not_used_has_a_reason() {
    let mut homed = Homed::with(
        17,
        &[10, 40, 60, 20, 1, 1],
        |config| config.preferred_ranges = vec!["192.0.0.0/16".parse().unwrap(), "2001:db8:1::/64".parse().unwrap()],
        |config| config.preferred_ranges = vec!["192.0.0.0/16".parse().unwrap(), "2001:db8:1::/64".parse().unwrap()],
    );
    homed.set(4, lossy(1, 100));
    homed.set(3, lossy(20, 70));
    homed.net.ping(homed.a, homed.b).until_delivered();
    let denied = AllowList::new([("2001:db8:5::/64".parse().unwrap(), false)]).unwrap();
    for host in [homed.a, homed.b] {
        let denied = RemoteAllowList::new(denied.clone(), []);
        homed.net.control(host, |node, now| node.reconfigure(now, |config| config.lighthouse.remote_allow = denied));
    }
    homed.talk(40 * SECOND, 200);
    let status = [(homed.a, homed.b), (homed.b, homed.a)].map(|(from, to)| homed.net.tunnels_to(from, to).remove(0));
    let leads = |status: &TunnelStatus| status.paths.iter().all(|path| path.verdict != PathVerdict::LeftToPeer);
    let [mut leader, follower] = status;
    if !leads(&leader) {
        leader = follower;
    }
    let verdict = |n: u8| {
        let of = |host| leader.paths.iter().find(|path| path.endpoint == Some(endpoint(host, n).parse().unwrap()));
        of(1).or_else(|| of(2)).map(|path| path.verdict)
    };
    assert_eq!(verdict(1), Some(PathVerdict::InUse), "{:#?}", leader.paths);
    assert_eq!(verdict(2), Some(PathVerdict::Slower(Duration::from_millis(40))));
    assert_eq!(verdict(0), Some(PathVerdict::NotPreferred));
    assert_eq!(verdict(4), Some(PathVerdict::Silent));
    assert!(matches!(verdict(3), Some(PathVerdict::NotPreferred | PathVerdict::Silent | PathVerdict::Unmeasured)));
    assert_eq!(verdict(5), Some(PathVerdict::Excluded));
    assert_eq!(leader.paths.iter().filter(|path| path.in_use).count(), 1);
}

#[test]
fn an_idle_tunnel_with_24_paths_wakes_nobody() {
    let quiet = |measure: bool| {
        let off = move |config: &mut Config| config.measure_paths = measure;
        let mut homed = Homed::with(18, &[20; 24], off, off);
        homed.net.ping(homed.a, homed.b).until_delivered();
        homed.talk(10 * SECOND, 100);
        homed.net.run_for(30 * SECOND);
        let before = homed.net.flow().count();
        homed.net.run_for(300 * SECOND);
        homed.net.flow().count() - before
    };
    assert_eq!(quiet(true), quiet(false));
}

/// What a path does at a time of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Good(u64),
    /// It loses nearly everything.
    Bad(u64),
    Dead,
}

/// Runs a random history of delays, losses and failures, then checks the path in use against the best one.
fn history(seed: u64) -> Result<(), String> {
    let mut rng = ChaCha20Rng::seed_from_u64(seed);
    rng.set_stream(3);
    let mut draw = |most: u64| rng.next_u64() % most;
    let mut health: Vec<_> = (0..2 + draw(3)).map(|_| Health::Good(5 + draw(100))).collect();
    // One host in four has many addresses, most of which the other one cannot reach.
    let unreachable = if draw(4) == 0 { 10 + draw(12) as usize } else { 0 };
    let mut latencies: Vec<_> =
        health.iter().map(|it| if let Health::Good(latency) = it { *latency } else { 0 }).collect();
    latencies.extend(std::iter::repeat_n(1, unreachable));
    // Every other history also examines how much its paths carry, as hosts do.
    let examine = move |config: &mut Config| config.path_mtu = seed.is_multiple_of(2).then_some(1300);
    let mut homed = Homed::with(seed, &latencies, examine, examine);
    (health.len()..latencies.len()).for_each(|n| homed.set(n, lossy(1, 100)));
    homed.net.ping(homed.a, homed.b).until_delivered();
    homed.busy(10);
    let events = 1 + draw(6);
    let mut log = vec![format!("{health:?}, and {unreachable} that never answer")];
    // What was ever unreliable has to prove itself first.
    let mut reliable = vec![true; health.len()];
    for _ in 0..events {
        let path = draw(health.len() as u64) as usize;
        let others = (0..health.len()).any(|n| n != path && matches!(health[n], Health::Good(_)));
        let latency = 5 + draw(150);
        health[path] = match draw(4) {
            0 if others => Health::Dead,
            1 if others => Health::Bad(latency),
            _ => Health::Good(latency),
        };
        reliable[path] &= matches!(health[path], Health::Good(_));
        homed.set(
            path,
            match health[path] {
                Health::Good(latency) => link(latency),
                Health::Bad(latency) => lossy(latency, 90),
                Health::Dead => lossy(1, 100),
            },
        );
        let wait = 1 + draw(12);
        log.push(format!("{health:?} for {wait} s"));
        homed.busy(wait);
    }
    // The traffic pays for two probes a second, and each path that never answers gets some of them.
    homed.busy(10 + 3 * unreachable as u64);
    let complain = |what: String, homed: &Homed| Err(format!("seed {seed}: {what}\n{log:#?}\n{}", homed.net.diagram()));
    let best = (0..health.len()).filter(|n| reliable[*n]).filter_map(|n| match health[n] {
        Health::Good(latency) => Some(latency),
        _ => None,
    });
    let best = best.min().unwrap_or(1 << 32);
    for used in homed.used() {
        let latency = match used.and_then(|n| health.get(n)) {
            Some(Health::Good(latency)) => *latency,
            other => return complain(format!("uses {used:?}, {other:?}"), &homed),
        };
        if latency * 10 > best * 12 + 5 {
            return complain(format!("uses a path of {latency} ms, the best has {best} ms"), &homed);
        }
    }
    let moves = |homed: &Homed| homed.moves(homed.a).max(homed.moves(homed.b));
    let before = moves(&homed);
    if before > 2 * (events as usize + 1) {
        return complain(format!("{before} moves after {events} events"), &homed);
    }
    let settled = reliable.iter().all(|it| *it);
    homed.busy(20);
    if moves(&homed) > before + if settled { 0 } else { 2 } {
        return complain(format!("{} moves while nothing changed", moves(&homed) - before), &homed);
    }
    let (measured, traffic) = (probes(&homed), homed.carried);
    let advance = 4 * (6 * latencies.len() as u64 + 8);
    if measured > traffic / 100 + advance {
        return complain(format!("{measured} probes and answers in {traffic} datagrams"), &homed);
    }
    // The first look at a path, and each loss, cost some more.
    let examined = 2 * mtu_probes(&homed);
    if examined > traffic / 500 + 60 * (1 + events) {
        return complain(format!("{examined} probes for the size and answers in {traffic} datagrams"), &homed);
    }
    Ok(())
}

#[test]
fn after_any_history_of_delays_losses_and_failures_the_path_in_use_is_nearly_the_best() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let seeds = match number("HISTORY") {
        Some(seed) => seed..seed + 1,
        None => 0..number("HISTORIES").unwrap_or(500),
    };
    let (next, failed) = (AtomicU64::new(seeds.start), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(seed) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds.end) {
                    if let Err(error) = history(seed) {
                        failed.lock().unwrap().push((seed, error));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    let numbers: Vec<_> = failed.iter().map(|(seed, _)| seed).collect();
    if let Some((seed, error)) = failed.first() {
        panic!(
            "{} of {} histories: {numbers:?}; HISTORY={seed} runs this one:\n{error}",
            failed.len(),
            seeds.end - seeds.start
        );
    }
}
