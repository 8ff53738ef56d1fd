//! `nebula up` on a host whose other users watch the list of processes: whoever reads a join token there and is
//! quicker has the host's place in the network.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nebula_cert::{Identity, JoinToken, PrivateKey};
use nebula_enrolment::ca_client::{CaClient, Prover};
use nebula_linux::clock::unix_now;
use nix::pty::{OpenptyResult, openpty};
use nix::sys::termios::{LocalFlags, tcgetattr};

use crate::fake_ca::{Ca, OVERLAY};
use crate::loopback::built;

/// Another user of the host, who looks at all processes without a pause, and uses each join token at once.
struct Watcher {
    stop: Arc<AtomicBool>,
    /// Tokens that it is after; those of tests that run beside this one are none of its business.
    wanted: Arc<Mutex<Vec<String>>>,
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
        let wanted = Arc::<Mutex<Vec<String>>>::default();
        let after = Arc::clone(&wanted);
        let thread = std::thread::spawn(move || {
            let (mut watched, mut known) = (Watched::default(), Vec::<String>::new());
            while !stopped.load(Ordering::Relaxed) {
                for token in tokens() {
                    if known.contains(&token) || !after.lock().unwrap().contains(&token) {
                        continue;
                    }
                    watched.seen += 1;
                    watched.stolen += usize::from(redeem(&token));
                    known.push(token);
                }
            }
            watched
        });
        Self { stop, wanted, thread }
    }

    fn want(&self, ca: &Ca) {
        self.wanted.lock().unwrap().push(ca.token.to_text().to_string());
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
    let mut command = Command::new(built("nebula"));
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
        watcher.want(&ca);
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
        watcher.want(&ca);
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
    for name in ["nebula", "nebula-enrol"] {
        let program = built(name);
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
            assert!(!String::from_utf8_lossy(&shown).contains("nebula-join-"), "{name}: {file}");
        }
        let shown = std::fs::read(format!("/proc/{}/cmdline", child.id())).unwrap();
        assert!(shown.starts_with(name.as_bytes()) || shown.starts_with(b"/"), "{shown:?}");
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
