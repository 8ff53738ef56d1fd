//! The API of a node whose state is in a temporary folder, beside the fake that reviews tokens.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nebula_agent::api::{Api, serve};
use nebula_agent::config::{AGENT_DIR, Config, STATE_DIR};
use nebula_agent::flows::store::{Bound, Store};
use nebula_agent::flows::{Attached, folder};
use nebula_agent::node::Node;
use nebula_agent::reconcile::plan::{Protection, Reason, Stand};
use nebula_agent::table::member::incarnation;
use nebula_cni_contract::cluster_table::Builder;
use nebula_cni_contract::flow_records::{FlowRecord, FlowRecords};
use nebula_cni_contract::instance_status::{Certificate, SeenFlow, SeenFlows, Status};
use nebula_cni_contract::launch::{CLUSTER_TABLE, Pod};
use nebula_cni_policy::compile::{Cluster, Subject};
use nebula_cni_policy::model::{Direction, Labels, NetworkPolicy, Peer, PodSelector, Profile, Rule};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};

use super::fake_reviews::FakeReviews;

pub(crate) struct Site {
    pub(crate) address: SocketAddr,
    pub(crate) node: Node,
    root: tempfile::TempDir,
}

impl Site {
    /// A node with a pod that is protected and one that is not.
    pub(crate) async fn start(reviews: &FakeReviews, name: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let config = json!({"ca": {"service": "nebula-system/nebula-ca"}, "hostRoot": root.path()});
        let config = Config::parse(&config.to_string()).unwrap();
        std::fs::create_dir_all(config.host_root.resolve(Path::new(AGENT_DIR))).unwrap();
        let node = Node::new(config);
        let stand = |pod: &str, protection| Stand {
            sandbox: pod.to_owned(),
            pod: Pod { namespace: "shop".to_owned(), name: pod.to_owned(), uid: pod.to_owned() },
            protection,
        };
        let certificate = Some(Certificate { not_after: i64::MAX / 2, ..Certificate::default() });
        let status = Arc::new(Status { certificate, ..Status::default() });
        let pods = vec![
            (stand("web", Protection::Protected), Some(status)),
            (stand("old", Protection::Unprotected(Reason::NoRecord)), None),
        ];
        let client = reviews.client().await;
        let api = Api::new(node.clone(), name.to_owned(), client, Arc::new(move || pods.clone()));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        reviews.agent(name, address);
        tokio::spawn(serve(api, listener));
        Self { address, node, root }
    }

    /// What the instance of a pod recorded.
    pub(crate) fn keep(&self, namespace: &str, records: Vec<FlowRecord>) {
        let folder = folder(&self.node.config.host_root);
        std::fs::create_dir_all(&folder).unwrap();
        let pod = Pod { namespace: namespace.to_owned(), name: "web".to_owned(), uid: namespace.to_owned() };
        let attached = Attached { attachment: namespace.to_owned(), pod, socket: PathBuf::new() };
        let next = records.iter().map(|record| record.number).max().unwrap_or_default();
        let answer = FlowRecords { records, next, is_on: true, ..FlowRecords::default() };
        let bound = Bound { bytes: 64 << 20, age: Duration::from_secs(3600) };
        let mut store = Store::open(&folder, bound).unwrap();
        store.keep(vec![(&attached, answer)], now_ms()).unwrap();
        store.commit().unwrap();
    }

    /// A pod with a tunnel, whose instance answers this.
    pub(crate) fn attach(&self, namespace: &str, name: &str, status: &Value) {
        let listener = self.attachment(namespace, name);
        let answer = status.to_string();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                // A client may close its connection early.
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
    }

    /// A pod with a tunnel, whose instance saw these flows, and has forgotten one.
    pub(crate) fn attach_seen(&self, namespace: &str, name: &str, flows: &[SeenFlow]) {
        let listener = self.attachment(namespace, name);
        let seen = serde_json::to_string(&SeenFlows { flows: flows.to_vec(), lost: 1 }).unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let mut stream = tokio::io::BufReader::new(stream);
                // The whole request: to close a socket with unread bytes resets the connection.
                let mut line = String::new();
                while stream.read_line(&mut line).await.is_ok_and(|length| length > 2) {
                    line.clear();
                }
                let _ = stream.write_all(format!("HTTP/1.1 200 OK\r\n\r\n{seen}").as_bytes()).await;
            }
        });
    }

    /// A cluster table in which `pay` lets pods of `shop` in, and nobody else. All these pods are enrolled; the table
    /// has programs of those that are on this node.
    pub(crate) fn know(&self, pods: &[(&str, &str)], here: &[&str]) {
        let mut cluster = Cluster::new();
        let shop = Rule { peers: vec![Peer::Pods(PodSelector::namespace("shop"))], ports: vec![] };
        cluster.set_policy(&NetworkPolicy { ingress: vec![shop], ..NetworkPolicy::new("pay", "from-shop") });
        let mut builder = Builder::new();
        let mut identify = |(namespace, address): &(&str, &str)| {
            let profile = Profile::new(*namespace, Labels::new(), Labels::new(), Vec::new()).unwrap();
            (cluster.identify(profile).unwrap(), address.parse::<IpAddr>().unwrap(), here.contains(address))
        };
        // A program knows the labels that there were when it was compiled.
        let known: Vec<_> = pods.iter().map(&mut identify).collect();
        for (identity, address, is_here) in known {
            builder.pod(address, 7);
            builder.identity(address, Some(identity.number()));
            if is_here {
                let subject = Subject { identity, addresses: vec![address], node: Vec::new() };
                builder.programs(address, Direction::ALL.map(|direction| cluster.compile(&subject, direction).bytes));
            }
        }
        let path = self.node.config.host_root.resolve(Path::new(CLUSTER_TABLE));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, builder.finish(3)).unwrap();
    }

    /// The record of a pod with a tunnel, and the status socket of its instance.
    fn attachment(&self, namespace: &str, name: &str) -> tokio::net::UnixListener {
        let socket = format!("/{namespace}-{name}");
        let folder = self.node.config.host_root.resolve(Path::new(STATE_DIR)).join("pods");
        std::fs::create_dir_all(&folder).unwrap();
        let record = json!({"version": 1, "state": "running", "status_socket": socket, "process": null,
            "network": "pods", "container_id": name, "ifname": "eth0", "device": "nebula0",
            "netns": "/run/netns/x", "netns_id": [4, 9], "pod_address": "10.244.1.7",
            "pod": {"namespace": namespace, "name": name, "uid": name}});
        std::fs::write(folder.join(format!("{namespace}-{name}.json")), record.to_string()).unwrap();
        tokio::net::UnixListener::bind(self.root.path().join(socket.trim_start_matches('/'))).unwrap()
    }

    /// Stands for the part of the agent that takes what an operator asks upgrades for. Returns what that was.
    pub(crate) fn take_request(&self) -> std::thread::JoinHandle<String> {
        let path = self.root.path().join(AGENT_DIR.trim_start_matches('/')).join("upgrade-request");
        std::thread::spawn(move || {
            loop {
                if let Ok(text) = std::fs::read_to_string(&path) {
                    std::fs::remove_file(&path).unwrap();
                    return text;
                }
                std::thread::yield_now();
            }
        })
    }
}

/// A pod, as the API server has it. Its UID is made of its namespace and name.
pub(crate) fn pod(namespace: &str, name: &str, node: &str, address: &str, labels: &Value) -> Value {
    json!({"metadata": {"namespace": namespace, "name": name, "uid": format!("{namespace}/{name}"), "labels": labels},
        "spec": {"nodeName": node, "containers": []},
        "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}})
}

/// What an instance says of flows to a pod of this address and UID.
pub(crate) fn to(address: &str, uid: &str, port: u16) -> SeenFlow {
    let (direction, peer) = ("egress".to_owned(), address.parse().unwrap());
    let last = now_ms() / 1000;
    SeenFlow { direction, peer, incarnation: incarnation(uid), protocol: 6, port, flows: 2, last }
}

/// A record of a flow that was seen a moment ago.
pub(crate) fn record(number: u64, direction: &str, port: u16) -> FlowRecord {
    let mut record = FlowRecord {
        number,
        id: number,
        event: "created".to_owned(),
        verdict: "allowed".to_owned(),
        direction: direction.to_owned(),
        protocol: 6,
        last_ms: now_ms(),
        ..FlowRecord::default()
    };
    record.destination.port = Some(port);
    record
}

pub(crate) fn now_ms() -> u64 {
    u64::try_from(nebula_linux::clock::since_epoch().as_millis()).unwrap()
}
