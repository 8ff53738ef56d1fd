//! The flow with an init container: real plugin, instance, init, CA and lighthouse; kubelet and API server are fake.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use world::cluster::{Cluster, LIGHTHOUSE, Node, answer_at, binary};

const SOON: Duration = Duration::from_secs(15);

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_pod_gets_its_certificate_with_its_own_token_through_its_init_container() {
    let (mut cluster, node) = cluster(&[("web", "10.244.1.2")]);
    cluster.world.namespace("web");
    let began = Instant::now();
    node.chain_ok(&cluster.world, "add", "web");
    assert!(began.elapsed() < Duration::from_secs(10), "ADD waited for the init container");
    let status = node.status("web");
    assert_eq!((&status["state"], &status["certificate"]), (&json!("waiting"), &Value::Null));

    let out = node.dir.join("mount");
    let init = run(&cluster, &node, "web", "30");
    assert!(init.status.success(), "{}\n{}", String::from_utf8_lossy(&init.stderr), node.instance_logs());
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    let mut files: Vec<String> =
        std::fs::read_dir(&out).expect("the mount").map(|entry| name(&entry.expect("a file").path())).collect();
    files.sort();
    assert_eq!(files, ["ca.crt", "host.crt"], "the private key stays with the instance");
    for file in &files {
        let mode = std::fs::metadata(out.join(file)).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o640, "{file}");
    }
    assert_eq!(node.status("web")["certificate"]["name"], "web.shop.pod");

    // The init container has ended: from here on the certificate itself is the proof.
    let first = node.status("web")["certificate"]["fingerprint"].clone();
    let until = Instant::now() + Duration::from_secs(40);
    while node.status("web")["certificate"]["fingerprint"] == first {
        assert!(Instant::now() < until, "not renewed\n{}", node.instance_logs());
        thread::sleep(Duration::from_millis(200));
    }
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    assert_eq!(node.capabilities("web"), Vec::<String>::new());
    node.chain_ok(&cluster.world, "del", "web");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn init_ends_with_the_reason_when_the_ca_refuses_and_the_overlay_stays_closed() {
    let (mut cluster, node) = cluster(&[]);
    node.add_pods(&mut cluster.world, &["web"]);
    let init = run(&cluster, &node, "web", "4");
    assert!(!init.status.success());
    let said = String::from_utf8_lossy(&init.stderr).into_owned();
    assert!(said.contains("no certificate within 4 s: ") && said.contains("shop/web"), "{said}");
    assert_eq!(node.status("web")["state"], "waiting");
    let route = cluster.world.exec("web", &["ip", "route", "get", LIGHTHOUSE]);
    let route = String::from_utf8_lossy(&route.stdout).into_owned();
    assert!(route.contains("dev nebula0"), "packets for the overlay leave in clear: {route}");
    assert!(!node.dir.join("mount/host.crt").exists());
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_provisional_certificate_opens_the_overlay_until_the_pod_has_shown_its_own_token() {
    let (mut cluster, mut node) = cluster_with(&[("web", "10.244.1.2")], |policy| {
        policy["kubernetes"]["node_account"] = "shop/app".into();
        policy["pods"]["provisional"] = json!({});
        policy["pods"]["life"] = "1h".into();
    });
    node.conf["plugins"][1]["provisional"] = true.into();
    let agent = cluster.world.write("agent.token", "token-of-web");
    node.conf["plugins"][1]["ca"]["tokenFile"] = agent.display().to_string().into();
    node.add_pods(&mut cluster.world, &["web"]);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    let before = node.status("web");
    assert_eq!((&before["state"], &before["groups"]), (&json!("provisional"), &json!(["provisional"])));

    let init = run(&cluster, &node, "web", "30");
    assert!(init.status.success(), "{}\n{}", String::from_utf8_lossy(&init.stderr), node.instance_logs());
    let after = node.status("web");
    assert_eq!((&after["state"], &after["groups"]), (&json!("running"), &json!(["ns:shop"])));
    assert_eq!(after["overlay"], before["overlay"]);
    assert_ne!(after["certificate"]["fingerprint"], before["certificate"]["fingerprint"]);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    assert_eq!(written(&node), after["certificate"]["fingerprint"]);
    node.chain_ok(&cluster.world, "del", "web");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn another_program_of_the_pod_gets_no_token_and_gives_no_certificate_before_during_and_after_the_handover() {
    let (mut cluster, node) = cluster(&[("web", "10.244.1.2")]);
    node.add_pods(&mut cluster.world, &["web"]);
    // Another user in the pod, and root with the usual capabilities of containers; each keeps trying during the
    // hand-off.
    let users = [&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"][..], CONTAINER_ROOT];
    let attackers: Vec<_> = users.into_iter().map(|rights| attacker(&cluster, rights)).collect();
    thread::sleep(Duration::from_secs(2));
    let init = run(&cluster, &node, "web", "60");
    let said = String::from_utf8_lossy(&init.stderr).into_owned();
    assert!(init.status.success(), "{said}\n{}", node.instance_logs());
    let fingerprint = node.status("web")["certificate"]["fingerprint"].clone();
    assert_eq!(written(&node), fingerprint);
    thread::sleep(Duration::from_secs(1));
    for attacker in attackers {
        let output = attacker.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.trim() == "[]", "{said}{}", String::from_utf8_lossy(&output.stderr));
    }
    // It may run again, as a kubelet does after a crash.
    assert!(run(&cluster, &node, "web", "30").status.success());
    assert_eq!(written(&node), fingerprint);
    node.chain_ok(&cluster.world, "del", "web");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn whoever_takes_the_name_of_an_instance_that_died_gets_no_token_unless_it_is_root() {
    let (mut cluster, node) = cluster(&[("web", "10.244.1.2")]);
    node.add_pods(&mut cluster.world, &["web"]);
    kill(&node);
    let attacker = attacker(&cluster, &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    thread::sleep(Duration::from_secs(2));
    let init = run(&cluster, &node, "web", "4");
    let said = String::from_utf8_lossy(&init.stderr).into_owned();
    assert!(!init.status.success() && said.contains("held by user 65534"), "{said}");
    let output = attacker.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), r#"["name taken"]"#);
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn an_instance_that_was_restarted_is_shown_the_token_of_its_pod_by_the_node() {
    let (mut cluster, node) = cluster(&[("web", "10.244.1.2")]);
    node.add_pods(&mut cluster.world, &["web"]);
    assert!(run(&cluster, &node, "web", "30").status.success());
    let first = node.status("web")["certificate"]["fingerprint"].clone();
    kill(&node);
    // A program of the pod that takes the name meanwhile gets nothing.
    let attacker = attacker(&cluster, CONTAINER_ROOT);
    thread::sleep(Duration::from_secs(1));
    let kubelet = cluster.world.dir().join("kubelet");
    keep_token(&kubelet, "uid-web", "nebula-ca");
    let said = present(&cluster, &node, &kubelet).expect_err("there is no instance");
    assert!(said.contains("cannot reach its instance"), "{said}");
    let output = attacker.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), r#"["name taken"]"#);

    let plugin = binary("nebula-cni-plugin").display().to_string();
    let state = node.dir.join("state").display().to_string();
    assert!(cluster.world.exec("n1", &[&plugin, "reconcile", &state]).status.success(), "{}", node.instance_logs());
    let until = Instant::now() + SOON;
    while answer_at(&node.status_socket("web")).is_err() {
        assert!(Instant::now() < until, "not restarted\n{}", node.instance_logs());
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(node.status("web")["state"], "waiting");
    let empty = cluster.world.dir().join("empty");
    let said = present(&cluster, &node, &empty).expect_err("no token");
    assert!(said.contains("shop/web") && said.contains("nebula-ca") && said.contains("delete the pod"), "{said}");
    keep_token(&empty, "uid-web", "https://kubernetes.default.svc");
    assert!(present(&cluster, &node, &empty).is_err(), "a token for the API server is not for the CA");
    assert_eq!(node.status("web")["state"], "waiting");

    present(&cluster, &node, &kubelet).expect("a certificate");
    let after = node.status("web");
    assert_eq!((&after["state"], &after["groups"]), (&json!("running"), &json!(["ns:shop"])));
    assert_ne!(after["certificate"]["fingerprint"], first);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    node.chain_ok(&cluster.world, "del", "web");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

/// Kills the instance of the pod `web`.
fn kill(node: &Node) {
    let pid = i32::try_from(node.status("web")["pid"].as_u64().expect("a process id")).expect("a process id");
    let pid = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it is there");
}

/// Leaves a token of the pod `web` where a kubelet keeps it.
fn keep_token(kubelet: &Path, uid: &str, audience: &str) {
    let volume = kubelet.join("pods/uid-web/volumes/kubernetes.io~projected/nebula-token");
    std::fs::create_dir_all(&volume).expect("a volume");
    let claims = json!({"aud": [audience], "kubernetes.io": {"pod": {"uid": uid}}}).to_string();
    let token = format!("e30.{}.token-of-web", BASE64_URL_SAFE_NO_PAD.encode(claims));
    std::fs::write(volume.join("token"), token).expect("a token");
}

/// Shows the instance of the pod `web` its token.
fn present(cluster: &Cluster, node: &Node, kubelet: &Path) -> Result<(), String> {
    let plugin = binary("nebula-cni-plugin").display().to_string();
    let launch = node.launch("web").expect("a launch contract");
    let word = |key: &str| launch[key].as_str().unwrap_or_default().to_owned();
    let state = node.dir.join("state").display().to_string();
    let (network, container, kubelet) = (word("network"), word("container_id"), kubelet.display().to_string());
    let words = [&plugin, "present", &state, &network, &container, &word("ifname"), &kubelet];
    let output = cluster.world.exec("n1", &words);
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stdout).into_owned()) }
}

const CONTAINER_ROOT: &[&str] =
    &["setpriv", "--bounding-set=-all,+net_raw,+dac_override,+setuid,+setgid,+net_bind_service", "--inh-caps=-all"];

/// Fingerprint of the certificate that init wrote.
pub(super) fn written(node: &Node) -> String {
    let pem = std::fs::read(node.dir.join("mount/host.crt")).expect("a certificate");
    nebula_cert::Certificate::from_pem(&pem).expect("a certificate").fingerprint().to_string()
}

/// Runs `init_attacker.py` in the pod `web` for some seconds.
fn attacker(cluster: &Cluster, rights: &[&str]) -> std::process::Child {
    // In a place where every user may read it.
    let program = cluster.world.write("init_attacker.py", include_str!("../world/init_attacker.py"));
    std::process::Command::new("ip")
        .args(["netns", "exec", &cluster.world.namespace_of("web")])
        .args(rights)
        .args(["/usr/bin/python3", &program.display().to_string(), "8"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("python3 runs")
}

/// Runs the first init container as a kubelet does: in the pod's network namespace, with its token mounted.
pub(super) fn run(cluster: &Cluster, node: &Node, pod: &str, deadline: &str) -> Output {
    let token = cluster.world.write(&format!("{pod}.token"), &format!("token-of-{pod}"));
    let (init, token) = (binary("nebula-cni-init").display().to_string(), token.display().to_string());
    let out = node.dir.join("mount").display().to_string();
    cluster.world.exec(pod, &[&init, "-token-file", &token, "-out-dir", &out, "-deadline", deadline])
}

/// A cluster whose CA queries an API server that knows these pods, and a node with the flow `init`.
pub(super) fn cluster(pods: &[(&str, &str)]) -> (Cluster, Node) {
    cluster_with(pods, |_| ())
}

/// Like [`cluster`], with changes to the policy.
fn cluster_with(pods: &[(&str, &str)], change: impl FnOnce(&mut Value)) -> (Cluster, Node) {
    let mut cluster = Cluster::new();
    let pods = pods.iter().map(|(name, address)| ((*name).to_owned(), (*address).to_owned())).collect();
    fake_api_server(cluster.world.namespace_of("control"), pods);
    let kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{name: c, cluster: {server: 'http://127.0.0.1:6443'}}]\n\
         contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {token: ca-token}}]\n";
    let kubeconfig = cluster.world.write("kubeconfig", kubeconfig);
    cluster.change_policy(|policy| {
        policy["kubernetes"] = json!({ "node_account": "nebula-system/nebula-cni", "kubeconfig": kubeconfig });
        policy["pods"]["life"] = "24s".into();
        change(policy);
    });
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["flow"] = "init".into();
    node.conf["plugins"][1]["overlay"] = json!(["10.42.0.0/16"]);
    (cluster, node)
}

/// Confirms `token-of-NAME` for every pod NAME in namespace shop; knows only the given pods.
fn fake_api_server(namespace: String, pods: Vec<(String, String)>) {
    let (ready, listening) = std::sync::mpsc::channel();
    thread::spawn(move || {
        world::enter(&namespace);
        let listener = TcpListener::bind("127.0.0.1:6443").expect("listen");
        ready.send(()).expect("the test waits");
        for stream in listener.incoming().map_while(Result::ok) {
            let pods = pods.clone();
            // How a single connection ends is not part of the test.
            thread::spawn(move || drop(serve(stream, &pods)));
        }
    });
    listening.recv().expect("the fake API server listens");
}

fn serve(stream: TcpStream, pods: &[(String, String)]) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let mut length = 0;
        loop {
            let mut header = String::new();
            stream.read_line(&mut header)?;
            let Some((key, value)) = header.trim().split_once(": ") else { break };
            if key.eq_ignore_ascii_case("content-length") {
                length = value.parse().expect("a length");
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        let (status, answer) = answer(line.split(' ').nth(1).unwrap_or_default(), &body, pods);
        let answer = answer.to_string();
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            answer.len()
        );
        stream.get_mut().write_all(format!("{head}{answer}").as_bytes())?;
    }
}

fn answer(path: &str, body: &[u8], pods: &[(String, String)]) -> (u16, Value) {
    let pod = |(name, address): &(String, String)| {
        json!({"metadata": {"name": name, "namespace": "shop", "uid": format!("uid-{name}")},
               "spec": {"nodeName": "n1", "serviceAccountName": "app"},
               "status": {"phase": "Pending", "podIP": address, "podIPs": [{"ip": address}]}})
    };
    if path.ends_with("/tokenreviews") {
        let review: Value = serde_json::from_slice(body).expect("a review");
        let name =
            review["spec"]["token"].as_str().and_then(|token| token.rsplit('.').next()?.strip_prefix("token-of-"));
        let status = name.map_or(json!({"authenticated": false}), |name| {
            let extra = json!({"authentication.kubernetes.io/pod-name": [name],
                               "authentication.kubernetes.io/pod-uid": [format!("uid-{name}")]});
            json!({"authenticated": true, "audiences": review["spec"]["audiences"],
                   "user": {"username": "system:serviceaccount:shop:app", "uid": "u", "extra": extra}})
        });
        return (201, json!({"status": status}));
    }
    if path.starts_with("/api/v1/pods") {
        let items: Vec<Value> = pods.iter().map(pod).collect();
        return (200, json!({"metadata": {"resourceVersion": "1"}, "items": items}));
    }
    // Watches end at once, and are asked for again: what there is does not change.
    if path.starts_with("/api/v1/nodes") {
        let node = json!({"metadata": {"name": "n1"}, "spec": {}, "status": {"addresses": []}});
        return (200, json!({"metadata": {"resourceVersion": "1"}, "items": [node]}));
    }
    let found = pods.iter().find(|(name, _)| path == format!("/api/v1/namespaces/shop/pods/{name}"));
    found.map_or((404, json!({"kind": "Status", "status": "Failure", "code": 404})), |found| (200, pod(found)))
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
