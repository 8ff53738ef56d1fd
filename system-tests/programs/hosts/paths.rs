//! What a simulator cannot prove: real NATs, addresses that change under a TCP stream, daemons that are killed, and
//! lighthouses that restart. Ours with Go Nebula of three releases.
//!
//! Hosts: `l` is the lighthouse, `a` and `b` find each other through it.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use world::peers::{go, ours};
use world::{World, enter};

const SOON: Duration = Duration::from_secs(20);
/// A restarted daemon is reachable again within this time: its peer learns of the restart by recv_error, or it
/// initiates itself.
const AFTER_RESTART: Duration = Duration::from_secs(10);

const NAMES: [&str; 3] = ["l", "a", "b"];
const L: &str = "10.77.0.1";
const A: &str = "10.77.0.2";
const B: &str = "10.77.0.3";

#[derive(Clone, Copy)]
enum Maker {
    Ours,
    Go(&'static str),
}

use Maker::{Go, Ours};

struct Site {
    world: World,
    lighthouse: Ipv4Addr,
}

impl Site {
    /// All hosts on one switch.
    fn flat() -> (Self, [Ipv4Addr; 2]) {
        let mut world = World::new();
        let lighthouse = world.host("l");
        let ends = [world.host("a"), world.host("b")];
        (Self::certified(world, lighthouse), ends)
    }

    /// `a` and `b` are each behind a router that lets no new connections in.
    fn behind_nats() -> Self {
        let mut world = World::new();
        let lighthouse = world.host("l");
        for (end, router, lan) in [("a", "ra", 1), ("b", "rb", 2)] {
            world.host(router);
            let (inside, outside) = (world.namespace(end), world.namespace_of(router));
            let pair =
                ["-n", &outside, "link", "add", "lan0", "type", "veth", "peer", "name", "eth0", "netns", &inside];
            world::run("ip", &pair);
            for (namespace, device, number) in [(&outside, "lan0", 1), (&inside, "eth0", 2)] {
                world::run("ip", &["-n", namespace, "addr", "add", &format!("10.9.{lan}.{number}/24"), "dev", device]);
                world::run("ip", &["-n", namespace, "link", "set", device, "up"]);
            }
            world::run("ip", &["-n", &inside, "route", "add", "default", "via", &format!("10.9.{lan}.1")]);
            let rules = world.write(&format!("{router}.nft"), NAT);
            must(&world, router, &["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
            must(&world, router, &["nft", "-f", &rules.display().to_string()]);
        }
        Self::certified(world, lighthouse)
    }

    fn certified(world: World, lighthouse: Ipv4Addr) -> Self {
        world.certify(&["ca", "-name", "paths", "-version", "1"]);
        for (at, name) in NAMES.iter().enumerate() {
            world.certify(&["sign", "-name", name, "-networks", &format!("10.77.0.{}/24", at + 1)]);
        }
        Self { world, lighthouse }
    }

    /// Starts all three; returns once both ends reach the lighthouse.
    fn start_all(&mut self, makers: [Maker; 3]) {
        for (name, maker) in NAMES.iter().zip(makers) {
            self.start(name, maker);
        }
        for end in ["a", "b"] {
            self.world.ping(end, L, SOON);
        }
    }

    fn start(&mut self, host: &str, maker: Maker) {
        let dir = self.world.dir().display().to_string();
        let (known, hosts) = if host == "l" {
            (String::new(), "[]")
        } else {
            (format!("\"{L}\": [\"{}:4242\"]", self.lighthouse), "[\"10.77.0.1\"]")
        };
        let config = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{host}.crt, key: {dir}/{host}.key}}
static_host_map: {{{known}}}
lighthouse: {{am_lighthouse: {}, interval: 2, hosts: {hosts}}}
listen: {{host: 0.0.0.0, port: 4242}}
punchy: {{punch: true, respond: true}}
tun: {{dev: neb0, mtu: 1300}}
firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: any, host: any}}]
",
            host == "l",
        );
        let path = self.world.write(&format!("{host}.yml"), &config).display().to_string();
        let binary = match maker {
            Ours => ours(),
            Go(suite) => go("nebula", suite),
        };
        self.world.start(host, &binary, &["-config", &path]);
    }

    /// Kills a daemon, so that it cannot tell its peers, and starts it again.
    fn kill_and_restart(&mut self, host: &str, maker: Maker) {
        self.world.stop(host, Signal::SIGKILL);
        self.start(host, maker);
    }

    /// Changes the underlay address of `host`; in between it has no route at all.
    fn move_host(&self, host: &str, from: Ipv4Addr, to: Ipv4Addr) {
        must(&self.world, host, &["ip", "addr", "del", &format!("{from}/24"), "dev", "eth0"]);
        must(&self.world, host, &["ip", "addr", "add", &format!("{to}/24"), "dev", "eth0"]);
    }

    /// Opens a TCP connection from `client` to `server`, which echoes every message.
    fn conversation(&self, client: &str, server: &str, at: &str) -> Conversation {
        let address: IpAddr = at.parse().expect("an address");
        let namespace = self.world.namespace_of(server);
        let (ready, listening) = std::sync::mpsc::channel();
        thread::spawn(move || {
            enter(&namespace);
            let listener = TcpListener::bind(SocketAddr::new(address, 0)).expect("listen on the overlay address");
            ready.send(listener.local_addr().expect("own address")).expect("the test waits");
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut message = [0; 8];
            while stream.read_exact(&mut message).is_ok() && stream.write_all(&message).is_ok() {}
        });
        let to = listening.recv_timeout(SOON).expect("the server listens");
        let namespace = self.world.namespace_of(client);
        let stream = thread::spawn(move || {
            enter(&namespace);
            TcpStream::connect_timeout(&to, SOON).expect("connect over the overlay")
        });
        let stream = stream.join().expect("a connection");
        stream.set_read_timeout(Some(SOON)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        Conversation { stream, said: 0 }
    }
}

/// A TCP connection that carries one numbered message at a time.
struct Conversation {
    stream: TcpStream,
    said: u64,
}

impl Conversation {
    /// Sends `count` messages and reads each of them back, in order; returns the longest wait.
    fn go_on(&mut self, count: u64) -> Duration {
        let mut longest = Duration::ZERO;
        for _ in 0..count {
            self.said += 1;
            let asked = Instant::now();
            self.stream.write_all(&self.said.to_be_bytes()).expect("the connection lives");
            let mut heard = [0; 8];
            self.stream.read_exact(&mut heard).expect("an answer within the time limit");
            assert_eq!(u64::from_be_bytes(heard), self.said);
            longest = longest.max(asked.elapsed());
            thread::sleep(Duration::from_millis(2));
        }
        longest
    }
}

/// Both ends are behind a NAT that lets no new connections in: only hole punching connects them.
fn punches(suite: &'static str, lighthouse: Maker) {
    for (a, b) in [(Ours, Go(suite)), (Ours, Ours)] {
        for (from, to) in [("a", B), ("b", A)] {
            let mut site = Site::behind_nats();
            site.start_all([lighthouse, a, b]);
            site.world.ping(from, to, SOON);
            site.world.transfer("a", "b", B.parse().expect("an address"), 5_000_000);
        }
    }
}

/// The address of either end changes during a conversation that either end started.
fn roams(suite: &'static str) {
    for (mover, client, server, at) in [("a", "a", "b", B), ("a", "b", "a", A), ("b", "b", "a", A), ("b", "a", "b", B)]
    {
        let (mut site, ends) = Site::flat();
        site.start_all([Go(suite), Ours, Go(suite)]);
        site.world.ping("a", B, SOON);
        let mut conversation = site.conversation(client, server, at);
        conversation.go_on(50);
        let home = ends[usize::from(mover == "b")];
        let away = Ipv4Addr::new(192, 0, 2, 77);
        site.move_host(mover, home, away);
        let there = conversation.go_on(200);
        site.move_host(mover, away, home);
        let back = conversation.go_on(200);
        eprintln!("{mover} moved, {client} asked: longest waits {there:?} away, {back:?} home again");
    }
}

/// Each end is killed and restarted while the other keeps its tunnel.
fn survives_kills(suite: &'static str) {
    let (mut site, _) = Site::flat();
    site.start_all([Go(suite), Ours, Go(suite)]);
    site.world.ping("a", B, SOON);
    site.kill_and_restart("b", Go(suite));
    site.world.ping("a", B, AFTER_RESTART);
    site.kill_and_restart("a", Ours);
    site.world.ping("b", A, AFTER_RESTART);
    // The restarted end initiates.
    site.kill_and_restart("b", Go(suite));
    site.world.ping("b", A, AFTER_RESTART);
    site.kill_and_restart("a", Ours);
    site.world.ping("a", B, AFTER_RESTART);
}

/// The lighthouse is killed: the tunnel between the ends is unaffected, and after its restart it introduces them again.
fn lighthouse_restarts(lighthouse: Maker, suite: &'static str) {
    let (mut site, _) = Site::flat();
    site.start_all([lighthouse, Ours, Go(suite)]);
    site.world.ping("a", B, SOON);
    site.world.stop("l", Signal::SIGKILL);
    assert_eq!(site.world.pings("a", B, 20, "0.05"), 20, "a lost ping\n{}", site.world.all_logs());
    site.start("l", lighthouse);
    for end in ["a", "b"] {
        site.world.ping(end, L, SOON);
    }
    site.kill_and_restart("a", Ours);
    site.kill_and_restart("b", Go(suite));
    site.world.ping("a", B, SOON);
}

/// A router that masquerades its LAN and lets in answers only.
const NAT: &str = "table ip nat {
  chain out { type nat hook postrouting priority srcnat; oifname \"eth0\" masquerade; }
}
table ip filter {
  chain local { type filter hook input priority filter; policy drop; ct state established,related accept; }
  chain through {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    iifname \"lan0\" accept
  }
}
";

macro_rules! beside_go {
    ($($name:ident: $body:expr;)*) => {$(
        #[test]
        #[ignore = "needs root, network namespaces and the Go peers in target/peers"]
        fn $name() {
            $body
        }
    )*};
}

beside_go! {
    nats_are_punched_with_a_go_1_6_lighthouse: punches("bookworm", Go("bookworm"));
    nats_are_punched_with_a_go_1_9_lighthouse: punches("trixie", Go("trixie"));
    nats_are_punched_with_a_go_1_11_lighthouse: punches("sid", Go("sid"));
    nats_are_punched_with_our_lighthouse: punches("sid", Ours);
    a_tcp_connection_survives_roaming_beside_go_1_6: roams("bookworm");
    a_tcp_connection_survives_roaming_beside_go_1_9: roams("trixie");
    a_tcp_connection_survives_roaming_beside_go_1_11: roams("sid");
    killed_ends_come_back_beside_go_1_6: survives_kills("bookworm");
    killed_ends_come_back_beside_go_1_9: survives_kills("trixie");
    killed_ends_come_back_beside_go_1_11: survives_kills("sid");
    a_go_1_6_lighthouse_restarts: lighthouse_restarts(Go("bookworm"), "bookworm");
    a_go_1_9_lighthouse_restarts: lighthouse_restarts(Go("trixie"), "trixie");
    a_go_1_11_lighthouse_restarts: lighthouse_restarts(Go("sid"), "sid");
    our_lighthouse_restarts: lighthouse_restarts(Ours, "sid");
}

fn must(world: &World, host: &str, command: &[&str]) {
    let output = world.exec(host, command);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
