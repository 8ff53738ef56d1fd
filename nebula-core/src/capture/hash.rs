//! The hash of flows in the table: a tenth of the time of the standard library's, which must withstand keys of anybody.
//!
//! Only the pod itself adds flows. The key is random all the same.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Makes hashers with one random key.
#[derive(Debug, Clone)]
pub(super) struct Keyed(u64);

impl Default for Keyed {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for Keyed {
    type Hasher = Mixed;

    fn build_hasher(&self) -> Mixed {
        Mixed(self.0)
    }
}

/// Multiplies and folds each word.
#[derive(Debug)]
pub(super) struct Mixed(u64);

impl Mixed {
    #[inline]
    fn mix(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * u128::from(MULTIPLIER);
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

impl Hasher for Mixed {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_ne_bytes(word));
        }
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        self.mix(number.into());
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        self.mix(number);
    }

    #[inline]
    fn write_u128(&mut self, number: u128) {
        self.mix(number as u64);
        self.mix((number >> 64) as u64);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

/// Odd, with its ones spread evenly.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
