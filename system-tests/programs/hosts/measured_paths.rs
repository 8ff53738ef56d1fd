//! Hosts with several underlays between them (LAN and VPN, IPv4 and IPv6): paths are measured on real kernels, ours
//! with each other and with Go Nebula as peer, relay and lighthouse.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use world::peers::{go, ours};
use world::traffic::Flow;
use world::wire::Wire;
use world::{World, run};

const SOON: Duration = Duration::from_secs(20);
/// Within this time a path without answers is left: three probes, of which each is given up to three seconds, overlap.
const SILENCE: Duration = Duration::from_secs(6);

/// Hosts by name, with their number in the overlay.
struct Site {
    world: World,
    numbers: BTreeMap<&'static str, u8>,
    /// Where a host finds others: lines of `static_host_map`.
    known: BTreeMap<&'static str, String>,
}

fn overlay(number: u8) -> String {
    format!("10.77.0.{number}")
}

fn milliseconds(count: u64) -> Duration {
    Duration::from_millis(count)
}

impl Site {
    fn new(hosts: &[(&'static str, u8)]) -> Self {
        let mut world = World::new();
        world.certify(&["ca", "-name", "measured", "-version", "1"]);
        for (name, number) in hosts {
            world.namespace(name);
            let mut sign = vec!["sign", "-name", *name, "-networks"];
            let network = format!("{}/24", overlay(*number));
            sign.extend([network.as_str(), "-unsafe-networks", "192.168.7.0/24"]);
            world.certify(&sign);
        }
        Self { world, numbers: hosts.iter().copied().collect(), known: BTreeMap::new() }
    }

    /// Lays the `n`-th wire between two hosts, of IPv6 if `n` is odd. Each finds the other there.
    fn wire(&mut self, n: u8, ends: [&'static str; 2], delay: u64) -> Wire {
        let address = |end: u8| if n % 2 == 1 { format!("fd00:9:{n}::{end}") } else { format!("10.9.{n}.{end}") };
        let length = if n % 2 == 1 { 64 } else { 24 };
        let [first, second] = [1, 2].map(|end| format!("{}/{length}", address(end)));
        let wire =
            Wire::lay(&self.world, &format!("w{n}"), [(ends[0], &first), (ends[1], &second)], milliseconds(delay));
        for (own, other, end) in [(ends[0], ends[1], 2), (ends[1], ends[0], 1)] {
            let endpoint = endpoint(n, end);
            let list = self.known.entry(own).or_default();
            let peer = format!("\"{}\": [", overlay(self.numbers[other]));
            match list.find(&peer) {
                Some(at) => list.insert_str(at + peer.len(), &format!("\"{endpoint}\", ")),
                None => *list += &format!("{peer}\"{endpoint}\"], "),
            }
        }
        wire
    }

    fn configure(&self, host: &str, extra: &str) -> PathBuf {
        let (dir, known) = (self.world.dir().display(), self.known.get(host).map_or("", String::as_str));
        let extra = if extra.contains("lighthouse:") {
            extra.to_owned()
        } else {
            format!("lighthouse: {{hosts: []}}\n{extra}")
        };
        let config = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{host}.crt, key: {dir}/{host}.key}}
static_host_map: {{{known}}}
listen: {{host: \"::\", port: 4242}}
daemon: {{control_socket: {dir}/{host}.sock}}
firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: any, host: any, local_cidr: 0.0.0.0/0}}]
{extra}
"
        );
        self.world.write(&format!("{host}.yml"), &config)
    }

    fn start(&mut self, host: &str, binary: &Path, extra: &str) {
        let extra =
            if extra.contains("tun:") { extra.to_owned() } else { format!("tun: {{dev: neb0, mtu: 1300}}\n{extra}") };
        let path = self.configure(host, &extra).display().to_string();
        self.world.start(host, binary, &["-config", &path]);
    }

    /// What `nebula ctl tunnel` on `host` says about the tunnel to `peer` that carries packets, and about what is
    /// known of it.
    fn tunnel(&self, host: &str, peer: &str) -> (Value, Value) {
        let socket = self.world.dir().join(format!("{host}.sock"));
        let peer = overlay(self.numbers[peer]);
        let mut command = Command::new(ours());
        let output = command.arg("ctl").arg("--socket").arg(socket).args(["tunnel", &peer, "--json"]).output();
        let text = String::from_utf8_lossy(&output.expect("run nebula ctl").stdout).into_owned();
        let answer: Value = serde_json::from_str(&text).unwrap_or_default();
        let primary = answer["tunnels"].as_array().and_then(|all| all.iter().find(|tunnel| tunnel["primary"] == true));
        (primary.cloned().unwrap_or_default(), answer["known"].clone())
    }

    /// The endpoint by which `host` sends to `peer`.
    fn used(&self, host: &str, peer: &str) -> String {
        self.tunnel(host, peer).0["endpoint"].as_str().unwrap_or_default().to_owned()
    }

    /// Waits until `host` sends to `peer` by this endpoint.
    fn until_used(&self, host: &str, peer: &str, endpoint: &str, within: Duration) {
        let end = Instant::now() + within;
        while self.used(host, peer) != endpoint {
            assert!(Instant::now() < end, "{:#}\n{}", self.tunnel(host, peer).0, self.world.all_logs());
            thread::sleep(milliseconds(100));
        }
    }

    /// How often the endpoint by which `host` sends to `peer` changes in this time.
    fn changes(&self, host: &str, peer: &str, time: Duration) -> usize {
        let (end, mut last, mut changes) = (Instant::now() + time, self.used(host, peer), 0);
        while Instant::now() < end {
            thread::sleep(milliseconds(100));
            let used = self.used(host, peer);
            changes += usize::from(used != last);
            last = used;
        }
        changes
    }

    fn flow(&self, from: &str, to: &str) -> Flow {
        let at: IpAddr = overlay(self.numbers[to]).parse().expect("an address");
        self.world.ping(from, &at.to_string(), SOON);
        Flow::start(&self.world, from, to, at)
    }
}

/// The endpoint at an end of the `n`-th wire.
fn endpoint(n: u8, end: u8) -> String {
    if n % 2 == 1 { format!("[fd00:9:{n}::{end}]:4242") } else { format!("10.9.{n}.{end}:4242") }
}

/// The best of three paths carries a TCP stream and a ping every 10 ms. Delays are exchanged: both follow and lose
/// nothing. A cut cable is left.
#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn two_of_ours_use_the_fastest_of_three_networks_and_change_it_without_loss() {
    let mut site = Site::new(&[("a", 2), ("b", 3)]);
    let wires: Vec<_> = [(0, 20), (1, 30), (2, 5)].map(|(n, delay)| site.wire(n, ["a", "b"], delay)).into();
    site.start("a", &ours(), "");
    site.start("b", &ours(), "");
    let flow = site.flow("a", "b");
    for (host, peer, end) in [("a", "b", 2), ("b", "a", 1)] {
        site.until_used(host, peer, &endpoint(2, end), SOON);
    }
    flow.watch();
    wires[1].set_delay(milliseconds(5));
    wires[2].set_delay(milliseconds(40));
    let began = Instant::now();
    for (host, peer, end) in [("a", "b", 2), ("b", "a", 1)] {
        site.until_used(host, peer, &endpoint(1, end), SOON);
    }
    let took = began.elapsed();
    assert_eq!(site.changes("a", "b", Duration::from_secs(3)), 0, "it stays there");
    let (lost, (_, silence)) = (flow.lost(), flow.silence());
    println!("moved after {took:.1?}; {lost} of {} pings lost, longest silence {silence:.0?}", flow.answers().1);
    assert_eq!((lost, flow.broken()), (0, None), "{}", site.world.all_logs());
    let (tunnel, _) = site.tunnel("a", "b");
    let leader = if tunnel["path_reason"] == "its round trip is shorter" { tunnel } else { site.tunnel("b", "a").0 };
    let paths = leader["paths"].as_array().expect("a list");
    let verdicts: Vec<_> = paths.iter().map(|path| path["verdict"].as_str().unwrap_or_default()).collect();
    assert_eq!(paths.len(), 3, "{leader:#}");
    assert_eq!(verdicts.iter().filter(|it| **it == "slower").count(), 2, "{leader:#}");
    assert!(
        paths.iter().any(|path| path["reason"].as_str().is_some_and(|it| it.starts_with("slower by"))),
        "{leader:#}"
    );

    flow.watch();
    wires[1].cut(true);
    site.until_used("a", "b", &endpoint(0, 2), SILENCE);
    thread::sleep(Duration::from_secs(1));
    let (stream, ping) = flow.silence();
    println!("the cable was cut: pings paused for {ping:.1?}, the stream for {stream:.1?}");
    assert!(ping < SILENCE + Duration::from_secs(1), "{ping:?}\n{}", site.world.all_logs());
    assert_eq!(flow.broken(), None);
}

/// Go moves its end to wherever a datagram comes from, so ours does not probe it by other paths; but it leaves a
/// silent one.
#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_tunnel_with_go_1_11_never_flaps_and_leaves_a_silent_path() {
    let mut site = Site::new(&[("a", 2), ("b", 3)]);
    let wires = [(0, 5), (2, 30)].map(|(n, delay)| site.wire(n, ["a", "b"], delay));
    site.start("a", &ours(), "");
    site.start("b", &go("nebula", "sid"), "");
    let flow = site.flow("a", "b");
    let first = site.used("a", "b");
    let used = usize::from(first == endpoint(2, 2));
    flow.watch();
    wires[used].set_delay(milliseconds(60));
    wires[1 - used].set_delay(milliseconds(2));
    assert_eq!(site.changes("a", "b", Duration::from_secs(8)), 0);
    assert_eq!((flow.lost(), site.used("a", "b")), (0, first));
    flow.watch();
    wires[used].cut(true);
    site.until_used("a", "b", &endpoint(if used == 0 { 2 } else { 0 }, 2), Duration::from_secs(15));
    thread::sleep(Duration::from_secs(1));
    println!("beside Go 1.11, pings paused for {:.1?}", flow.silence().1);
    assert!(flow.silence().1 < Duration::from_secs(12), "{:?}\n{}", flow.silence(), site.world.all_logs());
    assert_eq!(site.changes("a", "b", Duration::from_secs(4)), 0);
}

/// Two Go relays lead to a Go peer, one of them by a longer way. The shorter one is used; when it is killed, the
/// other one.
#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn the_shorter_of_two_go_1_11_relays_is_used_and_the_other_when_it_is_killed() {
    let mut site = Site::new(&[("l", 1), ("a", 2), ("b", 3), ("r", 4), ("q", 5)]);
    let laid = [(0, ["a", "l"], 1), (2, ["b", "l"], 1), (4, ["r", "l"], 1), (6, ["q", "l"], 1)];
    let mut wires: Vec<_> = laid.map(|(n, ends, delay)| site.wire(n, ends, delay)).into();
    for (n, ends, delay) in [(8, ["a", "r"], 30), (10, ["b", "r"], 5), (12, ["a", "q"], 3), (14, ["b", "q"], 5)] {
        wires.push(site.wire(n, ends, delay));
    }
    let sid = go("nebula", "sid");
    let client = "lighthouse: {interval: 2, hosts: [10.77.0.1]}\n";
    site.start("l", &sid, "lighthouse: {am_lighthouse: true, interval: 2}");
    for relay in ["r", "q"] {
        site.start(relay, &sid, &format!("{client}relay: {{am_relay: true}}"));
    }
    let ends = format!("{client}relay: {{relays: [10.77.0.4, 10.77.0.5], use_relays: true}}");
    site.start("b", &sid, &ends);
    site.start("a", &ours(), &ends);
    for host in ["a", "b", "r", "q"] {
        site.world.ping(host, "10.77.0.1", SOON);
    }
    let flow = site.flow("a", "b");
    let until = |relay: &str, within: Duration| {
        let end = Instant::now() + within;
        while site.tunnel("a", "b").0["relay"] != relay {
            assert!(Instant::now() < end, "{:#}\n{}", site.tunnel("a", "b").0, site.world.all_logs());
            thread::sleep(milliseconds(100));
        }
    };
    until("10.77.0.5", SOON);
    flow.watch();
    // The way through `q` becomes the longer one.
    wires[6].set_delay(milliseconds(60));
    until("10.77.0.4", SOON);
    let lost = flow.lost();
    println!("beside Go relays: {lost} pings lost by the change");
    assert_eq!(lost, 0, "{}", site.world.all_logs());
    flow.watch();
    let (dead, other) = ("r", "10.77.0.5");
    let mut site = site;
    site.world.stop(dead, Signal::SIGKILL);
    let end = Instant::now() + SOON;
    while flow.silence().1 < Duration::from_secs(1) || site.tunnel("a", "b").0["relay"] != other {
        assert!(Instant::now() < end, "{:#}\n{}", site.tunnel("a", "b").0, site.world.all_logs());
        thread::sleep(milliseconds(100));
    }
    thread::sleep(Duration::from_secs(3));
    println!("a Go relay was killed: pings paused for {:.1?}", flow.silence().1);
    assert!(flow.silence().1 < Duration::from_secs(15), "{:?}\n{}", flow.silence(), site.world.all_logs());
}

/// A host with 24 addresses besides its first: what a lighthouse of Go and of ours tells about them, and that Go can
/// use the list.
#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_go_1_11_lighthouse_names_twenty_of_many_addresses_and_ours_names_all() {
    for (lighthouse, most) in [(go("nebula", "sid"), 22), (ours(), 24)] {
        let mut site = Site::new(&[("l", 1), ("a", 2), ("b", 3), ("c", 4)]);
        let wires =
            [(0, ["a", "l"], 1), (2, ["b", "l"], 1), (4, ["c", "l"], 1), (6, ["a", "b"], 1), (8, ["b", "c"], 1)]
                .map(|(n, ends, delay)| site.wire(n, ends, delay));
        let namespace = site.world.namespace_of("b");
        for n in 1..=12 {
            run("ip", &["-n", &namespace, "addr", "add", &format!("10.50.{n}.1/24"), "dev", "lo"]);
            run("ip", &["-n", &namespace, "addr", "add", &format!("fd50:{n}::1/64"), "dev", "lo", "nodad"]);
        }
        // Only what the lighthouse names leads to `b`.
        site.known.insert("a", format!("\"10.77.0.1\": [\"{}\"]", endpoint(0, 2)));
        site.known.insert("c", format!("\"10.77.0.1\": [\"{}\"]", endpoint(4, 2)));
        let client = "lighthouse: {interval: 2, hosts: [10.77.0.1]}\npreferred_ranges: [10.9.6.0/24, 10.9.8.0/24]\n";
        site.start("l", &lighthouse, "lighthouse: {am_lighthouse: true, interval: 2}");
        site.start("b", &ours(), client);
        site.world.ping("b", "10.77.0.1", SOON);
        site.start("a", &ours(), client);
        site.start("c", &go("nebula", "sid"), client);
        for host in ["a", "c"] {
            site.world.ping(host, "10.77.0.1", SOON);
            site.world.ping(host, "10.77.0.3", SOON);
        }
        let (_, known) = site.tunnel("a", "b");
        let named = known["endpoints"].as_array().map_or(0, Vec::len);
        println!("{named} endpoints are known from {}", lighthouse.display());
        assert!(named <= most && named + 2 >= most, "{known:#}");
        assert_eq!(site.used("a", "b"), endpoint(6, 2), "the one that works");
        drop(wires);
    }
}
