//! How often the API server is asked about tokens of people who revoke certificates. They have a room of their own,
//! apart from [`Admission`](crate::admission::Admission), so that a flood of their requests holds up no certificate.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nebula_cert::UnixTime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    proof::token::TokenHash,
    rate_limit::{self, RateLimit},
    refusal::Refusal,
};

/// Limits by source, and one for all strangers together. A source is known for an hour after a request from it was
/// permitted, and strangers take nothing from it: the API server's proxy is such a source.
pub(crate) struct Operators {
    state: Mutex<State>,
    /// How many requests are being decided.
    places: Arc<Semaphore>,
}

struct State {
    /// Apart from strangers, who may come from any number of sources.
    of_known: RateLimit<IpAddr>,
    of_stranger: RateLimit<IpAddr>,
    of_strangers: RateLimit<()>,
    /// Until when each source is known.
    known: HashMap<IpAddr, UnixTime>,
    /// Tokens that the API server does not accept.
    rejected: RateLimit<TokenHash>,
}

/// Permission to ask the API server about one token, until dropped.
pub(crate) struct Place {
    _permit: OwnedSemaphorePermit,
}

impl Operators {
    pub(crate) fn new() -> Self {
        let state = State {
            of_known: RateLimit::new(MAX_OF_A_SOURCE, WINDOW),
            of_stranger: RateLimit::new(MAX_OF_A_SOURCE, WINDOW),
            of_strangers: RateLimit::new(MAX_OF_STRANGERS, WINDOW),
            known: HashMap::new(),
            rejected: RateLimit::new(1, REJECTED_FOR),
        };
        Self { state: Mutex::new(state), places: Arc::new(Semaphore::new(PLACES)) }
    }

    /// Waits for a place in which the API server may be asked about a token from this source.
    pub(crate) async fn place(&self, token: &str, source: IpAddr, now: UnixTime) -> Result<Place, Refusal> {
        if !self.state().admits(&TokenHash::of(token), rate_limit::source(source), now) {
            return Err(Refusal::TooManyReviews);
        }
        let place = tokio::time::timeout(PLACE_WITHIN, Arc::clone(&self.places).acquire_owned()).await;
        let permit = place.ok().and_then(Result::ok).ok_or(Refusal::TooManyReviews)?;
        Ok(Place { _permit: permit })
    }

    /// Notes that a request of this source was permitted.
    pub(crate) fn was_permitted(&self, source: IpAddr, now: UnixTime) {
        let (mut state, source) = (self.state(), rate_limit::source(source));
        if state.known.len() >= MAX_KNOWN {
            state.known.retain(|_, until| is_within(*until, now));
        }
        if state.known.len() < MAX_KNOWN || state.known.contains_key(&source) {
            state.known.insert(source, now.saturating_add(KNOWN_FOR));
        }
    }

    /// Notes that the API server does not accept a token; it is not asked about it again for a while.
    pub(crate) fn was_rejected(&self, token: &str, now: UnixTime) {
        self.state().rejected.is_exceeded_by(TokenHash::of(token), now);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Counters stay usable after a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn admits(&mut self, token: &TokenHash, source: IpAddr, now: UnixTime) -> bool {
        if self.rejected.is_reached_by(token, now) {
            return false;
        }
        match self.known.get(&source).is_some_and(|until| is_within(*until, now)) {
            true => !self.of_known.is_exceeded_by(source, now),
            // One above its own limit uses up nothing of the common limit.
            false => !self.of_stranger.is_exceeded_by(source, now) && !self.of_strangers.is_exceeded_by((), now),
        }
    }
}

/// Also false when the clock was set back.
fn is_within(until: UnixTime, now: UnixTime) -> bool {
    (until.saturating_sub(KNOWN_FOR)..until).contains(&now)
}

const WINDOW: i64 = 60;
/// All users of one API server are one source. Each request is two questions at most.
const MAX_OF_A_SOURCE: u32 = 60;
/// Together.
const MAX_OF_STRANGERS: u32 = 60;
const KNOWN_FOR: i64 = 3_600;
const MAX_KNOWN: usize = 256;
const REJECTED_FOR: i64 = 30;
/// A twelfth of the threads that may block.
const PLACES: usize = 4;
/// With two answers of the API server, shorter than a request may take.
const PLACE_WITHIN: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: UnixTime = 1_800_000_000;

    fn admits(operators: &Operators, token: &str, source: u32, now: UnixTime) -> bool {
        let source = IpAddr::from(std::net::Ipv4Addr::from_bits(source));
        operators.state().admits(&TokenHash::of(token), source, now)
    }

    #[test]
    fn strangers_share_their_questions_and_take_none_from_a_source_that_is_known() {
        let operators = Operators::new();
        let proxy = IpAddr::from([192, 0, 2, 1]);
        operators.was_permitted(proxy, NOW);
        let flood = (0..20_000).filter(|number| admits(&operators, &number.to_string(), *number, NOW)).count();
        assert_eq!(flood, MAX_OF_STRANGERS as usize);
        let of_proxy = |now: UnixTime| {
            let source = u32::from_be_bytes([192, 0, 2, 1]);
            (0..1_000).filter(|number| admits(&operators, &number.to_string(), source, now)).count()
        };
        assert_eq!(of_proxy(NOW), MAX_OF_A_SOURCE as usize, "it has its own");
        assert_eq!(of_proxy(NOW + WINDOW), MAX_OF_A_SOURCE as usize);
        let later = NOW + KNOWN_FOR;
        let flood = (0..1_000).filter(|number| admits(&operators, "x", *number, later)).count();
        assert_eq!((flood, of_proxy(later)), (MAX_OF_STRANGERS as usize, 0), "a stranger again");
    }

    #[test]
    fn one_stranger_uses_up_its_own_questions_and_a_rejected_token_none() {
        let operators = Operators::new();
        operators.was_rejected("junk", NOW);
        assert!((0..1_000).all(|_| !admits(&operators, "junk", 1, NOW)));
        assert!(admits(&operators, "other", 1, NOW));
        assert!(admits(&operators, "junk", 1, NOW + REJECTED_FOR));
    }

    #[test]
    fn many_known_sources_take_little_memory() {
        let operators = Operators::new();
        for number in 0..10_000_u32 {
            operators.was_permitted(std::net::Ipv4Addr::from_bits(number).into(), NOW);
        }
        assert_eq!(operators.state().known.len(), MAX_KNOWN);
        operators.was_permitted([192, 0, 2, 1].into(), NOW + KNOWN_FOR);
        assert_eq!(operators.state().known.len(), 1);
    }

    #[test]
    fn whoever_finds_no_place_is_refused_instead_of_kept_waiting() {
        let operators = Operators::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let ask = |number: u32| operators.place("t", std::net::Ipv4Addr::from_bits(number).into(), NOW);
        runtime.block_on(async {
            let mut taken = Vec::new();
            for number in 0..u32::try_from(PLACES).unwrap() {
                taken.push(ask(number).await.unwrap());
            }
            assert_eq!(ask(7).await.map(drop).unwrap_err().code(), "too_many_reviews");
            taken.pop();
            assert!(ask(8).await.is_ok());
        });
    }
}
