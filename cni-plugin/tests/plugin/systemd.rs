//! Instances as units of a real systemd, which runs in its own namespaces.

use std::process::Command;

use serde_json::json;

use crate::fake_instance::refused;
use crate::harness::{Node, PREV, eventually};
use crate::service_manager::{PLACE, Systemd};

/// A node whose plugin uses this systemd.
fn node(systemd: &Systemd) -> Node {
    let mut node = Node::below(PLACE);
    node.entry["supervisor"] = json!("auto");
    node.set("DBUS_SYSTEM_BUS_ADDRESS", &systemd.bus());
    node
}

#[test]
#[ignore = "needs root, systemd and D-Bus"]
fn a_unit_serves_the_pod_and_leaves_with_it() {
    let systemd = Systemd::start();
    let node = node(&systemd);
    assert_eq!(node.call("ADD").expect_ok(), PREV);
    let unit = node.files().units()[0].clone();
    assert_eq!(systemd.show(&unit, "ActiveState"), "active", "{}", systemd.units());
    assert_eq!(systemd.show(&unit, "Description"), "Nebula tunnel of pod shop/web-0");
    assert!(node.answers());
    let pid = systemd.show(&unit, "MainPID");
    assert_eq!(node.call("ADD").expect_ok(), PREV);
    assert_eq!(systemd.show(&unit, "MainPID"), pid, "a repeated ADD finds its work done");
    node.call("DEL").expect_ok();
    assert_eq!(systemd.units(), "");
    assert_eq!(node.residue(), Vec::<String>::new());
    node.call("DEL").expect_ok();
}

#[test]
#[ignore = "needs root, systemd and D-Bus"]
fn a_unit_is_confined_to_what_its_set_up_needs() {
    let systemd = Systemd::start();
    let node = node(&systemd);
    node.call("ADD").expect_ok();
    let status = systemd.sh(&format!("cat /proc/{}/status", systemd.show(&node.files().units()[0], "MainPID")));
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    // CAP_DAC_OVERRIDE, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_ADMIN, NET_RAW and SYS_ADMIN.
    let expected = 1 << 1 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 12 | 1 << 13 | 1 << 21;
    assert_eq!(field("CapBnd:"), format!("{expected:016x}"));
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()));
    let unit = node.files().units()[0].clone();
    for (property, expected) in [
        // What needs a mount namespace makes a start several times as long on a node with many mounts.
        ("ProtectSystem", "no"),
        ("PrivateTmp", "no"),
        ("PrivateMounts", "no"),
        ("RestrictNamespaces", "net"),
        ("MemoryDenyWriteExecute", "yes"),
        ("LimitCORE", "0"),
        ("MemoryMax", "33554432"),
        ("DevicePolicy", "closed"),
        ("Environment", ""),
        ("Restart", "on-failure"),
        ("StartLimitIntervalUSec", "0"),
    ] {
        assert_eq!(systemd.show(&unit, property), expected, "{property}");
    }
    node.call("DEL").expect_ok();
}

#[test]
#[ignore = "needs root, systemd and D-Bus"]
fn a_killed_instance_is_restarted_and_a_finished_one_is_not() {
    let systemd = Systemd::start();
    let node = node(&systemd);
    node.call("ADD").expect_ok();
    let unit = node.files().units()[0].clone();
    let first = systemd.show(&unit, "MainPID");
    systemd.sh(&format!("kill -9 {first}"));
    eventually("another process", || !["0", &first].contains(&systemd.show(&unit, "MainPID").as_str()));
    eventually("it serves", || node.answers());
    systemd.sh(&format!("kill -TERM {}", systemd.show(&unit, "MainPID")));
    eventually("no unit", || systemd.units().is_empty());
    node.call("DEL").expect_ok();
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
#[ignore = "needs root, systemd and D-Bus"]
fn del_stops_the_unit_without_a_record() {
    let systemd = Systemd::start();
    let mut node = node(&systemd);
    node.call("ADD").expect_ok();
    std::fs::remove_file(node.files().record()).unwrap();
    node.prev_result = None;
    node.set("CNI_NETNS", "");
    node.call("DEL").expect_ok();
    assert_eq!(systemd.units(), "");
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
#[ignore = "needs root, systemd and D-Bus"]
fn a_failed_start_says_why_and_leaves_no_unit() {
    let systemd = Systemd::start();
    let mut node = node(&systemd);
    node.entry["nebula"] = json!({"fake": "exit", "fakeStartError": refused("pod not bound to this node")});
    let error = node.call("ADD").error();
    assert_eq!(error["code"], 102, "{error}");
    assert!(error["details"].as_str().unwrap().contains("pod not bound"), "{error}");
    assert_eq!(systemd.units(), "");
    node.entry["nebula"] = json!({"fake": "hang", "fakeStatus": "asking the CA"});
    node.entry["timeoutSeconds"] = json!(1);
    let error = node.call("ADD").error();
    assert_eq!((&error["code"], &error["details"]), (&json!(107), &json!("asking the CA")), "{error}");
    assert_eq!(systemd.units(), "");
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
#[ignore = "needs root, systemd and D-Bus"]
fn a_new_sandbox_of_a_pod_fences_the_unit_of_the_old_one() {
    let systemd = Systemd::start();
    let mut node = node(&systemd);
    node.call("ADD").expect_ok();
    let first = node.files().units()[0].clone();
    let id = format!("{}-again", node.id());
    node.set("CNI_CONTAINERID", &id);
    node.call("ADD").expect_ok();
    let units = systemd.units();
    assert!(
        units.lines().count() == 1 && !units.contains(&first) && units.contains(&node.files().units()[0]),
        "{units}"
    );
    node.call("DEL").expect_ok();
    assert_eq!(systemd.units(), "");
}

#[test]
#[ignore = "needs root, systemd and D-Bus"]
fn a_unit_somebody_stopped_comes_back_with_reconcile() {
    let systemd = Systemd::start();
    let node = node(&systemd);
    node.call("ADD").expect_ok();
    systemd.sh(&format!("systemctl stop {}", node.files().units()[0]));
    assert_eq!(systemd.units(), "");
    let mut reconcile = Command::new(crate::harness::PLUGIN);
    reconcile.arg("reconcile").arg(node.entry["stateDir"].as_str().unwrap());
    reconcile.env("DBUS_SYSTEM_BUS_ADDRESS", systemd.bus());
    assert!(reconcile.status().unwrap().success());
    eventually("it serves", || node.answers());
    node.call("DEL").expect_ok();
    assert_eq!(systemd.units(), "");
}
