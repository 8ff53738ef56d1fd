//! What outlives `nebula-proxy` under the systemd of its user: the UDP port, the listeners and what waits in both. The
//! descriptors of strangers are in `proxy/tests/loopback/restart.rs`.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use super::user_unit::{SOON, UNIT, User};
use crate::proxy::{network, serve_name};
use crate::world::{World, enter};

/// Inodes of the sockets in a namespace that `ss` finds with these words.
fn inodes(world: &World, words: &[&str]) -> Vec<String> {
    let shown = world.run("p", &[&["ss", "-anHe"], words].concat());
    let inode = |line: &str| line.split_whitespace().find(|word| word.starts_with("ino:")).map(str::to_owned);
    let mut found: Vec<_> = shown.lines().filter_map(inode).collect();
    found.sort();
    found
}

fn udp(world: &World, port: u16) -> Vec<String> {
    inodes(world, &["-u", "sport", "=", &format!(":{port}")])
}

fn listeners(world: &World) -> Vec<String> {
    inodes(world, &["-t", "state", "listening", "(", "sport", "=", ":1080", "or", "sport", "=", ":8118", ")"])
}

/// Bytes that wait in the UDP socket of the proxy.
fn waiting(world: &World) -> usize {
    let shown = world.run("p", &["ss", "-uanH", "sport", "=", ":4242"]);
    shown.split_whitespace().nth(1).and_then(|bytes| bytes.parse().ok()).expect("a length")
}

/// A request through the proxy.
struct Probe {
    begun: Instant,
    ended: Instant,
    result: Result<(), ErrorKind>,
}

/// One request after the other.
struct Probes {
    ends: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Probe>>>,
    thread: Option<JoinHandle<()>>,
}

impl Probes {
    fn start(world: &World, peer: u8) -> Self {
        let (ends, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (namespace, ended, into) = (world.namespace_of("p"), Arc::clone(&ends), Arc::clone(&seen));
        let thread = spawn(move || {
            enter(&namespace);
            while !ended.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let result = ask(peer).map_err(|error| error.kind());
                into.lock().expect("nobody panics").push(Probe { begun, ended: Instant::now(), result });
                sleep(Duration::from_millis(10));
            }
        });
        Self { ends, seen, thread: Some(thread) }
    }

    /// Answers since `after`.
    fn answers(&self, after: Instant) -> usize {
        let seen = self.seen.lock().expect("nobody panics");
        seen.iter().filter(|probe| probe.begun > after && probe.result.is_ok()).count()
    }

    /// Longest time without an answer since `after`, and how those requests ended that had none.
    fn silence(&self, after: Instant) -> (Duration, Vec<ErrorKind>) {
        let seen = self.seen.lock().expect("nobody panics");
        let answered: Vec<_> = seen.iter().filter(|probe| probe.result.is_ok()).map(|probe| probe.ended).collect();
        let gaps = answered.windows(2).filter(|pair| pair[1] > after).map(|pair| pair[1] - pair[0]);
        let failed = seen.iter().filter(|probe| probe.ended > after).filter_map(|probe| probe.result.err());
        (gaps.max().unwrap_or_default(), failed.collect())
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Asks a web server behind SOCKS5 for its name.
fn ask(peer: u8) -> std::io::Result<()> {
    let mut stream = TcpStream::connect("127.0.0.1:1080")?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(&[5, 1, 0])?;
    stream.read_exact(&mut [0; 2])?;
    stream.write_all(&[5, 1, 0, 1, 10, 77, 0, peer, 0x1f, 0x40])?;
    let mut reply = [0; 10];
    stream.read_exact(&mut reply)?;
    if reply[1] != 0 {
        return Err(ErrorKind::HostUnreachable.into());
    }
    stream.write_all(b"GET /who HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer.contains(" 200 ") { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
}

#[test]
#[ignore = "needs root, systemd, network namespaces and the Go peers in target/peers"]
fn a_restart_and_a_kill_keep_port_and_listeners_and_peers_of_both_kinds_are_reached_again() {
    let mut world = network();
    serve_name(&mut world, "d", "10.77.0.1");
    serve_name(&mut world, "g", "10.77.0.2");
    let user = User::with_unit(&world, "");
    let good = std::fs::read_to_string(world.dir().join("p.yml")).expect("a configuration");
    let configure = |text: &str| user.write(".config/nebula/config.yml", text);
    let show = |property: &str| user.must(&["show", "-P", property, UNIT]);
    configure(&good);
    user.must(&["start", UNIT]);
    let (port, ports) = (udp(&world, 4242), listeners(&world));
    assert_eq!((port.len(), ports.len(), show("NFileDescriptorStore").as_str()), (1, 2, "3"), "{}", user.log());
    let probes = [1, 2].map(|peer| Probes::start(&world, peer));
    let begun = Instant::now();
    user.until("answers of both peers", || probes.iter().all(|probes| probes.answers(begun) > 20));

    for (what, bound) in [("systemctl restart", 1500), ("kill -9", 3000), ("systemctl restart", 1500)] {
        let (before, after) = (show("MainPID"), Instant::now());
        if what == "kill -9" {
            user.must(&["kill", "--signal", "KILL", UNIT]);
            // Systemd waits for a second. What is sent meanwhile waits in the socket.
            let (from, to) = (world.namespace_of("d"), format!("{}:4242", world.underlay("p")));
            let sending = spawn(move || {
                enter(&from);
                UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.send_to(&[0; 100], to)).expect("it is sent");
            });
            sending.join().expect("it is sent");
            user.until("a datagram waits", || waiting(&world) > 0);
            assert!(["0", &before].contains(&show("MainPID").as_str()), "nobody runs yet");
            let is_other = || !["0", &before].contains(&show("MainPID").as_str());
            user.until("another process", || show("ActiveState") == "active" && is_other());
        } else {
            user.must(&["restart", UNIT]);
        }
        let started = Instant::now();
        assert_ne!(show("MainPID"), before);
        user.until("answers again", || probes.iter().all(|probes| probes.answers(started) > 20));
        for (peer, probes) in ["ours", "Go"].iter().zip(&probes) {
            let (silence, failed) = probes.silence(after);
            println!("{what}, {peer}: {silence:?} without an answer; without one at all: {failed:?}");
            assert!(silence < Duration::from_millis(bound), "{what} {peer}: {silence:?}\n{}", user.log());
            assert!(!failed.contains(&ErrorKind::ConnectionRefused), "{what}: {failed:?}");
        }
        user.until("the socket is read", || waiting(&world) == 0);
        assert_eq!((udp(&world, 4242), listeners(&world)), (port.clone(), ports.clone()), "{what}\n{}", user.log());
        assert_eq!(show("NFileDescriptorStore"), "3", "{what}");
    }
    drop(probes);
    assert_eq!(user.log().matches("The UDP port of the last run goes on").count(), 3, "{}", user.log());
    assert!(!user.log().contains("does not fit"), "{}", user.log());

    // A refused configuration keeps them, and another port takes the place of the first one.
    configure(&good.replace("port: 4242", "port: 424200"));
    assert!(!user.call(&["restart", UNIT]).status.success());
    assert_eq!((udp(&world, 4242), listeners(&world)), (port, ports.clone()));
    configure(&good.replace("port: 4242", "port: 4243"));
    user.until("it is corrected", || show("ActiveState") == "active");
    assert!(user.log().contains("bound to 0.0.0.0:4242, and 0.0.0.0:4243 is wanted"), "{}", user.log());
    assert_eq!((udp(&world, 4242).len(), udp(&world, 4243).len(), listeners(&world)), (0, 1, ports));
    user.until("three descriptors", || show("NFileDescriptorStore") == "3");

    user.must(&["stop", UNIT]);
    assert_eq!(show("Result"), "success", "{}", user.log());
    let end = Instant::now() + SOON;
    while !(udp(&world, 4243).is_empty() && listeners(&world).is_empty()) {
        assert!(Instant::now() < end, "a stop frees the ports");
        sleep(Duration::from_millis(10));
    }
}
