//! The life of a pod's or a host's certificate as a pure machine: asking, running, renewing, closed. No clock, no IO.

use std::time::Duration;

use nebula_cert::{CaPool, Identity, UnixTime};

use crate::ca_client::Refusal;
use crate::ca_client::backoff::Jitter;

/// Time since the Unix epoch: certificates live by the wall clock.
pub type Moment = Duration;

/// One reading of both clocks. Timeouts are measured by `uptime`, which is monotonic; certificates by `wall`, which may
/// jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Since any fixed moment; never goes back.
    pub uptime: Duration,
    /// The wall clock.
    pub wall: Moment,
}

/// Whether the start waits for the first certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Yes, up to this long: without a certificate by then the pod must not start.
    Within(Duration),
    /// No: the data path stays closed until it arrives.
    Whenever,
}

/// Decides when to ask for a certificate, when to close the path and when to give up.
#[derive(Debug)]
pub struct LifeCycle {
    start: Start,
    /// Uptime.
    born: Duration,
    /// Uptime when to ask next; none while a request is under way.
    ask_at: Option<Duration>,
    failures: u32,
    certificate: Option<Held>,
    closed: bool,
    /// A step that was decided and not polled yet.
    decided: Option<Step>,
    last_failure: Option<Failure>,
    jitter: Jitter,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    expires: Moment,
    /// When to renew by the wall clock; none once that has been tried.
    renew_at: Option<Moment>,
    standing: Standing,
    /// Another one is due as soon as there is something to prove with.
    provisional: bool,
}

/// What the trusted CAs and the blocklist say of the own certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Peers accept it.
    Good,
    /// Its CA is trusted no longer: peers that know this refuse it.
    Orphaned,
    /// It is on the blocklist.
    Revoked,
}

impl Standing {
    /// What `trust` says of the own certificate.
    #[must_use]
    pub fn of(identity: &Identity, trust: &CaPool, now: UnixTime) -> Self {
        let verdicts = identity.certificates().map(|certificate| trust.verify(certificate.clone(), now));
        verdicts.fold(Self::Good, |standing, verdict| match (standing, verdict) {
            (Self::Revoked, _) | (_, Err(nebula_cert::Error::Blocked { .. })) => Self::Revoked,
            (standing, Ok(_) | Err(nebula_cert::Error::Expired { .. })) => standing,
            (_, Err(_)) => Self::Orphaned,
        })
    }
}

/// What the owner of the machine must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Ask for a certificate of a new key, at most that long, and report with [`LifeCycle::issued`],
    /// [`LifeCycle::failed`] or [`LifeCycle::not_yet`].
    Ask {
        /// Longest time the request may take.
        within: Duration,
    },
    /// Let nothing pass until another certificate arrives.
    Close(Closing),
    /// There will be no certificate in time: end, and say why.
    GiveUp(Failure),
}

/// Why the path closes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closing {
    /// The certificate's time is over, and there was no other.
    Expired,
    /// The certificate was blocked.
    Revoked,
}

/// Why a request for a certificate failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The CA refused.
    Denied(Refusal),
    /// The CA could not be asked in time.
    Unavailable(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Denied(refusal) => refusal.fmt(f),
            Self::Unavailable(cause) => f.write_str(cause),
        }
    }
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
    /// A pod that has nothing yet. `seed` spreads the renewals of many pods.
    #[must_use]
    pub fn new(start: Start, now: Now, seed: u64) -> Self {
        Self {
            start,
            born: now.uptime,
            ask_at: Some(now.uptime),
            failures: 0,
            certificate: None,
            closed: true,
            decided: None,
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
    pub fn poll(&mut self, now: Now) -> Option<Step> {
        if let Some(step) = self.decided.take() {
            return Some(step);
        }
        if !self.closed && self.certificate.is_some_and(|held| now.wall >= held.expires) {
            self.closed = true;
            // There is nothing to wait for any more.
            self.ask_at = self.ask_at.map(|at| at.min(now.uptime));
            return Some(Step::Close(Closing::Expired));
        }
        if let Some(end) = self.end_of_budget()
            && now.uptime >= end
        {
            let failure = self.last_failure.clone();
            return Some(Step::GiveUp(failure.unwrap_or_else(|| Failure::Unavailable("no answer in time".to_owned()))));
        }
        // By both clocks: one that is set back must not put off the renewal.
        let renew = self.certificate.is_some_and(|held| held.renew_at.is_some_and(|at| now.wall >= at));
        if self.ask_at.is_some_and(|at| renew || now.uptime >= at) {
            self.ask_at = None;
            self.certificate.iter_mut().for_each(|held| held.renew_at = None);
            return Some(Step::Ask { within: self.patience(now) });
        }
        None
    }

    /// How long from `now` [`LifeCycle::poll`] has nothing to do, if no clock is set.
    #[must_use]
    pub fn idle(&self, now: Now) -> Option<Duration> {
        if self.decided.is_some() {
            return Some(Duration::ZERO);
        }
        let expiry = self.certificate.filter(|_| !self.closed).map(|held| held.expires);
        let renewal = self.certificate.and_then(|held| held.renew_at).filter(|_| self.ask_at.is_some());
        let wall = [expiry, renewal].into_iter().flatten().map(|at| at.saturating_sub(now.wall));
        let uptime = [self.ask_at, self.end_of_budget()].into_iter().flatten();
        wall.chain(uptime.map(|at| at.saturating_sub(now.uptime))).min()
    }

    /// A certificate valid until `expires` arrived.
    #[must_use]
    pub fn issued(&mut self, now: Now, expires: Moment) -> Install {
        // Measured from now: certificates are often backdated a little.
        let life = expires.saturating_sub(now.wall);
        let early = self.jitter.below(life / 12);
        let wait = (life - life / 3).saturating_sub(early).max(MIN_RENEWAL_WAIT);
        let renew_at = Some(now.wall + wait);
        self.hold(Held { expires, renew_at, standing: Standing::Good, provisional: false }, now.uptime + wait)
    }

    /// A provisional certificate valid until `expires` arrived: the path opens, and the search for a better one goes
    /// on.
    #[must_use]
    pub fn issued_provisionally(&mut self, now: Now, expires: Moment) -> Install {
        let held = Held { expires, renew_at: None, standing: Standing::Good, provisional: true };
        self.hold(held, now.uptime + FIRST_BACKOFF)
    }

    fn hold(&mut self, held: Held, ask_at: Duration) -> Install {
        self.ask_at = Some(ask_at);
        self.certificate = Some(held);
        self.failures = 0;
        self.last_failure = None;
        self.decided = None;
        if std::mem::replace(&mut self.closed, false) { Install::Open } else { Install::Swap }
    }

    /// A request failed.
    pub fn failed(&mut self, now: Now, failure: Failure) {
        let denied = matches!(failure, Failure::Denied(_));
        if denied && self.end_of_budget().is_some() {
            self.decided = Some(Step::GiveUp(failure));
            return;
        }
        let wait = self.retry_wait(now, denied);
        self.failures = self.failures.saturating_add(1);
        self.ask_at = Some(now.uptime + wait);
        self.last_failure = Some(failure);
    }

    /// No request was made, for lack of a proof: the pod's init container has not shown its token.
    pub fn not_yet(&mut self, now: Now) {
        let waited = now.uptime.saturating_sub(self.born);
        self.ask_at = Some(now.uptime + (waited / 20).clamp(FIRST_BACKOFF, MAX_BACKOFF_STRICT));
    }

    /// What is trusted changed, and this is what it says of the own certificate.
    pub fn judged(&mut self, now: Now, standing: Standing) {
        let Some(held) = &mut self.certificate else { return };
        if std::mem::replace(&mut held.standing, standing) == standing {
            return;
        }
        match standing {
            Standing::Good => return,
            // All pods of an old CA learn it at the same moment.
            Standing::Orphaned => {}
            Standing::Revoked if self.closed => {}
            Standing::Revoked => {
                self.closed = true;
                self.decided = Some(Step::Close(Closing::Revoked));
            }
        }
        let soon = now.uptime + self.jitter.below(MAX_DELAY_AFTER_TRUST_CHANGE);
        self.ask_at = self.ask_at.map(|at| at.min(soon));
    }

    /// Before the first certificate, if the start waits for it.
    fn end_of_budget(&self) -> Option<Duration> {
        match self.start {
            Start::Within(budget) if self.certificate.is_none() => Some(self.born + budget),
            _ => None,
        }
    }

    fn patience(&self, now: Now) -> Duration {
        let left = self.end_of_budget().map(|end| end.saturating_sub(now.uptime));
        left.map_or(REQUEST_TIMEOUT, |left| left.clamp(Duration::from_millis(200), REQUEST_TIMEOUT))
    }

    fn retry_wait(&mut self, now: Now, denied: bool) -> Duration {
        let wait = match self.certificate.filter(|held| !self.closed && !held.provisional) {
            // A tenth of what is left: a few tries early, more of them as the end comes near.
            Some(held) => (held.expires.saturating_sub(now.wall) / 10).clamp(MIN_RENEWAL_WAIT, MAX_RENEWAL_WAIT),
            None => {
                let longest = if self.end_of_budget().is_some() { MAX_BACKOFF_STRICT } else { MAX_BACKOFF_LAZY };
                let first = if denied { MAX_BACKOFF_LAZY } else { FIRST_BACKOFF };
                first.saturating_mul(1 << self.failures.min(16)).min(longest)
            }
        };
        self.jitter.around(wait)
    }
}

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const FIRST_BACKOFF: Duration = Duration::from_millis(200);
const MAX_BACKOFF_STRICT: Duration = Duration::from_secs(2);
const MAX_BACKOFF_LAZY: Duration = Duration::from_secs(30);
const MIN_RENEWAL_WAIT: Duration = Duration::from_secs(1);
const MAX_RENEWAL_WAIT: Duration = Duration::from_secs(300);
const MAX_DELAY_AFTER_TRUST_CHANGE: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests;
