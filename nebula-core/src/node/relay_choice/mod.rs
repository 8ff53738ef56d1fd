//! Chooses the relays by which peers reach this node, among those that lighthouses offer: two at a time, by round
//! trip and loss.
//!
//! A relay is tried before it is chosen: there has to be a direct tunnel to it, its certificate has to have a group
//! of `relay.groups`, and it has to answer a request for a hop. All others that are offered are surveyed one by one,
//! slowly. Of equally good relays the rendezvous hash of host and relay decides, which distributes hosts over relays.

mod gauge;
mod keeping;
mod offers;
mod relay;
mod reports;
mod round;
mod status;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::SeedableRng as _;

pub(super) use self::offers::{Offers, lot};
use self::relay::{Relay, Stage};
use self::round::Standing;
pub use self::status::{OfferedRelay, RelayReason, RelayTrouble};
use super::path_choice::Load;
use crate::capture::scramble_address;

/// What is known about the relays that lighthouses offer. Sends nothing: each round returns what to do.
#[derive(Debug)]
pub(super) struct RelayChoice {
    /// First overlay address of this node.
    own: IpAddr,
    relays: BTreeMap<IpAddr, Relay>,
    /// No relay is tried before.
    fill_at: Instant,
    /// The next relay that is not chosen is surveyed.
    survey_at: Instant,
    survey_pause: Duration,
    /// A chosen relay was lossy at the last round.
    is_lossy: bool,
    /// Number of the present pass over all relays.
    pass: u32,
    /// Makes the numbers of probes: who could guess them would answer before they arrive.
    numbers: ChaCha20Rng,
    /// State of the random numbers for jitter.
    random: u64,
}

impl RelayChoice {
    /// `seed` makes the jitter.
    fn new(now: Instant, own: IpAddr, seed: u64) -> Self {
        let mut new = Self {
            own,
            relays: BTreeMap::new(),
            fill_at: now,
            survey_at: now,
            survey_pause: SURVEY_EVERY,
            is_lossy: false,
            pass: 1,
            numbers: ChaCha20Rng::seed_from_u64(seed),
            random: seed,
        };
        new.fill_at = now + new.jitter(SOON);
        new
    }

    /// Whether a relay is one of those that are chosen or tried.
    pub(super) fn uses(&self, relay: IpAddr) -> bool {
        self.relays.get(&relay).is_some_and(|relay| relay.stage != Stage::Idle)
    }

    /// Relays that are chosen or tried.
    fn in_use(&self) -> impl Iterator<Item = IpAddr> {
        self.relays.iter().filter(|(_, relay)| relay.stage != Stage::Idle).map(|(address, _)| *address)
    }

    fn knows(&self, relay: IpAddr) -> bool {
        self.relays.contains_key(&relay)
    }

    /// A lighthouse offers these relays, and no others.
    fn offered(&mut self, now: Instant, lighthouse: IpAddr, relays: &[IpAddr]) {
        let mut named = BTreeSet::new();
        named.extend(relays.iter().take(MAX_OFFERS).copied().filter(|relay| *relay != self.own));
        for (address, relay) in &mut self.relays {
            if named.contains(address) {
                relay.by.insert(lighthouse);
                relay.withdrawn = None;
            } else {
                relay.no_longer_by(now, lighthouse);
            }
        }
        for address in named {
            if self.relays.contains_key(&address) || !self.make_room() {
                continue;
            }
            let lot = lot(self.own, address);
            self.relays.insert(address, Relay::new(now, lot, lighthouse));
        }
    }

    /// These are the lighthouses from now on.
    fn set_lighthouses(&mut self, now: Instant, lighthouses: &[IpAddr]) {
        for relay in self.relays.values_mut() {
            for gone in relay.by.iter().filter(|by| !lighthouses.contains(by)).copied().collect::<Vec<_>>() {
                relay.no_longer_by(now, gone);
            }
        }
    }

    /// Returns whether one more relay may be remembered. One that is of no use is forgotten for it.
    fn make_room(&mut self) -> bool {
        if self.relays.len() < MAX_KNOWN {
            return true;
        }
        let spare = self.relays.iter().filter(|(_, relay)| relay.stage == Stage::Idle && relay.withdrawn.is_some());
        let Some(oldest) = spare.min_by_key(|(_, relay)| relay.withdrawn).map(|(address, _)| *address) else {
            return false;
        };
        self.relays.remove(&oldest);
        true
    }

    /// The answer to a test request. Returns whether it was awaited.
    fn answered(&mut self, now: Instant, relay: IpAddr, number: u32) -> bool {
        self.relays.get_mut(&relay).is_some_and(|relay| relay.gauge.answered(now, number))
    }

    /// Like [`RelayChoice::answered`], for a relay whose answers have no numbers.
    fn answered_any(&mut self, now: Instant, relay: IpAddr) -> bool {
        let number = self.relays.get(&relay).and_then(|relay| relay.gauge.awaited());
        number.is_some_and(|number| self.answered(now, relay, number))
    }

    /// A peer that is reached through a relay shows what became of datagrams. Returns whether the relay drops most of
    /// them.
    fn note_carried(&mut self, now: Instant, relay: IpAddr, peer: IpAddr, load: Load) -> bool {
        let Some(relay) = self.relays.get_mut(&relay).filter(|relay| relay.stage != Stage::Idle) else { return false };
        relay.reports.note(now, peer, load);
        relay.reports.say_dropped(now)
    }

    /// A relay answered the request for a hop.
    fn served(&mut self, relay: IpAddr) {
        if let Some(relay) = self.relays.get_mut(&relay) {
            (relay.serves, relay.requests.0) = (Some(true), 0);
            relay.reason.take_if(|reason| *reason == RelayReason::LastResort);
            if relay.is_chosen() {
                relay.reason.get_or_insert(RelayReason::Hash);
            }
            relay.trouble.take_if(|trouble| *trouble == RelayTrouble::Refuses);
        }
    }

    /// The relays that peers are told to use: those that serve, if there is any.
    pub(super) fn advertised(&self) -> Vec<IpAddr> {
        let chosen = || self.relays.iter().filter(|(_, relay)| relay.is_chosen());
        let serving: Vec<_> = chosen().filter(|(_, relay)| relay.serves == Some(true)).map(|(at, _)| *at).collect();
        if serving.is_empty() { chosen().map(|(at, _)| *at).collect() } else { serving }
    }

    /// Every relay that is known, in order of address.
    pub(super) fn status(&self) -> impl Iterator<Item = OfferedRelay> + '_ {
        self.relays.iter().map(|(address, relay)| OfferedRelay {
            relay: *address,
            is_chosen: relay.is_chosen(),
            is_tried: matches!(relay.stage, Stage::Trial { .. }),
            offered_by: relay.by.len(),
            serves: relay.serves,
            round_trip: relay.gauge.round_trip(),
            loss: relay.gauge.loss(),
            reason: relay.reason.filter(|_| relay.is_chosen()),
            trouble: relay.trouble,
        })
    }

    /// A random time below `most`.
    fn jitter(&mut self, most: Duration) -> Duration {
        self.random = scramble_address(self.random, self.own);
        most.mul_f64((self.random >> 32) as f64 / f64::from(u32::MAX))
    }
}

/// Relays that a lighthouse may offer, and those that are remembered of all lighthouses.
pub(super) const MAX_OFFERS: usize = crate::wire::messages::MAX_RELAYS;
const MAX_KNOWN: usize = 32;
/// Time between two surveys in the first pass over all relays, and in later ones.
const SURVEY_EVERY: Duration = Duration::from_secs(30);
/// A relay that failed is not tried again so soon; the time doubles with each failure.
const RETRY_AFTER: Duration = Duration::from_secs(30);
/// The same for what cannot wait.
const SOON: Duration = Duration::from_secs(1);

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
