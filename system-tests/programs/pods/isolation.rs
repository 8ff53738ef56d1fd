//! What an isolated pod can send and receive unencrypted, with every frame that CAP_NET_RAW can make: nothing. Real
//! plugin, instance, CA and lighthouse in network namespaces; listeners are placed wherever a frame could arrive.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use world::cluster::{Cluster, LIGHTHOUSE, Node, alive, binary, gone_within};

const SOON: Duration = Duration::from_secs(15);
const FRAMES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/tools/frames.py");

#[test]
#[ignore = "needs root, network namespaces, nftables and a release build"]
fn no_frame_of_a_pod_with_cap_net_raw_crosses_its_link_in_either_direction() {
    for mode in ["strict", "lazy"] {
        let mut town = Town::new();
        town.node.conf["plugins"][1]["mode"] = mode.into();
        let pod = town.isolated("web");
        if mode == "lazy" {
            let until = Instant::now() + SOON;
            while town.node.status("web")["state"] != "running" {
                assert!(Instant::now() < until, "{}", town.node.instance_logs());
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        town.cluster.world.ping("web", LIGHTHOUSE, SOON);
        assert_eq!(town.outgoing(&pod, RAW), Vec::<String>::new(), "{mode}");
        assert_eq!(town.incoming(&pod), Vec::<String>::new(), "{mode}");

        // The pod can change rules in its own namespace only, and the isolation is not among them.
        let own_rules = [NET_ADMIN, &["nft", "flush", "ruleset"]].concat();
        assert!(town.cluster.world.exec("web", &own_rules).status.success());
        assert_eq!(town.outgoing(&pod, NET_ADMIN), Vec::<String>::new(), "{mode}, CAP_NET_ADMIN");
        assert_eq!(town.incoming(&pod), Vec::<String>::new(), "{mode}, CAP_NET_ADMIN");

        let instance = town.node.status("web")["pid"].as_u64().expect("a process id");
        let process = nix::unistd::Pid::from_raw(i32::try_from(instance).expect("a process id"));
        nix::sys::signal::kill(process, Signal::SIGKILL).expect("it is there");
        assert!(gone_within(instance, SOON) && !alive(instance));
        assert_eq!(town.outgoing(&pod, NET_ADMIN), Vec::<String>::new(), "{mode}, no instance");
        assert_eq!(town.incoming(&pod), Vec::<String>::new(), "{mode}, no instance");

        // The node itself: the kubelet's probes are answered.
        for address in [&pod.v4, &pod.v6] {
            assert_eq!(town.cluster.world.pings("n1", address, 2, "0.2"), 2, "the node's probes of {address}");
        }
        town.node.chain_ok(&town.cluster.world, "del", "web");
        assert_eq!(town.rules(), "", "after DEL");
        assert_eq!(town.node.leftovers(), Vec::<PathBuf>::new());
    }
}

#[test]
#[ignore = "needs root, network namespaces, nftables and a release build"]
fn rules_of_a_link_are_missed_by_check_made_again_by_reconcile_and_gone_after_del_without_a_record() {
    let mut town = Town::new();
    let pod = town.isolated("web");
    let world = &town.cluster.world;
    town.node.chain_ok(world, "check", "web");
    assert!(world.exec("n1", &["nft", "flush", "ruleset"]).status.success());
    let checked = town.node.chain(world, "check", "web");
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(!checked.status.success() && said.contains("rules"), "{said}");
    let (plugin, state) = (binary("nebula-cni-plugin").display().to_string(), town.node.dir.join("state"));
    let state = state.display().to_string();
    let reconcile = |town: &Town| {
        assert!(town.cluster.world.exec("n1", &[&plugin, "reconcile", &state]).status.success());
    };
    reconcile(&town);
    town.node.chain_ok(&town.cluster.world, "check", "web");
    assert_eq!(town.outgoing(&pod, RAW), Vec::<String>::new(), "made again");

    // The record is lost.
    std::fs::remove_file(town.node.records().join("web-eth0.json")).expect("the record");
    town.node.chain_ok(&town.cluster.world, "del", "web");
    assert_eq!(town.rules(), "", "after DEL without a record");

    // The link is gone, and so is everything that would have called DEL.
    town.isolated("db");
    assert_ne!(town.rules(), "");
    std::fs::remove_file(town.node.records().join("db-eth0.json")).expect("the record");
    let link = ["ip", "link", "del", "eth0"];
    assert!(town.cluster.world.exec("db", &link).status.success());
    reconcile(&town);
    assert_eq!(town.rules(), "", "after the link went");
}

/// As kube-proxy does it: translated on the node, and masqueraded as the node's own address, which may send probes.
#[test]
#[ignore = "needs root, network namespaces, nftables and a release build"]
fn a_node_port_does_not_lead_to_an_isolated_pod_and_a_probe_does() {
    let mut town = Town::new();
    let pod = town.isolated("web");
    let rules = |to: &str| {
        format!(
            "table ip node-port {{
               chain pre {{ type nat hook prerouting priority -100; tcp dport 30080 dnat to {to}:80; udp dport 30080 dnat to {to}:80; }}
               chain post {{ type nat hook postrouting priority 100; ip daddr {to} masquerade; }}
             }}"
        )
    };
    let world = &town.cluster.world;
    assert!(world.exec("n1", &["sysctl", "-qw", "net.ipv4.ip_forward=1"]).status.success());
    // The node's address is known to the outside as the way to its pods.
    let node = "192.0.2.2";
    for (to, name, expected) in
        [(&town.stranger.v4, "stranger", ["tcp", "udp"].as_slice()), (&pod.v4, "web", [].as_slice())]
    {
        let file = world.write("node-port.nft", &rules(to)).display().to_string();
        assert!(world.exec("n1", &["nft", "-f", &file]).status.success());
        let _servers = Servers::start(&world.namespace_of(name));
        assert_eq!(asked(world, "control", node, 30080), expected, "a node port to {name}");
        assert_eq!(asked(world, "n1", to, 80), ["tcp", "udp"], "a probe of {name}");
        assert!(world.exec("n1", &["nft", "delete", "table", "ip", "node-port"]).status.success());
    }
    town.node.chain_ok(&town.cluster.world, "del", "web");
}

/// Servers on port 80 (TCP and UDP) that answer whoever asks.
struct Servers(Child);

impl Servers {
    fn start(namespace: &str) -> Self {
        let script = "import socket, threading
tcp = socket.socket(); tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); tcp.bind(('', 80)); tcp.listen()
udp = socket.socket(type=socket.SOCK_DGRAM); udp.bind(('', 80))
print('ready', flush=True)
def accept():
    while True:
        client, _ = tcp.accept(); client.sendall(b'here'); client.close()
threading.Thread(target=accept, daemon=True).start()
while True:
    _, who = udp.recvfrom(99); udp.sendto(b'here', who)
";
        let mut child = Command::new("ip")
            .args(["netns", "exec", namespace, "python3", "-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("it is ready");
        Self(child)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The protocols in which `address` answers `host`.
fn asked(world: &world::World, host: &str, address: &str, port: u16) -> Vec<String> {
    let script = "import socket, sys
for name, kind in (('tcp', socket.SOCK_STREAM), ('udp', socket.SOCK_DGRAM)):
    s = socket.socket(type=kind); s.settimeout(2)
    try:
        s.connect((sys.argv[1], int(sys.argv[2])))
        if name == 'udp': s.send(b'?')
        if s.recv(99) == b'here': print(name)
    except OSError: pass
";
    let output = world.exec(host, &["python3", "-c", script, address, &port.to_string()]);
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
#[ignore = "needs root, network namespaces, nftables and a release build"]
fn a_pod_whose_link_cannot_be_guarded_is_refused_with_the_reason_and_nothing_stays() {
    let mut town = Town::new();
    let macvlan = json!({ "type": "macvlan", "master": "eth0", "ipam": town.node.conf["plugins"][0]["ipam"] });
    let bridge = std::mem::replace(&mut town.node.conf["plugins"][0], macvlan);
    let bin = town.node.dir.join("bin/macvlan");
    std::os::unix::fs::symlink("/usr/lib/cni/macvlan", bin).expect("a link");
    town.cluster.world.namespace("web");
    let refused = town.node.chain(&town.cluster.world, "add", "web");
    let said = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(!refused.status.success() && said.contains("macvlan") && said.contains("isolate"), "{said}");
    assert_eq!((town.rules().as_str(), town.node.leftovers()), ("", Vec::new()));
    let _ = town.node.chain(&town.cluster.world, "del", "web");

    // A traffic control redirect on the node's side takes frames before any rule sees them.
    town.node.conf["plugins"][0] = bridge;
    let bandwidth = json!({ "type": "bandwidth", "egressRate": 1_000_000_000, "egressBurst": 1_000_000_000 });
    let ours = town.node.conf["plugins"].as_array_mut().expect("plugins").pop().expect("ours");
    town.node.conf["plugins"].as_array_mut().expect("plugins").extend([bandwidth, ours]);
    std::os::unix::fs::symlink("/usr/lib/cni/bandwidth", town.node.dir.join("bin/bandwidth")).expect("a link");
    town.cluster.world.namespace("slow");
    let refused = town.node.chain(&town.cluster.world, "add", "slow");
    let said = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(!refused.status.success() && said.contains("traffic control"), "{said}");
    assert_eq!((town.rules().as_str(), town.node.leftovers()), ("", Vec::new()));
    let _ = town.node.chain(&town.cluster.world, "del", "slow");
}

#[test]
#[ignore = "needs root, network namespaces, nftables and a release build"]
fn names_are_resolved_by_the_servers_that_the_runtime_or_the_node_names_and_by_no_other() {
    let mut town = Town::new();
    town.node.conf["plugins"][1]["isolate"] = true.into();
    town.node.conf["plugins"][1]["runtimeConfig"] = json!({ "dns": { "servers": [OUTSIDE_V4] } });
    let pod = town.isolated("web");
    let arrived = town.frames_from(&pod, RAW, "192.0.2.99", OUTSIDE_V6);
    assert!(!arrived.contains(&"other".to_owned()) && arrived.is_empty(), "{arrived:?}");
    let asks = |to: &str| town.connects("web", to);
    assert!(asks("192.0.2.1:53"), "nobody listens there, and no rule is in the way");
    assert!(!asks("192.0.2.3:53"), "another server");
    town.node.chain_ok(&town.cluster.world, "del", "web");
}

const RAW: &[&str] = &["setpriv", "--bounding-set=-all,+net_raw", "--inh-caps=-all"];
const NET_ADMIN: &[&str] = &["setpriv", "--bounding-set=-all,+net_raw,+net_admin", "--inh-caps=-all"];
/// Addresses of the control host, which DNS queries go to as well.
const OUTSIDE_V4: &str = "192.0.2.1";
const OUTSIDE_V6: &str = "fd00:192::1";

/// A node with isolated pods and `stranger`, a pod that is not enrolled.
struct Town {
    cluster: Cluster,
    node: Node,
    stranger: Pod,
}

#[derive(Clone)]
struct Pod {
    name: String,
    link: String,
    mac: String,
    v4: String,
    v6: String,
}

impl Town {
    fn new() -> Self {
        let mut cluster = Cluster::new();
        let mut node = cluster.node("n1", "1.0.0");
        for (host, address) in [("control", "fd00:192::1/64"), ("n1", "fd00:192::2/64")] {
            let add = ["ip", "addr", "add", address, "dev", "eth0", "nodad"];
            assert!(cluster.world.exec(host, &add).status.success());
        }
        for (family, network, via) in [("-4", "10.244.1.0/24", "192.0.2.2"), ("-6", "fd00:244:1::/64", "fd00:192::2")] {
            let back = ["ip", family, "route", "add", network, "via", via];
            assert!(cluster.world.exec("control", &back).status.success());
        }
        let plugins = &mut node.conf["plugins"];
        plugins[0]["ipam"]["ranges"] = json!([[{"subnet": "10.244.1.0/24"}], [{"subnet": "fd00:244:1::/64"}]]);
        plugins[0]["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
        plugins[1]["overlay"] = json!(["10.42.0.0/16"]);
        plugins[1]["isolate"] = json!({"dns": [OUTSIDE_V4, OUTSIDE_V6], "probes": ["10.244.1.1", "fd00:244:1::1"]});
        let all = node.conf["plugins"].clone();
        node.conf["plugins"].as_array_mut().expect("plugins").truncate(1);
        cluster.world.namespace("stranger");
        let result = node.chain_ok(&cluster.world, "add", "stranger");
        node.conf["plugins"] = all;
        let stranger = pod("stranger", &result);
        Self { cluster, node, stranger }
    }

    /// Adds an isolated pod.
    fn isolated(&mut self, name: &str) -> Pod {
        self.cluster.world.namespace(name);
        pod(name, &self.node.chain_ok(&self.cluster.world, "add", name))
    }

    /// Names of frames that arrived somewhere although they must not.
    fn outgoing(&self, pod: &Pod, rights: &[&str]) -> Vec<String> {
        self.frames_from(pod, rights, OUTSIDE_V4, OUTSIDE_V6)
    }

    fn frames_from(&self, pod: &Pod, rights: &[&str], dns4: &str, dns6: &str) -> Vec<String> {
        let n1 = self.cluster.world.namespace_of("n1");
        let listeners = [
            Listener::start(&n1, &[&pod.link]),
            Listener::start(&self.cluster.world.namespace_of("stranger"), &["own"]),
            Listener::start(&self.cluster.world.namespace_of("control"), &["own"]),
        ];
        let parameters = json!({
            "mac": pod.mac, "gateway_mac": self.gateway_mac(), "peer_mac": self.stranger.mac,
            "own4": pod.v4, "out4": OUTSIDE_V4, "dns4": dns4, "node4": "10.244.1.1", "peer4": self.stranger.v4,
            "own6": pod.v6, "out6": OUTSIDE_V6, "dns6": dns6, "node6": "fd00:244:1::1", "peer6": self.stranger.v6,
        });
        let sent = self.send(&pod.name, rights, "out", &parameters);
        assert!(sent.len() > 40, "{sent:?}");
        let mut arrived: Vec<String> = listeners.into_iter().flat_map(Listener::heard).collect();
        arrived.sort();
        arrived.dedup();
        arrived
    }

    /// Names of the stranger's frames that reached the pod.
    fn incoming(&self, pod: &Pod) -> Vec<String> {
        let listener = Listener::start(&self.cluster.world.namespace_of(&pod.name), &["own"]);
        let parameters = json!({
            "mac": self.stranger.mac, "gateway_mac": self.gateway_mac(), "pod_mac": pod.mac,
            "own4": self.stranger.v4, "pod4": pod.v4, "dns4": OUTSIDE_V4, "node4": "10.244.1.1",
            "own6": self.stranger.v6, "pod6": pod.v6, "dns6": OUTSIDE_V6, "node6": "fd00:244:1::1",
        });
        let sent = self.send("stranger", RAW, "in", &parameters);
        assert!(sent.len() > 15, "{sent:?}");
        listener.heard()
    }

    fn send(&self, from: &str, rights: &[&str], which: &str, parameters: &Value) -> Vec<String> {
        let parameters = parameters.to_string();
        let send = ["/usr/bin/python3", FRAMES, "send", "eth0", which, &parameters];
        let output = self.cluster.world.exec(from, &[rights, &send].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("names of frames")
    }

    fn gateway_mac(&self) -> String {
        let shown = self.cluster.world.exec("n1", &["cat", "/sys/class/net/cni0/address"]);
        String::from_utf8_lossy(&shown.stdout).trim().to_owned()
    }

    /// The nf_tables tables on the node for single links.
    fn rules(&self) -> String {
        let listed = self.cluster.world.exec("n1", &["nft", "list", "tables", "netdev"]);
        assert!(listed.status.success());
        String::from_utf8_lossy(&listed.stdout).trim().to_owned()
    }

    /// Whether a TCP connection attempt gets any answer, even a refusal.
    fn connects(&self, from: &str, to: &str) -> bool {
        let (namespace, to) = (self.cluster.world.namespace_of(from), to.parse().expect("an address"));
        let attempt = std::thread::spawn(move || {
            world::enter(&namespace);
            std::net::TcpStream::connect_timeout(&to, Duration::from_secs(1))
        });
        match attempt.join().expect("the attempt ends") {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionRefused,
        }
    }
}

fn pod(name: &str, result: &Value) -> Pod {
    let interfaces = result["interfaces"].as_array().expect("interfaces");
    let inside = interfaces.iter().find(|i| i["sandbox"].as_str().is_some_and(|s| !s.is_empty())).expect("eth0");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let address = |v6: bool| {
        let ips = result["ips"].as_array().expect("addresses").iter().map(|ip| text(&ip["address"]));
        let of_family = ips.into_iter().find(|address| address.contains(':') == v6).expect("one of each family");
        of_family.split('/').next().expect("an address").to_owned()
    };
    Pod {
        name: name.to_owned(),
        link: text(&interfaces[1]["name"]),
        mac: text(&inside["mac"]),
        v4: address(false),
        v6: address(true),
    }
}

/// Watches every link of a namespace for frames of `frames.py`.
struct Listener(Child);

impl Listener {
    fn start(namespace: &str, excluded: &[&str]) -> Self {
        let mut child = Command::new("ip")
            .args(["netns", "exec", namespace, "/usr/bin/python3", FRAMES, "listen"])
            .args(excluded)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs");
        let mut ready = String::new();
        // Reads byte by byte, because what follows is read by `heard`.
        let mut out = BufReader::with_capacity(1, child.stdout.as_mut().expect("its output"));
        out.read_line(&mut ready).expect("it says that it listens");
        assert_eq!(ready, "ready\n");
        Self(child)
    }

    /// Names of the frames that arrived.
    fn heard(mut self) -> Vec<String> {
        // It ends with its input.
        drop(self.0.stdin.take());
        let mut text = String::new();
        self.0.stdout.take().expect("its output").read_to_string(&mut text).expect("what it heard");
        assert!(self.0.wait().expect("it ends").success());
        let heard: Vec<(String, String)> = serde_json::from_str(&text).expect("names of frames and interfaces");
        let mut names: Vec<String> = heard.into_iter().map(|(name, _)| name).collect();
        names.dedup();
        names
    }
}
