//! Session affinity: the endpoint that each Service of this pod had last.

use std::collections::HashMap;
use std::time::Duration;

use super::{Directory, Endpoint, Service, Target};

/// Maximum number of Services with affinity that are remembered.
const MAX_SERVICES: usize = 1024;

/// The last endpoint by Service. The only client is this pod.
#[derive(Debug, Default)]
pub(super) struct Affinities(HashMap<Target, Affinity>);

#[derive(Debug, Clone, Copy)]
struct Affinity {
    /// Its position among the endpoints to choose from, when it was last looked for.
    n: u32,
    endpoint: Endpoint,
    until: u64,
}

impl Affinities {
    /// The endpoint that a new flow keeps to, with its position: the last one, if that can still be chosen and affinity
    /// has not ended. Times are milliseconds.
    pub(super) fn of(
        &self,
        directory: &dyn Directory,
        target: &Target,
        service: &Service,
        now: u64,
    ) -> Option<(u32, Endpoint)> {
        service.affinity?;
        let known = self.0.get(target).filter(|known| now < known.until)?;
        let is_at = |n: u32| directory.endpoint(service, n) == Some(known.endpoint);
        let n = if is_at(known.n) { known.n } else { (0..service.ready).find(|n| is_at(*n))? };
        Some((n, known.endpoint))
    }

    /// Remembers the choice for a new flow; affinity lasts from the last one.
    pub(super) fn note(&mut self, target: Target, service: &Service, (n, endpoint): (u32, Endpoint), now: u64) {
        let Some(lasts) = service.affinity else { return };
        if self.0.len() >= MAX_SERVICES && !self.0.contains_key(&target) {
            self.expire(now);
            let soonest = self.0.iter().min_by_key(|(_, known)| known.until).map(|(target, _)| *target);
            if let Some(soonest) = soonest.filter(|_| self.0.len() >= MAX_SERVICES) {
                self.0.remove(&soonest);
            }
        }
        self.0.insert(target, Affinity { n, endpoint, until: now.saturating_add(millis(lasts)) });
    }

    pub(super) fn expire(&mut self, now: u64) {
        self.0.retain(|_, known| now < known.until);
        self.0.shrink_to(2 * self.0.len());
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
