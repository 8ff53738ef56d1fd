//! Issues certificates: checks proof and policy, signs, and records in the ledger; one certificate or one refusal per
//! request.

mod gateway;
mod ledger;
mod lighthouse;
mod node;
mod pod;
mod pod_address;
mod release;
mod renewal;
mod rules;
mod signature;

use std::{
    net::IpAddr,
    num::NonZeroU16,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arc_swap::ArcSwap;
use nebula_cert::{
    Certificate, UnixTime, hex,
    issuance::{self, Proof, Reply, Request},
};
use sha2::{Digest, Sha256};

use self::{
    ledger::WatchedStore,
    pod::{Occasion, identified},
    signature::Recorded,
};
pub(crate) use self::{release::GivenBack, rules::Rules};
use crate::{
    address::Subject,
    authority::Grant,
    proof::{
        certificate::{Presented, RenewalKey},
        node::NodeToken,
        token::TokenHash,
    },
    quota::Quotas,
    refusal::Refusal,
    store::{Displaced, IssuedRecord, Store},
    trust::Trust,
};

/// Everything that decides about a request. Shared by all connections; its methods block on the disk and the API
/// server.
pub(crate) struct Issuer {
    rules: ArcSwap<Rules>,
    node_token: Option<NodeToken>,
    renewal_key: RenewalKey,
    pub(crate) store: WatchedStore,
    /// Rate limits per pod and per node.
    quotas: Mutex<Quotas>,
}

/// A certificate to hand out, and what the audit log records about it.
pub(crate) struct Issued {
    pub(crate) reply: Reply,
    pub(crate) record: IssuedRecord,
    pub(crate) fingerprint: String,
    /// Identities that lost an address to this certificate.
    pub(crate) displaced: Vec<Displaced>,
    /// The same answer as before, repeated for a caller that lost it.
    pub(crate) is_repeat: bool,
}
impl Issuer {
    pub(crate) fn new(
        rules: Rules,
        node_token: Option<NodeToken>,
        renewal_key: RenewalKey,
        store: Box<dyn Store>,
    ) -> Self {
        let quotas = Mutex::new(Quotas::new());
        let rules = ArcSwap::from_pointee(rules);
        Self { rules, node_token, renewal_key, store: WatchedStore::new(store), quotas }
    }

    /// The rules in force; a request uses one version of them throughout.
    pub(crate) fn rules(&self) -> Arc<Rules> {
        self.rules.load_full()
    }

    /// Replaces the rules for later requests.
    pub(crate) fn replace_rules(&self, rules: Rules) {
        self.rules.store(Arc::new(rules));
    }

    /// Answers one request, which came from `source`.
    pub(crate) fn issue(&self, request: &Request, source: IpAddr, now: UnixTime) -> Result<Issued, Refusal> {
        let rules = self.rules();
        // Check the proof first: a caller that proves nothing learns nothing about the rest.
        match &request.proof {
            Proof::Token { token } => self.issue_for_token(&rules, &TokenHash::of(token), &request.public_key, now),
            Proof::Node { token, pod } => {
                let facts = self.vouched(&rules, token, pod, source, now)?;
                self.issue_for_pod(&rules, &facts, Occasion::First, &request.public_key, now)
            }
            Proof::Provisional { token, pod } => {
                let facts = self.vouched(&rules, token, pod, source, now)?;
                self.issue_for_pod(&rules, &facts, Occasion::Provisional, &request.public_key, now)
            }
            Proof::Pod { token, address, other_address } => {
                let facts = identified(&rules, token, *address, *other_address, now)?;
                self.issue_for_pod(&rules, &facts, Occasion::First, &request.public_key, now)
            }
            Proof::Lighthouse { token, port } => {
                self.issue_for_lighthouse(&rules, token, port.map(NonZeroU16::get), request, now)
            }
            Proof::Gateway { token } => self.issue_for_gateway(&rules, token, request, now),
            Proof::Certificate { certificate, time, tag } => {
                let public_key = Some(request.public_key.as_str());
                let presented = Presented { certificate, time: *time, tag, public_key };
                let (present, record) = self.held(&rules, &presented, now)?;
                self.renew(&rules, &present, record, &request.public_key, source, now)
            }
        }
    }

    /// The trust bundle at `now`.
    pub(crate) fn trust(&self, now: UnixTime) -> Result<Trust, Refusal> {
        let blocklist = self.store.run(|store| store.blocklist(now))?;
        let rules = self.rules();
        let lighthouses = self.lighthouses(&rules)?;
        Ok(Trust::new(rules.authority.bundle(), &blocklist, self.renewal_key.public_pem(), lighthouses))
    }

    /// The holder of a certificate who asks whom to trust, if it is the one it says.
    pub(crate) fn asker(&self, asker: &issuance::Asker, now: UnixTime) -> Result<Option<Subject>, Refusal> {
        let known = self.issued(&asker.fingerprint)?.filter(|known| known.revoked.is_none() && known.not_after >= now);
        let Some(known) = known else { return Ok(None) };
        let Ok(certificate) = Certificate::from_pem(known.pem.as_bytes()) else { return Ok(None) };
        Ok(self.renewal_key.is_asked_by(asker, &certificate, now).then_some(known.subject))
    }

    /// Whether certificates can be issued: store and CA are usable.
    pub(crate) fn health(&self, now: UnixTime) -> Result<(), Refusal> {
        if self.store.is_lost() || self.store.blocklist(now).is_err() {
            return Err(Refusal::Internal);
        }
        self.rules().authority.check_validity(now)
    }

    /// The certificate of a host with a one-time token.
    fn issue_for_token(
        &self,
        rules: &Rules,
        hash: &TokenHash,
        public_key: &str,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let token = self.store.run(|store| store.token(hash))?.ok_or(Refusal::UnknownToken)?;
        let public_key = rules.read_public_key(public_key)?;
        let key = hex::encode(&Sha256::digest(&public_key));
        if !token.is_for(&key) {
            return Err(Refusal::TokenForOtherKey);
        }
        if token.used.as_ref().is_some_and(|used| used.key != key) {
            return Err(Refusal::TokenUsed);
        }
        if token.expires < now {
            return Err(Refusal::TokenExpired(nebula_cert::rfc3339(token.expires)));
        }
        if let Some(used) = &token.used
            && let Some(repeat) = self.repeat(&used.certificate, now)?
        {
            return Ok(repeat);
        }
        let grant = Grant {
            name: token.name.clone(),
            networks: token.networks,
            unsafe_networks: token.unsafe_networks,
            groups: token.groups,
            life: token.life.min(rules.policy.hosts.longest_life),
        };
        let subject = Subject::Host { name: token.name };
        let (token, kept) = (Some((hash, key.as_str())), rules.kept_for_host(&subject));
        let recorded = Recorded { subject: &subject, pod: None, token, provisional: false, kept };
        self.sign_and_record(rules, &grant, recorded, public_key, now)
    }

    fn quotas(&self) -> MutexGuard<'_, Quotas> {
        // Counters stay usable after a panic elsewhere.
        self.quotas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
