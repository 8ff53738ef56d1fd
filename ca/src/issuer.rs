//! Where proof, policy, signature and ledger meet: one request in, one certificate or one reason out.

use std::sync::atomic::{AtomicBool, Ordering};

use nebula_cert::{
    Fingerprint, UnixTime,
    issuance::{Pod, Proof, Reply, Request},
    public_key_from_pem,
};
use sha2::{Digest, Sha256};

use crate::{
    address::{AddressMode, Subject},
    authority::{Authority, Grant},
    policy::{PodPolicy, Policy},
    proof::{
        node::{self, NodeToken},
        token::TokenHash,
    },
    refusal::Refusal,
    store::{AllotError, Issue, IssuedRecord, Pool, RecordError, Store, StoreError},
    trust::Trust,
};

/// Everything that decides about a request. Shared by all connections; methods block on the disk.
pub(crate) struct Issuer {
    pub(crate) authority: Authority,
    pub(crate) policy: Policy,
    pub(crate) node_token: Option<NodeToken>,
    pub(crate) store: Box<dyn Store>,
    /// Set for good when the ledger failed: redb wants to be reopened, which is what a restart does.
    store_failed: AtomicBool,
}

/// A certificate to hand out, and what the audit log says of it.
pub(crate) struct Issued {
    pub(crate) reply: Reply,
    pub(crate) record: IssuedRecord,
    pub(crate) fingerprint: String,
    /// The same answer as before, for a caller that lost it.
    pub(crate) is_repeat: bool,
}

impl Issuer {
    pub(crate) fn new(
        authority: Authority,
        policy: Policy,
        node_token: Option<NodeToken>,
        store: Box<dyn Store>,
    ) -> Self {
        Self { authority, policy, node_token, store, store_failed: AtomicBool::new(false) }
    }

    /// Answers one request.
    pub(crate) fn issue(&self, request: &Request, now: UnixTime) -> Result<Issued, Refusal> {
        // Who asks comes first: whoever proves nothing learns nothing about the rest.
        match &request.proof {
            Proof::Token { token } => self.issue_for_token(&TokenHash::of(token), &request.public_key, now),
            Proof::Node { token, pod } => {
                let expected = self.node_token.as_ref().ok_or(Refusal::NodeProofDisabled)?;
                if !expected.matches(token) {
                    return Err(Refusal::BadNodeToken);
                }
                let policy = self.policy.pods.as_ref().ok_or(Refusal::NodeProofDisabled)?;
                self.issue_for_pod(policy, pod, &request.public_key, now)
            }
            Proof::Pod { .. } => Err(Refusal::PodProofDisabled),
            Proof::Certificate { .. } => Err(Refusal::RenewalDisabled),
        }
    }

    /// Whom to trust at `now`.
    pub(crate) fn trust(&self, now: UnixTime) -> Result<Trust, Refusal> {
        let blocklist = self.store.blocklist(now).map_err(|error| self.failed(&error))?;
        Ok(Trust::new(self.authority.bundle(), &blocklist))
    }

    /// Whether certificates can be issued at all: store and CA are usable.
    pub(crate) fn health(&self, now: UnixTime) -> Result<(), Refusal> {
        if self.store_failed.load(Ordering::Relaxed) || self.store.blocklist(now).is_err() {
            return Err(Refusal::Internal);
        }
        self.authority.check_validity(now)
    }

    fn issue_for_token(&self, hash: &TokenHash, public_key: &str, now: UnixTime) -> Result<Issued, Refusal> {
        let token = self.store.token(hash).map_err(|error| self.failed(&error))?.ok_or(Refusal::UnknownToken)?;
        let public_key = self.read_public_key(public_key)?;
        let key = hex(&Sha256::digest(&public_key));
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
            life: token.life.min(self.policy.longest_host_life),
        };
        let subject = Subject::Host { name: token.name };
        self.sign_and_record(&grant, &subject, Some((hash, &key)), public_key, now)
    }

    fn issue_for_pod(&self, policy: &PodPolicy, pod: &Pod, public_key: &str, now: UnixTime) -> Result<Issued, Refusal> {
        node::check_pod(pod)?;
        let public_key = self.read_public_key(public_key)?;
        let address = pod.address.to_canonical();
        policy.check_pod_address(address)?;
        // A name stays with its uid for good. The address may change: a sandbox made anew keeps the uid, not the address.
        if let Some(known) = self.store.pod(&pod.uid).map_err(|error| self.failed(&error))?
            && (known.namespace != pod.namespace || known.name != pod.name)
        {
            let known = format!("{}/{}", known.namespace, known.name);
            return Err(Refusal::PodUidConflict { uid: pod.uid.clone(), known });
        }
        let subject =
            Subject::Pod { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone(), address };
        let name = policy.name(pod)?;
        let networks = match policy.address {
            AddressMode::Derive => policy.derive(address)?,
            AddressMode::Pool => {
                let pool = Pool { prefixes: &policy.overlay, reserved: &policy.reserved };
                let until = self.authority.end_of_life(policy.life, now);
                self.store.allot(&subject, &pool, until, now).map_err(|error| match error {
                    AllotError::Exhausted(prefix) => Refusal::PoolExhausted(prefix.to_string()),
                    AllotError::Store(error) => self.failed(&error),
                })?
            }
        };
        let grant =
            Grant { name, networks, unsafe_networks: Vec::new(), groups: policy.groups(pod), life: policy.life };
        self.sign_and_record(&grant, &subject, None, public_key, now)
    }

    fn read_public_key(&self, pem: &str) -> Result<Vec<u8>, Refusal> {
        let (asked, public_key) = public_key_from_pem(pem.as_bytes()).map_err(Refusal::BadPublicKey)?;
        let ca = self.authority.certificate().curve();
        if asked == ca { Ok(public_key) } else { Err(Refusal::WrongCurve { asked, ca }) }
    }

    /// A certificate leaves only after the ledger has it, bound to its token: if the process dies in between, the
    /// signature dies with it, and the token is as it was.
    fn sign_and_record(
        &self,
        grant: &Grant,
        subject: &Subject,
        token: Option<(&TokenHash, &str)>,
        public_key: Vec<u8>,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let certificate = self.authority.sign(grant, public_key, now)?;
        let mode = self.policy.pods.as_ref().map_or(AddressMode::Derive, |pods| pods.address);
        let issue = Issue { certificate: &certificate, subject, token, mode };
        self.store.record(&issue, now).map_err(|error| match error {
            RecordError::TokenUsed => Refusal::TokenUsed,
            RecordError::TokenGone => Refusal::UnknownToken,
            RecordError::AddressHeld { address, holder } => {
                Refusal::AddressConflict { address, holder: holder.to_string() }
            }
            RecordError::Store(error) => self.failed(&error),
        })?;
        let fingerprint = certificate.fingerprint();
        let record = self.store.issued(&fingerprint).map_err(|error| self.failed(&error))?.ok_or(Refusal::Internal)?;
        self.answer(record, fingerprint, false, now)
    }

    /// The answer given before, if it is still worth something.
    fn repeat(&self, fingerprint: &str, now: UnixTime) -> Result<Option<Issued>, Refusal> {
        let Ok(fingerprint) = fingerprint.parse::<Fingerprint>() else { return Ok(None) };
        match self.store.issued(&fingerprint).map_err(|error| self.failed(&error))? {
            Some(record) if record.revoked.is_some() => Err(Refusal::CertificateRevoked),
            Some(record) if record.not_after >= now => self.answer(record, fingerprint, true, now).map(Some),
            _ => Ok(None),
        }
    }

    fn answer(
        &self,
        record: IssuedRecord,
        fingerprint: Fingerprint,
        is_repeat: bool,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let trust = self.trust(now)?.body;
        let reply =
            Reply { certificate: record.pem.clone(), ca: trust.ca, blocklist: trust.blocklist, renewal_key: None };
        Ok(Issued { reply, record, fingerprint: fingerprint.to_string(), is_repeat })
    }

    fn failed(&self, error: &StoreError) -> Refusal {
        self.store_failed.store(true, Ordering::Relaxed);
        tracing::error!(%error, "the store failed; nothing was handed out. If the disk is in order again, restart nebula-ca");
        Refusal::Internal
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
