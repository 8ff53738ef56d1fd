//! `nebula-enrol -follow`: renews the certificate of an enrolled host, and follows the CA's trust bundle and announced
//! lighthouses (`pki.enrolment`). The daemon runs it as its child, so that the process with the tunnels never talks to
//! the CA. Every change is written beside the certificate and then told to the daemon, as an [`Event`].

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nebula_cert::Identity;
use nebula_cert::issuance::MAX_WAIT_SECONDS;
use nebula_linux::clock::{now, since_epoch, unix_now};
use nebula_linux::netns::NamespaceExecutor;
use nebula_linux::{capabilities, confinement, memory};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use rustix::thread::CapabilitySet;

use super::event::{Event, text};
use super::{Error, Files};
use crate::ca_client::life_cycle::{Closing, Failure, LifeCycle, Moment, Now, Standing, Start, Step, moment};
use crate::ca_client::trust_watch::TrustWatch;
use crate::ca_client::{self, CaClient, Refusal, TrustAnswer, backoff};

/// Runs until the daemon at the other end of standard input and output is gone.
#[must_use]
pub fn run(files: Files) -> ExitCode {
    if let Err(error) = confine() {
        eprintln!("nebula-enrol: cannot give up privileges: {error}");
        return ExitCode::FAILURE;
    }
    match Follower::new(files) {
        // The daemon is gone.
        Ok(follower) => match follower.run() {
            DaemonGone => ExitCode::SUCCESS,
        },
        Err(error) => {
            let _ = say(&Event::Unusable { error: text(error) });
            ExitCode::FAILURE
        }
    }
}

/// Ties this process to its parent, and drops what it does not need: it only calls the CA and writes its own files.
fn confine() -> std::io::Result<()> {
    // The daemon blocks signals that shall end this process.
    SigSet::empty().thread_set_mask()?;
    // Even if the parent is killed in the middle of a request. If it ended before this line, standard input says so.
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    confinement::hide_memory()?;
    capabilities::keep(CapabilitySet::empty())
}

/// The daemon closed its end of a pipe.
struct DaemonGone;

struct Follower {
    files: Files,
    client: CaClient,
    life: LifeCycle,
    trust: TrustWatch,
    /// ETag of the trust bundle in force.
    etag: Option<String>,
    born: Instant,
}

impl Follower {
    fn new(files: Files) -> Result<Self, Error> {
        let access = files.remembered()?;
        let own = {
            let _alone = files.lock()?;
            files.complete()?;
            files.identity()?
        };
        let _ = say(&Event::Following { url: text(&access.url) });
        if let Err(error) = files.check_writable() {
            let _ = say(&Event::NotWritable { error: text(error) });
        }
        let born = now();
        let first = Now { uptime: Duration::ZERO, wall: since_epoch() };
        let mut life = LifeCycle::new(Start::Whenever, first, backoff::seed());
        let _ = life.issued(first, expiry(&own));
        let mut trust = TrustWatch::new(backoff::seed());
        trust.begin(first.uptime);
        let client = CaClient::new(access, NamespaceExecutor::Here);
        client.ask_as(own);
        Ok(Self { files, client, life, trust, etag: None, born })
    }

    fn run(mut self) -> DaemonGone {
        loop {
            if let Err(gone) = self.work() {
                return gone;
            }
            let now = self.now();
            let trust = self.trust.deadline().map(|at| at.saturating_sub(now.uptime));
            let wait = [trust, self.life.idle(now)].into_iter().flatten().fold(LONGEST_SLEEP, Duration::min);
            if let Err(gone) = sleep(wait.max(SHORTEST_SLEEP)) {
                return gone;
            }
        }
    }

    /// Does what is due.
    fn work(&mut self) -> Result<(), DaemonGone> {
        while let Some(step) = self.life.poll(self.now()) {
            match step {
                Step::Ask { within } => self.renew(within)?,
                Step::Close(Closing::Expired) => say(&Event::Expired)?,
                Step::Close(Closing::Revoked) => say(&Event::Revoked)?,
                // Occurs only while waiting for the first certificate.
                Step::GiveUp(_) => {}
            }
        }
        if self.trust.is_due(self.now().uptime) { self.ask_whom_to_trust() } else { Ok(()) }
    }

    fn renew(&mut self, within: Duration) -> Result<(), DaemonGone> {
        match super::renew_by(&self.client, &self.files, within, unix_now()) {
            Ok(issued) => {
                let certificate = issued.identity.primary();
                let _ = self.life.issued(self.now(), expiry(&issued.identity));
                self.client.ask_as(issued.identity.clone());
                say(&Event::Renewed {
                    cert: text(certificate.name()),
                    not_after: certificate.not_after(),
                    fingerprint: certificate.fingerprint().to_string(),
                })
            }
            Err(error) => {
                let code = match &error {
                    Error::Ca(ca_client::Error::Denied { code, .. }) => Some(text(code)),
                    _ => None,
                };
                let said = say(&Event::NotRenewed { error: text(&error), code });
                let failure = match error {
                    Error::Ca(ca_client::Error::Denied { code, message }) => {
                        Failure::Denied(Refusal { code: Some(code), message })
                    }
                    Error::Ca(ca_client::Error::Misconfigured(cause)) => Failure::Misconfigured(cause),
                    error => Failure::Unavailable(error.to_string()),
                };
                self.life.failed(self.now(), failure);
                said
            }
        }
    }

    /// Asks the CA for changes of trust. The service may hold the request (long poll), but not beyond the next renewal.
    fn ask_whom_to_trust(&mut self) -> Result<(), DaemonGone> {
        // Most of the time this process waits for that answer.
        memory::release_program_pages();
        memory::release_free_heap();
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
                let is_news = self.trust.failed(now.uptime);
                return if is_news { say(&Event::TrustUnknown { error: text(error) }) } else { Ok(()) };
            }
        };
        let Some(news) = news else { return Ok(()) };
        let own = self.files.identity().ok();
        let networks = own.as_ref().map(|own| own.networks().to_vec()).unwrap_or_default();
        let standing = own.map_or(Standing::Good, |own| Standing::of(&own, &news.trust, unix_now()));
        let answer = news.answer;
        let written = self
            .files
            .lock()
            .and_then(|_alone| self.files.write_trust(&answer.ca, answer.blocklist, answer.lighthouses, &networks));
        let said = match written {
            Ok(differs) => {
                self.etag = Some(news.etag);
                let authorities = news.trust.certificates().count();
                if differs { say(&Event::TrustChanged { authorities, standing }) } else { Ok(()) }
            }
            // The ETag is kept unchanged, so the bundle is requested again.
            Err(error) => say(&Event::TrustNotWritten { error: text(error) }),
        };
        self.life.judged(now, standing);
        said
    }

    fn now(&self) -> Now {
        Now { uptime: now().saturating_duration_since(self.born), wall: since_epoch() }
    }
}

fn say(event: &Event) -> Result<(), DaemonGone> {
    let mut out = std::io::stdout();
    out.write_all(event.to_line().as_bytes()).and_then(|()| out.flush()).map_err(|_| DaemonGone)
}

/// Sleeps, but not longer than the daemon lives: it writes nothing to standard input, and never closes it.
fn sleep(wait: Duration) -> Result<(), DaemonGone> {
    let mut input = std::io::stdin();
    let end = now() + wait;
    loop {
        let left = end.saturating_duration_since(now());
        let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        let ready = poll(&mut [PollFd::new(input.as_fd(), PollFlags::POLLIN)], timeout);
        if ready.is_ok_and(|count| count > 0) && !matches!(input.read(&mut [0; 64]), Ok(1..)) {
            return Err(DaemonGone);
        }
        if now() >= end {
            return Ok(());
        }
    }
}

fn expiry(identity: &Identity) -> Moment {
    moment(identity.primary().not_after())
}

const TRUST_TIMEOUT: Duration = Duration::from_secs(10);
/// A changed wall clock is noticed within this time.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);
const SHORTEST_SLEEP: Duration = Duration::from_millis(20);
