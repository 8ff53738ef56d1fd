//! Every binary of a release build is static, and runs where no other file exists.

use std::path::{Path, PathBuf};
use std::process::Command;

const BINARIES: [&str; 10] = [
    "nebula",
    "nebula-ctl",
    "nebula-cert",
    "nebula-ca",
    "nebula-cni-plugin",
    "nebula-cni-instance",
    "nebula-cni-init",
    "nebula-enrol",
    "nebula-proxy",
    "kubectl-nebula",
];

fn release() -> PathBuf {
    PathBuf::from(std::env::var_os("NEBULA_BIN_DIR").expect("NEBULA_BIN_DIR names the folder of the release build"))
}

#[test]
#[ignore = "needs a release build"]
fn file_calls_every_binary_static() {
    for name in BINARIES {
        let path = release().join(name);
        let output = Command::new("file").arg("-L").arg(&path).output().expect("file runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("static-pie linked") || said.contains("statically linked"), "{said}");
        let interpreter = Command::new("readelf").arg("-l").arg(&path).output().expect("readelf runs");
        assert!(!String::from_utf8_lossy(&interpreter.stdout).contains("INTERP"), "{name} asks for a loader");
    }
}

#[test]
#[ignore = "needs a release build"]
fn the_daemon_takes_less_than_eight_and_a_half_megabytes() {
    let size = std::fs::metadata(release().join("nebula")).expect("the daemon is there").len();
    println!("nebula: {size} bytes");
    assert!(size <= 8_500_000, "{size} bytes");
}

#[test]
#[ignore = "needs a release build"]
fn only_the_daemon_has_the_ssh_console() {
    for program in BINARIES {
        assert_eq!(contains(program, "list-pending-hostmap"), program == "nebula", "{program}");
    }
}

/// The process that holds the tunnels parses no answer of a web server: `nebula-enrol` does that.
#[test]
#[ignore = "needs a release build"]
fn the_daemon_has_no_https_client() {
    for text in ["TLS 1.3, server CertificateVerify", "if-none-match", "unusable answer from"] {
        assert!(contains("nebula-enrol", text), "{text:?} is a string of no HTTPS client any more");
        assert!(!contains("nebula", text), "{text:?} is in the daemon");
    }
}

#[test]
#[ignore = "needs root and a release build"]
fn every_binary_runs_in_an_empty_chroot() {
    for name in BINARIES {
        let root = tempfile::tempdir().expect("a temporary directory");
        std::fs::copy(release().join(name), root.path().join("program")).expect("copy the binary");
        let output = in_chroot(root.path(), name);
        assert!(output.status.success(), "{name}: {output:?}");
        let said = [output.stdout, output.stderr].concat();
        assert!(
            String::from_utf8_lossy(&said).contains("0.1.0") || name == "nebula-cni-plugin",
            "{name} hides its version"
        );
    }
}

/// Randomness comes from the system call, not from a device file: a key can be generated without /dev.
#[test]
#[ignore = "needs root and a release build"]
fn a_key_is_made_in_an_empty_chroot() {
    let root = tempfile::tempdir().expect("a temporary directory");
    std::fs::copy(release().join("nebula-cert"), root.path().join("program")).expect("copy the binary");
    let output = Command::new("/usr/sbin/chroot")
        .arg(root.path())
        .args(["/program", "keygen", "-out-key", "/k", "-out-pub", "/p"])
        .output()
        .expect("chroot runs");
    assert!(output.status.success(), "{output:?}");
    let key = std::fs::read_to_string(root.path().join("k")).expect("the key was written");
    assert!(key.starts_with("-----BEGIN NEBULA X25519 PRIVATE KEY-----"), "{key}");
}

/// Whether the text is in the program's file.
fn contains(program: &str, text: &str) -> bool {
    let bytes = std::fs::read(release().join(program)).expect("the program is there");
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

fn in_chroot(root: &Path, name: &str) -> std::process::Output {
    let mut command = Command::new("/usr/sbin/chroot");
    command.arg(root).arg("/program");
    if name == "nebula-cni-plugin" {
        command.env_clear().env("CNI_COMMAND", "VERSION");
    } else {
        command.arg("--version");
    }
    command.output().expect("chroot runs")
}
