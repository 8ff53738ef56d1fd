//! What the service has issued: certificates, and the addresses in them.

use anyhow::bail;
use nebula_ca::{
    Command, CommandOutcome, Hears, ListedAddress, ListedCertificate, ListedHolder, ListedPod, Unaware, now, time_left,
};

use super::arguments::{Listing, Readmit, ReleaseAddress, Revoke, Show};
use super::print::{join, print, print_json, say, table};
use super::{UNEXPECTED, ask};

impl Revoke {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let command = Command::Revoke { which: self.which, keep_out: self.keep_out };
        let outcome = ask(&self.dir, &command)?;
        let CommandOutcome::Revoked { fingerprints, is_foreign, kept_out, ends, unaware } = outcome else {
            bail!(UNEXPECTED)
        };
        if self.json {
            let shown = serde_json::json!({
                "fingerprints": fingerprints, "is_foreign": is_foreign, "kept_out": kept_out, "ends": ends,
                "unaware": unaware,
            });
            return print_json(&shown);
        }
        kept_out.iter().try_for_each(|pod| say(&format!("keeps out {}", shown(pod))))?;
        let note = if is_foreign { " (not issued here; blocked for good)" } else { "" };
        fingerprints.iter().try_for_each(|fingerprint| say(&format!("revoked {fingerprint}{note}")))?;
        match unaware {
            Some(unaware) => print(&unheard(&unaware, ends, now())),
            None => say("no service runs here: nobody hears of it before one does"),
        }
    }
}

/// Who does not hear of a revocation at once, for people.
fn unheard(unaware: &Unaware, ends: Option<i64>, at: i64) -> String {
    let Unaware { holders, more, of, since, is_partial } = unaware;
    let count = holders.len() + more;
    let mut text = match (count, of) {
        (_, 0) => return String::new(),
        (0, of) => {
            return format!("all {of} other holders of certificates follow the service: they hear of it at once\n");
        }
        (count, of) => {
            format!(
                "{} of {of} other holders hear of it at once. Until they hear of it, these accept it:\n",
                of - count
            )
        }
    };
    let row = |holder: &ListedHolder| {
        let asked = match holder.last_asked {
            Some(when) => format!("{} ago", time_left((at - when).max(1))),
            None => "-".to_owned(),
        };
        let left = time_left(holder.hears_by + 1 - at);
        let hears = match holder.hears {
            Hears::WhenItAsks => format!("in {left}, when it asks again"),
            Hears::WhenItRenews => format!("in {left}, when it renews"),
            Hears::Never => format!("it is late; its own certificate ends in {left}"),
        };
        [holder.name.clone(), join(&holder.networks), asked, hears]
    };
    text.push_str(&table(["NAME", "NETWORKS", "ASKED", "HEARS OF IT"], holders.iter().map(row)));
    let mut note = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    if *more > 0 {
        note(format!("and {more} more"));
    }
    if let Some(left) = ends.map(|ends| ends + 1 - at).filter(|left| *left > 0) {
        note(format!("what is revoked ends by itself in {}", time_left(left)));
    }
    if at - since < SETTLED_AFTER {
        note(format!(
            "the service began {} ago: who followed it before may not be back yet",
            time_left((at - since).max(1))
        ));
    }
    if *is_partial {
        note("replicas have callers of their own, which this one counts among those that do not hear of it".to_owned());
    }
    text
}

impl Readmit {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let CommandOutcome::Readmitted { pods } = ask(&self.dir, &Command::Readmit { pod: self.pod })? else {
            bail!(UNEXPECTED)
        };
        if self.json {
            return print_json(&serde_json::json!({"pods": pods}));
        }
        pods.iter().try_for_each(|pod| say(&format!("readmitted {}", shown(pod))))
    }
}

fn shown(pod: &ListedPod) -> String {
    format!("pod {}/{} (uid {})", pod.namespace, pod.name, pod.uid)
}

impl Show {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let CommandOutcome::Issued { certificates } = ask(&self.listing.dir, &Command::ListIssued)? else {
            bail!(UNEXPECTED)
        };
        let is_meant = |listed: &ListedCertificate| {
            let is_beginning = self.which.len() >= 8 && listed.fingerprint.starts_with(&self.which.to_lowercase());
            is_beginning || listed.issued.name == self.which
        };
        let Some(listed) = certificates.iter().rfind(|listed| is_meant(listed)) else {
            bail!("no certificate has the name or fingerprint {:?}; see `nebula-ca certificate list`", self.which);
        };
        if self.listing.json {
            return print_json(&serde_json::to_value(listed)?);
        }
        let (issued, at) = (&listed.issued, now());
        let state = match issued.revoked {
            Some(when) => format!("revoked at {}", nebula_cert::rfc3339(when)),
            None => format!("{} left", time_left(issued.not_after + 1 - at)),
        };
        let rows = [
            ["name".to_owned(), issued.name.clone()],
            ["subject".to_owned(), issued.subject.to_string()],
            ["networks".to_owned(), join(&issued.networks)],
            ["groups".to_owned(), join(&issued.groups)],
            ["issued".to_owned(), nebula_cert::rfc3339(issued.issued)],
            ["valid until".to_owned(), format!("{} ({state})", nebula_cert::rfc3339(issued.not_after))],
        ];
        let head = ["fingerprint", listed.fingerprint.as_str()];
        print(&format!("{}{}", table(head, rows.into_iter()), issued.pem))
    }
}

impl ReleaseAddress {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let command = Command::ReleaseAddress { name: self.name };
        let CommandOutcome::AddressReleased(released) = ask(&self.listing.dir, &command)? else { bail!(UNEXPECTED) };
        if self.listing.json {
            return print_json(&serde_json::to_value(&released)?);
        }
        let note = if released.in_use { " once the pod that has it is gone" } else { "" };
        say(&format!("{} of {} is free{note}", join(&released.kept.networks), released.name))
    }
}

pub(super) fn list_issued(listing: &Listing) -> anyhow::Result<()> {
    let CommandOutcome::Issued { certificates } = ask(&listing.dir, &Command::ListIssued)? else { bail!(UNEXPECTED) };
    if listing.json {
        return print_json(&serde_json::to_value(&certificates)?);
    }
    let at = now();
    let row = |listed: &ListedCertificate| {
        let issued = &listed.issued;
        let left = match issued.revoked {
            Some(_) => "revoked".to_owned(),
            None => time_left(issued.not_after + 1 - at),
        };
        [issued.name.clone(), join(&issued.networks), join(&issued.groups), left, listed.fingerprint.clone()]
    };
    print(&table(["NAME", "NETWORKS", "GROUPS", "LEFT", "FINGERPRINT"], certificates.iter().map(row)))
}

pub(super) fn list_addresses(listing: &Listing) -> anyhow::Result<()> {
    let CommandOutcome::Addresses { addresses } = ask(&listing.dir, &Command::ListAddresses)? else {
        bail!(UNEXPECTED)
    };
    if listing.json {
        return print_json(&serde_json::to_value(&addresses)?);
    }
    let at = now();
    let row = |listed: &ListedAddress| {
        let kept = &listed.kept;
        let state = if listed.in_use { "in use" } else { "nobody has them now" };
        let left = time_left(kept.until + 1 - at);
        [listed.name.clone(), join(&kept.networks), state.to_owned(), format!("{left} more at least")]
    };
    print(&table(["NAME", "NETWORKS", "STATE", "KEPT"], addresses.iter().map(row)))
}

/// Whoever follows a service that began is back by then.
const SETTLED_AFTER: i64 = 120;
