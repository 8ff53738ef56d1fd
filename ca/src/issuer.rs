//! Issues certificates: checks proof and policy, signs, and records in the ledger; one certificate or one refusal per
//! request.

mod ledger;
mod lighthouse;

use std::{
    net::IpAddr,
    num::NonZeroU16,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
};

use arc_swap::ArcSwap;
use nebula_cert::{
    CaPool, Certificate, Fingerprint, UnixTime, hex,
    issuance::{self, NodeCredential, Pod, Proof, Release, Reply, Request},
    public_key_from_pem,
};
use sha2::{Digest, Sha256};

use crate::{
    address::{AddressMode, Kept, Subject},
    authority::{Authority, Grant},
    cluster::{Asker, Cluster, Taken},
    pod::KubernetesPolicy,
    pod::{PodAddresses, PodFacts},
    policy::{LighthousePolicy, MAX_RENEWAL_GRACE, PodPolicy, Policy},
    proof::{
        self,
        certificate::{Presented, RenewalKey},
        node::{self, NodeToken},
        token::TokenHash,
    },
    quota::Quotas,
    refusal::{Refusal, kept_note},
    store::{AllotError, Allottee, Displaced, Issue, IssuedRecord, Pool, RecordError, Store},
    trust::Trust,
};

/// Everything that decides about a request. Shared by all connections; its methods block on the disk and the API
/// server.
pub(crate) struct Issuer {
    rules: ArcSwap<Rules>,
    node_token: Option<NodeToken>,
    renewal_key: RenewalKey,
    pub(crate) store: Box<dyn Store>,
    /// Rate limits per pod and per node.
    quotas: Mutex<Quotas>,
    /// Set when the ledger fails, until it can be written again.
    store_failed: AtomicBool,
}

/// The settings that a reload replaces as a whole.
pub(crate) struct Rules {
    pub(crate) authority: Authority,
    pub(crate) policy: Policy,
    /// Present if the policy asks for it.
    pub(crate) cluster: Option<Arc<dyn Cluster>>,
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

/// Why a pod gets a certificate.
#[derive(Clone, Copy)]
enum Occasion<'a> {
    First,
    /// Only with the name and networks of the present certificate.
    Renewal(&'a Certificate),
    /// Until the pod shows its own proof.
    Provisional,
}

/// What the ledger records about a certificate besides its contents.
struct Recorded<'a> {
    subject: &'a Subject,
    /// The pod that the subject is, if it is one.
    pod: Option<&'a PodFacts>,
    token: Option<(&'a TokenHash, &'a str)>,
    provisional: bool,
    /// The name for which its address is kept, and for how many seconds after the certificate.
    kept: Option<(String, i64)>,
}

/// Certificates that were released.
pub(crate) struct GivenBack {
    pub(crate) subject: String,
    pub(crate) fingerprints: Vec<Fingerprint>,
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
        Self { rules, node_token, renewal_key, store, quotas, store_failed: AtomicBool::new(false) }
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
            Proof::Certificate { certificate, time, tag } => {
                let public_key = Some(request.public_key.as_str());
                let presented = Presented { certificate, time: *time, tag, public_key };
                let (present, record) = self.held(&rules, &presented, now)?;
                self.renew(&rules, &present, record, &request.public_key, source, now)
            }
        }
    }

    /// Releases certificates: they are blocked until they expire.
    pub(crate) fn release(&self, release: &Release, source: IpAddr, now: UnixTime) -> Result<GivenBack, Refusal> {
        let rules = self.rules();
        let (subject, fingerprints) = match &release.proof {
            Proof::Token { .. } => return Err(Refusal::NotReleasable),
            Proof::Certificate { certificate, time, tag } => {
                let presented = Presented { certificate, time: *time, tag, public_key: None };
                let trusted = trusted(&rules)?;
                let held = self.renewal_key.check(&presented, &trusted, 0, now)?;
                let known = self.issued(&held.fingerprint())?.ok_or(Refusal::UnknownCertificate)?;
                // Releasing a certificate twice succeeds.
                let fingerprint = known.revoked.is_none().then(|| held.fingerprint());
                (known.subject.to_string(), fingerprint.into_iter().collect())
            }
            Proof::Node { token, pod } | Proof::Provisional { token, pod } => {
                let node = self.check_gone_or_vouched(&rules, token, pod, source, now)?;
                let facts = PodFacts::described(pod);
                (format!("pod {}", facts.shown()), self.valid_of_pod(&facts, node.as_deref(), now)?)
            }
            Proof::Pod { token, address, other_address } => {
                let facts = identified(&rules, token, *address, *other_address, now)?;
                (format!("pod {}", facts.shown()), self.valid_of_pod(&facts, None, now)?)
            }
            // Its certificate is proof enough.
            Proof::Lighthouse { .. } => return Err(Refusal::NotReleasable),
        };
        self.store.revoke(&fingerprints, now).map_err(|error| self.failed(&error))?;
        Ok(GivenBack { subject, fingerprints })
    }

    /// Blocks the certificates of pods that no longer exist, and returns what was blocked.
    pub(crate) fn block_deleted(&self, now: UnixTime) -> Result<Vec<GivenBack>, Refusal> {
        let rules = self.rules();
        let Some(cluster) = &rules.cluster else { return Ok(Vec::new()) };
        // Read the ledger first: a pod created in the meantime is then missing from it, rather than from the pod list.
        let mut valid = Vec::new();
        self.each_valid(now, |fingerprint, record| match record.subject {
            Subject::Pod { .. } | Subject::Lighthouse { .. } => valid.push((fingerprint, record.subject)),
            Subject::Host { .. } => {}
        })?;
        let existing = cluster.all_pods()?;
        let mut gone = Vec::new();
        for (fingerprint, subject) in valid {
            let (Subject::Pod { namespace, name, uid, .. } | Subject::Lighthouse { namespace, name, uid }) = &subject
            else {
                continue;
            };
            if existing.contains(&(namespace.clone(), name.clone(), uid.clone())) {
                continue;
            }
            // Lists may be stale; the object itself is not.
            if cluster.pod(namespace, name)?.is_none_or(|pod| !pod.is(uid)) {
                self.store.revoke(&[fingerprint], now).map_err(|error| self.failed(&error))?;
                gone.push(GivenBack { subject: subject.to_string(), fingerprints: vec![fingerprint] });
            }
        }
        Ok(gone)
    }

    /// The trust bundle at `now`.
    pub(crate) fn trust(&self, now: UnixTime) -> Result<Trust, Refusal> {
        let blocklist = self.store.blocklist(now).map_err(|error| self.failed(&error))?;
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
        if self.has_lost_store() || self.store.blocklist(now).is_err() {
            return Err(Refusal::Internal);
        }
        self.rules().authority.check_validity(now)
    }

    /// The pod that a node vouches for.
    fn vouched(
        &self,
        rules: &Rules,
        token: &str,
        pod: &Pod,
        source: IpAddr,
        now: UnixTime,
    ) -> Result<PodFacts, Refusal> {
        if let Some((cluster, settings)) = rules.kubernetes() {
            return node::vouch(cluster, settings, &self.renewal_key, token, pod, now);
        }
        self.check_node_token(token)?;
        node::check_pod(pod)?;
        Ok(PodFacts { node: Some(node_at(source)), is_vouched_by_node: true, ..PodFacts::described(pod) })
    }

    /// The node whose agent presents `token`.
    pub(crate) fn node(&self, token: &str, source: IpAddr, now: UnixTime) -> Result<String, Refusal> {
        let rules = self.rules();
        if let Some((cluster, settings)) = rules.kubernetes() {
            return node::agent(cluster, settings, token, now);
        }
        self.check_node_token(token)?;
        Ok(node_at(source))
    }

    /// A credential for the node whose agent presents `token`, for the time in which the agent is away.
    pub(crate) fn node_credential(&self, token: &str, now: UnixTime) -> Result<NodeCredential, Refusal> {
        let rules = self.rules();
        let (cluster, settings) = rules.kubernetes().ok_or(Refusal::NodeCredentialsDisabled)?;
        let made = node::credential(cluster, settings, token, now)?;
        let credential = made.to_text(&self.renewal_key)?;
        Ok(NodeCredential { node: made.node, credential, not_after: made.until })
    }

    fn check_node_token(&self, token: &str) -> Result<(), Refusal> {
        let expected = self.node_token.as_ref().ok_or(Refusal::NodeProofDisabled)?;
        if expected.matches(token) { Ok(()) } else { Err(Refusal::BadNodeToken) }
    }

    /// A node may release a pod of its own: one that the API server shows there, or one that no longer exists and that
    /// the ledger has for the node. Returns the node to which the pod's certificates must belong if only the ledger
    /// knows it.
    fn check_gone_or_vouched(
        &self,
        rules: &Rules,
        token: &str,
        pod: &Pod,
        source: IpAddr,
        now: UnixTime,
    ) -> Result<Option<String>, Refusal> {
        let Some((cluster, settings)) = rules.kubernetes() else {
            self.check_node_token(token)?;
            node::check_pod(pod)?;
            return Ok(Some(node_at(source)));
        };
        let node = node::agent(cluster, settings, token, now)?;
        node::check_pod(pod)?;
        match cluster.pod(&pod.namespace, &pod.name)? {
            Some(found) if found.is(&pod.uid) && found.spec.node_name == node => Ok(None),
            Some(found) if found.is(&pod.uid) => {
                Err(Refusal::PodOnOtherNode { pod: format!("{}/{}", pod.namespace, pod.name), node })
            }
            _ => Ok(Some(node)),
        }
    }

    /// The certificate that a caller proved to hold, with its record in the ledger.
    fn held(
        &self,
        rules: &Rules,
        presented: &Presented<'_>,
        now: UnixTime,
    ) -> Result<(Certificate, IssuedRecord), Refusal> {
        // Whoever has the key of an expired certificate learns why it is too late.
        let certificate = self.renewal_key.check(presented, &trusted(rules)?, MAX_RENEWAL_GRACE, now)?;
        let late = now.saturating_sub(certificate.not_after());
        match self.issued(&certificate.fingerprint())? {
            None => Err(Refusal::UnknownCertificate),
            Some(record) if record.revoked.is_some() => Err(Refusal::CertificateRevoked),
            Some(record) if late <= 0 => Ok((certificate, record)),
            Some(record) => match record.subject {
                Subject::Host { .. } if late <= rules.policy.hosts.renewal_grace => Ok((certificate, record)),
                Subject::Host { .. } => Err(Refusal::RenewalTooLate(nebula_cert::rfc3339(certificate.not_after()))),
                // They have another proof.
                Subject::Pod { .. } | Subject::Lighthouse { .. } => {
                    Err(Refusal::CertificateExpired(nebula_cert::rfc3339(certificate.not_after())))
                }
            },
        }
    }

    fn issue_for_token(
        &self,
        rules: &Rules,
        hash: &TokenHash,
        public_key: &str,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let token = self.store.token(hash).map_err(|error| self.failed(&error))?.ok_or(Refusal::UnknownToken)?;
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

    /// The next certificate for the holder of the present one, with the same name and addresses.
    fn renew(
        &self,
        rules: &Rules,
        present: &Certificate,
        record: IssuedRecord,
        public_key: &str,
        source: IpAddr,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        // Otherwise the node's word alone would count as much as the pod's own proof.
        if record.provisional {
            return Err(Refusal::ProvisionalCertificate);
        }
        match record.subject {
            Subject::Lighthouse { .. } => self.renew_lighthouse(rules, present, &record, public_key, now),
            Subject::Host { .. } => {
                let public_key = rules.read_public_key(public_key)?;
                let grant = Grant {
                    name: record.name,
                    networks: record.networks,
                    unsafe_networks: present.unsafe_networks().to_vec(),
                    groups: record.groups,
                    life: (record.not_after - record.issued).clamp(1, rules.policy.hosts.longest_life),
                };
                let kept = rules.kept_for_host(&record.subject);
                let recorded = Recorded { subject: &record.subject, pod: None, token: None, provisional: false, kept };
                self.sign_and_record(rules, &grant, recorded, public_key, now)
            }
            Subject::Pod { namespace, name, uid, address, other_address, .. } => {
                let pod = Pod { namespace, name, uid, address, other_address };
                let facts = match rules.kubernetes() {
                    None => PodFacts { node: Some(node_at(source)), ..PodFacts::described(&pod) },
                    Some((cluster, settings)) => match cluster.pod(&pod.namespace, &pod.name)? {
                        Some(found) if found.is(&pod.uid) => PodFacts::checked(&pod, found, cluster, settings)?,
                        _ => return Err(Refusal::PodGone(format!("{}/{}", pod.namespace, pod.name))),
                    },
                };
                self.issue_for_pod(rules, &facts, Occasion::Renewal(present), public_key, now)
            }
        }
    }

    fn issue_for_pod(
        &self,
        rules: &Rules,
        pod: &PodFacts,
        occasion: Occasion<'_>,
        public_key: &str,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let policy = rules.policy.pods.as_ref().ok_or(Refusal::PodsDisabled)?;
        let public_key = rules.read_public_key(public_key)?;
        let provisional = match occasion {
            Occasion::Provisional => Some(policy.provisional.as_ref().ok_or(Refusal::ProvisionalDisabled)?),
            Occasion::First | Occasion::Renewal(_) => None,
        };
        if !matches!(occasion, Occasion::Renewal(_)) {
            policy.check_namespace(pod)?;
        }
        policy.check_pod(pod)?;
        policy.check_pod_address(pod.address)?;
        let addresses = PodAddresses { first: pod.address, other: policy.other_address(pod)? };
        // A name stays with its UID for good. The address may change: a recreated sandbox keeps the UID but not the
        // address.
        if let Some(known) = self.store.pod(&pod.uid).map_err(|error| self.failed(&error))?
            && (known.namespace != pod.namespace || known.name != pod.name)
        {
            let known = format!("{}/{}", known.namespace, known.name);
            return Err(Refusal::PodUidConflict { uid: pod.uid.clone(), known });
        }
        if self.store.kept_out(&pod.uid).map_err(|error| self.failed(&error))?.is_some() {
            return Err(Refusal::KeptOut { pod: pod.shown(), uid: pod.uid.clone() });
        }
        let subject = Subject::Pod {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            address: addresses.first,
            other_address: addresses.other,
            node: pod.node.clone(),
            service_account: pod.confirmed.as_ref().map(|confirmed| confirmed.service_account.clone()),
        };
        let (name, life) = (policy.name(pod)?, policy.life(pod));
        let kept = policy.stable.and_then(|seconds| Some((pod.kept_name()?, seconds)));
        // Not earlier: a caller that combines its own pod with the UID of another one would use up the other's limit. A
        // repeated answer costs the ledger nothing.
        let may_repeat = self.newest(&pod.uid)?.is_some_and(|(_, record)| is_for_key(&record, &public_key));
        if !may_repeat {
            self.check_quota(pod, now)?;
        }
        let allottee = Allottee { subject: &subject, kept_name: kept.as_ref().map(|(name, _)| name.as_str()) };
        let networks = self.networks(rules, policy, &allottee, addresses, now)?;
        // In mode `same` there is no other address by which the API server could know the pod.
        pod.check_address(if policy.address == AddressMode::Same { &[] } else { &networks })?;
        self.check_free(rules, policy, &subject, pod, addresses, &networks, now)?;
        if let Occasion::Renewal(present) = occasion
            && (present.name() != name || present.networks() != networks)
        {
            return Err(Refusal::RenewalDiffers);
        }
        let grant = match provisional {
            None => {
                let (groups, unsafe_networks) = (policy.groups(pod), policy.unsafe_networks(pod));
                Grant { name, networks, unsafe_networks, groups, life }
            }
            Some(provisional) => {
                let (groups, life) = (provisional.groups(pod), life.min(provisional.life));
                Grant { name, networks, unsafe_networks: Vec::new(), groups, life }
            }
        };
        if may_repeat {
            if let Some((fingerprint, record)) =
                self.issued_for(&pod.uid, &public_key, &grant, provisional.is_some(), now)?
            {
                return self.answer(record, fingerprint, true, now);
            }
            self.check_quota(pod, now)?;
        }
        let provisional = provisional.is_some();
        let recorded = Recorded { subject: &subject, pod: Some(pod), token: None, provisional, kept };
        self.sign_and_record(rules, &grant, recorded, public_key, now)
    }

    fn networks(
        &self,
        rules: &Rules,
        policy: &PodPolicy,
        pod: &Allottee<'_>,
        addresses: PodAddresses,
        now: UnixTime,
    ) -> Result<Vec<ipnet::IpNet>, Refusal> {
        match policy.address {
            AddressMode::Derive => policy.derive(addresses),
            AddressMode::Same => policy.same(addresses),
            AddressMode::Pool => {
                let pool = Pool { prefixes: &policy.overlay, reserved: &policy.reserved };
                // An address is free again only after the longest possible life, whatever life this certificate gets.
                let until = rules.authority.end_of_life(rules.policy.longest_pod_life(), now);
                self.store.allot(pod, &pool, until, now).map_err(|error| match error {
                    AllotError::Exhausted(prefix) => {
                        let kept = self.store.kept_addresses().unwrap_or_default().into_iter();
                        let is_here = |network: &ipnet::IpNet| prefix.contains(&network.addr());
                        let kept = kept.filter(|(_, kept)| kept.until >= now && kept.networks.iter().any(is_here));
                        Refusal::PoolExhausted {
                            prefix,
                            size: pool.candidates(prefix, None).count(),
                            note: kept_note(kept.count()),
                        }
                    }
                    AllotError::Store(error) => self.failed(&error),
                })
            }
        }
    }

    /// Refuses an address that is another one's, as the API server shows it, unless the ledger has it for this pod.
    /// Whoever the ledger has it for is judged when the certificate is recorded.
    #[allow(clippy::too_many_arguments, reason = "all of it is known to one function only")]
    fn check_free(
        &self,
        rules: &Rules,
        policy: &PodPolicy,
        subject: &Subject,
        pod: &PodFacts,
        addresses: PodAddresses,
        networks: &[ipnet::IpNet],
        now: UnixTime,
    ) -> Result<(), Refusal> {
        let (Some((cluster, settings)), Some(node)) = (rules.kubernetes(), &pod.node) else { return Ok(()) };
        if policy.address == AddressMode::Pool {
            return Ok(());
        }
        let mut holders = Vec::new();
        for network in networks {
            let holder = self.store.holder(network.addr()).map_err(|error| self.failed(&error))?;
            holders.push(holder.filter(|holder| holder.until >= now));
        }
        if holders.iter().all(|holder| holder.as_ref().is_some_and(|holder| holder.is(subject))) {
            return Ok(());
        }
        let other = holders.iter().flatten().find(|holder| !holder.is(subject)).map(|holder| holder.subject.id());
        let asker = Asker {
            uid: &pod.uid,
            node,
            is_vouched: pod.is_vouched_by_node,
            holder: other.as_deref(),
            node_ranges: settings.node_ranges,
        };
        for address in [Some(addresses.first), addresses.other].into_iter().flatten() {
            match cluster.taken(address, &asker)? {
                None => {}
                Some(Taken::Pod(holder)) => return Err(Refusal::AddressInUse { address, holder }),
                Some(Taken::Node(node)) => return Err(Refusal::NodeAddress { address, node }),
                Some(Taken::Range(_)) => return Err(Refusal::OutsideNodeRanges { address, node: node.clone() }),
            }
        }
        Ok(())
    }

    /// Keeps one pod or one node from filling the ledger.
    fn check_quota(&self, pod: &PodFacts, now: UnixTime) -> Result<(), Refusal> {
        let node = pod.confirmed.as_ref().map(|confirmed| confirmed.node.as_str());
        self.quotas().take(&pod.uid, &pod.shown(), node, now)
    }

    fn quotas(&self) -> MutexGuard<'_, Quotas> {
        // Counters stay usable after a panic elsewhere.
        self.quotas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest certificate of the pod, if it is what would be issued for the same key now and has half of its life
    /// left: a caller that lost the answer gets it again.
    fn issued_for(
        &self,
        uid: &str,
        public_key: &[u8],
        grant: &Grant,
        provisional: bool,
        now: UnixTime,
    ) -> Result<Option<(Fingerprint, IssuedRecord)>, Refusal> {
        let is_same = |record: &IssuedRecord| {
            let left = record.not_after - now;
            let is_fresh = left > 0 && left <= grant.life && 2 * left >= record.not_after - record.issued;
            is_fresh
                && record.revoked.is_none()
                && record.provisional == provisional
                && record.name == grant.name
                && record.networks == grant.networks
                && record.groups == grant.groups
                && is_for_key(record, public_key)
                && Certificate::from_pem(record.pem.as_bytes())
                    .is_ok_and(|certificate| certificate.unsafe_networks() == grant.unsafe_networks)
        };
        Ok(self.newest(uid)?.filter(|(_, record)| is_same(record)))
    }

    fn sign_and_record(
        &self,
        rules: &Rules,
        grant: &Grant,
        recorded: Recorded<'_>,
        public_key: Vec<u8>,
        now: UnixTime,
    ) -> Result<Issued, Refusal> {
        let (record, fingerprint, displaced) = self.record(rules, grant, recorded, public_key, now)?;
        let issued = self.answer(record, fingerprint, false, now)?;
        Ok(Issued { displaced, ..issued })
    }

    /// Signs a certificate, which is handed out only after the ledger has it, bound to its token: if the process dies
    /// in between, the signature is lost, and the token is unchanged.
    fn record(
        &self,
        rules: &Rules,
        grant: &Grant,
        recorded: Recorded<'_>,
        public_key: Vec<u8>,
        now: UnixTime,
    ) -> Result<(IssuedRecord, Fingerprint, Vec<Displaced>), Refusal> {
        let certificate = rules.authority.sign(grant, public_key, now)?;
        let mode = rules.policy.pods.as_ref().map_or(AddressMode::Derive, |pods| pods.address);
        let Recorded { subject, pod, token, provisional, kept } = recorded;
        let kept = kept.map(|(name, seconds)| Kept { name, until: certificate.not_after().saturating_add(seconds) });
        let mut gone = Vec::new();
        let displaced = loop {
            let kept = kept.as_ref();
            let issue = Issue { certificate: &certificate, subject, token, mode, gone: &gone, provisional, kept };
            match self.store.record(&issue, now) {
                Ok(displaced) => break displaced,
                Err(RecordError::TokenUsed) => return Err(Refusal::TokenUsed),
                Err(RecordError::TokenGone) => return Err(Refusal::UnknownToken),
                Err(RecordError::Store(error)) => return Err(self.failed(&error)),
                Err(RecordError::AddressHeld { address, holder, is_silent }) => {
                    let conflict = Refusal::AddressConflict { address, holder: holder.to_string() };
                    let (Some(pod), Subject::Pod { uid, .. }) = (pod, &*holder) else { return Err(conflict) };
                    // The holder may be another one each time: bound the number of look-ups.
                    let may_look = gone.len() < MAX_LOOKUPS && !gone.contains(uid);
                    if !(may_look
                        && subject.has_address_of(&holder, mode)
                        && has_left(rules, &holder, address, is_silent, pod)?)
                    {
                        return Err(conflict);
                    }
                    gone.push(uid.clone());
                }
            }
        };
        let fingerprint = certificate.fingerprint();
        let record = self.issued(&fingerprint)?.ok_or(Refusal::Internal)?;
        Ok((record, fingerprint, displaced))
    }

    /// The answer given before, if it is still valid.
    fn repeat(&self, fingerprint: &str, now: UnixTime) -> Result<Option<Issued>, Refusal> {
        let Ok(fingerprint) = fingerprint.parse::<Fingerprint>() else { return Ok(None) };
        match self.issued(&fingerprint)? {
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
        let reply = Reply {
            certificate: record.pem.clone(),
            ca: trust.ca,
            blocklist: trust.blocklist,
            renewal_key: trust.renewal_key,
            lighthouses: trust.lighthouses,
        };
        Ok(Issued { reply, record, fingerprint: fingerprint.to_string(), displaced: Vec::new(), is_repeat })
    }
}

impl Rules {
    /// The API server and the policy for it, if pods are confirmed at all.
    fn kubernetes(&self) -> Option<(&dyn Cluster, &KubernetesPolicy)> {
        self.cluster.as_deref().zip(self.policy.kubernetes.as_ref())
    }

    /// Namespace and name of the ConfigMap for the trust, if the policy names one.
    pub(crate) fn trust_config_map(&self) -> Option<(&str, &str)> {
        let (namespace, name) = self.policy.kubernetes.as_ref()?.trust_config_map.as_ref()?;
        Some((namespace, name))
    }

    /// The addresses of a host are kept for its name as long as it may renew its certificate.
    fn kept_for_host(&self, host: &Subject) -> Option<(String, i64)> {
        let grace = self.policy.hosts.renewal_grace;
        (grace > 0).then(|| (host.id().into_owned(), grace))
    }

    fn lighthouses(&self) -> Result<&LighthousePolicy, Refusal> {
        self.policy.lighthouses.as_ref().ok_or(Refusal::LighthousesDisabled)
    }

    fn read_public_key(&self, pem: &str) -> Result<Vec<u8>, Refusal> {
        let (asked, public_key) = public_key_from_pem(pem.as_bytes()).map_err(Refusal::BadPublicKey)?;
        let ca = self.authority.certificate().curve();
        if asked == ca { Ok(public_key) } else { Err(Refusal::WrongCurve { asked, ca }) }
    }
}

fn is_for_key(record: &IssuedRecord, public_key: &[u8]) -> bool {
    Certificate::from_pem(record.pem.as_bytes()).is_ok_and(|certificate| certificate.public_key() == public_key)
}

/// The pod that proves its own identity.
fn identified(
    rules: &Rules,
    token: &str,
    address: IpAddr,
    other_address: Option<IpAddr>,
    now: UnixTime,
) -> Result<PodFacts, Refusal> {
    let (cluster, settings) = rules.kubernetes().ok_or(Refusal::PodProofDisabled)?;
    proof::pod::identify(cluster, settings, token, (address, other_address), now)
}

/// Whether the pod `holder` is shown to be gone, or no longer to have the address that `pod` wants.
///
/// With Kubernetes, the API server decides. What it leaves open, the holder's own node may settle by vouching for the
/// next pod at the address, since it reassigned that address. Without Kubernetes, only that node can, unless the
/// holder's certificates are blocked anyway.
fn has_left(rules: &Rules, holder: &Subject, wanted: IpAddr, is_silent: bool, pod: &PodFacts) -> Result<bool, Refusal> {
    let Subject::Pod { namespace, name, uid, address, other_address, node, .. } = holder else { return Ok(false) };
    let Some((cluster, _)) = rules.kubernetes() else {
        return Ok(is_silent || (pod.is_vouched_by_node && pod.node.is_some() && pod.node == *node));
    };
    let found = match cluster.pod(namespace, name)? {
        Some(found) if found.is(uid) && !found.is_over() => found,
        _ => return Ok(true),
    };
    let reported = found.addresses();
    // A pod that still has its address of the other family may have lost this one.
    let theirs = if *other_address == Some(wanted) { &wanted } else { address };
    let has_moved = !reported.is_empty() && !reported.contains(theirs) && !reported.contains(&wanted);
    let is_open = reported.is_empty() || found.is_ending();
    let is_own = pod.is_vouched_by_node && pod.node.as_ref() == Some(&found.spec.node_name);
    Ok(has_moved || (is_open && is_own))
}

/// Name for a node that is known only by the address its proof comes from.
fn node_at(source: IpAddr) -> String {
    format!("at {}", source.to_canonical())
}

fn trusted(rules: &Rules) -> Result<CaPool, Refusal> {
    // It was parsed once already, when the CA was opened.
    CaPool::from_pem(rules.authority.bundle().as_bytes()).map_err(|_| Refusal::Internal)
}

/// Maximum number of address holders looked up for one certificate.
const MAX_LOOKUPS: usize = 4;

#[cfg(test)]
mod tests;
