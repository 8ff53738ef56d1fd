//! The `nebula-cert` program, used like in scripts written for the Go tool.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test ends where an unwrap fails")]

mod folder;

use std::fs;
use std::io::{Cursor, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;

use folder::Folder;
use nebula_cert::{Certificate, Curve, Identity, SigningKey, Version};

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/certs");

#[test]
fn a_ca_and_a_host_made_with_the_usual_flags_belong_together() {
    let folder = Folder::new();
    folder.succeeds("ca -name bench -duration 240h");
    folder.succeeds("sign -name a -ip 10.9.0.1/24 -duration 24h");
    folder.succeeds("verify -ca ca.crt -crt a.crt");
    let identity = Identity::read(folder.path().join("a.crt"), folder.path().join("a.key")).unwrap();
    assert_eq!(identity.primary().name(), "a");
    assert_eq!(identity.primary().version(), Version::V2);
    assert_eq!(identity.networks(), ["10.9.0.1/24".parse().unwrap()]);
    assert_eq!(identity.primary().not_after() - identity.primary().not_before(), 24 * 3_600);
    let ca = folder.certificate("ca.crt");
    assert_eq!(ca.not_after() - ca.not_before(), 240 * 3_600);
    for name in ["ca.crt", "ca.key", "a.crt", "a.key"] {
        let mode = fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn every_flag_reaches_the_certificate() {
    let folder = Folder::with_ca("-version=1 --curve P256 -groups a,b,c -ips 10.0.0.0/8 -subnets=192.168.0.0/16");
    let ca = folder.certificate("ca.crt");
    assert_eq!((ca.version(), ca.curve(), ca.is_ca()), (Version::V1, Curve::P256, true));
    assert_eq!(ca.groups(), ["a", "b", "c"]);
    folder.succeeds(
        "sign -version 2 -name h -networks 10.2.0.1/16,10.1.0.1/16 -unsafe-networks 192.168.1.0/24 -groups b,,a",
    );
    let host = folder.certificate("h.crt");
    assert_eq!((host.version(), host.curve()), (Version::V2, Curve::P256));
    assert_eq!(host.networks(), ["10.1.0.1/16".parse().unwrap(), "10.2.0.1/16".parse().unwrap()]);
    assert_eq!(host.unsafe_networks(), ["192.168.1.0/24".parse().unwrap()]);
    assert_eq!(host.groups(), ["b", "a"]);
    assert_eq!(host.not_after(), ca.not_after() - 1, "without a duration one second before the CA");
    folder.succeeds("sign -name o -ip 10.1.0.9/16");
    assert_eq!(folder.certificate("o.crt").version(), Version::V1, "the version of the CA is the default");
    folder.succeeds("verify -ca ca.crt -crt h.crt");
}

#[test]
fn a_public_key_made_elsewhere_is_signed_without_writing_a_key() {
    for curve in ["25519", "P256"] {
        let folder = Folder::with_ca(&format!("-curve {curve}"));
        folder.succeeds(&format!("keygen -curve {curve} -out-key k -out-pub p"));
        folder.succeeds("sign -name h -networks 10.0.0.1/8 -in-pub p");
        assert!(!folder.path().join("h.key").exists());
        Identity::read(folder.path().join("h.crt"), folder.path().join("k")).unwrap();
        let other = if curve == "P256" { "25519" } else { "P256" };
        folder.succeeds(&format!("keygen -curve {other} -out-key k -out-pub p"));
        let errors = folder.fails("sign -name i -networks 10.0.0.1/8 -in-pub p");
        assert!(errors.starts_with("Error: curve of in-pub does not match ca"), "{errors}");
    }
}

#[test]
fn existing_keys_and_certificates_are_never_overwritten() {
    let folder = Folder::with_ca("");
    folder.succeeds("sign -name h -networks 10.0.0.1/8");
    let before = ["ca.key", "ca.crt", "h.key", "h.crt"].map(|name| folder.read(name));
    assert_eq!(folder.fails("ca -name x"), "Error: refusing to overwrite existing CA key: ca.key\n");
    let errors = folder.fails("ca -name x -out-key new.key");
    assert_eq!(errors, "Error: refusing to overwrite existing CA cert: ca.crt\n");
    let errors = folder.fails("sign -name h -networks 10.0.0.1/8");
    assert_eq!(errors, "Error: refusing to overwrite existing cert: h.crt\n");
    let errors = folder.fails("sign -name h -networks 10.0.0.1/8 -out-crt new.crt");
    assert_eq!(errors, "Error: refusing to overwrite existing key: h.key\n");
    assert_eq!(before, ["ca.key", "ca.crt", "h.key", "h.crt"].map(|name| folder.read(name)));
    assert!(!folder.path().join("new.key").exists() && !folder.path().join("new.crt").exists());
}

#[test]
fn keygen_replaces_files_and_makes_keys_private() {
    let folder = Folder::new();
    fs::write(folder.path().join("k"), "old").unwrap();
    fs::set_permissions(folder.path().join("k"), fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(folder.path().join("p"), "old").unwrap();
    fs::set_permissions(folder.path().join("p"), fs::Permissions::from_mode(0o644)).unwrap();
    let output = folder.run("keygen -out-key k -out-pub p");
    assert!(output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("out-key: the mode of k was 0644; it is 0600 now"), "{said}");
    let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("k"), mode("p")), (0o600, 0o644), "the public key is no secret");
    folder.succeeds("keygen -out-key k -out-pub p");
    assert!(folder.read("k").starts_with(b"-----BEGIN NEBULA X25519 PRIVATE KEY-----\n"));
}

#[test]
fn print_shows_the_certificates_before_a_damaged_one() {
    let folder = Folder::with_ca("");
    let good = folder.read("ca.crt");
    let whole = folder.succeeds("print -path ca.crt");
    fs::write(folder.path().join("half.crt"), [&good[..], b"-----BEGIN NEBULA CERTIFICATE V2-----\n"].concat())
        .unwrap();
    let output = folder.run("print -path half.crt");
    assert_eq!((output.status.code(), String::from_utf8(output.stdout).unwrap()), (Some(1), whole));
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("Error: error while unmarshaling cert"));
    folder.fails("print -json -path half.crt");
    folder.fails("blocklist -path half.crt");
}

#[test]
fn a_dash_means_standard_input_or_output() {
    let folder = Folder::with_ca("");
    let text = folder.succeeds("sign -name h -networks 10.0.0.1/8 -out-crt - -out-key h.key");
    assert_eq!(Certificate::from_pem(text.as_bytes()).unwrap().name(), "h");
    let mut child = folder
        .command("verify -ca ca.crt -crt -")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
    let errors = folder.fails("verify -ca - -crt -");
    assert_eq!(errors, "Error: -ca and -crt both set to \"-\", only one input may read from stdin\n");
    let errors = folder.fails("keygen -out-key - -out-pub -");
    assert_eq!(errors, "Error: -out-key and -out-pub both set to \"-\", only one output may write to stdout\n");
}

#[test]
fn printed_json_is_that_of_the_go_tool() {
    let folder = Folder::new();
    for name in ["dual-25519/host-bundle", "v1-p256/ca-constrained", "v2-25519/host-v6only", "v1-25519/host-groups"] {
        let recorded = fs::read_to_string(format!("{VECTORS}/{name}.json")).unwrap();
        assert_eq!(folder.succeeds(&format!("print -json -path {VECTORS}/{name}.crt")), recorded);
        let plain = folder.succeeds(&format!("print -json=false -path {VECTORS}/{name}.crt"));
        assert!(plain.starts_with("{\n\t\""), "{plain}");
        let objects: Vec<serde_json::Value> =
            serde_json::Deserializer::from_str(&plain).into_iter().collect::<Result<_, _>>().unwrap();
        assert_eq!(serde_json::Value::from(objects).to_string(), recorded.trim_end());
    }
}

#[test]
fn verify_names_every_bad_certificate_and_the_reason() {
    let folder = Folder::new();
    let errors =
        folder.fails(&format!("verify -ca {VECTORS}/v2-25519/ca.crt -crt {VECTORS}/v2-25519/host-expired.crt"));
    assert!(errors.contains("v2 host-expired with fingerprint"), "{errors}");
    assert!(errors.contains(": certificate is expired"), "{errors}");
    let bundle = format!("{VECTORS}/dual-25519/host-bundle.crt");
    let errors = folder.fails(&format!("verify -ca {VECTORS}/v2-25519/ca-other.crt -crt {bundle}"));
    assert_eq!(errors.lines().count(), 2);
    assert!(errors.lines().all(|line| line.contains("could not find ca for the certificate")), "{errors}");
    folder.succeeds(&format!("verify -ca {VECTORS}/dual-25519/ca-bundle.crt -crt {bundle}"));
    let ca = format!("{VECTORS}/v2-25519/ca.crt");
    assert!(folder.fails(&format!("verify -ca {ca} -crt {ca}")).contains("no issuer in certificate"));
}

#[test]
fn a_long_bundle_is_verified_whole_and_reported_in_its_order() {
    let (folder, other) = (Folder::with_ca(""), Folder::with_ca(""));
    folder.succeeds("sign -name good -networks 10.0.0.1/8");
    let mut bundle = folder.read("good.crt").repeat(300);
    for (name, times) in [("a", 1), ("b", 99), ("c", 1)] {
        other.succeeds(&format!("sign -name {name} -networks 10.0.0.2/8"));
        bundle.extend(other.read(&format!("{name}.crt")));
        bundle.extend(folder.read("good.crt").repeat(times));
    }
    fs::write(folder.path().join("bundle"), &bundle).unwrap();
    let errors = folder.fails("verify -ca ca.crt -crt bundle");
    let names: Vec<_> = errors.lines().map(|line| line.split(" v2 ").nth(1).unwrap()[..1].to_owned()).collect();
    assert_eq!(names, ["a", "b", "c"], "{errors}");
    let good = folder.read("good.crt").repeat(400);
    fs::write(folder.path().join("bundle"), good).unwrap();
    folder.succeeds("verify -ca ca.crt -crt bundle");
}

#[test]
fn without_a_terminal_an_encrypted_ca_key_needs_the_passphrase_from_the_environment() {
    let folder = Folder::new();
    let flags = "ca -name e -encrypt -argon-memory 64 -argon-iterations 1 -argon-parallelism 1";
    assert!(folder.fails(flags).starts_with("Error: out-key must be encrypted interactively"));
    assert!(!folder.path().join("ca.key").exists());
    let status = folder.command(flags).env("NEBULA_CA_PASSPHRASE", "open sesame").status().unwrap();
    assert!(status.success());
    SigningKey::from_encrypted_pem(&folder.read("ca.key"), b"open sesame").unwrap();
    let sign = "sign -name h -networks 10.0.0.1/8";
    assert!(folder.fails(sign).starts_with("Error: ca-key is encrypted and must be decrypted interactively"));
    let wrong = folder.command(sign).env("NEBULA_CA_PASSPHRASE", "open barley").output().unwrap();
    let text = "Error: error while parsing encrypted ca-key: invalid passphrase or corrupt private key\n";
    assert_eq!(String::from_utf8(wrong.stderr).unwrap(), text);
    assert!(folder.command(sign).env("NEBULA_CA_PASSPHRASE", "open sesame").status().unwrap().success());
}

#[test]
fn a_ca_refuses_what_it_may_not_sign() {
    let folder = Folder::with_ca("-groups a -networks 10.1.0.0/16 -unsafe-networks 192.168.0.0/16 -duration 10h");
    for (flags, reason) in [
        ("-networks 10.2.0.1/16", "a network assignment outside the limitations of the signing ca: 10.2.0.1/16"),
        ("-networks 10.1.0.1/16 -groups z", "certificate contained a group not present on the signing ca: z"),
        ("-networks 10.1.0.1/16 -unsafe-networks 0.0.0.0/0", "an unsafe network assignment outside the limitations"),
        ("-networks 10.1.0.1/16 -duration 11h", "certificate expires after signing certificate"),
    ] {
        let errors = folder.fails(&format!("sign -name h {flags}"));
        assert!(errors.starts_with("Error: error while signing: ") && errors.contains(reason), "{errors}");
        assert!(!folder.path().join("h.key").exists() && !folder.path().join("h.crt").exists());
    }
    let other = Folder::with_ca("");
    fs::copy(other.path().join("ca.key"), folder.path().join("other.key")).unwrap();
    let errors = folder.fails("sign -name h -networks 10.1.0.1/16 -ca-key other.key");
    assert!(errors.starts_with("Error: refusing to sign, root certificate does not match private key"), "{errors}");
}

#[test]
fn an_expired_ca_signs_nothing() {
    let folder = Folder::new();
    let ca = format!("-ca-crt {VECTORS}/v2-25519/ca-expired.crt -ca-key {VECTORS}/v2-25519/ca-expired.key");
    let errors = folder.fails(&format!("sign -name h -networks 10.0.0.1/8 {ca}"));
    assert!(errors.starts_with("Error: ca certificate is expired"), "{errors}");
}

#[test]
fn wrong_words_are_answered_with_the_reason_and_the_help_of_the_mode() {
    let folder = Folder::with_ca("");
    for (words, reason) in [
        ("ca", "-name is required"),
        ("ca -name x -duration -1h", "-duration must be greater than 0"),
        ("ca -name x -version 3", "-version must be either 1 or 2"),
        ("ca -name x -version 1 -networks fd00::/8", "v1 certificates can only be ipv4, have fd00::/8"),
        ("keygen -out-key k", "-out-pub is required"),
        ("sign -name x", "-networks is required"),
        ("sign -name x -networks 10.0.0.1", "invalid -networks definition: 10.0.0.1"),
        ("sign -name x -networks 10.0.0.1/8 -in-pub p -out-key k", "cannot set both -in-pub and -out-key"),
        (
            "sign -version 1 -name x -networks 10.0.0.1/8,10.0.0.2/8",
            "v1 certificates can only have a single ipv4 address",
        ),
        ("print", "-path is required"),
        ("verify -ca ca.crt", "-crt is required"),
    ] {
        let errors = folder.fails(words);
        assert!(errors.lines().next().unwrap().contains(reason), "{words}: {errors}");
        assert!(errors.contains("Usage: nebula-cert "), "{words}: {errors}");
    }
    for words in
        ["sign -nmae x", "ca -name x -duration 1d", "sign -name", "sign -name x -groups a b", "print -json=maybe"]
    {
        assert!(!folder.fails(words).is_empty());
    }
    assert_eq!(folder.fails("forge -name x"), "Error: unknown mode: forge\n");
    assert!(folder.fails("").contains("No mode was provided"));
    assert!(folder.fails("-verbose ca").contains("flag provided but not defined: -verbose"));
    assert!(folder.fails("-version=maybe").contains("invalid boolean value \"maybe\" for -version"));
    assert!(folder.fails("-version=false").contains("No mode was provided"));
}

#[test]
fn global_flags_take_values_and_two_dashes_end_the_flags() {
    let folder = Folder::with_ca("");
    for words in ["-version=true", "--version=1", "-- print -path ca.crt", "print -path ca.crt -- more words"] {
        folder.succeeds(words);
    }
}

/// Decodes a QR code; returns its width in pixels and its text.
fn read_qr_code(png: &[u8]) -> (usize, String) {
    let mut reader = png::Decoder::new(Cursor::new(png)).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    let (width, height) = (info.width as usize, info.height as usize);
    let mut image = rqrr::PreparedImage::prepare_from_greyscale(width, height, |x, y| pixels[y * width + x]);
    let [code] = &image.detect_grids()[..] else { panic!("not one code") };
    let (meta, text) = code.decode().unwrap();
    assert_eq!(meta.ecc_level, 0, "recovery level M is number 0");
    // Five pixels per module, and four white modules on each side.
    assert_eq!(width, (meta.version.to_size() + 8) * 5);
    (width, text)
}

#[test]
fn a_qr_code_holds_the_text_of_the_certificate() {
    let folder = Folder::with_ca("-out-qr ca.png");
    assert_eq!(read_qr_code(&folder.read("ca.png")).1.as_bytes(), folder.read("ca.crt"));
    fs::write(folder.path().join("h.png"), "old").unwrap();
    folder.succeeds("sign -name h -networks 10.0.0.1/8 -out-qr h.png");
    assert_eq!(read_qr_code(&folder.read("h.png")).1.as_bytes(), folder.read("h.crt"));
    let mode = fs::metadata(folder.path().join("ca.png")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let both = [folder.read("ca.crt"), folder.read("h.crt")].concat();
    fs::write(folder.path().join("both.crt"), &both).unwrap();
    assert!(folder.succeeds("print -path both.crt -out-qr both.png").starts_with('{'));
    assert_eq!(read_qr_code(&folder.read("both.png")).1.as_bytes(), both);
}

#[test]
fn a_qr_code_on_standard_output_comes_alone() {
    let folder = Folder::with_ca("");
    let output = folder.run("print -path ca.crt -out-qr -");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(read_qr_code(&output.stdout).1.as_bytes(), folder.read("ca.crt"));
    let errors = folder.fails("sign -name h -networks 10.0.0.1/8 -out-crt - -out-qr -");
    assert_eq!(errors, "Error: -out-crt and -out-qr both set to \"-\", only one output may write to stdout\n");
}

#[test]
fn a_certificate_too_long_for_a_qr_code_leaves_no_file_behind() {
    let folder = Folder::new();
    let groups: Vec<String> = (0..300).map(|number| format!("group-{number}")).collect();
    let errors = folder.fails(&format!("ca -name x -groups {} -out-qr q.png", groups.join(",")));
    assert!(errors.starts_with("Error: error while generating qr code: "), "{errors}");
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
}

#[test]
#[cfg(target_feature = "crt-static")]
fn a_static_build_says_how_to_get_one_that_can_use_tokens() {
    let folder = Folder::with_ca("");
    let token = "-pkcs11 pkcs11:token=x?module-path=/m.so";
    for mode in
        ["keygen -out-pub p", "ca -name x -curve P256", "sign -name x -networks 10.0.0.1/8", "renew -crt ca.crt"]
    {
        let errors = folder.fails(&format!("{mode} {token}"));
        assert!(errors.starts_with("Error: -pkcs11 is not supported by this static build"), "{mode}: {errors}");
        assert!(errors.contains("--features cli,pkcs11"), "{errors}");
    }
    assert!(!folder.path().join("x.crt").exists());
    let errors = folder.fails("print pkcs11:token=x?pin-value=1234");
    assert!(errors.contains("pin-value=...") && !errors.contains("1234"), "{errors}");
}

#[test]
fn version_goes_to_stdout_and_help_to_stderr() {
    let folder = Folder::new();
    for words in ["-version", "--version"] {
        assert!(folder.succeeds(words).starts_with("Version: "));
    }
    for words in ["-h", "-help", "--help", "sign -h", "sign -help", "-h sign"] {
        let output = folder.run(words);
        assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b""[..]), "{words}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("Usage: nebula-cert"), "{words}: {text}");
        assert_eq!(text.contains("--unsafe-networks"), words.contains("sign"), "{words}: {text}");
    }
}

#[test]
fn a_key_given_as_a_certificate_is_named() {
    let folder = Folder::with_ca("");
    let errors = folder.fails("print -path ca.key");
    let text = "Error: error while unmarshaling cert: bytes did not contain a proper certificate banner";
    assert!(errors.starts_with(text), "{errors}");
    assert!(folder.fails("print -path missing.crt").contains("missing.crt"));
}
