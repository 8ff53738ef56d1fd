//! Packets that leave on the primary network instead of through a tunnel, by raw sockets of the caller.

use std::net::{IpAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, SockaddrIn, SockaddrIn6, sendto};

use crate::forward::{Offload, cut_packet};
use crate::io::shared::IoCounters;
use crate::wire::ip::outbound_flow;

/// Raw sockets for packets that carry their own IP headers (`IPPROTO_RAW`), one for each family. The caller has
/// marked them and bound them to a device, so that what is sent does not come back to the overlay. Without a socket,
/// packets of that family are dropped and counted.
#[derive(Debug, Clone, Default)]
pub struct Bypass {
    /// For IPv4.
    pub v4: Option<Arc<OwnedFd>>,
    /// For IPv6.
    pub v6: Option<Arc<OwnedFd>>,
}

impl Bypass {
    /// Sends a (super-)packet, cut and with its checksum completed. Never waits.
    pub(super) fn send(&self, packet: &[u8], offload: Offload, counters: &IoCounters) {
        let Ok(flow) = outbound_flow(packet) else { return counters.bypass_refused.add(1) };
        cut_packet(packet, offload, |packet| match self.send_one(packet, flow.remote) {
            Ok(()) => {}
            Err(Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM) => counters.bypass_full.add(1),
            Err(_) => counters.bypass_refused.add(1),
        });
    }

    fn send_one(&self, packet: &[u8], to: IpAddr) -> Result<(), Errno> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        // The port has no meaning here.
        let sent = match to {
            IpAddr::V4(to) => {
                let socket = self.v4.as_ref().ok_or(Errno::EAFNOSUPPORT)?;
                sendto(socket.as_raw_fd(), packet, &SockaddrIn::from(SocketAddrV4::new(to, 0)), flags)
            }
            IpAddr::V6(to) => {
                let socket = self.v6.as_ref().ok_or(Errno::EAFNOSUPPORT)?;
                sendto(socket.as_raw_fd(), packet, &SockaddrIn6::from(SocketAddrV6::new(to, 0, 0, 0)), flags)
            }
        };
        sent.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::forward::{Segment, SegmentKind};

    const V4: [&str; 2] = ["10.244.1.7", "10.244.1.8"];
    const V6: [&str; 2] = ["fd00:244::7", "fd00:244::8"];

    /// Takes the place of a raw socket: a connected stream takes bytes whatever address they are for, until it is full.
    fn stand_in(at: &str) -> (Arc<OwnedFd>, TcpStream) {
        let listener = TcpListener::bind(at).unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Arc::new(sender.into()), listener.accept().unwrap().0)
    }

    fn both() -> (Bypass, [TcpStream; 2]) {
        let [(v4, at_v4), (v6, at_v6)] = ["127.0.0.1:0", "[::1]:0"].map(stand_in);
        (Bypass { v4: Some(v4), v6: Some(v6) }, [at_v4, at_v6])
    }

    /// A UDP packet.
    fn packet([from, to]: [&str; 2], payload: usize) -> Vec<u8> {
        let length = (payload + 8) as u16;
        let mut packet = match (from.parse().unwrap(), to.parse().unwrap()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let [high, low] = (length + 20).to_be_bytes();
                let head = [0x45, 0, high, low, 0, 0, 0, 0, 64, 17, 0, 0];
                [&head[..], &from.octets(), &to.octets()].concat()
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let [high, low] = length.to_be_bytes();
                [&[0x60, 0, 0, 0, high, low, 17, 64], &from.octets()[..], &to.octets()].concat()
            }
            _ => unreachable!("of one family"),
        };
        let [high, low] = length.to_be_bytes();
        packet.extend([0x1f, 0x90, 0x1f, 0x90, high, low, 0, 0]);
        packet.resize(packet.len() + payload, 7);
        packet
    }

    #[test]
    fn each_family_leaves_by_its_own_socket_and_a_super_packet_in_pieces() {
        let (bypass, [mut v4, mut v6]) = both();
        let counters = IoCounters::default();
        for (addresses, head, receiver) in [(V4, 20, &mut v4), (V6, 40, &mut v6)] {
            let segment = Some(Segment { kind: SegmentKind::Udp, size: 100 });
            bypass.send(&packet(addresses, 250), Offload { segment, checksum: Some((head, 6)) }, &counters);
            for payload in [100, 100, 50] {
                let mut piece = vec![0; usize::from(head) + 8 + payload];
                receiver.read_exact(&mut piece).unwrap();
                assert_eq!(outbound_flow(&piece).unwrap().remote, addresses[1].parse::<IpAddr>().unwrap());
                assert_eq!(piece[usize::from(head) + 4..][..2], (8 + payload as u16).to_be_bytes());
                assert_ne!(piece[usize::from(head) + 6..][..2], [0; 2], "its checksum is completed");
            }
        }
        assert_eq!((counters.bypass_full.get(), counters.bypass_refused.get()), (0, 0));
    }

    #[test]
    fn what_a_full_socket_does_not_take_is_counted_and_nobody_waits() {
        let (bypass, _receivers) = both();
        let counters = IoCounters::default();
        for addresses in [V4, V6] {
            let (before, whole) = (counters.bypass_full.get(), packet(addresses, 1200));
            let is_full = |_| {
                bypass.send(&whole, Offload::default(), &counters);
                counters.bypass_full.get() > before
            };
            assert!((0..100_000).any(is_full), "it never fills");
        }
        assert_eq!(counters.bypass_refused.get(), 0);
    }

    #[test]
    fn without_a_socket_of_its_family_a_packet_is_refused_and_counted() {
        let counters = IoCounters::default();
        for addresses in [V4, V6] {
            Bypass::default().send(&packet(addresses, 10), Offload::default(), &counters);
        }
        Bypass::default().send(b"no packet", Offload::default(), &counters);
        assert_eq!((counters.bypass_full.get(), counters.bypass_refused.get()), (0, 3));
    }
}
