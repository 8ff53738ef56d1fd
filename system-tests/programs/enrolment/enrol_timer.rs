//! `nebula-enrol -renew` as its timer runs it, on hosts whose daemon follows no CA: what the CA trusts and blocks
//! arrives long before the certificate has to be renewed.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nebula_cert::Certificate;
use nebula_config::Value;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fake_ca::Ca;
use crate::loopback::{Network, built, free_udp_port, go, ours};

fn enrol(folder: &Path, flag: &str) -> (Option<i32>, String) {
    enrol_with(folder, &[flag.as_ref()])
}

fn enrol_with(folder: &Path, flags: &[&OsStr]) -> (Option<i32>, String) {
    let mut command = Command::new(built("nebula-enrol"));
    let output = command.args(flags).arg("-out-dir").arg(folder).stdin(Stdio::null()).output().unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), said.concat())
}

/// A host that enrolled: the folder of its files.
fn enrolled(root: &Path, ca: &Ca) -> PathBuf {
    let (folder, token) = (root.join("host"), root.join("token"));
    std::fs::write(&token, ca.token.to_text().as_bytes()).unwrap();
    let mut up = Command::new(built("nebula"));
    up.args(["up", "-no-start", "-token-file"]).arg(&token).arg("-dir").arg(&folder);
    let enrolled = up.output().unwrap();
    assert!(enrolled.status.success(), "{enrolled:?}");
    folder
}

#[test]
fn each_run_of_the_timer_brings_whom_the_ca_trusts_and_blocks() {
    let (root, ca) = (tempfile::tempdir().unwrap(), Ca::new(None));
    let folder = enrolled(root.path(), &ca);
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
fn whom_the_ca_blocks_is_kept_in_the_folder_of_another_daemons_configuration() {
    let (root, ca) = (tempfile::tempdir().unwrap(), Ca::new(None));
    let folder = enrolled(root.path(), &ca);
    let other = root.path().join("go.d");
    let flags = ["-renew", "-blocklist-dir"].map(OsStr::new);
    let (code, said) = enrol_with(&folder, &[&flags[..], &[other.as_os_str()]].concat());
    assert!(code == Some(2) && said.contains("is no folder"), "{said}");
    std::fs::create_dir(&other).unwrap();
    let (own, theirs) = ("ab".repeat(32), "cd".repeat(32));
    std::fs::write(other.join("config.yml"), format!("pki: {{ca: x, blocklist: [{own}]}}\n")).unwrap();
    let (code, said) = enrol_with(&folder, &[&flags[..], &[other.as_os_str()]].concat());
    assert!(code == Some(0) && said.contains("go.d/nebula-enrol.yml"), "{said}");
    let blocked = || {
        let (tree, _) = nebula_config::load(&other).unwrap();
        let Some(Value::List(items)) = tree.at("pki.blocklist") else { panic!("{}", tree.to_yaml()) };
        items.iter().map(|item| item.text().unwrap().into_owned()).collect::<Vec<_>>()
    };
    assert_eq!(blocked(), std::slice::from_ref(&own));

    // The folder is remembered, and a file that somebody removed is written again.
    ca.blocked.lock().unwrap().push(theirs.clone());
    let (code, said) = enrol(&folder, "-renew");
    assert!(code == Some(0) && said.contains("go.d/nebula-enrol.yml"), "{said}");
    assert_eq!(blocked(), [theirs, own]);
    assert_eq!(enrol(&folder, "-due").0, Some(1));
    std::fs::remove_file(other.join("nebula-enrol.yml")).unwrap();
    assert_eq!(enrol(&folder, "-due").0, Some(0));
    assert_eq!(enrol(&folder, "-renew").0, Some(0));
    assert_eq!(blocked().len(), 2);
    // A renewal remembers it as well, and is not undone by a folder that is gone.
    std::fs::remove_dir_all(&other).unwrap();
    let (code, said) = enrol(&folder, "-renew");
    assert!(code == Some(1) && said.contains("nebula-enrol.yml"), "{said}");
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn go_ends_the_tunnel_of_a_host_that_the_ca_blocks() {
    let (root, ca, network) = (tempfile::tempdir().unwrap(), Ca::new(None), Network::new());
    let folder = enrolled(root.path(), &ca);
    let port = free_udp_port();
    let listen = format!("listen: {{host: 127.0.0.1, port: {port}}}\ntun: {{disabled: true}}\n");
    let config = network.configure("go", &["10.42.0.1/16"], &format!("{listen}lighthouse: {{am_lighthouse: true}}"));
    let other = root.path().join("go.d");
    std::fs::create_dir(&other).unwrap();
    std::fs::copy(config, other.join("config.yml")).unwrap();
    let log = root.path().join("log");
    let output = std::fs::File::create(&log).unwrap();
    let mut command = Command::new(go());
    command.arg("-config").arg(&other).stdout(output.try_clone().unwrap()).stderr(output).stdin(Stdio::null());
    let mut daemon = command.spawn().unwrap();
    let says = |text: &str| {
        let end = Instant::now() + Duration::from_secs(30);
        while !std::fs::read_to_string(&log).unwrap().contains(text) {
            assert!(Instant::now() < end, "{text}\n{}", std::fs::read_to_string(&log).unwrap());
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let known = format!("static_host_map: {{10.42.0.1: ['127.0.0.1:{port}']}}\nlisten: {{host: 127.0.0.1, port: 0}}");
    let peer =
        network.start(&ours(), "peer", &["10.42.0.2/16"], &format!("{known}\nlighthouse: {{hosts: [10.42.0.1]}}"));
    says("certName=peer");
    let certificate = Certificate::from_pem(&std::fs::read(peer.config().with_extension("crt")).unwrap()).unwrap();
    ca.blocked.lock().unwrap().push(certificate.fingerprint().to_string());
    let flags = ["-renew", "-blocklist-dir"].map(OsStr::new);
    let (code, said) = enrol_with(&folder, &[&flags[..], &[other.as_os_str()]].concat());
    assert_eq!(code, Some(0), "{said}");
    // As the unit's `systemctl reload` does.
    kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGHUP).unwrap();
    says("Remote certificate is blocked, tearing down the tunnel");
    daemon.kill().unwrap();
    daemon.wait().unwrap();
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
