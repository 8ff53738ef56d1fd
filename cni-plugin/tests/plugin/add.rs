//! ADD: what it sets up, what it passes on, and that a failed ADD is undone.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use nebula_cni_contract::launch::{LaunchSpec, Mode};
use nebula_cni_plugin::attachment::record::State;
use serde_json::{Value, json};

use crate::fake_instance::refused;
use crate::harness::{Node, PLUGIN, PREV, eventually, spawn, wait};

fn no_residue(node: &Node) {
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
fn add_starts_one_recorded_instance_and_passes_the_result_on() {
    let node = Node::with_nebula(json!({"static_host_map": {"10.42.0.1": ["192.0.2.1:4242"]}}));
    assert_eq!(node.call("ADD").expect_ok(), PREV);
    let record = node.record().unwrap();
    assert_eq!(record.state, State::Running);
    assert_eq!(record.target.pod.uid, "u1");
    assert!(record.process.unwrap().is_alive());
    let launch = node.files().launch();
    let spec: LaunchSpec = serde_json::from_slice(&fs::read(&launch).unwrap()).unwrap();
    assert_eq!((spec.target.pod.namespace.as_str(), spec.target.pod.name.as_str()), ("shop", "web-0"));
    assert_eq!(spec.target.pod_address.to_string(), "10.4.0.7");
    assert_eq!((spec.mode, spec.target.device.as_str(), spec.port_range), (Mode::Strict, "nebula0", (61000, 65535)));
    assert_eq!(spec.nebula["static_host_map"]["10.42.0.1"][0], "192.0.2.1:4242");
    for path in [launch, node.files().record(), node.files().log()] {
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{}", path.display());
    }
    assert!(!node.files().notify_socket().exists());
    node.call("DEL").expect_ok();
    no_residue(&node);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures a process")]
fn stdout_and_stderr_end_with_the_plugin_while_the_instance_runs() {
    let node = Node::new();
    let mut child = node.spawn("ADD");
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    assert!(child.wait().unwrap().success());
    let ended = Instant::now();
    std::io::copy(&mut stdout, &mut std::io::sink()).unwrap();
    std::io::copy(&mut stderr, &mut std::io::sink()).unwrap();
    assert!(ended.elapsed() < Duration::from_secs(1));
    assert!(node.process().is_alive());
    node.call("DEL").expect_ok();
}

#[test]
fn the_instance_inherits_nothing_of_the_runtime() {
    let mut node = Node::new();
    let report = node.root().join("report");
    node.entry["nebula"] = json!({ "fakeReport": report });
    let leaked = node.root().join("leaked-by-the-runtime");
    fs::write(&leaked, "").unwrap();
    let mut runtime = Command::new("sh");
    runtime.args(["-c", "exec 7>\"$LEAK\"; cd /tmp; exec \"$PLUGIN\""]);
    runtime.envs(&node.env).envs([("CNI_COMMAND", "ADD"), ("PLUGIN", PLUGIN), ("SECRET", "x")]).env("LEAK", &leaked);
    wait(spawn(&mut runtime, node.stdin().as_bytes())).expect_ok();
    let report: Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert_eq!(report["session"], report["pid"], "leads its own session");
    assert_eq!(report["pid"], node.process().pid);
    assert_eq!(report["cwd"], "/");
    let has =
        |list: &str, text: &str| report[list].as_array().unwrap().iter().any(|v| v.as_str().unwrap().contains(text));
    assert!(!has("files", "leaked-by-the-runtime"), "{report}");
    assert!(has("files", "-eth0.log"), "stderr goes to the log: {report}");
    assert!(!has("environment", "SECRET") && !has("environment", "CNI_"), "{report}");
    assert!(has("environment", "NOTIFY_SOCKET"));
    node.call("DEL").expect_ok();
}

#[test]
fn a_failed_start_is_explained_and_undone() {
    let unavailable = json!({"start_error": "unavailable", "cause": "connection refused"});
    let failed = json!({"start_error": "failed", "what": "tun", "cause": "no such device"});
    for (nebula, code, expected) in [
        (json!({"fake": "exit", "fakeStartError": refused("pod not bound")}), 102, "pod not bound (wrong_node)"),
        (json!({"fake": "exit", "fakeStartError": unavailable}), 103, "connection refused"),
        (json!({"fake": "exit", "fakeStartError": failed}), 105, "tun: no such device"),
        // Sent by an instance of another release.
        (json!({"fake": "exit", "fakeStatus": "ca-denied: pod not bound"}), 105, "ca-denied: pod not bound"),
        (json!({"fake": "exit", "fakeStartError": {"start_error": "of_next_year"}}), 105, "of_next_year"),
        (json!({"fake": "exit", "fakeStatus": "tun: permission denied"}), 105, "tun: permission denied"),
        (json!({"fake": "exit", "fakeStderr": "config: no such key"}), 105, "config: no such key"),
        (json!({"fake": "exit"}), 105, ""),
    ] {
        let node = Node::with_nebula(nebula.clone());
        let error = node.call("ADD").error();
        assert_eq!(error["code"], code, "{nebula}: {error}");
        assert!(error["msg"].as_str().unwrap().contains("pod shop/web-0"), "{error}");
        assert!(error["details"].as_str().unwrap_or_default().contains(expected), "{error}");
        no_residue(&node);
        node.call("DEL").expect_ok();
    }
}

/// A node whose CA refuses the token that is there, and takes any other one.
fn whose_agent_is_away() -> (Node, PathBuf) {
    let mut node = Node::with_nebula(json!({"fakeStaleToken": "of the last agent"}));
    let token = node.root().join("token");
    fs::write(&token, "of the last agent").unwrap();
    node.entry["ca"]["tokenFile"] = json!(token);
    (node, token)
}

#[test]
fn while_the_agent_is_replaced_add_waits_for_the_next_token() {
    let (node, token) = whose_agent_is_away();
    let add = node.spawn("ADD");
    eventually("an instance was refused", || token.with_extension("refused").exists());
    let next = token.with_extension("next");
    fs::write(&next, "of the next agent").unwrap();
    fs::rename(next, token).unwrap();
    wait(add).expect_ok();
    assert!(node.answers());
    node.call("DEL").expect_ok();
    no_residue(&node);
}

#[test]
fn without_another_token_add_says_that_the_agent_is_gone() {
    let (mut node, _) = whose_agent_is_away();
    node.entry["timeoutSeconds"] = json!(4);
    let error = node.call("ADD").error();
    assert_eq!(error["code"], 119, "{error}");
    assert!(error["msg"].as_str().unwrap().contains("the node agent that wrote it has ended"), "{error}");
    assert!(error["details"].as_str().unwrap().starts_with("it is gone (token_rejected)"), "{error}");
    no_residue(&node);
}

#[test]
fn what_the_instance_says_twice_is_shown_once() {
    let stderr = "instance: ca-denied: pod not bound (wrong_node)";
    let node =
        Node::with_nebula(json!({"fake": "exit", "fakeStartError": refused("pod not bound"), "fakeStderr": stderr}));
    assert_eq!(node.call("ADD").error()["details"], "pod not bound (wrong_node)");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures a process")]
fn an_instance_that_is_not_ready_in_time_fails_add_at_the_deadline() {
    let mut node = Node::with_nebula(json!({"fake": "hang", "fakeStatus": "asking the CA"}));
    node.entry["timeoutSeconds"] = json!(1);
    let start = Instant::now();
    let error = node.call("ADD").error();
    assert!((Duration::from_secs(1)..Duration::from_secs(4)).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert_eq!(error["code"], 107, "{error}");
    assert!(error["details"].as_str().unwrap().contains("asking the CA"), "{error}");
    no_residue(&node);
}

#[test]
fn an_instance_that_cannot_be_executed_fails_add() {
    let mut node = Node::new();
    let broken = node.root().join("broken");
    fs::write(&broken, "#!/nonexistent/interpreter\n").unwrap();
    fs::set_permissions(&broken, fs::Permissions::from_mode(0o755)).unwrap();
    node.entry["instance"] = json!(broken);
    let error = node.call("ADD").error();
    assert_eq!(error["code"], 105, "{error}");
    assert!(error["details"].as_str().unwrap().contains("broken"), "{error}");
    no_residue(&node);
}

#[test]
fn a_result_nobody_receives_is_undone() {
    let node = Node::new();
    let mut command = node.command("ADD");
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    command.stdin(std::process::Stdio::piped()).stdout(full).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), node.stdin().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot print the result"));
    no_residue(&node);
}

#[test]
fn a_pod_that_is_not_ours_is_passed_through_untouched() {
    let mut node = Node::new();
    node.entry["enrol"] = json!({"exceptNamespaces": ["shop"]});
    assert_eq!(node.call("ADD").expect_ok(), PREV);
    no_residue(&node);
    node.call("CHECK").expect_ok();
    node.call("DEL").expect_ok();
}

#[test]
fn a_repeated_add_finds_its_work_done() {
    let node = Node::new();
    node.call("ADD").expect_ok();
    let first = node.process();
    assert_eq!(node.call("ADD").expect_ok(), PREV);
    assert_eq!(node.process(), first);
    node.call("DEL").expect_ok();
}

#[test]
fn a_repeated_add_replaces_what_is_stale() {
    let mut node = Node::new();
    node.call("ADD").expect_ok();
    let first = node.process();
    first.stop(&nebula_cni_contract::clock::SystemClock).unwrap();
    node.call("ADD").expect_ok();
    let second = node.process();
    assert!(second.is_alive());
    node.set("CNI_NETNS", "/proc/self/ns/ipc");
    node.call("ADD").expect_ok();
    assert!(!second.is_alive() && node.process().is_alive());
    node.call("DEL").expect_ok();
    no_residue(&node);
}

#[test]
fn a_new_sandbox_of_a_pod_fences_the_old_one() {
    let mut node = Node::new();
    node.call("ADD").expect_ok();
    let (first, first_id) = (node.process(), node.id().to_owned());
    let second_id = format!("{first_id}-again");
    node.set("CNI_CONTAINERID", &second_id);
    node.call("ADD").expect_ok();
    assert!(!first.is_alive() && node.process().is_alive());
    let second = node.process();
    node.set("CNI_CONTAINERID", &first_id);
    assert!(node.record().is_none());
    node.call("DEL").expect_ok();
    assert!(second.is_alive(), "the late DEL of the old sandbox does not touch the new one");
    node.set("CNI_CONTAINERID", &second_id);
    node.call("DEL").expect_ok();
    no_residue(&node);
}

#[test]
fn attachments_of_different_pods_do_not_disturb_each_other() {
    let shared = Node::new();
    let nodes: Vec<Node> = (0..8)
        .map(|i| {
            let mut node = Node::new();
            node.entry["stateDir"] = shared.entry["stateDir"].clone();
            node.set("CNI_ARGS", &format!("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-{i};K8S_POD_UID=u{i}"));
            node
        })
        .collect();
    let children: Vec<_> = nodes.iter().map(|node| node.spawn("ADD")).collect();
    children.into_iter().for_each(|child| assert_eq!(wait(child).expect_ok(), PREV));
    assert!(nodes.iter().all(|node| node.process().is_alive()));
    let children: Vec<_> = nodes.iter().map(|node| node.spawn("DEL")).collect();
    children.into_iter().for_each(|child| assert_eq!(wait(child).expect_ok(), ""));
    nodes.iter().for_each(no_residue);
}
