//! `nebula-cert ca`: creates a self-signed certificate authority.

use std::time::Duration;

use anyhow::{Context as _, bail};
use nebula_cert::{Curve, GoDuration, PassphraseCost, Signer, SigningKey, Template, Version};
use zeroize::Zeroizing;

use crate::arguments::{Deprecated, Usage, boolean, required, unsigned};
use crate::hardware::Hardware;
use crate::passphrase::{self, Asked};
use crate::{contents, file, qr};

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Required: name of the certificate authority.
    #[arg(long, default_value = "", hide_default_value = true)]
    name: String,
    /// Version of the certificate format.
    #[arg(long, default_value = "2", value_parser = unsigned)]
    version: u64,
    /// How long it is valid, with units h, m and s.
    #[arg(long, default_value = "8760h")]
    duration: GoDuration,
    /// Where to write the private key; an existing file is never overwritten [default: ca.key].
    #[arg(long, value_name = "PATH")]
    out_key: Option<String>,
    /// Where to write the certificate; an existing file is never overwritten.
    #[arg(long, default_value = "ca.crt", value_name = "PATH")]
    out_crt: String,
    /// Where to write a PNG image with the certificate as a QR code; an existing file is overwritten.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_qr: String,
    /// Comma separated groups: limits which groups subordinate certificates can use.
    #[arg(long, default_value = "", hide_default_value = true)]
    groups: String,
    /// Comma separated networks: limits which networks subordinate certificates can use.
    #[arg(long, default_value = "", hide_default_value = true)]
    networks: String,
    /// Comma separated networks: limits which unsafe networks subordinate certificates can use.
    #[arg(long, default_value = "", hide_default_value = true)]
    unsafe_networks: String,
    /// Curve: 25519 or P256.
    #[arg(long, default_value = Curve::USUAL.flag())]
    curve: String,
    /// Protect the private key with a passphrase: that in the environment variable NEBULA_CA_PASSPHRASE, or one that
    /// is asked for.
    #[arg(long, default_value = "false", default_missing_value = "true", num_args = 0..=1, require_equals = true,
          value_parser = boolean, action = clap::ArgAction::Set)]
    encrypt: bool,
    /// Memory in KiB that trying one passphrase costs.
    #[arg(long, default_value_t = PassphraseCost::default().memory_kib.into(), value_parser = unsigned)]
    argon_memory: u64,
    /// Passes over that memory.
    #[arg(long, default_value_t = PassphraseCost::default().iterations.into(), value_parser = unsigned)]
    argon_iterations: u64,
    /// Lanes, 1 to 255.
    #[arg(long, default_value_t = PassphraseCost::default().parallelism.into(), value_parser = unsigned)]
    argon_parallelism: u64,
    /// Deprecated, see -networks.
    #[arg(long, default_value = "", hide_default_value = true)]
    ips: String,
    #[command(flatten)]
    deprecated: Deprecated,
    #[command(flatten)]
    hardware: Hardware,
}

pub(crate) fn run(flags: Flags, now: Duration) -> anyhow::Result<()> {
    let in_token = flags.hardware.is_wanted()?;
    required("name", &flags.name)?;
    let out_key = match flags.out_key.as_deref() {
        Some(_) if in_token => return Err(Usage::error("cannot set -out-key with -pkcs11")),
        _ if in_token => None,
        path => Some(required("out-key", path.unwrap_or("ca.key"))?),
    };
    required("out-crt", &flags.out_crt)?;
    if flags.duration <= GoDuration(0) {
        return Err(Usage::error("-duration must be greater than 0"));
    }
    let version = contents::version(flags.version)?;
    let networks = contents::networks("networks", &flags.networks, &flags.ips)?;
    let unsafe_networks = contents::networks("unsafe-networks", &flags.unsafe_networks, &flags.deprecated.subnets)?;
    for (flag, networks) in [("networks", &networks), ("unsafe-networks", &unsafe_networks)] {
        if let Some(network) = contents::first_ipv6(networks).filter(|_| version == Version::V1) {
            let rule = "v1 certificates can only be ipv4";
            return Err(Usage::error(format!("invalid -{flag} definition: {rule}, have {network}")));
        }
    }
    let cost = if flags.encrypt && !in_token { Some(passphrase_cost(&flags)?) } else { None };
    let curve = contents::curve(&flags.curve)?;
    let outputs = [("out-key", out_key.unwrap_or_default()), ("out-crt", &*flags.out_crt), ("out-qr", &*flags.out_qr)];
    file::check_outputs(&outputs)?;
    out_key.map_or(Ok(()), |path| file::must_not_exist("CA key", path))?;
    file::must_not_exist("CA cert", &flags.out_crt)?;

    let (key, new_key): (Box<dyn Signer>, _) = if in_token {
        (open(&flags.hardware, curve)?, None)
    } else {
        let key = SigningKey::generate(curve)?;
        (Box::new(key.clone()), Some(key))
    };
    let template = Template {
        version,
        curve,
        name: flags.name,
        networks,
        unsafe_networks,
        groups: contents::groups(&flags.groups),
        not_before: now.as_secs() as i64,
        not_after: flags.duration.after(now),
        public_key: key.public_key(),
    };
    let certificate = template.self_sign(&*key).context("error while signing")?;
    let key_text = new_key.map(|key| key_text(&key, cost)).transpose()?;
    let text = certificate.to_pem();
    let image = qr::wanted(&flags.out_qr, &text)?;
    if let Some((path, text)) = out_key.zip(key_text) {
        file::write_new("out-key", path, &text)?;
    }
    file::write_new("out-crt", &flags.out_crt, &text)?;
    file::write_image("out-qr", &flags.out_qr, image.as_deref())
}

/// Opens the key in the token, which must be on the requested curve.
fn open(hardware: &Hardware, curve: Curve) -> anyhow::Result<Box<dyn Signer>> {
    let key = hardware.open()?;
    if key.curve() != curve {
        bail!("invalid curve for PKCS#11: {curve}, the key in the token needs -curve {}", key.curve().flag());
    }
    Ok(key)
}

fn key_text(key: &SigningKey, cost: Option<PassphraseCost>) -> anyhow::Result<Zeroizing<String>> {
    let Some(cost) = cost else { return Ok(key.to_pem()) };
    let passphrase = passphrase::ask(&Asked {
        no_terminal: "out-key must be encrypted interactively",
        never_given: "no passphrase specified, remove -encrypt flag to write out-key in plaintext",
    })?;
    Ok(Zeroizing::new(key.to_encrypted_pem(&passphrase, cost).context("error while encrypting out-key")?))
}

fn passphrase_cost(flags: &Flags) -> anyhow::Result<PassphraseCost> {
    let bounded = |flag, value: u64, most: u32, unit| match u32::try_from(value) {
        Ok(value) if (1..=most).contains(&value) => Ok(value),
        _ => Err(Usage::error(format!("-{flag} must be greater than 0 and no more than {most}{unit}"))),
    };
    Ok(PassphraseCost {
        memory_kib: bounded("argon-memory", flags.argon_memory, u32::MAX, " KiB")?,
        iterations: bounded("argon-iterations", flags.argon_iterations, u32::MAX, "")?,
        parallelism: bounded("argon-parallelism", flags.argon_parallelism, 255, "")?,
    })
}
