//! Certificates and keys made by the released Go tool give the same bytes, fingerprints and verdicts.
#![allow(clippy::unwrap_used, reason = "a test ends where an unwrap fails")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use nebula_cert::{
    CaPool, Certificate, Curve, Error, Fingerprint, Identity, PrivateKey, SigningKey, Template, Version,
    public_key_from_pem,
};
use proptest::prelude::*;
use serde_json::Value;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors");
const PASSPHRASE: &[u8] = b"correct horse battery staple";
/// 2027-01-15, when every vector not named "expired" is valid.
const NOW: i64 = 1_800_000_000;

fn vectors(path: &str) -> PathBuf {
    Path::new(VECTORS).join(path)
}

fn read(path: impl AsRef<Path>) -> Vec<u8> {
    fs::read(path.as_ref()).unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// All files under `certs/` with this extension, in a stable order.
fn files(ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in fs::read_dir(vectors("certs")).unwrap() {
        let folder = folder.unwrap().path();
        if folder.is_dir() {
            found.extend(fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    found.retain(|path| path.to_str().unwrap().ends_with(ending));
    found.sort();
    assert!(!found.is_empty(), "no {ending} files");
    found
}

/// A pool of all CA certificates in the vectors.
fn all_authorities() -> CaPool {
    let mut pool = CaPool::new();
    for path in files(".crt") {
        for certificate in Certificate::bundle_from_pem(&read(&path)).unwrap() {
            if certificate.is_ca() {
                pool.add(certificate).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            }
        }
    }
    pool
}

fn pool_of(file: &str) -> CaPool {
    CaPool::from_pem(&read(vectors(file))).unwrap()
}

#[test]
fn every_certificate_re_encodes_to_the_same_text() {
    for path in files(".crt") {
        let text = read(&path);
        let certificates = Certificate::bundle_from_pem(&text).unwrap();
        let again: String = certificates.iter().map(Certificate::to_pem).collect();
        assert_eq!(again.as_bytes(), text, "{}", path.display());
    }
}

#[test]
fn every_certificate_prints_the_json_that_the_tool_recorded() {
    let mut compared = 0;
    for path in files(".crt") {
        let json = [path.with_extension("1.11.0.json"), path.with_extension("json")];
        let recorded = json.iter().find(|path| path.exists()).unwrap();
        let certificates = Certificate::bundle_from_pem(&read(&path)).unwrap();
        let printed: Value = certificates.iter().map(Certificate::to_json).collect();
        // Compared as text, so that the order of keys matters as well.
        assert_eq!(printed.to_string(), String::from_utf8(read(recorded)).unwrap().trim_end(), "{}", path.display());
        compared += certificates.len();
    }
    assert_eq!(compared, 71);
}

#[test]
fn every_host_certificate_verifies_unless_it_is_named_expired() {
    let pool = all_authorities();
    let mut refused = BTreeMap::new();
    for path in files(".crt") {
        for certificate in Certificate::bundle_from_pem(&read(&path)).unwrap() {
            if certificate.is_ca() {
                continue;
            }
            if let Err(error) = pool.verify(certificate, NOW) {
                refused.insert(path.file_stem().unwrap().to_str().unwrap().to_owned(), error);
            }
        }
    }
    assert_eq!(refused.keys().collect::<Vec<_>>(), ["host-expired", "host-of-expired-ca"]);
    assert!(matches!(refused["host-expired"], Error::Expired { .. }));
    assert!(matches!(refused["host-of-expired-ca"], Error::CaExpired { .. }));
}

#[test]
fn every_certificate_survives_the_handshake_form() {
    for path in files(".crt") {
        for certificate in Certificate::bundle_from_pem(&read(&path)).unwrap() {
            let (version, curve, bytes) = (certificate.version(), certificate.curve(), certificate.to_handshake());
            let key = certificate.public_key();
            assert!(!bytes.windows(key.len()).any(|window| window == key), "{}", path.display());
            let rebuilt = Certificate::from_handshake(version, curve, key, &bytes).unwrap();
            assert_eq!(rebuilt, certificate);

            let whole = certificate.to_bytes();
            let refused = Certificate::from_handshake(version, curve, key, &whole).unwrap_err();
            assert_eq!(refused, Error::PublicKeyPresent, "{}", path.display());
            let other_version = if version == Version::V1 { Version::V2 } else { Version::V1 };
            assert!(Certificate::from_handshake(other_version, curve, key, &bytes).is_err());
        }
    }
}

#[test]
fn a_handshake_certificate_of_another_curve_is_refused() {
    for (file, curve, other) in [
        ("certs/v1-25519/host-plain.crt", Curve::Curve25519, Curve::P256),
        ("certs/v1-p256/host-plain.crt", Curve::P256, Curve::Curve25519),
    ] {
        let certificate = Certificate::from_pem(&read(vectors(file))).unwrap();
        let bytes = certificate.to_handshake();
        let refused = Certificate::from_handshake(Version::V1, other, certificate.public_key(), &bytes).unwrap_err();
        assert_eq!(refused, Error::Curve { found: curve, expected: other });
    }
}

#[test]
fn every_key_file_reads_back_and_fits_its_certificate() {
    for path in files(".key") {
        let text = read(&path);
        let name = path.file_stem().unwrap().to_str().unwrap();
        let certificate = path.with_extension("crt");
        if let Ok(key) = PrivateKey::from_pem(&text) {
            assert_eq!(key.to_pem().as_bytes(), text);
            if certificate.exists() {
                let identity = Identity::read(&certificate, &path).unwrap();
                assert_eq!(identity.private_key().public_key(), identity.primary().public_key());
            }
            let public = path.with_extension("pub");
            if public.exists() {
                assert_eq!(public_key_from_pem(&read(&public)), Ok((key.curve(), key.public_key())));
                assert_eq!(key.public_pem().as_bytes(), read(&public));
            }
        } else {
            assert!(name.starts_with("ca"), "{}", path.display());
            let key = match SigningKey::from_pem(&text) {
                Ok(key) => {
                    assert_eq!(key.to_pem().as_bytes(), text);
                    key
                }
                Err(Error::KeyEncrypted) => SigningKey::from_encrypted_pem(&text, PASSPHRASE).unwrap(),
                Err(error) => panic!("{}: {error}", path.display()),
            };
            let ca = Certificate::from_pem(&read(&certificate)).unwrap();
            assert_eq!((key.curve(), &*key.public_key()), (ca.curve(), ca.public_key()), "{}", path.display());
        }
    }
}

#[test]
fn encrypted_keys_refuse_another_passphrase() {
    for name in ["ca-25519-small", "ca-p256-small"] {
        let text = read(vectors(&format!("certs/encrypted/{name}.key")));
        for passphrase in [&b"correct horse battery stapl"[..], b"", b"Correct horse battery staple"] {
            assert_eq!(SigningKey::from_encrypted_pem(&text, passphrase).unwrap_err(), Error::Passphrase);
        }
    }
}

#[test]
fn hosts_with_both_versions_and_their_ca_bundle_load() {
    let folder = vectors("certs/dual-25519");
    let identity = Identity::read(folder.join("host-bundle.crt"), folder.join("host.key")).unwrap();
    assert_eq!(identity.primary().version(), Version::V2);
    assert_eq!(identity.networks().len(), 2);
    let pool = CaPool::from_pem(&read(folder.join("ca-bundle.crt"))).unwrap();
    assert_eq!(pool.certificates().count(), 2);
    for version in [Version::V1, Version::V2] {
        pool.verify(identity.certificate(version).unwrap().clone(), NOW).unwrap();
    }
}

/// Signing the same contents again gives the tool's certificate (Ed25519 signatures are deterministic).
#[test]
fn the_same_contents_signed_with_the_same_key_give_the_same_bytes() {
    for folder in ["v1-25519", "v2-25519"] {
        let folder = vectors("certs").join(folder);
        let ca = Certificate::from_pem(&read(folder.join("ca.crt"))).unwrap();
        let key = SigningKey::from_pem(&read(folder.join("ca.key"))).unwrap();
        assert_eq!(template(&ca).self_sign(&key), Ok(ca.clone()));
        for name in ["host-plain", "host-groups", "host-unsafe", "host-multi", "host-v6only"] {
            let path = folder.join(name).with_extension("crt");
            if path.exists() {
                let host = Certificate::from_pem(&read(path)).unwrap();
                assert_eq!(template(&host).sign(&ca, &key), Ok(host));
            }
        }
    }
}

fn template(certificate: &Certificate) -> Template {
    Template {
        version: certificate.version(),
        curve: certificate.curve(),
        name: certificate.name().to_owned(),
        networks: certificate.networks().to_vec(),
        unsafe_networks: certificate.unsafe_networks().to_vec(),
        groups: certificate.groups().to_vec(),
        not_before: certificate.not_before(),
        not_after: certificate.not_after(),
        public_key: certificate.public_key().to_vec(),
    }
}

#[test]
fn every_crafted_certificate_gets_the_verdict_of_the_go_tool() {
    let manifest: Vec<Value> = serde_json::from_slice(&read(vectors("bad/manifest.json"))).unwrap();
    assert_eq!(manifest.len(), 136);
    let mut wrong = Vec::new();
    for entry in &manifest {
        let pool = pool_of(entry["ca"].as_str().unwrap());
        let text = match entry["file"].as_str() {
            Some(file) => read(vectors(file)),
            None => entry["pem"].as_str().unwrap().as_bytes().to_vec(),
        };
        let ours = Certificate::from_pem(&text).and_then(|certificate| pool.verify(certificate, NOW));
        let go = &entry["nebula_cert_1_11_0"];
        let same = match &ours {
            Ok(_) => go["accepted"] == true,
            Err(error) => go["accepted"] == false && same_reason(error, go["message"].as_str().unwrap()),
        };
        if !same {
            wrong.push(format!("{}: Go: {go}, ours: {:?}", entry["name"], ours.map(|_| "accepted")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Whether our reason is that of Go, judged by the stable part of its text.
fn same_reason(error: &Error, go: &str) -> bool {
    let ours = error.to_string();
    let reason = go.rsplit(": ").next().unwrap();
    let parse_faults = ["bad wire format", "cannot parse invalid wire-format data", "nil byte array"];
    if go.contains("invalid network: invalid Prefix") {
        matches!(error, Error::PrefixLength { .. })
    } else if go.contains("non-CA certificate") && go.contains("network") && !go.contains("zero address") {
        matches!(error, Error::NoNetworks { .. })
    } else if parse_faults.iter().any(|fault| go.contains(fault)) {
        matches!(error, Error::Malformed { .. } | Error::Empty { .. } | Error::NameLength { .. })
    } else if go.contains("could not find ca") {
        matches!(error, Error::UnknownCa { .. })
    } else if let Error::Expired { not_before, at, .. } = error
        && at < not_before
    {
        // Go calls that expired, too.
        reason.ends_with("certificate is expired") && ours.contains("certificate is not valid yet")
    } else {
        // The value at the end or, if there is none, the whole reason.
        ours.contains(reason)
    }
}

#[test]
fn blocking_either_form_of_a_p256_signature_blocks_both() {
    let manifest: Vec<Value> = serde_json::from_slice(&read(vectors("bad/manifest.json"))).unwrap();
    let forms: Vec<_> = manifest.iter().filter(|entry| entry["fingerprints"].is_object()).collect();
    assert_eq!(forms.len(), 2);
    for entry in &forms {
        let certificate = Certificate::from_pem(entry["pem"].as_str().unwrap().as_bytes()).unwrap();
        for form in ["high_s", "low_s"] {
            let fingerprint: Fingerprint = entry["fingerprints"][form].as_str().unwrap().parse().unwrap();
            let mut pool = pool_of(entry["ca"].as_str().unwrap());
            let verified = pool.verify(certificate.clone(), NOW).unwrap();
            assert_eq!(pool.recheck(&verified, NOW), Ok(()));
            pool.block(fingerprint);
            let blocked = Error::Blocked { name: certificate.name().into(), fingerprint };
            assert_eq!(pool.verify(certificate.clone(), NOW).unwrap_err(), blocked);
            assert_eq!(pool.recheck(&verified, NOW), Err(blocked));
        }
    }
}

#[test]
fn a_live_peer_is_refused_when_it_expires_or_loses_its_ca() {
    let host = Certificate::from_pem(&read(vectors("certs/v2-25519/host-plain.crt"))).unwrap();
    let pool = pool_of("certs/v2-25519/ca.crt");
    let verified = pool.verify(host, NOW).unwrap();
    assert_eq!(pool.recheck(&verified, verified.not_after()), Ok(()));
    assert!(matches!(pool.recheck(&verified, verified.not_after() + 1), Err(Error::Expired { .. })));
    assert!(matches!(pool.recheck(&verified, i64::MAX), Err(Error::CaExpired { .. })));
    let other = pool_of("certs/v2-25519/ca-other.crt");
    assert!(matches!(other.recheck(&verified, NOW), Err(Error::UnknownCa { .. })));
}

#[test]
fn a_host_certificate_is_no_ca_and_an_altered_ca_is_not_self_signed() {
    let host = read(vectors("certs/v2-25519/host-plain.crt"));
    assert_eq!(CaPool::from_pem(&host).unwrap_err(), Error::NotACa { name: "host-plain".into() });
    let ca = Certificate::from_pem(&read(vectors("certs/v2-25519/ca.crt"))).unwrap();
    let mut bytes = ca.to_bytes();
    let name = bytes.windows(3).position(|window| window == b"vec").unwrap();
    bytes[name] = b'V';
    let altered = Certificate::from_bytes(Version::V2, &bytes).unwrap();
    let refused = CaPool::new().add(altered).unwrap_err();
    assert!(matches!(refused, Error::NotSelfSigned { .. }));
}

/// The binary form of one host certificate of each version and curve.
fn samples() -> Vec<(Version, Vec<u8>)> {
    ["v1-25519/host-groups", "v1-p256/host-unsafe", "v2-25519/host-multi", "v2-p256/host-groups"]
        .map(|name| Certificate::from_pem(&read(vectors(&format!("certs/{name}.crt")))).unwrap())
        .map(|certificate| (certificate.version(), certificate.to_bytes()))
        .into()
}

/// Copies of `bytes` with one byte changed: each single bit, and some more masks.
fn one_byte_changed(bytes: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let masks = (0..8).map(|bit| 1 << bit).chain([0x03, 0x7f, 0xaa, 0xff]);
    masks.flat_map(move |mask: u8| {
        (0..bytes.len()).map(move |at| {
            let mut altered = bytes.to_vec();
            altered[at] ^= mask;
            altered
        })
    })
}

/// Changes each byte. v1 signs the decoded contents, so as in Go, different bytes with the same meaning are the same
/// certificate: a number with unused bits, a flag of 3 instead of 1. v2 signs the bytes, so no change is accepted at
/// all.
fn check_changed_bytes(original: &Certificate, accepts: impl Fn(Certificate) -> bool) {
    assert!(accepts(original.clone()));
    for altered in one_byte_changed(&original.to_bytes()) {
        let Ok(certificate) = Certificate::from_bytes(original.version(), &altered) else { continue };
        let same = original.version() == Version::V1 && certificate == *original;
        assert_eq!(accepts(certificate), same, "{altered:02x?}");
    }
}

#[test]
fn no_certificate_with_a_changed_byte_verifies() {
    let pool = all_authorities();
    for (version, bytes) in samples() {
        let original = Certificate::from_bytes(version, &bytes).unwrap();
        check_changed_bytes(&original, |certificate| pool.verify(certificate, NOW).is_ok());
    }
}

#[test]
fn no_ca_with_a_changed_byte_is_trusted() {
    for folder in ["v1-25519", "v1-p256", "v2-25519", "v2-p256"] {
        let ca = Certificate::from_pem(&read(vectors(&format!("certs/{folder}/ca.crt")))).unwrap();
        check_changed_bytes(&ca, |certificate| CaPool::new().add(certificate).is_ok());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_bytes_never_verify_as_another_certificate(
        sample in 0..4_usize,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..6),
    ) {
        let (version, bytes) = samples().swap_remove(sample);
        let original = Certificate::from_bytes(version, &bytes).unwrap();
        let mut altered = bytes;
        for (at, byte, edit) in edits {
            let at = at.index(altered.len());
            match edit {
                0 => altered[at] = byte,
                1 => altered.insert(at, byte),
                _ => drop(altered.drain(at..=at)),
            }
        }
        if let Ok(certificate) = Certificate::from_bytes(version, &altered)
            && all_authorities().verify(certificate.clone(), NOW).is_ok()
        {
            prop_assert_eq!(certificate, original);
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic_and_what_reads_re_encodes_to_itself(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        for version in [Version::V1, Version::V2] {
            if let Ok(certificate) = Certificate::from_bytes(version, &bytes) {
                let again = Certificate::from_bytes(version, &certificate.to_bytes());
                prop_assert_eq!(again, Ok(certificate.clone()));
                certificate.to_json().to_string();
            }
        }
        let _ = Certificate::bundle_from_pem(&bytes);
        let _ = PrivateKey::from_pem(&bytes);
        let _ = SigningKey::from_encrypted_pem(&bytes, b"p");
    }
}
