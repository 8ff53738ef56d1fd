//! The whole life of a pod: a CNI chain of Debian's `bridge` and our plugin, with our CA and lighthouse.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use world::cluster::{Cluster, Node, alive, answer_at, binary, gone_within, links};
use world::traffic::Flow;

const SOON: Duration = Duration::from_secs(10);

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn two_pods_on_two_nodes_talk_over_the_overlay_and_leave_nothing() {
    let mut cluster = Cluster::new();
    let one = cluster.node("n1", "1.0.0");
    let two = cluster.node("n2", "0.4.0");
    cluster.world.namespace("web");
    cluster.world.namespace("db");
    let web = one.chain_ok(&cluster.world, "add", "web");
    two.chain_ok(&cluster.world, "add", "db");
    assert_eq!(pod_address(&web), "10.244.1.2", "the result is the primary plugin's: {web}");
    assert_eq!((one.overlay("web").as_str(), two.overlay("db").as_str()), ("10.42.1.2", "10.42.2.2"));

    cluster.world.ping("web", "10.42.2.2", SOON);
    cluster.world.ping("db", "10.42.1.2", SOON);
    cluster.world.ping("web", world::cluster::LIGHTHOUSE, SOON);
    cluster.world.transfer("web", "db", "10.42.2.2".parse().expect("an address"), 50_000_000);
    one.chain_ok(&cluster.world, "check", "web");
    two.chain_ok(&cluster.world, "check", "db");

    let status = one.status("web");
    assert_eq!(status["groups"], serde_json::json!(["ns:shop"]));
    assert_eq!(status["certificate"]["name"], "web.shop.pod");
    let pids = [pid(&status), pid(&two.status("db"))];
    for (node, pod) in [(&one, "web"), (&two, "db")] {
        node.chain_ok(&cluster.world, "del", pod);
        node.chain_ok(&cluster.world, "del", pod);
        assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
        let left = links(&cluster.world.namespace_of(&node.name));
        assert!(left.iter().all(|link| ["lo", "eth0", "cni0"].contains(&link.as_str())), "links left: {left:?}");
        assert_eq!(links(&cluster.world.namespace_of(pod)), ["lo"]);
    }
    assert!(pids.iter().all(|pid| !alive(*pid)), "an instance still runs");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_pod_with_users_of_its_own_has_a_tunnel_and_leaves_nothing() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    let web = cluster.world.namespace_with_users("web");
    cluster.world.namespace("db");
    let owner = |namespace: &str| {
        let ask =
            "import fcntl, os, sys; print(os.fstat(fcntl.ioctl(open('/run/netns/' + sys.argv[1]), 0xb701)).st_ino)";
        world::run("python3", &["-c", ask, namespace])
    };
    assert_ne!(owner(&web), owner(&cluster.world.namespace_of("db")), "the users are not those of the node");
    node.conf["plugins"][1]["overlay"] = serde_json::json!(["10.42.0.0/16"]);
    for isolate in [false, true] {
        node.conf["plugins"][1]["isolate"] = isolate.into();
        for pod in ["web", "db"] {
            node.chain_ok(&cluster.world, "add", pod);
        }
        cluster.world.ping("web", &node.overlay("db"), SOON);
        cluster.world.ping("db", &node.overlay("web"), SOON);
        cluster.world.transfer("web", "db", node.overlay("db").parse().expect("an address"), 1_000_000);
        node.chain_ok(&cluster.world, "check", "web");
        assert_eq!(node.capabilities("web"), Vec::<String>::new());
        node.delete_pods(&cluster.world, &["web", "db"]);
        assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
    }
    assert_eq!(links(&web), ["lo"]);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn two_pods_on_one_node_talk_over_the_overlay() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "0.3.1");
    node.add_pods(&mut cluster.world, &["a", "b"]);
    cluster.world.ping("a", &node.overlay("b"), SOON);
    cluster.world.ping("b", &node.overlay("a"), SOON);
    let score = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", pid(&node.status("a"))));
    assert_eq!(score.expect("a live process").trim(), world::oom_score(-997));
    node.delete_pods(&cluster.world, &["a", "b"]);
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_dual_stack_pod_has_an_address_in_each_overlay_whichever_address_comes_first() {
    let mut cluster = Cluster::new();
    cluster.set_policy(&[("overlay", serde_json::json!(["10.42.0.0/16", "fd42::/64"]))]);
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["overlay"] = serde_json::json!(["10.42.0.0/16", "fd42::/64"]);
    let v4 = serde_json::json!([{ "subnet": "10.244.1.0/24" }]);
    let v6 = serde_json::json!([{ "subnet": "fd00:244:0:1::/64" }]);
    for (pod, ranges) in [("a", [&v4, &v6]), ("b", [&v6, &v4])] {
        node.conf["plugins"][0]["ipam"]["ranges"] = serde_json::json!(ranges);
        node.add_pods(&mut cluster.world, &[pod]);
    }
    assert_eq!(node.status("a")["overlay"], serde_json::json!(["10.42.1.2/16", "fd42::af4:102/64"]));
    assert_eq!(node.status("b")["overlay"], serde_json::json!(["10.42.1.3/16", "fd42::af4:103/64"]));
    for (from, to) in [("a", "10.42.1.3"), ("a", "fd42::af4:103"), ("b", "10.42.1.2"), ("b", "fd42::af4:102")] {
        cluster.world.ping(from, to, SOON);
    }
    // A pod without an IPv4 address starts, and its way to the overlay of that family is closed, not open.
    node.conf["plugins"][0]["ipam"]["ranges"] = serde_json::json!([v6]);
    node.add_pods(&mut cluster.world, &["c"]);
    assert_eq!(node.status("c")["overlay"], serde_json::json!(["fd42::4/64"]));
    cluster.world.ping("c", "fd42::af4:102", SOON);
    let routes = String::from_utf8_lossy(&cluster.world.exec("c", &["ip", "route"]).stdout).into_owned();
    assert!(routes.contains("unreachable 10.42.0.0/16") && !routes.contains("nebula0"), "{routes}");
    node.chain_ok(&cluster.world, "check", "b");
    node.chain_ok(&cluster.world, "check", "c");
    node.delete_pods(&cluster.world, &["a", "b", "c"]);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_renumbered_pod_is_reported_probed_and_reached_by_its_overlay_address() {
    let mut cluster = Cluster::new();
    let mut one = cluster.node("n1", "1.0.0");
    one.conf["plugins"][1]["renumber"] = true.into();
    let two = cluster.node("n2", "0.4.0");
    cluster.world.namespace("web");
    cluster.world.namespace("db");
    let web = one.chain_ok(&cluster.world, "add", "web");
    two.chain_ok(&cluster.world, "add", "db");
    assert_eq!(pod_address(&web), "10.42.1.2", "the result names the overlay address: {web}");
    assert_eq!(web["ips"][0]["gateway"], "10.244.1.1", "all else is the primary plugin's: {web}");
    // Like the kubelet's probes: from the node, which has no tunnel.
    cluster.world.ping("n1", "10.42.1.2", SOON);
    cluster.world.ping("db", "10.42.1.2", SOON);
    let routes = || String::from_utf8_lossy(&cluster.world.exec("n1", &["ip", "route"]).stdout).into_owned();
    assert!(routes().contains("10.42.1.2 via 10.244.1.2 dev cni0"), "{}", routes());
    // What kube-proxy sends to such a pod of another node must not leave by the default route.
    assert!(routes().contains("unreachable 10.42.0.0/16"), "{}", routes());
    assert!(!cluster.world.exec("n1", &["ip", "route", "get", "10.42.2.2"]).status.success());
    udp_answers_come_from(&cluster, "web", "n1", "10.42.1.2");
    // Also after a restart, with which the device and what names its address go.
    let killed = pid(&one.status("web"));
    kill(killed);
    assert!(gone_within(killed, SOON));
    let (plugin, state) = (binary("nebula-cni-plugin").display().to_string(), one.dir.join("state"));
    assert!(cluster.world.exec("n1", &[&plugin, "reconcile", &state.display().to_string()]).status.success());
    cluster.world.ping("n1", "10.42.1.2", SOON);
    udp_answers_come_from(&cluster, "web", "n1", "10.42.1.2");
    // CHECK of the primary plugin looks for the address of the result on its interface, so only our plugin is called.
    let whole = one.conf.clone();
    one.conf["plugins"].as_array_mut().expect("plugins").remove(0);
    one.chain_ok(&cluster.world, "check", "web");
    assert!(cluster.world.exec("n1", &["ip", "route", "del", "10.42.1.2"]).status.success());
    assert_eq!(failed(&one, &cluster, "check", "web")["code"], 113);
    one.conf = whole;
    one.chain_ok(&cluster.world, "del", "web");
    one.chain_ok(&cluster.world, "add", "web");
    one.chain_ok(&cluster.world, "del", "web");
    assert_eq!(one.leftovers(), Vec::<PathBuf>::new());
    assert!(!routes().contains("10.42."), "{}", routes());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn add_fails_with_a_reason_and_undoes_itself_when_the_ca_is_away_and_works_when_it_is_back() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["timeoutSeconds"] = 3.into();
    cluster.world.namespace("web");
    cluster.world.stop("control", Signal::SIGTERM);
    let began = Instant::now();
    let error = failed(&node, &cluster, "add", "web");
    assert!(began.elapsed() < Duration::from_secs(6), "ADD kept the runtime waiting for {:?}", began.elapsed());
    assert_eq!(error["code"], 103, "{error}");
    assert!(error["msg"].as_str().is_some_and(|msg| msg.contains("shop/web")), "the message names the pod: {error}");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
    node.chain_ok(&cluster.world, "del", "web");
    cluster.start_ca();
    node.chain_ok(&cluster.world, "add", "web");
    cluster.world.ping("web", world::cluster::LIGHTHOUSE, SOON);
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_lazy_pod_starts_closed_without_a_ca_and_opens_when_the_ca_is_back() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["mode"] = "lazy".into();
    node.conf["plugins"][1]["overlay"] = serde_json::json!(["10.42.0.0/16"]);
    cluster.world.namespace("web");
    cluster.world.stop("control", Signal::SIGTERM);
    node.chain_ok(&cluster.world, "add", "web");
    let status = node.status("web");
    assert_eq!((&status["state"], &status["certificate"]), (&Value::from("waiting"), &Value::Null));
    let route = cluster.world.exec("web", &["ip", "route", "get", world::cluster::LIGHTHOUSE]);
    let route = String::from_utf8_lossy(&route.stdout).into_owned();
    assert!(route.contains("dev nebula0"), "packets for the overlay leave in clear: {route}");
    node.chain_ok(&cluster.world, "check", "web");
    cluster.start_ca();
    cluster.world.ping("web", world::cluster::LIGHTHOUSE, Duration::from_secs(45));
    assert_eq!(node.status("web")["state"], "running");
    node.chain_ok(&cluster.world, "check", "web");
    node.chain_ok(&cluster.world, "del", "web");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn add_is_refused_with_the_check_that_failed_when_the_node_token_is_wrong() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    let wrong = cluster.world.write("wrong.token", "nebnode_0000000000000000000000000000000000000000000");
    node.conf["plugins"][1]["ca"]["tokenFile"] = wrong.display().to_string().into();
    cluster.world.namespace("web");
    let error = failed(&node, &cluster, "add", "web");
    assert_eq!(error["code"], 102, "{error}");
    let text = error.to_string();
    assert!(text.contains("token"), "the error names the failed check: {text}");
    assert!(!text.contains("nebnode_0000"), "the error holds a secret: {text}");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn check_fails_once_the_instance_is_dead_and_del_still_succeeds() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web"]);
    let instance = pid(&node.status("web"));
    kill(instance);
    assert!(gone_within(instance, Duration::from_secs(2)));
    let error = failed(&node, &cluster, "check", "web");
    assert!(error["msg"].as_str().is_some_and(|msg| msg.contains("shop/web") || msg.contains("instance")), "{error}");
    node.chain_ok(&cluster.world, "del", "web");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn when_del_returns_the_pod_is_as_before_and_add_works_again_at_once() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    let pod = cluster.world.namespace("web");
    let networks = || ["dev", "route", "if_inet6", "ipv6_route"].map(network_of_thread);
    let in_pod = |work: &(dyn Fn() -> [String; 4] + Sync)| {
        let enter_and_work = || {
            world::enter(&pod);
            work()
        };
        thread::scope(|scope| scope.spawn(enter_and_work).join().expect("no panic"))
    };
    node.chain_ok(&cluster.world, "add", "web");
    for is_killed in [false, true, false] {
        let instance = pid(&node.status("web"));
        let groups = control_groups(instance);
        assert!(in_pod(&networks).iter().any(|text| text.contains("nebula0")));
        if is_killed {
            kill(instance);
        }
        // Only our plugin is called: the primary plugin, which would be next, takes its time.
        let left = in_pod(&|| {
            call_again(&cluster, &node, "DEL");
            networks()
        });
        assert!(left.iter().all(|text| !text.contains("nebula0")), "is_killed={is_killed}: {left:?}");
        assert!(is_killed || !alive(instance));
        assert_eq!(groups.iter().filter(|group| group.exists()).collect::<Vec<_>>(), Vec::<&PathBuf>::new());
        assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
        call_again(&cluster, &node, "ADD");
        cluster.world.ping("web", world::cluster::LIGHTHOUSE, SOON);
    }
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn an_instance_whose_pod_is_gone_ends_itself() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    let namespace = cluster.world.namespace("web");
    node.chain_ok(&cluster.world, "add", "web");
    let instance = pid(&node.status("web"));
    assert!(alive(instance));
    world::run("ip", &["netns", "del", &namespace]);
    assert!(gone_within(instance, Duration::from_secs(10)), "the instance keeps the dead pod's namespace");
    // The runtime sends DEL with a namespace that no longer exists.
    node.chain_ok(&cluster.world, "del", "web");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn del_succeeds_when_every_record_is_lost() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    let namespace = cluster.world.namespace("web");
    node.chain_ok(&cluster.world, "add", "web");
    let instance = pid(&node.status("web"));
    std::fs::remove_dir_all(node.dir.join("state")).expect("the records are there");
    node.chain_ok(&cluster.world, "del", "web");
    world::run("ip", &["netns", "del", &namespace]);
    assert!(gone_within(instance, Duration::from_secs(10)), "an instance without a record outlives its pod");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_renumbered_pod_s_host_route_goes_also_when_its_record_is_lost() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["renumber"] = true.into();
    let routes =
        |cluster: &Cluster| String::from_utf8_lossy(&cluster.world.exec("n1", &["ip", "route"]).stdout).into_owned();
    // `web` loses its records, so the cached result must provide its address; `db` loses the cached result, so its
    // instance must.
    for (pod, address) in [("web", "10.42.1.2"), ("db", "10.42.1.3")] {
        let namespace = cluster.world.namespace(pod);
        node.chain_ok(&cluster.world, "add", pod);
        assert!(routes(&cluster).contains(&format!("{address} via")), "{}", routes(&cluster));
        if pod == "web" {
            std::fs::remove_dir_all(node.dir.join("state")).expect("the records are there");
        } else {
            std::fs::write(node.records().join(format!("{pod}-eth0.json")), "{").expect("the record is there");
            std::fs::remove_dir_all(node.dir.join("cache")).expect("the results are there");
        }
        node.chain_ok(&cluster.world, "del", pod);
        assert!(!routes(&cluster).contains(address), "{}", routes(&cluster));
        world::run("ip", &["netns", "del", &namespace]);
    }
    // The address now belongs to another pod: a late DEL of its former owner does not remove it.
    node.add_pods(&mut cluster.world, &["next"]);
    let result = |pod: &str| node.dir.join(format!("cache/results/{}-{pod}-eth0", node.network));
    std::fs::copy(result("next"), result("gone")).expect("a copy of the result");
    let ours = node.conf["plugins"][1].clone();
    let whole = std::mem::replace(&mut node.conf["plugins"], serde_json::json!([ours]));
    cluster.world.namespace("gone");
    node.chain_ok(&cluster.world, "del", "gone");
    assert!(routes(&cluster).contains("10.42.1.4 via"), "{}", routes(&cluster));
    node.conf["plugins"] = whole;
    node.chain_ok(&cluster.world, "del", "next");
    assert!(!routes(&cluster).contains("10.42."), "{}", routes(&cluster));
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn pods_added_in_parallel_all_come_up() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    let pods: Vec<String> = (0..8).map(|n| format!("p{n}")).collect();
    for pod in &pods {
        cluster.world.namespace(pod);
    }
    let world = &cluster.world;
    thread::scope(|scope| {
        for pod in &pods {
            let node = &node;
            scope.spawn(move || node.chain_ok(world, "add", pod));
        }
    });
    let last = node.overlay(&pods[7]);
    for pod in &pods[..7] {
        cluster.world.ping(pod, &last, SOON);
    }
    thread::scope(|scope| {
        for pod in &pods {
            let node = &node;
            scope.spawn(move || node.chain_ok(world, "del", pod));
        }
    });
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

fn failed(node: &Node, cluster: &Cluster, verb: &str, pod: &str) -> Value {
    let output = node.chain(&cluster.world, verb, pod);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!output.status.success(), "{verb} of {pod} succeeded: {said}");
    serde_json::from_str(&said).unwrap_or_else(|_| panic!("not an error object: {said}"))
}

/// Calls our plugin with the same input as its ADD, for the same or another verb.
pub(crate) fn call_again(cluster: &Cluster, node: &Node, verb: &str) {
    let calls = std::fs::read_to_string(node.dir.join("calls.jsonl")).expect("a record of the calls");
    let mut calls = calls.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let add = calls.rfind(|call| call["command"] == "ADD" && call["type"] == "nebula-cni-plugin").expect("an ADD");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let mut plugin = Command::new("nsenter")
        .arg(format!("--net=/run/netns/{}", cluster.world.namespace_of(&node.name)))
        .arg(binary("nebula-cni-plugin"))
        .envs(add["env"].as_object().expect("a map").iter().map(|(name, value)| (name, text(value))))
        .env("CNI_COMMAND", verb)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("nsenter runs");
    let mut stdin = plugin.stdin.take().expect("a pipe");
    stdin.write_all(add["stdin"].to_string().as_bytes()).expect("it reads");
    drop(stdin);
    assert!(plugin.wait().expect("it ends").success(), "{verb}\n{}", node.instance_logs());
}

/// A file of `/proc/net` in the namespace of the calling thread.
fn network_of_thread(file: &str) -> String {
    std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default()
}

/// The control groups made for this process alone; none if the machine has no cgroup2.
fn control_groups(pid: u64) -> Vec<PathBuf> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("a live process");
    let own = text.lines().filter_map(|line| line.strip_prefix("0::/")).filter(|path| path.starts_with("nebula-cni/"));
    let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    own.flat_map(|path| roots.map(|root| root.join(path))).filter(|group| group.exists()).collect()
}

/// A server in `pod` that leaves its address to the kernel answers a client on `node` from the address that was asked.
fn udp_answers_come_from(cluster: &Cluster, pod: &str, node: &str, address: &str) {
    let socket_in = |host: &str| {
        let namespace = cluster.world.namespace_of(host);
        let open = move || {
            world::enter(&namespace);
            std::net::UdpSocket::bind("0.0.0.0:0").expect("a socket")
        };
        thread::spawn(open).join().expect("no panic")
    };
    let (server, client) = (socket_in(pod), socket_in(node));
    let port = server.local_addr().expect("an address").port();
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
    }
    client.send_to(b"question", (address, port)).expect("a route");
    let mut bytes = [0; 16];
    let (_, from) = server.recv_from(&mut bytes).expect("the question arrives");
    server.send_to(b"answer", from).expect("a route");
    let (_, answerer) = client.recv_from(&mut bytes).expect("the answer arrives");
    assert_eq!(answerer.to_string(), format!("{address}:{port}"));
}

fn pod_address(result: &Value) -> String {
    result["ips"][0]["address"].as_str().and_then(|net| net.split('/').next()).unwrap_or_default().to_owned()
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_pod_is_reached_at_once_when_its_instance_starts_again() {
    let mut cluster = Cluster::new();
    let [one, two] = ["n1", "n2"].map(|name| cluster.node(name, "1.0.0"));
    one.add_pods(&mut cluster.world, &["web"]);
    two.add_pods(&mut cluster.world, &["db"]);
    cluster.world.ping("db", &one.overlay("web"), SOON);
    let flow = Flow::start(&cluster.world, "db", "web", one.overlay("web").parse().expect("an address"));
    let port = one.status("web")["port"].clone();
    let (plugin, state) = (binary("nebula-cni-plugin").display().to_string(), one.dir.join("state"));
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        flow.watch();
        let began = Instant::now();
        let instance = pid(&one.status("web"));
        end(instance, signal);
        assert!(gone_within(instance, SOON));
        assert!(cluster.world.exec("n1", &[&plugin, "reconcile", &state.display().to_string()]).status.success());
        let socket = one.status_socket("web");
        while answer_at(&socket).map_or(true, |status| status["state"] != "running") {
            assert!(began.elapsed() < SOON, "{}", one.instance_logs());
            thread::sleep(Duration::from_millis(5));
        }
        let away = began.elapsed();
        assert_eq!(one.status("web")["port"], port, "peers find it where it was");
        let before = flow.answers().1;
        while flow.answers().1 < before + 50 && began.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(20));
        }
        let silence = flow.silence().1;
        eprintln!("instance of a pod ended by {signal}: away {away:.2?}, silent {silence:.2?}");
        assert!(silence <= away + Duration::from_millis(300), "{silence:?}\n{}", one.instance_logs());
    }
    drop(flow);
    one.delete_pods(&cluster.world, &["web"]);
    two.delete_pods(&cluster.world, &["db"]);
}

fn pid(status: &Value) -> u64 {
    let pid = status["pid"].as_u64().expect("the status names its process");
    assert!(Path::new(&format!("/proc/{pid}")).exists());
    pid
}

fn kill(pid: u64) {
    end(pid, Signal::SIGKILL);
}

fn end(pid: u64, signal: Signal) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a process id"));
    nix::sys::signal::kill(pid, signal).expect("the instance runs");
}
