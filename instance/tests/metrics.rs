//! Metrics of ours beside those of Go Nebula 1.11.0. Both run without a device and on loopback only.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nebula_cert::{Curve, PrivateKey, SigningKey, Template, Version};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

struct Daemon {
    child: Child,
    folder: tempfile::TempDir,
}

impl Daemon {
    fn start(program: &Path, stats: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ca_key = SigningKey::generate(Curve::Curve25519).unwrap();
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let template = |name: &str, public_key, networks: &[&str]| Template {
            version: Version::V2,
            curve: Curve::Curve25519,
            name: name.to_owned(),
            networks: networks.iter().map(|network| network.parse().unwrap()).collect(),
            unsafe_networks: Vec::new(),
            groups: Vec::new(),
            not_before: 1,
            not_after: 5_000_000_000,
            public_key,
        };
        let ca = template("ca", ca_key.public_key(), &[]).self_sign(&ca_key).unwrap();
        let host = template("host", key.public_key(), &["10.42.0.7/16"]).sign(&ca, &ca_key).unwrap();
        std::fs::write(folder.path().join("ca.crt"), ca.to_pem()).unwrap();
        std::fs::write(folder.path().join("host.crt"), host.to_pem()).unwrap();
        std::fs::write(folder.path().join("host.key"), key.to_pem().as_str()).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        configure(folder.path(), stats);
        let child = Command::new(program)
            .arg("-config")
            .arg(folder.path().join("config.yml"))
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// Repeats until the answer, head included, has this text.
    fn fetch(&self, port: u16, path: &str, expected: &str) -> String {
        let until = Instant::now() + Duration::from_secs(15);
        loop {
            let found = get(port, path).unwrap_or_default();
            if found.contains(expected) {
                return found;
            }
            assert!(Instant::now() < until, "no {expected} at {path}: {found}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

fn configure(folder: &Path, stats: &str) {
    let at = folder.display();
    let text = format!(
        "pki: {{ca: {at}/ca.crt, cert: {at}/host.crt, key: {at}/host.key}}\ntun: {{disabled: true}}\n\
         listen: {{host: 127.0.0.1}}\nfirewall: {{inbound: [{{port: 22, proto: tcp, group: admin}}]}}\nstats: {stats}\n"
    );
    std::fs::write(folder.join("config.yml"), text).unwrap();
}

fn get(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    // Not 1.1: Go would send the text in chunks.
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn prometheus(port: u16, path: &str) -> String {
    format!("{{type: prometheus, listen: '127.0.0.1:{port}', path: {path}, namespace: nebula, interval: 1s}}")
}

fn ours() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_nebula"))
}

fn value(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// Names with their labels.
fn names(text: &str) -> BTreeSet<&str> {
    text.lines().filter(|line| line.starts_with("nebula_")).filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect()
}

#[test]
fn metrics_are_served_and_move_when_the_configuration_changes() {
    let (first, second) = (free_port(), free_port());
    let daemon = Daemon::start(&ours(), &prometheus(first, "/metrics"));
    let text = daemon.fetch(first, "/metrics", "200 OK");
    assert!(value(&text, "nebula_certificate_ttl_seconds") > 3e9, "{text}");
    assert_eq!(value(&text, "nebula_firewall_rules_version"), 0.0);
    assert!(value(&text, "nebula_udp_0_rcvbuf") > 0.0);
    daemon.fetch(first, "/other", " 404 ");
    configure(daemon.folder.path(), &prometheus(second, "/m"));
    kill(Pid::from_raw(daemon.child.id().cast_signed()), Signal::SIGHUP).unwrap();
    daemon.fetch(second, "/m", "200 OK");
    assert!(get(first, "/metrics").is_err(), "the former address still answers");
}

#[test]
fn every_metric_of_the_dashboard_exists() {
    let port = free_port();
    let daemon = Daemon::start(&ours(), &prometheus(port, "/metrics"));
    let text = daemon.fetch(port, "/metrics", "200 OK");
    let known: BTreeSet<&str> = names(&text).iter().map(|name| name.split('{').next().unwrap()).collect();
    let dashboard = include_str!("../../deploy/grafana-dashboard.json");
    let mut used = 0;
    for rest in dashboard.split("nebula_").skip(1) {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let name = format!("nebula_{}", &rest[..end]);
        assert!(known.contains(name.as_str()), "{name} is in the dashboard and nowhere else");
        used += 1;
    }
    assert!(used > 5);
}

#[test]
fn graphite_gets_lines() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap();
    let _daemon = Daemon::start(&ours(), &format!("{{type: graphite, host: '{host}', prefix: p, interval: 200ms}}"));
    let mut text = String::new();
    listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
    assert!(text.lines().any(|line| line.starts_with("p.certificate.ttl_seconds.value ")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("p.packets_in.count 0 ")), "{text}");
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn names_and_hashes_are_those_of_go() {
    let go = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/sid/usr/bin/nebula");
    let (port, go_port) = (free_port(), free_port());
    let (daemon, go) =
        (Daemon::start(&ours(), &prometheus(port, "/m")), Daemon::start(&go, &prometheus(go_port, "/m")));
    let (text, go_text) = (daemon.fetch(port, "/m", "200 OK"), go.fetch(go_port, "/m", "nebula_udp_0_rcvbuf"));
    let documented = include_str!("../../docs/metrics.md");
    let own = names(&text);
    let missing = names(&go_text).into_iter().filter(|name| {
        !own.contains(name)
            && !name.starts_with("nebula_info")
            && !["_runtime_", "_debug_"].iter().any(|part| name.contains(part))
            && !documented.contains(&format!("`{}`", name.trim_start_matches("nebula_")))
    });
    let missing: Vec<_> = missing.collect();
    assert!(missing.is_empty(), "neither here nor in docs/metrics.md: {missing:?}");
    for name in ["nebula_firewall_rules_hash", "nebula_certificate_max_version", "nebula_routines"] {
        assert_eq!(value(&text, name), value(&go_text, name), "{name}");
    }
}
