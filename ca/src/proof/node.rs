//! The node proof of the embedded mode: a shared token file, and a pod as the node describes it.

use nebula_cert::issuance::Pod;
use subtle::ConstantTimeEq;

use crate::{proof::token::TokenHash, refusal::Refusal};

/// What a node must present. Whoever has it may obtain any pod identity the policy allows.
pub(crate) struct NodeToken(TokenHash);

impl NodeToken {
    pub(crate) fn new(secret: &str) -> Result<Self, TooShort> {
        if secret.trim().len() < SHORTEST { Err(TooShort) } else { Ok(Self(TokenHash::of(secret))) }
    }

    /// Hashes first, so that neither content nor length shows in the time taken.
    pub(crate) fn matches(&self, presented: &str) -> bool {
        self.0.as_bytes().ct_eq(TokenHash::of(presented).as_bytes()).into()
    }
}

/// A node token that could be guessed.
#[derive(Debug, thiserror::Error)]
#[error("the node token has fewer than {SHORTEST} characters; `nebula-ca init` makes one of 256 bits")]
pub(crate) struct TooShort;

/// Checks that a pod's description has the form the Kubernetes API server enforces, so that names built from it are
/// unambiguous and bounded.
pub(crate) fn check_pod(pod: &Pod) -> Result<(), Refusal> {
    let invalid = |field, problem| Err(Refusal::InvalidPod { field, problem });
    if pod.namespace.len() > 63 || !is_label(&pod.namespace) {
        return invalid("namespace", "it must be 1 to 63 of a-z, 0-9 and '-', not starting or ending with '-'");
    }
    if pod.name.len() > 253 || !pod.name.split('.').all(is_label) {
        return invalid(
            "name",
            "it must be 1 to 253 of a-z, 0-9, '-' and '.', each part starting and ending with a letter or digit",
        );
    }
    let is_uid_byte = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if pod.uid.is_empty() || pod.uid.len() > 64 || !pod.uid.bytes().all(is_uid_byte) {
        return invalid("uid", "it must be 1 to 64 letters, digits and '-'");
    }
    let address = pod.address.to_canonical();
    if address.is_unspecified() || address.is_loopback() || address.is_multicast() {
        return invalid("address", "it must be the unicast address the primary network gave the pod");
    }
    Ok(())
}

/// A DNS label in the sense of RFC 1123, lower case only; its length is bounded by the caller.
fn is_label(text: &str) -> bool {
    let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().is_some_and(is_alphanumeric)
        && bytes.last().is_some_and(is_alphanumeric)
        && bytes.iter().all(|byte| is_alphanumeric(byte) || *byte == b'-')
}

const SHORTEST: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        Pod {
            namespace: "default".into(),
            name: "web-5d9f.v2".into(),
            uid: "6b1f1a38-8b1c-4a0e-9b52-0d4f5ad0c0de".into(),
            address: "10.244.0.5".parse().unwrap(),
        }
    }

    fn refused_field(pod: &Pod) -> Option<&'static str> {
        match check_pod(pod) {
            Err(Refusal::InvalidPod { field, .. }) => Some(field),
            _ => None,
        }
    }

    #[test]
    fn a_pod_as_kubernetes_makes_it_passes() {
        check_pod(&pod()).unwrap();
        check_pod(&Pod { uid: "d41d8cd98f00b204e9800998ecf8427e".into(), ..pod() }).unwrap();
    }

    #[test]
    fn names_outside_the_kubernetes_rules_are_refused() {
        for bad in ["", "-a", "a-", "A", "a_b", "a b", "ä", "a\n", "a.b", &"a".repeat(64)] {
            assert_eq!(refused_field(&Pod { namespace: bad.into(), ..pod() }), Some("namespace"), "{bad:?}");
        }
        for bad in ["", "a..b", ".a", "a.", "a/b", "a.-b", "../x", &"a".repeat(254)] {
            assert_eq!(refused_field(&Pod { name: bad.into(), ..pod() }), Some("name"), "{bad:?}");
        }
        for bad in ["", "a b", "a/b", &"a".repeat(65)] {
            assert_eq!(refused_field(&Pod { uid: bad.into(), ..pod() }), Some("uid"), "{bad:?}");
        }
    }

    #[test]
    fn addresses_no_pod_can_have_are_refused() {
        for bad in ["0.0.0.0", "127.0.0.1", "224.0.0.1", "::", "::1", "ff02::1", "::ffff:127.0.0.1"] {
            assert_eq!(refused_field(&Pod { address: bad.parse().unwrap(), ..pod() }), Some("address"), "{bad}");
        }
    }

    #[test]
    fn only_the_whole_node_token_matches() {
        let token = NodeToken::new(&format!("{}\n", "x".repeat(43))).unwrap();
        assert!(token.matches(&"x".repeat(43)));
        assert!(!token.matches(&"x".repeat(42)));
        assert!(!token.matches(""));
        assert!(NodeToken::new("short\n").is_err());
    }
}
