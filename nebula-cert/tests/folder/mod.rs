//! A temporary directory in which tests run the `nebula-cert` program.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part of the folder")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use nebula_cert::Certificate;
use tempfile::TempDir;

/// A temporary directory in which the program runs.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Creates a directory with `ca.crt` and `ca.key`.
    pub fn with_ca(flags: &str) -> Self {
        let folder = Self::new();
        folder.succeeds(&format!("ca -name test {flags}"));
        folder
    }

    pub fn command(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nebula-cert"));
        command.current_dir(self.0.path()).env_remove("NEBULA_CA_PASSPHRASE").args(words.split_whitespace());
        command
    }

    pub fn run(&self, words: &str) -> Output {
        self.command(words).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs the program, which must succeed and print nothing on standard error; returns its standard output.
    pub fn succeeds(&self, words: &str) -> String {
        let output = self.run(words);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), &*errors), (Some(0), ""), "{words}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs the program, which must fail with exit code 1 and print nothing on standard output; returns its standard
    /// error.
    pub fn fails(&self, words: &str) -> String {
        let output = self.run(words);
        assert_eq!((output.status.code(), &*output.stdout), (Some(1), &b""[..]), "{words}");
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.starts_with("Error: "), "{words}: {errors}");
        errors
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.0.path().join(name)).unwrap()
    }

    pub fn certificate(&self, name: &str) -> Certificate {
        Certificate::from_pem(&self.read(name)).unwrap()
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}
