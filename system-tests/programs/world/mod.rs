//! A network of namespaces for one test: hosts on one switch, daemons in them, everything removed on drop.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part of the world")]
#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

pub mod capture;
pub mod chaos;
pub mod clear;
pub mod cluster;
pub mod cost;
pub mod cri_session;
pub mod fake_ca;
pub mod kube;
pub mod load;
pub mod loopback;
pub mod mesh;
pub mod nonces;
pub mod peers;
pub mod pod_traffic;
pub mod speed;
pub mod traffic;
pub mod wire;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Namespaces, processes and files of one test.
pub struct World {
    id: String,
    dir: PathBuf,
    hosts: u8,
    ports: u32,
    daemons: Vec<(String, Child)>,
    namespaces: Vec<String>,
}

static WORLDS: AtomicU32 = AtomicU32::new(0);

impl World {
    /// Creates a switch without hosts. Panics with the reason if the machine cannot create namespaces.
    pub fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// Like [`World::new`], with its files in a folder below `place`.
    pub fn below(place: &Path) -> Self {
        let id = format!("nbt{}-{}", std::process::id(), WORLDS.fetch_add(1, Ordering::Relaxed));
        let dir = place.join(&id);
        std::fs::create_dir_all(&dir).expect("a temporary directory");
        let mut world = Self { id, dir, hosts: 0, ports: 0, daemons: Vec::new(), namespaces: Vec::new() };
        let switch = world.namespace("s");
        run("ip", &["-n", &switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0"]);
        run("ip", &["-n", &switch, "link", "set", "br0", "up"]);
        world
    }

    /// The folder for files of this test.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The full name of the namespace of `host`.
    pub fn namespace_of(&self, host: &str) -> String {
        format!("{}-{host}", self.id)
    }

    /// Adds a namespace with nothing but loopback.
    pub fn namespace(&mut self, name: &str) -> String {
        let full = self.namespace_of(name);
        run("ip", &["netns", "add", &full]);
        self.namespaces.push(full.clone());
        run("ip", &["-n", &full, "link", "set", "lo", "up"]);
        full
    }

    /// Like [`World::namespace`], with users of its own, none of whom is one of the node: as runtimes make it for a
    /// pod with `hostUsers: false`.
    pub fn namespace_with_users(&mut self, name: &str) -> String {
        let full = self.namespace_of(name);
        let mut pod = Command::new("unshare")
            .args(["--user", "--net", "sh", "-c", "echo there; read -r _"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare runs");
        let mut there = [0; 6];
        pod.stdout.as_mut().expect("a pipe").read_exact(&mut there).expect("it is there");
        for map in ["uid_map", "gid_map"] {
            std::fs::write(format!("/proc/{}/{map}", pod.id()), "0 100000 65536").expect("its users");
        }
        run("ip", &["netns", "attach", &full, &pod.id().to_string()]);
        self.namespaces.push(full.clone());
        // It ends with its input.
        drop(pod.stdin.take());
        let _ = pod.wait();
        run("ip", &["-n", &full, "link", "set", "lo", "up"]);
        full
    }

    /// Adds a host on the switch and returns its underlay address (192.0.2.0/24).
    pub fn host(&mut self, name: &str) -> Ipv4Addr {
        let namespace = self.namespace(name);
        self.connect(&namespace)
    }

    /// Like [`World::host`], but the host is the network namespace of the first process.
    pub fn host_of_init(&mut self, name: &str) -> Ipv4Addr {
        let namespace = self.namespace_of(name);
        run("ip", &["netns", "attach", &namespace, "1"]);
        self.namespaces.push(namespace.clone());
        // The kernel may still be removing the switch of the test before, and with it the other end of this device.
        let _ = Command::new("ip").args(["-n", &namespace, "link", "del", "eth0"]).stderr(Stdio::null()).status();
        self.connect(&namespace)
    }

    fn connect(&mut self, namespace: &str) -> Ipv4Addr {
        self.hosts += 1;
        let address = Ipv4Addr::new(192, 0, 2, self.hosts);
        self.attach(namespace, "eth0", &format!("{address}/24"));
        address
    }

    /// Connects `namespace` to the switch through a device with an address.
    pub fn attach(&mut self, namespace: &str, device: &str, address: &str) {
        let switch = self.namespace_of("s");
        self.ports += 1;
        let port = format!("p{}", self.ports);
        run("ip", &["-n", &switch, "link", "add", &port, "type", "veth", "peer", "name", device, "netns", namespace]);
        run("ip", &["-n", &switch, "link", "set", &port, "master", "br0", "up"]);
        run("ip", &["-n", namespace, "addr", "add", address, "dev", device]);
        run("ip", &["-n", namespace, "link", "set", device, "up"]);
    }

    /// Starts a daemon in the namespace of `host`; its output goes to `<dir>/<host>.log`.
    pub fn start(&mut self, host: &str, program: &Path, arguments: &[&str]) {
        self.start_in(host, host, program, arguments);
    }

    /// Like [`World::start`], for another daemon called `name` on `host`.
    pub fn start_in(&mut self, name: &str, host: &str, program: &Path, arguments: &[&str]) {
        let log = File::options().create(true).append(true).open(self.log_path(name)).expect("a log file");
        let child = Command::new("ip")
            .args(["netns", "exec", &self.namespace_of(host)])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle of the log"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", program.display()));
        self.daemons.push((name.to_owned(), child));
    }

    /// Stops the daemon of `host` with `signal` and waits for it; kills it after 5 s.
    pub fn stop(&mut self, host: &str, signal: Signal) {
        let Some(at) = self.daemons.iter().position(|(name, _)| name == host) else { return };
        let (_, mut child) = self.daemons.remove(at);
        end(&mut child, signal);
    }

    /// Whether the daemon of `host` was started and not stopped.
    pub fn has_daemon(&self, host: &str) -> bool {
        self.daemons.iter().any(|(name, _)| name == host)
    }

    /// Waits for the daemon of `host` to exit; returns its exit code, or `None` after a signal or if it is still
    /// running.
    pub fn ended(&mut self, host: &str, within: Duration) -> Option<i32> {
        let (_, child) = self.daemons.iter_mut().find(|(name, _)| name == host)?;
        let until = Instant::now() + within;
        while Instant::now() < until {
            if let Ok(Some(status)) = child.try_wait() {
                return status.code();
            }
            thread::sleep(Duration::from_millis(20));
        }
        None
    }

    /// Process id of the daemon of `host` (`ip netns exec` replaces itself with the program).
    pub fn pid(&self, host: &str) -> u32 {
        self.daemons.iter().find(|(name, _)| name == host).map(|(_, child)| child.id()).expect("a daemon of that host")
    }

    fn log_path(&self, host: &str) -> PathBuf {
        self.dir.join(format!("{host}.log"))
    }

    /// The output of the daemon of `host`.
    pub fn log(&self, host: &str) -> String {
        std::fs::read_to_string(self.log_path(host)).unwrap_or_default()
    }

    /// Writes a file of this test and returns its path.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.join(name);
        std::fs::write(&path, text).expect("write a file of the test");
        path
    }

    /// Runs a command in the namespace of `host`.
    pub fn exec(&self, host: &str, command: &[&str]) -> Output {
        Command::new("ip")
            .args(["netns", "exec", &self.namespace_of(host)])
            .args(command)
            .output()
            .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"))
    }

    /// Runs a command in the namespace of `host` that must succeed; returns its standard output.
    pub fn run(&self, host: &str, command: &[&str]) -> String {
        let output = self.exec(host, command);
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The underlay address of `host`, which [`World::host`] gave it.
    pub fn underlay(&self, host: &str) -> String {
        let shown = self.run(host, &["ip", "-4", "-o", "addr", "show", "dev", "eth0"]);
        let address = shown.split_whitespace().nth(3).and_then(|network| network.split('/').next());
        address.expect("an address").to_owned()
    }

    /// Pings until one reply arrives, for at most `within`. Panics with all logs if none does.
    pub fn ping(&self, host: &str, target: &str, within: Duration) {
        let until = Instant::now() + within;
        while Instant::now() < until {
            if self.exec(host, &["ping", "-n", "-q", "-c", "1", "-W", "1", target]).status.success() {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("no ping reply from {target} to {host} within {within:?}\n{}", self.all_logs());
    }

    /// Sends `count` pings and returns how many were answered.
    pub fn pings(&self, host: &str, target: &str, count: u32, interval: &str) -> u32 {
        let output = self.exec(host, &["ping", "-n", "-c", &count.to_string(), "-i", interval, "-W", "1", target]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines()
            .find_map(|line| line.split(", ").nth(1)?.split(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("ping said nothing countable: {text}"))
    }

    /// Sends `bytes` of a known stream over TCP between two hosts and compares every byte.
    pub fn transfer(&self, from: &str, to: &str, to_address: IpAddr, bytes: usize) {
        let server = self.namespace_of(to);
        let client = self.namespace_of(from);
        let (ready, listening) = std::sync::mpsc::channel();
        let receiver = thread::spawn(move || {
            enter(&server);
            let listener = TcpListener::bind(SocketAddr::new(to_address, 0)).expect("listen on the overlay address");
            ready.send(listener.local_addr().expect("own address")).expect("the sender waits");
            let (mut stream, _) = listener.accept().expect("a connection");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
            let mut expected = Pattern::new(bytes as u64);
            let (mut chunk, mut want) = (vec![0; 1 << 16], vec![0; 1 << 16]);
            let mut total = 0;
            loop {
                let n = stream.read(&mut chunk).expect("the stream goes on");
                if n == 0 {
                    break;
                }
                expected.fill(&mut want[..n]);
                assert!(chunk[..n] == want[..n], "byte stream differs within {total}..{}", total + n);
                total += n;
            }
            stream.write_all(&(total as u64).to_be_bytes()).expect("answer the count");
            total
        });
        let address = listening.recv_timeout(Duration::from_secs(5)).expect("the receiver listens");
        let sender = thread::spawn(move || {
            enter(&client);
            let mut stream =
                TcpStream::connect_timeout(&address, Duration::from_secs(10)).expect("connect over the overlay");
            stream.set_write_timeout(Some(Duration::from_secs(20))).expect("a timeout");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
            let mut pattern = Pattern::new(bytes as u64);
            let mut chunk = vec![0; 1 << 16];
            let mut left = bytes;
            while left > 0 {
                let n = left.min(chunk.len());
                pattern.fill(&mut chunk[..n]);
                stream.write_all(&chunk[..n]).expect("the stream goes on");
                left -= n;
            }
            stream.shutdown(std::net::Shutdown::Write).expect("end of stream");
            let mut count = [0; 8];
            stream.read_exact(&mut count).expect("the receiver's count");
            u64::from_be_bytes(count)
        });
        // Not the receiver first: if the sender does not get through, that one waits for ever.
        let both = sender.join().and_then(|sent| Ok((sent, receiver.join()?)));
        let Ok((sent, received)) = both else {
            panic!("transfer {from} -> {to} failed\n{}", self.all_logs());
        };
        assert_eq!((sent as usize, received), (bytes, bytes));
    }

    /// The last part of every daemon's log.
    pub fn all_logs(&self) -> String {
        let mut text = String::new();
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            if entry.path().extension().is_none_or(|extension| extension != "log") {
                continue;
            }
            let log = std::fs::read_to_string(entry.path()).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(25).collect();
            text += &format!("--- {}\n", entry.file_name().display());
            for line in tail.iter().rev() {
                text += &format!("{line}\n");
            }
        }
        text
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for (_, mut child) in self.daemons.drain(..) {
            end(&mut child, Signal::SIGTERM);
        }
        for namespace in &self.namespaces {
            // The namespace may already be gone.
            let _ = Command::new("ip").args(["netns", "del", namespace]).stderr(Stdio::null()).status();
        }
        if thread::panicking() {
            eprintln!("files of the failed test: {}", self.dir.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

/// Runs a command that must succeed; returns its standard output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(
        output.status.success(),
        "{program} {} failed: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Moves the calling thread into a named namespace.
pub fn enter(namespace: &str) {
    enter_network(Path::new(&format!("/run/netns/{namespace}")));
}

/// Moves the calling thread into the network namespace of a file.
pub fn enter_network(network: &Path) {
    let file = File::open(network).unwrap_or_else(|error| panic!("{}: {error}", network.display()));
    setns(file, CloneFlags::CLONE_NEWNET).expect("enter the namespace (needs root)");
}

fn end(child: &mut Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().cast_signed());
    let _ = kill(pid, signal);
    for _ in 0..250 {
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// A byte stream that both ends can generate: xorshift words.
struct Pattern {
    state: u64,
    word: [u8; 8],
    used: usize,
}

impl Pattern {
    fn new(seed: u64) -> Self {
        Self { state: seed | 1, word: [0; 8], used: 8 }
    }

    fn fill(&mut self, buffer: &mut [u8]) {
        for byte in buffer {
            if self.used == 8 {
                self.state ^= self.state << 13;
                self.state ^= self.state >> 7;
                self.state ^= self.state << 17;
                self.word = self.state.to_le_bytes();
                self.used = 0;
            }
            *byte = self.word[self.used];
            self.used += 1;
        }
    }
}

/// What becomes of a process on this machine that asks for this place in the order in which the kernel ends processes;
/// containers without CAP_SYS_RESOURCE get none of the better ones.
pub fn oom_score(wanted: i32) -> String {
    let script = format!("echo {wanted} 2>/dev/null >/proc/self/oom_score_adj; cat /proc/self/oom_score_adj");
    let output = Command::new("sh").args(["-c", &script]).output().expect("sh runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
