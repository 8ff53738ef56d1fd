//! What the agent of a full node costs in a large cluster: memory at rest, and CPU and time until a changed label is
//! in the node's cluster table. The agent is real; API server and CA are fakes in the test's process, and there is
//! no container runtime: launch contracts stand in for the instances of the node's own pods.
//!
//! `LARGE_PODS` (10,000) and `LARGE_POLICIES` (1,000) are the size of the cluster. Bars are asserted with programs
//! of a release build; what is a time may be `COST_SLACK` (2) times its bar, as in `cost.rs`.

mod objects;
mod servers;

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nebula_cni_contract::cluster_table::{Labels, Layout, Table};
use serde_json::{Value, json};

use self::objects::{NAMESPACES, NODES, OWN};
use self::servers::{FakeApi, FakeDirectory};

use crate::fake_ca::server_tls;
use crate::world::World;
use crate::world::chaos::number;
use crate::world::cluster::binary;
use crate::world::cost::{cpu_time, is_release, memory_kib, quantile, slack};

const RESIDENT_KIB: f64 = 25.0 * 1024.0;
const CPU_MS: f64 = 50.0;
const IN_TABLE_MS: f64 = 1_000.0;
/// With programs of a development build on a busy machine.
const COMPLETE_WITHIN: Duration = Duration::from_secs(300);
/// Two rounds in which the agent gives back memory.
const REST: Duration = Duration::from_secs(60);
/// For what the agent does behind a change.
const SETTLE: Duration = Duration::from_secs(2);
const CHANGES: usize = 10;

const PODS: &str = "/api/v1/pods";

/// The agent with its fakes.
struct Large {
    world: World,
    api: Arc<FakeApi>,
    config: String,
    root: PathBuf,
    pods: u32,
}

#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn the_agent_of_a_large_cluster_needs_little_and_a_changed_label_costs_little() {
    let (pods, policies) = (number("LARGE_PODS", 10_000) as u32, number("LARGE_POLICIES", 1_000) as u32);
    let large = Large::start(pods, policies);
    let agent = u64::from(large.world.pid("agent"));
    let began = Instant::now();
    large.wait_for("a complete table", COMPLETE_WITHIN, || large.is_complete());
    let (complete, cpu_start) = (began.elapsed(), cpu_time(agent));
    thread::sleep(REST);
    large.wait_for("policies that are enforced", SETTLE, || large.policies()["ok"] == true);

    let (idle, began) = (cpu_time(agent), Instant::now());
    thread::sleep(REST / 4);
    let idle = (cpu_time(agent) - idle).as_secs_f64() / began.elapsed().as_secs_f64();
    let memory = |kind: &str| memory_kib(agent, kind);
    let (resident, private, anonymous) = (memory("Rss:"), memory("Private_"), memory("Anonymous:"));
    let peak = status_kib(agent, "VmHWM:");

    let changed = |pods: [u32; CHANGES]| {
        let (mut cpu, mut times) = (Vec::new(), Vec::new());
        for (change, pod) in pods.into_iter().enumerate() {
            // In turns to what no pod has and no policy asks for, and back to what policies ask for.
            let app = if change % 2 == 0 { format!("changed-{pod}-{change}") } else { objects::app(pod) };
            let (before, began) = (cpu_time(agent), Instant::now());
            times.push(large.relabel(pod, &app).as_secs_f64() * 1e3);
            thread::sleep(SETTLE);
            let used = (cpu_time(agent) - before).as_secs_f64() - idle * began.elapsed().as_secs_f64();
            cpu.push(used * 1e3);
        }
        (cpu, times)
    };
    let (cpu, times) = changed(std::array::from_fn(|change| OWN + 1_234 * (change as u32 / 2) % (pods - OWN)));
    let (own_cpu, own_times) = changed(std::array::from_fn(|change| change as u32 / 2));
    let bytes = fs::metadata(large.table()).unwrap().len();
    println!("| the agent of a node with {OWN} of {pods} pods, {policies} policies | | bar |\n| --- | ---: | ---: |");
    println!("| resident memory, KiB | {resident:.0} | {RESIDENT_KIB:.0} |");
    println!("| private memory, KiB | {private:.0} | |\n| anonymous memory, KiB | {anonymous:.0} | |");
    println!("| peak of resident memory, KiB | {peak:.0} | |\n| the cluster table, bytes | {bytes} | |");
    println!("| until the table is complete, s | {:.1} | |", complete.as_secs_f64());
    println!("| CPU until then, s | {:.2} | |", cpu_start.as_secs_f64());
    println!("| CPU at rest, % of a core | {:.2} | |", idle * 100.0);
    let row =
        |all: &[f64]| format!("{:.1} ({:.1} to {:.1})", quantile(all, 0.5), quantile(all, 0.0), quantile(all, 1.0));
    println!("| CPU of a changed label beyond that, ms | {} | {CPU_MS:.0} |", row(&cpu));
    println!("| until it is in the table, ms | {} | {IN_TABLE_MS:.0} |", row(&times));
    println!("| CPU of a changed label of an own pod, ms | {} | |", row(&own_cpu));
    println!("| until it is in the table, ms | {} | |", row(&own_times));
    println!("| JSON of a pod, bytes | {} | |", large.api.bytes(PODS) / pods as usize);
    if is_release() {
        let log = large.world.log("agent");
        assert!(resident <= RESIDENT_KIB, "{resident} KiB, {anonymous} of them anonymous\n{log}");
        assert!(quantile(&cpu, 0.5) <= CPU_MS * slack(), "{cpu:?} ms\n{log}");
        assert!(quantile(&times, 0.5) <= IN_TABLE_MS * slack(), "{times:?} ms\n{log}");
    }
}

impl Large {
    fn start(pods: u32, policies: u32) -> Self {
        assert!(pods > 2 * OWN, "LARGE_PODS");
        let mut world = World::new();
        world.host("n1");
        let (tls, certificate) = server_tls();
        let api = Arc::new(FakeApi::default());
        api.fill(PODS, (0..pods).map(|pod| objects::pod(pod, &objects::app(pod))));
        api.fill("/api/v1/nodes", (1..=NODES).map(objects::node));
        api.fill("/api/v1/namespaces", (0..NAMESPACES).map(objects::namespace));
        api.fill("/api/v1/services", []);
        api.fill("/apis/discovery.k8s.io/v1/endpointslices", []);
        api.fill("/apis/networking.k8s.io/v1/networkpolicies", (0..policies).map(objects::policy));
        servers::start(world.namespace_of("n1"), 6443, &tls, Arc::clone(&api));
        servers::start(
            world.namespace_of("n1"),
            8443,
            &tls,
            Arc::new(FakeDirectory::new((0..pods).map(objects::member))),
        );

        let root = world.dir().join("node");
        launch_contracts(&root);
        let account = world.dir().join("account");
        fs::create_dir(&account).unwrap();
        let files = [("ca.crt", certificate.pem()), ("token", "of-the-agent".into()), ("namespace", "nebula".into())];
        for (name, text) in files {
            fs::write(account.join(name), text).unwrap();
        }
        let config = json!({
            "ca": {"url": "https://127.0.0.1:8443"}, "hostRoot": root, "network": "net",
            "confDirs": ["/etc/cni/net.d"], "binDirs": ["/opt/cni/bin"],
            "runtimeEndpoint": "unix:///run/no-runtime.sock",
            "policy": {"enabled": true},
            "entry": {"supervisor": "direct", "overlay": ["10.244.0.0/16", "fd00:10:244::/48"],
                "capture": {"services": ["10.96.0.0/16", "fd00:10:96::/112"], "policy": true}},
        });
        let config = world.write("agent.json", &config.to_string()).display().to_string();
        let (agent, account) = (binary("nebula-cni-agent").display().to_string(), account.display().to_string());
        let of_account = |name: &str| format!("{account}/{name}");
        let (token, trust) = (of_account("token"), of_account("ca.crt"));
        // As in a pod of Kubernetes. `ip netns exec` has made a mount namespace, where this hides the node's own /run.
        let script = "mount -t tmpfs none /var/run; mkdir -p /var/run/secrets/kubernetes.io
            ln -s \"$1\" /var/run/secrets/kubernetes.io/serviceaccount; shift
            KUBERNETES_SERVICE_HOST=127.0.0.1 KUBERNETES_SERVICE_PORT=6443 exec \"$@\"";
        let run = [
            "run",
            "--node",
            &objects::node_name(1),
            "--config",
            &config,
            "--token-file",
            &token,
            "--trust-file",
            &trust,
        ];
        let arguments = [&["-ec", script, "sh", &account, &agent][..], &run].concat();
        world.start_in("agent", "n1", Path::new("/bin/sh"), &arguments);
        Self { world, api, config, root, pods }
    }

    fn table(&self) -> PathBuf {
        self.root.join("run/nebula-cni/cluster/table")
    }

    fn read<T>(&self, look: impl FnOnce(&Table<'_>) -> T) -> Option<T> {
        let bytes = fs::read(self.table()).ok()?;
        let layout = Layout::read(&bytes).unwrap();
        Some(look(&layout.table(&bytes)))
    }

    /// Whether the table has every pod with a number, and programs for the node's own.
    fn is_complete(&self) -> bool {
        let has_number = |table: &Table<'_>, address: IpAddr| matches!(table.labels(address), Labels::Set(_));
        let is_complete = |table: &Table<'_>| {
            (0..self.pods).flat_map(objects::addresses).all(|address| has_number(table, address))
                && (0..OWN).flat_map(objects::addresses).all(|address| table.programs(address).is_some())
        };
        self.read(is_complete).unwrap_or(false) && self.policies()["ok"] == true
    }

    /// How the agent says that policies stand.
    fn policies(&self) -> Value {
        let agent = binary("nebula-cni-agent").display().to_string();
        let said = self.world.exec("n1", &[&agent, "status", "--json", "--config", &self.config]);
        serde_json::from_slice::<Value>(&said.stdout).unwrap_or_default()["policies"].take()
    }

    /// Changes the label of a pod; returns when the table says so.
    fn relabel(&self, pod: u32, app: &str) -> Duration {
        let number = || self.read(|table| objects::addresses(pod).map(|address| table.labels(address)));
        let modified = || fs::metadata(self.table()).unwrap().modified().unwrap();
        let (before, mut looked) = (number(), modified());
        let object = objects::pod(pod, app);
        let began = Instant::now();
        self.api.replace(PODS, pod as usize, object);
        loop {
            if looked != modified() {
                looked = modified();
                let took = began.elapsed();
                if number() != before {
                    return took;
                }
            }
            assert!(began.elapsed() < COMPLETE_WITHIN, "the label is not in the table\n{}", self.world.log("agent"));
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_for(&self, what: &str, within: Duration, is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < within, "{what}: {}\n{}", self.policies(), self.world.log("agent"));
            thread::sleep(Duration::from_millis(200));
        }
    }
}

/// What the plugin keeps of each pod of this node: its instance judges by programs.
fn launch_contracts(root: &Path) {
    let folder = root.join("run/nebula-cni/net");
    fs::create_dir_all(&folder).unwrap();
    for pod in 0..OWN {
        let contract = json!({"version": 1, "capture": {"policy": true, "sources": objects::addresses(pod)}});
        fs::write(folder.join(format!("pod-{pod}-eth0.json")), "{}").unwrap();
        fs::write(folder.join(format!("pod-{pod}-eth0.launch")), contract.to_string()).unwrap();
    }
}

/// A number of /proc/PID/status.
fn status_kib(pid: u64, key: &str) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
