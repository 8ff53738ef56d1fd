//! Random kills among the pods of a node, and the conditions that must hold during and after them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::capture::Capture;
use super::cluster::{Cluster, LIGHTHOUSE, Node, binary, links};

/// Overlay prefix of all pods.
pub const OVERLAY: &str = "10.42.0.0/16";

/// Random numbers that repeat with their seed (xorshift).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// `CHAOS_SEED`, or a different seed in each run.
pub fn seed() -> u64 {
    number("CHAOS_SEED", u64::from(std::process::id()))
}

/// The number in an environment variable, or `default`.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// How often each kind of process was killed.
#[derive(Debug, Default)]
pub struct Kills {
    pub plugins: usize,
    pub instances: usize,
    pub cas: usize,
    pub containerds: usize,
}

/// A pod that sends to the overlay all the time, whether or not it has a tunnel.
pub struct Talker {
    /// The id of its attachment.
    pub id: String,
    pub uid: String,
    traffic: Child,
}

impl Talker {
    pub fn start(id: &str, uid: &str, netns: &str) -> Self {
        let traffic = Command::new("nsenter")
            .arg(format!("--net={netns}"))
            .args(["ping", "-n", "-q", "-i", "0.2", LIGHTHOUSE])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("ping runs");
        Self { id: id.to_owned(), uid: uid.to_owned(), traffic }
    }
}

impl Drop for Talker {
    fn drop(&mut self) {
        let _ = self.traffic.kill();
        let _ = self.traffic.wait();
    }
}

/// Configures for every pod of `node` what could leak or be left behind: overlay prefixes, and a host route.
pub fn expose(node: &mut Node) {
    node.conf["plugins"][1]["overlay"] = json!([OVERLAY]);
    node.conf["plugins"][1]["renumber"] = true.into();
    node.conf["plugins"][1]["timeoutSeconds"] = 8.into();
}

/// The result of a verb.
pub struct Met<T> {
    pub said: T,
    /// How many processes were killed during it.
    pub killed: usize,
    /// The plugin's CNI_NETNS, if it was seen.
    pub netns: Option<String>,
}

/// Runs `verb`. While the plugin works for `pod`, calls `end` with the plugin's processes, until that has killed one.
pub fn among<T: Send>(
    pod: &str,
    patience: Duration,
    end: impl Fn(&[i32]) -> usize,
    verb: impl FnOnce() -> T + Send,
) -> Met<T> {
    thread::scope(|scope| {
        let run = scope.spawn(verb);
        let (mut killed, mut netns) = (0, None);
        while killed == 0 && !run.is_finished() {
            let found = plugins_of(pod);
            if let Some(first) = found.first() {
                netns = environment(&proc(*first), "CNI_NETNS").or(netns);
                thread::sleep(patience);
                killed = end(&found);
            }
            thread::sleep(Duration::from_millis(1));
        }
        Met { said: run.join().expect("the verb ends"), killed, netns }
    })
}

pub fn end_all(pids: &[i32]) -> usize {
    pids.iter().filter(|pid| kill(Pid::from_raw(**pid), Signal::SIGKILL).is_ok()).count()
}

/// The instances with this text in their arguments.
pub fn instances(argument: &str) -> Vec<i32> {
    processes(|dir| {
        std::fs::read(dir.join("cmdline")).is_ok_and(|line| {
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("--launch") && line.contains(argument)
        })
    })
}

/// Kills them.
pub fn end_instances(argument: &str) -> usize {
    end_all(&instances(argument))
}

pub fn restart_ca(cluster: &mut Cluster) {
    cluster.world.stop("control", Signal::SIGKILL);
    cluster.start_ca();
}

/// Checks that no two live pods have valid certificates for the same address in the CA's ledger, that no two use the
/// same certificate, and that each uses its own.
pub fn certificates_are_distinct(cluster: &Cluster, node: &Node, live: &[Talker]) {
    // Queried before the ledger: a restarted instance may get another certificate at any time.
    let used: Vec<(&Talker, Value)> = live.iter().filter_map(|pod| Some((pod, answer_of(node, &pod.id)?))).collect();
    let dir = cluster.world.dir().join("ca").display().to_string();
    let ledger =
        super::run(&binary("nebula-ca").display().to_string(), &["certificate", "list", "--json", "--dir", &dir]);
    let ledger: Vec<Value> = serde_json::from_str(&ledger).expect("a list");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs();
    let valid = |issued: &&Value| issued["revoked"].is_null() && issued["not_after"].as_u64() > Some(now);
    let uids: BTreeSet<&str> = live.iter().map(|pod| pod.uid.as_str()).collect();
    let mut holders: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    let mut owners: BTreeMap<&str, &str> = BTreeMap::new();
    for issued in ledger.iter().filter(valid) {
        let uid = issued["subject"]["uid"].as_str().unwrap_or("a host");
        owners.insert(issued["fingerprint"].as_str().expect("a fingerprint"), uid);
        for network in issued["networks"].as_array().expect("networks") {
            if uids.contains(uid) || uid == "a host" {
                holders.entry(network.to_string()).or_default().insert(uid);
            }
        }
    }
    assert!(holders.values().all(|uids| uids.len() == 1), "an address has two live certificates: {holders:?}");
    let mut unique = BTreeSet::new();
    for (pod, status) in used {
        let Some(fingerprint) = status["certificate"]["fingerprint"].as_str().map(str::to_owned) else { continue };
        assert_eq!(owners.get(fingerprint.as_str()), Some(&pod.uid.as_str()), "{}", pod.id);
        assert!(unique.insert(fingerprint), "{} uses another's certificate", pod.id);
        for address in status["overlay"].as_array().into_iter().flatten() {
            assert!(unique.insert(address.to_string()), "{address} is used twice");
        }
    }
}

/// The status of an instance; `None` if it was just killed.
fn answer_of(node: &Node, pod: &str) -> Option<Value> {
    let launch = node.launch(pod)?;
    let socket = PathBuf::from(launch["status_socket"].as_str().expect("a path"));
    super::cluster::answer_at(&socket).ok()
}

/// Checks the capture: a pod that is not enrolled was captured unencrypted, as any other would have been, but no other
/// was.
pub fn only_control_was_heard(capture: &Capture, control: IpAddr) {
    let heard = capture.overlay_sources();
    let control: Vec<Ipv4Addr> = heard.keys().copied().filter(|source| IpAddr::from(*source) == control).collect();
    assert_eq!(control.len(), 1, "the capture does not see what leaves in clear");
    assert_eq!(heard.len(), 1, "packets for the overlay were seen in clear, by source: {heard:?}");
}

/// After the last DEL: runs `reconcile`, which may clean up, and checks that nothing is left.
pub fn nothing_is_left(cluster: &Cluster, node: &Node) {
    let state = node.dir.join("state");
    let tidied = Command::new(binary("nebula-cni-plugin")).arg("reconcile").arg(&state).status();
    assert!(tidied.expect("it runs").success());
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
    assert_eq!(end_instances(&state.display().to_string()), 0, "processes are left");
    let namespace = cluster.world.namespace_of(&node.name);
    let until = Instant::now() + Duration::from_secs(10);
    // The kernel removes links shortly after their namespace.
    while links(&namespace).len() > 3 && Instant::now() < until {
        thread::sleep(Duration::from_millis(50));
    }
    let names: BTreeSet<String> = links(&namespace).into_iter().collect();
    assert_eq!(names, ["cni0", "eth0", "lo"].map(str::to_owned).into(), "links are left");
    assert_eq!(leases(node), Vec::<String>::new(), "addresses are left");
    for what in [&["ip", "route", "show", "proto", "78"][..], &["nft", "list", "ruleset"]] {
        let left = cluster.world.exec(&node.name, what);
        assert!(left.status.success() && left.stdout.is_empty(), "{what:?}: {}", String::from_utf8_lossy(&left.stdout));
    }
}

/// Container ids for which the primary plugin has allocated addresses.
pub fn leases(node: &Node) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(node.dir.join("ipam").join(&node.network)) else { return Vec::new() };
    let entries = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("10."));
    let holder = |path: PathBuf| Some(std::fs::read_to_string(path).ok()?.lines().next()?.trim().to_owned());
    entries.filter_map(|entry| holder(entry.path())).collect()
}

/// Plugin processes of a pod, found by their environment, since they have no arguments.
fn plugins_of(pod: &str) -> Vec<i32> {
    processes(|dir| {
        std::fs::read_to_string(dir.join("comm")).is_ok_and(|name| name.trim() == "nebula-cni-plug")
            && environment(dir, "CNI_ARGS")
                .is_some_and(|args| args.split(';').any(|arg| arg.strip_prefix("K8S_POD_NAME=") == Some(pod)))
    })
}

fn environment(dir: &Path, name: &str) -> Option<String> {
    let all = std::fs::read(dir.join("environ")).ok()?;
    let all = String::from_utf8_lossy(&all).into_owned();
    all.split('\0').find_map(|pair| Some(pair.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

fn processes(is_wanted: impl Fn(&Path) -> bool) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter(|pid| is_wanted(&proc(*pid))).collect()
}

fn proc(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}
