//! Entry points for fuzzing private decoders.

use nebula_cert::issuance::{Reply, Trust};
use nebula_cert::{Curve, PrivateKey};

use crate::ca_client::answers;

/// Decodes a CA answer: two bytes of HTTP status, then the body.
pub fn ca_answer(data: &[u8]) {
    let Some((status, body)) = data.split_first_chunk() else { return };
    let status = u16::from_be_bytes(*status);
    let bounded = |error: &dyn std::fmt::Display| {
        let text = error.to_string();
        assert!(text.len() < 4096 && !text.contains(char::is_control), "it goes into a log line: {text:?}");
    };
    match answers::read::<Reply>(status, body) {
        Ok(reply) => {
            if let Ok(key) = PrivateKey::generate(Curve::Curve25519) {
                let _ = answers::accept(&reply, key, 1_800_000_000);
            }
        }
        Err(error) => bounded(&error),
    }
    if let Ok(trust) = answers::read::<Trust>(status, body) {
        let _ = answers::trust(&trust);
    }
}
