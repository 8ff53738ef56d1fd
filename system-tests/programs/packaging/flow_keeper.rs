//! `nebula-flows.service` under a real systemd: what a daemon records is kept on disk, through restarts and crashes of
//! both.

use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nebula_cni_contract::flow_records::FlowRecord;

use super::descriptor_store::{P, Site};
use super::repository;
use super::systemd::{PLACE, Systemd};

const UNIT: &str = "nebula-flows.service";
/// The unit starts again after ten seconds, and asks a daemon that was away every ten.
const KEPT_WITHIN: Duration = Duration::from_secs(30);

fn file(systemd: &Systemd) -> PathBuf {
    systemd.root.join("var/lib/nebula-flows/flows.jsonl")
}

/// All records, of which none may be damaged or there twice.
fn kept(systemd: &Systemd) -> Vec<FlowRecord> {
    let text = std::fs::read_to_string(file(systemd)).unwrap_or_default();
    // The last line may be under way.
    let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let records: Vec<FlowRecord> =
        lines.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect();
    let numbers: HashSet<u64> = records.iter().map(|record| record.number).collect();
    assert_eq!(numbers.len(), records.len(), "a record is there twice");
    records
}

/// Opens a flow of its own to a port of `p`, and waits until it is kept.
fn is_kept(site: &Site, port: u16) {
    let systemd = &site.systemd;
    let target = format!("/dev/udp/{P}/{port}");
    let end = Instant::now() + KEPT_WITHIN;
    loop {
        site.world.exec("u", &["bash", "-c", &format!("echo > {target}")]);
        let is_there = |record: &FlowRecord| {
            record.destination.port == Some(port) && record.destination.name.as_deref() == Some("p")
        };
        if kept(systemd).iter().any(is_there) {
            return;
        }
        let state = systemd.call(&["systemctl", "status", "--no-pager", UNIT]);
        let state = String::from_utf8_lossy(&state.stdout).into_owned();
        assert!(Instant::now() < end, "nothing of port {port}\n{state}\n{}", systemd.log());
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
#[ignore = "needs root, systemd, network namespaces and the Go peers in target/peers"]
fn the_unit_keeps_records_through_restarts_and_crashes_and_another_command_reads_them() {
    let site = Site::with_peer();
    let systemd = &site.systemd;
    // Where it keeps them.
    systemd.overlay("/var/lib");
    systemd.program("nebula-ctl");
    let unit = std::fs::read_to_string(repository("deploy/nebula-flows.service")).expect("the unit");
    let unit = unit.replace("/usr/local/bin/nebula-ctl", &format!("{PLACE}/nebula-ctl"));
    systemd.lone_unit(UNIT, &unit);
    systemd.must(&["systemctl", "start", UNIT]);
    is_kept(&site, 1001);

    // The daemon restarts, and crashes.
    site.control("restart");
    is_kept(&site, 1002);
    let process = site.pid();
    systemd.must(&["kill", "-9", &process.to_string()]);
    site.wait("another process", KEPT_WITHIN, |site| {
        site.show("ActiveState") == "active" && ![0, process].contains(&site.pid())
    });
    is_kept(&site, 1003);

    // The keeper restarts, and crashes: what was recorded meanwhile is kept as well.
    systemd.must(&["systemctl", "restart", UNIT]);
    is_kept(&site, 1004);
    systemd.must(&["kill", "-9", &systemd.show_of(UNIT, "MainPID")]);
    site.world.exec("u", &["bash", "-c", &format!("echo > /dev/udp/{P}/1005")]);
    is_kept(&site, 1006);
    assert_eq!(systemd.show_of(UNIT, "NRestarts"), "1");
    let between = kept(systemd).iter().any(|record| record.destination.port == Some(1005));
    assert!(between, "what was recorded while nobody asked");
    let mode = |path: &Path| std::fs::metadata(path).map_or(0, |about| about.permissions().mode() & 0o777);
    let path = file(systemd);
    assert_eq!([mode(&path), mode(path.parent().expect("its folder"))], [0o600, 0o700]);

    let ctl = format!("{PLACE}/nebula-ctl");
    let read = |port: &str| systemd.must(&[&ctl, "--json", "flows", "--kept", "--port", port]);
    let records: Vec<FlowRecord> =
        read("1003").lines().map(|line| serde_json::from_str(line).expect("a record")).collect();
    assert!(!records.is_empty() && records.iter().all(|record| record.destination.port == Some(1003)), "{records:?}");
    assert_eq!(read("1999"), "");

    // It is stopped, and has not failed.
    systemd.must(&["systemctl", "stop", UNIT]);
    assert_eq!([systemd.show_of(UNIT, "ActiveState"), systemd.show_of(UNIT, "Result")], ["inactive", "success"]);
}
