//! Mixed flows between two daemons for a long time, over a path that loses, duplicates, reorders and rebinds: every
//! byte of TCP is compared, UDP datagrams arrive unchanged and at most once, pings come back unchanged, and memory use
//! stays flat.
//!
//! `SOAK_SECONDS` sets the duration of each test.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

pub(super) mod daemon;
mod datagrams;
mod proxy;
use crate::world;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use datagrams::{Stream, Tally};
use nix::sys::signal::Signal;
use proxy::Proxy;
use world::World;
use world::peers::{go, ours};

const NAMES: [&str; 2] = ["a", "b"];
const V4: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
const V6: [&str; 2] = ["fd77::1", "fd77::2"];
const SOON: Duration = Duration::from_secs(20);

/// Bytes per TCP connection.
const TRANSFER: usize = 8_000_000;
/// KiB by which our resident memory may grow between the first quarter of the time and the last. Flows expire after 10
/// s, and buffers grow with the largest burst so far; leaking one byte per packet would be 2 MB a minute.
const GROWTH: u64 = 1024;
/// Of 100 unfragmented datagrams, at least this many arrive: the path loses one in 500, and load on the machine the
/// rest.
const WHOLE: u64 = 90;
/// The same for datagrams in up to seven fragments.
const IN_FRAGMENTS: u64 = 75;

/// Counters of messages other than packets.
const MESSAGES: [&str; 8] = [
    "hole_punches_in",
    "handshakes_in",
    "lighthouse_in",
    "test_requests_in",
    "test_replies_in",
    "close_tunnel_in",
    "control_in",
    "recv_errors_in",
];

struct Soak {
    world: World,
    proxy: Proxy,
    time: Duration,
    programs: [PathBuf; 2],
}

impl Soak {
    fn new(programs: [PathBuf; 2]) -> Self {
        let seconds = std::env::var("SOAK_SECONDS").map_or(60, |text| text.parse().expect("SOAK_SECONDS is a number"));
        let mut world = World::new();
        let [a, b] = NAMES.map(|name| IpAddr::V4(world.host(name)));
        let middle = world.host("m");
        let ends = [a, b].map(|end| SocketAddr::new(end, 4242));
        let (proxy, seen_at) = Proxy::start(&world.namespace_of("m"), middle, ends);
        world.certify(&["ca", "-name", "soak", "-version", "2"]);
        for (at, name) in NAMES.iter().enumerate() {
            // Delivers datagrams as merged runs with holes, instead of one by one.
            must(&world, name, &["ethtool", "-K", "eth0", "gro", "on"]);
            let networks = format!("{}/24,{}/64", V4[at], V6[at]);
            world.certify(&["sign", "-name", name, "-networks", &networks]);
            let dir = world.dir().display();
            let config = format!(
                "pki: {{ca: {dir}/ca.crt, cert: {dir}/{name}.crt, key: {dir}/{name}.key}}
static_host_map: {{\"{}\": [\"{}\"]}}
lighthouse: {{am_lighthouse: false, hosts: []}}
listen: {{host: 0.0.0.0, port: 4242, read_buffer: 10485760, write_buffer: 10485760}}
tun: {{dev: neb0, mtu: 1300}}
routines: 2
logging: {{level: info, format: text}}
firewall:
  conntrack: {{tcp_timeout: 10s, udp_timeout: 10s, default_timeout: 10s}}
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: any, host: any}}]
",
                V4[1 - at],
                seen_at[at],
            );
            world.write(&format!("{name}.yml"), &config);
        }
        let mut soak = Self { world, proxy, time: Duration::from_secs(seconds), programs };
        for (name, program) in NAMES.into_iter().zip(soak.programs.clone()) {
            let config = soak.world.dir().join(format!("{name}.yml")).display().to_string();
            soak.world.start(name, &program, &["-config", &config]);
        }
        soak.world.ping("a", V4[1], SOON);
        soak.world.ping("b", V6[0], SOON);
        soak
    }

    /// Runs all flows at once, for the whole time.
    fn run(self) {
        let pids = NAMES.map(|name| self.world.pid(name));
        let streams = self.streams();
        let soak = &self;
        let (memory, tallies) = thread::scope(|scope| {
            let memory = scope.spawn(move || soak.watch_memory(pids));
            let tallies: Vec<_> = streams.iter().map(|stream| scope.spawn(move || stream.run(soak.time))).collect();
            let carriers = [(0, V4), (1, V4), (0, V6)].map(|(from, to)| scope.spawn(move || soak.transfers(from, to)));
            let echoes = [(0, V4, 56), (1, V4, 4000), (0, V6, 3000), (1, V6, 1200)]
                .map(|(from, to, size)| scope.spawn(move || soak.echoes(from, to, size)));
            for carrier in carriers {
                eprintln!("TCP: {} connections of {TRANSFER} bytes", carrier.join().expect("every byte of TCP"));
            }
            for echo in echoes {
                eprintln!("ICMP: {}", echo.join().expect("pings as they went"));
            }
            let tallies: Vec<_> = tallies.into_iter().map(|tally| tally.join().expect("UDP as it was sent")).collect();
            (memory.join().expect("memory"), tallies)
        });
        for (stream, tally) in streams.iter().zip(tallies) {
            check_tally(stream, tally);
        }
        let deeds = &self.proxy.deeds;
        for (what, deed) in [("lost", &deeds.lost), ("repeated", &deeds.repeated), ("late", &deeds.late)] {
            eprintln!("the path: {} {what} beside {} passed", count(deed), count(&deeds.passed));
            assert!(count(deed) > 10, "the path was too kind");
        }
        self.check_daemons(pids, memory);
    }

    fn streams(&self) -> Vec<Stream> {
        let mut streams = Vec::new();
        for (from, addresses) in [(0, V4), (1, V4), (0, V6), (1, V6)] {
            for (what, sizes, burst, offload) in [
                ("small UDP", [8, 200], 6, false),
                ("large UDP", [900, 1252], 2, false),
                ("UDP in fragments", [1500, 8000], 1, false),
                ("UDP in super-packets", [900, 900], 12, true),
            ] {
                let [from, to] = [from, 1 - from].map(|at| (self.world.namespace_of(NAMES[at]), addresses[at]));
                let address = to.1.parse().expect("an address");
                streams.push(Stream { what, from: from.0, to: to.0, address, sizes, burst, offload });
            }
        }
        streams
    }

    /// Makes one connection after another; returns how many.
    fn transfers(&self, from: usize, addresses: [&str; 2]) -> u32 {
        let (begun, mut done) = (Instant::now(), 0);
        while begun.elapsed() < self.time {
            let to = addresses[1 - from].parse().expect("an address");
            self.world.transfer(NAMES[from], NAMES[1 - from], to, TRANSFER);
            done += 1;
        }
        done
    }

    /// Sends pings whose payload `ping` verifies; returns its summary.
    fn echoes(&self, from: usize, addresses: [&str; 2], size: usize) -> String {
        let (pings, size) = ((self.time.as_secs() * 20).to_string(), size.to_string());
        let command = ["ping", "-n", "-i", "0.05", "-c", &pings, "-s", &size, "-W", "1", addresses[1 - from]];
        let output = self.world.exec(NAMES[from], &command);
        let said = String::from_utf8_lossy(&output.stdout);
        for flaw in ["wrong data", "DUP!", "BAD CHECKSUM", "truncated"] {
            assert!(!said.contains(flaw), "{}", said.lines().find(|line| line.contains(flaw)).unwrap_or_default());
        }
        let summary = said.lines().find(|line| line.contains(" received")).expect("a summary");
        let mut numbers = summary.split(", ").filter_map(|part| part.split(' ').next()?.parse::<u64>().ok());
        let (sent, received) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        assert!(received * 100 >= sent * IN_FRAGMENTS && sent > 0, "{summary}");
        format!("{size} bytes: {summary}")
    }

    /// KiB of both daemons: the maximum within the first quarter of the time, and within the last.
    fn watch_memory(&self, pids: [u32; 2]) -> [[u64; 2]; 2] {
        let (begun, mut most) = (Instant::now(), [[0; 2]; 2]);
        while begun.elapsed() < self.time {
            let part = begun.elapsed().div_duration_f64(self.time);
            let now = pids.map(daemon::resident);
            for (at, resident) in now.into_iter().enumerate() {
                if !(0.25..0.75).contains(&part) {
                    let most = &mut most[at][usize::from(part >= 0.75)];
                    *most = resident.max(*most);
                }
            }
            thread::sleep(Duration::from_millis(200));
        }
        most
    }

    /// The datagrams received by sockets of a namespace, and those lost to full buffers.
    fn udp_statistics(&self, name: &str) -> BTreeMap<String, u64> {
        let output = self.world.exec(name, &["nstat", "-asz", "UdpInDatagrams", "UdpRcvbufErrors"]);
        let text = String::from_utf8_lossy(&output.stdout);
        let numbers = text.lines().skip(1).filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
        });
        numbers.collect()
    }

    /// Stops the daemons and checks their counters, memory and CPU use.
    fn check_daemons(mut self, pids: [u32; 2], memory: [[u64; 2]; 2]) {
        let mut counters = Vec::new();
        for (at, name) in NAMES.iter().enumerate() {
            let [first, last] = memory[at];
            eprintln!("{name}: {first} KiB resident in the first fourth of the time, {last} in the last");
            let kernel = self.udp_statistics(name);
            eprintln!("{name}: {kernel:?}");
            if self.programs[at] != ours() {
                continue;
            }
            assert!(last <= first + GROWTH, "{name} grew from {first} to {last} KiB");
            for direction in ["nebula-out-", "nebula-in-"] {
                let busy = daemon::busy(pids[at], direction);
                let all: u64 = busy.values().sum();
                eprintln!("{name}: {busy:?} ns");
                // With two processors, the threads of the sockets serve both directions.
                assert!(busy.len() == 2 || busy.is_empty() && direction == "nebula-out-", "{name}: {busy:?}");
                assert!(busy.values().all(|one| one * 50 > all), "{name}: a lane had next to nothing to do: {busy:?}");
            }
            self.world.stop(name, Signal::SIGTERM);
            let said = daemon::counters(&self.world.log(name));
            eprintln!("{name}: {said:?}");
            check_counters(name, &said, kernel["UdpRcvbufErrors"] > 0);
            counters.push(said);
        }
        let replayed: u64 = counters.iter().map(|said| said["dropped_in_replayed"]).sum();
        let repeated = count(&self.proxy.deeds.repeated);
        assert!(replayed <= repeated, "{replayed} dropped as replayed, but only {repeated} were repeated");
        if let [a, b] = &counters[..] {
            for (from, to) in [(a, b), (b, a)] {
                let (sent, received) = (from["packets_out"], to["packets_in"]);
                assert!(received <= sent && received * 100 >= sent * WHOLE, "{sent} packets sent, {received} received");
            }
        }
    }
}

/// Checks that drops have three reasons only: packets that the path duplicated, packets for a closed tunnel, and the
/// kernel's own multicasts, which the address checks do not let out. A fourth one is there if the kernel found a
/// receive buffer full (`was_stalled`). A daemon that got no processor for that long, while its peer's port changed,
/// may read the newest datagrams first, since they wait at its other socket; those before them are then too old.
fn check_counters(name: &str, counters: &BTreeMap<String, u64>, was_stalled: bool) {
    let at_least_once = ["packets_in", "packets_out", "coalesced", "dropped_in_replayed"];
    for counter in at_least_once {
        assert!(counters.get(counter).is_some_and(|n| *n > 0), "{name}: no {counter}");
    }
    let of = |name: &str| counters.get(name).copied().unwrap_or(0);
    let messages = counters.iter().filter(|(name, _)| MESSAGES.contains(&name.as_str()));
    // A bad handshake is a second count of a message: it was counted as one before anybody looked inside.
    let is_drop = |name: &str| name.starts_with("dropped_in_") && name != "dropped_in_bad_handshake";
    let dropped = counters.iter().filter(|(name, _)| is_drop(name));
    let known = of("packets_in") + messages.chain(dropped).map(|(_, n)| n).sum::<u64>();
    assert_eq!(of("datagrams_in"), known, "{name}: every datagram is something");
    let meant = ["dropped_in_replayed", "dropped_in_unknown_index", "dropped_in_bad_handshake"];
    let kernel = ["dropped_out_broadcast", "dropped_out_no_route", "dropped_out_local_address"];
    for (counter, n) in counters {
        let known = meant.contains(&counter.as_str())
            || kernel.contains(&counter.as_str()) && *n < 100
            || counter == "dropped_in_too_old" && was_stalled;
        let loss = counter.starts_with("dropped_") || counter.starts_with("lost_");
        assert!(!loss || known, "{name}: {counter} is {n}");
    }
}

fn check_tally(stream: &Stream, Tally { sent, received }: Tally) {
    let least = if stream.sizes[1] > 1252 { IN_FRAGMENTS } else { WHOLE };
    eprintln!("{} to {}: {received} of {sent}", stream.what, stream.address);
    assert!(received * 100 >= sent * least && sent > 0, "{}: only {received} of {sent} came", stream.what);
}

fn count(deed: &std::sync::atomic::AtomicU64) -> u64 {
    deed.load(Ordering::Relaxed)
}

fn must(world: &World, host: &str, command: &[&str]) {
    let output = world.exec(host, command);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn mixed_flows_between_two_of_ours_stay_whole_on_a_bad_path() {
    Soak::new([ours(), ours()]).run();
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn mixed_flows_between_ours_and_go_1_11_stay_whole_on_a_bad_path() {
    Soak::new([ours(), go("nebula", "sid")]).run();
}
