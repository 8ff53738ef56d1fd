//! Answers of a lighthouse's DNS server, compared with those of Go Nebula 1.11.0; on loopback only.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

use crate::loopback;

use std::net::UdpSocket;
use std::path::Path;
use std::time::{Duration, Instant};

use loopback::{Daemon, Network, free_udp_port, go, ours};

const A: u16 = 1;
const MX: u16 = 15;
const TXT: u16 = 16;
const AAAA: u16 = 28;

/// A lighthouse with a DNS server, and a client that has a tunnel with it.
struct Pair {
    _network: Network,
    lighthouse: Daemon,
    client: Daemon,
    dns: u16,
    port: u16,
}

impl Pair {
    fn start(lighthouse: &Path) -> Self {
        let network = Network::new();
        let (port, dns) = (free_udp_port(), free_udp_port());
        let lighthouse =
            network.start(lighthouse, "Light.House", &["10.42.0.1/16", "fd42::1/64"], &Self::lighthouse(port, dns));
        let client = format!(
            "listen: {{host: 127.0.0.1}}\nstatic_host_map: {{10.42.0.1: ['127.0.0.1:{port}']}}\n\
             lighthouse: {{hosts: [10.42.0.1], interval: 1}}"
        );
        let client = network.start(&ours(), "client", &["10.42.0.7/16"], &client);
        let pair = Self { _network: network, lighthouse, client, dns, port };
        pair.wait_for("client", |reply| reply.len() > 12 && reply[7] == 1);
        pair
    }

    fn lighthouse(port: u16, dns: u16) -> String {
        format!(
            "listen: {{host: 127.0.0.1, port: {port}}}\n\
             lighthouse: {{am_lighthouse: true, serve_dns: true, dns: {{host: 127.0.0.1, port: {dns}}}}}"
        )
    }

    fn wait_for(&self, name: &str, done: impl Fn(&[u8]) -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !ask(self.dns, name, A).is_some_and(|reply| done(&reply)) {
            assert!(Instant::now() < until, "{name} is not known\n{}\n{}", self.lighthouse.log(), self.client.log());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Flags, record counts, and type, class, TTL and data of the answer.
    fn meaning(&self, name: &str, kind: u16) -> (Vec<u8>, Vec<u8>) {
        let reply = ask(self.dns, name, kind).expect("an answer");
        let data = if kind == A { 14 } else { 26 };
        let record = if reply[7] == 0 { Vec::new() } else { reply[reply.len() - data..].to_vec() };
        (reply[2..8].to_vec(), record)
    }
}

fn ask(port: u16, name: &str, kind: u16) -> Option<Vec<u8>> {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let mut question = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        question.push(u8::try_from(label.len()).unwrap());
        question.extend_from_slice(label.as_bytes());
    }
    question.push(0);
    question.extend_from_slice(&kind.to_be_bytes());
    question.extend_from_slice(&[0, 1]);
    socket.send_to(&question, ("127.0.0.1", port)).unwrap();
    let mut reply = vec![0; 1500];
    let length = socket.recv(&mut reply).ok()?;
    reply.truncate(length);
    assert_eq!(reply[..2], question[..2]);
    Some(reply)
}

/// The strings of the only TXT record, joined, and their number.
fn text(reply: &[u8], question: usize) -> (String, usize) {
    assert_eq!(reply[7], 1, "one record");
    // Name (a pointer, or the name repeated), type, class, TTL, length.
    let name = if reply[question] & 0xc0 == 0xc0 { 2 } else { question - 16 };
    let mut rest = &reply[question + name + 10..];
    let (mut text, mut count) = (String::new(), 0);
    while let Some((length, tail)) = rest.split_first() {
        let (part, tail) = tail.split_at(usize::from(*length));
        text += std::str::from_utf8(part).unwrap();
        (rest, count) = (tail, count + 1);
    }
    (text, count)
}

#[test]
fn a_certificate_is_told_by_address_as_json() {
    let pair = Pair::start(&ours());
    let reply = ask(pair.dns, "10.42.0.7", TXT).unwrap();
    let (text, count) = text(&reply, 12 + "10.42.0.7".len() + 2 + 4);
    let certificate: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(certificate["details"]["name"], "client");
    assert!(count > 1, "strings are short");
    assert_eq!(ask(pair.dns, "10.42.9.9", TXT).unwrap()[3] & 15, 3);
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn certificates_have_the_parts_that_go_tells() {
    let (own, go) = (Pair::start(&ours()), Pair::start(&go()));
    let question = 12 + "10.42.0.7".len() + 2 + 4;
    let (own, go) = (ask(own.dns, "10.42.0.7", TXT).unwrap(), ask(go.dns, "10.42.0.7", TXT).unwrap());
    assert_eq!(own[2..8], go[2..8]);
    let (own, go) = (text(&own, question).0, text(&go, question).0);
    // Go's answer passes through a zone file, which loses the quotes.
    let keys =
        |text: &str| text.split([',', '{']).filter_map(|part| Some(part.split_once(':')?.0.to_owned())).collect();
    let (own, go): (Vec<_>, Vec<_>) = (keys(&own.replace('"', "")), keys(&go.replace('"', "")));
    assert_eq!(own, go);
}

#[test]
fn a_lighthouse_answers_for_hosts_with_a_tunnel_and_for_itself() {
    let pair = Pair::start(&ours());
    assert!(pair.meaning("CLIENT", A).1.ends_with(&[0, 4, 10, 42, 0, 7]));
    assert!(pair.meaning("light.house", A).1.ends_with(&[0, 4, 10, 42, 0, 1]));
    let moved = free_udp_port();
    pair.lighthouse.reload(&Pair::lighthouse(pair.port, moved));
    let until = Instant::now() + Duration::from_secs(20);
    while ask(moved, "client", A).is_none_or(|reply| reply[7] != 1) {
        assert!(Instant::now() < until, "no answer at the new port\n{}", pair.lighthouse.log());
    }
    assert_eq!(ask(pair.dns, "client", A), None, "the former port still answers");
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn answers_are_those_of_go() {
    let (own, go) = (Pair::start(&ours()), Pair::start(&go()));
    for (name, kind) in [
        ("client", A),
        ("CLIENT", A),
        ("client", AAAA),
        ("client", MX),
        ("light.house", A),
        ("light.house", AAAA),
        ("light.house", MX),
        ("nobody", A),
        ("nobody", AAAA),
        ("house", A),
    ] {
        assert_eq!(own.meaning(name, kind), go.meaning(name, kind), "{name} {kind}");
    }
}
