//! A host's certificate from `nebula-enrol`: each gets a new key, and nothing is lost when the program is killed at any
//! step.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;

use nebula_cert::{CaPool, Identity};
use world::cluster::{Cluster, binary};
use world::run;

/// A CA, and a host whose program may be killed at any system call.
struct Host {
    cluster: Cluster,
    trace: PathBuf,
}

/// The `nth` system call of this name.
#[derive(Debug)]
struct Step {
    call: String,
    nth: usize,
}

impl Host {
    fn new() -> Self {
        let cluster = Cluster::new();
        let trace = cluster.world.dir().join("trace");
        Self { cluster, trace }
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.cluster.world.dir().join(name)
    }

    /// Runs `nebula-enrol` for a folder, with `before` as the command that starts it.
    fn enrol(&self, folder: &Path, more: &[&str], before: &[&str]) -> Output {
        let (program, out) = (binary("nebula-enrol").display().to_string(), folder.display().to_string());
        let (url, tls) = (self.cluster.ca_url(), self.cluster.ca_file("tls.crt"));
        let command = [&program, "-ca-url", &url, "-tls-ca", &tls, "-out-dir", &out, "-device", "neb0"];
        self.cluster.world.exec("control", &[before, &command, more].concat())
    }

    fn must(&self, folder: &Path, more: &[&str]) -> String {
        let output = self.enrol(folder, more, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Records the steps of a complete run.
    fn steps(&self, folder: &Path, more: &[&str]) -> Vec<Step> {
        let trace = self.trace.display().to_string();
        let output = self.enrol(folder, more, &["strace", "-f", "-qq", "-e", STEPS, "-o", &trace]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = std::fs::read_to_string(&self.trace).expect("the trace");
        let mut counts = BTreeMap::new();
        let calls = text.lines().filter_map(|line| line.split_once(' ')?.1.trim_start().split_once('('));
        calls
            .map(|(call, _)| {
                let nth = *counts.entry(call.to_owned()).and_modify(|count| *count += 1).or_insert(1);
                Step { call: call.to_owned(), nth }
            })
            .collect()
    }

    fn kill_at(&self, folder: &Path, more: &[&str], step: &Step) {
        let inject = format!("inject={}:signal=SIGKILL:when={}", step.call, step.nth);
        let output = self.enrol(folder, more, &["strace", "-f", "-qq", "-e", STEPS, "-e", &inject, "-o", "/dev/null"]);
        assert!(!output.status.success(), "it was not killed at {step:?}");
    }

    /// Creates a token for the host with that number; returns the token's file.
    fn token(&self, number: usize) -> String {
        let (dir, name) = (self.folder("ca").display().to_string(), format!("host-{number}"));
        let network = format!("10.42.200.{}/16", number + 1);
        let options = ["token", "create", "--dir", &dir, "--name", &name, "--network", &network];
        let token = run(&binary("nebula-ca").display().to_string(), &options);
        self.cluster.world.write(&format!("{name}.token"), &token).display().to_string()
    }
}

/// Reads the pair in a folder, if the two files match. The certificate must be trusted by the bundle next to it.
fn pair(folder: &Path, key: &str) -> Option<Identity> {
    let identity = Identity::read(folder.join("host.crt"), folder.join(key)).ok()?;
    let bundle = CaPool::from_pem(&std::fs::read(folder.join("ca.crt")).expect("the bundle")).expect("a bundle");
    let now = nebula_linux::clock::unix_now();
    bundle.verify(identity.primary().clone(), now).expect("the bundle trusts the certificate");
    Some(identity)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("the folder");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_host_renews_its_certificate_with_the_certificate_as_the_proof_and_a_new_key() {
    let host = Host::new();
    let folder = host.folder("lighthouse");
    let files = || ["host.crt", "host.key"].map(|name| std::fs::read_to_string(folder.join(name)).expect("a file"));
    let before = files();
    assert!(host.must(&folder, &["-renew"]).contains("nothing to do"), "it is too early");
    assert_eq!(files(), before);
    assert!(host.must(&folder, &["-renew-now"]).contains("lighthouse"));
    let after = files();
    assert!(before.iter().zip(&after).all(|(before, after)| before != after));
    // Once more, with the files of the first run: key and certificate match, and the service is known.
    let (program, out) = (binary("nebula-enrol").display().to_string(), folder.display().to_string());
    let plain = |flag: &str| host.cluster.world.exec("control", &[&program, "-out-dir", &out, flag]);
    assert!(plain("-renew-now").status.success());
    assert_ne!(files(), after);
    assert!(String::from_utf8_lossy(&plain("-renew").stdout).contains("nothing to do"));
    assert_eq!(plain("-due").status.code(), Some(1), "a unit is skipped by that");
    assert_eq!(names(&folder), FILES, "nothing else is left there");
}

#[test]
#[ignore = "needs root, network namespaces, strace and a release build"]
fn a_renewal_killed_at_any_step_leaves_a_pair_and_the_next_run_completes_it() {
    let host = Host::new();
    let whole = host.folder("lighthouse");
    let copy = |name: &str| {
        let folder = host.folder(name);
        run("cp", &["-a", &whole.display().to_string(), &folder.display().to_string()]);
        // Removed, so that a renewal writes it again between key and certificate.
        std::fs::remove_file(folder.join("announced.json")).expect("what was announced");
        folder
    };
    let steps = host.steps(&copy("traced"), &["-renew-now"]);
    let renames = steps.iter().filter(|step| step.call.starts_with("rename")).count();
    assert!(renames >= 4 && steps.len() > 20, "{steps:?}");
    let present = pair(&whole, "host.key").expect("a pair").primary().fingerprint();
    let mut between = 0;
    for (at, step) in steps.iter().enumerate() {
        let folder = copy(&format!("killed-{at}"));
        host.kill_at(&folder, &["-renew-now"], step);
        match pair(&folder, "host.key") {
            Some(left) => {
                let is_new = left.primary().fingerprint() != present;
                assert!(!is_new || names(&folder) == FILES, "{step:?}: {:?}", names(&folder));
            }
            // The moment between the last two renames.
            None => {
                between += 1;
                let next = pair(&folder, "host.key.next").unwrap_or_else(|| panic!("no pair is left by {step:?}"));
                assert!(host.must(&folder, &["-renew"]).contains("nothing to do"));
                let completed = pair(&folder, "host.key").expect("the pair is complete").primary().fingerprint();
                assert_eq!(completed, next.primary().fingerprint(), "{step:?}");
            }
        }
        host.must(&folder, &["-renew-now"]);
        assert!(pair(&folder, "host.key").is_some(), "{step:?}");
        assert_eq!(names(&folder), FILES, "{step:?}");
    }
    assert!((1..=2).contains(&between), "{between} of {} steps", steps.len());
}

#[test]
#[ignore = "needs root, network namespaces, strace and a release build"]
fn an_enrolment_killed_at_any_step_is_completed_with_the_same_token() {
    let host = Host::new();
    let token = host.token(0);
    let steps = host.steps(&host.folder("traced"), &["-token-file", &token]);
    assert!(steps.iter().filter(|step| step.call.starts_with("rename")).count() >= 3, "{steps:?}");
    for (at, step) in steps.iter().enumerate() {
        let (folder, token) = (host.folder(&format!("killed-{at}")), host.token(at + 1));
        host.kill_at(&folder, &["-token-file", &token], step);
        // The certificate is written last: if it exists, so do the others.
        if !folder.join("host.crt").exists() {
            host.must(&folder, &["-token-file", &token]);
        }
        assert!(pair(&folder, "host.key").is_some(), "{step:?}");
        assert_eq!(names(&folder), FILES, "{step:?}");
    }
}

const FILES: [&str; 6] = ["announced.json", "ca-tls.crt", "ca.crt", "enrolment.json", "host.crt", "host.key"];
/// System calls that change a file, or by which the process reaches one.
const STEPS: &str = "trace=openat,mkdir,mkdirat,write,fsync,rename,renameat,renameat2,sendto,close";
