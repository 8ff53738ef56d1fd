//! A CA key in a hardware token: `ca.key` holds its PKCS#11 URI.

use std::fs;

use crate::running::Ca;

#[test]
#[cfg(target_feature = "crt-static")]
fn a_static_build_refuses_a_key_in_a_token_and_says_so() {
    let ca = Ca::init();
    fs::write(ca.file("ca.key"), "pkcs11:object=ca?module-path=/m.so&pin-value=1234\n").unwrap();
    let errors = ca.failure("serve", &["--listen", "127.0.0.1:0"]);
    assert!(errors.contains("ca.key is a PKCS#11 URI") && !errors.contains("1234"), "{errors}");
}

#[cfg(feature = "pkcs11")]
mod softhsm {
    use std::process::Command;

    use base64::Engine as _;
    use nebula_cert::{Curve, PrivateKey};

    use super::{Ca, fs};
    use crate::running::verified;

    const MODULE: &str = "/usr/lib/softhsm/libsofthsm2.so";

    fn tool(words: &str, settings: &std::path::Path) {
        let mut command = Command::new("softhsm2-util");
        let output = command.args(words.split(' ')).env("SOFTHSM2_CONF", settings).output().unwrap();
        assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Converts a P-256 key from a Nebula file to PKCS#8, which SoftHSM imports.
    fn pkcs8(nebula: &str) -> String {
        let base64 = &base64::engine::general_purpose::STANDARD;
        let text: String = nebula.lines().filter(|line| !line.starts_with("-----")).collect();
        let mut der = base64.decode("MEECAQAwEwYHKoZIzj0CAQYIKoZIzj0DAQcEJzAlAgEBBCA=").unwrap();
        der.extend(base64.decode(text).unwrap());
        format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", base64.encode(der))
    }

    #[test]
    #[ignore = "needs SoftHSM: ./test pkcs11"]
    fn a_service_signs_with_a_key_in_a_token() {
        let ca = Ca::init_with(&["--curve", "p256"]);
        let (settings, key) = (ca.file("softhsm2.conf"), ca.file("ca.pem"));
        fs::create_dir(ca.file("tokens")).unwrap();
        fs::write(&settings, format!("directories.tokendir = {}\n", ca.file("tokens").display())).unwrap();
        fs::write(&key, pkcs8(&ca.text("ca.key"))).unwrap();
        tool("--init-token --free --label main --so-pin 31415926 --pin 271828", &settings);
        tool(&format!("--import {} --token main --label ca --id 01 --pin 271828", key.display()), &settings);
        fs::remove_file(key).unwrap();
        fs::write(ca.file("pin"), "271828\n").unwrap();
        let pin = ca.file("pin");
        let uri = format!("pkcs11:token=main;object=ca?module-path={MODULE}&pin-source=file:{}\n", pin.display());
        fs::write(ca.file("ca.key"), uri).unwrap();

        let service = ca.serve_with(&[("SOFTHSM2_CONF", &settings)]);
        for number in 1..4 {
            let token = ca.token(&format!("edge-{number}"), &format!("10.42.0.{number}/16"), &[]);
            let key = PrivateKey::generate(Curve::P256).unwrap();
            let reply = service.caller.enrol(&token, &key).unwrap();
            assert_eq!(verified(&reply).public_key(), key.public_key());
        }
        service.stop();
        fs::write(pin, "000000\n").unwrap();
        let errors = ca.failure("serve", &["--listen", "127.0.0.1:0"]);
        assert!(errors.contains("ca.key is a PKCS#11 URI: "), "{errors}");
    }
}
