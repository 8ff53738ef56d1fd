//! CA keys encrypted with a passphrase: Argon2id, then AES-256-GCM.

use argon2::{Algorithm, Argon2, Params, Version};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroizing;

use crate::Error;
use crate::key::fill_random;
use crate::protobuf::{Fields, Value, Writer};

/// The cost of trying one passphrase (Argon2id parameters). The default is that of `nebula-cert ca -encrypt`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassphraseCost {
    /// Memory in KiB, at least 8 for each lane and at most 4 GiB.
    pub memory_kib: u32,
    /// Passes over the memory.
    pub iterations: u32,
    /// Lanes, 1 to 255.
    pub parallelism: u32,
}

impl Default for PassphraseCost {
    fn default() -> Self {
        Self { memory_kib: 2 << 20, iterations: 1, parallelism: 4 }
    }
}

impl PassphraseCost {
    /// The highest cost that this library accepts: 4 GiB of memory and 64 GiB of writes to it, which take a minute or
    /// two.
    pub const HIGHEST: Self = Self { memory_kib: MAX_MEMORY_KIB, iterations: u32::MAX, parallelism: 255 };

    fn exceeds(self, limit: Self) -> bool {
        self.memory_kib > limit.memory_kib || self.iterations > limit.iterations || self.parallelism > limit.parallelism
    }

    fn check(self) -> Result<Params, Error> {
        if cfg!(feature = "fips") {
            return Err(Error::PassphraseNotInBuild);
        }
        let Self { memory_kib, iterations, parallelism } = self;
        let out_of_bounds = Error::PassphraseCost { memory_kib, iterations, parallelism };
        let work = u64::from(memory_kib) * u64::from(iterations);
        if memory_kib > MAX_MEMORY_KIB || work > MAX_WORK_KIB || !(1..=255).contains(&parallelism) {
            return Err(out_of_bounds);
        }
        if memory_kib < 8 * parallelism {
            return Err(out_of_bounds);
        }
        Params::new(memory_kib, iterations, parallelism, Some(KEY_LENGTH)).map_err(|_| out_of_bounds)
    }
}

/// Decrypts the contents of a PEM block whose cost must be within `limit`.
pub(crate) fn decrypt(contents: &[u8], passphrase: &[u8], limit: PassphraseCost) -> Result<Zeroizing<Vec<u8>>, Error> {
    let sealed = Sealed::read(contents)?;
    if sealed.algorithm != ALGORITHM.as_bytes() {
        let name = String::from_utf8_lossy(sealed.algorithm).chars().take(40).collect();
        return Err(Error::EncryptionAlgorithm(name));
    }
    if sealed.argon2_version != ARGON2_VERSION {
        return Err(Error::EncryptedKeyFormat("the argon2 version is not 19"));
    }
    if sealed.salt.len() < MIN_SALT_LENGTH {
        return Err(Error::EncryptedKeyFormat("the salt is shorter than 16 bytes"));
    }
    let (nonce, ciphertext) =
        sealed.blob.split_first_chunk::<NONCE_LEN>().ok_or(Error::EncryptedKeyFormat("the ciphertext is too short"))?;
    if sealed.cost.exceeds(limit) {
        let PassphraseCost { memory_kib, iterations, parallelism } = sealed.cost;
        return Err(Error::PassphraseCost { memory_kib, iterations, parallelism });
    }
    let key = derive(passphrase, sealed.salt, sealed.cost)?;
    let mut buffer = Zeroizing::new(ciphertext.to_vec());
    let nonce = Nonce::assume_unique_for_key(*nonce);
    let length = key.open_in_place(nonce, Aad::empty(), &mut buffer).map_err(|_| Error::Passphrase)?.len();
    buffer.truncate(length);
    Ok(buffer)
}

/// Encrypts a key into the contents of a PEM block.
pub(crate) fn encrypt(secret: &[u8], passphrase: &[u8], cost: PassphraseCost) -> Result<Vec<u8>, Error> {
    let mut salt = [0; SALT_LENGTH];
    let mut nonce = [0; NONCE_LEN];
    fill_random(&mut salt)?;
    fill_random(&mut nonce)?;
    let key = derive(passphrase, &salt, cost)?;
    let mut ciphertext = Zeroizing::new(secret.to_vec());
    let tag = key
        .seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut ciphertext)
        .map_err(|_| Error::EncryptedKeyFormat("the key is too long to encrypt"))?;

    let mut out = Writer::default();
    out.message(1, |metadata| {
        metadata.bytes(1, ALGORITHM.as_bytes());
        metadata.message(2, |argon2| {
            argon2.number(1, ARGON2_VERSION);
            argon2.number(2, cost.memory_kib.into());
            argon2.number(3, cost.iterations.into());
            argon2.number(4, cost.parallelism.into());
            argon2.bytes(5, &salt);
        });
    });
    out.bytes(2, &[&nonce[..], &ciphertext, tag.as_ref()].concat());
    Ok(out.finish())
}

struct Sealed<'a> {
    algorithm: &'a [u8],
    argon2_version: u64,
    cost: PassphraseCost,
    salt: &'a [u8],
    blob: &'a [u8],
}

impl<'a> Sealed<'a> {
    fn read(contents: &'a [u8]) -> Result<Self, Error> {
        let cost = PassphraseCost { memory_kib: 0, iterations: 0, parallelism: 0 };
        let mut sealed = Self { algorithm: &[], argon2_version: 0, cost, salt: &[], blob: &[] };
        let (mut metadata, mut argon2): (&[u8], &[u8]) = (&[], &[]);
        each(contents, |number, value| match (number, value) {
            (1, Value::Bytes(bytes)) => metadata = bytes,
            (2, Value::Bytes(bytes)) => sealed.blob = bytes,
            _ => {}
        })?;
        each(metadata, |number, value| match (number, value) {
            (1, Value::Bytes(bytes)) => sealed.algorithm = bytes,
            (2, Value::Bytes(bytes)) => argon2 = bytes,
            _ => {}
        })?;
        each(argon2, |number, value| match (number, value) {
            (1, Value::Varint(version)) => sealed.argon2_version = version,
            (2, Value::Varint(memory)) => sealed.cost.memory_kib = memory as u32,
            (3, Value::Varint(iterations)) => sealed.cost.iterations = iterations as u32,
            (4, Value::Varint(parallelism)) => sealed.cost.parallelism = parallelism as u32,
            (5, Value::Bytes(salt)) => sealed.salt = salt,
            _ => {}
        })?;
        Ok(sealed)
    }
}

fn each<'a>(message: &'a [u8], mut read: impl FnMut(u32, Value<'a>)) -> Result<(), Error> {
    for field in Fields::new(message) {
        let (number, value) = field.map_err(|_| Error::EncryptedKeyFormat("not protobuf"))?;
        read(number, value);
    }
    Ok(())
}

fn derive(passphrase: &[u8], salt: &[u8], cost: PassphraseCost) -> Result<LessSafeKey, Error> {
    let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, cost.check()?);
    let mut key = Zeroizing::new([0; KEY_LENGTH]);
    argon2.hash_password_into(passphrase, salt, &mut *key).map_err(|error| match error {
        argon2::Error::OutOfMemory => Error::OutOfMemory { memory_kib: cost.memory_kib },
        _ => Error::Passphrase,
    })?;
    UnboundKey::new(&AES_256_GCM, &*key).map(LessSafeKey::new).map_err(|_| Error::Passphrase)
}

const ALGORITHM: &str = "AES-256-GCM";
const ARGON2_VERSION: u64 = 0x13;
const KEY_LENGTH: usize = 32;
const MIN_SALT_LENGTH: usize = 16;
const SALT_LENGTH: usize = 32;
const MAX_MEMORY_KIB: u32 = 4 << 20;
// Memory times iterations, 64 GiB: takes a minute or two, some thirty times the default.
const MAX_WORK_KIB: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const HIGHEST: PassphraseCost = PassphraseCost::HIGHEST;

    #[test]
    fn costs_that_would_exhaust_the_machine_are_refused_before_any_work() {
        for (memory_kib, iterations, parallelism) in [
            (0, 1, 1),
            (64, 0, 1),
            (64, 1, 0),
            (64, 1, 256),
            (u32::MAX, 1, 4),
            (MAX_MEMORY_KIB + 1, 1, 4),
            (64, u32::MAX, 1),
            (31, 1, 4),
        ] {
            let cost = PassphraseCost { memory_kib, iterations, parallelism };
            let expected = Error::PassphraseCost { memory_kib, iterations, parallelism };
            assert_eq!(encrypt(b"k", b"p", cost), Err(expected));
        }
    }

    #[test]
    fn a_key_dearer_than_the_callers_limit_is_refused_before_any_work() {
        let cost = PassphraseCost { memory_kib: 64, iterations: 2, parallelism: 2 };
        let contents = encrypt(&[7; 32], b"p", cost).unwrap();
        assert!(decrypt(&contents, b"p", cost).is_ok());
        for limit in [
            PassphraseCost { memory_kib: 63, ..cost },
            PassphraseCost { iterations: 1, ..cost },
            PassphraseCost { parallelism: 1, ..cost },
        ] {
            let refused = Error::PassphraseCost { memory_kib: 64, iterations: 2, parallelism: 2 };
            assert_eq!(decrypt(&contents, b"p", limit).unwrap_err(), refused);
        }
    }

    #[test]
    fn every_truncation_of_an_encrypted_key_is_refused() {
        let cost = PassphraseCost { memory_kib: 16, iterations: 1, parallelism: 1 };
        let whole = encrypt(&[7; 32], b"p", cost).unwrap();
        assert_eq!(*decrypt(&whole, b"p", HIGHEST).unwrap(), [7; 32]);
        for length in 0..whole.len() {
            assert!(decrypt(&whole[..length], b"p", HIGHEST).is_err(), "{length}");
        }
    }

    #[test]
    fn every_altered_byte_of_an_encrypted_key_is_noticed() {
        let cost = PassphraseCost { memory_kib: 16, iterations: 1, parallelism: 1 };
        let mut bytes = encrypt(&[7; 32], b"p", cost).unwrap();
        for at in 0..bytes.len() {
            bytes[at] ^= 1;
            assert!(decrypt(&bytes, b"p", HIGHEST).is_err(), "{at}");
            bytes[at] ^= 1;
        }
    }
}
