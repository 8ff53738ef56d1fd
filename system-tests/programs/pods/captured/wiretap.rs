//! Wiretaps on all links of the nodes and of the switch between them.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::town::{CAPTURED, FAMILIES};
use crate::world::{self, World, capture::packet_socket};

/// What enrolled pods say to each other.
pub(super) const SECRET: &[u8] = b"this must not be seen on a link";
/// What is said where somebody is not enrolled. Wiretaps must hear it, or they are deaf.
pub(super) const PUBLIC: &[u8] = b"anybody on the link may see this";

/// Listens on all links of a namespace.
struct Wiretap {
    heard: Arc<Heard>,
    stop: Arc<AtomicBool>,
}

#[derive(Default)]
struct Heard {
    public: AtomicUsize,
    clear: AtomicUsize,
    /// The first packets in clear.
    samples: Mutex<Vec<String>>,
}

impl Wiretap {
    fn start(namespace: &str) -> Self {
        let tap = Self { heard: Arc::default(), stop: Arc::default() };
        let (heard, stop, namespace) = (Arc::clone(&tap.heard), Arc::clone(&tap.stop), namespace.to_owned());
        let (ready, started) = std::sync::mpsc::channel();
        thread::spawn(move || {
            world::enter(&namespace);
            let packets = packet_socket();
            ready.send(()).expect("the test waits");
            let enrolled: Vec<IpAddr> =
                CAPTURED.iter().flat_map(|pod| FAMILIES.map(|family| pod.address(family))).collect();
            let mut packet = [0; 2048];
            while !stop.load(Ordering::Relaxed) {
                let Ok(length) = nix::unistd::read(&packets, &mut packet) else { continue };
                heard.note(&packet[..length], &enrolled);
            }
        });
        started.recv().expect("the wiretap runs");
        tap
    }
}

impl Heard {
    fn note(&self, packet: &[u8], enrolled: &[IpAddr]) {
        if contains(packet, PUBLIC) {
            self.public.fetch_add(1, Ordering::Relaxed);
        }
        // Packets without payload count too: nothing between enrolled pods has their addresses on the outside.
        let ends = ends(packet);
        let is_between = ends.is_some_and(|ends| ends.iter().all(|end| enrolled.contains(end)));
        if is_between || contains(packet, SECRET) {
            self.clear.fetch_add(1, Ordering::Relaxed);
            let mut samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
            if samples.len() < 10 {
                samples.push(format!("{ends:?} {:02x?}", &packet[..packet.len().min(60)]));
            }
        }
    }
}

fn contains(packet: &[u8], text: &[u8]) -> bool {
    packet.windows(text.len()).any(|window| window == text)
}

/// Source and destination of an IP packet.
pub(super) fn ends(packet: &[u8]) -> Option<[IpAddr; 2]> {
    match packet.first()? >> 4 {
        4 => {
            let at = |offset: usize| Some(IpAddr::from(*packet.get(offset..)?.first_chunk::<4>()?));
            Some([at(12)?, at(16)?])
        }
        6 => {
            let at = |offset: usize| Some(IpAddr::from(*packet.get(offset..)?.first_chunk::<16>()?));
            Some([at(8)?, at(24)?])
        }
        _ => None,
    }
}

/// On both nodes, the host's end of each pod's link included, and on the switch between them.
pub(super) struct Wiretaps([Wiretap; 3]);

impl Wiretaps {
    pub(super) fn start(world: &World) -> Self {
        Self(["n1", "n2", "s"].map(|host| Wiretap::start(&world.namespace_of(host))))
    }

    /// How many packets between enrolled pods were seen in clear so far.
    #[track_caller]
    pub(super) fn heard_nothing_in_clear(&self) {
        thread::sleep(Duration::from_millis(300));
        for (tap, host) in self.0.iter().zip(["n1", "n2", "the switch"]) {
            let samples = tap.heard.samples.lock().unwrap_or_else(PoisonError::into_inner);
            let count = tap.heard.clear.load(Ordering::Relaxed);
            assert_eq!(count, 0, "packets between enrolled pods in clear on {host}, the first of them: {samples:#?}");
        }
    }

    /// How many packets in clear between others each of them has heard so far.
    pub(super) fn public(&self) -> [usize; 3] {
        [0, 1, 2].map(|at| self.0[at].heard.public.load(Ordering::Relaxed))
    }
}

impl Drop for Wiretap {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
