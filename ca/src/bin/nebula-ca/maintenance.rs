//! Work on the files of a service: rollover, TLS identity, policy, backup.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use anyhow::{Context, bail};
use nebula_ca::{Command, CommandOutcome, PASSPHRASE, Policy, Rollover, TlsIdentity, back_up, call, now, restore};
use zeroize::Zeroizing;

use super::arguments::{AddName, BackUp, PolicyCheck, Reload, Restore, RolloverVerb, Switch, TlsVerb};
use super::print::{print, print_json, say, table};
use super::{UNEXPECTED, ask};

impl RolloverVerb {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let passphrase = std::env::var(PASSPHRASE).ok().map(Zeroizing::new);
        let passphrase = passphrase.as_ref().map(|passphrase| passphrase.as_str());
        let (listing, is_change) = match &self {
            Self::Status(listing) => (listing, false),
            Self::Prepare(listing) | Self::Finish(listing) | Self::Switch(Switch { listing, .. }) => (listing, true),
        };
        let directory = listing.dir.open();
        let rollover = match &self {
            Self::Status(_) => Rollover::read(&directory, passphrase)?,
            Self::Prepare(_) => Rollover::prepare(&directory, passphrase, now())?,
            Self::Switch(switch) => Rollover::switch(&directory, passphrase, switch.at_once, now())?,
            Self::Finish(_) => {
                let CommandOutcome::Issued { certificates } = ask(&listing.dir, &Command::ListIssued)? else {
                    bail!(UNEXPECTED)
                };
                Rollover::finish(&directory, passphrase, &certificates, now())?
            }
        };
        // Where no service runs, there is nothing to tell.
        if is_change && let Ok(CommandOutcome::Reloaded) = call(&directory, &Command::Reload) {
            writeln!(io::stderr(), "the running service uses the change").context("cannot write to standard error")?;
        }
        let role = |role: &str, ca: &nebula_cert::Certificate| {
            [role.to_owned(), ca.name().to_owned(), nebula_cert::rfc3339(ca.not_after()), ca.fingerprint().to_string()]
        };
        let signing = [role("signs", &rollover.signing)];
        let next = rollover.next.iter().map(|ca| role("next", ca));
        let rows: Vec<_> =
            signing.into_iter().chain(next).chain(rollover.retired.iter().map(|ca| role("retired", ca))).collect();
        if listing.json {
            let json = |[role, name, until, fingerprint]: [String; 4]| serde_json::json!({"role": role, "name": name, "not_after": until, "fingerprint": fingerprint});
            let shown: Vec<_> = rows.into_iter().map(json).collect();
            return print_json(&serde_json::to_value(&shown)?);
        }
        print(&table(["ROLE", "NAME", "VALID UNTIL", "FINGERPRINT"], rows.into_iter()))
    }
}

impl TlsVerb {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let listing = match &self {
            Self::Show(listing) | Self::AddName(AddName { listing, .. }) => listing,
        };
        let directory = listing.dir.open();
        let mut identity = TlsIdentity::read(&directory)?;
        if let Self::AddName(AddName { names, .. }) = &self
            && identity.add_names(names, &directory, now())?
            // Where no service runs, there is nothing to tell.
            && let Ok(CommandOutcome::Reloaded) = call(&directory, &Command::Reload)
        {
            writeln!(io::stderr(), "the running service uses the new certificate")
                .context("cannot write to standard error")?;
        }
        let fingerprint = nebula_cert::hex::encode(&identity.fingerprint);
        if listing.json {
            let shown = serde_json::json!({"names": identity.names, "fingerprint": fingerprint});
            return print_json(&shown);
        }
        say(&format!("names        {}", identity.names.join(", ")))?;
        say(&format!("fingerprint  {fingerprint}"))
    }
}

impl PolicyCheck {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let read = |path: &Path| {
            let text = File::open(path).and_then(|file| nebula_cert::text::read(file.take(MAX_FILE_BYTES), 0));
            text.with_context(|| format!("cannot read {}", path.display()))
        };
        let name = self.policy.display();
        let policy = Policy::parse(&read(&self.policy)?).with_context(|| format!("{name} is refused"))?;
        if let Some(path) = &self.ca {
            let ca = nebula_cert::Certificate::from_pem(read(path)?.as_bytes())
                .with_context(|| format!("{} holds no certificate", path.display()))?;
            policy.check_against(&ca).with_context(|| format!("{name} is refused"))?;
        }
        print(&format!("{name} is valid\n"))
    }
}

impl BackUp {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let made = back_up(&self.dir.open(), &self.file, now())
            .with_context(|| format!("no backup was written to {}", self.file.display()))?;
        say(&format!("{} has {}", self.file.display(), made.files.join(", ")))?;
        match made.records {
            Some(records) => say(&format!("and the ledger: {records} records")),
            None => say(
                "The ledger is in the database that database.url names, and NOT in this file. Copy it now, and with each \
                 backup: pg_dump --format=custom --table=nebula_ca --file=ledger.dump DATABASE",
            ),
        }?;
        if made.key_is_elsewhere {
            say("The key of the CA is in the token that ca.key names, and NOT in this file.")?;
        }
        say("Whoever has this file has the CA.")
    }
}

impl Restore {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let directory = self.dir.open();
        let made =
            restore(&directory, &self.file).with_context(|| format!("{} was not restored", self.file.display()))?;
        let path = directory.path().display();
        say(&format!("{path} has the CA of {}: {}", made.made, made.files.join(", ")))?;
        match made.records {
            Some(records) => say(&format!(
                "and its ledger: {records} records. What was issued or revoked since is unknown to it: revoke again, and \
                 enrol anew who is refused"
            )),
            None => say(
                "The ledger is in the database that database.url names: restore that with pg_restore before the service \
                 starts",
            ),
        }?;
        if made.key_is_elsewhere {
            say("The key of the CA is in the token that ca.key names.")?;
        }
        Ok(())
    }
}

impl Reload {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let CommandOutcome::Reloaded = ask(&self.dir, &Command::Reload)? else { bail!(UNEXPECTED) };
        print(if self.json { "{\"reloaded\": true}\n" } else { "policy, CA and TLS files are in use\n" })
    }
}

/// Longer policies and certificates than any that the service reads are cut, and then refused.
const MAX_FILE_BYTES: u64 = 4 << 20;
