//! Captures every IPv4 packet on all links of a namespace.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

/// A socket for all packets on all links of this thread's namespace, without link headers: each packet starts with the
/// IP header. A read ends after 100 ms.
pub fn packet_socket() -> OwnedFd {
    let any = SockProtocol::EthAll;
    let packets =
        socket(AddressFamily::Packet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, any).expect("a packet socket");
    setsockopt(&packets, sockopt::ReceiveTimeout, &TimeVal::milliseconds(100)).expect("a time-out");
    setsockopt(&packets, sockopt::RcvBufForce, &(16 << 20)).expect("room for bursts");
    packets
}

/// Counts packets until it is dropped.
pub struct Capture {
    seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
}

#[derive(Default)]
struct Seen {
    all: AtomicUsize,
    /// Unencrypted packets to overlay addresses, by source.
    overlay: Mutex<BTreeMap<Ipv4Addr, usize>>,
}

impl Capture {
    pub fn start(namespace: &str) -> Self {
        let capture = Self { seen: Arc::default(), stop: Arc::default() };
        let (seen, stop) = (Arc::clone(&capture.seen), Arc::clone(&capture.stop));
        let namespace = namespace.to_owned();
        let (ready, started) = std::sync::mpsc::channel();
        thread::spawn(move || {
            super::enter(&namespace);
            let packets = packet_socket();
            ready.send(()).expect("the test waits");
            let mut packet = [0; 2048];
            while !stop.load(Ordering::Relaxed) {
                let Ok(len) = recv(packets.as_raw_fd(), &mut packet, MsgFlags::empty()) else { continue };
                if let [0x45..0x50, .., s1, s2, s3, s4, d1, d2, _, _] = packet[..len.min(20)]
                    && len >= 20
                {
                    seen.all.fetch_add(1, Ordering::Relaxed);
                    if (d1, d2) == (10, 42) {
                        let mut overlay = seen.overlay.lock().unwrap_or_else(PoisonError::into_inner);
                        *overlay.entry(Ipv4Addr::new(s1, s2, s3, s4)).or_default() += 1;
                    }
                }
            }
        });
        started.recv().expect("the capture runs");
        capture
    }

    pub fn packets(&self) -> usize {
        self.seen.all.load(Ordering::Relaxed)
    }

    /// The number of unencrypted packets to overlay addresses.
    pub fn overlay_packets(&self) -> usize {
        self.overlay_sources().values().sum()
    }

    /// Like [`Capture::overlay_packets`], by source.
    pub fn overlay_sources(&self) -> BTreeMap<Ipv4Addr, usize> {
        self.seen.overlay.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
