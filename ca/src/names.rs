//! Names of objects in Kubernetes, in the form its API server enforces.

/// Whether this may be the name of a namespace.
pub(crate) fn is_namespace(text: &str) -> bool {
    text.len() <= 63 && is_label(text)
}

/// Whether this may be the name of a pod, a node or a service account.
pub(crate) fn is_name(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

/// A DNS label in the sense of RFC 1123, lower case only; its length is bounded by the caller.
fn is_label(text: &str) -> bool {
    let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().is_some_and(is_alphanumeric)
        && bytes.last().is_some_and(is_alphanumeric)
        && bytes.iter().all(|byte| is_alphanumeric(byte) || *byte == b'-')
}
