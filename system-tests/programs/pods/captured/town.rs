//! Two nodes with captured pods and others, on one of three primary networks, with IPv4 and IPv6.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nebula_cni_contract::cluster_table::{Builder, EndpointState, ServiceEndpoint, ServicePort};
use nebula_cni_plugin::link::capture_rules::replace_clear;
use nebula_cni_plugin::link::service_choice::{self, Choice};
use nebula_cni_policy::model::NetworkPolicy;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::policies;
use super::traffic::{self, Answer, Conversation, PORT, Server};
use super::wiretap::{SECRET, Wiretaps};
use crate::service_manager::{PLACE, Systemd};
use crate::world::cluster::{Cluster, Node, answer_at, binary, gone_within, tool};
use crate::world::{self, World};

pub(super) const SOON: Duration = Duration::from_secs(10);

/// How pods are connected to their node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Primary {
    /// Ports of one bridge, which has the gateway's address: pods of a node are on one link.
    Bridge,
    /// A link to the node alone, addresses of one host, and a gateway that only answers ARP; like Calico.
    Links,
    /// Our own plugin.
    Own,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

pub(super) const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

impl Family {
    fn pods(self) -> &'static str {
        match self {
            Self::V4 => "10.42.0.0/16",
            Self::V6 => "fd00:42::/48",
        }
    }

    fn services(self) -> &'static str {
        match self {
            Self::V4 => "10.96.0.0/24",
            Self::V6 => "fd00:96::/112",
        }
    }

    fn pods_of_node(self, node: u16) -> String {
        match self {
            Self::V4 => format!("10.42.{node}.0/24"),
            Self::V6 => format!("fd00:42:0:{node}::/64"),
        }
    }

    /// A Service with the captured pods `db` and `api` as endpoints.
    pub(super) fn service(self) -> SocketAddr {
        let address = match self {
            Self::V4 => IpAddr::from([10, 96, 0, 10]),
            Self::V6 => IpAddr::from([0xfd00, 0x96, 0, 0, 0, 0, 0, 0x10]),
        };
        SocketAddr::new(address, 80)
    }

    /// The load balancer of [`Family::service`].
    pub(super) fn balanced(self) -> SocketAddr {
        let address = match self {
            Self::V4 => IpAddr::from([198, 51, 100, 10]),
            Self::V6 => IpAddr::from([0xfd00, 0x1b, 0, 0, 0, 0, 0, 0x10]),
        };
        SocketAddr::new(address, 80)
    }

    /// A Service whose endpoint is [`DB`] at [`LOADED_PORT`].
    pub(super) fn loaded(self) -> SocketAddr {
        let address = match self {
            Self::V4 => IpAddr::from([10, 96, 0, 20]),
            Self::V6 => IpAddr::from([0xfd00, 0x96, 0, 0, 0, 0, 0, 0x20]),
        };
        SocketAddr::new(address, 80)
    }

    /// Where load balancers have addresses.
    pub(super) fn load_balancers(self) -> &'static str {
        match self {
            Self::V4 => "198.51.100.0/24",
            Self::V6 => "fd00:1b::/64",
        }
    }

    /// A Service whose endpoint is not enrolled.
    pub(super) fn public_service(self) -> SocketAddr {
        let address = match self {
            Self::V4 => IpAddr::from([10, 96, 0, 53]),
            Self::V6 => IpAddr::from([0xfd00, 0x96, 0, 0, 0, 0, 0, 0x53]),
        };
        SocketAddr::new(address, 80)
    }
}

/// A pod, with its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) name: &'static str,
    /// Number of its node.
    pub(super) node: u8,
    /// Last byte of its addresses: `host-local` gives them in order.
    number: u8,
    is_captured: bool,
}

impl Pod {
    const fn new(name: &'static str, node: u8, number: u8, is_captured: bool) -> Self {
        Self { name, node, number, is_captured }
    }

    pub(super) fn address(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::from([10, 42, self.node, self.number]),
            Family::V6 => IpAddr::from([0xfd00, 0x42, 0, self.node.into(), 0, 0, 0, self.number.into()]),
        }
    }

    /// Where its server listens.
    pub(super) fn at(&self, family: Family) -> SocketAddr {
        SocketAddr::new(self.address(family), PORT)
    }
}

pub(super) const WEB: Pod = Pod::new("web", 1, 2, true);
pub(super) const API: Pod = Pod::new("api", 1, 3, true);
pub(super) const PLAIN: Pod = Pod::new("plain", 1, 4, false);
pub(super) const DB: Pod = Pod::new("db", 2, 2, true);
pub(super) const OTHER_PLAIN: Pod = Pod::new("plain2", 2, 3, false);
const PODS: [Pod; 5] = [WEB, API, PLAIN, DB, OTHER_PLAIN];
pub(super) const CAPTURED: [Pod; 3] = [WEB, API, DB];
/// The endpoints of [`Family::service`].
pub(super) const ENDPOINTS: [Pod; 2] = [DB, API];

/// The nodes with all pods, each with a server.
pub(super) struct Town {
    pub(super) cluster: Cluster,
    nodes: [Node; 2],
    version: u64,
    /// Network policies whose programs are in the table.
    policies: Option<Vec<NetworkPolicy>>,
    servers: Vec<Server>,
    /// The pods with the results of their ADD.
    added: Vec<(Pod, Value)>,
    /// The supervisor of the instances on the first node, if it is not the plugin.
    pub(super) systemd: Option<Systemd>,
}

impl Town {
    /// With a cluster table, as the node agent writes it, and Services that the nodes translate, as kube-proxy does.
    /// `change` may change the chain entry of both nodes.
    pub(super) fn new(primary: Primary, change: impl Fn(&mut Value)) -> Self {
        Self::captured(Cluster::new(), primary, change, |_, _| None)
    }

    /// The same, with the instances on the first node as units of systemd.
    pub(super) fn of_systemd(primary: Primary) -> Self {
        Self::captured(
            Cluster::below(Path::new(PLACE)),
            primary,
            |_| (),
            |cluster, node| {
                let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of(&node.name)));
                node.conf["plugins"][1]["supervisor"] = "systemd".into();
                node.bus = Some(systemd.bus());
                Some(systemd)
            },
        )
    }

    fn captured(
        cluster: Cluster,
        primary: Primary,
        change: impl Fn(&mut Value),
        supervise: impl FnOnce(&Cluster, &mut Node) -> Option<Systemd>,
    ) -> Self {
        let town = Self::with_pods(cluster, primary, change, supervise, true);
        town.open_guards(&[PLAIN, OTHER_PLAIN]);
        town
    }

    /// The same before anybody is captured.
    pub(super) fn uncaptured(primary: Primary) -> Self {
        Self::with_pods(Cluster::new(), primary, |_| (), |_, _| None, false)
    }

    fn with_pods(
        mut cluster: Cluster,
        primary: Primary,
        change: impl Fn(&mut Value),
        supervise: impl FnOnce(&Cluster, &mut Node) -> Option<Systemd>,
        is_captured: bool,
    ) -> Self {
        cluster.set_policy(&[("address", "same".into()), ("overlay", json!(FAMILIES.map(Family::pods)))]);
        let mut nodes = [1, 2].map(|number| node(&mut cluster, number, primary, &change));
        let systemd = supervise(&cluster, &mut nodes[0]);
        let mut town =
            Self { cluster, nodes, version: 0, policies: None, servers: Vec::new(), added: Vec::new(), systemd };
        town.write_table(&ENDPOINTS);
        for pod in PODS {
            town.cluster.world.namespace(pod.name);
        }
        town.added = town.add_pods(is_captured);
        town.connect([1, 2]);
        town.connect([2, 1]);
        town.translate_services("n1");
        town.translate_services("n2");
        town.servers = PODS.iter().map(|pod| Server::start(town.world(), pod.name)).collect();
        town.wait_for_addresses();
        town
    }

    /// Until the kernel has found that nobody else has an address (duplicate address detection), it answers nobody who
    /// asks for it.
    fn wait_for_addresses(&self) {
        let until = Instant::now() + SOON;
        let is_tentative =
            |host: &str| !self.world().run(host, &["ip", "-6", "addr", "show", "tentative"]).trim().is_empty();
        while ["n1", "n2"].into_iter().chain(PODS.map(|pod| pod.name)).any(is_tentative) {
            assert!(Instant::now() < until, "an address stays tentative");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Those of each node in order, because their addresses follow from it. Returns the results.
    fn add_pods(&self, is_captured: bool) -> Vec<(Pod, Value)> {
        let add = |node: &Node, number: u8| {
            let mut plain = node.clone();
            plain.conf["plugins"].as_array_mut().expect("plugins").truncate(1);
            let mut results = Vec::new();
            for pod in PODS.into_iter().filter(|pod| pod.node == number) {
                let node = if is_captured && pod.is_captured { node } else { &plain };
                let result = node.chain_ok(self.world(), "add", pod.name);
                let address = result["ips"][0]["address"].as_str().unwrap_or_default();
                assert!(address.starts_with(&pod.address(Family::V4).to_string()), "{pod:?} has {address}");
                results.push((pod, result));
            }
            results
        };
        thread::scope(|scope| {
            let nodes = self.nodes.iter().zip(1..).map(|(node, number)| scope.spawn(move || add(node, number)));
            let nodes: Vec<_> = nodes.collect();
            nodes.into_iter().flat_map(|node| node.join().expect("the pods are there")).collect()
        })
    }

    /// Captures the pods that run, as the node agent does: with the plugin's ADD and what the primary plugin said.
    pub(super) fn attach_all(&self) {
        for (pod, result) in self.added.iter().filter(|(pod, _)| pod.is_captured) {
            let node = self.node(*pod);
            let mut entry = node.conf["plugins"][1].clone();
            for key in ["name", "cniVersion"] {
                entry[key] = node.conf[key].clone();
            }
            entry["prevResult"] = result.clone();
            let name = pod.name;
            let mut plugin = Command::new("nsenter")
                .arg(format!("--net=/run/netns/{}", self.world().namespace_of(&node.name)))
                .arg(binary("nebula-cni-plugin"))
                .envs([("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", name), ("CNI_IFNAME", "eth0")])
                .env("CNI_NETNS", format!("/run/netns/{}", self.world().namespace_of(name)))
                .env("CNI_PATH", node.dir.join("bin"))
                .env("CNI_ARGS", format!("K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name};K8S_POD_UID=uid-{name}"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("the plugin runs");
            let mut input = plugin.stdin.take().expect("a pipe");
            input.write_all(entry.to_string().as_bytes()).expect("it reads");
            drop(input);
            let output = plugin.wait_with_output().expect("it ends");
            assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stdout));
        }
        self.open_guards(&[PLAIN, OTHER_PLAIN]);
    }

    pub(super) fn world(&self) -> &World {
        &self.cluster.world
    }

    /// Routes the pods of the other node to that node, in both families, and everything else to the control host: a
    /// node without a default route answers no ARP for the gateway of [`Primary::Links`].
    fn connect(&self, [own, other]: [u16; 2]) {
        let host = format!("n{own}");
        let gateways = [self.world().underlay(&format!("n{other}")), format!("2001:db8::{other}")];
        self.world().run(&host, &["ip", "route", "add", "default", "via", "192.0.2.1"]);
        self.world().run(&host, &["ip", "addr", "add", &format!("2001:db8::{own}/64"), "dev", "eth0", "nodad"]);
        for (family, gateway) in FAMILIES.into_iter().zip(&gateways) {
            self.world().run(&host, &["ip", "route", "add", &family.pods_of_node(other), "via", gateway]);
        }
    }

    /// From now on the network between the nodes silently drops IP packets of more than 1300 bytes.
    pub(super) fn narrow_path(&self) {
        // A super-packet would be judged by its whole length.
        for host in ["n1", "n2"] {
            self.world()
                .run(host, &["ethtool", "-K", "eth0", "gso", "off", "tso", "off", "tx-udp-segmentation", "off"]);
        }
        let rules = "table bridge narrow {
            chain forward { type filter hook forward priority 0; meta length > 1300 drop
            }
        }";
        let file = self.world().write("narrow.nft", rules).display().to_string();
        self.world().run("s", &["nft", "-f", &file]);
    }

    /// As kube-proxy does: every other new connection goes to the other endpoint.
    fn translate_services(&self, host: &str) {
        let mut rules = String::new();
        for (family, word) in FAMILIES.into_iter().zip(["ip", "ip6"]) {
            let to = |pod: Pod| format!("dnat to {}", pod.at(family));
            let of =
                |service: SocketAddr| format!("{word} daddr {} meta l4proto {{ tcp, udp }} th dport 80", service.ip());
            let (service, public) = (of(family.service()), of(family.public_service()));
            rules += &format!(
                "table {word} kube {{ chain prerouting {{ type nat hook prerouting priority dstnat
                 {service} numgen inc mod 2 0 {}
                 {service} {}
                 {public} {}
                 fib daddr type local meta l4proto {{ tcp, udp }} th dport {NODE_PORT} meta mark set 0x4000 {}
                 fib daddr type local meta l4proto {{ tcp, udp }} th dport {PUBLIC_NODE_PORT} meta mark set 0x4000 {}
                 }}
                 chain postrouting {{ type nat hook postrouting priority srcnat
                 meta mark 0x4000 masquerade
                 }}\n }}\n",
                to(DB),
                to(API),
                to(OTHER_PLAIN),
                to(DB),
                to(OTHER_PLAIN)
            );
        }
        let file = self.world().write(&format!("{host}.nft"), &rules);
        self.world().run(host, &["nft", "-f", &file.display().to_string()]);
    }

    /// The table of a cluster in which these are enrolled.
    fn builder(enrolled: &[Pod]) -> Builder {
        let mut builder = Builder::new();
        for pod in enrolled {
            for family in FAMILIES {
                builder.pod(pod.address(family), u64::from(pod.node) << 8 | u64::from(pod.number));
            }
        }
        builder
    }

    /// Writes a table in which the Service has these endpoints.
    pub(super) fn write_table(&mut self, endpoints: &[Pod]) {
        let mut builder = Self::builder(&CAPTURED);
        for family in FAMILIES {
            for pod in [PLAIN, OTHER_PLAIN] {
                builder.clear(pod.address(family));
            }
            service(&mut builder, family.service(), (endpoints, PORT), family);
            service(&mut builder, family.loaded(), (&[DB], LOADED_PORT), family);
            service(&mut builder, family.public_service(), (&[OTHER_PLAIN], PORT), family);
            for number in [1, 2] {
                let node = self.node_address(number, family);
                builder.node(node);
                builder.clear(node);
            }
            for (at, port, endpoints) in
                [(family.service(), NODE_PORT, endpoints), (family.public_service(), PUBLIC_NODE_PORT, &[OTHER_PLAIN])]
            {
                outer_ports(&mut builder, (at, port, family.balanced()), endpoints, family);
            }
            builder.clear_prefix(family.load_balancers().parse().expect("a range"));
        }
        self.publish(builder);
    }

    /// Writes a table with programs of these policies, and waits until they are enforced.
    pub(super) fn enforce(&mut self, policies: &[NetworkPolicy]) {
        self.enforce_for(policies, &ENDPOINTS);
    }

    /// The same, with these endpoints of the Service.
    pub(super) fn enforce_for(&mut self, policies: &[NetworkPolicy], endpoints: &[Pod]) {
        self.policies = Some(policies.to_vec());
        self.write_table(endpoints);
        for pod in CAPTURED {
            self.wait_for_table(pod);
        }
    }

    /// The address of a node on the network between the nodes.
    pub(super) fn node_address(&self, number: u8, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.world().underlay(&format!("n{number}")).parse().expect("an address"),
            Family::V6 => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, number.into()]),
        }
    }

    /// Writes a table that knows these enrolled pods and nobody else.
    pub(super) fn write_only(&mut self, enrolled: &[Pod]) {
        self.publish(Self::builder(enrolled));
    }

    /// A pod that is not enrolled has the address of this one: the table and the guards on the nodes say so.
    pub(super) fn give_away(&mut self, gone: Pod) {
        let enrolled: Vec<Pod> = CAPTURED.into_iter().filter(|pod| *pod != gone).collect();
        let mut builder = Self::builder(&enrolled);
        for pod in [PLAIN, OTHER_PLAIN, gone] {
            FAMILIES.iter().for_each(|family| builder.clear(pod.address(*family)));
        }
        self.open_guards(&[PLAIN, OTHER_PLAIN, gone]);
        self.publish(builder);
    }

    /// Only the pods that never are enrolled are reached in clear.
    pub(super) fn open_guards_of_others(&self) {
        self.open_guards(&[PLAIN, OTHER_PLAIN]);
    }

    fn publish(&mut self, mut builder: Builder) {
        if let Some(policies) = &self.policies {
            policies::add_programs(&mut builder, policies);
        }
        self.version += 1;
        self.put_table(&builder.finish(self.version));
    }

    /// Puts a file where the table is expected.
    pub(super) fn put_table(&self, bytes: &[u8]) {
        for node in &self.nodes {
            let folder = node.dir.join("state/cluster");
            std::fs::create_dir_all(&folder).expect("a folder");
            std::fs::write(folder.join("table.new"), bytes).expect("a table");
            std::fs::rename(folder.join("table.new"), folder.join("table")).expect("a table");
        }
    }

    pub(super) fn remove_table(&self) {
        for node in &self.nodes {
            let _ = std::fs::remove_file(node.dir.join("state/cluster/table"));
        }
    }

    /// Waits until the instance of a pod uses the table that was written last; returns how long that took.
    pub(super) fn wait_for_table(&self, pod: Pod) -> Duration {
        let began = Instant::now();
        while self.node(pod).status(pod.name)["table"]["version"] != self.version {
            assert!(began.elapsed() < SOON, "{}", self.node(pod).status(pod.name));
            thread::sleep(Duration::from_millis(5));
        }
        began.elapsed()
    }

    /// Tells the guards on the nodes who is not enrolled, as the agent does.
    fn open_guards(&self, clear: &[Pod]) {
        let clear: Vec<IpNet> =
            clear.iter().flat_map(|pod| FAMILIES.map(|family| IpNet::from(pod.address(family)))).collect();
        for node in &self.nodes {
            let (namespace, clear) = (self.world().namespace_of(&node.name), clear.clone());
            let visit = thread::spawn(move || {
                world::enter(&namespace);
                replace_clear(&clear)
            });
            let is_done = visit.join().expect("the visit ends").expect("the rules are there");
            assert!(is_done, "no captured pod on {}", node.name);
        }
    }

    /// Leads what a captured pod sends past its tunnel to the Service to one of its endpoints, as the agent does.
    pub(super) fn choose(&self, client: Pod, endpoint: Pod) {
        let choice = |family: Family, protocol: u8| Choice {
            service: family.service(),
            protocol,
            by_client: false,
            endpoints: vec![endpoint.at(family)],
        };
        let choices: Vec<Choice> =
            FAMILIES.iter().flat_map(|family| [6, 17].map(|protocol| choice(*family, protocol))).collect();
        let (namespace, pods) =
            (self.world().namespace_of(&self.node(client).name), FAMILIES.map(|family| client.address(family)));
        let visit = thread::spawn(move || {
            world::enter(&namespace);
            service_choice::replace(&pods, &choices)
        });
        visit.join().expect("the visit ends").expect("the kernel takes it");
    }

    pub(super) fn node(&self, pod: Pod) -> &Node {
        &self.nodes[usize::from(pod.node) - 1]
    }

    /// Ends the instance of a pod, if it runs.
    pub(super) fn kill_instance(&self, pod: Pod) -> bool {
        let Ok(status) = answer_at(&self.node(pod).status_socket(pod.name)) else { return false };
        let Some(id) = status["pid"].as_u64() else { return false };
        let number = Pid::from_raw(i32::try_from(id).expect("a process id"));
        let is_killed = kill(number, Signal::SIGKILL).is_ok();
        assert!(gone_within(id, SOON), "it outlives SIGKILL");
        is_killed
    }

    /// Changes the settings below `nebula` in the entry of a pod's node, and has its running pods follow them.
    pub(super) fn tell(&mut self, pod: Pod, settings: &Value) {
        let namespace = self.world().namespace_of(&self.node(pod).name);
        let node = &mut self.nodes[usize::from(pod.node) - 1];
        for (key, value) in settings.as_object().expect("settings") {
            node.conf["plugins"][1]["nebula"][key] = value.clone();
        }
        let said = node.refresh(&namespace);
        let is_told = said["refreshed"].as_array().into_iter().flatten();
        assert!(is_told.filter_map(Value::as_str).any(|told| told.ends_with(pod.name)), "{said}");
    }

    /// Installs another program on the node of a pod, and has it take over from the pod's instance.
    pub(super) fn upgrade(&self, pod: Pod) -> Command {
        let node = self.node(pod);
        node.install_another(&binary("nebula-cni-instance"));
        let mut command = node.upgrade(self.world(), pod.name);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Restarts dead instances, as the node agent does. The backoff of instances that keep dying is forgotten.
    pub(super) fn restart_instances(&self) {
        let until = Instant::now() + SOON;
        for number in 1..=2 {
            self.forget_restarts(number);
            while !self.reconcile(number).status().expect("it runs").success() {
                assert!(Instant::now() < until, "not restarted\n{}", self.nodes[number - 1].instance_logs());
                thread::sleep(Duration::from_millis(100));
            }
        }
    }

    /// The plugin's own repair on a node.
    pub(super) fn reconcile(&self, number: usize) -> Command {
        let node = &self.nodes[number - 1];
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.world().namespace_of(&node.name)));
        command.arg(binary("nebula-cni-plugin")).arg("reconcile").arg(node.dir.join("state"));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// As if the instances had lived for a minute.
    fn forget_restarts(&self, number: usize) {
        for pod in CAPTURED.iter().filter(|pod| usize::from(pod.node) == number) {
            let path = self.node(*pod).records().join(format!("{}-eth0.json", pod.name));
            let mut record: Value = serde_json::from_slice(&std::fs::read(&path).expect("a record")).expect("JSON");
            record["restarts"] = Value::Null;
            std::fs::write(&path, record.to_string()).expect("a record");
        }
    }

    /// Says `words` over TCP; asks until somebody answers.
    pub(super) fn converse(&self, words: &'static [u8], from: &str, target: SocketAddr) -> Answer {
        self.retry(from, target, |namespace| traffic::converse(namespace, words, target))
    }

    /// Opens a connection that lasts; tries until somebody accepts.
    pub(super) fn open(&self, from: &str, target: SocketAddr) -> Conversation {
        self.retry(from, target, |namespace| Conversation::open(namespace, target))
    }

    /// Calls `attempt` in the namespace of `from` until it succeeds: the first packets of a new path may be lost.
    fn retry<T>(&self, from: &str, target: SocketAddr, attempt: impl Fn(String) -> std::io::Result<T>) -> T {
        let until = Instant::now() + SOON;
        loop {
            match attempt(self.world().namespace_of(from)) {
                Ok(done) => return done,
                Err(error) if Instant::now() > until => panic!("{from} -> {target}: {error}\n{}", self.details()),
                Err(_) => thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Like [`Town::converse`], once.
    pub(super) fn try_converse(&self, from: &str, target: SocketAddr) -> std::io::Result<Answer> {
        traffic::converse(self.world().namespace_of(from), SECRET, target)
    }

    /// Like [`Town::converse`], with a datagram and its answer.
    pub(super) fn exchange(&self, words: &'static [u8], from: &str, target: SocketAddr) -> Answer {
        traffic::exchange(self.world().namespace_of(from), words, target)
            .unwrap_or_else(|error| panic!("{from} -> {target} by UDP: {error}\n{}", self.details()))
    }

    /// Whether all servers wait with their answers over TCP.
    pub(super) fn let_servers_wait(&self, wait: bool) {
        self.servers.iter().for_each(|server| server.wait(wait));
    }

    /// Sends an IP packet from a pod; returns what arrives in another.
    pub(super) fn pass_on(&self, from: Pod, to: (Pod, Family), packet: Vec<u8>) -> Vec<u8> {
        let [from, into] = [from, to.0].map(|pod| self.world().namespace_of(pod.name));
        let arrived = traffic::pass_on(from, into, packet, to.0.address(to.1));
        arrived.unwrap_or_else(|| panic!("it does not arrive\n{}", self.details()))
    }

    pub(super) fn wiretaps(&self) -> Wiretaps {
        Wiretaps::start(self.world())
    }

    fn details(&self) -> String {
        let shown = |host: &str, command: &str| {
            let words: Vec<&str> = command.split(' ').collect();
            let output = self.world().exec(host, &words);
            format!("{host}$ {command}\n{}", String::from_utf8_lossy(&output.stdout))
        };
        let mut text = String::new();
        for pod in [WEB, DB] {
            for command in
                ["ip rule", "ip route show table 20034", "ip -6 route show table 20034", "ip route", "ip addr"]
            {
                text += &shown(pod.name, command);
            }
            // A pod that is not captured has no instance.
            if let Some(launch) = self.node(pod).launch(pod.name) {
                let socket = launch["status_socket"].as_str().unwrap_or_default();
                text += &format!("{}\n", answer_at(Path::new(socket)).unwrap_or_default());
            }
        }
        format!("{text}{}{}", shown("n1", "nft list ruleset"), self.nodes[0].instance_logs())
    }
}

/// A node whose chain has this primary plugin and ours.
fn node(cluster: &mut Cluster, number: u16, primary: Primary, change: impl Fn(&mut Value)) -> Node {
    let mut node = cluster.node(&format!("n{number}"), "1.0.0");
    let ipam = json!({
        "type": "host-local", "dataDir": node.dir.join("ipam"),
        "ranges": FAMILIES.map(|family| [json!({ "subnet": family.pods_of_node(number) })]),
        "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
    });
    match primary {
        Primary::Bridge => node.conf["plugins"][0]["ipam"] = ipam,
        Primary::Links => {
            std::os::unix::fs::symlink(tool("cni-links.py"), node.dir.join("bin/links")).expect("a plugin");
            node.conf["plugins"][0] = json!({ "type": "links", "ipam": ipam });
        }
        Primary::Own => {
            // `host-local` keeps the first address of a range for a gateway.
            let first = FAMILIES.map(|family| Pod::new("", number as u8, 1, false).address(family));
            node.conf["plugins"][0] = json!({
                "type": "nebula-cni-plugin", "primary": true, "stateDir": node.dir.join("state"), "reserved": first,
                "subnets": FAMILIES.map(|family| family.pods_of_node(number)), "noMasquerade": FAMILIES.map(Family::pods),
            });
        }
    }
    node.own_program();
    let entry = &mut node.conf["plugins"][1];
    entry["capture"] = json!({ "ranges": FAMILIES.map(Family::pods), "services": FAMILIES.map(Family::services) });
    change(entry);
    node
}

/// Adds a port of all nodes and a load balancer for TCP and UDP.
fn outer_ports(
    builder: &mut Builder,
    (at, port, balanced): (SocketAddr, u16, SocketAddr),
    endpoints: &[Pod],
    family: Family,
) {
    let endpoint = |pod: &Pod| ServiceEndpoint {
        address: pod.address(family),
        port: PORT,
        state: EndpointState::Ready,
        is_on_this_node: false,
    };
    let list = builder.endpoints(endpoints.iter().map(endpoint));
    for protocol in [6, 17] {
        let own = ServicePort { address: at.ip(), port, protocol, affinity: None, this_node_only: false };
        builder.node_port(own, [(list, PORT)]);
        if port == NODE_PORT {
            builder.outer_port(ServicePort { address: balanced.ip(), port: balanced.port(), ..own }, [(list, PORT)]);
        }
    }
}

/// Ports of all nodes for [`Family::service`] and [`Family::public_service`].
pub(super) const NODE_PORT: u16 = 30_080;
pub(super) const PUBLIC_NODE_PORT: u16 = 30_053;

/// Of servers that a test starts itself.
pub(super) const LOADED_PORT: u16 = 7001;

/// Adds a Service for TCP, UDP and SCTP.
fn service(builder: &mut Builder, at: SocketAddr, (endpoints, port): (&[Pod], u16), family: Family) {
    let endpoint = |pod: &Pod| ServiceEndpoint {
        address: pod.address(family),
        port,
        state: EndpointState::Ready,
        is_on_this_node: false,
    };
    for protocol in [6, 17, 132] {
        let port = ServicePort { address: at.ip(), port: at.port(), protocol, affinity: None, this_node_only: false };
        builder.service(port, endpoints.iter().map(endpoint));
    }
}
