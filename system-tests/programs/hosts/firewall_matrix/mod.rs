//! Firewall rules compared with Go Nebula of three releases: the same packets pass and the same are refused, whether
//! ours or Go checks them as receiver or as sender.
//!
//! In each network `xg` (Go) and `xo` (ours) have the rule under test, inbound and outbound. `ag`/`ao` and `bg`/`bo`
//! are peers with two identities; they allow everything and try everything in both directions. The results between Go
//! nodes are the reference.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod probes;
mod rules;

use crate::world;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes::{Probe, Servers, Verdict};
use rules::{RULES, Rule};
use world::World;
use world::peers::{go, ours};

const SOON: Duration = Duration::from_secs(30);
/// An answer to a packet that passes arrives within milliseconds.
const FIRST_TRY: Duration = Duration::from_millis(500);
/// Where Go and ours differ, the machine may just have been slow.
const SECOND_TRY: Duration = Duration::from_secs(3);

/// Name, name in the certificate, last bytes of the overlay address, groups, CA, network behind it.
type Host = (&'static str, &'static str, [u8; 2], &'static str, &'static str, &'static str);
const HOSTS: [Host; 6] = [
    ("xg", "xg", [0, 11], "servers", "first", "192.168.11.0/24"),
    ("xo", "xo", [0, 12], "servers", "first", "192.168.12.0/24"),
    ("ag", "alpha", [1, 1], "web,ops", "first", ""),
    ("ao", "alpha", [1, 2], "web,ops", "first", ""),
    ("bg", "beta", [2, 1], "web", "second", ""),
    ("bo", "beta", [2, 2], "web", "second", ""),
];

struct Site {
    world: World,
    suite: &'static str,
    version: u8,
    underlay: [IpAddr; 6],
    servers: Vec<Servers>,
    reloads: usize,
}

impl Site {
    fn new(suite: &'static str, curve: &'static str, version: u8) -> Self {
        let mut world = World::new();
        let underlay = HOSTS.map(|(name, ..)| IpAddr::V4(world.host(name)));
        let version_flag = version.to_string();
        for ca in ["first", "second"] {
            let files = [format!("{ca}.crt"), format!("{ca}.key")];
            world.certify(&[
                "ca",
                "-name",
                ca,
                "-curve",
                curve,
                "-version",
                &version_flag,
                "-out-crt",
                &files[0],
                "-out-key",
                &files[1],
            ]);
        }
        let cas =
            ["first.crt", "second.crt"].map(|file| std::fs::read_to_string(world.dir().join(file)).expect("a CA"));
        world.write("ca.crt", &cas.concat());
        for (host, name, number, groups, ca, behind) in HOSTS {
            let mut networks = format!("{}/16", v4(number));
            if version == 2 {
                networks += &format!(",{}/64", v6(number));
            }
            let files = [format!("{host}.crt"), format!("{host}.key"), format!("{ca}.crt"), format!("{ca}.key")];
            let mut sign = vec![
                "sign",
                "-name",
                name,
                "-networks",
                &networks,
                "-groups",
                groups,
                "-out-crt",
                &files[0],
                "-out-key",
                &files[1],
                "-ca-crt",
                &files[2],
                "-ca-key",
                &files[3],
            ];
            if !behind.is_empty() {
                sign.extend(["-unsafe-networks", behind]);
            }
            world.certify(&sign);
        }
        let mut site = Self { world, suite, version, underlay, servers: Vec::new(), reloads: 0 };
        let open = "[{port: any, proto: any, host: any}]";
        for (host, ..) in HOSTS {
            let config = site.configure(host, open);
            let program = if host.ends_with('g') { go("nebula", suite) } else { ours() };
            site.world.start(host, &program, &["-config", &config.display().to_string()]);
        }
        site.connect();
        site
    }

    fn configure(&self, host: &str, rules: &str) -> PathBuf {
        let dir = self.world.dir().display();
        let (mut known, mut routes) = (String::new(), String::new());
        for ((name, _, number, _, _, behind), underlay) in HOSTS.into_iter().zip(self.underlay) {
            if name == host {
                continue;
            }
            known += &format!("\"{}\": [\"{underlay}:4242\"], ", v4(number));
            if self.version == 2 {
                known += &format!("\"{}\": [\"{underlay}:4242\"], ", v6(number));
            }
            if !behind.is_empty() {
                routes += &format!("{{route: {behind}, via: {}}}, ", v4(number));
            }
        }
        let text = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{host}.crt, key: {dir}/{host}.key}}
static_host_map: {{{known}}}
listen: {{host: 0.0.0.0, port: 4242}}
tun: {{dev: neb0, mtu: 1300, unsafe_routes: [{routes}]}}
firewall: {{default_local_cidr_any: false, inbound: {rules}, outbound: {rules}}}
"
        );
        self.world.write(&format!("{host}.yml"), &text)
    }

    /// Establishes every tunnel and starts the servers.
    fn connect(&mut self) {
        for (host, _, number, _, _, behind) in HOSTS {
            let namespace = self.world.namespace_of(host);
            let end = Instant::now() + SOON;
            while !self.world.exec(host, &["ip", "link", "show", "neb0", "up"]).status.success() {
                assert!(Instant::now() < end, "{host} does not start\n{}", self.world.all_logs());
                thread::sleep(Duration::from_millis(20));
            }
            if !behind.is_empty() {
                let address = format!("192.168.{}.9/32", number[1]);
                world::run("ip", &["-n", &namespace, "addr", "add", &address, "dev", "lo"]);
            }
            // Allows root to open ICMP echo sockets.
            self.world.exec(host, &["sysctl", "-qw", "net.ipv4.ping_group_range=0 0"]);
            self.servers.push(Servers::start(&namespace));
        }
        for x in ["xg", "xo"] {
            for (peer, ..) in &HOSTS[2..] {
                self.world.ping(peer, &v4(number(x)).to_string(), SOON);
            }
        }
    }

    /// Gives both nodes under test a rule, and returns once they have loaded it.
    fn apply(&mut self, rule: &Rule) {
        self.reloads += 1;
        let sha = self.fingerprint("first");
        for (host, _, number, _, _, behind) in &HOSTS[..2] {
            let text =
                rule.text.replace("BEHIND", behind).replace("OWN", &v4(*number).to_string()).replace("FIRST", &sha);
            self.configure(host, &text);
            kill(Pid::from_raw(self.world.pid(host).cast_signed()), Signal::SIGHUP).expect("the daemon lives");
        }
        for (host, ..) in &HOSTS[..2] {
            let end = Instant::now() + SOON;
            while self.world.log(host).matches("New firewall has been installed").count() < self.reloads {
                assert!(Instant::now() < end, "{host} does not take {}\n{}", rule.text, self.world.all_logs());
                thread::sleep(Duration::from_millis(10));
            }
        }
    }

    fn fingerprint(&self, ca: &str) -> String {
        let tool = go("nebula-cert", "sid");
        let path = self.world.dir().join(format!("{ca}.crt")).display().to_string();
        let json = world::run(&tool.display().to_string(), &["print", "-json", "-path", &path]);
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        json[0]["fingerprint"].as_str().expect("a fingerprint").to_owned()
    }

    /// All probes, from every host.
    fn probes(&self) -> Vec<Probe> {
        let mut all = Vec::new();
        for x in ["xg", "xo"] {
            for (peer, ..) in &HOSTS[2..] {
                for (from, to) in [(*peer, x), (x, *peer)] {
                    all.extend(Probe::between(from, to, IpAddr::V4(v4(number(to))), "v4"));
                    if self.version == 2 {
                        all.extend(Probe::between(from, to, IpAddr::V6(v6(number(to))), "v6"));
                    }
                }
                // 1.6 does not support `local_cidr`.
                if self.suite != "bookworm" {
                    let behind = [192, 168, number(x)[1], 9].into();
                    all.extend(Probe::between(peer, x, behind, "behind").into_iter().filter(|probe| !probe.is_udp()));
                }
            }
        }
        all
    }

    fn ask(&self, probes: &[Probe], within: Duration) -> Vec<Verdict> {
        probes::ask(probes, within, |host| self.world.namespace_of(host))
    }

    /// Describes the verdicts that differ from Go's, and records in `seen` which results each kind of probe had.
    fn differences(&self, rule: &Rule, seen: &mut BTreeMap<String, [bool; 2]>) -> Vec<String> {
        let mut probes = self.probes();
        let mut verdicts = self.ask(&probes, FIRST_TRY);
        let differs = |probes: &[Probe], verdicts: &[Verdict]| -> Vec<(Probe, Verdict)> {
            let measure: BTreeMap<_, _> = probes
                .iter()
                .zip(verdicts)
                .filter(|(probe, _)| probe.from.ends_with('g') && probe.to.ends_with('g'))
                .map(|(probe, verdict)| (probe.meaning(), *verdict))
                .collect();
            let others = probes.iter().zip(verdicts).filter(|(probe, verdict)| measure[&probe.meaning()] != **verdict);
            others.map(|(probe, verdict)| (probe.clone(), *verdict)).collect()
        };
        let doubtful: Vec<_> = differs(&probes, &verdicts).iter().map(|(probe, _)| probe.meaning()).collect();
        for (probe, verdict) in probes.iter().zip(&verdicts) {
            seen.entry(probe.meaning()).or_default()[usize::from(*verdict)] = true;
        }
        if doubtful.is_empty() {
            return Vec::new();
        }
        probes.retain(|probe| doubtful.contains(&probe.meaning()));
        verdicts = self.ask(&probes, SECOND_TRY);
        let text = |(probe, verdict): (Probe, Verdict)| {
            let word = if verdict { "passes" } else { "is refused" };
            format!("{} {}: {} -> {}: {} {word}", self.suite, rule.text, probe.from, probe.to, probe.meaning())
        };
        differs(&probes, &verdicts).into_iter().map(text).collect()
    }
}

fn number(host: &str) -> [u8; 2] {
    HOSTS.iter().find(|(name, ..)| *name == host).expect("a known host").2
}

fn v4([a, b]: [u8; 2]) -> std::net::Ipv4Addr {
    [10, 77, a, b].into()
}

fn v6([a, b]: [u8; 2]) -> std::net::Ipv6Addr {
    [0xfd77, 0, 0, 0, 0, 0, u16::from(a), u16::from(b)].into()
}

/// Tests all rules that the release supports.
fn matrix(suite: &'static str, curve: &'static str, version: u8) -> (usize, Vec<String>) {
    let mut site = Site::new(suite, curve, version);
    let (mut different, mut seen, mut count) = (Vec::new(), BTreeMap::new(), 0);
    for rule in RULES.iter().filter(|rule| rule.known_to(suite)) {
        site.apply(rule);
        count += site.probes().len();
        different.extend(site.differences(rule, &mut seen));
    }
    // A probe that always passes, or never does, tells nothing.
    let mute: Vec<_> = seen.iter().filter(|(_, both)| **both != [true, true]).collect();
    assert!(mute.is_empty(), "{suite} with {curve}: refused, passed: {mute:?}\n{}", site.world.all_logs());
    (count, different)
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn every_rule_lets_the_same_packets_pass_with_go_and_with_ours() {
    let began = Instant::now();
    let networks = [("bookworm", "25519", 1), ("trixie", "P256", 1), ("sid", "25519", 2)];
    let runs = networks.map(|(suite, curve, version)| thread::spawn(move || matrix(suite, curve, version)));
    let mut different = Vec::new();
    for (run, (suite, ..)) in runs.into_iter().zip(networks) {
        let (count, found) = run.join().expect("the network of this release");
        eprintln!("{suite}: {count} verdicts");
        different.extend(found);
    }
    eprintln!("{} rules in {:?}", RULES.len(), began.elapsed());
    assert!(different.is_empty(), "{} differences:\n{}", different.len(), different.join("\n"));
}
