//! The service that all connections share: decides about requests, records the decisions, and wakes callers that wait
//! for a change of the trust bundle.

mod decisions;
mod revocations;

use std::{
    collections::{HashSet, VecDeque},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use arc_swap::ArcSwap;
use nebula_cert::{
    issuance::{Asker, NodeCredential, Proof, Release, Released, Request},
    with_causes,
};
use tokio::sync::{Semaphore, watch};

use self::decisions::{describe, kind};
use crate::{
    address::Subject,
    admission::{Admission, Turn},
    agents::Agents,
    audit::{AuditLog, Event},
    connections::Caller,
    control::{Command, CommandOutcome, Operator},
    directory::AUDIT_LOG,
    followers::Followers,
    issuer::{GivenBack, Issued, Issuer},
    members::Members,
    metrics::{Gauges, Metrics},
    operators::Operators,
    page::{self, Page, RefusalNote, Shown, View},
    proof::token::TokenHash,
    refusal::Refusal,
    refusal_throttle::RefusalThrottle,
    settings::{ServerSettings, Tls, read_rules, read_tls},
    store::Displaced,
    time,
    trust::Trust,
    trust_config_map::{self, TrustConfigMap},
};

/// The service behind all listeners. Methods block on the disk and the API server unless documented otherwise.
pub(crate) struct Service {
    issuer: Issuer,
    settings: ServerSettings,
    tls: ArcSwap<Tls>,
    audit: AuditLog,
    metrics: Metrics,
    admission: Admission,
    operators: Operators,
    refusals: Mutex<RefusalThrottle>,
    /// Refusals to show on the page; at most [`decisions::MAX_REFUSALS_SHOWN`], newest last.
    last_refusals: Mutex<VecDeque<RefusalNote>>,
    /// Number of consecutive failed attempts to recover the store.
    lost_attempts: AtomicU32,
    trust: watch::Sender<Option<Arc<Trust>>>,
    members: Members,
    followers: Followers,
    agents: Arc<Agents>,
    waiting: Semaphore,
    refreshing: Mutex<()>,
    /// What was wrong with the last attempt to publish the trust in a ConfigMap.
    unpublished: Mutex<Option<String>>,
    /// Serialises reloads.
    reloading: Mutex<()>,
}

impl Service {
    pub(crate) fn new(issuer: Issuer, settings: ServerSettings, tls: Tls) -> Self {
        Self {
            issuer,
            audit: AuditLog::new(settings.directory.file(AUDIT_LOG)),
            settings,
            tls: ArcSwap::from_pointee(tls),
            metrics: Metrics::default(),
            admission: Admission::new(),
            operators: Operators::new(),
            refusals: Mutex::new(RefusalThrottle::new()),
            last_refusals: Mutex::default(),
            lost_attempts: AtomicU32::new(0),
            trust: watch::Sender::new(None),
            members: Members::new(),
            followers: Followers::new(time::now()),
            agents: Arc::default(),
            waiting: Semaphore::new(MAX_WAITING),
            refreshing: Mutex::default(),
            unpublished: Mutex::default(),
            reloading: Mutex::default(),
        }
    }

    pub(crate) fn issuer(&self) -> &Issuer {
        &self.issuer
    }

    /// TLS settings for the next connection. Does not block.
    pub(crate) fn tls(&self) -> Arc<Tls> {
        self.tls.load_full()
    }

    /// The current trust bundle and its changes. Does not block.
    pub(crate) fn trust(&self) -> watch::Receiver<Option<Arc<Trust>>> {
        self.trust.subscribe()
    }

    /// Who is in the network. Does not block.
    pub(crate) fn members(&self) -> &Members {
        &self.members
    }

    /// Who follows the trust. Does not block.
    pub(crate) fn followers(&self) -> &Followers {
        &self.followers
    }

    /// The holder of a certificate who asks whom to trust; `None` if it is not the one it says.
    pub(crate) fn asker(&self, asker: &Asker) -> Result<Option<Subject>, Refusal> {
        self.issuer.asker(asker, time::now())
    }

    /// The agents that read the directory. Does not block.
    pub(crate) fn agents(&self) -> &Arc<Agents> {
        &self.agents
    }

    /// The node whose agent was shown to have this token a moment ago. Does not block.
    pub(crate) fn known_agent(&self, token: &str) -> Option<String> {
        self.agents.node_of(&TokenHash::of(token), time::now())
    }

    /// Limits how many callers wait for a change; closed when the service stops.
    pub(crate) fn waiting(&self) -> &Semaphore {
        &self.waiting
    }

    /// Wakes all callers that wait for a change.
    pub(crate) fn stop_waiting(&self) {
        self.waiting.close();
        // A waiting caller checks again, and finds the semaphore closed.
        self.trust.send_modify(|_| {});
        self.members.wake();
    }

    /// Takes over who joined or left, here or by another service on the same ledger.
    pub(crate) fn follow_members(&self) {
        self.members.follow(&*self.issuer.store, time::now());
    }

    /// The node whose agent has the token of `proof`, whose turn has come.
    pub(crate) fn agent(&self, proof: &Proof, token: &str, caller: Caller, _turn: Turn) -> Result<String, Refusal> {
        let now = time::now();
        match self.issuer.node(token, caller.0, now) {
            Ok(node) => {
                self.admission.was_good(proof, now);
                self.agents.is_of(TokenHash::of(token), &node, now);
                self.metrics.count("directory", kind(proof), "admitted");
                Ok(node)
            }
            Err(refusal) => {
                self.refuse("directory", proof, &refusal, caller, now)?;
                Err(refusal)
            }
        }
    }

    /// A credential for the node whose agent has the token of `proof`, whose turn has come.
    pub(crate) fn node_credential(
        &self,
        proof: &Proof,
        token: &str,
        caller: Caller,
        _turn: Turn,
    ) -> Result<NodeCredential, Refusal> {
        let now = time::now();
        match self.issuer.node_credential(token, now) {
            Ok(made) => {
                self.admission.was_good(proof, now);
                self.metrics.count("node_credential", kind(proof), "issued");
                let event = Event {
                    event: "node_credential",
                    source: caller.0.to_string(),
                    proof: Some(describe(proof)),
                    subject: Some(format!("node {}", made.node)),
                    not_after: Some(nebula_cert::rfc3339(made.not_after)),
                    ..Event::default()
                };
                self.audit.write(&event, now);
                Ok(made)
            }
            Err(refusal) => {
                self.refuse("node_credential", proof, &refusal, caller, now)?;
                Err(refusal)
            }
        }
    }

    /// Rebuilds the trust bundle; wakes waiters if it changed.
    pub(crate) fn refresh_trust(&self) {
        // One at a time: the first to read is the first to publish, or an older list could replace a newer one.
        let _one_at_a_time = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        match self.issuer.trust(time::now()) {
            Ok(trust) => {
                self.trust.send_if_modified(|known| {
                    let is_new = known.as_ref().is_none_or(|known| known.etag != trust.etag);
                    if is_new {
                        *known = Some(Arc::new(trust));
                    }
                    is_new
                });
            }
            // What cannot be read is not served from memory either: a blocked certificate would seem valid.
            Err(_) => drop(self.trust.send_replace(None)),
        }
    }

    /// Waits for a proof's turn to be checked. Does not block.
    pub(crate) async fn turn(&self, call: &'static str, proof: &Proof, caller: Caller) -> Result<Turn, Refusal> {
        if self.issuer.rules().cluster.is_none() {
            // Proofs are checked locally, in no time.
            return Ok(Turn::default());
        }
        let turn = self.admission.turn(proof, caller.0, time::now()).await;
        turn.inspect_err(|refusal| self.metrics.count(call, kind(proof), refusal.code()))
    }

    /// Decides about a request whose turn has come, and records the decision.
    pub(crate) fn answer(&self, request: &Request, caller: Caller, _turn: Turn) -> Result<Issued, Refusal> {
        let now = time::now();
        let kind = kind(&request.proof);
        let outcome = self.issuer.issue(request, caller.0, now);
        match &outcome {
            Ok(issued) => {
                self.admission.was_good(&request.proof, now);
                self.metrics.count("certificate", kind, if issued.is_repeat { "repeated" } else { "issued" });
                self.note_issued(request, issued, caller, now);
                if !issued.displaced.is_empty() {
                    for Displaced { subject, certificates } in &issued.displaced {
                        let ended = GivenBack { subject: subject.to_string(), fingerprints: certificates.clone() };
                        self.note_ended(
                            "address_reused",
                            &ended,
                            caller.0.to_string(),
                            Some(describe(&request.proof)),
                            now,
                        );
                    }
                }
                if !issued.is_repeat {
                    self.follow_members();
                }
                if !issued.displaced.is_empty() || matches!(issued.record.subject, Subject::Lighthouse { .. }) {
                    self.refresh_trust();
                }
            }
            Err(refusal) => self.refuse("certificate", &request.proof, refusal, caller, now)?,
        }
        outcome
    }

    /// Releases certificates that [`Service::answer`] issued.
    pub(crate) fn release(&self, release: &Release, caller: Caller, _turn: Turn) -> Result<Released, Refusal> {
        let now = time::now();
        let kind = kind(&release.proof);
        match self.issuer.release(release, caller.0, now) {
            Ok(given_back) => {
                self.admission.was_good(&release.proof, now);
                self.metrics.count("release", kind, "released");
                self.note_ended("released", &given_back, caller.0.to_string(), Some(describe(&release.proof)), now);
                self.refresh_trust();
                self.follow_members();
                let fingerprints = given_back.fingerprints.iter().map(ToString::to_string).collect();
                Ok(Released { fingerprints })
            }
            Err(refusal) => {
                self.refuse("release", &release.proof, &refusal, caller, now)?;
                Err(refusal)
            }
        }
    }

    /// Rebuilds the trust bundle if there is none, and checks a store that failed: a full disk may have space again.
    pub(crate) fn recover(&self) {
        if self.issuer.has_lost_store() {
            if !self.issuer.recovers_store() {
                self.lost_attempts.fetch_add(1, Ordering::Relaxed);
                return;
            }
            tracing::warn!("the store works again");
        }
        self.lost_attempts.store(0, Ordering::Relaxed);
        if self.trust.borrow().is_none() {
            self.refresh_trust();
        }
    }

    /// Liveness: `false` once a restart might help.
    pub(crate) fn is_alive(&self) -> bool {
        self.lost_attempts.load(Ordering::Relaxed) < MAX_LOST_ATTEMPTS
    }

    /// Blocks the certificates of deleted pods.
    pub(crate) fn block_deleted(&self) {
        let now = time::now();
        match self.issuer.block_deleted(now) {
            Ok(gone) if gone.is_empty() => {}
            Ok(gone) => {
                for given_back in &gone {
                    self.note_ended("pod_deleted", given_back, "kubernetes".to_owned(), None, now);
                }
                self.refresh_trust();
                self.follow_members();
            }
            Err(refusal) => tracing::warn!(%refusal, "cannot tell which pods were deleted"),
        }
    }

    /// Looks where the lighthouses are.
    pub(crate) fn follow_lighthouses(&self) {
        match self.issuer.follow_lighthouses(time::now()) {
            Ok(false) => {}
            Ok(true) => self.refresh_trust(),
            Err(refusal) => tracing::warn!(%refusal, "cannot tell where the lighthouses are"),
        }
    }

    /// Writes the trust into the ConfigMap that the policy names, if it says something else.
    pub(crate) fn publish_trust(&self) {
        let rules = self.issuer.rules();
        let Some((cluster, (namespace, name))) = rules.cluster.as_deref().zip(rules.trust_config_map()) else { return };
        let tls = self.tls.load();
        let trust = TrustConfigMap { tls: &tls.certificates, ca: rules.authority.bundle() };
        let outcome = trust.publish(cluster, namespace, name);
        let mut unpublished = self.unpublished.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(has_changed) => {
                if has_changed || unpublished.is_some() {
                    tracing::info!(namespace, name, "the ConfigMap says whom to trust");
                }
                *unpublished = None;
            }
            Err(error) => {
                // Once, as long as it stays the same.
                let text = format!("{error}; {}", trust_config_map::advice(&error, namespace, name));
                if unpublished.as_ref() != Some(&text) {
                    tracing::error!(
                        namespace,
                        name,
                        error = text,
                        "cannot write the ConfigMap that says whom to trust"
                    );
                }
                *unpublished = Some(text);
            }
        }
    }

    /// Reloads policy, CA and TLS files. A mistake in any of them leaves everything unchanged.
    pub(crate) fn reload(&self) -> Result<(), String> {
        let _one_at_a_time = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let present = self.issuer.rules();
        let outcome = tokio::runtime::Handle::current()
            .block_on(read_rules(&self.settings, Some(&present)))
            .and_then(|rules| Ok((rules, read_tls(&self.settings.directory)?)));
        let now = time::now();
        match outcome {
            Ok((rules, tls)) => {
                self.issuer.replace_rules(rules);
                self.tls.store(Arc::new(tls));
                self.refresh_trust();
                self.publish_trust();
                tracing::info!("policy, CA and TLS files were reloaded");
                self.audit.write(&Event { event: "reloaded", source: "control".to_owned(), ..Event::default() }, now);
                Ok(())
            }
            Err(error) => {
                let message = with_causes(&error);
                tracing::error!(error = message, "nothing was reloaded; the service goes on as before");
                let event = Event {
                    event: "reload_refused",
                    source: "control".to_owned(),
                    message: Some(message.clone()),
                    ..Event::default()
                };
                self.audit.write(&event, now);
                Err(message)
            }
        }
    }

    /// Carries out an operator's command.
    pub(crate) fn obey(&self, command: &Command) -> CommandOutcome {
        if let Command::Reload = command {
            return match self.reload() {
                Ok(()) => CommandOutcome::Reloaded,
                Err(message) => CommandOutcome::Failed { message: format!("nothing was changed: {message}") },
            };
        }
        let rules = self.issuer.rules();
        let authorities = std::slice::from_ref(rules.authority.certificate());
        let (store, policy, audit) = (&*self.issuer.store, &rules.policy, &self.audit);
        let mut answer = Operator { directory: &self.settings.directory, store, authorities, policy, audit }
            .obey(command, time::now());
        if let CommandOutcome::Revoked { unaware, .. } = &mut answer {
            self.refresh_trust();
            self.follow_members();
            // The certificates are blocked, whether or not this can be told.
            *unaware = self.followers.unaware(&self.issuer, &HashSet::new(), time::now()).ok();
        }
        answer
    }

    /// Renders the page of identities.
    pub(crate) fn page(&self, view: &View) -> Result<Page, Refusal> {
        let issued = self.issuer.store.all_issued().map_err(|_| Refusal::Internal)?;
        let tokens = self.issuer.store.tokens().map_err(|_| Refusal::Internal)?;
        let refusals = self.last_refusals().iter().cloned().collect();
        let lighthouses = self.issuer.store.lighthouses().map_err(|_| Refusal::Internal)?;
        let shown = Shown { issued, tokens, lighthouses, refusals };
        Ok(page::identities(self.issuer.rules().authority.certificate(), shown, view, time::now()))
    }

    /// Renders the metrics.
    pub(crate) fn metrics(&self) -> Result<String, Refusal> {
        let now = time::now();
        let gauges = Gauges {
            valid: self.issuer.count_valid(now)?,
            blocked: self.issuer.store.blocklist(now).map_err(|_| Refusal::Internal)?.len(),
            ca_expires: self.issuer.rules().authority.certificate().not_after(),
            waiting: MAX_WAITING.saturating_sub(self.waiting.available_permits()),
            ready: self.issuer.health(now).is_ok(),
            members: self.members.count(),
            lighthouses: self.trust.borrow().as_ref().map_or(0, |trust| trust.body.lighthouses.len()),
        };
        Ok(self.metrics.text(&gauges))
    }
}

/// Five minutes of attempts, one per second.
const MAX_LOST_ATTEMPTS: u32 = 300;
/// The remaining connections are for requests.
const MAX_WAITING: usize = 3_584;
