//! `pki.*`: certificates, key and trust, from files or inline PEM.

use std::path::Path;

use nebula_cert::{CaPool, Certificate, Fingerprint, Identity, UnixTime, Version, rfc3339};
use nebula_core::PostQuantum;
use zeroize::Zeroizing;

use super::section::Section;
use super::{Invalid, Refused, Value, merge};

/// The node's own credentials, and whom it trusts.
#[derive(Debug, Clone)]
pub struct Pki {
    /// Certificates and key.
    pub identity: Identity,
    /// CAs and blocklist.
    pub trust: CaPool,
}

impl Pki {
    /// `None` if anything was refused.
    pub(super) fn read(section: &Section<'_>, now: UnixTime) -> Option<Self> {
        let identity = section.keep("pki.cert", identity(section, now));
        let trust = section.keep("pki.ca", trust(section, now));
        let (identity, trust) = (identity?, trust?);
        if let Err(error) = trust.verify(identity.primary().clone(), now) {
            section.warn(
                "pki.cert",
                format!(
                    "pki.cert is not valid under pki.ca ({error}); peers that trust the same CAs will refuse this host"
                ),
            );
        }
        Some(Self { identity, trust })
    }
}

/// Reads `pki.initiating_version` and checks it against the certificates.
pub(super) fn initiating_version(
    section: &Section<'_>,
    identity: Option<&Identity>,
) -> Result<Option<Version>, Refused> {
    let version = match section.int("pki.initiating_version", 0..=i64::from(u32::MAX)) {
        None => return Ok(None),
        Some(1) => Version::V1,
        Some(2) => Version::V2,
        Some(other) => return Err(no_identity(format!("unknown pki.initiating_version: {other}"))),
    };
    match identity {
        Some(identity) if identity.certificate(version).is_none() && version == Version::V2 => {
            // Go Nebula starts with this and uses the version that it has.
            let text = "pki.initiating_version is 2, but pki.cert has no certificate of version 2: version 1 is used";
            section.warn("pki.initiating_version", text);
            Ok(None)
        }
        Some(identity) if identity.certificate(version).is_none() => Err(no_identity(format!(
            "can not use pki.initiating_version {} without a v{0} certificate in pki.cert",
            version.number()
        ))),
        _ => Ok(Some(version)),
    }
}

/// Reads `pki.post_quantum`. A value that is none of the three must not turn protection off.
pub(super) fn post_quantum(section: &Section<'_>) -> Result<PostQuantum, Refused> {
    let Some(value) = section.get("pki.post_quantum") else { return Ok(PostQuantum::default()) };
    match value.text().as_deref() {
        Some("prefer") => Ok(PostQuantum::Prefer),
        Some("require") => Ok(PostQuantum::Require),
        Some("off") => Ok(PostQuantum::Off),
        // YAML reads the word as one.
        _ if value.boolean() == Some(false) => Ok(PostQuantum::Off),
        _ => {
            let cause = format!("pki.post_quantum={}: it must be prefer, require or off", value.printed());
            Err(Refused::new("unknown kind of key exchange", cause))
        }
    }
}

fn no_identity(cause: impl ToString) -> Refused {
    Refused::new("Could not load client cert", cause.to_string())
}

fn no_trust(cause: impl ToString) -> Refused {
    Refused::new("Failed to load ca from config", cause.to_string())
}

fn identity(section: &Section<'_>, now: UnixTime) -> Result<Identity, Refused> {
    // Go reads the key first: if both are missing, its error is about the key.
    let key = source(section, "pki.key").map_err(no_identity)?;
    if key.text.contains("ENCRYPTED PRIVATE KEY") {
        let cause = format!("error while unmarshaling {}: encrypted host keys are not supported", key.label);
        return Err(no_identity(cause));
    }
    let certificates = source(section, "pki.cert").map_err(no_identity)?;
    let identity = Identity::from_pem(certificates.text.as_bytes(), key.text.as_bytes())
        .map_err(|error| no_identity(format!("{error} ({}, {})", certificates.label, key.label)))?;
    // One that is renewed by itself may be so after its end: the daemon starts, and peers refuse it until then.
    let is_renewed = section.string("pki.enrolment").is_some_and(|path| !path.is_empty());
    let is_over =
        |certificate: &&Certificate| certificate.is_expired(now) && !(is_renewed && certificate.not_after() < now);
    if let Some(certificate) = identity.certificates().find(is_over) {
        return Err(no_identity(format!("nebula certificate for this host {}", why_invalid(certificate, now))));
    }
    Ok(identity)
}

/// Why a certificate that is not valid at `now` is not, as the end of a sentence.
fn why_invalid(certificate: &Certificate, now: UnixTime) -> String {
    let (what, at) = if certificate.not_before() > now {
        ("is not valid yet: it begins at", certificate.not_before())
    } else {
        ("is expired: it ended at", certificate.not_after())
    };
    format!("{what} {}, and the clock of this host says {}", rfc3339(at), rfc3339(now))
}

fn trust(section: &Section<'_>, now: UnixTime) -> Result<CaPool, Refused> {
    let source = source(section, "pki.ca").map_err(no_trust)?;
    if source.text.trim().is_empty() {
        // Go Nebula starts with an empty `pki.ca`.
        section.warn("pki.ca", "pki.ca holds no certificate: no peer can be trusted");
        return Ok(blocking(section, CaPool::new()));
    }
    let pool = CaPool::from_pem(source.text.as_bytes()).map_err(|error| {
        no_trust(format!("error while adding CA certificate to CA trust store: {error} ({})", source.label))
    })?;
    let mut usable = false;
    for ca in pool.certificates() {
        if ca.not_before() > now {
            section.warn("pki.ca", format!("the certificate {} in the CA pool {}", ca.name(), why_invalid(ca, now)));
        } else if ca.is_expired(now) {
            section.warn("pki.ca", format!("expired certificate present in CA pool: {}", ca.name()));
        } else {
            usable = true;
        }
    }
    if !usable {
        return Err(no_trust(format!("no valid CA certificates present ({})", source.label)));
    }
    Ok(blocking(section, pool))
}

fn blocking(section: &Section<'_>, mut pool: CaPool) -> CaPool {
    for fingerprint in blocklist(section) {
        pool.block(fingerprint);
    }
    pool
}

/// Reads a bare scalar as one item: ignoring a blocklist would let the blocked peer in.
fn blocklist(section: &Section<'_>) -> Vec<Fingerprint> {
    let items = match section.get("pki.blocklist") {
        None => return Vec::new(),
        Some(Value::List(items)) => items.as_slice(),
        Some(single) => {
            section.warn(
                "pki.blocklist",
                "pki.blocklist is not a list; Go Nebula blocks nothing then, here it is one item",
            );
            std::slice::from_ref(single)
        }
    };
    let parse = |(index, item): (usize, &Value)| {
        let fingerprint = item.text().and_then(|text| text.trim().to_ascii_lowercase().parse().ok());
        if fingerprint.is_none() {
            section.warn(
                format!("pki.blocklist.{index}"),
                format!("pki.blocklist entry #{index} is not a fingerprint (64 hexadecimal digits) and blocks nothing"),
            );
        }
        fingerprint
    };
    items.iter().enumerate().filter_map(parse).collect()
}

struct Source {
    /// `pki.key /etc/nebula/host.key` or `pki.key`.
    label: String,
    text: Zeroizing<String>,
}

fn source(section: &Section<'_>, path: &str) -> Result<Source, Invalid> {
    let given = section.string(path).filter(|text| !text.is_empty()).map(Zeroizing::new);
    let Some(given) = given else { return Err(format!("no {path} path or PEM data provided").into()) };
    if given.contains("-----BEGIN") {
        return Ok(Source { label: path.to_owned(), text: given });
    }
    if given.starts_with("pkcs11:") {
        return Err(format!("{path} is a pkcs11 URL, which is not supported; give a file or PEM text").into());
    }
    match merge::read_bounded(Path::new(given.as_str())) {
        Ok(text) => Ok(Source { label: format!("{path} {}", *given), text: Zeroizing::new(text) }),
        Err(error) => Err(format!("unable to read {path} file {}: open {0}: {error}", *given).into()),
    }
}
