//! A restart under a real systemd keeps the flows that connection tracking knows; a crash keeps none.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use super::descriptor_store::{FIRST, P, SOON, Site, Wanted};
use crate::world::enter;

const WENT_ON: &str = "Going on with the flows of the last run";

/// A connection that `u` opened to `p`, and in which `p` alone speaks.
struct Stream {
    heard: Arc<AtomicU64>,
    ends: Vec<TcpStream>,
}

impl Stream {
    fn start(site: &Site) -> Self {
        let (client, server) = (site.namespace.clone(), site.world.namespace_of("p"));
        let at: IpAddr = P.parse().expect("an address");
        let (ready, listening) = mpsc::channel();
        let (opened, ends) = mpsc::channel();
        let mine = opened.clone();
        thread::spawn(move || {
            enter(&server);
            let listener = TcpListener::bind((at, 0)).expect("listen on the overlay address");
            ready.send(listener.local_addr().expect("own address")).expect("the test waits");
            let (mut stream, _) = listener.accept().expect("a connection");
            mine.send(stream.try_clone().expect("a second handle")).expect("the test waits");
            while stream.write_all(&[7; 100]).is_ok() {
                thread::sleep(Duration::from_millis(10));
            }
        });
        let to = listening.recv_timeout(SOON).expect("the server listens");
        let heard = Arc::new(AtomicU64::new(0));
        let bytes = Arc::clone(&heard);
        thread::spawn(move || {
            enter(&client);
            let mut stream = TcpStream::connect_timeout(&to, SOON).expect("it connects");
            opened.send(stream.try_clone().expect("a second handle")).expect("the test waits");
            let mut buffer = [0; 1000];
            while let Ok(n @ 1..) = stream.read(&mut buffer) {
                bytes.fetch_add(n as u64, Ordering::Relaxed);
            }
        });
        let ends = [(); 2].map(|()| ends.recv_timeout(SOON).expect("an end")).into();
        Self { heard, ends }
    }

    /// Whether more is heard within this time.
    fn goes_on(&self, within: Duration) -> bool {
        let before = self.heard.load(Ordering::Relaxed);
        let step = Duration::from_millis(20);
        (0..within.as_millis() / step.as_millis()).any(|_| {
            thread::sleep(step);
            self.heard.load(Ordering::Relaxed) > before + 1000
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        for end in &self.ends {
            let _ = end.shutdown(std::net::Shutdown::Both);
        }
    }
}

#[test]
#[ignore = "needs root, systemd, network namespaces and the Go peers in target/peers"]
fn a_restart_keeps_a_connection_of_which_the_firewall_allows_the_answers_only_and_a_crash_restores_no_flow() {
    let site = Site::with_peer();
    site.restart_as(&Wanted { inbound: "icmp", ..FIRST });
    site.world.ping("u", P, SOON);
    let stream = Stream::start(&site);
    let count = || site.systemd.log().matches(WENT_ON).count();
    for _ in 0..3 {
        assert!(stream.goes_on(SOON), "it does not flow\n{}", site.systemd.log());
        let (before, process) = (count(), site.pid());
        site.control("restart");
        assert!(stream.goes_on(Duration::from_secs(5)), "it ended\n{}", site.systemd.log());
        assert_ne!(site.pid(), process);
        assert_eq!((count(), site.stored().as_str()), (before + 1, "2"), "{}", site.systemd.log());
    }
    // The rules of the next start decide about flows that were allowed before.
    let strict = Wanted { inbound: "icmp", outbound: "icmp", ..FIRST };
    site.restart_as(&strict);
    site.world.ping("u", P, SOON);
    assert!(!stream.goes_on(Duration::from_secs(3)), "a flow goes on that no rule allows");

    // What a process left is read once: one that crashes leaves nothing.
    let (before, process) = (count(), site.pid());
    site.systemd.must(&["kill", "-9", &process.to_string()]);
    site.wait("another process", SOON, |site| {
        site.show("ActiveState") == "active" && ![0, process].contains(&site.pid())
    });
    site.world.ping("u", P, SOON);
    assert_eq!((count(), site.stored().as_str()), (before, "2"), "{}", site.systemd.log());
    // So does a stop.
    site.control("stop");
    site.control("start");
    site.world.ping("u", P, SOON);
    assert_eq!(count(), before, "{}", site.systemd.log());
}
