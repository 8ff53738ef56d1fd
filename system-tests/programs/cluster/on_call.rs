//! The table of docs/on-call.md in a real two-node cluster: each fault is caused, and the row's command names it.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::capture::town::{Town, list};
use super::policies::definition;
use crate::world::cluster::binary;
use crate::world::kube::{NAMESPACE, text};
use crate::world::pod_traffic::within;

/// Probes, watches and tables take some seconds each; an agent that stands still is asked for half a minute.
const NAMED_WITHIN: Duration = Duration::from_secs(90);
/// Nothing of the cluster listens there.
const PORT: u16 = 81;

/// A row of the table.
struct Row {
    reported: String,
    command: Vec<String>,
    says: String,
}

fn rows() -> Vec<Row> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/on-call.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let quoted = |cell: &str| cell.split('`').nth(1).unwrap_or_else(|| panic!("no `code` in {cell}")).to_owned();
    let table = page.lines().filter(|line| line.starts_with("| ")).skip(1).filter(|line| !line.starts_with("| ---"));
    table
        .map(|line| {
            let cells: Vec<&str> = line.split(" | ").collect();
            let command = quoted(cells[1]);
            let words = command.strip_prefix("kubectl nebula ").expect("a command of kubectl nebula").split(' ');
            let command = words.map(str::to_owned).collect();
            Row { reported: cells[0].trim_start_matches("| ").to_owned(), command, says: quoted(cells[2]) }
        })
        .collect()
}

/// Two pods on two nodes, with everything that the chart makes.
pub(super) struct Site {
    pub(super) town: Town,
    /// What listens at [`PORT`] of `db`.
    listener: RefCell<Option<TcpListener>>,
}

impl Site {
    /// `web` on node 1 and `db` on node 2, with a Service.
    pub(super) fn new() -> Self {
        let town = Town::bare();
        town.install();
        town.nodes.apply("definition.json", &definition().to_string());
        let site = Self { town, listener: RefCell::default() };
        site.make_pods();
        site.town.nodes.until("web reaches db", Duration::from_secs(60), || site.knock());
        site
    }

    /// Makes those of its pods that are not there.
    pub(super) fn make_pods(&self) {
        let pods = [("web", "test-node"), ("db", "node2")].map(|(name, node)| {
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "shop", "name": name, "labels": {"app": name}},
                "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
                    "containers": [{"name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
                                    "command": ["httpd", "-f", "-p", "8080", "-h", "/www"]}]}})
        });
        self.town.nodes.apply("pods.json", &list(&pods));
        for name in ["web", "db"] {
            self.town.nodes.wait_for_pod("shop", name);
        }
    }

    /// Opens a connection from `web` to `db`.
    pub(super) fn knock(&self) -> bool {
        let target = SocketAddr::new(self.town.pod_address("shop", "db"), 8080);
        let network = self.town.nodes.pod_networks()["shop/web"].clone();
        within(&network, move || TcpStream::connect_timeout(&target, Duration::from_millis(500)).is_ok())
    }

    /// Has something listen at [`PORT`] of `db`.
    fn listen(&self) {
        let network = self.town.nodes.pod_networks()["shop/db"].clone();
        let listening = within(&network, || TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).expect("a port"));
        self.listener.replace(Some(listening));
    }

    pub(super) fn ask(&self, command: &[impl AsRef<std::ffi::OsStr>]) -> String {
        let mut asked = self.town.nodes.tool("run");
        asked.arg(binary("kubectl-nebula")).args(command);
        text(&asked.output().expect("it runs"))
    }

    /// With a node that nobody has, its pods do not come back.
    fn keep_away(&self, object: &str, is_away: bool) {
        let selector = if is_away { json!("yes") } else { Value::Null };
        let patch = json!({"spec": {"template": {"spec": {"nodeSelector": {"nebula-test/away": selector}}}}});
        self.town.nodes.kubectl(&["patch", "-n", NAMESPACE, object, "-p", &patch.to_string()]);
        // All of them at once; and a pod that waits for a node may be in the way of its successor.
        let name = object.split_once('/').expect("a kind and a name").1;
        let label = format!("app.kubernetes.io/name={name}");
        self.town.nodes.kubectl(&["delete", "pod", "-n", NAMESPACE, "-l", &label, "--wait=false"]);
        if !is_away {
            self.town.nodes.wait_for_rollout(NAMESPACE, object, NAMED_WITHIN);
        }
    }

    fn with(&self, object: Value) -> Box<dyn FnOnce() + '_> {
        self.town.nodes.apply("fault.json", &object.to_string());
        let path = self.town.nodes.folder.path().join("fault.json").display().to_string();
        Box::new(move || drop(self.town.nodes.kubectl(&["delete", "-f", &path, "--wait=false"])))
    }

    /// Makes what is reported true. Returns what ends it.
    fn cause(&self, row: &Row) -> Box<dyn FnOnce() + '_> {
        let closed = |kind: &str| {
            json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
                   "metadata": {"namespace": "shop", "name": "closed"},
                   "spec": {"podSelector": {}, "policyTypes": [kind]}})
        };
        match (&*row.command[0], &*row.says) {
            ("check", says) => {
                let object = match says.split(':').next() {
                    Some("nebula-ca") => "deployment/nebula-ca",
                    _ => "statefulset/nebula-lighthouse",
                };
                self.keep_away(object, true);
                Box::new(move || self.keep_away(object, false))
            }
            ("status", "no answer") => {
                self.town.nodes.shell(2, "kill -STOP $(pgrep -o -f 'nebula-cni-agent run')");
                // Its kubelet may have ended it meanwhile.
                Box::new(|| self.town.nodes.shell(2, "kill -CONT $(pgrep -o -f 'nebula-cni-agent run') || :"))
            }
            ("status", "chain") => {
                self.town.nodes.shell(2, "mkdir /run/away; for f in /etc/cni/net.d/*; do case $f in *nebula*) ;; *) mv $f /run/away;; esac; done");
                Box::new(|| self.town.nodes.shell(2, "mv /run/away/* /etc/cni/net.d/"))
            }
            ("status", "policies") => self.with(json!({
                "apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy", "metadata": {"name": "names"},
                "spec": {"tier": "Admin", "priority": 7, "subject": {"namespaces": {}}, "egress": [
                    {"name": "out", "action": "Accept", "to": [{"domainNames": ["example.org"]}]}]}})),
            ("pods", _) => {
                let pid = self.town.instance_pid(2, "shop/db");
                self.town.nodes.shell(2, &format!("kill -STOP {pid}"));
                Box::new(move || self.town.nodes.shell(2, &format!("kill -CONT {pid}")))
            }
            ("flows", _) | ("why", "ingress-policy") => self.with(closed("Ingress")),
            ("why", "egress-policy") => self.with(closed("Egress")),
            ("why", "no-pod-selected") => self.with(json!({"apiVersion": "v1", "kind": "Service",
                "metadata": {"namespace": "shop", "name": "empty"},
                "spec": {"selector": {"app": "nobody"}, "ports": [{"port": 80}]}})),
            ("why", "nobody-listens") => {
                drop(self.listener.take());
                Box::new(|| self.listen())
            }
            ("why", "peer-silent") => {
                let rule = |verb: &str| format!("iptables -w -{verb} INPUT -p udp --dport 1024: -j DROP");
                self.town.nodes.shell(2, &rule("A"));
                // Its next instance has no tunnel.
                self.town.nodes.shell(1, &format!("kill -KILL {}", self.town.instance_pid(1, "shop/web")));
                Box::new(move || self.town.nodes.shell(2, &rule("D")))
            }
            ("upgrade", _) => {
                self.ask(&["upgrade", "pause"]);
                Box::new(|| drop(self.ask(&["upgrade", "resume"])))
            }
            _ => panic!("nothing causes this: {}", row.reported),
        }
    }

    /// Causes what the row is about, and types its command until it says so.
    fn try_row(&self, row: &Row) {
        let before = self.ask(&row.command);
        assert!(!before.contains(&row.says), "{}: before as well: {before}", row.reported);
        let mend = self.cause(row);
        let (began, mut typed) = (Instant::now(), 0);
        loop {
            self.knock();
            let asked = Instant::now();
            let said = self.ask(&row.command);
            typed += 1;
            if said.contains(&row.says) {
                let (after, took) = (began.elapsed().as_secs_f64(), asked.elapsed().as_secs_f64());
                println!("{}: after {after:.1} s, typed {typed} times, the last took {took:.1} s", row.reported);
                break;
            }
            assert!(began.elapsed() < NAMED_WITHIN, "{}: {said}\n{}", row.reported, self.town.details());
        }
        mend();
        if row.command[0] != "flows" {
            self.town.nodes.until(&row.reported, NAMED_WITHIN, || !self.ask(&row.command).contains(&row.says));
        }
        self.town.nodes.until("web reaches db again", NAMED_WITHIN, || self.knock());
    }
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn each_command_of_the_on_call_page_names_what_its_row_is_about() {
    let rows = rows();
    assert!(rows.len() >= 12, "{} rows", rows.len());
    let site = Site::new();
    site.listen();
    for row in &rows {
        site.try_row(row);
    }
    println!("{} faults, each named by one command", rows.len());
}
