//! Formats answers for people and programs.

mod status;
#[cfg(test)]
mod tests;
mod trace;
mod tunnel;

use nebula_cert::{visible, visible_json};
use nebula_instance::host::documents::{Certificate, Certificates, Identity, Upgraded};
use serde_json::Value;

use crate::answer::Answer;
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
    format!("{}\n", visible_json(&format!("{document:#}")))
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
        Some(why) => format!("{why}; the program of before serves again: {what}\n"),
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

/// A dash stands for what is empty.
fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

/// A dash stands for what is not there.
fn optional<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| or_dash(&value.to_string()))
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

/// A number of bytes in its largest unit.
fn bytes(count: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, bits)| count >> bits > 0) {
        Some((unit, bits)) => format!("{:.1} {unit}", count as f64 / (1_u64 << bits) as f64),
        None => format!("{count} B"),
    }
}

/// A time span in its two largest units.
fn span(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, _, _) => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

fn fields(lines: &[(&str, String)]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    lines.iter().map(|(name, value)| format!("{:width$}{value}\n", format!("{name}:"))).collect()
}

fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut lines = vec![head.map(str::to_owned)];
    lines.extend(rows);
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..N).map(width).collect();
    let line = |cells: &[String; N]| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  "));
        padded.collect::<String>().trim_end().to_owned() + "\n"
    };
    lines.iter().map(line).collect()
}
