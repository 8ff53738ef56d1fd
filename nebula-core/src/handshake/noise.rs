//! The primitives of Noise IX for snow: checked key agreement, the data path's AEAD, and randomness from a seed; in a
//! FIPS build all of them from the library's FIPS module.

use aws_lc_rs::agreement::{self, ECDH_P256, PrivateKey, UnparsedPublicKey, X25519};
use aws_lc_rs::digest::{self, SHA256};
use aws_lc_rs::hmac;
use nebula_cert::{Curve, Identity};
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher as NoiseCipher, Dh, Hash, Random};
use snow::{Builder, Error, HandshakeState};
use zeroize::{Zeroize, Zeroizing};

use crate::tunnel::cipher::{AeadKey, Cipher};
use crate::wire::header::TAG_LEN;

/// Where the ephemeral key comes from.
#[derive(Clone)]
pub(super) enum Ephemeral {
    /// A fresh seed: the key is the generator's first output that is a valid P-256 scalar or X25519 secret. A FIPS
    /// build draws from the module's generator, whatever the seed.
    Seed(Zeroizing<[u8; 32]>),
    /// The key itself, to replay a recorded handshake.
    #[cfg(test)]
    Key([u8; 32]),
}

/// One side of a handshake, ready for its first message.
pub(super) fn handshake(
    identity: &Identity,
    cipher: Cipher,
    ephemeral: Ephemeral,
    initiator: bool,
) -> Result<HandshakeState, Error> {
    let name = match (identity.curve(), cipher) {
        (Curve::Curve25519, Cipher::Aes256Gcm) => "Noise_IX_25519_AESGCM_SHA256",
        (Curve::Curve25519, Cipher::ChaCha20Poly1305) => "Noise_IX_25519_ChaChaPoly_SHA256",
        (Curve::P256, Cipher::Aes256Gcm) => "Noise_IX_P256_AESGCM_SHA256",
        (Curve::P256, Cipher::ChaCha20Poly1305) => "Noise_IX_P256_ChaChaPoly_SHA256",
    };
    let builder = Builder::with_resolver(name.parse()?, Box::new(Resolver { ephemeral }))
        .local_private_key(identity.private_key().secret_bytes())?;
    if initiator { builder.build_initiator() } else { builder.build_responder() }
}

/// Length of a public key on the wire, in bytes.
pub(super) fn public_key_len(curve: Curve) -> usize {
    match curve {
        Curve::Curve25519 => 32,
        Curve::P256 => 65,
    }
}

struct Resolver {
    ephemeral: Ephemeral,
}

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(match &self.ephemeral {
            Ephemeral::Seed(seed) => Box::new(Seeded(ChaCha20Rng::from_seed(**seed))),
            #[cfg(test)]
            Ephemeral::Key(key) => Box::new(recorded::Exactly(*key)),
        })
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        let curve = match choice {
            DHChoice::Curve25519 => Curve::Curve25519,
            DHChoice::P256 => Curve::P256,
            DHChoice::Curve448 => return None,
        };
        Some(Box::new(KeyPair::new(curve)))
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        matches!(choice, HashChoice::SHA256).then(|| Box::new(Sha256(digest::Context::new(&SHA256))) as Box<dyn Hash>)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn NoiseCipher>> {
        let cipher = match choice {
            CipherChoice::AESGCM => Cipher::Aes256Gcm,
            CipherChoice::ChaChaPoly => Cipher::ChaCha20Poly1305,
        };
        Some(Box::new(HandshakeCipher { cipher, key: Zeroizing::new([0; 32]) }))
    }
}

struct Seeded(ChaCha20Rng);

impl Random for Seeded {
    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), Error> {
        if cfg!(feature = "fips") {
            return aws_lc_rs::rand::fill(out).map_err(|_| Error::Rng);
        }
        self.0.fill_bytes(out);
        Ok(())
    }
}

/// A key pair of either curve. Peers' keys are checked: a P-256 point must be uncompressed and on the curve, and an
/// all-zero X25519 shared secret (from a low-order key) is an error.
struct KeyPair {
    curve: Curve,
    secret: Zeroizing<[u8; 32]>,
    public: [u8; MAX_PUBLIC_KEY],
    /// `None` until a usable secret is set.
    key: Option<PrivateKey>,
}

const MAX_PUBLIC_KEY: usize = 65;

impl KeyPair {
    fn new(curve: Curve) -> Self {
        Self { curve, secret: Zeroizing::new([0; 32]), public: [0; MAX_PUBLIC_KEY], key: None }
    }

    fn algorithm(&self) -> &'static agreement::Algorithm {
        match self.curve {
            Curve::Curve25519 => &X25519,
            Curve::P256 => &ECDH_P256,
        }
    }

    /// Returns `false` if `secret` is not a valid key of this curve.
    fn try_set(&mut self, secret: &[u8]) -> bool {
        self.key = None;
        let Ok(key) = PrivateKey::from_private_key(self.algorithm(), secret) else { return false };
        let Ok(public) = key.compute_public_key() else { return false };
        let public_len = self.pub_len();
        if public.as_ref().len() != public_len {
            return false;
        }
        self.secret.copy_from_slice(secret);
        self.public[..public_len].copy_from_slice(public.as_ref());
        self.key = Some(key);
        true
    }
}

impl Dh for KeyPair {
    fn name(&self) -> &'static str {
        match self.curve {
            Curve::Curve25519 => "25519",
            Curve::P256 => "P256",
        }
    }

    fn pub_len(&self) -> usize {
        public_key_len(self.curve)
    }

    fn priv_len(&self) -> usize {
        self.secret.len()
    }

    fn dh_len(&self) -> usize {
        32
    }

    fn set(&mut self, secret: &[u8]) {
        // An unusable secret leaves the pair without a key, and the first agreement fails.
        self.try_set(secret);
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), Error> {
        // A P-256 scalar must be below the group order; all but one in 2^32 random values are.
        const TRIES: usize = 8;
        let mut secret = Zeroizing::new([0; 32]);
        for _ in 0..TRIES {
            rng.try_fill_bytes(&mut *secret)?;
            if self.try_set(&*secret) {
                return Ok(());
            }
        }
        Err(Error::Rng)
    }

    fn pubkey(&self) -> &[u8] {
        &self.public[..self.pub_len()]
    }

    fn privkey(&self) -> &[u8] {
        &*self.secret
    }

    fn dh(&self, peer: &[u8], out: &mut [u8]) -> Result<(), Error> {
        const UNCOMPRESSED: u8 = 4;
        // The buffer has room for the longest public key of any curve.
        let peer = peer.get(..self.pub_len()).ok_or(Error::Dh)?;
        if self.curve == Curve::P256 && peer.first() != Some(&UNCOMPRESSED) {
            return Err(Error::Dh);
        }
        let key = self.key.as_ref().ok_or(Error::Dh)?;
        let peer = UnparsedPublicKey::new(self.algorithm(), peer);
        agreement::agree(key, peer, Error::Dh, |shared| {
            out.get_mut(..shared.len()).ok_or(Error::Dh)?.copy_from_slice(shared);
            Ok(())
        })
    }
}

/// Creates the AEAD key for each use: a handshake seals or opens only twice, and a pending one should be small.
struct HandshakeCipher {
    cipher: Cipher,
    key: Zeroizing<[u8; 32]>,
}

impl NoiseCipher for HandshakeCipher {
    fn name(&self) -> &'static str {
        match self.cipher {
            Cipher::Aes256Gcm => "AESGCM",
            Cipher::ChaCha20Poly1305 => "ChaChaPoly",
        }
    }

    fn set(&mut self, key: &[u8; 32]) {
        *self.key = *key;
    }

    fn encrypt(&self, nonce: u64, aad: &[u8], plaintext: &[u8], out: &mut [u8]) -> usize {
        let (body, tag) = out.split_at_mut(plaintext.len());
        body.copy_from_slice(plaintext);
        tag[..TAG_LEN].copy_from_slice(&AeadKey::new(self.cipher, &self.key).seal(nonce, aad, body));
        plaintext.len() + TAG_LEN
    }

    fn decrypt(&self, nonce: u64, aad: &[u8], ciphertext: &[u8], out: &mut [u8]) -> Result<usize, Error> {
        let len = ciphertext.len().checked_sub(TAG_LEN).ok_or(Error::Decrypt)?;
        let mut buffer = Zeroizing::new(ciphertext.to_vec());
        if !AeadKey::new(self.cipher, &self.key).open(nonce, aad, &mut buffer) {
            return Err(Error::Decrypt);
        }
        out.get_mut(..len).ok_or(Error::Decrypt)?.copy_from_slice(&buffer[..len]);
        Ok(len)
    }
}

struct Sha256(digest::Context);

impl Sha256 {
    fn take(&mut self) -> digest::Context {
        std::mem::replace(&mut self.0, digest::Context::new(&SHA256))
    }
}

impl Hash for Sha256 {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        64
    }

    fn hash_len(&self) -> usize {
        32
    }

    fn reset(&mut self) {
        self.take();
    }

    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn result(&mut self, out: &mut [u8]) {
        out[..32].copy_from_slice(self.take().finish().as_ref());
    }

    fn hmac(&mut self, key: &[u8], data: &[u8], out: &mut [u8]) {
        out[..32].copy_from_slice(hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), data).as_ref());
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        match &mut self.ephemeral {
            Ephemeral::Seed(seed) => seed.zeroize(),
            #[cfg(test)]
            Ephemeral::Key(_) => {}
        }
    }
}

#[cfg(test)]
mod recorded {
    use super::*;

    /// Returns the same bytes every time.
    pub(super) struct Exactly(pub(super) [u8; 32]);

    impl Random for Exactly {
        fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), Error> {
            out.copy_from_slice(&self.0);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pair(curve: Curve, secret: [u8; 32]) -> KeyPair {
        let mut pair = KeyPair::new(curve);
        pair.set(&secret);
        pair
    }

    fn agree(own: &KeyPair, peer: &[u8]) -> Result<[u8; 32], Error> {
        let mut buffer = [0; 65];
        buffer[..peer.len()].copy_from_slice(peer);
        let mut out = [0; 65];
        own.dh(&buffer, &mut out).map(|()| *out.first_chunk().unwrap())
    }

    fn generator(byte: u8) -> Seeded {
        Seeded(ChaCha20Rng::from_seed([byte; 32]))
    }

    #[test]
    fn both_sides_agree_on_both_curves() {
        for curve in [Curve::Curve25519, Curve::P256] {
            let (mut a, mut b) = (KeyPair::new(curve), KeyPair::new(curve));
            a.generate(&mut generator(1)).unwrap();
            b.generate(&mut generator(2)).unwrap();
            assert_eq!(agree(&a, b.pubkey()).unwrap(), agree(&b, a.pubkey()).unwrap());
            assert_ne!(a.pubkey(), b.pubkey());
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_key() {
        let (mut a, mut b) = (KeyPair::new(Curve::P256), KeyPair::new(Curve::P256));
        a.generate(&mut generator(1)).unwrap();
        b.generate(&mut generator(1)).unwrap();
        assert_eq!(a.pubkey(), b.pubkey());
    }

    #[test]
    fn x25519_equals_the_function_of_the_rfc() {
        for byte in [1, 0x40, 0xff] {
            let ours = pair(Curve::Curve25519, [byte; 32]);
            let public = x25519_dalek::x25519([byte; 32], x25519_dalek::X25519_BASEPOINT_BYTES);
            assert_eq!(ours.pubkey(), public);
            let peer = x25519_dalek::x25519([9; 32], x25519_dalek::X25519_BASEPOINT_BYTES);
            assert_eq!(agree(&ours, &peer).unwrap(), x25519_dalek::x25519([byte; 32], peer));
        }
    }

    #[test]
    fn low_order_x25519_keys_are_refused() {
        let own = pair(Curve::Curve25519, [7; 32]);
        let mut one = [0; 32];
        one[0] = 1;
        // p - 1, p and p + 1 for p = 2^255 - 19, and a point of order 8.
        let near_p = |last: u8| {
            let mut point = [0xff; 32];
            (point[0], point[31]) = (last, 0x7f);
            point
        };
        let order_8 = [
            0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4, 0x6a, 0xda, 0x09,
            0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49, 0xb8, 0x00,
        ];
        for point in [[0; 32], one, near_p(0xec), near_p(0xed), near_p(0xee), order_8] {
            assert!(agree(&own, &point).is_err(), "{point:02x?}");
        }
    }

    #[test]
    fn p256_points_must_be_uncompressed_and_on_the_curve() {
        let own = pair(Curve::P256, [7; 32]);
        let good: [u8; 65] = pair(Curve::P256, [8; 32]).pubkey().try_into().unwrap();
        assert!(agree(&own, &good).is_ok());
        for first in [0, 2, 3, 5, 6, 7, 0xff] {
            let mut point = good;
            point[0] = first;
            assert!(agree(&own, &point).is_err(), "leading byte {first}");
        }
        let mut off_curve = good;
        off_curve[64] ^= 1;
        assert!(agree(&own, &off_curve).is_err());
        assert!(agree(&own, &[0; 65]).is_err());
    }

    #[test]
    fn p256_secrets_out_of_range_are_refused() {
        for secret in [[0; 32], [0xff; 32]] {
            assert!(!KeyPair::new(Curve::P256).try_set(&secret));
            assert!(agree(&pair(Curve::P256, secret), pair(Curve::P256, [8; 32]).pubkey()).is_err());
        }
        assert!(matches!(KeyPair::new(Curve::P256).generate(&mut recorded::Exactly([0xff; 32])), Err(Error::Rng)));
    }

    #[test]
    fn sha_256_starts_afresh_after_each_result() {
        let mut hash = Sha256(digest::Context::new(&SHA256));
        let (mut first, mut second) = ([0; 32], [0; 32]);
        hash.input(b"abc");
        hash.result(&mut first);
        hash.input(b"junk");
        hash.reset();
        hash.input(b"abc");
        hash.result(&mut second);
        assert_eq!(first, second);
        assert_eq!(first[..4], [0xba, 0x78, 0x16, 0xbf]);
    }

    proptest! {
        #[test]
        fn any_peer_key_agrees_or_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..70)) {
            for curve in [Curve::Curve25519, Curve::P256] {
                let _ = pair(curve, [7; 32]).dh(&bytes, &mut [0; 65]);
            }
        }
    }
}
