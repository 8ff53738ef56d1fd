//! Entry points for the fuzzer to private decoders.

use nebula_cni_contract::netlink;

use crate::link::pod_link;
use crate::supervisor;

/// Decodes a message of the system bus.
pub fn dbus(data: &[u8]) {
    supervisor::fuzz_dbus(data);
}

/// Decodes a netlink datagram of the kernel about links.
pub fn netlink(data: &[u8]) {
    for body in netlink::messages(data).map(|message| message.body).chain([data]) {
        pod_link::fuzz(body);
    }
}
