//! `nebula-cert inspect`: the remaining validity of certificates, for users and for monitoring.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nebula_cert::{Certificate, GoDuration, json_line, rfc3339};
use serde_json::json;

use crate::arguments::boolean;

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Folder with certificates (folders inside are left out), or one file.
    path: PathBuf,
    /// Exit with 1 if a certificate is valid for less than this, with units h, m and s.
    #[arg(long, default_value = "0")]
    below: GoDuration,
    /// A JSON array, instead of a table.
    #[arg(long, default_value = "false", default_missing_value = "true", num_args = 0..=1, require_equals = true,
          value_parser = boolean, action = clap::ArgAction::Set)]
    json: bool,
}

pub(crate) fn run(flags: &Flags, now: Duration) -> anyhow::Result<()> {
    let now_seconds = now.as_secs() as i64;
    let (mut found, mut faults) = (Vec::new(), Vec::new());
    for path in files(&flags.path)? {
        let shown = path.strip_prefix(&flags.path).ok().filter(|name| !name.as_os_str().is_empty()).unwrap_or(&path);
        match certificates(&path) {
            Ok(certificates) => found.extend(certificates.into_iter().map(|it| (shown.display().to_string(), it))),
            Err(error) => faults.push(format!("{}: {error:#}", shown.display())),
        }
    }
    if found.is_empty() && faults.is_empty() {
        bail!("no certificates in {}", flags.path.display());
    }
    found.sort_by_key(|(_, certificate)| certificate.not_after());
    let printed = if flags.json { json_of(&found, now_seconds) } else { table_of(&found, now_seconds) };
    std::io::stdout().write_all(printed.as_bytes()).context("error while writing to stdout")?;

    let limit = flags.below.after(now);
    for (file, certificate) in &found {
        if certificate.is_expired(now_seconds) || certificate.not_after() < limit {
            let name = certificate.name().escape_debug();
            faults.push(format!("{file}: {name} ({}): {}", certificate.version(), left(certificate, now_seconds)));
        }
    }
    if !faults.is_empty() {
        bail!("{} need attention:\n{}", faults.len(), faults.join("\n"));
    }
    Ok(())
}

fn files(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let unreadable = || format!("error while reading {}", path.display());
    if !path.metadata().with_context(unreadable)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in path.read_dir().with_context(unreadable)? {
        let file = entry.with_context(unreadable)?.path();
        // Skip sockets, pipes and broken links: they hold no certificates, and reading a pipe would block.
        if file.is_file() {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// Reads the certificates of a file; none if it contains no certificate banner.
fn certificates(path: &Path) -> anyhow::Result<Vec<Certificate>> {
    let mut text = Vec::new();
    File::open(path)?.take(LIMIT + 1).read_to_end(&mut text)?;
    if !text.windows(BANNER.len()).any(|window| window == BANNER) {
        return Ok(Vec::new());
    }
    if text.len() as u64 > LIMIT {
        bail!("the file is longer than {} MiB", LIMIT >> 20);
    }
    Ok(Certificate::bundle_from_pem(&text)?)
}

fn json_of(found: &[(String, Certificate)], now: i64) -> String {
    let objects = found.iter().map(|(file, certificate)| {
        json!({
            "file": file,
            "name": certificate.name(),
            "version": certificate.version().number(),
            "isCa": certificate.is_ca(),
            "fingerprint": certificate.fingerprint().to_string(),
            "notBefore": rfc3339(certificate.not_before()),
            "notAfter": rfc3339(certificate.not_after()),
            "secondsLeft": certificate.not_after().saturating_sub(now),
            "valid": !certificate.is_expired(now),
        })
    });
    json_line(objects.collect::<serde_json::Value>().to_string())
}

fn table_of(found: &[(String, Certificate)], now: i64) -> String {
    let heading = ["FILE", "NAME", "KIND", "NOT AFTER", "LEFT"].map(str::to_owned);
    let rows = found.iter().map(|(file, certificate)| {
        let kind = if certificate.is_ca() { "ca" } else { "host" };
        let kind = format!("{} {kind}", certificate.version());
        let name = certificate.name().escape_debug().to_string();
        [file.clone(), name, kind, rfc3339(certificate.not_after()), left(certificate, now)]
    });
    let rows: Vec<_> = std::iter::once(heading).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 5] = std::array::from_fn(width);
    rows.iter().fold(String::new(), |text, row| {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("{text}{}\n", cells.join("  ").trim_end())
    })
}

fn left(certificate: &Certificate, now: i64) -> String {
    if certificate.not_before() > now {
        return format!("not yet valid, in {}", span(certificate.not_before().saturating_sub(now)));
    }
    match certificate.not_after().saturating_sub(now) {
        seconds if seconds < 0 => format!("expired {} ago", span(seconds.saturating_neg())),
        seconds => span(seconds),
    }
}

/// Formats a time span in its two largest units.
fn span(seconds: i64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (1.., ..) => format!("{days}d {hours}h"),
        (_, 1.., _) => format!("{hours}h {minutes}m"),
        (.., 1..) => format!("{minutes}m {}s", seconds % 60),
        _ => format!("{seconds}s"),
    }
}

const BANNER: &[u8] = b"-----BEGIN NEBULA CERTIFICATE";
// In bytes, larger than any real bundle.
const LIMIT: u64 = 4 << 20;
