//! The node agent keeps pods of a real containerd protected: those that ran before it came, and those that lost their
//! instance, their record or their device. No Kubernetes is involved.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::pods::runtime::Runtime;
use crate::world::World;
use crate::world::chaos::nothing_is_left;
use crate::world::cluster::{Cluster, LIGHTHOUSE, Node, alive, answer_at, binary, links};

const SOON: Duration = Duration::from_secs(20);
/// The longest time until a pod that needs a tunnel has one.
const ATTACHED_WITHIN: Duration = Duration::from_secs(5);

/// A node whose containerd first runs without our plugin, and an agent.
pub(crate) struct Site {
    agent: Option<Agent>,
    runtime: Runtime,
    node: Node,
    cluster: Cluster,
}

impl Site {
    fn new() -> Self {
        let mut cluster = Cluster::new();
        let node = cluster.node("n1", "1.0.0");
        Self::on(cluster, node)
    }

    /// Like [`Site::new`], on a node whose first process is a systemd, which runs the instances.
    pub(crate) fn under_systemd() -> Self {
        let mut cluster = Cluster::new();
        let node = cluster.node_of_systemd("n1", "1.0.0");
        Self::on(cluster, node)
    }

    fn on(cluster: Cluster, mut node: Node) -> Self {
        // A program of its own, which tests may replace.
        let program = node.dir.join("instance");
        std::fs::copy(binary("nebula-cni-instance"), &program).unwrap();
        node.conf["plugins"][1]["instance"] = program.display().to_string().into();
        let ours = node.conf.clone();
        node.conf["plugins"].as_array_mut().unwrap().pop();
        let runtime = Runtime::start(&cluster.world, &node);
        node.conf = ours;
        Self { agent: None, runtime, node, cluster }
    }

    /// Puts our plugin into the chain, as the agent does on a node.
    fn install(&self) {
        let file = self.runtime.dir.join("net.d/10-nebula.conflist");
        let new = file.with_extension("tmp");
        std::fs::write(&new, self.node.conf.to_string()).unwrap();
        std::fs::rename(new, file).unwrap();
        self.until("containerd loads the chain", || {
            self.runtime.cri(&["status"]).is_ok_and(|said| said.contains("nebula-cni-plugin"))
        });
    }

    fn start_agent(&mut self) {
        self.agent = Some(Agent::start(&self.cluster.world, &self.node, &self.runtime));
    }

    /// The status of the instance of a sandbox, if it answers.
    fn status(&self, sandbox: &str) -> Option<Value> {
        let socket = self.node.launch(sandbox)?["status_socket"].as_str()?.to_owned();
        answer_at(Path::new(&socket)).ok()
    }

    fn is_protected(&self, sandbox: &str) -> bool {
        self.status(sandbox).is_some_and(|status| status["state"] == "running")
    }

    fn pid(&self, sandbox: &str) -> u64 {
        self.status(sandbox).and_then(|status| status["pid"].as_u64()).unwrap_or_default()
    }

    /// Waits; returns how long it took.
    fn until(&self, what: &str, done: impl Fn() -> bool) -> Duration {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < SOON, "{what}\n{}\n{}", self.logs(), self.node.instance_logs());
            thread::sleep(Duration::from_millis(20));
        }
        began.elapsed()
    }

    fn logs(&self) -> String {
        let agent = std::fs::read_to_string(self.node.dir.join("agent.log")).unwrap_or_default();
        format!("--- agent\n{agent}\n{}", self.cluster.world.all_logs())
    }

    /// A container of one pod reaches an overlay address.
    fn ping(&self, container: &str, to: &str) {
        let ping = ["exec", container, "--", "/bin/ping", "-c", "1", "-W", "1", to];
        assert!((0..15).any(|_| self.runtime.cri(&ping).is_ok()), "no reply from {to}\n{}", self.logs());
    }

    fn overlay(&self, sandbox: &str) -> String {
        let status = self.status(sandbox).unwrap();
        status["overlay"][0].as_str().unwrap().split('/').next().unwrap().to_owned()
    }

    /// The value of a metric of the agent.
    fn metric(&self, name: &str) -> Option<f64> {
        let ask = "exec 3<>/dev/tcp/127.0.0.1/9476; printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3";
        let page = self.cluster.world.exec(&self.node.name, &["bash", "-c", ask]);
        let page = String::from_utf8_lossy(&page.stdout).into_owned();
        page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }

    fn remove(&self, sandbox: &str) {
        for verb in ["stop-pod", "remove-pod"] {
            self.runtime.cri(&[verb, sandbox]).unwrap_or_else(|error| panic!("{error}\n{}", self.logs()));
        }
    }

    /// The files by which DEL tells the agent whose certificates to give back.
    fn notes(&self) -> usize {
        std::fs::read_dir(self.node.records().join("released")).map_or(0, Iterator::count)
    }
}

struct Agent(Child);

impl Agent {
    fn start(world: &World, node: &Node, runtime: &Runtime) -> Self {
        let chain = node.dir.join("agent.conflist");
        std::fs::write(&chain, node.conf.to_string()).unwrap();
        let log = std::fs::File::create(node.dir.join("agent.log")).unwrap();
        let child = Command::new("nsenter")
            .arg(format!("--net=/run/netns/{}", world.namespace_of(&node.name)))
            .arg(binary("nebula-cni-agent"))
            .args(["keep", "--listen", "127.0.0.1:9476", "--chain"])
            .arg(chain)
            .arg("--runtime")
            .arg(runtime.dir.join("run/containerd.sock"))
            .arg("--plugin")
            .arg(node.dir.join("bin/nebula-cni-plugin"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self(child)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build"]
fn pods_that_ran_before_the_agent_get_a_tunnel_without_a_restart_and_leave_nothing() {
    attach_running_pods(Site::new());
}

pub(crate) fn attach_running_pods(mut site: Site) {
    let pods = ["web", "db"].map(|name| site.runtime.pod(name));
    let running = |site: &Site| {
        let listed = site.runtime.cri(&["containers"]).unwrap();
        listed.lines().map(str::to_owned).collect::<BTreeSet<String>>()
    };
    let before = running(&site);
    assert_eq!(site.node.leftovers(), Vec::<PathBuf>::new(), "they run without us");
    site.install();
    site.start_agent();
    let took = site.until("the pods are attached", || pods.iter().all(|(pod, ..)| site.is_protected(pod)));
    println!("two running pods were attached within {took:?} of the agent's start");
    assert!(took < ATTACHED_WITHIN, "{took:?}");
    assert_eq!(running(&site), before, "the same containers run");
    let [(web, web_main, _), (db, ..)] = &pods;
    site.ping(web_main, &site.overlay(db));
    site.ping(web_main, LIGHTHOUSE);
    site.until("nothing is unprotected", || site.metric("nebula_cni_unprotected_pods ") == Some(0.0));
    assert_eq!(site.metric("nebula_cni_pods{state=\"protected\"} "), Some(2.0));
    assert_eq!(site.metric("nebula_cni_repairs_total{kind=\"attach\",result=\"done\"} "), Some(2.0));
    site.until("the numbers of an instance", || {
        site.metric("nebula_cni_pod_certificate_ttl_seconds{namespace=\"shop\",pod=\"web\"} ")
            .is_some_and(|left| left > 0.0)
    });

    // A pod that starts now gets its tunnel from ADD, and the agent leaves it alone.
    let late = site.runtime.sandbox("shop", "late", 0).unwrap()["id"].as_str().unwrap().to_owned();
    assert!(site.is_protected(&late));
    let pid = site.pid(&late);
    thread::sleep(Duration::from_secs(3));
    assert_eq!(site.pid(&late), pid);

    let pids = [web, db, &late].map(|pod| site.pid(pod));
    for pod in [web, db, &late] {
        site.remove(pod);
    }
    assert!(pids.iter().all(|pid| !alive(*pid)), "an instance outlived its pod");
    site.until("the certificates are given back", || site.notes() == 0);
    assert_eq!(site.metric("nebula_cni_releases_total{result=\"done\"} "), Some(3.0), "{}", site.logs());
    drop(site.agent.take());
    nothing_is_left(&site.cluster, &site.node);
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build"]
fn what_a_pod_loses_it_gets_back() {
    give_back_what_is_lost(Site::new());
}

pub(crate) fn give_back_what_is_lost(mut site: Site) {
    site.install();
    let (pod, main, _) = site.runtime.pod("web");
    site.start_agent();
    site.until("the first look", || site.metric("nebula_cni_pods{state=\"protected\"} ") == Some(1.0));

    // The instance is killed.
    let pid = site.pid(&pod);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGKILL).unwrap();
    let took = site.until("another instance", || site.is_protected(&pod) && site.pid(&pod) != pid);
    println!("a killed instance was back after {took:?}");
    site.ping(&main, LIGHTHOUSE);

    // The record is deleted.
    let pid = site.pid(&pod);
    std::fs::remove_file(site.node.records().join(format!("{pod}-eth0.json"))).unwrap();
    let record = site.node.records().join(format!("{pod}-eth0.json"));
    let took = site.until("another record", || record.exists() && site.is_protected(&pod));
    println!("a lost record was mended after {took:?}");
    site.until("the old instance is gone", || !alive(pid));
    site.ping(&main, LIGHTHOUSE);

    // Everything of the attachment is deleted, as by a reboot of a node that keeps its pods.
    let pid = site.pid(&pod);
    for file in site.node.leftovers() {
        let _ = std::fs::remove_file(file);
    }
    site.until("all is made again", || record.exists() && site.is_protected(&pod) && site.pid(&pod) != pid);
    assert!(!alive(pid), "two instances of one pod");
    site.ping(&main, LIGHTHOUSE);
    drop(site.agent.take());
    site.remove(&pod);
    nothing_is_left(&site.cluster, &site.node);
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build"]
fn rules_that_somebody_flushed_are_put_back() {
    let mut site = Site::new();
    site.node.conf["plugins"][1]["isolate"] = true.into();
    site.install();
    let (pod, ..) = site.runtime.pod("web");
    site.start_agent();
    site.until("the first look", || site.metric("nebula_cni_pods{state=\"protected\"} ") == Some(1.0));
    let rules = || {
        let shown = site.cluster.world.exec("n1", &["nft", "list", "tables", "netdev"]);
        String::from_utf8_lossy(&shown.stdout).into_owned()
    };
    let before = rules();
    assert!(before.contains("nebula"), "{before}");
    // As `systemctl restart nftables` does. The first comparison may be just over.
    assert!(site.cluster.world.exec("n1", &["nft", "flush", "ruleset"]).status.success());
    let began = Instant::now();
    while rules() != before {
        assert!(began.elapsed() < Duration::from_secs(45), "{}\n{}", rules(), site.logs());
        thread::sleep(Duration::from_millis(100));
    }
    println!("flushed rules were back after {:?}", began.elapsed());
    drop(site.agent.take());
    site.remove(&pod);
    nothing_is_left(&site.cluster, &site.node);
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build"]
fn an_instance_that_keeps_dying_is_restarted_ever_more_slowly_and_shown() {
    let mut site = Site::new();
    site.install();
    let (pod, ..) = site.runtime.pod("web");
    site.start_agent();
    site.until("the first look", || site.metric("nebula_cni_pods{state=\"protected\"} ") == Some(1.0));
    let program = site.node.kept_program(&pod);
    let starts = site.node.dir.join("starts");
    let good = site.node.dir.join("good");
    std::fs::rename(&program, &good).unwrap();
    std::fs::write(&program, format!("#!/bin/sh\necho start >>{}\nexit 1\n", starts.display())).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(site.pid(&pod) as i32), nix::sys::signal::Signal::SIGKILL)
        .unwrap();
    site.until("the loop is seen", || site.metric("nebula_cni_pods{state=\"crash_looping\"} ") == Some(1.0));
    assert_eq!(site.metric("nebula_cni_unprotected_pods "), Some(1.0));
    thread::sleep(Duration::from_secs(10));
    let count = std::fs::read_to_string(&starts).unwrap().lines().count();
    assert!((3..=9).contains(&count), "{count} starts");
    std::fs::rename(&good, &program).unwrap();
    let began = Instant::now();
    while !site.is_protected(&pod) {
        assert!(began.elapsed() < Duration::from_secs(60), "it is not restarted any more\n{}", site.logs());
        thread::sleep(Duration::from_millis(100));
    }
    drop(site.agent.take());
    site.remove(&pod);
    nothing_is_left(&site.cluster, &site.node);
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build"]
fn fifty_running_pods_are_attached_within_ten_seconds() {
    let mut site = Site::new();
    let sandboxes: Vec<String> = (0..50)
        .map(|number| {
            site.runtime.sandbox("shop", &format!("p{number}"), 0).unwrap()["id"].as_str().unwrap().to_owned()
        })
        .collect();
    site.install();
    let began = Instant::now();
    site.start_agent();
    while !sandboxes.iter().all(|sandbox| site.is_protected(sandbox)) {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", site.logs());
        thread::sleep(Duration::from_millis(50));
    }
    let took = began.elapsed();
    println!("fifty running pods were attached within {took:?} of the agent's start");
    assert!(took < Duration::from_secs(10), "{took:?}");
    drop(site.agent.take());
    for sandbox in &sandboxes {
        site.remove(sandbox);
    }
    nothing_is_left(&site.cluster, &site.node);
    assert!(links(&site.cluster.world.namespace_of("n1")).len() <= 3);
}
