//! Daemons without devices on loopback, with credentials of any kind, and what they say about each other.

use std::net::{SocketAddr, UdpSocket};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nebula_cert::{Certificate, Curve, PrivateKey, SigningKey, Template};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::loopback::{free_udp_port, go, ours};

/// Whose program the peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Ours,
    Go,
}

impl Peer {
    fn program(self) -> PathBuf {
        match self {
            Self::Ours => ours(),
            Self::Go => go(),
        }
    }
}

pub(super) struct Site(tempfile::TempDir);

pub(super) struct Ca {
    certificate: Certificate,
    key: SigningKey,
}

/// A host that is to be started.
pub(super) struct Spec<'a> {
    pub(super) name: &'static str,
    /// The name in its certificate.
    pub(super) certified: &'static str,
    pub(super) address: &'static str,
    pub(super) ca: &'a Ca,
    /// CAs that it trusts.
    pub(super) trusts: &'a [&'a Ca],
    pub(super) validity: RangeInclusive<i64>,
    pub(super) port: u16,
    /// More keys of `pki`.
    pub(super) pki: String,
    /// More sections.
    pub(super) more: String,
}

impl<'a> Spec<'a> {
    pub(super) fn new(name: &'static str, address: &'static str, ca: &'a Ca) -> Self {
        let (port, more) = (free_udp_port(), String::new());
        Self { name, certified: name, address, ca, trusts: &[], validity: ALWAYS, port, pki: String::new(), more }
    }

    /// Where it will be.
    pub(super) fn at(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    pub(super) fn more(self, more: impl Into<String>) -> Self {
        Self { more: more.into(), ..self }
    }
}

pub(super) struct Host {
    child: Child,
    config: PathBuf,
    socket: PathBuf,
    fixed: String,
    pub(super) fingerprint: String,
    pub(super) at: SocketAddr,
}

impl Site {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(super) fn ca(&self, name: &str, curve: Curve, validity: RangeInclusive<i64>) -> Ca {
        let key = SigningKey::generate(curve).unwrap();
        let template = Template { curve, public_key: key.public_key(), ..Template::new(name, validity) };
        let certificate = template.self_sign(&key).unwrap();
        Ca { certificate, key }
    }

    /// The CA of most faults.
    pub(super) fn usual_ca(&self) -> Ca {
        self.ca("ca", Curve::Curve25519, ALWAYS)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(super) fn start(&self, program: Peer, spec: &Spec<'_>) -> Host {
        let Spec { name, address, ca, .. } = *spec;
        let curve = ca.key.curve();
        let key = PrivateKey::generate(curve).unwrap();
        let template = Template {
            curve,
            networks: vec![format!("{address}/16").parse().unwrap()],
            public_key: key.public_key(),
            ..Template::new(spec.certified, spec.validity.clone())
        };
        let certificate = template.sign(&ca.certificate, &ca.key).unwrap();
        std::fs::write(self.path(&format!("{name}.crt")), certificate.to_pem()).unwrap();
        std::fs::write(self.path(&format!("{name}.key")), key.to_pem().as_str()).unwrap();
        let trusts = if spec.trusts.is_empty() { &[spec.ca][..] } else { spec.trusts };
        let pool: String = trusts.iter().map(|ca| ca.certificate.to_pem()).collect();
        std::fs::write(self.path(&format!("{name}-cas.crt")), pool).unwrap();
        let (dir, socket) = (self.0.path().display(), self.path(&format!("{name}.sock")));
        let fixed = format!(
            "pki: {{ca: {dir}/{name}-cas.crt, cert: {dir}/{name}.crt, key: {dir}/{name}.key{}}}\n\
             listen: {{host: 127.0.0.1, port: {}}}\nhandshakes: {{try_interval: 50ms, retries: 5}}\n\
             daemon: {{control_socket: {}}}\nfirewall: {{outbound: [{{port: any, proto: any, host: any}}], \
             inbound: [{{port: any, proto: any, host: any}}]}}\n",
            spec.pki,
            spec.port,
            socket.display()
        );
        let has_tun = spec.more.lines().any(|line| line.starts_with("tun:"));
        let fixed = if has_tun { fixed } else { format!("{fixed}tun: {{disabled: true}}\n") };
        let config = self.path(&format!("{name}.yml"));
        std::fs::write(&config, format!("{fixed}{}\n", spec.more)).unwrap();
        let log = std::fs::File::create(config.with_extension("log")).unwrap();
        let mut command = Command::new(program.program());
        command.arg("-config").arg(&config).stdin(Stdio::null());
        let child = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        Host { child, config, socket, fixed, fingerprint: certificate.fingerprint().to_string(), at: spec.at() }
    }
}

impl Host {
    fn log(&self) -> String {
        std::fs::read_to_string(self.config.with_extension("log")).unwrap()
    }

    /// Replaces the configuration.
    pub(super) fn write(&self, more: &str) {
        std::fs::write(&self.config, format!("{}{more}\n", self.fixed)).unwrap();
    }

    pub(super) fn reload(&self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGHUP).unwrap();
    }

    /// The codes of the findings; an error is the program's text.
    pub(super) fn codes(&self, words: &[&str]) -> Result<Vec<String>, String> {
        let output = self.ask(&[&["--json"], words].concat());
        let Ok(answer) = serde_json::from_slice::<Value>(&output.stdout) else {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        };
        let findings = answer["findings"].as_array().unwrap().iter();
        let codes = findings.map(|it| it["code"].as_str().unwrap().to_owned());
        // Most of these hosts need none.
        Ok(codes.filter(|code| code != "no_lighthouse").collect())
    }

    fn ask(&self, words: &[&str]) -> std::process::Output {
        Command::new(ours()).arg("ctl").arg("--socket").arg(&self.socket).args(words).output().unwrap()
    }

    /// `why` names this cause, and nothing but what follows from it.
    #[track_caller]
    pub(super) fn why(&self, peer: &str, codes: &[&str]) {
        self.says(&["why", peer], codes);
    }

    /// `doctor` finds this and nothing else.
    #[track_caller]
    pub(super) fn doctor(&self, codes: &[&str]) {
        self.says(&["doctor"], codes);
    }

    /// `doctor` says this among others, for people.
    #[track_caller]
    pub(super) fn says_raw(&self, code: &str) {
        self.until(code, || {
            let text = String::from_utf8_lossy(&self.ask(&["doctor"]).stdout).into_owned();
            (text.contains(&format!("[{code}]")), text)
        });
    }

    /// `status` says this, for people.
    #[track_caller]
    pub(super) fn status(&self, part: &str) {
        self.until(part, || {
            let text = String::from_utf8_lossy(&self.ask(&["status"]).stdout).into_owned();
            (text.contains(part), text)
        });
    }

    #[track_caller]
    fn says(&self, words: &[&str], codes: &[&str]) {
        self.until(&format!("{words:?}: {codes:?}"), || {
            let mut found = self.codes(words);
            // Hosts as plain as these have remarks.
            if let Ok(found) = &mut found {
                found.retain(|code| code != "configuration_remark" || codes.contains(&"configuration_remark"));
            }
            (found.as_ref().is_ok_and(|found| found.iter().eq(codes)), format!("{found:?}"))
        });
    }

    #[track_caller]
    fn until(&self, what: &str, mut look: impl FnMut() -> (bool, String)) {
        let until = Instant::now() + PATIENCE;
        loop {
            let (is_so, found) = look();
            if is_so {
                return;
            }
            assert!(Instant::now() < until, "{what}, not {found}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

/// Where a host is.
pub(super) fn map(address: &str, at: SocketAddr) -> String {
    format!("static_host_map: {{{address}: ['{at}']}}\n")
}

/// Makes a host of any kind call another one again and again.
pub(super) fn calls(address: &str, at: SocketAddr) -> String {
    format!("{}lighthouse: {{hosts: [{address}], interval: 1}}\n", map(address, at))
}

/// What becomes of datagrams on a way.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    /// Nothing arrives.
    Swallows,
    /// What comes passes, and nothing goes back.
    Forth,
    /// Passes in both directions, except from this port.
    Except(u16),
    /// Datagrams of up to this length pass in both directions.
    UpTo(usize),
}

/// A way to a host, instead of the direct one.
pub(super) fn way(to: SocketAddr, how: Way) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut datagram = [0; 2048];
        let mut asked = None;
        while let Ok((length, from)) = socket.recv_from(&mut datagram) {
            let on = match how {
                Way::Swallows => None,
                Way::Forth => (from != to).then_some(to),
                Way::Except(port) if from.port() == port => None,
                Way::UpTo(most) if length > most => None,
                Way::Except(_) | Way::UpTo(_) if from == to => asked,
                Way::Except(_) | Way::UpTo(_) => {
                    asked = Some(from);
                    Some(to)
                }
            };
            if let Some(on) = on {
                let _ = socket.send_to(&datagram[..length], on);
            }
        }
    });
    at
}

/// `at` of a host that does not run.
pub(super) fn nowhere() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_udp_port()))
}

pub(super) fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    since.as_secs().cast_signed()
}

/// The sources of a test, to see that it is there.
pub(super) fn source(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(super) const ALWAYS: RangeInclusive<i64> = 1..=5_000_000_000;
const PATIENCE: Duration = Duration::from_secs(25);
