//! Entry points for fuzzing private decoders.

use nebula_cert::issuance::{Reply, Trust};
use nebula_cert::{Curve, PrivateKey};

use crate::ca_client::answers;
use crate::host::system_routes::{self, Overlay};

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

/// Decodes a datagram of route notifications from the kernel.
pub fn netlink(data: &[u8]) {
    let networks = ["10.42.0.0/16", "fd42::/64"].iter().filter_map(|network| network.parse().ok()).collect();
    let overlay = Overlay { networks, device: 7 };
    let changes = system_routes::changes(data, &overlay);
    // Each message has at least a header and a route.
    assert!(changes.len() <= data.len() / 28);
}
