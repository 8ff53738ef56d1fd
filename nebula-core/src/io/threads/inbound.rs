//! From a UDP socket to the overlay: receive, open, deliver, until the socket is dry.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::counters::Direction;
use crate::forward::{Delivery, Offload, SegmentKind, cut_delivery, echo_reply};
use crate::io::shared::{IoCounter, Shared};
use crate::io::threads::pacing::{Load, Warmth, Weight};
use crate::io::tun::{Queue, TunOffloads};
use crate::io::udp::UdpSocket;
use crate::io::udp::receive::Receiver;
use crate::io::udp::send::Sender;
use crate::io::{Error, clock};
use crate::{Lane, Verdict};

// Maximum number of pings per receive that are answered without a device.
const MAX_REPLIES: usize = 64;

/// Everything the thread that serves the socket needs.
#[derive(Debug)]
pub(in crate::io) struct Inbound {
    shared: Arc<Shared>,
    // None: this node has no overlay device.
    queue: Option<Arc<Queue>>,
    socket: Arc<UdpSocket>,
    deliverer: Deliverer,
    lane: Lane,
    receiver: Receiver,
    // Sends relayed datagrams back to the underlay.
    sender: Sender,
    warmth: Warmth,
}

impl Inbound {
    pub(in crate::io) fn new(
        shared: Arc<Shared>,
        queue: Option<Arc<Queue>>,
        socket: Arc<UdpSocket>,
        offloads: TunOffloads,
    ) -> Result<Self, Error> {
        let lane = shared.forwarder.lane();
        let receiver =
            Receiver::new().map_err(|source| Error::Io { what: "cannot reserve receive buffers", source })?;
        let (sender, warmth) = (Sender::new(), Warmth::default());
        let deliverer = Deliverer::new(offloads);
        Ok(Self { shared, queue, socket, deliverer, lane, receiver, sender, warmth })
    }

    /// Must be called once, by the thread that will serve it.
    pub(in crate::io) fn begin(&mut self) {
        self.lane.set_max_segments(self.sender.segments(&self.socket));
        self.announce_offloads();
    }

    fn announce_offloads(&mut self) {
        let offloads = self.deliverer.offloads();
        self.lane.set_coalesce(offloads != TunOffloads::None, offloads == TunOffloads::TcpAndUdp);
    }

    /// Processes what one receive returns. Returns `true` if the socket is dry.
    pub(in crate::io) fn turn(&mut self, load: &mut Load) -> Result<bool, Error> {
        if self.lane.early_due().is_some() {
            self.serve_early()?;
        }
        let received = self.receiver.receive(&self.socket);
        if !received.map_err(|source| Error::Io { what: "cannot receive from the UDP socket (recvmsg)", source })? {
            return Ok(true);
        }
        let now = clock::now();
        let (memory, received) = self.receiver.parts();
        let bytes = received.iter().map(|slot| slot.range.len()).sum();
        self.warmth.note(now, bytes);
        load.note(now, bytes, Weight::of(bytes, received.len()));
        self.shared.forwarder.inbound(&mut self.lane, now, memory, received);
        self.pass_on(now, None)?;
        Ok(false)
    }

    /// Processes early datagrams whose tunnel is there by now.
    fn serve_early(&mut self) -> Result<(), Error> {
        let now = clock::now();
        while let Some(memory) = self.shared.forwarder.inbound_early(&mut self.lane, now) {
            self.pass_on(now, Some(&memory))?;
        }
        Ok(())
    }

    /// Empties the lane. `memory` holds the bytes of its pieces; `None`: the receive buffer does.
    fn pass_on(&mut self, now: Instant, memory: Option<&[u8]>) -> Result<(), Error> {
        match self.queue.clone() {
            Some(queue) => self.deliver(&queue, memory)?,
            None => self.answer_pings(now, memory),
        }
        self.shared.send(&mut self.sender, &self.socket, &self.lane);
        self.shared.punt(&mut self.lane, Direction::Inbound);
        self.lane.clear();
        Ok(())
    }

    /// Answers pings as the kernel would if there were a device.
    fn answer_pings(&mut self, now: Instant, memory: Option<&[u8]>) {
        let memory = memory.unwrap_or_else(|| self.receiver.memory());
        let packet = |delivery: &Delivery| {
            let piece = self.lane.pieces().get(delivery.pieces.clone())?.first()?;
            memory.get(piece.clone())
        };
        let deliveries = self.lane.deliveries();
        let replies = deliveries.iter().filter_map(|delivery| echo_reply(packet(delivery)?)).take(MAX_REPLIES);
        let replies: Vec<_> = replies.collect();
        self.shared.counters.no_device.add((deliveries.len() - replies.len()) as u64);
        for mut reply in replies {
            match self.shared.forwarder.outbound(&mut self.lane, now, &mut reply, Offload::default()) {
                // A node without a device captures nothing.
                Verdict::Transmit | Verdict::Bypass | Verdict::Deliver | Verdict::Punt | Verdict::Drop(_) => {}
            }
        }
    }

    fn deliver(&mut self, queue: &Queue, memory: Option<&[u8]>) -> Result<(), Error> {
        let (lane, memory) = (&self.lane, memory.unwrap_or_else(|| self.receiver.memory()));
        let mut device = Overlay { queue, lane, memory };
        if self.deliverer.deliver(lane.deliveries(), &self.shared.counters.tun_write, &mut device)? {
            self.announce_offloads();
        }
        Ok(())
    }

    /// How long to wait for the socket; `None`: no limit.
    pub(in crate::io) fn timeout(&self, now: Instant) -> Option<Duration> {
        let early = self.lane.early_due().map(|due| due.saturating_duration_since(now));
        let settle = self.shared.forwarder.settle_due(&self.lane).map(|due| due.saturating_duration_since(now));
        [self.warmth.timeout(now), early, settle].into_iter().flatten().min()
    }

    /// Releases memory that a burst touched, some time after it, and tells what was counted of flows.
    pub(in crate::io) fn cool(&mut self, now: Instant) {
        self.shared.forwarder.settle(&mut self.lane, now);
        if self.warmth.cooled(now) {
            self.receiver.release();
            self.lane.release_memory();
        }
    }
}

impl AsFd for Inbound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A queue as the device for the packets of one lane.
struct Overlay<'a> {
    queue: &'a Queue,
    lane: &'a Lane,
    /// Holds the bytes of the lane's pieces.
    memory: &'a [u8],
}

impl Device for Overlay<'_> {
    fn write(&mut self, delivery: &Delivery) -> Result<(), Errno> {
        write(self.queue, self.lane, self.memory, delivery)
    }

    fn write_singly(&mut self, delivery: &Delivery) -> u64 {
        let mut refused = 0;
        cut_delivery(self.lane, self.memory, delivery, |packet| {
            let piece = 0..packet.len();
            let written = self.queue.write(&Offload::default(), 0, &[], packet, std::slice::from_ref(&piece));
            refused += u64::from(written.is_err());
        });
        refused
    }
}

/// Writes one packet of a lane; `memory` holds the bytes of its pieces.
pub(in crate::io) fn write(queue: &Queue, lane: &Lane, memory: &[u8], delivery: &Delivery) -> Result<(), Errno> {
    let head = lane.headers().get(delivery.header.clone()).ok_or(Errno::EFAULT)?;
    let pieces = lane.pieces().get(delivery.pieces.clone()).ok_or(Errno::EFAULT)?;
    queue.write(&delivery.offload, delivery.header_len, head, memory, pieces)
}

/// Where packets for the overlay go.
pub(in crate::io) trait Device {
    /// Writes a packet as it is.
    fn write(&mut self, delivery: &Delivery) -> Result<(), Errno>;

    /// Writes a super-packet as the packets it was joined from. Returns how many the device refused.
    fn write_singly(&mut self, delivery: &Delivery) -> u64;
}

/// What one thread may write to its queue.
#[derive(Debug)]
pub(in crate::io) struct Deliverer {
    offloads: TunOffloads,
}

impl Deliverer {
    pub(in crate::io) fn new(offloads: TunOffloads) -> Self {
        Self { offloads }
    }

    /// Offloads that the device accepts, as far as is known.
    pub(in crate::io) fn offloads(&self) -> TunOffloads {
        self.offloads
    }

    /// Writes each packet to `device`. A refused packet is dropped and counted in `lost`, but a super-packet is first
    /// retried as single packets. Returns `true` if the device accepts fewer kinds of super-packets than before.
    ///
    /// # Errors
    /// Returns an error if the device is gone.
    pub(in crate::io) fn deliver(
        &mut self,
        deliveries: &[Delivery],
        lost: &IoCounter,
        device: &mut impl Device,
    ) -> Result<bool, Error> {
        let mut refused = None;
        for delivery in deliveries {
            match (device.write(delivery), delivery.offload.segment) {
                (Ok(()), _) => {}
                // The device is gone, not merely down.
                (Err(Errno::EBADFD | Errno::EBADF), _) => {
                    return Err(Error::io("cannot write to the tun device", Errno::EBADFD));
                }
                (Err(Errno::EINVAL), Some(segment)) => {
                    lost.add(device.write_singly(delivery));
                    refused = Some(segment);
                }
                (Err(_), _) => lost.add(1),
            }
        }
        // Some kernels refuse some super-packets; packets that arrive from now on are not joined to such ones.
        let Some(segment) = refused else { return Ok(false) };
        self.offloads = match segment.kind {
            SegmentKind::Udp if self.offloads == TunOffloads::TcpAndUdp => TunOffloads::Tcp,
            SegmentKind::Udp | SegmentKind::Tcp => TunOffloads::None,
        };
        tracing::warn!(kind = ?segment.kind, "the kernel refused a super-packet: joining of packets is off for this queue");
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::{Offload, Segment};

    /// A fake tun device: refuses the writes a test names, and records the others.
    #[derive(Default)]
    struct FakeDevice {
        refuses: Vec<(Option<SegmentKind>, Errno)>,
        written: Vec<Option<SegmentKind>>,
        cut: Vec<SegmentKind>,
    }

    impl Device for FakeDevice {
        fn write(&mut self, delivery: &Delivery) -> Result<(), Errno> {
            let kind = delivery.offload.segment.map(|segment| segment.kind);
            if let Some((_, errno)) = self.refuses.iter().find(|(refused, _)| *refused == kind) {
                return Err(*errno);
            }
            self.written.push(kind);
            Ok(())
        }

        fn write_singly(&mut self, delivery: &Delivery) -> u64 {
            self.cut.extend(delivery.offload.segment.map(|segment| segment.kind));
            // One of the single packets is refused.
            1
        }
    }

    const SINGLE: Option<SegmentKind> = None;
    const TCP: Option<SegmentKind> = Some(SegmentKind::Tcp);
    const UDP: Option<SegmentKind> = Some(SegmentKind::Udp);

    /// Delivers one packet of each kind; returns what was lost, and whether fewer offloads remain.
    fn deliver(deliverer: &mut Deliverer, device: &mut FakeDevice) -> Result<(u64, bool), Error> {
        let packet = |kind: Option<SegmentKind>| Delivery {
            header: 0..40,
            pieces: 0..1,
            offload: Offload { segment: kind.map(|kind| Segment { kind, size: 1200 }), checksum: Some((20, 16)) },
            header_len: 40,
            tunnel: None,
        };
        let lost = IoCounter::default();
        let deliveries = [packet(TCP), packet(SINGLE), packet(UDP)];
        let stepped = deliverer.deliver(&deliveries, &lost, device)?;
        Ok((lost.get(), stepped))
    }

    #[test]
    fn each_refused_kind_of_super_packet_is_written_singly_and_is_a_step_down() {
        for (offloads, kind, below) in [
            (TunOffloads::TcpAndUdp, UDP, TunOffloads::Tcp),
            (TunOffloads::TcpAndUdp, TCP, TunOffloads::None),
            (TunOffloads::Tcp, TCP, TunOffloads::None),
        ] {
            let mut device = FakeDevice { refuses: vec![(kind, Errno::EINVAL)], ..FakeDevice::default() };
            let mut deliverer = Deliverer::new(offloads);
            assert_eq!(deliver(&mut deliverer, &mut device).unwrap(), (1, true));
            assert_eq!(deliverer.offloads(), below, "from {offloads:?}");
            assert!(device.written.contains(&SINGLE) && device.written.len() == 2, "the others were written");
            assert_eq!(device.cut, [kind.unwrap()]);
        }
    }

    #[test]
    fn a_device_that_is_down_loses_packets_and_keeps_its_offloads() {
        for errno in [Errno::EIO, Errno::ENOBUFS, Errno::EAGAIN, Errno::ENOMEM] {
            let refuses = vec![(TCP, errno), (SINGLE, errno), (UDP, errno)];
            let mut device = FakeDevice { refuses, ..FakeDevice::default() };
            let mut deliverer = Deliverer::new(TunOffloads::TcpAndUdp);
            assert_eq!(deliver(&mut deliverer, &mut device).unwrap(), (3, false));
            assert_eq!(deliverer.offloads(), TunOffloads::TcpAndUdp, "{errno}");
            assert!(device.cut.is_empty(), "a device that is down takes no single packets either");
            device.refuses.clear();
            assert_eq!(deliver(&mut deliverer, &mut device).unwrap(), (0, false), "up again after {errno}");
        }
    }

    #[test]
    fn a_single_packet_that_is_refused_says_nothing_about_super_packets() {
        let mut device = FakeDevice { refuses: vec![(SINGLE, Errno::EINVAL)], ..FakeDevice::default() };
        let mut deliverer = Deliverer::new(TunOffloads::TcpAndUdp);
        assert_eq!(deliver(&mut deliverer, &mut device).unwrap(), (1, false));
        assert_eq!(deliverer.offloads(), TunOffloads::TcpAndUdp);
    }

    #[test]
    fn a_device_that_is_gone_ends_the_delivery() {
        for errno in [Errno::EBADFD, Errno::EBADF] {
            let mut device = FakeDevice { refuses: vec![(TCP, errno)], ..FakeDevice::default() };
            assert!(deliver(&mut Deliverer::new(TunOffloads::TcpAndUdp), &mut device).is_err());
            assert!(device.written.is_empty());
        }
    }
}
