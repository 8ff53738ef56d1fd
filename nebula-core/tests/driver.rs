//! Tests two drivers in network namespaces that are joined by a veth pair: what the kernel does with our packets.
//!
//! A namespace belongs to one thread and has no name, so the kernel removes it and everything in it when the thread and
//! the driver end, even after a failure.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nebula_cert::{CaPool, Certificate, Curve, Identity, PrivateKey, SigningKey, Template};
use nebula_core::capture::{Directory, Endpoint, Found, Service, Target};
use nebula_core::config::ConfigProblem;
use nebula_core::firewall::Rule;
use nebula_core::io::{Bypass, Driver, Error, Handle, Idle, Options, SocketOptions, Tun, UdpSocket};
use nebula_core::{Config, Event, TunnelDownReason};
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt};

const OVERLAY: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 128, 0, 1), Ipv4Addr::new(10, 128, 0, 2)];
const UNDERLAY: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
const PORT: u16 = 4242;

/// Serialises the tests: they count threads, and two at once would share two cores with each other's streams.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace and the thread that lives in it.
struct Namespace {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    tid: i32,
}

impl Namespace {
    fn new() -> Self {
        let (jobs, inbox) = channel::<Job>();
        let (tell, told) = channel();
        let thread = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            tell.send(nix::unistd::gettid().as_raw()).unwrap();
            inbox.into_iter().for_each(|job| job());
        });
        Self { jobs: Some(jobs), thread: Some(thread), tid: told.recv().unwrap() }
    }

    /// Starts `job` in the namespace. Jobs run one after the other; the receiver ends if the job panics.
    fn start<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
        let (tell, told) = channel();
        let job = Box::new(move || drop(tell.send(job())));
        self.jobs.as_ref().unwrap().send(job).expect("an earlier job of this namespace panicked");
        told
    }

    fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        self.start(job).recv().expect("the job panicked")
    }

    fn ip(&self, arguments: impl Into<String>) {
        let arguments = arguments.into();
        self.run(move || {
            let output = Command::new("ip").args(arguments.split_whitespace()).output().unwrap();
            assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
        });
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.jobs.take();
        let _ = self.thread.take().unwrap().join();
    }
}

/// Certificates for the two hosts.
struct Authority {
    key: SigningKey,
    certificate: Certificate,
}

impl Authority {
    fn new() -> Self {
        let key = SigningKey::generate(Curve::Curve25519).unwrap();
        let mut template = template("test authority");
        template.public_key = key.public_key();
        Self { certificate: template.self_sign(&key).unwrap(), key }
    }

    fn identity(&self, host: usize) -> Identity {
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let mut template = template(["a", "b"][host]);
        template.networks = vec![format!("{}/24", OVERLAY[host]).parse().unwrap()];
        template.public_key = key.public_key();
        template.not_after -= 1;
        Identity::new(vec![template.sign(&self.certificate, &self.key).unwrap()], key).unwrap()
    }

    fn trust(&self) -> CaPool {
        let mut trust = CaPool::new();
        trust.add(self.certificate.clone()).unwrap();
        trust
    }
}

fn template(name: &str) -> Template {
    Template::new(name, 1..=4_000_000_000)
}

/// The settings in which the two drivers of a test differ.
#[derive(Clone, Copy)]
struct Setup {
    tun_offloads: bool,
    udp_offloads: bool,
    routines: usize,
    bind: &'static str,
    overlay_mtu: u16,
    underlay_mtu: u16,
    tun: [bool; 2],
    two_threads: bool,
    /// The first host is a pod under capture.
    captured: bool,
}

const USUAL: Setup = Setup {
    tun_offloads: true,
    udp_offloads: true,
    routines: 1,
    bind: "0.0.0.0",
    overlay_mtu: 1300,
    underlay_mtu: 1500,
    tun: [true, true],
    two_threads: true,
    captured: false,
};

/// A Service on port 80 for port 5000 of the second host, and a host that is not enrolled.
#[derive(Debug)]
struct Cluster;

const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 7);
const CLEAR: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
const MARK: u32 = 0x2000_0000;

impl Directory for Cluster {
    fn version(&self) -> u64 {
        1
    }

    fn find(&self, target: &Target) -> Found {
        match target.address {
            IpAddr::V4(SERVICE) if target.port == 80 => {
                Found::Service(Service { id: 0, ready: 1, clear: 0, affinity: None })
            }
            IpAddr::V4(CLEAR) => Found::Clear,
            address if address == OVERLAY[1] => Found::Peer { incarnation: 1 },
            _ => Found::Unknown,
        }
    }

    fn endpoint(&self, _: &Service, _: u32) -> Option<Endpoint> {
        Some(Endpoint { address: OVERLAY[1].into(), port: 5000, incarnation: 1 })
    }

    fn serves(&self, _: &Service, _: &Endpoint) -> bool {
        true
    }

    fn incarnation(&self, address: IpAddr) -> Option<u64> {
        (address == OVERLAY[1]).then_some(1)
    }
}

/// A raw socket that sends past the overlay.
fn past_the_overlay() -> Bypass {
    let (family, kind, flags) = (AddressFamily::Inet, SockType::Raw, SockFlag::SOCK_CLOEXEC);
    let socket = socket(family, kind, flags, SockProtocol::Raw).unwrap();
    setsockopt(&socket, sockopt::Mark, &MARK).unwrap();
    setsockopt(&socket, sockopt::BindToDevice, &"under0".into()).unwrap();
    Bypass { v4: Some(Arc::new(socket)), v6: None }
}

struct Host {
    namespace: Namespace,
    handle: Handle,
    events: Receiver<Event>,
    driver: Option<JoinHandle<Result<(), Error>>>,
    config: Config,
    setup: Setup,
    files: Files,
}

/// The descriptors of a driver's device and sockets.
#[derive(Default)]
struct Files {
    queues: Vec<OwnedFd>,
    sockets: Vec<OwnedFd>,
}

impl Files {
    fn of(tun: Option<&Tun>, sockets: &[UdpSocket]) -> Self {
        let owned = |file: BorrowedFd<'_>| file.try_clone_to_owned().unwrap();
        let queues = tun.into_iter().flat_map(|tun| tun.queues()).map(owned).collect();
        Self { queues, sockets: sockets.iter().map(|socket| owned(socket.as_fd())).collect() }
    }
}

impl Setup {
    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.bind.parse().unwrap(), PORT)
    }

    fn socket_options(&self) -> SocketOptions {
        let mut options = SocketOptions::default();
        options.offloads = self.udp_offloads;
        options
    }
}

impl Host {
    fn start(namespace: Namespace, authority: &Authority, index: usize, setup: Setup) -> Self {
        let mut config = Config::new(authority.identity(index), authority.trust());
        config.firewall.inbound = vec![Rule::any()];
        config.firewall.outbound = vec![Rule::any()];
        if setup.captured && index == 0 {
            config.capture = Some(Arc::new(Cluster));
        }
        let peer = 1 - index;
        let endpoint = SocketAddr::from((UNDERLAY[peer], PORT));
        config.static_hosts = BTreeMap::from([(IpAddr::from(OVERLAY[peer]), vec![endpoint])]);
        let given = config.clone();
        let (mut driver, files) = namespace.run(move || {
            let tun = setup.tun[index].then(|| Tun::create("overlay0", setup.routines, setup.tun_offloads).unwrap());
            let sockets = UdpSocket::bind(setup.address(), setup.routines, &setup.socket_options()).unwrap();
            let bypass = if setup.captured && index == 0 { past_the_overlay() } else { Bypass::default() };
            let mut options = Options::default();
            (options.two_threads, options.bypass) = (setup.two_threads, bypass);
            let files = Files::of(tun.as_ref(), &sockets);
            (Driver::start(given, tun, sockets, options).unwrap(), files)
        });
        if setup.tun[index] {
            namespace.ip(format!("addr add {}/24 dev overlay0", OVERLAY[index]));
            namespace.ip(format!("link set overlay0 mtu {} up", setup.overlay_mtu));
        }
        let (handle, events) = (driver.handle(), driver.take_events().unwrap());
        let driver = Some(std::thread::spawn(|| driver.run()));
        Self { namespace, handle, events, driver, config, setup, files }
    }

    /// Has another driver take over, as another process would: with the same descriptors.
    fn be_succeeded(&mut self) {
        let state = self.handle.hand_over().expect("it goes on");
        let Files { queues, sockets } = std::mem::take(&mut self.files);
        self.wait().unwrap();
        let (config, setup) = (self.config.clone(), self.setup);
        let (mut driver, files) = self.namespace.run(move || {
            let tun = Tun::adopt(queues, "overlay0", setup.routines, setup.tun_offloads).unwrap();
            let options = setup.socket_options();
            let sockets = UdpSocket::adopt(sockets, setup.address(), setup.routines, &options).unwrap();
            let files = Files::of(Some(&tun), &sockets);
            let mut options = Options::default();
            options.two_threads = setup.two_threads;
            (Driver::take_over(config, Some(tun), sockets, options, state).unwrap(), files)
        });
        (self.handle, self.events, self.files) = (driver.handle(), driver.take_events().unwrap(), files);
        self.driver = Some(std::thread::spawn(|| driver.run()));
    }

    fn stop(&mut self) -> Result<(), Error> {
        self.handle.stop();
        self.wait()
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.files = Files::default();
        self.driver.take().unwrap().join().unwrap()
    }

    fn expect_event(&self, what: impl Fn(&Event) -> bool) {
        while !what(&self.events.recv_timeout(Duration::from_secs(10)).expect("the event did not come")) {}
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(driver) = self.driver.take() {
            let _ = driver.join();
        }
    }
}

fn pair(setup: Setup) -> [Host; 2] {
    let namespaces = [Namespace::new(), Namespace::new()];
    namespaces[0].ip(format!("link add under0 type veth peer name under0 netns {}", namespaces[1].tid));
    for (namespace, address) in namespaces.iter().zip(UNDERLAY) {
        namespace.ip(format!("addr add {address}/24 dev under0"));
        namespace.ip(format!("link set under0 mtu {} up", setup.underlay_mtu));
        namespace.ip("link set lo up");
    }
    let authority = Authority::new();
    let mut index = 0..;
    namespaces.map(|namespace| Host::start(namespace, &authority, index.next().unwrap(), setup))
}

fn ping(from: &Host, to: Ipv4Addr) -> bool {
    from.namespace.run(move || {
        let arguments = ["-q", "-n", "-c", "1", "-W", "5", &to.to_string()].map(str::to_owned);
        Command::new("ping").args(arguments).output().unwrap().status.success()
    })
}

/// Sends `len` bytes over the overlay and compares what arrives.
fn transfer(hosts: &[Host; 2], from: usize, len: usize) {
    let to = SocketAddr::from((OVERLAY[1 - from], 5000));
    transfer_to(hosts, from, len, (to, to));
}

/// The same, to another address than the one that the other host listens on.
fn transfer_to(hosts: &[Host; 2], from: usize, len: usize, (address, listens_on): (SocketAddr, SocketAddr)) {
    let to = 1 - from;
    let listener = hosts[to].namespace.run(move || TcpListener::bind(listens_on).unwrap());
    let sent = hosts[from].namespace.start(move || {
        let bytes: Vec<u8> = (0..len).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(10)).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(&bytes).unwrap();
        bytes
    });
    listener.set_nonblocking(true).unwrap();
    let mut stream = (0..1000)
        .find_map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            listener.accept().ok()
        })
        .expect("nobody connected")
        .0;
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    assert!(received == sent.recv().expect("the sender failed"), "the bytes changed on the way");
}

/// Threads of all drivers of this process.
fn driver_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).filter(|name| name.starts_with("nebula-")).collect()
}

/// A thread names itself once it runs, which may be a moment after the driver started.
fn expect_driver_threads(count: usize) {
    for _ in 0..500 {
        if driver_threads().len() >= count {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(driver_threads().len(), count);
}

fn counter(host: &Host, name: &str) -> u64 {
    *host.handle.counters().get(name).unwrap_or_else(|| panic!("no counter {name}"))
}

#[test]
#[ignore = "needs root and network namespaces"]
fn hosts_ping_and_stream_over_the_overlay_with_every_combination_of_offloads() {
    let _alone = alone();
    for (tun_offloads, udp_offloads) in [(true, true), (true, false), (false, true), (false, false)] {
        let hosts = pair(Setup { tun_offloads, udp_offloads, two_threads: tun_offloads, ..USUAL });
        assert!(ping(&hosts[0], OVERLAY[1]), "no answer with offloads {tun_offloads} {udp_offloads}");
        transfer(&hosts, 0, 8 << 20);
        transfer(&hosts, 1, 8 << 20);
        let coalesced = counter(&hosts[1], "coalesced");
        assert_eq!(
            coalesced > 0,
            tun_offloads,
            "{coalesced} super-packets with offloads {tun_offloads} {udp_offloads}"
        );
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_service_is_reached_through_a_tunnel_with_every_combination_of_offloads() {
    let _alone = alone();
    for (tun_offloads, udp_offloads) in [(true, true), (true, false), (false, true), (false, false)] {
        let hosts = pair(Setup { tun_offloads, udp_offloads, captured: true, ..USUAL });
        hosts[0].namespace.ip(format!("route add {SERVICE}/32 dev overlay0"));
        let ends = (SocketAddr::from((SERVICE, 80)), SocketAddr::from((OVERLAY[1], 5000)));
        transfer_to(&hosts, 0, 8 << 20, ends);
        // The other way: what the server sends comes back under the Service's address.
        let listener = hosts[1].namespace.run(move || TcpListener::bind(ends.1).unwrap());
        let server = std::thread::spawn(move || listener.accept().unwrap().0.write_all(&vec![7; 4 << 20]).unwrap());
        let received = hosts[0].namespace.run(move || {
            let mut stream = TcpStream::connect_timeout(&ends.0, Duration::from_secs(10)).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            received
        });
        server.join().unwrap();
        assert!(received == vec![7; 4 << 20]);
        // A datagram too long for one packet.
        let receiver = hosts[1].namespace.run(|| std::net::UdpSocket::bind((OVERLAY[1], 5000)).unwrap());
        receiver.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let sender = hosts[0].namespace.run(|| {
            let socket = std::net::UdpSocket::bind((OVERLAY[0], 0)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            socket.connect((SERVICE, 80)).unwrap();
            socket.send(&[9; 5000]).unwrap();
            socket
        });
        let mut buffer = [0; 8000];
        let (len, from) = receiver.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from.ip()), (&[9; 5000][..], IpAddr::from(OVERLAY[0])));
        receiver.send_to(&[8; 5000], from).unwrap();
        // Its socket takes datagrams of the Service only.
        let len = sender.recv(&mut buffer).unwrap();
        assert_eq!(buffer[..len], [8; 5000]);
        assert_eq!(counter(&hosts[0], "translated_flows"), 3);
        assert_eq!(counter(&hosts[0], "bypassed"), 0);
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn what_is_known_not_to_be_enrolled_leaves_past_the_overlay_and_nothing_else_does() {
    let _alone = alone();
    let hosts = pair(Setup { captured: true, ..USUAL });
    hosts[1].namespace.ip(format!("addr add {CLEAR}/32 dev lo"));
    hosts[0].namespace.ip(format!("route add {CLEAR}/32 via {}", UNDERLAY[1]));
    hosts[0].namespace.ip(format!("rule add not fwmark {MARK:#x}/{MARK:#x} lookup 20034 priority 100"));
    for address in [CLEAR, Ipv4Addr::new(203, 0, 113, 10)] {
        hosts[0].namespace.ip(format!("route add {address}/32 dev overlay0 src {} table 20034", UNDERLAY[0]));
    }
    let to = SocketAddr::from((CLEAR, 5000));
    transfer_to(&hosts, 0, 4 << 20, (to, to));
    assert!(counter(&hosts[0], "bypassed") > 1000);
    assert_eq!((counter(&hosts[0], "lost_bypass_refused"), hosts[0].handle.tunnels().len()), (0, 0));
    // There is a way to the other address in clear, but nobody knows what it is.
    hosts[1].namespace.ip("addr add 203.0.113.10/32 dev lo");
    hosts[0].namespace.ip(format!("route add 203.0.113.10/32 via {}", UNDERLAY[1]));
    let listener = hosts[1].namespace.run(|| std::net::UdpSocket::bind(("203.0.113.10", 5000)).unwrap());
    hosts[0].namespace.run(|| {
        let socket = std::net::UdpSocket::bind((UNDERLAY[0], 0)).unwrap();
        socket.send_to(b"to nobody knows whom", ("203.0.113.10", 5000)).unwrap();
    });
    let dropped = || counter(&hosts[0], "dropped_out_unknown_destination");
    assert!((0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        dropped() == 1
    }));
    assert_eq!(counter(&hosts[0], "held_for_directory"), 1);
    listener.set_nonblocking(true).unwrap();
    assert!(listener.recv(&mut [0; 100]).is_err(), "it left in clear");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn several_routines_share_one_device_and_one_port() {
    let _alone = alone();
    let hosts = pair(Setup { routines: 2, ..USUAL });
    assert!(ping(&hosts[0], OVERLAY[1]));
    for from in [0, 1, 0, 1] {
        transfer(&hosts, from, 2 << 20);
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_dual_stack_socket_reaches_ipv4_peers() {
    let _alone = alone();
    let hosts = pair(Setup { bind: "::", ..USUAL });
    assert!(ping(&hosts[0], OVERLAY[1]));
    transfer(&hosts, 0, 1 << 20);
    let endpoint = hosts[1].handle.tunnels()[0].endpoint;
    assert_eq!(endpoint, Some(SocketAddr::from((UNDERLAY[0], PORT))), "mapped addresses must not leak");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn datagrams_above_the_path_mtu_still_arrive() {
    let _alone = alone();
    let hosts = pair(Setup { overlay_mtu: 1400, underlay_mtu: 1400, ..USUAL });
    assert!(ping(&hosts[0], OVERLAY[1]));
    transfer(&hosts, 0, 1 << 20);
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_host_without_a_device_answers_pings_and_counts_what_it_cannot_deliver() {
    let _alone = alone();
    let hosts = pair(Setup { tun: [false, true], ..USUAL });
    hosts[1].namespace.ip("link set overlay0 up");
    hosts[1].handle.connect(OVERLAY[0].into());
    hosts[0].expect_event(|event| matches!(event, Event::TunnelUp { .. }));
    assert!(ping(&hosts[1], OVERLAY[0]));
    assert_eq!(counter(&hosts[0], "lost_no_device"), 0);
    hosts[1].namespace.run(|| {
        let socket = std::net::UdpSocket::bind((OVERLAY[1], 0)).unwrap();
        socket.send_to(b"for nobody", (OVERLAY[0], 5000)).unwrap();
    });
    // The thread that counted the datagram answers this ping as well, so the datagram is counted by now.
    assert!(ping(&hosts[1], OVERLAY[0]));
    assert_eq!(counter(&hosts[0], "lost_no_device"), 1);
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_stopped_driver_tells_its_peer_and_leaves_nothing() {
    let _alone = alone();
    let mut hosts = pair(USUAL);
    assert!(ping(&hosts[0], OVERLAY[1]));
    expect_driver_threads(6);
    hosts[0].stop().unwrap();
    hosts[1].expect_event(|event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::ClosedByPeer, .. }));
    assert_eq!(driver_threads().len(), 3);
    assert!(hosts[0].handle.tunnels().is_empty());
    hosts[0].namespace.run(|| {
        Tun::create("overlay0", 1, true).expect("the old device is gone");
        std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).expect("the old socket is closed");
    });
    hosts[1].stop().unwrap();
    assert_eq!(driver_threads(), [""; 0]);
}

/// Pings `count` times, a hundred each second; returns how many were answered.
fn start_pings(from: &Host, to: Ipv4Addr, count: u32) -> Receiver<u32> {
    from.namespace.start(move || {
        let arguments =
            ["-q", "-n", "-i", "0.01", "-W", "5", "-c", &count.to_string(), &to.to_string()].map(str::to_owned);
        let output = String::from_utf8(Command::new("ping").args(arguments).output().unwrap().stdout).unwrap();
        let answered = output.split_once(" received").expect(&output).0.rsplit(' ').next().unwrap().parse();
        answered.unwrap()
    })
}

#[test]
#[ignore = "needs root and network namespaces"]
fn drivers_take_over_one_from_another_and_no_ping_and_no_byte_is_lost() {
    let _alone = alone();
    for two_threads in [false, true] {
        let mut hosts = pair(Setup { two_threads, ..USUAL });
        assert!(ping(&hosts[0], OVERLAY[1]));
        // The namespace that pings has no time for another job.
        for (from, to) in [(0, 1), (1, 0)] {
            let sent = counter(&hosts[to], "packets_out");
            let pings = start_pings(&hosts[from], OVERLAY[to], 200);
            for _ in 0..8 {
                std::thread::sleep(Duration::from_millis(200));
                hosts[to].be_succeeded();
            }
            assert_eq!(pings.recv().unwrap(), 200, "two threads: {two_threads}");
            assert!(counter(&hosts[to], "packets_out") >= sent + 200, "counters go on");
        }
        transfer(&hosts, 0, 4 << 20);
        transfer(&hosts, 1, 4 << 20);
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_driver_that_hands_over_ends_without_a_word_to_its_peers() {
    let _alone = alone();
    let mut hosts = pair(USUAL);
    assert!(ping(&hosts[0], OVERLAY[1]));
    assert!(!hosts[1].handle.offer().unwrap().has_keys());
    let state = hosts[1].handle.hand_over().unwrap();
    assert!(state.has_keys());
    hosts[1].wait().unwrap();
    assert!(hosts[1].handle.hand_over().is_none() && hosts[1].handle.offer().is_none(), "it has ended");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(hosts[0].handle.tunnels().len(), 1, "the peer was told");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_removed_device_ends_the_driver_with_an_error() {
    let _alone = alone();
    let mut hosts = pair(USUAL);
    assert!(ping(&hosts[0], OVERLAY[1]));
    hosts[0].namespace.ip("link del overlay0");
    let error = hosts[0].wait().unwrap_err();
    assert!(error.to_string().contains("tun device"), "{error}");
    hosts[1].expect_event(|event| matches!(event, Event::TunnelDown { .. }));
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_connected_idle_driver_wakes_less_than_twice_a_second() {
    let _alone = alone();
    let hosts = pair(USUAL);
    assert!(ping(&hosts[0], OVERLAY[1]));
    std::thread::sleep(Duration::from_secs(1));
    let before = wake_ups("nebula-");
    std::thread::sleep(Duration::from_secs(6));
    let woken = wake_ups("nebula-") - before;
    // Fewer than two wake-ups a second for each of two drivers, over six seconds.
    assert!(woken < 2 * 2 * 6, "{woken} wake-ups of two drivers in six seconds");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn round_trips_wake_one_thread_of_a_host_and_streams_two() {
    let _alone = alone();
    let hosts = pair(USUAL);
    let round_trips = || (0..10).for_each(|_| assert!(ping(&hosts[0], OVERLAY[1])));
    assert!(ping(&hosts[0], OVERLAY[1]));
    let waiting = wake_ups("nebula-out");
    round_trips();
    assert_eq!(wake_ups("nebula-out"), waiting);
    for _ in 0..2 {
        let before = wake_ups("nebula-out");
        transfer(&hosts, 0, 8 << 20);
        assert!(wake_ups("nebula-out") > before);
        // The threads that are woken under load go back to sleep a second after it.
        std::thread::sleep(Duration::from_secs(2));
        let after = wake_ups("nebula-out");
        round_trips();
        assert_eq!(wake_ups("nebula-out"), after);
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn one_thread_can_serve_both_directions_under_load() {
    let _alone = alone();
    let hosts = pair(Setup { two_threads: false, ..USUAL });
    expect_driver_threads(4);
    assert!(ping(&hosts[0], OVERLAY[1]));
    transfer(&hosts, 0, 8 << 20);
    transfer(&hosts, 1, 8 << 20);
}

/// Voluntary context switches of the threads of all drivers whose names begin with `prefix`.
fn wake_ups(prefix: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let statuses = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
    let of_drivers = statuses.filter(|status| status.starts_with(&format!("Name:\t{prefix}")));
    of_drivers
        .filter_map(|status| {
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"))?;
            line.split_whitespace().last()?.parse::<u64>().ok()
        })
        .sum()
}

/// Scheduling of this process's threads, either those of drivers or all others: niceness, signals, processors. Lists
/// every distinct combination once.
fn treatment(of_driver: bool) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| Some(task.ok()?.path()));
    let described = tasks.filter_map(|task| {
        let read = |name: &str| std::fs::read_to_string(task.join(name)).ok();
        let (name, stat, status) = (read("comm")?, read("stat")?, read("status")?);
        // Niceness is the seventeenth field after the name, which may contain blanks.
        let niceness = stat.rsplit_once(')')?.1.split_whitespace().nth(16)?.to_owned();
        let lines =
            status.lines().filter(|line| ["SigBlk", "SigIgn", "SigCgt", "Cpus_allowed_list"].contains(&key(line)));
        let is_driver = name.starts_with("nebula-");
        (is_driver == of_driver).then(|| format!("niceness {niceness} {}", lines.collect::<Vec<_>>().join(" ")))
    });
    let mut described: Vec<_> = described.collect();
    described.sort();
    described.dedup();
    described
}

fn key(line: &str) -> &str {
    line.split(':').next().unwrap_or_default()
}

/// A node without a device, on the loopback interface.
fn loopback_node(
    authority: &Authority,
    index: usize,
    peer: Option<SocketAddr>,
    options: Options,
) -> (Driver, SocketAddr) {
    let mut config = Config::new(authority.identity(index), authority.trust());
    config.static_hosts = peer.map(|peer| (IpAddr::from(OVERLAY[1 - index]), vec![peer])).into_iter().collect();
    let sockets = UdpSocket::bind("127.0.0.1:0".parse().unwrap(), 1, &SocketOptions::default()).unwrap();
    let address = sockets[0].local_addr().unwrap();
    (Driver::start(config, None, sockets, options).unwrap(), address)
}

#[test]
fn a_driver_leaves_its_process_alone_unless_asked() {
    let _alone = alone();
    let options = Options::default();
    assert!(!options.raise_priority && options.processors.is_empty() && options.on_idle.is_none());
    assert!(soon(|| treatment(false).len() == 1), "threads of the program differ: {:?}", treatment(false));
    let before = treatment(false);
    let authority = Authority::new();
    let (driver, address) = loopback_node(&authority, 0, None, options.clone());
    let (other, _) = loopback_node(&authority, 1, Some(address), options);
    other.handle().connect(OVERLAY[0].into());
    assert!(soon(|| !driver.handle().tunnels().is_empty()), "no tunnel");
    for of_driver in [false, true] {
        assert!(soon(|| treatment(of_driver) == before), "{:?}, {before:?} before", treatment(of_driver));
    }
}

/// Polls, because a thread that begins or ends blocks all signals for a moment.
fn soon(mut condition: impl FnMut() -> bool) -> bool {
    (0..500).any(|_| {
        let met = condition();
        if !met {
            std::thread::sleep(Duration::from_millis(10));
        }
        met
    })
}

static WORK_OVER: AtomicUsize = AtomicUsize::new(0);
static LISTED: AtomicUsize = AtomicUsize::new(0);

#[test]
fn a_program_that_asks_hears_when_the_control_thread_is_idle() {
    let _alone = alone();
    let count = |idle: Idle| {
        match idle {
            Idle::ControlWorkOver => WORK_OVER.fetch_add(1, Ordering::Relaxed),
            Idle::InterfacesListed => LISTED.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
    };
    let authority = Authority::new();
    let (_driver, address) = loopback_node(&authority, 0, None, Options::default());
    let mut options = Options::default();
    options.on_idle = Some(count);
    let (other, _) = loopback_node(&authority, 1, Some(address), options);
    other.handle().connect(OVERLAY[0].into());
    let heard = soon(|| WORK_OVER.load(Ordering::Relaxed) > 0 && LISTED.load(Ordering::Relaxed) > 0);
    assert!(heard, "a handshake, and a look at the interfaces");
    assert_eq!(WORK_OVER.load(Ordering::Relaxed), 1, "once, and not after each turn");
}

#[test]
fn a_driver_refuses_a_configuration_that_contradicts_itself_unless_told_not_to() {
    let _alone = alone();
    let authority = Authority::new();
    let start = |options: Options| {
        let mut config = Config::new(authority.identity(0), authority.trust());
        config.lighthouse.hosts = vec![OVERLAY[1].into()];
        let sockets = UdpSocket::bind("127.0.0.1:0".parse().unwrap(), 1, &SocketOptions::default()).unwrap();
        Driver::start(config, None, sockets, options)
    };
    let Err(Error::Config(invalid)) = start(Options::default()) else { panic!("a lighthouse without an address") };
    assert_eq!(invalid.problems(), [ConfigProblem::LighthouseWithoutAddress(OVERLAY[1].into())]);
    let mut options = Options::default();
    options.check_config = false;
    assert!(start(options).is_ok());
}

#[test]
fn posted_work_is_done_without_waiting_and_events_are_taken_once() {
    let _alone = alone();
    let (mut driver, _) = loopback_node(&Authority::new(), 0, None, Options::default());
    assert!(driver.take_events().is_some());
    assert!(driver.take_events().is_none());
    let handle = driver.handle();
    let (sender, answer) = channel();
    // Also from within such work, where waiting for an answer would never end.
    let again = handle.clone();
    let posted = handle.post(move |_, _| {
        let from_here = again.post(move |node, _| sender.send(node.table_sizes()).unwrap());
        assert!(from_here);
    });
    assert!(posted);
    assert_eq!(answer.recv_timeout(Duration::from_secs(5)).unwrap().tunnels, 0);
    drop(driver);
    assert!(!handle.post(|_, _| ()), "the driver has ended");
}
