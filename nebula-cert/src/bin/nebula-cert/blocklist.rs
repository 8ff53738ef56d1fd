//! `nebula-cert blocklist`: the fingerprints to put into `pki.blocklist`.

use std::io::Write as _;

use anyhow::Context as _;

use crate::arguments::boolean;
use crate::bundle::Bundle;

#[derive(clap::Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    bundle: Bundle,
    /// A JSON array of fingerprints, instead of lines for the configuration file.
    #[arg(long, default_value = "false", default_missing_value = "true", num_args = 0..=1, require_equals = true,
          value_parser = boolean, action = clap::ArgAction::Set)]
    json: bool,
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    let certificates = flags.bundle.read()?;
    // A P-256 signature has two valid forms, so the holder of such a certificate can switch between two fingerprints.
    let fingerprints = certificates.iter().flat_map(|certificate| {
        let both = std::iter::once(certificate.fingerprint()).chain(certificate.alternate_fingerprint());
        both.map(move |fingerprint| (fingerprint.to_string(), certificate))
    });
    let printed = if flags.json {
        format!("{}\n", fingerprints.map(|(fingerprint, _)| fingerprint).collect::<serde_json::Value>())
    } else {
        fingerprints.fold(String::new(), |text, (fingerprint, certificate)| {
            // Escaped, because a line break in the name would end the comment.
            let name = certificate.name().escape_default();
            format!("{text}- {fingerprint} # {name} ({})\n", certificate.version())
        })
    };
    std::io::stdout().write_all(printed.as_bytes()).context("error while writing to stdout")
}
