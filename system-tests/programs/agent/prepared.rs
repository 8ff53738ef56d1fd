//! The node agent beside a real containerd: it prepares a node from nothing, keeps it prepared whatever is done to it,
//! survives being killed at any moment, and leaves nothing when it is uninstalled.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::pods::runtime::Runtime;
use crate::world;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use world::chaos::{Random, number, seed};
use world::cluster::{Cluster, LIGHTHOUSE, Node, alive, binary};

const SOON: Duration = Duration::from_secs(30);
pub(crate) const STATE: &str = "/run/nebula-cni";
const PROGRAMS: [&str; 2] = ["nebula-cni-instance", "nebula-cni-plugin"];

/// Checks that no network of this machine uses `state_dir`, and removes the queue of starts that an earlier one left.
fn assert_unused(state_dir: &Path) {
    let entries = fs::read_dir(state_dir).into_iter().flatten().flatten();
    let used: Vec<_> = entries.map(|entry| entry.file_name()).filter(|name| name != ".starts").collect();
    assert!(used.is_empty(), "{}: {used:?}: is Nebula in use here, or a test still running?", state_dir.display());
    let _ = fs::remove_dir_all(state_dir);
}

/// Checks that an uninstallation left nothing to pods in the cache of libcni.
pub(crate) fn removed_everything(uninstallation: &Output) {
    let said = String::from_utf8_lossy(&uninstallation.stderr);
    assert!(uninstallation.status.success() && said.contains("everything is removed"), "{said}");
}

/// A node with a containerd, the primary plugin's configuration, and an agent that may run.
pub(crate) struct Prepared {
    // Ended before the folder goes in which it keeps its process id.
    pub(crate) runtime: Runtime,
    pub(crate) cluster: Cluster,
    pub(crate) node: Node,
    config: PathBuf,
}

impl Prepared {
    pub(crate) fn new() -> Self {
        Self::with(json!({}), Runtime::start)
    }

    /// Like [`Prepared::new`], with more keys in our chain entry.
    pub(crate) fn with(more: Value, start: impl FnOnce(&world::World, &Node) -> Runtime) -> Self {
        let mut cluster = Cluster::new();
        let node = cluster.node("n1", "1.0.0");
        Self::on(cluster, node, more, start)
    }

    /// Like [`Prepared::with`], on a node whose first process is a systemd, which runs the instances.
    pub(crate) fn under_systemd(more: Value, start: impl FnOnce(&world::World, &Node) -> Runtime) -> Self {
        let mut cluster = Cluster::new();
        let node = cluster.node_of_systemd("n1", "1.0.0");
        Self::on(cluster, node, more, start)
    }

    fn on(cluster: Cluster, mut node: Node, more: Value, start: impl FnOnce(&world::World, &Node) -> Runtime) -> Self {
        assert_unused(Path::new(STATE));
        let plugins = node.conf["plugins"].as_array_mut().expect("plugins");
        let mut entry = plugins.remove(1);
        for key in ["type", "stateDir", "ca", "instance"] {
            entry.as_object_mut().expect("an entry").remove(key);
        }
        for (key, value) in more.as_object().expect("keys") {
            entry[key] = value.clone();
        }
        for program in PROGRAMS {
            fs::remove_file(node.dir.join("bin").join(program)).expect("a link");
        }
        // Where the node's helpers look for records.
        std::os::unix::fs::symlink(STATE, node.dir.join("state")).expect("a link");
        let runtime = start(&cluster.world, &node);
        let config = json!({
            "ca": {"url": cluster.ca_url()},
            "runtimeEndpoint": format!("unix://{}", runtime.dir.join("run/containerd.sock").display()),
            "entry": entry,
        });
        let config = cluster.world.write("agent.json", &config.to_string());
        Self { runtime, cluster, node, config }
    }

    pub(crate) fn start(&mut self) {
        self.start_from(&binary("nebula-cni-agent"));
    }

    /// Starts this program of an agent, which installs the programs beside it.
    pub(crate) fn start_from(&mut self, agent: &Path) {
        let (config, token, trust) =
            (self.config(), self.cluster.ca_file("node.token"), self.cluster.ca_file("tls.crt"));
        let arguments = ["run", "--config", &config, "--token-file", &token, "--trust-file", &trust];
        self.cluster.world.start_in("agent", "n1", agent, &arguments);
    }

    pub(crate) fn stop(&mut self, signal: Signal) {
        self.cluster.world.stop("agent", signal);
    }

    pub(crate) fn config(&self) -> String {
        self.config.display().to_string()
    }

    /// The agent's answer, and whether the node is ready.
    pub(crate) fn status(&self) -> (Value, bool) {
        let agent = binary("nebula-cni-agent").display().to_string();
        let said = self.cluster.world.exec("n1", &[&agent, "status", "--json", "--config", &self.config()]);
        (serde_json::from_slice(&said.stdout).unwrap_or_default(), said.status.success())
    }

    /// What the agent says of one pod.
    fn pod_status(&self, pod: &str) -> Value {
        let agent = binary("nebula-cni-agent").display().to_string();
        let said = self.cluster.world.exec("n1", &[&agent, "pods", pod, "--config", &self.config()]);
        serde_json::from_slice(&said.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&said.stderr)))
    }

    /// Waits until the node is ready and `is_so`.
    pub(crate) fn wait(&self, what: &str, is_so: impl Fn() -> bool) {
        self.wait_for(what, || is_so() && self.status().1);
    }

    pub(crate) fn wait_for(&self, what: &str, is_so: impl Fn() -> bool) -> Duration {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < SOON, "{what}: {:#}\n{}", self.status().0, self.cluster.world.all_logs());
            thread::sleep(Duration::from_millis(20));
        }
        began.elapsed()
    }

    /// Sets a key of `agent.json`, for the next start.
    pub(crate) fn configure(&self, key: &str, value: Value) {
        let mut config: Value = serde_json::from_slice(&fs::read(&self.config).expect("agent.json")).expect("JSON");
        config[key] = value;
        fs::write(&self.config, config.to_string()).expect("write agent.json");
    }

    /// Whether the runtime loads drop-ins: containerd since 2.1, by its CNI library.
    fn loads_drop_ins(&self) -> bool {
        let said = self.runtime.cri(&["version"]).unwrap_or_else(|error| panic!("{error}"));
        let version: Value = serde_json::from_str(&said).expect("JSON");
        let numbers = version["runtime_version"].as_str().expect("a version").trim_start_matches('v').split('.');
        let numbers: Vec<u32> = numbers.map_while(|number| number.parse().ok()).collect();
        numbers >= vec![2, 1]
    }

    fn drop_in(&self) -> PathBuf {
        self.runtime.dir.join("net.d").join(&self.node.network).join("99-nebula.conf")
    }

    pub(crate) fn primary(&self) -> PathBuf {
        self.runtime.dir.join("net.d/10-nebula.conflist")
    }

    pub(crate) fn own_file(&self) -> PathBuf {
        self.runtime.dir.join(format!("net.d/00-nebula-{}.conflist", self.node.network))
    }

    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.node.dir.join("bin").join(name)
    }

    fn is_installed(&self, name: &str) -> bool {
        fs::read(self.program(name)).is_ok_and(|bytes| bytes == fs::read(binary(name)).expect("a program"))
    }

    /// Types of the plugins in our file.
    pub(crate) fn chain(&self) -> Vec<String> {
        let list: Value =
            fs::read(self.own_file()).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
        let kinds = list["plugins"].as_array().into_iter().flatten().filter_map(|plugin| plugin["type"].as_str());
        kinds.map(str::to_owned).collect()
    }

    pub(crate) fn uninstall(&self, more: &[&str]) -> std::process::Child {
        Command::new("ip")
            .args(["netns", "exec", &self.cluster.world.namespace_of("n1")])
            .arg(binary("nebula-cni-agent"))
            .args(["uninstall", "--config", &self.config()])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the uninstallation starts")
    }

    pub(crate) fn nothing_of_ours_is_left(&self) {
        let all = ["net.d", "bin"].map(|dir| {
            let dir = if dir == "bin" { self.node.dir.join(dir) } else { self.runtime.dir.join(dir) };
            fs::read_dir(dir)
                .expect("a directory")
                .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
                .collect::<Vec<_>>()
        });
        let ours: Vec<_> =
            all.concat().into_iter().filter(|name| name.contains("nebula") && name != "10-nebula.conflist").collect();
        assert_eq!(ours, Vec::<String>::new());
        assert!(!Path::new(STATE).exists(), "{STATE} is left");
    }

    /// Only one chain file, both programs, and no temporary file or mount of a killed agent.
    fn nothing_is_left_of_killed_agents(&self) {
        let names = |dir: &Path| {
            let mut names: Vec<_> = fs::read_dir(dir)
                .expect("a directory")
                .map(|e| e.expect("an entry").file_name().into_string().expect("a name"))
                .collect();
            names.retain(|name| name.contains("nebula") || name.contains(".tmp-"));
            names.sort();
            names
        };
        let own = self.own_file().file_name().expect("a name").display().to_string();
        assert_eq!(names(&self.runtime.dir.join("net.d")), [own, "10-nebula.conflist".to_owned()]);
        // The installed program may be kept under the name of what it contains, until the uninstallation.
        let mut programs = names(&self.node.dir.join("bin"));
        let content = |name: &str| fs::read(self.program(name)).expect("a program");
        let installed = content(PROGRAMS[0]);
        programs.retain(|name| !name.starts_with(".nebula-cni-instance.") || content(name) != installed);
        assert_eq!(programs, PROGRAMS);
        let agent: Vec<_> = fs::read_dir(format!("{STATE}/agent"))
            .expect("a directory")
            .map(|e| e.expect("an entry").file_name())
            .collect();
        assert_eq!(agent.len(), 3, "token, TLS roots and how far an upgrade is: {agent:?}");
        let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
        assert!(!mounts.contains("self-test"), "{mounts}");
        let is_running =
            || Command::new("pgrep").args(["-f", "agent/self-test"]).output().expect("pgrep runs").status.success();
        self.wait_for("instances of interrupted self-tests end", || !is_running());
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        self.stop(Signal::SIGTERM);
        if Path::new(STATE).exists() {
            let _ = self.uninstall(&["--force"]).wait_with_output();
            let _ = fs::remove_dir_all(STATE);
        }
    }
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build of the programs"]
fn a_node_is_made_ready_from_nothing_kept_so_and_uninstalled() {
    install_keep_and_uninstall(Prepared::new());
}

pub(crate) fn install_keep_and_uninstall(mut p: Prepared) {
    // The primary comes later.
    let primary = fs::read(p.primary()).expect("the primary");
    fs::remove_file(p.primary()).expect("remove the primary");
    p.start();
    p.wait_for("programs come before the chain", || p.status().0["self-test"]["ok"] == true);
    assert!(PROGRAMS.iter().all(|name| p.is_installed(name)));
    p.wait_for("it waits for a primary", || {
        p.status().0["chain"]["reason"].as_str().is_some_and(|reason| reason.contains("no primary"))
    });
    assert!(!p.status().1 && p.chain().is_empty());
    fs::write(p.primary(), &primary).expect("write the primary");
    p.wait("the primary came later", || p.chain() == ["bridge", "nebula-cni-plugin"]);
    let kubernetes = p.status().0["kubernetes"].clone();
    assert!(kubernetes["ok"] == false && kubernetes["reason"].as_str().is_some_and(|text| text.contains("Kubernetes")));

    // A pod gets a tunnel through it.
    let (web, main, _) = p.runtime.pod("web");
    let instance = p.node.status(&web)["pid"].as_u64().expect("a pid");
    let told = p.pod_status("shop/web");
    assert_eq!((&told["state"], &told["pid"]), (&"running".into(), &instance.into()), "{told:#}");
    let ping = ["exec", &main, "--", "/bin/ping", "-c", "1", "-W", "1", LIGHTHOUSE];
    assert!((0..15).any(|_| p.runtime.cri(&ping).is_ok()), "no reply from the lighthouse: {}", p.node.instance_logs());

    // Programs that are deleted or damaged are back within a second.
    for name in PROGRAMS {
        for harm in ["delete", "damage", "forbid"] {
            let path = p.program(name);
            match harm {
                "delete" => fs::remove_file(&path).expect("delete it"),
                "forbid" => drop(world::run("chmod", &["600", &path.display().to_string()])),
                // The running instance's file cannot be written, only replaced.
                _ => {
                    fs::write(p.node.dir.join("x"), "damaged").expect("write");
                    fs::rename(p.node.dir.join("x"), &path).expect("replace it");
                }
            }
            let is_back = || {
                p.is_installed(name) && !world::run("find", &[&path.display().to_string(), "-perm", "755"]).is_empty()
            };
            let took = p.wait_for("the program is back", is_back);
            println!("{name} after {harm}: {took:?}");
            assert!(took < Duration::from_secs(1), "{name} after {harm}: {took:?}");
        }
    }
    // The primary rewrites its file, in place as some do.
    let mut changed: Value = serde_json::from_slice(&primary).expect("JSON");
    changed["plugins"][0]["mtu"] = 1400.into();
    fs::write(p.primary(), changed.to_string()).expect("rewrite the primary");
    p.wait("derived again", || fs::read_to_string(p.own_file()).is_ok_and(|text| text.contains("1400")));
    // Our file is deleted.
    fs::remove_file(p.own_file()).expect("remove our file");
    p.wait("our file is back", || p.chain().len() == 2);
    // A broken file of somebody else, which would come first without ours.
    let broken = p.runtime.dir.join("net.d/05-broken.conf");
    fs::write(&broken, "{\"name\": \"bro").expect("write it");
    thread::sleep(Duration::from_millis(500));
    p.wait("a broken file does no harm", || p.chain().len() == 2);
    fs::remove_file(&broken).expect("remove it");
    // The primary goes: our chain stays.
    fs::remove_file(p.primary()).expect("remove the primary");
    p.wait_for("no primary", || p.status().0["chain"]["ok"] == false);
    assert_eq!(p.chain().len(), 2, "closed, not open");
    fs::write(p.primary(), &primary).expect("write the primary");
    p.wait("the primary is back", || true);

    // An agent that ends removes nothing.
    p.stop(Signal::SIGTERM);
    assert!(p.chain().len() == 2 && PROGRAMS.iter().all(|name| p.is_installed(name)) && alive(instance));
    p.start();
    p.wait("started again", || true);

    // Uninstallation waits for the pod, and the agent that still runs puts nothing back.
    let mut uninstallation = p.uninstall(&[]);
    p.wait_for("the chain is removed", || p.chain().is_empty());
    thread::sleep(Duration::from_secs(2));
    assert!(uninstallation.try_wait().expect("its state").is_none(), "it waits for the pod");
    assert!(alive(instance) && p.chain().is_empty());
    for verb in ["stop-pod", "remove-pod"] {
        p.runtime.cri(&[verb, &web]).unwrap_or_else(|error| panic!("{error}"));
    }
    let ended = uninstallation.wait_with_output().expect("it ends");
    removed_everything(&ended);
    assert!(!alive(instance));
    p.stop(Signal::SIGTERM);
    p.nothing_of_ours_is_left();
    // The primary's network goes on without us.
    let (bare, _, _) = p.runtime.pod("bare");
    for verb in ["stop-pod", "remove-pod"] {
        p.runtime.cri(&[verb, &bare]).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build of the programs"]
fn an_agent_that_is_killed_at_any_moment_among_changes_leaves_nothing_wrong() {
    kill_at_any_moment(Prepared::new());
}

pub(crate) fn kill_at_any_moment(mut p: Prepared) {
    let (kills, seed) = (number("AGENT_KILLS", 12), seed());
    println!("AGENT_KILLS={kills} CHAOS_SEED={seed}");
    let mut random = Random::new(seed);
    let primary: Value = serde_json::from_slice(&fs::read(p.primary()).expect("the primary")).expect("JSON");
    let mut mtu = 1300;
    for _ in 0..kills {
        p.start();
        thread::sleep(Duration::from_millis(random.below(1500) as u64));
        match random.below(6) {
            0 => drop(fs::remove_file(p.program(PROGRAMS[random.below(2)]))),
            1 => drop(fs::remove_file(p.own_file())),
            2 => {
                p.runtime.kill();
                p.runtime.up(&p.cluster.world, &p.node, "");
            }
            3 => drop(fs::remove_file(p.primary())),
            _ => {
                mtu += 1;
                let mut changed = primary.clone();
                changed["plugins"][0]["mtu"] = mtu.into();
                fs::write(p.primary(), changed.to_string()).expect("rewrite the primary");
            }
        }
        thread::sleep(Duration::from_millis(random.below(300) as u64));
        p.stop(Signal::SIGKILL);
        let chain = p.chain();
        assert!(chain.is_empty() || chain == ["bridge", "nebula-cni-plugin"], "half a chain: {chain:?}");
    }
    fs::write(p.primary(), primary.to_string()).expect("write the primary");
    p.start();
    p.wait("ready after all kills", || p.chain().len() == 2 && PROGRAMS.iter().all(|name| p.is_installed(name)));
    p.nothing_is_left_of_killed_agents();
    // The uninstallation may be killed as well.
    for _ in 0..5 {
        let mut uninstallation = p.uninstall(&["--force"]);
        thread::sleep(Duration::from_millis(random.below(1500) as u64));
        let _ = uninstallation.kill();
        let _ = uninstallation.wait();
    }
    let ended = p.uninstall(&["--force"]).wait_with_output().expect("it ends");
    removed_everything(&ended);
    p.stop(Signal::SIGTERM);
    p.nothing_of_ours_is_left();
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build of the programs"]
fn a_drop_in_is_kept_where_the_runtime_loads_it_and_a_file_of_its_own_takes_its_place_elsewhere() {
    let mut p = Prepared::new();
    p.configure("strategy", "drop-in".into());
    let primary = fs::read_to_string(p.primary()).expect("the primary");
    let is_loaded = p.loads_drop_ins();
    p.start();
    p.wait("ready", || true);
    let found = (p.drop_in().exists(), p.own_file().exists());
    assert_eq!(found, (is_loaded, !is_loaded), "(drop-in, file): {:#}", p.status().0);
    let (web, main, _) = p.runtime.pod("web");
    let ping = ["exec", &main, "--", "/bin/ping", "-c", "1", "-W", "1", LIGHTHOUSE];
    assert!((0..15).any(|_| p.runtime.cri(&ping).is_ok()), "no reply from the lighthouse: {}", p.node.instance_logs());
    assert_eq!(fs::read_to_string(p.primary()).expect("the primary"), primary, "the primary's file is its own");

    // It comes back, and so does what the primary's plugin rewrites.
    let ours = if is_loaded { p.drop_in() } else { p.own_file() };
    fs::remove_file(&ours).expect("remove our file");
    p.wait("our file is back", || ours.exists());
    let mut changed: Value = serde_json::from_str(&primary).expect("JSON");
    changed["plugins"][0]["mtu"] = 1400.into();
    fs::write(p.primary(), changed.to_string()).expect("rewrite the primary");
    p.wait("the runtime has the new text and our plugin", || {
        p.runtime.cri(&["status"]).is_ok_and(|said| said.contains("1400") && said.contains("nebula-cni-plugin"))
    });

    for verb in ["stop-pod", "remove-pod"] {
        p.runtime.cri(&[verb, &web]).unwrap_or_else(|error| panic!("{error}"));
    }
    let ended = p.uninstall(&[]).wait_with_output().expect("it ends");
    removed_everything(&ended);
    p.stop(Signal::SIGTERM);
    p.nothing_of_ours_is_left();
    assert!(!p.drop_in().parent().expect("a folder").exists(), "the folder of drop-ins is left");
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build of the programs"]
fn a_fight_over_the_chain_file_is_stopped_and_named() {
    let mut p = Prepared::new();
    p.start();
    p.wait("ready", || true);
    let until = Instant::now() + SOON;
    while !p.status().0["chain"]["reason"].as_str().is_some_and(|reason| reason.contains("again and again")) {
        assert!(Instant::now() < until, "{:#}", p.status().0);
        // As cilium does when it is exclusive.
        let _ = fs::rename(p.own_file(), p.own_file().with_extension("conflist.cilium_bak"));
        thread::sleep(Duration::from_millis(100));
    }
    let (status, is_ready) = p.status();
    assert!(
        !is_ready && status["chain"]["advice"].as_str().is_some_and(|text| text.contains("cni.exclusive")),
        "{status:#}"
    );
    assert!(!p.own_file().exists(), "it is left alone for a while");
    fs::remove_file(p.own_file().with_extension("conflist.cilium_bak")).expect("remove the copy");
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build of the programs"]
fn without_the_ca_or_with_a_foreign_one_the_node_is_not_ready() {
    let mut p = Prepared::new();
    p.cluster.world.stop("control", Signal::SIGTERM);
    p.start();
    p.wait_for("all but the CA", || {
        let status = p.status().0;
        status["runtime"]["ok"] == true
            && status["ca"]["reason"].as_str().is_some_and(|reason| reason.contains("cannot reach"))
    });
    assert!(!p.status().1);
    p.cluster.start_ca();
    p.wait("the CA is back", || true);
    p.stop(Signal::SIGTERM);
    // Another service at the same address, with a certificate of its own.
    let other = p.cluster.world.dir().join("other");
    let init = ["init", "--dir", &other.display().to_string(), "--tls-name", "192.0.2.1", "--overlay", "10.43.0.0/16"];
    world::run(&binary("nebula-ca").display().to_string(), &init);
    fs::copy(other.join("tls.crt"), p.cluster.ca_file("tls.crt")).expect("trust another root");
    p.start();
    p.wait_for("the CA is not trusted", || {
        p.status().0["ca"]["advice"].as_str().is_some_and(|advice| advice.contains("certificate"))
    });
}
