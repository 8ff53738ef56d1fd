//! Tokens with which hosts enrol.

use std::net::{IpAddr, Ipv6Addr};

use anyhow::bail;
use ipnet::IpNet;
use nebula_ca::{
    Command, CommandOutcome, Directory, ENROLMENT_PREFIX, ListedToken, NewToken, TlsIdentity, TokenHash, ca_curve,
    generate, now, time_left,
};
use nebula_cert::{Curve, HostKey, JoinToken};
use zeroize::Zeroizing;

use super::arguments::{CreateToken, Listing, RevokeToken};
use super::print::{join, print, print_json, say, table};
use super::{UNEXPECTED, ask};

impl CreateToken {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let secret = match generate(ENROLMENT_PREFIX) {
            Ok(secret) => secret,
            Err(error) => bail!("the system has no randomness: {error}"),
        };
        // Before there is a token that nobody could use.
        let door = self.join.then(|| Door::read(&self.dir.open(), self.url.as_deref())).transpose()?;
        let key: Option<HostKey> = self.key.as_deref().map(str::parse).transpose()?;
        let command = Command::CreateToken(NewToken {
            hash: TokenHash::of(&secret).to_hex(),
            name: self.name,
            networks: self.networks,
            unsafe_networks: self.unsafe_networks,
            groups: self.groups.into_iter().filter(|group| !group.is_empty()).collect(),
            ttl: self.ttl,
            life: self.life,
            key: key.as_ref().map(ToString::to_string),
        });
        let CommandOutcome::TokenCreated(created) = ask(&self.dir, &command)? else { bail!(UNEXPECTED) };
        let join = door.map(|door| door.join_token(&secret, &created.token.networks, key.as_ref())).transpose()?;
        if self.json {
            let mut shown = serde_json::to_value(&created)?;
            shown["token"] = secret.as_str().into();
            if let Some(join) = join {
                shown["join"] = join.as_str().into();
            }
            print_json(&shown)
        } else {
            print(&format!("{}\n", *join.unwrap_or(secret)))
        }
    }
}

/// Where hosts reach this service, and by what they recognise it.
struct Door {
    url: String,
    fingerprint: [u8; 32],
    curve: Curve,
}

impl Door {
    fn read(directory: &Directory, url: Option<&str>) -> anyhow::Result<Self> {
        let identity = TlsIdentity::read(directory)?;
        let url = match (url, identity.best_name()) {
            (Some(url), _) => url.to_owned(),
            (None, Some(name)) if name.parse::<Ipv6Addr>().is_ok() => format!("https://[{name}]:8443"),
            (None, Some(name)) => format!("https://{name}:8443"),
            (None, None) => {
                bail!("tls.crt has no name by which another machine reaches this service: nebula-ca tls add-name")
            }
        };
        let url = url.trim_end_matches('/').to_owned();
        let door = Self { url, fingerprint: identity.fingerprint, curve: ca_curve(directory)? };
        // Whether a join token can have that address.
        door.join_token("-", &[IpNet::from(IpAddr::from([0; 4]))], None)?;
        let authority = door.url.trim_start_matches("https://");
        let host = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, _)) => host,
            None => authority.split(':').next().unwrap_or_default(),
        };
        if !identity.has(host) {
            bail!("tls.crt is not for {host}, so hosts would refuse this service: nebula-ca tls add-name {host}");
        }
        Ok(door)
    }

    /// What a host needs to enrol here with `secret`, which gives it addresses of `networks`.
    fn join_token(&self, secret: &str, networks: &[IpNet], key: Option<&HostKey>) -> anyhow::Result<Zeroizing<String>> {
        let join = JoinToken::new(&self.url, self.fingerprint, secret, networks)?.with_curve(self.curve);
        let join = match key {
            Some(key) => join.bound_to(key),
            None => join,
        };
        Ok(join.to_text())
    }
}

impl RevokeToken {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let CommandOutcome::TokenRevoked(token) = ask(&self.listing.dir, &Command::RevokeToken { id: self.id })? else {
            bail!(UNEXPECTED)
        };
        if self.listing.json {
            return print_json(&serde_json::to_value(&token)?);
        }
        say(&format!("revoked token {} for {}", token.id, token.token.name))
    }
}

pub(super) fn list_tokens(listing: &Listing) -> anyhow::Result<()> {
    let CommandOutcome::Tokens { tokens } = ask(&listing.dir, &Command::ListTokens)? else { bail!(UNEXPECTED) };
    if listing.json {
        return print_json(&serde_json::to_value(&tokens)?);
    }
    let at = now();
    let row = |listed: &ListedToken| {
        let token = &listed.token;
        let state = match (&token.used, token.expires < at) {
            (Some(_), _) => "used".to_owned(),
            (None, true) => "expired".to_owned(),
            (None, false) => {
                let bound = if token.key.is_some() { ", to one key" } else { "" };
                format!("open for {}{bound}", time_left(token.expires + 1 - at))
            }
        };
        [listed.id.clone(), token.name.clone(), join(&token.networks), join(&token.groups), state]
    };
    print(&table(["TOKEN", "NAME", "NETWORKS", "GROUPS", "STATE"], tokens.iter().map(row)))
}
