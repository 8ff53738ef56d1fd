//! A node with pods in network namespaces of their own, on a bridge or on links to the node alone, and a second node
//! that the first one routes to. The plugin runs in the node's namespace, as under a runtime.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{self, Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use nebula_cni_contract::netns::in_namespace;
use serde_json::{Value, json};

use crate::harness::{Answer, Node, PLUGIN, wait};

static SITES: AtomicU32 = AtomicU32::new(0);

/// How pods are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Primary {
    /// Ports of one bridge, which has the gateway's address.
    Bridge,
    /// Links to the node alone, addresses of one host, and a gateway that only answers ARP.
    Links,
}

pub(crate) struct Site {
    pub(crate) node: Node,
    pub(crate) primary: Primary,
    id: String,
    namespaces: Vec<String>,
}

/// A pod, captured or not.
#[derive(Debug, Clone)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) netns: String,
    /// Last byte of its addresses.
    pub(crate) number: u8,
}

impl Pod {
    pub(crate) fn v4(&self) -> String {
        format!("10.244.1.{}", self.number)
    }

    pub(crate) fn v6(&self) -> String {
        format!("fd00:244:1::{}", self.number)
    }

    pub(crate) fn host_end(&self) -> String {
        format!("veth-{}", self.name)
    }
}

pub(crate) const NODE: &str = "10.244.1.1";
pub(crate) const NODE6: &str = "fd00:244:1::1";
pub(crate) const SERVICE: &str = "10.96.0.5";
pub(crate) const REMOTE_SERVICE: &str = "10.96.0.6";
pub(crate) const REMOTE: &str = "10.244.2.8";
pub(crate) const OTHER_NODE: &str = "192.0.2.2";

impl Site {
    pub(crate) fn new(primary: Primary) -> Self {
        let site = Self::bare(primary);
        let (here, there) = (site.namespace_of("node"), site.namespace_of("other"));
        ip(&["-n", &here, "route", "add", "10.244.2.0/24", "via", "192.0.2.2"]);
        ip(&["-n", &there, "route", "add", "10.244.1.0/24", "via", "192.0.2.1"]);
        // Pods of the other node: one that is enrolled, one that is not.
        for address in [REMOTE, "10.244.2.9"] {
            ip(&["-n", &there, "addr", "add", &format!("{address}/32"), "dev", "lo"]);
        }
        if primary == Primary::Bridge {
            ip(&["-n", &here, "link", "add", "cni0", "type", "bridge"]);
            for address in [&format!("{NODE}/24"), "fd00:244:1::1/64"] {
                ip(&["-n", &here, "addr", "add", address, "dev", "cni0", "nodad"]);
            }
            ip(&["-n", &here, "link", "set", "cni0", "up"]);
        } else {
            // As the address of the node's tunnel device in other primary networks.
            for address in [format!("{NODE}/32"), format!("{NODE6}/128")] {
                ip(&["-n", &here, "addr", "add", &address, "dev", "lo"]);
            }
        }
        site
    }

    /// The two nodes, without anything of pods.
    pub(crate) fn bare(primary: Primary) -> Self {
        let id = format!("nc{}-{}", process::id(), SITES.fetch_add(1, Ordering::Relaxed));
        let mut node = Node::new();
        node.entry["overlay"] = json!(["10.244.0.0/16", "fd00:244::/32"]);
        node.entry["capture"] = json!({"services": ["10.96.0.0/12"]});
        let mut site = Self { node, primary, id, namespaces: Vec::new() };
        let (here, there) = (site.namespace("node"), site.namespace("other"));
        for switch in ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"] {
            site.inside("node", &["sysctl", "-qw", &format!("{switch}=1")]);
        }
        ip(&["-n", &here, "link", "add", "under", "type", "veth", "peer", "name", "under", "netns", &there]);
        for (namespace, address) in [(&here, "192.0.2.1/24"), (&there, "192.0.2.2/24")] {
            ip(&["-n", namespace, "addr", "add", address, "dev", "under"]);
            ip(&["-n", namespace, "link", "set", "under", "up"]);
        }
        ip(&["-n", &here, "route", "add", "default", "via", "192.0.2.2"]);
        site
    }

    /// A pod to which no primary has given anything.
    pub(crate) fn empty_pod(&mut self, name: &str) -> Pod {
        Pod { name: name.to_owned(), netns: self.namespace(name), number: 0 }
    }

    /// Routes of both families to two pods that are not enrolled, 10.244.2.9 and fd00:244:2::9, and to the other node.
    pub(crate) fn reach_pods_of_the_other_node(&self) {
        let (here, there) = (self.namespace_of("node"), self.namespace_of("other"));
        ip(&["-n", &here, "addr", "add", "2001:db8::1/64", "dev", "under", "nodad"]);
        ip(&["-n", &there, "addr", "add", "2001:db8::2/64", "dev", "under", "nodad"]);
        ip(&["-n", &there, "addr", "add", "fd00:244:2::9/128", "dev", "lo"]);
        ip(&["-n", &here, "route", "add", "fd00:244:2::/64", "via", "2001:db8::2"]);
        ip(&["-n", &there, "route", "add", "fd00:244:1::/64", "via", "2001:db8::1"]);
        ip(&["-n", &there, "route", "add", "10.96.0.0/12", "via", "192.0.2.1"]);
    }

    fn namespace(&mut self, name: &str) -> String {
        let full = self.namespace_of(name);
        ip(&["netns", "add", &full]);
        self.namespaces.push(full.clone());
        ip(&["-n", &full, "link", "set", "lo", "up"]);
        full
    }

    pub(crate) fn namespace_of(&self, name: &str) -> String {
        format!("{}-{name}", self.id)
    }

    /// What the primary plugin does.
    pub(crate) fn pod(&mut self, name: &str, number: u8) -> Pod {
        let netns = self.namespace(name);
        let pod = Pod { name: name.to_owned(), netns, number };
        let (here, end) = (self.namespace_of("node"), pod.host_end());
        ip(&["-n", &here, "link", "add", &end, "type", "veth", "peer", "name", "eth0", "netns", &pod.netns]);
        self.inside(name, &["sysctl", "-qw", "net.ipv4.conf.eth0.rp_filter=1"]);
        let (v4, v6) = (pod.v4(), pod.v6());
        match self.primary {
            Primary::Bridge => {
                ip(&["-n", &here, "link", "set", &end, "master", "cni0", "up"]);
                ip(&["-n", &pod.netns, "link", "set", "eth0", "up"]);
                ip(&["-n", &pod.netns, "addr", "add", &format!("{v4}/24"), "dev", "eth0"]);
                ip(&["-n", &pod.netns, "addr", "add", &format!("{v6}/64"), "dev", "eth0", "nodad"]);
                ip(&["-n", &pod.netns, "route", "add", "default", "via", NODE]);
                ip(&["-n", &pod.netns, "route", "add", "default", "via", "fd00:244:1::1"]);
            }
            Primary::Links => {
                ip(&["-n", &here, "link", "set", &end, "up"]);
                ip(&["-n", &pod.netns, "link", "set", "eth0", "up"]);
                self.inside("node", &["sysctl", "-qw", &format!("net.ipv4.conf.{end}.proxy_arp=1")]);
                self.inside("node", &["sysctl", "-qw", &format!("net.ipv4.neigh.{end}.proxy_delay=0")]);
                ip(&["-n", &here, "route", "add", &v4, "dev", &end, "scope", "link"]);
                ip(&["-n", &here, "route", "add", &v6, "dev", &end]);
                ip(&["-n", &here, "addr", "add", "fe80::1:1/64", "dev", &end, "nodad"]);
                ip(&["-n", &pod.netns, "addr", "add", &format!("{v4}/32"), "dev", "eth0"]);
                ip(&["-n", &pod.netns, "addr", "add", &format!("{v6}/128"), "dev", "eth0", "nodad"]);
                ip(&["-n", &pod.netns, "route", "add", "169.254.1.1", "dev", "eth0", "scope", "link"]);
                ip(&["-n", &pod.netns, "route", "add", "default", "via", "169.254.1.1"]);
                ip(&["-n", &pod.netns, "route", "add", "default", "via", "fe80::1:1", "dev", "eth0"]);
            }
        }
        pod
    }

    /// What the primary plugin reports.
    fn result(&self, pod: &Pod) -> Value {
        let sandbox = format!("/run/netns/{}", pod.netns);
        let interfaces = json!([{"name": pod.host_end()}, {"name": "eth0", "sandbox": sandbox}]);
        let (bits, gateway) = match self.primary {
            Primary::Bridge => ([24, 64], NODE),
            Primary::Links => ([32, 128], "169.254.1.1"),
        };
        json!({"cniVersion": "1.0.0", "interfaces": interfaces, "routes": [{"dst": "0.0.0.0/0", "gw": gateway}], "ips": [
            {"address": format!("{}/{}", pod.v4(), bits[0]), "interface": 1},
            {"address": format!("{}/{}", pod.v6(), bits[1]), "interface": 1}]})
    }

    /// Calls the plugin for a pod, in the node's namespace.
    pub(crate) fn call(&self, verb: &str, pod: &Pod) -> Answer {
        self.call_after(verb, pod, self.result(pod))
    }

    /// The same after a primary plugin with another result.
    pub(crate) fn call_after(&self, verb: &str, pod: &Pod, result: Value) -> Answer {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace_of("node"), PLUGIN]);
        wait(self.start(command, verb, pod, result))
    }

    fn start(&self, mut command: Command, verb: &str, pod: &Pod, result: Value) -> Child {
        let mut entry = self.node.entry.clone();
        entry["prevResult"] = result;
        let id = format!("{}-{}", self.id, pod.name);
        let args = format!("K8S_POD_UID={id};K8S_POD_NAME={};K8S_POD_NAMESPACE=shop", pod.name);
        let mut child = command
            .envs(&self.node.env)
            .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", &id), ("CNI_ARGS", &args)])
            .env("CNI_NETNS", format!("/run/netns/{}", pod.netns))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(entry.to_string().as_bytes()).unwrap();
        child
    }

    /// Attaches a running pod, as the node agent does.
    pub(crate) fn attach(&self, pod: &Pod) -> Answer {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace_of("node"), PLUGIN, "attach"]);
        wait(self.start(command, "ADD", pod, self.result(pod)))
    }

    /// Gives a pod its capture, and a device that nobody reads, with the routes that an instance makes.
    pub(crate) fn add(&self, pod: &Pod) {
        self.call("ADD", pod).expect_ok();
        ip(&["-n", &pod.netns, "tuntap", "add", "nebula0", "mode", "tun"]);
        self.inside(&pod.name, &["sysctl", "-qw", "net.ipv6.conf.nebula0.addr_gen_mode=1"]);
        ip(&["-n", &pod.netns, "link", "set", "nebula0", "up"]);
        for (range, source) in [("10.244.0.0/16", pod.v4()), ("10.96.0.0/12", pod.v4()), ("fd00:244::/32", pod.v6())] {
            ip(&["-n", &pod.netns, "route", "add", range, "dev", "nebula0", "src", &source, "table", "20034"]);
        }
    }

    /// Like [`Site::add`], where only IPv4 is captured.
    pub(crate) fn add_v4_only(&self, pod: &Pod) {
        self.call("ADD", pod).expect_ok();
        ip(&["-n", &pod.netns, "tuntap", "add", "nebula0", "mode", "tun"]);
        self.inside(&pod.name, &["sysctl", "-qw", "net.ipv6.conf.nebula0.addr_gen_mode=1"]);
        ip(&["-n", &pod.netns, "link", "set", "nebula0", "up"]);
    }

    /// The device by which the node reaches a pod.
    pub(crate) fn way_to(&self, pod: &Pod) -> String {
        if self.primary == Primary::Bridge { "cni0".to_owned() } else { pod.host_end() }
    }

    /// A captured pod.
    pub(crate) fn captured(&mut self, name: &str, number: u8) -> Pod {
        let pod = self.pod(name, number);
        self.add(&pod);
        pod
    }

    pub(crate) fn inside(&self, name: &str, command: &[&str]) -> String {
        let namespace = self.namespace_of(name);
        run("ip", &[&["netns", "exec", &namespace], command].concat())
    }

    /// Whether the command succeeds.
    pub(crate) fn succeeds(&self, name: &str, command: &[&str]) -> bool {
        let namespace = self.namespace_of(name);
        let output = Command::new("ip").args(["netns", "exec", &namespace]).args(command).output().unwrap();
        output.status.success()
    }

    /// Runs `work` on a thread in a namespace.
    pub(crate) fn at<T: Send>(
        &self,
        name: &str,
        work: impl FnOnce() -> std::io::Result<T> + Send,
    ) -> std::io::Result<T> {
        in_namespace(&File::open(format!("/run/netns/{}", self.namespace_of(name))).unwrap(), work)
    }

    /// As the node agent does.
    pub(crate) fn set_clear(&self, prefixes: &[&str]) -> bool {
        let prefixes: Vec<ipnet::IpNet> = prefixes.iter().map(|text| text.parse().unwrap()).collect();
        self.at("node", || nebula_cni_plugin::link::capture_rules::replace_clear(&prefixes)).unwrap()
    }

    /// As kube-proxy does: a Service of UDP and TCP that leads to one pod.
    pub(crate) fn serve(&self, service: &str, to: &str) {
        let table = format!("s{}", service.replace('.', "-"));
        let chain = |hook: &str, name: &str| {
            format!("chain {name} {{\ntype nat hook {hook} priority -100;\nip daddr {service} dnat to {to};\n}}\n")
        };
        let text = format!("table ip {table} {{\n{}{}}}", chain("prerouting", "pre"), chain("output", "out"));
        self.inside("node", &["nft", &text]);
    }

    /// The same, with an address of the node as the source, as for node ports.
    pub(crate) fn serve_masqueraded(&self, service: &str, to: &str) {
        self.serve(service, to);
        let table = format!("m{}", service.replace('.', "-"));
        let text = format!(
            "table ip {table} {{\nchain post {{\ntype nat hook postrouting priority 100;\nct original ip daddr {service} masquerade;\n}}\n}}"
        );
        self.inside("node", &["nft", &text]);
    }

    pub(crate) fn mac(&self, name: &str, device: &str) -> String {
        self.inside(name, &["cat", &format!("/sys/class/net/{device}/address")]).trim().to_owned()
    }

    /// The link-local address of a device.
    pub(crate) fn link_local(&self, name: &str, device: &str) -> String {
        let text = self.inside(name, &["ip", "-o", "-6", "addr", "show", "dev", device, "scope", "link"]);
        let address = text.split_whitespace().find(|word| word.starts_with("fe80")).unwrap_or("fe80::9/64");
        address.split('/').next().unwrap().to_owned()
    }

    /// All nftables rules of the node that are ours.
    pub(crate) fn rules(&self) -> String {
        let all = self.inside("node", &["nft", "list", "tables"]);
        all.lines().filter(|line| line.contains("nebula")).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            let _ = Command::new("ip").args(["netns", "del", namespace]).status();
        }
        // The instances end when their state directory is gone; see `fake_instance`.
        let _ = fs::remove_dir_all(self.node.root());
    }
}

/// Listens for frames of the sender in a namespace.
pub(crate) struct Listener {
    child: Child,
}

impl Listener {
    pub(crate) fn start(site: &Site, name: &str, excluded: &[&str]) -> Self {
        let mut child = Command::new("ip")
            .args(["netns", "exec", &site.namespace_of(name), "python3", FRAMES, "listen"])
            .args(excluded)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut first).unwrap();
        assert_eq!(first.trim(), "ready");
        // Nothing more is in the buffer: the rest is written at the end.
        child.stdout = Some(output.into_inner());
        Self { child }
    }

    /// The names that arrived, each with the interface.
    pub(crate) fn heard(mut self) -> Vec<String> {
        // It ends with its input.
        drop(self.child.stdin.take());
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        self.child.wait().unwrap();
        let heard: Vec<(String, String)> = serde_json::from_str(&text).unwrap();
        heard.into_iter().map(|(name, interface)| format!("{name} on {interface}")).collect()
    }
}

pub(crate) const FRAMES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/tools/frames.py");

pub(crate) fn ip(arguments: &[&str]) {
    run("ip", arguments);
}

#[track_caller]
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}
