//! A real two-node cluster: API server, controllers, scheduler, kubelets and containerd, with kube-proxy on request.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::cluster::{binary, tool};

/// The namespace of the chart.
pub const NAMESPACE: &str = "nebula-system";

/// Of `kubectl delete`. The kubelet of 1.20 keeps a deleted pod until its sandbox is removed. If it sees the sandbox
/// end later than the container, the garbage collection removes it, once a minute (kubernetes/kubernetes#97288,
/// mended in later releases).
pub const DELETED_WITHIN: &str = "--timeout=75s";

/// Of a rollout that waits for deleted pods, as that of a stateful set does: their minute, and the start of the new
/// ones.
pub const REPLACED_WITHIN: Duration = Duration::from_secs(135);

/// Two nodes, `test-node` (1, 192.0.2.10) and `node2` (2, 192.0.2.11); removed on drop.
pub struct Nodes {
    pub folder: tempfile::TempDir,
    pub has_proxy: bool,
    prefix: String,
}

impl Nodes {
    /// Without kube-proxy: `service` of `kube-nodes.sh` stands for it.
    pub fn start() -> Self {
        Self::begin(false, true, &[])
    }

    /// With kube-proxy; `files` are in the image of busybox, as SOURCE=DESTINATION.
    pub fn with_proxy(files: &[String]) -> Self {
        Self::begin(true, true, files)
    }

    /// With kube-proxy, and without any network for pods: the nodes are not ready.
    pub fn without_network(files: &[String]) -> Self {
        Self::begin(true, false, files)
    }

    fn begin(has_proxy: bool, has_network: bool, files: &[String]) -> Self {
        let prefix = format!("kn{}-{}-", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        let nodes = Self { folder: tempfile::tempdir().expect("a folder"), has_proxy, prefix };
        let pause = r#"["/bin/busybox","sh","-c","trap \"exit 0\" TERM INT; while :; do /bin/busybox sleep 3600 & wait $!; done"]"#;
        let busybox = ["--file", "/bin/busybox=/bin/busybox"];
        let further: Vec<&str> = files.iter().flat_map(|file| ["--file", file]).collect();
        let images = [
            nodes.image("localhost/pause:1", &[&busybox[..], &["--entrypoint", pause]].concat()),
            nodes.image("localhost/busybox:1", &[&busybox[..], &["--busybox", "--dir", "/tmp"], &further[..]].concat()),
            nodes.image(
                "localhost/kubectl:1",
                &["--file", "/usr/bin/kubectl=/kubectl", "--entrypoint", r#"["/kubectl"]"#],
            ),
        ];
        let programs = nodes.programs(env!("CARGO_PKG_VERSION"), |name| binary(name).display().to_string());
        let images = images.into_iter().chain(programs);
        let images: Vec<String> = images.map(|image| image.display().to_string()).collect();
        let mut start = nodes.tool("start");
        start.env("IMAGES", images.join(" "));
        if has_proxy {
            start.env("PROXY", "1");
        }
        if !has_network {
            start.env("NETWORK", "none");
        }
        let started = start.output().expect("kube-nodes.sh runs");
        assert!(started.status.success(), "the nodes do not start: {}", text(&started));
        nodes
    }

    /// The images of a release; `at` says where each program is.
    fn programs(&self, tag: &str, at: impl Fn(&str) -> String) -> Vec<PathBuf> {
        let image = |(name, programs): (&str, &[&str])| {
            let files: Vec<String> = programs
                .iter()
                .flat_map(|program| ["--file".to_owned(), format!("{}=/{program}", at(program))])
                .collect();
            // The first is what it starts.
            let entry = json!([format!("/{}", programs[0])]).to_string();
            let mut words: Vec<&str> = files.iter().map(String::as_str).collect();
            words.extend(["--entrypoint", &entry, "--env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin:/"]);
            self.image(&format!("docker.io/library/{name}:{tag}"), &words)
        };
        IMAGES.map(image).into()
    }

    /// Gives both nodes the images of another release.
    pub fn import(&self, tag: &str, at: impl Fn(&str) -> String) {
        for image in self.programs(tag, at) {
            let image = image.display().to_string();
            for node in [1, 2] {
                let words =
                    ["ctr", "-a", "/run/containerd/run/containerd.sock", "-n", "k8s.io", "images", "import", &image];
                let imported = self.on(node, &words);
                assert!(imported.status.success(), "{image}: {}", text(&imported));
            }
        }
    }

    fn image(&self, name: &str, words: &[&str]) -> PathBuf {
        let file = self.folder.path().join(name.replace(['/', ':'], "-") + ".tar");
        let mut made = Command::new("/usr/bin/python3");
        made.arg(tool("mkimage.py")).arg("-o").arg(&file).args(["-n", name]).args(words);
        let made = made.output().expect("mkimage.py runs");
        assert!(made.status.success(), "{name}: {}", text(&made));
        file
    }

    pub fn tool(&self, verb: &str) -> Command {
        let mut command = Command::new(tool("kube-nodes.sh"));
        command.arg(verb).arg(self.folder.path()).env("PREFIX", &self.prefix);
        command
    }

    pub fn try_kubectl(&self, words: &[&str]) -> Output {
        self.tool("run").arg("kubectl").args(words).output().expect("kubectl runs")
    }

    pub fn kubectl(&self, words: &[&str]) -> String {
        let output = self.try_kubectl(words);
        assert!(output.status.success(), "kubectl {words:?}: {}\n{}", text(&output), self.state());
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    pub fn apply(&self, name: &str, manifest: &str) {
        let file = self.folder.path().join(name);
        std::fs::write(&file, manifest).expect("write the manifest");
        self.kubectl(&["apply", "-f", &file.display().to_string()]);
    }

    pub fn on(&self, node: u8, words: &[&str]) -> Output {
        self.tool("node").arg(node.to_string()).args(words).output().expect("a command on a node runs")
    }

    /// Runs a script on a node; it must succeed.
    pub fn shell(&self, node: u8, script: &str) {
        let done = self.on(node, &["sh", "-c", script]);
        assert!(done.status.success(), "{script}: {}", text(&done));
    }

    /// Waits until `done` holds, at most `limit`; returns how long it took.
    pub fn until(&self, what: &str, limit: Duration, mut done: impl FnMut() -> bool) -> Duration {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < limit, "{what} within {limit:?}: no\n{}", self.state());
            std::thread::sleep(Duration::from_millis(200));
        }
        start.elapsed()
    }

    /// What to read when something does not come.
    pub fn state(&self) -> String {
        let ask = |words: &[&str]| text(&self.try_kubectl(words));
        let logs = |name: &str| {
            ask(&[
                "logs",
                "-n",
                NAMESPACE,
                "-l",
                &format!("app.kubernetes.io/name={name}"),
                "--all-containers",
                "--tail=15",
                "--prefix",
            ])
        };
        [
            ask(&["get", "pods", "-A", "-o", "wide"]),
            ask(&["get", "events", "-A", "--sort-by=.lastTimestamp"])
                .lines()
                .rev()
                .take(25)
                .collect::<Vec<_>>()
                .join("\n"),
            logs("nebula-ca"),
            logs("nebula-lighthouse"),
            logs("nebula-cni-agent"),
            logs("nebula-cni-uninstall"),
        ]
        .join("\n---\n")
    }

    /// A pod that sleeps, on a node.
    pub fn pod(&self, namespace: &str, name: &str, node: &str) {
        self.pod_that_runs(namespace, name, node, &["sleep", "3600"]);
    }

    /// A pod that runs a command, on a node.
    pub fn pod_that_runs(&self, namespace: &str, name: &str, node: &str, command: &[&str]) {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": namespace, "name": name},
            "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
                     "containers": [{"name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
                                     "command": command}]},
        });
        self.apply(&format!("{name}.json"), &pod.to_string());
    }

    pub fn status(&self, namespace: &str, name: &str) -> Value {
        let said = self.kubectl(&["get", "pod", "-n", namespace, name, "-o", "json"]);
        serde_json::from_str::<Value>(&said).expect("JSON")["status"].take()
    }

    pub fn wait_for_pod(&self, namespace: &str, name: &str) -> Duration {
        self.until(name, Duration::from_secs(60), || self.status(namespace, name)["phase"] == "Running")
    }

    /// The pod's overlay address; `None` if the pod has no device of ours. A kubelet that does not answer is asked
    /// again.
    pub fn overlay(&self, namespace: &str, name: &str) -> Option<String> {
        let words = ["exec", "-n", namespace, name, "--", "ip", "-4", "-o", "addr", "show", "nebula0"];
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let output = self.try_kubectl(&words);
            let said = text(&output);
            if let Some((_, rest)) = said.split_once("inet ") {
                return Some(rest.split('/').next()?.to_owned());
            }
            if said.contains("can't find device") {
                return None;
            }
            assert!(Instant::now() < until, "{namespace}/{name}: {}, {said}\n{}", output.status, self.state());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// The volume of the CA, which a cluster has a provisioner for.
    pub fn volume(&self) {
        let volume = self.folder.path().join("volume");
        std::fs::create_dir(&volume).expect("a folder");
        std::os::unix::fs::chown(&volume, Some(65532), Some(65532)).expect("chown");
        self.apply(
            "volume.json",
            &json!({
                "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "ca"},
                "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": volume}},
            })
            .to_string(),
        );
    }

    /// Waits until everything that the chart makes is ready.
    pub fn wait_for_parts(&self, until: Instant) {
        for object in ["deployment/nebula-ca", "statefulset/nebula-lighthouse", "daemonset/nebula-cni-agent"] {
            self.wait_for_rollout(NAMESPACE, object, until.saturating_duration_since(Instant::now()));
        }
    }

    pub fn wait_for_rollout(&self, namespace: &str, object: &str, within: Duration) {
        let timeout = format!("--timeout={}s", within.as_secs().max(1));
        let said = self.try_kubectl(&["rollout", "status", "-n", namespace, object, &timeout]);
        assert!(said.status.success(), "{object}: {}\n{}", text(&said), self.state());
    }

    /// What our programs left on a node, but for the images, and the containers of those that are not removed from
    /// nodes.
    pub fn left_on(&self, node: u8) -> String {
        let places = ["/etc/cni", "/opt/cni", "/run"];
        let but = ["-path", "/run/containerd", "-prune", "-o", "-name", "*nebula*", "-print"];
        text(&self.on(node, &[&["find"], &places[..], &but[..]].concat()))
    }

    /// The network namespace of a node, as `ip netns` calls it.
    pub fn namespace_of(&self, node: u8) -> String {
        format!("{}{node}", self.prefix)
    }

    /// The first process of a node, in whose mounts the paths of its files and namespaces are.
    fn first_process(&self, node: u8) -> String {
        let file = self.folder.path().join(format!("node{node}/cri/pid"));
        let outer = std::fs::read_to_string(file).expect("the node runs");
        let found = Command::new("pgrep").args(["-P", outer.trim()]).output().expect("pgrep runs");
        String::from_utf8_lossy(&found.stdout).trim().to_owned()
    }

    /// Where the files of a node are for this process.
    pub fn root_of(&self, node: u8) -> PathBuf {
        format!("/proc/{}/root", self.first_process(node)).into()
    }

    /// The network namespaces of the pods of both nodes, by NAMESPACE/NAME.
    pub fn pod_networks(&self) -> BTreeMap<String, PathBuf> {
        let mut found = BTreeMap::new();
        for node in [1, 2] {
            let socket = self.folder.path().join(format!("node{node}/cri/run/containerd.sock")).display().to_string();
            let ask = |words: &[&str]| -> Vec<Value> {
                let said =
                    Command::new("/usr/bin/python3").arg(tool("cri.py")).args(["-s", &socket]).args(words).output();
                let said = said.expect("cri.py runs").stdout;
                String::from_utf8_lossy(&said).lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
            };
            let root = self.root_of(node).display().to_string();
            for sandbox in ask(&["pods"]).iter().filter(|sandbox| sandbox.get("state").is_none()) {
                let Some(id) = sandbox["id"].as_str() else { continue };
                for pod in ask(&["pod", id]) {
                    let Some(netns) = pod["netns"].as_str() else { continue };
                    let of = |key: &str| pod["metadata"][key].as_str().unwrap_or_default().to_owned();
                    let path = format!("{root}{}", netns.replace("/var/run/", "/run/"));
                    found.insert(format!("{}/{}", of("namespace"), of("name")), path.into());
                }
            }
        }
        found
    }

    pub fn ping(&self, namespace: &str, name: &str, address: &str) -> bool {
        self.try_kubectl(&["exec", "-n", namespace, name, "--", "ping", "-c", "1", "-W", "5", address]).status.success()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let _ = self.tool("stop").output();
    }
}

/// What a command said.
pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What the chart's images are called, and the programs in each.
const IMAGES: [(&str, &[&str]); 3] = [
    ("nebula-ca", &["nebula-ca"]),
    ("nebula", &["nebula", "nebula-enrol", "nebula-ctl"]),
    ("nebula-cni-agent", &["nebula-cni-agent", "nebula-cni-plugin", "nebula-cni-instance"]),
];
static STARTED: AtomicU32 = AtomicU32::new(0);
