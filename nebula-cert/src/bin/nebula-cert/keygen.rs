//! `nebula-cert keygen`: generates a key pair for a host.

use anyhow::bail;
use nebula_cert::{Curve, PrivateKey, public_key_to_pem};

use crate::arguments::{Usage, required};
use crate::hardware::Hardware;
use crate::{contents, file};

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Required without -pkcs11: where to write the private key; an existing file is overwritten.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_key: String,
    /// Required: where to write the public key; an existing file is overwritten.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_pub: String,
    /// Curve: 25519 or P256.
    #[arg(long, default_value = Curve::USUAL.flag())]
    curve: String,
    #[command(flatten)]
    hardware: Hardware,
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    if flags.hardware.is_wanted()? {
        return write_public_key(flags);
    }
    required("out-key", &flags.out_key)?;
    required("out-pub", &flags.out_pub)?;
    let curve = contents::curve(&flags.curve)?;
    file::check_outputs(&[("out-key", &flags.out_key), ("out-pub", &flags.out_pub)])?;
    let key = PrivateKey::generate(curve)?;
    file::write_secret_over("out-key", &flags.out_key, key.to_pem().as_bytes())?;
    file::write_over("out-pub", &flags.out_pub, key.public_pem().as_bytes())
}

/// Writes the public key only; the private key stays in the token.
fn write_public_key(flags: &Flags) -> anyhow::Result<()> {
    if !flags.out_key.is_empty() {
        return Err(Usage::error("cannot set -out-key with -pkcs11"));
    }
    required("out-pub", &flags.out_pub)?;
    // Tokens have no X25519 keys that could be used in a handshake.
    if contents::curve(&flags.curve)? != Curve::P256 {
        bail!("invalid curve for PKCS#11: {}, only P256 host keys can be in a token", flags.curve);
    }
    let key = flags.hardware.open()?;
    if key.curve() != Curve::P256 {
        bail!("curve of the key in the token is {}, not P256", key.curve());
    }
    file::write_over("out-pub", &flags.out_pub, public_key_to_pem(Curve::P256, &key.public_key()).as_bytes())
}
