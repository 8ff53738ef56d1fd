//! Relays that hosts choose among the members of a group: ours with two relays of Go Nebula, and ours as relay of Go
//! hosts.
//!
//! The two ends have no route to each other, so everything that arrives came through a relay.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::hosts::relays::configure;
use crate::world;

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use world::peers::{go, ours};
use world::{World, run};

const SOON: Duration = Duration::from_secs(30);

/// A lighthouse, two relays with the group, and two ends; each with its number in the overlay.
const NAMES: [&str; 5] = ["l", "r", "q", "a", "b"];
const A: &str = "10.77.0.4";
const B: &str = "10.77.0.5";

struct Site {
    world: World,
    underlay: Vec<IpAddr>,
}

impl Site {
    fn new() -> Self {
        let mut world = World::new();
        let underlay: Vec<_> = NAMES.iter().map(|name| IpAddr::V4(world.host(name))).collect();
        for (end, other) in [("a", underlay[4]), ("b", underlay[3])] {
            run("ip", &["-n", &world.namespace_of(end), "route", "add", "blackhole", &other.to_string()]);
        }
        world.certify(&["ca", "-name", "site", "-version", "2"]);
        for (at, name) in NAMES.iter().enumerate() {
            let network = format!("10.77.0.{}/24", at + 1);
            let groups = if matches!(*name, "r" | "q") { "relay" } else { "host" };
            world.certify(&["sign", "-name", name, "-networks", &network, "-groups", groups]);
        }
        Self { world, underlay }
    }

    fn start(&mut self, host: &str, binary: &std::path::Path, relay: &str) {
        let is_ours = binary == ours();
        let path = self.configure(host, is_ours, relay).display().to_string();
        self.world.start(host, binary, &["-config", &path]);
        let (socket, end) = (self.world.dir().join(format!("{host}.sock")), Instant::now() + SOON);
        while is_ours && !socket.exists() {
            assert!(Instant::now() < end, "{host} does not start\n{}", self.world.all_logs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn configure(&self, host: &str, is_ours: bool, relay: &str) -> PathBuf {
        let dir = self.world.dir().display().to_string();
        let daemon = if is_ours { format!("daemon: {{control_socket: {dir}/{host}.sock}}\n") } else { String::new() };
        configure(&self.world, self.underlay[0], host, relay, &daemon)
    }

    /// What `nebula ctl` on a host says.
    fn ctl(&self, host: &str, arguments: &[&str]) -> Value {
        let socket = self.world.dir().join(format!("{host}.sock"));
        let command =
            Command::new(ours()).arg("ctl").arg("--socket").arg(socket).args(arguments).arg("--json").output();
        let output = command.expect("run nebula ctl");
        let text = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
    }

    fn chosen(&self, host: &str) -> Vec<String> {
        let status = self.ctl(host, &["status"]);
        let relays = status["relays"].as_array().expect("a list");
        let chosen = relays.iter().filter(|relay| relay["chosen"] == true && relay["relays"] == true);
        chosen.map(|relay| relay["relay"].as_str().expect("an address").to_owned()).collect()
    }

    fn until_chosen(&self, host: &str, relays: &[&str]) {
        let end = Instant::now() + SOON;
        while self.chosen(host) != relays {
            assert!(Instant::now() < end, "{}\n{}", self.ctl(host, &["status"]), self.world.all_logs());
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// The relay through which `host` reaches a peer.
    fn relay_to(&self, host: &str, peer: &str) -> String {
        let answer = self.ctl(host, &["tunnel", peer]);
        let tunnels = answer["tunnels"].as_array().expect("a list");
        let primary = tunnels.iter().find(|tunnel| tunnel["primary"] == true).expect("a tunnel");
        assert!(primary["endpoint"].is_null(), "{answer}");
        primary["relay"].as_str().expect("a relay").to_owned()
    }
}

const GROUP: &str = "groups: [relay]";

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn ours_chooses_two_go_relays_and_goes_on_by_the_other_when_one_is_killed() {
    let go = go("nebula", "sid");
    let mut site = Site::new();
    site.start("l", &ours(), GROUP);
    for relay in ["r", "q"] {
        site.start(relay, &go, "am_relay: true");
        site.world.ping(relay, "10.77.0.1", SOON);
    }
    for end in ["a", "b"] {
        site.start(end, &ours(), GROUP);
    }
    for end in ["a", "b"] {
        site.until_chosen(end, &["10.77.0.2", "10.77.0.3"]);
    }
    site.world.ping("a", B, SOON);
    site.world.ping("b", A, SOON);
    site.world.transfer("a", "b", B.parse().expect("an address"), 10_000_000);
    // Until both relays have a hop.
    thread::sleep(Duration::from_secs(6));
    let used = site.relay_to("a", B);
    let (dead, other) = if used == "10.77.0.2" { ("r", "10.77.0.3") } else { ("q", "10.77.0.2") };
    let answered = thread::scope(|scope| {
        let namespace = site.world.namespace_of("a");
        let pings = scope.spawn(move || {
            let command = ["netns", "exec", &namespace, "ping", "-n", "-q", "-c", "100", "-i", "0.2", "-W", "1", B];
            let output = Command::new("ip").args(command).output().expect("run ping");
            String::from_utf8_lossy(&output.stdout).into_owned()
        });
        thread::sleep(Duration::from_secs(2));
        site.world.stop(dead, Signal::SIGKILL);
        pings.join().expect("ping ends")
    });
    println!("{answered}");
    let received =
        answered.split(", ").nth(1).and_then(|text| text.split(' ').next()).and_then(|n| n.parse::<u32>().ok());
    // Two traffic checks find it out, five seconds apart, and the answer to a test moves the tunnel.
    assert!(received.is_some_and(|received| received >= 48), "{answered}\n{}", site.world.all_logs());
    assert_eq!(site.relay_to("a", B), other);
    let end = Instant::now() + Duration::from_secs(60);
    while site.chosen("a") != [other] {
        assert!(Instant::now() < end, "{}", site.ctl("a", &["status"]));
        thread::sleep(Duration::from_millis(200));
    }
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn ours_with_the_group_relays_between_go_and_one_that_chose_it() {
    let go = go("nebula", "sid");
    let mut site = Site::new();
    site.start("l", &ours(), GROUP);
    site.start("r", &ours(), "am_relay: true");
    site.world.ping("r", "10.77.0.1", SOON);
    site.start("a", &ours(), GROUP);
    site.start("b", &go, "relays: [\"10.77.0.2\"], use_relays: true");
    site.until_chosen("a", &["10.77.0.2"]);
    site.world.ping("b", "10.77.0.1", SOON);
    // Go learns from the lighthouse which relay ours chose; ours learns which one Go was told.
    site.world.ping("b", A, SOON);
    site.world.ping("a", B, SOON);
    assert_eq!(site.relay_to("a", B), "10.77.0.2");
    site.world.transfer("b", "a", A.parse().expect("an address"), 10_000_000);
}
