//! `nebula-cni-plugin upgrade`: another program takes over from the instance of a pod while its connections go on, with
//! each supervisor; and programs that do not take over, or die of it.
//!
//! `web` sends a UDP probe every 10 ms to `db`, the pod whose instance is replaced, and speaks with it by TCP.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod gaps;

use crate::service_manager;
use crate::world;

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use service_manager::{PLACE, Systemd};
use world::chaos::number;
use world::cluster::{Cluster, Node, answer_at, binary, faulty_instance, gone_within, links};
use world::run;
use world::traffic::Flow;

const SOON: Duration = Duration::from_secs(20);
/// A gap that users do not see.
const SHORT: Duration = Duration::from_millis(200);
const INSTANCE: &str = "nebula-cni-instance";

pub(super) struct Site {
    pub(super) flow: Option<Flow>,
    pub(super) cluster: Cluster,
    /// That of `db`.
    pub(super) node: Node,
    /// Its supervisor, with processes of its own: the plugin runs among them.
    systemd: Option<Systemd>,
}

impl Site {
    fn new() -> Self {
        Self::with(Cluster::new(), |_, _| None)
    }

    /// With more settings of the chain's entry on the node of `db`.
    fn configured(settings: &Value) -> Self {
        Self::with(Cluster::new(), |_, node| {
            let entry = node.conf["plugins"][1].as_object_mut().expect("an entry");
            entry.extend(settings.as_object().expect("settings").clone());
            None
        })
    }

    pub(super) fn of_systemd() -> Self {
        Self::with(Cluster::below(Path::new(PLACE)), |cluster, node| {
            let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of("n2")));
            node.conf["plugins"][1]["supervisor"] = "systemd".into();
            node.bus = Some(systemd.bus());
            Some(systemd)
        })
    }

    /// Of [`Site::of_systemd`].
    pub(super) fn systemd(&self) -> &Systemd {
        self.systemd.as_ref().expect("it was started")
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
    pub(super) fn install_script(&self, text: &str) {
        let script = self.node.dir.join("script");
        std::fs::write(&script, format!("#!/bin/sh\n{text}\n")).expect("a script");
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).expect("rights");
        self.node.install(&script);
    }

    pub(super) fn flow(&self) -> &Flow {
        self.flow.as_ref().expect("it was started")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.node.upgrade(&self.cluster.world, "db");
        command.args(words);
        command
    }

    /// [`Site::command`] without what leads into the node's network, where units are already.
    fn line(&self, words: &[&str]) -> String {
        let command = self.command(words);
        command.get_args().skip(1).filter_map(OsStr::to_str).collect::<Vec<_>>().join(" ")
    }

    /// What the plugin answers, or the error that it prints.
    fn ask(&self, words: &[&str]) -> Result<Value, Value> {
        let (said, complaint) = match &self.systemd {
            Some(systemd) => (systemd.sh(&self.line(words)).into_bytes(), Vec::new()),
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

    pub(super) fn upgrade(&self, words: &[&str]) -> i32 {
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

    pub(super) fn pid(&self) -> i32 {
        i32::try_from(self.node.status("db")["pid"].as_u64().expect("a process id")).expect("a process id")
    }

    /// Processes with the launch file of `db`.
    pub(super) fn instances(&self) -> Vec<i32> {
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

    pub(super) fn logs(&self) -> String {
        format!("{}{}", self.node.instance_logs(), self.cluster.world.all_logs())
    }

    pub(super) fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let end = Instant::now() + SOON;
        while !holds() {
            assert!(Instant::now() < end, "not in time: {what}\n{}", self.logs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// That traffic goes on, with the same TCP connection, without any outage since [`Flow::watch`], and that the one
    /// instance is confined.
    pub(super) fn assert_well(&self) {
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

    pub(super) fn end(mut self) -> Option<Systemd> {
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
fn an_instance_that_names_another_process_as_its_own_gets_that_program_nowhere() {
    let site = Site::new();
    let mut status = site.node.status("db");
    let mut foreign = Command::new("sleep").arg("60").spawn().expect("a process");
    status["pid"] = foreign.id().into();
    // The directory belongs to the instance's user.
    let socket = site.node.status_socket("db");
    let aside = socket.with_extension("aside");
    std::fs::rename(&socket, &aside).expect("the socket is moved");
    let listener = UnixListener::bind(&socket).expect("a socket in its place");
    listener.set_nonblocking(true).expect("a listener");
    let stop = AtomicBool::new(false);
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((mut client, _)) => drop(write!(client, "{status}")),
                    Err(_) => thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        let error = site.refused(&[]);
        stop.store(true, Ordering::Relaxed);
        error
    });
    assert!(error.contains("another process answers in its place"), "{error}");
    let programs = std::fs::read_dir(site.node.installed().parent().expect("a folder")).expect("programs");
    assert_eq!(programs.count(), 2, "the installed one is kept for db, and nothing else was copied");
    std::fs::rename(&aside, &socket).expect("the socket is back");
    foreign.kill().and_then(|()| foreign.wait()).expect("it was there");
    site.flow().watch();
    site.assert_well();
    site.end();
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn an_instance_that_dies_starts_again_with_the_program_that_it_ran_and_goes_back_to_its_own() {
    starts_again_with_its_own_program(&Site::new());
}

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn a_unit_that_dies_starts_again_with_the_program_that_it_ran_and_goes_back_to_its_own() {
    starts_again_with_its_own_program(&Site::of_systemd());
}

/// With three programs on the node, none of which is installed any more.
fn starts_again_with_its_own_program(site: &Site) {
    let installed = site.node.installed();
    let content = || std::fs::read(&installed).expect("a program");
    let runs = |what: &str, program: &[u8]| {
        site.until(what, || {
            let [pid] = site.instances()[..] else { return false };
            let is_it = std::fs::read(format!("/proc/{pid}/exe")).is_ok_and(|bytes| bytes == program);
            is_it && answer_at(&site.node.status_socket("db")).is_ok_and(|status| status["state"] == "running")
        });
    };
    let dies = || {
        let [pid] = site.instances()[..] else { panic!("not one instance\n{}", site.logs()) };
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it is there");
        assert!(gone_within(pid.unsigned_abs().into(), SOON));
        if site.systemd.is_none() {
            let (plugin, state) = (binary("nebula-cni-plugin"), site.node.dir.join("state"));
            let words = [&plugin.display().to_string(), "reconcile", &state.display().to_string()];
            // Where the instance finds the CA.
            site.cluster.world.run("n2", &words);
        }
    };
    let first = content();
    // A pause: another program is installed, and this pod keeps the one that it has.
    site.node.install_another(&binary(INSTANCE));
    dies();
    runs("it has its program, not the installed one", &first);
    site.upgrade(&[]);
    let second = content();
    runs("the installed one took over", &second);
    // A third one, which another pod may run by now.
    site.node.install_another(&binary(INSTANCE));
    dies();
    runs("it has the second one", &second);
    site.upgrade(&["--previous"]);
    runs("it goes back to its own", &first);
    dies();
    runs("and keeps that", &first);
    assert_eq!(site.ask(&["--previous"]).expect("the plugin answers")["upgraded"], false);

    // Others may write what is kept: then what is installed is started.
    let kept = site.node.kept_program("db");
    std::fs::set_permissions(&kept, PermissionsExt::from_mode(0o777)).expect("rights");
    let third = content();
    if site.systemd.is_none() {
        dies();
        runs("nobody else's program is started as root", &third);
    }
    site.flow().watch();
    site.until("traffic goes on", || site.flow().answers().1 > 20);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn the_previous_program_takes_the_place_of_one_that_waits_for_a_certificate() {
    let mut site = Site::new();
    site.node.install_another(&binary(INSTANCE));
    let new = site.upgrade(&[]);
    site.flow = None;
    site.cluster.world.stop("control", Signal::SIGTERM);
    kill(Pid::from_raw(new), Signal::SIGKILL).expect("it is there");
    let reconcile = || {
        let state = site.node.dir.join("state").display().to_string();
        run(&binary("nebula-cni-plugin").display().to_string(), &["reconcile", &state])
    };
    let state = || answer_at(&site.node.status_socket("db")).map(|status| status["state"].clone()).unwrap_or_default();
    site.until("an instance without a certificate", || {
        reconcile();
        !state().is_null() && state() != "running"
    });
    site.node.install_another(&binary(INSTANCE));
    let said = site.refused(&[]);
    assert!(said.contains("has nothing to hand over"), "{said}");
    site.upgrade(&["--previous"]);
    assert_eq!(site.instances(), [site.pid()]);
    site.cluster.start_ca();
    site.until("a certificate", || state() == "running");
    let db = site.node.overlay("db");
    site.cluster.world.ping("web", &db, SOON);
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
    site.node.install_another(&binary(INSTANCE));
    std::fs::set_permissions(&installed, PermissionsExt::from_mode(0o777)).expect("rights");
    let said = site.refused(&[]);
    assert!(said.contains("others may write"), "{said}");
    site.node.install_another(&binary(INSTANCE));
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
fn the_old_program_takes_over_again_from_one_that_dies_as_it_takes_over() {
    let site = Site::new();
    let before = site.pid();
    site.flow().watch();
    let program = site.node.dir.join("faulty");
    // It dies in recvmmsg(2), where the old instance has stopped and waits for its confirmation.
    std::fs::write(&program, faulty_instance("kill 299")).expect("a program");
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("rights");
    site.node.install(&program);
    let error = site.ask(&[]).expect_err("it was accepted");
    assert_eq!(error["code"], 121, "{error}\n{}", site.logs());
    let is_old = || std::fs::read(format!("/proc/{}/exe", site.pid())).ok() == std::fs::read(binary(INSTANCE)).ok();
    assert!(is_old() && site.pid() != before, "another process of the old program serves: {error}");
    thread::sleep(Duration::from_millis(300));
    let (broken, silence) = (site.flow().broken(), site.flow().silence());
    assert!(broken.is_none() && silence.1 < Duration::from_secs(1), "{broken:?} {silence:?}\n{}", site.logs());
    println!("silence with two hand-overs: {silence:?}");
    site.flow().watch();
    site.assert_well();
    site.end();
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn whichever_instance_is_killed_at_whatever_moment_of_an_upgrade_one_serves_in_the_end() {
    one_serves_in_the_end(Site::new());
}

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn whichever_unit_is_killed_at_whatever_moment_of_an_upgrade_one_serves_in_the_end() {
    one_serves_in_the_end(Site::of_systemd());
}

fn one_serves_in_the_end(site: Site) {
    let mut outcomes = [0; 3];
    for round in 0..number("UPGRADE_KILLS", 20) {
        let (kills_new, delay) = (round % 2 == 0, Duration::from_millis(round / 2));
        site.node.install_another(&binary(INSTANCE));
        // As this test knows it: an instance below systemd knows its number there.
        let [old] = site.instances()[..] else { panic!("not one instance\n{}", site.logs()) };
        let new = thread::scope(|scope| {
            let asked = scope.spawn(|| site.ask(&[]));
            let end = Instant::now() + SOON;
            let new = loop {
                if let Some(new) = site.instances().into_iter().find(|pid| *pid != old) {
                    break new;
                }
                assert!(Instant::now() < end, "no new process\n{}", site.logs());
            };
            thread::sleep(delay);
            let killed = if kills_new { new } else { old };
            let _ = kill(Pid::from_raw(killed), Signal::SIGKILL);
            assert!(gone_within(killed.unsigned_abs().into(), SOON));
            let _ = asked.join().expect("the plugin");
            new
        });
        // Where the instance died that served, the agent's next look starts another one.
        let plugin = binary("nebula-cni-plugin").display().to_string();
        let state = site.node.dir.join("state").display().to_string();
        match &site.systemd {
            Some(systemd) => drop(systemd.sh(&format!("{plugin} reconcile {state}"))),
            None => drop(run(&plugin, &["reconcile", &state])),
        }
        let answers = || answer_at(&site.node.status_socket("db")).is_ok_and(|status| status["state"] == "running");
        site.until("an instance that serves", || answers() && site.instances().len() == 1);
        let serves = site.instances().first().copied().unwrap_or_default();
        outcomes[if serves == old {
            0
        } else if serves == new {
            1
        } else {
            2
        }] += 1;
        site.flow().watch();
        site.until("traffic goes on", || site.flow().answers().0 > 5 && site.flow().answers().1 > 20);
    }
    println!(
        "serves in the end: the old one {}, the new one {}, a third one {}",
        outcomes[0], outcomes[1], outcomes[2]
    );
    site.flow().watch();
    site.assert_well();
    site.end();
}
