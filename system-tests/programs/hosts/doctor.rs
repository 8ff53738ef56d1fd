//! Mistakes on a real kernel, and the cause that `nebula ctl doctor` and `why` report for each. The lighthouse and the
//! peer that refuses are Go Nebula 1.11.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use world::World;
use world::peers::{go, ours};

const SOON: Duration = Duration::from_secs(20);
const L: &str = "10.77.0.1";
const B: &str = "10.77.0.3";

/// `l`: a lighthouse; `a`: ours; `b`: a host that does not trust the CA of the others. `l` and `b` are Go Nebula.
struct Site {
    world: World,
}

impl Site {
    fn start() -> Self {
        let mut world = World::new();
        let lighthouse = world.host("l");
        let [_, b] = ["a", "b"].map(|name| world.host(name));
        world.certify(&["ca", "-name", "doctor"]);
        world.certify(&["ca", "-name", "other", "-out-crt", "other.crt", "-out-key", "other.key"]);
        for (at, name) in ["l", "a", "b"].iter().enumerate() {
            world.certify(&["sign", "-name", name, "-networks", &format!("10.77.0.{}/24", at + 1)]);
        }
        let dir = world.dir().display().to_string();
        for (host, ca) in [("l", "ca"), ("b", "other"), ("a", "ca")] {
            let is_lighthouse = host == "l";
            let (known, hosts) = if is_lighthouse {
                (String::new(), "[]".to_owned())
            } else {
                (format!("\"{L}\": [\"{lighthouse}:4242\"], \"{B}\": [\"{b}:4242\"]"), format!("[\"{L}\"]"))
            };
            let control =
                if host == "a" { format!("daemon: {{control_socket: {dir}/a.sock}}\n") } else { String::new() };
            let config = format!(
                "pki: {{ca: {dir}/{ca}.crt, cert: {dir}/{host}.crt, key: {dir}/{host}.key}}
static_host_map: {{{known}}}
lighthouse: {{am_lighthouse: {is_lighthouse}, interval: 2, hosts: {hosts}}}
listen: {{host: 0.0.0.0, port: 4242}}
tun: {{dev: neb0, mtu: 1300}}
{control}firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: icmp, host: any}}, {{port: 443, proto: tcp, group: web}}]
"
            );
            let path = world.write(&format!("{host}.yml"), &config).display().to_string();
            let program = if host == "a" { ours() } else { go("nebula", "sid") };
            world.start(host, &program, &["-config", &path]);
        }
        world.ping("a", L, SOON);
        Self { world }
    }

    /// Returns exit code and answer.
    fn ctl(&self, words: &[&str]) -> (i32, Value) {
        let socket = self.world.dir().join("a.sock").display().to_string();
        let program = ours().display().to_string();
        let command = [&[program.as_str(), "ctl", "--json", "--socket", &socket], words].concat();
        let output = self.world.exec("a", &command);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let answer = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("{words:?}: {error}\n{text}\n{}", String::from_utf8_lossy(&output.stderr)));
        (output.status.code().expect("an exit code"), answer)
    }

    /// The codes of the findings.
    fn codes(&self, words: &[&str]) -> (i32, Vec<String>) {
        let (code, answer) = self.ctl(words);
        let findings = answer["findings"].as_array().expect("findings");
        (code, findings.iter().map(|finding| finding["code"].as_str().expect("a code").to_owned()).collect())
    }

    fn assert_found(&self, words: &[&str], expected: &str) {
        self.wait(&format!("{expected} by {words:?}"), |site| {
            let (code, found) = site.codes(words);
            code == 1 && found.iter().any(|code| code == expected)
        });
    }

    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let until = Instant::now() + SOON;
        while !done(self) {
            let told = || self.ctl(&["doctor"]).1;
            assert!(Instant::now() < until, "no {what}\n{:#}\n{}", told(), self.world.log("a"));
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Repeats a command until the result is dropped, because the daemon repairs what the command breaks.
    fn keep_doing(&self, command: &str) -> Repeated {
        let script = format!("while {command} 2>/dev/null || true; do sleep 0.005; done");
        let mut shell = Command::new("ip");
        shell.args(["netns", "exec", &self.world.namespace_of("a"), "bash", "-c", &script]);
        Repeated(shell.spawn().expect("ip netns exec"))
    }

    fn must(&self, command: &[&str]) {
        let output = self.world.exec("a", command);
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

struct Repeated(Child);

impl Drop for Repeated {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn the_cause_of_each_mistake_on_a_real_kernel_is_named() {
    let mut site = Site::start();
    assert_eq!(site.codes(&["why", L]), (0, vec![]), "nothing is wrong with the lighthouse");
    assert_eq!(site.ctl(&["status"]).0, 0);

    // The peer has another CA: it does not say so, but it answers.
    site.assert_found(&["why", B], "refused_by_peer");
    let cause = "no answer to ";
    site.wait("line with the cause", |site| site.world.log("a").contains(&format!("cause=\"{cause}")));

    // A packet filter, a closed port, and no answer at all.
    let rule = "udp dport 4242 ip daddr 192.0.2.3 drop";
    let rules = format!("table inet doctor {{\nchain out {{\ntype filter hook output priority 0\n{rule}\n}}\n}}\n");
    let file = site.world.write("out.nft", &rules).display().to_string();
    site.must(&["nft", "-f", &file]);
    site.assert_found(&["why", B], "local_firewall");
    site.must(&["nft", "delete", "table", "inet", "doctor"]);
    site.must(&["ip", "route", "add", "unreachable", "192.0.2.3/32"]);
    site.assert_found(&["why", B], "no_underlay_route");
    site.must(&["ip", "route", "del", "unreachable", "192.0.2.3/32"]);
    site.world.stop("b", Signal::SIGKILL);
    site.assert_found(&["why", B], "port_closed");
    let namespace = site.world.namespace_of("b");
    world::run("ip", &["-n", &namespace, "link", "set", "eth0", "down"]);
    site.assert_found(&["why", B], "no_answer");

    // The device and the kernel's routes.
    let other = site.keep_doing("ip link set neb0 mtu 1250");
    site.assert_found(&["doctor"], "mtu_differs");
    drop(other);
    site.must(&["ip", "link", "set", "neb0", "mtu", "1300"]);
    assert_eq!(site.ctl(&["trace", "icmp", L]).0, 0);
    let other = site.keep_doing("ip route del 10.77.0.0/24 dev neb0");
    site.assert_found(&["doctor"], "route_missing");
    site.wait("trace without a route", |site| {
        let (code, trace) = site.ctl(&["trace", "icmp", L]);
        (code, &trace["outcome"], &trace["reason"]) == (1, &"not sent".into(), &"kernel_route".into())
    });
    drop(other);
    let other = site.keep_doing("ip route replace 10.77.0.0/24 dev eth0");
    site.assert_found(&["doctor"], "route_elsewhere");
    drop(other);
    site.must(&["ip", "route", "replace", "10.77.0.0/24", "dev", "neb0"]);
    let other = site.keep_doing("ip link set neb0 down");
    site.assert_found(&["doctor"], "device_down");
    site.wait("status that says so", |site| site.ctl(&["status"]).0 == 1);
    drop(other);
    site.must(&["ip", "link", "set", "neb0", "up"]);
    let other = site.keep_doing("ip address del 10.77.0.2/24 dev neb0");
    site.assert_found(&["doctor"], "address_missing");
    drop(other);
    site.must(&["ip", "address", "replace", "10.77.0.2/24", "dev", "neb0"]);

    // Packets dropped by this host's firewall.
    site.world.ping("a", L, SOON);
    let to = "10.77.0.2";
    let _ = site.world.exec("l", &["timeout", "1", "bash", "-c", &format!("</dev/tcp/{to}/443")]);
    site.wait("warning of the firewall", |site| {
        let (_, answer) = site.ctl(&["doctor"]);
        let mut found = answer["findings"].as_array().expect("findings").iter();
        found.any(|found| (&found["code"], &found["severity"]) == (&"firewall_drop".into(), &"warning".into()))
    });
    let (_, answer) = site.ctl(&["doctor"]);
    let drop = &answer["facts"]["drops"][0];
    assert_eq!((&drop["nearest"]["index"], &drop["nearest"]["differs"][0]), (&1.into(), &"peer".into()), "{drop}");

    // Debug logging has a line for each denied flow.
    let (code, _) = site.ctl(&["log-level", "debug"]);
    assert_eq!(code, 0);
    site.wait("line about the denied flow", |site| {
        let _ = site.world.exec("l", &["timeout", "1", "bash", "-c", &format!("</dev/tcp/{to}/443")]);
        let log = site.world.log("a");
        let line = log.lines().find(|line| line.contains("dropping inbound packet")).unwrap_or_default();
        ["certName=l", "ownName=a", "reason=no_rule", "firewall.inbound #1 differs in peer", "LocalPort:443"]
            .iter()
            .all(|part| line.contains(part))
    });

    // Packets that have no place in the overlay.
    site.must(&["ip", "route", "add", "198.51.100.0/24", "dev", "neb0"]);
    let _ = site.world.exec("a", &["ping", "-c", "1", "-W", "1", "198.51.100.9"]);
    site.wait("no_route", |site| site.codes(&["doctor"]).1.iter().any(|code| code == "no_route"));
    site.must(&["ip", "route", "del", "198.51.100.0/24", "dev", "neb0"]);
    site.must(&["ip", "address", "add", "10.88.0.1/32", "dev", "neb0"]);
    let _ = site.world.exec("a", &["ping", "-c", "1", "-W", "1", "-I", "10.88.0.1", L]);
    site.assert_found(&["doctor"], "local_address");

    // The lighthouse is killed.
    site.world.stop("l", Signal::SIGKILL);
    let _ = site.ctl(&["close", "--quietly", L]);
    site.assert_found(&["why", L], "port_closed");
    site.assert_found(&["doctor"], "all_lighthouses_unreachable");
}
