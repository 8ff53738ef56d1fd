//! Our `nebula` with real Go Nebula of three releases: as initiator, as responder, and with a lighthouse in between.
//!
//! The Go binaries are fetched by `.ci/go-nebula` into `target/peers`. Every test carries 100 MB of TCP each way and
//! compares every byte.

use crate::world;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use world::peers::{go, ours};
use world::{World, run};

const BULK: usize = 100_000_000;
const SOON: Duration = Duration::from_secs(15);

/// The variants of a test.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub(super) suite: &'static str,
    pub(super) curve: &'static str,
    pub(super) cipher: &'static str,
    pub(super) version: u8,
}

/// Three hosts with certificates: `l` (lighthouse), `o` (ours) and `g` (Go).
struct Net {
    world: World,
    case: Case,
    underlay: [IpAddr; 3],
    /// The address that all hosts listen on.
    listen: &'static str,
}

const NAMES: [&str; 3] = ["l", "o", "g"];

impl Net {
    fn new(case: Case) -> Self {
        let mut world = World::new();
        let underlay = NAMES.map(|name| IpAddr::V4(world.host(name)));
        let version = case.version.to_string();
        world.certify(&["ca", "-name", "interop", "-curve", case.curve, "-version", &version]);
        for (at, name) in NAMES.iter().enumerate() {
            let mut networks = format!("10.77.0.{}/24", at + 1);
            if case.version == 2 {
                networks += &format!(",fd77::{}/64", at + 1);
            }
            world.certify(&["sign", "-name", name, "-networks", &networks, "-groups", "interop"]);
        }
        Self { world, case, underlay, listen: "0.0.0.0" }
    }

    /// Gives every host an IPv6 address too. `o` and `g` know only each other's IPv6 address; the lighthouse is known
    /// as before.
    fn dual_stack(mut self) -> Self {
        for (at, name) in NAMES.iter().enumerate() {
            let address = format!("fd55::{}", at + 1);
            let namespace = self.world.namespace_of(name);
            run("ip", &["-n", &namespace, "addr", "add", &format!("{address}/64"), "dev", "eth0", "nodad"]);
            if *name != "l" {
                self.underlay[at] = address.parse().expect("an address");
            }
        }
        self.listen = "'::'";
        self
    }

    /// Starts `host`. `known` are the hosts in its own configuration; `lighthouse` tells whether it uses one.
    fn start(&mut self, host: &str, binary: &Path, known: &[&str], lighthouse: bool) {
        let dir = self.world.dir().display().to_string();
        let entries: Vec<String> = known
            .iter()
            .map(|name| {
                let at = NAMES.iter().position(|n| n == name).expect("a known name");
                format!("\"10.77.0.{}\": [\"{}\"]", at + 1, SocketAddr::new(self.underlay[at], 4242))
            })
            .collect();
        let hosts = if lighthouse { "[\"10.77.0.1\"]" } else { "[]" };
        let config = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{host}.crt, key: {dir}/{host}.key}}
static_host_map: {{{}}}
lighthouse: {{am_lighthouse: {}, interval: 5, hosts: {hosts}}}
listen: {{host: {}, port: 4242}}
punchy: {{punch: true}}
cipher: {}
tun: {{dev: neb0, mtu: 1300}}
logging: {{level: info, format: text}}
firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound:
    - {{port: any, proto: icmp, host: any}}
    - {{port: any, proto: tcp, group: interop}}
",
            entries.join(", "),
            host == "l",
            self.listen,
            self.case.cipher,
        );
        let path = self.world.write(&format!("{host}.yml"), &config);
        self.world.start(host, binary, &["-config", &path.display().to_string()]);
    }

    fn restart_both(&mut self, known_to_ours: &[&str], known_to_go: &[&str], lighthouse: bool) {
        for host in ["o", "g"] {
            self.world.stop(host, Signal::SIGTERM);
        }
        let go = go("nebula", self.case.suite);
        self.start("g", &go, known_to_go, lighthouse);
        self.start("o", &ours(), known_to_ours, lighthouse);
    }

    /// Ping and 100 MB in each direction; with v2 certificates also over IPv6.
    fn exchange(&self) {
        self.world.ping("o", "10.77.0.3", SOON);
        self.world.ping("g", "10.77.0.2", SOON);
        self.world.transfer("o", "g", "10.77.0.3".parse().expect("an address"), BULK);
        self.world.transfer("g", "o", "10.77.0.2".parse().expect("an address"), BULK);
        if self.case.version == 2 {
            self.world.ping("o", "fd77::3", SOON);
            self.world.transfer("o", "g", "fd77::3".parse().expect("an address"), BULK / 10);
            self.world.transfer("g", "o", "fd77::2".parse().expect("an address"), BULK / 10);
        }
    }
}

/// Runs the whole exchange for one case.
pub(super) fn interoperates(case: Case) {
    let mut net = Net::new(case);
    // Ours knows where Go is and initiates.
    net.restart_both(&["g"], &[], false);
    net.world.ping("o", "10.77.0.3", SOON);
    net.exchange();
    // Go knows where ours is and initiates.
    net.restart_both(&[], &["o"], false);
    net.world.ping("g", "10.77.0.2", SOON);
    net.exchange();
    // Neither knows the other: a Go lighthouse introduces them, whichever initiates.
    let lighthouse = go("nebula", case.suite);
    net.start("l", &lighthouse, &[], false);
    net.restart_both(&["l"], &["l"], true);
    net.world.ping("g", "10.77.0.1", SOON);
    net.world.ping("o", "10.77.0.1", SOON);
    net.world.ping("o", "10.77.0.3", SOON);
    net.exchange();
    net.restart_both(&["l"], &["l"], true);
    net.world.ping("o", "10.77.0.1", SOON);
    net.world.ping("g", "10.77.0.1", SOON);
    net.world.ping("g", "10.77.0.2", SOON);
}

macro_rules! interop {
    ($($name:ident: $suite:literal $curve:literal $cipher:literal v $version:literal;)*) => {$(
        #[test]
        #[ignore = "needs root, network namespaces and the Go peers in target/peers"]
        fn $name() {
            interoperates(Case { suite: $suite, curve: $curve, cipher: $cipher, version: $version });
        }
    )*};
}

interop! {
    go_1_6_with_25519_aes_v1: "bookworm" "25519" "aes" v 1;
    go_1_6_with_25519_chachapoly_v1: "bookworm" "25519" "chachapoly" v 1;
    go_1_9_with_25519_aes_v1: "trixie" "25519" "aes" v 1;
    go_1_9_with_25519_chachapoly_v1: "trixie" "25519" "chachapoly" v 1;
    go_1_9_with_p256_aes_v1: "trixie" "P256" "aes" v 1;
    go_1_9_with_p256_chachapoly_v1: "trixie" "P256" "chachapoly" v 1;
    go_1_11_with_25519_aes_v1: "sid" "25519" "aes" v 1;
    go_1_11_with_25519_chachapoly_v1: "sid" "25519" "chachapoly" v 1;
    go_1_11_with_p256_aes_v1: "sid" "P256" "aes" v 1;
    go_1_11_with_p256_chachapoly_v1: "sid" "P256" "chachapoly" v 1;
    go_1_11_with_25519_aes_v2: "sid" "25519" "aes" v 2;
    go_1_11_with_25519_chachapoly_v2: "sid" "25519" "chachapoly" v 2;
    go_1_11_with_p256_aes_v2: "sid" "P256" "aes" v 2;
    go_1_11_with_p256_chachapoly_v2: "sid" "P256" "chachapoly" v 2;
}

/// One socket per node serves both families: ours meets Go over IPv6 and Go's lighthouse over IPv4; then Go initiates.
fn meets_on_both_families(suite: &'static str) {
    let mut net = Net::new(Case { suite, curve: "25519", cipher: "aes", version: 1 }).dual_stack();
    net.start("l", &go("nebula", suite), &[], false);
    for (known_to_ours, known_to_go) in [(&["g", "l"][..], &["l"][..]), (&["l"], &["o", "l"])] {
        net.restart_both(known_to_ours, known_to_go, false);
        net.world.ping("o", "10.77.0.1", SOON);
        let (caller, called) = if known_to_ours.contains(&"g") { ("o", "10.77.0.3") } else { ("g", "10.77.0.2") };
        net.world.ping(caller, called, SOON);
        net.world.transfer("o", "g", "10.77.0.3".parse().expect("an address"), BULK / 10);
        net.world.transfer("g", "o", "10.77.0.2".parse().expect("an address"), BULK / 10);
        net.world.transfer("o", "l", "10.77.0.1".parse().expect("an address"), BULK / 100);
    }
    let log = net.world.log("o");
    for endpoint in ["[fd55::3]:4242", "192.0.2."] {
        assert!(log.lines().any(|line| line.contains("Handshake") && line.contains(endpoint)), "{endpoint}\n{log}");
    }
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn go_1_6_meets_ours_on_both_families() {
    meets_on_both_families("bookworm");
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn go_1_9_meets_ours_on_both_families() {
    meets_on_both_families("trixie");
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn go_1_11_meets_ours_on_both_families() {
    meets_on_both_families("sid");
}

/// Our lighthouse introduces a Go node to one of ours.
#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn our_lighthouse_introduces_go_1_11_and_ours() {
    for version in [1, 2] {
        let case = Case { suite: "sid", curve: "25519", cipher: "aes", version };
        let mut net = Net::new(case);
        net.start("l", &ours(), &[], false);
        net.restart_both(&["l"], &["l"], true);
        net.world.ping("g", "10.77.0.1", SOON);
        net.world.ping("o", "10.77.0.1", SOON);
        net.world.ping("g", "10.77.0.2", SOON);
        net.restart_both(&["l"], &["l"], true);
        net.world.ping("g", "10.77.0.1", SOON);
        net.world.ping("o", "10.77.0.1", SOON);
        net.world.ping("o", "10.77.0.3", SOON);
    }
}

/// Either side is killed and restarted: the other learns of it by recv_error, and traffic resumes at once.
#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_killed_peer_is_reachable_again_soon_after_its_restart() {
    let case = Case { suite: "sid", curve: "25519", cipher: "aes", version: 2 };
    let mut net = Net::new(case);
    net.restart_both(&["g"], &["o"], false);
    net.world.ping("o", "10.77.0.3", SOON);
    net.world.stop("g", Signal::SIGKILL);
    let go_binary = go("nebula", case.suite);
    net.start("g", &go_binary, &["o"], false);
    net.world.ping("o", "10.77.0.3", Duration::from_secs(6));
    net.world.stop("o", Signal::SIGKILL);
    net.start("o", &ours(), &["g"], false);
    net.world.ping("g", "10.77.0.2", Duration::from_secs(6));
}

/// Our firewall refuses what Go sends, and lets in answers to our own connections.
#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn our_firewall_refuses_what_no_rule_allows() {
    let case = Case { suite: "sid", curve: "25519", cipher: "aes", version: 2 };
    let mut net = Net::new(case);
    net.restart_both(&["g"], &["o"], false);
    net.world.ping("o", "10.77.0.3", SOON);
    // The inbound rules allow icmp, and tcp from the group, but no udp.
    net.world.start("o", Path::new("iperf3"), &["-s", "-1", "-p", "5301"]);
    let udp = net.world.exec(
        "g",
        &[
            "timeout",
            "5",
            "iperf3",
            "-c",
            "10.77.0.2",
            "-p",
            "5301",
            "-u",
            "-b",
            "1M",
            "-t",
            "1",
            "--connect-timeout",
            "2000",
        ],
    );
    assert!(!udp.status.success(), "UDP went through although no rule allows it");
    net.world.ping("g", "10.77.0.2", SOON);
}
