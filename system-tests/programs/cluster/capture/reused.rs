//! Pods that are not enrolled get the addresses of enrolled ones as soon as these are deleted, while programs go on
//! sending what was for the former. `captured::reused` does the same many more times, without an API server.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::town::{SOON, Town};
use crate::world::chaos::number;
use crate::world::enter_network;
use crate::world::kube::text;
use crate::world::pod_traffic::{self, EchoServer, OPEN, SECRET, unspecified, within};

const SERVER: [&str; 6] = ["httpd", "-f", "-p", "8080", "-h", "/www"];

/// `KUBE_REUSES` says how often.
#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn what_was_for_an_enrolled_pod_of_a_cluster_does_not_go_to_the_next_one_with_its_address() {
    let rounds = number("KUBE_REUSES", 10);
    let (town, wires) = Town::new();
    let client = town.network("shop/client");
    let v6 = town.cluster_ip("shop", "web-v6");
    let (mut refused, mut ended) = (0, 0);
    for round in 0..rounds {
        let name = format!("turn-{round}");
        town.nodes.pod_that_runs("shop", &name, "node2", &SERVER);
        town.nodes.wait_for_pod("shop", &name);
        let addresses = [town.pod_address("shop", &name), town.pod_address_like(v6, "shop", &name)];
        for address in addresses {
            town.ask("shop/client", (address, 8080), SECRET);
        }
        let server = EchoServer::start(&town.nodes.pod_networks()[&format!("shop/{name}")], &name);
        let talkers = addresses.map(|address| Talker::start(&client, SocketAddr::new(address, 9000)));
        thread::sleep(Duration::from_millis(500));
        town.nodes.kubectl(&["delete", "pod", "-n", "shop", &name, "--grace-period=0", "--force"]);
        drop(server);
        give_next(&town, &addresses);
        town.nodes.pod_that_runs("other", &name, "node2", &SERVER);
        town.nodes.wait_for_pod("other", &name);
        let now = [town.pod_address("other", &name), town.pod_address_like(v6, "other", &name)];
        assert_eq!(now, addresses, "the address was not used again: this round shows nothing");
        thread::sleep(Duration::from_secs(3));
        for talker in talkers {
            let told = talker.stop();
            refused += told.refused;
            ended += usize::from(told.is_ended);
        }
        wires.assert_silent(&format!("round {round}"));
        if round + 1 == rounds {
            // New flows reach the new pod, in clear, once its address is somebody's again.
            for address in addresses {
                let target = SocketAddr::new(address, 8080);
                town.nodes.until("the new pod is reached", 3 * SOON, || {
                    within(&client, move || pod_traffic::ask(target, OPEN)).is_ok_and(|answer| answer.pod == name)
                });
            }
        }
        town.nodes.kubectl(&["delete", "pod", "-n", "other", &name, "--grace-period=0", "--force"]);
    }
    for pod in ["near", "far"] {
        town.ask("shop/client", (town.pod_address("other", pod), 8080), OPEN);
    }
    wires.assert_not_deaf();
    println!("{rounds} addresses, both families: {refused} datagrams refused, {ended} connections ended, 0 in clear");
    let expected = 2 * usize::try_from(rounds).expect("a small number");
    assert!(refused >= expected && ended == expected, "the programs are not told: {refused}, {ended} of {expected}");
}

/// host-local gives the address after the last one that it gave.
fn give_next(town: &Town, addresses: &[IpAddr]) {
    for (range, address) in addresses.iter().enumerate() {
        let before: IpAddr = match address {
            IpAddr::V4(address) => std::net::Ipv4Addr::from_bits(address.to_bits() - 1).into(),
            IpAddr::V6(address) => std::net::Ipv6Addr::from_bits(address.to_bits() - 1).into(),
        };
        let released = format!("until [ ! -e \"$dir/{address}\" ]; do sleep 0.05; done");
        let script = format!(
            "dir=$(echo /var/lib/cni/networks/*); {released}; printf %s {before} > \"$dir/last_reserved_ip.{range}\""
        );
        let done = town.nodes.on(2, &["timeout", "60", "sh", "-ec", &script]);
        assert!(done.status.success(), "{address} is not free: {}\n{}", text(&done), town.details());
    }
}

/// A program in a pod with a TCP connection and a UDP socket to one address, both older than the next owner of the
/// address. It sends the secret on both, whatever comes of it.
struct Talker {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Told>,
}

/// What a [`Talker`] was told by its kernel.
#[derive(Default)]
struct Told {
    refused: usize,
    is_ended: bool,
}

impl Talker {
    fn start(network: &Path, target: SocketAddr) -> Self {
        let (stop, network) = (Arc::<AtomicBool>::default(), network.to_owned());
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            enter_network(&network);
            let datagrams = UdpSocket::bind((unspecified(target.ip()), 0)).expect("a socket");
            datagrams.connect(target).expect("a route");
            let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5)).expect("a connection");
            stream.set_nonblocking(true).expect("it does not block");
            let mut told = Told::default();
            while !stopped.load(Ordering::Relaxed) {
                let sent = datagrams.send(SECRET.as_bytes());
                told.refused += usize::from(sent.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused));
                let written = stream.write(SECRET.as_bytes());
                told.is_ended |= written.is_err_and(|error| error.kind() != ErrorKind::WouldBlock);
                thread::sleep(Duration::from_millis(2));
            }
            told
        });
        Self { stop, thread }
    }

    fn stop(self) -> Told {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the program runs")
    }
}
