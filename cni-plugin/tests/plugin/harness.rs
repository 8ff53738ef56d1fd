//! The test harness: a node with a state directory and a plugin configuration, on which the plugin is called as by a
//! runtime.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, process};

use nebula_cni_contract::clock::SystemClock;
use nebula_cni_plugin::attachment::files::Files;
use nebula_cni_plugin::attachment::record::{Found, Record};
use nebula_cni_plugin::request::Key;
use nebula_cni_plugin::supervisor::process::{Process, with_arguments};
use nebula_cni_plugin::supervisor::{Direct, Supervisor};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fake_instance;

pub(crate) const PLUGIN: &str = env!("CARGO_BIN_EXE_nebula-cni-plugin");

/// Stands in for the pod's network namespace when the test lacks the privileges to create one: to the plugin, a
/// namespace is any identity other than that of its own network namespace. Only the instance enters it.
pub(crate) const NETNS: &str = "/proc/self/ns/uts";

pub(crate) const PREV: &str = r#"{ "cniVersion":"1.0.0", "interfaces":[{"name":"veth1"},{"name":"eth0","sandbox":"/n"}],"ips":[{"address":"10.4.0.7/24","interface":1}],"dns":{} }"#;

static NODES: AtomicU32 = AtomicU32::new(0);

pub(crate) struct Node {
    root: TempDir,
    pub(crate) entry: Value,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) prev_result: Option<String>,
}

pub(crate) struct Answer {
    pub(crate) ok: bool,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Answer {
    pub(crate) fn error(&self) -> Value {
        assert!(!self.ok, "unexpected success: {}", self.stdout);
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {:?} {}", self.stdout, self.stderr))
    }

    pub(crate) fn code(&self) -> u64 {
        let error = self.error();
        assert!(error["cniVersion"].is_string() && error["msg"].is_string(), "{error}");
        error["code"].as_u64().unwrap()
    }

    #[track_caller]
    pub(crate) fn expect_ok(self) -> String {
        assert!(self.ok, "{} {}", self.stdout, self.stderr);
        self.stdout
    }
}

impl Node {
    pub(crate) fn new() -> Self {
        // Not TMPDIR, because the path must be short enough for the sockets below it.
        Self::below("/tmp")
    }

    pub(crate) fn below(dir: &str) -> Self {
        let root = tempfile::Builder::new().prefix("ncp").tempdir_in(dir).unwrap();
        let script = root.path().join("fake-instance");
        let this = env::current_exe().unwrap();
        let text =
            format!("#!/bin/sh\nexec '{}' --exact {} --nocapture -- \"$@\"\n", this.display(), fake_instance::TEST);
        fs::write(&script, text).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let entry = json!({
            "cniVersion": "1.0.0", "name": "net", "type": "nebula-cni-plugin", "instance": script, "supervisor": "direct",
            "stateDir": root.path().join("state"), "timeoutSeconds": 20,
            "ca": {"url": "https://ca.test:8443", "tlsCaFile": "/etc/ca.pem", "tokenFile": "/run/token"}, "nebula": {},
        });
        // Control groups are shared by the whole machine, so ids are never reused.
        let id = format!("c{}-{}", NODES.fetch_add(1, Ordering::Relaxed), process::id());
        let env = [
            ("CNI_CONTAINERID", id.as_str()),
            ("CNI_NETNS", NETNS),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", "K8S_POD_UID=u1;IgnoreUnknown=1;K8S_POD_NAME=web-0;K8S_POD_NAMESPACE=shop"),
        ];
        let env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Self { root, entry, env, prev_result: Some(PREV.to_owned()) }
    }

    pub(crate) fn with_nebula(nebula: Value) -> Self {
        let mut node = Self::new();
        node.entry["nebula"] = nebula;
        node
    }

    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.env.insert(name.to_owned(), value.to_owned());
    }

    pub(crate) fn id(&self) -> &str {
        &self.env["CNI_CONTAINERID"]
    }

    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    pub(crate) fn stdin(&self) -> String {
        let mut stdin = self.entry.to_string();
        if let Some(prev) = &self.prev_result {
            stdin.truncate(stdin.len() - 1);
            stdin.push_str(&format!(",\"prevResult\":{prev}}}"));
        }
        stdin
    }

    pub(crate) fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(PLUGIN);
        command.env_clear().envs(&self.env).env("CNI_COMMAND", verb).env("PATH", env::var_os("PATH").unwrap());
        command
    }

    pub(crate) fn spawn(&self, verb: &str) -> Child {
        spawn(&mut self.command(verb), self.stdin().as_bytes())
    }

    pub(crate) fn call(&self, verb: &str) -> Answer {
        wait(self.spawn(verb))
    }

    pub(crate) fn files(&self) -> Files {
        let state_dir = self.entry["stateDir"].as_str().unwrap();
        let key = |name: &str| self.env[name].clone();
        let key = Key { network: "net".into(), container_id: key("CNI_CONTAINERID"), ifname: key("CNI_IFNAME") };
        Files::new(Path::new(state_dir), &key)
    }

    pub(crate) fn record(&self) -> Option<Record> {
        match Record::load(&self.files().record()).unwrap() {
            Found::Record(record) => Some(*record),
            _ => None,
        }
    }

    pub(crate) fn process(&self) -> Process {
        self.record().unwrap().process.unwrap()
    }

    /// Whether an instance accepts connections on its status socket.
    pub(crate) fn answers(&self) -> bool {
        UnixStream::connect(self.files().status_socket()).is_ok()
    }

    /// Processes and files that are left of the attachment.
    pub(crate) fn residue(&self) -> Vec<String> {
        let processes = with_arguments("--launch", &self.files().launch());
        let mut left: Vec<String> = processes.iter().map(|p| format!("process {}", p.pid)).collect();
        let mut dirs = vec![PathBuf::from(self.entry["stateDir"].as_str().unwrap())];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten() {
                let path = entry.unwrap().path();
                // Stays for the next ADD.
                if path.ends_with(".starts") {
                    continue;
                }
                left.push(path.display().to_string());
                if path.is_dir() {
                    dirs.push(path);
                }
            }
        }
        for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/memory"] {
            let id = self.id();
            let group = Path::new(root).join("nebula-cni/net").join(format!("{id}-eth0"));
            if group.exists() {
                left.push(group.display().to_string());
            }
        }
        left
    }
}

// Cleans up after a failed assertion as well.
impl Drop for Node {
    fn drop(&mut self) {
        for process in with_arguments("--launch", &self.files().launch()) {
            let _ = process.stop(&SystemClock);
        }
        Direct::new().clean_up(&self.files(), &SystemClock);
    }
}

/// Waits until `holds` returns true, for effects that nothing reports.
#[track_caller]
#[expect(clippy::disallowed_methods, reason = "tests watch real processes on a real clock")]
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(15);
    while !holds() {
        assert!(std::time::Instant::now() < until, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

pub(crate) fn spawn(command: &mut Command, stdin: &[u8]) -> Child {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A plugin that refuses early may not read all of its stdin.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    child
}

pub(crate) fn wait(child: Child) -> Answer {
    let output = child.wait_with_output().unwrap();
    Answer {
        ok: output.status.success(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}
