//! One source that uses up all it can get: idle connections, silent ones, and callers that wait.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    os::fd::AsRawFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nebula_cert::issuance::{CERTIFICATE_PATH, Pod, Proof, Request};
use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket},
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::running::{Ca, Service, key, pod};

const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 7);
/// A third of the time that a pod's start has.
const SOON: Duration = Duration::from_secs(6);

pub(crate) type Stream = StreamOwned<ClientConnection, TcpStream>;

/// A service with systemd's default limit of open files, and connections to it from any source address.
struct Target {
    ca: Ca,
    service: Service,
    tls: Arc<ClientConfig>,
}

impl Target {
    fn start() -> Self {
        Self::start_with(Some(1_024))
    }

    /// With a limit of open files, or as many as the system allows.
    fn start_with(limit: Option<u64>) -> Self {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
        let ca = Ca::init();
        let service = ca.serve_under(&["prlimit", &format!("--nofile={}:{hard}", limit.unwrap_or(hard))]);
        let tls = trusting(&ca.text("tls.crt"));
        Self { ca, service, tls }
    }

    fn connect(&self, source: Ipv4Addr) -> TcpStream {
        connect_from(source, self.service.address.port())
    }

    fn connect_tls(&self, source: Ipv4Addr) -> Stream {
        connect_tls_from(source, self.service.address.port(), &self.tls)
    }

    fn body(&self, pod: Pod) -> Vec<u8> {
        let proof = Proof::Node { token: self.ca.text("node.token"), pod };
        serde_json::to_vec(&Request { public_key: key().public_pem(), proof }).unwrap()
    }

    /// The longest time that any of 20 pods at this source waited for its certificate.
    fn longest_wait(&self, source: Ipv4Addr, first: u16) -> Duration {
        let wait = |number| {
            let start = Instant::now();
            let mut stream = self.connect_tls(source);
            assert_eq!(ask(&mut stream, "POST", CERTIFICATE_PATH, "", &self.body(pod(number))).unwrap().0, 200);
            start.elapsed()
        };
        (first..first + 20).map(wait).max().unwrap()
    }
}

/// Settings of a client that trusts this certificate only.
pub(crate) fn trusting(certificate: &str) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    Arc::new(tls.with_root_certificates(roots).with_no_client_auth())
}

fn connect_from(source: Ipv4Addr, port: u16) -> TcpStream {
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let [a, b, c, d] = source.octets();
    bind(fd.as_raw_fd(), &SockaddrIn::new(a, b, c, d, 0)).unwrap();
    connect(fd.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, port)).unwrap();
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream
}

/// A connection from this address to a service on 127.0.0.1.
pub(crate) fn connect_tls_from(source: Ipv4Addr, port: u16, tls: &Arc<ClientConfig>) -> Stream {
    let connection = ClientConnection::new(Arc::clone(tls), "localhost".try_into().unwrap()).unwrap();
    StreamOwned::new(connection, connect_from(source, port))
}

/// Status and head of the answer; the body is read, too.
pub(crate) fn ask(
    stream: &mut Stream,
    method: &str,
    path: &str,
    header: &str,
    body: &[u8],
) -> std::io::Result<(u16, String)> {
    let length = body.len();
    write!(stream, "{method} {path} HTTP/1.1\r\nhost: localhost\r\n{header}content-length: {length}\r\n\r\n")?;
    stream.write_all(body)?;
    stream.flush()?;
    answer(stream)
}

fn answer(stream: &mut Stream) -> std::io::Result<(u16, String)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |n| n.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok((head[9..12].parse().unwrap(), head))
}

fn tag(head: &str) -> String {
    head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().to_owned()
}

/// Sends a long poll for changes to the trust, and does not read the answer.
fn follow(stream: &mut Stream, tag: &str) {
    write!(stream, "GET /v1/trust?wait=50 HTTP/1.1\r\nhost: localhost\r\nif-none-match: {tag}\r\n\r\n").unwrap();
    stream.flush().unwrap();
}

#[test]
fn a_thousand_connections_that_wait_keep_out_neither_others_nor_those_behind_the_same_address() {
    let waits = one_source_waits(&Target::start(), 1_300);
    println!("longest wait from elsewhere {:?}, from there {:?}", waits[0], waits[1]);
}

#[test]
fn thousands_of_connections_that_wait_keep_nobody_out_either() {
    let waits = one_source_waits(&Target::start_with(None), 4_300);
    println!("longest wait from elsewhere {:?}, from there {:?}", waits[0], waits[1]);
}

/// How long pods waited while so many connections were waiting: from elsewhere, and from the same source.
fn one_source_waits(target: &Target, connections: usize) -> [Duration; 2] {
    // A pod on the same node, which watches the trust on the connection on which it proved its identity.
    let mut honest = target.connect_tls(ATTACKER);
    let (status, _) = ask(&mut honest, "POST", CERTIFICATE_PATH, "", &target.body(pod(1))).unwrap();
    let (_, head) = ask(&mut honest, "GET", "/v1/trust", "", b"").unwrap();
    assert_eq!(status, 200);
    follow(&mut honest, &tag(&head));
    let mut waiting = Vec::new();
    for _ in 0..connections {
        let mut stream = target.connect_tls(ATTACKER);
        // If the service is out of file descriptors, the handshake never ends; the attacker does not care.
        stream.sock.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
        if stream.conn.complete_io(&mut stream.sock).is_err() {
            break;
        }
        follow(&mut stream, &tag(&head));
        waiting.push(stream);
    }
    let waits = [Ipv4Addr::LOCALHOST, ATTACKER].map(|source| {
        let first = u16::from(source.octets()[3]) * 100;
        target.longest_wait(source, first)
    });
    assert!(waits.iter().all(|wait| *wait < SOON), "{waits:?}");
    target.ca.output("certificate revoke", &["web-700.shop.pod"]);
    let mut news = answer(&mut honest).unwrap().0;
    if news == 304 {
        // On a slow machine its first poll had ended.
        follow(&mut honest, &tag(&head));
        news = answer(&mut honest).unwrap().0;
    }
    assert_eq!(news, 200, "whoever proved who it is hears of news all the time");
    drop(waiting);
    waits
}

#[test]
fn thousands_of_silent_connections_keep_nobody_out() {
    let target = Target::start();
    let silent: Vec<TcpStream> = (0..4_300).map(|_| target.connect(ATTACKER)).collect();
    let waits = [Ipv4Addr::LOCALHOST, ATTACKER].map(|source| {
        let first = u16::from(source.octets()[3]) * 100;
        target.longest_wait(source, first)
    });
    println!("{} connections; longest wait from elsewhere {:?}, from there {:?}", silent.len(), waits[0], waits[1]);
    assert!(waits.iter().all(|wait| *wait < SOON), "{waits:?}");
}

#[test]
fn a_node_full_of_pods_behind_one_address_starts_at_once() {
    let target = Target::start();
    let start = Instant::now();
    thread::scope(|scope| {
        let pods: Vec<_> = (1..=250)
            .map(|number| {
                let target = &target;
                scope.spawn(move || {
                    let mut stream = target.connect_tls(ATTACKER);
                    let (status, _) =
                        ask(&mut stream, "POST", CERTIFICATE_PATH, "", &target.body(pod(number))).unwrap();
                    let (_, head) = ask(&mut stream, "GET", "/v1/trust", "", b"").unwrap();
                    follow(&mut stream, &tag(&head));
                    (status, stream)
                })
            })
            .collect();
        let mut followers: Vec<(u16, Stream)> = pods.into_iter().map(|pod| pod.join().unwrap()).collect();
        println!("250 pods have their certificates after {:?}", start.elapsed());
        assert!(followers.iter().all(|(status, _)| *status == 200));
        target.ca.output("certificate revoke", &["web-7.shop.pod"]);
        assert!(followers.iter_mut().all(|(_, stream)| answer(stream).unwrap().0 == 200), "all hear of it");
    });
}

#[test]
fn the_limit_of_open_files_is_raised() {
    let target = Target::start();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", target.service.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[3], words[4], "{line}");
}
