//! A node and a host outside in network namespaces of their own, and pods that the plugin gives their interface.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{Answer, PLUGIN, spawn, wait};

/// Addresses of the host outside, which has no route to pods.
pub(super) const OUTSIDE: [&str; 2] = ["192.0.2.9", "2001:db8::9"];
/// Addresses of the node.
pub(super) const NODE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

pub(super) struct Node {
    root: TempDir,
    id: String,
    pub(super) conf: Value,
    /// Results of ADD, by pod.
    results: BTreeMap<String, String>,
    namespaces: Vec<String>,
}

impl Node {
    pub(super) fn new(subnets: &[&str]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let root = tempfile::Builder::new().prefix("ncp").tempdir_in("/tmp").unwrap();
        let id = format!("ncp{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let conf = json!({"cniVersion": "1.1.0", "name": "net", "type": "nebula-cni-plugin", "primary": true, "subnets": subnets,
            "stateDir": root.path().join("state")});
        let mut node = Self { root, id, conf, results: BTreeMap::new(), namespaces: Vec::new() };
        for name in ["node", "outside"] {
            node.namespace(name);
        }
        let [here, there] = ["node", "outside"].map(|name| node.name(name));
        ip(&["-n", &here, "link", "add", "up0", "type", "veth", "peer", "name", "up0", "netns", &there]);
        for (place, addresses) in [(&here, NODE), (&there, OUTSIDE)] {
            let [v4, v6] = addresses;
            ip(&["-n", place, "addr", "add", &format!("{v4}/24"), "dev", "up0"]);
            ip(&["-n", place, "addr", "add", &format!("{v6}/64"), "dev", "up0", "nodad"]);
            ip(&["-n", place, "link", "set", "up0", "up"]);
        }
        node
    }

    /// The full name of a namespace.
    pub(super) fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.id)
    }

    /// Makes a namespace.
    pub(super) fn namespace(&mut self, name: &str) {
        let full = self.name(name);
        ip(&["netns", "add", &full]);
        ip(&["-n", &full, "link", "set", "lo", "up"]);
        self.namespaces.push(full);
    }

    /// Ends a pod's namespace, as a runtime does before or after DEL.
    pub(super) fn end_namespace(&mut self, name: &str) {
        let full = self.name(name);
        ip(&["netns", "del", &full]);
        self.namespaces.retain(|one| *one != full);
    }

    pub(super) fn netns(&self, pod: &str) -> PathBuf {
        Path::new("/run/netns").join(self.name(pod))
    }

    /// A call of the plugin in the node's namespace.
    pub(super) fn command(&self, verb: &str, pod: &str, before: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name("node")]).args(before).arg(PLUGIN).envs([
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", pod),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/usr/lib/cni"),
            ("CNI_ARGS", &format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={pod};K8S_POD_UID=u-{pod}")),
        ]);
        command.env("CNI_NETNS", self.netns(pod));
        command
    }

    /// The configuration of a call; CHECK and DEL get the result of ADD.
    pub(super) fn stdin(&self, verb: &str, pod: &str) -> String {
        let mut conf = self.conf.clone();
        if let Some(result) = self.results.get(pod).filter(|_| ["CHECK", "DEL"].contains(&verb)) {
            conf["prevResult"] = serde_json::from_str(result).unwrap();
        }
        conf.to_string()
    }

    pub(super) fn call(&self, verb: &str, pod: &str) -> Answer {
        wait(spawn(&mut self.command(verb, pod, &[]), self.stdin(verb, pod).as_bytes()))
    }

    /// Adds a pod with a namespace of its own; returns its addresses.
    #[track_caller]
    pub(super) fn add(&mut self, pod: &str) -> Vec<String> {
        if !self.netns(pod).exists() {
            self.namespace(pod);
        }
        let result = self.call("ADD", pod).expect_ok();
        let addresses = addresses(&result);
        self.results.insert(pod.to_owned(), result);
        addresses
    }

    pub(super) fn forget_result(&mut self, pod: &str) {
        self.results.remove(pod);
    }

    pub(super) fn has_result(&self, pod: &str) -> bool {
        self.results.contains_key(pod)
    }

    /// The result of a pod's ADD.
    pub(super) fn result(&self, pod: &str) -> Value {
        serde_json::from_str(&self.results[pod]).unwrap()
    }

    /// Runs a command in a namespace; returns whether it succeeds, and what it prints.
    pub(super) fn run(&self, place: &str, command: &[&str]) -> (bool, String) {
        let output = Command::new("ip").args(["netns", "exec", &self.name(place)]).args(command).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Whether an echo comes back.
    pub(super) fn pings(&self, from: &str, to: &str) -> bool {
        self.run(from, &["ping", "-c", "2", "-i", "0.2", "-W", "1", to]).0
    }

    /// Leases, by file name.
    pub(super) fn leases(&self) -> Vec<String> {
        let dir = self.root.path().join("state/.addresses/net");
        let names =
            fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> =
            names.filter(|name| ![".lock", "last-ipv4", "last-ipv6"].contains(&name.as_str())).collect();
        names.sort();
        names
    }

    /// What is left of pods: leases and other files, links, routes, neighbours, tables of rules.
    pub(super) fn left(&self) -> Vec<String> {
        let mut left = self.leases();
        for listing in [&["ip", "-o", "link"][..], &["ip", "route"], &["ip", "-6", "route"], &["ip", "neigh"]] {
            let (_, text) = self.run("node", listing);
            left.extend(text.lines().filter(|line| line.contains("neb")).map(str::to_owned));
        }
        let (_, tables) = self.run("node", &["nft", "list", "tables"]);
        left.extend(tables.lines().map(str::to_owned));
        left
    }

    /// How many echo requests of a family have arrived in a namespace.
    pub(super) fn echoes_received(&self, place: &str, is_v4: bool) -> u64 {
        let (_, text) = self.run(place, &["cat", "/proc/net/snmp", "/proc/net/snmp6"]);
        let words = |start: &str| -> Vec<Vec<String>> {
            let lines = text.lines().filter(|line| line.starts_with(start));
            lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
        };
        let counter = match &words(if is_v4 { "Icmp:" } else { "Icmp6InEchos" })[..] {
            [names, values] => values[names.iter().position(|name| name == "InEchos").unwrap()].clone(),
            [line] => line[1].clone(),
            _ => panic!("{text}"),
        };
        counter.parse().unwrap()
    }

    /// Which address of this family a server outside sees when a pod connects to it.
    pub(super) fn source_seen_outside(&self, pod: &str, is_v4: bool) -> String {
        let to = OUTSIDE[usize::from(!is_v4)];
        let (family, any) = if is_v4 { ("AF_INET", "0.0.0.0") } else { ("AF_INET6", "::") };
        let script = format!(
            "import socket; s = socket.create_server(('{any}', 7000), family=socket.{family}); s.settimeout(10); \
             print('ready', flush=True); print(s.accept()[1][0])"
        );
        let mut server = Command::new("ip");
        server.args(["netns", "exec", &self.name("outside"), "python3", "-c", &script]);
        let mut server = server.stdout(process::Stdio::piped()).spawn().unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(server.stdout.take().unwrap()));
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        let connect = format!("import socket; socket.create_connection(('{to}', 7000), 5)");
        self.run(pod, &["python3", "-c", &connect]);
        let seen = lines.next().map(|line| line.unwrap()).unwrap_or_default();
        server.wait().unwrap();
        seen
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            let _ = Command::new("ip").args(["netns", "del", namespace]).status();
        }
    }
}

/// The addresses in a result.
pub(super) fn addresses(result: &str) -> Vec<String> {
    let result: Value = serde_json::from_str(result).unwrap();
    let text = |ip: &Value| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned();
    result["ips"].as_array().unwrap().iter().map(text).collect()
}

#[track_caller]
pub(super) fn ip(arguments: &[&str]) {
    assert!(Command::new("ip").args(arguments).status().unwrap().success(), "ip {arguments:?}");
}
