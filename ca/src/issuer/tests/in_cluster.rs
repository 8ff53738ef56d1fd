//! What needs an API server and a clock that can be moved: addresses that go with names, and lighthouses.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::*;
use crate::cluster::{self, Action, Asker, ClusterError, ConfigData, Occupancy, PodId, Review, Taken, User};

/// An API server in memory. A token is `ACCOUNT NODE` or `ACCOUNT POD UID`, all of the namespace `shop`.
#[derive(Default)]
struct Memory {
    pods: Mutex<HashMap<String, Value>>,
    nodes: Mutex<Vec<Value>>,
    fails: AtomicBool,
}

impl Memory {
    fn check(&self) -> Result<(), ClusterError> {
        if self.fails.load(Ordering::Relaxed) { Err(ClusterError::Timeout) } else { Ok(()) }
    }

    /// A pod of node `n1`; `owner` is the StatefulSet it belongs to.
    fn add(&self, name: &str, uid: &str, owner: Option<&str>) {
        let owner =
            owner.map(|name| json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "controller": true}));
        let pod = json!({
            "metadata": {"namespace": "shop", "name": name, "uid": uid, "ownerReferences": Vec::from_iter(owner)},
            "spec": {"nodeName": "n1", "serviceAccountName": "app"},
        });
        self.pods.lock().unwrap().insert(name.to_owned(), pod);
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        change(self.pods.lock().unwrap().get_mut(name).unwrap());
    }

    fn remove(&self, name: &str) {
        self.pods.lock().unwrap().remove(name).unwrap();
    }
}

impl Cluster for Memory {
    fn review(&self, token: &str, audience: &str) -> Result<Review, ClusterError> {
        self.check()?;
        let words: Vec<&str> = token.split(' ').collect();
        let extra = match words[..] {
            [_, node] => json!({"authentication.kubernetes.io/node-name": [node]}),
            [_, pod, uid] => {
                json!({"authentication.kubernetes.io/pod-name": [pod], "authentication.kubernetes.io/pod-uid": [uid]})
            }
            _ => json!({}),
        };
        let user = json!({"username": format!("system:serviceaccount:shop:{}", words[0]), "extra": extra});
        let review = json!({"authenticated": true, "user": user, "audiences": [audience]});
        Ok(serde_json::from_value(review).unwrap())
    }

    fn permits(&self, _user: &User, _action: &Action<'_>) -> Result<bool, ClusterError> {
        Ok(false)
    }

    fn pod(&self, _namespace: &str, name: &str) -> Result<Option<cluster::Pod>, ClusterError> {
        self.check()?;
        let pod = self.pods.lock().unwrap().get(name).cloned();
        Ok(pod.map(|pod| serde_json::from_value(pod).unwrap()))
    }

    fn node_ranges(&self, name: &str) -> Result<Vec<ipnet::IpNet>, ClusterError> {
        self.check()?;
        let nodes = self.nodes.lock().unwrap();
        let ranges = nodes.iter().find(|node| node["metadata"]["name"] == name).map(|node| &node["spec"]["podCIDRs"]);
        Ok(ranges.map_or(Vec::new(), |ranges| serde_json::from_value(ranges.clone()).unwrap_or_default()))
    }

    fn other_owner(&self, range: ipnet::IpNet, node: &str) -> Result<Option<String>, ClusterError> {
        self.check()?;
        let mut all = Occupancy::default();
        for node in self.nodes.lock().unwrap().iter() {
            all.put_node(&serde_json::from_value(node.clone()).unwrap());
        }
        Ok(all.other_owner(range, node).map(str::to_owned))
    }

    fn node_uid(&self, name: &str) -> Result<Option<String>, ClusterError> {
        self.check()?;
        let nodes = self.nodes.lock().unwrap();
        let node = nodes.iter().find(|node| node["metadata"]["name"] == name);
        Ok(node.and_then(|node| node["metadata"]["uid"].as_str()).map(str::to_owned))
    }

    fn taken(&self, address: IpAddr, asker: &Asker<'_>) -> Result<Option<Taken>, ClusterError> {
        self.check()?;
        let mut all = Occupancy::default();
        for pod in self.pods.lock().unwrap().values() {
            all.put_pod(&serde_json::from_value(pod.clone()).unwrap());
        }
        for node in self.nodes.lock().unwrap().iter() {
            all.put_node(&serde_json::from_value(node.clone()).unwrap());
        }
        Ok(all.taken(address, asker))
    }

    fn all_pods(&self) -> Result<HashSet<PodId>, ClusterError> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let id = |pod: &Value| ("shop".to_owned(), text(&pod["metadata"]["name"]), text(&pod["metadata"]["uid"]));
        Ok(self.pods.lock().unwrap().values().map(id).collect())
    }

    fn config_map(&self, _namespace: &str, _name: &str) -> Result<Option<ConfigData>, ClusterError> {
        Ok(None)
    }

    fn apply_config_map(&self, _namespace: &str, _name: &str, _data: &ConfigData) -> Result<(), ClusterError> {
        Ok(())
    }
}

const STABLE: &str = r#"{"kubernetes": {"node_account": "shop/agent"}, "pods": {"overlay": ["10.42.0.0/29"],
    "reserved": ["10.42.0.1"], "address": "pool", "life": "1h", "stable": ["statefulsets"], "stable_for": "10d"}}"#;
const LIGHTHOUSES: &str = r#"{"kubernetes": {"node_account": "shop/agent"},
    "lighthouses": {"account": "shop/app", "network": "10.42.255.0/24"}}"#;

struct Confirmed {
    cluster: Arc<Memory>,
    ca: Fixture,
}

impl Confirmed {
    fn new(policy: &str) -> Self {
        let cluster = Arc::new(Memory::default());
        let ca = Fixture::confirmed_by(Some(Arc::clone(&cluster) as Arc<dyn Cluster>), policy, |ca| ca);
        Self { cluster, ca }
    }

    fn issue(&self, proof: Proof, now: UnixTime) -> Result<Certificate, Refusal> {
        let issued = self.ca.issuer.issue(&Request { public_key: key().public_pem(), proof }, NODE, now)?;
        Ok(Certificate::from_pem(issued.reply.certificate.as_bytes()).unwrap())
    }

    /// Adds a pod of the StatefulSet `db`, and asks for it.
    fn stateful(&self, name: &str, uid: &str, now: UnixTime) -> Result<Certificate, Refusal> {
        self.cluster.add(name, uid, Some("db"));
        self.ask(name, uid, now)
    }

    fn ask(&self, name: &str, uid: &str, now: UnixTime) -> Result<Certificate, Refusal> {
        self.issue(Proof::Node { token: "agent n1".into(), pod: pod(uid, name, "10.244.0.5") }, now)
    }

    fn blocked(&self, certificate: &Certificate, now: UnixTime) -> bool {
        self.ca.issuer.trust(now).unwrap().body.blocklist.contains(&certificate.fingerprint().to_string())
    }

    fn announced(&self, now: UnixTime) -> Vec<String> {
        self.ca.issuer.trust(now).unwrap().body.lighthouses.into_values().flatten().collect()
    }
}

#[test]
fn the_next_pod_of_a_name_has_its_address_and_what_the_one_before_had_is_blocked() {
    let it = Confirmed::new(STABLE);
    let first = it.stateful("db-0", "u-1", NOW).unwrap();
    let other = it.stateful("db-1", "u-2", NOW).unwrap();
    assert_ne!(first.networks(), other.networks());
    let next = it.stateful("db-0", "u-3", NOW + 10).unwrap();
    assert_eq!(next.networks(), first.networks());
    assert!(it.blocked(&first, NOW + 10) && !it.blocked(&next, NOW + 10) && !it.blocked(&other, NOW + 10));
    // Its node was cut off, and now it comes back: its name belongs to another pod.
    assert_eq!(code(it.ask("db-0", "u-1", NOW + 11)), "pod_uid_mismatch");
    assert!(!it.blocked(&next, NOW + 11));
    // Given back, and days later recreated.
    let proof = Proof::Node { token: "agent n1".into(), pod: pod("u-3", "db-0", "10.244.0.5") };
    it.ca.issuer.release(&Release { proof }, NODE, NOW + 20).unwrap();
    let late = it.stateful("db-0", "u-4", NOW + 9 * 86_400).unwrap();
    assert_eq!(late.networks(), first.networks());
    // A StatefulSet of the same name that was recreated is the same name, too.
    assert_eq!(it.ask("db-0", "u-4", NOW + 9 * 86_400 + 1).unwrap().networks(), first.networks());
}

#[test]
fn a_pod_that_only_has_the_name_does_not_get_its_address() {
    let it = Confirmed::new(STABLE);
    let first = it.stateful("db-0", "u-1", NOW).unwrap();
    it.cluster.add("db-0", "u-2", None);
    let impostor = it.ask("db-0", "u-2", NOW + 10).unwrap();
    assert_ne!(impostor.networks(), first.networks());
    // Of a StatefulSet with another name, it is not that set's pod.
    it.cluster.add("db-0", "u-3", Some("web"));
    assert_ne!(it.ask("db-0", "u-3", NOW + 20).unwrap().networks(), first.networks());
    assert_eq!(it.stateful("db-0", "u-4", NOW + 30).unwrap().networks(), first.networks());
}

#[test]
fn a_pool_that_names_have_used_up_says_how_to_free_an_address() {
    let it = Confirmed::new(STABLE);
    for number in 0..5 {
        it.stateful(&format!("db-{number}"), &format!("u-{number}"), NOW).unwrap();
    }
    it.cluster.add("web", "w-1", None);
    // All certificates have expired; the names keep their addresses.
    let later = NOW + 86_400;
    let refused = it.ask("web", "w-1", later).unwrap_err();
    assert_eq!(refused.code(), "pool_exhausted");
    assert!(refused.to_string().contains("5 are kept") && refused.to_string().contains("address release"), "{refused}");
    let CommandOutcome::Addresses { addresses } = it.ca.obey(&Command::ListAddresses, later) else { panic!("no list") };
    assert_eq!(
        addresses.iter().map(|listed| listed.name.as_str()).collect::<Vec<_>>()[..2],
        ["shop/db-0", "shop/db-1"]
    );
    assert!(addresses.iter().all(|listed| !listed.in_use && listed.kept.until == NOW + 3_600 + 10 * 86_400));
    let release = |name: &str| it.ca.obey(&Command::ReleaseAddress { name: name.into() }, later);
    assert!(matches!(release("shop/none"), CommandOutcome::Failed { .. }));
    assert!(matches!(release("shop/db-3"), CommandOutcome::AddressReleased(_)));
    assert_eq!(network(&it.ask("web", "w-1", later).unwrap()), "10.42.0.5/29");
    // Whose name it was gets what is free, which is nothing.
    assert_eq!(code(it.stateful("db-3", "u-9", later + 1)), "pool_exhausted");
    // Nobody asks for the others.
    it.ca.issuer.store.prune(NOW + 11 * 86_400).unwrap();
    assert_eq!(it.ca.issuer.store.kept_addresses().unwrap(), []);
    assert!(it.stateful("db-7", "u-7", NOW + 11 * 86_400).is_ok());
}

#[test]
fn an_address_that_is_released_while_a_pod_has_it_stays_with_that_pod() {
    let it = Confirmed::new(STABLE);
    let first = it.stateful("db-0", "u-1", NOW).unwrap();
    let outcome = it.ca.obey(&Command::ReleaseAddress { name: "shop/db-0".into() }, NOW);
    assert!(matches!(outcome, CommandOutcome::AddressReleased(released) if released.in_use));
    for number in 1..5 {
        assert_ne!(
            it.stateful(&format!("db-{number}"), &format!("u-{number}0"), NOW).unwrap().networks(),
            first.networks()
        );
    }
    assert_eq!(it.ask("db-0", "u-1", NOW + 1).unwrap().networks(), first.networks());
}

#[test]
fn a_lighthouse_that_is_gone_for_long_is_announced_no_more() {
    let it = Confirmed::new(LIGHTHOUSES);
    let proof = |uid: &str| Proof::Lighthouse { token: format!("app lh-0 {uid}"), port: None };
    let add = |uid: &str, address: &str| {
        it.cluster.add("lh-0", uid, Some("lh"));
        it.cluster.change("lh-0", |pod| {
            pod["spec"]["hostNetwork"] = true.into();
            pod["status"] = json!({"hostIP": address});
        });
    };
    add("l-1", "192.0.2.7");
    let first = it.issue(proof("l-1"), NOW).unwrap();
    assert_eq!(network(&first), "10.42.255.1/24");
    let follow = |now| it.ca.issuer.follow_lighthouses(now).unwrap();
    assert!(!follow(NOW + 1));
    it.cluster.change("lh-0", |pod| pod["status"]["hostIP"] = "192.0.2.8".into());
    assert!(follow(NOW + 2));
    assert_eq!(it.announced(NOW + 2), ["192.0.2.8:4242"]);
    it.cluster.remove("lh-0");
    assert!(follow(NOW + 10) && !follow(NOW + 610));
    assert_eq!(it.announced(NOW + 610), ["192.0.2.8:4242"]);
    // What it had is blocked meanwhile: nobody can say that its key is gone.
    assert_eq!(it.ca.issuer.block_deleted(NOW + 11).unwrap().len(), 1);
    assert!(it.blocked(&first, NOW + 11));
    assert!(follow(NOW + 611));
    assert!(it.announced(NOW + 611).is_empty());
    // Its ordinal has its address for good.
    add("l-2", "192.0.2.9");
    assert_eq!(network(&it.issue(proof("l-2"), NOW + 700).unwrap()), network(&first));
    assert_eq!(it.announced(NOW + 700), ["192.0.2.9:4242"]);
    // While the API server says nothing, nothing changes.
    it.cluster.fails.store(true, Ordering::Relaxed);
    assert!(it.ca.issuer.follow_lighthouses(NOW + 9_000).is_err());
    assert_eq!(it.announced(NOW + 9_000), ["192.0.2.9:4242"]);
}

const GATEWAYS: &str = r#"{"kubernetes": {"node_account": "shop/agent"}, "gateways": {"account": "shop/app"},
    "pods": {"overlay": ["10.244.0.0/16", "fd00:244::/48"], "address": "same"}}"#;

/// A node whose pods have addresses of these ranges, and its gateway.
fn add_gateway(it: &Confirmed, node: &str, uid: &str, ranges: &[&str]) {
    let mut nodes = it.cluster.nodes.lock().unwrap();
    nodes.retain(|known| known["metadata"]["name"] != node);
    let created = format!("2026-01-0{}T00:00:00Z", nodes.len() + 1);
    nodes.push(json!({"metadata": {"name": node, "creationTimestamp": created}, "spec": {"podCIDRs": ranges}}));
    let pod = format!("gw-{node}");
    it.cluster.add(&pod, uid, None);
    it.cluster.change(&pod, |pod| {
        pod["spec"]["hostNetwork"] = true.into();
        pod["spec"]["nodeName"] = node.into();
    });
}

fn gateway(node: &str, uid: &str) -> Proof {
    Proof::Gateway { token: format!("app gw-{node} {uid}") }
}

#[test]
fn a_gateway_has_the_first_addresses_of_its_node_and_the_ranges_of_its_pods_behind_it() {
    let it = Confirmed::new(GATEWAYS);
    add_gateway(&it, "n1", "g-1", &["10.244.1.0/24", "fd00:244:0:1::/64"]);
    let first = it.issue(gateway("n1", "g-1"), NOW).unwrap();
    assert_eq!((first.name(), first.groups()), ("n1.node", &["node".to_owned()][..]));
    assert_eq!(network(&first), "10.244.1.1/16,fd00:244:0:1::1/48");
    let behind: Vec<String> = first.unsafe_networks().iter().map(ToString::to_string).collect();
    assert_eq!(behind, ["10.244.1.0/24", "fd00:244:0:1::/64"]);
    assert!(it.ca.issuer.store.run(|store| store.members(NOW)).unwrap().is_empty(), "pods do not reach it by a tunnel");
    // The next pod of the DaemonSet on the node takes its place, and what it had is blocked.
    add_gateway(&it, "n1", "g-2", &["10.244.1.0/24", "fd00:244:0:1::/64"]);
    let second = it.issue(gateway("n1", "g-2"), NOW + 10).unwrap();
    assert_eq!(second.networks(), first.networks());
    assert!(it.blocked(&first, NOW + 10) && !it.blocked(&second, NOW + 10));
    assert_eq!(code(it.issue(gateway("n1", "g-1"), NOW + 11)), "pod_uid_mismatch");
    it.cluster.remove("gw-n1");
    assert_eq!(it.ca.issuer.block_deleted(NOW + 20).unwrap().len(), 1);
}

#[test]
fn nobody_becomes_the_gateway_of_another_nodes_pods() {
    let it = Confirmed::new(GATEWAYS);
    add_gateway(&it, "n1", "g-1", &["10.244.1.0/24"]);
    it.issue(gateway("n1", "g-1"), NOW).unwrap();
    // A newer node claims the range of the first one, a part of it, and more than it.
    for range in ["10.244.1.0/24", "10.244.1.128/25", "10.244.0.0/23"] {
        add_gateway(&it, "n2", "g-2", &[range]);
        assert_eq!(code(it.issue(gateway("n2", "g-2"), NOW)), "range_of_other_node", "{range}");
    }
    for (ranges, expected) in [
        (&[][..], "node_without_range"),
        (&["10.245.1.0/24"], "range_outside_overlay"),
        (&["10.244.0.0/16"], "range_of_other_node"),
    ] {
        add_gateway(&it, "n2", "g-2", ranges);
        assert_eq!(code(it.issue(gateway("n2", "g-2"), NOW)), expected);
    }
    add_gateway(&it, "n2", "g-2", &["10.244.2.0/24"]);
    it.cluster.change("gw-n2", |pod| pod["spec"]["hostNetwork"] = false.into());
    assert_eq!(code(it.issue(gateway("n2", "g-2"), NOW)), "not_host_network");
    it.cluster.change("gw-n2", |pod| pod["spec"]["hostNetwork"] = true.into());
    for (token, expected) in [("agent gw-n2 g-2", "wrong_account"), ("app n2", "token_not_bound")] {
        assert_eq!(code(it.issue(Proof::Gateway { token: token.to_owned() }, NOW)), expected);
    }
    assert_eq!(network(&it.issue(gateway("n2", "g-2"), NOW).unwrap()), "10.244.2.1/16");
    let without = Confirmed::new(SAME);
    assert_eq!(code(without.issue(gateway("n1", "g-1"), NOW)), "gateways_disabled");
}

const SAME: &str = r#"{"kubernetes": {"node_account": "shop/agent"},
    "pods": {"overlay": ["10.244.0.0/16", "fd00:244::/56"], "address": "same", "life": "1h"}}"#;

fn dual(uid: &str, name: &str, address: &str, other: &str) -> Pod {
    Pod { other_address: Some(other.parse().unwrap()), ..pod(uid, name, address) }
}

#[test]
fn both_addresses_are_confirmed_as_the_one_is() {
    let it = Confirmed::new(SAME);
    it.cluster.add("web", "u-1", None);
    let by_node = |pod| it.issue(Proof::Node { token: "agent n1".into(), pod }, NOW).map(|found| network(&found));
    let mine = || dual("u-1", "web", "10.244.0.5", "fd00:244::5");
    assert_eq!(by_node(mine()).unwrap(), "10.244.0.5/16,fd00:244::5/56", "its node knows before the API server does");
    it.cluster.change("web", |pod| pod["status"] = json!({"podIPs": [{"ip": "10.244.0.5"}, {"ip": "fd00:244::5"}]}));
    assert_eq!(by_node(mine()).unwrap(), "10.244.0.5/16,fd00:244::5/56");
    let other = dual("u-1", "web", "10.244.0.5", "fd00:244::66");
    assert_eq!(by_node(other).unwrap(), "10.244.0.5/16", "an address that is not the pod's is not in its certificate");
    let ready = json!([{"type": "PodReadyToStartContainers", "status": "True"}]);
    it.cluster.change("web", |pod| pod["status"]["conditions"] = ready);
    assert_eq!(code(by_node(dual("u-1", "web", "10.244.0.66", "fd00:244::5"))), "address_mismatch");
    let by_pod = |other: &str| {
        let (address, other_address) = ("10.244.0.5".parse().unwrap(), Some(other.parse().unwrap()));
        it.issue(Proof::Pod { token: "app web u-1".into(), address, other_address }, NOW).map(|found| network(&found))
    };
    assert_eq!(by_pod("fd00:244::5").unwrap(), "10.244.0.5/16,fd00:244::5/56");
    assert_eq!(by_pod("fd00:244::66").unwrap(), "10.244.0.5/16");
    let member = &it.ca.issuer.store.members(NOW).unwrap()[0];
    assert_eq!((member.service_account.as_str(), member.node.as_str()), ("app", "n1"));
}

#[test]
fn one_of_two_addresses_goes_to_another_pod_only_when_the_first_has_left_it() {
    let it = Confirmed::new(SAME);
    it.cluster.add("web", "u-1", None);
    it.cluster.add("db", "u-2", None);
    let ask = |pod| it.issue(Proof::Node { token: "agent n1".into(), pod }, NOW);
    let first = ask(dual("u-1", "web", "10.244.0.5", "fd00:244::5")).unwrap();
    it.cluster.change("web", |pod| pod["status"] = json!({"podIPs": [{"ip": "10.244.0.5"}, {"ip": "fd00:244::5"}]}));
    let thief = || dual("u-2", "db", "10.244.0.6", "fd00:244::5");
    assert_eq!(code(ask(thief())), "address_conflict");
    it.cluster.change("web", |pod| pod["status"] = json!({"podIPs": [{"ip": "10.244.0.5"}, {"ip": "fd00:244::9"}]}));
    assert_eq!(network(&ask(thief()).unwrap()), "10.244.0.6/16,fd00:244::5/56");
    assert!(it.blocked(&first, NOW));
    let members = it.ca.issuer.store.members(NOW).unwrap();
    assert_eq!(members.iter().map(|member| member.uid.as_str()).collect::<Vec<_>>(), ["u-2"]);
}

/// Whoever has the token of the agent of `n1` asks for a pod of that node that the API server shows without an
/// address yet.
#[test]
fn whoever_stole_the_token_of_an_agent_gets_no_address_of_others_in_either_family() {
    let it = Confirmed::new(SAME);
    it.cluster.add("own", "u-1", None);
    let dns = |pod: &mut Value| {
        pod["spec"]["nodeName"] = "n2".into();
        pod["status"] = json!({"phase": "Running", "podIPs": [{"ip": "10.244.2.3"}, {"ip": "fd00:244:0:2::3"}]});
    };
    it.cluster.add("dns", "u-2", None);
    it.cluster.change("dns", dns);
    let node = |number: u8, ranges: Value| {
        let mut node = json!({"metadata": {"name": format!("n{number}")}, "spec": ranges,
            "status": {"addresses": [{"address": format!("192.0.2.{number}")}]}});
        let noted = format!("10.244.{number}.1");
        node["metadata"]["annotations"] = json!({"projectcalico.org/IPv4IPIPTunnelAddr": noted});
        node
    };
    let ranges =
        |number: u8| json!({"podCIDRs": [format!("10.244.{number}.0/24"), format!("fd00:244:0:{number}::/64")]});
    let ask = |address: &str, other: &str| {
        code(it.issue(Proof::Node { token: "agent n1".into(), pod: dual("u-1", "own", address, other) }, NOW))
    };
    // Without ranges (Cilium, Calico, AWS), and with those of the nodes.
    for (with_ranges, expected) in [(false, ["address_in_use", "node_address"]), (true, ["outside_node_ranges"; 2])] {
        let spec = |number| if with_ranges { ranges(number) } else { json!({}) };
        *it.cluster.nodes.lock().unwrap() = vec![node(1, spec(1)), node(2, spec(2))];
        assert_eq!(ask("10.244.2.3", "fd00:244:0:1::9"), expected[0], "of a pod without a certificate");
        assert_eq!(ask("10.244.1.9", "fd00:244:0:2::3"), expected[0], "the same, by the other family");
        assert_eq!(ask("10.244.2.1", "fd00:244:0:1::9"), expected[1], "of a bridge of another node");
        assert_eq!(ask("10.244.1.1", "fd00:244:0:1::9"), "node_address", "of its own bridge");
        if with_ranges {
            assert_eq!(ask("10.244.2.77", "fd00:244:0:1::9"), expected[0], "of nobody");
            assert_eq!(ask("10.244.1.9", "fd00:244:0:1::1"), "node_address");
        }
    }
    assert!(it.ca.issuer.store.members(NOW).unwrap().is_empty());
    assert_eq!(ask("10.244.1.9", "fd00:244:0:1::9"), "issued");
    // What the ledger has for the pod is renewed also while nobody can be asked who has it.
    it.cluster.nodes.lock().unwrap()[0]["status"]["addresses"] = json!([{"address": "10.244.1.9"}]);
    assert_eq!(ask("10.244.1.9", "fd00:244:0:1::9"), "issued");
}

#[test]
fn a_node_takes_the_address_of_no_pod_of_its_own_that_runs() {
    let it = Confirmed::new(SAME);
    it.cluster.add("own", "u-1", None);
    it.cluster.add("dns", "u-2", None);
    it.cluster.change("dns", |pod| pod["status"] = json!({"phase": "Running", "podIP": "10.244.1.3"}));
    let ask = || code(it.issue(Proof::Node { token: "agent n1".into(), pod: pod("u-1", "own", "10.244.1.3") }, NOW));
    assert_eq!(ask(), "address_in_use");
    it.cluster.change("dns", |pod| pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into());
    assert_eq!(ask(), "issued", "it is taken down");
}

#[test]
fn a_pod_of_a_namespace_that_the_operator_does_not_enrol_gets_nothing_but_its_renewals() {
    let with = |lists: &str| SAME.replace("\"life\"", &format!("{lists}, \"life\""));
    for (lists, expected) in [
        (r#""namespaces": ["shop"]"#, "issued"),
        (r#""namespaces": ["pay"]"#, "namespace_not_enrolled"),
        (r#""namespaces": []"#, "namespace_not_enrolled"),
        (r#""except_namespaces": ["pay"]"#, "issued"),
        (r#""except_namespaces": ["kube-system", "shop"]"#, "namespace_not_enrolled"),
    ] {
        let it = Confirmed::new(&with(lists));
        it.cluster.add("web", "u-1", None);
        it.cluster.change("web", |pod| pod["status"] = json!({"podIP": "10.244.1.9"}));
        let address = "10.244.1.9".parse().unwrap();
        let proofs = [
            Proof::Node { token: "agent n1".into(), pod: pod("u-1", "web", "10.244.1.9") },
            Proof::Pod { token: "app web u-1".into(), address, other_address: None },
        ];
        for proof in proofs {
            assert_eq!(code(it.issue(proof, NOW)), expected, "{lists}");
        }
    }
    // It had its certificate before the operator took the namespace out, and works on until it is made again.
    let it = Confirmed::new(SAME);
    it.cluster.add("web", "u-1", None);
    let key = key();
    let proof = Proof::Node { token: "agent n1".into(), pod: pod("u-1", "web", "10.244.1.9") };
    let issued = it.ca.issuer.issue(&Request { public_key: key.public_pem(), proof }, NODE, NOW).unwrap();
    let present = Certificate::from_pem(issued.reply.certificate.as_bytes()).unwrap();
    let present_rules = it.ca.issuer.rules();
    let policy = Policy::parse(&with(r#""namespaces": ["pay"]"#)).unwrap();
    let (authority, cluster) =
        (Authority::read(&Directory::new(it.ca.directory.path()), None).unwrap(), present_rules.cluster.clone());
    it.ca.issuer.replace_rules(Rules { authority, policy, cluster });
    let renewal_key = issued.reply.renewal_key.unwrap();
    let proof = Proof::of_certificate(&present, &key, &renewal_key, Some(&key.public_pem()), NOW + 10).unwrap();
    assert!(it.ca.issuer.issue(&Request { public_key: key.public_pem(), proof }, NODE, NOW + 10).is_ok());
}

#[test]
fn a_node_credential_lasts_half_a_day() {
    let confirmed = Confirmed::new(STABLE);
    confirmed.cluster.nodes.lock().unwrap().push(json!({"metadata": {"name": "n1", "uid": "u"}}));
    confirmed.cluster.add("web-1", "u-1", None);
    let made = confirmed.ca.issuer.node_credential("agent n1", NOW).unwrap();
    let ask = |now| {
        let pod = Pod {
            namespace: "shop".into(),
            name: "web-1".into(),
            uid: "u-1".into(),
            address: "10.244.0.5".parse().unwrap(),
            other_address: None,
        };
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let proof = Proof::Node { token: made.credential.clone(), pod };
        let request = Request { public_key: key.public_pem(), proof };
        let source = IpAddr::from([192, 0, 2, 1]);
        confirmed.ca.issuer.issue(&request, source, now).map(|_| ()).map_err(|refusal| refusal.code())
    };
    assert_eq!(made.not_after, NOW + 12 * 3600);
    assert_eq!(ask(made.not_after - 1), Ok(()));
    assert_eq!(ask(made.not_after), Err("node_credential_expired"));
    assert_eq!(ask(NOW - 100), Ok(()), "clocks of replicas differ");
    assert_eq!(ask(NOW - 1000), Err("node_credential_expired"), "the clock was set back");
}
