//! A proxy whose host enrolled with a CA service (`pki.enrolment`) does what that announces.

use std::io::Write;
use std::process::{Command, Stdio};

use nebula_cert::Certificate;

use crate::world::{World, connect, echo_tcp, exchange, socks_request};
use crate::{FAR, PATIENCE};

/// A script in place of `nebula-enrol -follow`: prints its events, and writes the blocklist once the test asks for it.
/// It ends with the proxy.
const FOLLOWER: &str = r#"
test "$1 $2" = "-follow -out-dir" || exit 9
echo '{"event":"following","url":"https://ca.example"}'
(
  for _ in $(seq 600); do test -e "$3/blocked" && break; sleep 0.05; done
  printf '{"blocklist":["%s"]}' "$(cat "$3/blocked")" >"$3/announced.json"
  echo '{"event":"trust_changed","authorities":1,"standing":"good"}'
) &
exec cat >/dev/null
"#;

#[test]
fn a_peer_that_the_ca_blocks_loses_its_tunnel_without_a_signal_to_the_proxy() {
    let world = World::new();
    let folder = world.enrol(1, FOLLOWER);
    let _far = world.start(2, &["-serve", &format!("7={}", echo_tcp())]);
    let mut near = world.start(1, &["-socks", "0"]);
    near.says(&["level=INFO", "The certificate of this host is renewed by itself", "https://ca.example"]);
    let mut stream = connect(near.address("socks"));
    exchange(&mut stream, &[5, 1, 0], 2);
    assert_eq!(exchange(&mut stream, &socks_request(1, FAR, 7), 10)[..2], [5, 0]);

    let far = std::fs::read(world.path().join("host-2.crt")).unwrap();
    let fingerprint = Certificate::from_pem(&far).unwrap().fingerprint().to_string();
    std::fs::write(folder.join("blocked.new"), &fingerprint).unwrap();
    let told = std::time::Instant::now();
    std::fs::rename(folder.join("blocked.new"), folder.join("blocked")).unwrap();
    near.says(&["Trust changed"]);
    near.says(&["Remote certificate is no longer valid, tearing down the tunnel", "host-2"]);
    assert!(told.elapsed() < PATIENCE / 2);
}

#[test]
fn a_user_joins_by_the_enrolment_program_beside_the_proxy_and_no_argument_has_the_token() {
    let world = World::new();
    let folder = world.enrol(1, r#"echo "$@"; cat"#);
    let mut up = Command::new(folder.join("nebula-proxy"));
    up.args(["up", "-dir", "/x", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut up = up.spawn().unwrap();
    up.stdin.take().unwrap().write_all(b"token").unwrap();
    let said = up.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(said.stdout).unwrap(), "up -proxy=true -dir=/x -\ntoken");
    let up = Command::new(folder.join("nebula-proxy")).args(["up", "token"]).output().unwrap();
    assert_eq!(String::from_utf8(up.stdout).unwrap(), "up -proxy=true -\ntoken");
}
