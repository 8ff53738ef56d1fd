//! The self-test: the installed plugin gives a scratch namespace a tunnel, checks it, and removes it.
//!
//! It runs ADD, CHECK and DEL as a runtime does, with the operator's own entry, except that the instance waits for a
//! certificate (`mode: lazy`) from an address where nobody answers. So it proves all that is local: that plugin and
//! instance run on this node and belong together, that the kernel gives tun devices, network namespaces and routes,
//! that a UDP port and a user id are free, that the tunnel's configuration is accepted, and that everything is
//! removed again. No pod, no CA and no other node takes part; that the CA answers is a condition of its own. What
//! differs from a pod: the instance runs under the plugin itself instead of systemd, and `isolate`, `capture` and
//! `renumber`, which need a pod's link, are left out. Of `capture` it is checked that its ranges cover what the
//! primary network gives to the node's pods.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nebula_cni_contract::netns::{Namespaces, SystemNamespaces};
use nebula_cni_plugin::attachment::released;
use nebula_cni_plugin::request::{self, Env, Request};
use nebula_cni_plugin::settings::Settings;
use nebula_cni_plugin::settings::capturing::COVER_HELP;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Map, Value, json};

use crate::cni_cache;
use crate::config::{AGENT_DIR, PLUGIN};
use crate::host_root::HostRoot;
use crate::network;
use crate::process::{self, Ended};

/// Why the self-test failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum SelfTestError {
    /// The namespace cannot be made.
    #[error("cannot make a network namespace: {0}")]
    Namespace(#[source] io::Error),
    /// The plugin cannot be run.
    #[error("cannot run {program}: {source}")]
    Run {
        /// The installed plugin.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A verb failed.
    #[error("{verb} failed: {said}")]
    Verb {
        /// CNI_COMMAND.
        verb: &'static str,
        /// What the plugin said.
        said: String,
    },
    /// Pods of the node have addresses that the key `capture` does not cover.
    #[error(
        "pods of this node have addresses such as {address}, and none of that family is in \"capture.ranges\": ADD would fail \
         for them"
    )]
    Uncovered {
        /// One of them.
        address: IpAddr,
    },
    /// A verb did not do what it should.
    #[error("{0}")]
    Wrong(String),
}

impl SelfTestError {
    /// What the operator can do about it.
    #[must_use]
    pub(crate) fn advice(&self) -> &'static str {
        match self {
            Self::Uncovered { .. } => COVER_HELP,
            _ => "pods would fail in the same way; see docs/agent.md, \"Self-test\"",
        }
    }
}

/// Runs the plugin in `bin_dir` (a path of the node) with our chain entry. Blocks for at most about a minute.
///
/// # Errors
/// Returns what failed. In any case, all traces are removed.
pub(crate) fn run(bin_dir: &Path, entry: &Map<String, Value>, host: &HostRoot) -> Result<(), SelfTestError> {
    if let Some(address) = uncovered(entry, &cni_cache::pod_addresses(host)) {
        return Err(SelfTestError::Uncovered { address });
    }
    let scratch = Scratch::make(host).map_err(SelfTestError::Namespace)?;
    let test = Test { bin_dir, host, config: configuration(entry), device: device(entry), scratch: &scratch };
    let attached = test.attach();
    // Also after a failure, as a runtime does.
    let detached = test.verb("DEL").map(drop);
    attached.and(detached)?;
    if test.has_device().map_err(SelfTestError::Namespace)? {
        return Err(SelfTestError::Wrong(format!("DEL left the device {} behind", test.device)));
    }
    let state = scratch.dir.join("state");
    let notes = released::dir(&state, NETWORK);
    // Locks stay, and DEL leaves a note of what the CA may take back.
    let left = fs::read_dir(state.join(NETWORK)).into_iter().flatten().flatten();
    let left = left.filter(|entry| entry.path() != notes).map(|entry| entry.file_name());
    let left: Vec<_> = left.filter(|name| !name.as_encoded_bytes().ends_with(b".lock")).collect();
    if left.is_empty() { Ok(()) } else { Err(SelfTestError::Wrong(format!("DEL left {left:?} behind"))) }
}

/// Removes what a killed self-test left behind: its namespace, and with that its instance.
pub(crate) fn clean(host: &HostRoot) {
    let dir = host.resolve(Path::new(DIR));
    // It may be mounted more than once if several agents were killed.
    while umount2(&dir.join("netns"), MntFlags::MNT_DETACH).is_ok() {}
    let _ = fs::remove_dir_all(&dir);
}

struct Test<'a> {
    bin_dir: &'a Path,
    host: &'a HostRoot,
    config: Map<String, Value>,
    device: String,
    scratch: &'a Scratch,
}

impl Test<'_> {
    fn attach(&self) -> Result<(), SelfTestError> {
        let added = self.verb("ADD")?;
        let result: Value = serde_json::from_str(&added.stdout).unwrap_or_default();
        if result["ips"] != prev_result()["ips"] {
            return Err(SelfTestError::Wrong(format!("ADD changed the result of the plugin before it: {result}")));
        }
        if !self.has_device().map_err(SelfTestError::Namespace)? {
            return Err(SelfTestError::Wrong(format!("ADD made no device {}", self.device)));
        }
        self.verb("CHECK").map(drop)
    }

    fn verb(&self, verb: &'static str) -> Result<Ended, SelfTestError> {
        let program = self.bin_dir.join(PLUGIN);
        let failed = |source| SelfTestError::Run { program: program.clone(), source };
        let mut command = process::of_node(self.host.path(), &program).map_err(failed)?;
        command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command.envs([
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", "self-test"),
            ("CNI_NETNS", NETNS),
            ("CNI_IFNAME", "eth0"),
            (
                "CNI_ARGS",
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=nebula-self-test;K8S_POD_NAME=self-test;K8S_POD_UID=self-test",
            ),
        ]);
        command.env("CNI_PATH", self.bin_dir);
        let stdin = serde_json::to_vec(&self.config).map_err(|error| failed(error.into()))?;
        let ended = process::run(&mut command, &stdin, VERB_TIMEOUT).map_err(failed)?;
        if ended.status.success() {
            return Ok(ended);
        }
        let error: Value = serde_json::from_str(&ended.stdout).unwrap_or_default();
        let part = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        let said =
            [part("msg"), part("details")].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
        Err(SelfTestError::Verb { verb, said: if said.is_empty() { ended.stderr } else { said } })
    }

    fn has_device(&self) -> io::Result<bool> {
        let netns = SystemNamespaces.open(&self.scratch.dir.join("netns"))?;
        Ok(SystemNamespaces.link(&netns, &self.device)?.is_some())
    }
}

/// An address of pods whose family the key `capture` forgets: of a family of which it covers some, others may belong
/// to pods that are not enrolled.
fn uncovered(entry: &Map<String, Value>, pods: &[IpAddr]) -> Option<IpAddr> {
    let capturing = settings(entry)?.capture?;
    [true, false].into_iter().find_map(|is_v4| {
        let of_family = || pods.iter().filter(|address| address.is_ipv4() == is_v4);
        let is_forgotten = !of_family().any(|address| capturing.covers(address));
        of_family().next().copied().filter(|_| is_forgotten)
    })
}

/// What the plugin reads in an entry; `None` for one that it refuses, about which ADD says more.
fn settings(entry: &Map<String, Value>) -> Option<Settings> {
    let mut config = entry.clone();
    config.insert("name".to_owned(), NETWORK.into());
    // Older versions have no STATUS.
    config.insert("cniVersion".to_owned(), "1.1.0".into());
    let env: Env = [("CNI_COMMAND".into(), "STATUS".into())].into();
    match request::read(&env, serde_json::to_vec(&config).ok()?.as_slice()).1 {
        Ok(Some(Request::Status(config))) => Settings::read(&config).ok(),
        _ => None,
    }
}

/// The operator's entry, changed so that nothing outside of the node takes part.
fn configuration(entry: &Map<String, Value>) -> Map<String, Value> {
    // The interface is one of the self-test's own.
    let mut config = network::chained(entry.clone());
    for key in ["isolate", "capture", "renumber", "provisional", "capabilities"] {
        config.shift_remove(key);
    }
    if config.get("overlay").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        config.insert("overlay".to_owned(), json!(["198.18.0.0/15"]));
    }
    for (key, value) in [
        ("cniVersion", json!("1.0.0")),
        ("name", json!(NETWORK)),
        ("type", json!(PLUGIN)),
        ("enrol", json!({"namespaces": ["nebula-self-test"]})),
        ("mode", json!("lazy")),
        ("flow", json!("node")),
        ("supervisor", json!("direct")),
        ("stateDir", json!(STATE)),
        ("timeoutSeconds", json!(15)),
        ("prevResult", prev_result()),
    ] {
        config.insert(key.to_owned(), value);
    }
    if let Some(ca) = config.get_mut("ca") {
        // The discard port of this node: nobody listens there.
        ca["url"] = json!("https://127.0.0.1:9");
    }
    config
}

fn device(entry: &Map<String, Value>) -> String {
    entry.get("device").and_then(Value::as_str).unwrap_or("nebula0").to_owned()
}

/// A result as a plugin before us would give, with an address of a range for documentation.
fn prev_result() -> Value {
    json!({"cniVersion": "1.0.0",
        "interfaces": [{"name": "eth0", "sandbox": NETNS}],
        "ips": [{"interface": 0, "address": "192.0.2.2/32"}]})
}

/// A network namespace with a name, and a directory for the plugin's state; both are removed on drop.
struct Scratch {
    /// As the agent sees it.
    dir: PathBuf,
    host: HostRoot,
}

impl Scratch {
    fn make(host: &HostRoot) -> io::Result<Self> {
        clean(host);
        let dir = host.resolve(Path::new(DIR));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let scratch = Self { dir, host: host.clone() };
        let path = scratch.dir.join("netns");
        fs::File::create(&path)?;
        // unshare affects the calling thread only, so this one ends afterwards; the mount keeps the namespace alive.
        let made = thread::scope(|scope| {
            let visit = thread::Builder::new().spawn_scoped(scope, || {
                unshare(CloneFlags::CLONE_NEWNET)?;
                let own = Some("/proc/thread-self/ns/net");
                mount(own, &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            })?;
            visit.join().map_err(|_| io::Error::other("the thread for the namespace failed"))
        })?;
        made?;
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        clean(&self.host);
    }
}

const NETWORK: &str = "nebula-self-test";
/// As the node names them, in [`AGENT_DIR`].
const DIR: &str = "/run/nebula-cni/agent/self-test";
const STATE: &str = "/run/nebula-cni/agent/self-test/state";
const NETNS: &str = "/run/nebula-cni/agent/self-test/netns";
const _: () = assert!(DIR.len() > AGENT_DIR.len());
const VERB_TIMEOUT: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn the_plugin_accepts_the_changed_entry_whatever_the_operator_set() {
        for entry in [
            json!({}),
            json!({"flow": "init", "provisional": true, "overlay": ["10.42.0.0/16"]}),
            json!({"renumber": true, "isolate": {"ranges": ["10.0.0.0/8"]}, "underlay": "pod", "device": "neb7"}),
            json!({"mode": "lazy", "overlay": ["10.42.0.0/16"], "supervisor": "systemd"}),
            json!({"capture": {"ranges": ["10.244.0.0/16"]}}),
        ] {
            let config = json!({"ca": {"url": "https://ca"}, "entry": entry});
            let config = Config::parse(&config.to_string()).unwrap();
            let test = configuration(&config.chain_entry("https://ca", None));
            let settings = settings(&test).unwrap();
            assert_eq!(settings.ca.url, "https://127.0.0.1:9", "the CA takes no part");
            assert_eq!(settings.state_dir, Path::new(STATE));
        }
    }

    #[test]
    fn capture_must_cover_each_family_that_pods_of_the_node_have() {
        let with = |capture: Value| {
            let config =
                json!({"ca": {"url": "https://ca"}, "entry": {"capture": capture, "overlay": ["10.244.0.0/16"]}});
            let config = Config::parse(&config.to_string()).unwrap();
            move |pods: &[&str]| {
                let pods: Vec<IpAddr> = pods.iter().map(|text| text.parse().unwrap()).collect();
                uncovered(&config.chain_entry("https://ca", None), &pods).map(|address| address.to_string())
            }
        };
        let plain = with(json!(true));
        assert_eq!(plain(&[]), None, "nothing is known yet");
        assert_eq!(plain(&["10.244.1.2", "192.168.0.9"]), None, "others may have another pool");
        assert_eq!(plain(&["10.244.1.2", "fd00::2"]).as_deref(), Some("fd00::2"));
        assert_eq!(plain(&["10.42.0.2"]).as_deref(), Some("10.42.0.2"));
        assert_eq!(with(json!({"exclude": ["fd00::/8"]}))(&["10.244.1.2", "fd00::2"]), None, "the operator named it");
        assert_eq!(with(json!({"ranges": ["10.244.0.0/16", "fd00::/16"]}))(&["10.244.1.2", "fd00::2"]), None);
        assert_eq!(with(json!(false))(&["10.42.0.2"]), None);
    }
}
