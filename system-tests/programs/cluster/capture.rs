//! The cluster's own traffic in the tunnels, in a real two-node cluster: API server, controllers, kubelets and
//! kube-proxy, with what the chart makes of `.ci/chart/capture-values.yaml`. `./test kube` runs it where a build of
//! Kubernetes is available.
//!
//! Cluster DNS is dnsmasq in the network namespace of a pod of `kube-system`, with the names that the test gives it.
//! Programs in pods are threads of the test in the pods' network namespaces, and web servers in their containers.
//! Pods and Services have both families, which release 1.20 has behind a feature gate; nodes speak IPv6 to each other
//! for pods only.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod reused;
pub(crate) mod town;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use self::town::{DNS, SOON, Town, pod};
use crate::world::kube::{NAMESPACE, REPLACED_WITHIN, text};
use crate::world::pod_traffic::{self, Answer, Asker, OPEN, SECRET, Wiretaps, within};

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn every_name_and_address_of_a_pod_leads_through_the_tunnel_and_the_rest_of_the_cluster_is_as_before() {
    let (town, wires) = Town::new();
    let client = town.network("shop/client");

    // Names, then what they lead to; on both nodes.
    let pods = [town.pod_address("shop", "db-0"), town.pod_address("shop", "db-1")];
    let service = town.cluster_ip("shop", "web");
    let named = |name: &str| {
        let (server, name) = (SocketAddr::new(DNS.parse().unwrap(), 53), name.to_owned());
        let found = within(&client, move || pod_traffic::resolve(server, &name)).expect("cluster DNS answers");
        found.into_iter().collect::<BTreeSet<_>>()
    };
    assert_eq!(named("web.shop.svc.cluster.local"), [service].into());
    assert_eq!(named("db.shop.svc.cluster.local"), pods.into());
    for (number, pod) in pods.iter().enumerate() {
        assert_eq!(named(&format!("db-{number}.db.shop.svc.cluster.local")), [*pod].into());
    }
    for (service, plain) in [("web", "plain"), ("web-v6", "plain-v6")] {
        everybody_is_reached(&town, &wires, town.cluster_ip("shop", service), town.cluster_ip("other", plain));
    }
    // The Service's port on both nodes, from a pod.
    for node in ["192.0.2.10", "192.0.2.11"] {
        let target = (node.parse().expect("an address"), 30080);
        let answered: BTreeSet<String> = (0..16).map(|_| town.ask("shop/client", target, SECRET).pod).collect();
        assert_eq!(answered.len(), 2, "{node}: {answered:?}");
    }
    wires.assert_silent("to ports of nodes");
    // Who the peers are.
    let names = town.peers("shop", "client");
    assert!(["db-0.shop.pod", "db-1.shop.pod"].iter().all(|name| names.contains(*name)), "peers: {names:?}");
    wires.assert_not_deaf();

    // The API server from a pod, and pods from it, as it calls webhooks; probes hold `db` ready meanwhile.
    let curl = ["curl", "-sk", "--max-time", "5", "https://10.96.0.1/healthz"];
    let said = town.run_in(&client, &curl);
    assert_eq!(said, "ok", "the API server does not answer a pod");
    for (name, from) in [("pods/db-0:8080", 1), ("pods/db-1:8080", 1), ("services/web:http", 6)] {
        let path = format!("/api/v1/namespaces/shop/{name}/proxy/cgi-bin/who?{OPEN}");
        for _ in 0..from {
            let said = town.nodes.kubectl(&["get", "--raw", &path]);
            assert!(said.starts_with("db-") && said.contains(OPEN), "{name}: {said}");
        }
    }
    let said = town.nodes.kubectl(&["exec", "-n", "shop", "db-0", "--", "hostname"]);
    assert_eq!(said, "db-0");
    town.nodes.kubectl(&["logs", "-n", "shop", "db-0"]);
    // Host ports lead to the node's own pod, node ports to both; asked from the other node.
    let outside = |node: u8, target: &str| {
        let (network, target) = (town.node_network(node), target.parse::<SocketAddr>().unwrap());
        let said = within(&network, move || pod_traffic::ask(target, OPEN));
        said.unwrap_or_else(|error| panic!("node {node} -> {target}: {error}\n{}", town.details())).pod
    };
    let here = |node: &str| {
        let on = |name: &&str| town.object("pod", "shop", name)["spec"]["nodeName"] == node;
        ["db-0", "db-1"].into_iter().find(on).expect("one on each node").to_owned()
    };
    assert_eq!(outside(2, "192.0.2.10:8081"), here("test-node"));
    assert_eq!(outside(1, "192.0.2.11:8081"), here("node2"));
    for target in ["192.0.2.10:30080", "192.0.2.11:30080"] {
        for node in [1, 2] {
            let answered: BTreeSet<String> = (0..16).map(|_| outside(node, target)).collect();
            assert_eq!(answered.len(), 2, "node {node} -> {target}: {answered:?}");
        }
    }
    for name in ["db-0", "db-1"] {
        let status = town.nodes.status("shop", name);
        let restarts = &status["containerStatuses"][0]["restartCount"];
        assert!(status["containerStatuses"][0]["ready"] == true && *restarts == 0, "{name}: {status}");
    }
    wires.assert_silent("in the end");
    println!("{}", town.costs());
    a_firewall_between_the_nodes_is_named(&town);
}

/// Pods by address and by Service, those with a tunnel and those without, in the family of these Services.
fn everybody_is_reached(town: &Town, wires: &Wiretaps, service: IpAddr, plain: IpAddr) {
    let own = town.pod_address_like(service, "shop", "client").to_string();
    let pods = ["db-0", "db-1"].map(|name| town.pod_address_like(service, "shop", name));
    for (number, pod) in pods.iter().enumerate() {
        let expected = Answer { pod: format!("db-{number}"), from: own.clone() };
        assert_eq!(town.ask("shop/client", (*pod, 8080), SECRET), expected);
        assert_eq!(town.ask_udp("shop/client", (*pod, 9000), SECRET), expected);
    }
    let mut answered = BTreeMap::<String, usize>::new();
    for _ in 0..30 {
        for answer in
            [town.ask("shop/client", (service, 80), SECRET), town.ask_udp("shop/client", (service, 7), SECRET)]
        {
            assert_eq!(answer.from, own, "the server sees the pod's own address");
            *answered.entry(answer.pod).or_default() += 1;
        }
    }
    assert_eq!(answered.keys().collect::<Vec<_>>(), ["db-0", "db-1"], "{answered:?}");
    wires.assert_silent(&format!("from pod to pod and by Service {service}"));

    // What has no tunnel is reached as before, in both directions and by Service as well.
    for pod in ["near", "far"] {
        let target = town.pod_address_like(service, "other", pod);
        let expected = Answer { pod: pod.to_owned(), from: own.clone() };
        assert_eq!(town.ask("shop/client", (target, 8080), OPEN), expected);
        assert_eq!(town.ask_udp("shop/client", (target, 9000), OPEN), expected);
    }
    let answered: BTreeSet<String> = (0..20).map(|_| town.ask("shop/client", (plain, 80), OPEN).pod).collect();
    assert_eq!(answered.len(), 2, "both endpoints: {answered:?}");
    for from in ["other/near", "other/far"] {
        for _ in 0..6 {
            town.ask(from, (service, 80), OPEN);
        }
        for pod in pods {
            town.ask(from, (pod, 8080), OPEN);
            town.ask_udp(from, (pod, 9000), OPEN);
        }
    }
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn a_backend_that_is_rolled_refuses_nobody_and_an_endpoint_that_leaves_gets_no_new_flow() {
    let (town, wires) = Town::new();
    for (namespace, service) in [("shop", "rolled"), ("other", "rolled")] {
        town.deployment(namespace, service);
    }
    for namespace in ["shop", "other"] {
        town.nodes.wait_for_rollout(namespace, "deployment/rolled", Duration::from_secs(60));
    }
    let target = |namespace| SocketAddr::new(town.cluster_ip(namespace, "rolled"), 80);
    // The same backend twice: through the tunnels, and as kube-proxy has it.
    let ours = Asker::of_new_connections(&town.network("shop/client"), target("shop"), SECRET);
    let plain = Asker::of_new_connections(&town.network("other/near"), target("other"), OPEN);
    std::thread::sleep(Duration::from_secs(2));
    let began = Instant::now();
    for namespace in ["shop", "other"] {
        town.nodes.kubectl(&["rollout", "restart", "-n", namespace, "deployment/rolled"]);
    }
    for namespace in ["shop", "other"] {
        town.nodes.wait_for_rollout(namespace, "deployment/rolled", REPLACED_WITHIN);
    }
    std::thread::sleep(Duration::from_secs(12));
    let [through, clear] = [&ours, &plain].map(|asker| asker.course());
    let [failed, of_kube_proxy] = [&through, &clear].map(|course| course.failures_since(began));
    println!(
        "rolled in {:.1} s: of {} new connections {} fail, of {} by kube-proxy {}",
        began.elapsed().as_secs_f64(),
        through.answers_since(began),
        failed.len(),
        clear.answers_since(began),
        of_kube_proxy.len()
    );
    assert!(failed.len() <= of_kube_proxy.len(), "{failed:?}, by kube-proxy {of_kube_proxy:?}\n{}", town.details());
    assert!(through.answers_since(began) > 100 && clear.answers_since(began) > 100, "there was no load");
    let answered: BTreeSet<&str> = through.answers.iter().map(|(_, pod)| pod.as_str()).collect();
    assert!(answered.len() >= 4, "pods of before and after: {answered:?}");

    // An endpoint leaves the Service while its pod lives on: whoever reaches it later would have been answered.
    let pods = town.nodes.kubectl(&[
        "get",
        "pods",
        "-n",
        "shop",
        "-l",
        "app=rolled",
        "-o",
        "jsonpath={.items[*].metadata.name}",
    ]);
    let leaving = pods.split_whitespace().next().expect("a pod").to_owned();
    town.nodes.kubectl(&["label", "pod", "-n", "shop", &leaving, "app-", "--overwrite"]);
    let left = Instant::now();
    std::thread::sleep(Duration::from_secs(5));
    let course = ours.course();
    let last = course.answers.iter().filter(|(at, pod)| *at > left && *pod == leaving).map(|(at, _)| *at - left).max();
    println!("the last new flow to an endpoint that left came {:?} after kubectl's answer", last.unwrap_or_default());
    assert!(last.unwrap_or_default() < Duration::from_secs(1), "{last:?}");
    assert!(
        course.answers_since(left) > 50 && course.failures_since(left).is_empty(),
        "{:?}",
        course.failures_since(left)
    );
    wires.assert_silent("while a backend was rolled");
    wires.assert_not_deaf();
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn traffic_goes_on_while_the_parts_of_the_control_plane_are_away_one_by_one_and_together() {
    let (town, wires) = Town::new();
    let client = town.network("shop/client");
    let service = town.cluster_ip("shop", "web");
    let pods = [town.pod_address("shop", "db-0"), town.pod_address("shop", "db-1")];
    let lasting: Vec<Asker> =
        pods.iter().map(|pod| Asker::of_one_connection(&client, SocketAddr::new(*pod, 9000))).collect();
    let lasting_of_service = Asker::of_one_connection(&client, SocketAddr::new(service, 7));
    let fresh = Asker::of_new_connections(&client, SocketAddr::new(service, 80), SECRET);
    let control = Asker::of_new_connections(&client, SocketAddr::new(town.pod_address("other", "far"), 8080), OPEN);
    std::thread::sleep(Duration::from_secs(2));
    let check = |what: &str, from: Instant| {
        let to = Instant::now();
        for asker in lasting.iter().chain([&lasting_of_service]) {
            let course = asker.course();
            assert!(
                course.failures.is_empty(),
                "{what}: a connection ended: {:?}\n{}",
                course.failures.first(),
                town.details()
            );
            let gap = course.longest_gap(from, to);
            assert!(gap < Duration::from_secs(2), "{what}: a connection stood still for {gap:?}");
        }
        for asker in [&fresh, &control] {
            let course = asker.course();
            let failed = course.failures_since(from);
            assert!(failed.is_empty(), "{what}: new flows failed: {failed:?}\n{}", town.details());
            assert!(course.answers_since(from) > 20, "{what}: there was no load");
        }
        let gap = lasting_of_service.course().longest_gap(from, to);
        println!("{what}: {} new flows, longest silence of a connection {gap:?}", fresh.course().answers_since(from));
        wires.assert_silent(what);
    };
    let away = Duration::from_secs(8);

    for (what, kind, name) in
        [("the CA", "deployment", "nebula-ca"), ("lighthouses", "statefulset", "nebula-lighthouse")]
    {
        let from = Instant::now();
        let replicas = town.scale(kind, name, 0);
        std::thread::sleep(away);
        check(&format!("{what} away"), from);
        if kind == "statefulset" {
            // Two who never met find each other by the cluster table.
            a_new_pod_is_reached(&town, &client, "unheard");
        }
        town.scale(kind, name, replicas);
        town.nodes.wait_for_rollout(NAMESPACE, &format!("{kind}/{name}"), REPLACED_WITHIN);
        check(&format!("{what} back"), from);
    }
    let from = Instant::now();
    town.agents(false);
    std::thread::sleep(away);
    check("agents away", from);
    town.agents(true);
    town.nodes.wait_for_parts(Instant::now() + REPLACED_WITHIN);
    check("agents back", from);
    let from = Instant::now();
    let server = town.kill_api_server();
    std::thread::sleep(away);
    check("the API server away", from);
    server.start(&town);
    check("the API server back", from);

    // All of them, for longer than instances and agents wait for an answer.
    let from = Instant::now();
    let ca = town.scale("deployment", "nebula-ca", 0);
    let lighthouses = town.scale("statefulset", "nebula-lighthouse", 0);
    town.agents(false);
    let server = town.kill_api_server();
    std::thread::sleep(Duration::from_secs(20));
    check("all of them away", from);
    server.start(&town);
    town.scale("deployment", "nebula-ca", ca);
    town.scale("statefulset", "nebula-lighthouse", lighthouses);
    town.agents(true);
    town.nodes.wait_for_parts(Instant::now() + REPLACED_WITHIN);
    check("all of them back", from);
    // And news are followed again.
    a_new_pod_is_reached(&town, &client, "late");
    wires.assert_silent("in the end");
    wires.assert_not_deaf();
}

/// Makes a pod on the other node than the client's, and waits until that reaches it.
fn a_new_pod_is_reached(town: &Town, client: &Path, name: &str) {
    town.nodes.apply(&format!("{name}.json"), &pod("shop", name, "node2", name).to_string());
    town.nodes.wait_for_pod("shop", name);
    let target = SocketAddr::new(town.pod_address("shop", name), 8080);
    let took = town
        .nodes
        .until("a new pod is reached", SOON, || within(client, move || pod_traffic::ask(target, SECRET)).is_ok());
    println!("{name}, a new pod, is reached {:.1} s after it runs", took.as_secs_f64());
}

/// A firewall between the nodes that knows nothing of tunnels is named, and so is its end. Release 1.20 takes Events
/// on a node only in `kube-system`, unlike those that the chart is for: what the agent tells is read from its log.
fn a_firewall_between_the_nodes_is_named(town: &Town) {
    let told = || {
        let label = "app.kubernetes.io/name=nebula-cni-agent";
        let log = town.nodes.kubectl(&["logs", "-n", NAMESPACE, "-l", label, "--tail=-1"]);
        log.lines().any(|line| line.contains("reason=\"NebulaNodesUnreachable\"") && line.contains("192.0.2.11"))
    };
    let rule = "nft 'add table inet wall; add chain inet wall in { type filter hook prerouting priority -400; }; \
                add rule inet wall in udp dport 61000-65535 drop'";
    let made = town.nodes.on(2, &["sh", "-c", rule]);
    assert!(made.status.success(), "{}", text(&made));
    let (from, agent) = (Instant::now(), ["/bin/sh", "-c", "curl -s http://127.0.0.1:9476/metrics | grep condition"]);
    while !told() {
        let says = || text(&town.nodes.on(1, &agent));
        assert!(
            from.elapsed() < Duration::from_secs(120),
            "no agent reports the other node: {}\n{}",
            says(),
            town.nodes.state()
        );
        std::thread::sleep(Duration::from_secs(1));
    }
    println!("a firewall between the nodes is named after {:.0} s", from.elapsed().as_secs_f64());
    assert!(town.nodes.on(2, &["nft", "delete table inet wall"]).status.success());
    let answers = || {
        let said = text(&town.nodes.on(1, &["curl", "-s", "http://127.0.0.1:9476/metrics"]));
        said.lines()
            .any(|line| line.starts_with("nebula_cni_agent_condition{condition=\"nodes\"") && line.ends_with(" 1"))
    };
    town.nodes.until("the way is good again", Duration::from_secs(60), answers);
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn pods_that_ran_before_the_installation_are_captured_in_place_with_their_connections() {
    let mut town = Town::bare();
    town.populate();
    let client = town.network("shop/client");
    let service = town.cluster_ip("shop", "web");
    let direct = ["db-0", "db-1"].map(|pod| SocketAddr::new(town.pod_address("shop", pod), 9000));
    // kube-proxy chooses among both; so does the instance, by itself.
    let by_service = [SocketAddr::new(service, 7); 8];
    let lasting: Vec<Asker> =
        direct.into_iter().chain(by_service).map(|target| Asker::of_one_connection(&client, target)).collect();
    std::thread::sleep(Duration::from_secs(1));
    let began = Instant::now();
    town.install();
    let running = || {
        let all: Vec<Value> = [1, 2].into_iter().flat_map(|node| town.statuses(node)).collect();
        all.iter().filter(|status| status["state"] == "running").count()
    };
    town.nodes.until("all three are attached", Duration::from_secs(60), || running() == 3);
    // Until each node's guard and table know all three.
    town.wait_until_all_are_known();
    std::thread::sleep(Duration::from_secs(3));
    let wires = town.wiretaps();
    let captured = Instant::now();
    for _ in 0..20 {
        town.ask("shop/client", (service, 80), SECRET);
        town.ask_udp("shop/client", (service, 7), SECRET);
        town.ask("shop/client", (town.pod_address("other", "near"), 8080), OPEN);
        town.ask("shop/client", (town.pod_address("other", "far"), 8080), OPEN);
    }
    for (number, asker) in lasting.iter().enumerate() {
        let course = asker.course();
        let gap = course.longest_gap(began, Instant::now());
        println!("attached in place: the longest silence of connection {number} from before is {gap:?}");
        let ended = course.failures.first().map(|(at, why)| (*at - began, why));
        assert!(ended.is_none(), "connection {number} ended: {ended:?} after the installation\n{}", town.details());
        assert!(course.answers_since(captured) > 20, "a connection stands still\n{}", town.details());
    }
    for name in ["client", "db-0", "db-1"] {
        let status = town.nodes.status("shop", name);
        assert_eq!(status["containerStatuses"][0]["restartCount"], 0, "{name}");
    }
    wires.assert_silent("after all were attached");
    wires.assert_not_deaf();
}
