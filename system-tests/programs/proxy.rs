//! `nebula-proxy` as a user without rights, beside our daemon, which is the lighthouse, and Go Nebula 1.11.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::world::peers::{go, ours};
use crate::world::{World, enter};

const SOON: Duration = Duration::from_secs(15);
/// The user `nobody`.
pub(crate) const NOBODY: u32 = 65_534;
const HOSTS: [&str; 3] = ["d", "g", "p"];

/// `d`: our daemon and lighthouse at 10.77.0.1, `g`: Go at 10.77.0.2, `p`: the proxy at 10.77.0.3. `p` and `g` know
/// only the lighthouse.
pub(crate) fn network() -> World {
    let mut world = World::new();
    let underlay = HOSTS.map(|name| world.host(name));
    world.certify(&["ca", "-name", "proxy"]);
    let dir = world.dir().display().to_string();
    for (at, name) in HOSTS.iter().enumerate() {
        let network = format!("10.77.0.{}/24", at + 1);
        world.certify(&["sign", "-name", name, "-networks", &network, "-groups", "proxy"]);
        let is_lighthouse = *name == "d";
        let (known, lighthouse) = if is_lighthouse {
            (String::new(), "am_lighthouse: true, serve_dns: true, dns: {host: 0.0.0.0, port: 53}".to_owned())
        } else {
            (format!("'10.77.0.1': ['{}:4242']", underlay[0]), "interval: 5, hosts: ['10.77.0.1']".to_owned())
        };
        let config = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{name}.crt, key: {dir}/{name}.key}}
static_host_map: {{{known}}}
lighthouse: {{{lighthouse}}}
listen: {{host: 0.0.0.0, port: 4242}}
tun: {{dev: neb0}}
firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: any, group: proxy}}]
"
        );
        world.write(&format!("{name}.yml"), &config);
    }
    std::fs::set_permissions(world.dir(), PermissionsExt::from_mode(0o755)).unwrap();
    for file in ["ca.crt", "p.crt", "p.key", "p.yml"] {
        chown(world.dir().join(file), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let config = |name: &str| world.dir().join(format!("{name}.yml")).display().to_string();
    let [of_d, of_g] = [config("d"), config("g")];
    world.start("d", &ours(), &["-config", &of_d]);
    world.start("g", &go("nebula", "sid"), &["-config", &of_g]);
    world.ping("g", "10.77.0.1", SOON);
    world
}

fn start_proxy(world: &mut World, flags: &[&str]) {
    let program = ours().with_file_name("nebula-proxy").display().to_string();
    let config = world.dir().join("p.yml").display().to_string();
    let user = NOBODY.to_string();
    let unprivileged =
        ["--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs", &program, "-config", &config];
    world.start("p", Path::new("setpriv"), &[&unprivileged, flags].concat());
    let until = Instant::now() + SOON;
    let wanted = flags.len() / 2;
    while world.log("p").lines().filter(|line| line.contains("listening")).count() < wanted {
        assert!(Instant::now() < until, "{}", world.all_logs());
        thread::sleep(Duration::from_millis(20));
    }
}

/// What curl gets, or its exit code.
pub(crate) fn curl(world: &World, host: &str, arguments: &[&str]) -> Result<String, i32> {
    let output = world.exec(host, &[&["curl", "-sS", "--max-time", "20"], arguments].concat());
    match output.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        code => Err(code.unwrap_or(-1)),
    }
}

/// Starts a web server on the overlay that has the name of its host.
pub(crate) fn serve_name(world: &mut World, host: &str, address: &str) {
    let folder = world.dir().join(format!("www-{host}"));
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("who"), host).unwrap();
    let folder = folder.display().to_string();
    let arguments = ["-m", "http.server", "8000", "--bind", address, "--directory", &folder];
    world.start_in(&format!("{host}-web"), host, Path::new("python3"), &arguments);
    let until = Instant::now() + SOON;
    while curl(world, host, &[&format!("http://{address}:8000/who")]) != Ok(host.to_owned()) {
        assert!(Instant::now() < until, "{}", world.all_logs());
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs root, network namespaces, curl and the Go peers in target/peers"]
fn a_user_without_rights_reaches_daemons_of_both_kinds_and_is_reached() {
    let mut world = network();
    for (host, address) in [("d", "10.77.0.1"), ("g", "10.77.0.2")] {
        serve_name(&mut world, host, address);
    }
    start_proxy(
        &mut world,
        &[
            "-socks",
            "1080",
            "-http",
            "8118",
            "-forward",
            "8000=10.77.0.2:8000",
            "-forward",
            "udp:5300=10.77.0.1:53",
            "-serve",
            "9000=9001,proxy-v2",
        ],
    );
    let status = std::fs::read_to_string(format!("/proc/{}/status", world.pid("p"))).unwrap();
    assert!(status.contains("CapEff:\t0000000000000000") && status.contains("Uid:\t65534"), "{status}");
    let until = Instant::now() + SOON;
    while curl(&world, "p", &["--socks5-hostname", "127.0.0.1:1080", "http://10.77.0.1:8000/who"]) != Ok("d".to_owned())
    {
        assert!(Instant::now() < until, "{}", world.all_logs());
    }
    for (arguments, expected) in [
        // By the DNS of the lighthouse: there is no tunnel to this peer yet.
        (&["--socks5-hostname", "127.0.0.1:1080", "http://g:8000/who"][..], Ok("g")),
        (&["--proxytunnel", "--proxy", "http://127.0.0.1:8118", "http://10.77.0.2:8000/who"], Ok("g")),
        (&["--proxytunnel", "--proxy", "http://127.0.0.1:8118", "http://d:8000/who"], Ok("d")),
        (&["http://127.0.0.1:8000/who"], Ok("g")),
        // The lighthouse itself is reachable there, and not by way of the proxy (CURLE_PROXY, CURLE_RECV_ERROR).
        (&["--socks5-hostname", "127.0.0.1:1080", "http://192.0.2.1:8000/who"], Err(97)),
        (&["--proxytunnel", "--proxy", "http://127.0.0.1:8118", "http://192.0.2.1:8000/who"], Err(56)),
    ] {
        let got = curl(&world, "p", arguments);
        assert_eq!(got, expected.map(str::to_owned), "{arguments:?}\n{}", world.all_logs());
    }
    assert!(world.log("p").contains("target=192.0.2.1:8000"), "{}", world.log("p"));
    assert_eq!(looked_up(&world), [10, 77, 0, 2]);
    let header = served(&world);
    assert_eq!(header[..16], *b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x3b");
    assert_eq!(header[16..24], [10, 77, 0, 2, 10, 77, 0, 3]);
    assert_eq!(header[28..40], *b"\xe0\x00\x01g\xe1\x00\x05proxy");
    world.stop("p", Signal::SIGTERM);
    assert!(world.log("p").contains("Goodbye"), "{}", world.log("p"));
}

#[test]
#[ignore = "needs root, network namespaces, curl and the Go peers in target/peers"]
fn a_reload_takes_rules_and_certificate_from_the_files_or_changes_nothing() {
    let mut world = network();
    serve_name(&mut world, "d", "10.77.0.1");
    start_proxy(&mut world, &["-socks", "1080"]);
    let asks = |world: &World| {
        let arguments = ["--max-time", "2", "--socks5-hostname", "127.0.0.1:1080", "http://10.77.0.1:8000/who"];
        curl(world, "p", &arguments).is_ok_and(|said| said == "d")
    };
    let wait_until = |world: &World, what: &str, done: &dyn Fn() -> bool| {
        let until = Instant::now() + SOON;
        while !done() {
            assert!(Instant::now() < until, "{what}: no\n{}", world.all_logs());
            thread::sleep(Duration::from_millis(20));
        }
    };
    wait_until(&world, "the first answer", &|| asks(&world));
    let good = std::fs::read_to_string(world.dir().join("p.yml")).unwrap();
    let reload = |text: &str, says: &str| {
        let before = world.log("p").matches(says).count();
        world.write("p.yml", text);
        kill(Pid::from_raw(world.pid("p").cast_signed()), Signal::SIGHUP).unwrap();
        wait_until(&world, says, &|| world.log("p").matches(says).count() > before);
    };

    reload(&good.replace("outbound: [{port: any", "outbound: [{port: 53"), "New firewall has been installed");
    assert!(!asks(&world), "the rules of before\n{}", world.all_logs());
    reload(&good.replace("outbound:", "outbound: {"), "Error occurred while reloading config");
    assert!(!asks(&world), "other rules\n{}", world.all_logs());
    reload(&good, "New firewall has been installed");
    wait_until(&world, "an answer under the rules of before", &|| asks(&world));

    // `d` accepts connections from members of the group only.
    let dir = world.dir().display().to_string();
    let files = [format!("{dir}/p2.crt"), format!("{dir}/p2.key")];
    let network = "10.77.0.3/24";
    world.certify(&["sign", "-name", "p", "-networks", network, "-out-crt", &files[0], "-out-key", &files[1]]);
    for file in &files {
        chown(file, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let renewed = good.replace(&format!("{dir}/p.crt"), &files[0]).replace(&format!("{dir}/p.key"), &files[1]);
    reload(&renewed, "Client certificate(s) refreshed from disk");
    wait_until(&world, "refused without the group", &|| !asks(&world));
    reload(&good, "Client certificate(s) refreshed from disk");
    wait_until(&world, "an answer with the group", &|| asks(&world));
    world.stop("p", Signal::SIGTERM);
}

#[test]
#[ignore = "needs root, network namespaces, tc and the Go peers in target/peers"]
fn a_signal_during_uploads_resets_each_although_the_socket_is_full_of_data() {
    const UPLOADS: usize = 20;
    let mut world = network();
    // What the link cannot take yet waits in the socket on the underlay.
    let shaper = ["tbf", "rate", "10mbit", "burst", "10kb", "limit", "10mb"];
    world.run("p", &[&["tc", "qdisc", "add", "dev", "eth0", "root"], &shaper[..]].concat());
    start_proxy(&mut world, &["-forward", "9100=10.77.0.1:9100"]);
    let namespace = world.namespace_of("d");
    let (ready, listening) = std::sync::mpsc::channel();
    let (told, ends) = std::sync::mpsc::channel();
    let server = thread::spawn(move || {
        enter(&namespace);
        let listener = TcpListener::bind("10.77.0.1:9100").unwrap();
        ready.send(()).unwrap();
        for _ in 0..UPLOADS {
            let (mut stream, told) = (listener.accept().unwrap().0, told.clone());
            stream.set_read_timeout(Some(SOON)).unwrap();
            thread::spawn(move || {
                let end = std::io::copy(&mut stream, &mut std::io::sink());
                told.send((Instant::now(), end.err().map(|error| error.kind()))).unwrap();
            });
        }
    });
    listening.recv_timeout(SOON).unwrap();
    let namespace = world.namespace_of("p");
    let clients = thread::spawn(move || {
        enter(&namespace);
        let upload = |()| {
            let mut stream = TcpStream::connect("127.0.0.1:9100").unwrap();
            thread::spawn(move || while stream.write_all(&[7; 1 << 16]).is_ok() {})
        };
        [(); UPLOADS].map(upload).into_iter().for_each(|client| client.join().unwrap());
    });
    server.join().unwrap();
    // Up to the limit of the socket.
    thread::sleep(Duration::from_secs(3));
    let queue = world.run("p", &["ss", "-uanmH", "sport", "=", ":4242"]);
    let started = Instant::now();
    world.stop("p", Signal::SIGTERM);
    let took = started.elapsed();
    clients.join().unwrap();
    let ends = [(); UPLOADS].map(|()| ends.recv_timeout(2 * SOON).unwrap());
    let last = ends.iter().map(|(at, _)| at.duration_since(started)).max();
    println!("it ended after {took:?}, the last server knew after {last:?}; the socket was {}", queue.trim());
    let resets = ends.iter().filter(|(_, end)| *end == Some(std::io::ErrorKind::ConnectionReset)).count();
    assert_eq!(resets, UPLOADS, "{ends:?}\n{}", world.all_logs());
    assert!(took < Duration::from_secs(1), "{took:?}");
    while !world.log("d").contains("Close tunnel received") {
        assert!(started.elapsed() < SOON, "{}", world.log("d"));
        thread::sleep(Duration::from_millis(20));
    }
}

/// Asks the lighthouse's DNS for `g` through the forwarded port. Returns the address in the answer.
fn looked_up(world: &World) -> [u8; 4] {
    let namespace = world.namespace_of("p");
    let asking = thread::spawn(move || {
        enter(&namespace);
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        let query = b"\x00\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01g\x00\x00\x01\x00\x01";
        socket.send_to(query, "127.0.0.1:5300").unwrap();
        let mut answer = [0; 512];
        let (len, _) = socket.recv_from(&mut answer).unwrap();
        answer[..len].last_chunk::<4>().copied().unwrap()
    });
    asking.join().unwrap()
}

/// Connects from `g` to the served port. Returns the header that the program beside the proxy gets.
fn served(world: &World) -> Vec<u8> {
    let namespace = world.namespace_of("p");
    let (ready, listening) = std::sync::mpsc::channel();
    let program = thread::spawn(move || {
        enter(&namespace);
        let listener = TcpListener::bind("127.0.0.1:9001").unwrap();
        ready.send(()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut fixed = [0; 16];
        stream.read_exact(&mut fixed).unwrap();
        let mut body = vec![0; usize::from(u16::from_be_bytes([fixed[14], fixed[15]]))];
        stream.read_exact(&mut body).unwrap();
        let mut request = [0; 4];
        stream.read_exact(&mut request).unwrap();
        assert_eq!(&request, b"GET ");
        stream.write_all(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello").unwrap();
        [&fixed[..], &body].concat()
    });
    listening.recv_timeout(SOON).unwrap();
    assert_eq!(curl(world, "g", &["http://10.77.0.3:9000/"]), Ok("hello".to_owned()), "{}", world.all_logs());
    program.join().unwrap()
}
