//! Session affinity: the endpoint that each Service of this pod had last.

use std::collections::HashMap;
use std::time::Duration;

use super::chosen::Chosen;
use super::{Directory, HandedOverAffinity, Service, Target};

/// Maximum number of Services with affinity that are remembered.
const MAX_SERVICES: usize = 1024;

/// The last choice by Service. The only client is this pod.
#[derive(Debug, Default)]
pub(super) struct Affinities(HashMap<Target, Affinity>);

#[derive(Debug, Clone, Copy)]
struct Affinity {
    /// With the position that the endpoint had when it was last looked for.
    chosen: Chosen,
    until: u64,
}

impl Affinities {
    /// What a new flow keeps to: the last choice, if that can still be made and affinity has not ended. Times are
    /// milliseconds.
    pub(super) fn of(&self, directory: &dyn Directory, target: &Target, service: &Service, now: u64) -> Option<Chosen> {
        service.affinity?;
        let known = self.0.get(target).filter(|known| now < known.until)?;
        let Chosen::Endpoint(last, endpoint) = known.chosen else {
            return (service.clear > 0).then_some(Chosen::Clear);
        };
        let is_at = |n: u32| directory.endpoint(service, n) == Some(endpoint);
        let n = if is_at(last) { last } else { (0..service.ready).find(|n| is_at(*n))? };
        Some(Chosen::Endpoint(n, endpoint))
    }

    /// Remembers the choice for a new flow; affinity lasts from the last one.
    pub(super) fn note(&mut self, target: Target, service: &Service, chosen: Chosen, now: u64) {
        let Some(lasts) = service.affinity else { return };
        if self.0.len() >= MAX_SERVICES && !self.0.contains_key(&target) {
            self.expire(now);
            let soonest = self.0.iter().min_by_key(|(_, known)| known.until).map(|(target, _)| *target);
            if let Some(soonest) = soonest.filter(|_| self.0.len() >= MAX_SERVICES) {
                self.0.remove(&soonest);
            }
        }
        self.0.insert(target, Affinity { chosen, until: now.saturating_add(millis(lasts)) });
    }

    /// Those that have not ended.
    pub(super) fn entries(&self, now: u64) -> impl Iterator<Item = HandedOverAffinity> {
        self.0.iter().filter_map(move |(service, known)| {
            let endpoint = match known.chosen {
                Chosen::Endpoint(_, endpoint) => Some(endpoint),
                Chosen::Clear => None,
            };
            let left = known.until.checked_sub(now).filter(|left| *left > 0)?;
            Some(HandedOverAffinity { service: *service, endpoint, lasts: Duration::from_millis(left) })
        })
    }

    /// Remembers a choice of an earlier process of this node.
    pub(super) fn restore(&mut self, affinity: &HandedOverAffinity, now: u64) {
        let HandedOverAffinity { service, endpoint, lasts } = *affinity;
        if self.0.len() < MAX_SERVICES {
            // The position is looked for when it is needed.
            let chosen = endpoint.map_or(Chosen::Clear, |endpoint| Chosen::Endpoint(0, endpoint));
            self.0.insert(service, Affinity { chosen, until: now.saturating_add(millis(lasts)) });
        }
    }

    pub(super) fn expire(&mut self, now: u64) {
        self.0.retain(|_, known| now < known.until);
        self.0.shrink_to(2 * self.0.len());
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
