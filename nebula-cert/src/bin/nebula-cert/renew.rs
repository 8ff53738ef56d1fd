//! `nebula-cert renew`: signs a certificate again for the same identity, valid from now.

use std::time::Duration;

use anyhow::{Context as _, bail};
use nebula_cert::{CaPool, Certificate, GoDuration, PrivateKey, Template, public_key_from_pem};

use crate::arguments::{Usage, required};
use crate::file;
use crate::hardware::Hardware;
use crate::sign::ca_key;

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Required: certificate to renew; it may be expired.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    crt: String,
    /// Where to write the new certificate; an existing file is replaced [default: the file of -crt].
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_crt: String,
    /// Make a new key pair and write its private key here; an existing file is never overwritten.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_key: String,
    /// Certify this public key instead of the old one; excludes -out-key.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    in_pub: String,
    /// How long it is valid, with units h, m and s [default: as long as it was, but no longer than the CA].
    #[arg(long, default_value = "0", hide_default_value = true)]
    duration: GoDuration,
    /// Private key of the CA; an encrypted one is opened as by sign.
    #[arg(long, default_value = "ca.key", value_name = "PATH")]
    ca_key: String,
    /// Certificate of the CA; further ones in the file may have issued the old certificate, but sign nothing.
    #[arg(long, default_value = "ca.crt", value_name = "PATH")]
    ca_crt: String,
    #[command(flatten)]
    hardware: Hardware,
}

pub(crate) fn run(flags: &Flags, now: Duration) -> anyhow::Result<()> {
    required("crt", &flags.crt)?;
    if !flags.hardware.is_wanted()? {
        required("ca-key", &flags.ca_key)?;
    }
    required("ca-crt", &flags.ca_crt)?;
    if !flags.in_pub.is_empty() && !flags.out_key.is_empty() {
        return Err(Usage::error("cannot set both -in-pub and -out-key"));
    }
    let out_crt = if flags.out_crt.is_empty() { &flags.crt } else { &flags.out_crt };
    let inputs = [("crt", &flags.crt), ("in-pub", &flags.in_pub), ("ca-key", &flags.ca_key), ("ca-crt", &flags.ca_crt)];
    file::check_inputs(&inputs.map(|(flag, path)| (flag, path.as_str())))?;
    file::check_outputs(&[("out-crt", out_crt), ("out-key", &flags.out_key)])?;
    if !flags.out_key.is_empty() {
        file::must_not_exist("key", &flags.out_key)?;
    }
    let authorities = file::read("ca-crt", &flags.ca_crt)?;
    let bundle = Certificate::bundle_from_pem(&authorities).context("error while parsing ca-crt")?;
    let ca = bundle.into_iter().next().context("error while parsing ca-crt: no certificate")?;
    let not_before = now.as_secs() as i64;
    if ca.is_expired(not_before) {
        bail!("ca certificate is expired: {:?} in {}", ca.name(), flags.ca_crt);
    }
    let old = Certificate::from_pem(&file::read("crt", &flags.crt)?).context("error while parsing crt")?;
    // Verify that this CA issued the old certificate; otherwise anyone could choose its groups. Verify at its last
    // valid second, because it may be expired.
    let pool = CaPool::from_pem(&authorities).context("error while parsing ca-crt")?;
    pool.verify(old.clone(), old.not_after())
        .with_context(|| format!("refusing to renew {}: no CA in {} issued it", flags.crt, flags.ca_crt))?;

    let private_key = if flags.out_key.is_empty() { None } else { Some(PrivateKey::generate(old.curve())?) };
    let public_key = match &private_key {
        Some(key) => key.public_key(),
        None if flags.in_pub.is_empty() => old.public_key().to_vec(),
        None => {
            let text = file::read("in-pub", &flags.in_pub)?;
            let (curve, key) = public_key_from_pem(&text).context("error while parsing in-pub")?;
            if curve != old.curve() {
                bail!("curve of in-pub does not match crt: {curve} and {}", old.curve());
            }
            key
        }
    };
    let as_before = not_before.saturating_add(old.not_after() - old.not_before()).min(ca.not_after() - 1);
    let template = Template {
        version: old.version(),
        curve: old.curve(),
        name: old.name().to_owned(),
        networks: old.networks().to_vec(),
        unsafe_networks: old.unsafe_networks().to_vec(),
        groups: old.groups().to_vec(),
        not_before,
        not_after: if flags.duration > GoDuration(0) { flags.duration.after(now) } else { as_before },
        public_key,
    };
    let renewed = template.sign(&ca, &*ca_key(&flags.hardware, &flags.ca_key)?).context("error while signing")?;
    if let Some(key) = private_key {
        file::write_new("out-key", &flags.out_key, &key.to_pem())?;
    }
    file::replace("out-crt", out_crt, &renewed.to_pem())
}
