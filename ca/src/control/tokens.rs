//! Commands about one-time tokens: create, list, revoke.

use ipnet::IpNet;
use nebula_cert::{Certificate, HostKey, UnixTime, rfc3339};

use super::{CommandError, CommandOutcome, ListedToken, NewToken, Operator};
use crate::{
    address::Subject,
    audit::Event,
    authority::{Grant, check_grant},
    proof::token::TokenHash,
    store::{AllotError, Allottee, IssuedRecord, Pool, TokenRecord},
    time,
};

impl Operator<'_> {
    pub(super) fn create_token(&self, token: &NewToken, now: UnixTime) -> Result<CommandOutcome, CommandError> {
        let hash = TokenHash::from_hex(&token.hash).ok_or(CommandError::BadTokenHash)?;
        let allots = token.networks.is_empty();
        if allots && self.policy.hosts.pool.is_empty() {
            return Err(CommandError::NoAddress);
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
        if let Some(made) = self.store.token(&hash)?
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
            return Err(CommandError::LifeTooLong(time::time_left(self.policy.hosts.longest_life)));
        }
        if token.life < 1 || !(1..=MAX_TTL_SECONDS).contains(&token.ttl) {
            return Err(CommandError::TokenTime);
        }
        if self.store.token(&hash)?.is_some() {
            return Err(CommandError::TokenExists);
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
        self.store.add_token(&hash, &record)?;
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
    pub(super) fn check_overlay(&self, networks: &[IpNet]) -> Result<(), CommandError> {
        let (overlay, is_complete) = self.policy.host_networks();
        let is_of = |network: &IpNet| overlay.iter().any(|overlay| overlay.contains(&network.trunc()));
        let has_family = |network: &IpNet| overlay.iter().any(|o| o.addr().is_ipv4() == network.addr().is_ipv4());
        match networks.iter().find(|network| !is_of(network) && (is_complete || has_family(network))) {
            None => Ok(()),
            Some(network) => {
                let overlay = overlay.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                Err(CommandError::OutsideOverlay { network: *network, overlay })
            }
        }
    }

    /// SHA-256 of a host's public key, if the CA can sign for it.
    pub(super) fn bound_key(&self, key: &str) -> Result<String, CommandError> {
        let key: HostKey = key.parse()?;
        if !self.authorities.iter().any(|ca| ca.curve() == key.curve()) {
            let curve = self.authorities.first().map_or_else(|| key.curve(), Certificate::curve);
            return Err(CommandError::KeyCurve(curve));
        }
        Ok(nebula_cert::hex::encode(&key.sha256()))
    }

    /// Reports an address conflict now rather than when the host enrols. Checked again when the certificate is issued.
    pub(super) fn check_addresses(&self, grant: &Grant, now: UnixTime) -> Result<(), CommandError> {
        let host = Subject::Host { name: grant.name.clone() };
        for network in &grant.networks {
            if let Some(holder) = self.store.holder(network.addr())?
                && !holder.yields_to(&host, now)
            {
                let kept = holder.kept.as_ref().map_or(holder.until, |kept| kept.until);
                let until = rfc3339(holder.until.max(kept));
                let (address, holder) = (network.addr(), Box::new(holder.subject));
                return Err(CommandError::AddressHeld { address, holder, until });
            }
        }
        Ok(())
    }

    /// Two hosts with the same address would push each other out of the network, or the second one could not enrol at
    /// all.
    pub(super) fn check_open_tokens(&self, token: &NewToken, now: UnixTime) -> Result<(), CommandError> {
        for (hash, other) in self.store.tokens()? {
            let has_address = |network: &&IpNet| other.networks.iter().any(|theirs| theirs.addr() == network.addr());
            let shared = token.networks.iter().find(has_address).map(|network| network.addr().to_string());
            // Addresses from the pool are not known yet, and a host needs only one.
            let shared = shared.or_else(|| {
                (token.networks.is_empty() && other.name == token.name).then(|| format!("the name {:?}", other.name))
            });
            if let Some(shared) = shared.filter(|_| other.used.is_none() && other.expires >= now) {
                let (id, name, until) = (hash.id(), other.name, rfc3339(other.expires));
                return Err(CommandError::TokenOpen { id, name, shared, until });
            }
        }
        Ok(())
    }

    /// The addresses of the host with that name, or the next free address of each pool, reserved until `until`.
    pub(super) fn allot(&self, name: &str, until: UnixTime, now: UnixTime) -> Result<Vec<IpNet>, CommandError> {
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
        self.store.each_issued(visit)?;
        if let Some(own) = newest {
            return Ok(own.networks);
        }
        let mut reserved = hosts.reserved.clone();
        let tokens = self.store.tokens()?;
        let open = tokens.iter().map(|(_, token)| token).filter(|token| token.used.is_none() && token.expires >= now);
        reserved.extend(open.flat_map(|token| &token.networks).map(|network| IpNet::from(network.addr())));
        let pool = Pool { prefixes: &hosts.pool, reserved: &reserved };
        let host = Allottee { subject: &subject, kept_name: None };
        let allotted = self.store.allot(&host, &pool, until, now).map_err(|error| match error {
            AllotError::Exhausted(prefix) => CommandError::PoolExhausted(prefix),
            AllotError::Store(error) => error.into(),
        })?;
        Ok(allotted.into_iter().map(|address| hosts.in_overlay(address)).collect())
    }

    pub(super) fn list_tokens(&self) -> Result<CommandOutcome, CommandError> {
        let mut tokens = self.store.tokens()?;
        tokens.sort_by(|(_, a), (_, b)| (a.created, &a.name).cmp(&(b.created, &b.name)));
        let tokens = tokens.into_iter().map(|(hash, token)| ListedToken { id: hash.id(), token }).collect();
        Ok(CommandOutcome::Tokens { tokens })
    }

    pub(super) fn revoke_token(&self, id: &str, now: UnixTime) -> Result<CommandOutcome, CommandError> {
        let mut tokens = self.store.tokens()?;
        tokens.retain(|(hash, _)| hash.id() == id);
        let Some((hash, token)) = tokens.pop() else {
            return Err(CommandError::NoToken(id.to_owned()));
        };
        if let Some(used) = token.used {
            return Err(CommandError::TokenUsed { certificate: used.certificate });
        }
        if !self.store.remove_token(&hash)? {
            return Err(CommandError::TokenUsedMeanwhile);
        }
        let proof = Some(format!("token {id}"));
        self.write_audit(Event { event: "token_revoked", proof, name: Some(&token.name), ..Event::default() }, now);
        Ok(CommandOutcome::TokenRevoked(ListedToken { id: hash.id(), token }))
    }
}

const MAX_TTL_SECONDS: i64 = 30 * 86_400;
