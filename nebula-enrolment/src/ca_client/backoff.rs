//! Jitter: spreads requests that many instances would otherwise make at the same moment.

use std::time::Duration;

use nebula_cni_contract::hash::mix;

/// A small random generator; spreading load needs no secrecy.
#[derive(Debug)]
pub(crate) struct Jitter(pub(crate) u64);

impl Jitter {
    /// A random duration between zero and `limit`.
    pub(crate) fn below(&mut self, limit: Duration) -> Duration {
        // SplitMix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let fraction = mix(self.0) >> 40;
        limit.mul_f64(fraction as f64 / f64::from(1u32 << 24))
    }

    /// `wait`, plus or minus up to a quarter.
    pub(crate) fn around(&mut self, wait: Duration) -> Duration {
        wait * 3 / 4 + self.below(wait / 2)
    }
}

/// A seed for `Jitter`. Without randomness, the process ID still spreads the load a little.
pub fn seed() -> u64 {
    getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id()))
}
