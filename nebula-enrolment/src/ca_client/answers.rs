//! Parses and checks answers of the CA service before anything relies on them.

use nebula_cert::issuance::{Refusal, Reply, Trust};
use nebula_cert::{CaPool, Certificate, Identity, PrivateKey, UnixTime, rfc3339, visible};

use super::{Error, Issued};

/// Why an answer of the CA is unusable.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    #[error("certificate: {0}")]
    Certificate(#[source] nebula_cert::Error),
    #[error("its certificate does not verify: {source} (valid {} to {}, the clock here says {}){}", rfc3339(*not_before),
        rfc3339(*not_after), rfc3339(*now), skew(*not_before, *not_after, *now))]
    Unverified { source: nebula_cert::Error, not_before: UnixTime, not_after: UnixTime, now: UnixTime },
    #[error("CA bundle: {0}")]
    Bundle(#[source] nebula_cert::Error),
    #[error("blocklist: {0:?} is no fingerprint")]
    Blocklist(String),
}

/// Parses the body of an answer with this HTTP status.
pub(crate) fn read<T: serde::de::DeserializeOwned>(status: u16, body: &[u8]) -> Result<T, Error> {
    if (200..300).contains(&status) {
        return serde_json::from_slice(body)
            .map_err(|error| Error::Unavailable(format!("answered something else than was asked for: {error}")));
    }
    let refusal: Option<Refusal> = serde_json::from_slice(body).ok();
    let may_pass = status >= 500 || matches!(status, 408 | 425 | 429);
    match refusal {
        Some(refusal) if may_pass => Err(Error::Unavailable(format!(
            "answered {status}: {} ({})",
            clean(&refusal.message),
            clean(&refusal.code)
        ))),
        Some(refusal) => Err(Error::Denied { code: clean(&refusal.code), message: clean(&refusal.message) }),
        None => Err(Error::Unavailable(format!("answered HTTP {status}; is it the address of a nebula-ca service?"))),
    }
}

/// Checks a new certificate against the CAs that came with it: one that does not verify would be refused by every peer
/// later.
pub fn accept(reply: &Reply, key: PrivateKey, now: UnixTime) -> Result<Issued, Unusable> {
    let certificates = Certificate::bundle_from_pem(reply.certificate.as_bytes()).map_err(Unusable::Certificate)?;
    let identity = Identity::new(certificates.clone(), key).map_err(Unusable::Certificate)?;
    let trust = pool(&reply.ca, &reply.blocklist)?;
    for certificate in certificates {
        let (not_before, not_after) = (certificate.not_before(), certificate.not_after());
        let refused = |source| Unusable::Unverified { source, not_before, not_after, now };
        trust.verify(certificate, now).map_err(refused)?;
    }
    Ok(Issued { identity, trust, renewal_key: reply.renewal_key.clone(), reply: reply.clone() })
}

/// Estimates how far the clocks differ at least, given that the certificate was made a moment ago.
fn skew(not_before: UnixTime, not_after: UnixTime, now: UnixTime) -> String {
    let (seconds, direction) = match now {
        now if now < not_before => (not_before - now, "behind"),
        now if now > not_after => (now - not_after, "ahead of"),
        _ => return String::new(),
    };
    format!("; the clock of this host is at least {} minutes {direction} that of the CA service", (seconds + 59) / 60)
}

/// Parses a trust bundle and blocklist.
pub(crate) fn trust(answer: &Trust) -> Result<CaPool, Unusable> {
    pool(&answer.ca, &answer.blocklist)
}

fn pool(bundle: &str, blocklist: &[String]) -> Result<CaPool, Unusable> {
    let mut pool = CaPool::from_pem(bundle.as_bytes()).map_err(Unusable::Bundle)?;
    for fingerprint in blocklist {
        pool.block(fingerprint.parse().map_err(|_| Unusable::Blocklist(clean(fingerprint)))?);
    }
    Ok(pool)
}

/// Text from outside goes into logs and status lines, so it is reduced to one visible line of bounded length.
fn clean(text: &str) -> String {
    visible(text).chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(status: u16, body: &str) -> Error {
        read::<Reply>(status, body.as_bytes()).unwrap_err()
    }

    #[test]
    fn a_refusal_of_the_ca_is_final_and_keeps_its_words() {
        let error = refusal(403, r#"{"code":"outside_pod_networks","message":"10.1.2.3 is in\nno network"}"#);
        assert!(error.is_denied());
        assert_eq!(error.to_string(), "10.1.2.3 is in\\nno network (outside_pod_networks)");
    }

    #[test]
    fn a_clock_that_differs_is_named() {
        assert_eq!(skew(3_600, 90_000, 3_600), "");
        assert!(skew(3_600, 90_000, 60).contains("at least 59 minutes behind that of the CA"));
        assert!(skew(3_600, 90_000, 93_600).contains("at least 60 minutes ahead of that of the CA"));
    }

    #[test]
    fn what_may_pass_is_not_a_refusal() {
        for status in [408, 429, 500, 503] {
            assert!(!refusal(status, r#"{"code":"x","message":"y"}"#).is_denied(), "{status}");
        }
        assert!(!refusal(404, "<html>not found</html>").is_denied());
        assert!(!refusal(200, "{}").is_denied());
    }

    #[test]
    fn a_trust_with_a_bad_bundle_or_blocklist_is_not_taken_over() {
        let of = |ca: &str, blocked: &str| {
            let text = serde_json::json!({"ca": ca, "blocklist": [blocked]}).to_string();
            trust(&read::<Trust>(200, text.as_bytes()).unwrap()).unwrap_err().to_string()
        };
        assert!(of("", "00").contains("CA bundle"));
        assert!(of("-----BEGIN NEBULA CERTIFICATE-----", "00").contains("CA bundle"));
    }
}
