//! A runtime that times out may kill the plugin at any instruction, and DEL must still leave nothing behind. Only
//! system calls have outside effects, so one run is killed at each of them.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command};

use nebula_cni_contract::clock::SystemClock;

use crate::harness::{Node, PLUGIN, eventually, spawn, wait};

/// The calls to kill at; those for memory and time have no effect outside the process.
const STEPS: &str = "%file,%desc,%network,%process";

/// The `nth` system call of this name.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) call: String,
    pub(crate) nth: usize,
}

/// Records the steps of a verb, in order, in a run that is not killed.
fn steps(node: &Node, verb: &str) -> Vec<Step> {
    let trace = node.root().join("trace");
    let child = traced(node, verb, &["-o", trace.to_str().unwrap()]);
    wait(child).expect_ok();
    steps_in(&fs::read_to_string(trace).unwrap())
}

/// The steps in what strace wrote.
pub(crate) fn steps_in(trace: &str) -> Vec<Step> {
    let lines: Vec<&str> = trace.lines().filter(|line| line.contains('(')).collect();
    // The search through all processes counts as one step, although it makes as many calls as there are processes.
    let is_look = |line: &&str| line.contains("/cmdline\"");
    let looks = lines.iter().position(is_look).unwrap_or(0)..lines.iter().rposition(is_look).unwrap_or(0);
    let mut counts = BTreeMap::new();
    let mut steps = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        // Where threads are followed, their number is in front; strace counts the calls of each.
        let words: Vec<&str> = line.split('(').next().unwrap().split_whitespace().collect();
        let call = words.last().unwrap().to_owned().to_owned();
        let nth = *counts.entry(words).and_modify(|count| *count += 1).or_insert(1);
        if !looks.contains(&at) {
            steps.push(Step { call, nth });
        }
    }
    steps
}

/// Kills the verb at a step; returns `false` if it ended before.
fn killed_at(node: &Node, verb: &str, step: &Step) -> bool {
    let inject = format!("inject={}:signal=SIGKILL:when={}", step.call, step.nth);
    let mut child = traced(node, verb, &["-o", "/dev/null", "-e", &inject]);
    // Do not wait for its pipes to close, because a waiting launcher holds them open.
    !child.wait().unwrap().success()
}

fn traced(node: &Node, verb: &str, more: &[&str]) -> Child {
    let mut command = Command::new("strace");
    command.args(["-qq", "-e", &format!("trace={STEPS}")]).args(more).arg(PLUGIN);
    command.env_clear().envs(&node.env).env("CNI_COMMAND", verb).env("PATH", std::env::var_os("PATH").unwrap());
    spawn(&mut command, node.stdin().as_bytes())
}

/// Asserts that nothing is left after DEL, once everything in progress has finished.
#[track_caller]
fn nothing_is_left(node: &mut Node, what: &str) {
    node.prev_result = None;
    node.call("DEL").expect_ok();
    // A launcher that was never released notices that its plugin died and exits.
    eventually(&format!("nothing is left: {what}"), || node.residue().is_empty());
}

#[test]
#[ignore = "needs strace and half a minute"]
fn del_leaves_nothing_of_an_add_killed_at_any_step() {
    let mut whole = Node::new();
    let steps = steps(&whole, "ADD");
    nothing_is_left(&mut whole, "a whole ADD");
    let (mut recorded, mut started) = (0, 0);
    for step in &steps {
        let mut node = Node::new();
        killed_at(&node, "ADD", step);
        recorded += usize::from(node.record().is_some());
        started += usize::from(node.record().is_some_and(|r| r.process.is_some()));
        nothing_is_left(&mut node, &format!("ADD killed at {step:?}"));
    }
    println!("ADD has {} steps; a record after {recorded} of them, a process after {started}", steps.len());
    assert!(started > 10 && recorded > started && recorded < steps.len(), "{} {recorded} {started}", steps.len());
}

#[test]
#[ignore = "needs strace and half a minute"]
fn reconcile_leaves_nothing_of_an_add_killed_at_any_step_once_the_pod_is_gone() {
    let mut whole = Node::new();
    let steps = steps(&whole, "ADD");
    nothing_is_left(&mut whole, "a whole ADD");
    // Only every third step; the test of DEL tries all of them.
    for step in steps.iter().step_by(3) {
        let mut pod = Command::new("sleep").arg("60").spawn().unwrap();
        let mut node = Node::new();
        node.set("CNI_NETNS", &format!("/proc/{}/ns/uts", pod.id()));
        killed_at(&node, "ADD", step);
        pod.kill().unwrap();
        pod.wait().unwrap();
        // A real instance notices that its pod is gone; the fake one must be stopped.
        if let Some(process) = node.record().and_then(|record| record.process) {
            process.stop(&SystemClock).unwrap();
        }
        let state_dir = node.entry["stateDir"].as_str().unwrap().to_owned();
        eventually(&format!("nothing is left of ADD killed at {step:?}"), || {
            assert!(Command::new(PLUGIN).args(["reconcile", &state_dir]).status().unwrap().success());
            node.residue().is_empty()
        });
    }
}

#[test]
#[ignore = "needs strace and half a minute"]
fn del_succeeds_after_a_del_killed_at_any_step() {
    let whole = Node::new();
    whole.call("ADD").expect_ok();
    let steps = steps(&whole, "DEL");
    assert!(steps.len() > 20, "{}", steps.len());
    for step in &steps {
        let mut node = Node::new();
        node.call("ADD").expect_ok();
        killed_at(&node, "DEL", step);
        nothing_is_left(&mut node, &format!("DEL killed at {step:?}"));
    }
}
