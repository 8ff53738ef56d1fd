//! `nebula-cert blocklist`: what to put into `pki.blocklist`.

use std::io::Write as _;

use anyhow::Context as _;
use nebula_cert::Certificate;

use crate::arguments::{boolean, required};
use crate::file;

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Required: file with one or more certificates to block.
    #[arg(long, default_value = "", hide_default_value = true)]
    path: String,
    /// A JSON array of fingerprints, instead of lines for the configuration file.
    #[arg(long, default_value = "false", default_missing_value = "true", num_args = 0..=1, require_equals = true,
          value_parser = boolean, action = clap::ArgAction::Set)]
    json: bool,
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    required("path", &flags.path)?;
    let text = file::read_or("unable to read cert;", &flags.path)?;
    let certificates = Certificate::bundle_from_pem(&text).context("error while unmarshaling cert")?;
    // A P-256 signature has two valid forms, so whoever holds such a certificate can give it either fingerprint.
    let fingerprints = certificates.iter().flat_map(|certificate| {
        let both = std::iter::once(certificate.fingerprint()).chain(certificate.alternate_fingerprint());
        both.map(move |fingerprint| (fingerprint.to_string(), certificate))
    });
    let printed = if flags.json {
        format!("{}\n", fingerprints.map(|(fingerprint, _)| fingerprint).collect::<serde_json::Value>())
    } else {
        fingerprints.fold(String::new(), |text, (fingerprint, certificate)| {
            // Escaped, because a name with a line break would leave the comment.
            let name = certificate.name().escape_default();
            format!("{text}- {fingerprint} # {name} ({})\n", certificate.version())
        })
    };
    std::io::stdout().write_all(printed.as_bytes()).context("error while writing to stdout")
}
