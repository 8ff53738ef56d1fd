//! Networks behind nodes, refused packets and kernel routes: our `nebula` with real Go Nebula, on real kernels.
//!
//! Hosts: `c` (client), `g` and `h` (gateways), `n` (a machine behind them without Nebula, 192.168.7.9).

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use world::peers::{go, ours};
use world::{World, enter, run};

const SOON: Duration = Duration::from_secs(20);
const BEHIND: &str = "192.168.7.0/24";
const MACHINE: &str = "192.168.7.9";
const OPEN: &str = "[{port: any, proto: any, host: any, local_cidr: any}]";

/// Nodes with their number in the overlay, and whether they are gateways.
const NODES: [(&str, u8, bool); 3] = [("c", 1, false), ("g", 2, true), ("h", 3, true)];

struct Site {
    world: World,
    underlay: Vec<IpAddr>,
    version: u8,
}

/// What a node's configuration has besides the usual.
#[derive(Clone, Copy)]
struct Extra<'a> {
    tun: &'a str,
    inbound: &'a str,
    outbound: &'a str,
    firewall: &'a str,
}

const PLAIN: Extra<'_> = Extra { tun: "", inbound: OPEN, outbound: OPEN, firewall: "" };

impl Site {
    fn new(version: u8) -> Self {
        let mut world = World::new();
        let underlay = NODES.iter().map(|(name, ..)| IpAddr::V4(world.host(name))).collect();
        let site = Self { world, underlay, version };
        site.world.certify(&["ca", "-name", "site", "-version", &version.to_string()]);
        for (name, number, is_gateway) in NODES {
            let mut networks = format!("10.77.0.{number}/24");
            if version == 2 {
                networks += &format!(",fd77::{number}/64");
            }
            let mut arguments = vec!["sign", "-name", name, "-networks", &networks];
            if is_gateway {
                arguments.extend(["-unsafe-networks", BEHIND]);
            }
            site.world.certify(&arguments);
        }
        site
    }

    /// Adds `n` behind the gateways; its answers go through `g`.
    fn add_machine(&mut self) {
        let machine = self.world.namespace("n");
        self.world.attach(&machine, "lan0", &format!("{MACHINE}/24"));
        for (gateway, number) in [("g", 2), ("h", 3)] {
            let namespace = self.world.namespace_of(gateway);
            self.world.attach(&namespace, "lan0", &format!("192.168.7.{number}/24"));
            self.must("sysctl", gateway, &["sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0"]);
        }
        self.answer_by(2);
    }

    /// Routes answers of `n` through the gateway with this number.
    fn answer_by(&self, number: u8) {
        let gateway = format!("192.168.7.{number}");
        self.must("route", "n", &["ip", "route", "replace", "10.77.0.0/24", "via", &gateway]);
    }

    fn must(&self, what: &str, host: &str, command: &[&str]) -> String {
        let output = self.world.exec(host, command);
        assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn configure(&self, host: &str, extra: Extra<'_>) -> PathBuf {
        let dir = self.world.dir().display();
        let mut known = String::new();
        for ((name, number, _), underlay) in NODES.iter().zip(&self.underlay).filter(|((name, ..), _)| *name != host) {
            let _ = name;
            known += &format!("\"10.77.0.{number}\": [\"{underlay}:4242\"], ");
            if self.version == 2 {
                known += &format!("\"fd77::{number}\": [\"{underlay}:4242\"], ");
            }
        }
        let Extra { tun, inbound, outbound, firewall } = extra;
        let text = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{host}.crt, key: {dir}/{host}.key}}
static_host_map: {{{known}}}
lighthouse: {{am_lighthouse: false, hosts: []}}
listen: {{host: 0.0.0.0, port: 4242}}
tun: {{dev: neb0, mtu: 1300, {tun}}}
firewall: {{inbound: {inbound}, outbound: {outbound}, {firewall}}}
daemon: {{control_socket: {dir}/{host}.sock}}
"
        );
        // 1.9 does not support this value.
        let text = if self.version == 1 { text.replace("local_cidr: any", "local_cidr: 0.0.0.0/0") } else { text };
        self.world.write(&format!("{host}.yml"), &text)
    }

    fn start(&mut self, host: &str, binary: &Path, extra: Extra<'_>) {
        let path = self.configure(host, extra);
        self.world.stop(host, Signal::SIGTERM);
        self.world.start(host, binary, &["-config", &path.display().to_string()]);
    }

    fn reload(&self, host: &str, extra: Extra<'_>) {
        self.configure(host, extra);
        let pid = nix::unistd::Pid::from_raw(self.world.pid(host).cast_signed());
        nix::sys::signal::kill(pid, Signal::SIGHUP).expect("the daemon lives");
    }

    /// Repeats a command until its output is as wanted.
    fn until(&self, host: &str, command: &[&str], wanted: impl Fn(&str) -> bool) {
        let end = Instant::now() + SOON;
        loop {
            let text = String::from_utf8_lossy(&self.world.exec(host, command).stdout).into_owned();
            if wanted(&text) {
                return;
            }
            assert!(Instant::now() < end, "{command:?} still says:\n{text}\n{}", self.world.all_logs());
            thread::sleep(Duration::from_millis(50));
        }
    }
}

fn via(gateways: &str) -> String {
    format!("unsafe_routes: [{{route: {BEHIND}, via: {gateways}}}]")
}

/// A client reaches the machine behind a gateway, and the machine reaches the client, with every byte compared.
fn reaches_the_network_behind(suite: &str) {
    let mut site = Site::new(1);
    site.add_machine();
    let go = go("nebula", suite);
    let route = via("10.77.0.2");
    for (client, gateway) in [(ours(), go.clone()), (go, ours())] {
        site.start("g", &gateway, PLAIN);
        site.start("c", &client, Extra { tun: &route, ..PLAIN });
        site.world.ping("c", MACHINE, SOON);
        site.world.transfer("c", "n", MACHINE.parse().expect("an address"), 20_000_000);
        site.world.ping("n", "10.77.0.1", SOON);
        site.world.transfer("n", "c", "10.77.0.1".parse().expect("an address"), 20_000_000);
    }
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_network_behind_go_1_6_or_ours_is_reached_by_the_other() {
    reaches_the_network_behind("bookworm");
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_network_behind_go_1_9_or_ours_is_reached_by_the_other() {
    reaches_the_network_behind("trixie");
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_network_behind_go_1_11_or_ours_is_reached_by_the_other() {
    reaches_the_network_behind("sid");
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn flows_of_a_killed_gateway_go_on_by_the_other_one() {
    let mut site = Site::new(1);
    site.add_machine();
    let route = via("[{gateway: 10.77.0.2, weight: 3}, {gateway: 10.77.0.3, weight: 1}]");
    site.start("g", &go("nebula", "sid"), PLAIN);
    site.start("h", &ours(), PLAIN);
    site.start("c", &ours(), Extra { tun: &route, ..PLAIN });
    site.world.ping("c", "10.77.0.2", SOON);
    site.world.ping("c", "10.77.0.3", SOON);
    // Every ping is a separate flow.
    let answered = |site: &Site, pings: u32| (0..pings).filter(|_| site.world.pings("c", MACHINE, 1, "1") == 1).count();
    assert_eq!(answered(&site, 12), 12, "{}", site.world.all_logs());
    site.world.stop("g", Signal::SIGKILL);
    site.answer_by(3);
    let end = Instant::now() + Duration::from_secs(40);
    while answered(&site, 6) < 6 {
        assert!(Instant::now() < end, "not all flows moved to the gateway that is left\n{}", site.world.all_logs());
    }
    // The gateway with the larger weight is used again when it is back.
    site.start("g", &go("nebula", "sid"), PLAIN);
    site.answer_by(2);
    site.world.ping("c", MACHINE, SOON);
}

/// Source ports of the flows that each gateway receives.
fn ports_by_gateway(site: &Site) -> [Vec<u16>; 2] {
    let target: SocketAddr = "192.168.7.77:5300".parse().expect("an endpoint");
    let (ready, listening) = std::sync::mpsc::channel();
    let listen = |host: &str| {
        let (namespace, ready) = (site.world.namespace_of(host), ready.clone());
        thread::spawn(move || {
            enter(&namespace);
            let socket = UdpSocket::bind(target).expect("bind the shared address");
            ready.send(()).expect("the test waits");
            socket.set_read_timeout(Some(Duration::from_secs(4))).expect("a timeout");
            let mut ports = Vec::new();
            let mut buffer = [0; 16];
            while let Ok((_, from)) = socket.recv_from(&mut buffer) {
                ports.push(from.port());
            }
            ports.sort_unstable();
            ports.dedup();
            ports
        })
    };
    let listeners = ["g", "h"].map(listen);
    for _ in &listeners {
        listening.recv_timeout(SOON).expect("both listen");
    }
    let client = site.world.namespace_of("c");
    let sender = thread::spawn(move || {
        enter(&client);
        for port in 20_000..20_200 {
            let socket = UdpSocket::bind(("10.77.0.1", port)).expect("a free port");
            // The first one may be lost while a tunnel is set up.
            for _ in 0..3 {
                socket.send_to(b"which way", target).expect("send");
            }
            thread::sleep(Duration::from_millis(2));
        }
    });
    sender.join().expect("the sender ends");
    listeners.map(|listener| listener.join().expect("the listener ends"))
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn ours_and_go_1_11_choose_the_same_gateway_for_every_flow() {
    let mut site = Site::new(1);
    let route = via("[{gateway: 10.77.0.2, weight: 10}, {gateway: 10.77.0.3, weight: 5}]");
    let mut chosen = Vec::new();
    for client in [ours(), go("nebula", "sid")] {
        for gateway in ["g", "h"] {
            site.start(gateway, &ours(), PLAIN);
            // Both gateways have the same address, so each sees the packets routed to it.
            site.must("address", gateway, &["ip", "addr", "replace", "192.168.7.77/32", "dev", "lo"]);
        }
        site.start("c", &client, Extra { tun: &route, ..PLAIN });
        site.world.ping("c", "10.77.0.2", SOON);
        site.world.ping("c", "10.77.0.3", SOON);
        chosen.push(ports_by_gateway(&site));
    }
    assert_eq!(chosen[0], chosen[1], "ours, then Go's");
    let [g, h] = &chosen[0];
    assert_eq!(g.len() + h.len(), 200);
    assert!(g.len() > h.len() && !h.is_empty(), "{} and {}", g.len(), h.len());
}

/// The result of a connection attempt, and how long it takes.
fn connect(site: &Site, host: &str, to: &str) -> (Option<ErrorKind>, Duration) {
    let namespace = site.world.namespace_of(host);
    let to: SocketAddr = to.parse().expect("an endpoint");
    let attempt = thread::spawn(move || {
        enter(&namespace);
        let began = Instant::now();
        let result = TcpStream::connect_timeout(&to, Duration::from_secs(3));
        (result.err().map(|error| error.kind()), began.elapsed())
    });
    attempt.join().expect("the attempt ends")
}

fn assert_refused(site: &Site, host: &str, to: &str) {
    let (error, took) = connect(site, host, to);
    assert_eq!(error, Some(ErrorKind::ConnectionRefused), "{host} to {to}\n{}", site.world.all_logs());
    assert!(took < Duration::from_millis(900), "{host} to {to}: after {took:?}, so a repeated SYN was refused");
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_rejected_connection_fails_at_once_between_ours_and_go_1_11() {
    let mut site = Site::new(2);
    let ping_only = "[{port: any, proto: icmp, host: any}]";
    let refusing = Extra { inbound: ping_only, firewall: "inbound_action: reject", ..PLAIN };
    for (client, server) in [(go("nebula", "sid"), ours()), (ours(), go("nebula", "sid")), (ours(), ours())] {
        site.start("g", &server, refusing);
        site.start("c", &client, PLAIN);
        site.world.ping("c", "10.77.0.2", SOON);
        assert_refused(&site, "c", "10.77.0.2:80");
        assert_refused(&site, "c", "[fd77::2]:80");
    }
    // Without reject, the client times out.
    site.start("g", &ours(), Extra { firewall: "inbound_action: drop", ..refusing });
    site.world.ping("c", "10.77.0.2", SOON);
    assert_eq!(connect(&site, "c", "10.77.0.2:80").0, Some(ErrorKind::TimedOut));
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn what_the_own_rules_refuse_fails_at_once_with_outbound_reject() {
    let mut site = Site::new(2);
    let ping_only = "[{port: any, proto: icmp, host: any}]";
    site.start("g", &go("nebula", "sid"), PLAIN);
    let extra = Extra { outbound: ping_only, firewall: "outbound_action: reject", ..PLAIN };
    site.start("c", &ours(), extra);
    site.world.ping("c", "10.77.0.2", SOON);
    assert_refused(&site, "c", "10.77.0.2:80");
    assert_refused(&site, "c", "[fd77::2]:80");
    // A UDP socket learns of it by ICMP.
    let namespace = site.world.namespace_of("c");
    let error = thread::spawn(move || {
        enter(&namespace);
        let socket = UdpSocket::bind("10.77.0.1:0").expect("a port");
        socket.connect("10.77.0.2:53").expect("connect");
        socket.set_read_timeout(Some(Duration::from_secs(2))).expect("a timeout");
        socket.send(b"query").expect("send");
        socket.recv(&mut [0; 16]).expect_err("nobody answers").raw_os_error()
    });
    assert_eq!(error.join().expect("the attempt ends"), Some(libc::EHOSTUNREACH), "administratively prohibited");
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn routes_of_the_kernel_follow_the_configuration_and_its_reload() {
    let mut site = Site::new(2);
    let first = format!(
        "routes: [{{route: 10.77.0.128/25, mtu: 1000}}], unsafe_routes: [{{route: {BEHIND}, via: 10.77.0.2, metric: 77, \
         mtu: 1200}}, {{route: 172.16.0.0/12, via: 10.77.0.2, install: false}}, {{route: fd88::/32, via: 10.77.0.2}}]"
    );
    site.start("c", &ours(), Extra { tun: &first, ..PLAIN });
    let show = ["ip", "route", "show", "dev", "neb0"];
    site.until("c", &show, |text| text.contains("192.168.7.0/24") && text.contains("10.77.0.128/25"));
    let text = site.must("routes", "c", &show);
    let line = |network: &str| text.lines().find(|line| line.starts_with(network)).unwrap_or_default().to_owned();
    assert!(line(BEHIND).contains("metric 77") && line(BEHIND).contains("mtu 1200"), "{text}");
    assert!(line(BEHIND).contains("advmss 1160"), "{text}");
    assert!(line("10.77.0.128/25").contains("mtu 1000"), "{text}");
    assert!(!text.contains("172.16.0.0"), "install: false\n{text}");
    let v6 = site.must("routes", "c", &["ip", "-6", "route", "show", "dev", "neb0"]);
    assert!(v6.contains("fd88::/32"), "{v6}");

    let second =
        "routes: [{route: 10.77.0.64/26, mtu: 2000}], unsafe_routes: [{route: 192.168.8.0/24, via: 10.77.0.2}]";
    site.reload("c", Extra { tun: second, ..PLAIN });
    site.until("c", &show, |text| text.contains("192.168.8.0/24") && text.contains("10.77.0.64/26"));
    let text = site.must("routes", "c", &show);
    assert!(!text.contains(BEHIND) && !text.contains("10.77.0.128/25"), "{text}");
    let line = |network: &str| text.lines().find(|line| line.starts_with(network)).unwrap_or_default().to_owned();
    assert!(line("10.77.0.0/24").contains("mtu 1300"), "the device is larger than the tunnel\n{text}");
    assert!(line("192.168.8.0/24").contains("mtu 1300"), "{text}");
    assert!(site.must("link", "c", &["ip", "link", "show", "neb0"]).contains("mtu 2000"));
    let v6 = site.must("routes", "c", &["ip", "-6", "route", "show", "dev", "neb0"]);
    assert!(!v6.contains("fd88::/32") && v6.contains("fd77::/64"), "{v6}");

    // An error in the configuration changes nothing.
    site.reload("c", Extra { tun: "unsafe_routes: [{route: 10.77.0.0/25, via: 10.77.0.2}]", ..PLAIN });
    site.until(
        "c",
        &["grep", "-c", "nothing was changed", &site.world.dir().join("c.log").display().to_string()],
        |text| text.trim() == "1",
    );
    assert!(site.must("routes", "c", &show).contains("192.168.8.0/24"));

    site.reload("c", PLAIN);
    site.until("c", &show, |text| !text.contains("192.168.8.0/24") && text.contains("10.77.0.0/24"));
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_route_that_others_put_into_the_kernel_is_followed() {
    let mut site = Site::new(1);
    site.add_machine();
    site.start("g", &go("nebula", "sid"), PLAIN);
    let follow = "use_system_route_table: true, use_system_route_table_buffer_size: 1000000";
    site.start("c", &ours(), Extra { tun: follow, ..PLAIN });
    site.world.ping("c", "10.77.0.2", SOON);
    site.must("route", "c", &["ip", "route", "add", BEHIND, "via", "10.77.0.2", "dev", "neb0"]);
    site.world.ping("c", MACHINE, SOON);
    // A reload keeps learnt routes.
    site.reload(
        "c",
        Extra { tun: &format!("{follow}, unsafe_routes: [{{route: 172.16.0.0/12, via: 10.77.0.2}}]"), ..PLAIN },
    );
    site.until("c", &["ip", "route"], |text| text.contains("172.16.0.0/12"));
    site.world.ping("c", MACHINE, SOON);
    // The kernel still sends packets to the device, but the node has removed the route.
    site.must("route", "c", &["ip", "route", "del", BEHIND]);
    site.must("route", "c", &["ip", "route", "add", BEHIND, "dev", "neb0"]);
    site.until("c", &["ping", "-n", "-q", "-c", "1", "-W", "1", MACHINE], |text| text.contains(" 0 received"));
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_route_that_is_there_as_soon_as_the_device_is_followed() {
    let mut site = Site::new(1);
    site.add_machine();
    site.start("g", &go("nebula", "sid"), PLAIN);
    // Like a routing daemon, which may add the route before the node starts to listen.
    let add = format!("until ip route add {BEHIND} via 10.77.0.2 dev neb0 2>/dev/null; do :; done");
    site.world.start_in("routing", "c", Path::new("/bin/sh"), &["-c", &add]);
    site.start("c", &ours(), Extra { tun: "use_system_route_table: true", ..PLAIN });
    site.world.ping("c", MACHINE, SOON);
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_node_without_a_device_answers_pings() {
    let mut site = Site::new(2);
    site.start("g", &ours(), Extra { tun: "disabled: true", ..PLAIN });
    for client in [go("nebula", "sid"), ours()] {
        site.start("c", &client, PLAIN);
        site.world.ping("c", "10.77.0.2", SOON);
        site.world.ping("c", "fd77::2", SOON);
    }
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_narrow_link_behind_the_gateway_is_found_behind_a_firewall_without_a_rule_for_icmp() {
    let mut site = Site::new(1);
    site.add_machine();
    let tcp_only = "[{port: any, proto: tcp, host: any, local_cidr: any}]";
    // Nothing lets ICMP out of the gateway or into the client; the errors belong to the connection.
    site.start("g", &ours(), Extra { inbound: tcp_only, outbound: tcp_only, ..PLAIN });
    site.start("c", &ours(), Extra { tun: &via("10.77.0.2"), inbound: "[]", outbound: tcp_only, ..PLAIN });
    let gateway = site.world.namespace_of("g");
    run("ip", &["-n", &gateway, "link", "set", "lan0", "mtu", "900"]);
    site.until("c", &["ip", "route", "show", "dev", "neb0"], |text| text.contains(BEHIND));
    site.world.transfer("c", "n", MACHINE.parse().expect("an address"), 3_000_000);
    let cached = site.must("route", "c", &["ip", "route", "get", MACHINE]);
    assert!(cached.contains("mtu 900"), "{cached}");
}

/// Streams from `c` to the machine behind the gateways while `disturb` runs. Returns the longest time in
/// which nothing arrived.
fn longest_pause(site: &mut Site, disturb: impl FnOnce(&mut Site)) -> Duration {
    let target: SocketAddr = format!("{MACHINE}:5400").parse().expect("an endpoint");
    let machine = site.world.namespace_of("n");
    let (ready, listening) = std::sync::mpsc::channel();
    let receiver = thread::spawn(move || {
        enter(&machine);
        let listener = TcpListener::bind(target).expect("bind");
        ready.send(()).expect("the test waits");
        let mut stream = listener.accept().expect("a connection").0;
        let (mut last, mut longest, mut next, mut buffer) = (Instant::now(), Duration::ZERO, 0_u8, [0; 65536]);
        loop {
            let len = stream.read(&mut buffer).expect("the stream goes on");
            longest = longest.max(last.elapsed());
            last = Instant::now();
            if len == 0 {
                return longest;
            }
            for byte in &buffer[..len] {
                assert_eq!(*byte, next, "a byte of the stream is wrong");
                next = next.wrapping_add(1);
            }
        }
    });
    listening.recv_timeout(SOON).expect("it listens");
    let client = site.world.namespace_of("c");
    let stop = Arc::new(AtomicBool::new(false));
    let sender = thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            enter(&client);
            let mut stream = TcpStream::connect(target).expect("a connection");
            // A multiple of 256 bytes, so that each chunk continues the last one.
            let chunk: Vec<u8> = (0..=255).cycle().take(1024).collect();
            while !stop.load(Ordering::Relaxed) {
                stream.write_all(&chunk).expect("the stream goes on");
                thread::sleep(Duration::from_millis(2));
            }
        }
    });
    thread::sleep(Duration::from_secs(2));
    disturb(site);
    stop.store(true, Ordering::Relaxed);
    sender.join().expect("the sender ends");
    receiver.join().expect("the receiver ends")
}

/// What `nebula ctl gateways` says about a gateway: its state, and how many flows it has.
fn gateway_of(site: &Site, address: &str) -> (String, u64) {
    let socket = site.world.dir().join("c.sock");
    let command = Command::new(ours()).arg("ctl").arg("--socket").arg(socket).args(["gateways", "--json"]).output();
    let output = command.expect("run nebula ctl");
    let text = String::from_utf8_lossy(&output.stdout);
    let answer: serde_json::Value =
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
    let all = answer["gateways"].as_array().expect("a list");
    let found = all.iter().find(|gateway| gateway["gateway"] == address).expect("it is listed");
    (found["state"].as_str().expect("a state").to_owned(), found["flows"].as_u64().expect("a number"))
}

/// A stream through a gateway of this program goes on by the other one when the program is killed. The stream then
/// stays there, also when its own gateway is back.
fn a_stream_outlives_its_gateway(gateway: &Path, name: &str) {
    let mut site = Site::new(1);
    site.add_machine();
    // As good as every flow takes `g`.
    let route = via("[{gateway: 10.77.0.2, weight: 2147483647}, {gateway: 10.77.0.3, weight: 1}]");
    site.start("g", gateway, PLAIN);
    site.start("h", &ours(), PLAIN);
    site.start("c", &ours(), Extra { tun: &route, ..PLAIN });
    site.world.ping("c", "10.77.0.2", SOON);
    site.world.ping("c", "10.77.0.3", SOON);
    let mut found = 0;
    let undisturbed = longest_pause(&mut site, |_| thread::sleep(Duration::from_secs(2)));
    let pause = longest_pause(&mut site, |site| {
        assert_eq!(gateway_of(site, "10.77.0.2").0, "healthy");
        assert!(gateway_of(site, "10.77.0.2").1 > 0, "the stream takes it");
        site.world.stop("g", Signal::SIGKILL);
        site.answer_by(3);
        thread::sleep(Duration::from_secs(5));
        assert_eq!(gateway_of(site, "10.77.0.2").0, "dead");
        assert!(gateway_of(site, "10.77.0.3").1 > 0, "the stream takes it");
        site.start("g", gateway, PLAIN);
        let end = Instant::now() + Duration::from_secs(30);
        while gateway_of(site, "10.77.0.2").0 != "healthy" {
            assert!(Instant::now() < end, "it is not taken back\n{}", site.world.all_logs());
            thread::sleep(Duration::from_millis(200));
        }
        thread::sleep(Duration::from_secs(2));
        found = gateway_of(site, "10.77.0.3").1;
    });
    println!("{name}: the stream paused for {pause:.2?} (undisturbed: {undisturbed:.2?})");
    assert!(pause < Duration::from_secs(2), "{pause:?}\n{}", site.world.all_logs());
    assert!(found > 0, "the stream stays on the gateway that it moved to");
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_stream_through_a_killed_gateway_of_ours_goes_on_within_two_seconds() {
    a_stream_outlives_its_gateway(&ours(), "ours");
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn a_stream_through_a_killed_gateway_of_go_1_11_goes_on_within_two_seconds() {
    a_stream_outlives_its_gateway(&go("nebula", "sid"), "Go 1.11");
}
