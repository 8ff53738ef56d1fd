//! A real two-node cluster: API server, controllers, scheduler, kubelets and containerd. What `deploy/kubernetes` has is
//! applied with one command; pods of before and after it reach each other in their tunnels; uninstalled, it leaves nothing.
//! `./test kube` runs it where a build of Kubernetes is available.
//!
//! There is no kube-proxy and no cluster DNS: two rules and a line in `hosts` stand for them. Release 1.20 knows
//! disruption budgets as v1beta1.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::cluster::{binary, tool};

const NAMESPACE: &str = "nebula-system";

/// Two nodes; removed on drop.
struct Nodes {
    folder: tempfile::TempDir,
    prefix: String,
}

impl Nodes {
    fn start() -> Self {
        let nodes =
            Self { folder: tempfile::tempdir().expect("a folder"), prefix: format!("kn{}-", std::process::id()) };
        let pause = r#"["/bin/busybox","sh","-c","trap \"exit 0\" TERM INT; while :; do /bin/busybox sleep 3600 & wait $!; done"]"#;
        let busybox = ["--file", "/bin/busybox=/bin/busybox"];
        let images = [
            nodes.image("localhost/pause:1", &[&busybox[..], &["--entrypoint", pause]].concat()),
            nodes.image("localhost/busybox:1", &[&busybox[..], &["--busybox", "--dir", "/tmp"]].concat()),
            nodes.program("nebula-ca", &["nebula-ca"]),
            nodes.program("nebula", &["nebula", "nebula-enrol", "nebula-ctl"]),
            nodes.program("nebula-cni-agent", &["nebula-cni-agent", "nebula-cni-plugin", "nebula-cni-instance"]),
        ];
        let started =
            nodes.tool("start").env("IMAGES", images.map(|image| image.display().to_string()).join(" ")).output();
        let started = started.expect("kube-nodes.sh runs");
        assert!(started.status.success(), "the nodes do not start: {}", text(&started));
        nodes
    }

    /// An image of these programs; the first is what it starts.
    fn program(&self, name: &str, programs: &[&str]) -> PathBuf {
        let files = programs
            .iter()
            .flat_map(|program| ["--file".to_owned(), format!("{}=/{program}", binary(program).display())]);
        let files: Vec<String> = files.collect();
        let entry = json!([format!("/{}", programs[0])]).to_string();
        let mut words: Vec<&str> = files.iter().map(String::as_str).collect();
        words.extend(["--entrypoint", &entry]);
        self.image(&format!("docker.io/library/{name}:{}", env!("CARGO_PKG_VERSION")), &words)
    }

    fn image(&self, name: &str, words: &[&str]) -> PathBuf {
        let file = self.folder.path().join(name.replace(['/', ':'], "-") + ".tar");
        let mut made = Command::new("/usr/bin/python3");
        made.arg(tool("mkimage.py")).arg("-o").arg(&file).args(["-n", name]).args(words);
        let made = made.output().expect("mkimage.py runs");
        assert!(made.status.success(), "{name}: {}", text(&made));
        file
    }

    fn tool(&self, verb: &str) -> Command {
        let mut command = Command::new(tool("kube-nodes.sh"));
        command.arg(verb).arg(self.folder.path()).env("PREFIX", &self.prefix);
        command
    }

    fn try_kubectl(&self, words: &[&str]) -> Output {
        self.tool("run").arg("kubectl").args(words).output().expect("kubectl runs")
    }

    fn kubectl(&self, words: &[&str]) -> String {
        let output = self.try_kubectl(words);
        assert!(output.status.success(), "kubectl {words:?}: {}\n{}", text(&output), self.state());
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn apply(&self, name: &str, manifest: &str) {
        let file = self.folder.path().join(name);
        std::fs::write(&file, manifest).expect("write the manifest");
        self.kubectl(&["apply", "-f", &file.display().to_string()]);
    }

    fn on(&self, node: u8, words: &[&str]) -> Output {
        self.tool("node").arg(node.to_string()).args(words).output().expect("a command on a node runs")
    }

    /// Waits until `done` holds, at most `limit`; returns how long it took.
    fn until(&self, what: &str, limit: Duration, mut done: impl FnMut() -> bool) -> Duration {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < limit, "{what} within {limit:?}: no\n{}", self.state());
            std::thread::sleep(Duration::from_millis(200));
        }
        start.elapsed()
    }

    /// What to read when something does not come.
    fn state(&self) -> String {
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
    fn pod(&self, namespace: &str, name: &str, node: &str) {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": namespace, "name": name},
            "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
                     "containers": [{"name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
                                     "command": ["sleep", "3600"]}]},
        });
        self.apply(&format!("{name}.json"), &pod.to_string());
    }

    fn status(&self, namespace: &str, name: &str) -> Value {
        let said = self.kubectl(&["get", "pod", "-n", namespace, name, "-o", "json"]);
        serde_json::from_str::<Value>(&said).expect("JSON")["status"].take()
    }

    fn wait_for_pod(&self, namespace: &str, name: &str) -> Duration {
        self.until(name, Duration::from_secs(60), || self.status(namespace, name)["phase"] == "Running")
    }

    /// The pod's overlay address, once it has one.
    fn overlay(&self, namespace: &str, name: &str) -> Option<String> {
        let said =
            self.try_kubectl(&["exec", "-n", namespace, name, "--", "ip", "-4", "-o", "addr", "show", "nebula0"]);
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let (_, rest) = said.split_once("inet ")?;
        Some(rest.split('/').next()?.to_owned())
    }

    fn ping(&self, namespace: &str, name: &str, address: &str) -> bool {
        self.try_kubectl(&["exec", "-n", namespace, name, "--", "ping", "-c", "1", "-W", "5", address]).status.success()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let _ = self.tool("stop").output();
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The manifests as `kubectl apply -k deploy/kubernetes` has them, for release 1.20 and with the namespace `shop` enrolled.
fn manifests() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes");
    let built = Command::new("kubectl").arg("kustomize").arg(folder).output().expect("kubectl runs");
    assert!(built.status.success(), "{}", text(&built));
    let built = String::from_utf8(built.stdout).expect("text");
    let with_shop = built.replace("\"namespaces\": []", "\"namespaces\": [\"shop\"]");
    assert_ne!(with_shop, built, "agent.json has no empty list of namespaces");
    with_shop.replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n")
}

#[test]
#[ignore = "needs root, containerd, etcd, a release build and a build of Kubernetes"]
fn one_command_installs_a_cluster_whose_pods_old_and_new_have_tunnels_and_another_removes_it() {
    let nodes = Nodes::start();
    for namespace in ["shop", "other"] {
        nodes.kubectl(&["create", "namespace", namespace]);
    }
    // Pods from before: one of them is to be enrolled.
    nodes.until("accounts", Duration::from_secs(30), || {
        nodes.try_kubectl(&["get", "sa", "-n", "shop", "default"]).status.success()
    });
    nodes.pod("shop", "before", "test-node");
    nodes.pod("other", "plain", "node2");
    nodes.wait_for_pod("shop", "before");
    nodes.wait_for_pod("other", "plain");

    // What a cluster has and this one has not: a volume, DNS, kube-proxy.
    let volume = nodes.folder.path().join("volume");
    std::fs::create_dir(&volume).expect("a folder");
    std::os::unix::fs::chown(&volume, Some(65532), Some(65532)).expect("chown");
    nodes.apply(
        "volume.json",
        &json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "ca"},
            "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": volume}},
        })
        .to_string(),
    );

    let start = Instant::now();
    nodes.apply("nebula.yaml", &manifests());
    let service = nodes.kubectl(&["get", "service", "-n", NAMESPACE, "nebula-ca", "-o", "jsonpath={.spec.clusterIP}"]);
    let names = json!({"spec": {"template": {"spec": {"hostAliases": [{"ip": service, "hostnames": ["nebula-ca.nebula-system.svc"]}]}}}});
    nodes.kubectl(&["patch", "statefulset", "-n", NAMESPACE, "nebula-lighthouse", "-p", &names.to_string()]);
    let mut endpoint = String::new();
    nodes.until("the CA's address", Duration::from_secs(60), || {
        let of_ca = [
            "get",
            "pods",
            "-n",
            NAMESPACE,
            "-l",
            "app.kubernetes.io/name=nebula-ca",
            "-o",
            "jsonpath={.items[*].status.podIP}",
        ];
        endpoint = nodes.kubectl(&of_ca);
        !endpoint.is_empty()
    });
    let proxied =
        nodes.tool("service").args([format!("{service}:8443"), format!("{endpoint}:8443")]).output().expect("it runs");
    assert!(proxied.status.success(), "{}", text(&proxied));

    for (kind, name) in
        [("deployment", "nebula-ca"), ("statefulset", "nebula-lighthouse"), ("daemonset", "nebula-cni-agent")]
    {
        let (object, left) = (format!("{kind}/{name}"), Duration::from_secs(120).saturating_sub(start.elapsed()));
        let said = nodes.try_kubectl(&[
            "rollout",
            "status",
            "-n",
            NAMESPACE,
            &object,
            &format!("--timeout={}s", left.as_secs()),
        ]);
        assert!(said.status.success(), "{object}: {}\n{}", text(&said), nodes.state());
    }
    println!("from the command to all ready: {:.1} s", start.elapsed().as_secs_f64());

    // Attached in place: the same container goes on.
    let before = nodes.until("the pod from before has a tunnel", Duration::from_secs(30), || {
        nodes.overlay("shop", "before").is_some()
    });
    println!("the pod from before has its tunnel {:.1} s later", before.as_secs_f64());
    let restarts = |name| nodes.status("shop", name)["containerStatuses"][0]["restartCount"].clone();
    assert_eq!(restarts("before"), 0);

    // New ones, on both nodes.
    for (name, node) in [("web", "test-node"), ("db", "node2")] {
        nodes.pod("shop", name, node);
    }
    for name in ["web", "db"] {
        println!("pod {name} runs after {:.1} s", nodes.wait_for_pod("shop", name).as_secs_f64());
    }
    let address =
        |name| nodes.overlay("shop", name).unwrap_or_else(|| panic!("{name} has no tunnel\n{}", nodes.state()));
    for (from, to) in [("web", "db"), ("db", "before"), ("before", "web")] {
        assert!(nodes.ping("shop", from, &address(to)), "{from} does not reach {to}\n{}", nodes.state());
    }
    assert_eq!(nodes.overlay("other", "plain"), None);

    // A deleted pod goes as without us, and another takes its name.
    nodes.kubectl(&["delete", "pod", "-n", "shop", "db", "--timeout=30s"]);
    nodes.pod("shop", "db", "node2");
    nodes.wait_for_pod("shop", "db");
    assert!(nodes.ping("shop", "web", &address("db")), "the new pod is not reached\n{}", nodes.state());

    // Uninstalled: enrolled pods go first, as the documents say.
    for name in ["web", "db", "before"] {
        nodes.kubectl(&["delete", "pod", "-n", "shop", name, "--timeout=30s"]);
    }
    nodes.kubectl(&["delete", "daemonset", "-n", NAMESPACE, "nebula-cni-agent", "--timeout=30s"]);
    let uninstall = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/uninstall.yaml");
    let uninstall = std::fs::read_to_string(uninstall)
        .expect("the manifest")
        .replace("registry.k8s.io/pause:3.10", "localhost/pause:1");
    nodes.apply("uninstall.yaml", &uninstall);
    let done =
        nodes.try_kubectl(&["rollout", "status", "-n", NAMESPACE, "daemonset/nebula-cni-uninstall", "--timeout=60s"]);
    assert!(done.status.success(), "{}\n{}", text(&done), nodes.state());
    for node in [1, 2] {
        let places = ["/etc/cni", "/opt/cni", "/run"];
        // The images, and the containers of the CA and the lighthouses, which are not uninstalled by this.
        let but = ["-path", "/run/containerd", "-prune", "-o", "-name", "*nebula*", "-print"];
        let left = text(&nodes.on(node, &[&["find"], &places[..], &but[..]].concat()));
        assert_eq!(left, "", "node {node} still has these");
    }
    // Pods start as before the installation.
    nodes.pod("shop", "after", "node2");
    nodes.wait_for_pod("shop", "after");
    assert_eq!(nodes.overlay("shop", "after"), None);
}
