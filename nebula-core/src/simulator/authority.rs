//! A certificate authority for simulated networks.

use ipnet::IpNet;
use nebula_cert::{CaPool, Certificate, Curve, Identity, PrivateKey, SigningKey, Template, UnixTime, Version};

/// Makes certificates that a simulated network trusts. Keys come from the system, so they differ from run to run.
#[derive(Debug)]
pub struct Authority {
    certificate: Certificate,
    key: SigningKey,
}

/// What a certificate shall say.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Certificate name.
    pub name: String,
    /// Overlay addresses with their networks.
    pub networks: Vec<IpNet>,
    /// Groups.
    pub groups: Vec<String>,
    /// One certificate of each.
    pub versions: Vec<Version>,
    /// Last second of validity.
    pub not_after: UnixTime,
}

impl Authority {
    /// A new authority, valid for all of the simulated time.
    #[must_use]
    pub fn new(curve: Curve) -> Self {
        let key = SigningKey::generate(curve).expect("the system has randomness");
        let template = Template {
            version: Version::V2,
            curve,
            name: "simulated CA".to_owned(),
            networks: Vec::new(),
            unsafe_networks: Vec::new(),
            groups: Vec::new(),
            not_before: NOT_BEFORE,
            not_after: NOT_AFTER,
            public_key: key.public_key(),
        };
        Self { certificate: template.self_sign(&key).expect("the template is valid"), key }
    }

    /// Trust in this authority.
    #[must_use]
    pub fn trust(&self) -> CaPool {
        let mut pool = CaPool::new();
        pool.add(self.certificate.clone()).expect("it signed itself");
        pool
    }

    /// A new key with its certificates. Version 1 carries the first network if it is IPv4.
    #[must_use]
    pub fn identity(&self, subject: &Subject) -> Identity {
        let key = PrivateKey::generate(self.key.curve()).expect("the system has randomness");
        let sign = |&version: &Version| {
            let networks = match version {
                Version::V1 => subject.networks.iter().take(1).copied().collect(),
                Version::V2 => subject.networks.clone(),
            };
            let template = Template {
                version,
                curve: self.key.curve(),
                name: subject.name.clone(),
                networks,
                unsafe_networks: Vec::new(),
                groups: subject.groups.clone(),
                not_before: NOT_BEFORE,
                not_after: subject.not_after,
                public_key: key.public_key(),
            };
            template.sign(&self.certificate, &self.key).expect("the subject is valid")
        };
        Identity::new(subject.versions.iter().map(sign).collect(), key).expect("certificates and key belong together")
    }
}

pub(super) const NOT_BEFORE: UnixTime = 1_700_000_000;
pub(super) const NOT_AFTER: UnixTime = 2_000_000_000;
