//! Programs as the first process of a container, which the kernel spares every signal that they do not handle: each
//! ends promptly when its pod is deleted, whatever it waits for.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::loopback::Network;
use crate::world::cluster::binary;

/// A program that is process 1 of a pid namespace, with its output in a file.
struct First {
    unshare: Child,
    log: std::path::PathBuf,
}

impl First {
    fn start(program: &Path, arguments: &[&str], dir: &Path) -> Self {
        let log = dir.join("log");
        let output = fs::File::create(&log).expect("a file");
        let unshare = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "--net", "--mount-proc"])
            // A /run of its own: the agent keeps its files there.
            .args(["sh", "-c", r#"mount -t tmpfs tmpfs /run && exec "$0" "$@""#])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("a descriptor"))
            .stderr(output)
            .spawn()
            .expect("unshare starts");
        Self { unshare, log }
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its process id on this machine.
    fn pid(&self) -> Option<i32> {
        let id = self.unshare.id();
        fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?.split_whitespace().next()?.parse().ok()
    }

    /// Sends `signal` once the output has `text`, and returns how it ended, and after what time.
    fn ended_by(mut self, signal: Signal, text: &str) -> (ExitStatus, Duration) {
        let until = Instant::now() + Duration::from_secs(60);
        while self.pid().is_none() || !self.log().contains(text) {
            assert!(Instant::now() < until, "no {text:?} in {:?}", self.log());
            thread::sleep(Duration::from_millis(10));
        }
        // Not in the moment in which it has not even blocked signals.
        thread::sleep(Duration::from_millis(300));
        let began = Instant::now();
        kill(Pid::from_raw(self.pid().expect("it runs")), signal).expect("a signal");
        loop {
            if let Some(status) = self.unshare.try_wait().expect("a child") {
                return (status, began.elapsed());
            }
            if began.elapsed() > Duration::from_secs(20) {
                let _ = self.unshare.kill();
                panic!("still there after {:?}: {}", began.elapsed(), self.log());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn ends_within_a_second(first: First, signal: Signal, text: &str, code: i32) {
    let (status, after) = first.ended_by(signal, text);
    assert!(after < Duration::from_secs(1), "{after:?}");
    assert_eq!((status.code(), status.signal()), (Some(code), None));
}

/// A folder with a token, and a TLS root whose CA nobody asks.
fn proofs() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    let root = rcgen::generate_simple_self_signed(vec!["ca".to_owned()]).expect("a certificate");
    fs::write(dir.path().join("tls.crt"), root.cert.pem()).expect("a file");
    fs::write(dir.path().join("token"), "token").expect("a file");
    dir
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn the_enrolment_of_a_lighthouse_ends_while_it_waits_for_the_ca() {
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let dir = proofs();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let (tls, token, out) = (path("tls.crt"), path("token"), path("out"));
        let arguments = ["-kubernetes", "-ca-url", "https://192.0.2.1:8443", "-tls-ca", &tls, "-token-file", &token];
        let arguments = [&arguments[..], &["-out-dir", &out]].concat();
        let first = First::start(&binary("nebula-enrol"), &arguments, dir.path());
        ends_within_a_second(first, signal, "trying again", code);
        let left: Vec<_> = fs::read_dir(&out).expect("the folder").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["host.key"], "what the next attempt goes on with");
    }
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn the_init_container_of_a_pod_ends_while_it_waits_for_the_instance() {
    let dir = proofs();
    let (token, out) = (dir.path().join("token").display().to_string(), dir.path().display().to_string());
    let first = First::start(&binary("nebula-cni-init"), &["-token-file", &token, "-out-dir", &out], dir.path());
    ends_within_a_second(first, Signal::SIGTERM, "", 143);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn the_daemon_ends() {
    let network = Network::new();
    let more = "tun: {disabled: true}\nlisten: {host: 127.0.0.1, port: 0}\n";
    let config = network.configure("lighthouse", &["10.42.0.7/16"], more);
    let first = First::start(
        &binary("nebula"),
        &["-config", &config.display().to_string()],
        config.parent().expect("a folder"),
    );
    ends_within_a_second(first, Signal::SIGTERM, "Nebula interface is active", 0);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn the_ca_ends_also_while_its_database_does_not_answer() {
    let dir = tempfile::tempdir().expect("a folder");
    let ca = dir.path().join("ca");
    let made = Command::new(binary("nebula-ca")).args(["init", "--dir"]).arg(&ca).output().expect("a program");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let text = ca.display().to_string();
    let serve = ["serve", "--dir", &text, "--listen", "127.0.0.1:0"];
    let first = First::start(&binary("nebula-ca"), &serve, dir.path());
    ends_within_a_second(first, Signal::SIGTERM, "listening", 0);

    // It accepts connections, and that is all.
    let _database = UnixListener::bind(dir.path().join(".s.PGSQL.5432")).expect("a socket");
    let url = ca.join("database.url");
    fs::write(&url, format!("host={} user=x dbname=x", dir.path().display())).expect("a file");
    fs::set_permissions(&url, fs::Permissions::from_mode(0o600)).expect("a mode");
    let first = First::start(&binary("nebula-ca"), &serve, dir.path());
    let (status, after) = first.ended_by(Signal::SIGTERM, "");
    assert!(status.code() == Some(0) && after < Duration::from_secs(7), "{status:?} after {after:?}");
}

/// In its pod the agent is not the first process, as it shares the node's process ids.
#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn the_agent_ends_while_a_program_of_the_node_hangs() {
    let dir = proofs();
    let path = |name: &str| dir.path().join(name).display().to_string();
    for name in ["nebula-cni-instance", "nebula-cni-plugin"] {
        let program = path(name);
        fs::write(&program, format!("#!/bin/sh\ntouch {}\nexec sleep 8\n", path("called"))).expect("a file");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    let config = serde_json::json!({"ca": {"url": "https://192.0.2.1:8443"}, "listen": "127.0.0.1:0",
        "confDirs": [path("net.d")], "binDirs": [path("bin")], "entry": {}});
    fs::write(path("agent.json"), config.to_string()).expect("a file");
    let (config, token, trust) = (path("agent.json"), path("token"), path("tls.crt"));
    let arguments = ["run", "--config", &config, "--token-file", &token, "--trust-file", &trust, "--programs"];
    let arguments = [&arguments[..], &[dir.path().to_str().expect("UTF-8")]].concat();
    let first = First::start(&binary("nebula-cni-agent"), &arguments, dir.path());
    let until = Instant::now() + Duration::from_secs(20);
    while !dir.path().join("called").exists() {
        assert!(Instant::now() < until, "{}", first.log());
        thread::sleep(Duration::from_millis(10));
    }
    let (status, after) = first.ended_by(Signal::SIGTERM, "");
    assert!(after < Duration::from_secs(7), "{after:?}");
    assert_eq!(status.code(), Some(0));
}
