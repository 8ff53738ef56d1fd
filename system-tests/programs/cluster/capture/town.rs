//! Two nodes with kube-proxy, cluster DNS, everything that the chart makes, and pods that ask and answer.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::cluster::answer_at;
use crate::world::kube::{NAMESPACE, Nodes, REPLACED_WITHIN, text};
use crate::world::pod_traffic::{self, Answer, EchoServer, OPEN, SECRET, Wiretaps, within};

/// Address of cluster DNS.
pub(super) const DNS: &str = "10.96.0.10";
/// How long a question may be repeated.
pub(super) const SOON: Duration = Duration::from_secs(20);

/// Two nodes with everything installed. In `shop`, which is enrolled: `client`, and `db-0` and `db-1` on one node
/// each, with Services `db` (headless), `web` and `web-v6`. In `other`: `near` and `far`, with Services `plain` and
/// `plain-v6`. All pods have addresses of both families, and only Services that say so have one of IPv6.
pub(crate) struct Town {
    pub(crate) nodes: Nodes,
    dns: Child,
    networks: BTreeMap<String, PathBuf>,
    _servers: Vec<EchoServer>,
}

impl Town {
    /// A cluster with DNS and nothing else.
    pub(crate) fn bare() -> Self {
        let script = std::env::temp_dir().join(format!("who-{}", std::process::id()));
        std::fs::write(&script, WHO).expect("write the script");
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("chmod");
        let nodes = Nodes::with_proxy(&[format!("{}=/www/cgi-bin/who", script.display())]);
        let _ = std::fs::remove_file(script);
        for namespace in [NAMESPACE, "shop", "other"] {
            nodes.kubectl(&["create", "namespace", namespace]);
        }
        nodes.apply("before.json", &list(&before()));
        nodes.wait_for_pod("kube-system", "dns");
        let network = nodes.pod_networks()["kube-system/dns"].clone();
        let hosts = nodes.folder.path().join("hosts");
        std::fs::write(&hosts, "").expect("write");
        let dns = Command::new("nsenter")
            .arg(format!("--net={}", network.display()))
            .args(["dnsmasq", "--keep-in-foreground", "--user=root", "--no-resolv", "--no-hosts", "--pid-file="])
            .arg(format!("--addn-hosts={}", hosts.display()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("dnsmasq runs");
        let town = Self { nodes, dns, networks: BTreeMap::new(), _servers: Vec::new() };
        town.nodes.volume();
        town
    }

    /// With wiretaps that were there before the pods.
    pub(super) fn new() -> (Self, Wiretaps) {
        let mut town = Self::bare();
        town.install();
        let wires = town.wiretaps();
        town.populate();
        town.wait_until_all_are_known();
        (town, wires)
    }

    /// Everything that the chart makes, with one command.
    pub(crate) fn install(&self) {
        let start = Instant::now();
        let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci/chart/capture.yaml");
        let manifests = std::fs::read_to_string(manifests).expect("what the chart makes");
        self.nodes.apply("nebula.yaml", &manifests.replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n"));
        let ca = self.cluster_ip(NAMESPACE, "nebula-ca");
        self.name(&[
            (ca, &format!("nebula-ca.{NAMESPACE}.svc")),
            (ca, &format!("nebula-ca.{NAMESPACE}.svc.cluster.local")),
        ]);
        self.nodes.wait_for_parts(start + Duration::from_secs(120));
        println!("from the command to all ready: {:.1} s", start.elapsed().as_secs_f64());
    }

    pub(super) fn populate(&mut self) {
        self.nodes.apply("town.json", &list(&population()));
        self.nodes.wait_for_rollout("shop", "statefulset/db", Duration::from_secs(90));
        for (namespace, name) in [("shop", "client"), ("other", "near"), ("other", "far")] {
            self.nodes.wait_for_pod(namespace, name);
        }
        self.networks = self.nodes.pod_networks();
        self._servers = ["shop/db-0", "shop/db-1", "other/near", "other/far"]
            .map(|pod| EchoServer::start(&self.network(pod), pod.split_once('/').expect("a name").1))
            .into();
        let web = self.cluster_ip("shop", "web");
        let [first, second] = ["db-0", "db-1"].map(|name| self.pod_address("shop", name));
        self.name(&[
            (web, "web.shop.svc.cluster.local"),
            (first, "db.shop.svc.cluster.local"),
            (second, "db.shop.svc.cluster.local"),
            (first, "db-0.db.shop.svc.cluster.local"),
            (second, "db-1.db.shop.svc.cluster.local"),
        ]);
    }

    /// Until the agents know all pods.
    pub(super) fn wait_until_all_are_known(&self) {
        for (pod, words) in [("shop/db-0", SECRET), ("shop/db-1", SECRET), ("other/near", OPEN), ("other/far", OPEN)] {
            let (namespace, name) = pod.split_once('/').expect("a name");
            self.ask("shop/client", (self.pod_address(namespace, name), 8080), words);
        }
    }

    /// Gives cluster DNS these names, too.
    pub(crate) fn name(&self, names: &[(IpAddr, &str)]) {
        let hosts: String = names.iter().map(|(address, name)| format!("{address} {name}\n")).collect();
        let file = std::fs::File::options().append(true).open(self.nodes.folder.path().join("hosts"));
        file.expect("the file").write_all(hosts.as_bytes()).expect("write the names");
        let pid = nix::unistd::Pid::from_raw(self.dns.id().try_into().expect("a process id"));
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGHUP).expect("dnsmasq runs");
    }

    pub(super) fn network(&self, pod: &str) -> PathBuf {
        self.networks.get(pod).unwrap_or_else(|| panic!("{pod} is not there: {:?}", self.networks.keys())).clone()
    }

    pub(super) fn node_network(&self, node: u8) -> PathBuf {
        PathBuf::from("/run/netns").join(self.nodes.namespace_of(node))
    }

    pub(super) fn wiretaps(&self) -> Wiretaps {
        Wiretaps::start(&[1, 2].map(|node| self.node_network(node)))
    }

    pub(crate) fn object(&self, kind: &str, namespace: &str, name: &str) -> Value {
        serde_json::from_str(&self.nodes.kubectl(&["get", kind, "-n", namespace, name, "-o", "json"])).expect("JSON")
    }

    pub(crate) fn pod_address(&self, namespace: &str, name: &str) -> IpAddr {
        let object = self.object("pod", namespace, name);
        object["status"]["podIP"].as_str().and_then(|address| address.parse().ok()).expect("an address")
    }

    /// The pod's address of the same family as `like`.
    pub(crate) fn pod_address_like(&self, like: IpAddr, namespace: &str, name: &str) -> IpAddr {
        let object = self.object("pod", namespace, name);
        let all = object["status"]["podIPs"].as_array().expect("addresses").iter();
        let mut all = all.filter_map(|entry| entry["ip"].as_str()?.parse::<IpAddr>().ok());
        let found = all.find(|address| address.is_ipv4() == like.is_ipv4());
        found.unwrap_or_else(|| panic!("{namespace}/{name} has no address like {like}: {object}"))
    }

    pub(crate) fn cluster_ip(&self, namespace: &str, name: &str) -> IpAddr {
        let object = self.object("service", namespace, name);
        object["spec"]["clusterIP"].as_str().and_then(|address| address.parse().ok()).expect("an address")
    }

    /// Asks until there is an answer.
    pub(super) fn ask(&self, from: &str, target: (IpAddr, u16), words: &'static str) -> Answer {
        self.asked(from, target, move |target| pod_traffic::ask(target, words))
    }

    pub(super) fn ask_udp(&self, from: &str, target: (IpAddr, u16), words: &'static str) -> Answer {
        self.asked(from, target, move |target| pod_traffic::ask_udp(target, words))
    }

    pub(super) fn asked(
        &self,
        from: &str,
        target: (IpAddr, u16),
        question: impl Fn(SocketAddr) -> std::io::Result<Answer> + Clone + Send + 'static,
    ) -> Answer {
        let (network, target, until) = (self.network(from), SocketAddr::from(target), Instant::now() + SOON);
        loop {
            let question = question.clone();
            match within(&network, move || question(target)) {
                Ok(answer) => return answer,
                Err(error) if Instant::now() > until => panic!("{from} -> {target}: {error}\n{}", self.details()),
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    pub(super) fn run_in(&self, network: &Path, words: &[&str]) -> String {
        let said = Command::new("nsenter").arg(format!("--net={}", network.display())).args(words).output();
        text(&said.expect("nsenter runs")).trim().to_owned()
    }

    /// What the instances of a node say of themselves.
    pub(crate) fn statuses(&self, node: u8) -> Vec<Value> {
        let sockets = self.nodes.on(node, &["find", "/run/nebula-cni", "-name", "*.status", "-type", "s"]);
        let root = self.nodes.root_of(node).display().to_string();
        let sockets = String::from_utf8_lossy(&sockets.stdout).into_owned();
        sockets.lines().filter_map(|path| answer_at(Path::new(&format!("{root}{path}"))).ok()).collect()
    }

    /// The process of a pod's instance, as its node numbers it.
    pub(crate) fn instance_pid(&self, node: u8, pod: &str) -> u64 {
        let status = self.statuses(node).into_iter().find(|status| status["pod"] == pod).expect("its instance");
        status["pid"].as_u64().expect("a number")
    }

    /// Names in the certificates of a pod's peers.
    pub(super) fn peers(&self, namespace: &str, name: &str) -> BTreeSet<String> {
        let pod = format!("{namespace}/{name}");
        let all = [1, 2].into_iter().flat_map(|node| self.statuses(node));
        let of_pod = all.filter(|status| status["pod"] == pod.as_str());
        let tunnels = of_pod.flat_map(|status| status["tunnels"].as_array().cloned().unwrap_or_default());
        tunnels.filter_map(|tunnel| Some(tunnel["name"].as_str()?.to_owned())).collect()
    }

    /// Two replicas with a Service of the same name.
    pub(super) fn deployment(&self, namespace: &str, name: &str) {
        let deployment = json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": namespace, "name": name},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"app": name}},
                     "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
                     "template": {"metadata": {"labels": {"app": name}}, "spec": web_server(&json!({}))}},
        });
        let service =
            service(namespace, name, name, &json!({"ports": [{"name": "http", "port": 80, "targetPort": 8080}]}));
        self.nodes.apply(&format!("{namespace}-{name}.json"), &list(&[deployment, service]));
    }

    /// Returns the number of before.
    pub(super) fn scale(&self, kind: &str, name: &str, replicas: u64) -> u64 {
        let before = self.object(kind, NAMESPACE, name)["spec"]["replicas"].as_u64().expect("a number");
        self.nodes.kubectl(&["scale", "-n", NAMESPACE, kind, name, &format!("--replicas={replicas}")]);
        before
    }

    /// Ends the agents at once, or lets them come back.
    pub(super) fn agents(&self, wanted: bool) {
        let selector = if wanted { Value::Null } else { json!("yes") };
        let patch = json!({"spec": {"template": {"spec": {"nodeSelector": {"nebula-test/away": selector}}}}});
        self.nodes.kubectl(&["patch", "daemonset", "-n", NAMESPACE, "nebula-cni-agent", "-p", &patch.to_string()]);
        if !wanted {
            let label = "app.kubernetes.io/name=nebula-cni-agent";
            self.nodes.until("the agents end", REPLACED_WITHIN, || {
                self.nodes.kubectl(&["get", "pods", "-n", NAMESPACE, "-l", label, "-o", "name"]).is_empty()
            });
        }
    }

    pub(crate) fn kill_api_server(&self) -> ApiServer {
        let folder = self.nodes.folder.path().join("control");
        let pid = std::fs::read_to_string(folder.join("apiserver.pid")).expect("a process id");
        let words = std::fs::read_to_string(format!("/proc/{}/cmdline", pid.trim())).expect("it runs");
        let words = words.split('\0').filter(|word| !word.is_empty()).map(str::to_owned).collect();
        let number = nix::unistd::Pid::from_raw(pid.trim().parse().expect("a process id"));
        nix::sys::signal::kill(number, nix::sys::signal::Signal::SIGKILL).expect("it runs");
        ApiServer { folder, words }
    }

    /// What the agents cost.
    pub(crate) fn costs(&self) -> String {
        let mut lines = Vec::new();
        for node in [1, 2] {
            let said = text(&self.nodes.on(node, &["sh", "-c", COSTS]));
            lines.push(format!("agent of node {node}: {}", said.trim().replace('\n', ", ")));
        }
        lines.join("\n")
    }

    /// Memory of the agents.
    pub(crate) fn resident_kib(&self) -> [u64; 2] {
        [1, 2].map(|node| {
            let said = text(&self.nodes.on(node, &["sh", "-c", COSTS]));
            let line = said.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a live agent");
            line.trim().trim_end_matches(" kB").parse().expect("a number")
        })
    }

    pub(crate) fn details(&self) -> String {
        let nodes = [1, 2].map(|node| {
            let rules = text(&self.nodes.on(node, &["nft", "list", "ruleset"]));
            let ours = rules.split("\ntable ").filter(|table| table.contains("nebula")).collect::<Vec<_>>().join("\n");
            let statuses: Vec<String> = self.statuses(node).iter().map(ToString::to_string).collect();
            format!("== node {node}\n{ours}\n{}", statuses.join("\n"))
        });
        format!("{}\n{}", nodes.join("\n"), self.nodes.state())
    }
}

impl Drop for Town {
    fn drop(&mut self) {
        let _ = self.dns.kill();
        let _ = self.dns.wait();
    }
}

/// An API server that was killed.
pub(crate) struct ApiServer {
    folder: PathBuf,
    words: Vec<String>,
}

impl ApiServer {
    pub(crate) fn start(&self, town: &Town) {
        let log = std::fs::File::options().append(true).open(self.folder.join("apiserver.log")).expect("its log");
        let mut child = Command::new("setsid")
            .args(["nsenter", &format!("--net={}", town.node_network(1).display())])
            .args(&self.words)
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("its log"))
            .stderr(log)
            .spawn()
            .expect("it starts");
        std::fs::write(self.folder.join("apiserver.pid"), child.id().to_string()).expect("write");
        // `kube-up.sh stop` waits until it is gone.
        std::thread::spawn(move || child.wait());
        town.nodes.until("the API server is back", Duration::from_secs(60), || {
            town.nodes.try_kubectl(&["get", "--raw", "/readyz"]).status.success()
        });
    }
}

/// What a cluster has before the installation: DNS, what kubeadm notes, and, because this release has EndpointSlices of
/// version 1beta1 only, the right to follow Endpoints instead, which the chart has no use for.
pub(crate) fn before() -> Vec<Value> {
    let configuration = "apiVersion: kubeadm.k8s.io/v1beta2\nkind: ClusterConfiguration\nnetworking:\n  \
                         dnsDomain: cluster.local\n  podSubnet: 10.244.0.0/16,fd00:10:244::/48\n  \
                         serviceSubnet: 10.96.0.0/16,fd00:10:96::/112\n";
    let mut dns = pod("kube-system", "dns", "test-node", "dns");
    dns["spec"] = json!({"nodeName": "test-node", "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
        "containers": [{"name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent", "command": ["sleep", "36000"]}]});
    let ports = json!({"clusterIP": DNS, "ports": [{"name": "udp", "port": 53, "protocol": "UDP"}, {"name": "tcp", "port": 53}]});
    vec![
        dns,
        service("kube-system", "kube-dns", "dns", &ports),
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "kube-system", "name": "kubeadm-config"},
            "data": {"ClusterConfiguration": configuration}}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "endpoints"},
            "rules": [{"apiGroups": [""], "resources": ["endpoints"], "verbs": ["list", "watch"]}]}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "endpoints"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "endpoints"},
            "subjects": [{"kind": "ServiceAccount", "name": "nebula-cni-agent", "namespace": NAMESPACE}]}),
    ]
}

fn population() -> Vec<Value> {
    let apart = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "db"}}, "topologyKey": "kubernetes.io/hostname"}]}});
    let mut server = web_server(&json!({"affinity": apart}));
    server["containers"][0]["ports"] = json!([{"containerPort": 8080, "hostPort": 8081}]);
    let http = json!({"name": "http", "port": 80, "targetPort": 8080});
    let mut node_port = http.clone();
    node_port["nodePort"] = 30080.into();
    let echo = json!({"name": "echo", "port": 7, "targetPort": 9000});
    let echo_udp = json!({"name": "echo-udp", "port": 7, "targetPort": 9000, "protocol": "UDP"});
    let v6 = |ports: Value| json!({"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv6"], "ports": ports});
    vec![
        json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"namespace": "shop", "name": "db"},
            "spec": {"replicas": 2, "serviceName": "db", "podManagementPolicy": "Parallel", "selector": {"matchLabels": {"app": "db"}},
                     "template": {"metadata": {"labels": {"app": "db"}}, "spec": server}}}),
        service("shop", "db", "db", &json!({"clusterIP": "None", "ports": [http]})),
        service("shop", "web", "db", &json!({"type": "NodePort", "ports": [node_port, echo, echo_udp]})),
        service("shop", "web-v6", "db", &v6(json!([http, echo, echo_udp]))),
        pod("shop", "client", "test-node", "client"),
        pod("other", "near", "test-node", "plain"),
        pod("other", "far", "node2", "plain"),
        service("other", "plain", "plain", &json!({"ports": [http]})),
        service("other", "plain-v6", "plain", &v6(json!([http]))),
    ]
}

/// A pod with a web server, on a node.
pub(super) fn pod(namespace: &str, name: &str, node: &str, app: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": namespace, "name": name, "labels": {"app": app}},
        "spec": web_server(&json!({"nodeName": node}))})
}

/// Specification of a pod whose web server answers with the pod's name. It serves for four more seconds after the pod
/// is deleted (`preStop`), so that clients learn of the deletion first.
fn web_server(further: &Value) -> Value {
    let mut spec = json!({
        "terminationGracePeriodSeconds": 10, "automountServiceAccountToken": false,
        "containers": [{
            "name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
            "command": ["httpd", "-f", "-p", "8080", "-h", "/www"],
            "readinessProbe": {"httpGet": {"path": "/cgi-bin/who", "port": 8080}, "periodSeconds": 1},
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", "4"]}}},
        }],
    });
    extend(&mut spec, further);
    spec
}

fn extend(spec: &mut Value, further: &Value) {
    for (key, value) in further.as_object().into_iter().flatten() {
        spec[key] = value.clone();
    }
}

fn service(namespace: &str, name: &str, app: &str, further: &Value) -> Value {
    let mut spec = json!({"selector": {"app": app}});
    extend(&mut spec, further);
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": namespace, "name": name}, "spec": spec})
}

pub(crate) fn list(items: &[Value]) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

const WHO: &str = "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n%s %s %s' \"$(hostname)\" \"$REMOTE_ADDR\" \"$QUERY_STRING\"\n";
/// Memory, processor time and the table.
const COSTS: &str = "pid=$(pgrep -o -f 'nebula-cni-agent run'); grep -E 'VmRSS|RssAnon' /proc/$pid/status; \
    awk '{print \"processor ticks\", $14 + $15, \"of 100 a second\"}' /proc/$pid/stat; stat -c 'table %s bytes' /run/nebula-cni/cluster/table";
