//! Writes packets to the overlay device, and takes a step down when the kernel refuses super-packets.

use nix::errno::Errno;

use super::Error;
use super::shared::IoCounter;
use super::tun::TunOffloads;
use crate::forward::{Delivery, SegmentKind};

/// Where packets for the overlay go.
pub(super) trait Device {
    /// Writes a packet as it is.
    fn write(&mut self, delivery: &Delivery) -> Result<(), Errno>;

    /// Writes a super-packet as the packets it was joined from. Returns how many the device refused.
    fn write_singly(&mut self, delivery: &Delivery) -> u64;
}

/// What one thread may write to its queue.
#[derive(Debug)]
pub(super) struct Deliverer {
    offloads: TunOffloads,
}

impl Deliverer {
    pub(super) fn new(offloads: TunOffloads) -> Self {
        Self { offloads }
    }

    /// What the device takes, as far as is known.
    pub(super) fn offloads(&self) -> TunOffloads {
        self.offloads
    }

    /// Writes each packet to `device`. What it refuses is lost and counted in `lost`, but a super-packet is tried again as
    /// single packets. `true`: the device takes fewer kinds of super-packets than before.
    ///
    /// # Errors
    /// The device is gone.
    pub(super) fn deliver(
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
        // Some kernels refuse some super-packets; what comes from now on is not joined.
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

    /// Stands for a tun device: refuses what it is told to refuse, and keeps a list of the rest.
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

    /// Delivers one packet of each kind; what is lost, and whether a step down was taken.
    fn deliver(deliverer: &mut Deliverer, device: &mut FakeDevice) -> Result<(u64, bool), Error> {
        let packet = |kind: Option<SegmentKind>| Delivery {
            header: 0..40,
            pieces: 0..1,
            offload: Offload { segment: kind.map(|kind| Segment { kind, size: 1200 }), checksum: Some((20, 16)) },
            header_len: 40,
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
