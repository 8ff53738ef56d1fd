//! Two running proxies of one overlay, whose underlay is loopback.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nebula_cert::{Curve, PrivateKey, SigningKey, Template, UnixTime};
use nix::sys::signal::Signal;

/// Seconds since the Unix epoch in which everything here is valid.
const VALIDITY: std::ops::RangeInclusive<UnixTime> = 1_700_000_000..=2_000_000_000;
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_nebula-proxy");
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The files of two hosts: `host-1` at 10.42.0.1 in the groups `ops` and `web`, and `host-2` at 10.42.0.2.
pub(crate) struct World {
    folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let key = SigningKey::generate(Curve::Curve25519).unwrap();
        let ca = Template { public_key: key.public_key(), ..Template::new("ca", VALIDITY) }.self_sign(&key).unwrap();
        std::fs::write(folder.path().join("ca.crt"), ca.to_pem()).unwrap();
        // Ports that were free a moment ago.
        let ports = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap()).map(|it| it.local_addr().unwrap().port());
        for number in 1..=2 {
            let host_key = PrivateKey::generate(Curve::Curve25519).unwrap();
            let template = Template {
                networks: vec![format!("10.42.0.{number}/16").parse().unwrap()],
                groups: vec!["ops".to_owned(), "web".to_owned()],
                public_key: host_key.public_key(),
                ..Template::new(format!("host-{number}"), VALIDITY)
            };
            let certificate = template.sign(&ca, &key).unwrap();
            let file = |end: &str| folder.path().join(format!("host-{number}.{end}"));
            std::fs::write(file("crt"), certificate.to_pem()).unwrap();
            std::fs::write(file("key"), &*host_key.to_pem()).unwrap();
            let (own, other) = (ports[number - 1], ports[2 - number]);
            let text = format!(
                "pki: {{ca: {ca}, cert: {cert}, key: {key}}}\n\
                 listen: {{host: 127.0.0.1, port: {own}}}\n\
                 static_host_map: {{10.42.0.{other_number}: ['127.0.0.1:{other}']}}\n\
                 firewall:\n  outbound: [{{port: any, proto: any, host: any}}]\n  inbound: [{{port: any, proto: any, group: ops}}]\n",
                ca = folder.path().join("ca.crt").display(),
                cert = file("crt").display(),
                key = file("key").display(),
                other_number = 3 - number,
            );
            std::fs::write(file("yml"), text).unwrap();
        }
        Self { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Makes a host one that enrolled, beside whose proxy this script is `nebula-enrol`. Returns the folder of its
    /// files.
    pub(crate) fn enrol(&self, number: usize, script: &str) -> PathBuf {
        let folder = self.path().join(format!("enrolled-{number}"));
        std::fs::create_dir(&folder).unwrap();
        let host = |end: &str| self.path().join(format!("host-{number}.{end}"));
        for (from, to) in [(self.path().join("ca.crt"), "ca.crt"), (host("crt"), "host.crt"), (host("key"), "host.key")]
        {
            std::fs::copy(from, folder.join(to)).unwrap();
        }
        let text = std::fs::read_to_string(host("yml")).unwrap();
        let (_, rest) = text.split_once('\n').unwrap();
        let pki = format!("pki: {{enrolment: {}}}\n", folder.join("enrolment.json").display());
        std::fs::write(host("yml"), pki + rest).unwrap();
        std::fs::copy(PROGRAM, folder.join("nebula-proxy")).unwrap();
        let enrol = folder.join("nebula-enrol");
        std::fs::write(&enrol, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(enrol, std::fs::Permissions::from_mode(0o755)).unwrap();
        folder
    }

    /// Starts the proxy of a host with these flags, and waits until it listens.
    pub(crate) fn start(&self, number: usize, flags: &[&str]) -> Proxy {
        let own = self.path().join(format!("enrolled-{number}/nebula-proxy"));
        self.start_by(Command::new(if own.exists() { own.as_path() } else { Path::new(PROGRAM) }), number, flags)
    }

    /// The same by a command that takes the arguments of the program.
    pub(crate) fn start_by(&self, mut command: Command, number: usize, flags: &[&str]) -> Proxy {
        command.arg("-config").arg(self.path().join(format!("host-{number}.yml"))).args(flags);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || output.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line))));
        let mut proxy = Proxy { child, lines, seen: Vec::new() };
        let wanted = flags.iter().filter(|flag| matches!(**flag, "-socks" | "-http" | "-forward" | "-serve")).count();
        while proxy.seen.iter().filter(|line| line.contains("listening")).count() < wanted {
            proxy.next_line();
        }
        proxy
    }
}

/// A running proxy. It ends with this.
pub(crate) struct Proxy {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Proxy {
    fn next_line(&mut self) {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => self.seen.push(line),
            Err(RecvTimeoutError::Timeout) => panic!("nothing more after {:#?}", self.seen),
            Err(RecvTimeoutError::Disconnected) => panic!("it ended after {:#?}", self.seen),
        }
    }

    /// Waits for a line with these parts.
    pub(crate) fn says(&mut self, parts: &[&str]) -> String {
        loop {
            if let Some(line) = self.seen.iter().find(|line| parts.iter().all(|part| line.contains(part))) {
                return line.clone();
            }
            self.next_line();
        }
    }

    /// Where the first listener of this kind listens.
    pub(crate) fn address(&mut self, kind: &str) -> SocketAddr {
        let line = self.says(&["msg=listening", &format!("listener={kind} ")]);
        let address = line.split_once("addr=").unwrap().1;
        address.split(' ').next().unwrap().parse().unwrap()
    }

    /// Ends it by SIGTERM.
    pub(crate) fn stop(&mut self) -> ExitStatus {
        self.end_by(Signal::SIGTERM)
    }

    /// Ends it by a signal.
    pub(crate) fn end_by(&mut self, signal: Signal) -> ExitStatus {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "it does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            self.seen.extend(self.lines.try_iter());
            eprintln!("{}", self.seen.join("\n"));
        }
    }
}

/// A server that sends back what it gets, and closes once the client does.
pub(crate) fn echo_tcp() -> u16 {
    serve_tcp(|mut stream| {
        let mut writer = stream.try_clone().unwrap();
        // An error says that the client is gone.
        let _ = std::io::copy(&mut stream, &mut writer);
        let _ = writer.shutdown(std::net::Shutdown::Write);
    })
}

/// A server on loopback, with a thread for each connection. Returns its port.
pub(crate) fn serve_tcp(serve: impl Fn(TcpStream) + Copy + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream));
        }
    });
    port
}

/// A UDP server that sends back what it gets, with `re: ` before it.
pub(crate) fn echo_udp() -> u16 {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    thread::spawn(move || {
        let mut datagram = [0; 2000];
        while let Ok((len, from)) = socket.recv_from(&mut datagram) {
            let _ = socket.send_to(&[b"re: ", &datagram[..len]].concat(), from);
        }
    });
    port
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends a message and reads an answer of this length.
pub(crate) fn exchange(stream: &mut TcpStream, message: &[u8], answer: usize) -> Vec<u8> {
    stream.write_all(message).unwrap();
    let mut bytes = vec![0; answer];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// A request of SOCKS5 with an IPv4 address. The answer has ten bytes, too.
pub(crate) fn socks_request(command: u8, address: [u8; 4], port: u16) -> Vec<u8> {
    [&[5, command, 0, 1][..], &address, &port.to_be_bytes()].concat()
}

pub(crate) const NOBODY: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
