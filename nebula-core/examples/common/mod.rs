//! A CA and the identities it signs, made in memory.

use nebula_cert::{CaPool, Certificate, Curve, Error, Identity, PrivateKey, SigningKey, Template};

/// Seconds since the Unix epoch in which everything here is valid.
const VALIDITY: std::ops::RangeInclusive<nebula_cert::UnixTime> = 1_700_000_000..=2_000_000_000;

/// A certificate authority.
#[derive(Debug)]
pub(crate) struct Authority {
    pub(crate) certificate: Certificate,
    key: SigningKey,
}

impl Authority {
    /// A CA with a new key, whose certificate it signs itself.
    pub(crate) fn new(name: &str) -> Result<Self, Error> {
        let key = SigningKey::generate(Curve::Curve25519)?;
        let template = Template { public_key: key.public_key(), ..Template::new(name, VALIDITY) };
        Ok(Self { certificate: template.self_sign(&key)?, key })
    }

    /// What a node needs to trust this CA.
    pub(crate) fn trust(&self) -> Result<CaPool, Error> {
        let mut trust = CaPool::new();
        trust.add(self.certificate.clone())?;
        Ok(trust)
    }

    /// A new key for the host with this overlay address (`10.42.0.1/16`), and a certificate for it.
    pub(crate) fn identity(&self, name: &str, address: &str) -> Result<Identity, Box<dyn std::error::Error>> {
        let key = PrivateKey::generate(Curve::Curve25519)?;
        let template = Template {
            networks: vec![address.parse()?],
            public_key: key.public_key(),
            ..Template::new(name, VALIDITY)
        };
        Ok(Identity::new(vec![template.sign(&self.certificate, &self.key)?], key)?)
    }
}
