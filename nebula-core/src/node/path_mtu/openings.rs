//! Packets that open connections, and wait until the path of their tunnel was examined.

use crate::PacketOwned;

/// Holds such packets in order, up to a number of bytes.
///
/// What they announce holds as long as the connection, so it is worth a wait of some milliseconds. One that finds no
/// room is lost, and its sender waits for a second before it tries again: an ordinary burst, such as a browser or a
/// pool of connections opens, has to fit.
#[derive(Debug, Default)]
pub(in crate::node) struct Openings {
    packets: Vec<PacketOwned>,
    bytes: usize,
}

impl Openings {
    pub(in crate::node) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// # Errors
    /// Returns the packet if there is no room.
    pub(super) fn push(&mut self, packet: PacketOwned) -> Result<(), PacketOwned> {
        let bytes = self.bytes + size_of::<PacketOwned>() + packet.bytes.len();
        if bytes > MAX_BYTES {
            return Err(packet);
        }
        self.bytes = bytes;
        self.packets.push(packet);
        Ok(())
    }

    pub(in crate::node) fn take(&mut self) -> Vec<PacketOwned> {
        self.bytes = 0;
        std::mem::take(&mut self.packets)
    }
}

/// About 500 packets of the usual size.
const MAX_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::Offload;

    fn packet(length: usize) -> PacketOwned {
        PacketOwned { bytes: vec![0; length], offload: Offload::default() }
    }

    #[test]
    fn hundreds_of_small_packets_wait_and_few_large_ones_until_they_are_taken() {
        for (length, least, most) in [(60, 400, 800), (1300, 40, 50), (65_000, 1, 1)] {
            let mut openings = Openings::default();
            let held = (0..1000).filter(|_| openings.push(packet(length)).is_ok()).count();
            assert!((least..=most).contains(&held), "{held} of {length} bytes");
            assert_eq!(openings.take().len(), held);
            assert!(openings.push(packet(length)).is_ok(), "there is room again");
        }
    }
}
