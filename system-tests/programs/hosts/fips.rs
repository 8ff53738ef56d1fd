//! Daemon and `nebula-cert` of a FIPS build: what they say and refuse. Beside Go Nebula they do what `interop` has.

use crate::world;

use super::interop::{Case, interoperates};

use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;
use world::World;
use world::cluster::binary;

fn output(program: &str, arguments: &[&str]) -> (bool, String) {
    let Output { status, stdout, stderr } =
        Command::new(binary(program)).args(arguments).output().expect("the program runs");
    (status.success(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

#[test]
#[ignore = "needs a FIPS build"]
fn it_says_what_it_is_and_refuses_other_curves_ciphers_and_passphrases() {
    for program in ["nebula", "nebula-cert", "nebula-enrol", "nebula-cni-instance"] {
        let (_, said) = output(program, &["-version"]);
        assert!(said.contains("FIPS module of AWS-LC") && said.contains("not validated"), "{program}: {said}");
    }
    let folder = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let ca = |more: &[&str]| {
        let (crt, key) = (at("ca.crt"), at("ca.key"));
        output("nebula-cert", &[&["ca", "-name", "n", "-out-crt", &crt, "-out-key", &key], more].concat())
    };
    let (done, said) = ca(&["-curve", "25519"]);
    assert!(!done && said.contains("works with P256 keys only"), "{said}");
    let config = folder.path().join("config.yml");
    let test = |text: &str| {
        std::fs::write(&config, text).expect("write the configuration");
        output("nebula", &["-test", "-config", &config.display().to_string()])
    };
    let vectors = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/certs");
    let (done, said) = test(&format!("pki: {{ca: {vectors}/v2-25519/ca.crt}}"));
    assert!(!done && said.contains("works with P256 keys only"), "{said}");
    assert!(ca(&[]).0, "P256 is the default");
    let (crt, key) = (at("h.crt"), at("h.key"));
    let sign = ["sign", "-ca-crt", &at("ca.crt"), "-ca-key", &at("ca.key"), "-name", "h", "-networks", "10.42.0.1/24"];
    assert!(output("nebula-cert", &[&sign[..], &["-out-crt", &crt, "-out-key", &key]].concat()).0);
    let pki = format!("pki: {{ca: {}, cert: {crt}, key: {key}}}\n", at("ca.crt"));
    let (done, said) = test(&pki);
    assert!(done, "{said}");
    let (done, said) = test(&format!("{pki}cipher: chachapoly"));
    assert!(!done && said.contains("set cipher: aes on all hosts"), "{said}");
}

#[test]
#[ignore = "needs root, network namespaces and a FIPS build"]
fn two_hosts_with_it_have_a_tunnel_with_post_quantum_keys() {
    let mut world = World::new();
    let underlay = ["a", "b"].map(|name| world.host(name));
    world.certify(&["ca", "-name", "fips", "-curve", "P256"]);
    for (at, name) in ["a", "b"].iter().enumerate() {
        world.certify(&["sign", "-name", name, "-networks", &format!("10.77.0.{}/24", at + 1)]);
    }
    let dir = world.dir().display().to_string();
    for (at, name) in ["a", "b"].iter().enumerate() {
        let (other, endpoint) = (2 - at, underlay[1 - at]);
        let config = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{name}.crt, key: {dir}/{name}.key, post_quantum: require}}
static_host_map: {{\"10.77.0.{other}\": [\"{endpoint}:4242\"]}}
listen: {{host: 0.0.0.0, port: 4242}}
daemon: {{control_socket: {dir}/{name}.sock}}
tun: {{dev: neb0}}
firewall: {{outbound: [{{port: any, proto: any, host: any}}], inbound: [{{port: any, proto: any, host: any}}]}}
"
        );
        let path = world.write(&format!("{name}.yml"), &config).display().to_string();
        world.start(name, &binary("nebula"), &["-config", &path]);
    }
    world.ping("a", "10.77.0.2", Duration::from_secs(15));
    let (done, said) = output("nebula-ctl", &["--socket", &format!("{dir}/a.sock"), "peers", "--json"]);
    let peers: Value = serde_json::from_str(&said).expect("a document");
    assert!(done && said.contains("\"post_quantum\":true") || said.contains("\"post_quantum\": true"), "{peers}");
}

#[test]
#[ignore = "needs root, network namespaces, a FIPS build and the Go peers in target/peers"]
fn go_with_p256_meets_it() {
    for (suite, version) in [("trixie", 1), ("sid", 1), ("sid", 2)] {
        interoperates(Case { suite, curve: "P256", cipher: "aes", version });
    }
}
