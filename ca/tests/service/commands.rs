//! The command line, with and without a running service.

use std::{fs, os::unix::fs::PermissionsExt, thread};

use serde_json::Value;

use crate::running::{Ca, key, pod};

#[test]
fn init_makes_private_files_and_never_overwrites() {
    let ca = Ca::init();
    let mode = |name: &str| fs::metadata(ca.file(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(""), 0o700);
    for secret in ["ca.key", "tls.key", "node.token"] {
        assert_eq!(mode(secret), 0o600, "{secret}");
    }
    let before: Vec<String> = ["ca.crt", "ca.key", "node.token"].map(|name| ca.text(name)).to_vec();
    assert!(ca.failure("init", &[]).contains("exists; nothing was changed"));
    for left in ["policy.jsonc", "tls.key"] {
        fs::remove_file(ca.file("ca.key")).ok();
        fs::write(ca.file("ca.key"), &before[1]).unwrap();
        fs::remove_file(ca.file(left)).unwrap();
        assert!(ca.failure("init", &[]).contains("exists"));
    }
    assert_eq!(before, ["ca.crt", "ca.key", "node.token"].map(|name| ca.text(name)));
}

#[test]
fn init_refuses_options_that_do_not_fit_together_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let run = |options: &[&str]| {
        let program = std::process::Command::new(env!("CARGO_BIN_EXE_nebula-ca"))
            .args(["init", "--dir"])
            .arg(directory.path().join("ca"))
            .args(options)
            .output()
            .unwrap();
        assert!(!program.status.success(), "{options:?}");
        assert!(!directory.path().join("ca").exists());
        String::from_utf8(program.stderr).unwrap()
    };
    assert!(run(&["--version", "1", "--overlay", "fd42::/64"]).contains("version 1"));
    assert!(run(&["--networks", "10.42.0.0/16", "--overlay", "10.43.0.0/16"]).contains("10.43.0.0/16"));
    assert!(run(&["--duration", "soon"]).contains("24h"));
    assert!(run(&["--tls-name", "not a name\u{7f}é"]).contains("--tls-name"));
}

#[test]
fn commands_give_the_same_answers_with_and_without_a_service() {
    let ca = Ca::init();
    ca.token("one", "10.42.0.9/16", &[]);
    let service = ca.serve();
    let two = ca.token("two", "10.42.0.10/16", &["--groups", "web"]);
    service.caller.enrol(&two, &key()).unwrap();
    let during = (ca.json("token list", &[]), ca.json("certificate list", &[]));
    service.stop();
    assert!(!ca.file("control.sock").exists());
    assert_eq!(during, (ca.json("token list", &[]), ca.json("certificate list", &[])));
    let state = |token: &Value| (token["name"].as_str().unwrap().to_owned(), token["used"].is_null());
    let tokens: Vec<_> = during.0.as_array().unwrap().iter().map(state).collect();
    assert_eq!(tokens, [("one".to_owned(), true), ("two".to_owned(), false)]);
}

#[test]
fn the_control_socket_is_for_its_owner_only_and_a_stale_one_is_no_obstacle() {
    let ca = Ca::init();
    let service = ca.serve();
    assert_eq!(fs::metadata(ca.file("control.sock")).unwrap().permissions().mode() & 0o777, 0o600);
    service.kill();
    assert!(ca.file("control.sock").exists());
    ca.token("one", "10.42.0.9/16", &[]);
    let _service = ca.serve();
    ca.token("two", "10.42.0.10/16", &[]);
}

#[test]
fn many_commands_at_once_all_succeed_without_a_service() {
    let ca = Ca::init();
    thread::scope(|scope| {
        for host in 1..=6 {
            let ca = &ca;
            scope.spawn(move || ca.token(&format!("host-{host}"), &format!("10.42.0.{host}/16"), &[]));
        }
    });
    assert_eq!(ca.json("token list", &[]).as_array().unwrap().len(), 6);
}

#[test]
fn a_second_service_on_the_same_directory_is_refused() {
    let ca = Ca::init();
    let service = ca.serve();
    assert!(ca.failure("serve", &["--listen", "127.0.0.1:0"]).contains("in use by another nebula-ca"));
    assert_eq!(service.caller.get("/healthz", "").0, 200);
    ca.token("one", "10.42.0.9/16", &[]);
}

#[test]
fn lists_are_tables_for_people() {
    let ca = Ca::init();
    let service = ca.serve();
    service.caller.pod(&ca.text("node.token"), pod(7), &key()).unwrap();
    ca.token("edge", "10.42.0.9/16", &[]);
    let (issued, tokens) = (ca.output("certificate list", &[]), ca.output("token list", &[]));
    let row = issued.lines().nth(1).unwrap();
    assert!(issued.starts_with("NAME"), "{issued}");
    assert!(row.contains("web-7.shop.pod") && row.contains("10.42.0.7/16") && row.contains("ns:shop"), "{row}");
    assert!(row.contains("23h59m") || row.contains("1d00h"), "{row}");
    assert!(tokens.lines().nth(1).unwrap().contains("open for"), "{tokens}");
}

#[test]
fn a_revoked_certificate_is_on_the_blocklist_and_changes_the_tag() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.text("node.token");
    service.caller.pod(&token, pod(7), &key()).unwrap();
    let (status, tag, body) = service.caller.get("/v1/trust", "");
    assert_eq!((status, tag.is_empty()), (200, false));
    assert!(body.contains("\"blocklist\":[]"), "{body}");
    assert_eq!(service.caller.get("/v1/trust", &tag), (304, tag.clone(), String::new()));

    let revoked = ca.output("certificate revoke", &["web-7.shop.pod"]);
    let fingerprint = revoked.trim().strip_prefix("revoked ").unwrap();
    let (status, new_tag, body) = service.caller.get("/v1/trust", &tag);
    assert_eq!(status, 200);
    assert_ne!(new_tag, tag);
    assert!(body.contains(fingerprint), "{body}");
    assert_eq!(service.caller.pod(&token, pod(8), &key()).unwrap().blocklist, [fingerprint]);
    assert!(ca.output("certificate list", &[]).lines().nth(1).unwrap().contains("revoked"));
    assert!(ca.failure("certificate revoke", &["nobody"]).contains("nebula-ca certificate list"));
}

#[test]
fn what_is_wrong_with_the_directory_is_said_at_start() {
    let serve = |change: fn(&Ca)| {
        let ca = Ca::init();
        change(&ca);
        ca.failure("serve", &["--listen", "127.0.0.1:0"])
    };
    let error = serve(|ca| fs::remove_file(ca.file("ca.key")).unwrap());
    assert!(error.contains("ca.key") && error.contains("No such file"), "{error}");
    let error = serve(|ca| fs::write(ca.file("ca.key"), "junk").unwrap());
    assert!(error.contains("ca.key is not"), "{error}");
    let error = serve(|ca| fs::write(ca.file("policy.jsonc"), "{\"pod\": {}}").unwrap());
    assert!(error.contains("policy.jsonc") && error.contains("unknown field"), "{error}");
    let error = serve(|ca| fs::write(ca.file("tls.key"), "junk").unwrap());
    assert!(error.contains("tls.key"), "{error}");
    let error = serve(|ca| fs::write(ca.file("node.token"), "short").unwrap());
    assert!(error.contains("node.token"), "{error}");
    let error = serve(|ca| fs::write(ca.file("store.redb"), "junk".repeat(10_000)).unwrap());
    assert!(error.contains("store.redb"), "{error}");
}

#[test]
fn a_ca_made_by_go_nebula_serves_as_well() {
    let ca = Ca::init();
    let vectors = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/certs/v2-25519");
    for name in ["ca.crt", "ca.key"] {
        fs::copy(format!("{vectors}/{name}"), ca.file(name)).unwrap();
    }
    fs::write(ca.file("policy.jsonc"), "{}").unwrap();
    let service = ca.serve();
    assert_eq!(service.caller.get("/v1/trust", "").0, 200);
}

/// Kubernetes gives the group of `fsGroup` read and write permission for each file of a volume when it mounts it.
#[test]
fn secrets_that_a_volume_opened_for_its_group_are_private_again_after_a_start() {
    let ca = Ca::init();
    drop(ca.serve());
    let secrets = ["ca.key", "tls.key", "node.token", "renewal.key", "store.redb"];
    for secret in secrets {
        fs::set_permissions(ca.file(secret), fs::Permissions::from_mode(0o660)).unwrap();
    }
    fs::set_permissions(ca.file("ca.crt"), fs::Permissions::from_mode(0o664)).unwrap();
    let _service = ca.serve();
    for secret in secrets {
        assert_eq!(fs::metadata(ca.file(secret)).unwrap().permissions().mode() & 0o777, 0o600, "{secret}");
    }
    assert_eq!(fs::metadata(ca.file("ca.crt")).unwrap().permissions().mode() & 0o777, 0o664, "it is no secret");
}

#[test]
fn a_name_that_is_added_is_served_at_once_and_copies_of_the_old_certificate_stay_good() {
    let ca = Ca::init_with(&["--tls-name", "ca.example"]);
    let shown = ca.json("tls show", &[]);
    assert_eq!(shown["names"], serde_json::json!(["ca.example"]));
    let service = ca.serve();
    let body = b"{}";
    assert!(service.caller.post("/v1/certificate", body).is_err(), "the certificate is not for 127.0.0.1");
    let added = ca.json("tls add-name", &["127.0.0.1"]);
    assert_eq!(added["names"], serde_json::json!(["ca.example", "127.0.0.1"]));
    assert_eq!(added["fingerprint"], shown["fingerprint"]);
    // This caller trusts the certificate from before.
    assert_eq!(service.caller.post("/v1/certificate", body).unwrap().0, 400);
    assert!(ca.failure("tls add-name", &["not a name é"]).contains("host names or IP addresses"));
    let log = service.stop();
    assert!(log.contains("policy, CA and TLS files were reloaded"), "{log}");
}

#[test]
fn serving_at_an_address_that_is_in_no_name_is_warned_about() {
    let ca = Ca::init_with(&["--tls-name", "ca.example"]);
    ca.output("tls add-name", &["127.0.0.1"]);
    let (warned, quiet) = (Ca::init_with(&["--tls-name", "ca.example"]).warnings(), ca.warnings());
    assert!(warned.contains("nebula-ca tls add-name 127.0.0.1") && warned.contains("ca.example only"), "{warned}");
    assert_eq!(quiet, "");
}

#[test]
fn no_name_adds_a_line_to_a_list_or_the_log() {
    const NAME: &str = "ca\nretired  x\u{202e}\u{200b}\u{1b}[2J";
    let is_visible = |text: &str| text.chars().all(|c| c == '\n' || nebula_cert::is_visible(c));
    let ca = Ca::init_with(&["--name", NAME]);
    let shown = ca.output("rollover status", &[]);
    assert!(shown.lines().count() == 2 && is_visible(&shown), "{shown:?}");
    assert!(is_visible(&ca.output("rollover status", &["--json"])));
    assert_eq!(ca.json("rollover status", &[])[0]["name"], NAME, "for programs it is the same name");
    for (name, group) in [(NAME, "web"), ("web", NAME)] {
        let options = ["--name", name, "--network", "10.42.0.9/16", "--groups", group];
        assert!(ca.failure("token create", &options).contains("not seen"));
    }
    assert!(is_visible(&ca.failure("certificate revoke", &[NAME])));

    let service = ca.serve();
    let body = serde_json::json!({"public_key": "x", NAME: 1, "proof": {"type": NAME}});
    let (status, _) =
        service.caller.post(nebula_cert::issuance::CERTIFICATE_PATH, body.to_string().as_bytes()).unwrap();
    assert_eq!(status, 400);
    assert!(is_visible(&service.stop()));
    let audit = ca.text("audit.log");
    assert!(!audit.is_empty() && is_visible(&audit), "{audit}");
    assert!(audit.lines().all(|line| line.starts_with("{\"time\":")), "{audit}");
}
