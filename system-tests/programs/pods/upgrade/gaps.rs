//! How long traffic is silent while another program takes over. These tests measure time, so they have the machine for
//! themselves: with twenty busy processes a core, each of the hand-over's steps waits for its turn.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::{INSTANCE, SHORT, SOON, Site};
use crate::pods::init_container;
use crate::world;
use world::chaos::number;
use world::cluster::{LIGHTHOUSE, Node, answer_at, binary};
use world::run;
use world::traffic::{Flow, PROBE_EVERY};

/// Installs another program and calls `upgrade` with the number of the round, `count` times. Asserts that no probe is
/// lost and that no silence is long.
fn assert_short_gaps(count: u64, node: &Node, flow: &Flow, mut upgrade: impl FnMut(u64)) {
    let mut gaps = Vec::new();
    for round in 0..count {
        node.install_another(&binary(INSTANCE));
        // A gap ends before the next begins.
        thread::sleep(Duration::from_millis(300));
        flow.watch();
        upgrade(round);
        thread::sleep(Duration::from_millis(300));
        gaps.push(flow.silence().1.saturating_sub(PROBE_EVERY));
        assert_eq!((flow.lost(), flow.broken()), (0, None), "{}", node.instance_logs());
    }
    gaps.sort();
    let (p50, max) = (gaps[gaps.len() / 2], gaps[gaps.len() - 1]);
    println!("longest silence beyond a probe's interval: p50 {p50:?}, max {max:?}");
    assert!(max < SHORT, "{gaps:?}\n{}", node.instance_logs());
}

impl Site {
    fn assert_short_gaps(&self, count: u64) {
        assert_short_gaps(count, &self.node, self.flow(), |_| {
            self.upgrade(&[]);
        });
    }
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn another_program_takes_over_from_an_instance_and_no_probe_is_lost() {
    let site = Site::new();
    let device = || run("ip", &["-n", &site.cluster.world.namespace_of("db"), "-o", "link", "show", "nebula0"]);
    let (before, certificate) = (device(), site.node.status("db")["certificate"].clone());
    let answer = site.ask(&[]).expect("the plugin answers");
    assert_eq!((&answer["upgraded"], &answer["pid"]), (&false.into(), &site.pid().into()), "it is the installed one");
    site.assert_short_gaps(number("UPGRADES", 5));
    assert_eq!((device(), &site.node.status("db")["certificate"]), (before, &certificate));
    // And back to the old program.
    site.flow().watch();
    site.upgrade(&["--previous"]);
    assert_eq!(site.ask(&["--previous"]).expect("the plugin answers")["upgraded"], false);
    site.assert_well();
    assert!(!site.node.instance_logs().contains("level=ERROR"), "{}", site.node.instance_logs());
    site.end();
}

#[test]
#[ignore = "needs root, network namespaces, nftables and a release build"]
fn isolated_and_renumbered_pods_stay_so_under_other_programs() {
    let isolated = Site::configured(&json!({ "overlay": ["10.42.0.0/16"], "isolate": { "dns": [], "probes": [] } }));
    let rules = || run("ip", &["netns", "exec", &isolated.cluster.world.namespace_of("n2"), "nft", "list", "ruleset"]);
    let before = rules();
    assert!(before.contains("nebula"), "{before}");
    isolated.assert_short_gaps(number("UPGRADES", 3));
    assert_eq!(rules(), before);
    isolated.assert_well();
    isolated.end();
    let renumbered = Site::configured(&json!({ "renumber": true }));
    let db = renumbered.node.overlay("db");
    renumbered.cluster.world.ping("n2", &db, SOON);
    renumbered.assert_short_gaps(number("UPGRADES", 3));
    renumbered.cluster.world.ping("n2", &db, Duration::from_secs(2));
    assert_eq!(renumbered.flow().broken(), None);
    renumbered.end();
}

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn units_of_systemd_take_over_from_each_other_and_are_restarted_as_before() {
    let site = Site::of_systemd();
    let units = || -> Vec<String> {
        let units = site.systemd.as_ref().expect("it was started").units();
        units.lines().map(|line| line.split(' ').next().unwrap_or_default().to_owned()).collect()
    };
    let first = units();
    site.assert_short_gaps(number("UPGRADES", 5));
    // They alternate between two units.
    if number("UPGRADES", 5).is_multiple_of(2) {
        site.node.install_another(&binary(INSTANCE));
        site.upgrade(&[]);
    }
    let second = units();
    assert_eq!((first.len(), second.len(), first == second), (1, 1, false), "{first:?} {second:?}");
    site.flow().watch();
    site.assert_well();
    // It is a unit like any other: systemd starts it again, with the certificate.
    let (pid, certificate) = (site.pid(), site.node.status("db")["certificate"].clone());
    site.systemd.as_ref().expect("it was started").sh(&format!("systemctl kill --signal=KILL {}", second[0]));
    let serves = |status: &Value| status["state"] == "running" && status["pid"] != pid;
    site.until("another process", || answer_at(&site.node.status_socket("db")).is_ok_and(|status| serves(&status)));
    assert_eq!(site.node.status("db")["certificate"], certificate);
    site.flow().watch();
    site.until("traffic goes on", || site.flow().answers().1 > 20);
    site.install_script("exit 3");
    assert!(site.refused(&[]).contains("goes on with the program that it had"));
    assert_eq!(units(), second);
    // The plugin is killed while it waits for a program that hangs: the next look ends what it left.
    site.install_script("exec sleep 60");
    let systemd = site.systemd.as_ref().expect("it was started");
    systemd.sh(&format!("timeout --signal=KILL 1 {}", site.line(&[])));
    assert_eq!(units().len(), 2, "the new one waits to be ready");
    let plugin = binary("nebula-cni-plugin");
    systemd.sh(&format!("{} reconcile {}", plugin.display(), site.node.dir.join("state").display()));
    assert_eq!(units(), second);
    site.node.install_another(&binary(INSTANCE));
    site.upgrade(&[]);
    assert_eq!(units(), first);
    let systemd = site.end();
    assert_eq!(systemd.expect("it was started").units(), "");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn connections_of_pods_that_enrolled_with_their_own_token_go_on_under_other_programs() {
    let (mut cluster, mut node) =
        init_container::cluster(&[("web", "10.244.1.2"), ("db", "10.244.1.3"), ("late", "10.244.1.4")]);
    node.own_program();
    node.add_pods(&mut cluster.world, &["web", "db", "late"]);
    for pod in ["web", "db"] {
        let init = init_container::run(&cluster, &node, pod, "30");
        assert!(init.status.success(), "{}\n{}", String::from_utf8_lossy(&init.stderr), node.instance_logs());
    }
    let at = node.overlay("db");
    cluster.world.ping("web", &at, SOON);
    let flow = Flow::start(&cluster.world, "web", "db", at.parse().expect("an address"));
    let upgrade = |pod: &str| -> Value {
        let output = node.upgrade(&cluster.world, pod).output().expect("the plugin runs");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    };
    let mut certificates = BTreeSet::new();
    assert_short_gaps(number("UPGRADES", 4), &node, &flow, |round| {
        let pod = if round % 2 == 0 { "db" } else { "web" };
        let answer = upgrade(pod);
        assert_eq!(answer["upgraded"], true, "{answer}\n{}", node.instance_logs());
        let status = node.status(pod);
        assert_eq!((&status["state"], &status["pid"]), (&json!("running"), &answer["pid"]), "{status}");
        certificates.insert(status["certificate"]["fingerprint"].to_string());
    });
    println!("{} certificates", certificates.len());
    // The one that serves now is the one whose socket init finds.
    assert!(init_container::run(&cluster, &node, "db", "30").status.success(), "{}", node.instance_logs());
    assert_eq!(init_container::written(&node), node.status("db")["certificate"]["fingerprint"]);

    // A pod that has no certificate has nothing to hand over, and its init container finds its instance all the same.
    let pid = node.status("late")["pid"].clone();
    let answer = upgrade("late");
    assert!(
        answer["code"] == 11 && answer.to_string().contains("is waiting, and has nothing to hand over"),
        "{answer}"
    );
    assert_eq!(node.status("late")["pid"], pid);
    assert!(init_container::run(&cluster, &node, "late", "30").status.success(), "{}", node.instance_logs());
    let answer = upgrade("late");
    assert_eq!(answer["upgraded"], true, "{answer}");
    cluster.world.ping("late", LIGHTHOUSE, SOON);
    drop(flow);
    for pod in ["web", "db", "late"] {
        node.chain_ok(&cluster.world, "del", pod);
    }
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}
