//! `deploy/nebula.schema.json`, checked with an independent validator.

use std::io::Write;
use std::process::{Command, Stdio};

use super::repository;

/// Prints the path of every error that the schema finds in the YAML documents on stdin, one line per document.
const VALIDATE: &str = "
import json, sys, yaml
from jsonschema import Draft7Validator, validators
schema = json.load(open(sys.argv[1]))
kind = validators.validator_for(schema)
kind.check_schema(schema)
for document in yaml.safe_load_all(sys.stdin):
    print(' '.join(sorted('.'.join(map(str, e.absolute_path)) or '.' for e in kind(schema).iter_errors(document))))
";

/// The validator's output for each document.
fn mistakes(documents: &[&str]) -> Vec<String> {
    let mut child = Command::new("/usr/bin/python3")
        .args(["-c", VALIDATE])
        .arg(repository("deploy/nebula.schema.json"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python runs");
    child.stdin.take().expect("stdin").write_all(documents.join("\n---\n").as_bytes()).expect("python reads");
    let output = child.wait_with_output().expect("python ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
#[ignore = "needs python3-jsonschema, python3-yaml and the Go peers in target/peers"]
fn the_schema_accepts_what_go_ships_as_an_example() {
    for suite in ["bookworm", "trixie", "sid"] {
        let path = repository("target/peers").join(suite).join("usr/share/doc/nebula/examples/config.yml");
        let example = std::fs::read_to_string(&path).expect("the example of Go");
        assert_eq!(mistakes(&[&example]), [""], "{suite}");
    }
    let own = std::fs::read_to_string(repository("deploy/debian/config.example.yml")).expect("our example");
    assert_eq!(mistakes(&[&own]), [""]);
}

#[test]
#[ignore = "needs python3-jsonschema and python3-yaml"]
fn the_schema_names_the_place_of_a_mistake() {
    let cases = [
        ("pki: {ca: a, cert: b, key: c}", ""),
        ("cipher: des", "cipher"),
        ("listen: {port: 70000}", "listen.port"),
        ("lighthouse: {hosts: 10.0.0.1}", "lighthouse.hosts"),
        ("lighthose: {hosts: []}", "."),
        ("tun: {mut: 1300}", "tun"),
        ("firewall: {inbound: [{port: any, proto: icmpv6, host: any}]}", "firewall.inbound.0.proto"),
        ("firewall: {inbound: {port: any}}", "firewall.inbound"),
        ("tun: {unsafe_routes: [{route: 10.0.0.0/8}]}", "tun.unsafe_routes.0"),
        ("punchy: {delay: 1}", "punchy.delay"),
        ("[]", "."),
    ];
    let documents: Vec<_> = cases.iter().map(|(document, _)| *document).collect();
    let expected: Vec<_> = cases.iter().map(|(_, place)| *place).collect();
    assert_eq!(mistakes(&documents), expected);
}
