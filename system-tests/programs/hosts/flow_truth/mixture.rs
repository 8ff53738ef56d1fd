//! Mixed traffic of two hosts: long and short flows of TCP and UDP, pings, and packets that the other end refuses.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::world::enter;

/// Where TCP and UDP are answered.
pub(super) const PORTS: [u16; 2] = [5001, 5002];
/// The first of the ports that no rule allows.
pub(super) const REFUSED: u16 = 9000;
const TCP: u8 = 6;
const UDP: u8 = 17;
const BRIEFLY: Duration = Duration::from_millis(300);
/// Longer than a restarted daemon and the repeated packets of TCP take.
const PATIENCE: Duration = Duration::from_secs(8);

/// A flow that was answered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Opened {
    pub(super) protocol: u8,
    pub(super) from: SocketAddr,
    pub(super) to: u16,
    /// When its first and its last answer came, in milliseconds since 1970.
    pub(super) began_ms: u64,
    pub(super) last_ms: u64,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    is_paused: AtomicBool,
    /// Long connections that were lost.
    broken: AtomicU64,
    opened: Mutex<Vec<Opened>>,
}

impl Shared {
    /// Waits while the traffic pauses; returns whether it goes on.
    fn goes_on(&self) -> bool {
        while self.is_paused.load(Ordering::Relaxed) && !self.stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(10));
        }
        !self.stop.load(Ordering::Relaxed)
    }

    fn note(&self, flow: Opened) {
        self.opened.lock().expect("no thread of the traffic panics").push(flow);
    }
}

/// Traffic in both directions until it is dropped.
pub(super) struct Mixture {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Mixture {
    pub(super) fn start(namespaces: &[String; 2], addresses: [IpAddr; 2]) -> Self {
        let shared = Arc::new(Shared::default());
        let mut threads = Vec::new();
        let mut spawn = |namespace: &str, work: Box<dyn FnOnce(&Shared) + Send>| {
            let (shared, namespace) = (Arc::clone(&shared), namespace.to_owned());
            threads.push(thread::spawn(move || {
                enter(&namespace);
                work(&shared);
            }));
        };
        for namespace in namespaces {
            spawn(namespace, Box::new(answer_streams));
            spawn(namespace, Box::new(answer_datagrams));
        }
        thread::sleep(Duration::from_millis(100));
        for (namespace, to) in namespaces.iter().zip([addresses[1], addresses[0]]) {
            let [tcp, udp] = PORTS.map(|port| SocketAddr::new(to, port));
            spawn(namespace, Box::new(move |shared| long_streams(shared, tcp)));
            spawn(namespace, Box::new(move |shared| short_streams(shared, tcp)));
            spawn(namespace, Box::new(move |shared| datagrams(shared, udp, Duration::MAX)));
            spawn(namespace, Box::new(move |shared| short_datagrams(shared, udp)));
            spawn(namespace, Box::new(move |shared| unwanted(shared, to)));
        }
        Self { shared, threads }
    }

    pub(super) fn pause(&self) {
        self.shared.is_paused.store(true, Ordering::Relaxed);
    }

    pub(super) fn go_on(&self) {
        self.shared.is_paused.store(false, Ordering::Relaxed);
    }

    /// How many long connections were lost.
    pub(super) fn broken(&self) -> u64 {
        self.shared.broken.load(Ordering::Relaxed)
    }

    /// Ends the traffic; returns all flows that were answered.
    pub(super) fn finish(mut self) -> Vec<Opened> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("a thread of the traffic");
        }
        std::mem::take(&mut self.shared.opened.lock().expect("no thread of the traffic panics"))
    }
}

impl Drop for Mixture {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

/// Sends a datagram to each of `count` ports that no rule allows.
pub(super) fn refused(namespace: &str, to: SocketAddr, count: usize) {
    thread::scope(|scope| {
        scope.spawn(|| {
            enter(namespace);
            let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            for n in 0..count {
                let port = REFUSED + u16::try_from(n).expect("few ports");
                socket.send_to(b"unwanted", SocketAddr::new(to.ip(), port)).expect("the device takes it");
                if n % 10 == 9 {
                    thread::sleep(Duration::from_millis(2));
                }
            }
        });
    });
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_millis() as u64
}

fn answer_streams(shared: &Shared) {
    let listener = TcpListener::bind(("0.0.0.0", PORTS[0])).expect("a listener");
    listener.set_nonblocking(true).expect("it need not wait");
    thread::scope(|scope| {
        while !shared.stop.load(Ordering::Relaxed) {
            let Ok((mut stream, _)) = listener.accept() else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            scope.spawn(move || {
                stream.set_nonblocking(false).expect("it waits");
                stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

fn answer_datagrams(shared: &Shared) {
    let socket = UdpSocket::bind(("0.0.0.0", PORTS[1])).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    let mut buffer = [0; 2048];
    while !shared.stop.load(Ordering::Relaxed) {
        if let Ok((n, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..n], from);
        }
    }
}

/// One connection after the other, each until it is lost.
fn long_streams(shared: &Shared, to: SocketAddr) {
    while shared.goes_on() {
        if stream(shared, to, Duration::MAX, Duration::from_millis(4)).is_err() && shared.goes_on() {
            shared.broken.fetch_add(1, Ordering::Relaxed);
            thread::sleep(BRIEFLY);
        }
    }
}

/// Connections of a moment, and every third for more than a second.
fn short_streams(shared: &Shared, to: SocketAddr) {
    for n in 0.. {
        if !shared.goes_on() {
            return;
        }
        let time = if n % 3 == 2 { Duration::from_millis(1300) } else { Duration::ZERO };
        let _ = stream(shared, to, time, Duration::from_millis(100));
        thread::sleep(BRIEFLY);
    }
}

/// Speaks for this time, and once at least.
fn stream(shared: &Shared, to: SocketAddr, time: Duration, pause: Duration) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(2))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let (from, began, began_ms) = (stream.local_addr()?, Instant::now(), now_ms());
    let mut flow = Opened { protocol: TCP, from, to: to.port(), began_ms, last_ms: began_ms };
    let (said, mut heard) = ([7; 3000], [0; 3000]);
    let ended = loop {
        if let Err(error) = stream.write_all(&said).and_then(|()| stream.read_exact(&mut heard)) {
            break Err(error);
        }
        flow.last_ms = now_ms();
        if began.elapsed() >= time {
            break Ok(());
        }
        thread::sleep(pause);
        if !shared.goes_on() {
            break Ok(());
        }
    };
    shared.note(flow);
    ended
}

/// As [`short_streams`].
fn short_datagrams(shared: &Shared, to: SocketAddr) {
    for n in 0.. {
        if !shared.goes_on() {
            return;
        }
        datagrams(shared, to, Duration::from_millis(if n % 3 == 2 { 1300 } else { 30 }));
        thread::sleep(BRIEFLY);
    }
}

/// Datagrams for this time, of one socket, whether or not they are answered.
fn datagrams(shared: &Shared, to: SocketAddr, time: Duration) {
    let socket = UdpSocket::bind(("0.0.0.0", 0)).expect("a socket");
    // Without a device there is no route.
    let from = loop {
        match socket.connect(to).and_then(|()| socket.local_addr()) {
            Ok(from) => break from,
            Err(_) if shared.goes_on() => thread::sleep(Duration::from_millis(20)),
            Err(_) => return,
        }
    };
    socket.set_read_timeout(Some(Duration::from_millis(20))).expect("a timeout");
    let (began, mut flow, mut buffer) = (Instant::now(), None::<Opened>, [0; 2048]);
    while began.elapsed() < time && shared.goes_on() {
        let _ = socket.send(&[7; 700]);
        let until = Instant::now() + Duration::from_millis(15);
        while Instant::now() < until {
            match socket.recv(&mut buffer) {
                Ok(_) => {
                    let now = now_ms();
                    flow.get_or_insert_with(|| Opened {
                        protocol: UDP,
                        from,
                        to: to.port(),
                        began_ms: now,
                        last_ms: now,
                    })
                    .last_ms = now;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
            // More often a flow of a minute would only send more.
            thread::sleep(Duration::from_millis(5));
        }
    }
    // An answer that comes after the socket is closed would be an ICMP error, of which there are no records.
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    while socket.recv(&mut buffer).is_ok() {}
    flow.into_iter().for_each(|flow| shared.note(flow));
}

/// Packets that the other end refuses.
fn unwanted(shared: &Shared, to: IpAddr) {
    let socket = UdpSocket::bind(("0.0.0.0", 0)).expect("a socket");
    for n in (0_u16..50).cycle() {
        if !shared.goes_on() {
            return;
        }
        let _ = socket.send_to(&[7; 100], SocketAddr::new(to, REFUSED + n));
        if n % 10 == 0 {
            let _ = TcpStream::connect_timeout(&SocketAddr::new(to, 22), Duration::from_millis(30));
        }
        thread::sleep(Duration::from_millis(50));
    }
}
