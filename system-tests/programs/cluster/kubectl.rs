//! `kubectl nebula` through the proxy of a real API server, with the rights that the chart gives: tokens are really
//! made and reviewed there. `./test kube` runs it where a build of Kubernetes is available.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nebula_agent::api::{Api, serve};
use nebula_agent::cluster::api::open;
use nebula_agent::config::{AGENT_DIR, Config};
use nebula_agent::flows::store::{Bound, Store};
use nebula_agent::flows::{Attached, folder};
use nebula_agent::node::Node;
use nebula_cni_contract::flow_records::{FlowRecord, FlowRecords};
use nebula_cni_contract::launch::Pod;
use serde_json::{Value, json};

use super::apiserver::ApiServer;
use crate::world::cluster::binary;
use crate::world::{World, enter};

/// The rights for `kubectl nebula`, as the chart makes them.
fn chart() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci/chart/capture.yaml");
    let text = std::fs::read_to_string(path).expect("the manifest");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    let names = ["nebula-cni-agent-reviews", "nebula-viewer", "nebula-operator", "nebula-kubectl"];
    let is_wanted = |document: &Value| names.iter().any(|name| document["metadata"]["name"] == *name);
    documents.into_iter().filter(is_wanted).collect()
}

fn record(port: u16) -> FlowRecord {
    let now = u64::try_from(nebula_linux::clock::since_epoch().as_millis()).expect("a time");
    let mut record = FlowRecord {
        number: 1,
        id: 1,
        event: "created".to_owned(),
        verdict: "allowed".to_owned(),
        direction: "outbound".to_owned(),
        protocol: 6,
        last_ms: now,
        ..FlowRecord::default()
    };
    record.destination.port = Some(port);
    record
}

/// What the instance of a pod of this namespace recorded.
fn keep(node: &Node, namespace: &str, record: FlowRecord) {
    let folder = folder(&node.config.host_root);
    std::fs::create_dir_all(&folder).expect("a folder");
    let pod = Pod { namespace: namespace.to_owned(), name: "web".to_owned(), uid: namespace.to_owned() };
    let attached = Attached { attachment: namespace.to_owned(), pod, socket: PathBuf::new() };
    let answer = FlowRecords { records: vec![record], next: 1, is_on: true, ..FlowRecords::default() };
    let bound = Bound { bytes: 64 << 20, age: Duration::from_secs(3600) };
    let mut store = Store::open(&folder, bound).expect("a store");
    store.keep(vec![(&attached, answer)], 0).expect("it is kept");
    store.commit().expect("it is written");
}

/// The API of an agent in a network namespace, until it is dropped.
struct Agent(Arc<AtomicBool>);

impl Agent {
    fn start(namespace: &str, at: SocketAddr, node: &Node, kubeconfig: PathBuf) -> Self {
        let (is_over, namespace, node) = (Arc::new(AtomicBool::new(false)), namespace.to_owned(), node.clone());
        let over = Arc::clone(&is_over);
        std::thread::spawn(move || {
            enter(&namespace);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let client = open(Some(&kubeconfig)).await.expect("credentials");
                let api = Api::new(node, "test-node".to_owned(), client, Arc::new(Vec::new));
                let listener = tokio::net::TcpListener::bind(at).await.expect("the port is free");
                let ended = async {
                    while !over.load(Ordering::Relaxed) {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                };
                tokio::select! {
                    outcome = serve(api, listener) => panic!("{outcome:?}"),
                    () = ended => {}
                }
            });
        });
        Self(is_over)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Exit code, output and remarks of `kubectl nebula`.
fn kubectl_nebula(namespace: &str, kubeconfig: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new("nsenter")
        .arg(format!("--net=/run/netns/{namespace}"))
        .arg(binary("kubectl-nebula"))
        .args(arguments)
        .env("KUBECONFIG", kubeconfig)
        .output()
        .expect("kubectl-nebula runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

#[test]
#[ignore = "needs root, etcd and a build of kube-apiserver"]
fn a_team_sees_its_namespace_through_a_real_api_server_and_an_operator_pauses_upgrades() {
    let mut world = World::new();
    let address = world.host("control");
    let control = world.namespace_of("control");
    let server = ApiServer::start(&world);
    for namespace in ["nebula-system", "shop", "pay"] {
        server.make(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}));
    }
    chart().iter().for_each(|object| drop(server.make(object)));
    let account = |namespace: &str, name: &str| {
        server.make(
            &json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": namespace, "name": name}}),
        );
    };
    account("nebula-system", "nebula-cni-agent");
    server.make(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "test-node"}}));
    server.make(&json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "nebula-system", "name": "nebula-cni-agent-x",
            "labels": {"app.kubernetes.io/name": "nebula-cni-agent"}},
        "spec": {"nodeName": "test-node", "serviceAccountName": "nebula-cni-agent", "automountServiceAccountToken": false,
            "containers": [{"name": "c", "image": "localhost/none:1", "ports": [{"name": "api", "containerPort": 9478}]}]}}));
    let path = "/api/v1/namespaces/nebula-system/pods/nebula-cni-agent-x";
    let mut pod: Value = serde_json::from_str(&server.kubectl(&["get", "--raw", path], None)).expect("JSON");
    pod["status"]["phase"] = "Running".into();
    pod["status"]["podIP"] = address.to_string().into();
    pod["status"]["podIPs"] = json!([{"ip": address.to_string()}]);
    server.kubectl(&["replace", "--raw", &format!("{path}/status")], Some(&pod));

    let config = json!({"ca": {"service": "nebula-system/nebula-ca"}, "hostRoot": world.dir()});
    let node = Node::new(Config::parse(&config.to_string()).expect("a configuration"));
    let agent_dir = node.config.host_root.resolve(Path::new(AGENT_DIR));
    std::fs::create_dir_all(&agent_dir).expect("a folder");
    keep(&node, "shop", record(80));
    keep(&node, "pay", record(81));
    let of_agent = server.kubeconfig(&world, "nebula-system", "nebula-cni-agent");
    let _agent = Agent::start(&control, SocketAddr::from((address, 9478)), &node, of_agent);

    // The team of shop, as docs/kubectl.md says how it gets its view.
    for name in ["nebula-viewer", "team"] {
        account("shop", name);
    }
    for words in [
        "create rolebinding -n shop nebula-viewer --clusterrole=nebula-viewer --serviceaccount=shop:nebula-viewer",
        "create role -n shop nebula-viewer-token --verb=create --resource=serviceaccounts/token --resource-name=nebula-viewer",
        "create rolebinding -n shop nebula-viewer-token --role=nebula-viewer-token --serviceaccount=shop:team",
    ] {
        server.kubectl(&words.split(' ').collect::<Vec<_>>(), None);
    }
    let team = server.kubeconfig(&world, "shop", "team");
    let as_team = |words: &str| kubectl_nebula(&control, &team, &words.split(' ').collect::<Vec<_>>());
    let (code, _, notes) = as_team("flows -n shop");
    assert!(code == 1 && notes.contains("--role=nebula-kubectl"), "without the way to the agents: {notes}");
    let words =
        "create rolebinding -n nebula-system nebula-kubectl-team --role=nebula-kubectl --serviceaccount=shop:team";
    server.kubectl(&words.split(' ').collect::<Vec<_>>(), None);
    let (code, out, notes) = as_team("flows -n shop -o json");
    assert_eq!((code, out.lines().count()), (0, 1), "{out}{notes}");
    assert!(out.contains("\"pod\":\"shop/web\"") && !out.contains("pay"), "{out}");
    let (code, _, notes) = as_team("flows -A --service-account shop/nebula-viewer");
    assert!(code == 1 && notes.contains("may not get flows.nebula-cni in the whole cluster"), "{notes}");
    let (code, _, notes) = as_team("flows -n pay --service-account shop/nebula-viewer");
    assert!(code == 1 && notes.contains("may not get flows.nebula-cni in namespace pay"), "{notes}");
    let (code, _, notes) = as_team("flows -A");
    assert!(
        code == 1 && notes.contains("you may not create serviceaccounts/token of nebula-system/nebula-viewer"),
        "{notes}"
    );
    let (code, _, notes) = as_team("upgrade pause --service-account shop/nebula-viewer");
    assert!(code == 1 && notes.contains("may not update upgrades.nebula-cni"), "{notes}");
    assert!(!agent_dir.join("upgrade-request").exists());

    // The API server's own credentials, or a token for it, open nothing.
    let token = server.token_of("shop", "nebula-viewer", "https://kubernetes.default.svc");
    let url = format!("https://{address}:9478/v1/flows?namespace=shop");
    let header = format!("x-nebula-token: {token}");
    let asked = Command::new("nsenter")
        .arg(format!("--net=/run/netns/{control}"))
        .args(["curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}", "-H", &header, &url])
        .output()
        .expect("curl runs");
    assert_eq!(String::from_utf8_lossy(&asked.stdout), "401");

    // An administrator with a certificate.
    let admin = server.admin();
    let (code, out, notes) = kubectl_nebula(&control, &admin, &["flows", "-A", "-o", "json"]);
    assert_eq!((code, out.lines().count()), (0, 2), "{out}{notes}");
    let (_, out, notes) = kubectl_nebula(&control, &admin, &["flows", "-A"]);
    println!("{out}{notes}");
    let (code, out, notes) = kubectl_nebula(&control, &admin, &["check"]);
    assert!(code == 79 && out.contains("✗ test-node: "), "nothing prepares this node: {out}{notes}");
    println!("{out}");
    let (_, out, notes) = kubectl_nebula(&control, &admin, &["status"]);
    assert!(out.contains("1 of 1 agents answer"), "{out}{notes}");
    println!("{out}");
    let (code, out, notes) = kubectl_nebula(&control, &admin, &["upgrade", "pause"]);
    assert_eq!(code, 0, "{out}{notes}");
    let request = std::fs::read_to_string(agent_dir.join("upgrade-request")).expect("it is asked for");
    assert!(request.contains("pause"), "{request}");
    println!("{out}");
}
