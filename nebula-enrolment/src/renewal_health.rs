//! Whether the certificate of an enrolled host is renewed: what status, doctor and the metrics show.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::enrol::event::Event;

/// Whether the certificate of an enrolled host is renewed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RenewalState {
    /// Absent if it is, like the fields below.
    pub failing_seconds: Option<u64>,
    pub error: Option<String>,
    /// Of the CA's refusal.
    pub code: Option<String>,
}

/// Written by the thread that attends to `nebula-enrol`.
#[derive(Debug, Default)]
pub struct RenewalHealth(Mutex<Option<Health>>);

#[derive(Debug, Default)]
struct Health {
    trouble: Option<Trouble>,
}

/// What keeps the certificate from being renewed.
#[derive(Debug)]
struct Trouble {
    since: Instant,
    error: String,
    /// Of the CA's refusal.
    code: Option<String>,
    /// Whether `nebula-enrol` does not even run.
    is_stopped: bool,
}

impl RenewalHealth {
    /// This host renews its certificate by itself.
    pub(crate) fn begin(&self) {
        self.health().get_or_insert_default();
    }

    /// Notes what `nebula-enrol` said.
    pub(crate) fn heard(&self, event: &Event, now: Instant) {
        match event {
            Event::Renewed { .. } => self.put(None),
            Event::NotRenewed { error, code } => self.has_trouble(error, code.clone(), false, now),
            Event::NotWritable { error } => self.has_trouble(error, None, false, now),
            Event::Unusable { error } => self.has_trouble(error, None, true, now),
            Event::Following { .. } => {
                let mut health = self.health();
                if let Some(health) = &mut *health {
                    health.trouble = health.trouble.take().filter(|trouble| !trouble.is_stopped);
                }
            }
            Event::TrustChanged { .. }
            | Event::TrustUnknown { .. }
            | Event::TrustNotWritten { .. }
            | Event::Expired
            | Event::Revoked => {}
        }
    }

    /// Notes that `nebula-enrol` cannot be started.
    pub(crate) fn not_started(&self, error: &str, now: Instant) {
        self.has_trouble(error, None, true, now);
    }

    /// For how many seconds renewals have failed; 0: they do not.
    pub fn failing_seconds(&self, now: Instant) -> u64 {
        let health = self.health();
        let trouble = health.as_ref().and_then(|health| health.trouble.as_ref());
        trouble.map_or(0, |trouble| seconds(trouble, now))
    }

    /// `None` on a host that does not renew its certificate by itself.
    pub fn document(&self, now: Instant) -> Option<RenewalState> {
        let health = self.health();
        let trouble = health.as_ref()?.trouble.as_ref();
        Some(RenewalState {
            failing_seconds: trouble.map(|trouble| seconds(trouble, now)),
            error: trouble.map(|trouble| trouble.error.clone()),
            code: trouble.and_then(|trouble| trouble.code.clone()),
        })
    }

    /// Trouble began with the first failure, whatever the last one says.
    fn has_trouble(&self, error: &str, code: Option<String>, is_stopped: bool, now: Instant) {
        let since = self.health().as_ref().and_then(|health| Some(health.trouble.as_ref()?.since)).unwrap_or(now);
        self.put(Some(Trouble { since, error: error.to_owned(), code, is_stopped }));
    }

    fn put(&self, trouble: Option<Trouble>) {
        *self.health() = Some(Health { trouble });
    }

    fn health(&self) -> MutexGuard<'_, Option<Health>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// At least one: it failed a moment ago.
fn seconds(trouble: &Trouble, now: Instant) -> u64 {
    now.saturating_duration_since(trouble.since).as_secs().max(1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use nebula_linux::clock::now;

    fn not_renewed(error: &str, code: Option<&str>) -> Event {
        Event::NotRenewed { error: error.to_owned(), code: code.map(str::to_owned) }
    }

    #[test]
    fn failures_count_from_the_first_one_until_a_renewal_succeeds() {
        let (health, begun) = (RenewalHealth::default(), now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(health.document(begun), None, "no host of an enrolment");
        health.begin();
        assert_eq!(health.document(begun), Some(RenewalState::default()));
        health.heard(&not_renewed("timeout", None), at(10));
        assert_eq!(health.failing_seconds(at(10)), 1);
        health.heard(&not_renewed("too late", Some("renewal_too_late")), at(60));
        // A child that was started again has not renewed anything.
        health.heard(&Event::Following { url: String::new() }, at(70));
        let text = |text: &str| Some(text.to_owned());
        let told = RenewalState { failing_seconds: Some(90), error: text("too late"), code: text("renewal_too_late") };
        assert_eq!(health.document(at(100)), Some(told));
        health.heard(&Event::Renewed { cert: String::new(), not_after: 0, fingerprint: String::new() }, at(110));
        assert_eq!((health.failing_seconds(at(120)), health.document(at(120))), (0, Some(RenewalState::default())));
    }

    #[test]
    fn a_child_that_runs_again_was_the_only_trouble() {
        let (health, now) = (RenewalHealth::default(), now());
        health.begin();
        health.not_started("no such file", now);
        assert_eq!(health.failing_seconds(now), 1);
        health.heard(&Event::Following { url: String::new() }, now);
        assert_eq!(health.failing_seconds(now), 0);
    }
}
