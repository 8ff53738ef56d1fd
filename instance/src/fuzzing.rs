//! Entry points for fuzzing private decoders.

use crate::host::system_routes::{self, Overlay};

/// Decodes a datagram of route notifications from the kernel.
pub fn netlink(data: &[u8]) {
    let networks = ["10.42.0.0/16", "fd42::/64"].iter().filter_map(|network| network.parse().ok()).collect();
    let overlay = Overlay { networks, device: 7 };
    let changes = system_routes::changes(data, &overlay);
    // Each message has at least a header and a route.
    assert!(changes.len() <= data.len() / 28);
}
