//! The hash of flows in the table: a tenth of the time of the standard library's, which must withstand keys of
//! anybody, and made once for all that is done with a flow.
//!
//! Only the pod itself adds flows. The key is random all the same.

use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState};

use crate::wire::ip::{FlowKey, protocol};

/// A flow with its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    hash: u64,
    flow: FlowKey,
}

impl Key {
    /// A number for the flow alone: that of another flow is another one but for an accident in 2^64.
    pub(super) fn number(&self) -> u64 {
        self.hash
    }

    pub(super) fn is_tcp(&self) -> bool {
        self.flow.protocol == protocol::TCP
    }
}

impl Hash for Key {
    #[inline]
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write_u64(self.hash);
    }
}

/// For maps by [`Key`], which has its hash already.
pub(super) type Hashed = BuildHasherDefault<Given>;

/// Takes one number for the hash.
#[derive(Debug, Default)]
pub(super) struct Given(u64);

impl Hasher for Given {
    /// A key writes nothing but its hash.
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

/// Hashes flows with one random key.
#[derive(Debug)]
pub(super) struct Keyed(u64);

impl Default for Keyed {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0))
    }
}

impl Keyed {
    #[inline]
    pub(super) fn key(&self, flow: &FlowKey) -> Key {
        let mut hasher = Mixed(self.0);
        flow.hash(&mut hasher);
        Key { hash: hasher.finish(), flow: *flow }
    }
}

/// Multiplies and folds each word.
#[derive(Debug)]
struct Mixed(u64);

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
