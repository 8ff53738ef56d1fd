//! Other programs change the tun device of a running daemon, as network managers do: lost settings are restored,
//! changes by a reload persist, and without a device the daemon exits.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::loopback::{Network, ours};
use crate::world::World;

use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const ADDRESSES: [&str; 2] = ["10.42.0.7/16", "fd42::7/64"];
const TUN: &str = "mtu: 1300, routes: [{route: 10.42.5.0/24, mtu: 1400}], \
                   unsafe_routes: [{route: 192.168.7.0/24, via: 10.42.0.1, metric: 50}";
const PUT_BACK: &str = "Somebody else changed the tun device; what it lost is put back";
const SOON: Duration = Duration::from_secs(20);

/// A namespace with a daemon whose device is `neb0`.
struct Host {
    world: World,
    network: Network,
    config: PathBuf,
}

fn settings(device: &str, port: u16, tun: &str) -> String {
    format!(
        "tun: {{dev: {device}, {tun}]}}\nlisten: {{host: 127.0.0.1, port: {port}}}\n\
         stats: {{type: prometheus, listen: '127.0.0.1:9100', path: /m, interval: 10s}}\n\
         daemon: {{control_socket: false}}"
    )
}

impl Host {
    fn start() -> Self {
        let (mut world, network) = (World::new(), Network::new());
        world.namespace("a");
        let config = network.configure("a", &ADDRESSES, &settings("neb0", 4242, TUN));
        world.start("a", &ours(), &["-config", &config.display().to_string()]);
        let host = Self { world, network, config };
        host.until("the start", SOON, || host.world.log("a").contains("Nebula interface is active"));
        host
    }

    fn until(&self, what: &str, within: Duration, done: impl Fn() -> bool) {
        let end = Instant::now() + within;
        while !done() {
            assert!(Instant::now() < end, "{what}\n{}\n{}", self.state(), self.world.all_logs());
            sleep(Duration::from_millis(10));
        }
    }

    fn ip(&self, arguments: &str) -> String {
        let words: Vec<_> = std::iter::once("ip").chain(arguments.split(' ')).collect();
        let output = self.world.exec("a", &words);
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Link, addresses and routes as listed by the kernel.
    fn state(&self) -> String {
        ["-br address show dev neb0", "-o link show dev neb0", "route show dev neb0", "-6 route show dev neb0"]
            .map(|arguments| self.ip(arguments))
            .concat()
    }

    fn metric(&self, name: &str) -> String {
        let ask = "exec 3<>/dev/tcp/127.0.0.1/9100; printf 'GET /m HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3";
        let page = self.world.exec("a", &["bash", "-c", ask]);
        let page = String::from_utf8_lossy(&page.stdout).into_owned();
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in {page}")).to_owned()
    }

    fn hang_up(&self) {
        kill(Pid::from_raw(self.world.pid("a").cast_signed()), Signal::SIGHUP).expect("the daemon lives");
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn what_somebody_takes_from_the_device_is_back_within_a_second() {
    let host = Host::start();
    let before = host.state();
    assert!(before.contains("192.168.7.0/24") && before.contains("fd42::7/64"), "{before}");
    for (command, said) in [
        ("address del 10.42.0.7/16 dev neb0", "address 10.42.0.7/16"),
        ("address flush dev neb0", "address fd42::7/64"),
        ("route flush dev neb0", "route 10.42.0.0/16"),
        ("-6 route del fd42::/64 dev neb0", "route fd42::/64"),
        ("link set neb0 down", "[up"),
    ] {
        let lines = host.world.log("a").lines().count();
        host.ip(command);
        host.until(command, Duration::from_secs(1), || host.state() == before);
        let log = host.world.log("a");
        let new: Vec<_> = log.lines().skip(lines).filter(|line| line.contains(PUT_BACK)).collect();
        assert!(new.iter().any(|line| line.contains(said)), "{command} is not among {new:?}");
    }
    assert!(host.world.log("a").contains(" by=\"process "), "who did it: {}", host.world.log("a"));
    assert_eq!(host.metric("link_repairs_total{what=\"address\"}"), "4");
    assert_eq!(host.metric("link_repairs_total{what=\"state\"}"), "1");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_fight_is_not_fought_at_full_speed_and_the_mtu_is_put_back_too() {
    let host = Host::start();
    let before = host.state();
    host.ip("link set neb0 mtu 1280");
    host.until("the MTU", Duration::from_secs(1), || host.state() == before);
    assert_eq!(host.metric("link_repairs_total{what=\"mtu\"}"), "1");
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        // Fails while the address is missing.
        host.world.exec("a", &["ip", "address", "del", "10.42.0.7/16", "dev", "neb0"]);
    }
    let fought: u32 = host.metric("link_repairs_total{what=\"address\"}").parse().expect("a number");
    // Repairs are delayed by 40 + 80 + 160 … ms.
    assert!((3..=8).contains(&fought), "{fought} times in three seconds\n{}", host.world.all_logs());
}

#[test]
#[ignore = "needs root and network namespaces"]
fn what_a_reload_changes_is_not_put_back() {
    let host = Host::start();
    let changed = "mtu: 1350, unsafe_routes: [{route: 192.168.9.0/24, via: 10.42.0.1}";
    let pki = std::fs::read_to_string(&host.config).expect("its configuration");
    let pki = pki.lines().next().expect("its credentials");
    std::fs::write(&host.config, format!("{pki}\n{}\n", settings("neb0", 4242, changed))).expect("written");
    host.hang_up();
    host.until("the reload", SOON, || host.state().contains("192.168.9.0/24"));
    sleep(Duration::from_millis(500));
    let after = host.state();
    for gone in ["192.168.7.0/24", "10.42.5.0/24"] {
        assert!(!after.contains(gone), "{gone} came back: {after}");
    }
    assert!(after.contains("mtu 1350"), "{after}");
    assert!(!host.world.log("a").contains("Somebody else"), "{}", host.world.all_logs());
    host.ip("route del 192.168.9.0/24 dev neb0");
    host.until("the new route", Duration::from_secs(1), || host.state() == after);
}

#[test]
#[ignore = "needs root and network namespaces"]
fn another_daemon_with_the_same_network_is_named_and_both_leave_each_other_alone() {
    let mut host = Host::start();
    let second = host.network.configure("b", &["10.42.0.8/16"], &settings("neb1", 4243, TUN).replace("9100", "9101"));
    host.world.start_in("b", "a", &ours(), &["-config", &second.display().to_string()]);
    host.until("the other's start", SOON, || host.world.log("b").contains("Nebula interface is active"));
    let first = format!("interface=neb0 address=10.42.0.7/16 process=\"nebula ({})\"", host.world.pid("a"));
    assert!(host.world.log("b").contains(&first), "{first}\n{}", host.world.all_logs());
    // Its routes to the same networks replaced those of the first one.
    let elsewhere = "Somebody else led a route of the overlay to another interface; it is left alone";
    host.until("the first one says so", SOON, || host.world.log("a").contains(elsewhere));
    host.world.stop("b", Signal::SIGTERM);
    host.until("the routes lead to the first one again", Duration::from_secs(1), || {
        let state = host.state();
        state.contains("10.42.0.0/16") && state.contains("10.42.5.0/24") && state.contains("192.168.7.0/24")
    });
}

/// Configures a file that matches every device, as many machines have it, and reconfigures the device. The daemon sees
/// the same /run, where networkd keeps the state of devices.
const NETWORKD: &str = "set -e
mount -o remount,bind,ro /sys
mount -t tmpfs none /run
mkdir -p /run/systemd/network /run/dbus
printf '[Match]\\nName=*\\n[Network]\\nDHCP=no\\nLinkLocalAddressing=no\\n' > /run/systemd/network/50-all.network
trap 'kill $(jobs -p); wait' EXIT
\"$0\" -config \"$1\" &
dbus-daemon --system --nofork --nopidfile &
sleep 0.5
/lib/systemd/systemd-networkd &
until networkctl status neb0 | grep -q '(configured)'; do sleep 0.1; done
networkctl reconfigure neb0
sleep 1
ip -br address show dev neb0
ip route show dev neb0";

#[test]
#[ignore = "needs root, network namespaces and systemd-networkd"]
fn systemd_networkd_takes_the_address_away_and_is_named_with_what_to_do_about_it() {
    let (mut world, network) = (World::new(), Network::new());
    world.namespace("a");
    let config = network.configure("a", &ADDRESSES, &settings("neb0", 4242, TUN)).display().to_string();
    let program = ours().display().to_string();
    let isolated = ["unshare", "--mount", "--propagation", "private", "timeout", "20", "bash", "-c"];
    let output = world.exec("a", &[&isolated[..], &[NETWORKD, &program, &config]].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|line| line.contains(PUT_BACK)).unwrap_or_else(|| panic!("{text}"));
    for part in ["address 10.42.0.7/16", " by=\"systemd-network (", "50-all.network: put [Match] Name=neb0"] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    for kept in ["\n10.42.0.0/16 ", "\n10.42.5.0/24 ", "\n192.168.7.0/24 ", "10.42.0.7/16 fd42::7/64"] {
        assert!(text.contains(kept), "{kept:?} is not in {text}");
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn without_its_device_the_daemon_ends_and_says_why() {
    for command in ["link del neb0", "link set neb0 netns 1"] {
        let mut host = Host::start();
        host.ip(command);
        let said = "the tun device neb0 was removed by somebody else";
        host.until("the end", Duration::from_secs(2), || host.world.log("a").contains(said));
        assert_eq!(host.world.ended("a", Duration::from_secs(5)), Some(2), "{}", host.world.all_logs());
    }
}
