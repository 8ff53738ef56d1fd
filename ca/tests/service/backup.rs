//! Backups, and what becomes of a CA without its ledger.

use std::{fs, os::unix::fs::PermissionsExt};

use nebula_cert::{Certificate, SigningKey, Template, issuance::Trust};

use crate::{
    lifecycle::renewal,
    running::{Ca, key, pod, refused},
};

#[test]
fn a_backup_of_a_running_service_goes_on_in_another_directory() {
    let (ca, other) = (Ca::init(), Ca::empty());
    let service = ca.serve();
    let (web, edge) = (key(), key());
    let reply = service.caller.enrol(&ca.token("edge", "10.42.0.9/16", &[]), &edge).unwrap();
    service.caller.pod(&ca.text("node.token"), pod(7), &web).unwrap();
    ca.output("certificate revoke", &["web-7.shop.pod"]);
    let open = ca.token("later", "10.42.0.10/16", &[]);

    let file = ca.file("../backup");
    let file = file.to_str().unwrap();
    let said = ca.output("backup", &[file]);
    assert!(said.contains("ca.key") && said.contains("records"), "{said}");
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(ca.failure("backup", &[file]).contains("exists"), "none is overwritten");
    assert!(!ca.file(".ledger.copy").exists());
    // The service was not held up, and what it does now is not in the backup.
    service.caller.pod(&ca.text("node.token"), pod(8), &key()).unwrap();
    let epoch = |service: &crate::running::Service, ca: &Ca| {
        let (_, body) = service.caller.get_with_token("/v1/directory", ca.text("node.token").trim());
        serde_json::from_str::<serde_json::Value>(&body).unwrap()["version"].as_str().unwrap().to_owned()
    };
    let before = epoch(&service, &ca);
    service.stop();

    assert!(ca.failure("restore", &[file]).contains("exists; nothing was changed"));
    other.output("restore", &[file]);
    for name in ["ca.key", "tls.key", "node.token", "renewal.key", "policy.jsonc", "ca.crt"] {
        assert_eq!(ca.text(name), other.text(name), "{name}");
        let mode = |ca: &Ca| fs::metadata(ca.file(name)).unwrap().permissions().mode();
        assert_eq!(mode(&ca), mode(&other), "{name}");
    }
    let service = other.serve();
    service.caller.request(&renewal(&reply, &edge, &key(), nebula_ca::now())).unwrap();
    let trust: Trust = serde_json::from_str(&service.caller.get("/v1/trust", "").2).unwrap();
    assert_eq!(trust.blocklist.len(), 1, "what was revoked stays so");
    let taken = other.failure("token create", &["--name", "thief", "--network", "10.42.0.9/16"]);
    assert!(taken.contains("belongs to"), "{taken}");
    service.caller.enrol(&open, &key()).unwrap();
    // Agents that knew the former log must not take this one for it.
    let after = epoch(&service, &other);
    assert_ne!(before.split('-').next(), after.split('-').next());
}

#[test]
fn a_backup_needs_no_running_service() {
    let (ca, other) = (Ca::init(), Ca::empty());
    let open = ca.token("edge", "10.42.0.9/16", &[]);
    let file = ca.file("../backup");
    ca.output("backup", &[file.to_str().unwrap()]);
    other.output("restore", &[file.to_str().unwrap()]);
    assert!(other.serve().caller.enrol(&open, &key()).is_ok());
}

#[test]
fn a_backup_that_was_cut_off_or_altered_makes_no_directory() {
    let (ca, other) = (Ca::init(), Ca::empty());
    ca.token("edge", "10.42.0.9/16", &[]);
    let file = ca.file("../backup");
    let file = file.to_str().unwrap();
    ca.output("backup", &[file]);
    let whole = fs::read_to_string(file).unwrap();
    let lines: Vec<&str> = whole.lines().collect();
    let without_a_row = [&lines[..lines.len() - 2], &lines[lines.len() - 1..]].concat().join("\n") + "\n";
    let broken = [
        whole[..whole.len() / 2].to_owned(),
        without_a_row,
        whole.replace("\"file\":\"tls.key\"", "\"file\":\"../tls.key\""),
        whole.replace("\"nebula_ca_backup\":1", "\"nebula_ca_backup\":2"),
        String::new(),
    ];
    for text in broken {
        fs::write(file, text).unwrap();
        let error = other.failure("restore", &[file]);
        assert!(error.contains("nothing was changed"), "{error}");
        assert!(!other.file("").exists());
    }
}

#[test]
fn an_old_ca_without_its_ledger_does_not_serve() {
    let ca = Ca::init();
    make_older(&ca);
    let holder = key();
    {
        let service = ca.serve();
        service.caller.pod(&ca.text("node.token"), pod(7), &holder).unwrap();
        ca.output("certificate revoke", &["web-7.shop.pod"]);
    }
    fs::remove_file(ca.file("store.redb")).unwrap();
    let error = ca.refused_start();
    assert!(error.contains("ledger is empty") && error.contains("--new-ledger"), "{error}");
    // No command makes one by the way.
    assert!(ca.failure("token list", &[]).contains("ledger is empty"));
    ca.refused_start();

    ca.serve_with_options(&["--new-ledger"]).stop();
    let service = ca.serve();
    assert!(service.caller.pod(&ca.text("node.token"), pod(7), &holder).is_ok());
}

#[test]
fn a_ca_that_was_made_long_before_its_first_start_serves() {
    let ca = Ca::init();
    make_older(&ca);
    let service = ca.serve();
    assert_eq!(service.caller.enrol("nonsense", &key()).map(|reply| reply.certificate), refused(401, "unknown_token"));
}

/// Replaces the CA by one that is two hours old.
fn make_older(ca: &Ca) {
    let present = Certificate::from_pem(ca.text("ca.crt").as_bytes()).unwrap();
    let key = SigningKey::from_pem(ca.text("ca.key").as_bytes()).unwrap();
    let template = Template {
        version: present.version(),
        curve: present.curve(),
        name: present.name().to_owned(),
        networks: Vec::new(),
        unsafe_networks: Vec::new(),
        groups: Vec::new(),
        not_before: nebula_ca::now() - 7_200,
        not_after: present.not_after(),
        public_key: key.public_key(),
    };
    fs::write(ca.file("ca.crt"), template.self_sign(&key).unwrap().to_pem()).unwrap();
}
