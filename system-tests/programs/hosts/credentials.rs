//! Certificates that change in a running network, with ours and Go Nebula of three releases together, under traffic
//! that must not stop.
//!
//! `o` is ours; `g16`, `g19` and `g11` are Go 1.6.1, 1.9.3 and 1.11.0.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use world::peers::{go, ours};
use world::traffic::Flow;
use world::{World, enter, run};

const SOON: Duration = Duration::from_secs(20);
/// A blocked peer is cut off within this time.
const CUT: Duration = Duration::from_secs(10);
/// Go checks a tunnel every 5 s, and once more 5 s later if nothing arrived meanwhile.
const RENEWED: Duration = Duration::from_secs(25);

const NODES: [(&str, Option<&str>); 4] =
    [("o", None), ("g16", Some("bookworm")), ("g19", Some("trixie")), ("g11", Some("sid"))];
const PEERS: [&str; 3] = ["g16", "g19", "g11"];

struct Site {
    world: World,
    underlay: [IpAddr; 4],
}

impl Site {
    fn started(curve: &str) -> Self {
        let mut world = World::new();
        let underlay = NODES.map(|(name, _)| IpAddr::V4(world.host(name)));
        world.certify(&["ca", "-name", "credentials", "-version", "1", "-curve", curve]);
        let mut site = Self { world, underlay };
        for (name, suite) in NODES {
            site.certify(name, "first");
            let config = site.configure(name, "");
            let program = suite.map_or_else(ours, |suite| go("nebula", suite));
            site.world.start(name, &program, &["-config", &config]);
        }
        for peer in PEERS {
            site.world.ping("o", &overlay(peer).to_string(), SOON);
        }
        site
    }

    /// A new key and certificate for `name`.
    fn certify(&self, name: &str, groups: &str) {
        for suffix in ["crt", "key"] {
            // The files do not exist the first time.
            let _ = std::fs::remove_file(self.world.dir().join(format!("{name}.{suffix}")));
        }
        self.world.certify(&["sign", "-name", name, "-networks", &format!("{}/24", overlay(name)), "-groups", groups]);
    }

    fn configure(&self, name: &str, pki: &str) -> String {
        let dir = self.world.dir().display();
        let known: String = NODES
            .iter()
            .zip(self.underlay)
            .filter(|((other, _), _)| *other != name)
            .map(|((other, _), underlay)| format!("\"{}\": [\"{underlay}:4242\"], ", overlay(other)))
            .collect();
        let text = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{name}.crt, key: {dir}/{name}.key, {pki}}}
static_host_map: {{{known}}}
listen: {{host: 0.0.0.0, port: 4242}}
tun: {{dev: neb0, mtu: 1300}}
firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound:
    - {{port: 1-1023, proto: tcp, group: second}}
    - {{port: 1024-65535, proto: any, host: any}}
    - {{port: any, proto: icmp, host: any}}
"
        );
        self.world.write(&format!("{name}.yml"), &text).display().to_string()
    }

    fn reload(&self, name: &str) {
        kill(Pid::from_raw(self.world.pid(name).cast_signed()), Signal::SIGHUP).expect("the daemon lives");
    }

    /// Whether `to` accepts a connection that only the group `second` may open.
    fn is_second(&self, from: &str, to: &str) -> bool {
        let namespace = self.world.namespace_of(from);
        let at = SocketAddr::new(overlay(to), 22);
        let attempt = thread::spawn(move || {
            enter(&namespace);
            TcpStream::connect_timeout(&at, Duration::from_millis(500))
        });
        // Nothing listens there: a refusal counts as an answer.
        attempt.join().expect("an answer").is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    }

    fn until(&self, what: &str, within: Duration, done: impl Fn() -> bool) -> Duration {
        let took = self.within(within, done);
        took.unwrap_or_else(|| panic!("{what}: not within {within:?}\n{}", self.world.all_logs()))
    }

    /// How long it took, or `None` if it was not done within the time.
    fn within(&self, within: Duration, done: impl Fn() -> bool) -> Option<Duration> {
        let began = Instant::now();
        while !done() {
            if began.elapsed() >= within {
                return None;
            }
            thread::sleep(Duration::from_millis(50));
        }
        Some(began.elapsed())
    }

    fn flows(&self) -> Vec<Flow> {
        let both = |peer| [("o", peer), (peer, "o")];
        PEERS.into_iter().flat_map(both).map(|(from, to)| Flow::start(&self.world, from, to, overlay(to))).collect()
    }

    fn fingerprint(&self, name: &str) -> String {
        let path = self.world.dir().join(format!("{name}.crt")).display().to_string();
        let json = run(&go("nebula-cert", "sid").display().to_string(), &["print", "-json", "-path", &path]);
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        json[0]["fingerprint"].as_str().expect("a fingerprint").to_owned()
    }
}

fn overlay(name: &str) -> IpAddr {
    let number = NODES.iter().position(|(node, _)| *node == name).expect("a known node") + 1;
    Ipv4Addr::new(10, 77, 0, u8::try_from(number).expect("a small number")).into()
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_new_certificate_takes_effect_on_sighup_and_no_packet_is_lost_but_by_go_1_6() {
    let mut site = Site::started("25519");
    let flows = site.flows();
    for peer in PEERS {
        assert!(!site.is_second("o", peer) && !site.is_second(peer, "o"), "{peer}: no certificate says so yet");
    }
    flows.iter().for_each(Flow::watch);
    let sent = Instant::now();
    site.certify("o", "second");
    site.reload("o");
    for peer in PEERS {
        let took = site.until(&format!("{peer} knows our new group"), RENEWED, || site.is_second("o", peer));
        eprintln!("{peer} knows our new group after {:.1} s", took.as_secs_f64());
    }
    // 1.6 keeps existing tunnels unchanged until they end.
    for peer in &PEERS[1..] {
        site.certify(peer, "second");
        site.reload(peer);
    }
    for peer in &PEERS[1..] {
        let what = format!("we know the new group of {peer}");
        let took = match site.within(RENEWED, || site.is_second(peer, "o")) {
            Some(took) => took,
            None => {
                let log = site.world.log(peer);
                assert!(!log.contains("Re-handshaking with remote"), "{what}: never\n{}", site.world.all_logs());
                // A race in Go: a packet that leaves between the end of a handshake and `AddTrafficWatch`
                // (connection_manager.go) keeps that tunnel from being watched, and so from being renewed.
                eprintln!("{peer} does not watch its tunnel: it gets another one");
                site.certify("o", "second");
                site.reload("o");
                site.until(&what, RENEWED, || site.is_second(peer, "o"))
            }
        };
        eprintln!("{what} after {:.1} s", took.as_secs_f64());
    }
    for flow in &flows {
        assert!(flow.broken().is_none(), "{} -> {}: {:?}", flow.from, flow.to, flow.broken());
    }
    let lost: Vec<_> = flows.iter().map(|flow| (flow.from.as_str(), flow.to.as_str(), flow.lost())).collect();
    eprintln!("all within {:.1} s", sent.elapsed().as_secs_f64());
    site.world.stop("o", Signal::SIGTERM);
    let counters = site.world.log("o").lines().last().unwrap_or_default().to_owned();
    for (from, to, lost) in lost {
        // 1.6 drops the old tunnel before its answer has created the new one here, and answers packets in between with
        // an error.
        let by_go = if [from, to].contains(&"g16") { counter(&counters, "recv_errors_in") } else { 0 };
        assert!(lost <= by_go, "{from} -> {to}: {lost} lost\n{counters}\n{}", site.world.all_logs());
    }
}

/// Reads one counter from the line that the daemon logs at exit, which omits zeros.
fn counter(line: &str, name: &str) -> usize {
    let value = line.split([' ', '"']).find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value.map_or(0, |value| value.parse().expect("a number"))
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_blocked_certificate_is_cut_off_within_ten_seconds_and_let_in_again() {
    let site = Site::started("25519");
    let blocked = ["g16", "g11"].map(|peer| site.fingerprint(peer)).join(", ");
    site.configure("o", &format!("blocklist: [{blocked}]"));
    let kept =
        [Flow::start(&site.world, "o", "g19", overlay("g19")), Flow::start(&site.world, "g19", "o", overlay("o"))];
    let cut = [Flow::start(&site.world, "g16", "o", overlay("o")), Flow::start(&site.world, "g11", "o", overlay("o"))];
    kept.iter().for_each(Flow::watch);
    let began = Instant::now();
    site.reload("o");
    for flow in &cut {
        // Measures until the last answer, not until the first one is missing.
        site.until(&format!("{} is cut off", flow.from), CUT + Duration::from_secs(2), || {
            flow.watch();
            thread::sleep(Duration::from_secs(1));
            flow.answers().1 == 0
        });
        let took = began.elapsed().saturating_sub(Duration::from_secs(1));
        eprintln!("{} is cut off after {:.1} s", flow.from, took.as_secs_f64());
        assert!(took < CUT, "{took:?}");
    }
    for peer in ["g16", "g11"] {
        assert_eq!(site.world.pings("o", &overlay(peer).to_string(), 5, "0.2"), 0, "we still talk to {peer}");
        assert_eq!(site.world.pings(peer, &overlay("o").to_string(), 5, "0.2"), 0, "{peer} still talks to us");
    }
    for flow in &kept {
        assert_eq!(flow.lost(), 0, "{} -> {} is nobody's business", flow.from, flow.to);
        assert!(flow.broken().is_none());
    }
    site.configure("o", "blocklist: []");
    site.reload("o");
    for peer in ["g16", "g11"] {
        site.world.ping(peer, &overlay("o").to_string(), SOON);
    }
}
