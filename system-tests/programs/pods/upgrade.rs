//! `nebula-cni-plugin upgrade`: another program takes over from the instance of a pod while its connections go on, with
//! each supervisor; and programs that do not take over, or die of it.
//!
//! `web` sends a UDP probe every 10 ms to `db`, the pod whose instance is replaced, and speaks with it by TCP.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::service_manager;
use crate::world;

use std::ffi::OsStr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use service_manager::{PLACE, Systemd};
use world::chaos::number;
use world::cluster::{Cluster, Node, answer_at, binary, links};
use world::run;
use world::traffic::{Flow, PROBE_EVERY};

const SOON: Duration = Duration::from_secs(20);
/// A gap that users do not see.
const SHORT: Duration = Duration::from_millis(200);
const INSTANCE: &str = "nebula-cni-instance";

struct Site {
    flow: Option<Flow>,
    cluster: Cluster,
    /// That of `db`.
    node: Node,
    /// Its supervisor, with processes of its own: the plugin runs among them.
    systemd: Option<Systemd>,
}

impl Site {
    fn new() -> Self {
        Self::with(Cluster::new(), |_, _| None)
    }

    fn of_systemd() -> Self {
        Self::with(Cluster::below(Path::new(PLACE)), |cluster, node| {
            let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of("n2")));
            node.conf["plugins"][1]["supervisor"] = "systemd".into();
            node.bus = Some(systemd.bus());
            Some(systemd)
        })
    }

    fn with(mut cluster: Cluster, supervise: impl FnOnce(&Cluster, &mut Node) -> Option<Systemd>) -> Self {
        let one = cluster.node("n1", "1.0.0");
        let mut node = cluster.node("n2", "1.0.0");
        let systemd = supervise(&cluster, &mut node);
        node.own_program();
        let mut site = Self { flow: None, cluster, node, systemd };
        one.add_pods(&mut site.cluster.world, &["web"]);
        site.node.add_pods(&mut site.cluster.world, &["db"]);
        let db = site.node.overlay("db");
        site.cluster.world.ping("web", &db, SOON);
        site.flow = Some(Flow::start(&site.cluster.world, "web", "db", db.parse().expect("an address")));
        site
    }

    /// Installs a shell script.
    fn install_script(&self, text: &str) {
        let script = self.node.dir.join("script");
        std::fs::write(&script, format!("#!/bin/sh\n{text}\n")).expect("a script");
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).expect("rights");
        self.node.install(&script);
    }

    fn flow(&self) -> &Flow {
        self.flow.as_ref().expect("it was started")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.node.upgrade(&self.cluster.world, "db");
        command.args(words);
        command
    }

    /// What the plugin answers, or the error that it prints.
    fn ask(&self, words: &[&str]) -> Result<Value, Value> {
        let (said, complaint) = match &self.systemd {
            Some(systemd) => {
                // Without what leads into the node's network, where the units are already.
                let line: Vec<_> = self.command(words).get_args().skip(1).map(OsStr::to_os_string).collect();
                let line: Vec<_> = line.iter().filter_map(|word| word.to_str()).collect();
                (systemd.sh(&line.join(" ")).into_bytes(), Vec::new())
            }
            None => {
                let output = self.command(words).output().expect("the plugin runs");
                (output.stdout, output.stderr)
            }
        };
        let said: Value = serde_json::from_slice(&said).unwrap_or_else(|_| {
            let [said, complaint] = [said, complaint].map(|text| String::from_utf8_lossy(&text).into_owned());
            panic!("{said} {complaint}\n{}", self.logs())
        });
        if said["code"].is_null() { Ok(said) } else { Err(said) }
    }

    fn upgrade(&self, words: &[&str]) -> i32 {
        let before = self.pid();
        let answer = self.ask(words).unwrap_or_else(|error| panic!("{error}\n{}", self.logs()));
        assert_eq!(answer["upgraded"], true, "{answer}");
        assert_eq!(answer["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!((answer["pid"].clone(), self.pid() != before), (self.pid().into(), true), "{answer}");
        self.pid()
    }

    fn refused(&self, words: &[&str]) -> String {
        self.ask(words).expect_err("it was accepted").to_string()
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.node.status("db")["pid"].as_u64().expect("a process id")).expect("a process id")
    }

    /// Processes with the launch file of `db`.
    fn instances(&self) -> Vec<i32> {
        let launch = self.node.records().join("db-eth0.launch").display().to_string();
        let entries = std::fs::read_dir("/proc").expect("/proc");
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let runs = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            // A launcher has it among its arguments, too, until it becomes the instance.
            line.split(|byte| *byte == 0).any(|word| word == launch.as_bytes())
        };
        pids.filter(runs).collect()
    }

    fn logs(&self) -> String {
        format!("{}{}", self.node.instance_logs(), self.cluster.world.all_logs())
    }

    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let end = Instant::now() + SOON;
        while !holds() {
            assert!(Instant::now() < end, "not in time: {what}\n{}", self.logs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// That traffic goes on, with the same TCP connection, without any outage since [`Flow::watch`], and that the one
    /// instance is confined.
    fn assert_well(&self) {
        thread::sleep(Duration::from_millis(300));
        assert_eq!(self.flow().broken(), None, "{}", self.logs());
        let (answers, silence) = (self.flow().answers(), self.flow().silence());
        assert!(answers.0 > 0 && answers.1 > 0 && silence.1 < SHORT, "{answers:?} {silence:?}\n{}", self.logs());
        assert_eq!(self.instances().len(), 1, "{}", self.logs());
        if self.systemd.is_none() {
            assert_eq!(self.instances(), [self.pid()]);
            assert_eq!(self.node.capabilities("db"), Vec::<String>::new());
        }
        self.node.chain_ok(&self.cluster.world, "check", "db");
    }

    /// The longest silence beyond a probe's interval of some upgrades.
    fn gaps(&self, count: u64) -> Vec<Duration> {
        let mut gaps = Vec::new();
        for _ in 0..count {
            self.node.install(&binary(INSTANCE));
            // A gap ends before the next begins.
            thread::sleep(Duration::from_millis(300));
            self.flow().watch();
            self.upgrade(&[]);
            thread::sleep(Duration::from_millis(300));
            gaps.push(self.flow().silence().1.saturating_sub(PROBE_EVERY));
            assert_eq!(self.flow().lost(), 0, "{}", self.logs());
        }
        gaps.sort();
        gaps
    }

    fn end(mut self) -> Option<Systemd> {
        self.flow = None;
        self.node.chain_ok(&self.cluster.world, "del", "db");
        assert_eq!(self.node.leftovers(), Vec::<PathBuf>::new());
        assert_eq!(self.instances(), Vec::<i32>::new());
        assert_eq!(links(&self.cluster.world.namespace_of("db")), ["lo"]);
        self.systemd.take()
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
    let gaps = site.gaps(number("UPGRADES", 5));
    println!(
        "longest silence beyond a probe's interval: p50 {:?}, max {:?}",
        gaps[gaps.len() / 2],
        gaps[gaps.len() - 1]
    );
    assert!(gaps[gaps.len() - 1] < SHORT, "{gaps:?}");
    assert_eq!((device(), &site.node.status("db")["certificate"]), (before, &certificate));
    // And back to the program before.
    site.flow().watch();
    site.upgrade(&["--previous"]);
    assert_eq!(site.ask(&["--previous"]).expect("the plugin answers")["upgraded"], false);
    site.assert_well();
    assert!(!site.node.instance_logs().contains("level=ERROR"), "{}", site.node.instance_logs());
    site.end();
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_program_that_does_not_take_over_from_an_instance_changes_nothing() {
    let site = Site::new();
    site.flow().watch();
    let pid = site.pid();
    let installed = site.node.installed();
    site.install_script("echo it has no mind to >&2; exit 3");
    let said = site.refused(&[]);
    assert!(said.contains("goes on with the program that it had") && said.contains("no mind to"), "{said}");
    let began = Instant::now();
    site.install_script("exec sleep 60");
    let said = site.refused(&[]);
    assert!(said.contains("not ready in time") && began.elapsed() < Duration::from_secs(10), "{said}");
    site.node.install(&binary(INSTANCE));
    std::fs::set_permissions(&installed, PermissionsExt::from_mode(0o777)).expect("rights");
    let said = site.refused(&[]);
    assert!(said.contains("others may write"), "{said}");
    site.node.install(&binary(INSTANCE));
    chown(&installed, Some(65534), None).expect("another owner");
    let said = site.refused(&[]);
    assert!(said.contains("another user"), "{said}");
    assert_eq!(site.pid(), pid);
    // Another user reaches neither the socket nor the instance behind it.
    let socket = site.node.status_socket("db").with_extension("successor");
    let script = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])";
    let socket = socket.display().to_string();
    let output = Command::new("setpriv")
        .args(["--reuid", "65534", "--clear-groups", "--inh-caps=-all", "/usr/bin/python3", "-c", script, &socket])
        .output()
        .expect("setpriv");
    assert!(String::from_utf8_lossy(&output.stderr).contains("PermissionError"), "{output:?}");
    site.assert_well();
    site.end();
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn whichever_instance_is_killed_at_whatever_moment_of_an_upgrade_one_serves_in_the_end() {
    let site = Site::new();
    let mut outcomes = [0; 3];
    for round in 0..number("UPGRADE_KILLS", 20) {
        let (kills_new, delay) = (round % 2 == 0, Duration::from_millis(round / 2));
        site.node.install(&binary(INSTANCE));
        let old = site.pid();
        let mut asked = site.command(&[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the plugin");
        let end = Instant::now() + SOON;
        let new = loop {
            if let Some(new) = site.instances().into_iter().find(|pid| *pid != old) {
                break new;
            }
            assert!(Instant::now() < end, "no new process\n{}", site.logs());
        };
        thread::sleep(delay);
        let _ = kill(Pid::from_raw(if kills_new { new } else { old }), Signal::SIGKILL);
        asked.wait().expect("the plugin");
        // Where the instance died that served, the agent's next look starts another one.
        run(
            &binary("nebula-cni-plugin").display().to_string(),
            &["reconcile", &site.node.dir.join("state").display().to_string()],
        );
        let answers = || answer_at(&site.node.status_socket("db")).is_ok_and(|status| status["state"] == "running");
        site.until("an instance that serves", || answers() && site.instances().len() == 1);
        let serves = site.pid();
        outcomes[if serves == old {
            0
        } else if serves == new {
            1
        } else {
            2
        }] += 1;
        site.flow().watch();
        site.until("traffic goes on", || site.flow().answers().1 > 20);
    }
    println!(
        "serves in the end: the old one {}, the new one {}, a third one {}",
        outcomes[0], outcomes[1], outcomes[2]
    );
    site.flow().watch();
    site.assert_well();
    site.end();
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
    let gaps = site.gaps(number("UPGRADES", 5));
    println!(
        "longest silence beyond a probe's interval: p50 {:?}, max {:?}",
        gaps[gaps.len() / 2],
        gaps[gaps.len() - 1]
    );
    assert!(gaps[gaps.len() - 1] < SHORT, "{gaps:?}");
    // They alternate between two units.
    if number("UPGRADES", 5).is_multiple_of(2) {
        site.node.install(&binary(INSTANCE));
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
    site.node.install(&binary(INSTANCE));
    site.upgrade(&[]);
    assert_eq!(units(), first);
    let systemd = site.end();
    assert_eq!(systemd.expect("it was started").units(), "");
}
