//! Network policies from a fake API server to the verdicts of the programs in the table.

use nebula_cni_contract::launch::port_number;
use nebula_cni_contract::policy_test::{Answer, Destination, End, Explained, Outcome};

use super::*;
use crate::policy::asked::{self, AskError};
use crate::policy::watches::DEFINITION;
use crate::table::kept::Keep as _;
use crate::table::member::{self, Member};

/// The cluster as the agent of node `n1` sees it. Namespaces `shop` and `pay` are enrolled.
struct World {
    api: FakeApiServer,
    shared: Arc<Shared>,
    readiness: Readiness,
    dir: tempfile::TempDir,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

const WEB: &str = "10.244.1.7";
const DB: &str = "10.244.1.8";
const FAR: &str = "10.244.2.9";

impl World {
    /// `web` and `db` are on this node, `far` is not; `db` has a named port.
    fn new() -> Self {
        let world = Self {
            api: FakeApiServer::default(),
            shared: Arc::default(),
            readiness: Readiness::default(),
            dir: tempfile::tempdir().unwrap(),
            tasks: Vec::new(),
        };
        world.api.put("/apis/discovery.k8s.io/v1", json!({}));
        for n in [1, 2] {
            let node = json!({
                "metadata": {"name": format!("n{n}"), "labels": {"zone": format!("z{n}")}},
                "spec": {"podCIDR": format!("10.244.{n}.0/24")},
                "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{n}")}]},
            });
            world.api.put(&format!("/api/v1/nodes/n{n}"), node);
        }
        world.namespace("shop", json!({"team": "a"}));
        world.namespace("pay", json!({"team": "b"}));
        world.pod("shop", "web", WEB, json!({"app": "web"}), 80);
        world.pod("pay", "db", DB, json!({"app": "db"}), 5432);
        world.pod("pay", "far", FAR, json!({"app": "db"}), 5433);
        world
    }

    async fn started() -> Self {
        let mut world = Self::new();
        world.run().await;
        world.until("everything is open", || world.tcp(WEB, DB, 80) == Some(true)).await;
        world
    }

    /// Starts an agent, which knows nothing but what it finds in the table.
    async fn run(&mut self) {
        self.tasks.drain(..).for_each(|task| task.abort());
        self.shared = Arc::default();
        let entry = json!({"type": PLUGIN, "enrol": {"namespaces": ["shop", "pay"]}, "overlay": ["10.244.0.0/16"],
            "ca": {"url": "https://ca:1", "tlsCaFile": "/a", "tokenFile": "/b"}});
        let entry = Entry::of_list(&json!({"name": "n", "cniVersion": "1.0.0", "plugins": [entry]})).unwrap();
        {
            let mut facts = self.shared.facts();
            facts.settings.pod_ranges = vec!["10.244.0.0/16".parse().unwrap()];
            facts.settings.node_ranges = true;
            facts.settings.policies =
                Some(facts::PolicySettings { dns: "kube-system/kube-dns".into(), ..Default::default() });
            for (name, address) in [("web", WEB), ("db", DB), ("far", FAR)] {
                enrol(&mut facts, name, address);
            }
            facts.is_heard(Input::Directory);
        }
        let (client, shared) = (self.api.clone().start().await, Arc::clone(&self.shared));
        let outputs = Outputs {
            node: "n1".to_owned(),
            writer: Writer::open(&self.path()),
            enforced: Enforced::since_table(&self.path(), self.dir.path().to_owned(), false),
            ..Outputs::default()
        };
        let keeper = Keeper {
            shared: Arc::clone(&shared),
            outputs,
            metrics: Arc::new(Metrics::new(true)),
            readiness: self.readiness.clone(),
            unenforced: Unenforced::default(),
            failure: None,
        };
        self.tasks.push(tokio::spawn(keeper.run()));
        self.tasks.push(tokio::spawn(async move {
            let mut followers = JoinSet::new();
            follow_cluster(&mut followers, &shared, &client, (Rules::new(entry.clone(), entry, false), false), None);
            while followers.join_next().await.is_some() {}
        }));
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("cluster/table")
    }

    fn namespace(&self, name: &str, labels: Value) {
        self.api.put(&format!("/api/v1/namespaces/{name}"), json!({"metadata": {"name": name, "labels": labels}}));
    }

    fn pod(&self, namespace: &str, name: &str, address: &str, labels: Value, main: u16) {
        let node = if address.starts_with("10.244.2.") { "n2" } else { "n1" };
        let object = json!({
            "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{name}"), "labels": labels},
            "spec": {"nodeName": node, "containers": [{"name": "a", "ports": [{"name": "main", "containerPort": main}]}]},
            "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
        });
        self.api.put(&format!("/api/v1/namespaces/{namespace}/pods/{name}"), object);
    }

    fn policy(&self, namespace: &str, name: &str, spec: Value) {
        let object = json!({"metadata": {"namespace": namespace, "name": name}, "spec": spec});
        self.api.put(&policy_path(namespace, name), object);
    }

    fn cluster_policy(&self, name: &str, spec: Value) {
        let path = format!("/apis/policy.networking.k8s.io/v1alpha2/clusternetworkpolicies/{name}");
        self.api.put(&path, json!({"metadata": {"name": name}, "spec": spec}));
    }

    fn answer(&self, from: &str, to: &str, protocol: u8, port: u16) -> Option<Answer> {
        let bytes = fs::read(self.path()).ok()?;
        let layout = Layout::read(&bytes).unwrap();
        Some(asked::judge(&layout.table(&bytes), from.parse().unwrap(), to.parse().unwrap(), protocol, port))
    }

    /// Whether the ends that are on this node allow TCP; `None` if there is no program.
    fn tcp(&self, from: &str, to: &str, port: u16) -> Option<bool> {
        let answer = self.answer(from, to, 6, port)?;
        let ends = answer.egress.iter().chain(&answer.ingress);
        ends.map(|said| said.decision.allowed).reduce(|one, other| one && other)
    }

    fn ingress(&self, from: &str, to: &str, port: u16) -> Option<Explained> {
        Some(self.answer(from, to, 6, port)?.ingress?.decision)
    }

    async fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        for _ in 0..6_000 {
            if is_so() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let standing = self.readiness.now()[&Part::Policies].clone();
        panic!("{what}: {:?}, {standing:?}, {:?}", self.ingress(WEB, DB, 80), self.shared.problems());
    }

    /// Holds for as long as two tables take.
    async fn stays(&self, what: &str, is_so: impl Fn() -> bool) {
        for _ in 0..150 {
            assert!(is_so(), "{what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn policy_path(namespace: &str, name: &str) -> String {
    format!("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/{name}")
}

fn enrol(facts: &mut Facts, name: &str, address: &str) {
    let uid = format!("uid-{name}");
    let member = Member {
        addresses: member::addresses([address.parse().unwrap()]),
        incarnation: member::incarnation(&uid),
        port_number: port_number(&uid),
        is_host: false,
    };
    facts.members.put(member::id(&uid), Some(member));
}

fn from_app(app: &str) -> Value {
    json!([{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": app}}}]}])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_and_labels_take_effect_as_they_change() {
    let world = World::started().await;
    world.policy("pay", "deny", json!({"podSelector": {}}));
    world.until("default deny", || world.tcp(WEB, DB, 80) == Some(false)).await;
    assert_eq!(world.ingress(WEB, DB, 80).unwrap().policy.as_deref(), Some("pay/deny"));
    assert_eq!(world.tcp(DB, WEB, 80), Some(true), "egress is not isolated, and nothing selects the other");
    assert_eq!(world.tcp(FAR, WEB, 80), Some(true));
    world.policy("pay", "web", json!({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": from_app("web")}));
    world.until("allowed by label", || world.tcp(WEB, DB, 80) == Some(true)).await;
    assert_eq!(world.tcp(FAR, DB, 80), Some(false));
    // The labels of the peer, then those of the subject.
    world.pod("shop", "web", WEB, json!({"app": "other"}), 80);
    world.until("relabelled", || world.tcp(WEB, DB, 80) == Some(false)).await;
    world.pod("pay", "far", FAR, json!({"app": "web"}), 5433);
    world.until("a pod of another node", || world.tcp(FAR, DB, 80) == Some(true)).await;
    world.pod("pay", "db", DB, json!({"app": "x"}), 5432);
    world.until("the subject", || world.tcp(FAR, DB, 80) == Some(false)).await;
    world.api.remove(&policy_path("pay", "deny"));
    world.until("gone", || world.tcp(WEB, DB, 80) == Some(true)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flow_is_asked_about_by_name_and_the_answer_names_policy_and_rule() {
    let world = World::started().await;
    world.policy("pay", "web", json!({"podSelector": {}, "ingress": from_app("web")}));
    world.until("enforced", || world.tcp(FAR, DB, 80) == Some(false)).await;
    let client = world.api.clone().start().await;
    let address = async |text: &str| {
        let end = Destination::parse(text).unwrap().end;
        asked::address(&end, async || Ok(client.clone())).await
    };
    assert_eq!(address("web.shop:80").await.unwrap().to_string(), WEB);
    assert_eq!(address("10.0.0.1").await.unwrap().to_string(), "10.0.0.1");
    assert!(matches!(address("none.shop").await, Err(AskError::NoPod(name)) if name == "none.shop"));
    let answer = world.answer(WEB, DB, 6, 80).unwrap();
    assert_eq!(answer.outcome(), Outcome::Allowed);
    let json = serde_json::to_value(answer.clone().without_sentences()).unwrap();
    let rule = json!({"allowed": true, "reason": "rule", "tier": "NetworkPolicy", "policy": "pay/web", "rule": 0});
    assert_eq!((&json["ingress"], &json["inTunnel"]), (&rule, &json!(true)), "{json}");
    assert_eq!(json["egress"], json!({"allowed": true, "reason": "no-policy"}));
    let text = answer.text(&End::Address(WEB.parse().unwrap()), &End::Address(DB.parse().unwrap()));
    assert!(text.contains("allowed by rule 0 of pay/web, tier NetworkPolicy"), "{text}");
    assert_eq!(world.answer(WEB, FAR, 6, 80).unwrap().outcome(), Outcome::Undecided);
    let refused = world.answer(FAR, DB, 6, 80).unwrap();
    assert_eq!((refused.outcome(), &*refused.ingress.unwrap().decision.reason), (Outcome::Refused, "isolated"));
    assert!(!world.answer("192.0.2.99", DB, 6, 80).unwrap().in_tunnel);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespaces_and_named_ports_decide() {
    let world = World::started().await;
    let peers = json!([{"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}], "ports": [{"port": "main"}]}]);
    world.policy("pay", "team-a", json!({"podSelector": {}, "ingress": peers}));
    world.until("its named port", || world.tcp(WEB, DB, 80) == Some(false)).await;
    assert_eq!(world.tcp(WEB, DB, 5432), Some(true));
    assert_eq!(world.tcp(FAR, DB, 5432), Some(false));
    world.namespace("shop", json!({"team": "c"}));
    world.until("the namespace has other labels", || world.tcp(WEB, DB, 5432) == Some(false)).await;
    world.namespace("pay", json!({"team": "a"}));
    world.until("the other one, too", || world.tcp(FAR, DB, 5432) == Some(true)).await;
    // Egress by name means the port of each destination.
    let egress = json!([{"ports": [{"port": "main"}]}]);
    world.policy("shop", "out", json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": egress}));
    let out = |to: &str, port: u16| world.answer(WEB, to, 6, port).unwrap().egress.unwrap().decision.allowed;
    world.until("egress by name", || !out(FAR, 80)).await;
    assert!(out(DB, 5432) && out(FAR, 5433) && !out(FAR, 5432));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_policies_count_once_their_definition_appears_and_until_it_is_gone() {
    let world = World::started().await;
    let rule = json!({"name": "no-web", "action": "Deny", "from": [{"namespaces": {"matchLabels": {"team": "a"}}}]});
    let spec = json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "ingress": [rule]});
    world.cluster_policy("wall", spec.clone());
    world.stays("nothing is known of it", || world.tcp(WEB, DB, 80) == Some(true)).await;
    world.api.put(DEFINITION, json!({"spec": {"versions": [{"name": "v1alpha2", "served": true}]}}));
    world.until("it appears", || world.tcp(WEB, DB, 80) == Some(false)).await;
    let said = world.ingress(WEB, DB, 80).unwrap();
    assert_eq!(
        (said.tier.as_deref(), said.policy.as_deref(), said.rule_name.as_deref()),
        (Some("Admin"), Some("wall"), Some("no-web"))
    );
    assert_eq!(world.tcp(FAR, DB, 80), Some(true));
    // Nodes by their labels: the pod may not reach the other node, whose address no selector of pods knows.
    let far_nodes = json!({"action": "Deny", "to": [{"nodes": {"matchLabels": {"zone": "z2"}}}]});
    let nodes = json!({"tier": "Admin", "priority": 2, "subject": {"namespaces": {}}, "egress": [far_nodes]});
    world.cluster_policy("nodes", nodes);
    let out = |to: &str| world.answer(WEB, to, 6, 22).unwrap().egress.unwrap().decision;
    world.until("nodes", || !out("192.0.2.2").allowed).await;
    assert_eq!((out("192.0.2.1").reason.as_str(), out("192.0.2.3").allowed), ("own-node", true));
    // Of a newer version: the last one stays, and the status says so.
    world.cluster_policy("wall", json!({"tier": "Later", "priority": 1, "subject": {"namespaces": {}}}));
    let told = || world.readiness.now()[&Part::Policies].reason.contains("ClusterNetworkPolicy wall: ");
    world.until("it cannot be read", told).await;
    assert_eq!(world.tcp(WEB, DB, 80), Some(false));
    world.cluster_policy("wall", spec);
    world.until("it can be read again", || !told()).await;
    // An error, and then a definition that is gone.
    world.api.breaks(Some("clusternetworkpolicies"));
    world.stays("errors change nothing", || world.tcp(WEB, DB, 80) == Some(false)).await;
    world.api.remove(DEFINITION);
    world.stays("errors change nothing", || world.tcp(WEB, DB, 80) == Some(false)).await;
    world.api.breaks(None);
    world.until("it is gone", || world.tcp(WEB, DB, 80) == Some(true)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_watch_opens_nothing_and_only_a_complete_list_does() {
    let world = World::started().await;
    world.policy("pay", "deny", json!({"podSelector": {}}));
    world.until("default deny", || world.tcp(WEB, DB, 80) == Some(false)).await;
    world.api.expire();
    world.stays("listed again after 410", || world.tcp(WEB, DB, 80) == Some(false)).await;
    world.api.breaks(Some("networkpolicies"));
    world.api.remove(&policy_path("pay", "deny"));
    world.until("it says so", || world.shared.problems().contains_key(Input::Policies.name())).await;
    world.stays("the list fails", || world.tcp(WEB, DB, 80) == Some(false)).await;
    world.api.is_away(true);
    world.api.breaks(None);
    world.stays("the server is away", || world.tcp(WEB, DB, 80) == Some(false)).await;
    world.api.is_away(false);
    world.until("the list is complete, and empty", || world.tcp(WEB, DB, 80) == Some(true)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_agent_goes_on_with_the_programs_of_the_table_until_everything_is_listed() {
    let mut world = World::started().await;
    world.policy("pay", "web", json!({"podSelector": {}, "ingress": from_app("web")}));
    world.until("allowed by label", || world.tcp(FAR, DB, 80) == Some(false)).await;
    assert_eq!(world.tcp(WEB, DB, 80), Some(true));
    world.api.breaks(Some("networkpolicies"));
    // A pod that is new to the next agent.
    world.pod("shop", "new", "10.244.1.9", json!({"app": "web"}), 80);
    world.run().await;
    {
        let mut facts = world.shared.facts();
        enrol(&mut facts, "new", "10.244.1.9");
        facts.changes += 1;
    }
    world.until("another table", || world.tcp(FAR, "10.244.1.9", 80).is_some()).await;
    let both = || (world.tcp(FAR, DB, 80), world.tcp(WEB, DB, 80));
    world.stays("as before", || both() == (Some(false), Some(true))).await;
    assert_eq!(world.ingress(FAR, "10.244.1.9", 80).unwrap().reason, "closed");
    assert_eq!(world.tcp("10.244.1.9", DB, 80), Some(false), "its number is not known");
    let standing = world.readiness.now()[&Part::Policies].clone();
    assert!(!standing.ok && standing.reason.starts_with("waits for policies"), "{standing:?}");
    world.api.breaks(None);
    world.until("the new one, too", || world.tcp("10.244.1.9", DB, 80) == Some(true)).await;
    assert_eq!(both(), (Some(false), Some(true)));
    world.until("it is well", || world.readiness.now()[&Part::Policies].ok).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_the_first_lists_pods_are_closed_but_for_the_dns() {
    let mut world = World::new();
    let service = json!({"metadata": {"namespace": "kube-system", "name": "kube-dns"},
        "spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 53, "protocol": "UDP"}]}});
    world.api.put("/api/v1/namespaces/kube-system/services/kube-dns", service);
    let slice = json!({"metadata": {"namespace": "kube-system", "name": "kube-dns-1",
            "labels": {"kubernetes.io/service-name": "kube-dns"}}, "addressType": "IPv4",
        "ports": [{"port": 53, "protocol": "UDP"}], "endpoints": [{"addresses": [FAR]}]});
    world.api.put("/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices/kube-dns-1", slice);
    world.api.breaks(Some("networkpolicies"));
    world.run().await;
    world.until("closed", || world.tcp(WEB, DB, 80) == Some(false)).await;
    assert_eq!(world.ingress(WEB, DB, 80).unwrap().reason, "closed");
    let dns = |to: &str, port: u16| world.answer(WEB, to, 17, port).unwrap().egress.unwrap().decision.allowed;
    world.until("the DNS", || dns("10.96.0.10", 53) && dns(FAR, 53)).await;
    assert!(!dns(FAR, 54) && !dns(DB, 53));
    world.api.breaks(None);
    world.until("open", || world.tcp(WEB, DB, 80) == Some(true)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_of_a_namespace_that_is_not_known_is_closed() {
    let world = World::started().await;
    world.pod("pay", "db", DB, json!({"app": "db"}), 5432);
    world.api.remove("/api/v1/namespaces/pay");
    world.until("closed", || world.ingress(WEB, DB, 80).is_some_and(|said| said.reason == "closed")).await;
    world.until("it says so", || world.readiness.now()[&Part::Policies].reason.contains("are closed")).await;
    world.namespace("pay", json!({}));
    world.until("open", || world.tcp(WEB, DB, 80) == Some(true)).await;
}
