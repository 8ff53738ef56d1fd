//! `nebula-cert sign`: signs a certificate for a host.

use std::time::Duration;

use anyhow::{Context as _, bail};
use ipnet::IpNet;
use nebula_cert::{
    Certificate, Curve, Error, GoDuration, PrivateKey, Signer, SigningKey, Template, Version, public_key_from_pem,
};

use crate::arguments::{Deprecated, Usage, required, unsigned};
use crate::hardware::Hardware;
use crate::passphrase::{self, Asked};
use crate::{contents, file, qr};

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Required: name of the host.
    #[arg(long, default_value = "", hide_default_value = true)]
    name: String,
    /// Required: comma separated addresses with prefix lengths, such as 10.0.0.1/16.
    #[arg(long, default_value = "", hide_default_value = true)]
    networks: String,
    /// Comma separated networks that the host can route for.
    #[arg(long, default_value = "", hide_default_value = true)]
    unsafe_networks: String,
    /// Comma separated groups.
    #[arg(long, default_value = "", hide_default_value = true)]
    groups: String,
    /// How long it is valid, with units h, m and s [default: until one second before the CA expires].
    #[arg(long, default_value = "0", hide_default_value = true)]
    duration: GoDuration,
    /// Version of the certificate format [default: that of the CA].
    #[arg(long, default_value = "0", hide_default_value = true, value_parser = unsigned)]
    version: u64,
    /// Private key of the CA; an encrypted one is opened with the passphrase in NEBULA_CA_PASSPHRASE, or one that is
    /// asked for.
    #[arg(long, default_value = "ca.key", value_name = "PATH")]
    ca_key: String,
    /// Certificate of the CA.
    #[arg(long, default_value = "ca.crt", value_name = "PATH")]
    ca_crt: String,
    /// Sign this public key instead of making a key pair; excludes -out-key. With -pkcs11 and without this flag, the
    /// certificate is for the key in the token itself.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    in_pub: String,
    /// Where to write the private key; an existing file is never overwritten [default: <name>.key].
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_key: String,
    /// Where to write the certificate; an existing file is never overwritten [default: <name>.crt].
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_crt: String,
    /// Where to write a PNG image with the certificate as a QR code; an existing file is overwritten.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    out_qr: String,
    /// Deprecated, see -networks.
    #[arg(long, default_value = "", hide_default_value = true)]
    ip: String,
    #[command(flatten)]
    deprecated: Deprecated,
    #[command(flatten)]
    hardware: Hardware,
}

pub(crate) fn run(flags: Flags, now: Duration) -> anyhow::Result<()> {
    let in_token = flags.hardware.is_wanted()?;
    if !in_token {
        required("ca-key", &flags.ca_key)?;
    }
    required("ca-crt", &flags.ca_crt)?;
    required("name", &flags.name)?;
    if in_token && !flags.out_key.is_empty() {
        return Err(Usage::error("cannot set -out-key with -pkcs11"));
    }
    if !flags.in_pub.is_empty() && !flags.out_key.is_empty() {
        return Err(Usage::error("cannot set both -in-pub and -out-key"));
    }
    let networks = contents::networks("networks", &flags.networks, &flags.ip)?;
    if networks.is_empty() {
        return Err(Usage::error("-networks is required"));
    }
    let unsafe_networks = contents::networks("unsafe-networks", &flags.unsafe_networks, &flags.deprecated.subnets)?;
    let version = if flags.version == 0 { None } else { Some(contents::version(flags.version)?) };
    let out_key = path_or(&flags.out_key, &flags.name, "key");
    let out_crt = path_or(&flags.out_crt, &flags.name, "crt");
    file::check_inputs(&[("ca-key", &flags.ca_key), ("ca-crt", &flags.ca_crt), ("in-pub", &flags.in_pub)])?;
    file::check_outputs(&[("out-key", &out_key), ("out-crt", &out_crt), ("out-qr", &flags.out_qr)])?;

    let ca_key = ca_key(&flags.hardware, &flags.ca_key)?;
    let ca = read_ca(&flags.ca_crt)?;
    let version = version.unwrap_or_else(|| ca.version());
    if version == Version::V1 {
        check_v1(&networks, &unsafe_networks)?;
    }
    let not_before = now.as_secs() as i64;
    if ca.is_expired(not_before) {
        bail!("ca certificate is expired: {:?} in {}", ca.name(), flags.ca_crt);
    }
    let (public_key, private_key) = if !flags.in_pub.is_empty() {
        let text = file::read("in-pub", &flags.in_pub)?;
        let (curve, key) = public_key_from_pem(&text).context("error while parsing in-pub")?;
        if curve != ca_key.curve() {
            bail!("curve of in-pub does not match ca: {curve} and {}", ca_key.curve());
        }
        (key, None)
    } else if in_token {
        // As in Go, the certificate is for the key in the token itself.
        (token_host_key(&*ca_key)?, None)
    } else {
        let key = PrivateKey::generate(ca_key.curve())?;
        (key.public_key(), Some(key))
    };
    file::must_not_exist("cert", &out_crt)?;
    if private_key.is_some() {
        file::must_not_exist("key", &out_key)?;
    }
    let template = Template {
        version,
        curve: ca_key.curve(),
        name: flags.name,
        networks,
        unsafe_networks,
        groups: contents::groups(&flags.groups),
        not_before,
        not_after: if flags.duration > GoDuration(0) { flags.duration.after(now) } else { ca.not_after() - 1 },
        public_key,
    };
    let certificate = match template.sign(&ca, &*ca_key) {
        Err(Error::CaKeyMismatch { .. }) => bail!(
            "refusing to sign, root certificate does not match private key: {} and {}",
            flags.ca_crt,
            if in_token { "the key in the token" } else { &flags.ca_key }
        ),
        other => other.context("error while signing")?,
    };
    let text = certificate.to_pem();
    let image = qr::wanted(&flags.out_qr, &text)?;
    if let Some(key) = private_key {
        file::write_new("out-key", &out_key, &key.to_pem())?;
    }
    file::write_new("out-crt", &out_crt, &text)?;
    file::write_image("out-qr", &flags.out_qr, image.as_deref())
}

fn path_or(path: &str, name: &str, ending: &str) -> String {
    if path.is_empty() { format!("{name}.{ending}") } else { path.to_owned() }
}

/// Opens the key of a CA, in a token or in a file.
pub(crate) fn ca_key(hardware: &Hardware, path: &str) -> anyhow::Result<Box<dyn Signer>> {
    if hardware.is_wanted()? { hardware.open() } else { Ok(Box::new(read_ca_key(path)?)) }
}

/// Uses the key in a token as a host key. It must be P-256, because Ed25519 keys can sign but not perform key
/// agreement.
fn token_host_key(key: &dyn Signer) -> anyhow::Result<Vec<u8>> {
    match key.curve() {
        Curve::P256 => Ok(key.public_key()),
        Curve::Curve25519 => {
            Err(Usage::error("-in-pub is required: an Ed25519 key in a token cannot be that of a host"))
        }
    }
}

fn read_ca_key(path: &str) -> anyhow::Result<SigningKey> {
    let text = file::read("ca-key", path)?;
    match SigningKey::from_pem(&text) {
        Err(Error::KeyEncrypted) => {
            let passphrase = passphrase::ask(&Asked {
                no_terminal: "ca-key is encrypted and must be decrypted interactively",
                never_given: "cannot open encrypted ca-key without passphrase",
            })?;
            SigningKey::from_encrypted_pem(&text, &passphrase).context("error while parsing encrypted ca-key")
        }
        other => other.context("error while parsing ca-key"),
    }
}

/// Reads the first certificate of the file, which may be a bundle.
fn read_ca(path: &str) -> anyhow::Result<Certificate> {
    let certificates =
        Certificate::bundle_from_pem(&file::read("ca-crt", path)?).context("error while parsing ca-crt")?;
    certificates.into_iter().next().context("error while parsing ca-crt: no certificate")
}

fn check_v1(networks: &[IpNet], unsafe_networks: &[IpNet]) -> anyhow::Result<()> {
    let ipv4 = networks.iter().filter(|network| matches!(network, IpNet::V4(_))).count();
    if ipv4 != 1 {
        let rule = "v1 certificates can only have a single ipv4 address";
        return Err(Usage::error(format!("invalid -networks definition: {rule}")));
    }
    for (flag, networks) in [("networks", networks), ("unsafe-networks", unsafe_networks)] {
        if let Some(network) = contents::first_ipv6(networks) {
            let rule = "v1 certificates can only contain ipv4 addresses";
            return Err(Usage::error(format!("invalid -{flag} definition: {rule}, have {network}")));
        }
    }
    Ok(())
}
