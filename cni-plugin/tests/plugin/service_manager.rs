//! A real systemd with its bus, in its own namespaces, so that a test does not touch that of the machine.
#![allow(clippy::unwrap_used, reason = "in the helpers of tests too, a panic is the report")]
#![allow(dead_code, reason = "each test uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// A systemd with its bus; everything that it started ends with it.
pub(crate) struct Systemd {
    dir: tempfile::TempDir,
}

impl Systemd {
    /// Starts it in the network namespace of the test.
    pub(crate) fn start() -> Self {
        Self::start_in(Path::new("/proc/self/ns/net"))
    }

    /// Starts it with its units in the network namespace at this path.
    pub(crate) fn start_in(network: &Path) -> Self {
        let systemd = Self { dir: tempfile::Builder::new().prefix("ncp-systemd").tempdir_in(PLACE).unwrap() };
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", network.display())).arg(tool()).arg("start").arg(systemd.dir.path());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        systemd
    }

    fn tool(&self, verb: &str, arguments: &[&str]) -> String {
        let output = Command::new(tool()).arg(verb).arg(self.dir.path()).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert!(output.status.success() || verb == "sh", "{said} {}", String::from_utf8_lossy(&output.stderr));
        said
    }

    /// Address of its bus for clients (`DBUS_SYSTEM_BUS_ADDRESS`).
    pub(crate) fn bus(&self) -> String {
        self.tool("bus", &[])
    }

    /// A property of a unit.
    pub(crate) fn show(&self, unit: &str, property: &str) -> String {
        self.tool("sh", &["systemctl", "show", "--value", "-p", property, unit])
    }

    /// Runs a script in the namespaces of systemd and its units, and returns its output.
    pub(crate) fn sh(&self, script: &str) -> String {
        self.tool("sh", &["sh", "-c", script])
    }

    /// Lists the units of pods, one per line.
    pub(crate) fn units(&self) -> String {
        self.tool("sh", &["systemctl", "list-units", "--all", "--plain", "--no-legend", "nebula-pod-*"])
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = Command::new(tool()).arg("stop").arg(self.dir.path()).output();
    }
}

fn tool() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tools/systemd-ns.sh")
}

/// Not /tmp or /run, of which units have private ones.
pub(crate) const PLACE: &str = "/var/lib";
