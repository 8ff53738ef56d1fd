//! Operator commands, carried out on the ledger.

mod certificates;
mod command;
mod error;
mod tokens;

use nebula_cert::{Certificate, Fingerprint, UnixTime};

pub use self::command::{Command, CommandOutcome, ListedAddress, ListedCertificate, ListedPod, ListedToken, NewToken};
use self::error::CommandError;
use crate::{
    audit::{AuditLog, Event},
    directory::Directory,
    ledger_copy::copy_ledger,
    policy::Policy,
    store::{KeptAddresses, Store},
};

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
            Command::Reload => Err(CommandError::NoService),
            Command::Revoke { which, keep_out } => self.revoke(which, *keep_out, now),
            Command::Readmit { pod } => self.readmit(pod, now),
            Command::ListAddresses => self.list_addresses(now),
            Command::ReleaseAddress { name } => self.release_address(name, now),
        };
        answer.unwrap_or_else(|error| CommandOutcome::Failed { message: error.to_string() })
    }

    fn copy_ledger(&self, now: UnixTime) -> Result<CommandOutcome, CommandError> {
        let records = copy_ledger(self.directory, self.store).map_err(CommandError::Copy)?;
        self.write_audit(Event { event: "backed_up", ..Event::default() }, now);
        Ok(CommandOutcome::LedgerCopied { records })
    }

    fn list_addresses(&self, now: UnixTime) -> Result<CommandOutcome, CommandError> {
        let mut kept = self.store.kept_addresses()?;
        kept.retain(|(_, kept)| kept.until >= now);
        let listed = |(name, kept)| self.listed_address(name, kept, now);
        Ok(CommandOutcome::Addresses { addresses: kept.into_iter().map(listed).collect::<Result<_, _>>()? })
    }

    fn listed_address(&self, name: String, kept: KeptAddresses, now: UnixTime) -> Result<ListedAddress, CommandError> {
        let newest = self.store.pod(&kept.uid)?.and_then(|pod| pod.newest.parse::<Fingerprint>().ok());
        let newest = newest.map(|newest| self.store.issued(&newest)).transpose()?.flatten();
        let in_use = newest.is_some_and(|newest| newest.revoked.is_none() && newest.not_after >= now);
        Ok(ListedAddress { name, kept, in_use })
    }

    fn release_address(&self, name: &str, now: UnixTime) -> Result<CommandOutcome, CommandError> {
        let Some(kept) = self.store.release_kept(name)? else {
            return Err(CommandError::NoKeptAddress(name.to_owned()));
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
