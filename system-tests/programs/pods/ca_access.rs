//! How pods reach the CA: what can never work fails at once, a replaced token costs nothing, and lighthouses are
//! followed.

use crate::world;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use world::cluster::{Cluster, LIGHTHOUSE, Node, binary};
use world::run;

const SOON: Duration = Duration::from_secs(10);

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn what_cannot_pass_fails_add_at_once_and_says_what_to_do() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    cluster.world.namespace("web");
    let other = cluster.world.dir().join("other-ca").display().to_string();
    run(
        &binary("nebula-ca").display().to_string(),
        &["init", "--dir", &other, "--tls-name", "x", "--overlay", "10.42.0.0/16"],
    );
    let file = |name: &str, text: &str| Value::from(cluster.world.write(name, text).display().to_string());
    let [empty, no_token] =
        [file("empty", "\n"), file("no.token", "nebnode_0000000000000000000000000000000000000000000")];
    for (key, value, code, expected) in [
        ("serverName", "other.example".into(), 116, "is not for other.example: set ca.serverName"),
        ("tlsCaFile", format!("{other}/tls.crt").into(), 116, "copy the present tls.crt of the CA there"),
        ("tlsCaFile", empty.clone(), 116, "there is no certificate in it; copy tls.crt of the CA there"),
        ("tlsCaFile", "/nonexistent/tls.crt".into(), 116, "put the file there, or correct its path"),
        ("tokenFile", "/nonexistent/token".into(), 116, "put the file there, or correct its path"),
        ("tokenFile", empty, 116, "must hold the node's token"),
        ("tokenFile", no_token, 102, "token"),
        ("url", "https://".into(), 7, "https://HOST:PORT"),
    ] {
        let mut node = Node {
            conf: node.conf.clone(),
            name: node.name.clone(),
            network: node.network.clone(),
            dir: node.dir.clone(),
            bus: None,
        };
        node.conf["plugins"][1]["ca"][key] = value;
        let began = Instant::now();
        let output = node.chain(&cluster.world, "add", "web");
        let took = began.elapsed();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!output.status.success(), "{key}: {said}");
        let error: Value = serde_json::from_str(&said).expect("an error object");
        println!("ca.{key}: {took:.2?}: {error}");
        assert_eq!(error["code"], code, "{error}");
        assert!(said.contains(expected), "{key} has no {expected:?}: {said}");
        assert!(took < Duration::from_secs(2), "{key}: {took:?}");
        node.chain_ok(&cluster.world, "del", "web");
        assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
    }
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn the_certificate_of_the_ca_may_be_for_a_name_that_no_node_can_resolve() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    let dir = cluster.ca_file("");
    run(&binary("nebula-ca").display().to_string(), &["tls", "add-name", "--dir", &dir, "nebula-ca.nebula-system.svc"]);
    cluster.world.stop("control", Signal::SIGTERM);
    cluster.start_ca();
    node.conf["plugins"][1]["ca"]["serverName"] = "nebula-ca.nebula-system.svc".into();
    node.add_pods(&mut cluster.world, &["web"]);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    node.delete_pods(&cluster.world, &["web"]);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_token_that_is_replaced_costs_nothing() {
    let mut cluster = Cluster::new();
    cluster.set_policy(&[("life", json!("15s"))]);
    let mut node = cluster.node("n1", "1.0.0");
    // As the node agent does it: a file that is replaced by rename, beside a certificate that anybody may read.
    let folder = cluster.world.dir().join("agent");
    std::fs::create_dir(&folder).expect("a folder");
    let put = |name: &str, text: &[u8]| {
        let beside = folder.join(format!(".{name}"));
        std::fs::write(&beside, text).expect("write");
        std::fs::rename(&beside, folder.join(name)).expect("rename");
        Value::from(folder.join(name).display().to_string())
    };
    let (token, roots) = (std::fs::read(cluster.ca_file("node.token")), std::fs::read(cluster.ca_file("tls.crt")));
    let (token, roots) = (token.expect("a token"), roots.expect("a certificate"));
    node.conf["plugins"][1]["ca"]["tokenFile"] = put("token", &token);
    node.conf["plugins"][1]["ca"]["tlsCaFile"] = put("tls.crt", &roots);
    node.add_pods(&mut cluster.world, &["web"]);
    let before = node.status("web");
    // The token that the instance holds is gone, and the next one is refused.
    put("token", b"nebnode_0000000000000000000000000000000000000000000");
    put("tls.crt", &roots);
    let fingerprints = |status: &Value| status["certificate"]["fingerprint"].clone();
    let (began, mut seen) = (Instant::now(), vec![fingerprints(&before)]);
    while seen.len() < 3 {
        assert!(began.elapsed() < Duration::from_secs(60), "it is not renewed\n{}", node.instance_logs());
        std::thread::sleep(Duration::from_millis(200));
        let status = node.status("web");
        assert_eq!((&status["pid"], &status["state"]), (&before["pid"], &json!("running")));
        if seen.last() != Some(&fingerprints(&status)) {
            seen.push(fingerprints(&status));
        }
    }
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    node.delete_pods(&cluster.world, &["web"]);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_pod_follows_the_lighthouses_that_the_ca_announces_and_keeps_its_tunnels() {
    let mut cluster = Cluster::new();
    let host = cluster.ca_url().trim_start_matches("https://").replace(":8443", "");
    let announce = |cluster: &mut Cluster, port: u16| {
        let endpoint = format!("{host}:{port}");
        cluster.change_policy(|policy| policy["hosts"] = json!({"lighthouses": {LIGHTHOUSE: [endpoint]}}));
    };
    announce(&mut cluster, 4242);
    let nodes = ["n1", "n2"].map(|name| {
        let mut node = cluster.node(name, "1.0.0");
        let nebula = node.conf["plugins"][1]["nebula"].as_object_mut().expect("a map");
        nebula.remove("static_host_map");
        nebula.remove("lighthouse");
        node
    });
    nodes[0].add_pods(&mut cluster.world, &["web"]);
    nodes[1].add_pods(&mut cluster.world, &["db", "late"]);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    // Found through the lighthouse.
    cluster.world.ping("web", &nodes[1].overlay("db"), SOON);
    let tunnel = |peer: &str| {
        let tunnels = nodes[0].status("web")["tunnels"].clone();
        let of = |tunnel: &&Value| tunnel.to_string().contains(&format!("\"{peer}\""));
        tunnels.as_array().and_then(|tunnels| tunnels.iter().find(of).cloned()).unwrap_or_default()
    };
    let (db, before) = (nodes[1].overlay("db"), nodes[0].status("web"));
    let to_db = tunnel(&db);
    assert!(!to_db.is_null(), "{before}");

    cluster.move_lighthouse(4299);
    announce(&mut cluster, 4299);
    let began = Instant::now();
    while !tunnel(LIGHTHOUSE).to_string().contains(":4299") {
        assert!(began.elapsed() < Duration::from_secs(30), "{}\n{}", nodes[0].status("web"), nodes[0].instance_logs());
        // The restarted CA is asked again after a moment; packets make the pod look for the lighthouse.
        cluster.world.pings("web", LIGHTHOUSE, 1, "0.2");
    }
    println!("the lighthouse was found at its new place after {:.1?}", began.elapsed());
    assert_eq!(nodes[0].status("web")["pid"], before["pid"], "without a restart");
    assert_eq!(tunnel(&db)["handshake_ms"], to_db["handshake_ms"], "the tunnel to the other pod is the same");
    cluster.world.ping("web", &nodes[1].overlay("late"), Duration::from_secs(30));
    nodes[0].delete_pods(&cluster.world, &["web"]);
    nodes[1].delete_pods(&cluster.world, &["db", "late"]);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn del_leaves_a_note_for_the_agent_that_the_next_add_of_the_pod_takes_back() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    let note = node.records().join("released/uid-web.json");
    node.add_pods(&mut cluster.world, &["web"]);
    // By this directory the agent says that it reads notes.
    std::fs::create_dir(note.parent().expect("a directory")).expect("a directory");
    assert!(!note.exists());
    // DEL does not need the CA.
    cluster.world.stop("control", Signal::SIGTERM);
    let began = Instant::now();
    node.chain_ok(&cluster.world, "del", "web");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    let released: Value = serde_json::from_slice(&std::fs::read(&note).expect("a note")).expect("JSON");
    assert_eq!(released, json!({"name": "web", "namespace": "shop", "uid": "uid-web", "address": "10.244.1.2"}));
    // With the node's token this is what the CA asks for.
    cluster.start_ca();
    let token = std::fs::read_to_string(cluster.ca_file("node.token")).expect("a token");
    let proof = json!({"proof": {"type": "node", "token": token.trim(), "pod": released}});
    let url = format!("{}/v1/release", cluster.ca_url());
    let body = proof.to_string();
    let answer = cluster.world.exec(
        "n1",
        &[
            "curl",
            "-sS",
            "--cacert",
            &cluster.ca_file("tls.crt"),
            "-H",
            "content-type: application/json",
            "-d",
            &body,
            &url,
        ],
    );
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap_or_else(|_| panic!("{answer:?}"));
    assert_eq!(answer["fingerprints"].as_array().map(Vec::len), Some(1), "{answer}");
    node.chain_ok(&cluster.world, "add", "web");
    assert!(!note.exists(), "the pod is back");
    node.delete_pods(&cluster.world, &["web"]);
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}
