//! `kubectl nebula revoke`: revokes the certificates of a pod or a host, after it has shown which ones they are.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::{self, BufRead, IsTerminal};

use nebula_cert::revocation::{Next, Request, Revocation, RevokedCertificate, Which};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::columns::{columns, or_dash, span};

use crate::ca::{CaError, CaService};
use crate::cli::{Place, Revoke};
use crate::cluster::Cluster;
use crate::outcome::{Outcome, ToolError};
use crate::shown::{Printer, shown};

pub(crate) async fn run(
    cluster: &mut Cluster,
    place: &Place,
    options: &Revoke,
    printer: &mut Printer<'_>,
) -> Result<Outcome, ToolError> {
    let requests = requests(cluster, options)?;
    let must_ask = !options.yes && !options.dry_run;
    if must_ask && !io::stdin().is_terminal() {
        return Err(ToolError::Usage(
            "there is no terminal to ask on: --yes revokes without a question, --dry-run only shows what would be revoked"
                .to_owned(),
        ));
    }
    let asking = Asking::of(cluster, place, &requests).await?;
    if must_ask {
        let looks: Vec<Request> = requests.iter().map(|request| Request { dry_run: true, ..request.clone() }).collect();
        let (previews, failed) = asking.send(&looks).await;
        if failed.is_empty() {
            printer.note(&text(&previews, SystemClock.unix_seconds())?)?;
            printer.note("Revoke these certificates? [y/N]")?;
        }
        if !failed.is_empty() || !is_yes(&mut io::stdin().lock())? {
            note_failed(&failed, printer)?;
            printer.note("nothing was revoked")?;
            return Ok(Outcome::Failed);
        }
    }
    let (answers, failed) = asking.send(&requests).await;
    if printer.is_table() {
        printer.text(&text(&answers, SystemClock.unix_seconds())?)?;
    } else {
        printer.documents(&answers)?;
    }
    note_failed(&failed, printer)?;
    Ok(if failed.is_empty() { Outcome::Fine } else { Outcome::Failed })
}

/// One request for each pod, or one for the certificate or the host.
fn requests(cluster: &mut Cluster, options: &Revoke) -> Result<Vec<Request>, ToolError> {
    let mut which = Vec::new();
    if let Some(fingerprint) = &options.fingerprint {
        which.push(Which::Fingerprint { fingerprint: fingerprint.clone(), namespace: cluster.namespace.clone() });
    }
    if let Some(name) = &options.host {
        which.push(Which::Host { name: name.clone() });
    }
    let looked_at = cluster.namespace.clone();
    for pod in &options.pods {
        cluster.namespace.clone_from(&looked_at);
        let name = cluster.narrow(pod)?;
        which.push(Which::Pod { namespace: cluster.namespace.clone().unwrap_or_default(), name });
    }
    let request =
        |which| Request { which, reason: options.reason.clone(), keep_out: options.keep_out, dry_run: options.dry_run };
    let requests: Vec<Request> = which.into_iter().map(request).collect();
    for request in &requests {
        request.check().map_err(|error| ToolError::Usage(error.to_string()))?;
    }
    Ok(requests)
}

/// The CA, asked with a token for each namespace.
struct Asking<'a>(BTreeMap<Option<String>, CaService<'a>>);

impl<'a> Asking<'a> {
    async fn of(cluster: &'a Cluster, place: &'a Place, requests: &[Request]) -> Result<Self, ToolError> {
        let mut services = BTreeMap::new();
        for request in requests {
            let namespace = request.which.namespace();
            if let Entry::Vacant(free) = services.entry(namespace.map(str::to_owned)) {
                free.insert(CaService::find(cluster, place, namespace).await?);
            }
        }
        Ok(Self(services))
    }

    /// What was answered, and what was refused.
    async fn send(&self, requests: &[Request]) -> (Vec<Revocation>, Vec<(String, CaError)>) {
        let (mut answers, mut failed) = (Vec::new(), Vec::new());
        for request in requests {
            let Some(service) = self.0.get(&request.which.namespace().map(str::to_owned)) else { continue };
            match service.revoke(request).await {
                Ok(answer) => answers.push(answer),
                Err(error) => failed.push((request.which.to_string(), error)),
            }
        }
        (answers, failed)
    }
}

fn note_failed(failed: &[(String, CaError)], printer: &mut Printer<'_>) -> Result<(), ToolError> {
    failed.iter().try_for_each(|(which, error)| printer.note(&format!("{which}: {error}")))
}

/// Whether the next line says so.
fn is_yes(input: &mut impl BufRead) -> io::Result<bool> {
    let mut line = String::new();
    io::Read::take(input, MAX_LINE).read_line(&mut line)?;
    Ok(["y", "yes"].contains(&line.trim().to_lowercase().as_str()))
}

/// For people: the certificates, who refuses them when, and what to do next.
fn text(answers: &[Revocation], now: i64) -> Result<String, ToolError> {
    let answers: Vec<Revocation> = answers.iter().map(shown).collect::<Result<_, _>>()?;
    if answers.is_empty() {
        return Ok(String::new());
    }
    let rows = answers.iter().flat_map(|answer| answer.certificates.iter().map(|one| row(one, answer.dry_run, now)));
    let head = ["OF", "NAME", "NETWORKS", "GROUPS", "EXPIRES", "FINGERPRINT", "STATE"];
    let mut text = columns(head, rows.collect::<Vec<_>>());
    for answer in &answers {
        let more = answer.total.saturating_sub(answer.certificates.len());
        if more > 0 {
            text += &format!("{more} more are not shown; {} of {} were not revoked before\n", answer.new, answer.total);
        }
    }
    let mut lines: Vec<String> = answers.iter().map(|answer| spread(answer, now)).collect();
    for answer in &answers {
        lines.extend(answer.certificates.iter().filter_map(|one| next(one, answer.dry_run)));
    }
    let mut said = Vec::new();
    for line in lines {
        if !said.contains(&line) {
            text += &format!("{line}\n");
            said.push(line);
        }
    }
    Ok(text)
}

fn row(one: &RevokedCertificate, dry_run: bool, now: i64) -> [String; 7] {
    let networks: Vec<String> = one.networks.iter().map(ToString::to_string).collect();
    let expires = match one.not_after.saturating_sub(now) {
        left @ 1.. => format!("in {}", span(left)),
        _ => "EXPIRED".to_owned(),
    };
    let state = match (one.revoked, dry_run) {
        (Some(since), _) => format!("was revoked {} ago", span(now.saturating_sub(since).max(0))),
        (None, true) => "would be revoked".to_owned(),
        (None, false) => "revoked".to_owned(),
    };
    let groups = or_dash(&one.groups.join(" "));
    [
        one.subject.clone(),
        one.name.clone(),
        or_dash(&networks.join(" ")),
        groups,
        expires,
        one.fingerprint.clone(),
        state,
    ]
}

/// When others refuse it.
fn spread(answer: &Revocation, now: i64) -> String {
    let spread = &answer.spread;
    let after = |at: i64| span(at.saturating_sub(now).max(0));
    let published = match spread.published_within {
        0 => "at once".to_owned(),
        within => format!("within {within} s at every replica"),
    };
    let mut line = format!("The CA publishes it {published}; whoever follows the CA refuses it then.");
    if spread.unaware > 0 {
        line += &format!(" {} of {} others do not follow it", spread.unaware, spread.others);
        if spread.is_partial {
            line += " or follow another replica";
        }
        if let Some(last) = spread.last_hears_by {
            line += &format!("; the last of them hears of it in {}", after(last));
        }
        line.push('.');
    }
    line + &format!(" Nobody accepts it after {}, when it ends.", after(spread.ends))
}

/// What its holder can do, and what to do about that.
fn next(one: &RevokedCertificate, dry_run: bool) -> Option<String> {
    let subject = &one.subject;
    let delete = subject
        .strip_prefix("pod ")
        .and_then(|pod| pod.split_once('/'))
        .map(|(namespace, name)| format!("kubectl delete pod -n {namespace} {name}"));
    match (one.next, delete) {
        (Next::AnotherCertificate, Some(delete)) => Some(format!(
            "{subject} gets another certificate, for another key, within seconds: its node vouches for it still. If the pod itself is not \
             trusted any more, revoke with --keep-out, then: {delete}"
        )),
        (Next::AnotherCertificate, None) => Some(format!("{subject} gets another certificate, for another key.")),
        (Next::KeptOut, delete) => Some(format!(
            "{subject} {} no further certificate, and is cut off when its instance hears of it. The pod that replaces it gets its own: {}",
            if dry_run { "would get" } else { "gets" },
            delete.unwrap_or_else(|| "delete it".to_owned())
        )),
        (Next::NewToken, _) => {
            Some(format!("{subject} needs another token to come back: nebula-ca token create, where the CA runs."))
        }
        (Next::Unknown, _) => None,
    }
}

const MAX_LINE: u64 = 1024;

#[cfg(test)]
mod tests {
    use nebula_cert::revocation::Spread;

    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn revocation(next: Next, revoked: Option<i64>) -> Revocation {
        let one = RevokedCertificate {
            subject: "pod shop/web".to_owned(),
            name: "web.shop.pod".to_owned(),
            networks: vec!["10.42.0.7/16".parse().unwrap()],
            groups: vec!["ns:shop".to_owned()],
            fingerprint: "ab".repeat(32),
            not_after: NOW + 7_200,
            revoked,
            next,
        };
        let spread = Spread {
            published_within: 1,
            others: 9,
            unaware: 2,
            last_hears_by: Some(NOW + 3_600),
            ends: NOW + 7_200,
            is_partial: true,
        };
        Revocation { dry_run: true, user: "u".to_owned(), certificates: vec![one], total: 1, new: 1, spread }
    }

    #[test]
    fn what_would_be_revoked_is_shown_whole_with_what_comes_next() {
        let text = text(&[revocation(Next::AnotherCertificate, None)], NOW).unwrap();
        for part in [
            "pod shop/web  web.shop.pod  10.42.0.7/16  ns:shop  in 2h 0m",
            &"ab".repeat(32),
            "would be revoked",
            "within 1 s at every replica",
            "2 of 9 others do not follow it or follow another replica; the last of them hears of it in 1h 0m.",
            "Nobody accepts it after 2h 0m",
            "--keep-out, then: kubectl delete pod -n shop web",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn what_was_revoked_before_says_since_when_and_a_pod_that_is_kept_out_is_deleted_next() {
        let done = Revocation { dry_run: false, ..revocation(Next::KeptOut, Some(NOW - 600)) };
        let text = text(&[done.clone(), done], NOW).unwrap();
        assert!(text.contains("was revoked 10m"), "{text}");
        assert_eq!(text.matches("gets no further certificate").count(), 1, "each line once: {text}");
        assert!(text.contains("gets its own: kubectl delete pod -n shop web"), "{text}");
    }

    #[test]
    fn only_a_plain_yes_is_one() {
        let said = |text: &str| is_yes(&mut text.as_bytes()).unwrap();
        assert!(["y\n", "Yes\n", " yes "].iter().all(|text| said(text)));
        assert!(["", "\n", "n\n", "yess\n", "\ny\n"].iter().all(|text| !said(text)));
        assert!(!said(&" ".repeat(1 << 20)));
    }
}
