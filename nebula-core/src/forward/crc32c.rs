//! The checksum of SCTP (CRC32c, RFC 9260 appendix A), corrected by the difference: a CRC is linear, so the packet
//! need not be read.

/// What a change of the first four bytes of a packet of `len` bytes, given as their exclusive or, adds to its
/// checksum (also by exclusive or). Both are the numbers that the bytes are in little-endian order, as SCTP sends its
/// checksum.
pub(super) fn change(of_first_four: u32, len: usize) -> u32 {
    // The first bytes count as a polynomial, times x for each bit from their beginning to the end of the packet.
    let mut product = of_first_four;
    for (bit, power) in POWERS.iter().enumerate() {
        if len >> bit & 1 == 1 {
            product = multiply(*power, product);
        }
    }
    product
}

/// x to the power of 8, 16, 32, ..., modulo the polynomial: no packet is longer than the sum.
const POWERS: [u32; 17] = {
    let mut powers = [1 << 23; 17];
    let mut n = 1;
    while n < powers.len() {
        powers[n] = multiply(powers[n - 1], powers[n - 1]);
        n += 1;
    }
    powers
};

/// Multiplies two polynomials modulo that of CRC32c. The highest bit is the coefficient of 1.
const fn multiply(a: u32, mut b: u32) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let (mut product, mut bit) = (0, 1 << 31);
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = if b & 1 == 1 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
        bit >>= 1;
    }
    product
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The checksum bit by bit.
    pub(crate) fn naive_crc(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 })
        })
    }

    #[test]
    fn the_check_value_of_the_polynomial_is_the_published_one() {
        assert_eq!(naive_crc(b"123456789"), 0xe306_9283);
    }

    proptest! {
        #[test]
        fn a_corrected_checksum_is_that_of_the_changed_packet(
            bytes in prop::collection::vec(any::<u8>(), 4..3000), first: [u8; 4],
        ) {
            let mut changed = bytes.clone();
            changed[..4].copy_from_slice(&first);
            let difference = u32::from_le_bytes(first) ^ u32::from_le_bytes(*bytes.first_chunk().unwrap());
            prop_assert_eq!(naive_crc(&bytes) ^ change(difference, bytes.len()), naive_crc(&changed));
        }
    }
}
