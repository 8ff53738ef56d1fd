//! What capture adds to ADD, with one pod on the node and with many.

use std::time::{Duration, Instant};

use serde_json::json;

use super::site::{Pod, Primary, Site};
use crate::harness::PLUGIN;

#[test]
#[ignore = "needs root and network namespaces"]
fn capture_adds_little_to_add_with_one_pod_and_with_many() {
    let many: usize = std::env::var("CAPTURE_PODS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let mut site = Site::new(Primary::Bridge);
    let pods: Vec<Pod> = (0..many).map(|n| site.pod(&format!("p{n}"), u8::try_from(n + 10).unwrap())).collect();
    let alone = with_and_without(&mut site, &pods[..1], 10);
    for pod in &pods {
        add(&site, pod);
    }
    // The last ones once more, among all the others.
    let crowded = with_and_without(&mut site, &pods[many - 5..], 2);
    for (pods, [without, with]) in [(1, alone), (many, crowded)] {
        println!("ADD p50 with {pods} pods: {without:?} without capture, {with:?} with it");
        assert!(with < without + LIMIT, "{pods} pods: {without:?} {with:?}");
    }
    let state = site.node.entry["stateDir"].as_str().unwrap();
    let (_, taken) = timed(|| site.inside("node", &[PLUGIN, "reconcile", state]));
    println!("a reconciliation of {many} captured pods takes {taken:?}");
    for pod in &pods {
        site.call("DEL", pod).expect_ok();
    }
    assert_eq!(site.rules(), "");
}

/// By turns, so that what else the machine does counts for both. The pods are captured at the end.
fn with_and_without(site: &mut Site, pods: &[Pod], rounds: usize) -> [Duration; 2] {
    let captured = site.node.entry["capture"].clone();
    let mut taken = [const { Vec::new() }; 2];
    for pod in std::iter::repeat_n(pods, rounds).flatten() {
        for (key, taken) in [json!(false), captured.clone()].into_iter().zip(&mut taken) {
            site.call("DEL", pod).expect_ok();
            site.node.entry["capture"] = key;
            taken.push(add(site, pod));
        }
    }
    taken.map(|times| median(times.into_iter()))
}

fn add(site: &Site, pod: &Pod) -> Duration {
    timed(|| site.call("ADD", pod).expect_ok()).1
}

#[expect(clippy::disallowed_methods, reason = "a real clock is what this measures")]
fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let began = Instant::now();
    let done = work();
    (done, began.elapsed())
}

fn median(times: impl Iterator<Item = Duration>) -> Duration {
    let mut times: Vec<Duration> = times.collect();
    times.sort();
    times[times.len() / 2]
}

// Far above what it takes, because tests also run as debug builds beside others.
const LIMIT: Duration = Duration::from_millis(100);
