//! CA rollover while everything runs: the next CA is trusted first and signs later, and the old one is removed last.

use nebula_cert::{CaPool, Certificate, PassphraseCost, SigningKey, Template, UnixTime};

use zeroize::Zeroizing;

use crate::{
    authority::{self, Authority, AuthorityError},
    control::ListedCertificate,
    directory::{CA_CERTIFICATE, CA_KEY, Directory, FileError, NEXT_KEY, PREVIOUS_KEY},
    time,
};

/// Progress of a rollover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rollover {
    /// The CA that signs.
    pub signing: Certificate,
    /// The CA that signs next; hosts trust it already.
    pub next: Option<Certificate>,
    /// CAs that no longer sign but are still trusted.
    pub retired: Vec<Certificate>,
}

/// Why a step was refused; nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum RolloverError {
    /// The CA cannot be used.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The next CA cannot be created.
    #[error("cannot make the next CA: {0}")]
    Certificate(#[from] nebula_cert::Error),
    /// This step is not due yet, or no longer.
    #[error("{0}")]
    Order(String),
}

impl Rollover {
    /// Reads the present state.
    ///
    /// # Errors
    /// Returns an error if the CA cannot be read.
    pub fn read(directory: &Directory, passphrase: Option<&str>) -> Result<Self, RolloverError> {
        let signing = Authority::read(directory, passphrase)?.certificate().clone();
        let (_, bundle) = authority::read_bundle(directory)?;
        let next_key = directory.has(NEXT_KEY).then(|| next_key(directory, passphrase)).transpose()?;
        let is_next = |ca: &Certificate| next_key.as_ref().is_some_and(|key| key.public_key() == ca.public_key());
        let others = bundle.into_iter().filter(|ca| ca.fingerprint() != signing.fingerprint());
        let (mut next, retired): (Vec<_>, Vec<_>) = others.partition(is_next);
        Ok(Self { signing, next: next.pop(), retired })
    }

    /// Creates the next CA, like the present one, and adds it to the trusted ones.
    ///
    /// # Errors
    /// Returns an error if there is a next one already, or it cannot be created.
    pub fn prepare(directory: &Directory, passphrase: Option<&str>, now: UnixTime) -> Result<Self, RolloverError> {
        let present = Self::read(directory, passphrase)?;
        if let Some(next) = &present.next {
            let since = nebula_cert::rfc3339(next.not_before());
            return Err(RolloverError::Order(format!("the next CA was prepared at {since}; switch to it")));
        }
        let pem = directory.read(CA_KEY)?;
        if pem.starts_with("pkcs11:") {
            return Err(RolloverError::Order(
                "the key is in a token: make the next CA with `nebula-cert ca -pkcs11`, append its certificate to ca.crt, \
                 reload, and later put its URI into ca.key"
                    .to_owned(),
            ));
        }
        let ca = &present.signing;
        let key = SigningKey::generate(ca.curve())?;
        let template = Template {
            version: ca.version(),
            curve: ca.curve(),
            name: ca.name().to_owned(),
            networks: ca.networks().to_vec(),
            unsafe_networks: ca.unsafe_networks().to_vec(),
            groups: ca.groups().to_vec(),
            not_before: now,
            not_after: now.saturating_add(ca.not_after() - ca.not_before()),
            public_key: key.public_key(),
        };
        let next = template.self_sign(&key)?;
        let key = if pem.contains(" ENCRYPTED ") {
            let passphrase = passphrase.ok_or(AuthorityError::NoPassphrase)?;
            Zeroizing::new(key.to_encrypted_pem(passphrase.as_bytes(), PassphraseCost::default())?)
        } else {
            key.to_pem()
        };
        let (bundle, _) = authority::read_bundle(directory)?;
        // Write the key first: a trusted CA without a key is worse than a key that nobody trusts.
        directory.replace(NEXT_KEY, &key, 0o600)?;
        directory.replace(CA_CERTIFICATE, &format!("{}\n{}", bundle.trim_end(), next.to_pem()), 0o644)?;
        Self::read(directory, passphrase)
    }

    /// Lets the next CA sign. Refused while hosts may not know it yet, unless `at_once`.
    ///
    /// # Errors
    /// Returns an error if there is no next CA, or it is too new.
    pub fn switch(
        directory: &Directory,
        passphrase: Option<&str>,
        at_once: bool,
        now: UnixTime,
    ) -> Result<Self, RolloverError> {
        let present = Self::read(directory, passphrase)?;
        let next = present.next.ok_or_else(|| RolloverError::Order("no next CA is prepared".to_owned()))?;
        let age = now - next.not_before();
        if age < SPREAD && !at_once {
            let (age, wait) = (time::time_left(age.max(1)), time::time_left(SPREAD));
            return Err(RolloverError::Order(format!(
                "the next CA is trusted for {age} only; hosts that were away have not heard of it. Wait until it is {wait}, \
                 or say --at-once"
            )));
        }
        // The old key is kept until the end, under another name; replacing the key in use is one atomic step.
        directory.replace(PREVIOUS_KEY, &directory.read(CA_KEY)?, 0o600)?;
        directory.rename(NEXT_KEY, CA_KEY)?;
        Self::read(directory, passphrase)
    }

    /// Removes retired CAs from the trusted ones, and deletes their key. Refused while `issued` has a valid certificate
    /// of one.
    ///
    /// # Errors
    /// Returns an error if such certificates are still in use, or a file cannot be written.
    pub fn finish(
        directory: &Directory,
        passphrase: Option<&str>,
        issued: &[ListedCertificate],
        now: UnixTime,
    ) -> Result<Self, RolloverError> {
        let present = Self::read(directory, passphrase)?;
        // A finish that was interrupted left the key.
        if present.retired.is_empty() && !directory.has(PREVIOUS_KEY) {
            return Err(RolloverError::Order(match &present.next {
                Some(next) => format!("{} does not sign yet: `nebula-ca rollover switch` comes first", next.name()),
                None => "no CA is retired, so there is no rollover to finish".to_owned(),
            }));
        }
        let is_retired = |record: &ListedCertificate| {
            let certificate = Certificate::from_pem(record.issued.pem.as_bytes());
            certificate.is_ok_and(|found| {
                let issuer = found.issuer();
                present.retired.iter().any(|ca| issuer.is_some_and(|issuer| issuer == ca.fingerprint()))
            })
        };
        let in_use = issued
            .iter()
            .filter(|listed| listed.issued.revoked.is_none() && listed.issued.not_after >= now && is_retired(listed));
        if let Some(last) = in_use.clone().max_by_key(|listed| listed.issued.not_after) {
            return Err(RolloverError::Order(format!(
                "{} valid certificates are of a retired CA, the last until {} ({}); wait, or revoke them",
                in_use.count(),
                nebula_cert::rfc3339(last.issued.not_after),
                last.issued.name,
            )));
        }
        let kept = [Some(&present.signing), present.next.as_ref()];
        let bundle: String = kept.into_iter().flatten().map(Certificate::to_pem).collect();
        CaPool::from_pem(bundle.as_bytes())?;
        directory.replace(CA_CERTIFICATE, &bundle, 0o644)?;
        directory.remove(PREVIOUS_KEY)?;
        Self::read(directory, passphrase)
    }
}

fn next_key(directory: &Directory, passphrase: Option<&str>) -> Result<SigningKey, RolloverError> {
    let pem = directory.read(NEXT_KEY)?;
    if pem.contains(" ENCRYPTED ") {
        let passphrase = passphrase.ok_or(AuthorityError::NoPassphrase)?;
        let key = SigningKey::from_encrypted_pem(pem.as_bytes(), passphrase.as_bytes());
        return Ok(key.map_err(AuthorityError::WrongPassphrase)?);
    }
    Ok(SigningKey::from_pem(pem.as_bytes())?)
}

/// Hosts learn of the next CA within seconds if they are online, or at their next renewal if they were not.
const SPREAD: i64 = 24 * 3_600;
