//! The cryptography for calls to the CA service: aws-lc with the system's random generator.
//!
//! aws-lc's own generator first collects entropy from CPU jitter. That takes tens of milliseconds, more than the rest
//! of a pod's start, and leaves memory allocated.

use ::aws_lc_rs::agreement::{self, PrivateKey, UnparsedPublicKey, agree};
use ::aws_lc_rs::error::Unspecified;
use rustls::crypto::{
    ActiveKeyExchange, CryptoProvider, GetRandomFailed, SecureRandom, SharedSecret, SupportedKxGroup, aws_lc_rs,
};
use rustls::{Error, NamedGroup, PeerMisbehaved};
use zeroize::Zeroizing;

/// Like rustls' default provider, but prefers X25519, whose handshakes take their random bytes from the system. Other
/// groups remain available for services that support nothing else.
pub(super) fn provider() -> CryptoProvider {
    let mut provider = aws_lc_rs::default_provider();
    for group in &mut provider.kx_groups {
        if group.name() == NamedGroup::X25519 {
            *group = &X25519;
        }
    }
    provider.kx_groups.sort_by_key(|group| group.name() != NamedGroup::X25519);
    CryptoProvider { secure_random: &System, ..provider }
}

#[derive(Debug)]
struct System;

impl SecureRandom for System {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), GetRandomFailed> {
        getrandom::fill(bytes).map_err(|_| GetRandomFailed)
    }
}

#[derive(Debug)]
struct X25519;

impl SupportedKxGroup for X25519 {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        let mut secret = Zeroizing::new([0; 32]);
        System.fill(&mut *secret)?;
        let started = || {
            let secret = PrivateKey::from_private_key(&agreement::X25519, &*secret).map_err(|_| Unspecified)?;
            let public = secret.compute_public_key()?;
            Ok::<_, Unspecified>(Started { secret, public })
        };
        Ok(Box::new(started().map_err(|Unspecified| Error::General("no key for the handshake".to_owned()))?))
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::X25519
    }
}

struct Started {
    secret: PrivateKey,
    public: agreement::PublicKey,
}

impl ActiveKeyExchange for Started {
    fn complete(self: Box<Self>, peer: &[u8]) -> Result<SharedSecret, Error> {
        let peer = UnparsedPublicKey::new(&agreement::X25519, peer);
        let refused = Error::PeerMisbehaved(PeerMisbehaved::InvalidKeyShare);
        agree(&self.secret, peer, refused, |secret| Ok(SharedSecret::from(secret)))
    }

    fn pub_key(&self) -> &[u8] {
        self.public.as_ref()
    }

    fn group(&self) -> NamedGroup {
        NamedGroup::X25519
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn x25519() -> Box<dyn ActiveKeyExchange> {
        let group = provider().kx_groups[0];
        assert_eq!(group.name(), NamedGroup::X25519);
        group.start().unwrap()
    }

    #[test]
    fn both_sides_of_an_exchange_have_the_same_secret_also_with_the_librarys_own() {
        let theirs = aws_lc_rs::kx_group::X25519.start().unwrap();
        let ours = x25519();
        assert_ne!(ours.pub_key(), x25519().pub_key());
        let (our_key, their_key) = (ours.pub_key().to_vec(), theirs.pub_key().to_vec());
        let secret = ours.complete(&their_key).unwrap();
        assert_eq!(secret.secret_bytes(), theirs.complete(&our_key).unwrap().secret_bytes());
    }

    #[test]
    fn a_share_that_is_no_key_ends_the_handshake() {
        for share in [vec![0; 32], vec![9; 31], Vec::new()] {
            let refused = x25519().complete(&share).map(|_| ()).unwrap_err();
            assert_eq!(refused, Error::PeerMisbehaved(PeerMisbehaved::InvalidKeyShare), "{share:?}");
        }
    }
}
