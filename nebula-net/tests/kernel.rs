//! The kernel's TCP at the other end: a driver with a tun device in a network namespace of its own, and a bad
//! underlay in between.

#[path = "../examples/common/mod.rs"]
mod common;

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::{hosts, overlay};
use nebula_core::io::{Driver, Options, SocketOptions, Tun, UdpSocket as Underlay};
use nebula_net::{BlockingNet, Net};
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{setsockopt, sockopt};

/// What the underlay does with datagrams, per thousand.
#[derive(Clone, Copy)]
struct Link {
    seed: u64,
    loss: u64,
    /// Held back, so that later ones overtake them.
    late: u64,
    /// Milliseconds that each datagram takes.
    delay: u64,
}

/// A node of ours, the driver in its namespace, and the link between them.
struct World {
    net: BlockingNet,
    /// What to run in the namespace.
    kernel: mpsc::Sender<Box<dyn FnOnce() + Send>>,
}

type Answer<T> = mpsc::Receiver<T>;

impl World {
    fn new(link: Link) -> Self {
        let [(near_socket, mut near), (far_socket, mut far)] = hosts().expect("two hosts");
        let ends = [&near_socket, &far_socket].map(|socket| socket.local_addr().expect("an address"));
        let between = start_link(link, ends);
        for endpoints in near.static_hosts.values_mut().chain(far.static_hosts.values_mut()) {
            *endpoints = vec![between];
        }
        let net = Net::builder(near).socket(near_socket).start_blocking().expect("it starts");
        let (kernel, work) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
            let tun = Tun::create("nebula0", 1, true).expect("a device");
            for command in [
                "link set lo up",
                "link set nebula0 mtu 1300",
                "addr add 10.42.0.2/16 dev nebula0",
                "addr add fd42::2/64 dev nebula0 nodad",
                "link set nebula0 up",
            ] {
                let status = Command::new("ip").args(command.split(' ')).status().expect("ip runs");
                assert!(status.success(), "ip {command}");
            }
            let mut options = Options::default();
            options.advertise_interfaces = false;
            let socket = Underlay::from_fd(far_socket.into(), &SocketOptions::default()).expect("a socket");
            let driver = Driver::start(far, Some(tun), vec![socket], options).expect("a driver");
            let handle = driver.handle();
            let running = thread::spawn(move || driver.run());
            work.into_iter().for_each(|work| work());
            handle.stop();
            running.join().expect("no panic").expect("it stops");
        });
        Self { net, kernel }
    }

    /// Runs something in the namespace, on a thread of its own. The answer comes when it is done.
    fn in_kernel<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Answer<T> {
        let (sender, receiver) = mpsc::channel();
        let spawn = move || {
            thread::spawn(move || sender.send(work()));
        };
        self.kernel.send(Box::new(spawn)).expect("the namespace is there");
        receiver
    }

    /// A listener of the kernel, which serves one connection.
    fn kernel_serves(&self, serve: impl FnOnce(TcpStream) + Send + 'static) -> Answer<()> {
        let (ready, listening) = mpsc::channel();
        let done = self.in_kernel(move || {
            let listener = TcpListener::bind("[::]:7").expect("a free port");
            ready.send(()).expect("somebody waits");
            serve(listener.accept().expect("a connection").0);
        });
        soon(&listening);
        done
    }

    /// Connects from the namespace; the node may not have its tunnel yet.
    fn kernel_dials<T: Send + 'static>(
        &self,
        serve: impl FnOnce(io::Result<TcpStream>) -> T + Send + 'static,
    ) -> Answer<T> {
        self.in_kernel(|| serve(TcpStream::connect((overlay(1), 7))))
    }
}

fn soon<T>(answer: &Answer<T>) -> T {
    answer.recv_timeout(Duration::from_secs(120)).expect("done within two minutes")
}

/// Passes datagrams on between two endpoints, badly. Returns its own endpoint. It ends when nothing comes for a while.
fn start_link(link: Link, ends: [SocketAddr; 2]) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let own = socket.local_addr().expect("an address");
    socket.set_read_timeout(Some(Duration::from_millis(2))).expect("a timeout");
    thread::spawn(move || {
        let mut random = link.seed | 1;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 11) % below
        };
        let (mut buffer, mut held, mut heard) = (vec![0; 65_535], Vec::<(Instant, SocketAddr, Vec<u8>)>::new(), now());
        while heard.elapsed() < Duration::from_secs(60) {
            if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                heard = now();
                let to = if from == ends[0] { ends[1] } else { ends[0] };
                if next(1000) < link.loss {
                    continue;
                }
                let late = if next(1000) < link.late { 1 + next(8) } else { 0 };
                if late + link.delay > 0 && held.len() < 10_000 {
                    held.push((heard + Duration::from_millis(late + link.delay), to, buffer[..len].to_vec()));
                } else {
                    let _ = socket.send_to(&buffer[..len], to);
                }
            }
            held.retain(|(at, to, bytes)| {
                let waits = *at > now();
                if !waits {
                    let _ = socket.send_to(bytes, to);
                }
                waits
            });
        }
    });
    own
}

#[allow(clippy::disallowed_methods, reason = "the test runs in real time")]
fn now() -> Instant {
    Instant::now()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8).collect()
}

/// Sends back what arrives until the peer closes its side.
fn echo(mut stream: impl Read + Write) {
    let mut buffer = vec![0; 20_000];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        stream.write_all(&buffer[..count]).expect("the peer reads");
    }
}

const LINKS: [Link; 3] = [
    Link { seed: 1, loss: 0, late: 0, delay: 0 },
    Link { seed: 2, loss: 20, late: 0, delay: 0 },
    Link { seed: 3, loss: 10, late: 50, delay: 0 },
];

#[test]
#[ignore = "needs root for a namespace and a tun device"]
fn the_kernel_echoes_what_we_send() {
    for link in LINKS {
        let world = World::new(link);
        let served = world.kernel_serves(|stream| {
            echo(&stream);
            stream.shutdown(Shutdown::Write).expect("open");
        });
        let target = if link.seed == 2 { "[fd42::2]:7" } else { "10.42.0.2:7" };
        let stream = world.net.dial(target).expect("the kernel accepts");
        assert_eq!(stream.peer_certificate().expect("a certificate").name(), "host-2");
        let data = pattern(2_000_000);
        thread::scope(|scope| {
            scope.spawn(|| {
                (&stream).write_all(&data).expect("the kernel reads");
                stream.shutdown();
            });
            let mut back = Vec::new();
            (&stream).read_to_end(&mut back).expect("the kernel answers");
            assert!(back == data, "{} bytes of {}", back.len(), data.len());
        });
        soon(&served);
    }
}

#[test]
#[ignore = "needs root for a namespace and a tun device"]
fn we_echo_what_the_kernel_sends() {
    for link in LINKS {
        let world = World::new(link);
        let listener = world.net.listen(7).expect("a free port");
        let done = world.kernel_dials(|stream| {
            let stream = stream.expect("we accept");
            let data = pattern(2_000_000);
            thread::scope(|scope| {
                scope.spawn(|| {
                    (&stream).write_all(&data).expect("we read");
                    stream.shutdown(Shutdown::Write).expect("open");
                });
                let mut back = Vec::new();
                (&stream).read_to_end(&mut back).expect("we answer");
                assert!(back == data, "{} bytes of {}", back.len(), data.len());
            });
        });
        let stream = listener.accept().expect("the kernel dials").0;
        assert_eq!(stream.peer_certificate().expect("a certificate").name(), "host-2");
        echo(stream);
        soon(&done);
    }
}

#[test]
#[ignore = "needs root for a namespace and a tun device"]
fn slow_readers_close_the_window_on_both_sides() {
    let world = World::new(LINKS[0]);
    let served = world.kernel_serves(|mut stream| {
        thread::sleep(Duration::from_secs(1));
        let mut got = Vec::new();
        stream.read_to_end(&mut got).expect("the stream ends");
        assert!(got == pattern(8_000_000));
        stream.write_all(&got).expect("we read");
    });
    let mut stream = world.net.dial("10.42.0.2:7").expect("the kernel accepts");
    stream.write_all(&pattern(8_000_000)).expect("the kernel reads");
    stream.shutdown();
    thread::sleep(Duration::from_secs(1));
    let mut back = Vec::new();
    stream.read_to_end(&mut back).expect("the stream ends");
    assert!(back == pattern(8_000_000), "{} bytes", back.len());
    soon(&served);
}

#[test]
#[ignore = "needs root for a namespace and a tun device"]
fn refusals_and_resets_are_understood_on_both_sides() {
    let world = World::new(LINKS[0]);
    world.net.up(IpAddr::from(overlay(2))).expect("a tunnel");
    let refused = world.net.dial("10.42.0.2:9").expect_err("nobody listens");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    let refused = soon(&world.kernel_dials(|stream| stream.expect_err("nobody listens").kind()));
    assert_eq!(refused, ErrorKind::ConnectionRefused);

    // Data that nobody reads makes either side's close a reset.
    let served = world.kernel_serves(|stream| {
        (&stream).write_all(b"hello").expect("open");
        thread::sleep(Duration::from_millis(300));
    });
    let mut stream = world.net.dial("10.42.0.2:7").expect("the kernel accepts");
    stream.write_all(b"never read").expect("open");
    soon(&served);
    let mut got = Vec::new();
    let reset = stream.read_to_end(&mut got).expect_err("a reset");
    assert_eq!((got.as_slice(), reset.kind()), (&b"hello"[..], ErrorKind::ConnectionReset));

    let listener = world.net.listen(7).expect("a free port");
    let done = world.kernel_dials(|stream| {
        let mut stream = stream.expect("we accept");
        stream.write_all(b"never read").expect("open");
        let mut got = Vec::new();
        stream.read_to_end(&mut got).expect_err("a reset").kind()
    });
    let stream = listener.accept().expect("the kernel dials").0;
    thread::sleep(Duration::from_millis(300));
    drop(stream);
    assert_eq!(soon(&done), ErrorKind::ConnectionReset);
}

#[test]
#[ignore = "needs root for a namespace and a tun device"]
fn a_long_path_with_loss_does_not_stall_us() {
    // Enough for the congestion window to be what the loss has it.
    let data = pattern(1_500_000);
    let link = Link { seed: 4, loss: 20, late: 0, delay: 25 };
    let world = World::new(link);
    world.net.up(IpAddr::from(overlay(2))).expect("a tunnel");

    let served = world.kernel_serves(|mut stream| {
        let mut got = Vec::new();
        stream.read_to_end(&mut got).expect("the stream ends");
        stream.write_all(&[1]).expect("we wait for it");
    });
    let mut stream = world.net.dial("10.42.0.2:7").expect("the kernel accepts");
    let started = now();
    stream.write_all(&data).expect("the kernel reads");
    stream.shutdown();
    stream.read_exact(&mut [0]).expect("the kernel answers");
    let ours = started.elapsed();
    soon(&served);

    let listener = world.net.listen(7).expect("a free port");
    let done = world.kernel_dials(move |stream| {
        let mut stream = stream.expect("we accept");
        // A machine may have another default.
        setsockopt(&stream, sockopt::TcpCongestion, &"cubic".into()).expect("the kernel has CUBIC");
        let started = now();
        stream.write_all(&data).expect("we read");
        stream.shutdown(Shutdown::Write).expect("open");
        stream.read_exact(&mut [0]).expect("we answer");
        started.elapsed()
    });
    let mut stream = listener.accept().expect("the kernel dials").0;
    let mut got = Vec::new();
    stream.read_to_end(&mut got).expect("the stream ends");
    stream.write_all(&[1]).expect("the kernel waits for it");
    let kernel = soon(&done);
    println!("1.5 MB over 50 ms with 2 % loss each way: {ours:.1?}, the kernel {kernel:.1?}");
    // Both depend on what is lost, so this only finds stalls.
    assert!(ours < kernel * 10, "{ours:?}, the kernel {kernel:?}");
}
