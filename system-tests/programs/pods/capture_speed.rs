//! What TCP through a Service costs between captured pods on two nodes, beside the same pods' path without capture,
//! without a tunnel, and through a tunnel of Go Nebula between the nodes. `benches/service` runs it for long enough
//! to mean something.

use crate::world;

use std::path::Path;

use nebula_cni_contract::cluster_table::{Builder, EndpointState, ServiceEndpoint, ServicePort};
use serde_json::json;
use world::chaos::number;
use world::cluster::{Cluster, Node};
use world::cost::quantile;
use world::peers::go;
use world::speed::Way;

const CLIENT: &str = "10.42.1.2";
const SERVER: &str = "10.42.2.2";
const SERVICE: &str = "10.96.0.10";
const GO: [(&str, &str); 2] = [("n3", "192.168.77.1"), ("n4", "192.168.77.2")];
/// Of iperf3.
const PORT: u16 = 5201;

#[test]
#[ignore = "needs root, network namespaces, iperf3, Go Nebula and a release build"]
fn a_service_between_captured_pods_is_as_fast_as_the_overlay_without_capture_and_faster_than_a_tunnel_of_go() {
    let town = Town::new();
    let mut ways = town.ways();
    let (rounds, seconds) = (number("SERVICE_ROUNDS", 2) as usize, number("SERVICE_SECONDS", 1));
    for round in 0..rounds {
        // Each way is as often after each other one.
        let count = ways.len();
        for n in 0..count {
            ways[(n + round) % count].measure(&town.cluster.world, seconds);
        }
    }
    let [captured, _, plain, clear, tunnel] = ways.as_slice() else { panic!("five ways") };
    println!("\n| | Gbit/s | of plain | of Go | CPU s per GB |\n| --- | ---: | ---: | ---: | ---: |");
    for way in &ways {
        let cpu = if way.processes.is_empty() { "-".to_owned() } else { format!("{:.2}", quantile(&way.cpu, 0.5)) };
        let (of_plain, of_go) = (way.speed() / plain.speed(), way.speed() / tunnel.speed());
        println!("| {} | {:.2} | {of_plain:.2} | {of_go:.1} | {cpu} |", way.title, way.speed());
    }
    println!();
    for way in &ways {
        let samples: Vec<String> = way.gbps.iter().map(|gbps| format!("{gbps:.2}")).collect();
        println!("- {}: {}", way.title, samples.join(" "));
    }
    let mtu = ["client", "plain-client"].map(|pod| town.tunnel_mtu(pod));
    assert_eq!(mtu[0], mtu[1], "a comparison of unequal packets");
    println!("\nMTU {}, load average {}", mtu[0], std::fs::read_to_string("/proc/loadavg").expect("/proc").trim());
    // A busy machine swings by more than 3 %, which is the bar that the table is for; half is a defect.
    assert!(captured.speed() > plain.speed() / 2.0, "capture halves the throughput");
    assert!(captured.speed() > tunnel.speed(), "slower than Go");
    assert!(clear.speed() > 0.0);
    for way in [captured, plain, tunnel] {
        assert!(quantile(&way.cpu, 0.5) > 0.05, "{}: nothing went through the tunnel", way.title);
    }
}

/// Two nodes with captured pods, and two with pods that have an overlay address of its own and a tunnel of Go Nebula.
struct Town {
    cluster: Cluster,
    nodes: [Node; 4],
}

impl Town {
    fn new() -> Self {
        let mut cluster = Cluster::new();
        let pods = [
            ("n1", "10.42.1", "client"),
            ("n2", "10.42.2", "server"),
            ("n3", "10.244.3", "plain-client"),
            ("n4", "10.244.4", "plain-server"),
        ];
        let nodes = pods.map(|(name, network, _)| {
            let mut node = cluster.node(name, "1.0.0");
            node.conf["plugins"][0]["ipam"]["ranges"] = json!([[{ "subnet": format!("{network}.0/24") }]]);
            node
        });
        let mut town = Self { cluster, nodes };
        town.add(2, pods[2].2);
        town.add(3, pods[3].2);
        town.cluster.set_policy(&[("address", "same".into()), ("overlay", json!(["10.42.0.0/16"]))]);
        for node in &mut town.nodes[..2] {
            node.conf["plugins"][1]["capture"] = json!({ "ranges": ["10.42.0.0/16"], "services": ["10.96.0.0/24"] });
        }
        town.write_table();
        town.add(0, pods[0].2);
        town.add(1, pods[1].2);
        for (here, network, there) in [("n3", "10.244.4.0/24", "n4"), ("n4", "10.244.3.0/24", "n3")] {
            let gateway = town.cluster.world.underlay(there);
            town.cluster.world.run(here, &["ip", "route", "add", network, "via", &gateway]);
        }
        town.start_go();
        for host in ["server", "plain-server", "n4"] {
            let port = PORT.to_string();
            town.cluster.world.start_in(&format!("{host}-iperf3"), host, Path::new("iperf3"), &["-s", "-p", &port]);
        }
        town
    }

    fn add(&mut self, node: usize, pod: &str) {
        self.nodes[node].add_pods(&mut self.cluster.world, &[pod]);
    }

    fn write_table(&self) {
        let address = |text: &str| text.parse().expect("an address");
        let mut builder = Builder::new();
        builder.pod(address(CLIENT), 1);
        builder.pod(address(SERVER), 2);
        let port =
            ServicePort { address: address(SERVICE), port: 80, protocol: 6, affinity: None, this_node_only: false };
        let endpoint = ServiceEndpoint {
            address: address(SERVER),
            port: PORT,
            state: EndpointState::Ready,
            is_on_this_node: false,
        };
        builder.service(port, [endpoint]);
        let bytes = builder.finish(1);
        for node in &self.nodes[..2] {
            let folder = node.dir.join("state/cluster");
            std::fs::create_dir_all(&folder).expect("a folder");
            std::fs::write(folder.join("table"), &bytes).expect("a table");
        }
    }

    /// A tunnel between the nodes themselves.
    fn start_go(&mut self) {
        let world = &mut self.cluster.world;
        world.certify(&["ca", "-name", "go", "-duration", "24h", "-out-crt", "go-ca.crt", "-out-key", "go-ca.key"]);
        for (node, overlay) in GO {
            let network = format!("{overlay}/24");
            let (crt, key) = (format!("go-{node}.crt"), format!("go-{node}.key"));
            world.certify(&[
                "sign",
                "-ca-crt",
                "go-ca.crt",
                "-ca-key",
                "go-ca.key",
                "-name",
                node,
                "-ip",
                &network,
                "-out-crt",
                &crt,
                "-out-key",
                &key,
            ]);
        }
        let underlay = GO.map(|(node, _)| self.cluster.world.underlay(node));
        let world = &mut self.cluster.world;
        let dir = world.dir().display().to_string();
        for (n, (node, _)) in GO.into_iter().enumerate() {
            let (other, at) = (GO[1 - n].1, &underlay[1 - n]);
            let config = format!(
                "pki: {{ca: {dir}/go-ca.crt, cert: {dir}/go-{node}.crt, key: {dir}/go-{node}.key}}
static_host_map: {{\"{other}\": [\"{at}:4343\"]}}
lighthouse: {{am_lighthouse: false, hosts: []}}
listen: {{host: 0.0.0.0, port: 4343}}
tun: {{dev: go0, mtu: 1300}}
logging: {{level: error}}
firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: any, host: any}}]
"
            );
            let file = world.write(&format!("go-{node}.yml"), &config).display().to_string();
            world.start_in(&format!("{node}-go"), node, &go("nebula", "sid"), &["-config", &file]);
        }
    }

    fn ways(&self) -> Vec<Way> {
        let instances = |pods: [(usize, &str); 2]| {
            pods.map(|(node, pod)| self.nodes[node].status(pod)["pid"].as_u64().expect("a process id")).to_vec()
        };
        let (captured, plain) =
            (instances([(0, "client"), (1, "server")]), instances([(2, "plain-client"), (3, "plain-server")]));
        let go = GO.map(|(node, _)| u64::from(self.cluster.world.pid(&format!("{node}-go")))).to_vec();
        let way = |title, client, target: String, processes: &[u64]| Way::new(title, client, target, processes);
        vec![
            way("captured, Service", "client", format!("{SERVICE}:80"), &captured),
            way("captured, pod's own address", "client", format!("{SERVER}:{PORT}"), &captured),
            way(
                "plain: overlay address, no capture",
                "plain-client",
                format!("{}:{PORT}", self.nodes[3].overlay("plain-server")),
                &plain,
            ),
            way("clear: no tunnel", "plain-client", format!("10.244.4.2:{PORT}"), &[]),
            way("Go Nebula 1.11.0, from node to node", "n3", format!("{}:{PORT}", GO[1].1), &go),
        ]
    }

    fn tunnel_mtu(&self, pod: &str) -> String {
        let links = self.cluster.world.run(pod, &["ip", "-o", "link", "show", "type", "tun"]);
        links.split(" mtu ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a tun device").to_owned()
    }
}
