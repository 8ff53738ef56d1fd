//! The life of one pod's certificate as a pure machine: asking, running, renewing, closed. No clock, no IO.

use std::time::Duration;

use nebula_cni_plugin::launch::Mode;

/// Time since the Unix epoch: certificates live by the wall clock.
pub type Moment = Duration;

/// Decides when to ask for a certificate, when to close the path and when to give up.
#[derive(Debug)]
pub struct LifeCycle {
    mode: Mode,
    budget: Duration,
    born: Moment,
    /// When to ask next; none while a request is under way.
    ask_at: Option<Moment>,
    failures: u32,
    certificate: Option<Held>,
    closed: bool,
    verdict: Option<GiveUp>,
    last_failure: Option<String>,
    jitter: Jitter,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    expires: Moment,
}

/// What the owner of the machine must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Ask the CA, at most until then, and report with [`LifeCycle::issued`] or [`LifeCycle::failed`].
    Ask {
        /// Longest time the request may take.
        within: Duration,
    },
    /// The certificate expired: let nothing pass until another one arrives.
    Close,
    /// There will be no certificate in time: end, and say why.
    GiveUp(GiveUp),
}

/// Why a strict start failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GiveUp {
    /// The CA refused.
    Denied(String),
    /// The CA could not be asked in time.
    Unavailable(String),
}

/// What to do with a new certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Install {
    /// The path was closed: open it.
    Open,
    /// Replace the one in use.
    Swap,
}

impl LifeCycle {
    /// A pod that has nothing yet; a strict one gives up after `budget`. `seed` spreads the renewals of many pods.
    #[must_use]
    pub fn new(mode: Mode, budget: Duration, now: Moment, seed: u64) -> Self {
        Self {
            mode,
            budget,
            born: now,
            ask_at: Some(now),
            failures: 0,
            certificate: None,
            closed: true,
            verdict: None,
            last_failure: None,
            jitter: Jitter(seed),
        }
    }

    /// Whether the data path is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.closed
    }

    /// The next thing to do at `now`, if any. Call until there is nothing.
    #[must_use]
    pub fn poll(&mut self, now: Moment) -> Option<Step> {
        if let Some(verdict) = self.verdict.take() {
            return Some(Step::GiveUp(verdict));
        }
        if !self.closed && self.certificate.is_some_and(|held| now >= held.expires) {
            self.closed = true;
            // There is nothing to wait for any more.
            self.ask_at = self.ask_at.map(|at| at.min(now));
            return Some(Step::Close);
        }
        if self.must_hurry() && now >= self.born + self.budget {
            let cause = self.last_failure.clone().unwrap_or_else(|| "no answer in time".to_owned());
            return Some(Step::GiveUp(GiveUp::Unavailable(cause)));
        }
        if self.ask_at.is_some_and(|at| now >= at) {
            self.ask_at = None;
            return Some(Step::Ask { within: self.patience(now) });
        }
        None
    }

    /// When to call [`LifeCycle::poll`] again.
    #[must_use]
    pub fn deadline(&self) -> Option<Moment> {
        let expiry = self.certificate.filter(|_| !self.closed).map(|held| held.expires);
        let budget = self.must_hurry().then(|| self.born + self.budget);
        [self.ask_at, expiry, budget].into_iter().flatten().min()
    }

    /// A certificate valid until `expires` arrived.
    #[must_use]
    pub fn issued(&mut self, now: Moment, expires: Moment) -> Install {
        // Measured from now: certificates are often backdated a little.
        let life = expires.saturating_sub(now);
        let early = self.jitter.below(life / 12);
        let left = life / 3 + early;
        self.ask_at = Some((expires.saturating_sub(left)).max(now + SHORTEST_WAIT));
        self.certificate = Some(Held { expires });
        self.failures = 0;
        self.last_failure = None;
        if std::mem::replace(&mut self.closed, false) { Install::Open } else { Install::Swap }
    }

    /// A request failed; `denied` if the CA decided so.
    pub fn failed(&mut self, now: Moment, denied: bool, cause: String) {
        if denied && self.must_hurry() {
            self.verdict = Some(GiveUp::Denied(cause));
            return;
        }
        let wait = self.retry_wait(now, denied);
        self.failures = self.failures.saturating_add(1);
        self.ask_at = Some(now + wait);
        self.last_failure = Some(cause);
    }

    /// Before the first certificate of a strict pod, somebody waits for us.
    fn must_hurry(&self) -> bool {
        self.mode == Mode::Strict && self.certificate.is_none()
    }

    fn patience(&self, now: Moment) -> Duration {
        if self.must_hurry() {
            let left = (self.born + self.budget).saturating_sub(now);
            left.clamp(Duration::from_millis(200), ASK_WITHIN)
        } else {
            ASK_WITHIN
        }
    }

    fn retry_wait(&mut self, now: Moment, denied: bool) -> Duration {
        let wait = match self.certificate.filter(|_| !self.closed) {
            // A tenth of what is left: a few tries early, more of them as the end comes near.
            Some(held) => (held.expires.saturating_sub(now) / 10).clamp(SHORTEST_WAIT, LONGEST_WAIT),
            None => {
                let longest = if self.must_hurry() { STRICT_RETRY } else { LAZY_RETRY };
                let first = if denied { LAZY_RETRY } else { FIRST_RETRY };
                first.saturating_mul(1 << self.failures.min(16)).min(longest)
            }
        };
        wait * 3 / 4 + self.jitter.below(wait / 2)
    }
}

/// A small generator: spreading load needs no secrecy.
#[derive(Debug)]
struct Jitter(u64);

impl Jitter {
    fn below(&mut self, limit: Duration) -> Duration {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let fraction = (z ^ (z >> 31)) >> 40;
        limit.mul_f64(fraction as f64 / f64::from(1u32 << 24))
    }
}

const ASK_WITHIN: Duration = Duration::from_secs(10);
const FIRST_RETRY: Duration = Duration::from_millis(200);
const STRICT_RETRY: Duration = Duration::from_secs(2);
const LAZY_RETRY: Duration = Duration::from_secs(30);
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    const START: Moment = Duration::from_secs(1_800_000_000);
    const DAY: Duration = Duration::from_secs(86_400);
    const STRICT_BUDGET: Duration = Duration::from_secs(18);

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    fn asks(life: &mut LifeCycle, now: Moment) -> bool {
        matches!(life.poll(now), Some(Step::Ask { .. }))
    }

    fn running(mode: Mode, seed: u64) -> LifeCycle {
        let mut life = LifeCycle::new(mode, STRICT_BUDGET, START, seed);
        assert!(asks(&mut life, START));
        assert_eq!(life.issued(START, START + DAY), Install::Open);
        life
    }

    #[test]
    fn a_new_pod_asks_once_and_waits_for_the_answer() {
        let mut life = LifeCycle::new(Mode::Strict, STRICT_BUDGET, START, 1);
        assert!(asks(&mut life, START));
        assert_eq!(life.poll(START + seconds(5)), None);
        assert!(!life.is_open());
        assert_eq!(life.issued(START + seconds(5), START + DAY), Install::Open);
        assert!(life.is_open());
    }

    #[test]
    fn renewal_starts_when_about_a_third_of_the_life_is_left_and_is_spread() {
        let mut moments = std::collections::BTreeSet::new();
        for seed in 0..50 {
            let life = running(Mode::Strict, seed);
            let at = life.deadline().unwrap() - START;
            assert!(at <= DAY * 2 / 3, "{at:?}");
            assert!(at >= DAY * 2 / 3 - DAY / 12, "{at:?}");
            moments.insert(at);
        }
        assert!(moments.len() > 40, "pods would renew together");
    }

    #[test]
    fn a_renewed_certificate_is_swapped_in_while_open() {
        let mut life = running(Mode::Strict, 3);
        let at = life.deadline().unwrap();
        assert_eq!(life.poll(at - seconds(1)), None);
        assert!(asks(&mut life, at));
        assert_eq!(life.issued(at, at + DAY), Install::Swap);
        assert!(life.deadline().unwrap() > at + DAY / 2);
    }

    #[test]
    fn expiry_closes_the_path_once_and_a_later_certificate_opens_it_again() {
        let mut life = running(Mode::Strict, 4);
        let renew = life.deadline().unwrap();
        assert!(asks(&mut life, renew));
        life.failed(renew, true, "no".to_owned());
        let mut now = renew;
        let mut tries = 0;
        let closed_at = loop {
            now = life.deadline().unwrap().max(now);
            match life.poll(now) {
                Some(Step::Ask { .. }) => {
                    tries += 1;
                    life.failed(now, false, "down".to_owned());
                }
                Some(Step::Close) => break now,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(closed_at, START + DAY);
        assert!((5..200).contains(&tries), "{tries} tries");
        assert!(!life.is_open());
        let mut now = closed_at;
        while !asks(&mut life, now) {
            now = life.deadline().unwrap();
        }
        assert!(now < closed_at + seconds(60));
        assert_eq!(life.issued(now, now + DAY), Install::Open);
    }

    #[test]
    fn expiry_during_a_request_still_closes_the_path() {
        let mut life = running(Mode::Strict, 4);
        let renew = life.deadline().unwrap();
        assert!(asks(&mut life, renew));
        assert_eq!(life.deadline(), Some(START + DAY));
        assert_eq!(life.poll(START + DAY), Some(Step::Close));
        assert_eq!(life.poll(START + DAY), None);
    }

    #[test]
    fn a_strict_start_ends_at_once_when_denied() {
        let mut life = LifeCycle::new(Mode::Strict, STRICT_BUDGET, START, 1);
        assert!(asks(&mut life, START));
        life.failed(START, true, "unknown pod".to_owned());
        assert_eq!(life.poll(START), Some(Step::GiveUp(GiveUp::Denied("unknown pod".to_owned()))));
    }

    #[test]
    fn a_strict_start_retries_until_its_budget_and_then_says_why() {
        let mut life = LifeCycle::new(Mode::Strict, STRICT_BUDGET, START, 1);
        let mut now = START;
        let mut tries = 0;
        loop {
            now = life.deadline().unwrap().max(now);
            match life.poll(now) {
                Some(Step::Ask { within }) => {
                    tries += 1;
                    assert!(now + within <= START + STRICT_BUDGET + Duration::from_millis(200));
                    life.failed(now, false, "connection refused".to_owned());
                }
                Some(Step::GiveUp(reason)) => {
                    assert_eq!(reason, GiveUp::Unavailable("connection refused".to_owned()));
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(now, START + STRICT_BUDGET);
        assert!((8..40).contains(&tries), "{tries} tries");
    }

    #[test]
    fn a_request_that_never_ends_does_not_outlast_the_budget() {
        let mut life = LifeCycle::new(Mode::Strict, STRICT_BUDGET, START, 1);
        assert!(asks(&mut life, START));
        assert_eq!(life.deadline(), Some(START + STRICT_BUDGET));
        assert!(matches!(life.poll(START + STRICT_BUDGET), Some(Step::GiveUp(GiveUp::Unavailable(_)))));
    }

    #[test]
    fn a_lazy_pod_never_gives_up() {
        let mut life = LifeCycle::new(Mode::Lazy, STRICT_BUDGET, START, 1);
        let mut now = START;
        for _ in 0..500 {
            now = life.deadline().unwrap().max(now);
            assert!(asks(&mut life, now));
            life.failed(now, now.as_secs().is_multiple_of(2), "no".to_owned());
            assert!(life.deadline().unwrap() <= now + LAZY_RETRY * 5 / 4);
        }
        assert_eq!(life.issued(now, now + DAY), Install::Open);
    }

    #[test]
    fn a_certificate_that_lives_for_seconds_does_not_cause_a_storm() {
        let mut life = LifeCycle::new(Mode::Strict, STRICT_BUDGET, START, 1);
        assert!(asks(&mut life, START));
        let _ = life.issued(START, START + seconds(1));
        assert!(life.poll(START).is_none());
        assert!(life.deadline().unwrap() >= START + seconds(1));
    }
}
