//! How fast pods without a tunnel of their own reach each other where our plugin makes their network, beside a bridge
//! on one node, and beside VXLAN between two: in clear, as flannel has it, and inside a tunnel of Go Nebula between
//! the nodes. `PRIMARY_ROUNDS` (5) and `PRIMARY_SECONDS` (2) say for how long. And how long ADD takes with and without
//! a certificate, for `PRIMARY_PODS` (40) pods.

use crate::world;

use std::path::Path;

use serde_json::{Value, json};
use world::chaos::number;
use world::cluster::{Cluster, Node};
use world::cost::quantile;
use world::peers::{go, ours};
use world::speed::Way;

/// Of iperf3.
const PORT: u16 = 5201;
/// Overlay addresses of the nodes with Go Nebula.
const GO: [(&str, &str); 2] = [("n3", "192.168.77.1"), ("n4", "192.168.77.2")];

#[test]
#[ignore = "needs root, network namespaces, iperf3, Go Nebula and a release build; prints figures"]
fn pods_of_our_own_network_are_as_fast_as_on_a_bridge_and_faster_between_nodes_than_vxlan_in_a_tunnel_of_go() {
    let town = Town::new();
    let mut ways = town.ways();
    let (rounds, seconds) = (number("PRIMARY_ROUNDS", 5) as usize, number("PRIMARY_SECONDS", 2));
    for round in 0..rounds {
        // Each way is as often after each other one.
        let count = ways.len();
        for n in 0..count {
            ways[(n + round) % count].measure(&town.cluster.world, seconds);
        }
    }
    println!("\n| | Gbit/s | CPU s per GB: tunnels | machine |\n| --- | ---: | ---: | ---: |");
    for way in &ways {
        let cpu = if way.processes.is_empty() { "-".to_owned() } else { format!("{:.2}", quantile(&way.cpu, 0.5)) };
        println!("| {} | {:.2} | {cpu} | {:.2} |", way.title, way.speed(), quantile(&way.machine, 0.5));
    }
    for way in &ways {
        let samples: Vec<String> = way.gbps.iter().map(|gbps| format!("{gbps:.2}")).collect();
        println!("- {}: {}", way.title, samples.join(" "));
    }
    println!("load average {}", std::fs::read_to_string("/proc/loadavg").expect("/proc").trim());
    let [own, bridge, gateways, _, go] = ways.as_slice() else { panic!("five ways") };
    // On a busy machine; the bars for a quiet one are 0.9 and 2.
    assert!(own.speed() > bridge.speed() * 0.7, "{} on our links, {} on a bridge", own.speed(), bridge.speed());
    assert!(gateways.speed() > go.speed() * 1.5, "{} through gateways, {} through Go", gateways.speed(), go.speed());
}

/// Of an ADD, in milliseconds: with a certificate and a tunnel, and without.
const ADD: [f64; 2] = [30.0, 10.0];

#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn a_pod_has_its_interface_and_addresses_within_ten_milliseconds_and_with_a_tunnel_within_thirty() {
    // As on a node, where /run is in memory.
    let mut cluster = Cluster::below(Path::new("/dev/shm"));
    for (name, has_tunnel, bar) in [("n1", true, ADD[0]), ("n2", false, ADD[1])] {
        let what = if has_tunnel { "with a tunnel" } else { "without" };
        let mut node = cluster.node(name, "1.0.0");
        let mut ours = node.conf["plugins"][1].take();
        if !has_tunnel {
            ours = json!({"type": ours["type"], "stateDir": ours["stateDir"]});
        }
        ours["primary"] = true.into();
        ours["subnets"] = json!(["10.244.1.0/24", "fd00:244:1::/64"]);
        node.conf["plugins"] = json!([ours]);
        let pods: Vec<String> = (0..number("PRIMARY_PODS", 40)).map(|number| format!("{name}-p{number}")).collect();
        let names: Vec<&str> = pods.iter().map(String::as_str).collect();
        node.add_pods(&mut cluster.world, &names);
        node.delete_pods(&cluster.world, &names);
        let calls = std::fs::read_to_string(node.dir.join("calls.jsonl")).expect("a record of the calls");
        let calls: Vec<Value> = calls.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let quantiles = |verb: &str| {
            let times = calls.iter().filter(|call| call["command"] == verb).filter_map(|call| call["ms"].as_f64());
            let times: Vec<f64> = times.collect();
            assert_eq!(times.len(), pods.len());
            [0.5, 0.9].map(|of| quantile(&times, of))
        };
        for verb in ["ADD", "DEL"] {
            let [median, tail] = quantiles(verb);
            println!("{verb} of {} {what}: p50 {median:.1} ms, p90 {tail:.1} ms", pods.len());
        }
        let [median, _] = quantiles("ADD");
        // A busy machine may be twice as slow.
        assert!(median <= 2.0 * bar, "{median} ms {what}");
    }
}

/// Two nodes whose pods' network is ours, and two with bridges, VXLAN and Go Nebula. On each pair three pods: two on
/// the first node, one on the second.
struct Town {
    cluster: Cluster,
    nodes: [Node; 4],
}

impl Town {
    fn new() -> Self {
        let mut cluster = Cluster::new();
        let nodes = ["n1", "n2", "n3", "n4"].map(|name| cluster.node(name, "1.0.0"));
        let mut town = Self { cluster, nodes };
        for (n, node) in town.nodes.iter_mut().enumerate().take(2) {
            let state = node.conf["plugins"][1]["stateDir"].clone();
            let n = n + 1;
            node.conf["plugins"] = json!([{
                "type": "nebula-cni-plugin", "primary": true, "stateDir": state,
                "subnets": [format!("10.244.{n}.0/24")], "reserved": [format!("10.244.{n}.1")], "noMasquerade": ["10.244.0.0/16"],
            }]);
        }
        for node in &mut town.nodes[2..] {
            node.conf["plugins"].as_array_mut().expect("plugins").truncate(1);
            node.conf["plugins"][0]["ipMasq"] = false.into();
        }
        // Pods of either kind reach the outside with the address of their node, as on any node. The bridge's own rule
        // would do it for packets to other nodes' pods, too.
        let rule = "add rule ip outside out ip saddr 10.0.0.0/8 ip daddr != 10.0.0.0/8 masquerade";
        let chain = "add chain ip outside out { type nat hook postrouting priority 100; }";
        for node in ["n3", "n4"] {
            town.cluster.world.run(node, &["nft", &format!("add table ip outside; {chain}; {rule}")]);
        }
        for (node, pods) in [(0, &["a", "b"][..]), (1, &["c"]), (2, &["bridge-a", "bridge-b"]), (3, &["bridge-c"])] {
            town.nodes[node].add_pods(&mut town.cluster.world, pods);
        }
        town.start_gateways();
        town.start_go();
        town.make_vxlan();
        for pod in ["b", "c", "bridge-b", "bridge-c"] {
            let port = PORT.to_string();
            town.cluster.world.start_in(&format!("{pod}-iperf3"), pod, Path::new("iperf3"), &["-s", "-p", &port]);
        }
        town
    }

    /// Certificates for two hosts of a network, each with networks behind it.
    fn certify(&self, ca: &str, hosts: &[(&str, String, String)]) {
        let world = &self.cluster.world;
        let [crt, key] = ["crt", "key"].map(|kind| format!("{ca}-ca.{kind}"));
        world.certify(&["ca", "-name", ca, "-duration", "24h", "-out-crt", &crt, "-out-key", &key]);
        for (name, ip, subnets) in hosts {
            let [out_crt, out_key] = ["crt", "key"].map(|kind| format!("{ca}-{name}.{kind}"));
            let mut words = vec!["sign", "-ca-crt", &crt, "-ca-key", &key, "-name", name, "-ip", ip, "-groups", "node"];
            if !subnets.is_empty() {
                words.extend(["-subnets", subnets]);
            }
            words.extend(["-out-crt", &out_crt, "-out-key", &out_key]);
            world.certify(&words);
        }
    }

    fn start(&mut self, ca: &str, node: &str, program: &Path, (peer, at): (&str, &str), tun: &Value) {
        let world = &mut self.cluster.world;
        let dir = world.dir().display().to_string();
        let any = |who: &str| format!("[{{port: any, proto: any, {who}, local_cidr: any}}]");
        let config = format!(
            "pki: {{ca: {dir}/{ca}-ca.crt, cert: {dir}/{ca}-{node}.crt, key: {dir}/{ca}-{node}.key}}
static_host_map: {{\"{peer}\": [\"{at}:4343\"]}}
lighthouse: {{am_lighthouse: false, hosts: []}}
listen: {{host: 0.0.0.0, port: 4343}}
tun: {tun}
logging: {{level: error}}
firewall: {{outbound: {}, inbound: {}}}
",
            any("host: any"),
            any("group: node"),
        );
        let file = world.write(&format!("{ca}-{node}.yml"), &config).display().to_string();
        world.start_in(&format!("{node}-{ca}"), node, program, &["-config", &file]);
    }

    fn start_gateways(&mut self) {
        let hosts = [1, 2].map(|n| (["n1", "n2"][n - 1], format!("10.244.{n}.1/16"), format!("10.244.{n}.0/24")));
        self.certify("gateway", &hosts);
        let underlay = ["n1", "n2"].map(|node| self.cluster.world.underlay(node));
        for (n, node) in ["n1", "n2"].into_iter().enumerate() {
            let other = 2 - n;
            let peer = format!("10.244.{other}.1");
            let tun = json!({"dev": "nebula-node", "mtu": 1300,
                "unsafe_routes": [{"route": format!("10.244.{other}.0/24"), "via": peer, "inside": true}]});
            self.start("gateway", node, &ours(), (&peer, &underlay[1 - n]), &tun);
        }
    }

    fn start_go(&mut self) {
        let hosts = GO.map(|(node, overlay)| (node, format!("{overlay}/24"), String::new()));
        self.certify("go", &hosts);
        let underlay = GO.map(|(node, _)| self.cluster.world.underlay(node));
        for (n, (node, _)) in GO.into_iter().enumerate() {
            let tun = json!({"dev": "go0", "mtu": 1300});
            self.start("go", node, &go("nebula", "sid"), (GO[1 - n].1, &underlay[1 - n]), &tun);
        }
    }

    /// As flannel makes it, once over the nodes' network and once over Go's device. Each leads to one address of the
    /// pod.
    fn make_vxlan(&self) {
        let world = &self.cluster.world;
        let underlay = GO.map(|(node, _)| world.underlay(node));
        world.ping(GO[0].0, GO[1].1, std::time::Duration::from_secs(10));
        for (n, (node, overlay)) in GO.into_iter().enumerate() {
            let (here, there) = (n + 3, 4 - n);
            for (device, id, below, own, remote, mtu) in [
                ("clear0", "7", "eth0", underlay[n].as_str(), underlay[1 - n].as_str(), "1450"),
                ("inner0", "8", "go0", overlay, GO[1 - n].1, "1250"),
            ] {
                let link = ["ip", "link", "add", device, "mtu", mtu, "type", "vxlan", "id", id];
                world.run(
                    node,
                    &[&link[..], &["local", own, "remote", remote, "dstport", "8472", "dev", below]].concat(),
                );
                world.run(node, &["ip", "addr", "add", &format!("10.9{id}.0.{here}/24"), "dev", device]);
                world.run(node, &["ip", "link", "set", device, "up"]);
            }
            // The pod has a second address, which is behind the other device.
            world.run(
                node,
                &["ip", "route", "add", &format!("10.244.{there}.0/24"), "via", &format!("10.97.0.{there}")],
            );
            world.run(
                node,
                &["ip", "route", "add", &format!("10.250.{there}.0/24"), "via", &format!("10.98.0.{there}")],
            );
            world.run(node, &["ip", "addr", "add", &format!("10.250.{here}.1/24"), "dev", "cni0"]);
        }
        for (pod, n) in [("bridge-a", 3), ("bridge-c", 4)] {
            world.run(pod, &["ip", "addr", "add", &format!("10.250.{n}.9/24"), "dev", "eth0"]);
            world.run(pod, &["ip", "route", "add", "10.250.0.0/16", "via", &format!("10.250.{n}.1")]);
        }
    }

    /// The address of a pod's interface.
    fn address(&self, pod: &str) -> String {
        let shown = self.cluster.world.run(pod, &["ip", "-4", "-o", "addr", "show", "eth0"]);
        let found = shown.lines().next().and_then(|line| line.split("inet ").nth(1)?.split('/').next());
        found.expect("an address").to_owned()
    }

    fn ways(&self) -> Vec<Way> {
        let processes = |names: [&str; 2]| names.map(|name| u64::from(self.cluster.world.pid(name)));
        let (gateways, go) = (processes(["n1-gateway", "n2-gateway"]), processes(["n3-go", "n4-go"]));
        let at = |address: &str| format!("{address}:{PORT}");
        vec![
            Way::new("one node: links of our own", "a", at(&self.address("b")), &[]),
            Way::new("one node: bridge", "bridge-a", at(&self.address("bridge-b")), &[]),
            Way::new("two nodes: gateways, encrypted", "a", at(&self.address("c")), &gateways),
            Way::new("two nodes: VXLAN, in clear", "bridge-a", at(&self.address("bridge-c")), &[]),
            Way::new("two nodes: VXLAN in Go Nebula 1.11.0", "bridge-a", at("10.250.4.9"), &go),
        ]
    }
}
