//! A runtime may kill the plugin at any instruction: no address is given twice, and none is lost.

use std::collections::BTreeMap;
use std::env;

use super::node::Node;
use crate::harness::spawn;
use crate::killed::{Step, steps_in};

const STRACE: [&str; 2] = ["strace", "-qq"];

/// Kills a call at a step; returns `false` if it ended before.
fn killed_at(node: &Node, verb: &str, pod: &str, step: &Step) -> bool {
    let inject = format!("inject={}:signal=SIGKILL:when={}", step.call, step.nth);
    let before = [&STRACE[..], &["-f", "-o", "/dev/null", "-e", &inject]].concat();
    let mut child = spawn(&mut node.command(verb, pod, &before), node.stdin(verb, pod).as_bytes());
    !child.wait().unwrap().success()
}

/// The steps of a call that is not killed.
fn steps(node: &Node, verb: &str, pod: &str) -> Vec<Step> {
    let trace = tempfile::NamedTempFile::new().unwrap();
    let path = trace.path().to_str().unwrap();
    let before = [&STRACE[..], &["-f", "-e", "trace=%file,%desc,%network,%process", "-o", path]].concat();
    let mut child = spawn(&mut node.command(verb, pod, &before), node.stdin(verb, pod).as_bytes());
    assert!(child.wait().unwrap().success());
    steps_in(&std::fs::read_to_string(path).unwrap())
}

#[test]
#[ignore = "needs root, network namespaces, strace and a minute"]
fn del_leaves_nothing_of_an_add_killed_at_any_step() {
    let mut node = Node::new(&["10.22.0.0/29", "fd22::/64"]);
    node.namespace("pod");
    let steps = steps(&node, "ADD", "pod");
    node.call("DEL", "pod").expect_ok();
    let (mut leased, mut linked) = (0, 0);
    for step in &steps {
        killed_at(&node, "ADD", "pod", step);
        let left = node.left();
        leased += usize::from(left.iter().any(|line| line.starts_with("10.22.0.")));
        linked += usize::from(left.iter().any(|line| line.contains("<")));
        node.call("DEL", "pod").expect_ok();
        assert_eq!(node.left(), Vec::<String>::new(), "ADD killed at {step:?}");
    }
    println!("ADD has {} steps; a lease after {leased} of them, a link after {linked}", steps.len());
    assert!(linked > 10 && leased > linked && leased < steps.len(), "{} {leased} {linked}", steps.len());
}

#[test]
#[ignore = "needs root, network namespaces, strace and a minute"]
fn a_second_add_makes_whole_what_one_that_was_killed_began() {
    let mut node = Node::new(&["10.22.0.0/29", "fd22::/64"]);
    node.namespace("pod");
    let steps = steps(&node, "ADD", "pod");
    for step in steps.iter().step_by(3) {
        node.call("DEL", "pod").expect_ok();
        killed_at(&node, "ADD", "pod", step);
        let own = node.add("pod");
        node.call("CHECK", "pod").expect_ok();
        assert_eq!(node.leases().len(), own.len(), "{step:?}: {:?}", node.leases());
    }
    assert!(node.pings("node", &node.result("pod")["ips"][0]["address"].as_str().unwrap().replace("/32", "")));
}

#[test]
#[ignore = "needs root, network namespaces, strace and a minute"]
fn del_succeeds_after_a_del_killed_at_any_step() {
    let mut node = Node::new(&["10.22.0.0/29", "fd22::/64"]);
    node.add("pod");
    let steps = steps(&node, "DEL", "pod");
    assert!(steps.len() > 20, "{}", steps.len());
    for step in &steps {
        node.add("pod");
        killed_at(&node, "DEL", "pod", step);
        node.call("DEL", "pod").expect_ok();
        assert_eq!(node.left(), Vec::<String>::new(), "DEL killed at {step:?}");
    }
}

/// PRIMARY_CALLS says how many; PRIMARY_SEED repeats a run.
#[test]
#[ignore = "needs root, network namespaces, strace and a minute"]
fn no_address_is_twice_or_lost_among_random_kills() {
    let number = |name: &str, usual| env::var(name).map_or(usual, |text| text.parse().unwrap());
    let (calls, mut state) = (number("PRIMARY_CALLS", 300), number("PRIMARY_SEED", u64::from(std::process::id())));
    println!("PRIMARY_SEED={state}");
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut node = Node::new(&["10.22.0.0/28", "fd22::/64"]);
    let pods: Vec<String> = (0..10).map(|number| format!("p{number}")).collect();
    pods.iter().for_each(|pod| node.namespace(pod));
    let of_verb = BTreeMap::from([("ADD", steps(&node, "ADD", "p0")), ("DEL", steps(&node, "DEL", "p0"))]);
    let mut kills = 0;
    for _ in 0..calls {
        let pod = &pods[random(10) as usize];
        let verb = if random(2) == 0 { "ADD" } else { "DEL" };
        if random(3) == 0 {
            let steps = &of_verb[verb];
            kills += usize::from(killed_at(&node, verb, pod, &steps[random(steps.len() as u64) as usize]));
        } else if verb == "ADD" {
            let own = node.add(pod);
            for other in pods.iter().filter(|other| *other != pod && node.has_result(other)) {
                let (_, addresses) = node.run(other, &["ip", "-o", "addr", "show", "eth0"]);
                assert!(
                    own.iter().all(|address| !addresses.contains(&format!(" {address}/"))),
                    "{pod} has what {other} has"
                );
            }
        } else {
            node.call("DEL", pod).expect_ok();
            node.forget_result(pod);
        }
    }
    assert!(kills > calls as usize / 10, "{kills} kills");
    for pod in &pods {
        node.call("DEL", pod).expect_ok();
    }
    assert_eq!(node.left(), Vec::<String>::new(), "after {kills} kills");
}
