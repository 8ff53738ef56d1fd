//! Revocation by people whose token and rights the API server confirms.

use std::collections::HashSet;

use nebula_cert::{
    Fingerprint, UnixTime,
    revocation::{
        AUDIENCE, BadRequest, GROUP, MAX_LISTED, Next, RESOURCE, Request, Revocation, RevokedCertificate, Spread, VERB,
        Which,
    },
};

use super::Service;
use crate::{
    address::Subject,
    audit::Event,
    cluster::Action,
    connections::Caller,
    operators::Place,
    pod::{is_name, is_namespace},
    proof::review,
    refusal::Refusal,
    revocation,
    store::{IssuedRecord, Store, StoreError},
    time,
};

/// Certificates with their records.
type Meant = Vec<(Fingerprint, IssuedRecord)>;

impl Service {
    /// Refuses if nobody may revoke anything this way. Does not block.
    pub(crate) fn check_revocation(&self) -> Result<(), Refusal> {
        let rules = self.issuer.rules();
        let is_on = rules.policy.kubernetes.as_ref().is_some_and(|kubernetes| kubernetes.revocation);
        if is_on && rules.cluster.is_some() { Ok(()) } else { Err(Refusal::RevocationDisabled) }
    }

    /// Waits for a place in which the API server is asked about the token. Does not block.
    pub(crate) async fn place_of_operator(&self, token: &str, caller: Caller) -> Result<Place, Refusal> {
        let place = self.operators.place(token, caller.0, time::now()).await;
        place.inspect_err(|refusal| self.metrics.count(CALL, PROOF, refusal.code()))
    }

    /// Records a request that was refused before anybody was asked about it.
    pub(crate) fn note_revocation_refused(&self, refusal: &Refusal, caller: Caller) {
        self.metrics.count(CALL, PROOF, refusal.code());
        self.note_refused(Event::default(), refusal, caller, time::now());
    }

    /// Revokes certificates for the owner of the token, or only says what that would be.
    pub(crate) fn revoke(
        &self,
        token: &str,
        request: &Request,
        caller: Caller,
        _place: Place,
    ) -> Result<Revocation, Refusal> {
        let now = time::now();
        let mut user = None;
        let outcome = self.decide(token, request, caller, &mut user, now);
        match &outcome {
            Ok(revocation) if revocation.dry_run => self.metrics.count(CALL, PROOF, "previewed"),
            Ok(_) => self.metrics.count(CALL, PROOF, "revoked"),
            Err(refusal) => {
                self.metrics.count(CALL, PROOF, refusal.code());
                // Strangers do not write into the log what they like.
                let about = user.as_deref().map(|user| Event {
                    subject: Some(request.which.to_string()),
                    user: Some(user),
                    reason: Some(&request.reason),
                    ..Event::default()
                });
                self.note_refused(about.unwrap_or_default(), refusal, caller, now);
            }
        }
        outcome
    }

    /// Nothing is looked up before the API server has said that the user may do this, so nobody else learns whether
    /// there is such a certificate.
    fn decide(
        &self,
        token: &str,
        request: &Request,
        caller: Caller,
        user: &mut Option<String>,
        now: UnixTime,
    ) -> Result<Revocation, Refusal> {
        check(request)?;
        let rules = self.issuer.rules();
        let cluster = rules.cluster.as_deref().ok_or(Refusal::RevocationDisabled)?;
        let owner = review(cluster, AUDIENCE, token, now).inspect_err(|refusal| {
            if refusal.is_failed_proof() {
                self.operators.was_rejected(token, now);
            }
        })?;
        let shown = owner.shown();
        *user = Some(shown.clone());
        let namespace = request.which.namespace();
        let action = Action { verb: VERB, group: GROUP, resource: RESOURCE, namespace };
        if !cluster.permits(&owner, &action)? {
            let place =
                namespace.map_or_else(|| "the whole cluster".to_owned(), |namespace| format!("namespace {namespace}"));
            return Err(Refusal::NotPermitted { user: shown, place });
        }
        self.operators.was_permitted(caller.0, now);

        let mut meant = self.meant(request, now)?;
        let new = meant.iter().filter(|(_, issued)| issued.revoked.is_none()).count();
        if !self.issuer.store.run(|store| revocation::has_room(store, new, now))? {
            return Err(Refusal::BlocklistFull);
        }
        if request.keep_out {
            let subjects = meant.iter().map(|(_, issued)| &issued.subject);
            let pods = revocation::pods_of(subjects).ok_or(Refusal::BadRevocation(BadRequest::KeepOut))?;
            if !request.dry_run {
                self.issuer.store.run(|store| revocation::keep_out(store, &pods, now))?;
                for pod in &pods {
                    let name = format!("{}/{}", pod.namespace, pod.name);
                    let event = Event { event: "kept_out", name: Some(&name), ..Event::default() };
                    self.note_operator(event, &shown, request, caller, now);
                }
                // One may have been issued until then.
                meant = self.meant(request, now)?;
            }
        }
        if !request.dry_run {
            self.block(&meant, &shown, request, caller, now)?;
        }
        self.described(meant, shown, request, now)
    }

    fn meant(&self, request: &Request, now: UnixTime) -> Result<Meant, Refusal> {
        let meant = self.issuer.store.run(|store| revocation::find_named(store, &request.which, now))?;
        if meant.is_empty() {
            return Err(Refusal::NoSuchCertificate(request.which.to_string()));
        }
        Ok(meant)
    }

    /// Blocks those that are not blocked yet.
    fn block(
        &self,
        meant: &Meant,
        user: &str,
        request: &Request,
        caller: Caller,
        now: UnixTime,
    ) -> Result<(), Refusal> {
        let new: Vec<_> = meant.iter().filter(|(_, issued)| issued.revoked.is_none()).collect();
        if new.is_empty() {
            return Ok(());
        }
        let fingerprints: Vec<Fingerprint> = new.iter().map(|(fingerprint, _)| *fingerprint).collect();
        self.issuer.store.run(|store| store.revoke(&fingerprints, now))?;
        for (fingerprint, issued) in new {
            let fingerprint = fingerprint.to_string();
            tracing::warn!(subject = %issued.subject, fingerprint, user, reason = request.reason, "certificate revoked");
            let event = Event {
                event: "revoked",
                subject: Some(issued.subject.to_string()),
                name: Some(&issued.name),
                networks: &issued.networks,
                groups: &issued.groups,
                fingerprint: Some(&fingerprint),
                not_after: Some(nebula_cert::rfc3339(issued.not_after)),
                ..Event::default()
            };
            self.note_operator(event, user, request, caller, now);
        }
        self.refresh_trust();
        self.follow_members();
        Ok(())
    }

    fn note_operator(&self, event: Event<'_>, user: &str, request: &Request, caller: Caller, now: UnixTime) {
        let source = caller.0.to_string();
        let event = Event { source, user: Some(user), reason: Some(&request.reason), ..event };
        self.audit.write(&event, now);
    }

    /// What is revoked, or would be, and who refuses it when.
    fn described(
        &self,
        mut meant: Meant,
        user: String,
        request: &Request,
        now: UnixTime,
    ) -> Result<Revocation, Refusal> {
        meant.sort_by_key(|(_, issued)| (issued.revoked, issued.not_after));
        let revoked: HashSet<Fingerprint> = meant.iter().map(|(fingerprint, _)| *fingerprint).collect();
        let unaware = self.followers.unaware(&self.issuer, &revoked, now)?;
        let spread = Spread {
            published_within: i64::from(self.issuer.store.is_shared()),
            others: unaware.of,
            unaware: unaware.holders.len() + unaware.more,
            // Those that hear of it last come first.
            last_hears_by: unaware.holders.first().map(|holder| holder.hears_by),
            ends: meant.iter().map(|(_, issued)| issued.not_after).max().unwrap_or(now),
            is_partial: unaware.is_partial,
        };
        let (total, new) = (meant.len(), meant.iter().filter(|(_, issued)| issued.revoked.is_none()).count());
        meant.truncate(MAX_LISTED);
        let listed = |(fingerprint, issued): (Fingerprint, IssuedRecord)| {
            Ok(RevokedCertificate {
                subject: issued.subject.to_string(),
                fingerprint: fingerprint.to_string(),
                next: self.issuer.store.run(|store| next_of(store, &issued.subject, request.keep_out))?,
                name: issued.name,
                networks: issued.networks,
                groups: issued.groups,
                not_after: issued.not_after,
                revoked: issued.revoked,
            })
        };
        let certificates = meant.into_iter().map(listed).collect::<Result<_, Refusal>>()?;
        Ok(Revocation { dry_run: request.dry_run, user, certificates, total, new, spread })
    }
}

/// How the holder of a revoked certificate gets another one.
fn next_of(store: &dyn Store, subject: &Subject, keep_out: bool) -> Result<Next, StoreError> {
    Ok(match subject {
        Subject::Host { .. } => Next::NewToken,
        Subject::Pod { uid, .. } if keep_out || store.kept_out(uid)?.is_some() => Next::KeptOut,
        Subject::Pod { .. } | Subject::Lighthouse { .. } | Subject::Gateway { .. } => Next::AnotherCertificate,
    })
}

fn check(request: &Request) -> Result<(), Refusal> {
    request.check().map_err(Refusal::BadRevocation)?;
    let is_good = match &request.which {
        Which::Pod { namespace, name } => is_namespace(namespace) && is_name(name),
        Which::Fingerprint { namespace, .. } => namespace.as_deref().is_none_or(is_namespace),
        Which::Host { .. } => true,
    };
    if is_good { Ok(()) } else { Err(Refusal::BadRevocation(BadRequest::Name)) }
}

/// Call and kind of proof of the metrics.
const CALL: &str = "revoke";
const PROOF: &str = "operator";
