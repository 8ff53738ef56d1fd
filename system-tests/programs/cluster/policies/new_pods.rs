//! Pods that start in a namespace with default deny. They send from their first instruction on, and others send to
//! every address that a pod may get: nothing passes but what a policy allows, in tunnels and in clear.
//!
//! `KUBE_PODS` (60) is the number of pods and `KUBE_BATCH` (30) how many start at once; a node takes 110.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::capture::town::{Town, list};
use super::grid::{Grid, Pod, Way};
use super::site;
use crate::world::chaos::number;
use crate::world::kube::REPLACED_WITHIN;
use crate::world::pod_traffic::within;

/// Policies that select each new pod; all but one of them are there to be compiled.
pub(super) const POLICIES: u16 = 50;
const STARTED_WITHIN: Duration = Duration::from_secs(240);

/// What a pod says of itself: how many seconds after its first instruction the flow was answered that a policy allows,
/// whatever was answered that none allows, and how many UDP datagrams of IPv4 and IPv6 its kernel has seen, in the end
/// and before that instruction: the primary network's plugin runs before ours. A pod asks for ten seconds at least.
const SCRIPT: &str = r#"
now() { cut -d' ' -f1 /proc/uptime; }
udp() {
  awk '$1 == "Udp:" && $2 + 0 == $2 {print $2 + $3}' /proc/net/snmp
  awk '$1 == "Udp6InDatagrams" || $1 == "Udp6NoPorts" {sum += $2} END {print sum + 0}' /proc/net/snmp6
}
begun=$(now)
early=$(udp)
for to in $FORBIDDEN; do
  while :; do ping -q -c 20 -i 0.5 -W 1 "$to" >/dev/null 2>&1 && echo "echo of $to" >>/tmp/passed; sleep 0.5; done &
  while :; do [ -z "$(nc -w 1 "$to" 81 </dev/null 2>/dev/null)" ] || echo "TCP to $to" >>/tmp/passed; sleep 2; done &
done
until [ -n "$(nc -w 1 "$ALLOWED" 80 </dev/null 2>/dev/null)" ]; do sleep 0.1; done
first=$(now)
sleep 10
echo "answered $begun $first datagrams" $(udp) early $early "passed $(sort -u /tmp/passed 2>/dev/null | tr '\n' ',')"
kill $(jobs -p)
exec sleep 36000
"#;

/// What a pod of a batch says.
#[derive(Debug)]
struct Said {
    until_answered: f64,
    datagrams: u64,
    early: u64,
    passed: String,
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn nothing_of_a_new_pod_passes_before_its_policies_are_known_and_nothing_else_afterwards() {
    let (count, batch) = (number("KUBE_PODS", 60), number("KUBE_BATCH", 30).clamp(1, 190));
    let (town, grid) = site();
    let policies: Vec<Value> = (0..POLICIES).map(policy).collect();
    town.nodes.apply("policies.json", &list(&policies));
    let senders: Vec<Sender> = [('y', 'a'), ('y', 'b'), ('w', 'a'), ('w', 'b')]
        .map(|(namespace, name)| {
            Sender::start(&grid, Pod { namespace, name }, count.try_into().expect("some thousands"))
        })
        .into();
    let (mut started, mut took, mut early) = (0, Vec::new(), 0);
    while started < count {
        let names: Vec<String> = (started..count.min(started + batch)).map(|number| format!("new-{number}")).collect();
        let began = Instant::now();
        let mut pods: Vec<Value> = names.iter().enumerate().map(|(index, name)| pod(&grid, 'x', name, index)).collect();
        // No policy selects this one: it hears the senders.
        pods.push(pod(&grid, 'z', &format!("control-{started}"), 0));
        town.nodes.apply("batch.json", &list(&pods));
        let said = wait_for_all(&town, 'x', names.len());
        let wrong: Vec<_> = said.iter().filter(|(_, said)| said.datagrams > 0 || !said.passed.is_empty()).collect();
        assert!(wrong.is_empty(), "{wrong:#?}\n{}", town.details());
        early += said.values().filter(|said| said.early > 0).count();
        let control = wait_for_all(&town, 'z', 1);
        let heard = control.values().next().expect("the control").datagrams;
        assert!(heard > 0, "the senders reach nobody: {control:?}");
        took.extend(said.values().map(|said| said.until_answered));
        println!("{} pods after {:.0} s\n{}", names.len(), began.elapsed().as_secs_f64(), town.costs());
        for namespace in ["x", "z"] {
            town.nodes.kubectl(&["delete", "pod", "-n", namespace, "-l", "app=new", "--wait=false"]);
        }
        started += batch;
        town.nodes.until("the batch is gone", REPLACED_WITHIN, || {
            let left = |namespace| town.nodes.kubectl(&["get", "pods", "-n", namespace, "-l", "app=new", "-o", "name"]);
            left("x").is_empty() && left("z").is_empty()
        });
    }
    drop(senders);
    took.sort_by(f64::total_cmp);
    let at = |percent: usize| took[(took.len() - 1) * percent / 100];
    println!(
        "{} pods, {early} of them reached by datagrams before their first instruction; from that to the first answer: \
         p50 {:.2} s, p90 {:.2} s, max {:.2} s",
        took.len(),
        at(50),
        at(90),
        at(100)
    );
}

/// Isolates the new pods in both directions. The first allows them one flow, the others flows that nobody tries.
pub(super) fn policy(number: u16) -> Value {
    let port = if number == 0 { 80 } else { 10_000 + number };
    let peer = json!({"namespaceSelector": {"matchLabels": {"ns": "y"}}, "podSelector": {"matchLabels": {"pod": "a"}}});
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
           "metadata": {"namespace": "x", "name": format!("policy-{number}")},
           "spec": {"podSelector": {"matchLabels": {"app": "new"}}, "policyTypes": ["Ingress", "Egress"],
                    "ingress": [{"from": [peer], "ports": [{"port": 10_000 + number}]}],
                    "egress": [{"to": [peer], "ports": [{"port": port}]}]}})
}

/// A pod that asks, on one node or the other.
fn pod(grid: &Grid, namespace: char, name: &str, index: usize) -> Value {
    let peers = [('y', 'a'), ('y', 'b'), ('w', 'a'), ('w', 'b')].map(|(namespace, name)| Pod { namespace, name });
    let forbidden: Vec<String> =
        peers.iter().flat_map(|pod| [Way::V4, Way::V6].map(|way| grid.address(*pod, way).to_string())).collect();
    let allowed = grid.address(peers[0], Way::V4).to_string();
    let node = ["test-node", "node2"][index % 2];
    // The control may ask whomever it likes, and has nobody to ask.
    let forbidden = if namespace == 'x' { forbidden.join(" ") } else { String::new() };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace.to_string(), "name": name, "labels": {"app": "new"}},
        "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
                 "containers": [{"name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
                                 "command": ["sh", "-c", SCRIPT],
                                 "env": [{"name": "FORBIDDEN", "value": forbidden},
                                         {"name": "ALLOWED", "value": allowed}]}]},
    })
}

/// Until all pods of a batch have said what happened to them.
fn wait_for_all(town: &Town, namespace: char, count: usize) -> BTreeMap<String, Said> {
    let mut said = BTreeMap::new();
    let namespace = namespace.to_string();
    town.nodes.until("the pods have asked", STARTED_WITHIN, || {
        let words = ["logs", "-n", &namespace, "-l", "app=new", "--prefix", "--tail=-1", "--max-log-requests=200"];
        let logs = town.nodes.try_kubectl(&words);
        said = String::from_utf8_lossy(&logs.stdout).lines().filter_map(read).collect();
        said.len() == count
    });
    said
}

/// A line of the log of a pod, with its name before it.
fn read(line: &str) -> Option<(String, Said)> {
    let (name, line) = line.strip_prefix("[pod/")?.split_once("/c] ")?;
    let words: Vec<&str> = line.split(' ').collect();
    let ["answered", begun, first, "datagrams", v4, v6, "early", early_v4, early_v6, "passed", passed @ ..] =
        &words[..]
    else {
        return None;
    };
    let until_answered = first.parse::<f64>().ok()? - begun.parse::<f64>().ok()?;
    let number = |word: &str| word.parse::<u64>().ok();
    let early = number(early_v4)? + number(early_v6)?;
    let datagrams = number(v4)? + number(v6)? - early;
    Some((name.to_owned(), Said { until_answered, datagrams, early, passed: passed.join(" ") }))
}

/// Sends to all addresses that pods of the nodes may get, about once a second, until it is dropped. It is one flow
/// for each address, so that it fills no table.
struct Sender {
    is_over: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Sender {
    fn start(grid: &Grid, from: Pod, pods: u16) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let targets: Vec<IpAddr> = [('x', 'a'), ('x', 'b')]
            .into_iter()
            .flat_map(|(namespace, name)| [Way::V4, Way::V6].map(|way| grid.address(Pod { namespace, name }, way)))
            .flat_map(|address| neighbours(address, pods))
            .collect();
        let (network, stop) = (grid.network(from).to_owned(), Arc::clone(&is_over));
        let thread = thread::spawn(move || send(&network, &targets, &stop));
        Self { is_over, thread: Some(thread) }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

fn send(network: &Path, targets: &[IpAddr], is_over: &AtomicBool) {
    let socket = within(network, || UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).expect("a socket"));
    socket.set_nonblocking(true).expect("it does not block");
    while !is_over.load(Ordering::Relaxed) {
        for (index, target) in targets.iter().enumerate() {
            let target = match target {
                IpAddr::V4(target) => target.to_ipv6_mapped(),
                IpAddr::V6(target) => *target,
            };
            let _ = socket.send_to(b"who", SocketAddr::from((target, 81)));
            if index % 4 == 3 {
                thread::sleep(Duration::from_millis(4));
            }
        }
    }
}

/// The addresses that a node gives to its pods, one after another; those of IPv4 again and again.
fn neighbours(address: IpAddr, pods: u16) -> Vec<IpAddr> {
    match address {
        IpAddr::V4(address) => {
            let [first, second, third, _] = address.octets();
            (2..=254).map(|last: u8| IpAddr::from([first, second, third, last])).collect()
        }
        IpAddr::V6(address) => {
            let address = u128::from(address) >> 16 << 16;
            (2..pods + 64).map(|last| IpAddr::V6(Ipv6Addr::from(address | u128::from(last)))).collect()
        }
    }
}
