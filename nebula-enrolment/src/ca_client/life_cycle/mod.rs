//! The life cycle of a pod's or a host's certificate as a pure state machine: requesting, running, renewing, closed. No
//! clock, no I/O.

use std::time::Duration;

use nebula_cert::{CaPool, Identity, UnixTime};
use serde::{Deserialize, Serialize};

use crate::ca_client::Refusal;
use crate::ca_client::backoff::Jitter;

/// Time since the Unix epoch, because certificates are valid by the wall clock.
pub type Moment = Duration;

/// The moment of this Unix time; times before the epoch count as the epoch.
pub fn moment(time: UnixTime) -> Moment {
    Moment::from_secs(u64::try_from(time).unwrap_or(0))
}

/// One reading of both clocks. `uptime` is monotonic and measures timeouts; `wall` measures the validity of
/// certificates and may jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Time since an arbitrary fixed moment; never goes back.
    pub uptime: Duration,
    /// The wall clock.
    pub wall: Moment,
}

/// Whether the start waits for the first certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Yes, for at most this long: without a certificate by then, the pod must not start.
    Within(Duration),
    /// No: the data path stays closed until one arrives.
    Whenever,
}

/// Decides when to request a certificate, when to close the data path and when to give up.
#[derive(Debug)]
pub struct LifeCycle {
    start: Start,
    /// Uptime at creation.
    born: Duration,
    /// Uptime of the next request; `None` while one is in flight.
    ask_at: Option<Duration>,
    failures: u32,
    certificate: Option<Held>,
    closed: bool,
    /// A step that is decided but has not been polled yet.
    decided: Option<Step>,
    last_failure: Option<Failure>,
    jitter: Jitter,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    expires: Moment,
    /// Wall-clock time of the renewal; `None` once it has been tried, and for a provisional certificate.
    renew_at: Option<Moment>,
    standing: Standing,
    /// To be replaced as soon as the pod has a proof of its own.
    provisional: bool,
}

/// What the trusted CAs and the blocklist say about the pod's own certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// Peers accept it.
    Good,
    /// Its CA is no longer trusted: peers that know this refuse it.
    Orphaned,
    /// It is on the blocklist.
    Revoked,
}

impl Standing {
    /// In words, for logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Orphaned => "its CA is no longer trusted",
            Self::Revoked => "revoked",
        }
    }

    /// The standing of `identity` according to `trust`.
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

/// What the owner of the state machine must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Request a certificate for a new key and report the outcome with [`LifeCycle::issued`], [`LifeCycle::failed`] or
    /// [`LifeCycle::not_yet`].
    Ask {
        /// Longest time the request may take.
        within: Duration,
    },
    /// Block all traffic until another certificate arrives.
    Close(Closing),
    /// There will be no certificate in time: stop, and report why.
    GiveUp(Failure),
}

/// Why the path closes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closing {
    /// The certificate expired before it could be replaced.
    Expired,
    /// The certificate is on the blocklist.
    Revoked,
}

/// Why a request for a certificate failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The CA refused.
    Denied(Refusal),
    /// A file, the URL or the TLS certificate of the CA service is wrong.
    Misconfigured(String),
    /// The CA did not decide in time.
    Unavailable(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Denied(refusal) => refusal.fmt(f),
            Self::Misconfigured(cause) | Self::Unavailable(cause) => f.write_str(cause),
        }
    }
}

/// What to do with a new certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Install {
    /// The path was closed: open it.
    Open,
    /// Replace the certificate in use.
    Swap,
}

impl LifeCycle {
    /// Creates the life cycle of a pod without a certificate. `seed` spreads the renewals of many pods.
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

    /// The next step at `now`, if any. Call it until it returns `None`.
    #[must_use]
    pub fn poll(&mut self, now: Now) -> Option<Step> {
        if let Some(step) = self.decided.take() {
            return Some(step);
        }
        if !self.closed && self.certificate.is_some_and(|held| now.wall >= held.expires) {
            self.closed = true;
            // A pending retry or renewal must not wait any longer.
            self.ask_at = self.ask_at.map(|at| at.min(now.uptime));
            return Some(Step::Close(Closing::Expired));
        }
        if let Some(end) = self.end_of_budget()
            && now.uptime >= end
        {
            let failure = self.last_failure.clone();
            return Some(Step::GiveUp(failure.unwrap_or_else(|| Failure::Unavailable("no answer in time".to_owned()))));
        }
        // Checks both clocks: a wall clock that is set back must not delay the renewal.
        let renew = self.certificate.is_some_and(|held| held.renew_at.is_some_and(|at| now.wall >= at));
        if self.ask_at.is_some_and(|at| renew || now.uptime >= at) {
            self.ask_at = None;
            self.certificate.iter_mut().for_each(|held| held.renew_at = None);
            return Some(Step::Ask { within: self.patience(now) });
        }
        None
    }

    /// Time from `now` until [`LifeCycle::poll`] has something to do, as long as nobody sets the clock.
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

    /// Records a new certificate that is valid until `expires`.
    #[must_use]
    pub fn issued(&mut self, now: Now, expires: Moment) -> Install {
        // Counted from now, because certificates are often backdated a little.
        let life = expires.saturating_sub(now.wall);
        let early = self.jitter.below(life / 12);
        let wait = (life - life / 3).saturating_sub(early).max(MIN_RENEWAL_WAIT);
        let renew_at = Some(now.wall + wait);
        self.hold(Held { expires, renew_at, standing: Standing::Good, provisional: false }, now.uptime + wait)
    }

    /// Records a provisional certificate that is valid until `expires`: the path opens, and requests for a final one go
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

    /// Records that a request failed.
    pub fn failed(&mut self, now: Now, failure: Failure) {
        let denied = matches!(failure, Failure::Denied(_));
        if !matches!(failure, Failure::Unavailable(_)) && self.end_of_budget().is_some() {
            self.decided = Some(Step::GiveUp(failure));
            return;
        }
        let wait = self.retry_wait(now, denied);
        self.failures = self.failures.saturating_add(1);
        self.ask_at = Some(now.uptime + wait);
        self.last_failure = Some(failure);
    }

    /// Records that no request was made, for lack of a proof: the pod's init container has not shown its token.
    pub fn not_yet(&mut self, now: Now) {
        let waited = now.uptime.saturating_sub(self.born);
        self.ask_at = Some(now.uptime + (waited / 20).clamp(FIRST_BACKOFF, MAX_BACKOFF_STRICT));
    }

    /// Records how a change of the trust affects the pod's own certificate.
    pub fn judged(&mut self, now: Now, standing: Standing) {
        let Some(held) = &mut self.certificate else { return };
        if std::mem::replace(&mut held.standing, standing) == standing {
            return;
        }
        match standing {
            Standing::Good => return,
            // All pods of an old CA learn of this at the same moment.
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

    /// When the start gives up, if it waits for the first certificate and there is none yet.
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
            // A tenth of the remaining time: a few early retries, and more of them as expiry approaches.
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
