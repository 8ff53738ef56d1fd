//! The programs under test: our `nebula`, and Go Nebula as downloaded by `.ci/go-nebula`.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{World, loopback};

/// Our daemon: from `NEBULA_BIN_DIR` (the release build) if set, otherwise the one built for this test.
pub fn ours() -> PathBuf {
    std::env::var_os("NEBULA_BIN_DIR").map_or_else(loopback::ours, |dir| Path::new(&dir).join("nebula"))
}

/// A Go program of a Debian suite: `bookworm` has 1.6.1, `trixie` 1.9.3, `sid` 1.11.0.
pub fn go(program: &str, suite: &str) -> PathBuf {
    let path = peer(suite).join("usr/bin").join(program);
    assert!(path.exists(), "{} is missing: run .ci/go-nebula first", path.display());
    path
}

/// The folder of an unpacked package.
pub fn peer(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers").join(folder)
}

impl World {
    /// Runs the certificate tool of Go 1.11 in the folder of the test; its certificates work with every release.
    pub fn certify(&self, arguments: &[&str]) {
        let tool = go("nebula-cert", "sid");
        let output = Command::new(tool).args(arguments).current_dir(self.dir()).output().expect("nebula-cert runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
