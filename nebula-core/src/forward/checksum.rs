//! The Internet checksum (RFC 1071).

use std::ops::Range;

/// One's complement sum of big-endian words, not yet folded. Every piece added but the last must have an even length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum(u64);

impl Sum {
    /// Adds bytes.
    #[must_use]
    #[allow(clippy::should_implement_trait, reason = "bytes are added to a sum, not a sum to another")]
    pub fn add(self, bytes: &[u8]) -> Self {
        // The sum in native byte order is the byte-swapped sum, so it is swapped once at the end. Eight lanes and
        // additions without overflow checks let the compiler vectorise the loop; no packet is long enough to overflow a
        // lane.
        let mut lanes = [0_u64; 8];
        let (blocks, rest) = bytes.as_chunks::<32>();
        for block in blocks {
            let (words, _) = block.as_chunks::<4>();
            for (lane, word) in lanes.iter_mut().zip(words) {
                *lane = lane.wrapping_add(u64::from(u32::from_ne_bytes(*word)));
            }
        }
        let mut native = lanes.into_iter().fold(0, u64::wrapping_add);
        let (words, last) = rest.as_chunks::<2>();
        for word in words {
            native = native.wrapping_add(u16::from_ne_bytes(*word).into());
        }
        if let [last] = *last {
            native = native.wrapping_add(u16::from_ne_bytes([last, 0]).into());
        }
        Self(self.0 + u64::from(u16::from_be(fold(native))))
    }

    /// Adds one 16-bit word.
    #[must_use]
    pub fn add_number(self, number: u16) -> Self {
        Self(self.0 + u64::from(number))
    }

    /// Adds the pseudo-header of TCP, UDP or ICMPv6 over the packet's addresses, the source's and then the
    /// destination's.
    #[must_use]
    pub fn add_pseudo_header(self, addresses: &[u8], protocol: u8, transport_len: usize) -> Self {
        self.add(addresses).add_number(protocol.into()).add_number(transport_len as u16)
    }

    /// The sum itself, which a packet carries when the device is to complete its checksum.
    #[must_use]
    pub fn partial(self) -> u16 {
        fold(self.0)
    }

    /// The complement, as a header carries it. Never 0, which means "no checksum" in UDP; 0 and 0xffff are the same
    /// number in one's complement.
    #[must_use]
    pub fn complement(self) -> u16 {
        match !fold(self.0) {
            0 => 0xffff,
            sum => sum,
        }
    }
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Writes a fresh IPv4 header checksum into a header of at least 20 bytes.
///
/// # Panics
/// If the header is shorter than 12 bytes.
pub fn finish_ipv4_header(header: &mut [u8]) {
    header[10..12].fill(0);
    let sum = Sum::default().add(header);
    header[10..12].copy_from_slice(&(!sum.partial()).to_be_bytes());
}

/// Completes a checksum field that holds the sum of the pseudo-header, over everything from `start` on. Returns `false`
/// if the field lies outside the packet.
pub(super) fn finish_partial(packet: &mut [u8], start: usize, offset: usize) -> bool {
    let field: Range<usize> = start + offset..start + offset + 2;
    if packet.get(field.clone()).is_none() {
        return false;
    }
    let sum = Sum::default().add(&packet[start..]).complement();
    packet[field].copy_from_slice(&sum.to_be_bytes());
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::naive_sum;
    use super::*;

    #[test]
    fn a_known_header_gets_its_known_checksum() {
        let mut header = *b"\x45\x00\x00\x73\x00\x00\x40\x00\x40\x11\xff\xff\xc0\xa8\x00\x01\xc0\xa8\x00\xc7";
        finish_ipv4_header(&mut header);
        assert_eq!(header[10..12], [0xb8, 0x61]);
    }

    #[test]
    fn a_place_outside_the_packet_is_refused() {
        assert!(!finish_partial(&mut [0; 40], 20, 19));
        assert!(!finish_partial(&mut [0; 40], 65535, 65535));
        assert!(finish_partial(&mut [0; 40], 20, 18));
    }

    proptest! {
        #[test]
        fn the_fast_sum_is_the_naive_sum(bytes: Vec<u8>, split in 0_usize..64) {
            let sum = Sum::default().add(&bytes).partial();
            prop_assert_eq!(sum, naive_sum(&[&bytes]));
            let (head, tail) = bytes.split_at((split * 2).min(bytes.len() / 2 * 2));
            prop_assert_eq!(Sum::default().add(head).add(tail).partial(), sum);
        }
    }
}
