//! The pod path under a real containerd, called as a kubelet calls it, with a plain host running Go Nebula 1.11.

mod world;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use world::World;
use world::cluster::{Cluster, LIGHTHOUSE, Node, alive, links, shared};

const SOON: Duration = Duration::from_secs(15);

/// A private containerd on one node; ended and emptied on drop.
struct Runtime {
    dir: PathBuf,
}

impl Runtime {
    fn start(world: &World, node: &Node) -> Self {
        let dir = node.dir.join("cri");
        std::fs::create_dir_all(dir.join("net.d")).expect("a folder for the configuration");
        std::fs::write(dir.join("net.d/10-nebula.conflist"), node.conf.to_string()).expect("write the chain");
        let images = [
            image(
                &dir,
                "pause",
                &[
                    "--entrypoint",
                    r#"["/bin/busybox","sh","-c","trap \"exit 0\" TERM INT; while :; do /bin/busybox sleep 3600 & wait $!; done"]"#,
                ],
            ),
            image(
                &dir,
                "busybox",
                &[
                    "--busybox",
                    "--dir",
                    "/tmp",
                    "--text",
                    "/etc/passwd=root:x:0:0:root:/:/bin/sh",
                    "--cmd",
                    r#"["/bin/sh"]"#,
                ],
            ),
        ];
        let output = Command::new(shared("tools/cri-up.sh"))
            .arg("start")
            .arg(&dir)
            .env("NODE_NS", world.namespace_of(&node.name))
            .env("CNI_BIN", node.dir.join("bin"))
            .env("IMAGES", format!("{} {}", images[0].display(), images[1].display()))
            .output()
            .expect("cri-up.sh runs");
        assert!(output.status.success(), "containerd does not start: {}", String::from_utf8_lossy(&output.stderr));
        Self { dir }
    }

    fn cri(&self, arguments: &[&str]) -> Result<String, String> {
        let output = Command::new("/usr/bin/python3")
            .arg(shared("tools/cri.py"))
            .arg("-s")
            .arg(self.dir.join("run/containerd.sock"))
            .args(arguments)
            .output()
            .expect("cri.py runs");
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if output.status.success() {
            Ok(text)
        } else {
            Err(format!("{text}{}", String::from_utf8_lossy(&output.stderr)))
        }
    }

    /// Starts a pod with one busybox container; returns (pod id, container id, pod addresses).
    fn pod(&self, name: &str) -> (String, String, Value) {
        let said = self.cri(&["run-pod", &format!("shop/{name}/uid-{name}")]).unwrap_or_else(|error| panic!("{error}"));
        let pod: Value = serde_json::from_str(&said).expect("cri.py prints JSON");
        let id = pod["id"].as_str().expect("a pod id").to_owned();
        let container = self
            .cri(&["run-container", &id, "main", "localhost/busybox:1", "--", "/bin/sleep", "3600"])
            .unwrap_or_else(|error| panic!("{error}"));
        (id, container, pod["ips"].clone())
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _ = Command::new(shared("tools/cri-up.sh")).arg("stop").arg(&self.dir).output();
    }
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools, a release build and the Go peers in target/peers"]
fn pods_of_containerd_reach_each_other_and_a_host_with_go_nebula() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    start_go_host(&mut cluster, "10.42.200.1");
    let runtime = Runtime::start(&cluster.world, &node);
    let (web, web_main, addresses) = runtime.pod("web");
    let (db, db_main, _) = runtime.pod("db");
    assert!(addresses.to_string().contains("10.244.1."), "the pod keeps its primary address: {addresses}");
    let status = |pod: &str| world::cluster::status_at(&socket_of(&node, pod));
    let (of_web, of_db) = (status(&web), status(&db));
    let overlay =
        |status: &Value| status["overlay"][0].as_str().and_then(|n| n.split('/').next()).expect("overlay").to_owned();
    let ping = |container: &str, to: &str| {
        let mut last = String::new();
        for _ in 0..15 {
            match runtime.cri(&["exec", container, "--", "/bin/ping", "-c", "1", "-W", "1", to]) {
                Ok(_) => return,
                Err(error) => last = error,
            }
        }
        panic!("no reply from {to}: {last}\n{}", cluster.world.all_logs());
    };
    ping(&web_main, &overlay(&of_db));
    ping(&db_main, &overlay(&of_web));
    ping(&web_main, "10.42.200.1");
    ping(&db_main, LIGHTHOUSE);
    cluster.world.ping("go", &overlay(&of_web), SOON);
    cluster.world.ping("go", &overlay(&of_db), SOON);
    assert_eq!(of_web["pod"], "shop/web");

    let pids = [&of_web, &of_db].map(|status| status["pid"].as_u64().expect("a pid"));
    for pod in [&web, &db] {
        runtime.cri(&["stop-pod", pod]).unwrap_or_else(|error| panic!("{error}"));
        runtime.cri(&["remove-pod", pod]).unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(pids.iter().all(|pid| !alive(*pid)), "an instance outlived its pod");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
    let left = links(&cluster.world.namespace_of("n1"));
    assert!(left.iter().all(|link| ["lo", "eth0", "cni0"].contains(&link.as_str())), "links left: {left:?}");
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a release build"]
fn containerd_reports_a_renumbered_pod_by_its_overlay_address() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["renumber"] = true.into();
    let runtime = Runtime::start(&cluster.world, &node);
    let (web, _, addresses) = runtime.pod("web");
    let (_, db_main, _) = runtime.pod("db");
    let overlay = world::cluster::status_at(&socket_of(&node, &web))["overlay"][0].clone();
    let overlay = overlay.as_str().and_then(|network| network.split('/').next()).expect("an overlay address");
    assert_eq!(addresses, serde_json::json!([overlay]), "the pod's status shows the overlay address");
    let ping = ["exec", &db_main, "--", "/bin/ping", "-c", "1", "-W", "5", overlay];
    let reached = (0..10).any(|_| runtime.cri(&ping).is_ok());
    assert!(reached, "another pod reaches it\n{}", cluster.world.all_logs());
    cluster.world.ping("n1", overlay, SOON);
    for verb in ["stop-pod", "remove-pod"] {
        runtime.cri(&[verb, &web]).unwrap_or_else(|error| panic!("{error}"));
    }
    let routes = cluster.world.exec("n1", &["ip", "route"]).stdout;
    assert!(!String::from_utf8_lossy(&routes).contains(&format!("{overlay} ")), "the node keeps its route");
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a release build"]
fn a_refused_pod_tells_the_user_why_and_leaves_nothing() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    let wrong = cluster.world.write("wrong.token", "nebnode_0000000000000000000000000000000000000000000");
    node.conf["plugins"][1]["ca"]["tokenFile"] = wrong.display().to_string().into();
    let runtime = Runtime::start(&cluster.world, &node);
    let error = runtime.cri(&["run-pod", "shop/web/uid-web"]).expect_err("the CA refuses this node");
    assert!(error.contains("nebula-cni-plugin") && error.contains("shop/web") && error.contains("token"), "{error}");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

/// A host with Go Nebula 1.11 whose certificate was signed by Go's tool with our CA's files.
fn start_go_host(cluster: &mut Cluster, overlay: &str) {
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/sid/usr/bin");
    assert!(peers.join("nebula").exists(), "the Go peers are missing: run .ci/go-nebula first");
    cluster.world.host("go");
    let dir = cluster.world.dir().display().to_string();
    let signed = Command::new(peers.join("nebula-cert"))
        .args(["sign", "-name", "go-host", "-networks", &format!("{overlay}/16"), "-groups", "ns:shop"])
        .args(["-ca-crt", &cluster.ca_file("ca.crt"), "-ca-key", &cluster.ca_file("ca.key")])
        .args(["-out-crt", &format!("{dir}/go.crt"), "-out-key", &format!("{dir}/go.key")])
        .output()
        .expect("Go's nebula-cert runs");
    assert!(signed.status.success(), "{}", String::from_utf8_lossy(&signed.stderr));
    let config = format!(
        "pki: {{ca: {ca}, cert: {dir}/go.crt, key: {dir}/go.key}}
static_host_map: {{\"{LIGHTHOUSE}\": [\"192.0.2.1:4242\"]}}
lighthouse: {{hosts: [\"{LIGHTHOUSE}\"]}}
listen: {{host: 0.0.0.0, port: 4242}}
tun: {{dev: neb0}}
firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: any, host: any}}]
",
        ca = cluster.ca_file("ca.crt"),
    );
    let path = cluster.world.write("go.yml", &config);
    cluster.world.start("go", &peers.join("nebula"), &["-config", &path.display().to_string()]);
    cluster.world.ping("go", LIGHTHOUSE, SOON);
}

fn socket_of(node: &Node, pod_id: &str) -> PathBuf {
    let launch = std::fs::read(node.records().join(format!("{pod_id}-eth0.launch"))).expect("a launch file");
    let launch: Value = serde_json::from_slice(&launch).expect("the launch file is JSON");
    launch["status_socket"].as_str().expect("a status socket").into()
}

fn image(dir: &Path, name: &str, more: &[&str]) -> PathBuf {
    let tar = dir.join(format!("{name}.tar"));
    let output = Command::new(shared("tools/mkimage.py"))
        .arg("-o")
        .arg(&tar)
        .args(["-n", &format!("localhost/{name}:1"), "--file", "/bin/busybox=/bin/busybox"])
        .args(more)
        .output()
        .expect("mkimage.py runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    tar
}
