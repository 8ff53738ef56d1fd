//! Pods of two nodes for `kubectl nebula policy`: what network policies say of them, and what they were seen to do.

use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixListener;
use std::path::Path;

use nebula_agent::config::STATE_DIR;
use nebula_agent::node::Node;
use nebula_agent::table::member::incarnation;
use nebula_cni_contract::cluster_table::Builder;
use nebula_cni_contract::instance_status::{SeenFlow, SeenFlows};
use nebula_cni_contract::launch::CLUSTER_TABLE;
use nebula_cni_policy::compile::{Cluster, Subject};
use nebula_cni_policy::model::{Direction, Labels, NetworkPolicy, Peer, PodSelector, Profile, Rule};
use serde_json::json;

use super::super::apiserver::ApiServer;
use super::place_pod;

const WEB: [u8; 4] = [10, 244, 0, 7];
const SHOP_DB: [u8; 4] = [10, 244, 1, 7];
const PAY_DB: [u8; 4] = [10, 244, 1, 8];

/// `web` of `shop` on the first node, `db` of `shop` and of `pay` on the second one. `web` was seen to send to both.
pub(super) fn place(server: &ApiServer, (first, second): (&Node, &Node)) {
    let place = |namespace: &str, name: &str, account: &str, node: &str, app: &str, address: [u8; 4]| {
        place_pod(server, (namespace, name), account, node, &json!({"app": app}), address.into())
    };
    place("shop", "web", "team", "test-node", "web", WEB);
    let shop_db = place("shop", "db", "team", "second-node", "db", SHOP_DB);
    let pay_db = place("pay", "db", "owner", "second-node", "secret-of-pay", PAY_DB);
    write_table(first, &[WEB]);
    write_table(second, &[SHOP_DB, PAY_DB]);
    let to = |address: [u8; 4], uid: &str, port| SeenFlow {
        direction: "egress".to_owned(),
        peer: address.into(),
        incarnation: incarnation(uid),
        protocol: 6,
        port,
        flows: 2,
        last: nebula_linux::clock::since_epoch().as_secs(),
    };
    attach(first, vec![to(SHOP_DB, &shop_db, 80), to(PAY_DB, &pay_db, 5432)]);
}

/// A cluster table in which `pay` lets pods of `shop` in and nobody else, with programs for the pods that are here.
fn write_table(node: &Node, here: &[[u8; 4]]) {
    let mut cluster = Cluster::new();
    let shop = Rule { peers: vec![Peer::Pods(PodSelector::namespace("shop"))], ports: vec![] };
    cluster.set_policy(&NetworkPolicy { ingress: vec![shop], ..NetworkPolicy::new("pay", "from-shop") });
    let mut builder = Builder::new();
    let pods = [("shop", WEB), ("shop", SHOP_DB), ("pay", PAY_DB)].map(|(namespace, at)| {
        let profile = Profile::new(namespace, Labels::new(), Labels::new(), Vec::new()).expect("a profile");
        (cluster.identify(profile).expect("an identity"), at)
    });
    // A program knows the labels that there were when it was compiled.
    for (identity, at) in pods {
        let address = IpAddr::from(at);
        builder.pod(address, 7);
        builder.identity(address, Some(identity.number()));
        if here.contains(&at) {
            let subject = Subject { identity, addresses: vec![address], node: Vec::new() };
            builder.programs(address, Direction::ALL.map(|direction| cluster.compile(&subject, direction).bytes));
        }
    }
    let path = node.config.host_root.resolve(Path::new(CLUSTER_TABLE));
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    std::fs::write(path, builder.finish(1)).expect("a table");
}

/// The record of `web`, and its instance, which says that it saw these flows.
fn attach(node: &Node, flows: Vec<SeenFlow>) {
    let folder = node.config.host_root.resolve(Path::new(STATE_DIR)).join("pods");
    std::fs::create_dir_all(&folder).expect("a folder");
    let record = json!({"version": 1, "state": "running", "status_socket": "/web", "process": null, "network": "pods",
        "container_id": "web", "ifname": "eth0", "device": "nebula0", "netns": "/run/netns/x", "netns_id": [4, 9],
        "pod_address": IpAddr::from(WEB), "pod": {"namespace": "shop", "name": "web", "uid": "web"}});
    std::fs::write(folder.join("shop-web.json"), record.to_string()).expect("a record");
    let listener = UnixListener::bind(node.config.host_root.resolve(Path::new("/web"))).expect("a socket");
    let seen = serde_json::to_string(&SeenFlows { flows, lost: 0 }).expect("JSON");
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let head = BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
            let asked: Vec<String> = head.collect();
            // Others ask for its status, without a request.
            if asked.first().is_some_and(|line| line.starts_with("GET /flows ")) {
                let _ = stream.write_all(format!("HTTP/1.1 200 OK\r\n\r\n{seen}").as_bytes());
            }
        }
    });
}
