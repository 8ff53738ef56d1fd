//! Dead instances and leftovers of pods that are gone are repaired by the next plugin call, or by `reconcile`.

use std::fs;
use std::process::Command;

use nebula_cni_contract::clock::SystemClock;
use serde_json::json;

use crate::harness::{Node, PLUGIN, eventually};

fn reconcile(node: &Node) {
    let state_dir = node.entry["stateDir"].as_str().unwrap();
    let done = Command::new(PLUGIN).arg("reconcile").arg(state_dir).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(String::from_utf8_lossy(&done.stdout), "", "stdout is the protocol's");
}

#[test]
fn a_dead_instance_is_started_again_once() {
    let node = Node::new();
    node.call("ADD").expect_ok();
    let first = node.process();
    first.stop(&SystemClock).unwrap();
    reconcile(&node);
    let second = node.process();
    assert!(second.is_alive() && second != first);
    eventually("the instance serves", || node.answers());
    reconcile(&node);
    assert_eq!(node.process(), second, "a living one is left alone");
    node.call("DEL").expect_ok();
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
fn each_verb_of_any_pod_starts_dead_instances_of_its_network() {
    let dead = Node::new();
    dead.call("ADD").expect_ok();
    let mut other = Node::new();
    other.entry["stateDir"] = dead.entry["stateDir"].clone();
    other.entry["cniVersion"] = json!("1.1.0");
    other.set("CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=db-0;K8S_POD_UID=u2");
    for verb in ["ADD", "GC", "STATUS"] {
        dead.process().stop(&SystemClock).unwrap();
        other.call(verb).expect_ok();
        assert!(dead.process().is_alive(), "{verb}");
    }
    dead.process().stop(&SystemClock).unwrap();
    other.call("DEL").expect_ok();
    assert!(!dead.process().is_alive(), "DEL has no time for others");
    dead.call("DEL").expect_ok();
    assert_eq!(dead.residue(), Vec::<String>::new());
}

#[test]
fn an_attachment_whose_namespace_is_gone_is_forgotten() {
    let mut node = Node::new();
    let mut holder = Killed(Command::new("sleep").arg("60").spawn().unwrap());
    node.set("CNI_NETNS", &format!("/proc/{}/ns/uts", holder.0.id()));
    node.call("ADD").expect_ok();
    let instance = node.process();
    reconcile(&node);
    assert_eq!(node.process(), instance);
    instance.stop(&SystemClock).unwrap();
    holder.0.kill().unwrap();
    holder.0.wait().unwrap();
    reconcile(&node);
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
fn the_log_of_an_instance_stays_bounded() {
    let mut node = Node::new();
    let begin = node.root().join("begin");
    node.entry["nebula"] = json!({ "fakeFlood": begin });
    node.call("ADD").expect_ok();
    fs::write(&begin, "").unwrap();
    eventually("all is written", || !begin.exists());
    let log = node.files().log();
    let size = || log.metadata().unwrap().len();
    assert!(((1 << 20) - 200..=1 << 20).contains(&size()), "{}", size());
    assert!(node.process().is_alive(), "an instance outlives its full log");
    reconcile(&node);
    assert!(size() < 100 << 10, "{}", size());
    node.call("DEL").expect_ok();
}

#[test]
fn without_a_state_directory_there_is_nothing_to_do() {
    let place = tempfile::tempdir().unwrap();
    let state = place.path().join("missing/state");
    let done = Command::new(PLUGIN).arg("reconcile").arg(&state).output().unwrap();
    assert!(done.status.success());
    assert!(!place.path().join("missing").exists() && fs::read(&state).is_err());
}

struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
