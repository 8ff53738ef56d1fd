//! Servers in pods, conversations with them, and pods that speak all the time.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use serde_json::{Value, json};

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
    within(namespace, move || {
        let socket = UdpSocket::bind((unspecified(target.ip()), 0))?;
        socket.connect(target)?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        let mut answer = vec![0; 256];
        for _ in 0..10 {
            socket.send(words)?;
            if let Ok(length) = socket.recv(&mut answer) {
                answer.truncate(length);
                return Ok(answer);
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    })
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

fn unspecified(like: IpAddr) -> IpAddr {
    if like.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Answers on TCP and UDP in a pod, in both families, with the pod's name and the client's address.
pub(super) struct Server(Arc<AtomicBool>);

impl Server {
    pub(super) fn start(world: &World, pod: &str) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let (ready, listening) = std::sync::mpsc::channel();
        for serve in [serve_streams, serve_datagrams] {
            let (namespace, pod, stop) = (world.namespace_of(pod), pod.to_owned(), Arc::clone(&stop));
            let ready = ready.clone();
            thread::spawn(move || {
                world::enter(&namespace);
                serve(&pod, &stop, &ready);
            });
        }
        for _ in 0..2 {
            listening.recv().expect("the server listens");
        }
        Self(stop)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn serve_streams(pod: &str, stop: &AtomicBool, ready: &Sender<()>) {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).expect("a listener");
    listener.set_nonblocking(true).expect("it does not block");
    ready.send(()).expect("the test waits");
    while !stop.load(Ordering::Relaxed) {
        let Ok((mut stream, from)) = listener.accept() else {
            thread::sleep(Duration::from_millis(2));
            continue;
        };
        let mut request = [0; 256];
        // How a single client ends is not part of the test.
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
        let _ = stream.read(&mut request);
        let _ = stream.write_all(reply(pod, from).as_bytes());
    }
}

fn serve_datagrams(pod: &str, stop: &AtomicBool, ready: &Sender<()>) {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT)).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a time-out");
    ready.send(()).expect("the test waits");
    let mut request = [0; 256];
    while !stop.load(Ordering::Relaxed) {
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
