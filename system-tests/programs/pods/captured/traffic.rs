//! Servers in pods, conversations with them, and pods that speak all the time.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, sendto, setsockopt, socket, sockopt,
};
use serde_json::{Value, json};

use super::wiretap::ends;
use crate::world::capture::packet_socket;
use crate::world::pod_traffic::unspecified;
use crate::world::{self, World};

/// Where servers listen.
pub(super) const PORT: u16 = 8080;

/// Who answered, and from which address it was asked.
pub(super) type Answer = (String, IpAddr);

/// Says `words` to `target` over TCP, in a namespace.
pub(super) fn converse(namespace: String, words: &'static [u8], target: SocketAddr) -> io::Result<Answer> {
    within(namespace, move || {
        let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(3)))?;
        stream.write_all(words)?;
        let mut answer = vec![0; 256];
        let length = stream.read(&mut answer)?;
        answer.truncate(length);
        Ok(answer)
    })
}

/// Like [`converse`], with a datagram and its answer.
pub(super) fn exchange(namespace: String, words: &'static [u8], target: SocketAddr) -> io::Result<Answer> {
    exchange_within(namespace, words, target, 10)
}

/// Like [`exchange`], for what should not be answered.
pub(super) fn exchange_once(namespace: String, words: &'static [u8], target: SocketAddr) -> io::Result<Answer> {
    exchange_within(namespace, words, target, 1)
}

fn exchange_within(namespace: String, words: &'static [u8], target: SocketAddr, attempts: usize) -> io::Result<Answer> {
    within(namespace, move || {
        let socket = UdpSocket::bind((unspecified(target.ip()), 0))?;
        socket.connect(target)?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        let mut answer = vec![0; 256];
        for _ in 0..attempts {
            socket.send(words)?;
            if let Ok(length) = socket.recv(&mut answer) {
                answer.truncate(length);
                return Ok(answer);
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    })
}

/// A socket for datagrams to `target`.
pub(super) fn connected(namespace: String, target: SocketAddr) -> io::Result<UdpSocket> {
    let visit = thread::spawn(move || {
        world::enter(&namespace);
        let socket = UdpSocket::bind((unspecified(target.ip()), 0))?;
        socket.connect(target)?;
        Ok(socket)
    });
    visit.join().expect("the visit ends")
}

/// Sends datagrams with `words` in one super-packet, from one port; returns how many are answered.
pub(super) fn burst(namespace: String, words: &'static [u8], target: SocketAddr, count: usize) -> io::Result<usize> {
    let visit = thread::spawn(move || {
        world::enter(&namespace);
        let socket = UdpSocket::bind((unspecified(target.ip()), 0))?;
        setsockopt(&socket, sockopt::UdpGsoSegment, &(words.len() as i32))?;
        socket.send_to(&words.repeat(count), target)?;
        socket.set_read_timeout(Some(Duration::from_secs(2)))?;
        let answers = std::iter::repeat_with(|| socket.recv(&mut [0; 256]));
        Ok(answers.take(count).take_while(Result::is_ok).count())
    });
    visit.join().expect("the visit ends")
}

fn within(namespace: String, work: impl FnOnce() -> io::Result<Vec<u8>> + Send + 'static) -> io::Result<Answer> {
    let visit = thread::spawn(move || {
        world::enter(&namespace);
        work()
    });
    let answer: Value = serde_json::from_slice(&visit.join().expect("the visit ends")?)?;
    let from = answer["from"].as_str().and_then(|from| from.parse().ok()).expect("the client's address");
    Ok((answer["pod"].as_str().unwrap_or_default().to_owned(), from))
}

/// Sends `count` times `words` over TCP; returns how long it took until the server had read and answered all of it.
pub(super) fn upload(
    namespace: String,
    words: &'static [u8],
    target: SocketAddr,
    count: usize,
) -> io::Result<Duration> {
    let visit = thread::spawn(move || {
        world::enter(&namespace);
        let began = Instant::now();
        let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.set_write_timeout(Some(Duration::from_secs(20)))?;
        // The server answers all the while.
        let mut answers = stream.try_clone()?;
        let reader = thread::spawn(move || io::copy(&mut answers, &mut io::sink()));
        stream.write_all(&words.repeat(count))?;
        stream.shutdown(Shutdown::Write)?;
        reader.join().expect("the reader ends")?;
        Ok(began.elapsed())
    });
    visit.join().expect("the visit ends")
}

/// A connection to a server, which can be asked again and again.
pub(super) struct Conversation(TcpStream);

impl Conversation {
    pub(super) fn open(namespace: String, target: SocketAddr) -> io::Result<Self> {
        let visit = thread::spawn(move || {
            world::enter(&namespace);
            let stream = TcpStream::connect_timeout(&target, Duration::from_secs(1))?;
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            Ok(Self(stream))
        });
        visit.join().expect("the visit ends")
    }

    pub(super) fn ask(&mut self, words: &[u8]) -> io::Result<()> {
        self.0.write_all(words)
    }

    /// Whether nothing comes in for this long.
    pub(super) fn is_silent(&mut self, time: Duration) -> bool {
        self.0.set_read_timeout(Some(time)).expect("a timeout");
        self.0.read(&mut [0; 256]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Whether the connection ends with a reset.
    pub(super) fn is_reset(&mut self) -> bool {
        let _ = self.0.set_read_timeout(Some(Duration::from_secs(2)));
        loop {
            match self.0.read(&mut [0; 256]) {
                Ok(0) => return false,
                // Answers from before.
                Ok(_) => {}
                Err(error) => {
                    let broken = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
                    return broken.contains(&error.kind());
                }
            }
        }
    }

    /// The name of the pod that answers.
    pub(super) fn answer(&mut self) -> io::Result<String> {
        let mut answer = vec![0; 256];
        let length = self.0.read(&mut answer)?;
        let answer: Value = serde_json::from_slice(&answer[..length])?;
        Ok(answer["pod"].as_str().unwrap_or_default().to_owned())
    }
}

/// Sends an IP packet in one namespace. Returns the first one of its protocol with this destination that arrives in
/// another.
pub(super) fn pass_on(from: String, to: String, packet: Vec<u8>, destination: IpAddr) -> Option<Vec<u8>> {
    let (ready, listening) = std::sync::mpsc::channel();
    let protocol = protocol_of(&packet);
    let listener = thread::spawn(move || {
        world::enter(&to);
        let packets = packet_socket();
        ready.send(()).expect("the test waits");
        let until = Instant::now() + Duration::from_secs(10);
        let mut seen = [0; 2048];
        while Instant::now() < until {
            let Ok(length) = nix::unistd::read(&packets, &mut seen) else { continue };
            let seen = &seen[..length];
            if ends(seen).is_some_and(|[_, to]| to == destination) && protocol_of(seen) == protocol {
                return Some(seen.to_vec());
            }
        }
        None
    });
    listening.recv().expect("it listens");
    let sender = thread::spawn(move || {
        world::enter(&from);
        let v4 = packet[0] >> 4 == 4;
        let family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let raw = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Raw).expect("a socket");
        let [_, to] = ends(&packet).expect("an IP packet");
        // Again if nobody heard it: the tunnel may have to be made first.
        for _ in 0..5 {
            let to = SockaddrStorage::from(SocketAddr::new(to, 0));
            let _ = sendto(raw.as_raw_fd(), &packet, &to, MsgFlags::empty());
            thread::sleep(Duration::from_millis(300));
        }
    });
    sender.join().expect("it is sent");
    listener.join().expect("it ends")
}

fn protocol_of(packet: &[u8]) -> u8 {
    if packet[0] >> 4 == 4 { packet[9] } else { packet[6] }
}

/// Answers on TCP and UDP in a pod, in both families, with the pod's name and the client's address.
pub(super) struct Server {
    stop: Arc<AtomicBool>,
    waits: Arc<AtomicBool>,
}

impl Server {
    /// Whether questions over TCP wait for their answers.
    pub(super) fn wait(&self, waits: bool) {
        self.waits.store(waits, Ordering::Relaxed);
    }

    pub(super) fn start(world: &World, pod: &str) -> Self {
        let (stop, waits) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (ready, listening) = std::sync::mpsc::channel();
        for serve in [serve_streams, serve_datagrams] {
            let server = Self { stop: Arc::clone(&stop), waits: Arc::clone(&waits) };
            let (namespace, pod, ready) = (world.namespace_of(pod), pod.to_owned(), ready.clone());
            thread::spawn(move || {
                world::enter(&namespace);
                serve(&pod, &server, &ready);
            });
        }
        for _ in 0..2 {
            listening.recv().expect("the server listens");
        }
        Self { stop, waits }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn serve_streams(pod: &str, server: &Server, ready: &Sender<()>) {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).expect("a listener");
    listener.set_nonblocking(true).expect("it does not block");
    ready.send(()).expect("the test waits");
    while !server.is_stopped() {
        let Ok((stream, from)) = listener.accept() else {
            thread::sleep(Duration::from_millis(2));
            continue;
        };
        let (reply, stop, waits) = (reply(pod, from), Arc::clone(&server.stop), Arc::clone(&server.waits));
        thread::spawn(move || serve_stream(stream, &reply, &stop, &waits));
    }
}

/// Answers each question of a client. How a client ends is not part of the test.
fn serve_stream(mut stream: TcpStream, reply: &str, stop: &AtomicBool, waits: &AtomicBool) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    while stream.read(&mut [0; 256])? > 0 && !stop.load(Ordering::Relaxed) {
        while waits.load(Ordering::Relaxed) && !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(2));
        }
        stream.write_all(reply.as_bytes())?;
    }
    Ok(())
}

fn serve_datagrams(pod: &str, server: &Server, ready: &Sender<()>) {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT)).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a time-out");
    ready.send(()).expect("the test waits");
    let mut request = [0; 256];
    while !server.is_stopped() {
        let Ok((_, from)) = socket.recv_from(&mut request) else { continue };
        let _ = socket.send_to(reply(pod, from).as_bytes(), from);
    }
}

fn reply(pod: &str, from: SocketAddr) -> String {
    json!({ "pod": pod, "from": from.ip().to_canonical() }).to_string()
}

/// Sends datagrams to a target all the time, each in a flow of its own.
pub(super) struct Speaker {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicUsize>,
    replies: Arc<AtomicUsize>,
}

impl Speaker {
    pub(super) fn start(world: &World, pod: &str, words: &'static [u8], target: SocketAddr) -> Self {
        let speaker = Self { stop: Arc::default(), sent: Arc::default(), replies: Arc::default() };
        let (stop, sent, replies) =
            (Arc::clone(&speaker.stop), Arc::clone(&speaker.sent), Arc::clone(&speaker.replies));
        let namespace = world.namespace_of(pod);
        thread::spawn(move || {
            world::enter(&namespace);
            while !stop.load(Ordering::Relaxed) {
                let socket = UdpSocket::bind((unspecified(target.ip()), 0)).expect("a socket");
                let _ = socket.set_read_timeout(Some(PAUSE));
                // It fails where there is no route while the device is gone.
                if socket.send_to(words, target).is_err() {
                    thread::sleep(PAUSE);
                    continue;
                }
                sent.fetch_add(1, Ordering::Relaxed);
                if socket.recv(&mut [0; 256]).is_ok() {
                    replies.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(PAUSE);
                }
            }
        });
        speaker
    }

    pub(super) fn sent(&self) -> usize {
        self.sent.load(Ordering::Relaxed)
    }

    pub(super) fn replies(&self) -> usize {
        self.replies.load(Ordering::Relaxed)
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

const PAUSE: Duration = Duration::from_millis(4);
