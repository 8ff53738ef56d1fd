//! Keeps an enrolled host enrolled (`pki.enrolment`): runs `nebula-enrol -follow` as a child, logs what it says, and
//! reloads when it has written new credentials, trust or lighthouses. The program with the tunnels knows no HTTPS.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::Identity;
use nebula_linux::clock::now;

use crate::enrol::Files;
use crate::enrol::event::Event;
use crate::follower::{Follower, Heard, PROGRAM};
use crate::renewal_health::RenewalHealth;

/// The thread that attends to the child. Without it the node keeps running until its certificate expires.
pub struct Renewal {
    folder: PathBuf,
    reload: Reload,
    /// When to retry a failed reload.
    apply_at: Option<Instant>,
    allowance: Allowance,
    health: Arc<RenewalHealth>,
}

impl Renewal {
    /// Starts the thread for the files in `folder`. `own` is the certificate in use; a mismatch with the files is
    /// logged. `reload` reads the configuration again, with these files, and returns whether it is in use; it has
    /// logged why not.
    ///
    /// # Errors
    /// Returns an error if no thread can be started. A child that cannot be started is only logged.
    pub fn start(
        folder: &Path,
        own: &Identity,
        health: Arc<RenewalHealth>,
        reload: impl FnMut() -> bool + Send + 'static,
    ) -> std::io::Result<()> {
        let is_own = |found: Identity| found.primary().fingerprint() == own.primary().fingerprint();
        if !Files::new(folder).identity().is_ok_and(is_own) {
            tracing::warn!(folder = %folder.display(), "pki.cert and pki.key are other files than those beside \
                pki.enrolment: what is renewed there is not used; remove pki.ca, pki.cert and pki.key");
        }
        let allowance = Allowance { left: EVENTS_AT_ONCE, since: now() };
        health.begin();
        let reload = Box::new(reload);
        let renewal = Self { folder: folder.to_owned(), reload, apply_at: None, allowance, health };
        // The child lives as long as the thread that starts it.
        std::thread::Builder::new().name("enrolment".to_owned()).spawn(|| renewal.run()).map(drop)
    }

    fn run(mut self) {
        let mut failures = 0;
        loop {
            let begun = now();
            let ended = match Follower::start(&self.folder) {
                Ok(child) => Some(self.attend(child)),
                Err(error) => {
                    tracing::error!(%error, "The certificate of this host is not renewed");
                    self.health.not_started(&error.to_string(), now());
                    None
                }
            };
            if now().saturating_duration_since(begun) >= STEADY {
                failures = 0;
            }
            let again = now() + pause(failures);
            failures += 1;
            while now() < again {
                self.retry_apply();
                std::thread::sleep(self.until_apply().min(again.saturating_duration_since(now())));
            }
            // Not earlier: when a service manager ends both, this daemon has ended by now.
            if let Some(ended) = ended {
                tracing::warn!(reason = ended, "{PROGRAM} ended; it is started again");
            }
        }
    }

    /// Does what the child says until it ends; returns how it ended.
    fn attend(&mut self, mut child: Follower) -> String {
        loop {
            self.retry_apply();
            match child.hear(self.until_apply()) {
                Heard::Event(event) => {
                    report(&event, &self.folder);
                    self.health.heard(&event, now());
                    if event.is_new_state() {
                        self.apply();
                    }
                }
                Heard::Unknown(error) => {
                    tracing::warn!(error, "{PROGRAM} said something unknown: is it of another version than nebula?");
                }
                Heard::Nothing => continue,
                Heard::Ended(how) => return how,
            }
            // A child that talks without end costs little: it has to wait until its lines are read.
            std::thread::sleep(self.allowance.take(now()));
        }
    }

    /// Reloads the configuration. If somebody is editing it, the reload may fail for a while and is retried.
    fn apply(&mut self) {
        let is_in_use = (self.reload)();
        self.apply_at = (!is_in_use).then(|| now() + APPLY_AGAIN_AFTER);
        if !is_in_use {
            tracing::error!("What the CA gave is not in use yet: put the configuration right");
        }
    }

    fn retry_apply(&mut self) {
        if self.apply_at.is_some_and(|at| now() >= at) {
            self.apply();
        }
    }

    fn until_apply(&self) -> Duration {
        self.apply_at.map_or(FOREVER, |at| at.saturating_duration_since(now()))
    }
}

type Reload = Box<dyn FnMut() -> bool + Send>;

fn report(event: &Event, folder: &Path) {
    match event {
        Event::Following { url } => {
            let folder = folder.display();
            tracing::info!(url, %folder, "The certificate of this host is renewed by itself");
        }
        Event::Unusable { error } => {
            tracing::error!(error, "pki.enrolment cannot be used: the certificate of this host is not renewed");
        }
        Event::NotWritable { error } => tracing::error!(
            error,
            "This host cannot write its next certificate: it needs that folder (daemon.user, or ReadWritePaths= in the \
             unit)"
        ),
        Event::Renewed { cert, not_after, fingerprint } => {
            tracing::info!(cert, notAfter = not_after, fingerprint, "The certificate of this host was renewed");
        }
        Event::NotRenewed { error, .. } => {
            tracing::error!(error, "The certificate of this host could not be renewed; it is tried again");
        }
        Event::TrustChanged { authorities, standing } => {
            tracing::info!(authorities, standing = standing.name(), "Trust changed")
        }
        Event::TrustUnknown { error } => {
            tracing::warn!(error, "The CA does not say whom to trust; what was trusted stays");
        }
        Event::TrustNotWritten { error } => tracing::error!(error, "Whom the CA trusts cannot be written"),
        Event::Expired => tracing::error!(
            "The certificate of this host has expired, and peers refuse it: it could not be renewed in time"
        ),
        Event::Revoked => tracing::error!("The certificate of this host was revoked: peers refuse it"),
    }
}

/// How long to wait before a child is started again, after this many that did not last.
fn pause(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << failures.min(16)).min(LONGEST_PAUSE)
}

/// Limits how many events are handled: some at once, then one per [`REFILL`].
#[derive(Debug)]
struct Allowance {
    left: u32,
    /// Up to this moment the allowance has been refilled.
    since: Instant,
}

impl Allowance {
    /// Uses the allowance for one event; returns how long to wait before the next one.
    fn take(&mut self, now: Instant) -> Duration {
        let gained = now.saturating_duration_since(self.since).as_millis() / REFILL.as_millis();
        let gained = u32::try_from(gained).unwrap_or(u32::MAX);
        if gained > 0 {
            (self.left, self.since) = (self.left.saturating_add(gained).min(EVENTS_AT_ONCE), now);
        }
        self.left = self.left.saturating_sub(1);
        if self.left == 0 { REFILL } else { Duration::ZERO }
    }
}

const APPLY_AGAIN_AFTER: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A child that ran for this long starts over with the first pause.
const STEADY: Duration = Duration::from_secs(60);
const FOREVER: Duration = Duration::from_secs(86_400);
const EVENTS_AT_ONCE: u32 = 32;
const REFILL: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_does_not_last_is_started_less_and_less_often() {
        let pauses: Vec<_> = (0..8).map(|failures| pause(failures).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }

    #[test]
    fn a_child_that_talks_without_end_is_heard_four_times_a_second() {
        let begun = now();
        let mut allowance = Allowance { left: EVENTS_AT_ONCE, since: begun };
        let mut at = begun;
        let mut heard = 0;
        while at < begun + Duration::from_secs(60) {
            at += allowance.take(at);
            heard += 1;
        }
        assert!((240..=240 + 2 * EVENTS_AT_ONCE).contains(&heard), "{heard} in a minute");
        // One that says something now and then never waits.
        for second in 61..200 {
            let wait = allowance.take(begun + Duration::from_secs(second));
            assert!(second < 63 || wait == Duration::ZERO, "{second}");
        }
    }
}
