//! A real kube-apiserver with etcd: `nebula-ca` with only the rights of its own role, the node's and the pod's proof,
//! deletion, and the plugin's label queries. `./test kube` runs it where a build of Kubernetes is available.
//!
//! The API server is release 1.20: its TokenReview names no node, and it has no MutatingAdmissionPolicy.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nebula_cert::CaPool;
use nebula_cert::issuance::Pod;
use nebula_cni_contract::labels::{Answer, LabelSource, Program, Question};
use nebula_cni_contract::launch::CaAccess;
use nebula_enrolment::ca_client::{CaClient, Error, Issued, Prover};
use nebula_linux::netns::NamespaceExecutor;
use serde_json::{Value, json};
use world::cluster::{binary, tool};
use world::{World, run};

const AUDIENCE: &str = "nebula-ca";

/// An API server with etcd in a separate namespace; stopped on drop.
pub(super) struct ApiServer {
    /// The first field, because it must outlive the server.
    folder: tempfile::TempDir,
    namespace: String,
}

impl ApiServer {
    pub(super) fn start(world: &World) -> Self {
        let server = Self { folder: tempfile::tempdir().expect("a folder"), namespace: world.namespace_of("control") };
        let status = server.tool("start").arg("api").status().expect("kube-up.sh runs");
        assert!(status.success(), "the API server does not start");
        server
    }

    fn tool(&self, verb: &str) -> Command {
        let mut command = Command::new(tool("kube-up.sh"));
        command.arg(verb).arg(self.folder.path()).env("NODE_NS", &self.namespace);
        command
    }

    /// Runs kubectl as administrator; returns its output.
    pub(super) fn kubectl(&self, arguments: &[&str], input: Option<&Value>) -> String {
        let file = self.folder.path().join("input.json");
        std::fs::write(&file, input.unwrap_or(&Value::Null).to_string()).expect("write the input");
        let output = Command::new("nsenter")
            .arg(format!("--net=/run/netns/{}", self.namespace))
            .arg("kubectl")
            .args(arguments)
            .args(input.map(|_| ["-f".as_ref(), file.as_os_str()]).into_iter().flatten())
            .env("KUBECONFIG", self.admin())
            .output()
            .expect("kubectl runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub(super) fn make(&self, object: &Value) -> Value {
        serde_json::from_str(&self.kubectl(&["create", "-o", "json"], Some(object))).expect("JSON")
    }

    /// Creates a pod bound to the node; returns its uid.
    fn pod(&self, namespace: &str, name: &str, account: &str, labels: &Value) -> String {
        let pod = self.make(&json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": namespace, "name": name, "labels": labels},
            "spec": {"nodeName": "test-node", "serviceAccountName": account, "automountServiceAccountToken": false,
                     "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "localhost/none:1"}]},
        }));
        pod["metadata"]["uid"].as_str().expect("a uid").to_owned()
    }

    /// Reports the pod's address, as a kubelet does once the sandbox has one.
    fn report(&self, namespace: &str, name: &str, address: &str) {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        let mut pod: Value = serde_json::from_str(&self.kubectl(&["get", "--raw", &path], None)).expect("JSON");
        pod["status"]["podIP"] = address.into();
        pod["status"]["podIPs"] = json!([{"ip": address}]);
        self.kubectl(&["replace", "--raw", &format!("{path}/status")], Some(&pod));
    }

    /// Creates a token of a service account, bound to a pod if one is given.
    fn token(&self, namespace: &str, account: &str, audience: &str, pod: Option<(&str, &str)>) -> String {
        let bound = pod.map(|(name, uid)| json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}));
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": 3600, "boundObjectRef": bound},
        });
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let answer: Value =
            serde_json::from_str(&self.kubectl(&["create", "--raw", &path], Some(&request))).expect("JSON");
        answer["status"]["token"].as_str().expect("a token").to_owned()
    }

    /// Writes a kubeconfig with a service account's credentials.
    pub(super) fn kubeconfig(&self, world: &World, namespace: &str, account: &str) -> PathBuf {
        let token = self.token(namespace, account, "https://kubernetes.default.svc", None);
        let authority = self.folder.path().join("pki/ca.crt");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": namespace}}],
            "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:16443", "certificate-authority": authority}}],
            "users": [{"name": "u", "user": {"token": token}}],
        });
        world.write(&format!("{account}.kubeconfig"), &config.to_string())
    }
}

impl ApiServer {
    /// A token of a service account for an audience.
    pub(super) fn token_of(&self, namespace: &str, account: &str, audience: &str) -> String {
        self.token(namespace, account, audience, None)
    }

    /// The credentials of an administrator: a certificate.
    pub(super) fn admin(&self) -> PathBuf {
        self.folder.path().join("admin.kubeconfig")
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        let _ = self.tool("stop").status();
    }
}

/// The CA's service account and role, as deployed where certificates follow from addresses of pods.
fn deployed_role() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/nebula-capture.yaml");
    let text = std::fs::read_to_string(path).expect("the manifest");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    let kinds = ["ServiceAccount", "ClusterRole", "ClusterRoleBinding"];
    let wanted = |document: &Value| kinds.iter().any(|kind| document["kind"] == *kind);
    documents.into_iter().filter(wanted).collect()
}

/// Sends requests from inside the namespace, where API server and CA listen on loopback.
struct Asker {
    namespace: String,
    access: CaAccess,
    world: PathBuf,
}

impl Asker {
    fn ask(&self, prover: Prover) -> Result<Issued, Error> {
        let (namespace, access) = (self.namespace.clone(), self.access.clone());
        let asked = std::thread::spawn(move || {
            world::enter(&namespace);
            let now = nebula_linux::clock::unix_now();
            CaClient::new(access, NamespaceExecutor::Here).request(&[prover], Duration::from_secs(10), now)
        });
        asked.join().expect("the question ends")
    }

    /// Requests a certificate as a node agent with this token.
    fn by_node(&mut self, token: &str, pod: Pod) -> Result<Issued, Error> {
        std::fs::write(self.world.join("node.token"), token).expect("write the token");
        self.ask(Prover::Node(pod))
    }

    fn by_pod(&self, token: &str, address: &str) -> Result<Issued, Error> {
        let address = address.parse().expect("an address");
        self.ask(Prover::Pod { token: token.to_owned().into(), address, other_address: None })
    }

    fn trust(&self) -> CaPool {
        let (namespace, access) = (self.namespace.clone(), self.access.clone());
        let asked = std::thread::spawn(move || {
            world::enter(&namespace);
            CaClient::new(access, NamespaceExecutor::Here).trust(None, Duration::ZERO, Duration::from_secs(10))
        });
        let answer = asked.join().expect("the question ends").expect("an answer");
        answer.news.expect("the first answer is news").trust
    }
}

fn code(outcome: Result<Issued, Error>) -> String {
    match outcome {
        Ok(issued) => issued.identity.primary().name().to_owned(),
        Err(Error::Denied { code, .. }) => code,
        Err(other) => other.to_string(),
    }
}

#[test]
#[ignore = "needs root, etcd and a build of kube-apiserver"]
fn a_real_api_server_confirms_pods_and_their_nodes_and_tells_labels() {
    let mut world = World::new();
    world.host("control");
    let server = ApiServer::start(&world);
    for namespace in ["nebula-system", "shop"] {
        server.make(&json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {"mesh": "on"}}}));
    }
    for (namespace, name) in [("nebula-system", "nebula-cni"), ("shop", "app")] {
        server.make(&json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"namespace": namespace, "name": name}}));
    }
    deployed_role().iter().for_each(|object| drop(server.make(object)));
    server.make(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "test-node"},
        "spec": {"podCIDR": "10.244.0.0/24", "podCIDRs": ["10.244.0.0/24"]}}));
    let agent_uid = server.pod("nebula-system", "agent", "nebula-cni", &json!({}));
    let web_uid = server.pod("shop", "web", "app", &json!({"app": "web"}));

    // The CA runs with its own rights and no others.
    let dir = world.dir().join("ca").display().to_string();
    let tool = binary("nebula-ca").display().to_string();
    run(&tool, &["init", "--dir", &dir, "--overlay", "10.42.0.0/16"]);
    let kubeconfig = server.kubeconfig(&world, "nebula-system", "nebula-ca");
    let policy = json!({
        "kubernetes": {"node_account": "nebula-system/nebula-cni", "audience": AUDIENCE, "kubeconfig": kubeconfig},
        "pods": {"overlay": ["10.42.0.0/16"], "groups": ["sa:{service_account}", "app:{label:app}", "node:{node}"],
                 "provisional": {}},
    });
    std::fs::write(world.dir().join("ca/policy.jsonc"), policy.to_string()).expect("write the policy");
    world.start("control", &binary("nebula-ca"), &["serve", "--dir", &dir, "--listen", "127.0.0.1:8443"]);
    let until = Instant::now() + Duration::from_secs(10);
    while !world.dir().join("ca/control.sock").exists() {
        assert!(Instant::now() < until, "{}", world.all_logs());
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut asker = Asker {
        namespace: world.namespace_of("control"),
        access: CaAccess {
            url: "https://127.0.0.1:8443".to_owned(),
            tls_ca_file: world.dir().join("ca/tls.crt"),
            token_file: world.dir().join("node.token"),
            server_name: None,
        },
        world: world.dir().to_owned(),
    };
    let web = || Pod {
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        uid: web_uid.clone(),
        address: "10.244.0.5".parse().expect("an address"),
        other_address: None,
    };

    // The node's proof: a TokenReview of a token that is bound to the agent's pod. Release 1.20 reveals the node only
    // through that pod.
    let agent = server.token("nebula-system", "nebula-cni", AUDIENCE, Some(("agent", &agent_uid)));
    let issued = asker.by_node(&agent, web()).expect("a certificate");
    assert_eq!(issued.identity.primary().name(), "web.shop.pod");
    assert_eq!(issued.identity.primary().groups(), ["sa:app", "app:web", "node:test-node"]);
    std::fs::write(world.dir().join("node.token"), &agent).expect("write the token");
    let provisional = asker.ask(Prover::Provisional(web())).expect("a provisional certificate");
    assert_eq!(provisional.identity.primary().groups(), ["provisional"]);
    assert_eq!(provisional.identity.networks(), issued.identity.networks());
    let own = server.token("shop", "app", AUDIENCE, Some(("web", &web_uid)));
    assert_eq!(code(asker.by_node(&own, web())), "wrong_account");
    let other = server.token("nebula-system", "nebula-cni", "somebody", Some(("agent", &agent_uid)));
    assert_eq!(code(asker.by_node(&other, web())), "wrong_audience");
    let unbound = server.token("nebula-system", "nebula-cni", AUDIENCE, None);
    assert_eq!(code(asker.by_node(&unbound, web())), "token_not_bound");
    assert_eq!(code(asker.by_node("junk", web())), "token_rejected");
    assert_eq!(code(asker.by_node(&agent, Pod { uid: "another".to_owned(), ..web() })), "pod_uid_mismatch");
    let elsewhere = Pod { address: "10.244.9.5".parse().expect("an address"), ..web() };
    assert_eq!(code(asker.by_node(&agent, elsewhere)), "outside_node_ranges");

    // The pod's own proof, once its node has reported the address.
    assert!(asker.by_pod(&own, "10.244.0.5").is_err_and(|error| error.to_string().contains("has not reported")));
    server.report("shop", "web", "10.244.0.5");
    let by_pod = asker.by_pod(&own, "10.244.0.5").expect("a certificate");
    assert_eq!(by_pod.identity.networks(), issued.identity.networks());
    assert_eq!(code(asker.by_pod(&own, "10.244.0.6")), "address_mismatch");
    let renewal = |from: &Issued| Prover::Holder {
        identity: Box::new(from.identity.clone()),
        renewal_key: from.renewal_key.clone().expect("a key for renewals"),
    };
    assert_eq!(code(asker.ask(renewal(&by_pod))), "web.shop.pod");
    assert_eq!(code(asker.ask(renewal(&provisional))), "provisional_certificate");

    // What the plugin queries to decide whether a pod is enrolled.
    server.make(&json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"namespace": "nebula-system", "name": "labels"}}));
    server.make(&json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "labels"},
        "rules": [{"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["get"]}]}));
    let kubeconfig = server.kubeconfig(&world, "nebula-system", "labels");
    let labels = |name: &str, uid: &str| {
        let question = Question {
            kubeconfig: kubeconfig.clone(),
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            of_pod: true,
            of_namespace: true,
            within_ms: 5000,
        };
        let namespace = world.namespace_of("control");
        let asked = std::thread::spawn(move || {
            world::enter(&namespace);
            Program.ask(&binary("nebula-cni-instance"), &question, &nebula_cni_contract::clock::SystemClock)
        });
        asked.join().expect("the question ends")
    };
    assert!(matches!(labels("web", &web_uid), Answer::Undecided(why) if why.contains("403")), "without the right to");
    server.make(&json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": "labels"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "labels"},
        "subjects": [{"kind": "ServiceAccount", "name": "labels", "namespace": "nebula-system"}]}));
    let Answer::Labels(found) = labels("web", &web_uid) else { panic!("{:?}", labels("web", &web_uid)) };
    assert_eq!(found.pod.get("app").map(String::as_str), Some("web"));
    assert_eq!(found.namespace.get("mesh").map(String::as_str), Some("on"));
    assert!(matches!(labels("web", "another"), Answer::OtherPod { uid } if uid == web_uid));
    assert!(matches!(labels("none", ""), Answer::NoSuchPod));

    // The CA itself notices a deleted pod that nobody released.
    server.kubectl(&["delete", "pod", "-n", "shop", "web", "--grace-period=0", "--force"], None);
    assert_eq!(code(asker.by_node(&agent, web())), "pod_not_found");
    assert_eq!(code(asker.ask(renewal(&by_pod))), "pod_gone");
    let until = Instant::now() + Duration::from_secs(75);
    let mine = [&issued, &provisional, &by_pod].map(|issued| issued.identity.primary().fingerprint());
    while !mine.iter().all(|fingerprint| asker.trust().is_blocked(*fingerprint)) {
        assert!(Instant::now() < until, "they are not blocked\n{}", world.all_logs());
        std::thread::sleep(Duration::from_secs(1));
    }
    // Its token is not valid any more.
    assert_eq!(code(asker.by_pod(&own, "10.244.0.5")), "token_rejected");
}
