//! Token buckets by address, in bounded memory.

use std::net::IpAddr;
use std::time::Instant;

/// Limits what is spent for each address. The addresses of an IPv6 network (/64) share a bucket, since the owner of
/// one has them all; and so do other addresses with the same hash, which nobody can predict.
#[derive(Debug)]
pub(crate) struct Buckets {
    /// What a bucket that was not used for a while holds.
    capacity: u32,
    per_second: u32,
    key: u64,
    epoch: Instant,
    slots: usize,
    /// Allocated when the first bucket is used.
    buckets: Vec<Bucket>,
}

/// What was spent of the capacity, as of a time in milliseconds since the epoch.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    spent: u32,
    at: u32,
}

impl Buckets {
    /// `key` is random. With one of the `slots`, all addresses share it.
    pub(crate) fn new(capacity: u32, per_second: u32, slots: usize, now: Instant, key: u64) -> Self {
        Self { capacity, per_second, key, epoch: now, slots: slots.max(1), buckets: Vec::new() }
    }

    /// Whether so much may be spent for this address; it counts as spent then.
    pub(crate) fn take(&mut self, now: Instant, address: IpAddr, amount: u32) -> bool {
        let (capacity, bucket) = (self.capacity, self.bucket(now, address));
        let spent = bucket.spent.saturating_add(amount);
        let may = spent <= capacity;
        if may {
            bucket.spent = spent;
        }
        may
    }

    /// What was spent for this address was not in vain.
    pub(crate) fn give_back(&mut self, now: Instant, address: IpAddr, amount: u32) {
        let bucket = self.bucket(now, address);
        bucket.spent = bucket.spent.saturating_sub(amount);
    }

    /// The bucket of an address, refilled.
    fn bucket(&mut self, now: Instant, address: IpAddr) -> &mut Bucket {
        if self.buckets.is_empty() {
            self.buckets.resize(self.slots, Bucket::default());
        }
        let at = u32::try_from(now.saturating_duration_since(self.epoch).as_millis()).unwrap_or(u32::MAX);
        let (slot, per_second) = (self.slot(address), u64::from(self.per_second));
        let bucket = &mut self.buckets[slot];
        let passed = u64::from(at.saturating_sub(bucket.at));
        let refill = passed.saturating_mul(per_second) / 1000;
        if refill >= u64::from(bucket.spent) {
            (bucket.spent, bucket.at) = (0, at);
        } else if refill > 0 {
            bucket.spent -= refill as u32;
            // Only by the time that became tokens, so that no fraction is lost however often this is called.
            bucket.at += (refill * 1000 / per_second.max(1)) as u32;
        }
        bucket
    }

    fn slot(&self, address: IpAddr) -> usize {
        let source = match address.to_canonical() {
            IpAddr::V4(address) => u64::from(address.to_bits()),
            IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
        };
        let mut hash = source ^ self.key;
        for word in [self.key.rotate_left(32), self.key.rotate_left(17)] {
            hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) ^ word;
        }
        (hash >> 32) as usize % self.slots
    }
}

/// The usual number of buckets: 32 KiB.
pub(crate) const SLOTS: usize = 4096;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    fn source(host: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, host])
    }

    #[test]
    fn a_bucket_holds_its_capacity_and_refills_evenly() {
        let start = base();
        let mut buckets = Buckets::new(1000, 100, SLOTS, start, 0x0123_4567_89ab_cdef);
        assert!(
            buckets.take(start, source(1), 999)
                && !buckets.take(start, source(1), 2)
                && buckets.take(start, source(1), 1)
        );
        assert!(buckets.take(start, source(2), 1000), "another address has a bucket of its own");
        let taken =
            (1..=10_000_u32).filter(|n| buckets.take(start + Duration::from_millis((*n).into()), source(1), 1)).count();
        assert_eq!(taken, 1000, "ten seconds at a hundred");
        assert!(!buckets.take(start + Duration::from_secs(10), source(1), 1));
        buckets.give_back(start + Duration::from_secs(10), source(1), 5);
        assert!(buckets.take(start + Duration::from_secs(10), source(1), 5));
        assert!(buckets.take(start + Duration::from_secs(1000), source(1), 1000));
    }

    #[test]
    fn the_addresses_of_one_ipv6_network_are_one() {
        let start = base();
        let mut buckets = Buckets::new(10, 1, SLOTS, start, 7);
        assert!(buckets.take(start, "2001:db8::1".parse().unwrap(), 10));
        assert!(!buckets.take(start, "2001:db8::2".parse().unwrap(), 1));
        assert!(buckets.take(start, "2001:db8:0:1::2".parse().unwrap(), 1));
    }
}
