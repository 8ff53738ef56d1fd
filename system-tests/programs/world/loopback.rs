//! Credentials and configurations of hosts, and daemons without devices on loopback; needs no privileges or namespaces.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nebula_cert::{Certificate, Curve, PrivateKey, SigningKey, Template};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A CA, and the files of all hosts.
pub struct Network {
    folder: tempfile::TempDir,
    ca: Certificate,
    ca_key: SigningKey,
    /// Expiry of the hosts' certificates.
    not_after: i64,
}

impl Network {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ca_key = SigningKey::generate(Curve::Curve25519).unwrap();
        let ca = template("ca", ca_key.public_key(), &[]).self_sign(&ca_key).unwrap();
        std::fs::write(folder.path().join("ca.crt"), ca.to_pem()).unwrap();
        Self { folder, ca, ca_key, not_after: LATE }
    }

    /// A network whose hosts' certificates expire at `not_after`, in seconds since the Unix epoch.
    pub fn ending(not_after: i64) -> Self {
        Self { not_after, ..Self::new() }
    }

    /// Writes credentials and `NAME.yml` of a new host; `more` is its configuration besides the credentials.
    pub fn configure(&self, name: &str, networks: &[&str], more: &str) -> PathBuf {
        self.configure_as(name, name, &[], networks, more)
    }

    /// Like [`Network::configure`], for a host whose certificate has another name than its files, and groups.
    pub fn configure_as(&self, name: &str, certified: &str, groups: &[&str], networks: &[&str], more: &str) -> PathBuf {
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let groups = groups.iter().map(|group| (*group).to_owned()).collect();
        let template =
            Template { not_after: self.not_after, groups, ..template(certified, key.public_key(), networks) };
        let certificate = template.sign(&self.ca, &self.ca_key).unwrap();
        let path = |suffix: &str| self.folder.path().join(format!("{name}.{suffix}"));
        std::fs::write(path("crt"), certificate.to_pem()).unwrap();
        std::fs::write(path("key"), key.to_pem().as_str()).unwrap();
        let config = path("yml");
        std::fs::write(&config, format!("{}{more}\n", self.pki(name))).unwrap();
        config
    }

    fn pki(&self, name: &str) -> String {
        let at = self.folder.path().display();
        format!("pki: {{ca: {at}/ca.crt, cert: {at}/{name}.crt, key: {at}/{name}.key}}\n")
    }

    /// Starts `program` as a new host without a device; `more` is its configuration besides device and credentials.
    pub fn start(&self, program: &Path, name: &str, networks: &[&str], more: &str) -> Daemon {
        self.start_as(program, name, name, &[], networks, more)
    }

    /// Like [`Network::start`], for a host whose certificate has another name than its files, and groups.
    pub fn start_as(
        &self,
        program: &Path,
        name: &str,
        certified: &str,
        groups: &[&str],
        networks: &[&str],
        more: &str,
    ) -> Daemon {
        let has_tun = more.lines().any(|line| line.starts_with("tun:"));
        let device = if has_tun { "" } else { "tun: {disabled: true}\n" };
        let fixed = format!("{}{device}", self.pki(name));
        let config = self.configure_as(name, certified, groups, networks, &format!("{device}{more}"));
        let log = config.with_extension("log");
        let output = std::fs::File::create(&log).unwrap();
        let child = Command::new(program)
            .arg("-config")
            .arg(&config)
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Daemon { child, config, log, fixed }
    }
}

fn template(name: &str, public_key: Vec<u8>, networks: &[&str]) -> Template {
    Template {
        networks: networks.iter().map(|network| network.parse().unwrap()).collect(),
        public_key,
        ..Template::new(name, 1..=LATE)
    }
}

const LATE: i64 = 5_000_000_000;

/// A running program; stopped on drop.
pub struct Daemon {
    child: Child,
    config: PathBuf,
    log: PathBuf,
    fixed: String,
}

impl Daemon {
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// The configuration file.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// Replaces the configuration.
    pub fn write(&self, more: &str) {
        self.replace(&format!("{}{more}\n", self.fixed));
    }

    /// Replaces the whole file by rename, as an editor does: a daemon that watches it never sees half of one.
    pub fn replace(&self, text: &str) {
        let new = self.config.with_extension("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, &self.config).unwrap();
    }

    /// Replaces the configuration and triggers a reload.
    pub fn reload(&self, more: &str) {
        self.write(more);
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGHUP).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

pub fn ours() -> PathBuf {
    built("nebula")
}

/// A program of the build that this test belongs to: cargo puts it beside the folder of the tests.
pub fn built(program: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(Path::parent).unwrap().join(program);
    assert!(path.exists(), "{} is missing: cargo test --workspace --no-run builds it", path.display());
    path
}

/// Go Nebula 1.11.0.
pub fn go() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/sid/usr/bin/nebula");
    assert!(path.exists(), "{} is missing: run .ci/go-nebula first", path.display());
    path
}

pub fn free_tcp_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub fn free_udp_port() -> u16 {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
