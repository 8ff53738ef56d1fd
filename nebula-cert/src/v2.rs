//! Certificate version 2, in ASN.1 DER. Signature and fingerprint cover the details element exactly as received.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{Certificate, Curve, Error, Fingerprint, MAX_CERTIFICATE_SIZE, Version};

/// Reads a certificate. In a handshake the curve and the key come from outside the certificate.
pub(crate) fn decode(bytes: &[u8], handshake: Option<(Curve, &[u8])>) -> Result<Certificate, Error> {
    if bytes.is_empty() {
        return Err(Error::Empty { version: Version::V2 });
    }
    if bytes.len() > MAX_CERTIFICATE_SIZE {
        return Err(Error::TooLong { version: Version::V2, length: bytes.len(), limit: MAX_CERTIFICATE_SIZE });
    }
    // As in Go, bytes after the sequence and elements after the signature inside it are ignored.
    let mut outer = Der(Der(bytes).value(SEQUENCE, "no certificate sequence")?);
    let raw_details = outer.element(DETAILS, "no details")?;
    let curve = match outer.optional(CURVE, "the curve")? {
        None => handshake.map_or(Curve::Curve25519, |(curve, _)| curve),
        Some(&[number]) => Curve::from_number(number.into())?,
        Some(_) => return Err(malformed("the curve is not one byte")),
    };
    let public_key = match (outer.optional(PUBLIC_KEY, "the public key")?, handshake) {
        (None, Some((_, public_key))) => public_key,
        (Some(_), Some(_)) => return Err(Error::PublicKeyPresent),
        (public_key, None) => public_key.unwrap_or_default(),
    };
    let signature = outer.nonempty(SIGNATURE, "no signature")?;
    if let Some((expected, _)) = handshake.filter(|&(expected, _)| expected != curve) {
        return Err(Error::Curve { found: curve, expected });
    }

    let mut details = Der(Der(raw_details).nonempty(DETAILS, "no details")?);
    let name = details.value(NAME, "no name")?;
    if !(1..=MAX_NAME).contains(&name.len()) {
        return Err(Error::NameLength { length: name.len() });
    }
    // Read in the order of the elements.
    let networks = read_networks(details.optional(NETWORKS, "the networks")?)?;
    let unsafe_networks = read_networks(details.optional(UNSAFE_NETWORKS, "the unsafe networks")?)?;
    let groups = read_groups(details.optional(GROUPS, "the groups")?)?;
    let is_ca = match details.optional(IS_CA, "the CA flag")? {
        None => false,
        Some(&[flag]) => flag != 0,
        Some(_) => return Err(malformed("the CA flag is not one byte")),
    };
    let not_before = details.integer(NOT_BEFORE, "no valid notBefore")?;
    let not_after = details.integer(NOT_AFTER, "no valid notAfter")?;
    let issuer = Fingerprint::from_issuer(details.optional(ISSUER, "the issuer")?.unwrap_or_default())?;
    let mut certificate = Certificate {
        version: Version::V2,
        curve,
        // Go does not check that names and groups are UTF-8. The signature covers the raw bytes, so lossy conversion is
        // safe.
        name: String::from_utf8_lossy(name).into_owned(),
        networks,
        unsafe_networks,
        groups,
        is_ca,
        not_before,
        not_after,
        issuer,
        public_key: public_key.to_vec(),
        signature: signature.to_vec(),
        raw_details: raw_details.to_vec(),
    };
    sort(&mut certificate);
    certificate.validate()?;
    Ok(certificate)
}

/// Sorts the networks into the order in which they are issued and kept in memory; the first is the primary address.
pub(crate) fn sort(certificate: &mut Certificate) {
    // IpNet orders IPv4 first, then by address, then by prefix length.
    certificate.networks.sort_unstable();
    certificate.unsafe_networks.sort_unstable();
}

/// Encodes the binary form.
pub(crate) fn encode(certificate: &Certificate) -> Vec<u8> {
    let mut content = certificate.raw_details.clone();
    if certificate.curve != Curve::Curve25519 {
        put(&mut content, CURVE, &[certificate.curve.number()]);
    }
    put(&mut content, PUBLIC_KEY, &certificate.public_key);
    put(&mut content, SIGNATURE, &certificate.signature);
    wrap(SEQUENCE, &content)
}

/// Encodes the binary form without curve and public key.
pub(crate) fn encode_for_handshake(certificate: &Certificate) -> Vec<u8> {
    let mut content = certificate.raw_details.clone();
    put(&mut content, SIGNATURE, &certificate.signature);
    wrap(SEQUENCE, &content)
}

/// Encodes the details element of a certificate to be signed; its networks must be sorted.
pub(crate) fn encode_details(certificate: &Certificate) -> Vec<u8> {
    let mut content = Vec::new();
    put(&mut content, NAME, certificate.name.as_bytes());
    for (tag, networks) in [(NETWORKS, &certificate.networks), (UNSAFE_NETWORKS, &certificate.unsafe_networks)] {
        put_list(&mut content, tag, OCTET_STRING, networks.iter().map(network_bytes));
    }
    put_list(&mut content, GROUPS, UTF8_STRING, &certificate.groups);
    if certificate.is_ca {
        put(&mut content, IS_CA, &[0xff]);
    }
    put(&mut content, NOT_BEFORE, integer_bytes(&certificate.not_before.to_be_bytes()));
    put(&mut content, NOT_AFTER, integer_bytes(&certificate.not_after.to_be_bytes()));
    if let Some(Fingerprint(issuer)) = &certificate.issuer {
        put(&mut content, ISSUER, issuer);
    }
    wrap(DETAILS, &content)
}

/// The bytes that the signature covers. The fingerprint covers them with the signature appended.
pub(crate) fn signed_bytes(certificate: &Certificate) -> Vec<u8> {
    [&certificate.raw_details, &[certificate.curve.number()][..], &certificate.public_key].concat()
}

/// Checks the rules of this version; the networks must be sorted.
pub(crate) fn validate(certificate: &Certificate) -> Result<(), Error> {
    if certificate.groups.iter().any(String::is_empty) {
        return Err(Error::EmptyGroup);
    }
    let networks = &certificate.networks;
    for &network in networks {
        match network.addr() {
            address if address.is_unspecified() => return Err(Error::UnspecifiedNetwork { network }),
            IpAddr::V6(address) if address.to_ipv4_mapped().is_some() => return Err(Error::MappedNetwork { network }),
            _ => {}
        }
    }
    let has_v4 = networks.iter().any(|network| matches!(network, IpNet::V4(_)));
    let has_v6 = networks.iter().any(|network| matches!(network, IpNet::V6(_)));
    let unreachable = certificate.unsafe_networks.iter().find(|network| match network {
        IpNet::V4(_) => !has_v4,
        IpNet::V6(_) => !has_v6,
    });
    if let Some(&network) = unreachable.filter(|_| !certificate.is_ca) {
        return Err(Error::UnsafeNetworkFamily { network });
    }
    for sorted in [networks, &certificate.unsafe_networks] {
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::DuplicateNetwork { network: pair[0] });
        }
    }
    Ok(())
}

fn read_networks(list: Option<&[u8]>) -> Result<Vec<IpNet>, Error> {
    let mut list = Der(list.unwrap_or_default());
    let mut networks = Vec::new();
    while !list.0.is_empty() {
        networks.push(read_network(list.value(OCTET_STRING, "a network is no octet string")?)?);
    }
    Ok(networks)
}

fn read_network(bytes: &[u8]) -> Result<IpNet, Error> {
    let (&length, address) = bytes.split_last().ok_or_else(|| malformed("a network is empty"))?;
    if let Ok(address) = <[u8; 4]>::try_from(address) {
        let network = Ipv4Net::new(Ipv4Addr::from(address), length);
        return network.map(IpNet::V4).map_err(|_| Error::PrefixLength { length, bits: 32 });
    }
    if let Ok(address) = <[u8; 16]>::try_from(address) {
        let network = Ipv6Net::new(Ipv6Addr::from(address), length);
        return network.map(IpNet::V6).map_err(|_| Error::PrefixLength { length, bits: 128 });
    }
    Err(malformed("a network is neither 5 nor 17 bytes long"))
}

fn network_bytes(network: &IpNet) -> Vec<u8> {
    let mut bytes = match network.addr() {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    bytes.push(network.prefix_len());
    bytes
}

fn read_groups(list: Option<&[u8]>) -> Result<Vec<String>, Error> {
    let mut list = Der(list.unwrap_or_default());
    let mut groups = Vec::new();
    while !list.0.is_empty() {
        let group = list.nonempty(UTF8_STRING, "a group is empty or no UTF-8 string")?;
        groups.push(String::from_utf8_lossy(group).into_owned());
    }
    Ok(groups)
}

/// Reads DER elements one after the other. Anything that is not strict DER is an error with the text `what`.
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// The content of the next element, which must have this tag.
    fn value(&mut self, tag: u8, what: &'static str) -> Result<&'a [u8], Error> {
        self.take(tag).ok_or_else(|| malformed(what))
    }

    /// Like [`Der::value`], but refuses empty content.
    fn nonempty(&mut self, tag: u8, what: &'static str) -> Result<&'a [u8], Error> {
        self.take(tag).filter(|content| !content.is_empty()).ok_or_else(|| malformed(what))
    }

    /// The next element with its tag and length.
    fn element(&mut self, tag: u8, what: &'static str) -> Result<&'a [u8], Error> {
        let bytes = self.0;
        self.value(tag, what)?;
        Ok(&bytes[..bytes.len() - self.0.len()])
    }

    /// The content of the next element if it has this tag.
    fn optional(&mut self, tag: u8, what: &'static str) -> Result<Option<&'a [u8]>, Error> {
        match self.0.first() {
            Some(&found) if found == tag => self.value(tag, what).map(Some),
            _ => Ok(None),
        }
    }

    fn integer(&mut self, tag: u8, what: &'static str) -> Result<i64, Error> {
        let content = self.nonempty(tag, what)?;
        if content.len() > 8 || integer_bytes(content).len() != content.len() {
            return Err(malformed(what));
        }
        let sign = if content[0] & 0x80 == 0 { 0 } else { -1 };
        Ok(content.iter().fold(sign, |value, &byte| value << 8 | i64::from(byte)))
    }

    fn take(&mut self, tag: u8) -> Option<&'a [u8]> {
        let bytes = self.0;
        let (header, length) = Self::header(bytes, tag)?;
        let end = header.checked_add(length)?;
        let content = bytes.get(header..end)?;
        self.0 = bytes.get(end..)?;
        Some(content)
    }

    /// Lengths of the header and the content.
    fn header(bytes: &[u8], tag: u8) -> Option<(usize, usize)> {
        let (&found, rest) = bytes.split_first()?;
        let (&first, rest) = rest.split_first()?;
        if found != tag {
            return None;
        }
        if first < 0x80 {
            return Some((2, first.into()));
        }
        let count = usize::from(first & 0x7f);
        let octets = rest.get(..count).filter(|octets| (1..=4).contains(&octets.len()))?;
        let length = octets.iter().fold(0_u64, |length, &octet| length << 8 | u64::from(octet));
        // The length must be minimal: no leading zero octet, and no long form if the short one suffices.
        (octets[0] != 0 && length >= 0x80).then_some((2 + count, usize::try_from(length).ok()?))
    }
}

fn put(out: &mut Vec<u8>, tag: u8, content: &[u8]) {
    out.push(tag);
    if let Ok(short @ 0..0x80) = u8::try_from(content.len()) {
        out.push(short);
    } else {
        let octets = content.len().to_be_bytes();
        let skipped = octets.iter().take_while(|&&octet| octet == 0).count();
        out.push(0x80 | (octets.len() - skipped) as u8);
        out.extend_from_slice(&octets[skipped..]);
    }
    out.extend_from_slice(content);
}

fn put_list<T: AsRef<[u8]>>(out: &mut Vec<u8>, tag: u8, item: u8, values: impl IntoIterator<Item = T>) {
    let mut list = Vec::new();
    values.into_iter().for_each(|value| put(&mut list, item, value.as_ref()));
    if !list.is_empty() {
        put(out, tag, &list);
    }
}

fn wrap(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(content.len() + 6);
    put(&mut out, tag, content);
    out
}

/// Reduces a big-endian number to its minimal two's complement form.
fn integer_bytes(mut bytes: &[u8]) -> &[u8] {
    while let [0, 0..=0x7f, ..] | [0xff, 0x80..=0xff, ..] = bytes {
        bytes = &bytes[1..];
    }
    bytes
}

fn malformed(what: &'static str) -> Error {
    Error::Malformed { version: Version::V2, what }
}

const SEQUENCE: u8 = 0x30;
const OCTET_STRING: u8 = 0x04;
const UTF8_STRING: u8 = 0x0c;

const DETAILS: u8 = 0xa0;
const CURVE: u8 = 0x81;
const PUBLIC_KEY: u8 = 0x82;
const SIGNATURE: u8 = 0x83;

const NAME: u8 = 0x80;
const NETWORKS: u8 = 0xa1;
const UNSAFE_NETWORKS: u8 = 0xa2;
const GROUPS: u8 = 0xa3;
const IS_CA: u8 = 0x84;
const NOT_BEFORE: u8 = 0x85;
const NOT_AFTER: u8 = 0x86;
const ISSUER: u8 = 0x87;

const MAX_NAME: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_survive_a_round_trip_and_must_be_minimal() {
        for value in [0, 1, 127, 128, 255, 256, -1, -128, -129, i64::MAX, i64::MIN] {
            let bytes = wrap(NOT_BEFORE, integer_bytes(&value.to_be_bytes()));
            assert_eq!(Der(&bytes).integer(NOT_BEFORE, ""), Ok(value));
        }
        for bytes in [&[NOT_BEFORE, 2, 0, 1][..], &[NOT_BEFORE, 2, 0xff, 0xff], &[NOT_BEFORE, 0], &[NOT_BEFORE, 9]] {
            assert_eq!(Der(bytes).integer(NOT_BEFORE, "x"), Err(malformed("x")));
        }
    }

    #[test]
    fn lengths_survive_a_round_trip_and_must_be_minimal() {
        for length in [0, 1, 127, 128, 255, 256, 65_535, 65_536] {
            let bytes = wrap(NAME, &vec![7; length]);
            assert_eq!(Der(&bytes).value(NAME, "").map(<[u8]>::len), Ok(length));
        }
        for bytes in [&[NAME, 0x81, 1, 7][..], &[NAME, 0x82, 0, 1, 7], &[NAME, 0x80], &[NAME, 0x84, 255, 255, 255, 255]]
        {
            assert_eq!(Der(bytes).value(NAME, "x"), Err(malformed("x")));
        }
    }

    /// A P-256 certificate in handshake form, with an extra element between details and signature.
    fn handshake_with(element: &[u8]) -> Result<Certificate, Error> {
        let key = crate::SigningKey::generate(Curve::P256).unwrap();
        let template = crate::Template { curve: Curve::P256, ..crate::Template::new("ca", 0..=1) };
        let certificate = template.self_sign(&key).unwrap();
        let mut content = [&certificate.raw_details, element].concat();
        put(&mut content, SIGNATURE, &certificate.signature);
        decode(&wrap(SEQUENCE, &content), Some((Curve::P256, &certificate.public_key)))
            .inspect(|rebuilt| assert_eq!(*rebuilt, certificate))
    }

    #[test]
    fn a_handshake_may_repeat_the_curve_but_not_change_it_and_never_holds_the_key() {
        assert!(handshake_with(&[]).is_ok());
        assert!(handshake_with(&[CURVE, 1, 1]).is_ok());
        let other = Error::Curve { found: Curve::Curve25519, expected: Curve::P256 };
        assert_eq!(handshake_with(&[CURVE, 1, 0]), Err(other));
        assert_eq!(handshake_with(&[CURVE, 1, 2]), Err(Error::UnknownCurve(2)));
        assert!(matches!(handshake_with(&[CURVE, 2, 0, 1]), Err(Error::Malformed { .. })));
        assert_eq!(handshake_with(&[PUBLIC_KEY, 1, 4]), Err(Error::PublicKeyPresent));
    }
}
