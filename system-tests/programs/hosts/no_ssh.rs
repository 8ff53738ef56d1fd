//! The daemon in a build without the SSH console, which `NEBULA_WITHOUT_CONSOLE` names.

use std::path::PathBuf;
use std::process::Command;

fn daemon() -> PathBuf {
    PathBuf::from(std::env::var_os("NEBULA_WITHOUT_CONSOLE").expect("NEBULA_WITHOUT_CONSOLE names the daemon"))
}

#[test]
#[ignore = "needs a release build without default features"]
fn it_takes_less_than_six_and_a_half_megabytes() {
    let size = std::fs::metadata(daemon()).expect("the daemon is there").len();
    println!("nebula without the console: {size} bytes");
    // The last tenth of a megabyte is due to overflow checks.
    assert!(size <= 6_500_000, "{size} bytes");
}

#[test]
#[ignore = "needs a release build without default features"]
fn it_says_that_it_has_no_console() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let config = folder.path().join("config.yml");
    std::fs::write(&config, "sshd: {enabled: true, listen: 127.0.0.1:2222}").expect("write the configuration");
    let output = Command::new(daemon()).args(["-test", "-config"]).arg(&config).output();
    let said = String::from_utf8_lossy(&output.expect("the daemon runs").stdout).into_owned();
    assert!(said.contains("sshd.enabled is not supported and has no effect in this build"), "{said}");
}
