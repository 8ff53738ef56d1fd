//! The sizes that a search tries: those that links and tunnels usually carry.

/// The sizes of overlay packets on one path, up to what is wanted of it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ladder {
    /// MTU of the overlay device.
    mtu: u16,
    /// What the search tries to reach: that MTU, as far as a probe can be so long; 0 if there is nothing to try.
    top: u16,
    /// How much longer a datagram is on the underlay than the packet in it.
    overhead: u16,
}

impl Ladder {
    /// For a device with this MTU, by a path that adds `overhead` bytes to each packet.
    pub(super) fn new(mtu: u16, overhead: u16) -> Self {
        let top = mtu.min(MAX_PROBE - overhead);
        let is_worthwhile = LADDER.first().is_some_and(|smallest| smallest - overhead < top);
        Self { mtu, top: if is_worthwhile { top } else { 0 }, overhead }
    }

    /// MTU of the overlay device.
    pub(super) fn mtu(&self) -> u16 {
        self.mtu
    }

    /// Whether a search can find out that packets of this size pass.
    pub(super) fn is_step(&self, size: u16) -> bool {
        size > 0 && (size == self.top || self.between(0, self.top).any(|step| step == size))
    }

    pub(super) fn top(&self) -> u16 {
        self.top
    }

    /// The largest packet that could hold several TCP segments of the device; 0: none could.
    pub(super) fn jumbo(&self) -> u16 {
        let largest = MAX_PROBE - self.overhead;
        if self.top > 0 && self.is_jumbo(largest) { largest } else { 0 }
    }

    /// Whether a packet of this size could hold several TCP segments of the device.
    pub(super) fn is_jumbo(&self, size: u16) -> bool {
        size / 2 >= self.mtu
    }

    /// The next smaller one that could.
    pub(super) fn jumbo_below(&self, size: u16) -> Option<u16> {
        self.between(0, size).next_back().filter(|smaller| self.is_jumbo(*smaller))
    }

    /// Whether the device never sends a packet of more than this size.
    pub(super) fn is_enough(&self, size: u16) -> bool {
        size >= self.mtu
    }

    /// The sizes between these two, which are not among them. Those between the packets of the device and jumbo frames
    /// are of no use.
    pub(super) fn between(&self, above: u16, below: u16) -> impl DoubleEndedIterator<Item = u16> + use<> {
        let ladder = *self;
        let sizes = move || LADDER.iter().map(move |size| size - ladder.overhead);
        let jumbo = sizes().filter(move |size| *size > ladder.top && ladder.is_jumbo(*size));
        let sizes = sizes().filter(move |size| *size < ladder.top).chain([ladder.top]).chain(jumbo);
        sizes.filter(move |size| (above + 1..below).contains(size))
    }

    /// The next larger size to try.
    pub(super) fn above(&self, size: u16) -> u16 {
        self.between(size, self.top).next().unwrap_or(self.top)
    }
}

/// Sizes of IP packets that links and tunnels carry: IPv6's minimum, common encapsulations, PPPoE, Ethernet, jumbo
/// frames; and 1000 in case that nothing usual passes.
const LADDER: [u16; 11] = [1000, 1200, 1280, 1340, 1400, 1420, 1460, 1492, 1500, 4000, 9000];
/// The whole IP packet. Go Nebula reads datagrams into buffers of 9001 bytes.
pub(super) const MAX_PROBE: u16 = 9000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_is_the_mtu_of_the_device_or_what_one_datagram_carries() {
        assert_eq!(Ladder::new(1300, 60).top(), 1300);
        assert_eq!(Ladder::new(9100, 60).top(), 8940);
        assert_eq!(Ladder::new(940, 60).top(), 0, "the smallest size is no smaller");
        assert!(Ladder::new(9100, 60).is_enough(9100) && !Ladder::new(9100, 60).is_enough(8940));
    }

    #[test]
    fn jumbo_frames_hold_two_packets_of_the_device_at_least() {
        let ladder = Ladder::new(1300, 60);
        assert_eq!((ladder.jumbo(), ladder.jumbo_below(8940), ladder.jumbo_below(3940)), (8940, Some(3940), None));
        assert!(ladder.between(1220, 8940).eq([1280, 1300, 3940]));
        assert_eq!((Ladder::new(4000, 60).jumbo(), Ladder::new(4000, 60).jumbo_below(8940)), (8940, None));
        assert_eq!([4500, 8900, 65_535].map(|mtu| Ladder::new(mtu, 60).jumbo()), [0; 3]);
    }

    #[test]
    fn sizes_are_those_of_the_underlay_without_the_overhead() {
        let ladder = Ladder::new(1440, 60);
        assert!(ladder.between(1140, 1340).eq([1220, 1280]));
        assert_eq!((ladder.above(1220), ladder.above(1400)), (1280, 1432));
        assert_eq!(ladder.above(1432), 1440);
    }
}
