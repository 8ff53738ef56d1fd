//! A control host with our CA and lighthouse, and nodes whose pods are attached through a CNI chain.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{World, run};

/// Overlay address of the lighthouse.
pub const LIGHTHOUSE: &str = "10.42.255.1";

/// A world with a CA and a lighthouse.
pub struct Cluster {
    pub world: World,
    control: std::net::Ipv4Addr,
    nodes: u8,
}

impl Cluster {
    /// Starts `nebula-ca`, and a lighthouse that enrols with a one-time token.
    pub fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// Like [`Cluster::new`], with its files in a folder below `place`.
    pub fn below(place: &Path) -> Self {
        let mut world = World::below(place);
        let control = world.host("control");
        let ca = world.dir().join("ca").display().to_string();
        let tool = binary("nebula-ca");
        let init = ["init", "--dir", &ca, "--tls-name", &control.to_string(), "--overlay", "10.42.0.0/16"];
        succeed(Command::new(&tool).args(init));
        let mut cluster = Self { world, control, nodes: 0 };
        cluster.start_ca();
        let network = format!("{LIGHTHOUSE}/16");
        let create = ["token", "create", "--dir", &ca, "--name", "lighthouse", "--network", &network];
        let token = succeed(Command::new(&tool).args(create));
        let token_file = cluster.world.write("lighthouse.token", &token);
        let out = cluster.world.dir().join("lighthouse");
        let enrolled = cluster.world.exec(
            "control",
            &[
                &binary("nebula-enrol").display().to_string(),
                "-ca-url",
                &cluster.ca_url(),
                "-tls-ca",
                &cluster.ca_file("tls.crt"),
                "-token-file",
                &token_file.display().to_string(),
                "-out-dir",
                &out.display().to_string(),
            ],
        );
        assert!(enrolled.status.success(), "{}", String::from_utf8_lossy(&enrolled.stderr));
        cluster.start_lighthouse(4242);
        cluster
    }

    /// The CA's URL.
    pub fn ca_url(&self) -> String {
        format!("https://{}:8443", self.control)
    }

    /// Path of a file in the CA's directory.
    pub fn ca_file(&self, name: &str) -> String {
        self.world.dir().join("ca").join(name).display().to_string()
    }

    /// Starts the CA and waits until it answers its control socket.
    pub fn start_ca(&mut self) {
        let ca = self.world.dir().join("ca");
        let listen = format!("{}:8443", self.control);
        let dir = ca.display().to_string();
        self.world.start("control", &binary("nebula-ca"), &["serve", "--dir", &dir, "--listen", &listen]);
        let until = Instant::now() + Duration::from_secs(10);
        while UnixStream::connect(ca.join("control.sock")).is_err() {
            assert!(Instant::now() < until, "the CA does not start\n{}", self.world.all_logs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Restarts the CA with other values in the `pods` section of its policy.
    pub fn set_policy(&mut self, changes: &[(&str, Value)]) {
        self.change_policy(|policy| {
            for (key, value) in changes {
                policy["pods"][key] = value.clone();
            }
        });
    }

    /// Restarts the CA with a changed policy.
    pub fn change_policy(&mut self, change: impl FnOnce(&mut Value)) {
        let path = self.ca_file("policy.jsonc");
        let text = std::fs::read_to_string(&path).expect("the policy");
        let text: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        let mut policy: Value = serde_json::from_str(&text).expect("the policy is JSON but for its comments");
        change(&mut policy);
        self.world.stop("control", Signal::SIGTERM);
        std::fs::write(&path, policy.to_string()).expect("write the policy");
        self.start_ca();
    }

    /// Restarts the lighthouse on another port.
    pub fn move_lighthouse(&mut self, port: u16) {
        self.world.stop("lighthouse", Signal::SIGTERM);
        self.start_lighthouse(port);
    }

    /// Starts the lighthouse, which must have been stopped.
    pub fn start_lighthouse(&mut self, port: u16) {
        let pki = self.world.dir().join("lighthouse").display().to_string();
        let config = format!(
            "pki: {{ca: {pki}/ca.crt, cert: {pki}/host.crt, key: {pki}/host.key}}
lighthouse: {{am_lighthouse: true}}
listen: {{host: 0.0.0.0, port: {port}}}
tun: {{dev: neb0}}
firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: icmp, host: any}}]
"
        );
        let path = self.world.write("lighthouse.yml", &config);
        // The control host runs two daemons, so the lighthouse is started under another name in the same namespace.
        self.world.start_in("lighthouse", "control", &binary("nebula"), &["-config", &path.display().to_string()]);
    }

    /// Adds a node with a chain of `bridge` and our plugin at `cni_version`.
    pub fn node(&mut self, name: &str, cni_version: &str) -> Node {
        self.world.host(name);
        self.set_up_node(name, cni_version)
    }

    /// Like [`Cluster::node`], for the network namespace of the first process, a systemd: there its units run.
    pub fn node_of_systemd(&mut self, name: &str, cni_version: &str) -> Node {
        self.world.host_of_init(name);
        let mut node = self.set_up_node(name, cni_version);
        node.conf["plugins"][1]["supervisor"] = "systemd".into();
        node
    }

    fn set_up_node(&mut self, name: &str, cni_version: &str) -> Node {
        self.nodes += 1;
        let subnet = format!("10.244.{}.0/24", self.nodes);
        let dir = self.world.dir().join(name);
        std::fs::create_dir_all(dir.join("bin")).expect("a folder for the node");
        for plugin in ["bridge", "host-local", "loopback", "portmap"] {
            let _ = std::os::unix::fs::symlink(format!("/usr/lib/cni/{plugin}"), dir.join("bin").join(plugin));
        }
        for ours in ["nebula-cni-plugin", "nebula-cni-instance"] {
            let _ = std::os::unix::fs::symlink(binary(ours), dir.join("bin").join(ours));
        }
        let network = self.world.namespace_of(name);
        let conf = json!({
            "cniVersion": cni_version,
            "name": network,
            "plugins": [
                { "type": "bridge", "bridge": "cni0", "isGateway": true,
                  "ipam": { "type": "host-local", "dataDir": dir.join("ipam"), "ranges": [[{ "subnet": subnet }]],
                            "routes": [{ "dst": "0.0.0.0/0" }] } },
                { "type": "nebula-cni-plugin",
                  "supervisor": "direct",
                  "instance": binary("nebula-cni-instance"),
                  "stateDir": dir.join("state"),
                  "ca": { "url": self.ca_url(), "tlsCaFile": self.ca_file("tls.crt"), "tokenFile": self.ca_file("node.token") },
                  "nebula": {
                      "static_host_map": { LIGHTHOUSE: [format!("{}:4242", self.control)] },
                      "lighthouse": { "hosts": [LIGHTHOUSE] },
                      "firewall": {
                          "outbound": [{ "port": "any", "proto": "any", "host": "any" }],
                          "inbound": [{ "port": "any", "proto": "icmp", "host": "any" },
                                      { "port": "any", "proto": "any", "group": "ns:shop" }] } } }
            ]
        });
        Node { name: name.to_owned(), network, dir, conf, bus: None }
    }
}

/// A node and its CNI chain.
#[derive(Debug, Clone)]
pub struct Node {
    pub name: String,
    /// CNI network name.
    pub network: String,
    pub dir: PathBuf,
    pub conf: Value,
    /// The address of the system bus that its runtime finds.
    pub bus: Option<String>,
}

/// Puts a copy of a program in the place of another one.
pub fn place(program: &Path, at: &Path) {
    let new = at.with_extension("new");
    std::fs::create_dir_all(new.parent().expect("a folder")).expect("a folder");
    std::fs::copy(program, &new).expect("a copy");
    std::fs::rename(&new, at).expect("the program is replaced");
}

impl Node {
    /// Where the plugin keeps its records.
    pub fn records(&self) -> PathBuf {
        self.dir.join("state").join(&self.network)
    }

    /// Gives the node an instance program of its own, which [`Node::install`] can replace. Before the first pod.
    pub fn own_program(&mut self) {
        self.install(&binary("nebula-cni-instance"));
        self.conf["plugins"][1]["instance"] = self.installed().display().to_string().into();
    }

    /// The program of [`Node::own_program`].
    pub fn installed(&self) -> PathBuf {
        self.dir.join("programs/nebula-cni-instance")
    }

    /// Installs a copy of `program`, as an update does.
    pub fn install(&self, program: &Path) {
        place(program, &self.installed());
    }

    /// Installs a program that does what `program` does and is another one by its contents.
    pub fn install_another(&self, program: &Path) {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let other = self.dir.join("another");
        std::fs::copy(program, &other).expect("a copy");
        let mut file = std::fs::File::options().append(true).open(&other).expect("it is there");
        writeln!(file, "# {}", NUMBER.fetch_add(1, Ordering::Relaxed)).expect("it is written");
        self.install(&other);
    }

    /// The file with which the instance of `pod` starts again.
    pub fn kept_program(&self, pod: &str) -> PathBuf {
        let record = std::fs::read(self.records().join(format!("{pod}-eth0.json"))).expect("a record");
        let record: Value = serde_json::from_slice(&record).expect("JSON");
        let text = |key: &str| record[key].as_str().expect("a text").to_owned();
        let installed = PathBuf::from(text("instance"));
        let name = installed.file_name().expect("a name").display().to_string();
        installed.with_file_name(format!(".{name}.{}", text("program")))
    }

    /// Has the installed program take over from the instance of `pod`.
    pub fn upgrade(&self, world: &World, pod: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net=/run/netns/{}", world.namespace_of(&self.name)))
            .arg(binary("nebula-cni-plugin"))
            .arg("upgrade")
            .arg(self.dir.join("state"))
            .args([&self.network, pod, "eth0"]);
        command
    }

    /// Has the plugin, in the node's network namespace, tell running pods of the entry's settings, as the node agent
    /// does.
    pub fn refresh(&self, namespace: &str) -> Value {
        let mut entry = self.conf["plugins"][1].clone();
        for key in ["name", "cniVersion"] {
            entry[key] = self.conf[key].clone();
        }
        let mut plugin = Command::new("nsenter")
            .arg(format!("--net=/run/netns/{namespace}"))
            .arg(binary("nebula-cni-plugin"))
            .arg("refresh")
            .envs([
                ("CNI_COMMAND", "ADD"),
                ("CNI_CONTAINERID", "any"),
                ("CNI_NETNS", "/proc/self/ns/net"),
                ("CNI_IFNAME", "eth0"),
                ("CNI_PATH", "/opt/cni/bin"),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the plugin runs");
        plugin.stdin.take().expect("stdin").write_all(entry.to_string().as_bytes()).expect("write the entry");
        let output = plugin.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_str(&said).expect("JSON")
    }

    /// Runs the chain as a runtime does; `pod` is also the name of the namespace.
    pub fn chain(&self, world: &World, verb: &str, pod: &str) -> Output {
        self.chain_command(world, verb, pod).output().expect("cni-chain.py runs")
    }

    /// What [`Node::chain`] runs.
    pub fn chain_command(&self, world: &World, verb: &str, pod: &str) -> Command {
        // One for each pod, so that nobody reads what another thread is writing.
        let conf = self.dir.join(format!("{pod}.conflist"));
        std::fs::write(&conf, serde_json::to_vec_pretty(&self.conf).expect("JSON")).expect("write the chain");
        let netns = format!("/run/netns/{}", world.namespace_of(pod));
        let mut command = Command::new("nsenter");
        command
            .envs(self.bus.iter().map(|bus| ("DBUS_SYSTEM_BUS_ADDRESS", bus)))
            .arg(format!("--net=/run/netns/{}", world.namespace_of(&self.name)))
            .arg(tool("cni-chain.py"))
            .arg("--conf")
            .arg(&conf)
            .arg("--path")
            .arg(self.dir.join("bin"))
            .arg("--cache")
            .arg(self.dir.join("cache"))
            // Passed only to plugins that declare the capability.
            .args(["--cap", r#"{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}"#])
            .args([
                "--id",
                pod,
                "--netns",
                &netns,
                "--pod",
                &format!("shop/{pod}/uid-{pod}"),
                "--order",
                "shuffled",
                "--record",
            ])
            .arg(self.dir.join("calls.jsonl"))
            .arg(verb);
        command
    }

    /// Like [`Node::chain`], but panics with all known details if it fails. Returns the result.
    pub fn chain_ok(&self, world: &World, verb: &str, pod: &str) -> Value {
        let output = self.chain(world, verb, pod);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        // The reason comes last, where a reader of a long log looks first.
        assert!(
            output.status.success(),
            "{}\n{}\n{verb} of {pod}: {said}{}",
            self.instance_logs(),
            world.all_logs(),
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_str(&said).unwrap_or(Value::Null)
    }

    /// Creates these pods and runs ADD for each; returns the results.
    pub fn add_pods(&self, world: &mut World, pods: &[&str]) -> Vec<Value> {
        let add = |pod: &&str| {
            world.namespace(pod);
            self.chain_ok(world, "add", pod)
        };
        pods.iter().map(add).collect()
    }

    /// Runs DEL for each of these pods.
    pub fn delete_pods(&self, world: &World, pods: &[&str]) {
        for pod in pods {
            self.chain_ok(world, "del", pod);
        }
    }

    /// The status document of the instance of `pod`.
    pub fn status(&self, pod: &str) -> Value {
        status_at(&self.status_socket(pod))
    }

    /// The status socket of the instance of `pod`.
    pub fn status_socket(&self, pod: &str) -> PathBuf {
        self.launch(pod).expect("a launch file")["status_socket"].as_str().expect("a status socket").into()
    }

    /// The launch file of `pod`, if it has one.
    pub fn launch(&self, pod: &str) -> Option<Value> {
        let text = std::fs::read(self.records().join(format!("{pod}-eth0.launch"))).ok()?;
        Some(serde_json::from_slice(&text).expect("the launch file is JSON"))
    }

    /// Capabilities of all threads of the instance of `pod`; see [`capabilities`].
    pub fn capabilities(&self, pod: &str) -> Vec<String> {
        let tasks = format!("/proc/{}/task", self.status(pod)["pid"]);
        let tasks = std::fs::read_dir(tasks).expect("a live process").flatten();
        // Threads may end meanwhile.
        let statuses = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
        capabilities(&statuses.collect::<String>())
    }

    /// The overlay address of `pod`.
    pub fn overlay(&self, pod: &str) -> String {
        let status = self.status(pod);
        status["overlay"][0].as_str().and_then(|net| net.split('/').next()).expect("an overlay address").to_owned()
    }

    /// The plugin's files, except locks.
    pub fn leftovers(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.records()) else { return Vec::new() };
        entries
            .map(|entry| entry.expect("a directory entry").path())
            .filter(|path| path.extension().is_none_or(|extension| extension != "lock"))
            // An agent's.
            .filter(|path| !path.ends_with("released"))
            .collect()
    }

    /// The logs of all instances on this node.
    pub fn instance_logs(&self) -> String {
        let mut text = String::new();
        for entry in std::fs::read_dir(self.records()).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "log") {
                text += &format!("--- {}\n", entry.path().display());
                text += &std::fs::read_to_string(entry.path()).unwrap_or_default();
            }
        }
        text
    }
}

/// Reads one status document.
pub fn status_at(socket: &Path) -> Value {
    answer_at(socket).unwrap_or_else(|error| panic!("no status document from {}: {error}", socket.display()))
}

/// Like [`status_at`], for an instance that may be killed at any moment.
pub fn answer_at(socket: &Path) -> std::io::Result<Value> {
    let mut text = String::new();
    UnixStream::connect(socket)?.read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}

/// Whether a process with this id runs. A zombie does as long as other threads of it end: they hold its descriptors.
pub fn alive(pid: u64) -> bool {
    let threads = || std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let is_zombie = |stat: &str| stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z');
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !is_zombie(&stat) || threads() > 1)
}

/// The lines in the status files of a process's threads that show any capabilities.
pub fn capabilities(status_files: &str) -> Vec<String> {
    let has_some =
        |line: &&str| line.starts_with("Cap") && line.trim_start_matches(|c| c != ':') != ":\t0000000000000000";
    assert!(status_files.contains("CapEff:"), "no status of a process: {status_files}");
    status_files.lines().filter(has_some).map(str::to_owned).collect()
}

/// Waits until the process is gone.
pub fn gone_within(pid: u64, within: Duration) -> bool {
    let until = Instant::now() + within;
    while alive(pid) {
        if Instant::now() > until {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Names of the links in a namespace.
pub fn links(namespace: &str) -> Vec<String> {
    run("ip", &["-n", namespace, "-o", "link"])
        .lines()
        .filter_map(|line| Some(line.split(": ").nth(1)?.split('@').next()?.to_owned()))
        .collect()
}

/// A binary of the release build.
pub fn binary(name: &str) -> PathBuf {
    let dir = std::env::var_os("NEBULA_BIN_DIR").expect("NEBULA_BIN_DIR names the folder of the release build");
    Path::new(&dir).join(name)
}

/// `nebula-cni-instance` with a fault that it shows once it takes over: see `examples/faulty_instance.rs`.
pub fn faulty_instance(fault: &str) -> Vec<u8> {
    let own = std::env::current_exe().expect("the test's program");
    let folder = own.parent().and_then(Path::parent).expect("a target folder");
    let example = std::fs::read(folder.join("examples/faulty_instance")).expect("examples are built with the tests");
    [&example[..], b"fault=", fault.as_bytes()].concat()
}

/// A helper program that puts the plugin under a real runtime.
pub fn tool(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tools").join(name)
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
