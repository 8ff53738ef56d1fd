//! A runtime that loses patience kills the plugin at any instruction: DEL then leaves nothing.

use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::harness::Node;

fn killed_after(delay: Duration, nebula: serde_json::Value) -> (bool, bool) {
    let mut node = Node::with_nebula(nebula);
    let mut child = node.spawn("ADD");
    thread::sleep(delay);
    child.kill().unwrap();
    child.wait().unwrap();
    let (recorded, started) = (node.record().is_some(), node.record().is_some_and(|r| r.process.is_some()));
    node.prev_result = None;
    node.call("DEL").expect_ok();
    // A launcher that was never let go sees its plugin die and ends by itself.
    for _ in 0..100 {
        if node.residue().is_empty() {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(node.residue(), Vec::<String>::new(), "killed after {delay:?}");
    (recorded, started)
}

#[test]
fn del_leaves_nothing_of_an_add_killed_at_any_time() {
    let mut seen = Vec::new();
    for step in 0..40 {
        seen.push(killed_after(Duration::from_micros(step * step * 40), json!({"fake": "hang"})));
    }
    // A machine with much other work takes longer to come that far.
    let mut delay = Duration::from_millis(100);
    while !seen.iter().any(|(_, started)| *started) && delay < Duration::from_secs(15) {
        seen.push(killed_after(delay, json!({"fake": "hang"})));
        delay *= 2;
    }
    assert!(seen.iter().any(|(recorded, _)| !recorded), "no kill came before the record: {seen:?}");
    assert!(seen.iter().any(|(_, started)| *started), "no kill came after the start: {seen:?}");
}

#[test]
fn del_leaves_nothing_of_an_add_killed_near_its_end() {
    for step in 0..20 {
        killed_after(Duration::from_millis(5 + step * 2), json!({}));
    }
}
