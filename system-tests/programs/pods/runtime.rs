//! Pods under real runtimes: containerd, called as a kubelet calls it and by `ctr`, and podman with its CNI networks;
//! with a plain host that runs Go Nebula 1.11.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use world::World;
use world::capture::Capture;
use world::chaos::{
    Kills, Random, Talker, among, certificates_are_distinct, end_all, end_instances, expose, leases, nothing_is_left,
    number, only_control_was_heard, restart_ca, seed,
};
use world::cluster::{Cluster, LIGHTHOUSE, Node, alive, binary, gone_within, links, tool};

const SOON: Duration = Duration::from_secs(15);

// How often the fake kubelet tries before the test fails.
const TRIES: u32 = 10;

/// A private containerd on one node; stopped and cleaned up on drop.
pub(crate) struct Runtime {
    pub(crate) dir: PathBuf,
}

impl Runtime {
    pub(crate) fn start(world: &World, node: &Node) -> Self {
        Self::with_pause(world, node, "while :; do /bin/busybox sleep 3600 & wait $!; done")
    }

    /// Like [`Runtime::start`], with a script that every sandbox runs from its first moment on, without quotes.
    pub(crate) fn with_pause(world: &World, node: &Node, script: &str) -> Self {
        let entry = json!(["/bin/busybox", "sh", "-c", format!(r#"trap "exit 0" TERM INT; {script}"#)]);
        let dir = node.dir.join("cri");
        std::fs::create_dir_all(dir.join("net.d")).expect("a folder for the configuration");
        std::fs::write(dir.join("net.d/10-nebula.conflist"), node.conf.to_string()).expect("write the chain");
        let images = [
            image(&dir, "pause", &["--entrypoint", &entry.to_string()]),
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
        let runtime = Self { dir };
        runtime.up(world, node, &format!("{} {}", images[0].display(), images[1].display()));
        runtime
    }

    /// Starts containerd, also after an earlier one in the same folder.
    pub(crate) fn up(&self, world: &World, node: &Node, images: &str) {
        let output = Command::new(tool("cri-up.sh"))
            .arg("start")
            .arg(&self.dir)
            .env("NODE_NS", world.namespace_of(&node.name))
            .env("CNI_BIN", node.dir.join("bin"))
            .env("IMAGES", images)
            .output()
            .expect("cri-up.sh runs");
        assert!(output.status.success(), "containerd does not start: {}", text(&output));
    }

    /// Kills containerd without a chance to clean up.
    pub(crate) fn kill(&self) -> usize {
        let pid = std::fs::read_to_string(self.dir.join("pid")).expect("a process id");
        let pid: i32 = pid.trim().parse().expect("a process id");
        let killed = end_all(&[pid]);
        assert!(gone_within(pid as u64, SOON));
        killed
    }

    pub(crate) fn cri(&self, arguments: &[&str]) -> Result<String, String> {
        let output = Command::new("/usr/bin/python3")
            .arg(tool("cri.py"))
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

    /// Creates a pod without containers, as a kubelet does on its `attempt`-th try.
    pub(crate) fn sandbox(&self, namespace: &str, name: &str, attempt: u32) -> Result<Value, String> {
        let (pod, attempt) = (format!("{namespace}/{name}/uid-{name}"), attempt.to_string());
        let said = self.cri(&["run-pod", &pod, "--attempt", &attempt])?;
        Ok(serde_json::from_str(&said).expect("cri.py prints JSON"))
    }

    /// Runs `ctr`: containers without Kubernetes, in containerd's namespace `default`.
    pub(crate) fn ctr(&self, arguments: &[&str]) -> Output {
        let socket = self.dir.join("run/containerd.sock");
        Command::new("ctr").arg("-a").arg(socket).args(arguments).output().expect("ctr runs")
    }

    /// Runs `ctr run --cni`, which looks for its configuration and its plugins in two fixed places only.
    pub(crate) fn ctr_run(&self, world: &World, node: &Node, options: &[&str], id: &str) -> Child {
        let script = "mkdir -p /opt/cni/bin /etc/cni/net.d /var/lib/cni && mount --bind \"$1\" /opt/cni/bin && \
            mount --bind \"$2\" /etc/cni/net.d && mount -t tmpfs none /var/lib/cni && shift 2 && exec ctr \"$@\"";
        Command::new("nsenter")
            .arg(format!("--net=/run/netns/{}", world.namespace_of(&node.name)))
            .args(["unshare", "--mount", "sh", "-c", script, "sh"])
            .arg(node.dir.join("bin"))
            .arg(self.dir.join("net.d"))
            .arg("-a")
            .arg(self.dir.join("run/containerd.sock"))
            .args(["run", "--cni"])
            .args(options)
            .args(["localhost/busybox:1", id, "/bin/sleep", "3600"])
            .stdin(Stdio::null())
            .spawn()
            .expect("ctr runs")
    }

    /// Starts a pod with one busybox container; returns (pod id, container id, pod addresses).
    pub(crate) fn pod(&self, name: &str) -> (String, String, Value) {
        let pod = self.sandbox("shop", name, 0).unwrap_or_else(|error| panic!("{error}"));
        let id = pod["id"].as_str().expect("a pod id").to_owned();
        let container = self
            .cri(&["run-container", &id, "main", "localhost/busybox:1", "--", "/bin/sleep", "3600"])
            .unwrap_or_else(|error| panic!("{error}"));
        (id, container, pod["ips"].clone())
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _ = Command::new(tool("cri-up.sh")).arg("stop").arg(&self.dir).output();
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
    let (of_web, of_db) = (node.status(&web), node.status(&db));
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
    only_the_nodes_links_are_left(&cluster);
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
    let overlay = node.status(&web)["overlay"][0].clone();
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

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a release build"]
fn a_container_of_ctr_gets_a_tunnel_in_the_default_namespace_and_leaves_nothing() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["enrol"] = json!({"namespaces": ["edge"], "defaultNamespace": "edge"});
    let runtime = Runtime::start(&cluster.world, &node);
    let image = runtime.dir.join("busybox.tar").display().to_string();
    assert!(runtime.ctr(&["image", "import", &image]).status.success());
    // In the foreground `ctr` itself tears down the network, without a namespace to name.
    let mut one = runtime.ctr_run(&cluster.world, &node, &[], "one");
    let status = running(&node, "default-one");
    assert_eq!(
        (&status["pod"], &status["certificate"]["name"]),
        (&json!("edge/default-one"), &json!("default-one.edge.pod"))
    );
    assert_eq!(status["groups"], json!(["ns:edge"]));
    let ping = ["task", "exec", "--exec-id", "ping", "one", "/bin/ping", "-c", "5", "-W", "1", LIGHTHOUSE];
    let said = runtime.ctr(&ping);
    assert!(said.status.success(), "{}{}", text(&said), cluster.world.all_logs());
    assert!(runtime.ctr(&["task", "kill", "-s", "SIGKILL", "one"]).status.success());
    one.wait().expect("ctr ends");
    let instance = status["pid"].as_u64().expect("a pid");
    assert!(!alive(instance) && node.leftovers().is_empty(), "{:?}", node.leftovers());

    // In the background nobody does: the instance ends with the namespace, and the next reconcile removes its records.
    let mut two = runtime.ctr_run(&cluster.world, &node, &["--detach"], "two");
    assert!(two.wait().expect("ctr ends").success());
    let instance = running(&node, "default-two")["pid"].as_u64().expect("a pid");
    assert!(runtime.ctr(&["task", "delete", "--force", "two"]).status.success());
    assert!(runtime.ctr(&["container", "delete", "two"]).status.success());
    assert!(gone_within(instance, SOON), "the instance outlives its container");
    let state = node.dir.join("state").display().to_string();
    world::run(&binary("nebula-cni-plugin").display().to_string(), &["reconcile", &state]);
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
    only_the_nodes_links_are_left(&cluster);
}

#[test]
#[ignore = "needs root, podman, runc, busybox and a release build"]
fn containers_of_podman_reach_each_other_and_leave_nothing() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "0.4.0");
    node.conf["plugins"][1]["enrol"] = json!({"defaultNamespace": "edge"});
    let podman = Podman::new(&cluster.world, &node);
    // One container with a name, and one named by podman in a way that is not valid for a pod.
    let web = podman.run(&["--name", "web"]);
    let db = podman.run(&[]);
    let (of_web, of_db) = (running(&node, &web), running(&node, &db));
    assert_eq!((&of_web["pod"], &of_web["certificate"]["name"]), (&json!("edge/web"), &json!("web.edge.pod")));
    assert_eq!(of_db["pod"], json!(format!("edge/{db}")));
    let overlay = of_db["overlay"][0].as_str().and_then(|network| network.split('/').next()).expect("an address");
    for to in [overlay, LIGHTHOUSE] {
        podman.ok(&["exec", "web", "/bin/ping", "-c", "5", "-W", "1", to]);
    }
    let netns: Vec<Value> = [&web, &db].map(|id| node.launch(id).expect("a launch file")["netns"].clone()).into();
    // A restarted container has another network namespace, and one tunnel.
    podman.ok(&["restart", "-t", "0", "web"]);
    assert!(!alive(of_web["pid"].as_u64().expect("a pid")));
    assert_eq!(running(&node, &web)["certificate"]["name"], "web.edge.pod");
    podman.ok(&["exec", "web", "/bin/ping", "-c", "5", "-W", "1", overlay]);
    let pids = [&web, &db].map(|id| running(&node, id)["pid"].as_u64().expect("a pid"));
    podman.ok(&["rm", "-f", "-t", "0", "web", &db]);
    assert!(pids.iter().all(|pid| !alive(*pid)), "an instance outlived its container");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
    assert!(netns.iter().all(|path| !Path::new(path.as_str().expect("a path")).exists()), "{netns:?}");
    only_the_nodes_links_are_left(&cluster);
}

#[test]
#[ignore = "needs root, containerd, nftables, the shared CRI tools and a release build"]
fn pods_of_containerd_that_come_and_go_among_random_kills_leave_nothing_and_say_nothing_in_clear() {
    // A sandbox takes a second, so CI runs fewer than 200; CHAOS_PODS sets the number.
    let (pods, seed) = (number("CHAOS_PODS", 16), seed());
    println!("CHAOS_PODS={pods} CHAOS_SEED={seed}");
    let (random, kills, began) = (Random::new(seed), Kills::default(), Instant::now());
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    expose(&mut node);
    node.conf["plugins"][1]["enrol"] = json!({"namespaces": ["shop"]});
    let capture = Capture::start(&cluster.world.namespace_of("n1"));
    let runtime = Runtime::start(&cluster.world, &node);
    let control = runtime.sandbox("open", "control", 0).unwrap_or_else(|error| panic!("{error}"));
    let field = |of: &Value| of.as_str().expect("a text").to_owned();
    let leak = Talker::start("control", "", &field(&control["netns"]));
    let mut waiting: Vec<String> = (0..pods).map(|n| format!("c{}-{n}", std::process::id())).collect();
    let mut live: Vec<Talker> = Vec::new();
    let mut kubelet = Kubelet { cluster, node, runtime, random, kills, netns: vec![field(&control["netns"])] };
    while !waiting.is_empty() || !live.is_empty() {
        let random = &mut kubelet.random;
        if !waiting.is_empty() && (live.len() < 3 || random.below(3) > 0) && live.len() < 20 {
            let name = waiting.swap_remove(random.below(waiting.len()));
            let pod = kubelet.run(&name);
            live.push(Talker::start(&field(&pod["id"]), &format!("uid-{name}"), &field(&pod["netns"])));
        } else {
            let pod = live.swap_remove(random.below(live.len()));
            kubelet.remove(&pod.id, pod.uid.strip_prefix("uid-").expect("a uid made of a name"));
        }
        if !live.is_empty() && kubelet.random.one_in(5) {
            let pod = &live[kubelet.random.below(live.len())].id;
            kubelet.kills.instances += end_instances(&format!("{pod}-eth0.launch"));
        }
        if kubelet.random.one_in(15) {
            restart_ca(&mut kubelet.cluster);
            kubelet.kills.cas += 1;
        }
        // With few pods, chance alone would spare it in one run of fifteen.
        if kubelet.random.one_in(12) || (waiting.is_empty() && kubelet.kills.containerds == 0) {
            kubelet.kills.containerds += kubelet.runtime.kill();
            kubelet.restart(None);
        }
        if kubelet.random.one_in(8) {
            certificates_are_distinct(&kubelet.cluster, &kubelet.node, &live);
        }
    }
    let Kubelet { cluster, node, runtime, kills, netns, .. } = kubelet;
    println!("{kills:?} in {:.0} s", began.elapsed().as_secs_f64());
    assert!(kills.containerds > 0 && kills.plugins + kills.instances + kills.cas > 0, "the seed is too kind");
    only_control_was_heard(&capture, field(&control["ips"][0]).parse().expect("an address"));
    drop(leak);
    for verb in ["stop-pod", "remove-pod"] {
        runtime.cri(&[verb, &field(&control["id"])]).unwrap_or_else(|error| panic!("{error}"));
    }
    nothing_is_left(&cluster, &node);
    let netns: Vec<_> = netns.iter().filter(|path| Path::new(path).exists()).collect();
    assert!(netns.is_empty(), "namespaces are left: {netns:?}");
}

/// Creates pods and retries until they exist, whatever is killed meanwhile.
struct Kubelet {
    cluster: Cluster,
    node: Node,
    runtime: Runtime,
    random: Random,
    kills: Kills,
    /// All network namespaces ever seen.
    netns: Vec<String>,
}

impl Kubelet {
    fn run(&mut self, name: &str) -> Value {
        let mut said = String::new();
        for attempt in 0..TRIES {
            match self.among_kills(name, true, |runtime| runtime.sandbox("shop", name, attempt)) {
                Ok(pod) => {
                    self.netns.push(pod["netns"].as_str().expect("a path").to_owned());
                    return pod;
                }
                Err(error) => said = error,
            }
            // What containerd could not undo remains for the kubelet to remove.
            for failed in self.pods().iter().filter(|pod| pod["metadata"]["name"] == name) {
                self.remove(failed["id"].as_str().expect("a pod id"), name);
            }
        }
        panic!("{name} does not start: {said}\n{}{}", self.node.instance_logs(), self.cluster.world.all_logs());
    }

    fn pods(&self) -> Vec<Value> {
        let listed = self.runtime.cri(&["pods"]).unwrap_or_else(|error| panic!("{error}"));
        listed.lines().map(|line| serde_json::from_str(line).expect("cri.py prints JSON")).collect()
    }

    fn remove(&mut self, id: &str, name: &str) {
        for verb in ["stop-pod", "remove-pod"] {
            let mut said = Ok(String::new());
            let done = (0..TRIES).any(|_| {
                said = self.among_kills(name, false, |runtime| runtime.cri(&[verb, id]));
                said.is_ok()
            });
            assert!(done, "{verb} of {name}: {said:?}");
        }
    }

    /// One call, occasionally with plugin or containerd killed in the middle of it.
    fn among_kills<T: Send>(
        &mut self,
        name: &str,
        is_new: bool,
        call: impl FnOnce(&Runtime) -> Result<T, String> + Send,
    ) -> Result<T, String> {
        let what = self.random.below(8);
        if what > 1 {
            return call(&self.runtime);
        }
        let patience = Duration::from_millis(self.random.below(60) as u64);
        let runtime = &self.runtime;
        let end = |plugins: &[i32]| if what == 0 { end_all(plugins) } else { runtime.kill() };
        let met = among(name, patience, end, || call(runtime));
        let netns = met.netns.filter(|path| !path.is_empty());
        self.netns.extend(netns.clone());
        if what == 0 {
            self.kills.plugins += met.killed;
        } else if met.killed > 0 {
            self.kills.containerds += met.killed;
            self.restart(netns.filter(|_| is_new && met.said.is_err()));
        }
        met.said
    }

    /// Starts containerd again. This version forgets a sandbox whose network it was creating when it was killed (newer
    /// ones do not), so nobody will ever call DEL for it. This function does so, as a node's operator would, and
    /// removes its `netns`.
    fn restart(&mut self, netns: Option<String>) {
        self.runtime.up(&self.cluster.world, &self.node, "");
        let known = self.pods();
        let records = self.node.leftovers().into_iter();
        let recorded =
            records.filter_map(|path| Some(path.file_name()?.to_str()?.strip_suffix("-eth0.json")?.to_owned()));
        let attached: BTreeSet<String> = recorded.chain(leases(&self.node)).collect();
        for id in attached.iter().filter(|id| known.iter().all(|pod| pod["id"] != id.as_str())) {
            self.node.chain_ok(&self.cluster.world, "del", id);
        }
        if let Some(name) = netns.as_ref().and_then(|path| Path::new(path).file_name()?.to_str()) {
            world::run("ip", &["netns", "del", name]);
        }
    }
}

/// Podman with the CNI backend on one node, with all its files in the node's folder and a plain folder as its only
/// image.
pub(crate) struct Podman {
    dir: PathBuf,
    node: String,
    network: String,
}

impl Podman {
    pub(crate) fn new(world: &World, node: &Node) -> Self {
        let dir = node.dir.join("podman");
        for folder in ["net.d", "rootfs/bin", "rootfs/proc", "rootfs/sys", "rootfs/dev", "rootfs/etc", "rootfs/tmp"] {
            std::fs::create_dir_all(dir.join(folder)).expect("a folder");
        }
        std::fs::copy("/bin/busybox", dir.join("rootfs/bin/busybox")).expect("a static busybox");
        for applet in ["sleep", "ping"] {
            std::os::unix::fs::symlink("busybox", dir.join("rootfs/bin").join(applet)).expect("a link");
        }
        std::fs::write(dir.join("net.d/10-nebula.conflist"), node.conf.to_string()).expect("write the chain");
        let path = |name: &str| dir.join(name).display().to_string();
        let plugins = node.dir.join("bin").display().to_string();
        let conf = format!(
            "[containers]\ndefault_ulimits = []\n[engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\n\
             runtime = \"runc\"\ntmp_dir = \"{}\"\n[network]\nnetwork_backend = \"cni\"\n\
             cni_plugin_dirs = [\"{plugins}\"]\nnetwork_config_dir = \"{}\"\n",
            path("tmp"),
            path("net.d"),
        );
        std::fs::write(dir.join("containers.conf"), conf).expect("write the configuration");
        Self { dir, node: world.namespace_of(&node.name), network: node.network.clone() }
    }

    /// Starts a container that sleeps; returns its id.
    pub(crate) fn run(&self, options: &[&str]) -> String {
        let rootfs = self.dir.join("rootfs").display().to_string();
        let fixed = ["--network", &self.network, "--rootfs", &rootfs, "/bin/sleep", "3600"];
        self.ok(&[&["run", "--detach"], options, &fixed].concat())
    }

    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        let output = self.call(arguments);
        assert!(output.status.success(), "podman {arguments:?}: {}", text(&output));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn call(&self, arguments: &[&str]) -> Output {
        Command::new("nsenter")
            .arg(format!("--net=/run/netns/{}", self.node))
            .args(["podman", "--storage-driver", "vfs", "--root"])
            .arg(self.dir.join("root"))
            .arg("--runroot")
            .arg(self.dir.join("runroot"))
            .args(arguments)
            .env("CONTAINERS_CONF", self.dir.join("containers.conf"))
            .stdin(Stdio::null())
            .output()
            .expect("podman runs")
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.call(&["rm", "--all", "--force", "-t", "0"]);
    }
}

/// Waits for the tunnel of a container; returns the status of its instance.
pub(crate) fn running(node: &Node, container: &str) -> Value {
    let until = Instant::now() + SOON;
    loop {
        if node.launch(container).is_some()
            && std::os::unix::net::UnixStream::connect(node.status_socket(container)).is_ok()
            && let status = node.status(container)
            && status["state"] == "running"
        {
            return status;
        }
        assert!(Instant::now() < until, "no tunnel for {container}: {}", node.instance_logs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The kernel removes links shortly after their namespace.
pub(crate) fn only_the_nodes_links_are_left(cluster: &Cluster) {
    let until = Instant::now() + SOON;
    loop {
        let left = links(&cluster.world.namespace_of("n1"));
        if left.iter().all(|link| ["lo", "eth0", "cni0"].contains(&link.as_str())) {
            return;
        }
        assert!(Instant::now() < until, "links left: {left:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A host with Go Nebula 1.11, whose certificate was signed by Go's tool with the files of our CA.
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

fn image(dir: &Path, name: &str, more: &[&str]) -> PathBuf {
    let tar = dir.join(format!("{name}.tar"));
    let output = Command::new(tool("mkimage.py"))
        .arg("-o")
        .arg(&tar)
        .args(["-n", &format!("localhost/{name}:1"), "--file", "/bin/busybox=/bin/busybox"])
        .args(more)
        .output()
        .expect("mkimage.py runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    tar
}
