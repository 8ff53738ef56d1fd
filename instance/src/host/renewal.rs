//! Renews the certificate of an enrolled host, and follows the CA's trust bundle and announced lighthouses
//! (`pki.enrolment`). Every change is written next to the certificate and applied by a reload.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nebula_cert::issuance::MAX_WAIT_SECONDS;
use nebula_cert::{Identity, UnixTime};

use crate::ca_client::life_cycle::{Closing, Failure, LifeCycle, Moment, Now, Standing, Start, Step};
use crate::ca_client::trust_watch::TrustWatch;
use crate::ca_client::{self, CaClient, Refusal, TrustAnswer};
use crate::enrol::{self, Files};
use crate::host::reload::Reloader;
use crate::linux::clock::{now, since_epoch, unix_now};
use crate::linux::netns::NamespaceExecutor;

/// The renewal thread. Without it the node keeps running until its certificate expires.
pub(crate) struct Renewal {
    files: Files,
    client: CaClient,
    reloader: Arc<Mutex<Reloader>>,
    life: LifeCycle,
    trust: TrustWatch,
    /// ETag of the trust bundle in force.
    etag: Option<String>,
    /// When to retry a failed reload, as uptime.
    apply_at: Option<Duration>,
    born: Instant,
}

impl Renewal {
    /// Starts the thread for the files in `folder`. `own` is the certificate in use; a mismatch with the files is
    /// logged.
    ///
    /// # Errors
    /// Returns an error if no thread can be started. Unusable files are only logged.
    pub(crate) fn start(folder: &Path, own: &Identity, reloader: Arc<Mutex<Reloader>>) -> std::io::Result<()> {
        let files = Files::new(folder);
        let access = match files.remembered() {
            Ok(access) => access,
            Err(error) => {
                tracing::error!(%error, "pki.enrolment cannot be used: the certificate of this host is not renewed");
                return Ok(());
            }
        };
        let is_own = |found: Identity| found.primary().fingerprint() == own.primary().fingerprint();
        if !files.identity().is_ok_and(is_own) {
            tracing::warn!(folder = %folder.display(), "pki.cert and pki.key are other files than those beside \
                pki.enrolment: what is renewed there is not used; remove pki.ca, pki.cert and pki.key");
        }
        if let Err(error) = files.check_writable() {
            tracing::error!(%error, "This host cannot write its next certificate: it needs that folder (daemon.user, or \
                ReadWritePaths= in the unit)");
        }
        tracing::info!(url = access.url, folder = %folder.display(), "The certificate of this host is renewed by itself");
        let born = now();
        let first = Now { uptime: Duration::ZERO, wall: since_epoch() };
        let [one, two] = [(), ()].map(|()| random());
        let mut life = LifeCycle::new(Start::Whenever, first, one);
        let _ = life.issued(first, moment(own.primary().not_after()));
        let mut trust = TrustWatch::new(two);
        trust.begin(first.uptime);
        let client = CaClient::new(access, NamespaceExecutor::Here);
        let renewal = Self { files, client, reloader, life, trust, etag: None, apply_at: None, born };
        std::thread::Builder::new().name("enrolment".to_owned()).spawn(|| renewal.run()).map(drop)
    }

    fn run(mut self) {
        loop {
            while let Some(step) = self.life.poll(self.now()) {
                match step {
                    Step::Ask { within } => self.renew(within),
                    Step::Close(Closing::Expired) => tracing::error!(
                        "The certificate of this host has expired, and peers refuse it: it could not be renewed in time"
                    ),
                    Step::Close(Closing::Revoked) => {
                        tracing::error!("The certificate of this host was revoked: peers refuse it");
                    }
                    // Occurs only while waiting for the first certificate.
                    Step::GiveUp(_) => {}
                }
            }
            let uptime = self.now().uptime;
            if self.trust.is_due(uptime) {
                self.ask_whom_to_trust();
            }
            if self.apply_at.is_some_and(|at| uptime >= at) {
                self.apply();
            }
            let now = self.now();
            let others = [self.trust.deadline(), self.apply_at].map(|at| Some(at?.saturating_sub(now.uptime)));
            let wait = others.into_iter().chain([self.life.idle(now)]).flatten().fold(LONGEST_SLEEP, Duration::min);
            std::thread::sleep(wait.max(SHORTEST_SLEEP));
        }
    }

    fn renew(&mut self, within: Duration) {
        match enrol::renew_by(&self.client, &self.files, within, unix_now()) {
            Ok(issued) => {
                let certificate = issued.identity.primary();
                tracing::info!(cert = certificate.name(), notAfter = certificate.not_after(),
                    fingerprint = %certificate.fingerprint(), "The certificate of this host was renewed");
                let _ = self.life.issued(self.now(), moment(certificate.not_after()));
                self.apply();
            }
            Err(error) => {
                tracing::error!(%error, "The certificate of this host could not be renewed; it is tried again");
                let failure = match error {
                    enrol::Error::Ca(ca_client::Error::Denied { code, message }) => {
                        Failure::Denied(Refusal { code: Some(code), message })
                    }
                    enrol::Error::Ca(ca_client::Error::Misconfigured(cause)) => Failure::Misconfigured(cause),
                    error => Failure::Unavailable(error.to_string()),
                };
                self.life.failed(self.now(), failure);
            }
        }
    }

    /// Asks the CA for changes of trust. The service may hold the request (long poll), but not beyond the next renewal.
    fn ask_whom_to_trust(&mut self) {
        let asked = self.now();
        let most = Duration::from_secs(MAX_WAIT_SECONDS);
        let wait = self.life.idle(asked).map_or(most, |idle| idle.min(most));
        let answer = self.client.trust(self.etag.as_deref(), wait, TRUST_TIMEOUT);
        let now = self.now();
        let news = match answer {
            Ok(TrustAnswer { news, retry_after }) => {
                self.trust.answered(asked.uptime, now.uptime, news.is_some(), retry_after);
                news
            }
            Err(error) => {
                tracing::warn!(%error, "The CA does not say whom to trust; what was trusted stays");
                self.trust.failed(now.uptime);
                return;
            }
        };
        let Some(news) = news else { return };
        let own = self.reloader().settings().pki.as_ref().map(|pki| pki.identity.clone());
        let networks = own.as_ref().map(|own| own.networks().to_vec()).unwrap_or_default();
        let standing = own.map_or(Standing::Good, |own| Standing::of(&own, &news.trust, unix_now()));
        let answer = news.answer;
        let written = self
            .files
            .lock()
            .and_then(|_alone| self.files.write_trust(&answer.ca, answer.blocklist, answer.lighthouses, &networks));
        match written {
            Ok(differs) => {
                self.etag = Some(news.etag);
                if differs {
                    tracing::info!(authorities = news.trust.certificates().count(), ?standing, "Trust changed");
                    self.apply();
                }
            }
            // The ETag is kept unchanged, so the bundle is requested again.
            Err(error) => tracing::error!(%error, "Whom the CA trusts cannot be written"),
        }
        self.life.judged(now, standing);
    }

    /// Reloads the configuration. If somebody is editing it, the reload may fail for a while and is retried.
    fn apply(&mut self) {
        let outcome = self.reloader().reload(unix_now());
        self.apply_at = outcome.is_err().then(|| self.now().uptime + APPLY_AGAIN_AFTER);
        if outcome.is_err() {
            tracing::error!("What the CA gave is not in use yet: put the configuration right");
        }
    }

    fn reloader(&self) -> std::sync::MutexGuard<'_, Reloader> {
        self.reloader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Now {
        Now { uptime: now().saturating_duration_since(self.born), wall: since_epoch() }
    }
}

fn moment(seconds: UnixTime) -> Moment {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// A random seed, to spread the renewals of hosts that started together.
fn random() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness, renewals merely coincide.
    let _ = getrandom::fill(&mut bytes);
    u64::from_ne_bytes(bytes)
}

const TRUST_TIMEOUT: Duration = Duration::from_secs(10);
const APPLY_AGAIN_AFTER: Duration = Duration::from_secs(30);
/// A changed wall clock is noticed within this time.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);
const SHORTEST_SLEEP: Duration = Duration::from_millis(20);
