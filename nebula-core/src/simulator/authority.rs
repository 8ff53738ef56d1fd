//! A certificate authority for simulated networks.

use std::sync::{Mutex, PoisonError};

use ipnet::IpNet;
use nebula_cert::{CaPool, Certificate, Curve, Identity, PrivateKey, SigningKey, Template, UnixTime, Version};
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

/// Issues certificates that a simulated network trusts. All keys derive from a seed: never use them for anything else.
#[derive(Debug)]
pub struct Authority {
    certificate: Certificate,
    key: SigningKey,
    secrets: Mutex<ChaCha20Rng>,
}

/// Contents of a certificate to issue.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Certificate name.
    pub name: String,
    /// Overlay addresses with their networks.
    pub networks: Vec<IpNet>,
    /// Networks behind the host.
    pub unsafe_networks: Vec<IpNet>,
    /// Groups.
    pub groups: Vec<String>,
    /// One certificate is issued for each of these versions.
    pub versions: Vec<Version>,
    /// Last second of validity.
    pub not_after: UnixTime,
}

impl Authority {
    /// A new authority, valid for all of the simulated time.
    #[must_use]
    pub fn new(curve: Curve) -> Self {
        Self::seeded(curve, 0)
    }

    /// A new authority whose keys derive from `seed`.
    #[must_use]
    pub fn seeded(curve: Curve, seed: u64) -> Self {
        let mut secrets = ChaCha20Rng::seed_from_u64(seed);
        // Not the stream from which the network draws with the same seed.
        secrets.set_stream(1);
        let key = first_valid(&mut secrets, |secret| SigningKey::from_seed(curve, secret).ok());
        let template =
            Template { curve, public_key: key.public_key(), ..Template::new("simulated CA", NOT_BEFORE..=NOT_AFTER) };
        let certificate = template.self_sign(&key).expect("the template is valid");
        Self { certificate, key, secrets: Mutex::new(secrets) }
    }

    /// A pool that trusts this authority.
    #[must_use]
    pub fn trust(&self) -> CaPool {
        let mut pool = CaPool::new();
        pool.add(self.certificate.clone()).expect("it signed itself");
        pool
    }

    /// A new key with its certificates. Version 1 carries the first network only, which must be IPv4.
    #[must_use]
    pub fn identity(&self, subject: &Subject) -> Identity {
        let mut secrets = self.secrets.lock().unwrap_or_else(PoisonError::into_inner);
        let key = first_valid(&mut secrets, |secret| PrivateKey::from_bytes(self.key.curve(), secret).ok());
        let sign = |&version: &Version| {
            let networks = match version {
                Version::V1 => subject.networks.iter().take(1).copied().collect(),
                Version::V2 => subject.networks.clone(),
            };
            let template = Template {
                version,
                curve: self.key.curve(),
                networks,
                unsafe_networks: subject.unsafe_networks.clone(),
                groups: subject.groups.clone(),
                public_key: key.public_key(),
                ..Template::new(subject.name.clone(), NOT_BEFORE..=subject.not_after)
            };
            template.sign(&self.certificate, &self.key).expect("the subject is valid")
        };
        Identity::new(subject.versions.iter().map(sign).collect(), key).expect("certificates and key belong together")
    }
}

/// Draws until the bytes are a valid key; one draw in 2^32 is not.
fn first_valid<T>(secrets: &mut ChaCha20Rng, key: impl Fn(&[u8; 32]) -> Option<T>) -> T {
    loop {
        let mut secret = [0; 32];
        secrets.fill_bytes(&mut secret);
        if let Some(key) = key(&secret) {
            return key;
        }
    }
}

pub(super) const NOT_BEFORE: UnixTime = 1_700_000_000;
pub(super) const NOT_AFTER: UnixTime = 2_000_000_000;
