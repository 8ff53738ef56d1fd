//! A sidecar under a real containerd: an init container with `restartPolicy: Always` runs before all others of its
//! pod and is restarted alone (Kubernetes 1.29 on). For a runtime it is a container like any other.

use crate::world;

use std::time::Duration;

use serde_json::Value;
use world::cluster::{Cluster, Node};

use super::runtime::Runtime;

const SIDECAR: &str = "sidecar";

struct Pod<'a> {
    runtime: &'a Runtime,
    node: &'a Node,
    id: String,
}

impl Pod<'_> {
    fn status(&self) -> Value {
        self.node.status(&self.id)
    }

    /// Starts a container, as a kubelet does on its `attempt`-th try.
    fn start(&self, name: &str, attempt: u32, script: &str) -> String {
        let attempt = attempt.to_string();
        let words = ["run-container", &self.id, name, "localhost/busybox:1", "--attempt", &attempt, "--"];
        let words = [words.as_slice(), &["/bin/sh", "-c", script]].concat();
        self.runtime.cri(&words).unwrap_or_else(|error| panic!("{error}"))
    }

    fn exec(&self, container: &str, words: &[&str]) -> String {
        let words = [["exec", container, "--"].as_slice(), words].concat();
        self.runtime.cri(&words).unwrap_or_else(|error| panic!("{error}\n{}", self.node.instance_logs()))
    }

    /// Waits until a container's script has sent its first packets, and asserts that all were answered.
    fn assert_first_packets(&self, container: &str) {
        let script = "until [ -s /tmp/done ]; do sleep 0.05; done; cat /tmp/said /tmp/done";
        let said = self.exec(container, &["/bin/sh", "-c", script]);
        let logs = self.node.instance_logs();
        assert!(said.contains("2 packets received") && said.ends_with("code 0"), "{said}\n{logs}");
    }
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a release build"]
fn a_sidecar_has_the_tunnel_at_its_first_instruction_and_is_restarted_without_another_tunnel() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    let runtime = Runtime::start(&cluster.world, &node);
    let (db, ..) = runtime.pod("db");
    let peer = node.overlay(&db);
    let sandbox = runtime.sandbox("shop", "web", 0).unwrap_or_else(|error| panic!("{error}"));
    let id = sandbox["id"].as_str().expect("a pod id").to_owned();
    let web = Pod { runtime: &runtime, node: &node, id };
    // The first packet waits for the handshake; none may be lost.
    let script = format!("/bin/ping -c 2 -W 5 {peer} >/tmp/said 2>&1; echo code $? >/tmp/done; exec /bin/sleep 3600");
    let first = web.start(SIDECAR, 0, &script);
    let main = web.start("main", 0, "exec /bin/sleep 3600");
    web.assert_first_packets(&first);
    let before = web.status();

    runtime.cri(&["stop", &first]).unwrap_or_else(|error| panic!("{error}"));
    let ping = ["/bin/ping", "-c", "1", "-W", "5", peer.as_str()];
    web.exec(&main, &ping);
    let second = web.start(SIDECAR, 1, &script);
    web.assert_first_packets(&second);
    web.exec(&main, &ping);
    let after = web.status();
    for key in ["pid", "overlay", "certificate"] {
        assert_eq!(after[key], before[key], "{key}");
    }

    // The kubelet ends sidecars last.
    for container in [&main, &second] {
        runtime.cri(&["stop", container]).unwrap_or_else(|error| panic!("{error}"));
    }
    let pid = after["pid"].as_u64().expect("a process id");
    for verb in ["stop-pod", "remove-pod"] {
        runtime.cri(&[verb, &web.id, &db]).unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(world::cluster::gone_within(pid, Duration::from_secs(5)), "the instance outlived its pod");
    assert_eq!(node.leftovers(), Vec::<std::path::PathBuf>::new());
}
