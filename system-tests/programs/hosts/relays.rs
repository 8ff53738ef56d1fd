//! Relays in every position with real Go Nebula of three releases: ours between two Go nodes, and at either end of a Go
//! relay.
//!
//! The two ends have no route to each other, so everything that arrives came through the relay.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::net::IpAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use world::peers::{go, ours};
use world::{World, run};

const BULK: usize = 50_000_000;
const SOON: Duration = Duration::from_secs(30);

/// `l` is the lighthouse, `r` the relay, `a` and `b` are the ends; each with its number in the overlay.
const NAMES: [&str; 4] = ["l", "r", "a", "b"];
const A: &str = "10.77.0.3";
const B: &str = "10.77.0.4";

#[derive(Clone, Copy, PartialEq)]
enum Maker {
    Ours,
    Go,
}

use Maker::{Go, Ours};

struct Site {
    world: World,
    suite: &'static str,
    version: u8,
    underlay: Vec<IpAddr>,
}

impl Site {
    fn new(suite: &'static str, version: u8) -> Self {
        let mut world = World::new();
        let underlay: Vec<_> = NAMES.iter().map(|name| IpAddr::V4(world.host(name))).collect();
        for (end, other) in [("a", underlay[3]), ("b", underlay[2])] {
            run("ip", &["-n", &world.namespace_of(end), "route", "add", "blackhole", &other.to_string()]);
        }
        let site = Self { world, suite, version, underlay };
        site.world.certify(&["ca", "-name", "site", "-version", &version.to_string()]);
        for (at, name) in NAMES.iter().enumerate() {
            let mut networks = format!("10.77.0.{}/24", at + 1);
            if version == 2 {
                networks += &format!(",fd77::{}/64", at + 1);
            }
            site.world.certify(&["sign", "-name", name, "-networks", &networks]);
        }
        site
    }

    /// A site with all nodes started and connected to the lighthouse.
    fn started(suite: &'static str, version: u8, makers: [Maker; 4]) -> Self {
        let mut site = Self::new(suite, version);
        for (name, maker) in NAMES.iter().zip(makers) {
            site.start(name, maker);
        }
        for name in ["r", "a", "b"] {
            site.world.ping(name, "10.77.0.1", SOON);
        }
        site
    }

    fn start(&mut self, host: &str, maker: Maker) {
        let relay = match host {
            "l" => "",
            "r" => "am_relay: true",
            _ => "relays: [\"10.77.0.2\"], use_relays: true",
        };
        let path = self.configure(host, relay).display().to_string();
        let binary = match maker {
            Ours => ours(),
            Go => go("nebula", self.suite),
        };
        self.world.start(host, &binary, &["-config", &path]);
    }

    fn reload(&self, host: &str, relay: &str) {
        self.configure(host, relay);
        let pid = nix::unistd::Pid::from_raw(self.world.pid(host).cast_signed());
        nix::sys::signal::kill(pid, Signal::SIGHUP).expect("the daemon lives");
    }

    /// Waits until `host` has reloaded its relay settings this many times.
    fn until_reloaded(&self, host: &str, times: usize) {
        let end = Instant::now() + SOON;
        while self.world.log(host).matches("relay settings have been reloaded").count() < times {
            assert!(Instant::now() < end, "not reloaded\n{}", self.world.all_logs());
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn configure(&self, host: &str, relay: &str) -> PathBuf {
        configure(&self.world, self.underlay[0], host, relay, "logging: {level: info, format: text}\n")
    }

    fn restart(&mut self, host: &str, maker: Maker, signal: Signal) {
        self.world.stop(host, signal);
        self.start(host, maker);
    }

    /// Ping and bulk data in both directions; with v2 certificates also over IPv6.
    fn exchange(&self) {
        self.world.ping("a", B, SOON);
        self.world.ping("b", A, SOON);
        self.world.transfer("a", "b", B.parse().expect("an address"), BULK);
        self.world.transfer("b", "a", A.parse().expect("an address"), BULK);
        if self.version == 2 {
            self.world.ping("a", "fd77::4", SOON);
            self.world.transfer("a", "b", "fd77::4".parse().expect("an address"), BULK / 10);
        }
    }
}

/// Ours relays datagrams between two Go nodes.
fn ours_between(suite: &'static str, version: u8) {
    let site = Site::started(suite, version, [Go, Ours, Go, Go]);
    site.exchange();
}

/// Ours is the end that initiates, then the one that responds.
fn ours_at_each_end(suite: &'static str, version: u8) {
    let mut site = Site::started(suite, version, [Go, Go, Ours, Go]);
    site.exchange();
    for (host, maker) in [("a", Ours), ("b", Go)] {
        site.restart(host, maker, Signal::SIGTERM);
    }
    site.world.ping("a", "10.77.0.1", SOON);
    site.world.ping("b", A, SOON);
    site.exchange();
}

/// Each of the three is killed and restarted.
fn killed_and_restarted(suite: &'static str, makers: [Maker; 4]) {
    let mut site = Site::started(suite, 1, makers);
    site.world.ping("a", B, SOON);
    for (host, maker) in [("r", makers[1]), ("b", makers[3]), ("a", makers[2])] {
        site.restart(host, maker, Signal::SIGKILL);
        site.world.ping("a", B, Duration::from_secs(60));
        site.world.ping("b", A, SOON);
    }
    site.world.transfer("a", "b", B.parse().expect("an address"), BULK / 10);
}

/// The relay stops and resumes relaying, and an end stops and resumes using relays, all by reloads.
fn relay_settings_are_reloaded() {
    let mut site = Site::started("sid", 2, [Go, Ours, Ours, Go]);
    let silent = |site: &Site| assert_eq!(site.world.pings("a", B, 5, "0.2"), 0, "{}", site.world.all_logs());
    site.world.ping("a", B, SOON);
    site.reload("r", "am_relay: false");
    site.until_reloaded("r", 1);
    silent(&site);
    site.reload("r", "am_relay: true");
    site.until_reloaded("r", 2);
    site.world.ping("a", B, Duration::from_secs(60));

    site.reload("a", "relays: [\"10.77.0.2\"], use_relays: false");
    site.until_reloaded("a", 1);
    // Existing connections remain.
    site.world.ping("a", B, SOON);
    site.restart("b", Go, Signal::SIGTERM);
    site.world.ping("b", "10.77.0.1", SOON);
    silent(&site);
    site.reload("a", "relays: [\"10.77.0.2\"], use_relays: true");
    site.until_reloaded("a", 2);
    site.world.ping("a", B, Duration::from_secs(60));
    site.world.ping("b", A, SOON);
}

/// Writes the configuration of a host; `l` is the lighthouse, at `lighthouse`. `more` is other sections.
pub(crate) fn configure(world: &World, lighthouse: IpAddr, host: &str, relay: &str, more: &str) -> PathBuf {
    let dir = world.dir().display().to_string();
    let (known, hosts) = match host {
        "l" => (String::new(), "[]"),
        _ => (format!("\"10.77.0.1\": [\"{lighthouse}:4242\"]"), "[\"10.77.0.1\"]"),
    };
    let config = format!(
        "pki: {{ca: {dir}/ca.crt, cert: {dir}/{host}.crt, key: {dir}/{host}.key}}
static_host_map: {{{known}}}
lighthouse: {{am_lighthouse: {}, interval: 2, hosts: {hosts}}}
relay: {{{relay}}}
listen: {{host: 0.0.0.0, port: 4242}}
punchy: {{punch: true}}
tun: {{dev: neb0, mtu: 1300}}
{more}firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: any, host: any}}]
",
        host == "l",
    );
    world.write(&format!("{host}.yml"), &config)
}

macro_rules! beside_go {
    ($($name:ident: $body:expr;)*) => {$(
        #[test]
        #[ignore = "needs root, network namespaces and the Go peers in target/peers"]
        fn $name() {
            $body
        }
    )*};
}

beside_go! {
    ours_relays_between_two_go_1_6: ours_between("bookworm", 1);
    ours_relays_between_two_go_1_9: ours_between("trixie", 1);
    ours_relays_between_two_go_1_11_v1: ours_between("sid", 1);
    ours_relays_between_two_go_1_11_v2: ours_between("sid", 2);
    ours_is_an_end_of_a_go_1_6_relay: ours_at_each_end("bookworm", 1);
    ours_is_an_end_of_a_go_1_9_relay: ours_at_each_end("trixie", 1);
    ours_is_an_end_of_a_go_1_11_relay_v1: ours_at_each_end("sid", 1);
    ours_is_an_end_of_a_go_1_11_relay_v2: ours_at_each_end("sid", 2);
    all_of_ours_talk_through_a_relay: Site::started("sid", 2, [Ours, Ours, Ours, Ours]).exchange();
    our_relay_and_its_go_ends_come_back_after_a_kill: killed_and_restarted("sid", [Go, Ours, Go, Go]);
    relay_settings_change_on_sighup: relay_settings_are_reloaded();
    our_end_and_its_go_relay_come_back_after_a_kill: killed_and_restarted("sid", [Go, Go, Ours, Go]);
}
