//! `nebula ctl upgrade`: another program takes over from the running daemon while traffic goes on, beside ours and Go
//! 1.11; and programs that do not take over, or die of it.
//!
//! `o` sends a UDP probe every 10 ms to `p`, the host that is upgraded, and speaks with it by TCP. They find each other
//! through the lighthouse `l`.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::net::Ipv4Addr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use world::chaos::number;
use world::load::{Gaps, Load};
use world::mesh::Mesh;
use world::nonces::Nonces;
use world::peers::{go, ours};
use world::traffic::{Flow, PROBE_EVERY};
use world::{World, run};

const SOON: Duration = Duration::from_secs(30);
const MEMBERS: [&str; 3] = ["l", "o", "p"];
const MESH: Mesh<'_> = Mesh { members: &MEMBERS, network: [10, 78], interval: 10 };

struct Site {
    flow: Option<Flow>,
    world: World,
    /// The daemon of `p`.
    pid: i32,
}

/// How the datagrams of `p` reach `o`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    /// Through `l`.
    Relayed,
    /// `p` is behind a NAT that lets no new connections in.
    Translated,
}

impl Way {
    fn prepare(self, world: &World, [_, o, p]: [Ipv4Addr; 3]) {
        match self {
            Self::Direct => {}
            Self::Relayed => {
                for (end, other) in [("o", p), ("p", o)] {
                    run("ip", &["-n", &world.namespace_of(end), "route", "add", "blackhole", &other.to_string()]);
                }
            }
            Self::Translated => {
                let rules = "table ip nat {
  chain out { type nat hook postrouting priority srcnat; udp sport 4242 masquerade to :30000-40000 random; }
  chain in { type filter hook input priority 0; udp dport 4242 ct state new drop; }
}";
                let file = world.write("nat.nft", rules).display().to_string();
                world.run("p", &["nft", "-f", &file]);
            }
        }
    }

    /// The configuration of a host.
    fn section(self, name: &str) -> String {
        match (self, name) {
            (Self::Direct, _) => String::new(),
            (Self::Relayed, "l") => "relay: {am_relay: true}".to_owned(),
            (Self::Relayed, _) => format!("relay: {{relays: [{}], use_relays: true}}", MESH.overlay("l")),
            (Self::Translated, _) => "punchy: {punch: true, respond: true, delay: 100ms}".to_owned(),
        }
    }
}

impl Site {
    /// `peer` is the program of `o` and `l`.
    fn new(peer: &Path) -> Self {
        Self::by(Way::Direct, peer)
    }

    fn by(way: Way, peer: &Path) -> Self {
        let mut site = Self::started(way, peer);
        site.flow = Some(Flow::start(&site.world, "o", "p", MESH.overlay("p")));
        site
    }

    fn started(way: Way, peer: &Path) -> Self {
        let mut world = World::new();
        let hosts = MEMBERS.map(|name| world.host(name));
        let lighthouse = hosts[0];
        way.prepare(&world, hosts);
        world.certify(&["ca", "-name", "upgrade", "-version", "1"]);
        for name in MEMBERS {
            world.certify(&["sign", "-name", name, "-networks", &format!("{}/24", MESH.overlay(name))]);
            let socket = world.dir().join(format!("{name}.sock")).display().to_string();
            let stats = "stats: {type: prometheus, listen: '127.0.0.1:9100', path: /metrics, interval: 10s}";
            let more = format!("daemon: {{control_socket: {socket}}}\n{stats}\n{}", way.section(name));
            MESH.configure(&world, name, lighthouse.into(), &more);
        }
        let mut site = Self { flow: None, world, pid: 0 };
        for name in ["l", "o"] {
            let config = site.config(name);
            site.world.start(name, peer, &["-config", &config]);
        }
        site.start();
        for name in ["o", "p"] {
            site.world.ping(name, &MESH.overlay("l").to_string(), SOON);
        }
        site.world.ping("p", &MESH.overlay("o").to_string(), SOON);
        site.world.ping("o", &MESH.overlay("p").to_string(), SOON);
        site
    }

    fn config(&self, name: &str) -> String {
        self.world.dir().join(format!("{name}.yml")).display().to_string()
    }

    fn start(&mut self) {
        let config = self.config("p");
        self.world.start("p", &ours(), &["-config", &config]);
        self.pid = i32::try_from(self.world.pid("p")).expect("a process id");
    }

    fn flow(&self) -> &Flow {
        self.flow.as_ref().expect("it was started")
    }

    /// The answer of `nebula ctl upgrade`, or what it says on standard error.
    fn ask(&self, words: &[&str]) -> Result<Value, String> {
        let socket = self.world.dir().join("p.sock").display().to_string();
        let words = [&["ctl", "--socket", &socket, "--json", "upgrade"][..], words].concat();
        let output = Command::new(ours()).args(words).output().expect("nebula ctl");
        if output.stdout.is_empty() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        Ok(serde_json::from_slice(&output.stdout).expect("a document"))
    }

    fn upgrade(&mut self) -> Value {
        let before = self.pid;
        let answer = self.ask(&["--unsupervised"]).unwrap_or_else(|error| panic!("{error}{}", self.world.all_logs()));
        self.pid = i32::try_from(answer["pid"].as_u64().expect("a process id")).expect("a process id");
        assert_ne!(self.pid, before);
        answer
    }

    /// Processes with the configuration of `p`.
    fn daemons(&self) -> Vec<i32> {
        let config = self.config("p");
        let entries =
            std::fs::read_dir("/proc").expect("/proc").filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let pids = entries.filter_map(|name| name.parse().ok());
        let runs = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|word| word == config.as_bytes())
        };
        pids.filter(runs).collect()
    }

    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let end = Instant::now() + SOON;
        while !holds() {
            assert!(Instant::now() < end, "not in time: {what}\n{}", self.world.all_logs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// That traffic goes on, with the same TCP connection, and nothing is left of other processes.
    fn assert_well(&self, silence: Duration) {
        self.flow().watch();
        thread::sleep(Duration::from_millis(500));
        assert_eq!(self.flow().broken(), None, "{}", self.world.all_logs());
        let (answers, heard) = (self.flow().answers(), self.flow().silence());
        assert!(
            answers.0 > 0 && answers.1 > 0 && heard.1 < silence,
            "{answers:?} {heard:?}\n{}",
            self.world.all_logs()
        );
        assert_eq!(self.daemons(), [self.pid], "{}", self.world.all_logs());
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.flow = None;
        for pid in self.daemons() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn upgrades_under_traffic_lose_no_probe_and_no_connection() {
    for (name, peer) in [("ours", ours()), ("Go 1.11", go("nebula", "sid"))] {
        let mut site = Site::new(&peer);
        let mut gaps = Vec::new();
        for _ in 0..number("UPGRADES", 5) {
            // A gap ends before the next begins.
            thread::sleep(Duration::from_millis(300));
            site.flow().watch();
            let answer = site.upgrade();
            assert!(
                answer["rolled_back"].is_null() && answer["peers"] == 2 && answer["flows"].as_u64() > Some(1),
                "{answer}"
            );
            thread::sleep(Duration::from_millis(300));
            gaps.push(site.flow().silence().1.saturating_sub(PROBE_EVERY));
            assert_eq!(site.flow().lost(), 0, "{name}\n{}", site.world.all_logs());
        }
        site.assert_well(Duration::from_millis(200));
        // Listeners are opened when the old process has left their ports.
        site.world.run("p", &["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9100"]);
        assert!(!site.world.log("p").contains("level=ERROR"), "{}", site.world.log("p"));
        gaps.sort();
        let (p50, max) = (gaps[gaps.len() / 2], gaps[gaps.len() - 1]);
        println!(
            "{name}: {} upgrades, longest silence beyond a probe's interval: p50 {p50:?}, max {max:?}",
            gaps.len()
        );
        assert!(max <= Duration::from_millis(200), "{gaps:?}");
    }
}

/// `UPGRADES` says how many; a full run has 50. The bars are beyond one round trip, which takes less than a
/// millisecond here.
#[test]
#[ignore = "needs root and network namespaces"]
fn upgrades_under_load_end_no_connection_whatever_way_datagrams_take() {
    let upgrades = number("UPGRADES", 1);
    for way in [Way::Direct, Way::Relayed, Way::Translated] {
        for (name, peer) in [("ours", ours()), ("Go 1.11", go("nebula", "sid"))] {
            let mut site = Site::started(way, &peer);
            let nonces = Nonces::record(&site.world, "p", &MEMBERS, 4242);
            let load = Load::start(&site.world, ("o", "p", (MESH.overlay("p"), 0).into()), None, 8, 200);
            let mut gaps = Gaps::default();
            for n in 0..upgrades {
                let broken = gaps.measure(&load, || drop(site.upgrade()));
                assert_eq!(broken, None, "{way:?}, {name}, upgrade {n}\n{}", site.world.all_logs());
            }
            println!("{way:?}, {name}: {gaps}");
            assert!(gaps.longest() <= Duration::from_millis(200), "{way:?}, {name}: {gaps:?}");
            assert!(way != Way::Direct || gaps.lost == 0, "{name}: {gaps}");
            drop(load);
            let seen = nonces.finish();
            let (tunnels, datagrams) = seen.counts();
            println!("{tunnels} keys and {datagrams} nonces seen");
            assert_eq!((&seen.reused, seen.merged), (&Vec::new(), 0), "{way:?}, {name}");
            assert!(tunnels as u64 > 2 * upgrades && datagrams as u64 > gaps.sent, "{tunnels} {datagrams}");
        }
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_program_that_does_not_take_over_changes_nothing() {
    let site = Site::new(&ours());
    let folder = site.world.dir().join("programs");
    std::fs::create_dir(&folder).expect("a folder");
    let copy = |name: &str, from: &Path| {
        let path = folder.join(name);
        std::fs::copy(from, &path).expect("a copy");
        path
    };
    let (foreign, writable) = (copy("foreign", &ours()), copy("writable", &ours()));
    chown(&foreign, Some(65534), None).expect("another owner");
    std::fs::set_permissions(&writable, PermissionsExt::from_mode(0o777)).expect("rights");
    let (usual, other) = (ours(), go("nebula", "sid"));
    let text = |path: &Path| path.display().to_string();
    let wrong = "0".repeat(64);
    site.flow().watch();
    for (words, said) in [
        (vec![text(&usual)], "systemd does not supervise"),
        (vec!["--unsupervised".to_owned(), "nebula".to_owned()], "no absolute path"),
        (vec!["--unsupervised".to_owned(), text(&foreign)], "another user"),
        (vec!["--unsupervised".to_owned(), text(&writable)], "others may write"),
        (vec!["--unsupervised".to_owned(), "--sha256".to_owned(), wrong, text(&usual)], "was asked for"),
        (vec!["--unsupervised".to_owned(), "/bin/false".to_owned()], "ended before it was ready"),
        // It knows nothing of a hand-over, and finds the device in use.
        (vec!["--unsupervised".to_owned(), text(&other)], "ended before it was ready"),
    ] {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let refused = site.ask(&words).expect_err("it was accepted");
        assert!(refused.contains(said), "{words:?}: {refused}");
    }
    // A configuration with another device, which it could not open beside the running one.
    let config = site.config("p");
    let before = std::fs::read_to_string(&config).expect("the configuration");
    std::fs::write(&config, before.replace("neb0", "neb1")).expect("another configuration");
    let refused = site.ask(&["--unsupervised"]).expect_err("it was accepted");
    assert!(refused.contains("refused: "), "{refused}");
    std::fs::write(&config, "pki: nothing").expect("a wrong configuration");
    let refused = site.ask(&["--unsupervised"]).expect_err("it was accepted");
    assert!(refused.contains("ended before it was ready"), "{refused}");
    std::fs::write(&config, before).expect("the configuration");
    assert!(site.flow().silence().1 < Duration::from_millis(200), "{:?}", site.flow().silence());
    site.assert_well(Duration::from_millis(200));
}

#[test]
#[ignore = "needs root and network namespaces"]
fn whichever_process_is_killed_at_whatever_moment_one_serves_in_the_end() {
    let mut site = Site::new(&ours());
    let mut outcomes = [0; 4];
    for round in 0..number("UPGRADE_KILLS", 20) {
        let (kills_new, delay) = (round % 2 == 0, Duration::from_millis(round / 2));
        let (old, logged) = (site.pid, site.world.log("p").len());
        let socket = site.world.dir().join("p.sock").display().to_string();
        let mut asked = Command::new(ours())
            .args(["ctl", "--socket", &socket, "upgrade", "--unsupervised"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("nebula ctl");
        let end = Instant::now() + SOON;
        let new = loop {
            if let Some(child) = child_of(old) {
                break child;
            }
            assert!(Instant::now() < end, "no new process\n{}", site.world.all_logs());
        };
        thread::sleep(delay);
        let victim = if kills_new { new } else { old };
        let was_there = kill(Pid::from_raw(victim), Signal::SIGKILL).is_ok();
        let answered = asked.wait().expect("nebula ctl").success();
        site.until("one process", || site.daemons().len() <= 1);
        thread::sleep(Duration::from_millis(100));
        match site.daemons().as_slice() {
            [pid] => {
                // A third process is the old program, which took over again.
                assert!(
                    [old, new].contains(pid) || !answered,
                    "a failure that exits with 0\n{}",
                    site.world.all_logs()
                );
                outcomes[if *pid == old {
                    0
                } else if *pid == new {
                    1
                } else {
                    2
                }] += 1;
                site.pid = *pid;
            }
            // The new one was killed after it had taken over, or the old one before it could offer anything: then it is
            // up to whoever supervises the daemon.
            [] => {
                let log = site.world.log("p");
                let is_excused = if kills_new { answered } else { !log[logged..].contains("Ready to take over") };
                assert!(was_there && is_excused, "round {round}: nobody serves\n{}", site.world.all_logs());
                outcomes[3] += 1;
                site.world.stop("p", Signal::SIGKILL);
                site.start();
            }
            several => panic!("{several:?}"),
        }
        site.world.ping("o", &MESH.overlay("p").to_string(), SOON);
    }
    println!(
        "the old one served {} times, the new one {}, a third {}, and {} had to be started",
        outcomes[0], outcomes[1], outcomes[2], outcomes[3]
    );
    assert!(outcomes[0] > 0 && outcomes[1] > 0, "{outcomes:?}");
    site.flow = None;
    site.flow = Some(Flow::start(&site.world, "o", "p", MESH.overlay("p")));
    site.assert_well(Duration::from_millis(200));
}

/// A process that this one started and that has not ended.
fn child_of(pid: i32) -> Option<i32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok());
    children.collect::<String>().split_whitespace().next()?.parse().ok()
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_new_program_that_hangs_is_ended_and_the_old_one_goes_on() {
    let site = Site::new(&ours());
    let config = site.config("p");
    let before = std::fs::read_to_string(&config).expect("the configuration");
    // Nobody writes into it, so who reads it waits for ever.
    std::fs::remove_file(&config).expect("a configuration");
    nix::unistd::mkfifo(Path::new(&config), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    site.flow().watch();
    let refused = site.ask(&["--unsupervised"]).expect_err("it was accepted");
    assert!(refused.contains("not ready in time"), "{refused}");
    std::fs::remove_file(&config).expect("a pipe");
    std::fs::write(&config, before).expect("the configuration");
    assert!(site.flow().silence().1 < Duration::from_millis(200), "{:?}", site.flow().silence());
    site.assert_well(Duration::from_millis(200));
}
