//! What may be sent to callers that are not confirmed, beyond three times what came from them.

use std::net::IpAddr;
use std::time::Instant;

use crate::Origin;
use crate::buckets::{Buckets, SLOTS};

/// A certificate with many groups or networks makes a message 2 that is much longer than three messages 1. Each
/// caller gets it at once all the same. So that nobody can use this node to flood somebody else, there is a limit for
/// each source address and one for all, as callers with forged addresses would reach them; a caller that proves to be
/// there gives back what it got.
#[derive(Debug)]
pub(super) struct Excess {
    by_source: Buckets,
    total: Buckets,
}

impl Excess {
    pub(super) fn new(now: Instant, key: u64) -> Self {
        let by_source = Buckets::new(SOURCE_BYTES, SOURCE_BYTES_PER_SECOND, SLOTS, now, key);
        let total = Buckets::new(TOTAL_BYTES, TOTAL_BYTES_PER_SECOND, 1, now, key);
        Self { by_source, total }
    }

    /// Whether so many bytes may be sent there. A relay passes them on to a member, and to no other address.
    pub(super) fn take(&mut self, now: Instant, to: Origin, bytes: usize) -> bool {
        let Origin::Direct(at) = to else { return true };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if !self.by_source.take(now, at.ip(), bytes) {
            return false;
        }
        let may = self.total.take(now, ANY, bytes);
        if !may {
            self.by_source.give_back(now, at.ip(), bytes);
        }
        may
    }

    /// They arrived where they were asked for.
    pub(super) fn give_back(&mut self, now: Instant, to: Origin, bytes: usize) {
        if let (Origin::Direct(at), bytes @ 1..) = (to, u32::try_from(bytes).unwrap_or(u32::MAX)) {
            self.by_source.give_back(now, at.ip(), bytes);
            self.total.give_back(now, ANY, bytes);
        }
    }
}

/// All addresses share one bucket.
const ANY: IpAddr = IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED);
/// Seventeen of the largest messages, or two hundred with a hundred groups in the certificate: a whole office may
/// call at once.
const SOURCE_BYTES: u32 = 128 << 10;
/// One of the largest every two seconds.
const SOURCE_BYTES_PER_SECOND: u32 = 4 << 10;
const TOTAL_BYTES: u32 = 8 << 20;
const TOTAL_BYTES_PER_SECOND: u32 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn source(host: u8) -> Origin {
        Origin::Direct(([192, 0, 2, host], 4242).into())
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn forged_sources_reach_a_limit_and_callers_that_are_there_do_not() {
        let now = Instant::now();
        let mut excess = Excess::new(now, 5);
        let forged = (0..100).filter(|_| excess.take(now, source(1), 7_500)).count();
        assert_eq!(forged, 17);
        assert!(!excess.take(now, source(1), 7_500) && excess.take(now, source(2), 7_500));
        assert!(excess.take(now + Duration::from_secs(2), source(1), 7_500));
        for _ in 0..1000 {
            assert!(excess.take(now, source(3), 7_500));
            excess.give_back(now, source(3), 7_500);
        }
        let all = (4..=255).flat_map(|host| [host; 17]).filter(|host| excess.take(now, source(*host), 7_500)).count();
        assert!((1000..1200).contains(&all), "{all}");
    }
}
