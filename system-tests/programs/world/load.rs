//! Many connections that continue while a test changes something, and the longest silence of each change.

use std::fmt;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::World;
use super::traffic::{LATE, Watch, converse, echo, echo_datagrams, lock, spawn_in};

/// Interval between the probes, and so the precision of a silence.
const INTERVAL: Duration = Duration::from_millis(1);

/// Many connections between two hosts, of which some speak all the time, and probes every millisecond.
pub struct Load {
    speaking: Vec<TcpStream>,
    idle: Vec<TcpStream>,
    stop: Arc<AtomicBool>,
    watches: Vec<Arc<Mutex<Watch>>>,
    probes: Arc<Mutex<Watch>>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// `speaking` connections that converse, and `idle` ones, from `from` to `to`, which listens at `at`; port 0 is
    /// any. They are opened to a Service's address, if there is one.
    pub fn start(
        world: &World,
        (from, to, at): (&str, &str, SocketAddr),
        service: Option<SocketAddr>,
        speaking: usize,
        idle: usize,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (client, server) = (world.namespace_of(from), world.namespace_of(to));
        let all = speaking + idle;
        let (ready, listening) = channel();
        let mut threads = vec![spawn_in(&server, move || echo_streams(at, all, &ready))];
        let address = listening.recv_timeout(Duration::from_secs(5)).expect("the server listens");
        let address = service.unwrap_or(address);
        let connect = move || -> Vec<TcpStream> {
            let one = |_| TcpStream::connect_timeout(&address, Duration::from_secs(20)).expect("a connection");
            (0..all).map(one).collect()
        };
        let mut speaking_ends = spawn_in(&client, connect).join().expect("the connections are open");
        let idle = speaking_ends.split_off(speaking);
        let mut watches = Vec::new();
        for stream in &speaking_ends {
            let (watch, stopped) = (Arc::new(Mutex::new(Watch::new())), Arc::clone(&stop));
            watches.push(Arc::clone(&watch));
            let stream = stream.try_clone().expect("a second handle");
            threads.push(spawn_in(&client, move || {
                if let Err(error) = converse(stream, &watch, &stopped) {
                    lock(&watch).broken.get_or_insert(error);
                }
            }));
        }
        let (ready, listening) = channel();
        let stopped = Arc::clone(&stop);
        threads.push(spawn_in(&server, move || echo_datagrams(at, &ready, &stopped)));
        let address = listening.recv_timeout(Duration::from_secs(5)).expect("the server listens");
        let address = service.unwrap_or(address);
        let probes = Arc::new(Mutex::new(Watch::new()));
        let (watch, stopped) = (Arc::clone(&probes), Arc::clone(&stop));
        threads.push(spawn_in(&client, move || probe_often(address, &watch, &stopped)));
        Self { speaking: speaking_ends, idle, stop, watches, probes, threads }
    }

    /// Restarts the measurement: forgets earlier outages.
    fn watch(&self) {
        lock(&self.probes).start();
        self.watches.iter().for_each(|watch| lock(watch).start());
    }

    /// The longest time without an answer to a probe since [`Load::watch`].
    fn silence(&self) -> Duration {
        lock(&self.probes).silence()
    }

    /// How many of the probes sent since [`Load::watch`] were answered, and how many never.
    fn probes(&self) -> (u64, usize) {
        let sent = lock(&self.probes).sent;
        thread::sleep(LATE);
        let probes = lock(&self.probes);
        (probes.answers, probes.unanswered.range(..=sent).count())
    }

    /// Why any connection is lost, or one that speaks was not answered since [`Load::watch`].
    fn broken(&self) -> Option<String> {
        let silent = || self.watches.iter().any(|watch| lock(watch).answers == 0).then(|| "silence".to_owned());
        let lost = self.watches.iter().find_map(|watch| lock(watch).broken.clone());
        let idle = || {
            self.idle.iter().enumerate().find_map(|(n, stream)| {
                let mut answer = [0; 4];
                stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
                let mut stream = stream;
                let exchange = stream.write_all(b"ping").and_then(|()| stream.read_exact(&mut answer));
                exchange.err().map(|error| format!("idle connection {n}: {error}"))
            })
        };
        lost.or_else(silent).or_else(idle)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for end in self.speaking.iter().chain(&self.idle) {
            let _ = end.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() && !thread::panicking() {
                panic!("a thread of the load ended");
            }
        }
    }
}

/// What changes under a [`Load`] cost.
#[derive(Debug, Default)]
pub struct Gaps {
    /// The longest time without an answer, beyond the interval of the probes, of each change.
    silences: Vec<Duration>,
    /// Probes around the changes, and how many of them were never answered.
    pub sent: u64,
    pub lost: usize,
}

impl Gaps {
    /// Makes a change. Returns why a connection is lost, if one is.
    pub fn measure(&mut self, load: &Load, change: impl FnOnce()) -> Option<String> {
        // One gap ends before the next begins.
        thread::sleep(Duration::from_millis(300));
        load.watch();
        change();
        thread::sleep(Duration::from_millis(300));
        self.silences.push(load.silence().saturating_sub(INTERVAL));
        self.silences.sort();
        let (answered, unanswered) = load.probes();
        self.sent += answered + unanswered as u64;
        self.lost += unanswered;
        load.broken()
    }

    pub fn longest(&self) -> Duration {
        self.silences.last().copied().unwrap_or_default()
    }
}

impl fmt::Display for Gaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (all, Self { sent, lost, .. }) = (&self.silences, self);
        let [p50, p90] = [5, 9].map(|tenths| all.get(all.len() * tenths / 10).copied().unwrap_or_default());
        let (count, max) = (all.len(), self.longest());
        write!(
            f,
            "{count} upgrades under {sent} probes, of which {lost} were lost: silence p50 {p50:?}, p90 {p90:?}, max {max:?}"
        )
    }
}

fn echo_streams(at: SocketAddr, count: usize, ready: &Sender<SocketAddr>) {
    let listener = TcpListener::bind(at).expect("listen on the overlay address");
    ready.send(listener.local_addr().expect("own address")).expect("the test waits");
    thread::scope(|scope| {
        for _ in 0..count {
            let (stream, _) = listener.accept().expect("a connection");
            stream.set_nodelay(true).expect("no delay");
            scope.spawn(move || echo(stream));
        }
    });
}

/// Sends a probe every millisecond, whether or not the one before was answered.
fn probe_often(to: SocketAddr, watch: &Mutex<Watch>, stop: &AtomicBool) {
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0)).expect("a port");
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 8];
            while !stop.load(Ordering::Relaxed) {
                if let Ok((8, from)) = socket.recv_from(&mut buffer)
                    && from == to
                {
                    let mut watch = lock(watch);
                    watch.heard();
                    watch.unanswered.remove(&u64::from_be_bytes(buffer));
                }
            }
        });
        let mut next = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let sent = lock(watch).probed();
            let _ = socket.send_to(&sent.to_be_bytes(), to);
            // After a pause of this process no burst is sent.
            next = (next + INTERVAL).max(Instant::now());
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    });
}
