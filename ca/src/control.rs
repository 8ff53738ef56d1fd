//! Operator commands, carried out on the ledger: create tokens, list, revoke.

use ipnet::IpNet;
use nebula_cert::{Certificate, Fingerprint, HostKey, HostKeyError, UnixTime, rfc3339};
use serde::{Deserialize, Serialize};

use crate::{
    address::Subject,
    audit::{AuditLog, Event},
    authority::{Grant, check_grant},
    backup,
    directory::Directory,
    followers::Unaware,
    policy::{MAX_RENEWAL_GRACE, Policy},
    proof::token::TokenHash,
    store::{AllotError, Allottee, IssuedRecord, KeptAddresses, KeptOut, Pool, Store, StoreError, TokenRecord},
    time,
};

/// A command of an operator.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// Copy the rows of the ledger into the directory, for a backup.
    CopyLedger,
    /// Create a one-time token; its secret never leaves the asking process.
    CreateToken(NewToken),
    /// List tokens.
    ListTokens,
    /// Invalidate an unused token.
    RevokeToken {
        /// Its short name.
        id: String,
    },
    /// List certificates.
    ListIssued,
    /// Reload policy, CA and TLS files.
    Reload,
    /// Block certificates by fingerprint, or all valid ones of a name.
    Revoke {
        /// Fingerprint or certificate name.
        which: String,
        /// Whether to refuse further certificates to the pods that hold these.
        #[serde(default)]
        keep_out: bool,
    },
    /// Readmit a pod that was kept out.
    Readmit {
        /// UID, `namespace/name`, or name of the pod.
        pod: String,
    },
    /// List the addresses that are kept for names of pods.
    ListAddresses,
    /// Keep the addresses of a name no longer.
    ReleaseAddress {
        /// `namespace/name` of the pod.
        name: String,
    },
}

/// A token to create.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewToken {
    /// SHA-256 of the secret, lower-case hex.
    pub hash: String,
    /// Certificate name.
    pub name: String,
    /// Overlay addresses; empty: one of each prefix of the pool.
    pub networks: Vec<IpNet>,
    /// Networks behind the host.
    pub unsafe_networks: Vec<IpNet>,
    /// Groups.
    pub groups: Vec<String>,
    /// Seconds for which the token is accepted.
    pub ttl: i64,
    /// Seconds for which the certificate is valid.
    pub life: i64,
    /// The only key that the token is good for; `None`: the first one it is used with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// The result of a [`Command`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum CommandOutcome {
    /// The copy is there.
    LedgerCopied {
        /// Of how many records; `None`: the ledger is in a database, which copies it.
        records: Option<u64>,
    },
    /// The token exists.
    TokenCreated(ListedToken),
    /// All tokens.
    Tokens {
        /// Newest last.
        tokens: Vec<ListedToken>,
    },
    /// The token is invalid from now on.
    TokenRevoked(ListedToken),
    /// The files were reloaded.
    Reloaded,
    /// All certificates.
    Issued {
        /// Newest last.
        certificates: Vec<ListedCertificate>,
    },
    /// These certificates are blocked.
    Revoked {
        /// Fingerprints, lower-case hex.
        fingerprints: Vec<String>,
        /// Whether the certificate was blocked although this service did not issue it.
        is_foreign: bool,
        /// Pods that get no further certificates.
        #[serde(default)]
        kept_out: Vec<ListedPod>,
        /// The last second of these certificates; `None` if it is not known.
        #[serde(default)]
        ends: Option<UnixTime>,
        /// Who does not hear of it at once; `None`: nobody hears of it before a service runs.
        #[serde(default)]
        unaware: Option<Unaware>,
    },
    /// These pods get certificates again.
    Readmitted {
        /// All pods that matched.
        pods: Vec<ListedPod>,
    },
    /// Addresses that are kept.
    Addresses {
        /// By name.
        addresses: Vec<ListedAddress>,
    },
    /// These addresses are kept no longer.
    AddressReleased(ListedAddress),
    /// The command was refused.
    Failed {
        /// Why, and what to do.
        message: String,
    },
}

/// A token as listed.
#[derive(Debug, Serialize, Deserialize)]
pub struct ListedToken {
    /// Short name; tells nothing about the secret.
    pub id: String,
    /// What it grants, and when it was used.
    #[serde(flatten)]
    pub token: TokenRecord,
}

/// A certificate as listed.
#[derive(Debug, Serialize, Deserialize)]
pub struct ListedCertificate {
    /// Fingerprint, lower-case hex.
    pub fingerprint: String,
    /// The certificate.
    #[serde(flatten)]
    pub issued: IssuedRecord,
}

/// A pod as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedPod {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Pod UID.
    pub uid: String,
}

/// The addresses that are kept for the name of a pod, as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedAddress {
    /// The pod's `namespace/name`.
    pub name: String,
    /// The addresses.
    #[serde(flatten)]
    pub kept: KeptAddresses,
    /// Whether a pod has them now: its last certificate is valid and not blocked.
    pub in_use: bool,
}

/// Carries out commands on a store that this process has opened.
pub(crate) struct Operator<'a> {
    pub(crate) directory: &'a Directory,
    pub(crate) store: &'a dyn Store,
    /// The CAs that might sign; one of them must be able to sign what a token grants.
    pub(crate) authorities: &'a [Certificate],
    pub(crate) policy: &'a Policy,
    pub(crate) audit: &'a AuditLog,
}

impl Operator<'_> {
    /// Carries out one command.
    pub(crate) fn obey(&self, command: &Command, now: UnixTime) -> CommandOutcome {
        let answer = match command {
            Command::CopyLedger => self.copy_ledger(now),
            Command::CreateToken(token) => self.create_token(token, now),
            Command::ListTokens => self.list_tokens(),
            Command::RevokeToken { id } => self.revoke_token(id, now),
            Command::ListIssued => self.list_issued(),
            Command::Reload => Err("no service runs on this directory; it reads its files when it starts".to_owned()),
            Command::Revoke { which, keep_out } => self.revoke(which, *keep_out, now),
            Command::Readmit { pod } => self.readmit(pod, now),
            Command::ListAddresses => self.list_addresses(now),
            Command::ReleaseAddress { name } => self.release_address(name, now),
        };
        answer.unwrap_or_else(|message| CommandOutcome::Failed { message })
    }

    fn copy_ledger(&self, now: UnixTime) -> Result<CommandOutcome, String> {
        let records = backup::copy_ledger(self.directory, self.store)?;
        self.write_audit(Event { event: "backed_up", ..Event::default() }, now);
        Ok(CommandOutcome::LedgerCopied { records })
    }

    fn create_token(&self, token: &NewToken, now: UnixTime) -> Result<CommandOutcome, String> {
        let hash = TokenHash::from_hex(&token.hash).ok_or("the token's hash is not 64 hex digits")?;
        let allots = token.networks.is_empty();
        if allots && self.policy.hosts.pool.is_empty() {
            return Err("say which address the host gets (--network 10.42.0.1/16), or write a pool of addresses into \
                        policy.jsonc (hosts.pool) and reload"
                .to_owned());
        }
        let grant = Grant {
            name: token.name.clone(),
            // The prefixes stand for any of their addresses.
            networks: if allots { self.policy.hosts.pool.clone() } else { token.networks.clone() },
            unsafe_networks: token.unsafe_networks.clone(),
            groups: token.groups.clone(),
            life: token.life,
        };
        // A command that is repeated because its answer was lost gets that answer.
        if let Some(made) = self.store.token(&hash).map_err(text)?
            && made.used.is_none()
            && made.name == token.name
        {
            return Ok(CommandOutcome::TokenCreated(ListedToken { id: hash.id(), token: made }));
        }
        check_grant(&grant, self.authorities)?;
        self.check_overlay(&token.networks)?;
        let key = token.key.as_deref().map(|key| self.bound_key(key)).transpose()?;
        self.check_addresses(&grant, now)?;
        self.check_open_tokens(token, now)?;
        if token.life > self.policy.hosts.longest_life {
            let longest = time::time_left(self.policy.hosts.longest_life);
            return Err(format!("the life is longer than the policy's hosts.longest_life of {longest}"));
        }
        if token.life < 1 || !(1..=MAX_TTL_SECONDS).contains(&token.ttl) {
            return Err("a token must live between 1s and 30d".to_owned());
        }
        if self.store.token(&hash).map_err(text)?.is_some() {
            return Err("this token exists already".to_owned());
        }
        let expires = now.saturating_add(token.ttl);
        let networks = if allots { self.allot(&grant.name, expires, now)? } else { grant.networks };
        let record = TokenRecord {
            name: grant.name,
            networks,
            unsafe_networks: grant.unsafe_networks,
            groups: grant.groups,
            life: token.life,
            created: now,
            expires,
            key,
            used: None,
        };
        self.store.add_token(&hash, &record).map_err(text)?;
        self.write_audit(
            Event {
                event: "token_created",
                proof: Some(format!("token {}", hash.id())),
                name: Some(&record.name),
                networks: &record.networks,
                groups: &record.groups,
                not_after: Some(rfc3339(record.expires)),
                ..Event::default()
            },
            now,
        );
        Ok(CommandOutcome::TokenCreated(ListedToken { id: hash.id(), token: record }))
    }

    /// A host with an address of another network would get a certificate, and reach nobody.
    fn check_overlay(&self, networks: &[IpNet]) -> Result<(), String> {
        let (overlay, is_complete) = self.policy.host_networks();
        let is_of = |network: &IpNet| overlay.iter().any(|overlay| overlay.contains(&network.trunc()));
        let has_family = |network: &IpNet| overlay.iter().any(|o| o.addr().is_ipv4() == network.addr().is_ipv4());
        match networks.iter().find(|network| !is_of(network) && (is_complete || has_family(network))) {
            None => Ok(()),
            Some(network) => {
                let overlay = overlay.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                Err(format!(
                    "{network} is not in the overlay of hosts, {overlay} (hosts.overlay in policy.jsonc; without it, what \
                     hosts.pool and pods.overlay say)"
                ))
            }
        }
    }

    /// SHA-256 of a host's public key, if the CA can sign for it.
    fn bound_key(&self, key: &str) -> Result<String, String> {
        let key: HostKey = key.parse().map_err(|error: HostKeyError| error.to_string())?;
        if !self.authorities.iter().any(|ca| ca.curve() == key.curve()) {
            let curve = self.authorities.first().map_or_else(|| key.curve(), Certificate::curve);
            return Err(format!(
                "the key is of another curve than the CA's: run `nebula up -prepare -curve {}` in an empty folder",
                curve.flag()
            ));
        }
        Ok(nebula_cert::hex::encode(&key.sha256()))
    }

    /// Reports an address conflict now rather than when the host enrols. Checked again when the certificate is issued.
    fn check_addresses(&self, grant: &Grant, now: UnixTime) -> Result<(), String> {
        let host = Subject::Host { name: grant.name.clone() };
        for network in &grant.networks {
            if let Some(holder) = self.store.holder(network.addr()).map_err(text)?
                && !holder.yields_to(&host, now)
            {
                let kept = holder.kept.as_ref().map_or(holder.until, |kept| kept.until);
                let until = rfc3339(holder.until.max(kept));
                return Err(format!("{} belongs to {} until {until}; choose another", network.addr(), holder.subject));
            }
        }
        Ok(())
    }

    /// Two hosts with the same address would push each other out of the network, or the second one could not enrol at
    /// all.
    fn check_open_tokens(&self, token: &NewToken, now: UnixTime) -> Result<(), String> {
        for (hash, other) in self.store.tokens().map_err(text)? {
            let has_address = |network: &&IpNet| other.networks.iter().any(|theirs| theirs.addr() == network.addr());
            let shared = token.networks.iter().find(has_address).map(|network| network.addr().to_string());
            // Addresses from the pool are not known yet, and a host needs only one.
            let shared = shared.or_else(|| {
                (token.networks.is_empty() && other.name == token.name).then(|| format!("the name {:?}", other.name))
            });
            if let Some(shared) = shared.filter(|_| other.used.is_none() && other.expires >= now) {
                let (id, name, until) = (hash.id(), &other.name, rfc3339(other.expires));
                return Err(format!(
                    "token {id} for {name} is open with {shared} until {until}; use that one, or first make it \
                     worthless: nebula-ca token revoke {id}"
                ));
            }
        }
        Ok(())
    }

    /// The addresses of the host with that name, or the next free address of each pool, reserved until `until`.
    fn allot(&self, name: &str, until: UnixTime, now: UnixTime) -> Result<Vec<IpNet>, String> {
        let hosts = &self.policy.hosts;
        let subject = Subject::Host { name: name.to_owned() };
        let mut newest: Option<IssuedRecord> = None;
        let visit = &mut |_, record: IssuedRecord| {
            let grace = if record.revoked.is_none() { hosts.renewal_grace } else { 0 };
            let is_own = record.subject == subject && record.not_after.saturating_add(grace) >= now;
            if is_own && newest.as_ref().is_none_or(|newest| newest.issued <= record.issued) {
                newest = Some(record);
            }
        };
        self.store.each_issued(visit).map_err(text)?;
        if let Some(own) = newest {
            return Ok(own.networks);
        }
        let mut reserved = hosts.reserved.clone();
        let tokens = self.store.tokens().map_err(text)?;
        let open = tokens.iter().map(|(_, token)| token).filter(|token| token.used.is_none() && token.expires >= now);
        reserved.extend(open.flat_map(|token| &token.networks).map(|network| IpNet::from(network.addr())));
        let pool = Pool { prefixes: &hosts.pool, reserved: &reserved };
        let host = Allottee { subject: &subject, kept_name: None };
        let allotted = self.store.allot(&host, &pool, until, now).map_err(|error| match error {
            AllotError::Exhausted(prefix) => format!(
                "no address is free in {prefix} (hosts.pool in policy.jsonc): make it larger, or wait until a \
                 certificate or a token for one of them has expired (nebula-ca certificate list, nebula-ca token list)"
            ),
            AllotError::Store(error) => text(error),
        })?;
        Ok(allotted.into_iter().map(|address| hosts.in_overlay(address)).collect())
    }

    fn list_tokens(&self) -> Result<CommandOutcome, String> {
        let mut tokens = self.store.tokens().map_err(text)?;
        tokens.sort_by(|(_, a), (_, b)| (a.created, &a.name).cmp(&(b.created, &b.name)));
        let tokens = tokens.into_iter().map(|(hash, token)| ListedToken { id: hash.id(), token }).collect();
        Ok(CommandOutcome::Tokens { tokens })
    }

    fn revoke_token(&self, id: &str, now: UnixTime) -> Result<CommandOutcome, String> {
        let mut tokens = self.store.tokens().map_err(text)?;
        tokens.retain(|(hash, _)| hash.id() == id);
        let Some((hash, token)) = tokens.pop() else {
            return Err(format!("no token is called {id:?}; see `nebula-ca token list`"));
        };
        if let Some(used) = &token.used {
            let certificate = &used.certificate;
            return Err(format!(
                "the token was used; block its certificate: nebula-ca certificate revoke {certificate}"
            ));
        }
        if !self.store.remove_token(&hash).map_err(text)? {
            return Err("the token was used meanwhile; block its certificate instead".to_owned());
        }
        let proof = Some(format!("token {id}"));
        self.write_audit(Event { event: "token_revoked", proof, name: Some(&token.name), ..Event::default() }, now);
        Ok(CommandOutcome::TokenRevoked(ListedToken { id: hash.id(), token }))
    }

    fn list_issued(&self) -> Result<CommandOutcome, String> {
        let mut issued = self.store.all_issued().map_err(text)?;
        issued.sort_by(|(_, a), (_, b)| (a.issued, &a.name).cmp(&(b.issued, &b.name)));
        let listed = |(fingerprint, issued): (Fingerprint, _)| ListedCertificate {
            fingerprint: fingerprint.to_string(),
            issued,
        };
        Ok(CommandOutcome::Issued { certificates: issued.into_iter().map(listed).collect() })
    }

    fn revoke(&self, which: &str, keep_out: bool, now: UnixTime) -> Result<CommandOutcome, String> {
        let (fingerprints, is_foreign) = match which.parse::<Fingerprint>() {
            Ok(fingerprint) => (vec![fingerprint], self.store.issued(&fingerprint).map_err(text)?.is_none()),
            Err(_) => {
                let mut meant = Vec::new();
                // An expired one of a host may be good for a renewal.
                let is_over = |issued: &IssuedRecord| match issued.subject {
                    Subject::Host { .. } => issued.not_after.saturating_add(MAX_RENEWAL_GRACE) < now,
                    Subject::Pod { .. } | Subject::Lighthouse { .. } => issued.not_after < now,
                };
                let is_meant = |issued: &IssuedRecord| {
                    is_called(issued, which)
                        && !is_over(issued)
                        && (issued.revoked.is_none() || issued.not_after >= now)
                };
                let visit = &mut |fingerprint, issued| meant.extend(is_meant(&issued).then_some(fingerprint));
                self.store.each_issued(visit).map_err(text)?;
                (meant, false)
            }
        };
        if fingerprints.is_empty() {
            return Err(format!(
                "no valid certificate has the name or fingerprint {which:?}, or is of such a pod; see `nebula-ca certificate list`"
            ));
        }
        if self.store.blocklist(now).map_err(text)?.len() + fingerprints.len() > MAX_BLOCKLIST_ENTRIES {
            return Err(format!("the blocklist is full ({MAX_BLOCKLIST_ENTRIES}); replace the CA certificate instead"));
        }
        // Keep out first: a pod that learns of its revocation asks for another certificate at once.
        let kept_out = if keep_out { self.keep_out(&fingerprints, now)? } else { Vec::new() };
        self.store.revoke(&fingerprints, now).map_err(text)?;
        let ends = self.last_second(&fingerprints).map_err(text)?;
        let fingerprints: Vec<String> = fingerprints.iter().map(ToString::to_string).collect();
        for fingerprint in &fingerprints {
            self.write_audit(Event { event: "revoked", fingerprint: Some(fingerprint), ..Event::default() }, now);
        }
        Ok(CommandOutcome::Revoked { fingerprints, is_foreign, kept_out, ends, unaware: None })
    }

    /// When the last of these certificates ends; `None` if one is unknown.
    fn last_second(&self, fingerprints: &[Fingerprint]) -> Result<Option<UnixTime>, StoreError> {
        let mut last = None;
        for fingerprint in fingerprints {
            let Some(issued) = self.store.issued(fingerprint)? else { return Ok(None) };
            last = last.max(Some(issued.not_after));
        }
        Ok(last)
    }

    /// Keeps out the pods that these certificates belong to.
    fn keep_out(&self, fingerprints: &[Fingerprint], now: UnixTime) -> Result<Vec<ListedPod>, String> {
        let mut pods: Vec<ListedPod> = Vec::new();
        for fingerprint in fingerprints {
            let subject = self.store.issued(fingerprint).map_err(text)?.map(|issued| issued.subject);
            let Some(Subject::Pod { namespace, name, uid, .. }) = subject else {
                return Err("only pods of this CA can be kept out: a host needs a new token to come back".to_owned());
            };
            let pod = ListedPod { namespace, name, uid };
            if !pods.contains(&pod) {
                pods.push(pod);
            }
        }
        for ListedPod { namespace, name, uid } in &pods {
            let until = now.saturating_add(KEEP_OUT_SECONDS);
            let record = KeptOut { namespace: namespace.clone(), name: name.clone(), since: now, until };
            self.store.keep_out(uid, &record).map_err(text)?;
            self.write_audit(
                Event { event: "kept_out", name: Some(&format!("{namespace}/{name}")), ..Event::default() },
                now,
            );
        }
        Ok(pods)
    }

    fn readmit(&self, which: &str, now: UnixTime) -> Result<CommandOutcome, String> {
        let listed = |(uid, pod): (String, KeptOut)| ListedPod { namespace: pod.namespace, name: pod.name, uid };
        let mut pods: Vec<_> = self.store.all_kept_out().map_err(text)?.into_iter().map(listed).collect();
        let mut of_certificates = Vec::new();
        let mut note = |issued: &IssuedRecord| {
            if let Subject::Pod { uid, .. } = &issued.subject {
                of_certificates.push(uid.clone());
            }
        };
        match which.parse::<Fingerprint>() {
            Ok(fingerprint) => self.store.issued(&fingerprint).map_err(text)?.iter().for_each(&mut note),
            Err(_) => {
                let visit = &mut |_, issued: IssuedRecord| {
                    if issued.name == which {
                        note(&issued)
                    }
                };
                self.store.each_issued(visit).map_err(text)?;
            }
        }
        pods.retain(|pod| which == pod.name || is_pod(which, pod) || of_certificates.contains(&pod.uid));
        if pods.is_empty() {
            return Err(format!("no pod that is kept out has the uid, name, or certificate {which:?}"));
        }
        for ListedPod { namespace, name, uid } in &pods {
            self.store.readmit(uid).map_err(text)?;
            self.write_audit(
                Event { event: "readmitted", name: Some(&format!("{namespace}/{name}")), ..Event::default() },
                now,
            );
        }
        Ok(CommandOutcome::Readmitted { pods })
    }

    fn list_addresses(&self, now: UnixTime) -> Result<CommandOutcome, String> {
        let mut kept = self.store.kept_addresses().map_err(text)?;
        kept.retain(|(_, kept)| kept.until >= now);
        let listed = |(name, kept)| self.listed_address(name, kept, now);
        Ok(CommandOutcome::Addresses { addresses: kept.into_iter().map(listed).collect::<Result<_, _>>()? })
    }

    fn listed_address(&self, name: String, kept: KeptAddresses, now: UnixTime) -> Result<ListedAddress, String> {
        let newest = self.store.pod(&kept.uid).map_err(text)?.and_then(|pod| pod.newest?.parse::<Fingerprint>().ok());
        let newest = newest.map(|newest| self.store.issued(&newest)).transpose().map_err(text)?.flatten();
        let in_use = newest.is_some_and(|newest| newest.revoked.is_none() && newest.not_after >= now);
        Ok(ListedAddress { name, kept, in_use })
    }

    fn release_address(&self, name: &str, now: UnixTime) -> Result<CommandOutcome, String> {
        let Some(kept) = self.store.release_kept(name).map_err(text)? else {
            return Err(format!(
                "no address is kept for {name:?}; write it as NAMESPACE/NAME, see `nebula-ca address list`"
            ));
        };
        let networks = kept.networks.clone();
        let event = Event { event: "address_released", name: Some(name), networks: &networks, ..Event::default() };
        self.write_audit(event, now);
        Ok(CommandOutcome::AddressReleased(self.listed_address(name.to_owned(), kept, now)?))
    }

    fn write_audit(&self, event: Event<'_>, now: UnixTime) {
        self.audit.write(&Event { source: "control".to_owned(), ..event }, now);
    }
}

/// Whether an administrator means this pod: by its UID, or as NAMESPACE/NAME.
fn is_pod(which: &str, pod: &ListedPod) -> bool {
    which == pod.uid || which.split_once('/') == Some((pod.namespace.as_str(), pod.name.as_str()))
}

/// Whether an administrator means this certificate: by its name, or by its pod.
fn is_called(issued: &IssuedRecord, which: &str) -> bool {
    let is_of_pod = match &issued.subject {
        Subject::Pod { namespace, name, uid, .. } => {
            is_pod(which, &ListedPod { namespace: namespace.clone(), name: name.clone(), uid: uid.clone() })
        }
        Subject::Host { .. } | Subject::Lighthouse { .. } => false,
    };
    is_of_pod || issued.name == which
}

fn text(error: StoreError) -> String {
    error.to_string()
}

/// UIDs are not reused, and no pod gets that old.
const KEEP_OUT_SECONDS: i64 = 366 * 86_400;
const MAX_TTL_SECONDS: i64 = 30 * 86_400;
/// A blocklist of this size fits into [`nebula_cert::issuance::MAX_REPLY`] with room for the rest.
const MAX_BLOCKLIST_ENTRIES: usize = 50_000;
