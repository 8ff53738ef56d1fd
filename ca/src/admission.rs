//! Rate limiting and fair queueing of proofs whose check costs a request to the API server.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nebula_cert::{UnixTime, issuance::Proof};
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::{
    rate_limit::{self, RateLimit},
    refusal::Refusal,
};

/// Decides which proofs wait, and for which others. A proof that was valid recently never waits. A proof that keeps
/// failing is refused without asking the API server. Other proofs from a source with too many failures queue behind
/// each other, and all proofs not known to be valid leave room for those that are.
///
/// A source is an address, which a node and all its pods may share: no limit on a source may block a valid proof.
pub(crate) struct Admission {
    known: Mutex<Known>,
    /// Limits the checks in flight of proofs not known to be valid.
    unproven: Arc<Semaphore>,
    /// Signalled when another proof was valid.
    news: Notify,
}

struct Known {
    /// When each proof was last valid.
    good: HashMap<ProofId, UnixTime>,
    failing: RateLimit<ProofId>,
    failures: RateLimit<IpAddr>,
    /// Queues of sources with too many failures, kept while in use.
    queues: HashMap<IpAddr, Arc<Semaphore>>,
}

/// SHA-256 of a proof's secret.
type ProofId = [u8; 32];

/// How a proof is queued.
enum Place {
    /// It was valid recently, and does not wait.
    Proven,
    /// Waits together with all others about which nothing is known.
    Unproven,
    /// Waits behind the others of a source that failed too often.
    Queue(Arc<Semaphore>),
}

/// Permission to have a proof checked, until dropped.
#[derive(Default)]
pub(crate) struct Turn {
    _of_source: Option<OwnedSemaphorePermit>,
    _of_all: Option<OwnedSemaphorePermit>,
}

impl Admission {
    pub(crate) fn new() -> Self {
        let known = Known {
            good: HashMap::new(),
            failing: RateLimit::new(MAX_FAILURES_OF_A_PROOF, FAILURE_WINDOW),
            failures: RateLimit::new(MAX_FAILURES, FAILURE_WINDOW),
            queues: HashMap::new(),
        };
        Self { known: Mutex::new(known), unproven: Arc::new(Semaphore::new(MAX_UNPROVEN)), news: Notify::new() }
    }

    /// Waits for the turn of a proof whose check costs a request to the API server.
    pub(crate) async fn turn(&self, proof: &Proof, source: IpAddr, now: UnixTime) -> Result<Turn, Refusal> {
        let Some(id) = id_of(proof) else { return Ok(Turn::default()) };
        let queue = match self.place(&id, source, now)? {
            Place::Proven => return Ok(Turn::default()),
            Place::Unproven => None,
            Place::Queue(queue) => Some(queue),
        };
        let turn = async {
            let of_source = match queue {
                Some(queue) => queue.acquire_owned().await.ok(),
                None => None,
            };
            let of_all = Arc::clone(&self.unproven).acquire_owned().await.ok();
            Turn { _of_source: of_source, _of_all: of_all }
        };
        // All pods of a node share its proof: once the first one was valid, the others need not wait.
        let proven = async {
            loop {
                let news = self.news.notified();
                if self.known().is_good(&id, now) {
                    return Turn::default();
                }
                news.await;
            }
        };
        let turn = async {
            tokio::select! {
                turn = turn => turn,
                turn = proven => turn,
            }
        };
        let turn = tokio::time::timeout(TURN_WITHIN, turn).await.map_err(|_| Refusal::TooManyFailures)?;
        // The proof may have failed too often in the meantime.
        self.place(&id, source, now).map(|_| turn)
    }

    fn place(&self, id: &ProofId, source: IpAddr, now: UnixTime) -> Result<Place, Refusal> {
        let mut known = self.known();
        if known.is_good(id, now) {
            return Ok(Place::Proven);
        }
        let source = rate_limit::source(source);
        if known.failing.is_reached_by(id, now) {
            // A retry of a refused proof counts as a failure, too.
            known.failures.is_exceeded_by(source, now);
            return Err(Refusal::TooManyFailures);
        }
        if !known.failures.is_reached_by(&source, now) {
            return Ok(Place::Unproven);
        }
        if known.queues.len() >= MAX_QUEUES {
            known.queues.retain(|_, queue| Arc::strong_count(queue) > 1);
        }
        let queue = known.queues.entry(source).or_insert_with(|| Arc::new(Semaphore::new(MAX_OF_A_FAILING_SOURCE)));
        Ok(Place::Queue(Arc::clone(queue)))
    }

    /// Notes that a proof was valid.
    pub(crate) fn was_good(&self, proof: &Proof, now: UnixTime) {
        let Some(id) = id_of(proof) else { return };
        let mut known = self.known();
        if known.good.len() >= MAX_GOOD && !known.good.contains_key(&id) {
            known.good.retain(|_, last| (*last..last.saturating_add(GOOD_FOR)).contains(&now));
            let oldest = known.good.iter().min_by_key(|(_, last)| **last).map(|(id, _)| *id);
            if let Some(oldest) = oldest.filter(|_| known.good.len() >= MAX_GOOD) {
                known.good.remove(&oldest);
            }
        }
        if known.good.insert(id, now).is_none() {
            self.news.notify_waiters();
        }
    }

    /// Notes that a proof failed; returns whether its source fails too often.
    pub(crate) fn has_failed(&self, proof: &Proof, source: IpAddr, now: UnixTime) -> bool {
        if let Some(id) = id_of(proof) {
            let mut known = self.known();
            known.good.remove(&id);
            known.failing.is_exceeded_by(id, now);
        }
        self.note_failure(source, now)
    }

    /// Notes a failure of any kind; returns whether the source fails too often.
    pub(crate) fn note_failure(&self, source: IpAddr, now: UnixTime) -> bool {
        self.known().failures.is_exceeded_by(rate_limit::source(source), now)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Counters stay usable after a panic elsewhere.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn is_good(&self, id: &ProofId, now: UnixTime) -> bool {
        // Also false when the clock was set back.
        self.good.get(id).is_some_and(|last| (*last..last.saturating_add(GOOD_FOR)).contains(&now))
    }
}

/// `None` for proofs that are checked locally, which costs next to nothing.
fn id_of(proof: &Proof) -> Option<ProofId> {
    match proof {
        Proof::Node { token, .. }
        | Proof::Provisional { token, .. }
        | Proof::Pod { token, .. }
        | Proof::Lighthouse { token, .. }
        | Proof::Gateway { token } => Some(Sha256::digest(token.trim()).into()),
        Proof::Token { .. } | Proof::Certificate { .. } => None,
    }
}

/// Seconds for which a proof counts as recently valid. A node uses the same proof for every pod until it gets a new
/// token.
const GOOD_FOR: i64 = 3_600;
const MAX_GOOD: usize = 4_096;
const MAX_FAILURES: u32 = 20;
const MAX_FAILURES_OF_A_PROOF: u32 = 5;
const FAILURE_WINDOW: i64 = 60;
const MAX_OF_A_FAILING_SOURCE: usize = 2;
const MAX_QUEUES: usize = 1_024;
/// Half of the threads that may block; see `nebula-ca serve`.
const MAX_UNPROVEN: usize = 24;
/// Shorter than an answer of the API server may take, and than clients are willing to wait.
const TURN_WITHIN: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const NOW: UnixTime = 1_800_000_000;

    fn proof(token: &str) -> Proof {
        Proof::Pod { token: token.to_owned(), address: SOURCE, other_address: None }
    }

    fn waits(admission: &Admission, token: &str, now: UnixTime) -> Result<bool, &'static str> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let turn = runtime.block_on(admission.turn(&proof(token), SOURCE, now));
        turn.map(|turn| turn._of_all.is_some()).map_err(|refusal| refusal.code())
    }

    #[test]
    fn a_proof_that_was_good_waits_for_nobody_whatever_its_source_does() {
        let admission = Admission::new();
        admission.was_good(&proof("good"), NOW);
        for number in 0..100 {
            admission.has_failed(&proof(&format!("junk-{number}")), SOURCE, NOW);
        }
        let two = [0, 1].map(|_| match admission.place(&[9; 32], SOURCE, NOW) {
            Ok(Place::Queue(queue)) => queue.try_acquire_owned().unwrap(),
            _ => panic!("no queue"),
        });
        assert_eq!(waits(&admission, "other", NOW), Err("too_many_failures"), "its turn did not come");
        assert_eq!(waits(&admission, "good", NOW), Ok(false));
        assert_eq!(waits(&admission, "good", NOW + GOOD_FOR), Ok(true), "not for ever");
        drop(two);
        assert_eq!(waits(&admission, "other", NOW), Ok(true));
    }

    #[test]
    fn a_proof_that_keeps_failing_is_not_asked_about_and_is_good_again_later() {
        let admission = Admission::new();
        for _ in 0..MAX_FAILURES_OF_A_PROOF {
            assert_eq!(waits(&admission, "junk", NOW), Ok(true));
            admission.has_failed(&proof("junk"), SOURCE, NOW);
        }
        assert_eq!(waits(&admission, "junk", NOW), Err("too_many_failures"));
        assert_eq!(waits(&admission, "other", NOW), Ok(true), "of the same source");
        assert_eq!(waits(&admission, "junk", NOW + FAILURE_WINDOW), Ok(true));
    }

    #[test]
    fn whoever_waits_with_a_proof_that_was_good_meanwhile_waits_no_longer() {
        let admission = Admission::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let turns = runtime.block_on(async {
            let first = Arc::clone(&admission.unproven).acquire_many_owned(24).await.unwrap();
            let good = async { admission.was_good(&proof("good"), NOW) };
            let node = proof("good");
            let turns = tokio::join!(admission.turn(&node, SOURCE, NOW), admission.turn(&node, SOURCE, NOW), good);
            drop(first);
            [turns.0.is_ok(), turns.1.is_ok()]
        });
        assert_eq!(turns, [true, true]);
    }

    #[test]
    fn many_proofs_take_little_memory() {
        let admission = Admission::new();
        for number in 0..3 * MAX_GOOD {
            admission.was_good(&proof(&format!("good-{number}")), NOW + i64::try_from(number).unwrap() / 100);
        }
        let known = admission.known();
        assert!(known.good.len() <= MAX_GOOD, "{}", known.good.len());
    }
}
