//! A proxy that is killed and started again by a stand-in for systemd, which holds its descriptors.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use nebula_linux::descriptors::receive;
use nix::libc;
use nix::sys::signal::Signal;

use crate::world::{PATIENCE, PROGRAM, Proxy, World, connect, exchange, serve_tcp, socks_request};
use crate::{FAR, pair};

/// What systemd does for a unit with a descriptor store.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    stored: Vec<(String, OwnedFd)>,
    /// Names that were to be taken out.
    removed: Vec<String>,
}

impl Manager {
    fn new(world: &World) -> Self {
        let path = world.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        Self { socket, path, stored: Vec::new(), removed: Vec::new() }
    }

    /// Starts the proxy of host 1 with all that is stored.
    fn start(&mut self, world: &World, flags: &[&str]) -> Proxy {
        let mut command = Command::new("sh");
        // The variable has the number of the process that is to take the descriptors.
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\"", PROGRAM]);
        command.env("NOTIFY_SOCKET", &self.path).env("INVOCATION_ID", "0");
        if !self.stored.is_empty() {
            let names: Vec<_> = self.stored.iter().map(|(name, _)| name.as_str()).collect();
            command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        }
        pass(&mut command, self.stored.iter().map(|(_, file)| file.as_raw_fd()).collect());
        // It may wait until a port is closed here.
        std::thread::scope(|scope| {
            let hearing = scope.spawn(|| self.hear_until_ready());
            let proxy = world.start_by(command, 1, flags);
            hearing.join().unwrap();
            proxy
        })
    }

    fn hear_until_ready(&mut self) {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut text = [0; 4096];
            let Ok((length, files)) = receive(&self.socket, &mut text) else {
                assert!(Instant::now() < until, "it is not ready");
                std::thread::sleep(std::time::Duration::from_millis(5));
                continue;
            };
            let text = String::from_utf8_lossy(&text[..length]).into_owned();
            let fields: BTreeMap<_, _> = text.lines().filter_map(|line| line.split_once('=')).collect();
            let name = fields.get("FDNAME").copied().unwrap_or_default().to_owned();
            if fields.contains_key("FDSTORE") {
                self.stored.extend(files.into_iter().map(|file| (name.clone(), file)));
            } else if fields.contains_key("FDSTOREREMOVE") {
                self.stored.retain(|(stored, _)| *stored != name);
                self.removed.push(name);
            } else if fields.contains_key("READY") {
                return;
            }
        }
    }

    fn names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.stored.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names
    }
}

/// Gives files to a program that is about to start, from number 3 on.
#[allow(unsafe_code, reason = "std has no way to give more than three files")]
fn pass(command: &mut Command, files: Vec<RawFd>) {
    let pass = move || {
        // Out of the way first: their numbers may be those that are wanted.
        let mut above = [-1; 32];
        for (above, file) in above.iter_mut().zip(&files) {
            // SAFETY: a call of the kernel that touches no memory.
            *above = unsafe { libc::fcntl(*file, libc::F_DUPFD_CLOEXEC, 200) };
        }
        for (wanted, above) in (3..).zip(above).take(files.len()) {
            // SAFETY: as above.
            if unsafe { libc::dup2(above, wanted) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes two kinds of system calls, and allocates nothing.
    unsafe { command.pre_exec(pass) };
}

/// An address that was free a moment ago.
fn free(bind: impl Fn(&str) -> std::io::Result<SocketAddr>) -> SocketAddr {
    bind("127.0.0.1:0").unwrap()
}

fn addresses() -> [SocketAddr; 2] {
    [
        free(|any| TcpListener::bind(any).and_then(|listener| listener.local_addr())),
        free(|any| UdpSocket::bind(any).and_then(|socket| socket.local_addr())),
    ]
}

#[test]
fn a_kill_leaves_the_ports_and_whoever_comes_meanwhile_is_served_by_the_next_proxy() {
    let (world, first, far) = pair(&["-socks", "0"]);
    drop(first);
    let [socks, forward] = addresses();
    let flags = ["-socks", &socks.to_string(), "-forward", &format!("udp:{forward}=10.42.0.2:7")];
    let mut manager = Manager::new(&world);
    let mut near = manager.start(&world, &flags);
    assert_eq!(manager.names(), ["listener", "udp", "udp-forward"]);
    let open = |mut stream: TcpStream| {
        assert_eq!(exchange(&mut stream, &socks_request(1, FAR, 7), 10)[..2], [5, 0]);
        assert_eq!(exchange(&mut stream, b"hello", 5), b"hello");
        stream
    };
    let mut stream = connect(socks);
    exchange(&mut stream, &[5, 1, 0], 2);
    let mut stream = open(stream);
    let program = UdpSocket::bind("127.0.0.1:0").unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();

    let killed = Instant::now();
    near.end_by(Signal::SIGKILL);
    // Nobody runs now.
    let mut waiting = connect(socks);
    waiting.write_all(&[5, 1, 0]).unwrap();
    program.send_to(b"waits", forward).unwrap();
    assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)), "a stream ends with its proxy");
    let mut near = manager.start(&world, &flags);
    near.says(&["The UDP port of the last run goes on"]);
    let mut choice = [0; 2];
    waiting.read_exact(&mut choice).unwrap();
    assert_eq!(choice, [5, 0]);
    open(waiting);
    let mut answer = [0; 20];
    let length = program.recv(&mut answer).unwrap();
    assert_eq!(&answer[..length], b"re: waits");
    println!("silence of {:?}", killed.elapsed());
    assert_eq!((manager.names(), manager.removed.len()), (vec!["listener", "udp", "udp-forward"], 0));

    // Other flags: what they do not name is taken out, and the rest stays.
    near.end_by(Signal::SIGKILL);
    let [other, _] = addresses();
    let mut near = manager.start(&world, &["-socks", &other.to_string(), "-http", &socks.to_string()]);
    near.says(&["does not fit", "udp-forward", &forward.to_string()]);
    assert_eq!(manager.names(), ["listener", "listener", "udp"]);
    assert_eq!(manager.removed, ["udp-forward"]);
    connect(other);
    UdpSocket::bind(forward).unwrap();
    drop(far);
}

#[test]
fn descriptors_of_strangers_are_closed_and_named_and_never_used() {
    let (world, first, _far) = pair(&["-socks", "0"]);
    drop(first);
    let [socks, forward] = addresses();
    let flags = ["-socks", &socks.to_string(), "-forward", &format!("udp:{forward}=10.42.0.2:7")];
    let text = std::fs::read_to_string(world.path().join("host-1.yml")).unwrap();
    let port: u16 = text.split_once("port: ").and_then(|(_, rest)| rest.split_once('}')).unwrap().0.parse().unwrap();
    let underlay = SocketAddr::from(([127, 0, 0, 1], port));
    let mut manager = Manager::new(&world);
    let (file, tcp) = (|| std::fs::File::open("/dev/null").unwrap(), || TcpListener::bind(underlay).unwrap());
    let udp = |address| UdpSocket::bind(address).unwrap();
    let other = SocketAddr::from(([127, 0, 0, 1], 0));
    let of_udp: [&dyn Fn() -> Vec<OwnedFd>; 4] = [
        &|| vec![file().into()],
        &|| vec![tcp().into()],
        &|| vec![udp(other).into()],
        // One too many.
        &|| vec![udp(underlay).into(), udp(other).into()],
    ];
    for (round, files) in of_udp.iter().enumerate() {
        let (unknown, watch) = UnixStream::pair().unwrap();
        let (listener, watch_listener) = UnixStream::pair().unwrap();
        manager.stored = files().into_iter().map(|file| ("udp".to_owned(), file)).collect();
        manager.stored.push(("identity".to_owned(), unknown.into()));
        manager.stored.push(("listener".to_owned(), listener.into()));
        manager.stored.push(("listener".to_owned(), UdpSocket::bind(socks).unwrap().into()));
        manager.stored.push(("udp-forward".to_owned(), TcpListener::bind(forward).unwrap().into()));
        manager.removed.clear();
        let mut near = manager.start(&world, &flags);
        near.says(&["level=WARN", "Closed a descriptor of the service manager", "name=identity"]);
        for name in ["udp", "listener", "udp-forward"] {
            near.says(&["does not fit", &format!("what={name} ")]);
        }
        manager.removed.sort();
        assert_eq!(manager.removed, ["identity", "listener", "udp", "udp-forward"], "round {round}");
        assert_eq!(manager.names(), ["listener", "udp", "udp-forward"], "round {round}");
        for mut watch in [watch, watch_listener] {
            watch.set_read_timeout(Some(PATIENCE)).unwrap();
            assert_eq!(watch.read(&mut [0]).unwrap(), 0, "nobody has it open");
        }
        let mut stream = connect(socks);
        exchange(&mut stream, &[5, 1, 0], 2);
        assert_eq!(exchange(&mut stream, &socks_request(1, FAR, 7), 10)[..2], [5, 0], "round {round}");
        near.end_by(Signal::SIGKILL);
        manager.stored.clear();
    }
}

#[test]
fn a_peer_that_sends_to_a_connection_of_a_killed_proxy_is_reset_by_the_next_one() {
    static END: std::sync::Mutex<Option<std::io::ErrorKind>> = std::sync::Mutex::new(None);
    let world = World::new();
    let server = serve_tcp(|mut stream| {
        while let Ok(()) = stream.write_all(b"tick") {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let end = stream.write_all(b"tick").and_then(|()| stream.read(&mut [0]).map(drop));
        *END.lock().unwrap() = end.err().map(|error| error.kind());
    });
    let _far = world.start(2, &["-serve", &format!("7={server}")]);
    let mut manager = Manager::new(&world);
    let flags = ["-forward", "0=10.42.0.2:7"];
    let mut near = manager.start(&world, &flags);
    connect(near.address("forward")).read_exact(&mut [0; 4]).unwrap();
    let mut stream = connect(near.address("forward"));
    stream.read_exact(&mut [0; 4]).unwrap();
    near.end_by(Signal::SIGKILL);
    *END.lock().unwrap() = None;
    let _near = manager.start(&world, &flags);
    let started = Instant::now();
    while END.lock().unwrap().is_none() {
        assert!(started.elapsed() < PATIENCE, "the server is not told");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    println!("the server knew {:?} after the start", started.elapsed());
}
