//! `nebula-cert keygen`: a key pair for a host.

use nebula_cert::PrivateKey;

use crate::arguments::{Hardware, required};
use crate::{contents, file};

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Required: where to write the private key; an existing file is overwritten.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_key: String,
    /// Required: where to write the public key; an existing file is overwritten.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_pub: String,
    /// Curve: 25519 or P256.
    #[arg(long, default_value = "25519")]
    curve: String,
    #[command(flatten)]
    hardware: Hardware,
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    flags.hardware.refuse()?;
    required("out-key", &flags.out_key)?;
    required("out-pub", &flags.out_pub)?;
    let curve = contents::curve(&flags.curve)?;
    file::check_outputs(&[("out-key", &flags.out_key), ("out-pub", &flags.out_pub)])?;
    let key = PrivateKey::generate(curve)?;
    file::write_over("out-key", &flags.out_key, key.to_pem().as_bytes())?;
    file::write_over("out-pub", &flags.out_pub, key.public_pem().as_bytes())
}
