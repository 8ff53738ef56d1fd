//! What is recorded of each decision: a line of the log and of the audit log, a count, and what the page shows.

use std::{
    collections::VecDeque,
    sync::{MutexGuard, PoisonError},
};

use nebula_cert::{
    UnixTime,
    issuance::{Proof, Request},
};

use super::Service;
use crate::{
    audit::Event,
    connections::Caller,
    issuer::{GivenBack, Issued},
    page::RefusalNote,
    proof::{self, node_credential::NodeCredential, token::TokenHash},
    refusal::Refusal,
    refusal_throttle::RefusalThrottle,
    time,
};

impl Service {
    /// Records a request that could not even be parsed, unless its sender makes too many of them.
    pub(crate) fn note_unreadable(&self, refusal: &Refusal, caller: Caller) {
        let now = time::now();
        self.metrics.count("unreadable", "none", refusal.code());
        if !self.admission.note_failure(caller.0, now) {
            self.note_refused(Event::default(), refusal, caller, now);
        }
    }

    /// Counts and records a refusal. If its sender fails too often, that becomes the refusal, and nothing is logged.
    pub(super) fn refuse(
        &self,
        call: &'static str,
        proof: &Proof,
        refusal: &Refusal,
        caller: Caller,
        now: UnixTime,
    ) -> Result<(), Refusal> {
        self.metrics.count(call, kind(proof), refusal.code());
        if refusal.is_failed_proof() && self.admission.has_failed(proof, caller.0, now) {
            return Err(Refusal::TooManyFailures);
        }
        let subject = match proof {
            // Only text that passed validation goes into the log as a name.
            Proof::Node { pod, .. } | Proof::Provisional { pod, .. }
                if proof::node::check_pod(pod).is_ok() && !refusal.is_failed_proof() =>
            {
                Some(format!("pod {}/{}", pod.namespace, pod.name))
            }
            _ => None,
        };
        let about = Event { proof: Some(describe(proof)), subject, ..Event::default() };
        self.note_refused(about, refusal, caller, now);
        Ok(())
    }

    /// Records how many refusals were not logged.
    pub(crate) fn note_left_out(&self) {
        let count = self.refusals().take_left_out();
        if count > 0 {
            tracing::warn!(count, "refusals were not written down: too many");
            let (source, left_out) = ("nebula-ca".to_owned(), Some(count));
            self.audit.write(&Event { event: "refusals_left_out", source, left_out, ..Event::default() }, time::now());
        }
    }

    fn refusals(&self) -> MutexGuard<'_, RefusalThrottle> {
        // Counters stay usable after a panic elsewhere.
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_issued(&self, request: &Request, issued: &Issued, caller: Caller, now: UnixTime) {
        let record = &issued.record;
        let event = if issued.is_repeat { "repeated" } else { "issued" };
        tracing::info!(
            name = record.name, subject = %record.subject, fingerprint = issued.fingerprint, source = %caller.0,
            "certificate {event}"
        );
        let event = Event {
            event,
            source: caller.0.to_string(),
            proof: Some(describe(&request.proof)),
            subject: Some(record.subject.to_string()),
            name: Some(&record.name),
            networks: &record.networks,
            groups: &record.groups,
            fingerprint: Some(&issued.fingerprint),
            not_after: Some(nebula_cert::rfc3339(record.not_after)),
            ..Event::default()
        };
        self.audit.write(&event, now);
    }

    pub(super) fn note_ended(
        &self,
        event: &'static str,
        ended: &GivenBack,
        source: String,
        proof: Option<String>,
        now: UnixTime,
    ) {
        for fingerprint in &ended.fingerprints {
            let fingerprint = fingerprint.to_string();
            tracing::info!(subject = ended.subject, fingerprint, source, "certificate blocked: {event}");
            let event = Event {
                event,
                source: source.clone(),
                proof: proof.clone(),
                subject: Some(ended.subject.clone()),
                fingerprint: Some(&fingerprint),
                ..Event::default()
            };
            self.audit.write(&event, now);
        }
    }

    /// Records a refusal; `about` says what was asked for, and by whom.
    pub(super) fn note_refused(&self, about: Event<'_>, refusal: &Refusal, caller: Caller, now: UnixTime) {
        if !self.refusals().admits(caller.0, now) {
            return;
        }
        let code = refusal.code();
        tracing::warn!(code, source = %caller.0, "request refused: {refusal}");
        let message = refusal.to_string();
        {
            let subject = about.subject.clone();
            let note = RefusalNote { at: now, source: caller.0, code, subject, message: message.clone() };
            let mut last = self.last_refusals();
            last.push_back(note);
            if last.len() > MAX_REFUSALS_SHOWN {
                last.pop_front();
            }
        }
        let event =
            Event { event: "refused", source: caller.0.to_string(), code: Some(code), message: Some(message), ..about };
        self.audit.write(&event, now);
    }

    pub(super) fn last_refusals(&self) -> MutexGuard<'_, VecDeque<RefusalNote>> {
        // A list stays usable after a panic elsewhere.
        self.last_refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn describe(proof: &Proof) -> String {
    match proof {
        Proof::Token { token } => format!("token {}", TokenHash::of(token).id()),
        Proof::Node { token, .. } | Proof::Provisional { token, .. } if NodeCredential::is_claimed_by(token) => {
            format!("{} credential", kind(proof))
        }
        other => kind(other).to_owned(),
    }
}

pub(super) fn kind(proof: &Proof) -> &'static str {
    match proof {
        Proof::Token { .. } => "token",
        Proof::Node { .. } => "node",
        Proof::Provisional { .. } => "provisional",
        Proof::Pod { .. } => "pod",
        Proof::Lighthouse { .. } => "lighthouse",
        Proof::Gateway { .. } => "gateway",
        Proof::Certificate { .. } => "certificate",
    }
}

/// Each takes a few hundred bytes.
pub(super) const MAX_REFUSALS_SHOWN: usize = 20;
