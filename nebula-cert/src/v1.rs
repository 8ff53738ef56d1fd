//! Certificate version 1, in protobuf. Signature and fingerprint cover the re-encoded message, without unknown fields.

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};

use crate::protobuf::{Fields, Malformed, Value, Writer, packed};
use crate::{Certificate, Curve, Error, Fingerprint, MAX_CERTIFICATE_SIZE, Version};

/// Reads a certificate. In a handshake the key comes from outside the certificate.
pub(crate) fn decode(bytes: &[u8], handshake: Option<(Curve, &[u8])>) -> Result<Certificate, Error> {
    if bytes.is_empty() {
        return Err(Error::Empty { version: Version::V1 });
    }
    if bytes.len() > MAX_CERTIFICATE_SIZE {
        return Err(Error::TooLong { version: Version::V1, length: bytes.len(), limit: MAX_CERTIFICATE_SIZE });
    }
    let mut details: Option<Details<'_>> = None;
    let mut signature: &[u8] = &[];
    for field in Fields::new(bytes) {
        match field.map_err(|_| malformed("the outer message"))? {
            // As protobuf requires, a message that occurs twice is merged.
            (DETAILS, Value::Bytes(value)) => details.get_or_insert_default().read(value)?,
            (SIGNATURE, Value::Bytes(value)) => signature = value,
            _ => {}
        }
    }
    let details = details.ok_or(Error::DetailsMissing)?;
    let mut certificate = details.into_certificate(signature)?;
    if let Some((_, public_key)) = handshake {
        if !certificate.public_key.is_empty() {
            return Err(Error::PublicKeyPresent);
        }
        certificate.public_key = public_key.to_vec();
    }
    if let Some((curve, _)) = handshake.filter(|&(curve, _)| curve != certificate.curve) {
        return Err(Error::Curve { found: certificate.curve, expected: curve });
    }
    certificate.validate()?;
    certificate.raw_details = encode_details(&certificate, &certificate.public_key);
    Ok(certificate)
}

/// Encodes the binary form.
pub(crate) fn encode(certificate: &Certificate) -> Vec<u8> {
    encode_with(certificate, &certificate.signature)
}

/// Encodes the binary form with another signature.
pub(crate) fn encode_with(certificate: &Certificate, signature: &[u8]) -> Vec<u8> {
    outer(&certificate.raw_details, signature)
}

/// Encodes the binary form without the public key.
pub(crate) fn encode_for_handshake(certificate: &Certificate) -> Vec<u8> {
    outer(&encode_details(certificate, &[]), &certificate.signature)
}

/// Encodes the details. With the certificate's own `public_key`, these are the signed bytes.
pub(crate) fn encode_details(certificate: &Certificate, public_key: &[u8]) -> Vec<u8> {
    let mut out = Writer::default();
    out.nonempty(NAME, certificate.name.as_bytes());
    out.packed(NETWORKS, pack(&certificate.networks));
    out.packed(UNSAFE_NETWORKS, pack(&certificate.unsafe_networks));
    for group in &certificate.groups {
        out.bytes(GROUPS, group.as_bytes());
    }
    out.number(NOT_BEFORE, certificate.not_before as u64);
    out.number(NOT_AFTER, certificate.not_after as u64);
    out.nonempty(PUBLIC_KEY, public_key);
    out.number(IS_CA, u64::from(certificate.is_ca));
    if let Some(Fingerprint(issuer)) = &certificate.issuer {
        out.bytes(ISSUER, issuer);
    }
    out.number(CURVE, u64::from(certificate.curve.number()));
    out.finish()
}

/// Checks the rules of this version. Networks may be in any order and repeated.
pub(crate) fn validate(certificate: &Certificate) -> Result<(), Error> {
    let networks = certificate.networks.iter().chain(&certificate.unsafe_networks);
    if let Some(&network) = networks.clone().find(|network| matches!(network, IpNet::V6(_))) {
        return Err(Error::Ipv6InV1 { network });
    }
    match certificate.networks.iter().find(|network| network.addr().is_unspecified()) {
        Some(&network) => Err(Error::UnspecifiedNetwork { network }),
        None => Ok(()),
    }
}

#[derive(Default)]
struct Details<'a> {
    name: &'a str,
    networks: Vec<u32>,
    unsafe_networks: Vec<u32>,
    groups: Vec<&'a str>,
    not_before: i64,
    not_after: i64,
    public_key: &'a [u8],
    is_ca: bool,
    issuer: &'a [u8],
    curve: u64,
}

impl<'a> Details<'a> {
    fn read(&mut self, message: &'a [u8]) -> Result<(), Error> {
        let bad = |_: Malformed| malformed("the details message");
        for field in Fields::new(message) {
            match field.map_err(bad)? {
                (NAME, Value::Bytes(value)) => self.name = text(value)?,
                (NETWORKS, Value::Bytes(value)) => packed(value, |n| self.networks.push(n as u32)).map_err(bad)?,
                (NETWORKS, Value::Varint(value)) => self.networks.push(value as u32),
                (UNSAFE_NETWORKS, Value::Bytes(value)) => {
                    packed(value, |n| self.unsafe_networks.push(n as u32)).map_err(bad)?;
                }
                (UNSAFE_NETWORKS, Value::Varint(value)) => self.unsafe_networks.push(value as u32),
                (GROUPS, Value::Bytes(value)) => self.groups.push(text(value)?),
                (NOT_BEFORE, Value::Varint(value)) => self.not_before = value as i64,
                (NOT_AFTER, Value::Varint(value)) => self.not_after = value as i64,
                (PUBLIC_KEY, Value::Bytes(value)) => self.public_key = value,
                (IS_CA, Value::Varint(value)) => self.is_ca = value != 0,
                (ISSUER, Value::Bytes(value)) => self.issuer = value,
                (CURVE, Value::Varint(value)) => self.curve = u64::from(value as u32),
                _ => {}
            }
        }
        Ok(())
    }

    fn into_certificate(self, signature: &[u8]) -> Result<Certificate, Error> {
        Ok(Certificate {
            version: Version::V1,
            curve: Curve::from_number(self.curve)?,
            name: self.name.to_owned(),
            networks: unpack(&self.networks, "IPs")?,
            unsafe_networks: unpack(&self.unsafe_networks, "Subnets")?,
            groups: self.groups.into_iter().map(str::to_owned).collect(),
            is_ca: self.is_ca,
            not_before: self.not_before,
            not_after: self.not_after,
            issuer: Fingerprint::from_issuer(self.issuer)?,
            public_key: self.public_key.to_vec(),
            signature: signature.to_vec(),
            raw_details: Vec::new(),
        })
    }
}

fn unpack(numbers: &[u32], field: &'static str) -> Result<Vec<IpNet>, Error> {
    if !numbers.len().is_multiple_of(2) {
        return Err(Error::OddNumbers { field });
    }
    Ok(numbers.chunks_exact(2).map(|pair| network(pair[0], pair[1])).collect())
}

fn network(address: u32, mask: u32) -> IpNet {
    // A non-contiguous mask is read as /0, as in Go; the re-encoded details then fail signature verification.
    let contiguous = mask.leading_ones() == mask.count_ones();
    let length = if contiguous { mask.count_ones() } else { 0 };
    Ipv4Net::new_assert(Ipv4Addr::from_bits(address), length as u8).into()
}

fn pack(networks: &[IpNet]) -> impl Iterator<Item = u32> {
    // Validation has already refused IPv6.
    let v4 = networks.iter().filter_map(|network| match network {
        IpNet::V4(network) => Some(network),
        IpNet::V6(_) => None,
    });
    v4.flat_map(|network| [network.addr(), network.netmask()]).map(Ipv4Addr::to_bits)
}

fn outer(details: &[u8], signature: &[u8]) -> Vec<u8> {
    let mut out = Writer::default();
    out.bytes(DETAILS, details);
    out.nonempty(SIGNATURE, signature);
    out.finish()
}

fn text(bytes: &[u8]) -> Result<&str, Error> {
    str::from_utf8(bytes).map_err(|_| malformed("a name or group is not UTF-8"))
}

fn malformed(what: &'static str) -> Error {
    Error::Malformed { version: Version::V1, what }
}

const DETAILS: u32 = 1;
const SIGNATURE: u32 = 2;

const NAME: u32 = 1;
const NETWORKS: u32 = 2;
const UNSAFE_NETWORKS: u32 = 3;
const GROUPS: u32 = 4;
const NOT_BEFORE: u32 = 5;
const NOT_AFTER: u32 = 6;
const PUBLIC_KEY: u32 = 7;
const IS_CA: u32 = 8;
const ISSUER: u32 = 9;
const CURVE: u32 = 100;
