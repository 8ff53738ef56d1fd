//! What programs in pods of a cluster say to each other, and wiretaps on the links of nodes.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::capture::packet_socket;
use super::enter_network;

/// Part of each packet between two enrolled pods.
pub const SECRET: &str = "nothing-of-this-may-be-seen-on-a-link";
/// Part of each packet of which a wiretap is to see something.
pub const OPEN: &str = "this-is-sent-in-clear-on-purpose";

/// What the server in a pod says: its name, and the address from which it was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub pod: String,
    pub from: String,
}

/// Runs `work` in a network namespace.
pub fn within<T: Send + 'static>(network: &Path, work: impl FnOnce() -> T + Send + 'static) -> T {
    let network = network.to_owned();
    let visit = thread::spawn(move || {
        enter_network(&network);
        work()
    });
    visit.join().expect("the visit ends")
}

/// Asks the web server of `tests`' pods (`who.sh`) on a new connection; `words` go and come with it.
pub fn ask(target: SocketAddr, words: &str) -> Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&target, WITHIN)?;
    stream.set_read_timeout(Some(WITHIN))?;
    stream.write_all(format!("GET /cgi-bin/who?{words} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    answer(said.split("\r\n\r\n").nth(1).unwrap_or_default().as_bytes(), words)
}

/// Like [`ask`], by UDP from an [`EchoServer`].
pub fn ask_udp(target: SocketAddr, words: &str) -> Result<Answer> {
    let socket = UdpSocket::bind((unspecified(target.ip()), 0))?;
    socket.connect(target)?;
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    let mut said = [0; 512];
    for _ in 0..6 {
        socket.send(words.as_bytes())?;
        if let Ok(length) = socket.recv(&mut said) {
            return answer(&said[..length], words);
        }
    }
    Err(ErrorKind::TimedOut.into())
}

/// The address of the same family that stands for any.
pub fn unspecified(like: IpAddr) -> IpAddr {
    if like.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

fn answer(said: &[u8], words: &str) -> Result<Answer> {
    let said = String::from_utf8_lossy(said);
    let parts: Vec<&str> = said.split_whitespace().collect();
    match parts[..] {
        [pod, from, back] if back == words => Ok(Answer {
            pod: pod.to_owned(),
            from: from.trim_matches(['[', ']']).trim_start_matches("::ffff:").to_owned(),
        }),
        _ => Err(Error::new(ErrorKind::InvalidData, format!("an odd answer: {said}"))),
    }
}

/// The IPv4 addresses that a name server has for a name.
pub fn resolve(server: SocketAddr, name: &str) -> Result<Vec<IpAddr>> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut question = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        question.push(u8::try_from(label.len()).map_err(Error::other)?);
        question.extend_from_slice(label.as_bytes());
    }
    question.extend_from_slice(&[0, 0, 1, 0, 1]);
    socket.send(&question)?;
    let mut reply = [0; 512];
    let length = socket.recv(&mut reply)?;
    // Each record: a pointer to the name, type, class, TTL, length and the address.
    let records = reply.get(question.len()..length).unwrap_or_default().chunks_exact(16);
    let addresses = records.filter(|record| record[2..4] == [0, 1]);
    Ok(addresses.map(|record| IpAddr::from([record[12], record[13], record[14], record[15]])).collect())
}

/// Answers in a pod on TCP and UDP port 9000 until it is dropped: name, address of the asker, and what it said. A TCP
/// connection goes on until the other side ends it.
pub struct EchoServer(Arc<AtomicBool>);

impl EchoServer {
    pub fn start(network: &Path, pod: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (tcp, udp) = within(network, || {
            let any = (Ipv6Addr::UNSPECIFIED, 9000);
            (TcpListener::bind(any).expect("a listener"), UdpSocket::bind(any).expect("a socket"))
        });
        tcp.set_nonblocking(true).expect("it does not block");
        udp.set_read_timeout(Some(Duration::from_millis(100))).expect("a time-out");
        let (stopped, name) = (Arc::clone(&stop), pod.to_owned());
        thread::spawn(move || {
            let mut said = [0; 512];
            while !stopped.load(Ordering::Relaxed) {
                let Ok((length, from)) = udp.recv_from(&mut said) else { continue };
                let words = String::from_utf8_lossy(&said[..length]).into_owned();
                let _ = udp.send_to(format!("{name} {} {words}", from.ip().to_canonical()).as_bytes(), from);
            }
        });
        let stopped = Arc::clone(&stop);
        thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let Ok((stream, _)) = tcp.accept() else {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                };
                let stopped = Arc::clone(&stopped);
                thread::spawn(move || echo(stream, &stopped));
            }
        });
        Self(stop)
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn echo(mut stream: TcpStream, stop: &AtomicBool) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
    let mut said = [0; 512];
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut said) {
            Ok(0) => return,
            Ok(length) if stream.write_all(&said[..length]).is_ok() => {}
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {}
            _ => return,
        }
    }
}

/// How a series of questions went.
#[derive(Debug, Clone, Default)]
pub struct Course {
    /// When each was answered, and by which pod.
    pub answers: Vec<(Instant, String)>,
    /// When each failed, and how.
    pub failures: Vec<(Instant, String)>,
}

impl Course {
    /// The longest time without an answer between two times.
    pub fn longest_gap(&self, from: Instant, to: Instant) -> Duration {
        let inside = self.answers.iter().map(|(at, _)| *at).filter(|at| (from..to).contains(at));
        let (mut before, mut longest) = (from, Duration::ZERO);
        for at in inside.chain([to]) {
            longest = longest.max(at - before);
            before = at;
        }
        longest
    }

    /// Failures from a time on.
    pub fn failures_since(&self, from: Instant) -> Vec<String> {
        self.failures.iter().filter(|(at, _)| *at >= from).map(|(_, why)| why.clone()).collect()
    }

    /// Answers from a time on.
    pub fn answers_since(&self, from: Instant) -> usize {
        self.answers.iter().filter(|(at, _)| *at >= from).count()
    }
}

/// A program in a pod that asks all the time, until it is dropped.
pub struct Asker {
    course: Arc<Mutex<Course>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Asker {
    /// Asks for a new connection each time, [`ask`]ing with these words.
    pub fn of_new_connections(network: &Path, target: SocketAddr, words: &'static str) -> Self {
        Self::start(network, move || ask(target, words).map(|answer| answer.pod))
    }

    /// Speaks on one connection to an [`EchoServer`] all the time. When it is lost, it stays so.
    pub fn of_one_connection(network: &Path, target: SocketAddr) -> Self {
        let mut connection: Option<Result<TcpStream>> = None;
        Self::start(network, move || {
            let open = || {
                let stream = TcpStream::connect_timeout(&target, WITHIN)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(Duration::from_secs(60)))?;
                Ok(stream)
            };
            match connection.get_or_insert_with(open) {
                Err(error) => Err(Error::new(error.kind(), format!("it was lost: {error}"))),
                Ok(stream) => {
                    let mut back = [0; SECRET.len()];
                    let said = stream.write_all(SECRET.as_bytes()).and_then(|()| stream.read_exact(&mut back));
                    if let Err(error) = said {
                        let told = Error::new(error.kind(), format!("the connection ends: {error}"));
                        connection = Some(Err(error));
                        return Err(told);
                    }
                    Ok(String::new())
                }
            }
        })
    }

    fn start(network: &Path, mut question: impl FnMut() -> Result<String> + Send + 'static) -> Self {
        let (course, stop) = (Arc::<Mutex<Course>>::default(), Arc::<AtomicBool>::default());
        let (shared, stopped, network) = (Arc::clone(&course), Arc::clone(&stop), network.to_owned());
        let thread = thread::spawn(move || {
            enter_network(&network);
            while !stopped.load(Ordering::Relaxed) {
                let began = Instant::now();
                let outcome = question();
                let mut course = shared.lock().unwrap_or_else(PoisonError::into_inner);
                match outcome {
                    Ok(pod) => course.answers.push((Instant::now(), pod)),
                    Err(error) => course.failures.push((began, error.to_string())),
                }
                drop(course);
                thread::sleep(Duration::from_millis(25));
            }
        });
        Self { course, stop, thread: Some(thread) }
    }

    /// How it went so far.
    pub fn course(&self) -> Course {
        self.course.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Counts packets with [`SECRET`] and with [`OPEN`] on all links of network namespaces.
pub struct Wiretaps {
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
}

#[derive(Default)]
struct Seen {
    open: Vec<usize>,
    /// The beginnings of packets with the secret.
    secret: Vec<Vec<u8>>,
    deaf: usize,
}

impl Wiretaps {
    pub fn start(networks: &[PathBuf]) -> Self {
        let taps = Self { seen: Arc::default(), stop: Arc::default() };
        locked(&taps.seen).open = vec![0; networks.len()];
        let (ready, started) = std::sync::mpsc::channel();
        for (number, network) in networks.iter().enumerate() {
            let (seen, stop, network, ready) =
                (Arc::clone(&taps.seen), Arc::clone(&taps.stop), network.clone(), ready.clone());
            thread::spawn(move || {
                enter_network(&network);
                let packets = packet_socket();
                ready.send(()).expect("the test waits");
                let mut packet = [0; 4096];
                while !stop.load(Ordering::Relaxed) {
                    let Ok(length) = nix::unistd::read(&packets, &mut packet) else { continue };
                    let packet = &packet[..length];
                    if contains(packet, SECRET) {
                        locked(&seen).secret.push(packet[..length.min(48)].to_vec());
                    } else if contains(packet, OPEN) {
                        locked(&seen).open[number] += 1;
                    }
                }
                let mut lost = locked(&seen);
                lost.deaf += 1;
            });
        }
        for _ in networks {
            started.recv().expect("the wiretap runs");
        }
        taps
    }

    /// Fails if the secret was seen.
    pub fn assert_silent(&self, when: &str) {
        thread::sleep(Duration::from_millis(300));
        let seen = locked(&self.seen);
        let first: Vec<String> = seen.secret.iter().take(5).map(|packet| format!("{packet:02x?}")).collect();
        assert_eq!(seen.secret.len(), 0, "{when}: seen in clear: {}", first.join("\n"));
    }

    /// Fails if one of them has seen nothing at all of what is sent in clear.
    pub fn assert_not_deaf(&self) {
        thread::sleep(Duration::from_millis(300));
        let seen = locked(&self.seen);
        assert!(seen.open.iter().all(|count| *count > 0), "a wiretap is deaf: {:?}", seen.open);
    }
}

impl Drop for Wiretaps {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn contains(packet: &[u8], words: &str) -> bool {
    packet.windows(words.len()).any(|window| window == words.as_bytes())
}

fn locked<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For one question.
const WITHIN: Duration = Duration::from_secs(5);
