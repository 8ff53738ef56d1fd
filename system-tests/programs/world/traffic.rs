//! Traffic that continues while a test changes the network: TCP conversations in which every byte is compared, and UDP
//! probes that measure outages.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{Pattern, World, enter};

/// Interval between probes, and so the precision of outages.
pub const PROBE_EVERY: Duration = Duration::from_millis(10);
/// A probe without an answer after this time is lost.
pub(super) const LATE: Duration = Duration::from_millis(500);
const MESSAGE: usize = 4096;
const PAUSE: Duration = Duration::from_millis(5);

/// The answers since the last [`Watch::start`], and the longest time without any.
#[derive(Debug)]
pub(super) struct Watch {
    last: Instant,
    longest: Duration,
    pub(super) answers: u64,
    /// The number of the last probe, and those of all unanswered ones.
    pub(super) sent: u64,
    pub(super) unanswered: BTreeSet<u64>,
    pub(super) broken: Option<String>,
}

impl Watch {
    pub(super) fn new() -> Self {
        Self {
            last: Instant::now(),
            longest: Duration::ZERO,
            answers: 0,
            sent: 0,
            unanswered: BTreeSet::new(),
            broken: None,
        }
    }

    pub(super) fn start(&mut self) {
        (self.longest, self.answers) = (Duration::ZERO, 0);
        self.unanswered.clear();
    }

    /// Notes another probe, and returns its number.
    pub(super) fn probed(&mut self) -> u64 {
        self.sent += 1;
        self.unanswered.insert(self.sent);
        self.sent
    }

    pub(super) fn heard(&mut self) {
        self.longest = self.silence();
        self.last = Instant::now();
        self.answers += 1;
    }

    pub(super) fn silence(&self) -> Duration {
        self.longest.max(self.last.elapsed())
    }
}

pub(super) fn lock(watch: &Mutex<Watch>) -> MutexGuard<'_, Watch> {
    watch.lock().expect("no thread of the traffic panics")
}

/// One TCP connection and one UDP probe between two hosts.
pub struct Flow {
    pub from: String,
    pub to: String,
    /// Both ends of the connection: without the overlay, neither learns that the other has closed.
    ends: [TcpStream; 2],
    stop: Arc<AtomicBool>,
    tcp: Arc<Mutex<Watch>>,
    udp: Arc<Mutex<Watch>>,
    threads: Vec<JoinHandle<()>>,
}

impl Flow {
    /// Connects `from` to `to` at the overlay address `at`, and sends from then on.
    pub fn start(world: &World, from: &str, to: &str, at: IpAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (tcp, udp) = (Arc::new(Mutex::new(Watch::new())), Arc::new(Mutex::new(Watch::new())));
        let (client, server) = (world.namespace_of(from), world.namespace_of(to));
        let mut threads = Vec::new();

        let (ready, listening) = channel();
        let (accepted, server_end) = channel();
        threads.push(spawn_in(&server, move || echo_stream(at, &ready, &accepted)));
        let address = listening.recv_timeout(Duration::from_secs(5)).expect("the server listens");
        let connect = spawn_in(&client, move || TcpStream::connect_timeout(&address, Duration::from_secs(20)));
        let connection = match connect.join().expect("the client tries") {
            Ok(connection) => connection,
            Err(error) => panic!("{from} cannot connect to {to}: {error}\n{}", world.all_logs()),
        };
        let stream = connection.try_clone().expect("a second handle");
        let ends = [connection, server_end.recv_timeout(Duration::from_secs(20)).expect("the server accepts")];
        let (watch, stopped) = (Arc::clone(&tcp), Arc::clone(&stop));
        threads.push(spawn_in(&client, move || {
            if let Err(error) = converse(stream, &watch, &stopped) {
                lock(&watch).broken.get_or_insert(error);
            }
        }));

        let (ready, listening) = channel();
        let stopped = Arc::clone(&stop);
        threads.push(spawn_in(&server, move || echo_datagrams((at, 0).into(), &ready, &stopped)));
        let address = listening.recv_timeout(Duration::from_secs(5)).expect("the server listens");
        let (watch, stopped) = (Arc::clone(&udp), Arc::clone(&stop));
        threads.push(spawn_in(&client, move || probe(address, &watch, &stopped)));
        Self { from: from.to_owned(), to: to.to_owned(), ends, stop, tcp, udp, threads }
    }

    /// Restarts the measurement: forgets earlier outages.
    pub fn watch(&self) {
        lock(&self.tcp).start();
        lock(&self.udp).start();
    }

    /// How many answers the TCP connection and the probe had since [`Flow::watch`].
    pub fn answers(&self) -> (u64, u64) {
        (lock(&self.tcp).answers, lock(&self.udp).answers)
    }

    /// The longest time without an answer since [`Flow::watch`], of the TCP connection and of the probe.
    pub fn silence(&self) -> (Duration, Duration) {
        (lock(&self.tcp).silence(), lock(&self.udp).silence())
    }

    /// How many of the probes sent since [`Flow::watch`] were never answered.
    pub fn lost(&self) -> usize {
        let sent = lock(&self.udp).sent;
        thread::sleep(LATE);
        lock(&self.udp).unanswered.range(..=sent).count()
    }

    /// Why the TCP connection was lost, if it was.
    pub fn broken(&self) -> Option<String> {
        lock(&self.tcp).broken.clone()
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for end in &self.ends {
            // A lost connection cannot be shut down.
            let _ = end.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() && !thread::panicking() {
                panic!("a thread of the traffic {} -> {} ended", self.from, self.to);
            }
        }
    }
}

pub(super) fn spawn_in<T: Send + 'static>(namespace: &str, body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let namespace = namespace.to_owned();
    thread::spawn(move || {
        enter(&namespace);
        body()
    })
}

fn echo_stream(at: IpAddr, ready: &Sender<SocketAddr>, accepted: &Sender<TcpStream>) {
    let listener = TcpListener::bind((at, 0)).expect("listen on the overlay address");
    ready.send(listener.local_addr().expect("own address")).expect("the test waits");
    let (stream, _) = listener.accept().expect("a connection");
    stream.set_nodelay(true).expect("no delay");
    accepted.send(stream.try_clone().expect("a second handle")).expect("the test waits");
    echo(stream);
}

pub(super) fn echo(mut stream: TcpStream) {
    let mut buffer = [0; MESSAGE];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..n]).is_err() {
            return;
        }
    }
}

pub(super) fn converse(mut stream: TcpStream, watch: &Mutex<Watch>, stop: &AtomicBool) -> Result<(), String> {
    stream.set_nodelay(true).expect("no delay");
    let mut pattern = Pattern::new(u64::from(stream.local_addr().expect("own address").port()));
    let (mut said, mut heard) = (vec![0; MESSAGE], vec![0; MESSAGE]);
    while !stop.load(Ordering::Relaxed) {
        pattern.fill(&mut said);
        let exchange = stream.write_all(&said).and_then(|()| stream.read_exact(&mut heard));
        if stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        exchange.map_err(|error| error.to_string())?;
        if said != heard {
            return Err("what came back is not what was sent".to_owned());
        }
        lock(watch).heard();
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Ignores errors, which are those of an overlay that is away for a moment; only what arrives counts.
pub(super) fn echo_datagrams(at: SocketAddr, ready: &Sender<SocketAddr>, stop: &AtomicBool) {
    let socket = UdpSocket::bind(at).expect("bind the overlay address");
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    ready.send(socket.local_addr().expect("own address")).expect("the test waits");
    let mut buffer = [0; 8];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((n, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..n], from);
        }
    }
}

fn probe(to: SocketAddr, watch: &Mutex<Watch>, stop: &AtomicBool) {
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0)).expect("a port");
    socket.set_read_timeout(Some(PROBE_EVERY)).expect("a timeout");
    let mut buffer = [0; 8];
    while !stop.load(Ordering::Relaxed) {
        let sent = lock(watch).probed();
        let _ = socket.send_to(&sent.to_be_bytes(), to);
        let began = Instant::now();
        while let Ok((n, from)) = socket.recv_from(&mut buffer) {
            // A late answer shows that packets pass again, just like one to the last probe.
            if from == to && n == 8 && u64::from_be_bytes(buffer) <= sent {
                let mut watch = lock(watch);
                watch.heard();
                watch.unanswered.remove(&u64::from_be_bytes(buffer));
            }
            if began.elapsed() >= PROBE_EVERY {
                break;
            }
        }
    }
}
