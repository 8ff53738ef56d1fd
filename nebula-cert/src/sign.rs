//! Issuing certificates under a CA's constraints.

use std::ops::RangeInclusive;

use ipnet::IpNet;

use crate::ca_pool::check_constraints;
use crate::key::check_public_key;
use crate::signature::{self, VerifyingKey};
use crate::{Certificate, Curve, Error, Fingerprint, Signer, UnixTime, Version, v1, v2};

/// The contents of a certificate to be signed.
///
/// ```
/// use nebula_cert::{Curve, Error, PrivateKey, SigningKey, Template};
///
/// let key = SigningKey::generate(Curve::Curve25519)?;
/// let template = Template {
///     networks: vec!["10.0.0.0/16".parse().unwrap()],
///     groups: vec!["web".into()],
///     ..Template::new("my network", 1_800_000_000..=1_900_000_000)
/// };
/// let ca = template.clone().self_sign(&key)?;
///
/// // What the CA's own certificate allows is the policy.
/// let public_key = PrivateKey::generate(Curve::Curve25519)?.public_key();
/// let networks = vec!["10.0.0.1/16".parse().unwrap()];
/// let host = Template { name: "web-1".into(), networks, public_key, ..template };
/// let admin = Template { groups: vec!["admin".into()], ..host.clone() };
/// assert_eq!(host.sign(&ca, &key)?.issuer(), Some(ca.fingerprint()));
/// assert_eq!(admin.sign(&ca, &key), Err(Error::GroupNotInCa { group: "admin".into() }));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Template {
    /// Version of the encoding.
    pub version: Version,
    /// Curve of `public_key`; must be that of the CA.
    pub curve: Curve,
    /// Name.
    pub name: String,
    /// Overlay addresses.
    pub networks: Vec<IpNet>,
    /// Networks that the host routes for.
    pub unsafe_networks: Vec<IpNet>,
    /// Groups.
    pub groups: Vec<String>,
    /// First second of validity.
    pub not_before: UnixTime,
    /// Last second of validity.
    pub not_after: UnixTime,
    /// The host's public key. [`Template::self_sign`] sets it to the CA's own.
    pub public_key: Vec<u8>,
}

impl Template {
    /// A template for version 2 on [`Curve::USUAL`] with a name and a validity period and nothing else.
    #[must_use]
    pub fn new(name: impl Into<String>, validity: RangeInclusive<UnixTime>) -> Self {
        let (not_before, not_after) = validity.into_inner();
        Self {
            version: Version::V2,
            curve: Curve::USUAL,
            name: name.into(),
            networks: Vec::new(),
            unsafe_networks: Vec::new(),
            groups: Vec::new(),
            not_before,
            not_after,
            public_key: Vec::new(),
        }
    }

    /// Signs a host certificate after checking the constraints of the CA.
    ///
    /// It does not check whether the CA is expired; the caller must, see [`Certificate::is_expired`].
    ///
    /// # Errors
    /// Returns the violated constraint, an error for invalid contents, or the signer's error.
    pub fn sign(self, ca: &Certificate, key: &dyn Signer) -> Result<Certificate, Error> {
        if !ca.is_ca() {
            return Err(Error::NotACa { name: ca.name().to_owned() });
        }
        if key.curve() != ca.curve() || key.public_key() != ca.public_key() {
            return Err(Error::CaKeyMismatch { ca: ca.name().to_owned() });
        }
        if self.version == Version::V1 && self.networks.len() > 1 {
            return Err(Error::V1NetworkCount { count: self.networks.len(), name: self.name });
        }
        let certificate = self.into_certificate(false, Some(ca.fingerprint()));
        check_constraints(ca, &certificate)?;
        issue(certificate, key, ca.public_key())
    }

    /// Self-signs a CA certificate; `public_key` is taken from `key`.
    ///
    /// # Errors
    /// Returns an error for invalid contents, or the signer's error.
    pub fn self_sign(mut self, key: &dyn Signer) -> Result<Certificate, Error> {
        let public_key = key.public_key();
        self.public_key.clone_from(&public_key);
        issue(self.into_certificate(true, None), key, &public_key)
    }

    fn into_certificate(self, is_ca: bool, issuer: Option<Fingerprint>) -> Certificate {
        Certificate {
            version: self.version,
            curve: self.curve,
            name: self.name,
            networks: self.networks,
            unsafe_networks: self.unsafe_networks,
            groups: self.groups,
            is_ca,
            not_before: self.not_before,
            not_after: self.not_after,
            issuer,
            public_key: self.public_key,
            signature: Vec::new(),
            raw_details: Vec::new(),
        }
    }
}

/// Signs a certificate. `public_key` is the signer's, passed in because deriving it again takes as long as a signature.
fn issue(mut certificate: Certificate, key: &dyn Signer, public_key: &[u8]) -> Result<Certificate, Error> {
    if certificate.curve != key.curve() {
        return Err(Error::Curve { found: certificate.curve, expected: key.curve() });
    }
    let (not_before, not_after) = (certificate.not_before, certificate.not_after);
    if not_after < not_before {
        return Err(Error::NeverValid { not_before, not_after });
    }
    if certificate.version == Version::V2 {
        v2::sort(&mut certificate);
    }
    certificate.validate()?;
    check_public_key(certificate.curve, &certificate.public_key)?;
    certificate.raw_details = match certificate.version {
        Version::V1 => v1::encode_details(&certificate, &certificate.public_key),
        Version::V2 => v2::encode_details(&certificate),
    };
    let made = key.sign(&certificate.signed_bytes())?;
    certificate.signature = match certificate.curve {
        Curve::Curve25519 => made,
        Curve::P256 => signature::low_s(&made).ok_or(Error::SignerFault)?,
    };
    // A faulty signature can reveal the key that made it, so verify before returning it.
    let public_key = VerifyingKey::new(certificate.curve, public_key);
    if !public_key.is_some_and(|public_key| certificate.is_signed_by(&public_key)) {
        return Err(Error::SignerFault);
    }
    // Parse the result, so that the reader's limits (sizes, name length) apply to issued certificates as well.
    Certificate::from_bytes(certificate.version, &certificate.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CaPool, PrivateKey, SigningKey};

    fn template(version: Version, curve: Curve) -> Template {
        Template { version, curve, ..Template::new("ca", 1_000..=9_000) }
    }

    fn host(version: Version, curve: Curve) -> Template {
        Template {
            name: "host".into(),
            networks: vec!["10.1.2.3/16".parse().unwrap()],
            public_key: PrivateKey::generate(curve).unwrap().public_key(),
            ..template(version, curve)
        }
    }

    fn authority(change: impl FnOnce(&mut Template)) -> (Certificate, SigningKey) {
        let key = SigningKey::generate(Curve::Curve25519).unwrap();
        let mut template = template(Version::V2, Curve::Curve25519);
        change(&mut template);
        (template.self_sign(&key).unwrap(), key)
    }

    /// The error for a host that differs from an acceptable one only by `change`.
    fn refusal(ca: impl FnOnce(&mut Template), change: impl FnOnce(&mut Template)) -> Error {
        let (ca, key) = authority(ca);
        let mut host = host(Version::V2, Curve::Curve25519);
        change(&mut host);
        host.sign(&ca, &key).unwrap_err()
    }

    fn network(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_signed_verifies_in_every_combination_of_versions_and_curves() {
        for curve in [Curve::Curve25519, Curve::P256] {
            for ca_version in [Version::V1, Version::V2] {
                for version in [Version::V1, Version::V2] {
                    let key = SigningKey::generate(curve).unwrap();
                    let ca = template(ca_version, curve).self_sign(&key).unwrap();
                    let host = host(version, curve).sign(&ca, &key).unwrap();
                    let mut pool = CaPool::new();
                    pool.add(ca.clone()).unwrap();
                    let verified = pool.verify(host.clone(), 1_000).unwrap();
                    assert_eq!(*verified, host);
                    assert_eq!(verified.issuer_fingerprint(), ca.fingerprint());
                    let (key, bytes) = (host.public_key(), host.to_handshake());
                    assert_eq!(Certificate::from_handshake(version, curve, key, &bytes), Ok(host.clone()));
                }
            }
        }
    }

    #[test]
    fn v2_networks_are_issued_sorted_and_the_first_is_the_lowest_ipv4_one() {
        let (ca, key) = authority(|_| {});
        let mut host = host(Version::V2, Curve::Curve25519);
        host.networks = ["fd00::2/64", "10.2.0.1/16", "10.1.0.1/24", "10.1.0.1/16"].map(network).into();
        let issued = host.sign(&ca, &key).unwrap();
        assert_eq!(issued.networks(), ["10.1.0.1/16", "10.1.0.1/24", "10.2.0.1/16", "fd00::2/64"].map(network));
    }

    #[test]
    fn each_limit_of_the_ca_is_enforced_when_signing() {
        let refused = refusal(|_| {}, |host| host.not_after = 9_001);
        assert_eq!(refused, Error::ExpiresAfterCa { not_after: 9_001, ca: 9_000 });
        let refused = refusal(|_| {}, |host| host.not_before = 999);
        assert_eq!(refused, Error::ValidBeforeCa { not_before: 999, ca: 1_000 });
        let refused = refusal(|ca| ca.groups = vec!["a".into()], |host| host.groups = vec!["a".into(), "b".into()]);
        assert_eq!(refused, Error::GroupNotInCa { group: "b".into() });
        let refused = refusal(|ca| ca.networks = vec![network("10.2.0.0/16")], |_| {});
        assert_eq!(refused, Error::NetworkNotInCa { network: network("10.1.2.3/16") });
        let refused = refusal(|ca| ca.networks = vec![network("10.1.0.0/17")], |_| {});
        assert_eq!(refused, Error::NetworkNotInCa { network: network("10.1.2.3/16") });
        let wide = network("192.168.0.0/15");
        let refused = refusal(
            |ca| ca.unsafe_networks = vec![network("192.168.0.0/16")],
            |host| host.unsafe_networks = vec![wide],
        );
        assert_eq!(refused, Error::UnsafeNetworkNotInCa { network: wide });
    }

    #[test]
    fn contents_that_no_reader_would_accept_are_not_signed() {
        assert_eq!(refusal(|_| {}, |host| host.networks.clear()), Error::NoNetworks { name: "host".into() });
        assert_eq!(refusal(|_| {}, |host| host.name = "n".repeat(254)), Error::NameLength { length: 254 });
        assert_eq!(refusal(|_| {}, |host| host.name.clear()), Error::NameLength { length: 0 });
        assert_eq!(refusal(|_| {}, |host| host.groups = vec![String::new()]), Error::EmptyGroup);
        assert_eq!(refusal(|_| {}, |host| host.public_key.clear()), Error::PublicKeyMissing);
        assert!(matches!(refusal(|_| {}, |host| host.public_key.truncate(31)), Error::PublicKey { length: 31, .. }));
        let twice = vec![network("10.1.0.1/16"); 2];
        let refused = refusal(|_| {}, |host| host.networks = twice.clone());
        assert_eq!(refused, Error::DuplicateNetwork { network: twice[0] });
        let mapped = network("::ffff:10.0.0.1/120");
        assert_eq!(refusal(|_| {}, |host| host.networks = vec![mapped]), Error::MappedNetwork { network: mapped });
        let zero = network("0.0.0.0/0");
        assert_eq!(refusal(|_| {}, |host| host.networks = vec![zero]), Error::UnspecifiedNetwork { network: zero });
        let v6 = network("2001:db8::/32");
        let refused = refusal(|_| {}, |host| host.unsafe_networks = vec![v6]);
        assert_eq!(refused, Error::UnsafeNetworkFamily { network: v6 });
        let refused = refusal(|_| {}, |host| (host.not_before, host.not_after) = (5_000, 4_999));
        assert_eq!(refused, Error::NeverValid { not_before: 5_000, not_after: 4_999 });
        let many = (0..4_000).map(|n| format!("group number {n:05}")).collect();
        assert!(matches!(refusal(|_| {}, |host| host.groups = many), Error::TooLong { .. }));
    }

    #[test]
    fn v1_hosts_get_exactly_one_ipv4_network() {
        let two = ["10.1.0.1/16", "10.2.0.1/16"].map(network).to_vec();
        let refused = refusal(|_| {}, |host| (host.version, host.networks) = (Version::V1, two));
        assert_eq!(refused, Error::V1NetworkCount { name: "host".into(), count: 2 });
        let v6 = network("fd00::1/64");
        let refused = refusal(|_| {}, |host| (host.version, host.networks) = (Version::V1, vec![v6]));
        assert_eq!(refused, Error::Ipv6InV1 { network: v6 });
    }

    /// What happens to a signature in transit.
    type Passage = fn(Vec<u8>) -> Result<Vec<u8>, Error>;

    /// A remote signer.
    struct Elsewhere(SigningKey, Passage);

    impl Signer for Elsewhere {
        fn curve(&self) -> Curve {
            self.0.curve()
        }
        fn public_key(&self) -> Vec<u8> {
            self.0.public_key()
        }
        fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
            Signer::sign(&self.0, message).and_then(self.1)
        }
    }

    #[test]
    fn a_signer_elsewhere_issues_the_same_low_s_certificates() {
        for curve in [Curve::Curve25519, Curve::P256] {
            let key = SigningKey::generate(curve).unwrap();
            let ca = template(Version::V2, curve).self_sign(&key).unwrap();
            let host = host(Version::V2, curve);
            let other_form = |made: Vec<u8>| Ok(signature::other_form(&made).unwrap_or(made));
            let elsewhere = Elsewhere(key.clone(), other_form);
            let [there, here] = [host.clone().sign(&ca, &elsewhere), host.sign(&ca, &key)].map(Result::unwrap);
            assert_eq!(there.raw_details, here.raw_details);
            let pool = CaPool::from_pem(ca.to_pem().as_bytes()).unwrap();
            for made in [there, here] {
                let is_low_s = signature::low_s(made.signature()).is_none_or(|low| low == made.signature());
                assert!(is_low_s && pool.verify(made, 2000).is_ok());
            }
        }
    }

    #[test]
    fn a_faulty_signer_issues_nothing() {
        for curve in [Curve::Curve25519, Curve::P256] {
            let key = SigningKey::generate(curve).unwrap();
            let faults: [Passage; 3] = [
                |_| Ok(Vec::new()),
                |mut made| {
                    made.iter_mut().last().into_iter().for_each(|byte| *byte ^= 1);
                    Ok(made)
                },
                |_| Err(Error::Signer { reason: "unplugged".into() }),
            ];
            let refusals =
                faults.map(|fault| template(Version::V2, curve).self_sign(&Elsewhere(key.clone(), fault)).unwrap_err());
            let unplugged = Error::Signer { reason: "unplugged".into() };
            assert_eq!(refusals, [Error::SignerFault, Error::SignerFault, unplugged]);
        }
    }

    #[test]
    fn a_key_or_certificate_that_is_not_the_cas_signs_nothing() {
        let (ca, key) = authority(|_| {});
        let other = SigningKey::generate(Curve::Curve25519).unwrap();
        let host = host(Version::V2, Curve::Curve25519);
        assert_eq!(host.clone().sign(&ca, &other), Err(Error::CaKeyMismatch { ca: "ca".into() }));
        let signed = host.clone().sign(&ca, &key).unwrap();
        assert_eq!(host.sign(&signed, &key), Err(Error::NotACa { name: "host".into() }));
    }
}
