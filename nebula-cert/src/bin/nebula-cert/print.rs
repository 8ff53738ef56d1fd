//! `nebula-cert print`: certificates as JSON.

use std::io::Write as _;

use anyhow::Context as _;
use nebula_cert::Certificate;
use serde::Serialize as _;
use serde_json::Value;
use serde_json::ser::{PrettyFormatter, Serializer};

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
    let certificates = flags.bundle.read()?;
    let pem: String = certificates.iter().map(Certificate::to_pem).collect();
    let image = qr::wanted(&flags.out_qr, &pem)?;
    if file::is_stdio(&flags.out_qr) {
        return file::write_image("out-qr", &flags.out_qr, image.as_deref());
    }
    let mut objects = certificates.iter().map(Certificate::to_json);
    let printed = if flags.json {
        format!("{}\n", objects.collect::<Value>())
    } else {
        objects.try_fold(String::new(), |text, object| anyhow::Ok(text + &indented(&object)? + "\n"))?
    };
    std::io::stdout().write_all(like_go(&printed).as_bytes()).context("error while writing to stdout")?;
    file::write_image("out-qr", &flags.out_qr, image.as_deref())
}

fn indented(object: &Value) -> anyhow::Result<String> {
    let mut out = Vec::new();
    object.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(b"\t")))?;
    Ok(String::from_utf8(out)?)
}

/// Go's encoder escapes these characters, which can only occur inside strings.
fn like_go(json: &str) -> String {
    let escapes =
        [('<', "\\u003c"), ('>', "\\u003e"), ('&', "\\u0026"), ('\u{2028}', "\\u2028"), ('\u{2029}', "\\u2029")];
    escapes.iter().fold(json.to_owned(), |text, (character, escape)| text.replace(*character, escape))
}
