//! Faults between real daemons on loopback, and the one cause that `nebula ctl why` names on each side.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

use crate::loopback;

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use loopback::{Daemon, Network, free_udp_port, ours};
use serde_json::Value;

/// A daemon and its control socket.
struct Host {
    daemon: Daemon,
    socket: String,
}

impl Host {
    fn start(network: &Network, folder: &tempfile::TempDir, name: &str, address: &str, port: u16, more: &str) -> Self {
        let socket = folder.path().join(name).display().to_string();
        let settings = format!(
            "listen: {{host: 127.0.0.1, port: {port}}}\nhandshakes: {{try_interval: 50ms, retries: 5}}\n\
             daemon: {{control_socket: {socket}}}\nfirewall: {{outbound: [{{port: any, proto: any, host: any}}]}}\n{more}"
        );
        Self { daemon: network.start(&ours(), name, &[&format!("{address}/16")], &settings), socket }
    }

    fn why(&self, peer: &str) -> Result<Vec<String>, String> {
        let words = ["ctl", "--json", "--socket", &self.socket, "why", peer];
        let output = Command::new(ours()).args(words).output().unwrap();
        let Ok(answer) = serde_json::from_slice::<Value>(&output.stdout) else {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        };
        let findings = answer["findings"].as_array().unwrap().iter();
        Ok(findings.map(|it| it["code"].as_str().unwrap().to_owned()).collect())
    }

    #[track_caller]
    fn assert_cause(&self, peer: &str, cause: &str) {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let found = self.why(peer);
            if found.as_ref().is_ok_and(|found| found.iter().eq([cause])) {
                return;
            }
            assert!(Instant::now() < until, "{cause}, not {found:?}\n{}", self.daemon.log());
        }
    }
}

/// Passes on what comes from other ports to `to`, and nothing back.
fn one_way(to: u16) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut datagram = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut datagram) {
            if from.port() != to {
                let _ = socket.send_to(&datagram[..length], ("127.0.0.1", to));
            }
        }
    });
    at
}

#[test]
fn udp_that_passes_in_one_direction_is_named_where_it_arrives_and_nothing_is_claimed_where_nothing_does() {
    let (network, folder) = (Network::new(), tempfile::tempdir().unwrap());
    let [left_port, right_port] = [(); 2].map(|()| free_udp_port());
    let way = one_way(right_port);
    let map = format!("static_host_map: {{10.42.0.8: ['{way}']}}");
    let left = Host::start(&network, &folder, "left", "10.42.0.7", left_port, &map);
    let right = Host::start(&network, &folder, "right", "10.42.0.8", right_port, "");
    left.assert_cause("10.42.0.8", "no_answer");
    right.assert_cause("10.42.0.7", "answers_lost");
    assert_eq!(right.why("left"), Ok(vec!["answers_lost".to_owned()]), "by name, without a tunnel");
    assert!(left.why("nobody").unwrap_err().contains("has not met a host that is named nobody"));
}

#[test]
fn another_cipher_is_the_one_cause_that_both_sides_name() {
    let (network, folder) = (Network::new(), tempfile::tempdir().unwrap());
    let [left_port, right_port] = [(); 2].map(|()| free_udp_port());
    let map = |address: &str, port: u16| format!("static_host_map: {{{address}: ['127.0.0.1:{port}']}}");
    let left = Host::start(&network, &folder, "left", "10.42.0.7", left_port, &map("10.42.0.8", right_port));
    let cipher = format!("cipher: chachapoly\n{}", map("10.42.0.7", left_port));
    let right = Host::start(&network, &folder, "right", "10.42.0.8", right_port, &cipher);
    left.assert_cause("10.42.0.8", "other_cipher");
    right.assert_cause("10.42.0.7", "other_cipher");
}

#[test]
fn another_host_at_the_endpoint_is_the_one_cause() {
    let (network, folder) = (Network::new(), tempfile::tempdir().unwrap());
    let [left_port, right_port] = [(); 2].map(|()| free_udp_port());
    let map = format!("static_host_map: {{10.42.0.9: ['127.0.0.1:{right_port}']}}");
    let _right = Host::start(&network, &folder, "right", "10.42.0.8", right_port, "");
    let left = Host::start(&network, &folder, "left", "10.42.0.7", left_port, &map);
    left.assert_cause("10.42.0.9", "wrong_host");
}
