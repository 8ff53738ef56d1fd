//! `kubectl nebula` through the proxy of a real API server, with the rights that the chart gives: tokens are really
//! made and reviewed there. `./test kube` runs it where a build of Kubernetes is available.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod policies;

use std::net::{Ipv4Addr, SocketAddr};
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
use crate::world::{World, enter, run};

/// The rights for `kubectl nebula`, as the chart makes them.
fn chart() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci/chart/capture.yaml");
    let text = std::fs::read_to_string(path).expect("the manifest");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    let names = [
        "nebula-cni-agent-reviews",
        "nebula-viewer",
        "nebula-operator",
        "nebula-kubectl",
        "nebula-cni-agent-api",
        "nebula-cni-agent",
    ];
    let kinds = ["ServiceAccount", "Service", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"];
    let is_wanted = |document: &Value| {
        kinds.iter().any(|kind| document["kind"] == *kind)
            && names.iter().any(|name| document["metadata"]["name"] == *name)
    };
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
    fn start(namespace: &str, at: SocketAddr, (name, node): (&'static str, &Node), kubeconfig: PathBuf) -> Self {
        let (is_over, namespace, node) = (Arc::new(AtomicBool::new(false)), namespace.to_owned(), node.clone());
        let over = Arc::clone(&is_over);
        std::thread::spawn(move || {
            enter(&namespace);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let client = open(Some(&kubeconfig)).await.expect("credentials");
                let api = Api::new(node, name.to_owned(), client, Arc::new(Vec::new));
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

/// A node with its agent's pod, at an address.
fn place(server: &ApiServer, node: &str, address: Ipv4Addr) {
    server.make(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}));
    let labels = json!({"app.kubernetes.io/name": "nebula-cni-agent"});
    let name = format!("nebula-cni-agent-{node}");
    place_pod(server, ("nebula-system", &name), "nebula-cni-agent", node, &labels, address);
}

/// A pod that runs. Returns its UID.
fn place_pod(
    server: &ApiServer,
    (namespace, name): (&str, &str),
    account: &str,
    node: &str,
    labels: &Value,
    address: Ipv4Addr,
) -> String {
    server.make(&json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": labels},
        "spec": {"nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false,
            "containers": [{"name": "c", "image": "localhost/none:1", "ports": [{"name": "api", "containerPort": 9478}]}]}}));
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
    let mut pod: Value = serde_json::from_str(&server.kubectl(&["get", "--raw", &path], None)).expect("JSON");
    pod["status"]["phase"] = "Running".into();
    pod["status"]["podIP"] = address.to_string().into();
    pod["status"]["podIPs"] = json!([{"ip": address.to_string()}]);
    server.kubectl(&["replace", "--raw", &format!("{path}/status")], Some(&pod));
    pod["metadata"]["uid"].as_str().expect("a uid").to_owned()
}

/// What the API server, or who is behind its proxy, answers to kubectl with these credentials.
fn get_raw(namespace: &str, kubeconfig: &Path, path: &str) -> String {
    let output = Command::new("nsenter")
        .arg(format!("--net=/run/netns/{namespace}"))
        .args(["kubectl", "get", "--raw", path])
        .env("KUBECONFIG", kubeconfig)
        .output()
        .expect("kubectl runs");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
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
    // Another address of the same machine: the agent of the second node has its API there.
    let second = Ipv4Addr::new(198, 51, 100, 7);
    run("ip", &["-n", &control, "address", "add", &format!("{second}/32"), "dev", "lo"]);
    for (node, address) in [("test-node", address), ("second-node", second)] {
        place(&server, node, address);
    }
    // No controller fills in who is behind the Service. Of those that it would fill in one has been gone for a moment.
    let gone = Ipv4Addr::new(198, 51, 100, 8);
    place_pod(&server, ("nebula-system", "gone"), "nebula-cni-agent", "test-node", &json!({}), gone);
    let behind = [("nebula-cni-agent-test-node", address), ("nebula-cni-agent-second-node", second), ("gone", gone)];
    let behind = behind.map(|(pod, address)| {
        json!({"ip": address.to_string(), "targetRef": {"kind": "Pod", "namespace": "nebula-system", "name": pod}})
    });
    let ports = json!([{"name": "api", "port": 9478, "protocol": "TCP"}]);
    server.make(&json!({"apiVersion": "v1", "kind": "Endpoints",
        "metadata": {"namespace": "nebula-system", "name": "nebula-cni-agent-api"},
        "subsets": [{"addresses": behind, "ports": ports}]}));
    run("ip", &["-n", &control, "route", "add", "unreachable", "198.51.100.8/32"]);

    let node_in = |folder: &str| {
        let config = json!({"ca": {"service": "nebula-system/nebula-ca"}, "hostRoot": world.dir().join(folder)});
        let node = Node::new(Config::parse(&config.to_string()).expect("a configuration"));
        std::fs::create_dir_all(node.config.host_root.resolve(Path::new(AGENT_DIR))).expect("a folder");
        node
    };
    let (node, other) = (node_in("first"), node_in("second"));
    let agent_dir = node.config.host_root.resolve(Path::new(AGENT_DIR));
    keep(&node, "shop", record(80));
    keep(&other, "shop", record(82));
    keep(&other, "pay", record(81));
    let of_agent = server.kubeconfig(&world, "nebula-system", "nebula-cni-agent");
    let at = |address: Ipv4Addr| SocketAddr::from((address, 9478));
    let _agent = Agent::start(&control, at(address), ("test-node", &node), of_agent.clone());
    let _second = Agent::start(&control, at(second), ("second-node", &other), of_agent);

    // The team of shop, as docs/kubectl-rights.md says how it gets its view.
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
    assert_eq!((code, out.lines().count()), (0, 2), "{out}{notes}");
    assert!(out.contains("\"pod\":\"shop/web\"") && !out.contains("pay"), "{out}");
    // The proxy leads to agents, who want a token of their own, and nowhere else.
    let proxied = |path: &str| get_raw(&control, &team, &format!("/api/v1/namespaces/nebula-system/{path}"));
    for node in ["test-node", "second-node"] {
        // The API server picks an agent that is gone now and then.
        let path = format!("services/https:nebula-cni-agent-api:api/proxy/v1/nodes/{node}/status");
        let said = (0..50).map(|_| proxied(&path)).find(|said| !said.contains("dial tcp")).expect("an agent");
        assert!(said.contains("Unauthorized") || said.contains("must be logged in"), "{said}");
    }
    for elsewhere in [
        "services/https:nebula-cni-agent-api:9478/proxy/",
        "services/https:nebula-cni-agent-api:22/proxy/",
        "services/http:nebula-cni-agent-api:api/proxy/",
        "services/nebula-cni-agent-api:api/proxy/",
        "services/nebula-cni-agent-api/proxy/",
        "services/https:kubernetes:https/proxy/",
        "pods/https:nebula-cni-agent-test-node:9478/proxy/v1/nodes/test-node/status",
        "pods/nebula-cni-agent-test-node:10250/proxy/",
        "services/https:nebula-cni-agent-api:api/../../pods/https:nebula-cni-agent-test-node:9478/proxy/",
    ] {
        let said = proxied(elsewhere);
        assert!(said.contains("Forbidden"), "{elsewhere}: {said}");
    }
    let said = get_raw(&control, &team, "/api/v1/nodes/test-node/proxy/metrics");
    assert!(said.contains("Forbidden"), "{said}");
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

    account("pay", "owner");
    policies::place(&server, (&node, &other));
    let (code, out, notes) = as_team("policy test shop/web shop/db:80");
    assert_eq!(code, 0, "{out}{notes}");
    assert!(out.contains("shop/web (node test-node, ") && out.contains("shop/db (node second-node, "), "{out}");
    let (code, out, notes) = as_team("policy test shop/web pay/db:5432");
    assert!(code == 1 && out.contains("not shown") && !out.contains("second-node"), "{out}");
    assert!(notes.contains("may not get pods.nebula-cni in namespace pay"), "{notes}");
    let (code, out, notes) = as_team("policy suggest -n shop");
    assert!(code == 0 && out.contains("kind: NetworkPolicy") && out.contains("all pods of pay"), "{out}{notes}");
    assert!(!out.contains("secret-of-pay") && notes.contains("Labels of pods in pay are not shown"), "{out}{notes}");

    // The API server's own credentials, or a token for it, open nothing.
    let token = server.token_of("shop", "nebula-viewer", "https://kubernetes.default.svc");
    let url = format!("https://{address}:9478/v1/nodes/test-node/flows?namespace=shop");
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
    assert_eq!((code, out.lines().count()), (0, 3), "{out}{notes}");
    let (_, out, notes) = kubectl_nebula(&control, &admin, &["flows", "-A"]);
    println!("{out}{notes}");
    let (code, out, notes) = kubectl_nebula(&control, &admin, &["policy", "test", "-A", "shop/web", "pay/db:5432"]);
    assert!(code == 0 && out.contains("allowed by rule 0 of pay/from-shop"), "{out}{notes}");
    let as_viewer_of_all = ["policy", "suggest", "-n", "shop", "--service-account", "nebula-system/nebula-viewer"];
    let (code, out, notes) = kubectl_nebula(&control, &admin, &as_viewer_of_all);
    assert!(code == 0 && out.contains("secret-of-pay"), "{out}{notes}");
    println!("{out}");
    let (code, out, notes) = kubectl_nebula(&control, &admin, &["check"]);
    assert!(code == 79 && out.contains("✗ test-node: "), "nothing prepares this node: {out}{notes}");
    println!("{out}");
    let (_, out, notes) = kubectl_nebula(&control, &admin, &["status"]);
    assert!(out.contains("2 of 2 agents answer"), "{out}{notes}");
    println!("{out}");
    let (code, out, notes) = kubectl_nebula(&control, &admin, &["upgrade", "pause", "test-node"]);
    assert_eq!(code, 0, "{out}{notes}");
    let request = std::fs::read_to_string(agent_dir.join("upgrade-request")).expect("it is asked for");
    assert!(request.contains("pause"), "{request}");
    println!("{out}");
}
