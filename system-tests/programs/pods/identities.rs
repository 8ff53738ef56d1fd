//! A pod's identity over its life: renewed, revoked, expired, closed, isolated. Real plugin, instance, CA and
//! lighthouse in network namespaces, with packets captured on all links of a node.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]
#![allow(clippy::print_stdout, reason = "prints how long a revocation took")]

use crate::world;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;
use world::capture::Capture;
use world::cluster::{Cluster, LIGHTHOUSE, Node, alive, binary, gone_within};

const SOON: Duration = Duration::from_secs(15);

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_blocked_peer_loses_its_tunnels_about_at_once_also_after_the_ca_was_started_again() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web", "db"]);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    cluster.world.ping("web", &node.overlay("db"), SOON);
    thread::sleep(UNTIL_IT_WAITS);
    loses_tunnel(&cluster, &node, &fingerprint(&node, "db"), "db.shop.pod");
    cluster.world.stop("control", Signal::SIGKILL);
    cluster.start_ca();
    thread::sleep(UNTIL_IT_WAITS);
    loses_tunnel(&cluster, &node, "lighthouse", "lighthouse");
    assert_eq!(pings(&cluster, "web", LIGHTHOUSE, 3, "0.2"), 0, "a blocked peer is not let in again");
    assert_eq!(node.status("web")["state"], "running", "others keep their identity");
    node.delete_pods(&cluster.world, &["web", "db"]);
}

/// The pod `web` loses its tunnel to this peer when the peer is revoked.
fn loses_tunnel(cluster: &Cluster, node: &Node, which: &str, peer: &str) {
    let has_tunnel = || peers(node, "web").iter().any(|name| name == peer);
    assert!(has_tunnel(), "{peer}");
    revoke(cluster, which);
    let revoked = Instant::now();
    // The service answers all waiting requests at once; the rest of the time allows for load on the machine.
    eventually(Duration::from_secs(3), "the tunnel to a blocked peer goes", || !has_tunnel());
    println!("the tunnel to {peer} was gone {:?} after the revocation", revoked.elapsed());
}

/// After losing its connection, an instance asks for the trust bundle again after one second, then after two.
const UNTIL_IT_WAITS: Duration = Duration::from_secs(5);

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn an_instance_has_no_capabilities_also_after_a_restart_and_with_another_certificate() {
    let mut cluster = Cluster::new();
    cluster.set_policy(&[("life", json!("15s"))]);
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web"]);
    assert_eq!(node.capabilities("web"), Vec::<String>::new());
    let first = kill_and_reconcile(&cluster, &node);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    let before = fingerprint(&node, "web");
    eventually(Duration::from_secs(25), "the certificate is renewed", || fingerprint(&node, "web") != before);
    assert_ne!(node.status("web")["pid"], first);
    assert_eq!(node.capabilities("web"), Vec::<String>::new());
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn an_instance_that_was_killed_comes_back_when_asked_for_while_its_threads_still_end() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web"]);
    for _ in 0..5 {
        let killed = kill_and_reconcile(&cluster, &node);
        cluster.world.ping("web", LIGHTHOUSE, SOON);
        assert_ne!(node.status("web")["pid"], killed);
    }
    node.chain_ok(&cluster.world, "del", "web");
}

/// Kills the instance of the pod `web`, and reconciles as soon as it no longer runs. Returns the dead one's process id.
fn kill_and_reconcile(cluster: &Cluster, node: &Node) -> u64 {
    let pid = node.status("web")["pid"].as_u64().expect("a process id");
    kill(pid);
    assert!(gone_within(pid, SOON));
    let (plugin, state) = (binary("nebula-cni-plugin"), node.dir.join("state"));
    let reconcile = [&plugin.display().to_string(), "reconcile", &state.display().to_string()];
    assert!(cluster.world.exec("n1", &reconcile).status.success());
    pid
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_pod_whose_certificate_is_revoked_gets_another_one_with_another_key() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web"]);
    let before = fingerprint(&node, "web");
    revoke(&cluster, &before);
    eventually(Duration::from_secs(45), "another certificate comes", || fingerprint(&node, "web") != before);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn tunnels_move_over_to_renewed_certificates_without_losing_a_packet() {
    let mut cluster = Cluster::new();
    cluster.set_policy(&[("life", json!("24s"))]);
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["a", "b"]);
    cluster.world.ping("a", &node.overlay("b"), SOON);
    let before = ["a", "b"].map(|pod| fingerprint(&node, pod));
    // Both renew when a third of the 24 s is left, and continue for as long again.
    let overlay = node.overlay("b");
    let output = cluster.world.exec("a", &["ping", "-n", "-D", "-c", "1500", "-i", "0.02", "-W", "1", &overlay]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let after = ["a", "b"].map(|pod| fingerprint(&node, pod));
    assert!(before.iter().zip(&after).all(|(before, after)| before != after), "nothing was renewed");
    let lost: Vec<u32> = (1..=1500).filter(|n| !text.contains(&format!("icmp_seq={n} "))).collect();
    assert!(lost.is_empty(), "packets {lost:?} were lost\n{text}\n{}", node.instance_logs());
    node.delete_pods(&cluster.world, &["a", "b"]);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn pods_and_hosts_follow_a_rollover_of_the_ca_without_losing_a_packet() {
    let mut cluster = Cluster::new();
    cluster.set_policy(&[("life", json!("15s"))]);
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["a", "b"]);
    let overlay = node.overlay("b");
    cluster.world.ping("a", &overlay, SOON);
    cluster.world.ping("a", LIGHTHOUSE, SOON);
    let ping = |to: &str| ["-n", "-i", "0.05", "-W", "1", to].map(str::to_owned);
    for (name, to) in [("ping-pod", overlay.as_str()), ("ping-host", LIGHTHOUSE)] {
        let arguments = ping(to);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        cluster.world.start_in(name, "a", std::path::Path::new("ping"), &arguments);
    }
    let folder = cluster.world.dir().join("lighthouse");
    // Does what the host's timer does, and reloads the daemon.
    let renew = |cluster: &Cluster| {
        let (enrol, out) = (binary("nebula-enrol").display().to_string(), folder.display().to_string());
        let (url, tls) = (cluster.ca_url(), cluster.ca_file("tls.crt"));
        let command = [&enrol, "-renew-now", "-ca-url", &url, "-tls-ca", &tls, "-out-dir", &out];
        let output = cluster.world.exec("control", &command);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        signal(cluster.world.pid("lighthouse").into(), Signal::SIGHUP);
    };
    let authorities = |count: usize| {
        let wanted = format!("authorities={count}");
        eventually(SOON, &format!("both pods trust {count}"), || node.instance_logs().matches(&wanted).count() >= 2);
    };
    let issuers = || ["a", "b"].map(|pod| node.status(pod)["certificate"]["issuer"].clone());

    let old = issuers();
    let mut retired = vec![host_fingerprint(&folder)];
    rollover(&cluster, &["prepare"]);
    authorities(2);
    renew(&cluster);
    assert_eq!(issuers(), old, "the old CA signs still");
    retired.push(host_fingerprint(&folder));
    rollover(&cluster, &["switch", "--at-once"]);
    renew(&cluster);
    eventually(Duration::from_secs(30), "both pods have certificates of the next CA", || {
        issuers().iter().zip(&old).all(|(now, old)| now != old)
    });
    // The host's certificates from the old CA are valid for longer than this test.
    retired.iter().for_each(|fingerprint| revoke(&cluster, fingerprint));
    eventually(Duration::from_secs(30), "no certificate of the old CA is valid", || {
        rollover_try(&cluster, &["finish"]).status.success()
    });
    renew(&cluster);
    authorities(1);
    // One more lifetime without the old CA.
    let last = ["a", "b"].map(|pod| fingerprint(&node, pod));
    eventually(Duration::from_secs(30), "both pods renew with the new CA alone", || {
        ["a", "b"].iter().zip(&last).all(|(pod, last)| fingerprint(&node, pod) != *last)
    });
    thread::sleep(Duration::from_secs(2));
    for name in ["ping-pod", "ping-host"] {
        cluster.world.stop(name, Signal::SIGINT);
        let text = cluster.world.log(name);
        let [sent, received] = [0, 1].map(|at| {
            let line = text.lines().find(|line| line.contains("packets transmitted")).expect("ping counts");
            let part = line.split(", ").nth(at).and_then(|part| part.split(' ').next());
            part.and_then(|number| number.parse::<u32>().ok()).expect("a number")
        });
        // The last one may still be in flight.
        assert!(sent > 300 && sent - received <= 1, "{name}: {received} of {sent}\n{}", node.instance_logs());
    }
    node.delete_pods(&cluster.world, &["a", "b"]);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn an_expired_pod_is_closed_and_says_so_and_opens_when_the_ca_is_back() {
    let mut cluster = Cluster::new();
    cluster.set_policy(&[("life", json!("15s"))]);
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web"]);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    assert!(http(&node, "web", "/healthz").starts_with("HTTP/1.1 200 "));
    cluster.world.stop("control", Signal::SIGTERM);
    let capture = Capture::start(&cluster.world.namespace_of("n1"));
    eventually(Duration::from_secs(25), "the path closes", || node.status("web")["state"] == "closed");
    let health = http(&node, "web", "/healthz");
    assert!(health.starts_with("HTTP/1.1 503 ") && health.contains("expired"), "{health}");
    assert!(http(&node, "web", "/metrics").contains("\nnebula_pod_open 0\n"));
    assert_eq!(pings(&cluster, "web", LIGHTHOUSE, 5, "0.1"), 0);
    assert_eq!(capture.overlay_packets(), 0, "packets for the overlay left in clear");
    cluster.start_ca();
    eventually(Duration::from_secs(50), "the path opens again", || node.status("web")["state"] == "running");
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn nothing_for_the_overlay_leaves_in_clear_before_a_certificate_and_after_the_instance_was_killed() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["mode"] = "lazy".into();
    node.conf["plugins"][1]["overlay"] = json!(["10.42.0.0/16"]);
    cluster.world.namespace("web");
    cluster.world.stop("control", Signal::SIGTERM);
    let capture = Capture::start(&cluster.world.namespace_of("n1"));
    node.chain_ok(&cluster.world, "add", "web");
    assert_eq!(pings(&cluster, "web", LIGHTHOUSE, 5, "0.1"), 0);
    cluster.start_ca();
    cluster.world.ping("web", LIGHTHOUSE, Duration::from_secs(45));
    let instance = node.status("web")["pid"].as_u64().expect("a process id");
    kill(instance);
    assert!(gone_within(instance, SOON));
    assert_eq!(pings(&cluster, "web", LIGHTHOUSE, 5, "0.1"), 0);
    assert_eq!(pings(&cluster, "web", "10.244.1.1", 3, "0.1"), 3, "the primary network is not touched");
    assert!(capture.packets() > 0, "the capture sees the pod's other packets");
    assert_eq!(capture.overlay_packets(), 0, "packets for the overlay left in clear");
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_tunnel_may_have_its_underlay_in_the_pod() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][0]["ipMasq"] = true.into();
    node.conf["plugins"][1]["underlay"] = "pod".into();
    node.conf["plugins"][1]["mode"] = "lazy".into();
    node.conf["plugins"][1]["overlay"] = json!(["10.42.0.0/16"]);
    node.add_pods(&mut cluster.world, &["a", "b"]);
    eventually(SOON, "certificates come", || ["a", "b"].iter().all(|pod| node.status(pod)["state"] == "running"));
    cluster.world.ping("a", LIGHTHOUSE, SOON);
    cluster.world.ping("a", &node.overlay("b"), SOON);
    let sockets =
        |host: &str| String::from_utf8(cluster.world.exec(host, &["cat", "/proc/net/udp"]).stdout).expect("text");
    // Port 4242.
    assert!(sockets("a").contains(":1092 "), "{}", sockets("a"));
    assert!(!sockets("n1").contains(":1092 "), "{}", sockets("n1"));
    assert_eq!(node.capabilities("a"), Vec::<String>::new());
    let before = fingerprint(&node, "a");
    revoke(&cluster, &before);
    eventually(Duration::from_secs(45), "another certificate comes", || fingerprint(&node, "a") != before);
    cluster.world.ping("a", LIGHTHOUSE, SOON);
    node.delete_pods(&cluster.world, &["a", "b"]);
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn an_isolated_pod_reaches_the_overlay_and_listed_ranges_and_is_reached_by_probes() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][0]["ipMasq"] = true.into();
    node.conf["plugins"][1]["isolate"] = json!({"ranges": ["10.244.1.2/31"], "dns": ["192.0.2.1"]});
    let results = node.add_pods(&mut cluster.world, &["web", "db", "other"]);
    for (result, address) in results.iter().zip(["10.244.1.2", "10.244.1.3", "10.244.1.4"]) {
        assert!(result.to_string().contains(address), "{result}");
    }
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    cluster.world.ping("web", &node.overlay("other"), SOON);
    assert_eq!(pings(&cluster, "web", "10.244.1.3", 2, "0.1"), 2, "a listed range");
    assert_eq!(pings(&cluster, "n1", "10.244.1.2", 2, "0.1"), 2, "the node's probes");
    assert_eq!(pings(&cluster, "web", "10.244.1.4", 2, "0.1"), 0, "another pod");
    assert_eq!(pings(&cluster, "web", "192.0.2.1", 2, "0.1"), 0, "another host");
    assert_eq!(pings(&cluster, "web", "10.244.1.1", 2, "0.1"), 0, "the node itself");
    assert!(
        connects(&cluster, "web", "192.0.2.1:53"),
        "DNS over TCP is refused by nobody listening, and not by a rule"
    );
    assert!(!connects(&cluster, "web", "192.0.2.1:8443"), "not even the CA");
    // The rules do not depend on the process.
    let instance = node.status("web")["pid"].as_u64().expect("a process id");
    kill(instance);
    assert!(gone_within(instance, SOON));
    assert_eq!(pings(&cluster, "web", "10.244.1.4", 2, "0.1"), 0);
    node.delete_pods(&cluster.world, &["web", "db", "other"]);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn an_isolated_pod_is_isolated_in_ipv6_too_and_finds_its_neighbours() {
    let mut cluster = Cluster::new();
    cluster.set_policy(&[("overlay", json!(["10.42.0.0/16", "fd42::/96"]))]);
    let mut node = cluster.node("n1", "1.0.0");
    // The lighthouse is reachable over IPv6 only, so the underlay needs IPv6 as well.
    for (host, address) in [("control", "fd00:192::1/64"), ("n1", "fd00:192::2/64")] {
        let add = ["ip", "addr", "add", address, "dev", "eth0", "nodad"];
        assert!(cluster.world.exec(host, &add).status.success());
    }
    let back = ["ip", "route", "add", "fd00:244:1::/64", "via", "fd00:192::2"];
    assert!(cluster.world.exec("control", &back).status.success());
    let config = std::fs::read_to_string(cluster.world.dir().join("lighthouse.yml")).expect("its configuration");
    let config = cluster.world.write("lighthouse.yml", &config.replace("0.0.0.0", "'::'"));
    cluster.world.stop("lighthouse", Signal::SIGTERM);
    cluster.world.start_in("lighthouse", "control", &binary("nebula"), &["-config", &config.display().to_string()]);
    let plugins = &mut node.conf["plugins"];
    plugins[0]["ipam"]["ranges"] = json!([[{"subnet": "10.244.1.0/24"}], [{"subnet": "fd00:244:1::/64"}]]);
    plugins[0]["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    plugins[1]["nebula"]["listen"] = json!({"host": "::"});
    plugins[1]["nebula"]["static_host_map"] = json!({LIGHTHOUSE: ["[fd00:192::1]:4242"]});
    plugins[1]["isolate"] =
        json!({"ranges": ["fd00:244:1::2/127"], "dns": ["fd00:192::1"], "probes": ["fd00:244:1::1"]});
    let results = node.add_pods(&mut cluster.world, &["web", "db", "other"]);
    for (result, address) in results.iter().zip(["fd00:244:1::2", "fd00:244:1::3", "fd00:244:1::4"]) {
        assert!(result.to_string().contains(address), "{result}");
    }
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    let tunnels = node.status("web")["tunnels"].to_string();
    assert!(tunnels.contains("[fd00:192::1]:4242"), "the underlay is IPv6: {tunnels}");
    cluster.world.ping("web", "fd42::af4:104", SOON);
    // Until duplicate address detection is complete, probes would come from another address of the node.
    eventually(SOON, "the node may use its address on the bridge", || {
        let shown = cluster.world.exec("n1", &["ip", "-6", "addr", "show", "dev", "cni0", "tentative"]);
        assert!(shown.status.success());
        shown.stdout.is_empty()
    });
    let check = |cluster: &Cluster| {
        assert_eq!(pings(cluster, "web", "fd00:244:1::3", 2, "0.1"), 2, "a listed range");
        assert_eq!(pings(cluster, "n1", "fd00:244:1::2", 2, "0.1"), 2, "the node's probes");
        assert_eq!(pings(cluster, "web", "fd00:244:1::4", 2, "0.1"), 0, "another pod");
        assert_eq!(pings(cluster, "n1", "fd00:244:1::3", 2, "0.1"), 2, "the node's probes of another pod");
        assert_eq!(pings(cluster, "control", "fd00:244:1::2", 2, "0.1"), 0, "another host");
        assert_eq!(pings(cluster, "web", "fd00:244:1::1", 2, "0.1"), 0, "the node itself");
        assert_eq!(pings(cluster, "web", "fd00:192::1", 2, "0.1"), 0, "a host behind it");
        assert!(
            connects(cluster, "web", "[fd00:192::1]:53"),
            "nobody listens for DNS over TCP, and no rule is in the way"
        );
        assert!(!connects(cluster, "web", "[fd00:192::1]:80"));
    };
    check(&cluster);
    // All neighbour caches are flushed and must be filled again: the rules do not block neighbour discovery.
    let links = [("web", "eth0", "fd00:244:1::3"), ("db", "eth0", "fd00:244:1::2"), ("n1", "cni0", "fd00:244:1::2")];
    for (host, link, _) in links {
        assert!(cluster.world.exec(host, &["ip", "-6", "neigh", "flush", "dev", link]).status.success());
    }
    check(&cluster);
    for (host, link, neighbour) in links {
        let known = cluster.world.exec(host, &["ip", "-6", "neigh", "show", neighbour, "dev", link]).stdout;
        let known = String::from_utf8_lossy(&known).into_owned();
        assert!(known.contains("lladdr"), "{host} does not find {neighbour}: {known:?}");
    }
    let instance = node.status("web")["pid"].as_u64().expect("a process id");
    kill(instance);
    assert!(gone_within(instance, SOON));
    check(&cluster);
    node.delete_pods(&cluster.world, &["web", "db", "other"]);
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_node_reaches_a_pod_by_its_overlay_address_through_the_pods_own_interface() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web"]);
    let overlay = node.overlay("web");
    let route = ["ip", "route", "add", &format!("{overlay}/32"), "dev", "cni0", "src", "10.244.1.1"];
    assert!(cluster.world.exec("n1", &route).status.success());
    assert_eq!(pings(&cluster, "n1", &overlay, 3, "0.1"), 3, "probes of the kubelet are answered");
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_second_instance_of_a_pod_ends_with_a_reason_and_leaves_the_first_alone() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web"]);
    let launch = node.records().join("web-eth0.launch");
    let second = cluster
        .world
        .exec("n1", &[&binary("nebula-cni-instance").display().to_string(), "--launch", &launch.display().to_string()]);
    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("another instance serves this pod"), "{said}");
    let first = node.status("web");
    assert!(alive(first["pid"].as_u64().expect("a process id")));
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn neither_key_nor_token_of_a_pod_is_in_any_file_and_what_there_is_is_for_root() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web"]);
    let token = std::fs::read_to_string(cluster.ca_file("node.token")).expect("the node token");
    let mut files = vec![node.dir.clone()];
    let (mut seen, mut private) = (0, 0);
    while let Some(path) = files.pop() {
        if path.starts_with(node.dir.join("state")) {
            let mode = path.symlink_metadata().expect("it is there").permissions().mode();
            assert_eq!(mode & 0o077, 0, "{}: {mode:o}", path.display());
            private += 1;
        }
        if path.is_dir() && !path.is_symlink() {
            files.extend(std::fs::read_dir(&path).expect("a folder").map(|entry| entry.expect("an entry").path()));
        } else if let Ok(bytes) = std::fs::read(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            && !path.is_symlink()
        {
            seen += 1;
            assert!(!bytes.contains("PRIVATE KEY") && !bytes.contains(token.trim()), "{}", path.display());
        }
    }
    assert!(seen > 2, "the record, the launch file and the log were looked at");
    assert!(private > 5, "their folders and the socket too");
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_pod_with_cap_net_admin_speaks_as_itself_only_and_reads_nothing_of_the_node() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][0]["ipMasq"] = true.into();
    node.add_pods(&mut cluster.world, &["evil", "web"]);
    for pod in ["evil", "web"] {
        cluster.world.ping(pod, LIGHTHOUSE, SOON);
    }
    let (web, launch) = (node.overlay("web"), node.records().join("web-eth0.launch"));
    // Within its namespace it may do anything, such as taking another pod's address.
    assert!(
        cluster.world.exec("evil", &["ip", "addr", "add", &format!("{web}/32"), "dev", "nebula0"]).status.success()
    );
    let ping = ["ping", "-n", "-q", "-c", "3", "-i", "0.2", "-W", "1", "-I", &web, LIGHTHOUSE];
    assert!(!cluster.world.exec("evil", &ping).status.success(), "a packet from another's address was answered");
    let dropped = node.status("evil")["counters"]["dropped_out_local_address"].clone();
    assert!(dropped.as_u64() >= Some(3), "they end in its own instance: {dropped}");
    assert!(cluster.world.exec("evil", &["ip", "link", "set", "nebula0", "down"]).status.success());
    cluster.world.ping("control", &web, SOON);
    // Only root in the node's file system can read the node's data about other pods; the capability gives no access to
    // it.
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=+net_admin"];
    let capable = [&user[..], &["--ambient-caps=+net_admin", "--bounding-set=-all,+net_admin"]].concat();
    let run = |command: &[&str]| cluster.world.exec("evil", &[&capable, command].concat());
    assert!(run(&["ip", "link", "set", "nebula0", "up"]).status.success(), "it has the capability");
    let socket = node.status_socket("web");
    for path in [launch, socket, node.records(), cluster.ca_file("node.token").into(), cluster.ca_file("ca.key").into()]
    {
        let said = run(&["cat", &path.display().to_string()]);
        assert!(!said.status.success() && said.stdout.is_empty(), "{} can be read", path.display());
        assert!(String::from_utf8_lossy(&said.stderr).contains("Permission denied"), "{}", path.display());
    }
    // The CA can be reached from the pod's address, but demands a proof.
    let made_up = cluster.world.write("made-up.token", "nebenrol_0000000000000000000000000000000000000000000");
    let (enrol, out) = (binary("nebula-enrol").display().to_string(), cluster.world.dir().join("stolen"));
    let (url, tls) = (cluster.ca_url(), cluster.ca_file("tls.crt"));
    let (out_dir, token) = (out.display().to_string(), made_up.display().to_string());
    let ask = [&enrol, "-ca-url", &url, "-tls-ca", &tls, "-token-file", &token, "-out-dir", &out_dir];
    let said = cluster.world.exec("evil", &ask);
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.status.success() && text.contains("unknown_token"), "{text}");
    assert!(!out.join("host.crt").exists());
    // Without its device, this pod alone is cut off from the overlay.
    assert!(cluster.world.exec("evil", &["ip", "link", "del", "nebula0"]).status.success());
    assert_eq!(pings(&cluster, "evil", LIGHTHOUSE, 2, "0.2"), 0);
    assert_eq!(pings(&cluster, "web", LIGHTHOUSE, 3, "0.2"), 3);
    node.delete_pods(&cluster.world, &["evil", "web"]);
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

fn revoke(cluster: &Cluster, which: &str) {
    let dir = cluster.world.dir().join("ca").display().to_string();
    world::run(&binary("nebula-ca").display().to_string(), &["certificate", "revoke", "--dir", &dir, which]);
}

fn rollover_try(cluster: &Cluster, step: &[&str]) -> std::process::Output {
    let dir = cluster.world.dir().join("ca");
    let mut command = std::process::Command::new(binary("nebula-ca"));
    command.arg("rollover").args(step).arg("--dir").arg(dir).output().expect("nebula-ca runs")
}

fn rollover(cluster: &Cluster, step: &[&str]) {
    let output = rollover_try(cluster, step);
    assert!(output.status.success(), "{step:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Fingerprint of the certificate in a host's folder.
fn host_fingerprint(folder: &std::path::Path) -> String {
    let pem = std::fs::read(folder.join("host.crt")).expect("a certificate");
    nebula_cert::Certificate::from_pem(&pem).expect("a certificate").fingerprint().to_string()
}

fn fingerprint(node: &Node, pod: &str) -> String {
    node.status(pod)["certificate"]["fingerprint"].as_str().expect("a certificate").to_owned()
}

fn peers(node: &Node, pod: &str) -> Vec<String> {
    let status = node.status(pod);
    let tunnels = status["tunnels"].as_array().expect("tunnels");
    tunnels.iter().filter_map(|tunnel| tunnel["name"].as_str().map(str::to_owned)).collect()
}

/// Sends one request to the status socket of a pod's instance.
fn http(node: &Node, pod: &str, path: &str) -> String {
    let mut stream = UnixStream::connect(node.status_socket(pod)).expect("a status socket");
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: pod\r\n\r\n").as_bytes()).expect("ask");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}

/// Whether a TCP connection attempt gets any answer, even a refusal.
fn connects(cluster: &Cluster, from: &str, to: &str) -> bool {
    let (namespace, to) = (cluster.world.namespace_of(from), to.parse().expect("an address"));
    let attempt = thread::spawn(move || {
        world::enter(&namespace);
        std::net::TcpStream::connect_timeout(&to, Duration::from_secs(1))
    });
    match attempt.join().expect("the attempt ends") {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionRefused,
    }
}

/// Like [`world::World::pings`]; 0 also if the kernel has no route.
fn pings(cluster: &Cluster, from: &str, to: &str, count: u32, interval: &str) -> u32 {
    let unreachable = cluster.world.exec(from, &["ping", "-n", "-c", "1", "-W", "1", to]);
    if unreachable.stdout.is_empty() { 0 } else { cluster.world.pings(from, to, count, interval) }
}

fn eventually(within: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + within;
    while !holds() {
        assert!(Instant::now() < until, "not within {within:?}: {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

fn kill(pid: u64) {
    signal(pid, Signal::SIGKILL);
}

fn signal(pid: u64, signal: Signal) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a process id"));
    nix::sys::signal::kill(pid, signal).expect("the process is there");
}
