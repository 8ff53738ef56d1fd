//! `nebula-cert print`: prints certificates as JSON.

use std::io::Write as _;

use anyhow::Context as _;
use nebula_cert::{Certificate, go_json};

use crate::arguments::boolean;
use crate::bundle::Bundle;
use crate::{file, qr};

#[derive(clap::Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    bundle: Bundle,
    /// One line with a JSON array of all certificates, instead of one indented object for each.
    #[arg(long, default_value = "false", default_missing_value = "true", num_args = 0..=1, require_equals = true,
          value_parser = boolean, action = clap::ArgAction::Set)]
    json: bool,
    /// Where to write a PNG image with all certificates as a QR code; an existing file is overwritten.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_qr: String,
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    let (certificates, rest) = flags.bundle.read_readable()?;
    let objects = || certificates.iter().map(Certificate::to_json);
    let indented = || objects().map(|object| go_json(&object, Some("\t")) + "\n").collect::<String>();
    let is_image_only = file::is_stdio(&flags.out_qr);
    if rest.is_err() && !flags.json && !is_image_only {
        // As Go: one damaged entry does not hide those before it. An array is whole, or not there.
        print(&indented())?;
    }
    rest?;
    let pem: String = certificates.iter().map(Certificate::to_pem).collect();
    let image = qr::wanted(&flags.out_qr, &pem)?;
    if !is_image_only {
        print(&if flags.json { go_json(&objects().collect(), None) + "\n" } else { indented() })?;
    }
    file::write_image("out-qr", &flags.out_qr, image.as_deref())
}

fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("error while writing to stdout")
}
