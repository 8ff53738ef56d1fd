//! Daemon and `nebula-cert` of a FIPS build: what they say and refuse. Beside Go Nebula they do what `interop` has.

use crate::world;

use super::interop::{Case, interoperates};
use crate::enrolment::join::Network;

use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;
use world::World;
use world::cluster::{LIGHTHOUSE, binary};

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

/// Speaks TLS 1.3 with the CA, by OpenSSL and with these options; returns whether that succeeds.
fn speaks_tls(network: &Network, options: &[&str]) -> bool {
    let (at, roots) = (network.0.ca_url().replace("https://", ""), network.0.ca_file("tls.crt"));
    let words = ["timeout", "5", "openssl", "s_client", "-tls1_3", "-connect", &at, "-CAfile", &roots];
    let script = format!("{} -verify_return_error {} </dev/null", words.join(" "), options.join(" "));
    network.0.world.exec("control", &["sh", "-c", &script]).status.success()
}

/// What `nebula up` says of a CA that is OpenSSL's `s_server` with these options.
fn said_of_server(network: &mut Network, host: &str, token: &str, options: &[&str]) -> String {
    let (crt, key) = (network.0.ca_file("tls.crt"), network.0.ca_file("tls.key"));
    let serve = ["s_server", "-tls1_3", "-accept", "8443", "-www", "-cert", &crt, "-key", &key];
    network.0.world.start("control", "/usr/bin/openssl".as_ref(), &[&serve, options].concat());
    std::thread::sleep(Duration::from_millis(500));
    let output = network.up(host, token);
    network.0.world.stop("control", nix::sys::signal::Signal::SIGKILL);
    assert!(!output.status.success(), "that is no CA");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
#[ignore = "needs root, network namespaces, OpenSSL and a FIPS build"]
fn a_host_joins_by_a_ca_with_it_and_neither_end_speaks_tls_with_other_algorithms() {
    let mut network = Network::new();
    network.joined("vm", "1h");
    network.0.world.ping("vm", LIGHTHOUSE, Duration::from_secs(15));
    for certificate in [network.0.ca_file("ca.crt"), network.0.world.dir().join("vm/host.crt").display().to_string()] {
        let (_, said) = output("nebula-cert", &["print", "-json", "-path", &certificate]);
        assert!(said.contains("\"curve\":\"P256\"") || said.contains("\"curve\": \"P256\""), "{said}");
    }

    for (options, is_spoken) in [
        (["-ciphersuites", "TLS_AES_256_GCM_SHA384", "-groups", "P-256"], true),
        (["-ciphersuites", "TLS_AES_128_GCM_SHA256", "-groups", "P-384"], true),
        (["-ciphersuites", "TLS_CHACHA20_POLY1305_SHA256", "-groups", "P-256"], false),
        (["-ciphersuites", "TLS_AES_256_GCM_SHA384", "-groups", "X25519"], false),
    ] {
        assert_eq!(speaks_tls(&network, &options), is_spoken, "{options:?}");
    }

    network.0.world.host("late");
    let token = network.token("late", &[]);
    network.0.world.stop("control", nix::sys::signal::Signal::SIGTERM);
    // The control: they speak TLS, and what answers is no CA.
    let right = ["-ciphersuites", "TLS_AES_256_GCM_SHA384", "-groups", "P-256"];
    let said = said_of_server(&mut network, "late", &token, &right);
    println!("{said}");
    assert!(!said.contains("HandshakeFailure"), "{said}");
    for wrong in [["-ciphersuites", "TLS_CHACHA20_POLY1305_SHA256"], ["-groups", "X25519"]] {
        let said = said_of_server(&mut network, "late", &token, &wrong);
        println!("{said}");
        assert!(said.contains("HandshakeFailure"), "{wrong:?}: {said}");
    }
}
