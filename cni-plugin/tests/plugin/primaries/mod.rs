//! The plugin behind the primaries that clusters have. What each one makes is in `tests/primaries`, as its own
//! documents say it: its result is read, and on links like its own `isolate` and `capture` hold, or are refused with
//! the reason.

mod netkit;
mod tcx;

use std::fs;
use std::process::Command;

use nebula_cni_plugin::request::prev_result::PrevResult;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::capture::refused::arrives;
use crate::capture::site::{Pod, Primary as Kind, Site, ip};
use crate::harness::{Answer, Node};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/primaries");
const TCX: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/tools/tcx.py");

/// A folder of `tests/primaries`, and what works behind it.
struct Primary {
    name: &'static str,
    /// A pod elsewhere.
    remote: &'static str,
    rules: Rules,
}

/// What comes of rules on the node's end of a pod's link.
enum Rules {
    /// They see all of the pod's traffic.
    Hold,
    /// So they do, but what the node sends to the pod comes from outside: no probe of the kubelet is answered.
    HoldWithoutProbes,
    /// There are none; the reason contains this.
    Refused(&'static str),
}

const fn primary(name: &'static str, remote: &'static str, rules: Rules) -> Primary {
    Primary { name, remote, rules }
}

const PRIMARIES: [Primary; 15] = [
    primary("aws-branch-eni", "10.0.33.9", Rules::HoldWithoutProbes),
    primary("aws-network-policy", "10.0.33.9", Rules::Refused("traffic control on eni1a2b3c4d5e6 (qdisc clsact")),
    primary("aws-vpc-cni", "10.0.33.9", Rules::Hold),
    primary("azure", "10.244.2.9", Rules::Hold),
    primary("calico", "192.168.99.9", Rules::Hold),
    primary("calico-ebpf", "192.168.99.9", Rules::Refused("traffic control on cali1a2b3c4d5e6 (tcx, 2 of eBPF's")),
    primary("cilium", "10.0.2.9", Rules::Refused("traffic control on lxc1a2b3c4d5e6f (tcx, 1 of eBPF's")),
    primary("cilium-clsact", "10.0.2.9", Rules::Refused("traffic control on lxc1a2b3c4d5e6f (qdisc clsact")),
    primary("cilium-netkit", "10.0.2.9", Rules::Refused("eth0 of the pod is a netkit device")),
    primary("flannel", "10.244.2.9", Rules::Hold),
    primary("gke-dataplane-v2", "10.244.2.9", Rules::Refused("traffic control on veth1a2b3c4d (qdisc clsact")),
    primary("kind", "10.244.2.9", Rules::Hold),
    primary("kindnet", "10.244.2.9", Rules::Hold),
    primary("kube-router", "10.244.2.9", Rules::Hold),
    // Between two devices of a pair a packet loses its socket; whether it does in Open vSwitch is not known.
    primary("ovn-kubernetes", "10.244.1.9", Rules::HoldWithoutProbes),
];

/// The one whose devices not every kernel has; see [`netkit`].
const NETKIT: &str = "cilium-netkit";

impl Primary {
    /// What it answers to ADD, for a pod with this namespace.
    fn result(&self, netns: &str) -> String {
        let text = fs::read_to_string(format!("{FIXTURES}/{}/result.json", self.name)).unwrap();
        text.trim_end().replace("SANDBOX", netns)
    }

    /// The version of its chain.
    fn version(&self) -> Value {
        let folder = fs::read_dir(format!("{FIXTURES}/{}", self.name)).unwrap();
        let mut files = folder.map(|entry| entry.unwrap().path());
        let conf = files.find(|path| path.extension().is_some_and(|kind| kind.to_string_lossy().starts_with("conf")));
        let conf: Value = serde_json::from_slice(&fs::read(conf.unwrap()).unwrap()).unwrap();
        conf["cniVersion"].clone()
    }
}

/// A node with a pod on the links of a primary.
struct Laid {
    site: Site,
    pod: Pod,
    result: Value,
    /// The pod's own address.
    address: String,
}

impl Laid {
    fn new(primary: &Primary) -> Self {
        let mut site = Site::bare(Kind::Links);
        let pod = site.empty_pod("pod");
        let result: Value = serde_json::from_str(&primary.result(&format!("/run/netns/{}", pod.netns))).unwrap();
        let address = result["ips"][0]["address"].as_str().unwrap().split('/').next().unwrap().to_owned();
        let (here, there) = (site.namespace_of("node"), site.namespace_of("other"));
        site.inside("other", &["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
        ip(&["-n", &here, "route", "add", primary.remote, "via", "192.0.2.2"]);
        ip(&["-n", &there, "addr", "add", &format!("{}/32", primary.remote), "dev", "lo"]);
        ip(&["-n", &there, "route", "add", &address, "via", "192.0.2.1"]);
        let output = Command::new("ip")
            .args(["netns", "exec", &here, "sh", "-eu", &format!("{FIXTURES}/{}/links.sh", primary.name)])
            .envs([("POD", pod.netns.as_str()), ("OTHER", &there), ("PRIMARIES", FIXTURES), ("TCX", TCX)])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}: {}", primary.name, String::from_utf8_lossy(&output.stderr));
        site.node.entry["cniVersion"] = primary.version();
        Self { site, pod, result, address }
    }

    fn isolated(primary: &Primary) -> Self {
        let mut laid = Self::new(primary);
        let entry = laid.site.node.entry.as_object_mut().unwrap();
        entry.remove("capture");
        entry.insert("overlay".to_owned(), json!(["10.42.0.0/16"]));
        entry.insert("isolate".to_owned(), json!({"dns": []}));
        laid
    }

    fn captured(primary: &Primary) -> Self {
        let mut laid = Self::new(primary);
        let pods = |address: &Value| {
            let address: ipnet::IpNet = address["address"].as_str().unwrap().parse().unwrap();
            let bits = if address.addr().is_ipv4() { 16 } else { 64 };
            ipnet::IpNet::new(address.addr(), bits).unwrap().trunc()
        };
        let pods: Vec<_> = laid.result["ips"].as_array().unwrap().iter().map(pods).collect();
        laid.site.node.entry["overlay"] = json!(pods);
        laid.site.node.entry["capture"] = json!({"services": ["10.96.0.0/12"]});
        laid
    }

    fn call(&self, verb: &str) -> Answer {
        self.site.call_after(verb, &self.pod, self.result.clone())
    }

    /// ADD, and a device that nobody reads, as an instance makes it.
    fn add(&self) {
        self.call("ADD").expect_ok();
        ip(&["-n", &self.pod.netns, "tuntap", "add", "nebula0", "mode", "tun"]);
        ip(&["-n", &self.pod.netns, "link", "set", "nebula0", "up"]);
    }

    /// The device's end, and DEL as runtimes call it: again and again.
    fn remove(&self) {
        ip(&["-n", &self.pod.netns, "link", "del", "nebula0"]);
        for _ in 0..2 {
            self.call("DEL").expect_ok();
        }
    }

    /// CHECK, which runtimes do not call where the chain's version is before 0.4.0.
    fn check(&mut self) -> Answer {
        let version = self.site.node.entry["cniVersion"].take();
        self.site.node.entry["cniVersion"] = "0.4.0".into();
        let answer = self.call("CHECK");
        self.site.node.entry["cniVersion"] = version;
        answer
    }

    /// Whether one answers another.
    fn answers(&self, from: &str, to: &str) -> bool {
        self.site.succeeds(from, &["ping", "-n", "-q", "-c", "2", "-i", "0.2", "-W", "1", to])
    }

    /// Links, addresses, rules and routes of the node and the pod.
    fn state(&self) -> [String; 2] {
        let commands = "ip -br link | awk '{print $1}'; ip -4 -br addr | awk '{$2 = \"\"; print}'; ip rule; ip -6 rule; ip -4 route show table all;
            ip -6 route show table all | grep -Ev 'fe80|ff00'; nft list ruleset; tc qdisc";
        ["node", "pod"].map(|place| self.site.inside(place, &["sh", "-c", commands]))
    }

    /// ADD fails with the reason, and leaves nothing.
    fn is_refused(&self, primary: &Primary, code: u64, why: &str) {
        let name = primary.name;
        let before = self.state();
        let error = self.call("ADD").error();
        assert_eq!(error["code"], code, "{name}: {error}");
        assert!(error["msg"].as_str().unwrap().contains(why), "{name}: {error}");
        assert_eq!(self.state(), before, "{name}");
        self.call("DEL").expect_ok();
        self.left_nothing(name, &before);
    }

    fn left_nothing(&self, name: &str, before: &[String; 2]) {
        assert_eq!(self.state(), *before, "{name}");
        assert_eq!(self.site.rules(), "", "{name}");
        assert_eq!(self.site.node.residue(), Vec::<String>::new(), "{name}");
    }
}

/// Those whose links every kernel has.
fn common() -> impl Iterator<Item = &'static Primary> {
    PRIMARIES.iter().filter(|primary| primary.name != NETKIT)
}

#[test]
fn each_folder_is_in_the_table() {
    let mut folders: Vec<String> =
        fs::read_dir(FIXTURES).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    folders.sort();
    assert_eq!(folders, PRIMARIES.map(|primary| primary.name));
}

#[test]
fn the_result_of_each_primary_is_read_and_passed_on_as_it_is() {
    for primary in &PRIMARIES {
        let (name, text) = (primary.name, primary.result("/n"));
        let result = PrevResult::parse(&serde_json::from_str::<Box<RawValue>>(&text).unwrap()).unwrap();
        let listed: Value = serde_json::from_str(&text).unwrap();
        let listed: Vec<&str> =
            listed["ips"].as_array().unwrap().iter().map(|ip| ip["address"].as_str().unwrap()).collect();
        let first = |address: &str| address.split('/').next().unwrap().to_owned();
        let found: Vec<String> = result.addresses("eth0").iter().map(ToString::to_string).collect();
        assert_eq!(found, listed.iter().map(|address| first(address)).collect::<Vec<_>>(), "{name}");
        assert_eq!(result.pod_address("eth0").unwrap().to_string(), found[0], "{name}");
        let renumbered = result.renumbered("eth0", "10.42.0.7".parse().unwrap(), "1.0.0").unwrap();
        assert_eq!(renumbered, text.replace(listed[0], "10.42.0.7/32"), "{name}");

        let mut node = Node::new();
        node.entry["cniVersion"] = primary.version();
        node.prev_result = Some(text.clone());
        assert_eq!(node.call("ADD").expect_ok(), text, "{name}");
        node.call("DEL").expect_ok();
        assert_eq!(node.residue(), Vec::<String>::new(), "{name}");
    }
}

/// Behind each of them: ADD fails with `code` where the table says so; elsewhere `leaks` is true before ADD and after
/// DEL, and not in between.
fn holds_or_is_refused(lay: impl Fn(&Primary) -> Laid, code: u64, leaks: impl Fn(&Laid, &Primary) -> bool) {
    for primary in common() {
        let (name, mut laid) = (primary.name, lay(primary));
        if let Rules::Refused(why) = primary.rules {
            laid.is_refused(primary, code, why);
            continue;
        }
        assert!(leaks(&laid, primary), "{name}: the control");
        assert!(laid.answers("node", &laid.address), "{name}: the control");
        let before = laid.state();
        laid.add();
        laid.check().expect_ok();
        assert!(!leaks(&laid, primary), "{name}");
        assert_eq!(laid.answers("node", &laid.address), matches!(primary.rules, Rules::Hold), "{name}: probes");
        laid.remove();
        laid.left_nothing(name, &before);
        assert!(leaks(&laid, primary), "{name}: after DEL");
    }
}

#[test]
#[ignore = "needs root, network namespaces and tcx (Linux 6.6)"]
fn behind_each_primary_isolation_holds_or_is_refused_with_the_reason() {
    holds_or_is_refused(Laid::isolated, 115, |laid, primary| laid.answers("pod", primary.remote));
}

#[test]
#[ignore = "needs root, network namespaces and tcx (Linux 6.6)"]
fn behind_each_primary_capture_holds_or_is_refused_with_the_reason() {
    // A program of the pod sends as if it were the tunnel.
    holds_or_is_refused(Laid::captured, 118, |laid, primary| {
        arrives(&laid.site, "pod", primary.remote, "other", primary.remote)
    });
}
