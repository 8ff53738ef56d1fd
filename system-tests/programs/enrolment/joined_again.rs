//! What `nebula up` says and writes on a host that was a member before, on one whose usual port is taken, and for a
//! user of `nebula-proxy`.

use std::net::UdpSocket;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::fake_ca::Ca;
use crate::loopback::built;

/// Runs `nebula-enrol up` with these words; returns what it said.
fn up(root: &Path, ca: &Ca, words: &[&str]) -> String {
    let token = root.join("token");
    std::fs::write(&token, ca.token.to_text().as_bytes()).unwrap();
    let mut command = Command::new(built("nebula-enrol"));
    command.arg("up").args(words).arg("-token-file").arg(&token).arg("-no-start");
    command.env("HOME", root).env_remove("XDG_CONFIG_HOME").env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_host_that_gets_another_address_is_told_and_one_that_gets_the_same_is_not() {
    let (root, ca) = (tempfile::tempdir().unwrap(), Ca::new(None));
    let folder = root.path().join("host");
    let words = ["-dir", folder.to_str().unwrap()];
    assert!(!up(root.path(), &ca, &words).contains("before"), "there was none");
    let enrolment = folder.join("enrolment.json");
    let remembered = std::fs::read_to_string(&enrolment).unwrap();
    assert!(remembered.contains(r#""networks":["10.97.0.9/16"]"#), "{remembered}");
    std::fs::remove_file(folder.join("host.crt")).unwrap();
    assert!(!up(root.path(), &ca, &words).contains("before"), "it has the same");
    std::fs::remove_file(folder.join("host.crt")).unwrap();
    std::fs::write(&enrolment, remembered.replace("0.9/16", "0.8/16")).unwrap();
    let said = up(root.path(), &ca, &words);
    assert!(said.contains("this host was 10.97.0.8/16 before"), "{said}");
    assert_eq!(std::fs::read_to_string(&enrolment).unwrap(), remembered);
}

#[test]
fn a_user_of_the_proxy_joins_at_home_with_another_port_where_the_usual_one_is_taken() {
    let (root, ca) = (tempfile::tempdir().unwrap(), Ca::new(None));
    // Whoever has it besides this test has it as well.
    let _taken = UdpSocket::bind("0.0.0.0:4242");
    let said = up(root.path(), &ca, &["-proxy"]);
    assert!(said.contains("UDP port 4242 is in use on this host"), "{said}");
    assert!(said.contains("start it with: nebula-proxy -config "), "{said}");
    let folder = root.path().join(".config/nebula");
    let config = std::fs::read_to_string(folder.join("config.yml")).unwrap();
    assert!(config.contains("port: 0\n") && config.contains("respond: true"), "{config}");
    let mut check = Command::new(built("nebula"));
    let checked = check.arg("-test").arg("-config").arg(folder.join("config.yml")).output().unwrap();
    assert!(checked.status.success(), "{checked:?}");
}
