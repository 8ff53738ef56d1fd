//! How many certificates one pod and one node may get, so that none of them fills the ledger.

use std::{collections::HashMap, hash::Hash};

use nebula_cert::UnixTime;

use crate::{rate_limit::RateLimit, refusal::Refusal};

/// Certificates per pod and per node.
pub(crate) struct Quotas {
    pods: TokenBuckets<String>,
    nodes: RateLimit<String>,
}

impl Quotas {
    pub(crate) fn new() -> Self {
        Self { pods: TokenBuckets::new(POD_BURST, POD_REFILL), nodes: RateLimit::new(MAX_PER_NODE, NODE_WINDOW) }
    }

    /// Counts a certificate for the pod with this UID, shown as `pod`, on a node that Kubernetes confirmed.
    pub(crate) fn take(&mut self, uid: &str, pod: &str, node: Option<&str>, now: UnixTime) -> Result<(), Refusal> {
        if let Err(wait) = self.pods.take(uid.to_owned(), now) {
            return Err(Refusal::TooManyCertificates { of: format!("pod {pod}"), wait });
        }
        match node {
            Some(node) if self.nodes.is_exceeded_by(node.to_owned(), now) => {
                Err(Refusal::TooManyCertificates { of: format!("node {node}"), wait: NODE_WINDOW })
            }
            _ => Ok(()),
        }
    }
}

/// Allows each key a burst, and one more each so many seconds. Bounded, so that a flood of many keys does not exhaust
/// memory.
struct TokenBuckets<K> {
    burst: i64,
    /// Seconds for one token.
    refill: i64,
    /// When each bucket is full again.
    full_at: HashMap<K, UnixTime>,
    /// The bucket of all keys that did not fit.
    others: UnixTime,
}

impl<K: Hash + Eq> TokenBuckets<K> {
    fn new(burst: i64, refill: i64) -> Self {
        Self { burst, refill, full_at: HashMap::new(), others: 0 }
    }

    /// Takes a token, or returns the seconds until there is one.
    fn take(&mut self, key: K, now: UnixTime) -> Result<(), i64> {
        if self.full_at.len() >= MAX_KEYS && !self.full_at.contains_key(&key) {
            self.full_at.retain(|_, full_at| *full_at > now);
        }
        let has_room = self.full_at.len() < MAX_KEYS || self.full_at.contains_key(&key);
        let full_at = if has_room { self.full_at.entry(key).or_insert(now) } else { &mut self.others };
        let longest = self.burst * self.refill;
        // One that is full later than an empty one would be is from before the clock was set back.
        let missing = *full_at - now;
        let missing = if (0..=longest).contains(&missing) { missing } else { 0 };
        let wait = missing + self.refill - longest;
        if wait > 0 {
            return Err(wait);
        }
        *full_at = now + missing + self.refill;
        Ok(())
    }
}

/// A pod asks about twice a day, and after each restart of its instance or sandbox. One whose instance crashes again
/// and again gets a certificate each time its supervisor's backoff is over.
const POD_BURST: i64 = 30;
const POD_REFILL: i64 = 20;
/// A node starts at most a few hundred pods at once.
const MAX_PER_NODE: u32 = 1_200;
const NODE_WINDOW: i64 = 60;
const MAX_KEYS: usize = 4_096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_loop_gets_a_burst_and_then_one_at_a_time_never_a_lock_out() {
        let mut buckets = TokenBuckets::new(POD_BURST, POD_REFILL);
        assert_eq!((0..100).filter(|_| buckets.take("web", 1_000).is_ok()).count(), 30);
        assert_eq!(buckets.take("web", 1_005), Err(15));
        assert_eq!(buckets.take("other", 1_005), Ok(()));
        assert_eq!((1_005..2_005).filter(|now| buckets.take("web", *now).is_ok()).count(), 50);
        assert_eq!((0..100).filter(|_| buckets.take("web", 3_000).is_ok()).count(), 30, "full again");
    }

    #[test]
    fn a_clock_set_back_does_not_lock_a_pod_out_and_many_keys_take_bounded_memory() {
        let mut buckets = TokenBuckets::new(2, 10);
        assert!(buckets.take(1, 1_000_000).is_ok());
        assert!(buckets.take(1, 10).is_ok());
        let refused = (0..20_000).filter(|key| buckets.take(*key, 100).is_err()).count();
        assert!(buckets.full_at.len() <= MAX_KEYS && refused > 15_000, "{refused}");
        assert!(buckets.take(30_000, 200).is_ok());
    }
}
