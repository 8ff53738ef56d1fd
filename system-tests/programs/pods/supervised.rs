//! Instances supervised by a real systemd: the whole life of a pod, with the real plugin, instance, CA and lighthouse.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::service_manager;
use crate::world;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use service_manager::{PLACE, Systemd};
use world::cluster::{Cluster, LIGHTHOUSE, Node, capabilities, links};

const SOON: Duration = Duration::from_secs(15);

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn a_unit_carries_a_pod_without_capabilities_is_restarted_when_killed_and_leaves_nothing() {
    let mut cluster = Cluster::below(Path::new(PLACE));
    cluster.set_policy(&[("life", "24s".into())]);
    let mut node = cluster.node("n1", "1.0.0");
    let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of("n1")));
    node.conf["plugins"][1]["supervisor"] = "auto".into();
    node.bus = Some(systemd.bus());
    node.add_pods(&mut cluster.world, &["a", "b"]);
    let units: Vec<String> =
        systemd.units().lines().map(|line| line.split(' ').next().unwrap_or_default().to_owned()).collect();
    assert_eq!(units.len(), 2, "{units:?}");
    let other = node.overlay("b");
    cluster.world.ping("a", &other, SOON);
    let held = |unit: &String| {
        capabilities(&systemd.sh(&format!("cat /proc/{}/task/*/status", systemd.show(unit, "MainPID"))))
    };
    assert_eq!(units.iter().flat_map(held).collect::<Vec<_>>(), Vec::<String>::new());

    let process = |unit: &String| systemd.show(unit, "MainPID");
    let before: Vec<String> = units.iter().map(process).collect();
    for unit in &units {
        systemd.sh(&format!("systemctl kill --signal=KILL {unit}"));
    }
    eventually("systemd starts them again", || {
        units.iter().zip(&before).all(|(unit, before)| !["0", before].contains(&process(unit).as_str()))
    });
    cluster.world.ping("a", LIGHTHOUSE, SOON);
    // Its address is unchanged; its status socket may not answer yet.
    cluster.world.ping("a", &other, SOON);
    let first = fingerprints(&node);
    eventually("certificates are renewed", || fingerprints(&node).iter().zip(&first).all(|(now, first)| now != first));
    cluster.world.ping("b", &node.overlay("a"), SOON);
    assert_eq!(units.iter().flat_map(held).collect::<Vec<_>>(), Vec::<String>::new());

    for pod in ["a", "b"] {
        node.chain_ok(&cluster.world, "check", pod);
        node.chain_ok(&cluster.world, "del", pod);
        node.chain_ok(&cluster.world, "del", pod);
        assert_eq!(links(&cluster.world.namespace_of(pod)), ["lo"]);
    }
    assert_eq!(systemd.units(), "");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn an_instance_that_dies_again_and_again_goes_on_with_its_certificate_and_the_last_trust_without_the_ca() {
    let mut cluster = Cluster::below(Path::new(PLACE));
    let mut node = cluster.node("n1", "1.0.0");
    let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of("n1")));
    node.conf["plugins"][1]["supervisor"] = "systemd".into();
    node.bus = Some(systemd.bus());
    node.add_pods(&mut cluster.world, &["a"]);
    let unit = systemd.units().split(' ').next().expect("a unit").to_owned();
    assert_eq!(systemd.show(&unit, "Slice"), "nebula-cni.slice");
    let score = format!("cat /proc/{}/oom_score_adj", systemd.show(&unit, "MainPID"));
    assert_eq!(systemd.show(&unit, "OOMScoreAdjust"), "-997");
    assert_eq!(systemd.sh(&score), world::oom_score(-997));
    let fingerprint = |node: &Node| node.status("a")["certificate"]["fingerprint"].clone();
    let first = fingerprint(&node);
    cluster.world.stop("control", nix::sys::signal::Signal::SIGTERM);
    for _ in 0..3 {
        let before = systemd.show(&unit, "MainPID");
        systemd.sh(&format!("systemctl kill --signal=KILL {unit}"));
        eventually("systemd starts it again", || !["0", &before].contains(&systemd.show(&unit, "MainPID").as_str()));
        // It is ready without the CA.
        eventually("it is ready", || systemd.show(&unit, "ActiveState") == "active");
        cluster.world.ping("a", LIGHTHOUSE, SOON);
        assert_eq!(fingerprint(&node), first);
    }
    // A new unit of the same pod starts over.
    cluster.start_ca();
    node.chain_ok(&cluster.world, "del", "a");
    node.chain_ok(&cluster.world, "add", "a");
    assert_ne!(fingerprint(&node), first);
    let files = format!("ls -l /proc/{}/fd", systemd.show(&unit, "MainPID"));
    assert_eq!(
        systemd.sh(&files).matches("memfd:identity").count(),
        2,
        "the one in use, and a duplicate for the next instance"
    );
    node.chain_ok(&cluster.world, "del", "a");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn a_unit_whose_pod_is_gone_ends_and_is_not_started_again() {
    let mut cluster = Cluster::below(Path::new(PLACE));
    let mut node = cluster.node("n1", "1.0.0");
    let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of("n1")));
    node.conf["plugins"][1]["supervisor"] = "systemd".into();
    node.bus = Some(systemd.bus());
    let pod = cluster.world.namespace("a");
    node.chain_ok(&cluster.world, "add", "a");
    world::run("ip", &["netns", "del", &pod]);
    eventually("the unit ends", || systemd.units().is_empty());
    node.chain_ok(&cluster.world, "del", "a");
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

fn fingerprints(node: &Node) -> Vec<String> {
    ["a", "b"].iter().map(|pod| node.status(pod)["certificate"]["fingerprint"].to_string()).collect()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(40);
    while !holds() {
        assert!(Instant::now() < until, "not in time: {what}");
        thread::sleep(Duration::from_millis(100));
    }
}
