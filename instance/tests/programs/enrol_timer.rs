//! `nebula-enrol -renew` as its timer runs it, on hosts whose daemon follows no CA: what the CA trusts and blocks arrives
//! long before the certificate has to be renewed.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::fake_ca::Ca;

fn enrol(folder: &Path, flag: &str) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nebula-enrol"));
    let output = command.arg(flag).arg("-out-dir").arg(folder).stdin(Stdio::null()).output().unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), said.concat())
}

#[test]
fn each_run_of_the_timer_brings_whom_the_ca_trusts_and_blocks() {
    let (root, ca) = (tempfile::tempdir().unwrap(), Ca::new(None));
    let folder = root.path().join("host");
    let token = root.path().join("token");
    std::fs::write(&token, ca.token.to_text().as_bytes()).unwrap();
    let mut up = Command::new(env!("CARGO_BIN_EXE_nebula"));
    up.args(["up", "-no-start", "-token-file"]).arg(&token).arg("-dir").arg(&folder);
    let enrolled = up.output().unwrap();
    assert!(enrolled.status.success(), "{enrolled:?}");
    let certificate = || std::fs::read(folder.join("host.crt")).unwrap();
    let before = certificate();
    assert_eq!(enrol(&folder, "-due").0, Some(1), "nothing is new");
    assert!(enrol(&folder, "-renew").1.contains("nothing to do"));

    let fingerprint = "ab".repeat(32);
    ca.blocked.lock().unwrap().push(fingerprint.clone());
    assert_eq!(enrol(&folder, "-due").0, Some(0), "the unit is not skipped, and reloads the daemon");
    let (code, said) = enrol(&folder, "-renew");
    assert!(code == Some(0) && said.contains("trusts and blocks"), "{said}");
    assert!(std::fs::read_to_string(folder.join("announced.json")).unwrap().contains(&fingerprint));
    assert_eq!(certificate(), before, "it is too early for another certificate");
    assert_eq!(enrol(&folder, "-due").0, Some(1));

    // A service that is away: the unit is skipped, and nothing is lost.
    let remembered = folder.join("enrolment.json");
    std::fs::write(&remembered, r#"{"version":1,"url":"https://127.0.0.1:1"}"#).unwrap();
    let (code, said) = enrol(&folder, "-due");
    assert!(code == Some(1) && said.contains("127.0.0.1:1"), "{said}");
    assert_ne!(enrol(&folder, "-renew").0, Some(0));
    assert!(std::fs::read_to_string(folder.join("announced.json")).unwrap().contains(&fingerprint));
}

#[test]
fn units_of_daemons_are_started_again_for_as_long_as_they_fail() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
    let mut daemons = 0;
    for entry in std::fs::read_dir(deploy).unwrap().flatten() {
        let text = match entry.path().extension() {
            Some(kind) if kind == "service" => std::fs::read_to_string(entry.path()).unwrap(),
            _ => continue,
        };
        if !text.contains("\nRestart=always\n") {
            continue;
        }
        daemons += 1;
        let (unit, _) = text.split_once("[Service]").unwrap();
        assert!(unit.contains("\nStartLimitIntervalSec=0\n"), "{:?} gives up after five quick failures", entry.path());
    }
    assert!(daemons >= 3, "{daemons} units");
}
