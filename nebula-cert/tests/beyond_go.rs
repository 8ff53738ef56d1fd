//! The modes of `nebula-cert` that the Go tool does not have.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test ends where an unwrap fails")]

mod folder;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use folder::Folder;
use nebula_cert::{CaPool, Identity};

#[test]
fn a_renewed_certificate_is_the_same_identity_with_a_new_validity() {
    let folder = Folder::with_ca("");
    folder.succeeds(
        "sign -name h -networks 10.0.0.1/8,fd00::1/64 -groups a,b -unsafe-networks 192.168.0.0/16 -duration 2h",
    );
    let old = folder.certificate("h.crt");
    folder.succeeds("renew -crt h.crt -out-crt new.crt -duration 5h");
    let new = folder.certificate("new.crt");
    assert_eq!((new.name(), new.groups(), new.version()), (old.name(), old.groups(), old.version()));
    assert_eq!((new.networks(), new.unsafe_networks()), (old.networks(), old.unsafe_networks()));
    assert_eq!(new.public_key(), old.public_key());
    assert_eq!(new.not_after() - new.not_before(), 5 * 3_600);
    assert_eq!(folder.certificate("h.crt"), old);
    folder.succeeds("verify -ca ca.crt -crt new.crt");
    folder.succeeds("renew -crt new.crt");
    let replaced = folder.certificate("new.crt");
    assert_eq!(replaced.not_after() - replaced.not_before(), 5 * 3_600, "as long as before");
    assert_eq!(fs::metadata(folder.path().join("new.crt")).unwrap().permissions().mode() & 0o777, 0o600);
    Identity::read(folder.path().join("new.crt"), folder.path().join("h.key")).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5, "ca, h and new leave nothing else behind");
}

#[test]
fn a_renewal_takes_a_new_key_if_asked_to() {
    let folder = Folder::with_ca("-curve P256 -version 1");
    folder.succeeds("sign -name h -networks 10.0.0.1/8");
    folder.succeeds("renew -crt h.crt -out-crt a.crt -out-key a.key");
    Identity::read(folder.path().join("a.crt"), folder.path().join("a.key")).unwrap();
    folder.succeeds("keygen -curve P256 -out-key b.key -out-pub b.pub");
    folder.succeeds("renew -crt h.crt -out-crt b.crt -in-pub b.pub");
    Identity::read(folder.path().join("b.crt"), folder.path().join("b.key")).unwrap();
    let errors = folder.fails("renew -crt h.crt -out-key a.key");
    assert_eq!(errors, "Error: refusing to overwrite existing key: a.key\n");
    assert!(folder.fails("renew -crt h.crt -in-pub b.pub -out-key c.key").contains("cannot set both"));
}

#[test]
fn an_expired_certificate_can_be_renewed_and_a_foreign_one_cannot() {
    let folder = Folder::with_ca("");
    folder.succeeds("sign -name h -networks 10.0.0.1/8 -duration 1s");
    std::thread::sleep(std::time::Duration::from_millis(2_100));
    assert!(folder.fails("verify -ca ca.crt -crt h.crt").contains("certificate is expired"));
    folder.succeeds("renew -crt h.crt -duration 1h");
    folder.succeeds("verify -ca ca.crt -crt h.crt");

    let other = Folder::with_ca("");
    fs::copy(folder.path().join("h.crt"), other.path().join("h.crt")).unwrap();
    let errors = other.fails("renew -crt h.crt");
    assert!(errors.starts_with("Error: refusing to renew h.crt: no CA in ca.crt issued it"), "{errors}");
    assert_eq!(other.read("h.crt"), folder.read("h.crt"));
    // While the CA is being replaced, the file holds both, the new one first.
    let both = [other.read("ca.crt"), folder.read("ca.crt")].concat();
    fs::write(other.path().join("both.crt"), both).unwrap();
    other.succeeds("renew -crt h.crt -ca-crt both.crt");
    other.succeeds("verify -ca ca.crt -crt h.crt");
}

#[test]
fn inspection_lists_certificates_by_the_time_left_and_warns_below_a_threshold() {
    let folder = Folder::with_ca("");
    folder.succeeds("sign -name long -networks 10.0.0.1/8 -duration 100h30m");
    folder.succeeds("sign -name short -networks 10.0.0.2/8 -duration 10h30m");
    let table = folder.succeeds("inspect . -below 10h");
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 4, "keys are no certificates: {table}");
    assert_eq!(lines.iter().map(|line| line[0]).collect::<Vec<_>>(), ["FILE", "short.crt", "long.crt", "ca.crt"]);
    assert_eq!(lines[1][1..4], ["short", "v2", "host"]);
    assert!(table.lines().nth(2).unwrap().contains("  4d 4h"), "{table}");

    let output = folder.run("inspect . --json -below 50h");
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.starts_with("Error: 1 need attention:\nshort.crt: short (v2): 10h "), "{errors}");
    let list: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(list.len(), 3);
    assert_eq!(list[0]["name"], "short");
    assert!((10 * 3_600..11 * 3_600).contains(&list[0]["secondsLeft"].as_i64().unwrap()));
}

#[test]
fn inspection_warns_of_expired_and_damaged_certificates() {
    let folder = Folder::with_ca("");
    fs::write(folder.path().join("bad.crt"), "-----BEGIN NEBULA CERTIFICATE V2-----\n").unwrap();
    let output = folder.run("inspect .");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("ca.crt"), "the others are listed all the same");
    assert!(String::from_utf8(output.stderr).unwrap().contains("bad.crt: input did not contain a valid PEM"));
    fs::create_dir(folder.path().join("none")).unwrap();
    assert_eq!(folder.fails("inspect none"), "Error: no certificates in none\n");
    assert!(folder.fails("inspect missing").starts_with("Error: error while reading missing"));
}

#[test]
fn each_printed_fingerprint_blocks_the_certificate() {
    for (curve, count) in [("25519", 1), ("P256", 2)] {
        let folder = Folder::with_ca(&format!("-curve {curve}"));
        folder.succeeds("sign -name h -networks 10.0.0.1/8");
        let printed = folder.succeeds("blocklist -path h.crt");
        let list: Vec<String> = serde_json::from_str(&folder.succeeds("blocklist -json -path h.crt")).unwrap();
        assert_eq!(list.len(), count);
        for (line, fingerprint) in printed.lines().zip(&list) {
            assert_eq!(line, format!("- {fingerprint} # h (v2)"));
            let mut pool = CaPool::from_pem(&folder.read("ca.crt")).unwrap();
            let host = folder.certificate("h.crt");
            let at = host.not_before();
            assert!(pool.verify(host.clone(), at).is_ok());
            pool.block(fingerprint.parse().unwrap());
            assert!(pool.verify(host, at).unwrap_err().to_string().contains("block list"));
        }
        assert_eq!(printed.lines().count(), count);
    }
}

#[test]
fn completions_and_manual_pages_name_every_mode() {
    let folder = Folder::new();
    let modes = ["ca", "keygen", "sign", "print", "verify", "renew", "inspect", "blocklist", "completions", "man"];
    for shell in ["bash", "zsh", "fish"] {
        let script = folder.succeeds(&format!("completions {shell}"));
        assert!(modes.iter().all(|mode| script.contains(mode)) && script.contains("unsafe-networks"), "{shell}");
    }
    assert!(folder.fails("completions tcsh").contains("tcsh"));
    let page = folder.succeeds("man");
    assert!(page.contains(".TH nebula-cert 1") && modes.iter().all(|mode| page.contains(mode)), "{page}");
    folder.succeeds("man .");
    for mode in modes {
        assert!(!folder.read(&format!("nebula-cert-{mode}.1")).is_empty(), "{mode}");
    }
    assert!(folder.fails("man missing").starts_with("Error: error while writing manual pages: missing"));
}
