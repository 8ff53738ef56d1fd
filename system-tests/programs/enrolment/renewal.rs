//! The daemon and the child that renews its certificate: a missing, hostile or killed `nebula-enrol`, and a killed
//! daemon.

use crate::loopback;
use crate::world::cluster::alive;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use loopback::{Network, ours};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A daemon of an enrolled host, in a folder with a `nebula-enrol` of the test's choice.
struct Enrolled {
    folder: tempfile::TempDir,
    child: Option<Child>,
}

impl Enrolled {
    fn new() -> Self {
        let (folder, network) = (tempfile::tempdir().unwrap(), Network::new());
        let config = network.configure("host", &["10.42.0.7/16"], "");
        let at = |name: &str| folder.path().join(name);
        for (from, to) in [("host.crt", "host.crt"), ("host.key", "host.key"), ("ca.crt", "ca.crt")] {
            std::fs::copy(config.with_file_name(from), at(to)).unwrap();
        }
        // Nobody listens there.
        std::fs::write(at("enrolment.json"), r#"{"version":1,"url":"https://127.0.0.1:1"}"#).unwrap();
        std::fs::write(
            at("config.yml"),
            format!(
                "pki: {{enrolment: {}}}\ntun: {{disabled: true}}\nlisten: {{host: 127.0.0.1, port: 0}}\n\
                 daemon: {{control_socket: false}}\n",
                at("enrolment.json").display()
            ),
        )
        .unwrap();
        // Its own folder, because it looks for the other program beside itself.
        std::fs::create_dir(at("bin")).unwrap();
        std::fs::copy(ours(), at("bin/nebula")).unwrap();
        Self { folder, child: None }
    }

    fn program(&self, name: &str) -> PathBuf {
        self.folder.path().join("bin").join(name)
    }

    /// Puts a script in the place of `nebula-enrol`, at once.
    fn script(&self, text: &str) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.program("new");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(path, self.program("nebula-enrol")).unwrap();
    }

    fn real_program(&self) {
        std::fs::copy(ours().with_file_name("nebula-enrol"), self.program("nebula-enrol")).unwrap();
    }

    fn start(&mut self) {
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        let mut command = Command::new(self.program("nebula"));
        command.arg("-config").arg(self.folder.path().join("config.yml"));
        // No nebula-enrol in PATH, but what scripts need.
        command.env("PATH", "/bin:/usr/bin").stdin(Stdio::null()).stderr(log.try_clone().unwrap()).stdout(log);
        self.child = Some(command.spawn().unwrap());
    }

    fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    fn wait(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !is_so(self) {
            assert!(Instant::now() < end, "{what}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn says(&self, text: &str) {
        self.wait(text, |host| host.log().contains(text));
    }

    /// A reload by signal works: the daemon is as well as before.
    fn is_well(&self) {
        let reloads = |host: &Self| host.log().matches("Client certificate(s) refreshed from disk").count();
        let before = reloads(self);
        self.signal(Signal::SIGHUP);
        self.wait("a reload", |host| reloads(host) > before);
    }

    /// The running child of the daemon.
    fn renewer(&self) -> Option<u32> {
        renewer_of(self.pid())
    }
}

impl Drop for Enrolled {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The child of a daemon, if it runs.
pub(crate) fn renewer_of(daemon: u32) -> Option<u32> {
    let threads = std::fs::read_dir(format!("/proc/{daemon}/task")).ok()?;
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok());
    children
        .collect::<String>()
        .split_whitespace()
        .find_map(|pid| pid.parse().ok())
        .filter(|pid: &u32| alive((*pid).into()))
}

const FOLLOWING: &str = r#"echo '{"event":"following","url":"https://ca.example"}'; exec sleep 600"#;

#[test]
fn a_missing_program_is_named_and_used_once_it_is_there() {
    let mut host = Enrolled::new();
    let up = Command::new(host.program("nebula")).args(["up", "token"]).env("PATH", "").output().unwrap();
    let said = String::from_utf8_lossy(&up.stderr).into_owned();
    assert_eq!(up.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot run nebula-enrol") && said.contains("nebula-overlay"), "{said}");
    host.start();
    host.says("The certificate of this host is not renewed");
    assert!(host.log().contains("cannot run nebula-enrol") && host.log().contains("nebula-overlay"), "{}", host.log());
    host.is_well();
    host.script(FOLLOWING);
    host.says("The certificate of this host is renewed by itself");
}

#[test]
fn nonsense_and_endless_lines_cost_a_log_line_and_a_new_child() {
    let mut host = Enrolled::new();
    host.script(concat!(
        "printf 'nonsense\\n\\n{\"event\":\"unheard_of\"}\\n{\"event\":\"renewed\"}\\n\\000\\377\\n'\n",
        "head -c 10000 /dev/zero | tr '\\000' x\n",
        "exec sleep 600"
    ));
    host.start();
    host.says("it said a line that is too long");
    let log = host.log();
    let first = log.split("it said a line that is too long").next().unwrap();
    assert_eq!(first.matches("said something unknown").count(), 5, "{log}");
    assert!(!log.contains("refreshed from disk") && !log.contains("was renewed"), "{log}");
    assert!(!log.contains("xxxxxxxx"), "{log}");
    host.is_well();
    // A child that ends at once is started again, and the better one after it is used.
    host.script("exit 3");
    host.says("exit status: 3");
    host.script(FOLLOWING);
    host.says("The certificate of this host is renewed by itself");
}

#[test]
fn a_child_that_talks_without_end_causes_a_few_reloads_a_second() {
    let mut host = Enrolled::new();
    host.script(r#"exec yes '{"event":"trust_changed","authorities":1,"standing":"good"}'"#);
    host.start();
    host.says("Trust changed");
    std::thread::sleep(Duration::from_secs(5));
    host.is_well();
    let reloads = host.log().matches("Trust changed").count();
    assert!((5..=90).contains(&reloads), "{reloads} reloads");
}

#[test]
fn a_killed_child_is_replaced_and_the_child_of_a_killed_daemon_ends() {
    let mut host = Enrolled::new();
    host.real_program();
    host.start();
    host.says("The certificate of this host is renewed by itself");
    let first = host.renewer().unwrap();
    kill(Pid::from_raw(first.cast_signed()), Signal::SIGTERM).unwrap();
    host.says("nebula-enrol ended; it is started again");
    host.wait("another child", |host| host.renewer().is_some_and(|pid| pid != first));
    // It asks for trust and waits; a daemon that cannot say goodbye takes it along.
    host.says("The CA does not say whom to trust");
    let second = host.renewer().unwrap();
    host.signal(Signal::SIGKILL);
    host.wait("the end of the child", |_| !alive(second.into()));
    // So does one that ends in order, without a word about it.
    host.start();
    host.says("The certificate of this host is renewed by itself");
    let third = host.renewer().unwrap();
    host.signal(Signal::SIGTERM);
    host.wait("the end of the child", |_| !alive(third.into()));
    assert!(!host.log().contains("ended; it is started again"), "{}", host.log());
}

#[test]
fn an_enrolment_that_cannot_be_used_is_told_and_tried_again() {
    let mut host = Enrolled::new();
    host.real_program();
    let file = Path::new("enrolment.json");
    let (path, kept) = (host.folder.path().join(file), host.folder.path().join("kept"));
    std::fs::rename(&path, &kept).unwrap();
    host.start();
    host.says("pki.enrolment cannot be used: the certificate of this host is not renewed");
    assert!(host.log().contains("enrolment.json"), "{}", host.log());
    host.is_well();
    std::fs::rename(&kept, &path).unwrap();
    host.says("The certificate of this host is renewed by itself");
}
