//! The trust bundle: CAs and blocklist, with a version (ETag) that changes when they do.

use nebula_cert::{
    Fingerprint,
    issuance::{self, Lighthouses},
};
use sha2::{Digest, Sha256};

/// The current trust bundle.
pub(crate) struct Trust {
    pub(crate) body: issuance::Trust,
    /// Entity tag, quoted as HTTP requires.
    pub(crate) etag: String,
}

impl Trust {
    /// `blocklist` must have a fixed order, so that equal bundles have equal tags on every replica.
    pub(crate) fn new(bundle: &str, blocklist: &[Fingerprint], renewal_key: String, lighthouses: Lighthouses) -> Self {
        let mut hash = Sha256::new();
        hash.update(bundle.as_bytes());
        hash.update(renewal_key.as_bytes());
        for fingerprint in blocklist {
            hash.update(fingerprint.0);
        }
        for (address, endpoints) in &lighthouses {
            hash.update(format!("\n{address} {}", endpoints.join(" ")));
        }
        let tag = nebula_cert::hex::encode(&hash.finalize()[..16]);
        let blocklist = blocklist.iter().map(ToString::to_string).collect();
        let body = issuance::Trust { ca: bundle.to_owned(), blocklist, renewal_key: Some(renewal_key), lighthouses };
        Self { body, etag: format!("\"{tag}\"") }
    }

    /// Whether a caller that sent this `If-None-Match` already has this version.
    pub(crate) fn is_known(&self, if_none_match: &str) -> bool {
        let tags = if_none_match.split(',').map(|tag| tag.trim().trim_start_matches("W/"));
        tags.into_iter().any(|tag| tag == self.etag || tag == "*")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_changes_with_bundle_blocklist_renewal_key_and_lighthouses_only() {
        let new = |bundle, blocklist: &[Fingerprint], renewal_key: &str| {
            Trust::new(bundle, blocklist, renewal_key.to_owned(), Lighthouses::new())
        };
        let (empty, again) = (new("ca", &[], ""), new("ca", &[], ""));
        let blocked = new("ca", &[Fingerprint([1; 32])], "");
        assert_eq!(empty.etag, again.etag);
        assert_ne!(empty.etag, blocked.etag);
        assert_ne!(empty.etag, new("cb", &[], "").etag);
        assert_ne!(empty.etag, new("ca", &[], "key").etag);
        let lighthouses: Lighthouses = [([10, 42, 0, 1].into(), vec!["192.0.2.1:4242".to_owned()])].into();
        assert_ne!(empty.etag, Trust::new("ca", &[], String::new(), lighthouses).etag);
        assert_eq!(blocked.body.blocklist, ["01".repeat(32)]);
    }

    #[test]
    fn a_known_tag_is_recognised_in_a_list_and_as_weak() {
        let trust = Trust::new("ca", &[], String::new(), Lighthouses::new());
        assert!(trust.is_known(&trust.etag));
        assert!(trust.is_known(&format!("\"x\", W/{}", trust.etag)));
        assert!(!trust.is_known("\"x\""));
        assert!(!trust.is_known(""));
    }
}
