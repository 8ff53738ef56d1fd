//! Certificates, keys and CAs of the section `pki`.

use nebula_cert::{Certificate, Curve, PrivateKey, SigningKey, Template};

use super::*;

const NOW: i64 = 1_800_000_000;

struct Network {
    ca: Certificate,
    ca_key: SigningKey,
}

impl Network {
    fn new(not_after: i64) -> Self {
        let ca_key = SigningKey::generate(Curve::Curve25519).unwrap();
        let ca = template("ca", NOW - 1000, not_after, ca_key.public_key(), &[]).self_sign(&ca_key).unwrap();
        Self { ca, ca_key }
    }

    /// PEM text of the certificate and the key.
    fn host(&self, not_after: i64) -> (String, String) {
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let host = template("host", NOW - 900, not_after, key.public_key(), &["10.42.0.7/16"]);
        (host.sign(&self.ca, &self.ca_key).unwrap().to_pem(), key.to_pem().to_string())
    }
}

fn template(name: &str, not_before: i64, not_after: i64, public_key: Vec<u8>, networks: &[&str]) -> Template {
    Template {
        networks: networks.iter().map(|network| network.parse().unwrap()).collect(),
        public_key,
        ..Template::new(name, not_before..=not_after)
    }
}

fn with_pki(ca: &str, certificate: &str, key: &str, more: &str) -> Result<Settings, Refusals> {
    let inline = |text: &str| serde_json::Value::from(text).to_string();
    let text = format!("pki: {{ca: {}, cert: {}, key: {}{more}}}", inline(ca), inline(certificate), inline(key));
    Settings::read(&tree(&text), NOW)
}

#[test]
fn credentials_are_read_inline_and_from_files() {
    let network = Network::new(NOW + 1000);
    let (certificate, key) = network.host(NOW + 500);
    let inline = with_pki(&network.ca.to_pem(), &certificate, &key, "").unwrap();
    assert_eq!(inline.pki.unwrap().identity.primary().name(), "host");

    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (ca, cert, key_file) =
        (file("ca.crt", &network.ca.to_pem()), file("host.crt", &certificate), file("host.key", &key));
    assert!(with_pki(&ca, &cert, &key_file, "").unwrap().remarks.iter().all(|w| !w.text.contains("pki")));
}

#[test]
fn wrong_credentials_are_refused_with_the_cause() {
    let network = Network::new(NOW + 1000);
    let ca = network.ca.to_pem();
    let (certificate, key) = network.host(NOW + 500);
    let (_, other_key) = network.host(NOW + 500);
    let (old_certificate, old_key) = network.host(NOW - 1);
    let old_ca = Network::new(NOW - 1).ca.to_pem();
    for (ca, certificate, key, more, expected) in [
        (ca.as_str(), certificate.as_str(), "", "", "no pki.key path or PEM data provided"),
        (&ca, "", &key, "", "no pki.cert path or PEM data provided"),
        ("", &certificate, &key, "", "no pki.ca path or PEM data provided"),
        (&ca, &certificate, "/nonexistent/k", "", "unable to read pki.key file /nonexistent/k: open /nonexistent/k"),
        (&ca, &certificate, "pkcs11:x", "", "pkcs11"),
        (&ca, &certificate, &other_key, "", "private key is not a pair with public key in nebula cert"),
        (&ca, &old_certificate, &old_key, "", "nebula certificate for this host is expired"),
        (&old_ca, &certificate, &key, "", "no valid CA certificates present"),
        (&certificate, &certificate, &key, "", "certificate is not a CA"),
        (&ca, &ca, &key, "", "no networks encoded in certificate"),
        (&ca, &certificate, &key, ", initiating_version: 1", "can not use pki.initiating_version 1 without a v1"),
        (&ca, &certificate, &key, ", initiating_version: 3", "unknown pki.initiating_version: 3"),
    ] {
        let error = with_pki(ca, certificate, key, more).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\nexpected {expected}");
        assert!(!error.contains("PRIVATE KEY-----"), "{error}");
    }
}

#[test]
fn an_expired_certificate_that_is_renewed_by_itself_keeps_no_daemon_from_its_start() {
    let network = Network::new(NOW + 1000);
    let (certificate, key) = network.host(NOW - 1);
    let ca = network.ca.to_pem();
    let settings = with_pki(&ca, &certificate, &key, ", enrolment: /etc/nebula/enrolment.json").unwrap();
    assert!(settings.remarks.iter().any(|remark| remark.text.contains("expired")), "{:?}", settings.remarks);
    assert!(with_pki(&ca, &certificate, &key, ", enrolment: ''").is_err());
}

#[test]
fn an_unrelated_ca_is_a_warning_and_a_blocklist_may_be_one_scalar() {
    let network = Network::new(NOW + 1000);
    let (certificate, key) = network.host(NOW + 500);
    let unrelated = with_pki(&Network::new(NOW + 1000).ca.to_pem(), &certificate, &key, "").unwrap();
    assert!(unrelated.remarks.iter().any(|w| w.text.contains("not valid under pki.ca")), "{:?}", unrelated.remarks);

    let blocked = Certificate::from_pem(certificate.as_bytes()).unwrap();
    let more = format!(", blocklist: {}", blocked.fingerprint());
    let settings = with_pki(&network.ca.to_pem(), &certificate, &key, &more).unwrap();
    assert!(settings.pki.unwrap().trust.verify(blocked, NOW).is_err());
}
