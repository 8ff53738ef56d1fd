//! A hash function for the maps that are made again with each table: one of the standard library's costs several times
//! as much in a program that is built for size.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher};

use nebula_cni_contract::hash::mix;

/// A map with this hash function.
pub(crate) type Map<K, V> = HashMap<K, V, Seeded>;
/// A set with this hash function.
pub(crate) type Set<K> = HashSet<K, Seeded>;

/// Hashes with a secret of this map. Each word of a key goes through a permutation of 64 bits, so two keys that differ
/// in one word only, such as two addresses, never have the same hash; whoever wants to make others collide has to know
/// the secret.
#[derive(Debug, Clone)]
pub(crate) struct Seeded(u64);

impl Default for Seeded {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for Seeded {
    type Hasher = State;

    fn build_hasher(&self) -> State {
        State(self.0)
    }
}

/// A hash so far.
#[derive(Debug)]
pub(crate) struct State(u64);

impl Hasher for State {
    #[inline(always)]
    fn finish(&self) -> u64 {
        self.0
    }

    #[inline(always)]
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.write_u64(u64::from_le_bytes(*word)));
        if !rest.is_empty() {
            let mut word = [0; 8];
            word.iter_mut().zip(rest).for_each(|(place, byte)| *place = *byte);
            // At most seven bytes: the last place says how many.
            word[7] = rest.len() as u8;
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    #[inline(always)]
    fn write_u8(&mut self, n: u8) {
        self.write_u64(n.into());
    }

    #[inline(always)]
    fn write_u64(&mut self, n: u64) {
        self.0 = mix(self.0 ^ n);
    }

    #[inline(always)]
    fn write_u128(&mut self, n: u128) {
        self.write_u64((n >> 64) as u64);
        self.write_u64(n as u64);
    }

    #[inline(always)]
    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn addresses_and_names_have_hashes_of_their_own_and_each_map_others() {
        let (one, other) = (Seeded::default(), Seeded::default());
        let addresses = (0..40_000_u32).flat_map(|n| {
            let low = Ipv4Addr::from_bits(0x0af4_0000 + n);
            [IpAddr::from(low), Ipv6Addr::from_bits(0xfd << 120 | u128::from(n)).into()]
        });
        let hashes: HashSet<u64> = addresses.map(|address| one.hash_one(address)).collect();
        assert_eq!(hashes.len(), 80_000);
        // The bits by which a map chooses a place, and those by which it recognizes an entry.
        let low: HashSet<u64> = hashes.iter().map(|hash| hash & 0xffff).collect();
        let high: HashSet<u64> = hashes.iter().map(|hash| hash >> 57).collect();
        assert!(low.len() > 40_000 && high.len() == 128, "{} of 65,536", low.len());
        let names: HashSet<u64> = (0..1_000).map(|n| one.hash_one(format!("node-{n}"))).collect();
        assert_eq!(names.len(), 1_000);
        assert_ne!(one.hash_one("ab"), one.hash_one("ab\0"));
        assert_ne!(one.hash_one(7_u128), other.hash_one(7_u128), "the secret is of the map");
    }
}
