//! `nebula up` on a host whose other users watch the list of processes: whoever reads a join token there and is quicker has
//! the host's place in the network.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA256, digest};
use nebula_cert::issuance::{Proof, Reply, Request};
use nebula_cert::{
    Certificate, Curve, HostKey, Identity, JoinToken, PrivateKey, SigningKey, Template, public_key_from_pem,
};
use nebula_instance::ca_client::{CaClient, Prover};
use nebula_instance::linux::clock::unix_now;
use nix::pty::{OpenptyResult, openpty};
use nix::sys::termios::{LocalFlags, tcgetattr};
use rustls::pki_types::PrivateKeyDer;
use rustls::server::ParsedCertificate;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

const OVERLAY: &str = "10.97.0.0/16";
const ADDRESS: &str = "10.97.0.9/16";

/// A CA service of one token, which goes to the first key, or to the one it is bound to.
struct Ca {
    token: JoinToken,
    connections: Arc<Mutex<usize>>,
}

struct Desk {
    key: SigningKey,
    certificate: Certificate,
    /// The only public key that the token is good for, once that is known.
    owner: Mutex<Option<[u8; 32]>>,
}

impl Ca {
    fn new(bound: Option<&HostKey>) -> Self {
        let tls_key = rcgen::KeyPair::generate().unwrap();
        let tls = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap().self_signed(&tls_key).unwrap();
        let spki = ParsedCertificate::try_from(tls.der()).unwrap().subject_public_key_info();
        let fingerprint = digest(&SHA256, &spki).as_ref().try_into().unwrap();
        let tls_key = PrivateKeyDer::try_from(tls_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_no_client_auth().with_single_cert(vec![tls.der().clone()], tls_key).unwrap();
        let config = Arc::new(config);
        let key = SigningKey::generate(Curve::Curve25519).unwrap();
        let certificate = Template::new("ca", unix_now() - 60..=unix_now() + 600).self_sign(&key).unwrap();
        let desk = Arc::new(Desk { key, certificate, owner: Mutex::new(bound.map(HostKey::sha256)) });

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let token = JoinToken::new(&url, fingerprint, "nebula-enrol-secret", &[OVERLAY.parse().unwrap()]).unwrap();
        let token = match bound {
            Some(key) => token.bound_to(key),
            None => token,
        };
        let connections = Arc::new(Mutex::new(0));
        let counted = Arc::clone(&connections);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                *counted.lock().unwrap() += 1;
                let (config, desk) = (Arc::clone(&config), Arc::clone(&desk));
                std::thread::spawn(move || desk.serve(config, stream));
            }
        });
        Self { token, connections }
    }
}

impl Desk {
    fn serve(&self, config: Arc<ServerConfig>, stream: TcpStream) {
        let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
        let (mut heard, mut piece) = (Vec::new(), [0; 4096]);
        while let Ok(length @ 1..) = stream.read(&mut piece) {
            heard.extend_from_slice(&piece[..length]);
            let text = String::from_utf8_lossy(&heard);
            let Some((_, body)) = text.split_once("\r\n\r\n") else { continue };
            let Ok(request) = serde_json::from_str(body) else { continue };
            let (status, body) = self.answer(&request);
            let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let _ = stream.write_all(answer.as_bytes());
            heard.clear();
        }
    }

    fn answer(&self, request: &Request) -> (u16, String) {
        assert!(matches!(&request.proof, Proof::Token { token } if token == "nebula-enrol-secret"));
        let (_, public_key) = public_key_from_pem(request.public_key.as_bytes()).unwrap();
        let key: [u8; 32] = digest(&SHA256, &public_key).as_ref().try_into().unwrap();
        if *self.owner.lock().unwrap().get_or_insert(key) != key {
            return (409, r#"{"code": "token_used", "message": "the token is another host's"}"#.to_owned());
        }
        let networks = vec![ADDRESS.parse().unwrap()];
        let template = Template { networks, public_key, ..Template::new("host", unix_now() - 5..=unix_now() + 60) };
        let certificate = template.sign(&self.certificate, &self.key).unwrap().to_pem();
        let (blocklist, lighthouses) = Default::default();
        let reply = Reply { certificate, ca: self.certificate.to_pem(), blocklist, renewal_key: None, lighthouses };
        (200, serde_json::to_string(&reply).unwrap())
    }
}

/// Another user of the host, who looks at all processes without a pause, and uses each join token at once.
struct Watcher {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Watched>,
}

/// Tokens that were seen, and certificates for them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Watched {
    seen: usize,
    stolen: usize,
}

impl Watcher {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let (mut watched, mut known) = (Watched::default(), Vec::<String>::new());
            while !stopped.load(Ordering::Relaxed) {
                for token in tokens() {
                    if known.contains(&token) {
                        continue;
                    }
                    watched.seen += 1;
                    watched.stolen += usize::from(redeem(&token));
                    known.push(token);
                }
            }
            watched
        });
        Self { stop, thread }
    }

    fn end(self) -> Watched {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Join tokens among the arguments of all processes.
fn tokens() -> Vec<String> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let lines = processes.filter_map(|process| std::fs::read(process.join("cmdline")).ok());
    let words = lines.flat_map(|line| line.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect::<Vec<_>>());
    let texts = words.filter_map(|word| String::from_utf8(word).ok());
    texts.filter(|text| text.starts_with("nebula-join-") && text.parse::<JoinToken>().is_ok()).collect()
}

fn redeem(token: &str) -> bool {
    let token: JoinToken = token.parse().unwrap();
    let key = PrivateKey::generate(token.curve()).unwrap();
    let proof = Prover::Invited(token.secret().clone());
    CaClient::pinned(&token).request_for(key, &proof, Duration::from_secs(5), unix_now()).is_ok()
}

/// `nebula up` for a new folder, which is its last argument.
fn up(folder: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nebula"));
    command.arg("up").args(more).arg("-no-start").arg("-dir").arg(folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn end(child: Child) -> (bool, String) {
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.success(), said.concat())
}

fn is_enrolled(folder: &Path) -> bool {
    Identity::read(folder.join("host.crt"), folder.join("host.key")).is_ok()
}

fn folders() -> (tempfile::TempDir, impl FnMut() -> PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let (path, mut count) = (root.path().to_owned(), 0);
    let next = move || {
        count += 1;
        path.join(format!("host-{count}"))
    };
    (root, next)
}

#[test]
fn who_watches_the_list_of_processes_sees_no_token_from_standard_input_or_a_file() {
    let (root, mut next) = folders();
    let watcher = Watcher::start();
    for round in 0..4 {
        let (ca, folder) = (Ca::new(None), next());
        let file = root.path().join("token");
        std::fs::write(&file, ca.token.to_text().as_bytes()).unwrap();
        let child = if round % 2 == 0 {
            up(&folder, &[]).stdin(File::open(&file).unwrap()).spawn().unwrap()
        } else {
            up(&folder, &["-token-file", file.to_str().unwrap()]).spawn().unwrap()
        };
        let (succeeded, said) = end(child);
        assert!(succeeded && is_enrolled(&folder), "{said}");
        assert!(!said.contains("warning"), "{said}");
        assert_eq!(
            *ca.connections.lock().unwrap(),
            1,
            "one connection: what is shown and what is asked belong together"
        );
    }
    assert_eq!(watcher.end(), Watched::default());
}

#[test]
fn a_token_that_is_bound_to_the_hosts_key_is_worth_nothing_to_who_reads_it() {
    let (_root, mut next) = folders();
    let watcher = Watcher::start();
    for _ in 0..8 {
        let folder = next();
        let (succeeded, key) = end(up(&folder, &["-prepare"]).spawn().unwrap());
        assert!(succeeded, "{key}");
        let ca = Ca::new(Some(&key.trim().parse().unwrap()));
        // It is seen for certain.
        assert!(!redeem(&ca.token.to_text()));
        let (succeeded, said) = end(up(&folder, &[&ca.token.to_text()]).spawn().unwrap());
        assert!(succeeded && is_enrolled(&folder), "{said}");
        assert!(!said.contains("warning"), "{said}");
    }
    assert_eq!(watcher.end().stolen, 0);
}

#[test]
fn a_token_that_is_an_argument_is_wiped_before_anything_slow_and_its_owner_is_warned() {
    let (_root, mut next) = folders();
    // A service that is slow to answer.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let token = JoinToken::new(&url, [7; 32], "nebula-enrol-secret", &[OVERLAY.parse().unwrap()]).unwrap().to_text();
    for program in [env!("CARGO_BIN_EXE_nebula"), env!("CARGO_BIN_EXE_nebula-enrol")] {
        let mut child = Command::new(program)
            .args(["up", &token, "-no-start", "-dir"])
            .arg(next())
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (stream, _) = listener.accept().unwrap();
        for file in ["cmdline", "environ"] {
            let shown = std::fs::read(format!("/proc/{}/{file}", child.id())).unwrap();
            assert!(!String::from_utf8_lossy(&shown).contains("nebula-join-"), "{program}: {file}");
        }
        let shown = std::fs::read(format!("/proc/{}/cmdline", child.id())).unwrap();
        assert!(
            shown.starts_with(program.rsplit('/').next().unwrap().as_bytes()) || shown.starts_with(b"/"),
            "{shown:?}"
        );
        drop(stream);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(!child.wait().unwrap().success());
        assert_eq!(said.matches("warning: the list of processes").count(), 1, "{said}");
    }
}

/// A user at a terminal.
struct Terminal {
    child: Child,
    keyboard: File,
    /// Keeps the terminal open after the program has ended, so that its settings can be read.
    screen: OwnedFd,
}

impl Terminal {
    fn run(folder: &Path) -> Self {
        let OpenptyResult { master, slave } = openpty(None, None).unwrap();
        let child = up(folder, &[]).stdin(Stdio::from(slave.try_clone().unwrap())).spawn().unwrap();
        let mut terminal = Self { child, keyboard: File::from(master), screen: slave };
        let mut prompt = [0; 12];
        terminal.child.stderr.as_mut().unwrap().read_exact(&mut prompt).unwrap();
        assert_eq!(&prompt, b"Join token: ");
        assert!(!terminal.echoes(), "what is typed must not be shown");
        terminal
    }

    fn echoes(&self) -> bool {
        tcgetattr(&self.screen).unwrap().local_flags.contains(LocalFlags::ECHO | LocalFlags::ICANON | LocalFlags::ISIG)
    }

    fn end(self) -> (bool, String) {
        let screen = self.screen.try_clone().unwrap();
        let outcome = end(self.child);
        assert!(tcgetattr(&screen).unwrap().local_flags.contains(LocalFlags::ECHO), "the terminal is as it was");
        outcome
    }
}

#[test]
fn on_a_terminal_the_token_is_asked_for_without_being_shown() {
    let (_root, mut next) = folders();
    let (ca, folder) = (Ca::new(None), next());
    let mut terminal = Terminal::run(&folder);
    terminal.keyboard.write_all(format!("typing mistake\u{15}x\u{7f}{}\r", *ca.token.to_text()).as_bytes()).unwrap();
    let (succeeded, said) = terminal.end();
    assert!(succeeded && is_enrolled(&folder), "{said}");
    assert!(!said.contains("nebula-join-"), "{said}");

    let begun = Instant::now();
    let mut terminal = Terminal::run(&next());
    terminal.keyboard.write_all(b"half a tok\x03").unwrap();
    let (succeeded, said) = terminal.end();
    assert!(!succeeded && said.contains("interrupted"), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(10));
}
