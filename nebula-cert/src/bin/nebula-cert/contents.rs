//! Parsers for the flags that describe a certificate: lists, curves, versions.

use anyhow::bail;
use ipnet::IpNet;
use nebula_cert::{Curve, Version, prefix};

use crate::arguments::Usage;

/// Splits comma separated words, trims them and drops empty ones.
pub(crate) fn groups(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|group| !group.is_empty()).map(str::to_owned).collect()
}

/// Parses comma separated networks. The deprecated flag is used only if the new one is empty.
pub(crate) fn networks(flag: &str, text: &str, deprecated: &str) -> anyhow::Result<Vec<IpNet>> {
    let text = if text.is_empty() { deprecated } else { text };
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    words.map(|word| prefix(word).ok_or_else(|| bad_network(flag, word))).collect()
}

/// Parses a version number.
pub(crate) fn version(number: u64) -> anyhow::Result<Version> {
    match number {
        1 => Ok(Version::V1),
        2 => Ok(Version::V2),
        _ => Err(Usage::error("-version must be either 1 or 2")),
    }
}

/// Parses a curve; accepts the same names as the Go tool.
pub(crate) fn curve(name: &str) -> anyhow::Result<Curve> {
    match name {
        "25519" | "X25519" | "Curve25519" | "CURVE25519" => Ok(Curve::Curve25519),
        "P256" => Ok(Curve::P256),
        _ => bail!("invalid curve: {name}, expected 25519 or P256"),
    }
}

/// The first IPv6 network, which v1 certificates cannot hold.
pub(crate) fn first_ipv6(networks: &[IpNet]) -> Option<&IpNet> {
    networks.iter().find(|network| matches!(network, IpNet::V6(_)))
}

fn bad_network(flag: &str, word: &str) -> anyhow::Error {
    Usage::error(format!("invalid -{flag} definition: {word}, expected address/prefix length such as 10.0.0.1/16"))
}
