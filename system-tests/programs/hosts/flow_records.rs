//! Records of flows of running daemons with devices: both ends count what the tunnel counts, and tell whom they
//! refused.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use world::World;
use world::peers::ours;

const SOON: Duration = Duration::from_secs(20);
/// Lanes tell what they counted within a second after the last packet.
const TOLD: Duration = Duration::from_secs(3);
const BYTES: usize = 20_000_000;

pub(super) fn overlay(host: &str) -> String {
    let number = if host == "a" { 1 } else { 2 };
    format!("10.79.0.{number}")
}

pub(super) fn start(world: &mut World, host: &str, known: &str, inbound: &str) {
    let dir = world.dir().display().to_string();
    let text = format!(
        "pki: {{ca: {dir}/ca.crt, cert: {dir}/{host}.crt, key: {dir}/{host}.key}}\nstatic_host_map: {{{known}}}\n\
         lighthouse: {{hosts: []}}\nlisten: {{host: 0.0.0.0, port: 4242}}\ntun: {{dev: neb0}}\n\
         daemon: {{control_socket: {dir}/{host}.sock}}\nfirewall:\n  outbound: [{{port: any, proto: any, host: any}}]\n  \
         inbound: {inbound}\n"
    );
    let config = world.write(&format!("{host}.yml"), &text).display().to_string();
    world.start(host, &ours(), &["-config", &config]);
}

pub(super) fn ctl(world: &World, host: &str, words: &[&str]) -> String {
    let (program, socket) = (ours().display().to_string(), format!("{}/{host}.sock", world.dir().display()));
    world.run(host, &[&[program.as_str(), "ctl", "--socket", &socket], words].concat())
}

fn flows(world: &World, host: &str, words: &[&str]) -> Vec<Value> {
    let lines = ctl(world, host, &[&["--json", "flows"], words].concat());
    lines.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect()
}

/// Bytes that went to the other end in the tunnel, and that came, as the tunnel counts them.
fn tunnel(world: &World, host: &str) -> [u64; 2] {
    let answer: Value = serde_json::from_str(&ctl(world, host, &["--json", "peers"])).expect("an object");
    ["bytes_sent", "bytes_received"].map(|key| answer["peers"][0][key].as_u64().expect("a number"))
}

fn total(records: &[Value], key: &str) -> u64 {
    records.iter().map(|record| record[key]["bytes"].as_u64().expect("a number")).sum()
}

#[test]
#[ignore = "needs root and network namespaces"]
fn records_of_both_ends_say_what_the_tunnel_carried_and_what_was_refused() {
    let mut world = World::new();
    let [_, at_b] = ["a", "b"].map(|host| world.host(host));
    world.certify(&["ca", "-name", "records"]);
    for host in ["a", "b"] {
        world.certify(&["sign", "-name", host, "-groups", "tests", "-networks", &format!("{}/24", overlay(host))]);
    }
    start(&mut world, "b", "", "[{port: any, proto: icmp, host: any}, {port: 1024-65535, proto: tcp, group: tests}]");
    let known = format!("\"{}\": [\"{at_b}:4242\"]", overlay("b"));
    start(&mut world, "a", &known, "[]");
    world.ping("a", &overlay("b"), SOON);
    thread::sleep(TOLD);
    let before = ["a", "b"].map(|host| (tunnel(&world, host), flows(&world, host, &[])));
    let address: IpAddr = overlay("b").parse().expect("an address");
    world.transfer("a", "b", address, BYTES);
    for _ in 0..3 {
        // Nobody may reach port 22.
        let _refused = world.exec("a", &["bash", "-c", &format!("timeout 0.3 bash -c '</dev/tcp/{address}/22'")]);
    }
    thread::sleep(TOLD);

    for (host, (tunnel_before, flows_before)) in ["a", "b"].into_iter().zip(&before) {
        let records = flows(&world, host, &["--verdict", "allowed"]);
        let (sent, received) = if host == "a" { ("forward", "reply") } else { ("reply", "forward") };
        let after = tunnel(&world, host);
        for (n, key) in [(0, sent), (1, received)] {
            let carried = after[n] - tunnel_before[n];
            let told = total(&records, key) - total(flows_before, key);
            // What b refused came through the tunnel, too.
            let refused =
                if (host, n) == ("b", 1) { total(&flows(&world, host, &["--verdict", "refused"]), key) } else { 0 };
            let differs = carried.abs_diff(told + refused);
            assert!(differs * 100 <= carried, "{host} {key}: {told} of {carried} bytes, {refused} refused");
        }
        let transfer = records.iter().find(|record| total(std::slice::from_ref(*record), "forward") > BYTES as u64);
        let transfer = transfer.unwrap_or_else(|| panic!("no record of the transfer: {records:?}"));
        assert_eq!(transfer["direction"], if host == "a" { "outbound" } else { "inbound" });
        assert_eq!((&transfer["source"]["name"], &transfer["destination"]["name"]), (&"a".into(), &"b".into()));
        assert_eq!((&transfer["protocol"], &transfer["path"]), (&6.into(), &"direct".into()));
        assert_eq!(transfer["rule"], if host == "a" { 0 } else { 1 });
    }
    let refused = flows(&world, "b", &["--verdict", "refused", "--port", "22", "--peer", "a", "--since", "5m"]);
    let [record] = refused.as_slice() else { panic!("one record for all attempts: {refused:?}") };
    assert_eq!((&record["event"], &record["reason"]), (&"refused".into(), &"no_rule".into()));
    assert!(record["forward"]["packets"].as_u64() >= Some(3), "{record}");
    assert_eq!((&record["source"]["groups"][0], &record["source"]["port"]), (&"tests".into(), &Value::Null));
    assert_eq!(flows(&world, "b", &["--port", "23"]).len(), 0);
    let table = ctl(&world, "b", &["flows"]);
    assert!(
        table.starts_with("SEEN ") && table.contains("refused: no_rule") && table.contains("firewall.inbound[1]"),
        "{table}"
    );

    // Switched off while the daemon runs.
    let config = world.dir().join("b.yml");
    let text = std::fs::read_to_string(&config).expect("the configuration");
    world.write("b.yml", &(text + "flows: {records: false}\n"));
    ctl(&world, "b", &["reload"]);
    let until = Instant::now() + SOON;
    while !ctl(&world, "b", &["flows"]).contains("flows are not recorded here") {
        assert!(Instant::now() < until, "{}", world.log("b"));
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn records_are_kept_on_disk_across_restarts_of_daemon_and_keeper() {
    let mut world = World::new();
    let [_, at_b] = ["a", "b"].map(|host| world.host(host));
    world.certify(&["ca", "-name", "records"]);
    for host in ["a", "b"] {
        world.certify(&["sign", "-name", host, "-networks", &format!("{}/24", overlay(host))]);
    }
    start(&mut world, "b", "", "[{port: any, proto: icmp, host: any}]");
    let known = format!("\"{}\": [\"{at_b}:4242\"]", overlay("b"));
    start(&mut world, "a", &known, "[]");
    world.ping("a", &overlay("b"), SOON);
    let folder = world.dir().join("kept").display().to_string();
    let (tool, socket) = (world::cluster::binary("nebula-ctl"), format!("{}/b.sock", world.dir().display()));
    let keep = |world: &mut World| {
        world.start_in("keeper", "b", &tool, &["--socket", &socket, "keep-flows", "--folder", &folder])
    };
    keep(&mut world);
    let refuse = |world: &World, port: u16| {
        let attempt = format!("timeout 0.3 bash -c '</dev/tcp/{}/{port}'", overlay("b"));
        let _refused = world.exec("a", &["bash", "-c", &attempt]);
    };
    // Also while no daemon answers.
    let kept = |world: &World| -> Vec<u64> {
        let words = ["--json", "flows", "--kept", &folder, "--verdict", "refused", "--peer", "a"];
        let lines = world.run("b", &[&[tool.to_str().expect("text")], &words[..]].concat());
        let ports = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("an object a line"));
        ports.map(|record| record["destination"]["port"].as_u64().expect("a port")).collect()
    };
    let wait_for = |world: &World, expected: &[u64]| {
        let until = Instant::now() + SOON;
        while kept(world) != expected {
            assert!(Instant::now() < until, "{:?} instead of {expected:?}\n{}", kept(world), world.log("keeper"));
            thread::sleep(Duration::from_millis(200));
        }
    };
    refuse(&world, 21);
    wait_for(&world, &[21]);
    world.stop("b", nix::sys::signal::Signal::SIGKILL);
    let until = Instant::now() + SOON;
    while !world.log("keeper").contains("asking again") {
        assert!(Instant::now() < until, "it does not say that the daemon is away: {}", world.log("keeper"));
        thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(kept(&world), [21], "without a daemon");
    start(&mut world, "b", "", "[{port: any, proto: icmp, host: any}]");
    world.ping("a", &overlay("b"), SOON);
    refuse(&world, 22);
    wait_for(&world, &[21, 22]);
    world.stop("keeper", nix::sys::signal::Signal::SIGKILL);
    refuse(&world, 23);
    keep(&mut world);
    // What the ring still has when the keeper comes back; and nothing twice.
    wait_for(&world, &[21, 22, 23]);
    let lines = std::fs::read_to_string(format!("{folder}/flows.jsonl")).expect("the file");
    let numbers: Vec<u64> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["number"].as_u64().expect("a number"))
        .collect();
    assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
    let table = world.run("b", &[tool.to_str().expect("text"), "flows", "--kept", &folder]);
    assert!(table.starts_with("SEEN ") && table.contains("refused: no_rule"), "{table}");
}
