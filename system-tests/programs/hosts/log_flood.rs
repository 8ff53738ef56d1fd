//! How much log a stranger, or a peer with a valid certificate, can make a daemon write. On loopback, without devices.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a test ends at the first surprise, on a real clock"
)]

use crate::loopback;

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use loopback::{Daemon, Network, free_udp_port, ours};
use nebula_cert::{CaPool, Certificate, Identity, PrivateKey};
use nebula_core::forward::Received;
use nebula_core::{Config, Event, Forwarder, Node, Seed, WallClock};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

struct Attacked {
    network: Network,
    victim: Daemon,
    at: SocketAddr,
    /// A first handshake message of a host with a certificate of this network, as anybody on the path can record it.
    overheard: Vec<u8>,
}

fn attacked(level: &str) -> Attacked {
    let network = Network::new();
    let at = SocketAddr::from(([127, 0, 0, 1], free_udp_port()));
    let victim = network.start(
        &ours(),
        "victim",
        &["10.42.0.1/16"],
        &format!(
            "listen: {{host: 127.0.0.1, port: {}}}\nlighthouse: {{am_lighthouse: true}}\nlogging: {{level: {level}}}",
            at.port()
        ),
    );
    wait(&victim, "Nebula interface is active");
    let tapped = UdpSocket::bind("127.0.0.1:0").unwrap();
    tapped.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let port = tapped.local_addr().unwrap().port();
    let alice = network.start(
        &ours(),
        "alice",
        &["10.42.0.7/16"],
        &format!(
            "listen: {{host: 127.0.0.1}}\nstatic_host_map: {{10.42.0.1: ['127.0.0.1:{port}']}}\n\
             lighthouse: {{hosts: [10.42.0.1], interval: 1}}"
        ),
    );
    let mut overheard = vec![0; 2000];
    let length = tapped.recv(&mut overheard).unwrap();
    overheard.truncate(length);
    drop(alice);
    Attacked { network, victim, at, overheard }
}

fn wait(daemon: &Daemon, text: &str) {
    let until = Instant::now() + Duration::from_secs(20);
    while !daemon.log().contains(text) {
        assert!(Instant::now() < until, "no {text} in {}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Sends the datagrams that `datagram` makes from each number, 20,000 per second, cycling through `sources`. Returns
/// how many bytes of log the victim wrote meanwhile, and prints that per second.
fn flood(attacked: &Attacked, sources: u8, mut datagram: impl FnMut(u32, &mut Vec<u8>)) -> usize {
    let sockets: Vec<_> = (0..sources).map(|n| UdpSocket::bind((format!("127.0.1.{n}"), 0)).unwrap()).collect();
    let before = attacked.victim.log().len();
    let start = Instant::now();
    let mut bytes = Vec::new();
    for n in 0..RATE * SECONDS {
        datagram(n, &mut bytes);
        let _ = sockets[n as usize % sockets.len()].send_to(&bytes, attacked.at);
        let due = start + Duration::from_secs(1) * n / RATE;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    // Lets the victim handle what is still queued.
    std::thread::sleep(Duration::from_millis(500));
    let written = attacked.victim.log().len() - before;
    println!("{RATE} forged/s from {sources} sources: {} bytes of log a second", written / SECONDS as usize);
    written
}

/// Inserts another ephemeral key, which makes it another handshake.
fn forge(overheard: &[u8], n: u32, bytes: &mut Vec<u8>) {
    overheard.clone_into(bytes);
    bytes[16..20].copy_from_slice(&n.to_be_bytes());
}

#[test]
fn forged_first_messages_from_one_source_write_a_few_lines() {
    let attacked = attacked("info");
    let written = flood(&attacked, 1, |n, bytes| forge(&attacked.overheard, n, bytes));
    assert!(written < 20_000, "{written} bytes in {SECONDS} s");
}

#[test]
fn refused_first_messages_write_a_few_lines_and_their_count() {
    let attacked = attacked("info");
    let written = flood(&attacked, 1, |n, bytes| {
        forge(&attacked.overheard, n, bytes);
        let at = 48 + n as usize % (bytes.len() - 48);
        bytes[at] ^= 1;
    });
    assert!((1..20_000).contains(&written), "{written} bytes in {SECONDS} s");
    // Covers every kind of suppressed line, and appears without any further event.
    wait(&attacked.victim, "Log lines were left out because there were too many");
}

#[test]
fn forged_first_messages_from_many_sources_write_little_more() {
    let attacked = attacked("info");
    let written = flood(&attacked, 250, |n, bytes| forge(&attacked.overheard, n, bytes));
    assert!(written < 400_000, "{written} bytes in {SECONDS} s: a burst of 200 lines of each kind, then 5 a second");
}

#[test]
fn the_level_debug_has_a_bound_as_well() {
    let attacked = attacked("debug");
    let written = flood(&attacked, 250, |n, bytes| forge(&attacked.overheard, n, bytes));
    assert!(written < 2_000_000, "{written} bytes in {SECONDS} s");
}

#[test]
fn damaged_first_messages_and_noise_write_a_few_lines() {
    let attacked = attacked("debug");
    let overheard = &attacked.overheard;
    let written = flood(&attacked, 1, |n, bytes| {
        forge(overheard, n, bytes);
        match n % 4 {
            // An unreadable certificate, or an invalid one.
            0 | 1 => {
                let at = 48 + n as usize % (bytes.len() - 48);
                bytes[at] ^= 1;
            }
            2 => bytes.truncate(16 + n as usize % (overheard.len() - 16)),
            // A message of every type, for tunnels that do not exist.
            _ => bytes[0] = 0x10 | (n >> 2) as u8 & 0x0f,
        }
    });
    assert!(written < 100_000, "{written} bytes in {SECONDS} s, at the level debug");
}

#[test]
fn a_peer_that_comes_and_goes_writes_a_few_lines() {
    let attacked = attacked("info");
    let mut mallory = Mallory::new(&attacked);
    let before = attacked.victim.log().len();
    let until = Instant::now() + Duration::from_secs(3);
    let mut closed = 0;
    while Instant::now() < until {
        closed += mallory.come_and_go();
    }
    std::thread::sleep(Duration::from_millis(500));
    let written = attacked.victim.log().len() - before;
    println!("{closed} tunnels made and closed in 3 s: {written} bytes of log");
    assert!(closed > 100, "only {closed} times");
    assert!(written < 10_000, "{written} bytes");
}

/// A peer with a valid certificate that runs a modified program.
struct Mallory {
    node: Node,
    forwarder: Arc<Forwarder>,
    socket: UdpSocket,
}

impl Mallory {
    fn new(attacked: &Attacked) -> Self {
        let config = attacked.network.configure("mallory", &["10.42.0.66/16"], "");
        let read = |suffix: &str| std::fs::read(config.with_extension(suffix)).unwrap();
        let certificates = Certificate::bundle_from_pem(&read("crt")).unwrap();
        let identity = Identity::new(certificates, PrivateKey::from_pem(&read("key")).unwrap()).unwrap();
        let trust = CaPool::from_pem(&std::fs::read(config.with_file_name("ca.crt")).unwrap()).unwrap();
        let mut config = Config::new(identity, trust);
        config.static_hosts.insert(VICTIM, vec![attacked.at]);
        let (now, unix) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap());
        let (node, forwarder) = Node::new(config, now, WallClock { at: now, unix }, Seed::from_os().unwrap());
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        Self { node, forwarder, socket }
    }

    /// Makes one handshake and closes the tunnel. Returns how many tunnels were closed.
    fn come_and_go(&mut self) -> usize {
        self.node.connect(Instant::now(), VICTIM);
        self.send();
        let mut datagram = vec![0; 2000];
        while let Ok((length, from)) = self.socket.recv_from(&mut datagram) {
            let received = [Received { from, range: 0..length, segment_size: length }];
            let mut lane = self.forwarder.lane();
            self.forwarder.inbound(&mut lane, Instant::now(), &mut datagram, &received);
            for punt in lane.take_punts().collect::<Vec<_>>() {
                self.node.handle_punt(Instant::now(), punt);
            }
            // More of the handshake.
            self.send();
            if std::iter::from_fn(|| self.node.poll_event()).any(|event| matches!(event, Event::TunnelUp { .. })) {
                break;
            }
        }
        let closed = self.node.close(Instant::now(), VICTIM, false);
        self.send();
        while self.node.poll_event().is_some() {}
        closed
    }

    fn send(&mut self) {
        while let Some(transmit) = self.node.poll_transmit() {
            self.socket.send_to(&transmit.datagram, transmit.to).unwrap();
        }
    }
}

const VICTIM: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 42, 0, 1));
const RATE: u32 = 20_000;
const SECONDS: u32 = 3;

#[test]
fn a_daemon_whose_log_nobody_reads_ends_in_time() {
    let network = Network::new();
    let config = network.configure(
        "unread",
        &["10.42.0.1/16"],
        "tun: {disabled: true}\nlisten: {host: 127.0.0.1, port: 0}\nlogging: {level: debug}",
    );
    let (mut log, write_end) = std::io::pipe().unwrap();
    let filler = write_end.try_clone().unwrap();
    let mut daemon = Command::new(ours()).arg("-config").arg(&config).stdout(write_end).spawn().unwrap();
    let (mut said, mut page) = (String::new(), [0; 4096]);
    while !said.contains("Nebula interface is active") {
        let len = log.read(&mut page).unwrap();
        said.push_str(std::str::from_utf8(&page[..len]).unwrap());
    }
    // The reader goes to sleep, with a full pipe.
    fcntl(&filler, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    while nix::unistd::write(&filler, b".").is_ok() {}
    fcntl(&filler, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    let pid = Pid::from_raw(daemon.id().cast_signed());
    kill(pid, Signal::SIGHUP).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    kill(pid, Signal::SIGTERM).unwrap();
    let until = Instant::now() + Duration::from_secs(5);
    let status = loop {
        match daemon.try_wait().unwrap() {
            Some(status) => break status.code(),
            None if Instant::now() > until => {
                daemon.kill().unwrap();
                daemon.wait().unwrap();
                panic!("it waits for the reader of its log");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert_eq!(status, Some(0));
}
