//! Formats answers for people and programs.

mod flows;
mod status;
#[cfg(test)]
mod tests;
mod trace;
mod tunnel;

use nebula_cert::{json_line, visible};
use nebula_cni_contract::columns::{bytes, columns as table, optional, or_dash, span};
use nebula_instance::host::documents::{Certificate, Certificates, Identity, Upgraded};
use serde_json::Value;

use crate::answer::Answer;
use crate::arguments::unix_ms;
use crate::doctor::{self, Finding};

/// The answer with all texts in it as they may be printed: names of peers and certificates, and what others said.
pub(crate) fn visible_values(answer: &Value) -> Value {
    match answer {
        Value::String(text) => visible(text).into(),
        Value::Array(items) => items.iter().map(visible_values).collect(),
        Value::Object(entries) => {
            let entry = |(key, value): (&String, &Value)| (visible(key).into_owned(), visible_values(value));
            Value::Object(entries.iter().map(entry).collect())
        }
        other => other.clone(),
    }
}

/// The document for a program, which may show it on a terminal.
pub(crate) fn json(document: &Value) -> String {
    json_line(format!("{document:#}"))
}

/// The records of an answer for a program, one a line.
pub(crate) fn json_lines(document: &Value) -> String {
    let records = document["records"].as_array().into_iter().flatten();
    records.map(|record| json_line(record.to_string())).collect()
}

/// Formats an answer, line by line. `answer` and `findings` are visible.
pub(crate) fn readable(answer: &Answer, findings: &[Finding]) -> String {
    match answer {
        Answer::Status(answer) => status::status(answer) + &doctor::readable(findings),
        Answer::Doctor(_) => diagnosis(findings),
        Answer::Why(facts) => doctor::state(facts) + &diagnosis(findings),
        Answer::Peers(answer) => tunnel::peers(answer),
        Answer::Gateways(answer) => tunnel::gateways(answer),
        Answer::Whois(answer) => identity(answer),
        Answer::Tunnel(answer) => tunnel::tunnels(answer),
        Answer::Close(answer) => format!("closed {} tunnel(s)\n", answer.closed),
        Answer::Query(answer) => tunnel::known(answer),
        Answer::Reload => "reloaded\n".to_owned(),
        Answer::Upgrade(answer) => upgraded(answer),
        Answer::Cert(answer) => certificates(answer),
        Answer::LogLevel(answer) => format!("{}\n", answer.level),
        Answer::Trace(answer) => trace::trace(answer),
        Answer::Flows(answer) => flows::flows(answer, unix_ms()),
    }
}

fn diagnosis(findings: &[Finding]) -> String {
    if findings.is_empty() {
        "nothing is wrong as far as this host can tell\n".to_owned()
    } else {
        doctor::readable(findings)
    }
}

fn upgraded(answer: &Upgraded) -> String {
    let Upgraded { pid, version, peers, flows, rolled_back } = answer;
    let what = format!("process {pid} of version {version}, with {peers} peer(s) and {flows} flow(s)");
    match rolled_back {
        Some(why) => format!("{why}; the old program serves again: {what}\n"),
        None => format!("upgraded to {what}\n"),
    }
}

fn identity(answer: &Identity) -> String {
    let name = or_dash(&answer.name);
    fields(&[
        ("name", if answer.own { format!("{name} (this host)") } else { name }),
        ("addresses", list(&answer.addresses)),
        ("groups", list(&answer.groups)),
        ("issuer", optional(answer.issuer.as_ref())),
        ("fingerprint", or_dash(&answer.fingerprint)),
    ])
}

fn certificates(answer: &Certificates) -> String {
    let row = |certificate: &Certificate| {
        let details = &certificate.details;
        [
            or_dash(&details.name),
            format!("v{}", certificate.version),
            list(details.networks.as_deref().unwrap_or_default()),
            list(details.groups.as_deref().unwrap_or_default()),
            expiry(certificate.seconds_left),
            or_dash(&certificate.fingerprint),
        ]
    };
    let table = |kind, certificates: &[Certificate]| {
        table([kind, "VERSION", "NETWORKS", "GROUPS", "VALID", "FINGERPRINT"], certificates.iter().map(row))
    };
    table("NAME", &answer.certificates) + "\n" + &table("CA", &answer.cas)
}

fn list(items: &[String]) -> String {
    or_dash(&items.iter().map(|item| or_dash(item)).collect::<Vec<_>>().join(" "))
}

fn milliseconds(time: Option<f64>) -> String {
    optional(time.map(|time| format!("{time:.1} ms")))
}

fn percent(loss: Option<u32>) -> String {
    optional(loss.map(|loss| format!("{loss} %")))
}

fn expiry(seconds: i64) -> String {
    if seconds < 0 { format!("EXPIRED {} ago", span(-seconds)) } else { format!("{} left", span(seconds)) }
}

fn fields(lines: &[(&str, String)]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    lines.iter().map(|(name, value)| format!("{:width$}{value}\n", format!("{name}:"))).collect()
}
