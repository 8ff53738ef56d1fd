//! The certificate proof: whoever holds the key of a certificate from this CA can renew or release that certificate.

use nebula_cert::{
    CaPool, Certificate, Curve, PrivateKey, TAG_LENGTH, UnixTime, hex,
    issuance::{Asker, CLOCK_TOLERANCE, possession_message},
};

use crate::{
    directory::{Directory, FileError, RENEWAL_KEY},
    refusal::Refusal,
};

/// The key for which holders of certificates compute their possession tags, and with which the service signs what only
/// it has to believe.
pub(crate) struct RenewalKey(PrivateKey);

/// What a caller presents as proof.
pub(crate) struct Presented<'a> {
    /// The certificate in PEM.
    pub(crate) certificate: &'a str,
    pub(crate) time: UnixTime,
    /// The possession tag in hex.
    pub(crate) tag: &'a str,
    /// PEM of the public key to certify; `None` releases the certificate.
    pub(crate) public_key: Option<&'a str>,
}

impl RenewalKey {
    /// Reads the key, or generates one for the CA's curve. Replicas share it as a file. If the directory is not
    /// writable, it lasts as long as the process, and callers then fall back to their first proof.
    pub(crate) fn open(directory: &Directory, curve: Curve) -> Result<Self, FileError> {
        if directory.has(RENEWAL_KEY) {
            match PrivateKey::from_pem(directory.read(RENEWAL_KEY)?.as_bytes()) {
                Ok(key) if key.curve() == curve => return Ok(Self(key)),
                Ok(_) => tracing::warn!(
                    "{RENEWAL_KEY} is of another curve than the CA; certificates cannot be renewed with it"
                ),
                Err(error) => {
                    tracing::warn!(%error, "{RENEWAL_KEY} is not a Nebula private key; certificates cannot be renewed with it")
                }
            }
        }
        let key = PrivateKey::generate(curve)
            .map_err(|error| FileError::other("make", directory.file(RENEWAL_KEY), &error.to_string()))?;
        if !directory.has(RENEWAL_KEY)
            && let Err(error) = directory.write_new(RENEWAL_KEY, &key.to_pem(), 0o600)
        {
            tracing::warn!(%error, "renewals by certificate work until this process ends only");
        }
        Ok(Self(key))
    }

    pub(crate) fn public_pem(&self) -> String {
        self.0.public_pem()
    }

    /// A tag over `message` that only this key makes and checks: that of its own possession. `message` must not look
    /// like [`possession_message`].
    pub(crate) fn sign_for_itself(&self, message: &[u8]) -> Option<[u8; TAG_LENGTH]> {
        self.0.possession_tag(&self.0.public_key(), message).ok()
    }

    /// Whether `tag` is that of [`RenewalKey::sign_for_itself`].
    pub(crate) fn has_signed(&self, message: &[u8], tag: &[u8]) -> bool {
        self.0.verifies_possession(&self.0.public_key(), message, tag)
    }

    /// Whether `asker` holds the key of this certificate.
    pub(crate) fn is_asked_by(&self, asker: &Asker, certificate: &Certificate, now: UnixTime) -> bool {
        is_about(asker.time, now) && self.is_tag_of(certificate, &asker.message(), &asker.tag)
    }

    /// Whether the holder of this certificate made the tag, in hex, over `message`. A key of the other curve never did.
    fn is_tag_of(&self, certificate: &Certificate, message: &[u8], tag: &str) -> bool {
        let tag = hex::decode(tag).filter(|tag| tag.len() == TAG_LENGTH);
        tag.is_some_and(|tag| self.0.verifies_possession(certificate.public_key(), message, &tag))
    }

    /// Returns the certificate if it is valid under `trusted`, or was until at most `grace` seconds ago, and the caller
    /// holds its key.
    pub(crate) fn check(
        &self,
        presented: &Presented<'_>,
        trusted: &CaPool,
        grace: i64,
        now: UnixTime,
    ) -> Result<Certificate, Refusal> {
        let certificate =
            Certificate::from_pem(presented.certificate.as_bytes()).map_err(Refusal::MalformedCertificate)?;
        if !is_about(presented.time, now) {
            return Err(Refusal::ClockDiffers {
                theirs: nebula_cert::rfc3339(presented.time),
                ours: nebula_cert::rfc3339(now),
            });
        }
        let message = possession_message(&certificate, presented.public_key, presented.time);
        if !self.is_tag_of(&certificate, &message, presented.tag) {
            return Err(Refusal::NotTheHolder);
        }
        let is_in_grace = certificate.not_after() < now && now.saturating_sub(certificate.not_after()) <= grace;
        let at = if is_in_grace { certificate.not_after() } else { now };
        trusted.verify(certificate.clone(), at).map_err(Refusal::CertificateNotValid)?;
        Ok(certificate)
    }
}

/// Whether a caller's clock agrees with this one.
fn is_about(theirs: UnixTime, now: UnixTime) -> bool {
    theirs.abs_diff(now) <= CLOCK_TOLERANCE.unsigned_abs()
}
