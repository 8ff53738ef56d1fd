//! The hash used in the names of files, units and tables.

/// FNV-1a, to shorten long names. It does not resist collisions that an adversary constructs.
pub(crate) fn fnv1a(parts: &[&str]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
