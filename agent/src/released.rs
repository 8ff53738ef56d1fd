//! Gives certificates back to the CA: DEL notes each pod that is gone, and the agent tells the CA in its own time.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use nebula_cert::issuance::{MAX_REPLY, Pod, Proof, RELEASE_PATH, Refusal, Release};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::launch::CaAccess;
use nebula_cni_plugin::attachment::foreign;
use nebula_cni_plugin::attachment::record::{self, Found, Record};
use nebula_cni_plugin::attachment::released::{self, Released};
use zeroize::{Zeroize, Zeroizing};

use crate::ca::{CaError, Target};
use crate::durable;
use crate::host_root::HostRoot;
use crate::metrics::Metrics;
use crate::reconcile::backoff::Backoff;
use crate::reconcile::entry::Entry;
use crate::retirement::Retirement;

/// Gives back what the notes of one node name.
#[derive(Debug)]
pub(crate) struct Releaser {
    /// The node's file system.
    pub host: HostRoot,
    /// The node's metrics.
    pub metrics: Arc<Metrics>,
    /// Whether nothing may be put back on the node.
    pub retirement: Retirement,
    backoff: Backoff,
}

/// Why a pod's certificates could not be released.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ReleaseError {
    /// Another attempt would get the same answer.
    #[error("the CA refuses: {message} ({code})")]
    Final {
        /// The CA's stable code.
        code: String,
        /// Its explanation.
        message: String,
    },
    /// A file that is needed for the call is missing or unusable.
    #[error("cannot use {path}: {source}")]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The TLS roots of the CA are unusable.
    #[error(transparent)]
    Roots(#[from] CaError),
    /// The CA cannot be reached, or cannot answer now.
    #[error("cannot ask the CA at {url}: {cause}")]
    Unavailable {
        /// Its URL.
        url: String,
        /// Why.
        cause: String,
    },
}

impl Releaser {
    /// Has not tried anything yet.
    #[must_use]
    pub(crate) fn new(host: HostRoot, metrics: Arc<Metrics>, retirement: Retirement) -> Self {
        Self { host, metrics, retirement, backoff: Backoff::default() }
    }

    /// Works on all notes that are due, for at most about `budget`. Blocks.
    pub(crate) fn work(&mut self, entry: &Entry, budget: Duration) {
        // An uninstallation that has begun removes the directory a second later.
        if self.retirement.has_begun() {
            return;
        }
        let began = SystemClock.now();
        let state_dir = self.host.resolve(&entry.state_dir);
        let wall = UNIX_EPOCH + Duration::from_secs(SystemClock.unix_seconds().try_into().unwrap_or_default());
        if let Err(error) = released::expect(&state_dir, &entry.network, wall) {
            tracing::warn!(%error, "cannot make the directory for notes: certificates of pods stay valid until they expire");
        }
        let notes = notes(&released::dir(&state_dir, &entry.network));
        self.backoff.retain(|name| notes.iter().any(|note| name_of(note) == name));
        if foreign::is_any_in(&state_dir, &entry.network) {
            // It may be of one of these pods.
            return;
        }
        let mut attached: Option<Vec<String>> = None;
        for note in notes {
            let (name, now) = (name_of(&note).to_owned(), SystemClock.now());
            if now.saturating_duration_since(began) > budget {
                return;
            }
            if !self.backoff.is_due(&name, now) {
                continue;
            }
            // An attachment in place may have given the pod a new certificate.
            let attached = attached.get_or_insert_with(|| attached_pods(&state_dir, &entry.network));
            match read(&note) {
                Some(pod) if attached.contains(&pod.uid) => remove(&note),
                Some(pod) => self.release(entry, &note, &name, pod, now),
                // Nobody else writes here, so it stays what it is.
                None => remove(&note),
            }
        }
    }

    fn release(&mut self, entry: &Entry, note: &Path, name: &str, pod: Released, now: Instant) {
        let shown = format!("{}/{}", pod.namespace, pod.name);
        let outcome = release(&self.host, &entry.ca, pod);
        self.metrics.released(outcome.is_ok());
        match outcome {
            Ok(()) => {
                tracing::info!(pod = shown, "the CA took the pod's certificates back");
                self.backoff.succeeded(name);
                remove(note);
            }
            Err(error @ ReleaseError::Final { .. }) => {
                tracing::info!(pod = shown, %error, "the pod's certificates stay as they are");
                remove(note);
            }
            Err(error) => {
                let failures = self.backoff.failed(name, now);
                if failures.is_power_of_two() {
                    tracing::warn!(pod = shown, %error, failures, "cannot give the pod's certificates back yet");
                }
            }
        }
    }
}

/// Follows the chain's entry and works on the notes every few seconds, until the task is cancelled.
pub(crate) async fn run(mut releaser: Releaser, entry: tokio::sync::watch::Receiver<Option<Arc<Entry>>>) {
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(entry) = entry.borrow().clone() else { continue };
        let worked = tokio::task::spawn_blocking(move || {
            releaser.work(&entry, BUDGET);
            releaser
        });
        match worked.await {
            Ok(back) => releaser = back,
            Err(error) => {
                tracing::error!(%error, "certificates of pods are given back no more");
                return;
            }
        }
    }
}

/// Tells the CA that a pod needs its certificates no more.
///
/// # Errors
/// See [`ReleaseError`].
pub(crate) fn release(host: &HostRoot, ca: &CaAccess, pod: Released) -> Result<(), ReleaseError> {
    let Released { name, namespace, uid, address } = pod;
    let token = read_token(&host.resolve(&ca.token_file))?;
    let mut release = Release {
        proof: Proof::Node {
            token: token.trim().to_owned(),
            pod: Pod { namespace, name, uid, address, other_address: None },
        },
    };
    let body = serde_json::to_vec(&release).map(Zeroizing::new);
    if let Proof::Node { token, .. } = &mut release.proof {
        token.zeroize();
    }
    let unavailable = |cause: String| ReleaseError::Unavailable { url: ca.url.clone(), cause };
    let body = body.map_err(|error| unavailable(error.to_string()))?;
    let target = Target { url: ca.url.clone(), server_name: ca.server_name.clone() };
    let agent = target.agent(&host.resolve(&ca.tls_ca_file))?;
    let url = target.request_url(RELEASE_PATH);
    let sent = agent.post(&url).header("content-type", "application/json").send(&body[..]);
    let mut response = sent.map_err(|error| unavailable(error.to_string()))?;
    let status = response.status().as_u16();
    let answer = response.body_mut().with_config().limit(MAX_REPLY as u64).read_to_vec();
    let answer = answer.map_err(|error| unavailable(error.to_string()))?;
    match status {
        200..=299 => Ok(()),
        _ => Err(match serde_json::from_slice::<Refusal>(&answer) {
            Ok(refusal) if is_final(status, &refusal.code) => {
                ReleaseError::Final { code: refusal.code, message: refusal.message }
            }
            Ok(Refusal { code, message }) => unavailable(format!("{message} ({code})")),
            Err(_) => unavailable(format!("status {status} without a reason; is that the CA?")),
        }),
    }
}

/// Whether another attempt would be refused as well (`nebula_cert::issuance`). What concerns the agent itself passes:
/// its token is replaced, the policy is corrected.
fn is_final(status: u16, code: &str) -> bool {
    (400..500).contains(&status) && ![401, 408, 425, 429].contains(&status) && !OF_AGENT.contains(&code)
}

fn notes(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut notes: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    notes.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    notes.sort();
    notes.truncate(MAX_NOTES);
    notes
}

fn attached_pods(state_dir: &Path, network: &str) -> Vec<String> {
    let uid = |path: &PathBuf| match Record::load(path) {
        Ok(Found::Record(record)) => Some(record.target.pod.uid),
        _ => None,
    };
    record::list(state_dir, network).unwrap_or_default().iter().filter_map(uid).collect()
}

fn read(note: &Path) -> Option<Released> {
    serde_json::from_slice(&durable::read_bounded(note, MAX_NOTE).ok()?).ok()
}

fn remove(note: &Path) {
    if let Err(error) = std::fs::remove_file(note)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(note = %note.display(), %error, "cannot remove a note");
    }
}

/// Reads the token into memory that is reserved at once: growing would leave copies of it behind.
fn read_token(path: &Path) -> Result<Zeroizing<String>, ReleaseError> {
    let failed = |source| ReleaseError::File { path: path.to_owned(), source };
    let mut text = Zeroizing::new(String::with_capacity(MAX_TOKEN));
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_TOKEN as u64).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

fn name_of(note: &Path) -> &str {
    note.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Refusals of the agent itself, or of the call.
const OF_AGENT: [&str; 7] = [
    "not_a_service_account",
    "wrong_account",
    "token_not_bound",
    "agent_gone",
    "node_proof_disabled",
    "not_found",
    "wrong_method",
];
const INTERVAL: Duration = Duration::from_secs(3);
const BUDGET: Duration = Duration::from_secs(20);
const MAX_NOTES: usize = 4096;
const MAX_TOKEN: usize = 256 << 10;
const MAX_NOTE: u64 = 64 << 10;
