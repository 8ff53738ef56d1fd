//! The passphrase prompt of `nebula-cert` on a terminal.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test ends where an unwrap fails")]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStderr, Command, Stdio};

use nebula_cert::SigningKey;
use nix::pty::{OpenptyResult, openpty};
use nix::sys::termios::{LocalFlags, tcgetattr};
use tempfile::TempDir;

const CA: &str = "ca -name t -encrypt -argon-memory 64 -argon-iterations 1 -argon-parallelism 1";
const SIGN: &str = "sign -name h -networks 10.0.0.1/8";

/// The running program, with a terminal as its standard input.
struct Session {
    child: Child,
    errors: ChildStderr,
    keyboard: File,
    /// Keeps the terminal open after the program has ended, so that its settings can be read.
    _screen: OwnedFd,
}

impl Session {
    fn start(folder: &TempDir, words: &str) -> Self {
        let OpenptyResult { master, slave } = openpty(None, None).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_nebula-cert"))
            .args(words.split_whitespace())
            .current_dir(folder.path())
            .env_remove("NEBULA_CA_PASSPHRASE")
            .stdin(Stdio::from(slave.try_clone().unwrap()))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let errors = child.stderr.take().unwrap();
        Self { child, errors, keyboard: File::from(master), _screen: slave }
    }

    /// Waits for the prompt, which is printed after echo is turned off, and answers it.
    fn answer(&mut self, text: &str) {
        let mut prompt = [0; 18];
        self.errors.read_exact(&mut prompt).unwrap();
        assert_eq!(String::from_utf8_lossy(&prompt), "Enter passphrase: ");
        assert!(!self.echoes(), "the prompt must not show what is typed");
        self.keyboard.write_all(text.as_bytes()).unwrap();
        let mut newline = [0];
        self.errors.read_exact(&mut newline).unwrap();
        assert_eq!(newline, *b"\n");
    }

    /// Waits for the end; returns the exit code and the rest of standard error.
    fn end(mut self) -> (Option<i32>, String) {
        let mut errors = String::new();
        self.errors.read_to_string(&mut errors).unwrap();
        let code = self.child.wait().unwrap().code();
        assert!(self.echoes(), "the terminal must be left as it was");
        (code, errors)
    }

    fn echoes(&self) -> bool {
        tcgetattr(&self.keyboard).unwrap().local_flags.contains(LocalFlags::ECHO)
    }
}

#[test]
fn a_typed_passphrase_protects_the_key_and_opens_it_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut session = Session::start(&folder, CA);
    session.answer("\n");
    session.answer("open sesame\n");
    assert_eq!(session.end(), (Some(0), String::new()));
    let key = std::fs::read(folder.path().join("ca.key")).unwrap();
    SigningKey::from_encrypted_pem(&key, b"open sesame").unwrap();

    let mut session = Session::start(&folder, SIGN);
    session.answer("open barley\n");
    let text = "Error: error while parsing encrypted ca-key: invalid passphrase or corrupt private key\n";
    assert_eq!(session.end(), (Some(1), text.to_owned()));
    assert!(!folder.path().join("h.crt").exists());

    let mut session = Session::start(&folder, SIGN);
    session.answer("open sesame\n");
    assert_eq!(session.end(), (Some(0), String::new()));
    assert!(folder.path().join("h.crt").exists());
}

#[test]
fn five_empty_answers_end_the_questions() {
    let folder = tempfile::tempdir().unwrap();
    let mut session = Session::start(&folder, CA);
    (0..5).for_each(|_| session.answer("\n"));
    let text = "Error: no passphrase specified, remove -encrypt flag to write out-key in plaintext\n";
    assert_eq!(session.end(), (Some(1), text.to_owned()));
    assert!(!folder.path().join("ca.key").exists());
}

#[test]
fn an_interrupt_or_an_end_of_input_leaves_the_terminal_as_it_was() {
    for (key, reason) in [(INTERRUPT, "interrupted"), (END, "the input has ended")] {
        let folder = tempfile::tempdir().unwrap();
        let mut session = Session::start(&folder, CA);
        let mut prompt = [0; 18];
        session.errors.read_exact(&mut prompt).unwrap();
        session.keyboard.write_all(key.to_string().as_bytes()).unwrap();
        assert_eq!(session.end(), (Some(1), format!("\nError: error reading passphrase: {reason}\n")));
    }
}

// What a terminal sends for Ctrl-C and Ctrl-D.
const INTERRUPT: char = '\u{3}';
const END: char = '\u{4}';
