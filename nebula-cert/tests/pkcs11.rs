//! CA keys in SoftHSM tokens, through the command line of a build that can load its module.
#![cfg(all(feature = "cli", feature = "pkcs11"))]
#![allow(clippy::unwrap_used, reason = "a test ends where an unwrap fails")]

mod folder;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use folder::Folder;
use nebula_cert::{CaPool, Certificate, Curve, public_key_from_pem};

const MODULE: &str = "/usr/lib/softhsm/libsofthsm2.so";
const PIN: &str = "271828";
const GO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/peers/sid/usr/bin/nebula-cert");

/// A directory for SoftHSM's tokens, in which the program runs.
struct Site(Folder);

impl Site {
    /// Creates a token named `main` that holds the P-256 key `ca` (id 01).
    fn new() -> Self {
        let site = Self(Folder::new());
        fs::create_dir(site.path().join("tokens")).unwrap();
        let tokens = site.path().join("tokens");
        let settings = format!("directories.tokendir = {}\nobjectstore.backend = file\n", tokens.display());
        fs::write(site.path().join("softhsm2.conf"), settings).unwrap();
        fs::write(site.path().join("pin"), format!("{PIN}\n")).unwrap();
        site.add_token("main");
        site.add_key("main", "EC:prime256v1", "01", "ca");
        site
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn tool(&self, program: &str, words: &[&str]) {
        let mut command = Command::new(program);
        let output = command.args(words).env("SOFTHSM2_CONF", self.path().join("softhsm2.conf")).output().unwrap();
        assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn add_token(&self, label: &str) {
        let words = ["--init-token", "--free", "--label", label, "--so-pin", "31415926", "--pin", PIN];
        self.tool("softhsm2-util", &words);
    }

    fn add_key(&self, token: &str, kind: &str, id: &str, label: &str) {
        let into = ["--module", MODULE, "--token-label", token, "--login", "--pin", PIN];
        let key = ["--keypairgen", "--key-type", kind, "--id", id, "--label", label, "--usage-sign"];
        self.tool("pkcs11-tool", &[&into[..], &key].concat());
    }

    /// A URI with these parts and the PIN in a file.
    fn uri(&self, parts: &str) -> String {
        format!("pkcs11:{parts}?module-path={MODULE}&pin-source=file:{}", self.path().join("pin").display())
    }

    fn run(&self, words: &str, uri: &str) -> Output {
        let mut command = self.0.command(words);
        command.args(["-pkcs11", uri]).env("SOFTHSM2_CONF", self.path().join("softhsm2.conf"));
        command.stdin(Stdio::null()).output().unwrap()
    }

    fn succeeds(&self, words: &str, parts: &str) {
        let output = self.run(words, &self.uri(parts));
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), &*errors), (Some(0), ""), "{words} {parts}");
    }

    /// Runs the program, which must fail and write no file; returns its error message.
    fn fails(&self, words: &str, uri: &str) -> String {
        let count = || fs::read_dir(self.path()).unwrap().count();
        let before = count();
        let output = self.run(words, uri);
        assert_eq!((output.status.code(), &*output.stdout), (Some(1), &b""[..]), "{words} {uri}");
        assert_eq!(count(), before, "{words} {uri}");
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!errors.contains(PIN), "{errors}");
        errors
    }

    fn go_verifies(&self, ca: &str, certificate: &str) {
        let mut command = Command::new(GO);
        let output =
            command.current_dir(self.path()).args(["verify", "-ca", ca, "-crt", certificate]).output().unwrap();
        assert!(output.status.success(), "{ca} {certificate}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
#[ignore = "needs SoftHSM, OpenSC and Go's tool: ./test pkcs11"]
fn a_ca_in_a_token_signs_and_renews_both_versions_and_go_accepts_them() {
    let site = Site::new();
    let key = "token=main;object=ca";
    for version in [1, 2] {
        let ca = format!("ca{version}.crt");
        site.succeeds(&format!("ca -name v{version} -curve P256 -version {version} -out-crt {ca}"), key);
        site.0.succeeds(&format!("keygen -curve P256 -out-key h{version}.key -out-pub h{version}.pub"));
        let host = format!("-name h -networks 10.0.0.1/16 -groups a,b -in-pub h{version}.pub -duration 1h");
        for signed in [1, 2] {
            let crt = format!("h{version}{signed}.crt");
            site.succeeds(&format!("sign {host} -version {signed} -ca-crt {ca} -out-crt {crt}"), key);
            site.0.succeeds(&format!("verify -ca {ca} -crt {crt}"));
            site.go_verifies(&ca, &crt);
            let old = site.0.certificate(&crt);
            site.succeeds(&format!("renew -crt {crt} -ca-crt {ca} -duration 2h"), key);
            site.go_verifies(&ca, &crt);
            let new = site.0.certificate(&crt);
            assert_eq!((new.name(), new.groups(), new.public_key()), ("h", old.groups(), old.public_key()));
            assert_eq!(new.not_after() - new.not_before(), 7_200);
        }
    }
    let keys = fs::read_dir(site.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let keys: Vec<_> = keys.filter(|name| name.ends_with(".key") && !name.starts_with('h')).collect();
    assert!(keys.is_empty(), "the key of the CA is in no file: {keys:?}");
}

#[test]
#[ignore = "needs SoftHSM, OpenSC and Go's tool: ./test pkcs11"]
fn signatures_of_a_token_are_low_s() {
    let site = Site::new();
    // About half of the signatures that a token makes are not in low-S form.
    for number in 0..12 {
        site.succeeds(&format!("ca -name c -curve P256 -out-crt {number}.crt"), "id=%01");
        let ca = site.0.certificate(&format!("{number}.crt"));
        let s = p256::ecdsa::Signature::from_der(ca.signature()).unwrap();
        assert_eq!(s.normalize_s(), s);
        CaPool::new().add(ca).unwrap();
    }
}

#[test]
#[ignore = "needs SoftHSM, OpenSC and Go's tool: ./test pkcs11"]
fn an_ed25519_key_in_a_token_is_a_ca_too() {
    let site = Site::new();
    site.add_key("main", "EC:edwards25519", "02", "edwards");
    let key = "token=main;object=edwards";
    site.succeeds("ca -name e -out-crt ca.crt", key);
    assert_eq!(site.0.certificate("ca.crt").curve(), Curve::Curve25519);
    site.0.succeeds("keygen -out-key h.key -out-pub h.pub");
    site.succeeds("sign -name h -networks fd00::1/64 -in-pub h.pub", key);
    site.go_verifies("ca.crt", "h.crt");
    let errors = site.fails("sign -name i -networks fd00::1/64", &site.uri(key));
    assert!(errors.starts_with("Error: -in-pub is required"), "{errors}");
}

#[test]
#[ignore = "needs SoftHSM, OpenSC and Go's tool: ./test pkcs11"]
fn a_host_key_in_a_token_is_printed_and_certified() {
    let site = Site::new();
    site.add_key("main", "EC:prime256v1", "03", "host");
    site.succeeds("keygen -curve P256 -out-pub host.pub", "object=host");
    let (curve, key) = public_key_from_pem(&site.0.read("host.pub")).unwrap();
    assert_eq!(curve, Curve::P256);
    site.succeeds("ca -name c -curve P256 -out-crt ca.crt", "object=ca");
    site.succeeds("sign -name h -networks 10.0.0.1/8 -in-pub host.pub", "object=ca");
    assert_eq!(site.0.certificate("h.crt").public_key(), key);
    // As in Go, without -in-pub the certificate is for the key in the token.
    site.succeeds("sign -name self -networks 10.0.0.2/8", "object=ca");
    assert_eq!(site.0.certificate("self.crt").public_key(), site.0.certificate("ca.crt").public_key());
    assert!(!site.path().join("self.key").exists());
    site.go_verifies("ca.crt", "self.crt");
}

#[test]
#[ignore = "needs SoftHSM, OpenSC and Go's tool: ./test pkcs11"]
fn the_part_of_the_uri_that_leads_nowhere_is_named() {
    let site = Site::new();
    let ca = "ca -name c -curve P256 -out-crt ca.crt";
    let with = |query: &str| format!("pkcs11:token=main;object=ca?{query}");
    for (uri, complaint) in [
        (site.uri("token=other"), "token: no token matches other; the module has token=main"),
        (site.uri("serial=0"), "serial: no token matches 0"),
        (site.uri("slot-id=3"), "slot-id: no token matches 3"),
        (site.uri("object=other"), "object: the token shows no private key with object=other"),
        (site.uri("id=%ab"), "id: the token shows no private key with id=ab"),
        (site.uri("object=ca;id=%ab"), "id: the token shows no private key with id=ab"),
        (site.uri("lable=ca"), "lable: no such part of a PKCS#11 URI"),
        (with(&format!("module-path={MODULE}")), "object: the token shows no private key; without pin-source"),
        (with(&format!("module-path={MODULE}&pin-value=0000")), "pin-value: the token refused the PIN"),
        (with(&format!("module-path={MODULE}&pin-source=/none")), "pin-source: unable to read /none: No such file"),
        (with("module-path=/none.so"), "module-path: unable to use /none.so: /none.so: cannot open shared object"),
        (with("module-path=/lib/x86_64-linux-gnu/libm.so.6"), "module-path: unable to use /lib/x86_64-linux-gnu/libm"),
        (with(&format!("pin-value={PIN}")), "module-path: missing"),
    ] {
        let errors = site.fails(ca, &uri);
        let expected = format!("Error: error while creating PKCS#11 client: {complaint}");
        assert!(errors.starts_with(&expected), "{errors}");
    }
    site.add_key("main", "EC:prime256v1", "04", "second");
    assert!(site.fails(ca, &site.uri("token=main")).contains("object: 2 private keys of the token match"));
    site.add_key("main", "EC:secp384r1", "05", "p384");
    assert!(site.fails(ca, &site.uri("object=p384")).contains("neither a P-256 nor an Ed25519 key"));
    site.add_token("second");
    assert!(site.fails(ca, &site.uri("object=ca")).contains("token: several tokens match"));
    site.succeeds(ca, "token=main;object=ca");
}

#[test]
#[ignore = "needs SoftHSM, OpenSC and Go's tool: ./test pkcs11"]
fn flags_that_a_token_rules_out_are_refused_as_in_go() {
    let site = Site::new();
    let key = site.uri("object=ca");
    for mode in ["ca -name x -curve P256", "keygen -curve P256 -out-pub p", "sign -name x -networks 10.0.0.1/8"] {
        let errors = site.fails(&format!("{mode} -out-key k"), &key);
        assert!(errors.starts_with("Error: cannot set -out-key with -pkcs11\n"), "{mode}: {errors}");
    }
    for mode in ["ca -name x", "keygen -out-pub p"] {
        assert!(site.fails(mode, &key).starts_with("Error: invalid curve for PKCS#11: "), "{mode}");
    }
    site.succeeds("ca -name x -curve P256", "object=ca");
    assert!(site.fails("ca -name x -curve P256", &key).starts_with("Error: refusing to overwrite existing CA cert"));
    site.add_key("main", "EC:prime256v1", "06", "other");
    let errors = site.fails("sign -name x -networks 10.0.0.1/8", &site.uri("object=other"));
    let expected =
        "Error: refusing to sign, root certificate does not match private key: ca.crt and the key in the token";
    assert!(errors.starts_with(expected), "{errors}");
    assert!(Certificate::from_pem(&site.0.read("ca.crt")).unwrap().is_ca());
}
