//! Whom to trust: CA bundle and blocklist, with a version that changes when they do (trust bundle, revocation list).

use nebula_cert::{Fingerprint, issuance};
use sha2::{Digest, Sha256};

/// The present answer to "whom to trust".
pub(crate) struct Trust {
    pub(crate) body: issuance::Trust,
    /// Entity tag, quoted as HTTP wants it.
    pub(crate) etag: String,
}

impl Trust {
    /// `blocklist` in a fixed order, so that equal trust has an equal tag on every replica.
    pub(crate) fn new(bundle: &str, blocklist: &[Fingerprint], renewal_key: String) -> Self {
        let mut hash = Sha256::new();
        hash.update(bundle.as_bytes());
        hash.update(renewal_key.as_bytes());
        for fingerprint in blocklist {
            hash.update(fingerprint.0);
        }
        let tag = nebula_cert::hex::encode(&hash.finalize()[..16]);
        let blocklist = blocklist.iter().map(ToString::to_string).collect();
        let body = issuance::Trust { ca: bundle.to_owned(), blocklist, renewal_key: Some(renewal_key) };
        Self { body, etag: format!("\"{tag}\"") }
    }

    /// Whether a caller that sent `If-None-Match` has this version already.
    pub(crate) fn is_known(&self, if_none_match: &str) -> bool {
        let tags = if_none_match.split(',').map(|tag| tag.trim().trim_start_matches("W/"));
        tags.into_iter().any(|tag| tag == self.etag || tag == "*")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_changes_with_bundle_blocklist_and_renewal_key_only() {
        let (empty, again) = (Trust::new("ca", &[], String::new()), Trust::new("ca", &[], String::new()));
        let blocked = Trust::new("ca", &[Fingerprint([1; 32])], String::new());
        assert_eq!(empty.etag, again.etag);
        assert_ne!(empty.etag, blocked.etag);
        assert_ne!(empty.etag, Trust::new("cb", &[], String::new()).etag);
        assert_ne!(empty.etag, Trust::new("ca", &[], "key".into()).etag);
        assert_eq!(blocked.body.blocklist, ["01".repeat(32)]);
    }

    #[test]
    fn a_known_tag_is_recognised_in_a_list_and_as_weak() {
        let trust = Trust::new("ca", &[], String::new());
        assert!(trust.is_known(&trust.etag));
        assert!(trust.is_known(&format!("\"x\", W/{}", trust.etag)));
        assert!(!trust.is_known("\"x\""));
        assert!(!trust.is_known(""));
    }
}
