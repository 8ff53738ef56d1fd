//! Flow records beside the counters of the devices, under mixed traffic among kills and hand-overs of both daemons: the
//! records have what the devices counted within 1 %, no byte twice, and every flow that lived for a second.
//!
//! `FLOW_SECONDS` (60) is the time that the traffic lasts.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod mixture;
mod watched;

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use nebula_cni_contract::flow_records::FlowRecord;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use self::mixture::{Mixture, Opened, PORTS, REFUSED};
use self::watched::{Bytes, Watched, answer_of, device};
use super::flow_records::{ctl, overlay};
use crate::world::World;
use crate::world::chaos::number;
use crate::world::peers::ours;

const NAMES: [&str; 2] = ["a", "b"];
const SOON: Duration = Duration::from_secs(20);
/// Lanes tell what they counted within a second after the last packet.
const TOLD: Duration = Duration::from_millis(2500);
/// What a device counted in this time before a look may be missing in the records.
const UNTOLD: Duration = Duration::from_secs(2);
const BETWEEN: Duration = Duration::from_secs(4);
/// More than the flows of one process in the time between two events.
const RING: usize = 1000;

/// What happens to a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Killed,
    HandedOver,
}

/// One end of the tunnel.
struct End {
    name: &'static str,
    pid: i32,
    watched: Watched,
    /// What the device had counted when this process began to record, at least and at most.
    since: [Bytes; 2],
    device: Bytes,
    records: Bytes,
}

struct Site {
    ends: [End; 2],
    world: World,
}

impl Site {
    fn new() -> Self {
        let mut world = World::new();
        let hosts = NAMES.map(|name| world.host(name));
        world.certify(&["ca", "-name", "truth"]);
        for (at, name) in NAMES.into_iter().enumerate() {
            world.certify(&["sign", "-name", name, "-networks", &format!("{}/24", overlay(name))]);
            let (dir, other) = (world.dir().display(), NAMES[1 - at]);
            let [tcp, udp] = PORTS;
            // Without offloads the device counts packets as they are in the tunnel.
            let text = format!(
                "pki: {{ca: {dir}/ca.crt, cert: {dir}/{name}.crt, key: {dir}/{name}.key}}
static_host_map: {{\"{}\": [\"{}:4242\"]}}
lighthouse: {{hosts: []}}
listen: {{host: 0.0.0.0, port: 4242}}
tun: {{dev: neb0, use_offloads: false}}
daemon: {{control_socket: {dir}/{name}.sock}}
flows: {{ring: {RING}}}
stats: {{type: prometheus, listen: '127.0.0.1:9100', path: /metrics, interval: 1s}}
firewall:
  conntrack: {{tcp_timeout: 10s, udp_timeout: 10s, default_timeout: 10s}}
  outbound: [{{port: any, proto: any, host: any}}]
  inbound:
    - {{port: any, proto: icmp, host: any}}
    - {{port: {tcp}, proto: tcp, host: any}}
    - {{port: {udp}, proto: udp, host: any}}
",
                overlay(other),
                hosts[1 - at],
            );
            world.write(&format!("{name}.yml"), &text);
        }
        let pids = NAMES.map(|name| start(&mut world, name));
        world.ping("a", &overlay("b"), SOON);
        world.ping("b", &overlay("a"), SOON);
        let ends = [0, 1].map(|at| End {
            name: NAMES[at],
            pid: pids[at],
            watched: Watched::start(world.dir().join(format!("{}.sock", NAMES[at])), pids[at]),
            since: [Bytes::default(); 2],
            device: Bytes::default(),
            records: Bytes::default(),
        });
        Self { ends, world }
    }

    /// Compares the records of the process that runs at an end with what its device counted since it began to record.
    /// `is_quiet`: nothing went for a while. Returns what the device has counted.
    fn compare(&mut self, at: usize, is_quiet: bool) -> Bytes {
        let end = &mut self.ends[at];
        let early = (!is_quiet).then(|| end.watched.device_before(Instant::now() - UNTOLD)).flatten();
        let answer = answer_of(end.watched.socket(), None).expect("records");
        let late = device(end.pid).expect("a device");
        assert!(answer.records.len() < RING, "records gave way: {} more", answer.lost);
        let records: Bytes = answer.records.iter().map(amounts).sum();
        let [least, most] = end.since;
        let told = if is_quiet { late } else { early.unwrap_or_default() };
        for (n, what) in ["sent", "received"].into_iter().enumerate() {
            let from = told.0[n].saturating_sub(most.0[n]);
            let to = late.0[n] - least.0[n];
            let has = records.0[n];
            assert!(
                has * 100 >= from * 99 && has * 100 <= to * 101,
                "{}, quiet {is_quiet}: records have {has} bytes {what}, the device counted {from} to {to}\n{:#?}",
                end.name,
                answer.records,
            );
        }
        // Of these both are certain.
        if is_quiet && least == most {
            end.device += Bytes([0, 1].map(|n| late.0[n] - most.0[n]));
            end.records += records;
        }
        late
    }

    /// Kills the daemon of an end and starts it again, or has another process take over from it.
    fn befall(&mut self, at: usize, fate: Fate, counted: Bytes) {
        let name = self.ends[at].name;
        match fate {
            Fate::Killed => {
                self.end_process(at);
                self.ends[at].pid = start(&mut self.world, name);
                self.ends[at].since = [Bytes::default(); 2];
            }
            Fate::HandedOver => {
                let said = ctl(&self.world, name, &["--json", "upgrade", "--unsupervised"]);
                let said: Value = serde_json::from_str(&said).expect("JSON");
                assert!(
                    said["rolled_back"].is_null() && said["flows"].as_u64() > Some(1),
                    "{said}\n{}",
                    self.world.all_logs()
                );
                self.ends[at].pid = said["pid"].as_i64().and_then(|pid| pid.try_into().ok()).expect("a process id");
                let after = device(self.ends[at].pid).expect("a device");
                self.ends[at].since = [counted, after];
            }
        }
        self.ends[at].watched.set_pid(self.ends[at].pid);
        let until = Instant::now() + SOON;
        while answer_of(self.ends[at].watched.socket(), None).is_err() {
            assert!(Instant::now() < until, "{name} does not answer\n{}", self.world.all_logs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn end_process(&mut self, at: usize) {
        let pid = Pid::from_raw(self.ends[at].pid);
        let _ = kill(pid, Signal::SIGKILL);
        while kill(pid, None).is_ok() && crate::world::cluster::alive(pid.as_raw() as u64) {
            thread::sleep(Duration::from_millis(5));
        }
        // The one that was started first, if another took over from it.
        self.world.stop(NAMES[at], Signal::SIGKILL);
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for end in &self.ends {
            let _ = kill(Pid::from_raw(end.pid), Signal::SIGTERM);
        }
    }
}

fn start(world: &mut World, name: &str) -> i32 {
    let config = world.dir().join(format!("{name}.yml")).display().to_string();
    world.start(name, &ours(), &["-config", &config]);
    i32::try_from(world.pid(name)).expect("a process id")
}

/// What one record adds to what its host sent and received. Packets that were refused on their way in never came to
/// the device.
fn amounts(record: &FlowRecord) -> Bytes {
    let is_refused = record.verdict == "refused";
    match record.direction.as_str() {
        "outbound" => Bytes([record.forward.bytes, record.reply.bytes]),
        _ if is_refused => Bytes::default(),
        _ => Bytes([record.reply.bytes, record.forward.bytes]),
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn records_have_what_devices_count_among_kills_and_hand_overs() {
    let time = Duration::from_secs(number("FLOW_SECONDS", 60));
    let mut site = Site::new();
    let namespaces = NAMES.map(|name| site.world.namespace_of(name));
    let addresses = NAMES.map(|name| overlay(name).parse().expect("an address"));
    let mixture = Mixture::start(&namespaces, addresses);
    let fates = [(1, Fate::HandedOver), (0, Fate::Killed), (1, Fate::Killed), (0, Fate::HandedOver)];
    let (began, mut met) = (Instant::now(), [[0; 2]; 2]);
    for round in 0.. {
        thread::sleep(BETWEEN);
        if began.elapsed() > time {
            break;
        }
        // In every other turn of all fates nothing is under way when they come.
        let (at, fate) = fates[round % fates.len()];
        let is_quiet = round / fates.len() % 2 == 1;
        if is_quiet {
            mixture.pause();
            thread::sleep(TOLD);
        }
        let (counted, broken) = (site.compare(at, is_quiet), mixture.broken());
        site.befall(at, fate, counted);
        mixture.go_on();
        met[usize::from(fate == Fate::HandedOver)][usize::from(is_quiet)] += 1;
        if fate == Fate::HandedOver {
            thread::sleep(BETWEEN / 2);
            assert_eq!(mixture.broken(), broken, "connections ended by a hand-over\n{}", site.world.all_logs());
        }
    }
    mixture.pause();
    thread::sleep(TOLD);
    for at in [0, 1] {
        site.compare(at, true);
    }
    let opened = mixture.finish();
    thread::sleep(Duration::from_millis(500));
    let [kills, hand_overs] = met;
    println!(
        "{} kills, {} hand-overs; of these {} and {} while nothing was under way",
        kills[0] + kills[1],
        hand_overs[0] + hand_overs[1],
        kills[1],
        hand_overs[1]
    );
    for end in &site.ends {
        let (Bytes(device), Bytes(records)) = (end.device, end.records);
        println!(
            "{}: in processes that ended quietly the device counted {device:?} bytes sent and received, records {records:?}",
            end.name
        );
        assert!(device.iter().all(|bytes| *bytes > 100_000), "hardly any traffic: {device:?}");
    }
    assert!(kills[0] + kills[1] > 0 && hand_overs[0] + hand_overs[1] > 0, "FLOW_SECONDS is too short");
    has_all_that_lived(&site, &opened);
    refusals_are_kept_or_counted(&mut site, &namespaces[0]);
}

/// Every flow that was answered over more than a second has a record at both ends.
fn has_all_that_lived(site: &Site, opened: &[Opened]) {
    let lived: Vec<&Opened> = opened.iter().filter(|flow| flow.last_ms - flow.began_ms > 1000).collect();
    for end in &site.ends {
        let missing: Vec<_> = lived.iter().filter(|flow| !end.watched.has(flow)).collect();
        assert!(missing.is_empty(), "{}: {} flows without a record: {missing:?}", end.name, missing.len());
    }
    let short = opened.len() - lived.len();
    let found = opened.iter().filter(|flow| site.ends.iter().all(|end| end.watched.has(flow))).count();
    println!(
        "{} flows of more than a second, all with records at both ends; {short} shorter ones, {} of all without",
        lived.len(),
        opened.len() - found
    );
    assert!(lived.len() > 5 && short > 5, "{} and {short} flows", lived.len());
}

/// More kinds of refused packets than the ring has places: those that are not in it were counted.
fn refusals_are_kept_or_counted(site: &mut Site, namespace: &str) {
    site.befall(1, Fate::Killed, Bytes::default());
    site.world.ping("a", &overlay("b"), SOON);
    let socket = site.ends[1].watched.socket().to_owned();
    site.ends[1].watched.stop();
    let before = answer_of(&socket, Some(0)).expect("records");
    let kinds = 3 * RING;
    mixture::refused(namespace, SocketAddr::new(overlay("b").parse().expect("an address"), 0), kinds);
    thread::sleep(TOLD);
    let (mut after, mut kept, mut packets) = (before.next, 0, 0);
    let lost = loop {
        let answer = answer_of(&socket, Some(after)).expect("records");
        let refused = answer.records.iter().filter(|record| record.verdict == "refused");
        for record in refused {
            assert_eq!((record.reason.as_deref(), record.protocol), (Some("no_rule"), 17), "{record:?}");
            assert!(record.destination.port >= Some(REFUSED), "{record:?}");
            (kept, packets) = (kept + 1, packets + record.forward.packets);
        }
        after = answer.next;
        if !answer.is_cut {
            break answer.lost - before.lost;
        }
    };
    // A busy machine loses some on their way.
    let arrived = refused_by_rules(&site.world);
    println!("{arrived} kinds of refused packets: {kept} in the ring of {RING}, {lost} counted as gone");
    assert!(kept > RING / 2 && kept <= RING, "{kept}");
    assert_eq!(packets, kept as u64, "one of each kind");
    // The few records of before, which gave way too, may have changed since they were told.
    let gone = arrived - kept as u64;
    assert!(
        arrived > 2 * RING as u64 && (gone..=gone + 3).contains(&lost),
        "{kept} kept, {lost} counted, of {arrived}"
    );
}

/// How many packets the rules of `b` have refused since its daemon started.
fn refused_by_rules(world: &World) -> u64 {
    let page = world.run("b", &["curl", "-sS", "http://127.0.0.1:9100/metrics"]);
    let line = page.lines().find(|line| !line.starts_with('#') && line.contains("incoming_dropped_no_rule"));
    let count = line.and_then(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
    count.unwrap_or_else(|| panic!("no such counter in {page}"))
}
