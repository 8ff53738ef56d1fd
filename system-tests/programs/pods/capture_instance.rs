//! The instance of a captured pod: how it follows the cluster table, and what becomes of a flow by what the table says.
//!
//! The pods are on a bridge of their node, and no node has a route to the pods of the other: what reaches one there
//! went through the tunnel. What the plugin does in the pod and what the agent writes is done here.

use crate::world;

use std::fs::Permissions;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use nebula_cni_contract::cluster_table::{Builder, EndpointState, ServiceEndpoint, ServicePort};
use nebula_cni_contract::launch::{MARK, ROUTE_TABLE};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use world::cluster::{Cluster, Node, answer_at, binary, status_at};
use world::cost::{cpu_ticks, memory_kib};
use world::run;

const SOON: Duration = Duration::from_secs(10);
const BRIEFLY: Duration = Duration::from_millis(700);
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Addresses by which the pods know each other: of Services, and the first pods on each node.
const SERVICE: &str = "10.96.0.10";
const CLEAR_SERVICE: &str = "10.96.0.20";
const WEB: &str = "10.244.1.2";
const PLAIN: &str = "10.244.1.3";
const STRANGER: &str = "10.244.1.4";
const DB: &str = "10.244.2.2";
/// Nobody else on this machine.
const USER: u32 = 913_377;

/// Two nodes: `web` on the first one and `db` on the second one are captured, `plain` and `stranger` on the first one
/// are not enrolled.
struct Town {
    cluster: Cluster,
    nodes: [Node; 2],
}

impl Town {
    fn new() -> Self {
        let mut cluster = Cluster::new();
        cluster.set_policy(&[("address", "same".into()), ("overlay", json!(["10.244.0.0/16"]))]);
        let mut nodes = ["n1", "n2"].map(|name| cluster.node(name, "1.0.0"));
        for node in &mut nodes {
            node.conf["plugins"].as_array_mut().expect("plugins").truncate(1);
        }
        nodes[0].add_pods(&mut cluster.world, &["web", "plain", "stranger"]);
        nodes[1].add_pods(&mut cluster.world, &["db"]);
        let town = Self { cluster, nodes };
        for pod in ["web", "db"] {
            town.capture(pod);
        }
        town
    }

    fn namespace(&self, pod: &str) -> String {
        self.cluster.world.namespace_of(pod)
    }

    /// What the plugin does in the pod.
    fn capture(&self, pod: &str) {
        let (namespace, table, mark) = (self.namespace(pod), ROUTE_TABLE.to_string(), format!("{MARK:#x}/{MARK:#x}"));
        let rule = ["rule", "add", "not", "fwmark", &mark, "lookup", &table, "priority", "30000"];
        run("ip", &[&["-n", &namespace], &rule[..]].concat());
        for range in ["10.244.0.0/16", "10.96.0.0/16"] {
            let route = ["route", "add", "unreachable", range, "metric", "4278198272", "table", &table];
            run("ip", &[&["-n", &namespace], &route[..]].concat());
        }
        let script = format!(
            "nft 'add table inet nebula-cni-capture; add chain inet nebula-cni-capture arriving {{ type filter hook \
             prerouting priority mangle; }}; add rule inet nebula-cni-capture arriving iifname eth0 meta mark set meta mark \
             or {MARK:#x}' && echo 1 >/proc/sys/net/ipv4/tcp_fwmark_accept && echo 1 >/proc/sys/net/ipv4/fwmark_reflect \
             && echo 2 >/proc/sys/net/ipv4/conf/eth0/rp_filter"
        );
        let made = self.cluster.world.exec(pod, &["sh", "-c", &script]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }

    fn table_folder(&self) -> PathBuf {
        self.cluster.world.dir().join("cluster")
    }

    /// What the agent does.
    fn write_table(&self, bytes: &[u8]) {
        let folder = self.table_folder();
        std::fs::create_dir_all(&folder).expect("the folder of the table");
        let new = folder.join(".table.new");
        std::fs::write(&new, bytes).expect("a table");
        std::fs::set_permissions(&new, Permissions::from_mode(0o644)).expect("its mode");
        std::fs::rename(new, folder.join("table")).expect("it replaces the one before");
    }

    fn status_socket(&self, pod: &str) -> PathBuf {
        self.cluster.world.dir().join(format!("{pod}.room")).join("pod.status")
    }

    /// Starts the instance of a pod, and waits for its tunnel.
    fn start(&mut self, pod: &str, change: impl FnOnce(&mut Value)) {
        self.launch(pod, change);
        let (began, socket) = (Instant::now(), self.status_socket(pod));
        while answer_at(&socket).map_or(true, |status| status["state"] != "running") {
            assert!(began.elapsed() < SOON * 2, "{}", self.cluster.world.all_logs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts the instance of a pod with a launch file by hand.
    fn launch(&mut self, pod: &str, change: impl FnOnce(&mut Value)) {
        let [web, db] = [(WEB, "192.0.2.2:42421"), (DB, "192.0.2.3:42422")];
        let (node, number, address, other) =
            if pod == "db" { (&self.nodes[1], 2, DB, web) } else { (&self.nodes[0], 1, WEB, db) };
        let netns = format!("/run/netns/{}", self.namespace(pod));
        let room = self.cluster.world.dir().join(format!("{pod}.room"));
        std::fs::create_dir_all(&room).expect("a folder for its sockets");
        std::os::unix::fs::chown(&room, Some(USER + number), Some(USER + number)).expect("it belongs to its user");
        std::fs::create_dir_all(self.table_folder()).expect("the folder of the table");
        let every = json!([{ "port": "any", "proto": "any", "host": "any" }]);
        let mut spec = json!({
            "version": 1, "network": "capture", "container_id": pod, "ifname": "eth0",
            "netns": netns, "netns_id": nebula_linux::netns::identity(netns.as_ref()).expect("the namespace"),
            "pod": { "namespace": "shop", "name": pod, "uid": format!("uid-{pod}") },
            "pod_address": address, "device": "nebula0", "mode": "strict", "overlay": ["10.244.0.0/16"],
            "capture": {
                "ranges": ["10.244.0.0/16"], "services": ["10.96.0.0/16"], "sources": [address],
                "table": self.table_folder().join("table"),
            },
            "budget_seconds": 18, "port_range": [42_420 + number, 42_420 + number],
            "ca": { "url": self.cluster.ca_url(), "tls_ca_file": self.cluster.ca_file("tls.crt"),
                    "token_file": self.cluster.ca_file("node.token") },
            "nebula": {
                "static_host_map": { other.0: [other.1] },
                "firewall": { "outbound": every, "inbound": every },
            },
            "user": USER + number, "status_socket": self.status_socket(pod),
        });
        change(&mut spec);
        let launch = self.cluster.world.write(&format!("{pod}.launch"), &spec.to_string());
        let (program, name) = (binary("nebula-cni-instance"), node.name.clone());
        self.cluster.world.start_in(pod, &name, &program, &["--launch", &launch.display().to_string()]);
    }

    fn table_status(&self, pod: &str) -> Value {
        status_at(&self.status_socket(pod))["table"].clone()
    }

    fn routes(&self, pod: &str) -> String {
        run("ip", &["-n", &self.namespace(pod), "route", "show", "table", &ROUTE_TABLE.to_string()])
    }

    /// Serves one line of its own to every client of a TCP port, and back to every datagram of the UDP port, in a pod.
    fn serve(&self, pod: &'static str, port: u16) {
        let namespace = self.namespace(pod);
        let (ready, started) = std::sync::mpsc::channel();
        thread::spawn(move || {
            world::enter(&namespace);
            let streams = TcpListener::bind(("::", port)).expect("a listener");
            let datagrams = UdpSocket::bind(("::", port)).expect("a socket");
            thread::spawn(move || {
                let mut bytes = [0; 16];
                while let Ok((_, from)) = datagrams.recv_from(&mut bytes) {
                    let _ = datagrams.send_to(pod.as_bytes(), from);
                }
            });
            ready.send(()).expect("the test waits");
            for mut client in streams.incoming().flatten() {
                let peer = client.peer_addr().map(|peer| peer.ip().to_canonical().to_string()).unwrap_or_default();
                let _ = client.write_all(format!("{pod} hears {peer}").as_bytes());
            }
        });
        started.recv().expect("the server listens");
    }

    fn in_pod<T: Send>(&self, pod: &str, work: impl FnOnce() -> T + Send) -> T {
        let namespace = self.namespace(pod);
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                world::enter(&namespace);
                work()
            });
            inside.join().expect("no panic")
        })
    }

    /// Who answers a TCP connection from `pod`, or the kind of error.
    fn ask(&self, pod: &str, to: &str, port: u16, within: Duration) -> Result<String, std::io::ErrorKind> {
        let address = SocketAddr::new(to.parse().expect("an address"), port);
        self.in_pod(pod, || {
            let connect = || {
                let mut stream = TcpStream::connect_timeout(&address, within)?;
                stream.set_read_timeout(Some(within))?;
                let mut text = String::new();
                stream.read_to_string(&mut text)?;
                Ok(text)
            };
            connect().map_err(|error: std::io::Error| error.kind())
        })
    }

    /// Who answers a datagram from `pod`, and from which address.
    fn ask_udp(&self, pod: &str, to: &str, port: u16) -> Option<(String, SocketAddr)> {
        let address = SocketAddr::new(to.parse().expect("an address"), port);
        self.in_pod(pod, || {
            let any: IpAddr = if address.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            let socket = UdpSocket::bind((any, 0)).ok()?;
            socket.set_read_timeout(Some(BRIEFLY)).ok()?;
            socket.send_to(b"who", address).ok()?;
            let mut bytes = [0; 64];
            let (len, from) = socket.recv_from(&mut bytes).ok()?;
            Some((String::from_utf8_lossy(&bytes[..len]).into_owned(), from))
        })
    }
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// The cluster with both captured pods and the one that is known not to be enrolled.
fn known() -> Builder {
    cluster([WEB, DB, PLAIN], [SERVICE, CLEAR_SERVICE])
}

fn cluster([web, db, plain]: [&str; 3], [service, clear_service]: [&str; 2]) -> Builder {
    let mut builder = Builder::new();
    builder.pod(address(web), 1);
    builder.pod(address(db), 2);
    builder.clear(address(plain));
    for protocol in [TCP, UDP] {
        for (service, pod) in [(service, db), (clear_service, plain)] {
            let port =
                ServicePort { address: address(service), port: 80, protocol, affinity: None, this_node_only: false };
            let state = EndpointState::Ready;
            builder
                .service(port, [ServiceEndpoint { address: address(pod), port: 8080, state, is_on_this_node: true }]);
        }
    }
    builder
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_captured_pod_speaks_through_the_tunnel_whatever_address_it_uses_and_in_clear_only_to_who_is_not_enrolled() {
    let mut town = Town::new();
    town.write_table(&known().finish(1));
    for pod in ["web", "db"] {
        town.start(pod, |_| ());
    }
    for pod in ["plain", "stranger", "db", "web"] {
        town.serve(pod, 8080);
    }
    let hears = |pod: &str, whom: &str| Ok(format!("{pod} hears {whom}"));
    assert_eq!(town.ask("web", DB, 8080, SOON), hears("db", WEB), "{}", town.cluster.world.all_logs());
    assert_eq!(town.ask("db", WEB, 8080, SOON), hears("web", DB));
    assert_eq!(town.ask("web", SERVICE, 80, SOON), hears("db", WEB), "{}", town.cluster.world.all_logs());
    let answered = town.ask_udp("web", SERVICE, 80);
    assert_eq!(answered, Some(("db".to_owned(), SocketAddr::new(address(SERVICE), 80))));
    assert_eq!(town.ask("web", PLAIN, 8080, SOON), hears("plain", WEB), "passed through");
    assert_eq!(town.ask_udp("web", PLAIN, 8080).map(|(who, _)| who).as_deref(), Some("plain"));
    assert_eq!(town.ask("plain", WEB, 8080, SOON), hears("web", PLAIN), "from outside as ever");
    assert_eq!(town.ask("web", SERVICE, 81, SOON), Err(std::io::ErrorKind::ConnectionRefused), "no such port");
    assert_eq!(
        town.ask("web", STRANGER, 8080, BRIEFLY * 2),
        Err(std::io::ErrorKind::TimedOut),
        "nothing is known of it"
    );
    // Nothing of it is in the main table, and the device has no address.
    let namespace = town.namespace("web");
    assert!(!run("ip", &["-n", &namespace, "route"]).contains("nebula0"));
    assert!(!run("ip", &["-n", &namespace, "addr", "show", "dev", "nebula0"]).contains("inet"));
    let status = status_at(&town.status_socket("web"));
    assert_eq!((&status["table"]["state"], &status["overlay"][0]), (&"used".into(), &format!("{WEB}/16").into()));
    assert_eq!((&status["table"]["version"], &status["table"]["pods"]), (&1.into(), &2.into()));
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_pod_is_captured_by_its_ipv6_address_alike_also_while_that_is_new() {
    const WEB: &str = "fd00:244::1:2";
    const PLAIN: &str = "fd00:244::1:3";
    const DB: &str = "fd00:244::2:2";
    const SERVICE: &str = "fd00:96::10";
    let mut town = Town::new();
    town.cluster.set_policy(&[("address", "same".into()), ("overlay", json!(["fd00:244::/64"]))]);
    for (pod, own) in [("plain", PLAIN), ("db", DB), ("web", WEB)] {
        let namespace = town.namespace(pod);
        // The kernel looks for duplicates for a second or two.
        run("ip", &["-n", &namespace, "addr", "add", &format!("{own}/64"), "dev", "eth0"]);
        if pod != "plain" {
            let rule = format!("-6 rule add not fwmark {MARK:#x}/{MARK:#x} lookup {ROUTE_TABLE} priority 30000");
            run("ip", &[&["-n", &namespace], &rule.split(' ').collect::<Vec<_>>()[..]].concat());
        }
    }
    town.write_table(&cluster([WEB, DB, PLAIN], [SERVICE, "fd00:96::20"]).finish(1));
    for (pod, own, other) in [("web", WEB, (DB, "192.0.2.3:42422")), ("db", DB, (WEB, "192.0.2.2:42421"))] {
        town.start(pod, |spec| {
            (spec["pod_address"], spec["overlay"]) = (own.into(), json!([]));
            spec["capture"]["ranges"] = json!(["fd00:244::/64"]);
            spec["capture"]["services"] = json!(["fd00:96::/112"]);
            spec["capture"]["sources"] = json!([own]);
            spec["nebula"]["static_host_map"] = json!({ other.0: [other.1] });
        });
    }
    thread::sleep(Duration::from_secs(2));
    for pod in ["plain", "db"] {
        town.serve(pod, 8080);
    }
    assert_eq!(town.ask("web", DB, 8080, SOON), Ok(format!("db hears {WEB}")), "{}", town.cluster.world.all_logs());
    assert_eq!(town.ask("web", SERVICE, 80, SOON), Ok(format!("db hears {WEB}")));
    let answered = town.ask_udp("web", SERVICE, 80);
    assert_eq!(answered, Some(("db".to_owned(), SocketAddr::new(address(SERVICE), 80))));
    assert_eq!(town.ask("web", PLAIN, 8080, SOON), Ok(format!("plain hears {WEB}")), "passed through");
    assert_eq!(town.ask("web", SERVICE, 81, SOON), Err(std::io::ErrorKind::ConnectionRefused));
    assert!(town.ask("web", "fd00:244::1:9", 8080, BRIEFLY).is_err(), "nothing is known of it");
    let routes = run("ip", &["-n", &town.namespace("web"), "-6", "route", "show", "table", &ROUTE_TABLE.to_string()]);
    assert_eq!(routes.matches("dev nebula0").count(), 2, "{routes}");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_replaced_table_takes_effect_at_once_and_a_bad_one_or_none_changes_nothing() {
    let mut town = Town::new();
    for pod in ["web", "db"] {
        town.start(pod, |_| ());
    }
    for pod in ["plain", "stranger", "db"] {
        town.serve(pod, 8080);
    }
    let unknown = Err(std::io::ErrorKind::TimedOut);
    assert_eq!(town.table_status("web")["state"], "missing");
    assert!(town.cluster.world.log("web").contains("No cluster table"), "{}", town.cluster.world.log("web"));
    for to in [DB, PLAIN, SERVICE] {
        assert_eq!(town.ask("web", to, 8080, BRIEFLY), unknown, "without a table nothing is known: {to}");
    }
    town.write_table(&known().finish(10));
    let written = Instant::now();
    while town.ask("web", DB, 8080, BRIEFLY).is_err() {
        assert!(written.elapsed() < Duration::from_secs(3), "{}", town.cluster.world.all_logs());
    }
    // A connection that was begun before goes on as soon as the table says where to.
    let began = Instant::now();
    thread::scope(|scope| {
        let town = &town;
        let waiting = scope.spawn(move || (town.ask("web", STRANGER, 8080, SOON), began.elapsed()));
        thread::sleep(Duration::from_millis(200));
        let mut builder = known();
        builder.clear(address(STRANGER));
        town.write_table(&builder.finish(11));
        let (answer, took) = waiting.join().expect("no panic");
        println!("a flow that waited for the table: {took:?}");
        assert_eq!(answer, Ok(format!("stranger hears {WEB}")));
        // The kernel's second SYN comes after one second, if the first one was not held until the table came.
        assert!(took < Duration::from_millis(1500), "{took:?}");
    });
    for bytes in [b"nonsense".to_vec(), known().finish(5), known().finish(99)[..500].to_vec()] {
        town.write_table(&bytes);
        let until = Instant::now() + Duration::from_secs(1);
        while town.table_status("web")["state"] != "kept" {
            assert!(Instant::now() < until, "{}", town.table_status("web"));
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(town.table_status("web")["version"], 11);
        assert_eq!(town.ask("web", STRANGER, 8080, SOON), Ok(format!("stranger hears {WEB}")));
    }
    std::fs::remove_file(town.table_folder().join("table")).expect("the table");
    assert_eq!(town.ask("web", DB, 8080, SOON), Ok(format!("db hears {WEB}")), "on with the last one");
    // A pod that is gone is unknown again.
    let mut builder = Builder::new();
    builder.pod(address(WEB), 1);
    town.write_table(&builder.finish(12));
    let replaced = Instant::now();
    while town.table_status("web")["version"] != 12 {
        assert!(replaced.elapsed() < Duration::from_secs(1));
        thread::sleep(Duration::from_millis(5));
    }
    println!("a table is in use after {:?}", replaced.elapsed());
    assert_eq!(town.ask("web", DB, 8080, BRIEFLY), unknown);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn while_the_instance_is_away_nothing_leaves_and_another_one_goes_on() {
    let mut town = Town::new();
    town.write_table(&known().finish(1));
    for pod in ["web", "db"] {
        town.start(pod, |_| ());
    }
    for pod in ["plain", "db"] {
        town.serve(pod, 8080);
    }
    assert!(town.ask("web", DB, 8080, SOON).is_ok(), "{}", town.cluster.world.all_logs());
    assert_eq!(town.routes("web").matches("dev nebula0 ").count(), 2, "{}", town.routes("web"));
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        town.cluster.world.stop("web", signal);
        let routes = town.routes("web");
        assert!(!routes.contains("nebula0") && routes.matches("unreachable").count() == 2, "{routes}");
        for (to, port) in [(DB, 8080), (SERVICE, 80), (PLAIN, 8080)] {
            let refused = town.ask("web", to, port, BRIEFLY).expect_err("nobody passes it on");
            assert_eq!(refused, std::io::ErrorKind::HostUnreachable, "{to}");
        }
        town.start("web", |_| ());
        assert_eq!(
            town.ask("web", SERVICE, 80, SOON),
            Ok(format!("db hears {WEB}")),
            "{}",
            town.cluster.world.all_logs()
        );
        assert_eq!(town.ask("web", PLAIN, 8080, SOON), Ok(format!("plain hears {WEB}")));
    }
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_certificate_for_another_address_is_refused_with_what_to_change() {
    let mut town = Town::new();
    town.cluster.set_policy(&[("address", "derive".into()), ("overlay", json!(["10.42.0.0/16"]))]);
    town.launch("web", |spec| spec["budget_seconds"] = 3.into());
    assert_eq!(town.cluster.world.ended("web", SOON), Some(1), "{}", town.cluster.world.all_logs());
    let log = town.cluster.world.log("web");
    assert!(log.contains("set \"address\": \"same\""), "{log}");
}

/// The bar is 50 KB; the rest is the noise of measuring whole pages in two processes.
const MORE_KIB: f64 = 50.0 + 12.0;

#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn capture_costs_an_idle_instance_no_memory_and_no_wake_ups() {
    let mut town = Town::new();
    let mut builder = known();
    for n in 0..50_000_u32 {
        builder.pod(std::net::Ipv4Addr::from_bits(0x0af4_8000 + n).into(), u64::from(n) + 9);
    }
    let bytes = builder.finish(1);
    town.write_table(&bytes);
    // Side by side, so that both meet the same machine.
    for pod in ["db", "web"] {
        town.start(pod, |spec| {
            let short = json!({ "udp_timeout": "10s", "default_timeout": "10s" });
            spec["nebula"]["firewall"]["conntrack"] = short;
            if pod == "db" {
                spec.as_object_mut().expect("an object").remove("capture");
            }
        });
    }
    // Memory that only the start needs is released after two seconds.
    thread::sleep(Duration::from_secs(5));
    let pids = ["db", "web"].map(|pod| status_at(&town.status_socket(pod))["pid"].as_u64().expect("a pid"));
    // Some pages of the table are used, and are nobody's own. The flows are forgotten after ten seconds.
    for n in 0..20_u32 {
        let to = std::net::Ipv4Addr::from_bits(0x0af4_8000 + n * 2500).to_string();
        for pod in ["db", "web"] {
            let to = to.clone();
            let _ = town.in_pod(pod, move || UdpSocket::bind("0.0.0.0:0")?.send_to(b"x", (to.as_str(), 9)));
        }
    }
    thread::sleep(Duration::from_secs(20));
    let (memory, before) = (pids.map(|pid| memory_kib(pid, "Anonymous:")), pids.map(wake_ups));
    thread::sleep(Duration::from_secs(10));
    let woken = [0, 1].map(|n| wake_ups(pids[n]) - before[n]);
    let before = cpu_ticks(&pids[1..]);
    for version in 2..202 {
        town.write_table(&known().finish(version));
        thread::sleep(Duration::from_millis(10));
    }
    let spent = cpu_ticks(&pids[1..]) - before;
    println!("CPU of an instance for each replaced table: {} us", spent * 10_000 / 200);
    for pod in ["db", "web"] {
        town.cluster.world.stop(pod, Signal::SIGTERM);
    }
    let ([plain, captured], [plain_wakes, wakes]) = (memory, woken);
    println!(
        "private memory: {plain} KiB, with capture and a table of {} KiB {captured} KiB; wake-ups in 10 s: {plain_wakes}, with \
         capture {wakes}",
        bytes.len() >> 10
    );
    assert!(wakes <= plain_wakes + 2, "{wakes} wake-ups, {plain_wakes} without capture");
    assert!(captured - plain <= MORE_KIB, "{captured} KiB, {plain} KiB without capture");
}

/// How often the threads of a process have gone to sleep.
fn wake_ups(pid: u64) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a live process").flatten();
    let of = |text: String| {
        let line = text.lines().find(|line| line.starts_with("voluntary_ctxt_switches"))?.to_owned();
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    tasks.filter_map(|task| of(std::fs::read_to_string(task.path().join("status")).ok()?)).sum()
}
