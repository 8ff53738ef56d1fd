//! The table from a fake API server and a real CA.

mod large;
mod policies;

use std::fs;
use std::net::IpAddr;

use nebula_ca::{NewCa, Server, ServerSettings};
use nebula_cert::issuance::{CERTIFICATE_PATH, Pod, Proof, RELEASE_PATH, Release, Request};
use nebula_cert::{Curve, PrivateKey, Version};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::cluster_table::contents::Contents;
use nebula_cni_contract::cluster_table::{Found, Layout, Table};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;
use crate::cluster::fake_api_server::FakeApiServer;
use crate::config::{PLUGIN, TLS_CA_FILE, TOKEN_FILE};
use crate::node::Unenforced;
use crate::readiness::Readiness;
use crate::reconcile::entry::Entry;

/// A CA on loopback whose node token and TLS roots are where the agent has them.
struct RealCa {
    dir: tempfile::TempDir,
    target: Target,
    stop: mpsc::Sender<()>,
    task: JoinHandle<()>,
}

impl RealCa {
    fn host(&self) -> HostRoot {
        HostRoot::new(Some(self.dir.path().join("host")))
    }

    async fn start() -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        let new = NewCa {
            name: "ca".to_owned(),
            version: Version::V2,
            curve: Curve::Curve25519,
            life: 86_400,
            networks: Vec::new(),
            overlay: vec!["10.244.0.0/16".parse().unwrap()],
            tls_names: vec!["127.0.0.1".to_owned()],
        };
        let directory = nebula_ca::Directory::new(dir.path().join("ca"));
        directory.make().unwrap();
        new.make(&directory, SystemClock.unix_seconds()).unwrap();
        let policy = r#"{"pods": {"overlay": ["10.244.0.0/16"], "address": "same"}}"#;
        fs::write(directory.file("policy.jsonc"), policy).unwrap();
        let host = HostRoot::new(Some(dir.path().join("host")));
        for (from, to) in [("node.token", TOKEN_FILE), ("tls.crt", TLS_CA_FILE)] {
            let to = host.resolve(Path::new(to));
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(directory.file(from), to).unwrap();
        }
        let (address, stop, task) = serve(&directory, "127.0.0.1:0".parse().unwrap()).await;
        Self { dir, target: Target { url: format!("https://{address}"), server_name: None }, stop, task }
    }

    /// Ends the service as a crash would, and starts it again at the same address.
    async fn away_for(&mut self, away: Duration) {
        self.stop.send(()).await.unwrap();
        (&mut self.task).await.unwrap();
        tokio::time::sleep(away).await;
        let directory = nebula_ca::Directory::new(self.dir.path().join("ca"));
        let address = self.target.url.strip_prefix("https://").unwrap().parse().unwrap();
        (_, self.stop, self.task) = serve(&directory, address).await;
    }

    async fn post(&self, path: &'static str, body: Vec<u8>) {
        let (target, roots) = (self.target.clone(), self.host().resolve(Path::new(TLS_CA_FILE)));
        let posted = tokio::task::spawn_blocking(move || {
            let agent = target.agent(&roots).unwrap();
            agent.post(target.request_url(path)).send(&body[..]).unwrap().status().as_u16()
        });
        assert_eq!(posted.await.unwrap(), 200);
    }

    fn proof(&self, pod: Pod) -> Proof {
        let token = fs::read_to_string(self.host().resolve(Path::new(TOKEN_FILE))).unwrap();
        Proof::Node { token: token.trim().to_owned(), pod }
    }

    async fn enrol(&self, name: &str, address: &str) {
        let public_key = PrivateKey::generate(Curve::Curve25519).unwrap().public_pem();
        let request = Request { public_key, proof: self.proof(pod(name, address)) };
        self.post(CERTIFICATE_PATH, serde_json::to_vec(&request).unwrap()).await;
    }

    async fn release(&self, name: &str, address: &str) {
        let release = Release { proof: self.proof(pod(name, address)) };
        self.post(RELEASE_PATH, serde_json::to_vec(&release).unwrap()).await;
    }
}

async fn serve(
    directory: &nebula_ca::Directory,
    listen: std::net::SocketAddr,
) -> (std::net::SocketAddr, mpsc::Sender<()>, JoinHandle<()>) {
    let settings = ServerSettings {
        new_ledger: false,
        directory: directory.clone(),
        listen,
        status_listen: None,
        tls_names: Vec::new(),
        passphrase: None,
    };
    let server = Server::open(settings).await.unwrap();
    let (address, (stop, mut stopped)) = (server.address().unwrap(), mpsc::channel(1));
    let task = tokio::spawn(async move {
        let (_reload, reloads) = mpsc::channel(1);
        server.run(async move { stopped.recv().await.unwrap_or_default() }, reloads).await;
    });
    (address, stop, task)
}

fn pod(name: &str, address: &str) -> Pod {
    let (name, uid) = (name.to_owned(), format!("uid-{name}"));
    Pod { namespace: "shop".to_owned(), name, uid, address: address.parse().unwrap(), other_address: None }
}

/// A cluster whose namespace `shop` is enrolled, and a table of node `n1`.
struct Cluster {
    api: FakeApiServer,
    ca: RealCa,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    readiness: Readiness,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Cluster {
    async fn start() -> Self {
        let api = FakeApiServer::default();
        api.put("/apis/discovery.k8s.io/v1", json!({}));
        for n in [1, 2] {
            let node = json!({
                "metadata": {"name": format!("n{n}")}, "spec": {"podCIDR": format!("10.244.{n}.0/24")},
                "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{n}")}]},
            });
            api.put(&format!("/api/v1/nodes/n{n}"), node);
        }
        let mut cluster = Self {
            ca: RealCa::start().await,
            api,
            shared: Arc::default(),
            metrics: Arc::new(Metrics::new(true)),
            readiness: Readiness::default(),
            tasks: Vec::new(),
        };
        cluster.follow().await;
        cluster.write();
        cluster
    }

    async fn follow(&mut self) {
        let entry = json!({"type": PLUGIN, "enrol": {"namespaces": ["shop"]}, "overlay": ["10.244.0.0/16"],
            "ca": {"url": "https://ca:1", "tlsCaFile": "/a", "tokenFile": "/b"}});
        let entry = Entry::of_list(&json!({"name": "n", "cniVersion": "1.0.0", "plugins": [entry]})).unwrap();
        let (client, shared) = (self.api.clone().start().await, Arc::clone(&self.shared));
        let pod_ranges = vec!["10.244.0.0/16".parse().unwrap()];
        shared.facts().settings = facts::Settings {
            pod_ranges,
            exclude: Vec::new(),
            load_balancers: Vec::new(),
            node_ranges: true,
            ports: None,
            policies: None,
        };
        let (host, (_, target)) = (self.ca.host(), watch::channel(Some(self.ca.target.clone())));
        self.tasks.push(tokio::spawn(async move {
            let mut followers = JoinSet::new();
            follow_cluster(&mut followers, &shared, &client, (Rules::new(entry.clone(), entry, false), false), None);
            follow_directory(shared, host, target).await;
        }));
    }

    fn write(&mut self) {
        let outputs = Outputs {
            node: "n1".to_owned(),
            writer: Writer::open(&self.path()),
            departed: Departed::pausing(Duration::from_secs(1)),
            ..Outputs::default()
        };
        let keeper = Keeper {
            shared: Arc::clone(&self.shared),
            outputs,
            metrics: Arc::clone(&self.metrics),
            readiness: self.readiness.clone(),
            unenforced: Unenforced::default(),
            failure: None,
        };
        self.tasks.push(tokio::spawn(keeper.run()));
    }

    fn path(&self) -> std::path::PathBuf {
        self.ca.host().resolve(Path::new(CLUSTER_TABLE))
    }

    /// Of the node whose range has the address.
    fn pod(&self, namespace: &str, name: &str, address: &str, mut spec: Value) {
        spec["nodeName"] = if address.starts_with("10.244.2.") { "n2" } else { "n1" }.into();
        let object = json!({
            "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{name}")}, "spec": spec,
            "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
        });
        self.api.put(&format!("/api/v1/namespaces/{namespace}/pods/{name}"), object);
    }

    /// A pod of `shop` with a certificate.
    async fn enrolled(&self, name: &str, address: &str) {
        self.pod("shop", name, address, json!({}));
        self.ca.enrol(name, address).await;
    }

    fn service(&self, name: &str, spec: Value) {
        let object = json!({"metadata": {"namespace": "shop", "name": name}, "spec": spec});
        self.api.put(&format!("/api/v1/namespaces/shop/services/{name}"), object);
    }

    fn endpoints(&self, service: &str, endpoints: Value) {
        let object = json!({
            "metadata": {"namespace": "shop", "name": format!("{service}-1"),
                "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": endpoints,
        });
        self.api.put(&format!("/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices/{service}-1"), object);
    }

    /// What the table says of a TCP port; waits until that is so.
    async fn until(&self, what: &str, address: &str, port: u16, is_so: impl Fn(&Table<'_>, Found) -> bool) {
        let address: IpAddr = address.parse().unwrap();
        let mut last = None;
        for _ in 0..6_000 {
            if let Ok(bytes) = fs::read(self.path()) {
                let layout = Layout::read(&bytes).unwrap();
                let table = layout.table(&bytes);
                let found = table.find(address, port, 6);
                if is_so(&table, found) {
                    return;
                }
                last = Some(found);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!(
            "{what}: {address}:{port} is {last:?}; missing {:?}, {:?}",
            self.shared.facts().missing(),
            self.shared.problems()
        );
    }

    fn version(&self) -> u64 {
        self.contents().version
    }

    fn contents(&self) -> Contents {
        let bytes = fs::read(self.path()).unwrap();
        Contents::of(&Layout::read(&bytes).unwrap().table(&bytes))
    }
}

fn is_clear(_: &Table<'_>, found: Found) -> bool {
    found == Found::Clear
}

fn is_enrolled(_: &Table<'_>, found: Found) -> bool {
    matches!(found, Found::Enrolled { .. })
}

fn leads_to(expected: &[&str]) -> impl Fn(&Table<'_>, Found) -> bool {
    let expected: Vec<String> = expected.iter().map(|&address| address.to_owned()).collect();
    move |table, found| {
        let Found::Service(service) = found else { return false };
        let endpoints = (0..service.ready).filter_map(|n| table.endpoint(service.id, n));
        let mut shown: Vec<String> = endpoints.map(|one| format!("{}:{}", one.address, one.port)).collect();
        shown.sort();
        shown == expected
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_table_says_who_is_enrolled_who_is_not_and_where_services_lead() {
    let cluster = Cluster::start().await;
    cluster.enrolled("web", "10.244.1.7").await;
    cluster.enrolled("db", "10.244.2.7").await;
    cluster.pod("kube-system", "dns", "10.244.1.3", json!({}));
    cluster.pod("kube-system", "proxy", "192.0.2.1", json!({"hostNetwork": true}));
    cluster.pod("shop", "starting", "10.244.1.99", json!({}));
    cluster.until("enrolled", "10.244.1.7", 0, is_enrolled).await;
    cluster.until("known not to be", "10.244.1.3", 0, is_clear).await;
    cluster.until("a node", "192.0.2.1", 0, is_clear).await;
    cluster.until("a bridge of a node", "10.244.1.1", 0, is_clear).await;
    cluster.until("it may be enrolled", "10.244.1.99", 0, |_, found| found == Found::Unknown).await;

    let port = json!([{"port": 80}]);
    let of =
        |address: &str, node: &str| json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}});
    cluster.service("web", json!({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": port}));
    cluster.endpoints("web", json!([of("10.244.1.7", "n1"), of("10.244.2.7", "n2"), of("10.244.1.3", "n1")]));
    cluster.until("endpoints", "10.96.0.1", 80, leads_to(&["10.244.1.7:8080", "10.244.2.7:8080"])).await;
    let one_is_clear = |_: &Table<'_>, found: Found| matches!(found, Found::Service(service) if service.clear == 1);
    cluster.until("and one that is not enrolled", "10.96.0.1", 80, one_is_clear).await;
    cluster.until("no such port", "10.96.0.1", 81, |_, found| found == Found::NoEndpoint).await;
    let local = json!({"clusterIP": "10.96.0.2", "ports": port, "internalTrafficPolicy": "Local",
        "sessionAffinity": "ClientIP"});
    cluster.service("local", local);
    cluster.endpoints("local", json!([of("10.244.1.7", "n1"), of("10.244.2.7", "n2")]));
    cluster.until("of this node", "10.96.0.2", 80, leads_to(&["10.244.1.7:8080"])).await;
    let has_affinity = |_: &Table<'_>, found: Found| matches!(found, Found::Service(service) if service.affinity == Some(Duration::from_secs(10_800)));
    cluster.until("affinity", "10.96.0.2", 80, has_affinity).await;
    cluster.service("dns", json!({"clusterIP": "10.96.0.3", "ports": port}));
    cluster.endpoints("dns", json!([of("10.244.1.3", "n1")]));
    let is_only_clear = |_: &Table<'_>, found: Found| matches!(found, Found::Service(service) if (service.ready, service.clear) == (0, 1));
    cluster.until("none of its endpoints is enrolled", "10.96.0.3", 80, is_only_clear).await;
    // A rollout enrols the pods of a Service one by one.
    let not_ready = json!({"addresses": ["10.244.1.7"], "nodeName": "n1", "conditions": {"ready": false}});
    cluster.endpoints("dns", json!([of("10.244.1.3", "n1"), not_ready]));
    tokio::time::sleep(Duration::from_millis(300)).await;
    cluster.until("one that is not ready changes nothing", "10.96.0.3", 80, is_only_clear).await;
    cluster.endpoints("dns", json!([of("10.244.1.99", "n1")]));
    cluster.until("it may be enrolled soon", "10.96.0.3", 80, |_, found| found == Found::Unknown).await;
    cluster.service("empty", json!({"clusterIP": "10.96.0.4", "ports": port}));
    cluster.until("no endpoints", "10.96.0.4", 80, |_, found| found == Found::NoEndpoint).await;
    cluster.service("headless", json!({"clusterIP": "None", "ports": port}));
    cluster.service("elsewhere", json!({"type": "ExternalName", "externalName": "example.org"}));

    // One endpoint ends, then the other is all there is.
    let ends =
        json!({"addresses": ["10.244.1.7"], "conditions": {"ready": false, "serving": true, "terminating": true}});
    cluster.endpoints("web", json!([ends, of("10.244.2.7", "n2")]));
    cluster.until("one ends", "10.96.0.1", 80, leads_to(&["10.244.2.7:8080"])).await;
    let serves = |table: &Table<'_>, found: Found| matches!(found, Found::Service(service) if table.serves(service.id, "10.244.1.7".parse().unwrap(), 8080));
    cluster.until("it serves what it has", "10.96.0.1", 80, serves).await;
    // The pod is gone: its address may go to a pod that is not enrolled, and back.
    cluster.ca.release("web", "10.244.1.7").await;
    cluster.until("gone", "10.244.1.7", 0, |_, found| found == Found::Unknown).await;
    cluster.pod("other", "next", "10.244.1.7", json!({}));
    tokio::time::sleep(Duration::from_millis(300)).await;
    cluster.until("shown for two pods", "10.244.1.7", 0, |_, found| found == Found::Unknown).await;
    cluster.api.remove("/api/v1/namespaces/shop/pods/web");
    tokio::time::sleep(Duration::from_millis(300)).await;
    cluster.until("reused at once", "10.244.1.7", 0, |_, found| found == Found::Unknown).await;
    cluster.until("reused after a pause", "10.244.1.7", 0, is_clear).await;
    // It has a certificate before the API server shows its address.
    cluster.ca.enrol("again", "10.244.1.7").await;
    cluster.until("not in clear any more", "10.244.1.7", 0, |_, found| found == Found::Unknown).await;
    cluster.pod("shop", "again", "10.244.1.7", json!({}));
    cluster.until("enrolled wins", "10.244.1.7", 0, is_enrolled).await;
    assert!(!cluster.shared.facts().judge("n1").clear.contains(&"10.244.1.7".parse().unwrap()));
    // Whoever has the token of an agent claims the address of a pod that is not enrolled, for a pod of its own.
    cluster.pod("shop", "thief", "10.244.1.66", json!({}));
    cluster.ca.enrol("thief", "10.244.1.3").await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    cluster.until("it stays where it is", "10.244.1.3", 0, is_clear).await;
    cluster.ca.release("thief", "10.244.1.3").await;
    let has = |line: &str| cluster.metrics.text().contains(line);
    let lines =
        ["nebula_cni_table_entries{kind=\"enrolled\"} 2\n", "nebula_cni_table_input_ok{input=\"directory\"} 1\n"];
    for _ in 0..200 {
        if lines.iter().all(|line| has(line)) && cluster.readiness.is_good(Part::Table) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{}", cluster.metrics.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn works_on_while_the_api_server_or_the_ca_is_away_and_catches_up() {
    let mut cluster = Cluster::start().await;
    cluster.enrolled("web", "10.244.1.7").await;
    cluster.pod("shop", "db", "10.244.2.7", json!({}));
    cluster.pod("shop", "cache", "10.244.2.8", json!({}));
    cluster.pod("other", "dns", "10.244.1.3", json!({}));
    cluster.until("enrolled", "10.244.1.7", 0, is_enrolled).await;
    cluster.until("clear", "10.244.1.3", 0, is_clear).await;
    cluster.api.is_away(true);
    tokio::time::sleep(Duration::from_millis(300)).await;
    cluster.ca.enrol("db", "10.244.2.7").await;
    cluster.until("the CA is there", "10.244.2.7", 0, is_enrolled).await;
    cluster.until("what was known", "10.244.1.3", 0, is_clear).await;
    // What happens meanwhile is seen by the next list.
    cluster.api.remove("/api/v1/namespaces/other/pods/dns");
    cluster.pod("other", "new", "10.244.1.4", json!({}));
    cluster.api.is_away(false);
    cluster.until("it is back", "10.244.1.4", 0, is_clear).await;
    cluster.until("deleted meanwhile", "10.244.1.3", 0, |_, found| found == Found::Unknown).await;
    cluster.ca.away_for(Duration::from_millis(500)).await;
    cluster.pod("other", "newer", "10.244.1.5", json!({}));
    cluster.until("the API server is there", "10.244.1.5", 0, is_clear).await;
    cluster.until("what was known", "10.244.1.7", 0, is_enrolled).await;
    cluster.ca.enrol("cache", "10.244.2.8").await;
    cluster.until("the CA is back", "10.244.2.8", 0, is_enrolled).await;
}

#[test]
fn a_directory_that_cannot_be_read_is_asked_for_ever_less_often() {
    let pauses: Vec<u64> = [1, 2, 3, 4, 5, 6, 100, u32::MAX].map(|failures| pause_after(failures).as_secs()).to_vec();
    assert_eq!(pauses, [2, 4, 8, 16, 30, 30, 30, 30]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beside_a_ca_without_a_directory_the_agent_says_what_to_do_and_reads_it_once_the_ca_is_upgraded() {
    let ca = RealCa::start().await;
    ca.enrol("web", "10.244.1.7").await;
    // An older CA answers as this one does below a path that it does not have.
    let old = Target { url: format!("{}/old", ca.target.url), ..ca.target.clone() };
    let (target, now) = watch::channel(Some(old));
    let shared = Arc::<Shared>::default();
    let follower = tokio::spawn(follow_directory(Arc::clone(&shared), ca.host(), now));
    let problem = || shared.problems().remove(Input::Directory.name()).map(|(why, _)| why);
    let is_so = async |what: &str, is_so: &dyn Fn() -> bool| {
        for _ in 0..3_000 {
            if is_so() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}: {:?}", problem());
    };
    is_so("it says what to do", &|| problem().is_some_and(|why| why.contains("upgrade nebula-ca first"))).await;
    assert!(problem().is_some_and(|why| why.contains("not_found")), "{:?}", problem());
    assert!(!shared.facts().members.contains_key(&member::id("uid-web")));
    target.send_replace(Some(ca.target.clone()));
    is_so("it reads", &|| problem().is_none() && shared.facts().members.contains_key(&member::id("uid-web"))).await;
    follower.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_agent_goes_on_where_the_one_before_was_killed() {
    let mut cluster = Cluster::start().await;
    cluster.enrolled("web", "10.244.1.7").await;
    cluster.until("enrolled", "10.244.1.7", 0, is_enrolled).await;
    let before = cluster.contents();
    cluster.tasks.drain(..).for_each(|task| task.abort());
    // Killed between the write and the rename of another table.
    let left = cluster.path().with_file_name(".table.tmp-4194304-7");
    fs::write(&left, b"half of it").unwrap();
    cluster.shared = Arc::default();
    cluster.write();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!left.exists());
    assert_eq!(cluster.contents(), before, "nothing is written before all inputs have told what they know");
    cluster.follow().await;
    for _ in 0..500 {
        if cluster.shared.facts().missing().is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(cluster.contents(), before, "it says the same");
    // A change that was already in what was written.
    cluster.shared.changed.notify_one();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(cluster.contents(), before, "it still says the same");
    cluster.enrolled("db", "10.244.2.7").await;
    cluster.until("more", "10.244.2.7", 0, is_enrolled).await;
    assert!(cluster.version() > before.version);
    // Somebody removes it.
    let version = cluster.version();
    fs::remove_file(cluster.path()).unwrap();
    cluster.shared.changed.notify_one();
    cluster.until("written again", "10.244.2.7", 0, is_enrolled).await;
    assert!(cluster.version() > version);
}

#[tokio::test]
async fn a_table_that_cannot_be_written_is_told_and_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    // Not a directory.
    fs::write(dir.path().join("cluster"), b"").unwrap();
    let (shared, readiness) = (Arc::new(Shared::default()), Readiness::default());
    for input in Input::ALL {
        shared.facts().is_heard(input);
    }
    let outputs = Outputs {
        node: "n1".to_owned(),
        writer: Writer::open(&dir.path().join("cluster/table")),
        ..Outputs::default()
    };
    let keeper = Keeper {
        shared: Arc::clone(&shared),
        outputs,
        metrics: Arc::new(Metrics::new(true)),
        readiness: readiness.clone(),
        unenforced: Unenforced::default(),
        failure: None,
    };
    shared.changed.notify_one();
    let task = tokio::spawn(keeper.run());
    let standing = async |is_good: bool| {
        for _ in 0..500 {
            let now = readiness.now()[&Part::Table].clone();
            if now.ok == is_good && !now.reason.contains("not been looked at") {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{:?}", readiness.now()[&Part::Table]);
    };
    let bad = standing(false).await;
    assert!(bad.reason.contains("cluster/table") && !bad.advice.is_empty(), "{bad:?}");
    fs::remove_file(dir.path().join("cluster")).unwrap();
    standing(true).await;
    task.abort();
}
